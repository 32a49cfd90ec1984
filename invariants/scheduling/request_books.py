"""What a live request is to a scheduler, by the events alone; steps in flight, and figures."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from kvproof.invariants.operations import Arrive
from kvproof.invariants.scheduling.vocabulary import QueueState, RequestArrived
from kvproof.invariants.tags import Tags, prompt_tags


class LiveRequest:
    """What a live request must look like to the scheduler."""

    __slots__ = (
        "adapter",
        "arrival",
        "arrival_ns",
        "cache_request",
        "cached_tokens",
        "computed",
        "ended",
        "epoch",
        "first_run_ns",
        "first_token_ns",
        "holds",
        "id",
        "in_flight",
        "last_run",
        "last_token_ns",
        "launched",
        "max_tokens",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "sampled",
        "sampling",
        "scheduled",
        "state",
        "tags",
    )

    def __init__(self, event: RequestArrived, iteration: int, arrival: Arrive | None) -> None:
        self.id = event.request
        self.prompt_tokens = event.prompt_tokens
        self.max_tokens = event.max_tokens
        self.output_tokens = event.output_tokens
        self.priority = event.priority
        self.arrival_ns = event.arrival_ns
        self.adapter = 0 if arrival is None else arrival.adapter
        self.arrival = arrival
        """The operation that brought it, which alone knows the prompt."""
        self.tags: Tags[int] | None = None
        """Tags of the prompt, while it waits; made when first asked for."""
        self.state: QueueState = "waiting"
        self.cache_request: int | None = None
        self.holds = False
        """Whether it was given blocks before it is run, for the first time or again."""
        self.cached_tokens = 0
        """Hit at its first admission."""
        self.sampled = 0
        """Output tokens delivered …"""
        self.sampling = 0
        """… and those that steps in flight are sampling."""
        self.computed = 0
        self.scheduled = 0
        """Tokens computed, or being computed by a step in flight."""
        self.epoch = 0
        """Times it was preempted: what a step of an older epoch computed is void."""
        self.launched = 0
        """Steps in flight that carry it, of its present epoch …"""
        self.in_flight = 0
        """… and of all: what was launched before a preemption, too."""
        self.preemptions = 0
        self.ended = False
        self.last_run = iteration
        """Iteration that ran it last; before that, the one before which it arrived."""
        self.first_run_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None

    @property
    def known(self) -> int:
        """Tokens of prompt and output, those that are being sampled included."""
        return self.prompt_tokens + self.sampled + self.sampling

    @property
    def final_tokens(self) -> int:
        """Prompt and longest output; the KV of the last token is never computed."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens that a step could compute now.

        Once the longest output is sampled or being sampled, its last token need not be computed:
        it will end.
        """
        outputs = self.sampled + self.sampling
        return self.prompt_tokens + outputs - self.scheduled - (outputs >= self.max_tokens)

    @property
    def ready(self) -> bool:
        """Whether it could be run, whatever is decided about steps of before a preemption."""
        if self.state == "running":
            return self.pending > 0
        return self.in_flight == 0

    def prompt(self) -> Tags[int] | None:
        """Tags of the prompt of one that waits; None if nobody told what it is."""
        if self.tags is None and self.arrival is not None:
            arrival = self.arrival
            self.tags = prompt_tags(arrival.prompt, arrival.salt, arrival.adapter, arrival.media)
        return self.tags


class Item(Struct, frozen=True, gc=False):
    """One request's share of an iteration, by the model."""

    request: LiveRequest
    tokens: int
    start: int
    end: int
    pending: int
    """Tokens that could be computed, when it was run."""
    samples: bool
    """Whether the last pending token is among them: then an output token is sampled."""
    epoch: int


class Flight:
    """A step in flight."""

    __slots__ = ("items", "number")

    def __init__(self, number: int, items: list[Item]) -> None:
        self.number = number
        self.items = items


class Figures:
    """What happened so far, in numbers that only go up, and the size of the latest batch."""

    __slots__ = (
        "admissions",
        "batch_size",
        "copies",
        "copy_busy_ns",
        "copy_time_ns",
        "offloaded_blocks",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "promoted_blocks",
        "resumptions",
        "stall_ns",
        "stalls",
        "steps",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.resumptions = 0
        self.preemptions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0
        self.offloaded_blocks = 0
        self.promoted_blocks = 0
        self.steps = 0
        self.batch_size = 0
        self.stalls = 0
        """Request-iterations that were deferred, and the time until the next plan of each."""
        self.stall_ns = 0
        self.copies: Counter[str] = Counter()
        """By kind: copies that were delivered, how long that took from their start, and how long
        they were served."""
        self.copy_time_ns: Counter[str] = Counter()
        self.copy_busy_ns: Counter[str] = Counter()
