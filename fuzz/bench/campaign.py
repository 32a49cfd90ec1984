"""``kvproof bench campaign``: how fast a campaign is, beside the Hypothesis machine.

Both drive kvproof's engine with all checks on.  The campaign is a shard as ``kvproof fuzz`` runs
it, with its journal, its corpus and every twentieth run done twice; what is counted is the
operations of runs, and the CPU seconds that all of it took.  The machine is Hypothesis as
``kvproof check`` runs it.  Two workers are compared with one by the clock: on two idle cores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from msgspec import Struct

from kvproof.fuzz.bench.engine import Measurement
from kvproof.fuzz.bench.machine_info import Calibration, MachineInfo, calibrate, machine_info
from kvproof.fuzz.campaigns.executors import LocalExecutor
from kvproof.fuzz.campaigns.records import Campaign, Progress, Target
from kvproof.fuzz.campaigns.run import CampaignRun
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Store, read_lines
from kvproof.fuzz.search import search
from kvproof.stateful_tests.machine import run_machine
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

SECONDS = 4.0
"""Of each measurement of a round."""
ENGINE = (Target("engine", "engine"),)


class CampaignBench(Struct, frozen=True):
    """All that ``kvproof bench campaign`` measures."""

    ratios: dict[str, float]
    calibration: Calibration
    machine: MachineInfo
    results: list[Measurement]


class _Work(Struct):
    """Operations, and the seconds that they took."""

    ops: int = 0
    seconds: float = 0.0

    def add(self, ops: int, seconds: float) -> float:
        """Operations a second, of these."""
        self.ops += ops
        self.seconds += seconds
        return ops / seconds


def bench_campaign(
    rounds: int = 5,
    on_round: Callable[[int], None] = lambda done: None,
    *,
    seconds: float = SECONDS,
) -> CampaignBench:
    """Measure; ``on_round`` hears how many rounds are done."""
    calibration = calibrate()
    campaign, loop, machine, one, two = (_Work() for _ in range(5))
    over_machine, over_loop, two_over_one = [], [], []
    for done in range(rounds):
        speed = _shard(str(done), seconds, campaign)
        over_machine.append(speed / _machine(str(done), seconds, machine))
        over_loop.append(speed / _loop(str(done), seconds, loop))
        alone = _workers(1, str(done), seconds, one)
        two_over_one.append(_workers(2, str(done), seconds, two) / alone)
        on_round(done + 1)
    return CampaignBench(
        ratios={
            "campaign_over_machine": median(over_machine),
            "campaign_over_loop": median(over_loop),
            "two_workers_over_one": median(two_over_one),
        },
        calibration=calibration,
        machine=machine_info(),
        results=[
            Measurement("a shard of a campaign, CPU seconds", campaign.ops, campaign.seconds),
            Measurement("the seeded loop alone, CPU seconds", loop.ops, loop.seconds),
            Measurement("the Hypothesis machine, CPU seconds", machine.ops, machine.seconds),
            Measurement("one worker, by the clock", one.ops, one.seconds),
            Measurement("two workers, by the clock", two.ops, two.seconds),
        ],
    )


def _shard(seed: str, seconds: float, work: _Work) -> float:
    with TemporaryDirectory() as folder:
        store = Store(Path(folder, "campaign"))
        store.begin(Campaign(seed, ENGINE, 1))
        started = process_time()
        run_job(ShardJob(str(store.folder), 0, seconds))
        taken = process_time() - started
        return work.add(sum(line.totals.ops for line in _lines(store)), taken)


def _loop(seed: str, seconds: float, work: _Work) -> float:
    totals, started = Totals(), process_time()
    found = search("engine", seed, seconds=seconds, totals=totals)
    if found is not None:
        raise AssertionError(f"the engine is broken: {found.violation}")
    return work.add(totals.ops, process_time() - started)


def _machine(seed: str, seconds: float, work: _Work) -> float:
    totals, started = Totals(), process_time()
    if run_machine(EngineSubject, "engine", seconds=seconds, seed=seed, totals=totals):
        raise AssertionError("the engine is broken")
    return work.add(totals.ops, process_time() - started)


def _workers(count: int, seed: str, seconds: float, work: _Work) -> float:
    """By the journals, from each shard's start: without the time that processes take to start."""
    with TemporaryDirectory() as folder:
        campaign, store = Campaign(seed, ENGINE, count), Store(Path(folder, "campaign"))
        store.begin(campaign)
        shards, executor = range(count), LocalExecutor()
        CampaignRun(store.folder, campaign, executor, shards=shards, seconds=seconds).run()
        lines = _lines(store)
        ended = max([line.at for line in lines])
        return work.add(sum(line.totals.ops for line in lines), ended)


def _lines(store: Store) -> list[Progress]:
    return [
        line for path in store.shards.glob("[0-9]*.jsonl") for line in read_lines(path, Progress)
    ]
