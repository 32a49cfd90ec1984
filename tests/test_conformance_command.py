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


def kvproof(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvproof.fuzz.cli import main; main()"]
    return subprocess.run(
        [*command, "conformance", *arguments], cwd=cwd, capture_output=True, text=True, check=False
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


def test_an_unknown_subject_is_bad_input(tmp_path: Path) -> None:
    result = kvproof("--subject", "nosuch", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("kvproof: unknown subject 'nosuch'")
