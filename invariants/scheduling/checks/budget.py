"""BUDGET: an iteration stays within its limits, and its step is what was planned.

Verifies: tokens of an iteration against the token budget; running requests against the limit of
sequences, and their adapters against that of adapters, if there is one; free blocks after an
admission against the watermark; that the step which the cache launched carries exactly the parts of
the iteration, each with its tokens.

Does not verify: that the limits are made use of (BATCH); free blocks themselves (the cache's CAP
and CONS).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import adapters_of
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.vocabulary import Scheduled


class Budget(SchedulingCheck):
    """Limits of an iteration."""

    claims = (
        Claim(
            "The tokens of an iteration, the running requests, and their adapters, are never more "
            "than allowed.",
            "survey E14, Q09, Q10",
        ),
        Claim(
            "An iteration that admits leaves the watermark free.",
            "survey 2.4",
        ),
        Claim(
            "What was scheduled is what is computed.",
            "bug B148; survey Q02, Q18",
        ),
    )
    positive_control = "watermark-ignored"

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Scheduled: self._scheduled}

    def _scheduled(self, event: Scheduled) -> None:
        self.checked += 1
        books, limits = self.books, self.limits
        tokens = sum([part.tokens for part in event.parts])
        if tokens > limits.token_budget:
            self.fail(
                f"iteration {event.iteration} computes {tokens} tokens, "
                f"but its budget is {limits.token_budget}"
            )
        if len(books.running) > self.configuration.requests:
            self.fail(
                f"after iteration {event.iteration} {len(books.running)} requests run, "
                f"but {self.configuration.requests} may"
            )
        if books.entered and limits.watermark_blocks:
            self._watermark(event)
        if books.cache.semantics.adapters:
            self._adapters(event, books.cache.semantics.adapters)
        self._compare_step(event)

    def _adapters(self, event: Scheduled, most: int) -> None:
        used = adapters_of(self.books.running.values())
        if len(used) > most:
            self.fail(
                f"after iteration {event.iteration} requests of {len(used)} adapters run, "
                f"{sorted(used)}, but {most} may be loaded"
            )

    def _watermark(self, event: Scheduled) -> None:
        free, watermark = self.books.free_blocks(), self.limits.watermark_blocks
        if free < watermark:
            self.fail(
                f"iteration {event.iteration} admits request {self.books.entered[-1].id} and "
                f"leaves {free} blocks free, below the watermark of {watermark}",
                request=self.books.entered[-1].id,
            )

    def _compare_step(self, event: Scheduled) -> None:
        if event.step is None:
            if event.parts:
                self.fail(f"iteration {event.iteration} has parts, but no step was launched")
            return
        steps = self.books.cache.steps
        if not steps or steps[-1].number != event.step:
            self.fail(
                f"iteration {event.iteration} is said to have launched step {event.step}, but the "
                f"latest step of the cache is {steps[-1].number if steps else 'none'}"
            )
            return
        launched = {item.request: item.end - item.start for item, _ in steps[-1].items}
        planned = {part.cache_request: part.tokens for part in event.parts}
        if launched != planned:
            self._explain(event, planned, launched)
            return
        starts = {item.request: item.start for item, _ in steps[-1].items}
        for part, item in zip(event.parts, self.books.items, strict=False):
            if starts[part.cache_request] != item.start:
                self.fail(
                    f"step {event.step} computes request {part.request} from token "
                    f"{starts[part.cache_request]} on, but it is due from {item.start} on",
                    request=part.request,
                )

    def _explain(self, event: Scheduled, planned: dict[int, int], launched: dict[int, int]) -> None:
        for part in event.parts:
            carried = launched.pop(part.cache_request, 0)
            if carried != planned[part.cache_request] or carried != part.tokens:
                self.fail(
                    f"iteration {event.iteration} says it computes {part.tokens} tokens of request "
                    f"{part.request}, but step {event.step} carries {carried} of them",
                    request=part.request,
                )
                return
        self.fail(
            f"step {event.step} carries requests that iteration {event.iteration} does not "
            f"name: {sorted(launched)} as the cache calls them"
        )
