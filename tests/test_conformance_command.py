"""``kvproof conformance``, as its users type it."""

from __future__ import annotations

import json
import shlex
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
    asked = ("--subject", "lying:Forgets", "--runs", "3", "--seed", "a b")
    result = kvproof(*asked, cwd=tmp_path)
    told = "kvproof conformance --subject lying:Forgets --runs 3 --seed 'a b' --out case.json"
    assert f"keep the run:  {told}\n" in result.stdout
    assert "kvproof replay" not in result.stdout, "of a case that there is not"
    assert [file.name for file in tmp_path.glob("*.json")] == []
    again = kvproof(*shlex.split(told)[2:], cwd=tmp_path)
    assert again.returncode == 1
    assert (tmp_path / "case.json").is_file()


def test_too_few_runs_to_tell_are_unknown(tmp_path: Path) -> None:
    result = kvproof("--subject", TEMPLATE, "--runs", "1", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (3, "")
    assert result.stdout.startswith(f"UNKNOWN {TEMPLATE} told no lie in ")
    assert "because this was never done in 1 run and, in search of it, 9 more, " in result.stdout
    result = kvproof("--subject", TEMPLATE, "--runs", "1", "--json", cwd=tmp_path)
    fields = json.loads(result.stdout)
    assert (result.returncode, fields["verdict"], fields["lie"]) == (3, "unknown", None)
    assert "reset (11 times)" in fields["reasons"][0]


MISDECLARED = """
from msgspec.structs import replace
from kvproof.stateful_tests.examples.template import Template


class MyKV(Template):
    semantics = replace(Template.semantics, eviction_order="fifo")
"""


@pytest.mark.parametrize("command", ["conformance", "check"])
def test_a_word_that_no_adapter_can_keep_to_is_bad_input(command: str, tmp_path: Path) -> None:
    (tmp_path / "mykv.py").write_text(MISDECLARED.replace('eviction_order="fifo"', "tiers=True"))
    result = kvproof("--subject", "mykv:MyKV", cwd=tmp_path, command=command)
    assert result.returncode == 2
    assert result.stderr == "kvproof: tiers=True is not with Adapter: see docs/adapters.md\n"


@pytest.mark.parametrize("command", ["conformance", "check"])
def test_a_word_that_there_is_not_is_bad_input(command: str, tmp_path: Path) -> None:
    (tmp_path / "mykv.py").write_text(MISDECLARED)
    result = kvproof("--subject", "mykv:MyKV", cwd=tmp_path, command=command)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "eviction_order='fifo': 'lru' or 'configured' or 'any' or 'shown' is needed" in line
    assert line.endswith(f" ({tmp_path}/mykv.py:7)")


def test_where_a_subject_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "mykv.py").write_text("def make(configuration):\n    return configuration.size\n")
    result = kvproof("--subject", "mykv:make", cwd=tmp_path)
    assert result.returncode == 2
    assert f"has no attribute 'size' ({tmp_path}/mykv.py:2) (is it a subject? " in result.stderr


def test_an_unknown_subject_is_bad_input(tmp_path: Path) -> None:
    result = kvproof("--subject", "nosuch", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("kvproof: unknown subject 'nosuch'")


FROM_ZERO = """
from msgspec.structs import replace
from kvproof.stateful_tests.examples.nano_subject import NanoSubject


class MyKV(NanoSubject):
    semantics = replace(NanoSubject.semantics, reserved=(0,))
"""


@pytest.mark.parametrize(("command", "seconds"), [("conformance", ()), ("check", ("--seconds=2",))])
def test_whoever_gives_block_zero_is_told_the_word_for_it(
    command: str, seconds: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mykv.py").write_text(FROM_ZERO)
    result = kvproof("--subject", "mykv:MyKV", *seconds, cwd=tmp_path, command=command)
    assert result.returncode == 1
    assert "if block 0 is yours to give, declare reserved=()" in result.stdout
