"""One run: a subject, its checker, and what happened.  Every driver goes through here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import StackSummary, extract_tb

from msgspec.structs import replace

from kvproof.invariants.checker import Checker
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    OPERATION_TYPES,
    Abort,
    Admit,
    AnyOperation,
    Complete,
    Evict,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Resume,
    Retire,
    Slow,
    Withhold,
    kind_of,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.subject import Subject
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.shapes import WrongShape

_ASKED_FOR = frozenset(("slots", "swaps", "tiers"))
"""Features that operations may ask for."""
_RESTORING = (Withhold("device"), Withhold("host"), Withhold("disk"), Slow())
"""What ends all that was done to the tiers from outside."""

CRASH = "CRASH"
"""The property that a subject breaks by raising: an operation answers, it does not raise."""


def crash_violation(operation: Operation, error: Exception) -> Violation:
    """What it means that an operation raised."""
    kind = kind_of(operation)
    if isinstance(error, WrongShape):
        return Violation(CRASH, f"{kind} cannot be followed: {error}")
    frames = extract_tb(error.__traceback__)
    told = ": ".join(filter(None, (type(error).__name__, str(error))))
    text = f"{kind} raised {told} ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in "
    hint = "; where there is no room, raise Refused"
    hinted = isinstance(operation, Admit | Resume | Grow) and _passes_adapter(frames)
    return Violation(CRASH, f"{text}{frames[-1].name}){hint * hinted}")


def _passes_adapter(frames: StackSummary) -> bool:
    """Whether what raised was called by :class:`Adapter`, whose methods may refuse."""
    adapter = Path(__file__).with_name("adapter.py")
    return adapter in [Path(frame.filename) for frame in frames[:-1]]


def asks_for(operation: Operation) -> set[str]:
    """The features that a subject needs to do the operation as it stands."""
    slots = tiers = swaps = False
    if isinstance(operation, Admit | Resume):
        slots = operation.slots > 0
        tiers = operation.wait if isinstance(operation, Admit) else operation.late
    elif isinstance(operation, Launch):
        slots = bool(operation.items)
    elif isinstance(operation, Preempt):
        swaps, tiers = operation.swap, operation.late
    elif isinstance(operation, Evict):
        tiers = operation.tier != "device"
    asked = {"slots": slots, "swaps": swaps, "tiers": tiers}
    return {feature for feature, asks in asked.items() if asks}


class Harness:
    """Applies operations to a fresh subject and checks each; stops caring after a violation."""

    def __init__(
        self,
        subject: Subject,
        *,
        audit_interval: int | None = None,
        checked: bool = True,
    ) -> None:
        """``checked=False`` only applies operations: the baseline of the benchmark."""
        self.subject = subject
        self.checker = Checker(subject, interval=audit_interval)
        self.counts = self.checker.counts
        """Operations by kind and status (only of checked runs)."""
        self.violations: Sequence[Violation] = ()
        self.last_events: Sequence[Event] = ()
        self._capable = {
            kind for kind in OPERATION_TYPES if kind.__name__.lower() in subject.capabilities
        }
        lacking = _ASKED_FOR - subject.semantics.features()
        self._lacking = lacking if "arrive" not in subject.capabilities else frozenset[str]()
        """What operations may ask for and the subject does not offer."""
        self._checked = checked
        self._apply = subject.apply
        self._drain_events = subject.drain_events
        self._observe = self.checker.observe

    def perform(self, operation: Operation) -> Outcome:
        """Apply and check one operation.

        Raises CheckerError if a checker stumbles.  A subject that raises is a violation.
        """
        kind = operation.__class__
        if kind not in self._capable or (self._lacking and asks_for(operation) & self._lacking):
            self.checker.pass_over(kind)
            return SKIPPED
        try:
            outcome = self._apply(operation)
            events = self._drain_events()
            if outcome.__class__ is not Outcome:
                raise TypeError(f"an operation is answered by an Outcome, not by {outcome!r}")
        except Exception as error:
            return self._crashed(operation, error)
        self.last_events = events
        if self._checked:
            violations = self._observe(operation, outcome, events)
            if violations:
                self.violations = violations
        return outcome

    @property
    def goals(self) -> dict[str, int]:
        """How often each situation was met."""
        return self.checker.goals.hits

    @property
    def operations(self) -> int:
        """Operations observed."""
        return self.checker.operations

    def checks(self) -> dict[str, int]:
        """How often each property was put to the test."""
        return self.checker.checked()

    def _crashed(self, operation: Operation, error: Exception) -> Outcome:
        violation = crash_violation(operation, error)
        self.violations = (replace(violation, op=self.checker.operations),)
        self.checker.pass_over(operation.__class__)
        return SKIPPED

    def run(self, operations: Iterable[Operation]) -> Sequence[Violation]:
        """Perform operations up to the first violation, then audit; the violations."""
        perform = self.perform
        for operation in operations:
            perform(operation)
            if self.violations:
                return self.violations
        return self.audit()

    def audit(self) -> Sequence[Violation]:
        """A full audit now, unless something has failed already."""
        if not self.violations and self._checked:
            self.violations = self.checker.audit()
        return self.violations

    def drain(self, performed: list[AnyOperation]) -> None:
        """End all requests, steps and transfers, so that quiescence is reached.

        What it takes is appended to ``performed`` as it is done, also if a checker stumbles.
        """

        def until_skipped(operation: AnyOperation) -> None:
            for _ in range(1 << 20):
                if self.violations:
                    return
                performed.append(operation)
                if self.perform(operation).status != "done":
                    return

        def end_transfers() -> None:
            if Complete in self._capable:
                until_skipped(Complete())

        for operation in _RESTORING:
            if type(operation) in self._capable and not self.violations:
                performed.append(operation)
                self.perform(operation)
        end_transfers()
        until_skipped(Retire())
        until_skipped(Launch())
        until_skipped(Retire())
        if Abort not in self._capable:
            until_skipped(Finish(0))
        until_skipped(Abort(0))
        until_skipped(Retire())
        end_transfers()

    def operation_counts(self) -> dict[str, dict[str, int]]:
        """Per operation kind: done, refused, skipped."""
        return {
            kind.__name__.lower(): dict(counts.items())
            for kind, counts in self.counts.items()
            if kind in self._capable or any(counts.values())
        }
