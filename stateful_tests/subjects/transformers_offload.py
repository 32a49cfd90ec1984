"""Offloading to the host in transformers' continuous batching, overheard at its manager.

What ``OffloadingManager`` copies to its pool of host blocks is a swapped request, told as such
(:mod:`kvproof.stateful_tests.subjects.transformers_scheduler`):

* **Out.**  The manager takes the blocks of all its victims, copies what the host has room for, and
  resets the others.  Nothing else happens in between, so each victim is told when all is done:
  first its copy, which has ended already, and then its blocks; and the checks are shown the cache
  as it was when that victim's blocks had been taken.
* **Back.**  The scheduler gives the request blocks, and the manager copies later, when the batch
  is complete.  So it is resumed with a copy in flight, which ends when the manager has done it,
  and until then its blocks and the host's are in use.  Its new token is told after that.
* **Given up.**  The host blocks of a cancelled request are free a little later than the request
  is gone from the queues; only then is it told.

The host is the engine's own.  Its memory cannot be pinned where there is no accelerator, so that
one argument of its allocation is left out (``transformers_loading``).  Pinned memory lets
copies run beside the host's own work, in the order of a stream; without it each copy has ended
when the call returns.  What is copied where, and when it is asked for, is the manager's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kvproof.invariants.events import (
    BlocksReleased,
    SlotsReleased,
    TransferEnded,
    TransferStarted,
)
from kvproof.invariants.operations import Complete, Tier
from kvproof.invariants.subject import Configuration
from kvproof.invariants.view import Standing
from kvproof.stateful_tests.subjects.transformers_loading import own_memory
from kvproof.stateful_tests.subjects.transformers_overheard import Listener, OverheardCache
from kvproof.stateful_tests.subjects.transformers_told import OverheardView, Told

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import (
        FutureRequestState,
        RequestState,
    )


class Moment(NamedTuple):
    """The cache as it was at some moment."""

    free_count: int
    ref_counts: Sequence[int]
    free_blocks: Sequence[int]
    findable: Mapping[bytes, Sequence[int]]
    tables: Mapping[str, Sequence[int]]


class Victim(NamedTuple):
    """A request whose blocks the manager has taken, and what it had."""

    live: Told
    blocks: Sequence[int]
    lost: Mapping[int, bytes]
    """Of its blocks, those that were findable until then."""
    then: Moment
    """When its blocks had been taken."""


class OffloadingView(OverheardView):
    """The cache and its host as they are, or as they were when what is told happened."""

    def __init__(self, cache: OffloadingCache) -> None:
        super().__init__(cache)
        self._offloading = cache
        self.then: Moment | None = None
        self.then_on_host: int | None = None
        """Free blocks of the host, if it is not what there is now."""

    def moment(self) -> Moment:
        tables = self._allocator.block_table
        return Moment(
            self.free_count(0),
            self.ref_counts(0),
            self.free_blocks(0),
            dict(self.index(0)),
            {name: list(table) for name, table in tables.items()},
        )

    def free_count(self, group: int) -> int:
        return self.then.free_count if self.then else super().free_count(group)

    def ref_counts(self, group: int) -> Sequence[int]:
        """Of a block that a copy writes, the copy counts as well."""
        if self.then:
            return self.then.ref_counts
        counts = list(super().ref_counts(group))
        for copy in self._offloading.copies.values():
            for block in copy.targets:
                counts[block] += 1
        return counts

    def free_blocks(self, group: int) -> Sequence[int]:
        return self.then.free_blocks if self.then else super().free_blocks(group)

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return self.then.findable if self.then else super().index(group)

    def table(self, request: int, group: int) -> Sequence[int]:
        if self.then:
            return self.then.tables.get(self._offloading.live[request].name, ())
        return super().table(request, group)

    def standing(self, request: int) -> Standing:
        live = self._offloading.live[request]
        rows = (len(self.table(request, 0)),)
        if live.swapped:
            return "swapped", live.tokens, live.suspended, rows
        if live.suspended:
            return "loading", live.tokens, 0, rows
        return super().standing(request)

    # -- the host ------------------------------------------------------------------------------

    def free_tier_count(self, tier: Tier, group: int) -> int:
        then = self.then_on_host
        return self._offloading.free_on_host() if then is None else then

    def tier_index(self, tier: Tier, group: int) -> Mapping[bytes, int]:
        """Nothing is found there: it is all some request's."""
        return {}

    def tier_pins(self, tier: Tier, group: int) -> Sequence[int]:
        pins = [0] * self._offloading.configuration.host_blocks
        for copy in self._offloading.copies.values():
            for slot in copy.sources:
                pins[slot] += 1
        return pins

    def victims(self, tier: Tier, group: int) -> Sequence[int]:
        return ()

    def transfers(self) -> Sequence[int]:
        return list(self._offloading.copies)

    def tier_content(self, tier: Tier, group: int, slot: int) -> bytes | None:
        """Not promised: the bytes are compared when a step reads them (``ForeignKv``)."""
        return None


class OffloadingCache(OverheardCache):
    """The engine's cache and its host: an operation is done by the engine, and told then."""

    capabilities = OverheardCache.capabilities | {"complete"}
    semantics = replace(
        OverheardCache.semantics,
        swaps=True,
        tiers=True,
        disk=False,
        needs_host=True,
        exact_tiers=False,
        tier_bytes=False,
        host_order="any",
    )
    _view: OffloadingView

    def __init__(
        self,
        configuration: Configuration,
        processor: ContinuousBatchProcessor,
        listener: Listener,
    ) -> None:
        self.manager: Any = processor.offloading_manager
        self._module = inspect.getmodule(type(self.manager))
        self.host: Any = self.manager._cpu_pool
        self.copies: dict[int, TransferStarted] = {}
        """Back to the device, in flight."""
        super().__init__(configuration, processor, listener)
        self._view = OffloadingView(self)
        self._numbers = count()
        self._victims: list[Victim] = []
        self._free_on_host: list[int] = []
        """After each change of the host that the manager makes in one go."""
        self._sampled: dict[int, int] = {}
        """Of requests that are being copied back: where their new token ends."""
        self._listen(self.manager, "_offload_to_cpu")
        self._listen(self.manager, "_reserve_cpu_blocks")
        self._listen(self.manager, "restore_scheduled_requests")
        self._listen(self.manager, "free_request_cpu_cache")
        self._listen_to_host(self.host.free_blocks)

    def _listen_to_host(self, original: Callable[[int, list[int]], None]) -> None:
        def free_blocks(index: int, blocks: list[int]) -> None:
            original(index, blocks)
            self._free_on_host.append(self.free_on_host())

        self.host.free_blocks = free_blocks

    def free_on_host(self) -> int:
        unassigned: int = self.host.num_free_sectors * self.allocator.blocks_per_sector
        free: int = self.host.count_free_blocks(self.allocator.index)
        return unassigned + free

    def _slots(self, name: str) -> list[int]:
        """The host blocks that the manager keeps for a request."""
        kept = self.manager._request_id_to_cpu_blocks.get(name, {})
        return [slot for slots in kept.values() for slot in slots]

    # -- out -----------------------------------------------------------------------------------

    def _free_blocks(
        self, original: Callable[..., None], name: str, no_cache: bool = False
    ) -> None:
        live = self.by_name.get(name)
        if live is not None and live.running and no_cache:
            blocks = self._table(name)
            keys = self._keys_of(blocks)
            original(name, no_cache)
            self._victims.append(Victim(live, blocks, self._lost(keys), self._view.moment()))
        elif live is not None and live.swapped:
            original(name, no_cache)  # nothing on the device; the host's are given up apart
        else:
            super()._free_blocks(original, name, no_cache)

    def _reserve_cpu_blocks(
        self, original: Callable[..., Any], block_counts: dict[str, int]
    ) -> dict[str, list[int]] | None:
        reserved: dict[str, list[int]] | None = original(block_counts)
        self._free_on_host.append(self.free_on_host())
        return reserved

    def _offload_to_cpu(
        self,
        original: Callable[..., set[str]],
        states: list[RequestState],
        tables: dict[str, dict[str, list[int]]],
    ) -> set[str]:
        self._free_on_host = []
        offloaded = original(states, tables)
        victims, self._victims = self._victims, []
        for victim, free in zip(victims, self._frees(), strict=False):
            self._view.then, self._view.then_on_host = victim.then, free
            self._tell_victim(victim, victim.live.name in offloaded)
        self._view.then = self._view.then_on_host = None
        return offloaded

    def _frees(self) -> Iterator[int | None]:
        """What was free on the host after each step of the manager; None, for as it is now, where
        it skipped one."""
        return chain(self._free_on_host, repeat(None))

    def _tell_victim(self, victim: Victim, offloaded: bool) -> None:
        live, blocks = victim.live, victim.blocks
        number = next(self._numbers)
        if offloaded:
            slots = self._slots(live.name)
            self._events.append(
                TransferStarted(number, "swap_out", 0, blocks, slots, (), live.number)
            )
        self._events.append(BlocksReleased(0, live.number, blocks))
        if offloaded:
            self._events.append(TransferEnded(number, "completed"))
        self._tell_lost(victim.lost)
        self._preempt(live, (number,) if offloaded else ())

    # -- back ----------------------------------------------------------------------------------

    def _load(self, live: Told) -> tuple[int, ...]:
        if not live.swapped:
            return ()
        live.swapped = False
        slots = self._slots(live.name)
        copy = TransferStarted(
            next(self._numbers),
            "swap_in",
            0,
            slots,
            self._table(live.name)[: len(slots)],
            (),
            live.number,
        )
        self.copies[copy.transfer] = copy
        self._events.append(copy)
        return (copy.transfer,)

    def _grow(self, live: Told, end: int) -> None:
        if live.suspended:
            self._sampled[live.number] = end
        else:
            super()._grow(live, end)

    def _restore_scheduled_requests(
        self, original: Callable[..., None], batch: list[FutureRequestState]
    ) -> None:
        offloaded = [future.state for future in batch if future.state.is_cpu_offloaded]
        self._free_on_host = []
        with own_memory(self._module):
            original(batch)
        restored = [state for state in offloaded if not state.is_cpu_offloaded]
        for state, free in zip(restored, self._frees(), strict=False):
            self._view.then_on_host = free
            self._tell_restored(self.by_name[state.request_id])
        self._view.then_on_host = None

    def _tell_restored(self, live: Told) -> None:
        numbers = [copy.request for copy in self.copies.values()]
        index = numbers.index(live.number)
        transfer = list(self.copies)[index]
        del self.copies[transfer]
        live.computed, live.suspended = live.suspended, 0
        self._events.append(TransferEnded(transfer, "completed"))
        self._tell(Complete(index), transfers=(transfer,))
        end = self._sampled.pop(live.number, None)
        if end is not None:
            super()._grow(live, end)

    # -- given up ------------------------------------------------------------------------------

    def _free_request_cpu_cache(self, original: Callable[..., None], state: RequestState) -> None:
        live, slots = self.by_name.get(state.request_id), self._slots(state.request_id)
        original(state)
        if live is not None and live.swapped:
            live.swapped, live.suspended = False, 0
            self._events.append(SlotsReleased("host", 0, live.number, slots))
            self._end(live, cancelled=True)
            self._listener.cancelled(live.name)
