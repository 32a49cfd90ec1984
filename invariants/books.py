"""The checkers' own books: a double entry of what the subject's operations and events say.

Request models follow operations and outcomes, here (the naive model: what a request is, by the
meaning of the operations alone).  Group books follow block events (the ownership ledger: who holds
which block, what is findable; see :mod:`kvproof.invariants.ledger`).  Checkers compare the two with
each other and with the subject's view.  Nothing here is imported from an engine, and nothing here
judges.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from math import lcm
from operator import attrgetter

from kvproof.invariants.errors import InputError
from kvproof.invariants.events import BlocksPublished, BlocksReleased, Event
from kvproof.invariants.group_books import GroupBooks, Owed, PooledBooks
from kvproof.invariants.ledger import Ledger
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Finish,
    Fork,
    Grow,
    Operation,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Resume,
    Withhold,
)
from kvproof.invariants.orders import Adaptive
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.request_books import Figures, RequestModel, StepModel
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import Tags, extend_each, extend_sampled, prompt_tags
from kvproof.invariants.tier_books import Tiers

_by_order = attrgetter("order")
_NONE: frozenset[int] = frozenset()


class Books:
    """All books of one run."""

    def __init__(self, configuration: Configuration, semantics: Semantics) -> None:
        """Raises InputError if the groups' block sizes do not fit the configuration's."""
        self.configuration = configuration
        self.semantics = semantics
        self.block_size = configuration.block_size
        self.block_sizes = semantics.block_sizes or (self.block_size,)
        """Of the groups, or of all of them."""
        self.hit_tokens = lcm(*self._sizes_at_hits())
        """A hit has a multiple of so many."""
        self.groups = _groups(configuration, semantics)

        self.requests: dict[int, RequestModel] = {}
        self.known: dict[int, RequestModel] = {}
        """Live requests, and those that the present operation ended."""
        self.running: list[RequestModel] = []
        self.preempted: list[RequestModel] = []
        self.identities: set[int] = set()
        """Of all requests that ever were."""
        self.steps: deque[StepModel] = deque()
        self.touched_requests: dict[int, RequestModel] = {}
        """Requests that operations since the last settlement were about."""
        self.strays: list[Event] = []
        """Events about requests or steps that are not known, or at another row than the next."""
        self.figures = Figures()
        self._entered = 0
        """Requests that were admitted or forked."""

        self.passing = False
        """Whether there is something that holds for the present operation only."""
        self.events: Sequence[Event] = ()
        """Events of the present operation."""
        self.ended: list[RequestModel] = []
        """Requests that it ended."""
        self.retired: StepModel | None = None
        """The step that it retired."""
        self.released_fences: set[tuple[int, int, int]] = set()
        """(step, request, group) of the fences that it opened."""
        self.predicted_hits: list[tuple[int, list[int]]] = []
        """Per group, the blocks that it would reuse, if it is an admission."""
        self._tags_of: tuple[Admit | Promote | None, Tags[int]] = (None, array("Q"))
        """Of the operation that was asked about last."""

        self.operation_handlers = self._operation_handlers()
        self.event_handlers = Ledger(self).event_handlers
        self.tiers: Tiers | None = None
        """Those below the device, if there are any."""
        if semantics.tiers and configuration.host_blocks:
            self.tiers = Tiers(self)
            self.operation_handlers |= self.tiers.operation_handlers
            self.event_handlers |= self.tiers.event_handlers

    def _operation_handlers(self) -> dict[type[Operation], Callable[..., None]]:
        """What a done operation means for its request."""
        return {
            Admit: self._admit,
            Grow: self._grow,
            Decode: self._decode,
            Reserve: self._reserve,
            Fork: self._fork,
            Finish: self._end,
            Abort: self._end,
            Preempt: self._preempt,
            Resume: self._resume,
            Withhold: self._withhold,
            Reset: self._reset,
        }

    def _sizes_at_hits(self) -> list[int]:
        """Block sizes of the groups, but for those whose states are findable inside a block."""
        states = self.semantics.states
        sizes = [size for group, size in enumerate(self.block_sizes) if group not in states]
        return sizes or [self.block_size]

    def begin(self) -> None:
        """A new operation: what held for the one before is over."""
        self.passing = False
        self.retired = None
        self.released_fences.clear()
        for request in self.ended:
            del self.known[request.id]
        self.ended.clear()
        if self.tiers is not None:
            self.tiers.begin()

    def settled(self) -> None:
        """What was touched has been compared with the view."""
        self.touched_requests.clear()
        for group in self.groups:
            group.touched = []
            group.touched_keys = []
        if self.tiers is not None:
            self.tiers.settled()

    # -- what checks ask ------------------------------------------------------------------------

    def longest_hit(self, tags: Tags[int]) -> int:
        """Rows of the longest prefix that is findable in every group, below the last token.

        Rows of the configuration's block size.  In a group with a window, as far back as that goes.
        """
        unit = self.hit_tokens
        end = (len(tags) - 1) // unit * unit if self.configuration.prefix_caching else 0
        if any(self.semantics.windows):
            while end and not all(self._has(group, tags, end) for group in self.groups):
                end -= unit
            return end // self.block_size
        for group in self.groups:
            size = group.block_size
            last_tags = tags[size - 1 : end : size]
            found = len(list(takewhile(group.key_of_tag.__contains__, last_tags)))
            end = found * size // unit * unit
        return end // self.block_size

    def _has(self, group: GroupBooks, tags: Tags[int], end: int) -> bool:
        """Whether the group has all that a hit of so many tokens needs."""
        size, first = group.block_size, self.first_row(group.group, end)
        last_tags = tags[(first + 1) * size - 1 : end : size]
        return all(map(group.key_of_tag.__contains__, last_tags))

    def rows_to_hit(self, tags: Tags[int]) -> Tags[int]:
        """The last tags of the full rows below the last token: those that may be cached."""
        size = self.block_size
        rows = (len(tags) - 1) // size if self.configuration.prefix_caching else 0
        return tags[size - 1 : rows * size : size]

    def tags_of(self, operation: Admit | Promote) -> Tags[int]:
        """Tags of the prompt that it is about; not to be changed."""
        known, tags = self._tags_of
        if known is not operation:
            tags = prompt_tags(operation.prompt, operation.salt, operation.adapter, operation.media)
            self._tags_of = (operation, tags)
        return tags

    def awaits_load(self, request: RequestModel) -> bool:
        """Whether a copy writes into blocks that the request alone holds, and so must keep."""
        return bool(request.loading) and not self.semantics.copies_hold

    def written(self, request: RequestModel) -> int:
        """Tokens whose KV is there for any step that is launched now."""
        return request.begins if self.semantics.stream_order else request.computed

    def due(self, owed: Owed) -> bool:
        """Whether it must be written by now: its request came so far, or is gone, or was preempted,
        and no step in flight carries it as it was then."""
        request = owed.request
        if request.running and request.epoch == owed.epoch:
            return self.written(request) >= owed.end
        return not any(
            carried is request and item.epoch == owed.epoch
            for step in self.steps
            for item, carried in step.items
        )

    def given_up(self, event: BlocksReleased) -> list[int] | None:
        """The blocks of the table that is given back, which the request or a step's fence has; None
        if neither does."""
        request, retired = self.known.get(event.request), self.retired
        table: list[int] | None = None
        if event.step is None:
            table = None if request is None else request.tables[event.group]
        elif retired is not None and retired.number == event.step:
            fenced = [tables for number, tables in retired.fenced if number == event.request]
            table = fenced[0][event.group] if fenced else None
        if table is None or not self.semantics.windows:
            return table
        return [block for block in table if block not in self.semantics.reserved]

    def window(self, group: int) -> int:
        """Tokens that attention of this group looks back on, itself included; 0 for all."""
        windows = self.semantics.windows
        return windows[group] if windows else 0

    def first_row(self, group: int, tokens: int) -> int:
        """The first row of a group that attention reads when so many tokens are computed."""
        window = self.window(group)
        return max(0, tokens + 1 - window) // self.groups[group].block_size if window else 0

    def published_tags(self, event: BlocksPublished, request: RequestModel) -> Tags[int]:
        """The last tags of what the event's blocks hold."""
        size, row = self.groups[event.group].block_size, event.row
        if event.tokens:
            return request.tags[event.tokens - 1 : event.tokens]
        return request.tags[(row + 1) * size - 1 : (row + len(event.blocks)) * size : size]

    # -- operations: the naive model ----------------------------------------------------------

    def _admit(self, operation: Admit, outcome: Outcome) -> None:
        tags = self.tags_of(operation)[:]
        assert outcome.request is not None
        request = RequestModel(outcome.request, self._entered, tags, len(self.groups))
        cached = outcome.cached_tokens
        request.cached_tokens = request.computed = request.scheduled = cached
        request.slots = max(operation.slots or len(tags), cached)
        self._enter(request)
        figures = self.figures
        figures.admissions += 1
        figures.prefix_cache_hits += cached
        figures.prefix_cache_queries += request.input_tokens
        if self.tiers is not None:
            self.tiers.admitted(request.tags, cached)

    def _enter(self, request: RequestModel) -> None:
        self.requests[request.id] = self.known[request.id] = request
        self.touched_requests[request.id] = request
        self.running.append(request)
        self.identities.add(request.id)
        self._entered += 1

    def _grow(self, operation: Grow, outcome: Outcome) -> None:
        request = self._target(outcome)
        self.touched_requests[request.id] = request
        extend_sampled(request.tags, operation.choice, operation.tokens)
        request.slots = max(request.slots, len(request.tags))

    def _decode(self, operation: Decode, outcome: Outcome) -> None:
        known = self.requests
        requests = [known[number] for number in outcome.children]
        self.touched_requests.update(zip(outcome.children, requests, strict=True))
        extend_each([request.tags for request in requests], operation.choice)
        for request in requests:
            length = len(request.tags)
            if length > request.slots:
                request.slots = length

    def _reserve(self, operation: Reserve, outcome: Outcome) -> None:
        request = self._target(outcome)
        self.touched_requests[request.id] = request
        request.slots = max(request.slots, operation.slots)

    def _fork(self, operation: Fork, outcome: Outcome) -> None:
        parent = self._target(outcome)
        for number in outcome.children:
            child = RequestModel(number, self._entered, parent.tags[:], len(self.groups))
            child.computed = child.scheduled = parent.computed
            child.outdated = parent.outdated
            child.slots = min(parent.slots, child.slots)
            child.verified = parent.verified[:]
            self._enter(child)

    def _end(self, operation: Operation, outcome: Outcome) -> None:
        request = self._target(outcome)
        del self.requests[request.id]
        (self.running if request.running else self.preempted).remove(request)
        self.ended.append(request)
        self.passing = True
        request.epoch += 1  # results of steps in flight are void from here on

    def _preempt(self, operation: Preempt, outcome: Outcome) -> None:
        request = self._target(outcome)
        self.running.remove(request)
        insort(self.preempted, request, key=_by_order)
        request.running = False
        request.settle()
        request.swapped = operation.swap
        request.epoch += 1
        request.loading = _NONE
        if operation.swap:
            request.suspended = request.scheduled = request.computed
        else:
            request.lose()
        request.verified = [0] * len(self.groups)
        request.trusted_rows = [0] * len(self.groups)
        self.touched_requests[request.id] = request
        self.figures.preemptions += 1
        self.figures.suspensions += operation.swap

    def _resume(self, operation: Resume, outcome: Outcome) -> None:
        request = self._target(outcome)
        self.preempted.remove(request)
        insort(self.running, request, key=_by_order)
        request.running = True
        request.asked = len(request.tags)
        # What was swapped out counts when the copy back has ended.
        request.computed = request.scheduled = 0 if request.swapped else outcome.cached_tokens
        if self.tiers is not None and not request.swapped:
            self.tiers.hit(request.tags, request.computed)
        request.slots = max(
            operation.slots or len(request.tags), request.computed, request.suspended
        )
        request.swapped = False
        self.touched_requests[request.id] = request

    def _withhold(self, operation: Withhold, outcome: Outcome) -> None:
        if operation.tier == "device":
            for group in self.groups:
                group.withhold(operation.blocks)
        elif self.tiers is not None:
            for tier in self.tiers.of(operation.tier):
                tier.withhold(operation.blocks)

    def _reset(self, operation: Reset, outcome: Outcome) -> None:
        """What is computed by now, or on its way, is never to be found again."""
        for request in self.requests.values():
            request.outdated = max(request.scheduled, request.suspended)
        if self.tiers is not None and self.semantics.resets_tiers:
            for transfer in self.tiers.in_flight.values():
                transfer.outdated = True

    def _target(self, outcome: Outcome) -> RequestModel:
        assert outcome.request is not None
        return self.requests[outcome.request]


def _groups(configuration: Configuration, semantics: Semantics) -> list[GroupBooks]:
    """Books of the groups, which have one pool or a pool each."""
    sizes = semantics.block_sizes or (configuration.block_size,) * semantics.groups
    if any(size % configuration.block_size for size in sizes):
        raise InputError(
            f"block_sizes={sizes}: multiples of the configuration's block_size, "
            f"{configuration.block_size}, are needed"
        )
    ids = configuration.blocks + len(semantics.reserved)
    ledger = PooledBooks if semantics.shared_pool else GroupBooks
    groups = [ledger(group, configuration.blocks, ids, size) for group, size in enumerate(sizes)]
    for group in groups[1:]:
        if isinstance(group, PooledBooks):
            group.share(groups[0])
    if semantics.eviction_order == "configured" and configuration.device_eviction == "arc":
        for group in groups:
            group.adaptive = Adaptive(configuration.blocks)
    return groups
