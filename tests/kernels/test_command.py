"""``python -m kvproof.kernels``: verdicts, exit codes, JSON, and one clear line for bad usage."""

from __future__ import annotations

import json

import pytest
import torch

from kvproof.kernels import __main__ as command
from kvproof.kernels import checks
from kvproof.kernels.checks import Check

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def fails(plan: checks.Plan) -> str:
    raise AssertionError("out[0] is 1, exactly 2")


def crashes(plan: checks.Plan) -> str:
    raise ZeroDivisionError("division by zero")


SOUND = Check("sound", "It holds.", lambda plan: f"{plan.examples} cases, seed {plan.seed}")
FAILING = Check("failing", "It does not.", fails)
CRASHING = Check("crashing", "It says nothing.", crashes)


def run(monkeypatch, capsys, planted, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(checks, "all_checks", lambda: planted)
    code = command.main(["check", "--only", "ing" if len(planted) > 1 else "", *options])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("planted", "verdict", "code"),
    [
        ([FAILING, CRASHING], "fail", 1),
        ([CRASHING, CRASHING], "unknown", 3),
    ],
)
def test_the_worst_outcome_is_the_verdict(monkeypatch, capsys, planted, verdict, code) -> None:
    got, out = run(monkeypatch, capsys, planted, "--json")
    document = json.loads(out)
    assert (got, document["verdict"], document["schema"]) == (code, verdict, 1)
    assert [c["result"] for c in document["checks"]] == [
        {"failing": "fail", "crashing": "unknown"}[check.name] for check in planted
    ]
    assert document["checks"][-1]["remark"] == "ZeroDivisionError: division by zero"


def test_a_failure_is_told_with_its_message(monkeypatch, capsys) -> None:
    code, out = run(monkeypatch, capsys, [FAILING, CRASHING])
    assert code == 1
    assert "failing" in out
    assert "out[0] is 1, exactly 2" in out
    assert out.splitlines()[-1].startswith("fail: 2 checks on ")


@on_cpu
def test_options_reach_the_checks(monkeypatch, capsys) -> None:
    monkeypatch.setattr(checks, "all_checks", lambda: [SOUND])
    options = ["check", "--only", "sound", "--examples", "7", "--seed", "3", "--cpu"]
    assert command.main(options) == 0
    assert "7 cases, seed 3" in capsys.readouterr().out


@on_cpu
def test_the_checks_of_the_sanitizer_are_among_them(capsys) -> None:
    assert command.main(["check", "--only", "sanitizer", "--examples", "1", "--json"]) == 0
    names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert names == ["decode-sanitizer", "unified-sanitizer", "mla-sanitizer"]


@on_cpu
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["check", "--only", "nonsense"], "no check has 'nonsense' in its name"),
        (["check", "--examples", "0"], "--examples must be 1 or more, not 0"),
        (["bench"], "bench measures on an NVIDIA GPU, and PyTorch sees none here"),
        (["compile"], "Triton interprets in this process"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(capsys, monkeypatch, arguments, complaint) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["check", "compile", "bench"])
def test_help_has_an_example(capsys, name: str) -> None:
    with pytest.raises(SystemExit) as left:
        command.main([name, "--help"])
    assert left.value.code == 0
    assert f"example: kvproof kernels {name}" in capsys.readouterr().out


def test_no_command_is_bad_usage(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        command.main([])
    assert left.value.code == 2


def test_a_crash_is_no_verdict(monkeypatch, capsys) -> None:
    monkeypatch.setattr(checks, "all_checks", lambda: 1 // 0)
    assert command.main(["check"]) == 3
    assert "internal error, please report it: ZeroDivisionError" in capsys.readouterr().err
