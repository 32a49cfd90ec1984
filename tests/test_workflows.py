"""The example workflows of docs/github-actions: valid, and their commands do what they say.

GitHub itself is not here.  What is left of a workflow without it are its commands: they are run as
they stand, in the order of the jobs, but for those that install kvproof; only times are cut.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parent.parent / "docs" / "github-actions"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
POLICIES = Path(__file__).parent.parent / "stateful_tests" / "examples" / "policies"
GOOD, WRONG = "my_engine/sched.py:ShortestFirst", "wrong.py:ChunksPrompts"


def test_each_use_has_a_workflow() -> None:
    names = [path.stem for path in WORKFLOWS]
    assert names == ["gpu-runner", "nightly-campaign", "policy-check"]
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.yml)" in told for name in names)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    command = (
        *(sys.executable, "-m", "check_jsonschema"),
        *("--builtin-schema", "vendor.github-workflows"),
    )
    assert subprocess.run([*command, path], capture_output=True).returncode == 0
    broken = tmp_path / path.name
    broken.write_text(path.read_text(encoding="utf-8").replace("runs-on:", "runs_on:"))
    assert subprocess.run([*command, broken], capture_output=True).returncode == 1


class Runner:
    """A folder in which the commands of a workflow are run."""

    def __init__(self, folder: Path, workflow: str, **environment: str) -> None:
        self.folder = folder
        self.workflow = yaml.safe_load((FOLDER / f"{workflow}.yml").read_text(encoding="utf-8"))
        self.summary = folder / "summary.md"
        script = folder / "bin" / "kvproof"
        script.parent.mkdir()
        script.write_text(
            f"#!/bin/sh\nexec {sys.executable} -c "
            "\"import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()\" "
            '"$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self._environment = {
            **os.environ,
            **self.workflow["env"],
            **environment,
            "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "COLUMNS": "120",
        }
        copied = folder / "my_engine"
        copied.mkdir()
        copy(POLICIES / "shortest_first.py", copied / "sched.py")

    def steps(self, job: str) -> list[dict[str, Any]]:
        """Those with commands, but for the installation."""
        steps = self.workflow["jobs"][job]["steps"]
        return [step for step in steps if "run" in step and step["name"] != "Install"]

    def run(self, job: str, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a step as GitHub does."""
        (step,) = [step for step in self.steps(job) if step["name"] == name]
        shell = (
            ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
            if "shell" in step
            else ["bash", "-e"]
        )
        return subprocess.run(
            [*shell, "-c", step["run"]],
            cwd=self.folder,
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )


def test_the_policy_check(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "policy-check", POLICY=GOOD, SECONDS_OF_CHECK="12")
    checked = runner.run("check", "Check the policy")
    assert checked.returncode in (0, 3), checked.stdout + checked.stderr
    compared = runner.run("check", "Compare it on a real trace")
    assert compared.returncode == 0, compared.stderr
    assert runner.summary.read_text().startswith("```\n")
    assert "Policies compared" in runner.summary.read_text()
    assert (tmp_path / "kvproof-trace.html").stat().st_size > 10_000


def test_the_policy_check_fails_for_a_wrong_policy(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "policy-check", SECONDS_OF_CHECK="30", POLICY=WRONG)
    copy(POLICIES / "forgets_token_budget.py", tmp_path / "wrong.py")
    checked = runner.run("check", "Check the policy")
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert list((tmp_path / "kvproof-findings").glob("*.json"))


def test_the_nightly_campaign(tmp_path: Path) -> None:
    """Two shards, two nights; the second goes on, and the report adds everything up."""
    runner = Runner(tmp_path, "nightly-campaign", WHAT=f"--policy {GOOD}", TIME="3s", SHARDS="2")
    for _night in range(2):
        for shard in range(2):
            fuzzed = runner.run("fuzz", "Fuzz", SHARD=str(shard))
            assert fuzzed.returncode == 0, fuzzed.stdout + fuzzed.stderr
    lines = (tmp_path / "campaign-1" / "shards" / "0001.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["at"] > 4.0
    pytest.importorskip("jinja2")
    reported = runner.run("report", "Report")
    assert reported.returncode in (0, 3), reported.stdout + reported.stderr
    assert "<html" in (tmp_path / "report.html").read_text()
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"


def test_the_nightly_campaign_fails_by_its_report(tmp_path: Path) -> None:
    """A finding is no failure of the shard, whose folder is kept, but of the report."""
    pytest.importorskip("jinja2")
    runner = Runner(tmp_path, "nightly-campaign", WHAT=f"--policy {WRONG}", TIME="6s", SHARDS="1")
    copy(POLICIES / "forgets_token_budget.py", tmp_path / "wrong.py")
    assert runner.run("fuzz", "Fuzz", SHARD="0").returncode == 0
    assert runner.run("report", "Report").returncode == 1
    assert runner.run("fuzz", "Fuzz", SHARD="0", TIME="never").returncode == 2


@pytest.mark.kernels
def test_the_gpu_runner(tmp_path: Path) -> None:
    """Here without a GPU: kernels are interpreted, and there is nothing to time."""
    torch = pytest.importorskip("torch")
    runner = Runner(tmp_path, "gpu-runner", TIME="5s")
    fuzzed = runner.run("kernels", "Fuzz them")
    assert fuzzed.returncode in (0, 3), fuzzed.stdout + fuzzed.stderr
    if not torch.cuda.is_available():
        timed = runner.run("kernels", "Time them")
        assert timed.returncode == 2
        assert "GPU" in timed.stderr
