"""A trace replayed with all checks on; and, if something fails, the case that shows it.

Operations of a long trace are not kept: a hundred thousand requests make millions.  When a check
fails, the replay, which is deterministic, is done again up to that operation, this time keeping
what it does.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct

from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.fuzz.traces.figures import Slo, TraceResult
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.fuzz.traces.observer import Observer, Series
from kvproof.fuzz.traces.replay import ObservedSubject, Replay
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import Promises
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.policies import policy_factory


class _ViolatedError(Exception):
    """A check failed: the replay ends here."""


class _EnoughError(Exception):
    """As many operations are recorded as were wanted."""


class Setting(Struct, frozen=True):
    """What all policies of a comparison have in common."""

    configuration: Configuration
    max_tokens: int = 0
    """Output tokens that each request declares; 0: its real ones."""
    slo: Slo = Slo()
    cost: CostModel = CostModel()
    cache_dtype: str = "bfloat16"


class CheckedTrace(Struct, frozen=True):
    """What the replay under one policy showed."""

    policy: str
    arm: str
    """What memory there is below the device, in a word or two; empty if that is not compared."""
    about: str
    """The policy, in one line of its author's."""
    promises: Promises
    result: TraceResult
    series: Series
    violations: Sequence[Violation]
    ops: int
    """Operations checked: the scheduler's, and the cache's below it."""
    seconds: float
    operations: dict[str, dict[str, int]]
    goals: dict[str, int]
    checked: dict[str, int]
    case: Case | None
    """The operations up to the violation."""
    problem: str | None
    """Why the verdict is unknown: a checker stumbled."""

    @property
    def name(self) -> str:
        """What tells it from the others that it is compared with."""
        return arm_name(self.policy, self.arm)


class TraceRun:
    """One checked replay under one policy; ``finished`` tells how far it is."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        setting: Setting,
        policy: str = "fcfs",
        arm: str = "",
    ) -> None:
        """Raises InputError if there is no such policy."""
        self.trace = trace
        self.setting = setting
        self.policy = policy
        self.arm = arm
        self._factory = policy_factory(policy)
        self._subject = self._fresh_subject()
        self._harness = SchedulingHarness(self._subject)
        self.replay = self._replay(self._subject, self._perform)

    @property
    def finished(self) -> int:
        """Requests that have finished by now."""
        return self._subject.observer.finished

    def _fresh_subject(self) -> ObservedSubject:
        return ObservedSubject(
            self.setting.configuration,
            policy=self._factory,
            observer=Observer(self.trace),
            name=f"scheduler:{self.policy}",
            clock=VirtualClock(),
            cost=self.setting.cost,
        )

    def _replay(self, subject: ObservedSubject, perform: Callable[[Operation], Outcome]) -> Replay:
        return Replay(self.trace, subject, perform, max_tokens=self.setting.max_tokens)

    def _perform(self, operation: Operation) -> Outcome:
        outcome = self._harness.perform(operation)
        if self._harness.violations:
            raise _ViolatedError
        return outcome

    def run(self) -> CheckedTrace:
        """Replay to the end, or to the first violation."""
        harness, problem = self._harness, None
        started = time.perf_counter()
        try:
            self.replay.run()
            harness.audit()
        except _ViolatedError:
            pass
        except CheckerError as error:
            problem = str(error)
        seconds = time.perf_counter() - started
        return CheckedTrace(
            policy=self.policy,
            arm=self.arm,
            about=_first_line(self._factory),
            promises=self._subject.promises,
            result=self.result(),
            series=self._subject.observer.series(),
            violations=harness.violations,
            ops=harness.operations,
            seconds=seconds,
            operations=harness.operation_counts(),
            goals=harness.goals,
            checked=harness.checks(),
            case=self._case() if harness.violations else None,
            problem=problem,
        )

    def result(self) -> TraceResult:
        """The figures up to now."""
        observer, setting, replay = self._subject.observer, self.setting, self.replay
        virtual_seconds = self._subject.scheduler.clock.now_s
        return TraceResult(
            requests=len(self.trace),
            finished=observer.finished,
            rejected=replay.rejections.total(),
            rejections=dict(replay.rejections),
            stopped=replay.stopped,
            steps=observer.iterations,
            virtual_seconds=virtual_seconds,
            metrics=observer.scheduler_figures(),
            percentiles=observer.records.percentiles(),
            goodput=observer.records.goodput(setting.slo, virtual_seconds),
            throughput=observer.records.throughput(virtual_seconds),
            kv_use=observer.kv_use(),
            tiers=observer.tier_figures(),
            attention_mode="full",
            cache_dtype=setting.cache_dtype,
            cost=setting.cost,
        )

    def _case(self) -> Case:
        """Do it again, up to the violation, and keep the operations."""
        wanted = self._harness.violations[0].op + 1
        operations: list[Operation] = []
        subject = self._fresh_subject()
        harness = SchedulingHarness(subject, checked=False)

        def perform(operation: Operation) -> Outcome:
            if len(operations) == wanted:
                raise _EnoughError
            operations.append(operation)
            return harness.perform(operation)

        with suppress(_EnoughError):
            self._replay(subject, perform).run()
        return Case(
            subject.name,
            subject.configuration,
            operations,  # type: ignore[arg-type]
            violates=self._harness.violations[0].property,
        )


def arm_name(policy: str, arm: str) -> str:
    """How a policy's replay over one memory hierarchy is called."""
    return f"{policy} + {arm}" if arm else policy


def _first_line(policy: Callable[[], object]) -> str:
    """What the policy's class says about itself, in short."""
    return (inspect.getdoc(policy) or "").partition("\n")[0]
