"""Does an adapter tell the truth?  Drawn runs of it before a witness, and its declarations tried.

Three questions, none of them about the engine's rightness: do events, answers and view agree
(:mod:`kvproof.stateful_tests.conformance`); does the same run say the same twice; and, where the
ordinary checks find a violation, is it gone when one word of the declared semantics is another?
Then either that declaration is wrong, or the engine that does not keep to it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Literal, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.case import Case, dump_case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import AnyOperation, Operation, kind_of
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.subject import Configuration, Semantics, Subject
from kvproof.invariants.verdict import Violation, counted, primary
from kvproof.invariants.view import View
from kvproof.stateful_tests.conformance import Crashed, Lie, Lied, Witness
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

RUNS = 40
"""Drawn runs: enough for each operation of a cache to be done."""
SEED = "conformance"
_PATIENCE = 10
"""So many times as many, while an operation that is declared was never done, and …"""
_TRIES = 200
"""… tried less often than this: from then on it is a lie.  Rarest are resets and landings, of which
an honest subject does one in twenty."""
_FAILING = 6
"""Failing runs on which other words are tried."""

_LAST = (
    *("groups", "slots", "swaps", "tiers", "exact_tiers", "exact_eviction"),
    *("shorter_hits", "keeps_room", "exact_admission"),
)
"""Words that give up a lot: tried when no other will do."""
_CONCERNS = {
    "exact_admission": ("admit", "resume", "grow", "decode", "reserve", "fork"),
    "shorter_hits": ("admit", "resume"),
    "keeps_room": ("admit", "resume", "grow", "decode", "reserve"),
    "exact_eviction": ("evict",),
    "release_order": ("finish", "abort", "preempt", "retire"),
    "oldest_first": ("launch",),
    "chunks": ("launch",),
    "forks_early": ("fork",),
}
"""Operations that a word is about, where it is not about all: it is no reason for what fails at
others, although it may silence that as well."""


def _other_words(declared: Semantics) -> Iterator[tuple[str, object, Semantics]]:
    """What else might be declared, a word each; not what does not fit the other words."""
    words = {
        word: (True, False) if kind is bool else get_args(kind)
        for word, kind in get_type_hints(Semantics).items()
        if kind is bool or get_origin(kind) is Literal
    }
    words |= {"reserved": ((), (0,)), "groups": (1, 2), "exports": ((),)}
    words |= {"exports_per_request": ((),)}
    for word in sorted(words, key=lambda word: _LAST.index(word) if word in _LAST else -1):
        for other in words[word]:
            if other == getattr(declared, word):
                continue
            with suppress(ValueError):
                yield word, other, replace(declared, **{word: other})


class Told(Struct, frozen=True):
    """A lie, and the run that shows it."""

    lie: Lie
    case: Case | None
    """None if it is about all runs together."""

    def __str__(self) -> str:
        text = f"{self.lie.kind}: {self.lie.message}"
        return text if self.case is None else f"{text}\n{dump_case(self.case)}"


class Examination(Struct, frozen=True):
    """What came of it."""

    told: Told | None
    """The first lie, its run shrunk."""
    violation: Violation | None
    """What the ordinary checks find whatever is declared: the engine's, ``kvproof check`` it."""
    operations: int
    unsure: str = ""
    """Why that there is no lie means nothing: what was tried too little to tell."""


def assert_conforms(factory: SubjectFactory, *, runs: int = RUNS) -> None:
    """For a test of an adapter: raises AssertionError with the lie, and a short run that shows it.

    Says nothing about the engine: that is for ``kvproof check`` and the machine.
    """
    examination = examine(factory, runs=runs)
    if examination.told is not None:
        raise AssertionError(f"the adapter does not tell the truth about {examination.told}")
    if examination.unsure:
        raise AssertionError(
            f"whether the adapter tells the truth is unknown: {examination.unsure}"
        )


def examine(
    factory: SubjectFactory,
    *,
    runs: int = RUNS,
    seed: str = SEED,
    subject: str | None = None,
) -> Examination:
    """Drawn runs ``seed/0``, ``seed/1``, … before a witness, and then the declarations.

    ``subject``: the name by which a replay finds it; that of the class, if there is none.
    """
    name = subject or _name_of(factory)
    able, declared = abilities(factory), factory(Configuration()).capabilities
    draws: list[Draw] = []
    done: set[str] = set()
    crashes: list[str] = []
    tried = Counter[str]()
    operations = 0

    def untried() -> list[str]:
        """Never done, and not tried so often that this tells anything."""
        return sorted(kind for kind in declared - done if tried[kind] < _TRIES)

    while len(draws) < runs or (untried() and len(draws) < _PATIENCE * runs):
        draw = draw_run(f"{seed}/{len(draws)}", able)
        draws.append(draw)
        lie, performed = _before_a_witness(factory, draw, draw.operations, done, crashes)
        operations += performed
        tried.update(map(kind_of, draw.operations[:performed]))
        if lie is not None:
            return Examination(_shrunk(factory, name, draw, lie, performed), None, operations)
    never = declared - done if crashes else declared - done - {*untried()}
    more = f" and, in search of it, {len(draws) - runs} more" if len(draws) > runs else ""
    within = f"never done in {counted(runs, 'run')}{more}"
    if never:
        said = f"declared, but {within}: {', '.join(sorted(never))}"
        if crashes:
            said += f"; it raised {crashes[0]}, for one"
        return Examination(Told(Lie("never-done", said), None), None, operations)
    told, violation = _declarations(factory, name, draws)
    few = ", ".join(f"{kind} ({counted(tried[kind], 'time')})" for kind in untried())
    unsure = f"{within}, but tried too seldom to tell whether it can be: {few}" if few else ""
    return Examination(told, violation, operations, unsure)


def _name_of(factory: SubjectFactory) -> str:
    """``MODULE:CLASS``, if that leads to it, or else what it calls itself."""
    module, name = (getattr(factory, field, "") for field in ("__module__", "__qualname__"))
    if name and getattr(sys.modules.get(module), name, None) is factory:
        return f"{module}:{name}"
    return factory(Configuration()).name


# -- before a witness ----------------------------------------------------------------------------


def _before_a_witness(
    factory: SubjectFactory,
    draw: Draw,
    operations: Sequence[AnyOperation],
    done: set[str],
    crashes: list[str],
) -> tuple[Lie | None, int]:
    """The lie of a run, done twice, and how many operations it took.

    A run that raises ends there: that is no lie, and found by the checks as CRASH.
    """
    records: list[list[bytes]] = []
    for _ in range(2):
        performed = 0
        try:
            subject = factory(draw.configuration)
            witness, perform = _stage(subject)
            records.append(witness.record)
            for operation in operations:
                performed += 1
                outcome = perform(operation)
                if isinstance(subject, SchedulerSubject) and outcome.status == "done":
                    done.add(kind_of(operation))
        except Lied as error:
            return error.lie, performed
        except Crashed as error:
            crashes.append(repr(error.__cause__))
        if not isinstance(subject, SchedulerSubject):
            done.update(witness.done)
    first, second = records
    if first != second:
        said = "the same operations, done in a fresh subject, were answered or told otherwise"
        return Lie("determinism", said), len(operations)
    return None, performed


def _stage(subject: Subject) -> tuple[Witness, Callable[[Operation], Outcome]]:
    """A witness of the cache, and what performs the subject's operations before it."""
    if not isinstance(subject, SchedulerSubject):
        witness = Witness(subject)
        return witness, witness.perform
    witness = Witness(subject.cache)
    subject.connect(witness.perform, lambda event: None)

    def perform(operation: Operation) -> Outcome:
        if kind_of(operation) not in subject.capabilities:
            return SKIPPED
        try:
            outcome = subject.apply(operation)
        except (Lied, Crashed):
            raise
        except Exception as error:
            raise Crashed from error
        subject.drain_events()
        return outcome

    return witness, perform


def _shrunk(factory: SubjectFactory, name: str, draw: Draw, lie: Lie, performed: int) -> Told:
    """A lie of the same kind in fewer operations."""
    shown = [lie]

    def shows(operations: Sequence[AnyOperation]) -> bool:
        again, _ = _before_a_witness(factory, draw, operations, set(), [])
        if again is None or again.kind != lie.kind:
            return False
        shown.append(again)
        return True

    operations = _fewer(draw.operations[:performed], shows)
    return Told(shown[-1], Case(name, draw.configuration, operations))


def _fewer(
    operations: Sequence[AnyOperation], shows: Callable[[Sequence[AnyOperation]], bool]
) -> list[AnyOperation]:
    """Without all that can be left out, in ever smaller pieces, the last first."""
    left, size = list(operations), len(operations)
    while size := size // 2:
        start = len(left) - size
        while start >= 0:
            shorter = left[:start] + left[start + size :]
            if shows(shorter):
                left = shorter
            start -= size
    return left


# -- the declared semantics ----------------------------------------------------------------------


class _Declared:
    """A cache as it is, under another declaration."""

    def __init__(self, subject: Subject, semantics: Semantics) -> None:
        self._subject = subject
        self.name = subject.name
        self.semantics = semantics
        self.configuration = subject.configuration
        self.capabilities = subject.capabilities

    def apply(self, operation: Operation) -> Outcome:
        return self._subject.apply(operation)

    def drain_events(self) -> Sequence[Event]:
        return self._subject.drain_events()

    def view(self) -> View:
        return self._subject.view()


def _declarations(
    factory: SubjectFactory, name: str, draws: Sequence[Draw]
) -> tuple[Told | None, Violation | None]:
    """One word that makes all failing runs pass; else what fails."""
    failing = list(islice(_failing(factory, draws), _FAILING))
    if not failing:
        return None, None
    subject = factory(Configuration())
    schedules = isinstance(subject, SchedulerSubject)
    declared = subject.cache.semantics if isinstance(subject, SchedulerSubject) else None
    declared = declared or subject.semantics
    failed_at = set() if schedules else {_failed_at(*one) for one in failing}
    for word, other, semantics in _other_words(declared):
        if not failed_at <= set(_CONCERNS.get(word, failed_at)):
            continue
        if not any(
            _violation(factory, draw.configuration, draw.operations, semantics)
            for draw, _ in failing
        ):
            said = f"{word}={getattr(declared, word)!r} is declared, but with {other!r}"
            return _declared_wrongly(factory, name, failing, said, semantics), None
    return None, failing[0][1]


def _failed_at(draw: Draw, violation: Violation) -> str:
    """The kind of the operation; empty if the fresh subject is wrong already."""
    return kind_of(draw.operations[violation.op]) if violation.op >= 0 else ""


def _declared_wrongly(
    factory: SubjectFactory,
    name: str,
    failing: Sequence[tuple[Draw, Violation]],
    said: str,
    semantics: Semantics,
) -> Told:
    """The shortest of the runs, shrunk to what still fails as declared and passes otherwise."""
    draw, violation = min(failing, key=lambda one: one[1].op)
    shown = [violation]

    def shows(operations: Sequence[AnyOperation]) -> bool:
        again = _violation(factory, draw.configuration, operations, None)
        if again is None or again.property != violation.property:
            return False
        if _violation(factory, draw.configuration, operations, semantics) is not None:
            return False
        shown.append(again)
        return True

    operations = _fewer(draw.operations[: violation.op + 1], shows)
    text = (
        f"{said} nothing is wrong: {shown[-1].property}, {shown[-1].message}.  Or the engine does "
        f"not keep to it: see kvproof check --subject {name}"
    )
    return Told(Lie("semantics", text), Case(name, draw.configuration, operations))


def _failing(factory: SubjectFactory, draws: Sequence[Draw]) -> Iterator[tuple[Draw, Violation]]:
    for draw in draws:
        violation = _violation(factory, draw.configuration, draw.operations, None)
        if violation is not None:
            yield draw, violation


def _violation(
    factory: SubjectFactory,
    configuration: Configuration,
    operations: Sequence[AnyOperation],
    semantics: Semantics | None,
) -> Violation | None:
    """What the checks find in a run of the subject, as declared or with other semantics."""
    subject = factory(configuration)
    if semantics is not None:
        if isinstance(subject, SchedulerSubject):
            subject.cache = _Declared(subject.cache, semantics)  # type: ignore[assignment]
        else:
            subject = _Declared(subject, semantics)
    try:
        harness = harness_for(subject, audit_interval=1)
        harness.run(operations)
    except (CheckerError, InputError, LookupError) as error:
        if isinstance(error, InputError) and semantics is None:
            raise
        return Violation("CHECKER", f"a check stumbles: {error!r}", op=len(operations) - 1)
    return primary(harness.violations) if harness.violations else None
