"""Run by ``test_compiling`` in a process of its own: compiles kernels with planted faults.

Prints, as JSON, what the compile check says of each.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from kvproof.kernels.compiling import TARGETS, Refused, compile_only, figures
from kvproof.kernels.mutants import Mutant, planted
from kvproof.kernels.variants import judged


@triton.jit
def many_registers_kernel(source, target, n, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    other = tl.zeros((N, N), tl.float32)
    for step in range(n):
        tile = tl.load(source + step + at)
        total += tile * tl.sum(other)
        other += tile * tl.sum(total)
    tl.store(target + at, total + other)


@triton.jit
def break_kernel(source, target, n):
    total = 0.0
    for step in range(n):
        if step > 3:
            break
        total += tl.load(source + step)
    tl.store(target, total)


@triton.jit
def sound_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at))


IN_THE_LOOP = Mutant(
    "block-ids-loaded-in-the-loop",
    "attention/decode",
    "decode_kernel",
    ("decode",),
    (
        (
            "        slot = (key % BLOCK_SIZE).to(tl.int64)\n",
            "        slot = (key % BLOCK_SIZE).to(tl.int64)\n"
            "        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_key, other=0)\n",
        ),
        (
            "        block = tl.load(table_ptr + key_ahead // BLOCK_SIZE, "
            "mask=key_ahead < end, other=0)\n",
            "",
        ),
    ),
    frozenset(),
    "the reference's measurement: K and V are then held once",
)


def launch_decode(problem_module, stride: int = 1) -> None:
    cache = torch.zeros((64, 16, 8, 128 * stride), dtype=torch.bfloat16)[..., ::stride]
    sys.modules[problem_module.paged_decode.__module__].paged_decode(
        torch.zeros((2, 32, 128), dtype=torch.bfloat16),
        cache,
        cache.clone() if stride == 1 else cache,
        torch.zeros((2, 64), dtype=torch.int32),
        torch.tensor([900, 900], dtype=torch.int32),
        scale=0.1,
    )


def problems_of(mutant: Mutant | None, stride: int = 1) -> list[str]:
    target = TARGETS["sm_90"]
    with planted(mutant) as modules, compile_only(target) as compilations:
        launch_decode(modules.problem, stride)
    variant = judged(compilations[0], target, "bf16", "plain", 0.0)
    return list(variant.problems)


def main() -> None:
    source, target = torch.zeros(1 << 15), torch.zeros(1 << 15)
    found: dict[str, object] = {}
    with compile_only(TARGETS["sm_90"]) as compilations:
        many_registers_kernel[(1,)](source, target, 4, 128, num_warps=2)
        sound_kernel[(1,)](source, target, 64)
        try:
            break_kernel[(1,)](source, target, 9)
        except Refused as refused:
            found["refused"] = str(refused)
    found["spills"], found["no spills"] = (figures(c.compiled).spills for c in compilations[:2])
    found["error"] = compilations[2].error
    with compile_only(TARGETS["gfx942"]) as compilations:
        many_registers_kernel[(1,)](source, target, 4, 128, num_warps=1)
        sound_kernel[(1,)](source, target, 64)
    found["amd spills"], found["amd no spills"] = (figures(c.compiled).spills for c in compilations)
    found["sound"] = problems_of(None)
    found["in the loop"] = problems_of(IN_THE_LOOP)
    found["strided"] = problems_of(None, stride=2)
    print(json.dumps(found))


main()
