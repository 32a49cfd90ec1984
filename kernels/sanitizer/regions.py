"""What a kernel may touch: tensors with the rules that hold for them.

Sizes: ``B`` sequences, ``N`` blocks of the pool, ``BS`` slots of a block, ``W`` table entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Region:
    """A tensor and what kernels may do with it.  The functions below make the usual ones.

    Args:
        tensor: In host memory; strides of any kind, gaps included.
        readable: Whether it may be read.
        writable: Whether it may be written.
        initialised: Whether it holds values before the first launch.
        complete: Whether every element that may be written must have been, in the end.
        allowed: bool, broadcast to the tensor's shape: the elements that may be touched at all.
        by_sequence: bool ``[B, ...]``, each row broadcast to the tensor's shape: the elements
            that belong to each sequence.  One that belongs to none may not be touched; one that
            belongs to others only may not be by a program that works for this sequence.
        bounds_only: Check the bounds and nothing else, and keep no shadow of the elements (13
            bytes and more for each).  For pools of gigabytes of which a few blocks are touched.
    """

    tensor: torch.Tensor
    readable: bool = True
    writable: bool = False
    initialised: bool = True
    complete: bool = False
    allowed: torch.Tensor | None = None
    by_sequence: torch.Tensor | None = None
    bounds_only: bool = False

    def __post_init__(self) -> None:
        if self.tensor.device.type != "cpu":
            raise ValueError(f"the sanitizer watches host memory, not {self.tensor.device}")
        for name, mask in (("allowed", self.allowed), ("by_sequence", self.by_sequence)):
            if mask is None:
                continue
            if self.bounds_only:
                raise ValueError(f"bounds_only keeps no shadow, so that {name} has no effect")
            if mask.dtype != torch.bool:
                raise ValueError(f"{name} must be a bool tensor, not {mask.dtype}")
        if self.by_sequence is not None and self.by_sequence.dim() != self.tensor.dim() + 1:
            raise ValueError(
                f"by_sequence must have {self.tensor.dim() + 1} dimensions, the sequence first, "
                f"not {self.by_sequence.dim()}"
            )


def reads(tensor: torch.Tensor, allowed: torch.Tensor | None = None) -> Region:
    """An input: it may be read, or only what ``allowed`` marks."""
    return Region(tensor, allowed=allowed)


def output(tensor: torch.Tensor, allowed: torch.Tensor | None = None) -> Region:
    """A result: never read, and each (allowed) element must be written in the end."""
    return Region(
        tensor, readable=False, writable=True, initialised=False, complete=True, allowed=allowed
    )


def workspace(tensor: torch.Tensor) -> Region:
    """Scratch memory: holds nothing at first; what is read must have been written."""
    return Region(tensor, writable=True, initialised=False)


def updates(tensor: torch.Tensor, allowed: torch.Tensor | None = None) -> Region:
    """A tensor that is read and written, or only where ``allowed`` marks it."""
    return Region(tensor, writable=True, allowed=allowed)


def paged(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int = 0,
    query_lengths: torch.Tensor | None = None,
    block_dim: int = 0,
    slot_dim: int = 1,
) -> Region:
    """A paged K or V cache of which each sequence may read the slots that its queries see.

    Args:
        cache: ``[N, BS, ...]``, or with blocks and slots in the dimensions named.
        block_table: ``[B, W]``, entry ``i`` of a row holds the tokens from ``i * BS`` on.
        lengths: ``[B]``, tokens in the cache, those of the queries included.
        window: Keys that a query sees, its own included; 0 for all.
        query_lengths: ``[B]``, queries of each sequence, the last tokens; one each by default.
        block_dim: Dimension of the blocks.
        slot_dim: Dimension of the slots of a block.
    """
    if block_dim >= slot_dim:
        raise ValueError(f"blocks (dimension {block_dim}) must come before slots ({slot_dim})")
    slots = visible_slots(
        block_table,
        lengths,
        cache.shape[block_dim],
        cache.shape[slot_dim],
        window=window,
        query_lengths=query_lengths,
    )
    shape = [slots.shape[0], *(1 for _ in range(cache.dim()))]
    shape[1 + block_dim], shape[1 + slot_dim] = slots.shape[1:]
    return Region(cache, by_sequence=slots.reshape(shape))


def visible_slots(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    blocks: int,
    block_size: int,
    *,
    window: int = 0,
    query_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which slots the queries of each sequence see, bool ``[B, blocks, block_size]``."""
    slots = torch.zeros((len(lengths), blocks, block_size), dtype=torch.bool)
    queries = [1] * len(lengths) if query_lengths is None else query_lengths.tolist()
    for sequence, (length, count) in enumerate(zip(lengths.tolist(), queries, strict=True)):
        # Of no queries nothing is seen; the first of them is at length - count.
        first = max(0, length - count + 1 - window) if window else 0
        position = torch.arange(first if count else length, length)
        row = block_table[sequence, position // block_size].long()
        slots[sequence, row, position % block_size] = True
    return slots


def table(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    *,
    window: int = 0,
    query_lengths: torch.Tensor | None = None,
) -> Region:
    """A block table ``[B, W]``: each sequence may read the entries of its own row that it needs.

    The other arguments are those of ``paged``.
    """
    width = block_table.shape[1]
    identity = torch.arange(width).expand(len(lengths), width)
    needed = visible_slots(
        identity, lengths, width, block_size, window=window, query_lengths=query_lengths
    ).any(2)
    own = torch.eye(len(lengths), dtype=torch.bool)
    return Region(block_table, by_sequence=own[:, :, None] & needed[None, :, :])


def rows(region: Region | torch.Tensor, starts: torch.Tensor) -> Region:
    """The region, rows ``starts[b]`` to ``starts[b + 1]`` of it belonging to sequence ``b``.

    For packed queries and outputs ``[tokens, ...]``; ``torch.arange(B + 1)`` for one row each.
    """
    region = region if isinstance(region, Region) else reads(region)
    row = torch.arange(region.tensor.shape[0])
    bounds = starts.cpu().long()
    own = (row >= bounds[:-1, None]) & (row < bounds[1:, None])
    shape = (*own.shape, *(1 for _ in region.tensor.shape[1:]))
    return Region(
        region.tensor,
        readable=region.readable,
        writable=region.writable,
        initialised=region.initialised,
        complete=region.complete,
        allowed=region.allowed,
        by_sequence=own.reshape(shape),
    )
