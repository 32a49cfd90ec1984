"""What vLLM's scheduler and its offloading connector do to the cache, overheard.

See :mod:`kvproof.stateful_tests.subjects.vllm_connector`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec.structs import replace

from kvproof.invariants.events import (
    SlotsEvicted,
    StepItem,
    TransferEnded,
    TransferKind,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import Arrive, Complete, Land, Offload, Promote, Reserve, Tier
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.view import Standing
from kvproof.stateful_tests.subjects.vllm_offload_host import HostChunks
from kvproof.stateful_tests.subjects.vllm_overheard import (
    Listener,
    OverheardCache,
    OverheardView,
    Told,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Copy(NamedTuple):
    """A copy in flight."""

    job: int | None
    """The connector's name of it, if it has one."""
    names: frozenset[bytes]
    """The manager's keys."""
    event: TransferStarted


class Host(HostChunks):
    """The manager's chunks, by the keys of the device's blocks: with their group."""

    def key_of(self, name: bytes) -> bytes:
        return super().key_of(name) + self.group.to_bytes(4, "big")

    def slots(self) -> dict[bytes, int]:
        """What the manager has or awaits, by its own keys."""
        return {name: chunk.chunk_id for name, chunk in self.chunks()}

    def found(self) -> dict[bytes, int]:
        """What it has, ready to be read."""
        return {self.key_of(name): c.chunk_id for name, c in self.chunks() if c.is_ready}


class ConnectorView(OverheardView):
    """The cache and its host as they are; copies are the adapter's."""

    def __init__(self, cache: ConnectorCache) -> None:
        super().__init__(cache)
        self._connector = cache

    def standing(self, request: int) -> Standing:
        state, length, computed, rows = super().standing(request)
        loading = any(copy.event.request == request for copy in self._connector.copies.values())
        return "loading" if loading else state, length, computed, rows

    def free_tier_count(self, tier: Tier, group: int) -> int:
        return self._connector.host.free_count

    def tier_index(self, tier: Tier, group: int) -> Mapping[bytes, int]:
        return self._connector.host.found()

    def tier_pins(self, tier: Tier, group: int) -> Sequence[int]:
        return self._connector.host.pins

    def victims(self, tier: Tier, group: int) -> Sequence[int]:
        return self._connector.host.victims()

    def transfers(self) -> Sequence[int]:
        return list(self._connector.copies)

    def tier_content(self, tier: Tier, group: int, slot: int) -> bytes | None:
        """Not promised: there are no bytes."""
        return None


class ConnectorListener(Listener, Protocol):
    """Who is told."""

    def asked(self, name: str) -> Arrive:
        """The operation that brought the request of that name."""
        ...


class ConnectorCache(OverheardCache):
    """The scheduler's cache and the host below it."""

    _listener: ConnectorListener
    capabilities = OverheardCache.capabilities | {"offload", "promote", "land", "complete"}
    semantics = replace(
        OverheardCache.semantics,
        tiers=True,
        disk=False,
        copies_hold=False,
        copies_after_steps=True,
        exact_tiers=False,
        resets_tiers=False,
        tier_bytes=False,
        host_order="any",
    )

    def __init__(
        self,
        configuration: Configuration,
        scheduler: Any,
        listener: ConnectorListener,
        groups: Semantics,
    ) -> None:
        self.copies: dict[int, Copy] = {}
        """In flight, by number."""
        super().__init__(configuration, scheduler.kv_cache_manager, listener, groups)
        self._view: ConnectorView = ConnectorView(self)
        self._connector = connector = scheduler.connector.connector_scheduler
        self.host = Host(self._listen_to_manager(connector.manager), configuration.host_blocks)
        self.moved: Counter[TransferKind] = Counter()
        """Blocks, by the kind of their copies."""
        self.delayed = False
        """Whether blocks are given to a request that will wait for its KV."""
        self._numbers = count()
        self._landed: set[int] = set()
        """Copies in flight whose bytes have moved."""
        self._reported: list[int] = []
        """The copies of which the worker has just reported that they have ended."""
        self._listen(connector, "update_state_after_alloc", self._load)
        self._listen(connector, "_build_store_jobs", self._store)
        self._listen(connector, "_update_connector_output", self._report)
        self._listen(self.manager, "cache_blocks", self._cache_blocks)
        self._listen_to_scheduler(scheduler)

    def _listen_to_scheduler(self, scheduler: Any) -> None:
        """It does nothing to the cache by itself, where no step is in flight."""

    def _listen_to_manager(self, manager: Any) -> Any:
        """The manager of the host."""
        self._listen(manager, "prepare_store", self._prepare_store)
        self._listen(manager, "complete_store", partial(self._complete, "store"))
        self._listen(manager, "complete_load", partial(self._complete, "promote"))
        return manager

    def _listen(self, owner: Any, name: str, told: Callable[..., Any]) -> None:
        """``told`` stands in for that function, and is given it."""
        setattr(owner, name, partial(told, getattr(owner, name)))

    # -- blocks for what is to be loaded -------------------------------------------------------

    def allocate_slots(self, request: Request, num_new_tokens: int, **more: Any) -> Any:
        self.delayed = more.get("delay_cache_blocks", False)
        try:
            return super().allocate_slots(request, num_new_tokens, **more)
        finally:
            self.delayed = False

    def _refused(self, live: Told, end: int) -> None:
        if live.request.status == self._vllm.status.RUNNING:  # otherwise it is still to be admitted
            super()._refused(live, end)

    def _load(
        self, original: Callable[..., None], request: Request, blocks: Any, tokens: int
    ) -> None:
        jobs = self._connector._current_batch_load_jobs
        before = set(jobs)
        original(request, blocks, tokens)
        for job in jobs.keys() - before:
            live = self.by_id[request.request_id]
            source, target = jobs[job].src_spec, jobs[job].dst_spec
            if not len(target.block_ids):  # vLLM may ask for a copy of nothing
                continue
            number = self._start(job, "promote", source, target, source, live.number)
            asked = self._listener.asked(request.request_id)
            operation = Promote(asked.prompt, asked.salt, asked.adapter)
            self._done(operation, transfers=(number,))

    def _cache_blocks(
        self, original: Callable[..., None], request: Request, tokens: int, **more: Any
    ) -> None:
        """What was loaded becomes findable; or what a step has computed, which is told with it."""
        original(request, tokens, **more)
        if self._untold is not None:
            return
        live = self.by_id[request.request_id]
        self._tell_blocks(live, ())
        self._done(Reserve(self.running.index(live), tokens), live, count=0)

    def launched(self, step: int, items: Sequence[StepItem]) -> None:
        for item in items:  # of what was loaded, the last token may be computed anew
            live = self.live[item.request]
            live.computed = min(live.computed, item.start)
        super().launched(step, items)

    # -- copies begin --------------------------------------------------------------------------

    def _prepare_store(
        self, original: Callable[..., Any], keys: Sequence[bytes], context: Any
    ) -> Any:
        before = self.host.slots()
        output = original(keys, context)
        self._tell_lost(before)
        return output

    def _tell_lost(self, before: Mapping[bytes, int]) -> None:
        """What the host has no longer of that."""
        after = self.host.slots()
        lost = [name for name in before if name not in after]
        if lost:
            slots = [before[name] for name in lost]
            named = [self.host.key_of(name) for name in lost]
            self._events.append(SlotsEvicted("host", 0, slots, named, "pressure"))

    def _store(self, original: Callable[..., dict[int, Any]], scheduled: Any) -> dict[int, Any]:
        jobs = original(scheduled)
        started = tuple(
            [
                self._start(number, "store", job.src_spec, job.dst_spec, job.dst_spec)
                for number, job in jobs.items()
            ]
        )
        if self._events:
            blocks = sum([len(self.copies[number].event.sources) for number in started])
            self._done(Offload(), count=blocks, transfers=started)
        return jobs

    def _start(
        self,
        job: int,
        kind: TransferKind,
        source: Any,
        target: Any,
        host: Any,
        request: int | None = None,
    ) -> int:
        """Its number; ``host``: which of the two is there."""
        named = {slot: self.host.key_of(name) for name, slot in self.host.slots().items()}
        keys = [named.get(slot, b"") for slot in host.block_ids.tolist()]
        sources, targets = source.block_ids.tolist(), target.block_ids.tolist()
        names = frozenset(self._connector._jobs[job].keys)
        return self._tell_start(job, names, kind, sources, targets, keys, request)

    def _tell_start(
        self,
        job: int | None,
        names: Collection[bytes],
        kind: TransferKind,
        sources: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[bytes],
        request: int | None = None,
    ) -> int:
        number = next(self._numbers)
        event = TransferStarted(number, kind, 0, sources, targets, keys, request)
        self.copies[number] = Copy(job, frozenset(names), event)
        self._events.append(event)
        return number

    # -- and end -------------------------------------------------------------------------------

    def landed(self, job: int) -> None:
        """The worker has moved its bytes."""
        under_way = [
            number
            for number, copy in self.copies.items()
            if copy.job is not None and number not in self._landed
        ]
        number = next((n for n in under_way if self.copies[n].job == job), None)
        if number is None:
            return
        index = under_way.index(number)
        self._landed.add(number)
        parts = len(self.copies[number].event.sources)
        self._events.append(TransferLanded(number, parts))
        self._done(Land(index, parts), count=parts, transfers=(number,))

    def _report(self, original: Callable[..., None], output: Any) -> None:
        if self._untold is not None:
            self._tell_retired(self._untold)
        metadata = output.kv_connector_worker_meta
        self._reported = list(metadata.completed_jobs) if metadata is not None else []
        original(output)

    def _complete(
        self,
        kind: TransferKind,
        original: Callable[..., None],
        keys: Sequence[bytes],
        *more: Any,
    ) -> None:
        original(keys, *more)
        ended = [
            number
            for job in self._reported
            for number, copy in self.copies.items()
            if copy.job == job and copy.event.kind == kind and copy.names == set(keys)
        ]
        if ended:
            self._copy_ended(ended[0])

    def _copy_ended(self, number: int) -> None:
        index = list(self.copies).index(number)
        event = self.copies.pop(number).event
        self._landed.discard(number)
        self.moved[event.kind] += len(event.sources)
        live = self.live.get(event.request) if event.request is not None else None
        if live is not None:
            live.computed = live.request.num_computed_tokens
        self._events.append(TransferEnded(number, "completed"))
        self._done(Complete(index), transfers=(number,))
