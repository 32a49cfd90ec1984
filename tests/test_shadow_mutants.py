"""Shadow memory does just what a dict of slots would, however its work is split.

Short ranges go through slices of arrays and long ones through numpy; some begin or end inside a
block.  What mutants of it survived before is seen here (see docs/mutation.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random

import pytest

from kvproof.invariants.shadow import Shadow
from kvproof.invariants.tags import EVICTED, FREED, POISON_NAMES, UNWRITTEN, Tags

BLOCKS = 40
ROWS = 30
SIZES = (1, 3, 4)
FEW, MANY = 12, 13
"""Blocks that are moved one by one, and at once."""


def tags_of(size: int) -> Tags[int]:
    return array("Q", range(1000, 1000 + ROWS * size))


def table_of(size: int) -> list[int]:
    return Random(size).sample(range(BLOCKS), ROWS)


def ranges(size: int) -> Iterator[tuple[int, int]]:
    """Positions from and to: around all that may matter, and some more."""
    edges = sorted({row * size + more for row in (0, 1, 2, 8, 9, 10, 11) for more in (0, 1, 2)})
    yield from ((start, end) for start in edges for end in edges if start < end)
    yield (1, ROWS * size)


def slots(shadow: Shadow) -> list[int]:
    return list(shadow.content)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_lands_where_the_table_says(size: int) -> None:
    tags, table = tags_of(size), table_of(size)
    for start, end in ranges(size):
        shadow = Shadow(BLOCKS, size)
        expected = [UNWRITTEN] * (BLOCKS * size)
        for position in range(start, end):
            expected[table[position // size] * size + position % size] = tags[position]
        shadow.write(tags, start, end, table)
        assert slots(shadow) == expected, (start, end)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_position_that_does_not_hold_its_tag_is_found(size: int) -> None:
    tags, table = tags_of(size), table_of(size)
    shadow = Shadow(BLOCKS, size)
    shadow.write(tags, 0, len(tags), table)
    for start, end in ranges(size):
        assert shadow.first_mismatch(tags, start, end, table) is None
        for wrong in {start, (start + end) // 2, end - 1}:
            for also in (wrong, end - 1):
                shadow.content[table[also // size] * size + also % size] = 7
            assert shadow.first_mismatch(tags, start, end, table) == wrong, (start, end)
            assert shadow.first_mismatch(tags, start, wrong, table) is None
            shadow.write(tags, wrong, wrong + 1, table)
            shadow.write(tags, end - 1, end, table)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, FEW, MANY])
def test_blocks_are_copied_read_and_put_whole(size: int, count: int) -> None:
    source, target = Shadow(BLOCKS, size), Shadow(BLOCKS, size)
    source.content[:] = array("Q", range(1000, 1000 + BLOCKS * size))
    blocks, to = table_of(size)[:count], table_of(size)[:count][::-1]
    rows = [source.content[block * size : (block + 1) * size] for block in blocks]
    expected = [UNWRITTEN] * (BLOCKS * size)
    for block, row in zip(to, rows, strict=True):
        expected[block * size : (block + 1) * size] = row
    source.copy_blocks(blocks, target, to)
    assert slots(target) == expected
    assert source.read(blocks) == b"".join(row.tobytes() for row in rows)
    again = Shadow(BLOCKS, size)
    again.put(to, source.read(blocks))
    assert slots(again) == expected
    assert again.last_tags(to) == [row[-1] for row in rows] == [*map(again.last_tag, to)]


@pytest.mark.parametrize("count", [FEW, MANY])
def test_copies_to_fewer_places_go_as_far_as_both_do(count: int) -> None:
    source, target = Shadow(BLOCKS, 2), Shadow(BLOCKS, 2)
    source.content[:] = array("Q", range(1000, 1000 + BLOCKS * 2))
    source.copy_blocks(range(count), target, range(20, 20 + count - 1))
    assert slots(target)[40 : 40 + 2 * (count - 1)] == slots(source)[: 2 * (count - 1)]
    assert set(slots(target)[:40] + slots(target)[40 + 2 * (count - 1) :]) == {UNWRITTEN}


@pytest.mark.parametrize("count", [0, 1, FEW, MANY])
@pytest.mark.parametrize("poison", [FREED, EVICTED])
def test_poison_is_in_all_slots_of_these_blocks_and_in_no_other(count: int, poison: int) -> None:
    shadow = Shadow(BLOCKS, 3)
    blocks = table_of(3)[:count]
    shadow.poison(blocks, poison)
    for block in range(BLOCKS):
        expected = poison if block in blocks else UNWRITTEN
        assert slots(shadow)[3 * block : 3 * block + 3] == [expected] * 3


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_part_of_a_block_is_copied(tokens: int) -> None:
    shadow = Shadow(4, 3)
    shadow.content[:] = array("Q", range(1000, 1012))
    shadow.copy(1, 2, tokens)
    expected = list(range(1000, 1012))
    expected[6 : 6 + tokens] = expected[3 : 3 + tokens]
    assert slots(shadow) == expected


def test_what_a_slot_holds_is_said_in_words() -> None:
    shadow = Shadow(3, 2)
    shadow.content[:] = array("Q", [1000, UNWRITTEN, FREED, EVICTED, UNWRITTEN, 1000])
    said = [shadow.describe(slot // 2, slot % 2) for slot in range(6)]
    poison = [POISON_NAMES[value] for value in (UNWRITTEN, FREED, EVICTED, UNWRITTEN)]
    assert said == ["another token's KV", *poison, "another token's KV"]
