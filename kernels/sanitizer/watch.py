"""The sanitizer proper: judges each access of a kernel against the registered tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kvproof.kernels.sanitizer.memory import AddressMap, Bools, Ints, Shadow
from kvproof.kernels.sanitizer.poison import Poison
from kvproof.kernels.sanitizer.regions import Region
from kvproof.kernels.sanitizer.reports import Kind, Location, Program, Report, SanitizerError

SequenceOf: TypeAlias = Callable[[Program], int | None]
"""Which sequence a program works for; None where it works for several or for none."""

LAUNCH_BITS = 40
"""A program's key is its launch above so many bits, and below them its number plus one."""

SEVERAL = (1 << LAUNCH_BITS) - 1
"""Stands for a program's number where several have read an element."""

LARGE_BYTES = 1 << 28
"""A tensor that nobody has named and that is larger is checked for its bounds only."""

_NOT_KERNELS = (
    str(Path(triton.__file__).parent),
    str(Path(np.__file__).parent),
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent / "shims.py"),
    str(Path(__file__).parent.parent / "speed.py"),
)
"""Frames of these files stand between a kernel's line and the sanitizer."""


def kernel_location() -> Location:
    """The innermost line of a kernel, or of a helper that it calls, that is now running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_KERNELS):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Sanitizer:
    """Watches the launches of a ``with sanitize(...)`` block; get one from there.

    ``reports`` holds what was found so far, one report per kind, tensor and line.
    """

    def __init__(
        self, sequence_of: SequenceOf | None, poison: Poison, is_fresh: Callable[..., bool]
    ) -> None:
        self.reports: list[Report] = []
        self.poison = poison
        self._is_fresh = is_fresh
        self.launches = 0
        self._sequence_of = sequence_of
        self._memory = AddressMap()
        self._named: dict[str, Shadow] = {}
        self._found: dict[tuple[Kind, str | None, Location | None], Report] = {}
        self._program = Program("", (0, 0, 0), (1, 1, 1))
        self._key = 0
        self._sequence: int | None = None
        self._synchronised = 0
        """Key of the last program that ran an atomic: it may have waited for other programs."""

    # What a test says and asks.

    def works_for(self, sequence_of: SequenceOf) -> None:
        """Say which sequence each program works for, from the next program on."""
        self._sequence_of = sequence_of

    def declare(self, **regions: torch.Tensor | Region) -> None:
        """Register tensors by the names that reports give them; a bare tensor may only be read.

        Raises:
            ValueError: A name is taken, or a tensor shares memory with another one.
        """
        for name, region in regions.items():
            if name in self._named:
                raise ValueError(f"'{name}' is registered already")
            region = region if isinstance(region, Region) else Region(region)
            self._add(name, region, exclusive=True)

    def read_counts(self, name: str) -> torch.Tensor:
        """How often each element of a tensor was read, int32 of the tensor's shape."""
        shadow = self._counted(name)
        return shadow.shaped(shadow.reads)

    def write_counts(self, name: str) -> torch.Tensor:
        """How often each element of a tensor was written, int32 of the tensor's shape."""
        shadow = self._counted(name)
        return shadow.shaped(shadow.writes)

    def _counted(self, name: str) -> Shadow:
        if name not in self._named:
            raise KeyError(f"no tensor '{name}'; there are: {', '.join(self._named) or 'none'}")
        if self._named[name].region.bounds_only:
            raise ValueError(f"'{name}' is checked for its bounds only, nothing is counted")
        return self._named[name]

    def check(self) -> None:
        """Raise a ``SanitizerError`` if there is anything to report, unwritten outputs included."""
        for shadow in self._named.values():
            if shadow.region.complete:
                self._look_for_unwritten(shadow)
        if self.reports:
            raise SanitizerError(self.reports)

    def _look_for_unwritten(self, shadow: Shadow) -> None:
        missing = shadow.writes == 0
        for mask in (shadow.present, shadow.allowed):
            if mask is not None:
                missing &= mask
        if (Kind.UNWRITTEN, shadow.name, None) in self._found or not missing.any():
            return
        elements = np.flatnonzero(missing)
        first = shadow.describe(int(elements[0]))
        self._report(
            *(Kind.UNWRITTEN, shadow, int(elements[0]), None),
            f"no program wrote {first}, nor {len(elements) - 1} more elements",
        )

    # What the interpreter tells.

    def before_launch(self, kernel: str, arguments: Mapping[str, object]) -> None:
        """A kernel is about to run: note it, and register what it is given and nobody has named."""
        self.launches += 1
        self._program = Program(kernel, (0, 0, 0), (1, 1, 1))
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor) and not self._memory.covers(tensor):
                region = Region(
                    tensor,
                    writable=True,
                    initialised=not self._is_fresh(tensor),
                    bounds_only=tensor.untyped_storage().nbytes() > LARGE_BYTES,
                )
                self._add(self._free_name(name), region, exclusive=False)

    def _free_name(self, name: str) -> str:
        names = (name if number == 1 else f"{name}#{number}" for number in range(1, 1 << 30))
        return next(candidate for candidate in names if candidate not in self._named)

    def _add(self, name: str, region: Region, *, exclusive: bool) -> None:
        shadow = Shadow(name, region)
        self._memory.add(shadow, exclusive=exclusive)
        self._named[name] = shadow

    def before_program(self, index: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self._program = Program(self._program.kernel, index, grid)
        number = (index[0] * grid[1] + index[1]) * grid[2] + index[2]
        self._key = (self.launches << LAUNCH_BITS) + number + 1
        self._sequence = None if self._sequence_of is None else self._sequence_of(self._program)

    def written_by_torch(self, tensor: torch.Tensor) -> None:
        """A tensor was written to between launches: all of its storage counts as initialised."""
        storage = tensor.untyped_storage().data_ptr()
        for shadow in self._memory.shadows:
            if not shadow.region.bounds_only and storage == (
                shadow.tensor.untyped_storage().data_ptr()
            ):
                shadow.initialised[:] = True

    def overflowed(self, message: str, lanes: int) -> None:
        """An integer result does not fit into 32 bits; Triton's message names the operation."""
        operation = message.rsplit(" ", 1)[-1]
        self._report(
            *(Kind.OVERFLOW, None, None, kernel_location()),
            f"the result of an integer '{operation}' does not fit into its 32 bits",
            lanes,
        )

    def read(self, pointers: Any, mask: Any, item_bytes: int) -> Bools:
        """Judge a load; returns which lanes (of the pointers' shape) may be carried out."""
        return self._access(pointers, mask, item_bytes, self._judge_read)

    def write(
        self, pointers: Any, values: Any, type_name: str, mask: Any, item_bytes: int
    ) -> Bools:
        """Judge a store of ``values``; returns which lanes may be carried out."""
        good = self._access(pointers, mask, item_bytes, self._judge_write)
        self._look_for_poison(pointers, values, type_name, good)
        return good

    def update(self, pointers: Any, mask: Any, item_bytes: int) -> Bools:
        """Judge an atomic operation; returns which lanes may be carried out."""
        self.synchronise()
        return self._access(pointers, mask, item_bytes, self._judge_update)

    def synchronise(self) -> None:
        """The program waits for, or tells, another: from here on races are not told from order."""
        self._synchronised = self._key

    def _access(
        self,
        pointers: Any,
        mask: Any,
        item_bytes: int,
        judge: Callable[[Shadow, Ints], None],
    ) -> Bools:
        addresses = np.asarray(pointers)
        good = np.array(np.broadcast_to(np.asarray(mask, bool), addresses.shape), order="C")
        lanes = np.flatnonzero(good)
        if not lanes.size:
            return good
        active = addresses.reshape(-1)[lanes]
        for shadow, chosen in self._memory.split(active):
            if shadow is None:
                dead, here = np.ones(active[chosen].size, np.bool_), active[chosen]
                self._report_wild(int(here[0]), int(dead.sum()))
            else:
                dead, elements = self._locate(shadow, active[chosen], item_bytes)
                if elements.size:
                    judge(shadow, elements)
                if not shadow.region.writable and judge != self._judge_read:
                    dead[:] = True
            good.reshape(-1)[lanes[chosen][dead]] = False
        return good

    def _locate(
        self, shadow: Shadow, addresses: NDArray[np.uint64], item_bytes: int
    ) -> tuple[Bools, Ints]:
        """Which addresses lead astray, and the elements of those that do not."""
        offsets = (addresses - np.uint64(shadow.low)).astype(np.int64)
        odd = offsets % shadow.item_bytes != 0
        if item_bytes != shadow.item_bytes or odd.any():
            what = f"{item_bytes} bytes at once" if not odd.any() else "an unaligned address"
            self._report(
                *(Kind.WIDTH, shadow, int(offsets[0]) // shadow.item_bytes, kernel_location()),
                f"{what} of '{shadow.name}', whose elements have {shadow.item_bytes} bytes",
                len(offsets),
            )
        astray = offsets + item_bytes > shadow.span * shadow.item_bytes
        if astray.any():
            first = int(addresses[astray][0])
            self._report(
                *(Kind.OUT_OF_BOUNDS, shadow, None, kernel_location()),
                f"an access of {item_bytes} bytes at {first:#x} ends past '{shadow.name}'",
                int(astray.sum()),
            )
        return astray, offsets[~astray] // shadow.item_bytes

    def _report_wild(self, address: int, lanes: int) -> None:
        near, detail = self._memory.nearest(address)
        self._report(Kind.OUT_OF_BOUNDS, near, None, kernel_location(), detail, lanes)

    def _judge_read(self, shadow: Shadow, elements: Ints) -> None:
        if not shadow.region.readable:
            self._blame(Kind.WRITE_ONLY, shadow, elements, "{} is read")
        if shadow.region.bounds_only:
            return
        self._judge_place(shadow, elements)
        self._judge_initialised(shadow, elements)
        self._judge_reading_race(shadow, elements)
        np.add.at(shadow.reads, elements, 1)

    def _judge_write(self, shadow: Shadow, elements: Ints) -> None:
        if not shadow.region.writable:
            self._blame(Kind.READ_ONLY, shadow, elements, "{} is written to")
        if shadow.region.bounds_only:
            return
        self._judge_place(shadow, elements)
        unique, counts = np.unique(elements, return_counts=True)
        if unique.size != elements.size:
            self._blame(
                *(Kind.DUPLICATE_LANES, shadow, unique[counts > 1]),
                "{} is written by several lanes of one store",
            )
        self._judge_writing_race(shadow, elements)
        np.add.at(shadow.writes, elements, 1)
        shadow.initialised[elements] = True

    def _judge_update(self, shadow: Shadow, elements: Ints) -> None:
        for may, kind in (
            (shadow.region.readable, Kind.WRITE_ONLY),
            (shadow.region.writable, Kind.READ_ONLY),
        ):
            if not may:
                self._blame(kind, shadow, elements, "{} is updated by an atomic operation")
        if shadow.region.bounds_only:
            return
        self._judge_place(shadow, elements)
        self._judge_initialised(shadow, elements)
        np.add.at(shadow.reads, elements, 1)
        np.add.at(shadow.writes, elements, 1)

    def _judge_place(self, shadow: Shadow, elements: Ints) -> None:
        if shadow.allowed is not None:
            allowed = shadow.allowed[elements]
            if not allowed.all():
                self._blame(
                    Kind.FORBIDDEN, shadow, elements[~allowed], "{} may not be touched at all"
                )
                elements = elements[allowed]
        own = None if self._sequence is None else shadow.of_sequence(self._sequence)
        if own is None:
            return
        strange = elements[~own[elements]]
        if strange.size:
            others = shadow.owners(int(strange[0]))
            self._blame(
                *(Kind.OTHER_SEQUENCE, shadow, strange),
                f"{{}} belongs to sequence {', '.join(map(str, others))}, and this program works "
                f"for sequence {self._sequence}",
            )

    def _judge_initialised(self, shadow: Shadow, elements: Ints) -> None:
        missing = elements[~shadow.initialised[elements]]
        if missing.size:
            self._blame(Kind.UNINITIALISED, shadow, missing, "{} is read, and was never written to")

    def _judge_reading_race(self, shadow: Shadow, elements: Ints) -> None:
        clash = self._of_others(shadow.writer[elements])
        if clash.any():
            self._blame(
                *(Kind.RACE, shadow, elements[clash]),
                "{} is read, and " + self._name_of(shadow.writer[elements][clash][0]) + " of the "
                "same launch wrote it",
            )
        several = self._of_others(shadow.reader[elements])
        shadow.reader[elements] = np.where(
            several, (self.launches << LAUNCH_BITS) + SEVERAL, self._key
        )

    def _judge_writing_race(self, shadow: Shadow, elements: Ints) -> None:
        for keys, done in ((shadow.writer, "wrote"), (shadow.reader, "read")):
            clash = self._of_others(keys[elements])
            if clash.any():
                self._blame(
                    *(Kind.RACE, shadow, elements[clash]),
                    f"{{}} is written, and {self._name_of(keys[elements][clash][0])} of the same "
                    f"launch {done} it",
                )
        shadow.writer[elements] = self._key

    def _of_others(self, keys: Ints) -> Bools:
        """Which of the keys are of other programs of this launch that nothing puts in order."""
        if self._synchronised == self._key:
            return np.zeros(keys.shape, np.bool_)
        clash: Bools = (keys >> LAUNCH_BITS == self.launches) & (keys != self._key)
        return clash

    def _name_of(self, key: int) -> str:
        number = int(key) & SEVERAL
        if number == SEVERAL:
            return "several programs"
        _, height, depth = self._program.grid
        row, z = divmod(number - 1, depth)
        return f"program {(*divmod(row, height), z)}"

    def _look_for_poison(self, pointers: Any, values: Any, type_name: str, good: Bools) -> None:
        values = np.broadcast_to(np.asarray(values), good.shape)
        for origin, lanes in self.poison.found_in(values, type_name, good):
            address = int(np.asarray(pointers)[lanes].reshape(-1)[0])
            for shadow, _ in self._memory.split(np.array([address], np.uint64)):
                if shadow is not None:
                    element = (address - shadow.low) // shadow.item_bytes
                    self._report(
                        *(Kind.MISSING_OTHER, shadow, element, kernel_location()),
                        f"what is stored to {shadow.describe(element)} was loaded by a masked-off "
                        f"lane{origin}, and its load gives no other=",
                        int(lanes.sum()),
                    )

    def _blame(self, kind: Kind, shadow: Shadow, elements: Ints, detail: str) -> None:
        """Report the elements; ``{}`` in the detail stands for the first of them."""
        first = int(elements[0])
        place = kernel_location()
        text = detail.replace("{}", shadow.describe(first))
        self._report(kind, shadow, first, place, text, int(elements.size))

    def _report(
        self,
        kind: Kind,
        shadow: Shadow | None,
        element: int | None,
        location: Location | None,
        detail: str,
        lanes: int = 0,
    ) -> None:
        name = None if shadow is None else shadow.name
        key = (kind, name, location)
        report = self._found.get(key)
        if report is None:
            index = None if shadow is None or element is None else shadow.index(element)
            program = None if location is None else self._program
            report = Report(kind, name, index, detail, program, location)
            self._found[key] = report
            self.reports.append(report)
        if location is not None:
            report.lanes += lanes
            report.accesses += 1
