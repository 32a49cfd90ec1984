"""The seeded faults of the paged cache: accounting, reference counts, ownership, stale content,
keys, eviction order, preemption, swap space, aborts, capacity, figures (classes 1 to 9, 13 and 14
of the catalogue).

Each function is the faulty method; ``original`` is what it replaces.  Sources name the catalogue
row and the public report that the fault is modelled on: the mistake is the same in kind, the
code is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvproof.engine import engine as engine_module
from kvproof.engine import request as request_module
from kvproof.engine.engine import Engine
from kvproof.engine.eviction.lru import LeastRecentlyUsed
from kvproof.engine.keys import block_key
from kvproof.engine.pool import BlockPool
from kvproof.engine.request import Request
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.engine.tiers.pool import TierPool
from kvproof.engine.tiers.transfer import Transfer
from kvproof.fuzz.faults.fault import Fault, Replacement, enter
from kvproof.invariants.events import BlocksEvicted, BlocksPublished, StepItem
from kvproof.invariants.operations import Media
from kvproof.invariants.outcomes import NO_FREE_BLOCKS, TOO_MANY_REQUESTS, Outcome

_FAULTS: list[Fault] = []


_fault = partial(enter, _FAULTS)


# -- 1. Accounting and leaks ---------------------------------------------------------------------


@_fault(Engine, "_end", property="QUIES", source="B04, jjang-ai/vmlx#68", shortest=2)
def finish_forgets_its_table(original: Replacement, self: Engine, request: Request) -> None:
    """A request that ends is forgotten together with its table; its blocks are never released."""
    if request.running and not request.steps_in_flight:
        self.running.remove(request)
        del self.requests[request.id]
    else:
        original(self, request)


@_fault(
    Engine, "_release_tables", property="REF", source="B121, sgl-project/sglang#13826", shortest=2
)
def release_keeps_last_block(
    original: Replacement, self: Engine, request: int, tables: list[list[int]], step: int | None
) -> None:
    """The release computes its length from full blocks: a longer table keeps its last one."""
    original(self, request, [table[:-1] if len(table) > 1 else table for table in tables], step)


@_fault(
    BlockPool,
    "release",
    property="CONS",
    source="B06, NVIDIA/TensorRT-LLM#12834",
    shortest=4,
    also=("QUIES",),
)
def counter_drifts(original: Replacement, self: BlockPool, blocks: Sequence[int]) -> None:
    """A block that stays findable when it is freed is counted as free twice."""
    before = len(self._cached)
    original(self, blocks)
    self.free_count += len(self._cached) > before


@_fault(Engine, "_place", property="ATOM", source="B01, sgl-project/sglang#16067", shortest=4)
def refused_admission_keeps_its_hits(
    original: Replacement, self: Engine, request: Request, slots: int, wait: bool = False
) -> str | None:
    """An admission that does not fit has referenced its prefix hits and does not undo it."""
    refusal: str | None = original(self, request, slots, wait)
    if refusal == NO_FREE_BLOCKS:
        for pool, match in zip(self.pools, self._lookup(request), strict=True):
            pool.share(match)
    return refusal


# -- 2. Reference counts -------------------------------------------------------------------------


@_fault(BlockPool, "release", property="REF", source="B19, ai-dynamo/dynamo#13398", shortest=5)
def shared_block_released_twice(
    original: Replacement, self: BlockPool, blocks: Sequence[int]
) -> None:
    """The release of a table drops two references of its first block if it is shared."""
    shared = [block for block in blocks[-1:] if self.ref_counts[block] > 1]
    original(self, [*blocks, *shared])


@_fault(BlockPool, "share", property="REF", source="B18, apache/tvm#16666", shortest=4)
def fork_takes_no_reference(original: Replacement, self: BlockPool, blocks: Sequence[int]) -> None:
    """Sharing blocks that all have an owner already adds no reference."""
    if any(self.ref_counts[block] == 0 for block in blocks):
        original(self, blocks)


@_fault(
    BlockPool, "share", property="CONS", source="B20, jjang-ai/vmlx#198", shortest=5, also=("REF",)
)
def revived_block_stays_free(original: Replacement, self: BlockPool, blocks: Sequence[int]) -> None:
    """A prefix hit on a cached-free block references it, but leaves it among the free ones."""
    for block in blocks:
        self.ref_counts[block] += 1


# -- 3. Aliasing and ownership -------------------------------------------------------------------


@_fault(
    BlockPool, "evict", property="PIN", source="B21, Avarok-Cybersecurity/atlas#373", shortest=4
)
def evict_takes_a_live_block(original: Replacement, self: BlockPool, count: int, cause: Any) -> int:
    """With nothing idle to evict, the oldest findable block is evicted though it is in use."""
    if len(self._cached) or not self.index:
        return int(original(self, count, cause))
    key, (block,) = next(iter(self.index.items()))
    del self.index[key]
    self.keys[block] = None
    self.evictions += 1
    self._events.append(BlocksEvicted(self.group, [block], [key], cause))
    return 1


@_fault(
    Engine,
    "_copy_on_write",
    property="EXCL",
    source="B22, Avarok-Cybersecurity/atlas#1193",
    shortest=5,
)
def no_copy_on_write(
    original: Replacement, self: Engine, pool: BlockPool, request: Request, filled: int
) -> None:
    """A forked request appends in place to the half-filled block that it shares."""


@_fault(
    engine_module,
    "copy_needed",
    property="EXCL",
    source="B29, xLLM-AI/xllm#1984",
    shortest=5,
    also=("CAP",),
)
def copy_for_two_owners_only(
    original: Replacement, length: int, block_size: int, last_ref_count: int
) -> bool:
    """Copy-on-write is done for two owners, and forgotten for three or more."""
    return bool(original(length, block_size, last_ref_count)) and last_ref_count == 2


@_fault(Engine, "_schedule", property="EXCL", source="B24, tenstorrent/tt-xla#4190", shortest=5)
def writes_start_at_row_zero(
    original: Replacement, self: Engine, request: Request, tokens: int
) -> StepItem:
    """After a prefix hit the suffix is written from the first row on, over the shared prefix."""
    item: StepItem = original(self, request, tokens)
    if item.start and item.start == request.cached_tokens:
        return replace(item, start=0)
    return item


@_fault(Engine, "_copy_on_write", property="PROV", source="B29, xLLM-AI/xllm#1984", shortest=5)
def copy_on_write_copies_nothing(
    original: Replacement, self: Engine, pool: BlockPool, request: Request, filled: int
) -> None:
    """The diverging request gets a fresh block without the source's content."""
    original(self, pool, request, 0)


@_fault(
    Engine, "_copy_on_write", property="PROV", source="B23, raullenchai/Rapid-MLX#196", shortest=5
)
def copy_misses_last_token(
    original: Replacement, self: Engine, pool: BlockPool, request: Request, filled: int
) -> None:
    """The copy of a shared block leaves out the last filled slot."""
    original(self, pool, request, filled - 1)


# -- 4. Stale or incomplete content --------------------------------------------------------------


@_fault(
    BlockPool, "_forget", property="VALID", source="B32, GeeeekExplorer/nano-vllm#163", shortest=5
)
def stale_key_after_reuse(original: Replacement, self: BlockPool, block: int) -> bytes:
    """An evicted block's key stays in the lookup map."""
    key = bytes(original(self, block))
    self.index[key] = (block,)
    return key


@_fault(
    BlockPool,
    "_forget",
    property="ORDER",
    source="B34, ovg-project/kvcached#362",
    shortest=6,
    also=("CRASH", "VALID"),
)
def key_field_survives_eviction(original: Replacement, self: BlockPool, block: int) -> bytes:
    """An evicted block leaves the lookup map, but keeps its own key field."""
    key = bytes(original(self, block))
    self.keys[block] = key
    return key


@_fault(Engine, "_schedule", property="VALID", source="B44, vllm-project/vllm#37152", shortest=2)
def published_at_launch(
    original: Replacement, self: Engine, request: Request, tokens: int
) -> StepItem:
    """Blocks become findable when their step is launched, before it has written them."""
    item: StepItem = original(self, request, tokens)
    full = item.end // request.block_size
    if full > request.published:
        for pool in self.pools:
            self._publish(pool, request, full)
        request.published = full
    return item


@_fault(
    Engine, "_apply_result", property="VALID", source="B37, vllm-project/vllm#34587", shortest=3
)
def partial_block_published(
    original: Replacement, self: Engine, request: Request, item: StepItem
) -> None:
    """At the end of a prompt the last block becomes findable though it is not full."""
    original(self, request, item)
    if item.end % request.block_size:
        row = item.end // request.block_size
        for pool in self.pools:
            block = request.tables[pool.group][row]
            key = block_key(
                request.block_keys(pool.group, row)[row],
                request.tokens[row * request.block_size :],
                b"",
            )
            if pool.publish(block, key):
                self.events.append(BlocksPublished(pool.group, request.id, row, [block], [key]))


# -- 5. Keys and isolation -----------------------------------------------------------------------


@_fault(
    request_module,
    "root_key",
    property="KEY",
    source="B45, vllm-project/vllm#44701",
    shortest=4,
    also=("VALID",),
)
def salt_and_adapter_untagged(original: Replacement, group: int, salt: int, adapter: int) -> bytes:
    """Salt and adapter go into the key without saying which is which."""
    return bytes(original(group, salt + adapter, 0))


@_fault(
    request_module,
    "root_key",
    property="KEY",
    source="B50, xLLM-AI/xllm#2047",
    shortest=4,
    also=("VALID", "CAP", "MET"),
)
def adapter_not_in_key(original: Replacement, group: int, salt: int, adapter: int) -> bytes:
    """Keys cover tokens and salt, but not the adapter."""
    return bytes(original(group, salt, 0))


@_fault(
    request_module,
    "media_part",
    property="KEY",
    source="B47, LMCache/LMCache#3301",
    shortest=4,
    also=("VALID", "CAP", "MET"),
)
def media_identity_truncated(
    original: Replacement, media: Sequence[Media], start: int, end: int
) -> bytes:
    """A media item's identity is cut to its low 16 bits."""
    return bytes(original([replace(m, item=m.item & 0xFFFF) for m in media], start, end))


@_fault(
    request_module,
    "media_part",
    property="KEY",
    source="B48, LMCache/LMCache#4183",
    shortest=4,
    also=("VALID", "CAP", "MET"),
)
def media_not_in_key(original: Replacement, media: Sequence[Media], start: int, end: int) -> bytes:
    """Keys come from token ids alone; all media share one placeholder token."""
    return b""


@_fault(
    request_module,
    "block_key",
    property="KEY",
    source="kekzl/imp#1301, a mutant that survived there",
    shortest=4,
    also=("VALID", "CAP", "MET"),
)
def key_ignores_last_token(
    original: Replacement, parent: bytes, tokens: array[int], media: bytes
) -> bytes:
    """A block's key leaves out the last token of the block."""
    return bytes(original(parent, tokens[:-1], media))


# -- 6. Eviction order ---------------------------------------------------------------------------


@_fault(
    LeastRecentlyUsed,
    "insert",
    property="ORDER",
    source="B64, taco-project/FlexKV#195",
    shortest=4,
)
def evicts_the_hottest(
    original: Replacement, self: LeastRecentlyUsed, entry: int, key: bytes, used: bool = True
) -> None:
    """The block that was used last is evicted first."""
    original(self, entry, key, used)
    self._blocks.move_to_end(entry, last=False)


@_fault(Engine, "_release_tables", property="ORDER", source="B57, LMCache/LMCache#4867", shortest=2)
def head_released_first(
    original: Replacement, self: Engine, request: int, tables: list[list[int]], step: int | None
) -> None:
    """A table is given back head first, so that prefixes are evicted before extensions."""
    original(self, request, [table[::-1] for table in tables], step)


@_fault(BlockPool, "take", property="ORDER", source="B62, vllm-project/vllm#48435", shortest=5)
def evicts_while_empty_blocks_are_left(
    original: Replacement, self: BlockPool, count: int, protect: Collection[int] = ()
) -> list[int]:
    """An allocation takes cached content before it takes empty blocks."""
    empty, self._empty = self._empty, []
    evictable = min(count, len(self._cached) - self.count_unreferenced(protect))
    taken: list[int] = original(self, evictable, protect)
    self._empty = empty + self._empty
    return taken + list(original(self, count - evictable, protect))


# -- 7. Preemption and resumption ----------------------------------------------------------------


@_fault(Engine, "retire", property="RESUME", source="B74, PaddlePaddle/FastDeploy#3292", shortest=4)
def late_result_is_applied(original: Replacement, self: Engine) -> Outcome | None:
    """The result of a step from before a preemption is applied to the preempted request."""
    items = self.steps[0].items if self.steps else []
    outcome: Outcome | None = original(self)
    for item in items:
        request = self.requests.get(item.request)
        if request is not None and not request.running:
            request.computed = item.end
    return outcome


@_fault(Engine, "preempt", property="RESUME", source="B73, vllm-project/vllm-omni#6053", shortest=4)
def computed_survives_preemption(original: Replacement, self: Engine, request: Request) -> Outcome:
    """A preempted request keeps its count of computed tokens."""
    computed = request.computed
    outcome: Outcome = original(self, request)
    request.computed = computed
    return outcome


@_fault(Engine, "resume", property="RESUME", source="B68, GeeeekExplorer/nano-vllm#211", shortest=5)
def resume_counts_before_the_hit(
    original: Replacement, self: Engine, request: Request, slots: int = 0, late: bool = False
) -> Outcome:
    """Tokens to compute are counted before the request finds its own old blocks as a hit."""
    outcome: Outcome = original(self, request, slots, late)
    if outcome.status == "done":
        request.computed = request.scheduled = 0
    return outcome


@_fault(
    Engine,
    "grow",
    property="LIFE",
    source="B72, vllm-project/vllm-gaudi#524",
    shortest=4,
    also=("CAP",),
)
def output_token_recorded_twice(
    original: Replacement, self: Engine, request: Request, tokens: Sequence[int]
) -> Outcome:
    """After a preemption the last sampled token is recorded twice."""
    recorded = [*tokens, tokens[-1]] if request.epoch else tokens
    outcome: Outcome = original(self, request, recorded)
    return outcome


@_fault(Engine, "_release", property="PIN", source="B82, vllm-project/vllm#45357", shortest=3)
def releases_ignore_steps_in_flight(original: Replacement, self: Engine, request: Request) -> None:
    """Blocks are freed at once although a launched step still uses them."""
    request.steps_in_flight = 0
    original(self, request)


@_fault(Engine, "retire", property="PIN", source="B98, vllm-project/vllm-ascend#16662", shortest=4)
def fence_never_opens(original: Replacement, self: Engine) -> Outcome | None:
    """What a request left to its step in flight is not given back when the step is retired."""
    if self.steps:
        self.steps[0].fenced.clear()
    outcome: Outcome | None = original(self)
    return outcome


# -- 8. Swap space, 9. aborts ----------------------------------------------------------------------


@_fault(
    Hierarchy,
    "swap_in",
    property="XFER",
    source="B70, LMCache/LMCache#2327",
    shortest=5,
    also=("PROV",),
)
def swap_in_forgets_last_block(
    original: Replacement, self: Hierarchy, request: Request
) -> list[Transfer]:
    """A resumed request counts all it had as restored, but its last block is not copied back."""
    if len(request.host_tables[0]) > 1:
        request.host_tables = [slots[:-1] for slots in request.host_tables]
    transfers: list[Transfer] = original(self, request)
    return transfers


@_fault(
    Engine,
    "swap_out",
    property="PIN",
    source="B78, vllm-project/vllm#29870",
    shortest=3,
    also=("CAP",),
)
def swap_out_does_not_wait(
    original: Replacement, self: Engine, request: Request, late: bool = False
) -> Outcome:
    """A request is swapped out and its blocks are freed while a step in flight still uses them."""
    in_flight, request.steps_in_flight = request.steps_in_flight, 0
    outcome: Outcome = original(self, request, late)
    if outcome.status == "refused":
        request.steps_in_flight = in_flight
    return outcome


@_fault(TierPool, "disown", property="CONS", source="B15, LMCache/LMCache#993", shortest=5)
def host_block_freed_twice(original: Replacement, self: TierPool, slots: Sequence[int]) -> None:
    """The last host block that a request gives back is freed once more."""
    original(self, slots)
    self._free += slots[-1:]


@_fault(
    Engine,
    "_release_host",
    property="QUIES",
    source="B105, openvinotoolkit/model_server#4428",
    shortest=5,
    also=("CONS", "CRASH", "XFER", "MET"),
)
def aborted_swap_keeps_host_blocks(original: Replacement, self: Engine, request: Request) -> None:
    """A swapped request that is aborted is forgotten together with its host blocks."""
    request.host_tables = []


# -- 13. Capacity --------------------------------------------------------------------------------


@_fault(
    BlockPool,
    "count_unreferenced",
    property="CRASH",
    source="B145, vllm-project/vllm#11562",
    shortest=6,
    also=("CAP",),
)
def admission_ignores_free_hits(
    original: Replacement, self: BlockPool, blocks: Sequence[int]
) -> int:
    """Admission forgets that a hit on a free block takes a free block; allocation then fails."""
    return 0


@_fault(
    BlockPool,
    "count_unreferenced",
    property="CAP",
    source="B145, vllm-project/vllm#11562, the other sign",
    shortest=5,
)
def admission_demands_free_hits_twice(
    original: Replacement, self: BlockPool, blocks: Sequence[int]
) -> int:
    """Admission counts hits on free blocks twice, and refuses what would fit."""
    return 2 * int(original(self, blocks))


@_fault(
    engine_module,
    "blocks_needed",
    property="CAP",
    source="B152, GeeeekExplorer/nano-vllm#66",
    shortest=1,
)
def boundary_block_too_early(original: Replacement, tokens: int, block_size: int) -> int:
    """A request of exactly k blocks is given one block more."""
    return tokens // block_size + 1


@_fault(
    engine_module,
    "hit_tokens",
    property="CAP",
    source="B153, GeeeekExplorer/nano-vllm#144",
    shortest=4,
    also=("MET",),
)
def hit_covers_the_whole_prompt(
    original: Replacement, matched_blocks: int, length: int, block_size: int
) -> int:
    """A block-aligned prompt that is cached to its end leaves no token to compute."""
    return min(matched_blocks, length // block_size) * block_size


@_fault(Engine, "fork", property="ATOM", source="B156, huggingface/transformers#46117", shortest=4)
def fork_is_not_atomic(
    original: Replacement, self: Engine, request: Request, samples: int
) -> Outcome:
    """A fork that does not fit keeps the children that did."""
    outcome: Outcome = original(self, request, samples)
    if outcome.reason == TOO_MANY_REQUESTS:
        for _ in range(self.configuration.requests - len(self.running)):
            self._fork_child(request)
    return outcome


@_fault(Engine, "decode", property="ATOM", source="B09, hyprstream/hyprstream#337", shortest=3)
def decode_is_not_atomic(
    original: Replacement, self: Engine, requests: Sequence[Request], tokens: Sequence[int]
) -> Outcome:
    """A batch that does not fit is refused, but those of it that do fit have grown."""
    outcome: Outcome = original(self, requests, tokens)
    if outcome.reason == NO_FREE_BLOCKS:
        for request, token in zip(requests, tokens, strict=True):
            self.grow(request, [token])
    return outcome


@_fault(Engine, "reserve", property="CAP", source="B146, vllm-project/vllm#10730", shortest=2)
def reserve_counts_from_the_end(
    original: Replacement, self: Engine, request: Request, slots: int
) -> Outcome:
    """Blocks in advance are counted on top of those that the request has."""
    outcome: Outcome = original(self, request, slots + len(request.tables[0]) * request.block_size)
    return outcome


@_fault(
    Engine,
    "pending",
    property="CAP",
    source="B126, vllm-project/vllm#57605",
    shortest=2,
    also=("EXCL",),
)
def steps_ignore_slots(original: Replacement, self: Engine, request: Request) -> int:
    """A step computes tokens for which there are no blocks yet."""
    loading = bool(request.transfers)  # is another matter
    return 0 if loading else len(request.tokens) - request.scheduled


# -- 14. Figures ---------------------------------------------------------------------------------


@_fault(Engine, "admit", property="MET", source="B158, vllm-project/vllm#43736", shortest=2)
def lookups_counted_when_refused(
    original: Replacement, self: Engine, prompt: array[int], **arguments: Any
) -> Outcome:
    """Cache look-ups are counted although the admission is refused and will be tried again."""
    outcome: Outcome = original(self, prompt, **arguments)
    if outcome.reason == NO_FREE_BLOCKS:
        self.counters.prefix_cache_queries += len(prompt)
    return outcome


@_fault(Engine, "resume", property="MET", source="B159, vllm-project/vllm#25780", shortest=5)
def hits_counted_again_on_resume(
    original: Replacement, self: Engine, request: Request, slots: int = 0, late: bool = False
) -> Outcome:
    """A resumed request's own old blocks count as prefix hits."""
    outcome: Outcome = original(self, request, slots, late)
    self.counters.prefix_cache_hits += outcome.cached_tokens
    return outcome


@_fault(BlockPool, "evict", property="MET", source="B162, sgl-project/sglang#12983", shortest=1)
def evictions_count_what_was_asked(
    original: Replacement, self: BlockPool, count: int, cause: Any
) -> int:
    """The eviction figure grows by the blocks asked for, not by those evicted."""
    evicted = int(original(self, count, cause))
    self.evictions += count - evicted
    return evicted


FAULTS: tuple[Fault, ...] = tuple(_FAULTS)
