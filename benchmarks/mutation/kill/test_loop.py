"""What is to kill mutants: the seeded loop, from fixed seeds, is silent on what is right."""

from __future__ import annotations

import pytest

from kvproof.engine.policies import POLICY_NAMES
from kvproof.fuzz.search import search
from kvproof.stateful_tests.totals import Totals

RUNS = 10
PIECES = [("engine", number) for number in range(8)]
PIECES += [(f"scheduler:{policy}", 0) for policy in POLICY_NAMES] + [("scheduler:fcfs", 1)]


@pytest.mark.parametrize(("subject", "number"), PIECES)
def test_the_loop_is_silent(subject: str, number: int) -> None:
    totals = Totals()
    seed = f"mutation/{subject}/{number}"
    assert search(subject, seed, seconds=60, totals=totals, runs_max=RUNS) is None
    assert not totals.problems
    assert totals.runs == RUNS
