"""Shrinking: the shortest run, in the smallest world, that violates the same property.

Delta debugging over operations, configuration and features.  Since every list of operations is
valid, deleting and lowering never break a case, and a few hundred replays of milliseconds do.
Every replay is audited at each operation, so that the case ends at the operation to blame.

Here is the loop: which passes are made, in which order, until when.  What each of them tries is
told in :mod:`kvproof.fuzz.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz import passes
from kvproof.fuzz.passes import Pass
from kvproof.fuzz.replay import first_violation, installed
from kvproof.fuzz.smallest import Attempt, Patience, Smallest
from kvproof.invariants.case import Case
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory

REPLAYS_MAX = 6000
SECONDS_MAX = 60.0
_SHORT = 7
"""A longer result is searched for once more, the other way round."""
_PASSES: tuple[Pass, ...] = (
    passes.run_rows_at_once,
    passes.delete_chunks,
    passes.drop_features,
    passes.merge_iterations,
    passes.postpone_iterations,
    passes.merge_growth,
    passes.delete_with_blocks,
    passes.loosen_limits,
    passes.shrink_the_world,
    passes.do_without_tiers,
    passes.lower_configuration,
    passes.lower_arguments,
)
_COSTLY: tuple[Pass, ...] = (
    passes.merge_arrivals,
    passes.delete_pairs,
    passes.delete_with_more_room,
    passes.substitute,
)
"""Those that try most."""


class Shrunk(Struct, frozen=True):
    """The result."""

    case: Case
    violation: Violation
    replays: int


def shrink(
    case: Case,
    *,
    replays_max: int = REPLAYS_MAX,
    seconds_max: float = SECONDS_MAX,
    imports: bool = True,
) -> Shrunk | None:
    """Shrink a failing case; None if it does not fail when audited at each operation.

    The best so far when the replays or the time are used up, or at Ctrl-C.  What is wrong before
    the first operation is all that is left then.  ``seconds_max``: see ``Patience``.
    ``imports``: as for ``subject_factory``.
    """
    patience = Patience(seconds_max)
    factory = subject_factory(case.subject, imports=imports)
    with installed(case.fault):
        fresh = first_violation(factory, case.configuration, ())
        found = fresh or first_violation(factory, case.configuration, case.operations)
        if found is None:
            return None
        operations, violations = found
        violation = _of_property(violations, case.violates) or primary(violations)
        attempt = _attempts(factory, violation.property)
        start = replace(case, operations=list(operations), violates=violation.property)
        smallest = _smallest_from(
            partial(Smallest, start, violation, attempt, replays_max, patience), factory
        )
    return Shrunk(smallest.case, smallest.violation, smallest.replays)


def _of_property(violations: Sequence[Violation], name: str | None) -> Violation | None:
    return next((v for v in violations if v.property == name), None)


def _attempts(factory: SubjectFactory, wanted: str) -> Attempt:
    """Runs candidates, and wants a violation of this property."""
    in_vain: set[str] = set()
    """Runs that did not fail: passes come upon the same ones again and again."""

    def attempt(candidate: Case) -> tuple[Case, Violation] | None:
        run = repr((candidate.configuration, candidate.operations))
        if run in in_vain:
            return None
        result = first_violation(factory, candidate.configuration, candidate.operations)
        same = _of_property(result[1], wanted) if result else None
        if result is None or same is None:
            in_vain.add(run)
            return None
        return replace(candidate, operations=list(result[0]), violates=wanted), same

    return attempt


def _smallest_from(start: Callable[[], Smallest], factory: SubjectFactory) -> Smallest:
    """Search from the start, and again where that may help; Ctrl-C ends a search."""
    smallest = start()
    interrupted = True
    with suppress(KeyboardInterrupt):
        _make_all(smallest)
        interrupted = False
    if len(smallest.operations) > _SHORT and not interrupted:
        # Perhaps a dead end: what is deleted first decides where the search gets to.
        again = start()
        with suppress(KeyboardInterrupt):
            _make_all(again, backwards=True)
        again.replays += smallest.replays
        smallest = min(again, smallest, key=lambda found: found.size)
    if len(smallest.operations) <= _SHORT and not interrupted:
        with suppress(KeyboardInterrupt):
            _go_on_with_what_broke_as_well(smallest, factory)
    return smallest


def _make_all(smallest: Smallest, *, backwards: bool = False) -> None:
    """Make all passes, in their order or backwards, until none helps any more.

    Those that try most come when the others do not help: only backwards they also come first.
    """
    order = -1 if backwards else 1
    cheap, costly = _PASSES[::order], _COSTLY[::order]
    if backwards:
        _make(costly, smallest)
    while _make(cheap, smallest) or any(_make([one], smallest) for one in costly):
        pass


def _make(some: Sequence[Pass], smallest: Smallest) -> bool:
    """Make these passes once; whether they helped, and there is time for more."""
    size = smallest.size
    for make in some:
        make(smallest)
    return size != smallest.size and not smallest.is_over()


def _go_on_with_what_broke_as_well(smallest: Smallest, factory: SubjectFactory) -> None:
    """One mistake may break several properties at one operation, and one of them sooner."""
    seen = first_violation(factory, smallest.world, smallest.operations)
    others = {violation.property for violation in seen[1]} if seen else set()
    for other in sorted(others - {smallest.violation.property}):
        smallest.attempt = _attempts(factory, other)
        if passes.delete_in_a_small_world(smallest):
            _make_all(smallest)
            return
