"""Shadow memory: what is known of each element of each registered tensor, found by address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvproof.kernels.sanitizer.regions import Region

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FAR_BYTES = 1 << 20
"""An address farther than this from every tensor is told as it is, not as an offset from one."""


class Shadow:
    """A region, flattened: element ``i`` of the shadow is the one ``i`` elements from the start.

    The span covers the gaps of a strided tensor; ``present`` is False in them, or None if there
    are none.  Keys of programs are those of ``Sanitizer``; 0 means none.
    """

    def __init__(self, name: str, region: Region) -> None:
        self.name, self.region, self.tensor = name, region, region.tensor
        tensor = region.tensor
        self.item_bytes = tensor.element_size()
        self.low = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        self.span = 1 + sum((n - 1) * stride for n, stride in steps) if tensor.numel() else 0
        self.high = self.low + self.span * self.item_bytes
        self.present = self._presence()
        self._sequences: dict[int, Bools] = {}
        if region.bounds_only:
            return
        self.allowed = self._allowed()
        self.initialised = np.full(self.span, region.initialised)
        self.reads = np.zeros(self.span, np.int32)
        self.writes = np.zeros(self.span, np.int32)
        self.reader = np.zeros(self.span, np.int64)
        self.writer = np.zeros(self.span, np.int64)

    def _presence(self) -> Bools | None:
        if self.span == self.tensor.numel() or self.region.bounds_only:
            return None
        return self.flat(torch.ones((), dtype=torch.bool))

    def _allowed(self) -> Bools | None:
        region = self.region
        allowed = region.allowed
        if region.by_sequence is not None:
            owned = region.by_sequence.any(0)
            allowed = owned if allowed is None else allowed & owned
        return None if allowed is None else self.flat(allowed)

    def flat(self, mask: torch.Tensor) -> Bools:
        """A mask of the tensor's shape (or one that broadcasts to it) over the span."""
        span = torch.zeros(self.span, dtype=torch.bool)
        shape, strides = list(self.tensor.shape), self.tensor.stride()
        mask = mask.expand(shape)
        for dim, stride in enumerate(strides):
            if not stride and shape[dim] > 1:  # expanded: its elements are one
                mask, shape[dim] = mask.any(dim, keepdim=True), 1
        if self.span:
            span.as_strided(shape, strides, 0).copy_(mask)
        result: Bools = span.numpy()
        return result

    def of_sequence(self, sequence: int) -> Bools | None:
        """The elements that belong to ``sequence``; None where elements belong to nobody."""
        owners = self.region.by_sequence
        if owners is None:
            return None
        if sequence not in self._sequences:
            self._sequences[sequence] = self.flat(owners[sequence])
        return self._sequences[sequence]

    def owners(self, element: int) -> list[int]:
        """The sequences that the element belongs to."""
        count = 0 if self.region.by_sequence is None else len(self.region.by_sequence)
        owned = ((s, self.of_sequence(s)) for s in range(count))
        return [sequence for sequence, mask in owned if mask is not None and mask[element]]

    def index(self, element: int) -> tuple[int, ...]:
        """The index in the tensor of an element of the span."""
        index = [0] * self.tensor.dim()
        strides = [(stride, dim) for dim, stride in enumerate(self.tensor.stride()) if stride]
        for stride, dim in sorted(strides, reverse=True):
            if self.tensor.shape[dim] > 1:
                index[dim], element = divmod(element, stride)
        return tuple(index)

    def describe(self, element: int) -> str:
        return f"{self.name}[{', '.join(map(str, self.index(element)))}]"

    def shaped(self, counts: NDArray[Any]) -> torch.Tensor:
        """Counts over the span in the tensor's shape."""
        return torch.from_numpy(counts).as_strided(self.tensor.shape, self.tensor.stride(), 0)


@dataclass
class _Segment:
    """Tensors whose spans overlap, as those of K and V in one allocation do; usually one."""

    low: int
    high: int
    shadows: list[Shadow]
    claims: NDArray[np.int16] | None = None
    """Per granule of the segment the shadow that it belongs to; None if there is one without gaps.

    -1 is a gap, in which nothing may be touched.
    """
    granule_bytes: int = 1

    def split(self, addresses: NDArray[np.uint64]) -> Iterator[tuple[Shadow | None, Any]]:
        if self.claims is None:
            yield self.shadows[0], slice(None)
            return
        offsets = (addresses - np.uint64(self.low)).astype(np.int64)
        claims = self.claims[offsets // self.granule_bytes]
        for claim in np.unique(claims):
            yield (self.shadows[claim] if claim >= 0 else None), np.flatnonzero(claims == claim)


class AddressMap:
    """From addresses to registered tensors."""

    def __init__(self) -> None:
        self.shadows: list[Shadow] = []
        self._segments: list[_Segment] = []
        self._lows: list[int] = []

    def add(self, shadow: Shadow, *, exclusive: bool) -> None:
        """Register a tensor.

        Elements that are registered already stay with their first tensor; that is a
        ``ValueError`` where the new tensor is ``exclusive``.
        """
        self.shadows.append(shadow)
        try:
            self._rebuild(shadow if exclusive else None)
        except ValueError:
            self.shadows.pop()
            raise

    def _rebuild(self, exclusive: Shadow | None) -> None:
        segments: list[_Segment] = []
        for shadow in sorted((s for s in self.shadows if s.span), key=lambda s: s.low):
            if segments and shadow.low < segments[-1].high:
                segments[-1].shadows.append(shadow)
                segments[-1].high = max(segments[-1].high, shadow.high)
            else:
                segments.append(_Segment(shadow.low, shadow.high, [shadow]))
        for segment in segments:
            if len(segment.shadows) > 1 or segment.shadows[0].present is not None:
                # In the order of registration, so that the first one keeps what it has.
                segment.shadows.sort(key=self.shadows.index)
                _claim(segment, exclusive)
        self._segments, self._lows = segments, [segment.low for segment in segments]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the first and the last element of ``tensor`` are registered."""
        probe = Shadow("", Region(tensor, bounds_only=True))
        if not probe.span:
            return True
        ends = np.array([probe.low, probe.high - probe.item_bytes], np.uint64)
        return all(shadow is not None for shadow, _ in self.split(ends))

    def split(self, addresses: NDArray[np.uint64]) -> Iterator[tuple[Shadow | None, Any]]:
        """Yield each shadow with the positions of the addresses in it; None for no tensor."""
        first, last = int(addresses.min()), int(addresses.max())
        place = bisect_right(self._lows, first) - 1
        if place >= 0 and last < self._segments[place].high:
            yield from self._segments[place].split(addresses)
            return
        places = np.searchsorted(np.array(self._lows, np.uint64), addresses, side="right") - 1
        highs = np.array([segment.high for segment in self._segments] or [0], np.uint64)
        places = np.where((places >= 0) & (addresses < highs[places]), places, -1)
        for number in np.unique(places):
            chosen = np.flatnonzero(places == number)
            if number < 0:
                yield None, chosen
                continue
            for shadow, within in self._segments[number].split(addresses[chosen]):
                yield shadow, chosen[within]

    def nearest(self, address: int) -> tuple[Shadow | None, str]:
        """The tensor near an address that belongs to none, and where it is, told from there."""
        if not self._segments:
            return None, f"{address:#x}, and no tensor is registered"
        shadow = min((s for s in self.shadows if s.span), key=lambda s: _distance(s, address))
        distance = _distance(shadow, address)
        if distance > FAR_BYTES:
            return None, f"{address:#x}, far from every registered tensor"
        if not distance:
            where = "in a gap between the elements"
        elif address < shadow.low:
            where = f"{distance} bytes before the start"
        else:
            where = f"{distance - 1} bytes past the end"
        return shadow, f"{where} of '{shadow.name}', {_kind_of(shadow.tensor)}"


def _distance(shadow: Shadow, address: int) -> int:
    """Bytes from an address to the nearest one of a tensor's span."""
    return max(0, shadow.low - address, address - shadow.high + 1)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _claim(segment: _Segment, exclusive: Shadow | None) -> None:
    """Write down, granule by granule, which tensor an address of the segment belongs to."""
    sizes = [shadow.item_bytes for shadow in segment.shadows]
    offsets = [shadow.low - segment.low for shadow in segment.shadows]
    granule = int(np.gcd.reduce([*sizes, *offsets]))
    segment.granule_bytes = granule
    claims = np.full((segment.high - segment.low) // granule, -1, np.int16)
    for number, shadow in enumerate(segment.shadows):
        present = np.ones(shadow.span, np.bool_) if shadow.present is None else shadow.present
        start = (shadow.low - segment.low) // granule
        part = claims[start : start + shadow.span * shadow.item_bytes // granule]
        wanted = np.repeat(present, shadow.item_bytes // granule)
        taken = wanted & (part >= 0)
        if shadow is exclusive and taken.any():
            other = segment.shadows[part[taken][0]].name
            raise ValueError(f"'{shadow.name}' and '{other}' share memory: register it once")
        part[wanted & (part < 0)] = number
    segment.claims = claims
