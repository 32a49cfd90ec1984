"""Every kernel of the project for every target, dtype and set of features, and what is demanded.

Demanded of each: it compiles and fits into the target's shared memory, spills nothing, loads K and
V by 16 bytes at a time, multiplies on tensor cores, and, on sm_90, holds two tiles of K and of V.
What is excepted stands in ``EXCEPTIONS``, each with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from kvproof.kernels.attention.decode import paged_decode
from kvproof.kernels.attention.mla import mla_decode
from kvproof.kernels.attention.unified import paged_attention
from kvproof.kernels.cache import copy_blocks, write_kv
from kvproof.kernels.compiling import TARGETS, Compilation, Figures, Refused, Target, compile_only
from kvproof.kernels.compiling import figures as figures_of

SCHEMA = 1

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
"""Of the cache; queries of a float8 cache are bfloat16."""


@dataclass(frozen=True)
class Features:
    """A set of features, compiled together.  ``heads`` are query heads and KV heads."""

    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    heads_first: bool = False
    window: int = 0
    everything: bool = False


FEATURES: dict[str, Features] = {
    "plain": Features(),
    "all": Features(window=1000, everything=True),
    "wide": Features(heads=(8, 1), head_size=256, block_size=64),
    "odd": Features(heads=(6, 6), head_size=80, block_size=1, heads_first=True),
}
"""``all``: window, softcap, sinks, ALiBi and scales per head; ``wide``: MQA; ``odd``: MHA, HND."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel, its figures (None where it was refused), and what is wrong with it."""

    kernel: str
    target: str
    dtype: str
    features: str
    figures: Figures | None
    problems: tuple[str, ...]
    note: str
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        """The keys that tools rely on (design, section 7), and more; 0 where it was refused."""
        known = self.figures or Figures(0, 0, 0)
        return {
            "kernel": self.kernel,
            "target": self.target,
            "dtype": self.dtype,
            "features": self.features,
            **{k: v for k, v in asdict(known).items() if k != "buffers"},
            "buffers": list(known.buffers),
            "pipeline_depth": known.pipeline_depth,
            "ok": self.ok,
            "problems": list(self.problems),
            "note": self.note,
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True)
class Excepted:
    """What is not demanded: of variants that match (an empty set matches all), and why."""

    demand: str
    reason: str
    kernels: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def covers(self, demand: str, kernel: str, target: str, dtype: str, features: str) -> bool:
        chosen = (
            (self.kernels, kernel),
            (self.targets, target),
            (self.dtypes, dtype),
            (self.features, features),
        )
        return demand == self.demand and all(not some or one in some for some, one in chosen)


ATTENTION = frozenset(("decode_kernel", "unified_kernel", "mla_kernel"))

FEW_BYTES = 72
"""Of stack a thread: an exception for spills covers no more."""

EXCEPTIONS: tuple[Excepted, ...] = (
    Excepted(
        "compiles",
        "sm_80 has no e4m3 conversion",
        targets=frozenset(("sm_80",)),
        dtypes=frozenset(("e4m3",)),
    ),
    Excepted(
        "16-byte loads",
        "V of a float8 cache by 8 bytes: so Triton lays out the second operand of a product",
        kernels=frozenset(("decode_kernel", "unified_kernel")),
        targets=frozenset(("sm_80", "sm_90", "sm_100", "sm_120")),
        dtypes=frozenset(("e4m3", "e5m2")),
    ),
    Excepted(
        "16-byte loads",
        "a tile of 32 float8 keys has 8 bytes for each of 512 threads",
        kernels=frozenset(("unified_kernel",)),
        targets=frozenset(("gfx942",)),
        dtypes=frozenset(("e4m3", "e5m2")),
    ),
    Excepted(
        "no spills",
        "255 registers and a few bytes that are left over",
        kernels=frozenset(("unified_kernel",)),
        targets=frozenset(("sm_80",)),
    ),
    Excepted(
        "no spills",
        "255 registers, 512 latent numbers a row, and a few bytes that are left over",
        kernels=frozenset(("mla_kernel",)),
        targets=frozenset(("sm_100", "sm_120")),
        dtypes=frozenset(("e4m3", "e5m2")),
    ),
    Excepted(
        "no spills",
        "ptxas keeps 16 bytes on the stack although registers are free",
        kernels=frozenset(("unified_kernel",)),
        targets=frozenset(("sm_100",)),
        dtypes=frozenset(("fp32",)),
        features=frozenset(("odd",)),
    ),
    Excepted(
        "no spills",
        "ptxas keeps 8 bytes on the stack at 128 registers",
        kernels=frozenset(("decode_kernel",)),
        targets=frozenset(("sm_100",)),
        dtypes=frozenset(("e5m2",)),
        features=frozenset(("plain",)),
    ),
    Excepted(
        "tensor cores",
        "float32 is multiplied exactly, as input_precision='ieee' demands",
        dtypes=frozenset(("fp32",)),
    ),
)


def launches() -> dict[str, Callable[[str, Features], None]]:
    """Per launcher: a function that calls it once with tensors of a dtype and features."""
    return {
        "decode": _launch_decode,
        "unified": _launch_unified,
        "mla": _launch_mla,
        "write": _launch_write,
        "copy": _launch_copy,
    }


def _query_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype in ("e4m3", "e5m2") else DTYPES[dtype]


def _cache(features: Features, dtype: str) -> torch.Tensor:
    blocks, slots, heads = 2048 // features.block_size, features.block_size, features.heads[1]
    if features.heads_first:
        shape = (blocks, heads, slots, features.head_size)
        return torch.zeros(shape, dtype=DTYPES[dtype]).transpose(1, 2)
    return torch.zeros((blocks, slots, heads, features.head_size), dtype=DTYPES[dtype])


def _table(features: Features, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for 2,048 keys each, so that the keys are split."""
    table = torch.zeros((sequences, 2048 // features.block_size), dtype=torch.int32)
    return table, torch.full((sequences,), 2000, dtype=torch.int32)


def _options(features: Features, dtype: str) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": 0.1, "window": features.window}
    if features.everything:
        heads = features.heads[0]
        options |= {"softcap": 30.0, "sinks": torch.zeros(heads), "alibi": torch.zeros(heads)}
    if dtype in ("e4m3", "e5m2"):
        scale: Any = 0.5
        if features.everything:
            scale = torch.full((features.heads[1],), 0.5)
        options |= {"k_scale": scale, "v_scale": scale}
    return options


def _launch_decode(dtype: str, features: Features) -> None:
    query = torch.zeros((2, features.heads[0], features.head_size), dtype=_query_dtype(dtype))
    keys, values = _cache(features, dtype), _cache(features, dtype)
    paged_decode(query, keys, values, *_table(features, 2), **_options(features, dtype))


def _launch_unified(dtype: str, features: Features) -> None:
    query = torch.zeros((40, features.heads[0], features.head_size), dtype=_query_dtype(dtype))
    keys, values = _cache(features, dtype), _cache(features, dtype)
    table, lengths = _table(features, 2)
    starts = torch.tensor([0, 39, 40], dtype=torch.int32)
    paged_attention(query, keys, values, table, starts, lengths, **_options(features, dtype))


def _launch_mla(dtype: str, features: Features) -> None:
    query = torch.zeros((2, 16, 576), dtype=_query_dtype(dtype))
    cache = torch.zeros((2048 // features.block_size, features.block_size, 576))
    scale = 0.5 if dtype in ("e4m3", "e5m2") else 1.0
    mla_decode(
        query,
        cache.to(DTYPES[dtype]),
        *_table(features, 2),
        latent_size=512,
        scale=0.1,
        cache_scale=scale,
    )


def _launch_write(dtype: str, features: Features) -> None:
    new = torch.zeros((4, features.heads[1], features.head_size), dtype=_query_dtype(dtype))
    scale: Any = 0.5 if dtype in ("e4m3", "e5m2") else 1.0
    cache, slots = _cache(features, dtype), torch.arange(4)
    write_kv(new, new, cache, cache.clone(), slots, k_scale=scale, v_scale=scale)


def _launch_copy(dtype: str, features: Features) -> None:
    copy_blocks(_cache(features, dtype), torch.tensor([0, 1]), torch.tensor([2, 3]))


FEATURES_OF: Mapping[str, tuple[str, ...]] = {
    "decode": tuple(FEATURES),
    "unified": tuple(FEATURES),
    "mla": ("plain",),
    "write": ("plain", "odd"),
    "copy": ("plain", "odd"),
}


def compile_variants(
    *,
    kernels: Iterable[str] = tuple(FEATURES_OF),
    targets: Iterable[str] = tuple(TARGETS),
    dtypes: Iterable[str] = tuple(DTYPES),
    features: Iterable[str] = tuple(FEATURES),
) -> Iterator[Variant]:
    """Compile every combination, one after the other; what a launch shares with one before is
    told once."""
    wanted = set(features)
    told: set[tuple[str, str]] = set()
    for kernel in kernels:
        for dtype in dtypes:
            for feature in (name for name in FEATURES_OF[kernel] if name in wanted):
                for target in targets:
                    yield from _compile(kernel, TARGETS[target], dtype, feature, told)


def _compile(
    launcher: str, target: Target, dtype: str, feature: str, told: set[tuple[str, str]]
) -> Iterator[Variant]:
    start = time.perf_counter()
    compilations: list[Compilation] = []
    try:
        with compile_only(target) as compilations:
            launches()[launcher](dtype, FEATURES[feature])
    except Refused:
        pass  # the last of the compilations says why
    seconds = time.perf_counter() - start
    for compilation in compilations:
        if compilation.compiled is not None:
            identity = (target.name, str(compilation.compiled.hash))
            if identity in told:
                continue
            told.add(identity)
        yield judged(compilation, target, dtype, feature, seconds / len(compilations))


def judged(
    compilation: Compilation, target: Target, dtype: str, feature: str, seconds: float
) -> Variant:
    """Hold a compilation against the demands."""
    compiled = compilation.compiled
    figures = None if compiled is None else figures_of(compiled)
    failed = dict(unmet(compilation.kernel, target, figures, compilation.error))
    notes = [] if figures else [compilation.error]
    for demand in list(failed):
        for exception in EXCEPTIONS:
            if exception.covers(demand, compilation.kernel, target.name, dtype, feature):
                notes.append(exception.reason)
                failed.pop(demand, None)
    return Variant(
        *(compilation.kernel, target.name, dtype, feature, figures),
        tuple(failed.values()),
        "; ".join(dict.fromkeys(notes)),
        seconds,
    )


def unmet(
    kernel: str, target: Target, figures: Figures | None, error: str
) -> Iterator[tuple[str, str]]:
    """Demands that are not met, each with what is wrong."""
    if figures is None:
        yield "compiles", f"does not compile: {error}"
        return
    if figures.shared > target.shared_bytes:
        yield "fits", f"{figures.shared:,} bytes of shared memory of {target.shared_bytes:,}"
    if figures.spills:
        unit = "spilled registers" if target.backend == "hip" else "bytes of stack a thread"
        demand = "few spills" if figures.spills > FEW_BYTES else "no spills"
        yield demand, f"{figures.spills} {unit}"
    if kernel not in ATTENTION:
        return
    if figures.load_bytes < 16:
        demand = "16-byte loads" if figures.load_bytes >= 8 else "8-byte loads"
        yield demand, f"loads {figures.load_bytes} bytes at a time"
    if not figures.tensor_cores:
        yield "tensor cores", "no matrix instructions"
    buffered = 1 if kernel == "mla_kernel" else 2  # latent attention keeps V within K
    if target.name == "sm_90" and (len(figures.buffers) < buffered or figures.pipeline_depth < 2):
        yield "two tiles in flight", f"buffers of K and V: {list(figures.buffers)}"


def as_json(variants: Iterable[Variant]) -> dict[str, object]:
    """The whole as ``kvproof kernels compile --json`` prints it."""
    told = [variant.as_json() for variant in variants]
    return {
        "schema": SCHEMA,
        "triton": triton.__version__,
        "verdict": "pass" if all(variant["ok"] for variant in told) else "fail",
        "variants": told,
    }


def table(variants: Iterable[Variant]) -> str:
    """One line each, with what is wrong in the last column."""
    sizes = ("registers", "spills", "shared", "depth", "load")
    rows = [("kernel", "target", "dtype", "features", *sizes, "")]
    for variant in variants:
        figures = variant.figures
        numbers = ("-",) * 5
        if figures is not None:
            numbers = (
                str(figures.registers),
                str(figures.spills),
                f"{figures.shared:,}",
                str(figures.pipeline_depth),
                f"{figures.load_bytes} B",
            )
        remarks = "; ".join(variant.problems) or f"ok {f'({variant.note})' if variant.note else ''}"
        rows.append(
            (variant.kernel, variant.target, variant.dtype, variant.features, *numbers, remarks)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
