"""The benchmark of bug finding: its drivers differ, its figures add up, and it goes on."""

from __future__ import annotations

import json
import re
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from kvproof.fuzz.cli.app import app
from kvproof.fuzz.cli.faults import selected
from kvproof.fuzz.detection import drivers, measure
from kvproof.fuzz.detection.drivers import DRIVERS, by_loop, by_machine, by_unlimited_machine
from kvproof.fuzz.detection.measure import Task, in_sample, measure_all
from kvproof.fuzz.detection.page import write_page
from kvproof.fuzz.detection.plot import plot, require_plotting
from kvproof.fuzz.detection.records import LOOP, CleanRun, Journal, Row, Trial
from kvproof.fuzz.detection.summary import (
    asked_and_reached,
    complaint,
    curves,
    detection_of,
    median_seconds,
    reached,
    speedup,
    survival,
)
from kvproof.fuzz.detection.uniform import LENGTH, WORLD, draw_uniform
from kvproof.fuzz.faults import all_faults, fault_by_id
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import OPERATION_TYPES, Admit, kind_of
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

EASY = "finish-forgets-its-table"
ALSO_EASY = "finished-request-keeps-its-blocks"
OUT_OF_REACH = "long-prompt-starves"
"""A fault of a scheduler, which nobody finds in the engine."""
RARE = "failed-fetch-leaks-its-slot"


# -- the drivers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_driver_finds_a_fault_and_says_by_what_run(driver: str) -> None:
    fault = fault_by_id(EASY)
    totals = Totals()
    case = DRIVERS[driver](fault.subject, fault.id, "finds", 20.0, totals)
    assert case is not None
    assert case.violates is not None
    assert totals.ops >= len(case.operations) > 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_driver_gives_up_after_its_cpu_seconds(driver: str) -> None:
    assert DRIVERS[driver]("engine", OUT_OF_REACH, "gives-up", 0.2, totals := Totals()) is None
    assert totals.runs > 0


def test_hypothesis_by_default_is_over_after_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    default = settings.get_profile("default")
    assert drivers.EXAMPLES == 100 <= default.max_examples
    assert drivers.STEPS == default.stateful_step_count == 50
    monkeypatch.setattr(drivers, "EXAMPLES", 5)
    limited, unlimited = Totals(), Totals()
    assert by_machine("engine", OUT_OF_REACH, "limit", inf, limited) is None
    assert by_unlimited_machine("engine", OUT_OF_REACH, "limit", 0.5, unlimited) is None
    assert limited.runs <= 6 < unlimited.runs  # Hypothesis makes the simplest run first


def test_the_uniform_driver_has_one_world_and_no_favourites() -> None:
    able = EngineSubject(WORLD).capabilities
    runs = [draw_uniform(f"uniform/{number}", able) for number in range(200)]
    assert runs[0] == draw_uniform("uniform/0", able) != runs[1]
    counts = Counter(kind_of(operation) for run in runs for operation in run)
    assert {*counts} == able
    assert sum(counts.values()) == 200 * LENGTH
    assert max(counts.values()) < 1.5 * min(counts.values())
    admits = [o for run in runs for o in run if isinstance(o, Admit)]
    salts = Counter(admit.salt for admit in admits)
    assert abs(salts[0] - salts[1]) < len(admits) / 4


def test_the_uniform_driver_can_draw_all_kinds_of_operations() -> None:
    drawn = draw_uniform("all", frozenset(kind.__name__.lower() for kind in OPERATION_TYPES))
    assert len({kind_of(operation) for operation in drawn}) > 15


def test_uniform_runs_raise_no_false_alarm() -> None:
    able = EngineSubject(WORLD).capabilities
    for number in range(20):
        harness = Harness(EngineSubject(WORLD))
        assert list(harness.run(draw_uniform(f"silent/{number}", able))) == []


def test_the_loop_draws_many_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    from kvproof.fuzz import search

    draw = search.draw_run
    monkeypatch.setattr(
        search, "draw_run", lambda *a, **k: seen.append(made := draw(*a, **k)) or made
    )
    assert by_loop("engine", OUT_OF_REACH, "worlds", 0.3, Totals()) is None
    assert len({repr(made.configuration) for made in seen}) > 1


# -- measuring -------------------------------------------------------------------------------------


def without_times(row: Row) -> Row:
    trials = [replace(trial, seconds=0.0, shrink_seconds=0.0) for trial in row.trials]
    return replace(row, calls_per_second=0.0, trials=tuple(trials))


def test_two_workers_give_the_same_results_as_one() -> None:
    tasks = [
        Task(fault, driver, "workers", 2, 20.0) for fault in (EASY, ALSO_EASY) for driver in DRIVERS
    ]
    by_workers = []
    for workers in (1, 2):
        rows: list[Row] = []
        measure_all(tasks, workers=workers, on_row=rows.append)
        by_workers.append({(r.fault, r.driver): without_times(r) for r in rows})
    assert by_workers[0] == by_workers[1]
    assert len(by_workers[0]) == len(tasks)


def test_as_many_cases_are_shrunk_as_asked_for_and_all_are_looked_at() -> None:
    row = measure.measure(Task(EASY, LOOP, "x", 2, 20.0, shrinks=1))
    first, second = row.trials
    for trial in row.trials:
        assert trial.found
        assert trial.reached
        assert trial.triggered
        assert {"QUIES", "LIFE", "REF", "CONS", "HOLD", "CRASH"} & {*trial.properties}
    assert row.calls_per_second > 1e5
    assert (first.shrunk_ops, second.shrunk_ops) == (2, 0)
    assert first.shrink_seconds > 0 == second.shrink_seconds
    assert detection_of(fault_by_id(EASY), row).shrunk_ops == 2


def test_conditions_say_what_each_driver_does() -> None:
    loop = measure.task_of(CONDITIONS, EASY, LOOP)
    assert (loop.seeds, loop.seconds, loop.shrinks) == (2, 20.0, 1)
    other = measure.task_of(CONDITIONS, EASY, "uniform")
    assert (other.seeds, other.seconds, other.shrinks) == (1, 10.0, 0)


def test_what_the_unmodified_subject_fails_as_well_is_not_the_fault() -> None:
    with fault_by_id("release-keeps-last-block").installed():
        row = measure.measure(Task(RARE, LOOP, "alarm", 1, 20.0))
    (trial,) = row.trials
    assert trial.false_alarm
    assert not trial.found
    assert "found something else" in complaint(detection_of(fault_by_id(RARE), row))


def test_a_sample_is_chosen_by_names_alone() -> None:
    ids = [fault.id for fault in all_faults()]
    sample = [name for name in ids if in_sample(name, 3)]
    assert len(ids) / 6 < len(sample) < len(ids) / 2
    assert all(in_sample(name, 1) for name in ids)
    assert sample == [name for name in ids if in_sample(name, 3)]


# -- figures ---------------------------------------------------------------------------------------


def trials(*found: float, given_up: tuple[float, ...] = ()) -> tuple[Trial, ...]:
    hits = [Trial(s, int(100 * s), found=True, properties=("QUIES",), shrunk_ops=2) for s in found]
    return (*hits, *(Trial(seconds, 7) for seconds in given_up))


def row(driver: str, fault: str, *found: float, given_up: tuple[float, ...] = ()) -> Row:
    return Row(fault, driver, 1e7, trials(*found, given_up=given_up))


def by_key(*rows: Row) -> dict[tuple[str, str], Row]:
    return {(row.fault, row.driver): row for row in rows}


def test_a_survival_curve_by_hand() -> None:
    curve = survival(trials(3.0, 1.0, 1.0, given_up=(5.0,)))
    assert curve.steps == ((0.0, 1.0), (1.0, 0.5), (3.0, 0.25))
    assert curve.censored == (5.0,)
    assert survival(trials(given_up=(2.0, 1.0))).steps == ((0.0, 1.0),)


def test_curves_are_over_the_faults_that_all_drivers_have_searched_for() -> None:
    rows = by_key(row(LOOP, EASY, 1.0), row(LOOP, ALSO_EASY, 2.0), row("uniform", EASY, 4.0))
    assert {name: curve.steps[1:] for name, curve in curves(rows).items()} == {
        LOOP: ((1.0, 0.0),),
        "uniform": ((4.0, 0.0),),
    }


@pytest.mark.parametrize(
    ("found", "given_up", "expected"),
    [((1.0, 2.0, 9.0), (), 2.0), ((1.0, 2.0), (5.0,), 2.0), ((1.0,), (5.0, 5.0), inf)],
)
def test_a_search_that_is_given_up_takes_for_ever(
    found: tuple[float, ...], given_up: tuple[float, ...], expected: float
) -> None:
    assert median_seconds(row(LOOP, EASY, *found, given_up=given_up)) == expected


def test_a_speed_up_is_over_the_faults_that_both_find() -> None:
    rows = by_key(
        row(LOOP, "a", 1.0),
        row("uniform", "a", 4.0),
        row(LOOP, "b", 0.5),
        row("uniform", "b", 8.0),
        row(LOOP, "c", 0.1),
        row("uniform", "c", given_up=(9.0,)),
        row(LOOP, "d", given_up=(9.0,)),
        row("uniform", "d", 1.0),
        row(LOOP, "not compared", 1.0),
    )
    faster = speedup(rows, "uniform")
    assert faster.geometric_mean == pytest.approx(8.0)
    assert faster.ratios == {"a": 4.0, "b": 16.0}
    assert (faster.faults, faster.both) == (4, 2)
    assert (faster.loop_only, faster.driver_only) == (("c",), ("d",))
    assert speedup(by_key(row(LOOP, "a", 1.0)), "uniform").geometric_mean is None


def test_figures_of_a_fault_by_hand() -> None:
    fault = fault_by_id(EASY)
    d = detection_of(fault, row(LOOP, EASY, 1.0, 2.0, 3.0, given_up=(60.0,)))
    assert (d.seeds, d.detected, d.by_property, d.median_seconds, d.median_ops) == (4, 3, 3, 2, 200)
    assert d.p90_seconds == pytest.approx(2.8)
    assert (d.shrunk_ops, d.shrunk_ops_max, d.shortest_known_ops) == (2, 2, 2)
    assert complaint(d) == f"{EASY}: found in 3 of 4 searches"
    whole = replace(d, detected=4)
    assert complaint(whole) == ""
    assert "never by property" in complaint(replace(whole, by_property=0))
    assert complaint(replace(whole, shrunk_ops_max=3)) == ""
    assert "has 4 operations" in complaint(replace(whole, shrunk_ops_max=4))


def test_what_was_asked_for_and_what_was_reached() -> None:
    rows = by_key(row(LOOP, EASY, 0.5), row("hypothesis-unlimited", EASY, 15.0))
    detections = [detection_of(fault_by_id(EASY), rows[EASY, LOOP])]
    goals = reached(detections, rows, CleanRun(1000, 0))
    lines = asked_and_reached(goals, replace(CONDITIONS, seeds=3, seconds=90.0))
    assert lines[0][0] == "faults found in every search (3 a fault)"
    assert [(asked, got) for _, asked, got in lines] == [
        ("all 1", "1 of 1"),
        ("at most 60", f"0.5 ({EASY})"),
        ("at most 1.5", f"1 ({EASY})"),
        ("at least 25", "30 (over 1 of 1 faults)"),
        ("0", "0 in 1,000 operations"),
    ]
    assert asked_and_reached(goals, CONDITIONS)[1][1] == "at most 20"


# -- what is written -------------------------------------------------------------------------------

CONDITIONS = measure.conditions("journal", 2, 20.0, 1, 1, 10.0)


def test_a_journal_has_what_was_added_to_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Journal(path, CONDITIONS).add(row(LOOP, EASY, 1.0))
    Journal(path, CONDITIONS).add(CleanRun(10, 0, ("engine",)))
    again = Journal(path, CONDITIONS)
    assert again.rows == by_key(row(LOOP, EASY, 1.0))
    assert again.clean == CleanRun(10, 0, ("engine",))
    assert len(path.read_bytes().splitlines()) == 3


def test_half_a_line_is_what_a_killed_process_leaves(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path, CONDITIONS)
    journal.add(row(LOOP, EASY, 1.0))
    whole = path.read_bytes()
    journal.add(row(LOOP, ALSO_EASY, 2.0))
    for size in range(len(whole), path.stat().st_size):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(path.read_bytes()[:size])
        resumed = Journal(torn, CONDITIONS)
        assert (EASY, LOOP) in resumed.rows
        resumed.add(row("uniform", EASY, 3.0))
        assert {*Journal(torn, CONDITIONS).rows} >= {(EASY, LOOP), (EASY, "uniform")}
    first = tmp_path / "first.jsonl"
    first.write_bytes(whole[:9])
    assert not Journal(first, CONDITIONS).rows


@pytest.mark.parametrize("text", ["a letter", "a letter\n", '{"is":"row"}\n', '[1]\n{"a":2}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "letter.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"letter\.jsonl"):
        Journal(path, CONDITIONS)
    assert path.read_text() == text


def test_other_conditions_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Journal(path, CONDITIONS)
    with pytest.raises(InputError, match=r"other conditions \(seeds: 2 there, 9 now\)"):
        Journal(path, replace(CONDITIONS, seeds=9))


def test_a_picture_of_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = by_key(row(LOOP, EASY, 1.0, 2.0), row("uniform", EASY, 3.0, given_up=(9.0,)))
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        require_plotting(path)
        plot(curves(rows), path)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text().count("<svg") == 1
    plot(curves(rows), tmp_path / "3.png")
    assert (tmp_path / "3.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"ends in \.png or \.svg"):
        require_plotting(tmp_path / "4.pdf")


def test_a_page_says_under_what_conditions(tmp_path: Path) -> None:
    fault = fault_by_id(EASY)
    rows = by_key(row(LOOP, EASY, 0.5), row("uniform", EASY, given_up=(10.0,)))
    detections = [detection_of(fault, rows[EASY, LOOP])]
    goals = reached(detections, rows, CleanRun(1000, 0))
    page, picture = tmp_path / "docs" / "page.md", tmp_path / "pictures" / "curves.svg"
    page.parent.mkdir()
    write_page(page, CONDITIONS, rows, [fault], detections, goals, picture)
    text = page.read_text()
    for part in (
        "--seeds 2 --seconds 20 --shrinks 1 --compare uniform --compare-seeds 1",
        "CPython",
        f"hypothesis {CONDITIONS.versions['hypothesis']}",
        "10.0 million empty Python method calls",
        "1 times for 1 of 1 faults",
        "](../pictures/curves.svg)",
        f"The loop found, and uniform random did not (1): `{EASY}`.",
        f"| `{EASY}` | QUIES | engine | 1/1 |",
        "| –, 0/1 |",
    ):
        assert part in text
    lengths = {line.count("|") for line in text.splitlines() if line.startswith(f"| `{EASY}`")}
    assert lengths == {10}


# -- the commands ----------------------------------------------------------------------------------


def kvproof(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["faults", *arguments])


QUICK = ("--seeds", "1", "--shrinks", "1", "--clean-ops", "500")


def test_detection_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Task] = []
    original = measure.measure
    monkeypatch.setattr(measure, "measure", lambda task: measured.append(task) or original(task))
    out = str(tmp_path / "out.jsonl")
    assert kvproof("detect", EASY, *QUICK, "--out", out).exit_code == 0
    result = kvproof("detect", EASY, ALSO_EASY, *QUICK, "--out", out, "--json")
    assert result.exit_code == 0
    assert [task.fault for task in measured] == [EASY, ALSO_EASY]
    fields = json.loads(result.stdout)
    assert [fault["id"] for fault in fields["faults"]] == [EASY, ALSO_EASY]
    assert kvproof("detect", EASY, *QUICK, "--seed", "other", "--out", out).exit_code != 0
    assert len(measured) == 2


def test_what_is_compared_is_told_as_json(tmp_path: Path) -> None:
    arguments = ("--compare", "uniform", "--compare-seeds", "2", "--compare-seconds", "20")
    page, picture = tmp_path / "page.md", tmp_path / "curves.svg"
    files = ("--page", str(page), "--plot", str(picture), "--workers", "2")
    result = kvproof("detect", EASY, *QUICK, *arguments, *files, "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    compared = fields["compared"]["uniform"]
    assert compared["faults"][0]["seeds"] == 2
    assert compared["speedup"]["both"] == 1
    assert fields["survival"]["loop"]["steps"][-1][1] == 0
    assert fields["conditions"]["compare_seeds"] == 2
    assert fields["goals"][0]["reached"] == "1 of 1"
    assert EASY in page.read_text()
    assert picture.read_text().startswith("<?xml")


def test_comparison_over_a_sample() -> None:
    ids = [fault.id for fault in all_faults() if fault.shortest <= 2 and fault.subject == "engine"]
    (chosen, *_), (left, *_) = (
        [name for name in ids if in_sample(name, 3) == wanted] for wanted in (True, False)
    )
    arguments = ("--compare", "uniform", "--compare-seeds", "1", "--compare-one-in", "3")
    result = kvproof("detect", chosen, left, *QUICK, *arguments, "--json")
    compared = json.loads(result.stdout)["compared"]["uniform"]["faults"]
    assert [fault["id"] for fault in compared] == [chosen]


def test_the_last_lines_say_what_was_asked_for_and_reached() -> None:
    result = kvproof("detect", EASY, *QUICK, "--compare", "hypothesis-unlimited")
    assert result.exit_code == 0
    verdict, first, *lines = result.stdout.strip().splitlines()[-6:]
    assert verdict.startswith("PASS ")
    assert first == "  faults found in every search (1 a fault): 1 of 1; asked for: all 1"
    assert any(
        re.fullmatch(r"  times faster than Hypothesis without .*; asked for: at least 25", line)
        for line in lines
    )
    assert lines[-1].startswith("  violations on unmodified subjects: 0 in ")


def test_a_fault_that_is_not_found_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, LOOP, lambda *arguments: None)
    result = kvproof("detect", EASY, *QUICK)
    assert result.exit_code == 1
    assert f"FAIL {EASY}: found in 0 of 1 searches" in result.stdout
    assert ": 0 of 1; asked for: all 1" in result.stdout


def test_a_subject_that_fails_unmodified_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvproof.fuzz.cli import faults

    monkeypatch.setattr(faults, "run_clean", lambda *a: CleanRun(500, 1, ("engine",)))
    result = kvproof("detect", EASY, *QUICK)
    assert result.exit_code == 1
    assert "FAIL an unmodified subject violates a property" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare", "magic"), "unknown driver 'magic'; there are hypothesis"),
        (("--plot", "curves.pdf"), "a picture ends in .png or .svg"),
        (("--out", "absent/out.jsonl"), "its folder does not exist"),
        (("--property", "NONE"), "no fault breaks 'NONE'"),
        (("--source", "nobody/nothing"), "no fault is all of that"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure", lambda task: pytest.fail("measured"))
    result = kvproof("detect", *arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        ({"properties": ["cons"]}, lambda f: f.property == "CONS"),
        ({"subjects": ["scheduler"]}, lambda f: f.subject.startswith("scheduler:")),
        ({"subjects": ["engine"]}, lambda f: f.subject == "engine"),
        ({"sources": ["B06"]}, lambda f: f.source.startswith("B06,")),
        ({"sources": ["LMCache"]}, lambda f: "LMCache/" in f.source),
        (
            {"properties": ["REF", "PIN"], "sources": ["vllm"]},
            lambda f: f.property in ("REF", "PIN") and "vllm" in f.source,
        ),
    ],
)
def test_filters(filters: dict[str, list[str]], passes: Any) -> None:
    asked = dict.fromkeys(("names", "properties", "subjects", "sources")) | filters
    faults = selected(**asked)
    assert faults == [fault for fault in all_faults() if passes(fault)]
    assert 0 < len(faults) < len(all_faults())


def test_the_list_is_grouped_and_fits_a_terminal() -> None:
    result = kvproof("list")
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    ids = [line.split()[0] for line in lines if line.startswith("  ") and "#" in line]
    assert sorted(ids) == sorted(fault.id for fault in all_faults())
    assert "CONS: no block is lost, invented or counted twice" in lines
    few = kvproof("list", "--property", "CONS", "--subject", "engine").stdout
    assert "counter-drifts" in few
    assert EASY not in few


def test_a_named_fault_is_told_in_full() -> None:
    (one, other) = ("boundary-block-too-early", EASY)
    result = kvproof("list", one, other)
    for name, length in ((one, "1 operation\n"), (other, "2 operations\n")):
        fault = fault_by_id(name)
        assert fault.summary in result.stdout
        assert fault.source in result.stdout
        assert f"shortest known run: {length}" in result.stdout
        assert f"see it found: kvproof check --fault {name}\n" in result.stdout
