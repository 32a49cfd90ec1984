"""Paged decode: against the reference, over shapes, splits, and what the launcher decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof.kernels.attention import decode
from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.attention.decode import (
    Workspace,
    decode_workspace,
    paged_decode,
    split_count,
)
from kvproof.kernels.bounds import OutOfBound, hold_to_bound
from kvproof.kernels.cases import BLOCK_SIZES, HEAD_SIZES, Case, build
from kvproof.kernels.checks import Plan, matches_reference
from kvproof.kernels.laws import same_bits
from kvproof.kernels.problem import Problem, attend, attend_poisoned, poisoned_workspace

BASE = Case(kv_heads=2, group=2, lengths=(37, 0, 20), queries=(1, 1, 1), sinks=True)


def test_within_the_bound_over_all_features_together(device: str) -> None:
    matches_reference("decode", Plan(device))


def test_a_kernel_that_forgets_a_feature_is_found(device: str) -> None:
    """Each feature matters to the property: without it, some case is out of bound."""
    without: dict[str, Callable[[Problem], Problem]] = {
        "window": lambda p: p.with_features(window=0),
        "softcap": lambda p: p.with_features(softcap=0.0),
        "sinks": lambda p: p.with_features(sinks=None),
        "alibi": lambda p: p.with_features(alibi=None),
        "k_scale": lambda p: replace(p, k_scale=1.0),
        "v_scale": lambda p: replace(p, v_scale=1.0),
    }
    for name, change in without.items():

        def forgetful(problem: Problem, change: Any = change, name: str = name) -> Attention:
            # Without its window a kernel would read the table's garbage and crash: one key more.
            window = problem.features.window
            if name == "window":
                if window <= 1:
                    return attend(problem)
                return attend(problem.with_features(window=window - 1))
            return attend(change(problem))

        with pytest.raises(OutOfBound):
            matches_reference("decode", Plan(device, examples=100, shrink=False), forgetful)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_head_size_with_the_tiles_of_the_launcher(
    head_size: int, dtype: str, device: str
) -> None:
    case = replace(BASE, head_size=head_size, value_size=head_size, dtype=dtype, cache_dtype=dtype)
    problem = replace(build(case, device), tile_keys=None)  # type: ignore[arg-type]
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("block_size", [*BLOCK_SIZES, 7, 33, 48, 100, 128, 255])
def test_every_block_size(block_size: int, device: str) -> None:
    problem = build(replace(BASE, block_size=block_size, split_size=16), device)
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("group", [1, 3, 16, 17, 71])
def test_every_size_of_a_group(group: int, device: str) -> None:
    """From MHA to MQA with 71 heads, as Falcon 7B has: more than the rows of one program."""
    problem = build(replace(BASE, kv_heads=1, group=group, alibi=True), device)
    hold_to_bound(problem, attend_poisoned(problem))


@pytest.mark.parametrize("split_size", [0, 16, 32, 48])
@pytest.mark.parametrize("window", [0, 1, 16, 17, 30])
def test_every_number_of_splits(split_size: int, window: int, device: str) -> None:
    """Splits without a key are not written, and not read: the workspace is full of NaN."""
    problem = build(replace(BASE, split_size=split_size, window=window, spare_entries=20), device)
    hold_to_bound(problem, attend_poisoned(problem))


def test_splits_are_as_many_as_a_window_can_touch() -> None:
    assert split_count(capacity=100, window=0, split_size=16) == 7
    for window in range(1, 60):
        for split_size in (16, 32):
            touched = max(
                (length - 1) // split_size - max(0, length - window) // split_size + 1
                for length in range(1, 200)
            )
            assert split_count(199, window, split_size) == touched


def test_a_workspace_and_a_result_can_be_brought_along(device: str) -> None:
    problem = build(replace(BASE, split_size=16), device)
    fresh = attend(problem)
    workspace = poisoned_workspace(problem)
    assert workspace is not None
    assert workspace.out.shape == (3, 4, 3, 16)
    for _ in range(2):
        result = Attention(torch.empty_like(fresh.out), torch.empty_like(fresh.lse))
        assert attend(problem, result, workspace) is result
        same_bits("reused workspace", fresh, result)


def test_a_workspace_may_have_room_for_more_splits(device: str) -> None:
    """As one that is allocated once for the longest sequence that will be served."""
    problem = build(replace(BASE, split_size=16), device)
    larger = Workspace(
        *(torch.full(s, torch.nan, device=device) for s in ((3, 4, 7, 16), (3, 4, 7)))
    )
    same_bits("larger workspace", attend(problem), attend(problem, workspace=larger))


def test_a_result_of_other_strides_is_written_right(device: str) -> None:
    problem = build(BASE, device)
    fresh = attend(problem)
    out = torch.full((4, 3, 16), torch.nan, device=device).transpose(0, 1)
    lse = torch.full((3, 8), torch.nan, device=device)[:, ::2]
    attend(problem, Attention(out, lse))
    same_bits("strided result", fresh, Attention(out.contiguous(), lse.contiguous()))


def test_no_workspace_where_one_split_holds_all() -> None:
    problem = build(replace(BASE, split_size=64))
    room = decode_workspace(problem.q, problem.v_cache, problem.block_table, split_size=64)
    assert room is None


# What the launcher decides


class Recorder:
    """Stands in for a kernel: notes how it is launched, and does nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: Any, **constants: Any) -> None:
            self.launches.append((grid, constants))

        return launch


def decisions(
    monkeypatch: pytest.MonkeyPatch, launcher: Callable[..., Any], batch: int, length: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Programs per sequence and constants of the decode kernel, for a batch of equal lengths."""
    recorder = Recorder()
    monkeypatch.setattr(decode, "decode_kernel", recorder)
    monkeypatch.setattr(decode, "merge_kernel", Recorder())
    cache = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    launcher(
        torch.zeros(batch, 32, 128, dtype=torch.bfloat16),
        cache,
        cache,
        torch.zeros(batch, 128, dtype=torch.int32),
        torch.full((batch,), length, dtype=torch.int32),
        scale=0.1,
    )
    ((grid, constants),) = recorder.launches
    assert grid[-1] == batch
    return grid[:-1], constants


def test_tiles_and_splits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decisions(monkeypatch, paged_decode, 1, 2048)
    assert expected[0] == (8, 4), "8 KV heads; four splits of 512 keys"
    for batch in (2, 8, 64, 256):
        for length in (0, 1, 100, 2048):
            assert decisions(monkeypatch, paged_decode, batch, length) == expected


def test_a_launcher_that_looks_at_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic of other libraries: more splits where there are few sequences."""

    def heuristic(q: torch.Tensor, *others: Any, **named: Any) -> Attention:
        return paged_decode(q, *others, split_size=128 if len(q) < 4 else 0, **named)

    small = decisions(monkeypatch, heuristic, 1, 2048)
    assert decisions(monkeypatch, heuristic, 8, 2048) != small


# What it refuses


def arguments() -> dict[str, Any]:
    problem = build(Case(kv_heads=2, group=2, lengths=(9, 4), queries=(1, 1)))
    return {
        "q": problem.q,
        "k_cache": problem.k_cache,
        "v_cache": problem.v_cache,
        "block_table": problem.block_table,
        "lengths": problem.lengths,
        "scale": 0.25,
        "tile_keys": 16,
        "split_size": 0,
    }


def room(*shape: int) -> Workspace:
    return Workspace(torch.zeros(shape), torch.zeros(shape[:3]))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 64)}, "q must be"),
    ({"q": torch.zeros(2, 3, 16)}, "3 query heads cannot share 2 KV heads"),
    ({"q": torch.zeros(2, 4, 17)}, "head size of k_cache is 16, that of q is 17"),
    ({"q": torch.zeros(2, 4, 16).double()}, "q must be float32, float16 or bfloat16"),
    ({"q": torch.zeros(2, 4, 16).half()}, "the cache must be torch.float16 as q is"),
    ({"k_cache": torch.zeros(5, 4, 16)}, "k_cache must be"),
    ({"v_cache": torch.zeros(5, 3, 2, 16)}, "differ before the head size"),
    ({"v_cache": torch.zeros(6, 4, 2, 16).half()}, "one dtype, please"),
    ({"v_cache": torch.zeros(6, 4, 2, 300)}, "head size 300 is not in 1..256"),
    ({"block_table": torch.zeros(3, 4).int()}, r"block_table must be \[2, entries\]"),
    ({"block_table": torch.zeros(2, 4)}, "block_table must be int32 or int64"),
    ({"block_table": torch.full((2, 4), 99)}, r"block_table\[0, 0\] is 99, which is not one of"),
    ({"lengths": torch.tensor([9])}, r"lengths must be \[2\]"),
    ({"lengths": torch.tensor([9.0, 4.0])}, "lengths must be int32 or int64"),
    ({"lengths": torch.tensor([9, 13])}, "sequence 1 has 13 keys, .* room for 12"),
    ({"lengths": torch.tensor([-1, 4])}, "sequence 0 has -1 keys"),
    ({"scale": float("nan")}, "scale must be finite"),
    ({"window": -1}, "window must be 0"),
    ({"softcap": -1.0}, "softcap must be 0"),
    ({"softcap": float("inf")}, "softcap must be 0"),
    ({"sinks": torch.zeros(3)}, r"sinks must be a floating-point tensor \[4\]"),
    ({"alibi": torch.zeros(4).int()}, "alibi must be a floating-point tensor"),
    ({"k_scale": 2.0}, "k_scale is given, but the cache is torch.float32"),
    ({"v_scale": float("inf")}, "v_scale must be finite"),
    ({"k_scale": torch.ones(3)}, "k_scale must be a number or a float32 tensor of 1 or 2"),
    ({"tile_keys": 8}, "tile_keys must be 16"),
    ({"tile_keys": 48}, "tile_keys must be 16"),
    ({"split_size": 24}, "split_size must be a multiple of the 16"),
    ({"split_size": -16}, "split_size must be a multiple"),
    ({"result": Attention(torch.zeros(2, 4, 15), torch.zeros(2, 4))}, "result.out must be"),
    ({"result": Attention(torch.zeros(2, 4, 16), torch.zeros(2, 4).half())}, "result.lse must be"),
    ({"workspace": room(2, 4, 1, 16)}, "a workspace is given, but split_size is 0"),
    (
        {"workspace": room(2, 4, 1, 15), "split_size": 16},
        r"workspace must be float32 \[2, 4, 1, 16\] and \[2, 4, 1\], not \[2, 4, 1, 15\]",
    ),
    ({"workspace": room(1, 4, 1, 16), "split_size": 16}, r"not \[1, 4, 1, 16\] and \[1, 4, 1\]"),
    ({"workspace": room(2, 4, 0, 16), "split_size": 16}, r"not \[2, 4, 0, 16\] and \[2, 4, 0\]"),
    ({"lengths": torch.tensor(9)}, r"lengths must be \[2\], not \[\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_decode(**(arguments() | change))


def test_the_arguments_above_are_right_without_the_change() -> None:
    assert paged_decode(**arguments()).out.isfinite().all()


def test_ids_that_the_window_has_passed_may_be_anything() -> None:
    """A freed block leaves the table: what stands in its place is not looked at."""
    given = arguments() | {"window": 2}
    given["block_table"] = given["block_table"].clone()
    given["block_table"][0, :1] = -1
    paged_decode(**given)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is -1"):
        paged_decode(**given | {"window": 0})
