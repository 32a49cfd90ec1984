"""Must-hit situations: without them a pass would say little.

A run that never met a goal is not a pass but *unknown*; goals marked rare may be missed by a
short run.  Situations are recognised from operations, outcomes, events and the books alone, so
they mean the same for every subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct

from kvproof.invariants.books import Books
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksReleased,
    BlocksReused,
    Event,
    ReleaseFenced,
    StepLaunched,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
)
from kvproof.invariants.outcomes import NO_FREE_BLOCKS, NO_HOST_BLOCKS, Outcome
from kvproof.invariants.property import EventHandler, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.tier_goals import TierGoals
from kvproof.invariants.tier_situations import SITUATIONS


class Goal(Struct, frozen=True):
    """One situation."""

    id: str
    situation: str
    needs: frozenset[str]
    """Operation kinds without which it cannot come about."""
    rare: bool = False


def _goal(id: str, situation: str, *needs: str, rare: bool = False) -> Goal:
    return Goal(id, situation, frozenset(needs), rare)


GOALS: tuple[Goal, ...] = (
    _goal("pool-empty", "no block is free", "admit"),
    _goal("admit-refused", "an admission is refused for want of blocks", "admit"),
    _goal("grow-refused", "a growth is refused for want of blocks", "grow"),
    _goal("hit-in-use", "a prefix hit on a block that another request holds", "admit"),
    _goal("hit-cached-free", "a prefix hit on a block that nobody holds", "admit", "finish"),
    _goal(
        "hit-cut-at-last-token",
        "a prompt is cached to its end: its last block is computed again",
        "admit",
        "launch",
    ),
    _goal("evicted-under-pressure", "an allocation evicts cached content", "admit", "finish"),
    _goal("block-boundary", "a request of exactly k blocks grows by a token", "grow"),
    _goal("copied-on-write", "a shared last block is copied before it is written", "fork", "grow"),
    _goal(
        "copy-refused",
        "a growth is refused because the copy does not fit",
        "fork",
        "grow",
        rare=True,
    ),
    _goal("shared-block-outlives-parent", "a forked request ends before its child", "fork"),
    _goal("chunked-prefill", "a prompt is computed in more than one step", "launch", "chunks"),
    _goal(
        "two-steps-in-flight",
        "a step is launched while another is in flight",
        "launch",
        "runs-ahead",
    ),
    _goal("finished-in-flight", "a request finishes while a step carries it", "finish", "fences"),
    _goal("aborted-in-flight", "a request is aborted while a step carries it", "abort", "fences"),
    _goal(
        "preempted-in-flight", "a request is preempted while a step carries it", "preempt", "fences"
    ),
    _goal("aborted-preempted", "a preempted request is aborted", "abort", "preempt"),
    _goal(
        "resumed-with-a-hit",
        "a resumed request gets a prefix hit, on blocks of its own or of others",
        "preempt",
        "resume",
    ),
    _goal(
        "resumed-while-fenced",
        "a request is resumed while a step still fences its old blocks",
        "preempt",
        "resume",
        "fences",
        rare=True,
    ),
    _goal("resume-refused", "a resumption is refused for want of blocks", "resume"),
    _goal("reset-refused", "a reset is refused because blocks are in use", "reset"),
    _goal("reset-done", "a reset empties a cache that held something", "reset", rare=True),
    _goal("salt-separates", "the same tokens are admitted under two salts", "admit"),
    _goal("adapter-separates", "the same tokens are admitted under two adapters", "admit"),
    _goal(
        "media-separates",
        "the same tokens are admitted with two media items",
        "admit",
        "media",
        rare=True,
    ),
    _goal("swapped-out", "a request's computed blocks are copied to the host", "preempt", "swaps"),
    _goal("swapped-in", "a swapped request gets its blocks back", "preempt", "resume", "swaps"),
    _goal(
        "swap-refused", "a request is not swapped out: no host block is free", "preempt", "swaps"
    ),
    _goal(
        "swapped-aborted", "a swapped request is aborted", "preempt", "abort", "swaps", rare=True
    ),
    _goal("slots-in-part", "a prompt has blocks for its first part only", "admit", "slots"),
    _goal("slots-in-advance", "a request has more blocks than its tokens need", "admit", "slots"),
    _goal("decode-refused", "a batch cannot decode for want of blocks", "decode"),
    _goal("reserve-refused", "blocks in advance are refused", "reserve", rare=True),
    _goal("not-oldest-first", "a step leaves out an older request", "launch", "slots"),
    *(_goal(id, text, "tiers", *needs, rare=rare) for id, text, needs, rare in SITUATIONS),
)
"""All goals, by the level at which they exist."""


class Goals:
    """Counts how often each goal was met.  Shaped like a check, but judges nothing."""

    def __init__(self, books: Books) -> None:
        self.hits = dict.fromkeys((goal.id for goal in GOALS), 0)
        self._books = books
        self._seen: dict[object, tuple[int, int, object]] = {}
        self._forked: set[int] = set()
        self._fenced = False
        self.tiers = None if books.tiers is None else TierGoals(books, books.tiers, self.hits)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            BlocksReused: self._reused,
            BlocksEvicted: self._evicted,
            BlockCopied: self._copied,
            BlocksReleased: self._released,
            ReleaseFenced: self._release_fenced,
            StepLaunched: self._launched,
            BlocksAllocated: self._allocated,
        }

    def _reused(self, event: BlocksReused) -> None:
        refs = self._books.groups[event.group].refs
        if not event.blocks:
            return  # all of it is behind the group's window
        held = refs[event.blocks[0]] > 0
        self.hits["hit-in-use" if held else "hit-cached-free"] += 1
        if not held and refs[event.blocks[-1]] > 0:
            self.hits["hit-in-use"] += 1

    def _evicted(self, event: BlocksEvicted) -> None:
        if event.cause == "pressure":
            self.hits["evicted-under-pressure"] += 1

    def _copied(self, event: BlockCopied) -> None:
        self.hits["copied-on-write"] += 1
        group = self._books.groups[event.group]
        self.hits["pool-empty"] += group.referenced + 1 == group.usable

    def _allocated(self, event: BlocksAllocated) -> None:
        group = self._books.groups[event.group]
        if group.referenced + len(event.blocks) == group.usable:
            self.hits["pool-empty"] += 1

    def _released(self, event: BlocksReleased) -> None:
        if self._forked and event.request in self._forked:
            books = self._books
            ended = event.request not in books.requests
            refs = books.groups[event.group].refs
            if ended and any(refs[block] > 1 for block in event.blocks):
                self.hits["shared-block-outlives-parent"] += 1
            self._forked.discard(event.request)

    def _release_fenced(self, event: ReleaseFenced) -> None:
        self._fenced = True

    def _launched(self, event: StepLaunched) -> None:
        if self._books.steps:
            self.hits["two-steps-in-flight"] += 1
        for item in event.items:
            request = self._books.known.get(item.request)
            if request is not None and item.end < request.input_tokens:
                self.hits["chunked-prefill"] += 1
                return

    def concluding(self, kind: type[Operation]) -> tuple[OperationHandler, ...]:
        """What looks at operations of this kind, done or refused."""
        own = self._handlers.get(kind)
        below = None if self.tiers is None else self.tiers.concluding(kind)
        return tuple([handler for handler in (own, below) if handler is not None])

    @cached_property
    def _handlers(self) -> Mapping[type[Operation], OperationHandler]:
        return {
            Admit: self._admit,
            Grow: self._grow,
            Decode: self._decode,
            Reserve: self._reserve,
            Launch: self._launch,
            Fork: self._fork,
            Finish: self._finish,
            Abort: self._abort,
            Preempt: self._preempt,
            Resume: self._resume,
            Reset: self._reset,
        }

    def _admit(self, operation: Admit, outcome: Outcome) -> None:
        if outcome.status == "refused":
            self.hits["admit-refused"] += outcome.reason == NO_FREE_BLOCKS
            return
        self._cut_at_last_token(operation, outcome)
        if operation.slots:
            self._slots(outcome)
        identity = (operation.salt, operation.adapter, operation.media)
        first = self._seen.setdefault(operation.prompt, identity)
        if first != identity:
            self.hits["salt-separates"] += first[0] != identity[0]
            self.hits["adapter-separates"] += first[1] != identity[1]
            self.hits["media-separates"] += first[2] != identity[2]
        elif len(self._seen) > 1000:
            self._seen.clear()

    def _cut_at_last_token(self, operation: Admit, outcome: Outcome) -> None:
        tags = self._books.tags_of(operation)
        if outcome.cached_tokens + self._books.block_size == len(tags):
            self.hits["hit-cut-at-last-token"] += any(
                tags[-1] in group.key_of_tag for group in self._books.groups
            )

    def _slots(self, outcome: Outcome) -> None:
        request = self._books.requests.get(-1 if outcome.request is None else outcome.request)
        if request is not None:
            size = self._books.block_size
            given = (request.slots + size - 1) // size
            needed = (len(request.tags) + size - 1) // size
            self.hits["slots-in-part"] += given < needed
            self.hits["slots-in-advance"] += given > needed

    def _decode(self, operation: Decode, outcome: Outcome) -> None:
        self.hits["decode-refused"] += outcome.status == "refused"

    def _reserve(self, operation: Reserve, outcome: Outcome) -> None:
        self.hits["reserve-refused"] += outcome.status == "refused"

    def _launch(self, operation: Launch, outcome: Outcome) -> None:
        books = self._books
        if operation.items and outcome.status == "done" and books.steps:
            first = books.steps[-1].items[0][1] if books.steps[-1].items else None
            self.hits["not-oldest-first"] += first is not None and first is not books.running[0]

    def _grow(self, operation: Grow, outcome: Outcome) -> None:
        if outcome.request is None:
            return
        request = self._books.requests.get(outcome.request)
        if request is None:
            return
        if outcome.status == "refused":
            self.hits["grow-refused"] += 1
            self.hits["copy-refused"] += self._for_the_copy_alone(request, operation.tokens)
        elif (len(request.tags) - operation.tokens) % self._books.block_size == 0:
            self.hits["block-boundary"] += 1

    def _for_the_copy_alone(self, request: RequestModel, tokens: int) -> bool:
        """Whether the growth would have fitted without a copy of the shared last block."""
        size, group = self._books.block_size, self._books.groups[0]
        table, length = request.tables[0], len(request.tags)
        blocks = -(-(length + tokens) // size) - len(table)
        row, offset = divmod(length, size)
        shared = offset > 0 and row < len(table) and group.refs[table[row]] > 1
        return shared and blocks <= group.free

    def _fork(self, operation: Fork, outcome: Outcome) -> None:
        if outcome.status == "done" and outcome.request is not None:
            self._forked.add(outcome.request)

    def _finish(self, operation: Finish, outcome: Outcome) -> None:
        self._ended_in_flight("finished-in-flight", outcome)

    def _abort(self, operation: Abort, outcome: Outcome) -> None:
        self._ended_in_flight("aborted-in-flight", outcome)
        if self._books.ended and not self._books.ended[0].running:
            swapped = self._books.ended[0].swapped
            self.hits["swapped-aborted" if swapped else "aborted-preempted"] += 1

    def _preempt(self, operation: Preempt, outcome: Outcome) -> None:
        self.hits["swap-refused"] += outcome.reason == NO_HOST_BLOCKS
        self._ended_in_flight("preempted-in-flight", outcome)

    def _ended_in_flight(self, goal: str, outcome: Outcome) -> None:
        if self._fenced or (outcome.status == "done" and self._still_carried(outcome)):
            self.hits[goal] += 1
            self._fenced = False

    def _still_carried(self, outcome: Outcome) -> bool:
        """Whether a step in flight has the request as it was, where nothing fences its blocks."""
        return self._books.semantics.stream_order and any(
            item.request == outcome.request for step in self._books.steps for item, _ in step.items
        )

    def _resume(self, operation: Resume, outcome: Outcome) -> None:
        if outcome.status == "refused":
            self.hits["resume-refused"] += outcome.reason == NO_FREE_BLOCKS
            return
        reused = any(isinstance(event, BlocksReused) for event in self._books.events)
        self.hits["resumed-with-a-hit"] += reused
        if any(
            number == outcome.request for step in self._books.steps for number, _ in step.fenced
        ) or self._still_carried(outcome):
            self.hits["resumed-while-fenced"] += 1

    def _reset(self, operation: Reset, outcome: Outcome) -> None:
        if outcome.status == "refused":
            self.hits["reset-refused"] += 1
        elif outcome.count:
            self.hits["reset-done"] += 1
