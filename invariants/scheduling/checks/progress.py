"""PROGRESS: output tokens are sampled when they are due, each once, up to the request's end.

Verifies: that a completed step samples an output token for each request whose last pending token
it computed, and for no other; that a request stops exactly at its output, and is live no longer;
that nothing happens to requests that are not live; computed tokens of the cache against this
level's; that a client is given what was sampled for its request, where a subject tells it; in
audits, all queues, output counts and preemptions against the view.

Does not verify: which token is sampled (the cache's PROV knows the content); that a request runs
at all (BATCH, LIVE).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.operations import Arrive
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import Flight, LiveRequest
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
)


class Progress(SchedulingCheck):
    """Sampling."""

    claims = (
        Claim(
            "Each output token is delivered once, whatever preemptions come in between.",
            "bugs B72, B74; survey K21",
        ),
        Claim(
            "A client is given the tokens that were sampled for its request, and no others.",
            "bug B74; survey K21",
        ),
        Claim(
            "A request makes progress with each step that carries it, and ends when it is done.",
            "chapter, continuous batching: long request continues; bug B140; survey E11, Q18, Q20",
        ),
        Claim("A request is in exactly one queue.", "bug B142; survey Q19"),
    )
    positive_control = "recomputed-token-delivered-again"

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {Completed: self._completing}

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            RequestArrived: self._arrived,
            Scheduled: self._follow,
            RequestCancelled: self._follow,
            RunningReset: self._follow,
            Completed: self._completed,
        }

    # -- what a completed step must sample -------------------------------------------------------

    def _completing(self, event: Completed) -> None:
        flights = self.books.flights
        if not flights or flights[0].number != event.step:
            return  # a stray, see _follow
        self.checked += 1
        sampled, finished = self._due(flights[0])
        if len(event.sampled) != len(sampled) or not sampled.keys() >= set(event.sampled):
            self._wrong_samples(event, flights[0], sampled)
        elif len(event.finished) != len(finished) or finished != set(event.finished):
            self._wrong_ends(event, finished)
        elif event.misdelivered:
            number = event.misdelivered[0]
            self.fail(
                f"the client of request {number} was given other tokens than step {event.step} "
                "sampled for it",
                request=number,
            )

    def _due(self, flight: Flight) -> tuple[dict[int, LiveRequest], set[int]]:
        """Requests that get an output token, and those that stop with it."""
        sampled, finished = {}, set()
        for item in flight.items:
            request = item.request
            if item.samples and not request.ended:
                sampled[request.id] = request
                if request.sampled + 1 >= request.output_tokens:
                    finished.add(request.id)
        return sampled, finished

    def _wrong_samples(
        self, event: Completed, flight: Flight, due: Mapping[int, LiveRequest]
    ) -> None:
        told = list(event.sampled)
        for number, request in due.items():
            if told.count(number) != 1:
                self.fail(
                    f"step {event.step} computed the last pending token of request {number}, so "
                    f"output token {request.sampled} is due once, but was delivered "
                    f"{told.count(number)} times",
                    request=number,
                )
                return
        number = next(number for number in told if number not in due)
        self.fail(f"{self._undue(number, flight)}, but it got an output token", request=number)

    def _undue(self, number: int, flight: Flight) -> str:
        for item in flight.items:
            if item.request.id != number:
                continue
            if item.request.ended:
                return f"request {number} had ended before step {flight.number} was retired"
            return (
                f"step {flight.number} computed {item.tokens} of {item.pending} pending tokens of "
                f"request {number}"
            )
        return f"step {flight.number} did not carry request {number}"

    def _wrong_ends(self, event: Completed, due: set[int]) -> None:
        for number in sorted(due.symmetric_difference(event.finished)):
            request = self.books.live.get(number)
            if request is None:
                self.fail(f"request {number} finished, but was not live", request=number)
                return
            ended = "goes on" if number in due else "finished"
            self.fail(
                f"request {number} {ended} with {request.sampled + 1} output tokens, but it is to "
                f"stop at {request.output_tokens}",
                request=number,
            )
            return
        self.fail(f"requests {list(event.finished)} are said to finish, some of them twice")

    # -- strays, and the cache's computed tokens -------------------------------------------------

    def _arrived(self, event: RequestArrived) -> None:
        self.checked += 1
        self._report_strays()
        request = self.books.live[event.request]
        sent = request.arrival
        if sent is not None and (event.prompt_tokens, event.priority) != (
            prompt_length(sent.prompt),
            sent.priority,
        ):
            self.fail(
                f"request {request.id} arrived with {event.prompt_tokens} prompt tokens and "
                f"priority {event.priority}, but was sent with {prompt_length(sent.prompt)} and "
                f"{sent.priority}",
                request=request.id,
            )
        elif sent is not None:
            self._compare_output(event, sent)

    def _compare_output(self, event: RequestArrived, sent: Arrive) -> None:
        expected = (sent.output, max(sent.output, sent.max_tokens))
        if (event.output_tokens, event.max_tokens) != expected:
            self.fail(
                f"request {event.request} arrived to stop at {event.output_tokens} of at most "
                f"{event.max_tokens} output tokens, but was sent to stop at {expected[0]} of "
                f"at most {expected[1]}",
                request=event.request,
            )

    def _follow(self, event: Event) -> None:
        self._report_strays()

    def _report_strays(self) -> None:
        strays = self.books.strays
        for stray in strays:
            self.fail(stray)
        strays.clear()

    def _completed(self, event: Completed) -> None:
        self._report_strays()
        known = self.books.cache.requests
        for item in self.books.retired:
            request = item.request
            if request.ended or request.epoch != item.epoch or request.cache_request is None:
                continue
            model = known.get(request.cache_request)
            if model is None or model.computed != request.computed:
                computed = "it is not there" if model is None else f"it is {model.computed}"
                self.fail(
                    f"{request.computed} tokens of request {request.id} are computed, but in the "
                    f"cache {computed}",
                    request=request.id,
                )

    # -- audits ------------------------------------------------------------------------------------

    def audit(self) -> None:
        self.checked += 1
        live = list(self.view.live())
        if live != list(self.books.live):
            self._wrong_requests(live)
            return
        for request in self.books.live.values():
            self._compare_standing(request)

    def _wrong_requests(self, live: list[int]) -> None:
        expected = self.books.live
        for number in sorted(expected.keys() ^ set(live)):
            word = "not live, but should be" if number in expected else "live, but should not be"
            self.fail(f"request {number} is {word}", request=number)
            return
        self.fail(f"live requests are given as {live[:8]} …, which is not their order of arrival")

    def _compare_standing(self, request: LiveRequest) -> None:
        actual = self.view.standing(request.id)
        expected = (request.state, request.sampled, request.preemptions)
        if actual != expected:
            self.fail(
                f"request {request.id} is {actual[0]} with {actual[1]} output tokens and "
                f"{actual[2]} preemptions, but should be {expected[0]} with {expected[1]} and "
                f"{expected[2]}",
                request=request.id,
            )
            return
        if self.view.cache_request(request.id) != request.cache_request:
            self.fail(
                f"request {request.id} is known to the cache as "
                f"{self.view.cache_request(request.id)}, but was admitted as "
                f"{request.cache_request}",
                request=request.id,
            )
