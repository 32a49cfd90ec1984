"""kvproof's own engine as a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import EvictionPolicyFactory, LeastRecentlyUsed
from kvproof.engine.metrics import (
    REQUEST_METRICS,
    SCHEDULER_METRICS,
    request_metrics,
    scheduler_metrics,
)
from kvproof.engine.request import Request
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    KINDS,
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.prompts import clip_media, prompt_tokens, sampled_token, sampled_tokens
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.view import Standing


class EngineView:
    """The engine's state as it is, nothing recomputed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def free_count(self, group: int) -> int:
        return self._engine.pools[group].free_count

    def ref_counts(self, group: int) -> Sequence[int]:
        return self._engine.pools[group].ref_counts

    def free_blocks(self, group: int) -> Sequence[int]:
        return list(self._engine.pools[group].free_blocks())

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return self._engine.pools[group].index

    def requests(self) -> Sequence[int]:
        return list(self._engine.requests)

    def standing(self, request: int) -> Standing:
        found = self._engine.requests[request]
        return (
            "running" if found.running else "swapped" if found.swapped else "preempted",
            len(found.tokens),
            found.computed,
            tuple(map(len, found.tables)),
        )

    def table(self, request: int, group: int) -> Sequence[int]:
        return self._engine.requests[request].tables[group]

    def free_host_count(self, group: int) -> int:
        return self._engine.host_pools[group].free_count

    def steps_in_flight(self) -> Sequence[int]:
        return [step.number for step in self._engine.steps]

    def metrics(self) -> Mapping[str, int]:
        return scheduler_metrics(self._engine)

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return request_metrics(self._engine.requests[request])


class EngineSubject:
    """Maps operations to the engine's methods; finds the k-th candidate for their targets."""

    name = "engine"
    capabilities = frozenset(KINDS)

    def __init__(
        self,
        configuration: Configuration,
        *,
        eviction: EvictionPolicyFactory = LeastRecentlyUsed,
        engine: type[Engine] = Engine,
    ) -> None:
        self.configuration = configuration
        self.engine = engine(configuration, eviction=eviction)
        self.semantics = Semantics(
            eviction_order="lru" if eviction is LeastRecentlyUsed else "any",
            exports=SCHEDULER_METRICS,
            exports_per_request=REQUEST_METRICS,
        )
        self._view = EngineView(self.engine)
        self._prepared: dict[tuple[object, ...], Request] = {}
        self._handlers: dict[type[Operation], Callable[..., Outcome]] = {
            Admit: self._admit,
            Grow: self._grow,
            Decode: self._decode,
            Reserve: self._reserve,
            Finish: self._finish,
            Abort: self._abort,
            Fork: self._fork,
            Evict: self._evict,
            Reset: self._reset,
            Preempt: self._preempt,
            Resume: self._resume,
            Launch: self._launch,
            Retire: self._retire,
        }

    def apply(self, operation: Operation) -> Outcome:
        return self._handlers[operation.__class__](operation)

    def drain_events(self) -> Sequence[Event]:
        events = self.engine.events
        if not events:
            return ()
        drained = events[:]
        events.clear()
        return drained

    def view(self) -> EngineView:
        return self._view

    def prepare(self, operation: Admit) -> Request:
        """The request that such an admission would admit; a scheduler asks about it in advance."""
        identity = _identity(operation)
        request = self._prepared.get(identity)
        if request is None:
            prompt, media = prompt_tokens(operation.prompt, operation.media), operation.media
            request = self._prepared[identity] = self.engine.prepare(
                prompt,
                salt=operation.salt,
                adapter=operation.adapter,
                media=clip_media(media, len(prompt)) if media else (),
            )
        return request

    def forget(self, operation: Admit) -> None:
        """Nobody will ask for such an admission any more."""
        self._prepared.pop(_identity(operation), None)

    def _admit(self, operation: Admit) -> Outcome:
        if self._prepared:
            request = self._prepared.get(_identity(operation))
            if request is not None:
                outcome = self.engine.admit_prepared(request, operation.slots)
                if outcome.status == "done":
                    self.forget(operation)
                return outcome
        prompt = prompt_tokens(operation.prompt, operation.media)
        media = operation.media
        return self.engine.admit(
            prompt,
            salt=operation.salt,
            adapter=operation.adapter,
            media=clip_media(media, len(prompt)) if media else (),
            slots=operation.slots,
        )

    def _grow(self, operation: Grow) -> Outcome:
        running = self.engine.running
        if not running:
            return SKIPPED
        request = running[operation.request % len(running)]
        tokens = sampled_tokens(operation.choice, len(request.tokens), operation.tokens)
        return self.engine.grow(request, tokens)

    def _decode(self, operation: Decode) -> Outcome:
        running = self.engine.running
        if not running:
            return SKIPPED
        count = len(running)
        named = dict.fromkeys([index % count for index in operation.requests])
        requests = [running[index] for index in named]
        choice = operation.choice
        tokens = [sampled_token(choice, len(request.tokens)) for request in requests]
        return self.engine.decode(requests, tokens)

    def _reserve(self, operation: Reserve) -> Outcome:
        request = self._running(operation.request)
        return self.engine.reserve(request, operation.slots) if request else SKIPPED

    def _running(self, index: int) -> Request | None:
        running = self.engine.running
        return running[index % len(running)] if running else None

    def _finish(self, operation: Finish) -> Outcome:
        request = self._running(operation.request)
        return self.engine.finish(request) if request else SKIPPED

    def _abort(self, operation: Abort) -> Outcome:
        live = self.engine.requests
        if not live:
            return SKIPPED
        return self.engine.abort(live[sorted(live)[operation.request % len(live)]])

    def _fork(self, operation: Fork) -> Outcome:
        request = self._running(operation.request)
        return self.engine.fork(request, operation.samples) if request else SKIPPED

    def _evict(self, operation: Evict) -> Outcome:
        return self.engine.evict(operation.blocks)

    def _reset(self, operation: Reset) -> Outcome:
        return self.engine.reset()

    def _preempt(self, operation: Preempt) -> Outcome:
        request = self._running(operation.request)
        if request is None:
            return SKIPPED
        return self.engine.swap_out(request) if operation.swap else self.engine.preempt(request)

    def _resume(self, operation: Resume) -> Outcome:
        preempted = self.engine.preempted
        if not preempted:
            return SKIPPED
        return self.engine.resume(preempted[operation.request % len(preempted)], operation.slots)

    def _launch(self, operation: Launch) -> Outcome:
        if not operation.items:
            return self.engine.launch(operation.budget)
        running = self.engine.running
        named: dict[int, int] = {}
        for index, tokens in operation.items if running else ():
            named.setdefault(index % len(running), tokens)
        return self.engine.launch(items=[(running[index], named[index]) for index in named])

    def _retire(self, operation: Retire) -> Outcome:
        return self.engine.retire() or SKIPPED


def _identity(operation: Admit) -> tuple[object, ...]:
    """What a prepared request depends on."""
    return operation.prompt, operation.salt, operation.adapter, operation.media
