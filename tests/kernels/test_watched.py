"""The project's attention kernels touch only what they may, and read each key no more than needed.

That these checks can fail is shown by ``test_mutants``.
"""

from __future__ import annotations

import pytest
import torch

from kvproof.kernels.interpreter import is_interpreting

if not is_interpreting():
    pytest.skip("with a GPU the kernels are compiled", allow_module_level=True)

from kvproof.kernels.cases import Case, build
from kvproof.kernels.checks import Plan
from kvproof.kernels.problem import KINDS, Kind
from kvproof.kernels.sanitizer import Program
from kvproof.kernels.watched import (
    WastedReads,
    attend_watched,
    hold_to_least_reads,
    least_reads,
    sequence_of,
    touches_what_it_may,
)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_touch_only_what_they_may(kind: Kind) -> None:
    touches_what_it_may(kind, Plan(examples=30))


def test_decode_needs_each_visible_key_once() -> None:
    problem = build(Case(lengths=(6, 3), queries=(1, 1), window=4, block_size=4))
    row, other = problem.block_table.tolist()
    counts = least_reads(problem)
    assert counts[row[0]].tolist() == [0, 0, 1, 1]
    assert counts[row[1]].tolist() == [1, 1, 0, 0]
    assert counts[other[0]].tolist() == [1, 1, 1, 0]
    assert counts.sum() == 4 + 3


def test_prefill_needs_a_key_once_per_tile_of_queries() -> None:
    """20 queries in tiles of 16: the second tile needs what the first one needs, and more."""
    problem = build(Case(kind="unified", lengths=(20,), queries=(20,), block_size=32))
    counts = least_reads(problem)[problem.block_table[0, 0]]
    assert counts.tolist() == [2] * 16 + [1] * 4 + [0] * 12


def test_latent_attention_needs_a_key_once_per_16_heads() -> None:
    case = Case(kind="mla", group=18, head_size=24, value_size=8, lengths=(5,), block_size=8)
    counts = least_reads(build(case))
    assert counts.sum() == 5 * 2


def test_a_shared_prefix_is_needed_by_each_sequence() -> None:
    problem = build(Case(lengths=(4, 4), queries=(1, 1), block_size=4, shared_prefix=True))
    assert least_reads(problem)[problem.block_table[0, 0]].tolist() == [2] * 4


def test_wasted_reads_are_told_with_the_slot() -> None:
    problem = build(Case(lengths=(5,)))
    _, sanitizer = attend_watched(problem)
    hold_to_least_reads(problem, sanitizer)
    shorter = build(Case(lengths=(4,)))
    with pytest.raises(WastedReads, match=r"k_cache\[\d+, \d+, 0, 0\] was read 1 times, and has"):
        hold_to_least_reads(
            type(problem)(**{**vars(problem), "lengths": shorter.lengths}), sanitizer
        )


def test_which_sequence_a_program_of_the_unified_kernel_works_for() -> None:
    """Tiles of 16 queries: sequence b has its first tile at start // 16 + b."""
    problem = build(Case(kind="unified", lengths=(20, 3, 5), queries=(20, 0, 5)))
    find = sequence_of(problem)
    grid = (1, 5, 1)
    found = [find(Program("unified_kernel", (0, tile, 0), grid)) for tile in range(4)]
    assert problem.query_starts.tolist() == [0, 20, 20, 25]
    assert found == [0, 0, 1, 2]


def test_results_are_those_without_the_sanitizer() -> None:
    problem = build(Case(lengths=(21, 5), queries=(1, 1), split_size=16))
    result, _ = attend_watched(problem)
    assert not result.out.isnan().any()
    assert torch.isfinite(result.lse).all()
