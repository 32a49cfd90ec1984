"""CAP's part about the memory hierarchy: what it must answer, predicted from the books as before
the operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from kvproof.invariants.checks.cap_answers import Answers
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Corrupt,
    Evict,
    Offload,
    Operation,
    Promote,
    Restart,
    Slow,
    Withhold,
    kind_of,
)
from kvproof.invariants.outcomes import (
    NO_DISK_BLOCKS,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
    RETRY,
    Answer,
    Outcome,
    Status,
)
from kvproof.invariants.slot_books import TierBooks
from kvproof.invariants.tags import Tags
from kvproof.invariants.tier_books import Tiers
from kvproof.invariants.tier_plans import CopyPlan
from kvproof.invariants.verdict import counted

_LACK = {"device": NO_FREE_BLOCKS, "host": NO_HOST_BLOCKS, "disk": NO_DISK_BLOCKS}


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
    """Predicts operations on tiers; with no tiers, that there are none.  It reports through that
    check."""

    def __init__(self, check: Answers) -> None:
        self._check = check
        self._books = check.books
        self._chosen: Sequence[tuple[int, list[int]]] = ()
        """By group, the blocks that the present copy is of."""
        self._predictions: dict[type[Operation], Callable[..., Expected]] = {
            Offload: self._offload,
            Promote: self._promote,
            Withhold: self._withhold,
            Corrupt: self._corrupt,
            Restart: self._restart,
            Slow: self._slow,
            Evict: self._evict,
        }

    def answered(self, operation: Operation, outcome: Outcome) -> None:
        """The hierarchy answers as predicted; with the books as before the operation."""
        check, expected = self._check, self._predictions[type(operation)](operation)
        if (outcome.status, outcome.reason) != (expected.status, expected.reason):
            check.wrong_answer(operation, outcome, expected.reason, expected.status)
            return
        if outcome.count != expected.count:
            check.wrong_figure(operation, outcome, outcome.count, expected.count)
        if outcome.lookup != expected.lookup:
            check.wrong_lookup(operation, outcome, expected.lookup)
        if len(outcome.transfers) != expected.transfers:
            check.fail(
                f"{kind_of(operation)} names {counted(len(outcome.transfers), 'transfer')}, but "
                f"it should be {expected.transfers}"
            )

    def copied(self, operation: Offload | Promote, outcome: Outcome) -> None:
        """A copy that was started is of the blocks that are next."""
        tiers = self._books.tiers
        if tiers is None:
            return
        started = [tiers.in_flight.get(number) for number in outcome.transfers]
        actual = [(t.group, t.sources) for t in started if t is not None]
        if actual != list(self._chosen):
            self._check.fail(
                f"{kind_of(operation)} copies (group, blocks) {actual}, but next are {self._chosen}"
            )

    def beyond(self, tags: Tags[int], hits: int) -> Answer | Literal[""]:
        """What the tiers say of the first row that an admission with so many hits lacks."""
        tiers, configuration = self._prefixes, self._books.configuration
        last = (hits + 1) * configuration.block_size - 1
        if tiers is None or last >= len(tags) - 1 or not configuration.prefix_caching:
            return ""
        return tiers.answer(tags[last])

    @property
    def _prefixes(self) -> Tiers | None:
        """The tiers, if completed blocks are copied to them."""
        return self._books.tiers if self._books.configuration.offloads_prefixes else None

    # -- copies ----------------------------------------------------------------------------------

    def _offload(self, operation: Offload) -> Expected:
        tiers = self._prefixes
        if tiers is None or (operation.to == "disk" and not tiers.disk):
            return _refused(OFFLOAD_OFF)
        return self._copy(tiers, tiers.plan(operation))

    def _promote(self, operation: Promote) -> Expected:
        tiers = self._prefixes
        if tiers is None or (operation.to == "host" and not tiers.disk):
            return _refused(OFFLOAD_OFF)
        rows = self._books.rows_to_hit(self._books.tags_of(operation))
        lacking = [tag for tag in rows if not self._on_device(tag)]
        lookup = tiers.answer(lacking[0]) if lacking else ""
        if operation.to == "host" and tiers.slow:
            return _refused(RETRY, lookup)
        return self._copy(tiers, tiers.plan(operation), lookup)

    def _on_device(self, tag: int) -> bool:
        return all(tag in group.key_of_tag for group in self._books.groups)

    def _copy(self, tiers: Tiers, plan: CopyPlan, lookup: Answer | Literal[""] = "") -> Expected:
        """Started if there is something to copy, and room for it beside what is spared."""
        self._chosen = plan.chosen
        if not plan.chosen:
            return _refused(NOTHING_TO_MOVE, lookup)
        for group, blocks in plan.chosen:
            if len(blocks) > _room(tiers, plan, group):
                return _refused(_LACK[plan.target], lookup)
            if not _may_use(tiers, plan, group, blocks):
                return _refused(_LACK[plan.source], lookup)
        count = sum([len(blocks) for _, blocks in plan.chosen])
        return Expected(count=count, lookup=lookup, transfers=len(plan.chosen))

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


def _room(tiers: Tiers, plan: CopyPlan, group: int) -> int:
    """Blocks that can be taken for the copy without evicting a spared one."""
    spared = plan.spared[group]
    if plan.target != "device":
        return tiers.of(plan.target)[group].room(spared)
    device = tiers.groups[group]
    return device.free - len([block for block in spared if device.refs[block] == 0])


def _may_use(tiers: Tiers, plan: CopyPlan, group: int, blocks: Sequence[int]) -> bool:
    """Whether those of these blocks that are free may be used: some may be withheld."""
    source: GroupBooks | TierBooks
    if plan.source == "device":
        source = tiers.groups[group]
        used = [source.refs[block] == 0 for block in blocks]
    else:
        source = tiers.of(plan.source)[group]
        used = [slot in source.order for slot in blocks]
    return sum(used) <= source.free
