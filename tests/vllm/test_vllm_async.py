"""vLLM's asynchronous scheduling, two steps in flight: what is told, and what the checks see.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, first_failure, found_and_shrunk, needs

from kvproof.fuzz.cli.check import _driven
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import BlocksPublished, BlocksReleased, StepLaunched
from kvproof.invariants.operations import (
    Abort,
    AnyOperation,
    Arrive,
    Reset,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.scheduling.vocabulary import Completed, Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.totals import Totals

needs("vllm:async_scheduler")

pytestmark = pytest.mark.vllm

SEED = "vllm-async"

ASYNC = "vllm:async_scheduler"
PRIORITY = f"{ASYNC}:priority"
V1 = "but no step has written it"
"""How the known defect of the priority policy shows."""


def harness(name: str = ASYNC, *, budget: int = 16, **sizes: Any) -> SchedulingHarness:
    configuration = Configuration(
        **({"blocks": 10, "block_size": 4} | sizes), scheduling=Limits(token_budget=budget)
    )
    built = harness_for(subject_factory(name)(configuration), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


def events_of(
    harness: SchedulingHarness, operation: AnyOperation, kind: type[Any] | tuple[type[Any], ...]
) -> list[Any]:
    harness.perform(operation)
    assert not harness.violations
    return [event for event in harness.last_events if isinstance(event, kind)]


# -- what it does --------------------------------------------------------------------------------


def test_a_request_is_run_for_the_token_that_is_being_sampled() -> None:
    run = harness()
    run.perform(arrive(7, output=4))
    run.perform(Schedule())
    (ahead,) = events_of(run, Schedule(), StepLaunched)
    assert (ahead.items[0].start, ahead.items[0].end) == (7, 8)
    assert run.perform(Schedule()).reason == "run_ahead_limit"
    (completed,) = events_of(run, Retire(), Completed)
    assert completed.sampled == (0,)


def test_a_block_that_an_output_token_completes_is_findable_once_that_has_come() -> None:
    run = harness()
    run.perform(arrive(7, output=4))
    (first,) = events_of(run, Schedule(), BlocksPublished)
    assert (first.row, len(first.blocks)) == (0, 1)
    assert events_of(run, Schedule(), BlocksPublished) == []
    assert events_of(run, Retire(), BlocksPublished) == []
    (second,) = events_of(run, Retire(), BlocksPublished)
    assert (second.row, len(second.blocks)) == (1, 1)


def test_blocks_are_free_while_a_step_in_flight_uses_them() -> None:
    run = harness()
    run.perform(arrive(39))
    run.perform(Schedule())
    (released,) = events_of(run, Abort(0), BlocksReleased)
    assert len(released.blocks) == 4
    assert run.subject.view().free_count(0) == 10
    assert run.run([arrive(39, 2), Schedule(), Retire(), Retire(), Run(9)]) == ()


def test_what_a_step_computes_after_the_last_output_is_void() -> None:
    run = harness()
    for operation in (arrive(3, output=2, max_tokens=9), Schedule(), Schedule(), Retire()):
        assert run.perform(operation).status == "done"
    run.perform(Schedule())
    (last,) = events_of(run, Retire(), Completed)
    assert last.finished == (0,)
    (void,) = events_of(run, Retire(), Completed)
    assert (void.sampled, void.finished) == ((), ())
    assert run.goals["finished-while-next-step-in-flight"] == 1


def test_a_reset_preempts_what_runs_and_drops_its_samples() -> None:
    run = harness()
    for operation in (arrive(7, output=4), Schedule(), Retire(), Schedule(), Schedule()):
        assert run.perform(operation).status == "done"
    assert run.perform(Reset()).reason == "blocks_in_use"
    assert run.perform(Reset(running=True)).count == 1
    assert run.subject.state_view.standing(0) == ("preempted", 1, 1)
    run.perform(Retire())
    (resumed,) = events_of(run, Schedule(), StepLaunched)
    assert (resumed.items[0].start, resumed.items[0].end) == (0, 8)
    run.drain([])
    assert not run.audit()
    assert run.goals["sample-dropped-by-reset"] == 1


def test_options_name_the_subject() -> None:
    assert _driven(ASYNC, None, None) == ASYNC
    assert _driven(ASYNC, "priority", None) == PRIORITY
    assert _driven(ASYNC, None, "m:C") == f"{ASYNC}:fcfs:m:C"
    for name in (ASYNC, PRIORITY):
        assert subject_factory(name, imports=False)(Configuration()).name == name
        assert is_kvproofs_own(name)


def test_a_class_of_ones_own_is_an_asynchronous_one() -> None:
    module = "vllm.v1.core.sched"
    name = f"{ASYNC}:fcfs:{module}.async_scheduler:AsyncScheduler"
    assert subject_factory(name)(Configuration()).name == name
    with pytest.raises(InputError, match="no subclass of vLLM's AsyncScheduler"):
        subject_factory(f"{ASYNC}:fcfs:{module}.scheduler:Scheduler")


LOOKING = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class Looking(AsyncScheduler):
    def update_from_output(self, *more):
        told = super().update_from_output(*more)
        for outputs in told.values():
            for output in outputs.outputs:
                blocks = self.kv_cache_manager.get_block_ids(output.request_id)[0]
                assert not (output.finish_reason is not None and blocks), "it still holds blocks"
        return told
"""


def test_it_finds_the_blocks_of_the_ended_free_as_in_plain_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looking_vllm_scheduler.py").write_text(LOOKING)
    monkeypatch.syspath_prepend(tmp_path)
    assert first_failure(f"{ASYNC}:fcfs:looking_vllm_scheduler:Looking", SEED, 40) is None


def test_a_block_is_completed_as_another_request_ends() -> None:
    run = harness()
    for operation in (arrive(2, output=2), arrive(7, 2, output=4), Schedule(), Schedule()):
        run.perform(operation)
    run.perform(Retire())
    told = events_of(run, Retire(), (BlocksPublished, BlocksReleased))
    assert [type(event) for event in told] == [BlocksPublished, BlocksReleased]
    assert [event.request for event in told] == [1, 0]


# -- the unmodified release, and mutants of it ---------------------------------------------------


def test_the_unmodified_release_with_fcfs_has_no_findings() -> None:
    assert first_failure(ASYNC, SEED, 120) is None


def test_a_search_finds_what_the_priority_policy_never_computed() -> None:
    caught = search(PRIORITY, "s1", seconds=300, totals=Totals())
    assert caught is not None
    assert V1 in caught.violation.message
    shrunk = shrink(caught.case)
    assert shrunk is not None
    assert len(shrunk.case.operations) <= 12
    assert shrunk.violation.property == "VALID"


def forgets_what_is_being_sampled(original: Original) -> Original:
    def update(scheduler: Any, output: Any) -> None:
        original(scheduler, output)
        for name in output.num_scheduled_tokens:
            scheduler.requests[name].num_output_placeholders = 0

    return update


def keeps_waiting_for_a_sample_that_came(original: Original) -> Original:
    def update(scheduler: Any, request: Any, tokens: Any, **more: Any) -> Any:
        placeholders = request.num_output_placeholders
        answer = original(scheduler, request, tokens, **more)
        request.num_output_placeholders = placeholders
        return answer

    return update


def drops_samples_from_before_a_preemption(original: Original) -> Original:
    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> None:
        original(scheduler, request, *more, **named | {"drop_stale_output": True})

    return preempt


def awaits_samples_from_before_a_preemption(original: Original) -> Original:
    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> None:
        placeholders = request.num_output_placeholders
        original(scheduler, request, *more, **named)
        request.num_output_placeholders = placeholders

    return preempt


def publishes_no_output(original: Original) -> Original:
    return lambda manager, request, tokens: None


def delivers_what_was_sampled_after_the_end(original: Original) -> Original:
    def check(request: Any, max_model_len: int) -> bool:
        stopped = bool(original(request, max_model_len))
        return stopped and request.num_in_flight_tokens == 0

    return check


def delivers_samples_from_before_a_reset(original: Original) -> Original:
    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> None:
        original(scheduler, request, *more, **named | {"drop_stale_output": False})

    return preempt


def resets_only_what_is_free(original: Original) -> Original:
    """A reset that leaves the keys of cached blocks; it says that it was done."""

    def reset(pool: Any) -> bool:
        done = pool.num_gpu_blocks - pool.get_num_free_blocks() == 1
        if done:
            for block in pool.free_block_queue.get_all_free_blocks()[1::2]:
                pool._maybe_evict_cached_block(block)
        return done

    return reset


SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
AHEAD = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
POOL = "vllm.v1.core.block_pool.BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
STOPS = "vllm.v1.core.sched.scheduler.check_stop"
MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (forgets_what_is_being_sampled, f"{AHEAD}._update_after_schedule", {"BATCH", "PLAN"}),
    (
        keeps_waiting_for_a_sample_that_came,
        f"{SCHEDULER}._update_request_with_output",
        {"PLAN", "CAP", "RESUME"},
    ),
    (
        drops_samples_from_before_a_preemption,
        f"{SCHEDULER}._preempt_request",
        {"PROGRESS", "PLAN"},
    ),
    (
        awaits_samples_from_before_a_preemption,
        f"{SCHEDULER}._preempt_request",
        {"PLAN", "RESUME", "BATCH", "LIVE"},
    ),
    (publishes_no_output, f"{MANAGER}.cache_blocks", {"VALID"}),
    (
        delivers_samples_from_before_a_reset,
        f"{SCHEDULER}._preempt_request",
        {"PROGRESS", "FCFS", "BATCH"},
    ),
    (resets_only_what_is_free, f"{POOL}.reset_prefix_cache", {"VALID", "CAP"}),
    (delivers_what_was_sampled_after_the_end, STOPS, {"PROGRESS", "HOLD"}),
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
    found_and_shrunk(ASYNC, SEED, 200, properties)
