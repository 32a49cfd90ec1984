"""Subjects whose steps run in stream order: their releases fence nothing, and are right.

The engine is made such a subject: it frees at once what launched steps use.  Where it declares
``stream_order``, only what is wrong in any order is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.request import Request
from kvproof.fuzz.replay import installed
from kvproof.fuzz.search import abilities, run_once
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.checks.pin import Pin
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.events import StepItem, TransferStarted
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Complete,
    Evict,
    Launch,
    Offload,
    Preempt,
    Promote,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals


class InStreamOrder(EngineSubject):
    """Declares what the engine of these tests does."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.semantics = replace(self.semantics, fences_releases=False, stream_order=True)


def _free_at_once(self: Engine, request: Request) -> None:
    tables = request.tables
    request.tables = [[] for _ in self.pools]
    self._release_tables(request.id, tables, None)


@pytest.fixture(autouse=True)
def unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_release", _free_at_once)


def first_failures(
    subject: Callable[[Configuration], EngineSubject], runs: int = 60
) -> list[Violation]:
    """Of as many drawn runs without copies, which wait for no step, what each broke first."""
    able, seen = abilities(subject) - {"swaps"}, []
    for number in range(runs):
        totals = Totals()
        failure = run_once(subject, draw_run(f"stream/{number}", able, tiers_share=0), totals)
        assert not totals.problems
        seen += [failure[1]] if failure is not None else []
    return seen


def prompt(length: int, source: int = 1) -> tuple[Segment, ...]:
    return (Segment(source, length),)


def broken(operations: Sequence[AnyOperation], **sizes: Any) -> list[str]:
    """Properties that the run violates, audited at each operation."""
    configuration = Configuration(**({"blocks": 4, "block_size": 2} | sizes))
    harness = Harness(InStreamOrder(configuration), audit_interval=1)
    return [violation.property for violation in harness.run(operations)]


REUSED_IN_FLIGHT = (
    Admit(prompt(8, 1)),
    Launch(),
    Abort(0),
    Admit(prompt(8, 2)),
    Launch(),
    Retire(),
    Retire(),
)
"""The second request writes all blocks of the first one while that one's step is in flight."""


def test_what_a_step_in_flight_uses_may_be_handed_out() -> None:
    assert broken(REUSED_IN_FLIGHT) == []
    assert first_failures(InStreamOrder) == []


def test_without_the_word_it_may_not() -> None:
    assert {violation.property for violation in first_failures(EngineSubject, 10)} >= {"PIN"}


def test_a_step_that_reads_what_was_freed_before_its_launch_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, schedule = Engine._release, Engine._schedule
    before: dict[int, list[int]] = {}

    def remember(self: Engine, request: Request) -> None:
        before[request.id] = request.tables[0]
        release(self, request)

    def read_from_there(self: Engine, request: Request, tokens: int) -> StepItem:
        item = schedule(self, request, tokens)
        written = item.start // request.block_size
        table = [*before.get(request.id, [])[:written], *request.tables[0][written:]]
        return StepItem(item.request, item.epoch, item.start, item.end, (table,))

    monkeypatch.setattr(Engine, "_release", remember)
    monkeypatch.setattr(Engine, "_schedule", read_from_there)
    operations = (
        Admit(prompt(5)),
        Launch(),
        Preempt(0),
        Admit(prompt(3, 2)),
        Resume(0),
        Retire(),
        Launch(budget=2),
        Launch(),
    )
    assert broken(operations, blocks=6)[:1] == [Prov.id()]


def test_a_late_result_that_is_applied_is_found() -> None:
    with installed("late-result-is-applied"):
        assert "RESUME" in {violation.property for violation in first_failures(InStreamOrder)}


COPIED_OVER_A_STEP = (
    Admit(prompt(5, 1)),
    Launch(),
    Retire(),
    Offload(),
    Complete(0),
    Abort(0),
    Evict(4),
    Admit(prompt(8, 2)),
    Launch(),
    Abort(0),
    Promote(prompt(5, 1)),
)


def test_a_copy_into_what_a_step_in_flight_uses_is_found() -> None:
    assert broken(COPIED_OVER_A_STEP, host_blocks=4, offload="prefix") == [Pin.id()]
    finished = (*COPIED_OVER_A_STEP[:-1], Retire(), COPIED_OVER_A_STEP[-1])
    assert broken(finished, host_blocks=4, offload="prefix") == []


def test_a_copy_of_what_a_step_in_flight_writes_is_found() -> None:
    configuration = Configuration(blocks=4, block_size=2, host_blocks=4, offload="prefix")
    harness = Harness(InStreamOrder(configuration), audit_interval=1)
    assert not harness.run([Admit(prompt(5)), Launch()])
    pin = next(check for check in harness.checker.checks if isinstance(check, Pin))
    (step,) = harness.checker.books.steps
    copy = TransferStarted(0, "store", 0, [step.tables[0][0][1]], [0])
    pin.before_event()[TransferStarted](copy)
    (violation,) = harness.checker.violations
    assert "reads device block" in violation.message
