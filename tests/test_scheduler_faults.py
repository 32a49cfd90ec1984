"""The seeded faults of the scheduler: each is found, by its property, shrunk, and leaves no trace.

One search a fault; ``kvproof faults detect`` makes twenty.
"""

from __future__ import annotations

import re
from functools import cache
from math import inf

import pytest
from msgspec.structs import replace

from kvproof.engine.policies import POLICY_NAMES
from kvproof.fuzz.faults import (
    Fault,
    all_faults,
    cache_faults,
    fault_by_id,
    scheduler_faults,
)
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import Found, search
from kvproof.fuzz.shrink import Shrunk, shrink
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.stateful_tests.totals import Totals

FAULTS = scheduler_faults()
fault_by_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)

# -- the catalogue ---------------------------------------------------------------------------------


def test_both_catalogues_are_one() -> None:
    assert all_faults() == (*cache_faults(), *FAULTS)
    ids = [fault.id for fault in all_faults()]
    assert len(set(ids)) == len(ids)
    assert len(FAULTS) >= 16
    assert [fault_by_id(fault.id) for fault in FAULTS] == list(FAULTS)


@fault_by_fault
def test_a_fault_is_told_and_cites_its_bug(fault: Fault) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", fault.id)
    assert re.fullmatch(r"B\d+, [\w.-]+/[\w.-]+#\d+", fault.source)
    assert re.match(r"[A-Z].{20,}\.$", fault.summary)
    family, _, policy = fault.subject.partition(":")
    assert family == "scheduler"
    assert policy in POLICY_NAMES


def test_every_scheduling_property_has_faults_and_they_name_no_other() -> None:
    known = {check.id() for check in SCHEDULING_CHECKS}
    for fault in FAULTS:
        assert {fault.property, *fault.also} <= known
        assert fault.property not in fault.also
    assert {fault.property for fault in FAULTS} == known


@pytest.mark.parametrize("check", SCHEDULING_CHECKS, ids=lambda check: check.id())
def test_a_positive_control_is_a_fault_of_its_property(check: type) -> None:
    control = fault_by_id(check.positive_control)  # type: ignore[attr-defined]
    assert control in FAULTS
    assert control.property == check.id()  # type: ignore[attr-defined]


# -- installing ------------------------------------------------------------------------------------


@fault_by_fault
def test_a_fault_is_in_place_only_while_it_is_installed(fault: Fault) -> None:
    original = fault.target.__dict__[fault.method]
    with fault.installed():
        assert fault.target.__dict__[fault.method] is not original
    assert fault.target.__dict__[fault.method] is original


# -- finding, shrinking, replaying -----------------------------------------------------------------


@cache
def searched(fault: Fault) -> Found:
    totals = Totals()
    seed = f"fault/{fault.id}"
    found = search(fault.subject, seed, seconds=60, totals=totals, fault=fault.id)
    assert found is not None
    return found


@cache
def shrunk_case(fault: Fault) -> Shrunk:
    shrunk = shrink(searched(fault).case, seconds_max=inf)
    assert shrunk is not None
    return shrunk


@fault_by_fault
def test_a_fault_is_found_by_its_property(fault: Fault) -> None:
    calls = fault.calls()
    found, shrunk = searched(fault), shrunk_case(fault)
    assert fault.calls() > calls
    assert (found.case.fault, found.case.subject) == (fault.id, fault.subject)
    assert found.case.violates == found.violation.property
    violated = {
        violation.property
        for case in (found.case, shrunk.case)
        for violation in replay(case).violations
    }
    assert violated & {fault.property, *fault.also}


@fault_by_fault
def test_a_finding_shrinks_to_about_the_shortest_run(fault: Fault) -> None:
    shrunk = shrunk_case(fault)
    assert 1 <= len(shrunk.case.operations) <= 2 * fault.shortest


@fault_by_fault
def test_a_shrunk_case_replays_and_needs_its_fault(fault: Fault) -> None:
    shrunk = shrunk_case(fault)
    first, again = replay(shrunk.case), replay(shrunk.case)
    assert (first.digest, first.violations) == (again.digest, again.violations)
    assert first.verdict == "fail"
    assert first.ops == len(shrunk.case.operations), "it ends at the operation to blame"
    assert shrunk.case.violates in {violation.property for violation in first.violations}
    without = replay(replace(shrunk.case, fault=None))
    assert (without.verdict, list(without.violations)) == ("pass", [])


def test_declared_properties_fire_for_most_faults() -> None:
    """``also`` is for the runs in which something else breaks first, not a way out."""
    fired = [
        fault.property in {v.property for v in replay(shrunk_case(fault).case).violations}
        for fault in FAULTS
    ]
    assert sum(fired) >= 0.9 * len(FAULTS)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_unmodified_scheduler_is_silent(policy: str) -> None:
    totals = Totals()
    found = search(f"scheduler:{policy}", "silent", seconds=600, totals=totals, runs_max=60)
    assert (found, totals.problems, totals.runs) == (None, [], 60)


def test_no_operation_is_left_out_of_the_clean_runs() -> None:
    """A clean run drives what a faulty one does."""
    totals = Totals()
    search("scheduler:fcfs", "silent", seconds=600, totals=totals, runs_max=30)
    done = {kind: counts["done"] for kind, counts in totals.operations.items()}
    assert {kind for kind, times in done.items() if times} == {
        "arrive", "schedule", "run", "retire", "abort", "wait",
    }  # fmt: skip
