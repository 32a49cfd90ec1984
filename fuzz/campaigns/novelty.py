"""What counts as new: an operation that leads from one abstract state to another.

The abstract state is small and finite, and read from the checkers' books, so that it means the
same for every subject:

* ``running`` 0, 1 or more requests;
* ``waiting``: a request is preempted, swapped out or, of a scheduler, not admitted yet;
* ``in-flight``: a step is launched and not retired;
* ``full``: no block is free;
* ``cached``: a free block holds findable content;
* ``copying``: a transfer between tiers is under way.

A transition is (operation, state before, state after, outcome).  Coverage of transitions levels
off where uncovered code lines have long run out, and is what a campaign is measured by.  The
situations of the must-hit catalogue count as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvproof.invariants.books import Books
from kvproof.invariants.operations import AnyOperation, Operation
from kvproof.invariants.outcomes import Status
from kvproof.stateful_tests.harnesses import AnyHarness
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness

Transition = tuple[type[Operation], int, int, Status]
Feature = Transition | str
"""A transition, or the id of a situation."""

_WAITING, _IN_FLIGHT, _FULL, _CACHED, _COPYING = (3 << bit for bit in range(5))
_RUNNING = ("0", "1", "2+")
_BITS = {
    "w": (_WAITING, "waiting"),
    "s": (_IN_FLIGHT, "in-flight"),
    "f": (_FULL, "full"),
    "c": (_CACHED, "cached"),
    "t": (_COPYING, "copying"),
}
"""A state is a number below 96: the running requests, 0 to 2, plus one of these for each."""


def state_code(state: int) -> str:
    """``1wf``: one running, somebody waiting, the pool full."""
    letters = [letter for letter, (bit, _) in _BITS.items() if state // bit % 2]
    return f"{state % 3}{''.join(letters)}"


def state_words(code: str) -> str:
    """``1 running, waiting, full`` for ``1wf``."""
    words = [_BITS[letter][1] for letter in code[1:]]
    return ", ".join([f"{_RUNNING[int(code[0])]} running", *words])


def transition_code(transition: Transition) -> str:
    """As it stands in journals: ``grow | 1s | 1sf | done``."""
    kind, before, after, status = transition
    return f"{kind.__name__.lower()} | {state_code(before)} | {state_code(after)} | {status}"


def state_reader(harness: AnyHarness) -> Callable[[], int]:
    """What tells the abstract state of this run, now."""
    if isinstance(harness, SchedulingHarness):
        return _of_scheduler(harness)
    return _of_cache(harness.checker.books)


def _of_cache(books: Books) -> Callable[[], int]:
    group, tiers = books.groups[0], books.tiers
    no_transfers: dict[int, object] = {}
    transfers = no_transfers if tiers is None else tiers.in_flight

    def state() -> int:
        running = len(books.running)
        return (
            (running if running < 2 else 2)
            + (_WAITING if books.preempted else 0)
            + (_IN_FLIGHT if books.steps else 0)
            + (0 if group.free else _FULL)
            + (_CACHED if group.cached_free else 0)
            + (_COPYING if transfers else 0)
        )

    return state


def _of_scheduler(harness: SchedulingHarness) -> Callable[[], int]:
    books, cache_state = harness.checker.books, _of_cache(harness.cache.checker.books)

    def state() -> int:
        own = cache_state()
        return own if own // _WAITING % 2 or not books.waiting else own + _WAITING

    return state


class Watch:
    """Performs runs, and counts the transitions that come about."""

    def __init__(self) -> None:
        self.known: set[Feature] = set()
        self.counts: Counter[Transition] = Counter()
        """Since they were taken."""
        self.novel_until = 0
        """Operations of the latest run up to the last one that showed something new; 0 for none."""

    def perform(self, harness: AnyHarness, operations: Sequence[AnyOperation]) -> None:
        """As ``harness.run``."""
        perform, read = harness.perform, state_reader(harness)
        known, counts, fresh = self.known, self.counts, set[Feature]()
        self.novel_until = novel_until = performed = 0
        before = read()
        for operation in operations:
            status = perform(operation).status
            performed += 1
            if harness.violations:
                return
            if status == "skipped":
                continue
            after = read()
            transition = (operation.__class__, before, after, status)
            counts[transition] += 1
            if transition not in known and transition not in fresh:
                fresh.add(transition)
                novel_until = performed
            before = after
        if harness.audit():
            return
        reached = {goal for goal, hits in harness.goals.items() if hits} - known
        if reached:
            fresh |= reached
            novel_until = performed
        known |= fresh
        self.novel_until = novel_until

    def taken(self) -> dict[str, int]:
        """The counts, by their codes; they start again."""
        counts = {transition_code(t): n for t, n in self.counts.items()}
        self.counts.clear()
        return counts
