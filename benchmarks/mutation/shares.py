"""What the scripts of this folder share: how well a share is known."""

from __future__ import annotations

from math import sqrt


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval)."""
    z, share = 1.96, successes / trials
    centre = share + z * z / (2 * trials)
    reach = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (centre - reach) / (1 + z * z / trials), (centre + reach) / (1 + z * z / trials)
