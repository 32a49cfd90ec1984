"""A cache that is told what to do: what a scheduler plays around it, the same for any.

It keeps requests and steps, finds whom an operation means, and answers.  What is left to the
adapter of a particular cache is to place a request, to release it, to grow it, to compute a step,
and to tell of the blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from kvproof.invariants.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestResumed,
    StepItem,
    StepLaunched,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Evict,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_LAUNCHED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.subject import Configuration
from kvproof.invariants.view import Standing

by_number = attrgetter("number")


class LiveRequest(ABC):
    """A live request: the cache's own object, and how far steps have come with it."""

    __slots__ = ("computed", "epoch", "number", "request", "running")

    def __init__(self, number: int, request: Any) -> None:
        self.number = number
        """Its rank of admission."""
        self.request = request
        self.running = False
        self.computed = 0
        """Tokens that retired steps computed, or that a hit brought."""
        self.epoch = 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens that it has."""


Live = TypeVar("Live", bound=LiveRequest)


def pick(candidates: Sequence[Live], index: int) -> Live | None:
    """The k-th candidate, modulo their number."""
    return candidates[index % len(candidates)] if candidates else None


class ToldCache(ABC, Generic[Live]):
    """Base of such a subject; ``_handlers`` may be added to."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.live: dict[int, Live] = {}
        """Live requests by number; numbers count admissions."""
        self.running: list[Live] = []
        """By number, which is the order of first admission."""
        self.preempted: list[Live] = []
        self.steps: deque[StepLaunched] = deque()
        """In flight, oldest first."""
        self._events: list[Event] = []
        self._next_request = 0
        self._next_step = 0
        self._handlers: dict[type[Operation], Callable[[Any], Outcome]] = {
            Admit: self._admit,
            Grow: self._grow,
            Finish: self._finish,
            Abort: self._abort,
            Evict: self._evict,
            Reset: self._reset,
            Preempt: self._preempt,
            Resume: self._resume,
            Launch: self._launch,
            Retire: self._retire,
        }

    def apply(self, operation: Operation) -> Outcome:
        handler = self._handlers.get(operation.__class__)
        return handler(operation) if handler else SKIPPED

    def drain_events(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    # -- what the cache in question does -----------------------------------------------------------

    def _needs(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.configuration.block_size)

    @abstractmethod
    def _new_live(self, number: int, operation: Admit) -> Live: ...

    @abstractmethod
    def _place(self, live: Live) -> bool:
        """Look up the prefix and take blocks for the rest; False if they are not there."""

    @abstractmethod
    def _release(self, live: Live) -> None:
        """Give all its blocks back."""

    def _may_leave(self, live: Live) -> bool:
        """Whether a running request may be given back now."""
        return True

    @abstractmethod
    def _grow(self, operation: Grow) -> Outcome: ...

    @abstractmethod
    def _preempt(self, operation: Preempt) -> Outcome: ...

    @abstractmethod
    def _evict(self, operation: Evict) -> Outcome: ...

    @abstractmethod
    def _reset(self, operation: Reset) -> Outcome: ...

    @abstractmethod
    def _items(self, operation: Launch) -> list[StepItem]:
        """What a step computes that is launched now."""

    @abstractmethod
    def _retire(self, operation: Retire) -> Outcome: ...

    # -- what a scheduler does around it -----------------------------------------------------------

    def _admit(self, operation: Admit) -> Outcome:
        length = prompt_length(operation.prompt)
        refusal = self._refusal(length)
        if refusal:
            return Outcome("refused", refusal)
        live = self._new_live(self._next_request, operation)
        if not self._place(live):
            return Outcome("refused", NO_FREE_BLOCKS)
        self._next_request += 1
        self.live[live.number] = live
        self.running.append(live)
        self._events.append(RequestAdmitted(live.number, length, live.computed))
        return Outcome("done", None, live.number, live.computed)

    def _resume(self, operation: Resume) -> Outcome:
        live = pick(self.preempted, operation.request)
        if live is None:
            return SKIPPED
        refusal = self._refusal(live.length)
        if refusal is None and not self._place(live):
            refusal = NO_FREE_BLOCKS
        if refusal:
            return Outcome("refused", refusal, live.number)
        self.preempted.remove(live)
        insort(self.running, live, key=by_number)
        self._events.append(RequestResumed(live.number, live.computed))
        return Outcome("done", None, live.number, live.computed)

    def _refusal(self, length: int) -> str | None:
        """What a scheduler checks before it asks the cache."""
        if len(self.running) >= self.configuration.requests:
            return TOO_MANY_REQUESTS
        if self._needs(length) > self.configuration.blocks:
            return LARGER_THAN_POOL
        return None

    def _finish(self, operation: Finish) -> Outcome:
        live = pick(self.running, operation.request)
        return SKIPPED if live is None else self._end(live, RequestFinished(live.number))

    def _abort(self, operation: Abort) -> Outcome:
        live = pick(list(self.live.values()), operation.request)
        return SKIPPED if live is None else self._end(live, RequestAborted(live.number))

    def _end(self, live: Live, event: Event) -> Outcome:
        if not live.running:
            self.preempted.remove(live)
        elif not self._may_leave(live):
            return Outcome("refused", NOT_LAUNCHED, live.number)
        else:
            self._release(live)
            self.running.remove(live)
        del self.live[live.number]
        self._events.append(event)
        return Outcome("done", None, live.number)

    def _launch(self, operation: Launch) -> Outcome:
        if len(self.steps) >= self.configuration.run_ahead:
            return Outcome("refused", RUN_AHEAD_LIMIT)
        items = self._items(operation)
        if not items:
            return Outcome("refused", NOTHING_TO_RUN)
        step = StepLaunched(self._next_step, items)
        self._next_step += 1
        self.steps.append(step)
        self._events.append(step)
        return Outcome("done", count=sum(item.end - item.start for item in items))


class ToldCacheView:
    """What of a view is the scheduler's: requests, their progress, and steps."""

    def __init__(self, subject: Any) -> None:
        self._subject = subject

    def requests(self) -> Sequence[int]:
        return list(self._subject.live)

    def standing(self, request: int) -> Standing:
        found = self._subject.live[request]
        rows = len(self._subject.table(found))
        return "running" if found.running else "preempted", found.length, found.computed, (rows,)

    def steps_in_flight(self) -> Sequence[int]:
        return [step.step for step in self._subject.steps]

    def metrics(self) -> Mapping[str, int]:
        return {}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return {}
