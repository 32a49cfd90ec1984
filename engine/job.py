"""One request of a client, as the scheduler knows it, and what it would find in the cache."""

from __future__ import annotations

from typing import NamedTuple

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.policy import RequestState
from kvproof.engine.request import Request
from kvproof.invariants.operations import Admit, Arrive
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.scheduling.vocabulary import QueueState


class Job:
    """One request of a client, from arrival to end."""

    __slots__ = (
        "admit",
        "arrival_ns",
        "cache",
        "first_token_ns",
        "id",
        "last_token_ns",
        "max_tokens",
        "output",
        "outputs",
        "priority",
        "promotions",
        "prompt_tokens",
        "rank",
        "scheduled_ns",
        "state",
        "waiting_state",
    )

    def __init__(self, number: int, operation: Arrive, arrival_ns: int) -> None:
        self.id = number
        self.admit = Admit(operation.prompt, operation.salt, operation.adapter)
        self.arrival_ns = arrival_ns
        self.priority = operation.priority
        self.prompt_tokens = prompt_length(operation.prompt)
        self.output = operation.output
        """Output tokens after which it stops."""
        self.max_tokens = max(operation.max_tokens, operation.output)
        self.outputs = 0
        """Output tokens delivered."""
        self.state: QueueState = "waiting"
        self.cache: Request | None = None
        """What the cache knows of it; None before its first admission."""
        self.rank = -1
        """Of its first admission."""
        self.promotions = 0
        """Copies towards the device that were begun for it."""
        self.scheduled_ns = self.first_token_ns = self.last_token_ns = -1
        self.waiting_state = RequestState(
            number,
            "waiting",
            arrival_ns,
            self.priority,
            self.prompt_tokens,
            self.max_tokens,
            pending_tokens=self.prompt_tokens,
        )

    @property
    def preemptions(self) -> int:
        """Times it was preempted or swapped out."""
        return self.cache.epoch if self.cache is not None else 0

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV it has in the end, at most."""
        return self.prompt_tokens + self.max_tokens - 1


class Hit(NamedTuple):
    """What a request that is to be admitted finds in the cache, or on the host."""

    cached_tokens: int
    blocks: int
    """Device blocks that hold them."""
    taken: int
    """Blocks that its hit takes from the free ones: cached-free ones, or for what is swapped."""

    def blocks_for(self, slots: int, block_size: int) -> int:
        """Free blocks that it takes to give blocks to ``slots`` positions."""
        needed = blocks_needed(slots, block_size)
        if self.cached_tokens and not self.blocks:
            return max(needed, self.taken)  # from the host: all into new blocks
        return max(0, needed - self.blocks) + self.taken


def job_times(job: Job) -> dict[str, int]:
    """Queue, prefill and decode time in ns, as far as they have passed."""
    scheduled, first = job.scheduled_ns, job.first_token_ns
    return {
        "queue_time_ns": scheduled - job.arrival_ns if scheduled >= 0 else 0,
        "prefill_time_ns": first - scheduled if first >= 0 else 0,
        "decode_time_ns": job.last_token_ns - first if first >= 0 else 0,
    }


def cached(job: Job) -> Request:
    assert job.cache is not None, "an admitted request is known to the cache"
    return job.cache


def known_tokens(job: Job) -> int:
    """Tokens of the request that are known, or (in steps in flight) have slots already."""
    grown = len(cached(job).tokens) - job.prompt_tokens
    return job.prompt_tokens + max(grown, job.outputs)
