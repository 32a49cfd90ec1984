"""The kit's half of an adapter: what is around a cache of one's own, and what it has to tell.

A subclass says in a few methods what its engine does (``admit``, ``grow``, ``release``, perhaps
``publish``, ``evict``, ``reset`` and ``schedule``) and what it has (``table``, ``free_blocks``,
``ref_counts``, ``index``).  The rest is here: requests and their numbers, targets of operations,
steps, answers, the view, and the events, which are derived by looking at the engine before and
after each operation.  That look costs time in proportion to the pool, so an adapter for pools of
thousands of blocks tells its events itself, as the one of vLLM's manager does.

Not for engines with several groups, forks, swaps or fences: see :class:`Subject`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Evict,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_LAUNCHED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.prompts import clip_media, prompt_tokens, sampled_tokens
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.view import Standing
from kvproof.stateful_tests.shapes import counts_of, entries_of, ids_of, index_of

_BEYOND = ("groups", "shared_pool", "block_sizes", "states", "tiers")
"""Words for what an Adapter has not …"""
_SHOWN = ("exports", "exports_per_request")
"""… and for what its view does not show."""


class Refused(Exception):
    """What the engine cannot do now, and of which it has done nothing."""

    def __init__(self, reason: str = NO_FREE_BLOCKS) -> None:
        super().__init__(reason)
        self.reason = reason


class Request:
    """A live request."""

    def __init__(self, number: int, operation: Admit) -> None:
        self.number = number
        """Its name from its admission on: never another's."""
        self.tokens: list[int] = prompt_tokens(operation.prompt, operation.media).tolist()
        """All that it has: prompt, and what was sampled."""
        self.salt = operation.salt
        self.adapter = operation.adapter
        self.media = clip_media(operation.media, len(self.tokens))
        self.running = False
        self.computed = 0
        """Leading tokens whose KV is there …"""
        self.scheduled = 0
        """… or is being computed by steps in flight."""
        self.preemptions = 0

    @property
    def marked_tokens(self) -> list[int]:
        """The tokens, with salt, adapter and media written into them.

        For an engine that knows none of these: what may not share a prefix has other tokens.
        """
        mark = self.salt << 41 | self.adapter
        marks = [mark << 64] * len(self.tokens)
        for item in self.media:
            for offset in range(item.length):
                marks[item.start + offset] = (mark << 41 | item.item + 1) << 23 | offset
        return [token | mark << 28 for token, mark in zip(self.tokens, marks, strict=True)]


class Part(NamedTuple):
    """One request's part of a step: its tokens from ``start`` to ``end`` are computed."""

    request: Request
    start: int
    end: int


class _Look(NamedTuple):
    """What the engine had at one moment."""

    tables: dict[int, list[int]]
    free: list[int]
    entries: dict[tuple[bytes, int], None]
    """Of the prefix cache: a key, and a block that is findable under it."""


class Adapter(ABC):
    """Base of a subject over one's own engine; ``__init__`` is to build the engine.

    Keeps the rules of a scheduler around the engine: no more requests than the configuration
    allows, none that no empty pool could hold, and none given back before steps have computed
    all of it.
    """

    name = "adapter"
    """For benchmarks and traces; kvproof finds it, and a case names it, by MODULE:CLASS."""
    semantics = Semantics(fences_releases=False, slots=False, swaps=False)
    """These three need not be written: they are always so here."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if isinstance(cls.semantics, Semantics):  # it may be a property
            cls.semantics = replace(cls.semantics, fences_releases=False, slots=False, swaps=False)

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        optional = {"evict": Adapter.evict, "reset": Adapter.reset}
        left = {kind for kind, hook in optional.items() if getattr(type(self), kind) is hook}
        self.capabilities = frozenset(kind.__name__.lower() for kind in _HANDLERS) - left
        self.requests: dict[int, Request] = {}
        """Those that are live, by number, which is the order of their first admission."""
        self.steps: deque[StepLaunched] = deque()
        """In flight, oldest first."""
        self._admitted = 0
        self._launched = 0
        self._events: list[Event] = []

    # -- what the engine does ----------------------------------------------------------------------

    @abstractmethod
    def admit(self, request: Request) -> int:
        """Give a request blocks for all of its tokens; says how many came from the prefix cache.

        New or preempted.  Raises Refused if there are not enough.
        """

    @abstractmethod
    def grow(self, request: Request, tokens: int) -> None:
        """Give it blocks for its last ``tokens`` tokens, which are new.  Raises Refused."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Take all its blocks back: it has ended, or is preempted."""

    def publish(self, request: Request) -> None:
        """Its full blocks may be found from now on, as far as it is computed: a step is retired.

        Not called without prefix caching.
        """

    def evict(self, blocks: int) -> None:
        """Forget up to so many cached blocks that nobody holds."""

    def reset(self) -> None:
        """Forget all that is cached.  Raises Refused, if a block is in use."""

    def schedule(self, budget: int) -> Sequence[Part]:
        """What the next step computes: all there is, or as much as the budget (not 0) allows."""
        left = budget if budget and self.semantics.chunks else 1 << 62
        parts = []
        for request in self.running:
            start, end = request.scheduled, min(len(request.tokens), request.scheduled + left)
            if start < end:
                parts.append(Part(request, start, end))
                left -= end - start
        return parts

    # -- what the engine has -----------------------------------------------------------------------

    @abstractmethod
    def table(self, request: Request) -> Sequence[int]:
        """Its blocks, row by row; none while it is preempted."""

    def free_count(self) -> int:
        """How many blocks are free, as the engine counts them."""
        return len(self.free_blocks())

    @abstractmethod
    def free_blocks(self) -> Sequence[int]:
        """All that an admission may take; where an order is promised, the next victim first."""

    @abstractmethod
    def ref_counts(self) -> Sequence[int]:
        """By block id, from 0 on."""

    @abstractmethod
    def index(self) -> Mapping[bytes, Sequence[int]]:
        """The prefix cache: key to the blocks that are findable under it."""

    # -- the subject -------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests.values() if request.running]

    @property
    def preempted(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.running]

    def view(self) -> AdapterView:
        """Raises InputError for a declared word that no Adapter can keep to."""
        own = type(self).view is not Adapter.view
        for word in _BEYOND if own else (*_BEYOND, *_SHOWN):
            said = getattr(self.semantics, word)
            if said != getattr(Semantics(), word):
                lacking = "is not with Adapter" if word in _BEYOND else "needs a view() of your own"
                raise InputError(f"{word}={said!r} {lacking}: see docs/adapters.md")
        return AdapterView(self)

    def drain_events(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def apply(self, operation: Operation) -> Outcome:
        handler = _HANDLERS.get(type(operation))
        if handler is None:
            return SKIPPED
        index, request = getattr(operation, "request", None), None
        if index is not None:
            candidates = self._candidates(operation)
            if not candidates:
                return SKIPPED
            request = candidates[index % len(candidates)]
        before = self._look()
        try:
            return handler(self, operation, request, before)
        except Refused as refusal:
            self._tell_changes(before)  # there should be none
            return Outcome("refused", refusal.reason, None if request is None else request.number)

    def _candidates(self, operation: Operation) -> Sequence[Request]:
        if isinstance(operation, Abort):
            return list(self.requests.values())
        return self.preempted if isinstance(operation, Resume) else self.running

    def _rows(self, tokens: int) -> int:
        return -(-tokens // self.configuration.block_size)

    def _admit(self, operation: Admit, request: None, before: _Look) -> Outcome:
        new = Request(self._admitted, operation)
        cached = self._place(new)
        self.requests[new.number] = new
        self._admitted += 1
        self._tell_changes(before, new)
        self._events.append(RequestAdmitted(new.number, len(new.tokens), cached))
        return Outcome("done", None, new.number, cached)

    def _resume(self, operation: Resume, request: Request, before: _Look) -> Outcome:
        cached = self._place(request)
        self._tell_changes(before, request)
        self._events.append(RequestResumed(request.number, cached))
        return Outcome("done", None, request.number, cached)

    def _place(self, request: Request) -> int:
        if len(self.running) >= self.configuration.requests:
            raise Refused(TOO_MANY_REQUESTS)
        if self._rows(len(request.tokens)) > self.configuration.blocks:
            raise Refused(LARGER_THAN_POOL)
        request.computed = request.scheduled = self.admit(request)
        request.running = True
        return request.computed

    def _grow(self, operation: Grow, request: Request, before: _Look) -> Outcome:
        tokens = request.tokens
        length = len(tokens)
        tokens += sampled_tokens(operation.choice, length, operation.tokens)
        try:
            self.grow(request, operation.tokens)
        except Refused:
            del tokens[length:]
            raise
        self._tell_changes(before)
        self._events.append(RequestGrown(request.number, operation.tokens))
        return Outcome("done", None, request.number)

    def _finish(self, operation: Finish, request: Request, before: _Look) -> Outcome:
        return self._end(request, before, RequestFinished(request.number))

    def _abort(self, operation: Abort, request: Request, before: _Look) -> Outcome:
        return self._end(request, before, RequestAborted(request.number))

    def _end(self, request: Request, before: _Look, event: Event) -> Outcome:
        if request.running:
            self._give_back(request)
        del self.requests[request.number]
        self._tell_changes(before)
        self._events.append(event)
        return Outcome("done", None, request.number)

    def _preempt(self, operation: Preempt, request: Request, before: _Look) -> Outcome:
        self._give_back(request)
        request.preemptions += 1
        self._tell_changes(before)
        self._events.append(RequestPreempted(request.number))
        return Outcome("done", None, request.number)

    def _give_back(self, request: Request) -> None:
        if request.computed < len(request.tokens):
            raise Refused(NOT_LAUNCHED)
        self.release(request)
        request.running = False
        request.computed = request.scheduled = 0

    def _launch(self, operation: Launch, request: None, before: _Look) -> Outcome:
        if len(self.steps) >= self.configuration.run_ahead:
            raise Refused(RUN_AHEAD_LIMIT)
        parts = self.schedule(operation.budget)
        if not parts:
            raise Refused(NOTHING_TO_RUN)
        items = []
        for part, start, end in parts:
            table = (self._table(part),)
            items.append(StepItem(part.number, part.preemptions, start, end, table))
            part.scheduled = end
        self.steps.append(StepLaunched(self._launched, items))
        self._launched += 1
        self._tell_changes(before)
        self._events.append(self.steps[-1])
        return Outcome("done", count=sum(item.end - item.start for item in items))

    def _retire(self, operation: Retire, request: None, before: _Look) -> Outcome:
        if not self.steps:
            return SKIPPED
        step = self.steps.popleft()
        self._events.append(StepRetired(step.step))
        for item in step.items:
            # Live and running: none is given back before all of it is computed.
            part = self.requests[item.request]
            part.computed = item.end
            if self.configuration.prefix_caching:
                self.publish(part)
        self._tell_changes(before)
        return Outcome("done", count=len(step.items))

    def _evict(self, operation: Evict, request: None, before: _Look) -> Outcome:
        self.evict(operation.blocks)
        return Outcome("done", count=self._tell_changes(before, cause="request"))

    def _reset(self, operation: Reset, request: None, before: _Look) -> Outcome:
        self.reset()
        return Outcome("done", count=self._tell_changes(before, cause="reset"))

    # -- events, from what the engine has before and after an operation ----------------------------

    def _look(self) -> _Look:
        """Raises WrongShape."""
        self._ref_counts()
        tables = {number: self._table(request) for number, request in self.requests.items()}
        running = {request.number: tables[request.number] for request in self.running}
        return _Look(running, ids_of("free_blocks()", self.free_blocks()), entries_of(self.index()))

    def _ref_counts(self) -> Sequence[int]:
        return counts_of(self.ref_counts(), self.configuration, self.semantics)

    def _table(self, request: Request) -> list[int]:
        preempted = "" if request.running else ", which is preempted,"
        return ids_of(f"table() of request {request.number}{preempted}", self.table(request))

    def _tell_changes(
        self,
        before: _Look,
        placed: Request | None = None,
        cause: Literal["pressure", "request", "reset"] = "pressure",
    ) -> int:
        """Tell what has changed, in the order in which an engine does it; blocks evicted.

        Of a request that was just ``placed`` the first blocks are hits.
        """
        after = self._look()
        tell = self._events.append
        new = [entry for entry in after.entries if entry not in before.entries]
        old_tables = {n: table for n, table in before.tables.items() if not after.tables.get(n)}
        self._tell_published(new, old_tables)
        for number, table in old_tables.items():
            tell(BlocksReleased(0, number, _order_of_release(table, before, after)))
        allocated: list[BlocksAllocated] = []
        for number, table in after.tables.items():
            first = len(before.tables.get(number, ()))
            if placed is not None and number == placed.number and placed.computed:
                first = self._rows(placed.computed)
                tell(BlocksReused(0, number, 0, table[:first]))
            if table[first:]:
                allocated.append(BlocksAllocated(0, number, first, table[first:]))
        lost = [entry for entry in before.entries if entry not in after.entries]
        if self.semantics.publishes == "at_allocation":
            again = list(self._published_again(allocated, before, after))
            lost, new = lost + again, new + again
        place = {block: position for position, block in enumerate(before.free)}
        lost.sort(key=lambda entry: place.get(entry[1], -1))
        if lost:
            blocks = [block for _, block in lost]
            tell(BlocksEvicted(0, blocks, [key for key, _ in lost], cause))
        self._events += allocated
        self._tell_published(new, after.tables)
        return len(lost)

    def _published_again(
        self, allocated: Sequence[BlocksAllocated], before: _Look, after: _Look
    ) -> Iterator[tuple[bytes, int]]:
        """Full blocks that were taken and became findable anew under the very key they had."""
        size = self.configuration.block_size
        for event in allocated:
            full = len(self.requests[event.request].tokens) // size - event.row
            taken = set(event.blocks[: max(0, full)])
            yield from (e for e in before.entries if e[1] in taken and e in after.entries)

    def _tell_published(
        self, entries: Sequence[tuple[bytes, int]], tables: Mapping[int, Sequence[int]]
    ) -> None:
        """Tell what has become findable in these tables, rows that follow each other together."""
        keys = {block: key for key, block in entries}
        for number, table in tables.items() if keys else ():
            rows = [row for row, block in enumerate(table) if block in keys]
            for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
                first, *more = (row for _, row in run)
                blocks = list(table[first : first + 1 + len(more)])
                told = [keys.pop(block) for block in blocks if block in keys]
                if told:
                    self._events.append(BlocksPublished(0, number, first, blocks, told))


def _order_of_release(table: Sequence[int], before: _Look, after: _Look) -> list[int]:
    """From the tail to the head, unless the free blocks show that it was otherwise.

    They show it of those in which something is findable: these are taken in the order in which
    they came.
    """
    tail_first = list(table)[::-1]
    findable = {block for _, block in after.entries}
    freed = set(table) & findable - set(before.free)
    seen = iter([block for block in after.free if block in freed])
    listed = freed & set(after.free)
    return [next(seen) if block in listed else block for block in tail_first]


class AdapterView:
    """The engine's state as it is; requests, their progress and steps are the adapter's."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def free_count(self, group: int) -> int:
        return self._adapter.free_count()

    def ref_counts(self, group: int) -> Sequence[int]:
        return self._adapter._ref_counts()

    def free_blocks(self, group: int) -> Sequence[int]:
        return ids_of("free_blocks()", self._adapter.free_blocks())

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return index_of(self._adapter.index())

    def requests(self) -> Sequence[int]:
        return list(self._adapter.requests)

    def standing(self, request: int) -> Standing:
        found = self._adapter.requests[request]
        rows = (len(self._adapter.table(found)),)
        state: Literal["running", "preempted"] = "running" if found.running else "preempted"
        return state, len(found.tokens), found.computed, rows

    def table(self, request: int, group: int) -> Sequence[int]:
        return list(self._adapter.table(self._adapter.requests[request]))

    def steps_in_flight(self) -> Sequence[int]:
        return [step.step for step in self._adapter.steps]

    def metrics(self) -> Mapping[str, int]:
        return {}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return {}


_HANDLERS: dict[type[Operation], Callable[..., Outcome]] = {
    Admit: Adapter._admit,
    Grow: Adapter._grow,
    Finish: Adapter._finish,
    Abort: Adapter._abort,
    Preempt: Adapter._preempt,
    Resume: Adapter._resume,
    Launch: Adapter._launch,
    Retire: Adapter._retire,
    Evict: Adapter._evict,
    Reset: Adapter._reset,
}
