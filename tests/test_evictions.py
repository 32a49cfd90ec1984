"""ORDER blames the operation that evicts for nothing, not the one that takes a block later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest

from kvproof.invariants.books import Books
from kvproof.invariants.checker import Checker
from kvproof.invariants.checks.order import Order
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    Event,
    KeyMoved,
)
from kvproof.invariants.operations import (
    Admit,
    Complete,
    Evict,
    Finish,
    Launch,
    Offload,
    Operation,
    Promote,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View
from kvproof.stateful_tests.examples import template
from kvproof.stateful_tests.examples.template import Template
from kvproof.stateful_tests.examples.tiny_cache import Cache
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject


def prompt(tokens: int, source: int = 0) -> Admit:
    return Admit((Segment(source, tokens),))


def evicted(*blocks: int, cause: Literal["pressure", "request"] = "pressure") -> BlocksEvicted:
    return BlocksEvicted(0, blocks, [bytes([block]) for block in blocks], cause)


def allocated(request: int, *blocks: int, group: int = 0) -> BlocksAllocated:
    return BlocksAllocated(group, request, 0, blocks)


class World:
    """Six blocks of a pool, of which 2 and 1 are cached and nobody's, told to ORDER alone."""

    def __init__(self, **semantics: Any) -> None:
        self.books = Books(Configuration(blocks=6, block_size=4), Semantics(**semantics))
        self.violations: list[Violation] = []
        order = Order(self.books, [], cast(View, None), self.violations.append)
        self.handlers = [order.before_event(), self.books.event_handlers]
        for number in range(3):
            self.books.operation_handlers[Admit](prompt(8), Outcome("done", None, number))
        self.do(allocated(0, 1, 2))
        self.do(BlocksPublished(0, 0, 0, [1, 2], [b"\1", b"\2"]), BlocksReleased(0, 0, [2, 1]))
        assert list(self.books.groups[0].cached_free) == [2, 1]

    def do(self, *events: Event) -> list[str]:
        """What is wrong after an operation with these events."""
        self.books.begin()
        self.books.events = events
        for event in events:
            for handlers in self.handlers:
                if type(event) in handlers:
                    handlers[type(event)](event)
        return [violation.message for violation in self.violations]


IN_VAIN = "evicted under pressure, but the operation takes no block after that, and"


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([evicted(2)], [f"block 2 was {IN_VAIN} 4 free blocks were empty"]),
        ([evicted(2, 1)], [f"blocks [2, 1] were {IN_VAIN} 4 free blocks were empty"]),
        ([allocated(1, 3, 4, 5), evicted(2)], [f"block 2 was {IN_VAIN} 1 free block was empty"]),
        (
            [evicted(2), BlocksPublished(0, 1, 0, [5], [b"\2"])],
            [
                f"block 2 was {IN_VAIN} 4 free blocks were empty: block 5 became findable under "
                "its key"
            ],
        ),
        ([evicted(2, cause="request")], []),
        ([allocated(1, 3, 4, 5, 6), evicted(2)], []),
        ([allocated(1, 3, 4, 5), evicted(2), allocated(2, 6, 2)], []),
        ([allocated(1, 3, 4, 5, 6), evicted(2), BlockCopied(0, 1, 3, 6, 2, 4)], []),
        ([allocated(1, 3, 4, 5, 6), evicted(2), KeyMoved(0, 1, 1, 2)], []),
    ],
)
def test_what_is_evicted_for_nothing_is_told_at_once(
    events: Sequence[Event], says: list[str]
) -> None:
    assert World().do(*events) == says


def test_what_is_held_is_for_pin_to_tell() -> None:
    world = World()
    world.books.groups[0].hold([2])
    assert world.do(evicted(2)) == []
    assert world.do(evicted(1)) != []


def test_other_pools_need_no_room_here() -> None:
    elsewhere = allocated(1, 3, 4, 5, 6, 2, group=1)
    (message,) = World(groups=2).do(allocated(2, 3, 4, 5), evicted(2), elsewhere)
    assert message == f"block 2 was {IN_VAIN} 1 free block was empty"
    together = World(groups=2, shared_pool=True)
    together.do(allocated(2, 3, 4, 5))
    assert together.do(evicted(2), allocated(1, 6, 2, group=1)) == []


@pytest.mark.parametrize("kind", [BlockCopied(0, 1, 0, 3, 2, 4), KeyMoved(0, 1, 1, 2)])
def test_a_copy_takes_a_block(kind: Event) -> None:
    (message,) = World().do(evicted(2), kind)
    assert message.startswith("1 block was evicted for the 1 that request 1 needs, though 4 free")


def test_who_takes_pieces_may_take_more_than_it_needs() -> None:
    assert World(exact_eviction=False).do(evicted(2)) == []


def test_what_was_evicted_before_is_told_as_such() -> None:
    world = World()
    world.do(allocated(1, 3, 4, 5, 6))
    assert world.do(evicted(2)) == []
    world.do(BlocksReleased(0, 1, [6, 5, 4, 3]))
    assert world.do(allocated(2, 2)) == [
        "1 block was evicted for the 1 that request 2 needs (block 2 was evicted by an operation "
        "before it), though 4 free blocks were empty, such as 3, 4, 5, 6, and block 2 was cached"
    ]


def test_a_copy_upwards_takes_blocks() -> None:
    stored = [prompt(8), Launch(), Retire(), Offload(), Complete(), Finish(0), Evict(9)]
    one_cached = [prompt(4, 1), Launch(), Retire(), Finish(0), prompt(24, 2)]
    configuration = Configuration(blocks=8, requests=4, host_blocks=2, offload="prefix")
    subject = EngineSubject(configuration)
    checker = Checker(subject, checks=[Order], interval=1)
    run: list[Operation] = [*stored, *one_cached, Promote(prompt(9).prompt)]
    for operation in run:
        outcome = subject.apply(operation)
        assert outcome.status == "done"
        events = subject.drain_events()
        checker.observe(operation, outcome, events)
    assert [event.blocks for event in events if isinstance(event, BlocksEvicted)] == [[1]]
    assert checker.violations == []


class ForgetsTheFirst(Cache):
    """A second block with the same content replaces the first in the prefix cache."""

    def publish(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        for block, key in zip(table, self._keys(tokens), strict=False):
            self.key_of.pop(self.block_of.get(key, 0), None)
            self.block_of[key], self.key_of[block] = block, key


def test_an_engine_that_forgets_a_free_block_is_blamed_where_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "Cache", ForgetsTheFirst)
    harness = Harness(Template(Configuration(blocks=8, block_size=4)))
    for operation in (prompt(4), prompt(4), Launch(4), Retire(), Finish(0), Launch(), Retire()):
        harness.perform(operation)
    (violation,) = [seen for seen in harness.violations if seen.property == "ORDER"]
    assert (violation.op, violation.block) == (6, 1)
    assert violation.message == (
        f"block 1 was {IN_VAIN} 6 free blocks were empty: block 2 became findable under its key"
    )
