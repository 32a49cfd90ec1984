"""What a seeded fault is, and how it is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

_calls: Counter[str] = Counter()

Replacement = Callable[..., Any]
"""The faulty method; takes the original one first, then what the original takes."""


class Fault(Struct, frozen=True):
    """One planted mistake."""

    id: str
    property: str
    """The property that must be among those violated at the first bad operation."""
    source: str
    """The public bug that it is modelled on: its number in the project's catalogue, and where it
    was reported."""
    summary: str
    target: Any
    """Class or module of the engine …"""
    method: str
    """… and the name of the method or function in it."""
    replacement: Replacement
    shortest: int
    """Operations of the shortest known run that shows it."""
    subject: str = "engine"
    """What is to be driven to see it."""
    also: tuple[str, ...] = ()
    """Properties that the same mistake may break first, in other runs."""

    def calls(self) -> int:
        """How often the faulty method was called, in this process."""
        return _calls[self.id]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The fault in place of the method, for as long as the context is open.

        Not for use from two threads at once: the class or module itself is changed.
        """
        original = self.target.__dict__[self.method]
        replacement = self.replacement

        def faulty(*args: Any, **kwargs: Any) -> Any:
            _calls[self.id] += 1
            return replacement(original, *args, **kwargs)

        setattr(self.target, self.method, faulty)
        try:
            yield
        finally:
            setattr(self.target, self.method, original)


def enter(
    catalogue: list[Fault],
    target: Any,
    method: str,
    *,
    property: str,
    source: str,
    shortest: int,
    subject: str = "engine",
    also: tuple[str, ...] = (),
) -> Callable[[Replacement], Replacement]:
    """Enter the decorated replacement into a catalogue; its docstring is the summary."""

    def decorate(replacement: Replacement) -> Replacement:
        name = replacement.__name__.replace("_", "-")
        summary = " ".join((replacement.__doc__ or "").split())
        catalogue.append(
            Fault(
                name,
                property,
                source,
                summary,
                target,
                method,
                replacement,
                shortest,
                subject,
                also,
            )
        )
        return replacement

    return decorate
