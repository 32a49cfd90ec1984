"""What attention over a paged cache should give: densely in float64, and in the query's own dtype.

Both lay the keys of a sequence out in order and know nothing of tiles, splits or running maxima.
Slots that no query of the sequence may see are not read: they may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvproof.kernels.attention.arguments import Attention, Features, Scale
from kvproof.kernels.problem import Problem, picked


@dataclass(frozen=True)
class Laid:
    """One sequence, laid out: n queries, L keys from position ``first`` on, per query head."""

    sequence: int
    rows: slice
    """Of the problem's queries."""
    q: torch.Tensor
    """``[n, H, D]``"""
    k: torch.Tensor
    """``[L, H, D]``, multiplied by its scale."""
    v: torch.Tensor
    """``[L, H, DV]``, multiplied by its scale."""
    distance: torch.Tensor
    """``[n, L]``: key position minus query position, 0 for a query's own key."""
    visible: torch.Tensor
    """``[n, L]``"""


def lay_out(problem: Problem, dtype: torch.dtype) -> Iterator[Laid]:
    """The sequences that have queries, their tensors in ``dtype``."""
    for sequence, length in enumerate(problem.lengths.tolist()):
        rows = problem.queries(sequence)
        queries = rows.stop - rows.start
        if queries == 0:
            continue
        window, device = problem.features.window, problem.q.device
        first = max(0, length - queries + 1 - window) if window else 0
        key = torch.arange(first, length, device=device)
        query = torch.arange(length - queries, length, device=device)
        distance = key[None, :] - query[:, None]
        visible = distance <= 0
        if window:
            visible &= distance > -window
        block = problem.block_table[sequence, key // problem.block_size].long()
        slot = key % problem.block_size
        yield Laid(
            sequence,
            rows,
            problem.q[rows].to(dtype),
            _read(problem.k_cache, block, slot, problem.k_scale, problem.group, dtype),
            _read(problem.v_cache, block, slot, problem.v_scale, problem.group, dtype),
            distance,
            visible,
        )


def _read(
    cache: torch.Tensor,
    block: torch.Tensor,
    slot: torch.Tensor,
    scale: Scale,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    read = picked(cache, block, slot).to(dtype)
    factor = torch.as_tensor(scale, device=cache.device).reshape(-1, 1).to(dtype)
    return (read * factor).repeat_interleave(group, dim=1)


def masked_scores(laid: Laid, features: Features) -> torch.Tensor:
    """``[n, H, L]``: scaled, capped, biased, and minus infinity where not visible."""
    scores = torch.einsum("nhd,lhd->nhl", laid.q, laid.k) * features.scale
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    if features.alibi is not None:
        slope = features.alibi.to(scores.dtype)
        scores = scores + slope[:, None] * laid.distance[:, None, :].to(scores.dtype)
    return scores.masked_fill(~laid.visible[:, None, :], -torch.inf)


def log_sum_exp(scores: torch.Tensor, features: Features) -> torch.Tensor:
    """``[n, H]`` of the scores ``[n, H, L]`` and the sinks; minus infinity where there is none."""
    if features.sinks is not None:
        sink = features.sinks.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sink], dim=2)
    if scores.shape[2] == 0:
        return scores.new_full(scores.shape[:2], -torch.inf)
    return torch.logsumexp(scores, dim=2)


def weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Softmax weights ``[n, H, L]``; zeros for a query that sees nothing."""
    return torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])


@dataclass(frozen=True)
class Solution:
    """Exact attention of one sequence, with what it came from."""

    laid: Laid
    lse: torch.Tensor
    """``[n, H]``"""
    weights: torch.Tensor
    """``[n, H, L]``"""
    out: torch.Tensor
    """``[n, H, DV]``"""


def solve(problem: Problem) -> Iterator[Solution]:
    """Float64 attention, sequence by sequence."""
    for laid in lay_out(problem, torch.float64):
        scores = masked_scores(laid, problem.features)
        lse = log_sum_exp(scores, problem.features)
        p = weights(scores, lse)
        yield Solution(laid, lse, p, torch.einsum("nhl,lhd->nhd", p, laid.v))


def nothing_seen(problem: Problem) -> Attention:
    """What queries get that see no key, float64, to write the others' results into."""
    rows = problem.q.shape[:2]
    out = problem.q.new_zeros((*rows, problem.v_cache.shape[3]), dtype=torch.float64)
    return Attention(out, problem.q.new_full(rows, -torch.inf, dtype=torch.float64))


def dense(problem: Problem) -> Attention:
    """Float64 attention: ``out`` ``[T, H, DV]`` and ``lse`` ``[T, H]``."""
    result = nothing_seen(problem)
    for solution in solve(problem):
        rows = solution.laid.rows
        result.out[rows], result.lse[rows] = solution.out, solution.lse
    return result


def _shuffled(laid: Laid, seed: int) -> Laid:
    """The same, with keys and elements of heads in another order."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randperm(laid.k.shape[0], generator=generator).to(laid.k.device)
    elements = torch.randperm(laid.k.shape[2], generator=generator).to(laid.k.device)
    return replace(
        laid,
        q=laid.q[..., elements],
        k=laid.k[keys][..., elements],
        v=laid.v[keys],
        distance=laid.distance[:, keys],
        visible=laid.visible[:, keys],
    )


def same_dtype(problem: Problem, order: int = 0) -> torch.Tensor:
    """``out`` ``[T, H, DV]`` as plain PyTorch gives it, every step rounded to the query's dtype.

    What flash-attention's tests measure a kernel against: a kernel should err about as much.
    ``order``: sums over keys and over the head's elements in that order, 0 for that of the problem.
    """
    out = torch.zeros_like(problem.q[..., :1]).repeat(1, 1, problem.v_cache.shape[3])
    for laid in lay_out(problem, problem.q.dtype):
        if order:
            laid = _shuffled(laid, order)
        scores = masked_scores(laid, problem.features)
        if problem.features.sinks is not None:
            sink = problem.features.sinks.to(scores.dtype)[None, :, None]
            scores = torch.cat([scores, sink.expand(*scores.shape[:2], 1)], dim=2)
        if scores.shape[2] == 0:
            continue
        p = torch.softmax(scores, dim=2)[..., : laid.k.shape[0]]
        out[laid.rows] = torch.einsum("nhl,lhd->nhd", p, laid.v)
    return out
