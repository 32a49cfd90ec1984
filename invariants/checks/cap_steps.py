"""CAP's part about steps: how many tokens a launch computes, and whose."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.checks.cap_answers import Answers
from kvproof.invariants.operations import Launch, Retire
from kvproof.invariants.outcomes import NOTHING_TO_RUN, RUN_AHEAD_LIMIT, Outcome
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.verdict import counted


class Steps:
    """Predicts launches; it reports through that check."""

    def __init__(self, check: Answers) -> None:
        self._check = check
        self._books = check.books
        self._block_sizes = check.books.block_sizes
        self._chunks = check.semantics.chunks
        self._expected: Sequence[tuple[int, int]] = ()
        """Of a launch with items: each request and how many tokens of it."""

    def launch(self, operation: Launch, outcome: Outcome) -> None:
        """With the books as before it."""
        books, judge = self._books, self._check.judge
        if len(books.steps) >= books.configuration.run_ahead:
            judge(operation, outcome, RUN_AHEAD_LIMIT)
            return
        pending = self._named(operation) if operation.items else self._pending_of_all()
        if pending == 0:
            judge(operation, outcome, NOTHING_TO_RUN)
            return
        if operation.budget and self._chunks and not operation.items:
            pending = min(pending, operation.budget)
        judge(operation, outcome, None, pending)

    def retire(self, operation: Retire, outcome: Outcome) -> None:
        """With the books as before it."""
        if self._books.steps:
            self._check.judge(operation, outcome, None, len(self._books.steps[0].items))

    def _pending_of_all(self) -> int:
        total = 0
        for request in self._books.running:
            if request.loading:
                continue
            pending = self._computable(request) - request.begins
            if pending > 0:
                total += pending
        return total

    def _computable(self, request: RequestModel) -> int:
        """Its tokens that have slots in every group."""
        tokens = len(request.tags)
        for size in self._block_sizes:
            slots = (request.slots + size - 1) // size * size
            if slots < tokens:
                tokens = slots
        return tokens

    def _named(self, operation: Launch) -> int:
        """Tokens that the named requests, each by its first item, have to compute."""
        running = self._books.running
        named: dict[int, int] = {}
        count = len(running)
        for index, tokens in operation.items if count else ():
            named.setdefault(index % count, tokens)
        expected: list[tuple[int, int]] = []
        for index, tokens in named.items():
            request = running[index]
            if request.loading:
                continue
            pending = self._computable(request) - request.begins
            if pending > 0:
                expected.append((request.id, tokens if tokens < pending else pending))
        self._expected = expected
        return sum([tokens for _, tokens in expected])

    def launched(self, operation: Launch) -> None:
        """The step computes just its items, or serves the oldest first: only its last request may
        be left unfinished."""
        step = self._books.steps[-1] if self._books.steps else None
        if step is None or not step.items:
            return
        if not operation.items:
            if self._check.semantics.oldest_first:
                self._oldest_first(step.number, step.items[-1][1])
            return
        actual = [(item.request, item.end - item.start) for item, _ in step.items]
        if actual != self._expected:
            self._check.fail(
                f"step {step.number} computes (request, tokens) {actual}, but it was to "
                f"compute {self._expected}"
            )

    def _oldest_first(self, step: int, last: RequestModel) -> None:
        for request in self._books.running:
            if request is last:
                return
            if request.loading:
                continue
            if request.scheduled < self._computable(request):
                self._check.fail(
                    f"step {step} leaves "
                    f"{counted(len(request.tags) - request.scheduled, 'token')} of request "
                    f"{request.id} uncomputed, but serves request {last.id}, which was admitted "
                    "later",
                    request=request.id,
                )
                return
