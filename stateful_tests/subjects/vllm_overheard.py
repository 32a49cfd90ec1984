"""What vLLM's scheduler does to its cache, overheard and told as operations of a cache.

See :mod:`kvproof.stateful_tests.subjects.vllm_scheduler`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvproof.invariants.events import (
    BlocksEvicted,
    BlocksReleased,
    Event,
    ReleaseFenced,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
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
    Finish,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import BLOCKS_IN_USE, NO_FREE_BLOCKS, SKIPPED, Outcome
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.told_cache import by_number
from kvproof.stateful_tests.subjects.vllm_groups import (
    VllmGroupsSubject,
    VllmGroupsView,
    VllmHybridSubject,
)
from kvproof.stateful_tests.subjects.vllm_manager import Live, VllmManagerSubject
from kvproof.stateful_tests.subjects.vllm_scheduling import ADAPTERS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_RETIRE = Retire()
_Result = TypeVar("_Result")


class Listener(Protocol):
    """Who is told."""

    def admission(self, request: Request, end: int) -> Admit:
        """The operation that admits it, with slots up to ``end``."""
        ...

    def choice(self, request: Request) -> int:
        """What the model samples for it, see ``sampled_token``."""
        ...

    def counted(self, request: Request, tokens: int, blocks: int, cached: int) -> None:
        """An admission took so many free blocks for so many tokens."""
        ...

    def overheard(self, operation: Operation, request: Request | None) -> None:
        """This was done, for that request; ``apply`` has its outcome."""
        ...


class Told(Live):
    """A request as the cache's checks know it: of its tokens, those that were given slots."""

    __slots__ = ("held", "told")

    def __init__(self, number: int, request: Request) -> None:
        super().__init__(number, request)
        self.told: int = request.num_tokens
        self.held: Sequence[Sequence[KVCacheBlock]] | None = None
        """The tables that it has given back, until that is told."""

    @property
    def length(self) -> int:
        return self.told


class Pool(Struct):
    """A pool as it was at some moment."""

    free_count: int
    free_blocks: Sequence[int]
    ref_counts: Sequence[int]


class Given(Struct):
    """What a request gave back."""

    live: Told
    ended: bool
    """Or preempted."""
    released: list[list[int]]
    """By group."""
    before: Pool | None
    """The pool right before, if it is told later."""
    fence: int | None = None
    """The step in flight that keeps the blocks, if one does."""


class OverheardView(VllmGroupsView):
    """The manager's view, at the moment of which the latest operation tells."""

    def __init__(self, cache: OverheardCache) -> None:
        super().__init__(cache)
        self._cache = cache

    def look(self) -> Pool:
        """The pool of now."""
        refs = list(super().ref_counts(0))
        return Pool(super().free_count(0), super().free_blocks(0), refs)

    def free_count(self, group: int) -> int:
        past = self._cache.past
        return super().free_count(group) if past is None else past.free_count

    def free_blocks(self, group: int) -> Sequence[int]:
        past = self._cache.past
        return super().free_blocks(group) if past is None else past.free_blocks

    def ref_counts(self, group: int) -> Sequence[int]:
        past = self._cache.past
        return super().ref_counts(group) if past is None else past.ref_counts

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        index, early = super().index(group), self._cache.early
        if not early:
            return index
        found = {key: [b for b in blocks if b not in early] for key, blocks in index.items()}
        return {key: blocks for key, blocks in found.items() if blocks}


class OverheardCache(VllmGroupsSubject):
    """The scheduler's cache: an operation is done by the scheduler, and told when it is done.

    The listener is told, and calls ``apply`` with the operation, for its outcome.
    """

    name = "vllm:scheduler"
    capabilities = frozenset(
        ("admit", "decode", "reserve", "finish", "abort", "preempt", "resume", "launch", "retire")
    ) | {"reset"}
    semantics = replace(
        VllmManagerSubject.semantics,
        stream_order=True,
        exact_admission=False,
        keeps_room=False,
        adapters=ADAPTERS,
        chunks=True,
        slots=True,
        exports=(),
        exports_per_request=(),
    )

    def __init__(
        self,
        configuration: Configuration,
        manager: KVCacheManager,
        listener: Listener,
        groups: Semantics,
    ) -> None:
        """``groups``: what to promise of these, and of media."""
        self.semantics = replace(
            self.semantics,
            runs_ahead=configuration.run_ahead > 1,
            groups=groups.groups,
            shared_pool=groups.shared_pool,
            block_sizes=groups.block_sizes,
            arriving_media=groups.arriving_media,
        )
        super().__init__(configuration)
        self.manager = manager
        self._pool = manager.block_pool
        self._view: OverheardView = OverheardView(self)
        self.past: Pool | None = None
        """The pool as it was when that happened which is being told, if later things did, too."""
        self.early: frozenset[int] = frozenset()
        """Blocks that are findable already, by a token that is told with the next operation."""
        self._outcome = SKIPPED
        self._listener = listener
        self._untold: list[Given] | None = None
        """While samples are taken in: what has been given back since."""
        self.evictions = 0
        self.by_id: dict[str, Told] = {}
        """By vLLM's name: those that were admitted and are live."""
        self._allocate_slots, self._free = manager.allocate_slots, manager.free
        manager.allocate_slots = self.allocate_slots
        manager.free = self.free
        self._reset_prefix_cache = manager.reset_prefix_cache
        manager.reset_prefix_cache = self.reset_prefix_cache

    def apply(self, operation: Operation) -> Outcome:
        return self._outcome

    def _done(self, operation: Operation, live: Told | None = None, **fields: Any) -> None:
        self._outcome = Outcome("done", None, live.number if live else None, **fields)
        self._listener.overheard(operation, live.request if live else None)

    def drain_events(self) -> Sequence[Event]:
        events = super().drain_events()
        self.evictions += sum([len(e.blocks) for e in events if isinstance(e, BlocksEvicted)])
        return events

    # -- what the scheduler does to its manager ------------------------------------------------

    def allocate_slots(self, request: Request, num_new_tokens: int, **more: Any) -> Any:
        """As the manager's; in the scheduler's hands every allocation is for tokens of a step."""
        self._catch_up()
        free = self._pool.get_num_free_blocks()
        new_blocks = self._allocate_slots(request, num_new_tokens, **more)
        live = self.by_id.get(request.request_id)
        if live is not None and live.running:
            end = request.num_computed_tokens + num_new_tokens
            if new_blocks is None:
                self._refused(live, end)
            else:
                self._grown(live, end)
        elif new_blocks is not None:
            cached = more.get("num_new_computed_tokens", 0)
            hits = more["new_computed_blocks"].blocks if cached else ((),) * len(self.sizes)
            end = cached + more.get("num_external_computed_tokens", 0) + num_new_tokens
            told = request.num_tokens if live is None else live.told
            if (told - 1) // self.unit == (request.num_tokens - 1) // self.unit:
                taken = free - self._pool.get_num_free_blocks()
                self._listener.counted(request, end, taken, cached)
            self._entered(live, request, end, cached, hits)
        return new_blocks

    def _entered(
        self,
        live: Told | None,
        request: Request,
        end: int,
        cached: int,
        hits: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        operation: Admit | Resume
        if live is None:
            live = Told(self._next_request, request)
            self._next_request += 1
            self.live[live.number] = self.by_id[request.request_id] = live
            operation = self._listener.admission(request, end)
            event: Event = RequestAdmitted(live.number, live.told, cached)
        else:
            operation = Resume(self.preempted.index(live), end)
            self.preempted.remove(live)
            event = RequestResumed(live.number, cached)
        insort(self.running, live, key=by_number)
        live.running = True
        live.computed = cached
        self._tell_admitted(live, hits)
        self._events.append(event)
        self.early = self._completed(live, end)
        self._done(operation, live, cached_tokens=cached)
        self.early = frozenset()
        if end > live.told:
            self._grown(live, end)

    def _completed(self, live: Told, end: int) -> frozenset[int]:
        """Blocks that are findable with ``end`` tokens, and are not with those that are told."""
        unit, told = self.unit, live.told
        return frozenset(
            [
                block.block_id
                for size, table in zip(self.sizes, self.tables(live), strict=True)
                for block in table[told // unit * unit // size : end // unit * unit // size]
            ]
        )

    def _grown(self, live: Told, end: int) -> None:
        """It has slots up to ``end``: for a chunk, or for its latest output token."""
        index = self.running.index(live)
        if end <= live.told:
            self._tell_blocks(live, ())
            self._done(Reserve(index, end), live, count=0)
            return
        live.told += 1
        self._tell_blocks(live, ())
        self._events.append(RequestsDecoded((live.number,)))
        choice = self._listener.choice(live.request)
        self._done(Decode((index,), choice), children=(live.number,))

    def _refused(self, live: Told, end: int) -> None:
        """A running request was not given slots up to ``end``; some other may be preempted now."""
        self._outcome = Outcome("refused", NO_FREE_BLOCKS, live.number)
        self._listener.overheard(Reserve(self.running.index(live), end), live.request)

    def free(self, request: Request) -> None:
        """As the manager's: the request was preempted, or has ended."""
        live = self.by_id.get(request.request_id)
        if live is None:  # it was never admitted
            self._free(request)
            return
        before, tables = self._pool_if_told_later(), self._copied_tables(live)
        self._free(request)
        released = [
            self._order_of_release([block for block in table if not block.is_null])
            for table in tables
        ]
        self._gave(Given(live, request.is_finished(), released, before), tables)

    def _pool_if_told_later(self) -> Pool | None:
        return None if self._untold is None else self._view.look()

    def _copied_tables(self, live: Told) -> list[list[KVCacheBlock]]:
        return [list(table) for table in super().tables(live)]

    def _gave(self, given: Given, tables: list[list[KVCacheBlock]]) -> None:
        """``tables``: what it had until now."""
        if self._untold is None:
            self._tell_given(given)
            return
        self._untold.append(given)
        given.live.held = given.live.held or tables

    def tables(self, live: Live) -> Sequence[Sequence[KVCacheBlock]]:
        held = live.held if isinstance(live, Told) else None
        return super().tables(live) if held is None else held

    def _tell_given(self, given: Given) -> None:
        live = given.live
        if live.number not in self.live:  # it had ended already
            return
        index, among_all = None, list(self.live).index(live.number)
        if live.running:
            index = self.running.index(live)
            self.running.remove(live)
        else:
            self.preempted.remove(live)
        self._tell_released_in_order(given)
        if not given.ended:
            insort(self.preempted, live, key=by_number)
            live.running = False
            live.computed = 0
            live.epoch += 1
            self._events.append(RequestPreempted(live.number))
            self._done(Preempt(0 if index is None else index), live)
            return
        del self.live[live.number], self.by_id[live.request.request_id]
        if index is None or live.request.status == self._vllm.status.FINISHED_ABORTED:
            self._events.append(RequestAborted(live.number))
            self._done(Abort(among_all), live)
        else:
            self._events.append(RequestFinished(live.number))
            self._done(Finish(index), live)

    def _tell_released_in_order(self, given: Given) -> None:
        live = given.live
        live.rows = live.rows_published = 0
        live.held = None
        self._told.pop(live.number, None)
        if given.fence is not None:
            self._events.append(ReleaseFenced(live.number, given.fence))
        self._tell_blocks_released(live.number, given.released)

    def _tell_blocks_released(
        self, request: int, released: Sequence[Sequence[int]], step: int | None = None
    ) -> None:
        """``released``: by group.  ``step``: whose fence had them."""
        ref_counts = self._view.ref_counts(0)
        for group, blocks in enumerate(released):
            if blocks:
                self._events.append(BlocksReleased(group, request, blocks, step))
            for block in blocks:
                if block in self._keys and ref_counts[block] == 0:
                    self._cached_free[block] = None

    def reset_prefix_cache(self) -> bool:
        """As the manager's."""
        self._catch_up()
        cached = list(self._cached_free)
        done: bool = self._reset_prefix_cache()
        if done:
            self._outcome = Outcome("done", count=self._tell_evicted(cached, "reset"))
        else:
            self._outcome = Outcome("refused", BLOCKS_IN_USE)
        self._listener.overheard(Reset(), None)
        return done

    def _tell_published(self, live: Live, table: Sequence[KVCacheBlock], group: int = 0) -> None:
        """``live``: what was told of the group's table."""
        told = self.live[live.number].length // self.unit * self.unit
        super()._tell_published(live, table[: told // self.sizes[group]], group)

    # -- steps -----------------------------------------------------------------------------------

    def launched(self, step: int, items: Sequence[StepItem]) -> None:
        """The scheduler's step, as its worker carries it out."""
        places = {live.number: index for index, live in enumerate(self.running)}
        operation = Launch(
            items=tuple([(places.get(item.request, 0), item.end - item.start) for item in items])
        )
        event = StepLaunched(step, items)
        self.steps.append(event)
        self._events.append(event)
        self._done(operation, count=sum([item.end - item.start for item in items]))

    def retire(self, take_in: Callable[[], _Result]) -> _Result:
        """The scheduler takes in the samples of the oldest step.

        What becomes findable by them is the step's, and is known when all are taken in; requests
        that they end give their blocks back before that.  So the step is told first, and then who
        gave back what, each with the pool as it was right after it.
        """
        self._untold = []
        result = take_in()
        if self._untold is not None:
            self._tell_retired(self._untold)
        return result

    def _catch_up(self) -> None:
        """Blocks may be taken now that were given back, which is to be known before."""
        if self._untold:
            self._tell_retired(self._untold)

    def _tell_retired(self, untold: list[Given]) -> None:
        self._untold = None
        step = self.steps.popleft()
        self._events.append(StepRetired(step.step))
        for item in step.items:
            live = self.live.get(item.request)
            if live is not None and live.running and live.epoch == item.epoch:
                live.computed = item.end
                if self.configuration.prefix_caching:
                    for group, table in enumerate(self.tables(live)):
                        self._tell_published(self._told[live.number][group], table, group)
        pools = [*[given.before for given in untold], None]
        self.past = pools[0]
        self._tell_fences_opened()
        self._done(_RETIRE, count=len(step.items))
        for given, self.past in zip(untold, pools[1:], strict=True):
            self._tell_given(given)

    def _tell_fences_opened(self) -> None:
        """What was given back now that the step is retired: nothing, where there are no fences."""


class OverheardHybrid(OverheardCache, VllmHybridSubject):
    """The scheduler's cache where a group has a window, see ``VllmHybridSubject``."""

    def _refused(self, live: Told, end: int) -> None:
        self._tell_outlived(live)
        super()._refused(live, end)
