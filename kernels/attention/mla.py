"""Paged decode of multi-head latent attention (MLA).

The cache holds, per token, one latent vector that is key and value to all heads, and one rotary
part that is key only.  Queries come absorbed: multiplied with the up-projection of K already, and
the result still wants that of V (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

# Annotations stay objects in modules with kernels: Triton's interpreter reads `tl.constexpr` there.

import torch
import triton
import triton.language as tl

from kvproof.kernels.attention.arguments import (
    Attention,
    Features,
    Scale,
    check_contents,
    check_dtypes,
    check_result,
    check_scales,
    check_table,
    new_result,
    power_of_two,
    require,
    same_device,
    scale_tensor,
)
from kvproof.kernels.attention.decode import (
    DEFAULT_SPLIT,
    Workspace,
    check_tiling,
    check_workspace,
    decode_workspace,
    merge_splits,
    strides_by_split,
)
from kvproof.kernels.attention.softmax import LN2, advance, normalised, scores
from kvproof.kernels.attention.targets import ROOMY, pipeline_stages, shared_memory

LARGEST_LATENT = 512

BATCH_NUMBERS = (
    "split_size",
    "heads",
    "stride_lse_batch",
    "stride_lse_head",
    "stride_lse_split",
    "stride_table",
)
"""Arguments that follow from a batch: no batch is to wait for a compilation of its own."""


@triton.jit(do_not_specialize=BATCH_NUMBERS)
def mla_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    cache_scale_ptr,
    scale,
    split_size,
    heads,
    stride_out_batch,
    stride_out_head,
    stride_out_split,
    stride_out_dim,
    stride_lse_batch,
    stride_lse_head,
    stride_lse_split,
    stride_q_batch,
    stride_q_head,
    stride_q_dim,
    stride_block,
    stride_slot,
    stride_dim,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_LATENT: tl.constexpr,
    TILE_ROTARY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """One split of one sequence for a tile of its heads; the latent part is read once, for both."""
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    start = split * split_size
    end = tl.minimum(start + split_size, length)
    if IS_SPLIT:  # noqa: SIM102 (known when compiled, unlike what follows)
        if start >= end:
            return

    head = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    is_head = head < heads
    latent = tl.arange(0, TILE_LATENT)
    rotary = tl.arange(0, TILE_ROTARY)
    is_latent = latent < LATENT
    is_rotary = rotary < ROTARY
    q_row = q_ptr + batch * stride_q_batch + head[:, None] * stride_q_head
    q_latent = tl.load(
        q_row + latent[None, :] * stride_q_dim,
        mask=is_head[:, None] & is_latent[None, :],
        other=0.0,
    )
    q_rotary = tl.load(
        q_row + (LATENT + rotary[None, :]) * stride_q_dim,
        mask=is_head[:, None] & is_rotary[None, :],
        other=0.0,
    )
    if cache_scale_ptr is not None:
        cache_scale = tl.load(cache_scale_ptr)
        scale = scale * cache_scale
    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, TILE_LATENT], tl.float32)

    # The ids of a tile's blocks are loaded one tile ahead, as in decode_kernel.
    table_ptr += batch * stride_table
    key = start + tl.arange(0, TILE_KEYS)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
    for tile in range(start, end, TILE_KEYS):
        key = tile + tl.arange(0, TILE_KEYS)
        is_key = key < end
        slot = (key % BLOCK_SIZE).to(tl.int64)
        row = cache_ptr + (block.to(tl.int64) * stride_block + slot * stride_slot)[:, None]
        key_ahead = key + TILE_KEYS
        block = tl.load(table_ptr + key_ahead // BLOCK_SIZE, mask=key_ahead < end, other=0)

        c = tl.load(
            row + latent[None, :] * stride_dim, mask=is_key[:, None] & is_latent[None, :], other=0.0
        ).to(q_latent.dtype)
        k_rotary = tl.load(
            row + (LATENT + rotary[None, :]) * stride_dim,
            mask=is_key[:, None] & is_rotary[None, :],
            other=0.0,
        ).to(q_latent.dtype)
        products = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
        products = tl.dot(q_rotary, tl.trans(k_rotary), products, input_precision="ieee")
        s = tl.where(is_key[None, :], scores(products, scale, 0.0, False), float("-inf"))
        p, alpha, m, mass = advance(s, m, mass)
        acc = tl.dot(p.to(q_latent.dtype), c, acc * alpha[:, None], input_precision="ieee")

    out, lse = normalised(acc, m, mass)
    if not IS_SPLIT:
        lse *= LN2
    if cache_scale_ptr is not None:
        out *= cache_scale
    split = split.to(tl.int64)
    tl.store(
        out_ptr
        + (batch * stride_out_batch + split * stride_out_split)
        + head[:, None] * stride_out_head
        + latent[None, :] * stride_out_dim,
        out.to(out_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_latent[None, :],
    )
    tl.store(
        lse_ptr + batch * stride_lse_batch + head * stride_lse_head + split * stride_lse_split,
        lse,
        mask=is_head,
    )


def check_latent(q: torch.Tensor, cache: torch.Tensor, latent_size: int) -> None:
    """Query ``[B, H, R + P]`` against cache ``[N, BS, R + P]``, R the latent size."""
    require(q.dim() == 3, f"q must be [sequences, heads, latent + rotary], not {list(q.shape)}")
    require(
        cache.dim() == 3 and cache.shape[2] == q.shape[2] and cache.shape[1] >= 1,
        f"cache must be [blocks, block size, {q.shape[2]}], not {list(cache.shape)}",
    )
    require(
        1 <= latent_size <= LARGEST_LATENT and 1 <= q.shape[2] - latent_size <= 128,
        f"latent_size must be in 1..{LARGEST_LATENT} and leave 1..128 of the {q.shape[2]} to the "
        f"rotary part, not {latent_size}",
    )
    check_dtypes(q, cache)


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    latent_size: int,
    scale: float,
    cache_scale: Scale = 1.0,
    split_size: int = DEFAULT_SPLIT,
    tile_keys: int | None = None,
    result: Attention | None = None,
    workspace: Workspace | None = None,
) -> Attention:
    """Latent attention of one query per sequence over its cached latent vectors.

    Args:
        q: ``[B, H, R + P]``: the absorbed query, then its rotary part.
        cache: ``[N, BS, R + P]`` of any strides; the dtype of ``q``, or a float8.
        block_table, lengths, scale, split_size, tile_keys, result, workspace: as in
            ``paged_decode``; the workspace is that of the cache as V, see ``as_value_cache``.
        latent_size: R.
        cache_scale: what a float8 cache was divided by.

    Returns:
        ``Attention``: ``out`` ``[B, H, R]`` and ``lse`` ``[B, H]``.

    Raises:
        ValueError: an argument is not as said above.
    """
    check_latent(q, cache, latent_size)
    batch, heads, width = q.shape
    blocks, block_size, _ = cache.shape
    check_table(block_table, lengths, batch)
    check_contents(block_table, lengths, 1, 0, blocks, block_size)
    features = Features(scale)
    features.check(heads)
    check_scales(cache, 1, cache_scale=cache_scale)
    same_device(q, cache, block_table)
    keys = (32 if q.element_size() <= 2 else 16) if tile_keys is None else tile_keys
    check_tiling(keys, split_size)
    fits = q.element_size() <= 2 or shared_memory() >= ROOMY
    stages = pipeline_stages() if fits else 2

    result = new_result(q, latent_size) if result is None else result
    check_result(result, (batch, heads, latent_size), q)
    values = as_value_cache(cache, latent_size)
    if workspace is None:
        workspace = decode_workspace(q, values, block_table, split_size=split_size)
    else:
        check_workspace(workspace, q, values, block_table, 0, split_size)
    out, lse = result if workspace is None else workspace
    if batch == 0:
        return result
    mla_kernel[(-(-heads // 16), 1 if workspace is None else out.shape[2], batch)](
        out,
        lse,
        q,
        cache,
        block_table,
        lengths,
        scale_tensor(cache_scale, 1, q.device),
        features.factor,
        max(1, block_table.shape[1] * block_size) if workspace is None else split_size,
        heads,
        *strides_by_split(out, lse),
        *q.stride(),
        *cache.stride(),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        LATENT=latent_size,
        ROTARY=width - latent_size,
        TILE_ROWS=16,
        TILE_KEYS=keys,
        TILE_LATENT=power_of_two(latent_size),
        TILE_ROTARY=power_of_two(width - latent_size),
        IS_SPLIT=workspace is not None,
        num_warps=4,
        num_stages=stages,
    )
    if workspace is not None:
        merge_splits(result, workspace, lengths, None, 0, split_size)
    return result


def as_value_cache(cache: torch.Tensor, latent_size: int) -> torch.Tensor:
    """The latent cache ``[N, BS, R + P]`` seen as a cache of V ``[N, BS, 1, R]``."""
    return cache[..., :latent_size].unsqueeze(2)
