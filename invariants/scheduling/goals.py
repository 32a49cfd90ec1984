"""Must-hit situations of a scheduler: without them a pass would say little.

As in :mod:`kvproof.invariants.goals`: recognised from operations, outcomes, events and the books
alone, so that they mean the same for every scheduler and policy.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.goals import Goal
from kvproof.invariants.operations import Arrive, Operation
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL, Outcome
from kvproof.invariants.property import EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.request_books import Item
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Deferred,
    RequestCancelled,
    RunningReset,
    Scheduled,
)


def _goal(id: str, situation: str, *needs: str, rare: bool = False) -> Goal:
    return Goal(id, situation, frozenset(needs), rare)


SCHEDULING_GOALS: tuple[Goal, ...] = (
    _goal("admitted", "a waiting request is admitted", "arrive"),
    _goal("prefix-hit-at-admission", "a waiting request is admitted with a prefix hit", "arrive"),
    _goal(
        "prompt-in-chunks",
        "an iteration computes a part of a prompt",
        "arrive",
        "chunks",
        rare=True,
    ),
    _goal(
        "prefill-beside-decode",
        "an iteration computes a prompt of one request and an output token of another",
        "arrive",
        rare=True,
    ),
    _goal("budget-exhausted", "an iteration uses its whole token budget", "arrive"),
    _goal(
        "sequences-exhausted",
        "a request waits while as many run as are allowed",
        "arrive",
        rare=True,
    ),
    _goal("no-block-left", "after an iteration no block is free", "arrive", rare=True),
    _goal("waits-for-blocks", "the first waiting request waits for want of blocks", "arrive"),
    _goal(
        "waits-for-watermark",
        "the first waiting request would fit, but for the watermark",
        "arrive",
        rare=True,
    ),
    _goal(
        "slot-reused",
        "a request is admitted in the iteration after another one finished",
        "arrive",
        rare=True,
    ),
    _goal(
        "preempted-for-recompute", "a request is preempted, to be recomputed", "arrive", rare=True
    ),
    _goal("resumed", "a preempted request is resumed", "arrive", rare=True),
    _goal("swapped-out", "a request is swapped out", "arrive", "swaps", rare=True),
    _goal("swapped-in", "a swapped request comes back", "arrive", "swaps", rare=True),
    _goal(
        "preempted-while-in-flight",
        "a request is preempted while a step in flight carries it",
        "arrive",
        "fences",
        "runs-ahead",
        rare=True,
    ),
    _goal(
        "sampled-while-preempted",
        "a preempted request gets the output token of a step from before",
        "arrive",
        "fences",
        "runs-ahead",
        rare=True,
    ),
    _goal(
        "ran-ahead",
        "a request is run for the token that a step in flight is sampling",
        "arrive",
        "runs-ahead",
        rare=True,
    ),
    _goal(
        "finished-while-next-step-in-flight",
        "a request stops while a later step carries it already",
        "arrive",
        "fences",
        "runs-ahead",
        rare=True,
    ),
    _goal(
        "deferred-for-kv",
        "a waiting request is held back while KV of its prompt is on its way",
        "arrive",
        "wait",
        "tiers",
    ),
    _goal(
        "promoted-before-admission",
        "a request is admitted with a hit on KV that it was held back for",
        "arrive",
        "wait",
        "tiers",
        rare=True,
    ),
    _goal(
        "preempted-by-reset",
        "a reset of the prefix cache preempts requests that run",
        "arrive",
        "reset",
        rare=True,
    ),
    _goal(
        "sample-dropped-by-reset",
        "a reset drops what a step in flight samples",
        "arrive",
        "reset",
        rare=True,
    ),
    _goal(
        "waits-for-adapter",
        "the first waiting request waits, for its adapter is one too many",
        "arrive",
        "adapters",
        rare=True,
    ),
    _goal("finished", "a request gets its last output token", "arrive"),
    _goal("refused-for-ever", "a request that can never fit is refused", "arrive"),
    _goal("refused-by-model", "a request is longer than the model takes", "arrive", rare=True),
    _goal("aborted-waiting", "a request that was never admitted is aborted", "arrive", "abort"),
    _goal("aborted-running", "a running request is aborted", "arrive", "abort"),
    _goal(
        "aborted-preempted",
        "a preempted or swapped request is aborted",
        "arrive",
        "abort",
        rare=True,
    ),
)
"""All goals of the scheduler's level; those that depend on what a policy likes to do are rare."""


class SchedulingGoals:
    """Counts how often each goal was met.  Shaped like a check, but judges nothing."""

    def __init__(self, books: SchedulingBooks) -> None:
        self.hits = dict.fromkeys((goal.id for goal in SCHEDULING_GOALS), 0)
        self._books = books
        self._finished = False
        """Whether a request finished since the latest iteration."""
        self._held_back: dict[int, int] = {}
        """Requests that were deferred, and what of their prompts was findable then, in rows."""

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            Scheduled: self._scheduling,
            Completed: self._completing,
            RequestCancelled: self._cancelling,
            RunningReset: self._resetting,
        }

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            Scheduled: self._scheduled,
            Completed: self._completed,
            Deferred: self._deferred,
        }

    # -- iterations ------------------------------------------------------------------------------

    def _scheduling(self, event: Scheduled) -> None:
        hits, live = self.hits, self._books.live
        hits["preempted-for-recompute"] += bool(event.preempted)
        hits["swapped-out"] += bool(event.swapped)
        for number in event.preempted:
            request = live.get(number)
            hits["preempted-while-in-flight"] += request is not None and request.launched > 0
        for number in event.resumed:
            request = live.get(number)
            swapped = request is not None and request.state == "swapped"
            hits["swapped-in" if swapped else "resumed"] += 1

    def _resetting(self, event: RunningReset) -> None:
        live = self._books.live
        known = [live[number] for number in event.preempted if number in live]
        self.hits["preempted-by-reset"] += bool(known)
        self.hits["sample-dropped-by-reset"] += any(request.sampling for request in known)

    def _scheduled(self, event: Scheduled) -> None:
        hits, books = self.hits, self._books
        if event.admitted:
            hits["admitted"] += 1
            hits["slot-reused"] += self._finished
            hits["prefix-hit-at-admission"] += any(
                request.cached_tokens > 0 for request in books.entered if not request.preemptions
            )
            if self._held_back:
                self._promoted(event)
        self._finished = False
        if event.parts:
            self._parts(books.items)
        if not books.free_blocks():
            hits["no-block-left"] += 1
        if books.waiting:
            self._queue()

    def _deferred(self, event: Deferred) -> None:
        hits, books = self.hits, self._books
        hits["deferred-for-kv"] += bool(event.requests)
        for number in event.requests:
            request = books.waiting.get(number)
            if request is None or number in self._held_back:
                continue
            tags = request.prompt()
            if tags is not None:
                self._held_back[number] = books.cache.longest_hit(tags)

    def _promoted(self, event: Scheduled) -> None:
        for number in event.admitted:
            rows, request = self._held_back.pop(number, None), self._books.live.get(number)
            if rows is not None and request is not None:
                found = request.cached_tokens // self._books.block_size
                self.hits["promoted-before-admission"] += found > rows

    def _parts(self, items: list[Item]) -> None:
        hits = self.hits
        prefills = [item for item in items if item.start < item.request.prompt_tokens]
        if prefills:
            hits["prompt-in-chunks"] += any(not item.samples for item in prefills)
            hits["prefill-beside-decode"] += len(prefills) < len(items)
        hits["ran-ahead"] += any(item.request.launched > 1 for item in items if item.samples)
        tokens = sum([item.tokens for item in items])
        hits["budget-exhausted"] += tokens == self._books.limits.token_budget

    def _queue(self) -> None:
        """Why does the first one wait?"""
        books = self._books
        if len(books.running) == books.configuration.requests:
            self.hits["sequences-exhausted"] += 1
        first = next(iter(books.waiting.values()))
        self.hits["waits-for-adapter"] += books.lacks_adapter(first, books.running.values())
        needed, free = books.rows(first.prompt_tokens), books.free_blocks()
        if needed > free:
            self.hits["waits-for-blocks"] += 1
        elif needed > free - books.limits.watermark_blocks:
            self.hits["waits-for-watermark"] += 1

    # -- ends --------------------------------------------------------------------------------------

    def _completing(self, event: Completed) -> None:
        for number in event.sampled:
            request = self._books.live.get(number)
            if request is not None and request.state != "running":
                self.hits["sampled-while-preempted"] += 1

    def _completed(self, event: Completed) -> None:
        for request in self._books.ended:
            self._finished = True
            self.hits["finished"] += 1
            self.hits["finished-while-next-step-in-flight"] += request.launched > 0

    def _cancelling(self, event: RequestCancelled) -> None:
        request = self._books.live.get(event.request)
        if request is not None:
            state = request.state
            self.hits[f"aborted-{'preempted' if state == 'swapped' else state}"] += 1

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        """Look at how an operation of the scheduler ended."""
        if isinstance(operation, Arrive) and outcome.status == "refused":
            self.hits["refused-for-ever"] += outcome.reason == LARGER_THAN_POOL
            self.hits["refused-by-model"] += outcome.reason == LARGER_THAN_MODEL
