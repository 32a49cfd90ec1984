"""vLLM's scheduler over two groups of layers, one of which attends in a window only.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, first_failure, needs

from kvproof.invariants.events import (
    BlocksOutlived,
    BlocksReused,
    Event,
    RequestPreempted,
    StepLaunched,
)
from kvproof.invariants.operations import (
    AnyOperation,
    Arrive,
    Reserve,
    Reset,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.scheduling.vocabulary import BlocksCounted, Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory

NAME = "vllm:scheduler:hybrid"
ASYNC = "vllm:async_scheduler:hybrid"

needs(NAME)

pytestmark = pytest.mark.vllm


def harness(name: str = NAME, *, blocks: int = 16, budget: int = 64) -> SchedulingHarness:
    """The window is six tokens, of blocks of four."""
    configuration = Configuration(
        blocks=blocks, block_size=4, scheduling=Limits(token_budget=budget)
    )
    built = harness_for(subject_factory(name)(configuration), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


def events_of(run: SchedulingHarness, operation: AnyOperation, kind: type[Any]) -> list[Any]:
    run.perform(operation)
    assert not run.violations
    return [event for event in run.last_events if isinstance(event, kind)]


def test_behind_the_window_blocks_are_given_back_from_chunk_to_chunk() -> None:
    run = harness(budget=8)
    run.perform(arrive(17, output=2))
    given = [events_of(run, Run(1), BlocksOutlived) for _ in range(4)]
    assert [[(event.group, len(event.blocks)) for event in told] for told in given] == [
        [],
        [],
        [(1, 2)],
        [(1, 1)],
    ]
    assert not run.audit()


def test_a_refused_growth_gives_back_what_is_behind_the_window_before_anybody_is_preempted() -> (
    None
):
    run = harness(blocks=12)
    assert not run.run([arrive(12, 1, output=4), arrive(12, 2, output=4), Run(2)])
    kinds = (BlocksOutlived, RequestPreempted)
    told = [event for event in events_of(run, Schedule(), Event) if isinstance(event, kinds)]
    assert [(type(event), event.request) for event in told] == [
        (BlocksOutlived, 0),
        (RequestPreempted, 1),
    ]
    assert run.cache.counts[Reserve]["refused"] == 1
    run.drain([])
    assert not run.audit()


def test_workers_are_not_told_what_is_behind_the_window() -> None:
    run = harness(budget=8)
    run.perform(arrive(17, output=2))
    (first,) = events_of(run, Schedule(), StepLaunched)
    assert not run.run([Retire(), Run(1)])
    (third,) = events_of(run, Schedule(), StepLaunched)
    assert third.items[0].tables[1][:2] == first.items[0].tables[1]
    assert list(run.subject.cache.view().table(0, 1))[:2] == [0, 0]


def test_a_hit_takes_of_the_windows_blocks_what_is_in_it() -> None:
    run = harness()
    assert not run.run([arrive(17), Run(2), arrive(17)])
    run.perform(Schedule())
    (counted,) = [event for event in run.last_events if isinstance(event, BlocksCounted)]
    reused = [event for event in run.last_events if isinstance(event, BlocksReused)]
    (launched,) = [event for event in run.last_events if isinstance(event, StepLaunched)]
    assert [(event.row, len(event.blocks)) for event in reused] == [(0, 4), (2, 2)]
    assert (counted.cached_tokens, counted.blocks) == (16, 4 + 2 + 2)
    assert launched.items[0].tables[1][:2] == [0, 0]
    run.drain([])
    assert not run.audit()


def test_samples_that_a_reset_drops_are_not_counted_at_the_next_hit() -> None:
    run = harness(ASYNC)
    operations = [Schedule(), Schedule(), Reset(running=True), Run(2)]
    assert not run.run([arrive(8), arrive(8, output=2), *operations])
    run.drain([])
    assert not run.audit()


def test_their_names_are_kvproofs_own() -> None:
    assert is_kvproofs_own(NAME)
    assert is_kvproofs_own(ASYNC)


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


@pytest.mark.parametrize("name", [NAME, ASYNC])
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    assert first_failure(name, "vllm-scheduler-hybrid", 120) is None


def gives_back_what_a_chunk_still_reads(original: Original) -> Original:
    """By its end, not by its start."""

    def allocate(manager: Any, request: Any, new: int, *more: Any, **named: Any) -> Any:
        coordinator, remove = manager.coordinator, manager.coordinator.remove_skipped_blocks
        coordinator.remove_skipped_blocks = lambda name, computed, **how: remove(
            name, computed + new, **how
        )
        try:
            return original(manager, request, new, *more, **named)
        finally:
            del coordinator.remove_skipped_blocks

    return allocate


def keeps_what_is_behind_the_window(original: Original) -> Original:
    return lambda manager, name, first, end: None


def takes_the_window_for_one_token_shorter(original: Original) -> Original:
    return lambda manager, computed: original(manager, computed + 1)


def tells_workers_tables_without_their_gap(original: Original) -> Original:
    def tell(request: Any, tables: Any, *more: Any, **named: Any) -> Any:
        whole = tuple([[block for block in table if block] for table in tables])
        return original(request, whole, *more, **named)

    return tell


def looks_one_block_less_far_back(original: Original) -> Original:
    return lambda *more, **named: original(*more, **named) - 1


def preempts_while_a_block_is_left(original: Original) -> Original:
    def allocate(manager: Any, request: Any, *more: Any, **named: Any) -> Any:
        running = request.num_computed_tokens > 0
        return original(manager, request, *more, **named | {"reserved_blocks": int(running)})

    return allocate


WINDOWS = "vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager"
ALLOCATE = "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots"
TOLD = "vllm.v1.core.sched.output.NewRequestData.from_request"
MUTANTS = (
    Mutant(gives_back_what_a_chunk_still_reads, ALLOCATE, {"PROV"}),
    Mutant(keeps_what_is_behind_the_window, f"{WINDOWS}._remove_blocks_in_range", {"CAP"}),
    Mutant(takes_the_window_for_one_token_shorter, f"{WINDOWS}.get_num_skipped_tokens", {"PROV"}),
    Mutant(tells_workers_tables_without_their_gap, TOLD, {"PROV"}),
    Mutant(looks_one_block_less_far_back, f"{WINDOWS}._contiguous_blocks_for_hit", {"FIT", "CAP"}),
    Mutant(preempts_while_a_block_is_left, ALLOCATE, {"CAP"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, "vllm-scheduler-hybrid")
