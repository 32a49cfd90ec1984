"""kvproof's own scheduler over its own engine, with a policy: what ``--policy`` checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.eviction import EvictionPolicyFactory
from kvproof.engine.policy import Plan, SchedulerPolicy, SchedulerState
from kvproof.engine.scheduler import Scheduler
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    SCHEDULER_KINDS,
    Abort,
    Arrive,
    Operation,
    Retire,
    Run,
    Schedule,
    Wait,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.scheduling.vocabulary import Promises, QueueState, SchedulerEvent
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject, EngineView

PolicyFactory = Callable[[], SchedulerPolicy]


class _Unmade:
    """Stands for a policy whose constructor raised, though an earlier one of it did not."""

    def __init__(self, policy: PolicyFactory, error: BaseException) -> None:
        self._name = getattr(policy, "__name__", "the policy")
        self._error = error

    def plan(self, state: SchedulerState) -> Plan:
        raise RuntimeError(
            f"{self._name}() failed, though an earlier call did not: {self._error!r}"
        ) from self._error


def _made(policy: PolicyFactory) -> SchedulerPolicy:
    try:
        return policy()
    except (Exception, SystemExit) as error:
        return _Unmade(policy, error)


class SchedulerStateView:
    """The scheduler's state as it is, nothing recomputed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def live(self) -> Sequence[int]:
        return list(self._scheduler.jobs)

    def standing(self, request: int) -> tuple[QueueState, int, int]:
        job = self._scheduler.jobs[request]
        return job.state, job.outputs, job.preemptions

    def cache_request(self, request: int) -> int | None:
        job = self._scheduler.jobs[request]
        return job.cache.id if job.cache else None

    def metrics(self) -> Mapping[str, int]:
        return self._scheduler.metrics()

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return self._scheduler.request_metrics(request)


class SchedulerSubject:
    """A scheduler and the cache that it drives.

    ``connect`` puts a checker between the two, and makes the scheduler tell its events.
    """

    capabilities = frozenset(SCHEDULER_KINDS) - {"reset"}
    unjudged: frozenset[str] = frozenset()
    """Ids of checks that it never gives anything to judge: their silence is no reason to doubt."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        policy: PolicyFactory,
        name: str = "scheduler",
        eviction: EvictionPolicyFactory | None = None,
        clock: VirtualClock | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.name = name
        self.configuration = configuration
        self.cache = EngineSubject(configuration, eviction=eviction)
        self.semantics = self.cache.semantics
        instance = _made(policy)
        self.promises: Promises = getattr(instance, "promises", Promises())
        self._perform: Callable[[Operation], Outcome] = self.cache.apply
        self._hear: Callable[[SchedulerEvent], None] = lambda event: None
        self._events: list[Event] = []
        try:
            self.scheduler = Scheduler(
                self.cache,
                instance,
                perform=lambda operation: self._perform(operation),
                emit=self._emit,
                clock=clock,
                cost=cost,
            )
        except ValueError as error:  # limits that contradict each other, in a case of somebody's
            raise InputError(str(error)) from None
        self.state_view = SchedulerStateView(self.scheduler)
        self._handlers: dict[type[Operation], Callable[..., Outcome]] = {
            Arrive: self.scheduler.arrive,
            Schedule: lambda operation: self.scheduler.schedule(),
            Run: lambda operation: self.scheduler.run(operation.iterations),
            Retire: lambda operation: self.scheduler.retire(),
            Abort: self._abort,
            Wait: lambda operation: self.scheduler.wait(operation.ns),
        }

    def connect(
        self,
        perform: Callable[[Operation], Outcome],
        hear: Callable[[SchedulerEvent], None],
    ) -> None:
        """From now on the cache is driven through ``perform``, and ``hear`` is told each event."""
        self._perform, self._hear = perform, hear

    def _emit(self, event: SchedulerEvent) -> None:
        self._events.append(event)
        self._hear(event)

    def apply(self, operation: Operation) -> Outcome:
        return self._handlers[operation.__class__](operation)

    def _abort(self, operation: Abort) -> Outcome:
        live = list(self.scheduler.jobs)
        return self.scheduler.abort(live[operation.request % len(live)]) if live else SKIPPED

    def drain_events(self) -> Sequence[Event]:
        drained, self._events = self._events, []
        return drained

    def view(self) -> EngineView:
        return self.cache.view()
