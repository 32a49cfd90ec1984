"""What a subject answers to an operation."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["done", "refused", "skipped"]
Answer = Literal["miss", "hit", "hit_pending", "retry"]
"""What the tiers below the device say about a block: it is not there, it is, it is on its way,
or a tier has not answered yet (survey row T09)."""

# Reasons of refusal.  A checker predicts refusals exactly, so they are part of the vocabulary.
NO_FREE_BLOCKS = "no_free_blocks"
"""The blocks that the operation needs are not free."""
NOT_COMPUTED = "not_computed"
"""Fork of a request of which some tokens are not computed yet."""
BLOCKS_IN_USE = "blocks_in_use"
"""Reset of the prefix cache while a block is referenced."""
NOTHING_TO_RUN = "nothing_to_run"
"""Launch without a running request that has uncomputed tokens."""
RUN_AHEAD_LIMIT = "run_ahead_limit"
"""Launch while as many steps are in flight as the subject allows."""
TOO_MANY_REQUESTS = "too_many_requests"
"""Admission, resumption or fork beyond the limit of running requests."""
LARGER_THAN_POOL = "larger_than_pool"
"""The request could not fit an empty pool: it can never be admitted."""
NO_HOST_BLOCKS = "no_host_blocks"
"""The swap space has no room for the blocks of the request."""
IN_FLIGHT = "in_flight"
"""Swap of a request that a step in flight carries: its bytes are not final."""
LARGER_THAN_MODEL = "larger_than_model"
"""Prompt and longest output together are more tokens than the model can attend to."""
POLICY_FAILED = "policy_failed"
"""The scheduler's policy failed, or its plan breaks the contract; nothing of it was applied."""
NOT_LAUNCHED = "not_launched"
"""The subject releases only requests that are computed to their end: no token of theirs waits for
a step or is in one."""

NO_DISK_BLOCKS = "no_disk_blocks"
"""The disk has no room for the blocks."""
DISK_ERROR = "disk_error"
"""The disk does not take the note that blocks are dropped."""
OFFLOAD_OFF = "offload_off"
"""The tier is not there, or this meaning of offload is not on."""
NOTHING_TO_MOVE = "nothing_to_move"
"""No block is there that the copy could begin with."""
HIT_PENDING = "hit_pending"
"""Admission that waits for KV on its way to the device."""
RETRY = "retry"
"""A tier that has to be asked has not answered yet."""
LOADING = "loading"
"""The request's KV is on its way back from the host."""


class Outcome(Struct, frozen=True, gc=False, omit_defaults=True):
    """Done, refused for a reason, or skipped because there was nothing to apply it to."""

    status: Status
    reason: str | None = None
    request: int | None = None
    """Identity of the request that the operation was applied to, or that it created."""
    cached_tokens: int = 0
    """Admit and resume: prompt tokens whose KV came from the prefix cache."""
    count: int = 0
    """Evict: blocks evicted.  Launch: tokens scheduled.  Retire: requests in the step."""
    children: tuple[int, ...] = ()
    """Fork: identities of the children."""
    lookup: Literal["", "miss", "hit", "hit_pending", "retry"] = ""
    """Admit, resume and promote with prefix offload: what the tiers below say about the first
    block that the device lacks; empty if it lacks none."""
    transfers: tuple[int, ...] = ()
    """Transfers that the operation started, or that it was about."""


SKIPPED = Outcome("skipped")
