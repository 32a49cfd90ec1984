"""The runs of a campaign: which there are, what is kept of them, what failing ones become."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvproof.engine.eviction import LeastRecentlyUsed
from kvproof.fuzz.campaigns import guarded
from kvproof.fuzz.campaigns.guarded import Replayer, judge_here
from kvproof.fuzz.campaigns.known import KnownIssue, Ledger, entry_of, mended, needs_of
from kvproof.fuzz.campaigns.lots import Lot, Site
from kvproof.fuzz.campaigns.novelty import Watch, state_code, state_words, transition_code
from kvproof.fuzz.campaigns.records import HANG, Campaign, FindingRecord, Progress, Target
from kvproof.fuzz.campaigns.shard import Shard, ShardJob, run_job
from kvproof.fuzz.campaigns.store import Store, as_text
from kvproof.fuzz.campaigns.subject_lot import SubjectLot
from kvproof.fuzz.campaigns.targets import FAMILIES, chosen_targets, draw_for, shard_of
from kvproof.fuzz.campaigns.triage import Triage, finding_id
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import DETERMINISM, Found, abilities, found, run_once, run_twice
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case, load_case, save_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import (
    Admit,
    Arrive,
    Fork,
    Grow,
    Launch,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.subjects.eviction import EvictionPolicySubject
from kvproof.stateful_tests.totals import Totals

CACHE = Target("cache", "engine", tiers_share=0.0)
FAULT = "finish-forgets-its-table"
FAILING = (4, 8, 12, 21)
"""Numbers of runs that fail with it, of the same property; the last does not."""


def campaign(*targets: Target, shards: int = 1, fault: str | None = None) -> Campaign:
    return Campaign("seed", targets or (CACHE,), shards, fault)


def lot_of(
    folder: Path,
    of: Campaign,
    shard: int = 0,
    lines: tuple[Progress, ...] = (),
    passed_over: frozenset[str] = frozenset(),
    say: Callable[[str], None] = lambda seed: None,
) -> SubjectLot:
    """The lot of the campaign's first target."""
    store = Store(folder)
    store.begin(of)
    triage = Triage(store, Ledger(), shard)
    site = Site(store, of, shard, triage, passed_over, lambda: 1.0, say)
    return SubjectLot(site, of.targets[0], lines)


def made(lot: Lot, runs: int) -> Progress:
    """What the lot says of so many runs; ``work`` asks after each whether to stop."""
    return lot.work(end=float("inf"), stop=lambda: lot.progress.drawn >= runs)


def replayed(lot: Lot) -> Lot:
    """The lot, once it has run again all that was kept before."""
    lot.open()
    lot.replay_kept(float("inf"), lambda: False)
    return lot


def counted(progress: Progress) -> dict[str, Any]:
    """What does not depend on the time that it took."""
    fields: dict[str, Any] = json.loads(as_text(progress))
    for name in ("at", "cpu_seconds"):
        del fields[name]
    del fields["totals"]["seconds"]
    return fields


# -- which runs there are --------------------------------------------------------------------------

_PRINTED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_fuzz_lots import campaign, counted, lot_of, made
seeds = []
lot = lot_of(Path(sys.argv[1]), campaign(shards=3), shard=1, say=seeds.append)
print(counted(made(lot, 8)), seeds)
"""


def test_a_shard_makes_the_same_runs_in_another_process(tmp_path: Path) -> None:
    told = []
    for hash_seed in ("1", "2"):
        source = _PRINTED.format(tests=str(Path(__file__).parent))
        result = subprocess.run(
            [sys.executable, "-c", source, str(tmp_path / hash_seed)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=False,
        )
        assert result.returncode == 0, result.stderr
        told.append(result.stdout)
    assert told[0] == told[1]
    assert str([f"seed/cache/{number}" for number in range(1, 24, 3)]) in told[0]


def test_shards_share_the_runs_and_add_up(tmp_path: Path) -> None:
    whole = counted(made(lot_of(tmp_path / "one", campaign()), 20))
    halves = [
        counted(made(lot_of(tmp_path / f"half{n}", campaign(shards=2), shard=n), 10))
        for n in (0, 1)
    ]
    assert whole["drawn"] == whole["totals"]["runs"] == 20
    for part in ("operations", "goals", "checked"):
        assert added(*[half["totals"][part] for half in halves]) == whole["totals"][part]
    assert added(*[half["transitions"] for half in halves]) == whole["transitions"]
    for name in ("drawn", "done_twice"):
        assert sum(half[name] for half in halves) == whole[name]
    assert halves[0]["totals"]["ops"] != halves[1]["totals"]["ops"]


def added(*parts: dict[str, Any]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                total[name] = added(total.get(name, {}), value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def test_a_shard_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    first, second, whole = [], [], []
    lines = made(lot_of(tmp_path / "a", campaign(shards=2), say=first.append), 5)
    made(lot_of(tmp_path / "b", campaign(shards=2), lines=(lines,), say=second.append), 5)
    made(lot_of(tmp_path / "c", campaign(shards=2), say=whole.append), 10)
    assert [*first, *second] == whole
    assert len(set(whole)) == 10


def test_a_run_that_was_passed_over_is_not_tried_again(tmp_path: Path) -> None:
    seeds: list[str] = []
    lot = lot_of(tmp_path, campaign(), passed_over=frozenset({"seed/cache/1"}), say=seeds.append)
    progress = made(lot, 3)
    assert seeds == ["seed/cache/0", "seed/cache/2"]
    assert (progress.drawn, progress.totals.runs) == (3, 2)


def test_targets_have_cpu_time_in_proportion_to_their_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices: list[str] = []

    def work(lot: Lot, end: float, stop: Callable[[], bool]) -> Progress:
        slices.append(lot.target.name)
        lot.charged_seconds += 1.0
        return Progress(lot.target.name, 0.0, 1.0, Totals())

    monkeypatch.setattr(SubjectLot, "work", work)
    targets = (Target("small", "engine", 1.0), Target("large", "engine", 3.0))
    store = Store(tmp_path)
    store.begin(campaign(*targets))
    shard = Shard(store, campaign(*targets), 0, Triage(store, Ledger(), 0))
    shard.run(60.0, stop=lambda: len(slices) >= 40)
    shard.close()
    assert (slices.count("small"), slices.count("large")) == (10, 30)


def test_every_default_target_can_be_driven() -> None:
    for target in chosen_targets([name for name in FAMILIES if name != "kernels"]):
        factory = subject_factory(target.subject)
        totals = Totals()
        for number in range(2):
            draw = draw_for(target, f"seed/{number}", abilities(factory))
            assert run_twice(factory, draw, totals) is None
        assert totals.ops > 0


def test_tiers_are_where_they_belong() -> None:
    able = abilities(EngineSubject)
    targets = {target.name: target for target in chosen_targets(["cache", "tiers"])}
    for number in range(20):
        cache, tiers = (draw_for(targets[n], f"s/{number}", able) for n in ("cache", "tiers"))
        assert "tiers" in tiers.features
        assert "tiers" not in cache.features


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"families": ["caches"]}, "unknown target 'caches'"),
        ({"subjects": ["nowhere"]}, "unknown subject 'nowhere'"),
        ({"policies": ["nobody"]}, "unknown policy 'nobody'"),
        ({"fault": "no-such"}, "no-such"),
    ],
)
def test_what_cannot_be_driven_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen_targets(**chosen)


# -- what is new -----------------------------------------------------------------------------------

FORKED = [Admit((Segment(0, 4),)), Launch(), Retire(), Fork(0), Grow(0), Launch(), Retire()]


def watched(watch: Watch, operations: list[Any]) -> int:
    harness = harness_for(EngineSubject(Configuration(blocks=8, block_size=2)))
    watch.perform(harness, operations)
    return watch.novel_until


def test_a_run_is_new_once_and_until_its_last_new_operation() -> None:
    watch = Watch()
    assert watched(watch, FORKED) == len(FORKED)
    assert watched(watch, FORKED) == 0
    # An operation that nothing was like before, and one that is skipped.
    assert watched(watch, [*FORKED[:3], Grow(0), Retire()]) == 4
    assert watched(watch, FORKED[:3]) == 0


def test_transitions_are_counted_by_operation_state_and_outcome() -> None:
    watch = Watch()
    watched(watch, [*FORKED[:3], Retire()])  # there is no other step
    assert watch.taken() == {
        "admit | 0 | 1 | done": 1,
        "launch | 1 | 1s | done": 1,
        "retire | 1s | 1 | done": 1,
    }
    assert watch.taken() == {}


def test_states_have_distinct_codes_and_words() -> None:
    codes = {state_code(state) for state in range(96)}
    assert len(codes) == len({state_words(code) for code in codes}) == 96
    assert state_code(1 + 3 + 12) == "1wf"
    assert state_words("1wf") == "1 running, waiting, full"
    assert transition_code((Grow, 0, 95, "refused")) == "grow | 0 | 2wsfct | refused"


def test_watching_finds_what_running_finds() -> None:
    """A watched run ends at the same violation as one that is not."""
    able, seen = abilities(EngineSubject), 0
    with fault_by_id(FAULT).installed():
        for number in FAILING:
            draw = draw_for(CACHE, f"w/{number}", able)
            plain = run_once(EngineSubject, draw, Totals())
            assert run_once(EngineSubject, draw, Totals(), Watch().perform) == plain
            seen += plain is not None
    assert seen == len(FAILING) - 1


def test_the_corpus_keeps_what_is_new_and_replays_to_it(tmp_path: Path) -> None:
    lot = lot_of(tmp_path, campaign())
    progress = made(lot, 30)
    kept = Store(tmp_path).kept("cache")
    assert 5 < progress.novel == len(kept) < 20
    assert [len(case.operations) for _, case in kept] == sorted(
        len(case.operations) for _, case in kept
    )
    again = lot_of(tmp_path, campaign(), say=(seeds := []).append)
    progress = made(again, 30)
    assert len(seeds) == len(kept) + 30  # the corpus first, which is no run of its own
    assert progress.totals.runs == 30
    assert progress.novel == 0


def test_a_corpus_is_replayed_beside_new_runs_and_each_shard_its_own(tmp_path: Path) -> None:
    """No case of it takes more than a part of a slice, and none of it the target's speed."""
    for shard in (0, 1):
        made(lot_of(tmp_path, campaign(shards=2), shard=shard), 30)
    own = {
        case.seed
        for _, case in Store(tmp_path).kept("cache")
        if shard_of(campaign(shards=2), CACHE, case.seed) == 1
    }
    lot = lot_of(tmp_path, campaign(shards=2), shard=1, say=(seeds := []).append)
    slices = []
    while len(slices) < 2 or lot._corpus.pending:  # one case a slice, as there is no time
        slices.append(lot.work(end=0.0, stop=lambda: False))
    assert [progress.replayed for progress in slices] == [1] * len(own)
    assert [progress.totals.runs for progress in slices] == [1] * len(own)
    assert {*seeds[::2]} == own
    assert sum(progress.cpu_seconds for progress in slices) < 0.9 * lot.charged_seconds
    assert sum(progress.novel for progress in slices[:-1]) == 0  # nobody knows yet what is new


def test_a_run_of_another_campaign_in_the_corpus_is_the_first_shards() -> None:
    of = campaign(shards=3)
    seeds = ("seed/cache/7", "seed/cache/8", "other/cache/7", "seed/cache/x", "")
    assert [shard_of(of, CACHE, seed) for seed in seeds] == [1, 2, 0, 0, 0]


def test_a_corpus_that_fails_now_is_a_finding(tmp_path: Path) -> None:
    made(lot_of(tmp_path, campaign()), 12)
    with fault_by_id(FAULT).installed():
        lot = lot_of(tmp_path, campaign(), passed_over=frozenset({"seed/cache/0"}))
        replayed(lot)
    assert [finding.property for finding in Store(tmp_path).found()] == ["QUIES"]


def test_what_the_corpus_cannot_be_judged_by_now_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subject that cannot be made for a kept world any more: no finding, and no pass."""
    made(lot_of(tmp_path, campaign()), 12)
    kept = Store(tmp_path).kept("cache")
    lot = lot_of(tmp_path, campaign())

    def unmade(configuration: Configuration) -> EngineSubject:
        raise SystemExit("no device")

    monkeypatch.setattr(lot, "_factory", unmade)
    problems = replayed(lot).progress.totals.problems
    assert problems == [f"run {case.seed}: SystemExit: no device" for _, case in kept]


# -- what fails ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing() -> list[Found]:
    """Failing runs with one cause."""
    factory, cases = EngineSubject, []
    with fault_by_id(FAULT).installed():
        for number in FAILING:
            draw = draw_for(CACHE, f"w/{number}", abilities(factory))
            failure = run_once(factory, draw, Totals())
            if failure is not None:
                cases.append(found("engine", draw, failure, FAULT))
    assert len(cases) >= 3
    return cases


def triage_in(folder: Path) -> tuple[Store, Triage]:
    store = Store(folder)
    store.begin(campaign(fault=FAULT))
    return store, Triage(store, Ledger(), 0)


def test_a_failing_run_becomes_a_finding_with_all_that_one_needs(
    tmp_path: Path, failing: list[Found]
) -> None:
    store, triage = triage_in(tmp_path)
    finding = triage.report("cache", failing[0], 1.5)
    assert [*store.found()] == [finding]
    assert not list(store.raw.iterdir())
    folder = store.findings / finding.id
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["case.json", "finding.json", "log.txt", f"test_{finding.id}.py"]
    )
    case = load_case(folder / "case.json")
    assert finding.operations == len(case.operations) <= 3 < finding.found_operations
    assert replay(case).violations[0].property == finding.property == "QUIES"
    assert finding.kinds == tuple(sorted({type(o).__name__.lower() for o in case.operations}))
    assert "legend" not in finding.explanation
    assert "r3: request 3" in (folder / "log.txt").read_text()
    assert finding.explanation.splitlines()[0] in (folder / "log.txt").read_text()


def test_the_raw_run_is_written_before_it_is_shrunk(
    tmp_path: Path, failing: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it shrinks has not lost it; the next one settles it."""
    store, triage = triage_in(tmp_path)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(triage, "settle", killed)
        with pytest.raises(KeyboardInterrupt):
            triage.report("cache", failing[0], 1.5)
    ((path, case),) = store.raw_cases()
    assert case == failing[0].case
    path.unlink()
    store.keep_raw(Case(**{**fields_of(case), "seed": "seed/cache/4"}))  # one of this campaign's
    lot = lot_of(tmp_path, campaign(fault=FAULT))
    with fault_by_id(FAULT).installed():
        lot.settle_left_over()
    assert not list(store.raw_cases())
    assert [finding.property for finding in store.found()] == ["QUIES"]


def fields_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__struct_fields__}


def test_what_is_left_over_is_settled_by_the_shard_that_it_is_of(
    tmp_path: Path, failing: list[Found]
) -> None:
    of = campaign(shards=2, fault=FAULT)
    lots = [lot_of(tmp_path, of, shard=n) for n in (0, 1)]
    store = Store(tmp_path)
    store.keep_raw(Case(**{**fields_of(failing[0].case), "seed": "seed/cache/7"}))
    lots[0].settle_left_over()
    assert len(list(store.raw_cases())) == 1
    lots[1].settle_left_over()
    assert not list(store.raw_cases())


def test_failing_runs_that_look_alike_are_shrunk_ever_more_rarely(
    tmp_path: Path, failing: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, triage = triage_in(tmp_path)
    settled: list[Found] = []
    as_found = partial(triage.settle, replays=False)

    def counting(target: str, failing: Found, at: float) -> FindingRecord:
        settled.append(failing)
        return as_found(target, failing, at)

    monkeypatch.setattr(triage, "settle", counting)
    ids = {triage.report("cache", failing[0], 0.0).id for _ in range(9)}
    assert len(settled) == 4  # the 1st, 2nd, 4th and 8th
    assert ids == {finding.id for finding in store.found()}
    other = Violation("CONS", "another", op=0)
    triage.report("cache", Found(failing[0].case, other), 0.0)
    assert len(settled) == 5


def test_two_shards_that_find_the_same_write_it_once(tmp_path: Path, failing: list[Found]) -> None:
    store, triage = triage_in(tmp_path)
    first = triage.settle("cache", failing[0], 1.0)
    other = Triage(store, Ledger(), 1).settle("cache", failing[0], 2.0)
    assert first.id == other.id
    (finding,) = store.found()
    assert finding == first  # the first stays, and nothing lies beside it
    assert [p.name for p in store.findings.iterdir()] == [first.id]


def test_findings_are_told_apart_by_property_kinds_features_and_owner() -> None:
    def id_of(subject: str, property: str, *key: Any, message: str = "…") -> str:
        violation = Violation(property, message)
        return finding_id(Case(subject, Configuration(), []), violation, *key)

    base = ("engine", "REF", ("admit", "fork"), ("salt",))
    assert id_of(*base) == id_of("engine", "REF", ("fork", "admit"), ("salt",))
    assert id_of(*base) == id_of("eviction:lru", *base[1:])
    different = [
        id_of(*base),
        id_of("engine", "CONS", *base[2:]),
        id_of("engine", "REF", ("admit",), base[3]),
        id_of(*base[:3], ()),
        id_of("mine:Subject", *base[1:]),
        id_of("scheduler:fcfs", *base[1:]),
        id_of("engine", "CRASH", *base[2:], message="admit raised KeyError: 7 (x.py:7, in f)"),
        id_of("engine", "CRASH", *base[2:], message="admit raised IndexError: 7 (x.py:7, in f)"),
    ]
    assert len(set(different)) == len(different)
    assert id_of("scheduler:fcfs", *base[1:]) == id_of("scheduler:orca", *base[1:])


def test_iterations_in_one_operation_or_in_several_are_one_cause() -> None:
    """Else a known issue would come back as a new one."""
    arrive = Arrive((Segment(0, 2),))
    needs = [
        needs_of(Case("mine:S", Configuration(), [arrive, own])) for own in (Run(3), Schedule())
    ]
    assert needs == [(("arrive", "schedule"), ())] * 2


def test_time_goes_elsewhere_once_something_is_found(tmp_path: Path) -> None:
    """Of the runs that have all that the finding needs, most are passed over; of others none."""
    of = campaign(fault=FAULT)
    with fault_by_id(FAULT).installed():
        seeds: list[str] = []
        lot = lot_of(tmp_path, of, say=seeds.append)
        progress = made(lot, 40)
    findings, able = Store(tmp_path).found(), abilities(EngineSubject)
    draws = {f"seed/cache/{n}": draw_for(CACHE, f"seed/cache/{n}", able) for n in range(40)}
    needs = {
        seed
        for seed, draw in draws.items()
        for finding in findings
        if {*finding.kinds} <= {type(o).__name__.lower() for o in draw.operations}
    }
    found_at = max(int(finding.seed.rpartition("/")[2]) for finding in findings)
    later = [seed for seed in draws if int(seed.rpartition("/")[2]) > found_at]
    suspects = [seed for seed in later if seed in needs]
    assert len(suspects) > 8
    assert 0 < len([seed for seed in suspects if seed in seeds]) < len(suspects) / 2
    assert {seed for seed in later if seed not in needs} <= {*seeds}
    assert progress.drawn == 40 > progress.totals.runs
    assert sum(progress.failures.values()) >= 1
    assert lot.charged_seconds > progress.cpu_seconds


def test_a_subject_that_does_one_thing_now_and_another_then_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot = lot_of(tmp_path, campaign())
    orders = cycle((LeastRecentlyUsed, MostRecentlyUsed))
    monkeypatch.setattr(
        lot, "_factory", lambda world: EvictionPolicySubject(world, eviction=next(orders))
    )
    assert made(lot, 80).done_twice > 0
    (finding,) = Store(tmp_path).found()
    assert finding.property == DETERMINISM
    assert "gave different results" in finding.message
    assert finding.kinds == ()  # nothing was shrunk


def test_a_difference_that_a_killed_process_left_behind_is_told_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done twice again; what shows nothing then is told as well."""
    draw = next(
        draw
        for number in range(40)
        for draw in [draw_for(CACHE, f"seed/cache/{number}", abilities(EngineSubject))]
        if "gave different" in told_of_twice(draw, LeastRecentlyUsed, MostRecentlyUsed)
    )
    case = found("engine", draw, (draw.operations, Violation(DETERMINISM, "")), None).case
    for number, (other, words) in enumerate(
        ((MostRecentlyUsed, "gave different results at the last one, "), (None, "not when it was"))
    ):
        lot = lot_of(tmp_path / str(number), campaign())
        lot.site.store.keep_raw(case)
        orders = cycle((LeastRecentlyUsed, other or LeastRecentlyUsed))
        monkeypatch.setattr(
            lot, "_factory", lambda world, o=orders: EvictionPolicySubject(world, eviction=next(o))
        )
        lot.settle_left_over()
        (finding,) = lot.site.store.found()
        assert (finding.property, words in finding.message) == (DETERMINISM, True)
        assert not [*lot.site.store.raw_cases()]


def told_of_twice(draw: Draw, *orders: type[LeastRecentlyUsed]) -> str:
    """What is told of a run that is done once with each order of eviction."""
    turns = iter(orders)
    failure = run_twice(
        lambda world: EvictionPolicySubject(world, eviction=next(turns)), draw, Totals()
    )
    return "" if failure is None else failure[1].message


def test_a_known_subject_that_is_not_deterministic_is_known_until_it_is(
    tmp_path: Path, failing: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(**{**fields_of(failing[0].case), "fault": None})
    save_case(case, tmp_path / "case.json")
    entry = KnownIssue("7", "engine", DETERMINISM, (), (), "case.json")
    ledger = Ledger((entry,), tmp_path)
    (note,) = mended(ledger, [])
    assert note.startswith("7 is mended")
    differs = case.operations, Violation(DETERMINISM, "different")
    monkeypatch.setattr(guarded, "run_twice", lambda *arguments: differs)
    monkeypatch.setattr(
        Replayer, "judge", lambda replayer, path, twice: judge_here(path, twice=twice)
    )
    assert mended(ledger, []) == []


def test_what_could_not_be_shrunk_is_told_apart_by_where_it_was_seen(tmp_path: Path) -> None:
    """And is known only by its id: an entry without kinds would cover all of its property."""
    triage = lot_of(tmp_path, campaign()).site.triage
    findings = [
        triage.settle("cache", Found(case, Violation(property, "so")), 1.0, replays=False)
        for property, seed, operations in (
            (HANG, "s/cache/1", [Launch()]),
            (HANG, "s/cache/2", [Launch()]),
            (DETERMINISM, "s/cache/3", [Launch()]),
            (DETERMINISM, "s/cache/4", [Launch(), Retire()]),
            (DETERMINISM, "s/cache/5", [Retire(), Launch()]),
        )
        for case in [Case("engine", Configuration(), list(operations), seed=seed)]
    ]
    ids = [finding.id for finding in findings]
    assert len({*ids}) == 3
    assert ids[2] == ids[3] == ids[4]
    entry = msgspec.json.decode(entry_of(findings[0]), type=KnownIssue)
    assert [entry.matches(finding) for finding in findings] == [True, *[False] * 4]


def test_an_entry_of_a_crash_does_not_hide_another(tmp_path: Path, failing: list[Found]) -> None:
    _, triage = triage_in(tmp_path)
    found = triage.settle("cache", failing[0], 0.0)
    crash, alike, other = (
        replace(found, property="CRASH", message=f"launch raised {error} (x.py:1, in f)")
        for error in ("KeyError: 'r1'", "KeyError: 'r2'", "IndexError: 1")
    )
    entry = msgspec.json.decode(entry_of(crash), type=KnownIssue)
    assert entry.says == "raised KeyError: 'r"
    assert [entry.matches(finding) for finding in (crash, alike, other)] == [True, True, False]


def test_an_entry_of_what_cannot_be_replayed_stays() -> None:
    entry = KnownIssue("7", "mine:Subject", HANG, (), ())
    assert mended(Ledger((entry,)), []) == []


class MostRecentlyUsed(LeastRecentlyUsed):
    def victim(self) -> int:
        return next(iter(self))

    def __iter__(self) -> Iterator[int]:
        return reversed([*super().__iter__()])


def test_what_does_not_happen_again_is_told_as_it_was_found(
    tmp_path: Path, failing: list[Found]
) -> None:
    _, triage = triage_in(tmp_path)
    case = Case(**{**fields_of(failing[0].case), "fault": None})  # so that it does not fail
    finding = triage.settle("cache", Found(case, failing[0].violation), 0.0)
    assert "does not happen again" in finding.message
    assert finding.operations == finding.found_operations == len(case.operations)
    assert finding.kinds == ()
    seeds: list[str] = []
    lot = lot_of(tmp_path, campaign(fault=FAULT), say=seeds.append)
    made(lot, 8)
    assert len(seeds) == 8  # nobody knows what it needs: nothing is passed over


def test_a_subject_that_cannot_be_made_is_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot = lot_of(tmp_path, campaign())

    def unmade(configuration: Configuration) -> EngineSubject:
        raise SystemExit("no device")

    monkeypatch.setattr(lot, "_factory", unmade)
    progress = made(lot, 3)
    assert progress.totals.problems[0] == "run seed/cache/0: SystemExit: no device"
    assert progress.drawn == 3


def test_a_job_needs_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no campaign"):
        run_job(ShardJob(str(tmp_path), 0, 1.0))
