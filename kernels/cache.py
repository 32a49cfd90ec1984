"""What moves keys and values: writing them into slots, and copying whole blocks.

Copying is by bits: a NaN keeps its payload, a float8 its pattern.
"""

# Annotations stay objects in modules with kernels: Triton's interpreter reads `tl.constexpr` there.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvproof.kernels.attention.arguments import (
    FLOAT8_DTYPES,
    Scale,
    check_dtypes,
    check_scales,
    is_one,
    power_of_two,
    require,
    same_device,
)

COPY_ELEMENTS = 4096
"""Elements that a program of the copy moves: 16 bytes for each of 128 threads, and more."""


@triton.jit
def write_kernel(
    cache_ptr,
    source_ptr,
    slots_ptr,
    factor_ptr,
    stride_block,
    stride_slot,
    stride_head,
    stride_dim,
    stride_source_token,
    stride_source_head,
    stride_source_dim,
    stride_factor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """All heads of one token into its slot, quantised where the cache is float8 (LARGEST > 0)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, TILE_HEADS).to(tl.int64)
    dim = tl.arange(0, TILE_DIMS).to(tl.int64)
    is_element = (head < HEADS)[:, None] & (dim < HEAD_SIZE)[None, :]
    x = tl.load(
        source_ptr
        + token * stride_source_token
        + head[:, None] * stride_source_head
        + dim[None, :] * stride_source_dim,
        mask=is_element,
        other=0.0,
    )
    if LARGEST > 0:
        x = x.to(tl.float32)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + head * stride_factor, mask=head < HEADS, other=1.0)
            x *= factor[:, None]
        # Without clamping, a value past the largest would become NaN on one GPU, and infinite,
        # or the largest, on another.  NaN itself stays: comparisons with it are false.
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    tl.store(
        cache_ptr
        + (slot // BLOCK_SIZE) * stride_block
        + (slot % BLOCK_SIZE) * stride_slot
        + head[:, None] * stride_head
        + dim[None, :] * stride_dim,
        x.to(cache_ptr.dtype.element_ty),
        mask=is_element,
    )


@triton.jit
def copy_kernel(
    target_ptr,
    source_ptr,
    target_ids_ptr,
    source_ids_ptr,
    stride_target_block,
    stride_target_slot,
    stride_target_head,
    stride_target_dim,
    stride_source_block,
    stride_source_slot,
    stride_source_head,
    stride_source_dim,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
):
    """A tile of rows (a slot's head each) of one block; without ids the n-th block is block n."""
    copy = tl.program_id(0).to(tl.int64)
    target = copy
    source = copy
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + copy).to(tl.int64)
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + copy).to(tl.int64)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slot = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    dim = tl.arange(0, TILE_DIMS).to(tl.int64)
    is_element = (row < ROWS)[:, None] & (dim < HEAD_SIZE)[None, :]
    x = tl.load(
        source_ptr
        + source * stride_source_block
        + (slot * stride_source_slot + head * stride_source_head)[:, None]
        + dim[None, :] * stride_source_dim,
        mask=is_element,
        other=0,
    )
    tl.store(
        target_ptr
        + target * stride_target_block
        + (slot * stride_target_slot + head * stride_target_head)[:, None]
        + dim[None, :] * stride_target_dim,
        x,
        mask=is_element,
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Write the keys and values of T tokens into their slots, and touch no other.

    Args:
        key: ``[T, KH, D]``, float32, float16 or bfloat16; ``value``: ``[T, KH, DV]``.
        k_cache, v_cache: ``[N, BS, KH, D]`` and ``[N, BS, KH, DV]`` of any strides, of the dtype
            of ``key``, or float8: then what is written is the number divided by the scale (exactly:
            times the float32 reciprocal of the scale), clamped to the largest finite number,
            rounded to nearest even.
        slots: ``[T]``, int32 or int64: block id times BS plus the place in the block, all
            different; a negative one is padding, and its token is left out.
        k_scale, v_scale: see ``Scale``.

    Raises:
        ValueError: an argument is not as said above.
    """
    check_scales(k_cache, k_cache.shape[2], k_scale=k_scale, v_scale=v_scale)
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        _write_one(source, cache, slots, scale)


def _write_one(
    source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: Scale
) -> None:
    require(
        source.dim() == 3 and cache.dim() == 4 and source.shape[1:] == cache.shape[2:],
        f"tokens {list(source.shape)} do not fit into a cache {list(cache.shape)}",
    )
    check_dtypes(source, cache)
    tokens, heads, head_size = source.shape
    _check_slots(slots, tokens, cache.shape[0] * cache.shape[1])
    same_device(source, slots)
    if tokens == 0:
        return
    factor = None if is_one(scale) else reciprocal(scale, heads, source.device)
    largest = torch.finfo(cache.dtype).max if cache.dtype in FLOAT8_DTYPES else 0.0
    write_kernel[(tokens,)](
        cache,
        source,
        slots,
        factor,
        *cache.stride(),
        *source.stride(),
        0 if factor is None else factor.stride(0),
        BLOCK_SIZE=cache.shape[1],
        HEADS=heads,
        HEAD_SIZE=head_size,
        TILE_HEADS=1 << (heads - 1).bit_length(),
        TILE_DIMS=power_of_two(head_size),
        LARGEST=largest,
        num_warps=4,
    )


def _check_slots(slots: torch.Tensor, tokens: int, room: int) -> None:
    require(
        tuple(slots.shape) == (tokens,) and slots.dtype in (torch.int32, torch.int64),
        f"slots must be int32 or int64 [{tokens}], not {slots.dtype} {list(slots.shape)}",
    )
    if slots.device.type == "cpu":
        used = [slot for slot in slots.tolist() if slot >= 0]
        require(all(slot < room for slot in used), f"a slot of {used} is not below {room}")
        require(len(set(used)) == len(used), f"two tokens share a slot: {sorted(used)}")


def reciprocal(scale: Scale, heads: int, device: torch.device) -> torch.Tensor:
    """1 / scale in float32, ``[heads]``: one rounding, the same on every device."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=device)
    return (1.0 / scale).reshape(-1).expand(heads)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks of ``cache`` ``[N, BS, KH, D]`` onto others of it (copy-on-write).

    ``sources`` and ``targets`` are block ids ``[M]``.  A block may be copied to several; no target
    may appear twice or be a source, for the copies run in no order.  Raises a ValueError otherwise.
    """
    _check_ids(cache, sources, targets)
    if sources.device.type == "cpu":
        both = set(sources.tolist()) & set(targets.tolist())
        require(not both, f"blocks {sorted(both)} are source and target at once")
    _copy(cache, cache, targets, sources)


def gather_blocks(
    cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor | None = None
) -> torch.Tensor:
    """Blocks of ``cache``, one after the other: ``[M, BS, KH, D]`` (to be offloaded).

    Raises a ValueError for ids that are not block ids, or a ``staging`` that does not fit.
    """
    if staging is None:
        staging = torch.empty(
            (blocks.numel(), *cache.shape[1:]), dtype=cache.dtype, device=cache.device
        )
    _check_staging(cache, blocks, staging)
    _copy(staging, cache, None, blocks)
    return staging


def scatter_blocks(staging: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """What ``gather_blocks`` returned, back into blocks of ``cache``, no block twice."""
    _check_staging(cache, blocks, staging)
    _check_ids(cache, blocks, blocks)
    _copy(cache, staging, blocks, None)


def _check_staging(cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    _check_ids(cache, blocks)
    require(
        staging.shape == (blocks.numel(), *cache.shape[1:]) and staging.dtype == cache.dtype,
        f"staging is {staging.dtype} {list(staging.shape)}, {blocks.numel()} blocks of the cache "
        f"are {cache.dtype} {[blocks.numel(), *cache.shape[1:]]}",
    )


def _check_ids(
    cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor | None = None
) -> None:
    require(
        cache.dim() == 4,
        f"the cache must be [blocks, block size, KV heads, head size], not {list(cache.shape)}",
    )
    for ids in (sources, *(() if targets is None else (targets,))):
        require(
            ids.shape == sources.shape and ids.dim() == 1,
            f"block ids must be [M] and of one length, not {list(ids.shape)}",
        )
        require(ids.dtype in (torch.int32, torch.int64), f"block ids are {ids.dtype}")
        if ids.device.type == "cpu":
            _check_range(ids.tolist(), cache.shape[0])
    if targets is not None and targets.device.type == "cpu":
        require(
            len(set(targets.tolist())) == targets.numel(), f"a target twice: {targets.tolist()}"
        )
    same_device(cache, sources, targets)


def _check_range(ids: Sequence[int], blocks: int) -> None:
    for block in ids:
        require(0 <= block < blocks, f"block {block} is not in a pool of {blocks}")


def _copy(
    target: torch.Tensor,
    source: torch.Tensor,
    target_ids: torch.Tensor | None,
    source_ids: torch.Tensor | None,
) -> None:
    ids = target_ids if target_ids is not None else source_ids
    assert ids is not None
    if ids.numel() == 0:
        return
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[source.element_size()]
    target, source = target.view(bits), source.view(bits)
    _, block_size, heads, head_size = source.shape
    dims = power_of_two(head_size)
    rows = block_size * heads
    tile_rows = min(max(1, COPY_ELEMENTS // dims), 1 << (rows - 1).bit_length())
    copy_kernel[(ids.numel(), -(-rows // tile_rows))](
        target,
        source,
        target_ids,
        source_ids,
        *target.stride(),
        *source.stride(),
        HEADS=heads,
        HEAD_SIZE=head_size,
        ROWS=rows,
        TILE_ROWS=tile_rows,
        TILE_DIMS=dims,
        num_warps=4,
    )
