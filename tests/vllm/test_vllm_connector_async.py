"""vLLM's asynchronous scheduler with its offloading connector: what steps in flight keep.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import (
    Mutant,
    Original,
    each_of,
    failures,
    found_and_shrunk,
    is_known,
    moved_functions,
    needs,
)
from watched import Watched

from kvproof.fuzz.replay import replay
from kvproof.invariants.case import load_case
from kvproof.invariants.events import BlocksReleased, ReleaseFenced, TransferStarted
from kvproof.invariants.operations import (
    Abort,
    Arrive,
    Operation,
    Reset,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.outcomes import RUN_AHEAD_LIMIT
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.vllm_connector import VllmConnectorSubject
from kvproof.stateful_tests.subjects.vllm_connector_worker import ASYNC_NAME, NAME

needs(ASYNC_NAME)

pytestmark = pytest.mark.vllm

SEED = "vllm-connector-async"
REPLAYS = 400
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
CONNECTOR = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler.OffloadingConnectorScheduler"
)
WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker.OffloadingConnectorWorker"

PROMPT = Arrive((Segment(1, 2),), output=4)
OTHER = Arrive((Segment(2, 2),), output=4)


def watched(*, name: str = ASYNC_NAME, **sizes: Any) -> Watched:
    configuration = Configuration(**{"blocks": 6, "block_size": 2, "host_blocks": 8, **sizes})
    return Watched(VllmConnectorSubject(configuration, name=name))


# -- how it is told --------------------------------------------------------------------------------


def test_what_is_given_back_is_kept_for_the_latest_step_in_flight() -> None:
    run = watched()
    run(PROMPT, Schedule(), Schedule(), Abort(0))
    (fenced,) = run.told(ReleaseFenced)
    assert (fenced.request, fenced.step, run.free) == (0, 1, 4)
    run(Retire())
    assert (run.told(BlocksReleased), run.free) == ([], 4)
    run(Retire())
    (released,) = run.told(BlocksReleased)
    assert (released.step, len(released.blocks), run.free) == (1, 2, 6)


def test_a_later_step_than_its_own_may_keep_what_a_request_gives_back() -> None:
    run = watched(run_ahead=2)
    run(Arrive((Segment(1, 2),)), Schedule(), OTHER, Schedule(), Abort(0))
    (fenced,) = run.told(ReleaseFenced)
    assert fenced.step == 1
    run(Retire(), Retire(), Run(8))


def test_who_is_not_in_flight_gives_its_blocks_back_at_once() -> None:
    run = watched()
    run(PROMPT, Schedule(), Retire(), Abort(0))
    assert run.told(ReleaseFenced) == []
    (released,) = run.told(BlocksReleased)
    assert (released.step, run.free) == (None, 6)


def test_a_block_that_a_step_in_flight_completes_is_stored_though_nobody_finds_it() -> None:
    run = watched(blocks=3, requests=1)
    run(Arrive((Segment(1, 2),), output=3), Run(3), Abort(0), Schedule())
    (store,) = run.told(TransferStarted)
    assert (store.kind, len(store.sources)) == ("store", 1)
    assert store.keys[0] not in run.subject.cache.view().index(0)
    run(Run(12))
    assert store.keys[0] in run.subject.cache.view().tier_index("host", 0)


def test_an_iteration_that_runs_nothing_fills_the_queue_of_batches() -> None:
    run = watched()
    run(Arrive((Segment(1, 2),)), Schedule())
    assert run(Schedule()).count == 0
    assert run(Schedule()).reason == RUN_AHEAD_LIMIT
    run(Retire())
    assert run(Schedule()).status == "done"  # what was stored is awaited


def test_of_what_is_loaded_after_its_sample_was_dropped_the_last_token_is_computed_anew() -> None:
    """The checks were told of one token more than vLLM knows by then."""
    run = watched(blocks=4, requests=2, block_size=1)
    one, other = Segment(0, 2), Segment(1, 2)
    run(Arrive((one,)), Arrive((other,)), Arrive((other,), max_tokens=2), Run(6))
    run(Arrive((one,)), Run(2), Schedule(), Schedule())
    assert run(Reset(running=True)).reason == "blocks_in_use"
    run(Run(6))


def test_another_error_while_somebody_loads_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("out of order")

    run = watched(blocks=4, block_size=2)
    run(Arrive((Segment(1, 7),)), Run(8), Arrive((Segment(2, 7),)), Run(8))
    run(Arrive((Segment(1, 7),)), Schedule())
    assert run.subject.cache.copies
    pool = run.subject.scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(pool, "reset_prefix_cache", fails)
    for running in (False, True):
        with pytest.raises(RuntimeError, match="out of order"):
            run.subject.scheduler.reset_prefix_cache(reset_running_requests=running)
        run.harness.perform(Reset(running=running))
        assert run.harness.violations[0].property == "CRASH"


# -- what is found in the release ------------------------------------------------------------------

NO_RESET = ("Failed to reset KV cache even when",)


def test_the_unmodified_release_has_one_finding() -> None:
    found = list(failures(ASYNC_NAME, SEED, 150))
    assert found
    assert {violation.property for _, violation in found} == {"CRASH"}
    assert all(is_known(violation, NO_RESET) for _, violation in found)


def test_a_reset_with_a_step_in_flight_raises_and_resets_nothing() -> None:
    case = load_case(Path(__file__).parent / "known" / "reset_with_a_step_in_flight.json")
    (violation, *_) = replay(case).violations
    assert (violation.property, is_known(violation, NO_RESET)) == ("CRASH", True)
    run = watched()
    run(Arrive((Segment(1, 4),), output=4), Schedule())
    scheduler = run.subject.scheduler
    with pytest.raises(RuntimeError, match=NO_RESET[0]):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not [r for r in scheduler.requests.values() if r.status.name.startswith("WAITING_FOR")]
    assert (len(scheduler.running), len(scheduler.deferred_frees)) == (0, 1)
    assert len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache) == 2


@pytest.mark.parametrize(("name", "between"), [(ASYNC_NAME, Retire()), (NAME, None)])
def test_without_one_or_without_steps_in_flight_it_is_done(
    name: str, between: Operation | None
) -> None:
    run = watched(name=name)
    run(PROMPT, Schedule(), *([between] if between else []))
    assert run(Reset(running=True)).status == "done"


def test_without_a_connector_it_is_done_with_a_step_in_flight() -> None:
    subject: Any = subject_factory("vllm:async_scheduler")(Configuration(blocks=6, block_size=2))
    harness = SchedulingHarness(subject, audit_interval=1)
    assert not harness.run((PROMPT, Schedule()))
    assert harness.perform(Reset(running=True)).status == "done"
    assert not harness.violations


@pytest.mark.parametrize("name", [NAME, ASYNC_NAME])
def test_a_second_reset_of_the_connector_before_the_next_iteration_fails_an_assertion(
    name: str,
) -> None:
    """No operation of ours: found by a look at what raises when both caches are reset."""
    run = SchedulingHarness(
        VllmConnectorSubject(Configuration(blocks=6, block_size=2), name=name), checked=False
    )
    run.run((PROMPT, Run(1)))
    assert run.subject.scheduler.connector.connector_scheduler._jobs
    reset = partial(run.subject.scheduler.reset_prefix_cache, reset_connector=True)
    reset()
    with pytest.raises(AssertionError):
        reset()
    run.run((Run(1),))
    reset()


# -- mutants of vLLM: what steps in flight keep ----------------------------------------------------


def keeps_nothing_for_steps_in_flight(original: Original) -> Original:
    return lambda scheduler, request: True


def keeps_nothing_for_the_latest_step(original: Original) -> Original:
    def can(scheduler: Any, request: Any) -> bool:
        return bool(request.last_sched_seq <= scheduler.processed_step_seq + 1)

    return can


def keeps_it_for_a_step_too_few(original: Original) -> Original:
    def free(scheduler: Any, request: Any) -> None:
        original(scheduler, request)
        kept = scheduler.deferred_frees
        if kept:
            step, blocks = kept.pop()
            kept.append((min(step, scheduler.processed_step_seq + 1), blocks))

    return free


def never_gives_back_what_was_kept(original: Original) -> Original:
    return lambda scheduler: None


def gives_back_all_that_was_kept(original: Original) -> Original:
    def drain(scheduler: Any) -> None:
        kept = [blocks for _, blocks in scheduler.deferred_frees]
        scheduler.deferred_frees.clear()
        for blocks in kept:
            scheduler.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    return drain


def gives_back_the_first_block_first(original: Original) -> Original:
    def drain(scheduler: Any) -> None:
        for _, blocks in scheduler.deferred_frees:
            blocks.reverse()
        original(scheduler)

    return drain


def loses_the_last_block_that_was_kept(original: Original) -> Original:
    def drain(scheduler: Any) -> None:
        for _, blocks in scheduler.deferred_frees:
            blocks.pop()
        original(scheduler)

    return drain


def stores_before_the_step_has_run(original: Original) -> Original:
    """Copies that are put off to the next step are begun with the one before."""

    def start(worker: Any, metadata: Any) -> None:
        original(worker, metadata)
        worker.prepare_store_kv(metadata)
        metadata.store_jobs.clear()
        for job, source, target in worker._unsubmitted_store_jobs:
            worker.worker.submit_store(job, source, target)
        worker._unsubmitted_store_jobs.clear()

    return start


def flushes_nothing(original: Original) -> Original:
    def build(connector: Any, scheduled: Any) -> Any:
        metadata = original(connector, scheduled)
        metadata.jobs_to_flush = None
        return metadata

    return build


MUTANTS = (
    Mutant(keeps_nothing_for_steps_in_flight, f"{SCHEDULER}._request_blocks_can_be_freed", {"PIN"}),
    Mutant(keeps_nothing_for_the_latest_step, f"{SCHEDULER}._request_blocks_can_be_freed", {"PIN"}),
    Mutant(keeps_it_for_a_step_too_few, f"{SCHEDULER}._free_request_blocks", {"PIN"}),
    Mutant(never_gives_back_what_was_kept, f"{SCHEDULER}._drain_deferred_frees", {"PIN"}),
    Mutant(gives_back_all_that_was_kept, f"{SCHEDULER}._drain_deferred_frees", {"PIN"}),
    Mutant(
        gives_back_the_first_block_first, f"{SCHEDULER}._drain_deferred_frees", {"ORDER", "REF"}
    ),
    Mutant(
        loses_the_last_block_that_was_kept, f"{SCHEDULER}._drain_deferred_frees", {"REF", "CONS"}
    ),
    Mutant(stores_before_the_step_has_run, f"{WORKER}.start_kv_transfers", {"XFER"}),
    Mutant(flushes_nothing, f"{CONNECTOR}.build_connector_meta", {"XFER"}),
)

NAMES: dict[str, Sequence[str]] = {
    "vllm.v1.core.kv_cache_manager.KVCacheManager.pop_blocks_for_free": ("request",),
    "vllm.v1.core.block_pool.BlockPool.free_blocks": ("ordered_blocks",),
    f"{SCHEDULER}._drain_deferred_frees": (),
}


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.setattr(mutant.target, mutant.change(resolve_name(mutant.target)))
    found_and_shrunk(ASYNC_NAME, SEED, 100, mutant.properties, replays=REPLAYS, known=NO_RESET)


def test_what_the_adapter_overhears_is_called_as_before() -> None:
    assert list(moved_functions(NAMES)) == []
