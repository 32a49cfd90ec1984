"""Narrow draws for what lies on the host below a device: a handful of slots, always wanted.

The broad draws of :mod:`kvproof.fuzz.tier_swarm` seldom have a copy upwards under way just when a
copy downwards has to evict.  Here a few short prompts are computed, stored, lost on the device and
asked for again, each in one go, and copies end late and in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Complete,
    Evict,
    Fail,
    Finish,
    Land,
    Launch,
    Offload,
    Promote,
    Reset,
    Retire,
    Segment,
    Withhold,
)
from kvproof.invariants.subject import Configuration

HOST_SHARE = 0.5
"""Of the runs of a subject that is nothing without a host."""
_FEATURES = ("tiers", "pressure")
_NEWEST = 839
"""Modulo any number of candidates up to eight, the last of them."""
_WEIGHTS = {
    "compute": 2.0,
    "store": 3.0,
    "offload": 3.0,
    "complete": 1.5,
    "promote": 4.0,
    "look": 1.0,
    "fail": 0.5,
    "land": 0.3,
    "evict": 0.5,
    "reset": 0.2,
    "withhold": 0.2,
}
_FACTORS = (0.3, 1, 1, 2)


def draw_host(rng: Random) -> tuple[Configuration, tuple[str, ...], list[AnyOperation]]:
    """Configuration, features and operations of one run; draining it comes on top."""
    order: Literal["lru", "arc"] = rng.choice(("lru", "arc"))
    configuration = Configuration(
        blocks=rng.randint(8, 16),
        block_size=rng.choice((1, 2)),
        host_blocks=rng.randint(2, 6),
        offload="prefix",
        host_eviction=order,
    )
    names = list(_WEIGHTS)
    weights = [weight * rng.choice(_FACTORS) for weight in _WEIGHTS.values()]
    sources, operations = rng.choice((1, 2, 4)), list[AnyOperation]()
    for name in rng.choices(names, weights, k=rng.choice((15, 30, 60))):
        rows = 1 + int(rng.random() * 3)
        prompt = (Segment(int(rng.random() * sources), rows * configuration.block_size + 1),)
        operations += _step(rng, name, prompt)
    return configuration, _FEATURES, operations


def _step(rng: Random, name: str, prompt: tuple[Segment, ...]) -> Sequence[AnyOperation]:
    transfer = int(rng.random() * 4)
    match name:
        case "compute":
            return Admit(prompt), Launch(), Retire(), Finish(_NEWEST)
        case "offload":
            return (Offload(first=int(rng.random() * 3), blocks=rng.choice((0, 1, 1, 2))),)
        case "complete":
            return (Complete(transfer),)
        case "store":
            done = (Complete(_NEWEST),) if rng.random() < 0.7 else ()
            return Admit(prompt), Launch(), Retire(), Finish(_NEWEST), Offload(), *done
        case "promote":
            return Evict(_NEWEST), Promote(prompt, blocks=rng.choice((0, 0, 1)))
        case "look":
            return Admit(prompt, wait=rng.random() < 0.3), Abort(_NEWEST)
        case "fail":
            return (Fail(transfer),)
        case "land":
            return (Land(transfer),)
        case "evict":
            return (Evict(rng.choice((1, 2)), "host"),)
        case "reset":
            return (Reset(),)
        case _:
            return (Withhold("host", rng.choice((0, 0, 1, _NEWEST))),)
