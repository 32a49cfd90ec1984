"""Does feedback pay?  Blind swarm beside mutation of kept runs, over seeded faults.

    python benchmarks/feedback.py --seeds 5 --ops 60000 [FAULT ...]

Blind: every run is drawn, as ``kvproof fuzz`` does.  Fed back: half of the runs are drawn; the
others are kept ones (those that showed a new transition), changed: a stretch deleted, done again,
or replaced by operations of another run, or two runs spliced.  Both are checked and watched in the
same way, so that operations until the first failing run compare them, as do CPU seconds.  The
figures that decided are in docs/campaigns.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from statistics import median
from time import process_time

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.campaigns.novelty import Watch
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.search import abilities, run_once
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

HARD = (
    "promotion-evicts-its-own-prefix",
    "promotes-into-a-fenced-block",
    "reset-ignores-the-suspended",
    "fork-is-not-atomic",
    "index-before-data",
    "void-load-frees-twice",
    "completions-of-the-aborted-filtered",
    "notice-of-an-ended-request-raises",
    "aborted-load-frees-its-target",
    "failed-fetch-leaks-its-slot",
)
"""Of the cache and its tiers, those that take a blind search most operations."""
MUTATED = 0.5
KEPT_MAX = 400


class Search(Struct):
    """Until the first failing run, or until the operations are used up."""

    ops: int
    seconds: float
    found: bool


def blind(seed: str, able: frozenset[str], kept: list[Draw]) -> Iterator[Draw]:
    number = 0
    while True:
        yield draw_run(f"{seed}/{number}", able)
        number += 1


def fed_back(seed: str, able: frozenset[str], kept: list[Draw]) -> Iterator[Draw]:
    rng = Random(f"{seed}: mutation")
    for draw in blind(seed, able, kept):
        if kept and rng.random() < MUTATED:
            yield mutated(rng, rng.choice(kept), draw, rng.choice(kept))
        else:
            yield draw


def mutated(rng: Random, run: Draw, fresh: Draw, other: Draw) -> Draw:
    """The run with some changes, in its own world: every list of operations makes sense."""
    operations = [*run.operations]
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(operations))
        end = start + rng.choice((1, 2, 4, 8, 16, 32))
        change = rng.randrange(4)
        if change == 0 and len(operations) > 8:
            del operations[start:end]
        elif change == 1:
            operations[start:start] = operations[start:end]
        elif change == 2:
            operations[start:end] = rng.choice((fresh, other)).operations[start:end]
        else:
            operations[start:] = other.operations[: rng.choice((8, 32, 128))]
    return replace(run, operations=operations[:500])


def searched(strategy: str, fault: str, seed: str, ops_max: int) -> Search:
    factory = subject_factory(fault_by_id(fault).subject)
    watch, totals, kept, started = Watch(), Totals(), list[Draw](), process_time()
    draws = {"blind": blind, "fed back": fed_back}[strategy](seed, abilities(factory), kept)
    with fault_by_id(fault).installed():
        for draw in draws:
            failure = run_once(factory, draw, totals, watch.perform)
            if failure is not None or totals.ops >= ops_max:
                return Search(totals.ops, process_time() - started, failure is not None)
            if watch.novel_until and len(kept) < KEPT_MAX:
                kept.append(draw)
    raise AssertionError("draws do not end")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", default=HARD)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ops", type=int, default=60_000)
    parsed = parser.parse_args()
    print(f"{'fault':34} {'strategy':9} found  median ops  median CPU s")
    for fault in parsed.faults:
        for strategy in ("blind", "fed back"):
            runs = [
                searched(strategy, fault, f"feedback/{seed}", parsed.ops)
                for seed in range(parsed.seeds)
            ]
            found = sum(run.found for run in runs)
            ops, seconds = (
                median(getattr(run, name) for run in runs) for name in ("ops", "seconds")
            )
            print(
                f"{fault:34} {strategy:9} {found}/{parsed.seeds}  {ops:10,.0f}  {seconds:10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
