"""Profiles: how much is tried, from which seed.  To import this registers them with Hypothesis.

Each is a budget of whole checks (``kvproof_check`` of the pytest plugin), and settings of
Hypothesis, named ``kvproof-NAME``, for machines that pytest collects.  They have that prefix since
Hypothesis has a ``ci`` of its own, and many projects have a ``dev``.  None is loaded here.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import settings
from msgspec import Struct

Unknown = Literal["skip", "fail"]
"""What becomes of a test whose check says neither pass nor fail."""

PREFIX = "kvproof-"


class Profile(Struct, frozen=True):
    """A budget of time or of runs."""

    seconds: float | None
    """Of each check …"""
    runs: int | None
    """… or runs of its seeded loop, to each ten of which there is one of the Hypothesis machine:
    the same ones on every computer, whatever its speed."""
    seed: str | None
    """None: a new one for each check."""
    unknown: Unknown
    examples: int
    """Of a Hypothesis machine that pytest collects …"""
    steps: int
    """… and its steps per example."""


PROFILES: dict[str, Profile] = {
    "dev": Profile(5.0, None, None, "skip", examples=50, steps=50),
    "ci": Profile(None, 1000, "0", "fail", examples=200, steps=50),
    "thorough": Profile(600.0, None, None, "fail", examples=5000, steps=100),
}

for name, profile in PROFILES.items():
    settings.register_profile(
        PREFIX + name,
        max_examples=profile.examples,
        stateful_step_count=profile.steps,
        derandomize=profile.seed is not None,
    )


def at_scale(base: settings, *, examples: int, steps: int) -> settings:
    """``base``, with so many examples and steps where no profile is loaded.

    Where one is, there are as many times more (or less) as it has more than Hypothesis' default.
    """
    usual, loaded = settings.get_profile("default"), settings.default
    assert loaded is not None
    return settings(
        base,
        max_examples=max(1, examples * loaded.max_examples // usual.max_examples),
        stateful_step_count=max(1, steps * loaded.stateful_step_count // usual.stateful_step_count),
    )
