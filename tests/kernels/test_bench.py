"""The benchmark, without a GPU: its arithmetic, what it runs, its table, and its refusal.

A timer that says what it is told stands for the GPU's.  What is timed is checked, too: the calls
compute what they should.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from kvproof.kernels.attention.arguments import Features
from kvproof.kernels.bench import (
    DecodeResult,
    NoGpu,
    Report,
    Shape,
    copy_bandwidth,
    decode_call,
    gpu_timer,
    make_pool,
    measure_decode,
    measure_prefill,
    prefill_flops,
    run,
    sdpa_call,
    table,
)
from kvproof.kernels.bounds import hold_to_bound
from kvproof.kernels.problem import Problem
from kvproof.kernels.reference import dense

SMALL = Shape(heads=4, kv_heads=2, head_size=16, block_size=4)


class Clock:
    """A timer that runs each call once and says the seconds that it is told to."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.results: list[object] = []

    def __call__(self, call: Callable[[], object]) -> float:
        self.results.append(call())
        return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def test_a_copy_counts_what_is_read_and_what_is_written() -> None:
    assert copy_bandwidth(Clock(0.5), "cpu", 1000) == 2 * 1000 / 0.5


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bf16", 2), ("e4m3", 1)])
def test_decode_counts_the_bytes_of_k_and_v(dtype: str, item_bytes: int) -> None:
    result = measure_decode(Clock(0.25, 0.75), SMALL, 3, 8, dtype, "cpu", copy=1e5)
    moved = 2 * 3 * 8 * SMALL.kv_heads * SMALL.head_size * item_bytes
    assert result.bytes_per_second == moved / 0.25
    assert result.share_of_copy == pytest.approx(moved / 0.25 / 1e5)
    assert result.speedup == 3.0


def test_prefill_counts_visible_pairs_only() -> None:
    # Three tokens see 1 + 2 + 3 keys; a product of D numbers takes 2·D FLOP, and there are two.
    assert prefill_flops(SMALL, 1, 3) == 6 * 2 * 2 * 16 * 4
    result = measure_prefill(Clock(0.5, 2.0), SMALL, 2, 8, "cpu")
    assert result.flops_per_second == prefill_flops(SMALL, 2, 8) / 0.5
    assert result.speedup == 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_timed_is_right(dtype) -> None:
    torch.manual_seed(1)
    pool = make_pool(SMALL, 2, 12, dtype, "cpu")
    query = torch.randn(2, SMALL.heads, SMALL.head_size).bfloat16()
    problem = Problem(
        "decode",
        query,
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        torch.arange(3, dtype=torch.int32),
        pool.lengths,
        Features(SMALL.head_size**-0.5),
        tile_keys=64,
    )
    hold_to_bound(problem, decode_call(SMALL, pool, query)())
    keys, values = pool.gathered(pool.k_cache), pool.gathered(pool.v_cache)
    out = sdpa_call(query[:, :, None].double(), keys.double(), values.double())()
    torch.testing.assert_close(out[:, :, 0], dense(problem).out, rtol=1e-12, atol=1e-12)


def test_every_block_of_a_pool_is_used_once() -> None:
    pool = make_pool(SMALL, 3, 8, torch.bfloat16, "cpu")
    assert sorted(pool.block_table.flatten().tolist()) == list(range(6))
    assert pool.k_cache.float().std() > 0.5


def whole_run(clock: Clock, **named) -> Report:
    sizes = {"batches": (1, 8), "contexts": (8, 16), "prompts": ((1, 8),), "copy_bytes": 64}
    return run(clock, device="cpu", shape=SMALL, **{**sizes, **named})


def test_a_run_measures_all_that_fits() -> None:
    heard: list[object] = []
    report = whole_run(Clock(0.5), on_result=heard.append)
    sizes = [(d.dtype, d.batch, d.context) for d in report.decode]
    expected = [(t, b, c) for t in ("bf16", "e4m3") for b in (1, 8) for c in (8, 16)]
    assert sizes == expected
    assert len(heard) == len(expected) + 1
    assert report.copy_bytes_per_second == 2 * 64 / 0.5
    assert report.machine["device"] == "cpu"
    assert report.left_out == ()


def test_what_does_not_fit_is_left_out_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = SMALL.kv_bytes(8 * 16, torch.bfloat16)
    monkeypatch.setattr("kvproof.kernels.bench.free_bytes", lambda device: needed)
    report = whole_run(Clock(0.5))
    assert report.left_out == (f"decode, bf16, batch 8, context 16: {needed:,} bytes",)
    assert len(report.decode) == 7
    largest = next(d for d in report.decode if (d.dtype, d.batch, d.context) == ("e4m3", 8, 16))
    assert largest.sdpa_seconds is None
    assert largest.speedup is None
    assert "does not fit" in table(report)


def report_of(*shares: tuple[int, int, float]) -> Report:
    decode = tuple(
        DecodeResult(batch, context, "bf16", 1e-3, share * 4e12, share, 2e-3)
        for batch, context, share in shares
    )
    return Report({"device": "a GPU"}, 4e12, decode, (), ())


@pytest.mark.parametrize(
    ("shares", "met"),
    [
        ([(8, 8192, 0.86), (64, 32768, 0.85)], True),
        ([(8, 8192, 0.86), (64, 32768, 0.84)], False),
        ([(1, 8192, 0.1), (8, 1024, 0.1), (8, 8192, 0.9)], True),
        ([(1, 8192, 0.9), (8, 1024, 0.9)], None),
    ],
)
def test_the_goal_speaks_of_large_batches_and_contexts(shares, met: bool | None) -> None:
    assert report_of(*shares).goal_met is met


def test_the_table() -> None:
    lines = table(report_of((8, 8192, 0.9))).splitlines()
    assert lines[0] == "Measured on: device a GPU."
    assert lines[1] == "A copy within memory: 4,000 GB/s, read and written."
    assert "| bf16 | 8 | 8,192 | 1,000.0 | 3,600 | 90% | 2.00 times as long |" in lines
    assert lines[-1].endswith("at 85% of the copy: met.")


def test_the_json_is_json_with_a_schema() -> None:
    document = json.loads(json.dumps(whole_run(Clock(0.5)).as_json()))
    assert document["schema"] == 1
    assert document["goal"] == {"share_of_copy": 0.85, "met": None}
    assert document["decode"][0].keys() >= {"bytes_per_second", "share_of_copy", "speedup"}
    assert document["prefill"][0].keys() >= {"flops_per_second", "speedup"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(NoGpu, match="PyTorch sees none here"):
        gpu_timer()
