"""Campaigns as they are run: processes that are killed, that hang, that run out of room."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvproof.fuzz.campaigns import guarded
from kvproof.fuzz.campaigns import shard as shard_module
from kvproof.fuzz.campaigns.executors import BAD_INPUT, WORKER, Ended, LocalExecutor
from kvproof.fuzz.campaigns.guarded import Judged, Replayer
from kvproof.fuzz.campaigns.known import KnownIssue, Ledger, entry_of, mended, read_ledger
from kvproof.fuzz.campaigns.mended import put_mended_aside
from kvproof.fuzz.campaigns.records import (
    DIED,
    HANG,
    Campaign,
    FindingRecord,
    PassedOver,
    Progress,
    Target,
)
from kvproof.fuzz.campaigns.regress import Replayed, replay_corpus
from kvproof.fuzz.campaigns.run import CampaignRun, Standing
from kvproof.fuzz.campaigns.shard import Shard, ShardJob, run_job
from kvproof.fuzz.campaigns.store import (
    Journal,
    Store,
    as_text,
    digest,
    read_lines,
    read_lines_from,
    write_whole,
)
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.fuzz.cli import fuzz as fuzz_command
from kvproof.fuzz.cli import main, output
from kvproof.fuzz.cli.app import app
from kvproof.fuzz.cli.fuzz import seconds_of
from kvproof.fuzz.report import summary as summary_module
from kvproof.fuzz.report.summary import summarise
from kvproof.fuzz.search import Found
from kvproof.fuzz.verdicts import Judgement
from kvproof.invariants.case import Case, load_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation

CACHE = Target("cache", "engine", tiers_share=0.0)
FAULT = "finish-forgets-its-table"
"""Fails most runs, and shrinks to two operations."""
OTHER = "no-copy-on-write"
CANARY = ("--target", "cache", "--fault", FAULT, "--seed", "canary", "--workers", "2")

_HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""Where tests are run in the background, their children would ignore it."""
_MAIN = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"


def kvproof(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As typed, but in this process: only the workers are others."""
    argv, out, err = ["kvproof", *arguments], StringIO(), StringIO()
    with (
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", argv),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return subprocess.CompletedProcess(argv, ended.value.code, out.getvalue(), err.getvalue())


def in_a_process(*arguments: str, cwd: Path, before: str) -> subprocess.CompletedProcess[str]:
    """After some Python."""
    return subprocess.run(
        [sys.executable, "-c", before + _MAIN, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def printed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(result.stdout)
    assert fields["schema"] == 1
    return fields


def lines_of(store: Store) -> list[Progress]:
    return [
        line for path in store.shards.glob("[0-9]*.jsonl") for line in read_lines(path, Progress)
    ]


# -- a campaign that finds something ---------------------------------------------------------------


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two workers, and a planted fault that both meet."""
    folder = tmp_path_factory.mktemp("canary")
    for _ in range(20):  # where the machine is busy, once does not take them far
        result = kvproof("fuzz", "--time", "3s", "--out", "c", *CANARY, "--json", cwd=folder)
        assert result.returncode in (1, 3), result.stderr
        if all(failures_of(Store(folder / "c"), shard) > 1 for shard in (0, 1)):
            return folder, printed(result)
    raise AssertionError("in vain")


def failures_of(store: Store, shard: int) -> int:
    lines = read_lines(store.journal(shard), Progress)
    return sum(sum(line.failures.values()) for line in lines)


def test_a_canary_is_found_by_both_workers_and_told_once(
    canary: tuple[Path, dict[str, Any]],
) -> None:
    folder, fields = canary
    (violation,) = fields["violations"]
    assert (fields["verdict"], violation["property"]) == ("fail", "QUIES")
    assert violation["kinds"] == ["abort", "admit"]
    assert len(load_case(folder / violation["case"]).operations) == 2
    store = Store(folder / "c")
    assert violation["failures"] == sum(failures_of(store, shard) for shard in (0, 1))
    assert not list(store.raw.iterdir())
    assert fields["ops"] > 100
    assert fields["seed"] == "canary"
    for key in ("subject", "seconds", "ops_per_second", "operations", "goals", "invariants"):
        assert fields[key]


_NO_FAULT = "from contextlib import nullcontext"


def test_its_pytest_file_fails_until_the_fault_is_mended(
    canary: tuple[Path, dict[str, Any]],
) -> None:
    folder, fields = canary
    (violation,) = fields["violations"]
    test = (folder / violation["case"]).parent / f"test_{violation['id']}.py"
    mended_test = test.with_name("test_mended.py")
    mended_test.write_text(
        test.read_text()
        .replace(f"fault_by_id({FAULT!r}).installed()", "nullcontext()")
        .replace("from kvproof.fuzz.faults import fault_by_id", _NO_FAULT)
    )
    files = (str(test), str(mended_test))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    mended_test.unlink()
    assert "1 failed, 1 passed" in done.stdout
    assert f"FAILED {test.relative_to(folder)}::" in done.stdout


def test_the_same_command_goes_on_and_another_is_refused(
    canary: tuple[Path, dict[str, Any]],
) -> None:
    folder, fields = canary
    again = kvproof("fuzz", "--time", "1s", "--out", "c", *CANARY, "--json", cwd=folder)
    later = printed(again)
    assert later["ops"] > fields["ops"]
    assert [v["id"] for v in later["violations"]] == [v["id"] for v in fields["violations"]]
    before = sorted((folder / "c").rglob("*"))
    for changed, message in (
        (("--seed", "other"), "its seed is canary, not other"),
        (("--workers", "3"), "it was begun with --workers 2 (or --shard I/2), not 3"),
        (("--target", "tiers"), "it drives cache, not cache, tiers"),
        (("--fault", OTHER), f"it was begun with --fault {FAULT}, not with --fault {OTHER}"),
    ):
        result = kvproof("fuzz", "--time", "2s", "--out", "c", *CANARY, *changed, cwd=folder)
        assert result.returncode == 2
        assert result.stderr.strip() == f"kvproof: c: is another campaign: {message}"
    assert sorted((folder / "c").rglob("*")) == before


def test_a_call_that_goes_on_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, where there is no terminal, now and then how far it is."""
    monkeypatch.setattr(output, "LINE_SECONDS", (0.5, 0.5))
    rarer = ("--target", "cache", "--fault", OTHER, "--seed", "canary", "--workers", "2")
    kvproof("fuzz", "--time", "2s", "--out", "c", *rarer, cwd=tmp_path)
    store = Store(tmp_path / "c")
    ops = sum(line.totals.ops for line in lines_of(store))
    kept, replayed = len(store.kept("cache")), sum(line.replayed for line in lines_of(store))
    result = kvproof("fuzz", "--time", "8s", "--out", "c", *rarer, cwd=tmp_path)
    assert re.search(rf"going on after \S+ s, {ops:,} operations; {kept} kept run", result.stdout)
    assert re.search(r"found after \S+ s, by an earlier call", result.stdout)
    told = result.stderr.splitlines()
    assert len(told) >= 2
    assert all(re.match(r"fuzzing, \d+ s: [\d,]+ operations, \d+ kept", line) for line in told)
    assert sum(line.replayed for line in lines_of(store)) == replayed + kept
    words = fuzz_command._words(Standing(ops=1, replayed=312, to_replay=929))
    assert words.endswith(", replaying 312 of 929 kept runs")


def test_what_is_mended_is_put_aside_and_comes_back_if_it_does(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = canary
    copytree(folder / "c", tmp_path / "c")
    store = Store(tmp_path / "c")
    (finding,) = store.found()
    put_mended_aside(store, [CACHE])
    assert store.found() == [finding]  # the fault is still planted
    case = store.findings / finding.id / "case.json"
    with_fault = case.read_text()
    case.write_text(with_fault.replace(f'"fault": "{FAULT}",', ""))
    put_mended_aside(store, [CACHE])
    assert not store.found()
    assert (store.mended / finding.id / "finding.json").is_file()
    summary = summarise([store.folder])
    assert summary.verdict != "fail"
    assert any("1 finding of before did not fail any more" in note for note in summary.notes)

    again = kvproof("fuzz", "--time", "4s", "--out", "c", *CANARY, "--json", cwd=tmp_path)
    fields = printed(again)
    assert (again.returncode, [v["id"] for v in fields["violations"]]) == (1, [finding.id])


def test_findings_that_were_taken_out_leave_it_unknown(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journals tell of failing runs, and nobody knows of what; put aside, it is known."""
    copytree(canary[0] / "c", tmp_path / "c")
    store = Store(tmp_path / "c")
    (finding,) = store.found()
    failures = sum(failures_of(store, shard) for shard in (0, 1))
    (store.findings / finding.id / "finding.json").unlink()
    with monkeypatch.context() as patched:  # as if enough had been reached
        passing = Judgement("pass", ())
        patched.setattr(summary_module, "_judged", lambda *arguments: passing)
        summary = summarise([store.folder])
    assert summary.verdict == "unknown"
    assert summary.reasons[0].endswith(
        f"{failures} failing runs of {finding.id}, which is neither in findings/ nor in mended/"
    )
    assert summary.sentence.startswith(f"There were {failures} failing runs of findings that are")
    for path in (store.findings / finding.id).iterdir():
        path.unlink()
    again = kvproof("fuzz", "--time", "4s", "--out", "c", *CANARY, "--json", cwd=tmp_path)
    assert [violation["id"] for violation in printed(again)["violations"]] == [finding.id]
    store.mended.mkdir()
    os.rename(store.findings / finding.id, store.mended / finding.id)
    assert not any("neither in" in reason for reason in summarise([store.folder]).reasons)


def test_what_never_failed_in_a_replay_is_not_taken_for_mended(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """By chance a run failed, and not again: one more replay that passes says nothing new."""
    folder, _ = canary
    store, triage, (failing,) = chance(folder / "c", tmp_path / "c")
    finding = triage.settle("cache", failing, 0.0)
    assert (finding.kinds, "does not happen again" in finding.message) == ((), True)
    put_mended_aside(store, [CACHE])
    assert finding in store.found()


def chance(canary: Path, folder: Path) -> tuple[Store, Triage, list[Found]]:
    """A campaign like the canary's, and its finding as one that does not fail again."""
    store, (told,) = Store(folder), Store(canary).found()
    store.begin(Campaign("s", (CACHE,), 1))
    case = load_case(canary / "findings" / told.id / "case.json")
    failing = Found(replace(case, fault=None), Violation(told.property, told.message))
    return store, Triage(store, Ledger(), 0), [failing]


# -- a folder that somebody else sent --------------------------------------------------------------

_THEIRS = "scheduler:{}/theirs.py:Theirs"


@pytest.fixture
def theirs(canary: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, str]:
    """A campaign of kvproof's own cache, and a policy beside it that nobody has named."""
    copytree(canary[0] / "c", tmp_path / "c")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return tmp_path, _THEIRS.format(tmp_path)


def disguised(case: Path, subject: str) -> Path:
    """Its file: a kept run bears the digest of its text."""
    text = case.read_text().replace('"subject": "engine"', f'"subject": "{subject}"')
    case.unlink()
    place = case.with_name(f"{digest(text)}.json") if "corpus" in case.parts else case
    place.write_text(text)
    return place


@pytest.mark.parametrize("where", ["corpus", "findings", "raw"])
def test_no_file_of_a_campaign_has_code_imported_that_nobody_named(
    theirs: tuple[Path, str], where: str
) -> None:
    folder, subject = theirs
    store = Store(folder / "c")
    (finding,) = store.found()
    case = store.findings / finding.id / "case.json"
    if where == "corpus":
        case = store.keep("cache", load_case(case))
    if where == "raw":
        case = store.keep_raw(replace(load_case(case), seed="canary/cache/0"))
    case = disguised(case, subject)
    command = [*CANARY, "--time", "2s"] if where != "corpus" else ["--replay-corpus"]
    result = kvproof("fuzz", "--out", "c", *command, cwd=folder)
    assert not (folder / "ran").exists()
    assert (result.returncode, str(case.relative_to(folder)) in result.stderr) == (2, True)
    assert f"is of subject {subject!r}" in result.stderr


@pytest.mark.parametrize("named", [(), ("--policy", "fcfs"), ("--subject", "fcfs")])
def test_a_subject_is_named_as_a_whole(tmp_path: Path, named: tuple[str, ...]) -> None:
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (Target("subject:theirs:fcfs", "theirs:fcfs"),), 1))
    result = kvproof("fuzz", "--replay-corpus", "--out", "c", *named, cwd=tmp_path)
    assert (result.returncode, "is code of somebody's" in result.stderr) == (2, True)


def test_the_kernels_are_nobodys_code(tmp_path: Path) -> None:
    """They keep no corpus; what the other targets have kept is replayed."""
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE, Target("kernels", "kernels")), 1))
    result = kvproof("fuzz", "--replay-corpus", "--out", "c", cwd=tmp_path)
    assert (result.returncode, "the corpus is empty" in result.stdout) == (3, True)


def test_a_finding_lies_in_the_folder_of_its_name(theirs: tuple[Path, str]) -> None:
    """Its id is part of paths, of one that is emptied too."""
    folder, _ = theirs
    store = Store(folder / "c")
    (finding,) = store.found()
    file = store.findings / finding.id / "finding.json"
    file.write_text(file.read_text().replace(finding.id, "../../elsewhere"))
    result = kvproof("fuzz", "--out", "c", *CANARY, "--time", "2s", cwd=folder)
    assert result.returncode == 2
    assert "its id is '../../elsewhere', unlike its folder's name" in result.stderr


# -- the ledger of known issues --------------------------------------------------------------------


def ledger(folder: Path, finding: FindingRecord, file: Path, **changes: Any) -> Path:
    entry = {**json.loads(entry_of(finding)), "issue": "ISSUE-17", "case": str(file), **changes}
    path = folder / "known.json"
    path.write_text(json.dumps({"format": "kvproof-known-issues", "version": 1, "issues": [entry]}))
    return path


def test_a_known_issue_is_told_and_does_not_fail(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = canary
    store = Store(folder / "c")
    (finding,) = store.found()
    known = ledger(tmp_path, finding, store.findings / finding.id / "case.json")
    command = ("fuzz", "--time", "1s", "--out", "c", *CANARY, "--json")
    result = kvproof(*command, "--known", str(known), cwd=folder)
    fields = printed(result)
    # Whether it reaches everything, too, depends on the machine.
    assert (result.returncode, fields["verdict"]) in ((0, "pass"), (3, "unknown"))
    assert [violation["known"] for violation in fields["violations"]] == ["ISSUE-17"]
    unknown = kvproof(*command, cwd=folder)
    assert (unknown.returncode, printed(unknown)["violations"][0]["known"]) == (1, None)


def test_an_entry_whose_case_passes_fails_the_campaign(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = canary
    store = Store(folder / "c")
    (finding,) = store.found()
    text = (store.findings / finding.id / "case.json").read_text()
    (tmp_path / "mended.json").write_text(text.replace(f'"fault": "{FAULT}",', ""))
    known = ledger(tmp_path, finding, Path("mended.json"))
    assert mended(read_ledger(known), []) == [
        "ISSUE-17 is mended: its case mended.json does not violate QUIES any more: remove the entry"
    ]
    result = kvproof(
        *("fuzz", "--time", "3s", "--workers", "1", "--target", "cache", "--out", "clean"),
        *("--known", str(known), "--json"),
        cwd=tmp_path,
    )
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (1, "fail")
    assert fields["violations"] == []
    assert any("remove the entry" in note for note in fields["notes"])
    summary = summarise([tmp_path / "clean"])  # a report judges the same
    assert (summary.verdict, fields["untriaged"]) == ("fail", 0)
    assert summary.sentence.startswith("1 known issue is mended: remove its entry. Nothing was")
    Store(tmp_path / "clean").tell_stale([])  # as a call does that finds nothing wrong with it
    assert summarise([tmp_path / "clean"]).verdict != "fail"


def test_an_entry_matches_only_its_own_finding(canary: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = canary
    (finding,) = Store(folder / "c").found()
    entry = KnownIssue("1", "engine", "QUIES", ("admit", "abort"), (), "x")
    assert entry.matches(finding)
    for changes in (
        {"subject": "mine:Subject"},
        {"property": "REF"},
        {"kinds": ("admit",)},
        {"features": ("salt",)},
    ):
        fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
        assert not KnownIssue(**{**fields, **changes}).matches(finding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issue": " "}, r"at \$.issues\[0\]: no issue: where is it tracked"),
        ({"issue": "ISSUE"}, r"at \$.issues\[0\]: no issue"),
        ({"kinds": []}, r"at \$.issues\[0\]: no kinds"),
        ({"kinds": ["admit"]}, "its kinds and features are not those of .*: abort, admit"),
        ({"features": ["salt"]}, "its kinds and features are not those of .*: abort, admit"),
        ({"case": "nowhere.json"}, "no file nowhere.json"),
        ({"kind": []}, "unknown field `kind`"),
    ],
)
def test_a_ledger_is_read_strictly(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = canary
    (finding,) = Store(folder / "c").found()
    case = folder / "c" / "findings" / finding.id / "case.json"
    with pytest.raises(InputError, match=message):
        read_ledger(ledger(tmp_path, finding, case, **changes))


# -- a campaign that finds nothing -----------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    store = Store(tmp_path / "c")
    while sum(line.totals.runs for line in lines_of(store)) < 60:
        result = kvproof(
            *("fuzz", "--time", "3s", "--workers", "1", "--target", "cache", "--out", "c"),
            *("--seed", "quiet"),
            cwd=tmp_path,
        )
    assert not [*store.findings.iterdir(), *store.raw_cases()]
    assert sum(line.done_twice for line in lines_of(store)) > 0
    assert result.returncode in (0, 3), result.stdout + result.stderr
    assert "PASS" in result.stdout or "UNKNOWN" in result.stdout
    replayed = kvproof("fuzz", "--replay-corpus", "--out", "c", "--json", cwd=tmp_path)
    fields = printed(replayed)
    assert (replayed.returncode, fields["verdict"]) == (0, "pass")
    assert fields["cases"] == sum(line.novel for line in lines_of(store)) > 5


def test_a_case_of_the_corpus_that_fails_now_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE,), 1))
    run_job(ShardJob(str(store.folder), 0, 1.0))
    for path, case in store.kept("cache"):
        path.unlink()
        store.keep("cache", replace(case, fault=FAULT))
    result = kvproof("fuzz", "--replay-corpus", "--out", "c", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (1, "fail")
    for failing in fields["violations"]:
        assert failing["property"] == "QUIES"
        assert (tmp_path / failing["case"]).is_file()


def test_a_case_at_which_a_checker_stumbles_leaves_it_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE,), 1))
    path = store.keep("cache", Case("engine", Configuration(), []))
    stumbled = Judged(problem="at operation 0: KeyError(3)")
    monkeypatch.setattr(Replayer, "judge", lambda replayer, case: stumbled)
    result = kvproof("fuzz", "--replay-corpus", "--out", "c", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (3, "unknown")
    assert fields["reasons"] == [f"{path.relative_to(tmp_path)}: at operation 0: KeyError(3)"]
    told = kvproof("fuzz", "--replay-corpus", "--out", "c", cwd=tmp_path)
    assert "at operation 0: KeyError(3)" in told.stdout


def test_coverage_of_the_code_under_test_is_taken_by_replaying(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE,), 1))
    run_job(ShardJob(str(store.folder), 0, 0.5))
    result = kvproof("fuzz", "--replay-corpus", "--coverage", "--out", "c", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    files = {file["file"]: file for file in printed(result)["coverage"]["files"]}
    (pool,) = [figures for name, figures in files.items() if name.endswith("engine/pool.py")]
    (arc,) = [figures for name, figures in files.items() if name.endswith("eviction/arc.py")]
    assert pool["covered_branches"] > 0.5 * pool["branches"] > 0
    assert arc["covered_statements"] < 0.7 * arc["statements"]  # no run evicts by it
    assert (store.folder / "coverage.json").is_file()


# -- shards of machines that cannot see each other -------------------------------------------------


def test_a_shard_is_run_alone_and_all_are_reported_together(tmp_path: Path) -> None:
    for shard in (0, 1):
        result = kvproof(
            *("fuzz", "--shard", f"{shard}/2", "--seed", "ci", "--time", "2s"),
            *("--target", "cache", "--out", f"shard-{shard}", "--json"),
            cwd=tmp_path,
        )
        assert result.returncode in (0, 3), result.stderr
        stores = [path.name for path in (tmp_path / f"shard-{shard}" / "shards").glob("*.jsonl")]
        assert stores == [f"{shard:04}.jsonl"]
    campaigns = [Store(tmp_path / f"shard-{n}").campaign() for n in (0, 1)]
    assert campaigns[0] == campaigns[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "4/4"), "--shard 4/4: say 0/4"),
        (("--shard", "1"), "--shard 1: say 0/4"),
        (("--shard", "0/2", "--workers", "2"), "leave out --workers"),
        (("--shard", "0/2"), "--shard: say --seed as well"),
        (("--time", "soon"), "--time soon: say 30s"),
        (("--time", "0s"), "--time 0s: say 30s"),
        (("--coverage",), "--coverage is taken with --replay-corpus"),
        (("--replay-corpus",), "is no campaign's folder"),
        (("--known", "nowhere.json"), "nowhere.json: No such file"),
        (("--seed", "two\nlines"), "--seed: say it in one line"),
        (("--target", "nothing"), "unknown target 'nothing'"),
    ],
)
def test_bad_usage_is_one_line(tmp_path: Path, arguments: Sequence[str], message: str) -> None:
    result = kvproof("fuzz", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_teaches_by_examples() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--help"])
    assert result.exit_code == 0
    assert result.output.count("kvproof fuzz --") >= 4


def test_times() -> None:
    assert [seconds_of(text) for text in ("30s", "5m", "8h", "2d", "1.5m", "90")] == [
        *(30.0, 300.0, 28_800.0, 172_800.0, 90.0, 90.0)
    ]


# -- files that are not as they were written -------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> Store:
    """A campaign that has run for a moment."""
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE,), 1))
    run_job(ShardJob(str(store.folder), 0, 0.3))
    return store


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("campaign.json", "{}", "campaign.json: Object missing required field"),
        ("campaign.json", '{"format": ', "campaign.json: Input data was truncated"),
        ("shards/0000.jsonl", "nonsense\n", "0000.jsonl:1: JSON is malformed"),
        (f"corpus/cache/{digest('[]')}.json", "[]", ".json: Expected `object`"),
        ("corpus/cache/0123.json", "{}", "0123.json: is not as it was written"),
        ("raw/0123.json", "{", "0123.json:1:2: the file ends too early"),
        ("findings/x_1/finding.json", "{}", "finding.json: Object missing required field"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_left_alone(
    begun: Store, file: str, text: str, message: str
) -> None:
    path = begun.folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    result = kvproof("fuzz", "--time", "1s", "--target", "cache", "--out", ".", cwd=begun.folder)
    assert result.returncode == 2, result.stdout
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert path.read_text() == text


def test_a_torn_last_line_is_no_line_and_is_cut_off(begun: Store) -> None:
    path = begun.journal(0)
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[:40])
    assert len(read_lines(path, Progress)) == whole.count(b"\n")
    run_job(ShardJob(str(begun.folder), 0, 0.3))
    assert path.read_bytes().startswith(whole)
    assert len(read_lines(path, Progress)) > whole.count(b"\n")


def test_a_journal_is_quoted_by_its_line(begun: Store) -> None:
    """As a report does, from wherever it is read on."""
    path = begun.journal(0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[0] + b"nonsense\n")
    with pytest.raises(InputError, match=rf"0000\.jsonl:{whole.count(10) + 2}: JSON is mal"):
        read_lines_from(path, Progress, len(whole))


def test_a_kept_run_that_was_edited_is_named(begun: Store) -> None:
    path, _ = begun.kept("cache")[0]
    path.write_text(path.read_text().replace('"operations"', '"operations" '))
    for command in (["--time", "1s", "--target", "cache"], ["--replay-corpus"]):
        result = kvproof("fuzz", *command, "--out", ".", cwd=begun.folder)
        assert (result.returncode, f"{path.name}: is not as it was" in result.stderr) == (2, True)


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(InputError, match="is not empty, and is no campaign's"):
        Store(tmp_path).begin(Campaign("s", (CACHE,), 1))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_shard_is_run_by_one_process_at_a_time(
    begun: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "BUSY_SECONDS", 0.1)
    journal = Journal(begun.journal(0))
    with pytest.raises(InputError, match="shard 0 is run by another process"):
        run_job(ShardJob(str(begun.folder), 0, 0.1))
    journal.close()
    run_job(ShardJob(str(begun.folder), 0, 0.1))


def test_a_folder_is_worked_in_by_one_call_at_a_time(tmp_path: Path) -> None:
    """But for shards that are run one by one, each by its own call."""
    store, campaign = Store(tmp_path / "c"), Campaign("s", (CACHE,), 2)
    command = ("fuzz", "--out", "c", "--seed", "s", "--target", "cache", "--time", "1s")
    whole, one, other = ("--workers", "2"), ("--shard", "0/2"), ("--shard", "1/2")
    for taken, refused in ((None, (whole, one, other)), (0, (whole, one))):
        with store.taken(campaign, taken):
            before = contents(store)
            for options in refused:
                result = kvproof(*command, *options, cwd=tmp_path)
                assert result.returncode == 2
                (line,) = result.stderr.splitlines()
                assert line.startswith("kvproof: c: ")
                assert line.endswith(
                    "this campaign is being run by another kvproof fuzz: "
                    "wait until that has ended, or choose another --out"
                )
            assert contents(store) == before
            if taken is not None:
                result = kvproof(*command, *other, cwd=tmp_path)
                assert result.returncode in (0, 3), result.stderr
                assert [path.name for path in store.shards.glob("*.jsonl")] == ["0001.jsonl"]
    assert kvproof(*command, *whole, cwd=tmp_path).returncode in (0, 3)


def contents(store: Store) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}


def test_a_full_disk_ends_the_campaign_clearly_and_tears_nothing(tmp_path: Path) -> None:
    """Files may grow to some kilobytes only: the journal does not fit."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16000, 16000))\n"
    command = ("fuzz", "--time", "60s", "--target", "cache", "--workers", "1", "--out", "c")
    result = in_a_process(*command, cwd=tmp_path, before=limit)
    assert result.returncode == 2, result.stdout
    *progress, line = result.stderr.strip().splitlines()
    assert re.search(r"c/\S+: (No space left on device|File too large)", line)
    assert all(told.startswith("fuzzing, ") for told in progress)
    store = Store(tmp_path / "c")
    lines_of(store)
    assert store.journal(0).read_bytes()[-1:] in (b"", b"\n")
    assert all(case.operations for _, case in store.kept("cache"))
    again = kvproof(*command[:2], "2s", *command[3:], cwd=tmp_path)  # there is room again
    assert again.returncode in (0, 3), again.stderr


def test_a_worker_whose_log_has_no_room_either_says_so_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would have died, of the run that it was at, and that would be a finding."""
    job = json.dumps({"folder": str(tmp_path / "none"), "shard": 0, "seconds": 1.0})
    with open("/dev/full", "w") as full:
        worker = subprocess.run([*WORKER, job], stdout=full, stderr=full, check=False)
    assert worker.returncode == BAD_INPUT

    class Speechless(InThisProcess):
        def ended(self) -> list[Ended]:
            jobs, self.jobs = self.jobs, []
            return [Ended(job.shard, BAD_INPUT) for job in jobs]

    store, campaign = Store(tmp_path / "c"), Campaign("s", (CACHE,), 1)
    store.begin(campaign)
    run = CampaignRun(store.folder, campaign, Speechless(), shards=[0], seconds=60)
    with pytest.raises(InputError, match=r"shard 0 cannot go on, .*: is the disk full"):
        run.run()


def test_a_shard_is_quoted_from_where_it_was_started(tmp_path: Path) -> None:
    """Its log goes on with the campaign: what it said the last time does not explain this one."""
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (CACHE,), 1))
    store.log(0).write_text("a warning of yesterday\n")
    executor = LocalExecutor()
    executor.start(ShardJob(str(store.folder), 0, 0.0))
    ended: list[Ended] = []
    wait_until(lambda: ended.extend(executor.ended()) or ended)
    assert ended == [Ended(0, 0, "")]


def test_what_does_not_fit_in_a_journal_is_not_begun(
    begun: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a part of a line."""
    whole, write = begun.journal(0).read_bytes(), os.write
    journal = Journal(begun.journal(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, text: write(file, text[:100]))
        with pytest.raises(OSError, match=r"No space left on device: .*0000\.jsonl"):
            journal.append(lines_of(begun)[:1])
    assert begun.journal(0).read_bytes() == whole
    journal.append(lines_of(begun)[:1])
    journal.close()
    assert len(lines_of(begun)) == whole.count(b"\n") + 1


# -- processes that are killed ---------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HEARS_CTRL_C + _MAIN, "fuzz", "--out", "c", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


def has_findings(store: Store) -> bool:
    return any(store.findings.glob("[!.]*/finding.json"))


def length_of(store: Store, shard: int) -> int:
    """Bytes of a shard's journal; a worker that has done no run yet has none."""
    path = store.journal(shard)
    return path.stat().st_size if path.exists() else 0


def test_killed_workers_are_started_again_and_lose_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "c")
    process = started(tmp_path, "--time", "300s", *CANARY)
    wait_until(lambda: has_findings(store))
    seen = {record.id for record in store.found()}
    for pause in (0.3, 0.9, 0.1):
        time.sleep(pause)
        wait_until(lambda: children_of(process.pid))
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
    for shard, length in enumerate([length_of(store, shard) for shard in (0, 1)]):  # both go on
        wait_until(lambda s=shard, n=length: length_of(store, s) > n)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert seen <= {record.id for record in store.found()}
    assert not list(store.raw_cases())
    for shard in (0, 1):
        assert read_lines(store.journal(shard), Progress)


def test_a_killed_parent_takes_its_workers_along_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "c")
    process = started(tmp_path, "--time", "60s", *CANARY)
    wait_until(lambda: has_findings(store) and bool(lines_of(store)))
    workers = children_of(process.pid)
    process.kill()
    process.communicate()
    assert len(workers) == 2
    wait_until(lambda: not any(is_running(worker) for worker in workers), 20.0)
    before, ops = store.found(), sum(line.totals.ops for line in lines_of(store))
    raw = [case for _, case in store.raw_cases()]
    again = kvproof("fuzz", "--time", "2s", "--out", "c", *CANARY, "--json", cwd=tmp_path)
    assert printed(again)["ops"] > ops
    assert {record.id for record in before} <= {record.id for record in store.found()}
    assert not list(store.raw_cases()), raw


def is_running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_ends_in_order(tmp_path: Path, number: int) -> None:
    process = started(tmp_path, "--time", "60s", *CANARY)
    wait_until(lambda: has_findings(Store(tmp_path / "c")))
    workers = children_of(process.pid)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert "stopped: the same command goes on" in err
    assert "FAIL" in out
    assert re.search(r"note: interrupted after \d+ of 60 s", out)
    assert workers
    assert not any(is_running(worker) for worker in workers)


# -- runs that do not end, and subjects that take the process along --------------------------------

_BROKEN = """
import os, time
from kvproof.invariants.operations import Fork
from kvproof.stateful_tests.subjects.engine import EngineSubject

class Hanging(EngineSubject):
    def apply(self, operation):
        if isinstance(operation, Fork) and self.configuration.blocks % 8 == 0:
            time.sleep(3600)
        return super().apply(operation)

class Dying(EngineSubject):
    def apply(self, operation):
        if isinstance(operation, Fork) and self.configuration.blocks % 8 == 0:
            os._exit(7)
        return super().apply(operation)
"""


@pytest.mark.parametrize(
    ("name", "property", "words"),
    [
        ("Hanging", HANG, "no answer in"),
        ("Dying", DIED, "the process died in this run, 3 times: exit code 7"),
    ],
)
def test_a_run_that_takes_the_process_is_a_finding_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, property: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text(_BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    target = Target(f"subject:broken:{name}", f"broken:{name}", tiers_share=0.0)
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (target,), 1))
    run = CampaignRun(
        *(store.folder, Campaign("s", (target,), 1), LocalExecutor()),
        shards=[0],
        seconds=300.0,
        stall_seconds=4.0,
    )

    def until_it_goes_on(standing: Standing) -> None:
        if store.found() and standing.runs > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(until_it_goes_on)
    (finding, *_) = store.found()
    assert (finding.property, finding.target) == (property, target.name)
    assert words in finding.message
    passed = read_lines(store.passed_over(0), PassedOver)
    assert {own.seed for own in store.found()} == {own.seed for own in passed}
    case = load_case(store.findings / finding.id / "case.json")
    assert "Fork" in str(case.operations)
    lines = lines_of(store)
    number = int(passed[0].seed.rpartition("/")[2])
    assert sum(line.drawn for line in lines) > number + 1  # it went on behind it


_GOES_WRONG_NOW = """
import os, time
from pathlib import Path
from kvproof.stateful_tests.subjects.engine import EngineSubject

class Mine(EngineSubject):
    def apply(self, operation):
        word = Path(os.environ["MINE"]).read_text()
        if word == "hang":
            time.sleep(3600)
        if word == "die":
            os._exit(7)
        if word == "talk":
            print("a word on standard output")
        return super().apply(operation)
"""


@pytest.fixture
def mine(
    canary: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, Target, Path]]:
    """The canary's finding, as one of the user's subject, and the file that says what it does."""
    (tmp_path / "mine.py").write_text(_GOES_WRONG_NOW)
    word = tmp_path / "word"
    word.write_text("work")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MINE", str(word))
    monkeypatch.syspath_prepend(tmp_path)
    target = Target("subject:mine:Mine", "mine:Mine", tiers_share=0.0)
    store = Store(tmp_path / "c")
    store.begin(Campaign("s", (target,), 1))
    (there,) = Store(canary[0] / "c").found()
    folder = store.findings / there.id
    copytree(canary[0] / "c" / "findings" / there.id, folder)
    write_whole(folder / "finding.json", as_text(replace(there, subject=target.subject)))
    case = disguised(folder / "case.json", target.subject)
    case.write_text(case.read_text().replace(f'"fault": "{FAULT}",', ""))
    yield store, target, word
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("word", "seconds", "told"),
    [("hang", 3.0, "hangs: no end in 3 s"), ("die", 120.0, "along: exit code 7")],
)
def test_what_hangs_or_dies_in_a_replay_is_told_and_takes_nothing_along(
    mine: tuple[Store, Target, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    seconds: float,
    told: str,
) -> None:
    """Findings, entries of the ledger, and kept runs; it is nothing that was mended."""
    monkeypatch.setattr(guarded.Replayer.__init__, "__defaults__", (seconds,))
    store, target, does = mine
    (finding,) = store.found()
    case = store.findings / finding.id / "case.json"
    known = ledger(tmp_path, finding, case)
    kept = store.keep(target.name, replace(load_case(case), violates=None))
    does.write_text(word)
    unjudged = put_mended_aside(store, [target])
    assert mended(read_ledger(known), [target.subject], unjudged) == []
    assert [reason.endswith(told) for reason in unjudged] == [True, True], unjudged
    assert unjudged[0].startswith(f"{case}: its replay ")
    assert unjudged[1].startswith("ISSUE-17: ")
    assert store.found() == [finding]
    replayed = guarded_corpus(store)
    assert (replayed.cases, replayed.verdict, replayed.lost) == (1, "unknown", 1)
    assert replayed.problems[0].startswith(f"{kept}: its replay ")

    store.tell_stale((), unjudged)
    summary = summarise([store.folder])
    assert {f"{store.folder}: {reason}" for reason in unjudged} <= {*summary.reasons}
    assert {f"{store.folder}: {reason}" for reason in unjudged} <= {*summary.notes}  # it fails
    (store.findings / finding.id / "finding.json").unlink()
    with monkeypatch.context() as patched:  # as if enough had been reached
        patched.setattr(summary_module, "_judged", lambda *arguments: Judgement("pass", ()))
        assert summarise([store.folder]).verdict == "unknown"
        store.tell_stale(())
        assert summarise([store.folder]).verdict == "pass"


def test_a_report_tells_of_a_finding_that_takes_the_process_along_now(
    mine: tuple[Store, Target, Path],
) -> None:
    """In place of its block map."""
    pytest.importorskip("jinja2")
    store, target, does = mine
    does.write_text("die")
    result = kvproof("report", "c", "--subject", target.subject, cwd=store.folder.parent)
    assert result.returncode == 1, result.stderr
    page = (store.folder / "report.html").read_text()
    assert "There is no block map: its replay took the process along: exit code 7." in page


def guarded_corpus(store: Store) -> Replayed:
    campaign = store.campaign()
    assert campaign is not None
    return replay_corpus(store, campaign)


def test_a_replay_that_works_is_judged_in_a_process_of_its_own(
    mine: tuple[Store, Target, Path],
) -> None:
    """What the subject prints is no answer; what was mended is seen."""
    store, target, does = mine
    does.write_text("talk")
    assert put_mended_aside(store, [target]) == []
    assert not store.found()
    with Replayer() as replayer, pytest.raises(InputError, match="nowhere"):
        replayer.judge(store.folder / "nowhere.json")


def test_where_all_replays_die_not_all_are_tried(mine: tuple[Store, Target, Path]) -> None:
    store, _, does = mine
    case = store.findings / store.found()[0].id / "case.json"
    does.write_text("die")
    with Replayer() as replayer:
        problems = [replayer.judge(case).problem for _ in range(5)]
    assert [problem.startswith("its replay took") for problem in problems] == [
        *[True] * 3,
        *[False] * 2,
    ]
    assert problems[-1] == "not replayed: 3 before it hung, or took their process along"


# -- other executors -------------------------------------------------------------------------------


class InThisProcess:
    """Runs each shard when it is asked what has ended."""

    def __init__(self) -> None:
        self.jobs: list[ShardJob] = []
        self.stopped = False

    def start(self, job: ShardJob) -> None:
        self.jobs.append(job)

    def ended(self) -> list[Ended]:
        ended = []
        while self.jobs:
            job = self.jobs.pop()
            run_job(job, stop=lambda: self.stopped)
            ended.append(Ended(job.shard, 0))
        return ended

    def stop(self) -> None:
        self.stopped = True

    def kill(self, shard: int) -> None:
        raise AssertionError("nothing hangs here")


def test_an_executor_is_all_that_it_takes_to_run_elsewhere(tmp_path: Path) -> None:
    store, campaign = Store(tmp_path), Campaign("s", (CACHE,), 3)
    store.begin(campaign)
    run = CampaignRun(tmp_path, campaign, InThisProcess(), shards=range(3), seconds=0.3)
    told: list[int] = []
    run.run(lambda standing: told.append(standing.ops))
    assert run.standing.ops == sum(line.totals.ops for line in lines_of(store)) > 0
    assert len(list(store.shards.glob("*.jsonl"))) == 3
    assert told


class Unanswering(InThisProcess):
    """Its shards are killed before they have done anything."""

    def ended(self) -> list[Ended]:
        return [Ended(self.jobs.pop().shard, 0)] if self.stopped and self.jobs else []

    def kill(self, shard: int) -> None:
        """It is dead already."""


def test_a_run_is_passed_over_only_when_its_finding_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed between the two makes the run once more, and does not forget it."""
    store, campaign = Store(tmp_path / "c"), Campaign("s", (CACHE,), 1)
    store.begin(campaign)
    (store.present(0)).write_text("s/cache/0")
    run = CampaignRun(
        store.folder, campaign, Unanswering(), shards=[0], seconds=60, stall_seconds=0
    )

    def killed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Triage, "settle", killed)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert not store.passed_over(0).exists()


def test_a_shard_that_makes_run_after_run_does_not_hang(tmp_path: Path) -> None:
    """It has replayed a large corpus and shrunk what fails of it before its journal grows."""
    store, campaign = Store(tmp_path / "c"), Campaign("s", (CACHE,), 1)
    store.begin(campaign)

    class Busy(InThisProcess):
        looks = 0

        def ended(self) -> list[Ended]:
            self.looks += 1
            store.present(0).write_text(f"s/cache/{self.looks}")
            return [Ended(0, 0)] if self.looks > 20 else []

    busy = Busy()  # whoever kills it is told that nothing hangs here
    run = CampaignRun(store.folder, campaign, busy, shards=[0], seconds=60, stall_seconds=0.5)
    run.run()
    assert busy.looks == 21
    assert not store.passed_over(0).exists()


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ([-signal.SIGSEGV], ["run s/cache/0: the process died, by chance: signal 11"]),
        ([-signal.SIGKILL], []),  # somebody did that
        ([7, 0, 7], ["run s/cache/0: the process died, by chance: exit code 7"] * 2),
    ],
)
def test_a_process_that_dies_by_chance_leaves_it_unknown(
    tmp_path: Path, codes: list[int], told: list[str]
) -> None:
    """At other runs each time, or once: no run is to blame, and something is wrong."""
    store, campaign = Store(tmp_path / "c"), Campaign("s", (CACHE,), 1)
    store.begin(campaign)
    run_job(ShardJob(str(store.folder), 0, 0.2))
    done = sum(line.totals.runs for line in lines_of(store))

    class Mortal(InThisProcess):
        def ended(self) -> list[Ended]:
            if not codes or not self.jobs:
                return super().ended()
            store.present(0).write_text(f"s/cache/{0 if codes[0] else 4}")
            self.jobs.clear()
            return [Ended(0, codes.pop(0) or -signal.SIGKILL)]

    CampaignRun(store.folder, campaign, Mortal(), shards=[0], seconds=2.0).run()
    problems = [problem for line in lines_of(store) for problem in line.totals.problems]
    assert problems == told
    summary = summarise([store.folder])
    assert {f"engine: {problem}" for problem in told} <= {*summary.reasons}
    assert summary.total.runs > done
    assert not store.found()


def test_a_shard_says_which_run_it_is_at_however_long_the_seed_is(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in ("s", "long" * 500, "s"):
        store.folder.joinpath("campaign.json").unlink(missing_ok=True)
        campaign = Campaign(seed, (CACHE,), 1)
        store.begin(campaign) if not store.shards.exists() else None
        shard = Shard(store, campaign, 0, Triage(store, Ledger(), 0))
        for number in (12, 3):
            shard._say(f"{seed}/cache/{number}")
            assert store.seed_at(0) == f"{seed}/cache/{number}"
        shard._say("s/cache/1")
        assert store.seed_at(0) == "s/cache/1"
        shard.close()
    assert store.seed_at(1) == ""


class Failing(InThisProcess):
    def ended(self) -> list[Ended]:
        jobs, self.jobs = self.jobs, []
        return [Ended(job.shard, 2, "no room left") for job in jobs]


class Unstartable(InThisProcess):
    def ended(self) -> list[Ended]:
        jobs, self.jobs = self.jobs, []
        return [Ended(job.shard, 1, "cannot be imported") for job in jobs]


@pytest.mark.parametrize(
    ("executor", "message"),
    [(Failing, "no room left"), (Unstartable, "died 6 times in a row: cannot be imported")],
)
def test_a_shard_that_cannot_go_on_ends_the_campaign(
    tmp_path: Path, executor: type[InThisProcess], message: str
) -> None:
    campaign = Campaign("s", (CACHE,), 2)
    Store(tmp_path).begin(campaign)
    run = CampaignRun(tmp_path, campaign, executor(), shards=range(2), seconds=60.0)
    with pytest.raises(InputError, match=message):
        run.run()
