"""Writing keys and values into slots, and copying blocks: exact to the bit, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvproof.kernels.cache import copy_blocks, gather_blocks, scatter_blocks, write_kv
from kvproof.kernels.cases import LAYOUTS, Layout, laid_in
from kvproof.kernels.checks import Plan, copies_exactly, moves_far_blocks, writes_exactly
from kvproof.kernels.problem import bits

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def test_writes_are_exact(device: str) -> None:
    writes_exactly(Plan(device, examples=150))


def test_copies_are_exact(device: str) -> None:
    copies_exactly(Plan(device, examples=150))


def test_blocks_past_two_to_the_31st_element_are_reached(device: str) -> None:
    moves_far_blocks(Plan(device))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_float8_makes_of_special_numbers(dtype: torch.dtype, device: str) -> None:
    """Saturated, to nearest even, subnormals kept, NaN kept, zeros with their sign."""
    largest = torch.finfo(dtype).max
    steps = 8 if dtype == torch.float8_e4m3fn else 4
    least = torch.finfo(dtype).tiny / steps
    given_ = [
        1e30,
        -math.inf,
        math.nan,
        1 + 1 / (2 * steps),
        1 + 3 / (2 * steps),
        least,
        -0.0,
        least / 2,
    ]
    right = [largest, -largest, math.nan, 1.0, 1 + 2 / steps, least, -0.0, 0.0]
    source = torch.tensor(given_ + [0.0] * 8, device=device).reshape(1, 1, 16)
    cache = torch.ones(1, 1, 1, 16, device=device).to(dtype)
    write_kv(source, source, cache, cache.clone(), torch.tensor([0], device=device))
    got = cache.float()[0, 0, 0, :8].cpu()
    torch.testing.assert_close(got, torch.tensor(right), rtol=0, atol=0, equal_nan=True)
    assert math.copysign(1, float(got[6])) == -1


# Faults that must be found


def writes_to_the_next_slot(
    key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **s: Any
) -> None:
    room = k_cache.shape[0] * k_cache.shape[1]
    write_kv(key, value, k_cache, v_cache, torch.where(slots >= 0, (slots + 1) % room, slots), **s)


def writes_padding(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **s: Any) -> None:
    """Takes -1 for the last slot, as an index of Python would."""
    write_kv(key, value, k_cache, v_cache, slots, **s)
    for token in (slots < 0).nonzero().flatten().tolist():
        k_cache[-1, -1] = key[token].to(k_cache.dtype)


def swaps_scales(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **s: Any) -> None:
    write_kv(
        key,
        value,
        k_cache,
        v_cache,
        slots,
        k_scale=s.get("v_scale", 1.0),
        v_scale=s.get("k_scale", 1.0),
    )


def does_not_saturate(
    key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **s: Any
) -> None:
    """Values past the largest become what the format has for no number."""
    write_kv(key, value, k_cache, v_cache, slots, **s)
    if k_cache.element_size() == 1:
        bits(k_cache)[k_cache.float() == torch.finfo(k_cache.dtype).max] = 0x7F


def truncates(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **s: Any) -> None:
    """Toward zero, as Triton's interpreter does without its shim."""
    if key.dtype == torch.float32 and k_cache.element_size() == 1:
        key = (key.view(torch.int32) & ~0xFFFFF).view(torch.float32)
    write_kv(key, value, k_cache, v_cache, slots, **s)


@pytest.mark.parametrize(
    "fault",
    [writes_to_the_next_slot, writes_padding, swaps_scales, does_not_saturate, truncates],
)
def test_a_wrong_write_is_found(fault: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="written"):
        writes_exactly(Plan(examples=200, shrink=False), fault)


def copies_the_wrong_way(cache: Any, sources: Any, targets: Any) -> None:
    cache[sources] = cache[targets]


def copies_by_value(cache: Any, sources: Any, targets: Any) -> None:
    """A NaN loses its payload."""
    copied = cache[sources].float()
    cache[targets] = torch.where(copied.isnan(), torch.nan, copied).to(cache.dtype)


def copies_all_but_the_last_slot(cache: Any, sources: Any, targets: Any) -> None:
    bits(cache)[targets, :-1] = bits(cache)[sources, :-1]


@pytest.mark.parametrize(
    "fault", [copies_the_wrong_way, copies_by_value, copies_all_but_the_last_slot]
)
def test_a_wrong_copy_is_found(fault: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="copied"):
        copies_exactly(Plan(examples=300, shrink=False), fault)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloading_and_loading_back_is_the_identity(layout: Layout, device: str) -> None:
    """In each layout (vllm issue 17362): out of one pool, into other blocks of another."""
    content = torch.randn(6, 4, 2, 16)
    pool = laid_in(layout, content, torch.float32).to(device)
    blocks = torch.tensor([5, 0, 3], device=device)
    staging = gather_blocks(pool, blocks)
    assert torch.equal(staging.cpu(), content[[5, 0, 3]])
    other = laid_in("HND", torch.zeros(6, 4, 2, 16), torch.float32).to(device)
    scatter_blocks(staging, other, torch.tensor([1, 2, 4], device=device))
    assert torch.equal(other.cpu()[[1, 2, 4]], content[[5, 0, 3]])
    assert not other.cpu()[[0, 3, 5]].any()


def written(**changes: Any) -> None:
    given_ = {
        "key": torch.zeros(2, 3, 16),
        "value": torch.zeros(2, 3, 16),
        "k_cache": torch.zeros(4, 5, 3, 16),
        "v_cache": torch.zeros(4, 5, 3, 16),
        "slots": torch.tensor([3, 19]),
    }
    write_kv(**(given_ | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(2, 2, 16)}, "do not fit into a cache"),
        ({"value": torch.zeros(2, 3, 15)}, "do not fit into a cache"),
        ({"slots": torch.tensor([3])}, r"slots must be int32 or int64 \[2\]"),
        ({"slots": torch.tensor([3.0, 4.0])}, "slots must be int32 or int64"),
        ({"slots": torch.tensor([3, 20])}, "is not below 20"),
        ({"slots": torch.tensor([3, 3])}, "two tokens share a slot"),
        ({"k_scale": 2.0}, "k_scale is given, but the cache is torch.float32"),
        ({"key": torch.zeros(2, 3, 16).half()}, "the cache must be torch.float16"),
    ],
)
def test_writes_that_are_refused(changes: dict[str, Any], message: str) -> None:
    written()
    with pytest.raises(ValueError, match=message):
        written(**changes)


def test_padding_may_come_twice() -> None:
    written(slots=torch.tensor([-1, -1]))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0], [4], "block 4 is not in a pool of 4"),
        ([-1], [0], "block -1 is not in a pool of 4"),
        ([0, 1], [2, 2], "a target twice"),
        ([0, 1], [1, 2], r"blocks \[1\] are source and target at once"),
        ([0, 1], [2], "of one length"),
        ([0.0], [1.0], "block ids are torch.float32"),
    ],
)
def test_copies_that_are_refused(sources: list[Any], targets: list[Any], message: str) -> None:
    cache = torch.zeros(4, 5, 3, 16)
    copy_blocks(cache, torch.tensor([0, 0]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=message):
        copy_blocks(cache, torch.tensor(sources), torch.tensor(targets))


def test_staging_must_fit() -> None:
    cache, blocks = torch.zeros(4, 5, 3, 16), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="staging is"):
        gather_blocks(cache, blocks, torch.zeros(3, 5, 3, 16))
    with pytest.raises(ValueError, match=r"staging is torch\.float16"):
        scatter_blocks(torch.zeros(2, 5, 3, 16).half(), cache, blocks)
    with pytest.raises(ValueError, match="a target twice"):
        scatter_blocks(torch.zeros(2, 5, 3, 16), cache, torch.tensor([1, 1]))
