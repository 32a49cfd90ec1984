"""Shrinking: the shortest run, in the smallest world, that violates the same property.

Delta debugging over operations, configuration and features.  Since every list of operations is
valid, deleting and lowering never break a case, and a few hundred replays of milliseconds do.
Every replay is audited at each operation, so that the case ends at the operation to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from typing import Any

from msgspec import Struct, inspect
from msgspec.structs import asdict, replace

from kvproof.fuzz.replay import first_violation, installed
from kvproof.invariants.case import Case
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Arrive,
    Complete,
    Decode,
    Evict,
    Finish,
    Grow,
    Launch,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reserve,
    Resume,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.subjects import subject_factory

REPLAYS_MAX = 6000
SECONDS_MAX = 60.0
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

    The best so far when the replays or the time are used up, or at Ctrl-C.  ``imports``: as for
    ``subject_factory``.
    """
    deadline = time.monotonic() + seconds_max
    factory = subject_factory(case.subject, imports=imports)
    with installed(case.fault):
        found = first_violation(factory, case.configuration, case.operations)
        if found is None:
            return None
        operations, violations = found
        violation = _of_property(violations, case.violates) or primary(violations)
        wanted = violation.property
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
            return replace(candidate, operations=list(result[0])), same

        start = replace(case, operations=list(operations), violates=wanted)
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
            search = min(again, search, key=lambda found: _size(found.case))
    return Shrunk(search.case, search.violation, search.replays)


def _of_property(violations: Sequence[Violation], name: str | None) -> Violation | None:
    return next((v for v in violations if v.property == name), None)


Attempt = Callable[[Case], tuple[Case, Violation] | None]


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

    def _make(self, passes: Sequence[Callable[[], None]]) -> bool:
        """Make these passes once; whether they helped, and there is time for more."""
        size = self._size()
        for shrink_pass in passes:
            shrink_pass()
        return size != self._size() and not self._is_over()

    def _size(self) -> tuple[int, int, str]:
        return _size(self.case)

    def _is_over(self) -> bool:
        return self.replays >= self._replays_max or time.monotonic() > self._deadline

    def _try(self, **changes: Any) -> bool:
        candidate = replace(self.case, **changes)
        if self._is_over():
            return False
        self.replays += 1
        result = self._attempt(candidate)
        if result is None or _size(result[0]) >= self._size():
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
        for simplify in _SIMPLIFICATIONS:
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

    def _rows_of_iterations(self) -> Iterator[tuple[int, int]]:
        """Where they start and end, from the last to the first: so a shorter row moves no other.

        Only a scheduler has iterations: a cache without one is told to retire a step, too.
        """
        if not any(isinstance(operation, Arrive) for operation in self.case.operations):
            return
        end = len(self.case.operations)
        while end > 0:
            start = end
            while start and isinstance(self.case.operations[start - 1], _ITERATIONS):
                start -= 1
            if start < end:
                yield start, end
            end = min(start, len(self.case.operations)) - 1

    def _join_iterations(self) -> None:
        """Neighbours become one: where not all of a row can be run in one go."""
        second = len(self.case.operations) - 1
        while second > 0:
            operations = self.case.operations
            joined = _joined(operations[second - 1], operations[second])
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
                        for longer in _lengthened(operations[first], grow)
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
        world = self.case.configuration
        for block_size in sorted({1, 2, world.block_size}):
            for rows in (1, 2, 3):
                operations = [
                    _cut(operation, rows, block_size, world.block_size)
                    for operation in self.case.operations
                ]
                outputs_cut = [
                    _cut_output(operation, rows, block_size, world.block_size)
                    for operation in operations
                ]
                for blocks in sorted({1, 2, 3, 4, 5, world.blocks}):
                    if block_size <= world.block_size and blocks <= world.blocks:
                        smaller = {"blocks": blocks, "block_size": block_size}
                        if self._try_in(operations, **smaller):
                            return
                        if outputs_cut != operations and self._try_in(outputs_cut, **smaller):
                            return

    def _do_without_tiers(self) -> None:
        """No disk; no offload of prefixes; nothing below the device: what goes only together."""
        for names in (_TIERS, _TIERS[1:], _TIERS[2:]):
            self._try_in(**{name: getattr(_PLAIN_WORLD, name) for name in names})

    def _lower_configuration(self) -> None:
        for name, value in asdict(self.case.configuration).items():
            if name == "scheduling":
                continue
            if name == "kv_bytes_per_token":  # a figure of a model: no simpler for being lower
                self._try_in(**{name: getattr(_PLAIN_WORLD, name)})
                continue
            for lower in _lower_field(Configuration, name, value):
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
        for simpler in _simpler(operations[index]):
            if self._try(operations=[*operations[:index], simpler, *operations[index + 1 :]]):
                return True
        return False

    def _substitute(self) -> None:
        """A few operations become one or two plain ones: a detour's purpose, got directly."""
        if len(self.case.operations) > _PAIRS_UP_TO:
            return
        for width in range(8, 0, -1):
            start = 0
            while start + width <= len(self.case.operations):
                operations = self.case.operations
                before, after = operations[:start], operations[start + width :]
                schedules = any(isinstance(o, Arrive) for o in operations)
                for plain in _PLAIN_ITERATIONS if schedules else _PLAIN:
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
                    self._try_in(run, **self._more_room()) for run in (left, *_longer(left))
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
                for merged in _merged(operations, group)
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


_PLAIN_ITERATIONS: tuple[tuple[AnyOperation, ...], ...] = (
    (Run(1),),
    (Schedule(),),
    (Abort(0),),
    (Schedule(), Schedule()),
)


def _size(case: Case) -> tuple[int, int, str]:
    """Fewer operations first, then smaller numbers; the text breaks ties the same way always."""
    numbers = sum(_weight(operation) for operation in case.operations)
    world = asdict(case.configuration)
    limits, defaults = asdict(world.pop("scheduling")), asdict(Limits())
    numbers += world.pop("kv_bytes_per_token") != _PLAIN_WORLD.kv_bytes_per_token
    numbers += sum(_weight_of(v, getattr(_PLAIN_WORLD, k)) for k, v in world.items())
    numbers += 10 * sum(limits[name] != defaults[name] for name in limits)
    return len(case.operations), numbers + len(case.features), repr(case.operations)


def _weight(value: Any) -> int:
    if isinstance(value, Arrive):
        # Output tokens weigh more than those of a prompt: each takes an iteration.
        numbers = 3 * value.output + value.max_tokens + value.priority + value.salt
        numbers += 5 * (value.samples - 1)
        return 1 + _weight(value.prompt) + numbers + (value.at_ns > 0)
    if isinstance(value, Struct):
        return 1 + sum(
            _weight_of(getattr(value, name), default)
            for name, default in _defaults(type(value)).items()
        )
    if isinstance(value, tuple):
        # One more of anything is more to think about than a larger number: so a batch of one
        # request is no simpler than that request alone.
        return sum(2 + _weight(item) for item in value)
    return int(value)


def _weight_of(value: Any, default: Any) -> int:
    """Words are as good as each other, but the one that goes without saying is the simplest."""
    return 2 * (value != default) if isinstance(value, str) else _weight(value)


@cache
def _fields(kind: type[Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return described.fields


@cache
def _defaults(kind: type[Struct]) -> dict[str, Any]:
    """By field; None where there is none."""
    return {field.name: None if field.required else field.default for field in _fields(kind)}


@cache
def _least(kind: type[Struct], name: str) -> int:
    """The least that a number may be, by its type."""
    return next(getattr(f.type, "ge", None) or 0 for f in _fields(kind) if f.name == name)


def _without_salt(operation: AnyOperation) -> AnyOperation:
    prompted = isinstance(operation, Admit | Arrive | Promote)
    return replace(operation, salt=0) if prompted else operation


def _without_adapter(operation: AnyOperation) -> AnyOperation:
    return replace(operation, adapter=0) if isinstance(operation, Admit | Promote) else operation


def _without_media(operation: AnyOperation) -> AnyOperation:
    return replace(operation, media=()) if isinstance(operation, Admit | Promote) else operation


def _without_tails(operation: AnyOperation) -> AnyOperation:
    if isinstance(operation, Admit | Arrive | Promote):
        return replace(operation, prompt=operation.prompt[:1])
    return operation


def _without_slots(operation: AnyOperation) -> AnyOperation:
    return replace(operation, slots=0) if isinstance(operation, Admit | Resume) else operation


def _without_items(operation: AnyOperation) -> AnyOperation:
    return replace(operation, items=()) if isinstance(operation, Launch) else operation


def _without_swap(operation: AnyOperation) -> AnyOperation:
    swaps = isinstance(operation, Preempt)
    return replace(operation, swap=False, late=False) if swaps else operation


def _without_late(operation: AnyOperation) -> AnyOperation:
    return replace(operation, late=False) if isinstance(operation, Preempt | Resume) else operation


def _without_wait(operation: AnyOperation) -> AnyOperation:
    return replace(operation, wait=False) if isinstance(operation, Admit) else operation


def _without_blocks(operation: AnyOperation) -> AnyOperation:
    """All blocks that may move do."""
    if isinstance(operation, Offload):
        return replace(operation, first=0, blocks=0)
    return replace(operation, blocks=0) if isinstance(operation, Promote) else operation


def _without_choice_of_transfer(operation: AnyOperation) -> AnyOperation:
    return replace(operation, transfer=0) if hasattr(operation, "transfer") else operation


def _without_priority(operation: AnyOperation) -> AnyOperation:
    return replace(operation, priority=0) if isinstance(operation, Arrive) else operation


def _without_times(operation: AnyOperation) -> AnyOperation:
    return replace(operation, at_ns=0) if isinstance(operation, Arrive) else operation


def _without_early_stop(operation: AnyOperation) -> AnyOperation:
    return replace(operation, max_tokens=0) if isinstance(operation, Arrive) else operation


def _without_samples(operation: AnyOperation) -> AnyOperation:
    return replace(operation, samples=1) if isinstance(operation, Arrive) else operation


def _without_budget(operation: AnyOperation) -> AnyOperation:
    return replace(operation, budget=0) if isinstance(operation, Launch) else operation


_SIMPLIFICATIONS: tuple[Callable[[AnyOperation], AnyOperation], ...] = (
    _without_salt,
    _without_adapter,
    _without_media,
    _without_tails,
    _without_budget,
    _without_slots,
    _without_items,
    _without_swap,
    _without_late,
    _without_wait,
    _without_blocks,
    _without_choice_of_transfer,
    _without_priority,
    _without_times,
    _without_early_stop,
    _without_samples,
)

_TIERS = ("host_blocks", "offload", "disk_blocks")
"""What of a configuration says which tiers there are, from the device downwards."""
_PLAIN_WORLD = Configuration()

_ITERATIONS = (Schedule, Retire, Run)
"""What a scheduler's iterations are spelled with."""


def _joined(first: AnyOperation, second: AnyOperation) -> Run | None:
    """Both as one, if they are iterations."""
    if isinstance(first, Schedule) and isinstance(second, Retire):
        return Run(1)
    if isinstance(first, Run) and isinstance(second, Run):
        return Run(first.iterations + second.iterations)
    return None


def _cut(operation: AnyOperation, rows: int, size: int, old_size: int) -> AnyOperation:
    """At most ``rows`` blocks of ``size``; lengths keep their place relative to block edges."""
    if isinstance(operation, Admit | Arrive | Promote):
        prompt = tuple(
            replace(segment, length=_cut_length(segment.length, rows, size, old_size))
            for segment in operation.prompt
        )
        operation = replace(operation, prompt=prompt)
    if isinstance(operation, Grow):
        return replace(operation, tokens=_cut_length(operation.tokens, rows, size, old_size))
    if isinstance(operation, Admit | Resume | Reserve) and operation.slots:
        return replace(operation, slots=_cut_length(operation.slots, rows, size, old_size))
    if isinstance(operation, Launch):
        items = [(who, _cut_length(many, rows, size, old_size)) for who, many in operation.items]
        return replace(operation, items=tuple(items))
    return operation


def _cut_output(operation: AnyOperation, rows: int, size: int, old_size: int) -> AnyOperation:
    """An arrival whose output is cut as well."""
    if not isinstance(operation, Arrive):
        return operation
    output, longest = (
        length and _cut_length(length, rows, size, old_size)
        for length in (operation.output, operation.max_tokens)
    )
    return replace(operation, output=output, max_tokens=longest)


def _lengthened(operation: AnyOperation, by: Grow | Reserve) -> Iterator[AnyOperation]:
    """The operation with the later one's tokens or slots in it, where they fit in."""
    if isinstance(by, Reserve):
        if isinstance(operation, Admit | Resume):
            yield replace(operation, slots=by.slots)
    elif isinstance(operation, Grow):
        yield replace(operation, tokens=operation.tokens + by.tokens)
    elif isinstance(operation, Admit):
        *before, last = operation.prompt
        longer = replace(last, length=last.length + by.tokens)
        yield replace(operation, prompt=(*before, longer))
        # What grows is not what a longer prompt would have had there.
        other = Segment(max(segment.source for segment in operation.prompt) + 1, by.tokens)
        yield replace(operation, prompt=(*operation.prompt, other))


def _merged(
    operations: Sequence[AnyOperation], arrivals: Sequence[int]
) -> Iterator[list[AnyOperation]]:
    """The first of these arrivals does the part of the others: their output, perhaps their prompts;
    or all by itself, with some output more, and nothing but iterations.

    Iterations that stand side by side then are one operation.
    """
    arriving = [op for i in arrivals if isinstance(op := operations[i], Arrive)]
    prompt = tuple([segment for arrive in arriving for segment in arrive.prompt])
    more = replace(arriving[0], output=sum(arrive.output for arrive in arriving))
    whole = replace(more, prompt=prompt)
    yield _without(operations, arrivals, more)
    yield _without(operations, arrivals, whole)
    for output in range(2, 6):
        for alone in (more, whole):
            yield [replace(alone, output=output), Run(output)]


def _without(
    operations: Sequence[AnyOperation], arrivals: Sequence[int], whole: Arrive
) -> list[AnyOperation]:
    """``whole`` instead of the first of these, and nothing instead of the others."""
    left: list[AnyOperation] = []
    for index, operation in enumerate(operations):
        if index not in arrivals[1:]:
            kept = whole if index == arrivals[0] else operation
            joined = _joined(left[-1], kept) if left else None
            left[-1:] = [joined] if joined is not None else [*left[-1:], kept]
    return left


def _longer(operations: Sequence[AnyOperation]) -> Iterator[list[AnyOperation]]:
    """The operations with one prompt longer by a token."""
    for index, operation in enumerate(operations):
        if isinstance(operation, Admit | Arrive | Promote):
            *before, last = operation.prompt
            longer = (*before, replace(last, length=last.length + 1))
            yield [*operations[:index], replace(operation, prompt=longer), *operations[index + 1 :]]


def _cut_length(length: int, rows: int, size: int, old_size: int) -> int:
    full, rest = divmod(length, old_size)
    return max(1, min(full, rows) * size + min(rest, size - 1))


def _simpler(operation: Operation) -> Iterator[Operation]:
    """The operation with one argument lowered."""
    if isinstance(operation, Decode):
        yield Grow(operation.requests[0], choice=operation.choice)
    if isinstance(operation, Arrive) and operation.output > 1:
        # A longer prompt takes the same blocks, in one iteration instead of many.
        *before, last = operation.prompt
        longer = replace(last, length=last.length + operation.output - 1)
        yield replace(operation, prompt=(*before, longer), output=1)
    for name in operation.__struct_fields__:
        value = getattr(operation, name)
        for lower in _lower_field(type(operation), name, value):
            yield replace(operation, **{name: lower})


def _lower_field(kind: type[Struct], name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for index in range(len(value)):
            if name not in ("prompt", "requests") or len(value) > 1:
                yield value[:index] + value[index + 1 :]
            for lower in _simpler_item(value[index]):
                yield (*value[:index], lower, *value[index + 1 :])
    elif isinstance(value, bool):
        if value and not _defaults(kind)[name]:
            yield False
    elif isinstance(value, str):
        if value != _defaults(kind)[name]:
            yield _defaults(kind)[name]
    else:
        yield from _lower_values(value, _least(kind, name))


def _simpler_item(item: Any) -> Iterator[Any]:
    """A segment, a media item, a (request, tokens) pair or a request, with a number lowered."""
    if isinstance(item, int):
        yield from _lower_values(item, lowest=0)
        return
    if isinstance(item, tuple):
        request, tokens = item
        yield from ((lower, tokens) for lower in _lower_values(request, lowest=0))
        yield from ((request, lower) for lower in _lower_values(tokens, lowest=1))
        return
    assert isinstance(item, Struct)
    for name in item.__struct_fields__:
        for lower in _lower_values(getattr(item, name), _least(type(item), name)):
            yield replace(item, **{name: lower})


def _lower_values(value: int, lowest: int) -> Iterator[int]:
    """Smallest first, then half, then one less."""
    for lower in sorted({lowest, lowest + 1, lowest + 2, lowest + 3, value // 2, value - 1}):
        if lowest <= lower < value:
            yield lower
