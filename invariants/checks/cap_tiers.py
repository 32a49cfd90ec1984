"""What a memory hierarchy must answer, predicted from the books as before the operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, dropwhile, islice, takewhile
from typing import Literal

from msgspec import Struct

from kvproof.invariants.books import Books, GroupBooks
from kvproof.invariants.operations import (
    Corrupt,
    Evict,
    Offload,
    Operation,
    Promote,
    Restart,
    Slow,
    Withhold,
)
from kvproof.invariants.outcomes import (
    NO_DISK_BLOCKS,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
    RETRY,
    Answer,
    Status,
)
from kvproof.invariants.slot_books import TierBooks
from kvproof.invariants.tags import Tags
from kvproof.invariants.tier_books import Tiers


class Expected(Struct, frozen=True):
    """An answer, as far as it can be told in advance: new transfers by their number only."""

    status: Status = "done"
    reason: str | None = None
    count: int = 0
    lookup: Answer | Literal[""] = ""
    transfers: int = 0


def _refused(reason: str, lookup: Answer | Literal[""] = "") -> Expected:
    return Expected("refused", reason, lookup=lookup)


class TierAnswers:
    """Predicts operations on tiers; with no tiers, that there are none."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.chosen: list[tuple[int, list[int]]] = []
        """By group, the blocks that are to be copied."""
        self._predictions: dict[type[Operation], Callable[..., Expected]] = {
            Offload: self._offload,
            Promote: self._promote,
            Withhold: self._withhold,
            Corrupt: self._corrupt,
            Restart: self._restart,
            Slow: self._slow,
            Evict: self._evict,
        }

    def predict(self, operation: Operation) -> Expected:
        return self._predictions[type(operation)](operation)

    @property
    def _prefixes(self) -> Tiers | None:
        """The tiers, if completed blocks are copied to them."""
        return self._books.tiers if self._books.configuration.offloads_prefixes else None

    def _rows(self, tags: Tags[int]) -> Tags[int]:
        """The last tags of the rows below the last token: those that may be hit."""
        configuration = self._books.configuration
        size = configuration.block_size
        rows = (len(tags) - 1) // size if configuration.prefix_caching else 0
        return tags[size - 1 : rows * size : size]

    def beyond(self, tags: Tags[int], hits: int) -> Answer | Literal[""]:
        """What the tiers say of the first row that an admission with so many hits lacks."""
        tiers, configuration = self._prefixes, self._books.configuration
        last = (hits + 1) * configuration.block_size - 1
        if tiers is None or last >= len(tags) - 1 or not configuration.prefix_caching:
            return ""
        return tiers.answer(tags[last])

    # -- copies downwards ------------------------------------------------------------------------

    def _offload(self, operation: Offload) -> Expected:
        tiers = self._prefixes
        if tiers is None or (operation.to == "disk" and not tiers.disk):
            return _refused(OFFLOAD_OFF)
        to_host = operation.to == "host"
        queues = [
            group.unstored if to_host else host.queue
            for group, host in zip(tiers.groups, tiers.host, strict=True)
        ]
        self.chosen = [
            (group, chosen)
            for group, queue in enumerate(queues)
            if (chosen := _from(queue, operation.first, operation.blocks))
        ]
        tiers.wanted = []
        if not to_host:
            tiers.wanted = [(tiers.host[group], chosen) for group, chosen in self.chosen]
        if not self.chosen:
            return _refused(NOTHING_TO_MOVE)
        for group, chosen in self.chosen:
            if len(chosen) > tiers.of(operation.to)[group].free:
                return _refused(NO_HOST_BLOCKS if to_host else NO_DISK_BLOCKS)
            if to_host and not _may_hold(tiers.groups[group], chosen):
                return _refused(NO_FREE_BLOCKS)
            if not to_host and not _may_pin(tiers.host[group], chosen):
                return _refused(NO_HOST_BLOCKS)
        return self._started()

    def _started(self, lookup: Answer | Literal[""] = "") -> Expected:
        blocks = sum([len(chosen) for _, chosen in self.chosen])
        return Expected(count=blocks, lookup=lookup, transfers=len(self.chosen))

    # -- copies upwards --------------------------------------------------------------------------

    def _promote(self, operation: Promote) -> Expected:
        tiers = self._prefixes
        if tiers is None or (operation.to == "host" and not tiers.disk):
            return _refused(OFFLOAD_OFF)
        rows = self._rows(self._books.tags_of(operation))
        lacking = [tag for tag in rows if not self._on_device(tag)]
        lookup = tiers.answer(lacking[0]) if lacking else ""
        if operation.to == "device":
            return self._to_device(tiers, rows, operation.blocks, lookup)
        return self._to_host(tiers, rows, operation.blocks, lookup)

    def _on_device(self, tag: int) -> bool:
        return all(tag in group.key_of_tag for group in self._books.groups)

    def _to_device(
        self, tiers: Tiers, rows: Tags[int], most: int, lookup: Answer | Literal[""]
    ) -> Expected:
        wanted = [_wanted(rows, partial(_arrives, group)) for group in tiers.groups]
        if not self._choose(tiers, wanted, most, tiers.host):
            return _refused(NOTHING_TO_MOVE, lookup)
        for group, chosen in self.chosen:
            if len(chosen) > tiers.groups[group].free:
                return _refused(NO_FREE_BLOCKS, lookup)
            if not _may_pin(tiers.host[group], chosen):
                return _refused(NO_HOST_BLOCKS, lookup)
        return self._started(lookup)

    def _to_host(
        self, tiers: Tiers, rows: Tags[int], most: int, lookup: Answer | Literal[""]
    ) -> Expected:
        wanted = [
            _wanted(rows, partial(_comes, group, host))
            for group, host in zip(tiers.groups, tiers.host, strict=True)
        ]
        if tiers.slow:
            return _refused(RETRY, lookup)
        if not self._choose(tiers, wanted, most, tiers.disk):
            return _refused(NOTHING_TO_MOVE, lookup)
        self._books.passing = True  # what is protected is so for this operation only
        for host, protected in zip(tiers.host, tiers.protected, strict=True):
            protected.update([host.slot_of[tag] for tag in rows if tag in host.slot_of])
        for group, chosen in self.chosen:
            if len(chosen) > tiers.host[group].room(tiers.protected[group]):
                return _refused(NO_HOST_BLOCKS, lookup)
            if not _may_pin(tiers.disk[group], chosen):
                return _refused(NO_DISK_BLOCKS, lookup)
        return self._started(lookup)

    def _choose(
        self, tiers: Tiers, wanted: Sequence[Sequence[int]], most: int, below: Sequence[TierBooks]
    ) -> bool:
        """Of the rows that are wanted, those that the tier below has, up to the first it lacks."""
        self.chosen = []
        for rows, tier in zip(wanted, below, strict=True):
            ready = takewhile(tier.slot_of.__contains__, rows)
            chosen = [tier.slot_of[tag] for tag in islice(ready, most or None)]
            if chosen:
                self.chosen.append((tier.group, chosen))
        tiers.wanted = [(below[group], chosen) for group, chosen in self.chosen]
        return bool(self.chosen)

    # -- the rest --------------------------------------------------------------------------------

    def _withhold(self, operation: Withhold) -> Expected:
        wanted = operation.blocks
        if operation.tier == "device":
            free = [group.free + group.withheld for group in self._books.groups]
        else:
            tiers = self._books.tiers.of(operation.tier) if self._books.tiers else []
            free = [tier.free + tier.withheld for tier in tiers]
        return Expected(count=sum([min(wanted, count) for count in free]))

    def _corrupt(self, operation: Corrupt) -> Expected:
        tiers = self._books.tiers
        if tiers is None or tiers.damaged(operation) is None:
            return Expected("skipped")
        return Expected(count=1)

    def _restart(self, operation: Restart) -> Expected:
        tiers = self._books.tiers
        if tiers is None or not tiers.disk:
            return _refused(OFFLOAD_OFF)
        ended = [transfer for transfer in tiers.in_flight.values() if transfer.on_disk]
        return Expected(transfers=len(ended))

    def _slow(self, operation: Slow) -> Expected:
        tiers = self._books.tiers
        return Expected() if tiers is not None and tiers.disk else _refused(OFFLOAD_OFF)

    def _evict(self, operation: Evict) -> Expected:
        tiers = self._prefixes.of(operation.tier) if self._prefixes else []
        if not tiers:
            return _refused(OFFLOAD_OFF)
        return Expected(count=sum([min(operation.blocks, len(tier.order)) for tier in tiers]))


def _from(queue: dict[int, None], first: int, blocks: int) -> list[int]:
    """So many entries of a queue (0: all) from the ``first``-th on, round its end."""
    if not queue:
        return []
    start = first % len(queue)
    turned = chain(islice(queue, start, None), islice(queue, start))
    return list(islice(turned, blocks or None))


def _arrives(group: GroupBooks, tag: int) -> bool:
    """Whether the device has it, or a promotion brings it."""
    return tag in group.key_of_tag or tag in group.arriving


def _comes(group: GroupBooks, host: TierBooks, tag: int) -> bool:
    """Whether device or host have it, or something brings it to them."""
    return _arrives(group, tag) or host.awaits_or_has(tag)


def _wanted(rows: Sequence[int], there: Callable[[int], bool]) -> Sequence[int]:
    """The first rows, one after another, that are not there."""
    return list(takewhile(lambda tag: not there(tag), dropwhile(there, rows)))


def _may_hold(group: GroupBooks, blocks: Sequence[int]) -> bool:
    """Whether those of these blocks that are free may be used: some may be withheld."""
    return sum([group.refs[block] == 0 for block in blocks]) <= group.free


def _may_pin(tier: TierBooks, slots: Sequence[int]) -> bool:
    return sum([slot in tier.order for slot in slots]) <= tier.free
