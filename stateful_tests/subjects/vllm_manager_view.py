"""What of vLLM's KVCacheManager is shown: blocks, tables, keys and figures.

See :mod:`kvproof.stateful_tests.subjects.vllm_manager`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvproof.stateful_tests.subjects.told_cache import ToldCacheView

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvproof.stateful_tests.subjects.vllm_manager import VllmManagerSubject

USED, FINDABLE = "kv_bytes_used", "findable_tokens"
"""Figures: vLLM's ``usage``, and its ``estimate_cached_tokens``."""


class _RefCounts(Sequence[int]):
    """Reference counts by block id, read from vLLM's blocks; the null block's means nothing."""

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block = self._blocks[index]
        return 0 if block.is_null else block.ref_cnt


class _Index(Mapping[bytes, Sequence[int]]):
    """vLLM's map of keys, whose values are one block, or several by id.

    ``others``: of blocks, keys of part of their content, which are left out (``vllm_groups``).
    """

    def __init__(self, entries: Mapping[bytes, Any], others: Mapping[int, set[bytes]]) -> None:
        self._entries = entries
        self._others = others

    def __len__(self) -> int:
        return sum(1 for _ in self) if self._others else len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return filter(self.__contains__, self._entries) if self._others else iter(self._entries)

    def __getitem__(self, key: bytes) -> Sequence[int]:
        entry, others = self._entries[key], self._others
        blocks = tuple(entry) if isinstance(entry, dict) else (entry.block_id,)
        if others:
            blocks = tuple([block for block in blocks if key not in others.get(block, ())])
            if not blocks:
                raise KeyError(key)
        return blocks


class VllmManagerView(ToldCacheView):
    """vLLM's state as it is; requests, their progress and steps are the adapter's."""

    _subject: VllmManagerSubject

    def __init__(self, subject: VllmManagerSubject) -> None:
        super().__init__(subject)
        self._pool = subject.manager.block_pool
        self._ref_counts = _RefCounts(self._pool.blocks)

    def free_count(self, group: int) -> int:
        count: int = self._pool.get_num_free_blocks()
        return count

    def ref_counts(self, group: int) -> Sequence[int]:
        return self._ref_counts

    def free_blocks(self, group: int) -> Sequence[int]:
        # Bounded, since the list of a faulty manager may run in a circle.
        walk = self._pool.free_block_queue.iter_blocks_after(None)
        return [block.block_id for block in islice(walk, len(self._pool.blocks) + 1)]

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        pool = self._pool
        return _Index(pool.cached_block_hash_to_block._cache, pool.cached_block_hashes_by_block)

    def table(self, request: int, group: int) -> Sequence[int]:
        return [block.block_id for block in self._subject.table(self._subject.live[request])]

    def metrics(self) -> Mapping[str, int]:
        configuration, total = self._subject.configuration, self._pool.num_gpu_blocks - 1
        used = round(self._subject.manager.usage * total)
        return {USED: used * configuration.block_size * configuration.kv_bytes_per_token}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        live, manager = self._subject.live[request], self._subject.manager
        return {FINDABLE: manager.estimate_cached_tokens(live.request)}
