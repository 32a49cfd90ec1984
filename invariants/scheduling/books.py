"""The scheduling checks' own books: what each request's life is, by the events alone.

They follow arrivals, iterations and completions, and know from the requests' lengths what must be
pending and when an output token is sampled.  Blocks, and how much of a prompt was cached, they
read from the books of the cache below.  Nothing here judges.

Costs: an iteration's work follows its parts, however many requests wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.events import Event
from kvproof.invariants.operations import Arrive
from kvproof.invariants.outcomes import HIT_PENDING
from kvproof.invariants.scheduling.request_books import Figures, Flight, Item, LiveRequest
from kvproof.invariants.scheduling.vocabulary import (
    BlocksHeld,
    Completed,
    Deferred,
    Limits,
    Part,
    Promises,
    QueueState,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration


class SchedulingBooks:
    """All books of one run's scheduler."""

    def __init__(
        self, limits: Limits, promises: Promises, configuration: Configuration, cache: Books
    ) -> None:
        self.limits = limits
        self.promises = promises
        self.configuration = configuration
        self.cache = cache
        self.block_size = configuration.block_size
        self.pooled = cache.groups if cache.semantics.shared_pool else cache.groups[:1]
        """Groups that take from one pool what a request needs."""

        self.live: dict[int, LiveRequest] = {}
        """By arrival."""
        self.waiting: OrderedDict[int, LiveRequest] = OrderedDict()
        """Never admitted, by arrival."""
        self.running: dict[int, LiveRequest] = {}
        self.displaced: dict[int, LiveRequest] = {}
        """Preempted or swapped out."""
        self.flights: deque[Flight] = deque()
        self.arrived = 0
        self.owed_tokens = 0
        """Prompt and output tokens of all live requests."""
        self._arriving: Arrive | None = None

        self.iterations = 0
        self.items: list[Item] = []
        """Of the latest iteration."""
        self.retired: list[Item] = []
        """Of the step completed last."""
        self.entered: list[LiveRequest] = []
        """Requests that the latest iteration admitted, for the first time or again."""
        self.ended: list[LiveRequest] = []
        """Requests that the latest completion or cancellation ended."""

        self.deferred: tuple[int, ...] = ()
        """Waiting requests whose KV is said to be on its way, since …"""
        self.deferred_ns = 0
        self.copies: dict[int, TransferQueued] = {}
        """In flight, by their start."""
        self.channel_free_ns: dict[str, int] = {}
        """By kind of copy: when all that is queued will have been served."""

        self.figures = Figures()
        self.strays: list[str] = []
        """What an event said about requests or steps that there are not."""
        self.event_handlers: dict[type[Event], Callable[..., None]] = {
            RequestArrived: self._arrive,
            BlocksHeld: self._hold,
            Scheduled: self._schedule,
            Completed: self._complete,
            RequestCancelled: self._cancel,
            RunningReset: self._reset,
            Deferred: self._defer,
            TransferQueued: self._queue_copy,
            TransferDelivered: self._deliver,
        }

    # -- what checks ask -----------------------------------------------------------------------

    def rows(self, tokens: int) -> int:
        """Blocks of one pool that hold so many tokens."""
        if len(self.pooled) == 1:
            return (tokens + self.block_size - 1) // self.block_size
        return sum([-(-tokens // group.block_size) for group in self.pooled])

    def free_blocks(self) -> int:
        """Blocks that an allocation may take, in the group that has the fewest."""
        return min([group.free for group in self.cache.groups])

    def held_blocks(self, request: LiveRequest) -> int:
        """Blocks in the request's table, or of one pool in its tables."""
        if request.cache_request is None:
            return 0
        model = self.cache.requests.get(request.cache_request)
        return 0 if model is None else sum(map(len, model.tables[: len(self.pooled)]))

    def fenced(self) -> bool:
        """Whether blocks that were given back are not free yet."""
        return any(step.fenced for step in self.cache.steps)

    def held_back(self, request: LiveRequest) -> bool:
        """Whether it may not be admitted: it waits for KV, or behind one that does."""
        deferred = self.deferred
        return bool(deferred) and request.state == "waiting" and request.id >= deferred[0]

    def lacks_adapter(self, request: LiveRequest, running: Iterable[LiveRequest]) -> bool:
        """Whether its adapter is one too many beside these."""
        most = self.cache.semantics.adapters
        if not most or not request.adapter:
            return False
        used = adapters_of(running)
        return len(used) >= most and request.adapter not in used

    def on_its_way(self, request: LiveRequest) -> bool:
        """Whether the first block of its prompt that the device lacks is being copied towards it.

        Also if nobody told what its prompt is.
        """
        tiers, tags = self.cache.tiers, request.prompt()
        if tags is None:
            return True
        row = self.cache.longest_hit(tags)
        tag = (row + 1) * self.block_size - 1
        if tiers is None or tag >= len(tags) - 1:
            return False
        return tiers.answer(tags[tag]) == HIT_PENDING

    def only_copied(self) -> bool:
        """Whether blocks are held by copies in flight and by nobody else: they will be free."""
        tiers = self.cache.tiers
        if tiers is None or not self.cache.semantics.copies_hold:
            return False
        for copy in tiers.in_flight.values():
            if copy.source != "device" and copy.target != "device":
                continue
            refs = self.cache.groups[copy.group].refs
            blocks = copy.sources if copy.source == "device" else copy.targets
            if any(refs[block] == 1 for block in blocks):
                return True
        return False

    def least_tokens(self, request: LiveRequest) -> int:
        """The fewest tokens that an iteration may compute of a ready request."""
        return 1 if self.limits.chunked_prefill else request.pending

    def growth(self, request: LiveRequest) -> int:
        """Blocks that the fewest tokens of a running request take."""
        tokens = request.scheduled + self.least_tokens(request)
        return max(0, self.rows(tokens) - self.held_blocks(request))

    # -- arrival and end -------------------------------------------------------------------------

    def expect(self, operation: Arrive | None) -> None:
        """This operation is about to be applied: the next arrival is its request.

        None: it is over, refused perhaps, and arrivals to come are others.
        """
        self._arriving = operation

    def _arrive(self, event: RequestArrived) -> None:
        request = LiveRequest(event, self.iterations, self._arriving)
        self._arriving = None
        if event.request != self.arrived:
            self.strays.append(
                f"request {event.request} arrived, but the next rank of arrival is {self.arrived}"
            )
        self.arrived = event.request + 1
        self.live[request.id] = self.waiting[request.id] = request
        self.owed_tokens += request.prompt_tokens + request.output_tokens

    def _hold(self, event: BlocksHeld) -> None:
        request = self._known(event.request, "given blocks")
        if request is not None:
            request.cache_request = event.cache_request
            request.holds = True

    def _cancel(self, event: RequestCancelled) -> None:
        request = self._known(event.request, "cancelled")
        self.ended = []
        if request is not None:
            self._end(request)

    def _end(self, request: LiveRequest) -> None:
        request.ended = True
        del self.live[request.id]
        self._queue(request).pop(request.id, None)
        self.owed_tokens -= request.prompt_tokens + request.output_tokens
        self.ended.append(request)

    def _queue(self, request: LiveRequest) -> dict[int, LiveRequest]:
        if request.state == "waiting":
            return self.waiting
        return self.running if request.state == "running" else self.displaced

    def _known(self, number: int, what: str) -> LiveRequest | None:
        request = self.live.get(number)
        if request is None:
            self.strays.append(f"request {number}, which is not live, was {what}")
        return request

    # -- iterations ------------------------------------------------------------------------------

    def _schedule(self, event: Scheduled) -> None:
        self.iterations += 1
        for number in event.preempted:
            self._displace(number, "preempted")
        for number in event.swapped:
            self._displace(number, "swapped")
        self.items = items = []
        self.entered = []
        for part in event.parts:
            request = self._known(part.request, "run")
            if request is None:
                continue
            if request.state != "running":
                self._enter(request, part)
            items.append(self._run(request, part.tokens, event.now_ns))
        if event.step is not None:
            self.flights.append(Flight(event.step, items))
            self.figures.steps += 1
            self.figures.batch_size = len(event.parts)

    def _displace(self, number: int, state: QueueState) -> None:
        request = self._known(number, state)
        if request is None or request.state != "running":
            return  # PLAN
        del self.running[number]
        self.displaced[number] = request
        request.state = state
        request.preemptions += 1
        request.epoch += 1
        request.launched = 0
        self.figures.preemptions += 1
        if state == "swapped":
            self.figures.offloaded_blocks += self._swapped_blocks(request)
        else:
            request.computed = 0
        request.scheduled = request.computed

    def _reset(self, event: RunningReset) -> None:
        for number in event.preempted:
            self._displace(number, "preempted")
            request = self.live.get(number)
            if request is not None:
                request.sampling = 0
        dropped = set(event.preempted)
        for flight in self.flights:
            flight.items = [
                replace(item, samples=False) if item.request.id in dropped else item
                for item in flight.items
            ]

    def _swapped_blocks(self, request: LiveRequest) -> int:
        """Blocks with its computed tokens, in all groups."""
        return self.rows(request.computed) * len(self.cache.groups)

    def _enter(self, request: LiveRequest, part: Part) -> None:
        """It is admitted; a waiting or preempted one starts with its prefix hit."""
        figures = self.figures
        del self._queue(request)[request.id]
        first, swapped = request.state == "waiting", request.state == "swapped"
        request.state, request.holds = "running", False
        self.running[request.id] = request
        self.entered.append(request)
        if swapped:
            figures.promoted_blocks += self._swapped_blocks(request)
        else:
            model = self.cache.requests.get(part.cache_request)
            request.computed = 0 if model is None else model.computed
        request.scheduled = request.computed
        if not first:
            figures.resumptions += 1
            return
        request.cache_request = part.cache_request
        request.cached_tokens = request.computed
        request.tags = request.arrival = None  # the cache's books have them from here on
        figures.admissions += 1
        figures.prefix_cache_hits += request.computed
        figures.prefix_cache_queries += request.prompt_tokens

    def _run(self, request: LiveRequest, tokens: int, now_ns: int) -> Item:
        start, pending = request.scheduled, request.pending
        outputs = request.sampled + request.sampling
        samples = 0 < pending <= tokens and outputs < request.max_tokens
        end = request.scheduled = start + tokens
        if samples:
            request.sampling += 1
        request.launched += 1
        request.in_flight += 1
        request.last_run = self.iterations
        if request.first_run_ns is None:
            request.first_run_ns = now_ns
        return Item(request, tokens, start, end, pending, samples, request.epoch)

    def _complete(self, event: Completed) -> None:
        self.ended, self.retired = [], []
        if not self.flights or self.flights[0].number != event.step:
            self.strays.append(
                f"step {event.step} was completed, but the oldest in flight is "
                + (str(self.flights[0].number) if self.flights else "none")
            )
            return
        self.retired = self.flights.popleft().items
        for item in self.retired:
            request = item.request
            request.in_flight -= 1
            if request.ended:
                continue  # it was cancelled, or stopped before its last steps: void
            if request.epoch == item.epoch:
                request.computed = item.end
                request.launched -= 1
            if item.samples:
                self._sample(request, event.now_ns)

    def _sample(self, request: LiveRequest, now_ns: int) -> None:
        request.sampling -= 1
        request.sampled += 1
        request.last_token_ns = now_ns
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        if request.sampled >= request.output_tokens:
            self._end(request)

    # -- copies ------------------------------------------------------------------------------------

    def _defer(self, event: Deferred) -> None:
        live = [number for number in self.deferred if number in self.live]
        figures = self.figures
        figures.stall_ns += len(live) * (event.now_ns - self.deferred_ns)
        figures.stalls += len(event.requests)
        self.deferred, self.deferred_ns = event.requests, event.now_ns

    def _queue_copy(self, event: TransferQueued) -> None:
        self.copies[event.transfer] = event
        self.channel_free_ns[event.kind] = event.due_ns

    def _deliver(self, event: TransferDelivered) -> None:
        copy = self.copies.pop(event.transfer, None)
        if copy is None:
            return  # METER
        figures, kind = self.figures, copy.kind
        figures.copies[kind] += 1
        figures.copy_time_ns[kind] += event.now_ns - copy.now_ns
        figures.copy_busy_ns[kind] += service_ns(copy)


def adapters_of(requests: Iterable[LiveRequest]) -> set[int]:
    """The adapters that any of these has."""
    return {request.adapter for request in requests} - {0}


def service_ns(copy: TransferQueued) -> int:
    """How long a copy takes once its turn has come."""
    return copy.latency_ns + copy.bytes * copy.ps_per_byte // 1000
