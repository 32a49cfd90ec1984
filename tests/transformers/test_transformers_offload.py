"""Offloading to the host in transformers' continuous batching: told, checked, and its mutants.

Needs transformers 5.24 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, as_drawn, failures, found_and_shrunk, is_known, needs, one_output_each

from kvproof.fuzz.replay import replay
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import load_case
from kvproof.invariants.events import Event, TransferEnded, TransferStarted
from kvproof.invariants.operations import Abort, AnyOperation, Arrive, Run, Segment
from kvproof.invariants.scheduling.vocabulary import Limits, RequestCancelled, Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.transformers_loading import fitted
from kvproof.stateful_tests.subjects.transformers_scheduler import TransformersSubject
from kvproof.stateful_tests.totals import Totals

needs("transformers")

pytestmark = pytest.mark.transformers

NAME = "transformers:offload"
SEED = "offload"
T3 = "Cannot pop"
"""How the known defect of a host that is too full shows."""
T1_TO_T3 = ("cannot reshape tensor of 0 elements", "nothing was run in 8 iterations", T3)
KNOWN = Path(__file__).parent / "known"
BATCHING = "transformers.generation.continuous_batching"
MANAGER = f"{BATCHING}.offloading_manager.OffloadingManager"
POOL = f"{BATCHING}.cache_allocators.cache_pool.CachePool"


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


PRESSURE = (arrive(11, 1, output=2), arrive(4, 2, output=4))
"""In four blocks the second request is swapped out, and comes back when the first has ended."""


def harness(*, host: int = 4, blocks: int = 4) -> SchedulingHarness:
    configuration = Configuration(
        blocks=blocks, host_blocks=host, scheduling=Limits(token_budget=15)
    )
    built = harness_for(TransformersSubject(configuration, kind="offload"), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def events_of(run: SchedulingHarness, operation: AnyOperation, kind: type[Event]) -> list[Any]:
    run.perform(operation)
    assert not run.violations
    return [event for event in run.last_events if isinstance(event, kind)]


# -- the adapter ---------------------------------------------------------------------------------


def test_a_starved_request_is_swapped_out_and_comes_back() -> None:
    run = harness()
    assert not run.run((*PRESSURE, Run(1)))
    (scheduled,) = events_of(run, Run(1), Scheduled)
    (out,) = [event for event in run.last_events if isinstance(event, TransferStarted)]
    assert scheduled.swapped == (1,)
    assert (out.kind, out.request, len(out.sources)) == ("swap_out", 1, 1)
    (scheduled,) = events_of(run, Run(1), Scheduled)
    (back,) = [event for event in run.last_events if isinstance(event, TransferStarted)]
    ended = [event.transfer for event in run.last_events if isinstance(event, TransferEnded)]
    assert scheduled.resumed == (1,)
    assert (back.kind, back.sources, ended) == ("swap_in", out.targets, [back.transfer])
    assert [part.tokens for part in scheduled.parts] == [1]
    assert not run.run([Run(9)])
    assert run.goals["swapped-out"] == run.goals["swapped-in"] == 1
    assert run.subject.state_view.live() == []
    assert run.subject.state_view.metrics()["host_promotions"] == 1


def test_what_does_not_fit_on_the_host_is_reset() -> None:
    run = harness(host=1)
    operations = [arrive(8, 1, output=8), arrive(8, 2, output=8), Run(64)]
    assert not run.run(operations)
    assert (run.goals["swapped-out"], run.goals["preempted-for-recompute"]) == (0, 1)


def test_a_cancelled_request_gives_up_its_place_on_the_host() -> None:
    run = harness()
    assert not run.run((*PRESSURE, Run(2)))
    assert run.subject.cache.free_on_host() == 3
    run.perform(Abort(1 if len(run.subject.jobs) > 1 else 0))
    (cancelled,) = events_of(run, Run(1), RequestCancelled)
    assert cancelled.request == 1
    assert run.subject.cache.free_on_host() == 4
    assert run.goals["aborted-preempted"] == 1


def test_the_host_of_the_engine_is_pinned_memory_where_there_is_an_accelerator() -> None:
    source = inspect.getsource(resolve_name(f"{MANAGER}.__init__"))
    assert source.count("torch.empty(") == source.count("pin_memory=True") == 1
    manager = TransformersSubject(Configuration(), kind="offload").processor.offloading_manager
    assert not manager._cpu_tensor.is_pinned()
    assert manager._compute_stream is None


def test_memory_that_nothing_wrote_is_no_number_and_is_seen_when_it_is_read() -> None:
    run = harness()
    assert (run.subject.cache.manager._cpu_tensor == 0xFF).all()
    assert not run.run((*PRESSURE, Run(2)))
    run.subject.cache.manager._cpu_tensor.fill_(0xFF)
    assert {violation.property for violation in run.run([Run(9)])} == {"CRASH"}


def test_there_is_always_a_host_and_it_has_whole_sectors() -> None:
    assert fitted(Configuration(), "offload").host_blocks == 8
    assert fitted(Configuration(block_size=5, host_blocks=3), "offload").host_blocks == 4
    assert fitted(Configuration(host_blocks=3)).host_blocks == 0


def test_the_subject_is_known_by_the_name_that_it_gives() -> None:
    assert subject_factory(NAME, imports=False)(Configuration()).name == NAME
    assert is_kvproofs_own(NAME)


# -- known answers -------------------------------------------------------------------------------


def test_a_victim_that_the_host_has_no_room_for_ends_the_engine() -> None:
    run = harness(host=1)
    run.run((*PRESSURE, arrive(8, 3, output=2), Run(5)))
    (violation,) = run.violations
    assert (violation.property, violation.op) == ("CRASH", 3)
    assert T3 in violation.message


@pytest.mark.parametrize("host", [2, 3, 8])
def test_with_more_room_it_does_not(host: int) -> None:
    run = harness(host=host)
    assert not run.run((*PRESSURE, arrive(8, 3, output=2), Run(30)))
    assert run.subject.state_view.live() == []


def recounts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mended: what can be freed is freed before anything is counted."""

    def reserve(manager: Any, counts: dict[str, int]) -> Any:
        manager._cpu_pool.try_to_free_sectors()
        return original(manager, counts)

    return reserve


def test_mended_it_is_reset_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{MANAGER}._reserve_cpu_blocks"
    monkeypatch.setattr(name, recounts(resolve_name(name)))
    run = harness(host=1)
    assert not run.run((*PRESSURE, arrive(8, 3, output=2), Run(30)))
    assert run.goals["preempted-for-recompute"] == 1


@pytest.mark.parametrize("case", ["host_too_full", "cancelled_under_pressure_offload"])
def test_a_known_case_replays(case: str) -> None:
    known = load_case(KNOWN / f"{case}.json")
    (violation,) = replay(known).violations
    assert violation.property == known.violates


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


def seen(drawn: Callable[[Draw], Draw]) -> list[Violation]:
    """In drawn runs, in which requests are swapped out and come back."""
    totals = Totals()
    seen = [violation for _, violation in failures(NAME, SEED, 24, drawn=drawn, totals=totals)]
    assert totals.goals["swapped-out"]
    assert totals.goals["swapped-in"]
    return seen


def test_the_release_has_only_the_known_findings() -> None:
    assert all(is_known(violation, T1_TO_T3) for violation in seen(as_drawn))


def test_mended_and_without_what_the_others_need_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{MANAGER}._reserve_cpu_blocks"
    monkeypatch.setattr(name, recounts(resolve_name(name)))
    assert not seen(one_output_each)


def copies_nothing(original: Original) -> Original:
    return lambda indices: []


def copies_only_what_lies_together(original: Original) -> Original:
    return lambda indices: original(indices)[:1]


def brings_back_the_blocks_in_another_order(original: Original) -> Original:
    def restore(manager: Any, batch: Any) -> None:
        for blocks in manager._request_id_to_cpu_blocks.values():
            for slots in blocks.values():
                slots.reverse()
        original(manager, batch)

    return restore


def brings_nothing_back(original: Original) -> Original:
    def restore(manager: Any, batch: Any) -> None:
        for future in batch:
            future.state.is_cpu_offloaded = False

    return restore


def hands_out_a_block_of_the_host_twice(original: Original) -> Original:
    def reserve(manager: Any, counts: Any) -> Any:
        reserved = original(manager, counts)
        if reserved is not None:
            manager._cpu_pool.free_blocks(0, next(iter(reserved.values()))[:1])
        return reserved

    return reserve


def keeps_a_block_of_the_host(original: Original) -> Original:
    def free(pool: Any, index: int, blocks: list[int]) -> None:
        original(pool, index, blocks if pool.num_reserved_sectors else blocks[1:])

    return free


def forgets_that_it_was_copied(original: Original) -> Original:
    def offload(manager: Any, *arguments: Any) -> set[str]:
        original(manager, *arguments)
        return set()

    return offload


def keeps_what_the_cancelled_had(original: Original) -> Original:
    return lambda manager, state: None


Mutant = tuple[Callable[[Original], Original], str, set[str], Callable[[Draw], Draw]]
MUTANTS: tuple[Mutant, ...] = (
    (copies_nothing, f"{BATCHING}.offloading_manager.contiguous_runs", {"CRASH"}, one_output_each),
    (
        copies_only_what_lies_together,
        f"{BATCHING}.offloading_manager.contiguous_runs",
        {"CRASH"},
        one_output_each,
    ),
    (
        brings_back_the_blocks_in_another_order,
        f"{MANAGER}.restore_scheduled_requests",
        {"CRASH"},
        one_output_each,
    ),
    (brings_nothing_back, f"{MANAGER}.restore_scheduled_requests", {"CONS"}, one_output_each),
    (
        hands_out_a_block_of_the_host_twice,
        f"{MANAGER}._reserve_cpu_blocks",
        {"CONS", "EXCL"},
        one_output_each,
    ),
    (keeps_a_block_of_the_host, f"{POOL}.free_blocks", {"CONS"}, one_output_each),
    (forgets_that_it_was_copied, f"{MANAGER}._offload_to_cpu", {"CONS", "CRASH"}, one_output_each),
    (keeps_what_the_cancelled_had, f"{MANAGER}.free_request_cpu_cache", {"CONS"}, as_drawn),
)


@pytest.mark.parametrize(
    ("mutate", "target", "properties", "change"),
    MUTANTS,
    ids=[mutant[0].__name__ for mutant in MUTANTS],
)
def test_a_mutant_of_the_offloading_manager_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
    change: Callable[[Draw], Draw],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    bounds: Any = {"operations": 6, "replays": 250}
    found_and_shrunk(NAME, SEED, 200, properties, drawn=change, known=T1_TO_T3, **bounds)
