"""kvproof's own engine as a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from weakref import finalize

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import EVICTION_ORDERS, EvictionPolicyFactory
from kvproof.engine.metrics import (
    REQUEST_METRICS,
    SCHEDULER_METRICS,
    request_metrics,
    scheduler_metrics,
)
from kvproof.engine.request import Request
from kvproof.engine.tiers.disk import DiskFile
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.engine.tiers.transfer import Transfer
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    Cancel,
    Complete,
    Corrupt,
    Decode,
    Evict,
    Fail,
    Finish,
    Fork,
    Grow,
    Land,
    Launch,
    Notify,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    Slow,
    Tier,
    Withhold,
)
from kvproof.invariants.outcomes import OFFLOAD_OFF, SKIPPED, Outcome
from kvproof.invariants.prompts import clip_media, prompt_tokens, sampled_token, sampled_tokens
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.view import RequestState, Standing
from kvproof.stateful_tests.subjects.disk_faults import Crashed, FaultyFiles, flip_byte

_SHARED_MEMORY = Path("/dev/shm")
_OFF = Outcome("refused", OFFLOAD_OFF)


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
        rows = tuple(map(len, found.tables))
        return _state(found), len(found.tokens), found.computed, rows

    def table(self, request: int, group: int) -> Sequence[int]:
        return self._engine.requests[request].tables[group]

    def steps_in_flight(self) -> Sequence[int]:
        return [step.number for step in self._engine.steps]

    def metrics(self) -> Mapping[str, int]:
        return scheduler_metrics(self._engine)

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return request_metrics(self._engine.requests[request])

    # -- the tiers below the device: asked only if there are any ---------------------------------

    @property
    def _hierarchy(self) -> Hierarchy:
        assert self._engine.hierarchy is not None
        return self._engine.hierarchy

    def free_tier_count(self, tier: Tier, group: int) -> int:
        return self._hierarchy.pools(tier)[group].free_count

    def tier_index(self, tier: Tier, group: int) -> Mapping[bytes, int]:
        return self._hierarchy.pools(tier)[group].index

    def tier_pins(self, tier: Tier, group: int) -> Sequence[int]:
        return self._hierarchy.pools(tier)[group].pins

    def victims(self, tier: Tier, group: int) -> Sequence[int]:
        pools = self._engine.pools if tier == "device" else self._hierarchy.pools(tier)
        return list(pools[group].victims())

    def transfers(self) -> Sequence[int]:
        return list(self._hierarchy.transfers)

    def tier_content(self, tier: Tier, group: int, slot: int) -> bytes | None:
        return self._hierarchy.content(tier, group, slot)


class EngineSubject:
    """Maps operations to the engine's methods; finds the k-th candidate for their targets."""

    name = "engine"
    capabilities = frozenset(KINDS + TIER_KINDS)

    def __init__(
        self,
        configuration: Configuration,
        *,
        eviction: EvictionPolicyFactory | None = None,
        engine: Callable[..., Engine] = Engine,
    ) -> None:
        self.configuration = configuration
        engine = partial(engine, eviction=eviction)
        self.files = FaultyFiles()
        if configuration.disk_blocks:
            folder = _new_folder()
            self.engine = engine(configuration, folder=folder, files=self.files)
            finalize(self, _dispose, folder, self._tiers.files)
        else:
            self.engine = engine(configuration)
        configured = eviction in (None, EVICTION_ORDERS[configuration.device_eviction])
        self.semantics = Semantics(
            groups=len(self.engine.pools),
            eviction_order="configured" if configured else "any",
            tiers=True,
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
            Offload: self._offload,
            Promote: self._promote,
            Land: self._land,
            Complete: self._complete,
            Fail: self._fail,
            Cancel: self._cancel,
            Notify: self._notify,
            Withhold: self._withhold,
            Corrupt: self._corrupt,
            Restart: self._restart,
            Slow: self._slow,
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
                outcome = self.engine.admit_prepared(request, operation.slots, operation.wait)
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
            wait=operation.wait,
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
        return self.engine.evict(operation.blocks, operation.tier)

    def _reset(self, operation: Reset) -> Outcome:
        return self.engine.reset()

    def _preempt(self, operation: Preempt) -> Outcome:
        request = self._running(operation.request)
        if request is None:
            return SKIPPED
        if operation.swap:
            return self.engine.swap_out(request, operation.late)
        return self.engine.preempt(request)

    def _resume(self, operation: Resume) -> Outcome:
        preempted = self.engine.preempted
        if not preempted:
            return SKIPPED
        request = preempted[operation.request % len(preempted)]
        return self.engine.resume(request, operation.slots, operation.late)

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

    # -- the memory hierarchy ----------------------------------------------------------------------

    @property
    def _tiers(self) -> Hierarchy:
        assert self.engine.hierarchy is not None
        return self.engine.hierarchy

    @property
    def _has_disk(self) -> bool:
        return self.configuration.disk_blocks > 0

    def _offload(self, operation: Offload) -> Outcome:
        if self.engine.hierarchy is None:
            return _OFF
        return self._tiers.offload(operation.to, operation.first, operation.blocks)

    def _promote(self, operation: Promote) -> Outcome:
        request = self._prepared.get(_identity(operation))
        if request is None:
            prompt, media = prompt_tokens(operation.prompt, operation.media), operation.media
            request = self.engine.prepare(
                prompt,
                salt=operation.salt,
                adapter=operation.adapter,
                media=clip_media(media, len(prompt)) if media else (),
            )
        return self.engine.promote(request, operation.to, operation.blocks)

    def _in_flight(self) -> list[Transfer]:
        hierarchy = self.engine.hierarchy
        return list(hierarchy.transfers.values()) if hierarchy is not None else []

    def _land(self, operation: Land) -> Outcome:
        landing = [t for t in self._in_flight() if not t.on_disk and t.landed < len(t.sources)]
        if not landing:
            return SKIPPED
        return self._tiers.land(landing[operation.transfer % len(landing)], operation.parts)

    def _complete(self, operation: Complete) -> Outcome:
        in_flight = self._in_flight()
        if not in_flight:
            return SKIPPED
        return self._tiers.complete(in_flight[operation.transfer % len(in_flight)])

    def _fail(self, operation: Fail) -> Outcome:
        """Where a file is written, it fails there, and the tier has to notice."""
        in_flight, cause = self._in_flight(), operation.cause
        if not in_flight:
            return SKIPPED
        transfer = in_flight[operation.transfer % len(in_flight)]
        if cause == "error" or cause == "timeout":
            return self._tiers.fail(transfer, cause)
        if transfer.kind != "demote":
            return self._tiers.fail(transfer, "error")
        self.files.arm(cause, operation.file)
        outcome = self._tiers.complete(transfer)
        self.files.disarm()
        return outcome

    def _cancel(self, operation: Cancel) -> Outcome:
        wanted = [t for t in self._in_flight() if t.request is None and not t.cancelled]
        if not wanted:
            return SKIPPED
        return self._tiers.cancel(wanted[operation.transfer % len(wanted)])

    def _notify(self, operation: Notify) -> Outcome:
        hierarchy = self.engine.hierarchy
        if hierarchy is None or not hierarchy.ended:
            return SKIPPED
        return hierarchy.notify(hierarchy.ended[operation.transfer % len(hierarchy.ended)])

    def _withhold(self, operation: Withhold) -> Outcome:
        return self.engine.withhold(operation.tier, operation.blocks)

    def _corrupt(self, operation: Corrupt) -> Outcome:
        disk = self._tiers.disk if self._has_disk else []
        stored = [(pool.group, slot) for pool in disk for slot in pool.index.values()]
        if not stored:
            return SKIPPED
        group, slot = stored[operation.block % len(stored)]
        flip_byte(self._tiers.files[group], slot, operation.byte, operation.file)
        return Outcome("done", count=1)

    def _restart(self, operation: Restart) -> Outcome:
        if not self._has_disk:
            return _OFF
        stores = [transfer for transfer in self._in_flight() if transfer.kind == "demote"]
        if stores:
            self._die_writing(stores[operation.transfer % len(stores)], operation.stage)
        return self._tiers.restart()

    def _die_writing(self, transfer: Transfer, stage: int) -> None:
        """Write the copy as far as that stage; what nobody wants any more is not written at all."""
        if self._tiers.void(transfer):
            return
        self.files.die_at(stage)
        with suppress(Crashed):
            self._tiers.write(transfer)
        self.files.disarm()

    def _slow(self, operation: Slow) -> Outcome:
        if not self._has_disk:
            return _OFF
        self._tiers.slow = operation.factor > 1
        return Outcome("done")


def _state(request: Request) -> RequestState:
    if request.running:
        return "loading" if request.loading else "running"
    return "swapped" if request.swapped else "preempted"


def _new_folder() -> Path:
    """For one subject's disk tier; in memory, if there is such a place."""
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(mkdtemp(prefix="kvproof-", dir=place))


def _dispose(folder: Path, files: list[DiskFile]) -> None:
    """Nobody drives the subject any more."""
    for file in files:
        file.close()
    rmtree(folder, ignore_errors=True)


def _identity(operation: Admit | Promote) -> tuple[object, ...]:
    """What a prepared request depends on."""
    return operation.prompt, operation.salt, operation.adapter, operation.media
