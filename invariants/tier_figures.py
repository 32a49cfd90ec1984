"""What happened in a memory hierarchy, in numbers, and which tier has what a prompt asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.slot_books import ENDS, TierBooks

if TYPE_CHECKING:
    from kvproof.invariants.group_books import GroupBooks


class TierFigures:
    """In blocks, and numbers that only go up."""

    def __init__(
        self, groups: Sequence[GroupBooks], host: Sequence[TierBooks], disk: Sequence[TierBooks]
    ) -> None:
        self.moved: dict[str, int] = dict.fromkeys(ENDS, 0)
        """By kind of transfer, of completed ones."""
        self.failed = 0
        self.evictions: dict[str, int] = {"host": 0, "disk": 0}
        self.corrupt = 0
        self.stalls = 0
        self.queries: dict[str, int] = {"device": 0, "host": 0, "disk": 0}
        self.hits: dict[str, int] = {"device": 0, "host": 0, "disk": 0}
        """In rows of prompts, at first admissions."""
        self._indices: list[tuple[str, Sequence[Mapping[int, object]]]] = [
            ("device", [group.key_of_tag for group in groups]),
            ("host", [tier.slot_of for tier in host]),
        ]
        if disk:
            self._indices.append(("disk", [tier.slot_of for tier in disk]))

    def look_up(self, tags: Sequence[int]) -> None:
        """Count, for each row of a prompt, the highest tier that has it."""
        left = len(tags)
        found: list[str] = []
        for tag in tags:
            level = self._level(tag)
            if level is None:
                break
            found.append(level)
        for name, _ in self._indices:
            hits = found.count(name)
            self.queries[name] += left
            self.hits[name] += hits
            left -= hits

    def _level(self, tag: int) -> str | None:
        """The highest tier that has it in every group."""
        for name, indices in self._indices:
            for index in indices:
                if tag not in index:
                    break
            else:
                return name
        return None
