"""The read-only look at a subject's state that checkers compare with their own books.

Cheap calls (``free_count``, ``ref_counts(group)[block]``, ``table``) are made after each
operation for what it touched; the rest only by a full audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

RequestState = Literal["running", "preempted"]


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

    def state(self, request: int) -> RequestState:
        """Where a live request stands."""
        ...

    def table(self, request: int, group: int) -> Sequence[int]:
        """Physical block by logical block of a live request; empty while preempted."""
        ...

    def length(self, request: int) -> int:
        """Tokens of a live request: prompt, grown and sampled."""
        ...

    def computed(self, request: int) -> int:
        """Leading tokens of a live request whose KV is computed (steps in flight excluded)."""
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
