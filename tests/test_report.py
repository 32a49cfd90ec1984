"""``kvproof report``: campaigns are added up, judged, and told on a page and in JUnit XML."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from kvproof.fuzz.campaigns.records import (
    Campaign,
    CodeCoverage,
    FileCoverage,
    FindingRecord,
    Progress,
    Target,
)
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Store, as_text, read_lines, read_record
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.cli import report as report_command
from kvproof.fuzz.report.likeness import likenesses, sentence_of
from kvproof.fuzz.report.summary import Summary, summarise
from kvproof.fuzz.verdicts import reachable_goals
from kvproof.invariants.case import load_case
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

pytest.importorskip("jinja2", reason="the page needs the report extra")
pytest.importorskip("junitparser", reason="JUnit XML needs the report extra")

from kvproof.fuzz.report.junit import write_junit
from kvproof.fuzz.report.page import page

CACHE = Target("cache", "engine", tiers_share=0.0)
FCFS = Target("policy:fcfs", "scheduler:fcfs")
FAULT = "no-copy-on-write"


def begun(folder: Path, campaign: Campaign) -> Store:
    store = Store(folder)
    store.begin(campaign)
    return store


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two shards of one campaign with a fault planted, each on a machine of its own."""
    folders = []
    for shard in range(2):
        folder = tmp_path_factory.mktemp("campaign") / f"shard-{shard}"
        begun(folder, Campaign("7", (CACHE,), 2, FAULT))
        run_job(ShardJob(str(folder), shard, 2.5))
        folders.append(folder)
    return folders


@pytest.fixture
def one(shards: list[Path], tmp_path: Path) -> Path:
    """A copy of the first, to be spoiled."""
    return shutil.copytree(shards[0], tmp_path / "copy")


def journal(folder: Path) -> Path:
    return Store(folder).journal(0)


def finding_file(folder: Path) -> Path:
    (file,) = (folder / "findings").glob("*/finding.json")
    return file


def spoil(folder: Path, **changes: Any) -> FindingRecord:
    """Have the finding say something else."""
    record = replace(read_record(finding_file(folder), FindingRecord), **changes)
    finding_file(folder).write_text(as_text(record))
    return record


# -- adding up -----------------------------------------------------------------------------------


def test_shards_are_added_up(shards: list[Path]) -> None:
    both, parts = summarise(shards), [summarise([folder]) for folder in shards]
    assert both.total.ops == sum(part.total.ops for part in parts) > 1000
    assert both.total.goals == {
        goal: sum(part.total.goals[goal] for part in parts) for goal in both.total.goals
    }
    (target,) = both.targets
    assert target.done_twice == sum(part.targets[0].done_twice for part in parts)
    assert target.transitions == parts[0].targets[0].transitions + parts[1].targets[0].transitions
    assert both.cpu_seconds == pytest.approx(sum(part.cpu_seconds for part in parts))
    assert both.verdict == "fail"


def test_one_cause_is_one_finding_in_how_many_shards_it_may_be(shards: list[Path]) -> None:
    parts = [summarise([folder]).findings for folder in shards]
    (merged,) = summarise(shards).findings
    assert all([f.record.id for f in part] == [merged.record.id] for part in parts)
    assert merged.failures == sum(part[0].failures for part in parts) >= 2
    assert merged.first_seen == min(part[0].first_seen for part in parts)


def test_the_shortest_case_is_told(shards: list[Path], one: Path) -> None:
    spoil(one, operations=4)
    (merged,) = summarise([shards[1], one]).findings
    assert merged.folder.is_relative_to(one)


def test_no_operation_is_lost_over_time(shards: list[Path]) -> None:
    summary = summarise(shards)
    before, ops = 0.0, 0.0
    for point in summary.series:
        ops += point.ops_per_second * (point.at - before)
        before = point.at
    assert ops == pytest.approx(summary.total.ops)
    assert before == max(
        line.at
        for shard, folder in enumerate(shards)
        for line in read_lines(Store(folder).journal(shard), Progress)
    )
    assert summary.series[-1].transitions == len(summary.targets[0].transitions)
    assert summary.series[-1].kept == summary.targets[0].kept
    assert [p.transitions for p in summary.series] == sorted(p.transitions for p in summary.series)


def test_a_shard_that_left_nothing_is_noted(shards: list[Path]) -> None:
    (fault, missing) = summarise(shards[:1]).notes
    assert fault == f"the seeded fault {FAULT} was planted, to be found"
    assert missing == "seed 7 is that of 2 shards; here is no journal of shard 1"
    assert summarise(shards).notes == (fault,)


def test_what_would_be_counted_twice_is_said(shards: list[Path], one: Path) -> None:
    with pytest.raises(InputError, match="given twice"):
        summarise([one, one / ".." / one.name])
    assert any("the same runs, counted twice" in note for note in summarise([shards[0], one]).notes)


# -- reading -------------------------------------------------------------------------------------


def test_a_torn_last_line_is_ignored(one: Path) -> None:
    before = summarise([one]).total.ops
    with journal(one).open("ab") as file:
        file.write(b'{"target": "cache", "at": 9')
    assert summarise([one]).total.ops == before


def _cut_in_the_middle(folder: Path) -> None:
    lines = journal(folder).read_bytes().splitlines(keepends=True)
    journal(folder).write_bytes(lines[0] + lines[0][:40] + b"\n" + lines[-1])


def _of_another_version(folder: Path) -> None:
    file = folder / "campaign.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))


def _of_no_target(folder: Path) -> None:
    journal(folder).write_text('{"target":"elsewhere","at":1,"cpu_seconds":1,"totals":{}}\n')


def _finding_cut(folder: Path) -> None:
    finding_file(folder).write_text('{"id": ')


def _finding_of_a_wrong_type(folder: Path) -> None:
    file = finding_file(folder)
    file.write_text(re.sub(r'"operations": \d+', '"operations": "many"', file.read_text()))


def _without_campaign(folder: Path) -> None:
    (folder / "campaign.json").unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_cut_in_the_middle, r"shards/0000\.jsonl:2: "),
        (_of_another_version, r"campaign\.json: .*version 2"),
        (_of_no_target, r"shard 0 worked on 'elsewhere'"),
        (_finding_cut, r"finding\.json: "),
        (_finding_of_a_wrong_type, r"finding\.json: .*\$\.operations"),
        (_without_campaign, r"no campaign\.json"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_place(
    one: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    damage(one)
    with pytest.raises(InputError, match=complaint) as raised:
        summarise([one])
    assert str(one) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_transition_that_is_none_is_an_error(one: Path) -> None:
    text = journal(one).read_text()
    journal(one).write_text(text.replace('"admit | 0 |', '"admit | 0x |', 1))
    with pytest.raises(InputError, match=r"'admit \| 0x \|.*no transition"):
        page(summarise([one]))


def test_a_broken_case_is_an_error(one: Path) -> None:
    case = finding_file(one).parent / "case.json"
    case.write_text(case.read_text()[:-30])
    with pytest.raises(InputError, match=r"case\.json:\d+:\d+"):
        page(summarise([one]))


# -- verdicts ------------------------------------------------------------------------------------


def all_reached(target: Target) -> Progress:
    """As a shard would leave it that met everything once."""
    subject = subject_factory(target.subject)(Configuration())
    able = sorted(subject.capabilities)
    checks = (*CHECKS, *SCHEDULING_CHECKS)
    totals = Totals(
        runs=1,
        ops=len(able),
        operations={kind: {"done": 1, "refused": 0, "skipped": 0} for kind in able},
        goals={goal.id: 1 for goal in reachable_goals(subject)},
        checked={check.id(): 1 for check in checks},
    )
    return Progress(target.name, 1.0, 1.0, totals)


def written(folder: Path, targets: tuple[Target, ...], *lines: Progress) -> Path:
    store = begun(folder, Campaign("1", targets, 1))
    text = "".join(json.dumps(json.loads(as_text(line))) + "\n" for line in lines)
    store.journal(0).write_text(text)
    return folder


def test_a_campaign_that_reached_everything_passes(tmp_path: Path) -> None:
    folder = written(tmp_path, (CACHE, FCFS), all_reached(CACHE), all_reached(FCFS))
    summary = summarise([folder])
    assert (summary.verdict, summary.reasons) == ("pass", ())
    assert "every situation that is not rare was reached" in summary.sentence


def test_what_one_target_misses_another_may_reach(tmp_path: Path) -> None:
    tiers = Target("tiers", "engine", tiers_share=1.0)
    everything = all_reached(tiers)
    nothing = Progress("cache", 1.0, 1.0, Totals(runs=1))
    assert summarise([written(tmp_path / "a", (CACHE,), nothing)]).verdict == "unknown"
    both = written(tmp_path / "b", (CACHE, tiers), nothing, everything)
    assert summarise([both]).verdict == "pass"


def test_tiers_are_demanded_only_of_campaigns_that_have_them(tmp_path: Path) -> None:
    tiers = Target("tiers", "engine", tiers_share=1.0)
    without = replace(all_reached(tiers), target="cache")
    for kind in ("offload", "promote"):
        without.totals.operations[kind]["done"] = 0
    assert summarise([written(tmp_path / "a", (CACHE,), without)]).verdict == "pass"
    missing = summarise([written(tmp_path / "b", (tiers,), replace(without, target="tiers"))])
    assert missing.reasons == (
        "engine: operation offload never succeeded",
        "engine: operation promote never succeeded",
    )


def test_a_missed_situation_leaves_it_unknown(tmp_path: Path) -> None:
    line = all_reached(CACHE)
    line.totals.goals |= {"pool-empty": 0, "reset-done": 0}  # the second is rare
    summary = summarise([written(tmp_path, (CACHE,), line)])
    assert summary.verdict == "unknown"
    assert [goal.id for goal in summary.subjects[0].missed] == ["pool-empty", "reset-done"]
    assert len(summary.reasons) == 1
    assert "pool-empty was never reached" in summary.sentence


def test_a_target_that_was_never_run_leaves_it_unknown(tmp_path: Path) -> None:
    summary = summarise([written(tmp_path, (CACHE, FCFS), all_reached(CACHE))])
    assert (summary.verdict, summary.reasons) == ("unknown", ("scheduler:fcfs: nothing was run",))


def test_so_does_one_whose_subject_another_target_drives(tmp_path: Path) -> None:
    tiers = Target("tiers", "engine", tiers_share=1.0)
    summary = summarise([written(tmp_path, (CACHE, tiers), all_reached(tiers))])
    told = ("engine: nothing was run of target cache",)
    assert (summary.verdict, summary.reasons) == ("unknown", told)


def test_a_checker_that_stumbled_leaves_it_unknown(tmp_path: Path) -> None:
    line = all_reached(CACHE)
    line.totals.problems += ["run 1/3: at operation 7: KeyError(3)"] * 2
    summary = summarise([written(tmp_path, (CACHE,), line)])
    assert summary.reasons == ("engine: run 1/3: at operation 7: KeyError(3)",)
    assert summary.verdict == "unknown"


def test_kernels_are_judged_by_what_is_found(tmp_path: Path) -> None:
    kernels = Target("kernels", "kernels")
    line = Progress("kernels", 1.0, 1.0, Totals(runs=4, ops=4))
    assert summarise([written(tmp_path / "all", (kernels,), line)]).verdict == "pass"
    some = Progress("kernels", 1.0, 1.0, Totals(runs=4, ops=4, checked={"copy": 4, "write": 0}))
    summary = summarise([written(tmp_path / "some", (kernels,), some)])
    assert (summary.verdict, summary.reasons) == ("unknown", ("kernels: never run: write",))


def test_code_of_somebodys_is_imported_only_if_he_says_so(tmp_path: Path) -> None:
    mine = Target("policy:mine.py:Mine", "scheduler:mine.py:Mine")
    folder = written(tmp_path, (mine,), Progress(mine.name, 1.0, 1.0, Totals(runs=1)))
    (reason,) = summarise([folder], trusted=()).reasons
    assert reason.endswith("allow its import with --subject scheduler:mine.py:Mine")
    (reason,) = summarise([folder], trusted={mine.subject}).reasons
    assert "no file" in reason


def test_known_issues_do_not_fail(one: Path) -> None:
    spoil(one, known="https://example.org/issues/17")
    summary = summarise([one])
    assert summary.verdict != "fail"
    assert "beside 1 known issue" in summary.sentence


def test_an_issue_known_in_one_ledger_only_fails(shards: list[Path], one: Path) -> None:
    spoil(one, known="https://example.org/issues/17")
    summary = summarise([shards[1], one])
    assert [finding.record.known for finding in summary.findings] == [None]
    assert summary.verdict == "fail"


def test_failing_runs_that_nobody_looked_into_fail(tmp_path: Path, one: Path) -> None:
    folder = written(tmp_path / "b", (CACHE,), all_reached(CACHE))
    assert summarise([folder]).verdict == "pass"
    Store(folder).keep_raw(load_case(finding_file(one).parent / "case.json"))
    summary = summarise([folder])
    assert (summary.verdict, summary.untriaged) == ("fail", 1)
    assert any("1 failing run lay in raw/" in note for note in summary.notes)


# -- findings that look like others ----------------------------------------------------------------


def second(folder: Path, **changes: Any) -> tuple[FindingRecord, FindingRecord]:
    """The finding of that folder, and another one beside it."""
    first = read_record(finding_file(folder), FindingRecord)
    changed = replace(first, **{"id": "excl_second"} | changes)
    copied = shutil.copytree(finding_file(folder).parent, folder / "findings" / changed.id)
    (copied / "finding.json").write_text(as_text(changed))
    return first, changed


def test_a_finding_that_needs_more_and_says_the_same_names_the_other(one: Path) -> None:
    first = read_record(finding_file(one), FindingRecord)
    number = re.compile(r"\d+").search(first.message)
    assert number is not None
    elsewhere = first.message.replace(number[0], "90, 91")
    _, more = second(one, message=elsewhere, kinds=(*first.kinds, "reset"))
    summary = summarise([one])
    assert {f.record.id: f.like for f in summary.findings} == {first.id: "", more.id: first.id}
    assert f'<a href="#{first.id}">{first.id}</a>, which says the same' in page(summary)
    result = kvproof_report(one, "--out", one / "r.html")
    assert f"{more.id} (looks like {first.id}): {elsewhere}" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kinds": ("reset",)},
        {"kinds": ()},
        {"property": "REF", "features": ("salt",)},
        {"subject": "another.engine:Cache", "features": ("salt",)},
        {"message": "something else", "features": ("salt",)},
    ],
    ids=str,
)
def test_others_do_not(one: Path, changes: dict[str, Any]) -> None:
    second(one, **changes)
    assert [finding.like for finding in summarise([one]).findings] == ["", ""]


def test_of_several_it_names_the_one_that_needs_least() -> None:
    none = FindingRecord("a", "t", "engine", "REF", ("admit",), (), "b 1", "", 3, 9, "s", 0, 0.0)
    some = replace(none, id="b", features=("salt",))
    most = replace(none, id="c", features=("salt", "media"), message="b 2, 3")
    assert likenesses([most, some, none]) == {"b": "a", "c": "a"}


def test_keys_and_numbers_make_no_difference() -> None:
    said = "block 3 is findable under key 0a1b2c3d4e5f…, but blocks [1, 2] are not"
    assert sentence_of(said) == "block # is findable under key #, but blocks [#] are not"


# -- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summary(shards: list[Path]) -> Summary:
    return summarise(shards)


@pytest.fixture(scope="module")
def html(summary: Summary) -> str:
    return page(summary)


def test_the_page_tells_the_finding(summary: Summary, html: str) -> None:
    (finding,) = summary.findings
    record = finding.record
    text = unescape(html)
    assert f"FAIL</span> {summary.sentence}" in text
    assert record.message in text
    for clause in re.findall(r"(?<=; )[^;]+ at op \d+ \(\w+\)", record.explanation):
        assert f"<li>{clause}</li>" in text
    for line in (finding.folder / "log.txt").read_text().splitlines()[-record.operations :]:
        assert line in text
    assert f"kvproof replay {finding.folder / 'case.json'} --log" in text
    assert (finding.folder / f"test_{record.id}.py").read_text().strip() in text
    assert f'aria-label="Block map of {record.id}"' in html


def test_its_sections_come_in_this_order(html: str) -> None:
    heads = re.findall(r"<h[1234][^>]*>(.*?)</h", html, re.S)
    plain = [unescape(re.sub(r"<[^>]*>", "", head)).strip() for head in heads]
    assert plain[0].startswith("FAIL")
    assert plain[1] == "Findings"
    order = [
        "How it came about",
        "Block map over time",
        "Operations, one a line",
        "Replay it",
        "Situations reached and missed",
        "Transition coverage",
        "Novelty and speed over time",
        "What was run",
    ]
    assert [head for head in plain if head in order] == order


def test_what_was_looked_at_is_told(summary: Summary, html: str) -> None:
    for subject in summary.subjects:
        for goal in subject.goals:
            assert goal.situation in unescape(html)
    for check, count in summary.total.checked.items():
        if count:
            assert f'<th scope="row">{check}</th>' in html
            assert f"{count:,}" in html
    assert f"{summary.total.ops:,}" in html
    assert len(re.findall("<figure>", html)) == 3


def test_it_needs_nothing_but_itself(html: str) -> None:
    assert not re.findall(r"<script|<link|<img|<iframe|@import|\bsrc=|\bon\w+=", html)
    assert re.findall(r"url\(([^)]*)\)", html) == ["#hatch", "#crosshatch", "#dots"]
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', html))


def test_coverage_of_code_is_told_where_it_was_measured(one: Path) -> None:
    assert "Not measured." in page(summarise([one]))
    files = (FileCoverage("/a/b/pool.py", 90, 81, 40, 37), FileCoverage("/a/c.py", 3, 2, 1, 0))
    (one / "coverage.json").write_text(as_text(CodeCoverage(12, files)))
    html = page(summarise([one]))
    assert "Not measured." not in html
    row = '<th scope="row">b/pool.py</th>' + "".join(
        f'<td class="number">{figure}</td>' for figure in (90, 81, 40, 37)
    )
    assert row in html


HOSTILE = '<script>alert(1)</script>\x1b[31m & "quoted" {{ 7 * 7 }} \' onload=x'


def test_what_other_peoples_code_says_is_escaped(one: Path) -> None:
    record = spoil(one, message=HOSTILE, explanation=f"X: {HOSTILE}.\nBlock 1: {HOSTILE}; <b>y</b>")
    (finding_file(one).parent / "log.txt").write_text(f"{HOSTILE}\n\nw<i>\n\nl<i>\n\n{HOSTILE}\n")
    (finding_file(one).parent / f"test_{record.id}.py").write_text(HOSTILE)
    html = page(summarise([one]))
    assert "<script" not in html
    assert "<b>y" not in html
    assert "<i>" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4
    assert "{{ 7 * 7 }}" in html


@pytest.mark.parametrize(
    ("known", "links"), [("https://example.org/issues/17", True), ("javascript:alert(1)", False)]
)
def test_a_known_issue_is_linked_if_it_is_on_the_web(one: Path, known: str, links: bool) -> None:
    spoil(one, known=known)
    html = page(summarise([one]))
    assert f"{known}" in html
    assert (f'href="{known}"' in html) == links


def test_a_finding_without_a_case_is_told_without_a_map(one: Path) -> None:
    folder = finding_file(one).parent
    record = spoil(one, explanation="kernels say:\n  max |d| = 3")
    (folder / "case.json").unlink()
    (folder / f"test_{record.id}.py").unlink()
    (folder / "log.txt").write_text("one\n\ntwo\n")
    html = page(summarise([one]))
    assert "There is no case that could be replayed" in html
    assert "  max |d| = 3" in html
    for part in ("Replay it", "pytest file", "Operations, one a line", "<mark>"):
        assert part not in html


def test_a_case_that_fails_no_more_is_told_as_such(one: Path) -> None:
    case = finding_file(one).parent / "case.json"
    case.write_text(case.read_text().replace(f'  "fault": "{FAULT}",\n', ""))
    html = page(summarise([one]))
    assert "Replayed for this page, the case violated nothing." in html
    assert 'class="violation"' not in html


def test_what_is_in_brackets_is_no_clause_of_its_own(one: Path) -> None:
    explanation = (
        "PLAN at operation 3: m.\nThe policy was given iteration 1: 2 of 2 blocks free (block size "
        "2; 1 (of 2) of them cached; 0 pinned), no request waits; nothing runs.\n"
        "Block 1: it is free; (it is read"
    )
    spoil(one, message="m", explanation=explanation)
    items = re.findall("<li>(.*?)</li>", page(summarise([one])))
    assert items[:2] == [
        "2 of 2 blocks free (block size 2; 1 (of 2) of them cached; 0 pinned), no request waits",
        "nothing runs",
    ]
    assert items[2:4] == ["it is free", "(it is read"]


def test_the_log_marks_where_it_was_seen_and_the_page_once(one: Path) -> None:
    case = load_case(finding_file(one).parent / "case.json")
    *before, last = (finding_file(one).parent / "log.txt").read_text().splitlines()
    assert last.endswith(f"   ✗ {case.violates}")
    assert "✗" not in "\n".join(before)
    html = unescape(page(summarise([one])))
    assert re.findall("<mark>(.*?)</mark>", html) == [last]
    assert f"<title>{' '.join(last.partition('   ✗')[0].split())}</title>" in html


def test_a_finding_has_one_name(one: Path) -> None:
    record = read_record(finding_file(one), FindingRecord)
    source = (finding_file(one).parent / f"test_{record.id}.py").read_text()
    assert f"\ndef test_{record.id}() -> None:" in source


def test_coverage_of_code_of_ones_own_has_to_be_allowed(tmp_path: Path) -> None:
    hint = "kvproof fuzz --replay-corpus --coverage --out "
    mine = Target("policy:a b.py:Mine", "scheduler:a b.py:Mine")
    kernels = Target("kernels", KERNELS)
    folder = written(tmp_path / "campaign", (CACHE, mine, kernels), all_reached(CACHE))
    html = unescape(page(summarise([folder], frozenset())))
    assert f"<code>{hint}{folder} --subject 'scheduler:a b.py:Mine'</code>" in html
    own = written(tmp_path / "own", (CACHE,), all_reached(CACHE))
    assert f"<code>{hint}{own}</code>" in unescape(page(summarise([own])))


def test_transitions_are_told_apart_from_the_charts(html: str) -> None:
    assert "those of all targets taken together" in html
    assert "Distinct transitions seen, counted target by target" in html


def test_code_of_somebodys_is_not_replayed_unasked(one: Path) -> None:
    case = finding_file(one).parent / "case.json"
    case.write_text(case.read_text().replace('"subject": "engine"', '"subject": "no_such:Thing"'))
    summary = summarise([one])
    assert "imports code of yours: kvproof report … --subject no_such:Thing" in page(summary)
    assert "which is not possible here" in page(summary, trusted={"no_such:Thing"})


# -- JUnit ---------------------------------------------------------------------------------------


def junit_of(summary: Summary, path: Path) -> ElementTree.Element:
    write_junit(summary, path)
    return ElementTree.parse(path).getroot()


def test_junit_has_a_test_for_each_target_and_property(summary: Summary, tmp_path: Path) -> None:
    root = junit_of(summary, tmp_path / "junit.xml")
    suites = {suite.get("name"): suite for suite in root.iter("testsuite")}
    assert set(suites) == {"kvproof.cache", "kvproof.reached"}
    cache = suites["kvproof.cache"]
    (record,) = [finding.record for finding in summary.findings]
    checked = {name for name, count in summary.total.checked.items() if count}
    assert {case.get("name") for case in cache.iter("testcase")} == checked | {record.property}
    assert (cache.get("tests"), cache.get("failures")) == (str(len(checked)), "1")
    (failure,) = cache.iter("failure")
    assert failure.get("message") == record.message
    assert record.explanation in (failure.text or "")


def test_junit_skips_known_issues(one: Path, tmp_path: Path) -> None:
    record = spoil(one, known="https://example.org/issues/17")
    root = junit_of(summarise([one]), tmp_path / "junit.xml")
    assert not [*root.iter("failure")]
    (skipped,) = [case for case in root.iter("testcase") if case.find("skipped") is not None]
    assert skipped.get("name") == record.property
    assert [s.get("message") for s in root.iter("skipped")] == [f"known: {record.known}"]


def test_junit_fails_the_check_of_a_kernel(one: Path, tmp_path: Path) -> None:
    text = journal(one).read_text().replace('"checked":{', '"checked":{"copy-blocks":1,')
    journal(one).write_text(text)
    spoil(one, property="KERNEL", kinds=("copy-blocks",))
    root = junit_of(summarise([one]), tmp_path / "junit.xml")
    failing = [c.get("name") for c in root.iter("testcase") if c.find("failure") is not None]
    assert failing == ["copy-blocks"]


def test_junit_has_an_error_where_silence_proves_nothing(tmp_path: Path, one: Path) -> None:
    line = all_reached(CACHE)
    folder = written(tmp_path / "a", (CACHE, FCFS), line)
    Store(folder).keep_raw(load_case(finding_file(one).parent / "case.json"))
    root = junit_of(summarise([folder]), tmp_path / "junit.xml")
    erroneous = [c.get("name") for c in root.iter("testcase") if c.find("error") is not None]
    assert erroneous == ["scheduler:fcfs", "failing runs are looked into"]
    assert not [*root.iter("failure")]


def test_junit_passes_nothing_that_the_verdict_does_not(summary: Summary, tmp_path: Path) -> None:
    """A known issue that is mended fails; findings that are gone leave doubts."""
    root = junit_of(replace(summary, stale=1, lost=2), tmp_path / "junit.xml")
    told = {
        case.get("name"): case[0].tag
        for case in root.iter("testcase")
        if case.get("classname") == "kvproof.reached" and len(case)
    }
    assert told["findings are there"] == "error"
    assert told["known issues are not mended"] == "failure"


def test_junit_is_xml_whatever_other_peoples_code_says(one: Path, tmp_path: Path) -> None:
    spoil(one, message=f"{HOSTILE}\x00", explanation=f"\x08{HOSTILE}")
    root = junit_of(summarise([one]), tmp_path / "junit.xml")
    (failure,) = root.iter("failure")
    assert failure.get("message") == HOSTILE.replace("\x1b", "\ufffd") + "\ufffd"


# -- the command ---------------------------------------------------------------------------------


def kvproof_report(*arguments: str | Path) -> Result:
    application = typer.Typer()
    application.command()(report_command.report)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


def test_the_command_writes_page_and_xml(shards: list[Path], tmp_path: Path) -> None:
    out, junit = tmp_path / "r.html", tmp_path / "j.xml"
    result = kvproof_report(*shards, "--out", out, "--junit", junit)
    assert result.exit_code == 1
    assert "FAIL 1 finding (EXCL)" in result.output
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert ElementTree.parse(junit).getroot().tag == "testsuites"


def test_the_command_prints_json(shards: list[Path], summary: Summary, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    fields = json.loads(kvproof_report(*shards, "--out", out, "--json").stdout)
    assert (fields["schema"], fields["verdict"], fields["page"]) == (1, "fail", str(out))
    assert fields["ops"] == summary.total.ops
    (violation,) = fields["violations"]
    assert violation["id"] == summary.findings[0].record.id
    assert Path(violation["case"]).is_file()
    assert [campaign["seed"] for campaign in fields["campaigns"]] == ["7", "7"]


@pytest.mark.parametrize(("reached", "code"), [(True, 0), (False, 3)])
def test_exit_codes_are_those_of_the_verdict(tmp_path: Path, reached: bool, code: int) -> None:
    lines = [all_reached(CACHE)] * reached
    folder = written(tmp_path / "campaign", (CACHE,), *lines)
    result = kvproof_report(folder, "--out", tmp_path / "r.html")
    assert result.exit_code == code
    assert ("because engine: nothing was run" in result.output) != reached


def test_a_campaign_that_there_is_not_is_what_is_missing(tmp_path: Path) -> None:
    result = kvproof_report(tmp_path / "nope")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"{tmp_path / 'nope'}: there is no such campaign's folder"


def test_without_the_extra_it_says_what_to_install(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_command, "find_spec", lambda name: None)
    result = kvproof_report(shards[0], "--out", tmp_path / "r.html")
    assert isinstance(result.exception, InputError)  # which main() prints, and exits with 2
    assert str(result.exception) == (
        "a report needs jinja2 and junitparser: pip install 'kvproof[report]' (in a checkout: "
        "'.[report]')"
    )
    assert not (tmp_path / "r.html").exists()


def test_a_place_that_cannot_be_written_is_said_first(one: Path, tmp_path: Path) -> None:
    result = kvproof_report(one, "--out", tmp_path / "nowhere" / "r.html")
    assert isinstance(result.exception, InputError)
    assert "its folder does not exist" in str(result.exception)


@pytest.mark.parametrize(
    ("closed", "right", "complaint"),
    [
        ("closed", os.X_OK, "its folder may not be entered"),
        ("closed", os.W_OK, "its folder cannot be written to"),
        ("closed/j.xml", os.W_OK, "cannot be written to"),
    ],
)
def test_nothing_is_written_where_the_other_file_cannot_be(
    one: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed: str,
    right: int,
    complaint: str,
) -> None:
    """One who runs the tests as root may write anywhere."""
    out, junit = tmp_path / "r.html", tmp_path / "closed" / "j.xml"
    junit.parent.mkdir()
    if closed.endswith(".xml"):
        junit.touch()

    def access(path: str | Path, mode: int) -> bool:
        return Path(path) != tmp_path / closed or not mode & right

    monkeypatch.setattr(os, "access", access)
    result = kvproof_report(one, "--out", out, "--junit", junit)
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"{junit}: {complaint}"
    assert not out.exists()


def test_the_command_says_that_maps_are_left_out(one: Path, tmp_path: Path) -> None:
    note = "the block maps of no_such:Thing are left out: a replay imports code of yours"
    spoil(one, subject="no_such:Thing")
    arguments = (one, "--out", tmp_path / "r.html")
    assert note in kvproof_report(*arguments).output
    assert note not in kvproof_report(*arguments, "--subject", "no_such:Thing").output
    spoil(one, subject="kernels")
    assert "block maps" not in kvproof_report(*arguments).output


def test_its_help_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in kvproof_report("--help").output.splitlines()]
    told = lines[lines.index("Add up what campaigns did, and write one page that tells it.") :]
    paragraph = told[2 : told.index("", 2)]
    assert paragraph[0].startswith("The page needs nothing but itself")
    written = [line.strip() for line in (report_command.report.__doc__ or "").splitlines()]
    assert set(paragraph) <= set(written)


def test_the_help_teaches() -> None:
    output = kvproof_report("--help").output
    assert "kvproof[report]" in output
    assert "'.[report]'" in output
    assert "kvproof report shard-0 shard-1" in output
