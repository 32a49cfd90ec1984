"""What the requests of a drawn run carry beside their prompts, put there afterwards.

The run is the same but for that, so that a subject which offers more is drawn no other runs.
"""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from kvproof.invariants.operations import AnyOperation, Arrive, Media
from kvproof.invariants.prompts import prompt_length

ADAPTERS_SHARE = 0.3
MEDIA_SHARE = 0.8


def with_adapters(rng: Random, operations: list[AnyOperation]) -> list[AnyOperation]:
    """Now and then, each request is for one of two adapters, or for none."""
    if rng.random() >= ADAPTERS_SHARE:
        return operations
    return [
        replace(operation, adapter=int(rng.random() * 3))
        if isinstance(operation, Arrive)
        else operation
        for operation in operations
    ]


def with_media(rng: Random, operations: list[AnyOperation]) -> list[AnyOperation]:
    """Mostly, each request shows up to two items of a few, in places where others do, too."""
    if rng.random() >= MEDIA_SHARE:
        return operations
    places = [(int(rng.random() * 12), 1 + int(rng.random() * 9)) for _ in range(2)]
    items = rng.choice((2, 3, 5))
    return [
        replace(operation, media=_shown(rng, operation, places, items))
        if isinstance(operation, Arrive)
        else operation
        for operation in operations
    ]


def _shown(
    rng: Random, operation: Arrive, places: list[tuple[int, int]], items: int
) -> tuple[Media, ...]:
    """One behind the other, as far as the prompt goes."""
    end, shown = 0, []
    for start, length in places:
        start += end
        if rng.random() < 0.7 and start < prompt_length(operation.prompt):
            shown.append(Media(1 + int(rng.random() * items), start, length))
            end = start + length
    return tuple(shown)
