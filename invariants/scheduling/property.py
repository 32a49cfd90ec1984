"""What a scheduling check is: a property with an id, its claims, and the hooks through which it
looks.

Its module opens with a docstring as :mod:`kvproof.invariants.property` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from kvproof.invariants.events import Event
from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Described, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import Promises
from kvproof.invariants.verdict import Violation


class SchedulingCheck(Described):
    """Base of all scheduling checks.  Hooks that a check does not override cost nothing.

    For each event: ``before_event`` handlers, the books, ``after_event`` handlers; after each
    operation ``conclude``; and sometimes ``audit``.
    """

    concludes_on: ClassVar[tuple[type[Operation], ...]] = ()
    """Operations after which ``conclude`` looks."""

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        self.books = books
        self.view = view
        self.limits = books.limits
        self.promises = books.promises
        self.configuration = books.configuration
        self.checked = 0
        """How often the check compared something."""
        self._report = report

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        """Handlers that see an event before the books do."""
        return {}

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        """Handlers that see an event after the books did."""
        return {}

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        """Look at how an operation ended."""

    def audit(self) -> None:
        """Compare everything with the view."""

    def fail(self, message: str, *, request: int | None = None) -> None:
        """Report a violation of this check's property."""
        self._report(Violation(self.id(), message, request=request))

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        """Whether a policy with these promises promises anything that the check looks at."""
        return True
