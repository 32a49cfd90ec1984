"""Poison: what a masked-off lane of a load without ``other=`` gets, and how it is known again.

The interpreter leaves zeros there, a GPU whatever a register held.  Poison is a NaN with a mark
in its payload, which arithmetic and casts hand on, so that a store tells where it came from.  What
is masked away again (``tl.where``, a masked store) is not reported: such a load is no fault.

Six bits below the quiet bit hold the mark: they are those that survive a cast to bfloat16.
float8 has no payload; ``kvproof.kernels.shims`` keeps marked NaNs of it apart, without a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.kernels.sanitizer.reports import Location
from kvproof.kernels.shims import (
    FLOAT8_MARKED_NAN,
    FLOAT8_MAX,
    MARK_OF_FLOAT8,
    MARK_SHIFT,
    MARKS,
    QUIET_NAN,
)

LAST_MARK = MARK_OF_FLOAT8 - 1
"""Mark of the last place that has one of its own, and of all later ones."""

_LAYOUTS: dict[str, tuple[int, int]] = {
    "bf16": (0x7FC0, 0),
    "fp16": (0x7E00, 3),
    "fp32": (QUIET_NAN, MARK_SHIFT),
    "fp64": (0x7FF8 << 48, 45),
}
"""Per type: a quiet NaN without payload, and how far the mark is shifted."""


class Poison:
    """Makes poison and knows it again.

    Not ``active``: masked-off lanes get zeros, as from the interpreter.  Not ``integers``: those
    of integer loads do; arithmetic with poison would overflow where zero does not.
    """

    def __init__(self, active: bool, integers: bool = True) -> None:
        self.active, self.integers = active, integers
        self._places: list[Location] = []

    def lanes(
        self, shape: tuple[int, ...], type_name: str, kind: np.dtype[Any], place: Location
    ) -> NDArray[Any]:
        """What the lanes of a tile get where its mask is off.

        Args:
            shape: Of the tile.
            type_name: Triton's name of the element type.
            kind: The numpy type that the interpreter keeps it in.
            place: The load.
        """
        integer = type_name not in _LAYOUTS and type_name not in FLOAT8_MAX
        if not self.active or (integer and not self.integers):
            return np.zeros(shape, kind)
        if type_name in FLOAT8_MAX:
            return np.full(shape, FLOAT8_MARKED_NAN, kind)
        if type_name in _LAYOUTS:
            nan, shift = _LAYOUTS[type_name]
            bits = np.full(shape, nan | self._mark(place) << shift, f"u{kind.itemsize}")
            return bits.view(kind)
        if kind == np.bool_:
            return np.ones(shape, kind)
        # An address made of it is far from everything, and is reported as such.
        return np.full(shape, int.from_bytes(b"\x7f" * kind.itemsize, "little"), kind)

    def _mark(self, place: Location) -> int:
        if place not in self._places:
            self._places.append(place)
        return min(self._places.index(place) + 1, LAST_MARK)

    def found_in(
        self, values: NDArray[Any], type_name: str, mask: NDArray[np.bool_]
    ) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Where poison in the lanes of ``mask`` came from, in words, with its lanes."""
        if not self.active:
            return
        if type_name in FLOAT8_MAX:
            marks = np.where(values == FLOAT8_MARKED_NAN, MARK_OF_FLOAT8, 0)
        elif type_name in _LAYOUTS:
            marks = _marks(values, *_LAYOUTS[type_name])
        else:
            return
        marks = np.where(mask, marks, 0)
        for mark in np.unique(marks[marks > 0]):
            yield self._origin(int(mark)), marks == mark

    def _origin(self, mark: int) -> str:
        if mark == MARK_OF_FLOAT8:
            return " of a float8 load"
        if mark == LAST_MARK and len(self._places) > LAST_MARK:
            return ""
        return f" at {self._places[mark - 1]}"


def _marks(values: NDArray[Any], nan: int, shift: int) -> NDArray[np.int64]:
    """The mark of each value, 0 for none."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape)
    marks = (bits >> shift) & MARKS
    exactly = bits == (marks << shift | nan)
    return np.where(exactly, marks, 0).astype(np.int64)
