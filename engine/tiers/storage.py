"""What is where below the device: slots, the bytes in them, and what waits to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from kvproof.engine.eviction import EVICTION_ORDERS
from kvproof.engine.pool import BlockPool
from kvproof.engine.request import Request
from kvproof.engine.tiers.census import Census
from kvproof.engine.tiers.disk import DiskFile, Files
from kvproof.engine.tiers.memory import NOBODYS, PAYLOAD_BYTES, Memory, label, unfinished
from kvproof.engine.tiers.pool import TierPool, Watch
from kvproof.invariants.events import Event, StepItem, TierReopened
from kvproof.invariants.operations import Tier
from kvproof.invariants.subject import Configuration


class Storage:
    """The tiers of one engine.  Raises ValueError for a disk without a folder."""

    def __init__(
        self,
        configuration: Configuration,
        device: list[BlockPool],
        events: list[Event],
        *,
        folder: Path | None,
        files: Files | None,
    ) -> None:
        self.configuration = configuration
        self.device = device
        self.host: list[TierPool] = []
        self.disk: list[TierPool] = []
        """Both by group; empty where there is no such tier."""
        self.files: list[DiskFile] = []
        self.unstored: list[dict[bytes, None]] = [{} for _ in device]
        """By group: what became findable on the device and was not offered to the host since."""
        self.promoting: list[dict[bytes, None]] = [{} for _ in device]
        """Keys on their way to the device."""
        self.slow = False
        """Whether the disk takes its time: then it has no answer yet."""
        self.census = Census()
        self.memory = Memory(len(device), configuration.blocks, configuration.host_blocks)
        self._events = events
        self._folder = folder
        self._file_system = files
        self._make_tiers()

    def _make_tiers(self) -> None:
        configuration, groups = self.configuration, range(len(self.device))
        order = EVICTION_ORDERS[configuration.host_eviction]
        blocks = configuration.host_blocks
        self.host = [
            TierPool("host", blocks, group, order(blocks), self._events) for group in groups
        ]
        if not configuration.offloads_prefixes:
            return
        for group in groups:
            self.device[group].watch = self._watch_device(group)
            self.host[group].watch = self._watch_host(group)
        if configuration.disk_blocks:
            self._make_disk()

    def _make_disk(self) -> None:
        if self._folder is None:
            raise ValueError("a disk tier needs a folder")
        blocks = self.configuration.disk_blocks
        order = EVICTION_ORDERS[self.configuration.disk_eviction]
        for group in range(len(self.device)):
            pool = TierPool("disk", blocks, group, order(blocks), self._events)
            pool.watch = self.census.watcher("disk")
            self.disk.append(pool)
            self.files.append(self._open_file(group))
            self._rebuild(group)

    def _open_file(self, group: int) -> DiskFile:
        assert self._folder is not None
        folder = self._folder / str(group)
        folder.mkdir(exist_ok=True)
        return DiskFile(
            folder,
            slots=self.configuration.disk_blocks,
            unit_tokens=self.configuration.block_size,
            payload_bytes=PAYLOAD_BYTES,
            files=self._file_system,
        )

    # -- what became findable, and is to be copied downwards -------------------------------------

    def _watch_device(self, group: int) -> Watch:
        note, queue, host = self.census.watcher("device"), self.unstored[group], self.host[group]

        def watch(key: bytes, findable: bool) -> None:
            note(key, findable)
            if not findable:
                queue.pop(key, None)
            elif not host.awaits_or_has(key):
                queue[key] = None

        return watch

    def _watch_host(self, group: int) -> Watch:
        note, queue = self.census.watcher("host"), self.host[group].unsaved

        def watch(key: bytes, findable: bool) -> None:
            note(key, findable)
            if not findable:
                queue.pop(key, None)
            elif self.disk and not self.disk[group].awaits_or_has(key):
                queue[key] = None

        return watch

    # -- all tiers alike -------------------------------------------------------------------------

    def caches(self, tier: Tier) -> bool:
        """Whether completed blocks are copied to this tier."""
        return bool(self.disk) if tier == "disk" else self.configuration.offloads_prefixes

    def pools(self, tier: Tier) -> list[TierPool]:
        """Host or disk, by group."""
        return self.host if tier == "host" else self.disk

    def evict(self, tier: Tier, count: int) -> int | None:
        """Make up to ``count`` blocks a group unfindable; says how many.

        None if the disk does not take the note of it, and nothing was done.
        """
        pools = self.pools(tier)
        victims = [list(islice(pool.victims(), count)) for pool in pools]
        if tier == "disk" and not self.drop_files(victims):
            return None
        return sum([pool.evict(count, "request") for pool in pools])

    def reset(self) -> int | None:
        """Empty host and disk of what is findable; says how many blocks that were.

        None if the disk does not take the note of it, and nothing was done.
        """
        if not self.drop_files([list(pool.victims()) for pool in self.disk]):
            return None
        return sum([pool.evict(len(pool.index), "reset") for pool in (*self.host, *self.disk)])

    def drop_files(self, slots: Sequence[Sequence[int]]) -> bool:
        """Note, before it is done, what is dropped from the disk, by group.

        Whether all files took it; otherwise it counts in none.
        """
        dropped = []
        for group, file in enumerate(self.files):
            try:
                dropped.append(file.drop(slots[group]))
            except OSError:
                for other, entries in enumerate(dropped):
                    self.files[other].restore(entries)
                return False
        return True

    def drop_damaged(self, group: int, slots: Sequence[int]) -> int:
        """Drop those of these disk slots that are damaged, and not in use; says how many."""
        pool, file = self.disk[group], self.files[group]
        damaged = [slot for slot in slots if not pool.pins[slot] and file.lost(slot)]
        pool.drop(damaged, "corrupt")
        file.lose(damaged)
        return len(damaged)

    # -- the disk comes back ---------------------------------------------------------------------

    def _reopen(self) -> None:
        """Open the files again, and believe them; no slot is pinned."""
        for group, file in enumerate(self.files):
            file.close()
            self.files[group] = self._open_file(group)
            self._rebuild(group)
            file = self.files[group]
            keys = [key for _, key in file.entries.values()]
            self._events.append(TierReopened(group, list(file.entries), keys, file.damaged))

    def _rebuild(self, group: int) -> None:
        found = [(slot, key) for slot, (_, key) in self.files[group].entries.items()]
        self.disk[group].rebuild(found)
        for _, key in found:
            self.host[group].unsaved.pop(key, None)

    # -- what is really there --------------------------------------------------------------------

    def computed(self, item: StepItem, request: Request | None) -> None:
        """A step has written into the device blocks of its item; what is void is nobody's."""
        size = self.configuration.block_size
        first, (full, left) = item.start // size, divmod(item.end, size)
        for group, table in enumerate(item.tables):
            cells = self.memory.cells["device"][group]
            if request is None:
                for block in table[first : full + (left > 0)]:
                    cells[block] = NOBODYS
                continue
            keys = request.block_keys(group, full)
            for block, key in zip(table[first:full], keys[first + 1 : full + 1], strict=False):
                cells[block] = key
            for block in table[full : full + 1] if left else ():
                cells[block] = unfinished(keys[full], left)

    def copied(self, group: int, source: int, target: int) -> None:
        """A device block was copied before it is written (copy-on-write)."""
        cells = self.memory.cells["device"][group]
        cells[target] = cells[source]

    def content(self, tier: Tier, group: int, slot: int) -> bytes | None:
        """The key under which the bytes of a block were computed; None if they are damaged."""
        if tier == "disk":
            found = self.files[group].read(slot)
            return None if found is None else label(found[2])
        return self.memory.cells[tier][group][slot]
