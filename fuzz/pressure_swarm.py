"""Narrow draws for schedulers: a tiny pool under steady pressure.

The broad draws of :mod:`kvproof.fuzz.scheduler_swarm` reach every situation, but rarely the one
in which a long prompt is half computed, others have taken the blocks that it still needs, and
somebody more urgent asks for one more.  Here nearly every iteration is near it: arrivals come one
by one between iterations, one prompt in three is half as long as the pool or longer and not
urgent, and budgets are a few blocks.
"""

from __future__ import annotations

from random import Random

from kvproof.invariants.operations import Abort, AnyOperation, Arrive, Reset, Run, Segment
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

PRESSURE_SHARE = 0.5
"""Of the runs of a scheduler."""
RESETS_SHARE = 0.2
"""Of the runs of one that can reset its prefix cache."""
_FEATURES = ("pressure", "priorities", "long")


def draw_pressure(rng: Random) -> tuple[Configuration, tuple[str, ...], list[AnyOperation]]:
    """Configuration, features and operations of one run; draining it comes on top."""
    size, blocks = rng.choice((2, 4, 4)), rng.randint(5, 14)
    configuration = Configuration(
        blocks=blocks,
        block_size=size,
        run_ahead=2,  # where the scheduler schedules ahead
        scheduling=Limits(token_budget=rng.choice((3, 4, 6, 8)) * size),
    )
    aborts = rng.choice((0.0, 0.0, 0.1))
    operations: list[AnyOperation] = []
    for _ in range(rng.choice((6, 10, 16))):
        operations.append(_arrive(rng, configuration))
        operations.append(Run(1 + int(rng.random() * 3)))
        if rng.random() < aborts:
            operations.append(Abort(int(rng.random() * 4)))
    return configuration, _FEATURES, operations


def _arrive(rng: Random, configuration: Configuration) -> Arrive:
    size, blocks = configuration.block_size, configuration.blocks
    long = rng.random() < 0.35
    rows = blocks // 2 + int(rng.random() * blocks) // 2 if long else 1 + int(rng.random() * 2)
    length = max(1, rows * size + rng.choice((-1, 0, 0, 1)))
    return Arrive(
        (Segment(int(rng.random() * 6), length),),
        output=1 + int(rng.random() * 3 * size),
        priority=int(rng.random() * 3) + 2 * long,
    )


def with_resets(rng: Random, operations: list[AnyOperation]) -> list[AnyOperation]:
    """The same run, with resets of the prefix cache in between, now and then."""
    if rng.random() >= RESETS_SHARE:
        return operations
    mixed: list[AnyOperation] = []
    for operation in operations:
        mixed.append(operation)
        if rng.random() < 0.1:
            mixed.append(Reset(running=rng.random() < 0.7))
    return mixed
