"""From small integers to operations: what the Hypothesis machine draws.

Draws are what a Hypothesis machine spends its time on, so a rule draws two or three small
integers, and plain functions decode them.  Fields are whole bits, the plainest in the lowest: 0
decodes to the simplest operation, and clearing high bits, as Hypothesis does when it shrinks,
takes away one complication after another.  No range is wider than 128, beyond which Hypothesis
weighs the bounds.

The draws follow the seeded generator's: tiny pools, lengths around the edges of blocks, few
prompts so that prefixes are hit, and features that are off in many runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Arrive,
    Cancel,
    Complete,
    Corrupt,
    Decode,
    DiskFile,
    Evict,
    Fail,
    Finish,
    Fork,
    Grow,
    Land,
    Launch,
    Media,
    Notify,
    Offload,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    Run,
    Schedule,
    Segment,
    Slow,
    Tier,
    Wait,
    Withhold,
)
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

FEATURES = ("tails", "chunks", "salt", "adapter", "media", "long", "narrow", "slots", "swaps")
"""What a run may have on: prompts with diverging tails; steps with budgets; prompts under salts,
adapters, with media; prompts near the pool's size; few running requests; blocks for part of a
prompt or in advance, and steps over chosen requests; swap space.  The names are those of the
seeded generator, so that a case reads the same from either driver."""
SCHEDULER_FEATURES = (
    "tails",
    "small-budget",
    "long",
    "narrow",
    "priorities",
    "early-stops",
    "whole-prefill",
    "watermark",
    "swaps",
    "salt",
)
"""The same for a scheduler."""
TIER_FEATURES = ("tiers", "disk", "arc", "late", "waits", "io-faults")
"""And for a memory hierarchy: tiers below the device; a disk; eviction by ARC; swaps that
stay in flight; admissions that wait for KV; faults of the disk, and blocks that somebody else
takes."""
OPTIONAL_FEATURES = frozenset(("slots", "swaps", "tiers"))
"""Those of which the subject must be capable (see ``Semantics.features``)."""

_BLOCK_SIZES = (1, 2, 3, 4, 5, 8, 12, 16)
_REQUESTS = 64
"""Limit of running requests where the run is not narrow: more than a small pool admits."""
_EDGES = (0, 1, -1, 1)
"""A prompt ends on the edge of a block, or a token off, where the arithmetic is."""
_STEMS = (0, 0, 1, 2)
_TAIL_SOURCE = 10
_TRIP_SOURCE = 3
"""Of prompts that nobody else has, so that they can be lost."""
_ITEMS = (1, 2, 1 + (1 << 16))
"""Media items, two of which agree in their low bits (bug B47)."""
_TIERS: tuple[Tier, ...] = ("device", "host", "disk")
_CAUSES: tuple[Literal["error", "timeout", "short_write", "disk_full"], ...] = (
    "error",
    "timeout",
    "short_write",
    "disk_full",
)
_FILES: tuple[DiskFile, ...] = ("data", "index")


class World(Struct, frozen=True):
    """What the decoding of a run's arguments depends on."""

    configuration: Configuration
    features: tuple[str, ...] = ()
    schedules: bool = False
    """Whether it is a scheduler that is driven."""

    @property
    def tiered(self) -> bool:
        """Whether there are tiers below the device."""
        return "tiers" in self.features


Arguments = Mapping[str, Any]
"""Strategies by the names of arguments.  (Not typed so: Hypothesis' decorators could not be given
them all at once.)"""

WORLD_ARGUMENTS: Arguments = {
    "blocks": st.integers(6, 33),
    "block_size": st.sampled_from(_BLOCK_SIZES),
    "run_ahead": st.integers(1, 3),
    "requests": st.integers(0, 3),
    "features": st.integers(0, (1 << max(len(FEATURES), len(SCHEDULER_FEATURES))) - 1),
    "tiers": st.integers(0, (1 << len(TIER_FEATURES)) - 1),
}
"""Strategies for the arguments of :func:`world`."""


def world(
    blocks: int,
    block_size: int,
    run_ahead: int,
    requests: int,
    features: int,
    tiers: int = 0,
    able: frozenset[str] = OPTIONAL_FEATURES,
) -> World:
    """The world of one run; a bit of ``features`` for each of ``FEATURES``, of ``tiers`` for each
    of ``TIER_FEATURES``, of which only the first makes the others count.

    ``able``: the features of the subject.
    """
    on = tuple(
        name
        for name in _of_bits(FEATURES, features)
        if name in able or name not in OPTIONAL_FEATURES
    )
    configuration = Configuration(
        blocks=blocks,
        block_size=block_size,
        requests=1 + requests if "narrow" in on else _REQUESTS,
        run_ahead=run_ahead,
        host_blocks=1 + blocks // 3 if "swaps" in on else 0,
    )
    return _tiered(World(configuration, on), tiers, able)


def _of_bits(names: tuple[str, ...], bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in enumerate(names) if bits >> bit & 1)


def _tiered(world: World, tiers: int, able: frozenset[str]) -> World:
    """The world with these tiers; slots are so few that copies evict each other."""
    on = _of_bits(TIER_FEATURES, tiers | ("needs-host" in able))
    if "tiers" not in on or "tiers" not in able:
        return world
    configuration, features = world.configuration, world.features + on
    eviction: Literal["lru", "arc"] = "arc" if "arc" in on else "lru"
    tiered = replace(
        configuration,
        offload="both" if world.schedules or "swaps" in features else "prefix",
        host_blocks=1 + configuration.blocks // 4,
        disk_blocks=1 + configuration.blocks // 8 if "disk" in on else 0,
        device_eviction=eviction,
        host_eviction=eviction,
        disk_eviction=eviction,
    )
    return replace(world, configuration=tiered, features=features)


def scheduler_world(
    blocks: int,
    block_size: int,
    run_ahead: int,
    requests: int,
    features: int,
    tiers: int = 0,
    able: frozenset[str] = OPTIONAL_FEATURES,
) -> World:
    """The world of one run of a scheduler; arguments as for :func:`world`."""
    on = _of_bits(SCHEDULER_FEATURES, features)
    pool, whole = blocks * block_size, "whole-prefill" in on
    small = "small-budget" in on and not whole
    configuration = Configuration(
        blocks=blocks,
        block_size=block_size,
        requests=1 + requests if "narrow" in on else _REQUESTS,
        run_ahead=run_ahead,
        host_blocks=1 + blocks // 3 if "swaps" in on else 0,
        scheduling=Limits(
            token_budget=pool if whole else block_size + requests if small else 8192,
            watermark_blocks=1 if "watermark" in on else 0,
            max_model_tokens=pool if whole else 1 << 22,
            chunked_prefill=not whole,
        ),
    )
    return _tiered(World(configuration, on, schedules=True), tiers, able)


def _admit(world: World, prompt: int, identity: int) -> Admit:
    """``prompt``: edge (2 bits), rows (3), stem (2).  ``identity``: tail (2 bits), salt or wait
    (2), adapter (1), media or else slots (2); each counts only where its feature is on."""
    features = world.features
    stem = Segment(_STEMS[prompt >> 5], _stem_length(world, prompt))
    if not identity or not features:
        return Admit((stem,))
    tail = identity & 3 if "tails" in features else 0
    media = identity >> 5 if "media" in features else 0
    return Admit(
        (stem, _tail(world, tail)) if tail else (stem,),
        salt=(identity >> 2 & 3) % 3 if "salt" in features else 0,
        adapter=identity >> 4 & 1 if "adapter" in features else 0,
        media=_media(world, prompt >> 5, media) if media else (),
        slots=0 if "media" in features else _slots(world, identity >> 5),
        wait="waits" in features and identity >> 2 & 3 == 3,
    )


def _slots(world: World, slots: int) -> int:
    """None of one's own; a token more than a block; half of the pool."""
    if not slots or "slots" not in world.features:
        return 0
    size = world.configuration.block_size
    return (size, size + 1, world.configuration.blocks // 2 * size)[slots - 1]


def _stem_length(world: World, prompt: int) -> int:
    blocks, size = world.configuration.blocks, world.configuration.block_size
    rows = prompt >> 2 & 7
    if rows >= 6 and "long" in world.features:
        rows += blocks - 6  # all of the pool, or a block more than there is
    else:
        rows = 1 + rows % (blocks // 2)
    return max(1, rows * size + _EDGES[prompt & 3])


def _tail(world: World, tail: int) -> Segment:
    """One token of either of two sources, or more than a block."""
    length = 1 if tail < 3 else world.configuration.block_size + 1
    return Segment(_TAIL_SOURCE + (tail & 1), length)


def _media(world: World, stem: int, media: int) -> tuple[Media, ...]:
    """At one place for each stem, at the start or across the edge of a block: items that are to
    be told apart must stand at the same tokens."""
    size = world.configuration.block_size
    return (Media(_ITEMS[media - 1], size - 1 if stem & 1 else 0, 1 + size),)


def _grow(world: World, request: int, growth: int) -> Grow:
    """``growth``: choice (1 bit), tokens (3)."""
    size = world.configuration.block_size
    tokens = (1, 1, 1, 2, 1, size, 1, size + 1)[growth >> 1]
    return Grow(request, tokens, growth & 1)


def _evict(world: World, blocks: int, tier: int) -> Evict:
    return Evict(
        (1, 2, 4, world.configuration.blocks)[blocks], _TIERS[tier] if world.tiered else "device"
    )


def _reset(world: World, running: int) -> Reset:
    """``running``: of a scheduler, whether its running requests are preempted first."""
    return Reset(running=world.schedules and running > 0)


def _reserve(world: World, request: int, slots: int) -> Reserve:
    """``slots``: edge (2 bits), rows (2)."""
    return Reserve(
        request, max(1, (1 + (slots >> 2)) * world.configuration.block_size + _EDGES[slots & 3])
    )


def _decode(world: World, first: int, more: int) -> Decode:
    """``more``: how many besides (2 bits), choice (1)."""
    return Decode(tuple(range(first, first + 1 + (more & 3))), more >> 2)


def _launch(world: World, budget: int) -> Launch:
    if "slots" in world.features and budget & 1:
        return Launch(items=((budget >> 1 & 3, 1 + (budget >> 3)), (budget >> 3, 1)))
    return Launch(budget if "chunks" in world.features else 0)


def _preempt(world: World, request: int, swap: int) -> Preempt:
    """``swap``: swapped out or not (1 bit), late (1)."""
    swaps = swap & 1 > 0 and "suspension" in world.configuration.meanings
    return Preempt(request, swaps, late=swaps and swap >> 1 > 0 and "late" in world.features)


def _resume(world: World, request: int, slots: int) -> Resume:
    """``slots``: as for ``_admit`` (2 bits), late (1)."""
    late = slots >> 2 > 0 and "late" in world.features
    return Resume(request, _slots(world, slots & 3), late)


def _lower(world: World, to: int) -> Literal["host", "disk"]:
    return "disk" if to and "disk" in world.features else "host"


def _offload(world: World, to: int, which: int) -> Offload:
    """``which``: how many blocks (2 bits), from the first of the queue on or the second (1)."""
    return Offload(_lower(world, to), first=which >> 2, blocks=(0, 1, 1, 2)[which & 3])


def _promote(world: World, prompt: int, identity: int, to: int) -> Promote:
    """``prompt`` and ``identity``: as for ``_admit``.  ``to``: host or device (1 bit), all or a
    single block (1)."""
    admit = _admit(world, prompt, identity)
    return Promote(
        admit.prompt,
        salt=admit.salt,
        adapter=admit.adapter,
        media=admit.media,
        to="host" if to & 1 and "disk" in world.features else "device",
        blocks=to >> 1,
    )


def _withhold(world: World, tier: int, blocks: int) -> Withhold:
    return Withhold(_TIERS[tier], (0, 1, 2, world.configuration.blocks)[blocks])


def _arrive(world: World, prompt: int, output: int, identity: int = 0) -> Arrive:
    """``prompt``: as for ``_admit``.  ``output``: tokens (3 bits), tail (2), priority (1), early
    stop (1).  ``identity``: salt (1), adapter (1)."""
    features, size = world.features, world.configuration.block_size
    stem = Segment(_STEMS[prompt >> 5], _stem_length(world, prompt))
    tail = output >> 3 & 3 if "tails" in features else 0
    tokens = (1, 2, size, size + 1, 3, 2 * size, 1, 2)[output & 7]
    return Arrive(
        (stem, _tail(world, tail)) if tail else (stem,),
        output=tokens,
        max_tokens=tokens + size if "early-stops" in features and output >> 6 else 0,
        priority=output >> 5 & 1 if "priorities" in features else 0,
        salt=identity & 1 if "salt" in features else 0,
        adapter=identity >> 1 if "salt" in features else 0,
    )


class Recipe(Struct, frozen=True):
    """How one kind of operation is drawn."""

    build: Callable[..., AnyOperation]
    """From the world and the arguments to the operation."""
    arguments: Arguments = {}
    needs: frozenset[str] = frozenset()
    """The features of the run without which it says nothing."""


_REQUEST = {"request": st.integers(0, 7)}
_PROMPT = {"prompt": st.integers(0, 127), "identity": st.integers(0, 127)}
_TRANSFER = {"transfer": st.integers(0, 3)}
_TIERED = frozenset(("tiers",))
_IO_FAULTS = frozenset(("tiers", "io-faults"))
_DISK_FAULTS = _IO_FAULTS | {"disk"}

RECIPES: Mapping[str, Recipe] = {
    "admit": Recipe(_admit, _PROMPT),
    "grow": Recipe(_grow, _REQUEST | {"growth": st.integers(0, 15)}),
    "decode": Recipe(_decode, {"first": st.integers(0, 3), "more": st.integers(0, 7)}),
    "reserve": Recipe(_reserve, _REQUEST | {"slots": st.integers(0, 15)}),
    "finish": Recipe(lambda world, request: Finish(request), _REQUEST),
    "abort": Recipe(lambda world, request: Abort(request), _REQUEST),
    "fork": Recipe(
        lambda world, request, more: Fork(request, 1 + more), _REQUEST | {"more": st.booleans()}
    ),
    "evict": Recipe(_evict, {"blocks": st.integers(0, 3), "tier": st.integers(0, 2)}),
    "reset": Recipe(_reset, {"running": st.integers(0, 2)}),
    "preempt": Recipe(_preempt, _REQUEST | {"swap": st.integers(0, 3)}),
    "resume": Recipe(_resume, _REQUEST | {"slots": st.integers(0, 7)}),
    "launch": Recipe(_launch, {"budget": st.integers(0, 31)}),
    "retire": Recipe(lambda world: Retire()),
    "offload": Recipe(
        _offload, {"to": st.integers(0, 1), "which": st.integers(0, 7)}, needs=_TIERED
    ),
    "promote": Recipe(_promote, _PROMPT | {"to": st.integers(0, 3)}, needs=_TIERED),
    "land": Recipe(
        lambda world, transfer, more: Land(transfer, 1 + more),
        _TRANSFER | {"more": st.integers(0, 1)},
        needs=_TIERED,
    ),
    "complete": Recipe(lambda world, transfer: Complete(transfer), _TRANSFER, needs=_TIERED),
    "fail": Recipe(
        lambda world, transfer, cause: Fail(transfer, _CAUSES[cause & 3], _FILES[cause >> 2]),
        _TRANSFER | {"cause": st.integers(0, 7)},
        needs=_TIERED,
    ),
    "cancel": Recipe(lambda world, transfer: Cancel(transfer), _TRANSFER, needs=_TIERED),
    "notify": Recipe(lambda world, transfer: Notify(transfer), _TRANSFER, needs=_TIERED),
    "withhold": Recipe(
        _withhold, {"tier": st.integers(0, 2), "blocks": st.integers(0, 3)}, needs=_IO_FAULTS
    ),
    "corrupt": Recipe(
        lambda world, block, byte: Corrupt(block & 3, byte, _FILES[block >> 2]),
        {"block": st.integers(0, 7), "byte": st.integers(0, 127)},
        needs=_DISK_FAULTS,
    ),
    "restart": Recipe(
        lambda world, transfer, stage: Restart(transfer, stage),
        _TRANSFER | {"stage": st.integers(0, 4)},
        needs=_DISK_FAULTS,
    ),
    "slow": Recipe(
        lambda world, slow: Slow(1 + slow), {"slow": st.integers(0, 1)}, needs=_DISK_FAULTS
    ),
    "arrive": Recipe(
        _arrive,
        {
            "prompt": st.integers(0, 127),
            "output": st.integers(0, 127),
            "identity": st.integers(0, 3),
        },
    ),
    "schedule": Recipe(lambda world: Schedule()),
    "run": Recipe(lambda world, more: Run(1 + more), {"more": st.integers(0, 3)}),
    "wait": Recipe(lambda world, time: Wait(10**time), {"time": st.integers(0, 7)}, needs=_TIERED),
}
"""Every kind of operation, by its name."""

_NEWEST = 839
"""Modulo any number of candidates up to eight, the last of them."""


def _round_trip(world: World) -> tuple[AnyOperation, ...]:
    """What takes a prompt's blocks down as far as there are tiers, and up again."""
    prompt = (Segment(_TRIP_SOURCE, 2 * world.configuration.block_size + 1),)
    saved: tuple[AnyOperation, ...] = ()
    fetched: tuple[AnyOperation, ...] = ()
    if "disk" in world.features:
        saved = (Offload("disk"), Complete(_NEWEST))
        fetched = (Evict(_NEWEST, "host"), Promote(prompt, to="host"), Complete(_NEWEST))
    down = (Admit(prompt), Launch(), Retire(), Offload(), Complete(_NEWEST), *saved)
    lost = (Finish(_NEWEST), Evict(_NEWEST), *fetched)
    return (*down, *lost, Promote(prompt), Complete(_NEWEST), Admit(prompt))


def _crash(world: World, cancelled: int, stage: int) -> tuple[AnyOperation, ...]:
    """The disk tier dies while it writes a copy, or when nobody wants that copy any more."""
    unwanted = (Cancel(_NEWEST),) if cancelled else ()
    return (*_round_trip(world)[:_SAVING], *unwanted, Restart(_NEWEST, stage))


_SAVING = 6
"""Operations of a round trip, up to the copy to the disk."""


FOLLOW_UPS = st.integers(0, 127)
"""Strategy for the argument of :func:`follow_up`."""


def follow_up(world: World, then: int) -> tuple[AnyOperation, ...]:
    """What a rule does besides its own operation: nothing (0), or what keeps a run going.

    Hypothesis switches whole rules off for a run (swarm testing): admit, launch or retire in
    three runs of four, which then reach next to nothing.  So every rule can bring them.
    ``then``: kind (3 bits), prompt, request or number of operations (4 bits).
    """
    kind, argument = then & 7, then >> 3
    if kind == 0:
        return ()
    if world.schedules:
        return (_arrive(world, argument * kind, argument),) if kind <= 3 else (Run(kind - 3),)
    if world.tiered and kind == 1:
        return _round_trip(world)[:argument]
    if world.tiered and kind == 2:
        return (Complete(argument & 1),)
    if kind == 3 and _DISK_FAULTS.issubset(world.features):
        return _crash(world, argument & 1, (argument >> 1) % 5)
    if world.tiered and kind == 4:
        return (Offload(blocks=argument & 1),)
    if kind <= 2:
        return (_admit(world, argument * kind, 0),)
    if kind <= 4:
        return (_grow(world, argument & 7, argument >> 3),)
    if kind == 5:
        return (Launch(),)
    return (Launch(), Retire())
