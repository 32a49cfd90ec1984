"""``kvproof bench engine``: what checking costs, and that it does not grow with the pool.

All figures are CPU seconds of one process on one core.  Machines are shared and noisy, so every
variant runs the same operation lists in interleaved rounds, and the best round of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.bench.machine_info import Calibration, MachineInfo, calibrate, machine_info
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.operations import KINDS, TIER_KINDS, AnyOperation, kind_of
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject

SMALL_RUNS = 300
SMALL_POOL, LARGE_POOL = 1_000, 1_000_000


class Measurement(Struct, frozen=True):
    """One variant."""

    name: str
    ops: int
    seconds: float
    """CPU seconds of its best round."""

    @property
    def ops_per_second(self) -> float:
        return self.ops / self.seconds


class EngineBench(Struct, frozen=True):
    """All that ``kvproof bench engine`` measures."""

    ratios: dict[str, float]
    calibration: Calibration
    machine: MachineInfo
    results: list[Measurement]


def bench_engine(
    rounds: int = 5, on_round: Callable[[int], None] = lambda done: None
) -> EngineBench:
    """Measure; ``on_round`` hears how many rounds are done."""
    draws = [draw_run(f"bench/{i}", frozenset(KINDS)) for i in range(SMALL_RUNS)]
    tiered = [draw_run(f"bench/{i}", _TIERED, tiers_share=1) for i in range(SMALL_RUNS)]
    small, tiers = _runs(draws), _runs(tiered)
    untiered = _only(_without_tiers(tiers), frozenset(KINDS))
    long = _long_run(draws)
    variants: dict[str, Callable[[], float]] = {
        "small pools, checks off": lambda: _time_runs(small, checked=False),
        "small pools, checks on": lambda: _time_runs(small, checked=True),
        "tiers on, checks on": lambda: _time_runs(tiers, checked=True),
        "the same, tiers off": lambda: _time_runs(_without_tiers(tiers), checked=True),
        "those that need no tier, tiers off": lambda: _time_runs(untiered, checked=True),
        f"{SMALL_POOL:,} blocks, checks on": lambda: _time_pool(SMALL_POOL, long),
        f"{LARGE_POOL:,} blocks, checks on": lambda: _time_pool(LARGE_POOL, long),
    }
    best = dict.fromkeys(variants, float("inf"))
    calibration = calibrate()
    for done in range(rounds):
        for name, measure in variants.items():
            best[name] = min(best[name], measure())
        on_round(done + 1)
    counts = {
        "blocks": len(long),
        "small": _total(small),
        "those": _total(untiered),
        "tiers": _total(tiers),
    }
    ops = {name: next(counts[word] for word in counts if word in name) for name in variants}
    results = [Measurement(name, ops[name], seconds) for name, seconds in best.items()]
    off, on, with_tiers, without, fewer, small_pool, large_pool = (best[name] for name in variants)
    return EngineBench(
        ratios={
            "checked_over_unchecked": on / off,
            # Operations a second.  First the same ones, although those for a tier are refused
            # at once where there is none; then without these.
            "untiered_over_tiered": with_tiers / without,
            "needing_no_tier_over_tiered": with_tiers / _total(tiers) * _total(untiered) / fewer,
            "blocks_1m_over_1k": large_pool / small_pool,
        },
        calibration=calibration,
        machine=machine_info(),
        results=results,
    )


_TIERED = frozenset((*KINDS, *TIER_KINDS, "tiers"))


def _runs(draws: Sequence[Draw]) -> list[tuple[Configuration, list[AnyOperation]]]:
    return [(draw.configuration, draw.operations) for draw in draws]


def _without_tiers(
    runs: Sequence[tuple[Configuration, list[AnyOperation]]],
) -> list[tuple[Configuration, list[AnyOperation]]]:
    return [
        (replace(configuration, host_blocks=0, disk_blocks=0, offload="none"), operations)
        for configuration, operations in runs
    ]


def _only(
    runs: Sequence[tuple[Configuration, list[AnyOperation]]], kinds: frozenset[str]
) -> list[tuple[Configuration, list[AnyOperation]]]:
    return [
        (configuration, [operation for operation in operations if kind_of(operation) in kinds])
        for configuration, operations in runs
    ]


def _total(runs: Sequence[tuple[Configuration, list[AnyOperation]]]) -> int:
    return sum(len(operations) for _, operations in runs)


def _time_runs(runs: Sequence[tuple[Configuration, list[AnyOperation]]], *, checked: bool) -> float:
    """CPU seconds of performing all runs; building subjects and checkers is not counted."""
    total = 0.0
    for configuration, operations in runs:
        harness = Harness(EngineSubject(configuration), checked=checked)
        started = time.process_time()
        harness.run(operations)
        total += time.process_time() - started
        if harness.violations:
            raise AssertionError(f"the engine is broken: {harness.violations[0]}")
    return total


def _long_run(draws: Sequence[Draw]) -> list[AnyOperation]:
    """One list for both large pools: all drawn lists, one after the other."""
    operations: list[AnyOperation] = []
    for draw in draws:
        operations += draw.operations
    return operations


def _time_pool(blocks: int, operations: list[AnyOperation]) -> float:
    configuration = replace(_LARGE, blocks=blocks)
    return _time_runs([(configuration, operations)], checked=True)


_LARGE = Configuration(block_size=16, requests=64)
