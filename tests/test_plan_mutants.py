"""What mutants of the checks of plans survived before: each test here kills some.

The check alone, over requests that stand where they are said to (see docs/mutation.md).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproof.invariants.books import Books
from kvproof.invariants.events import Event
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.checks.fit import Fit
from kvproof.invariants.scheduling.checks.plan import Plan
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Limits,
    Part,
    PlanRejected,
    RunningReset,
    Scheduled,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation

STANDING = {0: "running", 1: "running", 2: "waiting", 3: "preempted", 4: "swapped"}
HELD_BACK = (5, 6)


class World:
    """Seven requests; 0 and 1 run, a step in flight carries 1, and KV is on its way to 5."""

    def __init__(self, *, chunked_prefill: bool = True) -> None:
        live = {
            number: SimpleNamespace(id=number, state=state, launched=number == 1)
            for number, state in (STANDING | dict.fromkeys(HELD_BACK, "waiting")).items()
        }
        self.books = SimpleNamespace(
            live=live,
            running=[0, 1],
            items=[],
            deferred=[5],
            held_back=lambda request: request.id in HELD_BACK,
            limits=Limits(chunked_prefill=chunked_prefill),
            promises=None,
            configuration=Configuration(),
        )
        self.violations: list[Violation] = []
        self.view = cast(SchedulerView, SimpleNamespace())
        books = cast(SchedulingBooks, self.books)
        self.check = Plan(books, self.view, self.violations.append)

    def tell(self, event: Event) -> list[tuple[str, int | None]]:
        """What is said of it; it is looked at once."""
        self.check.checked = 5
        self.check.before_event()[type(event)](event)
        assert self.check.checked == 6
        return [(violation.message, violation.request) for violation in self.violations]

    def computed(self, event: Scheduled, *items: Any) -> list[tuple[str, int | None]]:
        self.books.items = list(items)
        self.check.after_event()[Scheduled](event)
        return [(violation.message, violation.request) for violation in self.violations]


def scheduled(*run: int, **more: tuple[int, ...]) -> Scheduled:
    names: dict[str, tuple[int, ...]] = {
        "admitted": (),
        "resumed": (),
        "preempted": (),
        "swapped": (),
    }
    parts = tuple([Part(number, 1, number) for number in run])
    return Scheduled(7, 0, None, parts, **(names | more))


def item(number: int, tokens: int, pending: int, *, start: int = 0, sampled: int = 0) -> Any:
    request = SimpleNamespace(id=number, sampled=sampled, sampling=0)
    return SimpleNamespace(request=request, tokens=tokens, pending=pending, start=start)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (scheduled(0, 1), []),
        (scheduled(0, 2, 3, 4, admitted=(2,), resumed=(3, 4)), []),
        (scheduled(preempted=(1,), swapped=(0,)), []),
        (
            scheduled(preempted=(2,)),
            [("an iteration preempts request 2, which is waiting, not running", 2)],
        ),
        (
            scheduled(preempted=(9,)),
            [("an iteration preempts request 9, which is not live, not running", 9)],
        ),
        (
            scheduled(swapped=(3,)),
            [("an iteration swaps out request 3, which is preempted, not running", 3)],
        ),
        (
            scheduled(swapped=(1,)),
            [
                (
                    "iteration 7 swaps out request 1 while a step in flight carries it: its bytes "
                    "are not final",
                    1,
                )
            ],
        ),
        (
            scheduled(preempted=(1, 0), swapped=(0,)),
            [("an iteration takes blocks back from request 0 twice", 0)],
        ),
        (scheduled(1, 0, 0), [("an iteration runs request 0 twice", 0)]),
        (
            scheduled(1, preempted=(0, 1)),
            [("iteration 7 preempts request 1 and runs it", 1)],
        ),
        (
            scheduled(6, admitted=(6,)),
            [
                (
                    "iteration 7 admits request 6, while KV is on its way to request 5, which "
                    "arrived before",
                    6,
                )
            ],
        ),
        (
            scheduled(5, admitted=(5,)),
            [("iteration 7 admits request 5, while KV is on its way to it", 5)],
        ),
        (scheduled(9), [("an iteration runs request 9, which is not live", 9)]),
        (scheduled(2), [("request 2 is run while waiting, but not admitted", 2)]),
        (scheduled(3), [("request 3 is run while preempted, but not resumed", 3)]),
        (
            scheduled(0, resumed=(0,)),
            [("request 0 is said to be resumed, but is not run from there", 0)],
        ),
        (
            scheduled(0, admitted=(0,)),
            [("request 0 is said to be admitted, but is not run from there", 0)],
        ),
        (
            scheduled(3, resumed=(3, 3)),
            [("the requests said to be resumed, [3, 3], are not named once each", None)],
        ),
        (RunningReset((0, 1)), []),
        (
            RunningReset((0, 1, 1)),
            [("an iteration takes blocks back from request 1 twice", 1)],
        ),
        (
            RunningReset((0, 1, 3)),
            [("an iteration preempts request 3, which is preempted, not running", 3)],
        ),
        (RunningReset((1,)), [("a reset left request 0 running", 0)]),
        (PlanRejected("hang", "no answer", ""), [("hang: no answer", None)]),
    ],
)
def test_what_is_said_of_a_plan(event: Event, said: list[tuple[str, int | None]]) -> None:
    assert World().tell(event) == said


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([item(0, 1, 1), item(1, 3, 5)], []),
        (
            [item(0, 1, 0, sampled=2), item(1, 0, 5), item(2, 6, 5)],
            [
                (
                    "iteration 7 runs request 0, which is not ready: 2 output tokens are sampled, "
                    "and no token is pending",
                    0,
                ),
                ("iteration 7 computes 0 tokens of request 1, of which 5 are pending", 1),
                ("iteration 7 computes 6 tokens of request 2, of which 5 are pending", 2),
            ],
        ),
    ],
)
def test_what_is_said_of_the_tokens_of_a_plan(
    items: list[Any], said: list[tuple[str, int | None]]
) -> None:
    assert World().computed(scheduled(), *items) == said


@pytest.mark.parametrize(
    ("part", "is_whole"),
    [
        (item(2, 5, 5, start=4), True),
        (item(2, 4, 5, start=4), False),
        (item(2, 4, 5, sampled=1, start=4), True),
        (item(2, 4, 6, sampled=2, start=4), False),
        (item(2, 1, 9, start=3), True),
        (item(2, 1, 9, start=4), False),
    ],
)
def test_a_prompt_is_whole_but_for_what_was_cached_or_sampled_last(
    part: Any, is_whole: bool
) -> None:
    """Four of its tokens were cached when the plan was made, and may be evicted since."""
    world = World(chunked_prefill=False)
    counted = BlocksCounted(2, 9, 1, 4)
    world.check.after_event()[BlocksCounted](counted)
    said = world.computed(scheduled(), part)
    message = (
        f"iteration 7 computes {part.tokens} of the {part.pending} pending tokens of request 2, "
        "but prefill may not be chunked"
    )
    assert said == ([] if is_whole else [(message, 2)])
    if part.start == 3:
        assert world.computed(scheduled(), part), "counted is what was counted for this iteration"


@pytest.mark.parametrize(
    ("blocks", "cached", "said"),
    [
        (2, 4, []),
        (1, 4, ["9 tokens of request 0, running, are said to take 1 free blocks, but they take 2"]),
        (2, 0, ["0 tokens of request 0, running, are said to be cached, but it is 4"]),
    ],
)
def test_what_is_said_of_blocks_that_were_counted(
    blocks: int, cached: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.books.cache = Books(Configuration(), Semantics())
    fit = Fit(cast(SchedulingBooks, world.books), world.view, world.violations.append)
    monkeypatch.setattr(fit, "_predict", lambda request, tokens: (2, 4))
    fit.checked = 5
    fit.after_event()[BlocksCounted](BlocksCounted(0, 9, blocks, cached))
    assert fit.checked == 6
    assert fit.view is world.view
    seen = [(violation.message, violation.request) for violation in world.violations]
    assert seen == [(message, 0) for message in said]


@pytest.mark.parametrize(
    ("number", "tokens", "predicted"), [(0, 8, (0, 0)), (0, 9, (1, 0)), (3, 13, (3, 8))]
)
def test_what_an_admission_takes(
    number: int, tokens: int, predicted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs has two blocks of four; what was preempted would find two, of which one is free."""
    world = World()
    cache = world.books.cache = Books(Configuration(block_size=4), Semantics())
    cache.requests = {7: SimpleNamespace(tags="tags of request 7")}
    world.books.block_size = 4
    world.books.rows = lambda tokens: -(-tokens // 4)
    world.books.held_blocks = lambda request: 2
    request = world.books.live[number]
    request.cache_request = 7
    fit = Fit(cast(SchedulingBooks, world.books), world.view, world.violations.append)
    found = {(3, "tags of request 7"): SimpleNamespace(rows=2, revived=1)}
    monkeypatch.setattr(fit, "_hits", SimpleNamespace(of=lambda *asked: found[asked[:2]]))
    assert fit._predict(request, tokens) == predicted
    unknown = world.books.live[2]
    unknown.cache_request = 8
    assert fit._predict(unknown, tokens) is None


def test_the_check_has_the_view() -> None:
    world = World()
    assert world.check.view is world.view
