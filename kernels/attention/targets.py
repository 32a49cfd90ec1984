"""What the GPU that kernels are compiled for has room for."""

from __future__ import annotations

import triton

ROOMY = 128 * 1024
"""Bytes of shared memory: NVIDIA's data-centre GPUs have more, the others and CDNA 3 have less."""


def shared_memory() -> int:
    """Bytes of shared memory that one program may have on the current target; 0: interpreted."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # No driver: there is no GPU.
        return 0
    if target.backend == "hip":
        return 64 * 1024
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(int(target.arch), 99) * 1024


def is_amd() -> bool:
    """Whether the current target is one of AMD's: a second buffer does not pay for itself there."""
    return shared_memory() == 64 * 1024


def pipeline_stages() -> int:
    """Stages of a loop over keys; on NVIDIA three hold two tiles of K and of V in flight."""
    return 2 if is_amd() else 3
