"""Measuring: each driver's searches for each fault, in one process or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.metadata import version
from math import inf
from multiprocessing import get_context
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.bench.machine_info import calibrate, machine_info
from kvproof.fuzz.detection.drivers import DRIVERS
from kvproof.fuzz.detection.records import LOOP, Conditions, Row, Trial
from kvproof.fuzz.faults import Fault, fault_by_id
from kvproof.fuzz.replay import replay
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.case import Case
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

_WARM_UP = ("finish-forgets-its-table", "finished-request-keeps-its-blocks")
"""A fault of each floor: what is imported or built at the first search is not to be timed."""


class Task(Struct, frozen=True):
    """One driver's searches for one fault; equal tasks give equal results, but for the times."""

    fault: str
    driver: str
    seed: str
    seeds: int
    seconds: float
    shrinks: int = 0
    """The first so many searches have their cases shrunk."""


def conditions(
    seed: str, seeds: int, seconds: float, shrinks: int, compare_seeds: int, compare_seconds: float
) -> Conditions:
    """These limits, on this machine."""
    versions = {"hypothesis": version("hypothesis")}
    return Conditions(
        seed, seeds, seconds, shrinks, compare_seeds, compare_seconds, machine_info(), versions
    )


def task_of(conditions: Conditions, fault: str, driver: str) -> Task:
    """That driver's searches for that fault, under these conditions."""
    c = conditions
    if driver == LOOP:
        return Task(fault, driver, c.seed, c.seeds, c.seconds, min(c.shrinks, c.seeds))
    return Task(fault, driver, c.seed, c.compare_seeds, c.compare_seconds)


def in_sample(fault: str, one_in: int) -> bool:
    """Whether the fault is among the one in so many: by its name alone, so that nobody chooses."""
    return crc32(fault.encode()) % one_in == 0


def measure_all(tasks: Sequence[Task], *, workers: int, on_row: Callable[[Row], None]) -> None:
    """Do the tasks; ``on_row`` hears of each as it ends, in whatever order.

    Workers are forks of this process, with the same modules: those that are imported have an
    influence on what Hypothesis draws.
    """
    warm_up({task.driver for task in tasks}, {fault_by_id(task.fault).subject for task in tasks})
    if workers == 1:
        for task in tasks:
            on_row(measure(task))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        running = [pool.submit(measure, task) for task in tasks]
        try:
            for row in _as_they_end(running):
                on_row(row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _as_they_end(running: Iterable[Future[Row]]) -> Iterator[Row]:
    for future in as_completed(running):
        yield future.result()


def warm_up(drivers: Iterable[str], subjects: Iterable[str]) -> None:
    """Search once by each driver for what is found at once, and build each subject."""
    for subject in subjects:
        subject_factory(subject)(Configuration())
    for driver in drivers:
        for fault in map(fault_by_id, _WARM_UP):
            _search(fault, driver, "warm-up", 1.0)


def measure(task: Task) -> Row:
    """All searches of a task, each from a seed of its own."""
    fault = fault_by_id(task.fault)
    speed = calibrate(rounds=2).empty_method_calls_per_second
    trials = [
        _search(
            fault,
            task.driver,
            f"{task.seed}/{task.fault}/{number}",
            task.seconds,
            shrinks=number < task.shrinks,
        )
        for number in range(task.seeds)
    ]
    return Row(task.fault, task.driver, round(speed), tuple(trials))


def _search(
    fault: Fault, driver: str, seed: str, seconds: float, *, shrinks: bool = False
) -> Trial:
    totals, calls = Totals(), fault.calls()
    started = time.process_time()
    case = DRIVERS[driver](fault.subject, fault.id, seed, seconds, totals)
    elapsed = round(time.process_time() - started, 5)
    trial = Trial(elapsed, totals.ops, reached=fault.calls() > calls)
    return trial if case is None else _looked_at(replace(case, fault=fault.id), trial, shrinks)


def _looked_at(case: Case, trial: Trial, shrinks: bool) -> Trial:
    """What the failing run violated, as it was found and as it is shrunk."""
    as_found, unmodified = replay(case), replay(replace(case, fault=None))
    properties = {violation.property for violation in as_found.violations}
    shrunk_ops, elapsed = 0, 0.0
    if shrinks:
        started = time.process_time()
        shrunk = shrink(case, seconds_max=inf)
        elapsed = round(time.process_time() - started, 5)
        if shrunk is not None:
            shrunk_ops = len(shrunk.case.operations)
            properties |= {violation.property for violation in replay(shrunk.case).violations}
    alarm = unmodified.verdict == "fail"
    return replace(
        trial,
        found=not alarm,
        false_alarm=alarm,
        triggered=as_found.digest != unmodified.digest or as_found.verdict != unmodified.verdict,
        properties=tuple(sorted(properties)),
        shrunk_ops=shrunk_ops,
        shrink_seconds=elapsed,
    )
