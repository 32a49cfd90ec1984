"""Adapters and media are put on a drawn run afterwards: it is the same run without them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.operations import AnyOperation, Arrive, Media, Segment
from kvproof.invariants.prompts import clip_media, prompt_length
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import subject_factory

SCHEDULER = frozenset(("arrive", "schedule", "retire", "run", "abort"))
RUNS = range(40)


def arrivals(operations: Iterable[AnyOperation]) -> list[Arrive]:
    return [operation for operation in operations if isinstance(operation, Arrive)]


def without(operations: Iterable[AnyOperation]) -> list[AnyOperation]:
    return [
        replace(operation, adapter=0, media=()) if isinstance(operation, Arrive) else operation
        for operation in operations
    ]


def test_the_run_is_the_same_but_for_what_its_requests_carry() -> None:
    adapters, items = set(), set()
    for number in RUNS:
        plain = draw_run(f"identity/{number}", SCHEDULER).operations
        drawn = draw_run(f"identity/{number}", SCHEDULER | {"adapters", "arriving-media"})
        assert without(drawn.operations) == without(plain)
        adapters |= {arrival.adapter for arrival in arrivals(drawn.operations)}
        items |= {item.item for one in arrivals(drawn.operations) for item in one.media}
        assert not any(arrival.media for arrival in arrivals(plain))
    assert adapters == {0, 1, 2}
    assert items == {1, 2, 3, 4, 5}


def test_items_stand_one_behind_the_other_in_their_prompts() -> None:
    shown = [
        arrival
        for number in RUNS
        for arrival in arrivals(
            draw_run(f"identity/{number}", SCHEDULER | {"arriving-media"}).operations
        )
    ]
    assert {len(arrival.media) for arrival in shown} == {0, 1, 2}
    for arrival in shown:
        placed = clip_media(arrival.media, prompt_length(arrival.prompt))
        assert [item.start for item in placed] == [item.start for item in arrival.media]


def test_who_is_offered_media_says_so() -> None:
    able = Semantics(arriving_media=True, adapters=1).features()
    assert {"arriving-media", "adapters"} <= able
    assert not {"arriving-media", "adapters"} & Semantics().features()
    run = harness_for(subject_factory("scheduler:fcfs")(Configuration()))
    carrying = Arrive((Segment(1, 5),), media=(Media(1, 0, 2),))
    assert run.perform(carrying).status == "skipped"
    assert run.perform(replace(carrying, media=())).status == "done"
