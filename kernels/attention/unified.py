"""Paged attention for a batch of any mixture: prefill, chunks of prefill, and decode.

The queries of a sequence are its last tokens; each sees the keys up to and including its own.  A
program takes a tile of rows (consecutive queries of one sequence, times the query heads of one KV
head) and walks the keys.  Tiles are cut from the first query of the sequence and from key 0, and
their sizes do not depend on the batch: nor do the rows of the result.
"""

# Annotations stay objects in modules with kernels: Triton's interpreter reads `tl.constexpr` there.

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
    scale_tensor,
    table_strides,
)
from kvproof.kernels.attention.softmax import LN2, LOG2E, advance, normalised, scores
from kvproof.kernels.attention.targets import ROOMY, is_amd, pipeline_stages, shared_memory

BATCH_NUMBERS = ("window", "sequences", "stride_lse_token", "stride_table")
"""Arguments that follow from a batch: no batch is to wait for a compilation of its own."""


@triton.jit
def sequence_of(tile, starts_ptr, sequences, TILE_TOKENS: tl.constexpr):
    """The sequence that a tile of queries belongs to, by bisection.

    Sequence b has its first tile at ``starts[b] // TILE_TOKENS + b``: that leaves each sequence at
    least as many tiles as it needs, without a pass over the batch on the host.
    """
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle).to(tl.int32) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=BATCH_NUMBERS)
def unified_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    lengths_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    window,
    sequences,
    stride_out_token,
    stride_out_head,
    stride_out_dim,
    stride_lse_token,
    stride_lse_head,
    stride_q_token,
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
):
    """One tile of the queries of one sequence for the heads of one KV head; see the module."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0).to(tl.int64)
    tile_id = tl.program_id(1)
    sequence = sequence_of(tile_id, starts_ptr, sequences, TILE_TOKENS)
    query_start = tl.load(starts_ptr + sequence).to(tl.int32)
    queries = tl.load(starts_ptr + sequence + 1).to(tl.int32) - query_start
    first_query = (tile_id - query_start // TILE_TOKENS - sequence) * TILE_TOKENS
    if first_query >= queries:
        return

    # Row r is query r // GROUP of the tile, seen by head r % GROUP of the group.
    row = tl.arange(0, TILE_ROWS)
    query = first_query + row // GROUP
    is_row = (row < TILE_TOKENS * GROUP) & (query < queries)
    head = kv_head * GROUP + row % GROUP
    token = (query_start + query).to(tl.int64)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    position = length - queries + query
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - queries + first_query - window + 1, 0)
    end = length - queries + tl.minimum(first_query + TILE_TOKENS, queries)

    dim = tl.arange(0, TILE_DIMS)
    value = tl.arange(0, TILE_VALUES)
    q = tl.load(
        q_ptr
        + (token * stride_q_token + head * stride_q_head)[:, None]
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
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([TILE_ROWS, TILE_VALUES], tl.float32)

    # The ids of a tile's blocks are loaded one tile ahead, as in decode_kernel.
    table_ptr += sequence.to(tl.int64) * stride_table
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
            s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
        p, alpha, m, mass = advance(s, m, mass)
        v = tl.load(
            v_ptr + v_row[:, None] + value[None, :] * stride_v_dim,
            mask=is_key[:, None] & (value < VALUE_SIZE)[None, :],
            other=0.0,
        )
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")

    out, lse = normalised(acc, m, mass)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head * stride_v_scale)
    tl.store(
        out_ptr
        + (token * stride_out_token + head * stride_out_head)[:, None]
        + value[None, :] * stride_out_dim,
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value < VALUE_SIZE)[None, :],
    )
    tl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse * LN2, mask=is_row)


def default_tile(q: torch.Tensor, widest: int) -> tuple[int, int, int]:
    """Rows and keys per tile, and stages of the loop: by dtype, head size and GPU alone.

    Never by the batch, or a sequence would get other bits in other company.
    """
    stages = pipeline_stages()
    if q.element_size() > 2:
        return 16, 16, stages
    if shared_memory() >= ROOMY:
        return (128, 64, stages) if widest <= 128 else (64, 32, stages)
    return (64, 32, stages) if widest <= 128 else (32, 32, 2)


def tiling(
    q: torch.Tensor, widest: int, group: int, rows: int | None, keys: int | None
) -> tuple[int, int, int]:
    """Rows and keys per tile, as asked for or by default, and stages of the loop."""
    default_rows, default_keys, stages = default_tile(q, widest)
    rows = max(default_rows, power_of_two(group)) if rows is None else rows
    keys = default_keys if keys is None else keys
    for name, size in (("tile_rows", rows), ("tile_keys", keys)):
        require(size >= 16 and size & (size - 1) == 0, f"{name} must be 16, 32, ..., not {size}")
    require(rows >= group, f"tile_rows is {rows}, but {group} query heads share a KV head")
    return rows, keys, stages


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    tile_rows: int | None = None,
    tile_keys: int | None = None,
    result: Attention | None = None,
) -> Attention:
    """Causal attention of the last tokens of each sequence over its cached keys.

    The keys and values of the queries themselves are in the cache already.

    Args:
        q: ``[T, H, D]``, the queries of all sequences, one sequence after the other.
        k_cache, v_cache, block_table, scale, window, softcap, sinks, alibi, k_scale, v_scale: as
            in ``paged_decode``.
        query_starts: ``[B + 1]``, rises from 0 to T: sequence b has the queries
            ``query_starts[b]`` to ``query_starts[b + 1] - 1``, perhaps none.
        lengths: ``[B]``, keys per sequence, at least as many as it has queries.
        tile_rows, tile_keys: powers of two, at least 16; rows at least the query heads per KV
            head.  By default by dtype and head size.
        result: where to write, instead of into new tensors.

    Returns:
        ``Attention``: ``out`` ``[T, H, DV]`` and ``lse`` ``[T, H]``.

    Raises:
        ValueError: an argument is not as said above.
    """
    features = Features(scale, window, softcap, sinks, alibi)
    check_call(q, k_cache, v_cache, block_table, query_starts, lengths, features, k_scale, v_scale)
    tokens, heads, head_size = q.shape
    _, block_size, kv_heads, value_size = v_cache.shape
    dims, values = power_of_two(head_size), power_of_two(value_size)
    group = heads // kv_heads
    tile_rows, tile_keys, stages = tiling(q, max(dims, values), group, tile_rows, tile_keys)

    result = new_result(q, value_size) if result is None else result
    check_result(result, (tokens, heads, value_size), q)
    if tokens == 0:
        return result
    k_scales = scale_tensor(k_scale, kv_heads, q.device)
    v_scales = scale_tensor(v_scale, kv_heads, q.device)
    sequences = lengths.shape[0]
    unified_kernel[(kv_heads, tokens // (tile_rows // group) + sequences)](
        *result,
        q,
        k_cache,
        v_cache,
        block_table,
        query_starts,
        lengths,
        sinks,
        alibi,
        k_scales,
        v_scales,
        features.factor,
        softcap,
        window,
        sequences,
        *result.out.stride(),
        *result.lse.stride(),
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        *table_strides(block_table, k_scales, v_scales),
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD_SIZE=head_size,
        VALUE_SIZE=value_size,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        TILE_DIMS=dims,
        TILE_VALUES=values,
        HAS_SOFTCAP=softcap > 0,
        HAS_WINDOW=window > 0,
        num_warps=8 if tile_rows >= 64 and not is_amd() else 4,
        num_stages=stages,
    )
    return result
