"""What a copy of findable blocks between tiers is to take, told from the books as before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, dropwhile, islice, takewhile
from typing import TYPE_CHECKING

from msgspec import Struct

from kvproof.invariants.operations import Offload, Promote, Tier
from kvproof.invariants.slot_books import TierBooks
from kvproof.invariants.tags import Tags

if TYPE_CHECKING:
    from kvproof.invariants.group_books import GroupBooks
    from kvproof.invariants.tier_books import Tiers


class CopyPlan(Struct, frozen=True):
    """The blocks that such an operation is about, in each group that has any to copy."""

    source: Tier
    target: Tier
    chosen: Sequence[tuple[int, list[int]]]
    """Group, and the blocks that are to be copied."""
    spared: Sequence[frozenset[int]]
    """By group, blocks of the target's tier that must not be evicted for it: the same prompt's."""


def offload_plan(tiers: Tiers, operation: Offload) -> CopyPlan:
    """Of the blocks that wait to be copied downwards, those whose turn it is."""
    to_host = operation.to == "host"
    queues = [
        group.unstored if to_host else host.queue
        for group, host in zip(tiers.groups, tiers.host, strict=True)
    ]
    chosen = [_from(queue, operation.first, operation.blocks) for queue in queues]
    return CopyPlan(
        "device" if to_host else "host",
        operation.to,
        [(group, blocks) for group, blocks in enumerate(chosen) if blocks],
        [frozenset() for _ in tiers.groups],
    )


def promote_plan(tiers: Tiers, operation: Promote, rows: Tags[int]) -> CopyPlan:
    """Of the prompt's rows that the target lacks and does not await, those that the tier below
    has, up to the first that it has not.  ``rows``: the last tags of those that may be hit."""
    to_device = operation.to == "device"
    below = tiers.host if to_device else tiers.disk
    chosen, spared = [], []
    for group, host, tier in zip(tiers.groups, tiers.host, below, strict=False):
        there = partial(_arrives, group) if to_device else partial(_comes, group, host)
        ready = takewhile(tier.slot_of.__contains__, _lacking(rows, there))
        blocks = [tier.slot_of[tag] for tag in islice(ready, operation.blocks or None)]
        if blocks:
            chosen.append((group.group, blocks))
            spared.append(_hits(group, rows) if to_device else _on(host, rows))
        else:
            spared.append(frozenset())
    return CopyPlan("host" if to_device else "disk", operation.to, chosen, spared)


def _from(queue: dict[int, None], first: int, blocks: int) -> list[int]:
    """So many entries of a queue (0: all) from the ``first``-th on, round its end."""
    if not queue:
        return []
    start = first % len(queue)
    turned = chain(islice(queue, start, None), islice(queue, start))
    return list(islice(turned, blocks or None))


def _lacking(rows: Tags[int], there: Callable[[int], bool]) -> Iterator[int]:
    """The first rows, one after another, that are not there."""
    return takewhile(lambda tag: not there(tag), dropwhile(there, rows))


def _arrives(group: GroupBooks, tag: int) -> bool:
    """Whether the device has it, or a promotion brings it."""
    return tag in group.key_of_tag or tag in group.arriving


def _comes(group: GroupBooks, host: TierBooks, tag: int) -> bool:
    """Whether device or host have it, or something brings it to them."""
    return _arrives(group, tag) or host.awaits_or_has(tag)


def _hits(group: GroupBooks, rows: Tags[int]) -> frozenset[int]:
    """The device blocks of the longest findable prefix."""
    found = takewhile(group.key_of_tag.__contains__, rows)
    return frozenset([group.blocks_of[group.key_of_tag[tag]][0] for tag in found])


def _on(host: TierBooks, rows: Tags[int]) -> frozenset[int]:
    return frozenset([host.slot_of[tag] for tag in rows if tag in host.slot_of])
