"""What tests of adapters share: a mutant is put into the loaded package, found by drawn runs, and
shrunk; and the names that an adapter needs are looked for.

A folder whose tests want it puts this one on the path in its `conftest.py`, as `tests/sglang` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest

from kvproof.fuzz.search import abilities, found, run_once
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

Original = Callable[..., Any]
REPLAYS = 500
"""In which a case is to be shrunk: not by the clock, which a loaded machine makes short."""


class Mutant(NamedTuple):
    """A change of a loaded package, and as what it may be found."""

    change: Callable[[Original], Original]
    """Given a function, what stands in its place."""
    target: str
    """Where it stands, with dots."""
    properties: Collection[str]


def each_of(mutants: Sequence[Mutant]) -> pytest.MarkDecorator:
    """A test is run for each; its parameter is ``mutant``."""
    return pytest.mark.parametrize("mutant", mutants, ids=[m.change.__name__ for m in mutants])


def first_failure(
    name: str, seed: str, runs: int, wanted: Collection[str] = ()
) -> tuple[Case, Violation] | None:
    """Of drawn runs of a subject, the first that breaks a property, or one of the ``wanted``."""
    factory, totals = subject_factory(name), Totals()
    able = abilities(factory)
    for number in range(runs):
        draw = draw_run(f"{seed}/{number}", able)
        failure = run_once(factory, draw, totals)
        assert not totals.problems
        if failure is not None and (not wanted or failure[1].property in wanted):
            return found(name, draw, failure, None).case, failure[1]
    return None


def assert_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Mutant,
    name: str,
    seed: str,
    *,
    runs: int = 200,
    operations: int = 12,
) -> Case:
    """A mutant is found in so many runs, and shown as one of its properties by a short case."""
    monkeypatch.setattr(mutant.target, mutant.change(resolve_name(mutant.target)))
    failure = first_failure(name, seed, runs, mutant.properties)
    assert failure is not None, "not found"
    shrunk = shrink(failure[0], replays_max=REPLAYS, seconds_max=600)
    assert shrunk is not None
    assert shrunk.violation.property in mutant.properties, shrunk.violation
    assert len(shrunk.case.operations) <= operations
    return shrunk.case


def moved_functions(parameters: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Functions that are not where they were, and parameters that they no longer have."""
    for function, names in parameters.items():
        try:
            there = set(inspect.signature(resolve_name(function)).parameters)
        except (AttributeError, ImportError):
            yield function
            continue
        yield from (f"{function}({name})" for name in names if name not in there)
