"""The laws hold for the kernels, and each is broken by a kernel that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.checks import Plan, obeys_law
from kvproof.kernels.interpreter import is_interpreting
from kvproof.kernels.laws import LAWS, Law, LawBroken, law_by_name, same_bits
from kvproof.kernels.problem import Attend, Kind, Problem, attend, seen_slots

LAW_OF_KIND = [(law, kind) for law in LAWS for kind in law.kinds]


@pytest.mark.parametrize(
    ("law", "kind"), LAW_OF_KIND, ids=[f"{law.name}-{kind}" for law, kind in LAW_OF_KIND]
)
def test_kernels_obey(law: Law, kind: Kind, device: str) -> None:
    obeys_law(law, kind, Plan(device))


# A kernel per law that breaks it


def nudged(result: Attention, amount: float | torch.Tensor) -> Attention:
    return Attention((result.out + amount).to(result.out.dtype), result.lse)


class Forgetful:
    """Gives another result each time."""

    calls = 0

    def __call__(self, problem: Problem) -> Attention:
        self.calls += 1
        return nudged(attend(problem), self.calls)


def sees_block_ids(problem: Problem) -> Attention:
    blocks = problem.k_cache.shape[0]
    table = problem.block_table
    is_block = (table >= 0) & (table < blocks)
    return nudged(attend(problem), float(table[is_block].sum()))


def sees_unseen_slots(problem: Problem) -> Attention:
    unseen = problem.k_cache.float()[~seen_slots(problem)]
    return nudged(attend(problem), float(unseen.nan_to_num(0, 0, 0).sum()))


def sees_padding(problem: Problem) -> Attention:
    return nudged(attend(problem), float((problem.block_table < 0).sum()))


def splits_by_table_width(problem: Problem) -> Attention:
    """As if the number of splits followed from the host's idea of the longest sequence."""
    width = problem.block_table.shape[1]
    if problem.kind == "unified":
        return attend(replace(problem, tile_keys=16 if width < 40 else 32))
    return attend(replace(problem, split_size=0 if width < 40 else 16, tile_keys=16))


def tiles_by_batch(problem: Problem) -> Attention:
    """As if the launcher split long sequences when the batch is small."""
    alone = problem.sequences == 1
    if problem.kind == "unified":
        return attend(replace(problem, tile_keys=16 if alone else 32))
    return attend(replace(problem, split_size=16 if alone else 0, tile_keys=16))


def favours_first_row(problem: Problem) -> Attention:
    result = attend(problem)
    result.out[:1] += 1
    return result


def favours_first_head(problem: Problem) -> Attention:
    result = attend(problem)
    result.out[:, :1] += 1
    return result


def counts_kv_heads(problem: Problem) -> Attention:
    return nudged(attend(problem), problem.kv_heads)


def assumes_contiguous(problem: Problem) -> Attention:
    """Takes the memory of the cache for blocks, slots, heads in this order."""

    def misread(cache: torch.Tensor) -> torch.Tensor:
        flat = cache.as_strided((cache.numel(),), (1,))
        return flat.view(cache.shape)

    if problem.k_cache.is_contiguous():
        return attend(problem)
    return attend(problem.with_caches(misread))


def tiles_by_block_size(problem: Problem) -> Attention:
    return attend(replace(problem, split_size=0, tile_keys=32 if problem.block_size > 4 else 16))


def dislikes_sharing(problem: Problem) -> Attention:
    table = problem.block_table
    shared = table.shape[0] > 1 and table.shape[1] > 0 and bool((table[0, 0] == table[1:, 0]).all())
    return nudged(attend(problem), float(shared))


def adds_to_values(problem: Problem) -> Attention:
    return nudged(attend(problem), 0.5)


def forgets_v_scale(problem: Problem) -> Attention:
    """What is left of a scale that is applied to K only (flashinfer issue 1023)."""
    if problem.kind == "mla":
        return attend(replace(problem, k_scale=1.0))
    return attend(replace(problem, v_scale=1.0))


def adds_to_queries(problem: Problem) -> Attention:
    return attend(replace(problem, q=problem.q + 0.5))


def window_drops_one(problem: Problem) -> Attention:
    """A window as long as the sequence loses the oldest key."""
    longest = max(problem.lengths.tolist(), default=0)
    return attend(problem.with_features(window=min(problem.features.window, max(0, longest - 1))))


@triton.jit
def last_one_wins(cell_ptr):
    tl.store(cell_ptr, tl.program_id(0))


def depends_on_program_order(problem: Problem) -> Attention:
    cell = torch.zeros(1, dtype=torch.int32)
    last_one_wins[(7,)](cell)
    return nudged(attend(problem), float(cell))


def tiles_by_queries(problem: Problem) -> Attention:
    """As if a long chunk got another kernel than a short one."""
    return attend(replace(problem, tile_keys=32 if len(problem.q) > 3 else 16))


BREAKERS: dict[str, tuple[Kind, Callable[[], Attend]]] = {
    "again": ("decode", Forgetful),
    "other-blocks": ("unified", lambda: sees_block_ids),
    "unseen-slots": ("decode", lambda: sees_unseen_slots),
    "table-padding": ("mla", lambda: sees_padding),
    "wider-table": ("decode", lambda: splits_by_table_width),
    "alone": ("decode", lambda: tiles_by_batch),
    "batch-order": ("unified", lambda: favours_first_row),
    "head-order": ("decode", lambda: favours_first_head),
    "group-order": ("unified", lambda: favours_first_head),
    "one-kv-head": ("decode", lambda: counts_kv_heads),
    "layout": ("decode", lambda: assumes_contiguous),
    "block-size": ("decode", lambda: tiles_by_block_size),
    "shared-prefix": ("unified", lambda: dislikes_sharing),
    "double-values": ("decode", lambda: adds_to_values),
    "scale": ("unified", lambda: forgets_v_scale),
    "double-queries": ("decode", lambda: adds_to_queries),
    "wide-window": ("decode", lambda: window_drops_one),
    "program-order": ("decode", lambda: depends_on_program_order),
    "chunks": ("unified", lambda: tiles_by_queries),
}


def test_every_law_has_a_breaker() -> None:
    assert {law.name for law in LAWS} == set(BREAKERS)
    assert len(LAWS) == len({law.name for law in LAWS})


@pytest.mark.parametrize("name", BREAKERS)
def test_a_kernel_that_breaks_the_law_is_found(name: str, device: str) -> None:
    law, (kind, breaker) = law_by_name(name), BREAKERS[name]
    if not law.applies():
        pytest.skip("a law of the interpreter")
    with pytest.raises(LawBroken):
        obeys_law(law, kind, Plan(device, examples=4000, shrink=False), breaker())


@pytest.mark.parametrize("name", ["alone", "wider-table"])
def test_other_tiles_are_within_the_bound_but_not_the_law(name: str, device: str) -> None:
    """The faults above that a tolerance lets pass: what the laws are for."""
    from kvproof.kernels.checks import matches_reference

    _, breaker = BREAKERS[name]
    matches_reference("decode", Plan(device, examples=20), breaker())


def test_program_order_is_a_law_of_the_interpreter() -> None:
    assert law_by_name("program-order").applies() == is_interpreting()


def test_one_bit_is_enough() -> None:
    lse = torch.zeros(1, 1)
    one = torch.ones(1, 1, 1)
    with pytest.raises(LawBroken, match=r"planted: out\[0, 0, 0\] is 1.00000012 instead of 1;"):
        same_bits("planted", Attention(one, lse), Attention(one * (1 + 2**-23), lse))
    with pytest.raises(LawBroken, match="lse"):
        same_bits("planted", Attention(one, lse), Attention(one, -lse))
    nan = one * torch.nan
    same_bits("equal", Attention(nan, lse), Attention(nan.clone(), lse))
