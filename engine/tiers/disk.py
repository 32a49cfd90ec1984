"""The disk tier's files: blocks that are there after a crash, and never anything else.

Two files for each KV cache group.  ``data`` has one record of fixed size for each slot; its
checksum also covers key and generation, so that what an older use of the slot left behind is
never taken for what is wanted.  ``index`` says which record counts: a header, then one entry for
each block put or dropped, each with a checksum, appended in the order of the events.

* Data before index: a block is findable only when all of its bytes are written.
* Dropped before overwritten: an entry never names a slot whose content is about to go.
* Opening reads entries up to the first that is damaged, of which the last on each slot counts,
  and writes the index anew, through a file beside it that takes its place at once.

Without ``durable`` nothing is flushed: that survives the death of the process, not of the machine.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Protocol
from zlib import crc32

_MAGIC = b"kvproof1"
_HEADER = Struct("<8sIII")
"""Magic, tokens of a block, bytes of its payload, slots."""
_CRC = Struct("<I")
_RECORD = Struct("<Q32sI")
"""Generation, key, length of the payload that follows."""
_ENTRY = Struct("<BQI32s")
"""Put or drop, generation, slot, key."""
_HEADER_BYTES = _HEADER.size + _CRC.size
_ENTRY_BYTES = _ENTRY.size + _CRC.size
_DROP, _PUT = 0, 1
_ENTRIES_KEPT = 8
"""Entries a slot, on average, before the index is written anew."""


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

    def truncate(self, file: int, length: int) -> None: ...

    def flush(self, file: int) -> None: ...

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

    def truncate(self, file: int, length: int) -> None:
        os.ftruncate(file, length)

    def flush(self, file: int) -> None:
        os.fsync(file)

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
        self.entries: dict[int, tuple[int, bytes]] = {}
        """Findable slots, in the order in which they were put: generation and key."""
        self.data_path = folder / "data"
        self._index_path = folder / "index"
        self._header = _sealed(_HEADER.pack(_MAGIC, unit_tokens, payload_bytes, slots))
        self._files = files or OsFiles()
        self._durable = durable
        self._generation = 0
        self._end = 0
        """Bytes of the index that count; what a failed append left behind them does not."""
        self._data = self._files.open(self.data_path)
        self._index = self._files.open(self._index_path)
        self._read_index()
        self._rewrite_index()

    def close(self) -> None:
        """The files stay."""
        self._files.close(self._data)
        self._files.close(self._index)

    # -- blocks ------------------------------------------------------------------------------------

    def put(self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        """Write these blocks into these slots, of which no entry speaks: all, or none counts.

        Raises ShortWriteError or DiskFullError.
        """
        self._generation += 1
        parts = zip(slots, keys, payloads, strict=True)
        records = {slot: self._record(key, payload) for slot, key, payload in parts}
        for first, data in _runs(records):
            self._write(self._data, first * self.record_bytes, data)
        self._flush(self._data)
        self._append([(_PUT, self._generation, *place) for place in zip(slots, keys, strict=True)])
        for slot, key in zip(slots, keys, strict=True):
            self.entries[slot] = self._generation, key

    def drop(self, slots: Sequence[int]) -> None:
        """These slots do not count any more, and may be overwritten.

        Raises ShortWriteError or DiskFullError; then they still do.
        """
        if not slots:
            return
        if self._end > (1 + self.slots) * _ENTRIES_KEPT * _ENTRY_BYTES:
            self._rewrite_index()
        self._append(
            [(_DROP, self.entries[slot][0], slot, self.entries[slot][1]) for slot in slots]
        )
        for slot in slots:
            del self.entries[slot]

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
        """What is really in a slot: generation, key and payload; None if it is no whole record."""
        record = self._files.read_at(self._data, slot * self.record_bytes, self.record_bytes)
        body = _unsealed(record)
        if body is None or len(record) < self.record_bytes:
            return None
        generation, key, length = _RECORD.unpack_from(body)
        return generation, key, body[_RECORD.size : _RECORD.size + length]

    def _record(self, key: bytes, payload: bytes) -> bytes:
        if len(payload) != self.payload_bytes:
            raise ValueError(f"a block has {self.payload_bytes} bytes, not {len(payload)}")
        return _sealed(_RECORD.pack(self._generation, key, len(payload)) + payload)

    # -- the index ---------------------------------------------------------------------------------

    def _append(self, entries: Sequence[tuple[int, int, int, bytes]]) -> None:
        data = b"".join([_sealed(_ENTRY.pack(*entry)) for entry in entries])
        try:
            self._write(self._index, self._end, data)
        except OSError:
            # Whole entries may be among what was written: they must not count later.
            self._files.truncate(self._index, self._end)
            raise
        self._flush(self._index)
        self._end += len(data)

    def _read_index(self) -> None:
        header = self._files.read_at(self._index, 0, _HEADER_BYTES)
        if header and header != self._header:
            raise DamagedError(f"{self._index_path} is no index of this tier, or of another size")
        offset = _HEADER_BYTES
        while entry := _unsealed(self._files.read_at(self._index, offset, _ENTRY_BYTES)):
            kind, generation, slot, key = _ENTRY.unpack(entry)
            self.entries.pop(slot, None)
            if kind == _PUT:
                self.entries[slot] = generation, key
            self._generation = max(self._generation, generation)
            offset += _ENTRY_BYTES

    def _rewrite_index(self) -> None:
        """Write the index anew, as short as it can be; it takes the old one's place at once."""
        beside = self._index_path.with_suffix(".new")
        entries = [(_PUT, entry[0], slot, entry[1]) for slot, entry in self.entries.items()]
        data = self._header + b"".join([_sealed(_ENTRY.pack(*entry)) for entry in entries])
        new = self._files.open(beside, empty=True)
        try:
            self._write(new, 0, data)
            self._flush(new)
            self._files.replace(beside, self._index_path)
        except OSError:
            self._files.close(new)
            raise
        self._files.close(self._index)
        self._index, self._end = new, len(data)

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
