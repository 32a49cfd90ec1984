"""What mutants of the smaller files of ``invariants/`` survived before (see docs/mutation.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvproof.invariants.case import Case, dump_case, parse_case
from kvproof.invariants.events import Event
from kvproof.invariants.goals import Goal, _goal
from kvproof.invariants.operations import Arrive, Segment
from kvproof.invariants.scheduling.goals import _goal as _scheduling_goal
from kvproof.invariants.scheduling.story import iterations_story
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Part,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration, Semantics


def test_a_case_without_operations_is_written_as_one() -> None:
    case = Case("engine", Configuration(), [])
    text = dump_case(case)
    assert text.endswith('  "operations": []\n}\n')
    assert parse_case(text) == case


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"groups": "two"}, "groups='two': a value of type int is needed"),
        ({"chunks": 1}, "chunks=1: a value of type bool is needed"),
        ({"release_order": "fifo"}, "release_order='fifo': 'tail_first' or 'any' is needed"),
        ({"block_sizes": (4,), "groups": 2}, "one for each of 2 groups is needed, and no tiers"),
        ({"block_sizes": (4,), "tiers": True}, "one for each of 1 groups is needed, and no tiers"),
    ],
)
def test_a_wrong_word_says_what_is_needed(words: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        Semantics(**words)
    assert str(raised.value).endswith(says)


def plan(number: int, *parts: Part, **more: tuple[int, ...]) -> Scheduled:
    lists = [more.get(name, ()) for name in ("admitted", "resumed", "preempted", "swapped")]
    return Scheduled(number, 0, None, parts, *lists)


@pytest.mark.parametrize(
    ("event", "clause"),
    [
        (RequestArrived(0, 0, 4, 9, 3, 0), "r0 arrives (4 prompt tokens, at most 9 output)"),
        (
            RequestArrived(1, 0, 4, 9, 3, 2),
            "r1 arrives (4 prompt tokens, at most 9 output, 2 samples, priority 2)",
        ),
        (
            RequestArrived(2, 0, 4, 9, 3, 0),
            "r2 arrives (4 prompt tokens, at most 9 output, adapter 3)",
        ),
        (plan(5), "iteration 5 runs nothing"),
        (
            plan(5, Part(0, 4, 0), Part(3, 1, 1), Part(2, 2, 2), admitted=(0,), resumed=(3,)),
            "iteration 5 runs r0 for 4 (admitted), r3 for 1 (resumed), r2 for 2",
        ),
        (
            plan(5, Part(0, 1, 0), preempted=(1, 2), swapped=(3,)),
            "iteration 5 preempts r1, r2 and swaps out r3 and runs r0 for 1",
        ),
        (Completed(6, 0, (1, 2), (2,)), "step 6 ends and with it r2"),
        (Completed(6, 0, (1, 2), ()), ""),
        (RequestCancelled(4), "r4 is aborted"),
        (RunningReset((1, 2)), "a reset preempts r1, r2"),
        (RunningReset(()), ""),
        (
            TransferQueued(7, "promote", 1, 8, 0, 9, 7, 3),
            "transfer 7 (promote of 1 block) is queued",
        ),
        (TransferQueued(7, "store", 2, 8, 0, 9, 7, 3), "transfer 7 (store of 2 blocks) is queued"),
        (TransferDelivered(7, 0), "transfer 7 arrives"),
    ],
)
def test_each_event_of_a_scheduler_is_told_in_a_clause(event: Event, clause: str) -> None:
    prompt = (Segment(1, 4),)
    arrivals = {0: Arrive(prompt), 1: Arrive(prompt, samples=2), 2: Arrive(prompt, adapter=3)}
    assert iterations_story([event], arrivals) == clause


def test_iterations_that_did_the_same_are_told_once_and_the_latest_clauses_only() -> None:
    same = [plan(number, Part(0, 1, 0)) for number in range(3)]
    assert iterations_story(same, {}) == "iterations 0 to 2 run r0 for 1"
    arrivals = [RequestCancelled(number) for number in range(16)]
    told = iterations_story(arrivals, {}).split("; ")
    assert told == [
        "(2 earlier ones left out)",
        *(f"r{number} is aborted" for number in range(2, 16)),
    ]
    assert len(iterations_story(arrivals[:14], {}).split("; ")) == 14


@pytest.mark.parametrize("goal", [_goal, _scheduling_goal])
def test_a_goal_needs_the_operations_that_it_names(goal: Callable[..., Goal]) -> None:
    needing = goal("both", "both are there", "admit", "fork", rare=True)
    assert needing == Goal("both", "both are there", frozenset({"admit", "fork"}), rare=True)
    assert not goal("one", "one is there", "admit").rare


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_who_has_chunks_of_another_size_is_named(tier: str) -> None:
    with pytest.raises(ValueError, match=f"{tier} units of 8 tokens, device blocks of 4"):
        Configuration(blocks=4, block_size=4, **{f"{tier}_unit_tokens": 8})
