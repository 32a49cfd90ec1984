"""vLLM's KVCacheManager as a subject: the real one, unmodified, with full attention, on CPU.

What the adapter adds is what vLLM's scheduler does around the manager: it keeps requests and
steps, and advances ``num_computed_tokens`` when a step is launched.  Blocks, tables, reference
counts, keys and hits are vLLM's own; events are derived from its state, each time by looking at
the blocks of the one request that the operation touched.

How operations map:

* **Keys are published when slots are allocated**, before any step has computed them.  So a
  request that is given back early would leave keys of KV that no step will ever write.  vLLM's
  scheduler rules this out: it allocates for tokens that it launches in the same call, and gives
  a request back between steps.  (Preemption by priority breaks that rule, see pull request
  43569 of vllm-project/vllm; that is a scheduler's fault, and a manager's adapter must not
  commit it.)  Therefore finish, abort and preempt of a running request are refused with
  *not_launched* until all of its tokens are computed by retired steps.
* **Steps compute all that is allocated.**  Launch ignores its budget, for the same reason: a
  request later in the batch may read blocks that an earlier one of the same step writes, so
  none may be cut short.
* **The manager fences nothing.**  Which blocks a step in flight uses is unknown to it; vLLM
  relies on the order of the GPU's stream.  With releases only between a request's steps, no
  block of a step in flight is ever free, at any depth of run-ahead.
* **Evict** is ``evict_blocks`` of the first cached blocks of vLLM's free queue.
* A salt is a ``cache_salt``, an adapter a ``LoRARequest``, media are ``mm_features``, placed as
  :func:`clip_media` says.  Fork is not a capability: parallel samples are separate requests
  in vLLM.
* ``computed`` in the view is the adapter's: the manager is told of it and keeps none, so comparing
  it says something of vLLM only at admissions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    RequestGrown,
    RequestPreempted,
    StepItem,
    StepRetired,
)
from kvproof.invariants.operations import (
    KINDS,
    Admit,
    Evict,
    Grow,
    Launch,
    Preempt,
    Reset,
    Retire,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    NO_FREE_BLOCKS,
    NOT_LAUNCHED,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import (
    clip_media,
    prompt_length,
    sampled_tokens,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.told_cache import (
    LiveRequest,
    ToldCache,
    by_number,
    pick,
)
from kvproof.stateful_tests.subjects.vllm_manager_view import FINDABLE, USED, VllmManagerView
from kvproof.stateful_tests.subjects.vllm_package import NAME, load_vllm

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Live(LiveRequest):
    """A live request of vLLM's, and how much of it events have told so far."""

    __slots__ = ("rows", "rows_published")
    request: Request

    def __init__(self, number: int, request: Request) -> None:
        super().__init__(number, request)
        self.rows = 0
        """Rows of its table that were told as reused or allocated."""
        self.rows_published = 0
        """Leading rows of its table that were told as published or reused."""

    @property
    def all_computed(self) -> bool:
        return self.computed >= self.length

    @property
    def length(self) -> int:
        length: int = self.request.num_tokens
        return length


class VllmManagerSubject(ToldCache[Live]):
    """Drives one KVCacheManager as vLLM's scheduler would, one operation at a time.

    Raises SubjectUnavailable where vLLM 0.33 is not installed.
    """

    name = NAME
    retention: int | None = None
    """From one state that stays findable to the next, in tokens; None keeps all, 0 only those at
    the ends of prompts and where a hit was cut short."""
    capabilities = frozenset(KINDS) - {"fork", "reserve", "decode"}
    semantics = Semantics(
        groups=1,
        reserved=(0,),
        publishes="at_allocation",
        duplicates="indexed",
        fences_releases=False,
        release_order="tail_first",
        # One queue of free blocks serves both promises: blocks without a key are put in front,
        # blocks with one behind, and those that lose it (evict takes the first) stay in front.
        eviction_order="lru",
        exact_admission=True,
        chunks=False,
        runs_ahead=True,
        slots=False,
        swaps=False,
        exports=(USED,),
        exports_per_request=(FINDABLE,),
    )

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        vllm = load_vllm()
        self.manager: KVCacheManager = vllm.new_manager(
            configuration, self.semantics, self.retention
        )
        self._vllm = vllm
        self._pool = self.manager.block_pool
        self._block_hasher = (
            vllm.block_hasher(configuration.block_size, vllm.hash)
            if configuration.prefix_caching
            else None
        )
        self._keys: dict[int, bytes] = {}
        """Findable blocks, and the key under which each was told as published."""
        self._cached_free: dict[int, None] = {}
        """Those of them that nobody holds, in the order of vLLM's queue: what evict takes."""
        self._view = VllmManagerView(self)

    def view(self) -> VllmManagerView:
        return self._view

    def table(self, live: Live) -> Sequence[KVCacheBlock]:
        """vLLM's own block table of a request."""
        tables: tuple[list[KVCacheBlock], ...] = self.manager.coordinator.get_blocks(
            live.request.request_id
        )
        return tables[0]

    # -- admission ---------------------------------------------------------------------------

    def _new_live(self, number: int, operation: Admit) -> Live:
        media = clip_media(operation.media, prompt_length(operation.prompt))
        return Live(number, self._vllm.new_request(number, operation, media, self._block_hasher))

    def _place(self, live: Live) -> bool:
        """Look up the prefix and allocate slots for the rest; False if vLLM has no blocks."""
        request = live.request
        hits, cached_tokens, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        allocated = self.manager.allocate_slots(
            request,
            request.num_tokens - cached_tokens,
            num_new_computed_tokens=cached_tokens,
            new_computed_blocks=hits,
        )
        if allocated is None:
            return False
        request.status = self._vllm.status.RUNNING
        live.running = True
        request.num_computed_tokens = live.computed = cached_tokens
        self._tell_admitted(live, hits.blocks)
        return True

    def _tell_admitted(self, live: Live, hits: Sequence[Sequence[KVCacheBlock]]) -> None:
        self._tell_blocks(live, hits[0])

    def _grow(self, operation: Grow) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        request = live.request
        before = request.num_tokens
        after = before + operation.tokens
        refused = Outcome("refused", NO_FREE_BLOCKS, live.number)
        if self._needs(after) > self.configuration.blocks:
            return refused  # beyond max_model_len, where vLLM would stop the request
        request.append_output_token_ids(sampled_tokens(operation.choice, before, operation.tokens))
        if self.manager.allocate_slots(request, after - request.num_computed_tokens) is None:
            self._forget_tokens(request, before)
            return refused
        self._tell_blocks(live, ())
        self._events.append(RequestGrown(live.number, operation.tokens))
        return Outcome("done", None, live.number)

    def _forget_tokens(self, request: Request, length: int) -> None:
        """Undo an append: vLLM's scheduler would keep the tokens and make room by preemption."""
        del request._all_token_ids[length:]
        del request._output_token_ids[length - request.num_prompt_tokens :]
        del request.block_hashes[length // self.configuration.block_size :]

    # -- the ways out --------------------------------------------------------------------------

    def _may_leave(self, live: Live) -> bool:
        return live.all_computed

    def _preempt(self, operation: Preempt) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        if not live.all_computed:
            return Outcome("refused", NOT_LAUNCHED, live.number)
        self._release(live)
        self.running.remove(live)
        insort(self.preempted, live, key=by_number)
        live.running = False
        live.request.status = self._vllm.status.PREEMPTED
        live.request.num_computed_tokens = live.computed = 0
        live.request.num_preemptions += 1
        live.epoch += 1
        self._events.append(RequestPreempted(live.number))
        return Outcome("done", None, live.number)

    def _release(self, live: Live) -> None:
        blocks = list(self.table(live))
        self.manager.free(live.request)
        live.rows = live.rows_published = 0
        self._tell_released(live, 0, blocks)

    def _tell_released(
        self,
        live: Live,
        group: int,
        blocks: list[KVCacheBlock],
        event: type[BlocksReleased] = BlocksReleased,
    ) -> None:
        released = self._order_of_release(blocks)
        self._events.append(event(group, live.number, released))
        for block in released:
            if block in self._keys and self._pool.blocks[block].ref_cnt == 0:
                self._cached_free[block] = None

    def _order_of_release(self, blocks: list[KVCacheBlock]) -> list[int]:
        """The order in which a table was given back, as far as the free queue shows it.

        vLLM puts blocks without a key in front of its queue and the others behind, each in the
        order of their release; which of two came first that are at different ends is not seen.
        Blocks that somebody else still holds, and blocks that should be in the queue but are not,
        are told in the order that vLLM promises.
        """
        promised = [block.block_id for block in reversed(blocks)]
        freed = {block.block_id for block in blocks if block.ref_cnt == 0}
        queue = self._pool.free_block_queue
        front = list(_take_while_in(freed, queue.fake_free_list_head, "next_free_block"))
        back = list(_take_while_in(freed, queue.fake_free_list_tail, "prev_free_block"))
        back.reverse()
        ends = [(end, set(end)) for end in (front, back)]
        if all(end == [block for block in promised if block in there] for end, there in ends):
            return promised
        seen = front + back
        in_queue = set(seen)
        return seen + [block for block in promised if block not in in_queue]

    # -- the prefix cache ----------------------------------------------------------------------

    def _evict(self, operation: Evict) -> Outcome:
        victims = list(islice(self._cached_free, operation.blocks))
        self.manager.evict_blocks(set(victims))
        return Outcome("done", count=self._tell_evicted(victims, "request"))

    def _reset(self, operation: Reset) -> Outcome:
        cached = list(self._cached_free)
        if not self.manager.reset_prefix_cache():
            return Outcome("refused", BLOCKS_IN_USE)
        return Outcome("done", count=self._tell_evicted(cached, "reset"))

    # -- steps ---------------------------------------------------------------------------------

    def _items(self, operation: Launch) -> list[StepItem]:
        self.manager.new_step_starts()
        return [
            self._schedule(live)
            for live in self.running
            if live.request.num_computed_tokens < live.request.num_tokens
        ]

    def _schedule(self, live: Live) -> StepItem:
        """One request's part of a step; vLLM counts its tokens as computed from here on."""
        request = live.request
        start, end = request.num_computed_tokens, request.num_tokens
        request.num_computed_tokens = end
        request.num_in_flight_tokens += end - start
        return StepItem(live.number, live.epoch, start, end, self._tables(live))

    def _tables(self, live: Live) -> tuple[list[int], ...]:
        """A copy: vLLM does not promise that its lists stay as they are."""
        return ([block.block_id for block in self.table(live)],)

    def _retire(self, operation: Retire) -> Outcome:
        if not self.steps:
            return SKIPPED
        step = self.steps.popleft()
        for item in step.items:
            # It is running still: none is given back before all of its tokens are computed.
            live = self.live[item.request]
            live.computed = item.end
            live.request.num_in_flight_tokens -= item.end - item.start
        self._events.append(StepRetired(step.step))
        return Outcome("done", count=len(step.items))

    # -- events, derived from vLLM's state -------------------------------------------------------

    def _tell_blocks(self, live: Live, hits: Sequence[KVCacheBlock]) -> None:
        """Tell the new rows of a request's table, in the order in which vLLM filled them:
        hits touched, old content of taken blocks evicted, blocks taken, keys published.
        """
        table = self.table(live)
        self._tell_reused(live, 0, table, hits)
        self._tell_allocated(live, 0, table)
        if self.configuration.prefix_caching:
            self._tell_published(live, table)

    def _tell_reused(
        self,
        live: Live,
        group: int,
        table: Sequence[KVCacheBlock],
        hits: Sequence[KVCacheBlock],
    ) -> None:
        reused = 0
        for block, hit in zip(table, hits, strict=False):
            if block is not hit:
                break
            reused += 1
        if reused:
            blocks = [block.block_id for block in table[:reused]]
            self._events.append(BlocksReused(group, live.number, 0, blocks))
            self._not_free(blocks)
            live.rows = live.rows_published = reused

    def _tell_allocated(self, live: Live, group: int, table: Sequence[KVCacheBlock]) -> None:
        first = live.rows
        taken = [block.block_id for block in table[first:]]
        if taken:
            if self._keys:
                self._tell_taken(group, live, first, taken)
            self._events.append(BlocksAllocated(group, live.number, first, taken))
        live.rows = len(table)

    def _not_free(self, blocks: list[int]) -> None:
        if self._cached_free:
            for block in blocks:
                self._cached_free.pop(block, None)

    def _full_rows(self, live: Live, group: int) -> int:
        """Rows that vLLM publishes, once they are given."""
        rows: int = live.request.num_tokens // self.configuration.block_size
        return rows

    def _tell_taken(self, group: int, live: Live, first: int, taken: list[int]) -> None:
        """Tell which of the blocks taken lost content that was findable."""
        self._not_free(taken)
        full = self._full_rows(live, group)
        for row, block in enumerate(taken, start=first):
            key = self._keys.get(block)
            # A full block was published again in the same call, maybe under the very key that
            # it had: vLLM does so only if the old one is gone.
            if key is not None and (row < full or not self._is_findable(block, key)):
                del self._keys[block]
                self._events.append(BlocksEvicted(group_of(key), [block], [key], "pressure"))

    def _tell_evicted(self, blocks: list[int], cause: Any) -> int:
        """Tell which of these blocks, none of them held, are not findable any more."""
        lost = [block for block in blocks if not self._is_findable(block, self._keys[block])]
        for block in lost:
            del self._cached_free[block]
            key = self._keys.pop(block)
            self._events.append(BlocksEvicted(group_of(key), [block], [key], cause))
        return len(lost)

    def _tell_published(self, live: Live, table: Sequence[KVCacheBlock], group: int = 0) -> None:
        """Tell which further rows of a table are findable now."""
        first = live.rows_published
        keys: list[bytes] = []
        for block in table[first:]:
            key = block.block_hash
            if key is None or not self._is_findable(block.block_id, key):
                break
            keys.append(key)
            self._keys[block.block_id] = key
        if keys:
            end = live.rows_published = first + len(keys)
            blocks = [block.block_id for block in table[first:end]]
            self._events.append(BlocksPublished(group, live.number, first, blocks, keys))

    def _is_findable(self, block: int, key: bytes) -> bool:
        found: bool = self._pool.cached_block_hash_to_block.contain(key, block)
        return found


def group_of(key: bytes) -> int:
    """The group in which a block is findable: the end of its key."""
    return int.from_bytes(key[-4:], "big")


def _take_while_in(wanted: set[int], end: KVCacheBlock, direction: str) -> Iterator[int]:
    """Walk a free queue from one of its ends, over blocks of ``wanted``, each removed from it."""
    block = getattr(end, direction)
    while block is not None and block.block_id in wanted:
        wanted.discard(block.block_id)
        yield block.block_id
        block = getattr(block, direction)
