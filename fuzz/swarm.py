"""The seeded generator: swarm draws of configurations and operation lists.

Each run draws its own world: which features are on, how often each operation comes, a tiny pool,
which arguments it is fond of, how long it goes on.  Runs that lack most features reach states
that uniform mixtures never do (swarm testing; Groce et al., ISSTA 2012; measured for caches in
the project's feasibility study).  Operations are drawn without looking at the state: they name
their targets modulo the candidates, so every list makes sense, and shrinking cannot break one.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from msgspec import Struct

from kvproof.fuzz.host_swarm import HOST_SHARE, draw_host
from kvproof.fuzz.identity_swarm import with_adapters, with_media
from kvproof.fuzz.pressure_swarm import PRESSURE_SHARE, draw_pressure, with_resets
from kvproof.fuzz.sample_swarm import SAMPLES_SHARE, draw_samples
from kvproof.fuzz.scheduler_swarm import (
    draw_configuration,
    draw_features,
    draw_operations,
    under_pressure,
)
from kvproof.fuzz.tier_swarm import (
    TIER_FEATURES,
    TIERS_SHARE,
    Draws,
    TierArguments,
    draw_tiers,
    draw_weights,
    with_tier_features,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration

_CACHE_FEATURES = (
    "salt",
    "adapter",
    "media",
    "chunks",
    "tails",
    "long",
    "narrow",
    "slots",
    "swaps",
)
FEATURES = (*_CACHE_FEATURES, *TIER_FEATURES)
"""What a run may have on beside its operations: prompts under salts, adapters, with media; steps
with budgets; prompts with diverging tails; prompts near the pool's size; few running requests;
blocks for part of a prompt or in advance, and steps over chosen requests; swap space; and what
a memory hierarchy may have."""
_OPTIONAL = frozenset(("slots", "swaps"))
"""Features of which the subject must be capable (see ``Semantics.features``)."""

_WEIGHTS = (0, 1, 1, 3, 9)
_ESSENTIAL = ("admit", "grow", "launch", "retire")
_BASE_WEIGHTS = {
    "admit": 1.5,
    "grow": 4.0,
    "decode": 1.0,
    "reserve": 0.4,
    "finish": 0.8,
    "abort": 0.3,
    "fork": 0.5,
    "evict": 0.3,
    "reset": 0.1,
    "preempt": 0.4,
    "resume": 0.5,
    "launch": 1.0,
    "retire": 1.0,
}
"""Decoding is most of what a cache does; each run bends these by its own factors."""
_FOLLOWED_BY = {
    **dict.fromkeys(("admit", "grow", "decode", "fork", "resume"), "launch"),
    "launch": "retire",
}
"""What is apt to come next: new tokens are computed, and what was computed is told of."""
_FOLLOWS = (0.0, 0.3, 0.6, 0.9)
_OF_A_REQUEST = frozenset(("grow", "decode", "reserve", "fork", "preempt", "finish", "abort"))
_CROWD = 4
"""So many requests are enough to be sure, when some of them have ended, that others run."""
_LENGTHS = (60, 120, 240)


class Draw(Struct, frozen=True):
    """One drawn run."""

    seed: str
    configuration: Configuration
    features: tuple[str, ...]
    operations: list[AnyOperation]


def _draw_scheduling(
    seed: str, rng: Random, capabilities: frozenset[str]
) -> tuple[Configuration, tuple[str, ...], list[AnyOperation]]:
    """A run of a scheduler: narrow or broad."""
    pressure = Random(f"{seed}: pressure")
    if pressure.random() < PRESSURE_SHARE:
        narrow = draw_pressure(pressure)
        return under_pressure(pressure, *narrow) if "wait" in capabilities else narrow
    features = draw_features(rng)
    configuration = draw_configuration(rng, features)
    return configuration, features, draw_operations(rng, configuration, features)


def draw_run(seed: str, capabilities: frozenset[str], *, tiers_share: float = TIERS_SHARE) -> Draw:
    """The run number ``seed``: the same on every machine.

    ``capabilities``: of the subject, and the names of its features.  Of runs of a subject that is
    capable of them, ``tiers_share`` have tiers, or all if it is nothing without; the others are the
    same whether it is or not.  Half of the former are narrow ones.
    Half of the runs of a scheduler are under pressure.
    """
    rng, tiers_rng = Random(seed), Random(f"{seed}: tiers")
    if "samples" in capabilities:
        samples = Random(f"{seed}: samples")
        if samples.random() < SAMPLES_SHARE:
            return Draw(seed, *draw_samples(samples))
    if "needs-host" in capabilities:
        host = Random(f"{seed}: host")
        if host.random() < HOST_SHARE:
            return Draw(seed, *draw_host(host))
    if "arrive" in capabilities:
        configuration, features, operations = _draw_scheduling(seed, rng, capabilities)
        if "reset" in capabilities:
            operations = with_resets(Random(f"{seed}: resets"), operations)
        if "adapters" in capabilities:
            operations = with_adapters(Random(f"{seed}: adapters"), operations)
        if "arriving-media" in capabilities:
            operations = with_media(Random(f"{seed}: media"), operations)
        return Draw(seed, configuration, features, operations)
    features = tuple(
        name
        for name in _CACHE_FEATURES
        if rng.random() < 0.4 and (name not in _OPTIONAL or name in capabilities)
    )
    configuration = _draw_configuration(rng, features)
    weights = {
        kind: _BASE_WEIGHTS[kind] * (rng.choice(_WEIGHTS) or (kind in _ESSENTIAL))
        for kind in _BASE_WEIGHTS
        if kind in capabilities
    }
    tiered = "needs-host" in capabilities or (
        "tiers" in capabilities and tiers_rng.random() < tiers_share
    )
    if tiered:
        features = with_tier_features(tiers_rng, features, capabilities)
        configuration = draw_tiers(tiers_rng, configuration, features)
    plain = _Arguments(rng, configuration, features).draws
    length = rng.choice(_LENGTHS)
    if tiered:
        weights = draw_weights(tiers_rng, capabilities, features)
        operations = TierArguments(tiers_rng, configuration, features, plain).run(weights, length)
    else:
        operations = [plain[kind]() for kind in _draw_kinds(rng, weights, length)]
    return Draw(seed, configuration, features, operations)


def _draw_kinds(rng: Random, weights: Mapping[str, float], count: int) -> list[str]:
    """So many kinds of operations, mostly such as have something to do.

    How many requests run, nobody knows here: admissions may be refused.  An estimate is enough to
    replace what would hardly find a request by an admission.
    """
    follows, running, preempted = rng.choice(_FOLLOWS), 0, 0
    kinds: list[str] = []
    for kind in rng.choices(list(weights), list(weights.values()), k=count):
        if running == 0 and kind in _OF_A_REQUEST:
            kind = "admit"
        elif preempted == 0 and kind == "resume":
            kind = "preempt" if running and "preempt" in weights else "admit"
        if kind in ("admit", "resume"):
            running = min(running + 1, _CROWD)
            preempted -= kind == "resume"
        elif kind in ("finish", "abort", "preempt"):
            running -= 1
            preempted += kind == "preempt"
        kinds.append(kind)
        while rng.random() < follows and _FOLLOWED_BY.get(kind) in weights:
            kind = _FOLLOWED_BY[kind]
            kinds.append(kind)
        if len(kinds) >= count:
            break
    return kinds[:count]


def _draw_configuration(rng: Random, features: tuple[str, ...]) -> Configuration:
    return Configuration(
        blocks=rng.randint(4, 16) if rng.random() < 0.8 else rng.randint(6, 33),
        block_size=rng.choice((1, 2, 3, 4, 4, 5, 8, 16)),
        requests=rng.randint(1, 4) if "narrow" in features else 64,
        run_ahead=rng.choice((1, 2, 2, 3)),
        host_blocks=rng.choice((1, 3, 8, 33)) if "swaps" in features else 0,
    )


class _Arguments:
    """Draws the arguments of operations, with this run's fondnesses."""

    def __init__(
        self, rng: Random, configuration: Configuration, features: tuple[str, ...]
    ) -> None:
        self._rng = rng
        self._size = configuration.block_size
        self._blocks = configuration.blocks
        self._features = frozenset(features)
        self._swaps = "swaps" in features or ("tiers" in features and configuration.suspends)
        self._hot = rng.choice((0.0, 0.5, 0.9))
        self._hot_request = rng.randrange(4)
        self._steady_tokens = rng.choice((0, 1, 1, self._size))
        self._choices = rng.choice((1, 2, 4))
        self._stems = rng.choice((1, 1, 2, 3))
        self._places = [
            (rng.randrange(self._size * 2), 1 + rng.randrange(self._size * 2)) for _ in "ab"
        ]
        """Where media begin in prompts, and how long they are: few places, so that they meet."""
        self._rows = max(1, self._blocks // rng.choice((2, 4, 8, 16)))
        if "tiers" in features:  # a single block is never found, and many do not fit the host
            self._rows = min(max(self._rows, 3), 5)
        self.draws: Draws = {
            "admit": self._admit,
            "grow": self._grow,
            "decode": self._decode,
            "reserve": lambda: Reserve(self._request(), self._length()),
            "finish": lambda: Finish(self._request()),
            "abort": lambda: Abort(self._request()),
            "fork": lambda: Fork(self._request(), 1 if rng.random() < 0.7 else 2),
            "evict": lambda: Evict(rng.choice((1, 1, 2, self._blocks))),
            "reset": Reset,
            "preempt": lambda: Preempt(self._request(), self._swap()),
            "resume": lambda: Resume(self._request(), self._slots()),
            "launch": self._launch,
            "retire": Retire,
        }

    def _request(self) -> int:
        if self._rng.random() < self._hot:
            return self._hot_request
        return int(self._rng.random() * 8)

    def _admit(self) -> Admit:
        rng = self._rng
        stem = Segment(int(rng.random() * self._stems), self._length())
        prompt: tuple[Segment, ...] = (stem,)
        if "tails" in self._features and rng.random() < 0.5:
            prompt = (stem, Segment(10 + int(rng.random() * 2), 1 + int(rng.random() * 6)))
        return Admit(
            prompt,
            salt=int(rng.random() * 3) if "salt" in self._features else 0,
            adapter=int(rng.random() * 3) if "adapter" in self._features else 0,
            media=self._media(stem.length) if "media" in self._features else (),
            slots=self._slots(),
        )

    def _slots(self) -> int:
        """None of one's own for two admissions in three, even where there may be."""
        return self._length() if "slots" in self._features and self._rng.random() < 0.3 else 0

    def _swap(self) -> bool:
        return self._swaps and self._rng.random() < 0.6

    def _length(self) -> int:
        """Around the edges of blocks, where the arithmetic is: k·B - 1, k·B, k·B + 1."""
        rng = self._rng
        rows = self._rows
        if "long" in self._features and rng.random() < 0.2:
            rows = self._blocks + 1
        edge = (1 + int(rng.random() * rows)) * self._size
        return max(1, edge + rng.choice((-1, 0, 0, 1, 1)))

    def _media(self, length: int) -> tuple[Media, ...]:
        rng = self._rng
        if rng.random() < 0.3:
            return ()
        start, shown = rng.choice(self._places)
        item = rng.choice((1, 2, 1 + (1 << 16)))  # two that agree in their low bits (bug B47)
        return (Media(item, start % length, shown),)

    def _grow(self) -> Grow:
        rng = self._rng
        tokens = self._steady_tokens or 1 + int(rng.random() * (self._size + 1))
        return Grow(self._request(), tokens, int(rng.random() * self._choices))

    def _decode(self) -> Decode:
        rng = self._rng
        if rng.random() < 0.5:
            return Decode(tuple(range(4)), int(rng.random() * self._choices))
        requests = [self._request() for _ in range(1 + int(rng.random() * 3))]
        return Decode(tuple(requests), int(rng.random() * self._choices))

    def _launch(self) -> Launch:
        if "slots" in self._features and self._rng.random() < 0.4:
            count = 1 + int(self._rng.random() * 3)
            return Launch(items=tuple([(self._request(), self._length()) for _ in range(count)]))
        if "chunks" in self._features and self._rng.random() < 0.6:
            return Launch(1 + int(self._rng.random() * (2 * self._size + 2)))
        return Launch()
