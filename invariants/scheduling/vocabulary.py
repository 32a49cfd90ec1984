"""The scheduler's vocabulary: limits, plans, promises, and the events of its iterations.

Requests are named by their rank of arrival (0, 1, 2, …), from arrival to end.  The cache below
names them otherwise, by the order of admission; ``Scheduled`` tells both names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvproof.invariants.events import Event, TransferKind

QueueState = Literal["waiting", "running", "preempted", "swapped"]
"""Of a live request: waiting since its arrival; running; preempted, to be recomputed; swapped out
to the host, to be copied back."""


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What bounds an iteration, beside the pool; part of the configuration, so of each case."""

    token_budget: Annotated[int, Meta(ge=1, le=1 << 22)] = 8192
    """Tokens computed in one iteration at most (survey Q09)."""
    watermark_blocks: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Blocks that must still be free after an iteration that admitted a request (survey 2.4)."""
    max_model_tokens: Annotated[int, Meta(ge=1, le=1 << 22)] = 1 << 22
    """Prompt and output of a request at most: what a contiguous cache would reserve."""
    chunked_prefill: bool = True
    """A prompt may be computed over several iterations; else in one (survey Q08)."""


class Promises(Struct, frozen=True, omit_defaults=True):
    """What a policy promises beyond the contract; only what is promised is checked.

    The contract, which binds every policy: plans name live, ready requests once each, and stay
    within the token budget, the number of sequences, the free blocks and the watermark.
    """

    fcfs: bool = False
    """Never-admitted requests are admitted in the order of arrival (those of one iteration count
    as admitted together), and none of them while a preempted or swapped one waits (survey Q12,
    Q16)."""
    strict_priority: bool = False
    """Among the waiting, preempted and swapped ones, none is admitted while one of a smaller
    priority number waits; no request is preempted while one of a larger number keeps running."""
    no_eviction: bool = False
    """A request that has started is never preempted, in either way (survey K04)."""
    no_barrier: bool = False
    """A running, ready request is run in each iteration in which token budget is left and a block
    for it, if it needs one, is free (survey Q06)."""
    work_conserving: bool = False
    """Some request is admitted in each iteration that preempts nobody, if budget, sequences and
    blocks are left for every request that waits, to its end and with all that the running ones
    may still need (survey E09, E10)."""
    copies_end_in: Annotated[int, Meta(ge=1)] | None = None
    """Iterations, at most, that a copy is in flight.  None: each is told of, and when it is due."""
    starvation_bound: Annotated[int, Meta(ge=0)] | None = None
    """Iterations in a row, at most, that run a request which arrived later, but not this live,
    ready one (survey Q13)."""


class Plan(Struct, frozen=True):
    """A policy's answer: what one iteration does.

    ``preempt`` and ``swap`` come first, so that their blocks can be used; then, in the order of
    ``run``, blocks are allocated for all parts, and one step over them is launched.
    """

    run: tuple[tuple[int, int], ...] = ()
    """(request, tokens): compute so many tokens of this request, at least one.  A request that
    waits, or was preempted or swapped out, is admitted by being run."""
    preempt: tuple[int, ...] = ()
    """Running requests that give back their blocks, to be recomputed later."""
    swap: tuple[int, ...] = ()
    """Running requests, in no step in flight, whose blocks are copied to the host."""
    reserve: tuple[tuple[int, int], ...] = ()
    """(request, tokens): of requests that this plan admits, reserve blocks for so many tokens from
    the start on, rather than for those that have to be computed."""


# -- events ------------------------------------------------------------------------------------


class SchedulerEvent(Event, frozen=True, gc=False):
    """Base of the scheduler's events."""


class RequestArrived(SchedulerEvent, frozen=True, gc=False):
    """A request joined the waiting ones."""

    request: int
    arrival_ns: int
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    """Output tokens after which it will stop; the policy is not told."""
    priority: int


class BlocksCounted(SchedulerEvent, frozen=True, gc=False):
    """A policy asked how many free blocks the admission of a request would take."""

    request: int
    tokens: int
    """Positions, from the start on, that are to have blocks."""
    blocks: int
    """The answer."""
    cached_tokens: int
    """Of the positions, those whose KV is cached."""


class BlocksHeld(SchedulerEvent, frozen=True, gc=False):
    """A request that waits, or was preempted, holds blocks before it is run.

    They are those of its prefix hit, those that a copy is to fill, or what it shares with the
    request that it was forked from.
    """

    request: int
    cache_request: int
    """What the cache calls the request."""


class PlanRejected(SchedulerEvent, frozen=True, gc=False):
    """The policy failed, or its plan breaks the contract; nothing of it was applied."""

    kind: Literal[
        "exception", "hang", "wrong_type", "mutation", "unknown_request", "twice", "impossible",
        "budget", "sequences", "blocks", "watermark", "host_blocks", "chunk", "in_flight",
        "reserve",
    ]  # fmt: skip
    message: str
    """One sentence that points at the mistake."""
    state: str
    """What the policy was given, in short."""


class Part(Struct, frozen=True, gc=False, array_like=True):
    """One request's share of an iteration."""

    request: int
    tokens: int
    """Tokens computed."""
    cache_request: int
    """What the cache calls the request."""


class Scheduled(SchedulerEvent, frozen=True, gc=False):
    """An iteration was planned and applied."""

    iteration: int
    now_ns: int
    step: int | None
    """The step that was launched; None if nothing was run."""
    parts: tuple[Part, ...]
    admitted: tuple[int, ...]
    """Of the parts, those that were admitted for the first time; in the order of the plan."""
    resumed: tuple[int, ...]
    """… and those that came back after preemption or swap."""
    preempted: tuple[int, ...]
    swapped: tuple[int, ...]


class Completed(SchedulerEvent, frozen=True, gc=False):
    """A step was retired."""

    step: int
    now_ns: int
    sampled: tuple[int, ...]
    """Requests that got an output token, one each."""
    finished: tuple[int, ...]
    """Of these, the ones that stopped; they are no longer live."""
    misdelivered: tuple[int, ...] = ()
    """Requests whose clients were given other tokens than the model sampled for them."""


class RequestCancelled(SchedulerEvent, frozen=True, gc=False):
    """A live request was aborted."""

    request: int


class RunningReset(SchedulerEvent, frozen=True, gc=False):
    """The prefix cache is about to be reset, and these running requests were preempted for that.

    What steps in flight sample for them is dropped.
    """

    preempted: tuple[int, ...]


class Deferred(SchedulerEvent, frozen=True, gc=False):
    """Before a plan: KV of these waiting requests is on its way to the device.

    Neither they nor any that arrived after the first of them can be admitted.  That holds until
    the next event of this kind, which comes before each further plan up to one with nobody.
    """

    requests: tuple[int, ...]
    now_ns: int


class TransferQueued(SchedulerEvent, frozen=True, gc=False):
    """The scheduler has started a copy; copies of one kind are served one after another."""

    transfer: int
    kind: TransferKind
    blocks: int
    bytes: int
    now_ns: int
    due_ns: int
    """When all of its bytes will have arrived."""
    latency_ns: int
    ps_per_byte: int
    """What it takes, once its turn has come: so long, and so much for each byte."""


class TransferDelivered(SchedulerEvent, frozen=True, gc=False):
    """The scheduler has noticed that a copy has arrived, and ended it."""

    transfer: int
    now_ns: int
