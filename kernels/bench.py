"""How fast the kernels are on a GPU, against what its memory can do and against PyTorch.

* Decode is bound by memory: K and V of every sequence are read once.  Reported are the bytes of K
  and V per second, as a share of what a copy within the GPU's memory reaches (bytes read plus bytes
  written), measured in the same run; and the time that PyTorch's SDPA takes with K and V gathered
  into contiguous tensors beforehand, which is not counted.  SDPA has no float8: there it gets
  bfloat16, twice the bytes.
* Prefill is bound by arithmetic: reported are FLOP per second, two products of 2·D FLOP per query,
  visible key and query head; masked pairs do not count.

Times are medians.  Each repetition is one CUDA graph, so that Python's part does not count, and
before each the L2 cache is swept.  What does not fit into memory is left out and listed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TypeAlias

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.attention.decode import decode_workspace, paged_decode
from kvproof.kernels.attention.unified import paged_attention

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Seconds that one call takes."""

SCHEMA = 1
GOAL = 0.85
"""Share of the copy's bandwidth that decode is to reach, from ``GOAL_BATCH`` and
``GOAL_CONTEXT`` on."""
GOAL_BATCH, GOAL_CONTEXT = 8, 8 << 10

DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class NoGpu(RuntimeError):
    """There is nothing to measure on."""


@dataclass(frozen=True)
class Shape:
    """Sizes that all measurements share."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of so many tokens."""
        return 2 * tokens * self.kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True)
class DecodeResult:
    """One batch size and context length."""

    batch: int
    context: int
    dtype: str
    seconds: float
    bytes_per_second: float
    share_of_copy: float
    sdpa_seconds: float | None
    """None where gathered K and V do not fit into memory beside the cache."""

    @property
    def speedup(self) -> float | None:
        """How many times as long SDPA takes."""
        return None if self.sdpa_seconds is None else self.sdpa_seconds / self.seconds


@dataclass(frozen=True)
class PrefillResult:
    """``batch`` prompts of ``tokens`` each, none of it computed before."""

    batch: int
    tokens: int
    dtype: str
    seconds: float
    flops_per_second: float
    sdpa_seconds: float

    @property
    def speedup(self) -> float:
        """How many times as long SDPA takes."""
        return self.sdpa_seconds / self.seconds


@dataclass(frozen=True)
class Report:
    """All that a run has measured, and on what."""

    machine: dict[str, str]
    copy_bytes_per_second: float
    decode: tuple[DecodeResult, ...]
    prefill: tuple[PrefillResult, ...]
    left_out: tuple[str, ...]

    @property
    def goal_met(self) -> bool | None:
        """Whether every decode that the goal speaks of reaches it; None where none was measured."""
        shares = [
            result.share_of_copy
            for result in self.decode
            if result.batch >= GOAL_BATCH and result.context >= GOAL_CONTEXT
        ]
        return all(share >= GOAL for share in shares) if shares else None

    def as_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "decode": [{**asdict(r), "speedup": r.speedup} for r in self.decode],
            "prefill": [{**asdict(r), "speedup": r.speedup} for r in self.prefill],
            "left_out": list(self.left_out),
            "goal": {"share_of_copy": GOAL, "met": self.goal_met},
        }


def gpu_timer(repetitions: int = 20) -> Timer:
    """A timer on the current GPU: median of CUDA graphs between two events, L2 swept before each.

    Raises:
        NoGpu: There is none, or it is not from NVIDIA.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise NoGpu("bench measures on an NVIDIA GPU, and PyTorch sees none here")
    sweep = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def timer(call: Callable[[], object]) -> float:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and lets PyTorch choose its algorithms
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = []
        for _ in range(repetitions + 2):
            sweep.zero_()
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return float(median(times[2:]))

    return timer


def machine_of(device: str) -> dict[str, str]:
    """What the conditions of a measurement are."""
    found = {"torch": torch.__version__, "triton": triton.__version__, "device": device}
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
        asked = "driver_version,clocks.sm,clocks.mem,power.limit"
        result = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        found |= dict(zip(asked.split(","), result.stdout.strip().split(", "), strict=False))
    return found


def copy_bandwidth(timer: Timer, device: str, size: int = 4 << 30) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes within memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source))


@dataclass(frozen=True)
class Pool:
    """Sequences of equal length in a paged cache, their blocks in an order drawn at random."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    scale: torch.Tensor | None

    def gathered(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache as SDPA takes it: ``[B, KH, L, D]``, contiguous, bfloat16."""
        batch, width = self.block_table.shape
        rows = cache.view(torch.uint8).reshape(cache.shape[0], -1)
        blocks = rows.index_select(0, self.block_table.reshape(-1)).view(cache.dtype)
        whole = blocks.reshape(batch, width * cache.shape[1], *cache.shape[2:]).to(torch.bfloat16)
        return whole.transpose(1, 2).contiguous()


def make_pool(shape: Shape, batch: int, context: int, dtype: torch.dtype, device: str) -> Pool:
    """A pool filled with small random numbers; ``context`` is a multiple of the block size."""
    width = context // shape.block_size
    order = torch.randperm(batch * width, device=device)
    size = (batch * width, shape.block_size, shape.kv_heads, shape.head_size)
    caches = []
    for _ in range(2):
        cache = torch.empty(size, dtype=dtype, device=device)
        for start in range(0, len(cache), 1024):  # in parts: float32 would need four times as much
            part = cache[start : start + 1024]
            part.copy_(torch.randn(part.shape, device=device))
        caches.append(cache)
    table = order.reshape(batch, width).to(torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    scale = None if dtype.itemsize > 1 else torch.ones(shape.kv_heads, device=device)
    return Pool(caches[0], caches[1], table, lengths, scale)


def decode_call(shape: Shape, pool: Pool, query: torch.Tensor) -> Callable[[], Attention]:
    """The paged kernel, everything that it writes to allocated beforehand."""
    out = Attention(torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))
    workspace = decode_workspace(query, pool.v_cache, pool.block_table)
    scale = 1.0 if pool.scale is None else pool.scale
    return lambda: paged_decode(
        query,
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.lengths,
        scale=shape.head_size**-0.5,
        k_scale=scale,
        v_scale=scale,
        result=out,
        workspace=workspace,
    )


def sdpa_call(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = False
) -> Callable[[], torch.Tensor]:
    """PyTorch on ``[B, H, Q, D]`` and ``[B, KH, L, D]``."""
    return lambda: scaled_dot_product_attention(
        query, keys, values, is_causal=causal, enable_gqa=True
    )


def measure_decode(
    timer: Timer, shape: Shape, batch: int, context: int, dtype: str, device: str, copy: float
) -> DecodeResult:
    """Time the paged kernel and SDPA; ``copy`` is the copy's bandwidth."""
    pool = make_pool(shape, batch, context, DTYPES[dtype], device)
    query = torch.randn(batch, shape.heads, shape.head_size, device=device).bfloat16()
    seconds = timer(decode_call(shape, pool, query))
    moved = shape.kv_bytes(batch * context, DTYPES[dtype])
    sdpa_seconds = None
    if 3 * shape.kv_bytes(batch * context, torch.bfloat16) < free_bytes(device):
        gathered = pool.gathered(pool.k_cache), pool.gathered(pool.v_cache)
        sdpa_seconds = timer(sdpa_call(query[:, :, None], *gathered))
    rate = moved / seconds
    return DecodeResult(batch, context, dtype, seconds, rate, rate / copy, sdpa_seconds)


def measure_prefill(
    timer: Timer, shape: Shape, batch: int, tokens: int, device: str
) -> PrefillResult:
    """Time the unified kernel on whole prompts, and causal SDPA, both in bfloat16."""
    pool = make_pool(shape, batch, tokens, torch.bfloat16, device)
    query = torch.randn(batch * tokens, shape.heads, shape.head_size, device=device).bfloat16()
    starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    out = Attention(torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))
    seconds = timer(
        lambda: paged_attention(
            query,
            pool.k_cache,
            pool.v_cache,
            pool.block_table,
            starts,
            pool.lengths,
            scale=shape.head_size**-0.5,
            result=out,
        )
    )
    gathered = pool.gathered(pool.k_cache), pool.gathered(pool.v_cache)
    dense = query.reshape(batch, tokens, shape.heads, shape.head_size).transpose(1, 2).contiguous()
    sdpa_seconds = timer(sdpa_call(dense, *gathered, causal=True))
    flops = prefill_flops(shape, batch, tokens)
    return PrefillResult(batch, tokens, "bf16", seconds, flops / seconds, sdpa_seconds)


def prefill_flops(shape: Shape, batch: int, tokens: int) -> int:
    """FLOP of causal attention: per pair of a query and a key that it sees 4·D for each head."""
    pairs = batch * tokens * (tokens + 1) // 2
    return 4 * shape.head_size * shape.heads * pairs


def free_bytes(device: str) -> int:
    """Memory that is free; on a CPU as much as a small test needs."""
    if not device.startswith("cuda"):
        return 1 << 30
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def run(
    timer: Timer,
    *,
    device: str = "cuda",
    shape: Shape = Shape(),
    batches: Sequence[int] = (1, 8, 64, 256),
    contexts: Sequence[int] = (1 << 10, 8 << 10, 32 << 10, 128 << 10),
    dtypes: Iterable[str] = tuple(DTYPES),
    prompts: Iterable[tuple[int, int]] = ((1, 2048), (8, 2048), (1, 8192), (1, 32768)),
    copy_bytes: int = 4 << 30,
    on_result: Callable[[DecodeResult | PrefillResult], None] = lambda result: None,
) -> Report:
    """Measure decode for every batch, context and dtype that fits, then prefill."""
    copy = copy_bandwidth(timer, device, copy_bytes)
    decode: list[DecodeResult] = []
    left_out: list[str] = []
    for dtype, batch, context in _grid(dtypes, batches, contexts):
        needed = shape.kv_bytes(batch * context, DTYPES[dtype])
        if needed > 0.9 * free_bytes(device):
            left_out.append(f"decode, {dtype}, batch {batch}, context {context}: {needed:,} bytes")
            continue
        decode.append(measure_decode(timer, shape, batch, context, dtype, device, copy))
        on_result(decode[-1])
    prefill: list[PrefillResult] = []
    for batch, tokens in prompts:
        prefill.append(measure_prefill(timer, shape, batch, tokens, device))
        on_result(prefill[-1])
    return Report(machine_of(device), copy, tuple(decode), tuple(prefill), tuple(left_out))


def _grid(
    dtypes: Iterable[str], batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    for dtype in dtypes:
        for batch in batches:
            for context in contexts:
                yield dtype, batch, context


def table(report: Report) -> str:
    """The report as Markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    lines = [
        f"Measured on: {machine}.",
        f"A copy within memory: {report.copy_bytes_per_second / 1e9:,.0f} GB/s, read and written.",
        "",
        "| decode | batch | context | µs | GB/s of K and V | of the copy | SDPA takes |",
        "|---|---|---|---|---|---|---|",
    ]
    for d in report.decode:
        speedup = "does not fit" if d.speedup is None else f"{d.speedup:.2f} times as long"
        lines.append(
            f"| {d.dtype} | {d.batch} | {d.context:,} | {d.seconds * 1e6:,.1f} | "
            f"{d.bytes_per_second / 1e9:,.0f} | {d.share_of_copy:.0%} | {speedup} |"
        )
    lines += [
        "",
        "| prefill | batch | tokens | ms | TFLOP/s | SDPA takes |",
        "|---|---|---|---|---|---|",
    ]
    for p in report.prefill:
        lines.append(
            f"| {p.dtype} | {p.batch} | {p.tokens:,} | {p.seconds * 1e3:,.2f} | "
            f"{p.flops_per_second / 1e12:,.0f} | {p.speedup:.2f} times as long |"
        )
    lines += ["", *(f"Left out, for it does not fit: {what}." for what in report.left_out)]
    verdict = {True: "met", False: "not met", None: "not measured"}[report.goal_met]
    lines.append(
        f"Goal, decode from batch {GOAL_BATCH} and context {GOAL_CONTEXT:,} on at {GOAL:.0%} of "
        f"the copy: {verdict}."
    )
    return "\n".join(lines)
