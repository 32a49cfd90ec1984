"""The scheduler's use of the memory hierarchy: what is copied, when, and when it has arrived.

Before each plan, and while time passes, blocks that were completed since are copied to the host,
unless it has them, and from there to the disk (write-through).  Each is copied once.  What a lower
tier evicts is not copied there again while the tier above still has it: it would only push out
what came after it.  So what the device evicts later is below as long as there is room for it, and
no longer.  For the first waiting requests, what a lower tier has of their prompts is promoted,
while their whole prompts fit the free blocks.

A request whose next block is on its way is *deferred*: neither it nor any that arrived later is
shown to the policy, so that nobody overtakes it, and it is admitted with the hit that it waited
for.  A request is promoted for a few times only: under pressure what was promoted may be evicted
again before the request can be admitted, and it must not wait for ever.

Each kind of copy has a channel of its own, which serves one copy after another.  The scheduler
looks at them before plans, when a step ends, and while time passes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from kvproof.engine.job import Job
from kvproof.invariants.events import TransferKind
from kvproof.invariants.operations import Complete, Offload, Operation, Promote
from kvproof.invariants.scheduling.vocabulary import Deferred, TransferDelivered, TransferQueued

if TYPE_CHECKING:
    from kvproof.engine.scheduler import Scheduler

LOOKED_AT = 4
"""Waiting requests that are promoted for, the first ones."""
PROMOTIONS_MAX = 4
"""Copies towards the device that are begun for one waiting request."""
KINDS: tuple[TransferKind, ...] = ("store", "demote", "fetch", "promote")


class Channel:
    """What the copies of one kind amount to."""

    __slots__ = ("busy_ns", "count", "free_ns", "time_ns")

    def __init__(self) -> None:
        self.free_ns = 0
        """When all that is queued will have been served."""
        self.count = 0
        """Copies that were delivered …"""
        self.time_ns = 0
        """… how long that took from their start …"""
        self.busy_ns = 0
        """… and how much of it they were served."""


class Offloader:
    """The copies of one scheduler, over the engine that it drives."""

    def __init__(self, scheduler: Scheduler) -> None:
        configuration = scheduler.configuration
        self.deferred: tuple[int, ...] = ()
        """Waiting requests whose KV is on its way, as of the latest plan."""
        self.stalls = 0
        """Request-iterations that were deferred …"""
        self.stall_ns = 0
        """… and the time until the next plan of each."""
        self.channels = {kind: Channel() for kind in KINDS}
        self._scheduler = scheduler
        self._engine = scheduler.engine
        assert scheduler.engine.hierarchy is not None, "offload needs tiers"
        self._hierarchy = scheduler.engine.hierarchy
        self._block_size = configuration.block_size
        self._block_bytes = configuration.block_size * configuration.kv_bytes_per_token
        self._in_flight: list[tuple[int, int, TransferQueued]] = []
        """A heap: copies by the time when they are due, and by their start."""
        self._looked_ns = 0
        """Time of the latest look at what is deferred."""

    @property
    def next_delivery_ns(self) -> int | None:
        """When the next copy will have arrived; None if none is in flight."""
        return self._in_flight[0][0] if self._in_flight else None

    def before_plan(self) -> None:
        """Copy what is queued, promote for the first waiting requests, and see who waits for it."""
        self.deliver()
        self._copy_down()
        self._promote_and_defer()

    # -- downwards -------------------------------------------------------------------------------

    def _copy_down(self) -> None:
        hierarchy = self._hierarchy
        queued = min([len(queue) for queue in hierarchy.unstored])
        if queued:
            count = min(queued, min([pool.room() for pool in hierarchy.host]))
            if count:
                self._start(Offload("host", blocks=count))
        if hierarchy.disk:
            queued = min([len(pool.unsaved) for pool in hierarchy.host])
            if queued:
                count = min(queued, min([pool.room() for pool in hierarchy.disk]))
                if count:
                    self._start(Offload("disk", blocks=count))

    # -- upwards ---------------------------------------------------------------------------------

    def _promote_and_defer(self) -> None:
        scheduler = self._scheduler
        first = [scheduler.jobs[state.id] for state in islice(scheduler.waiting, LOOKED_AT)]
        if first and not scheduler.suspended:  # those are admitted first: what is free is theirs
            free = min([pool.free_count for pool in self._engine.pools])
            for job in first:
                free -= scheduler.hit_of(job).blocks_for(job.prompt_tokens, self._block_size)
                if free < 0:
                    break
                if job.promotions < PROMOTIONS_MAX and self._answer(job) == "hit":
                    self._promote(job)
        # What was promoted last may have evicted what others would have hit.
        coming = any(copy.kind in ("fetch", "promote") for *_, copy in self._in_flight)
        waiting = [job for job in first if self._answer(job) == "hit_pending"] if coming else []
        self._defer(tuple([job.id for job in waiting]))

    def _answer(self, job: Job) -> str:
        """What the tiers say about the first block of its prompt that the device lacks; nothing
        if it lacks none below the last token."""
        rows = self._scheduler.hit_of(job).blocks
        if rows >= self._rows(job):
            return ""
        return self._hierarchy.lookup(self._scheduler.cache.prepare(job.admit), rows)

    def _rows(self, job: Job) -> int:
        """Blocks of its prompt that a hit may be on."""
        return (job.prompt_tokens - 1) // self._block_size

    def _promote(self, job: Job) -> None:
        """From the host what it has; and to the host what follows on disk."""
        asked = (job.admit.prompt, job.admit.salt, job.admit.adapter)
        host, disk = self._next_rows(job)
        if host and self._start(Promote(*asked)):
            job.promotions += 1
        if disk and self._start(Promote(*asked, to="host")):
            job.promotions += 1

    def _next_rows(self, job: Job) -> tuple[bool, bool]:
        """Whether the host has the first block that the device lacks; and whether the disk has
        the first that neither has."""
        first, last = self._scheduler.hit_of(job).blocks + 1, self._rows(job)
        keys = self._scheduler.cache.prepare(job.admit).block_keys(0, last)
        device, host = self._engine.pools[0].index, self._hierarchy.host[0]
        disk = self._hierarchy.disk[0].index if self._hierarchy.disk else {}
        row = first
        while row <= last and (keys[row] in device or host.awaits_or_has(keys[row])):
            row += 1
        return keys[first] in host.index, row <= last and keys[row] in disk

    def _defer(self, requests: tuple[int, ...]) -> None:
        """From this plan on these requests wait for their KV."""
        if not requests and not self.deferred:
            return
        now_ns, jobs = self._scheduler.clock.now_ns, self._scheduler.jobs
        still = [number for number in self.deferred if number in jobs]
        self.stall_ns += len(still) * (now_ns - self._looked_ns)
        self.stalls += len(requests)
        self.deferred, self._looked_ns = requests, now_ns
        self._scheduler.emit(Deferred(requests, now_ns))

    # -- copies in flight ------------------------------------------------------------------------

    def _start(self, operation: Operation) -> bool:
        """Start the copies, and queue them; whether there are any."""
        outcome = self._scheduler.perform(operation)
        for number in outcome.transfers if outcome.status == "done" else ():
            self._queue(number)
        return outcome.status == "done"

    def _queue(self, number: int) -> None:
        transfer = self._hierarchy.transfers[number]
        kind, blocks = transfer.kind, len(transfer.sources)
        scheduler, channel = self._scheduler, self.channels[kind]
        now_ns, count_bytes = scheduler.clock.now_ns, blocks * self._block_bytes
        due_ns = max(now_ns, channel.free_ns) + scheduler.cost.copy_ns(kind, count_bytes)
        channel.free_ns = due_ns
        queued = TransferQueued(
            number, kind, blocks, count_bytes, now_ns, due_ns, *scheduler.cost.copy_rate(kind)
        )
        heappush(self._in_flight, (due_ns, number, queued))
        scheduler.emit(queued)

    def deliver(self) -> None:
        """End the copies that have arrived by now."""
        now_ns = self._scheduler.clock.now_ns
        while self._in_flight and self._in_flight[0][0] <= now_ns:
            self._complete(heappop(self._in_flight)[2], now_ns)

    def _complete(self, queued: TransferQueued, now_ns: int) -> None:
        scheduler, number = self._scheduler, queued.transfer
        index = list(self._hierarchy.transfers).index(number)
        scheduler.must(Complete(index))
        channel = self.channels[queued.kind]
        channel.count += 1
        channel.time_ns += now_ns - queued.now_ns
        channel.busy_ns += scheduler.cost.copy_ns(queued.kind, queued.bytes)
        scheduler.emit(TransferDelivered(number, now_ns))

    def wait_until(self, time_ns: int) -> None:
        """Time passes: what is queued is copied, and each copy delivered when it has arrived.

        After a copy that fails no more are begun: what fails once may fail for ever.
        """
        clock, counters = self._scheduler.clock, self._engine.counters
        failed = counters.transfers_failed
        self.deliver()
        self._copy_down()
        while self._in_flight and self._in_flight[0][0] <= time_ns:
            clock.advance_to(self._in_flight[0][0])
            self.deliver()
            if counters.transfers_failed == failed:
                self._copy_down()
        clock.advance_to(time_ns)

    # -- figures ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Stalls and the times of copies, beside what the engine counts."""
        channels = self.channels
        return {
            "stalls": self.stalls,
            "stall_time_ns": self.stall_ns,
            "promotions": channels["promote"].count,
            "promotion_time_ns": channels["promote"].time_ns,
            "fetches": channels["fetch"].count,
            "fetch_time_ns": channels["fetch"].time_ns,
            "store_busy_ns": channels["store"].busy_ns,
            "promote_busy_ns": channels["promote"].busy_ns,
            "demote_busy_ns": channels["demote"].busy_ns,
            "fetch_busy_ns": channels["fetch"].busy_ns,
        }


NO_COPIES = dict.fromkeys(
    (
        "stalls",
        "stall_time_ns",
        "promotions",
        "promotion_time_ns",
        "fetches",
        "fetch_time_ns",
        "store_busy_ns",
        "promote_busy_ns",
        "demote_busy_ns",
        "fetch_busy_ns",
    ),
    0,
)
"""The figures of a scheduler without prefix offload."""
