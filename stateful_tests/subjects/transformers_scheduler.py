"""Continuous batching of Hugging Face transformers as a subject: the real engine, unmodified.

Its scheduler decides by itself, and a tiny model of its own computes on CPU; the adapter plays the
clients, the loop and the sampler.  What the engine does to its cache is overheard at the methods of
``PagedAttentionCache`` (:mod:`kvproof.stateful_tests.subjects.transformers_overheard`), and told as
operations of a cache, each at the moment when it happens; iterations, samples and ends are told as
a scheduler's events.

How transformers maps:

* **One iteration** is ``prepare_next_batch``, ``_generation_step`` and, with the operation retire,
  ``update_batch``.  The engine has one step in flight, and does nothing else meanwhile.
* **What a step reads and writes** is taken from the indices that the engine made for its model.
* **Blocks become findable in** ``update_batch``, those of a request that goes on only; an equal
  block, if there is one, then takes their place in the table (``Semantics.duplicates``).
* **Soft resets are preemptions.**  All that is in ``cached_blocks`` is free, but may be taken only
  once the engine has evicted it, which it does when it fails to allocate.
* **Forks.**  ``Arrive.samples`` is one more than ``num_children``.  A request is forked when all of
  its prompt but one token is computed, and the requests that come of it arrive then; those for
  which no block is left are computed from scratch.
* A request that the engine finds a prefix hit or a parent for holds blocks before it is first run.
  To the scheduler's checks it waits until then (``BlocksHeld``).
* **A cancellation** takes effect when the next batch is prepared, as the engine's does.
* **What a client gets** are the outputs that the engine delivers, which have to be its prompt and
  what was sampled for it.  Two requests at the same place sample the same only if their numbers of
  arrival are both odd, or both even; a forked one has a number, and so a choice, of its own.
* Pages have at least 4 tokens; those of an odd number of tokens come in sectors of two.  The limit
  of running requests is ``max_requests_per_batch``, which bounds a step: more may be active.
* What can never fit the adapter refuses, in place of a client: the engine accepts it, and fails
  later.
* The keys of transformers know no salts, so prompts share prefixes whatever their salt.
* The bytes themselves are looked at, too: the KV that a step reads has to be that of the request's
  tokens (``ForeignKv``), and the logits that it samples from those that the model computes from
  these tokens alone, without cache and engine (``ForeignLogits``).
* Time stands still: figures of time are 0.

``transformers:offload`` has a host to which requests are swapped out
(:mod:`kvproof.stateful_tests.subjects.transformers_offload`), ``transformers:hybrid`` a layer with
a window beside one of full attention (:mod:`kvproof.stateful_tests.subjects.transformers_hybrid`).

Not driven: windows alone, both of these together, asynchronous batching (which needs an
accelerator), attention by kernels that take no mask, and the choice of a token by its logits.

transformers is imported when the first subject is built, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvproof.invariants.events import StepItem
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Arrive,
    Operation,
    Preempt,
)
from kvproof.invariants.outcomes import (
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.scheduling.vocabulary import (
    BlocksHeld,
    Completed,
    Part,
    Promises,
    RequestArrived,
    RequestCancelled,
    Scheduled,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.overheard_scheduler import OverheardScheduler
from kvproof.stateful_tests.subjects.transformers_hybrid import HybridCache
from kvproof.stateful_tests.subjects.transformers_loading import (
    CHILD,
    NAME,
    POLICIES,
    Kind,
    fitted,
    load_transformers,
)
from kvproof.stateful_tests.subjects.transformers_model import WINDOW
from kvproof.stateful_tests.subjects.transformers_offload import OffloadingCache
from kvproof.stateful_tests.subjects.transformers_overheard import OverheardCache
from kvproof.stateful_tests.subjects.transformers_view import Job, TransformersView

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import RequestState


def transformers_factory(
    policy: str, kind: Kind = ""
) -> Callable[[Configuration], TransformersSubject]:
    """A subject of that kind, with that scheduler of transformers."""
    load_transformers()  # now, so that a missing package is bad input and not a crash
    return partial(TransformersSubject, policy=policy, kind=kind)


class ForeignKv(Exception):
    """The model finds bytes that are not its request's."""


class ForeignLogits(Exception):
    """What is sampled from does not follow from the request's tokens."""


_CACHES: dict[Kind, type[OverheardCache]] = {
    "": OverheardCache,
    "offload": OffloadingCache,
    "hybrid": HybridCache,
}
_WRONG_PLACE = -1
"""No block: a position at another place of its block than its own."""


class TransformersSubject(OverheardScheduler):
    """Drives one engine as the thread of its manager would, one operation at a time.

    Raises SubjectUnavailable where transformers is not installed in a version that is known.
    """

    capabilities = frozenset(("arrive", "schedule", "run", "retire", "abort"))

    def __init__(
        self,
        configuration: Configuration,
        *,
        policy: str = POLICIES[0],
        kind: Kind = "",
    ) -> None:
        self.transformers = load_transformers()
        # Nobody asks what an admission would take; beside a window nothing is findable.
        self.unjudged = frozenset(("FIT", "KEY") if kind == "hybrid" else ("FIT",))
        words = (NAME, kind, "" if policy == POLICIES[0] else policy)
        super().__init__(":".join(filter(None, words)), fitted(configuration, kind), Promises())
        self.model = self.transformers.hybrid if kind == "hybrid" else self.transformers.full
        self.processor: Any = self.transformers.new_processor(
            self.configuration, policy, configuration.requests, self.model
        )
        self.scheduler = self.processor.scheduler
        cache = _CACHES[kind]
        self._overhear(cache(self.configuration, self.processor, listener=self))
        self.jobs: dict[int, Job] = {}
        """Live requests, by arrival …"""
        self.jobs_by_name: dict[str, Job] = {}
        self.in_flight: dict[str, int] = {}
        """Tokens of the step in flight, by request."""
        self.prefix_hits = self.prefix_queries = self.steps = 0
        self.offloaded = self.restored = 0
        """Blocks of requests that were swapped out, and in."""
        self.state_view = TransformersView(self)
        self._step: int | None = None
        """In flight."""
        self._sent: dict[str, Job] = {}
        """By name: requests of which further samples were wanted, and are to come."""
        self._preempted: list[int] = []
        self._swapped: list[int] = []
        """Of the requests that ran, those that the present iteration preempted, and swapped out."""
        self._logits: Any = None
        """What the present step samples from, one row for each token."""
        runner = self.processor.model_runner
        self._sampler: Callable[[Any, Any], None] = runner._sample
        runner._sample = self._overhear_logits
        self._clear_cancelled: Callable[[], Any] = self.scheduler.clear_cancelled_requests
        self.scheduler.clear_cancelled_requests = self._cancelled
        self._handlers[Abort] = self._abort

    # -- what the cache below overhears --------------------------------------------------------

    def admission(self, name: str, slots: int) -> Admit:
        return Admit(self.jobs_by_name[name].operation.prompt, slots=slots)

    def choice(self, name: str) -> int:
        return self.jobs_by_name[name].choice

    def overheard(self, operation: Operation, name: str | None) -> None:
        """The engine did this to its cache, for that request."""
        outcome = self._perform(operation)
        job = self.jobs_by_name.get(name) if name is not None else None
        if job is None:
            return
        if isinstance(operation, Preempt) and job.ran and not job.displaced:
            job.displaced, job.swapped = True, operation.swap
            job.preemptions += 1
            (self._swapped if job.swapped else self._preempted).append(job.number)
            self.offloaded += job.swapped * self._rows_of(job)
        elif outcome.cached_tokens or isinstance(operation, Admit):
            self._holds(job)

    def cancelled(self, name: str) -> None:
        self._cancel(self.jobs_by_name[name])

    def _rows_of(self, job: Job) -> int:
        """Blocks of all that was computed of it when it was swapped out."""
        suspended: int = self.cache.by_name[job.name].suspended
        return -(-suspended // self.configuration.block_size)

    def _holds(self, job: Job) -> None:
        self._emit(BlocksHeld(job.number, self.cache.by_name[job.name].number))

    # -- the clients ---------------------------------------------------------------------------

    def _arrive(self, operation: Arrive) -> Outcome:
        prompt = prompt_length(operation.prompt)
        refusal = self._never_fits(operation, prompt)
        if refusal:
            return Outcome("refused", refusal)
        state = self.transformers.new_request(self._arrivals, operation)
        job = self._join(state.request_id, operation, state.initial_tokens)
        if operation.samples > 1:
            self._sent[job.name] = job
        self.scheduler.add_waiting_request(state)
        return Outcome("done", None, job.number)

    def _join(self, name: str, operation: Arrive, prompt: Sequence[int]) -> Job:
        job = Job(self._arrivals, name, operation, list(prompt))
        self._arrivals += 1
        self.jobs[job.number] = self.jobs_by_name[name] = job
        self._emit(
            RequestArrived(
                job.number,
                0,
                len(prompt),
                job.max_tokens,
                operation.output,
                operation.priority,
            )
        )
        return job

    def _abort(self, operation: Abort) -> Outcome:
        if not self.jobs:
            return SKIPPED
        job = list(self.jobs.values())[operation.request % len(self.jobs)]
        self.scheduler.set_request_cancellation(job.name)
        return Outcome("done", None, job.number)

    def _cancelled(self) -> Any:
        """The engine looks at what was cancelled since its last batch.

        That is a set of strings, whose order differs from process to process: here it has one.
        """
        names = self.scheduler._requests_to_cancel
        self.scheduler._requests_to_cancel = dict.fromkeys(sorted(names))
        states = self._clear_cancelled()
        for state in states:
            live = self.cache.by_name.get(state.request_id)
            if live is None or not live.swapped:  # else the host still has it
                self._cancel(self.jobs_by_name[state.request_id])
        return states

    def _cancel(self, job: Job) -> None:
        self._forget(job)
        self._emit(RequestCancelled(job.number))

    def _forget(self, job: Job) -> None:
        del self.jobs[job.number], self.jobs_by_name[job.name]

    # -- the loop ------------------------------------------------------------------------------

    def _schedule(self) -> Outcome:
        if self._step is not None:
            return Outcome("refused", RUN_AHEAD_LIMIT)
        if not self.jobs:
            return Outcome("refused", NOTHING_TO_RUN)
        self._preempted, self._swapped = [], []
        self.cache.at_work = True
        items: list[tuple[Job, StepItem]] = []
        sampling: list[Job] = []
        if self.processor.prepare_next_batch():
            self.processor._generation_step(self.model.model)
            sampling = self._sample()
            items = self._items()
        admitted, resumed = self._entered(items)
        if items:
            self._step = self.steps
            self.steps += 1
            self.batch_size = len(items)
            self.in_flight = {job.name: item.end - item.start for job, item in items}
            self.cache.launched(self._step, [item for _, item in items])
        self.preemptions += len(self._preempted) + len(self._swapped)
        self._emit(
            Scheduled(
                self._iterations,
                0,
                self._step,
                tuple([Part(job.number, i.end - i.start, i.request) for job, i in items]),
                admitted,
                resumed,
                tuple(self._preempted),
                tuple(self._swapped),
            )
        )
        self._iterations += 1
        if items:
            self._compare_logits(sampling)
            self.cache.retired()
        self.cache.at_work = False
        return Outcome("done", count=sum(self.in_flight.values()))

    def _entered(
        self, items: Sequence[tuple[Job, StepItem]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of what is run: the requests that are run for the first time, and those again."""
        admitted, resumed = [], []
        for job, item in items:
            if not job.ran:
                job.ran, job.cached = True, item.start
                self.prefix_hits += item.start
                self.prefix_queries += len(job.prompt)
                admitted.append(job.number)
            elif job.displaced:
                resumed.append(job.number)
                self.restored += job.swapped * -(-item.start // self.configuration.block_size)
            job.displaced = job.swapped = False
        self.admissions += len(admitted)
        self.resumptions += len(resumed)
        return tuple(admitted), tuple(resumed)

    @property
    def _steps_in_flight(self) -> int:
        return int(self._step is not None)

    def _retire(self) -> Outcome:
        if self._step is None:
            return SKIPPED
        self.cache.at_work = True
        self.processor.update_batch()
        self.cache.at_work = False
        step, self._step, self.in_flight = self._step, None, {}
        sampled, finished, misdelivered = self._deliver()
        for job in finished:
            self._forget(job)
        ended = tuple([job.number for job in finished])
        self._emit(Completed(step, 0, tuple(sampled), ended, tuple(misdelivered)))
        self._fork()
        return Outcome("done", count=len(sampled))

    def _deliver(self) -> tuple[list[int], list[Job], list[int]]:
        """Output tokens and ends, as clients get them, and who got what is not its own."""
        sampled, finished, misdelivered = [], [], []
        outputs = self.processor.output_router.output_queue
        while not outputs.empty():
            output = outputs.get()
            job = self.jobs_by_name[output.request_id]
            sampled += [job.number] * job.receive(output.generated_tokens)
            if not job.owns(output.prompt_ids, output.generated_tokens):
                misdelivered.append(job.number)
            if output.is_finished():
                finished.append(job)
        return sampled, finished, misdelivered

    def _fork(self) -> None:
        """Requests that are new in the engine's queues are those of further samples."""
        for name in (*self.scheduler.active_requests, *self.scheduler.waiting_requests):
            if name in self.jobs_by_name:
                continue
            parent, _, _ = name.partition(CHILD)
            found = self._sent[parent]
            job = self._join(name, found.operation, found.prompt)
            if name in self.cache.by_name:
                self._holds(job)

    # -- the model -----------------------------------------------------------------------------

    def _batch(self) -> list[tuple[Job, RequestState, int, bool]]:
        """Requests of the present batch, their tokens, and whether they get an output token."""
        found = self.processor.inputs_and_outputs.requests_in_batch
        return [
            (self.jobs_by_name[f.state.request_id], f.state, f.query_length, f.has_new_token)
            for f in found
        ]

    def _overhear_logits(self, scores: Any, output_ids: Any) -> None:
        self._logits = scores[0]
        self._sampler(scores, output_ids)

    def _sample(self) -> list[Job]:
        """The adapter decides what the model samples, for these requests in this order."""
        output_ids = self.processor.inputs_and_outputs.output_ids
        sampling = [job for job, _, _, samples in self._batch() if samples]
        for index, job in enumerate(sampling):
            output_ids[0, index] = job.sample()
        return sampling

    def _compare_logits(self, sampling: Sequence[Job]) -> None:
        """What the model samples from are the logits after all tokens of the request."""
        sequences = [[*job.prompt, *job.sampled[:-1]] for job in sampling]
        wrong = self.model.misled(sequences, self._logits) if sampling else None
        if wrong is not None:
            raise ForeignLogits(
                f"request {sampling[wrong].number} samples position {len(sequences[wrong])} from "
                "other logits than the model computes from its tokens alone"
            )

    def _items(self) -> list[tuple[Job, StepItem]]:
        """What the step computed of each request, and through which table."""
        written, read = self._indices(self.cache.allocator)
        ring = self._ring_slots() if len(self.model.windows) > 1 else None
        items, writes, reads = [], 0, 0
        for job, state, tokens, _ in self._batch():
            end = state.position_offset
            start = end - tokens
            slots = read[reads : reads + end] if read else []
            own = written[writes : writes + tokens]
            writes, reads = writes + tokens, reads + end
            if not tokens:
                continue  # all that is computed already is read once more, for nothing
            live = self.cache.by_name[job.name]
            table = self._table(job.name, slots[:start] + own, slots)
            self._compare(job, end, slots[:start] + own if ring is None else ring[job.name])
            items.append((job, StepItem(live.number, live.epoch, start, end, (table,))))
        return items

    def _indices(self, allocator: Any) -> tuple[list[int], list[int]]:
        """Slots that the step wrote and read in that group, request after request."""
        places, group = self.processor.inputs_and_outputs, allocator.index
        written = places.write_index_storage[group, : places.true_write_sizes[group]]
        read = places.read_index_storage[group, : places.true_read_sizes[group]]
        return written.tolist(), read.tolist()

    def _ring_slots(self) -> dict[str, list[int]]:
        """By request: the slots of the last positions that its ring holds after the step."""
        written, read = self._indices(self.cache.ring)
        found, writes, reads = {}, 0, 0
        for job, state, tokens, _ in self._batch():
            cached = min(state.position_offset - tokens, WINDOW - 1)
            slots = read[reads : reads + cached] + written[writes : writes + tokens]
            writes, reads = writes + tokens, reads + cached + tokens
            found[job.name] = slots[-min(state.position_offset, WINDOW) :]
        return found

    def _compare(self, job: Job, end: int, slots: Sequence[int]) -> None:
        """What the model finds at the last positions of a request is the KV of its tokens."""
        keys, values = self.cache.cache.layer_to_allocator[0]._kv_token_views[0]
        torch = self.transformers.torch
        kv = torch.stack((keys[slots, 0], values[slots, 0]), 1)
        tokens = [*job.prompt, *job.sampled][:end]
        position = self.model.foreign(tokens, kv)
        if position is not None:
            raise ForeignKv(
                f"request {job.number} reads position {position} from slot "
                f"{slots[position - end]}, which holds the KV of another token"
            )

    def _table(self, name: str, slots: Sequence[int], read: Sequence[int]) -> list[int]:
        """The block of each row, by the slots of its positions.

        If they are not all where the row's own block has them, or a position is read elsewhere
        than it was written, the table names another block, or none, for that row.
        """
        size, stride = self.configuration.block_size, self.cache.allocator.block_physical_stride
        table = list(self.cache.allocator.block_table[name])
        for place in (slots, read):
            for position, slot in enumerate(place):
                row, offset = divmod(position, size)
                if row >= len(table) or slot != table[row] * stride + offset:
                    block = slot // stride
                    wrong = row < len(table) and block == table[row]
                    table[row : row + 1] = [_WRONG_PLACE if wrong else block]
                    return table
        return table
