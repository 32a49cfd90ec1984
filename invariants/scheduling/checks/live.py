"""LIVE: every request that is accepted is served, and none is accepted that cannot be.

Verifies: an arrival is refused exactly when the request could never fit, at once; with nothing in
flight, no more than a few iterations in a row run nothing, there is no excuse; who is made to wait
for KV waits for a copy in flight, whose end METER sees, or which ends within a bound that is
promised; no request is preempted over and over while everything returns to the same state; once
arrivals and aborts stop, somebody gets an output token within as many iterations as it would take
to serve all live requests one token after the other.  Output tokens are finite, so all of them
finish.

Does not verify: fairness (STARVE, FCFS); how much is recomputed while somebody makes progress;
runs that stop before the bound is reached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.operations import Arrive, Operation
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL, Outcome
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Deferred,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
)
from kvproof.invariants.verdict import Violation, counted

GRACE = 8
"""Iterations in a row that may run nothing, whatever a policy waits for."""
RECURRENCES = 3
"""Preemptions of one request that leave everything as it was after an earlier one.

A policy's own state may let it break out of a loop once or twice.
"""
HISTORY = 6
"""Iterations with preemptions that an explanation tells."""


def _in_flight(books: SchedulingBooks) -> bool:
    return bool(books.flights)


def _kv_on_its_way(books: SchedulingBooks) -> bool:
    waiting = [books.waiting[number] for number in books.deferred if number in books.waiting]
    return any(books.on_its_way(request) for request in waiting)


def _copied(books: SchedulingBooks) -> bool:
    return books.only_copied()


def _loading(books: SchedulingBooks) -> bool:
    return any(map(books.cache.awaits_load, books.cache.running))


EXCUSES: tuple[tuple[str, Callable[[SchedulingBooks], bool]], ...] = (
    (
        "a step is in flight: its samples, or the blocks that it fences, may be waited for",
        _in_flight,
    ),
    ("KV of a waiting request is on its way: it may be waited for", _kv_on_its_way),
    ("a copy in flight holds blocks that nobody else holds: they will be free", _copied),
    ("a copy brings KV into a request's blocks: it may be waited for", _loading),
)
"""All that excuses an iteration in which nothing is run, each with its proof."""

Recurrence = tuple[int, frozenset[tuple[int, str, int]]]
"""A victim, and (request, state, scheduled tokens) of all that were ever admitted."""


class Live(SchedulingCheck):
    """Liveness."""

    claims = (
        Claim(
            "A request that could never fit is refused at once, and others proceed; one that could "
            "is never refused.",
            "bug B134; survey K17",
        ),
        Claim(
            "While requests are live, something runs: no two requests wait for each other's "
            "blocks.",
            "bugs B140, B144, B155; survey K16, K18",
        ),
        Claim(
            "A request is made to wait for KV only while that is on its way to the device, and "
            "what is on its way arrives.",
            "survey T09, E11; bug B95",
        ),
        Claim(
            "A request is not preempted and resumed for ever without anybody's progress.",
            "bugs B138, B139; survey K15, K16",
        ),
        Claim(
            "With no further arrivals, every live request finishes within a bound.",
            "chapter, continuous batching: waiting request may enter; bug B135; survey E10, E15",
        ),
    )
    positive_control = "nobody-is-preempted-for-want-of-blocks"
    concludes_on = (Arrive,)

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        super().__init__(books, view, report)
        self._idle = 0
        """Iterations in a row that ran nothing, without excuse."""
        self._iterations = 0
        """That ran something, since the last arrival, abort or output token …"""
        self._bound: int | None = None
        """… and how many may be; None until the first of them."""
        self._displacements: deque[Scheduled] = deque(maxlen=HISTORY)
        """Iterations with preemptions since anybody's last output token."""
        self._seen: Counter[Recurrence] = Counter()
        self._ages: dict[int, int] = {}
        """Of copies in flight: iterations since each was started."""

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            RequestArrived: self._changed,
            RequestCancelled: self._changed,
            RunningReset: self._changed,
            Scheduled: self._scheduled,
            Completed: self._completed,
            Deferred: self._deferred,
        }

    def _changed(self, event: Event) -> None:
        self._idle = self._iterations = 0
        self._bound = None
        self._progressed()

    def _progressed(self) -> None:
        if self._displacements:
            self._displacements.clear()
            self._seen.clear()

    def _completed(self, event: Completed) -> None:
        if event.sampled:
            self._progressed()
            self._iterations, self._bound = 0, None

    def _scheduled(self, event: Scheduled) -> None:
        self.checked += 1
        if event.preempted or event.swapped:
            self._recurs(event)
        if self.books.promises.copies_end_in is not None:
            self._copies_end(self.books.promises.copies_end_in)
        if event.step is not None:
            self._idle = 0
            self._drains()
        elif self.books.live and not any(excuses(self.books) for _, excuses in EXCUSES):
            self._stands_still()

    # -- waiting for KV ---------------------------------------------------------------------------

    def _deferred(self, event: Deferred) -> None:
        books = self.books
        for number in event.requests:
            self.checked += 1
            request = books.waiting.get(number)
            if request is None:
                self.fail(f"request {number} is deferred, but does not wait", request=number)
            elif not books.on_its_way(request):
                self.fail(
                    f"request {number} is deferred, but no copy in flight brings the first block "
                    "of its prompt that the device lacks",
                    request=number,
                )

    def _copies_end(self, bound: int) -> None:
        tiers, ages = self.books.cache.tiers, self._ages
        in_flight = () if tiers is None else tiers.in_flight
        self._ages = {number: ages.get(number, 0) + 1 for number in in_flight}
        late = next((number for number, age in self._ages.items() if age > bound), None)
        if late is not None:
            self.fail(f"transfer {late} is in flight for {bound} iterations, and does not end")

    # -- stalls ----------------------------------------------------------------------------------

    def _stands_still(self) -> None:
        self._idle += 1
        if self._idle < GRACE:
            return
        self._idle = 0
        self.fail(
            f"nothing was run in {GRACE} iterations, though {self._alive()} live and no step is in "
            f"flight: {self._why()}"
        )

    def _alive(self) -> str:
        count = len(self.books.live)
        return f"{counted(count, 'request')} {'is' if count == 1 else 'are'}"

    def _why(self) -> str:
        runnable = self._runnable()
        if runnable is not None:
            return runnable
        stuck = [r for r in self.books.running.values() if r.pending > 0]
        if stuck:
            return self._hold_and_wait(stuck)
        queues = f"{len(self.books.waiting)} wait, {len(self.books.displaced)} are preempted"
        return f"none of them fits ({queues}), though nobody holds what they lack"

    def _runnable(self) -> str | None:
        """Which request could have been run, and why it fits."""
        books = self.books
        for request in books.running.values():
            tokens = books.least_tokens(request)
            if request.pending > 0 and tokens <= self.limits.token_budget:
                needed, free = books.growth(request), books.free_blocks()
                if needed <= free:
                    return (
                        f"request {request.id} runs, has {request.pending} tokens pending and "
                        f"needs {needed} of {free} free blocks"
                    )
        if len(books.running) >= self.configuration.requests:
            return None
        for request in (*books.displaced.values(), *books.waiting.values()):
            fits = self._fits(request)
            if fits is not None:
                return fits
        return None

    def _fits(self, request: LiveRequest) -> str | None:
        """Whether it could be admitted, even without a prefix hit; why."""
        books, watermark = self.books, self.limits.watermark_blocks
        free = books.free_blocks()
        needed = books.rows(request.known)
        chunked = self.limits.chunked_prefill
        if needed > free - watermark or not (chunked or request.known <= self.limits.token_budget):
            return None
        beyond = f" beyond the watermark of {watermark}" if watermark else ""
        budget = self.limits.token_budget
        chunks = f", in chunks of at most {budget} (the token budget)"
        return (
            f"request {request.id}, {request.state}, needs {counted(needed, 'block')} for its "
            f"{counted(request.known, 'token')}, of {free} free{beyond}: it could have been run"
            f"{chunks if request.known > budget else ''}"
        )

    def _hold_and_wait(self, stuck: list[LiveRequest]) -> str:
        books = self.books
        holders = [
            f"request {request.id} holds {books.held_blocks(request)} of the "
            f"{books.rows(request.known)} blocks that its {request.known} tokens need"
            for request in stuck[:4]
        ]
        free = books.free_blocks()
        left = "none is free" if not free else f"{free} are free"
        end = "each waits for the others" if len(stuck) > 1 else "it waits for itself"
        return f"{', '.join(holders)}; {left}: {end}, and nobody is preempted"

    # -- preemption over and over ------------------------------------------------------------------

    def _recurs(self, event: Scheduled) -> None:
        """Has this preemption left everything as an earlier one did?

        Nothing is compared before the second preemption without anybody's output token between:
        under mere pressure tokens are sampled all the time.
        """
        self._displacements.append(event)
        if len(self._displacements) < 2:
            return
        books = self.books
        standing = frozenset(
            [
                (request.id, request.state, request.scheduled)
                for queue in (books.running, books.displaced)
                for request in queue.values()
            ]
        )
        for victim in (*event.preempted, *event.swapped):
            key = (victim, standing)
            self._seen[key] += 1
            if self._seen[key] >= RECURRENCES:
                self._seen.clear()
                self._ping_pong(victim)
                return

    def _ping_pong(self, victim: int) -> None:
        told = [
            f"iteration {event.iteration} preempts "
            f"{_requests((*event.preempted, *event.swapped))} and runs "
            f"{_requests([part.request for part in event.parts])}"
            for event in self._displacements
        ]
        self.fail(
            f"request {victim} is preempted over and over, and each time all requests stand as "
            f"they did before, with no output token in between: {'; '.join(told)}",
            request=victim,
        )

    # -- draining ----------------------------------------------------------------------------------

    def _drains(self) -> None:
        """One token an iteration, one request after the other, is the slowest service."""
        books = self.books
        if not books.live:
            return
        if self._bound is None:
            steps_beside = (self.configuration.run_ahead + 2) * (len(books.live) + 1)
            self._bound = books.owed_tokens + steps_beside + GRACE
        self._iterations += 1
        if self._iterations > self._bound:
            first = next(iter(books.live.values()))
            self.fail(
                f"{self._bound} iterations ran something since the last arrival, abort or output "
                f"token, enough to serve all {len(books.live)} live requests one by one, but "
                f"nobody got another token: request {first.id}, {first.state}, has {first.sampled} "
                "of "
                f"{first.output_tokens} output tokens after {first.preemptions} preemptions",
                request=first.id,
            )
            self._iterations = 0

    # -- arrivals ----------------------------------------------------------------------------------

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        assert isinstance(operation, Arrive)
        if outcome.status == "skipped":
            return
        self.checked += 1
        prompt = prompt_length(operation.prompt)
        output = max(operation.output, operation.max_tokens)
        reasons = self._never_fits(prompt, output)
        if outcome.status == "done" and reasons:
            self.fail(
                f"a request of {prompt} prompt tokens and at most {output} output tokens was "
                f"accepted, but can never be served: {' and '.join(reasons.values())}",
                request=outcome.request,
            )
        elif outcome.status == "refused" and outcome.reason not in reasons:
            known = " and ".join(reasons.values()) or "it fits an empty pool"
            self.fail(
                f"a request of {prompt} prompt tokens and at most {output} output tokens was "
                f"refused ({outcome.reason}), but {known}"
            )

    def _never_fits(self, prompt: int, output: int) -> dict[str, str]:
        """Why a request can never be served, by the reason to be given."""
        limits, reasons = self.limits, {}
        needed = self.books.rows(prompt + output - 1)
        usable = self.configuration.blocks - limits.watermark_blocks
        if needed > usable:
            reasons[LARGER_THAN_POOL] = f"it needs {needed} blocks, and {usable} can be had"
        if prompt + output > limits.max_model_tokens:
            reasons[LARGER_THAN_MODEL] = f"the model takes {limits.max_model_tokens} tokens"
        return reasons


def _requests(numbers: tuple[int, ...] | list[int]) -> str:
    named = ", ".join(map(str, numbers[:4])) or "nobody"
    return named + (" …" if len(numbers) > 4 else "")
