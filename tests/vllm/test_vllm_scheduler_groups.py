"""vLLM's scheduler over two groups of layers, whose blocks are of unequal size.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from typing import Any

import pytest
from foreign import (
    Mutant,
    Original,
    assert_found_and_shrunk,
    each_of,
    failures,
    first_failure,
    needs,
)

from kvproof.fuzz.cli.check import _driven
from kvproof.invariants.events import BlocksPublished, BlocksReleased, BlocksReused, StepLaunched
from kvproof.invariants.operations import Abort, Arrive, Retire, Run, Schedule, Segment
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory

NAME = "vllm:scheduler:groups"
ASYNC = "vllm:async_scheduler:groups"

needs(NAME)

pytestmark = pytest.mark.vllm


def harness(name: str = NAME, **sizes: Any) -> SchedulingHarness:
    configuration = Configuration(
        **({"blocks": 12, "block_size": 4} | sizes), scheduling=Limits(token_budget=64)
    )
    built = harness_for(subject_factory(name)(configuration), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def arrive(length: int, **more: Any) -> Arrive:
    return Arrive((Segment(1, length),), **more)


def events_of(run: SchedulingHarness, operation: Any, kind: type[Any]) -> list[Any]:
    run.perform(operation)
    assert not run.violations
    return [event for event in run.last_events if isinstance(event, kind)]


def test_a_step_reads_the_tables_that_the_worker_was_told_of_each_group() -> None:
    run = harness()
    run.perform(arrive(9, output=8))
    (launched,) = events_of(run, Schedule(), StepLaunched)
    assert [len(table) for table in launched.items[0].tables] == [3, 2]
    assert not run.run([Retire(), Run(4)])
    (launched,) = events_of(run, Schedule(), StepLaunched)
    assert [len(table) for table in launched.items[0].tables] == [4, 2]


def test_hits_and_what_is_findable_end_with_the_larger_block() -> None:
    run = harness()
    run.perform(arrive(13))
    published = events_of(run, Schedule(), BlocksPublished)
    assert [(event.group, len(event.blocks)) for event in published] == [(0, 2), (1, 1)]
    assert not run.run([Retire(), arrive(13)])
    reused = events_of(run, Schedule(), BlocksReused)
    assert [(event.group, len(event.blocks)) for event in reused] == [(0, 2), (1, 1)]
    released = events_of(run, Retire(), BlocksReleased)
    assert [(event.group, len(event.blocks)) for event in released] == [(0, 4), (1, 2)]
    run.drain([])
    assert not run.audit()


def test_the_front_end_refuses_what_the_pool_cannot_hold_in_both_groups() -> None:
    run = harness()
    # 32 tokens take eight blocks of one group and four of the other.
    assert run.perform(arrive(34)).reason == LARGER_THAN_POOL
    assert run.perform(arrive(32, output=2)).reason == LARGER_THAN_POOL
    assert run.perform(arrive(32)).reason == LARGER_THAN_MODEL
    assert run.perform(arrive(31)).status == "done"
    assert not run.run([Run(2)])


def test_with_steps_in_flight_an_abort_gives_back_the_blocks_of_both_groups() -> None:
    run = harness(ASYNC)
    assert not run.run([arrive(9, output=5), Schedule(), Schedule(), Abort(0)])
    assert run.subject.cache.view().free_count(1) == 12
    run.drain([])
    assert not run.audit()


def test_their_names_are_kvproofs_own() -> None:
    assert is_kvproofs_own(NAME)
    assert is_kvproofs_own(ASYNC)


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


@pytest.mark.parametrize("name", [NAME, ASYNC])
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    assert first_failure(name, "vllm-scheduler-groups", 120) is None


def frees_one_group(original: Original) -> Original:
    def free(coordinator: Any, name: str) -> None:
        coordinator.single_type_managers[0].free(name)

    return free


def lets_hits_end_where_the_smallest_block_does(original: Original) -> Any:
    return property(lambda coordinator: min(coordinator.group_block_sizes))


def knows_a_block_by_its_first_part(original: Original) -> Original:
    return lambda hashes, row: hashes.block_hashes[row * hashes.scale_factor]


def tells_workers_of_new_blocks_of_one_group(original: Original) -> Original:
    def make(scheduler: Any, *more: Any) -> Any:
        data = original(scheduler, *more)
        data.new_block_ids = [ids and (ids[0], []) for ids in data.new_block_ids]
        return data

    return make


def tells_workers_of_the_groups_the_wrong_way_round(original: Original) -> Original:
    def tell(blocks: Any, **more: Any) -> Any:
        told = original(blocks, **more)
        return told and tuple(reversed(told))

    return tell


def counts_the_room_of_one_group(original: Original) -> Original:
    def count(coordinator: Any, **more: Any) -> Any:
        managers = coordinator.single_type_managers
        coordinator.single_type_managers = managers[:1]
        try:
            return original(coordinator, **more)
        finally:
            coordinator.single_type_managers = managers

    return count


COORDINATOR = "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"
HYBRID = "vllm.v1.core.kv_cache_coordinator.HybridKVCacheCoordinator"
HASHES = "vllm.v1.core.kv_cache_utils.BlockHashListWithBlockSize._get_value_at"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
TOLD = "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids"
MUTANTS = (
    Mutant(frees_one_group, f"{COORDINATOR}.free", {"CONS", "REF", "BATCH", "HOLD"}),
    Mutant(
        lets_hits_end_where_the_smallest_block_does,
        f"{HYBRID}._cache_hit_alignment_tokens",
        {"FIT", "CAP"},
    ),
    Mutant(knows_a_block_by_its_first_part, HASHES, {"KEY"}),
    Mutant(
        tells_workers_of_new_blocks_of_one_group,
        f"{SCHEDULER}._make_cached_request_data",
        {"PROV", "EXCL"},
    ),
    Mutant(tells_workers_of_the_groups_the_wrong_way_round, TOLD, {"PROV", "EXCL"}),
    Mutant(
        counts_the_room_of_one_group,
        f"{COORDINATOR}.get_num_blocks_to_allocate",
        {"CRASH", "CAP"},
    ),
)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, "vllm-scheduler-groups")


# -- the policy priority -------------------------------------------------------------------------

PRIORITY = f"{NAME}:priority"
V1 = "but no step has written it"
"""How the known defect of that policy shows, see the findings."""


def test_priority_has_its_known_defect_over_groups_and_no_other() -> None:
    assert _driven(NAME, "priority", None) == PRIORITY
    found = [violation for _, violation in failures(PRIORITY, "vllm-priority-groups", 60)]
    assert found
    assert all(V1 in violation.message for violation in found)


def prefers_the_less_urgent(original: Original) -> Original:
    return lambda request, other: request.priority > other.priority


def preempts_the_most_urgent(original: Original) -> Original:
    """Of those that run, which it keeps by their arrival."""

    def schedule(scheduler: Any, *more: Any) -> Any:
        priorities = [(request, request.priority) for request in scheduler.running]
        for request, priority in priorities:
            request.priority = -priority
        try:
            return original(scheduler, *more)
        finally:
            for request, priority in priorities:
                request.priority = priority

    return schedule


@each_of(
    [
        Mutant(prefers_the_less_urgent, "vllm.v1.request.Request.__lt__", {"PRIORITY"}),
        Mutant(preempts_the_most_urgent, f"{SCHEDULER}.schedule", {"PRIORITY"}),
    ]
)
def test_a_mutant_of_its_priorities_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, PRIORITY, "vllm-priority-groups")
