"""The conditions of a measurement."""

from __future__ import annotations

import os
import platform
import time

from msgspec import Struct

_CALLS = 400_000


class MachineInfo(Struct, frozen=True):
    """Where it was measured."""

    python: str
    system: str
    processor: str
    cores: int


class Calibration(Struct, frozen=True):
    """How fast Python itself is here, at the time of the measurement."""

    empty_method_calls_per_second: float


class _Empty:
    def call(self) -> None:
        pass


def machine_info() -> MachineInfo:
    """This machine, in words."""
    return MachineInfo(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=platform.system(),
        processor=platform.machine(),
        cores=os.cpu_count() or 1,
    )


def calibrate(rounds: int = 5) -> Calibration:
    """Empty method calls a second, the best of a few rounds."""
    empty = _Empty()
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(_CALLS):
            empty.call()
        best = min(best, time.process_time() - started)
    return Calibration(_CALLS / best)
