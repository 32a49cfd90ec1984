"""One page that says what broke, where and why, and what the campaign has looked at.

It needs nothing but itself, so that it can be sent, kept and read offline.  Jinja2, which is an
extra, fills the template and escapes all that comes from other people's code.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.campaigns.guarded import Judged, Replayer
from kvproof.fuzz.campaigns.records import DIED, HANG, Campaign, CodeCoverage, FileCoverage
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.cli.output import replay_command
from kvproof.fuzz.replay import Replay, replay
from kvproof.fuzz.report.block_map import OWNER_COLOURS, BlockMap, block_map
from kvproof.fuzz.report.chart import Points, duration, line_chart
from kvproof.fuzz.report.coverage import coverage
from kvproof.fuzz.report.summary import MergedFinding, Summary, may_import
from kvproof.fuzz.report.unchecked import UNCHECKED
from kvproof.invariants.case import Case, load_case, source_of
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.goals import Goal
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.verdict import BEFORE_THE_FIRST, Violation, primary
from kvproof.stateful_tests.export import violation_mark
from kvproof.stateful_tests.subjects import is_kvproofs_own

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(summary: Summary, path: Path, trusted: Collection[str] = ()) -> None:
    """Write the page.  ``trusted``: subjects outside kvproof that may be imported, for replays."""
    path.write_text(page(summary, trusted), encoding="utf-8")


def page(summary: Summary, trusted: Collection[str] = ()) -> str:
    """The page as text; findings are replayed for it.  Raises InputError for a broken case."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    return environment.get_template("page.html.j2").render(
        summary=summary,
        findings=[_shown(finding, trusted) for finding in summary.findings],
        owner_colours=OWNER_COLOURS,
        coverage_command=_coverage_command(summary.folders[0], summary.campaigns[0]),
        situations=_situations(summary),
        titles=_titles(),
        coverage=coverage(summary.targets),
        code=[_code(folder, covered) for folder, covered in summary.code.items()],
        charts=_charts(summary),
        now=datetime.now(UTC),
    )


def _titles() -> dict[str, str]:
    """What each property says, in a line."""
    checked = [check.describe() for check in (*CHECKS, *SCHEDULING_CHECKS)]
    return {own.id: own.title for own in (*checked, *UNCHECKED)}


def _charts(summary: Summary) -> list[tuple[str, str]]:
    """Titles and pictures; none if no time has passed."""
    series = summary.series
    if not series:
        return []
    drawn: dict[str, Points] = {
        "Distinct transitions seen, counted target by target": [
            (0, 0),
            *[(p.at, p.transitions) for p in series],
        ],
        "Runs kept, since they showed something new": [(0, 0), *[(p.at, p.kept) for p in series]],
        "Operations per second, all shards": [(p.at, p.ops_per_second) for p in series],
    }
    return [(title, line_chart(points, title)) for title, points in drawn.items()]


def _coverage_command(folder: Path, campaign: Campaign) -> str:
    """How to measure coverage; code of the user's own has to be allowed to be imported."""
    own = [
        f" --subject {quote(target.subject)}"
        for target in campaign.targets
        if target.subject != KERNELS and not is_kvproofs_own(target.subject)
    ]
    return f"kvproof fuzz --replay-corpus --coverage --out {quote(str(folder))}" + "".join(own)


class MeasuredCode(Struct, frozen=True):
    """What of the code under test a corpus covers."""

    corpus: Path
    cases: int
    files: Sequence[FileCoverage]
    """Named from the folder that they share."""


def _code(folder: Path, covered: CodeCoverage) -> MeasuredCode:
    shared = os.path.commonpath([os.path.dirname(own.file) for own in covered.files] or [""])
    files = [replace(own, file=os.path.relpath(own.file, shared)) for own in covered.files]
    return MeasuredCode(folder, covered.cases, files)


# -- findings ------------------------------------------------------------------------------------


class StoryLine(Struct, frozen=True):
    """A sentence of an explanation, its clauses apart."""

    about: str
    clauses: Sequence[str]


class ShownFinding(Struct, frozen=True):
    """A finding as the page shows it."""

    found: MergedFinding
    seen: str
    """At which operation the replay shows the violation; empty where there is no replay."""
    story: Sequence[StoryLine]
    map: BlockMap | None
    remark: str
    """Why there is no block map, or what is the matter with the replay; often empty."""
    world: str
    """Subject, configuration and features."""
    legend: str
    log: Sequence[tuple[str, bool]]
    """Lines, and whether the violation was seen there; none where there is no case."""
    command: str
    """How to replay it; empty where there is no case."""
    test: Path | None
    test_source: str


def _shown(found: MergedFinding, trusted: Collection[str]) -> ShownFinding:
    record = found.record
    case_file, test = found.folder / "case.json", found.folder / f"test_{record.id}.py"
    case = load_case(case_file) if case_file.exists() else None
    result, remark = _replayed(case, found, trusted)
    log = _text(found.folder / "log.txt") if case is not None else ""
    world, legend, lines = _log_parts(log)
    mark = violation_mark(record.property)
    steps = [line.removesuffix(mark) for line in lines]
    violation = _violation(result, record.property)
    last = max(0, violation.op) if violation is not None else len(steps) - 1
    drawn = None
    if case is not None and result is not None:
        drawn = block_map(result.moments, case.configuration.block_size, violation, steps)
    return ShownFinding(
        found,
        _seen(case, violation),
        _story(record.explanation, record.message),
        drawn,
        remark,
        world,
        legend,
        [(step + mark * (index == last), index == last) for index, step in enumerate(steps)],
        replay_command(case_file, record.subject) if case is not None else "",
        test if test.exists() else None,
        _text(test) if test.exists() else "",
    )


def _replayed(
    case: Case | None, found: MergedFinding, trusted: Collection[str]
) -> tuple[Replay | None, str]:
    """What the case does now, for the picture; and what is to be said about that."""
    if case is None:
        return None, "There is no case that could be replayed, and so no block map."
    if found.record.property in (HANG, DIED):
        return None, "It is not replayed for a block map: see the property."
    if not may_import(case.subject, trusted):
        return None, (
            f"The block map needs a replay, which imports code of yours: kvproof report … "
            f"--subject {case.subject}"
        )
    try:
        with Replayer() as replayer:  # code of the user's may hang now
            own = is_kvproofs_own(case.subject)
            judged = Judged() if own else replayer.judge(found.folder / "case.json")
        if judged.is_lost:
            return None, f"There is no block map: {judged.problem}."
        result = replay(case, record=True)
    except InputError as error:
        return None, f"The block map needs a replay, which is not possible here: {error}"
    if result.violations:
        return result, ""
    return result, "Replayed for this page, the case violated nothing."


def _violation(result: Replay | None, name: str) -> Violation | None:
    """The one that the finding is about, as the replay saw it."""
    if result is None or not result.violations:
        return None
    same = [violation for violation in result.violations if violation.property == name]
    return primary(same or result.violations)


def _seen(case: Case | None, violation: Violation | None) -> str:
    if case is None or violation is None or violation.op >= len(case.operations):
        return ""
    if violation.op < 0:
        return BEFORE_THE_FIRST
    return f"at operation {violation.op}, {source_of(case.operations[violation.op])}"


def _story(explanation: str, message: str) -> list[StoryLine]:
    """How it came about: the explanation without the message, which is shown above it."""
    _, is_there, after = explanation.partition(message)
    lines = (after if is_there else explanation).lstrip(".\n").splitlines()
    return [_story_line(line) for line in lines if line.strip()]


def _story_line(line: str) -> StoryLine:
    about, colon, rest = line.partition(": ")
    clauses = _clauses(rest.removesuffix("."))
    if not colon or len(clauses) == 1:
        return StoryLine(line, ())
    return StoryLine(about, clauses)


def _clauses(text: str) -> list[str]:
    """What semicolons part; one in brackets parts nothing."""
    clauses, depth = [""], 0
    for part in re.split(r"(; |[()])", text):
        depth = max(0, depth + (part == "(") - (part == ")"))
        if part == "; " and not depth:
            clauses.append("")
        else:
            clauses[-1] += part
    return clauses


def _log_parts(log: str) -> tuple[str, str, list[str]]:
    """World, legend, and a line for each operation; a log of another make is all lines."""
    parts = log.rstrip("\n").rsplit("\n\n", 3)
    if len(parts) != 4:
        return "", "", log.splitlines()
    return parts[1], parts[2], parts[3].splitlines()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}") from None


# -- situations ----------------------------------------------------------------------------------


class Situation(Struct, frozen=True):
    """One of the must-hit catalogue."""

    goal: Goal
    hits: int
    missed_by: Sequence[str]
    """Subjects that were run, could meet it, and did not."""


class Situations(Struct, frozen=True):
    """Those that could come about."""

    missed: Sequence[Situation]
    """By one subject at least; those that should have been reached come first."""
    reached: Sequence[Situation]


def _situations(summary: Summary) -> Situations:
    goals = {goal.id: goal for s in summary.subjects if s.runs for goal in s.goals}
    hits: Counter[str] = Counter()
    for subject in summary.subjects:
        hits.update(subject.hits)
    every = [Situation(g, hits[g.id], _missed_by(g, summary)) for g in goals.values()]
    missed = sorted([s for s in every if s.missed_by], key=lambda s: (s.goal.rare, s.hits > 0))
    return Situations(missed, [s for s in every if not s.missed_by])


def _missed_by(goal: Goal, summary: Summary) -> list[str]:
    return [s.subject for s in summary.subjects if s.runs and goal in s.missed]
