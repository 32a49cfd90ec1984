"""A scheduler of somebody else's that decides by itself: what is the same around any of them.

The adapter of a particular one plays its clients and its model, has what it does to its cache
overheard, and tells of iterations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvproof.engine.offloading import NO_COPIES as OF_NO_OFFLOAD
from kvproof.invariants.events import Event
from kvproof.invariants.operations import Arrive, Operation, Retire, Run, Schedule
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL, Outcome
from kvproof.invariants.scheduling.vocabulary import Promises, SchedulerEvent
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

CHOICES = 2
"""So many requests in a row differ in what is sampled for them, or nobody could tell whose an
output is; others go on alike, and share."""

STOP = 1 << 30
"""The token at which requests stop early: no prompt has it, and nothing else samples it."""

NO_COPIES = OF_NO_OFFLOAD | {"host_offload_bytes": 0, "host_promotions": 0}
"""Figures of copies, where there are none."""
NO_TIME = dict.fromkeys(("queue_time_ns", "prefill_time_ns", "decode_time_ns"), 0)
"""Figures of a request, where the clock stands still."""


class OverheardScheduler(SchedulerSubject, ABC):
    """Base of such a subject; what it has beside is the particular scheduler's."""

    cache: Any
    scheduler: Any
    state_view: Any

    def __init__(self, name: str, configuration: Configuration, promises: Promises) -> None:
        self.name = name
        self.configuration = configuration
        self.promises = promises
        self.admissions = self.resumptions = self.preemptions = self.batch_size = 0
        self._hear: Callable[[SchedulerEvent], None] = lambda event: None
        self._events: list[Event] = []
        self._arrivals = self._iterations = 0
        self._handlers = {
            Arrive: self._arrive,
            Schedule: lambda operation: self._schedule(),
            Run: self._run,
            Retire: lambda operation: self._retire(),
        }

    def _overhear(self, cache: Any) -> None:
        """The cache below: what it is told, it is told through a checker, once connected."""
        self.cache = cache
        self.semantics = cache.semantics
        self._perform: Callable[[Operation], Outcome] = cache.apply

    @abstractmethod
    def _arrive(self, operation: Arrive) -> Outcome: ...

    @abstractmethod
    def _schedule(self) -> Outcome: ...

    @abstractmethod
    def _retire(self) -> Outcome: ...

    @property
    @abstractmethod
    def _steps_in_flight(self) -> int: ...

    def _never_fits(self, operation: Arrive, prompt: int) -> str | None:
        """Why a front end refuses it; ``prompt``: its length."""
        output = max(operation.output, operation.max_tokens)
        limits = self.configuration.scheduling
        if self._blocks_for(prompt + output - 1) > self.configuration.blocks:
            return LARGER_THAN_POOL
        return LARGER_THAN_MODEL if prompt + output > limits.max_model_tokens else None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.configuration.block_size)

    def _run(self, operation: Run) -> Outcome:
        """As an engine's loop: samples are taken in when no further step may be scheduled."""
        for done in range(operation.iterations):
            outcome = self._schedule()
            if outcome.count and self._steps_in_flight < self.configuration.run_ahead:
                continue
            if self._retire().status == "skipped" and outcome.status != "done":
                return Outcome("done", count=done) if done else outcome
        return Outcome("done", count=operation.iterations)
