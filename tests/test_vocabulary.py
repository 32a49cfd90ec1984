"""Operations, cases and verdicts: what a case file says, and how a bad one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvproof.fuzz.verdicts import judge, reachable_goals
from kvproof.invariants import operations as vocabulary
from kvproof.invariants.case import (
    Case,
    dump_case,
    load_case,
    parse_case,
    save_case,
    source_of,
)
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.goals import GOALS
from kvproof.invariants.operations import (
    ALL_KINDS,
    KINDS,
    OPERATION_TYPES,
    SCHEDULER_KINDS,
    TIER_KINDS,
    Abort,
    Admit,
    AnyOperation,
    Arrive,
    Cancel,
    Complete,
    Corrupt,
    Decode,
    Evict,
    Fail,
    Finish,
    Fork,
    Grow,
    Land,
    Launch,
    Media,
    Notify,
    Offload,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    Run,
    Schedule,
    Segment,
    Slow,
    Wait,
    Withhold,
    kind_of,
)
from kvproof.invariants.property import Check
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration, OffloadMeaning, Semantics, Subject
from kvproof.invariants.verdict import Verdict, Violation, merge, primary
from kvproof.stateful_tests.subjects.engine import EngineSubject

INDEX = st.integers(0, 1 << 40)
COUNT = st.integers(1, 1 << 16)
SEGMENTS = st.builds(Segment, INDEX, COUNT)
MEDIA = st.builds(Media, INDEX, INDEX, COUNT)
PROMPTS = st.lists(SEGMENTS, min_size=1, max_size=3).map(tuple)
ITEMS = st.lists(MEDIA, max_size=2).map(tuple)
TIERS = st.sampled_from(("device", "host", "disk"))
LOWER_TIERS = st.sampled_from(("host", "disk"))
CAUSES = st.sampled_from(("error", "timeout", "short_write", "disk_full"))
OPERATIONS: st.SearchStrategy[AnyOperation] = st.one_of(
    st.builds(Admit, PROMPTS, INDEX, INDEX, ITEMS, INDEX, st.booleans()),
    st.builds(Grow, INDEX, COUNT, INDEX),
    st.builds(Decode, st.lists(INDEX, min_size=1, max_size=3).map(tuple), INDEX),
    st.builds(Reserve, INDEX, COUNT),
    st.builds(Fork, INDEX, st.integers(1, 64)),
    st.builds(Evict, COUNT, TIERS),
    st.builds(Preempt, INDEX, st.booleans(), st.booleans()),
    st.builds(Resume, INDEX, INDEX, st.booleans()),
    st.builds(Launch, INDEX, st.lists(st.tuples(INDEX, COUNT), max_size=3).map(tuple)),
    st.builds(Offload, LOWER_TIERS, INDEX, INDEX),
    st.builds(Promote, PROMPTS, INDEX, INDEX, ITEMS, st.sampled_from(("device", "host")), INDEX),
    st.builds(Land, INDEX, COUNT),
    st.builds(Fail, INDEX, CAUSES),
    st.builds(Withhold, TIERS, INDEX),
    st.builds(Corrupt, INDEX, INDEX),
    st.builds(Restart, INDEX, st.integers(0, 4)),
    st.builds(Slow, COUNT),
    st.builds(Arrive, PROMPTS, COUNT, COUNT, INDEX, INDEX),
    st.builds(Run, COUNT),
    *(st.builds(kind, INDEX) for kind in (Finish, Abort, Complete, Cancel, Notify, Wait)),
    *(st.builds(kind) for kind in (Reset, Retire, Schedule)),
)
EVICTIONS = st.sampled_from(("lru", "arc"))
SIZES: dict[str, st.SearchStrategy[Any]] = {
    "blocks": st.integers(1, 1 << 24),
    "block_size": st.just(16),
    "requests": st.integers(1, 1 << 20),
    "run_ahead": st.integers(1, 8),
    "prefix_caching": st.booleans(),
    "kv_bytes_per_token": st.integers(1, 1 << 60),
    "scheduling": st.builds(Limits, COUNT, COUNT, COUNT, st.booleans()),
    "device_eviction": EVICTIONS,
    "host_eviction": EVICTIONS,
    "disk_eviction": EVICTIONS,
    "host_unit_tokens": st.sampled_from((0, 16)),
    "disk_unit_tokens": st.sampled_from((0, 16)),
}
UNTIERED = {
    "host_blocks": st.integers(0, 1 << 24),
    "offload": st.sampled_from(("none", "suspension")),
}
TIERED = {
    "host_blocks": st.integers(1, 1 << 24),
    "disk_blocks": st.integers(0, 1 << 24),
    "offload": st.sampled_from(("prefix", "both")),
}
CASES = st.builds(
    Case,
    st.text(),
    st.one_of(
        st.builds(Configuration, st.integers(1, 1 << 24), st.integers(1, 4096)),
        st.builds(Configuration, **SIZES, **UNTIERED),
        st.builds(Configuration, **SIZES, **TIERED),
    ),
    st.lists(OPERATIONS, max_size=5),
    features=st.lists(st.text(), max_size=3).map(tuple),
    seed=st.text(),
    fault=st.none() | st.text(),
    violates=st.none() | st.text(),
)
CASE = Case("engine", Configuration(blocks=6), [Admit((Segment(0, 4),)), Grow(1, 2), Retire()])

# -- operations ----------------------------------------------------------------------------------


def test_kinds_are_the_names_of_all_operations() -> None:
    assert tuple(kind.__name__.lower() for kind in OPERATION_TYPES) == ALL_KINDS
    assert len(set(ALL_KINDS)) == len(ALL_KINDS)
    assert kind_of(Grow(0)) == "grow"
    assert set(OPERATION_TYPES) == set(AnyOperation.__args__)


def test_each_operation_drives_a_cache_or_a_scheduler() -> None:
    assert {*KINDS, *TIER_KINDS, *SCHEDULER_KINDS} == set(ALL_KINDS)
    assert not set(TIER_KINDS) & {*KINDS, *SCHEDULER_KINDS}
    assert set(KINDS) & set(SCHEDULER_KINDS) == {"retire", "abort", "reset"}, "these drive both"


@given(OPERATIONS)
def test_source_of_an_operation_evaluates_to_it(operation: AnyOperation) -> None:
    assert eval(source_of(operation), dict(vars(vocabulary))) == operation


def test_source_of_an_operation_leaves_out_defaults() -> None:
    assert source_of(Grow(1)) == "Grow(request=1)"
    assert source_of(Grow(1, choice=2)) == "Grow(request=1, choice=2)"
    assert source_of(Reset()) == "Reset()"
    assert source_of(Admit((Segment(0, 3),))) == "Admit(prompt=(Segment(source=0, length=3),))"


# -- cases that are read back --------------------------------------------------------------------


@given(CASES)
@settings(max_examples=200)
def test_a_case_is_read_back_as_it_was_written(case: Case) -> None:
    text = dump_case(case)
    assert parse_case(text) == case
    assert parse_case(text.encode()) == case


@given(CASES)
def test_the_same_case_gives_the_same_text(case: Case) -> None:
    text = dump_case(case)
    assert dump_case(parse_case(text)) == text
    assert json.loads(text)["format"] == "kvproof-case"


@given(CASES, CASES)
def test_different_cases_give_different_texts(one: Case, other: Case) -> None:
    assert (dump_case(one) == dump_case(other)) == (one == other)


def test_a_case_has_one_operation_a_line() -> None:
    assert dump_case(CASE).splitlines() == [
        "{",
        '  "format": "kvproof-case",',
        '  "version": 1,',
        '  "subject": "engine",',
        '  "configuration": {"blocks": 6},',
        '  "operations": [',
        '    {"op": "admit", "prompt": [[0, 4]]},',
        '    {"op": "grow", "request": 1, "tokens": 2},',
        '    {"op": "retire"}',
        "  ]",
        "}",
    ]


def test_a_saved_case_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    save_case(CASE, path)
    assert load_case(path) == CASE
    assert path.read_text(encoding="utf-8") == dump_case(CASE)
    assert list(tmp_path.iterdir()) == [path]


def _half_written(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
    path.write_bytes(text.encode()[: len(text) // 2])
    raise OSError("No space left on device")


def _not_replaced(path: Path, target: Path) -> Path:
    raise OSError("the machine went down")


@pytest.mark.parametrize(
    ("method", "crash"), [("write_text", _half_written), ("replace", _not_replaced)]
)
def test_a_crash_while_saving_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, crash: Callable[..., Any]
) -> None:
    path = tmp_path / "case.json"
    save_case(CASE, path)
    monkeypatch.setattr(Path, method, crash)
    with pytest.raises(OSError, match=r"space|down"):
        save_case(Case("engine", Configuration(), []), path)
    assert load_case(path) == CASE


def test_a_crash_of_a_plain_write_would_leave_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the crash above does harm where nothing guards against it."""
    path = tmp_path / "case.json"
    save_case(CASE, path)
    monkeypatch.setattr(Path, "write_text", _half_written)
    with pytest.raises(OSError, match="space"):
        path.write_text(dump_case(CASE), encoding="utf-8")
    with pytest.raises(InputError, match="too early"):
        load_case(path)


# -- cases that are refused ------------------------------------------------------------------------


def _with(operations: str, more: str = "") -> str:
    head = '{"format": "kvproof-case", "version": 1, "subject": "engine", "configuration": {}, '
    return f'{head}"operations": [{operations}]{more}}}'


def _in_world(fields: str) -> str:
    return GOOD.replace('"configuration": {}', f'"configuration": {{{fields}}}')


TRUNCATED = dump_case(CASE)[:-8]
GOOD = _with('{"op": "reset"}')
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "f:1:1: the file ends too early"),
    "truncated": (TRUNCATED, "f:9:20: the file ends too early"),
    "no JSON": ('{"format" 1}', "f:1:11: not JSON: Expecting ':' delimiter"),
    "two documents": (GOOD + " {}", f"f:1:{len(GOOD) + 2}: not JSON: Extra data"),
    "not UTF-8": (b'{"seed": "\xff"}', "f: not UTF-8 text at byte 10"),
    "other format": (
        '{"format": "other"}',
        'f: not a kvproof case (no "format": "kvproof-case" at the top)',
    ),
    "no object": ("[]", 'f: not a kvproof case (no "format": "kvproof-case" at the top)'),
    "other version": (
        '{"format": "kvproof-case", "version": 2}',
        "f: case of version 2 at $.version; this kvproof reads version 1",
    ),
    "no version": (
        '{"format": "kvproof-case"}',
        "f: case of version None at $.version; this kvproof reads version 1",
    ),
    "no subject": (
        '{"format": "kvproof-case", "version": 1}',
        "f: Object missing required field `subject`",
    ),
    "unknown operation": (
        _with('{"op": "reset"}, {"op": "resett"}'),
        f"f: unknown operation 'resett' at $.operations[1].op; known are {', '.join(ALL_KINDS)}",
    ),
    "no operation": (_with("{}"), "f: Object missing required field `op` - at `$.operations[0]`"),
    "wrong type": (
        _with('{"op": "grow", "request": "1"}'),
        "f: Expected `int`, got `str` - at `$.operations[0].request`",
    ),
    "truth value": (
        _with('{"op": "grow", "request": true}'),
        "f: Expected `int`, got `bool` - at `$.operations[0].request`",
    ),
    "fraction": (
        _with('{"op": "grow", "request": 1.5}'),
        "f: Expected `int`, got `float` - at `$.operations[0].request`",
    ),
    "unknown field": (
        _with('{"op": "reset"}', ', "speed": 1'),
        "f: Object contains unknown field `speed`",
    ),
    "unknown field of an operation": (
        _with('{"op": "reset", "now": 1}'),
        "f: Object contains unknown field `now` - at `$.operations[0]`",
    ),
    "negative number": (
        _with('{"op": "grow", "request": -1}'),
        "f: Expected `int` >= 0 - at `$.operations[0].request`",
    ),
    "no tokens": (
        _with('{"op": "grow", "request": 0, "tokens": 0}'),
        "f: Expected `int` >= 1 - at `$.operations[0].tokens`",
    ),
    "segment of length zero": (
        _with('{"op": "admit", "prompt": [[0, 4], [1, 0]]}'),
        "f: Expected `int` >= 1 - at `$.operations[0].prompt[1][1]`",
    ),
    "empty prompt": (
        _with('{"op": "admit", "prompt": []}'),
        "f: Expected `array` of length >= 1 - at `$.operations[0].prompt`",
    ),
    "too many samples": (
        _with('{"op": "fork", "request": 0, "samples": 65}'),
        "f: Expected `int` <= 64 - at `$.operations[0].samples`",
    ),
    "number too large": (
        _with(f'{{"op": "launch", "budget": {(1 << 40) + 1}}}'),
        f"f: Expected `int` <= {1 << 40} - at `$.operations[0].budget`",
    ),
    "decode of nobody": (
        _with('{"op": "decode", "requests": []}'),
        "f: Expected `array` of length >= 1 - at `$.operations[0].requests`",
    ),
    "item of no tokens": (
        _with('{"op": "launch", "items": [[0, 1], [0, 0]]}'),
        "f: Expected `int` >= 1 - at `$.operations[0].items[1][1]`",
    ),
    "reservation of nothing": (
        _with('{"op": "reserve", "request": 0, "slots": 0}'),
        "f: Expected `int` >= 1 - at `$.operations[0].slots`",
    ),
    "pool without blocks": (
        _in_world('"blocks": 0'),
        "f: Expected `int` >= 1 - at `$.configuration.blocks`",
    ),
    "slow by nothing": (
        _with('{"op": "slow", "factor": 0}'),
        "f: Expected `int` >= 1 - at `$.operations[0].factor`",
    ),
    "restart at no stage": (
        _with('{"op": "restart", "stage": 5}'),
        "f: Expected `int` <= 4 - at `$.operations[0].stage`",
    ),
    "offload to nowhere": (
        _with('{"op": "offload", "to": "device"}'),
        "f: Invalid enum value 'device' - at `$.operations[0].to`",
    ),
    "chunks that disagree": (
        _in_world('"host_unit_tokens": 8'),
        "f: chunk sizes must agree: host units of 8 tokens, device blocks of 4 - at "
        "`$.configuration`",
    ),
    "prefixes without a host": (
        _in_world('"offload": "prefix"'),
        "f: offload 'prefix' needs host_blocks - at `$.configuration`",
    ),
    "disk without prefixes": (
        _in_world('"host_blocks": 1, "disk_blocks": 1'),
        "f: disk_blocks need prefix offload, not 'suspension' - at `$.configuration`",
    ),
    "negative disk": (
        _in_world('"disk_blocks": -1'),
        "f: Expected `int` >= 0 - at `$.configuration.disk_blocks`",
    ),
    "negative swap space": (
        _in_world('"host_blocks": -1'),
        "f: Expected `int` >= 0 - at `$.configuration.host_blocks`",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_case_is_refused_with_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_case(text, "f")
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        _with(f'{{"op": "launch", "budget": {"1" * 5000}}}'),
        GOOD.encode("utf-16"),
        GOOD.replace('"version": 1', '"version": true'),
    ],
    ids=["deep", "long number", "UTF-16", "version true"],
)
def test_a_hostile_case_is_refused(text: str | bytes) -> None:
    with pytest.raises(InputError):
        parse_case(text, "f")


def test_the_case_beside_the_bad_ones_is_read() -> None:
    assert parse_case(GOOD).operations == [Reset()]
    assert parse_case(_with(f'{{"op": "launch", "budget": {1 << 40}}}')).operations


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    for path, why in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError) as refusal:
            load_case(path)
        assert str(refusal.value) == f"{path}: {why}"


def test_a_bad_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(TRUNCATED, encoding="utf-8")
    with pytest.raises(InputError) as refusal:
        load_case(path)
    assert str(refusal.value) == f"{path}:9:20: the file ends too early"


# -- configurations that are refused --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["blocks", "block_size", "requests", "run_ahead", "kv_bytes_per_token"]
)
def test_a_size_below_one_is_refused(name: str) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"{name} is {size}: at least 1 is needed"):
            Configuration(**{name: size})
    assert getattr(Configuration(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    "name", ["host_blocks", "disk_blocks", "host_unit_tokens", "disk_unit_tokens"]
)
def test_a_negative_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1: at least 0 is needed"):
        Configuration(**{name: -1})
    assert getattr(Configuration(**{name: 0}), name) == 0


def test_chunk_sizes_must_agree() -> None:
    for tier in ("host", "disk"):
        with pytest.raises(ValueError, match=f"{tier} units of 8 tokens, device blocks of 4"):
            Configuration(block_size=4, **{f"{tier}_unit_tokens": 8})
        assert Configuration(block_size=8, **{f"{tier}_unit_tokens": 8}) != Configuration()


def test_tiers_must_fit_together() -> None:
    for offload in ("prefix", "both"):
        with pytest.raises(ValueError, match=f"offload '{offload}' needs host_blocks"):
            Configuration(offload=offload)
        assert Configuration(host_blocks=1, disk_blocks=1, offload=offload).offloads_prefixes
    for offload in ("none", "suspension"):
        with pytest.raises(ValueError, match="disk_blocks need prefix offload"):
            Configuration(host_blocks=1, disk_blocks=1, offload=offload)


def test_a_change_that_makes_no_configuration_is_refused() -> None:
    tiered = Configuration(host_blocks=1, offload="prefix")
    with pytest.raises(ValueError, match="needs host_blocks"):
        replace(tiered, host_blocks=0)


def test_meanings_say_what_may_become_of_kv() -> None:
    meanings = {
        offload: Configuration(host_blocks=1, offload=offload).meanings
        for offload in get_args(OffloadMeaning)
    }
    assert meanings == {
        "none": ("recompute",),
        "suspension": ("suspension", "recompute"),
        "prefix": ("prefix", "recompute"),
        "both": ("prefix", "suspension", "recompute"),
    }
    assert Configuration().meanings == ("recompute",), "there is no host"


# -- verdicts --------------------------------------------------------------------------------------


def test_fail_dominates_unknown_dominates_pass() -> None:
    order: tuple[Verdict, ...] = ("pass", "unknown", "fail")
    for one, other in product(order, order):
        assert merge(one, other) == order[max(order.index(one), order.index(other))]
    assert merge("pass", "fail", "unknown") == "fail"
    assert merge() == "pass"


def test_the_primary_violation_is_the_one_that_says_most() -> None:
    seen = {name: Violation(name, "…") for name in ("CAP", "LIFE", "MET", "REF", "PROV", "KEY")}
    assert primary(list(seen.values())) is seen["KEY"]
    assert primary([seen["CAP"], seen["MET"]]) is seen["MET"]
    assert primary([seen["CAP"], seen["LIFE"], seen["REF"]]) is seen["REF"]
    first, second = Violation("REF", "first"), Violation("REF", "second")
    assert primary([first, second]) is first
    # A property that the order does not know comes first: somebody has added it for a reason.
    own = Violation("MINE", "…")
    assert primary([seen["KEY"], own]) is own


CACHE_KINDS = (*KINDS, *TIER_KINDS)
DONE = {kind: {"done": 1, "refused": 0, "skipped": 0} for kind in CACHE_KINDS}
MET = {goal.id: 1 for goal in GOALS}


def _judged(
    subject: Subject | None = None, *, failed: bool = False, **changes: Any
) -> tuple[Verdict, tuple[str, ...]]:
    arguments: dict[str, Any] = {
        "operations": DONE,
        "goals": MET,
        "checked": {check.id(): 1 for check in CHECKS},
        **changes,
    }
    judgement = judge(subject or EngineSubject(Configuration()), **arguments, failed=failed)
    return judgement.verdict, judgement.reasons


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id())
def test_a_property_that_was_never_put_to_the_test_makes_it_unknown(check: type[Check]) -> None:
    checked = {other.id(): 1 for other in CHECKS if other is not check}
    reason = f"property {check.id()} was never put to the test"
    assert _judged(checked=checked) == ("unknown", (reason,))


def test_a_search_that_met_everything_passes() -> None:
    assert _judged() == ("pass", ())
    assert _judged(failed=True) == ("fail", ())


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_an_operation_that_never_succeeded_makes_it_unknown(kind: str) -> None:
    for counts in ({}, {"done": 0, "refused": 9, "skipped": 9}):
        reasons = (f"operation {kind} never succeeded",)
        assert _judged(operations={**DONE, kind: counts}) == ("unknown", reasons)
        assert _judged(operations={**DONE, kind: counts}, failed=True) == ("fail", reasons)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.id)
def test_a_situation_that_was_never_met_makes_it_unknown_unless_rare(goal: Any) -> None:
    verdict, reasons = _judged(goals={**MET, goal.id: 0})
    assert verdict == ("pass" if goal.rare else "unknown")
    assert len(reasons) == (not goal.rare)
    assert all(goal.id in reason and goal.situation in reason for reason in reasons)


def test_a_checker_that_stumbled_makes_it_unknown() -> None:
    assert _judged(problems=("run 3: a checker stumbled",)) == (
        "unknown",
        ("run 3: a checker stumbled",),
    )


def test_what_a_subject_cannot_do_is_not_demanded() -> None:
    subject = EngineSubject(Configuration())
    assert set(reachable_goals(subject)) == set(GOALS)
    subject.capabilities = frozenset(CACHE_KINDS) - {"fork"}
    operations = {kind: counts for kind, counts in DONE.items() if kind != "fork"}
    goals = {goal.id: 1 for goal in GOALS if "fork" not in goal.needs}
    assert len(goals) < len(GOALS)
    assert _judged(subject, operations=operations, goals=goals) == ("pass", ())
    subject.semantics = Semantics(
        chunks=False, fences_releases=False, runs_ahead=False, slots=False, swaps=False
    )
    lacking = {"chunks", "fences", "runs-ahead", "slots", "swaps", "tiers", "fork"}
    assert {goal.id for goal in reachable_goals(subject)} == {
        goal.id for goal in GOALS if not goal.needs & lacking
    }
