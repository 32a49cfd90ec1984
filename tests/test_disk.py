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
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest

from kvproof.engine.engine import Engine
from kvproof.engine.tiers.disk import (
    ENTRY_BYTES,
    DamagedError,
    DiskFile,
    DiskFullError,
    Entry,
    Files,
    OsFiles,
    ShortWriteError,
)
from kvproof.engine.tiers.memory import PAYLOAD_BYTES, label, payload
from kvproof.invariants.events import TierReopened, TransferEnded
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
from kvproof.invariants.outcomes import DISK_ERROR, Outcome
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
    put(file, s2=7, s3=8)
    file.drop([2])
    file.close()
    bodies = [
        struct.pack("<Q32sI", 1, key(7), PAYLOAD_BYTES) + block(7),
        struct.pack("<Q32sI", 2, key(8), PAYLOAD_BYTES) + block(8),
    ]
    records = [struct.pack("<I", crc32(body)) + body for body in bodies]
    assert (tmp_path / "data").read_bytes() == bytes(2 * len(records[0])) + b"".join(records)
    parts = [
        struct.pack("<8sIII", b"kvproof2", 4, PAYLOAD_BYTES, SLOTS),
        *[struct.pack("<BQI32s", 0, 0, slot, bytes(32)) for slot in (0, 1)],
        struct.pack("<BQI32s", 0, 1, 2, key(7)),
        struct.pack("<BQI32s", 1, 2, 3, key(8)),
        *[struct.pack("<BQI32s", 0, 0, slot, bytes(32)) for slot in (4, 5)],
    ]
    sealed = b"".join([struct.pack("<I", crc32(part)) + part for part in parts])
    assert (tmp_path / "index").read_bytes() == sealed


def test_the_index_is_made_whole_and_keeps_its_size(tmp_path: Path) -> None:
    file = disk(tmp_path)
    size = (tmp_path / "index").stat().st_size
    assert not (tmp_path / "index.new").exists()
    put(file, s5=99)
    for number in range(40):
        put(file, s0=number, s1=1000 + number)
        file.drop([0, 1])
    assert (tmp_path / "index").stat().st_size == size
    assert reopened(file, tmp_path) == {5: 99}


def test_blocks_are_found_in_the_order_in_which_they_were_put(tmp_path: Path) -> None:
    file = disk(tmp_path)
    put(file, s4=1, s1=2)
    put(file, s3=3)
    file.drop([4])
    put(file, s4=4, s0=5)
    assert list(reopened(file, tmp_path).items()) == [(1, 2), (3, 3), (4, 4), (0, 5)]


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


def test_what_is_opened_is_closed_even_if_it_is_refused(tmp_path: Path) -> None:
    counts = Counts()
    disk(tmp_path, files=counts).close()
    assert not counts.opened
    with pytest.raises(DamagedError):
        disk(tmp_path, slots=8, files=counts)
    assert not counts.opened
    other = tmp_path / "other"
    other.mkdir()
    counts.broken = True
    with pytest.raises(OSError):
        disk(other, files=counts)
    assert not counts.opened
    assert not (other / "index").stat().st_size, "what was not written whole is not there"


def test_what_the_disk_does_not_give_back_is_damaged(tmp_path: Path) -> None:
    class Unreadable(OsFiles):
        broken = False

        def read_at(self, file: int, offset: int, count: int) -> bytes:
            if self.broken:
                raise OSError(errno.EIO, "broken")
            return super().read_at(file, offset, count)

    files = Unreadable()
    file = disk(tmp_path, files=files)
    file.put([0], [key(1)], [block(1)])
    assert file.get(0, key(1)) == block(1)
    files.broken = True
    assert file.get(0, key(1)) is None
    assert file.lost(0)


class Counts(OsFiles):
    """Knows what is open; may be broken."""

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.broken = False

    def open(self, path: Path, *, empty: bool = False) -> int:
        file = super().open(path, empty=empty)
        self.opened.add(file)
        return file

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        if self.broken:
            raise OSError(errno.EIO, "broken")
        return super().write_at(file, offset, data)

    def close(self, file: int) -> None:
        super().close(file)
        self.opened.remove(file)


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

    def replace(self, source: Path, target: Path) -> None:
        self.done.append("replace index")
        super().replace(source, target)

    def flush_folder(self, folder: Path) -> None:
        assert (folder / "data").exists()
        self.done.append("flush folder")
        super().flush_folder(folder)


@pytest.mark.parametrize("durable", [True, False])
def test_data_before_index_adjacent_slots_at_once(tmp_path: Path, durable: bool) -> None:
    recorder = Recorder()
    file = disk(tmp_path, files=recorder, durable=durable)
    made = ["write index", "flush index", "replace index", "flush folder"]
    assert recorder.done == [step for step in made if durable or "flush" not in step]
    recorder.done.clear()
    put(file, s4=1, s1=2, s0=3, s2=4)
    written = [*["write data"] * 2, "flush data", *["write index"] * 2, "flush index"]
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


def _after_some_use(folder: Path) -> bytes:
    """An index that says that slots 1 and 3 hold blocks 2 and 4, and that 0 was dropped."""
    file = disk(folder)
    put(file, s0=1, s1=2)
    file.drop([0])
    put(file, s3=4)
    file.close()
    return (folder / "index").read_bytes()


def test_a_damaged_entry_is_a_miss_of_its_slot_alone(tmp_path: Path) -> None:
    """Whatever it said: a damaged note of a drop brings no block back."""
    index, data = _after_some_use(tmp_path), (tmp_path / "data").read_bytes()
    for slot, byte in product(range(SLOTS), range(ENTRY_BYTES)):
        (tmp_path / "index").write_bytes(index)
        (tmp_path / "data").write_bytes(data)
        file = disk(tmp_path)
        flip_byte(file, slot, byte, "index")
        file.close()
        file = disk(tmp_path)
        assert file.damaged == [slot]
        assert found(file) == {s: n for s, n in {1: 2, 3: 4}.items() if s != slot}
        file.close()
        file = disk(tmp_path)
        assert not file.damaged, "it was written anew"
        put(file, **{f"s{slot}": 9})
        file.close()
        again = disk(tmp_path)
        assert (again.damaged, found(again)) == ([], {1: 2, 3: 4, slot: 9})
        again.close()


def test_an_index_that_was_cut_off_keeps_what_is_left(tmp_path: Path) -> None:
    index, header = _after_some_use(tmp_path), 24
    for length in range(header, len(index)):
        (tmp_path / "index").write_bytes(index[:length])
        whole = (length - header) // ENTRY_BYTES
        file = disk(tmp_path)
        assert file.damaged == list(range(whole, SLOTS))
        assert found(file) == {slot: n for slot, n in {1: 2, 3: 4}.items() if slot < whole}
        put(file, s5=9)
        file.close()
        again = disk(tmp_path)
        assert again.get(5, key(9)) == block(9)
        again.close()


def test_an_entry_in_another_place_is_damaged(tmp_path: Path) -> None:
    index, header = bytearray(_after_some_use(tmp_path)), 24
    first, second, third = [header + slot * ENTRY_BYTES for slot in (0, 1, 2)]
    index[first:second] = index[second:third]
    (tmp_path / "index").write_bytes(index)
    file = disk(tmp_path)
    assert (file.damaged, found(file)) == ([0], {1: 2, 3: 4})


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    index = _after_some_use(tmp_path)
    for byte in range(24):
        damaged = bytearray(index)
        damaged[byte] ^= 1
        (tmp_path / "index").write_bytes(damaged)
        with pytest.raises(DamagedError):
            disk(tmp_path)


# -- writes that fail -----------------------------------------------------------------------------


class FailsAt(OsFiles):
    """The n-th write from now on fails: it has no space, or writes a part; ``for_ever``, so do all
    that follow."""

    def __init__(self) -> None:
        self.left = -1
        self.part: float | None = None
        self.for_ever = False

    def write_at(self, file: int, offset: int, data: bytes) -> int:
        self.left -= 1
        if self.left > 0 or (self.left < 0 and not self.for_ever):
            return super().write_at(file, offset, data)
        if self.part is None:
            raise OSError(28, "No space left on device")
        return super().write_at(file, offset, data[: int(len(data) * self.part)])


@pytest.mark.parametrize("part", [None, 0.0, 0.5, 0.99])
@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_a_put_that_fails_leaves_nothing(tmp_path: Path, write: int, part: float | None) -> None:
    """Also no entry that was written whole, before or in the write that failed."""
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


@pytest.mark.parametrize("write", [1, 2])
def test_a_drop_that_fails_half_way_drops_nothing(tmp_path: Path, write: int) -> None:
    files = FailsAt()
    file = disk(tmp_path, files=files)
    put(file, s0=1, s1=2, s3=3)
    files.left, files.part = write, 0.5
    with pytest.raises(ShortWriteError):
        file.drop([0, 3])
    assert reopened(file, tmp_path) == {0: 1, 1: 2, 3: 3}


def test_what_no_note_can_be_written_of_is_dropped_before_anything_else_is(tmp_path: Path) -> None:
    """A put fails when its entries are written, and the disk does not take them back either."""
    files = FailsAt()
    file = disk(tmp_path, files=files)
    put(file, s0=1)
    files.left, files.for_ever = 4, True  # two writes of data, the first of two of the index
    with pytest.raises(DiskFullError):
        put(file, s2=2, s4=3)
    assert found(file) == {0: 1}
    with pytest.raises(DiskFullError):
        file.drop([])
    files.for_ever = False
    file.drop([])
    assert reopened(file, tmp_path) == {0: 1}


def test_of_two_blocks_under_one_key_the_newer_one_is_found(tmp_path: Path) -> None:
    """As above, but the tier comes back before the disk takes the note."""
    files = FailsAt()
    file = disk(tmp_path, files=files)
    files.left, files.for_ever = 4, True
    with pytest.raises(DiskFullError):
        put(file, s2=2, s4=3)
    files.for_ever = False
    put(file, s1=2)
    file.close()
    again = disk(tmp_path)
    assert found(again) == {1: 2}
    again.drop([1])
    assert reopened(again, tmp_path) == {}


def test_a_lost_block_does_not_count_and_its_slot_may_be_used(tmp_path: Path) -> None:
    files = FailsAt()
    file = disk(tmp_path, files=files)
    put(file, s0=1, s1=2)
    flip_byte(file, 0, 70)
    files.left, files.for_ever = 1, True
    file.lose([0])
    assert found(file) == {1: 2}
    files.for_ever = False
    put(file, s0=3)
    file.drop([1])
    assert reopened(file, tmp_path) == {0: 3}


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

    def __init__(self, folder: Path | None = None, groups: int = 1, **sizes: int) -> None:
        sizes = {"blocks": 8, "block_size": 4, "host_blocks": 4, "disk_blocks": 4, **sizes}
        configuration = Configuration(offload="both", **sizes)  # type: ignore[arg-type]

        def engine(*arguments: Any, **named: Any) -> Engine:
            named = {**named, **({"folder": folder} if folder else {})}
            return Engine(*arguments, groups=groups, **named)

        self.subject = EngineSubject(configuration, engine=engine)
        self.hierarchy = self.subject.engine.hierarchy
        self.view = self.subject.view()

    @property
    def files(self) -> list[DiskFile]:
        assert self.hierarchy is not None
        return self.hierarchy.files

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
    assert not reopened.damaged  # type: ignore[attr-defined]
    # What was not found is copied anew, what was found is not.
    assert world.do(Offload("disk")).count == (4 - len(keys))
    world.do(Complete())
    assert len(world.on_disk()) == 4


def test_a_torn_entry_is_told() -> None:
    world = stored(World().compute(5))
    world.do(Offload("disk"), Restart(stage=3))
    assert world.events[-1] == TierReopened(0, [], [], [0])


def test_a_copy_that_nobody_wants_any_more_is_cancelled_by_a_restart() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk", blocks=1), Offload("disk"), Cancel())
    assert world.do(Restart()).transfers == (1, 2)
    results = [(event.transfer, event.result, event.cause) for event in world.events[:2]]  # type: ignore[attr-defined]
    assert results == [(1, "cancelled", ""), (2, "failed", "crash")]
    assert world.view.metrics()["transfers_failed"] == 1
    world.do(Offload("disk"), Complete(), Evict(4, "host"), Evict(8))
    world.do(Promote(prompt(9), to="host"), Cancel(), Restart())
    assert world.told("TransferEnded") == [TransferEnded(4, "cancelled")]
    assert world.view.tier_pins("host", 0) == world.view.tier_pins("disk", 0) == [0] * 4


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
    world.subject.files.arm("disk_full", "index")
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


@pytest.mark.parametrize("fault", ["disk_full", "short_write"])
@pytest.mark.parametrize("file", [0, 1])
@pytest.mark.parametrize(
    "operation", [Offload("disk"), Evict(1, "disk"), Reset()], ids=["offload", "evict", "reset"]
)
def test_a_disk_that_takes_no_note_that_a_block_goes_changes_nothing(
    operation: Operation, file: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the group whose file fails, nor of the other."""
    world = World(disk_blocks=1, groups=2).compute(5)
    world.do(Offload(), Complete(), Complete(), Offload("disk"), Complete(), Complete())
    world.compute(5, source=1).do(Offload(), Complete(), Complete())

    def state() -> list[object]:
        view, groups, tiers = world.view, (0, 1), ("host", "disk")
        indices = [dict(view.tier_index(tier, group)) for tier in tiers for group in groups]  # type: ignore[arg-type]
        files = [found(file) for file in world.files]
        return [*indices, [dict(view.index(group)) for group in groups], view.transfers(), files]

    before = state()
    assert len(before[2]) == len(before[3]) == 1, "the disk is full"  # type: ignore[arg-type]
    failing = world.files[file]
    write, files = failing._note, world.subject.files

    def note(*arguments: Any) -> None:
        monkeypatch.setattr(failing, "_note", write)
        files.arm(fault, "index")  # type: ignore[arg-type]
        write(*arguments)

    monkeypatch.setattr(failing, "_note", note)
    assert world.do(operation) == Outcome("refused", DISK_ERROR)
    assert (state(), list(world.events)) == (before, [])
    world.do(Restart())
    assert state() == before
    assert world.do(operation).status == "done"


def test_a_full_disk_can_always_forget(tmp_path: Path) -> None:
    """Nothing that is written to drop a block lies beyond the end of a file."""

    class Full(OsFiles):
        full = False

        def write_at(self, file: int, offset: int, data: bytes) -> int:
            if self.full and offset + len(data) > os.fstat(file).st_size:
                raise OSError(errno.ENOSPC, "full")
            return super().write_at(file, offset, data)

    files = Full()
    file = disk(tmp_path, files=files)
    put(file, s0=1, s1=2)
    files.full = True
    with pytest.raises(DiskFullError):
        put(file, s5=3)
    file.drop([0])
    assert reopened(file, tmp_path) == {1: 2}


@pytest.mark.parametrize("byte", [0, 30])
def test_a_damaged_entry_is_found_out_by_a_restart_and_counted(byte: int) -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Complete())
    first, second = world.on_disk()
    assert world.do(Corrupt(0, byte, "index")).count == 1
    assert world.on_disk() == [first, second], "as yet it is read"
    world.do(Restart())
    assert world.events[-1] == TierReopened(0, [1], [second], [0])  # type: ignore[list-item]
    assert world.on_disk() == [second]
    assert world.view.metrics()["corrupt_blocks"] == 1
    assert world.do(Evict(4, "host"), Promote(prompt(9), to="host")).reason == "nothing_to_move"
    stored(world.compute(9, source=1)).do(Offload("disk"), Complete(), Restart())
    assert len(world.on_disk()) == 3
    assert world.view.metrics()["corrupt_blocks"] == 1, "it is counted once"


def test_an_entry_that_is_written_anew_is_not_damaged() -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"), Complete(), Corrupt(0, 3, "index"), Evict(2, "disk"), Restart())
    assert world.view.metrics()["corrupt_blocks"] == 0


@pytest.mark.parametrize("cause", ["short_write", "disk_full"])
def test_a_copy_fails_in_the_index_too(cause: str) -> None:
    world = stored(World().compute(9))
    world.do(Offload("disk"))
    world.do(Fail(0, cause, "index"))  # type: ignore[arg-type]
    (ended,) = world.events
    assert (ended.result, ended.cause) == ("failed", cause)  # type: ignore[attr-defined]
    world.do(Restart())
    assert world.on_disk() == []
    assert world.do(Offload("disk"), Complete(), Restart()).status == "done"
    assert len(world.on_disk()) == 2


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
        self._note(1, {slot: (generation, own) for slot, own in zip(slots, keys, strict=True)})
        super().put(slots, keys, payloads)


class NeverDrops(DiskFile):
    """A drop is remembered, and not written."""

    def drop(self, slots: Sequence[int]) -> dict[int, Entry]:
        return {slot: self.entries.pop(slot) for slot in slots}


@pytest.mark.parametrize("kind", [IndexFirst, NeverDrops])
def test_a_file_that_does_it_wrong_is_found_out(tmp_path: Path, kind: type[DiskFile]) -> None:
    assert killed(tmp_path, 40, kind)
