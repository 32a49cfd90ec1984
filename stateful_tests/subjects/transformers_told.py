"""The cache of transformers as it is, and its requests as they were told.

See :mod:`kvproof.stateful_tests.subjects.transformers_overheard`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.view import Standing

if TYPE_CHECKING:
    from kvproof.stateful_tests.subjects.transformers_overheard import OverheardCache


class Told:
    """A request as the cache's checks know it: of its tokens, those that were given slots."""

    __slots__ = (
        "computed",
        "epoch",
        "name",
        "number",
        "rows",
        "running",
        "slots",
        "suspended",
        "swapped",
        "tokens",
    )

    def __init__(self, number: int, name: str, tokens: int) -> None:
        self.number = number
        self.name = name
        self.tokens = tokens
        self.slots = 0
        self.computed = 0
        self.epoch = 0
        self.running = False
        self.swapped = False
        """Preempted, and all that was computed of it is on the host."""
        self.suspended = 0
        """Tokens computed that are on the host, until they are back."""
        self.rows = 0
        """Rows of its table that were told."""


def block_key(block_hash: int) -> bytes:
    """What the checks call the content that the engine knows by this hash."""
    return block_hash.to_bytes(8, "little")


class OverheardView:
    """The cache of transformers as it is; of a request, also where its scheduler keeps it."""

    def __init__(self, cache: OverheardCache) -> None:
        self._cache = cache
        self._pool = cache.cache.pool
        self._allocator = cache.allocator
        self._ledger = cache.allocator.ledger

    def free_count(self, group: int) -> int:
        unassigned: int = self._pool.num_free_sectors * self._allocator.blocks_per_sector
        free: int = self._pool.count_free_blocks(self._allocator.index)
        return unassigned + free + len(self._ledger.cached_blocks)

    def ref_counts(self, group: int) -> Sequence[int]:
        """A count of 1 is not kept: a block has it that is in some table."""
        semantics = self._cache.semantics
        counts = [0] * (self._cache.configuration.blocks + len(semantics.reserved))
        for table in self._allocator.block_table.values():
            for block in table:
                counts[block] = 1
        for block, count in self._ledger.shared_ref_counts.items():
            counts[block] = count
        return counts

    def free_blocks(self, group: int) -> Sequence[int]:
        per_sector = self._allocator.blocks_per_sector
        return [
            *(s * per_sector + i for s in self._pool.free_sectors for i in range(per_sector)),
            *(b for t in self._pool._free_blocks[self._allocator.index].trees.values() for b in t),
            *self._ledger.cached_blocks,
        ]

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return {block_key(key): (block,) for key, block in self._ledger.hash_to_block.items()}

    def requests(self) -> Sequence[int]:
        return list(self._cache.live)

    def standing(self, request: int) -> Standing:
        live = self._cache.live[request]
        if not live.running:
            return "preempted", live.tokens, 0, (len(self.table(request, 0)),)
        return "running", live.tokens, self._computed(live), (len(self.table(request, 0)),)

    def _computed(self, live: Told) -> int:
        """As the engine has it; while it is at work, it may not have written it down yet."""
        cache = self._cache
        state = cache.scheduler.active_requests.get(live.name)
        if cache.at_work or state is None:
            return live.computed
        position: int = state.position_offset
        return position

    def table(self, request: int, group: int) -> Sequence[int]:
        found: Sequence[int] = self._allocator.block_table.get(self._cache.live[request].name, ())
        return found

    def steps_in_flight(self) -> Sequence[int]:
        return [step.step for step in self._cache.steps]

    def metrics(self) -> Mapping[str, int]:
        return {}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return {}
