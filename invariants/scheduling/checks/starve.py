"""STARVE: nobody is overtaken for longer than promised.

Verifies: where a bound is promised, that no live, ready request is left out of more iterations in
a row than that, each of which ran a request that arrived later; also if its adapter is one too
many, since whoever promises a bound must unload others in time.

Does not verify: waiting in a queue behind older requests, which is load and not starvation; for
KV that is on its way (LIVE); of very many that are overtaken at once, more than the eight that
arrived first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import Promises, Scheduled
from kvproof.invariants.verdict import Violation

_LOOKED_AT = 8
"""Of the overtaken ones those that arrived first: so the work does not grow with the queue."""


class Starve(SchedulingCheck):
    """Bounded overtaking."""

    claims = (
        Claim(
            "A request is overtaken by later ones in no more iterations than promised.",
            "bugs B135, B138; survey Q13, Q14",
        ),
    )
    positive_control = "long-prompt-starves"

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        super().__init__(books, view, report)
        self._overtaken: dict[int, int] = {}
        """Iterations in a row in which a request was overtaken."""

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        return promises.starvation_bound is not None

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Scheduled: self._scheduled}

    def _scheduled(self, event: Scheduled) -> None:
        run = {part.request for part in event.parts}
        latest = max(run, default=-1)
        left_out = (request for number, request in self.books.live.items() if number not in run)
        counted: dict[int, int] = {}
        for request in islice(left_out, _LOOKED_AT):
            before = self._overtaken.get(request.id, 0)
            waits = request.ready and not self.books.held_back(request)
            overtaken = request.id < latest and waits
            counted[request.id] = before + 1 if overtaken else 0
            self._judge(event, request, counted[request.id])
        self._overtaken = counted

    def _judge(self, event: Scheduled, request: LiveRequest, iterations: int) -> None:
        self.checked += 1
        bound = self.promises.starvation_bound
        if bound is not None and iterations > bound:
            self.fail(
                f"request {request.id}, {request.state}, was left out of {iterations} iterations "
                f"up to iteration {event.iteration} that ran requests which arrived later: the "
                f"policy promises at most {bound}",
                request=request.id,
            )
