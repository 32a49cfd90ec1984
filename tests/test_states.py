"""Groups of state-space layers, a block of which holds one state: what the books follow, and what
checks demand of them.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest

from kvproof.fuzz.report.ownership import ownership
from kvproof.invariants.books import Books
from kvproof.invariants.case import Case
from kvproof.invariants.checks.cap import Cap
from kvproof.invariants.checks.excl import Excl
from kvproof.invariants.checks.key import Key
from kvproof.invariants.checks.met import Met
from kvproof.invariants.checks.order import Order
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.valid import Valid
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReused,
    Event,
    KeyMoved,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import Admit, Finish, Grow, Operation, Segment
from kvproof.invariants.outcomes import HIT_PENDING, NO_FREE_BLOCKS, NOT_LAUNCHED, Outcome
from kvproof.invariants.shadow import Shadow, States
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View
from kvproof.stateful_tests.export import log_text

SIZE, STATE = 2, 4
BLOCKS = 12
CHECKS = (Excl, Order, Cap, Prov, Key, Valid, Met)
PROMISED: dict[str, Any] = {
    "groups": 2,
    "shared_pool": True,
    "windows": (0, 2),
    "states": (1,),
    "block_sizes": (SIZE, STATE),
    "publishes": "at_allocation",
    "duplicates": "indexed",
    "fences_releases": False,
    "stream_order": True,
    "exact_admission": False,
    "shorter_hits": False,
    "keeps_room": False,
    "exports": ("kv_bytes_used",),
    "exports_per_request": ("findable_tokens",),
}
PROMPT = Admit((Segment(1, 7),))
COPIES = [*range(9, BLOCKS + 1)]


class Figures:
    """A view that exports two figures."""

    def __init__(self, used: int, findable: int) -> None:
        self._used, self._findable = used, findable

    def metrics(self) -> dict[str, int]:
        return {"kv_bytes_used": self._used}

    def request_metrics(self, request: int) -> dict[str, int]:
        return {"findable_tokens": self._findable}


class World:
    """Attention's blocks have two tokens, and those of states four; told of by hand."""

    def __init__(self, view: Figures | None = None) -> None:
        configuration = Configuration(blocks=BLOCKS, block_size=SIZE, kv_bytes_per_token=1)
        self.books = Books(configuration, Semantics(**PROMISED))
        self.violations: list[Violation] = []
        self.shadows = [Shadow(BLOCKS + 1, SIZE), States(BLOCKS + 1, STATE)]
        self.checks = [
            check(self.books, self.shadows, cast(View, view), self.violations.append)
            for check in CHECKS
        ]

    def tell(self, *events: Event) -> None:
        for event in events:
            for stage in [
                *(check.before_event() for check in self.checks),
                self.books.event_handlers,
                *(check.after_event() for check in self.checks),
            ]:
                if type(event) in stage:
                    stage[type(event)](event)

    def do(self, operation: Operation, outcome: Outcome, *events: Event) -> None:
        for check in self.checks:
            expect = check.expecting(type(operation))
            if expect is not None and check.expects(type(operation), outcome.status):
                expect(operation, outcome)
        if outcome.status == "done":
            self.books.operation_handlers[type(operation)](operation, outcome)
        self.tell(*events)

    def launch(self, end: int, number: int = 0, tables: Any = None) -> None:
        """A step up to there, in flight."""
        request, step = self.books.requests[number], self.books.figures.iterations
        tables = tables or tuple(map(list, request.tables))
        self.tell(StepLaunched(step, [StepItem(number, 0, request.scheduled, end, tables)]))

    def retire(self) -> None:
        self.tell(StepRetired(self.books.steps[0].number))

    def audit(self, kind: type[Any]) -> None:
        next(check for check in self.checks if isinstance(check, kind)).audit()

    def said(self) -> list[tuple[str, str]]:
        return [(violation.property, violation.message) for violation in self.violations]


def done(number: int = 0, cached: int = 0) -> Outcome:
    return Outcome("done", None, number, cached)


def computed() -> World:
    """Request 0 has seven tokens; steps ended after four and six of them.

    The state after four is findable in block 5; that after six was in block 6, and is in 7.
    """
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.tell(
        BlocksPublished(0, 0, 0, [1, 2], [b"a", b"b"]), BlocksPublished(1, 0, 0, [5], [b"B"], 4)
    )
    world.launch(4)
    world.tell(BlocksAllocated(0, 0, 2, [3]), BlocksAllocated(1, 0, 1, [6]))
    world.tell(
        BlocksPublished(0, 0, 2, [3], [b"c"]), BlocksPublished(1, 0, 1, [6], [b"C"], tokens=6)
    )
    world.launch(6)
    world.tell(BlocksAllocated(0, 0, 3, [4]), KeyMoved(1, 0, 6, 7))
    world.launch(7)
    for _ in range(3):
        world.retire()
    assert not world.violations
    return world


def test_a_state_lands_in_the_row_of_its_position_and_nothing_before_it_does() -> None:
    states, tags = States(4, STATE), array("Q", range(10, 20))
    states.write(tags, 0, 6, [1, 2])
    assert states.last_tags([1, 2]) == [1, 15]
    assert states.first_mismatch(tags, 0, 6, [1, 2]) is None
    assert states.first_mismatch(tags, 2, 5, [1, 2]) == 4
    states.copy(2, 3, 0)
    assert states.last_tag(3) == 1
    states.copy(2, 3, 2)
    assert states.last_tag(3) == 15


def test_hits_end_where_blocks_of_the_other_groups_do() -> None:
    assert World().books.hit_tokens == SIZE
    alone = Semantics(groups=1, windows=(2,), states=(0,), stream_order=True, exact_admission=False)
    assert Books(Configuration(block_size=3), alone).hit_tokens == 3


@pytest.mark.parametrize(
    "word", [{"windows": (0, 3)}, {"stream_order": False}, {"exact_admission": True}]
)
def test_states_fit_other_words(word: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"states=\(1,\): a window of 2"):
        Semantics(**(PROMISED | word))


def test_a_table_names_a_reserved_block_where_there_is_no_state() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(1, 0, 1, [5]))
    assert world.books.requests[0].tables[1] == [0, 5]
    assert not world.books.strays
    world.tell(BlocksAllocated(0, 0, 1, [4]))
    assert world.books.strays


def test_a_key_that_moved_leads_to_the_copy() -> None:
    world = computed()
    group = world.books.groups[1]
    assert group.blocks_of[b"C"] == (7,)
    assert 6 not in group.key_of
    assert list(group.cached_free) == [7]
    assert world.shadows[1].last_tag(7) == group.tag_of[7] == world.books.requests[0].tags[5]
    world.audit(Prov)
    assert not world.violations


def test_what_is_owed_moves_with_the_key() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(1, 0, 0, [5]))
    world.tell(BlocksPublished(1, 0, 0, [5], [b"A"], 2), KeyMoved(1, 0, 5, 6))
    assert list(world.books.groups[1].owed) == [6]


def test_a_step_reads_the_state_before_it() -> None:
    world = computed()
    world.shadows[1].poison([6], 2)
    world.do(Grow(0, 1), done(), BlocksAllocated(1, 0, 2, [8]))
    world.launch(8)
    assert world.said() == [
        (
            "PROV",
            "request 0 reads position 6 from block 6, offset 2 (row 1 of its table), which "
            "holds freed",
        )
    ]


def test_a_step_finds_no_state_that_it_computes_itself() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.tell(BlocksPublished(1, 0, 0, [5], [b"B"], 4))
    reused = BlocksReused(1, 1, 0, [5])
    world.do(PROMPT, done(1, 4), reused, BlocksAllocated(1, 1, 1, [6]))
    world.violations.clear()
    first = StepItem(0, 0, 0, 4, ([1, 2], [5]))
    second = StepItem(1, 0, 4, 6, ([0, 0, 3], [5, 6]))
    world.books.requests[1].tables[0] = [0, 0, 3]
    world.books.groups[0].hold([3])
    world.tell(StepLaunched(0, [first, second]))
    found = [violation for violation in world.violations if violation.group == 1]
    assert [(one.property, one.block, one.request) for one in found] == [("PROV", 5, 1)]


def test_of_the_rows_of_a_step_only_the_last_is_written() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2, 3, 4]), BlocksAllocated(1, 0, 1, [5]))
    world.launch(7)
    assert not world.violations


def test_a_state_that_is_findable_is_not_written_on_in() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.tell(BlocksPublished(1, 0, 0, [5], [b"A"], 2))
    world.launch(2)
    world.retire()
    world.launch(3)
    assert world.said() == [
        (
            "EXCL",
            "a step writes positions 2 to 3 of request 0 into block 5, which is findable in "
            "the prefix cache",
        )
    ]


MOVES = [
    (KeyMoved(1, 0, 5, 6), "EXCL", "block 6 was given to request 0 while request 0 held it"),
    (KeyMoved(1, 0, 5, 0), "EXCL", "reserved block 0 was given to request 0"),
    (
        KeyMoved(1, 0, 6, 9),
        "VALID",
        "what is findable in block 6 was moved to block 9, but nothing is",
    ),
    (
        KeyMoved(1, 0, 5, 7),
        "VALID",
        "what is findable in block 5 was moved to block 7, but the old content of that is still "
        "findable",
    ),
]


@pytest.mark.parametrize(("event", "property", "message"), MOVES)
def test_a_key_moves_to_a_free_block_in_which_nothing_is_findable(
    event: KeyMoved, property: str, message: str
) -> None:
    world = computed()
    world.tell(event)
    assert (property, message) in world.said()


def test_no_more_is_evicted_for_the_copy_than_it_needs() -> None:
    world = computed()
    world.tell(BlocksEvicted(1, [7], [b"C"], "pressure"), KeyMoved(1, 0, 5, 9))
    (violation,) = world.violations
    assert violation.property == "ORDER"
    assert "1 block was evicted for the 1 that request 0 needs" in violation.message


def test_states_are_published_after_tokens_that_the_request_has() -> None:
    world = computed()
    world.do(Grow(0, 1), done())
    world.tell(BlocksPublished(1, 0, 2, [6], [b"D"], tokens=10))
    (violation,) = world.violations
    assert violation.message.endswith("but the request has only 8 tokens, not 10")


def test_a_state_that_no_step_wrote_is_told_when_its_time_has_come() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2, 3]), BlocksAllocated(1, 0, 1, [5]))
    world.tell(BlocksPublished(1, 0, 1, [5], [b"C"], tokens=6))
    world.launch(5)
    world.retire()
    assert not world.violations
    world.do(Finish(0), done())
    world.tell(StepRetired(0))
    (violation,) = [one for one in world.violations if one.property == "VALID"]
    assert violation.message == (
        "block 5 is findable as row 1 of request 0, but no step has written it"
    )


def test_a_key_stands_for_one_state() -> None:
    world = computed()
    world.tell(BlocksPublished(1, 0, 1, [6], [b"B"], tokens=6))
    assert [name for name, _ in world.said()] == ["KEY"]


def test_a_hit_brings_the_state_at_its_end() -> None:
    world = computed()
    world.do(PROMPT, done(1, 4), BlocksReused(0, 1, 0, [1, 2]), BlocksReused(1, 1, 0, [5]))
    assert [name for name, _ in world.said()] == ["CAP"]  # six would be a hit, too
    world = computed()
    world.do(PROMPT, done(1, 6), BlocksReused(0, 1, 0, [1, 2, 3]), BlocksReused(1, 1, 1, [7]))
    assert not world.violations
    world.tell(BlockCopied(1, 1, 1, 7, 9, STATE))
    assert world.books.requests[1].tables[1] == [0, 9]
    assert not world.violations
    world = computed()
    world.do(PROMPT, done(1, 6), BlocksReused(1, 1, 1, [5]))
    assert [name for name, _ in world.said()] == ["KEY"]


def test_who_hit_a_state_has_all_of_it_copied() -> None:
    world = computed()
    world.do(PROMPT, done(1, 6), BlocksReused(0, 1, 0, [1, 2, 3]), BlocksReused(1, 1, 1, [7]))
    world.tell(BlockCopied(1, 1, 1, 7, 9, 0))
    assert [name for name, _ in world.said()] == ["PROV"]


@pytest.mark.parametrize(("tokens", "copied", "found"), [(2, STATE, []), (2, 0, ["PROV"])])
def test_what_is_copied_is_the_state_after_the_last_step_that_was_launched(
    tokens: int, copied: int, found: list[str]
) -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.launch(tokens)
    world.launch(tokens + 1)
    world.retire()
    world.tell(BlockCopied(1, 0, 0, 5, 9, copied))
    assert [name for name, _ in world.said()] == found


def test_a_copy_of_another_state_is_not_what_was_hit() -> None:
    world = computed()
    world.do(PROMPT, done(1, 6), BlocksReused(0, 1, 0, [1, 2, 3]), BlocksReused(1, 1, 1, [7]))
    world.tell(BlockCopied(1, 1, 1, 5, 9, STATE))
    assert ("PROV", 1) in [(one.property, one.request) for one in world.violations]


def test_a_key_that_moves_before_its_state_is_written_leads_to_something_else() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.tell(BlocksPublished(1, 0, 0, [5], [b"B"], 4), KeyMoved(1, 0, 5, 6))
    world.launch(4)
    assert not world.violations
    world.retire()
    assert world.said() == [
        ("VALID", "block 6 is findable as row 0 of request 0, but no step has written it")
    ]


def test_a_stale_state_is_no_hit() -> None:
    world = computed()
    world.shadows[1].copy(5, 7, STATE)  # that after four tokens, under the key of that after six
    world.do(PROMPT, done(1, 6), BlocksReused(0, 1, 0, [1, 2, 3]), BlocksReused(1, 1, 1, [7]))
    world.tell(BlockCopied(1, 1, 1, 7, 9, STATE))
    assert [name for name, _ in world.said()] == ["PROV"]


@pytest.mark.parametrize(
    ("group", "row", "blocks", "tokens"),
    [(1, 0, [5], 6), (1, 1, [6], 4), (1, 1, [6], 5), (1, 1, [6, 5], 8), (0, 3, [4], 8)],
)
def test_a_state_is_published_where_it_is_and_nothing_else_is_inside_a_block(
    group: int, row: int, blocks: list[int], tokens: int
) -> None:
    world = computed()
    world.do(Grow(0, 1), done())
    keys = [bytes([65 + block]) for block in blocks]
    world.tell(BlocksPublished(group, 0, row, blocks, keys, tokens))
    found = [message for name, message in world.said() if name == "VALID"]
    assert [message.partition(", but ")[2] for message in found] == [
        f"the request has no state of {tokens} tokens there"
    ]


CLAIMED = [
    (PROMPT, 2, "the state there is not findable"),
    (PROMPT, 4, "6 are findable"),
    (Admit((Segment(1, 4), Segment(2, 3))), 0, "4 are findable"),
]


@pytest.mark.parametrize(("operation", "cached", "why"), CLAIMED)
def test_a_hit_is_the_longest_that_has_a_state(operation: Admit, cached: int, why: str) -> None:
    world = computed()
    world.do(operation, done(1, cached))
    assert world.said() == [("CAP", f"admit: a hit of {cached} tokens is claimed, but {why}")]


@pytest.mark.parametrize(("free", "fits"), [(8, True), (7, False)])
def test_beside_its_rows_a_request_may_need_two_copies(free: int, fits: bool) -> None:
    world = World()
    held = BLOCKS - free
    world.books.groups[0].hold([*range(1, held + 1)])
    world.do(PROMPT, Outcome("refused", NO_FREE_BLOCKS))  # four rows and two
    assert bool(world.violations) == fits


@pytest.mark.parametrize("free", [3, 2])
def test_an_admission_takes_a_block_for_its_own_state(free: int) -> None:
    world = computed()
    world.books.groups[0].hold([8, *COPIES][: 6 - free])
    assert world.books.groups[0].free == free
    world.do(PROMPT, done(1, 6))
    # A row of attention, a copy of the state that it hits, and that one, which nobody holds.
    assert bool(world.violations) == (free < 3)


def test_a_hit_is_pending_only_while_a_state_is_owed() -> None:
    world = computed()
    world.do(PROMPT, Outcome("refused", HIT_PENDING))
    assert [name for name, _ in world.said()] == ["CAP"]
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.tell(BlocksPublished(1, 0, 0, [5], [b"B"], 4))
    world.do(PROMPT, Outcome("refused", HIT_PENDING))
    assert not world.violations
    world.launch(4)
    world.do(PROMPT, Outcome("refused", HIT_PENDING))
    assert [name for name, _ in world.said()] == ["CAP"]


def test_a_request_leaves_when_steps_carry_all_its_tokens() -> None:
    world = World()
    world.do(PROMPT, done(), BlocksAllocated(0, 0, 0, [1, 2, 3, 4]), BlocksAllocated(1, 0, 1, [5]))
    world.do(Finish(0), Outcome("refused", NOT_LAUNCHED, 0))
    world.launch(7)
    assert not world.violations
    world.do(Finish(0), Outcome("refused", NOT_LAUNCHED, 0))
    assert [name for name, _ in world.said()] == ["CAP"]


def test_when_it_grows_only_the_last_state_is_kept() -> None:
    world = computed()
    cap = next(check for check in world.checks if isinstance(check, Cap))
    world.do(Grow(0, 1), done())
    cap.conclude(Grow(0, 1), done())
    (violation,) = world.violations
    assert violation.message.startswith("request 0 grew, and still holds blocks [5]")
    world = computed()
    world.do(Grow(0, 1), done(), BlocksOutlived(1, 0, [5]))
    next(check for check in world.checks if isinstance(check, Cap)).conclude(Grow(0, 1), done())
    assert not world.violations
    assert world.books.requests[0].tables[1] == [0, 6]


@pytest.mark.parametrize(
    ("used", "findable", "wrong"),
    [(12, 4, None), (14, 4, "kv_bytes_used"), (12, 6, "findable_tokens of request 0")],
)
def test_figures_of_a_shared_pool_and_of_what_is_findable(
    used: int, findable: int, wrong: str | None
) -> None:
    world, told = World(Figures(used, findable)), computed()
    world.books = told.books
    met = Met(told.books, told.shadows, cast(View, Figures(used, findable)), told.violations.append)
    met.audit()
    assert [message.split(" is exported")[0] for _, message in told.said()] == (
        [] if wrong is None else [wrong]
    )


def test_the_move_of_a_key_is_told() -> None:
    moved = KeyMoved(1, 0, 6, 7)
    for block, told in (
        (6, "copied to block 7, which is findable in its place"),
        (7, "made a copy of block 6, findable in its place"),
    ):
        violation = Violation("VALID", "wrong", 0, 1, block)
        assert told in explain(violation, [Moment(0, Grow(0, 1), done(), [moved])], SIZE)
    published = BlocksPublished(1, 0, 0, [6], [b"C"])
    (cells,) = ownership([Moment(0, Grow(0, 1), done(), [published, moved])], SIZE)
    assert list(cells) == [("device", 1, 7)]
    case = Case("engine", Configuration(), [Grow(0, 1)])
    assert "b6*>b7 (g1)" in log_text(case, "", [Moment(0, Grow(0, 1), done(), [moved])])
