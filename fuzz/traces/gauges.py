"""What figures are made of: levels over virtual time, percentiles, rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct


class Gauge(Struct, frozen=True):
    """A level over virtual time."""

    mean: float
    minimum: float
    maximum: float

    def times(self, factor: float) -> Gauge:
        """The same level in another unit: ``factor`` of it make one of this."""
        return Gauge(self.mean * factor, self.minimum * factor, self.maximum * factor)

    def below(self, total: int) -> Gauge:
        """What is left of ``total``."""
        return Gauge(total - self.mean, total - self.maximum, total - self.minimum)


class Percentiles(Struct, frozen=True):
    """Percentiles over requests; numpy's linear interpolation."""

    p50: float
    p90: float
    p99: float


class Level:
    """Collects a gauge: remembers since when the present value holds."""

    __slots__ = ("area", "maximum", "minimum", "since_ns", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = self.minimum = self.maximum = value
        self.since_ns = 0
        self.area = 0

    def set(self, value: int, now_ns: int) -> None:
        """From ``now_ns`` on the level is ``value``."""
        self.area += self.value * (now_ns - self.since_ns)
        self.since_ns = now_ns
        self.value = value
        if value > self.maximum:
            self.maximum = value
        elif value < self.minimum:
            self.minimum = value

    def gauge(self, end_ns: int) -> Gauge:
        """Mean and extremes from 0 to ``end_ns``."""
        mean = self.area_until(end_ns) / end_ns if end_ns else float(self.value)
        return Gauge(mean, self.minimum, self.maximum)

    def area_until(self, end_ns: int) -> int:
        """The level summed up over the nanoseconds from 0 to ``end_ns``."""
        return self.area + self.value * (end_ns - self.since_ns)


def rate(count: int, virtual_seconds: float) -> float:
    """How many a second."""
    return count / virtual_seconds if virtual_seconds else 0.0


def percentiles(column: np.ndarray | Sequence[float]) -> Percentiles:
    """Of the values of a column."""
    return Percentiles(*(float(value) for value in np.percentile(column, (50, 90, 99))))
