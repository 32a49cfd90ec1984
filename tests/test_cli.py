"""The command line as its users meet it: what it prints, writes, and exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from kvproof.fuzz.cli import main
from kvproof.fuzz.cli import replay as replay_command
from kvproof.fuzz.cli.app import app
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.replay import replay
from kvproof.fuzz.report.unchecked import UNCHECKED
from kvproof.invariants.case import Case, dump_case, load_case, save_case
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.operations import KINDS, TIER_KINDS, Admit, Reset, Segment
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.export import case_name, log_text, pytest_source, write_finding
from kvproof.stateful_tests.subjects import SUBJECT_NAMES, subject_families

COMMANDS = ("check", "trace", "replay", "shrink", "invariants", "faults", "bench")


def kvproof(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder of its own."""
    code = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "120"},
    )


def printed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(result.stdout)
    assert fields["schema"] == 1
    return fields


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What `check` reports and writes with a fault planted."""
    folder = tmp_path_factory.mktemp("found")
    result = kvproof(
        *("check", "--seconds", "20", "--seed", "7", "--fault", "no-copy-on-write", "--json"),
        cwd=folder,
    )
    assert result.returncode == 1, result.stderr
    return folder, printed(result)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    if command in ("faults", "bench"):
        assert "Commands" in result.output
    else:
        assert f"kvproof {command}" in result.output


def test_check_passes_and_says_what_it_did(tmp_path: Path) -> None:
    result = kvproof("check", "--seconds", "10", "--seed", "3", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"], fields["reasons"]) == (0, "pass", [])
    assert fields["seed"] == "3"
    assert fields["subject"] == "engine"
    assert fields["ops"] > 1000
    assert set(fields["operations"]) == {*KINDS, *TIER_KINDS}
    assert all(counts["done"] > 0 for counts in fields["operations"].values())
    assert all(goal["hits"] or goal["rare"] for goal in fields["goals"])
    assert {entry["id"] for entry in fields["invariants"]} == {check.id() for check in CHECKS}
    assert all(entry["checked"] > 0 for entry in fields["invariants"])
    assert fields["drivers"]["machine"]["ops"] > 0
    assert not list(tmp_path.iterdir())  # nothing was found, so nothing is written


def test_too_little_time_is_unknown_and_not_a_pass(tmp_path: Path) -> None:
    result = kvproof("check", "--seconds", "0.1", "--seed", "1", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (3, "unknown")
    assert any("never" in reason for reason in fields["reasons"])


def test_a_planted_fault_is_found_shrunk_explained_and_written(
    found: tuple[Path, dict[str, Any]],
) -> None:
    folder, fields = found
    (violation,) = fields["violations"]
    assert fields["verdict"] == "fail"
    assert violation["property"] == "EXCL"
    assert "Block" in violation["explanation"]
    case = load_case(folder / violation["case"])
    assert len(case.operations) <= 10
    assert case.fault == "no-copy-on-write"
    assert sorted(p.suffix for p in (folder / "kvproof-findings").iterdir()) == [
        ".json",
        ".py",
        ".txt",
    ]


def test_a_finding_replays_to_the_same_digest(found: tuple[Path, dict[str, Any]]) -> None:
    folder, fields = found
    case = fields["violations"][0]["case"]
    first, second = (kvproof("replay", case, "--json", cwd=folder) for _ in range(2))
    assert first.returncode == second.returncode == 1
    assert printed(first) == printed(second)
    assert printed(first)["violations"][0]["property"] == "EXCL"


def test_a_finding_is_told_for_people(found: tuple[Path, dict[str, Any]]) -> None:
    folder, fields = found
    result = kvproof("replay", fields["violations"][0]["case"], "--log", cwd=folder)
    assert result.returncode == 1
    assert "EXCL at operation" in result.stdout
    assert "BlocksShared" in result.stdout
    assert "digest" in result.stdout


def test_the_exported_test_fails_with_the_fault(found: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = found
    (exported,) = (folder / "kvproof-findings").glob("test_*.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(exported)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "EXCL" in result.stdout


def test_shrink_writes_a_case_that_is_not_longer(
    found: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, fields = found
    case = load_case(folder / fields["violations"][0]["case"])
    longer = tmp_path / "longer.json"
    save_case(case.__class__(**{**_fields(case), "operations": case.operations * 2}), longer)
    result = kvproof("shrink", str(longer), "--out", "small.json", "--json", cwd=tmp_path)
    assert result.returncode == 1
    assert len(load_case(tmp_path / "small.json").operations) <= len(case.operations)


def _fields(case: Any) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__struct_fields__}


def test_a_case_that_violates_nothing_has_nothing_to_shrink(
    found: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, fields = found
    case = load_case(folder / fields["violations"][0]["case"])
    save_case(case.__class__(**{**_fields(case), "fault": None}), tmp_path / "clean.json")
    for command in ("shrink", "replay"):
        result = kvproof(command, "clean.json", cwd=tmp_path)
        assert result.returncode == 0
        assert "PASS" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--subject", "nobody"), "kvproof: unknown subject 'nobody'"),
        (("check", "--fault", "none-such"), "kvproof: unknown fault 'none-such'"),
        (
            ("check", "--subject", "vllm:manager", "--fault", "counter-drifts"),
            "kvproof: --fault plants its fault in the engine",
        ),
        (("replay", "absent.json"), "kvproof: absent.json: No such file or directory"),
        (("invariants", "NONE"), "kvproof: unknown property 'NONE'"),
        (("faults", "detect", "none-such"), "kvproof: unknown fault 'none-such'"),
        (("trace", "absent.jsonl", "--blocks", "8"), "kvproof: absent.jsonl: "),
        (("trace", "example-azure.csv"), "kvproof: give the pool's size either by"),
        (("trace", "example-azure.csv", "--kv-memory", "lots"), "kvproof: not a size: 'lots'"),
        (("trace", "broken.csv", "--blocks", "8"), "kvproof: broken.csv:2: "),
        (("replay", "truncated.json"), "kvproof: truncated.json:1:"),
        (("replay", "old.json"), "kvproof: old.json: case of version 0 at $.version"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,many,10\n"
    )
    (tmp_path / "truncated.json").write_text('{"format": "kvproof-case", "version"')
    (tmp_path / "old.json").write_text('{"format": "kvproof-case", "version": 0}')
    before = sorted(tmp_path.iterdir())
    result = kvproof(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--seconds", "-1"), "Invalid value for '--seconds': "),
        (("check", "--seconds", "soon"), "Invalid value for '--seconds': "),
        (("check", "--seconds"), "Option '--seconds' requires an argument; see kvproof --help"),
        (("fuzz", "--workers", "0"), "Invalid value for '--workers': "),
        (("fuzz", "--xyzzy"), "No such option: --xyzzy; see kvproof fuzz --help"),
        (("trace",), "Missing argument "),
        (("bench", "nothing"), "No such command 'nothing'; see kvproof bench --help"),
        (("nonsense",), "No such command 'nonsense'; see kvproof --help"),
        (("replay", "a.json", "b.json"), "Got unexpected extra argument"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = kvproof(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"kvproof: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_command_that_says_nothing_shows_the_help(tmp_path: Path) -> None:
    result = kvproof(cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "")
    assert "Exit codes: 0 pass" in result.stdout
    assert kvproof("--help", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_no_verdict(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr(replay_command, "load_case", interrupted)
    monkeypatch.setattr(sys, "argv", ["kvproof", "replay", "case.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize("command", [*COMMANDS, "fuzz", "report", "faults detect", "bench engine"])
def test_help_flows_where_the_terminal_is_narrow(command: str) -> None:
    """A line ends where the next word does not fit; examples have lines of their own."""
    width = 60
    environment = {"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    result = CliRunner(env=environment).invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    text = result.output.partition("╭")[0]
    lines = [line.strip() for line in text.strip().splitlines()]
    inside = [
        (line, following)
        for paragraph in "\n".join(lines).split("\n\n")
        if not paragraph.startswith("Example")
        for line, following in pairwise(paragraph.splitlines())
    ]
    early = [line for line, after in inside if len(line) + 1 + len(after.split()[0]) <= width - 2]
    assert early == []


@pytest.mark.parametrize("command", [*COMMANDS, "fuzz", "report", "conformance", "faults detect"])
def test_help_cuts_no_word_in_a_terminal_of_80_columns(command: str) -> None:
    environment = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    result = CliRunner(env=environment).invoke(app, [*command.split(), "--help"])
    assert not re.findall(r"\S+…", result.output)


def test_names_of_subjects_are_told_in_short_and_all_of_them() -> None:
    told = [
        name
        for family in subject_families()
        for first, _, more in [family.rstrip(")").partition(" (also ")]
        for name in (first, *(first + end for end in more.split(", ") if end))
    ]
    assert sorted(told) == sorted(SUBJECT_NAMES)


_TALKS = """
import sys
sys.argv[0] = 'kvproof'
from kvproof.fuzz.cli import main, output
output.LINE_SECONDS = (0.3, 0.3)
main()
"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("check", "--seconds", "4", "--json"), r"checking engine, \d+ s: [\d,]+ operations"),
        (
            ("trace", "example-azure.csv", "--blocks", "4096", "--policy", "orca", "--json"),
            r"replaying example-azure\.csv, \d+ s: orca: [\d,]+ requests finished",
        ),
    ],
)
def test_where_there_is_no_terminal_lines_tell_of_progress(
    arguments: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    """On standard error: standard output is one JSON object."""
    command = [sys.executable, "-c", _TALKS, *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert printed(result)["verdict"] in ("pass", "unknown")
    told = [one for one in result.stderr.splitlines() if not one.startswith("using the ")]
    assert told
    assert all(re.fullmatch(line, one) for one in told), told


@pytest.mark.parametrize("name", ["example-mooncake.jsonl", "example-azure.csv"])
def test_trace_replays_a_shipped_example(name: str, tmp_path: Path) -> None:
    result = kvproof("trace", name, "--blocks", "512", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (0, "pass")
    assert fields["finished"] == fields["requests"] == 120
    assert fields["metrics"]["preemptions"] > 0
    assert set(fields["percentiles"]["ttft"]) == {"p50", "p90", "p99"}
    assert fields["policies"]["fcfs"]["finished"] == 120


def test_trace_with_a_planted_fault_writes_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvproof.fuzz.faults import fault_by_id

    monkeypatch.chdir(tmp_path)
    with fault_by_id("release-keeps-last-block").installed():
        result = CliRunner().invoke(
            app, ["trace", "example-mooncake.jsonl", "--blocks", "512", "--json"]
        )
    assert result.exit_code == 1
    fields = json.loads(result.stdout)
    assert fields["violations"][0]["property"] == "REF"
    case = load_case(tmp_path / fields["violations"][0]["case"])
    assert 0 < len(case.operations) < 20


def test_invariants_lists_and_explains(tmp_path: Path) -> None:
    listed = kvproof("invariants", cwd=tmp_path)
    explained = kvproof("invariants", "cons", cwd=tmp_path)
    assert listed.returncode == explained.returncode == 0
    assert all(check.id() in listed.stdout for check in CHECKS)
    for part in ("source:", "Verifies", "Does not verify", "Positive control", "counter-drifts"):
        assert part in explained.stdout
    (entry,) = printed(kvproof("invariants", "CONS", "--json", cwd=tmp_path))["invariants"]
    assert entry["positive_control"] == "counter-drifts"


@pytest.mark.parametrize("property_id", ["CRASH", "DETERMINISM", "HANG", "DIED", "KERNEL"])
def test_what_no_check_looks_at_is_explained_as_well(property_id: str) -> None:
    listed = CliRunner().invoke(app, ["invariants"]).output
    explained = CliRunner().invoke(app, ["invariants", property_id]).output
    assert property_id in listed.partition("Seen without a check")[2]
    for part in (f"{property_id}: ", "Verifies: ", "Does not verify: "):
        assert part in explained
    assert ("Positive control" in explained) == (property_id == "CRASH")


def test_the_fault_that_shows_a_crash_does() -> None:
    (crash,) = [own for own in UNCHECKED if own.positive_control]
    assert crash.id == fault_by_id(crash.positive_control).property == "CRASH"


def test_an_exported_test_says_where_code_of_ones_own_is_found() -> None:
    own, kvproofs = (
        pytest_source(Case(subject, Configuration(), [Reset()]), "why")
        for subject in ("scheduler:sched.py:Mine", "scheduler:fcfs")
    )
    compile(own, "test_own.py", "exec")
    assert "It imports scheduler:sched.py:Mine: run pytest in the folder" in " ".join(own.split())
    assert "It imports" not in kvproofs


def test_a_log_marks_the_violation_where_it_was_seen_only(tmp_path: Path) -> None:
    case = Case("engine", Configuration(), [Reset(), Reset()], violates="REF")
    moments = replay(case, record=True).moments
    for op, seen in ((1, [False, True]), (0, [False, False])):
        folder = tmp_path / str(op)
        *_, log = write_finding(case, Violation("REF", "m", op=op), "why", folder, moments=moments)
        lines = log.read_text(encoding="utf-8").splitlines()[-2:]
        assert [line.endswith("   ✗ REF") for line in lines] == seen


def test_a_log_says_how_a_prompt_is_written_in_the_case() -> None:
    told = "Segment(source=0, length=2), in the case [0, 2]: the first 2 tokens of stream 0"
    prompted = Case("engine", Configuration(), [Admit((Segment(0, 2),))])
    assert '"prompt": [[0, 2]]' in " ".join(dump_case(prompted).split())
    assert told in log_text(prompted, "")
    assert told not in log_text(replace(prompted, operations=[Reset()]), "")


def test_an_exported_test_is_named_as_its_file(tmp_path: Path) -> None:
    case = Case("engine", Configuration(), [Reset()])
    assert "\ndef test_ref_17() -> None:" in pytest_source(case, name="ref_17")
    (tmp_path / f"{case_name(replace(case, violates='REF'))}.json").write_text("another's")
    paths = write_finding(case, Violation("REF", "m"), "why", tmp_path)
    assert f"\ndef {paths[1].stem}() -> None:" in paths[1].read_text()


def test_faults_list_and_detect(tmp_path: Path) -> None:
    listed = printed(kvproof("faults", "list", "--json", cwd=tmp_path))
    assert len(listed["faults"]) >= 16
    result = kvproof(
        "faults",
        "detect",
        "fork-takes-no-reference",
        "--seeds",
        "2",
        "--clean-ops",
        "2000",
        "--json",
        cwd=tmp_path,
    )
    fields = printed(result)
    (fault,) = fields["faults"]
    assert result.returncode == 0
    assert fault["detected"] == fault["triggered"] == fault["reached"] == 2
    assert fault["shrunk_ops_max"] <= 2 * fault["shortest_known_ops"]
    assert fields["clean"]["ops"] >= 2000
    assert fields["clean"]["violations"] == 0


def test_faults_detect_complains_of_what_it_has_not_seen() -> None:
    """Positive control of the command's own verdict."""
    from kvproof.fuzz.detect import complaint, detect_fault

    fault = fault_by_id("head-released-first")
    detection = detect_fault(fault, seed="complaint", seeds=2, seconds=5.0)
    assert complaint(detection) == ""
    assert "found in 1 of 2" in complaint(replace(detection, detected=1))
    assert "never by property ORDER" in complaint(replace(detection, by_property=0))
    assert "has 9 operations" in complaint(replace(detection, shrunk_ops_max=9))


@pytest.mark.parametrize("name", ["engine", "machine"])
def test_bench_prints_ratios_with_their_conditions(name: str, tmp_path: Path) -> None:
    result = kvproof("bench", name, "--rounds", "1", "--json", cwd=tmp_path)
    fields = printed(result)
    assert result.returncode == 0
    ratios = {
        "engine": {
            "checked_over_unchecked",
            "untiered_over_tiered",
            "needing_no_tier_over_tiered",
            "blocks_1m_over_1k",
        },
        "machine": {"machine_over_idle"},
    }
    assert set(fields["ratios"]) == ratios[name]
    assert fields["calibration"]["empty_method_calls_per_second"] > 0
    assert all(entry["ops_per_second"] > 0 for entry in fields["results"])
    assert fields["machine"]["python"].startswith("CPython")


def test_a_subject_of_the_users_own_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from kvproof.engine.pool import BlockPool\n"
        "from kvproof.stateful_tests.subjects.engine import EngineSubject\n\n\n"
        "class Broken(EngineSubject):\n"
        "    name = 'mine:Broken'\n\n"
        "    def __init__(self, configuration):\n"
        "        super().__init__(configuration)\n"
        "        self.engine.pools[0].__class__ = Leaky\n\n\n"
        "class Leaky(BlockPool):\n"
        "    __slots__ = ()\n\n"
        "    def release(self, blocks):\n"
        "        super().release(blocks[:-1])\n"
    )
    result = kvproof("check", "--subject", "mine:Broken", "--seconds", "5", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"]) == (1, "fail")
    assert fields["subject"] == "mine:Broken"
    case = fields["violations"][0]["case"]
    refused = kvproof("replay", case, cwd=tmp_path)  # a case may not import what it likes
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvproof: this case imports code of somebody's: if you trust it, add --subject "
        "mine:Broken\n"
    )
    assert kvproof("replay", case, "--subject", "mine:Broken", cwd=tmp_path).returncode == 1
    for name in ("mine:Absent", "absent:Broken"):
        refused = kvproof("check", "--subject", name, cwd=tmp_path)
        assert refused.returncode == 2
        assert f"kvproof: subject '{name}' cannot be imported" in refused.stderr


def test_a_trace_of_which_nothing_finishes_is_unknown(tmp_path: Path) -> None:
    result = kvproof("trace", "example-azure.csv", "--blocks", "1", "--json", cwd=tmp_path)
    fields = printed(result)
    assert (result.returncode, fields["verdict"], fields["finished"]) == (3, "unknown", 0)


def test_places_that_cannot_be_written_are_refused_before_anything_is_done(
    found: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, fields = found
    case = str(folder / fields["violations"][0]["case"])
    (tmp_path / "file").write_text("mine")
    for arguments in (
        ("check", "--out", "file"),
        ("trace", "example-azure.csv", "--blocks", "512", "--out", "file"),
        ("shrink", case, "--out", "absent/small.json"),
        ("shrink", case, "--out", "."),
        ("shrink", case, "--out", "/dev/null"),
    ):
        result = kvproof(*arguments, cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        assert result.stderr.count("\n") == 1 or "using the" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("Half = object\n", "made of a Configuration: TypeError"),
        ("Half = object\n", "(is it a subject? see docs/adapters.md)"),
        ("class Half:\n    def __init__(self, configuration): pass\n", "lacks name, semantics"),
        ("class Half:\n    def __init__(self, configuration): pass\n", ": see docs/adapters.md"),
        ("class Half:\n    def __init__(self, configuration): raise OSError('no GPU')\n", "no GPU"),
    ],
)
def test_what_is_no_subject_is_refused_in_one_line(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(body)
    result = kvproof("check", "--subject", "half:Half", cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("place", ["half.py", "./half.py", "src/half.py", "src/half"])
def test_a_file_is_no_module(place: str, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("Half = object\n")
    result = kvproof("check", "--subject", f"{place}:Half", cwd=tmp_path)
    assert result.returncode == 2
    assert "MODULE:CLASS is wanted" in result.stderr
    module = "src.half" if "src" in place else "half"
    assert f"perhaps {module}:Half" in result.stderr


def test_documented_keys_are_printed(found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """docs/json.md says what tools may rely on."""
    folder, check = found
    text = (Path(__file__).parent.parent / "docs" / "json.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z ]+?)`[^|]*\| (.*) \|$", text, re.M))
    replayed = printed(kvproof("replay", check["violations"][0]["case"], "--json", cwd=folder))
    listed = printed(kvproof("faults", "list", "--json", cwd=tmp_path))
    for row, fields in (("check", check), ("replay", replayed), ("faults list", listed)):
        documented = re.findall(r"(?:^|, )`([a-z_]+)(?:\[\])?`", re.sub(r"\(.*?\)", "", rows[row]))
        assert documented
        for key in documented:
            inner = fields.get("faults", [{}])[0]
            assert key in fields or key in inner, f"{row}: {key}"
