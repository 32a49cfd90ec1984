"""Runs of a subject: drawn, performed, checked, drained; every twentieth done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from zlib import crc32

from kvproof.fuzz.campaigns.corpus import Corpus
from kvproof.fuzz.campaigns.known import kinds_of
from kvproof.fuzz.campaigns.lots import Lot, Site
from kvproof.fuzz.campaigns.records import FindingRecord, Progress, Target
from kvproof.fuzz.campaigns.store import require_subject
from kvproof.fuzz.campaigns.targets import draw_for, seeds_of, shard_of
from kvproof.fuzz.search import (
    DETERMINISM,
    DONE_TWICE_EVERY,
    Failure,
    Found,
    abilities,
    found,
    perform_run,
    run_once,
    run_twice,
)
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import CRASH
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

WATCHED_EVERY = 2
"""One run in so many is watched for what is new in it: that takes a tenth of a cheap run's time."""
SUSPECTS_MADE = 0.25
"""Part of the runs that are still made of those that would probably show a known finding."""
FAILING_COSTS = 4.0
"""A failing run is charged so many times its CPU time: its target is given less."""


class SubjectLot(Lot):
    """The lot of a cache or a scheduler."""

    def __init__(self, site: Site, target: Target, lines: Sequence[Progress]) -> None:
        super().__init__(site, target, lines)
        self._factory = subject_factory(target.subject)
        self._able = abilities(self._factory)
        self._corpus = Corpus(site.store, target.name)
        self._suspicions: set[tuple[frozenset[str], frozenset[str]]] = set()
        for finding in site.store.found():
            if finding.subject == target.subject:
                self._suspect(finding)

    def settle_left_over(self) -> None:
        site = self.site
        for path, case in site.store.raw_cases():
            seeds, _, number = case.seed.rpartition("/")
            is_of_target = seeds == seeds_of(site.campaign, self.target)
            if is_of_target and int(number) % site.campaign.shards == site.shard:
                require_subject(case, path, self.target.subject)
                site.say(case.seed)
                failing = Found(case, self._violation_of(case))
                replays = case.seed not in site.passed_over
                site.triage.settle(self.target.name, failing, site.clock(), replays)
                path.unlink(missing_ok=True)

    def _violation_of(self, case: Case) -> Violation:
        """What a run that was left over violates; shrinking tells it of those that fail again."""
        if case.violates == DETERMINISM and case.seed not in self.site.passed_over:
            failure = run_twice(self._factory, _draw_of(case), Totals())
            if failure is not None and failure[1].property == DETERMINISM:
                return failure[1]
            message = (
                "done in two fresh subjects, the run gave different results, but not when it was "
                "done twice again"
            )
            return Violation(DETERMINISM, message)
        return Violation(case.violates or CRASH, "the run failed, and its process died with it")

    def open(self) -> None:
        site, target = self.site, self.target
        self._corpus.expect(
            path
            for path, seed in site.store.kept_seeds(target.name)
            if shard_of(site.campaign, target, seed) == site.shard
        )

    def replay_kept(self, until: float, stop: Callable[[], bool]) -> None:
        """To know what is new, and since it may fail now."""
        site, corpus, pending = self.site, self._corpus, self._corpus.pending
        failing = corpus.replay(
            *(self._factory, until, stop, site.say, site.passed_over),
            self.progress.totals.problems,
        )
        self.progress.replayed = pending - corpus.pending
        for case, failure in failing:
            site.say(case.seed)
            self._report(_draw_of(case), failure)

    def make(self, seed: str) -> None:
        draw = draw_for(self.target, seed, self._able)
        if self._suspicions and self._is_suspect(draw):
            return
        self.site.say(seed)
        started = time.process_time()
        failure = self._run(draw)
        if failure is not None:
            self.charged_seconds += (FAILING_COSTS - 1) * (time.process_time() - started)
            self._report(draw, failure)

    def close_slice(self) -> None:
        self.progress.transitions = self._corpus.watch.taken()

    def _run(self, draw: Draw) -> Failure | None:
        progress, corpus = self.progress, self._corpus
        lot = crc32(draw.seed.encode())
        is_watched, is_done_twice = lot % WATCHED_EVERY == 0, lot % DONE_TWICE_EVERY == 1
        try:
            if is_done_twice:
                failure = run_twice(self._factory, draw, progress.totals)
                progress.done_twice += 1
            else:
                perform = corpus.watch.perform if is_watched else perform_run
                failure = run_once(self._factory, draw, progress.totals, perform)
        except (Exception, SystemExit) as error:  # a subject that cannot even be made
            progress.totals.problems.append(f"run {draw.seed}: {type(error).__name__}: {error}")
            return None
        if failure is None and is_watched and not corpus.pending:
            progress.novel += corpus.offer(self._case(draw))
        return failure

    def _case(self, draw: Draw) -> Case:
        return Case(
            self.target.subject,
            draw.configuration,
            draw.operations,
            features=draw.features,
            seed=draw.seed,
            fault=self.site.campaign.fault,
        )

    def _report(self, draw: Draw, failure: Failure) -> None:
        failing = found(self.target.subject, draw, failure, self.site.campaign.fault)
        finding = self.site.triage.report(self.target.name, failing, self.site.clock())
        self.failed(finding.id)
        self._suspect(finding)

    # -- time for other things -------------------------------------------------------------------

    def _suspect(self, finding: FindingRecord) -> None:
        """From now on, most runs that have all that the finding needs are passed over.

        Of one that could not be shrunk, nobody knows what it needs.
        """
        if finding.kinds:
            self._suspicions.add((frozenset(finding.kinds), frozenset(finding.features)))

    def _is_suspect(self, draw: Draw) -> bool:
        kinds = kinds_of(draw.operations)
        features = frozenset(draw.features)
        suspected = any(k <= kinds and f <= features for k, f in self._suspicions)
        return suspected and crc32(f"{draw.seed} again".encode()) >= SUSPECTS_MADE * (1 << 32)


def _draw_of(case: Case) -> Draw:
    """The run of a case, to be made again."""
    return Draw(case.seed, case.configuration, case.features, case.operations)
