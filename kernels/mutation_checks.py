"""Which checks catch a planted fault: problems that bring out each one, and the checks on them.

Needs Triton's interpreter.  The problems are few and always the same; the property tests draw
theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import TypeAlias

import torch

from kvproof.kernels.attention.arguments import Attention, Features
from kvproof.kernels.attention.mla import as_value_cache
from kvproof.kernels.bounds import OutOfBound, hold_to_bound
from kvproof.kernels.cases import Case, build
from kvproof.kernels.laws import LAWS, Law, LawBroken
from kvproof.kernels.mutants import CHECKS, MUTANTS, Mutant, Planted, TriedOn, page, planted
from kvproof.kernels.problem import Kind, Problem, poisoned_result, poisoned_workspace
from kvproof.kernels.sanitizer import Region, Sanitizer, output, reads, sanitize, updates
from kvproof.kernels.watched import (
    WastedReads,
    attend_watched,
    hold_to_least_reads,
)

Verdicts: TypeAlias = dict[str, str]
"""Per check that catches a fault, the first thing that it says."""

ALL_CHECKS = frozenset(CHECKS)

CASES: dict[Kind, tuple[Case, ...]] = {
    "decode": (
        Case(
            kv_heads=2,
            group=3,
            head_size=24,
            value_size=24,
            lengths=(21, 0, 19),
            queries=(1, 1, 1),
            split_size=16,
        ),
        Case(
            kv_heads=2,
            group=2,
            block_size=5,
            lengths=(33, 18),
            queries=(1, 1),
            window=7,
            softcap=2.0,
            alibi=True,
            layout="interleaved",
        ),
        Case(
            dtype="bf16",
            cache_dtype="e4m3",
            kv_heads=2,
            head_size=24,
            value_size=16,
            block_size=8,
            lengths=(20, 37),
            queries=(1, 1),
            scaling="per head",
            layout="HND",
        ),
        Case(
            kv_heads=1,
            group=5,
            block_size=3,
            lengths=(40, 5),
            queries=(1, 1),
            window=19,
            sinks=True,
            split_size=16,
        ),
    ),
    "unified": (
        Case(
            kind="unified",
            kv_heads=2,
            group=2,
            head_size=24,
            value_size=24,
            lengths=(21, 6, 33),
            queries=(5, 1, 10),
        ),
        Case(
            kind="unified",
            kv_heads=1,
            group=3,
            block_size=5,
            lengths=(40, 18),
            queries=(20, 3),
            window=7,
            softcap=2.0,
            alibi=True,
        ),
        Case(
            kind="unified",
            dtype="bf16",
            cache_dtype="e5m2",
            kv_heads=2,
            group=2,
            lengths=(30, 7),
            queries=(30, 2),
            window=12,
            scaling="per head",
            layout="interleaved",
        ),
    ),
    "mla": (
        Case(
            kind="mla",
            group=18,
            head_size=24,
            value_size=8,
            lengths=(21, 6, 0),
            queries=(1, 1, 1),
            split_size=16,
        ),
        Case(
            kind="mla",
            dtype="bf16",
            cache_dtype="e4m3",
            group=5,
            head_size=48,
            value_size=32,
            block_size=5,
            lengths=(33, 20),
            queries=(1, 1),
            scaling="number",
        ),
    ),
}


LAW_CASES: dict[Kind, Case] = {
    "decode": Case(kv_heads=2, group=2, lengths=(18, 5), queries=(1, 1), split_size=16),
    "unified": Case(kind="unified", kv_heads=2, group=2, lengths=(18, 5), queries=(4, 1)),
    "mla": Case(kind="mla", group=2, head_size=24, value_size=8, lengths=(18, 5), queries=(1, 1)),
}
"""Small, for each law runs a problem several times."""


LOOP_BOUNDS = ("block_table", "query_starts", "lengths")
"""Fields of a problem that decide how long kernels run, and where they read."""


STRONG_LAWS = ("alone", "block-size", "chunks", "one-kv-head")
"""Tried first, for they catch the most."""


def verdicts_on(
    mutant: Mutant | None, kinds: Iterable[TriedOn], until: frozenset[str] = ALL_CHECKS
) -> Verdicts:
    """What catches ``mutant``, or, for None, the kernels as they are, on any kind of problem."""
    found: Verdicts = {}
    with planted(mutant) as modules:
        for kind in kinds:
            if not until <= found.keys():
                found = {**catch(modules, kind, until), **found}
    if "value" in found:  # poison counts where finite memory shows nothing
        found.pop("poison", None)
    return found


def catch(planted: Planted, kind: TriedOn, until: frozenset[str] = ALL_CHECKS) -> Verdicts:
    """Run the checks for a kind of problem on kernels with a fault; empty where all pass.

    Stops when every check of ``until`` has caught something.
    """
    found: Verdicts = {}
    for verdicts in _runs(planted, kind):
        for check, complaint in verdicts.items():
            found.setdefault(check, complaint)
        if until <= found.keys():
            break
    return found


def _runs(planted: Planted, kind: TriedOn) -> Iterator[Verdicts]:
    if kind == "cache":
        for judge_cache in (judge_write, judge_copy, judge_offload, judge_far_write):
            yield judge_cache(planted.cache)
        return
    for case in CASES[kind]:
        yield judge(build(case), planted.problem.attend)
    yield judge(with_low_scores(build(CASES[kind][0])), planted.problem.attend)
    yield judge_far(far_problem(kind), planted.problem.attend)
    for law in sorted(LAWS, key=lambda law: law.name not in STRONG_LAWS):
        if kind in law.kinds:
            yield judge_law(law, replace(LAW_CASES[kind], **dict(law.requires)), planted)


def judge_law(law: Law, case: Case, planted: Planted) -> Verdicts:
    """One bitwise law on one problem, each run of it guarded."""

    def attend(problem: Problem) -> Attention:
        with guarded(problem):
            return planted.problem.attend_poisoned(problem)

    try:
        law.judge(build(case), attend)
    except LawBroken as complaint:
        return {"laws": str(complaint)}
    return {}


def guarded(problem: Problem) -> AbstractContextManager[Sanitizer]:
    """The sanitizer with nothing reported, so that a wild address cannot end the process.

    What loops go by is read-only: a store past the end of the result would otherwise be allowed
    where it happens to land in ``lengths``, and the loop over the keys would never end.
    """
    bounds = {name: getattr(problem, name) for name in LOOP_BOUNDS}
    return sanitize(bounds, raises=False, poison=False)


def judge(problem: Problem, run: Callable[..., Attention]) -> Verdicts:
    """The checks on one problem: first with finite memory, then poisoned and watched."""
    found: Verdicts = {}
    result, scratch = poisoned_result(problem), poisoned_workspace(problem)
    for tensor in scratch or ():
        tensor.zero_()
    with guarded(problem):
        run(problem.with_caches(_finite), result, scratch)
    _note(found, "value", lambda: hold_to_bound(problem, result))
    result, sanitizer = attend_watched(problem, run, raises=False)
    if "value" not in found:
        _note(found, "poison", lambda: hold_to_bound(problem, result))
    _note_reports(found, sanitizer)
    _note(found, "reads", lambda: hold_to_least_reads(problem, sanitizer))
    return found


def _note(found: Verdicts, check: str, hold: Callable[[], object]) -> None:
    try:
        hold()
    except (OutOfBound, WastedReads) as complaint:
        found[check] = str(complaint)


def _note_reports(found: Verdicts, sanitizer: Sanitizer) -> None:
    try:
        sanitizer.check()
    except AssertionError:
        found["sanitizer"] = str(sanitizer.reports[0])


def _finite(cache: torch.Tensor) -> torch.Tensor:
    """A copy of a cache, strides kept, with ordinary numbers where it holds NaN or infinity."""
    copy = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype)
    copy.copy_(cache.float().nan_to_num(0.5, 0.5, -0.5))
    return copy


def with_low_scores(problem: Problem) -> Problem:
    """Every score near -40,000: only their differences count (flashinfer issue 4450)."""
    draw = torch.Generator().manual_seed(2)
    keys = 1 + torch.randn(problem.k_cache.shape, generator=draw) * 2.0**-13
    is_seen = problem.k_cache.float().isfinite()
    problem.q.fill_(1.0)
    problem.k_cache.copy_(torch.where(is_seen, keys, torch.nan))
    return problem.with_features(scale=-4.0e4 / problem.q.shape[2])


# Far from the start of a pool


BLOCK_ELEMENTS, WIDTH = 1 << 30, 32


def far_pool() -> torch.Tensor:
    """A cache ``[3, 4, 1, 32]`` of float8 whose block 2 begins at element 2^31.

    The gigabytes between are never touched, so that they exist in the page table only.
    """
    pool = torch.empty(2 * BLOCK_ELEMENTS + 4 * WIDTH, dtype=torch.uint8)
    strides = (BLOCK_ELEMENTS, WIDTH, WIDTH, 1)
    return pool.view(torch.float8_e4m3fn).as_strided((3, 4, 1, WIDTH), strides)


def far_problem(kind: Kind) -> Problem:
    """One sequence, seven keys in the blocks 2 and 0 of pools of 2 GiB (vllm pull 47671)."""
    draw = torch.Generator().manual_seed(1)
    table, heads = torch.tensor([[2, 0]], dtype=torch.int32), 2
    caches = [far_pool() for _ in range(1 if kind == "mla" else 2)]
    for cache in caches:
        for block in table[0].tolist():
            cache[block] = torch.randn(4, 1, WIDTH, generator=draw).to(cache.dtype)
    return Problem(
        kind,
        torch.randn(1, heads, WIDTH, generator=draw).bfloat16(),
        caches[0],
        as_value_cache(caches[0].squeeze(2), 16) if kind == "mla" else caches[1],
        table,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([7], dtype=torch.int32),
        Features(WIDTH**-0.5),
    )


def judge_far(problem: Problem, run: Callable[..., Attention]) -> Verdicts:
    """Value and sanitizer, the caches without shadow memory, and overflow looked for."""
    found: Verdicts = {}
    result = poisoned_result(problem)
    caches = {"k_cache": Region(problem.k_cache, bounds_only=True)}
    if problem.kind != "mla":
        caches["v_cache"] = Region(problem.v_cache, bounds_only=True)
    caches |= {name: Region(getattr(problem, name)) for name in LOOP_BOUNDS}
    with sanitize(caches, raises=False, overflow=True, poison=False) as sanitizer:
        run(problem, result)
    _note(found, "value", lambda: hold_to_bound(problem, result))
    _note_reports(found, sanitizer)
    return found


# What moves keys and values


def judge_write(cache: ModuleType) -> Verdicts:
    """Five tokens, one of them padding, quantised into interleaved caches, into no other slot."""
    draw = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 5, 3, 24, generator=draw) * 100
    slots = torch.tensor([7, -1, 0, 13, 22])
    both = torch.zeros(6, 2, 4, 3, 24).to(torch.float8_e4m3fn)
    caches = {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    scales = (torch.tensor([0.25, 0.5, 2.0]), torch.tensor([4.0, 1.0, 0.125]))
    named = torch.zeros(24, dtype=torch.bool)
    named[slots[slots >= 0]] = True
    named = named.reshape(6, 4, 1, 1)
    regions = {name: output(tensor, named) for name, tensor in caches.items()}
    with sanitize(regions, raises=False) as sanitizer:
        cache.write_kv(key, value, *caches.values(), slots, k_scale=scales[0], v_scale=scales[1])
    found: Verdicts = {}
    for tensor, source, scale in zip(caches.values(), (key, value), scales, strict=True):
        quantised = (source * (1 / scale)[:, None]).clamp(-448, 448).to(tensor.dtype)
        expected = torch.zeros(24, 3, 24).to(tensor.dtype)
        expected[slots[slots >= 0]] = quantised[slots >= 0]
        _note_unequal(found, tensor, expected.reshape(tensor.shape))
    _note_reports(found, sanitizer)
    return found


def judge_far_write(cache: ModuleType) -> Verdicts:
    """A token into block 2 of a pool, past the reach of 32 bits."""
    pool, other, token = far_pool(), far_pool(), torch.ones(1, 1, WIDTH)
    pools = {
        name: Region(tensor, writable=True, bounds_only=True)
        for name, tensor in (("pool", pool), ("other", other))
    }
    with sanitize(pools, raises=False, overflow=True) as sanitizer:
        cache.write_kv(token, token, pool, other, torch.tensor([9], dtype=torch.int32))
    found: Verdicts = {}
    _note_unequal(found, pool[2, 1], torch.ones(1, WIDTH).to(pool.dtype))
    _note_reports(found, sanitizer)
    return found


def judge_copy(cache: ModuleType) -> Verdicts:
    """Copies within one pool of blocks of 15 rows, one source to two targets."""
    pool = torch.arange(6 * 5 * 3 * 24, dtype=torch.int32).reshape(6, 5, 3, 24).float()
    before = pool.clone()
    sources, targets = torch.tensor([4, 4, 0]), torch.tensor([1, 5, 3])
    touched = torch.zeros(6, 1, 1, 1, dtype=torch.bool)
    touched[[0, 1, 3, 4, 5]] = True
    with sanitize(raises=False, pool=updates(pool, touched)) as sanitizer:
        cache.copy_blocks(pool, sources, targets)
    found: Verdicts = {}
    before[targets] = before[sources]
    _note_unequal(found, pool, before)
    _note_reports(found, sanitizer)
    return found


def judge_offload(cache: ModuleType) -> Verdicts:
    """Blocks of a cache that keeps heads first into a staging buffer, and back elsewhere."""
    pool = torch.arange(6 * 5 * 3 * 24, dtype=torch.int32).reshape(6, 3, 5, 24).half()
    pool = pool.transpose(1, 2)
    blocks, back = torch.tensor([5, 2]), torch.tensor([0, 3])
    staging = torch.full((2, 5, 3, 24), torch.nan, dtype=torch.float16)
    expected = pool.clone()
    expected[back] = pool[blocks]
    with sanitize(raises=False, pool=reads(pool), staging=output(staging)) as gathering:
        cache.gather_blocks(pool, blocks, staging)
    found: Verdicts = {}
    _note_unequal(found, staging, pool[blocks])
    _note_reports(found, gathering)
    with sanitize(raises=False, pool=updates(pool), staging=staging) as scattering:
        cache.scatter_blocks(staging, pool, back)
    _note_unequal(found, pool, expected)
    _note_reports(found, scattering)
    return found


def _note_unequal(found: Verdicts, got: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (got.float() != expected.float()).nonzero()
    if len(wrong):
        index = tuple(wrong[0].tolist())
        found.setdefault(
            "value", f"{list(index)} is {float(got[index])}, not {float(expected[index])}"
        )


KINDS_TRIED: tuple[TriedOn, ...] = (*CASES, "cache")


def print_page() -> int:
    """What ``kvproof.kernels.mutants`` does as a command; returns its exit code."""
    sound = [kind for kind in KINDS_TRIED if verdicts_on(None, (kind,))]
    found: dict[str, frozenset[str]] = {}
    for mutant in MUTANTS:
        found[mutant.id] = frozenset(verdicts_on(mutant, mutant.kinds))
        if found[mutant.id] != mutant.caught_by:
            told = f"{sorted(found[mutant.id])}, not {sorted(mutant.caught_by)}"
            print(f"{mutant.id} is caught by {told}", file=sys.stderr)
    if sound:
        print(f"caught without a fault: {', '.join(sound)}", file=sys.stderr)
    print(page(found), end="")
    return int(bool(sound) or any(found[m.id] != m.caught_by for m in MUTANTS))
