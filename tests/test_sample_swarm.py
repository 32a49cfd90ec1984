"""The narrow draws for schedulers that take several samples of one prompt."""

from __future__ import annotations

from random import Random

from kvproof.fuzz.sample_swarm import draw_samples
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.operations import Abort, AnyOperation, Arrive
from kvproof.invariants.prompts import prompt_length

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
