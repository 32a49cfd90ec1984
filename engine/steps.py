"""Steps in flight, and the blocks that they fence off."""

from __future__ import annotations

from kvproof.engine.arithmetic import slot
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

    def written_slots(self, group: int, block_size: int) -> list[int]:
        """The slots that the step writes, item after item."""
        return [
            slot(item.tables[group], position, block_size)
            for item in self.items
            for position in range(item.start, item.end)
        ]

    def read_slots(self, group: int, block_size: int) -> list[list[int]]:
        """For each item the slots that its attention reads: all positions up to its end."""
        return [
            [slot(item.tables[group], position, block_size) for position in range(item.end)]
            for item in self.items
        ]

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.end - item.start for item in self.items)
