"""What vLLM's scheduler does to its cache with a connector and steps in flight: it fences releases.

A load could overwrite blocks that a step in flight still writes.  So vLLM keeps what a request
gives back meanwhile, until the latest step that was launched is taken in (``deferred_frees``).

See :mod:`kvproof.stateful_tests.subjects.vllm_connector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kvproof.stateful_tests.subjects.vllm_connector_cache import ConnectorCache
from kvproof.stateful_tests.subjects.vllm_overheard import Given

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Fence(NamedTuple):
    """Blocks that are kept for a step."""

    step: int
    request: int
    blocks: list[KVCacheBlock]
    """vLLM's own list of them."""


class FencedCache(ConnectorCache):
    """The scheduler's cache, the host below it, and the blocks that steps in flight keep."""

    semantics = replace(ConnectorCache.semantics, fences_releases=True)

    def _listen_to_scheduler(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._fences: list[Fence] = []
        self._opened: list[tuple[Fence, list[int]]] = []
        """Those that were opened since, each with its blocks, in the order of their release."""
        self._pop_blocks: Callable[[Request], list[KVCacheBlock]]
        self._pop_blocks = self.manager.pop_blocks_for_free
        self.manager.pop_blocks_for_free = self.pop_blocks_for_free
        self._listen(scheduler, "_drain_deferred_frees", self._drain)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """As the manager's: the request gives its blocks up, and the scheduler keeps them."""
        live = self.by_id.get(request.request_id)
        if live is None:  # it was never admitted
            return self._pop_blocks(request)
        before, tables = self._pool_if_told_later(), self._copied_tables(live)
        blocks = self._pop_blocks(request)
        step = self._scheduler.sched_step_seq - 1
        self._fences.append(Fence(step, live.number, blocks))
        self._gave(Given(live, request.is_finished(), [], before, step), tables)
        return blocks

    def _drain(self, original: Callable[[], None]) -> None:
        """The scheduler gives back what it has kept for long enough."""
        pool, free_blocks = self._pool, self._pool.free_blocks
        freed: list[list[int]] = []

        def free(blocks: Iterable[KVCacheBlock]) -> None:
            blocks = list(blocks)
            freed.append([block.block_id for block in blocks])
            free_blocks(blocks)

        pool.free_blocks = free
        try:
            original()
        finally:
            pool.free_blocks = free_blocks
        kept = {id(blocks) for _, blocks in self._scheduler.deferred_frees}
        opened = [fence for fence in self._fences if id(fence.blocks) not in kept]
        self._fences = [fence for fence in self._fences if id(fence.blocks) in kept]
        freed += [[] for _ in opened[len(freed) :]]
        self._opened += zip(opened, freed, strict=False)

    def _tell_fences_opened(self) -> None:
        for fence, released in self._opened:
            self._tell_blocks_released(fence.request, [released], fence.step)
        self._opened.clear()
