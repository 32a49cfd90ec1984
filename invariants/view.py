"""The read-only look at a subject's state that checkers compare with their own books.

Cheap calls (``free_count``, ``ref_counts(group)[block]``, ``index(group).get``, ``standing``)
are made after operations for what they touched; the rest only by a full audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from kvproof.invariants.operations import Tier

RequestState = Literal["running", "preempted", "swapped", "loading"]
Standing = tuple[RequestState, int, int, tuple[int, ...]]
"""A live request's state, its tokens (prompt, grown and sampled), how many of them are computed
(steps in flight excluded), and the rows of its block table in each group.  A request is loading
from its late resumption until the copy of its KV ends; nothing of it counts as computed."""


@runtime_checkable
class View(Protocol):
    """State of a paged KV cache.  Block ids and request ids are plain ints."""

    def free_count(self, group: int) -> int:
        """Blocks that an allocation may take: empty-free plus cached-free."""
        ...

    def ref_counts(self, group: int) -> Sequence[int]:
        """Reference count by block id, reserved blocks included; indexing must be cheap.

        Where a subject keeps no counts, its adapter derives them (see ``Semantics``).
        """
        ...

    def free_blocks(self, group: int) -> Sequence[int]:
        """Ids of all free blocks; where the subject promises an order, the next victim first."""
        ...

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        """The prefix cache: key to the blocks that are findable under it; look-up must be cheap."""
        ...

    def requests(self) -> Sequence[int]:
        """Live requests, by first admission."""
        ...

    def standing(self, request: int) -> Standing:
        """Where a live request stands; must be cheap."""
        ...

    def table(self, request: int, group: int) -> Sequence[int]:
        """Physical block by logical block of a live request; empty while preempted."""
        ...

    def steps_in_flight(self) -> Sequence[int]:
        """Launched, unretired steps, oldest first."""
        ...

    def metrics(self) -> Mapping[str, int]:
        """The scheduler figures that the subject exports, by the chapter's names."""
        ...

    def request_metrics(self, request: int) -> Mapping[str, int]:
        """The per-request figures that the subject exports for a live request."""
        ...


@runtime_checkable
class RecentView(View, Protocol):
    """When what is cached was last used; asked only where this decides what is evicted first."""

    def last_uses(self, group: int) -> Mapping[int, float]:
        """Findable blocks, and the time of each one's last use on a clock that only grows.

        Where prefixes outlive their extensions, a use of an extension is one of the prefix.
        """
        ...


@runtime_checkable
class TieredView(View, Protocol):
    """State of the tiers below the device as well; asked only of subjects that have them."""

    def free_tier_count(self, tier: Tier, group: int) -> int:
        """Slots of host or disk that a transfer may take: free, or evictable, less withheld."""
        ...

    def tier_index(self, tier: Tier, group: int) -> Mapping[bytes, int]:
        """What is findable there: key to slot; look-up must be cheap."""
        ...

    def tier_pins(self, tier: Tier, group: int) -> Sequence[int]:
        """By slot: how many transfers in flight use it; indexing must be cheap."""
        ...

    def victims(self, tier: Tier, group: int) -> Sequence[int]:
        """Evictable slots, the next victim first; of the device, cached-free blocks."""
        ...

    def transfers(self) -> Sequence[int]:
        """Transfers in flight, by their start."""
        ...

    def tier_content(self, tier: Tier, group: int, slot: int) -> bytes | None:
        """The key under which the bytes that are really there were computed.

        Read and verified on disk; None if they are damaged.  Of the device: by block id.
        """
        ...
