"""What mutants of the engine survived before: each test here kills some (see docs/mutation.md)."""

from __future__ import annotations

import pytest

from kvproof.engine.engine import Engine
from kvproof.invariants.events import BlocksEvicted
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Evict,
    Finish,
    Launch,
    Reset,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

TWO_CACHED = (Admit((Segment(0, 8),)), Launch(), Retire(), Finish(0))
"""Blocks of four tokens, and there are two."""


def engine_after(*operations: AnyOperation) -> tuple[Engine, list[str]]:
    """The engine, and why it evicted what it did."""
    subject = EngineSubject(Configuration(blocks=2))
    causes: list[str] = []
    for operation in operations:
        assert subject.apply(operation).status == "done"
        events = subject.drain_events()
        causes += [event.cause for event in events if isinstance(event, BlocksEvicted)]
    return subject.engine, causes


@pytest.mark.parametrize(
    ("operation", "cause"),
    [(Admit((Segment(1, 4),)), "pressure"), (Evict(), "request"), (Reset(), "reset")],
)
def test_an_eviction_says_why(operation: AnyOperation, cause: str) -> None:
    assert engine_after(*TWO_CACHED, operation)[1] == [cause]


def test_the_next_victim_comes_first() -> None:
    pool = engine_after(*TWO_CACHED)[0].pools[0]
    expected = list(pool.victims())
    assert sorted(expected) == [1, 2]
    victims = [pool.take(1)[0] for _ in expected]
    assert victims == expected
    assert list(pool.victims()) == []
