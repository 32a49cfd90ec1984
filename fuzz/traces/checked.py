"""A trace replayed with all checks on; and, if something fails, the case that shows it.

Operations of a long trace are not kept: a hundred thousand requests make tens of millions.  When
a check fails, the replay, which is deterministic, is done again up to that operation, this time
keeping what it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct

from kvproof.fuzz.traces.figures import TraceResult
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.fuzz.traces.replay import DEFAULT_BUDGET_TOKENS, Replay
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import subject_factory


class _ViolatedError(Exception):
    """A check failed: the replay ends here."""


class _EnoughError(Exception):
    """As many operations are recorded as were wanted."""


class CheckedTrace(Struct, frozen=True):
    """What the replay showed."""

    result: TraceResult
    violations: Sequence[Violation]
    ops: int
    seconds: float
    operations: dict[str, dict[str, int]]
    goals: dict[str, int]
    checked: dict[str, int]
    case: Case | None
    """The operations up to the violation."""
    problem: str | None
    """Why the verdict is unknown: a checker stumbled."""


class TraceRun:
    """One checked replay; ``replay.finished`` tells how far it is."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        configuration: Configuration,
        *,
        subject: str = "engine",
        budget_tokens: int = DEFAULT_BUDGET_TOKENS,
        cache_dtype: str = "bfloat16",
    ) -> None:
        self._trace = trace
        self._configuration = configuration
        self._subject = subject
        self._factory = subject_factory(subject)
        self._budget_tokens = budget_tokens
        self._cache_dtype = cache_dtype
        self._harness = Harness(self._factory(configuration))
        self.replay = self._replay(self._harness, self._perform)

    def _replay(self, harness: Harness, perform: Callable[[Operation], Outcome]) -> Replay:
        return Replay(
            self._trace,
            harness.subject,
            perform,
            budget_tokens=self._budget_tokens,
            cache_dtype=self._cache_dtype,
        )

    def _perform(self, operation: Operation) -> Outcome:
        harness = self._harness
        outcome = harness.perform(operation)
        if harness.violations:
            raise _ViolatedError
        return outcome

    def run(self) -> CheckedTrace:
        """Replay to the end, or to the first violation."""
        harness, problem = self._harness, None
        started = time.perf_counter()
        try:
            self.replay.run()
            harness.audit()
        except _ViolatedError:
            pass
        except CheckerError as error:
            problem = str(error)
        seconds = time.perf_counter() - started
        return CheckedTrace(
            self.replay.result(),
            harness.violations,
            harness.checker.operations,
            seconds,
            harness.operation_counts(),
            harness.checker.goals.hits,
            harness.checker.checked(),
            self._case() if harness.violations else None,
            problem,
        )

    def _case(self) -> Case:
        """Do it again, up to the violation, and keep the operations."""
        wanted = self._harness.violations[0].op + 1
        operations: list[Operation] = []
        harness = Harness(self._factory(self._configuration), checked=False)

        def perform(operation: Operation) -> Outcome:
            if len(operations) == wanted:
                raise _EnoughError
            operations.append(operation)
            return harness.perform(operation)

        with suppress(_EnoughError):
            self._replay(harness, perform).run()
        return Case(
            self._subject,
            self._configuration,
            operations,  # type: ignore[arg-type]
            violates=self._harness.violations[0].property,
        )
