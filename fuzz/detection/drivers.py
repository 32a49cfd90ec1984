"""The drivers that are compared: each looks for one fault until it finds it or gives up.

All of them drive the same subjects through the same checks, and count CPU seconds of one process.
What comes after a violation (shrinking, telling it) is no part of the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from math import inf
from tempfile import TemporaryDirectory

from hypothesis import seed as seeded
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import run_state_machine_as_test

from kvproof.fuzz.detection.uniform import WORLD, draw_uniform
from kvproof.fuzz.replay import first_violation, installed
from kvproof.fuzz.search import found, run_once, search
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.machine import (
    CacheMachine,
    CheckerStumbled,
    generation_settings,
    machine_for,
    run_machine,
)
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory
from kvproof.stateful_tests.totals import Totals

EXAMPLES = 100
STEPS = 50
"""What Hypothesis does by default: so many runs of so many steps."""

Driver = Callable[[str, str, str, float, Totals], Case | None]
"""From subject, fault, seed, CPU seconds at most and totals to be added to, to a failing run."""


def by_loop(subject: str, fault: str, seed: str, seconds: float, totals: Totals) -> Case | None:
    """kvproof's seeded loop."""
    is_over = _clock(seconds)

    def on_run(_: Totals) -> None:
        if is_over():
            raise _OutOfTime

    try:
        seen = search(subject, seed, seconds=inf, totals=totals, fault=fault, on_run=on_run)
    except _OutOfTime:
        return None
    return seen.case if seen is not None else None


def by_uniform(subject: str, fault: str, seed: str, seconds: float, totals: Totals) -> Case | None:
    """Every operation equally often, in one world."""
    factory, is_over = subject_factory(subject), _clock(seconds)
    capabilities = factory(WORLD).capabilities
    with installed(fault):
        for number in count():
            operations = draw_uniform(f"{seed}/{number}", capabilities)
            draw = Draw(f"{seed}/{number}", WORLD, (), operations)
            failure = run_once(factory, draw, totals)
            if failure is not None:
                return found(subject, draw, failure, fault).case
            if is_over():
                return None
    raise AssertionError("runs go on until one ends them")


def by_unlimited_machine(
    subject: str, fault: str, seed: str, seconds: float, totals: Totals
) -> Case | None:
    """The Hypothesis machine, without an example limit."""
    factory, is_over = subject_factory(subject), _clock(seconds)
    with installed(fault):
        for number in count():
            source = f"{seed}/{number}"
            try:
                return run_machine(
                    factory,
                    subject,
                    seconds=inf,
                    seed=source,
                    totals=totals,
                    stop=is_over,
                )
            except CheckerStumbled as error:
                if _fails(factory, error.case):
                    return error.case
                if is_over():
                    return None
    raise AssertionError("machines go on until one ends them")


def by_machine(subject: str, fault: str, seed: str, seconds: float, totals: Totals) -> Case | None:
    """The Hypothesis machine at default settings: after 100 examples of 50 steps it is over."""
    factory = subject_factory(subject)
    machine = _ending_at_its_first_failure(machine_for(factory, subject, totals=totals))
    machine.is_over = staticmethod(_clock(seconds))
    seeded(int.from_bytes(sha256(seed.encode()).digest()[:8], "big"))(machine)
    with installed(fault), _home_of_hypothesis():
        try:
            run_state_machine_as_test(machine, settings=generation_settings(EXAMPLES, STEPS))
        except _Ended as ended:
            case = ended.case
            return case if case and (case.violates or _fails(factory, case)) else None
    return None


DRIVERS: dict[str, Driver] = {
    "loop": by_loop,
    "hypothesis": by_machine,
    "hypothesis-unlimited": by_unlimited_machine,
    "uniform": by_uniform,
}


NAMES = {
    "loop": "kvproof's seeded loop",
    "hypothesis": "Hypothesis, 100 examples of 50 steps",
    "hypothesis-unlimited": "Hypothesis, no example limit",
    "uniform": "uniform random",
}
"""The same in words."""


class _OutOfTime(Exception):
    """Leaves the seeded loop."""


class _Ended(KeyboardInterrupt):
    """Leaves Hypothesis: an Exception it would replay, and take its time over."""

    def __init__(self, case: Case | None = None) -> None:
        super().__init__()
        self.case = case


class _Ending(CacheMachine):
    """A machine that leaves Hypothesis at its first failure, or when its time is up."""

    is_over: Callable[[], bool]

    def __init__(self) -> None:
        if type(self).is_over():
            raise _Ended
        super().__init__()

    def _failure(self, case: Case, violation: Violation) -> BaseException:
        return _Ended(case)

    def _stumbling(self, case: Case, error: CheckerError) -> BaseException:
        return _Ended(case)


def _ending_at_its_first_failure(machine: type[CacheMachine]) -> type[_Ending]:
    ending = type(machine.__name__, (_Ending, machine), {"__module__": __name__})
    assert issubclass(ending, _Ending)
    return ending


def _clock(seconds: float) -> Callable[[], bool]:
    """Whether so many CPU seconds of this process have passed since now."""
    deadline = time.process_time() + seconds
    return lambda: time.process_time() >= deadline


def _fails(factory: SubjectFactory, case: Case) -> bool:
    """Whether a run in which a checker stumbled shows a violation when audited throughout."""
    return first_violation(factory, case.configuration, case.operations) is not None


@contextmanager
def _home_of_hypothesis() -> Iterator[None]:
    """A folder of its own, so that none is left where the user happens to stand."""
    with TemporaryDirectory(prefix="kvproof-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)
