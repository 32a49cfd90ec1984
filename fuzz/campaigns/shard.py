"""One shard of a campaign: the loop that a worker process runs.

Time is shared among targets in slices: the one that has had the least CPU time, in proportion to
its share, is next.  A slice ends with a line in the journal.  Which runs a shard makes of a target
follows from seed and shard alone: numbers ``shard``, ``shard + shards``, …; how far it gets, from
time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from kvproof.fuzz.campaigns.conditions import write_conditions
from kvproof.fuzz.campaigns.kernel_lot import KernelLot
from kvproof.fuzz.campaigns.known import read_ledger
from kvproof.fuzz.campaigns.lots import Lot, Site
from kvproof.fuzz.campaigns.records import Campaign, PassedOver, Progress
from kvproof.fuzz.campaigns.store import Journal, Store, read_lines
from kvproof.fuzz.campaigns.subject_lot import SubjectLot
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.fuzz.campaigns.versions import code_versions
from kvproof.fuzz.replay import installed
from kvproof.invariants.errors import InputError

SLICE_SECONDS = (0.5, 20.0)
"""A slice is a sixtieth of the time that the shard has been running, within these bounds: every
target comes soon, and the journal of a day stays small."""
BUSY_SECONDS = 5.0


class ShardJob(Struct, frozen=True):
    """What a worker is to do."""

    folder: str
    shard: int
    seconds: float
    known: str | None = None
    """File with the ledger of known issues."""


def run_job(job: ShardJob, stop: Callable[[], bool] = lambda: False) -> bool:
    """Run the shard for so long, or until ``stop`` says so; whether a fresh process has to go on.

    Raises InputError, or OSError.
    """
    store = Store(Path(job.folder))
    campaign = store.campaign()
    if campaign is None:
        raise InputError(f"{job.folder}: no campaign")
    store.make()
    ledger = read_ledger(Path(job.known) if job.known else None)
    with installed(campaign.fault):
        shard = Shard(store, campaign, job.shard, Triage(store, ledger, job.shard))
        try:
            return shard.run(job.seconds, stop)
        finally:
            shard.close()


class Shard:
    """Goes on where its journal ends."""

    def __init__(self, store: Store, campaign: Campaign, number: int, triage: Triage) -> None:
        self._journal = _opened(store, number)
        self._now = os.open(store.present(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        lines = read_lines(store.journal(number), Progress)
        self._before = max([line.at for line in lines], default=0.0)
        self._started = time.monotonic()
        path = store.passed_over(number)
        passed_over = read_lines(path, PassedOver) if path.exists() else []
        seeds = frozenset(line.seed for line in passed_over)
        versions = code_versions(campaign.targets)
        write_conditions(store.folder, number, versions)
        site = self._site = Site(
            *(store, campaign, number, triage, seeds, self.at, self._say), versions
        )
        self._lots: list[Lot] = [
            (KernelLot if target.subject == KERNELS else SubjectLot)(
                site, target, [line for line in lines if line.target == target.name]
            )
            for target in campaign.targets
        ]

    def run(self, seconds: float, stop: Callable[[], bool]) -> bool:
        """Work in slices until the time is up, or this process is spent; whether it is."""
        deadline = time.monotonic() + seconds
        for lot in self._lots:
            lot.settle_left_over()
        is_spent = False
        while not is_spent and not stop() and time.monotonic() < deadline:
            lot = min(self._lots, key=Lot.charge)
            end = min(deadline, time.monotonic() + self._slice_seconds())
            self._journal.append([lot.work(end, stop)])
            is_spent = lot.is_spent
        return is_spent

    def _slice_seconds(self) -> float:
        """Short ones where a run may take the process: that slice has to be done again."""
        shortest, longest = SLICE_SECONDS
        if self._site.passed_over:
            return shortest
        return min(longest, max(shortest, self.at() / 60))

    def at(self) -> float:
        """Seconds that the shard has been running, over all its processes."""
        return self._before + time.monotonic() - self._started

    def _say(self, seed: str) -> None:
        """Leave word of the run that is about to be made, in case it is the last."""
        os.pwrite(self._now, f"{seed}\n".encode(), 0)  # what is behind it is of another run

    def close(self) -> None:
        self._journal.close()
        os.close(self._now)


def _opened(store: Store, number: int) -> Journal:
    """The shard's journal, as soon as a process that has just lost its parent lets go of it."""
    patience = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return Journal(store.journal(number))
        except BlockingIOError:
            if time.monotonic() > patience:
                message = f"{store.folder}: shard {number} is run by another process"
                raise InputError(message) from None
            time.sleep(BUSY_SECONDS / 50)
