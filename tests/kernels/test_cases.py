"""Problems are as unkind as they say, and the same each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings

from kvproof.kernels.bounds import hold_to_bound
from kvproof.kernels.cases import (
    DTYPES,
    LAYOUTS,
    NEEDLE_VALUE,
    NEEDLES,
    Case,
    build,
    cases,
    compiled_cases,
    families,
    moved,
    needle_position,
)
from kvproof.kernels.checks import Plan, for_all
from kvproof.kernels.problem import KINDS, Kind, attend_poisoned, bits, seen_slots
from kvproof.kernels.reference import dense, lay_out, log_sum_exp, masked_scores, weights


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(cases())
def test_what_nobody_sees_is_poisoned(case: Case) -> None:
    problem = build(case)
    unseen = ~seen_slots(problem)
    assert bool(unseen.any()), "the pool has blocks of nobody"
    # e4m3 has no infinity: PyTorch makes it NaN or the largest number, by version.
    for cache in (problem.k_cache, problem.v_cache):
        poison = cache.float()[unseen]
        assert bool(((~poison.isfinite()) | (poison.abs() == 448)).all())
        assert bool(cache.float()[~unseen].isfinite().all())


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(cases())
def test_a_case_is_the_same_each_time(case: Case) -> None:
    one, other = build(case), build(case)
    for name in ("q", "k_cache", "v_cache", "block_table", "lengths", "query_starts"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.stride() == b.stride()
        assert torch.equal(a, b) or torch.equal(bits(a), bits(b))


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(cases())
def test_moving_keeps_strides_and_contents(case: Case) -> None:
    problem = build(case)
    there = moved(problem, "cpu")
    assert there.k_cache.stride() == problem.k_cache.stride()
    assert there.v_cache.stride() == problem.v_cache.stride()
    assert torch.equal(bits(there.v_cache), bits(problem.v_cache))
    torch.testing.assert_close(dense(there), dense(problem), rtol=0, atol=0)


def test_garbage_stands_in_every_entry_that_nobody_needs() -> None:
    case = Case("decode", lengths=(9, 3), queries=(1, 1), window=2, spare_entries=2, block_size=2)
    table = build(case).block_table
    blocks = build(case).k_cache.shape[0]
    is_block = (table >= 0) & (table < blocks)
    # Nine keys in blocks of two, of which the last two, in blocks 3 and 4, are in the window.
    assert is_block[0].nonzero().flatten().tolist() == [3, 4]
    assert is_block[1].nonzero().flatten().tolist() == [0, 1]
    assert table.shape == (2, 7)


def test_everything_is_drawn() -> None:
    """No value of any field is out of reach, and features come together."""
    seen: dict[str, Counter[object]] = {field.name: Counter() for field in fields(Case)}
    together = 0

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(cases())
    def look(case: Case) -> None:
        nonlocal together
        for name, counts in seen.items():
            counts[getattr(case, name)] += 1
        together += bool(case.window and case.softcap and case.sinks and case.alibi)

    look()
    assert set(seen["kind"]) == set(KINDS)
    assert set(seen["cache_dtype"]) == set(DTYPES)
    assert set(seen["layout"]) == set(LAYOUTS)
    assert set(seen["needle"]) == set(NEEDLES)
    assert set(seen["scaling"]) == {"one", "number", "per head"}
    assert {1, 3, 16, 256} <= set(seen["block_size"])
    assert {16, 24, 80, 192, 256} <= set(seen["head_size"])
    assert {0, 1, 16, 17} <= set(seen["window"])
    for flag in ("sinks", "alibi", "shared_prefix", "long_ids"):
        assert set(seen[flag]) == {False, True}
    assert any(0 in lengths and len(lengths) > 1 for lengths in seen["lengths"])
    assert together > 1


@pytest.mark.parametrize("kind", KINDS)
def test_families_have_every_dtype_layout_and_feature(kind: Kind) -> None:
    found = families(kind)
    assert found == families(kind), "they are the same each time, or nothing would be cached"
    assert len(set(found)) == len(found)
    assert {case.cache_dtype for case in found} == set(DTYPES)
    assert {case.layout for case in found} == set(LAYOUTS)
    assert {case.scaling for case in found} == {"one", "number", "per head"}
    if kind != "mla":
        assert {case.sinks for case in found} == {case.alibi for case in found} == {False, True}
        assert any(case.window for case in found)
        assert any(case.softcap for case in found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_right(kind: Kind, device: str) -> None:
    """With the tiles that are used on a GPU, over lengths that cross them."""
    for family in families(kind):
        if kind == "unified":
            case = replace(family, lengths=(135, 0, 33), queries=(70, 0, 1))
        else:
            case = replace(family, lengths=(135, 0, 33), queries=(1, 1, 1))
        problem = build(case, device)
        hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("kind", KINDS)
def test_cases_of_families_are_of_them(kind: Kind) -> None:
    """What follows from a case besides its contents is compiled once per family."""
    given_ = ("lengths", "queries", "window", "needle", "shared_prefix", "spare_entries", "seed")

    def kernel(case: Case) -> tuple[object, ...]:
        rest = [getattr(case, f.name) for f in fields(Case) if f.name not in given_]
        return (*rest, case.window > 0)

    known = {kernel(case) for case in families(kind)}
    drawn: list[Case] = []
    for_all(Plan(), compiled_cases(kind), drawn.append, 60)
    assert {kernel(case) for case in drawn} <= known
    assert max(max(case.lengths) for case in drawn) > 128


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needle", ["first", "last", "block edge", "split edge"])
def test_a_needle_carries_most_of_the_weight(kind: Kind, needle: str) -> None:
    base = Case(kind, head_size=48, value_size=32, lengths=(37,), block_size=4, split_size=16)
    case = replace(base, needle=needle, window=0 if kind == "mla" else 20)  # type: ignore[arg-type]
    problem = build(case)
    (laid,) = lay_out(problem, torch.float64)
    scores = masked_scores(laid, problem.features)
    heaviest = weights(scores, log_sum_exp(scores, problem.features))[0, 0].max(0)
    first = 0 if kind == "mla" else 17
    assert int(heaviest.indices) + first == needle_position(case, 37, 1)
    assert float(heaviest.values) > 0.5
    assert float(laid.v[heaviest.indices, 0, 0]) == NEEDLE_VALUE


def test_needles_stand_where_they_should() -> None:
    case = Case(window=10, block_size=4, split_size=16, lengths=(37,))
    places = {n: needle_position(replace(case, needle=n), 37, 1) for n in NEEDLES if n != "none"}
    assert places == {"first": 27, "last": 36, "before": 26, "block edge": 35, "split edge": 31}
    assert needle_position(replace(case, needle="before"), 5, 1) is None
    assert needle_position(replace(case, needle="last"), 0, 1) is None
