"""What the checks demand of a memory hierarchy: silent on the truth, and each rule fires.

As in ``test_checks.py``: a run of the engine is told truthfully up to one operation, about which
the report lies in one way.  The cache has 8 blocks of 4 tokens on the device, 3 on the host and 3
on disk, for completed blocks and for suspended requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.keys import block_key, root_key
from kvproof.engine.metrics import SCHEDULER_METRICS
from kvproof.engine.tiers.memory import NOBODYS
from kvproof.fuzz.faults import fault_by_id
from kvproof.invariants.checker import Checker
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.xfer import Xfer
from kvproof.invariants.events import (
    BlocksEvicted,
    Event,
    SlotsEvicted,
    SlotsReleased,
    StepItem,
    StepLaunched,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Cancel,
    Complete,
    Corrupt,
    Decode,
    Evict,
    Fail,
    Finish,
    Grow,
    Land,
    Launch,
    Notify,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reset,
    Restart,
    Resume,
    Retire,
    Segment,
    Slow,
    Withhold,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.property import Check
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects.engine import EngineSubject

Events = list[Event]
BY_ID = {check.id(): check for check in CHECKS}
WORLD = Configuration(blocks=8, requests=4, host_blocks=3, disk_blocks=3, offload="both")


class SilentXfer(Xfer):
    """Moves the bytes of transfers, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


class SilentProv(Prov):
    """Moves the bytes of steps, and says nothing."""

    def fail(self, message: str, **where: Any) -> None:
        pass


LEANS_ON: dict[str, tuple[type[Check], ...]] = {
    "XFER": (SilentProv,),
    "VALID": (SilentXfer, SilentProv),
}


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

    def __init__(
        self, configuration: Configuration, *, groups: int = 1, **semantics: object
    ) -> None:
        self.subject = EngineSubject(configuration, engine=partial(Engine, groups=groups))
        self.configuration = configuration
        self.semantics = replace(self.subject.semantics, **semantics)
        self.lens = Lens(self.subject.view())

    def view(self) -> Lens:
        return self.lens


def found(
    run: Sequence[Operation],
    *lies: Lie,
    checks: Sequence[type[Check]] = CHECKS,
    world: Configuration = WORLD,
    interval: int = 1,
    **semantics: Any,
) -> list[Violation]:
    """What the checks say of the run; they settle and audit after each operation."""
    witness = Witness(world, **semantics)
    checker = Checker(witness, checks=checks, interval=interval)  # type: ignore[arg-type]
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


def reports(outcome: Outcome, *events: Event) -> Lie:
    """Something else altogether."""
    return Lie(outcome=lambda _: outcome, events=lambda _: list(events))


def change(event: type[Event], /, *, at: int = -1, **fields: Any) -> Lie:
    """The first event of that kind says something else; a callable is put to the true value."""

    def changed(events: Events) -> Events:
        index = next(i for i, seen in enumerate(events) if isinstance(seen, event))
        true = events[index]
        new = {n: v(getattr(true, n)) if callable(v) else v for n, v in fields.items()}
        return [*events[:index], replace(true, **new), *events[index + 1 :]]

    return Lie(events=changed, at=at)


def drop(kind: type[Event]) -> Lie:
    return Lie(events=lambda events: [e for e in events if not isinstance(e, kind)])


def add(*events: Event) -> Lie:
    return Lie(events=lambda true: [*true, *events])


def shows(**changes: Callable[[Any], Any]) -> Lie:
    return Lie(view=changes)


def put(index: int, value: int) -> Callable[[Sequence[int]], list[int]]:
    return lambda true: [*true[:index], value, *true[index + 1 :]]


def stands(index: int, value: Any) -> Lie:
    """Part ``index`` of a request's standing looks different."""
    return shows(standing=lambda true: (*true[:index], value, *true[index + 1 :]))


def add_to(more: int) -> Callable[[int], int]:
    return lambda true: true + more


# -- runs ------------------------------------------------------------------------------------------


def prompt(length: int, source: int = 0, **how: Any) -> Admit:
    return Admit((Segment(source, length),), **how)


STEP = (Launch(), Retire())
DONE = Outcome("done")
READY = (prompt(9), *STEP)  # blocks 1 and 2 are full and findable
STORING = (*READY, Offload())
STORED = (*STORING, Complete())  # also in host blocks 0 and 1
ALSO = (*STORED, prompt(5, 1), *STEP)  # and block 4 is not
SAVING = (*STORED, Offload("disk"))
SAVED = (*SAVING, Complete())  # also in disk blocks 0 and 1
BELOW = (*STORED, Finish(0), Evict(9))
LOWEST = (*SAVED, Finish(0), Evict(9), Evict(9, "host"))
PROMOTE = Promote(prompt(9).prompt)
FETCH = Promote(prompt(9).prompt, to="host")
TWO_STORES = (*READY, Offload(blocks=1), Offload())
FETCHING = (*LOWEST, FETCH)
DAMAGED = (*FETCHING, Corrupt(), Complete())
OUT = Preempt(0, swap=True)
LEAVING = (prompt(6), *STEP, Preempt(0, swap=True, late=True))
AWAY = (prompt(6), *STEP, OUT)  # in host blocks 0 and 1
LOADING = (*AWAY, Resume(0, late=True))
FULL = (*STORED, prompt(9, 1), *STEP, Offload())  # evicts host block 1
KEY = b"a key"
TOKENS = prompt_tokens(prompt(8).prompt)
FIRST = block_key(root_key(0, 0, 0), TOKENS[:4], b"")
SECOND = block_key(FIRST, TOKENS[4:], b"")


def store(number: int, block: int, slot: int, key: bytes) -> TransferStarted:
    return TransferStarted(number, "store", 0, [block], [slot], [key])


def evicted(tier: Any, slot: int, key: bytes, cause: Any = "request") -> SlotsEvicted:
    return SlotsEvicted(tier, 0, [slot], [key], cause)


Row = tuple[str, Sequence[Operation], Lie, str, str, int | None]
ROWS: list[Row] = []


def row(
    check: str,
    run: Sequence[Operation],
    lie: Lie,
    message: str,
    tier: str = "device",
    block: int | None = None,
) -> None:
    """The check sees the lie about the run's last operation, and names tier and block."""
    ROWS.append((check, run, lie, message, tier, block))


# XFER: how a transfer starts …
row("XFER", TWO_STORES, change(TransferStarted, transfer=0), "the number of an older one: 0")
row("XFER", [*READY, prompt(1)], add(store(0, 1, 0, FIRST)), "though no operation asked for it")
row("XFER", STORING, change(TransferStarted, kind="demote"), "from host block 1, where key")
row("XFER", STORING, change(TransferStarted, targets=[0]), "(store) starts from 2 blocks to 1")
row("XFER", STORING, change(TransferStarted, keys=[FIRST]), "starts with 1 keys for 2 blocks")
row("XFER", STORING, change(TransferStarted, sources=[1, 3]), "from device block 3, where key")
row("XFER", STORING, change(TransferStarted, keys=[FIRST, KEY]), "block 2, where key 61206b6579…")
row("XFER", LEAVING, change(TransferStarted, request=None), "(swap_out) starts for no request")
row("XFER", LEAVING, change(TransferStarted, sources=[2, 1]), "6 computed tokens of request 0 are")
row(
    "XFER",
    [*ALSO, Offload()],
    change(TransferStarted, sources=[1], keys=[FIRST]),
    "though the host has or awaits what device block 1 holds",
)
row(
    "XFER",
    [*READY, Offload(blocks=1), Offload()],
    change(TransferStarted, sources=[1], keys=[FIRST]),
    "though the host has or awaits what device block 1 holds",
)
row(
    "XFER",
    [*BELOW, Promote(PROMOTE.prompt, blocks=1), PROMOTE],
    change(TransferStarted, sources=[0], keys=[FIRST]),
    "though the device has or awaits what host block 0 holds",
)
row(
    "XFER",
    [*BELOW, PROMOTE],
    change(TransferStarted, sources=[0, 2]),
    "from host block 2, where key",
)
row(
    "XFER",
    [*LOADING[:-1], Resume(0)],
    change(TransferStarted, sources=[1, 0]),
    "from host blocks [1, 0] to blocks [2, 3], but request 0 is in [0, 1]",
)
row(
    "XFER",
    [*LEAVING, Resume(0)],
    reports(
        Outcome("done", None, 0),
        TransferStarted(1, "swap_in", 0, [0, 1], [4, 5], (), 0),
        TransferEnded(1, "completed"),
    ),
    "while another one moves request 0",
)
row(
    "XFER",
    [prompt(8), Launch(4), Retire(), Launch(), Preempt(0, swap=True, late=True)],
    reports(Outcome("done", None, 0), TransferStarted(0, "swap_out", 0, [1], [0], (), 0)),
    "while step 1, in flight, writes request 0",
)

# … goes on …
row("XFER", [*STORING, Land()], change(TransferLanded, parts=2), "2 blocks of transfer 0 arrive un")
row("XFER", [*STORING, Land()], says(count=2), "2 blocks of transfer 0 are said to have arrived")
row("XFER", [*STORING, Launch(), prompt(1)], add(TransferLanded(0, 1)), "transfer 0 arrive unasked")
row("XFER", [*STORING, Cancel()], drop(TransferCancelled), "was cancelled, but not by its events")
row(
    "XFER",
    [*TWO_STORES, Cancel()],
    change(TransferCancelled, transfer=1),
    "transfer 1 is cancelled, but nobody did so",
)
row("XFER", [*TWO_STORES, Cancel(1)], says(transfers=(0,)), "2 candidates it names transfer 1")
row("XFER", [*STORING, Cancel(), Cancel()], says(status="done"), "of 0 candidates it names none")
row("XFER", [*LEAVING, Cancel()], says(status="done"), "of 0 candidates it names none")
row("XFER", [*SAVING, Land()], says(status="done"), "of 0 candidates it names none")
row("XFER", STORING, shows(transfers=lambda _: []), "transfers [] are in flight, but it should be")
row("XFER", STORED, shows(transfers=lambda _: [0]), "transfers [0] are in flight, but it should")

# … and ends
row("XFER", STORED, says(transfers=(1,)), "of 1 candidates it names transfer 0")
row("XFER", [*TWO_STORES, Complete(1)], says(transfers=(0,)), "2 candidates it names transfer 1")
row("XFER", STORED, answers(SKIPPED), "complete was skipped for transfers []")
row("XFER", STORED, drop(TransferEnded), "transfer 0 should have ended completed")
row(
    "XFER",
    STORED,
    change(TransferEnded, result="failed", cause="timeout"),
    "(store) ended failed (timeout), but it should have ended completed",
)
row(
    "XFER",
    [*STORING, Fail(0, "timeout")],
    change(TransferEnded, result="completed", cause=""),
    "(store) ended completed, but it should have ended failed (timeout)",
)
row(
    "XFER",
    [*SAVING, Fail(0, "short_write")],
    change(TransferEnded, result="completed", cause=""),
    "(demote) ended completed, but it should have ended failed (short_write)",
)
row(
    "XFER",
    [*STORING, Fail(0, "disk_full")],
    change(TransferEnded, cause="disk_full"),
    "(store) ended failed (disk_full), but it should have ended failed (error)",
)
row(
    "XFER",
    [*STORING, Cancel(), Complete()],
    change(TransferEnded, result="completed"),
    "(store) ended completed, but it should have ended cancelled",
)
row(
    "XFER",
    [*LOADING, Abort(0), Complete()],
    change(TransferEnded, result="completed"),
    "(swap_in) ended completed, but it should have ended cancelled",
)
row(
    "XFER",
    [*LOADING, Preempt(0), Complete()],
    change(TransferEnded, result="completed"),
    "(swap_in) ended completed, but it should have ended cancelled",
)
row(
    "XFER",
    DAMAGED,
    change(TransferEnded, result="completed", cause=""),
    "(fetch) ended completed, but it should have ended failed (corrupt)",
)
row(
    "XFER",
    [*SAVING, Restart()],
    change(TransferEnded, cause="error"),
    "(demote) ended failed (error), but it should have ended failed (crash)",
)
row(
    "XFER",
    [*SAVING, Cancel(), Restart()],
    change(TransferEnded, result="failed", cause="crash"),
    "(demote) ended failed (crash), but it should have ended cancelled",
)
row("XFER", [*STORING, prompt(1)], add(TransferEnded(0, "completed")), "was not about it")
row("XFER", [*STORED, Notify()], add(TransferEnded(0, "completed")), "but it was not in flight")
row("XFER", [*STORED, Notify()], add(evicted("host", 0, FIRST)), "changed state: 1 event(s)")
row("XFER", [*STORED, Notify()], says(transfers=(3,)), "of 1 candidates it names transfer 0")
row("XFER", [*AWAY[:-1], OUT], drop(TransferEnded), "transfer 0 should have ended completed")
# … with the bytes that it moved
OTHERS = shows(tier_content=lambda _: KEY)
row("XFER", [*LEAVING, Complete()], OTHERS, "block 0 does not hold what row 0 of re", "host", 0)
row("XFER", [*AWAY, Resume(0)], OTHERS, "block 2 does not hold what row 0 of request", "device", 2)
row("XFER", [*AWAY, prompt(1, 1)], OTHERS, "does not hold any more what was swapped", "host", 0)

# PIN
row(
    "PIN",
    [*SAVING, Evict(9, "host")],
    add(evicted("host", 0, FIRST)),
    "host block 0 was",
    "host",
    0,
)
row("PIN", [*AWAY, Evict(9, "host")], add(evicted("host", 1, KEY)), "or a request own", "host", 1)
row("PIN", STORING, shows(tier_pins=put(0, 0)), "has 0 pins, but 1 transfers in", "host", 0)
row("PIN", STORED, shows(tier_pins=put(1, 1)), "has 1 pins, but 0 transfers in", "host", 1)
row("PIN", [*BELOW, PROMOTE], shows(tier_pins=put(2, 1)), "block 2 has 1 pins, but 0", "host", 2)

# EXCL
row("EXCL", TWO_STORES, change(TransferStarted, targets=[0]), "which another transfer", "host", 0)
row("EXCL", [*ALSO, Offload()], change(TransferStarted, targets=[1]), "is findable", "host", 1)
row("EXCL", STORING, change(TransferStarted, targets=[1, 1]), "host block 1, 2 times", "host", 1)
row("EXCL", STORING, change(TransferStarted, targets=[0, 3]), "which is not there", "host", 3)
row(
    "EXCL",
    [*AWAY, Offload(blocks=1)],
    change(TransferStarted, targets=[0]),
    "host block 0, which holds request 0",
    "host",
    0,
)
row(
    "EXCL",
    [*BELOW, PROMOTE],
    change(TransferStarted, targets=[0, 2]),
    "(promote) is to write device block 0, which is reserved",
    "device",
    0,
)
row(
    "EXCL",
    [*BELOW, Promote(PROMOTE.prompt, blocks=1), PROMOTE],
    change(TransferStarted, targets=[1]),
    "device block 1, which transfer 1 holds",
    "device",
    1,
)
row(
    "EXCL",
    [*BELOW, prompt(4, 1), *STEP, Finish(0), PROMOTE],
    change(TransferStarted, targets=[1, 3]),
    "device block 1, in which something is findable",
    "device",
    1,
)

# CONS
row("CONS", STORING, shows(free_tier_count=add_to(1)), "reported free and 2 are pinned", "host")
row(
    "CONS",
    [*READY, Withhold("host", 2)],
    shows(free_tier_count=add_to(2)),
    "3 host blocks are reported free, 2 are withheld and 0 are pinned",
    "host",
)
row(
    "CONS",
    [Withhold("device", 3)],
    shows(free_count=add_to(3)),
    "8 blocks are reported free, 3 are withheld and 0 are held",
)
row("CONS", [Withhold("device", 3)], shows(free_blocks=lambda f: f[1:]), "the counter says 8")

# QUIES
ENDED = (*STORING, Finish(0), Complete())
row("QUIES", ENDED, shows(tier_pins=put(0, 1)), "alive, but host blocks [0] are", "host", 0)
row("QUIES", [*AWAY, Abort(0)], drop(SlotsReleased), "host blocks [0, 1] are held", "host", 0)

# VALID
row("VALID", STORED, shows(tier_index=lambda _: {}), "the host finds nothing under", "host", 0)
row("VALID", STORED, shows(tier_index=lambda t: {**t, KEY: 2}), "host finds block 2", "host", 2)
row("VALID", [*STORING, Fail()], shows(tier_index=lambda _: {KEY: 0}), "finds block 0", "host", 0)
row("VALID", STORED, shows(tier_content=lambda _: KEY), "holds other bytes than those", "host", 0)
row("VALID", SAVED, shows(tier_content=lambda _: None), "but its bytes are damaged", "host", 0)
row(
    "VALID",
    [*SAVED, Corrupt()],
    shows(tier_content=lambda true: true or KEY),
    "disk block 0 is damaged, but is read as if it were whole",
    "disk",
    0,
)
row(
    "VALID",
    [*BELOW, PROMOTE, Complete()],
    shows(tier_content=lambda true: KEY if true == FIRST else true),
    "device block 1 is findable, but it holds other bytes",
    "device",
    1,
)
row(
    "VALID",
    [*READY, Finish(0), prompt(9)],
    shows(tier_content=lambda true: KEY if true == FIRST else true),
    "device block 1 is findable, but it holds other bytes",
    "device",
    1,
)
row("VALID", [*STORED, Finish(0), Reset()], drop(SlotsEvicted), "after a reset", "host", 0)
row("VALID", [*STORED, Finish(0), Reset()], drop(BlocksEvicted), "block 1 is still f", "device", 1)
row(
    "VALID",
    [*STORED, Finish(0), Evict(1, "host")],
    change(SlotsEvicted, keys=[KEY]),
    "host block 1 is evicted on request, but nothing is findable there under key 61206b6579",
    "host",
    1,
)
row("VALID", DAMAGED, drop(SlotsEvicted), "[0] are damaged, but were not dropped", "disk", 0)
row(
    "VALID",
    DAMAGED,
    change(SlotsEvicted, slots=[1], keys=[SECOND]),
    "disk blocks [1] are dropped as damaged, but damage was met in [0]",
    "disk",
    1,
)
row(
    "VALID",
    [*SAVED, Evict(1, "disk")],
    change(SlotsEvicted, cause="corrupt"),
    "are dropped as damaged, but damage was met in []",
    "disk",
    1,
)
row(
    "VALID",
    [*SAVED, Restart()],
    change(TierReopened, slots=[0], keys=[FIRST]),
    "disk block 1 was wholly written, but is lost by a restart",
    "disk",
    1,
)
row(
    "VALID",
    [*SAVED, Restart()],
    change(TierReopened, slots=[0, 1, 2], keys=[FIRST, SECOND, KEY]),
    "finds key 61206b6579… in block 2, which did not hold it",
    "disk",
    2,
)
row(
    "VALID",
    [*SAVED, Evict(1, "disk"), Restart()],
    change(TierReopened, slots=[0, 1], keys=[FIRST, SECOND]),
    "in block 1, which did not hold it",
    "disk",
    1,
)

ROTTEN = (*SAVED, Corrupt(file="index"), Restart())
row("VALID", ROTTEN, change(TierReopened, damaged=[]), "is damaged, but counts as", "disk", 0)
row(
    "VALID",
    [*SAVED, Restart()],
    change(TierReopened, damaged=[1]),
    "the entry of disk block 1 is said to be damaged: it is not",
    "disk",
    1,
)
row(
    "VALID",
    [*SAVING, Cancel(), Restart()],
    change(TierReopened, slots=[0], keys=[FIRST]),
    "in block 0, which did not hold it",
    "disk",
    0,
)

# ORDER
row("ORDER", FULL, change(SlotsEvicted, slots=[0], keys=[FIRST]), "but block 1 was to", "host", 0)
row(
    "ORDER",
    FULL,
    change(SlotsEvicted, slots=[1, 0], keys=[SECOND, FIRST]),
    "2 host blocks were evicted for the 2 that transfer 1 needs, though 1 block was empty",
    "host",
)
row("ORDER", STORED, shows(victims=lambda true: true[::-1]), "next victims are host", "host", 0)
row(
    "ORDER",
    [*STORED, Finish(0), Evict(1, "host")],
    change(SlotsEvicted, slots=[0], keys=[FIRST]),
    "host block 0 was evicted on request, but block 1",
    "host",
    0,
)

# CAP
OFF = Outcome("refused", "offload_off")
row("CAP", STORING, answers(OFF), "offload was refused (offload_off), but it should have been done")
row("CAP", STORING, says(count=1), "offload: 1 block was copied, but it should be 2")
row("CAP", STORING, says(transfers=()), "offload names 0 transfers, but it should be 1")
row("CAP", [*STORED, Offload()], says(reason="no_host_blocks"), "refused (nothing_to_move)")
row("CAP", [Offload("disk")], answers(OFF), "should have been refused (nothing_to_move)")
row(
    "CAP",
    [*READY, Offload(blocks=1)],
    change(TransferStarted, sources=[2], keys=[SECOND]),
    "offload copies (group, blocks) [(0, [2])], but next are [(0, [1])]",
)
row(
    "CAP",
    [*READY, Withhold("host", 2), Offload()],
    says(reason="nothing_to_move"),
    "should have been refused (no_host_blocks)",
)
row(
    "CAP",
    [*STORED, Withhold("disk", 2), Offload("disk")],
    says(reason="no_host_blocks"),
    "should have been refused (no_disk_blocks)",
)
row("CAP", [*BELOW, PROMOTE], says(lookup="miss"), "answer 'miss', but it should be 'hit'")
row("CAP", [*BELOW, PROMOTE], says(count=1), "promote: 1 block was copied, but it should be 2")
row(
    "CAP",
    [*BELOW, Withhold("device", 7), PROMOTE],
    says(reason="nothing_to_move"),
    "should have been refused (no_free_blocks)",
)
row("CAP", [*BELOW, PROMOTE, PROMOTE], says(reason="no_free_blocks"), "(nothing_to_move)")
row("CAP", [*BELOW, PROMOTE, PROMOTE], says(lookup="hit"), "but it should be 'hit_pending'")
row(
    "CAP",
    [*LOWEST, Withhold("host", 2), FETCH],
    says(reason="nothing_to_move"),
    "should have been refused (no_host_blocks)",
)
row("CAP", [*LOWEST, Slow(2), FETCH], says(reason="nothing_to_move"), "been refused (retry)")
row("CAP", [*LOWEST, Slow(2), prompt(9)], says(lookup="hit"), "'hit', but it should be 'retry'")
row("CAP", [*BELOW, prompt(9)], says(lookup="miss"), "'miss', but it should be 'hit'")
row("CAP", [*READY, prompt(9)], says(lookup="hit"), "'hit', but it should be 'nothing'")
row(
    "CAP",
    [*BELOW, PROMOTE, prompt(9, wait=True)],
    says(status="done", reason=None, request=1),
    "should have been refused (hit_pending)",
)
row(
    "CAP",
    [*LOWEST, Slow(2), prompt(9, wait=True)],
    says(reason="hit_pending"),
    "should have been refused (retry)",
)
row("CAP", [*LOADING, Grow(0)], says(reason="no_free_blocks"), "have been refused (loading)")
row("CAP", [*LOADING, Decode((0,))], says(reason="no_free_blocks"), "been refused (loading)")
row("CAP", [*LOADING, Launch()], answers(DONE), "should have been refused (nothing_to_run)")
row("CAP", [*LOADING, OUT], says(reason="no_host_blocks"), "have been refused (in_flight)")
row("CAP", [*LEAVING, Resume(0)], says(reason="no_free_blocks"), "been refused (in_flight)")
row("CAP", LOADING, says(cached_tokens=6), "6 cached tokens were claimed, but it should be 0")
row("CAP", LEAVING, says(transfers=(0, 1)), "preempt of 2 blocks started 2 transfers, but it")
row("CAP", [*STORED, Withhold("host", 9)], says(count=9), "9 blocks were withheld, but it should")
row("CAP", [*STORED, Evict(9, "host")], says(count=1), "1 block was evicted, but it should be 2")
row("CAP", [*SAVED, Finish(0), Reset()], says(count=2), "evicted, but it should be 6")
row("CAP", [*STORING, Finish(0), Reset()], answers(DONE), "have been refused (blocks_in_use)")
row("CAP", [*AWAY, Reset()], answers(DONE), "have been refused (blocks_in_use)")
row(
    "CAP", [*SAVING, Restart()], says(transfers=()), "restart names 0 transfers, but it should be 1"
)
row("CAP", [Corrupt()], says(status="done"), "corrupt was done, but it should have been skipped")
row("CAP", [Slow(2)], answers(OFF), "slow was refused (offload_off), but it should have been done")

# ATOM
SHORT = (*BELOW, Withhold("device", 7), PROMOTE)
row("ATOM", SHORT, shows(tier_pins=put(0, 1)), "host block 0 went from 0 to 1 pins", "host", 0)
row("ATOM", SHORT, add(evicted("host", 1, SECOND)), "promote was refused (no_free_blocks), but it")
row("ATOM", [*STORED, Offload()], add(store(1, 1, 2, FIRST)), "offload was refused (nothing_to_")

# LIFE, RESUME
row("LIFE", LOADING, stands(0, "running"), "request 0 is running, not loading")
row("LIFE", [*LOADING, Complete()], stands(0, "loading"), "request 0 is loading, not running")
row("LIFE", [*LEAVING, Fail()], stands(0, "swapped"), "request 0 is swapped, not preempted")
row("LIFE", [*LOADING, Abort(0)], change(SlotsReleased, request=7), "does not fit what happened")
row("RESUME", [*LOADING, Complete()], stands(2, 0), "counts 0 tokens as computed, but 6 are")
row("RESUME", [*LOADING, Fail()], stands(2, 6), "counts 6 tokens as computed, but 0 are")
row(
    "RESUME",
    [*LOADING, prompt(1, 1), Launch()],
    change(StepLaunched, items=lambda items: [*items, StepItem(0, 1, 0, 6, ([2, 3],))]),
    "of request 0, whose KV is still on its way back from the host",
)

# MET
FIGURED = (*BELOW, PROMOTE, prompt(9, wait=True))
for name in SCHEDULER_METRICS:
    lie = shows(metrics=lambda true, name=name: {**true, name: true[name] + 1})
    row("MET", FIGURED, lie, f"{name} is exported as")
spared = shows(metrics=lambda true: {**true, "corrupt_blocks": true["corrupt_blocks"] - 1})
row("MET", ROTTEN, spared, "corrupt_blocks is exported as 0, but it is 1")


@pytest.mark.parametrize(
    ("check", "run", "lie", "message", "tier", "block"),
    ROWS,
    ids=[f"{row[0]}-{row[3]}" for row in ROWS],
)
def test_a_check_alone_sees_the_lie_and_not_the_truth(
    check: str,
    run: Sequence[Operation],
    lie: Lie,
    message: str,
    tier: str,
    block: int | None,
) -> None:
    assert found(run) == []
    violations = found(run, lie, checks=[*LEANS_ON.get(check, ()), BY_ID[check]])
    assert {violation.property for violation in violations} == {check}
    seen = {(v.tier, v.block, v.op) for v in violations if message in v.message}
    assert (tier, block, len(run) - 1) in seen
    assert check in {violation.property for violation in found(run, lie)}


def test_what_changes_while_it_is_copied_is_seen() -> None:
    run = [*STORING, prompt(4, 1), Launch(), Retire(), Complete()]
    checks: list[type[Check]] = [SilentProv, Xfer]
    assert found(run, checks=checks) == []
    over_the_first = change(
        StepLaunched, at=-3, items=lambda items: [replace(items[0], tables=([1],))]
    )
    (violation,) = found(run, over_the_first, checks=checks)
    assert violation.message == "device block 1 changed while transfer 0 (store) copied it"
    assert (violation.property, violation.block, violation.op) == ("XFER", 1, len(run) - 1)


def test_what_was_copied_from_elsewhere_is_not_what_it_is_found_as() -> None:
    run = [*STORING, Complete()]
    elsewhere = change(TransferStarted, at=-2, sources=[1, 7])
    checks: list[type[Check]] = [SilentXfer, SilentProv, BY_ID["VALID"]]
    (violation,) = found(run, elsewhere, checks=checks)
    assert (violation.tier, violation.block) == ("host", 1)
    assert violation.message == "host block 1 is findable, but its last slot holds never written"


@pytest.mark.parametrize(
    ("world", "refused"),
    [
        (Configuration(), [Offload(), PROMOTE, FETCH, Evict(1, "host"), Restart(), Slow(2)]),
        (
            Configuration(host_blocks=3),
            [Offload(), PROMOTE, FETCH, Evict(1, "host"), Restart(), Slow(2)],
        ),
        (
            Configuration(host_blocks=3, offload="prefix"),
            [Offload("disk"), FETCH, Evict(1, "disk"), Restart(), Slow(2), OUT],
        ),
        (Configuration(host_blocks=3, offload="none"), [Offload(), PROMOTE, OUT]),
    ],
)
def test_what_is_not_configured_is_off(world: Configuration, refused: list[Operation]) -> None:
    for operation in refused:
        assert found([*READY, operation], world=world) == []
        violations = found([*READY, operation], says(reason="no_host_blocks"), world=world)
        assert {violation.property for violation in violations} == {"CAP"}
        assert "should have been refused (offload_off)" in violations[0].message


def test_the_order_of_arc_is_demanded_on_each_tier_that_asks_for_it() -> None:
    world = replace(WORLD, device_eviction="arc", host_eviction="arc", disk_eviction="arc")
    run = [*STORED, Finish(0), prompt(5, 1), *STEP, Finish(0), prompt(5, 1), Finish(0), Evict(1)]
    assert found(run, world=world) == []
    assert found(run) == []
    for tier in ("device", "host"):
        again = shows(free_blocks=lambda f: f[::-1], victims=lambda v: v[::-1])
        violations = found(run, again, world=world, checks=[BY_ID["ORDER"]])
        assert {violation.property for violation in violations} == {"ORDER"}
        assert tier in {violation.tier for violation in violations}


# -- what was computed before a reset --------------------------------------------------------------


def test_what_was_suspended_before_a_reset_is_not_found_after_it() -> None:
    run = [*AWAY, Reset(), Resume(0), Grow(0, 2), *STEP]
    assert found(run) == []
    with fault_by_id("reset-ignores-the-suspended").installed():
        assert {violation.property for violation in found(run)} == {"CAP"}
        (violation,) = found(run, checks=[SilentXfer, SilentProv, BY_ID["VALID"]])
    assert (violation.property, violation.request, violation.op) == ("VALID", 0, len(run) - 1)
    assert "but the request computed 6 of its tokens before the prefix" in violation.message


def test_what_is_computed_anew_after_a_reset_may_be_found() -> None:
    run = [prompt(6), *STEP, Preempt(0), Reset(), Resume(0), *STEP, Finish(0), prompt(6)]
    assert found(run) == []
    failed = [*LOADING, Fail(), Abort(0), Reset(), prompt(6), *STEP]
    assert found(failed) == []


def test_a_copy_that_was_under_way_at_a_reset_brings_nothing() -> None:
    run = [*BELOW, PROMOTE, Reset(), Complete()]
    assert found(run) == []
    done = Lie(
        outcome=lambda _: DONE,
        events=lambda _: [SlotsEvicted("host", 0, [0, 1], [FIRST, SECOND], "reset")],
        view={"tier_index": lambda _: {}},
        at=-2,
    )
    (violation,) = found(run, done, checks=[SilentXfer, SilentProv, BY_ID["VALID"]])
    assert (violation.tier, violation.block, violation.transfer) == ("device", 1, 1)
    assert "of what was computed before the prefix cache was reset" in violation.message


# -- what a promotion must not evict ---------------------------------------------------------------

HALF = (*STORED, Finish(0), Evict(1))  # row 0 on the device, row 1 only on the host
SMALL = replace(WORLD, blocks=3)


def test_a_promotion_is_refused_before_it_evicts_its_own_prefix() -> None:
    run = [*HALF, Withhold("device", 2), PROMOTE]
    assert found(run, world=SMALL) == []
    with fault_by_id("promotion-evicts-its-own-prefix").installed():
        (violation,) = found(run, world=SMALL, checks=[BY_ID["CAP"]])
    assert "promote was done, but it should have been refused (no_free_blo" in violation.message


def test_a_promotion_evicts_the_next_block_that_it_does_not_extend() -> None:
    run = [*HALF, prompt(8, 1), *STEP, Finish(0), PROMOTE]
    assert found(run, world=SMALL) == []
    with fault_by_id("promotion-evicts-its-own-prefix").installed():
        (violation,) = found(run, world=SMALL, checks=[BY_ID["ORDER"]])
    assert (violation.block, violation.op) == (1, len(run) - 1)
    assert violation.message.endswith("was evicted for a copy of other blocks of the same prompt")
    last = change(BlocksEvicted, blocks=lambda true: [5 - true[0]])
    (violation,) = found(run, last, world=SMALL, checks=[BY_ID["ORDER"]])
    assert "was released before it and never used since" in violation.message


# -- what is really there --------------------------------------------------------------------------


def test_a_swap_that_moves_nothing_or_in_another_order_is_seen_by_its_bytes_alone() -> None:
    run = [*AWAY, Resume(0)]
    assert found(run) == []
    for fault, tier, op in (
        ("swap-out-copies-nothing", "host", len(AWAY) - 1),
        ("swap-in-reverses-the-blocks", "device", len(run) - 1),
    ):
        with fault_by_id(fault).installed():
            (violation,) = found(run)
        assert (violation.property, violation.tier, violation.op) == ("XFER", tier, op)


def test_bytes_are_compared_with_suspension_only_and_without_a_prefix_cache() -> None:
    for world in (
        Configuration(blocks=8, host_blocks=3),
        Configuration(blocks=8, host_blocks=3, prefix_caching=False),
    ):
        for fault in ("swap-out-copies-nothing", "swap-in-reverses-the-blocks"):
            assert found([*AWAY, Resume(0)], world=world) == []
            with fault_by_id(fault).installed():
                assert {v.property for v in found([*AWAY, Resume(0)], world=world)} == {"XFER"}


def test_what_a_void_step_wrote_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    run = [prompt(5), Launch(), Abort(0), Retire(), prompt(5), *STEP, prompt(5)]
    assert found(run) == []
    monkeypatch.setattr(Engine, "_apply_result", lambda *arguments: None)
    witness = Witness(WORLD)
    for operation in run[:4]:
        witness.subject.apply(operation)
    assert witness.lens.tier_content("device", 0, 1) == NOBODYS


def test_a_hit_is_looked_into_at_once() -> None:
    run = [*READY, Finish(0), prompt(9)]
    other = shows(tier_content=lambda _: KEY)
    checks: list[type[Check]] = [SilentXfer, SilentProv, BY_ID["VALID"]]
    (violation,) = found(run, other, checks=checks, interval=0)
    assert (violation.block, violation.op) == (1, len(run) - 1)


# -- several groups --------------------------------------------------------------------------------


def test_a_load_that_fails_in_one_group_leaves_the_request_loading_until_the_other_ends() -> None:
    for fails, then in ((Fail(), Complete()), (Fail(1), Complete()), (Fail(), Fail())):
        run = [*LOADING, fails, Grow(0), Launch(), then, Grow(0), *STEP]
        assert found(run, groups=2) == []
        lie = stands(0, "running")
        (violation, *_) = found(run[: len(LOADING) + 1], lie, groups=2, checks=[BY_ID["LIFE"]])
        assert "request 0 is running, not loading" in violation.message
        told = change(TransferEnded, result="completed")
        done = run[: len(LOADING) + 4]
        (violation, *_) = found(done, told, groups=2, checks=[SilentProv, Xfer])
        assert "but it should have ended cancelled" in violation.message


def test_a_look_up_asks_the_groups_that_lack_the_row() -> None:
    lost_in_one = (*STORED, Complete(), Finish(0), Evict(9), PROMOTE, Complete(0), prompt(9))
    assert found(lost_in_one, groups=2) == []
    lie = says(lookup="miss")
    violations = found(lost_in_one, lie, groups=2, checks=[BY_ID["CAP"]])
    assert "are said to answer 'miss', but it should be 'hit_pending'" in violations[0].message


# -- what a subject declares -----------------------------------------------------------------------

NOTHING = Outcome("refused", "nothing_to_move")
NOT_AWAY = Lie(
    outcome=lambda _: Outcome("refused", "no_host_blocks", 0),
    events=lambda _: [],
    view={"standing": lambda _: ("running", 6, 6, (2,))},
)


@pytest.mark.parametrize(
    ("run", "lie"),
    [
        (STORING, answers(NOTHING)),
        ([*BELOW, PROMOTE], answers(NOTHING)),
        ([*BELOW, PROMOTE], says(lookup="miss")),
        ([*BELOW, prompt(9)], says(lookup="miss")),
        ([*READY, Offload(blocks=1)], says(count=3)),
        (AWAY, NOT_AWAY),
        ([*STORED, Evict(9, "host")], says(count=1)),
    ],
)
def test_a_subject_may_choose_for_itself_what_it_copies(run: Sequence[Operation], lie: Lie) -> None:
    checks = [BY_ID["CAP"]]
    assert {violation.property for violation in found(run, lie, checks=checks)} == {"CAP"}
    assert found(run, lie, checks=checks, exact_tiers=False) == []


def test_what_it_copies_must_still_be_right() -> None:
    lie = change(TransferStarted, sources=[1, 3])
    violations = found(STORING, lie, exact_tiers=False)
    assert "XFER" in {violation.property for violation in violations}


def test_a_subject_may_lose_its_disk_in_a_restart_if_it_says_so() -> None:
    run = [*LOWEST, Restart()]
    lie = Lie(
        events=change(TierReopened, slots=[0], keys=[FIRST]).events,
        view={"tier_index": lambda true: {key: true[key] for key in true if key != SECOND}},
    )
    checks: list[type[Check]] = [SilentXfer, SilentProv, BY_ID["VALID"]]
    (violation,) = found(run, lie, checks=checks)
    assert violation.message == "disk block 1 was wholly written, but is lost by a restart"
    assert found(run, lie, checks=checks, disk_survives=False) == []


@pytest.mark.parametrize(("tier", "run"), [("host", BELOW), ("disk", LOWEST)])
def test_a_subject_may_evict_in_any_order_on_a_tier_that_it_names(
    tier: Any, run: Sequence[Operation]
) -> None:
    turned = shows(victims=lambda true: true[::-1])
    for operation, lie in ((Evict(1, tier), change(SlotsEvicted, slots=[0], keys=[FIRST])),):
        for untrue in (lie, turned):
            runs = [*run, operation] if untrue is lie else list(run)
            (violation, *_) = found(runs, untrue, checks=[BY_ID["ORDER"]])
            assert violation.tier == tier
            silent = {f"{tier}_order": "any"}
            assert found(runs, untrue, checks=[BY_ID["ORDER"]], **silent) == []


def test_an_order_of_ones_own_on_the_device_excuses_no_other_tier() -> None:
    turned = shows(victims=lambda true: true[::-1], free_blocks=lambda true: true[::-1])
    violations = found([*STORED, Finish(0)], turned, eviction_order="any", checks=[BY_ID["ORDER"]])
    assert {violation.tier for violation in violations} == {"host"}


def test_a_subject_may_not_know_what_its_blocks_really_hold() -> None:
    for run in (STORED, [*READY, Finish(0), prompt(9)], [*AWAY, Resume(0)]):
        other = shows(tier_content=lambda _: KEY)
        assert found(run, other) != []
        assert found(run, other, tier_bytes=False) == []


# -- how it is reported ----------------------------------------------------------------------------


def test_what_two_looks_see_is_reported_once() -> None:
    violations = found(STORING, shows(free_tier_count=add_to(1)), checks=[BY_ID["CONS"]])
    assert len(violations) == len(set(violations)) == 2
    assert {violation.tier for violation in violations} == {"host", "disk"}


def test_a_miscount_of_slots_names_the_slot_and_the_latest_transfer() -> None:
    lie = shows(free_tier_count=add_to(1), tier_pins=put(1, 0))
    violations = found(STORING, lie, checks=[BY_ID["CONS"]])
    assert ("host", 1, 0) in {(v.tier, v.block, v.transfer) for v in violations}


def test_a_wrong_victim_by_arc_is_told_with_its_lists() -> None:
    world = replace(WORLD, device_eviction="arc", host_eviction="arc")
    run = [*STORED, Finish(0), prompt(5, 1), *STEP, Finish(0), prompt(5, 1), Finish(0)]
    lists = "of those evicted lately it remembers keys []"
    for lie in (shows(free_blocks=lambda true: true[::-1]), shows(victims=lambda v: v[::-1])):
        violations = found(run, lie, world=world, checks=[BY_ID["ORDER"]])
        assert any(lists in violation.message for violation in violations)
    ghost = [*run, Evict(1), Evict(1, "host")]
    lie = change(SlotsEvicted, slots=[0], keys=[FIRST])
    violations = found(ghost, lie, world=world, checks=[BY_ID["ORDER"]])
    assert any("blocks [1, 0] were used once, [] again" in v.message for v in violations)


def test_every_check_of_transfers_has_lies_to_see() -> None:
    assert {row[0] for row in ROWS} == set(BY_ID) - {"REF", "PROV", "KEY"}
