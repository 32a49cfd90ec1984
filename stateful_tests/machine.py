"""The Hypothesis machine over any subject: one rule for each kind of operation that it can do.

For pytest, and for shrinking by Hypothesis.  Operations are total, so the rules need no
preconditions but one: what is always refused for want of a tier is not tried.  Each is checked as
it is performed, which is cheaper than an invariant.  A run ends with a drain and a full audit.
What fails is told as one exception, with its story and its case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, ClassVar, NoReturn, Protocol

from hypothesis import HealthCheck, Phase, Verbosity, configuration, settings
from hypothesis import seed as seeded
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.control import current_build_context
from hypothesis.errors import InvalidArgument
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct
from msgspec.structs import replace

from kvproof.invariants.case import Case, dump_case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import AnyOperation
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.export import pytest_source
from kvproof.stateful_tests.harnesses import AnyHarness, harness_for
from kvproof.stateful_tests.strategies import (
    FOLLOW_UPS,
    RECIPES,
    WORLD_ARGUMENTS,
    Recipe,
    World,
    follow_up,
    scheduler_world,
    world,
)
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.totals import Totals

EXAMPLES_PER_EPOCH = 1000
"""Hypothesis remembers every example of one execution (#3975): a campaign starts afresh."""
STEPS = (50, 100)
"""Steps per example, by turns: short runs reach more worlds, long ones deeper states."""


class PropertyViolated(AssertionError):
    """A run violated a property; the message tells how, and holds the case."""

    def __init__(self, message: str, case: Case, violation: Violation) -> None:
        super().__init__(message)
        self.case = case
        self.violation = violation


class CheckerStumbled(Exception):
    """A checker could not follow what the subject reported: the verdict is unknown."""

    def __init__(self, message: str, case: Case) -> None:
        super().__init__(message)
        self.case = case


class OnFailure(Protocol):
    """Called with the run that Hypothesis reports, shrunk; says what it wrote."""

    def __call__(
        self, case: Case, violation: Violation, explanation: str, *, moments: Sequence[Moment]
    ) -> Sequence[Path]: ...


class Setup(Struct, frozen=True):
    """What a machine drives, and whom it tells."""

    factory: SubjectFactory
    name: str
    audit_interval: int | None = None
    on_failure: OnFailure | None = None
    totals: Totals | None = None
    able: frozenset[str] = frozenset()
    """The features of the subject (asked once: to build a subject may take its time) …"""
    schedules: bool = False
    """… and whether it is a scheduler."""


class CacheMachine(RuleBasedStateMachine):
    """A run of one subject; :func:`machine_for` adds the rules."""

    setup: ClassVar[Setup]

    def __init__(self) -> None:
        super().__init__()
        self._harness: AnyHarness | None = None
        self._world: World
        self._operations: list[AnyOperation] = []
        self._over = False
        """A violation was seen, or a checker stumbled: there is nothing left to check."""

    @initialize(**WORLD_ARGUMENTS)
    def start(self, **arguments: int) -> None:
        make = scheduler_world if self.setup.schedules else world
        self._world = make(**arguments, able=self.setup.able)
        self._harness = harness_for(
            self.setup.factory(self._world.configuration),
            audit_interval=self.setup.audit_interval,
        )

    def _perform(self, operation: AnyOperation) -> None:
        harness = self._harness
        assert harness is not None, "start has run"
        self._operations.append(operation)
        try:
            harness.perform(operation)
        except CheckerError as error:
            self._stumble(error)
        if harness.violations:
            self._fail()

    def teardown(self) -> None:
        harness = self._harness
        if harness is None:  # the run was cut off while its world was drawn
            return
        try:
            if not self._over:
                self._quiesce(harness)
        finally:
            if self.setup.totals is not None:
                self.setup.totals.add(harness)

    def _quiesce(self, harness: AnyHarness) -> None:
        try:
            harness.drain(self._operations)
            harness.audit()
        except CheckerError as error:
            self._stumble(error)
        if harness.violations:
            self._fail()

    def _case(self, harness: AnyHarness) -> Case:
        violations = harness.violations
        return Case(
            self.setup.name,
            harness.subject.configuration,  # as built, which may differ from what was drawn
            list(self._operations),
            features=self._world.features,
            violates=primary(violations).property if violations else None,
        )

    def _fail(self) -> NoReturn:
        """Every failure is raised here, so that Hypothesis takes them for one and shrinks it."""
        assert self._harness is not None
        self._over = True
        raise self._failure(self._case(self._harness), primary(self._harness.violations))

    def _stumble(self, error: CheckerError) -> NoReturn:
        assert self._harness is not None
        self._over = True
        raise self._stumbling(self._case(self._harness), error) from error

    def _failure(self, case: Case, violation: Violation) -> BaseException:
        """What to raise: told at length only for the run that Hypothesis reports."""
        if not _is_final():
            return PropertyViolated(violation.property, case, violation)
        finding = tell(self.setup.factory, case)
        if finding is None:
            message = (
                f"{violation.property}: {violation.message}.\nA replay of the same operations "
                f"did not show it: the subject may not be deterministic.\n\n"
                f"{dump_case(case)}"
            )
            return PropertyViolated(message, case, violation)
        paths: Sequence[Path] = ()
        if self.setup.on_failure is not None:
            paths = self.setup.on_failure(
                finding.case, finding.violation, finding.explanation, moments=finding.moments
            )
        return PropertyViolated(_message(finding, paths), finding.case, finding.violation)

    def _stumbling(self, case: Case, error: CheckerError) -> BaseException:
        return CheckerStumbled(f"the verdict is unknown: {error}\n\n{dump_case(case)}", case)


def _is_final() -> bool:
    """Whether this is the run that Hypothesis reports, after it searched and shrank."""
    try:
        return current_build_context().is_final
    except InvalidArgument:  # the machine is driven by hand
        return True


class Finding(Struct, frozen=True):
    """A violation, and how it came about."""

    case: Case
    """Ends with the operation to blame."""
    violation: Violation
    explanation: str
    moments: Sequence[Moment]


def tell(factory: SubjectFactory, case: Case) -> Finding | None:
    """Replay a case, audited at each operation, up to its first violation; None if it has none.

    Operations that are not needed for it are left out: a rule that Hypothesis kept for the sake
    of its second operation brings its first along.
    """
    finding = _replay(factory, case)
    length = -1
    while finding is not None and length != len(finding.case.operations) <= _TIDIED_UP_TO:
        length = len(finding.case.operations)
        finding = _tidied(factory, finding)
    return finding


def _tidied(factory: SubjectFactory, finding: Finding) -> Finding:
    """Tries to do without each operation but the last, which is to blame."""
    index = len(finding.case.operations) - 2
    while index >= 0:
        operations = finding.case.operations
        shorter = replace(finding.case, operations=operations[:index] + operations[index + 1 :])
        again = _replay(factory, shorter)
        if again is not None and again.violation.property == finding.violation.property:
            finding = again
        index = min(index, len(finding.case.operations) - 1) - 1
    return finding


_TIDIED_UP_TO = 100
"""Operations; Hypothesis has shrunk longer cases less, and so would this."""


def _replay(factory: SubjectFactory, case: Case) -> Finding | None:
    harness = harness_for(factory(case.configuration), audit_interval=1)
    moments: list[Moment] = []
    try:
        for index, operation in enumerate(case.operations):
            harness.last_events = ()
            outcome = harness.perform(operation)
            moments.append(Moment(index, operation, outcome, harness.last_events))
            if harness.violations:
                break
        if not harness.audit():
            return None
    except CheckerError:
        return None
    violation = primary(harness.violations)
    case = replace(case, operations=case.operations[: len(moments)], violates=violation.property)
    explanation = explain(violation, moments, case.configuration.block_size)
    return Finding(case, violation, explanation, moments)


def _message(finding: Finding, paths: Sequence[Path]) -> str:
    parts = [
        finding.explanation,
        "As a case, for `kvproof replay`:\n" + dump_case(finding.case).rstrip(),
        "As a pytest file:\n" + pytest_source(finding.case, finding.explanation).rstrip(),
    ]
    if paths:
        parts.append("Written to " + ", ".join(str(path) for path in paths))
    return "\n\n".join(parts)


def machine_for(
    factory: SubjectFactory,
    name: str,
    *,
    audit_interval: int | None = None,
    on_failure: OnFailure | None = None,
    totals: Totals | None = None,
) -> type[CacheMachine]:
    """The machine over the subjects that ``factory`` builds.

    ``name`` stands for the subject in cases.  ``audit_interval``: as for the harness.
    Its ``TestCase`` is what pytest collects; ``TestCase.settings`` may be set as usual.
    """
    setup = Setup(factory, name, audit_interval, on_failure, totals)
    machine = _machine_class(CacheMachine, setup)
    machine.TestCase.settings = settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # One failure at a time; explaining it is not for Hypothesis, which takes a minute over it.
        report_multiple_bugs=False,
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    return machine


def _machine_class(base: type[CacheMachine], setup: Setup) -> type[CacheMachine]:
    subject = setup.factory(Configuration())
    capabilities = subject.capabilities
    setup = replace(setup, able=subject.semantics.features(), schedules="arrive" in capabilities)
    rules = {kind: _rule(kind, RECIPES[kind]) for kind in RECIPES if kind in capabilities}
    title = "".join(part.capitalize() for part in re.split(r"\W+", setup.name)) + "Machine"
    return type(title, (base,), {"setup": setup, "__module__": __name__, **rules})


def _rule(kind: str, recipe: Recipe) -> Callable[..., Any]:
    build = recipe.build

    def perform(self: CacheMachine, then: int, **arguments: Any) -> None:
        self._perform(build(self._world, **arguments))
        for operation in follow_up(self._world, then):
            self._perform(operation)

    perform.__name__ = kind
    drawn = rule(**recipe.arguments, then=FOLLOW_UPS)(perform)
    if not recipe.needs:
        return drawn
    return precondition(lambda machine: recipe.needs.issubset(machine._world.features))(drawn)


# -- what `kvproof check` runs ---------------------------------------------------------------------


class _Ended(KeyboardInterrupt):
    """Leaves Hypothesis in the middle of an execution.

    An Exception it would take for a failure, replay and shrink (kvproof's own shrinker does that
    in milliseconds); and of anything else but a KeyboardInterrupt it would complain that the
    machine draws one thing now and another then.
    """

    def __init__(self, case: Case | None = None, stumbled: CheckerStumbled | None = None) -> None:
        super().__init__()
        self.case = case
        self.stumbled = stumbled


class _Campaign(CacheMachine):
    """A machine that ends its execution at the first failure, or when it is told to."""

    is_over: ClassVar[Callable[[], bool]]
    source: ClassVar[str]

    def __init__(self) -> None:
        if type(self).is_over():
            raise _Ended
        super().__init__()

    def _failure(self, case: Case, violation: Violation) -> BaseException:
        return _Ended(replace(case, seed=self.source))

    def _stumbling(self, case: Case, error: CheckerError) -> BaseException:
        told = super()._stumbling(replace(case, seed=self.source), error)
        assert isinstance(told, CheckerStumbled)
        return _Ended(stumbled=told)


def run_machine(
    factory: SubjectFactory,
    name: str,
    *,
    seconds: float,
    seed: int | str,
    totals: Totals | None = None,
    stop: Callable[[], bool] | None = None,
    audit_interval: int | None = None,
) -> Case | None:
    """Run the machine for so many seconds; the case of the first failing run, not shrunk.

    Epoch after epoch, each with a seed of its own: equal seeds draw equal runs, as long as the
    same modules are imported.  ``stop`` is asked before each run whether to end early.
    Raises CheckerStumbled.
    """
    deadline = monotonic() + seconds
    machine = _machine_class(
        _Campaign, Setup(factory, name, audit_interval=audit_interval, totals=totals)
    )
    assert issubclass(machine, _Campaign)
    machine.is_over = staticmethod(lambda: monotonic() >= deadline or (stop is not None and stop()))
    with _home_of_hypothesis():
        ended = _run_epochs(machine, seed)
    if ended.stumbled is not None:
        raise ended.stumbled from ended.__cause__
    return ended.case


@contextmanager
def _home_of_hypothesis() -> Iterator[None]:
    """A folder of its own, so that none is left where the user happens to stand."""
    before = getattr(configuration, "__hypothesis_home_directory", None)  # nobody else tells
    with TemporaryDirectory(prefix="kvproof-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(before)


def _run_epochs(machine: type[_Campaign], seed: int | str) -> _Ended:
    for epoch in count():
        try:
            _run_epoch(machine, f"{seed}/{epoch}", STEPS[epoch % len(STEPS)])
        except _Ended as ended:
            return ended
    raise AssertionError("epochs go on until one ends them")


def _run_epoch(machine: type[_Campaign], source: str, steps: int) -> None:
    machine.source = f"machine {source}"
    seeded(int.from_bytes(sha256(source.encode()).digest()[:8], "big"))(machine)
    run_state_machine_as_test(
        machine, settings=generation_settings(EXAMPLES_PER_EPOCH * STEPS[0] // steps, steps)
    )


def generation_settings(examples: int, steps: int) -> settings:
    """Settings that only generate, silently and from the given seed."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
