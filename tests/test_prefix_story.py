"""What is told of two prefixes that were taken for the same: in what they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvproof.fuzz.replay import replay
from kvproof.invariants.case import Case
from kvproof.invariants.events import (
    BlocksEvicted,
    BlocksPublished,
    BlocksReused,
    Event,
    KeyMoved,
)
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Operation,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.prompts import prompt_tokens, sampled_token
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary

STEP = (Launch(), Retire())
SAME = "Prefixes: the first 4 tokens of r0 and the first 4 tokens of r1 were taken for the same, "


def prompt(tokens: int, source: int = 0, **who: Any) -> Admit:
    return Admit((Segment(source, tokens),), **who)


def ending(source: int, tokens: int = 4) -> Admit:
    """Three tokens as all of these have them, and others behind."""
    return Admit((Segment(0, 3), Segment(source, tokens - 3)))


def told(fault: str, operations: Sequence[AnyOperation]) -> str:
    """The last line that is told of a run of the engine with that fault."""
    done = replay(Case("engine", Configuration(), list(operations), fault=fault), record=True)
    violation = primary(done.violations)
    assert (violation.property, violation.op) == ("KEY", len(operations) - 1)
    return explain(violation, done.moments, 4).splitlines()[-1]


def token(operation: Admit, position: int) -> int:
    return prompt_tokens(operation.prompt)[position]


IMAGE, ANOTHER = (Media(1, 1, 2),), (Media(2, 2, 1),)
THIRD = token(ending(1), 3), token(ending(2), 3)


@pytest.mark.parametrize(
    ("fault", "first", "second", "differ"),
    [
        ("adapter-not-in-key", prompt(5, adapter=3), prompt(5), "in adapter (3 and 0)"),
        (
            "salt-and-adapter-untagged",
            prompt(5, salt=1),
            prompt(5, adapter=1),
            "in salt (1 and 0), in adapter (0 and 1)",
        ),
        (
            "media-not-in-key",
            prompt(5, media=(Media(1, 0, 9),)),
            prompt(5, media=(Media(2, 0, 9),)),
            "in media (item 1 at 5 tokens from 0 on, and item 2 at 5 tokens from 0 on)",
        ),
        (
            "key-ignores-last-token",
            ending(1, 5),
            ending(2, 5),
            f"in token 3 ({THIRD[0]} and {THIRD[1]}), in the block itself",
        ),
    ],
)
def test_a_key_for_two_prefixes_is_told_with_their_difference(
    fault: str, first: Admit, second: Admit, differ: str
) -> None:
    assert told(fault, [first, *STEP, second]) == f"{SAME}but differ {differ}."
    gone = [first, *STEP, Finish(0), Evict(9)]
    assert told(fault, [*gone, second, *STEP]) == f"{SAME}but differ {differ}."


def moments(*parts: tuple[Operation, Sequence[Event]]) -> list[Moment]:
    """Each operation is done for the request that is its number, and then that happened."""
    return [
        Moment(op, operation, Outcome("done", request=op, children=(0, 1)), events)
        for op, (operation, events) in enumerate(parts)
    ]


def line(run: Sequence[Moment], block: int, request: int, **more: Any) -> str | None:
    """What is told behind the life of the block."""
    about = Violation("KEY", "…", op=run[-1].op, block=block, request=request, **more)
    *_, last = explain(about, run, 4).splitlines()
    return last if last.startswith("Prefixes: ") else None


def published(request: int, row: int, *blocks: int, key: bytes = b"", **more: int) -> Event:
    keys = [key or bytes([block]) for block in blocks]
    return BlocksPublished(0, request, row, list(blocks), keys, **more)


def test_what_differs_before_the_block_is_told_as_such() -> None:
    first, second = (Admit((Segment(source, 1), Segment(9, 8))) for source in (1, 2))
    reused = BlocksReused(0, 1, 1, [6])
    said = line(moments((first, [published(0, 0, 5, 6)]), (second, [reused])), 6, 1)
    tokens = f"{token(first, 0)} and {token(second, 0)}"
    assert said is not None
    assert said.endswith(f"but differ in token 0 ({tokens}), before the block.")
    assert "the first 8 tokens of r0 and the first 8 tokens of r1" in said


def test_the_first_token_of_the_block_is_in_it() -> None:
    first, second = (Admit((Segment(9, 4), Segment(source, 5))) for source in (1, 2))
    run = moments((first, [published(0, 0, 5, 6)]), (second, [BlocksReused(0, 1, 1, [6])]))
    said = line(run, 6, 1)
    assert said is not None
    assert said.endswith("in the block itself.")


def test_another_row_of_the_same_tokens_differs_in_length() -> None:
    reused = BlocksReused(0, 1, 0, [6])
    run = moments((prompt(9), [published(0, 0, 5, 6)]), (prompt(9), [reused]))
    said = "the first 8 tokens of r0 and the first 4 tokens of r1 were taken for the same, but"
    assert line(run, 6, 1) == f"Prefixes: {said} differ in length."
    reused = BlocksReused(0, 1, 0, [6])
    run = moments((prompt(9), [published(0, 0, 5, 6)]), (prompt(9, 1), [reused]))
    tokens = f"{token(prompt(9), 0)} and {token(prompt(9, 1), 0)}"
    said = line(run, 6, 1)
    assert said is not None
    assert said.endswith(f"but differ in token 0 ({tokens}), in the block itself.")


def test_a_state_stands_for_the_tokens_that_it_has_seen() -> None:
    state, other = (published(n, 0, 5 + n, key=b"k", tokens=3 + n) for n in (0, 1))
    said = "the first 3 tokens of r0 and the first 4 tokens of r1 were taken for the same, but"
    run = moments((prompt(9), [state]), (prompt(9), [other]))
    assert line(run, 6, 1) == f"Prefixes: {said} differ in length."


def test_media_beyond_the_block_tell_nothing_apart() -> None:
    image, none = prompt(9, media=(Media(1, 6, 2),)), prompt(9)
    reused = BlocksReused(0, 1, 0, [5])
    assert line(moments((image, [published(0, 0, 5)]), (none, [reused])), 5, 1) is None
    reused = BlocksReused(0, 1, 1, [6])
    said = line(moments((image, [published(0, 0, 5, 6)]), (none, [reused])), 6, 1)
    assert said is not None
    assert "but differ in media (item 1 at 2 tokens from 6 on, and none), in token 6 (" in said


def test_tokens_that_were_sampled_are_told() -> None:
    reused = BlocksReused(0, 4, 0, [6])
    run = [
        Moment(0, prompt(2), Outcome("done", request=0), ()),
        Moment(1, Fork(0), Outcome("done", request=0, children=(1,)), ()),
        Moment(2, Grow(0, 2, 7), Outcome("done", request=0), [published(0, 0, 5)]),
        Moment(3, Grow(1, 1, 7), Outcome("done", request=1), ()),
        Moment(4, Decode((0, 1), 8), Outcome("done", children=(1, 9)), [published(1, 0, 6)]),
        Moment(5, Grow(0, 3), Outcome("refused", request=0), ()),
    ]
    tokens = f"token 3 ({sampled_token(7, 3)} and {sampled_token(8, 3)})"
    again = Moment(6, Decode((0,), 0), Outcome("skipped"), [BlocksReused(0, 1, 0, [5])])
    said = line([*run, again], 5, 1)
    assert said == f"{SAME}but differ in {tokens}, in the block itself."
    twice = Moment(6, Launch(), Outcome("done"), [published(1, 0, 6, key=b"\5")])
    assert line([*run, twice], 6, 1) == said
    assert line([*run, Moment(6, Launch(), Outcome("done"), [reused])], 6, 4) is None


def test_what_the_block_held_last_is_told_and_only_if_it_is_known() -> None:
    reused = BlocksReused(0, 2, 0, [6])
    run = moments(
        (prompt(5, 1), [published(0, 0, 5), KeyMoved(0, 0, 5, 6), KeyMoved(0, 0, 8, 9)]),
        (prompt(5, 2), [published(1, 0, 5), published(7, 0, 7)]),
        (prompt(5, 3), [reused]),
    )
    said = line(run, 6, 2)
    assert said is not None
    assert "of r0 and the first 4 tokens of r2" in said
    for unknown in (7, 9, 4):
        hit = BlocksReused(0, 2, 0, [unknown])
        assert line([*run[:2], Moment(2, prompt(5, 3), run[2].outcome, [hit])], unknown, 2) is None
    gone = Moment(2, prompt(5, 3), run[2].outcome, [BlocksEvicted(0, [6], [b"\5"], "request")])
    assert line([*run[:2], gone, Moment(3, Launch(), Outcome("done"), [reused])], 6, 2) is None


def test_other_groups_blocks_requests_and_properties_are_not_told_of() -> None:
    run = moments((prompt(5, 1), [published(0, 0, 5)]), (prompt(5), [BlocksReused(0, 1, 0, [5])]))
    assert line(run, 5, 1) is not None
    assert line(run, 5, 1, group=1) is None
    assert line(run, 4, 1) is None
    assert line(run, 5, 0) is None
    for other in (
        Violation("VALID", "…", op=1, block=5, request=1),
        Violation("KEY", "…", op=1, request=1),
    ):
        assert "Prefixes: " not in explain(other, run, 4)


def test_a_group_with_longer_blocks_has_longer_prefixes() -> None:
    run = moments((prompt(9, 1), [published(0, 0, 5)]), (prompt(9), [BlocksReused(0, 1, 0, [5])]))
    said = line(run, 5, 1, block_size=8)
    assert said is not None
    assert said.startswith("Prefixes: the first 8 tokens of r0 and the first 8 tokens of r1")
