"""What checking costs on any subject: figures of all variants, and bad input told as such."""

from __future__ import annotations

import pytest

from kvproof.fuzz.bench import subject as bench
from kvproof.fuzz.bench.subject import bench_subject
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.replay import installed
from kvproof.invariants.errors import InputError


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RUNS", 4)


@pytest.mark.parametrize("name", ["engine", "scheduler:fcfs"])
def test_each_pool_is_measured_with_checks_and_without(name: str) -> None:
    heard: list[int] = []
    result = bench_subject(name, 2, heard.append, pools=(8, 64))
    assert heard == [1, 2]
    assert [measured.name for measured in result.results] == [
        f"{blocks} blocks, checks {state}" for blocks in (8, 64) for state in ("off", "on")
    ]
    assert set(result.ratios) == {"checked_over_unchecked_8", "checked_over_unchecked_64"}
    assert all(measured.ops > 100 and measured.seconds > 0 for measured in result.results)


def test_a_broken_subject_is_not_measured() -> None:
    fault = fault_by_id("counter-drifts")
    with installed(fault.id), pytest.raises(AssertionError, match="engine is broken"):
        bench_subject(fault.subject, 1, pools=(8,))


def test_an_unknown_subject_is_bad_input() -> None:
    with pytest.raises(InputError, match="unknown subject"):
        bench_subject("nosuch")
