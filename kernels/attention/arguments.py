"""What the launchers accept, and the one clear ``ValueError`` for what they do not.

Shapes, in the letters used throughout: ``B`` sequences, ``T`` query tokens, ``H`` query heads,
``KH`` KV heads, ``D`` head size, ``DV`` head size of V, ``N`` blocks in the pool, ``BS`` block
size, ``W`` entries in a row of the block table.

Lengths and tables are looked at only where they lie in host memory: on a GPU, reading them would
stall the stream.  There, what is out of range is undefined behaviour, as in every kernel library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

Scale: TypeAlias = float | torch.Tensor
"""Factor of a quantised cache: one number, or a float32 tensor ``[KH]`` (or of one element)."""

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST_HEAD_SIZE = 256


class Attention(NamedTuple):
    """What an attention kernel returns.

    ``out`` has the shape of the query (its last dimension that of V) and its dtype; a query that
    sees no key gets zeros.  ``lse`` is the natural logarithm of the sum of the exponentials of all
    its scores and of its sink, float32; minus infinity for a query that sees nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Features:
    """What is done to the scores, in the order in which it is done.

    ``scale`` times q·k; ``softcap`` c > 0: c·tanh(s/c); ``alibi`` ``[H]``: plus slope times (key
    position - query position); ``window`` w > 0: only the last w keys, the query's own included;
    ``sinks`` ``[H]``: one more score that has no value.  Capping comes before masking, or a masked
    score would become finite (flashinfer issue 350).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        """What kernels multiply q·k by: to get base-2 scores, or, with a cap, tanh's argument."""
        return self.scale / self.softcap if self.softcap else self.scale * math.log2(math.e)

    def check(self, heads: int) -> None:
        """Raise a ``ValueError`` for what no kernel could honour."""
        require(math.isfinite(self.scale), f"scale must be finite, not {self.scale}")
        require(self.window >= 0, f"window must be 0 (none) or more, not {self.window}")
        require(
            math.isfinite(self.softcap) and self.softcap >= 0,
            f"softcap must be 0 (none) or more, not {self.softcap}",
        )
        for name, tensor in (("sinks", self.sinks), ("alibi", self.alibi)):
            require(
                tensor is None or (tuple(tensor.shape) == (heads,) and tensor.is_floating_point()),
                f"{name} must be a floating-point tensor [{heads}], one per query head",
            )


def require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Query ``[tokens, H, D]`` against caches ``[N, BS, KH, D]`` and ``[N, BS, KH, DV]``."""
    require(q.dim() == 3, f"q must be [tokens, heads, head size], not {list(q.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            cache.dim() == 4,
            f"{name} must be [blocks, block size, KV heads, head size], not {list(cache.shape)}",
        )
    require(
        k_cache.shape[:3] == v_cache.shape[:3],
        f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} differ before the "
        "head size",
    )
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    require(
        kv_heads > 0 and heads > 0 and heads % kv_heads == 0,
        f"{heads} query heads cannot share {kv_heads} KV heads evenly",
    )
    require(
        k_cache.shape[3] == q.shape[2],
        f"head size of k_cache is {k_cache.shape[3]}, that of q is {q.shape[2]}",
    )
    for size in (q.shape[2], v_cache.shape[3]):
        require(1 <= size <= LARGEST_HEAD_SIZE, f"head size {size} is not in 1..256")
    require(k_cache.shape[1] >= 1, "the block size must be at least 1")
    check_dtypes(q, k_cache, v_cache)


def check_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor | None,
    lengths: torch.Tensor,
    features: Features,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """All that a launcher is given but its tiling; no ``query_starts``: a query per sequence."""
    check_caches(q, k_cache, v_cache)
    tokens, heads, _ = q.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    check_table(block_table, lengths, tokens if query_starts is None else lengths.numel())
    if query_starts is not None:
        check_query_starts(query_starts, lengths, tokens)
    features.check(heads)
    queries = 1 if query_starts is None else query_starts.diff()
    check_contents(block_table, lengths, queries, features.window, blocks, block_size)
    check_scales(k_cache, kv_heads, k_scale=k_scale, v_scale=v_scale)
    same_device(q, k_cache, block_table, query_starts, features.sinks, features.alibi)


def check_dtypes(q: torch.Tensor, *caches: torch.Tensor) -> None:
    """The cache has the dtype of the query, or a float8; all lie on one device."""
    require(q.dtype in QUERY_DTYPES, f"q must be float32, float16 or bfloat16, not {q.dtype}")
    for cache in caches:
        require(
            cache.dtype == caches[0].dtype,
            f"K is {caches[0].dtype} and V is {cache.dtype}: one dtype, please",
        )
        require(
            cache.dtype == q.dtype or cache.dtype in FLOAT8_DTYPES,
            f"the cache must be {q.dtype} as q is, or a float8, not {cache.dtype}",
        )
    same_device(q, *caches)


def same_device(first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Every tensor that is there must lie where ``first`` does."""
    for other in others:
        require(
            other is None or other.device == first.device,
            f"tensors on {first.device} and {other.device if other is not None else '?'}",
        )


def check_table(block_table: torch.Tensor, lengths: torch.Tensor, sequences: int) -> None:
    """Table ``[B, W]`` and lengths ``[B]``, int32 or int64."""
    require(
        block_table.dim() == 2 and block_table.shape[0] == sequences,
        f"block_table must be [{sequences}, entries], not {list(block_table.shape)}",
    )
    require(
        tuple(lengths.shape) == (sequences,),
        f"lengths must be [{sequences}], not {list(lengths.shape)}",
    )
    for name, tensor in (("block_table", block_table), ("lengths", lengths)):
        require(
            tensor.dtype in (torch.int32, torch.int64),
            f"{name} must be int32 or int64, not {tensor.dtype}",
        )
    same_device(block_table, lengths)


def check_contents(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor | int,
    window: int,
    blocks: int,
    block_size: int,
) -> None:
    """What the table and the lengths say, where they lie on the host.

    The last ``queries`` tokens of each sequence attend: an id that none of them needs may be
    anything, one that is needed must be that of a block.
    """
    if lengths.device.type != "cpu":
        return
    lengths = lengths.long()
    room = block_table.shape[1] * block_size
    for sequence, length in enumerate(lengths.tolist()):
        require(
            0 <= length <= room,
            f"sequence {sequence} has {length} keys, its row of the table has room for {room}",
        )
    first = (lengths - queries + 1 - window).clamp(min=0) if window else torch.zeros_like(lengths)
    entry = torch.arange(block_table.shape[1])
    used = (entry >= (first // block_size)[:, None]) & (
        entry * block_size < (lengths * (torch.as_tensor(queries) > 0))[:, None]
    )
    bad = used & ((block_table < 0) | (block_table >= blocks))
    if bad.any():
        sequence, place = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"block_table[{sequence}, {place}] is {int(block_table[sequence, place])}, which is "
            f"not one of the {blocks} blocks"
        )


def check_scales(caches: torch.Tensor, kv_heads: int, **scales: Scale) -> None:
    """A scale belongs to a float8 cache; on another it would be applied to what was never divided.

    (vllm issue 48016 is a cache that is not quantised and gets its scales all the same.)
    """
    for name, value in scales.items():
        if isinstance(value, torch.Tensor):
            require(
                value.numel() in (1, kv_heads) and value.dtype == torch.float32,
                f"{name} must be a number or a float32 tensor of 1 or {kv_heads} elements",
            )
            same_device(caches, value)
        else:
            require(
                math.isfinite(value) and value > 0, f"{name} must be finite and > 0, not {value}"
            )
        require(
            is_one(value) or caches.dtype in FLOAT8_DTYPES,
            f"{name} is given, but the cache is {caches.dtype}, which has no scale",
        )


def is_one(scale: Scale) -> bool:
    """Whether there is nothing to multiply by (a tensor always counts as something)."""
    return not isinstance(scale, torch.Tensor) and scale == 1.0


def scale_tensor(scale: Scale, kv_heads: int, device: torch.device) -> torch.Tensor | None:
    """The scale as a float32 tensor ``[KH]`` (perhaps of stride 0), or None where it is 1."""
    if is_one(scale):
        return None
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((1,), scale, dtype=torch.float32, device=device)
    return scale.reshape(-1).expand(kv_heads)


def power_of_two(size: int) -> int:
    """The least power of two that is at least ``size`` and 16, the least side of a dot product."""
    return max(16, 1 << (size - 1).bit_length())


def new_result(q: torch.Tensor, value_size: int) -> Attention:
    """Unwritten tensors for the result of the queries ``[tokens, H, D]``."""
    out = torch.empty((*q.shape[:2], value_size), dtype=q.dtype, device=q.device)
    return Attention(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))


def check_result(result: Attention, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """A result that the caller brings must be of the shape ``[tokens, H, DV]`` and of q's dtype."""
    require(
        tuple(result.out.shape) == shape and result.out.dtype == q.dtype,
        f"result.out must be {q.dtype} {list(shape)}, not {result.out.dtype} "
        f"{list(result.out.shape)}",
    )
    require(
        tuple(result.lse.shape) == shape[:2] and result.lse.dtype == torch.float32,
        f"result.lse must be float32 {list(shape[:2])}, not {result.lse.dtype} "
        f"{list(result.lse.shape)}",
    )
    same_device(q, *result)


def table_strides(block_table: torch.Tensor, *scales: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of the table's rows and, per scale, of its heads."""
    return (block_table.stride(0), *(0 if scale is None else scale.stride(0) for scale in scales))


def check_query_starts(query_starts: torch.Tensor, lengths: torch.Tensor, tokens: int) -> None:
    """Where each sequence's queries start, ``[B + 1]``; content where it is on the host."""
    sequences = lengths.shape[0]
    require(
        tuple(query_starts.shape) == (sequences + 1,)
        and query_starts.dtype in (torch.int32, torch.int64),
        f"query_starts must be int32 or int64 [{sequences + 1}], not {query_starts.dtype} "
        f"{list(query_starts.shape)}",
    )
    same_device(lengths, query_starts)
    if query_starts.device.type != "cpu":
        return
    starts = query_starts.tolist()
    require(
        starts[0] == 0 and starts[-1] == tokens, f"query_starts must run from 0 to {tokens} queries"
    )
    for sequence, length in enumerate(lengths.tolist()):
        queries = starts[sequence + 1] - starts[sequence]
        require(
            0 <= queries <= length,
            f"sequence {sequence} has {queries} queries and {length} keys",
        )
