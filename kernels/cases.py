"""Problems to try a kernel on: described by small numbers, built in full from them.

A ``Case`` is what Hypothesis draws, shrinks and prints.  ``build`` makes the tensors, always the
same for the same case.  What it builds is as unkind as the contract allows:

* blocks stand in the pool in any order, among blocks of nobody;
* every slot that no query may see holds NaN or infinity (vllm pulls 936 and 30887);
* entries of the table that nobody needs hold garbage, -1 and 2^31 - 1 among it;
* with a needle, one key at an edge (the oldest or the newest seen, one beside the end of a block
  or of a split) carries most of the weight and a large value: to lose it is seen in every dtype.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from hypothesis import strategies as st

from kvproof.kernels.attention.arguments import FLOAT8_DTYPES, Features, Scale
from kvproof.kernels.attention.mla import as_value_cache
from kvproof.kernels.problem import KINDS, Kind, Problem, bits, first_seen, seen_slots

Layout: TypeAlias = Literal["NHD", "HND", "heads first", "interleaved", "padded", "strided"]
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND", "heads first", "interleaved", "padded", "strided")
Needle: TypeAlias = Literal["none", "first", "last", "before", "block edge", "split edge"]
NEEDLES: tuple[Needle, ...] = ("none", "first", "last", "before", "block edge", "split edge")
Scaling: TypeAlias = Literal["one", "number", "per head"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
NEEDLE_VALUE = 8.0
GARBAGE = (-1, 10**6, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Case:
    """All that a problem is made of.

    ``lengths`` and ``queries`` are tokens per sequence; decode and MLA have one query each.  For
    MLA ``head_size`` is the width of the cache, ``value_size`` its latent part.
    """

    kind: Kind = "decode"
    dtype: str = "fp32"
    cache_dtype: str = "fp32"
    kv_heads: int = 1
    group: int = 1
    head_size: int = 16
    value_size: int = 16
    block_size: int = 4
    lengths: tuple[int, ...] = (5,)
    queries: tuple[int, ...] = (1,)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    scaling: Scaling = "one"
    layout: Layout = "NHD"
    needle: Needle = "none"
    shared_prefix: bool = False
    spare_entries: int = 0
    """Entries of the table past what the longest sequence needs."""
    long_ids: bool = False
    """Table, lengths and query starts in int64."""
    split_size: int = 0
    tile_rows: int = 16
    tile_keys: int = 16
    seed: int = 0


def build(case: Case, device: str = "cpu") -> Problem:
    """The problem that ``case`` describes, on ``device``."""
    draw = torch.Generator().manual_seed(case.seed)
    table, blocks = _table(case, draw)
    q, k, v = _contents(case, table, blocks, draw)
    features = _features(case, draw)
    k_scale, v_scale = _scales(case, draw)
    k_cache, v_cache = _caches(case, k / _factor(k_scale), v / _factor(v_scale))
    index = torch.int64 if case.long_ids else torch.int32
    starts = torch.tensor([0, *case.queries]).cumsum(0)
    problem = Problem(
        case.kind,
        q.to(DTYPES[case.dtype]),
        k_cache,
        v_cache,
        _with_garbage(case, table, draw).to(index),
        starts.to(index),
        torch.tensor(case.lengths, dtype=index),
        features,
        k_scale,
        v_scale,
        case.split_size,
        case.tile_rows,
        case.tile_keys,
    )
    _poison(problem, draw)
    return problem if device == "cpu" else moved(problem, device)


def moved(problem: Problem, device: str) -> Problem:
    """The problem with its tensors on ``device``, strides kept."""
    features = problem.features
    sinks, alibi = (
        None if tensor is None else tensor.to(device) for tensor in (features.sinks, features.alibi)
    )
    k_scale, v_scale = (
        scale.to(device) if isinstance(scale, torch.Tensor) else scale
        for scale in (problem.k_scale, problem.v_scale)
    )
    k_cache, v_cache = _caches_on(problem, device)
    return replace(
        problem,
        q=problem.q.to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=problem.block_table.to(device),
        query_starts=problem.query_starts.to(device),
        lengths=problem.lengths.to(device),
        features=replace(features, sinks=sinks, alibi=alibi),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _caches_on(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache = strided_on(problem.k_cache, device)
    if problem.kind == "mla":
        return k_cache, as_value_cache(k_cache.squeeze(2), problem.v_cache.shape[3])
    return k_cache, strided_on(problem.v_cache, device)


def strided_on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on ``device`` with the same strides; ``to`` would close the gaps of a view."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    storage = torch.zeros(span, dtype=tensor.dtype, device=device)
    view = storage.as_strided(tensor.shape, tensor.stride())
    view.copy_(tensor)
    return view


# Positions and slots


def _table(case: Case, draw: torch.Generator) -> tuple[list[list[int]], int]:
    """Block ids per sequence, in any order, and the number of blocks in the pool."""
    size = case.block_size
    shared = min(length // size for length in case.lengths) if case.shared_prefix else 0
    needed = [-(-length // size) for length in case.lengths]
    private = sum(needed) - shared * (len(needed) - 1 if needed else 0)
    blocks = private + 2
    free = torch.randperm(blocks, generator=draw).tolist()
    prefix = [free.pop() for _ in range(shared)]
    return [prefix + [free.pop() for _ in range(n - shared)] for n in needed], blocks


def _with_garbage(case: Case, table: list[list[int]], draw: torch.Generator) -> torch.Tensor:
    width = max((len(row) for row in table), default=0) + case.spare_entries
    choice = torch.randint(len(GARBAGE), (len(table), width), generator=draw)
    whole = torch.tensor(GARBAGE)[choice]
    for sequence, row in enumerate(table):
        if case.queries[sequence]:
            length, queries = case.lengths[sequence], case.queries[sequence]
            first = first_seen(length, queries, case.window) // case.block_size
            whole[sequence, first : len(row)] = torch.tensor(row[first:], dtype=torch.long)
    return whole


# Contents


def _contents(
    case: Case, table: list[list[int]], blocks: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, float32, unpoisoned and not yet divided by a scale."""
    heads = case.kv_heads * case.group
    pool = (blocks, case.block_size, case.kv_heads)
    q = torch.randn(sum(case.queries), heads, case.head_size, generator=draw)
    k = torch.randn(*pool, case.head_size, generator=draw)
    v = torch.randn(*pool, case.value_size, generator=draw)
    if case.kind == "mla":
        v = k[..., : case.value_size]
    if case.needle != "none":
        _place_needles(case, table, q, k, v, draw)
    return q, k, v


def _place_needles(
    case: Case,
    table: list[list[int]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    draw: torch.Generator,
) -> None:
    """Align the key at the needle's position with its sequence's last query, and raise its value.

    Its score is log(length) + 2, most of the weight among keys that score about 0.
    """
    row = -1
    for ids, length, queries in zip(table, case.lengths, case.queries, strict=True):
        row += queries
        position = needle_position(case, length, queries)
        if position is None:
            continue
        direction = torch.randint(0, 2, (case.head_size,), generator=draw) * 2.0 - 1.0
        if case.kind == "mla":
            # The latent part is the value, too: it is to be large, and the query small.
            direction = direction.abs()
        score = math.log(length) + 2.0
        block, slot = ids[position // case.block_size], position % case.block_size
        strength = NEEDLE_VALUE if case.kind == "mla" else 1.0
        k[block, slot] = direction * strength
        q[row] = direction * (score / (scale_of(case) * case.head_size * strength))
        v[block, slot] = NEEDLE_VALUE


def needle_position(case: Case, length: int, queries: int) -> int | None:
    """Where the needle of a sequence lies, or None where there is no such place."""
    if length == 0 or queries == 0:
        return None
    first = first_seen(length, 1, case.window)
    edge = case.block_size if case.needle == "block edge" else case.split_size or case.tile_keys
    position = {
        "first": first,
        "last": length - 1,
        "before": first - 1,
        "block edge": length // edge * edge - 1,
        "split edge": length // edge * edge - 1,
    }[case.needle]
    return position if position >= 0 else None


def scale_of(case: Case) -> float:
    return 1 / math.sqrt(case.head_size)


def _features(case: Case, draw: torch.Generator) -> Features:
    heads = case.kv_heads * case.group
    sinks = torch.randn(heads, generator=draw) if case.sinks else None
    alibi = torch.rand(heads, generator=draw) if case.alibi else None
    return Features(scale_of(case), case.window, case.softcap, sinks, alibi)


def _scales(case: Case, draw: torch.Generator) -> tuple[Scale, Scale]:
    """Scales of K and V, different ones, so that one taken for the other is seen."""
    if case.scaling == "one" or DTYPES[case.cache_dtype] not in FLOAT8_DTYPES:
        return 1.0, 1.0
    if case.scaling == "number":
        k_scale, v_scale = (torch.rand(2, generator=draw) + 0.25).tolist()
        return (k_scale, k_scale) if case.kind == "mla" else (k_scale, v_scale)
    k_scales, v_scales = torch.rand(2, case.kv_heads, generator=draw) + 0.25
    return (k_scales, k_scales) if case.kind == "mla" else (k_scales, v_scales)


def _factor(scale: Scale) -> Scale:
    return scale[:, None] if isinstance(scale, torch.Tensor) else scale


def _poison(problem: Problem, draw: torch.Generator) -> None:
    """NaN or infinity into every slot that nobody may see."""
    unseen = ~seen_slots(problem)
    # The front of a latent cache is its V: to poison the cache once is enough.
    caches = (problem.k_cache,) if problem.kind == "mla" else (problem.k_cache, problem.v_cache)
    for cache in caches:
        shape = (int(unseen.sum()), *cache.shape[2:])
        choice = torch.randint(3, shape, generator=draw)
        poison = torch.tensor([math.nan, math.inf, -math.inf])[choice]
        bits(cache)[unseen] = bits(poison.to(cache.dtype))


# Layouts


def _caches(case: Case, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = DTYPES[case.cache_dtype]
    if case.kind == "mla":
        k_cache = laid_in(case.layout, k, dtype)
        return k_cache, as_value_cache(k_cache.squeeze(2), case.value_size)
    if case.layout == "interleaved":
        # One tensor for both, as vLLM allocates it; to assume that K ends where V begins is wrong.
        widest = max(case.head_size, case.value_size)
        blocks, block_size, heads, _ = k.shape
        both = torch.zeros(blocks, 2, block_size, heads, widest, dtype=dtype)
        k_cache, v_cache = both[:, 0, ..., : case.head_size], both[:, 1, ..., : case.value_size]
        k_cache.copy_(k)
        v_cache.copy_(v)
        return k_cache, v_cache
    return laid_in(case.layout, k, dtype), laid_in(case.layout, v, dtype)


def laid_in(layout: Layout, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of ``x`` ``[N, BS, KH, D]`` with the strides of ``layout``."""
    blocks, block_size, heads, size = x.shape
    if layout == "HND":
        view = torch.zeros(blocks, heads, block_size, size, dtype=dtype).transpose(1, 2)
    elif layout == "heads first":
        view = torch.zeros(heads, blocks, block_size, size, dtype=dtype).permute(1, 2, 0, 3)
    elif layout == "padded":
        view = torch.zeros(blocks, block_size, heads, size + 3, dtype=dtype)[..., :size]
    elif layout == "strided":
        view = torch.zeros(blocks, block_size, heads, size, 2, dtype=dtype)[..., 0]
    else:
        view = torch.zeros(blocks, block_size, heads, size, dtype=dtype)
    view.copy_(x)
    return view


# Strategies


HEAD_SIZES = (16, 32, 24, 64, 40, 80, 128, 96, 192, 256)
BLOCK_SIZES = (4, 1, 16, 2, 3, 5, 8, 17, 32, 64, 256)
LATENTS = ((32, 16), (24, 8), (64, 32), (512, 64))
"""Latent and rotary sizes, those of DeepSeek last."""
LONGEST_COMPILED = 500
"""Keys, on a GPU, where a tile has 64."""
LONGEST = 40
"""Keys: two tiles of 16 and a half, which crosses every kind of edge."""


ANYTHING: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from(["one", "number", "per head"]),
        "layout": st.sampled_from(LAYOUTS),
        "needle": st.sampled_from(NEEDLES),
        "shared_prefix": st.booleans(),
        "spare_entries": st.integers(0, 3),
        "long_ids": st.booleans(),
        "tile_rows": st.sampled_from([16, 32]),
        "seed": st.integers(0, 2**16),
    }
)
"""What any kernel may meet, whatever else there is."""
WITH_SCORES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([0.0, 0.0, 1.0, 5.0, 30.0]),
        "sinks": st.booleans(),
        "alibi": st.booleans(),
    }
)
WINDOWS = st.sampled_from([0, 0, 1, 2, 7, 15, 16, 17, 33, 100])
HEADS = st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 1), (1, 5), (1, 8), (3, 3)])
"""KV heads, and query heads to each."""
TILES_OF_KEYS = st.sampled_from([16, 32])
SPLITS = st.integers(0, 2)
# A strategy made anew for each case would cost more than what it draws.
sampled = functools.cache(st.sampled_from)


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: Sequence[Kind] = KINDS,
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16"),
    quantised: bool = True,
    small: bool = False,
) -> Case:
    """A case with all features drawn together; ``small`` keeps to sizes that run fast."""
    kind = draw(sampled(tuple(kinds)))
    plain = kind == "mla"
    dtype = draw(sampled(tuple(dtypes)))
    block_size = draw(sampled(BLOCK_SIZES[:5] if small else BLOCK_SIZES))
    window = 0 if plain else draw(WINDOWS)
    tile_keys = draw(TILES_OF_KEYS)
    split_size = 0 if kind == "unified" else tile_keys * draw(SPLITS)
    edges = sorted({block_size, window, tile_keys, split_size, 16, LONGEST})
    lengths, queries = draw(_tokens(kind, tuple(edges)))
    kv_heads, group = draw(HEADS)
    head_size, value_size = draw(_head_sizes(kind, small))
    return Case(
        kind=kind,
        dtype=dtype,
        cache_dtype=draw(sampled((dtype, "e4m3", "e5m2") if quantised else (dtype,))),
        kv_heads=1 if plain else kv_heads,
        group=kv_heads * group if plain else group,
        head_size=head_size,
        value_size=value_size,
        block_size=block_size,
        lengths=lengths,
        queries=queries,
        window=window,
        split_size=split_size,
        tile_keys=tile_keys,
        **({} if plain else draw(WITH_SCORES)),
        **draw(ANYTHING),
    )


@functools.cache
def _lengths(edges: tuple[int, ...], longest: int) -> st.SearchStrategy[list[int]]:
    """Keys of one to three sequences, often one more or less than an edge."""
    near = st.builds(lambda edge, step: edge + step, st.sampled_from(edges), st.integers(-1, 1))
    length = st.one_of(st.integers(0, longest), near.map(lambda n: min(max(0, n), longest)))
    return st.lists(length, min_size=1, max_size=3)


@functools.cache
def _queries(length: int) -> st.SearchStrategy[int]:
    """How many of the last tokens of a sequence attend: a few, one, or all."""
    return st.one_of(st.integers(0, min(8, length)), st.just(min(1, length)), st.just(length))


@st.composite
def _tokens(
    draw: st.DrawFn, kind: Kind, edges: tuple[int, ...], longest: int = LONGEST
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Keys and queries of one to three sequences."""
    lengths = tuple(draw(_lengths(edges, longest)))
    if kind != "unified":
        return lengths, (1,) * len(lengths)
    return lengths, tuple(draw(_queries(length)) for length in lengths)


@st.composite
def _head_sizes(draw: st.DrawFn, kind: Kind, small: bool) -> tuple[int, int]:
    if kind == "mla":
        latent, rotary = draw(sampled(LATENTS[:2] if small else LATENTS))
        return latent + rotary, latent
    sizes = sampled(HEAD_SIZES[:3] if small else HEAD_SIZES)
    head_size = draw(sizes)
    return head_size, draw(_value_sizes(head_size, small))


@functools.cache
def _value_sizes(head_size: int, small: bool) -> st.SearchStrategy[int]:
    """The head size of V: mostly that of K."""
    return st.one_of(st.just(head_size), sampled(HEAD_SIZES[:3] if small else HEAD_SIZES))


# On a GPU every combination of features, sizes and layout is a kernel to be compiled first.

FAMILIES_PER_KIND = 12


def families(kind: Kind, count: int = FAMILIES_PER_KIND) -> tuple[Case, ...]:
    """Combinations to be compiled: together they have every dtype, layout and feature.

    Tiles are those that the launchers choose by themselves.
    """
    draw = random.Random(f"{kind} families")
    return tuple(_family(kind, number, draw) for number in range(count))


def _family(kind: Kind, number: int, draw: random.Random) -> Case:
    dtype = ("bf16", "fp16", "fp32")[number % 3]
    plain = kind == "mla"
    kv_heads, group = draw.choice([(1, 1), (2, 4), (2, 1), (1, 5), (1, 8), (3, 3)])
    head_size = HEAD_SIZES[number % len(HEAD_SIZES)]
    latent, rotary = LATENTS[number % len(LATENTS)]
    widest = latent if plain else head_size
    tile_keys = 16 if dtype == "fp32" else 32 if plain or widest > 128 else 64
    return Case(
        kind=kind,
        dtype=dtype,
        cache_dtype=(dtype, "e4m3", "e5m2", dtype)[number % 4],
        kv_heads=1 if plain else kv_heads,
        group=kv_heads * group if plain else group,
        head_size=latent + rotary if plain else head_size,
        value_size=widest,
        block_size=draw.choice((16, 1, 3, 64, 256, 17)),
        window=0 if plain else (0, 33)[number % 2],
        softcap=0.0 if plain else (0.0, 0.0, 5.0)[number % 3],
        sinks=not plain and number % 4 > 1,
        alibi=not plain and number % 5 > 2,
        scaling=("one", "number", "per head")[number % 3],
        layout=LAYOUTS[number % len(LAYOUTS)],
        long_ids=number % 6 == 5,
        split_size=0 if kind == "unified" else (0, 128)[number // 2 % 2],
        tile_rows=16 if dtype == "fp32" else 128 if widest <= 128 else 64,
        tile_keys=tile_keys,
    )


@st.composite
def compiled_cases(draw: st.DrawFn, kind: Kind, count: int = FAMILIES_PER_KIND) -> Case:
    """A case of one of the ``families``, of any lengths and contents: few kernels, many inputs."""
    base = draw(st.sampled_from(families(kind, count)))
    window = base.window and draw(st.sampled_from([1, 15, 16, 17, 33, 128, 1000]))
    edges = sorted({base.block_size, window, base.tile_keys, base.split_size, 64, LONGEST_COMPILED})
    lengths, queries = draw(_tokens(kind, tuple(edges), LONGEST_COMPILED))
    return replace(
        base,
        lengths=lengths,
        queries=queries,
        window=window,
        needle=draw(st.sampled_from(NEEDLES)),
        shared_prefix=draw(st.booleans()),
        spare_entries=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
    )
