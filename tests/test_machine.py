"""The Hypothesis machine: does it find, how small does it shrink, what does it leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

from kvproof.engine.engine import Engine
from kvproof.engine.request import Request
from kvproof.fuzz.bench.machine import bench_machine
from kvproof.fuzz.faults import all_faults, fault_by_id
from kvproof.fuzz.replay import replay
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import FEATURES as SWARM_FEATURES
from kvproof.invariants.case import Case, dump_case, load_case, parse_case
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    AnyOperation,
    Cancel,
    Complete,
    Evict,
    Fail,
    Finish,
    Land,
    Launch,
    Media,
    Offload,
    Preempt,
    Promote,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.export import case_name, log_text, pytest_source, write_finding
from kvproof.stateful_tests.machine import (
    CheckerStumbled,
    PropertyViolated,
    machine_for,
    run_machine,
)
from kvproof.stateful_tests.strategies import (
    FEATURES,
    RECIPES,
    SCHEDULER_FEATURES,
    TIER_FEATURES,
    World,
    follow_up,
    scheduler_world,
    world,
)
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

# -- engines with one mistake each --------------------------------------------------------------


class ForksWithoutReferences(Engine):
    """A fork's blocks are shared, and nobody counts the child in."""

    def _fork_child(self, parent: Request) -> int:
        child = super()._fork_child(parent)
        for pool in self.pools:
            for block in self.requests[child].tables[pool.group]:
                pool.ref_counts[block] -= 1
        return child


class KeepsLastBlock(Engine):
    """A finished request's last block is never given back."""

    def finish(self, request: Request) -> Outcome:
        request.tables = [table[:-1] for table in request.tables]
        return super().finish(request)


class IgnoresAdapters(Engine):
    """Block keys do not separate adapters."""

    def admit(self, prompt: Any, **who: Any) -> Outcome:
        return super().admit(prompt, **{**who, "adapter": 0})


class RaisesOnReset(Engine):
    """A reset of an empty cache is a bug in the subject itself."""

    def reset(self) -> Outcome:
        raise ZeroDivisionError("nothing to reset")


BROKEN: dict[type[Engine], tuple[set[str], int]] = {
    ForksWithoutReferences: ({"REF"}, 6),
    KeepsLastBlock: ({"REF", "CONS", "LIFE", "QUIES"}, 4),
    IgnoresAdapters: ({"KEY", "VALID"}, 6),
    RaisesOnReset: ({"CRASH"}, 1),
}
"""With the properties that it may show as, and how few operations it must shrink to."""


def broken(engine: type[Engine]) -> SubjectFactory:
    return partial(EngineSubject, engine=engine)


class ReportsNonsense(EngineSubject):
    """Reports an event that no checker has heard of."""

    def drain_events(self) -> Sequence[Event]:
        return [*super().drain_events(), Event()]


def failure_of(factory: SubjectFactory, **options: Any) -> PropertyViolated:
    machine = machine_for(factory, "engine", **options)
    machine.TestCase.settings = settings(
        machine.TestCase.settings, max_examples=200, database=None, derandomize=True
    )
    with pytest.raises(PropertyViolated) as caught:
        machine.TestCase("runTest").runTest()
    return caught.value


# -- it finds, shrinks and tells -----------------------------------------------------------------


@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_finds_and_shrinks(
    engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties, length = BROKEN[engine]
    error = failure_of(broken(engine), on_failure=partial(write_finding, folder=tmp_path))
    case, message = error.case, str(error)

    assert error.violation.property in properties
    assert case.violates == error.violation.property
    assert len(case.operations) <= length
    assert message.startswith(f"{error.violation.property} at operation {error.violation.op}: ")
    assert parse_case(message[message.index("{\n") : message.rindex("}") + 1]) == case
    if error.violation.block is not None:
        assert f"\nBlock {error.violation.block}: given to r" in message
    assert len(list(tmp_path.iterdir())) == 3, "only the run that is reported is written"
    assert all(str(path) in message for path in tmp_path.iterdir())
    assert load_case(tmp_path / f"{case_name(case)}.json") == case

    monkeypatch.setattr("kvproof.fuzz.replay.subject_factory", lambda name, **_: broken(engine))
    again = replay(case)
    assert again.verdict == "fail"
    assert error.violation in again.violations
    monkeypatch.undo()
    assert replay(case).verdict == "pass"


CONFTEST = """\
import importlib.util
from kvproof.stateful_tests import subjects

spec = importlib.util.spec_from_file_location("broken_engines", {here!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
subjects.subject_factory = lambda name, **_: module.broken(module.KeepsLastBlock)
"""


def test_exported_test_fails_until_the_defect_is_mended(tmp_path: Path) -> None:
    failure_of(broken(KeepsLastBlock), on_failure=partial(write_finding, folder=tmp_path))
    conftest = tmp_path / "conftest.py"
    conftest.write_text(CONFTEST.format(here=str(Path(__file__).resolve())))
    assert "1 failed" in _pytest(tmp_path)
    conftest.unlink()
    assert "1 passed" in _pytest(tmp_path)


def _pytest(folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_only_rules_that_the_subject_can_do() -> None:
    class Few(EngineSubject):
        capabilities = frozenset({"admit", "finish", "launch", "retire", "teleport"})

    machine = machine_for(Few, "few:subject")
    assert machine.__name__ == "FewSubjectMachine"
    names = {rule.function.__name__ for rule in machine.setup_state().rules}
    assert names == {"admit", "finish", "launch", "retire"}
    assert {r.function.__name__ for r in machine_for(EngineSubject, "e").setup_state().rules} == (
        {*KINDS, *TIER_KINDS}
    )


def test_can_be_driven_by_hand() -> None:
    totals = Totals()
    state: Any = machine_for(EngineSubject, "engine", totals=totals)()
    state.start(blocks=6, block_size=2, run_ahead=1, requests=0, features=0)
    state.admit(prompt=0, identity=0, then=0)
    state.launch(budget=0, then=0)
    state.teardown()
    assert totals.runs == 1
    assert totals.operations["admit"] == {"done": 1, "refused": 0, "skipped": 0}
    assert totals.operations["abort"]["done"] == 1, "the drain ends what still runs"
    assert totals.ops == sum(sum(counts.values()) for counts in totals.operations.values())


def test_says_so_when_a_replay_does_not_fail() -> None:
    moods = [RaisesOnReset, Engine]

    class Moody(Engine):
        def reset(self) -> Outcome:
            return moods.pop(0).reset(self)

    state: Any = machine_for(broken(Moody), "engine")()
    state.start(blocks=6, block_size=2, run_ahead=1, requests=0, features=0)
    with pytest.raises(PropertyViolated, match="may not be deterministic") as caught:
        state.reset(running=0, then=0)
    state.teardown()
    assert caught.value.case.operations == [Reset()]


def test_a_stumbling_checker_is_not_a_violation() -> None:
    machine = machine_for(ReportsNonsense, "engine")
    machine.TestCase.settings = settings(machine.TestCase.settings, database=None)
    with pytest.raises(CheckerStumbled, match="the verdict is unknown: at operation 0") as caught:
        machine.TestCase("runTest").runTest()
    assert len(caught.value.case.operations) == 1
    with pytest.raises(CheckerStumbled):
        run_machine(ReportsNonsense, "engine", seconds=20, seed=0)


# -- what `kvproof check` runs -------------------------------------------------------------------


def test_run_machine_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    totals = Totals()
    started = time.monotonic()
    assert run_machine(EngineSubject, "engine", seconds=2, seed=1, totals=totals) is None
    assert time.monotonic() - started >= 2
    assert totals.runs > 1
    assert not list(tmp_path.iterdir()), "it leaves nothing where the user stands"


def test_run_machine_leaves_the_users_home_of_hypothesis(tmp_path: Path) -> None:
    set_hypothesis_home_dir(tmp_path)
    try:
        run_machine(EngineSubject, "engine", seconds=0.1, seed=1, totals=Totals())
        assert storage_directory().path == tmp_path
    finally:
        set_hypothesis_home_dir(None)


def test_run_machine_reaches_every_operation() -> None:
    totals = Totals()

    def reached() -> bool:
        done = totals.operations
        return bool(done) and all(done[kind]["done"] for kind in (*KINDS, *TIER_KINDS))

    run_machine(EngineSubject, "engine", seconds=120, seed=1, totals=totals, stop=reached)
    assert reached()
    assert totals.goals["hit-in-use"]
    assert totals.checked["PROV"]


def test_run_machine_stops_when_told() -> None:
    totals = Totals()
    assert (
        run_machine(
            EngineSubject,
            "engine",
            seconds=60,
            seed=1,
            totals=totals,
            stop=lambda: totals.runs >= 5,
        )
        is None
    )
    assert totals.runs == 5


def test_run_machine_draws_the_same_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = broken(IgnoresAdapters)
    cases = [run_machine(factory, "engine", seconds=60, seed=seed) for seed in (3, 3, 4)]
    assert cases[0] is not None
    assert cases[0] == cases[1]
    assert cases[0] != cases[2]
    assert cases[0].seed == "machine 3/0"

    monkeypatch.setattr("kvproof.fuzz.replay.subject_factory", lambda name, **_: factory)
    monkeypatch.setattr("kvproof.fuzz.shrink.subject_factory", lambda name, **_: factory)
    assert replay(cases[0]).verdict == "fail"
    shrunk = shrink(cases[0], replays_max=1000)
    assert shrunk is not None
    assert len(shrunk.case.operations) <= 6


def test_run_machine_goes_on_epoch_after_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproof.stateful_tests.machine.EXAMPLES_PER_EPOCH", 4)
    totals = Totals()
    run_machine(
        EngineSubject, "engine", seconds=60, seed=0, totals=totals, stop=lambda: totals.runs > 9
    )
    assert totals.runs == 10


# -- decoding ------------------------------------------------------------------------------------


EVERY = (1 << len(FEATURES)) - 1
ALL_TIERS = (1 << len(TIER_FEATURES)) - 1


def worlds() -> list[World]:
    return [
        world(6, 1, 1, 0, 0),
        world(7, 3, 2, 1, EVERY),
        world(33, 16, 3, 3, EVERY, ALL_TIERS),
        world(6, 1, 1, 0, 0, 1),
    ]


def test_every_number_decodes_to_a_valid_operation() -> None:
    numbers = range(128)
    for here in worlds():
        operations = [RECIPES["admit"].build(here, p, i) for p in numbers for i in numbers]
        operations += [RECIPES["grow"].build(here, r, g) for r in range(8) for g in range(16)]
        operations += [RECIPES["decode"].build(here, f, m) for f in range(4) for m in range(8)]
        operations += [RECIPES["reserve"].build(here, r, s) for r in range(8) for s in range(16)]
        operations += [RECIPES["preempt"].build(here, 0, swap) for swap in range(4)]
        operations += [RECIPES["resume"].build(here, r, s) for r in range(8) for s in range(8)]
        operations += [RECIPES["launch"].build(here, budget) for budget in range(32)]
        operations += [RECIPES["evict"].build(here, b, t) for b in range(4) for t in range(3)]
        operations += [RECIPES["offload"].build(here, t, w) for t in range(2) for w in range(8)]
        operations += [RECIPES["promote"].build(here, n, n, n & 3) for n in numbers]
        operations += [RECIPES["land"].build(here, t, more) for t in range(4) for more in range(2)]
        operations += [RECIPES["fail"].build(here, t, c) for t in range(4) for c in range(4)]
        operations += [RECIPES["withhold"].build(here, t, b) for t in range(3) for b in range(4)]
        operations += [RECIPES["corrupt"].build(here, b, n) for b in range(4) for n in numbers]
        operations += [RECIPES["restart"].build(here, t, s) for t in range(4) for s in range(5)]
        operations += [RECIPES["slow"].build(here, slow) for slow in range(2)]
        operations += [RECIPES["reset"].build(here, running) for running in range(3)]
        operations += [RECIPES["wait"].build(here, time) for time in range(8)]
        operations += [
            RECIPES[kind].build(here, transfer)
            for kind in ("complete", "cancel", "notify")
            for transfer in range(4)
        ]
        operations += [operation for n in numbers for operation in follow_up(here, n)]
        case = Case("engine", here.configuration, operations, here.features)
        assert parse_case(dump_case(case)) == case


def test_zero_is_the_simplest() -> None:
    for here in worlds():
        size = here.configuration.block_size
        assert RECIPES["admit"].build(here, 0, 0) == Admit((Segment(0, size),))
        assert RECIPES["preempt"].build(here, 0, 0) == Preempt(0)
        assert RECIPES["promote"].build(here, 0, 0, 0) == Promote((Segment(0, size),))
        assert RECIPES["offload"].build(here, 0, 0) == Offload()
        assert RECIPES["evict"].build(here, 0, 0) == Evict()
        assert follow_up(here, 0) == ()


def test_lengths_lie_around_the_edges_of_blocks() -> None:
    here = world(33, 8, 2, 0, 0)
    admissions: list[Any] = [RECIPES["admit"].build(here, p, 0) for p in range(128)]
    lengths = {admission.prompt[0].length for admission in admissions}
    assert lengths == {k * 8 + edge for k in range(1, 9) for edge in (-1, 0, 1)}


def test_what_a_subject_is_not_capable_of_is_not_drawn() -> None:
    for able in (frozenset[str](), frozenset(("slots",)), frozenset(("swaps",))):
        here = world(7, 3, 2, 1, EVERY, ALL_TIERS, able)
        assert {"slots", "swaps", *TIER_FEATURES} & {*here.features} == able
        assert (here.configuration.host_blocks > 0) == ("swaps" in able)
        admitted: list[Any] = [RECIPES["admit"].build(here, 0, i) for i in range(128)]
        resumed: list[Any] = [RECIPES["resume"].build(here, 0, s) for s in range(8)]
        evicted: list[Any] = [RECIPES["evict"].build(here, 0, tier) for tier in range(3)]
        launched: list[Any] = [RECIPES["launch"].build(here, budget) for budget in range(32)]
        preempted: list[Any] = [RECIPES["preempt"].build(here, 0, s) for s in range(4)]
        assert any(o.slots for o in resumed) == any(o.items for o in launched) == ("slots" in able)
        assert not any(o.slots for o in admitted), "there are media instead"
        assert any(o.swap for o in preempted) == ("swaps" in able)
        assert not any(o.wait for o in admitted)
        assert not any(o.late for o in preempted + resumed)
        assert {o.tier for o in evicted} == {"device"}


def test_tiers_are_drawn_with_what_belongs_to_them() -> None:
    bits = [1 << number for number in range(len(TIER_FEATURES))]
    plain, disk, arc, late, waits, io_faults = [world(9, 4, 2, 0, 0, bits[0] | b) for b in bits]
    assert plain.features == ("tiers",)
    assert plain.configuration.offload == "prefix"
    assert plain.configuration.host_blocks == 3
    assert [here.configuration.disk_blocks for here in (plain, disk)] == [0, 2]
    assert [here.configuration.device_eviction for here in (plain, arc)] == ["lru", "arc"]
    assert not any(world(9, 4, 2, 0, 0, bit).features for bit in bits[1:])
    swapping = world(9, 4, 2, 0, 1 << FEATURES.index("swaps"), bits[0] | bits[3])
    assert swapping.configuration.offload == "both"
    assert RECIPES["preempt"].build(swapping, 0, 3) == Preempt(0, swap=True, late=True)
    assert RECIPES["preempt"].build(late, 0, 3) == Preempt(0), "nobody is swapped out here"
    assert RECIPES["admit"].build(waits, 0, 12).wait
    assert RECIPES["restart"].needs - {*io_faults.features} == {"disk"}


def test_a_scheduler_has_tiers_where_its_cache_can() -> None:
    assert scheduler_world(9, 4, 1, 0, 0, 3).configuration.disk_blocks
    assert scheduler_world(9, 4, 1, 0, 0, 3, frozenset()).configuration == Configuration(
        blocks=9, block_size=4, run_ahead=1
    )


def test_requests_arrive_under_salts_and_adapters_where_they_are_on() -> None:
    salted = 1 << SCHEDULER_FEATURES.index("salt")
    for here, drawn in ((0, {(0, 0)}), (salted, {(0, 0), (0, 1), (1, 0), (1, 1)})):
        built: list[Any] = [
            RECIPES["arrive"].build(scheduler_world(9, 4, 1, 0, here), 0, 0, identity)
            for identity in range(4)
        ]
        assert {(arrival.salt, arrival.adapter) for arrival in built} == drawn


def test_a_scheduler_whose_keys_forget_the_adapter_is_found() -> None:
    name, totals = "scheduler:fcfs", Totals()
    with fault_by_id("adapter-not-in-key").installed():
        case = run_machine(subject_factory(name), name, seconds=60, seed=1, totals=totals)
    assert case is not None
    assert case.violates in ("KEY", "VALID", "FIT"), "FIT: too few blocks are said to be wanted"


def test_only_a_scheduler_preempts_those_that_run_for_a_reset() -> None:
    cache, scheduler = world(9, 4, 2, 0, 0), scheduler_world(9, 4, 2, 0, 0)
    for here, drawn in ((cache, {Reset()}), (scheduler, {Reset(), Reset(running=True)})):
        assert {RECIPES["reset"].build(here, running) for running in range(3)} == drawn
        assert RECIPES["reset"].build(here, 0) == Reset()


def test_an_admission_may_have_slots_of_its_own_where_there_are_no_media() -> None:
    slots = 1 << FEATURES.index("slots")
    here = world(8, 4, 2, 0, slots)
    admitted: list[Any] = [RECIPES["admit"].build(here, 0, i) for i in range(128)]
    assert {operation.slots for operation in admitted} == {0, 4, 5, 16}


def test_features_are_those_of_the_seeded_generator() -> None:
    assert {*FEATURES, *TIER_FEATURES} == set(SWARM_FEATURES)


# -- what a finding leaves behind ----------------------------------------------------------------

CASE = Case(
    "engine",
    Configuration(blocks=6),
    [Admit((Segment(0, 8), Segment(10, 1)), media=(Media(1, 0, 4),)), Finish(0), Abort(0)],
    features=("media",),
    violates="REF",
)
VIOLATION = Violation("REF", 'a "quoted\\" block', op=1)


def test_the_same_finding_has_the_same_files(tmp_path: Path) -> None:
    paths = write_finding(CASE, VIOLATION, "why", tmp_path / "new")
    name = case_name(CASE)
    assert [path.name for path in paths] == [f"{name}.json", f"test_{name}.py", f"{name}.txt"]
    assert name.startswith("ref_")
    before = {path: path.read_text() for path in paths}
    assert write_finding(CASE, VIOLATION, "why", tmp_path / "new") == paths
    assert {path: path.read_text() for path in (tmp_path / "new").iterdir()} == before


def test_another_finding_is_never_overwritten(tmp_path: Path) -> None:
    taken = tmp_path / f"{case_name(CASE)}.json"
    taken.write_text("another case whose digest starts alike")
    paths = write_finding(CASE, VIOLATION, "why", tmp_path)
    assert taken.read_text() == "another case whose digest starts alike"
    assert load_case(paths[0]) == CASE
    assert case_name(CASE) in paths[1].name


def test_exported_source_is_the_case() -> None:
    names: dict[str, Any] = {}
    source = pytest_source(CASE, f'{VIOLATION.message}\nends with a quote"')
    exec(source, names)
    assert names["CASE"].operations == CASE.operations
    assert names["CASE"].configuration == CASE.configuration
    assert VIOLATION.message in names["__doc__"]
    assert "import pytest" not in source
    names[f"test_{case_name(CASE)}"]()


def test_exported_source_installs_the_seeded_fault() -> None:
    fault = all_faults()[0]
    case = Case("engine", Configuration(), [Reset()], fault=fault.id)
    names: dict[str, Any] = {}
    exec(pytest_source(case), names)
    original = fault.target.__dict__[fault.method]
    names[f"test_{case_name(case)}"]()
    assert fault.target.__dict__[fault.method] is original


def test_log_has_a_line_for_each_operation() -> None:
    moments = replay(CASE, record=True).moments
    lines = log_text(CASE, "why it failed", moments).splitlines()
    assert lines[0] == "why it failed"
    assert lines[-3].lstrip().startswith("0  Admit(prompt=(Segment(source=0, length=8)")
    assert lines[-3].endswith("+b1,b2,b3 r0[0]")
    assert lines[-2].split()[:4] == ["1", "Finish(request=0)", "done", "r0"]
    assert lines[-1].split() == ["2", "Abort(request=0)", "skipped"]


def test_log_tells_where_swapped_blocks_are() -> None:
    swap = Preempt(0, swap=True)
    run: list[AnyOperation] = [Admit((Segment(0, 5),)), Launch(), Retire()]
    case = Case("engine", Configuration(host_blocks=2), [*run, swap, Resume(0), swap, Abort(0)])
    text = log_text(case, "", replay(case, record=True).moments)
    assert [line.rpartition("  ")[2] for line in text.splitlines()[-4:]] == [
        "t0: b1,b2>h0,h1 r0; -b2,b1 r0; t0 completed",
        "+b2,b3 r0[0]; t1: h0,h1>b2,b3 r0; t1 completed",
        "t2: b2,b3>h0,h1 r0; -b3,b2 r0; t2 completed",
        "-h0,h1 r0",
    ]


def test_log_tells_what_becomes_of_transfers() -> None:
    run: list[AnyOperation] = [Admit((Segment(0, 5),)), Launch(), Retire(), Offload()]
    run += [Land(), Fail(cause="timeout"), Offload(), Cancel(), Complete()]
    case = Case("engine", Configuration(host_blocks=2, offload="prefix"), run)
    text = log_text(case, "", replay(case, record=True).moments)
    assert [line.rpartition("  ")[2] for line in text.splitlines()[-6:]] == [
        "t0: b1>h0",
        "t0: 1 landed",
        "t0 failed (timeout)",
        "t1: b1>h0",
        "t1 not wanted any more",
        "t1 cancelled",
    ]


# -- speed ---------------------------------------------------------------------------------------


def test_bench_reports_both_machines() -> None:
    result = bench_machine(1, examples=3)
    assert set(result.ratios) == {"machine_over_idle"}
    assert [m.ops for m in result.results] == [result.results[0].ops] * 2
