"""Steps in flight, and the blocks that they fence off."""

from __future__ import annotations

from kvproof.invariants.events import StepItem


class Step:
    """One launched forward pass over a batch.

    ``fenced`` holds the tables of requests that ended or were preempted while the step was in
    flight: their blocks keep their references until the step is retired, since the step may
    still read and write them (bugs B25, B76, B82 of the catalogue).
    """

    __slots__ = ("fenced", "items", "number")

    def __init__(self, number: int, items: list[StepItem]) -> None:
        self.number = number
        self.items = items
        self.fenced: list[tuple[int, list[list[int]]]] = []

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.end - item.start for item in self.items)
