"""Latent attention: one cache that is key and value at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof.kernels.attention.decode import Workspace
from kvproof.kernels.attention.mla import mla_decode
from kvproof.kernels.bounds import OutOfBound, hold_to_bound
from kvproof.kernels.cases import Case, build
from kvproof.kernels.checks import Plan, matches_reference
from kvproof.kernels.problem import attend, attend_poisoned

BASE = Case("mla", group=5, head_size=48, value_size=32, lengths=(37, 0, 20), queries=(1, 1, 1))


def test_within_the_bound_over_all_features_together(device: str) -> None:
    matches_reference("mla", Plan(device))


@pytest.mark.parametrize(("latent", "rotary"), [(512, 64), (24, 8), (1, 1), (33, 17), (256, 128)])
def test_every_size(latent: int, rotary: int, device: str) -> None:
    """DeepSeek's 512 + 64 in one block, and sizes that are no powers of two."""
    case = replace(
        BASE, head_size=latent + rotary, value_size=latent, lengths=(19, 5), queries=(1, 1)
    )
    problem = replace(build(case, device), tile_keys=None)  # type: ignore[arg-type]
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("heads", [1, 16, 17, 40])
def test_every_number_of_heads(heads: int, device: str) -> None:
    problem = build(replace(BASE, group=heads), device)
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("split_size", [0, 16, 32])
def test_every_number_of_splits(split_size: int, device: str) -> None:
    problem = build(replace(BASE, split_size=split_size, spare_entries=20), device)
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("cache_dtype", ["e4m3", "e5m2"])
def test_the_scale_counts_for_key_and_for_value(cache_dtype: str, device: str) -> None:
    case = replace(BASE, dtype="bf16", cache_dtype=cache_dtype, scaling="number")
    problem = build(case, device)
    hold_to_bound(problem, attend_poisoned(problem))
    with pytest.raises(OutOfBound):
        hold_to_bound(problem, attend(replace(problem, k_scale=1.0)))


def arguments() -> dict[str, Any]:
    problem = build(replace(BASE, lengths=(9, 4), queries=(1, 1)))
    return {
        "q": problem.q,
        "cache": problem.k_cache.squeeze(2),
        "block_table": problem.block_table,
        "lengths": problem.lengths,
        "latent_size": 32,
        "scale": 0.25,
        "tile_keys": 16,
        "split_size": 0,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 48)}, "q must be"),
    ({"q": torch.zeros(2, 5, 40)}, r"cache must be \[blocks, block size, 40\]"),
    ({"latent_size": 48}, "leave 1..128 of the 48 to the rotary part, not 48"),
    ({"latent_size": 0}, "latent_size must be in 1..512"),
    ({"q": torch.zeros(2, 5, 48).half()}, "the cache must be torch.float16 as q is"),
    ({"cache_scale": 2.0}, "cache_scale is given"),
    ({"lengths": torch.tensor([9, 400])}, "sequence 1 has 400 keys"),
    ({"scale": float("inf")}, "scale must be finite"),
    ({"split_size": 8}, "split_size must be a multiple"),
    (
        {"workspace": Workspace(torch.zeros(2, 5, 1, 48), torch.zeros(2, 5, 1)), "split_size": 16},
        r"workspace must be float32 \[2, 5, 1, 32\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_decode(**(arguments() | change))


def test_the_arguments_above_are_right_without_the_change() -> None:
    assert mla_decode(**arguments()).out.isfinite().all()
