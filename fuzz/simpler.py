"""What is simpler than a case or an operation: without something, shorter, lower.

Passes of shrinking (:mod:`kvproof.fuzz.passes`) try these, and keep what still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from msgspec import Struct, inspect
from msgspec.structs import asdict, replace

from kvproof.invariants.case import Case
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Arrive,
    Decode,
    Grow,
    Launch,
    Offload,
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


def size_of(case: Case) -> tuple[int, int, str]:
    """Fewer operations first, then smaller numbers; the text breaks ties the same way always."""
    numbers = sum(_weight(operation) for operation in case.operations)
    world = asdict(case.configuration)
    limits, defaults = asdict(world.pop("scheduling")), asdict(Limits())
    numbers += world.pop("kv_bytes_per_token") != PLAIN_WORLD.kv_bytes_per_token
    numbers += sum(_weight_of(v, getattr(PLAIN_WORLD, k)) for k, v in world.items())
    numbers += 10 * sum(limits[name] != defaults[name] for name in limits)
    return len(case.operations), numbers + len(case.features), repr(case.operations)


def _weight(value: Any) -> int:
    if isinstance(value, Arrive):
        # Output tokens weigh more than those of a prompt: each takes an iteration.
        numbers = 3 * value.output + value.max_tokens + value.priority
        numbers += value.salt + value.adapter + 5 * (value.samples - 1)
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
    prompted = isinstance(operation, Admit | Arrive | Promote)
    return replace(operation, adapter=0) if prompted else operation


def _without_media(operation: AnyOperation) -> AnyOperation:
    prompted = isinstance(operation, Admit | Arrive | Promote)
    return replace(operation, media=()) if prompted else operation


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


SIMPLIFICATIONS: tuple[Callable[[AnyOperation], AnyOperation], ...] = (
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

TIERS = ("host_blocks", "offload", "disk_blocks")
"""What of a configuration says which tiers there are, from the device downwards."""
PLAIN_WORLD = Configuration()

ITERATIONS = (Schedule, Retire, Run)
"""What a scheduler's iterations are spelled with."""


def iterations_of(operation: AnyOperation) -> int:
    """How many iterations it begins."""
    if isinstance(operation, Run):
        return operation.iterations
    return int(isinstance(operation, Schedule))


def as_one(first: AnyOperation, second: AnyOperation) -> Run | None:
    """Both as one, if they are iterations."""
    if isinstance(first, Schedule) and isinstance(second, Retire):
        return Run(1)
    if isinstance(first, Run) and isinstance(second, Run):
        return Run(first.iterations + second.iterations)
    return None


def cut(operation: AnyOperation, rows: int, size: int, old_size: int) -> AnyOperation:
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


def cut_output(operation: AnyOperation, rows: int, size: int, old_size: int) -> AnyOperation:
    """An arrival whose output is cut as well."""
    if not isinstance(operation, Arrive):
        return operation
    output, longest = (
        length and _cut_length(length, rows, size, old_size)
        for length in (operation.output, operation.max_tokens)
    )
    return replace(operation, output=output, max_tokens=longest)


def lengthened_by(operation: AnyOperation, by: Grow | Reserve) -> Iterator[AnyOperation]:
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


def arrivals_merged(
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
            joined = as_one(left[-1], kept) if left else None
            left[-1:] = [joined] if joined is not None else [*left[-1:], kept]
    return left


def with_a_longer_prompt(operations: Sequence[AnyOperation]) -> Iterator[list[AnyOperation]]:
    """The operations with one prompt longer by a token."""
    for index, operation in enumerate(operations):
        if isinstance(operation, Admit | Arrive | Promote):
            *before, last = operation.prompt
            longer = (*before, replace(last, length=last.length + 1))
            yield [*operations[:index], replace(operation, prompt=longer), *operations[index + 1 :]]


def _cut_length(length: int, rows: int, size: int, old_size: int) -> int:
    full, rest = divmod(length, old_size)
    return max(1, min(full, rows) * size + min(rest, size - 1))


def simplified(operation: AnyOperation) -> Iterator[AnyOperation]:
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
        for lower in field_lowered(type(operation), name, value):
            yield replace(operation, **{name: lower})


def field_lowered(kind: type[Struct], name: str, value: Any) -> Iterator[Any]:
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
