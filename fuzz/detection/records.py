"""What was measured, as it is written to a file: one line a fault and driver, as each ends.

A run that is killed goes on with the same command: what the file has is not measured again, and
no line is ever changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from kvproof.fuzz.bench.machine_info import MachineInfo
from kvproof.invariants.errors import InputError

FORMAT = "kvproof-detection-1"


class Conditions(Struct, frozen=True, tag="conditions", tag_field="is"):
    """The first line: under what the rest was measured."""

    seed: str
    seeds: int
    """Searches of the seeded loop for each fault …"""
    seconds: float
    """… of so many CPU seconds at most …"""
    shrinks: int
    """… of which the first so many have their cases shrunk."""
    compare_seeds: int
    compare_seconds: float
    """The same for each driver that it is compared with."""
    machine: MachineInfo
    versions: dict[str, str]
    format: str = FORMAT


LOOP = "loop"
"""The driver that is measured: kvproof's seeded loop."""


class Trial(Struct, frozen=True, omit_defaults=True):
    """One search."""

    seconds: float
    """CPU seconds until the fault was found, or the search given up; shrinking excluded."""
    ops: int
    reached: bool = False
    """The faulty method was called."""
    triggered: bool = False
    """The failing run differs from the same one on the unmodified subject."""
    found: bool = False
    false_alarm: bool = False
    """What failed fails on the unmodified subject as well: it is not the fault that was found."""
    properties: tuple[str, ...] = ()
    """All that the failing run violated, as found or as shrunk."""
    shrunk_ops: int = 0
    shrink_seconds: float = 0.0
    """Both 0 if the case was not shrunk."""


class Row(Struct, frozen=True, tag="row", tag_field="is"):
    """One driver's searches for one fault."""

    fault: str
    driver: str
    calls_per_second: float
    """Empty Python method calls just before: how fast the machine was at that time."""
    trials: tuple[Trial, ...]


class CleanRun(Struct, frozen=True, tag="clean", tag_field="is"):
    """The unmodified subjects under the same search."""

    ops: int
    violations: int
    subjects: tuple[str, ...] = ()


Line = Conditions | Row | CleanRun
_decode = msgspec.json.Decoder(Line).decode


class Journal:
    """The lines of a file, or of a run that writes none."""

    def __init__(self, path: Path | None, conditions: Conditions) -> None:
        """Read what is there.

        Raises InputError if it was measured under other conditions, or is something else.
        """
        self.conditions = conditions
        self.rows: dict[tuple[str, str], Row] = {}
        self.clean = CleanRun(0, 0)
        self._path = path
        if path is not None and path.exists():
            self._read(path)
        if path is not None and (not path.exists() or not path.stat().st_size):
            self._append(conditions)

    def add(self, line: Row | CleanRun) -> None:
        """Keep a line, and write it now."""
        self._keep(line)
        if self._path is not None:
            self._append(line)

    def _keep(self, line: Line) -> None:
        if isinstance(line, Row):
            self.rows[line.fault, line.driver] = line
        elif isinstance(line, CleanRun):
            self.clean = line

    def _append(self, line: Line) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self, path: Path) -> None:
        """Half a line, which a process leaves that is killed while it writes, is cut off."""
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if not whole and not msgspec.json.encode(self.conditions).startswith(text[:20]):
            raise InputError(f"{path}: is no file of measurements")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._take(_decode(line), first=number == 1)
            except (msgspec.DecodeError, InputError) as error:
                raise InputError(f"{path}, line {number}: {error}") from None
        if whole != text:
            path.write_bytes(whole)

    def _take(self, line: Line, *, first: bool) -> None:
        if first != isinstance(line, Conditions):
            raise InputError("conditions come first, and only there")
        if isinstance(line, Conditions) and line != self.conditions:
            other = ", ".join(_differences(line, self.conditions))
            raise InputError(
                f"was measured under other conditions ({other}); measure into another file"
            )
        self._keep(line)


def _differences(there: Conditions, here: Conditions) -> Iterable[str]:
    for name in Conditions.__struct_fields__:
        before, now = getattr(there, name), getattr(here, name)
        if before != now:
            yield f"{name}: {before} there, {now} now"
