"""The project's attention kernels under the sanitizer: who may touch what, and how often.

Needs Triton's interpreter, see ``kvproof.kernels.sanitizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvproof.kernels.attention.arguments import Attention
from kvproof.kernels.attention.decode import Workspace
from kvproof.kernels.cases import Case, build, cases
from kvproof.kernels.checks import Check, Plan, for_all
from kvproof.kernels.problem import (
    KINDS,
    Kind,
    Problem,
    attend,
    poisoned_result,
    poisoned_workspace,
)
from kvproof.kernels.sanitizer import (
    Program,
    Region,
    Sanitizer,
    output,
    paged,
    rows,
    sanitize,
    table,
    workspace,
)

MLA_ROWS = 16
"""Heads that a program of latent attention takes."""


def attend_watched(
    problem: Problem, run: Callable[..., Attention] = attend, *, raises: bool = True
) -> tuple[Attention, Sanitizer]:
    """Run the problem's kernel with every access judged, into a result full of NaN.

    Args:
        problem: In host memory.
        run: What runs it: ``attend``, or one with a fault planted.
        raises: Whether findings raise a ``SanitizerError``.

    Returns:
        The result, and the sanitizer, to ask for read counts.
    """
    result, scratch = poisoned_result(problem), poisoned_workspace(problem)
    with watching(problem, result, scratch, raises=raises) as sanitizer:
        run(problem, result, scratch)
    return result, sanitizer


@contextmanager
def watching(
    problem: Problem, result: Attention, scratch: Workspace | None, *, raises: bool = True
) -> Iterator[Sanitizer]:
    """``sanitize`` with the tensors of a problem declared."""
    known = regions(problem, result, scratch)
    with sanitize(known, sequence_of=sequence_of(problem), raises=raises) as sanitizer:
        yield sanitizer


def regions(
    problem: Problem, result: Attention, scratch: Workspace | None
) -> dict[str, torch.Tensor | Region]:
    """Every tensor of a problem, with what each sequence may touch of it."""
    lengths, starts = problem.lengths, problem.query_starts
    own_row = torch.arange(problem.sequences + 1)

    def seen(cache: torch.Tensor) -> Region:
        return paged(
            cache,
            problem.block_table,
            lengths,
            window=problem.features.window,
            query_lengths=starts.diff(),
        )

    needed = table(
        problem.block_table,
        lengths,
        problem.block_size,
        window=problem.features.window,
        query_lengths=starts.diff(),
    )
    found: dict[str, torch.Tensor | Region] = {
        "q": rows(problem.q, starts),
        "k_cache": seen(problem.k_cache),
        "block_table": needed,
        "query_starts": starts,
        "lengths": rows(lengths, own_row),
        "out": rows(output(result.out), starts),
        "lse": rows(output(result.lse), starts),
    }
    if problem.kind != "mla":  # whose V is a part of its K
        found["v_cache"] = seen(problem.v_cache)
    if scratch is not None:
        found["partial_out"] = rows(workspace(scratch.out), own_row)
        found["partial_lse"] = rows(workspace(scratch.lse), own_row)
    return found


def sequence_of(problem: Problem) -> Callable[[Program], int | None]:
    """The sequence that a program of the project's kernels works for."""
    axis = {"decode_kernel": 2, "mla_kernel": 2, "merge_kernel": 1}
    if problem.kind != "unified":
        return lambda program: program.index[axis[program.kernel]]
    first_tiles = [start for start, _ in _query_tiles(problem)]
    return lambda program: sum(first <= program.index[1] for first in first_tiles) - 1


def _query_tiles(problem: Problem) -> Iterator[tuple[int, int]]:
    """Per sequence its first tile of queries, and tokens per tile, as ``unified_kernel`` counts."""
    tokens = problem.tile_rows // problem.group
    for sequence, start in enumerate(problem.query_starts.tolist()[:-1]):
        yield start // tokens + sequence, tokens


def least_reads(problem: Problem) -> torch.Tensor:
    """How often each slot of the cache has to be read, int32 ``[N, BS]``, the same for each head.

    Once by each program that needs it: decode has one per sequence and KV head, latent attention
    one per 16 heads, and prefill one per tile of queries.
    """
    counts = torch.zeros(problem.k_cache.shape[:2], dtype=torch.int32)
    for sequence, length in enumerate(problem.lengths.tolist()):
        for first, end in _key_ranges(problem, sequence, length):
            position = torch.arange(first, end)
            block = problem.block_table[sequence, position // problem.block_size].long()
            counts.index_put_(
                (block, position % problem.block_size),
                torch.ones(len(position), dtype=torch.int32),
                accumulate=True,
            )
    return counts


def _key_ranges(problem: Problem, sequence: int, length: int) -> Iterator[tuple[int, int]]:
    """The keys that each program of a sequence and a KV head needs: first, and past the last."""
    window = problem.features.window
    queries = problem.queries(sequence)
    count = queries.stop - queries.start
    if problem.kind == "unified":
        tokens = problem.tile_rows // problem.group
        for query in range(0, count, tokens):
            past = length - count + min(query + tokens, count)
            yield (max(0, length - count + query + 1 - window) if window else 0), past
        return
    programs = -(-problem.q.shape[1] // MLA_ROWS) if problem.kind == "mla" else 1
    yield from [(max(0, length - window) if window else 0, length)] * programs


class WastedReads(AssertionError):
    """A slot was read more or less often than it has to be."""


def hold_to_least_reads(problem: Problem, sanitizer: Sanitizer) -> None:
    """Every visible key and value is read once by each program that needs it, and no other.

    Raises:
        WastedReads: With the first slot that is not.
    """
    least = least_reads(problem)[:, :, None, None]
    for name in ("k_cache",) if problem.kind == "mla" else ("k_cache", "v_cache"):
        counts = sanitizer.read_counts(name)
        wrong = (counts != least).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise WastedReads(
                f"{name}{list(index)} was read {int(counts[index])} times, and has to be "
                f"{int(least[index[0], index[1]])} times"
            )


def touches_what_it_may(kind: Kind, plan: Plan, run: Callable[..., Attention] = attend) -> str:
    """All features drawn together, every access judged, every read counted."""

    def judge(case: Case) -> None:
        problem = build(case)
        hold_to_least_reads(problem, attend_watched(problem, run)[1])

    for_all(plan, cases([kind], small=True), judge, plan.examples)
    return f"{plan.examples} cases, each key read once by each program that needs it"


def watched_checks() -> tuple[Check, ...]:
    """Checks that need the interpreter, beside those of ``kvproof.kernels.checks``."""
    return tuple(
        Check(
            f"{kind}-sanitizer",
            "Touches only what it may, and reads no key more often than it has to.",
            lambda plan, kind=kind: touches_what_it_may(kind, plan),  # type: ignore[misc]
        )
        for kind in KINDS
    )
