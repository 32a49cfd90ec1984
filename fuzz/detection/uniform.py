"""The uniform random driver: what random testing is without any thought.

One small world for all runs, every kind of operation equally often, every argument drawn evenly
from a small range.  It is there to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from msgspec import Struct, inspect

from kvproof.invariants.operations import (
    OPERATION_TYPES,
    AnyOperation,
    Media,
    Segment,
)
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

WORLD = Configuration(
    blocks=16,
    block_size=4,
    host_blocks=8,
    disk_blocks=4,
    offload="both",
    scheduling=Limits(token_budget=16, max_model_tokens=96),
)
"""With all there is, so that no fault is out of reach."""
LENGTH = 50
"""Operations of a run, as many as Hypothesis makes by default."""
_TOKENS = WORLD.blocks * WORLD.block_size // 2
_RANGES: dict[str, tuple[int, int]] = {
    "request": (0, 7),
    "tokens": (1, WORLD.block_size + 1),
    "choice": (0, 1),
    "slots": (1, _TOKENS),
    "samples": (1, 2),
    "budget": (0, _TOKENS),
    "transfer": (0, 3),
    "first": (0, 3),
    "blocks": (1, WORLD.blocks),
    "parts": (1, 2),
    "block": (0, 3),
    "byte": (0, 127),
    "stage": (0, 4),
    "factor": (1, 10),
    "salt": (0, 1),
    "adapter": (0, 1),
    "source": (0, 2),
    "length": (1, _TOKENS),
    "item": (0, 2),
    "start": (0, _TOKENS),
    "output": (1, _TOKENS),
    "max_tokens": (0, _TOKENS),
    "priority": (0, 2),
    "at_ns": (0, 0),
    "iterations": (1, 4),
    "ns": (0, 50_000_000),
}
"""The least and the most of each number, by its name."""


def draw_uniform(seed: str, capabilities: frozenset[str]) -> list[AnyOperation]:
    """The operations of run number ``seed``, of the kinds that the subject is capable of."""
    rng = Random(seed)
    kinds = [kind for kind in OPERATION_TYPES if kind.__name__.lower() in capabilities]
    return [_draw(rng, kind) for kind in rng.choices(kinds, k=LENGTH)]


def _draw(rng: Random, kind: type[Struct]) -> Any:
    return kind(**{name: draw(rng) for name, draw in _fields(kind).items()})


@cache
def _fields(kind: type[Struct]) -> dict[str, Callable[[Random], Any]]:
    """How each field of an operation, a segment or a media item is drawn."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return {field.name: _drawing(field.name, field.type) for field in described.fields}


def _drawing(name: str, described: inspect.Type) -> Callable[[Random], Any]:
    if isinstance(described, inspect.BoolType):
        return lambda rng: rng.random() < 0.5
    if isinstance(described, inspect.LiteralType):
        return lambda rng: rng.choice(described.values)
    if name == "prompt":
        return lambda rng: tuple(_draw(rng, Segment) for _ in range(rng.randint(1, 2)))
    if name == "media":
        return lambda rng: tuple(_draw(rng, Media) for _ in range(rng.randint(0, 1)))
    if name == "requests":
        return lambda rng: tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 4)))
    if name == "items":
        return lambda rng: tuple(
            (rng.randint(0, 7), rng.randint(1, _TOKENS)) for _ in range(rng.randint(0, 2))
        )
    least, most = _RANGES[name]
    return lambda rng: rng.randint(least, most)
