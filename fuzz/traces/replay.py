"""Replays a request trace over a subject: first come, first served, preemption by recompute.

The driver knows a subject through the operations, their outcomes and a few figures of its view,
and it knows no check at all: the caller hands in ``perform``, which applies an operation and may
check what it did.  One iteration:

1. requests that have arrived by now join the waiting ones;
2. running requests whose output is complete are finished;
3. every other request that is computed to its end is grown by the token that it sampled.  Where
   that is refused, the most recently admitted request is preempted, and the growth tried again;
   a request may have to preempt itself (survey rows K08, K12, K14);
4. unless somebody was preempted (row K15), preempted requests are resumed, then waiting ones
   admitted, in the order of arrival, up to the first refusal.  The first in line is tried again
   once a running request has given back blocks, and (but for samples) only if the free ones may
   be enough by then;
5. one step is launched within the token budget and retired, and the clock moves by its cost.

Since the latest admitted is the first preempted and the first to come back, the running requests
are always in the order of their first admission, and all of them precede the preempted ones, which
precede the waiting ones.  Those that decode precede those in prefill, because steps serve the
oldest first.  The driver's books rest on that order: an index into ``running`` is the index that
the operations mean.

A request resumed after it had sampled a token computes that token's logits again and samples it
again; the token counts once.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvproof.fuzz.traces.clock import NS_PER_S, CostModel, VirtualClock
from kvproof.fuzz.traces.figures import (
    NO_HOST_TIER,
    NOT_EXPORTED,
    Gauge,
    Level,
    PrefixCacheHits,
    RequestRecords,
    SchedulerFigures,
    TraceResult,
    batch_sizes,
)
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.invariants.operations import (
    Admit,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Resume,
    Retire,
    kind_of,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.subject import Subject

Perform = Callable[[Operation], Outcome]

FINAL_LENGTH_EXCEEDS_POOL = "final_length_exceeds_pool"
"""Reason of rejection: prompt and output together need more blocks than the pool has."""

DEFAULT_BUDGET_TOKENS = 8192
DEFAULT_SAMPLE_STEPS = 16

VAIN_ATTEMPT_INTERVAL = 32
"""Of the admissions, and of the resumptions, that are bound to be refused, one in so many is
attempted, the first one always."""

_CHOICES = 16
"""Requests sample with this many different choices, so that equal prompts continue differently."""

_RESUME_FIRST = Resume(0)
_RETIRE = Retire()
_NEVER = 1 << 62
_MAY_WAIT = (NO_FREE_BLOCKS, TOO_MANY_REQUESTS)


class _StoppedError(Exception):
    """The subject's answer leaves the driver no way to go on."""


class _Sequence:
    """One admitted request.

    In prefill ``length`` and ``computed`` hold.  While it decodes, it gets one token in each
    round of growth, so its length is ``length_less_round`` plus the number of rounds so far:
    nothing is counted by token.
    """

    __slots__ = (
        "computed",
        "final_tokens",
        "identity",
        "last_round",
        "length",
        "length_less_round",
        "number",
    )

    def __init__(self, number: int, identity: int, length: int, final_tokens: int) -> None:
        self.number = number
        """Position in the trace."""
        self.identity = identity
        """What the subject calls it."""
        self.length = length
        self.computed = 0
        self.final_tokens = final_tokens
        self.length_less_round = 0
        self.last_round = _NEVER
        """The round after which it has its final length."""


class _GrowOperations:
    """Grow operations by choice and index, each made once: millions are performed."""

    def __init__(self) -> None:
        self._by_choice: list[list[Grow]] = [[] for _ in range(_CHOICES)]

    def get(self, choice: int, index: int) -> Grow:
        row = self._by_choice[choice % _CHOICES]
        while len(row) <= index:
            row.append(Grow(request=len(row), tokens=1, choice=choice % _CHOICES))
        return row[index]


class Replay:
    """One replay.  ``run`` does it; ``result`` may be asked at any time, also after an error."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        subject: Subject,
        perform: Perform,
        *,
        cost: CostModel | None = None,
        clock: VirtualClock | None = None,
        budget_tokens: int = DEFAULT_BUDGET_TOKENS,
        cache_dtype: str = "bfloat16",
        sample_steps: int = DEFAULT_SAMPLE_STEPS,
    ) -> None:
        """``perform`` applies an operation to ``subject``; what it raises ends the run.

        ``budget_tokens`` bounds the tokens of a step, and with them the running requests.
        Block figures are read from the subject every ``sample_steps`` steps, and whenever it is
        out of blocks.  Raises ``ValueError`` if one of these two is not positive.
        """
        if budget_tokens < 1 or sample_steps < 1:
            raise ValueError("budget_tokens and sample_steps must be positive")
        self.finished = 0
        self.steps = 0
        self.rejections: Counter[str] = Counter()
        self.stopped: str | None = None
        self._trace = trace
        self._subject = subject
        self._perform = perform
        self._groups = subject.semantics.groups
        self._cost = cost or CostModel()
        self._clock = clock or VirtualClock()
        self._cache_dtype = cache_dtype
        self._sample_steps = sample_steps
        self._launch = Launch(budget_tokens)
        self._running_limit = min(subject.configuration.requests, budget_tokens)
        self._records = _records_of(trace)
        self._arrived = 0
        self._waiting: deque[int] = deque()
        """Numbers of requests that arrived and were never admitted."""
        self._preempted: deque[_Sequence] = deque()
        self._blocked = False
        """The first in line cannot be admitted before a block is given back."""
        self._vain: Counter[str] = Counter()
        """Hopeless attempts so far, by kind; most of them were not made."""
        self._running: list[_Sequence] = []
        self._decoding = 0
        """This many of the running ones, from the first, are computed to their end."""
        self._held_sources: Counter[int] = Counter()
        """Prompt segments of the running ones, by source."""
        self._grows: list[Grow] = []
        """The next growth of each decoding one."""
        self._grow_operations = _GrowOperations()
        self._round = 0
        self._next_last_round = _NEVER
        self._start_figures()

    def _start_figures(self) -> None:
        self._computed_tokens = 0
        """Of the running requests."""
        self._hits = self._queries = self._resumed_hits = self._resumed_queries = 0
        self._resumptions = 0
        self._active, self._queued, self._live = Level(), Level(), Level()
        self._batch_sequences, self._batch_tokens = array("I"), array("Q")
        self._blocks_free = Level(self._read_free_blocks())

    def run(self) -> TraceResult:
        """Replay to the end of the trace, or until the subject stops it; see ``stopped``."""
        try:
            while self._iterate():
                pass
        except _StoppedError as error:
            self.stopped = str(error)
        return self.result()

    # -- one iteration -------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """Do one iteration; False when nothing is left to do."""
        self._take_arrivals()
        if self._round >= self._next_last_round:
            self._finish_complete()
        if self._grow() and not self._blocked:
            self._admit()
        if self._running:
            self._step()
            return True
        if self._waiting or self._preempted:
            _stop("the first in line is refused although nothing runs")
        if self._arrived == len(self._trace):
            return False
        self._record_levels()
        self._sample_blocks()
        self._clock.advance_to(self._records.arrival_ns[self._arrived])
        return True

    def _take_arrivals(self) -> None:
        arrival_ns, now_ns = self._records.arrival_ns, self._clock.now_ns
        while self._arrived < len(arrival_ns) and arrival_ns[self._arrived] <= now_ns:
            number = self._arrived
            self._arrived += 1
            if self._blocks_for(self._trace[number].final_tokens) > self._pool_blocks():
                # It would be preempted for ever: in the end it cannot fit even alone (row K17).
                self.rejections[FINAL_LENGTH_EXCEEDS_POOL] += 1
            else:
                self._waiting.append(number)

    def _finish_complete(self) -> None:
        index = 0
        while index < self._decoding:
            if self._running[index].last_round <= self._round:
                self._finish(index)
            else:
                index += 1
        self._list_grows()

    def _finish(self, index: int) -> None:
        sequence = self._running[index]
        self._records.allocated_blocks[sequence.number] = self._table_length(sequence)
        self._require(Finish(index))
        self._records.finished_ns[sequence.number] = self._clock.now_ns
        self._computed_tokens -= sequence.final_tokens
        del self._running[index]
        self._decoding -= 1
        self.finished += 1
        self._count_released(sequence)

    def _list_grows(self) -> None:
        """Bring the growths up to date after the decoding requests have changed."""
        decoding = self._running[: self._decoding]
        get = self._grow_operations.get
        self._grows = [get(sequence.number, index) for index, sequence in enumerate(decoding)]
        self._next_last_round = min((s.last_round for s in decoding), default=_NEVER)

    # -- growth and preemption -----------------------------------------------------------------

    def _grow(self) -> bool:
        """Grow each decoding request by one token; False if somebody was preempted for it."""
        perform = self._perform
        for index, operation in enumerate(self._grows):
            outcome = perform(operation)
            if outcome.status != "done":
                self._grow_by_preempting(index, outcome)
                return False
        self._round += 1
        return True

    def _grow_by_preempting(self, index: int, outcome: Outcome) -> None:
        """Go on with a round of growth that was refused at ``index``."""
        self._sample_blocks()
        while True:
            if outcome.status == "done":
                index += 1
            else:
                self._preempt_latest(outcome)
            if index >= self._decoding:
                break
            outcome = self._perform(self._grows[index])
        self._round += 1
        self._list_grows()

    def _preempt_latest(self, refusal: Outcome) -> None:
        if refusal.reason != NO_FREE_BLOCKS:
            _stop(f"grow is {refusal.status}: {refusal.reason}")
        if len(self._running) == 1:
            _stop("grow is refused to a request that runs alone and fits the pool")
        sequence = self._running.pop()
        index = len(self._running)
        if index < self._decoding:
            # Not grown in this round yet: growth goes from the oldest to the latest.
            sequence.length = sequence.computed = sequence.length_less_round + self._round
            sequence.last_round = _NEVER
            self._decoding -= 1
            self._grows.pop()
        self._require(Preempt(index))
        self._computed_tokens -= sequence.computed
        self._records.preemptions[sequence.number] += 1
        self._preempted.appendleft(sequence)
        self._count_released(sequence)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Resume, then admit, in order, up to the first refusal."""
        while len(self._running) < self._running_limit and not self._blocked:
            if self._preempted:
                first = self._preempted[0]
                number, length = first.number, first.length
            elif self._waiting:
                number = self._waiting[0]
                length = self._trace[number].prompt_tokens
            else:
                break
            if self._is_hopeless(number, length) and not self._asks_in_vain():
                self._blocked = True
            elif self._preempted:
                self._resume_first()
            else:
                self._admit_first()

    def _is_hopeless(self, number: int, length: int) -> bool:
        """Whether the free blocks are too few even if every prefix in use is a hit.

        A hit spares a free block only while another request references it (row R16), and only
        prompts are shared.  Asking in vain costs the subject, and whoever checks it, the look-up
        of a whole prompt: this bound saves nearly all of that and delays nobody.
        """
        shared_tokens = 0
        for segment in self._trace[number].prompt:
            if segment.source not in self._held_sources:
                break
            shared_tokens += segment.length
        shared = shared_tokens // self._subject.configuration.block_size
        needed = self._blocks_for(length) - shared
        return needed > min(map(self._subject.view().free_count, range(self._groups)))

    def _asks_in_vain(self) -> bool:
        """Whether to ask the subject all the same: refusals are to be checked, too."""
        if not self._running:
            return True  # no excuse for waiting: the subject must say no itself
        kind = "resume" if self._preempted else "admit"
        self._vain[kind] += 1
        return self._vain[kind] % VAIN_ATTEMPT_INTERVAL == 1

    def _resume_first(self) -> None:
        outcome = self._perform(_RESUME_FIRST)
        if outcome.status != "done":
            self._wait(_RESUME_FIRST, outcome)
            return
        sequence = self._preempted.popleft()
        self._resumptions += 1
        self._resumed_hits += outcome.cached_tokens
        self._resumed_queries += sequence.length
        self._start(sequence, outcome.cached_tokens)

    def _admit_first(self) -> None:
        number = self._waiting[0]
        request = self._trace[number]
        operation = Admit(request.prompt)
        outcome = self._perform(operation)
        if outcome.reason == LARGER_THAN_POOL:
            self.rejections[LARGER_THAN_POOL] += 1
            self._waiting.popleft()
            return
        if outcome.status != "done":
            self._wait(operation, outcome)
            return
        if outcome.request is None:
            _stop("admit does not name the request that it created")
        self._waiting.popleft()
        self._records.admitted_ns[number] = self._clock.now_ns
        self._records.cached_tokens[number] = outcome.cached_tokens
        self._hits += outcome.cached_tokens
        self._queries += request.prompt_tokens
        sequence = _Sequence(number, outcome.request, request.prompt_tokens, request.final_tokens)
        self._start(sequence, outcome.cached_tokens)

    def _start(self, sequence: _Sequence, cached_tokens: int) -> None:
        sequence.computed = cached_tokens
        self._computed_tokens += cached_tokens
        self._running.append(sequence)
        self._held_sources.update(s.source for s in self._trace[sequence.number].prompt)

    def _count_released(self, sequence: _Sequence) -> None:
        """The subject took back the blocks of ``sequence``: the first in line has a chance."""
        held = self._held_sources
        for segment in self._trace[sequence.number].prompt:
            held[segment.source] -= 1
            if not held[segment.source]:
                del held[segment.source]
        self._blocked = False

    def _wait(self, operation: Operation, outcome: Outcome) -> None:
        if outcome.reason not in _MAY_WAIT:
            _stop(f"{kind_of(operation)} is {outcome.status}: {outcome.reason}")
        self._blocked = True

    # -- the step ------------------------------------------------------------------------------

    def _step(self) -> None:
        """Launch and retire one step, and let its time pass."""
        decoding, live = self._decoding, self._computed_tokens
        self._record_levels()
        if self.steps % self._sample_steps == 0:
            self._sample_blocks()
        chunks, prefill_tokens, idle_tokens = 0, 0, 0
        if decoding < len(self._running):
            chunks, prefill_tokens, idle_tokens = self._schedule_prefills()
        tokens = decoding + prefill_tokens
        scheduled = self._require(self._launch).count
        if scheduled != tokens:
            _stop(f"launch schedules {scheduled} tokens, oldest first would be {tokens}")
        self._require(_RETIRE)
        self._computed_tokens = live + tokens
        kv_tokens_read = live + tokens - idle_tokens
        self._clock.advance(self._cost.duration_ns(prefill_tokens, decoding, kv_tokens_read))
        if chunks:
            self._start_decoding()
        self._batch_sequences.append(decoding + chunks)
        self._batch_tokens.append(tokens)
        self.steps += 1

    def _schedule_prefills(self) -> tuple[int, int, int]:
        """Spend what decoding leaves of the budget on prefills, oldest first.

        Returns how many get a chunk, the tokens of the chunks, and the computed tokens of those
        that get none.
        """
        budget = left = self._launch.budget - self._decoding
        chunks = idle_tokens = 0
        for sequence in self._running[self._decoding :]:
            tokens = min(left, sequence.length - sequence.computed)
            if tokens:
                sequence.computed += tokens
                left -= tokens
                chunks += 1
            else:
                idle_tokens += sequence.computed
        return chunks, budget - left, idle_tokens

    def _start_decoding(self) -> None:
        """Let the prefills that are complete decode; each has sampled a token."""
        before = self._decoding
        for sequence in self._running[before:]:
            if sequence.computed < sequence.length:
                break
            if self._records.first_token_ns[sequence.number] < 0:
                self._records.first_token_ns[sequence.number] = self._clock.now_ns
            sequence.length_less_round = sequence.length - self._round
            sequence.last_round = sequence.final_tokens - sequence.length_less_round
            self._decoding += 1
        if self._decoding > before:
            self._list_grows()

    def _require(self, operation: Operation) -> Outcome:
        """Perform an operation that a subject must not refuse."""
        outcome = self._perform(operation)
        if outcome.status != "done":
            _stop(f"{kind_of(operation)} is {outcome.status}: {outcome.reason}")
        return outcome

    # -- figures -------------------------------------------------------------------------------

    def _pool_blocks(self) -> int:
        return self._subject.configuration.blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._subject.configuration.block_size)

    def _read_free_blocks(self) -> int:
        view = self._subject.view()
        free = view.metrics().get("kv_blocks_free")
        return sum(map(view.free_count, range(self._groups))) if free is None else free

    def _table_length(self, sequence: _Sequence) -> int:
        view = self._subject.view()
        return sum(len(view.table(sequence.identity, group)) for group in range(self._groups))

    def _sample_blocks(self) -> None:
        self._blocks_free.set(self._read_free_blocks(), self._clock.now_ns)

    def _record_levels(self) -> None:
        now_ns = self._clock.now_ns
        self._active.set(len(self._running), now_ns)
        self._queued.set(len(self._waiting) + len(self._preempted), now_ns)
        self._live.set(self._computed_tokens, now_ns)

    def result(self) -> TraceResult:
        """The figures up to now."""
        return TraceResult(
            requests=len(self._trace),
            finished=self.finished,
            rejected=self.rejections.total(),
            rejections=dict(self.rejections),
            stopped=self.stopped,
            steps=self.steps,
            virtual_seconds=self._clock.now_s,
            metrics=self._scheduler_figures(),
            percentiles=self._records.percentiles(),
            attention_mode="full",
            cache_dtype=self._cache_dtype,
            cost=self._cost,
        )

    def _scheduler_figures(self) -> SchedulerFigures:
        end_ns = self._clock.now_ns
        configuration = self._subject.configuration
        block_bytes = configuration.block_size * configuration.kv_bytes_per_token
        total = configuration.blocks * self._groups
        free = self._blocks_free.gauge(end_ns)
        used = Gauge(total - free.mean, total - free.maximum, total - free.minimum)
        return SchedulerFigures(
            kv_capacity_bytes=total * block_bytes,
            kv_bytes_used=used.times(block_bytes),
            kv_blocks_total=total,
            kv_blocks_free=free,
            live_cached_tokens=self._live.gauge(end_ns),
            active_sequences=self._active.gauge(end_ns),
            waiting_sequences=self._queued.gauge(end_ns),
            admissions=sum(time_ns >= 0 for time_ns in self._records.admitted_ns),
            preemptions=sum(self._records.preemptions),
            evictions=self._subject.view().metrics().get("evictions", NOT_EXPORTED),
            prefix_cache_hits=PrefixCacheHits(
                tokens=self._hits,
                queries_tokens=self._queries,
                resumed_tokens=self._resumed_hits,
                resumed_queries_tokens=self._resumed_queries,
            ),
            host_offload_bytes=NO_HOST_TIER,
            host_promotions=NO_HOST_TIER,
            batch_size_by_iteration=batch_sizes(self._batch_sequences, self._batch_tokens),
            resumptions=self._resumptions,
        )


def replay(
    trace: Sequence[TraceRequest],
    subject: Subject,
    perform: Perform,
    *,
    cost: CostModel | None = None,
    budget_tokens: int = DEFAULT_BUDGET_TOKENS,
    cache_dtype: str = "bfloat16",
) -> TraceResult:
    """Replay ``trace`` over ``subject`` and return the figures; see :class:`Replay`."""
    return Replay(
        trace,
        subject,
        perform,
        cost=cost,
        budget_tokens=budget_tokens,
        cache_dtype=cache_dtype,
    ).run()


def _records_of(trace: Sequence[TraceRequest]) -> RequestRecords:
    records = RequestRecords(len(trace))
    for number, request in enumerate(trace):
        records.arrival_ns[number] = round(request.arrival_s * NS_PER_S)
        records.input_tokens[number] = request.prompt_tokens
        records.output_tokens[number] = request.output_tokens
    return records


def _stop(reason: str) -> NoReturn:
    raise _StoppedError(reason)
