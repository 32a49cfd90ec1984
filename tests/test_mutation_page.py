"""The page of mutants: what counts as wording, what is explained, and how it is counted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """``benchmarks/mutation/run.py``, which is no part of a package."""
    path = ROOT / "benchmarks" / "mutation" / "run.py"
    spec = importlib.util.spec_from_file_location("mutation_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "after", "wording"),
    [
        ('raise E(f"{count} blocks wanted")', 'raise E(f"XX{count} blocks wantedXX")', True),
        ('assert key, "a block has a key"', 'assert key, "A BLOCK HAS A KEY"', True),
        ('self._evict(count, "pressure")', 'self._evict(count, "PRESSURE")', False),
        ('raise E("no room")', "raise E(None)", False),
        ('say("one two", a < b)', 'say("one two", a <= b)', False),
    ],
)
def test_wording_is_what_a_sentence_says(
    run: ModuleType, before: str, after: str, wording: bool
) -> None:
    assert run.Survivor("f", before, after).is_wording is wording


def test_mutants_are_told_by_their_functions(run: ModuleType) -> None:
    assert run.function_of("kvproof.engine.pool.xǁBlockPoolǁtake__mutmut_12") == "BlockPool.take"
    assert run.function_of("kvproof.engine.keys.x_block_key__mutmut_1") == "block_key"
    assert run.function_of("kvproof.engine.keys.x__own__mutmut_1") == "_own"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What mutmut leaves: a killed mutant, one that ran for ever, one not run, three survivors."""
    meta = tmp_path / "mutants" / "kvproof" / "engine" / "pool.py.meta"
    meta.parent.mkdir(parents=True)
    codes = dict(zip("abcdef", (1, -24, None, 0, 0, 33), strict=True))
    names = {f"kvproof.engine.pool.x_{name}__mutmut_1": code for name, code in codes.items()}
    meta.write_text(json.dumps({"exit_code_by_key": names}))
    (tmp_path / "commits").write_text("abc1234\ndef5678 with changes")
    return tmp_path


def test_what_survived_is_run_again_if_asked(run: ModuleType, work: Path) -> None:
    stats = work / "mutants" / "mutmut-stats.json"
    stats.write_text("{}")
    paths = ["engine/pool.py", "engine/keys.py"]
    run.forget_survivors(work, paths)
    now = list(run.statuses(work, "engine/pool.py").values())
    assert now == ["killed", "ended by force", *["not run"] * 4]
    assert not stats.exists()
    assert run.statuses(work, "engine/keys.py") == {}


def test_the_page_counts_and_explains(
    run: ModuleType, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "d": "-    self.ref_counts = [0] * (blocks + 1)\n+    self.ref_counts = [0] * (blocks + 2)",
        "e": '-    raise E("no room")\n+    raise E("NO ROOM")',
        "f": "-    return 1\n+    return 2",
    }

    def shown(_work: Path, command: str, name: str, **options: Any) -> Any:
        assert command == "show"
        change = changes[run.function_of(name)]
        text = f"--- before\n+++ after\n@@ @@\n def x():\n{change}\n"
        return type("Done", (), {"stdout": text})

    monkeypatch.setattr(run, "_mutmut", shown)
    explained = {"function": "d", "before": "(blocks + 1)", "why": "equivalent: longer"}
    monkeypatch.setattr(run.tomllib, "loads", lambda text: {"engine/pool.py": [explained]})
    text = "\n".join(run.page(work, ["engine/pool.py", "engine/keys.py"]))
    assert "| engine/pool.py | 6 | 5 | 1 | 1 | 3 | 1 | 50 % |" in text
    assert "| engine/keys.py | 0 | 0 | 0 | 0 | 0 | 0 | – |" in text
    assert "at commit abc1234, def5678 with changes." in text
    assert "Open: 1 that survive and are not explained, 1 not run." in text
    assert "(blocks + 2)`: equivalent: longer" in text
    assert "`f`: `return 1` → `return 2`: **not explained**" in text
    assert "NO ROOM" not in text


def test_what_is_explained_is_of_files_that_are_mutated(run: ModuleType) -> None:
    text = (ROOT / "benchmarks" / "mutation" / "explained.toml").read_text()
    for path, entries in run.tomllib.loads(text).items():
        assert path in run.PATHS
        assert (ROOT / path).exists()
        for entry in entries:
            assert entry["why"]
            assert {*entry} <= {"function", "before", "after", "why"}
            assert entry.keys() & {"before", "after"}


def test_all_that_is_mutated_is_there(run: ModuleType) -> None:
    assert all((ROOT / path).is_file() for path in run.PATHS)
