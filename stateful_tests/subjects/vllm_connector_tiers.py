"""vLLM's tiered offloading manager below its scheduler and connector: a host, and a tier below it.

The manager is ``TieringOffloadingManager``; its secondary tier is vLLM's own example, which has
room for everything; copies up end there at once, and copies down an iteration later, or two.  To
the checks it is the disk.  What the manager copies down although the tier has it is told as written
anew.

See :mod:`kvproof.stateful_tests.subjects.vllm_connector`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize

from msgspec.structs import replace

from kvproof.invariants.events import SlotsEvicted
from kvproof.invariants.operations import Offload, Promote, Tier
from kvproof.stateful_tests.subjects.vllm_connector_cache import (
    ConnectorCache,
    ConnectorView,
)
from kvproof.stateful_tests.subjects.vllm_connector_worker import drawn

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import JobResult

DISK_BLOCKS = 1 << 12
"""More than a run ever fills."""


def _close(view: memoryview, region: Any) -> None:
    """As the manager does when it is shut down; it would outlive its subject otherwise."""
    view.release()
    region.cleanup()


class LateTier:
    """Makes copies down end late: of what a secondary tier reports, it withholds some."""

    def __init__(self, manager: Any, tier: Any) -> None:
        self._manager = manager
        self._finished = tier.get_finished_jobs
        self._withheld: list[JobResult] = []
        self._polled = False
        tier.get_finished_jobs = self._get_finished_jobs
        tier.has_pending_work = self._has_pending_work

    def next_iteration(self) -> None:
        self._polled = False

    def _has_pending_work(self) -> bool:
        return bool(self._withheld)

    def _get_finished_jobs(self) -> Sequence[JobResult]:
        first, self._polled = not self._polled, True
        due, self._withheld = (self._withheld, []) if first else ([], self._withheld)
        for result in self._finished():
            job = result.job_id
            down = not self._manager._jobs[job].transfer_job.is_promotion
            late = down and (drawn(job) % 2 or not first)
            (self._withheld if late else due).append(result)
        return due


class TieredView(ConnectorView):
    """The disk's slots are the adapter's: the tier itself has keys only."""

    _connector: TieredCache

    def free_tier_count(self, tier: Tier, group: int) -> int:
        if tier == "host":
            return super().free_tier_count(tier, group)
        return DISK_BLOCKS - len(set(self._busy()))

    def tier_index(self, tier: Tier, group: int) -> Mapping[bytes, int]:
        if tier == "host":
            return super().tier_index(tier, group)
        cache = self._connector
        return {
            cache.host.key_of(name): slot
            for name, slot in cache.on_disk.items()
            if name in cache.tier.chunks
        }

    def tier_pins(self, tier: Tier, group: int) -> Sequence[int]:
        if tier == "host":
            return super().tier_pins(tier, group)
        pins = [0] * DISK_BLOCKS
        for slot in self._busy():
            pins[slot] += 1
        return pins

    def _busy(self) -> Iterator[int]:
        """The disk's slots of copies in flight."""
        for copy in self._connector.copies.values():
            if copy.event.kind in ("demote", "fetch"):
                down = copy.event.kind == "demote"
                yield from copy.event.targets if down else copy.event.sources


class TieredCache(ConnectorCache):
    """The scheduler's cache, the host and the tier below it."""

    semantics = replace(ConnectorCache.semantics, disk=True, disk_order="any")

    def _listen_to_manager(self, manager: Any) -> Any:
        self.tier = manager.secondary_tiers[0]
        self.late = LateTier(manager, self.tier)
        self.on_disk: dict[bytes, int] = {}
        """What the tier has, wholly written, and the slot that it is told to be in."""
        self._free_on_disk = list(range(DISK_BLOCKS))
        self._view: TieredView = TieredView(self)
        primary = super()._listen_to_manager(manager.primary_tier)
        finalize(self, _close, primary._kv_memoryview, primary._mmap_region)
        self._listen(manager, "create_store_job", self._demote)
        self._listen(manager, "_initiate_promotion", self._fetch)
        self._listen(primary, "complete_read", self._demoted)
        self._listen(primary, "complete_write", self._fetched)
        return primary

    # -- down ----------------------------------------------------------------------------------

    def _demote(
        self, original: Callable[..., Any], names: Collection[bytes], context: Any, tier: int = 0
    ) -> Any:
        job = original(names, context, tier)
        names = list(names)
        again = [name for name in names if name in self.on_disk]
        if again:
            slots = [self.on_disk.pop(name) for name in again]
            keys = [self.host.key_of(name) for name in again]
            self._events.append(SlotsEvicted("disk", 0, slots, keys, "pressure"))
            self._free_on_disk += slots
        targets = [self._free_on_disk.pop() for _ in names]
        keys = [self.host.key_of(name) for name in names]
        number = self._tell_start(None, names, "demote", job.chunk_ids.tolist(), targets, keys)
        self._done(Offload(to="disk"), count=len(names), transfers=(number,))
        return job

    def _demoted(
        self, original: Callable[..., None], names: Collection[bytes], context: Any
    ) -> None:
        original(names, context)
        for number in self._numbers_of("demote", names)[:1]:
            event = self.copies[number].event
            by_key = dict(zip(event.keys, event.targets, strict=True))
            self.on_disk |= {name: by_key[self.host.key_of(name)] for name in names}
            self._copy_ended(number)

    # -- and up --------------------------------------------------------------------------------

    def _fetch(self, original: Callable[..., bool], tier: int, name: bytes, context: Any) -> bool:
        before = self.host.slots()
        started = original(tier, name, context)
        self._tell_lost(before)
        if started:
            target = self.host.slots()[name]
            source, key = self.on_disk.get(name, 0), self.host.key_of(name)
            number = self._tell_start(None, [name], "fetch", [source], [target], [key])
            asked = self._listener.asked(context.req_id)
            operation = Promote(asked.prompt, asked.salt, asked.adapter, to="host")
            self._done(operation, transfers=(number,))
        return started

    def _fetched(self, original: Callable[..., None], names: Collection[bytes], *more: Any) -> None:
        for name in names:  # one by one, as each was begun
            original([name], *more)
            for number in self._numbers_of("fetch", [name])[:1]:
                self._copy_ended(number)

    def _numbers_of(self, kind: str, names: Collection[bytes]) -> list[int]:
        return [
            number
            for number, copy in self.copies.items()
            if copy.event.kind == kind and copy.names == set(names)
        ]
