"""The read-only look at a scheduler's state that audits compare with the checks' own books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvproof.invariants.scheduling.vocabulary import QueueState


@runtime_checkable
class SchedulerView(Protocol):
    """State of a scheduler.  Requests are named by their rank of arrival."""

    def live(self) -> Sequence[int]:
        """Live requests, by arrival."""
        ...

    def standing(self, request: int) -> tuple[QueueState, int, int]:
        """Of a live request: its queue, output tokens sampled so far, and preemptions."""
        ...

    def cache_request(self, request: int) -> int | None:
        """What the cache calls a live request; None if it was never admitted."""
        ...

    def metrics(self) -> Mapping[str, int]:
        """The scheduler's figures, by the chapter's names."""
        ...

    def request_metrics(self, request: int) -> Mapping[str, int]:
        """The figures of a live request, by the chapter's names; times in ns, 0 until known."""
        ...
