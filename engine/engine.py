"""The paged-cache engine: requests, block tables, prefix reuse, steps.

Every public operation is all-or-nothing: it answers with an outcome and, where it refuses,
leaves everything as it was.  Every state change appends a typed event to ``events``.

A request's life: admitted (waiting is the caller's queue) → running → finished or aborted;
running → preempted → resumed → running; what was swapped out may be loading before it runs on.
A step is launched and retired separately: in between its requests' results are not known, and the
blocks it reads and writes are not reused.  What is below the device, :mod:`kvproof.engine.tiers`
keeps.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal

from kvproof.engine.arithmetic import (
    blocks_needed,
    blocks_to_take,
    copy_needed,
    full_blocks,
    hit_tokens,
)
from kvproof.engine.eviction import EVICTION_ORDERS, EvictionPolicyFactory
from kvproof.engine.metrics import Counters
from kvproof.engine.pool import BlockPool
from kvproof.engine.request import Request
from kvproof.engine.steps import Step
from kvproof.engine.tiers.disk import Files
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    ReleaseFenced,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import Media, Tier
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    DISK_ERROR,
    HIT_PENDING,
    IN_FLIGHT,
    LARGER_THAN_POOL,
    LOADING,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOT_COMPUTED,
    NOTHING_TO_RUN,
    OFFLOAD_OFF,
    RETRY,
    RUN_AHEAD_LIMIT,
    TOO_MANY_REQUESTS,
    Answer,
    Outcome,
)
from kvproof.invariants.subject import Configuration

_by_id = attrgetter("id")


class Engine:
    """Full attention on the device tier, one pool and one block table per KV cache group.

    Device blocks are evicted as the configuration says, or by the policy that is handed in.
    ``folder`` is where a disk tier keeps its files, ``files`` what it writes them with.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        groups: int = 1,
        eviction: EvictionPolicyFactory | None = None,
        folder: Path | None = None,
        files: Files | None = None,
    ) -> None:
        order = eviction or EVICTION_ORDERS[configuration.device_eviction]
        self.configuration = configuration
        self.events: list[Event] = []
        self.pools = [
            BlockPool(configuration.blocks, group, order(configuration.blocks), self.events)
            for group in range(groups)
        ]
        self.requests: dict[int, Request] = {}
        """Live requests by id; ids count admissions and forks."""
        self.running: list[Request] = []
        """By id, which is the order of first admission, whatever happened since."""
        self.preempted: list[Request] = []
        self.steps: deque[Step] = deque()
        """In flight, oldest first."""
        self.counters = Counters()
        self.hierarchy: Hierarchy | None = None
        """What is below the device, if anything is."""
        if configuration.host_blocks:
            self.hierarchy = Hierarchy(
                configuration, self.pools, self.events, self.counters, folder=folder, files=files
            )
        self._next_request = 0
        self._next_step = 0

    # -- admission ---------------------------------------------------------------------------

    def prepare(
        self,
        prompt: array[int],
        *,
        salt: int = 0,
        adapter: int = 0,
        media: tuple[Media, ...] = (),
    ) -> Request:
        """A request that may be admitted: so its keys are computed once, however often it waits.

        The engine keeps ``prompt`` and will append to it.  Raises ValueError if it is empty.
        """
        if not prompt:
            raise ValueError("a prompt has at least one token")
        return Request(
            -1,
            prompt,
            groups=len(self.pools),
            block_size=self.configuration.block_size,
            salt=salt,
            adapter=adapter,
            media=media,
        )

    def admit(
        self,
        prompt: array[int],
        *,
        salt: int = 0,
        adapter: int = 0,
        media: tuple[Media, ...] = (),
        slots: int = 0,
        wait: bool = False,
    ) -> Outcome:
        """Take in a request with blocks for its prompt, reusing the longest cached prefix.

        As many positions get blocks as ``slots`` says, or the prompt has (0).  The engine keeps
        ``prompt`` and will append to it.
        Refused with ``too_many_requests``, ``larger_than_pool`` or ``no_free_blocks``; with
        ``wait`` also with ``hit_pending`` or ``retry``, if that is what the lower tiers say.
        Raises ValueError if the prompt is empty.
        """
        return self.admit_prepared(
            self.prepare(prompt, salt=salt, adapter=adapter, media=media), slots, wait
        )

    def admit_prepared(self, request: Request, slots: int = 0, wait: bool = False) -> Outcome:
        """As :meth:`admit`, for a request from :meth:`prepare`."""
        request.id = self._next_request
        refusal = self._place(request, slots, wait)
        if refusal:
            return Outcome("refused", refusal, lookup=request.lookup)
        self._next_request += 1
        self.requests[request.id] = request
        self.running.append(request)
        request.cached_tokens = request.computed
        counters = self.counters
        counters.admissions += 1
        counters.prefix_cache_hits += request.computed
        counters.prefix_cache_queries += request.input_tokens
        self.events.append(RequestAdmitted(request.id, request.input_tokens, request.computed))
        return Outcome("done", None, request.id, request.computed, lookup=request.lookup)

    def resume(self, request: Request, slots: int = 0, late: bool = False) -> Outcome:
        """Take in a preempted request again: all its tokens are the prompt.

        A swapped one gets its computed tokens back from the host, with ``late`` only when the
        copies have ended.
        Refused as :meth:`admit`, or with ``in_flight`` while it is still being swapped out.
        Raises ValueError if the request is not preempted.
        """
        if request not in self.preempted:
            raise ValueError(f"request {request.id} is not preempted")
        if request.swapped:
            return self._swap_in(request, slots, late)
        refusal = self._place(request, slots)
        if refusal:
            return Outcome("refused", refusal, request.id, lookup=request.lookup)
        self._run_again(request)
        return Outcome("done", None, request.id, request.computed, lookup=request.lookup)

    def _run_again(self, request: Request) -> None:
        self.preempted.remove(request)
        insort(self.running, request, key=_by_id)
        request.running = True
        self.events.append(RequestResumed(request.id, request.computed))

    def _place(self, request: Request, slots: int, wait: bool = False) -> str | None:
        """Give the request its blocks, or say why not and change nothing."""
        needed = blocks_needed(slots or len(request.tokens), request.block_size)
        request.lookup = ""
        if len(self.running) >= self.configuration.requests:
            return TOO_MANY_REQUESTS
        if needed > self.configuration.blocks:
            return LARGER_THAN_POOL
        matches = self._lookup(request)
        reused = len(matches[0])
        if self.hierarchy is not None:
            request.lookup = self._look_below(request, reused)
            if wait and request.lookup in (HIT_PENDING, RETRY):
                self.counters.stalls += 1
                return request.lookup
        needed = max(needed, reused)
        for pool in self.pools:
            # A hit on a cached-free block takes from the free ones too (bug B145).
            revived = pool.count_unreferenced(matches[pool.group])
            if needed - reused + revived > pool.free_count:
                return NO_FREE_BLOCKS
        if self.hierarchy is not None:
            self._count_hits(request, reused)
        # Hits are referenced in every group before any block is taken: taking may evict.
        for pool in self.pools:
            self._reuse(pool, request, matches[pool.group])
        for pool in self.pools:
            self._allocate(pool, request, needed - reused)
        request.running = True
        request.computed = request.scheduled = reused * request.block_size
        request.published = reused
        return None

    def _swap_in(self, request: Request, slots: int, late: bool) -> Outcome:
        """Give a swapped request blocks, and its bytes, or refuse and change nothing."""
        rows = blocks_needed(request.suspended, request.block_size)
        needed = max(blocks_needed(slots or len(request.tokens), request.block_size), rows)
        refusal = self._refuses_swap_in(request, needed)
        if refusal:
            return Outcome("refused", refusal, request.id)
        for pool in self.pools:
            self._allocate(pool, request, needed)
        request.swapped = False
        request.computed = request.scheduled = 0
        transfers = []
        if rows and self.hierarchy is not None:
            transfers = self.hierarchy.swap_in(request)
            for transfer in () if late else transfers:
                self.hierarchy.complete(transfer)
        else:
            request.host_tables = []
        self._run_again(request)
        numbers = tuple([transfer.id for transfer in transfers])
        return Outcome("done", None, request.id, request.computed, transfers=numbers)

    def _refuses_swap_in(self, request: Request, needed: int) -> str | None:
        if self.hierarchy is not None and self.hierarchy.departing(request):
            return IN_FLIGHT
        if len(self.running) >= self.configuration.requests:
            return TOO_MANY_REQUESTS
        if needed > self.configuration.blocks:
            return LARGER_THAN_POOL
        if any(needed > pool.free_count for pool in self.pools):
            return NO_FREE_BLOCKS
        return None

    def _lookup(self, request: Request) -> list[list[int]]:
        """Per group, the blocks of the longest cached prefix; never the last token's block."""
        matched = self._rows_to_hit(request)
        matches = []
        for pool in self.pools:
            matches.append(pool.match(request.block_keys(pool.group, matched), matched))
            matched = len(matches[-1])
        # Groups agree on the shortest hit: what one of them lost, all compute again.
        return [match[:matched] for match in matches]

    def _rows_to_hit(self, request: Request) -> int:
        """Full blocks below the last token: those that an admission may find cached."""
        if not self.configuration.prefix_caching:
            return 0
        length, size = len(request.tokens), request.block_size
        return hit_tokens(length, length, size) // size

    def _look_below(self, request: Request, row: int) -> Answer | Literal[""]:
        """What the lower tiers say about the first row that the device lacks, if it lacks any."""
        hierarchy = self.hierarchy
        if hierarchy is None or not hierarchy.caches("host") or row >= self._rows_to_hit(request):
            return ""
        return hierarchy.lookup(request, row)

    def _count_hits(self, request: Request, rows: int) -> None:
        """An admission finds so many rows on the device; only a first one is counted."""
        hierarchy = self.hierarchy
        if hierarchy is None or not hierarchy.caches("host"):
            return
        if request.id not in self.requests:
            hierarchy.count_lookup(request, self._rows_to_hit(request))
        hierarchy.touch(request, rows)

    def _reuse(self, pool: BlockPool, request: Request, match: list[int]) -> None:
        if match:
            pool.share(match)
            request.tables[pool.group].extend(match)
            self.events.append(BlocksReused(pool.group, request.id, 0, match))

    def _allocate(self, pool: BlockPool, request: Request, count: int) -> None:
        if count:
            table = request.tables[pool.group]
            blocks = pool.take(count)
            self.events.append(BlocksAllocated(pool.group, request.id, len(table), blocks))
            table.extend(blocks)

    def hit(self, request: Request) -> tuple[int, int]:
        """The prefix hit that a request, prepared or preempted, would have now.

        In blocks, and how many of them are free, so that the hit takes them from the free ones;
        the most of any group.
        """
        matches = self._lookup(request)
        revived = max([pool.count_unreferenced(matches[pool.group]) for pool in self.pools])
        return len(matches[0]), revived

    def blocks_freed(self, request: Request) -> int:
        """Blocks that are free at once if this running request gives its table back.

        The fewest of any group.
        """
        if request.steps_in_flight:
            return 0
        return min([pool.count_sole(request.tables[pool.group]) for pool in self.pools])

    # -- growth and fork -----------------------------------------------------------------------

    def grow(self, request: Request, tokens: Sequence[int]) -> Outcome:
        """Append tokens, with slots for them; copies a shared last block before it is written.

        Refused with ``loading`` or ``no_free_blocks``.  Raises ValueError if the request is not
        running.
        """
        _must_run(request)
        if request.transfers:
            return Outcome("refused", LOADING, request.id)
        plans = []
        for pool in self.pools:
            copy, take = self._needs(pool, request, len(tokens))
            if take > pool.free_count:
                return Outcome("refused", NO_FREE_BLOCKS, request.id)
            if take:
                plans.append((pool, copy, take))
        for pool, copy, take in plans:
            if copy:
                self._copy_on_write(pool, request, len(request.tokens) % request.block_size)
            self._allocate(pool, request, take - copy)
        request.tokens.extend(tokens)
        self.events.append(RequestGrown(request.id, len(tokens)))
        return Outcome("done", None, request.id)

    def _needs(self, pool: BlockPool, request: Request, tokens: int) -> tuple[bool, int]:
        """Whether growth has to copy the block it writes into, and how many blocks it takes."""
        size, table = request.block_size, request.tables[pool.group]
        length = len(request.tokens)
        covered = min(length, len(table) * size)
        partial = covered % size > 0
        refs = pool.ref_counts[table[covered // size]] if partial else 0
        copy = copy_needed(covered, size, refs)
        return copy, blocks_to_take(covered, length + tokens, size, len(table), copy)

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> Outcome:
        """Append one token to each of several different requests: to all of them, or to none.

        Refused with ``loading`` if one of them is, with ``no_free_blocks`` if their growths, each
        judged by itself, take more blocks than are free.
        Raises ValueError if one of them is not running.
        """
        growing = []
        for request in requests:
            _must_run(request)
            if request.transfers:
                return Outcome("refused", LOADING)
            size = request.block_size
            length = len(request.tokens)
            if length % size:
                row = length // size
                for pool in self.pools:
                    table = request.tables[pool.group]
                    if row >= len(table) or pool.ref_counts[table[row]] > 1:
                        growing.append(request)
                        break
            else:
                growing.append(request)
        for pool in self.pools:
            if sum([self._needs(pool, request, 1)[1] for request in growing]) > pool.free_count:
                return Outcome("refused", NO_FREE_BLOCKS)
        for request in growing:
            for pool in self.pools:
                copy, take = self._needs(pool, request, 1)
                if copy:
                    self._copy_on_write(pool, request, len(request.tokens) % request.block_size)
                self._allocate(pool, request, take - copy)
        numbers = []
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
            numbers.append(request.id)
        self.events.append(RequestsDecoded(numbers))
        return Outcome("done", children=tuple(numbers))

    def reserve(self, request: Request, slots: int) -> Outcome:
        """Give a running request blocks for its first ``slots`` positions, where it has none.

        Refused with ``no_free_blocks``.  Raises ValueError if the request is not running.
        """
        _must_run(request)
        needed = blocks_needed(slots, request.block_size)
        takes = [max(0, needed - len(table)) for table in request.tables]
        if any(take > pool.free_count for pool, take in zip(self.pools, takes, strict=True)):
            return Outcome("refused", NO_FREE_BLOCKS, request.id)
        for pool, take in zip(self.pools, takes, strict=True):
            self._allocate(pool, request, take)
        return Outcome("done", None, request.id, count=sum(takes))

    def _copy_on_write(self, pool: BlockPool, request: Request, filled: int) -> None:
        table = request.tables[pool.group]
        row = len(request.tokens) // request.block_size
        source = table[row]
        (target,) = pool.take(1)
        # A new list: steps in flight refer to the old one (see StepItem).
        request.tables[pool.group] = [*table[:row], target, *table[row + 1 :]]
        if self.hierarchy is not None:
            self.hierarchy.copied(pool.group, source, target)
        pool.release([source])
        self.events.append(BlockCopied(pool.group, request.id, row, source, target, filled))

    def fork(self, request: Request, samples: int) -> Outcome:
        """Split off ``samples`` children that share every block with a token in it.

        Refused with ``not_computed`` while the parent has uncomputed tokens, and with
        ``too_many_requests``.  Raises ValueError if the request is not running.
        """
        _must_run(request)
        if request.computed < len(request.tokens):
            return Outcome("refused", NOT_COMPUTED, request.id)
        if len(self.running) + samples > self.configuration.requests:
            return Outcome("refused", TOO_MANY_REQUESTS, request.id)
        children = tuple([self._fork_child(request) for _ in range(samples)])
        return Outcome("done", None, request.id, children=children)

    def _fork_child(self, parent: Request) -> int:
        child = Request(
            self._next_request,
            parent.tokens[:],
            groups=len(self.pools),
            block_size=parent.block_size,
            salt=parent.salt,
            adapter=parent.adapter,
            media=parent.media,
        )
        child.keys = [keys[:] for keys in parent.keys]
        child.published = parent.published
        child.computed = child.scheduled = parent.computed
        child.running = True
        self._next_request += 1
        rows = blocks_needed(len(parent.tokens), parent.block_size)
        for pool in self.pools:
            blocks = parent.tables[pool.group][:rows]
            pool.share(blocks)
            child.tables[pool.group] = blocks[:]
            self.events.append(BlocksShared(pool.group, child.id, parent.id, blocks[:]))
        self.requests[child.id] = child
        self.running.append(child)
        self.events.append(RequestForked(parent.id, child.id))
        return child.id

    # -- the ways out --------------------------------------------------------------------------

    def finish(self, request: Request) -> Outcome:
        """A running request ends; its full, computed blocks stay findable.

        Raises ValueError if the request is not running.
        """
        _must_run(request)
        self._end(request)
        self.events.append(RequestFinished(request.id))
        return Outcome("done", None, request.id)

    def abort(self, request: Request) -> Outcome:
        """A live request, running or preempted, is cancelled."""
        self._end(request)
        self.events.append(RequestAborted(request.id))
        return Outcome("done", None, request.id)

    def swap_out(self, request: Request, late: bool = False) -> Outcome:
        """A running request is preempted; its computed blocks are copied to the host.

        With ``late`` the copies are in flight until they are completed, and keep the blocks until
        then.  Refused with ``offload_off``, ``in_flight`` or ``no_host_blocks``.
        Raises ValueError if the request is not running.
        """
        _must_run(request)
        rows = blocks_needed(request.computed, request.block_size)
        refusal = self._refuses_swap_out(request, rows)
        if refusal:
            return Outcome("refused", refusal, request.id)
        computed, transfers = request.computed, []
        request.host_tables = [[] for _ in self.pools]
        if rows and self.hierarchy is not None:
            transfers = self.hierarchy.swap_out(request, rows)
        self._stop(request)
        request.swapped = True
        request.computed = request.scheduled = computed
        self.counters.suspensions += 1
        if self.hierarchy is not None:
            for transfer in () if late else transfers:
                self.hierarchy.complete(transfer)
        numbers = tuple([transfer.id for transfer in transfers])
        return Outcome("done", None, request.id, transfers=numbers)

    def _refuses_swap_out(self, request: Request, rows: int) -> str | None:
        if not self.configuration.suspends:
            return OFFLOAD_OFF
        if request.steps_in_flight or request.transfers:
            return IN_FLIGHT
        if any(rows > self.host_free(pool.group) for pool in self.pools):
            return NO_HOST_BLOCKS
        return None

    def host_free(self, group: int) -> int:
        """Host blocks that a suspended request may take."""
        return self.hierarchy.host[group].free_count if self.hierarchy is not None else 0

    def preempt(self, request: Request) -> Outcome:
        """A running request gives back its blocks; it keeps its tokens, to be recomputed.

        Raises ValueError if the request is not running.
        """
        _must_run(request)
        self._release_host(request)
        self._stop(request)
        return Outcome("done", None, request.id)

    def _stop(self, request: Request) -> None:
        """It gives back its device blocks, and joins the preempted ones."""
        self._release(request)
        self.running.remove(request)
        insort(self.preempted, request, key=_by_id)
        request.running = False
        request.computed = request.scheduled = request.published = 0
        request.epoch += 1
        request.steps_in_flight = 0
        self.counters.preemptions += 1
        self.events.append(RequestPreempted(request.id))

    def _end(self, request: Request) -> None:
        if request.running:
            self._release(request)
            self.running.remove(request)
            request.running = False
        else:
            self.preempted.remove(request)
        self._release_host(request)
        del self.requests[request.id]

    def _release_host(self, request: Request) -> None:
        """What the host has of a suspended request is not wanted any more."""
        if (request.host_tables or request.transfers) and self.hierarchy is not None:
            self.hierarchy.release(request)

    def _release(self, request: Request) -> None:
        """Give back all blocks, now or when the last step that uses them is retired."""
        tables = request.tables
        request.tables = [[] for _ in self.pools]
        if request.steps_in_flight:
            step = next(step for step in self.steps if step.number == request.last_step)
            step.fenced.append((request.id, tables))
            self.events.append(ReleaseFenced(request.id, step.number))
        else:
            self._release_tables(request.id, tables, None)

    def _release_tables(self, request: int, tables: list[list[int]], step: int | None) -> None:
        for pool in self.pools:
            blocks = tables[pool.group][::-1]  # tail first, so that prefixes are evicted last
            self.events.append(BlocksReleased(pool.group, request, blocks, step))
            pool.release(blocks)

    # -- the prefix cache ----------------------------------------------------------------------

    def evict(self, blocks: int, tier: Tier = "device") -> Outcome:
        """Make up to ``blocks`` evictable blocks per group unfindable, as the policy orders.

        On a lower tier refused with ``offload_off`` if nothing is copied to it, and with
        ``disk_error`` if the disk does not take the note of it.
        """
        if tier == "device":
            return Outcome("done", count=sum(pool.evict(blocks, "request") for pool in self.pools))
        if self.hierarchy is None or not self.hierarchy.caches(tier):
            return Outcome("refused", OFFLOAD_OFF)
        evicted = self.hierarchy.evict(tier, blocks)
        if evicted is None:
            return Outcome("refused", DISK_ERROR)
        return Outcome("done", count=evicted)

    def reset(self) -> Outcome:
        """Empty the prefix cache, on all tiers.

        Refused with ``blocks_in_use`` while any block is referenced, a transfer is in flight, or
        the host has blocks of a suspended request: what was computed before must not be found
        after, and would be when that request is resumed.  Refused with ``disk_error`` if the disk
        does not take the note of it.
        """
        hierarchy = self.hierarchy
        if any(pool.free_count + pool.withheld < pool.usable for pool in self.pools) or (
            hierarchy is not None and hierarchy.in_use
        ):
            return Outcome("refused", BLOCKS_IN_USE)
        below = hierarchy.reset() if hierarchy is not None else 0
        if below is None:
            return Outcome("refused", DISK_ERROR)
        return Outcome("done", count=below + sum(p.evict(p.usable, "reset") for p in self.pools))

    def promote(self, request: Request, to: Tier, blocks: int = 0) -> Outcome:
        """Start to copy a prepared request's blocks upwards: see :meth:`Hierarchy.promote`."""
        if self.hierarchy is None:
            return Outcome("refused", OFFLOAD_OFF)
        rows, hit = self._rows_to_hit(request), len(self._lookup(request)[0])
        return self.hierarchy.promote(to, request, hit=hit, rows=rows, blocks=blocks)

    def withhold(self, tier: Tier, blocks: int) -> Outcome:
        """So many free blocks of each group are somebody else's, or as many as are free."""
        below = self.hierarchy.pools(tier) if self.hierarchy is not None else []
        pools = self.pools if tier == "device" else below
        return Outcome("done", count=sum([pool.withhold(blocks) for pool in pools]))

    # -- steps ---------------------------------------------------------------------------------

    def launch(
        self, budget: int = 0, items: Sequence[tuple[Request, int]] | None = None
    ) -> Outcome:
        """Start a step over the running requests with unscheduled tokens, oldest first.

        ``budget`` bounds its tokens (0: no bound); a longer prompt is computed in chunks.  With
        ``items`` the step computes so many tokens of just these requests, or as many as are
        there.  A token without a slot is not computed.
        Refused with ``run_ahead_limit`` or ``nothing_to_run``.
        """
        if len(self.steps) >= self.configuration.run_ahead:
            return Outcome("refused", RUN_AHEAD_LIMIT)
        if items is None:
            items = self._oldest_first(budget)
        parts = []
        for request, tokens in items:
            pending = min(tokens, self.pending(request))
            if pending > 0:
                parts.append(self._schedule(request, pending))
        if not parts:
            return Outcome("refused", NOTHING_TO_RUN)
        step = Step(self._next_step, parts)
        self._next_step += 1
        self.steps.append(step)
        self.counters.iterations += 1
        self.counters.batch_size = len(parts)
        self.events.append(StepLaunched(step.number, parts))
        return Outcome("done", count=step.tokens)

    def pending(self, request: Request) -> int:
        """Tokens of a running request that have slots and are in no step yet.

        While it is loading, none: what comes before them is not there.
        """
        if request.transfers:
            return 0
        tokens, slots = len(request.tokens), len(request.tables[0]) * request.block_size
        return (tokens if tokens < slots else slots) - request.scheduled

    def _oldest_first(self, budget: int) -> list[tuple[Request, int]]:
        items, left = [], budget
        for request in self.running:
            pending = self.pending(request)
            if pending > 0:
                if budget:
                    pending = min(pending, left)
                    left -= pending
                items.append((request, pending))
                if budget and not left:
                    break
        return items

    def _schedule(self, request: Request, tokens: int) -> StepItem:
        start = request.scheduled
        request.scheduled = start + tokens
        request.steps_in_flight += 1
        request.last_step = self._next_step
        return StepItem(request.id, request.epoch, start, request.scheduled, tuple(request.tables))

    def retire(self) -> Outcome | None:
        """The oldest step in flight finishes; None if there is none."""
        if not self.steps:
            return None
        step = self.steps.popleft()
        self.events.append(StepRetired(step.number))
        for item in step.items:
            request = self.requests.get(item.request)
            # A result of a request that has ended, or of an epoch before its preemption, is void.
            live = request is not None and request.epoch == item.epoch
            if self.hierarchy is not None:
                self.hierarchy.computed(item, request if live else None)
            if request is not None and live:
                self._apply_result(request, item)
        for number, tables in step.fenced:
            self._release_tables(number, tables, step.number)
        return Outcome("done", count=len(step.items))

    def _apply_result(self, request: Request, item: StepItem) -> None:
        request.computed = item.end
        request.steps_in_flight -= 1
        full = full_blocks(item.end, request.block_size)
        if full > request.published and self.configuration.prefix_caching:
            for pool in self.pools:
                self._publish(pool, request, full)
            request.published = full

    def _publish(self, pool: BlockPool, request: Request, full: int) -> None:
        """Make the newly full blocks findable; a duplicate of a findable block stays private."""
        keys = request.block_keys(pool.group, full)
        table = request.tables[pool.group]
        row = request.published
        while row < full:
            first = row
            while row < full and pool.publish(table[row], keys[row + 1]):
                row += 1
            if row > first:
                self.events.append(
                    BlocksPublished(
                        pool.group, request.id, first, table[first:row], keys[first + 1 : row + 1]
                    )
                )
            row += 1  # the duplicate, or one past the end


def _must_run(request: Request) -> None:
    if not request.running:
        raise ValueError(f"request {request.id} is not running")
