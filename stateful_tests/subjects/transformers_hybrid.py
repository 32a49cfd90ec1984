"""A window beside full attention in transformers' continuous batching, overheard at its cache.

The engine has a group of layers that look at everything, and one of layers that look back on a few
tokens.  Both take sectors from one pool; here a block of either is as large.

* **The table of full attention** is told as any (``OverheardCache``).  The engine shares no prefix
  in such a layout, but forks share blocks.
* **The table of the window is a ring**: position p lives where p modulo the window does, in the
  middle of a block whose other half is still looked at.  A step's tables cannot say that, so its
  blocks are only counted: they are withheld from the others (``Withhold``), as many as the rings
  of running requests have, and so none is lost or had twice.
* **What is in the ring** is compared after each step, as bytes, and the logits say whether all of
  it was found (:mod:`kvproof.stateful_tests.subjects.transformers_scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvproof.invariants.operations import Withhold
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.transformers_overheard import Listener, OverheardCache
from kvproof.stateful_tests.subjects.transformers_told import OverheardView

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import RequestState


class HybridView(OverheardView):
    """The pool that both groups share; what rings have is withheld as far as it is told."""

    def __init__(self, cache: HybridCache) -> None:
        super().__init__(cache)
        self._hybrid = cache

    def free_count(self, group: int) -> int:
        ring: int = self._pool.count_free_blocks(self._hybrid.ring.index)
        taken = len(self._hybrid.rings()) - self._hybrid.withheld
        return super().free_count(group) + ring + taken

    def free_blocks(self, group: int) -> Sequence[int]:
        trees = self._pool._free_blocks[self._hybrid.ring.index].trees
        ring = [block for tree in trees.values() for block in tree]
        return [*super().free_blocks(group), *ring, *self._hybrid.rings()]


class HybridCache(OverheardCache):
    """The engine's cache with a ring beside each table."""

    capabilities = OverheardCache.capabilities | {"withhold"}

    def __init__(
        self,
        configuration: Configuration,
        processor: ContinuousBatchProcessor,
        listener: Listener,
    ) -> None:
        super().__init__(configuration, processor, listener)
        self.ring: Any = self.cache.cache_allocators["sliding_attention"]
        self._view = HybridView(self)

    def rings(self) -> list[int]:
        """Blocks of the rings of all requests that run."""
        tables = self.ring.block_table
        return [block for live in self.running for block in tables.get(live.name, ())]

    def _tell_rings(self) -> None:
        blocks = len(self.rings())
        if blocks != self.withheld:
            self.withheld = blocks
            self._tell(Withhold("device", blocks), count=blocks)

    def _can_store_request_tokens(
        self,
        original: Callable[..., bool],
        state: RequestState,
        request_len: int,
        dry_run: bool = False,
    ) -> bool:
        stored = super()._can_store_request_tokens(original, state, request_len, dry_run)
        self._tell_rings()
        return stored

    def _free_blocks(
        self, original: Callable[..., None], name: str, no_cache: bool = False
    ) -> None:
        super()._free_blocks(original, name, no_cache)
        self._tell_rings()

    def _prepare_fork_request(
        self,
        original: Callable[..., list[str]],
        state: RequestState,
        names: list[str],
        copies: dict[str, tuple[list[int], list[int]]],
    ) -> list[str]:
        forked = super()._prepare_fork_request(original, state, names, copies)
        self._tell_rings()
        return forked
