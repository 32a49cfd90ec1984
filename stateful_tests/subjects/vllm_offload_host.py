"""vLLM's CPUOffloadingManager in the place of the engine's host pool.

:class:`VllmHost` answers what the hierarchy asks of its pool, each time from the manager's state;
of its own it keeps only what is needed to call the manager and to tell its evictions: the jobs in
flight, and which chunk each key was stored in.

How the manager is called is what vLLM's OffloadingConnectorScheduler promises it:

* Every copy is a request of its own: a ``ReqContext`` that begins with ``on_new_request`` and ends
  with ``on_request_finished`` when its copy has ended; it is not used after that.  The keys of one
  call are different ones, and their positions are told as the connector tells them, so the order
  in which chunks were used last is that in which copies ended, a copy's first key last.
* Each prepared job is completed once, by the copy that it was prepared for: the manager matches
  completions by key, and relies on its caller to drop those that come late, or twice.
* It is reset only when no job is in flight.

The manager has no call to evict on request.  What stands for it is a store of somebody else's,
under keys of nobody's, that is just large enough to evict so many chunks, and fails.

vLLM is imported when the first subject is built, not with this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from kvproof.invariants.events import Event, SlotsEvicted
from kvproof.invariants.outcomes import Answer
from kvproof.invariants.subject import EvictionOrder
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.vllm_package import NAME as MANAGER
from kvproof.stateful_tests.subjects.vllm_package import load_vllm

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

NAME = "vllm:offload"


@lru_cache(maxsize=1)
def load_offloading() -> _Offloading:
    """Import vLLM's offloading, once per process; raises SubjectUnavailable."""
    try:
        load_vllm()
        return _Offloading()
    except SubjectUnavailable as error:
        raise SubjectUnavailable(str(error).replace(MANAGER, NAME)) from None
    except ImportError as error:
        raise SubjectUnavailable(
            f"the subject {NAME}: vLLM's offloading cannot be imported ({error}): "
            "in a checkout, bash .ci/vllm-env FOLDER makes an environment with it"
        ) from error


class _Offloading:
    """The names of vLLM that the adapter uses."""

    def __init__(self) -> None:
        from vllm.v1.kv_offload.base import (
            LookupResult,
            ReqContext,
            get_offload_block_hash,
            make_offload_key,
        )
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager
        self.context = ReqContext
        self.make_key = make_offload_key
        self.hash_of = get_offload_block_hash
        self.answers: Mapping[Any, Answer] = {
            LookupResult.MISS: "miss",
            LookupResult.HIT: "hit",
            LookupResult.HIT_PENDING: "hit_pending",
            LookupResult.RETRY: "retry",
        }


class Job:
    """A copy to or from the host that the manager has prepared."""

    __slots__ = ("context", "keys", "slots")

    def __init__(self, context: ReqContext, keys: list[bytes], slots: list[int]) -> None:
        self.context = context
        self.keys = keys
        """vLLM's: the hash and the group."""
        self.slots = slots


class HostChunks:
    """What one of vLLM's managers has on the host, as it is now; a chunk is a block."""

    group = 0

    def __init__(self, manager: CPUOffloadingManager, blocks: int) -> None:
        self._vllm = load_offloading()
        self.manager = manager
        self.index = _Index(self)
        """What the manager finds, ready to be read: the key of a block, and its chunk."""
        self.withheld = 0
        """Chunks that the adapter does without, beside those of the manager's."""
        self._blocks = blocks
        self._asking = self._vllm.context(req_id="nobody")
        """For what no copy asks."""
        manager.on_new_request(self._asking)

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._vllm.make_key(key, self.group) for key in keys]

    def key_of(self, name: bytes) -> bytes:
        """The key of a block, by vLLM's."""
        key: bytes = self._vllm.hash_of(name)
        return key

    def answer(self, key: bytes) -> Answer:
        """The manager's look-up."""
        (name,) = self._names([key])
        return self._vllm.answers[self.manager.lookup(name, self._asking)]

    def awaits_or_has(self, key: bytes) -> bool:
        return self.answer(key) != "miss"

    def chunk(self, key: bytes) -> ChunkStatus | None:
        (name,) = self._names([key])
        return self.manager._policy.get(name)

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All that the manager has or awaits."""
        policy: Any = self.manager._policy
        for chunks in (policy.chunks,) if hasattr(policy, "chunks") else (policy.t1, policy.t2):
            yield from chunks.items()

    @property
    def pins(self) -> list[int]:
        """By chunk: the copies that read it, or the one that writes it."""
        pins = [0] * self._blocks
        for _, chunk in self.chunks():
            pins[chunk.chunk_id] += abs(chunk.ref_cnt)
        return pins

    @property
    def free_count(self) -> int:
        """Chunks that a store may take, by the manager's own counters."""
        manager = self.manager
        free: int = manager._get_num_free_chunks() + manager._num_evictable_cache_chunks
        return free - self.withheld

    def room(self, protect: Collection[int] = ()) -> int:
        return self.free_count - self.count_evictable(protect)

    def count_evictable(self, slots: Collection[int]) -> int:
        """How many of these chunks would leave the free ones if they were read."""
        wanted = set(slots)
        return sum(c.ref_cnt == 0 and c.chunk_id in wanted for _, c in self.chunks())

    def victims(self) -> Sequence[int]:
        """Evictable chunks: in the order of LRU, or as ARC has them in its lists."""
        idle = [(name, chunk.chunk_id) for name, chunk in self.chunks() if chunk.ref_cnt == 0]
        ranks: Any = getattr(self.manager._policy, "_ranks", None)
        if ranks is not None:
            idle.sort(key=lambda entry: ranks[entry[0]])
        return [slot for _, slot in idle]


class VllmHost(HostChunks):
    """The host's chunks, one KV cache group, in the place of a pool."""

    tier = "host"

    def __init__(
        self, blocks: int, order: EvictionOrder, threshold: int, events: list[Event]
    ) -> None:
        manager = load_offloading().manager(
            num_chunks=blocks,
            cache_policy=order,
            enable_events=True,
            store_threshold=threshold,
        )
        super().__init__(manager, blocks)
        self.owners: dict[int, int] = {}
        """Of suspended requests, which vLLM does not have."""
        self.unsaved: dict[bytes, None] = {}
        """For the disk, which it does not have either."""
        self.generations = [0] * blocks
        self.evictions = 0
        self._threshold = threshold
        self._events = events
        self._slot_of: dict[bytes, int] = {}
        """Where each key was stored, as the manager said: what its evictions are told by."""
        self._requests = count()
        self._nobodys = count()

    # -- copies ------------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[bytes]) -> Job | None:
        """Room for what the manager takes of these keys, which may be nothing; None if it is full.

        Says which chunks it evicted for them.
        """
        if len(keys) > self.free_count and self.withheld:
            return None
        names = self._names(keys)
        context = self._begin(names)
        job = self._store(context, names, "pressure")
        if job is None or not job.keys:
            self.manager.on_request_finished(context)
        return job

    def _begin(self, names: Sequence[bytes]) -> ReqContext:
        context: ReqContext = self._vllm.context(req_id=f"request-{next(self._requests)}")
        for position, name in enumerate(names, 1):
            context.set_offload_key_position(name, position)
        self.manager.on_new_request(context)
        return context

    def _store(
        self, context: ReqContext, names: list[bytes], cause: Literal["pressure", "request"]
    ) -> Job | None:
        output = self.manager.prepare_store(names, context)
        if output is None:
            return None
        self._tell_evicted(output.evicted_keys, cause)
        slots = output.store_spec.block_ids.tolist()
        self._slot_of.update(zip(output.keys_to_store, slots, strict=True))
        return Job(context, output.keys_to_store, slots)

    def _tell_evicted(
        self, names: Sequence[bytes], cause: Literal["pressure", "request", "reset"]
    ) -> None:
        if not names:
            return
        slots = [self._slot_of.pop(name) for name in names]
        keys = [self.key_of(name) for name in names]
        self._events.append(SlotsEvicted("host", self.group, slots, keys, cause))
        self.evictions += len(names) if cause != "reset" else 0

    def end_store(self, job: Job, completed: bool) -> None:
        """The copy has arrived, or it failed."""
        self.manager.complete_store(job.keys, job.context, completed)
        self.manager.on_request_finished(job.context)
        for name in () if completed else job.keys:
            self._slot_of.pop(name, None)

    def prepare_load(self, keys: Sequence[bytes]) -> Job:
        """Where the manager has these keys, which it does not evict until the copy has ended."""
        names = self._names(keys)
        context = self._begin(names)
        spec = self.manager.prepare_load(names, context)
        return Job(context, names, spec.block_ids.tolist())

    def end_load(self, job: Job) -> None:
        """The copy has ended, whatever came of it."""
        self.manager.complete_load(job.keys, job.context)
        self.manager.on_request_finished(job.context)

    # -- what else may be done with it -------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """The device had these: they are recent here as well, the first the most."""
        if keys:
            self.manager.touch(self._names(keys), self._asking)

    def withhold(self, count: int) -> int:
        self.withheld = 0
        self.withheld = min(count, self.free_count)
        return self.withheld

    def evict(self, count: int, cause: Literal["request", "reset"]) -> int:
        """Up to so many chunks, or all of them in a reset; says how many."""
        if cause == "reset":
            return self._reset()
        manager, before = self.manager, self.evictions
        wanted = min(count, manager._num_evictable_cache_chunks)
        if wanted:
            size = manager._get_num_free_chunks() + wanted
            names = self._names([b"nobody's %d" % next(self._nobodys) for _ in range(size)])
            for _ in range(self._threshold):  # so often they have to be offered
                context = self._begin(names)
                job = self._store(context, names, "request")
                if job is not None:
                    self.end_store(job, completed=False)
        return self.evictions - before

    def _reset(self) -> int:
        names = list(self._slot_of)
        self._tell_evicted(names, "reset")
        self.manager.reset_cache()
        return len(names)

    # The manager reserves and pins by itself, when it prepares a copy.

    def reserve(self, slots: Sequence[int], keys: Sequence[bytes]) -> None: ...

    def unreserve(self, keys: Sequence[bytes]) -> None: ...

    def pin(self, slots: Sequence[int]) -> None: ...


class _Index(Mapping[bytes, int]):
    """Chunks that look-ups hit, by the keys of their blocks."""

    def __init__(self, host: HostChunks) -> None:
        self._host = host

    def __getitem__(self, key: bytes) -> int:
        chunk = self._host.chunk(key)
        if self._host.answer(key) != "hit" or chunk is None:
            raise KeyError(key)
        slot: int = chunk.chunk_id
        return slot

    def __iter__(self) -> Iterator[bytes]:
        keys = (self._host.key_of(name) for name, _ in self._host.chunks())
        return (key for key in keys if self._host.answer(key) == "hit")

    def __len__(self) -> int:
        return sum(1 for _ in self)
