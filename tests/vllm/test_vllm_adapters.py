"""vLLM's scheduler with a limit of LoRA adapters: who is passed over, and who must not be.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, failures, needs

from kvproof.invariants.operations import Arrive, Run, Schedule, Segment
from kvproof.invariants.scheduling.vocabulary import Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

NAME = "vllm:scheduler"
ASYNC = "vllm:async_scheduler"
SEED = "vllm-adapters"

needs(NAME)

pytestmark = pytest.mark.vllm


def arrivals(*adapters: int) -> list[Arrive]:
    return [Arrive((Segment(n, 5),), output=3, adapter=a) for n, a in enumerate(adapters)]


def admitted(*adapters: int) -> tuple[int, ...]:
    """Of requests with these adapters, those that the first iteration admits."""
    run = harness_for(subject_factory(NAME)(Configuration(blocks=20)), audit_interval=1)
    assert isinstance(run, SchedulingHarness)
    assert not run.run([*arrivals(*adapters), Schedule()])
    (scheduled,) = [event for event in run.last_events if isinstance(event, Scheduled)]
    assert not run.run([Run(1)])
    run.drain([])
    assert not run.audit()
    return scheduled.admitted


def test_one_adapter_is_loaded_at_a_time_and_those_without_one_need_none() -> None:
    assert admitted(1, 2, 1, 0) == (0, 2, 3)
    assert admitted(0, 2, 1) == (0, 1)


@pytest.mark.parametrize("name", [NAME, ASYNC])
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    totals = Totals()
    assert next(failures(name, SEED, 60, totals=totals), None) is None
    assert totals.goals["waits-for-adapter"]


# -- mutants -------------------------------------------------------------------------------------


def while_scheduling(
    change: Callable[[Any], Callable[[], None]],
) -> Callable[[Original], Original]:
    """A scheduler is changed for as long as it schedules; ``change`` gives what undoes it."""

    def mutate(original: Original) -> Original:
        def schedule(scheduler: Any, *more: Any) -> Any:
            undo = change(scheduler)
            try:
                return original(scheduler, *more)
            finally:
                undo()

        return schedule

    mutate.__name__ = change.__name__
    return mutate


def knows_no_limit(scheduler: Any) -> Callable[[], None]:
    config, scheduler.lora_config = scheduler.lora_config, None
    return lambda: setattr(scheduler, "lora_config", config)


def admits_one_adapter_too_many(scheduler: Any) -> Callable[[], None]:
    config = scheduler.lora_config
    config.max_loras += 1

    def undo() -> None:
        config.max_loras -= 1

    return undo


def takes_an_adapter_that_is_loaded_for_another(scheduler: Any) -> Callable[[], None]:
    waiting = [(request, request.lora_request) for request in scheduler.waiting]
    for rank, (request, adapter) in enumerate(waiting):
        if adapter is not None:
            request.lora_request = type(adapter)(adapter.lora_name, 100 + rank, adapter.lora_path)

    def undo() -> None:
        for request, adapter in waiting:
            request.lora_request = adapter

    return undo


def waits_with_whoever_is_first(scheduler: Any) -> Callable[[], None]:
    """Nobody is admitted while the first one lacks its adapter."""
    most = scheduler.max_num_active_reqs
    loaded = {request.lora_request for request in scheduler.running} - {None}
    first = scheduler.waiting.peek_request().lora_request if scheduler.waiting else None
    if loaded and first is not None and first not in loaded:
        scheduler.max_num_active_reqs = 0
    return lambda: setattr(scheduler, "max_num_active_reqs", most)


SCHEDULE = "vllm.v1.core.sched.scheduler.Scheduler.schedule"
MUTANTS = (
    Mutant(while_scheduling(knows_no_limit), SCHEDULE, {"BUDGET"}),
    Mutant(while_scheduling(admits_one_adapter_too_many), SCHEDULE, {"BUDGET"}),
    Mutant(while_scheduling(takes_an_adapter_that_is_loaded_for_another), SCHEDULE, {"FCFS"}),
    Mutant(while_scheduling(waits_with_whoever_is_first), SCHEDULE, {"BATCH"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, SEED)
