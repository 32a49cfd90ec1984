"""The pieces that all attention kernels share: scores, and the softmax that runs along the keys.

Scores are kept in base 2 (times log2 e), so that ``exp2`` serves for the exponential.
"""

# Annotations stay objects in modules with kernels: Triton's interpreter reads `tl.constexpr` there.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Hyperbolic tangent; the interpreter has no ``libdevice``."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """From q·k to base-2 scores: scaled, then capped; not yet biased nor masked.

    ``scale`` is ``Features.factor``, times the scale of K if there is one.
    """
    if HAS_SOFTCAP:
        return tanh(products * scale) * (softcap * LOG2E)
    return products * scale


@triton.jit
def advance(s, m, mass):
    """One tile of the running softmax.

    ``s`` ``[rows, keys]`` are masked base-2 scores, ``m`` and ``mass`` ``[rows]`` the maximum and
    the sum so far.  Returns the tile's weights relative to the new maximum, the factor for what was
    accumulated, and the new ``m`` and ``mass``.  A row that has seen no key yet has ``m`` = -inf:
    subtracting that from itself would give NaN (vllm issue 39148).
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, m_new, mass * alpha + tl.sum(p, 1)


@triton.jit
def normalised(acc, m, mass):
    """Output rows and their base-2 log-sum-exp; zeros and -inf where there was no key."""
    total = tl.where(mass > 0, mass, 1.0)
    return acc / total[:, None], tl.where(mass > 0, m + tl.log2(total), float("-inf"))
