"""``benchmarks/mutation/foreign.py``: where a mutant's statement is, and what its page says.

Needs what that script needs; it has no part of vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("mutmut")
pytest.importorskip("libcst")

ROOT = Path(__file__).parents[1]
SOURCE = """\
class Pool:
    def take(self, count, most=4):
        if (
            count > most
        ):
            raise ValueError("too many blocks")
        return [
            block
            for block in range(count)
        ]
"""


@pytest.fixture(scope="module")
def foreign() -> ModuleType:
    """The script, which is no part of a package."""
    path = ROOT / "benchmarks" / "mutation" / "foreign.py"
    spec = importlib.util.spec_from_file_location("mutation_foreign", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))  # as for any script
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def mutants(
    foreign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, str], Any]:
    (tmp_path / "pool.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text(foreign.SETTINGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {mutant.shown(): mutant for mutant in foreign.mutants_of("pool")}


def test_a_mutant_knows_the_lines_of_its_statement(mutants: dict[tuple[str, str], Any]) -> None:
    lines = {shown: (mutant.first, mutant.last) for shown, mutant in mutants.items()}
    assert lines["> most", ">= most"] == (3, 4)  # the head alone
    assert lines["4", "5"] == (2, 10)  # a default: wherever the function is called
    assert lines["range(count)", "range(None)"] == (7, 10)
    assert {mutant.owner for mutant in mutants.values()} == {"Pool"}


def test_what_no_subject_executes_and_what_is_wording_is_not_searched(
    foreign: ModuleType, mutants: dict[tuple[str, str], Any]
) -> None:
    words = next(m for (before, _), m in mutants.items() if before == '"too many blocks"')
    reached = {"one": {"pool": {3, 4}}, "two": {"pool": {6}}}
    assert foreign.tried(mutants["range(count)", "range(None)"], reached, 1).outcome == (
        "not reached"
    )
    assert foreign.tried(words, reached, 1).outcome == "wording"


@pytest.mark.parametrize(
    ("search", "outcome"),
    [
        (lambda *_, **more: [more["on_run"](None) for _ in iter(int, 1)], ("survived", "", "")),
        (
            lambda *_, **more: SimpleNamespace(
                violation=SimpleNamespace(property="CONS"), case=SimpleNamespace(operations=[1])
            ),
            ("killed", "CONS", "one"),
        ),
        (lambda *_, **more: int("none"), ("killed", "ValueError", "one")),
    ],
)
def test_each_outcome_of_a_search_is_told(
    foreign: ModuleType,
    mutants: dict[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
    search: Callable[..., Any],
    outcome: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(foreign, "search", search)
    result = foreign.tried(mutants["> most", ">= most"], {"one": {"pool": {4}}}, 0.1)
    assert (result.outcome, result.property, result.subject) == outcome
    assert (result.function, result.line) == ("Pool.take", 3)


def test_what_survived_a_shorter_search_is_tried_again(foreign: ModuleType, tmp_path: Path) -> None:
    journal = tmp_path / "results.jsonl"
    said = {"module": "m", "number": 1, "function": "f", "line": 1, "before": "1", "after": "2"}
    for outcome, seconds in (("killed", 1.0), ("survived", 6.0)):
        result = foreign.Result(**said, outcome=outcome, cpu_seconds=seconds)
        with journal.open("ab") as file:
            file.write(foreign.msgspec.json.encode(result) + b"\n")
    (last,) = foreign.results(journal).values()
    assert last.outcome == "survived"  # the latest
    assert [foreign._settled(last, seconds) for seconds in (6, 20)] == [True, False]
    assert not foreign._settled(None, 1)


def test_the_interval_is_wilson_s(foreign: ModuleType) -> None:
    """Figures of the 1927 formula, as in any table of it."""
    assert foreign.wilson(10, 20) == pytest.approx((0.299, 0.701), abs=0.001)
    assert foreign.wilson(0, 10) == pytest.approx((0.0, 0.278), abs=0.001)


def test_the_page_counts_and_explains(foreign: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = foreign.MODULES[1]
    monkeypatch.setattr(foreign, "import_module", lambda name: SimpleNamespace(__version__="0.0"))

    def result(outcome: str, number: int, function: str = "f", **more: Any) -> Any:
        return foreign.Result(module, number, function, 7, "a", "b", outcome, **more)

    known = "KVCacheManager.__init__"
    told = [
        result("killed", 1, property="CONS", cpu_seconds=0.5),
        result("hang", 2),
        result("not reached", 3),
        result("wording", 4),
        result("survived", 88, known, cpu_seconds=6.0),
        result("survived", 6, cpu_seconds=20.0),
    ]
    text = "\n".join(foreign.page(told, foreign.Conditions(["c0ffee"], ["one"]), 100))
    assert "| all | 6 | 1 | 1 | 2 | 2 | 50 % (15 to 85 %) |" in text
    assert "--sample 6`, at commit c0ffee, on Python 3." in text
    assert "searched for 6 to 20 CPU seconds" in text
    assert "CONS 1, hang 1" in text
    assert f"`{known}`, line 7: `a` → `b`: not driven: " in text
    assert "`f`, line 7: `a` → `b`: **not explained**" in text


def test_where_other_subjects_are_driven_they_may_reach_more(
    foreign: ModuleType, tmp_path: Path
) -> None:
    outcomes = ("killed", "not reached", "survived")
    told = [
        foreign.Result(foreign.MODULES[0], n, "f", 7, "a", "b", o) for n, o in enumerate(outcomes)
    ]
    journal = tmp_path / "results.jsonl"
    journal.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in told))
    conditions = foreign.Conditions(["c0ffee"], ["one"])
    (tmp_path / "conditions.json").write_bytes(msgspec.json.encode(conditions))

    foreign.forget_unreached(tmp_path, ["one"])
    assert len(foreign.results(journal)) == 3
    foreign.forget_unreached(tmp_path, ["one", "two"])
    assert list(foreign.results(journal).values()) == [told[0], told[2]]


def test_what_a_subject_reaches_is_looked_for_once(
    foreign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def reached_lines(subject: str) -> dict[str, set[int]]:
        asked.append(subject)
        return {"pool": {len(asked)}}

    monkeypatch.setattr(foreign, "reached_lines", reached_lines)
    monkeypatch.setattr(foreign, "commit", lambda: "c0ffee")
    assert foreign.begin(tmp_path, ["one"]) == {"one": {"pool": {1}}}
    both = {"one": {"pool": {1}}, "two": {"pool": {2}}}
    assert foreign.begin(tmp_path, ["one", "two"]) == both
    assert foreign.begin(tmp_path, ["two"]) == {"two": both["two"]}
    assert asked == ["one", "two"]


def test_what_finds_fault_with_vllm_as_it_is_reaches_nothing(
    foreign: ModuleType, mutants: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    del mutants  # which stand for vLLM's
    monkeypatch.setattr(foreign, "MODULES", ("pool",))
    monkeypatch.setattr(foreign, "REACHING_SECONDS", 0.05)

    def search(*_: Any, **more: Any) -> None:
        pool = importlib.import_module("pool").Pool()
        while True:
            pool.take(1)
            more["on_run"](None)

    monkeypatch.setattr(foreign, "search", search)
    reached = foreign.reached_lines("one")["pool"]
    assert {4, 7} <= reached
    assert 6 not in reached
    found = SimpleNamespace(
        violation=SimpleNamespace(property="CONS"), case=SimpleNamespace(operations=[1])
    )
    monkeypatch.setattr(foreign, "search", lambda *_, **more: found)
    with pytest.raises(RuntimeError, match="one, unchanged: CONS"):
        foreign.reached_lines("one")


def test_each_explanation_begins_with_its_kind(foreign: ModuleType) -> None:
    for module, entries in tomllib.loads(foreign.EXPLAINED.read_text()).items():
        assert module in foreign.MODULES
        for entry in entries:
            assert entry.keys() == {"function", "numbers", "why"}
            assert foreign._kind(entry["why"])
