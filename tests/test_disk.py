"""The disk tier's files: what they hold, and that nothing else is ever read from them.

Torn writes, flipped bytes, a full disk, and death at any moment: of the tier (which the engine
outlives) and of the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest

from kvproof.engine.engine import Engine
from kvproof.engine.tiers.disk import (
    DamagedError,
    DiskFile,
    DiskFullError,
    Files,
    OsFiles,
    ShortWriteError,
)
from kvproof.engine.tiers.memory import PAYLOAD_BYTES, label, payload
from kvproof.invariants.operations import (
    Admit,
    Cancel,
    Complete,
    Corrupt,
    Evict,
    Fail,
    Finish,
    Launch,
    Offload,
    Operation,
    Promote,
    Reset,
    Restart,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.disk_faults import Crashed, FaultyFiles, flip_byte
from kvproof.stateful_tests.subjects.engine import EngineSubject

SLOTS = 6


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> bytes:
    return payload(key(number))


def disk(
    folder: Path,
    *,
    slots: int = SLOTS,
    unit_tokens: int = 4,
    payload_bytes: int = PAYLOAD_BYTES,
    files: Files | None = None,
    durable: bool = False,
) -> DiskFile:
    return DiskFile(
        folder,
        slots=slots,
        unit_tokens=unit_tokens,
        payload_bytes=payload_bytes,
        files=files,
        durable=durable,
    )


def put(file: DiskFile, **numbers: int) -> None:
    """``put(file, s2=7)``: block 7 into slot 2."""
    slots = [int(name[1:]) for name in numbers]
    file.put(slots, [key(n) for n in numbers.values()], [block(n) for n in numbers.values()])


def found(file: DiskFile) -> dict[int, int]:
    """The blocks that can be read, by slot; each must be what it is said to be."""
    blocks = {}
    for slot, (_, own) in file.entries.items():
        assert file.get(slot, own) == payload(own), f"slot {slot} holds something else"
        blocks[slot] = int.from_bytes(own, "big")
    return blocks


def reopened(file: DiskFile, folder: Path) -> dict[int, int]:
    file.close()
    return found(disk(folder))


# -- what is in the files -------------------------------------------------------------------------


def test_blocks_are_there_after_reopening_and_dropped_ones_are_not(tmp_path: Path) -> None:
    file = disk(tmp_path)
    put(file, s0=1, s1=2, s4=3)
    file.drop([1])
    put(file, s1=4)
    file.drop([0])
    assert found(file) == {4: 3, 1: 4}
    assert reopened(file, tmp_path) == {4: 3, 1: 4}


def test_the_format(tmp_path: Path) -> None:
    """Told a second time, from the description: whoever changes it breaks old files."""
    file = disk(tmp_path)
    put(file, s2=7)
    file.drop([2])
    file.close()
    body = struct.pack("<Q32sI", 1, key(7), PAYLOAD_BYTES) + block(7)
    record = struct.pack("<I", crc32(body)) + body
    assert (tmp_path / "data").read_bytes() == bytes(2 * len(record)) + record
    parts = [
        struct.pack("<8sIII", b"kvproof1", 4, PAYLOAD_BYTES, SLOTS),
        struct.pack("<BQI32s", 1, 1, 2, key(7)),
        struct.pack("<BQI32s", 0, 1, 2, key(7)),
    ]
    sealed = b"".join([struct.pack("<I", crc32(part)) + part for part in parts])
    assert (tmp_path / "index").read_bytes() == sealed


def test_opening_writes_a_short_index(tmp_path: Path) -> None:
    file = disk(tmp_path)
    for number in range(9):
        put(file, s0=number)
        file.drop([0])
    put(file, s3=1)
    file.close()
    index = tmp_path / "index"
    long = index.stat().st_size
    short = disk(tmp_path)
    assert found(short) == {3: 1}
    assert index.stat().st_size < long / 5
    assert not (tmp_path / "index.new").exists()
    put(short, s0=2)
    assert reopened(short, tmp_path) == {3: 1, 0: 2}


def test_the_index_does_not_grow_for_ever(tmp_path: Path) -> None:
    file = disk(tmp_path)
    put(file, s5=99)
    sizes = []
    for number in range(400):
        put(file, s0=number, s1=1000 + number)
        file.drop([0, 1])
        sizes.append((tmp_path / "index").stat().st_size)
    assert max(sizes) < 4000 < sum(b - a for a, b in pairwise(sizes) if b > a)
    assert reopened(file, tmp_path) == {5: 99}


def test_generations_rise_over_reopening(tmp_path: Path) -> None:
    file = disk(tmp_path)
    put(file, s0=1)
    put(file, s1=2)
    file.close()
    again = disk(tmp_path)
    put(again, s2=3)
    assert [generation for generation, _ in again.entries.values()] == [1, 2, 3]


@pytest.mark.parametrize("field", ["slots", "unit_tokens", "payload_bytes"])
def test_sizes_that_cannot_be_and_files_of_other_sizes(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match="at least one is needed"):
        disk(tmp_path, **{field: 0})
    disk(tmp_path).close()
    with pytest.raises(DamagedError, match="of another size"):
        disk(tmp_path, **{field: 8})


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"dear diary")
    with pytest.raises(DamagedError):
        disk(tmp_path)
    assert (tmp_path / "index").read_bytes() == b"dear diary"


def test_a_block_of_another_size_is_refused(tmp_path: Path) -> None:
    file = disk(tmp_path)
    with pytest.raises(ValueError, match="a block has 64 bytes, not 5"):
        file.put([0], [key(1)], [b"short"])
    assert reopened(file, tmp_path) == {}


class Recorder(OsFiles):
    """Notes what is done to which file, in order."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.done: list[str] = []

    def open(self, path: Path, *, empty: bool = False) -> int:
        file = super().open(path, empty=empty)
        self.names[file] = path.name.removesuffix(".new")
        return file

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        self.done.append(f"write {self.names[file]}")
        return super().write_at(file, offset, data)

    def flush(self, file: int) -> None:
        self.done.append(f"flush {self.names[file]}")
        super().flush(file)


@pytest.mark.parametrize("durable", [True, False])
def test_data_before_index_adjacent_slots_at_once(tmp_path: Path, durable: bool) -> None:
    recorder = Recorder()
    file = disk(tmp_path, files=recorder, durable=durable)
    recorder.done.clear()
    put(file, s4=1, s1=2, s0=3, s2=4)
    written = ["write data", "write data", "flush data", "write index", "flush index"]
    assert recorder.done == [step for step in written if durable or "flush" not in step]
    assert reopened(file, tmp_path) == {4: 1, 1: 2, 0: 3, 2: 4}


# -- damage ---------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_record_is_found(tmp_path: Path) -> None:
    for byte in range(disk(tmp_path).record_bytes):
        folder = tmp_path / str(byte)
        folder.mkdir()
        file = disk(folder)
        put(file, s0=1, s1=2, s2=3)
        flip_byte(file, 1, byte)
        assert file.get(1, key(2)) is None
        assert file.get(0, key(1)) == block(1)
        flip_byte(file, 1, byte)
        assert file.get(1, key(2)) is None, "a second flip is no repair"


def test_a_record_of_another_key_or_time_is_not_taken_for_it(tmp_path: Path) -> None:
    file = disk(tmp_path)
    put(file, s0=1)
    assert file.get(0, key(2)) is None
    file.drop([0])
    assert file.get(0, key(1)) is None
    file.entries[0] = 7, key(1)
    assert file.get(0, key(1)) is None, "whole, but from another generation"
    assert file.get(5, key(1)) is None, "never written"


def _history(folder: Path) -> tuple[bytes, list[tuple[int, dict[int, int]]]]:
    """An index, and after how many of its bytes it says what."""
    file, index, history = disk(folder), folder / "index", []

    def note() -> None:
        blocks = {slot: int.from_bytes(own, "big") for slot, (_, own) in file.entries.items()}
        history.append((index.stat().st_size, blocks))

    note()
    put(file, s0=1, s1=2)
    note()
    file.drop([0])
    note()
    put(file, s0=3)
    note()
    file.close()
    return index.read_bytes(), history


def _opened_with(folder: Path, index: bytes) -> dict[int, int]:
    """What such an index says, beside the data of the whole history; nothing wrong is read.

    What was overwritten since, as only a damaged index can say that it is there, is not read.
    """
    (folder / "index").write_bytes(index)
    file = disk(folder)
    blocks = {slot: int.from_bytes(own, "big") for slot, (_, own) in file.entries.items()}
    put(file, s5=9)
    file.close()
    again = disk(folder)
    assert again.get(5, key(9)) == block(9)
    for slot, number in blocks.items():
        assert again.get(slot, key(number)) in (block(number), None)
    return blocks


def test_an_index_torn_anywhere_says_what_it_said_before(tmp_path: Path) -> None:
    index, history = _history(tmp_path)
    entry = (len(index) - history[0][0]) // 4
    first_half = {0: 1}  # one of two entries of the same append
    for length in range(history[0][0], len(index) + 1):
        states = [blocks for size, blocks in history if size <= length]
        torn = history[0][0] + entry <= length < history[1][0]
        assert _opened_with(tmp_path, index[:length]) == (first_half if torn else states[-1])


def test_what_follows_a_damaged_entry_does_not_count(tmp_path: Path) -> None:
    index, history = _history(tmp_path)
    entry = (len(index) - history[0][0]) // 4
    states = [{}, {0: 1}, {0: 1, 1: 2}, {1: 2}]
    for byte in range(history[0][0], len(index)):
        damaged = bytearray(index)
        damaged[byte] ^= 0x40
        before = (byte - history[0][0]) // entry
        assert _opened_with(tmp_path, bytes(damaged)) == states[before]


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    index, _ = _history(tmp_path)
    for byte in range(24):
        damaged = bytearray(index)
        damaged[byte] ^= 1
        (tmp_path / "index").write_bytes(damaged)
        with pytest.raises(DamagedError):
            disk(tmp_path)


# -- writes that fail -----------------------------------------------------------------------------


class FailsAt(OsFiles):
    """The n-th write from now on fails: it has no space, or writes a part."""

    def __init__(self) -> None:
        self.left = -1
        self.part: float | None = None

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        self.left -= 1
        if self.left:
            return super().write_at(file, offset, data)
        if self.part is None:
            raise OSError(28, "No space left on device")
        return super().write_at(file, offset, data[: int(len(data) * self.part)])


@pytest.mark.parametrize("part", [None, 0.0, 0.5, 0.99])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_put_that_fails_leaves_nothing(tmp_path: Path, write: int, part: float | None) -> None:
    """Also no entry that was written whole, and would count once a shorter one precedes it."""
    files = FailsAt()
    file = disk(tmp_path, files=files)
    put(file, s0=1)
    files.left, files.part = write, part
    with pytest.raises(DiskFullError if part is None else ShortWriteError):
        put(file, s1=2, s3=3)
    assert found(file) == {0: 1}
    put(file, s1=4)
    assert found(file) == {0: 1, 1: 4}
    assert reopened(file, tmp_path) == {0: 1, 1: 4}


@pytest.mark.parametrize("part", [None, 0.0, 0.5])
def test_a_drop_that_fails_drops_nothing(tmp_path: Path, part: float | None) -> None:
    files = FailsAt()
    file = disk(tmp_path, files=files)
    put(file, s0=1, s1=2)
    files.left, files.part = 1, part
    with pytest.raises(OSError):
        file.drop([0, 1])
    assert found(file) == {0: 1, 1: 2}
    assert reopened(file, tmp_path) == {0: 1, 1: 2}


def test_other_errors_of_the_disk_are_told_as_they_are(tmp_path: Path) -> None:
    class Broken(OsFiles):
        def write_at(self, file: int, offset: int, data: bytes) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output") as raised:
        disk(tmp_path, files=Broken())
    assert not isinstance(raised.value, DiskFullError)


# -- the tier dies, the engine lives --------------------------------------------------------------


def prompt(tokens: int, source: int = 0) -> tuple[Segment, ...]:
    return (Segment(source, tokens),)


class World:
    """An engine with a disk, and what became of the last operation."""

    def __init__(self, folder: Path | None = None, **sizes: int) -> None:
        sizes = {"blocks": 8, "block_size": 4, "host_blocks": 4, "disk_blocks": 4, **sizes}
        configuration = Configuration(offload="both", **sizes)  # type: ignore[arg-type]

        def engine(*arguments: Any, **named: Any) -> Engine:
            return Engine(*arguments, **(named | ({"folder": folder} if folder else {})))

        self.subject = EngineSubject(configuration, engine=engine)
        self.hierarchy = self.subject.engine.hierarchy
        self.view = self.subject.view()

    def do(self, *operations: Operation) -> Outcome:
        self.subject.drain_events()
        for operation in operations:
            outcome = self.subject.apply(operation)
        self.events = self.subject.drain_events()
        return outcome

    def compute(self, tokens: int, source: int = 0) -> World:
        self.do(Admit(prompt(tokens, source)), Launch(), Retire(), Finish(0))
        return self

    def told(self, name: str) -> list[object]:
        return [event for event in self.events if type(event).__name__ == name]

    def on_disk(self) -> list[bytes | None]:
        """What the index of the disk says, and the bytes agree."""
        index = self.view.tier_index("disk", 0)
        content = [self.view.tier_content("disk", 0, slot) for slot in index.values()]
        assert content == list(index)
        return content


def stored(world: World) -> World:
    world.do(Offload(), Complete())
    return world


@pytest.mark.parametrize("stage", range(5))
def test_a_restart_finds_what_was_completed_and_nothing_wrong(stage: int) -> None:
    world = stored(World().compute(9))
    assert world.do(Offload("disk"), Complete()).status == "done"
    first = world.on_disk()
    stored(world.compute(9, source=1))
    assert world.do(Offload("disk")).count == 2
    outcome = world.do(Restart(stage=stage))
    assert (outcome.status, outcome.transfers) == ("done", (3,))
    ended, reopened = world.events
    assert (ended.result, ended.cause) == ("failed", "crash")  # type: ignore[attr-defined]
    keys = list(reopened.keys)  # type: ignore[attr-defined]
    assert keys == world.on_disk()
    assert keys[:2] == first
    # Half of the bytes of two entries is one entry, and it is whole.
    assert len(keys) == {0: 2, 1: 2, 2: 2, 3: 3, 4: 4}[stage]
    # What was not found is copied anew, what was found is not.
    assert world.do(Offload("disk")).count == (4 - len(keys))
    world.do(Complete())
    assert len(world.on_disk()) == 4


def test_a_restart_without_a_write_keeps_everything_and_fails_what_was_read() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8))
    world.do(Promote(prompt(9), to="host"))
    assert world.do(Restart()).transfers == (2,)
    assert len(world.on_disk()) == 2
    assert world.view.tier_pins("host", 0) == world.view.tier_pins("disk", 0) == [0] * 4
    assert not world.view.tier_index("host", 0)
    assert world.do(Promote(prompt(9), to="host"), Complete()).status == "done"
    assert len(world.view.tier_index("host", 0)) == 2


def test_a_new_engine_finds_what_the_old_one_saved(tmp_path: Path) -> None:
    old = stored(World(tmp_path).compute(9))
    old.do(Offload("disk"), Complete())
    new = World(tmp_path)
    assert new.on_disk() == old.on_disk()
    assert new.do(Admit(prompt(9), wait=True), Finish(0)).status == "done"
    new.do(Promote(prompt(9), to="host"), Complete(), Promote(prompt(9)), Complete())
    assert new.do(Admit(prompt(9))).cached_tokens == 8
    assert new.do(Offload("disk")).reason == "nothing_to_move"
    with pytest.raises(DamagedError, match="of another size"):
        World(tmp_path, block_size=8)


def test_a_dropped_block_stays_dropped() -> None:
    world = stored(World().compute(13))
    world.do(Offload("disk"), Complete(), Evict(2, "disk"))
    left = world.on_disk()
    assert len(left) == 1
    world.do(Restart())
    assert world.on_disk() == left


@pytest.mark.parametrize(("cause", "kind"), [("disk_full", DiskFullError), ("short_write", None)])
def test_a_full_disk_fails_the_copy_and_keeps_the_host_copy(
    cause: str, kind: type[OSError] | None
) -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"))
    world.do(Fail(cause=cause))  # type: ignore[arg-type]
    (ended,) = world.events
    assert (ended.result, ended.cause) == ("failed", cause)  # type: ignore[attr-defined]
    assert not world.on_disk()
    assert world.view.free_tier_count("disk", 0) == 4
    assert len(world.view.tier_index("host", 0)) == 2
    assert world.do(Offload("disk"), Complete()).status == "done"
    assert len(world.on_disk()) == 2


def test_a_damaged_block_is_dropped_and_never_served() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8))
    assert world.do(Corrupt(1, byte=70)).count == 1
    assert world.view.tier_content("disk", 0, 1) is None
    world.do(Promote(prompt(9), to="host"), Complete())
    ended, dropped = world.events[-2:]
    assert (ended.result, ended.cause) == ("failed", "corrupt")  # type: ignore[attr-defined]
    assert (dropped.cause, dropped.slots) == ("corrupt", [1])  # type: ignore[attr-defined]
    assert not world.view.tier_index("host", 0)
    assert world.view.metrics()["corrupt_blocks"] == 1
    assert world.do(Promote(prompt(9), to="host")).count == 1
    world.do(Restart())
    assert len(world.on_disk()) == 1


def test_a_damaged_block_is_dropped_even_if_no_note_can_be_written() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8), Corrupt(1, byte=70))
    world.do(Promote(prompt(9), to="host"))
    world.subject.files.arm("disk_full")
    world.do(Complete())
    assert [event.cause for event in world.events[-2:]] == ["corrupt"] * 2  # type: ignore[attr-defined]
    assert world.view.metrics()["corrupt_blocks"] == 1
    assert len(world.view.tier_index("disk", 0)) == 1
    assert world.view.free_tier_count("disk", 0) == 4


@pytest.mark.parametrize("method", ["put", "get"])
def test_an_error_of_the_disk_fails_the_copy(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stored(World().compute(9))
    if method == "put":
        world.do(Offload("disk"))
    else:
        world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8))
        world.do(Promote(prompt(9), to="host"))

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(DiskFile, method, broken)
    world.do(Complete())
    (ended,) = world.events
    assert (ended.result, ended.cause) == ("failed", "error")  # type: ignore[attr-defined]
    assert not world.view.transfers()


@pytest.mark.parametrize(
    "operation", [Offload("disk"), Evict(1, "disk"), Reset()], ids=["offload", "evict", "reset"]
)
def test_a_disk_without_room_for_the_note_that_a_block_goes_changes_nothing(
    operation: Operation,
) -> None:
    world = stored(World(disk_blocks=1).compute(5))
    world.do(Offload("disk"), Complete())
    stored(world.compute(5, source=1))
    before, index = world.on_disk(), dict(world.view.index(0))
    world.subject.files.arm("disk_full")
    with pytest.raises(DiskFullError):
        world.subject.apply(operation)
    assert (world.on_disk(), world.view.transfers()) == (before, [])
    assert (len(world.view.tier_index("host", 0)), dict(world.view.index(0))) == (2, index)
    assert world.do(operation).status == "done"


def test_a_block_that_another_copy_reads_is_not_dropped_yet() -> None:
    world = stored(World().compute(5))
    world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8), Corrupt())
    fetch = Promote(prompt(5), to="host")
    world.do(fetch, Cancel(), fetch)
    world.do(Complete(1))
    assert not world.told("SlotsEvicted")
    assert len(world.view.tier_index("disk", 0)) == 1
    world.do(Complete(), fetch, Complete())
    assert world.told("SlotsEvicted")
    assert world.view.metrics()["corrupt_blocks"] == 1


def test_what_nobody_wants_is_not_written() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Cancel(), Restart(stage=4))
    assert not world.on_disk()


def test_files_fail_only_when_told_to(tmp_path: Path) -> None:
    files = FaultyFiles()
    file = disk(tmp_path, files=files)
    files.arm("disk_full")
    with pytest.raises(DiskFullError):
        put(file, s0=1)
    put(file, s0=1)
    files.die_at(2)
    with pytest.raises(Crashed):
        put(file, s1=2)
    files.disarm()
    put(file, s2=3)
    assert reopened(file, tmp_path) == {0: 1, 2: 3}
    assert label(block(3)) == key(3)


# -- the process dies -----------------------------------------------------------------------------

Call = tuple[str, list[int], list[int]]


def plan(seed: int, calls: int) -> Iterator[Call]:
    """Puts of a few blocks into free slots, and drops; slots are used again at once."""
    rng, held, number = Random(seed), dict[int, int](), 0
    for _ in range(calls):
        free = [slot for slot in range(SLOTS) if slot not in held]
        if free and (not held or rng.random() < 0.5):
            slots = rng.sample(free, rng.randint(1, min(3, len(free))))
            numbers = [number + i for i in range(len(slots))]
            number += len(slots)
            held |= dict(zip(slots, numbers, strict=True))
            yield "put", slots, numbers
        else:
            slots = rng.sample(sorted(held), rng.randint(1, min(2, len(held))))
            yield "drop", slots, [held.pop(slot) for slot in slots]


def perform(file: DiskFile, call: Call) -> None:
    what, slots, numbers = call
    if what == "put":
        file.put(slots, [key(n) for n in numbers], [block(n) for n in numbers])
    else:
        file.drop(slots)


class Kills(OsFiles):
    """Kills its process in the n-th change that it makes: before it, half-way or after it."""

    def __init__(self, change: int, halves: int) -> None:
        self.left = change
        self.halves = halves

    def _now(self) -> bool:
        self.left -= 1
        return self.left == 0

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        if self._now():
            super().write_at(file, offset, data[: len(data) * self.halves // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_at(file, offset, data)

    def replace(self, source: Path, target: Path) -> None:
        if self._now():
            if self.halves:
                super().replace(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
        super().replace(source, target)


CALLS = 120


def run_until_killed(
    folder: Path, seed: int, kind: type[DiskFile], files: OsFiles, *, after: int | None
) -> int:
    """A child works through a plan until it is killed: by its files, or after so many calls by its
    parent.  The number of calls that it said were done."""
    done = mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        try:
            file = _opened(kind, folder, files)
            for number, call in enumerate(plan(seed, CALLS), 1):
                perform(file, call)
                done[:8] = number.to_bytes(8, "little")
            os._exit(0)
        finally:
            os._exit(1)
    gone, status = 0, 0
    while after is not None and not gone:
        if int.from_bytes(done[:8], "little") >= after:
            os.kill(child, signal.SIGKILL)
            break
        gone, status = os.waitpid(child, os.WNOHANG)
    if not gone:
        _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the child failed"
    return int.from_bytes(done[:8], "little")


def _opened(kind: type[DiskFile], folder: Path, files: Files | None = None) -> DiskFile:
    return kind(folder, slots=SLOTS, unit_tokens=4, payload_bytes=PAYLOAD_BYTES, files=files)


def wrongs(file: DiskFile, seed: int, done: int) -> list[str]:
    """What such a file should not say, after so many calls were done and one perhaps in part."""
    calls = list(plan(seed, done + 1))
    held: dict[int, int] = {}
    for what, slots, numbers in calls[:done]:
        if what == "put":
            held |= dict(zip(slots, numbers, strict=True))
        else:
            for slot in slots:
                del held[slot]
    perhaps = dict(zip(*calls[done][1:], strict=True)) if done < len(calls) else {}
    wrong = []
    for slot, (_, own) in file.entries.items():
        number = int.from_bytes(own, "big")
        if number not in (held.get(slot), perhaps.get(slot)):
            wrong.append(f"block {number} is found in slot {slot}")
        elif file.get(slot, own) != payload(own):
            wrong.append(f"block {number} is found in slot {slot} and does not read back")
    wrong += [
        f"block {number} is lost"
        for slot, number in held.items()
        if slot not in perhaps and file.get(slot, key(number)) is None
    ]
    return wrong


def killed(folder: Path, count: int, kind: type[DiskFile] = DiskFile) -> list[str]:
    """Kill, reopen, look, until death came in time ``count`` times: what was wrong."""
    rng, wrong, deaths, seed = Random("killed"), [], 0, -1
    while deaths < count:
        seed += 1
        place = folder / str(seed)
        place.mkdir()
        from_outside = seed % 4 == 3
        files = OsFiles() if from_outside else Kills(rng.randint(1, 150), rng.randint(0, 2))
        after = rng.randint(0, CALLS - 20) if from_outside else None
        done = run_until_killed(place, seed, kind, files, after=after)
        deaths += done < CALLS
        file = _opened(kind, place)
        wrong += wrongs(file, seed, done)
        file.close()
        again = _opened(kind, place)
        assert again.entries == file.entries, "opening changes nothing"
        again.close()
    return wrong


def test_a_killed_process_leaves_every_acknowledged_block_and_no_wrong_one(tmp_path: Path) -> None:
    assert not killed(tmp_path, 200)


class IndexFirst(DiskFile):
    """The mistake that this is about."""

    def put(self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        generation = self._generation + 1
        self._append([(1, generation, slot, own) for slot, own in zip(slots, keys, strict=True)])
        super().put(slots, keys, payloads)


class NeverDrops(DiskFile):
    """A drop is remembered, and not written."""

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.entries[slot]


@pytest.mark.parametrize("kind", [IndexFirst, NeverDrops])
def test_a_file_that_does_it_wrong_is_found_out(tmp_path: Path, kind: type[DiskFile]) -> None:
    assert killed(tmp_path, 40, kind)
