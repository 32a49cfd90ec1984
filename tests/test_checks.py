"""Each check, alone: silent on the truth, and fires on each way of breaking its property.

A run of the engine is told to the check truthfully up to one operation, about which the report
lies in one way: its outcome, its events, or what the view shows from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kvproof.engine.keys import block_key, root_key
from kvproof.engine.metrics import REQUEST_METRICS, SCHEDULER_METRICS
from kvproof.invariants.checker import Checker
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.xfer import Xfer
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    ReleaseFenced,
    RequestAdmitted,
    RequestsDecoded,
    SlotsReleased,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferEnded,
    TransferStarted,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.property import Check
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects.engine import EngineSubject

Events = list[Event]
BY_ID = {check.id(): check for check in CHECKS}


class SilentXfer(Xfer):
    """Moves the bytes of swaps, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


LEANS_ON: dict[str, type[Check]] = {
    "VALID": BY_ID["PROV"],
    "ATOM": BY_ID["CAP"],
    "PROV": SilentXfer,
}
"""PROV and XFER move the shadow memory's bytes, CAP predicts which blocks an admission would
reuse."""


class Lie(Struct, frozen=True):
    """What is untrue about the operation number ``at``."""

    outcome: Callable[[Outcome], Outcome] = lambda outcome: outcome
    events: Callable[[Events], Sequence[Event]] = lambda events: events
    view: dict[str, Callable[[Any], Any]] = {}
    """From then on: method of the view, and what becomes of its answer."""
    at: int = -1


class Lens:
    """A view through which some answers look different."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.changes: dict[str, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._view, name)
        return lambda *arguments: self.changes.get(name, lambda answer: answer)(method(*arguments))


class Witness:
    """The engine, as it is told to a checker."""

    def __init__(self, configuration: Configuration, **semantics: Any) -> None:
        self.subject = EngineSubject(configuration)
        self.configuration = configuration
        self.semantics = replace(self.subject.semantics, **semantics)
        self.lens = Lens(self.subject.view())

    def view(self) -> Lens:
        return self.lens


def found(
    run: Sequence[Operation],
    *lies: Lie,
    checks: Sequence[type[Check]] = CHECKS,
    **semantics: Any,
) -> list[Violation]:
    """What the checks say of the run; they settle and audit after each operation."""
    witness = Witness(Configuration(blocks=8, requests=4, host_blocks=2), **semantics)
    checker = Checker(witness, checks=checks, interval=1)  # type: ignore[arg-type]
    for number, operation in enumerate(run):
        outcome = witness.subject.apply(operation)
        events: Sequence[Event] = list(witness.subject.drain_events())
        for lie in lies:
            if number == lie.at % len(run):
                outcome, events = lie.outcome(outcome), lie.events(list(events))
                witness.lens.changes |= lie.view
        checker.observe(operation, outcome, events)
        if checker.violations:
            break
    return list(checker.violations)


# -- lies ------------------------------------------------------------------------------------------


def says(**changes: Any) -> Lie:
    """The outcome says something else."""
    return Lie(outcome=lambda outcome: replace(outcome, **changes))


def answers(outcome: Outcome) -> Lie:
    """Another outcome, and nothing happened."""
    return Lie(outcome=lambda _: outcome, events=lambda _: [])


def change(kind: type[Event], *, at: int = -1, nth: int = 0, **fields: Any) -> Lie:
    """An event of that kind says something else; a callable field is put to the true value."""

    def changed(events: Events) -> Events:
        index = [i for i, event in enumerate(events) if isinstance(event, kind)][nth]
        true = events[index]
        new = {n: v(getattr(true, n)) if callable(v) else v for n, v in fields.items()}
        return [*events[:index], replace(true, **new), *events[index + 1 :]]

    return Lie(events=changed, at=at)


def item(**fields: Any) -> Lie:
    """The first item of a launched step says something else."""
    return change(StepLaunched, items=lambda items: [replace(items[0], **fields), *items[1:]])


def drop(*kinds: type[Event], at: int = -1) -> Lie:
    return Lie(events=lambda events: [e for e in events if not isinstance(e, kinds)], at=at)


def add(*events: Event) -> Lie:
    return Lie(events=lambda true: [*true, *events])


def instead(*events: Event) -> Lie:
    return Lie(events=lambda _: list(events))


def shows(**changes: Callable[[Any], Any]) -> Lie:
    return Lie(view=changes)


def put(index: int, value: int) -> Callable[[Sequence[int]], list[int]]:
    return lambda true: [*true[:index], value, *true[index + 1 :]]


def stands(index: int, value: Any) -> Lie:
    """Part ``index`` of a request's standing looks different."""
    return shows(standing=lambda true: (*true[:index], value, *true[index + 1 :]))


def add_to(more: int) -> Callable[[int], int]:
    return lambda true: true + more


def counted(name: str) -> Callable[[dict[str, int]], dict[str, int]]:
    return lambda true: {**true, name: true[name] + 1}


def given(*blocks: int) -> Lie:
    return change(BlocksAllocated, blocks=list(blocks))


def published(row: int, *blocks: int, key: bytes | None = None) -> BlocksPublished:
    keys = [key or bytes([block]) for block in blocks]
    return BlocksPublished(0, 0, row, list(blocks), keys)


def evicted(block: int, cause: Any = "request") -> BlocksEvicted:
    return BlocksEvicted(0, [block], [KEY], cause)


def more(item: StepItem) -> Lie:
    """A launched step carries one item more."""
    return change(StepLaunched, items=lambda items: [*items, item])


def prompt(length: int, source: int = 0, slots: int = 0) -> Admit:
    return Admit((Segment(source, length),), slots=slots)


STEP = (Launch(), Retire())
CACHED = (prompt(8), *STEP, Finish(0))
FORKED = (prompt(6), *STEP, Fork(0))
IN_FLIGHT = (prompt(1), Launch(), Finish(0), Retire())
USED = (prompt(6), prompt(1, 1), *STEP, Finish(1))
AWAY = (prompt(1), Preempt(0), prompt(1))
TWO = (prompt(4), prompt(4, 1), *STEP)
OUT = Preempt(0, swap=True)
SWAPPED = (prompt(6), *STEP, OUT)
PART = prompt(9, slots=4)
KEY = b"a key"
KEY_OF_FIRST = block_key(root_key(0, 0, 0), prompt_tokens(prompt(4).prompt), b"")
REFUSED = Outcome("refused", "no_free_blocks")
DONE = Outcome("done")

Row = tuple[str, Sequence[Operation], Lie, str, int | None, int | None]
ROWS: list[Row] = []


def row(
    check: str,
    run: Sequence[Operation],
    lie: Lie,
    message: str,
    block: int | None = None,
    request: int | None = None,
) -> None:
    """The check sees the lie about the run's last operation, and names block and request."""
    ROWS.append((check, run, lie, message, block, request))


# LIFE: who is alive, and in which state
row("LIFE", [prompt(1), prompt(1), Finish(0)], says(request=1), "names request 0", None, 1)
row("LIFE", [prompt(1), Grow(0)], answers(SKIPPED), "grow was skipped for request None")
row("LIFE", [prompt(1), Abort(0)], answers(SKIPPED), "of 1 candidates it names request 0")
row("LIFE", [Grow(0)], says(status="done", request=0), "of 0 candidates", None, 0)
row("LIFE", [prompt(1), *STEP], answers(SKIPPED), "retire was skipped with 1 in flight")
row("LIFE", [prompt(1), prompt(1)], says(request=0), "a new request is called 0", None, 0)
row("LIFE", FORKED, says(children=(0,)), "a new request is called 0", None, 0)
row("LIFE", [prompt(1)], add(BlocksAllocated(0, 9, 0, [5])), "does not fit what happened")
row("LIFE", [prompt(1)], change(BlocksAllocated, row=1), "does not fit what happened")
row("LIFE", [prompt(1)], change(RequestAdmitted, cached_tokens=1), "does not fit what happened")
row("LIFE", [prompt(1), *STEP], change(StepRetired, step=7), "does not fit what happened")
row("LIFE", [prompt(1)], stands(0, "preempted"), "request 0 is preempted, not running", None, 0)
row("LIFE", [prompt(1)], stands(1, 2), "has 2 tokens, but it was given 1", None, 0)
row("LIFE", [prompt(1)], shows(requests=lambda _: []), "live requests are [], but should be [0]")
row("LIFE", [prompt(1), Launch()], shows(steps_in_flight=lambda _: []), "in flight, not [0]")
row("LIFE", [prompt(1)], shows(table=lambda _: [5]), "is [5], but it was given [1]", None, 0)
row(
    "LIFE",
    [*TWO, Decode((1, 3))],
    says(children=(0,)),
    "for requests [0], but of 2 candidates it names [1]",
)
row(
    "LIFE",
    [*TWO, Decode((0, 1))],
    says(children=(1, 0)),
    "[1, 0], but of 2 candidates it names [0, 1]",
)
row(
    "LIFE",
    [prompt(1), Decode((0,))],
    says(children=(0, 0)),
    "[0, 0], but of 1 candidates it names [0]",
)
row(
    "LIFE",
    [prompt(1), Decode((0,))],
    answers(SKIPPED),
    "skipped for requests [], but of 1 candidates it names [0]",
)
row("LIFE", [Decode((0,))], answers(Outcome("done")), "decode was done for requests []")
row(
    "LIFE",
    [*TWO, Decode((1,))],
    change(RequestsDecoded, requests=[9]),
    "does not fit what happened",
)
row("LIFE", [prompt(4), Decode((0,))], stands(1, 4), "has 4 tokens, but it was", None, 0)
row("LIFE", [prompt(1), Reserve(0, 5)], answers(SKIPPED), "reserve was skipped for request None")
row("LIFE", SWAPPED, stands(0, "preempted"), "request 0 is preempted, not swapped", None, 0)
row("LIFE", AWAY[:2], stands(0, "swapped"), "request 0 is swapped, not preempted", None, 0)
row("LIFE", [*SWAPPED, Resume(0)], change(TransferStarted, request=9), "does not fit what")
row("LIFE", [*SWAPPED, Abort(0)], change(SlotsReleased, slots=[0]), "does not fit what")

# CONS: free and held blocks make the pool
row("CONS", [prompt(1)], shows(free_count=add_to(1)), "8 blocks are reported free and 1 are held")
row("CONS", [prompt(1)], shows(free_blocks=put(0, 8)), "block 8 is free twice", 8)
row("CONS", [prompt(1)], shows(free_blocks=put(0, 0)), "reserved block 0 is free", 0)
row("CONS", [prompt(1)], shows(free_blocks=lambda f: [1, *f]), "free, and held 1 times", 1)
row("CONS", [prompt(1)], shows(free_blocks=lambda f: f[1:]), "is neither free nor held", 2)
row("CONS", [prompt(1)], shows(free_blocks=lambda f: f[1:]), "but the counter says 7")
row("CONS", [prompt(1)], shows(free_tier_count=add_to(-1)), "1 host blocks are reported free and 0")
row("CONS", SWAPPED, shows(free_tier_count=add_to(1)), "1 host blocks are reported free and 2 are")
row(
    "CONS",
    [*SWAPPED, Resume(0)],
    shows(free_tier_count=lambda _: 0),
    "not make the tier's 2",
)
row(
    "CONS",
    [*SWAPPED, Resume(0)],
    drop(TransferStarted, TransferEnded),
    "2 host blocks are reported free and 2",
)
row("CONS", [*SWAPPED, Abort(0)], shows(free_tier_count=lambda _: 1), "1 host blocks are reported")

# REF: counts are numbers of holders
row("REF", [prompt(1)], shows(ref_counts=put(1, 2)), "count of 2, but 1 holder has it", 1)
row("REF", [prompt(1)], shows(ref_counts=put(7, 1)), "count of 1, but 0 holders have it", 7)
row("REF", FORKED, shows(ref_counts=put(2, 1)), "count of 1, but 2 holders have it", 2)
row("REF", [prompt(1), Finish(0)], add(BlocksReleased(0, 0, [1])), "but nothing held it", 1, 0)
row("REF", [prompt(4), prompt(4), Finish(0)], change(BlocksReleased, blocks=[2]), "held [1]", 1, 0)
row("REF", [prompt(8), Finish(0)], change(BlocksReleased, blocks=[2]), "held [1, 2]", 1, 0)
row("REF", IN_FLIGHT, change(BlocksReleased, blocks=[]), "but its table held [1]", 1, 0)

# EXCL: one owner of what is written
row("EXCL", [prompt(1), prompt(1)], given(1), "while request 0 held it", 1, 1)
row("EXCL", [prompt(8)], given(1, 1), "block 1 was handed out twice in one allocation", 1, 0)
row("EXCL", [prompt(1)], given(0), "reserved block 0 was given to request 0", 0, 0)
row("EXCL", [*IN_FLIGHT[:-1], prompt(1)], given(1), "step 0, in flight, for request 0 held", 1, 1)
row("EXCL", [*FORKED, Grow(1)], change(BlockCopied, target=1), "and request 1 held it", 1, 1)
row("EXCL", [*FORKED, Grow(1)], change(BlockCopied, source=1), "does not name there", 1, 1)
row("EXCL", [prompt(1), Launch()], item(tables=([5],)), "a table that names block 5", 5, 0)
row("EXCL", [prompt(5), *STEP, Grow(0), Launch()], item(start=0), "which is findable", 1, 0)
row("EXCL", [*FORKED, Grow(0), Launch()], item(start=0), "request 0 and request 1 hold it", 1, 0)
row("EXCL", [prompt(1), Reserve(0, 5)], given(1), "block 1 was given to request 0 while", 1, 0)
row("EXCL", [*FORKED, Decode((1,))], change(BlockCopied, target=1), "and request 1 held it", 1, 1)
row(
    "EXCL",
    [*TWO, Preempt(1, swap=True), OUT],
    change(TransferStarted, targets=[0]),
    "transfer 1 (swap_out) is to write host block 0, which holds request 1",
    0,
    0,
)
row(
    "EXCL",
    SWAPPED,
    change(TransferStarted, targets=[1, 1]),
    "transfer 0 (swap_out) is to write host block 1, 2 times",
    1,
    0,
)
row(
    "EXCL",
    SWAPPED,
    change(TransferStarted, targets=[0, 2]),
    "transfer 0 (swap_out) is to write host block 2, which is not there",
    2,
    0,
)

# XFER: copies between tiers; more of it where there are more tiers
row(
    "XFER",
    [*SWAPPED, Resume(0)],
    change(TransferStarted, targets=[2]),
    "transfer 1 (swap_in) starts from 2 blocks to 1",
    None,
    0,
)
row(
    "XFER",
    [*SWAPPED, Resume(0)],
    change(TransferStarted, sources=[1, 0]),
    "from host blocks [1, 0] to blocks [2, 3], but request 0 is in [0, 1], and has been given",
    None,
    0,
)
row(
    "XFER",
    [*SWAPPED, Resume(0)],
    change(TransferStarted, targets=[3, 2]),
    "to blocks [3, 2], but request 0 is in [0, 1], and has been given [2, 3]",
    None,
    0,
)
row(
    "XFER",
    SWAPPED,
    change(TransferStarted, sources=[1, 5]),
    "from blocks [1, 5], but the 6 computed tokens of request 0 are in [1, 2]",
    None,
    0,
)
row(
    "XFER",
    [prompt(4), *STEP, Grow(0), OUT],
    change(TransferStarted, sources=[1, 2], targets=[0, 1]),
    "from blocks [1, 2], but the 4 computed tokens of request 0 are in [1]",
    None,
    0,
)

# PIN: what is in use is neither freed nor evicted
row("PIN", IN_FLIGHT[:-1], instead(BlocksReleased(0, 0, [1])), "step 0, which uses them, was", 1, 0)
row("PIN", IN_FLIGHT[:-1], add(BlocksReleased(0, 0, [1], 0)), "while the step was in flight", 1, 0)
row("PIN", IN_FLIGHT, drop(BlocksReleased), "its fence still holds blocks [1]", 1, 0)
row(
    "PIN",
    [prompt(8), Launch(4), Launch(), Finish(0)],
    change(ReleaseFenced, step=0),
    "left to step 0, but its last step in flight is 1",
    None,
    0,
)
row("PIN", [prompt(4), *STEP, Evict(1)], add(evicted(1)), "on request while it was held", 1)

# ORDER: who is evicted, and when
row("ORDER", [*CACHED, Evict(1)], instead(evicted(1)), "but block 2 was released before it", 1)
row(
    "ORDER",
    [*CACHED, prompt(1, 1)],
    instead(evicted(2, "pressure"), BlocksAllocated(0, 1, 0, [2])),
    "though 6 free blocks were empty, such as 3, 4, 5, 6, and block 2 was cached",
    2,
    1,
)
row(
    "ORDER",
    [*CACHED, prompt(2, 1), *STEP, Fork(0), Grow(0)],
    Lie(events=lambda true: [evicted(2, "pressure"), *true]),
    "1 block was evicted for the 1 that request 1 needs, though 5 free blocks were empty",
    2,
    1,
)
row(
    "ORDER",
    CACHED,
    add(evicted(2, "pressure"), evicted(1)),
    "block 2 was evicted under pressure, but the operation takes no block after that, and 6 free "
    "blocks were empty",
    2,
)
row(
    "ORDER",
    [*CACHED, prompt(4, 1), *STEP],
    Lie(events=lambda true: [*true[:1], evicted(2, "pressure"), published(0, 1, key=KEY)]),
    "block after that, and 5 free blocks were empty: block 1 became findable under its key",
    2,
)
row("ORDER", [prompt(8), Finish(0)], change(BlocksReleased, blocks=[1, 2]), "[1, 2], not", 1, 0)
row(
    "ORDER",
    [prompt(8), Launch(), Finish(0), Retire()],
    change(BlocksReleased, blocks=[1, 2]),
    "[1, 2], not from the tail of its table [1, 2]",
    1,
    0,
)
row("ORDER", CACHED, shows(free_blocks=lambda f: [*f[:-2], 1, 2]), "victims are blocks [1, 2]", 1)
row(
    "ORDER",
    CACHED,
    shows(free_blocks=lambda f: [*f[1:-1], f[0], f[-1]]),
    "block 3 holds nothing findable, but stands behind cached 2",
    3,
)

# CAP: exact answers
row("CAP", [prompt(1)], answers(REFUSED), "admit was refused (no_free_blocks), but it should")
row(
    "CAP",
    [prompt(32), prompt(1)],
    says(status="done", reason=None, request=1),
    "0 blocks were",
    None,
    1,
)
row("CAP", [prompt(33)], says(reason="no_free_blocks"), "have been refused (larger_than_pool)")
row("CAP", [prompt(1)] * 5, says(reason="no_free_blocks"), "been refused (too_many_requests)")
row("CAP", [prompt(9)], says(cached_tokens=4), "4 cached tokens were claimed, but it", None, 0)
row("CAP", [*CACHED, prompt(8)], says(cached_tokens=8), "claimed, but it should be 4", None, 1)
row("CAP", [*CACHED, prompt(9)], says(cached_tokens=4), "claimed, but it should be 8", None, 1)
row(
    "CAP",
    [*AWAY[:2], Resume(0)],
    says(cached_tokens=4),
    "resume: 4 cached tokens were claimed",
    None,
    0,
)
row("CAP", [prompt(4), Grow(0)], answers(replace(REFUSED, request=0)), "7 blocks were", None, 0)
row("CAP", [prompt(1), Fork(0)], says(status="done", reason=None), "(not_computed)", None, 0)
row("CAP", [*FORKED, Fork(0, 3)], says(reason="not_computed"), "(too_many_requests)", None, 0)
row("CAP", [prompt(1), Launch()], says(count=2), "launch: 2 tokens were scheduled, but it should")
row("CAP", [prompt(9), Launch(5)], says(count=9), "launch: 9 tokens were scheduled, but it should")
row("CAP", [Launch()], says(reason="run_ahead_limit"), "should have been refused (nothing_to_run)")
row("CAP", [*CACHED, Evict(1)], says(count=2), "evict: 2 blocks were evicted, but it should be 1")
row("CAP", [*CACHED, Reset()], says(count=1), "reset: 1 block was evicted, but it should be 2")
row("CAP", [prompt(1), Reset()], answers(DONE), "should have been refused (blocks_in_use)")
row(
    "CAP",
    [prompt(1), *STEP],
    says(count=2),
    "retire: 2 requests were in the step, but it should be 1",
)
row("CAP", [prompt(4)], stands(3, (2,)), "4 slots, which need 1 block of 4, but holds 2", None, 0)
row("CAP", [PART], stands(3, (3,)), "9 tokens and 4 slots, which need 1 block of 4", None, 0)
row("CAP", [prompt(3, slots=9)], stands(3, (1,)), "3 tokens and 9 slots, which need 3", None, 0)
row("CAP", [PART, Grow(0)], stands(3, (1,)), "10 tokens and 10 slots, which need 3", None, 0)
row("CAP", [prompt(1), Reserve(0, 9)], stands(3, (4,)), "1 token and 9 slots, which", None, 0)
row("CAP", [prompt(3, slots=33)], says(reason="no_free_blocks"), "have been refused (larger_than")
row("CAP", [prompt(9), Preempt(0), Resume(0, 4)], stands(3, (3,)), "9 tokens and 4 sl", None, 0)
row("CAP", [PART, Reserve(0, 9)], says(count=3), "3 blocks were taken, but it should be 2", None, 0)
row(
    "CAP",
    [PART, Reserve(0, 9)],
    answers(replace(REFUSED, request=0)),
    "reserve was refused (no_free_blocks), but it should have been done: 7 blocks were free; it "
    "takes 2: 9 tokens need 3, and it has 1",
    None,
    0,
)
row(
    "CAP",
    [PART, Reserve(0, 33)],
    says(status="done", reason=None),
    "reserve was done, but it should have been refused (no_free_blocks): 7 blocks",
    None,
    0,
)
row("CAP", [*TWO, Decode((0, 1))], answers(REFUSED), "decode was refused (no_free_blocks), but it")
row(
    "CAP",
    [prompt(16), prompt(12, 1), Decode((0, 1))],
    says(status="done", reason=None, children=(0, 1)),
    "decode was done, but it should have been refused (no_free_blocks): 1 block was free; it takes "
    "2, for one token more of 2 requests",
)
row(
    "CAP",
    [*FORKED, prompt(24, 1), Decode((2, 0))],
    says(reason="not_computed"),
    "decode was refused (not_computed), but it should have been refused (no_free_blocks)",
)
row("CAP", [PART, Launch()], says(count=9), "launch: 9 tokens were scheduled, but it should be 4")
row("CAP", [PART, *STEP, Launch()], answers(DONE), "should have been refused (nothing_to_run)")
row(
    "CAP",
    [prompt(9), prompt(3, 1), Launch(items=((1, 9), (0, 2), (1, 1)))],
    says(count=4),
    "launch: 4 tokens were scheduled, but it should be 5",
)
row(
    "CAP",
    [prompt(4), prompt(4, 1), Launch(items=((1, 4),))],
    item(request=0, tables=([1],)),
    "computes (request, tokens) [(0, 4)], but it was to compute [(1, 4)]",
)
row(
    "CAP",
    [prompt(4), prompt(4, 1), Launch(items=((1, 4), (0, 4)))],
    change(StepLaunched, items=lambda items: items[::-1]),
    "computes (request, tokens) [(0, 4), (1, 4)], but it was to compute [(1, 4), (0, 4)]",
)
row(
    "CAP",
    [PART, Launch(items=((0, 9),))],
    says(count=9),
    "launch: 9 tokens were scheduled, but it should be 4",
)
row(
    "CAP",
    [*TWO, Launch(items=((0, 1),))],
    says(reason="run_ahead_limit"),
    "should have been refused (nothing_to_run)",
)
row(
    "CAP",
    SWAPPED,
    answers(Outcome("refused", "no_host_blocks", 0)),
    "preempt was refused (no_host_blocks), but it should have been done",
    None,
    0,
)
row(
    "CAP",
    SWAPPED,
    says(transfers=()),
    "preempt of 2 blocks started 0 transfers, but it should be 1",
    None,
    0,
)
row(
    "CAP",
    [prompt(9), *STEP, OUT],
    says(status="done", reason=None),
    "preempt was done, but it should have been refused (no_host_blocks)",
    None,
    0,
)
row(
    "CAP",
    [prompt(1), Launch(), OUT],
    says(status="done", reason=None),
    "preempt was done, but it should have been refused (in_flight)",
    None,
    0,
)
row("CAP", [*SWAPPED, Resume(0)], says(cached_tokens=4), "claimed, but it should be 6", None, 0)
row(
    "CAP",
    [*SWAPPED, prompt(28, 1), Resume(0)],
    says(status="done", reason=None, cached_tokens=6),
    "resume was done, but it should have been refused (no_free_blocks): 1 block was free; it takes "
    "2: 6 tokens need 2",
    None,
    0,
)
row(
    "CAP",
    [*SWAPPED, Resume(0, 33)],
    says(reason="no_free_blocks"),
    "should have been refused (larger_than_pool)",
    None,
    0,
)
row("CAP", [*SWAPPED, Resume(0, 1)], stands(3, (1,)), "slots, which need 2 blocks of", None, 0)

# … and what it says of the blocks that an operation takes: those beyond its hits, and free hits
REFUSED_FIRST = replace(REFUSED, request=0)
row(
    "CAP",
    [prompt(4), *STEP, prompt(24, 1), prompt(5)],
    answers(REFUSED),
    "done: 1 block was free; it takes 1: 5 tokens need 2, of which block 1 is a hit",
)
row(
    "CAP",
    [*CACHED, prompt(20, 1), prompt(12)],
    answers(REFUSED),
    "done: 3 blocks were free; it takes 3: 12 tokens need 3, of which blocks 1 and 2 are hits, but "
    "they are free themselves",
)
row(
    "CAP",
    [prompt(8), *STEP, prompt(5), Finish(0), prompt(9)],
    answers(REFUSED),
    "done: 6 blocks were free; it takes 2: 9 tokens need 3, of which blocks 1 and 2 are hits, but "
    "block 2 is free itself",
)
row(
    "CAP",
    [prompt(4), *STEP, Finish(0), prompt(28, 1), prompt(5)],
    says(status="done", reason=None, request=2, cached_tokens=4),
    "(no_free_blocks): 1 block was free; it takes 2: 5 tokens need 2, of which block 1 is a hit, "
    "but it is free itself",
    None,
    2,
)
row(
    "CAP",
    [prompt(24), *STEP, prompt(25)],
    answers(REFUSED),
    "it takes 1: 25 tokens need 7, of which blocks 1, 2, 3, 4 and 2 more are hits",
)
row("CAP", [prompt(1)], answers(REFUSED), "it takes 1: 1 token needs 1, none of which is a hit")
row("CAP", [PART], answers(REFUSED), "it takes 1: 4 tokens need 1, none of which is a hit")
row(
    "CAP",
    [*SWAPPED, prompt(28, 1), Resume(0, 1)],
    says(status="done", reason=None, cached_tokens=6),
    "1 block was free; it takes 2: 6 tokens need 2",
    None,
    0,
)
row(
    "CAP",
    [prompt(33)],
    says(reason="no_free_blocks"),
    "(larger_than_pool): 8 blocks were free; 33 tokens need 9, and there are 8 in all",
)
row(
    "CAP",
    [*FORKED, Grow(0, 3)],
    answers(REFUSED_FIRST),
    "6 blocks were free; it takes 2: 9 tokens need 3, and it has 2, one of them to be copied",
    None,
    0,
)
row(
    "CAP",
    [prompt(5), Preempt(0), Resume(0)],
    answers(REFUSED_FIRST),
    "8 blocks were free; it takes 2: 5 tokens need 2, none of which is a hit",
    None,
    0,
)
row(
    "CAP",
    [*CACHED, prompt(9)],
    says(cached_tokens=4),
    "admit: 4 cached tokens were claimed, but it should be 8: blocks 1 and 2 are hits",
    None,
    1,
)
WHIM = Outcome("refused", None, 0)
row(
    "CAP",
    [prompt(1)],
    answers(Outcome("refused")),
    "admit was refused, but it should have been done",
)
row(
    "CAP",
    [prompt(1), Grow(0)],
    answers(WHIM),
    "grow was refused, but it should have been done",
    None,
    0,
)
row("CAP", [prompt(1), Finish(0)], answers(WHIM), "finish was refused, but it should", None, 0)
row("CAP", [prompt(1), Preempt(0)], answers(WHIM), "preempt was refused, but it should", None, 0)
row("CAP", [*CACHED, Evict(1)], answers(SKIPPED), "evict was skipped, but it should")

# ATOM: refused means unchanged
row("ATOM", [prompt(33)], add(RequestAdmitted(0, 33, 0)), "but it changed state: 1 event(s)")
row("ATOM", [Retire()], add(StepRetired(0)), "retire was skipped (nothing to do), but it changed")
row("ATOM", [prompt(32), Grow(0)], stands(1, 33), "was refused, but it stands as", None, 0)
row("ATOM", [*CACHED, prompt(24, 1), prompt(13)], shows(ref_counts=put(1, 1)), "from 0 to 1", 1)
row(
    "ATOM",
    [prompt(32), Decode((0,))],
    add(RequestsDecoded([0])),
    "but it changed state: 1 event(s)",
)
row("ATOM", [prompt(32), Decode((0,))], stands(1, 33), "was refused, but it stands as", None, 0)
row("ATOM", [prompt(32), Reserve(0, 33)], stands(1, 33), "was refused, but it stands as", None, 0)
row(
    "ATOM",
    [prompt(9), *STEP, OUT],
    add(TransferStarted(0, "swap_out", 0, [1], [0], (), 0)),
    "preempt was refused (no_host_blocks), but it changed state: 1 event(s)",
    None,
    0,
)
row("ATOM", [prompt(1), Launch(), OUT], stands(0, "swapped"), "was refused, but it sta", None, 0)
row(
    "ATOM",
    [*CACHED, prompt(24, 1), prompt(13, slots=12)],
    shows(ref_counts=put(1, 1)),
    "from 0 to 1",
    1,
)

# QUIES: at rest everything is back
row("QUIES", [prompt(1), Finish(0)], drop(BlocksReleased), "but blocks [1] are still held", 1)
row("QUIES", [prompt(1), Abort(0)], shows(free_count=add_to(-1)), "but not all blocks are free")
row("QUIES", IN_FLIGHT, drop(BlocksReleased), "but blocks [1] are still held", 1)
row("QUIES", [*SWAPPED, Abort(0)], drop(SlotsReleased), "but host blocks [0, 1] are held", 0)

# PROV: whose bytes are read
row("PROV", [*FORKED, Grow(1)], change(BlockCopied, tokens=0), "which holds never written", 3, 1)
row(
    "PROV", [*FORKED, Grow(1)], change(BlockCopied, tokens=1), "from block 3, offset 1 (row 1", 3, 1
)
row("PROV", [*USED, Fork(0), Grow(0)], change(BlockCopied, tokens=0), "which holds freed", 3, 0)
row("PROV", [*CACHED, prompt(9), Launch()], item(tables=([6, 2, 3],)), "reads row 0", 6, 1)
row("PROV", [*CACHED, prompt(9), Launch()], item(tables=([1],)), "that names no block", None, 1)
row("PROV", [*FORKED, Decode((1,))], change(BlockCopied, tokens=0), "which holds never wr", 3, 1)
BACK = (*SWAPPED, Resume(0))  # from blocks 1 and 2 through host blocks 0 and 1 to blocks 2 and 3
row("PROV", BACK, change(TransferStarted, targets=[3, 2]), "which holds another token's KV", 2, 0)
row("PROV", BACK, change(TransferStarted, targets=[2, 4]), "position 4 from block 3", 3, 0)
row(
    "PROV",
    BACK,
    change(TransferStarted, sources=[0], targets=[2]),
    "position 4 from block 3, offset 0 (row 1 of its table), which holds never written",
    3,
    0,
)
row(
    "PROV",
    [*SWAPPED, Abort(0), prompt(1, 1), *STEP, OUT, Resume(0)],
    change(TransferStarted, sources=[1]),
    "which holds freed",
    2,
    1,
)

# VALID: what is findable is there, and what is not there is not findable
row("VALID", [*CACHED, prompt(1)], given(1), "while its old content was still findable", 1, 1)
row("VALID", [*CACHED, prompt(9)], change(BlocksReused, blocks=[1, 7]), "in which nothing is", 7, 1)
row("VALID", [prompt(8), Launch(4)], add(published(0, 1)), "computed only 0 tokens, not 4", 1, 0)
row(
    "VALID",
    [prompt(6), *STEP],
    instead(StepRetired(0), published(0, 1, 2)),
    "6 tokens, not 8",
    2,
    0,
)
row(
    "VALID",
    [prompt(4), *STEP],
    instead(StepRetired(0), published(0, 2)),
    "holds blocks [1] there",
    2,
    0,
)
row("VALID", [prompt(4), *STEP], drop(BlocksPublished), "no block is findable with that", 1, 0)
row("VALID", [prompt(4), *STEP], shows(index=lambda _: {}), "finds nothing under key", 1)
row("VALID", CACHED, shows(index=lambda true: {**true, KEY: (5,)}), "its block lost that", 5)
row("VALID", [*CACHED, Evict(9)], shows(index=lambda _: {KEY: (2,)}), "finds block 2 under key", 2)
row("VALID", TWO, shows(index=lambda true: {**true, KEY_OF_FIRST: (2,)}), "find block 1", 2)

# KEY: one key, one prefix
row("KEY", TWO, change(BlocksPublished, nth=1, keys=[KEY_OF_FIRST]), "for another prefix", 2, 1)
row(
    "KEY",
    [*CACHED, Evict(9), prompt(4), *STEP],
    change(BlocksPublished, keys=[KEY]),
    "the same prefix had",
    1,
    1,
)
row("KEY", [*TWO, prompt(5)], change(BlocksReused, blocks=[2]), "which holds another prefix", 2, 2)

# RESUME: as if it had never been away
row("RESUME", [*AWAY, Launch()], more(StepItem(0, 1, 0, 1, ([1],))), "which is preempted", None, 0)
row("RESUME", [prompt(1), Launch()], more(StepItem(0, 0, 0, 1, ([1],))), "carries twice", None, 0)
row("RESUME", [prompt(1), Launch()], item(epoch=1), "its epoch 1, but it was preempted 0", None, 0)
row("RESUME", [prompt(4), Launch()], item(start=1), "has 4 tokens, 0 of them computed or", None, 0)
row("RESUME", [prompt(4), Launch()], item(end=5), "which has 4 tokens", None, 0)
row("RESUME", [prompt(4), *STEP], stands(2, 0), "counts 0 tokens as computed, but 4 are", None, 0)
row("RESUME", AWAY[:2], stands(3, (1,)), "is preempted, but its table holds", None, 0)
row("RESUME", [prompt(1), Launch(), Preempt(0), Retire()], stands(2, 1), "counts 1 tokens", None, 0)
row("RESUME", SWAPPED, stands(2, 0), "counts 0 tokens as computed, but 6 are", None, 0)
row("RESUME", SWAPPED, stands(3, (1,)), "is preempted, but its table holds", None, 0)
row("RESUME", BACK, stands(2, 4), "counts 4 tokens as computed, but 6 are", None, 0)
row("RESUME", [*BACK, Grow(0), Launch()], item(start=0), "6 of them computed or in a step", None, 0)
row(
    "RESUME",
    [*SWAPPED, prompt(1), Launch()],
    more(StepItem(0, 1, 0, 1, ([1],))),
    "which is preem",
    None,
    0,
)

for name in SCHEDULER_METRICS:
    row("MET", TWO, shows(metrics=counted(name)), f"{name} is exported as")
for name in REQUEST_METRICS:
    row("MET", TWO, shows(request_metrics=counted(name)), f"{name} of request 0 is exp", None, 0)


@pytest.mark.parametrize(
    ("check", "run", "lie", "message", "block", "request_id"),
    ROWS,
    ids=[f"{row[0]}-{row[3]}" for row in ROWS],
)
def test_a_check_alone_sees_the_lie_and_not_the_truth(
    check: str,
    run: Sequence[Operation],
    lie: Lie,
    message: str,
    block: int | None,
    request_id: int | None,
) -> None:
    assert found(run) == []
    alone = dict.fromkeys((LEANS_ON.get(check, BY_ID[check]), BY_ID[check]))
    violations = found(run, lie, checks=[*alone])
    assert {violation.property for violation in violations} == {check}
    seen = {(v.block, v.request, v.op) for v in violations if message in v.message}
    assert seen == {(block, request_id, len(run) - 1)}
    assert check in {violation.property for violation in found(run, lie)}


def test_what_room_is_no_matter_of_is_not_told_with_it() -> None:
    run = [prompt(1), prompt(1), prompt(1), prompt(1), prompt(1)]
    (violation,) = found(run, says(reason="no_free_blocks"), checks=[BY_ID["CAP"]])
    assert violation.message == (
        "admit was refused (no_free_blocks), but it should have been refused (too_many_requests): "
        "4 blocks were free"
    )


def test_every_check_has_lies_to_see() -> None:
    assert {row[0] for row in ROWS} == set(BY_ID)


def test_a_held_block_in_the_place_of_a_free_one_is_seen() -> None:
    assert found([prompt(1)], shows(free_blocks=put(0, 1)))


def test_a_step_that_reads_another_block_in_a_row_read_before_is_seen() -> None:
    assert found([prompt(5), *STEP, Grow(0), Launch()], item(tables=([6, 2],)))


class SilentProv(Prov):
    """Moves the bytes, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


def test_a_findable_block_that_was_written_by_somebody_else_is_seen() -> None:
    run = [prompt(4), *STEP, prompt(4, 1), Launch(), Retire()]
    checks: list[type[Check]] = [SilentProv, BY_ID["VALID"]]
    assert found(run, checks=checks) == []
    over_the_first = change(StepLaunched, at=-2, items=lambda i: [replace(i[0], tables=([1],))])
    violations = found(run, over_the_first, checks=checks)
    says = "block 1 is findable, but its last slot holds another token's KV"
    assert [(v.property, v.block) for v in violations if v.message == says] == [("VALID", 1)]


# -- what a subject declares -----------------------------------------------------------------------

FOUND_EARLY: dict[str, Callable[[Any], Any]] = {"index": lambda _: {bytes([1]): (1,)}}
EARLY = Lie(events=lambda true: [*true, published(0, 1)], view=FOUND_EARLY, at=0)


def test_a_subject_may_publish_before_it_computes_if_it_says_so() -> None:
    run = [prompt(4), *STEP]
    early = {"publishes": "at_allocation", "tier_bytes": False}
    assert found(run, EARLY, drop(BlocksPublished), **early) == []
    assert {violation.property for violation in found(run, EARLY)} == {"VALID"}


def test_what_was_published_early_must_be_written_in_time() -> None:
    run = [prompt(4), prompt(1, 1), Preempt(0), *STEP]
    checks = [BY_ID["PROV"], BY_ID["VALID"]]
    (violation,) = found(run, EARLY, checks=checks, publishes="at_allocation")
    assert (violation.property, violation.block, violation.op) == ("VALID", 1, 4)
    assert violation.message.endswith("no step has written it")


def test_of_a_block_that_was_written_half_it_is_told_which_half() -> None:
    run = [prompt(4), Launch(2), Retire(), prompt(1, 1), Preempt(0), *STEP]
    checks = [BY_ID["PROV"], BY_ID["VALID"]]
    (violation,) = found(run, EARLY, checks=checks, publishes="at_allocation")
    assert (violation.property, violation.block) == ("VALID", 1)
    assert violation.message.endswith("written it whole: its positions 0 to 3 lack 2, 3")


def test_another_order_of_eviction_or_release_is_wrong_only_where_one_is_promised() -> None:
    for run, lie, promise in (
        (
            [*CACHED, Evict(2)],
            change(BlocksEvicted, blocks=lambda true: true[::-1]),
            "eviction_order",
        ),
        ([prompt(8), Finish(0)], change(BlocksReleased, blocks=[1, 2]), "release_order"),
        (
            [prompt(8), Launch(), Finish(0), Retire()],
            change(BlocksReleased, blocks=[1, 2]),
            "release_order",
        ),
    ):
        assert {violation.property for violation in found(run, lie)} == {"ORDER"}
        anything: dict[str, Any] = {promise: "any"}
        assert found(run, lie, **anything) == []


def test_what_was_grown_may_be_published_when_it_finishes_where_that_is_said() -> None:
    run = [prompt(4), *STEP, Grow(0, 4), *STEP, Finish(0)]
    checks = [BY_ID["PROV"], BY_ID["VALID"]]
    held: list[Event] = []

    def hold_back(true: Events) -> Events:
        held[:] = [event for event in true if isinstance(event, BlocksPublished)]
        return [event for event in true if event not in held]

    hidden = Lie(events=hold_back, view={"index": lambda true: {KEY_OF_FIRST: (1,)}}, at=5)
    late = Lie(events=lambda true: [*held, *true], view={"index": lambda true: true})
    assert found(run, hidden, late, checks=checks, publishes="at_release") == []
    (violation,) = found(run, hidden, checks=checks, publishes="at_release")
    assert (violation.property, violation.op, violation.request) == ("VALID", 6, 0)
    assert "request 0 finished, but its row 1" in violation.message
    assert {violation.op for violation in found(run, hidden, late, checks=checks)} == {5}
    # What it was admitted with is not to wait.
    assert found(run[:3], drop(BlocksPublished), checks=checks, publishes="at_release")


def test_an_eviction_takes_more_than_was_asked_for_only_where_that_is_said() -> None:
    run, cap = [*CACHED, Evict(1)], [BY_ID["CAP"]]
    assert found(run, says(count=2), checks=cap)
    assert found(run, says(count=2), checks=cap, exact_eviction=False) == []
    for wrong in (0, 3):
        assert found(run, says(count=wrong), checks=cap, exact_eviction=False)


def test_figures_are_wrong_only_where_they_are_exported() -> None:
    lie = shows(metrics=counted("admissions"))
    assert {violation.property for violation in found(TWO, lie)} == {"MET"}
    assert found(TWO, lie, exports=()) == []


def test_another_answer_is_wrong_only_where_exactness_is_promised() -> None:
    cap = [BY_ID["CAP"]]
    assert found([prompt(1)], answers(REFUSED), checks=cap)
    assert found([prompt(1)], answers(REFUSED), checks=cap, exact_admission=False) == []


def test_a_launch_honours_its_budget_only_where_chunks_are_promised() -> None:
    whole = change(StepLaunched, items=lambda items: [replace(items[0], end=9)])
    lie = Lie(lambda outcome: replace(outcome, count=9), whole.events)
    run = [prompt(9), Launch(4)]
    assert {violation.property for violation in found(run, lie)} == {"CAP"}
    assert found(run, lie, chunks=False) == []
