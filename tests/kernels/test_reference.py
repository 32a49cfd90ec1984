"""The references say what attention is: by closed forms, by PyTorch's own, and by plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from kvproof.kernels.attention.arguments import Features
from kvproof.kernels.bounds import roundoff
from kvproof.kernels.cases import Case, build, cases
from kvproof.kernels.problem import KINDS, Problem, seen_slots
from kvproof.kernels.reference import dense, same_dtype


def by_loops(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one query, one head, one key at a time, in Python's own floats."""
    features = problem.features
    out = torch.zeros(*problem.q.shape[:2], problem.v_cache.shape[3], dtype=torch.float64)
    lse = torch.full(problem.q.shape[:2], -math.inf, dtype=torch.float64)
    for sequence, length in enumerate(problem.lengths.tolist()):
        rows = problem.queries(sequence)
        for token in range(rows.start, rows.stop):
            position = length - (rows.stop - token)
            first = max(0, position - features.window + 1) if features.window else 0
            for head in range(problem.q.shape[1]):
                row = one_query(problem, sequence, token, head, range(first, position + 1))
                lse[token, head], out[token, head] = row
    return out, lse


def one_query(
    problem: Problem, sequence: int, token: int, head: int, keys: range
) -> tuple[float, torch.Tensor]:
    features, kv_head = problem.features, head // problem.group
    k_scale, v_scale = (
        float(torch.as_tensor(scale).reshape(-1).expand(problem.kv_heads)[kv_head])
        for scale in (problem.k_scale, problem.v_scale)
    )
    scores, values = [], []
    for key in keys:
        block = int(problem.block_table[sequence, key // problem.block_size])
        slot = key % problem.block_size
        k = problem.k_cache[block, slot, kv_head].double() * k_scale
        score = float(problem.q[token, head].double() @ k) * features.scale
        if features.softcap:
            score = features.softcap * math.tanh(score / features.softcap)
        if features.alibi is not None:
            score += float(features.alibi[head]) * (key - keys.stop + 1)
        scores.append(score)
        values.append(problem.v_cache[block, slot, kv_head].double() * v_scale)
    sinks = [] if features.sinks is None else [float(features.sinks[head])]
    if not scores + sinks:
        return -math.inf, torch.zeros(problem.v_cache.shape[3], dtype=torch.float64)
    largest = max(scores + sinks)
    total = sum(math.exp(score - largest) for score in scores + sinks)
    row = sum(
        (math.exp(s - largest) / total * v for s, v in zip(scores, values, strict=True)),
        start=torch.zeros(problem.v_cache.shape[3], dtype=torch.float64),
    )
    return largest + math.log(total), row


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(cases(small=True))
def test_dense_is_what_plain_loops_give(case: Case) -> None:
    problem = build(case)
    out, lse = by_loops(problem)
    exact = dense(problem)
    torch.testing.assert_close(exact.out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact.lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 5])
def test_dense_is_what_pytorch_gives(window: int) -> None:
    case = Case("unified", kv_heads=2, group=3, lengths=(11,), queries=(11,), window=window)
    problem = build(case)
    position = torch.arange(11)
    distance = position[None, :] - position[:, None]
    mask = (distance <= 0) & (distance > -(window or 99))
    blocks = problem.block_table[0, position // case.block_size].long()
    keys, values = (
        cache[blocks, position % case.block_size].double().transpose(0, 1)
        for cache in (problem.k_cache, problem.v_cache)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        problem.q.double().transpose(0, 1),
        keys.repeat_interleave(3, 0),
        values.repeat_interleave(3, 0),
        attn_mask=mask,
        scale=problem.features.scale,
    )
    torch.testing.assert_close(dense(problem).out, expected.transpose(0, 1))


def two_keys(features: Features) -> Problem:
    """One query whose two keys score 2 and 6 before anything is done to them; V is 1 and -1."""
    problem = build(Case(block_size=2, lengths=(2,)))
    block = int(problem.block_table[0, 0])
    problem.q.fill_(1.0)
    problem.k_cache[block, 0], problem.k_cache[block, 1] = 2 / 16, 6 / 16
    problem.v_cache[block, 0], problem.v_cache[block, 1] = 1.0, -1.0
    return replace(problem, features=features)


def closed_form(old: float, new: float, sink: float = -math.inf) -> tuple[float, float]:
    total = math.exp(old) + math.exp(new) + math.exp(sink)
    return (math.exp(old) - math.exp(new)) / total, math.log(total)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (Features(1.0), closed_form(2, 6)),
        (Features(0.5), closed_form(1, 3)),
        (Features(1.0, window=1), (-1.0, 6.0)),
        (Features(1.0, window=2), closed_form(2, 6)),
        (Features(1.0, softcap=3.0), closed_form(3 * math.tanh(2 / 3), 3 * math.tanh(2))),
        (Features(1.0, alibi=torch.tensor([0.25])), closed_form(1.75, 6)),
        (Features(1.0, sinks=torch.tensor([4.0])), closed_form(2, 6, 4)),
        # Scaled, then capped, then biased; what is masked has no weight, capped or not.
        (
            Features(0.5, 0, 3.0, torch.tensor([1.0]), torch.tensor([0.25])),
            closed_form(3 * math.tanh(1 / 3) - 0.25, 3 * math.tanh(1), 1),
        ),
        (Features(1.0, 1, 3.0), (-1.0, 3 * math.tanh(2))),
    ],
    ids=["plain", "scale", "window", "wide", "softcap", "alibi", "sinks", "all", "cap-then-mask"],
)
def test_closed_forms(features: Features, expected: tuple[float, float]) -> None:
    exact = dense(two_keys(features))
    assert float(exact.out[0, 0, 0]) == pytest.approx(expected[0], rel=1e-12)
    assert float(exact.lse[0, 0]) == pytest.approx(expected[1], rel=1e-12)


def test_nothing_to_see_gives_zeros() -> None:
    exact = dense(build(Case(lengths=(0,))))
    assert not exact.out.any()
    assert bool(exact.lse.isneginf().all())
    sunk = build(Case(lengths=(0,), sinks=True))
    assert not dense(sunk).out.any()
    assert dense(sunk).lse[0].tolist() == pytest.approx(sunk.features.sinks.tolist())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_same_dtype_errs_by_a_few_roundings(dtype: str) -> None:
    """It is attention, and it is not the float64 one."""
    problem = build(
        Case("unified", dtype, dtype, 1, 2, lengths=(40,), queries=(9,), window=17, sinks=True)
    )
    error = (same_dtype(problem).double() - dense(problem).out).abs().max()
    u, _ = roundoff(problem.q.dtype)
    assert u / 8 < float(error) < 16 * u


@pytest.mark.parametrize("kind", KINDS)
def test_references_do_not_read_what_is_not_seen(kind: str) -> None:
    problem = build(
        Case(
            kind,
            group=2,
            head_size=48,
            value_size=32,
            lengths=(9, 0),
            queries=(1, 0 + (kind != "unified")),
        )  # type: ignore[arg-type]
    )
    assert not bool(problem.k_cache[~seen_slots(problem)].isfinite().any())
    assert bool(dense(problem).out.isfinite().all())
    assert bool(same_dtype(problem).isfinite().all())
