"""Replays a request trace: drives a scheduler in virtual time.

Requests arrive when the clock reaches their time, also while steps are in flight.  One round:

1. iterations are scheduled, as many as may be in flight, until one launches nothing;
2. requests that arrive before the oldest step in flight ends are delivered, each at its time;
3. that step is retired, which takes the clock to its end.

When no request is live, the clock jumps to the next arrival; copies to lower tiers arrive on its
way.  Which requests run is up to the scheduler and its policy; the driver knows neither these nor
any check: the caller hands in ``perform``, which applies an operation and may check what it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.eviction import EvictionPolicyFactory
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.fuzz.traces.observer import Observer
from kvproof.invariants.operations import Arrive, Operation, Retire, Schedule, Wait
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import SchedulerEvent
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.scheduler import PolicyFactory, SchedulerSubject

Perform = Callable[[Operation], Outcome]

MAX_TOKENS = 1 << 22
"""The most that an arrival can declare."""
IDLE_ITERATIONS = 64
"""Iterations in a row that may launch nothing although requests are live and no step is in flight.

Where checks are on, the property LIVE ends the replay before.
"""

_SCHEDULE = Schedule()
_RETIRE = Retire()
_NEVER = 1 << 62


class ObservedSubject(SchedulerSubject):
    """A scheduler whose events an observer hears too, before any checker does."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        policy: PolicyFactory,
        observer: Observer,
        name: str = "scheduler",
        eviction: EvictionPolicyFactory | None = None,
        clock: VirtualClock | None = None,
        cost: CostModel | None = None,
    ) -> None:
        super().__init__(
            configuration, policy=policy, name=name, eviction=eviction, clock=clock, cost=cost
        )
        self.observer = observer
        observer.attach(self.scheduler)
        self.scheduler.on_finished = observer.on_finished

    def connect(self, perform: Perform, hear: Callable[[SchedulerEvent], None]) -> None:
        def heard(event: SchedulerEvent) -> None:
            self.observer.hear(event)
            hear(event)

        super().connect(perform, heard)


class Replay:
    """One replay.  ``run`` does it; the observer has the figures, also after an error."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        subject: ObservedSubject,
        perform: Perform,
        *,
        max_tokens: int = 0,
    ) -> None:
        """``perform`` applies an operation to ``subject``; what it raises ends the run.

        ``max_tokens``: output tokens that each request declares, or its real ones if those are
        more.
        """
        self.rejections: Counter[str] = Counter()
        """Requests that were refused at their arrival, by reason."""
        self.stopped: str | None = None
        """Why the replay ended before the trace did."""
        self._trace = trace
        self._perform = perform
        self._max_tokens = max_tokens
        self._scheduler = subject.scheduler
        self._clock = subject.scheduler.clock
        self._observer = subject.observer
        self._arrival_ns = subject.observer.records.arrival_ns
        self._run_ahead = subject.configuration.run_ahead
        self._arrived = 0
        self._in_flight = 0
        """Steps."""
        self._settled = False
        """Scheduling again would launch nothing before something happens."""
        self._idle = 0
        """Iterations in a row that launched nothing while no step was in flight."""

    def run(self) -> None:
        """Replay to the end of the trace, or until the scheduler does not go on."""
        while self.stopped is None and self._round():
            pass

    def _round(self) -> bool:
        """Do one thing after all that can be scheduled; False when nothing is left to do."""
        self._schedule()
        arrival_ns = self._next_arrival_ns()
        if self._in_flight:
            if arrival_ns <= self._step_end_ns():
                self._arrive(arrival_ns)
            else:
                self._retire()
        elif self._scheduler.jobs:
            self._wait()
        elif arrival_ns < _NEVER:
            self._arrive(arrival_ns)
        else:
            self._observer.before_time_passes()
            return False
        return True

    def _schedule(self) -> None:
        while self._in_flight < self._run_ahead and not self._settled and self._scheduler.jobs:
            outcome = self._perform(_SCHEDULE)
            if outcome.status != "done":
                self.stopped = f"schedule is {outcome.status}: {outcome.reason}"
            if not outcome.count:
                self._settled = True
                break
            self._observer.launched(outcome.count)
            self._in_flight += 1
            self._idle = 0

    def _next_arrival_ns(self) -> int:
        return self._arrival_ns[self._arrived] if self._arrived < len(self._trace) else _NEVER

    def _step_end_ns(self) -> int:
        """When the oldest step in flight ends."""
        finish_ns = self._scheduler.next_finish_ns
        assert finish_ns is not None, "a step is in flight"
        return finish_ns

    def _arrive(self, arrival_ns: int) -> None:
        self._let_time_pass(arrival_ns)
        while self._next_arrival_ns() <= arrival_ns:
            number = self._arrived
            self._arrived += 1
            self._deliver(number)
        self._settled = False

    def _deliver(self, number: int) -> None:
        request = self._trace[number]
        output = min(request.output_tokens, MAX_TOKENS)
        most = min(max(output, self._max_tokens), MAX_TOKENS)
        arrival = Arrive(request.prompt, output=output, max_tokens=most, at_ns=self._clock.now_ns)
        outcome = self._perform(arrival)
        if outcome.status == "done":
            self._observer.accepted(number)
        else:
            self.rejections[outcome.reason or outcome.status] += 1

    def _retire(self) -> None:
        self._observer.before_time_passes()
        outcome = self._perform(_RETIRE)
        if outcome.status != "done":
            self.stopped = f"retire is {outcome.status}: {outcome.reason}"
        self._in_flight -= 1
        self._settled = False

    def _wait(self) -> None:
        """Nothing runs although requests are live: perhaps in the next iteration.

        An iteration that launches nothing lets time pass, up to the arrival of the next copy.
        """
        self._idle = 0 if self._scheduler.next_delivery_ns is not None else self._idle + 1
        self._settled = False
        if self._idle >= IDLE_ITERATIONS:
            live = len(self._scheduler.jobs)
            self.stopped = f"{live} requests are live, but {self._idle} iterations ran nothing"

    def _let_time_pass(self, until_ns: int) -> None:
        self._observer.before_time_passes()
        if self._scheduler.offloader is None:
            self._clock.advance_to(until_ns)
        elif until_ns > self._clock.now_ns:
            self._perform(Wait(until_ns - self._clock.now_ns))
