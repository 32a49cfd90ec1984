"""What tests of adapters share: a mutant is put into the loaded package, found by drawn runs, and
shrunk; and the names that an adapter needs are looked for.

pytest has its folder on the path (`pyproject.toml`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kvproof.fuzz.search import abilities, found, run_once
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import Abort, Arrive
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
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


def needs(name: str) -> None:
    """Skip the module where what that subject drives is not installed."""
    try:
        subject_factory(name)
    except (InputError, SubjectUnavailable) as error:
        pytest.skip(str(error), allow_module_level=True)


def each_of(mutants: Sequence[Mutant]) -> pytest.MarkDecorator:
    """A test is run for each; its parameter is ``mutant``."""
    return pytest.mark.parametrize("mutant", mutants, ids=[m.change.__name__ for m in mutants])


def as_drawn(draw: Draw) -> Draw:
    return draw


def one_output_each(draw: Draw) -> Draw:
    """The run without several outputs of a request, and without cancellations."""
    operations = [
        replace(o, samples=1) if isinstance(o, Arrive) else o
        for o in draw.operations
        if not isinstance(o, Abort)
    ]
    return replace(draw, operations=operations)


def failures(
    name: str,
    seed: str,
    runs: int,
    *,
    drawn: Callable[[Draw], Draw] = as_drawn,
    totals: Totals | None = None,
) -> Iterator[tuple[Case, Violation]]:
    """Drawn runs of a subject that break a property; ``totals`` counts what all of them reach."""
    factory = subject_factory(name)
    able, totals = abilities(factory), totals or Totals()
    for number in range(runs):
        draw = drawn(draw_run(f"{seed}/{number}", able))
        failure = run_once(factory, draw, totals)
        assert not totals.problems
        if failure is not None:
            yield found(name, draw, failure, None).case, failure[1]


def is_known(violation: Violation, known: Sequence[str]) -> bool:
    """Whether its message has the words of a defect that the release has anyway."""
    return any(words in violation.message for words in known)


def first_failure(
    name: str,
    seed: str,
    runs: int,
    wanted: Collection[str] = (),
    *,
    drawn: Callable[[Draw], Draw] = as_drawn,
    known: Sequence[str] = (),
) -> tuple[Case, Violation] | None:
    """The first that is not known, and breaks one of the ``wanted`` properties if there are any."""
    return next(
        (
            (case, violation)
            for case, violation in failures(name, seed, runs, drawn=drawn)
            if (not wanted or violation.property in wanted) and not is_known(violation, known)
        ),
        None,
    )


def found_and_shrunk(
    name: str,
    seed: str,
    runs: int,
    wanted: Collection[str],
    *,
    operations: int = 12,
    replays: int = REPLAYS,
    drawn: Callable[[Draw], Draw] = as_drawn,
    known: Sequence[str] = (),
) -> tuple[Case, Violation]:
    """What is wrong is found in so many runs, and shown as one of these properties by a case of so
    many operations at most."""
    failure = first_failure(name, seed, runs, wanted, drawn=drawn, known=known)
    assert failure is not None, "not found"
    shrunk = shrink(failure[0], replays_max=replays, seconds_max=600)
    assert shrunk is not None
    assert shrunk.violation.property in wanted, shrunk.violation
    assert len(shrunk.case.operations) <= operations
    return shrunk.case, shrunk.violation


def assert_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant, name: str, seed: str
) -> None:
    monkeypatch.setattr(mutant.target, mutant.change(resolve_name(mutant.target)))
    found_and_shrunk(name, seed, 200, mutant.properties)


def moved_functions(parameters: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Functions that are not where they were, and parameters that they no longer have."""
    for function, names in parameters.items():
        try:
            there = set(inspect.signature(resolve_name(function)).parameters)
        except (AttributeError, ImportError):
            yield function
            continue
        yield from (f"{function}({name})" for name in names if name not in there)
