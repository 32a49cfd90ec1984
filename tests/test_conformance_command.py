"""``kvproof conformance``, as its users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = "kvproof.stateful_tests.examples.template:Template"
LYING = """
from kvproof.stateful_tests.examples.template import Template


class Forgets(Template):
    def free_blocks(self):
        return super().free_blocks()[1:]
"""


def kvproof(
    *arguments: str, cwd: Path, command: str = "conformance"
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from kvproof.fuzz.cli import main; main()"]
    return subprocess.run(
        [*program, command, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_an_honest_adapter_passes(tmp_path: Path) -> None:
    result = kvproof("--subject", TEMPLATE, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"PASS {TEMPLATE} tells what is so" in " ".join(result.stdout.split())


@pytest.mark.parametrize("as_json", [False, True])
def test_a_lie_is_named_with_a_short_run_that_shows_it(as_json: bool, tmp_path: Path) -> None:
    (tmp_path / "lying.py").write_text(LYING)
    arguments = ["--subject", "lying:Forgets", *["--json"] * as_json]
    result = kvproof(*arguments, cwd=tmp_path)
    assert result.returncode == 1
    if not as_json:
        assert "does not tell the truth about\nfree: " in result.stdout
        return
    fields = json.loads(result.stdout)
    assert (fields["verdict"], fields["lie"]["kind"]) == ("fail", "free")
    assert len(fields["case"]["operations"]) <= 3


def test_the_run_that_shows_a_lie_replays_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "lying.py").write_text(LYING)
    result = kvproof("--subject", "lying:Forgets", "--out", "lie.json", cwd=tmp_path)
    told = "kvproof replay lie.json --log --subject lying:Forgets"
    assert f"line by line:  {told}\n" in result.stdout
    assert json.loads((tmp_path / "lie.json").read_text())["subject"] == "lying:Forgets"
    replayed = kvproof(*told.split()[2:], cwd=tmp_path, command="replay")
    assert (replayed.returncode, replayed.stderr) == (1, "")
    assert "FAIL" in replayed.stdout


def test_a_case_nobody_kept_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "lying.py").write_text(LYING)
    result = kvproof("--subject", "lying:Forgets", cwd=tmp_path)
    assert "keep the run:  --out case.json\n" in result.stdout
    assert [file.name for file in tmp_path.glob("*.json")] == []


MISDECLARED = """
from msgspec.structs import replace
from kvproof.stateful_tests.examples.template import Template


class MyKV(Template):
    semantics = replace(Template.semantics, eviction_order="fifo")
"""


@pytest.mark.parametrize("command", ["conformance", "check"])
def test_a_word_that_there_is_not_is_bad_input(command: str, tmp_path: Path) -> None:
    (tmp_path / "mykv.py").write_text(MISDECLARED)
    result = kvproof("--subject", "mykv:MyKV", cwd=tmp_path, command=command)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "eviction_order='fifo': 'lru' or 'configured' or 'any' or 'shown' is needed" in line


def test_an_unknown_subject_is_bad_input(tmp_path: Path) -> None:
    result = kvproof("--subject", "nosuch", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("kvproof: unknown subject 'nosuch'")
