"""One call of an attention kernel, as a value: to run it, to change it, to run the reference on it.

Decode is the case of one query per sequence; latent attention (MLA) the case of one KV head whose V
is the front of its K.  So one form, and one reference, serve the three kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from kvproof.kernels.attention.arguments import Attention, Features, Scale
from kvproof.kernels.attention.decode import Workspace, decode_workspace, paged_decode
from kvproof.kernels.attention.mla import as_value_cache, mla_decode
from kvproof.kernels.attention.unified import paged_attention

Kind: TypeAlias = Literal["decode", "unified", "mla"]
KINDS: tuple[Kind, ...] = ("decode", "unified", "mla")


@dataclass(frozen=True)
class Problem:
    """The arguments of one call; shapes as in ``kvproof.kernels.attention.arguments``.

    ``q`` is ``[T, H, D]``; sequence b has the queries ``query_starts[b]`` to
    ``query_starts[b + 1] - 1``, which are its last tokens.  A sequence of a decode problem has one
    query even where it has no key.
    """

    kind: Kind
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    features: Features
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    split_size: int = 0
    tile_rows: int = 16
    tile_keys: int = 16

    @property
    def sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    def queries(self, sequence: int) -> slice:
        """Where the queries of ``sequence`` lie in ``q``."""
        start, stop = self.query_starts[sequence : sequence + 2].tolist()
        return slice(start, stop)

    def with_features(self, **changes: Any) -> Problem:
        return replace(self, features=replace(self.features, **changes))

    def with_caches(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
        """The same change done to the caches of K and V, which latent attention keeps in one."""
        k_cache = change(self.k_cache)
        if self.kind == "mla":
            v_cache = as_value_cache(k_cache.squeeze(2), self.v_cache.shape[3])
        else:
            v_cache = change(self.v_cache)
        return replace(self, k_cache=k_cache, v_cache=v_cache)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of its width."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def picked(tensor: torch.Tensor, *index: Any) -> torch.Tensor:
    """``tensor[index]`` by its bits: PyTorch does not index every float8 on every device."""
    return bits(tensor)[index].view(tensor.dtype)


def first_seen(length: int, queries: int, window: int) -> int:
    """The oldest position that one of the last ``queries`` tokens sees."""
    return max(0, length - queries + 1 - window) if window and queries else 0


def seen_slots(problem: Problem) -> torch.Tensor:
    """``[N, BS]``: the slots whose key some query of the problem sees."""
    seen = torch.zeros(problem.k_cache.shape[:2], dtype=torch.bool, device=problem.q.device)
    for sequence, length in enumerate(problem.lengths.tolist()):
        rows = problem.queries(sequence)
        if rows.stop > rows.start:
            first = first_seen(length, rows.stop - rows.start, problem.features.window)
            position = torch.arange(first, length, device=seen.device)
            block = problem.block_table[sequence, position // problem.block_size].long()
            seen[block, position % problem.block_size] = True
    return seen


Attend: TypeAlias = Callable[[Problem], Attention]
"""What computes a problem: a kernel, or one with a fault planted."""


def attend(
    problem: Problem, result: Attention | None = None, workspace: Workspace | None = None
) -> Attention:
    """Run the problem's kernel, into ``result`` and through ``workspace`` where they are given."""
    features = problem.features
    if problem.kind == "mla":
        return mla_decode(
            problem.q,
            problem.k_cache.squeeze(2),
            problem.block_table,
            problem.lengths,
            latent_size=problem.v_cache.shape[3],
            scale=features.scale,
            cache_scale=problem.k_scale,
            split_size=problem.split_size,
            tile_keys=problem.tile_keys,
            result=result,
            workspace=workspace,
        )
    shared: dict[str, Any] = {
        "scale": features.scale,
        "window": features.window,
        "softcap": features.softcap,
        "sinks": features.sinks,
        "alibi": features.alibi,
        "k_scale": problem.k_scale,
        "v_scale": problem.v_scale,
        "tile_keys": problem.tile_keys,
        "result": result,
    }
    if problem.kind == "decode":
        return paged_decode(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.block_table,
            problem.lengths,
            split_size=problem.split_size,
            workspace=workspace,
            **shared,
        )
    return paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_table,
        problem.query_starts,
        problem.lengths,
        tile_rows=problem.tile_rows,
        **shared,
    )


def poisoned_result(problem: Problem) -> Attention:
    """Somewhere to write to that shows what was not written: NaN everywhere."""
    shape = (*problem.q.shape[:2], problem.v_cache.shape[3])
    out = torch.full(shape, torch.nan, dtype=problem.q.dtype, device=problem.q.device)
    lse = torch.full(shape[:2], torch.nan, dtype=torch.float32, device=problem.q.device)
    return Attention(out, lse)


def poisoned_workspace(problem: Problem) -> Workspace | None:
    """A workspace full of NaN: a split that was not written shows if it is read.

    (aiter issue 3641 merges what an empty split left uninitialised.)
    """
    if problem.kind == "unified":
        return None
    workspace = decode_workspace(
        problem.q,
        problem.v_cache,
        problem.block_table,
        window=problem.features.window,
        split_size=problem.split_size,
    )
    if workspace is not None:
        for tensor in workspace:
            tensor.fill_(torch.nan)
    return workspace


def attend_poisoned(problem: Problem) -> Attention:
    """Run the kernel into a poisoned result, through a poisoned workspace."""
    return attend(problem, poisoned_result(problem), poisoned_workspace(problem))
