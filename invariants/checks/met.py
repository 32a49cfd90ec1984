"""MET: exported figures are the figures.

Verifies: in audits, each scheduler and per-request metric that the subject declares as exported,
against the same figure recomputed from operations, outcomes and events.

Does not verify: figures that depend on time (the trace replay computes those from the clock);
figures that the subject does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvproof.invariants.books import RequestModel
from kvproof.invariants.events import BlocksEvicted, Event, StepLaunched
from kvproof.invariants.operations import Admit, Operation, Preempt
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim, EventHandler


class Met(Check):
    """Metrics."""

    claims = (
        Claim(
            "Used and free blocks add up to the total, and bytes are blocks times their size.",
            "chapter, what the scheduler should expose; bugs B160, B161; survey X01 to X04",
        ),
        Claim(
            "Prefix hits count tokens once per request, at its first admission.",
            "bugs B158, B159; survey X11, R24",
        ),
        Claim("Evictions count the blocks that became unfindable.", "bugs B162, B163; survey X10"),
        Claim(
            "Admissions, preemptions, batch sizes and sequence counts are those that happened.",
            "chapter, what the scheduler should expose; survey X05 to X09, X14, Y01 to Y03, Y09",
        ),
    )
    positive_control = "hits-counted-again-on-resume"
    concludes_on = (Admit, Preempt)
    concludes_when = ("done",)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._counts = dict.fromkeys(
            ("admissions", "preemptions", "evictions", "hits", "queries", "steps", "batch"), 0
        )
        self._expected: dict[str, Callable[[], int]] = {
            "kv_capacity_bytes": lambda: self._blocks_total() * self._block_bytes,
            "kv_bytes_used": lambda: self._blocks_used() * self._block_bytes,
            "kv_blocks_total": self._blocks_total,
            "kv_blocks_free": lambda: self._blocks_total() - self._blocks_used(),
            "live_cached_tokens": lambda: sum(r.computed for r in self.books.running),
            "active_sequences": lambda: len(self.books.running),
            "waiting_sequences": lambda: len(self.books.preempted),
            "admissions": lambda: self._counts["admissions"],
            "preemptions": lambda: self._counts["preemptions"],
            "evictions": lambda: self._counts["evictions"],
            "prefix_cache_hits": lambda: self._counts["hits"],
            "prefix_cache_queries": lambda: self._counts["queries"],
            "iterations": lambda: self._counts["steps"],
            "batch_size_by_iteration": lambda: self._counts["batch"],
        }
        self._expected_per_request: dict[str, Callable[[RequestModel], int]] = {
            "input_tokens": lambda r: r.input_tokens,
            "cached_tokens": lambda r: r.cached_tokens,
            "allocated_blocks": lambda r: sum(len(table) for table in r.tables),
            "preemptions": lambda r: r.epoch,
        }

    @property
    def _block_bytes(self) -> int:
        return self.block_size * self.books.configuration.kv_bytes_per_token

    def _blocks_total(self) -> int:
        return sum(group.usable for group in self.books.groups)

    def _blocks_used(self) -> int:
        return sum(group.referenced for group in self.books.groups)

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {BlocksEvicted: self._evicted, StepLaunched: self._launched}

    def _evicted(self, event: BlocksEvicted) -> None:
        self._counts["evictions"] += len(event.blocks)

    def _launched(self, event: StepLaunched) -> None:
        self._counts["steps"] += 1
        self._counts["batch"] = len(event.items)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if isinstance(operation, Preempt):
            self._counts["preemptions"] += 1
        elif outcome.request is not None:
            request = self.books.requests[outcome.request]
            self._counts["admissions"] += 1
            self._counts["hits"] += outcome.cached_tokens
            self._counts["queries"] += request.input_tokens

    def audit(self) -> None:
        if not self.semantics.exports and not self.semantics.exports_per_request:
            return
        exported = self.view.metrics()
        for name in self.semantics.exports:
            expected = self._expected[name]()
            if exported[name] != expected:
                self.fail(f"{name} is exported as {exported[name]}, but it is {expected}")
                return
        for request in self.books.requests.values():
            self._audit_request(request)

    def _audit_request(self, request: RequestModel) -> None:
        exported = self.view.request_metrics(request.id)
        for name in self.semantics.exports_per_request:
            expected = self._expected_per_request[name](request)
            if exported[name] != expected:
                self.fail(
                    f"{name} of request {request.id} is exported as {exported[name]}, but it is "
                    f"{expected}",
                    request=request.id,
                )
                return
