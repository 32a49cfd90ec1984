"""What the checks claim: complete, with sources, controls that work, and no false alarm."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.request import Request
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.checker import Checker, CheckerError
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.property import Check
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject, EngineView

STEP = (Launch(), Retire())
ABLE = EngineSubject.capabilities | EngineSubject(Configuration()).semantics.features()

check_by_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id())

# -- descriptions ----------------------------------------------------------------------------------


@check_by_check
def test_a_check_says_what_it_verifies_and_what_not(check: type[Check]) -> None:
    described = check.describe()
    assert described.id == check.id() == described.id.upper()
    assert 10 < len(described.title) < 100
    for part in (described.verifies, described.does_not_verify):
        assert 20 < len(part) < 1000
        assert part.endswith(".")
        assert "verify:" not in part
    assert described.claims
    for claim in described.claims:
        assert claim.statement.endswith(".")
        assert re.match(r"chapter, |bugs? B\d|B\d|survey ", claim.source), claim.source


def test_a_check_without_its_parts_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvproof.invariants.checks.cons as module

    monkeypatch.setattr(module, "__doc__", "CONS: title.\n\nVerifies: this.\n")
    with pytest.raises(AssertionError, match="Does not verify"):
        module.Cons.describe()


def test_ids_are_the_properties_of_the_catalogue_in_their_order() -> None:
    ids = [check.id() for check in CHECKS]
    assert len(set(ids)) == len(ids)
    assert ids == [check.describe().id for check in CHECKS]
    assert set(ids) >= {"CONS", "REF", "EXCL", "PIN", "ATOM", "QUIES", "ORDER", "CAP"}
    assert set(ids) >= {"PROV", "VALID", "KEY", "RESUME", "MET", "LIFE"}


CHAPTER = {
    "accounting": (
        "allocated_blocks >= blocks referenced",
        "free_blocks + allocated_blocks = pool_blocks",
        "no unexpected alias",
    ),
    "life cycle": (
        "request admitted → blocks allocated",
        "request grows → capacity accounted",
        "request ends → blocks released or",
        "request evicted → state updated atomically",
    ),
    "continuous batching": (
        "capacity becomes reusable",
        "waiting request may enter",
        "long request continues",
    ),
    "tiering": (
        "ownership released only after a safe state",
        "attention cannot consume stale or incomplete bytes",
    ),
}
"""The chapter's deterministic evals, in short."""


@pytest.mark.parametrize(
    ("section", "statement"),
    [(section, statement) for section, all_ in CHAPTER.items() for statement in all_],
)
def test_a_statement_of_the_chapter_is_the_source_of_a_claim(section: str, statement: str) -> None:
    sources = [claim.source for check in CHECKS for claim in check.claims]
    assert any(re.search(rf"chapter, {section}: [^;]*{re.escape(statement)}", s) for s in sources)


# -- positive controls -----------------------------------------------------------------------------


LEANS_ON = {
    "VALID": ("XFER", "PROV"),
    "PROV": ("XFER",),
    "ATOM": ("CAP",),
}
"""XFER and PROV move the shadow memory's bytes, CAP predicts which blocks an admission would
reuse."""


def _observe(checker: Checker, subject: EngineSubject, operations: Sequence[Operation]) -> None:
    for operation in operations:
        checker.observe(operation, subject.apply(operation), subject.drain_events())
        if checker.violations:
            return


def _alone(check: type[Check], seeds: Sequence[str]) -> list[Violation]:
    """What the check sees with none beside it but those it leans on, in the first bad run."""
    beside = [other for other in CHECKS if other.id() in LEANS_ON.get(check.id(), ())]
    for seed in seeds:
        draw = draw_run(seed, ABLE)
        subject = EngineSubject(draw.configuration)
        checker = Checker(subject, checks=[*beside, check], interval=1)
        _observe(checker, subject, draw.operations)
        if checker.violations:
            return list(checker.violations)
    return []


@check_by_check
def test_the_control_breaks_the_property_and_the_check_sees_it_alone(check: type[Check]) -> None:
    control = fault_by_id(check.positive_control)
    assert control.property == check.id()
    seeds = [f"control/{check.id()}/{number}" for number in range(60)]
    with control.installed():
        violations = _alone(check, seeds)
    assert {violation.property for violation in violations} == {check.id()}
    assert _alone(check, seeds[:3]) == []


# -- the checker -----------------------------------------------------------------------------------


def test_each_property_is_put_to_the_test_by_a_few_runs() -> None:
    harness = Harness(EngineSubject(Configuration()))
    assert set(harness.checker.checked().values()) == {0}
    total: Counter[str] = Counter()
    for number in range(10):
        draw = draw_run(f"checked/{number}", ABLE)
        harness = Harness(EngineSubject(draw.configuration))
        assert not harness.run(draw.operations)
        total.update(harness.checker.checked())
    assert set(total) == {check.id() for check in CHECKS}
    assert min(total.values()) > 0


def test_counts_are_by_kind_and_status() -> None:
    harness = Harness(EngineSubject(Configuration(blocks=2)))
    harness.run([Grow(0), Admit((Segment(0, 8),)), Grow(0), *STEP, Grow(0)])
    counts = harness.operation_counts()
    assert counts["grow"] == {"done": 0, "refused": 2, "skipped": 1}
    assert counts["admit"] == {"done": 1, "refused": 0, "skipped": 0}
    assert set(counts) == {*KINDS, *TIER_KINDS}


class RaisesOnGrow(Engine):
    def grow(self, request: Request, tokens: Sequence[int]) -> Outcome:
        raise KeyError("no such block")


def test_a_subject_that_raises_is_a_finding() -> None:
    harness = Harness(EngineSubject(Configuration(), engine=RaisesOnGrow))
    (violation,) = harness.run([Admit((Segment(0, 4),)), Grow(0), Grow(0)])
    assert (violation.property, violation.op) == ("CRASH", 1)
    assert violation.message.startswith("grow raised KeyError: 'no such block' (test_claims.py:")


def test_the_operation_to_blame_is_counted_over_all_operations() -> None:
    subject = EngineSubject(Configuration(), engine=RaisesOnGrow)
    subject.capabilities = frozenset(KINDS) - {"fork"}
    (violation,) = Harness(subject).run([Fork(0), Admit((Segment(0, 4),)), Fork(0), Grow(0)])
    assert violation.op == 3


def _stumbling(hook: str) -> type[Check]:
    """A check with a mistake of its own: one of its hooks raises when a request grows."""

    def raises(self: Check, *arguments: Any) -> None:
        if not arguments or isinstance(arguments[0], Grow):
            raise ZeroDivisionError("a checker's own mistake")

    def expecting(self: Check, kind: type[Operation]) -> Any:
        return raises.__get__(self)

    hooks = {"expecting": expecting, "conclude": raises, "settle": raises, "audit": raises}
    return type("Stumbling", (Check,), {hook: hooks[hook], "claims": ()})


@pytest.mark.parametrize(
    "hook",
    [
        "expecting",
        "conclude",
        "settle",
        "audit",
    ],
)
def test_a_check_that_stumbles_makes_the_verdict_unknown(hook: str) -> None:
    """The subject is not to blame.

    Where an expectation raises, the books have not followed the operation yet; compared with
    the view, they seem to show a violation.
    """
    subject = EngineSubject(Configuration())
    checker = Checker(subject, checks=[*CHECKS, _stumbling(hook)], interval=1)
    with pytest.raises(CheckerError, match="a checker's own mistake"):
        _observe(checker, subject, [Admit((Segment(0, 4),)), Grow(0)])
    assert checker.violations == []


class ForksOneLess(Engine):
    """Splits off one child less than it was asked for."""

    def fork(self, request: Request, samples: int) -> Outcome:
        return super().fork(request, max(1, samples - 1))


def test_a_fork_into_fewer_children_than_asked_for_is_seen() -> None:
    run: list[Operation] = [Admit((Segment(0, 4),)), *STEP, Fork(0, 3)]
    assert Harness(EngineSubject(Configuration(), engine=ForksOneLess)).run(run)


class TupleView(EngineView):
    """Sequences as tuples: what a view promises is a sequence, not a list."""

    def ref_counts(self, group: int) -> Sequence[int]:
        return tuple(super().ref_counts(group))

    def free_blocks(self, group: int) -> Sequence[int]:
        return tuple(super().free_blocks(group))

    def requests(self) -> Sequence[int]:
        return tuple(super().requests())

    def table(self, request: int, group: int) -> Sequence[int]:
        return tuple(super().table(request, group))

    def steps_in_flight(self) -> Sequence[int]:
        return tuple(super().steps_in_flight())


def _with_tuples(event: Event) -> Event:
    lists = {
        name: tuple(value)
        for name in event.__struct_fields__
        if isinstance(value := getattr(event, name), list)
    }
    return replace(event, **lists)


class TupleSubject(EngineSubject):
    def __init__(self, configuration: Configuration, **arguments: Any) -> None:
        super().__init__(configuration, **arguments)
        self._view = TupleView(self.engine)

    def drain_events(self) -> Sequence[Event]:
        return tuple(_with_tuples(event) for event in super().drain_events())


def test_a_subject_may_report_any_kind_of_sequence() -> None:
    for number in range(5):
        draw = draw_run(f"tuples/{number}", ABLE)
        harness = Harness(TupleSubject(draw.configuration), audit_interval=1)
        assert list(harness.run(draw.operations)) == []


class YoungestFirst(Engine):
    """Serves the latest admitted request first."""

    def launch(
        self, budget: int = 0, items: Sequence[tuple[Request, int]] | None = None
    ) -> Outcome:
        self.running.reverse()
        try:
            return super().launch(budget, items)
        finally:
            self.running.reverse()


def test_a_step_that_leaves_an_older_request_behind_is_seen() -> None:
    run: list[Operation] = [Admit((Segment(0, 4),)), Admit((Segment(1, 4),)), Launch(4)]
    assert list(Harness(EngineSubject(Configuration())).run(run)) == []
    (violation, *_) = Harness(EngineSubject(Configuration(), engine=YoungestFirst)).run(run)
    assert (violation.property, violation.request) == ("CAP", 0)


class ReusesIdentities(Engine):
    def _end(self, request: Request) -> None:
        super()._end(request)
        self._next_request = request.id


def test_a_name_that_was_another_requests_is_seen() -> None:
    run: list[Operation] = [Admit((Segment(0, 4),)), Abort(0), Admit((Segment(0, 4),))]
    (violation, *_) = Harness(EngineSubject(Configuration(), engine=ReusesIdentities)).run(run)
    assert violation.property == "LIFE"


class AnswersNothing(EngineSubject):
    def apply(self, operation: Operation) -> Any:
        return None


def test_an_answer_that_is_no_outcome_is_a_finding() -> None:
    (violation,) = Harness(AnswersNothing(Configuration())).run([Reset()])
    assert violation.property == "CRASH"
    assert "answered by an Outcome" in violation.message


def test_what_a_subject_does_not_offer_is_passed_over() -> None:
    """A case that was written for another subject replays on it, and is no false alarm."""
    subject = EngineSubject(Configuration(host_blocks=2))
    subject.semantics = replace(subject.semantics, slots=False, swaps=False)
    harness = Harness(subject, audit_interval=1)
    plain = Admit((Segment(0, 4),))
    assert not harness.run([plain, *STEP, Grow(0)])
    for operation in (
        Admit((Segment(1, 9),), slots=4),
        Launch(items=((0, 1),)),
        Preempt(0, swap=True),
    ):
        assert harness.perform(operation) == SKIPPED
    assert not harness.run([Preempt(0), Resume(0, slots=9), Resume(0), *STEP])
    assert harness.counts[Resume] == {"done": 1, "refused": 0, "skipped": 1}
    assert harness.counts[Launch] == {"done": 2, "refused": 0, "skipped": 1}


class NoAbort(EngineSubject):
    capabilities = frozenset(KINDS) - {"abort", "preempt", "resume"}


def test_a_subject_without_abort_is_drained_by_finishing() -> None:
    harness = Harness(NoAbort(Configuration()))
    harness.run([Admit((Segment(0, 4),)), Admit((Segment(1, 4),))])
    harness.drain([])
    assert not harness.checker.books.requests
    assert harness.checker.checked()["QUIES"] > 0
