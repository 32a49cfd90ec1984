"""MET: exported figures are the figures.

Verifies: in audits, each scheduler and per-request metric that the subject declares as exported,
against the same figure recomputed from operations, outcomes and events.

Does not verify: figures that depend on time (the trace replay computes those from the clock);
figures that the subject does not declare.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.operations import Admit, Operation, Promote
from kvproof.invariants.outcomes import HIT_PENDING, RETRY, Outcome
from kvproof.invariants.property import Check, Claim
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.subject import Semantics
from kvproof.invariants.tier_books import Tiers

_WITHOUT_TIERS = dict.fromkeys(
    (
        "host_offload_bytes",
        "host_promotions",
        "prefix_store_bytes",
        "prefix_load_bytes",
        "suspend_out_bytes",
        "suspend_in_bytes",
        "disk_store_bytes",
        "disk_load_bytes",
        "device_queries",
        "host_queries",
        "disk_queries",
        "device_hits",
        "host_hits",
        "disk_hits",
        "host_evictions",
        "disk_evictions",
        "corrupt_blocks",
        "transfers_failed",
        "stalls",
        "capacity_gained_tokens",
        "suspended_sequences",
    ),
    0,
)


FINDABLE = "findable_tokens"
"""A figure of requests beyond those of the chapter."""


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
            "Bytes between tiers are those of copies that completed, and a tier is asked only for "
            "what those above it lack.",
            "bugs B158, B161; survey M03, M06, E18",
        ),
        Claim(
            "Admissions, preemptions, batch sizes and sequence counts are those that happened.",
            "chapter, what the scheduler should expose; survey X05 to X09, X14, Y01 to Y03, Y09",
        ),
    )
    positive_control = "hits-counted-again-on-resume"
    counts_itself = True
    concludes_on = (Admit, Promote)
    concludes_when = ("refused",)

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        return bool(semantics.exports or semantics.exports_per_request)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._of_requests = self.semantics.exports_per_request

    def audit(self) -> None:
        semantics = self.semantics
        self.checked += self.promised(semantics)
        if semantics.exports:
            self._compare(self.view.metrics(), self._expected(), semantics.exports)
        if self._of_requests:
            for request in self.books.requests.values():
                self._compare(
                    self.view.request_metrics(request.id),
                    self._expected_of(request),
                    self._of_requests,
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

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        tiers = self.books.tiers
        if tiers is not None and outcome.reason in (HIT_PENDING, RETRY):
            tiers.figures.stalls += 1

    def _expected(self) -> dict[str, int]:
        """The scheduler's figures by the books."""
        books, figures = self.books, self.books.figures
        block_bytes = self.block_size * books.configuration.kv_bytes_per_token
        pools = self.groups[:1] if self.semantics.shared_pool else self.groups
        total = sum([group.usable for group in pools])
        used = sum([group.referenced for group in pools])
        return {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": used * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": sum([group.free for group in pools]),
            "live_cached_tokens": sum([request.computed for request in books.running]),
            "active_sequences": len(books.running),
            "waiting_sequences": len(books.preempted),
            "admissions": figures.admissions,
            "preemptions": figures.preemptions,
            "evictions": figures.evictions,
            "prefix_cache_hits": figures.prefix_cache_hits,
            "prefix_cache_queries": figures.prefix_cache_queries,
            "iterations": figures.iterations,
            "batch_size_by_iteration": figures.batch_size,
            "suspensions": figures.suspensions,
            **(_WITHOUT_TIERS if books.tiers is None else self._of_tiers(books.tiers, block_bytes)),
        }

    def _of_tiers(self, tiers: Tiers, block_bytes: int) -> dict[str, int]:
        """What the hierarchy did."""
        figures = tiers.figures
        moved = figures.moved
        return {
            "host_offload_bytes": (moved["store"] + moved["swap_out"]) * block_bytes,
            "host_promotions": moved["promote"] + moved["swap_in"],
            "prefix_store_bytes": moved["store"] * block_bytes,
            "prefix_load_bytes": moved["promote"] * block_bytes,
            "suspend_out_bytes": moved["swap_out"] * block_bytes,
            "suspend_in_bytes": moved["swap_in"] * block_bytes,
            "disk_store_bytes": moved["demote"] * block_bytes,
            "disk_load_bytes": moved["fetch"] * block_bytes,
            **{f"{tier}_queries": count for tier, count in figures.queries.items()},
            **{f"{tier}_hits": count for tier, count in figures.hits.items()},
            "host_evictions": figures.evictions["host"],
            "disk_evictions": figures.evictions["disk"],
            "corrupt_blocks": figures.corrupt,
            "transfers_failed": figures.failed,
            "stalls": figures.stalls,
            "capacity_gained_tokens": self._gained(tiers) * self.block_size,
            "suspended_sequences": len(
                [r for r in self.books.requests.values() if r.suspended and not r.departing]
            ),
        }

    def _gained(self, tiers: Tiers) -> int:
        """Blocks that are findable below the device and not on it."""
        below: set[tuple[int, int]] = set()
        for tier in tiers.all:
            below.update((tier.group, tag) for tag in tier.slot_of)
        return len([1 for group, tag in below if tag not in self.groups[group].key_of_tag])

    def _expected_of(self, request: RequestModel) -> dict[str, int]:
        """One request's figures by the books."""
        figures = {} if FINDABLE not in self._of_requests else {FINDABLE: self._findable(request)}
        return figures | {
            "input_tokens": request.input_tokens,
            "cached_tokens": request.cached_tokens,
            "allocated_blocks": sum(map(len, request.tables)),
            "preemptions": request.epoch,
        }

    def _findable(self, request: RequestModel) -> int:
        """Tokens up to the last one of the request that is findable in its own blocks, in the group
        where they are fewest."""
        ends = []
        for group, table in zip(self.groups, request.tables, strict=True):
            tags = [group.tag_of[block] for block in table if block in group.key_of]
            known = bool(tags) and tags[-1] in request.tags  # else KEY
            ends.append(request.tags.index(tags[-1]) + 1 if known else 0)
        return min(ends)
