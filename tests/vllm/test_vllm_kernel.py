"""The sanitizer over a kernel that is not the project's: vLLM's `unified_attention`, unmodified.

Needs vLLM 0.33 and Triton in an environment of their own (`bash .ci/vllm-env FOLDER`).  Needs no
GPU.

What is found is harmless as vLLM calls the kernel, and was so judged by reading it: its table is as
wide as the longest model length, so that what is read past a sequence's entries is still within the
tensor, and all that comes of it is masked.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None or find_spec("triton") is None:
    pytest.skip("vLLM and Triton are not both installed here", allow_module_level=True)

import torch

from kvproof.kernels.interpreter import InterpreterError, use_interpreter

if torch.cuda.is_available():
    pytest.skip("with a GPU, vLLM's kernels are compiled", allow_module_level=True)
try:
    use_interpreter()
    # vLLM does without Triton where it sees no GPU, except where it is told that none is there yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
except InterpreterError as error:
    pytest.skip(str(error), allow_module_level=True)

from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from kvproof.kernels.attention.arguments import Attention, Features
from kvproof.kernels.bounds import SLACK, bound
from kvproof.kernels.problem import Problem
from kvproof.kernels.reference import dense
from kvproof.kernels.sanitizer import Kind, Program, Sanitizer, SequenceOf, output, rows, sanitize
from kvproof.kernels.watched import least_reads, regions

pytestmark = pytest.mark.vllm

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 16
LENGTHS = (40, 18, 33)
TILE_TOKENS = 16 // (HEADS // KV_HEADS)
"""Queries of one program: vLLM takes 16 rows, a row for each head of a group."""


def make_problem(queries: tuple[int, ...], window: int = 0, spare_entries: int = 0) -> Problem:
    """Three sequences in a shuffled pool; the table has just enough entries, and spare ones."""
    draw = torch.Generator().manual_seed(1)
    needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    free = torch.randperm(sum(needed) + 2, generator=draw).tolist()
    table = torch.zeros(len(LENGTHS), max(needed) + spare_entries, dtype=torch.int32)
    for row, count in zip(table, needed, strict=True):
        row[:count] = torch.tensor([free.pop() for _ in range(count)])
    pool = (sum(needed) + 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return Problem(
        "unified",
        torch.randn(sum(queries), HEADS, HEAD_SIZE, generator=draw),
        torch.randn(pool, generator=draw),
        torch.randn(pool, generator=draw),
        table,
        torch.tensor([0, *queries]).cumsum(0).int(),
        torch.tensor(LENGTHS, dtype=torch.int32),
        Features(HEAD_SIZE**-0.5, window=window),
    )


def run_vllm(problem: Problem) -> tuple[torch.Tensor, Sanitizer]:
    """vLLM's kernel on the problem, every tensor declared, reports collected."""
    out = torch.full_like(problem.q, torch.nan)
    known = regions(problem, out_only(out), None)
    known["out"] = rows(output(out), problem.query_starts)
    window = problem.features.window
    with sanitize(known, raises=False, sequence_of=sequence_of(problem)) as sanitizer:
        unified_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            out,
            problem.query_starts,
            int(problem.query_starts.diff().max()),
            problem.lengths,
            int(problem.lengths.max()),
            problem.features.scale,
            True,
            (window - 1, 0) if window else (-1, -1),
            problem.block_table,
            0.0,
            None,
            None,
            None,
        )
    return out, sanitizer


def sequence_of(problem: Problem) -> SequenceOf:
    firsts = [
        start // TILE_TOKENS + sequence
        for sequence, start in enumerate(problem.query_starts.tolist()[:-1])
    ]

    def find(program: Program) -> int | None:
        return sum(first <= program.index[0] for first in firsts) - 1

    return find


def out_only(out: torch.Tensor) -> Attention:
    """A result for ``regions``: vLLM's kernel returns no log-sum-exp."""
    return Attention(out, torch.empty(0, HEADS))


def test_values_are_right() -> None:
    problem = make_problem((1, 5, 17))
    out, _ = run_vllm(problem)
    assert ((out.double() - dense(problem).out).abs() <= SLACK * bound(problem).out).all()


def test_the_table_is_read_past_its_end() -> None:
    """Tiles of 32 keys over blocks of 16: lanes past the last key load the table unmasked."""
    _, sanitizer = run_vllm(make_problem((1, 5, 17)))
    past_end = [r for r in sanitizer.reports if r.kind is Kind.OUT_OF_BOUNDS]
    assert [report.tensor for report in past_end] == ["block_table"]
    (report,) = past_end
    assert "bytes past the end of 'block_table', int32 [3, 3]" in report.detail
    assert report.location is not None
    assert report.location.file.endswith("ops/triton_unified_attention.py")
    assert report.location.function == "kernel_unified_attention"


def test_with_a_wide_table_it_reads_entries_of_nobody() -> None:
    _, sanitizer = run_vllm(make_problem((1, 5, 17), spare_entries=8))
    assert {(r.kind, r.tensor) for r in sanitizer.reports} == {(Kind.FORBIDDEN, "block_table")}


def test_without_a_window_keys_are_touched_only_where_they_are_visible() -> None:
    _, sanitizer = run_vllm(make_problem((1, 5, 17), spare_entries=8))
    assert {report.tensor for report in sanitizer.reports} == {"block_table"}


def test_decode_reads_every_key_once() -> None:
    problem = make_problem((1, 1, 1), spare_entries=8)
    _, sanitizer = run_vllm(problem)
    least = least_reads(problem)[:, :, None, None]
    for name in ("k_cache", "v_cache"):
        assert (sanitizer.read_counts(name) == least).all()


def test_with_a_window_it_reads_keys_before_it() -> None:
    """They may be in blocks that are free by now; the loads are not masked, the scores are."""
    problem = make_problem((1, 1, 1), window=9, spare_entries=8)
    out, sanitizer = run_vllm(problem)
    assert ((out.double() - dense(problem).out).abs() <= SLACK * bound(problem).out).all()
    found = {(report.kind, report.tensor) for report in sanitizer.reports}
    assert (Kind.FORBIDDEN, "k_cache") in found
    read, needed = (sanitizer.read_counts("k_cache") > 0).sum(), (least_reads(problem) > 0).sum()
    assert read > needed * KV_HEADS * HEAD_SIZE
