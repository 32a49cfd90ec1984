"""vLLM's scheduler with its offloading connector: what the adapter tells, and what is found.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import (
    Mutant,
    Original,
    each_of,
    failures,
    first_failure,
    found_and_shrunk,
    moved_functions,
    needs,
)
from msgspec.structs import replace
from watched import Watched

from kvproof.fuzz.replay import replay
from kvproof.invariants.case import Case, load_case
from kvproof.invariants.events import TransferEnded, TransferLanded, TransferStarted
from kvproof.invariants.operations import Abort, Arrive, Run, Schedule, Segment
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import BlocksHeld, Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.invariants.view import TieredView
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.vllm_connector import VllmConnectorSubject
from kvproof.stateful_tests.subjects.vllm_connector_worker import (
    NAME,
    TIERED_NAME,
)

needs("vllm:scheduler:offload")

pytestmark = pytest.mark.vllm

SEED = "vllm-connector"
REPLAYS = 400

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
CONNECTOR = f"{OFFLOADING}.scheduler.OffloadingConnectorScheduler"
WORKER = f"{OFFLOADING}.worker.OffloadingConnectorWorker"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
MANAGER = "vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager"


PROMPT = Arrive((Segment(1, 7),))
OTHER = Arrive((Segment(2, 7),))
LOST = (PROMPT, Run(8), OTHER, Run(8))
"""Three full blocks of the prompt are on the host, and none on the device: the other took all."""


SIZES = Configuration(blocks=4, block_size=2, host_blocks=8)


def watched(name: str = NAME, **sizes: Any) -> Watched:
    return Watched(VllmConnectorSubject(replace(SIZES, **sizes), name=name))


# -- how the scheduler and its connector are told --------------------------------------------------


@pytest.mark.parametrize("name", [NAME, TIERED_NAME])
def test_subject_and_views_fit_the_protocols(name: str) -> None:
    assert is_kvproofs_own(name)
    subject: Any = subject_factory(name)(Configuration())
    assert subject.name == name
    assert isinstance(subject.state_view, SchedulerView)
    assert isinstance(subject.cache.view(), TieredView)


def test_a_configuration_is_made_to_fit() -> None:
    fitted = VllmConnectorSubject(Configuration(block_size=1, prefix_caching=False)).configuration
    assert (fitted.block_size, fitted.host_blocks, fitted.prefix_caching) == (2, 4, True)
    assert (fitted.offload, fitted.run_ahead, fitted.disk_blocks) == ("prefix", 1, 0)
    arc = VllmConnectorSubject(Configuration(host_blocks=3, host_eviction="arc"))
    assert type(arc.cache.host.manager._policy).__name__ == "ARCCachePolicy"
    assert arc.configuration.host_blocks == 3


def test_what_is_computed_is_stored_when_its_step_has_run() -> None:
    run = watched()
    run(PROMPT, Schedule())
    (store,) = run.told(TransferStarted)
    assert (store.kind, store.request, len(store.sources)) == ("store", None, 2)
    run(Run(8))
    assert (len(run.told(TransferLanded)), len(run.told(TransferEnded))) == (2, 2)
    assert len(run.subject.cache.view().tier_index("host", 0)) == 3


def test_a_request_holds_blocks_while_it_is_loaded_and_then_runs() -> None:
    run = watched()
    run(*LOST, PROMPT, Schedule())
    (held,), (load,) = run.told(BlocksHeld), run.told(TransferStarted)
    assert (load.kind, load.request, len(load.targets)) == ("promote", held.cache_request, 3)
    assert run.subject.cache.view().standing(held.cache_request)[:3] == ("loading", 7, 0)
    assert run.subject.state_view.standing(held.request)[0] == "waiting"
    run(Run(8))
    (first, *_) = [event for event in run.told(Scheduled) if event.admitted]
    assert (first.admitted, first.parts[0].tokens) == ((held.request,), 1)
    metrics = run.subject.state_view.metrics()
    assert (metrics["host_promotions"], metrics["prefix_cache_hits"]) == (3, 6)


def test_of_a_prompt_that_is_loaded_whole_the_last_token_is_computed_anew() -> None:
    run = watched()
    run(*LOST, Arrive((Segment(1, 6),)), Run(8))
    (first, *_) = [event for event in run.told(Scheduled) if event.admitted]
    assert first.parts[0].tokens == 1


def test_who_is_cancelled_while_it_loads_gives_its_blocks_back_when_that_has_ended() -> None:
    run = watched()
    run(*LOST, PROMPT, Schedule(), Abort(0))
    assert run.subject.state_view.live() == []
    assert list(run.subject.cache.view().requests()) == [2]
    run(Run(8))
    assert list(run.subject.cache.view().requests()) == []


def test_the_engine_goes_on_until_all_has_been_copied() -> None:
    run = watched()
    run(PROMPT, Run(2))
    assert run.subject.cache.copies
    assert not run.subject.jobs
    run(Run(8))
    assert not run.subject.cache.copies
    assert run(Run(1)).reason == "nothing_to_run"


def test_what_is_stored_is_copied_down_and_fetched_again() -> None:
    run = watched(TIERED_NAME, host_blocks=3)
    run(PROMPT, Run(8))
    assert {event.kind for event in run.told(TransferStarted)} == {"store", "demote"}
    run(OTHER, Run(8), PROMPT, Run(8))
    kinds = [event.kind for event in run.told(TransferStarted)]
    assert kinds == [*["fetch"] * 3, "promote"]
    assert len(run.subject.cache.view().tier_index("disk", 0)) == 6


def test_the_names_of_vllm_are_where_they_were() -> None:
    assert list(moved_functions(NAMES)) == []


# -- what is found in the release ------------------------------------------------------------------

WAITS = "nothing was run in 8 iterations"


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_failure(NAME, SEED, 60) is None


def test_with_a_tier_below_the_host_it_has_one_and_who_is_found_to_wait_waits_on() -> None:
    found = list(failures(TIERED_NAME, SEED, 60))
    assert found
    for case, violation in found:
        assert (violation.property, violation.message.startswith(WAITS)) == ("LIVE", True)
        run = _unchecked(case.configuration)
        run.run((*case.operations[: violation.op + 1], Run(200)))
        assert run.subject.jobs


LARGER, EVICTS_ITSELF = "larger_than_the_host", "chunks_evict_each_other"


def _known(name: str) -> Case:
    return load_case(Path(__file__).parent / "known" / f"{name}.json")


def _of_host(case: Case, **sizes: Any) -> Case:
    return replace(case, configuration=replace(case.configuration, **sizes))


@pytest.mark.parametrize(
    "case", [_known(LARGER), _of_host(_known(LARGER), host_eviction="arc"), _known(EVICTS_ITSELF)]
)
def test_a_case_that_the_findings_name_waits_for_ever(case: Case) -> None:
    """In the second, of four chunks three are needed; but the other request's are more recent."""
    (violation, *_) = replay(case).violations
    assert (violation.property, violation.message.startswith(WAITS)) == ("LIVE", True)
    run = _unchecked(case.configuration)
    run.run((*case.operations, Run(1000)))
    (job,) = run.subject.jobs.values()
    assert (job.request.status.name, job.request.num_computed_tokens) == ("WAITING", 0)
    pool = run.subject.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == case.configuration.blocks
    assert len(run.subject.cache.tier.chunks) == 6


@pytest.mark.parametrize(("name", "host_blocks"), [(LARGER, 3), (EVICTS_ITSELF, 5)])
def test_with_a_host_of_one_chunk_more_it_is_served(name: str, host_blocks: int) -> None:
    case = _of_host(_known(name), host_blocks=host_blocks)
    assert not replay(case).violations
    run = _unchecked(case.configuration)
    run.run(case.operations)
    assert not run.subject.jobs


def _unchecked(configuration: Configuration) -> Any:
    return SchedulingHarness(VllmConnectorSubject(configuration, name=TIERED_NAME), checked=False)


def test_a_prompt_of_one_token_in_a_block_of_one_waits_for_ever() -> None:
    configuration = Configuration(blocks=2, block_size=1, requests=1)
    single, run = Arrive((Segment(0, 1),)), (Run(10), Run(1000))
    checked = SchedulingHarness(VllmConnectorSubject(configuration, least_block=1))
    (violation,) = checked.run((single, single, *run))
    assert (violation.property, violation.message.startswith(WAITS)) == ("LIVE", True)
    subject = VllmConnectorSubject(configuration, least_block=1)
    SchedulingHarness(subject, checked=False).run((single, single, *run))
    (job,) = subject.jobs.values()
    assert job.request.status.name == "WAITING_FOR_REMOTE_KVS"


# -- mutants of vLLM: what a store reads -----------------------------------------------------------


def forgets_what_a_finished_request_still_stores(original: Original) -> Original:
    def finished(connector: Any, request: Any) -> Any:
        state = connector._req_status.get(request.request_id)
        jobs = set() if state is None else state.transfer_jobs
        for job in jobs:
            connector._jobs[job].deferred_fence_block_ids = None
        return original(connector, request)

    return finished


def flushes_nothing_when_it_preempts(original: Original) -> Original:
    def build(connector: Any, scheduled: Any) -> Any:
        scheduled.preempted_req_ids = None
        return original(connector, scheduled)

    return build


def does_not_wait_for_what_is_flushed(original: Original) -> Original:
    def handle(worker: Any, metadata: Any) -> None:
        metadata.jobs_to_flush = set()
        original(worker, metadata)

    return handle


def stores_a_block_before_it_is_computed(original: Original) -> Original:
    def offloadable(connector: Any, state: Any, computed: int) -> int:
        tokens: int = original(connector, state, computed) + 1
        return tokens

    return offloadable


def stores_two_blocks_in_each_others_place(original: Original) -> Original:
    def build(connector: Any, scheduled: Any) -> Any:
        jobs = original(connector, scheduled)
        for job in jobs.values():
            job.src_spec.block_ids = job.src_spec.block_ids[::-1].copy()
        return jobs

    return build


# -- who waits for a load --------------------------------------------------------------------------


def reports_a_load_before_it_has_come(original: Original) -> Original:
    def finished(worker: Any, requests: Any) -> Any:
        early = {name for name in worker._load_jobs.values() if name is not None}
        sending, receiving = original(worker, requests)
        worker._load_jobs = dict.fromkeys(worker._load_jobs)
        return sending, receiving | early

    return finished


def loads_two_blocks_in_each_others_place(original: Original) -> Original:
    def update(connector: Any, request: Any, blocks: Any, tokens: int) -> None:
        original(connector, request, blocks, tokens)
        for job in connector._current_batch_load_jobs.values():
            if job.req_id == request.request_id:
                job.dst_spec.block_ids = job.dst_spec.block_ids[::-1].copy()

    return update


def loads_into_the_first_blocks(original: Original) -> Original:
    def update(connector: Any, request: Any, blocks: Any, tokens: int) -> None:
        original(connector, request, blocks, tokens)
        table = [block.block_id for block in blocks.blocks[0]]
        for job in connector._current_batch_load_jobs.values():
            if job.req_id == request.request_id:
                job.dst_spec.block_ids[:] = table[: len(job.dst_spec.block_ids)]

    return update


def never_begins_a_load(original: Original) -> Original:
    def start(worker: Any, metadata: Any) -> None:
        metadata.load_jobs.clear()
        original(worker, metadata)

    return start


def loses_the_notice_of_a_load(original: Original) -> Original:
    def update(scheduler: Any, output: Any) -> None:
        output.finished_recving = set()
        original(scheduler, output)

    return update


def believes_that_it_is_loading_for_ever(original: Original) -> Original:
    def update(connector: Any, output: Any) -> None:
        loading = set(connector._chunks_being_loaded)
        original(connector, output)
        connector._chunks_being_loaded |= loading

    return update


def gives_back_at_once_what_is_being_loaded(original: Original) -> Original:
    return lambda scheduler, request, delay_free_blocks=False: original(scheduler, request)


def finds_a_block_beyond_what_was_loaded(original: Original) -> Original:
    def update(scheduler: Any, request: Any) -> None:
        original(scheduler, request)
        request.num_computed_tokens = min(request.num_tokens - 1, request.num_computed_tokens + 1)

    return update


# -- what the host keeps ---------------------------------------------------------------------------


def keeps_the_pins_of_a_load(original: Original) -> Original:
    return lambda manager, keys, context: None


def pins_nothing_that_is_loaded(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        spec = original(manager, keys, context)
        manager.complete_load(keys, context)
        return spec

    return prepare


def never_tells_that_a_store_has_ended(original: Original) -> Original:
    return lambda manager, keys, context, success=True: None


def frees_a_chunk_twice(original: Original) -> Original:
    def free(manager: Any, chunk: Any) -> None:
        original(manager, chunk)
        if len(manager._free_list) % 3 == 0:
            original(manager, chunk)

    return free


MUTANTS = (
    Mutant(forgets_what_a_finished_request_still_stores, f"{CONNECTOR}.request_finished", {"XFER"}),
    Mutant(flushes_nothing_when_it_preempts, f"{CONNECTOR}._build_connector_meta", {"XFER"}),
    Mutant(does_not_wait_for_what_is_flushed, f"{WORKER}.handle_preemptions", {"XFER"}),
    Mutant(
        stores_a_block_before_it_is_computed,
        f"{CONNECTOR}._calc_num_offloadable_tokens",
        {"XFER"},
    ),
    Mutant(stores_two_blocks_in_each_others_place, f"{CONNECTOR}._build_store_jobs", {"XFER"}),
    Mutant(reports_a_load_before_it_has_come, f"{WORKER}.get_finished", {"RESUME", "PROV", "CAP"}),
    Mutant(
        loads_two_blocks_in_each_others_place, f"{CONNECTOR}.update_state_after_alloc", {"PROV"}
    ),
    Mutant(loads_into_the_first_blocks, f"{CONNECTOR}.update_state_after_alloc", {"EXCL", "PROV"}),
    Mutant(never_begins_a_load, f"{WORKER}.start_kv_transfers", {"LIVE"}),
    Mutant(loses_the_notice_of_a_load, f"{SCHEDULER}._update_from_kv_xfer_finished", {"LIVE"}),
    Mutant(believes_that_it_is_loading_for_ever, f"{CONNECTOR}._update_connector_output", {"LIVE"}),
    Mutant(
        finds_a_block_beyond_what_was_loaded,
        f"{SCHEDULER}._update_waiting_for_remote_kv",
        {"RESUME", "CAP", "PROV"},
    ),
    Mutant(keeps_the_pins_of_a_load, f"{MANAGER}.complete_load", {"PIN", "CONS", "QUIES", "LIVE"}),
    Mutant(pins_nothing_that_is_loaded, f"{MANAGER}.prepare_load", {"PIN", "CONS"}),
    Mutant(never_tells_that_a_store_has_ended, f"{MANAGER}.complete_store", {"VALID", "CONS"}),
    Mutant(frees_a_chunk_twice, f"{MANAGER}._free_chunk", {"CONS", "EXCL"}),
)


TIERING = "vllm.v1.kv_offload.tiering.manager.TieringOffloadingManager"


def pins_nothing_that_is_copied_down(original: Original) -> Original:
    def prepare(manager: Any, keys: Any, context: Any) -> Any:
        spec = original(manager, keys, context)
        manager.complete_load(keys, context)
        return spec

    return prepare


def forgets_what_is_copied_down(original: Original) -> Original:
    def process(manager: Any, tiers: Any = None) -> None:
        manager.primary_tier.complete_read = lambda keys, context: None
        original(manager, tiers)

    return process


def forgets_what_was_fetched(original: Original) -> Original:
    return lambda manager, job, result: None


NEVER_ENDING = (
    Mutant(forgets_what_is_copied_down, f"{TIERING}._process_finished_jobs", {"LIVE"}),
    Mutant(forgets_what_was_fetched, f"{TIERING}._complete_promotion", {"LIVE"}),
)

NAMES: dict[str, Sequence[str]] = {
    f"{CONNECTOR}.update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    f"{CONNECTOR}._build_store_jobs": ("scheduler_output",),
    f"{CONNECTOR}._update_connector_output": ("connector_output",),
    f"{WORKER}.handle_preemptions": ("kv_connector_metadata",),
    f"{WORKER}.start_kv_transfers": ("metadata",),
    f"{WORKER}.prepare_store_kv": ("metadata",),
    f"{WORKER}.get_finished": ("finished_req_ids",),
    f"{MANAGER}.prepare_store": ("keys", "req_context"),
    f"{MANAGER}.complete_store": ("keys", "req_context", "success"),
    f"{MANAGER}.complete_load": ("keys", "req_context"),
    f"{TIERING}.create_store_job": ("keys", "req_context", "tier_idx"),
    f"{TIERING}._initiate_promotion": ("tier_idx", "key", "req_context"),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks": (
        "request",
        "num_computed_tokens",
    ),
}


@each_of(NEVER_ENDING)
def test_a_copy_between_tiers_that_never_ends_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.setattr(mutant.target, mutant.change(resolve_name(mutant.target)))
    failure = first_failure(TIERED_NAME, SEED, 100, mutant.properties, known=(WAITS,))
    assert failure is not None
    assert failure[1].message.endswith("iterations, and does not end")


def test_blocks_that_are_given_back_while_they_are_loaded_are_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search finds it, too; but its cases do not become small, for they hang on how late a copy
    is."""
    target = f"{SCHEDULER}._free_request"
    original = resolve_name(target)
    monkeypatch.setattr(target, gives_back_at_once_what_is_being_loaded(original))
    another = Arrive((Segment(3, 4),), output=3)
    run = SchedulingHarness(VllmConnectorSubject(SIZES), audit_interval=1)
    (violation, *_) = run.run((*LOST, PROMPT, Schedule(), Abort(0), another, Run(8)))
    assert (violation.property, violation.op) == ("PROV", 8)
    assert first_failure(NAME, SEED, 60, {"PROV", "CRASH"}) is not None


def test_a_mutant_of_the_tiers_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "vllm.v1.kv_offload.tiering.manager.CPUPrimaryTierOffloadingManager.prepare_read"
    monkeypatch.setattr(target, pins_nothing_that_is_copied_down(resolve_name(target)))
    found_and_shrunk(TIERED_NAME, SEED, 60, {"PIN", "CONS"}, replays=REPLAYS)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.setattr(mutant.target, mutant.change(resolve_name(mutant.target)))
    found_and_shrunk(NAME, SEED, 150, mutant.properties, operations=8, replays=REPLAYS)
