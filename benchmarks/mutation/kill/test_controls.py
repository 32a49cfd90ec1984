"""What is to kill mutants of checks: each seeded fault is still seen, where it was, as what it was.

The cases were found and shrunk before anything was mutated.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvproof.fuzz.replay import replay
from kvproof.invariants.case import load_case

CASES = sorted(Path(__file__).parent.glob("cases/*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_seeded_fault_is_seen(path: Path) -> None:
    case = load_case(path)
    seen = replay(case)
    assert seen.ops == len(case.operations)
    assert case.violates in {violation.property for violation in seen.violations}
    assert replay(replace(case, fault=None)).verdict == "pass"


def test_there_are_cases() -> None:
    assert len(CASES) > 100
