"""ORDER where content goes in pieces: how much, and in the order that the view shows.

A cache in this file says what it did; no engine is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.checks.order import Order
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksReused,
    Event,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation

DONE = Outcome("done")
ADMIT = Admit((Segment(0, 4),))


class Run:
    """An ORDER check over a pool of ten blocks, in which 1 to 6 are findable and free."""

    def __init__(self, uses: Mapping[int, float] | None = None, **semantics: Any) -> None:
        said = {"exact_eviction": False, "eviction_order": "shown", "release_order": "any"}
        self.books = Books(Configuration(blocks=10), Semantics(**{**said, **semantics}))
        self.group = self.books.groups[0]
        for group in self.books.groups:
            for block in range(1, 7):
                key = bytes([block])
                group.key_of[block], group.blocks_of[key] = key, (block,)
                group.cached_free[block] = None
        self.uses = dict(uses or {block: block for block in range(1, 7)})
        self.violations: list[Violation] = []
        view: Any = SimpleNamespace(last_uses=lambda group: self.uses)
        self.check = Order(self.books, [], view, self.violations.append)
        self._handlers = self.check.before_event()
        self.do(Reset())

    def do(
        self,
        operation: Operation,
        *events: Event,
        uses: Mapping[int, float] | None = None,
        outcome: Outcome = DONE,
    ) -> list[str]:
        """Tell of an operation; ``uses``: those that are shown from then on, where they differ."""
        for event in events:
            if type(event) in self._handlers:
                self._handlers[type(event)](event)
            follow = self.books.event_handlers.get(type(event))
            if follow is not None and isinstance(event, BlocksEvicted):
                follow(event)
                for block in event.blocks:
                    self.uses.pop(block, None)
        self.uses |= uses or {}
        if self.check.concludes(type(operation), "done"):
            self.check.conclude(operation, outcome)
        return [violation.message for violation in self.violations]


def gone(*blocks: int, cause: Any = "request") -> BlocksEvicted:
    return BlocksEvicted(0, blocks, [bytes([block]) for block in blocks], cause)


def test_the_longest_unused_pieces_go_first() -> None:
    assert Run().do(Evict(3), gone(2, 1), gone(3)) == []


def test_a_piece_that_was_used_later_than_one_that_stays_is_told() -> None:
    (message,) = Run().do(Evict(2), gone(2), gone(4))
    assert message.startswith("block 4 was evicted on request, but block 1, which is still cached,")


def test_what_is_held_or_was_used_meanwhile_could_not_have_gone() -> None:
    run = Run()
    del run.group.cached_free[1]
    assert run.do(Evict(1), gone(2)) == []
    used = Run()
    taken = BlocksAllocated(0, 0, 0, [7, 8, 9, 10, 2])
    assert used.do(ADMIT, gone(2, cause="pressure"), taken, uses={1: 9}) == []


def test_a_prefix_that_waited_for_its_extension_was_used_with_it() -> None:
    """Block 1 is extended by block 4: it is shown with a use of its own only when 4 is gone."""
    run = Run({1: 4, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6})
    assert run.do(Evict(3), gone(2), gone(3), gone(4), uses={1: 1}) == []


def test_an_order_that_is_not_shown_is_not_judged() -> None:
    assert Run(eviction_order="any").do(Evict(2), gone(2), gone(4)) == []


@pytest.mark.parametrize(
    ("asked", "pieces", "enough"),
    [
        (1, [(2, 1)], True),
        (2, [(1,), (3, 2)], True),
        (3, [(2, 1), (3,)], True),
        (2, [(1,), (2,), (3,)], False),
        (1, [(1,), (3, 2)], False),
    ],
)
def test_no_piece_goes_when_there_is_enough(
    asked: int, pieces: Sequence[tuple[int, ...]], enough: bool
) -> None:
    messages = Run().do(Evict(asked), *[gone(*piece) for piece in pieces])
    assert messages == [] if enough else "one piece less would have been enough" in messages[0]


def test_room_is_made_for_what_is_lacking_and_a_margin() -> None:
    """Four of the ten are empty."""

    def room(blocks: int, *pieces: BlocksEvicted, **semantics: Any) -> list[str]:
        taken = BlocksAllocated(0, 0, 0, list(range(7, 7 + blocks)))
        return Run(**semantics).do(ADMIT, *pieces, taken)

    two = [gone(block, cause="pressure") for block in (1, 2)]
    assert room(6, *two) == []
    (message,) = room(5, *two)
    assert message.startswith("2 blocks were evicted in pieces of 1, 1, though 5 were needed and 4")
    assert room(5, *two, eviction_margin=1) == []
    (message,) = room(4, *two, eviction_margin=1)
    assert "with a margin of 1" in message


@pytest.mark.parametrize("operation", [ADMIT, Grow(0, 1), Preempt(0), Evict(0)])
def test_none_goes_when_none_is_lacking(operation: Operation) -> None:
    (message,) = Run(eviction_margin=1).do(operation, gone(1, cause="pressure"))
    assert "one piece less would have been enough" in message


@pytest.mark.parametrize(("running", "right"), [(1, False), (2, True)])
def test_a_preemption_makes_the_room_that_is_declared(running: int, right: bool) -> None:
    """Blocks have four tokens, and four are empty."""
    run = Run(preemption_room=9)
    assert run.books.block_size == 4
    someone: Any = SimpleNamespace()
    run.books.running += [someone] * running
    messages = run.do(Preempt(0), gone(1, cause="pressure"))
    if right:
        assert messages == []
    else:
        assert "though room for 3 was to be made and 4 were empty" in messages[0]


@pytest.mark.parametrize(("lacking", "right"), [(0, False), (1, True)])
def test_pieces_of_one_group_may_take_some_of_another(lacking: int, right: bool) -> None:
    """In the first of two groups there is room enough, in the second for four blocks."""
    run = Run(groups=2, windows=(0, 5), eviction_order="any")
    both = [BlocksEvicted(group, [1], [bytes([1])], "pressure") for group in (0, 1)]
    taken = BlocksAllocated(1, 0, 0, [7, 8, 9, 10, 1][: 4 + lacking])
    assert (run.do(ADMIT, *both, taken) == []) is right


@pytest.mark.parametrize("operation", [Launch(), Retire(), Finish(0), Abort(0)])
def test_nothing_is_said_of_what_a_request_leaves(operation: Operation) -> None:
    assert Run().do(operation, gone(1, cause="pressure")) == []


@pytest.mark.parametrize(("copied", "right"), [(True, True), (False, False)])
def test_a_copy_takes_a_block_too(copied: bool, right: bool) -> None:
    """Six are needed with it, and four are empty."""
    two = [gone(block, cause="pressure") for block in (1, 2)]
    copy = [BlockCopied(0, 0, 0, 6, 1, 2)] * copied
    taken = BlocksAllocated(0, 0, 1, [7, 8, 9, 10, 2][:5])
    assert (Run().do(Grow(0, 1), *two, *copy, taken) == []) is right


def test_an_eviction_for_a_copy_alone_is_judged() -> None:
    copy = BlockCopied(0, 0, 0, 6, 7, 2)
    (message,) = Run().do(Grow(0, 1), gone(1, cause="pressure"), gone(2, cause="pressure"), copy)
    assert "though 1 were needed and 4 were empty" in message


def test_pieces_in_a_known_order_may_be_too_large() -> None:
    run = Run(eviction_order="lru")
    taken = BlocksAllocated(0, 0, 0, [7, 8, 9, 10, 1])
    assert run.do(ADMIT, gone(1, 2, cause="pressure"), taken) == []
    run = Run(eviction_order="lru", exact_eviction=True)
    (message,) = run.do(ADMIT, gone(1, 2, cause="pressure"), taken)
    assert message.startswith("2 blocks were evicted for the 5 that request 0 needs")


def test_an_order_that_the_view_does_not_show_is_bad_input() -> None:
    books = Books(Configuration(blocks=10), Semantics(eviction_order="shown"))
    view: Any = SimpleNamespace()
    with pytest.raises(InputError, match=r"the view needs a method last_uses\(group\)"):
        Order(books, [], view, [].append)


def test_the_margin_is_for_each_request_that_is_served() -> None:
    """Also for one that turns out to need no block."""
    taken = BlocksAllocated(0, 0, 1, [7, 8, 9, 10])
    evictions = [gone(block, cause="pressure") for block in (1, 2)]
    batch = Outcome("done", children=(0, 1))
    for outcome, right in ((batch, True), (DONE, False)):
        run = Run(eviction_margin=1)
        assert (run.do(Decode((0, 1)), *evictions, taken, outcome=outcome) == []) is right


def test_a_reset_takes_all_in_any_order() -> None:
    assert Run().do(Reset(), *[gone(block, cause="reset") for block in (6, 2)]) == []


def test_a_hit_is_a_use() -> None:
    hit = BlocksReused(0, 0, 0, [1, 2])
    assert Run().do(ADMIT, hit, uses={1: 7, 2: 7}) == []
    (message,) = Run().do(ADMIT, hit, uses={1: 7})
    assert message.startswith("block 2 was just hit or published, but")


def test_exact_evictions_in_a_known_order_are_not_judged_as_pieces() -> None:
    assert not Run(eviction_order="lru", exact_eviction=True).check.concludes(Evict, "done")


def test_pieces_are_a_promise_of_their_own() -> None:
    silent = Semantics(eviction_order="any", release_order="any")
    assert not Order.promised(silent)
    assert Order.promised(replace(silent, exact_eviction=False))
    assert Order.promised(replace(silent, eviction_order="shown"))
