"""The lots of a shard: of each target, the runs that are the shard's.

The runs of a lot are the same whenever and wherever they are made, as long as nothing is found.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kvproof.fuzz.campaigns.records import Campaign, Progress, Target
from kvproof.fuzz.campaigns.store import Store
from kvproof.fuzz.campaigns.targets import seeds_of
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.stateful_tests.totals import Totals

REPLAYED_SHARE = 0.25
"""Part of a slice in which kept runs are run again, as long as there are any left."""
PROBLEMS_MAX = 20
"""Of a slice: what is wrong with a checker is told often enough."""


class Site(Struct, frozen=True):
    """What the lots of one shard have in common."""

    store: Store
    campaign: Campaign
    shard: int
    triage: Triage
    passed_over: frozenset[str]
    """Seeds of runs that are not tried again."""
    clock: Callable[[], float]
    """Tells how long the shard has been running."""
    say: Callable[[str], None]
    """Hears the seed of each run before it is made."""
    versions: Mapping[str, str] = {}
    """Of the user's code, by subject."""


class Lot(ABC):
    """Makes runs number ``shard``, ``shard + shards``, … of one target."""

    def __init__(self, site: Site, target: Target, lines: Sequence[Progress]) -> None:
        """``lines``: of the shard's journal, on this target."""
        self.target = target
        self.site = site
        self.progress = self._no_progress()
        self.charged_seconds = sum(line.cpu_seconds for line in lines)
        """CPU time that it had, and what it was charged beside that."""
        self._drawn = sum(line.drawn for line in lines)
        self._is_new = True
        self.is_spent = False
        """Nothing can be done any more in this process: a fresh one has to go on."""

    def charge(self) -> float:
        """What it had, in proportion to its share: whoever had least is next."""
        return self.charged_seconds / self.target.share

    def work(self, end: float, stop: Callable[[], bool]) -> Progress:
        """Make runs, at least one, until the monotonic clock says ``end``, or until ``stop``.

        A process that is spent makes no more.  What comes before them is no part of the CPU time
        that they took.
        """
        started, charged_from = time.monotonic(), time.process_time()
        progress = self.progress = self._no_progress()
        if self._is_new:
            self._is_new = False
            self.open()
        self.replay_kept(started + REPLAYED_SHARE * (end - started), stop)
        cpu_started = time.process_time()
        self._make_next()
        while time.monotonic() < end and not self.is_spent and not stop():
            self._make_next()
        self.close_slice()
        del progress.totals.problems[PROBLEMS_MAX:]
        progress.totals.seconds = time.monotonic() - started
        progress.cpu_seconds = time.process_time() - cpu_started
        progress.at = self.site.clock()
        self.charged_seconds += time.process_time() - charged_from
        return progress

    def _no_progress(self) -> Progress:
        version = self.site.versions.get(self.target.subject, "")
        return Progress(self.target.name, 0.0, 0.0, Totals(), version=version)

    def _make_next(self) -> None:
        campaign = self.site.campaign
        seed = (
            f"{seeds_of(campaign, self.target)}/{self.site.shard + self._drawn * campaign.shards}"
        )
        self._drawn += 1
        self.progress.drawn += 1
        if seed not in self.site.passed_over:
            self.make(seed)

    def failed(self, finding: str) -> None:
        """Count a failing run of the finding of that id."""
        failures = self.progress.failures
        failures[finding] = failures.get(finding, 0) + 1

    # -- what targets differ in ------------------------------------------------------------------

    def settle_left_over(self) -> None:
        """Triage failing runs of this lot that a killed process has left behind."""

    def open(self) -> None:
        """What comes before the first run."""

    def replay_kept(self, until: float, stop: Callable[[], bool]) -> None:
        """Run some of what was kept before again, until the monotonic clock says so."""

    @abstractmethod
    def make(self, seed: str) -> None:
        """Make the run of that seed."""

    def close_slice(self) -> None:
        """What is still to be added to the progress."""
