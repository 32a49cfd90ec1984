"""Files that fail when told to: what a disk can do to the tier that lives on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

from kvproof.engine.tiers.disk import ENTRY_BYTES, DiskFile, OsFiles, entry_offset
from kvproof.invariants.operations import DiskFile as WhichFile

Fault = Literal["short_write", "disk_full"]
_Place = tuple[WhichFile, Literal[0, 1]]
_STAGES: tuple[_Place | None, ...] = (("data", 0), ("data", 1), ("index", 0), ("index", 1), None)
"""By stage: in the writing of which file the tier dies, and how many halves of it are written."""


class Crashed(BaseException):
    """The disk tier is dead.  Nothing that handles errors may handle this one."""


class FaultyFiles(OsFiles):
    """The operating system's files; a write fails if armed."""

    def __init__(self) -> None:
        self._names: dict[int, WhichFile] = {}
        self._faults: dict[WhichFile, Fault] = {}
        self._dies: _Place | None = None

    def arm(self, fault: Fault, file: WhichFile = "data") -> None:
        """The next write to that file has no space, or writes only half of what it is given."""
        self._faults[file] = fault

    def die_at(self, stage: int) -> None:
        """The tier dies while it writes a copy: see :class:`Restart` for the stages."""
        self._dies = _STAGES[stage]

    def disarm(self) -> None:
        """From now on nothing fails."""
        self._faults.clear()
        self._dies = None

    def open(self, path: Path, *, empty: bool = False) -> int:
        file = super().open(path, empty=empty)
        self._names[file] = "index" if path.stem == "index" else "data"
        return file

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        name = self._names[file]
        fault = self._faults.pop(name, None)
        if fault is not None:
            if fault == "disk_full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write_at(file, offset, data[: len(data) // 2])
        if self._dies is not None and self._dies[0] == name:
            super().write_at(file, offset, data[: len(data) // 2 * self._dies[1]])
            raise Crashed
        return super().write_at(file, offset, data)


def flip_byte(file: DiskFile, slot: int, byte: int, which: WhichFile = "data") -> None:
    """Damage one byte of what a slot holds, or of its entry in the index.

    Not by an exclusive or, or a second time healed it.
    """
    path, first, length = file.data_path, slot * file.record_bytes, file.record_bytes
    if which == "index":
        path, first, length = file.index_path, entry_offset(slot), ENTRY_BYTES
    with path.open("r+b") as damaged:
        damaged.seek(first + byte % length)
        value = damaged.read(1)[0]
        damaged.seek(first + byte % length)
        damaged.write(bytes([(value + 1) % 256]))
