"""``kvproof bench scheduler``: what an iteration costs, and what its cost follows.

An iteration over many running requests, with many more waiting, is timed: planned by the policy,
checked against the contract, applied to the cache, launched and retired; with all checks on and
without any.  The waiting ones cannot be admitted, since as many run as are allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from kvproof.engine.policies import POLICIES
from kvproof.fuzz.bench.engine import Measurement
from kvproof.fuzz.bench.machine_info import Calibration, MachineInfo, calibrate, machine_info
from kvproof.invariants.operations import Arrive, Run, Segment
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

RUNNING, WAITING = 1_000, 10_000
FEW_RUNNING, FEW_WAITING = 250, 100
ITERATIONS = 20
"""Timed in each round."""
_BLOCK_SIZE = 16
_PROMPT = 3 * _BLOCK_SIZE + 5
_OUTPUT = 1 << 20
"""Nobody stops while it is timed."""


class SchedulerBench(Struct, frozen=True):
    """All that ``kvproof bench scheduler`` measures; an operation is an iteration."""

    ratios: dict[str, float]
    calibration: Calibration
    machine: MachineInfo
    results: list[Measurement]


class _World:
    """One scheduler, warmed up, so that all its running requests decode."""

    def __init__(self, name: str, running: int, waiting: int, *, checked: bool) -> None:
        self.name = f"{running:,} running, {waiting:,} waiting, checks {'on' if checked else 'off'}"
        self.key = name
        self.best = float("inf")
        configuration = Configuration(
            blocks=1 << 18,
            block_size=_BLOCK_SIZE,
            requests=running,
            run_ahead=1,
            scheduling=Limits(token_budget=1 << 22),
        )
        subject = SchedulerSubject(configuration, policy=POLICIES["fcfs"])
        self._harness = SchedulingHarness(subject, checked=checked)
        for number in range(running + waiting):
            prompt = (Segment(number, _PROMPT),)
            self._harness.perform(Arrive(prompt, output=_OUTPUT))
        self._harness.perform(Run(2))

    def measure(self) -> None:
        """Time some iterations."""
        started = time.process_time()
        self._harness.perform(Run(ITERATIONS))
        self.best = min(self.best, time.process_time() - started)
        if self._harness.violations:
            raise AssertionError(f"the scheduler is broken: {self._harness.violations[0]}")


def bench_scheduler(
    rounds: int = 5, on_round: Callable[[int], None] = lambda done: None
) -> SchedulerBench:
    """Measure; ``on_round`` hears how many rounds are done."""
    calibration = calibrate()
    worlds = [
        _World("off", RUNNING, WAITING, checked=False),
        _World("on", RUNNING, WAITING, checked=True),
        _World("few waiting", RUNNING, FEW_WAITING, checked=True),
        _World("few running", FEW_RUNNING, WAITING, checked=True),
    ]
    for done in range(rounds):
        for world in worlds:
            world.measure()
        on_round(done + 1)
    best = {world.key: world.best for world in worlds}
    per_request = best["on"] / RUNNING, best["few running"] / FEW_RUNNING
    return SchedulerBench(
        ratios={
            "checked_over_unchecked": best["on"] / best["off"],
            "waiting_10k_over_100": best["on"] / best["few waiting"],
            "per_scheduled_request_1000_over_250": per_request[0] / per_request[1],
        },
        calibration=calibration,
        machine=machine_info(),
        results=[Measurement(world.name, ITERATIONS, world.best) for world in worlds],
    )
