"""One or more campaign folders, added up: totals, findings, what was reached, and the verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kvproof.fuzz.campaigns.conditions import Conditions, read_conditions
from kvproof.fuzz.campaigns.records import (
    Campaign,
    CodeCoverage,
    FindingRecord,
    PassedOver,
    Progress,
    Stale,
    Target,
)
from kvproof.fuzz.campaigns.store import Store, read_record
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.report.likeness import likenesses
from kvproof.fuzz.report.series import Point, Slice, seconds_of, series_of, slices
from kvproof.fuzz.verdicts import Judgement, judge, reachable_goals
from kvproof.invariants.errors import InputError
from kvproof.invariants.goals import Goal
from kvproof.invariants.operations import TIER_KINDS
from kvproof.invariants.subject import Configuration, Subject
from kvproof.invariants.verdict import Verdict, counted, merge, tallied
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.totals import Totals

PROBLEMS_MAX = 20
"""Of a subject: what is wrong with a checker is told often enough."""


class _Folder(Struct, frozen=True):
    """One folder."""

    path: Path
    campaign: Campaign
    journals: dict[int, list[Progress]]
    """By shard."""
    passed_over: list[PassedOver]
    findings: list[FindingRecord]
    mended: list[str]
    """Ids of findings of before that did not fail any more."""
    untriaged: int
    stale: Stale
    conditions: list[Conditions]
    code: CodeCoverage | None


_Line = TypeVar("_Line", Progress, PassedOver)


class TargetSummary(Struct):
    """What was done on one target, in all folders, with the present version of its code."""

    target: Target
    totals: Totals = field(default_factory=Totals)
    cpu_seconds: float = 0.0
    transitions: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """Runs that showed something new to their shard."""
    done_twice: int = 0
    outdated: int = 0
    """Operations with another version: they say little about this one."""

    def add(self, line: Progress, versions: Collection[str]) -> None:
        """``versions``: of the code, as the shards were started last; if empty, any is right."""
        if versions and line.version not in versions:
            self.outdated += line.totals.ops
            return
        self.totals = self.totals.merged(line.totals)
        self.cpu_seconds += line.cpu_seconds
        self.transitions.update(line.transitions)
        self.kept += line.novel
        self.done_twice += line.done_twice


class SubjectSummary(Struct, frozen=True):
    """What the targets with one subject come to."""

    subject: str
    runs: int
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the verdict is unknown."""
    goals: tuple[Goal, ...]
    """The situations that it can meet …"""
    hits: dict[str, int]
    """… and how often each was met."""

    @property
    def missed(self) -> list[Goal]:
        return [goal for goal in self.goals if not self.hits.get(goal.id)]


class MergedFinding(Struct, frozen=True):
    """One finding, though several shards may have found it."""

    record: FindingRecord
    """Of the shortest of its cases …"""
    folder: Path
    """… which lies here, with all that was written of it."""
    failures: int
    """Failing runs that showed it."""
    first_seen: float
    """Seconds that its shard had been running."""
    like: str = ""
    """Another that it looks like, and that needs less; mostly empty."""


class Summary(Struct, frozen=True):
    """All that a report tells."""

    folders: tuple[Path, ...]
    campaigns: tuple[Campaign, ...]
    targets: tuple[TargetSummary, ...]
    subjects: tuple[SubjectSummary, ...]
    total: Totals
    cpu_seconds: float
    findings: tuple[MergedFinding, ...]
    """Those that no issue is known for come first, then by the time of the first failing run."""
    untriaged: int
    """Failing runs that nobody has looked into when the campaign stopped."""
    seconds: float
    """That the shard which ran longest has been running, with the present version of the code."""
    series: tuple[Point, ...]
    conditions: tuple[Conditions, ...]
    """Where its shards ran, each place once."""
    code: dict[Path, CodeCoverage]
    """What of the code under test each folder's corpus covers, where that was measured."""
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the verdict is unknown, or would be if nothing had been found."""
    notes: tuple[str, ...]
    """What a reader of the figures should know."""
    stale: int = 0
    """Known issues that are mended, though the ledger still lists them."""
    lost: int = 0
    """Failing runs of findings that are not there any more: nobody knows of what."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, behind what is wrong with the ledger."""
        if not self.stale:
            return self._sentence()
        one = "1 known issue is mended: remove its entry"
        more = f"{self.stale} known issues are mended: remove their entries"
        return f"{one if self.stale == 1 else more}. {self._sentence()}"

    def _sentence(self) -> str:
        new, known = len(self.new_findings), len(self.findings) - len(self.new_findings)
        done = f"{tallied(self.total.ops, 'operation')} in {tallied(self.total.runs, 'run')}"
        if self.outdated:
            done += f" (another {self.outdated:,} with another version of the code are left out)"
        if known:
            done += f", beside {counted(known, 'known issue')}"
        if new:
            names = ", ".join(sorted({f.record.property for f in self.new_findings}))
            return f"{counted(new, 'finding')} ({names}) in {done}."
        if self.untriaged:
            return f"There are failing runs that nobody has looked into yet, among {done}."
        if self.lost:
            runs = f"{counted(self.lost, 'failing run')} of findings that are not there any more"
            return f"There were {runs}, among {done}."
        nothing = "Nothing new was violated" if known else "Nothing was violated"
        if self.stale:
            return f"{nothing} in {done}."
        if self.verdict == "unknown":
            reason, others = self.reasons[0].partition(" (")[0], len(self.reasons) - 1
            more = f", and {others} more like it" if others else ""
            return f"{nothing} in {done}, but that proves little: {reason}{more}."
        return f"{nothing} in {done}, and every situation that is not rare was reached."

    @property
    def outdated(self) -> int:
        """Operations with another version of the code, which no other figure counts."""
        return sum([target.outdated for target in self.targets])

    @property
    def new_findings(self) -> list[MergedFinding]:
        """Those that no issue is known for."""
        return [finding for finding in self.findings if finding.record.known is None]


def summarise(folders: Sequence[Path], trusted: Collection[str] | None = None) -> Summary:
    """Read the folders and add up.  Raises InputError with file and place.

    ``trusted``: subjects outside kvproof that may be imported, to know what they can do; None for
    all that a campaign names.
    """
    read = [_read(path) for path in _distinct(folders)]
    versions = _versions(read)
    targets = _targets(read, versions)
    findings = _merged(read)
    untriaged = sum([folder.untriaged for folder in read])
    stale = sum([len(folder.stale.entries) for folder in read])
    failed = untriaged + stale > 0 or any(f.record.known is None for f in findings)
    lost = {(folder.path, id): runs for folder in read for id, runs in _lost(folder).items()}
    unjudged = [f"{folder.path}: {told}" for folder in read for told in folder.stale.unjudged]
    subjects = tuple(_subjects(targets, findings, trusted, versions))
    verdicts: list[Verdict] = [subject.verdict for subject in subjects]
    doubts: list[Verdict] = ["unknown"] if lost or unjudged else []
    journals = [journal for folder in read for journal in _slices(folder, versions)]
    total = Totals()
    for target in targets:
        total = total.merged(target.totals)
    return Summary(
        folders=tuple(folder.path for folder in read),
        campaigns=tuple(folder.campaign for folder in read),
        targets=tuple(targets),
        subjects=subjects,
        total=total,
        cpu_seconds=sum([target.cpu_seconds for target in targets]),
        findings=findings,
        untriaged=untriaged,
        seconds=max([seconds_of(journal) for journal in journals], default=0.0),
        series=tuple(series_of(journals)),
        conditions=tuple(
            dict.fromkeys(replace(c, versions=()) for folder in read for c in folder.conditions)
        ),
        code={folder.path: folder.code for folder in read if folder.code is not None},
        verdict=merge(*verdicts, *doubts, "fail" if failed else "pass"),
        reasons=(
            *(f"{path}: {_told(id, runs)}" for (path, id), runs in lost.items()),
            *unjudged,
            *(f"{s.subject}: {reason}" for s in subjects for reason in s.reasons),
        ),
        notes=(*_notes(read, untriaged), *_outdated(targets), *(unjudged if failed else ())),
        stale=stale,
        lost=sum(lost.values()),
    )


def _distinct(folders: Sequence[Path]) -> Sequence[Path]:
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise InputError(f"{folder}: given twice, and would be counted twice")
        seen.add(folder.resolve())
    return folders


def _read(path: Path) -> _Folder:
    store = Store(path)
    campaign = store.campaign()
    if campaign is None:
        raise InputError(f"{path}: is no campaign's folder: there is no campaign.json in it")
    return _Folder(
        path,
        campaign,
        {int(file.stem): _lines(file, Progress) for file in _journals(store.shards)},
        [run for file in _journals(store.passed) for run in _lines(file, PassedOver)],
        store.found(),
        [file.parent.name for file in store.mended.glob("*/finding.json")],
        len([*store.raw_cases()]),
        store.stale(),
        read_conditions(path),
        read_record(code, CodeCoverage) if (code := path / "coverage.json").exists() else None,
    )


def _journals(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.jsonl") if file.stem.isdecimal())


def _lines(path: Path, kind: type[_Line]) -> list[_Line]:
    """The records in a journal.  One without a line feed was being written: it is left out."""
    *whole, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(whole, start=1):
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}:{number}: {error}") from None
    return records


# -- targets and subjects ------------------------------------------------------------------------


def _versions(read: Iterable[_Folder]) -> Mapping[str, set[str]]:
    """Of the user's code, by subject, as each shard was started last; one, if all is well."""
    versions = defaultdict[str, set[str]](set)
    for folder in read:
        for conditions in folder.conditions:
            for subject, version in conditions.versions:
                versions[subject].add(version)
    return versions


def _targets(read: Iterable[_Folder], versions: Mapping[str, set[str]]) -> list[TargetSummary]:
    targets: dict[tuple[str, str], TargetSummary] = {}
    for folder in read:
        named = {target.name: target for target in folder.campaign.targets}
        for target in named.values():
            targets.setdefault((target.name, target.subject), TargetSummary(target))
        for shard, lines in folder.journals.items():
            for line in lines:
                if line.target not in named:
                    raise InputError(
                        f"{folder.path}: shard {shard} worked on {line.target!r}, which is no "
                        "target of its campaign.json"
                    )
                subject = named[line.target].subject
                targets[line.target, subject].add(line, versions.get(subject, ()))
    return list(targets.values())


def _slices(folder: _Folder, versions: Mapping[str, set[str]]) -> Iterator[list[Slice]]:
    """What each shard did and when; with another version, it is as if it had done nothing."""
    subject_of = {target.name: target.subject for target in folder.campaign.targets}
    for lines in folder.journals.values():
        yield [
            piece
            for piece in slices(lines)
            if not (known := versions.get(subject_of[piece.line.target]))
            or piece.line.version in known
        ]


def _subjects(
    targets: Sequence[TargetSummary],
    findings: Sequence[MergedFinding],
    trusted: Collection[str] | None,
    versions: Mapping[str, set[str]],
) -> Iterator[SubjectSummary]:
    """Targets with one subject are judged together: what one leaves out, another may reach."""
    failed = {f.record.subject for f in findings if f.record.known is None}
    for name in dict.fromkeys(summary.target.subject for summary in targets):
        own = [summary for summary in targets if summary.target.subject == name]
        total = Totals()
        for summary in own:
            total = total.merged(summary.totals)
        subject, why = _subject(name, trusted)
        if subject is not None and all(summary.target.tiers_share == 0 for summary in own):
            _without_tiers(subject)
        goals = reachable_goals(subject) if subject is not None else ()
        idle = [summary.target.name for summary in own if not summary.totals.runs]
        if len(versions.get(name, ())) > 1:
            total.problems.append("its code is not the same on all shards that were run")
        judgement = _judged(subject, total, name in failed, why, idle)
        yield SubjectSummary(
            name, total.runs, judgement.verdict, judgement.reasons, goals, total.goals
        )


def _subject(name: str, trusted: Collection[str] | None) -> tuple[Subject | None, str]:
    """A fresh subject, to ask what it can do; or why there is none."""
    if name == KERNELS:
        return None, ""
    if not may_import(name, trusted):
        return None, f"what it can do is not known here: allow its import with --subject {name}"
    try:
        return subject_factory(name)(Configuration()), ""
    except InputError as error:
        return None, f"what it can do is not known here: {error}"


def _without_tiers(subject: Subject) -> None:
    """Nothing is demanded of tiers in a campaign that has none."""
    subject.capabilities -= {*TIER_KINDS}
    subject.semantics = replace(subject.semantics, tiers=False)


def may_import(subject: str, trusted: Collection[str] | None) -> bool:
    """Whether a folder that names this subject may have it imported."""
    return trusted is None or subject in trusted or is_kvproofs_own(subject)


def _judged(
    subject: Subject | None, total: Totals, failed: bool, why: str, idle: Sequence[str]
) -> Judgement:
    """``idle``: targets that were never run."""
    problems = [*dict.fromkeys(total.problems)][:PROBLEMS_MAX]
    if not total.runs:
        problems.append("nothing was run")
    else:
        problems += [f"nothing was run of target {name}" for name in idle]
    if total.runs and subject is not None:
        return judge(
            subject,
            total.operations,
            total.goals,
            checked=total.checked,
            failed=failed,
            problems=tuple(problems),
        )
    never = [check for check, count in total.checked.items() if not count]
    if subject is None and never and not why:  # of the kernels, whose runs are checks
        problems.append(f"never run: {', '.join(never)}")
    problems += [why] if why else []
    verdict = merge("fail" if failed else "pass", "unknown" if problems else "pass")
    return Judgement(verdict, tuple(problems))


# -- findings ------------------------------------------------------------------------------------


def _merged(read: Iterable[_Folder]) -> tuple[MergedFinding, ...]:
    failures: Counter[str] = Counter()
    found: dict[str, list[MergedFinding]] = {}
    for folder in read:
        for lines in folder.journals.values():
            for line in lines:
                failures.update(line.failures)
        for record in folder.findings:
            where = Store(folder.path).findings / record.id
            found.setdefault(record.id, []).append(MergedFinding(record, where, 1, record.at))
    merged = [_one(same, failures[name]) for name, same in found.items()]
    like = likenesses([finding.record for finding in merged])
    merged = [replace(finding, like=like.get(finding.record.id, "")) for finding in merged]
    return tuple(sorted(merged, key=lambda f: (f.record.known is not None, f.first_seen)))


def _lost(folder: _Folder) -> Counter[str]:
    """Failing runs that the journals count, by findings that were taken out of the folder."""
    failures = Counter[str]()
    for lines in folder.journals.values():
        for line in lines:
            failures.update(line.failures)
    for id in (*folder.mended, *[record.id for record in folder.findings]):
        failures.pop(id, None)
    return failures


def _told(id: str, runs: int) -> str:
    return f"{counted(runs, 'failing run')} of {id}, which is neither in findings/ nor in mended/"


def _one(same: Sequence[MergedFinding], failures: int) -> MergedFinding:
    """It is known only where every folder's ledger knows it."""
    shortest = min(same, key=lambda f: (f.record.known is not None, f.record.operations))
    first_seen = min(finding.first_seen for finding in same)
    return replace(shortest, failures=max(failures, len(same)), first_seen=first_seen)


def _outdated(targets: Iterable[TargetSummary]) -> Iterator[str]:
    """What tells nothing about the code as it is now."""
    for summary in targets:
        if summary.outdated:
            yield (
                f"{summary.target.name}: {counted(summary.outdated, 'operation')} of before, with "
                "another version of its code, are no part of the verdict"
            )


# -- notes ---------------------------------------------------------------------------------------


def _notes(read: Sequence[_Folder], untriaged: int) -> Iterator[str]:
    if untriaged:
        yield (
            f"{counted(untriaged, 'failing run')} lay in raw/, not shrunk yet when the campaign "
            "stopped: the same command goes on with that"
        )
    for fault in dict.fromkeys(folder.campaign.fault for folder in read):
        if fault is not None:
            yield f"the seeded fault {fault} was planted, to be found"
    seen: dict[Campaign, dict[int, Path]] = {}
    for folder in read:
        shards = seen.setdefault(folder.campaign, {})
        for shard in folder.journals:
            if shard in shards:
                yield (
                    f"shard {shard} of seed {folder.campaign.seed} is both in {shards[shard]} "
                    f"and in {folder.path}: the same runs, counted twice"
                )
            shards[shard] = folder.path
        yield from [f"{folder.path}: {entry}" for entry in folder.stale.entries]
        if folder.mended:
            yield (
                f"{folder.path}: {counted(len(folder.mended), 'finding')} of before did not fail "
                "any more, see mended/"
            )
        for run in folder.passed_over:
            yield f"{folder.path}: run {run.seed} was passed over: {run.why}"
    for campaign, shards in seen.items():
        missing = [str(shard) for shard in range(campaign.shards) if shard not in shards]
        if missing:
            yield (
                f"seed {campaign.seed} is that of {counted(campaign.shards, 'shard')}; here is no "
                f"journal of {'shard' if len(missing) == 1 else 'shards'} {', '.join(missing)}"
            )
