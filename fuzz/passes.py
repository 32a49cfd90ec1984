"""The passes of shrinking: each tries one kind of change all over the smallest case so far.

Most go from the last operation to the first: what comes later depends on what came before.  While
a pass is being made the case gets shorter below it, so that places are counted anew at each step.
What is simpler than an operation is told in :mod:`kvproof.fuzz.simpler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from msgspec.structs import asdict, replace

from kvproof.fuzz.simpler import (
    ITERATIONS,
    PLAIN_WORLD,
    SIMPLIFICATIONS,
    TIERS,
    arrivals_merged,
    as_one,
    cut,
    cut_output,
    field_lowered,
    iterations_of,
    lengthened_by,
    simplified,
    with_a_longer_prompt,
)
from kvproof.fuzz.smallest import Smallest
from kvproof.invariants.operations import (
    Abort,
    AnyOperation,
    Arrive,
    Complete,
    Evict,
    Finish,
    Grow,
    Launch,
    Offload,
    Reserve,
    Retire,
    Run,
    Schedule,
    Tier,
)
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

Pass = Callable[[Smallest], None]

_LONG_ROW = 12
"""A longer row of iterations is first made one operation as a whole."""
_PAIRS_UP_TO = 24
"""Deleting two operations at once is tried in cases up to this length."""
_PLAIN: tuple[tuple[AnyOperation, ...], ...] = (
    (Finish(0),),
    (Abort(0),),
    (Launch(),),
    (Retire(),),
    (Evict(),),
    (Launch(), Retire()),
    (Finish(0), Evict()),
    (Abort(0), Evict()),
    (Complete(),),
    (Offload(), Complete()),
)
_PLAIN_ITERATIONS: tuple[tuple[AnyOperation, ...], ...] = (
    (Run(1),),
    (Schedule(),),
    (Abort(0),),
    (Schedule(), Schedule()),
)
_BELOW: tuple[tuple[Tier, str], ...] = (("host", "host_blocks"), ("disk", "disk_blocks"))
"""The tiers below the device, and what says that there is one."""


def _from_the_last(smallest: Smallest, *, width: int = 1, first: int = 0) -> Iterator[int]:
    """Where pieces of so many operations start, from the end to ``first``."""
    start = len(smallest.operations) - width
    while start >= first:
        yield start
        start = min(start, len(smallest.operations)) - width


def _without(operations: list[AnyOperation], start: int, width: int = 1) -> list[AnyOperation]:
    return operations[:start] + operations[start + width :]


def _with(
    operations: list[AnyOperation], start: int, end: int, *instead: AnyOperation
) -> list[AnyOperation]:
    return [*operations[:start], *instead, *operations[end:]]


# -- fewer operations ------------------------------------------------------------------------------


def delete_chunks(smallest: Smallest) -> None:
    chunk = max(1, len(smallest.operations) // 2)
    while chunk:
        for start in _from_the_last(smallest, width=chunk):
            smallest.try_(operations=_without(smallest.operations, start, chunk))
        chunk //= 2


def delete_pairs(smallest: Smallest) -> None:
    if len(smallest.operations) > _PAIRS_UP_TO:
        return
    for second in _from_the_last(smallest, first=1):
        for first in range(second):
            left = [o for i, o in enumerate(smallest.operations) if i not in (first, second)]
            if smallest.try_(operations=left):
                break


def delete_with_blocks(smallest: Smallest) -> None:
    """What an operation took from the pool goes with it: the pool gets smaller as well."""
    for index in _from_the_last(smallest):
        left, blocks = _without(smallest.operations, index), smallest.world.blocks
        for fewer in (1, 2, 3):
            if fewer < blocks and smallest.try_in(left, blocks=blocks - fewer):
                break


def delete_with_more_room(smallest: Smallest) -> None:
    """A few operations go, in a larger world: what made room for others is needed no more.

    A longer prompt may do what took several operations to compute or to grow.
    """
    if len(smallest.operations) > _PAIRS_UP_TO:
        return
    for width in range(4, 0, -1):
        start = 0
        while start + width <= len(smallest.operations):
            left = _without(smallest.operations, start, width)
            if not any(
                smallest.try_in(run, **_more_room(smallest.world))
                for run in (left, *with_a_longer_prompt(left))
            ):
                start += 1


def _more_room(world: Configuration) -> dict[str, int]:
    room = {"blocks": world.blocks + 4, "requests": world.requests + 2}
    for _, name in _BELOW:
        if getattr(world, name):
            room[name] = getattr(world, name) + 4
    return room


def delete_in_a_small_world(smallest: Smallest) -> bool:
    """Whether an operation can go, with a pool as small as what is left may need.

    Not one of the loop's: it is how the loop goes on with another property.
    """
    operations = smallest.operations
    return any(
        _fit_in_a_small_world(smallest, _without(operations, index))
        for index in reversed(range(len(operations)))
    )


def merge_growth(smallest: Smallest) -> None:
    """A growth joins the admission or the growth before it, and a reservation the admission:
    one operation instead of two."""
    for second in _from_the_last(smallest, first=1):
        operations = smallest.operations
        grow = operations[second]
        if isinstance(grow, Grow | Reserve):
            for first in range(second - 1, -1, -1):
                left = _without(operations, second)
                if any(
                    smallest.try_(operations=_with(left, first, first + 1, longer))
                    for longer in lengthened_by(operations[first], grow)
                ):
                    break


def substitute(smallest: Smallest) -> None:
    """A few operations become one or two plain ones: a detour's purpose, got directly."""
    if len(smallest.operations) > _PAIRS_UP_TO:
        return
    below = [tier for tier, name in _BELOW if getattr(smallest.world, name)]
    cached = (*_PLAIN, *((Evict(tier=tier),) for tier in below))
    for width in range(8, 0, -1):
        start = 0
        while start + width <= len(smallest.operations):
            operations = smallest.operations
            schedules = any(isinstance(o, Arrive) for o in operations)
            for plain in _PLAIN_ITERATIONS if schedules else cached:
                shorter = _with(operations, start, start + width, *plain)
                if len(plain) <= width and smallest.try_(operations=shorter):
                    break
            start += 1


# -- a scheduler's iterations and arrivals ---------------------------------------------------------


def run_rows_at_once(smallest: Smallest) -> None:
    """A long row of iterations becomes one operation that runs as many: one try a row."""
    for start, end in _rows_of_iterations(smallest):
        operations = smallest.operations
        steps = sum(isinstance(operation, Schedule) for operation in operations[start:end])
        if end - start > _LONG_ROW:
            smallest.try_(operations=_with(operations, start, end, Run(max(1, steps))))


def merge_iterations(smallest: Smallest) -> None:
    """Iterations in a row, step by step, become one operation that runs so many."""
    for start, end in _rows_of_iterations(smallest):
        _run_instead(smallest, start, end)
    _join_iterations(smallest)


def postpone_iterations(smallest: Smallest) -> None:
    """All rows of iterations become one, after the last of them; or two neighbours do.

    The scheduler has more requests to choose from then, but may come to the same point.
    """
    rows = [*_rows_of_iterations(smallest)]
    if len(rows) > 1 and not _join_rows(smallest, rows):
        for earlier in range(len(rows) - 1, 0, -1):
            pair = [*_rows_of_iterations(smallest)][earlier - 1 : earlier + 1]
            if len(pair) > 1:
                _join_rows(smallest, pair)


def merge_arrivals(smallest: Smallest) -> None:
    """Several requests become one that computes and asks for as much, in a larger world.

    All that arrive, or any two.
    """
    helped = len(smallest.operations) <= _PAIRS_UP_TO
    while helped:
        operations = smallest.operations
        arrivals = [i for i, op in enumerate(operations) if isinstance(op, Arrive)]
        groups = [group for group in (arrivals, *combinations(arrivals, 2)) if len(group) > 1]
        helped = any(
            smallest.try_in(merged, **_more_room(smallest.world))
            for group in groups
            for merged in arrivals_merged(operations, group)
        )


def _rows_of_iterations(smallest: Smallest) -> Iterator[tuple[int, int]]:
    """Where they start and end, from the last to the first: so a shorter row moves no other.

    Only a scheduler has iterations: a cache without one is told to retire a step, too.
    """
    if not any(isinstance(operation, Arrive) for operation in smallest.operations):
        return
    end = len(smallest.operations)
    while end > 0:
        start = end
        while start and isinstance(smallest.operations[start - 1], ITERATIONS):
            start -= 1
        if start < end:
            yield start, end
        end = min(start, len(smallest.operations)) - 1


def _run_instead(smallest: Smallest, start: int, end: int) -> None:
    operations = smallest.operations
    for iterations in (*range(1, 13), 16, 24, 32, 48, 64, 128):
        if smallest.try_(operations=_with(operations, start, end, Run(iterations))):
            return


def _join_iterations(smallest: Smallest) -> None:
    """Neighbours become one: where not all of a row can be run in one go."""
    for second in _from_the_last(smallest, first=1):
        operations = smallest.operations
        joined = as_one(operations[second - 1], operations[second])
        if joined is not None:
            smallest.try_(operations=_with(operations, second - 1, second + 1, joined))


def _join_rows(smallest: Smallest, rows: Sequence[tuple[int, int]]) -> bool:
    """Whether these rows, from the last to the first, can be one operation."""
    operations = smallest.operations
    inside = {index for start, end in rows for index in range(start, end)}
    whole = Run(max(1, sum(iterations_of(operations[index]) for index in inside)))
    end = rows[0][1]
    before = [operation for i, operation in enumerate(operations[:end]) if i not in inside]
    return smallest.try_(operations=[*before, whole, *operations[end:]])


# -- a smaller world -------------------------------------------------------------------------------


def shrink_the_world(smallest: Smallest) -> None:
    """A smaller pool of smaller blocks, with all lengths cut to fit: in one move.

    A case that needs a full pool survives no single one of these changes.
    """
    _fit_in_a_small_world(smallest, smallest.operations)


def _fit_in_a_small_world(smallest: Smallest, operations: Sequence[AnyOperation]) -> bool:
    world = smallest.world
    for block_size in sorted({1, 2, world.block_size}):
        for rows in (1, 2, 3):
            shorter = [cut(op, rows, block_size, world.block_size) for op in operations]
            outputs_cut = [cut_output(op, rows, block_size, world.block_size) for op in shorter]
            for blocks in sorted({1, 2, 3, 4, 5, world.blocks}):
                if block_size <= world.block_size and blocks <= world.blocks:
                    smaller = {"blocks": blocks, "block_size": block_size}
                    if smallest.try_in(shorter, **smaller):
                        return True
                    if outputs_cut != shorter and smallest.try_in(outputs_cut, **smaller):
                        return True
    return False


def do_without_tiers(smallest: Smallest) -> None:
    """No disk; no offload of prefixes; nothing below the device: what goes only together."""
    for names in (TIERS, TIERS[1:], TIERS[2:]):
        smallest.try_in(**{name: getattr(PLAIN_WORLD, name) for name in names})


def lower_configuration(smallest: Smallest) -> None:
    for name, value in asdict(smallest.world).items():
        if name == "scheduling":
            continue
        if name == "kv_bytes_per_token":  # a figure of a model: no simpler for being lower
            smallest.try_in(**{name: getattr(PLAIN_WORLD, name)})
            continue
        for lower in field_lowered(Configuration, name, value):
            if smallest.try_in(**{name: lower}):
                break


def loosen_limits(smallest: Smallest) -> None:
    """A limit that is as by default binds nothing, and need not be thought about."""
    defaults = asdict(Limits())
    for loose in (defaults, *({name: value} for name, value in defaults.items())):
        world = smallest.world
        limits = replace(world.scheduling, **loose)
        whole = limits.chunked_prefill or limits.token_budget >= limits.max_model_tokens
        if limits != world.scheduling and whole:
            smallest.try_(configuration=replace(world, scheduling=limits))


# -- simpler operations ----------------------------------------------------------------------------


def drop_features(smallest: Smallest) -> None:
    """All operations at once lose a salt, adapter, media, budget, slots, or their tails."""
    for simplify in SIMPLIFICATIONS:
        operations = [simplify(operation) for operation in smallest.operations]
        if operations != smallest.operations:
            smallest.try_(operations=operations)
    for feature in smallest.case.features:
        smallest.try_(features=tuple(f for f in smallest.case.features if f != feature))


def lower_arguments(smallest: Smallest) -> None:
    index = 0
    while index < len(smallest.operations):
        if not _lower_one(smallest, index):
            index += 1


def _lower_one(smallest: Smallest, index: int) -> bool:
    operations = smallest.operations
    return any(
        smallest.try_(operations=_with(operations, index, index + 1, simpler))
        for simpler in simplified(operations[index])
    )
