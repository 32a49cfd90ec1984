"""How fast the Hypothesis machine is, beside one of equally many rules that do nothing.

What Hypothesis itself takes for a step is not ours to lower; the subject, its checks and the
start and end of each run should not take more than that again.  Both machines draw the same
kinds of arguments, and from equal seeds the very same ones.
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

from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.machine import Totals, generation_settings, machine_for
from kvproof.stateful_tests.strategies import FOLLOW_UPS, RECIPES, WORLD_ARGUMENTS
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.subjects.engine import EngineSubject

RATIO_MIN = 0.5
"""What is asked of the machine: half the speed of the idle one."""


class MachineSpeed(Struct, frozen=True):
    """Medians over the rounds."""

    machine: float
    """Steps a CPU second of the machine over the subject."""
    idle: float
    """The same of the machine whose rules do nothing."""
    ratio: float
    """Median of the rounds' own ratios, which a change of the clock's pace between rounds does
    not touch."""
    ratios: list[float]
    ops_per_step: float
    """A rule may perform more than one operation."""


def steps_per_second(
    factory: SubjectFactory = EngineSubject,
    *,
    rounds: int = 7,
    examples: int = 100,
    steps: int = 50,
    seed: int = 0,
) -> MachineSpeed:
    """Measure both machines by turns, ``rounds`` times ``examples`` runs of ``steps`` steps.

    Raises PropertyViolated if the subject fails.
    """
    totals, idled = Totals(), Totals()
    machine = machine_for(factory, "bench", totals=totals)
    idle = _idle_machine(factory(Configuration()).capabilities, idled)
    speeds: list[float] = []
    idle_speeds: list[float] = []
    for turn in range(-1, rounds):  # the first turn warms up
        a = _speed(machine, totals, seed + turn, examples, steps)
        b = _speed(idle, idled, seed + turn, examples, steps)
        if turn >= 0:
            speeds.append(a)
            idle_speeds.append(b)
    ratios = [a / b for a, b in zip(speeds, idle_speeds, strict=True)]
    return MachineSpeed(
        median(speeds), median(idle_speeds), median(ratios), ratios, totals.ops / totals.steps
    )


def _speed(
    machine: type[RuleBasedStateMachine], totals: Totals, seed: int, examples: int, steps: int
) -> float:
    before = totals.steps
    seeded(seed)(machine)
    start = process_time()
    run_state_machine_as_test(machine, settings=generation_settings(examples, steps))
    return (totals.steps - before) / (process_time() - start)


def _idle_machine(capabilities: frozenset[str], totals: Totals) -> type[RuleBasedStateMachine]:
    class IdleMachine(RuleBasedStateMachine):
        @initialize(**WORLD_ARGUMENTS)
        def start(self, **arguments: int) -> None:
            pass

    def idle(kind: str) -> Callable[..., None]:
        def perform(self: RuleBasedStateMachine, **arguments: Any) -> None:
            totals.steps += 1

        perform.__name__ = kind
        decorated: Callable[..., None] = rule(**RECIPES[kind].arguments, then=FOLLOW_UPS)(perform)
        return decorated

    rules = {kind: idle(kind) for kind in RECIPES if kind in capabilities}
    return type("IdleMachine", (IdleMachine,), rules)
