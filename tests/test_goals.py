"""Must-hit situations, the draws that reach them, and the stories of what goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvproof.fuzz.replay import Replay, replay
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import FEATURES, draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.goals import GOALS
from kvproof.invariants.operations import (
    KINDS,
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
    Segment,
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


def hits(run: Run, blocks: int) -> dict[str, int]:
    subject = EngineSubject(Configuration(blocks=blocks, host_blocks=2))
    harness = Harness(subject, audit_interval=1)
    assert not harness.run(run)
    return harness.checker.goals.hits


def test_every_goal_has_scripts_and_a_name_of_its_own() -> None:
    assert list(SCRIPTS) == [goal.id for goal in GOALS]
    assert len({goal.situation for goal in GOALS}) == len(GOALS)
    assert all(goal.needs <= ABLE for goal in GOALS)


@pytest.mark.parametrize("goal", SCRIPTS)
def test_a_goal_is_met_by_its_situation_and_not_by_the_next_best(goal: str) -> None:
    blocks, reaching, nearly = SCRIPTS[goal]
    assert hits(reaching, blocks)[goal] == 1
    assert hits(nearly, blocks)[goal] == 0


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.id)
def test_a_goal_needs_what_it_says(goal: Any) -> None:
    """The script uses all the operations that the goal says it needs."""
    kinds = {kind_of(operation) for operation in SCRIPTS[goal.id][1]}
    assert goal.needs & set(KINDS) <= kinds


def test_a_search_of_seconds_meets_every_goal() -> None:
    totals = Totals()
    assert search("engine", "goals", seconds=20, totals=totals, runs_max=300) is None
    assert not totals.problems
    assert {name for name, count in totals.goals.items() if not count} == set()
    assert set(totals.goals) == set(SCRIPTS)
    assert min(totals.operations[kind]["done"] for kind in KINDS) > 0


# -- draws -----------------------------------------------------------------------------------------


def test_a_draw_is_the_same_each_time_and_another_for_another_seed() -> None:
    draws = [draw_run(f"seed/{number}", ABLE) for number in range(20)]
    assert draws == [draw_run(f"seed/{number}", ABLE) for number in range(20)]
    assert len({repr(draw.operations) for draw in draws}) == 20
    assert [draw.seed for draw in draws] == [f"seed/{number}" for number in range(20)]


def test_draws_vary_in_everything_that_they_draw() -> None:
    draws = [draw_run(f"variety/{number}", ABLE) for number in range(300)]
    lengths = Counter(len(draw.operations) for draw in draws)
    assert set(lengths) == {20, 50, 100, 200, 400}
    assert {feature for draw in draws for feature in draw.features} == set(FEATURES)
    worlds = [draw.configuration for draw in draws]
    assert min(world.blocks for world in worlds) == 6
    assert max(world.blocks for world in worlds) == 33
    assert {world.block_size for world in worlds} >= {1, 2, 3, 4, 5, 8, 16}
    assert {world.run_ahead for world in worlds} == {1, 2, 3}
    assert {world.host_blocks for world in worlds} == {0, 1, 3, 8, 33}
    kinds = Counter(kind_of(operation) for draw in draws for operation in draw.operations)
    assert set(kinds) == set(KINDS)
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
        "evicted (request) at op 4 (evict)."
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


def _lives(operations: list[Any], **about: int) -> str:
    """What the story of a violation about that block or request would tell of a healthy run."""
    done = replay(Case("engine", Configuration(host_blocks=2), operations), record=True)
    return explain(Violation("PROV", "…", **about), done.moments, 4).partition("\n")[2]


def test_the_story_of_a_swapped_block_leads_to_the_host_and_back() -> None:
    run = [prompt(6), *STEP, OUT, Resume(0)]
    assert _lives(run, block=2) == (
        "Block 2: given to r0 as row 1 at op 0 (admit); "
        "to be written by r0 (positions 0 to 5) in step 0 at op 1 (launch); "
        "written as step 0 retired at op 2 (retire); "
        "copied by r0 to host block 1 at op 3 (preempt); "
        "released by r0 at op 3 (preempt); "
        "given to r0 as row 0 at op 4 (resume); "
        "filled by r0 from host block 0 at op 4 (resume)."
    )


def test_the_story_of_a_swapped_request_tells_where_its_bytes_were() -> None:
    run = [prompt(6), *STEP, OUT, Resume(0), prompt(1), Decode((1, 0)), Decode((1,)), OUT, Abort(0)]
    assert _lives(run, request=0).partition("step 0 retired at op 2 (retire); ")[2] == (
        "swapped out to host blocks [0, 1] at op 3 (preempt); "
        "gave back blocks [2, 1] at op 3 (preempt); "
        "preempted at op 3 (preempt); "
        "got blocks [2, 3] at op 4 (resume); "
        "swapped in from host blocks [0, 1] to blocks [2, 3] at op 4 (resume); "
        "resumed with 6 cached tokens at op 4 (resume); "
        "grew by 1 at op 6 (decode); "
        "swapped out to host blocks [0, 1] at op 8 (preempt); "
        "gave back blocks [3, 2] at op 8 (preempt); "
        "preempted at op 8 (preempt); "
        "gave back host blocks [0, 1] at op 9 (abort); "
        "aborted at op 9 (abort)."
    )


def test_the_story_of_bytes_that_did_not_come_back_ends_before_them() -> None:
    run = [prompt(6), *STEP, OUT, Resume(0)]
    story, violation, _ = _told("swap-in-forgets-last-block", run, host_blocks=2)
    assert (violation.property, violation.block, violation.request) == ("PROV", 3, 0)
    assert story == (
        "PROV at operation 4: request 0 reads position 4 from block 3, offset 0 (row 1 of its "
        "table), which holds never written.\nBlock 3: given to r0 as row 1 at op 4 (resume)."
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
        ("evict-takes-a-live-block", ["given to r", "made findable", "evicted (request)"]),
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
