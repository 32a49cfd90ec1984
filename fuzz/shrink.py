"""Shrinking: the shortest run, in the smallest world, that violates the same property.

Delta debugging over operations, configuration and features.  Since every list of operations is
valid, deleting and lowering never break a case, and a few hundred replays of milliseconds do.
Every replay is audited at each operation, so that the case ends at the operation to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from time import process_time
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from kvproof.fuzz.replay import first_violation, installed
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
    size_of,
    with_a_longer_prompt,
)
from kvproof.invariants.case import Case
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
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory

REPLAYS_MAX = 6000
SECONDS_MAX = 60.0
"""CPU seconds: beside other work, a case cut short by the clock may look like another finding."""
_SHORT = 7
"""A longer result is searched for once more, the other way round."""
_LONG_ROW = 12
"""A longer row of iterations is first made one operation as a whole."""
_PAIRS_UP_TO = 24
"""Deleting two operations at once is tried in cases up to this length."""


class Shrunk(Struct, frozen=True):
    """The result."""

    case: Case
    violation: Violation
    replays: int


def shrink(
    case: Case,
    *,
    replays_max: int = REPLAYS_MAX,
    seconds_max: float = SECONDS_MAX,
    imports: bool = True,
) -> Shrunk | None:
    """Shrink a failing case; None if it does not fail when audited at each operation.

    The best so far when the replays or the time are used up, or at Ctrl-C.  What is wrong before
    the first operation is all that is left then.  ``imports``: as for ``subject_factory``.
    """
    deadline = process_time() + seconds_max
    factory = subject_factory(case.subject, imports=imports)
    with installed(case.fault):
        fresh = first_violation(factory, case.configuration, ())
        found = fresh or first_violation(factory, case.configuration, case.operations)
        if found is None:
            return None
        operations, violations = found
        violation = _of_property(violations, case.violates) or primary(violations)
        attempt = _attempts(factory, violation.property)
        start = replace(case, operations=list(operations), violates=violation.property)
        search = _Search(start, violation, attempt, replays_max, deadline)
        interrupted = True
        with suppress(KeyboardInterrupt):
            search.run()
            interrupted = False
        if len(search.case.operations) > _SHORT and not interrupted:
            # Perhaps a dead end: what is deleted first decides where the search gets to.
            again = _Search(start, violation, attempt, replays_max, deadline)
            with suppress(KeyboardInterrupt):
                again.run(backwards=True)
            again.replays += search.replays
            search = min(again, search, key=lambda found: size_of(found.case))
        if len(search.case.operations) <= _SHORT and not interrupted:
            with suppress(KeyboardInterrupt):
                search.go_on_with_what_broke_as_well(factory)
    return Shrunk(search.case, search.violation, search.replays)


def _of_property(violations: Sequence[Violation], name: str | None) -> Violation | None:
    return next((v for v in violations if v.property == name), None)


Attempt = Callable[[Case], tuple[Case, Violation] | None]


def _attempts(factory: SubjectFactory, wanted: str) -> Attempt:
    """Runs a candidate: what is left of it up to the violation of this property, if it fails so."""
    in_vain: set[str] = set()
    """Runs that did not fail: passes come upon the same ones again and again."""

    def attempt(candidate: Case) -> tuple[Case, Violation] | None:
        run = repr((candidate.configuration, candidate.operations))
        if run in in_vain:
            return None
        result = first_violation(factory, candidate.configuration, candidate.operations)
        same = _of_property(result[1], wanted) if result else None
        if result is None or same is None:
            in_vain.add(run)
            return None
        return replace(candidate, operations=list(result[0]), violates=wanted), same

    return attempt


class _Search:
    """Keeps the best case so far; every accepted step makes it smaller."""

    def __init__(
        self,
        case: Case,
        violation: Violation,
        attempt: Attempt,
        replays_max: int,
        deadline: float,
    ) -> None:
        self.case = case
        self.violation = violation
        self.replays = 0
        self._attempt = attempt
        self._replays_max = replays_max
        self._deadline = deadline

    def run(self, *, backwards: bool = False) -> None:
        """Make all passes, in this order or backwards, until none helps any more.

        Those that try most come when the others do not help: only backwards they also come first.
        """
        passes: list[Callable[[], None]] = [
            self._run_rows_at_once,
            self._delete_chunks,
            self._drop_features,
            self._merge_iterations,
            self._postpone_iterations,
            self._merge_growth,
            self._delete_with_blocks,
            self._loosen_limits,
            self._shrink_the_world,
            self._do_without_tiers,
            self._lower_configuration,
            self._lower_arguments,
        ]
        costly: list[Callable[[], None]] = [
            self._merge_arrivals,
            self._delete_pairs,
            self._delete_with_more_room,
            self._substitute,
        ]
        if backwards:
            passes.reverse()
            costly.reverse()
            self._make(costly)
        while self._make(passes) or any(self._make([one]) for one in costly):
            pass

    def go_on_with_what_broke_as_well(self, factory: SubjectFactory) -> None:
        """One mistake may break several properties at one operation, and one of them sooner."""
        seen = first_violation(factory, self.case.configuration, self.case.operations)
        others = {violation.property for violation in seen[1]} if seen else set()
        for other in sorted(others - {self.violation.property}):
            self._attempt = _attempts(factory, other)
            if self._delete_in_a_small_world():
                self.run()
                return

    def _delete_in_a_small_world(self) -> bool:
        """An operation goes, and the pool becomes as small as what is left may need."""
        operations = self.case.operations
        return any(
            self._fit_in_a_small_world(operations[:index] + operations[index + 1 :])
            for index in reversed(range(len(operations)))
        )

    def _make(self, passes: Sequence[Callable[[], None]]) -> bool:
        """Make these passes once; whether they helped, and there is time for more."""
        size = self._size()
        for shrink_pass in passes:
            shrink_pass()
        return size != self._size() and not self._is_over()

    def _size(self) -> tuple[int, int, str]:
        return size_of(self.case)

    def _is_over(self) -> bool:
        return self.replays >= self._replays_max or process_time() > self._deadline

    def _try(self, **changes: Any) -> bool:
        candidate = replace(self.case, **changes)
        if self._is_over():
            return False
        self.replays += 1
        result = self._attempt(candidate)
        if result is None or size_of(result[0]) >= self._size():
            return False
        self.case, self.violation = result
        return True

    def _try_in(self, operations: Sequence[AnyOperation] | None = None, **changes: Any) -> bool:
        """The operations, or the present ones, in another world: if there is such a world."""
        try:
            configuration = replace(self.case.configuration, **changes)
        except ValueError:  # its tiers do not fit together
            return False
        operations = self.case.operations if operations is None else operations
        return self._try(operations=operations, configuration=configuration)

    def _drop_features(self) -> None:
        """All operations at once lose a salt, adapter, media, budget, slots, or their tails."""
        for simplify in SIMPLIFICATIONS:
            operations = [simplify(operation) for operation in self.case.operations]
            if operations != self.case.operations:
                self._try(operations=operations)
        for feature in self.case.features:
            self._try(features=tuple(f for f in self.case.features if f != feature))

    def _delete_chunks(self) -> None:
        chunk = max(1, len(self.case.operations) // 2)
        while chunk:
            start = len(self.case.operations) - chunk
            while start >= 0:
                operations = self.case.operations
                self._try(operations=operations[:start] + operations[start + chunk :])
                start = min(start, len(self.case.operations)) - chunk
            chunk //= 2

    def _run_rows_at_once(self) -> None:
        """A long row of iterations becomes one operation that runs as many: one try a row."""
        for start, end in self._rows_of_iterations():
            operations = self.case.operations
            steps = sum(isinstance(operation, Schedule) for operation in operations[start:end])
            if end - start > _LONG_ROW:
                whole = Run(max(1, steps))
                self._try(operations=[*operations[:start], whole, *operations[end:]])

    def _merge_iterations(self) -> None:
        """Iterations in a row, step by step, become one operation that runs so many."""
        for start, end in self._rows_of_iterations():
            self._run_instead(start, end)
        self._join_iterations()

    def _postpone_iterations(self) -> None:
        """All rows of iterations become one, after the last of them; or two neighbours do.

        The scheduler has more requests to choose from then, but may come to the same point.
        """
        rows = [*self._rows_of_iterations()]
        if len(rows) > 1 and not self._join_rows(rows):
            for earlier in range(len(rows) - 1, 0, -1):
                pair = [*self._rows_of_iterations()][earlier - 1 : earlier + 1]
                if len(pair) > 1:
                    self._join_rows(pair)

    def _join_rows(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether these rows, from the last to the first, can be one operation."""
        operations = self.case.operations
        inside = {index for start, end in rows for index in range(start, end)}
        whole = Run(max(1, sum(iterations_of(operations[index]) for index in inside)))
        end = rows[0][1]
        before = [operation for i, operation in enumerate(operations[:end]) if i not in inside]
        return self._try(operations=[*before, whole, *operations[end:]])

    def _rows_of_iterations(self) -> Iterator[tuple[int, int]]:
        """Where they start and end, from the last to the first: so a shorter row moves no other.

        Only a scheduler has iterations: a cache without one is told to retire a step, too.
        """
        if not any(isinstance(operation, Arrive) for operation in self.case.operations):
            return
        end = len(self.case.operations)
        while end > 0:
            start = end
            while start and isinstance(self.case.operations[start - 1], ITERATIONS):
                start -= 1
            if start < end:
                yield start, end
            end = min(start, len(self.case.operations)) - 1

    def _join_iterations(self) -> None:
        """Neighbours become one: where not all of a row can be run in one go."""
        second = len(self.case.operations) - 1
        while second > 0:
            operations = self.case.operations
            joined = as_one(operations[second - 1], operations[second])
            if joined is not None:
                self._try(operations=[*operations[: second - 1], joined, *operations[second + 1 :]])
            second = min(second, len(self.case.operations)) - 1

    def _run_instead(self, start: int, end: int) -> None:
        operations = self.case.operations
        for iterations in (*range(1, 13), 16, 24, 32, 48, 64, 128):
            run = Run(iterations)
            if self._try(operations=[*operations[:start], run, *operations[end:]]):
                return

    def _merge_growth(self) -> None:
        """A growth joins the admission or the growth before it, and a reservation the admission:
        one operation instead of two."""
        second = len(self.case.operations) - 1
        while second > 0:
            operations = self.case.operations
            grow = operations[second]
            if isinstance(grow, Grow | Reserve):
                for first in range(second - 1, -1, -1):
                    between, after = operations[first + 1 : second], operations[second + 1 :]
                    if any(
                        self._try(operations=[*operations[:first], longer, *between, *after])
                        for longer in lengthened_by(operations[first], grow)
                    ):
                        break
            second = min(second, len(self.case.operations)) - 1

    def _delete_with_blocks(self) -> None:
        """What an operation took from the pool goes with it: the pool gets smaller as well."""
        index = len(self.case.operations) - 1
        while index >= 0:
            operations, world = self.case.operations, self.case.configuration
            left = operations[:index] + operations[index + 1 :]
            for fewer in (1, 2, 3):
                if fewer < world.blocks and self._try_in(
                    operations=left, blocks=world.blocks - fewer
                ):
                    break
            index = min(index, len(self.case.operations)) - 1

    def _shrink_the_world(self) -> None:
        """A smaller pool of smaller blocks, with all lengths cut to fit: in one move.

        A case that needs a full pool survives no single one of these changes.
        """
        self._fit_in_a_small_world(self.case.operations)

    def _fit_in_a_small_world(self, operations: Sequence[AnyOperation]) -> bool:
        world = self.case.configuration
        for block_size in sorted({1, 2, world.block_size}):
            for rows in (1, 2, 3):
                shorter = [cut(op, rows, block_size, world.block_size) for op in operations]
                outputs_cut = [cut_output(op, rows, block_size, world.block_size) for op in shorter]
                for blocks in sorted({1, 2, 3, 4, 5, world.blocks}):
                    if block_size <= world.block_size and blocks <= world.blocks:
                        smaller = {"blocks": blocks, "block_size": block_size}
                        if self._try_in(shorter, **smaller):
                            return True
                        if outputs_cut != shorter and self._try_in(outputs_cut, **smaller):
                            return True
        return False

    def _do_without_tiers(self) -> None:
        """No disk; no offload of prefixes; nothing below the device: what goes only together."""
        for names in (TIERS, TIERS[1:], TIERS[2:]):
            self._try_in(**{name: getattr(PLAIN_WORLD, name) for name in names})

    def _lower_configuration(self) -> None:
        for name, value in asdict(self.case.configuration).items():
            if name == "scheduling":
                continue
            if name == "kv_bytes_per_token":  # a figure of a model: no simpler for being lower
                self._try_in(**{name: getattr(PLAIN_WORLD, name)})
                continue
            for lower in field_lowered(Configuration, name, value):
                if self._try_in(**{name: lower}):
                    break

    def _loosen_limits(self) -> None:
        """A limit that is as by default binds nothing, and need not be thought about."""
        defaults = asdict(Limits())
        for loose in (defaults, *({name: value} for name, value in defaults.items())):
            world = self.case.configuration
            limits = replace(world.scheduling, **loose)
            whole = limits.chunked_prefill or limits.token_budget >= limits.max_model_tokens
            if limits != world.scheduling and whole:
                self._try(configuration=replace(world, scheduling=limits))

    def _lower_arguments(self) -> None:
        index = 0
        while index < len(self.case.operations):
            if not self._lower_one(index):
                index += 1

    def _lower_one(self, index: int) -> bool:
        operations = self.case.operations
        for simpler in simplified(operations[index]):
            if self._try(operations=[*operations[:index], simpler, *operations[index + 1 :]]):
                return True
        return False

    def _substitute(self) -> None:
        """A few operations become one or two plain ones: a detour's purpose, got directly."""
        if len(self.case.operations) > _PAIRS_UP_TO:
            return
        below = [tier for tier, name in _BELOW if getattr(self.case.configuration, name)]
        cached = (*_PLAIN, *((Evict(tier=tier),) for tier in below))
        for width in range(8, 0, -1):
            start = 0
            while start + width <= len(self.case.operations):
                operations = self.case.operations
                before, after = operations[:start], operations[start + width :]
                schedules = any(isinstance(o, Arrive) for o in operations)
                for plain in _PLAIN_ITERATIONS if schedules else cached:
                    if len(plain) <= width and self._try(operations=[*before, *plain, *after]):
                        break
                start += 1

    def _delete_with_more_room(self) -> None:
        """A few operations go, in a larger world: what made room for others is needed no more.

        A longer prompt may do what took several operations to compute or to grow.
        """
        if len(self.case.operations) > _PAIRS_UP_TO:
            return
        for width in range(4, 0, -1):
            start = 0
            while start + width <= len(self.case.operations):
                operations = self.case.operations
                left = operations[:start] + operations[start + width :]
                if not any(
                    self._try_in(run, **self._more_room())
                    for run in (left, *with_a_longer_prompt(left))
                ):
                    start += 1

    def _more_room(self) -> dict[str, int]:
        world = self.case.configuration
        room = {"blocks": world.blocks + 4, "requests": world.requests + 2}
        for name in ("host_blocks", "disk_blocks"):
            if getattr(world, name):
                room[name] = getattr(world, name) + 4
        return room

    def _merge_arrivals(self) -> None:
        """Several requests become one that computes and asks for as much, in a larger world.

        All that arrive, or any two.
        """
        helped = len(self.case.operations) <= _PAIRS_UP_TO
        while helped:
            operations = self.case.operations
            arrivals = [i for i, op in enumerate(operations) if isinstance(op, Arrive)]
            groups = [group for group in (arrivals, *combinations(arrivals, 2)) if len(group) > 1]
            helped = any(
                self._try_in(merged, **self._more_room())
                for group in groups
                for merged in arrivals_merged(operations, group)
            )

    def _delete_pairs(self) -> None:
        if len(self.case.operations) > _PAIRS_UP_TO:
            return
        second = len(self.case.operations) - 1
        while second > 0:
            for first in range(second):
                operations = self.case.operations
                left = [o for i, o in enumerate(operations) if i not in (first, second)]
                if self._try(operations=left):
                    break
            second = min(second, len(self.case.operations)) - 1


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


_BELOW: tuple[tuple[Tier, str], ...] = (("host", "host_blocks"), ("disk", "disk_blocks"))
"""The tiers below the device, and what says that there is one."""

_PLAIN_ITERATIONS: tuple[tuple[AnyOperation, ...], ...] = (
    (Run(1),),
    (Schedule(),),
    (Abort(0),),
    (Schedule(), Schedule()),
)
