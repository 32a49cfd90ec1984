"""How far a right kernel may be from the exact result: derived from the problem, not chosen.

Notation: u is the unit roundoff of the query's dtype, e = 2^-24 that of float32; s a score, p its
exact softmax weight, v the value, o = Σ p v, n the keys that a query sees.  Rounding errors of a
sum of n terms grow like sqrt(n), not n, with high probability (Higham & Mary 2019, "A new approach
to probabilistic rounding error analysis"); that is what is used for the sums.

* Scores.  The products of q·k are exact in float32 where q and k have 16 bits or fewer; the sum
  errs by sqrt(D)·e·Σ|q k|, times the scale; the cap by 4e·cap (an absolute error: 1 - exp(-2x)
  loses what x is small by); scaling, the factor log2 e, the bias and the subtraction of the maximum
  by 4e·(|s| + |bias| + max|s|).  Together δ, per key.
* Weights.  A score off by δ changes p by the factor exp(δ), and, through the normaliser, all of
  them by exp(-Σ p δ): relatively δ + Σ p δ.
* p is rounded to the query's dtype before it meets v: relatively by u, or, below the smallest
  normal number of float16, absolutely by half its spacing there, η, relative to the largest weight.
* Sums of p and of p·v over n keys, the rescaling once per tile, and the merge of splits: e·(4 +
  sqrt(n)) relative to Σ p|v|.
* The result is rounded to the query's dtype: u|o|, or half the least spacing.

So   |out - o| <= u|o| + η + Σ p|v|·(e(4 + sqrt n) + δ + Σ p δ) + Σ max(u p, η·peak)|v|
and  |lse - exact| <= Σ p δ + e(4 + sqrt n) + 4e|lse|.

Kernels are held to twice that: first-order terms only were kept, and sqrt(n) is a typical size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvproof.kernels.attention.arguments import Attention, Features
from kvproof.kernels.problem import Problem
from kvproof.kernels.reference import Laid, Solution, dense, nothing_seen, same_dtype, solve

E32 = 2.0**-24
SLACK = 2.0
"""How many times the bound a kernel may err."""

ORDERS = range(5)
"""In which plain PyTorch sums, see ``same_dtype``."""


class OutOfBound(AssertionError):
    """A result is further from the reference than a right kernel could be."""


def roundoff(dtype: torch.dtype) -> tuple[float, float]:
    """Unit roundoff of ``dtype``, and half the spacing of its subnormal numbers."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.tiny * info.eps / 2


def exact_and_bound(problem: Problem) -> tuple[Attention, Attention]:
    """The float64 reference, and the bound of the module's text, per element of each."""
    exact = nothing_seen(problem)
    allowed = Attention(torch.zeros_like(exact.out), torch.zeros_like(exact.lse))
    for solution in solve(problem):
        rows = solution.laid.rows
        exact.out[rows], exact.lse[rows] = solution.out, solution.lse
        allowed.out[rows], allowed.lse[rows] = _bound_of(
            solution, problem.features, problem.q.dtype
        )
    return exact, allowed


def bound(problem: Problem) -> Attention:
    """The bound alone, float64."""
    return exact_and_bound(problem)[1]


def _bound_of(
    solution: Solution, features: Features, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    u, eta = roundoff(dtype)
    laid, p = solution.laid, solution.weights
    delta = score_error(laid, features)
    total_delta = (p * delta).sum(2)
    sums = E32 * (4 + laid.visible.sum(1).double().sqrt())[:, None]

    relative = p * (sums[..., None] + delta + total_delta[..., None])
    # A subnormal weight is off by eta relative to the largest, the one that has become 1.
    rounded = torch.where(p > 0, torch.maximum(u * p, eta * _peak(p)), 0.0)
    weighted = torch.einsum("nhl,lhd->nhd", relative + rounded, laid.v.abs())
    lse = total_delta + sums + 4 * E32 * _finite(solution.lse).abs()
    return u * solution.out.abs() + eta + weighted, lse


def score_error(laid: Laid, features: Features) -> torch.Tensor:
    """δ ``[n, H, L]``: how far a score computed in float32 may be off."""
    products = torch.einsum("nhd,lhd->nhl", laid.q.abs(), laid.k.abs()) * abs(features.scale)
    plain = torch.einsum("nhd,lhd->nhl", laid.q, laid.k).abs() * abs(features.scale)
    if features.softcap:
        plain = torch.minimum(plain, torch.full_like(plain, features.softcap))
    if features.alibi is not None:
        bias = features.alibi.double()[:, None] * laid.distance[:, None, :].double()
        plain = plain + bias.abs()
    plain = plain * laid.visible[:, None, :]
    largest = plain.amax(2, keepdim=True) if plain.shape[2] else plain.sum(2, keepdim=True)
    if features.sinks is not None:
        largest = torch.maximum(largest, features.sinks.double().abs()[None, :, None])
    return E32 * (
        math.sqrt(laid.q.shape[2]) * products + 4 * (plain + largest) + 4 * features.softcap
    )


def _peak(p: torch.Tensor) -> torch.Tensor:
    return p.amax(2, keepdim=True) if p.shape[2] else p.sum(2, keepdim=True)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse.isinf(), 0.0, lse)


@dataclass(frozen=True)
class Tightness:
    """The largest error as a share of its bound, for ``out`` and for ``lse``."""

    out: float
    lse: float


def hold_to_bound(problem: Problem, result: Attention) -> Tightness:
    """Compare ``result`` with the float64 reference; at most ``SLACK`` times the bound is allowed.

    Raises:
        OutOfBound: it is more, with the worst element, its sequence and both values.
    """
    exact, allowed = exact_and_bound(problem)
    return Tightness(
        _share(problem, "out", result.out, exact.out, allowed.out),
        _share(problem, "lse", result.lse, exact.lse, allowed.lse),
    )


def _share(
    problem: Problem, name: str, got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor
) -> float:
    if got.numel() == 0:
        return 0.0
    got = got.double()
    error = torch.where(got == exact, 0.0, (got - exact).abs())
    share = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=math.inf)
    worst = int(share.argmax())
    largest = float(share.reshape(-1)[worst])
    if largest > SLACK:
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
        raise OutOfBound(
            f"{name}{index} of sequence {sequence_of(problem, index[0])} is "
            f"{float(got.reshape(-1)[worst]):.9g}, exactly {float(exact.reshape(-1)[worst]):.9g}: "
            f"off by {largest:.3g} times the bound {float(allowed.reshape(-1)[worst]):.3g} "
            f"({SLACK:g} times is allowed)"
        )
    return largest


def sequence_of(problem: Problem, token: int) -> int:
    """The sequence whose query ``token`` is."""
    return int((problem.query_starts <= token).sum()) - 1


def hold_to_flash_rule(problem: Problem, result: Attention) -> float:
    """Flash-attention's own rule: err at most twice as much as plain PyTorch in the same dtype.

    |out - exact| <= 2·max|plain - exact| + 2·max|exact + 0.3 - 0.3 - exact|, the last term rounded
    in the query's dtype, so that a lucky PyTorch does not make it impossible.  In float32 that term
    is nearly nothing, and luck is in the order in which a machine's library sums: so plain PyTorch
    errs as much as in the worst of ``ORDERS``.  Coarser than the bound, since one number serves all
    elements.  Returns the error as a share of what is allowed.

    Raises:
        OutOfBound: the error is more.
    """
    exact = dense(problem).out
    if exact.numel() == 0:
        return 0.0
    rounded = exact.to(problem.q.dtype)
    unlucky = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
    plain = [(same_dtype(problem, order).double() - exact).abs().max() for order in ORDERS]
    allowed = 2 * torch.stack(plain).max() + 2 * unlucky
    error = (result.out.double() - exact).abs().max()
    if not error <= allowed:
        raise OutOfBound(
            f"out is off by {float(error):.3g}; twice the error of plain PyTorch in "
            f"{problem.q.dtype} is {float(allowed):.3g}"
        )
    return float(error / allowed) if allowed > 0 else 0.0
