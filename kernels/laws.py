"""What must not change the result by a single bit, whatever the result is.

A law changes a problem in a way that leaves its answer the same (or doubles it) and compares bits.
It needs no reference and no tolerance: it finds what is too small for either, and a dependence on
things that should not matter, such as what else is in the batch.

Not laws, for rounding differs: another number of splits, another tile, constant V gives that
constant.  These are held to the bound instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvproof.kernels.attention.arguments import Attention, Scale
from kvproof.kernels.cases import GARBAGE, laid_in
from kvproof.kernels.interpreter import is_interpreting, shuffled_programs
from kvproof.kernels.problem import KINDS, Attend, Kind, Problem, bits, picked, seen_slots


class LawBroken(AssertionError):
    """Two results that must be the same differ."""


@dataclass(frozen=True)
class Law:
    """A change of the problem, and what it must do to the result.

    ``judge`` runs ``attend`` on the problem and on its change, and raises ``LawBroken``.
    ``requires`` are fields of the case without which the law says nothing.
    """

    name: str
    claim: str
    judge: Callable[[Problem, Attend], None]
    kinds: tuple[Kind, ...] = KINDS
    requires: tuple[tuple[str, Any], ...] = ()
    interpreted_only: bool = False

    def applies(self) -> bool:
        return is_interpreting() or not self.interpreted_only


def same_bits(name: str, expected: Attention, got: Attention) -> None:
    """Raise ``LawBroken`` unless both results are equal bit for bit."""
    for part, a, b in (("out", expected.out, got.out), ("lse", expected.lse, got.lse)):
        different = (bits(a) != bits(b)).nonzero()
        if different.numel():
            index = tuple(int(i) for i in different[0])
            raise LawBroken(
                f"{name}: {part}{list(index)} is {float(b[index]):.9g} instead of "
                f"{float(a[index]):.9g}; {len(different)} of {a.numel()} elements differ"
            )


def _unchanged(name: str, change: Callable[[Problem], Problem]) -> Callable[..., None]:
    """The law that ``change`` leaves the result as it is."""

    def judge(problem: Problem, attend: Attend) -> None:
        same_bits(name, attend(problem), attend(change(problem)))

    return judge


# The changes


def _again(problem: Problem) -> Problem:
    return problem


def _refill(cache: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """A cache with the strides of ``cache`` and other content."""
    fresh = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    fresh.copy_(content)
    return fresh


def other_blocks(problem: Problem) -> Problem:
    """The same blocks at other places of the pool: the last becomes the first."""
    blocks = problem.k_cache.shape[0]
    order = torch.arange(blocks - 1, -1, -1, device=problem.q.device)
    table = problem.block_table
    is_block = (table >= 0) & (table < blocks)
    moved = torch.where(is_block, blocks - 1 - table, table)
    return replace(
        problem.with_caches(lambda cache: _refill(cache, picked(cache, order))), block_table=moved
    )


def other_unseen(problem: Problem) -> Problem:
    """Ordinary numbers in the slots that nobody sees, instead of NaN and infinity."""
    unseen = ~seen_slots(problem)

    def calmed(cache: torch.Tensor) -> torch.Tensor:
        content = cache.float().masked_fill(unseen[:, :, None, None], 3.0)
        return _refill(cache, content.to(cache.dtype))

    return problem.with_caches(calmed)


def other_padding(problem: Problem) -> Problem:
    """Other garbage in the entries of the table that nobody needs."""
    table, blocks = problem.block_table, problem.k_cache.shape[0]
    is_garbage = (table < 0) | (table >= blocks)
    return replace(problem, block_table=torch.where(is_garbage, 10**6 + 1, table).to(table.dtype))


def wider_table(problem: Problem) -> Problem:
    """More entries per row than any sequence needs."""
    table = problem.block_table
    garbage = torch.full_like(table[:, :1], GARBAGE[0]).repeat(1, 40)
    return replace(problem, block_table=torch.cat([table, garbage], dim=1))


def select(problem: Problem, sequences: list[int]) -> Problem:
    """A batch of some sequences of ``problem``, in the order given."""
    device = problem.q.device
    rows = [problem.queries(sequence) for sequence in sequences]
    counts = torch.tensor([0] + [row.stop - row.start for row in rows], device=device)
    index = torch.tensor(sequences, dtype=torch.long, device=device)
    return replace(
        problem,
        q=torch.cat([problem.q[row] for row in rows]) if rows else problem.q[:0],
        query_starts=counts.cumsum(0).to(problem.query_starts.dtype),
        block_table=problem.block_table[index],
        lengths=problem.lengths[index],
    )


def rows_of(problem: Problem, result: Attention, sequences: list[int]) -> Attention:
    """The rows of ``result`` that belong to ``sequences``, in the order given."""
    rows = [problem.queries(sequence) for sequence in sequences]
    return Attention(
        torch.cat([result.out[row] for row in rows]), torch.cat([result.lse[row] for row in rows])
    )


def _alone(problem: Problem, attend: Attend) -> None:
    together = attend(problem)
    for sequence in range(problem.sequences):
        expected = rows_of(problem, together, [sequence])
        same_bits(f"sequence {sequence} alone", expected, attend(select(problem, [sequence])))


def _reversed_batch(problem: Problem, attend: Attend) -> None:
    order = list(reversed(range(problem.sequences)))
    expected = rows_of(problem, attend(problem), order)
    same_bits("batch permuted", expected, attend(select(problem, order)))


def with_heads(problem: Problem, order: torch.Tensor) -> Problem:
    """The query heads of ``problem`` in another order, or some of them."""
    features = problem.features
    return replace(problem, q=problem.q[:, order]).with_features(
        sinks=None if features.sinks is None else features.sinks[order],
        alibi=None if features.alibi is None else features.alibi[order],
    )


def with_kv_heads(problem: Problem, order: list[int]) -> tuple[Problem, torch.Tensor]:
    """The KV heads of ``problem`` in another order or some of them, with their query heads.

    Returns the problem and the query heads that it has.
    """
    device = problem.q.device
    kv = torch.tensor(order, device=device)
    group = torch.arange(problem.group, device=device)
    heads = (kv[:, None] * problem.group + group[None, :]).reshape(-1)
    changed = with_heads(problem, heads).with_caches(
        lambda cache: picked(cache, slice(None), slice(None), kv)
    )
    k_scale, v_scale = (_scale_of(scale, kv) for scale in (problem.k_scale, problem.v_scale))
    return replace(changed, k_scale=k_scale, v_scale=v_scale), heads


def _scale_of(scale: Scale, kv: torch.Tensor) -> Scale:
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        return scale[kv]
    return scale


def _heads(result: Attention, heads: torch.Tensor) -> Attention:
    return Attention(result.out[:, heads], result.lse[:, heads])


def _permuted_heads(problem: Problem, attend: Attend) -> None:
    """Within each group the last query head becomes the first."""
    heads = torch.arange(problem.q.shape[1], device=problem.q.device)
    order = heads.reshape(-1, problem.group).flip(1).reshape(-1)
    expected = _heads(attend(problem), order)
    same_bits("query heads permuted", expected, attend(with_heads(problem, order)))


def _permuted_groups(problem: Problem, attend: Attend) -> None:
    changed, heads = with_kv_heads(problem, list(reversed(range(problem.kv_heads))))
    same_bits("KV heads permuted", _heads(attend(problem), heads), attend(changed))


def _sliced(problem: Problem, attend: Attend) -> None:
    """What tensor parallelism does: a device holds some KV heads."""
    whole = attend(problem)
    for kv_head in range(problem.kv_heads):
        changed, heads = with_kv_heads(problem, [kv_head])
        same_bits(f"KV head {kv_head} alone", _heads(whole, heads), attend(changed))


def other_layout(problem: Problem) -> Problem:
    """The caches head by head instead of token by token, or the other way round."""
    is_nhd = problem.k_cache.is_contiguous()
    return problem.with_caches(
        lambda cache: (
            laid_in("HND", cache.cpu(), cache.dtype).to(cache.device)
            if is_nhd
            else cache.contiguous()
        )
    )


def repaged(problem: Problem, block_size: int) -> Problem:
    """The same sequences in blocks of another size, no block shared."""
    old_size = problem.block_size
    lengths = problem.lengths.tolist()
    needed = [-(-length // block_size) for length in lengths]
    starts = [sum(needed[:sequence]) for sequence in range(len(needed))]
    device = problem.q.device
    table = torch.full((len(needed), max(needed, default=0)), -1, device=device)
    for sequence, (count, start) in enumerate(zip(needed, starts, strict=True)):
        table[sequence, :count] = torch.arange(start, start + count, device=device)

    def moved(cache: torch.Tensor) -> torch.Tensor:
        fresh = torch.zeros(
            (sum(needed) + 1, block_size, *cache.shape[2:]), dtype=cache.dtype, device=device
        )
        for sequence, length in enumerate(lengths):
            position = torch.arange(length, device=device)
            old = problem.block_table[sequence, position // old_size].long()
            known = (old >= 0) & (old < cache.shape[0])
            position, old = position[known], old[known]
            new = table[sequence, position // block_size]
            bits(fresh)[new, position % block_size] = bits(cache)[old, position % old_size]
        return fresh

    table = table.to(problem.block_table.dtype)
    return replace(problem.with_caches(moved), block_table=table)


def _other_block_sizes(problem: Problem, attend: Attend) -> None:
    expected = attend(problem)
    for block_size in (1, 4, 16, 64):
        same_bits(f"block size {block_size}", expected, attend(repaged(problem, block_size)))


def unshared(problem: Problem) -> Problem:
    """Private copies of the blocks that sequences share."""
    return repaged(problem, problem.block_size)


def _doubled_values(problem: Problem, attend: Attend) -> None:
    plain = attend(problem)
    doubled = (problem.v_cache.float() * 2).to(problem.v_cache.dtype)
    changed = replace(problem, v_cache=_refill(problem.v_cache, doubled))
    same_bits("V doubled", Attention(plain.out * 2, plain.lse), attend(changed))


def _moved_scale(problem: Problem, attend: Attend) -> None:
    """A cache of doubled numbers without a scale, and the cache itself with a scale of 2."""

    def doubled(cache: torch.Tensor) -> torch.Tensor:
        return _refill(cache, (cache.float() * 2).to(cache.dtype))

    expected = attend(problem.with_caches(doubled))
    same_bits("scale of 2", expected, attend(replace(problem, k_scale=2.0, v_scale=2.0)))


def doubled_queries(problem: Problem) -> Problem:
    """Queries doubled and the scale halved."""
    return replace(problem, q=problem.q * 2).with_features(scale=problem.features.scale / 2)


def wide_window(problem: Problem) -> Problem:
    """A window that no sequence fills, instead of none."""
    return problem.with_features(window=max(problem.lengths.tolist(), default=0) + 1)


def _shuffled(problem: Problem, attend: Attend) -> None:
    expected = attend(problem)
    for seed in range(2):
        with shuffled_programs(seed):
            got = attend(problem)
        same_bits("program order shuffled", expected, got)


def _in_chunks(problem: Problem, attend: Attend) -> None:
    """The queries of a sequence in two calls, with as many keys as there are by then."""
    whole = attend(problem)
    for sequence in range(problem.sequences):
        alone = select(problem, [sequence])
        for part, rows in _chunks(alone):
            offset = problem.queries(sequence).start
            these = slice(offset + rows.start, offset + rows.stop)
            expected = Attention(whole.out[these], whole.lse[these])
            same_bits(f"queries {rows.start} to {rows.stop - 1} alone", expected, attend(part))


def _chunks(problem: Problem) -> Iterator[tuple[Problem, slice]]:
    queries, length = len(problem.q), int(problem.lengths)
    for rows in (slice(0, queries // 2), slice(queries // 2, queries)):
        if rows.stop > rows.start:
            starts = torch.tensor([0, rows.stop - rows.start]).to(problem.query_starts)
            lengths = torch.full_like(problem.lengths, length - queries + rows.stop)
            yield replace(problem, q=problem.q[rows], query_starts=starts, lengths=lengths), rows


LAWS: tuple[Law, ...] = (
    Law(
        "again",
        "The same call gives the same bits.",
        _unchanged("again", _again),
    ),
    Law(
        "other-blocks",
        "Where the blocks lie in the pool does not matter (bug B171).",
        _unchanged("blocks permuted", other_blocks),
    ),
    Law(
        "unseen-slots",
        "What is in slots that no query sees does not matter (bugs B167, B169).",
        _unchanged("unseen slots changed", other_unseen),
    ),
    Law(
        "table-padding",
        "Entries of the table that nobody needs do not matter (bug B170).",
        _unchanged("padding changed", other_padding),
        requires=(("spare_entries", 3),),
    ),
    Law(
        "wider-table",
        "How wide the table is does not matter (flashinfer issue 4647).",
        _unchanged("table widened", wider_table),
    ),
    Law("alone", "A sequence alone gives what it gives in a batch.", _alone),
    Law("batch-order", "The order of the batch does not matter.", _reversed_batch),
    Law(
        "head-order",
        "The order of the query heads of a group does not matter.",
        _permuted_heads,
    ),
    Law(
        "group-order",
        "The order of the KV heads does not matter, if their queries go with them (bug B187).",
        _permuted_groups,
        kinds=("decode", "unified"),
        requires=(("kv_heads", 2),),
    ),
    Law(
        "one-kv-head",
        "A KV head alone gives its slice of the result (tensor parallelism).",
        _sliced,
        kinds=("decode", "unified"),
        requires=(("kv_heads", 2),),
    ),
    Law(
        "layout",
        "The strides of the cache do not matter (bug B189).",
        _unchanged("layout changed", other_layout),
    ),
    Law(
        "block-size",
        "The block size does not matter, at the same tile of keys (bugs B168, B175).",
        _other_block_sizes,
        requires=(("block_size", 4),),
    ),
    Law(
        "shared-prefix",
        "Shared blocks give what private copies give.",
        _unchanged("blocks copied", unshared),
        requires=(("shared_prefix", True),),
    ),
    Law(
        "double-values",
        "Twice the values, twice the result.",
        _doubled_values,
        kinds=("decode", "unified"),
        requires=(("dtype", "fp32"), ("cache_dtype", "fp32")),
    ),
    Law(
        "scale",
        "A scale of 2 is as good as doubled keys and values (bugs B177, B178, B180).",
        _moved_scale,
        requires=(("cache_dtype", "e5m2"), ("scaling", "one")),
    ),
    Law(
        "double-queries",
        "Twice the queries at half the scale change nothing.",
        _unchanged("queries doubled, scale halved", doubled_queries),
    ),
    Law(
        "wide-window",
        "A window as long as the sequence is none.",
        _unchanged("window as long as the sequence", wide_window),
        kinds=("decode", "unified"),
        requires=(("window", 0),),
    ),
    Law(
        "program-order",
        "The order in which programs run does not matter.",
        _shuffled,
        interpreted_only=True,
    ),
    Law(
        "chunks",
        "A query gives the same in a chunk of any length (chunked prefill).",
        _in_chunks,
        kinds=("unified",),
    ),
)


def law_by_name(name: str) -> Law:
    return next(law for law in LAWS if law.name == name)
