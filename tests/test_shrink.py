"""The shrinker alone: what it takes away, and what it leaves, is told by a made-up property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.fuzz import shrink as shrinking
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.operations import (
    KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    AnyOperation,
    Arrive,
    Cancel,
    Complete,
    Corrupt,
    Evict,
    Fail,
    Grow,
    Land,
    Launch,
    Media,
    Notify,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reset,
    Restart,
    Resume,
    Retire,
    Run,
    Schedule,
    Segment,
    Slow,
    Tier,
    Withhold,
    kind_of,
)
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation

TIERED = Configuration(
    blocks=16,
    host_blocks=8,
    disk_blocks=4,
    offload="both",
    device_eviction="arc",
    host_eviction="arc",
    disk_eviction="arc",
)

Fails = Callable[[Configuration, Sequence[AnyOperation]], bool]


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """Shrinks operations of a world for as long as a made-up property fails."""

    def shrunk(
        operations: list[AnyOperation], fails: Fails, configuration: Configuration = TIERED
    ) -> Case:
        def first_violation(_factory: Any, world: Configuration, run: Any) -> Any:
            return ([*run], (Violation("MADE-UP", "…"),)) if fails(world, run) else None

        monkeypatch.setattr(shrinking, "first_violation", first_violation)
        result = shrink(Case("engine", configuration, operations))
        assert result is not None
        return result.case

    return shrunk


def has(*wanted: AnyOperation | type[Operation]) -> Fails:
    """Fails where these operations, or some of these kinds, follow each other."""

    def fails(_world: Configuration, run: Sequence[AnyOperation]) -> bool:
        left = iter(run)
        return all(any(_is(operation, one) for operation in left) for one in wanted)

    return fails


def _is(operation: AnyOperation, wanted: AnyOperation | type[Operation]) -> bool:
    return isinstance(operation, wanted) if isinstance(wanted, type) else operation == wanted


PROMPT = (Segment(0, 1),)
PLAIN: list[tuple[AnyOperation, AnyOperation]] = [
    # An operation with all that it may have, and the plainest of its kind.
    (Offload("disk", first=3, blocks=2), Offload()),
    (
        Promote(
            (Segment(1, 9), Segment(10, 2)),
            salt=2,
            adapter=1,
            media=(Media(1, 0, 4),),
            to="host",
            blocks=2,
        ),
        Promote(PROMPT),
    ),
    (Land(3, parts=2), Land()),
    (Complete(2), Complete()),
    (Fail(3, "disk_full"), Fail()),
    (Cancel(1), Cancel()),
    (Notify(3), Notify()),
    (Withhold("disk", 4), Withhold()),
    (Corrupt(3, 99), Corrupt()),
    (Restart(2, stage=4), Restart()),
    (Slow(10), Slow()),
    (Evict(8, "disk"), Evict()),
    (Admit((Segment(2, 5),), wait=True), Admit(PROMPT)),
    (Preempt(3, swap=True, late=True), Preempt(0)),
    (Resume(1, slots=4, late=True), Resume(0)),
]


@pytest.mark.parametrize(("operation", "plain"), PLAIN, ids=lambda operation: kind_of(operation))
def test_an_operation_becomes_the_plainest_of_its_kind(
    shrunk: Callable[..., Case], operation: AnyOperation, plain: AnyOperation
) -> None:
    case = shrunk([Reset(), operation, Launch()], has(type(operation)))
    assert case.operations == [plain]
    assert case.configuration == Configuration(blocks=1, block_size=1, requests=1, run_ahead=1)


def test_every_operation_of_a_hierarchy_has_a_plainest_one() -> None:
    assert {kind_of(operation) for operation, _ in PLAIN} >= set(TIER_KINDS)


@pytest.mark.parametrize(
    "needed",
    [
        Offload("disk"),
        Offload(first=1),
        Offload(blocks=1),
        Promote(PROMPT, to="host"),
        Land(parts=2),
        Complete(1),
        Fail(cause="timeout"),
        Restart(stage=3),
        Evict(tier="host"),
        Admit(PROMPT, wait=True),
        Preempt(0, swap=True, late=True),
        Resume(0, late=True),
    ],
    ids=repr,
)
def test_what_an_operation_needs_is_left(shrunk: Callable[..., Case], needed: AnyOperation) -> None:
    assert shrunk([Reset(), needed, Launch()], has(needed)).operations == [needed]


WORLDS: dict[str, tuple[Callable[[Configuration], bool], Configuration]] = {
    # What of a world is needed, and what becomes of one with all tiers.
    "nothing": (lambda world: True, Configuration()),
    "a host": (lambda world: world.host_blocks > 0, Configuration(host_blocks=1)),
    "room": (lambda world: world.host_blocks > 2, Configuration(host_blocks=3)),
    "prefixes": (
        lambda world: world.offloads_prefixes,
        Configuration(host_blocks=1, offload="both"),
    ),
    "a disk": (
        lambda world: world.disk_blocks > 0,
        Configuration(host_blocks=1, disk_blocks=1, offload="both"),
    ),
    "ARC": (
        lambda world: world.host_eviction == "arc",
        Configuration(host_eviction="arc"),
    ),
    "larger blocks": (
        lambda world: world.block_size == 4 and world.offloads_prefixes,
        Configuration(host_blocks=1, offload="both"),
    ),
}


@pytest.mark.parametrize("matters", [True, False])
def test_bytes_of_a_token_are_as_by_default_unless_they_matter(
    shrunk: Callable[..., Case], matters: bool
) -> None:
    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        return Evict() in run and (not matters or world.kv_bytes_per_token == 4096)

    left = shrunk([Evict()], fails, replace(TIERED, kv_bytes_per_token=4096)).configuration
    default = Configuration().kv_bytes_per_token
    assert left.kv_bytes_per_token == (4096 if matters else default)


def test_a_world_that_cannot_be_is_no_candidate(shrunk: Callable[..., Case]) -> None:
    """With units of a size of their own, blocks of another size are out of the question."""
    world = Configuration(host_blocks=1, offload="prefix", host_unit_tokens=4, disk_unit_tokens=4)
    case = shrunk([Reset()], lambda here, run: here.host_unit_tokens == 4 and bool(run), world)
    assert (case.configuration.block_size, case.configuration.host_unit_tokens) == (4, 4)
    assert case.configuration.disk_unit_tokens == 0


DETOURS: dict[str, tuple[list[AnyOperation], list[AnyOperation]]] = {
    "a completion": ([Land(), Fail(), Notify()], [Complete()]),
    "a store": ([Slow(2), Corrupt(), Restart()], [Offload(), Complete()]),
}


@pytest.mark.parametrize(("detour", "plain"), DETOURS.values(), ids=DETOURS)
def test_a_detour_becomes_what_it_was_for(
    shrunk: Callable[..., Case], detour: list[AnyOperation], plain: list[AnyOperation]
) -> None:
    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        return has(*detour)(world, run) or has(*plain)(world, run)

    assert shrunk([Reset(), *detour, Launch()], fails).operations == plain


def test_prompts_to_promote_are_cut_with_those_to_admit(shrunk: Callable[..., Case]) -> None:
    """Both have to have a block and a token, of whatever size a block is."""

    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        prompts = [o.prompt for o in run if isinstance(o, Admit | Promote)]
        longer = [p for p in prompts if p[0].length == world.block_size + 1]
        return len(longer) == 2 and longer[0] == longer[1]

    world = Configuration(blocks=16, block_size=8, host_blocks=1, offload="prefix")
    nine = (Segment(3, 9),)
    case = shrunk([Admit(nine), Promote(nine)], fails, world)
    assert case.operations == [Admit((Segment(3, 3),)), Promote((Segment(3, 3),))]
    assert case.configuration.block_size == 2


def test_what_made_room_for_others_goes_if_there_is_more_room(shrunk: Callable[..., Case]) -> None:
    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        if world.blocks >= 5 and world.requests >= 2:
            return has(Admit, Admit)(world, run)
        return has(Admit, Abort, Admit)(world, run)

    small = Configuration(blocks=4, requests=1)
    case = shrunk([Admit(PROMPT), Abort(0), Admit(PROMPT)], fails, small)
    assert case.operations == [Admit(PROMPT), Admit(PROMPT)]
    assert (case.configuration.blocks, case.configuration.requests) == (5, 2)


def test_room_is_made_on_the_tiers_that_there_are(shrunk: Callable[..., Case]) -> None:
    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        if world.host_blocks >= 3 and world.disk_blocks >= 2:
            return has(Offload)(world, run)
        return world.disk_blocks > 0 and has(Offload, Evict)(world, run)

    small = Configuration(host_blocks=1, disk_blocks=1, offload="prefix")
    case = shrunk([Offload(), Evict()], fails, small)
    assert case.operations == [Offload()]
    assert (case.configuration.host_blocks, case.configuration.disk_blocks) == (3, 2)


def test_a_longer_prompt_does_what_took_a_step(shrunk: Callable[..., Case]) -> None:
    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        long = any(isinstance(o, Admit) and o.prompt[-1].length >= 2 for o in run)
        return long or has(Admit, Launch)(world, run)

    assert shrunk([Admit(PROMPT), Launch()], fails).operations == [Admit((Segment(0, 2),))]


def test_what_grew_joins_the_prompt_as_other_tokens(shrunk: Callable[..., Case]) -> None:
    """Where it matters that they are not those that the prompt would have gone on with."""

    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        mixed = any(
            isinstance(o, Admit) and len({segment.source for segment in o.prompt}) > 1 for o in run
        )
        return mixed or has(Admit, Grow)(world, run)

    case = shrunk([Admit(PROMPT), Grow(0, 3)], fails)
    assert case.operations == [Admit((Segment(0, 1), Segment(1, 1)))]


def test_only_what_is_needed_is_left_of_a_long_run(shrunk: Callable[..., Case]) -> None:
    able = frozenset((*KINDS, *TIER_KINDS, "tiers", "swaps", "slots"))
    chain = (Admit, Offload, Complete, Evict, Promote)
    draw = next(
        draw
        for number in range(100)
        if has(*chain)(
            (draw := draw_run(f"chain/{number}", able, tiers_share=1)).configuration,
            draw.operations,
        )
        and len(draw.operations) == 240
    )
    case = shrunk(draw.operations, has(*chain), draw.configuration)
    assert case.operations == [Admit(PROMPT), Offload(), Complete(), Evict(), Promote(PROMPT)]


def test_one_request_does_what_took_three(shrunk: Callable[..., Case]) -> None:
    """As many tokens of output in as many iterations: whose they are does not matter."""

    def fails(_world: Configuration, run: Sequence[AnyOperation]) -> bool:
        outputs = sum(op.output for op in run if isinstance(op, Arrive))
        iterations = sum(op.iterations for op in run if isinstance(op, Run))
        return min(outputs, iterations) >= 6

    arrivals = [Arrive((Segment(source, 3),), output=2) for source in range(3)]
    case = shrunk([arrivals[0], Run(2), arrivals[1], arrivals[2], Run(4)], fails)
    assert case.operations == [Arrive((Segment(0, 1),), output=6), Run(6)]


def test_one_request_alone_does_it(shrunk: Callable[..., Case]) -> None:
    """Others got in its way, and so it took longer: a plain row of iterations will do."""

    def fails(_world: Configuration, run: Sequence[AnyOperation]) -> bool:
        match run:
            case [Arrive() as first, Run() as iterations]:
                return 4 <= first.output <= iterations.iterations
            case _:
                return sum(isinstance(op, Arrive) for op in run) >= 2 and Schedule() in run

    arrivals = [Arrive((Segment(source, 3),)) for source in range(2)]
    case = shrunk([arrivals[0], Schedule(), Retire(), arrivals[1], Run(2)], fails)
    assert case.operations == [Arrive((Segment(0, 1),), output=4), Run(4)]


@pytest.mark.parametrize("together", [True, False])
def test_rows_of_iterations_become_one_or_join_the_next(
    shrunk: Callable[..., Case], together: bool
) -> None:
    """All arrive before anything is computed, unless the second must find the first computed."""

    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        iterations = sum(op.iterations for op in run if isinstance(op, Run))
        enough = iterations >= 6 and (together or has(Run)(world, run[:-2]))
        return enough and has(*served)(world, run)

    served = [Arrive((Segment(source, 1),)) for source in range(4)]
    rows: list[AnyOperation] = [op for arrive in served for op in (arrive, Run(1))]
    case = shrunk([*rows, Run(2)], fails)
    if together:
        assert case.operations == [*served, Run(6)]
    else:
        assert [type(op) for op in case.operations] == [*[Arrive] * 3, Run, Arrive, Run]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_block_is_evicted_where_it_lies(shrunk: Callable[..., Case], tier: Tier) -> None:
    """A detour drove it out of a tier below the device."""

    def fails(world: Configuration, run: Sequence[AnyOperation]) -> bool:
        detour, plain = has(Corrupt, Promote, Complete), has(Evict(tier=tier))
        is_there = getattr(world, f"{tier}_blocks") > 0
        return is_there and (detour(world, run) or plain(world, run))

    case = shrunk([Corrupt(), Promote(PROMPT), Slow(), Complete()], fails)
    assert case.operations == [Evict(tier=tier)]


@pytest.mark.parametrize("broke_as_well", [True, False])
def test_what_broke_at_the_same_operation_may_break_before(
    monkeypatch: pytest.MonkeyPatch, broke_as_well: bool
) -> None:
    """In the smallest world, where one thing breaks before the other can."""

    def first_violation(_factory: Any, world: Configuration, run: Any) -> Any:
        wanted, other = Violation("WANTED", "…"), Violation("OTHER", "…")
        for end, operation in enumerate(run, start=1):
            if isinstance(operation, Admit) and world.blocks == world.block_size == 1:
                return [*run[:end]], (other,)
            if isinstance(operation, Preempt) and has(Admit)(world, run[:end]):
                return [*run[:end]], (wanted, other) if broke_as_well else (wanted,)
        return None

    monkeypatch.setattr(shrinking, "first_violation", first_violation)
    case = Case("engine", TIERED, [Launch(), Admit((Segment(1, 9),)), Preempt(0)])
    result = shrink(replace(case, violates="WANTED"))
    assert result is not None
    assert result.violation.property == result.case.violates
    assert (result.case.violates, result.case.operations) == (
        ("OTHER", [Admit(PROMPT)]) if broke_as_well else ("WANTED", [Admit(PROMPT), Preempt(0)])
    )
