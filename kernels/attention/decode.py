"""Paged decode: one query per sequence, the keys split among programs and merged.

A program takes one sequence, the query heads of one KV head, and one split of the keys.  Splits
and tiles are cut at multiples of a fixed number of tokens, counted from the start of the sequence:
a row of the result does not depend on what else is in the batch, nor on how wide the table is.
"""

# Annotations stay objects in modules with kernels: Triton's interpreter reads `tl.constexpr` there.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvproof.kernels.attention.arguments import (
    Attention,
    Features,
    Scale,
    check_call,
    check_result,
    new_result,
    power_of_two,
    require,
    same_device,
    scale_tensor,
    table_strides,
)
from kvproof.kernels.attention.softmax import LN2, LOG2E, advance, normalised, scores
from kvproof.kernels.attention.targets import pipeline_stages

DEFAULT_SPLIT = 512
"""Tokens per split: 16 splits of 8,192 keys, times 8 KV heads, fill the 132 SMs of an H100."""

MERGE_TILE = 16
"""Partial results that the merge takes at a time."""

BATCH_NUMBERS = (
    "window",
    "split_size",
    "stride_lse_batch",
    "stride_lse_head",
    "stride_lse_split",
    "stride_partial_lse_batch",
    "stride_partial_lse_head",
    "stride_table",
)
"""Arguments that follow from a batch: no batch is to wait for a compilation of its own."""


class Workspace(NamedTuple):
    """Partial results of the splits: ``out`` ``[B, H, splits, DV]`` and ``lse`` ``[B, H, splits]``.

    Both float32, the latter in base 2.  Splits without a key stay unwritten, and are not read.
    """

    out: torch.Tensor
    lse: torch.Tensor


@triton.jit(do_not_specialize=BATCH_NUMBERS)
def decode_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    window,
    split_size,
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
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_k_dim,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_v_dim,
    stride_table,
    stride_k_scale,
    stride_v_scale,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """One split of one sequence for the heads of one KV head; see the module."""
    ROW_TILES: tl.constexpr = (GROUP + TILE_ROWS - 1) // TILE_ROWS
    kv_head = (tl.program_id(0) // ROW_TILES).to(tl.int64)
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)

    length = tl.load(lengths_ptr + batch).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = (first // split_size + split) * split_size
    start = tl.maximum(begin, first)
    end = tl.minimum(begin + split_size, length)
    if IS_SPLIT:  # noqa: SIM102 (known when compiled, unlike what follows)
        if start >= end:
            return

    row = tl.program_id(0) % ROW_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < GROUP
    head = kv_head * GROUP + row
    dim = tl.arange(0, TILE_DIMS)
    value = tl.arange(0, TILE_VALUES)
    q = tl.load(
        q_ptr
        + batch * stride_q_batch
        + head[:, None] * stride_q_head
        + dim[None, :] * stride_q_dim,
        mask=is_row[:, None] & (dim < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + kv_head * stride_k_scale)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102
        if start == first:
            m = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            mass = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([TILE_ROWS, TILE_VALUES], tl.float32)

    # The ids of a tile's blocks are loaded one tile ahead.  Loaded in the same turn as the keys
    # that they lead to, they keep the compiler from holding two tiles of K and V in flight.
    table_ptr += batch * stride_table
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    key = start // TILE_KEYS * TILE_KEYS + tl.arange(0, TILE_KEYS)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=(key >= start) & (key < end), other=0)
    for tile in range(start // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        key = tile + tl.arange(0, TILE_KEYS)
        is_key = (key >= start) & (key < end)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        k_row = block.to(tl.int64) * stride_k_block + slot * stride_k_slot
        v_row = block.to(tl.int64) * stride_v_block + slot * stride_v_slot
        key_ahead = key + TILE_KEYS
        block = tl.load(table_ptr + key_ahead // BLOCK_SIZE, mask=key_ahead < end, other=0)

        k = tl.load(
            k_ptr + k_row[:, None] + dim[None, :] * stride_k_dim,
            mask=is_key[:, None] & (dim < HEAD_SIZE)[None, :],
            other=0.0,
        )
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        s = scores(products, scale, softcap, HAS_SOFTCAP)
        if slopes_ptr is not None:
            s += slope[:, None] * (key - (length - 1)).to(tl.float32)[None, :]
        s = tl.where(is_key[None, :], s, float("-inf"))
        p, alpha, m, mass = advance(s, m, mass)
        # Masked slots may hold anything; a weight of 0 would not take a NaN away (vllm pull 30887).
        v = tl.load(
            v_ptr + v_row[:, None] + value[None, :] * stride_v_dim,
            mask=is_key[:, None] & (value < VALUE_SIZE)[None, :],
            other=0.0,
        )
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")

    out, lse = normalised(acc, m, mass)
    if not IS_SPLIT:
        lse *= LN2
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head * stride_v_scale)
    split = split.to(tl.int64)
    tl.store(
        out_ptr
        + (batch * stride_out_batch + split * stride_out_split)
        + head[:, None] * stride_out_head
        + value[None, :] * stride_out_dim,
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value < VALUE_SIZE)[None, :],
    )
    tl.store(
        lse_ptr + batch * stride_lse_batch + head * stride_lse_head + split * stride_lse_split,
        lse,
        mask=is_row,
    )


@triton.jit(do_not_specialize=BATCH_NUMBERS)
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    lengths_ptr,
    sinks_ptr,
    window,
    split_size,
    stride_out_batch,
    stride_out_head,
    stride_out_dim,
    stride_lse_batch,
    stride_lse_head,
    stride_partial_batch,
    stride_partial_head,
    stride_partial_split,
    stride_partial_dim,
    stride_partial_lse_batch,
    stride_partial_lse_head,
    stride_partial_lse_split,
    VALUE_SIZE: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The partial results of one query head of one sequence, weighted by their log-sum-exp.

    A sequence without a key has no partial result: it gets zeros, and its sink as the lse.
    """
    head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    splits = tl.cdiv(length, split_size) - first // split_size

    value = tl.arange(0, TILE_VALUES)
    partial_ptr += batch * stride_partial_batch + head * stride_partial_head
    partial_lse_ptr += batch * stride_partial_lse_batch + head * stride_partial_lse_head
    m = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102
        if splits == 0:
            m = tl.zeros([1], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            mass = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([1, TILE_VALUES], tl.float32)
    for tile in range(0, splits, TILE_SPLITS):
        split = tile + tl.arange(0, TILE_SPLITS)
        is_split = split < splits
        partial_lse = tl.load(
            partial_lse_ptr + split * stride_partial_lse_split, mask=is_split, other=float("-inf")
        )
        partial = tl.load(
            partial_ptr
            + split[:, None] * stride_partial_split
            + value[None, :] * stride_partial_dim,
            mask=is_split[:, None] & (value < VALUE_SIZE)[None, :],
            other=0.0,
        )
        p, alpha, m, mass = advance(partial_lse[None, :], m, mass)
        acc = acc * alpha[:, None] + tl.sum(tl.trans(p) * partial, 0)[None, :]

    out, lse = normalised(acc, m, mass)
    one = tl.arange(0, 1)
    tl.store(
        out_ptr
        + batch * stride_out_batch
        + head * stride_out_head
        + (one[:, None] + value[None, :] * stride_out_dim),
        out.to(out_ptr.dtype.element_ty),
        mask=(value < VALUE_SIZE)[None, :],
    )
    tl.store(lse_ptr + batch * stride_lse_batch + head * stride_lse_head + one, lse * LN2)


def key_tile(q: torch.Tensor, widest: int) -> int:
    """Keys per tile: by dtype and head size alone, never by the batch.

    float32 has no tensor cores to go through: a tile of 32 keys spills registers on sm_90.
    """
    if q.element_size() > 2:
        return 16
    return 64 if widest <= 128 else 32


def check_tiling(keys: int, split_size: int) -> None:
    """A dot product wants 16 keys, and a split whole tiles."""
    require(keys >= 16 and keys & (keys - 1) == 0, f"tile_keys must be 16, 32, ..., not {keys}")
    require(
        split_size >= 0 and split_size % keys == 0,
        f"split_size must be a multiple of the {keys} keys of a tile, not {split_size}",
    )


def split_count(capacity: int, window: int, split_size: int) -> int:
    """Splits that a sequence of at most ``capacity`` keys can have within its window."""
    everywhere = -(-capacity // split_size)
    return everywhere if window == 0 else min(everywhere, -(-(window - 1) // split_size) + 1)


def decode_workspace(
    q: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    window: int = 0,
    split_size: int = DEFAULT_SPLIT,
) -> Workspace | None:
    """Room for the partial results of ``paged_decode``; None where one split holds every key."""
    capacity = block_table.shape[1] * v_cache.shape[1]
    splits = split_count(capacity, window, split_size) if split_size else 1
    if splits <= 1:
        return None
    rows = (q.shape[0], q.shape[1], splits)
    out = torch.empty((*rows, v_cache.shape[3]), dtype=torch.float32, device=q.device)
    return Workspace(out, torch.empty(rows, dtype=torch.float32, device=q.device))


def check_workspace(
    workspace: Workspace,
    q: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    split_size: int,
) -> None:
    """A workspace that the caller brings has room for every split; it may have more."""
    require(split_size > 0, "a workspace is given, but split_size is 0: there are no splits")
    splits = split_count(block_table.shape[1] * v_cache.shape[1], window, split_size)
    given = workspace.out.shape[2] if workspace.out.dim() == 4 else 0
    rows = (q.shape[0], q.shape[1], given)
    require(
        given >= splits
        and tuple(workspace.out.shape) == (*rows, v_cache.shape[3])
        and tuple(workspace.lse.shape) == rows
        and workspace.out.dtype == workspace.lse.dtype == torch.float32,
        f"workspace must be float32 [{q.shape[0]}, {q.shape[1]}, {splits}, {v_cache.shape[3]}] "
        f"and [{q.shape[0]}, {q.shape[1]}, {splits}], not {list(workspace.out.shape)} and "
        f"{list(workspace.lse.shape)}",
    )
    same_device(q, *workspace)


def strides_by_split(out: torch.Tensor, lse: torch.Tensor) -> tuple[int, ...]:
    """Of batch, head, split and dimension of ``out``, and of batch, head and split of ``lse``.

    The stride of the split is 0 where these are no partial results but the result itself.
    """
    split = (out.stride(2), lse.stride(2)) if out.dim() == 4 else (0, 0)
    return (*out.stride()[:2], split[0], out.stride(-1), *lse.stride()[:2], split[1])


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    split_size: int = DEFAULT_SPLIT,
    tile_keys: int | None = None,
    result: Attention | None = None,
    workspace: Workspace | None = None,
) -> Attention:
    """Attention of one query per sequence, the last token of it, over its cached keys.

    Args:
        q: ``[B, H, D]``, float32, float16 or bfloat16.
        k_cache: ``[N, BS, KH, D]`` of any strides (a cache that keeps a head's tokens together is
            passed as a view); the dtype of ``q``, or float8 e4m3 or e5m2.
        v_cache: ``[N, BS, KH, DV]``, likewise.
        block_table: ``[B, W]`` of block ids; entries past a sequence's keys are never read, nor,
            with a window, those before it.
        lengths: ``[B]``, keys per sequence, the query's own included; 0 gives zeros.
        scale: factor of q·k.
        window, softcap, sinks, alibi: see ``Features``.
        k_scale, v_scale: what a float8 cache was divided by, see ``Scale``.
        split_size: tokens per split, a multiple of ``tile_keys``; 0 keeps each sequence in one.
        tile_keys: keys per tile, a power of two of at least 16.  By default by dtype and head size.
        result: where to write, instead of into new tensors.
        workspace: what ``decode_workspace`` returns for the same arguments, to reuse it.

    Returns:
        ``Attention``: ``out`` ``[B, H, DV]`` and ``lse`` ``[B, H]``.

    Raises:
        ValueError: an argument is not as said above.
    """
    features = Features(scale, window, softcap, sinks, alibi)
    check_call(q, k_cache, v_cache, block_table, None, lengths, features, k_scale, v_scale)
    batch, heads, head_size = q.shape
    _, block_size, kv_heads, value_size = v_cache.shape
    dims, values = power_of_two(head_size), power_of_two(value_size)
    keys = key_tile(q, max(dims, values)) if tile_keys is None else tile_keys
    check_tiling(keys, split_size)

    result = new_result(q, value_size) if result is None else result
    check_result(result, (batch, heads, value_size), q)
    if workspace is None:
        workspace = decode_workspace(q, v_cache, block_table, window=window, split_size=split_size)
    else:
        check_workspace(workspace, q, v_cache, block_table, window, split_size)
    if batch == 0:
        return result

    out, lse = result if workspace is None else workspace
    group = heads // kv_heads
    rows = min(64, power_of_two(group))
    k_scales = scale_tensor(k_scale, kv_heads, q.device)
    v_scales = scale_tensor(v_scale, kv_heads, q.device)
    splits = 1 if workspace is None else out.shape[2]
    decode_kernel[(kv_heads * -(-group // rows), splits, batch)](
        out,
        lse,
        q,
        k_cache,
        v_cache,
        block_table,
        lengths,
        sinks,
        alibi,
        k_scales,
        v_scales,
        features.factor,
        softcap,
        window,
        max(1, block_table.shape[1] * block_size) if workspace is None else split_size,
        *strides_by_split(out, lse),
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        *table_strides(block_table, k_scales, v_scales),
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD_SIZE=head_size,
        VALUE_SIZE=value_size,
        TILE_ROWS=rows,
        TILE_KEYS=keys,
        TILE_DIMS=dims,
        TILE_VALUES=values,
        HAS_SOFTCAP=softcap > 0,
        HAS_WINDOW=window > 0,
        IS_SPLIT=workspace is not None,
        num_warps=4,
        num_stages=pipeline_stages(),
    )
    if workspace is not None:
        merge_splits(result, workspace, lengths, sinks, window, split_size)
    return result


def merge_splits(
    result: Attention,
    workspace: Workspace,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    split_size: int,
) -> None:
    """Weigh and add the partial results of ``workspace`` into ``result``."""
    batch, heads, value_size = result.out.shape
    merge_kernel[(heads, batch)](
        result.out,
        result.lse,
        workspace.out,
        workspace.lse,
        lengths,
        sinks,
        window,
        split_size,
        *result.out.stride(),
        *result.lse.stride(),
        *workspace.out.stride(),
        *workspace.lse.stride(),
        VALUE_SIZE=value_size,
        TILE_SPLITS=MERGE_TILE,
        TILE_VALUES=power_of_two(value_size),
        HAS_WINDOW=window > 0,
        num_warps=4,
    )
