"""The narrow draws for schedulers that take several samples of one prompt."""

from __future__ import annotations

from random import Random

from kvproof.fuzz.sample_swarm import draw_samples
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.operations import Abort, AnyOperation, Arrive, Segment
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.scheduling.vocabulary import RequestArrived
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.verdict import Violation

RUNS = 200
SCHEDULER = frozenset(("arrive", "schedule", "run", "retire", "abort"))


def arrivals(operations: list[AnyOperation]) -> list[Arrive]:
    return [operation for operation in operations if isinstance(operation, Arrive)]


def test_prompts_are_forked_and_requests_cancelled() -> None:
    drawn = [draw_samples(Random(str(number)))[2] for number in range(RUNS)]
    arriving = [arrival for operations in drawn for arrival in arrivals(operations)]
    assert {arrival.samples for arrival in arriving} == {1, 2, 3}
    assert {prompt_length(arrival.prompt) for arrival in arriving} >= set(range(1, 9))
    cancelling = [any(isinstance(o, Abort) for o in operations) for operations in drawn]
    assert RUNS // 4 < sum(cancelling) < RUNS * 3 // 4


def test_only_schedulers_that_know_samples_are_asked_for_them() -> None:
    for able, some in ((SCHEDULER, False), (SCHEDULER | {"samples"}, True)):
        drawn = [draw_run(str(number), able).operations for number in range(RUNS)]
        forks = [any(a.samples > 1 for a in arrivals(operations)) for operations in drawn]
        assert any(forks) is some


def test_a_seed_draws_the_same_again() -> None:
    able = SCHEDULER | {"samples"}
    assert draw_run("again", able) == draw_run("again", able)


def test_the_story_says_how_many_are_wanted() -> None:
    told = [
        Moment(
            number,
            Arrive((Segment(0, 5),), output=2, samples=samples),
            Outcome("done", None, number),
            [RequestArrived(number, 0, 5, 2, 2, priority)],
        )
        for number, samples, priority in ((0, 1, 0), (1, 3, 0), (2, 2, 7))
    ]
    story = explain(Violation("BATCH", "so and so", op=2), told, 4)
    assert story.partition("\n")[2] == (
        "What happened: r0 arrives (5 prompt tokens, at most 2 output); "
        "r1 arrives (5 prompt tokens, at most 2 output, 3 samples); "
        "r2 arrives (5 prompt tokens, at most 2 output, 2 samples, priority 7)."
    )
