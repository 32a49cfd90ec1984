"""Steps in flight have the slots on record that they read and write."""

from __future__ import annotations

from array import array

from kvproof.engine.engine import Engine
from kvproof.invariants.subject import Configuration


def test_slots_of_a_step_follow_the_tables_of_its_launch() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4))
    engine.admit(array("I", range(6)))
    engine.admit(array("I", range(100, 103)))
    engine.launch(0)
    step = engine.steps[0]
    # Blocks 1 and 2 hold the first request, block 3 the second; slot = block * 4 + offset.
    assert step.written_slots(0, 4) == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert step.read_slots(0, 4) == [[4, 5, 6, 7, 8, 9], [12, 13, 14]]
    assert step.tokens == 9


def test_a_chunk_reads_what_earlier_chunks_wrote() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4))
    engine.admit(array("I", range(6)))
    engine.launch(4)
    engine.launch(4)
    first, second = engine.steps
    assert first.written_slots(0, 4) == [4, 5, 6, 7]
    assert second.written_slots(0, 4) == [8, 9]
    assert second.read_slots(0, 4) == [[4, 5, 6, 7, 8, 9]]


def test_copy_on_write_does_not_change_the_record_of_a_step_in_flight() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4))
    engine.admit(array("I", range(2)))
    engine.launch(0)
    engine.retire()
    engine.fork(engine.running[0], 1)
    parent, child = engine.running
    engine.grow(parent, [7])  # copies the shared block 1 to block 2
    engine.launch(0)
    step = engine.steps[0]
    engine.grow(child, [8])
    assert step.read_slots(0, 4) == [[8, 9, 10]]
