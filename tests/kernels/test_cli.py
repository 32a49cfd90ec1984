"""``kvproof kernels``: what the command line hands on, prints, and exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("msgspec", "rich", "typer"))):
    pytest.skip("kvproof's command line is not installed here", allow_module_level=True)

import torch
from typer.testing import CliRunner

from kvproof.fuzz.cli import kernels
from kvproof.fuzz.cli.app import app
from kvproof.fuzz.cli.output import SCHEMA
from kvproof.kernels import bench, checks, variants
from kvproof.kernels.checks import Check, Plan

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def kvproof(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder of its own."""
    code = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def invoke(*arguments: str) -> tuple[int, str]:
    """Run the command in this process."""
    result = CliRunner().invoke(app, ["kernels", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["check", "compile", "bench"])
def test_help_shows_an_example(command: str) -> None:
    code, output = invoke(command, "--help")
    assert code == 0
    assert f"Example: kvproof kernels {command}" in output
    assert "--json" in output


def test_json_of_all_commands_has_one_schema() -> None:
    assert (bench.SCHEMA, variants.SCHEMA) == (SCHEMA, SCHEMA)


def refuted(plan: Plan) -> str:
    raise AssertionError("out[0] is 1, exactly 2")


def stumbles(plan: Plan) -> str:
    raise ZeroDivisionError("division by zero")


def told(plan: Plan) -> str:
    return f"{plan.device}, {plan.examples} examples, seed {plan.seed}"


@on_cpu
@pytest.mark.parametrize(
    ("run", "verdict", "code"), [(told, "pass", 0), (refuted, "fail", 1), (stumbles, "unknown", 3)]
)
def test_check_has_options_and_exit_codes(monkeypatch, run: Any, verdict: str, code: int) -> None:
    planted = [Check("planted", "Planted.", run), Check("other", "Left out.", stumbles)]
    monkeypatch.setattr(checks, "all_checks", lambda: planted)
    options = ("--only", "plant", "--examples", "7", "--seed", "-3", "--cpu", "--json")
    got, output = invoke("check", *options)
    document = json.loads(output)
    assert (got, document["verdict"], document["schema"]) == (code, verdict, SCHEMA)
    (outcome,) = document["checks"]
    assert outcome["result"] == verdict
    if code == 0:
        assert outcome["remark"] == "cpu, 7 examples, seed -3"


def test_check_runs_where_triton_was_not_told_to_interpret(tmp_path: Path) -> None:
    result = kvproof(
        *("kernels", "check", "--cpu", "--only", "write", "--examples", "2"),
        cwd=tmp_path,
        TRITON_INTERPRET="0",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "pass: 1 checks on cpu, seed 0"


def test_compile_compiles_though_this_process_interprets(tmp_path: Path) -> None:
    result = kvproof(
        *("kernels", "compile", "--kernel", "copy", "--target", "sm_90", "--target", "gfx942"),
        *("--dtype", "bf16", "--features", "plain", "--json"),
        cwd=tmp_path,
        TRITON_INTERPRET="1",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["schema"], document["verdict"]) == (SCHEMA, "pass")
    assert {variant["target"] for variant in document["variants"]} == {"sm_90", "gfx942"}
    assert all(variant["ok"] for variant in document["variants"])


def test_compile_hands_on_its_options(monkeypatch) -> None:
    echo = "import sys; print(sys.argv[1:])"
    monkeypatch.setattr(kernels, "COMPILER", [sys.executable, "-c", echo])
    written = ("--kernel", "mla", "--dtype", "e5m2", "--dtype", "fp32", "--features", "odd")
    code, output = invoke("compile", *written)
    assert code == 0
    options = ["--kernel=mla", "--dtype=e5m2", "--dtype=fp32", "--features=odd"]
    assert output == f"{options}\n"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        *((f"sys.exit({code})", code) for code in (0, 1, 2, 3)),
        ("os.kill(os.getpid(), 9)", 3),
    ],
)
def test_the_exit_code_is_that_of_the_compiling_process(monkeypatch, ends: str, code: int) -> None:
    program = f"import os, sys; {ends}"
    monkeypatch.setattr(kernels, "COMPILER", [sys.executable, "-c", program])
    got, output = invoke("compile")
    assert got == code
    assert ("died of signal 9" in output) == ("kill" in ends)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("compile", "--kernel", "fft"), "no kernel 'fft'; there are decode, unified, mla"),
        (("check", "--examples", "0"), "Invalid value for '--examples'"),
    ],
)
def test_bad_usage_is_told_and_is_2(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    result = kvproof("kernels", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert complaint in result.stderr


@pytest.mark.parametrize("missing", ["torch", "triton"])
@pytest.mark.parametrize("command", ["check", "compile", "bench"])
def test_without_torch_or_triton_it_is_one_line_and_2(
    tmp_path: Path, command: str, missing: str
) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = bool\n")  # fast
    halted = f"raise ModuleNotFoundError('no {missing}', name={missing!r})\n"
    (tmp_path / f"{missing}.py").write_text(halted)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = kvproof("kernels", command, cwd=tmp_path, PYTHONPATH=path)
    assert (result.returncode, result.stdout) == (2, "")
    expected = f"kvproof kernels: {missing} is not installed: pip install 'kvproof[kernels]'\n"
    assert result.stderr == expected


def test_the_rest_of_the_command_line_imports_neither(tmp_path: Path) -> None:
    program = "import sys, kvproof.fuzz.cli.app; print(*{'torch', 'triton'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "")
