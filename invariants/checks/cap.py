"""CAP: an operation is done exactly when it fits, with exactly the blocks and hits it should.

Verifies: each refusal and each success of every operation
against a prediction from the books; that a prefix hit is the longest findable one and never
covers the last token; that a request holds ceil(tokens / block size) blocks, or as many as were
reserved, no more, and none behind a window once it has grown; that a step computes as many tokens
as its budget or items, and the pending tokens that have slots, allow; that copies between tiers are
refused or started exactly when they should be, of just the blocks that are next, and what look-ups
in the tiers answer.

Of a subject that declares inexact admission only bounds: that what it does had room, that none is
refused as one too many while fewer run, that a hit is findable, in whole blocks, and leaves a
token to compute; and, unless the subject declares shorter hits, that there is no longer one, and
unless it keeps room, that what was refused lacked it.

Does not verify: the order of admissions or any policy (none exists at this level); how much of
what is findable is hit by a subject that declares shorter hits, and which room is kept by one that
declares so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from kvproof.invariants.checks.cap_answers import Answers
from kvproof.invariants.checks.cap_bounds import Bounds
from kvproof.invariants.checks.cap_steps import Steps
from kvproof.invariants.checks.cap_takes import Takes
from kvproof.invariants.checks.cap_tiers import TierAnswers
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Corrupt,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    Slow,
    Withhold,
    kind_of,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    HIT_PENDING,
    IN_FLIGHT,
    LARGER_THAN_POOL,
    LOADING,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOT_COMPUTED,
    NOT_LAUNCHED,
    OFFLOAD_OFF,
    RETRY,
    TOO_MANY_REQUESTS,
    Outcome,
    Status,
)
from kvproof.invariants.property import Claim, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.tags import Tags
from kvproof.invariants.verdict import counted
from kvproof.invariants.view import Standing

_ANSWERED = (Offload, Promote, Withhold, Corrupt, Restart, Slow)
"""What only a hierarchy does."""
_WAITED_FOR = (HIT_PENDING, RETRY)


class Cap(Answers):
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
        Claim(
            "The prefix cache is reset only while nobody has KV that was computed before: no "
            "request that runs or is suspended, and no copy under way.",
            "bug B42; survey R20, T28",
        ),
    )
    positive_control = "boundary-block-too-early"
    concludes_on = (Launch, Offload, Promote, Grow, Decode, Reserve)
    concludes_when = ("done",)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._steps = Steps(self)
        self._tiers = TierAnswers(self)
        self._bounds = Bounds(self, self._short)
        self._takes = Takes(self.books, self._growth)
        shared = self.semantics.shared_pool
        self._pools = self.groups[:1] if shared else self.groups
        self._sharing = len(self.groups) if shared else 1
        """Groups that take their blocks from the same pool."""

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        return self._handlers.get(kind)

    @cached_property
    def _handlers(self) -> Mapping[type[Operation], OperationHandler]:
        handlers: dict[type[Operation], OperationHandler] = {
            Finish: self._end,
            Abort: self._end,
            Preempt: self._preempt,
            Fork: self._fork,
            Launch: self._steps.launch,
            Evict: self._evict,
            Reset: self._reset,
            Retire: self._steps.retire,
            **dict.fromkeys((Withhold, Corrupt, Restart, Slow), self._tiers.answered),
        }
        if self.semantics.exact_admission:
            handlers |= {
                Admit: self._admit,
                Resume: self._resume,
                Grow: self._grow,
                Decode: self._decode,
                Reserve: self._reserve,
            }
        else:
            handlers |= self._bounds.handlers()
        if self.semantics.exact_tiers:
            handlers |= dict.fromkeys((Offload, Promote), self._tiers.answered)
        return handlers

    def expects(self, kind: type[Operation], status: Status) -> bool:
        # LIFE knows whether an operation had a target; the others are never skipped.
        targeted = kind not in (Admit, Launch, Evict, Reset, *_ANSWERED)
        return super().expects(kind, status) and not (status == "skipped" and targeted)

    def concludes(self, kind: type[Operation], status: Status) -> bool:
        return super().concludes(kind, status) and (
            kind not in (Grow, Decode, Reserve) or any(self.semantics.windows)
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
        rows = blocks_for(request.computed, self.block_size)
        needed = max(blocks_for(operation.slots or request.length, self.block_size), rows)
        reason = None
        if request.departing:
            reason = IN_FLIGHT
        elif len(books.running) >= books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        elif needed * self._sharing > books.configuration.blocks:
            reason = LARGER_THAN_POOL
        elif self._short([needed] * len(self.groups)):
            reason = NO_FREE_BLOCKS
        cached = 0 if operation.late and rows else request.computed
        self.judge(operation, outcome, reason, cached)
        self._judge_copies(operation, outcome, rows, started=reason is None)

    def _admission(
        self, operation: Admit | Resume, outcome: Outcome, tags: Tags[int], slots: int
    ) -> None:
        books, size = self.books, self.block_size
        books.predicted_hits = []
        needed = self._needed(slots or len(tags))
        hits, lookup, reason = 0, "", None
        if len(books.running) >= books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        elif (sum if self._sharing > 1 else max)(needed) > books.configuration.blocks:
            reason = LARGER_THAN_POOL
        else:
            hits = books.longest_hit(tags)
            if self._short(self._taken(tags, needed, hits * size)):
                reason = NO_FREE_BLOCKS
            if books.tiers is not None:
                lookup = outcome.lookup
                if self.semantics.exact_tiers:
                    lookup = self._tiers.beyond(tags, hits)
                if isinstance(operation, Admit) and operation.wait and lookup in _WAITED_FOR:
                    reason = lookup
        self.judge(operation, outcome, reason, hits * size)
        if outcome.lookup != lookup or outcome.transfers:
            self.wrong_lookup(operation, outcome, lookup)

    def _short(self, takes: Sequence[int]) -> bool:
        """Whether there are fewer free blocks than each group takes, or all of one pool."""
        if self._sharing > 1:
            return sum(takes) > self.groups[0].free
        return any(take > group.free for group, take in zip(self.groups, takes, strict=True))

    def _needed(self, tokens: int) -> list[int]:
        """Blocks of each group for so many tokens."""
        return [blocks_for(tokens, group.block_size) for group in self.groups]

    def _taken(self, tags: Tags[int], needed: Sequence[int], hit: int) -> list[int]:
        """Free blocks that each group takes: new ones, and those of a hit of so many tokens that
        come out of the free ones."""
        takes = []
        for group, rows in zip(self.groups, needed, strict=True):
            size, refs = group.block_size, group.refs
            taken = max(0, rows - hit // size)
            if hit:
                blocks_of, key_of_tag = group.blocks_of, group.key_of_tag
                # Of several equal blocks the one that was indexed first is reused.
                blocks = [blocks_of[key_of_tag[t]] for t in tags[size - 1 : hit : size]]
                self.books.predicted_hits.append((group.group, [equal[0] for equal in blocks]))
                taken += sum([refs[equal[0]] == 0 for equal in blocks])
            takes.append(taken)
        return takes

    def _grow(self, operation: Grow, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        reason = None
        if request.loading:
            self.judge(operation, outcome, LOADING)
            return
        if self._short([self._growth(group, request, operation.tokens) for group in self.groups]):
            reason = NO_FREE_BLOCKS
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self.wrong_answer(operation, outcome, reason)

    def _growth(self, group: GroupBooks, request: RequestModel, tokens: int) -> int:
        """Blocks that growing by so many tokens takes, a copy-on-write included."""
        size, length, table = group.block_size, len(request.tags), request.tables[group.group]
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
        takes = [
            sum([self._growth(group, running[index], 1) for index in named])
            for group in self.groups
        ]
        if self._short(takes):
            reason = NO_FREE_BLOCKS
        if self.books.tiers is not None and any(running[index].loading for index in named):
            reason = LOADING
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self.wrong_answer(operation, outcome, reason)

    def _reserve(self, operation: Reserve, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        needed = self._needed(operation.slots)
        tables = zip(needed, request.tables, strict=True)
        takes = [max(0, rows - len(table)) for rows, table in tables]
        self.judge(operation, outcome, NO_FREE_BLOCKS if self._short(takes) else None, sum(takes))

    def _preempt(self, operation: Preempt, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None or not operation.swap:
            self._end(operation, outcome)
            return
        rows = blocks_for(request.computed, self.block_size)
        configuration, tiers = self.books.configuration, self.books.tiers
        reason = None
        if not configuration.suspends:
            reason = OFFLOAD_OFF
        elif request.launched or request.loading:
            reason = IN_FLIGHT
        elif not self.semantics.exact_tiers:
            reason = NO_HOST_BLOCKS if outcome.reason == NO_HOST_BLOCKS else None
        elif rows > (0 if tiers is None else min([host.free for host in tiers.host])):
            reason = NO_HOST_BLOCKS
        self.judge(operation, outcome, reason)
        self._judge_copies(operation, outcome, rows, started=reason is None)

    def _judge_copies(
        self, operation: Operation, outcome: Outcome, rows: int, *, started: bool
    ) -> None:
        """A swap starts one transfer a group, of as many blocks as have computed tokens."""
        expected = len(self.groups) if rows and started else 0
        if len(outcome.transfers) != expected:
            self.fail(
                f"{kind_of(operation)} of {counted(rows, 'block')} started "
                f"{counted(len(outcome.transfers), 'transfer')}, but it should be {expected}",
                request=outcome.request,
            )

    def _end(self, operation: Operation, outcome: Outcome) -> None:
        """Finish, abort, preempt: always, unless steps have still to compute the request."""
        request = self._known(outcome.request)
        if request is None:
            return
        semantics = self.semantics
        # States are in place when their steps are launched, and not before.
        come_so_far = self.books.written(request) if semantics.states else request.computed
        pending = request.running and come_so_far < len(request.tags)
        at_any_time = semantics.stream_order and not semantics.states
        may_not = pending and not (semantics.fences_releases or at_any_time)
        self.judge(operation, outcome, NOT_LAUNCHED if may_not else None)

    def _fork(self, operation: Fork, outcome: Outcome) -> None:
        request = self._known(outcome.request)
        if request is None:
            return
        reason = None
        if request.computed < request.length - self.semantics.forks_early:
            reason = NOT_COMPUTED
        elif len(self.books.running) + operation.samples > self.books.configuration.requests:
            reason = TOO_MANY_REQUESTS
        self.judge(operation, outcome, reason)

    def _evict(self, operation: Evict, outcome: Outcome) -> None:
        if operation.tier != "device":
            if self.semantics.exact_tiers:
                self._tiers.answered(operation, outcome)
            return
        cached = [len(group.cached_free) for group in self._pools]
        figure = sum([min(operation.blocks, free) for free in cached])
        if not self.semantics.exact_eviction and figure < outcome.count <= sum(cached):
            figure = outcome.count
        self.judge(operation, outcome, None, figure)

    def _reset(self, operation: Reset, outcome: Outcome) -> None:
        tiers = self.books.tiers if self.semantics.resets_tiers else None
        below = tiers is not None and tiers.in_use
        if below or any(group.referenced for group in self.groups):
            self.judge(operation, outcome, BLOCKS_IN_USE)
        else:
            findable = sum([len(group.cached_free) for group in self._pools])
            if tiers is not None:
                findable += sum([len(tier.key_of) for tier in tiers.all])
            self.judge(operation, outcome, None, findable)

    def _known(self, number: int | None) -> RequestModel | None:
        return None if number is None else self.books.requests.get(number)

    # -- words --------------------------------------------------------------------------------

    def takes(self, operation: Operation, outcome: Outcome) -> str:
        return self._takes.of(operation, outcome)

    def expected_hit(self) -> str:
        return self._takes.hit()

    # -- what done operations did -------------------------------------------------------------

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if isinstance(operation, Launch):
            self._steps.launched(operation)
        elif isinstance(operation, Grow | Decode | Reserve):
            self._bounds.grown(outcome)
        elif self.semantics.exact_tiers and isinstance(operation, Offload | Promote):
            self._tiers.copied(operation, outcome)

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        if not request.running or actual[3] == expected[3]:
            return
        for group, (held, needed) in enumerate(zip(actual[3], expected[3], strict=True)):
            if held != needed:
                self.fail(
                    f"request {request.id} has {counted(request.length, 'token')} and "
                    f"{counted(request.slots, 'slot')}, which need {counted(needed, 'block')} of "
                    f"{self.groups[group].block_size}, but holds {held}",
                    group=group,
                    request=request.id,
                )


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + block_size - 1) // block_size
