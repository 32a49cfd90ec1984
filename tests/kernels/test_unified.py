"""Mixed prefill and decode: against the reference, against decode, and over the cut of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from kvproof.kernels.attention import targets, unified
from kvproof.kernels.attention.unified import default_tile, paged_attention
from kvproof.kernels.bounds import hold_to_bound
from kvproof.kernels.cases import HEAD_SIZES, Case, build
from kvproof.kernels.checks import Plan, matches_reference
from kvproof.kernels.problem import attend, attend_poisoned

BASE = Case(
    "unified",
    kv_heads=2,
    group=2,
    lengths=(37, 20, 0, 9, 33),
    queries=(5, 1, 0, 9, 0),
    sinks=True,
)


def test_within_the_bound_over_all_features_together(device: str) -> None:
    matches_reference("unified", Plan(device))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_head_size_with_the_tiles_of_the_launcher(
    head_size: int, dtype: str, device: str
) -> None:
    case = replace(BASE, head_size=head_size, value_size=head_size, dtype=dtype, cache_dtype=dtype)
    problem = replace(build(case, device), tile_rows=None, tile_keys=None)  # type: ignore[arg-type]
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("group", [1, 3, 5, 16, 71])
def test_every_size_of_a_group(group: int, device: str) -> None:
    """Rows of a tile that no query fills, where the group is not a power of two, stay out."""
    problem = build(replace(BASE, kv_heads=1, group=group, alibi=True), device)
    problem = replace(problem, tile_rows=None)  # type: ignore[arg-type]
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize(
    "queries",
    [(1, 1, 1, 1), (0, 0, 0, 1), (1, 0, 0, 0), (8, 8, 8, 8), (7, 9, 1, 16), (0, 17, 0, 3)],
    ids=str,
)
def test_every_cut_of_a_batch(queries: tuple[int, ...], device: str) -> None:
    """Tiles of eight queries: sequences that end with a tile, within one, and have none."""
    case = replace(BASE, lengths=(20, 17, 18, 33), queries=queries)
    problem = build(case, device)
    hold_to_bound(problem, attend_poisoned(problem))


def test_more_sequences_than_queries(device: str) -> None:
    queries = (0,) * 9 + (1,) + (0,) * 9
    problem = build(replace(BASE, lengths=(3,) * 19, queries=queries), device)
    hold_to_bound(problem, attend_poisoned(problem))


def test_no_query_at_all(device: str) -> None:
    problem = build(replace(BASE, lengths=(3, 0), queries=(0, 0)), device)
    assert attend(problem).out.shape == (0, 4, 16)


def test_a_whole_prompt_sees_what_came_before_and_itself(device: str) -> None:
    """The first query of a prompt has one key: its result is that key's value."""
    problem = build(Case("unified", lengths=(6,), queries=(6,)), device)
    first = problem.v_cache[int(problem.block_table[0, 0]), 0, 0]
    torch.testing.assert_close(attend(problem).out[0, 0], first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", [0, 7])
def test_one_query_gives_what_decode_gives(window: int, device: str) -> None:
    """Two kernels, one problem: both within the bound, so within twice the bound of each other."""
    case = replace(BASE, lengths=(37, 20), queries=(1, 1), window=window, alibi=True, softcap=3.0)
    problem = build(case, device)
    hold_to_bound(problem, attend(problem))
    hold_to_bound(problem, attend(replace(problem, kind="decode", split_size=16)))


def test_tiles_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **constants: seen.append(constants)

    monkeypatch.setattr(unified, "unified_kernel", Recorder())
    cache = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    for counts in ([1], [1] * 64, [500], [1, 500, 0, 3]):
        starts = torch.tensor([0, *counts]).cumsum(0)
        paged_attention(
            torch.zeros(sum(counts), 32, 128, dtype=torch.bfloat16),
            cache,
            cache,
            torch.zeros(len(counts), 64, dtype=torch.int32),
            starts,
            torch.full((len(counts),), 512),
            scale=0.1,
        )
    assert all(constants == seen[0] for constants in seen)
    assert len(seen) == 4


def arguments() -> dict[str, Any]:
    problem = build(Case("unified", kv_heads=2, group=2, lengths=(9, 4), queries=(3, 1)))
    return {
        "q": problem.q,
        "k_cache": problem.k_cache,
        "v_cache": problem.v_cache,
        "block_table": problem.block_table,
        "query_starts": problem.query_starts,
        "lengths": problem.lengths,
        "scale": 0.25,
        "tile_keys": 16,
        "tile_rows": 16,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query_starts": torch.tensor([0, 3])}, r"query_starts must be int32 or int64 \[3\]"),
    ({"query_starts": torch.tensor([0.0, 3, 4])}, "query_starts must be int32 or int64"),
    ({"query_starts": torch.tensor([0, 3, 5])}, "query_starts must run from 0 to 4"),
    ({"query_starts": torch.tensor([1, 3, 4])}, "query_starts must run from 0 to 4"),
    ({"query_starts": torch.tensor([0, 5, 4])}, "sequence 1 has -1 queries"),
    ({"lengths": torch.tensor([2, 4])}, "sequence 0 has 3 queries and 2 keys"),
    ({"tile_rows": 8}, "tile_rows must be 16"),
    ({"tile_keys": 24}, "tile_keys must be 16"),
    ({"window": -1}, "window must be 0"),
    ({"k_scale": 2.0}, "k_scale is given"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments() | change))


def test_a_group_larger_than_the_tile_is_refused() -> None:
    problem = build(Case("unified", group=17, lengths=(3,)))
    with pytest.raises(ValueError, match="17 query heads share a KV head"):
        attend(problem)


def test_the_arguments_above_are_right_without_the_change() -> None:
    assert paged_attention(**arguments()).out.isfinite().all()


# Tiles by target


class Driver:
    """What Triton says about the GPU."""

    def __init__(self, backend: str, arch: int | str) -> None:
        self.active = self
        self.target = GPUTarget(backend, arch, 64 if backend == "hip" else 32)

    def get_current_target(self) -> GPUTarget:
        return self.target


@pytest.mark.parametrize(
    ("backend", "arch", "tiles"),
    [
        ("cuda", 80, [(128, 64, 3), (64, 32, 3), (16, 16, 3)]),
        ("cuda", 90, [(128, 64, 3), (64, 32, 3), (16, 16, 3)]),
        ("cuda", 100, [(128, 64, 3), (64, 32, 3), (16, 16, 3)]),
        ("cuda", 89, [(64, 32, 3), (32, 32, 2), (16, 16, 3)]),
        ("cuda", 120, [(64, 32, 3), (32, 32, 2), (16, 16, 3)]),
        ("hip", "gfx942", [(64, 32, 2), (32, 32, 2), (16, 16, 2)]),
    ],
)
def test_tiles_fit_the_target(
    monkeypatch: pytest.MonkeyPatch, backend: str, arch: int | str, tiles: list[tuple[int, ...]]
) -> None:
    """Large ones where there is shared memory for them; that they fit is seen in compiling."""
    monkeypatch.setattr(targets.triton.runtime, "driver", Driver(backend, arch))
    half, single = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert [
        default_tile(half, 128),
        default_tile(half, 256),
        default_tile(single, 128),
    ] == tiles
