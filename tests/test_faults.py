"""The seeded faults: each is found, by its property, shrunk, replayed, and leaves no trace.

Two searches a fault, or one; ``kvproof faults detect`` makes twenty.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.fuzz.detect import run_clean
from kvproof.fuzz.faults import Fault, cache_faults, fault_by_id, tiers
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import Found, search
from kvproof.fuzz.shrink import Shrunk, shrink
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.case import Case, dump_case, parse_case, save_case
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Decode,
    Fork,
    Grow,
    Launch,
    Preempt,
    Reserve,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import CRASH
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

FAULTS = cache_faults()
ABLE = EngineSubject.capabilities | EngineSubject(Configuration()).semantics.features()
WITHOUT_A_ROW = {"key-ignores-last-token"}
"""Modelled on a mutant that survived in a public project, not on a row of the catalogue."""

fault_by_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
SEEDS = {fault.id: (0,) if fault in tiers.FAULTS else (0, 1) for fault in FAULTS}
"""Those of the tiers take the longest to shrink."""
search_by_search = pytest.mark.parametrize(
    ("fault", "seed"),
    [
        pytest.param(fault, seed, id=f"{seed}-{fault.id}")
        for seed in (0, 1)
        for fault in FAULTS
        if seed in SEEDS[fault.id]
    ],
)

# -- the catalogue ---------------------------------------------------------------------------------


def test_ids_are_unique_and_lead_to_their_faults() -> None:
    ids = [fault.id for fault in FAULTS]
    assert len(set(ids)) == len(ids) >= 16
    assert [fault_by_id(name) for name in ids] == list(FAULTS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", name) for name in ids)


def test_an_unknown_fault_is_bad_input() -> None:
    with pytest.raises(
        InputError, match="unknown fault 'no-such-thing'; see `kvproof faults list`"
    ):
        fault_by_id("no-such-thing")


def test_every_fault_cites_the_public_bug_that_it_is_modelled_on() -> None:
    for fault in FAULTS:
        row = "" if fault.id in WITHOUT_A_ROW else r"B\d+, "
        assert re.match(row + r"[\w.-]+/[\w.-]+#\d+", fault.source), fault.id
        assert re.match(r"[A-Z].{20,}\.$", fault.summary), fault.id
    assert {fault.id for fault in FAULTS} >= WITHOUT_A_ROW


def test_every_property_has_faults_and_every_fault_known_properties() -> None:
    known = {check.id() for check in CHECKS} | {CRASH}
    for fault in FAULTS:
        assert {fault.property, *fault.also} <= known
        assert fault.property not in fault.also
    assert {fault.property for fault in FAULTS} == known


# -- installing ------------------------------------------------------------------------------------


@fault_by_fault
def test_a_fault_is_in_place_only_while_it_is_installed(fault: Fault) -> None:
    original = fault.target.__dict__[fault.method]
    with fault.installed():
        assert fault.target.__dict__[fault.method] is not original
    assert fault.target.__dict__[fault.method] is original
    with pytest.raises(KeyError), fault.installed():
        raise KeyError
    assert fault.target.__dict__[fault.method] is original


def test_calls_of_the_faulty_method_are_counted() -> None:
    fault = fault_by_id("boundary-block-too-early")
    before = fault.calls()
    case = Case("engine", Configuration(), [Admit((Segment(0, 1),))])
    replay(case)
    assert fault.calls() == before
    replay(replace(case, fault=fault.id))
    assert fault.calls() == before + 1


# -- finding, shrinking, replaying -----------------------------------------------------------------


@cache
def searched(fault: Fault, seed: int) -> Found | None:
    totals = Totals()
    source = f"faults/{fault.id}/{seed}"
    return search(fault.subject, source, seconds=20, totals=totals, fault=fault.id)


@cache
def shrunk_case(fault: Fault, seed: int) -> Shrunk:
    found = searched(fault, seed)
    assert found is not None
    shrunk = shrink(found.case, seconds_max=inf)
    assert shrunk is not None
    return shrunk


@search_by_search
def test_a_fault_is_found_by_its_property(fault: Fault, seed: int) -> None:
    found, shrunk = searched(fault, seed), shrunk_case(fault, seed)
    assert found is not None
    assert found.case.fault == fault.id
    assert found.case.violates == found.violation.property
    violated = {
        violation.property
        for case in (found.case, shrunk.case)
        for violation in replay(case).violations
    }
    assert violated & {fault.property, *fault.also}


@search_by_search
def test_a_finding_shrinks_to_about_the_shortest_run(fault: Fault, seed: int) -> None:
    shrunk = shrunk_case(fault, seed)
    assert 1 <= len(shrunk.case.operations) <= 2 * fault.shortest


@search_by_search
def test_a_shrunk_case_replays_and_needs_its_fault(fault: Fault, seed: int) -> None:
    shrunk = shrunk_case(fault, seed)
    first, again = replay(shrunk.case), replay(shrunk.case)
    assert (first.digest, first.violations) == (again.digest, again.violations)
    assert first.verdict == "fail"
    assert first.ops == len(shrunk.case.operations), "it ends at the operation to blame"
    assert shrunk.case.violates in {violation.property for violation in first.violations}
    without = replay(replace(shrunk.case, fault=None))
    assert (without.verdict, list(without.violations)) == ("pass", [])
    assert without.ops == len(shrunk.case.operations)


STEP = (Launch(), Retire())
COPIES_NOTHING = "copy-on-write-copies-nothing"
OVERBLOWN: dict[str, tuple[str, list[AnyOperation], list[AnyOperation]]] = {
    # A fault, a run with more arguments than it takes, and what becomes of it.
    "slots, items, swap": (
        COPIES_NOTHING,
        [
            Admit((Segment(0, 2),), slots=9),
            Launch(items=((0, 2), (1, 3))),
            Retire(),
            Preempt(0, swap=True),
            Resume(0, slots=9),
            Fork(0),
            Grow(1),
        ],
        [Admit((Segment(0, 1),)), *STEP, Fork(0), Grow(0)],
    ),
    "a batch becomes a growth": (
        COPIES_NOTHING,
        [Admit((Segment(0, 2),)), *STEP, Fork(0), Decode((1, 2, 0), 1)],
        [Admit((Segment(0, 1),)), *STEP, Fork(0), Grow(0)],
    ),
    "a reservation joins the admission": (
        "steps-ignore-slots",
        [Admit((Segment(0, 12),), slots=1), Reserve(0, 8), *STEP],
        [Admit((Segment(0, 2),), slots=1), Launch()],
    ),
    "a batch that has to be one": (
        "decode-is-not-atomic",
        [Admit((Segment(0, 31),)), Admit((Segment(1, 32),)), Decode((2, 0, 1, 3, 5), 3)],
        [Admit((Segment(0, 1),)), Admit((Segment(0, 1),)), Decode((0, 1))],
    ),
    "items that have to be": (
        "steps-ignore-slots",
        [Admit((Segment(0, 12),), slots=5), Launch(items=((1, 9), (0, 7))), Retire()],
        [Admit((Segment(0, 2),), slots=1), Launch()],
    ),
    "a swap that has to be": (
        "swap-in-forgets-last-block",
        [
            Admit((Segment(0, 9), Segment(10, 2)), slots=20),
            *STEP,
            Preempt(2, swap=True),
            Admit((Segment(0, 3),)),
            Preempt(0, swap=True),
            Resume(2, slots=40),
        ],
        [Admit((Segment(0, 2),)), *STEP, Preempt(0, swap=True), Resume(0)],
    ),
}


@pytest.mark.parametrize(("fault", "run", "shortest"), OVERBLOWN.values(), ids=OVERBLOWN)
def test_what_a_finding_does_not_need_is_shrunk_away(
    fault: str, run: list[AnyOperation], shortest: list[AnyOperation]
) -> None:
    world = Configuration(blocks=16, host_blocks=8)
    case = Case("engine", world, run, features=("slots", "swaps"), fault=fault)
    shrunk = shrink(case)
    assert shrunk is not None
    assert shrunk.case.operations == shortest
    assert shrunk.case.features == ()
    swaps = any(isinstance(operation, Preempt) for operation in shortest)
    assert shrunk.case.configuration.host_blocks == (2 if swaps else 0)
    assert parse_case(dump_case(shrunk.case)) == shrunk.case


def test_declared_properties_fire_for_most_faults() -> None:
    """``also`` is for the runs in which something else breaks first, not a way out."""
    fired: Counter[bool] = Counter()
    for fault in FAULTS:
        cases = [shrunk_case(fault, seed).case for seed in SEEDS[fault.id]]
        properties = {v.property for case in cases for v in replay(case).violations}
        fired[fault.property in properties] += 1
    assert fired[True] >= 0.9 * len(FAULTS)


def test_the_unmodified_engine_is_silent() -> None:
    clean = run_clean("test-clean", 30_000)
    assert clean.ops >= 30_000
    assert clean.violations == 0
    with fault_by_id("release-keeps-last-block").installed():
        assert run_clean("test-clean", 100).violations > 0


# -- determinism -----------------------------------------------------------------------------------

REPLAY = """
import sys
from pathlib import Path
from kvproof.fuzz.replay import replay
from kvproof.invariants.case import load_case
for name in sys.argv[1:]:
    done = replay(load_case(Path(name)))
    print(done.digest, done.verdict, list(done.violations), done.ops)
"""


def _in_fresh_processes(script: str, arguments: list[str], processes: int) -> set[str]:
    """What the script prints, under that many values of PYTHONHASHSEED, two processes at once."""
    said = set()
    for first in range(0, processes, 2):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**os.environ, "PYTHONHASHSEED": str(seed)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(first, min(first + 2, processes))
        ]
        for process in running:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            said.add(out)
    return said


def _cases(folder: Path) -> list[str]:
    draw = next(
        draw
        for number in range(1000)
        if len((draw := draw_run(f"digest/{number}", ABLE)).operations) == 240
    )
    operations: list[Any] = [*draw.operations]
    cases = [Case("engine", draw.configuration, operations)]
    cases += [shrunk_case(fault, 0).case for fault in FAULTS[::8]]
    for number, case in enumerate(cases):
        save_case(case, folder / f"{number}.json")
    return [str(folder / f"{number}.json") for number in range(len(cases))]


def test_a_case_replays_the_same_in_fresh_processes(tmp_path: Path) -> None:
    cases = _cases(tmp_path)
    (said,) = _in_fresh_processes(REPLAY, cases, 4)
    lines = said.splitlines()
    assert len(set(lines)) == len(cases)
    assert sum(" pass " in line for line in lines) == 1


@pytest.mark.slow  # a hundred interpreters
def test_a_case_replays_the_same_in_a_hundred_processes(tmp_path: Path) -> None:
    assert len(_in_fresh_processes(REPLAY, _cases(tmp_path), 100)) == 1


def test_a_digest_tells_runs_apart() -> None:
    case = Case("engine", Configuration(), [Admit((Segment(0, 4),))])
    digests = {replay(case).digest}
    digests.add(replay(replace(case, operations=[Admit((Segment(0, 5),))])).digest)
    digests.add(replay(replace(case, operations=[*case.operations, *case.operations])).digest)
    digests.add(replay(replace(case, configuration=Configuration(blocks=1, block_size=1))).digest)
    assert len(digests) == 4


TWO_WRONG_KEYS = """
from kvproof.invariants.checker import Checker
from kvproof.invariants.operations import Admit, Launch, Retire, Segment
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject, EngineView

class Reversed(EngineView):
    def index(self, group):
        true = dict(super().index(group))
        return dict(zip(true, reversed(list(true.values()))))

subject = EngineSubject(Configuration())
subject._view = Reversed(subject.engine)
checker = Checker(subject, interval=0)
for operation in (Admit((Segment(0, 32),)), Launch(), Retire()):
    checker.observe(operation, subject.apply(operation), subject.drain_events())
print(checker.audit())
"""


def test_a_violation_is_told_the_same_in_fresh_processes() -> None:
    assert len(_in_fresh_processes(TWO_WRONG_KEYS, [], 4)) == 1
