"""Compile kernels for any GPU without one, and read in the result how fast they can be.

``compile_only`` turns each launch that a launcher makes, with tensors in host memory, into a
compilation with the very signature, specialisation and alignment hints of that launch.  What is
read from machine code needs the tools that Triton brings with it, and nothing else.

Needs a process in which Triton compiles, not interprets.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; ``shared_bytes`` is what one program may have of shared memory."""

    name: str
    backend: str
    arch: int | str
    lanes: int
    shared_bytes: int

    def for_triton(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.lanes)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 << 10),
        Target("sm_90", "cuda", 90, 32, 227 << 10),
        Target("sm_100", "cuda", 100, 32, 227 << 10),
        Target("sm_120", "cuda", 120, 32, 99 << 10),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10),
    )
}
"""A100; H100 and H200; B200; RTX 5090 and RTX PRO 6000; MI300.

Shared memory: CUDA C++ programming guide, table of technical specifications per compute
capability; CDNA3 instruction set architecture, 64 KiB of LDS.
"""


class _Driver:
    """Stands for the driver of a GPU that is not there; what a compilation asks, it answers."""

    def __init__(self, target: Target) -> None:
        self._target = target.for_triton()

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Compilation:
    """One launch: the kernel's name, and what came out, or why nothing did."""

    kernel: str
    compiled: Any = None
    error: str = ""


class Refused(Exception):
    """The compiler refused a kernel; the launcher that wanted to launch it cannot go on."""


@contextmanager
def compile_only(target: Target) -> Iterator[list[Compilation]]:
    """Within it, kernels are compiled for ``target`` instead of launched; yields what came out.

    Raises:
        Refused: From the launch, where the compiler refuses; the list holds the reason.
    """
    done: list[Compilation] = []
    before, run = getattr(driver, "_active", None), JITFunction.run

    def compile_(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.device_caches.clear()  # they know devices, not targets
        try:
            compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:
            done.append(Compilation(self.__name__, error=_innermost(error)))
            raise Refused(self.__name__) from error
        done.append(Compilation(self.__name__, compiled))
        return compiled

    driver.set_active(_Driver(target))
    JITFunction.run = compile_
    try:
        yield done
    finally:
        JITFunction.run = run
        driver._active = before


def _innermost(error: BaseException) -> str:
    """What the compiler says in the end, on one line: the error of the innermost helper."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@dataclass(frozen=True)
class Figures:
    """What is known of a compiled kernel without running it.

    Attributes:
        registers: Per thread; vector registers on AMD, accumulation registers included.
        spills: What does not fit into registers and goes to memory: bytes of stack per thread on
            NVIDIA, vector registers on AMD.
        shared: Bytes of shared memory of a program.
        buffers: Per tensor that the compiler loads ahead, how many tiles of it are in flight or
            in use at a time.
        load_bytes: Bytes that a thread loads at once: the least among the asynchronous copies
            into shared memory, or where there are none the size by which most is loaded.
        tensor_cores: Whether matrix instructions are used.
        scalar_spills: Scalar registers on AMD that are kept in lanes of vector registers; they
            do not go to memory.
    """

    registers: int
    spills: int
    shared: int
    buffers: tuple[int, ...] = field(default=())
    load_bytes: int = 0
    tensor_cores: bool = False
    scalar_spills: int = 0

    @property
    def pipeline_depth(self) -> int:
        """Tiles of the least buffered tensor; 1 where nothing is loaded ahead."""
        return min(self.buffers, default=1)


def figures(compiled: Any) -> Figures:
    """Read the figures of what ``compile_only`` yielded.

    Raises:
        RuntimeError: A tool or a field that they are read from is missing.
    """
    code = compiled.asm
    buffers = buffers_in(code["ttgir"])
    shared = int(compiled.metadata.shared)
    if "cubin" in code:
        registers, spills = nvidia_registers(resource_usage(code["cubin"]))
        ptx = code["ptx"]
        return Figures(
            *(registers, spills, shared, buffers, nvidia_load_bytes(ptx)),
            tensor_cores=bool(re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
        )
    assembly = code["amdgcn"]
    registers, spills, scalar_spills = amd_registers(assembly)
    return Figures(
        *(registers, spills, shared, buffers, amd_load_bytes(assembly)),
        tensor_cores="v_mfma_" in assembly,
        scalar_spills=scalar_spills,
    )


def buffers_in(ttgir: str) -> tuple[int, ...]:
    """Leading sizes of the buffers that Triton's pipeliner allocates: ``<3x64x128xbf16, ...>``.

    They are written to (``mutable``), have no initial value, and one dimension more than a tile.
    """
    pattern = r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x(\d+x\d+)x[^>]*mutable"
    return tuple(int(depth) for depth, _ in re.findall(pattern, ttgir))


def resource_usage(cubin: bytes) -> str:
    """What ``cuobjdump`` says of the resources of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60
        )
    if result.returncode:
        raise RuntimeError(f"cuobjdump: {result.stderr.strip()}")
    return result.stdout


def nvidia_registers(usage: str) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, per thread."""
    registers, stack, local = (
        int(_only(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def nvidia_load_bytes(ptx: str) -> int:
    """See ``Figures.load_bytes``."""
    copies = re.findall(
        r"cp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(\w+)", ptx
    )
    if copies:
        return min(int(size, 0) for size in copies)
    loads = re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[buf](\d+)\s", ptx)
    return _prevailing([int(count or 1) * int(bits) // 8 for count, bits in loads])


def _prevailing(sizes: list[int]) -> int:
    """The size by which most bytes are loaded, of several the least; 0 where there is none."""
    return min(sizes, key=lambda size: (-sizes.count(size) * size, size), default=0)


def amd_registers(assembly: str) -> tuple[int, int, int]:
    """Vector registers, accumulation registers included; spilled vector and scalar registers."""
    vector, spilled_vector, spilled_scalar = (
        int(_only(rf"\.{name}:\s*(\d+)", assembly))
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return vector, spilled_vector, spilled_scalar


def amd_load_bytes(assembly: str) -> int:
    """See ``Figures.load_bytes``."""
    sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "ubyte": 1}
    loads = re.findall(r"\b(?:buffer|global)_load_(\w+?)(?:_d16\w*)?\b", assembly)
    return _prevailing([sizes.get(kind, 2) for kind in loads])


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in what Triton {triton.__version__} compiled")
    return found[1]
