"""Must-hit situations, the draws that reach them, and the stories of what goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from kvproof.fuzz.replay import Replay, replay
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import FEATURES, draw_run
from kvproof.fuzz.tier_swarm import TIER_FEATURES
from kvproof.invariants.case import Case
from kvproof.invariants.goals import GOALS
from kvproof.invariants.operations import (
    KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    Cancel,
    Complete,
    Corrupt,
    Decode,
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
    Operation,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    Segment,
    Slow,
    Tier,
    Withhold,
    kind_of,
)
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

STEP = (Launch(), Retire())
ABLE = EngineSubject.capabilities | EngineSubject(Configuration()).semantics.features()
Run = Sequence[Operation]


def prompt(length: int, source: int = 0, **domain: Any) -> Admit:
    return Admit((Segment(source, length),), **domain)


IMAGE, OTHER = (Media(1, 0, 2),), (Media(2, 0, 2),)
CACHED = (prompt(8), *STEP, Finish(0))
FORKED = (prompt(2), *STEP, Fork(0))
OUT = Preempt(0, swap=True)
# Each goal: a run that reaches it, one that nearly does; pools of so many blocks of 4, and two
# blocks of swap space.
SCRIPTS: dict[str, tuple[int, Run, Run]] = {
    "pool-empty": (2, [prompt(8)], [prompt(4)]),
    "admit-refused": (2, [prompt(8), prompt(1)], [prompt(8), prompt(9)]),
    "grow-refused": (1, [prompt(4), Grow(0)], [prompt(3), Grow(0)]),
    "hit-in-use": (8, [prompt(4), *STEP, prompt(5)], [prompt(4), *STEP, Finish(0), prompt(5)]),
    "hit-cached-free": (8, [*CACHED, prompt(9)], [prompt(8), *STEP, prompt(9)]),
    "hit-cut-at-last-token": (8, [*CACHED, prompt(8)], [*CACHED, prompt(9)]),
    "evicted-under-pressure": (2, [*CACHED, prompt(1, 1)], [*CACHED, Evict(2), prompt(1, 1)]),
    "block-boundary": (8, [prompt(4), Grow(0)], [prompt(3), Grow(0)]),
    "copied-on-write": (8, [*FORKED, Grow(0)], [prompt(4), *STEP, Fork(0), Grow(0)]),
    "copy-refused": (1, [*FORKED, Grow(0)], [prompt(4), *STEP, Fork(0), Grow(0)]),
    "shared-block-outlives-parent": (8, [*FORKED, Finish(0)], [*FORKED, Finish(1)]),
    "chunked-prefill": (8, [prompt(4), Launch(2)], [prompt(4), Launch(4)]),
    "two-steps-in-flight": (
        8,
        [prompt(4), Launch(2), Launch()],
        [prompt(4), Launch(2), Retire(), Launch()],
    ),
    "finished-in-flight": (8, [prompt(1), Launch(), Finish(0)], [prompt(1), *STEP, Finish(0)]),
    "aborted-in-flight": (8, [prompt(1), Launch(), Abort(0)], [prompt(1), *STEP, Abort(0)]),
    "preempted-in-flight": (8, [prompt(1), Launch(), Preempt(0)], [prompt(1), *STEP, Preempt(0)]),
    "aborted-preempted": (8, [prompt(1), Preempt(0), Abort(0)], [prompt(1), Abort(0)]),
    "resumed-with-a-hit": (
        8,
        [prompt(5), *STEP, Preempt(0), Resume(0)],
        [prompt(5), Preempt(0), Resume(0)],
    ),
    "resumed-while-fenced": (
        8,
        [prompt(1), Launch(), Preempt(0), Resume(0)],
        [prompt(1), Launch(), Preempt(0), Retire(), Resume(0)],
    ),
    "resume-refused": (
        2,
        [prompt(5), Preempt(0), prompt(1, 1), Resume(0)],
        [prompt(5), Preempt(0), prompt(1, 1), Finish(0), Resume(0)],
    ),
    "reset-refused": (8, [prompt(1), Reset()], [prompt(1), Finish(0), Reset()]),
    "reset-done": (8, [*CACHED, Reset()], [prompt(8), Finish(0), Reset()]),
    "salt-separates": (8, [prompt(1), prompt(1, salt=1)], [prompt(1), prompt(1, adapter=1)]),
    "adapter-separates": (8, [prompt(1), prompt(1, adapter=1)], [prompt(1), prompt(1, salt=1)]),
    "media-separates": (
        8,
        [prompt(3, media=IMAGE), prompt(3, media=OTHER)],
        [prompt(3, media=IMAGE), prompt(3, media=IMAGE), prompt(4, media=OTHER)],
    ),
    "swapped-out": (8, [prompt(5), *STEP, OUT], [prompt(5), OUT]),
    "swapped-in": (8, [prompt(5), *STEP, OUT, Resume(0)], [prompt(5), OUT, Resume(0)]),
    "swap-refused": (8, [prompt(9), *STEP, OUT], [prompt(9), Launch(), OUT]),
    "swapped-aborted": (
        8,
        [prompt(5), *STEP, OUT, Abort(0)],
        [prompt(5), *STEP, Preempt(0), Abort(0)],
    ),
    "slots-in-part": (8, [prompt(5, slots=4)], [prompt(6, slots=5)]),
    "slots-in-advance": (8, [prompt(4, slots=5)], [prompt(3, slots=4)]),
    "decode-refused": (2, [prompt(4), prompt(1, 1), Decode((0, 1))], [prompt(4), Decode((0,))]),
    "reserve-refused": (2, [prompt(4), Reserve(0, 9)], [prompt(4), Reserve(0, 8)]),
    "not-oldest-first": (
        8,
        [prompt(1), prompt(1, 1), Launch(items=((1, 1),))],
        [prompt(1), prompt(1, 1), Launch(items=((0, 1), (1, 1)))],
    ),
}
# The same of a memory hierarchy: 8 blocks on the device and 3 on each of host and disk, unless said
# otherwise, for completed blocks and for suspended requests.
READY = (prompt(5), *STEP)
STORING = (*READY, Offload())
STORED = (*STORING, Complete())
SAVING = (*STORED, Offload("disk"))
BELOW = (*STORED, Finish(0), Evict(9))
LOWEST = (*SAVING, Complete(), Finish(0), Evict(9), Evict(9, "host"))
PROMOTE = Promote(prompt(5).prompt)
FETCH = Promote(prompt(5).prompt, to="host")
AWAY = (*READY, OUT)
LATE = Resume(0, late=True)
OTHER_STORED = (prompt(5, 1), *STEP, Offload(), Complete(1))
THIRD = (prompt(5, 2), *STEP, Offload())
# The first of two rows is on the device, the second on the host, and no other block is free.
HALF_BELOW = (prompt(9), *STEP, Offload(), Complete(), Finish(0), Evict(1), Withhold("device", 2))
PROMOTE_BOTH = Promote(prompt(9).prompt)
TIER_SCRIPTS: dict[str, tuple[dict[str, Any], Run, Run]] = {
    "store-completed": ({}, [*STORING, Complete()], [*STORING, Fail()]),
    "promoted": ({}, [*BELOW, PROMOTE, Complete()], [*BELOW, PROMOTE, Fail()]),
    "demoted": ({}, [*SAVING, Complete()], [*SAVING, Fail()]),
    "fetched": ({}, [*LOWEST, FETCH, Complete()], [*LOWEST, FETCH, Fail()]),
    "hit-on-promoted-block": (
        {},
        [*BELOW, PROMOTE, Complete(), prompt(5)],
        [*BELOW, PROMOTE, Complete(), Evict(1), prompt(5)],
    ),
    "swap-out-in-flight": ({}, [*READY, Preempt(0, swap=True, late=True)], [*READY, OUT]),
    "loading": ({}, [*AWAY, LATE], [*AWAY, Resume(0)]),
    "preempted-while-stored": ({}, [*STORING, Preempt(0)], [*STORED, Preempt(0)]),
    "aborted-while-loading": ({}, [*AWAY, LATE, Abort(0)], [*AWAY, LATE, Complete(), Abort(0)]),
    "aborted-after-load": (
        {},
        [*AWAY, LATE, Complete(), Abort(0)],
        [*AWAY, LATE, Complete(), Grow(0), Launch(), Abort(0)],
    ),
    "hit-on-pending": ({}, [*BELOW, PROMOTE, prompt(5)], [*BELOW, PROMOTE, Complete(), prompt(5)]),
    "waited-for-pending": (
        {},
        [*BELOW, PROMOTE, prompt(5, wait=True)],
        [*BELOW, PROMOTE, prompt(5)],
    ),
    "retry-answered": ({}, [Slow(2), prompt(5)], [Slow(2), Slow(1), prompt(5)]),
    "store-source-hit": ({}, [*STORING, prompt(5)], [*STORED, prompt(5)]),
    "store-outlives-its-block": (
        {},
        [*STORING, Finish(0), prompt(1, 1)],
        [*STORING, Finish(0), Complete(), prompt(1, 1)],
    ),
    "promotion-refused": ({}, [*BELOW, prompt(32, 1), PROMOTE], [*BELOW, prompt(28, 1), PROMOTE]),
    "store-refused": (
        {},
        [prompt(17), *STEP, Offload()],
        [prompt(13), *STEP, Offload()],
    ),
    "fetch-refused": (
        {},
        [*LOWEST, Withhold("host", 3), FETCH],
        [*LOWEST, Withhold("host", 2), FETCH],
    ),
    "demote-refused": (
        {},
        [*STORED, Withhold("disk", 3), Offload("disk")],
        [*STORED, Withhold("disk", 2), Offload("disk")],
    ),
    "swap-in-refused": ({}, [*AWAY, prompt(28, 1), Resume(0)], [*AWAY, prompt(24, 1), Resume(0)]),
    "completed-out-of-order": (
        {},
        [prompt(9), *STEP, Offload(blocks=1), Offload(), Complete(1)],
        [prompt(9), *STEP, Offload(blocks=1), Offload(), Complete(0)],
    ),
    "landed-in-part": ({}, [prompt(9), *STEP, Offload(), Land()], [*STORING, Land()]),
    "failed-after-landing": ({}, [*STORING, Land(), Fail()], [*STORING, Fail()]),
    "cancelled-then-completed": (
        {},
        [*STORING, Cancel(), Complete()],
        [*STORING, Cancel(), Offload(), Complete(1)],
    ),
    "late-notice-while-slot-is-reused": (
        {},
        [*STORING, Fail(), Offload(), Notify()],
        [*STORING, Fail(), Notify()],
    ),
    "host-evicted-under-pressure": (
        {"host_blocks": 1},
        [*STORED, prompt(5, 1), *STEP, Offload()],
        [*STORED, prompt(5, 1), *STEP, Evict(1, "host"), Offload()],
    ),
    "evicts-past-pinned-slot": (
        {"host_blocks": 2},
        [*STORED, Offload("disk"), *OTHER_STORED, *THIRD],
        [*STORED, Offload("disk"), *OTHER_STORED, Complete(), *THIRD],
    ),
    "arc-ghost-hit": (
        {"device_eviction": "arc"},
        [*READY, Finish(0), Evict(1), *READY, Finish(0)],
        [*READY, Finish(0), Evict(1), prompt(5, 1), *STEP, Finish(0)],
    ),
    "short-write": ({}, [*SAVING, Fail(0, "short_write")], [*STORING, Fail(0, "short_write")]),
    "disk-full": ({}, [*SAVING, Fail(0, "disk_full")], [*STORING, Fail(0, "disk_full")]),
    "corrupt-block-met": (
        {},
        [*LOWEST, Corrupt(), FETCH, Complete()],
        [*LOWEST, Corrupt(), FETCH, Fail()],
    ),
    "restart-with-a-cancelled-copy": (
        {},
        [*SAVING, Cancel(), Restart()],
        [*STORING, Cancel(), Restart()],
    ),
    "damaged-entry-met": (
        {},
        [*SAVING, Complete(), Corrupt(file="index"), Restart()],
        [*SAVING, Complete(), Corrupt(), Restart()],
    ),
    "restart-with-a-store-in-flight": (
        {},
        [*SAVING, Restart()],
        [*LOWEST, FETCH, Restart()],
    ),
    "restart-finds-blocks": (
        {},
        [*SAVING, Restart(stage=4)],
        [*SAVING, Restart(stage=3)],
    ),
    "withheld-blocks-refuse": (
        {},
        [Withhold("device", 8), prompt(1)],
        [Withhold("device", 8), Withhold("device"), prompt(32), prompt(1)],
    ),
    "reset-refused-by-transfer": (
        {},
        [*STORING, Finish(0), Reset()],
        [*STORING, Reset()],
    ),
    "reset-refused-by-suspension": (
        {},
        [*AWAY, Reset()],
        [*AWAY, prompt(1), Reset()],
    ),
    "promotion-spares-its-prefix": (
        {"blocks": 3},
        [*HALF_BELOW, PROMOTE_BOTH],
        [*HALF_BELOW, Withhold("device"), PROMOTE_BOTH],
    ),
}
WORLDS: dict[str, tuple[dict[str, Any], Run, Run]] = {
    **{
        goal: ({"blocks": blocks, "host_blocks": 2}, reaching, nearly)
        for goal, (blocks, reaching, nearly) in SCRIPTS.items()
    },
    **{
        goal: ({"host_blocks": 3, "disk_blocks": 3, "blocks": 8, "offload": "both"} | world, *runs)
        for goal, (world, *runs) in TIER_SCRIPTS.items()
    },
}


EARLIER = 5
"""Times that each goal was met before: the next are added."""


def hits(run: Run, world: dict[str, Any]) -> dict[str, int]:
    subject = EngineSubject(Configuration(**world))
    harness = Harness(subject, audit_interval=1)
    met = harness.checker.goals.hits
    met.update(dict.fromkeys(met, EARLIER))
    assert not harness.run(run)
    return {goal: count - EARLIER for goal, count in met.items()}


def test_every_goal_has_scripts_and_a_name_of_its_own() -> None:
    assert list(WORLDS) == [goal.id for goal in GOALS]
    assert len({goal.situation for goal in GOALS}) == len(GOALS)
    assert all(goal.needs <= ABLE for goal in GOALS)


@pytest.mark.parametrize("goal", WORLDS)
def test_a_goal_is_met_by_its_situation_and_not_by_the_next_best(goal: str) -> None:
    world, reaching, nearly = WORLDS[goal]
    assert hits(reaching, world)[goal] == 1
    assert hits(nearly, world)[goal] == 0


@pytest.mark.parametrize(
    ("goal", "blocks", "run", "times"),
    [
        ("copy-refused", 1, [*FORKED, Grow(0, 5)], 0),  # it lacks another block as well
        ("copy-refused", 1, [prompt(3), Grow(0, 5)], 0),
        ("pool-empty", 8, [*FORKED, Grow(0)], 0),
        ("pool-empty", 2, [*FORKED, Grow(0)], 1),
        ("salt-separates", 8, [prompt(4), prompt(4)], 0),
    ],
)
def test_what_looks_like_a_goal_is_told_apart(goal: str, blocks: int, run: Run, times: int) -> None:
    assert hits(run, {"blocks": blocks})[goal] == times


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.id)
def test_a_goal_needs_what_it_says(goal: Any) -> None:
    """The script uses all the operations that the goal says it needs."""
    kinds = {kind_of(operation) for operation in WORLDS[goal.id][1]}
    assert goal.needs & {*KINDS, *TIER_KINDS} <= kinds


def test_a_search_of_seconds_meets_every_goal() -> None:
    totals = Totals()
    assert search("engine", "goals/1", seconds=inf, totals=totals, runs_max=300) is None
    assert not totals.problems
    assert {name for name, count in totals.goals.items() if not count} == set()
    assert set(totals.goals) == set(WORLDS)
    assert min(totals.operations[kind]["done"] for kind in KINDS) > 0


# -- draws -----------------------------------------------------------------------------------------


def test_a_draw_is_the_same_each_time_and_another_for_another_seed() -> None:
    draws = [draw_run(f"seed/{number}", ABLE) for number in range(20)]
    assert draws == [draw_run(f"seed/{number}", ABLE) for number in range(20)]
    assert len({repr(draw.operations) for draw in draws}) == 20
    assert [draw.seed for draw in draws] == [f"seed/{number}" for number in range(20)]


def test_draws_vary_in_everything_that_they_draw() -> None:
    draws = [draw_run(f"variety/{number}", ABLE) for number in range(500)]
    lengths = Counter(len(draw.operations) for draw in draws)
    assert set(lengths) == {60, 120, 240}
    assert {feature for draw in draws for feature in draw.features} == set(FEATURES)
    worlds = [draw.configuration for draw in draws]
    assert min(world.blocks for world in worlds) == 4
    assert max(world.blocks for world in worlds) == 33
    assert {world.block_size for world in worlds} >= {1, 2, 3, 4, 5, 8, 16}
    assert {world.run_ahead for world in worlds} == {1, 2, 3}
    assert {world.host_blocks for world in worlds} == {0, 1, 2, 3, 4, 8, 16, 33}
    kinds = Counter(kind_of(operation) for draw in draws for operation in draw.operations)
    assert set(kinds) == {*KINDS, *TIER_KINDS}
    lacking = [kind for kind in KINDS if kind not in ("admit", "grow", "launch", "retire")]
    for kind in lacking:
        without = [d for d in draws if all(kind_of(o) != kind for o in d.operations)]
        assert len(without) > 30, f"swarm testing: runs without {kind}"
    drawn: Any = [operation for draw in draws for operation in draw.operations]
    for kind, argument, plain in (
        ("admit", "slots", 0),
        ("resume", "slots", 0),
        ("preempt", "swap", False),
        ("launch", "items", ()),
    ):
        values = [getattr(operation, argument) for operation in drawn if kind_of(operation) == kind]
        assert plain in values
        assert len({*values, plain}) > 1, f"{kind} with {argument}"
    assert (
        len({len(operation.requests) for operation in drawn if kind_of(operation) == "decode"}) > 1
    )


def test_a_draw_has_only_operations_that_the_subject_can_do() -> None:
    able = frozenset(KINDS) - {"fork", "preempt", "resume"}
    for number in range(20):
        draw = draw_run(f"able/{number}", able)
        assert {kind_of(operation) for operation in draw.operations} <= able


def test_a_draw_has_only_features_of_the_subject() -> None:
    draws = [draw_run(f"able/{number}", frozenset(KINDS)) for number in range(100)]
    assert {feature for draw in draws for feature in draw.features} == {*FEATURES} - {
        "slots",
        "swaps",
        *TIER_FEATURES,
    }
    assert {draw.configuration.host_blocks for draw in draws} == {0}
    for operation in (operation for draw in draws for operation in draw.operations):
        assert not getattr(operation, "swap", False)
        assert not getattr(operation, "items", ())
        assert isinstance(operation, Reserve) or not getattr(operation, "slots", 0)


# -- stories ---------------------------------------------------------------------------------------


def _told(fault: str, operations: list[Any], **world: Any) -> tuple[str, Violation, Replay]:
    case = Case("engine", Configuration(**world), operations, fault=fault)
    done = replay(case, record=True)
    violation = primary(done.violations)
    return explain(violation, done.moments, case.configuration.block_size), violation, done


def test_the_story_of_a_block_is_its_life_from_the_first_owner_on() -> None:
    run = [prompt(4), *STEP, Finish(0), Evict(1), prompt(4, 1), Launch(), Fork(0)]
    story, violation, _ = _told("stale-key-after-reuse", run)
    assert (violation.property, violation.op) == ("VALID", 4)
    head, _, life = story.partition("\nBlock 1: ")
    assert head.startswith("VALID at operation 4: the prefix cache finds block 1 under key ")
    assert life == (
        "given to r0 as row 0 at op 0 (admit); "
        "to be written by r0 (positions 0 to 3) in step 0 at op 1 (launch); "
        "written as step 0 retired at op 2 (retire); "
        "made findable by r0 as row 0 at op 2 (retire); "
        "released by r0 at op 3 (finish); "
        "evicted on request at op 4 (evict)."
    )


def test_the_story_of_a_copy_says_who_reads_what() -> None:
    run = [prompt(6), *STEP, Fork(0), Grow(1)]
    story, violation, _ = _told("copy-on-write-copies-nothing", run)
    assert (violation.property, violation.block, violation.request) == ("PROV", 3, 1)
    assert story == (
        "PROV at operation 4: request 1 reads position 4 from block 3, offset 0 (row 1 of its "
        "table), which holds never written.\n"
        "Block 3: given to r1 as row 1, as a copy of block 2 (0 tokens) at op 4 (grow)."
    )


def test_the_story_of_a_shared_block_names_both_owners() -> None:
    run = [prompt(6), *STEP, prompt(6), Launch(), Fork(0)]
    story, _, _ = _told("writes-start-at-row-zero", run)
    for part in (
        "a step writes positions 0 to 6 of request 1 into block 1, while request 0 and request 1",
        "Block 1: given to r0 as row 0 at op 0 (admit)",
        "reused by r1 as row 0 (prefix hit) at op 3 (admit)",
        "to be written by r1 (positions 0 to 5) in step 1 at op 4 (launch)",
    ):
        assert part in story


def test_the_story_of_a_request_is_its_life() -> None:
    run = [prompt(5), Launch(), Preempt(0), Retire()]
    story, violation, _ = _told("late-result-is-applied", run)
    assert (violation.property, violation.block, violation.request) == ("RESUME", None, 0)
    assert story.partition("\n")[2] == (
        "Request 0: got blocks [1, 2] at op 0 (admit); "
        "admitted with 5 tokens, 0 of them cached at op 0 (admit); "
        "positions 0 to 4 in step 0 at op 1 (launch); "
        "left its blocks to the fence of step 0 at op 2 (preempt); "
        "preempted at op 2 (preempt); "
        "step 0 retired at op 3 (retire); "
        "gave back blocks [2, 1] at op 3 (retire)."
    )


def _lives(
    operations: list[Any],
    *,
    block: int | None = None,
    request: int | None = None,
    tier: Tier = "device",
    **world: Any,
) -> str:
    """What the story of a violation about that block or request would tell of a healthy run."""
    case = Case("engine", Configuration(**{"host_blocks": 2} | world), operations)
    done = replay(case, record=True)
    about = Violation("PROV", "…", block=block, request=request, tier=tier)
    return explain(about, done.moments, 4).partition("\n")[2]


def test_the_story_of_a_swapped_block_leads_to_the_host_and_back() -> None:
    run = [prompt(6), *STEP, OUT, Resume(0)]
    assert _lives(run, block=2) == (
        "Block 2: given to r0 as row 1 at op 0 (admit); "
        "to be written by r0 (positions 0 to 5) in step 0 at op 1 (launch); "
        "written as step 0 retired at op 2 (retire); "
        "being copied for r0 to host block 1 by transfer 0, swap_out at op 3 (preempt); "
        "released by r0 at op 3 (preempt); "
        "transfer 0, swap_out ended, completed at op 3 (preempt); "
        "given to r0 as row 0 at op 4 (resume); "
        "being filled for r0 from host block 0 by transfer 1, swap_in at op 4 (resume); "
        "transfer 1, swap_in ended, completed at op 4 (resume)."
    )
    assert _lives(run, block=1, tier="host") == (
        "Host block 1: being filled for r0 from device block 2 by transfer 0, swap_out at op 3 "
        "(preempt); "
        "transfer 0, swap_out ended, completed at op 3 (preempt); "
        "being copied for r0 to device block 3 by transfer 1, swap_in at op 4 (resume); "
        "transfer 1, swap_in ended, completed at op 4 (resume)."
    )


def test_the_story_of_a_block_on_the_host_tells_what_transfers_and_evictions_did_to_it() -> None:
    run = [*STORING, Land(), Fail(0, "timeout"), Offload(), Cancel(), Complete(), Offload()]
    run += [Complete(), Finish(0), Evict(1, "host")]
    assert _lives(run, block=0, tier="host", host_blocks=1, offload="prefix") == (
        "Host block 0: being filled from device block 1 by transfer 0, store at op 3 (offload); "
        "1 block of transfer 0, store had arrived at op 4 (land); "
        "transfer 0, store ended, failed (timeout) at op 5 (fail); "
        "being filled from device block 1 by transfer 1, store at op 6 (offload); "
        "transfer 1, store was cancelled at op 7 (cancel); "
        "transfer 1, store ended, cancelled at op 8 (complete); "
        "being filled from device block 1 by transfer 2, store at op 9 (offload); "
        "transfer 2, store ended, completed at op 10 (complete); "
        "evicted on request at op 12 (evict)."
    )


def test_the_story_of_a_block_on_disk_goes_on_after_a_restart() -> None:
    life = _lives([*SAVING, Restart(stage=4)], block=0, tier="disk", disk_blocks=2, offload="both")
    assert life == (
        "Disk block 0: being filled from host block 0 by transfer 1, demote at op 5 (offload); "
        "transfer 1, demote ended, failed (crash) at op 6 (restart); "
        "found again after a restart at op 6 (restart)."
    )


def test_the_story_of_a_swapped_request_tells_where_its_bytes_were() -> None:
    run = [prompt(6), *STEP, OUT, Resume(0), prompt(1), Decode((1, 0)), Decode((1,)), OUT, Abort(0)]
    assert _lives(run, request=0).partition("step 0 retired at op 2 (retire); ")[2] == (
        "swapped out to host blocks [0, 1] (transfer 0, swap_out) at op 3 (preempt); "
        "gave back blocks [2, 1] at op 3 (preempt); "
        "preempted at op 3 (preempt); "
        "got blocks [2, 3] at op 4 (resume); "
        "swapped in from host blocks [0, 1] to blocks [2, 3] (transfer 1, swap_in) at op 4 "
        "(resume); "
        "resumed with 6 cached tokens at op 4 (resume); "
        "grew by 1 at op 6 (decode); "
        "swapped out to host blocks [0, 1] (transfer 2, swap_out) at op 8 (preempt); "
        "gave back blocks [3, 2] at op 8 (preempt); "
        "preempted at op 8 (preempt); "
        "gave back host blocks [0, 1] at op 9 (abort); "
        "aborted at op 9 (abort)."
    )


def test_a_violation_about_no_block_or_request_has_no_story() -> None:
    story, violation, _ = _told("evictions-count-what-was-asked", [Evict(1)])
    assert (violation.block, violation.request) == (None, None)
    assert story == "MET at operation 0: evictions is exported as 1, but it is 0."


def test_a_passing_replay_records_what_happened_only_when_asked() -> None:
    case = Case("engine", Configuration(), [prompt(4), *STEP])
    assert replay(case).moments == []
    moments = replay(case, record=True).moments
    assert [moment.op for moment in moments] == [0, 1, 2]
    assert [moment.operation for moment in moments] == case.operations
    assert [len(moment.events) for moment in moments] == [2, 1, 2]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("release-keeps-last-block", ["given to r", "gave back blocks", "as row"]),
        ("shared-block-released-twice", ["given to r", "released by r", "reference count of"]),
        ("evict-takes-a-live-block", ["given to r", "made findable", "evicted on request"]),
        ("copy-misses-last-token", ["reads position", "as a copy of block", "given to r"]),
        ("adapter-not-in-key", ["given to r", "prefix hit", "another prefix"]),
        ("releases-ignore-steps-in-flight", ["given to r", "to be written by r", "released by r"]),
        ("swap-in-forgets-last-block", ["reads position", "given to r", "at op 4 (resume)"]),
        ("steps-ignore-slots", ["a step writes row", "admitted with", "positions 0 to"]),
    ],
)
def test_a_shrunk_finding_is_told_as_a_life(fault: str, words: list[str]) -> None:
    found = search("engine", f"story/{fault}", seconds=20, totals=Totals(), fault=fault)
    assert found is not None
    shrunk = shrink(found.case)
    assert shrunk is not None
    done = replay(shrunk.case, record=True)
    size = shrunk.case.configuration.block_size
    stories = [explain(violation, done.moments, size) for violation in done.violations]
    assert any(all(word in story for word in words) for story in stories), stories
