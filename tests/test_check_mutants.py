"""What mutants of checks survived before: each test here kills some (see docs/mutation.md).

A check alone is told truly of all operations but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.keys import block_key, root_key
from kvproof.invariants.checker import Checker
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.checks import key as key_module
from kvproof.invariants.checks.order import Order
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.xfer import Xfer
from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    SlotsEvicted,
    StepLaunched,
    TierReopened,
    TransferEnded,
    TransferStarted,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Complete,
    Corrupt,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Offload,
    Preempt,
    Promote,
    Reset,
    Restart,
    Resume,
    Retire,
    Segment,
    Slow,
    Tier,
    Withhold,
)
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.property import Check
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import FREED
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects.engine import EngineSubject

Events = list[Event]


class SilentXfer(Xfer):
    """Moves the bytes of transfers, which PROV reads, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


class SilentProv(Prov):
    """Moves the bytes of steps, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


LEANS_ON: dict[str, tuple[type[Check], ...]] = {
    "PROV": (SilentXfer,),
    "VALID": (SilentXfer, SilentProv),
    "XFER": (SilentProv,),
}


class Witness:
    """The engine, as a checker is told of it; ``lies`` is what becomes of the view's answers."""

    def __init__(self, groups: int, **configuration: Any) -> None:
        sizes = {"blocks": 8, "requests": 4, "host_blocks": 3, "disk_blocks": 3, "offload": "both"}
        self.configuration = Configuration(**(sizes | configuration))
        self.subject = EngineSubject(self.configuration, engine=partial(Engine, groups=groups))
        self.semantics = self.subject.semantics
        self.lies: dict[str, Callable[[Any], Any]] = {}
        self._view: Any = self.subject.view()

    def view(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> Any:
        """The lies are about the last group."""
        answer = getattr(self._view, name)(*arguments)
        lied = name in self.lies and arguments[-1] == self.semantics.groups - 1
        return self.lies[name](answer) if lied else answer


Lie = Callable[[Events], Sequence[Event]]


def told(
    run: Sequence[AnyOperation],
    check: str,
    lie: Lie = lambda events: events,
    *,
    groups: int = 1,
    view: dict[str, Callable[[Any], Any]] | None = None,
    interval: int = 1,
    settle: bool = False,
    status: str = "done",
    says: dict[str, Any] | None = None,
    semantics: dict[str, Any] | None = None,
    **configuration: Any,
) -> tuple[list[Violation], int]:
    """What a check says of the run, of whose last operation it is told untruly, and how often it
    looked at events of that operation.  It audits every ``interval`` operations, never if 0, and
    then compares what was touched only if told to."""
    witness = Witness(groups, **configuration)
    witness.semantics = replace(witness.semantics, **(semantics or {}))
    kinds = [*LEANS_ON.get(check, ()), *(kind for kind in CHECKS if kind.id() == check)]
    checker = Checker(witness, checks=kinds, interval=interval)  # type: ignore[arg-type]
    for operation in run[:-1]:
        outcome = witness.subject.apply(operation)
        checker.observe(operation, outcome, list(witness.subject.drain_events()))
    assert checker.violations == []
    before = checker.checks[-1].checked
    outcome = witness.subject.apply(run[-1])
    assert outcome.status == status
    witness.lies = view or {}
    events = lie(list(witness.subject.drain_events()))
    checker.observe(run[-1], replace(outcome, **(says or {})), events)
    if settle:
        assert checker.violations == []
        checker.checks[-1].settle()
    return list(checker.violations), checker.checks[-1].checked - before


def add(event: Event) -> Lie:
    return lambda events: [*events, event]


def instead(event: Event) -> Lie:
    return lambda events: [event]


def add_one(count: int) -> int:
    return count + 1


def change(kind: type[Event], **fields: Any) -> Lie:
    """The last event of that kind says something else; a callable is put to what it said."""

    def changed(events: Events) -> Events:
        index = max(i for i, event in enumerate(events) if isinstance(event, kind))
        true = events[index]
        new = {n: v(getattr(true, n)) if callable(v) else v for n, v in fields.items()}
        return [*events[:index], replace(true, **new), *events[index + 1 :]]

    return changed


def without(kind: type[Event]) -> Lie:
    """The last event of that kind is left out."""

    def changed(events: Events) -> Events:
        index = max(i for i, event in enumerate(events) if isinstance(event, kind))
        return [*events[:index], *events[index + 1 :]]

    return changed


def held_by_another(events: Events) -> Events:
    """At first somebody whom nobody knows is given block 1."""
    return [BlocksShared(1, 9, 0, [1]), *events]


def instead_of_empty(events: Events) -> Events:
    """The last allocation evicts what is cached, though blocks are empty."""
    return [*events[:-2], BlocksEvicted(1, [2], [b""], "pressure"), *events[-2:]]


def tables(*tables: Sequence[int], end: int | None = None) -> Lie:
    """The first item of a launched step reads through other tables."""

    def changed(items: Any) -> Any:
        return [replace(items[0], tables=tables, end=end or items[0].end), *items[1:]]

    return change(StepLaunched, items=changed)


def prompt(tokens: int, source: int = 0) -> Admit:
    return Admit((Segment(source, tokens),))


STEP = (Launch(), Retire())
CACHED = (prompt(8), *STEP, Finish(0))
IN_FLIGHT = (prompt(1), Launch(), Finish(0))
STORING = (prompt(8), *STEP, Offload())
STORED = (*STORING, Complete())
BOTH_STORED = (*STORED, Complete())  # of two groups
SAVED = (*STORED, Offload("disk"), Complete())
BOTH_STORED_AND_GONE = (*STORING, Complete(), Finish(0), Complete())
AGAIN = (*CACHED, Evict(9), prompt(8), *STEP)
OTHERS_STORED = (prompt(4, 1), *STEP, Finish(0), Offload(), Complete())
PROMOTE = Promote(prompt(9).prompt)
FETCH = Promote(prompt(9).prompt, to="host")
DAMAGED = (*SAVED, Finish(0), Evict(9), Evict(9, "host"), FETCH, Corrupt(), Complete())
FORKED = (prompt(6), *STEP, Fork(0))
REUSING = (*CACHED, prompt(9), Launch())  # request 1 has blocks 1, 2 and 3


@pytest.mark.parametrize(
    ("check", "run", "lie", "view"),
    [
        ("REF", [prompt(1), Finish(0)], add(BlocksReleased(1, 0, [1])), {}),
        ("REF", [prompt(1)], None, {"ref_counts": lambda counts: [c + 1 for c in counts]}),
        ("CONS", [prompt(1)], None, {"free_blocks": lambda free: [1, *free[1:]]}),
        ("REF", [prompt(1)], None, {"ref_counts": lambda counts: [*counts[:-1], 1]}),
        ("CONS", [prompt(1)], None, {"free_blocks": lambda free: [0, *free[1:]]}),
        ("CONS", [prompt(1)], None, {"free_blocks": lambda free: free[1:]}),
        ("CONS", [prompt(1)], None, {"free_blocks": lambda free: [*free[:-1], free[-2]]}),
        ("CONS", STORING, None, {"free_tier_count": add_one}),
        ("CONS", [prompt(1)], None, {"free_count": add_one}),
        ("PIN", STORING, add(SlotsEvicted("host", 1, [0], [b""], "request")), {}),
        ("PIN", STORING, None, {"tier_pins": lambda pins: [p + 1 for p in pins]}),
        ("PIN", [*BOTH_STORED, prompt(1, 1)], None, {"tier_pins": lambda pins: [*pins[:-1], 1]}),
        ("PIN", [prompt(4), *STEP], add(BlocksEvicted(1, [1], [b""], "request")), {}),
        ("PIN", IN_FLIGHT, instead(BlocksReleased(1, 0, [1])), {}),
        ("PIN", IN_FLIGHT, instead(BlocksReleased(1, 0, [1], 0)), {}),
        ("PIN", [*IN_FLIGHT, Retire()], lambda events: events[:-1], {}),
        ("ORDER", [*CACHED, Evict(1)], change(BlocksEvicted, blocks=[1]), {}),
        ("ORDER", [*CACHED, prompt(1, 1)], instead_of_empty, {}),
        ("ORDER", [*BOTH_STORED, Evict(1, "host")], change(SlotsEvicted, slots=[0]), {}),
        ("KEY", [prompt(8), *STEP], change(BlocksPublished, keys=lambda keys: [keys[0]] * 2), {}),
        ("KEY", AGAIN, change(BlocksPublished, keys=lambda keys: [b"", keys[1]]), {}),
        ("KEY", [*CACHED, prompt(9)], change(BlocksReused, blocks=lambda blocks: blocks[::-1]), {}),
        ("QUIES", [prompt(1), Finish(0)], None, {"free_count": add_one}),
        ("QUIES", BOTH_STORED_AND_GONE, None, {"tier_pins": lambda pins: [*pins[:-1], 1]}),
        ("PROV", [prompt(1), Launch()], tables([1], [6]), {}),
        ("PROV", [*FORKED, Grow(1)], change(BlockCopied, tokens=1), {}),
    ],
)
def test_a_violation_says_in_which_group(
    check: str, run: Sequence[AnyOperation], lie: Lie | None, view: dict[str, Any]
) -> None:
    lies = [lie] if lie else []
    violations, _ = told(run, check, *lies, view=view, groups=2)
    assert {(violation.property, violation.group) for violation in violations} == {(check, 1)}


@pytest.mark.parametrize(
    ("check", "run", "lie", "view", "where"),
    [
        ("VALID", [*CACHED, prompt(1, 1)], change(BlocksAllocated, blocks=[1]), {}, (1, 1)),
        ("VALID", [*CACHED, prompt(9)], change(BlocksReused, blocks=[1, 7]), {}, (7, 1)),
        ("VALID", [prompt(8), *STEP], change(BlocksPublished, blocks=[2, 1]), {}, (1, 0)),
        ("VALID", [prompt(4), *STEP], without(BlocksPublished), {}, (1, 0)),
        ("VALID", [prompt(8), *STEP], add(BlockMerged(1, 0, 0, 1, 7)), {}, (7, 0)),
        ("VALID", [prompt(4), *STEP], None, {"index": lambda index: {}}, (1, None)),
        ("VALID", [*CACHED, Reset()], without(BlocksEvicted), {}, (1, None)),
        ("EXCL", [prompt(1), prompt(1)], change(BlocksAllocated, blocks=[1]), {}, (1, 1)),
        ("EXCL", [prompt(8)], change(BlocksAllocated, blocks=[1, 1]), {}, (1, 0)),
        ("EXCL", [prompt(1)], change(BlocksAllocated, blocks=[0]), {}, (0, 0)),
        ("EXCL", [prompt(1)], add(BlocksShared(1, 9, 0, [1])), {}, (1, 0)),
        ("EXCL", [prompt(1), Launch()], held_by_another, {}, (1, 0)),
        ("EXCL", [prompt(1), Launch()], tables([1], [5]), {}, (5, 0)),
        ("EXCL", [*FORKED, Grow(1)], change(BlockCopied, source=1), {}, (1, 1)),
        ("EXCL", STORING, change(TransferStarted, targets=[0, 0]), {}, (0, None)),
        ("LIFE", [prompt(1)], None, {"table": lambda table: [5]}, (None, 0)),
        ("CAP", [prompt(1)] * 2, None, {"standing": lambda s: (*s[:3], (1, 2))}, (None, 1)),
        ("XFER", STORING, change(TransferStarted, targets=[0]), {}, (None, None)),
        ("XFER", [*STORING, Complete(1)], change(TransferEnded, result="failed"), {}, (None, None)),
    ],
)
def test_a_violation_says_in_which_block_of_which_group_and_whose(
    check: str,
    run: Sequence[AnyOperation],
    lie: Lie | None,
    view: dict[str, Any],
    where: tuple[int | None, int | None],
) -> None:
    violations, _ = told(run, check, *([lie] if lie else []), view=view, groups=2)
    named = {(one.property, one.group, one.block, one.request) for one in violations}
    assert (check, 1, *where) in named
    assert {group for _, group, _, _ in named} == {1}
    if check == "XFER":
        assert {violation.transfer for violation in violations} == {1}


LEAVING = (prompt(6), *STEP, Preempt(0, swap=True, late=True))
GONE = {"tier_index": lambda index: {}}
OTHERS = {"tier_content": lambda content: b"others"}


@pytest.mark.parametrize(
    ("check", "run", "view", "where"),
    [
        ("XFER", [*LEAVING, Complete(1)], OTHERS, (1, "host", 1, 0, 1)),
        ("XFER", [*LEAVING, *[Complete()] * 2, prompt(1, 1)], OTHERS, (0, "host", 1, 0, None)),
        ("VALID", [*STORING, Complete(1)], GONE, (1, "host", 0, None, None)),
        ("VALID", [*BOTH_STORED, prompt(1, 1)], GONE, (1, "host", 0, None, None)),
        ("VALID", [*STORING, Complete(1)], OTHERS, (1, "host", 1, None, None)),
        ("VALID", [*CACHED, prompt(9)], OTHERS, (0, "device", 1, None, None)),
    ],
)
def test_what_is_wrong_below_says_where(
    check: str,
    run: Sequence[AnyOperation],
    view: dict[str, Any],
    where: tuple[int, Tier, int, int | None, int | None],
) -> None:
    violations, _ = told(run, check, view=view, groups=2)
    assert where in {(v.group, v.tier, v.block, v.request, v.transfer) for v in violations}


COUNTS = {"ref_counts": lambda counts: [c + 1 for c in counts]}
SLOTS = {"free_tier_count": add_one}
ELSEWHERE = {"index": lambda index: dict.fromkeys(index, (7,))}


@pytest.mark.parametrize(
    ("check", "run", "view", "settle", "says"),
    [
        ("REF", [*STORING, Complete(1)], COUNTS, False, "count of 2, but 1 holder has it"),
        ("REF", [prompt(1)], COUNTS, True, "count of 2, but 1 holder has it"),
        ("CONS", [*STORING, Complete(1)], SLOTS, False, "4 host blocks are reported free and 0"),
        ("VALID", [prompt(4), *STEP], ELSEWHERE, True, "finds block 7 under key"),
        ("CONS", [Withhold("host", 2)], SLOTS, False, "2 host blocks are reported free, 2 are"),
    ],
)
def test_what_is_wrong_is_seen_before_an_audit(
    check: str, run: Sequence[AnyOperation], view: dict[str, Any], settle: bool, says: str
) -> None:
    violations, _ = told(run, check, view=view, settle=settle, groups=2, interval=0)
    assert {violation.group for violation in violations} == {1}
    assert says in violations[0].message
    assert violations[0].block == {"REF": 1, "VALID": 7}.get(check)


def test_blocks_of_an_unknown_request_are_no_matter_of_ref() -> None:
    assert told([prompt(1)], "REF", add(BlocksReleased(0, 9, [1])), interval=0) == ([], 1)


@pytest.mark.parametrize("step", [None, 0])
def test_giving_back_nothing_while_a_step_runs_names_no_block(step: int | None) -> None:
    (violation,), _ = told(IN_FLIGHT, "PIN", instead(BlocksReleased(0, 0, [], step)))
    assert (violation.block, violation.request) == (None, 0)


def test_what_is_free_twice_is_named() -> None:
    twice: list[int] = []

    def last_again(free: list[int]) -> list[int]:
        twice[:] = free[-2:-1]
        return [*free[:-1], free[-2]]

    violations, _ = told([prompt(1)], "CONS", view={"free_blocks": last_again})
    assert [violations[0].block] == twice
    assert "is free twice" in violations[0].message


def test_what_is_given_back_beyond_the_table_is_named() -> None:
    run = [prompt(8), Finish(0)]
    violations, _ = told(run, "REF", change(BlocksReleased, blocks=[2, 2, 1]))
    assert violations[0].block == 2


@pytest.mark.parametrize(
    ("table", "end", "row", "named", "given"),
    [
        ([1, 6, 3], 9, 1, 6, "block 2"),
        ([1], 9, 1, None, "block 2"),
        ([1, 2, 3, 7], 13, 3, 7, "no block"),
    ],
)
def test_a_step_that_reads_through_a_wrong_table_is_told_by_row(
    table: list[int], end: int, row: int, named: int | None, given: str
) -> None:
    (violation,), _ = told(REUSING, "PROV", tables(table, end=end), groups=1)
    assert violation.message == (
        f"a step reads row {row} of request 1 through a table that names "
        f"{'no block' if named is None else f'block {named}'}, but the request was given {given}"
    )
    assert (violation.block, violation.request) == (named, 1)


@pytest.mark.parametrize("end", [8, 7, 5])
def test_each_row_that_a_step_reads_is_compared_when_it_is_launched(end: int) -> None:
    """The third row is new after each of these, and an audit would come too late."""
    run = [prompt(end), *STEP, Grow(0, 9 - end), Launch()]
    assert told(run, "PROV", tables((1, 2, 3)), interval=0) == ([], 0)
    (violation,), _ = told(run, "PROV", tables([1, 2, 6]), interval=0)
    assert (violation.block, violation.op) == (6, len(run) - 1)


def test_what_comes_back_is_read_from_its_first_token_on() -> None:
    run = [prompt(6), *STEP, Preempt(0, swap=True), Resume(0)]
    crossed = change(TransferStarted, targets=lambda blocks: blocks[::-1])
    assert told(run, "PROV", interval=0)[0] == []
    (violation,), _ = told(run, "PROV", crossed, interval=0)
    assert "reads position 0 from block" in violation.message


@pytest.mark.parametrize("position", [0, 3, 7])
def test_what_is_hit_is_read_from_its_first_token_on(position: int) -> None:
    witness = Witness(2)
    prov = next(kind for kind in CHECKS if kind.id() == "PROV")
    checker = Checker(witness, checks=[prov], interval=0)  # type: ignore[arg-type]
    for operation in (*CACHED, prompt(9), *STEP):
        if operation == prompt(9):
            checker.checks[0].shadows[1].content[4 + position] = FREED
        outcome = witness.subject.apply(operation)
        checker.observe(operation, outcome, list(witness.subject.drain_events()))
    (violation,) = checker.violations
    assert f"reads position {position} from block {1 + position // 4}" in violation.message
    assert (violation.group, violation.request) == (1, 1)


def test_bytes_of_what_is_held_or_unknown_are_no_matter_of_prov() -> None:
    held = BlocksEvicted(0, [1], [b""], "request")
    assert told([prompt(4), *STEP], "PROV", add(held))[0] == []
    assert told([prompt(4)], "PROV", add(TransferEnded(7, "completed")))[0] == []


@pytest.mark.parametrize(
    ("semantics", "promised"),
    [
        (Semantics(), True),
        (Semantics(eviction_order="any"), True),
        (Semantics(release_order="any"), True),
        (Semantics(eviction_order="any", release_order="any"), False),
        (Semantics(eviction_order="any", release_order="any", tiers=True), True),
        (Semantics(eviction_order="any", release_order="any", tiers=True, host_order="any"), True),
        (
            Semantics(
                eviction_order="any",
                release_order="any",
                tiers=True,
                host_order="any",
                disk_order="any",
            ),
            False,
        ),
    ],
)
def test_order_is_promised_where_any_order_is(semantics: Semantics, promised: bool) -> None:
    assert Order.promised(semantics) is promised


@pytest.mark.parametrize(
    ("check", "run", "looks"),
    [
        ("REF", [*CACHED, prompt(1, 1), Finish(0)], 1),
        ("PROV", [*CACHED, prompt(1, 1), *STEP], 1),
        ("PIN", [*CACHED, prompt(1, 1), Finish(0), Evict(2)], 1),
        ("PIN", [*CACHED, prompt(1, 1), Finish(0)], 1),
        ("PIN", [*CACHED, prompt(1, 1), Launch(), Finish(0)], 1),
        ("PIN", [*CACHED, prompt(1, 1), *STEP], 1),
        ("PIN", [*STORED, Finish(0), Evict(1), Evict(2, "host")], 1),
        ("ORDER", [*CACHED, Evict(2)], 1),
        ("ORDER", [*CACHED, prompt(1, 1), Finish(0)], 1),
        ("ORDER", [*STORED, Finish(0), Evict(1), Evict(2, "host")], 1),
        ("ORDER", [*CACHED, Evict(1), prompt(32, 1)], 2),
        ("ORDER", [*CACHED, Evict(1), prompt(26, 1), *STEP, Fork(0), Grow(0)], 2),
        ("ORDER", [*STORED, Finish(0), prompt(8, 1), *STEP, Offload()], 2),
        ("ORDER", [*DAMAGED], 0),
        ("KEY", AGAIN, 1),
        ("KEY", [*CACHED, prompt(9), Finish(0), prompt(9)], 1),
        ("QUIES", [*CACHED, prompt(1, 1), Withhold("device", 2), Finish(0)], 1),
        ("VALID", AGAIN, 1),
        ("VALID", [*CACHED, prompt(9)], 1),
        ("EXCL", [*CACHED, prompt(1, 1)], 1),
        ("EXCL", [prompt(6), Launch()], 1),
        ("EXCL", [*FORKED, Grow(1)], 1),
        ("EXCL", STORING, 1),
        ("XFER", [*STORED, Offload("disk")], 1),
        ("XFER", [*STORED, Offload("disk"), Complete()], 1),
    ],
)
def test_looks_are_counted(check: str, run: Sequence[AnyOperation], looks: int) -> None:
    assert told(run, check) == ([], looks)


def test_a_copy_on_write_that_leaves_something_out_is_seen_when_it_is_made() -> None:
    run = [*FORKED, Grow(1)]
    assert told(run, "PROV", interval=1000)[0] == []
    (violation,), _ = told(run, "PROV", change(BlockCopied, tokens=1), interval=1000)
    assert "position 5 from block 3, offset 1" in violation.message
    assert (violation.op, violation.block, violation.request) == (len(run) - 1, 3, 1)


def test_a_lost_slot_is_laid_to_the_latest_copy_of_its_tier() -> None:
    run = [*STORED, Offload("disk"), prompt(4, 1), *STEP, Offload()]
    violations, _ = told(run, "CONS", view={"free_tier_count": add_one})
    assert {violation.tier: violation.transfer for violation in violations} == {
        "disk": 1,
        "host": 2,
    }


EXTENDING = (*STORED, Finish(0), Evict(1), *OTHERS_STORED, PROMOTE)
FETCHING = (*SAVED, Finish(0), Evict(1, "host"), *OTHERS_STORED, Evict(9), FETCH)


def test_a_copy_upwards_is_to_spare_its_own_prompt() -> None:
    assert told(EXTENDING, "ORDER", blocks=2) == ([], 2)
    assert told(FETCHING, "ORDER", host_blocks=2) == ([], 2)
    own = change(SlotsEvicted, slots=lambda slots: [1 - slots[0]])
    loose: dict[str, Any] = {"host_blocks": 2, "interval": 0, "semantics": {"exact_tiers": False}}
    assert told(FETCHING, "ORDER", own, **loose)[0] == []
    (violation,), _ = told(FETCHING, "ORDER", own, host_blocks=2)
    assert "was evicted for a copy of other blocks of the same prompt" in violation.message
    assert (violation.tier, violation.group) == ("host", 0)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_was_to_be_evicted_is_told_by_the_order_that_was_promised(tier: Tier) -> None:
    run = [*STORED, Finish(0), Evict(1, tier)]
    wrong: Lie = change(BlocksEvicted, blocks=[1])
    if tier == "host":
        wrong = change(SlotsEvicted, slots=[0])
    for order in ("lru", "arc"):
        (violation,), _ = told(run, "ORDER", wrong, **{f"{tier}_eviction": order})
        assert (violation.tier, violation.op) == (tier, len(run) - 1)
        assert ("ARC" in violation.message) is (order == "arc")
        if (tier, order) == ("host", "lru"):
            assert violation.message.endswith("but block 1 was to go before it")


def test_evicting_what_is_not_there_is_no_matter_of_order() -> None:
    run = [*STORED, Finish(0), Evict(9, "host")]
    more = change(SlotsEvicted, slots=lambda slots: [*slots, 2], keys=lambda keys: [*keys, b""])
    assert told(run, "ORDER", more) == ([], 1)


def test_the_first_block_that_is_evicted_out_of_order_is_named() -> None:
    run = [prompt(12), *STEP, Finish(0), Evict(2)]
    (violation,), _ = told(run, "ORDER", change(BlocksEvicted, blocks=[3, 1]))
    assert violation.message == (
        "block 1 was evicted on request, but block 2 was released before it and never used since"
    )
    more = change(BlocksEvicted, blocks=[3, 2, 1, 8])
    assert told([*run[:-1], Evict(9)], "ORDER", more)[0] == []


@pytest.mark.parametrize(
    ("run", "lie", "said"),
    [
        ([*CACHED, Evict(1)], change(BlocksEvicted, blocks=[1]), "block 1 was evicted on request"),
        (CACHED, change(BlocksReleased, blocks=[1, 2]), "request 0 gave back its blocks as [1, 2]"),
    ],
)
def test_what_goes_in_pieces_goes_in_the_order_that_was_promised(
    run: Sequence[AnyOperation], lie: Lie, said: str
) -> None:
    pieces = {"exact_eviction": False}
    assert told(run, "ORDER", semantics=pieces)[0] == []
    violations, _ = told(run, "ORDER", lie, interval=0, semantics=pieces)
    assert [violation.message.startswith(said) for violation in violations] == [True]


USED_AGAIN = (*CACHED, prompt(9), *STEP, Finish(0))


@pytest.mark.parametrize("more", [(), (Evict(2),)])
def test_the_order_of_arc_is_not_that_of_release(more: Sequence[AnyOperation]) -> None:
    """What was used again is evicted after what is new."""
    run = (*USED_AGAIN, prompt(8, 1), *STEP, Finish(0), *more)
    assert told(run, "ORDER", device_eviction="arc")[0] == []


FOUR_CACHED = (prompt(16), *STEP, Finish(0))


@pytest.mark.parametrize(
    ("order", "by"), [("lru", "by the time of their release"), ("arc", "by ARC (")]
)
@pytest.mark.parametrize(("actual", "named"), [([4, 3, 1, 2], 1), ([4, 3, 2], 2), ([], 1)])
def test_free_blocks_that_stand_in_another_order_are_named(
    order: str, by: str, actual: list[int], named: int
) -> None:
    """Four of eight are cached, and stand behind the others."""
    view = {"free_blocks": lambda free: [*free[:4], *actual]}
    (violation,), _ = told(FOUR_CACHED, "ORDER", view=view, groups=2, device_eviction=order)
    start, end = violation.message.split(", but ")
    assert start == f"the next victims are blocks {actual}"
    assert end.startswith(by)
    assert end.endswith("they should be [4, 3, 2, 1]")
    assert (violation.group, violation.block) == (1, named)


TEN_STORED = (prompt(40), *STEP, Offload(), Complete(), Complete())


@pytest.mark.parametrize(("order", "by"), [("lru", ""), ("arc", " by ARC (")])
@pytest.mark.parametrize(("actual", "named"), [([0, 1, 2], 0), ([], 9)])
def test_slots_that_stand_in_another_order_are_named(
    order: str, by: str, actual: list[int], named: int
) -> None:
    sizes: dict[str, Any] = {"blocks": 16, "host_blocks": 10, "host_eviction": order}
    view = {"victims": lambda victims: actual if victims else victims}
    (violation,), _ = told(TEN_STORED, "ORDER", view=view, groups=2, **sizes)
    start, end = violation.message.split(", but")
    assert start == f"the next victims are host blocks {actual}"
    assert end.startswith(f"{by}" if by else " they should be")
    assert end.endswith("they should be [9, 8, 7, 6, 5, 4, 3, 2]")
    assert (violation.group, violation.block, violation.tier) == (1, named, "host")


def test_a_copy_that_evicts_though_a_slot_is_empty_is_told() -> None:
    evicted = SlotsEvicted("host", 1, [1], [b""], "pressure")
    run = (*BOTH_STORED, prompt(4, 1), *STEP, Offload())
    lie: Lie = lambda events: [*events[:-1], evicted, events[-1]]  # noqa: E731
    (violation,), _ = told(run, "ORDER", lie, groups=2, interval=0)
    assert violation.message.startswith("1 host block was evicted for the 1 that transfer 3")
    assert (violation.group, violation.tier) == (1, "host")


def test_a_copy_upwards_is_to_spare_its_own_prompt_in_each_group() -> None:
    saved = (*BOTH_STORED, Offload("disk"), Complete(), Complete(), Finish(0), Evict(1, "host"))
    run = (*saved, prompt(4, 1), *STEP, Finish(0), Offload(), Complete(), Complete(), Evict(9))
    own = change(SlotsEvicted, slots=lambda slots: [1 - slots[0]])
    (violation,), _ = told([*run, FETCH], "ORDER", own, groups=2, host_blocks=2)
    assert (violation.tier, violation.group) == ("host", 1)


def test_what_is_taken_and_hit_is_told_of_each_group() -> None:
    run = [prompt(4), *STEP, prompt(5)]
    refused = {"status": "refused", "reason": "no_free_blocks", "request": None}
    (violation,), _ = told(run, "CAP", lambda _: [], groups=2, interval=0, says=refused)
    takes = "it takes 1: 5 tokens need 2, of which block 1 is a hit"
    assert violation.message == (
        "admit was refused (no_free_blocks), but it should have been done: 7, 7 blocks were free; "
        f"in group 0 {takes}; in group 1 {takes}"
    )
    (violation,), _ = told(run, "CAP", groups=2, interval=0, says={"cached_tokens": 0})
    assert violation.message == (
        "admit: 0 cached tokens were claimed, but it should be 4: in group 0 block 1 is a hit; in "
        "group 1 block 1 is a hit"
    )


@pytest.mark.parametrize(
    ("run", "says", "message"),
    [
        (
            [prompt(8), *STEP, prompt(12, 1), prompt(5)],
            {"status": "refused", "reason": "no_free_blocks", "request": None},
            "admit was refused (no_free_blocks), but it should have been done: 3 blocks were free; "
            "it takes 2 at most",
        ),
        (
            [prompt(8), *STEP, prompt(20, 1), prompt(9, 2)],
            {"status": "done", "reason": None, "request": 2},
            "admit was done, but it should have been refused (no_free_blocks): 1 block was free; "
            "it takes 3 at least",
        ),
    ],
)
def test_without_exact_admission_bounds_are_told(
    run: Sequence[AnyOperation], says: dict[str, Any], message: str
) -> None:
    status = "done" if says["status"] == "refused" else "refused"
    inexact = {"exact_admission": False, "keeps_room": False}
    seen, _ = told(
        run, "CAP", lambda _: [], interval=0, status=status, says=says, semantics=inexact
    )
    assert [violation.message for violation in seen] == [message]


def test_an_allocation_that_evicts_too_much_is_told() -> None:
    run = (prompt(32), *STEP, Finish(0), prompt(1, 1))
    (violation,), _ = told(run, "ORDER", change(BlocksEvicted, blocks=[8, 7]), interval=0)
    assert violation.message == (
        "2 blocks were evicted for the 1 that request 1 needs, though 0 free blocks were empty"
    )
    assert violation.request == 1


def test_the_order_in_which_nobody_gives_back_blocks_is_no_matter() -> None:
    assert told([prompt(1)], "ORDER", add(BlocksReleased(0, 9, [1])), interval=0) == ([], 0)


def test_keys_of_an_unknown_request_are_no_matter_of_key() -> None:
    published = BlocksPublished(0, 9, 0, [1], [b"key"])
    assert told([prompt(1)], "KEY", add(published)) == ([], 0)


def test_what_is_not_findable_may_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_REMEMBERED", 1)
    run = [*CACHED, prompt(12), *STEP, Finish(0), Evict(9), prompt(8), *STEP]
    assert told(run, "KEY", groups=2)[0] == []


def overwritten(*blocks: int) -> list[Event]:
    """What is in them is not what it was: a request that nobody knows has copied block 6 there."""
    return [BlockCopied(0, 9, 0, 6, block, 4) for block in blocks]


@pytest.mark.parametrize("end", [Preempt(0), Abort(0), Finish(0)])
def test_what_a_step_reads_for_a_request_that_is_gone_is_read_from_its_first_token_on(
    end: AnyOperation,
) -> None:
    run = [prompt(4), *STEP, Grow(0, 1), Launch(), end, Retire()]
    assert told(run, "PROV")[0] == []
    violations, _ = told(run, "PROV", lambda events: [*overwritten(1), *events])
    assert "request 0 reads position 0 from block 1" in violations[0].message


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)])
def test_an_audit_tells_of_the_first_request_that_has_lost_something(lost: Sequence[int]) -> None:
    run = [prompt(4), prompt(4, 1), *STEP, prompt(1, 2)]
    violations, _ = told(run, "PROV", lambda events: [*events, *overwritten(*lost)])
    assert [violation.request for violation in violations] == [lost[0] - 1]


@pytest.mark.parametrize(
    ("offset", "named"),
    [
        (0, None),  # its row was published before
        (4, "block 2 is findable as row 1 of request 0, but its offset 0 holds freed"),
        (7, "block 2 is findable as row 1 of request 0, but its offset 3 holds freed"),
        (8, None),
    ],
)
def test_what_no_step_has_read_is_compared_when_it_is_published(
    offset: int, named: str | None
) -> None:
    """Nobody moves the bytes of steps here but the test, which spoils one when all is computed."""
    witness = Witness(2)
    valid = next(kind for kind in CHECKS if kind.id() == "VALID")
    checker = Checker(witness, checks=[valid], interval=0)  # type: ignore[arg-type]
    shadows = checker.checks[0].shadows
    for operation in (prompt(9), Launch(4), Retire(), Launch(), Retire()):
        for request in checker.books.requests.values():
            for shadow, table in zip(shadows, request.tables, strict=True):
                shadow.write(request.tags, 0, 9, table)
            if request.scheduled == 9:
                shadows[1].content[4 + offset] = FREED
        outcome = witness.subject.apply(operation)
        checker.observe(operation, outcome, list(witness.subject.drain_events()))
    found = [(one.message, one.group, one.block, one.request) for one in checker.violations]
    assert found == ([] if named is None else [(named, 1, 2, 0)])


# -- answers ---------------------------------------------------------------------------------------


def serve(request: int) -> Callable[[Any], Any]:
    return lambda items: [replace(items[0], request=request), *items[1:]]


LOADING = (prompt(6), *STEP, Preempt(0, swap=True), Resume(0, late=True))


def test_a_step_serves_the_oldest_that_can_run() -> None:
    run = [*LOADING, prompt(4, 1), prompt(4, 2), Launch(4)]
    assert told(run, "CAP")[0] == []
    (violation,), _ = told(run, "CAP", change(StepLaunched, items=serve(2)))
    assert violation.message == (
        "step 1 leaves 4 tokens of request 1 uncomputed, but serves request 2, which was admitted "
        "later"
    )
    assert violation.request == 1


@pytest.mark.parametrize(
    "run",
    [
        [prompt(8), Launch(4), Launch(4), Launch(4)],
        [prompt(4), Preempt(0), Resume(0, 33)],
        [prompt(4), *[prompt(1, 1)] * 3, prompt(1, 1)],
        [prompt(16), prompt(13, 1), prompt(5, 2)],
        [prompt(8), *STEP, Finish(0), prompt(24, 1), prompt(9)],
        [prompt(1), Offload()],
        [*CACHED, PROMOTE],
        [*SAVED, Finish(0), Evict(9), Evict(9, "host"), Slow(2), FETCH],
    ],
)
def test_what_is_refused_rightly_is_no_matter_of_cap(run: Sequence[AnyOperation]) -> None:
    assert told(run, "CAP", status="refused")[0] == []


@pytest.mark.parametrize(
    ("check", "run", "says", "message", "request_id"),
    [
        ("LIFE", [prompt(6), *STEP, Fork(0, 2)], {"children": (1,)}, "into 2 made 1 children", 0),
        ("LIFE", [prompt(6), *STEP, Fork(0)], {"children": (1, 2)}, "into 1 made 2 children", 0),
        ("CAP", [*SAVED, Corrupt()], {"count": 9}, "corrupt: 9 were counted, but it", None),
    ],
)
def test_a_wrong_answer_is_told_with_whose_it_is(
    check: str,
    run: Sequence[AnyOperation],
    says: dict[str, Any],
    message: str,
    request_id: int | None,
) -> None:
    violations, _ = told(run, check, says=says)
    named = [one.request for one in violations if message in one.message]
    assert named == [request_id]


@pytest.mark.parametrize(
    "run",
    [
        [prompt(1)],
        [prompt(1), Launch()],
        [*CACHED, Evict(1)],
        [*CACHED, Reset()],
        STORING,
        [*STORED, Finish(0), Evict(9), PROMOTE],
        [Withhold("host", 2)],
        [*SAVED, Corrupt()],
        [*SAVED, Restart()],
        [Slow(2)],
    ],
)
def test_what_names_no_candidate_is_never_skipped(run: Sequence[AnyOperation]) -> None:
    assert told(run, "CAP")[0] == []
    nothing = {"status": "skipped", "request": None, "cached_tokens": 0, "transfers": ()}
    violations, _ = told(run, "CAP", says=nothing)
    kind = type(run[-1]).__name__.lower()
    assert len(violations) == 1
    assert violations[0].message.startswith(f"{kind} was skipped, but it should have been done")


def test_what_is_computed_need_not_be_findable_where_nothing_is_cached() -> None:
    assert told([prompt(8), *STEP], "VALID", prefix_caching=False)[0] == []


def test_all_blocks_that_a_crash_left_whole_on_disk_are_there() -> None:
    tokens = prompt_tokens(prompt(8).prompt)
    first = block_key(root_key(0, 0, 0), tokens[:4], b"")
    keys = [first, block_key(first, tokens[4:], b"")]
    run = [*STORED, Offload("disk"), Restart()]
    both: Lie = change(TierReopened, slots=[0, 1], keys=keys)
    assert told(run, "XFER", both)[0] == []


BOUNDED: dict[str, Any] = {"exact_admission": False}


def test_a_hit_on_all_that_is_asked_for_takes_no_free_block() -> None:
    admit = Admit((Segment(0, 9),), slots=8)
    run = [prompt(8), *STEP, admit]
    assert told(run, "CAP", semantics=BOUNDED, blocks=2)[0] == []


def test_what_is_kept_behind_a_window_says_in_which_group() -> None:
    windows = BOUNDED | {"windows": (0, 5)}
    (violation,) = told([prompt(9), *STEP, Grow(0)], "CAP", semantics=windows, groups=2)[0]
    assert (violation.group, violation.block, violation.request) == (1, 1, 0)
    assert "behind its window" in violation.message


def test_an_audit_names_one_entry_that_is_wrong() -> None:
    run = [*CACHED, prompt(1, 1)]
    (violation,) = told(run, "VALID", view={"index": lambda index: {}})[0]
    assert "finds nothing under key" in violation.message


MESSAGES: list[tuple[Sequence[AnyOperation], Lie | None, dict[str, Any], str]] = [
    (
        [*CACHED, prompt(1, 1)],
        change(BlocksAllocated, blocks=[1]),
        {},
        "block 1 was given to request 1 while its old content was still findable",
    ),
    (
        [prompt(8), *STEP],
        change(BlocksPublished, blocks=[1], keys=lambda keys: keys[:1]),
        {},
        "row 1 of request 0 is complete in block 2",
    ),
    ([*STORING, Complete()], None, GONE, "the host finds nothing under key"),
    ([*STORING, Complete()], None, GONE, "but it should find block 0"),
    (STORED, None, {"tier_index": lambda index: {**index, b"x": 2}}, "it should find nothing"),
    (
        STORED,
        None,
        {"tier_content": lambda content: None},
        "host block 0 is findable, but its bytes are damaged",
    ),
]


@pytest.mark.parametrize(("run", "lie", "view", "says"), MESSAGES)
def test_what_is_not_valid_is_told_in_words(
    run: Sequence[AnyOperation], lie: Lie | None, view: dict[str, Any], says: str
) -> None:
    violations, _ = told(run, "VALID", *([lie] if lie else []), view=view)
    assert says in violations[0].message


def test_bytes_that_nobody_shows_are_not_compared() -> None:
    run = [*LEAVING, Complete(), Resume(0)]
    assert told(run, "XFER", semantics={"tier_bytes": False})[0] == []


def test_who_has_computed_all_may_end_where_releases_are_not_fenced() -> None:
    at_once = {"fences_releases": False, "stream_order": False}
    assert told([prompt(5), *STEP, Finish(0)], "CAP", semantics=at_once)[0] == []
