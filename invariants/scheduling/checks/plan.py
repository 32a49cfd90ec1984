"""PLAN: each plan keeps the contract, and is applied as it reads.

Verifies: that no plan is rejected and no policy fails; that an iteration runs live, ready requests
once each, for no more tokens than are pending, and none that it preempts; that the requests it
admits, resumes, preempts or swaps out are in the queues from which that is possible; that a reset
of what runs preempts all of it; that it admits nobody who waits for KV that is on its way, or
behind one that does; that without chunked prefill each prompt is computed in one iteration.

Does not verify: whether a plan is a good one; the limits of an iteration (BUDGET); the order in
which a policy serves its queues (FCFS, PRIORITY).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import Item
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    PlanRejected,
    QueueState,
    RunningReset,
    Scheduled,
)
from kvproof.invariants.verdict import Violation


class Plan(SchedulingCheck):
    """The contract of plans."""

    claims = (
        Claim(
            "A plan names live requests that are ready, once each, for what they have pending.",
            "survey Q02, Q18, Q23",
        ),
        Claim("A request that an iteration preempts does not run in it.", "bug B65; survey K14"),
        Claim(
            "Nobody whose KV is on its way is admitted before it has come, and nobody overtakes "
            "them.",
            "survey T09, E11, Q12",
        ),
        Claim("Without chunked prefill, a prompt is computed in one iteration.", "survey Q08"),
    )
    positive_control = "preempted-request-still-runs"

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        super().__init__(books, view, report)
        self._counted: dict[int, int] = {}
        """Cached tokens of requests that the policy asked about, in this iteration."""

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            PlanRejected: self._rejected,
            Scheduled: self._scheduled,
            RunningReset: self._reset,
        }

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {Scheduled: self._computed}
        if not self.limits.chunked_prefill:
            handlers[BlocksCounted] = self._blocks_counted
        return handlers

    def _rejected(self, event: PlanRejected) -> None:
        self.checked += 1
        self.fail(f"{event.kind}: {event.message}")

    # -- which requests, from the queues as they stood before ------------------------------------

    def _scheduled(self, event: Scheduled) -> None:
        self.checked += 1
        for number in event.preempted:
            self._must_run(number, "preempts")
        for number in event.swapped:
            self._must_run(number, "swaps out")
            request = self.books.live.get(number)
            if request is not None and request.launched:
                self.fail(
                    f"iteration {event.iteration} swaps out request {number} while a step in "
                    "flight carries it: its bytes are not final",
                    request=number,
                )
        gone = self._once((*event.preempted, *event.swapped), "takes blocks back from")
        named = self._once([part.request for part in event.parts], "runs")
        for number in named:
            if number in gone:
                self.fail(
                    f"iteration {event.iteration} preempts request {number} and runs it",
                    request=number,
                )
        for number in event.admitted:
            self._must_be_shown(event, number)
        self._compare_queues(event, named)

    def _reset(self, event: RunningReset) -> None:
        """All that run, and nobody else."""
        self.checked += 1
        for number in self._once(event.preempted, "takes blocks back from"):
            self._must_run(number, "preempts")
        left = [number for number in self.books.running if number not in event.preempted]
        if left:
            self.fail(f"a reset left request {left[0]} running", request=left[0])

    def _must_run(self, number: int, what: str) -> None:
        request = self.books.live.get(number)
        state = "not live" if request is None else request.state
        if state != "running":
            self.fail(
                f"an iteration {what} request {number}, which is {state}, not running",
                request=number,
            )

    def _must_be_shown(self, event: Scheduled, number: int) -> None:
        request = self.books.live.get(number)
        if request is not None and self.books.held_back(request):
            first = self.books.deferred[0]
            self.fail(
                f"iteration {event.iteration} admits request {number}, while KV is on its way to "
                + (f"request {first}, which arrived before" if first < number else "it"),
                request=number,
            )

    def _once(self, numbers: Sequence[int], what: str) -> set[int]:
        """The requests named; each should be named once."""
        named = set(numbers)
        if len(named) < len(numbers):
            twice = next(number for number in numbers if numbers.count(number) > 1)
            self.fail(f"an iteration {what} request {twice} twice", request=twice)
        return named

    def _compare_queues(self, event: Scheduled, named: set[int]) -> None:
        """What is admitted and resumed is what is run, but was not running."""
        first: set[int] = set()
        again: set[int] = set()
        live = self.books.live
        for number in named:
            request = live.get(number)
            if request is None:
                self.fail(f"an iteration runs request {number}, which is not live", request=number)
            elif request.state != "running":
                (first if request.state == "waiting" else again).add(number)
        self._compare(event.admitted, first, "admitted", ("waiting",))
        self._compare(event.resumed, again, "resumed", ("preempted", "swapped"))

    def _compare(
        self, told: Sequence[int], expected: set[int], what: str, states: tuple[QueueState, ...]
    ) -> None:
        if len(told) == len(expected) and expected.issuperset(told):
            return
        for number in sorted(expected.symmetric_difference(told)):
            if number in expected:
                message = f"request {number} is run while {states[0]}, but not {what}"
            else:
                message = f"request {number} is said to be {what}, but is not run from there"
            self.fail(message, request=number)
            return
        self.fail(f"the requests said to be {what}, {list(told)}, are not named once each")

    # -- how many tokens of each ---------------------------------------------------------------

    def _blocks_counted(self, event: BlocksCounted) -> None:
        self._counted[event.request] = event.cached_tokens

    def _computed(self, event: Scheduled) -> None:
        for item in self.books.items:
            request = item.request
            if item.pending < 1:
                self.fail(
                    f"iteration {event.iteration} runs request {request.id}, which is not ready: "
                    f"{request.sampled} output tokens are sampled, and no token is pending",
                    request=request.id,
                )
            elif not 0 < item.tokens <= item.pending:
                self.fail(
                    f"iteration {event.iteration} computes {item.tokens} tokens of request "
                    f"{request.id}, of which {item.pending} are pending",
                    request=request.id,
                )
        if not self.limits.chunked_prefill:
            for item in self.books.items:
                self._whole(event, item)
            self._counted.clear()

    def _whole(self, event: Scheduled, item: Item) -> None:
        """All that is pending; but what was cached when the plan was made may be evicted since."""
        request = item.request
        # The latest output token of one that was preempted may be left for an iteration of its own.
        latest = min(1, request.sampled + request.sampling)
        if item.tokens >= item.pending - latest or item.start < self._counted.get(request.id, 0):
            return
        self.fail(
            f"iteration {event.iteration} computes {item.tokens} of the {item.pending} pending "
            f"tokens of request {request.id}, but prefill may not be chunked",
            request=request.id,
        )
