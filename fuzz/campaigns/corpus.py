"""The corpus of a target: runs kept since they showed something new.

A run is kept up to the operation that showed it.  The cases serve as a regression suite, as what
coverage of code is measured with, and, when a campaign goes on, to know what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

from msgspec.structs import replace

from kvproof.fuzz.campaigns.novelty import Watch
from kvproof.fuzz.campaigns.store import Store
from kvproof.fuzz.search import Failure, run_once
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.totals import Totals

CASES_MAX = 400
"""Of one target: replayed within seconds."""


class Corpus:
    """What one shard knows of the corpus of a target."""

    def __init__(self, store: Store, target: str) -> None:
        self._store = store
        self._target = target
        self._seen: set[Path] = set()
        self.watch = Watch()
        """Knows all that was seen."""

    def replay(
        self,
        factory: SubjectFactory,
        say: Callable[[str], None] = lambda seed: None,
        passed_over: Container[str] = (),
        problems: list[str] | None = None,
    ) -> list[tuple[Case, Failure]]:
        """Run what is there and was not run yet, short cases first; those that fail now.

        ``say`` hears the seed of each before it is run, ``problems`` why the verdict on one is
        unknown.  Raises InputError if a file cannot be read.
        """
        failing, totals = [], Totals()
        for path, case in self._store.kept(self._target, besides=self._seen):
            self._seen.add(path)
            if case.seed in passed_over:
                continue
            say(case.seed)
            draw = Draw(case.seed, case.configuration, case.features, case.operations)
            try:
                failure = run_once(factory, draw, totals, self.watch.perform)
            except (Exception, SystemExit) as error:  # a subject that cannot even be made
                totals.problems.append(f"run {draw.seed}: {type(error).__name__}: {error}")
                continue
            if failure is not None:
                failing.append((case, failure))
        self.watch.taken()
        if problems is not None:
            problems += totals.problems
        return failing

    def offer(self, case: Case) -> bool:
        """Keep the run that was just watched, if it showed something new; whether it was kept."""
        until = self.watch.novel_until
        if not until or len(self._seen) >= CASES_MAX:
            return False
        kept = replace(case, operations=case.operations[:until])
        self._seen.add(self._store.keep(self._target, kept))
        return True
