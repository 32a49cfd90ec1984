"""What is left of a finding where no operation is to blame, and where nothing can be written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvproof.fuzz.campaigns.records import Campaign, Target
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Store
from kvproof.fuzz.report.summary import summarise
from kvproof.invariants.case import load_case

RESERVED = """
from msgspec.structs import replace
from kvproof.stateful_tests.subjects.engine import EngineSubject


class Mine(EngineSubject):
    def __init__(self, configuration):
        super().__init__(configuration)
        self.semantics = replace(self.semantics, reserved=(0, 1))
"""
"""It calls block 1 reserved, which is a block like others: a fresh one is wrong already."""
SAID = "CONS before the first operation: reserved block 1 is free"
_MAIN = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
_FULL = """
import errno, os
from pathlib import Path

def full(path, text, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

Path.write_text = full
"""
_MINE = ("--subject", "mine:Mine", "--seed", "7")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a module that no other test of this process is to meet, nor its to meet others'."""
    (tmp_path / "mine.py").write_text(RESERVED)
    sys.modules.pop("mine", None)
    yield tmp_path
    sys.modules.pop("mine", None)


def run(folder: Path, *arguments: str, code: str = _MAIN) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "150"},
    )


def violation_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 1, result.stderr
    (violation,) = json.loads(result.stdout)["violations"]
    return dict(violation)


def test_a_fresh_subject_that_is_wrong_is_found_and_replays(folder: Path) -> None:
    check = ("check", *_MINE, "--seconds", "3", "--json", "--out", "kept")
    told = violation_of(run(folder, *check))
    assert (told["op"], told["explanation"]) == (-1, f"{SAID}.")
    case = load_case(folder / told["case"])
    assert (case.operations, case.violates) == ([], "CONS")
    log = (folder / told["case"]).with_suffix(".txt").read_text()
    assert log.splitlines()[-1] == "      before the first operation   ✗ CONS"

    replayed = run(folder, "replay", told["case"], "--log", "--subject", "mine:Mine")
    assert replayed.returncode == 1
    assert SAID in replayed.stdout
    (test,) = (folder / "kept").glob("test_*.py")
    repeated = run(folder, "-q", "-p", "no:cacheprovider", str(test), code=_PYTEST)
    assert repeated.returncode == 1
    assert "AssertionError: reserved block 1 is free" in repeated.stdout


_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
_POINTS = [point.value for point in entry_points(group="pytest11")]
_PLUGIN = () if "kvproof.fuzz.pytest_plugin" in _POINTS else ("-p", "kvproof.fuzz.pytest_plugin")
"""Where kvproof is installed, pytest has it already."""


def test_the_plugin_tells_it(folder: Path) -> None:
    (folder / "test_mine.py").write_text(
        "def test_it(kvproof_check):\n    kvproof_check('mine:Mine', runs=5, seed='7')\n"
    )
    plugin = (*_PLUGIN, "-p", "no:cacheprovider")
    result = run(folder, *plugin, "test_mine.py", code=_PYTEST)
    assert result.returncode == 1
    assert f"{SAID}." in result.stdout
    assert ", shrunk to 0." in result.stdout


def test_so_does_a_campaign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    store = Store(folder / "campaign")
    store.begin(Campaign("7", (Target("mine", "mine:Mine"),), 1))
    run_job(ShardJob(str(store.folder), 0, 60.0), lambda: bool(store.found()))
    sys.modules.pop("mine", None)
    found = summarise([store.folder]).findings
    (finding,) = [one for one in found if not one.record.operations]
    assert finding.record.explanation == f"{SAID}."
    names = {path.name for path in finding.folder.iterdir()}
    assert names == {"finding.json", "case.json", "log.txt", f"test_{finding.record.id}.py"}
    pytest.importorskip("jinja2", reason="the page needs the report extra")
    from kvproof.fuzz.report.page import page

    html = page(summarise([store.folder]), {"mine:Mine"})
    sys.modules.pop("mine", None)
    assert "Seen <b>before the first operation</b>" in html
    assert html.count("before the first operation   ✗ CONS") == 1


def test_once_mended_it_is_put_aside(folder: Path) -> None:
    """It needs no kind of operation, and yet a replay can judge it."""
    first = run(folder, "fuzz", *_MINE, "--time", "2s", "--workers", "1", "--out", "campaign")
    assert first.returncode == 1, first.stderr
    (folder / "mine.py").write_text(RESERVED.replace("(0, 1)", "(0,)"))
    again = run(folder, "fuzz", *_MINE, "--time", "2s", "--workers", "1", "--out", "campaign")
    assert again.returncode in (0, 3), again.stdout
    assert [*(folder / "campaign" / "mended").glob("cons_*/case.json")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("check", *_MINE, "--out", "/proc/kept"), _MAIN),
        (("fuzz", *_MINE, "--time", "2s", "--out", "/proc/kept/campaign"), _MAIN),
        (
            (
                *(*_PLUGIN, "--kvproof", "--kvproof-out", "/proc/kept"),
                *("--kvproof-subject", "mine:Mine"),
            ),
            _PYTEST,
        ),
    ],
)
def test_a_place_where_no_folder_can_be_made_is_bad_input(
    arguments: tuple[str, ...], code: str, folder: Path
) -> None:
    """Whatever its rights say: nobody may write to /proc, not even root."""
    result = run(folder, *arguments, code=code)
    told = re.sub(r"\s+", " ", result.stderr)
    assert result.returncode == (4 if code is _PYTEST else 2), result.stderr
    assert "/proc/kept" in told
    assert "cannot be written to" in told
    assert "CONS" not in result.stdout + result.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_disk_that_is_full_by_then_does_not_cost_the_finding(form: str, folder: Path) -> None:
    json_option = ("--json",) if form == "json" else ()
    check = ("check", *_MINE, "--seconds", "3", "--out", "kept", *json_option)
    result = run(folder, *check, code=_FULL + _MAIN)
    assert result.returncode == 1, result.stderr
    assert SAID in result.stdout
    assert "No space left on device" in result.stdout
    if form == "json":
        assert violation_of(result)["case"] is None
    else:
        assert result.stdout.count("nothing was written: ") == 1
        assert "replay:" not in result.stdout
