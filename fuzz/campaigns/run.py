"""``kvproof fuzz``: starts the shards of a campaign, and looks after them.

A shard that dies is started again, and goes on where its journal ends.  A run during which it
dies each time, or at which it stands still for minutes, is a finding, and is passed over then.  A
shard that dies by chance leaves the verdict unknown: a crash that comes once is one all the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kvproof.fuzz.campaigns.conditions import version_at
from kvproof.fuzz.campaigns.executors import BAD_INPUT, SPENT, Ended, Executor
from kvproof.fuzz.campaigns.known import Ledger, read_ledger
from kvproof.fuzz.campaigns.records import DIED, HANG, Campaign, PassedOver, Progress, Target
from kvproof.fuzz.campaigns.shard import ShardJob
from kvproof.fuzz.campaigns.store import Journal, Store, read_lines_from
from kvproof.fuzz.campaigns.targets import KERNELS, draw_for, seeds_of, shard_of
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.fuzz.search import abilities, found
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.errors import InputError
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

STALL_SECONDS = 600.0
"""A shard that is at one run for so long hangs."""
DEATHS_MAX = 5
"""In a row, without a line in the journal between."""
DEATHS_OF_A_RUN = 3
"""Once may be anybody's doing, and so may twice."""
POLL_SECONDS = 0.1
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)
_SPEECHLESS = "cannot go on, and cannot write to its log why: is the disk full?"


class Standing(Struct):
    """How far a campaign is, by its journals; counted as they grow."""

    ops: int = 0
    runs: int = 0
    failures: int = 0
    novel: int = 0
    replayed: int = 0
    """Kept runs that were run again …"""
    to_replay: int = 0
    """… of so many that its shards have kept before."""


class Watched(Struct):
    """What is known of a shard that runs."""

    read: int = 0
    """Bytes of its journal that were read."""
    at: float = 0.0
    """By that journal, how long the shard has been running."""
    grew: float = 0.0
    """When it grew last, or the shard was started or came to another run."""
    seen: str = ""
    """The run that it was at when somebody looked last."""
    deaths: int = 0
    """In a row."""
    died_at: str = ""
    """The run that it was at when it died last …"""
    died_here: int = 0
    """… and how often it died there …"""
    died_how: str = ""
    """… and how, the last time; empty if somebody else ended it, or it is told already."""


class CampaignRun:
    """One call of ``kvproof fuzz``: some shards, for so long."""

    def __init__(
        self,
        folder: Path,
        campaign: Campaign,
        executor: Executor,
        *,
        shards: Sequence[int],
        seconds: float,
        known: Path | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._store = Store(folder)
        self.standing = Standing(to_replay=_to_replay(self._store, campaign, shards))
        """Of this call."""
        self._campaign = campaign
        self._executor = executor
        self._known = known
        self._ledger: Ledger = read_ledger(known)
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._stall_seconds = stall_seconds
        self._watched = {shard: Watched() for shard in shards}
        self._going: set[int] = set()

    def run(self, told: Callable[[Standing], None] = lambda standing: None) -> None:
        """Run all shards to the end; ``told`` hears now and then how far they are.

        At KeyboardInterrupt they end in order first.  Raises InputError if one cannot go on.
        """
        try:
            for shard, watched in self._watched.items():
                lines, watched.read = self._lines(shard, 0)
                watched.at = max([line.at for line in lines], default=0.0)
                self._start(shard)
            self._look_after(told)
        except BaseException:
            self._executor.stop()
            raise
        finally:
            self._wait()
            for shard in self._watched:
                self._tell_of_death(shard)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.seconds - max(0.0, self._deadline - time.monotonic())

    def _look_after(self, told: Callable[[Standing], None]) -> None:
        while self._going:
            time.sleep(POLL_SECONDS)
            for shard in sorted(self._going):
                self._read(shard)
            told(self.standing)
            for ended in self._ended():
                self._read(ended.shard)
                if ended.code == BAD_INPUT:
                    raise InputError(ended.message or f"shard {ended.shard} {_SPEECHLESS}")
                if ended.code == SPENT:
                    self._start(ended.shard)
                elif ended.code:
                    self._died(ended)
            self._look_for_hangs()

    def _ended(self) -> list[Ended]:
        ended = self._executor.ended()
        self._going.difference_update([one.shard for one in ended])
        return ended

    def _start(self, shard: int) -> None:
        """Start it, for the time that is left."""
        self._watched[shard].grew = time.monotonic()
        seconds = max(0.0, self._deadline - time.monotonic())
        known = str(self._known) if self._known else None
        self._executor.start(ShardJob(str(self._store.folder), shard, seconds, known))
        self._going.add(shard)

    def _wait(self) -> None:
        """Until all have ended; whoever does not want to wait any longer ends them at once."""
        try:
            while self._going:
                self._ended()
                self._look_for_hangs()
                time.sleep(POLL_SECONDS)
        except BaseException:
            for shard in self._going:
                self._executor.kill(shard)
            raise

    # -- journals --------------------------------------------------------------------------------

    def _lines(self, shard: int, start: int) -> tuple[list[Progress], int]:
        path = self._store.journal(shard)
        return read_lines_from(path, Progress, start) if path.exists() else ([], 0)

    def _read(self, shard: int) -> None:
        watched = self._watched[shard]
        lines, watched.read = self._lines(shard, watched.read)
        for line in lines:
            watched.at, watched.grew, watched.deaths = line.at, time.monotonic(), 0
            self.standing.ops += line.totals.ops
            self.standing.runs += line.totals.runs
            self.standing.failures += sum(line.failures.values())
            self.standing.novel += line.novel
            self.standing.replayed += line.replayed

    # -- shards that die or hang ----------------------------------------------------------------

    def _died(self, ended: Ended) -> None:
        """Start it again, behind the run that kills it, if it is that run."""
        watched = self._watched[ended.shard]
        watched.deaths += 1
        if watched.deaths > DEATHS_MAX:
            raise InputError(
                f"shard {ended.shard} died {watched.deaths} times in a row: {ended.message} (see "
                f"{self._store.log(ended.shard)})"
            )
        seed = self._store.seed_at(ended.shard)
        if seed != watched.died_at:
            self._tell_of_death(ended.shard)
            watched.died_at, watched.died_here = seed, 0
        watched.died_here += 1
        how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        how += f": {ended.message}" if ended.message else ""
        watched.died_how = "" if ended.code in _ENDED_BY_OTHERS else how
        if seed and watched.died_here == DEATHS_OF_A_RUN:
            watched.died_how = ""
            why = f"the process died in this run, {DEATHS_OF_A_RUN} times: {how}"
            self._pass_over(ended.shard, seed, DIED, why)
        self._start(ended.shard)

    def _tell_of_death(self, shard: int) -> None:
        """Leave word of one that did not come again where it came; the shard does not run now."""
        watched = self._watched[shard]
        if watched.died_at and watched.died_how:
            problem = f"run {watched.died_at}: the process died, by chance: {watched.died_how}"
            totals = Totals(problems=[problem])
            journal = Journal(self._store.journal(shard))
            journal.append(
                [
                    Progress(
                        *(target.name, watched.at, 0.0, totals),
                        version=version_at(self._store.folder, shard, target.subject),
                    )
                    for target in self._targets_of(watched.died_at)
                ]
            )
            journal.close()
            _, watched.read = self._lines(shard, watched.read)
        watched.died_how = ""

    def _look_for_hangs(self) -> None:
        for shard in sorted(self._going):
            watched = self._watched[shard]
            stood = time.monotonic() - watched.grew
            if stood < self._stall_seconds / 10:
                continue
            seed = self._store.seed_at(shard)
            if seed != watched.seen:  # a corpus may take long, though each run of it ends
                watched.seen, watched.grew = seed, time.monotonic()
            elif stood > self._stall_seconds:
                watched.grew = time.monotonic()
                self._executor.kill(shard)
                self._pass_over(shard, seed, HANG, f"no answer in {stood:.0f} s")

    def _pass_over(self, shard: int, seed: str, property: str, why: str) -> None:
        if not seed:  # it was not at any
            return
        self._watched[shard].deaths = 0
        for target in self._targets_of(seed):
            self._tell(shard, target, seed, Violation(property, why))
        journal = Journal(self._store.passed_over(shard))  # last: what it lists is not tried again
        journal.append([PassedOver(seed, why)])
        journal.close()

    def _targets_of(self, seed: str) -> list[Target]:
        seeds, campaign = seed.rpartition("/")[0], self._campaign
        return [target for target in campaign.targets if seeds_of(campaign, target) == seeds]

    def _tell(self, shard: int, target: Target, seed: str, violation: Violation) -> None:
        """Make a finding of a run that is passed over: as it was drawn."""
        draw = Draw(seed, Configuration(), (), [])  # of kernels, which are drawn elsewhere
        if target.subject != KERNELS:
            draw = draw_for(target, seed, abilities(subject_factory(target.subject)))
        failure = draw.operations, violation
        failing = found(target.subject, draw, failure, self._campaign.fault)
        triage = Triage(self._store, self._ledger, shard)
        at = self._watched[shard].at
        triage.settle(target.name, failing, at, replays=False)


def _to_replay(store: Store, campaign: Campaign, shards: Sequence[int]) -> int:
    """Runs that these shards have kept."""
    return sum(
        shard_of(campaign, target, seed) in shards
        for target in campaign.targets
        for _, seed in store.kept_seeds(target.name)
    )
