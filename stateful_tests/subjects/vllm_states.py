"""vLLM's KVCacheManager with state-space layers (Mamba) beside full attention, over one pool.

A block of a state-space group holds one state: that after the last token computed in its row
(``Semantics.states``).  vLLM keeps the states where steps ended, and of those only what the next
step reads (``mamba_cache_mode="align"``, the one mode with prefix caching); all other rows name the
null block.  Its blocks have one, two or three of the configuration's, by the size of the pool; the
configuration's are what vLLM hashes, and what attention has.  With more than one, hits end inside a
block (``partial_hash_hits_enabled``), and there are two kinds of copies:

* who hits a state inside a block writes on in a copy of it (``BlockCopied``);
* who computed it, and left it findable, goes on in the block itself, as workers only append to
  tables: the key moves to a copy that nobody holds (``KeyMoved``).

Not every step may end anywhere: slot p holds the state after p + 1 blocks, or nothing of use.  So
vLLM's scheduler cuts prompts, at the ends of blocks, at the last hash inside the prompt, and where
another group had a longer hit (``_mamba_block_aligned_split``, which is asked here, too).  Hence an
operation may take several steps: an admission, a resumption or a growth launches all of them but
the last one; as vLLM's engine core does, it retires the oldest one before, if no further one may be
in flight.  A request with slots for the step to come gets no more of them, nor does it leave.

* In two pools of three, not all states at the ends of blocks are kept findable
  (``prefix_cache_retention_interval``).
* Room for the later steps of an operation is vLLM's ``reserved_blocks``, counted by the adapter.
* A state that was made findable in this step is no hit before the next one: of such an admission
  vLLM says that there is no room, and the adapter that its hit is pending.
* vLLM holds both ends of a copy until the step is launched; this is done at once, so that no
  operation shows it.

Not driven: speculative tokens, checkpoints inside a step, and parts of attention's blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReused,
    KeyMoved,
    RequestGrown,
    RequestPreempted,
    StepItem,
    StepRetired,
)
from kvproof.invariants.operations import Admit, Grow, Launch, Preempt, Resume, Retire
from kvproof.invariants.outcomes import HIT_PENDING, NO_FREE_BLOCKS, NOT_LAUNCHED, SKIPPED, Outcome
from kvproof.invariants.prompts import clip_media, prompt_length, sampled_tokens
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.told_cache import by_number, pick
from kvproof.stateful_tests.subjects.vllm_groups import VllmGroupsSubject
from kvproof.stateful_tests.subjects.vllm_manager import Live, group_of
from kvproof.stateful_tests.subjects.vllm_package import NAME

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

STATES = 1
"""The group of states; 0 is that of attention."""
_FACTORS = (2, 1, 3)
"""How many of the configuration's blocks a state's block has, by the size of the pool."""
_CHUNK = 2
"""Blocks of states that a step computes of one prompt at most."""
_LAUNCH, _RETIRE = Launch(), Retire()


class _Stateful(Live):
    """A live request, and how far its blocks go."""

    __slots__ = ("allocated", "blocks")

    def __init__(self, number: int, request: Request) -> None:
        super().__init__(number, request)
        self.allocated = 0
        """Tokens that have slots: more than are computed by a step are of the step to come."""
        self.blocks: list[KVCacheBlock] = []
        """Its table of states, as it was told."""


class VllmStatesSubject(VllmGroupsSubject):
    """Drives one KVCacheManager with full attention and a group of states."""

    name = f"{NAME}:states"

    def __init__(self, configuration: Configuration) -> None:
        size = configuration.block_size
        larger = size * _FACTORS[configuration.blocks % len(_FACTORS)]
        self.retention = (None, 0, 2 * larger)[configuration.blocks // len(_FACTORS) % 3]
        self.semantics = replace(
            self.semantics,
            groups=2,
            shared_pool=True,
            windows=(0, 2),
            states=(STATES,),
            block_sizes=(size, larger),
            stream_order=True,
            exact_admission=False,
            shorter_hits=False,
            keeps_room=False,
        )
        super().__init__(configuration)
        self._pass: list[_Stateful] = []
        """Who has slots for the step to come."""
        self._carried: deque[list[_Stateful]] = deque()
        """Whom the steps in flight carry."""
        self._copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        """What the step to come copies first, and where to."""
        self._pending_hit = False
        """Whether the latest admission refused would hit what the step to come computes."""
        self._planner = self._new_planner()

    def _new_planner(self) -> Any:
        """What vLLM's rule for the ends of steps looks at."""
        from vllm.v1.core.sched.scheduler import Scheduler

        size = self.sizes[STATES]
        seen = SimpleNamespace(
            block_size=size,
            cache_config=SimpleNamespace(block_size=size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            hash_block_size=self.configuration.block_size,
            max_num_scheduled_tokens=_CHUNK * size,
            mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
        )
        return Scheduler._mamba_block_aligned_split.__get__(seen)

    # -- which steps -----------------------------------------------------------------------------

    def _ends(self, request: Request, start: int) -> list[int]:
        """Where the steps end that compute the request from there on."""
        ends, length = [], request.num_tokens
        while start < length:
            tokens = min(length - start, _CHUNK * self.sizes[STATES])
            computed = request.num_computed_tokens
            start += self._planner(request, tokens, start - computed)
            ends.append(start)
        return ends

    def _for_later(self, ends: Sequence[int]) -> int:
        """Blocks that the steps behind the first one take."""
        size, states = self.sizes
        taken = -(-ends[-1] // size) - -(-ends[0] // size)
        for end, next_end in pairwise(ends):
            taken += -(-next_end // states) > -(-end // states)
            taken += end % states > 0  # a copy of the state that it leaves
        return taken

    def _allocate(self, live: _Stateful, end: int, hits: Any = None, **more: int) -> bool:
        """Slots up to ``end``, for the step to come; False if vLLM has no blocks."""
        request = live.request
        start = request.num_computed_tokens + more.get("num_new_computed_tokens", 0)
        first = {"new_computed_blocks": hits, "full_sequence_must_fit": True} if hits else {}
        if self.manager.allocate_slots(request, end - start, **first, **more) is None:
            return False
        live.allocated = end
        self._pass.append(live)
        _, ends = self.manager.take_kv_cache_block_copies()
        self._copies = list(zip(ends[::2], ends[1::2], strict=True))
        return True

    def _step(self) -> None:
        """Launch what has slots; before, retire a step if no further one may be in flight."""
        while len(self.steps) >= self.configuration.run_ahead:
            self._retire(_RETIRE)
        self._launch(_LAUNCH)

    def _go_on(self, live: Live) -> None:
        """The steps behind the first one."""
        assert isinstance(live, _Stateful)
        for end in self._ends(live.request, live.allocated):
            if self._pass:
                self._step()
            if not self._allocate(live, end):
                raise RuntimeError("there is no room for a later step, though it was reserved")
            self._tell_blocks(live, ())

    # -- admission and growth --------------------------------------------------------------------

    def _new_live(self, number: int, operation: Admit) -> _Stateful:
        media = clip_media(operation.media, prompt_length(operation.prompt))
        request = self._vllm.new_request(number, operation, media, self._block_hasher)
        return _Stateful(number, request)

    def _admit(self, operation: Admit) -> Outcome:
        return self._entered(super()._admit(operation))

    def _resume(self, operation: Resume) -> Outcome:
        return self._entered(super()._resume(operation))

    def _entered(self, outcome: Outcome) -> Outcome:
        if outcome.status == "done" and outcome.request is not None:
            self._go_on(self.live[outcome.request])
        elif outcome.reason == NO_FREE_BLOCKS and self._pending_hit:
            return replace(outcome, reason=HIT_PENDING)
        return outcome

    def _place(self, live: Live) -> bool:
        assert isinstance(live, _Stateful)
        request = live.request
        hits, cached, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        ends = self._ends(request, cached)
        if not self._allocate(
            live,
            ends[0],
            hits,
            num_new_computed_tokens=cached,
            reserved_blocks=self._for_later(ends),
        ):
            self._pending_hit = bool(cached) and self._is_of_this_step(hits.blocks[STATES][-1])
            return False
        request.status = self._vllm.status.RUNNING
        live.running = True
        request.num_computed_tokens = live.computed = cached
        self._tell_admitted(live, hits.blocks)
        return True

    def _is_of_this_step(self, state: KVCacheBlock) -> bool:
        manager = self.manager.coordinator.single_type_managers[STATES]
        return state.block_hash in manager.cached_blocks_this_step

    def _grow(self, operation: Grow) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        assert isinstance(live, _Stateful)
        request = live.request
        before = request.num_tokens
        after = before + operation.tokens
        refused = Outcome("refused", NO_FREE_BLOCKS, live.number)
        if self._needs(after) > self.configuration.blocks:
            return refused  # beyond max_model_len, where vLLM would stop the request
        if live in self._pass:
            return Outcome("refused", NOT_LAUNCHED, live.number)
        request.append_output_token_ids(sampled_tokens(operation.choice, before, operation.tokens))
        ends = self._ends(request, before)
        if not self._allocate(live, ends[0], reserved_blocks=self._for_later(ends)):
            self._forget_tokens(request, before)
            self._tell_outlived(live)
            return refused
        self._events.append(RequestGrown(live.number, operation.tokens))
        self._tell_blocks(live, ())
        self._go_on(live)
        return Outcome("done", None, live.number)

    # -- steps -----------------------------------------------------------------------------------

    def _items(self, operation: Launch) -> list[StepItem]:
        items = [self._schedule(live) for live in self._pass]
        if items:
            self._carried.append(self._pass)
            self._pass = []
            # The copies run before the step's own work.
            self._pool.free_blocks([block for copy in self._copies for block in copy])
            self._copies = []
            self.manager.new_step_starts()
        return items

    def _schedule(self, live: Live) -> StepItem:
        assert isinstance(live, _Stateful)
        request = live.request
        start, end = request.num_computed_tokens, live.allocated
        request.num_computed_tokens = end
        request.num_in_flight_tokens += end - start
        return StepItem(live.number, live.epoch, start, end, self._tables(live))

    def _retire(self, operation: Retire) -> Outcome:
        if not self.steps:
            return SKIPPED
        step = self.steps.popleft()
        for item, live in zip(step.items, self._carried.popleft(), strict=True):
            if live.epoch == item.epoch:
                live.computed = item.end
                live.request.num_in_flight_tokens -= item.end - item.start
        self._events.append(StepRetired(step.step))
        return Outcome("done", count=len(step.items))

    # -- the ways out ----------------------------------------------------------------------------

    def _may_leave(self, live: Live) -> bool:
        return live not in self._pass

    def _preempt(self, operation: Preempt) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        if not self._may_leave(live):
            return Outcome("refused", NOT_LAUNCHED, live.number)
        self._release(live)
        self.running.remove(live)
        insort(self.preempted, live, key=by_number)
        live.running = False
        request = live.request
        request.status = self._vllm.status.PREEMPTED
        request.num_computed_tokens = request.num_in_flight_tokens = live.computed = 0
        request.num_preemptions += 1
        live.epoch += 1
        self._events.append(RequestPreempted(live.number))
        return Outcome("done", None, live.number)

    # -- events, derived from vLLM's state -------------------------------------------------------

    def _full_rows(self, live: Live, group: int) -> int:
        assert isinstance(live, _Stateful)
        return live.allocated // self.sizes[group]

    def _tell_admitted(self, live: Live, hits: Sequence[Sequence[KVCacheBlock]]) -> None:
        states = _Stateful(live.number, live.request)
        self._told[live.number] = (live, states)
        self._tell_reused(live, 0, self.tables(live)[0], hits[0])
        found = [block for block in hits[STATES] if not block.is_null]
        if found:
            row = len(hits[STATES]) - 1
            blocks = [block.block_id for block in found]
            self._events.append(BlocksReused(STATES, live.number, row, blocks))
            self._not_free(blocks)
            states.blocks = list(hits[STATES])
        self._tell_blocks(live, ())

    def _tell_blocks(self, live: Live, hits: Sequence[KVCacheBlock]) -> None:
        """What vLLM did in the order in which it did it; then, if it is to copy, the step."""
        told, states = self._told[live.number]
        assert isinstance(states, _Stateful)
        attention, table = self.tables(live)
        self._tell_outlived(live)
        self._tell_allocated(told, 0, attention)
        for source, target in self._copies:
            self._tell_copied(live.number, states, table, source, target)
        for row, (was, now) in enumerate(zip(states.blocks, table, strict=False)):
            if was is not now:  # another one, and nothing is to be copied to it
                ids = was.block_id, now.block_id
                self._events.append(BlockCopied(STATES, live.number, row, *ids, 0))
        first = len(states.blocks)
        for row, block in enumerate(table[first:], first):
            if not block.is_null:
                self._tell_evicted_state(block)
                allocated = BlocksAllocated(STATES, live.number, row, [block.block_id])
                self._events.append(allocated)
        states.blocks = list(table)
        if self.configuration.prefix_caching:
            self._tell_published(told, attention)
            self._tell_states(live.number, table)
        if self._copies:
            self._step()

    def _tell_copied(
        self,
        number: int,
        states: _Stateful,
        table: Sequence[KVCacheBlock],
        source: KVCacheBlock,
        target: KVCacheBlock,
    ) -> None:
        self._tell_evicted_state(target)
        ids = source.block_id, target.block_id
        rows = [row for row, _ in enumerate(states.blocks) if table[row] is target]
        if rows:
            states.blocks[rows[0]] = target
            self._events.append(BlockCopied(STATES, number, rows[0], *ids, self.sizes[STATES]))
            if source.ref_cnt == 1 and source.block_id in self._keys:  # the copy's own
                self._cached_free[source.block_id] = None
        else:
            self._events.append(KeyMoved(STATES, number, *ids))
            key = self._keys.pop(source.block_id, None)
            if key is not None:
                self._keys[target.block_id] = key
                self._cached_free[target.block_id] = None

    def _tell_evicted_state(self, block: KVCacheBlock) -> None:
        """A block that was taken lost what was findable in it."""
        key = self._keys.pop(block.block_id, None)
        self._not_free([block.block_id])
        if key is not None:
            evicted = BlocksEvicted(group_of(key), [block.block_id], [key], "pressure")
            self._events.append(evicted)

    def _tell_states(self, number: int, table: Sequence[KVCacheBlock]) -> None:
        """Tell which further states are findable now."""
        for row, block in enumerate(table):
            key, name = block.block_hash, block.block_id
            if key is None or self._keys.get(name) == key or not self._is_findable(name, key):
                continue
            self._tell_evicted_state(block)
            self._keys[name] = key
            tokens = block.block_hash_num_tokens or 0
            self._events.append(BlocksPublished(STATES, number, row, [name], [key], tokens))

    def _tell_outlived(self, live: Live) -> None:
        """Tell the rows of which vLLM took back the states."""
        states, table = self._told[live.number][STATES], self.tables(live)[STATES]
        assert isinstance(states, _Stateful)
        gone = [
            block
            for block, now in zip(states.blocks, table, strict=False)
            if now.is_null and not block.is_null
        ]
        if gone:
            nobodys = self._pool.null_block
            states.blocks = [nobodys if block in gone else block for block in states.blocks]
            self._tell_released(states, STATES, gone, BlocksOutlived)
