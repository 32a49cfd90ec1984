"""What the engine of transformers does to its cache, overheard and told as operations of a cache.

See :mod:`kvproof.stateful_tests.subjects.transformers_scheduler`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.transformers_loading import (
    NAME,
    RESERVED_SECTORS,
    blocks_per_sector,
)
from kvproof.stateful_tests.subjects.transformers_told import OverheardView, Told, block_key

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import RequestState

_RETIRE = Retire()
_by_number = attrgetter("number")
_OPERATIONS = (
    Admit, Decode, Reserve, Finish, Abort, Fork, Evict, Preempt, Resume, Launch, Retire,
)  # fmt: skip


class Listener(Protocol):
    """Who is told."""

    def admission(self, name: str, slots: int) -> Admit:
        """The operation that admits it, with so many slots."""
        ...

    def choice(self, name: str) -> int:
        """What the model samples for it."""
        ...

    def overheard(self, operation: Operation, name: str | None) -> None:
        """This was done, for that request; ``apply`` has its outcome."""
        ...

    def cancelled(self, name: str) -> None:
        """The last that it had was on the host, and is free now."""
        ...


class OverheardCache:
    """The engine's cache: an operation is done by the engine, and told when it is done.

    The listener is told, and calls ``apply`` with the operation, for its outcome.
    """

    name = NAME
    capabilities = frozenset([kind.__name__.lower() for kind in _OPERATIONS])
    semantics = Semantics(
        reserved=tuple(range(RESERVED_SECTORS)),
        publishes="lazily",
        duplicates="merged",
        forks_early=True,
        samples=True,
        release_order="any",
        eviction_order="any",
        exact_admission=False,
        runs_ahead=False,
        separates_media=False,
        swaps=False,
    )

    def __init__(
        self,
        configuration: Configuration,
        processor: ContinuousBatchProcessor,
        listener: Listener,
    ) -> None:
        self.configuration = configuration
        self.size = configuration.block_size
        trash = RESERVED_SECTORS * blocks_per_sector(self.size)
        self.semantics = replace(self.semantics, reserved=tuple(range(trash)))
        self.cache: Any = processor.cache
        self.allocator: Any = self.cache.cache_allocators["full_attention"]
        self.scheduler: Any = processor.scheduler
        self.live: dict[int, Told] = {}
        """By number: requests that were admitted and have not ended …"""
        self.by_name: dict[str, Told] = {}
        """… and by their names in transformers."""
        self.running: list[Told] = []
        self.preempted: list[Told] = []
        self.steps: deque[StepLaunched] = deque()
        self.evictions = self.withheld = 0
        self.at_work = False
        """Whether the engine is in the middle of a step."""
        self._listener = listener
        self._events: list[Event] = []
        self._outcome = SKIPPED
        self._next_request = 0
        self._view = OverheardView(self)
        for name in (
            "search_prefix_match",
            "can_store_request_tokens",
            "mark_complete_blocks",
            "free_blocks",
            "evict_cached_blocks",
            "prepare_fork_request",
        ):
            self._listen(self.cache, name)

    def _listen(self, owner: Any, name: str) -> None:
        """From now on the engine's calls of that method of its pass through the one here."""
        listens = getattr(self, f"_{name.lstrip('_')}")
        setattr(owner, name, partial(listens, getattr(owner, name)))

    # -- the subject that the checks see -------------------------------------------------------

    def apply(self, operation: Operation) -> Outcome:
        return self._outcome

    def drain_events(self) -> Sequence[Event]:
        drained, self._events = self._events, []
        return drained

    def view(self) -> OverheardView:
        return self._view

    def _tell(self, operation: Operation, live: Told | None = None, **fields: Any) -> None:
        number = live.number if live is not None else None
        self._outcome = Outcome("done", None, number, **fields)
        self._listener.overheard(operation, live.name if live is not None else None)

    def _table(self, name: str) -> list[int]:
        """A copy of the engine's table; empty if it has none."""
        return list(self.allocator.block_table.get(name, ()))

    # -- blocks are given ----------------------------------------------------------------------

    def _search_prefix_match(
        self, original: Callable[..., int], name: str, prompt_ids: list[int]
    ) -> int:
        matched = original(name, prompt_ids)
        if matched > 0:
            self._enter(name, len(prompt_ids), matched, slots=matched)
        return matched

    def _can_store_request_tokens(
        self,
        original: Callable[..., bool],
        state: RequestState,
        request_len: int,
        dry_run: bool = False,
    ) -> bool:
        stored = original(state, request_len, dry_run)
        if not stored or dry_run:
            return stored
        live = self.by_name.get(state.request_id)
        end = state.current_len() + request_len
        if live is None or not live.running:
            live = self._enter(state.request_id, len(state.initial_tokens), 0, slots=end)
            if end <= live.tokens:
                return stored
        self._grow(live, end)
        return stored

    def _enter(self, name: str, tokens: int, cached: int, slots: int) -> Told:
        """It was given its first blocks, or its first ones again."""
        operation: Admit | Resume
        live = self.by_name.get(name)
        if live is None:
            live = Told(self._next_request, name, tokens)
            self._next_request += 1
            self.live[live.number] = self.by_name[name] = live
            operation = self._listener.admission(name, slots)
            event: Event = RequestAdmitted(live.number, tokens, cached)
        else:
            operation = Resume(self.preempted.index(live), slots, late=live.swapped)
            self.preempted.remove(live)
            event = RequestResumed(live.number, cached)
        insort(self.running, live, key=_by_number)
        live.running = True
        live.computed = cached
        live.slots = slots
        self._tell_rows(live, cached // self.size)
        transfers = self._load(live)
        self._events.append(event)
        self._tell(operation, live, cached_tokens=cached, transfers=transfers)
        return live

    def _load(self, live: Told) -> tuple[int, ...]:
        """Copies that begin for it, of what is on the host."""
        return ()

    def _tell_rows(self, live: Told, reused: int = 0) -> None:
        """Rows of its table that were not told yet; so many of them are a prefix hit."""
        table, row = self._table(live.name), live.rows
        live.rows = len(table)
        if reused:
            self._events.append(BlocksReused(0, live.number, row, table[row : row + reused]))
        if table[row + reused :]:
            self._events.append(
                BlocksAllocated(0, live.number, row + reused, table[row + reused :])
            )

    def _grow(self, live: Told, end: int) -> None:
        """It has slots up to ``end``: for a chunk, or for its latest output token."""
        index = self.running.index(live)
        live.slots = max(live.slots, end)
        if end <= live.tokens:
            self._tell_rows(live)
            self._tell(Reserve(index, end), live, count=0)
            return
        live.tokens += 1
        self._tell_rows(live)
        self._events.append(RequestsDecoded((live.number,)))
        choice = self._listener.choice(live.name)
        self._tell(Decode((index,), choice), children=(live.number,))

    # -- content is found again ----------------------------------------------------------------

    def _mark_complete_blocks(
        self, original: Callable[..., None], state: RequestState, complete: dict[str, int]
    ) -> None:
        live = self.by_name.get(state.request_id)
        before = self._table(state.request_id)
        known = dict(self.allocator.ledger.block_to_hash)
        original(state, complete)
        if live is None:
            return
        hashes = self.allocator.ledger.block_to_hash
        told = len(self._events)
        rows = zip(before, self._table(state.request_id), strict=False)
        for row, (old, new) in enumerate(rows):
            if old != new:
                self._events.append(BlockMerged(0, live.number, row, old, new))
            elif new in hashes and new not in known:
                key = block_key(hashes[new])
                self._events.append(BlocksPublished(0, live.number, row, [new], [key]))
        if len(self._events) > told:
            self._tell(Reserve(self.running.index(live), live.slots), live, count=0)

    def _evict_cached_blocks(self, original: Callable[[], bool]) -> bool:
        cached = list(self.allocator.ledger.cached_blocks)
        keys = [self._key_of(block) for block in cached]
        evicted = original()
        if cached:
            self._tell_evicted(cached, keys)
            self._tell(Evict(len(cached)), count=len(cached))
        return evicted

    def _keys_of(self, blocks: Sequence[int]) -> dict[int, bytes]:
        """Of those that are findable."""
        findable = self.allocator.ledger.block_to_hash
        return {block: self._key_of(block) for block in blocks if block in findable}

    def _key_of(self, block: int) -> bytes:
        return block_key(self.allocator.ledger.block_to_hash.get(block, 0))

    def _tell_evicted(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        self.evictions += len(blocks)
        self._events.append(BlocksEvicted(0, blocks, keys, "request"))

    # -- blocks are shared, and given back -----------------------------------------------------

    def _prepare_fork_request(
        self,
        original: Callable[..., list[str]],
        state: RequestState,
        names: list[str],
        copies: dict[str, tuple[list[int], list[int]]],
    ) -> list[str]:
        _, targets = copies[self.allocator.layer_type]
        before = len(targets)
        forked = original(state, names, copies)
        parent = self.by_name[state.request_id]
        copied = set(targets[before:])
        children = [self._fork(parent, name, copied) for name in forked]
        if children:
            index = self.running.index(parent)
            self.running += children
            self._tell(
                Fork(index, len(children)),
                parent,
                children=tuple([child.number for child in children]),
            )
        return forked

    def _fork(self, parent: Told, name: str, copied: set[int]) -> Told:
        """What is not shared was copied, as far as the engine will do so."""
        child = Told(self._next_request, name, parent.tokens)
        self._next_request += 1
        self.live[child.number] = self.by_name[name] = child
        child.running = True
        child.computed, child.slots = parent.computed, parent.slots
        source, target = self._table(parent.name), self._table(name)
        child.rows = len(target)
        self._events.append(BlocksShared(0, child.number, parent.number, source))
        for row, (old, new) in enumerate(zip(source, target, strict=False)):
            if old != new:
                tokens = min(max(parent.computed - row * self.size, 0), self.size)
                tokens = tokens if new in copied else 0
                self._events.append(BlockCopied(0, child.number, row, old, new, tokens))
        self._events.append(RequestForked(parent.number, child.number))
        return child

    def _free_blocks(
        self, original: Callable[..., None], name: str, no_cache: bool = False
    ) -> None:
        """The request is to be computed anew, was cancelled, or has finished."""
        live = self.by_name.get(name)
        blocks = self._table(name)
        keys = self._keys_of(blocks)
        original(name, no_cache)
        if live is None:
            return
        cancelled = name in self.scheduler._requests_to_cancel
        if not live.running and not cancelled:
            return  # given back already, when it was preempted
        if live.running:
            self._events.append(BlocksReleased(0, live.number, blocks))
            self._tell_lost(self._lost(keys))
        if no_cache:
            self._preempt(live)
        else:
            self._end(live, cancelled=cancelled)

    def _lost(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Of blocks that were findable, those that are so no longer."""
        hashes = self.allocator.ledger.block_to_hash
        return {block: key for block, key in keys.items() if block not in hashes}

    def _tell_lost(self, lost: Mapping[int, bytes]) -> None:
        if lost:
            self._tell_evicted(list(lost), list(lost.values()))

    def _preempt(self, live: Told, transfers: tuple[int, ...] = ()) -> None:
        """``transfers``: copies of all that was computed of it."""
        index = self.running.index(live)
        self.running.remove(live)
        insort(self.preempted, live, key=_by_number)
        live.running, live.swapped = False, bool(transfers)
        live.suspended = live.computed if transfers else 0
        live.rows = live.computed = live.slots = 0
        live.epoch += 1
        self._events.append(RequestPreempted(live.number))
        self._tell(Preempt(index, swap=live.swapped), live, transfers=transfers)

    def _end(self, live: Told, *, cancelled: bool) -> None:
        among_all = list(self.live).index(live.number)
        queue = self.running if live.running else self.preempted
        index = queue.index(live)
        queue.remove(live)
        del self.live[live.number], self.by_name[live.name]
        if cancelled:
            self._events.append(RequestAborted(live.number))
            self._tell(Abort(among_all), live)
        else:
            self._events.append(RequestFinished(live.number))
            self._tell(Finish(index), live)

    # -- steps ---------------------------------------------------------------------------------

    def launched(self, step: int, items: Sequence[StepItem]) -> None:
        """The engine's step, as its model carried it out."""
        places = {live.number: index for index, live in enumerate(self.running)}
        operation = Launch(
            items=tuple([(places.get(item.request, 0), item.end - item.start) for item in items])
        )
        event = StepLaunched(step, items)
        self.steps.append(event)
        self._events.append(event)
        self._tell(operation, count=sum([item.end - item.start for item in items]))

    def retired(self) -> None:
        """What the step has written is there."""
        step = self.steps.popleft()
        for item in step.items:
            self.live[item.request].computed = item.end
        self._events.append(StepRetired(step.step))
        self._tell(_RETIRE, count=len(step.items))
