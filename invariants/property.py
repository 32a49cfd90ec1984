"""What a check is: a property with an id, its claims, and the hooks through which it looks.

A check's module opens with a docstring of three parts, the single source of what
``kvproof invariants ID`` prints::

    '''ID: title.

    Verifies: …

    Does not verify: …
    '''
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from msgspec import Struct

from kvproof.invariants.books import Books
from kvproof.invariants.events import Event
from kvproof.invariants.operations import OPERATION_TYPES, Operation, Tier
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import Standing, TieredView, View


class Claim(Struct, frozen=True):
    """One statement in the project's own words, and where it comes from."""

    statement: str
    source: str


class Property(Struct, frozen=True):
    """All that a user may want to know about a check."""

    id: str
    title: str
    claims: tuple[Claim, ...]
    verifies: str
    does_not_verify: str
    positive_control: str
    """The seeded fault that this check must catch (``kvproof faults list``)."""


EventHandler = Callable[[Any], None]
OperationHandler = Callable[[Any, Outcome], None]


class Described:
    """What every check says of itself, by its module's docstring and its attributes."""

    claims: ClassVar[tuple[Claim, ...]]
    positive_control: ClassVar[str]

    @classmethod
    def id(cls) -> str:
        return cls.__name__.upper()

    @classmethod
    def describe(cls) -> Property:
        """The property, read from the module's docstring."""
        text = inspect.getdoc(sys.modules[cls.__module__]) or ""
        title = text.partition("\n")[0].partition(": ")[2].rstrip(".")
        return Property(
            cls.id(),
            title,
            cls.claims,
            _part(text, "Verifies"),
            _part(text, "Does not verify"),
            cls.positive_control,
        )


class Check(Described):
    """Base of all checks.  Hooks that a check does not override cost nothing.

    Order within one operation: ``expecting`` handlers (books as before the operation), then for
    each event ``before_event`` handlers, the books, ``after_event`` handlers; then ``conclude``;
    and after every few operations ``settle``, sometimes ``audit``.
    """

    counts_itself: ClassVar[bool] = False
    """``checked`` counts all that was compared; else every look of the check's counts."""
    concludes_on: ClassVar[tuple[type[Operation], ...]] = OPERATION_TYPES
    """Operations after which ``conclude`` looks …"""
    concludes_when: ClassVar[tuple[Status, ...]] = ("done", "refused", "skipped")
    """… if they ended so.  One skipped without an event is passed over: nothing happened."""

    def __init__(
        self,
        books: Books,
        shadows: list[Shadow],
        view: View,
        report: Callable[[Violation], None],
    ) -> None:
        self.books = books
        self.shadows = shadows
        self.view = view
        self.tiered = cast(TieredView, view)
        """The same, of a subject that has tiers below the device."""
        self.groups = books.groups
        self.semantics = books.semantics
        self.block_size = books.block_size
        self.checked = 0
        """How often the check looked at an event; the checker adds operations and audits."""
        self._report = report

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        """What looks at outcomes of this kind, with the books as before the operation."""
        return None

    def expects(self, kind: type[Operation], status: Status) -> bool:
        """Whether the ``expecting`` handler has anything to say about such an operation."""
        return self.expecting(kind) is not None

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        """Handlers that see an event before the books do."""
        return {}

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        """Handlers that see an event after the books did."""
        return {}

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        """Look at what this operation did, where a later look would be too late."""

    def settle(self) -> None:
        """Compare what was touched since the last time with the view.

        Cost must follow what was touched, not the pool's size.
        """

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        """A touched, live request does not stand as it should: is it this check's matter?"""

    def audit(self) -> None:
        """Look at everything."""

    def fail(
        self,
        message: str,
        *,
        group: int = 0,
        block: int | None = None,
        request: int | None = None,
        tier: Tier = "device",
        transfer: int | None = None,
    ) -> None:
        """Report a violation of this check's property."""
        self._report(
            Violation(
                self.id(),
                message,
                group=group,
                block=block,
                request=request,
                tier=tier,
                transfer=transfer,
                block_size=self.groups[group].block_size if self.semantics.block_sizes else 0,
            )
        )

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        """Whether a subject with these semantics promises anything that the check looks at."""
        return True

    @classmethod
    def settles(cls) -> bool:
        """Whether the check compares touched state with the view."""
        return cls.settle is not Check.settle or cls.judge_standing is not Check.judge_standing

    def concludes(self, kind: type[Operation], status: Status) -> bool:
        """Whether ``conclude`` has anything to say about such an operation."""
        return (
            type(self).conclude is not Check.conclude
            and kind in self.concludes_on
            and status in self.concludes_when
        )


def _part(text: str, name: str) -> str:
    match = re.search(rf"^{name}: (.*?)(?=^Does not verify: |\Z)", text, re.S | re.M)
    assert match, f"a check's docstring lacks its part {name!r}"
    return " ".join(match[1].split())
