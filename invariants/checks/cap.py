"""CAP: an operation is done exactly when it fits, with exactly the blocks and hits it should.

Verifies: each refusal and each success of every operation
against a prediction from the books; that a prefix hit is the longest findable one and never
covers the last token; that a request holds ceil(tokens / block size) blocks, or as many as were
reserved, no more; that a step computes as many tokens as its budget or items, and the pending
tokens that have slots, allow.

Does not verify: the order of admissions or any policy (none exists at this level); bounds of
subjects that declare inexact admission.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.books import GroupBooks, RequestModel
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    IN_FLIGHT,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOT_COMPUTED,
    NOT_LAUNCHED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    TOO_MANY_REQUESTS,
    Outcome,
    Status,
)
from kvproof.invariants.property import Check, Claim, OperationHandler
from kvproof.invariants.tags import Tags
from kvproof.invariants.view import Standing


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
            "chapter, life cycle: request grows → capacity accounted; bugs B146, B152; survey E06",
        ),
        Claim(
            "A hit is the longest findable prefix of full blocks, and at least one token is "
            "left to compute.",
            "bugs B153, B154, B166; survey R05, R06, D09",
        ),
        Claim(
            "A long request goes on whatever others do: a step serves the oldest first.",
            "chapter, continuous batching: long request continues; survey E11, Q12",
        ),
        Claim("A request that can never fit is refused as such.", "bug B134; survey K17"),
    )
    positive_control = "boundary-block-too-early"
    concludes_on = (Launch, Preempt)
    concludes_when = ("done",)
    _expected: Sequence[tuple[int, int]] = ()
    """Of a launch with items: each request and how many tokens of it."""

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        handlers: dict[type[Operation], OperationHandler] = {
            Finish: self._end,
            Abort: self._end,
            Preempt: self._preempt,
            Fork: self._fork,
            Launch: self._launch,
            Reset: self._reset,
            Retire: self._retire,
        }
        if self.semantics.exact_admission:
            handlers |= {
                Admit: self._admit,
                Resume: self._resume,
                Grow: self._grow,
                Decode: self._decode,
                Reserve: self._reserve,
                Evict: self._evict,
            }
        return handlers.get(kind)

    def expects(self, kind: type[Operation], status: Status) -> bool:
        # LIFE knows whether an operation had a target; the others are never skipped.
        targeted = kind not in (Admit, Launch, Evict, Reset)
        return super().expects(kind, status) and not (status == "skipped" and targeted)

    def _judge(
        self, operation: Operation, outcome: Outcome, reason: str | None, figure: int = 0
    ) -> None:
        """Compare the answer with the prediction: why refused, or which figure."""
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self._wrong_answer(operation, outcome, reason)
        elif reason is None:
            actual = outcome.cached_tokens or outcome.count
            if actual != figure:
                self._wrong_figure(operation, outcome, actual, figure)

    def _wrong_answer(self, operation: Operation, outcome: Outcome, reason: str | None) -> None:
        name = type(operation).__name__.lower()
        did = outcome.status + (f" ({outcome.reason})" if outcome.reason else "")
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
            Reserve: "blocks were taken",
            Retire: "requests came back",
        }.get(type(operation), "were counted")
        self.fail(
            f"{type(operation).__name__.lower()}: {actual} {what}, but it should be {figure}",
            request=outcome.request,
        )

    # -- predictions, from the books as they were before the operation ---------------------------

    def _admit(self, operation: Admit, outcome: Outcome) -> None:
        self._admission(operation, outcome, self.books.tags_of(operation), operation.slots)

    def _resume(self, operation: Resume, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        if request.swapped:
            self._swap_in(operation, outcome, request)
        else:
            self._admission(operation, outcome, request.tags, operation.slots)

    def _swap_in(self, operation: Resume, outcome: Outcome, request: RequestModel) -> None:
        books = self.books
        books.predicted_hits = []
        needed = max(
            blocks_for(operation.slots or request.length, self.block_size),
            blocks_for(request.computed, self.block_size),
        )
        reason = None
        if len(books.running) >= books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        elif needed > books.configuration.blocks:
            reason = LARGER_THAN_POOL
        elif any(needed > group.usable - group.referenced for group in self.groups):
            reason = NO_FREE_BLOCKS
        self._judge(operation, outcome, reason, request.computed)

    def _admission(
        self, operation: Operation, outcome: Outcome, tags: Tags[int], slots: int
    ) -> None:
        books, size = self.books, self.block_size
        books.predicted_hits = []
        needed = ((slots or len(tags)) + size - 1) // size
        hits, reason = 0, None
        if len(books.running) >= books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        elif needed > books.configuration.blocks:
            reason = LARGER_THAN_POOL
        else:
            hits = self._longest_hit(tags)
            for group in self.groups:
                if not self._fits(group, tags, needed, hits):
                    reason = NO_FREE_BLOCKS
        self._judge(operation, outcome, reason, hits * size)

    def _longest_hit(self, tags: Tags[int]) -> int:
        """Rows of the longest prefix that is findable in every group, below the last token."""
        size = self.block_size
        rows = (len(tags) - 1) // size if self.books.configuration.prefix_caching else 0
        for group in self.groups:
            known, limit, rows = group.key_of_tag, rows, 0
            while rows < limit and tags[rows * size + size - 1] in known:
                rows += 1
        return rows

    def _fits(self, group: GroupBooks, tags: Tags[int], needed: int, hits: int) -> bool:
        """Whether the new blocks are free beside the hits that come out of the free ones."""
        taken = max(0, needed - hits)
        if hits:
            size, refs = self.block_size, group.refs
            blocks_of, key_of_tag = group.blocks_of, group.key_of_tag
            # Of several equal blocks the one that was indexed first is reused.
            blocks = [blocks_of[key_of_tag[t]] for t in tags[size - 1 : hits * size : size]]
            self.books.predicted_hits.append((group.group, [equal[0] for equal in blocks]))
            taken += sum([refs[equal[0]] == 0 for equal in blocks])
        return taken <= group.usable - group.referenced

    def _grow(self, operation: Grow, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        reason = None
        for group in self.groups:
            if self._growth(group, request, operation.tokens) > group.usable - group.referenced:
                reason = NO_FREE_BLOCKS
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self._wrong_answer(operation, outcome, reason)

    def _growth(self, group: GroupBooks, request: RequestModel, tokens: int) -> int:
        """Blocks that growing by so many tokens takes, a copy-on-write included."""
        size, length, table = self.block_size, len(request.tags), request.tables[group.group]
        row, offset = divmod(length, size)
        take = (length + tokens + size - 1) // size - len(table)
        copied = offset and row < len(table) and group.refs[table[row]] > 1
        return (take if take > 0 else 0) + (1 if copied else 0)

    def _decode(self, operation: Decode, outcome: Outcome) -> None:
        """All of them, if each by itself finds its blocks beside the others."""
        running = self.books.running
        if outcome.status == "skipped" or not running:
            return  # LIFE
        named = {index % len(running) for index in operation.requests}
        reason = None
        for group in self.groups:
            taken = sum([self._growth(group, running[index], 1) for index in named])
            if taken > group.usable - group.referenced:
                reason = NO_FREE_BLOCKS
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self._wrong_answer(operation, outcome, reason)

    def _reserve(self, operation: Reserve, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        needed = blocks_for(operation.slots, self.block_size)
        takes = [max(0, needed - len(table)) for table in request.tables]
        short = any(
            take > group.usable - group.referenced
            for group, take in zip(self.groups, takes, strict=True)
        )
        self._judge(operation, outcome, NO_FREE_BLOCKS if short else None, sum(takes))

    def _preempt(self, operation: Preempt, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None or not operation.swap:
            self._end(operation, outcome)
            return
        rows = blocks_for(request.computed, self.block_size)
        capacity = self.books.configuration.host_blocks
        reason = None
        if request.launched:
            reason = IN_FLIGHT
        elif any(rows > capacity - len(group.host_holder) for group in self.groups):
            reason = NO_HOST_BLOCKS
        self._judge(operation, outcome, reason)

    def _end(self, operation: Operation, outcome: Outcome) -> None:
        """Finish, abort, preempt: always, unless steps have still to compute the request."""
        request = self._known(outcome.request)
        if request is None:
            return
        pending = request.running and request.computed < len(request.tags)
        may_not = pending and not self.semantics.fences_releases
        self._judge(operation, outcome, NOT_LAUNCHED if may_not else None)

    def _fork(self, operation: Fork, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        reason = None
        if request.computed < request.length:
            reason = NOT_COMPUTED
        elif len(self.books.running) + operation.samples > self.books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        self._judge(operation, outcome, reason)

    def _launch(self, operation: Launch, outcome: Outcome) -> None:
        books = self.books
        if len(books.steps) >= books.configuration.run_ahead:
            self._judge(operation, outcome, RUN_AHEAD_LIMIT)
            return
        pending = self._named(operation) if operation.items else self._pending_of_all()
        if pending == 0:
            self._judge(operation, outcome, NOTHING_TO_RUN)
            return
        if operation.budget and self.semantics.chunks and not operation.items:
            pending = min(pending, operation.budget)
        self._judge(operation, outcome, None, pending)

    def _pending_of_all(self) -> int:
        total, size = 0, self.block_size
        for request in self.books.running:
            # Tokens beyond the request's blocks cannot be computed yet.
            slots = (request.slots + size - 1) // size * size
            length = len(request.tags)
            pending = (length if length < slots else slots) - request.scheduled
            if pending > 0:
                total += pending
        return total

    def _named(self, operation: Launch) -> int:
        """Tokens that the named requests, each by its first item, have to compute."""
        running, size = self.books.running, self.block_size
        named: dict[int, int] = {}
        count = len(running)
        for index, tokens in operation.items if count else ():
            named.setdefault(index % count, tokens)
        expected: list[tuple[int, int]] = []
        for index, tokens in named.items():
            request = running[index]
            slots = (request.slots + size - 1) // size * size
            length = len(request.tags)
            pending = (length if length < slots else slots) - request.scheduled
            if pending > 0:
                expected.append((request.id, tokens if tokens < pending else pending))
        self._expected = expected
        return sum([tokens for _, tokens in expected])

    def _evict(self, operation: Evict, outcome: Outcome) -> None:
        cached = [len(group.cached_free) for group in self.groups]
        figure = sum([min(operation.blocks, free) for free in cached])
        self._judge(operation, outcome, None, figure)

    def _reset(self, operation: Reset, outcome: Outcome) -> None:
        if any(group.referenced for group in self.groups):
            self._judge(operation, outcome, BLOCKS_IN_USE)
        else:
            cached = sum([len(group.cached_free) for group in self.groups])
            self._judge(operation, outcome, None, cached)

    def _retire(self, operation: Retire, outcome: Outcome) -> None:
        if self.books.steps:
            self._judge(operation, outcome, None, len(self.books.steps[0].items))

    def _known(self, number: int | None) -> RequestModel | None:
        return None if number is None else self.books.requests.get(number)

    # -- what done operations did -------------------------------------------------------------

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        """A launch computes just its items, or serves the oldest first: only its last request may
        be left unfinished.  A swap copies just the blocks with computed tokens."""
        if isinstance(operation, Preempt):
            self._swapped_out(operation, outcome)
            return
        step = self.books.steps[-1] if self.books.steps else None
        assert isinstance(operation, Launch)
        if step is None or not step.items:
            return
        if operation.items:
            actual = [(item.request, item.end - item.start) for item, _ in step.items]
            if actual != self._expected:
                self.fail(
                    f"step {step.number} computes (request, tokens) {actual}, but it was to "
                    f"compute {self._expected}"
                )
            return
        if not self.semantics.oldest_first:
            return
        last, size = step.items[-1][1], self.block_size
        for request in self.books.running:
            if request is last:
                return
            slots = (request.slots + size - 1) // size * size
            if request.scheduled < min(len(request.tags), slots):
                self.fail(
                    f"step {step.number} leaves {len(request.tags) - request.scheduled} tokens "
                    f"of request {request.id} uncomputed, but serves request {last.id}, which "
                    "was admitted later",
                    request=request.id,
                )
                return

    def _swapped_out(self, operation: Preempt, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None or not operation.swap:
            return
        needed = blocks_for(request.computed, self.block_size)
        for group, blocks in enumerate(request.host_tables):
            if len(blocks) != needed:
                self.fail(
                    f"{len(blocks)} blocks of request {request.id} are swapped out, but its "
                    f"{request.computed} computed tokens need {needed}",
                    group=group,
                    request=request.id,
                )

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        if not request.running or actual[3] == expected[3]:
            return
        for group, (held, needed) in enumerate(zip(actual[3], expected[3], strict=True)):
            if held != needed:
                self.fail(
                    f"request {request.id} has {request.length} tokens and {request.slots} slots, "
                    f"which need {needed} blocks of {self.block_size}, but holds {held}",
                    group=group,
                    request=request.id,
                )


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + block_size - 1) // block_size
