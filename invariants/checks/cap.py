"""CAP: an operation is done exactly when it fits, with exactly the blocks and hits it should.

Verifies: each refusal and each success of admit, resume, grow, fork, launch, evict and reset
against a prediction from the books; that a prefix hit is the longest findable one and never
covers the last token; that a request holds ceil(tokens / block size) blocks, no more; that a
step computes as many tokens as its budget and the pending tokens allow.

Does not verify: the order of admissions or any policy (none exists at this level); bounds of
subjects that declare inexact admission.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproof.invariants.books import RequestModel
from kvproof.invariants.operations import (
    Admit,
    Evict,
    Fork,
    Grow,
    Launch,
    Operation,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_COMPUTED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.property import Check, Claim
from kvproof.invariants.tags import Tags

Prediction = tuple[str | None, int]
"""Reason of refusal, or None; and the figure to expect: cached tokens, or a count."""


class Cap(Check):
    """Exact capacity."""

    claims = (
        Claim(
            "A request is admitted exactly when the blocks it needs beyond its hits, and the "
            "free ones among its hits, are there.",
            "chapter, life cycle: request admitted → blocks allocated; bugs B145, B152; "
            "survey P05, R16, E05",
        ),
        Claim(
            "Capacity that a finished request gave back admits the next one that fits, while "
            "others go on.",
            "chapter, continuous batching: capacity becomes reusable, waiting request may "
            "enter; survey E09, E10",
        ),
        Claim(
            "After it grows, a request holds the blocks that its tokens need and no more.",
            "chapter, life cycle: request grows → capacity accounted; bugs B146, B152; "
            "survey E06",
        ),
        Claim(
            "A hit is the longest findable prefix of full blocks, and at least one token is "
            "left to compute.",
            "bugs B153, B154, B166; survey R05, R06, D09",
        ),
        Claim("A request that can never fit is refused as such.", "bug B134; survey K17"),
    )
    positive_control = "admission-counts-free-hits-twice"
    expects_of = (Admit, Resume, Grow, Fork, Launch, Evict, Reset, Retire)
    concludes_on = (Admit, Resume, Grow, Fork)
    concludes_when = ("done",)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._predictors: dict[type[Operation], Callable[[Any, Outcome], Prediction | None]] = {
            Admit: self._admit,
            Resume: self._resume,
            Grow: self._grow,
            Fork: self._fork,
            Launch: self._launch,
            Evict: self._evict,
            Reset: self._reset,
            Retire: self._retire,
        }

    def expect(self, operation: Operation, outcome: Outcome) -> None:
        if outcome.status == "skipped":
            return  # LIFE knows whether there was a candidate
        prediction = self._predictors[operation.__class__](operation, outcome)
        if prediction is None:
            return
        self.checked += 1
        reason, figure = prediction
        if outcome.reason != reason:
            self._wrong_answer(operation, outcome, reason)
        elif reason is None:
            actual = outcome.cached_tokens or outcome.count
            if actual != figure:
                self._wrong_figure(operation, outcome, actual, figure)

    def _wrong_answer(self, operation: Operation, outcome: Outcome, reason: str | None) -> None:
        name = type(operation).__name__.lower()
        did = f"refused ({outcome.reason})" if outcome.reason else "done"
        should = f"refused ({reason})" if reason else "done"
        free = ", ".join(str(g.usable - g.referenced) for g in self.books.groups)
        self.fail(
            f"{name} was {did}, but it should have been {should}: {free} blocks were free",
            request=outcome.request,
        )

    def _wrong_figure(
        self, operation: Operation, outcome: Outcome, actual: int, figure: int
    ) -> None:
        what = {
            Admit: "cached tokens were claimed",
            Resume: "cached tokens were claimed",
            Launch: "tokens were scheduled",
            Evict: "blocks were evicted",
            Reset: "blocks were evicted",
            Retire: "requests came back",
        }.get(type(operation), "were counted")
        self.fail(
            f"{type(operation).__name__.lower()}: {actual} {what}, but it should be {figure}",
            request=outcome.request,
        )

    # -- predictions, from the books as they were before the operation ---------------------------

    def _admit(self, operation: Admit, outcome: Outcome) -> Prediction | None:
        return self._admission(self.books.tags_of(operation))

    def _resume(self, operation: Resume, outcome: Outcome) -> Prediction | None:
        request = self._target(outcome)
        return self._admission(request.tags) if request else None

    def _admission(self, tags: Tags[int]) -> Prediction | None:
        books, size, length = self.books, self.block_size, len(tags)
        books.predicted_hits = []
        if not self.semantics.exact_admission:
            return None
        needed = (length + size - 1) // size
        if len(books.running) >= books.configuration.requests:
            return TOO_MANY_REQUESTS, 0
        if any(needed > group.usable for group in books.groups):
            return LARGER_THAN_POOL, 0
        hits = self._longest_hit(tags)
        for group in books.groups:
            refs = group.refs
            blocks = [
                group.blocks_of[group.key_of_tag[tags[(row + 1) * size - 1]]]
                for row in range(hits)
            ]
            books.predicted_hits.append((group.group, [held[0] for held in blocks]))
            # Which of several equal blocks is reused is the subject's choice.
            revived = sum(1 for held in blocks if all(refs[block] == 0 for block in held))
            if needed - hits + revived > group.usable - group.referenced:
                return NO_FREE_BLOCKS, 0
        return None, hits * size

    def _longest_hit(self, tags: Tags[int]) -> int:
        """Rows of the longest prefix that is findable in every group, below the last token."""
        size = self.block_size
        limit = (len(tags) - 1) // size if self.books.configuration.prefix_caching else 0
        for group in self.books.groups:
            known = group.key_of_tag
            if not known:
                return 0
            for row in range(limit):
                if tags[(row + 1) * size - 1] not in known:
                    limit = row
                    break
        return limit

    def _grow(self, operation: Grow, outcome: Outcome) -> Prediction | None:
        request = self._target(outcome)
        if request is None or not self.semantics.exact_admission:
            return None
        size, length = self.block_size, len(request.tags)
        needed = (length + operation.tokens + size - 1) // size
        for group in self.books.groups:
            table = request.tables[group.group]
            take = needed - len(table)
            if length % size and table and group.refs[table[-1]] > 1:
                take += 1  # copy-on-write
            if take > group.usable - group.referenced:
                return NO_FREE_BLOCKS, 0
        return None, 0

    def _fork(self, operation: Fork, outcome: Outcome) -> Prediction | None:
        request = self._target(outcome)
        if request is None:
            return None
        if request.computed < request.length:
            return NOT_COMPUTED, 0
        if len(self.books.running) + operation.samples > self.books.configuration.requests:
            return TOO_MANY_REQUESTS, 0
        return None, 0

    def _launch(self, operation: Launch, outcome: Outcome) -> Prediction | None:
        books = self.books
        if len(books.steps) >= books.configuration.run_ahead:
            return RUN_AHEAD_LIMIT, 0
        pending = 0
        for request in books.running:
            pending += len(request.tags) - request.scheduled
        if pending == 0:
            return NOTHING_TO_RUN, 0
        if operation.budget and self.semantics.chunks:
            pending = min(pending, operation.budget)
        return None, pending

    def _evict(self, operation: Evict, outcome: Outcome) -> Prediction | None:
        if not self.semantics.exact_admission:
            return None
        return None, sum(min(operation.blocks, len(g.cached_free)) for g in self.books.groups)

    def _reset(self, operation: Reset, outcome: Outcome) -> Prediction | None:
        if any(group.referenced for group in self.books.groups):
            return BLOCKS_IN_USE, 0
        return None, sum(len(group.cached_free) for group in self.books.groups)

    def _retire(self, operation: Retire, outcome: Outcome) -> Prediction | None:
        return (None, len(self.books.steps[0].items)) if self.books.steps else None

    def _target(self, outcome: Outcome) -> RequestModel | None:
        return self.books.requests.get(-1 if outcome.request is None else outcome.request)

    # -- what a done operation left -----------------------------------------------------------

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        for number in (outcome.request, *outcome.children):
            request = self._known(number)
            if request is None:
                continue
            needed = (len(request.tags) + self.block_size - 1) // self.block_size
            for group in self.books.groups:
                held = len(self.view.table(request.id, group.group))
                if held != needed:
                    self.fail(
                        f"request {request.id} has {request.length} tokens, which need {needed} "
                        f"blocks of {self.block_size}, but holds {held}",
                        group=group.group,
                        request=request.id,
                    )
        self.checked += 1

    def _known(self, number: int | None) -> RequestModel | None:
        return None if number is None else self.books.requests.get(number)
