"""What a scheduler policy is: a :class:`SchedulerState` in, a :class:`Plan` out.

Write a class with a ``plan`` method, and check it with ``kvproof check --policy FILE.py:CLASS``::

    from kvproof.engine.policy import Plan, SchedulerState


    class ShortestFirst:
        '''Waiting requests with short prompts first; the latest is preempted for want of blocks.'''

        def plan(self, state: SchedulerState) -> Plan:
            draft = state.draft()
            for request in state.running:
                draft.run_preempting(request)
            if not draft.preempts:
                waiting = sorted(state.waiting, key=lambda request: request.prompt_tokens)
                for request in [*state.preempted, *waiting]:
                    if not draft.run(request):
                        break
            return draft.plan()

A :class:`Draft` keeps the contract for you; a policy may as well do its own arithmetic and return
a :class:`Plan` that it made itself.  The scheduler checks each plan before it applies any of it.

A policy may keep state of its own between calls.  It must be deterministic: no clock but
``now_ns``, no unseeded random numbers, no order of sets, no state of the module or the class.  It
is called once an iteration, and given one second.  It may run nothing for up to seven iterations in
a row while nothing is in flight (time passes meanwhile); then that counts as a stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from kvproof.invariants.scheduling.vocabulary import (
    Limits,
    Plan,
    Promises,
    QueueState,
)

__all__ = [
    "Draft",
    "Limits",
    "Plan",
    "Promises",
    "QueueState",
    "RequestState",
    "SchedulerPolicy",
    "SchedulerState",
]


class RequestState(Struct, frozen=True, gc=False):
    """One live request, as it stands before the iteration."""

    id: int
    """Rank of arrival: 0 came first."""
    state: QueueState
    arrival_ns: int
    priority: int
    """The smaller, the more urgent; 0 if the client said nothing."""
    prompt_tokens: int
    max_tokens: int
    """Output tokens at most.  The request may stop before, and nobody knows when."""
    output_tokens: int = 0
    """Output tokens sampled so far."""
    computed_tokens: int = 0
    """Tokens whose KV is there, or is being computed by a step in flight; 0 unless running (or
    swapped: what comes back with the copy)."""
    pending_tokens: int = 0
    """Tokens that a step could compute now: 1 while it decodes, more during prefill.  0 if it is
    not ready: its next token is being sampled by a step in flight.  For one that waits: all of
    its tokens (those whose KV turns out to be cached need not be computed)."""
    held_blocks: int = 0
    """Blocks in its table, shared ones included."""
    preemptions: int = 0
    in_flight: bool = False
    """Whether a step in flight carries it: its blocks, given back, are not free before that step
    is retired."""

    @property
    def final_tokens(self) -> int:
        """Prompt and longest output; the KV of the last token is never computed."""
        return self.prompt_tokens + self.max_tokens - 1


class SchedulerState(Protocol):
    """What a policy is given.  Read-only, and valid during the call only."""

    iteration: int
    """Iterations before this one."""
    now_ns: int
    """Virtual time."""
    limits: Limits
    block_size: int
    """Tokens per block."""
    total_blocks: int
    """Usable blocks of the pool."""
    max_sequences: int
    """Running requests at most."""
    free_blocks: int
    """Blocks that an allocation may take.  **Includes** the cached-free ones."""
    cached_free_blocks: int
    """Of the free blocks, those in which a prefix is still findable."""
    fenced_blocks: int
    """Blocks that nobody has, but that a step or a copy in flight still uses: not free yet."""
    free_host_blocks: int
    """Free blocks of swap space; a swap takes as many as the computed tokens fill."""

    @property
    def running(self) -> Sequence[RequestState]:
        """By first admission."""
        ...

    @property
    def preempted(self) -> Sequence[RequestState]:
        """Preempted and swapped ones, by arrival."""
        ...

    @property
    def waiting(self) -> Sequence[RequestState]:
        """Never admitted ones, by arrival.  May be long: do not walk it to the end needlessly.

        Where KV of one of them is on its way from host or disk, that one and all behind it are left
        out until it has come: who was here before may be here again.
        """
        ...

    def blocks_for(self, request: RequestState, tokens: int) -> int:
        """Free blocks that it takes to have blocks for the request's first ``tokens`` tokens.

        Exact for each request by itself: beside new blocks, those of its prefix hit that are free
        now (cached-free) are taken out of the free ones.  Several requests together never take
        more than the sum.  In an iteration that preempts, a plan's admissions are counted without
        their hits, as ``ceil(tokens / block_size)``: those may be on the blocks given back.
        """
        ...

    def cached_tokens(self, request: RequestState) -> int:
        """Of a request that is not running: the tokens that it need not compute, now."""
        ...

    def blocks_freed(self, request: RequestState) -> int:
        """Blocks that are free at once if this running request is preempted.

        Those that nobody shares; none while a step in flight carries the request.
        """
        ...

    def draft(self) -> Draft:
        """A new, empty draft of a plan for this state."""
        ...


class Draft:
    """A plan in the making, which never exceeds what is there.

    Methods answer whether the thing fits, and change nothing if it does not (but for
    ``run_preempting``, which may have preempted somebody).
    """

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.free_blocks = state.free_blocks
        """What is left of them."""
        self.tokens_left = state.limits.token_budget
        self.sequences_left = state.max_sequences - len(state.running)
        self.admits = False
        """Whether a request is admitted; then the watermark counts."""
        self._coming_blocks = state.fenced_blocks
        """Blocks that will be free once the steps in flight are retired."""
        self._free_host_blocks = state.free_host_blocks
        self._block_size = state.block_size
        self._chunked = state.limits.chunked_prefill
        self._watermark_blocks = state.limits.watermark_blocks
        self._run: dict[int, int] = {}
        self._preempt: dict[int, None] = {}
        self._swap: dict[int, None] = {}
        self._reserve: dict[int, int] = {}
        self._taken_blocks: dict[int, int] = {}
        """By running requests that are run."""

    @property
    def preempts(self) -> bool:
        """Whether somebody is preempted or swapped out."""
        return bool(self._preempt or self._swap)

    def run(self, request: RequestState, *, tokens: int | None = None, reserve: int = 0) -> bool:
        """Run a request for all of its pending tokens, or as many as the budget allows.

        ``tokens`` bounds them; so do, in the prefill of a running request, the free blocks, if it
        may be chunked.  A request that is not running is admitted, and given blocks for
        ``reserve`` tokens if that is more than it is to compute.  False if it is not ready, if no
        budget, sequence or block is left for it, if it would have to be chunked where that is
        not allowed, or if the draft preempts it.
        """
        if self._is_out(request) or request.id in self._run:
            return False
        if request.state == "running":
            return self._run_on(request, tokens)
        return self._admit(request, tokens, reserve)

    def _run_on(self, request: RequestState, tokens: int | None) -> bool:
        """Run a running request.  What most plans are made of, so it asks nobody."""
        pending = count = request.pending_tokens
        if tokens is not None and tokens < count:
            count = tokens
        if self.tokens_left < count:
            count = self.tokens_left
        chunked = self._chunked
        if count < 1 or (count < pending and not chunked):
            return False
        size = self._block_size
        room = request.held_blocks * size - request.computed_tokens
        if count > room:
            free = self.free_blocks - (self._watermark_blocks if self.admits else 0)
            needed = (count - room + size - 1) // size
            if needed > free:
                if free < 0 or not chunked or room + free * size < 1:
                    return False
                count, needed = room + free * size, free
            self.free_blocks -= needed
            self._taken_blocks[request.id] = needed
        self.tokens_left -= count
        self._run[request.id] = count
        return True

    def _admit(self, request: RequestState, tokens: int | None, reserve: int) -> bool:
        """Run a request that is not running yet, or not any more."""
        if self.sequences_left < 1 or self.tokens_left < 1:
            return False
        done, pending = request.computed_tokens, request.pending_tokens
        if request.state != "swapped":
            done = self.state.cached_tokens(request)
            pending -= done
        count = min(pending, self.tokens_left, pending if tokens is None else tokens)
        if count < 1 or (count < pending and not self._chunked):
            return False
        needed = self._blocks_to_admit(request, max(done + count, reserve))
        if needed > self.free_blocks - self._watermark_blocks:
            return False
        self.free_blocks -= needed
        self.tokens_left -= count
        self.sequences_left -= 1
        self.admits = True
        self._run[request.id] = count
        if reserve:
            self._reserve[request.id] = reserve
        return True

    def _is_out(self, request: RequestState) -> bool:
        return request.id in self._preempt or request.id in self._swap

    def _blocks_to_admit(self, request: RequestState, tokens: int) -> int:
        if self.preempts:
            # In an iteration that preempts, an admission is counted without its hits: they may
            # be on the very blocks that are given back.
            return -(-tokens // self._block_size)
        return self.state.blocks_for(request, tokens)

    def preempt(self, request: RequestState) -> bool:
        """Preempt a running request, to be recomputed.  Takes it out of the run, if it is there.

        False if it is not running, or already preempted; and if the draft admits somebody: preempt
        first, since what is given back may hold the hits of those admitted.
        """
        if self.admits or request.state != "running" or self._is_out(request):
            return False
        self._give_up(request)
        self._preempt[request.id] = None
        return True

    def swap(self, request: RequestState) -> bool:
        """Swap a running request out.

        False as for :meth:`preempt`, and if it is in a step in flight, or does not fit the swap
        space.
        """
        if self.admits or request.state != "running" or self._is_out(request):
            return False
        needed = -(-request.computed_tokens // self._block_size)
        if request.in_flight or needed > self._free_host_blocks:
            return False
        self._give_up(request)
        self._swap[request.id] = None
        self._free_host_blocks -= needed
        return True

    def _give_up(self, request: RequestState) -> None:
        tokens = self._run.pop(request.id, 0)
        self.tokens_left += tokens
        self.free_blocks += self._taken_blocks.pop(request.id, 0)
        self.free_blocks += self.state.blocks_freed(request)
        self._coming_blocks += request.held_blocks if request.in_flight else 0
        self.sequences_left += 1

    def run_preempting(
        self,
        request: RequestState,
        *,
        order: Sequence[RequestState] | None = None,
        swap: bool = False,
    ) -> bool:
        """Run a running request; for want of blocks, preempt the latest admitted ones first.

        In the end the request itself (survey K12, K14).  With ``order``, the running requests in
        another order than that of their admission, victims are taken from its end.  With ``swap``
        they are swapped out where they can be.  Nobody is preempted for blocks that will
        be free once the steps in flight are retired: then the request waits.  False if it is not
        run: there is no budget, it is not ready, waits for blocks, or was preempted.
        """
        if not request.pending_tokens or self.tokens_left < 1 or self._is_out(request):
            return False
        if request.state != "running" or request.id in self._run:
            return False
        while not self.run(request):
            if self._coming_blocks or not self._wants_blocks(request):
                return False
            victim = (
                self._latest(request, self.state.running if order is None else order) or request
            )
            # A draft that admits somebody may not preempt any more: then the request waits.
            if not (swap and self.swap(victim)) and not self.preempt(victim):
                return False
            if victim is request:
                return False
        return True

    def _wants_blocks(self, request: RequestState) -> bool:
        """Whether blocks are what is missing for even one token of the request."""
        count = 1 if self._chunked else request.pending_tokens
        if count > self.tokens_left:
            return False
        room = request.held_blocks * self._block_size - request.computed_tokens
        return count > room + self.free_blocks * self._block_size

    def _latest(
        self, after: RequestState | None, order: Sequence[RequestState]
    ) -> RequestState | None:
        for request in reversed(order):
            if after is not None and request.id == after.id:
                return None
            if not self._is_out(request):
                return request
        return None

    def preempt_latest(self, after: RequestState | None = None) -> bool:
        """Preempt the latest admitted running request that is not preempted yet.

        With ``after``, only one that was admitted after that request.  False if there is none.
        """
        victim = self._latest(after, self.state.running)
        return victim is not None and self.preempt(victim)

    def plan(self) -> Plan:
        """The plan."""
        return Plan(
            tuple(self._run.items()),
            tuple(self._preempt),
            tuple(self._swap),
            tuple(self._reserve.items()),
        )


@runtime_checkable
class SchedulerPolicy(Protocol):
    """A policy.  A class is checked by being called without arguments once per run."""

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration.

        May also have a class attribute ``promises`` (a :class:`Promises`), which is checked.
        """
        ...
