"""Swarm draws of runs of a scheduler: arrivals, iterations, aborts.

As :mod:`kvproof.fuzz.swarm`, one floor above: pools so small that two or three requests fill
them, budgets of a few tokens, prompts around the edges of blocks, outputs that cross them.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec.structs import replace

from kvproof.invariants.operations import (
    Abort,
    AnyOperation,
    Arrive,
    Retire,
    Run,
    Schedule,
    Segment,
    Wait,
)
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

SCHEDULER_FEATURES = (
    "salt",
    "tails",
    "long",
    "narrow",
    "priorities",
    "early-stops",
    "small-budget",
    "whole-prefill",
    "watermark",
    "swaps",
    "tiers",
    "disk",
)
"""What a run may have on: prompts under salts, with diverging tails, as long as the pool allows;
few running requests; priorities; requests that stop before their longest output; budgets of a few
tokens; no chunked prefill; a watermark; swap space; completed blocks copied to the host, and from
there (``disk``, with ``tiers``) to the disk."""

_BELOW = ("swaps", "tiers", "disk")
_WEIGHTS = {"arrive": 2.0, "schedule": 2.0, "retire": 2.0, "run": 1.0, "abort": 0.3}
_WAIT_WEIGHT = 0.5
"""Only where there is something to wait for."""
_WAITS_NS = (0, 10_000, 1_000_000, 50_000_000)
_TOKEN_BYTES = (131_072, 1 << 23, 1 << 26)
"""KV bytes a token, so that copies end within an iteration, or take several."""
_FACTORS = (0, 1, 1, 3)
_LENGTHS = (10, 20, 50, 100)


def draw_features(rng: Random) -> tuple[str, ...]:
    return tuple(name for name in SCHEDULER_FEATURES if rng.random() < 0.4)


def draw_configuration(rng: Random, features: tuple[str, ...]) -> Configuration:
    """A pool for a few requests, and limits that bind."""
    block_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 16))
    blocks = rng.randint(6, 33) if rng.random() < 0.7 else rng.randint(4, 10)
    pool = blocks * block_size
    whole = "whole-prefill" in features
    budget = 8192
    if "small-budget" in features and not whole:
        budget = rng.choice((1, 2, block_size, block_size + 1, 3 * block_size))
    return Configuration(
        blocks=blocks,
        block_size=block_size,
        requests=rng.randint(1, 4) if "narrow" in features else 64,
        run_ahead=rng.choice((1, 1, 2, 2, 3)),
        **_tiers(rng, features),
        scheduling=Limits(
            token_budget=pool if whole else budget,
            watermark_blocks=rng.randint(1, 2) if "watermark" in features else 0,
            max_model_tokens=pool if whole else rng.choice((pool, pool // 2, pool // 3, 1 << 22)),
            chunked_prefill=not whole,
        ),
    )


def _tiers(rng: Random, features: tuple[str, ...]) -> dict[str, Any]:
    """What lies below the device, and what it is for."""
    swaps, prefixes = "swaps" in features, "tiers" in features
    tiers: dict[str, Any] = {}
    if swaps or prefixes:
        tiers["host_blocks"] = rng.choice((1, 3, 8, 33))
    if prefixes:
        tiers["offload"] = "both" if swaps else "prefix"
        tiers["kv_bytes_per_token"] = rng.choice(_TOKEN_BYTES)
        if "disk" in features:
            tiers["disk_blocks"] = rng.choice((2, 8, 65))
    return tiers


def under_pressure(
    rng: Random,
    configuration: Configuration,
    features: tuple[str, ...],
    operations: list[AnyOperation],
) -> tuple[Configuration, tuple[str, ...], list[AnyOperation]]:
    """A narrow run (see :mod:`kvproof.fuzz.pressure_swarm`) of kvproof's own scheduler.

    In most of them something lies below, and steps are launched and retired one by one.
    """
    features += tuple([name for name in _BELOW if rng.random() < 0.4])
    tiers, run_ahead = _tiers(rng, features), rng.choice((1, 2, 2, 3))
    stepwise = rng.choice((0.0, 0.5, 1.0))
    stepped: list[AnyOperation] = []
    for operation in operations:
        if isinstance(operation, Run) and rng.random() < stepwise:
            stepped += rng.choices((Schedule(), Retire()), k=2 * operation.iterations)
        else:
            stepped.append(operation)
    return replace(configuration, run_ahead=run_ahead, **tiers), features, stepped


def draw_operations(
    rng: Random, configuration: Configuration, features: tuple[str, ...]
) -> list[AnyOperation]:
    """Operations of one run; draining it comes on top."""
    weights = {
        kind: weight * (rng.choice(_FACTORS) or (kind in ("arrive", "schedule", "retire")))
        for kind, weight in _WEIGHTS.items()
    }
    if "tiers" in features:
        weights["wait"] = _WAIT_WEIGHT
    arguments = _Arguments(rng, configuration, frozenset(features))
    kinds = rng.choices(list(weights), list(weights.values()), k=rng.choice(_LENGTHS))
    return [arguments.draw(kind) for kind in kinds]


class _Arguments:
    """Draws the arguments of operations, with this run's fondnesses."""

    def __init__(self, rng: Random, configuration: Configuration, features: frozenset[str]) -> None:
        self._rng = rng
        self._size = configuration.block_size
        self._blocks = configuration.blocks
        self._features = features
        self._stems = rng.choice((1, 1, 2, 4))
        self._rows = max(1, self._blocks // rng.choice((1, 2, 4, 8)))
        self._outputs = rng.choice((1, 3, self._size, 2 * self._size + 1, 4 * self._size + 1))

    def draw(self, kind: str) -> AnyOperation:
        rng = self._rng
        if kind == "arrive":
            return self._arrive()
        if kind == "run":
            return Run(1 + int(rng.random() * 4))
        if kind == "abort":
            return Abort(int(rng.random() * 8))
        if kind == "wait":
            return Wait(rng.choice(_WAITS_NS))
        return Schedule() if kind == "schedule" else Retire()

    def _arrive(self) -> Arrive:
        rng, features = self._rng, self._features
        stem = Segment(int(rng.random() * self._stems), self._length())
        prompt: tuple[Segment, ...] = (stem,)
        if "tails" in features and rng.random() < 0.5:
            prompt = (stem, Segment(10 + int(rng.random() * 2), 1 + int(rng.random() * 6)))
        output = 1 + int(rng.random() * self._outputs)
        early = "early-stops" in features and rng.random() < 0.5
        return Arrive(
            prompt,
            output=output,
            max_tokens=output + 1 + int(rng.random() * 2 * self._size) if early else 0,
            priority=int(rng.random() * 3) if "priorities" in features else 0,
            **self._identity(),
        )

    def _identity(self) -> dict[str, Any]:
        """A salt and an adapter, which keep equal prompts apart."""
        drawn = int(self._rng.random() * 4) if "salt" in self._features else 0
        return {"salt": drawn >> 1, "adapter": drawn & 1}

    def _length(self) -> int:
        """Around the edges of blocks, where the arithmetic is: k·B - 1, k·B, k·B + 1."""
        rng = self._rng
        rows = self._blocks if "long" in self._features and rng.random() < 0.3 else self._rows
        edge = (1 + int(rng.random() * rows)) * self._size
        return max(1, edge + rng.choice((-1, 0, 0, 1, 1)))
