"""The naive model: what a request is by the meaning of operations alone, and steps in flight."""

from __future__ import annotations

from kvproof.invariants.events import StepItem
from kvproof.invariants.tags import Tags
from kvproof.invariants.view import RequestState, Standing

_NONE: frozenset[int] = frozenset()


class RequestModel:
    """What a live request must look like."""

    __slots__ = (
        "allocated",
        "asked",
        "cached_tokens",
        "computed",
        "departing",
        "epoch",
        "id",
        "input_tokens",
        "last_step",
        "launched",
        "loaded",
        "loading",
        "order",
        "outdated",
        "running",
        "scheduled",
        "settled",
        "slots",
        "suspended",
        "swapped",
        "tables",
        "tags",
        "trusted_rows",
        "verified",
    )

    def __init__(self, number: int, order: int, tags: Tags[int], groups: int) -> None:
        self.id = number
        self.order = order
        """Rank of its first admission."""
        self.tags = tags
        self.input_tokens = len(tags)
        self.asked = self.input_tokens
        """Tokens that it was admitted or resumed with, the latest time."""
        self.cached_tokens = 0
        self.computed = 0
        self.scheduled = 0
        """Tokens computed, or being computed by a step in flight."""
        self.settled = self.input_tokens
        """Leading tokens that it has whatever becomes of steps in flight, when it was preempted."""
        self.epoch = 0
        self.launched = 0
        """Steps in flight that carry it, of its present epoch."""
        self.last_step = -1
        self.running = True
        self.swapped = False
        self.slots = self.input_tokens
        """Positions that have blocks while it runs."""
        self.departing = _NONE
        """Transfers in flight that copy it to the host …"""
        self.loading = _NONE
        """… and those that copy it back."""
        self.loaded = False
        """Whether a copy brought the last of what is computed, and no step has run it since."""
        self.suspended = 0
        """Computed tokens that were swapped out, until they are back or lost."""
        self.outdated = 0
        """Leading tokens that were computed before the prefix cache was reset."""
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.verified = [0] * groups
        """Per group: leading positions whose slots are known to hold the right tags."""
        self.trusted_rows = [0] * groups
        """Per group: leading rows that launched steps were seen to read through this table."""

    @property
    def length(self) -> int:
        return len(self.tags)

    @property
    def begins(self) -> int:
        """Where its next step begins, at the earliest: where a copy brought all that its engine
        may know of it, the last token is computed anew, for what follows."""
        all_loaded = self.loaded and self.scheduled >= self.settled
        return self.scheduled - all_loaded

    def settle(self) -> None:
        """It is preempted: what steps in flight sample for it may be dropped, or come later."""
        if self.scheduled == self.computed:
            self.settled = self.length
        else:
            self.settled = max(self.settled, min(self.computed + 1, self.length))

    def lose(self) -> None:
        """Nothing of it is computed any more."""
        self.loaded = False
        self.computed = self.scheduled = self.suspended = self.outdated = 0

    def standing(self, *block_sizes: int) -> Standing:
        """What the subject's view of this request should be, with blocks of this size; or of these,
        by group."""
        length = len(self.tags)
        if self.swapped:
            return "swapped", length, self.computed, (0,) * len(self.tables)
        if not self.running:
            return "preempted", length, 0, (0,) * len(self.tables)
        state: RequestState = "loading" if self.loading else "running"
        rows = tuple([(self.slots + size - 1) // size for size in block_sizes])
        if len(rows) < len(self.tables):
            rows *= len(self.tables)
        return state, length, self.computed, rows


class Figures:
    """What happened so far, in numbers that only go up, and the size of the latest batch."""

    __slots__ = (
        "admissions",
        "batch_size",
        "evictions",
        "iterations",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "suspensions",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.evictions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0
        self.suspensions = 0
        """Of the preemptions: those with a swap."""
        self.iterations = 0
        self.batch_size = 0


class StepModel:
    """A step in flight: its items, each with the request model and the tables of its time."""

    __slots__ = ("fenced", "items", "number", "tables")

    def __init__(
        self,
        number: int,
        items: list[tuple[StepItem, RequestModel]],
        tables: list[tuple[list[int], ...]],
    ) -> None:
        self.number = number
        self.items = items
        self.tables = tables
        """The requests' tables at launch; they only grow (a copy-on-write starts a new list)."""
        self.fenced: list[tuple[int, list[list[int]]]] = []
