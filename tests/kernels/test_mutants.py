"""Faults planted in the kernels are caught, each by the checks that the list names.

Without a GPU: what a mutant gets wrong is seen in the interpreter.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl

from kvproof.kernels.interpreter import is_interpreting

if not is_interpreting():
    pytest.skip("with a GPU the kernels are compiled", allow_module_level=True)

from kvproof.kernels import mutants, mutation_checks
from kvproof.kernels.cases import build
from kvproof.kernels.mutants import (
    FOLDER,
    KERNELS,
    MUTANTS,
    Mutant,
    StaleMutant,
    TriedOn,
    mutated,
    page,
    planted,
)
from kvproof.kernels.mutation_checks import (
    ALL_CHECKS,
    CASES,
    KINDS_TRIED,
    LAW_CASES,
    LOOP_BOUNDS,
    guarded,
    verdicts_on,
)

IDS = [mutant.id for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_a_mutant_is_caught_by_the_checks_that_it_names(mutant: Mutant) -> None:
    """All of them are caught, for each names one at least."""
    found = verdicts_on(mutant, mutant.kinds, mutant.caught_by)
    assert found
    assert found.keys() >= mutant.caught_by, found


def test_a_mutant_names_every_check_that_catches_it() -> None:
    """On what is quickly tried in full; the command of ``mutants`` tries the rest."""
    for mutant in MUTANTS:
        if mutant.kinds == ("cache",):
            assert verdicts_on(mutant, mutant.kinds).keys() == mutant.caught_by, mutant.id


@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_nothing_is_said_about_the_sound_kernels(kind: TriedOn) -> None:
    """The same checks, every one of them, on kernels without a fault."""
    assert verdicts_on(None, (kind,)) == {}


@triton.jit
def fill_kernel(target, other):
    tl.store(target, 7)
    tl.store(other, 7)


@pytest.mark.parametrize("name", LOOP_BOUNDS)
def test_a_wild_store_does_not_reach_what_loops_go_by(name: str) -> None:
    """It would make a loop over keys endless, where the heap happens to lie so."""
    problem = build(LAW_CASES["unified"])
    target, other = getattr(problem, name), problem.lengths.new_zeros(1)
    before = target.clone()
    with guarded(problem):
        fill_kernel[(1,)](target, other)
    assert target.equal(before)
    assert other.item() == 7


def test_there_are_enough_and_each_check_is_needed() -> None:
    """24 were asked for.  What the value test alone would miss is what the others are for."""
    assert len(MUTANTS) >= 24
    assert len(set(IDS)) == len(IDS)
    assert all(mutant.caught_by for mutant in MUTANTS)
    assert {check for mutant in MUTANTS for check in mutant.caught_by} == ALL_CHECKS
    missed_by_value = [mutant.caught_by for mutant in MUTANTS if "value" not in mutant.caught_by]
    assert len(missed_by_value) >= 6
    assert sum("poison" not in caught_by for caught_by in missed_by_value) >= 2
    assert frozenset(("sanitizer",)) in missed_by_value


def test_the_documentation_is_the_page_that_is_generated() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert page({mutant.id: mutant.caught_by for mutant in MUTANTS}) == documented


def test_the_page_is_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command goes by what catches a mutant, not by what the list says."""
    copies = [m for m in MUTANTS if m.function == "copy_kernel"]
    wrong = [replace(copies[0], caught_by=frozenset(("laws",))), *copies[1:]]
    for module in (mutants, mutation_checks):
        monkeypatch.setattr(module, "MUTANTS", wrong)
    monkeypatch.setattr(mutation_checks, "KINDS_TRIED", ("cache",))
    assert mutants.main() == 1
    printed, complaint = capsys.readouterr()
    assert printed == page({m.id: m.caught_by for m in copies})
    assert complaint == f"{copies[0].id} is caught by ['value'], not ['laws']\n"
    monkeypatch.setattr(mutation_checks, "MUTANTS", copies)
    assert mutants.main() == 0


def test_every_kernel_has_mutants() -> None:
    functions = {mutant.function for mutant in MUTANTS}
    assert functions == set(KERNELS)
    assert set(LAW_CASES) == set(CASES)


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    stale = Mutant(
        "stale", "cache", "copy_kernel", ("cache",), (("x = y", "x = z"),), ALL_CHECKS, ""
    )
    with pytest.raises(StaleMutant, match="found 0 times in copy_kernel"), planted(stale):
        pass
    twice = Mutant(
        "twice", "cache", "copy_kernel", ("cache",), (("tl.load(", "("),), ALL_CHECKS, ""
    )
    with pytest.raises(StaleMutant, match="found 3 times in copy_kernel"), planted(twice):
        pass


def test_only_the_named_function_is_changed() -> None:
    text = "import a\n\n\ndef f(x):\n    return 1\n\n\ndef g(x):\n    return 1\n"
    mutant = Mutant("m", "m", "g", (), (("return 1", "return 2"),), ALL_CHECKS, "")
    assert mutated(mutant, text) == text[:-2] + "2\n"


def test_planting_leaves_the_kernels_as_they_are() -> None:
    before = {path: path.read_text() for path in Path(FOLDER).rglob("*.py")}
    modules = set(sys.modules)
    with planted(MUTANTS[0]):
        assert set(sys.modules) > modules
    assert set(sys.modules) == modules
    assert {path: path.read_text() for path in Path(FOLDER).rglob("*.py")} == before
