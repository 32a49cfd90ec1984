"""HOLD: only running requests hold blocks.

Verifies: that a request that finished or was cancelled is not in the cache any more; that a
preempted or swapped one holds no block of the device; in audits, that the cache knows no request
beside those that were admitted and are live.

Does not verify: a request that ends while a copy brings KV into its blocks, until that has ended;
a preempted request that is said to hold a prefix hit already (``BlocksHeld``);
that blocks which a step in flight still uses are given back after it, and to whom (the cache's
EXCL, REF and QUIES).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    RequestCancelled,
    RunningReset,
    Scheduled,
)


class Hold(SchedulingCheck):
    """Blocks of those that do not run."""

    claims = (
        Claim(
            "A request that ends gives back its blocks when it ends.",
            "chapter, life cycle: request ends → blocks released or explicitly retained for "
            "reuse; bugs B04, B10, B102; survey E07, Q05, Q19",
        ),
        Claim(
            "A preempted request holds no block while it waits.",
            "bug B73; survey K08, K13",
        ),
    )
    positive_control = "finished-request-keeps-its-blocks"

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            Completed: self._ended,
            RequestCancelled: self._ended,
            Scheduled: self._scheduled,
            RunningReset: self._reset,
        }

    def _ended(self, event: Event) -> None:
        for request in self.books.ended:
            self.checked += 1
            model = self.books.cache.requests.get(_name(request))
            if model is not None and not self.books.cache.awaits_load(model):
                held = sum(map(len, model.tables))
                self.fail(
                    f"request {request.id} has ended after {request.sampled} output tokens, but "
                    f"is still in the cache, with {held} blocks",
                    request=request.id,
                )

    def _scheduled(self, event: Scheduled) -> None:
        for number in (*event.preempted, *event.swapped):
            request = self.books.displaced.get(number)
            if request is not None:
                self._holds_nothing(request)

    def _reset(self, event: RunningReset) -> None:
        for number in event.preempted:
            request = self.books.displaced.get(number)
            if request is not None:
                self._holds_nothing(request)

    def _holds_nothing(self, request: LiveRequest) -> None:
        self.checked += 1
        held = self.books.held_blocks(request)
        if held and not request.holds:
            self.fail(
                f"request {request.id} is {request.state}, but still holds {held} blocks",
                request=request.id,
            )

    def audit(self) -> None:
        for request in self.books.displaced.values():
            self._holds_nothing(request)
        admitted = {_name(request) for request in self.books.live.values()}
        for name, model in self.books.cache.requests.items():
            if name not in admitted and not self.books.cache.awaits_load(model):
                self.fail(f"the cache holds a request {name} that no live request is")
                return


def _name(request: LiveRequest) -> int:
    """What the cache calls it; no name of the cache if it was never admitted."""
    return -1 if request.cache_request is None else request.cache_request
