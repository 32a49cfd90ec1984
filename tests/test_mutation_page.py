"""The page of mutants: what counts as wording, what is explained, and how it is counted."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))  # as for any script
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(run: ModuleType) -> ModuleType:
    """What ``run.py`` reads work folders with."""
    return sys.modules["results"]


@pytest.mark.parametrize(
    ("before", "after", "wording"),
    [
        ('raise E(f"{count} blocks wanted")', 'raise E(f"XX{count} blocks wantedXX")', True),
        ('assert key, "a block has a key"', 'assert key, "A BLOCK HAS A KEY"', True),
        ('self._evict(count, "pressure")', 'self._evict(count, "PRESSURE")', False),
        ('raise E("no room")', "raise E(None)", False),
        ('say("one two", a < b)', 'say("one two", a <= b)', False),
        ("", "", False),  # not known: the run was stopped before it said
    ],
)
def test_wording_is_what_a_sentence_says(
    results: ModuleType, before: str, after: str, wording: bool
) -> None:
    name = "kvproof.engine.pool.x_f__mutmut_1"
    assert results.Survivor(name, before, after).is_wording is wording


def test_mutants_are_told_by_their_functions(results: ModuleType) -> None:
    function_of = results.function_of
    assert function_of("kvproof.engine.pool.xǁBlockPoolǁtake__mutmut_12") == "BlockPool.take"
    assert function_of("kvproof.engine.keys.x_block_key__mutmut_1") == "block_key"
    assert function_of("kvproof.engine.keys.x__own__mutmut_1") == "_own"


CHANGES = {
    "d": "-    self.ref_counts = [0] * (blocks + 1)\n+    self.ref_counts = [0] * (blocks + 2)",
    "e": '-    raise E("no room")\n+    raise E("NO ROOM")',
    "f": "-    return 1\n+    return 2",
}


@pytest.fixture
def work(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left by a run: a killed mutant, one that ran for ever, one not run, and three that
    survived, of which one is explained and one is wording."""
    meta = tmp_path / "mutants" / "kvproof" / "engine" / "pool.py.meta"
    meta.parent.mkdir(parents=True)
    codes = dict(zip("abcdef", (1, -24, None, 0, 0, 33), strict=True))
    name = "kvproof.engine.pool.x_{}__mutmut_1".format
    meta.write_text(json.dumps({"exit_code_by_key": {name(f): code for f, code in codes.items()}}))
    shown = {
        name(f): f"--- before\n+++ after\n@@ @@\n def x():\n{change}\n"
        for f, change in CHANGES.items()
    }
    (tmp_path / "survivors.json").write_text(json.dumps(shown))
    (tmp_path / "commits").write_text("abc1234\ndef5678 with changes")
    explained = tmp_path / "explained.toml"
    entry = {"function": "d", "after": ["(blocks + 2)"], "why": "equivalent: longer"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    explained.write_text("\n".join(['[["engine/pool.py"]]', *lines]))
    monkeypatch.setattr(results, "EXPLAINED", explained)
    return tmp_path


def test_what_survived_unexplained_is_run_again_if_asked(
    run: ModuleType, results: ModuleType, work: Path
) -> None:
    run.mark_survivors(work, ["engine/pool.py", "engine/keys.py"])
    codes = results.results_of(work, "engine/pool.py")["exit_code_by_key"].values()
    assert list(codes) == [1, -24, None, 0, 0, results.AGAIN]
    # Until then it is one that survived.
    now = list(results.statuses(work, "engine/pool.py").values())
    expected = ["killed", "ended by force", "not run", "survived", "survived", "survived"]
    assert now == expected
    assert results.statuses(work, "engine/keys.py") == {}


def test_the_page_counts_and_explains(run: ModuleType, work: Path) -> None:
    text = "\n".join(run.page([work]))
    assert "| engine/pool.py | 6 | 5 | 1 | 1 | 3 | 1 | 50 % |" in text
    assert "| engine/ and invariants/ | 1 | 6 | 5 | 3 | 1 | 50 % | – | 50 % |" in text
    assert "| invariants/ | 0 | 0 | 0 | 0 | 0 | – | – | – |" in text
    assert "## Sampled" not in text
    assert "at commit abc1234, def5678 with changes." in text
    assert "Open: 1 that survive and are not explained, 1 not run." in text
    assert "(blocks + 2)`: equivalent: longer" in text
    assert "`f`: `return 1` → `return 2`: **not explained**" in text
    assert "NO ROOM" not in text


LIFE = "kvproof.invariants.checks.life.x_f__mutmut_{}".format


def put_sample(work: Path, killed: int, mutants: int, survivors: int = 0) -> None:
    """A file of the checks of which a part was drawn, and all that was drawn was run once."""
    codes = dict.fromkeys(map(LIFE, range(mutants)))
    drawn = list(codes)[: killed + survivors]
    first = {one: int(number < killed) for number, one in enumerate(drawn)}
    put_codes(work, codes | first)
    (work / "first.json").write_text(json.dumps(first))
    (work / "sample.json").write_text(json.dumps({"invariants/checks/life.py": drawn}))
    (work / "commits").write_text("abc1234")


def put_codes(work: Path, codes: dict[str, int | None]) -> None:
    meta = work / "mutants" / "kvproof" / "invariants" / "checks" / "life.py.meta"
    meta.parent.mkdir(parents=True, exist_ok=True)
    meta.write_text(json.dumps({"exit_code_by_key": codes}))


def codes_of(results: ModuleType, work: Path) -> dict[str, int | None]:
    return dict(results.results_of(work, "invariants/checks/life.py")["exit_code_by_key"])


def test_a_sample_stands_for_what_was_not_drawn(
    run: ModuleType, work: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Found in another folder: 15 of 20 were killed, so 135 of 180 others would be."""
    another = tmp_path_factory.mktemp("another")
    put_sample(another, killed=15, mutants=200, survivors=5)
    text = "\n".join(run.page([work, another]))
    assert "| engine/pool.py | 6 | 5 | 1 | 1 | 3 | 1 | 50 % |" in text
    row = "| invariants/checks/life.py | 20 of 200 | 20 | 15 | 0 | 5 | 0 | 75 % | 15 of 20, 75 % |"
    assert row in text
    # With the interval, 53 to 89 % of 180: 96 to 160; and 15 of 20, and 2 of 4 of the other file.
    assert (
        "| invariants/ | 1 | 200 | 20 | 5 | 0 | 75 % | 75 % (53 to 89 %) | 75 % (55 to 87 %)"
        in text
    )
    all_of_them = "| engine/ and invariants/ | 2 | 206 | 25 | 8 | 1 | 71 % | 75 % (53 to 89 %) |"
    assert f"{all_of_them} 75 % (55 to 87 %) |" in text
    assert "at commit abc1234, def5678 with changes." in text
    assert "was not kept" not in text


def test_tests_written_for_survivors_do_not_change_what_is_estimated(
    run: ModuleType, tmp_path: Path
) -> None:
    """All five survivors are killed by now: this says nothing of the other 180."""
    put_sample(tmp_path, killed=15, mutants=200, survivors=5)
    put_codes(
        tmp_path, dict.fromkeys(map(LIFE, range(200))) | dict.fromkeys(map(LIFE, range(20)), 1)
    )
    text = "\n".join(run.page([tmp_path]))
    row = "| invariants/checks/life.py | 20 of 200 | 20 | 20 | 0 | 0 | 0 | 100 % | 15 of 20, 75 % |"
    assert row in text
    total = "| invariants/ | 1 | 200 | 20 | 0 | 0 | 100 % | 75 % (53 to 89 %) | 78 % (58 to 90 %) |"
    assert total in text


def test_what_is_not_known_of_the_first_run_is_no_part_of_the_estimate(
    run: ModuleType, tmp_path: Path
) -> None:
    """Of those ten that are known, five survived."""
    put_sample(tmp_path, killed=15, mutants=200, survivors=5)
    known = {LIFE(number): int(number < 15) for number in range(10, 20)}
    (tmp_path / "first.json").write_text(json.dumps(known))
    text = "\n".join(run.page([tmp_path]))
    row = "| invariants/checks/life.py | 20 of 200 | 20 | 15 | 0 | 5 | 0 | 75 % | 5 of 10, 50 % |"
    assert row in text
    assert "Of 10 of the sample the first result was not kept" in text
    (tmp_path / "first.json").unlink()
    text = "\n".join(run.page([tmp_path]))
    assert "| invariants/ | 1 | 200 | 20 | 5 | 0 | 75 % | – | 75 % |" in text


def test_what_was_drawn_and_not_run_may_survive_or_not(
    run: ModuleType, results: ModuleType, tmp_path: Path
) -> None:
    """Of 20 drawn, 15 were killed; so 15 to 20, and Wilson's interval beyond.  Half of them are
    taken to be killed."""
    put_sample(tmp_path, killed=15, mutants=200, survivors=5)
    put_codes(tmp_path, {name: code or None for name, code in codes_of(results, tmp_path).items()})
    first = {LIFE(number): 1 for number in range(15)}
    (tmp_path / "first.json").write_text(json.dumps(first))
    text = "\n".join(run.page([tmp_path]))
    total = "| invariants/ | 1 | 200 | 15 | 0 | 0 | 100 % | 88 % (53 to 100 %) |"
    assert total in text
    assert "Open: 0 that survive and are not explained, 5 not run." in text


def test_a_file_of_which_all_is_run_is_not_sampled(run: ModuleType, tmp_path: Path) -> None:
    put_sample(tmp_path, killed=20, mutants=20)
    text = "\n".join(run.page([tmp_path]))
    assert "| invariants/checks/life.py | 20 | 20 | 20 | 0 | 0 | 0 | 100 % |" in text


def test_the_page_needs_no_run(run: ModuleType, work: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    run.main(["--work", str(work), "--page", str(page), "--only-page"])
    assert page.read_text().startswith("# Mutation score\n")


def test_all_files_are_run_whole_or_may_be_sampled(results: ModuleType) -> None:
    assert "engine/clock.py" in {*results.PATHS, *results.others()}
    assert not {*results.PATHS} & {*results.others()}


def test_a_plain_copy_of_a_file_gives_way_to_a_mutated_one(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mutmut takes it for one that is up to date, and each of its mutants would survive."""
    copies = tmp_path / "mutants" / "kvproof" / "engine"
    copies.mkdir(parents=True)
    for name in ("clock.py", "job.py", "keys.py", "keys.py.meta"):
        (copies / name).touch()
    run.build(tmp_path, ["engine/clock.py", "engine/keys.py"])
    assert {path.name for path in copies.iterdir()} == {"job.py", "keys.py", "keys.py.meta"}


def test_mutants_are_run_in_forks(run: ModuleType, results: ModuleType, tmp_path: Path) -> None:
    """One that the tests tell apart is killed, one that they do not survives and is shown."""
    put_code(run, tmp_path)
    run_forks(run, tmp_path)
    assert sorted(results.statuses(tmp_path, "engine/one.py").values()) == ["killed", "survived"]
    (survivor,) = results.survivors(tmp_path, "engine/one.py")
    assert (survivor.function, survivor.after) == ("after", "return number + 2")


def put_code(run: ModuleType, work: Path) -> None:
    """A function with two mutants, and its test."""
    pytest.importorskip("mutmut")
    code = "def after(number: int) -> int:\n    return number + 1\n"
    test = """
from kvproof.engine.one import after

def test_it_is_later() -> None:
    assert after(5) > 5
"""
    files = {"kvproof/engine/one.py": code, "kill/test_one.py": test}
    # Where kvproof is installed, a folder without this file would give way to the installed one.
    files["kvproof/engine/__init__.py"] = files["kvproof/invariants/__init__.py"] = ""
    settings = {"files": '["kvproof/engine/one.py"]', "options": '["--import-mode=importlib"]'}
    files["pyproject.toml"] = run.SETTINGS.format(**settings)
    for name, text in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_forks(run: ModuleType, work: Path, *options: str) -> None:
    forks = [sys.executable, str(run.HERE / "forks.py"), *options, "--tests", "kill/test_one.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [*forks, "--paths", "engine/one.py"],
        cwd=work,
        env=environment,
        check=True,
        capture_output=True,
    )


def test_a_larger_sample_contains_a_smaller_one(
    run: ModuleType, results: ModuleType, tmp_path: Path
) -> None:
    put_code(run, tmp_path)
    run_forks(run, tmp_path, "--sample", "1")
    (first,) = results.drawn(tmp_path, "engine/one.py")
    assert list(results.statuses(tmp_path, "engine/one.py")) == [first]
    run_forks(run, tmp_path, "--sample", "2")
    assert results.drawn(tmp_path, "engine/one.py") is None, "that is all of them"
    assert sorted(results.statuses(tmp_path, "engine/one.py").values()) == ["killed", "survived"]


def test_the_first_result_is_kept(run: ModuleType, results: ModuleType, tmp_path: Path) -> None:
    """A better test kills what has survived, and at first it had survived."""
    put_code(run, tmp_path)
    run_forks(run, tmp_path)
    first = json.loads((tmp_path / "first.json").read_text())
    assert sorted(first.values()) == [0, 1]
    run.mark_survivors(tmp_path, ["engine/one.py"])
    test = tmp_path / "kill" / "test_one.py"
    test.write_text(test.read_text().replace("> 5", "== 6"))
    (tmp_path / "mutants" / "kill" / "test_one.py").write_text(test.read_text())
    run_forks(run, tmp_path)
    assert [*results.statuses(tmp_path, "engine/one.py").values()] == ["killed", "killed"]
    assert json.loads((tmp_path / "first.json").read_text()) == first


def code_of(path: str) -> dict[str, str]:
    """By function, each as one line; by no name, the whole file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {"": text}
    for node in ast.parse(text).body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef):
                name = one.name if one is node else f"{getattr(node, 'name', '')}.{one.name}"
                found[name] = ast.get_source_segment(text, one) or ""
    return {name: " ".join(map(str.strip, code.splitlines())) for name, code in found.items()}


def test_what_is_explained_is_of_files_that_are_mutated(results: ModuleType) -> None:
    for path, entries in results.explanations().items():
        assert path in {*results.PATHS, *results.others()}
        for entry in entries:
            assert entry["why"]
            assert {*entry} <= {"function", "before", "after", "why"}


def test_what_is_explained_is_told_from_what_is_not_mutated(results: ModuleType) -> None:
    for path, entries in results.explanations().items():
        functions = code_of(path)
        for entry in entries:
            code = functions[entry.get("function", "")]
            assert entry.get("before", "") in code, entry
            assert entry["after"]
            assert not [text for text in entry["after"] if text in code], entry


WRONG = [
    (
        "engine/tiers/storage.py",
        "Storage.computed",
        "for block, key in zip(table[first:full], keys[first + 1 : full + 1], strict=False):",
        "for block, key in zip(table[first:full], keys[first + 2 : full + 1], strict=False):",
    ),
    (
        "engine/tiers/transfers.py",
        "Transfers.release",
        "for pool, slots in zip(self.host, request.host_tables, strict=False):",
        "for pool, slots in zip(request.host_tables, strict=False):",
    ),
    (
        "invariants/checks/pin.py",
        "Pin._outlived",
        "for (item, _), tables in zip(step.items, step.tables, strict=True):",
        "for (item, _), tables in zip(step.items, None, strict=True):",
    ),
    (
        "invariants/checks/cons.py",
        "Cons.audit",
        "held = len(group.refs) - len(reserved) - len(free)",
        "held = len(group.refs) - len(reserved) - len(None)",
    ),
]
"""Of functions with an explained mutant: other changes of the same line."""


@pytest.mark.parametrize(("path", "function", "before", "after"), WRONG)
def test_another_change_of_an_explained_line_is_not_explained(
    results: ModuleType, path: str, function: str, before: str, after: str
) -> None:
    assert before in code_of(path)[function]
    name = f"kvproof.xǁ{function.replace('.', 'ǁ')}__mutmut_1"
    survivor = results.Survivor(name, before, after)
    assert results.reason(survivor, results.explanations()[path]) is None


def test_all_that_is_mutated_is_there(results: ModuleType) -> None:
    assert all((ROOT / path).is_file() for path in results.PATHS)
