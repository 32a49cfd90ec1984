"""What the command runs: every check, by name, reproducible, and telling what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.bounds import OutOfBound
from kvproof.kernels.cases import Case
from kvproof.kernels.checks import Plan, all_checks, for_all, matches_reference
from kvproof.kernels.laws import LAWS
from kvproof.kernels.problem import KINDS, Problem, attend


def test_every_kernel_meets_every_kind_of_check() -> None:
    names = [check.name for check in all_checks()]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        for name in ("reference", "flash-rule", "edges", "extreme-scores", "far-blocks"):
            assert f"{kind}-{name}" in names
    for law in LAWS:
        for kind in law.kinds:
            assert f"{kind}-law-{law.name}" in names
    assert {"write", "copy", "far-moves"} <= set(names)
    assert all(check.claim.endswith(".") for check in all_checks())


@pytest.mark.parametrize("name", ["decode-law-alone", "unified-law-scale", "copy", "mla-edges"])
def test_a_check_runs_and_remarks(name: str, device: str) -> None:
    (check,) = (check for check in all_checks() if check.name == name)
    assert check.run(Plan(device, examples=40))


def drops_a_key(problem: Problem) -> Attention:
    longer = (problem.lengths > 20) & (problem.features.window == 0)
    return attend(replace(problem, lengths=problem.lengths - longer.to(problem.lengths.dtype)))


def test_a_failure_comes_with_the_smallest_case(device: str) -> None:
    with pytest.raises(OutOfBound) as caught:
        matches_reference("decode", Plan(device, examples=50), drops_a_key)
    told = "\n".join(caught.value.__notes__)
    assert "case=Case(kind='decode'" in told
    if device == "cpu":
        assert "lengths=(21,)" in told


def drawn_with(seed: int, examples: int) -> list[Case]:
    from kvproof.kernels.cases import cases

    seen: list[Case] = []
    for_all(Plan(seed=seed), cases(), seen.append, examples)
    return seen


def test_the_same_seed_draws_the_same_cases() -> None:
    assert drawn_with(1, 20) == drawn_with(1, 20) != drawn_with(2, 20)


@pytest.mark.parametrize("examples", [1, 30])
def test_as_many_examples_as_asked_for(examples: int) -> None:
    assert len(drawn_with(0, examples)) == examples
