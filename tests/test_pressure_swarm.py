"""The narrow draws for schedulers: who gets them, and what they reach."""

from __future__ import annotations

from random import Random

import pytest

from kvproof.fuzz.pressure_swarm import draw_pressure
from kvproof.fuzz.search import abilities, run_once
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.operations import SCHEDULER_KINDS, AnyOperation, Arrive, Retire, Schedule
from kvproof.invariants.prompts import prompt_length
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

TIMELESS = frozenset(SCHEDULER_KINDS) - {"wait", "reset"}


def test_half_of_the_runs_of_a_scheduler_without_a_clock_are_under_pressure() -> None:
    draws = [draw_run(f"pressure/{number}", TIMELESS) for number in range(200)]
    assert draws == [draw_run(f"pressure/{number}", TIMELESS) for number in range(200)]
    assert 70 < sum("pressure" in draw.features for draw in draws) < 130


def test_under_a_scheduler_with_a_clock_something_lies_below_and_steps_are_single() -> None:
    able, below, stepwise = abilities(subject_factory("scheduler:fcfs")), 0, 0
    for number in range(200):
        draw = draw_run(f"pressure/{number}", able)
        timeless = draw_run(f"pressure/{number}", TIMELESS)
        if "pressure" not in timeless.features:
            assert timeless == draw
            continue
        kinds = {type(operation) for operation in draw.operations}
        assert _arrivals(draw) == _arrivals(timeless)
        assert "pressure" in draw.features
        below += draw.configuration.host_blocks > 0
        stepwise += {Schedule, Retire} <= kinds
    assert 30 < below < 100
    assert 30 < stepwise < 100


def _arrivals(draw: Draw) -> list[AnyOperation]:
    return [operation for operation in draw.operations if isinstance(operation, Arrive)]


def test_one_prompt_in_three_is_long_and_not_urgent() -> None:
    prompts = []
    for number in range(50):
        configuration, _, operations = draw_pressure(Random(f"prompts/{number}"))
        pool = configuration.blocks * configuration.block_size
        assert configuration.scheduling.token_budget <= 32
        prompts += [
            (prompt_length(operation.prompt) / pool, operation.priority)
            for operation in operations
            if isinstance(operation, Arrive)
        ]
    relaxed = [share for share, priority in prompts if priority > 2]
    assert 0.1 < len(relaxed) / len(prompts) < 0.35
    assert sum(share > 0.35 for share in relaxed) > 0.9 * len(relaxed)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_kvproofs_own_schedulers_stand_it_and_preempt(policy: str) -> None:
    factory, totals = subject_factory(f"scheduler:{policy}"), Totals()
    for number in range(40):
        draw = Draw(f"own/{number}", *draw_pressure(Random(f"own/{number}")))
        assert run_once(factory, draw, totals) is None
    assert totals.goals["preempted-for-recompute"] > 40
    assert totals.goals["prompt-in-chunks"] > 40
