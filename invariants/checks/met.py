"""MET: exported figures are the figures.

Verifies: in audits, each scheduler and per-request metric that the subject declares as exported,
against the same figure recomputed from operations, outcomes and events.

Does not verify: figures that depend on time (the trace replay computes those from the clock);
figures that the subject does not declare.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.books import RequestModel
from kvproof.invariants.property import Check, Claim
from kvproof.invariants.subject import Semantics


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
    counts_itself = True

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        return bool(semantics.exports or semantics.exports_per_request)

    def audit(self) -> None:
        semantics = self.semantics
        self.checked += self.promised(semantics)
        if semantics.exports:
            self._compare(self.view.metrics(), self._expected(), semantics.exports)
        if semantics.exports_per_request:
            for request in self.books.requests.values():
                self._compare(
                    self.view.request_metrics(request.id),
                    self._expected_of(request),
                    semantics.exports_per_request,
                    request.id,
                )

    def _compare(
        self,
        exported: Mapping[str, int],
        expected: Mapping[str, int],
        names: tuple[str, ...],
        request: int | None = None,
    ) -> None:
        if exported == expected:
            return  # the usual case, if all that is known is exported
        for name in names:
            if exported[name] != expected[name]:
                whose = "" if request is None else f" of request {request}"
                self.fail(
                    f"{name}{whose} is exported as {exported[name]}, but it is {expected[name]}",
                    request=request,
                )
                return

    def _expected(self) -> dict[str, int]:
        """The scheduler's figures by the books."""
        books, figures = self.books, self.books.figures
        block_bytes = self.block_size * books.configuration.kv_bytes_per_token
        total = sum([group.usable for group in self.groups])
        used = sum([group.referenced for group in self.groups])
        return {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": used * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": total - used,
            "live_cached_tokens": sum([request.computed for request in books.running]),
            "active_sequences": len(books.running),
            "waiting_sequences": len(books.preempted),
            "admissions": figures.admissions,
            "preemptions": figures.preemptions,
            "evictions": figures.evictions,
            "prefix_cache_hits": figures.prefix_cache_hits,
            "prefix_cache_queries": figures.prefix_cache_queries,
            "host_offload_bytes": figures.blocks_offloaded * block_bytes,
            "host_promotions": figures.blocks_promoted,
            "iterations": figures.iterations,
            "batch_size_by_iteration": figures.batch_size,
        }

    def _expected_of(self, request: RequestModel) -> dict[str, int]:
        """One request's figures by the books."""
        return {
            "input_tokens": request.input_tokens,
            "cached_tokens": request.cached_tokens,
            "allocated_blocks": sum(map(len, request.tables)),
            "preemptions": request.epoch,
        }
