"""What of SGLang's caches is shown: the same for any of its trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvproof.invariants.view import Standing
from kvproof.stateful_tests.subjects.told_cache import ToldCacheView

if TYPE_CHECKING:
    from kvproof.stateful_tests.subjects.sglang_told import SglangSubject


class SglangView(ToldCacheView):
    """SGLang's state as it is; requests, their progress and steps are the adapter's."""

    _subject: SglangSubject

    def free_count(self, group: int) -> int:
        return self._subject.free_pages(group)

    def ref_counts(self, group: int) -> Sequence[int]:
        subject = self._subject
        counts = [0] * (subject.configuration.blocks + 1)
        for node, pages in subject.nodes(group):
            for page in pages:
                counts[page] += subject.part(node, group).lock_ref
        for live in subject.running:
            owned = live.request.kv.cache_protected_len // subject.configuration.block_size
            for page in filter(None, subject.tables(live)[group][owned:]):
                counts[page] += 1
        return counts

    def free_blocks(self, group: int) -> Sequence[int]:
        free = self._subject.unused_pages(group)
        for node, pages in self._subject.nodes(group):
            free += pages if self._subject.part(node, group).lock_ref == 0 else ()
        return free

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        found: dict[bytes, list[int]] = {}
        for page, key in self._subject.keys_in_tree(group).items():
            found.setdefault(key, []).append(page)
        return found

    def standing(self, request: int) -> Standing:
        state, length, computed, rows = super().standing(request)
        return state, length, computed, rows * self._subject.semantics.groups

    def table(self, request: int, group: int) -> Sequence[int]:
        return self._subject.tables(self._subject.live[request])[group]

    def last_uses(self, group: int) -> Mapping[int, float]:
        uses: dict[int, int] = {}
        last: dict[Any, int] = {}
        for node, pages in reversed(self._subject.nodes(group)):  # extensions first
            used = max(node.last_access_time, last.get(node, 0))
            last[node.parent] = max(used, last.get(node.parent, 0))
            uses |= dict.fromkeys(pages, used)
        return uses
