"""vLLM's KVCacheManager with several groups, which share one pool.

Layers of one group share a block table.  A request has a table and keys in each group; all blocks
come from one pool, and one queue of free blocks serves all groups (``Semantics.shared_pool``).
A hit is what all groups have.

``vllm:manager:groups`` has two groups of full attention; ``vllm:manager:hybrid`` one of them, and
one with a window (``Semantics.windows``) of a block and two tokens.  Behind its window vLLM takes
blocks back, also when it then refuses to grow the request, and their rows name the null block; of a
hit, too, only what is in the window is looked for.  How many blocks such a request needs is vLLM's
to say, which is why exact admission is not promised there.  A step in flight may still read what is
behind the window of the next one: nothing is fenced, the order of the stream makes it safe.

``vllm:manager:unequal`` has groups of unequal block sizes: one and two of the configuration's
blocks, which are what vLLM hashes, and in pools of some size a third one with three of them.  Hits,
and what vLLM publishes, end at a multiple of all sizes.

Where a group's blocks are larger than what is hashed, vLLM notes a further key of a block: that of
the end of the prompt inside it (``_cache_partial_tail_block``).  Such keys are looked for only if a
group of state-space layers has its states cached at block ends (``partial_hash_hits_enabled``):
here, never.  They are the pool's ``cached_block_hashes_by_block``, and left out of the view.

Groups of state-space layers are driven by :mod:`kvproof.stateful_tests.subjects.vllm_states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvproof.invariants.events import BlocksOutlived, BlocksReused
from kvproof.invariants.operations import Grow
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration
from kvproof.invariants.view import Standing
from kvproof.stateful_tests.subjects.vllm_manager import Live, VllmManagerSubject
from kvproof.stateful_tests.subjects.vllm_manager_view import VllmManagerView
from kvproof.stateful_tests.subjects.vllm_package import NAME

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

FACTORS = (1, 2, 3)
"""Blocks of groups of unequal size, in the configuration's block …"""
_THREE_FROM = 16
"""… and from how many blocks on there is a group of each: in less, what all can hit hardly fits."""


def windows_of(configuration: Configuration) -> tuple[int, int]:
    """Of the hybrid's groups, see ``Semantics.windows``."""
    return 0, configuration.block_size + 2


class VllmGroupsView(VllmManagerView):
    """Tables by group; everything else is the pool's."""

    def __init__(self, subject: VllmGroupsSubject) -> None:
        super().__init__(subject)
        self._groups = subject

    def standing(self, request: int) -> Standing:
        found = self._groups.live[request]
        rows = tuple([len(table) for table in self._groups.tables(found)])
        return "running" if found.running else "preempted", found.length, found.computed, rows

    def table(self, request: int, group: int) -> Sequence[int]:
        tables = self._groups.tables(self._groups.live[request])
        return [block.block_id for block in tables[group]]


class VllmGroupsSubject(VllmManagerSubject):
    """Drives one KVCacheManager with more than one table a request."""

    name = f"{NAME}:groups"
    semantics = replace(VllmManagerSubject.semantics, groups=2, shared_pool=True)

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self._told: dict[int, tuple[Live, ...]] = {}
        """Per live request and group: how much of its table was told."""
        self.sizes = self.semantics.block_sizes or (configuration.block_size,) * (
            self.semantics.groups
        )
        """Tokens per block, by group …"""
        self.unit = lcm(*self.sizes)
        """… and where what is findable ends."""
        self._view = VllmGroupsView(self)

    def tables(self, live: Live) -> Sequence[Sequence[KVCacheBlock]]:
        """vLLM's own block tables of a request."""
        tables: tuple[list[KVCacheBlock], ...] = self.manager.coordinator.get_blocks(
            live.request.request_id
        )
        return tables

    def _needs(self, tokens: int) -> int:
        return sum([-(-tokens // size) for size in self.sizes])

    def _full_rows(self, live: Live, group: int) -> int:
        rows: int = live.request.num_tokens // self.unit * self.unit // self.sizes[group]
        return rows

    def _tables(self, live: Live) -> tuple[list[int], ...]:
        return tuple([[block.block_id for block in table] for table in self.tables(live)])

    def _tell_admitted(self, live: Live, hits: Sequence[Sequence[KVCacheBlock]]) -> None:
        others = [Live(live.number, live.request) for _ in range(self.semantics.groups - 1)]
        self._told[live.number] = (live, *others)
        for group, table in enumerate(self.tables(live)):
            self._tell_reused(self._told[live.number][group], group, table, hits[group])
        self._tell_blocks(live, ())

    def _tell_blocks(self, live: Live, hits: Sequence[KVCacheBlock]) -> None:
        """As with one group; vLLM fills one table after another, and publishes at the end."""
        told, tables = self._told[live.number], self.tables(live)
        for group, table in enumerate(tables):
            self._tell_allocated(told[group], group, table)
        if self.configuration.prefix_caching:
            for group, table in enumerate(tables):
                self._tell_published(told[group], table, group)

    def _release(self, live: Live) -> None:
        tables = [[block for block in table if not block.is_null] for table in self.tables(live)]
        self.manager.free(live.request)
        live.rows = live.rows_published = 0
        del self._told[live.number]
        for group, blocks in enumerate(tables):
            self._tell_released(live, group, blocks)


class VllmUnequalSubject(VllmGroupsSubject):
    """Drives one KVCacheManager whose groups have blocks of unequal size."""

    name = f"{NAME}:unequal"

    def __init__(self, configuration: Configuration) -> None:
        factors = FACTORS if configuration.blocks >= _THREE_FROM else FACTORS[:2]
        sizes = tuple([factor * configuration.block_size for factor in factors])
        # vLLM's estimate of findable tokens counts keys of parts of blocks, too.
        self.semantics = replace(
            self.semantics, groups=len(sizes), block_sizes=sizes, exports_per_request=()
        )
        super().__init__(configuration)


class _Windowed(Live):
    """How much of a table with a window was told."""

    __slots__ = ("behind", "blocks")

    def __init__(self, number: int, request: Request) -> None:
        super().__init__(number, request)
        self.behind = 0
        """Leading rows without a block."""
        self.blocks: list[KVCacheBlock] = []
        """As they were, by row."""


class VllmHybridSubject(VllmGroupsSubject):
    """Drives one KVCacheManager with full attention, and with attention in a window."""

    name = f"{NAME}:hybrid"

    def __init__(self, configuration: Configuration) -> None:
        self.semantics = replace(
            self.semantics,
            windows=windows_of(configuration),
            exact_admission=False,
            shorter_hits=False,
            keeps_room=False,
        )
        super().__init__(configuration)

    def _tell_admitted(self, live: Live, hits: Sequence[Sequence[KVCacheBlock]]) -> None:
        windowed = _Windowed(live.number, live.request)
        self._told[live.number] = (live, windowed)
        full, table = self.tables(live)
        self._tell_reused(live, 0, full, hits[0])
        rows = live.rows
        while windowed.behind < rows and table[windowed.behind].is_null:
            windowed.behind += 1
        self._tell_hit(windowed, table[:rows])
        self._tell_blocks(live, ())

    def _tell_hit(self, windowed: _Windowed, table: Sequence[KVCacheBlock]) -> None:
        windowed.rows = windowed.rows_published = len(table)
        windowed.blocks = list(table)
        blocks = [block.block_id for block in table[windowed.behind :]]
        if table:
            self._events.append(BlocksReused(1, windowed.number, windowed.behind, blocks))
            self._not_free(blocks)

    def _tell_blocks(self, live: Live, hits: Sequence[KVCacheBlock]) -> None:
        self._tell_outlived(live)
        super()._tell_blocks(live, hits)
        windowed, table = self._told[live.number][1], self.tables(live)[1]
        assert isinstance(windowed, _Windowed)
        windowed.blocks += table[len(windowed.blocks) :]

    def _tell_outlived(self, live: Live) -> None:
        """Tell the rows of which vLLM took back the blocks."""
        windowed, table = self._told[live.number][1], self.tables(live)[1]
        assert isinstance(windowed, _Windowed)
        first = windowed.behind
        while windowed.behind < windowed.rows and table[windowed.behind].is_null:
            windowed.behind += 1
        blocks = windowed.blocks[first : windowed.behind]
        if blocks:
            self._tell_released(windowed, 1, blocks, BlocksOutlived)

    def _grow(self, operation: Grow) -> Outcome:
        outcome = super()._grow(operation)
        if outcome.status == "refused" and outcome.request is not None:
            self._tell_outlived(self.live[outcome.request])
        return outcome


GROUPED: dict[str, type[VllmGroupsSubject]] = {
    "groups": VllmGroupsSubject,
    "hybrid": VllmHybridSubject,
    "unequal": VllmUnequalSubject,
}
"""By the end of their names."""
