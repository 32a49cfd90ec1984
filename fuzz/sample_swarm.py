"""Narrow draws for schedulers of which a client may want several outputs of one prompt.

As :mod:`kvproof.fuzz.pressure_swarm`, with what else frees and takes blocks at a scheduler's back:
requests that are forked when their prompt is computed, and cancellations.  Prompts begin alike and
end around the edges of blocks, pools hold two or three of them, and half of the runs cancel one
request in three.
"""

from __future__ import annotations

from random import Random

from kvproof.invariants.operations import Abort, AnyOperation, Arrive, Run, Segment
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

SAMPLES_SHARE = 0.7
"""Of the runs of such a scheduler."""
_FEATURES = ("pressure", "samples")


def draw_samples(rng: Random) -> tuple[Configuration, tuple[str, ...], list[AnyOperation]]:
    """Configuration, features and operations of one run; draining it comes on top."""
    size, blocks = rng.choice((4, 4, 5)), rng.randint(3, 10)
    configuration = Configuration(
        blocks=blocks,
        block_size=size,
        requests=rng.choice((64, 64, 2)),
        run_ahead=1,
        scheduling=Limits(token_budget=rng.choice((2, 5, 8, 13, 16))),
    )
    forks, aborts = rng.choice((0.0, 0.3, 0.6)), rng.choice((0.0, 0.3))
    stems, longest = rng.choice((1, 1, 2, 3)), rng.choice((4, 9, 2 * blocks))
    operations: list[AnyOperation] = []
    for _ in range(rng.choice((4, 8, 16))):
        prompt = 1 + int(rng.random() * longest)
        operations.append(
            Arrive(
                (Segment(int(rng.random() * stems), prompt),),
                output=1 + int(rng.random() * 2.5 * size),
                samples=2 + int(rng.random() * 2) if rng.random() < forks else 1,
            )
        )
        if rng.random() < 0.7:
            operations.append(Run(1 + int(rng.random() * 4)))
        if rng.random() < aborts:
            operations.append(Abort(int(rng.random() * 6)))
    return configuration, _FEATURES, operations
