"""The corpus of a target: runs kept since they showed something new.

A run is kept up to the operation that showed it.  The cases serve as a regression suite, as what
coverage of code is measured with, and, when a campaign goes on, to know what is new: each shard
runs those again that it has kept, a few in each slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from msgspec.structs import replace

from kvproof.fuzz.campaigns.novelty import Watch
from kvproof.fuzz.campaigns.store import Store
from kvproof.fuzz.search import Failure, run_once
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case, load_case
from kvproof.stateful_tests.subjects import SubjectFactory
from kvproof.stateful_tests.totals import Totals

CASES_MAX = 400
"""Of one target and shard: replayed within seconds."""


class Corpus:
    """What one shard knows of the corpus of a target."""

    def __init__(self, store: Store, target: str) -> None:
        self._store = store
        self._target = target
        self._cases: set[Path] = set()
        self._pending: list[Path] = []
        """To be run again; the next is last."""
        self.watch = Watch()
        """Knows all that was seen in the runs that are kept, once they are replayed."""

    @property
    def pending(self) -> int:
        """Kept runs that are still to be run again; nothing is kept beside them before."""
        return len(self._pending)

    def expect(self, own: Iterable[Path]) -> None:
        """Take note of the files that this shard is to replay, short ones first."""
        self._pending = [*own][::-1]
        self._cases.update(self._pending)

    def replay(
        self,
        factory: SubjectFactory,
        until: float,
        stop: Callable[[], bool],
        say: Callable[[str], None],
        passed_over: Container[str],
        problems: list[str],
    ) -> list[tuple[Case, Failure]]:
        """Run at least one again, until the monotonic clock says so; those that fail now.

        ``say`` hears the seed of each before it is run, ``problems`` why the verdict on one is
        unknown.  Raises InputError if a file cannot be read.
        """
        failing, totals, is_first = [], Totals(), True
        while self._pending and (is_first or time.monotonic() < until) and not stop():
            is_first = False
            case = load_case(self._pending.pop())
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
        problems += totals.problems
        return failing

    def offer(self, case: Case) -> bool:
        """Keep the run that was just watched, if it showed something new; whether it was kept."""
        until = self.watch.novel_until
        if not until or len(self._cases) >= CASES_MAX:
            return False
        kept = replace(case, operations=case.operations[:until])
        self._cases.add(self._store.keep(self._target, kept))
        return True
