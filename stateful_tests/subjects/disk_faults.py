"""Files that fail when told to: what a disk can do to the tier that lives on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

from kvproof.engine.tiers.disk import DiskFile, OsFiles

Fault = Literal["short_write", "disk_full"]
_Place = tuple[Literal["data", "index"], Literal[0, 1]]
_STAGES: tuple[_Place | None, ...] = (("data", 0), ("data", 1), ("index", 0), ("index", 1), None)
"""By stage: in the writing of which file the tier dies, and how many halves of it are written."""


class Crashed(BaseException):
    """The disk tier is dead.  Nothing that handles errors may handle this one."""


class FaultyFiles(OsFiles):
    """The operating system's files; the next write fails if armed."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._fault: Fault | None = None
        self._dies: _Place | None = None

    def arm(self, fault: Fault) -> None:
        """The next write has no space, or writes only half of what it is given."""
        self._fault = fault

    def die_at(self, stage: int) -> None:
        """The tier dies while it writes a copy: see :class:`Restart` for the stages."""
        self._dies = _STAGES[stage]

    def disarm(self) -> None:
        """From now on nothing fails."""
        self._fault = self._dies = None

    def open(self, path: Path, *, empty: bool = False) -> int:
        file = super().open(path, empty=empty)
        self._names[file] = path.stem
        return file

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            if fault == "disk_full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write_at(file, offset, data[: len(data) // 2])
        if self._dies is not None and self._dies[0] == self._names[file]:
            super().write_at(file, offset, data[: len(data) // 2 * self._dies[1]])
            raise Crashed
        return super().write_at(file, offset, data)


def flip_byte(file: DiskFile, slot: int, byte: int) -> None:
    """Damage one byte of what a slot holds; not by an exclusive or, or a second time healed it."""
    offset = slot * file.record_bytes + byte % file.record_bytes
    with file.data_path.open("r+b") as data:
        data.seek(offset)
        value = data.read(1)[0]
        data.seek(offset)
        data.write(bytes([(value + 1) % 256]))
