"""``kvproof bench machine``: the Hypothesis machine beside one whose rules do nothing.

What Hypothesis itself takes for a step is not ours to lower; the subject, its checks, and the
start and end of each run should not take more than that again.  Both machines have the same
rules with the same kinds of arguments, and from equal seeds they draw the very same ones.
All figures are CPU seconds of one process, in interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

from hypothesis import seed as seeded
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct

from kvproof.fuzz.bench.engine import Measurement
from kvproof.fuzz.bench.machine_info import Calibration, MachineInfo, calibrate, machine_info
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.machine import generation_settings, machine_for
from kvproof.stateful_tests.strategies import FOLLOW_UPS, RECIPES, WORLD_ARGUMENTS
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals


class MachineSpeed(Struct, frozen=True):
    """Both machines, by their best rounds."""

    steps: int
    """Steps of a round, the same for both machines."""
    seconds: float
    idle_seconds: float
    ratio: float
    """Steps a second, machine over idle machine: the median of the rounds, each of which compares
    what was measured at about the same time."""
    ops_per_step: float
    """A rule may perform more than one operation."""

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds


class MachineBench(Struct, frozen=True):
    """All that ``kvproof bench machine`` measures."""

    ratios: dict[str, float]
    calibration: Calibration
    machine: MachineInfo
    results: list[Measurement]


def bench_machine(
    rounds: int = 5,
    on_round: Callable[[int], None] = lambda done: None,
    *,
    examples: int = 100,
) -> MachineBench:
    """Measure over kvproof's engine; ``on_round`` hears how many rounds are done."""
    calibration = calibrate()
    speed = steps_per_second(rounds=rounds, examples=examples, on_round=on_round)
    return MachineBench(
        ratios={"machine_over_idle": speed.ratio},
        calibration=calibration,
        machine=machine_info(),
        results=[
            Measurement("steps of the machine over the engine", speed.steps, speed.seconds),
            Measurement("steps of an idle machine", speed.steps, speed.idle_seconds),
        ],
    )


def steps_per_second(
    factory: SubjectFactory = EngineSubject,
    *,
    rounds: int = 5,
    examples: int = 100,
    steps: int = 50,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda done: None,
) -> MachineSpeed:
    """Run both machines by turns, in each round ``examples`` runs of up to ``steps`` steps.

    All rounds draw the same runs.  Raises PropertyViolated if the subject fails.
    """
    totals, count = Totals(), _Count()
    machine = machine_for(factory, "bench", totals=totals)
    idle = _idle_machine(factory(Configuration()).capabilities, count)
    _cpu_seconds(idle, seed, examples, steps)  # warms up, and counts the steps
    _cpu_seconds(machine, seed, examples, steps)
    a_round, ops = count.steps, totals.ops
    pairs = []
    for done in range(rounds):
        seconds = _cpu_seconds(machine, seed, examples, steps)
        pairs.append((seconds, _cpu_seconds(idle, seed, examples, steps)))
        on_round(done + 1)
    return MachineSpeed(
        a_round,
        min(seconds for seconds, _ in pairs),
        min(idle_seconds for _, idle_seconds in pairs),
        median(idle_seconds / seconds for seconds, idle_seconds in pairs),
        ops / a_round,
    )


def _cpu_seconds(
    machine: type[RuleBasedStateMachine], seed: int, examples: int, steps: int
) -> float:
    seeded(seed)(machine)
    start = process_time()
    run_state_machine_as_test(machine, settings=generation_settings(examples, steps))
    return process_time() - start


class _Count:
    steps = 0


def _idle_machine(capabilities: frozenset[str], count: _Count) -> type[RuleBasedStateMachine]:
    class Idle(RuleBasedStateMachine):
        @initialize(**WORLD_ARGUMENTS)
        def start(self, **arguments: int) -> None:
            pass

    def idle(kind: str) -> Callable[..., Any]:
        def perform(self: RuleBasedStateMachine, **arguments: Any) -> None:
            count.steps += 1

        perform.__name__ = kind
        return rule(**RECIPES[kind].arguments, then=FOLLOW_UPS)(perform)

    rules = {kind: idle(kind) for kind in RECIPES if kind in capabilities}
    return type("IdleMachine", (Idle,), rules)
