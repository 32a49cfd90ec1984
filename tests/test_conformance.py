"""Adapters that lie are caught and named; honest ones pass, over a right engine or a wrong one."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.fuzz.conformance import RUNS, _other_words, assert_conforms, examine
from kvproof.fuzz.faults import fault_by_id
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    Event,
    RequestGrown,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Admit,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import BLOCKS_IN_USE, NO_FREE_BLOCKS, SKIPPED, Outcome
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.view import Standing
from kvproof.stateful_tests.adapter import Adapter, Part, Refused, Request
from kvproof.stateful_tests.examples.nano_subject import NanoSubject
from kvproof.stateful_tests.examples.template import Template
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.engine import EngineSubject, EngineView

# -- honest ones ---------------------------------------------------------------------------------

HONEST = (
    "engine",
    "engine:groups",
    "scheduler:fcfs",
    "kvproof.stateful_tests.examples.template:Template",
    "kvproof.stateful_tests.examples.nano_subject:NanoSubject",
)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_adapter_passes(name: str) -> None:
    examination = examine(subject_factory(name))
    assert examination.told is None
    assert examination.unsure == ""
    assert examination.violation is None
    assert examination.operations > 1000


# -- lies about what an engine did, over kvproof's own --------------------------------------------


class Liar(EngineSubject):
    """An honest subject, until something is overridden."""

    def apply(self, operation: Operation) -> Outcome:
        outcome = super().apply(operation)
        self.told = list(self.tell(list(super().drain_events())))
        return self.answer(operation, outcome)

    def drain_events(self) -> Sequence[Event]:
        told, self.told = self.told, []
        return told

    def tell(self, events: list[Event]) -> Sequence[Event]:
        return events

    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        return outcome


def forgets(kind: type[Event]) -> type[Liar]:
    class Forgets(Liar):
        def tell(self, events: list[Event]) -> Sequence[Event]:
            return [event for event in events if type(event) is not kind]

    return Forgets


def doubles(kind: type[Event]) -> type[Liar]:
    class Doubles(Liar):
        def tell(self, events: list[Event]) -> Sequence[Event]:
            return [event for event in events for _ in range(1 + (type(event) is kind))]

    return Doubles


class TellsBackwards(Liar):
    def tell(self, events: list[Event]) -> Sequence[Event]:
        return events[::-1]


class TellsTheRetirementLast(Liar):
    def tell(self, events: list[Event]) -> Sequence[Event]:
        return sorted(events, key=lambda event: isinstance(event, StepRetired))


class ForgetsThoseUnderPressure(Liar):
    def tell(self, events: list[Event]) -> Sequence[Event]:
        return [event for event in events if getattr(event, "cause", "") != "pressure"]


class TellsAgain(Liar):
    def drain_events(self) -> Sequence[Event]:
        return self.told


class TellsOthersBlocks(Liar):
    def tell(self, events: list[Event]) -> Sequence[Event]:
        return [
            replace(event, blocks=[block + 1 for block in event.blocks])
            if isinstance(event, BlocksAllocated)
            else event
            for event in events
        ]


class CountsOneMore(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        more = isinstance(operation, Evict) and outcome.count > 0
        return replace(outcome, count=outcome.count + more)


class ClaimsHits(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        claims = isinstance(operation, Admit) and outcome.status == "done"
        return replace(outcome, cached_tokens=outcome.cached_tokens + claims)


class NamesTheNext(Liar):
    def apply(self, operation: Operation) -> Outcome:
        if isinstance(operation, Finish):
            operation = Finish(operation.request + 1)
        return super().apply(operation)


class NamesNobody(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        return replace(outcome, request=None) if isinstance(operation, Admit) else outcome


class NamesOtherChildren(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        forked = [child + 1 for child in outcome.children]
        return replace(outcome, children=forked) if isinstance(operation, Fork) else outcome


class AnswersTrue(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        return outcome.status == "done"  # type: ignore[return-value]


class RefusesAfterwards(Liar):
    def tell(self, events: list[Event]) -> Sequence[Event]:
        return () if any(isinstance(event, RequestGrown) for event in events) else events

    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        refuses = isinstance(operation, Grow) and outcome.status == "done"
        return Outcome("refused", NO_FREE_BLOCKS, outcome.request) if refuses else outcome


class NeverForks(Liar):
    def apply(self, operation: Operation) -> Outcome:
        if type(operation).__name__ == "Fork":
            running = self.engine.running
            number = running[operation.request % len(running)].id if running else None
            return Outcome("refused", "not_computed", number) if running else SKIPPED
        return super().apply(operation)


class DoesNothing(Liar):
    def apply(self, operation: Operation) -> Outcome:
        return SKIPPED

    def drain_events(self) -> Sequence[Event]:
        return ()


class Raises(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        raise RuntimeError("out of order")


TURNS = count()


class DependsOnTheDay(Liar):
    def answer(self, operation: Operation, outcome: Outcome) -> Outcome:
        launched = isinstance(operation, Retire) and outcome.status == "done"
        return replace(outcome, reason=f"turn {next(TURNS)}") if launched else outcome


class _LyingView(EngineView):
    def __init__(self, subject: EngineSubject) -> None:
        super().__init__(subject.engine)


class Shows(Liar):
    """Lies by its view."""

    shown: type[_LyingView]

    def view(self) -> EngineView:
        return self.shown(self)


class OldView(_LyingView):
    """Not live: what it was when it was made."""

    def __init__(self, subject: EngineSubject) -> None:
        super().__init__(subject)
        self._free = [list(pool.free_blocks()) for pool in self._engine.pools]

    def free_blocks(self, group: int) -> Sequence[int]:
        return self._free[group]


class OtherTable(_LyingView):
    def table(self, request: int, group: int) -> Sequence[int]:
        return super().table(request, group)[::-1]


class NoReferences(_LyingView):
    def ref_counts(self, group: int) -> Sequence[int]:
        return [min(1, references) for references in super().ref_counts(group)]


class WrongCounter(_LyingView):
    def free_count(self, group: int) -> int:
        return max(0, super().free_count(group) - 1)


class EmptyIndex(_LyingView):
    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return {}


class CountsWhatIsLaunched(_LyingView):
    def standing(self, request: int) -> Standing:
        state, tokens, _, rows = super().standing(request)
        return state, tokens, self._engine.requests[request].scheduled, rows


class NoSteps(_LyingView):
    def steps_in_flight(self) -> Sequence[int]:
        return []


def shows(view: type[_LyingView]) -> type[Shows]:
    return type(view.__name__, (Shows,), {"shown": view})


# -- lies about what was promised, over the template ----------------------------------------------


def declares(base: Any, **words: Any) -> Any:
    """The same subject with other words."""
    return type(base.__name__, (base,), {"semantics": replace(base.semantics, **words)})


class PublishesAtAllocation(Template):
    """As its declaration says nothing of: honest with at_allocation and without chunks."""

    semantics = replace(Template.semantics, chunks=False)

    def admit(self, request: Request) -> int:
        cached = super().admit(request)
        self.cache.publish(self.tables[request.number], request.marked_tokens)
        return cached

    def grow(self, request: Request, tokens: int) -> None:
        super().grow(request, tokens)
        self.cache.publish(self.tables[request.number], request.marked_tokens)


class ReleasesHeadFirst(Template):
    semantics = replace(Template.semantics, eviction_order="lru")

    def release(self, request: Request) -> None:
        self.tables[request.number].reverse()
        super().release(request)


class EvictsTheNewest(Template):
    def grow(self, request: Request, tokens: int) -> None:
        super().grow(request, tokens)
        cached = [block for block in self.cache.free if block in self.cache.key_of]
        self.cache.free[len(self.cache.free) - len(cached) :] = cached[::-1]


class KeepsAReserve(Template):
    def admit(self, request: Request) -> int:
        rows = -(-len(request.tokens) // self.cache.block_size)
        if rows == len(self.cache.free):
            raise Refused
        return super().admit(request)


class EvictsMore(Template):
    def evict(self, blocks: int) -> None:
        super().evict(2 * blocks)


class NeverPublishes(Template):
    def publish(self, request: Request) -> None:
        pass


class HitsNothing(Template):
    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.cache.hits = lambda tokens: []  # type: ignore[method-assign]


class IgnoresTheBudget(Template):
    def schedule(self, budget: int) -> Sequence[Part]:
        return super().schedule(0)


class ChangesWhatItRefuses(Template):
    """Takes the hits, and then finds that there is no room for the rest."""

    def admit(self, request: Request) -> int:
        hits = self.cache.hits(request.marked_tokens)
        try:
            return super().admit(request)
        except Refused:
            self.cache.forget(hits[-1:])
            raise


def says(base: Any, **words: Any) -> Any:
    """The same in each instance: of an engine, and where a class of Adapter may not say so."""

    class Says(base):  # type: ignore[misc]
        def __init__(self, configuration: Configuration) -> None:
            super().__init__(configuration)
            self.semantics = replace(self.semantics, **words)

    return Says


class _ResetsTheDeviceAlone(Engine):
    def reset(self) -> Outcome:
        if any(pool.free_count + pool.withheld < pool.usable for pool in self.pools):
            return Outcome("refused", BLOCKS_IN_USE)
        return Outcome("done", count=sum([pool.evict(pool.usable, "reset") for pool in self.pools]))


class ResetsTheDeviceAlone(EngineSubject):
    """What is below it is found as before."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration, engine=_ResetsTheDeviceAlone)


@dataclass(frozen=True)
class Lying:
    factory: Callable[[Configuration], Any]
    kind: str
    says: str = ""
    operations: int = 8
    """At most, in the run that shows it."""
    runs: int = RUNS
    seed: str = "conformance"


LYING = {
    "forgets an allocation": Lying(forgets(BlocksAllocated), "table"),
    "forgets a publication": Lying(forgets(BlocksPublished), "index"),
    "forgets evictions": Lying(forgets(BlocksEvicted), "answer", "its events 0"),
    "forgets those under pressure": Lying(ForgetsThoseUnderPressure, "index", seed="lies"),
    "forgets a release": Lying(forgets(BlocksReleased), "references"),
    "forgets growth": Lying(forgets(RequestGrown), "event", "RequestGrown"),
    "forgets a launch": Lying(forgets(StepLaunched), "event", "StepLaunched"),
    "doubles an allocation": Lying(doubles(BlocksAllocated), "event"),
    "doubles a release": Lying(doubles(BlocksReleased), "event", "give back"),
    "doubles a retirement": Lying(doubles(StepRetired), "event", "2 times"),
    "doubles a publication": Lying(doubles(BlocksPublished), "event", "second time"),
    "tells backwards": Lying(TellsBackwards, "order"),
    "tells the retirement last": Lying(TellsTheRetirementLast, "order"),
    "tells again": Lying(TellsAgain, "event", "again"),
    "tells others' blocks": Lying(TellsOthersBlocks, "table"),
    "counts one more": Lying(CountsOneMore, "answer", "count"),
    "claims hits": Lying(ClaimsHits, "answer", "cached_tokens"),
    "names the next": Lying(NamesTheNext, "answer", "candidates"),
    "names nobody": Lying(
        NamesNobody, "answer", "RequestAdmitted was told of 0, but the answer names no request"
    ),
    "names other children": Lying(NamesOtherChildren, "answer", "RequestForked was told of "),
    "answers true": Lying(AnswersTrue, "answer", "Outcome"),
    "refuses afterwards": Lying(RefusesAfterwards, "refusal"),
    "never forks": Lying(NeverForks, "never-done", "fork"),
    "does nothing": Lying(DoesNothing, "never-done", "admit"),
    "raises": Lying(Raises, "never-done", "it raised RuntimeError('out of order'), for one"),
    "depends on the day": Lying(DependsOnTheDay, "determinism"),
    "old view": Lying(shows(OldView), "view", "free"),
    "other table": Lying(shows(OtherTable), "table"),
    "no references": Lying(shows(NoReferences), "references"),
    "wrong counter": Lying(shows(WrongCounter), "free", "counted"),
    "empty index": Lying(shows(EmptyIndex), "index"),
    "counts what is launched": Lying(shows(CountsWhatIsLaunched), "standing"),
    "no steps": Lying(shows(NoSteps), "steps"),
    "changes what it refuses": Lying(ChangesWhatItRefuses, "refusal", "BlocksEvicted"),
    "publishes early": Lying(PublishesAtAllocation, "semantics", "publishes='after_compute'"),
    "denies that it publishes early": Lying(
        declares(PublishesAtAllocation, publishes="lazily"), "semantics", "publishes='lazily'"
    ),
    "publishes nothing": Lying(
        declares(NeverPublishes, publishes="at_release"), "semantics", "publishes='at_release'"
    ),
    "releases head first": Lying(ReleasesHeadFirst, "semantics", "release_order='tail_first'"),
    "evicts the newest": Lying(EvictsTheNewest, "semantics", "eviction_order='lru'"),
    "evicts the newest, whatever is configured": Lying(
        declares(EvictsTheNewest, eviction_order="configured"),
        "semantics",
        "eviction_order='configured'",
    ),
    "evicts more": Lying(EvictsMore, "semantics", "exact_eviction=True"),
    "keeps what is behind a window": Lying(
        declares(Template, windows=(4,)), "semantics", "windows_lag=False"
    ),
    "forks late": Lying(says(EngineSubject, forks_early=True), "semantics", "forks_early=True"),
    "waits for a step": Lying(
        declares(Template, stream_order=True), "semantics", "stream_order=True"
    ),
    "keeps a reserve": Lying(KeepsAReserve, "semantics", "exact_admission=True"),
    "denies its reserve": Lying(
        declares(KeepsAReserve, exact_admission=False, keeps_room=False),
        "semantics",
        "keeps_room=False",
    ),
    "denies that it hits less": Lying(
        declares(HitsNothing, exact_admission=False, shorter_hits=False),
        "semantics",
        "shorter_hits=False",
    ),
    "resets the device alone": Lying(ResetsTheDeviceAlone, "semantics", "resets_tiers=True"),
    "denies that it resets all tiers": Lying(
        says(EngineSubject, resets_tiers=False), "semantics", "resets_tiers=False"
    ),
    "ignores the budget": Lying(IgnoresTheBudget, "semantics", "chunks=True"),
    "does not fence": Lying(
        says(Template, fences_releases=True), "semantics", "fences_releases=True"
    ),
    "fences": Lying(
        says(EngineSubject, fences_releases=False), "semantics", "fences_releases=False"
    ),
    "serves others first": Lying(
        declares(NanoSubject, oldest_first=True), "semantics", "oldest_first=True", 10, runs=160
    ),
    "one reserved block": Lying(declares(NanoSubject, reserved=(0,)), "shape", "reserved=()"),
}


@pytest.mark.parametrize("lying", LYING.values(), ids=LYING)
def test_a_lying_adapter_is_caught_and_named(lying: Lying) -> None:
    told = examine(lying.factory, runs=lying.runs, seed=lying.seed).told
    assert told is not None
    assert told.lie.kind == lying.kind, told
    assert lying.says in told.lie.message, told
    if told.case is not None:
        assert len(told.case.operations) <= lying.operations, told


def test_what_else_a_wrong_word_may_be_is_said() -> None:
    told = examine(KeepsAReserve).told
    assert told is not None
    assert told.lie.message.endswith(
        f"Or the engine does not keep to it: see kvproof check --subject {__name__}:KeepsAReserve"
    )


def test_the_run_names_the_subject_so_that_a_replay_finds_it() -> None:
    for given in (None, "lies:Reserve"):
        told = examine(KeepsAReserve, subject=given).told
        assert told is not None
        assert told.case is not None
        assert told.case.subject == (given or f"{__name__}:KeepsAReserve")


def test_what_was_never_done_is_told_with_the_runs_that_were_made() -> None:
    told = examine(DoesNothing, runs=7).told
    assert told is not None
    assert "never done in 7 runs and, in search of it, 63 more: admit, " in told.lie.message
    assert "reset" not in told.lie.message, "too seldom tried to tell"


def test_what_was_tried_too_seldom_is_no_lie_but_unknown() -> None:
    examination = examine(Template, runs=1)
    assert (examination.told, examination.violation) == (None, None)
    assert examination.unsure == (
        "never done in 1 run and, in search of it, 9 more, but tried too seldom to tell whether "
        "it can be: reset (11 times)"
    )
    with pytest.raises(AssertionError, match=r"is unknown: never done in 1 run .*reset \(11 times"):
        assert_conforms(Template, runs=1)
    assert examine(Template, runs=3).unsure == ""


class NeverResets(Template):
    def reset(self) -> None:
        raise Refused(BLOCKS_IN_USE)


def test_what_is_always_refused_is_a_lie_once_it_was_tried_often_enough() -> None:
    told = examine(NeverResets).told
    assert told is not None
    assert told.lie.kind == "never-done"
    assert told.lie.message.endswith(" more: reset")


# -- words, and what the page says of them ---------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text(encoding="utf-8")


def words_of_page(row: str) -> str:
    """The second cell of that row."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    return line.split("|")[2]


def of_page(row: str) -> dict[str, object]:
    """What that row lists: ``word='value'``, each with its value."""
    listed = [text.partition("=") for text in re.findall(r"`(\w+=[^`]+)`", words_of_page(row))]
    return {f"{word}={literal_eval(said)!r}": literal_eval(said) for word, _, said in listed}


def test_each_word_that_the_page_calls_demanded_is_found_where_it_is_not_kept() -> None:
    shown = {lying.says for lying in LYING.values() if lying.kind == "semantics"}
    assert {*of_page("demanded")} == shown


_BESIDE: dict[str, dict[str, object]] = {
    "shorter_hits": {"exact_admission": False},
    "keeps_room": {"exact_admission": False},
    "windows_lag": {"windows": (4,)},
    "eviction_margin": {"exact_eviction": False},
    "preemption_room": {"exact_eviction": False},
}
"""What a word needs beside it to mean something."""
_OF_TIERS = ("exact_tiers", "disk_survives", "tier_bytes", "host_order", "disk_order")


@pytest.mark.parametrize("said", of_page("excuses"))
def test_a_word_that_the_page_calls_an_excuse_is_found_by_nobody(said: str) -> None:
    """Declared of an engine that keeps more."""
    word = said.partition("=")[0]
    base = EngineSubject if word in _OF_TIERS else Template
    words = {word: of_page("excuses")[said], **_BESIDE.get(word, {})}
    examination = examine(says(base, **words), runs=3)
    assert (examination.told, examination.violation) == (None, None)


def test_the_page_tells_of_each_word_what_becomes_of_it() -> None:
    told = "".join(map(words_of_page, ("demanded", "excuses", "shape", "drawn")))
    assert {*re.findall(r"`(\w+)[=`]", told)} == {*Semantics.__struct_fields__}


# -- words that do not fit each other --------------------------------------------------------------


class DeclaresStates(EngineSubject):
    """As an engine with states does; what is found in this one goes away with no other word."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.semantics = replace(
            self.semantics,
            windows=(2,),
            states=(0,),
            stream_order=True,
            exact_admission=False,
        )


def test_a_word_that_cannot_be_another_beside_the_rest_is_passed_over() -> None:
    examination = examine(DeclaresStates)
    assert examination.told is None, examination.told
    assert examination.violation is not None
    tried = {word for word, _, _ in _other_words(DeclaresStates(Configuration()).semantics)}
    assert "eviction_order" in tried
    assert not tried & {"stream_order", "exact_admission"}


class EvictsWhatIsEmpty(Template):
    """A fault of the engine: it counts free blocks in which nothing is findable."""

    def evict(self, blocks: int) -> None:
        self.cache.forget(self.cache.free[:blocks])


def test_a_word_about_other_operations_is_not_named() -> None:
    examination = examine(EvictsWhatIsEmpty)
    assert examination.told is None, examination.told
    assert examination.violation is not None
    assert examination.violation.property == "CAP"


# -- answers of a wrong shape ---------------------------------------------------------------------


class IndexWithoutLists(Template):
    def index(self) -> Any:
        return dict(self.cache.block_of)


class IndexByText(Template):
    def index(self) -> Any:
        return {key.hex(): blocks for key, blocks in super().index().items()}


class IndexOfNothing(Template):
    def index(self) -> Any:
        return None


class NoTable(Template):
    def table(self, request: Request) -> Any:
        return super().table(request) or None


class TooFewCounts(Template):
    def ref_counts(self) -> Any:
        return super().ref_counts()[1:]


class TooManyCounts(NanoSubject):
    def ref_counts(self) -> Any:
        return [0, *super().ref_counts()]


class OneCount(Template):
    def ref_counts(self) -> Any:
        return 9


class NamesBlocks(Template):
    def free_blocks(self) -> Any:
        return list(map(str, super().free_blocks()))


WRONG_SHAPES = {
    IndexWithoutLists: "answers 1, but a list of block ids (int) is needed",
    IndexByText: "but bytes are needed",
    IndexOfNothing: "index() answers None, but a dict is needed",
    NoTable: "table() of request 0, which is preempted, answers None, but a list of",
    TooFewCounts: "plus reserved=(0,) make 9; if block 0 is yours to give, declare reserved=()",
    TooManyCounts: "plus reserved=() make 8; if there is a null block, declare reserved=(0,)",
    OneCount: "ref_counts() answers 9, but a list of numbers is needed",
    NamesBlocks: "free_blocks() answers ['1', '2', '3', '4', '5', '6', ...], but a list of block",
}


@pytest.mark.parametrize("adapter", WRONG_SHAPES)
def test_an_answer_of_a_wrong_shape_is_told_by_its_method(adapter: type[Adapter]) -> None:
    lie = examine(adapter).told
    assert lie is not None
    assert lie.lie.kind == "shape", lie
    harness = Harness(adapter(Configuration(blocks=8, block_size=4)), audit_interval=1)
    once = (Admit((Segment(1, 8),)), Launch(), Retire(), Preempt(0), Admit((Segment(1, 8),)))
    (violation,) = harness.run(once)
    assert violation.property == "CRASH"
    assert WRONG_SHAPES[adapter] in violation.message


def test_a_lie_below_a_scheduler_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EngineSubject.drain_events

    def drain_events(subject: EngineSubject) -> Sequence[Event]:
        return [event for event in honest(subject) if not isinstance(event, BlocksAllocated)]

    monkeypatch.setattr(EngineSubject, "drain_events", drain_events)
    told = examine(subject_factory("scheduler:fcfs")).told
    assert told is not None
    assert told.lie.kind == "table"
    assert told.case is not None
    assert len(told.case.operations) <= 2


def test_what_a_test_says_of_a_lying_adapter() -> None:
    with pytest.raises(AssertionError, match="does not tell the truth about free: ") as told:
        assert_conforms(shows(WrongCounter))
    assert '"operations": [' in str(told.value)
    assert_conforms(NanoSubject, runs=20)


# -- an honest adapter over an engine that is wrong ----------------------------------------------

WRONG = (
    "adapter-not-in-key",
    "evicts-the-hottest",
    "releases-ignore-steps-in-flight",
    "writes-start-at-row-zero",
)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_engine_is_no_lying_adapter(fault: str) -> None:
    with fault_by_id(fault).installed():
        examination = examine(EngineSubject)
    assert examination.told is None, examination.told
    assert examination.violation is not None
