"""What ORDER demands where cached content goes in pieces of several blocks.

A piece is what one BlocksEvicted event names: a node of a radix tree, say.  Which of two goes
first is told by the view, since only the engine knows what counts as a use of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReused,
    Event,
    why_evicted,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Abort,
    Evict,
    Finish,
    Launch,
    Operation,
    Preempt,
    Reset,
    Retire,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, EventHandler
from kvproof.invariants.view import RecentView

_MAKE_NO_ROOM = (Reset, Launch, Retire, Finish, Abort)
"""Operations of which no amount is said: what a request leaves may replace what is cached."""


class _Group:
    """What one operation did in one group."""

    def __init__(self, books: GroupBooks) -> None:
        self.books = books
        self.evicted: list[BlocksEvicted] = []
        self.empty = 0
        """Blocks that were free and empty when it began to evict."""
        self.free: set[int] = set()
        """Findable blocks that nobody held then."""
        self.allocated = 0
        self.used: list[int] = []
        """Blocks that it hit or published."""


class Pieces:
    """Pieces go in the order that the view shows, and none when enough has gone."""

    def __init__(self, check: Check) -> None:
        """Raises InputError if the view does not show the order that is declared."""
        if check.semantics.eviction_order == "shown" and not hasattr(check.view, "last_uses"):
            raise InputError("eviction_order='shown': the view needs a method last_uses(group)")
        self._check = check
        self._view = cast(RecentView, check.view)
        self._groups = [_Group(group) for group in check.groups]
        self._uses: list[Mapping[int, float]] = [{} for _ in check.groups]
        """By group and block: the last use, as shown after the operation before."""

    def handlers(self) -> Mapping[type[Event], EventHandler]:
        """What is to see events before the books do."""
        return {
            BlocksEvicted: self._evicted,
            BlocksAllocated: self._allocated,
            BlockCopied: self._copied,
            BlocksReused: self._used,
            BlocksPublished: self._used,
        }

    def _evicted(self, event: BlocksEvicted) -> None:
        group = self._groups[event.group]
        if not group.evicted:
            group.empty = group.books.empty_free
            group.free = set(group.books.cached_free)
        group.evicted.append(event)

    def _allocated(self, event: BlocksAllocated) -> None:
        self._groups[event.group].allocated += len(event.blocks)

    def _copied(self, event: BlockCopied) -> None:
        self._groups[event.group].allocated += 1

    def _used(self, event: BlocksReused | BlocksPublished) -> None:
        self._groups[event.group].used += event.blocks

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        pieces = [group for group in self._groups if group.evicted]
        if pieces and not isinstance(operation, _MAKE_NO_ROOM):
            self._judge_amount(pieces, operation, outcome)
        for number, group in enumerate(self._groups):
            if self._check.semantics.eviction_order == "shown":
                before, now = self._uses[number], dict(self._view.last_uses(number))
                self._uses[number] = now
                self._judge_order(group, before, now)
                self._judge_uses(group, before, now)
            if group.evicted or group.allocated or group.used:
                self._groups[number] = _Group(group.books)

    def _judge_amount(
        self, groups: Sequence[_Group], operation: Operation, outcome: Outcome
    ) -> None:
        """Without its largest piece an eviction would have been too small, in one group at least.

        What goes for one may take some of the others with it.
        """
        self._check.checked += 1
        for group in groups:
            sizes = sorted(len(event.blocks) for event in group.evicted)
            wanted, what = self._wanted(group, operation, outcome)
            if sum(sizes[:-1]) < wanted:
                return
        self._check.fail(
            f"{sum(sizes)} blocks were evicted in pieces of {', '.join(map(str, sizes))}, "
            f"though {what}: one piece less would have been enough",
            group=group.books.group,
            block=group.evicted[-1].blocks[-1],
        )

    def _wanted(self, group: _Group, operation: Operation, outcome: Outcome) -> tuple[int, str]:
        """How many blocks an operation may evict but for the size of the last piece, and why."""
        if isinstance(operation, Evict):
            return operation.blocks, f"{operation.blocks} were asked for"
        if isinstance(operation, Preempt):
            books = self._check.books
            tokens = self._check.semantics.preemption_room * len(books.running)
            room = -(-tokens // books.block_size)
            what = f"room for {room} was to be made and {group.empty} were empty"
            return room - group.empty, what
        margin = self._check.semantics.eviction_margin * max(1, len(outcome.children))
        what = f"{group.allocated} were needed and {group.empty} were empty"
        what += f", with a margin of {margin}" if margin else ""
        return group.allocated + margin - group.empty, what

    def _judge_order(
        self, group: _Group, before: Mapping[int, float], now: Mapping[int, float]
    ) -> None:
        """What went was not used later than anything that is left and could have gone.

        What is left may be a prefix that had to wait for an extension, and whose own last use is
        longer ago: then the extension's, which was shown before, is its last use.
        """
        gone = [
            (before[block], block, event.cause)
            for event in group.evicted
            for block in event.blocks
            if event.cause != "reset" and block in before
        ]
        left = [
            (max(now[block], before.get(block, now[block])), block)
            for block in group.books.cached_free
            if block in group.free and block in now
        ]
        if not gone or not left:
            return
        self._check.checked += 1
        (last, block, cause), (first, other) = max(gone), min(left)
        if last > first:
            self._check.fail(
                f"block {block} was evicted {why_evicted(cause)}, but block {other}, which is "
                "still cached, was used longer ago, as the subject itself shows",
                group=group.books.group,
                block=block,
            )

    def _judge_uses(
        self, group: _Group, before: Mapping[int, float], now: Mapping[int, float]
    ) -> None:
        """What was hit or published is used later than all that was there before."""
        used = [block for block in group.used if block in now]
        if not used or not before:
            return
        self._check.checked += 1
        latest = max(before.values())
        block = min(used, key=now.__getitem__)
        if now[block] <= latest:
            self._check.fail(
                f"block {block} was just hit or published, but the subject shows a last use that "
                "is not later than all before it",
                group=group.books.group,
                block=block,
            )
