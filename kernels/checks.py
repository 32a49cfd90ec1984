"""What the kernels are held to: run by ``kvproof kernels check`` and by the tests alike.

A check is a plain function of a ``Plan``; it raises an ``AssertionError`` that says what is wrong,
with the case that Hypothesis shrank it to, and returns a remark.  On the CPU, kernels are
interpreted and everything is drawn freely; on a GPU, they are compiled, and what is drawn keeps to
a few families of kernels (``cases.compiled_cases``) with the tiles that are used in earnest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import hypothesis
import torch
from hypothesis import strategies as st

from kvproof.kernels.attention.arguments import FLOAT8_DTYPES, Attention
from kvproof.kernels.bounds import OutOfBound, Tightness, hold_to_bound, hold_to_flash_rule
from kvproof.kernels.cache import (
    copy_blocks,
    gather_blocks,
    reciprocal,
    scatter_blocks,
    write_kv,
)
from kvproof.kernels.cases import (
    DTYPES,
    LAYOUTS,
    Case,
    Layout,
    build,
    cases,
    compiled_cases,
    laid_in,
    strided_on,
)
from kvproof.kernels.laws import LAWS, Law
from kvproof.kernels.problem import (
    KINDS,
    Attend,
    Kind,
    Problem,
    attend,
    attend_poisoned,
    bits,
)
from kvproof.kernels.reference import dense


@dataclass(frozen=True)
class Plan:
    """How thoroughly to check, and where.

    ``examples`` per property; laws have a fortieth of them.  ``shrink``: whether a case that fails
    is made smaller before it is shown, which takes a while.
    """

    device: str = "cpu"
    examples: int = 300
    seed: int = 0
    shrink: bool = True

    @property
    def law_examples(self) -> int:
        return max(1, self.examples // 40)


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    claim: str
    run: Callable[[Plan], str]


T = TypeVar("T")
PHASES = (hypothesis.Phase.generate, hypothesis.Phase.shrink)


def for_all(
    plan: Plan, strategy: st.SearchStrategy[T], judge: Callable[[T], None], examples: int
) -> None:
    """``judge`` on what ``strategy`` draws, the same for the same seed; shrunk if one fails."""

    @hypothesis.seed(plan.seed)
    @hypothesis.settings(
        max_examples=examples,
        phases=PHASES if plan.shrink else PHASES[:1],
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def judged(case: T) -> None:
        judge(case)

    judged()


def drawn(kind: Kind, device: str, small: bool = False) -> st.SearchStrategy[Case]:
    """Cases for ``device``: any at all where they are interpreted, of few kernels otherwise."""
    if device == "cpu":
        return cases([kind], small=small)
    return compiled_cases(kind, 2) if small else compiled_cases(kind)


# Against the reference


def matches_reference(kind: Kind, plan: Plan, run: Attend = attend_poisoned) -> str:
    """All features drawn together, within the derived bound of float64, into poisoned memory."""
    tightest = Tightness(0.0, 0.0)

    def judge(case: Case) -> None:
        nonlocal tightest
        problem = build(case, plan.device)
        got = hold_to_bound(problem, run(problem))
        tightest = Tightness(max(tightest.out, got.out), max(tightest.lse, got.lse))

    for_all(plan, drawn(kind, plan.device), judge, plan.examples)
    return f"at most {tightest.out:.2f} of the bound of out, {tightest.lse:.2f} of that of lse"


def long_case(kind: Kind, dtype: str, cache_dtype: str | None = None) -> Case:
    """One sequence of 1,200 keys, the last 1,000 in the window where the kernel has one.

    The oldest key that is seen is the needle, or, for MLA, which has no window, the newest.
    """
    plain = kind == "mla"
    return Case(
        kind=kind,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        kv_heads=1,
        group=4,
        head_size=48 if plain else 32,
        value_size=32,
        block_size=16,
        lengths=(1200,),
        queries=(3,) if kind == "unified" else (1,),
        window=0 if plain else 1000,
        layout="HND",
        needle="last" if plain else "first",
        split_size=0 if kind == "unified" else 512,
        tile_rows=16,
        tile_keys=256,
        seed=1,
    )


def fits_device(case: Case, device: str) -> Case:
    """``case`` with a tile of keys that a GPU has room for; the interpreter likes larger ones."""
    return case if device == "cpu" else replace(case, tile_keys=min(case.tile_keys, 32))


def keeps_flash_rule(kind: Kind, plan: Plan, run: Attend = attend) -> str:
    """At most twice the error of plain PyTorch in the same dtype, on a long sequence."""
    shares = []
    for dtype in ("fp32", "fp16", "bf16"):
        for needle in ("none", "first"):
            case = replace(long_case(kind, dtype), needle=needle)
            problem = build(fits_device(case, plan.device), plan.device)
            shares.append(hold_to_flash_rule(problem, run(problem)))
    return f"at most {max(shares):.2f} of what the rule allows"


# Laws


def obeys_law(law: Law, kind: Kind, plan: Plan, run: Attend = attend) -> str:
    """``law`` on small cases that have what it requires."""
    if not law.applies():
        return "not checked: it is a law of the interpreter"

    def judge(case: Case) -> None:
        law.judge(build(replace(case, **dict(law.requires)), plan.device), run)

    for_all(plan, drawn(kind, plan.device, small=True), judge, plan.law_examples)
    return f"{plan.law_examples} cases, bit for bit"


# Edges


def around(*edges: int) -> tuple[int, ...]:
    """Each edge, one less and one more; not below 0."""
    return tuple(sorted({edge + step for edge in edges for step in (-1, 0, 1) if edge + step >= 0}))


def edge_cases(kind: Kind) -> Iterator[tuple[str, Case]]:
    """Each edge by name, with the needle on either side of it."""
    plain = kind == "mla"
    base = Case(
        kind=kind,
        kv_heads=1 if plain else 2,
        group=2,
        head_size=48 if plain else 16,
        value_size=32 if plain else 16,
    )

    def one(**changes: object) -> Case:
        case = replace(base, **changes)  # type: ignore[arg-type]
        if kind == "unified":
            return replace(case, split_size=0, queries=tuple(min(2, n) for n in case.lengths))
        return replace(case, queries=(1,) * len(case.lengths))

    for block_size in (1, 3, 16, 256):
        lengths = around(block_size, 2 * block_size) if block_size < 256 else (255, 257)
        keys = 256 if block_size == 256 else 16
        for length in lengths:
            yield (
                f"{length} keys in blocks of {block_size}",
                one(block_size=block_size, lengths=(length,), needle="block edge", tile_keys=keys),
            )
    for length in around(16, 32):
        for needle in ("split edge", "last"):
            yield (
                f"{length} keys in splits of 16, needle: {needle}",
                one(lengths=(length,), split_size=16, needle=needle),
            )
    for window in () if plain else around(1, 4, 16, 20):
        for needle in ("first", "before"):
            yield (
                f"window {window} over 20 keys, needle: {needle}",
                one(lengths=(20,), window=window, needle=needle, split_size=16),
            )
    yield "a batch of one, one key", one(lengths=(1,))
    yield "an empty sequence between others", one(lengths=(5, 0, 18), split_size=16)
    yield "only empty sequences", one(lengths=(0, 0))
    yield "only empty sequences, split", one(lengths=(0, 0), spare_entries=9, split_size=16)
    yield "no sequence", one(lengths=())
    if not plain:
        yield (
            "empty sequences with sinks",
            one(lengths=(0, 3), sinks=True, spare_entries=9, split_size=16),
        )


def holds_at_edges(kind: Kind, plan: Plan, run: Attend = attend_poisoned) -> str:
    """Every edge case within the bound; the message names the edge."""
    count = 0
    for name, case in edge_cases(kind):
        problem = build(fits_device(case, plan.device), plan.device)
        try:
            hold_to_bound(problem, run(problem))
        except OutOfBound as error:
            raise OutOfBound(f"{name}: {error}") from error
        count += 1
    return f"{count} edges"


def extreme_scores(kind: Kind, device: str) -> Iterator[tuple[str, Problem]]:
    """Scores that no finite stand-in for minus infinity survives, and such that overflow exp.

    (flashinfer issue 4450: with -5e4 for minus infinity, a lower score gives zeros.)
    """
    plain = kind == "mla"
    case = Case(
        kind=kind,
        head_size=48 if plain else 16,
        value_size=32 if plain else 16,
        lengths=(5,),
        queries=(2,) if kind == "unified" else (1,),
        block_size=2,
    )
    for size in (-1e30, -6e4, 6e4, 1e30):
        problem = build(case, device)
        q = torch.ones_like(problem.q)
        k_cache = torch.full_like(problem.k_cache, size / case.head_size)
        filled = problem.with_caches(lambda cache, k=k_cache: k[..., : cache.shape[3]])  # type: ignore[misc]
        yield f"all scores {size:g}", replace(filled, q=q).with_features(scale=1.0)


def survives_extreme_scores(kind: Kind, plan: Plan, run: Attend = attend) -> str:
    """Equal scores of any size weigh alike: the result is that of scores of 0, the mean of V.

    Held to the bound of those, for that of scores of 1e30 allows anything.
    """
    for name, problem in extreme_scores(kind, plan.device):
        if kind != "mla":
            values = torch.randn(problem.v_cache.shape, generator=torch.Generator().manual_seed(0))
            problem = replace(problem, v_cache=values.to(plan.device))
        calm = replace(problem, q=torch.zeros_like(problem.q))
        result = run(problem)
        try:
            hold_to_bound(calm, Attention(result.out, dense(calm).lse))
            hold_to_bound(problem, Attention(dense(problem).out, result.lse))
        except OutOfBound as error:
            raise OutOfBound(f"{name}: {error}") from error
    return "scores from -1e30 to 1e30"


def far_problem(kind: Kind, device: str) -> Problem:
    """A pool of more than 2^31 elements of which only the highest blocks are used.

    K and V share it, and the pages in between are never touched: on a host they take no memory.
    (vllm pull 47671, issue 50427: a product of a block id and a stride in 32 bits.)
    """
    plain = kind == "mla"
    size, block_size = (48, 16) if plain else (64, 16)
    blocks = 2**31 // (block_size * size) + 8
    pool = torch.empty((blocks, block_size, 1, size), dtype=torch.float8_e4m3fn, device=device)
    draw = torch.Generator().manual_seed(0)
    used = torch.randn(6, block_size, 1, size, generator=draw).to(pool.dtype)
    ids = torch.tensor([[blocks - 1, 0, blocks - 3], [blocks - 2, blocks - 4, 1]])
    for n, block in enumerate(ids.reshape(-1).tolist()):
        bits(pool[block]).copy_(bits(used[n]))
    case = Case(
        kind=kind,
        cache_dtype="e4m3",
        head_size=size,
        value_size=32 if plain else size,
        block_size=block_size,
        lengths=(45, 33),
        queries=(2, 1) if kind == "unified" else (1, 1),
        kv_heads=1,
        group=2,
    )
    small = build(case, device)
    return replace(
        small, k_cache=pool, v_cache=pool[..., : case.value_size], block_table=ids.to(device).int()
    )


def reaches_far_blocks(kind: Kind, plan: Plan, run: Attend = attend) -> str:
    """The highest blocks of a pool of more than 2^31 elements are read right."""
    problem = far_problem(kind, plan.device)
    hold_to_bound(problem, run(problem))
    return f"block {problem.k_cache.shape[0] - 1} of {problem.k_cache.numel():,} elements"


# Writing and copying


@dataclass(frozen=True)
class Write:
    """Tokens to be written into slots of a pool."""

    dtype: str
    cache_dtype: str
    tokens: int
    blocks: int
    block_size: int
    heads: int
    size: int
    layout: Layout
    scaled: bool
    seed: int


WRITES = st.builds(
    lambda dtype, quantised, **rest: Write(dtype=dtype, cache_dtype=quantised or dtype, **rest),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    quantised=st.sampled_from(["e4m3", "e5m2", ""]),
    tokens=st.integers(0, 6),
    blocks=st.integers(2, 4),
    block_size=st.sampled_from([4, 1, 3, 16]),
    heads=st.integers(1, 3),
    size=st.sampled_from([16, 24, 80]),
    layout=st.sampled_from(LAYOUTS),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
COMPILED_WRITES = st.builds(
    replace,
    st.sampled_from(
        [
            Write("bf16", "bf16", 1, 40, 16, 8, 128, "NHD", False, 0),
            Write("bf16", "e4m3", 1, 40, 16, 8, 128, "HND", True, 0),
            Write("fp16", "e5m2", 1, 9, 3, 2, 80, "NHD", True, 0),
            Write("fp32", "fp32", 1, 99, 1, 3, 24, "strided", False, 0),
        ]
    ),
    tokens=st.integers(0, 60),
    seed=st.integers(0, 2**16),
)

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 464.0, 1e-3, 2.0**-9, 3e38, -57345.0)
"""Zeros of both signs, what saturates, what is subnormal in a float8, and no number."""


def written_right(write: Write, device: str, run: Callable[..., None] = write_kv) -> None:
    """The named slots hold exactly what they should, and no other slot has changed a bit."""
    draw = torch.Generator().manual_seed(write.seed)
    shape = (min(write.tokens, write.blocks * write.block_size), write.heads, write.size)
    source = torch.randn(shape, generator=draw) * 10
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=draw)]
    source = torch.where(torch.rand(shape, generator=draw) < 0.2, special, source)
    source = source.to(DTYPES[write.dtype]).to(device)
    pool = torch.randn(write.blocks, write.block_size, write.heads, write.size, generator=draw)
    caches = [
        strided_on(laid_in(write.layout, pool, DTYPES[write.cache_dtype]), device) for _ in range(2)
    ]
    slots = torch.randperm(write.blocks * write.block_size, generator=draw)[: shape[0]]
    slots[torch.rand(shape[0], generator=draw) < 0.2] = -1
    slots = slots.to(device)
    scales: dict[str, float | torch.Tensor] = {}
    if write.scaled and DTYPES[write.cache_dtype] in FLOAT8_DTYPES:
        per_head = (torch.rand(write.heads, generator=draw) + 0.25).to(device)
        scales = {"k_scale": 0.3, "v_scale": per_head}
    expected = [
        expected_cache(cache, source, slots, scales.get(name, 1.0))
        for cache, name in zip(caches, ("k_scale", "v_scale"), strict=True)
    ]
    run(source, source, *caches, slots, **scales)
    for name, cache, right in zip("KV", caches, expected, strict=True):
        _same_cache(f"{name} written", cache, right)


def expected_cache(
    cache: torch.Tensor, source: torch.Tensor, slots: torch.Tensor, scale: float | torch.Tensor
) -> torch.Tensor:
    """A copy of ``cache`` ``[N, BS, KH, D]`` with ``source`` in its slots, by PyTorch alone."""
    if cache.dtype in FLOAT8_DTYPES:
        largest = torch.finfo(cache.dtype).max
        factor = reciprocal(scale, cache.shape[2], cache.device)
        exact = source.float() * factor[:, None]
        source = exact.clamp(-largest, largest).to(cache.dtype)
    right = bits(cache).clone(memory_format=torch.contiguous_format)
    kept = slots >= 0
    right.view(-1, *cache.shape[2:])[slots[kept].long()] = bits(source)[kept]
    return right.view(cache.dtype)


def _same_cache(name: str, got: torch.Tensor, right: torch.Tensor) -> None:
    """Equal bit for bit, except that any NaN will do for a NaN."""
    same = (bits(got) == bits(right)) | (got.float().isnan() & right.float().isnan())
    if not same.all():
        index = [int(i) for i in (~same).nonzero()[0]]
        raise AssertionError(
            f"{name}: {index} holds {float(got[tuple(index)].float())} instead of "
            f"{float(right[tuple(index)].float())}; {int((~same).sum())} elements differ"
        )


def writes_exactly(plan: Plan, run: Callable[..., None] = write_kv) -> str:
    strategy = WRITES if plan.device == "cpu" else COMPILED_WRITES
    for_all(plan, strategy, lambda write: written_right(write, plan.device, run), plan.examples)
    return f"{plan.examples} writes, bit for bit"


def copied_right(write: Write, device: str, run: Callable[..., None] = copy_blocks) -> None:
    """Copies within a pool, and out of it and back, by bits; blocks not named keep theirs."""
    draw = torch.Generator().manual_seed(write.seed)
    dtype = DTYPES[write.cache_dtype]
    shape = (write.blocks + 2, write.block_size, write.heads, write.size)
    pool = torch.randint(-128, 127, (*shape[:3], write.size * 4), dtype=torch.int8, generator=draw)
    content = pool[..., : write.size * dtype.itemsize].contiguous().view(dtype)
    cache = strided_on(laid_in(write.layout, content, dtype), device)
    before = bits(cache).clone()
    order = torch.randperm(shape[0], generator=draw).to(device)
    count = min(write.tokens, shape[0] // 2)
    targets, sources = order[:count], order[shape[0] - count :]
    sources = sources[torch.randint(max(1, count), (count,), generator=draw).to(device)]

    run(cache, sources, targets)
    right = before.clone()
    right[targets] = before[sources]
    _same_bits_of("copied", bits(cache), right)
    staging = gather_blocks(cache, sources)
    _same_bits_of("gathered", bits(staging), right[sources])
    scatter_blocks(gather_blocks(cache, order), cache, order.flip(0))
    scattered = right.clone()
    scattered[order.flip(0)] = right[order]
    _same_bits_of("scattered", bits(cache), scattered)


def _same_bits_of(name: str, got: torch.Tensor, right: torch.Tensor) -> None:
    different = (got != right).nonzero()
    assert not different.numel(), f"{name}: {len(different)} elements differ, first {different[0]}"


def copies_exactly(plan: Plan, run: Callable[..., None] = copy_blocks) -> str:
    strategy = WRITES if plan.device == "cpu" else COMPILED_WRITES
    examples = max(1, plan.examples // 3)
    for_all(plan, strategy, lambda write: copied_right(write, plan.device, run), examples)
    return f"{examples} copies, bit for bit"


def moves_far_blocks(plan: Plan) -> str:
    """Writing to, and copying between, the ends of a pool of more than 2^31 elements."""
    cache = far_problem("decode", plan.device).k_cache
    blocks, block_size, _, size = cache.shape
    draw = torch.Generator().manual_seed(1)
    source = torch.randn(1, 1, size, generator=draw).to(plan.device)
    slot = torch.tensor([blocks * block_size - 1], device=plan.device)
    write_kv(source, source, cache, cache[..., :size], slot)
    assert torch.equal(bits(cache[-1, -1]), bits(source.to(cache.dtype)[0])), "written elsewhere"
    last, first = (torch.tensor([n], device=plan.device) for n in (blocks - 1, 0))
    copy_blocks(cache, last, first)
    assert torch.equal(bits(cache[0]), bits(cache[-1])), "copied elsewhere"
    scatter_blocks(gather_blocks(cache, first), cache, last - 1)
    assert torch.equal(bits(cache[-2]), bits(cache[-1])), "gathered or scattered elsewhere"
    return f"block {blocks - 1} of {cache.numel():,} elements"


def all_checks() -> tuple[Check, ...]:
    """Every check, by name: what ``kvproof kernels check`` runs."""
    return tuple(_checks())


def _checks() -> Iterator[Check]:
    per_kind: tuple[tuple[str, str, Callable[[Kind, Plan], str]], ...] = (
        ("reference", "Within the derived bound of dense float64 attention.", matches_reference),
        ("flash-rule", "At most twice the error of plain PyTorch.", keeps_flash_rule),
        ("edges", "Right at every edge of blocks, tiles, splits, windows.", holds_at_edges),
        ("extreme-scores", "Right for scores of any size (bug B188).", survives_extreme_scores),
        ("far-blocks", "Right past 2^31 elements (bugs B171 to B173).", reaches_far_blocks),
    )
    for kind in KINDS:
        for name, claim, function in per_kind:
            yield Check(
                f"{kind}-{name}",
                claim,
                lambda plan, f=function, k=kind: f(k, plan),  # type: ignore[misc]
            )
    for law in LAWS:
        for kind in law.kinds:
            yield Check(
                f"{kind}-law-{law.name}",
                law.claim,
                lambda plan, law=law, k=kind: obeys_law(law, k, plan),  # type: ignore[misc]
            )
    yield Check("write", "Tokens land in their slots, exactly, and nowhere else.", writes_exactly)
    yield Check("copy", "Blocks are copied by bits, and no other changes.", copies_exactly)
    yield Check("far-moves", "Writes and copies reach past 2^31 elements.", moves_far_blocks)
