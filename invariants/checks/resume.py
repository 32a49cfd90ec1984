"""RESUME: a preempted request comes back as if it had never been away.

Verifies: that a preempted request holds no block and no computed token; that a resumed one has
all of its tokens, and counts as computed exactly its prefix hit; that a step carries each
request at most once, running, from where it stood; that results of steps from before a
preemption or an end change nothing; and that after each step exactly its tokens are computed.

Does not verify: roll-back of speculative tokens; that resumption ever succeeds (liveness).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event, StepItem, StepLaunched
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.view import Standing


class Resume_(Check):
    """Preemption by recompute is invisible in tokens and tables."""

    claims = (
        Claim(
            "A preempted request is in no step launched later, and holds no blocks.",
            "bugs B65, B66, B73; survey K08, K13",
        ),
        Claim(
            "After resumption the request has the tokens it had, and is computed up to its "
            "prefix hit.",
            "bugs B66, B68, B70, B72; survey K11, K21",
        ),
        Claim(
            "Results of a step that was launched before the preemption are void.",
            "bugs B74, B96; survey, promise 12 of vLLM",
        ),
        Claim(
            "A long request goes on from where it stood, whatever others do.",
            "chapter, continuous batching: long request continues; survey E11",
        ),
    )
    positive_control = "late-result-is-applied"

    @classmethod
    def id(cls) -> str:
        return "RESUME"

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {StepLaunched: self._launched}

    def _launched(self, event: StepLaunched) -> None:
        known, seen = self.books.known, set()
        for item in event.items:
            number = item.request
            request = known.get(number)
            if request is None:
                continue  # LIFE
            why = "which it carries twice" if number in seen else self._misplaced(item, request)
            if why:
                self.fail(
                    f"step {event.step} computes positions {item.start} to {item.end} of "
                    f"request {number}, {why}",
                    request=number,
                )
                return
            seen.add(number)

    def _misplaced(self, item: StepItem, request: RequestModel) -> str | None:
        if not request.running:
            return "which is preempted"
        if request.loading:
            return "whose KV is still on its way back from the host"
        if item.epoch != request.epoch:
            return f"as of its epoch {item.epoch}, but it was preempted {request.epoch} times"
        start = item.start
        begins = start in (request.begins, request.scheduled)  # one, but after some loads
        if not begins or not start < item.end <= len(request.tags):
            return (
                f"which has {request.length} tokens, {request.scheduled} of them computed or "
                "in a step"
            )
        return None

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        if actual[2] != expected[2]:
            self.fail(
                f"request {request.id} counts {actual[2]} tokens as computed, but {expected[2]} "
                "are",
                request=request.id,
            )
        if not request.running and actual[3] != expected[3]:
            self.fail(
                f"request {request.id} is preempted, but its table holds "
                f"{list(self.view.table(request.id, 0))}",
                request=request.id,
            )
