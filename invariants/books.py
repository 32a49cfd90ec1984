"""The checkers' own books: a double entry of what the subject's operations and events say.

Request models follow operations and outcomes (the naive model: what a request is, by the meaning
of the operations alone).  Group books follow block events (the ownership ledger: who holds which
block, what is findable).  Checkers compare the two with each other and with the subject's view.
Nothing here is imported from an engine, and nothing here judges.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    ReleaseFenced,
    StepItem,
    StepLaunched,
    StepRetired,
)
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
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import Tags, extend_each, extend_sampled, prompt_tags
from kvproof.invariants.tier_books import Tiers
from kvproof.invariants.view import RequestState, Standing

_by_order = attrgetter("order")
_NONE: frozenset[int] = frozenset()


class RequestModel:
    """What a live request must look like."""

    __slots__ = (
        "allocated",
        "asked",
        "cached_tokens",
        "computed",
        "departing",
        "epoch",
        "id",
        "input_tokens",
        "last_step",
        "launched",
        "loading",
        "order",
        "outdated",
        "running",
        "scheduled",
        "slots",
        "suspended",
        "swapped",
        "tables",
        "tags",
        "trusted_rows",
        "verified",
    )

    def __init__(self, number: int, order: int, tags: Tags[int], groups: int) -> None:
        self.id = number
        self.order = order
        """Rank of its first admission."""
        self.tags = tags
        self.input_tokens = len(tags)
        self.asked = self.input_tokens
        """Tokens that it was admitted or resumed with, the latest time."""
        self.cached_tokens = 0
        self.computed = 0
        self.scheduled = 0
        """Tokens computed, or being computed by a step in flight."""
        self.epoch = 0
        self.launched = 0
        """Steps in flight that carry it, of its present epoch."""
        self.last_step = -1
        self.running = True
        self.swapped = False
        self.slots = self.input_tokens
        """Positions that have blocks while it runs."""
        self.departing = _NONE
        """Transfers in flight that copy it to the host …"""
        self.loading = _NONE
        """… and those that copy it back."""
        self.suspended = 0
        """Computed tokens that were swapped out, until they are back or lost."""
        self.outdated = 0
        """Leading tokens that were computed before the prefix cache was reset."""
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.verified = [0] * groups
        """Per group: leading positions whose slots are known to hold the right tags."""
        self.trusted_rows = [0] * groups
        """Per group: leading rows that launched steps were seen to read through this table."""

    @property
    def length(self) -> int:
        return len(self.tags)

    def lose(self) -> None:
        """Nothing of it is computed any more."""
        self.computed = self.scheduled = self.suspended = self.outdated = 0

    def standing(self, block_size: int) -> Standing:
        """What the subject's view of this request should be."""
        length = len(self.tags)
        if self.swapped:
            return "swapped", length, self.computed, (0,) * len(self.tables)
        if not self.running:
            return "preempted", length, 0, (0,) * len(self.tables)
        rows = (self.slots + block_size - 1) // block_size
        state: RequestState = "loading" if self.loading else "running"
        return state, length, self.computed, (rows,) * len(self.tables)


class Figures:
    """What happened so far, in numbers that only go up, and the size of the latest batch."""

    __slots__ = (
        "admissions",
        "batch_size",
        "evictions",
        "iterations",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "suspensions",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.evictions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0
        self.suspensions = 0
        """Of the preemptions: those with a swap."""
        self.iterations = 0
        self.batch_size = 0


class StepModel:
    """A step in flight: its items, each with the request model and the tables of its time."""

    __slots__ = ("fenced", "items", "number", "tables")

    def __init__(
        self,
        number: int,
        items: list[tuple[StepItem, RequestModel]],
        tables: list[tuple[list[int], ...]],
    ) -> None:
        self.number = number
        self.items = items
        self.tables = tables
        """The requests' tables at launch; they only grow (a copy-on-write starts a new list)."""
        self.fenced: list[tuple[int, list[list[int]]]] = []


class GroupBooks:
    """Ledger of one KV cache group's pool."""

    __slots__ = (
        "adaptive",
        "arriving",
        "blocks_of",
        "cached_free",
        "changed",
        "emptied",
        "evicting",
        "free",
        "group",
        "held",
        "key_of",
        "key_of_tag",
        "owed",
        "referenced",
        "refs",
        "tag_of",
        "touched",
        "touched_keys",
        "unstored",
        "usable",
        "withheld",
    )

    def __init__(self, group: int, usable: int, ids: int) -> None:
        self.group = group
        self.usable = usable
        self.withheld = 0
        self.free = usable
        """Blocks that an allocation may take: neither referenced nor withheld."""
        self.refs = [0] * ids
        self.held: set[int] = set()
        """Blocks with at least one reference …"""
        self.referenced = 0
        """… and how many they are."""
        self.key_of: dict[int, bytes] = {}
        self.blocks_of: dict[bytes, tuple[int, ...]] = {}
        """The prefix index: key to findable blocks."""
        self.tag_of = [0] * ids
        """Of findable blocks: the tag of the last position …"""
        self.key_of_tag: dict[int, bytes] = {}
        """… and the key under which that content is findable."""
        self.cached_free: OrderedDict[int, None] = OrderedDict()
        """Findable blocks without a reference, by the time of their release."""
        self.adaptive: Adaptive | None = None
        """The same blocks, where they are to be evicted as ARC says."""
        self.unstored: dict[int, None] = {}
        """Findable blocks that were not copied to the host since, in that order."""
        self.arriving: dict[int, int] = {}
        """Tags of blocks on their way up from the host, and the transfer that brings each."""
        self.emptied: list[int] = []
        """Blocks that the latest release left without a holder and with nothing findable."""
        self.evicting: list[int] = []
        """Evicted under pressure, not yet handed out."""
        self.touched: list[int] = []
        self.touched_keys: list[bytes] = []
        """Blocks and keys of the events since the last settlement."""
        self.changed: set[int] | None = None
        """Blocks whose references or content changed since somebody asked; None if nobody does."""
        self.owed: dict[int, tuple[RequestModel, int]] = {}
        """Published before it was computed: block to (request, row); see ``Semantics``."""

    @property
    def empty_free(self) -> int:
        """Free blocks in which nothing is findable."""
        return self.usable - self.referenced - len(self.cached_free)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""
        if self.changed is not None:
            self.changed.update(blocks)
        refs, cached_free = self.refs, self.cached_free
        for block in blocks:
            refs[block] += 1
        if cached_free and not cached_free.keys().isdisjoint(blocks):
            for block in blocks:
                cached_free.pop(block, None)
            if self.adaptive is not None:
                for block in blocks:
                    self.adaptive.remove(block)
        self.held.update(blocks)
        self.referenced = held = len(self.held)
        self.free = self.usable - held - self.withheld
        self.touched += blocks

    def withhold(self, blocks: int) -> None:
        """So many of the free blocks, or all, are somebody else's from now on."""
        self.withheld = min(blocks, self.usable - self.referenced)
        self.free = self.usable - self.referenced - self.withheld

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to each, in this order; never below zero (REF has reported it)."""
        if self.changed is not None:
            self.changed.update(blocks)
        refs, key_of, held = self.refs, self.key_of, self.held
        self.emptied = []
        for block in blocks:
            count = refs[block]
            if count > 1:
                refs[block] = count - 1
            elif count:
                refs[block] = 0
                held.discard(block)
                if block in key_of:
                    self.cached_free[block] = None
                    if self.adaptive is not None:
                        self.adaptive.insert(block, key_of[block])
                else:
                    self.emptied.append(block)
        self.referenced = left = len(held)
        self.free = self.usable - left - self.withheld
        self.touched += blocks

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], tags: Sequence[int]) -> None:
        """Blocks are findable under these keys, whose last positions have these tags."""
        if self.changed is not None:
            self.changed.update(blocks)
        key_of, blocks_of, held = self.key_of, self.blocks_of, self.held
        tag_of, key_of_tag = self.tag_of, self.key_of_tag
        for block, key, tag in zip(blocks, keys, tags, strict=False):
            key_of[block] = key
            others = blocks_of.get(key)
            blocks_of[key] = (*others, block) if others else (block,)
            tag_of[block] = tag
            key_of_tag[tag] = key
            if block not in held:  # a subject may publish what nobody holds
                self.cached_free[block] = None
        self.touched += blocks
        self.touched_keys += keys

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Nothing is findable in these blocks any more."""
        if self.changed is not None:
            self.changed.update(blocks)
        key_of, cached_free, blocks_of = self.key_of, self.cached_free, self.blocks_of
        tag_of, key_of_tag = self.tag_of, self.key_of_tag
        for block in blocks:
            key = key_of.pop(block, None)
            if key is None:
                continue  # PIN, VALID
            cached_free.pop(block, None)
            if self.adaptive is not None:
                self.adaptive.evicted(block)
            others = blocks_of.pop(key)
            if len(others) > 1:
                blocks_of[key] = tuple([other for other in others if other != block])
            else:
                key_of_tag.pop(tag_of[block], None)
        if self.owed:
            for block in blocks:
                self.owed.pop(block, None)
        if self.unstored:
            for block in blocks:
                self.unstored.pop(block, None)


class PooledBooks(GroupBooks):
    """Ledger of a group that shares its pool with others: all but its keys is the pool's."""

    __slots__ = ("group_of", "pool")

    def __init__(self, group: int, usable: int, ids: int) -> None:
        super().__init__(group, usable, ids)
        self.group_of: dict[int, int] = {}
        """The group in which a block became findable last."""
        self.pool: list[GroupBooks] = [self]
        """The ledgers of all groups."""

    def share(self, first: GroupBooks) -> None:
        """What is known of a block is known in all groups."""
        assert isinstance(first, PooledBooks)
        for name in _OF_THE_POOL:
            setattr(self, name, getattr(first, name))
        self.pool.append(self)

    def hold(self, blocks: Sequence[int]) -> None:
        super().hold(blocks)
        self._agree()

    def drop(self, blocks: Sequence[int]) -> None:
        super().drop(blocks)
        self._agree()

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], tags: Sequence[int]) -> None:
        super().publish(blocks, keys, tags)
        self.group_of.update(dict.fromkeys(blocks, self.group))

    def _agree(self) -> None:
        for group in self.pool:
            group.referenced, group.free = self.referenced, self.free


_OF_THE_POOL = (
    "refs",
    "held",
    "key_of",
    "blocks_of",
    "tag_of",
    "cached_free",
    "evicting",
    "owed",
    "group_of",
    "pool",
)
"""Of a shared pool, by block."""


class Books:
    """All books of one run."""

    def __init__(self, configuration: Configuration, semantics: Semantics) -> None:
        self.configuration = configuration
        self.semantics = semantics
        self.block_size = configuration.block_size
        ids = configuration.blocks + len(semantics.reserved)
        ledger = PooledBooks if semantics.shared_pool else GroupBooks
        self.groups = [
            ledger(group, configuration.blocks, ids) for group in range(semantics.groups)
        ]
        for group in self.groups[1:]:
            if isinstance(group, PooledBooks):
                group.share(self.groups[0])
        self.requests: dict[int, RequestModel] = {}
        self.known: dict[int, RequestModel] = {}
        """Live requests, and those that the present operation ended."""
        self.ended: list[RequestModel] = []
        self.touched_requests: dict[int, RequestModel] = {}
        """Requests that operations since the last settlement were about."""
        self.strays: list[Event] = []
        """Events about requests or steps that are not known, or at another row than the next."""
        self.identities: set[int] = set()
        """Of all requests that ever were."""
        self.running: list[RequestModel] = []
        self.preempted: list[RequestModel] = []
        self.steps: deque[StepModel] = deque()
        self.retired: StepModel | None = None
        """The step that the present operation retired."""
        self.released_fences: set[tuple[int, int, int]] = set()
        """(step, request, group) of the fences that the present operation opened."""
        self.predicted_hits: list[tuple[int, list[int]]] = []
        """Per group, the blocks that the present admission would reuse."""
        self.events: Sequence[Event] = ()
        """Events of the present operation."""
        self.passing = False
        """Whether there is something that holds for the present operation only."""
        self.figures = Figures()
        if semantics.eviction_order == "configured" and configuration.device_eviction == "arc":
            for group in self.groups:
                group.adaptive = Adaptive(configuration.blocks)
        self._entered = 0
        """Requests that were admitted or forked."""
        self._tags_of: tuple[Admit | Promote | None, Tags[int]] = (None, array("Q"))
        self.operation_handlers: dict[type[Operation], Callable[..., None]] = {
            # What a done operation means for its request.
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
        self.event_handlers: dict[type[Event], Callable[..., None]] = {
            BlocksAllocated: self._blocks_allocated,
            BlocksReused: self._blocks_reused,
            BlocksShared: self._blocks_shared,
            BlockCopied: self._block_copied,
            BlockMerged: self._block_merged,
            BlocksReleased: self._blocks_released,
            BlocksOutlived: self._blocks_outlived,
            ReleaseFenced: self._release_fenced,
            BlocksPublished: self._blocks_published,
            BlocksEvicted: self._blocks_evicted,
            StepLaunched: self._step_launched,
            StepRetired: self._step_retired,
        }
        self.tiers: Tiers | None = None
        """Those below the device, if there are any."""
        if semantics.tiers and configuration.host_blocks:
            self.tiers = Tiers(self)
            self.operation_handlers |= self.tiers.operation_handlers
            self.event_handlers |= self.tiers.event_handlers

    # -- operations: the naive model ----------------------------------------------------------

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

    def longest_hit(self, tags: Tags[int]) -> int:
        """Rows of the longest prefix that is findable in every group, below the last token."""
        last_tags = self.rows_to_hit(tags)
        for group in self.groups:
            found = len(list(takewhile(group.key_of_tag.__contains__, last_tags)))
            last_tags = last_tags[:found]
        return len(last_tags)

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
        for transfer in self.tiers.in_flight.values() if self.tiers is not None else ():
            transfer.outdated = True

    def _target(self, outcome: Outcome) -> RequestModel:
        assert outcome.request is not None
        return self.requests[outcome.request]

    def written(self, request: RequestModel) -> int:
        """Tokens whose KV is there for any step that is launched now."""
        return request.scheduled if self.semantics.stream_order else request.computed

    # -- block events: the ownership ledger -----------------------------------------------------
    #
    # An event about an unknown request is noted for LIFE to report, and passed over.

    def _known(self, event: Event, number: int) -> RequestModel | None:
        request = self.known.get(number)
        if request is None:
            self.strays.append(event)
        return request

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        group = self.groups[event.group]
        group.hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            table = request.tables[event.group]
            if event.row != len(table):
                self.strays.append(event)
            table += event.blocks
        if group.evicting:
            group.evicting.clear()

    def _blocks_reused(self, event: BlocksReused) -> None:
        self.groups[event.group].hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            table = request.tables[event.group]
            if self.semantics.windows:
                # What is behind the window need not be found.
                table += self.semantics.reserved[:1] * (event.row - len(table))
            if event.row != len(table):
                self.strays.append(event)
            table += event.blocks

    def _blocks_shared(self, event: BlocksShared) -> None:
        self.groups[event.group].hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            request.tables[event.group] = list(event.blocks)

    def _block_copied(self, event: BlockCopied) -> None:
        group = self.groups[event.group]
        group.hold((event.target,))
        group.drop((event.source,))
        if group.evicting:
            group.evicting.clear()
        self._replaced(event)

    def _block_merged(self, event: BlockMerged) -> None:
        group = self.groups[event.group]
        group.hold((event.target,))
        group.drop((event.source,))
        self._replaced(event)

    def _replaced(self, event: BlockCopied | BlockMerged) -> None:
        """Another block is named in the table."""
        request = self._known(event, event.request)
        if request is None:
            return
        # A new list: steps in flight may refer to the old one.
        table = request.tables[event.group] = request.tables[event.group][:]
        if event.row < len(table):  # EXCL
            table[event.row] = event.target
        changed = event.row * self.block_size
        request.verified[event.group] = min(request.verified[event.group], changed)
        request.trusted_rows[event.group] = min(request.trusted_rows[event.group], event.row)

    def _blocks_released(self, event: BlocksReleased) -> None:
        self.groups[event.group].drop(event.blocks)
        if event.step is not None:
            self.released_fences.add((event.step, event.request, event.group))
            self.passing = True
        else:
            request = self._known(event, event.request)
            if request is not None:
                request.tables[event.group] = []
                request.launched = 0

    def _blocks_outlived(self, event: BlocksOutlived) -> None:
        self.groups[event.group].drop(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            nobodys, gone = self.semantics.reserved[0], set(event.blocks)
            # A new list: steps in flight may refer to the old one.
            request.tables[event.group] = [
                nobodys if block in gone else block for block in request.tables[event.group]
            ]

    def window(self, group: int) -> int:
        """Tokens that attention of this group looks back on, itself included; 0 for all."""
        windows = self.semantics.windows
        return windows[group] if windows else 0

    def _release_fenced(self, event: ReleaseFenced) -> None:
        """The tables move from the request to the step; references stay."""
        request = self._known(event, event.request)
        step = next((step for step in self.steps if step.number == event.step), None)
        if request is not None and step is not None:
            step.fenced.append((request.id, request.tables))
            request.tables = [[] for _ in self.groups]
            request.launched = 0

    def _blocks_published(self, event: BlocksPublished) -> None:
        group, size, row = self.groups[event.group], self.block_size, event.row
        request = self._known(event, event.request)
        if request is None:
            return
        # Tags end with the request's tokens: what is not a full block, VALID has reported.
        tags = request.tags[(row + 1) * size - 1 : (row + len(event.blocks)) * size : size]
        group.publish(event.blocks, event.keys, tags)
        if self.tiers is not None:
            self.tiers.published(group, event.blocks, tags)
        if self.semantics.publishes == "at_allocation":
            written = self.written(request)
            for block, owed_row in zip(event.blocks, range(row, row + len(tags)), strict=False):
                if (owed_row + 1) * size > written:
                    group.owed[block] = (request, owed_row)

    def _blocks_evicted(self, event: BlocksEvicted) -> None:
        group = self.groups[event.group]
        group.unpublish(event.blocks)
        group.touched += event.blocks
        group.touched_keys += event.keys
        self.figures.evictions += len(event.blocks)
        if event.cause == "pressure":
            group.evicting += event.blocks

    # -- steps -----------------------------------------------------------------------------------

    def _step_launched(self, event: StepLaunched) -> None:
        items, tables = [], []
        for item in event.items:
            request = self._known(event, item.request)
            if request is None:
                continue
            items.append((item, request))
            tables.append(tuple(request.tables))
            request.scheduled = item.end
            request.launched += 1
            request.last_step = event.step
        self.steps.append(StepModel(event.step, items, tables))
        self.figures.iterations += 1
        self.figures.batch_size = len(event.items)

    def _step_retired(self, event: StepRetired) -> None:
        if not self.steps:
            return
        if self.steps[0].number != event.step:
            self.strays.append(event)
            return
        step = self.steps.popleft()
        self.retired = step
        self.passing = True
        for item, request in step.items:
            if request.epoch == item.epoch:
                request.computed = item.end
                request.launched -= 1
            self.touched_requests[request.id] = request
