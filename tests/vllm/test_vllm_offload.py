"""The adapter of vLLM's offloading manager: what it does, what it tells, and what the checks see.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, first_failure, found_and_shrunk, needs

from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.events import SlotsEvicted, TransferEnded, TransferStarted
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Complete,
    Evict,
    Fail,
    Finish,
    Launch,
    Offload,
    Operation,
    Promote,
    Reset,
    Retire,
    Segment,
    Withhold,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
    Outcome,
)
from kvproof.invariants.subject import Configuration, Subject
from kvproof.invariants.view import TieredView
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory, vllm_package
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.vllm_offload import (
    VllmOffloadSubject,
    fitted,
    vllm_offload_factory,
)
from kvproof.stateful_tests.subjects.vllm_offload_host import load_offloading

needs("vllm:offload")

pytestmark = pytest.mark.vllm

SEED = "vllm-offload"

NAMES = ("vllm:offload", "vllm:offload:twice")


class Checked:
    """A subject and its checks, which must not have anything to say."""

    def __init__(self, threshold: int = 1, **sizes: Any) -> None:
        configuration = Configuration(
            **({"blocks": 8, "block_size": 2, "host_blocks": 4, "offload": "prefix"} | sizes)
        )
        self.subject = VllmOffloadSubject(configuration, threshold=threshold)
        self.harness = Harness(self.subject, audit_interval=1)
        self.manager: Any = self.subject.host.manager

    def __call__(self, *operations: Operation) -> Outcome:
        for operation in operations:
            outcome = self.harness.perform(operation)
            assert not self.harness.violations
        return outcome

    def told(self, kind: type) -> list[Any]:
        """Of the last operation."""
        return [event for event in self.harness.last_events if isinstance(event, kind)]

    def compute(self, blocks: int, source: int = 1) -> None:
        """A request that fills so many blocks, and ends."""
        self(admit(blocks, source), Launch(), Retire(), Finish(0))

    def store(self, blocks: int, source: int = 1) -> None:
        self.compute(blocks, source)
        assert self(Offload()).count == blocks
        self(Complete())

    @property
    def host(self) -> dict[bytes, int]:
        return dict(self.subject.view().tier_index("host", 0))

    @property
    def counts(self) -> list[int]:
        """Of the manager's chunks, as it has them: -1 are being written."""
        return sorted(chunk.ref_cnt for _, chunk in self.subject.host.chunks())


def admit(blocks: int, source: int = 1, more: int = 0) -> Admit:
    """A prompt of so many blocks of two tokens."""
    return Admit((Segment(source, 2 * blocks + more),))


def promote(blocks: int, source: int = 1) -> Promote:
    """So many blocks of a prompt that is one token longer."""
    return Promote((Segment(source, 2 * blocks + 1),))


# -- how operations reach the manager --------------------------------------------------------------


def test_subject_and_view_fit_the_protocols() -> None:
    subject = VllmOffloadSubject(Configuration())
    assert isinstance(subject, Subject)
    assert isinstance(subject.view(), TieredView)
    assert subject.view().metrics() == {}
    assert all(is_kvproofs_own(name) for name in NAMES)
    for name in NAMES:
        assert subject_factory(name)(Configuration()).name == name


def test_a_configuration_is_made_to_fit() -> None:
    assert fitted(Configuration()) == Configuration(host_blocks=8, offload="prefix")
    both = Configuration(host_blocks=3, disk_blocks=2, offload="both", host_eviction="arc")
    assert fitted(both) == Configuration(host_blocks=3, offload="prefix", host_eviction="arc")
    policy = VllmOffloadSubject(both).host.manager._policy
    assert type(policy).__name__ == "ARCCachePolicy"


def test_a_store_is_pending_and_then_ready() -> None:
    run = Checked()
    run.compute(3)
    outcome = run(Offload(blocks=2))
    assert (outcome.status, outcome.count, len(outcome.transfers)) == ("done", 2, 1)
    assert (run.counts, run.host) == ([-1, -1], {})
    (started,) = run.told(TransferStarted)
    assert list(run.subject.view().tier_pins("host", 0)) == [1, 1, 0, 0]
    run(Complete())
    assert run.counts == [0, 0]
    assert run.host == dict(zip(started.keys, started.targets, strict=True))
    assert [run.subject.view().tier_content("host", 0, s) for s in started.targets] == list(
        started.keys
    )


def test_what_failed_is_not_there_and_may_be_stored_again() -> None:
    run = Checked()
    run.compute(2)
    run(Offload(), Fail())
    assert (run.counts, run.manager._get_num_free_chunks()) == ([], 4)
    assert run(Offload()).count == 2
    run(Complete())
    assert run.counts == [0, 0]


def test_look_ups_are_the_managers_answers() -> None:
    run = Checked(blocks=4)
    run.compute(2)
    run(Offload(), Evict(9))
    assert run(admit(2, more=1)).lookup == ""  # the device has what the store still reads
    run(Abort(0), Complete(), Evict(9))
    assert run(admit(2, more=1)).lookup == "hit"
    run(Abort(0))
    assert run(admit(2, source=2, more=1)).lookup == "miss"
    run(Abort(0))
    run(promote(2))
    assert run(Admit((Segment(1, 5),), wait=True)).reason == "hit_pending"


def test_a_load_pins_its_chunks_until_it_ends() -> None:
    run = Checked()
    run.store(2)
    run(Evict(9), promote(2))
    assert run.counts == [1, 1]
    assert run.told(TransferStarted)[0].kind == "promote"
    run(Fail())
    assert run.counts == [0, 0]
    run(promote(2), Complete())
    assert (run.counts, run(admit(2, more=1)).cached_tokens) == ([0, 0], 4)


def test_the_least_recent_goes_and_the_tail_before_the_head() -> None:
    run = Checked(blocks=20)
    run.store(2, source=1)
    run.store(2, source=2)
    slots = run.host
    run.compute(1, source=3)
    run(Offload())
    (evicted,) = run.told(SlotsEvicted)
    assert (evicted.cause, len(evicted.slots)) == ("pressure", 1)
    run(Complete(), admit(2, source=1, more=1), Abort(0))  # a hit on the device, a touch here
    run.compute(2, source=4)
    run(Offload())
    (evicted,) = run.told(SlotsEvicted)
    assert [slots[key] for key in evicted.keys] == list(evicted.slots)
    assert list(evicted.keys) == list(slots)[3:1:-1]


def test_what_does_not_fit_is_refused_and_nothing_is_evicted() -> None:
    run = Checked(blocks=20)
    run.store(3)
    run.compute(5, source=2)
    assert run(Offload()).reason == NO_HOST_BLOCKS
    assert len(run.host) == 3
    assert run(Offload(blocks=4)).count == 4
    assert run(Offload()).reason == NO_HOST_BLOCKS  # all chunks are being written
    assert run(Offload("disk")).reason == OFFLOAD_OFF
    run(Complete(), Evict(9))
    assert run(Offload()).reason == NOTHING_TO_MOVE


def test_withheld_chunks_are_not_asked_for() -> None:
    run = Checked(blocks=8)
    run.compute(3)
    assert run(Withhold("host", 2)).count == 2
    assert run(Offload()).reason == NO_HOST_BLOCKS
    assert run(Withhold("host", 9)).count == 4
    run(Withhold("host", 0), Withhold("device", 8))
    assert run(Offload()).reason == NO_FREE_BLOCKS  # blocks that are read are not free
    run(Withhold("device", 0))
    assert run(Offload()).count == 3


def test_eviction_on_request_is_a_store_of_nobodys_that_fails() -> None:
    run = Checked()
    run.store(3)
    head = next(iter(run.host))
    assert run(Evict(2, "host")) == Outcome("done", count=2)
    (evicted,) = run.told(SlotsEvicted)
    assert (evicted.cause, list(run.host)) == ("request", [head])
    assert (run.counts, run.manager._get_num_free_chunks()) == ([0], 3)
    assert run(Evict(9, "host")).count == 1
    assert run(Evict(9, "host")).count == 0


def test_a_reset_is_refused_while_a_job_is_in_flight() -> None:
    run = Checked()
    run.compute(2)
    run(Offload())
    assert run(Reset()).reason == BLOCKS_IN_USE
    run(Complete())
    assert run(Reset()) == Outcome("done", count=4)
    assert (run.host, run.manager._get_num_free_chunks()) == ({}, 4)
    run.store(2)


def test_with_a_threshold_a_key_is_taken_when_it_is_offered_again() -> None:
    run = Checked(threshold=2)
    run.compute(2)
    assert run(Offload()).reason == NOTHING_TO_MOVE
    run.compute(1, source=2)
    assert run(Offload()).count == 2
    assert run(Offload()).count == 1
    run(Complete(), Complete())
    assert run(Evict(1, "host")).count == 1


def test_each_copy_is_one_request_of_the_managers() -> None:
    run = Checked(blocks=20)
    begun, ended = [], []
    manager = run.manager
    new, finished = manager.on_new_request, manager.on_request_finished
    manager.on_new_request = lambda context: (begun.append(context.req_id), new(context))[1]
    manager.on_request_finished = lambda context: (ended.append(context.req_id), finished(context))
    run.store(2)
    run(Evict(9), promote(2), Fail(), promote(2), Complete(), Evict(1, "host"))
    run.compute(9)
    run(Offload())  # refused: it does not fit
    assert begun == ended
    assert len({*begun}) == len(begun) == 5


# -- where vLLM is not to be had, or is another ----------------------------------------------------


def test_a_missing_vllm_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    load_offloading.cache_clear()
    vllm_package.load_vllm.cache_clear()
    monkeypatch.setattr(vllm_package, "version", lambda name: "0.34.1")
    with pytest.raises(SubjectUnavailable) as caught:
        vllm_offload_factory()
    assert "vllm:offload" in str(caught.value)
    assert "but 0.34.1 is installed" in str(caught.value)
    assert "\n" not in str(caught.value)


BASE = "vllm.v1.kv_offload.base"
MANAGER = "vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager"
LRU = "vllm.v1.kv_offload.cpu.policies.lru.LRUCachePolicy"
ARC = "vllm.v1.kv_offload.cpu.policies.arc.ARCCachePolicy"
SIGNATURES = {
    f"{MANAGER}.__init__": {"num_chunks", "cache_policy", "enable_events", "store_threshold"},
    f"{MANAGER}.on_new_request": {"req_context"},
    f"{MANAGER}.lookup": {"key", "req_context"},
    f"{MANAGER}.prepare_store": {"keys", "req_context"},
    f"{MANAGER}.complete_store": {"keys", "req_context", "success"},
    f"{MANAGER}.prepare_load": {"keys", "req_context"},
    f"{MANAGER}.complete_load": {"keys", "req_context"},
    f"{MANAGER}.touch": {"keys", "req_context"},
    f"{MANAGER}.on_request_finished": {"req_context"},
    f"{MANAGER}.reset_cache": {"self"},
    f"{MANAGER}._get_num_free_chunks": {"self"},
    f"{BASE}.make_offload_key": {"block_hash", "group_idx"},
    f"{BASE}.get_offload_block_hash": {"key"},
    f"{BASE}.ReqContext": {"req_id"},
    f"{BASE}.ReqContext.set_offload_key_position": {"key", "end_token"},
    f"{LRU}.get": {"key"},
    f"{ARC}.get": {"key"},
}
"""What the adapter calls, and with which parameters."""


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES.items())
def test_what_the_adapter_calls_is_as_it_was(function: str, parameters: set[str]) -> None:
    there = set(inspect.signature(resolve_name(function)).parameters)
    assert parameters <= there, f"{function} has parameters {there}"


def test_what_the_adapter_reads_is_where_it_was() -> None:
    run = Checked()
    run.store(2)
    manager = run.manager
    assert manager._num_evictable_cache_chunks == 2
    assert manager._policy._ranks.keys() == manager._policy.chunks.keys()
    arc = Checked(host_eviction="arc")
    arc.store(2)
    policy = arc.manager._policy
    assert len(policy.t1) + len(policy.t2) == 2


# -- what the manager itself announces -------------------------------------------------------------


HASH_OF = load_offloading().hash_of


def announced(manager: Any) -> tuple[set[bytes], set[bytes]]:
    """The keys that it says were stored, and evicted, since it was last asked."""
    events = [event for event in manager.take_events() if not event.metadata_only]
    stored, removed = (
        {HASH_OF(key) for event in events if event.removed is removed for key in event.keys}
        for removed in (False, True)
    )
    return stored, removed


@pytest.mark.parametrize("name", NAMES)
def test_events_and_gauges_of_the_manager_agree_with_the_checked_state(name: str) -> None:
    factory, seen = subject_factory(name), [0, 0]
    for number in range(30):
        draw = draw_run(f"announced/{number}", abilities(factory))
        harness = harness_for(factory(draw.configuration))
        subject: Any = harness.subject
        for operation in draw.operations:
            harness.last_events = ()
            flying = dict(subject.engine.hierarchy.transfers)
            harness.perform(operation)
            assert not harness.violations
            ended = [e for e in harness.last_events if isinstance(e, TransferEnded)]
            stored = {
                key
                for event in ended
                if event.result == "completed" and flying[event.transfer].kind == "store"
                for key in flying[event.transfer].keys
            }
            evicted = {
                key
                for event in harness.last_events
                if isinstance(event, SlotsEvicted) and event.cause != "reset"
                for key in event.keys
            }
            assert announced(subject.host.manager) == (stored, evicted)
            seen[0] += len(stored)
            seen[1] += len(evicted)
            assert_gauges(subject)
    assert min(seen) > 30


GAUGES = ("", "write_", "read_")


def assert_gauges(subject: Any) -> None:
    """Shares of the chunks in use, and being written, are those of the transfers in flight."""
    transfers = subject.engine.hierarchy.transfers.values()
    written = {slot for t in transfers if t.kind == "store" for slot in t.targets}
    read = {slot for t in transfers if t.kind == "promote" for slot in t.sources}
    data = subject.host.manager.get_stats().data["data"]
    shares = [data[f"vllm:kv_offload_cpu_cache_{what}usage_perc"][()] for what in GAUGES]
    used = [len(written | read), len(written), len(read)]
    assert shares == pytest.approx([count / subject.configuration.host_blocks for count in used])


# -- the checks, on the unmodified release and on mutants of it ------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    assert first_failure(name, SEED, 150) is None


def counts_a_failed_store(original: Original) -> Original:
    return lambda manager, keys, context, success=True: original(manager, keys, context)


def loses_the_chunks_of_a_failed_store(original: Original) -> Original:
    def complete(manager: Any, keys: Any, context: Any, success: bool = True) -> None:
        free = list(manager._free_list)
        original(manager, keys, context, success)
        if not success:
            manager._free_list[:] = free

    return complete


def frees_a_chunk_twice(original: Original) -> Original:
    def free(manager: Any, chunk: Any) -> None:
        original(manager, chunk)
        if len(manager._free_list) % 3 == 0:
            original(manager, chunk)

    return free


def leaves_the_last_key_of_a_store_pending(original: Original) -> Original:
    def complete(manager: Any, keys: Any, context: Any, success: bool = True) -> None:
        original(manager, list(keys)[: max(1, len(keys) - 1)], context, success)

    return complete


def finds_what_is_still_written(original: Original) -> Original:
    def lookup(manager: Any, key: Any, context: Any) -> Any:
        found = original(manager, key, context)
        return type(found).HIT if found is type(found).HIT_PENDING else found

    return lookup


def finds_nothing_that_is_read(original: Original) -> Original:
    def lookup(manager: Any, key: Any, context: Any) -> Any:
        found, chunk = original(manager, key, context), manager._policy.get(key)
        return type(found).MISS if chunk is not None and chunk.ref_cnt > 0 else found

    return lookup


def never_unpins(original: Original) -> Original:
    return lambda manager, keys, context: None


def evicts_one_too_many(original: Original) -> Original:
    return lambda policy, n, protected: (
        original(policy, n + 1, protected) or original(policy, n, protected)
    )


def evicts_the_most_recent(original: Original) -> Original:
    def assign(policy: Any, key: Any) -> bool:
        evictable = original(policy, key)
        if key in policy._ranks:
            policy._ranks[key] = (-policy._next_rank, 0)
        return evictable

    return assign


def a_hit_on_the_device_is_no_use(original: Original) -> Original:
    return lambda manager, keys, context: None


def the_head_of_a_hit_goes_first(original: Original) -> Original:
    return lambda policy, keys, context: original(policy, list(keys)[::-1], context)


def a_finished_request_leaves_no_trace(original: Original) -> Original:
    return lambda *arguments: None


def evicts_what_is_read(original: Original) -> Original:
    def evict(policy: Any, n: int, protected: Any) -> Any:
        chunks = [c for chunks in (policy.t1, policy.t2) for c in chunks.values()]
        counts = [(chunk, chunk.ref_cnt) for chunk in chunks]
        for chunk in chunks:
            chunk.ref_cnt = min(chunk.ref_cnt, 0)
        evicted = original(policy, n, protected)
        for chunk, count in counts:
            chunk.ref_cnt = count
        return evicted

    return evict


def keeps_a_failed_chunk_in_its_list(original: Original) -> Original:
    return lambda policy, key: policy.t2.pop(key, None)


def says_nothing_of_evictions(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        output = original(manager, keys, context)
        if output is not None:
            output.evicted_keys = []
        return output

    return prepare


def names_the_chunks_in_reverse(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        output = original(manager, keys, context)
        if output is not None:
            output.store_spec.block_ids = output.store_spec.block_ids[::-1].copy()
        return output

    return prepare


def refuses_when_it_should_evict(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        full = len(keys) > manager._get_num_free_chunks()
        return None if full else original(manager, keys, context)

    return prepare


def reads_from_the_first_chunk(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        spec = original(manager, keys, context)
        spec.block_ids[:] = spec.block_ids[0]
        return spec

    return prepare


def keeps_the_index_in_a_reset(original: Original) -> Original:
    def reset(manager: Any) -> None:
        free, policy = manager._free_list, manager._policy
        free.clear()
        manager._num_allocated_chunks = len(policy.chunks) if hasattr(policy, "chunks") else 0

    return reset


def forgets_its_free_chunks_in_a_reset(original: Original) -> Original:
    def reset(manager: Any) -> None:
        allocated = manager._num_allocated_chunks
        original(manager)
        manager._num_allocated_chunks = allocated

    return reset


MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (counts_a_failed_store, f"{MANAGER}.complete_store", {"VALID"}),
    (loses_the_chunks_of_a_failed_store, f"{MANAGER}.complete_store", {"CONS"}),
    (frees_a_chunk_twice, f"{MANAGER}._free_chunk", {"CONS", "EXCL"}),
    (leaves_the_last_key_of_a_store_pending, f"{MANAGER}.complete_store", {"VALID"}),
    (finds_what_is_still_written, f"{MANAGER}.lookup", {"VALID", "CAP"}),
    (finds_nothing_that_is_read, f"{MANAGER}.lookup", {"VALID", "CAP"}),
    (never_unpins, f"{MANAGER}.complete_load", {"PIN", "CONS", "QUIES"}),
    (evicts_one_too_many, f"{LRU}.evict", {"ORDER", "CAP"}),
    (evicts_the_most_recent, f"{LRU}._assign_new_rank", {"ORDER"}),
    (a_hit_on_the_device_is_no_use, f"{MANAGER}.touch", {"ORDER"}),
    (the_head_of_a_hit_goes_first, f"{LRU}.touch", {"ORDER"}),
    (a_finished_request_leaves_no_trace, f"{LRU}.on_request_finished", {"ORDER"}),
    (evicts_what_is_read, f"{ARC}.evict", {"PIN", "EXCL"}),
    (keeps_a_failed_chunk_in_its_list, f"{ARC}.remove", {"CONS", "PIN", "QUIES"}),
    (says_nothing_of_evictions, f"{MANAGER}.prepare_store", {"EXCL", "VALID", "CAP"}),
    (names_the_chunks_in_reverse, f"{MANAGER}.prepare_store", {"VALID", "PIN"}),
    (refuses_when_it_should_evict, f"{MANAGER}.prepare_store", {"CAP"}),
    (reads_from_the_first_chunk, f"{MANAGER}.prepare_load", {"XFER", "VALID", "PIN"}),
    (keeps_the_index_in_a_reset, f"{MANAGER}.reset_cache", {"VALID"}),
    (forgets_its_free_chunks_in_a_reset, f"{MANAGER}.reset_cache", {"CONS"}),
)


@pytest.mark.parametrize(
    ("mutate", "target", "properties"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS]
)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    found_and_shrunk("vllm:offload", SEED, 120, properties, operations=16)
