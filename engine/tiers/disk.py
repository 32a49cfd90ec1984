"""The disk tier's files: blocks that are there after a crash, and never anything else.

Two files for each KV cache group.  ``data`` has one record of fixed size for each slot; its
checksum also covers key and generation, so that what an older use of the slot left behind is
never taken for what is wanted.  ``index`` says which records count: a header, then one entry for
each slot, at its place, each with a checksum, all of them written when the file is made.

* Data before index: a block is findable only when all of its bytes are written.
* Dropped before overwritten: an entry never names a slot whose content is about to go.
* A damaged entry is a miss of its slot and of no other, whatever it said.
* The note that a block is dropped takes the place of the one that it was put: a full disk has
  room for it, and no older note is left that could bring the block back.

Without ``durable`` nothing is flushed: that survives the death of the process, not of the machine.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Protocol
from zlib import crc32

_MAGIC = b"kvproof2"
_HEADER = Struct("<8sIII")
"""Magic, tokens of a block, bytes of its payload, slots."""
_CRC = Struct("<I")
_RECORD = Struct("<Q32sI")
"""Generation, key, length of the payload that follows."""
_ENTRY = Struct("<BQI32s")
"""Put or dropped, generation, slot, key."""
_HEADER_BYTES = _HEADER.size + _CRC.size
ENTRY_BYTES = _ENTRY.size + _CRC.size
_DROPPED, _PUT = 0, 1
_NO_KEY = bytes(32)
_NO_ENTRY = (_DROPPED, 0, -1, _NO_KEY)

Entry = tuple[int, bytes]
"""What a slot holds: its generation, which rises with each block that is put, and its key."""


class ShortWriteError(OSError):
    """Fewer bytes were written than given."""


class DiskFullError(OSError):
    """No space is left."""


class DamagedError(ValueError):
    """The files are not this tier's, or were made for blocks of another size."""


class Files(Protocol):
    """What the tier needs of a file system; tests put one that fails in its place."""

    def open(self, path: Path, *, empty: bool = False) -> int:
        """A file to read and write, made if it is not there; ``empty``: without its content."""
        ...

    def read_at(self, file: int, offset: int, length: int) -> bytes:
        """As many of these bytes as the file has."""
        ...

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        """How many bytes were written.  Raises OSError."""
        ...

    def flush(self, file: int) -> None: ...

    def flush_folder(self, folder: Path) -> None:
        """So that what was made in it, or took another's place, stays."""
        ...

    def replace(self, source: Path, target: Path) -> None: ...

    def close(self, file: int) -> None: ...


class OsFiles:
    """The operating system's files."""

    def open(self, path: Path, *, empty: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if empty else 0), 0o600)

    def read_at(self, file: int, offset: int, length: int) -> bytes:
        return os.pread(file, length, offset)

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        return os.pwrite(file, data, offset)

    def flush(self, file: int) -> None:
        os.fsync(file)

    def flush_folder(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def close(self, file: int) -> None:
        os.close(file)


class DiskFile:
    """The blocks of one group, ``slots`` of them, in two files in ``folder``.

    Raises ValueError for sizes that cannot be, and DamagedError if the files there are of another
    kind or of other sizes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        unit_tokens: int,
        payload_bytes: int,
        files: Files | None = None,
        durable: bool = False,
    ) -> None:
        for name, value in (("slots", slots), ("tokens", unit_tokens), ("bytes", payload_bytes)):
            if value < 1:
                raise ValueError(f"a disk tier with {value} {name}: at least one is needed")
        self.slots = slots
        self.payload_bytes = payload_bytes
        self.record_bytes = _CRC.size + _RECORD.size + payload_bytes
        self.entries: dict[int, Entry] = {}
        """Findable slots; as they were put, when the file is opened."""
        self.damaged: list[int] = []
        """Slots of which the entry was damaged when the file was opened: they are not findable."""
        self.data_path = folder / "data"
        self.index_path = folder / "index"
        self._header = _sealed(_HEADER.pack(_MAGIC, unit_tokens, payload_bytes, slots))
        self._files = files or OsFiles()
        self._durable = durable
        self._generation = 0
        self._owed: dict[int, Entry] = {}
        """Slots that do not count, though their entries may say so: these are to be dropped yet."""
        self._data = self._files.open(self.data_path)
        self._index = self._files.open(self.index_path)
        try:
            self._open_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The files stay."""
        self._files.close(self._data)
        self._files.close(self._index)

    # -- blocks ------------------------------------------------------------------------------------

    def put(self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        """Write these blocks into these slots, of which no entry speaks: all, or none counts.

        Raises ShortWriteError, DiskFullError or another OSError.
        """
        first, entries = self._generation + 1, dict[int, Entry]()
        for generation, (slot, key) in enumerate(zip(slots, keys, strict=True), first):
            entries[slot] = generation, key
        self._generation += len(slots)
        blocks = zip(slots, payloads, strict=True)
        records = {slot: self._record(*entries[slot], payload) for slot, payload in blocks}
        for slot, data in _runs(records):
            self._write(self._data, slot * self.record_bytes, data)
        self._flush(self._data)
        try:
            self._note(_PUT, entries)
        except OSError:
            self._owed |= entries
            self._pay()
            raise
        self.entries |= entries
        for slot in slots:
            self._owed.pop(slot, None)

    def drop(self, slots: Sequence[int]) -> dict[int, Entry]:
        """These slots do not count any more, and may be overwritten; says what they held.

        Raises OSError; then they still do.
        """
        dropped = {slot: self.entries[slot] for slot in slots}
        try:
            self._note(_DROPPED, self._owed | dropped)
        except OSError:
            self.restore(dropped)
            raise
        self._owed.clear()
        for slot in slots:
            del self.entries[slot]
        return dropped

    def restore(self, dropped: Mapping[int, Entry]) -> None:
        """These count again.  If not even that can be written, they do so up to a restart."""
        self.entries |= dropped
        with suppress(OSError):
            self._note(_PUT, dropped)

    def lose(self, slots: Sequence[int]) -> None:
        """What these hold is damaged: they do not count, also if no note of it can be written now.

        After a restart it would be found to be damaged again.
        """
        for slot in slots:
            self._owed[slot] = self.entries.pop(slot)
        self._pay()

    def _pay(self) -> None:
        """Drop what is to be dropped yet, if the disk takes it now."""
        with suppress(OSError):
            self.drop(())

    def get(self, slot: int, key: bytes) -> bytes | None:
        """The payload put there under this key; None if it is damaged, or is not there."""
        entry = self.entries.get(slot)
        found = self.read(slot)
        if found is None or entry != found[:2] or found[1] != key:
            return None
        return found[2]

    def lost(self, slot: int) -> bool:
        """Whether what was put into a slot cannot be read any more."""
        return self.get(slot, self.entries[slot][1]) is None

    def read(self, slot: int) -> tuple[int, bytes, bytes] | None:
        """What is really in a slot: generation, key and payload.

        None if it is no whole record, or if the disk does not give it back.
        """
        try:
            record = self._files.read_at(self._data, slot * self.record_bytes, self.record_bytes)
        except OSError:
            return None
        body = _unsealed(record)
        if body is None or len(record) < self.record_bytes:
            return None
        generation, key, length = _RECORD.unpack_from(body)
        return generation, key, body[_RECORD.size : _RECORD.size + length]

    def _record(self, generation: int, key: bytes, payload: bytes) -> bytes:
        if len(payload) != self.payload_bytes:
            raise ValueError(f"a block has {self.payload_bytes} bytes, not {len(payload)}")
        return _sealed(_RECORD.pack(generation, key, len(payload)) + payload)

    # -- the index ---------------------------------------------------------------------------------

    def _note(self, state: int, entries: Mapping[int, Entry]) -> None:
        notes = {
            slot: _sealed(_ENTRY.pack(state, generation, slot, key))
            for slot, (generation, key) in entries.items()
        }
        for first, data in _runs(notes):
            self._write(self._index, entry_offset(first), data)
        if notes:
            self._flush(self._index)

    def _open_index(self) -> None:
        header = self._files.read_at(self._index, 0, _HEADER_BYTES)
        if not header:
            self._make_index()
        elif header != self._header:
            raise DamagedError(f"{self.index_path} is no index of this tier, or of another size")
        else:
            self._read_index()

    def _make_index(self) -> None:
        """Of a tier in which nothing is yet; it takes its place at once, or not at all."""
        empty = [_sealed(_ENTRY.pack(_DROPPED, 0, slot, _NO_KEY)) for slot in range(self.slots)]
        beside = self.index_path.with_suffix(".new")
        new = self._files.open(beside, empty=True)
        try:
            self._write(new, 0, self._header + b"".join(empty))
            self._flush(new)
            self._files.replace(beside, self.index_path)
        except BaseException:
            self._files.close(new)
            raise
        self._files.close(self._index)
        self._index = new
        if self._durable:
            self._files.flush_folder(self.index_path.parent)

    def _read_index(self) -> None:
        table = self._files.read_at(self._index, _HEADER_BYTES, self.slots * ENTRY_BYTES)
        found: list[tuple[int, int, bytes]] = []
        for slot in range(self.slots):
            entry = _unsealed(table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
            state, generation, place, key = _ENTRY.unpack(entry) if entry else _NO_ENTRY
            if place != slot:
                self.damaged.append(slot)
                self._owed[slot] = 0, _NO_KEY
            elif state == _PUT:
                found.append((generation, slot, key))
            self._generation = max(self._generation, generation)
        found.sort()
        newest = {key: slot for _, slot, key in found}
        for generation, slot, key in found:
            entries = self.entries if newest[key] == slot else self._owed
            entries[slot] = generation, key
        self._pay()

    # -- writing -----------------------------------------------------------------------------------

    def _write(self, file: int, offset: int, data: bytes) -> None:
        try:
            written = self._files.write_at(file, offset, data)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(*error.args) from error
            raise
        if written < len(data):
            raise ShortWriteError(f"{written} of {len(data)} bytes were written")

    def _flush(self, file: int) -> None:
        if self._durable:
            self._files.flush(file)


def entry_offset(slot: int) -> int:
    """Where the index has the entry of a slot."""
    return _HEADER_BYTES + slot * ENTRY_BYTES


def _sealed(body: bytes) -> bytes:
    return _CRC.pack(crc32(body)) + body


def _unsealed(data: bytes) -> bytes | None:
    """What was sealed; None if it is not as it was."""
    if len(data) <= _CRC.size:
        return None
    body = data[_CRC.size :]
    return body if _CRC.unpack_from(data)[0] == crc32(body) else None


def _runs(records: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Records of adjacent slots joined, each with its first slot."""
    for first in sorted(slot for slot in records if slot - 1 not in records):
        last = first
        while last + 1 in records:
            last += 1
        yield first, b"".join([records[slot] for slot in range(first, last + 1)])
