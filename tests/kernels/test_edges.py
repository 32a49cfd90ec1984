"""Every edge, and what a kernel that is off by one does there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.bounds import OutOfBound, hold_to_bound
from kvproof.kernels.cases import build
from kvproof.kernels.checks import (
    Plan,
    around,
    edge_cases,
    far_problem,
    holds_at_edges,
    reaches_far_blocks,
    survives_extreme_scores,
)
from kvproof.kernels.interpreter import checking_overflow, is_interpreting
from kvproof.kernels.problem import KINDS, Kind, Problem, attend, bits


@pytest.mark.parametrize("kind", KINDS)
def test_right_at_every_edge(kind: Kind, device: str) -> None:
    holds_at_edges(kind, Plan(device))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_any_size(kind: Kind, device: str) -> None:
    survives_extreme_scores(kind, Plan(device))


@pytest.mark.parametrize("kind", KINDS)
def test_the_highest_blocks_of_a_huge_pool(kind: Kind, device: str) -> None:
    reaches_far_blocks(kind, Plan(device))


@pytest.mark.skipif(not is_interpreting(), reason="the interpreter checks for overflow")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_overflows_on_the_way_to_the_highest_blocks(kind: Kind) -> None:
    with checking_overflow():
        problem = far_problem(kind, "cpu")
        hold_to_bound(problem, attend(problem))


def test_edges_are_named_and_different() -> None:
    for kind in KINDS:
        named = list(edge_cases(kind))
        assert len({name for name, _ in named}) == len({case for _, case in named}) == len(named)
    assert around(1, 4) == (0, 1, 2, 3, 4, 5)


# Faults at edges


def loses_the_newest(problem: Problem) -> Attention:
    return attend(replace(problem, lengths=(problem.lengths - 1).clamp(min=0)))


def window_one_short(problem: Problem) -> Attention:
    window = problem.features.window
    return attend(problem.with_features(window=window - 1) if window > 1 else problem)


def window_one_long(problem: Problem) -> Attention:
    window, longest = problem.features.window, int(problem.lengths.max())
    return attend(problem.with_features(window=window + 1) if 0 < window < longest else problem)


def rounds_down_to_blocks(problem: Problem) -> Attention:
    """Drops the last, partial block, unless there is nothing else."""
    size = problem.block_size
    whole = problem.lengths // size * size
    return attend(replace(problem, lengths=torch.where(whole > 0, whole, problem.lengths)))


def zeros_become_nan(problem: Problem) -> Attention:
    """Divides by the sum of no weights (vllm issue 39148)."""
    result = attend(problem)
    result.out[result.lse.isneginf()] = torch.nan
    return result


def forgets_sinks_of_nothing(problem: Problem) -> Attention:
    result = attend(problem)
    empty = problem.lengths == 0
    result.lse[empty] = -torch.inf
    return result


def finite_for_minus_infinity(problem: Problem) -> Attention:
    """A row whose scores are all below the stand-in has no weight left (flashinfer issue 4450)."""
    result = attend(problem)
    result.out[result.lse < -5e4] = 0
    return result


def ids_in_32_bits(problem: Problem) -> Attention:
    """The element offset of a block wraps: another block is read, the one 2^32 elements lower."""
    stride = problem.k_cache.stride(0)
    wrapped = (problem.block_table.long() * stride % 2**31) // stride
    return attend(replace(problem, block_table=wrapped.to(problem.block_table.dtype)))


@pytest.mark.parametrize(
    ("kind", "fault", "edge"),
    [
        ("mla", loses_the_newest, "keys in blocks of"),
        ("decode", window_one_short, "needle: first"),
        ("decode", window_one_long, "window . over 20 keys"),
        ("mla", rounds_down_to_blocks, "2 keys in blocks of 3|4 keys in blocks of 3"),
        ("decode", zeros_become_nan, "0 keys in blocks of 1"),
        ("decode", forgets_sinks_of_nothing, "empty sequences with sinks"),
    ],
)
def test_a_fault_at_an_edge_is_found_and_named(
    kind: Kind, fault: Callable[[Problem], Attention], edge: str
) -> None:
    with pytest.raises(OutOfBound, match=edge):
        holds_at_edges(kind, Plan(), fault)


def test_a_finite_stand_in_for_minus_infinity_is_found() -> None:
    with pytest.raises(OutOfBound, match="all scores -1e\\+30"):
        survives_extreme_scores("decode", Plan(), finite_for_minus_infinity)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_32_bits_are_found(kind: Kind) -> None:
    with pytest.raises(OutOfBound):
        reaches_far_blocks(kind, Plan(), ids_in_32_bits)


def test_needle_before_the_window_is_poison() -> None:
    """The slot just outside the window holds no number: to read it shows at once."""
    looked_at = 0
    for name, case in edge_cases("decode"):
        if "needle: before" in name and 0 < case.window < 20:
            problem = build(case)
            position = 20 - case.window - 1
            entry = position // problem.block_size
            first_kept = (20 - case.window) // problem.block_size
            if entry == first_kept:
                block = int(problem.block_table[0, entry])
                outside = problem.k_cache[block, position % problem.block_size]
                assert not bool(outside.isfinite().any())
                looked_at += 1
    assert looked_at


def test_untouched_memory_of_the_huge_pool_is_not_read() -> None:
    problem = far_problem("decode", "cpu")
    assert problem.k_cache.numel() > 2**31
    assert bits(problem.k_cache).data_ptr() == problem.v_cache.data_ptr()
