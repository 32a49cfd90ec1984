"""SGLang's UnifiedRadixCache with a window: layers that look back on a few tokens, beside others.

A request has one row, of slots for layers of full attention.  A second pool has the slots of the
layers with a window, and a mapping says which of them stands beside a slot of the row: these are
the tables of the second group.

* **What a request has of that group** is what stands beside its own slots, and beside those of the
  tree as far back as its lock goes.  Of the rest the tree may let go, so the table has page 0
  there: the request is behind its window by then.
* **A lock, and a hit, are of whole nodes**, and what is behind the window may go only when a
  request decodes alone: SGLang keeps more than the window, for longer than it must
  (``Semantics.windows_lag``).  It amortises this over 128 tokens, here over one.
* **Its scheduler lets a window slide at decoding**, where all that was before it is computed or
  under way.  Here a request may also be grown before that; then it does not slide.
* **The tree takes what it lacks.**  Where it has lost the pages of the window, but not the others,
  it may take both from a request that computed them again, and lets its own go.  So pages are
  evicted that nobody needs, and no order of eviction is promised.
* **Not all that is computed is published** once it is: up to where the tree branches first.
* An ``Evict`` asks for pages of the window first, which can go without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from kvproof.invariants.events import BlocksOutlived
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.sglang_requests import SglangLive
from kvproof.stateful_tests.subjects.sglang_unified import SglangUnifiedSubject

FULL, WINDOW = 0, 1


class SglangWindowSubject(SglangUnifiedSubject):
    """Drives one UnifiedRadixCache for layers of full attention and layers with a window."""

    name = "sglang:unified:window"

    def __init__(self, configuration: Configuration) -> None:
        self.semantics = replace(
            self.semantics,
            groups=2,
            # SGLang does not count the token that looks.
            windows=(0, configuration.block_size + 2),
            windows_lag=True,
            publishes="lazily",
            eviction_order="any",
            exact_admission=False,
            shorter_hits=False,
            keeps_room=False,
        )
        super().__init__(configuration)
        self._pools = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)

    def _new_tree(self) -> Any:
        window = self.semantics.windows[WINDOW] - 1
        return self._sglang.new_unified(self.configuration, window)

    # -- what SGLang has ---------------------------------------------------------------------------

    def part(self, node: Any, group: int) -> Any:
        return node.component((self._sglang.full, self._sglang.window)[group])

    def free_pages(self, group: int) -> int:
        evictable = (self.tree.full_evictable_size, self.tree.swa_evictable_size)[group]
        tokens: int = self._pools[group].available_size() + evictable()
        return tokens // self.configuration.block_size

    def unused_pages(self, group: int) -> list[int]:
        pages: list[int] = self._pools[group].get_all_free_pages().tolist()
        return pages

    def tables(self, live: SglangLive) -> tuple[list[int], ...]:
        kv = live.request.kv
        if not kv.holds_kv:
            return [], []
        row = self.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        beside = self._pages(self.allocator.translate_loc_from_full_to_swa(row).tolist())
        shared = kv.cache_protected_len // self.configuration.block_size
        locked = self._locked(live.request.lock)
        has = [page if page in locked else 0 for page in beside[:shared]]
        return self._pages(row.tolist()), has + beside[shared:]

    def _pages(self, slots: list[int]) -> list[int]:
        """Slots of nobody are all 0."""
        size = self.configuration.block_size
        pages = []
        for start in range(0, len(slots), size):
            of_page = slots[start : start + size]
            pages += super()._pages(of_page) if any(of_page) else [0]
        return pages

    def _locked(self, lock: Any) -> set[int]:
        """The pages with a window that a lock keeps in the tree."""
        core, pages = self.tree.tree_core, set[int]()
        if lock is None or lock.swa_released or self.tree.disable:
            return pages
        node, last = core.node_by_id(lock.node), lock.receipt.get_lock_uuid(self._sglang.window)
        while node is not core.root_node:
            part = self.part(node, WINDOW)
            pages.update([] if part.value is None else self._pages(part.value.tolist()))
            if last is not None and part.metadata.get("uuid") == last:
                break
            node = node.parent
        return pages

    # -- what it does ------------------------------------------------------------------------------

    def _step_on(self, lives: Sequence[SglangLive]) -> None:
        before = [self.tables(live) for live in lives]
        self._slide([live for live in lives if self._is_decoding(live)])
        super()._step_on(lives)
        for live, tables in zip(lives, before, strict=True):
            self._tell_outlived(live, tables[WINDOW])

    def _is_decoding(self, live: SglangLive) -> bool:
        """Its prompt is in the tree, and steps carry all but the token that comes now."""
        return live.computed >= live.asked and live.scheduled >= live.length - 1

    def _slide(self, lives: Sequence[SglangLive]) -> None:
        batch = SimpleNamespace(
            reqs=[live.request for live in lives],
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            forward_mode=self._sglang.decode,
        )
        batch._swa_eviction_trigger = partial(self._sglang.batch._swa_eviction_trigger, batch)
        batch._evict_swa = partial(self._sglang.batch._evict_swa, batch)
        self._sglang.batch.maybe_evict_swa(batch)
        for live in lives:
            live.request.decode_batch_idx += 1

    def _evict_tokens(self, tokens: int) -> None:
        asked = self._sglang.evict_params
        gone = self.tree.evict(asked(num_tokens=0, swa_num_tokens=tokens)).num_tokens_evicted
        self.tree.evict(asked(num_tokens=max(0, tokens - gone)))

    # -- events ------------------------------------------------------------------------------------

    def _last_tables(self, before: Sequence[list[int]], row: list[int]) -> tuple[list[int], ...]:
        """No lock says any more what it had of the window's pages."""
        return row, before[WINDOW]

    def _tell_checkpoint(
        self, live: SglangLive, before: Sequence[list[int]], after: Sequence[list[int]]
    ) -> None:
        self._tell_evicted("pressure")
        kept = [old if new == 0 else new for old, new in zip(before[1], after[1], strict=True)]
        super()._tell_checkpoint(live, before, (after[FULL], kept))
        self._tell_outlived(live, kept)

    def _tell_outlived(self, live: SglangLive, before: Sequence[int]) -> None:
        now = self.tables(live)[WINDOW]
        blocks = [page for page, left in zip(before, now, strict=False) if page and not left]
        if blocks:
            self._events.append(BlocksOutlived(WINDOW, live.number, blocks))
