"""``kvproof bench subject NAME``: what checking costs on any subject, in a small and a large pool.

The same operations are put to fresh subjects, with all checks on and with none, in interleaved
rounds; CPU seconds, and the best round of each counts.  What an adapter does to tell of its engine
is part of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from kvproof.fuzz.bench.engine import Measurement
from kvproof.fuzz.bench.machine_info import Calibration, MachineInfo, calibrate, machine_info
from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.operations import AnyOperation
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory

POOLS = (64, 16_384)
RUNS = 100
"""Drawn runs, done one after the other as one."""


class SubjectBench(Struct, frozen=True):
    """All that ``kvproof bench subject`` measures."""

    ratios: dict[str, float]
    calibration: Calibration
    machine: MachineInfo
    results: list[Measurement]


def bench_subject(
    name: str,
    rounds: int = 5,
    on_round: Callable[[int], None] = lambda done: None,
    *,
    pools: Sequence[int] = POOLS,
) -> SubjectBench:
    """Measure; ``on_round`` hears how many rounds are done.

    Raises InputError if there is no such subject, or if it is not installed.
    """
    factory = subject_factory(name)
    able = abilities(factory)
    operations: list[AnyOperation] = []
    for number in range(RUNS):
        operations += draw_run(f"bench/{number}", able, tiers_share=0).operations
    best = {(blocks, checked): float("inf") for blocks in pools for checked in (False, True)}
    calibration = calibrate()
    for done in range(rounds):
        for blocks, checked in best:
            seconds = _seconds(factory, blocks, operations, checked)
            best[blocks, checked] = min(best[blocks, checked], seconds)
        on_round(done + 1)
    return SubjectBench(
        ratios={
            f"checked_over_unchecked_{blocks}": best[blocks, True] / best[blocks, False]
            for blocks in pools
        },
        calibration=calibration,
        machine=machine_info(),
        results=[
            Measurement(_words(blocks, checked), len(operations), seconds)
            for (blocks, checked), seconds in best.items()
        ],
    )


def _words(blocks: int, checked: bool) -> str:
    return f"{blocks:,} blocks, checks {'on' if checked else 'off'}"


def _seconds(
    factory: SubjectFactory, blocks: int, operations: Sequence[AnyOperation], checked: bool
) -> float:
    """CPU seconds of performing them; making subject and checker is not counted."""
    harness = harness_for(factory(Configuration(blocks=blocks)), checked=checked)
    started = time.process_time()
    harness.run(operations)
    seconds = time.process_time() - started
    if harness.violations:
        raise AssertionError(f"{harness.subject.name} is broken: {harness.violations[0]}")
    return seconds
