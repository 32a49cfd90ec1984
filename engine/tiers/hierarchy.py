"""The memory hierarchy below the device, and what may be asked of it.

It has two meanings, which share the host's blocks and are accounted apart:

* *prefix offload*: findable blocks are copied downwards (store: device to host, demote: host to
  disk) and, when a prompt has a use for them, back upwards (fetch, promote).  These copies are for
  no request: what arrives on the device is a cached block as any other.  The tiers are inclusive:
  a copy downwards drops nothing above.
* *suspension*: a preempted request's blocks are swapped out to the host, which keeps them for that
  request alone, and swapped in when it is resumed.

Every operation is all-or-nothing, over all KV cache groups: what cannot be done is refused, and
then nothing was started and nothing evicted.

A copy upwards evicts nothing of the prompt that it is for: neither from the host, nor from the
device what it extends there, the blocks before the first that the device lacks.  The next victims
behind them go instead; the order of eviction stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, dropwhile, islice, takewhile
from typing import Literal

from kvproof.engine.pool import BlockPool
from kvproof.engine.request import Request
from kvproof.engine.tiers.pool import TierPool
from kvproof.engine.tiers.transfer import Transfer
from kvproof.engine.tiers.transfers import Transfers
from kvproof.invariants.operations import Tier
from kvproof.invariants.outcomes import (
    DISK_ERROR,
    NO_DISK_BLOCKS,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
    RETRY,
    Answer,
    Outcome,
)

_WORST_FIRST: tuple[Answer, ...] = ("miss", "retry", "hit_pending", "hit")
_LACK: dict[Tier, str] = {
    "device": NO_FREE_BLOCKS,
    "host": NO_HOST_BLOCKS,
    "disk": NO_DISK_BLOCKS,
}
Entry = tuple[int, bytes]
"""A block or slot, and the key under which it is findable."""


class Hierarchy(Transfers):
    """Host, disk and transfers of one engine, whose device pools it is given."""

    # -- what the tiers have ---------------------------------------------------------------------

    def answer(self, group: int, key: bytes) -> Answer:
        """What host and disk say about a row that the device lacks."""
        host = self.host[group]
        if key in self.promoting[group]:
            return "hit_pending"
        if key in host.index:
            return "hit"
        if key in host.pending:
            return "hit_pending"
        if not self.disk:
            return "miss"
        if self.slow:
            return "retry"
        return "hit" if key in self.disk[group].index else "miss"

    def lookup(self, request: Request, row: int) -> Answer:
        """What they say about one row of a request; of the groups whose device lacks it, the worst
        answer counts."""
        keys = [request.block_keys(pool.group, row + 1)[row + 1] for pool in self.device]
        answers = [
            self.answer(pool.group, key)
            for pool, key in zip(self.device, keys, strict=True)
            if key not in pool.index
        ]
        return min(answers, key=_WORST_FIRST.index)

    def count_lookup(self, request: Request, rows: int) -> None:
        """Count an admission: for each of so many rows, the highest tier that has it.

        The first row that no tier has, and all behind it, are misses of every tier.
        """
        counters, found, left = self.counters, self._levels(request, rows), rows
        for tier in ("device", "host", "disk") if self.disk else ("device", "host"):
            counters.tier_queries[tier] += left
            counters.tier_hits[tier] += found.count(tier)
            left -= found.count(tier)

    def _levels(self, request: Request, rows: int) -> list[Tier | None]:
        """The highest tier that has a row in all groups, for the rows before the first miss."""
        keys = [request.block_keys(group, rows)[1 : rows + 1] for group in range(len(self.device))]
        levels: list[Tier | None] = [None] * rows
        pools: tuple[tuple[Tier, Sequence[BlockPool | TierPool]], ...] = (
            ("disk", self.disk),
            ("host", self.host),
            ("device", self.device),
        )
        for tier, of_groups in pools:
            there: Sequence[int] = range(rows) if of_groups else ()
            for of_group, pool in zip(keys, of_groups, strict=False):
                there = [row for row in there if of_group[row] in pool.index]
            for row in there:
                levels[row] = tier
        return levels[: levels.index(None)] if None in levels else levels

    def touch(self, request: Request, rows: int) -> None:
        """The device had these rows: the host's copies of them are in use as well."""
        for group, pool in enumerate(self.host):
            pool.touch(request.block_keys(group, rows)[1 : rows + 1])

    # -- prefix offload --------------------------------------------------------------------------

    def offload(self, to: Tier, first: int, blocks: int) -> Outcome:
        """Start copies to host or disk of what was not copied since it became findable.

        The ``first`` in the queue begins, round its end; ``blocks`` of them at most (0: all).
        Refused with ``offload_off``, ``nothing_to_move``, ``no_host_blocks``, ``no_disk_blocks``,
        ``no_free_blocks``, or ``disk_error`` if the disk does not take the note of what it evicts.
        """
        if not self.caches(to):
            return _refused(OFFLOAD_OFF)
        waiting = self._storable if to == "host" else self._savable
        chosen = [waiting(group, first, blocks) for group in range(len(self.device))]
        if not any(chosen):
            return _refused(NOTHING_TO_MOVE)
        for group, entries in enumerate(chosen):
            lack = self._lack_to_offload(to, group, entries)
            if lack:
                return _refused(lack)
        if to == "disk" and not self._make_room_on_disk(chosen):
            return _refused(DISK_ERROR)
        return _started([self._offload(to, g, entries) for g, entries in enumerate(chosen)])

    def _storable(self, group: int, first: int, blocks: int) -> list[Entry]:
        """Device blocks whose turn it is to be copied to the host."""
        index = self.device[group].index
        return [(index[key][0], key) for key in _turn(self.unstored[group], first, blocks)]

    def _savable(self, group: int, first: int, blocks: int) -> list[Entry]:
        """Host slots whose turn it is to be copied to the disk."""
        pool = self.host[group]
        return [(pool.index[key], key) for key in _turn(pool.unsaved, first, blocks)]

    def _lack_to_offload(self, to: Tier, group: int, entries: Sequence[Entry]) -> str:
        """What is not there for such a copy; using what was free takes from the free ones, too."""
        blocks = [block for block, _ in entries]
        device, host = self.device[group], self.host[group]
        if len(blocks) > self.pools(to)[group].room():
            return _LACK[to]
        if to == "host":
            return NO_FREE_BLOCKS if device.count_unreferenced(blocks) > device.free_count else ""
        return NO_HOST_BLOCKS if host.count_evictable(blocks) > host.free_count else ""

    def _make_room_on_disk(self, chosen: Sequence[Sequence[Entry]]) -> bool:
        """Whether the disk takes the notes of what it is about to evict for them."""
        pools = zip(self.disk, chosen, strict=True)
        return self.drop_files([pool.lacking(len(entries)) for pool, entries in pools])

    def _offload(self, to: Tier, group: int, entries: Sequence[Entry]) -> Transfer | None:
        if not entries:
            return None
        blocks, keys = zip(*entries, strict=True)
        targets = self.pools(to)[group].take(len(blocks))
        return self._start("store" if to == "host" else "demote", group, blocks, targets, keys)

    def promote(self, to: Tier, request: Request, *, hit: int, rows: int, blocks: int) -> Outcome:
        """Start copies to device or host of a prompt's blocks, of which the tier below has them.

        Of the first ``rows`` rows, of which the device has ``hit``; ``blocks`` of them at most
        (0: all).  Refused with ``offload_off``, ``retry``, ``nothing_to_move``,
        ``no_free_blocks``, ``no_host_blocks`` or ``no_disk_blocks``.
        """
        source: Tier = "host" if to == "device" else "disk"
        if not self.caches(source):
            return _refused(OFFLOAD_OFF)
        answer: Answer | Literal[""] = self.lookup(request, hit) if hit < rows else ""
        groups = range(len(self.device))
        if to == "host" and self.slow:
            self.counters.stalls += 1
            return _refused(RETRY, answer)
        wanted = [self._missing(to, group, request, rows) for group in groups]
        chosen = [self._at_hand(source, group, wanted[group], blocks) for group in groups]
        if not any(chosen):
            return _refused(NOTHING_TO_MOVE, answer)
        own = self._prefix_on_device if to == "device" else self._on_host
        protected = [own(group, request, rows) for group in groups]
        for group in groups:
            lack = self._lack_to_promote(to, group, chosen[group], protected[group])
            if lack:
                return _refused(lack, answer)
        started = [self._promote(to, group, chosen[group], protected[group]) for group in groups]
        return _started(started, answer)

    def _missing(self, to: Tier, group: int, request: Request, rows: int) -> list[bytes]:
        """The first run of keys that are neither there nor on their way there."""
        there = self._is_there(to, group)
        keys = request.block_keys(group, rows)[1 : rows + 1]
        return list(takewhile(lambda key: not there(key), dropwhile(there, keys)))

    def _is_there(self, to: Tier, group: int) -> Callable[[bytes], bool]:
        device, promoting, host = self.device[group].index, self.promoting[group], self.host[group]
        if to == "device":
            return lambda key: key in device or key in promoting
        return lambda key: key in device or key in promoting or host.awaits_or_has(key)

    def _at_hand(self, source: Tier, group: int, keys: Sequence[bytes], most: int) -> list[Entry]:
        """Where the tier below has them, up to the first that it has not."""
        index, found = self.pools(source)[group].index, []
        for key in keys[: most or None]:
            if key not in index:
                break
            found.append((index[key], key))
        return found

    def _prefix_on_device(self, group: int, request: Request, rows: int) -> set[int]:
        """What a promotion extends."""
        return set(self.device[group].match(request.block_keys(group, rows), rows))

    def _on_host(self, group: int, request: Request, rows: int) -> set[int]:
        """The prompt's own slots."""
        index = self.host[group].index
        return {index[key] for key in request.block_keys(group, rows)[1 : rows + 1] if key in index}

    def _lack_to_promote(
        self, to: Tier, group: int, entries: Sequence[Entry], protected: Collection[int]
    ) -> str:
        slots, host = [slot for slot, _ in entries], self.host[group]
        if to == "device":
            if len(slots) > self.device[group].room(protected):
                return NO_FREE_BLOCKS
            return NO_HOST_BLOCKS if host.count_evictable(slots) > host.free_count else ""
        disk = self.disk[group]
        if len(slots) > host.room(protected):
            return NO_HOST_BLOCKS
        return NO_DISK_BLOCKS if disk.count_evictable(slots) > disk.free_count else ""

    def _promote(
        self, to: Tier, group: int, entries: Sequence[Entry], protected: Collection[int]
    ) -> Transfer | None:
        if not entries:
            return None
        slots, keys = zip(*entries, strict=True)
        if to == "device":
            targets = self.device[group].take(len(slots), protected)
            return self._start("promote", group, slots, targets, keys)
        targets = self.host[group].take(len(slots), protected)
        return self._start("fetch", group, slots, targets, keys)

    # -- suspension ------------------------------------------------------------------------------

    def swap_out(self, request: Request, rows: int) -> list[Transfer]:
        """Start to copy a request's first rows to slots of its own, for which there is room."""
        request.suspended = request.computed
        request.host_tables = [pool.take(rows) for pool in self.host]
        return [
            self._start("swap_out", group, request.tables[group][:rows], slots, (), request)
            for group, slots in enumerate(request.host_tables)
        ]

    def swap_in(self, request: Request) -> list[Transfer]:
        """Start to copy them back, to the first blocks of its new table."""
        return [
            self._start("swap_in", group, slots, request.tables[group][: len(slots)], (), request)
            for group, slots in enumerate(request.host_tables)
        ]

    def departing(self, request: Request) -> bool:
        """Whether a suspended request's blocks have not left the device yet."""
        return request.swapped and bool(request.transfers)


def _turn(queue: dict[bytes, None], first: int, blocks: int) -> Iterator[bytes]:
    """So many keys of a queue (0: all) from the ``first`` on, round its end."""
    start = first % len(queue) if queue else 0
    return islice(chain(islice(queue, start, None), islice(queue, start)), blocks or None)


def _refused(reason: str, answer: Answer | Literal[""] = "") -> Outcome:
    return Outcome("refused", reason, lookup=answer)


def _started(transfers: Sequence[Transfer | None], answer: Answer | Literal[""] = "") -> Outcome:
    started = [transfer for transfer in transfers if transfer is not None]
    blocks = sum([len(transfer.sources) for transfer in started])
    numbers = tuple([transfer.id for transfer in started])
    return Outcome("done", count=blocks, lookup=answer, transfers=numbers)
