"""Prompts and provenance tags: however they are expanded, equal histories have equal tags."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.invariants.operations import Media, Segment
from kvproof.invariants.prompts import (
    PLACEHOLDER,
    clip_media,
    prompt_length,
    prompt_tokens,
    sampled_tokens,
)
from kvproof.invariants.tags import (
    EVICTED,
    FREED,
    IN_FLIGHT,
    POISON_NAMES,
    UNWRITTEN,
    extend_sampled,
    extend_tags,
    prompt_tags,
    root_tag,
)

Prompt = tuple[Segment, ...]
Items = tuple[Media, ...]

# Around the lengths at which implementations change over: remembered streams, tails, numpy.
LENGTHS = st.sampled_from([1, 2, 5, 31, 64, 95, 96, 97, 130, 1000, 1023, 1024, 1025, 1100, 2500])
SOURCES = st.sampled_from([0, 1, 2, 7, (1 << 40) - 1, 1 << 40])
PROMPTS = st.lists(st.builds(Segment, SOURCES, LENGTHS), min_size=1, max_size=3).map(tuple)
DOMAINS = st.sampled_from([0, 1, 2, 1 << 40])
ITEMS = st.sampled_from([0, 1, 1 + (1 << 16)])
STARTS = st.sampled_from([0, 1, 3, 40, 1000, 1024, 5000])
MEDIA_ITEMS = st.builds(Media, ITEMS, STARTS, st.sampled_from([1, 2, 37, 60, 1500]))
MEDIA = st.lists(MEDIA_ITEMS, max_size=3).map(tuple)

# -- prompts ---------------------------------------------------------------------------------------


@given(SOURCES, LENGTHS, LENGTHS)
def test_short_and_long_segments_are_cut_from_one_stream(
    source: int, length: int, other: int
) -> None:
    shorter, longer = sorted((length, other))
    tokens = prompt_tokens((Segment(source, longer),))
    assert len(tokens) == longer
    assert prompt_tokens((Segment(source, shorter),)) == tokens[:shorter]


@given(PROMPTS)
def test_a_prompt_is_its_segments_one_after_the_other(prompt: Prompt) -> None:
    expected: array[int] = array("I")
    for segment in prompt:
        expected += prompt_tokens((segment,))
    assert prompt_tokens(prompt) == expected
    assert prompt_length(prompt) == len(expected)


@pytest.mark.parametrize("stem", [1, 10, 1000, 1500])
@pytest.mark.parametrize("tail", [3, 1500])
def test_prompts_share_exactly_the_segments_that_they_share(stem: int, tail: int) -> None:
    one = prompt_tokens((Segment(0, stem), Segment(1, tail)))
    other = prompt_tokens((Segment(0, stem), Segment(2, tail)))
    shorter = prompt_tokens((Segment(0, stem - 1), Segment(3, tail))) if stem > 1 else other
    assert _shared(one, other) == stem
    assert _shared(one, shorter) == (stem - 1 if stem > 1 else stem)
    assert _shared(one, one) == stem + tail


def _shared(one: array[int], other: array[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_prompts_are_new_arrays_that_their_owner_may_change() -> None:
    for length in (4, 2000):
        prompt = (Segment(0, length),)
        prompt_tokens(prompt).append(1)
        prompt_tokens(prompt)[0] = 7
        assert len(prompt_tokens(prompt)) == length
        assert prompt_tokens(prompt)[0] != 7


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 200))
def test_equal_choices_sample_equal_tokens_however_many_at_once(
    choice: int, position: int, count: int
) -> None:
    one_by_one = [sampled_tokens(choice, position + i, 1)[0] for i in range(count)]
    assert sampled_tokens(choice, position, count) == one_by_one
    assert all(0 <= token < 1 << 32 for token in one_by_one)


def test_different_choices_sample_different_tokens() -> None:
    assert len({sampled_tokens(choice, 9, 1)[0] for choice in range(1000)}) == 1000
    assert len({sampled_tokens(0, position, 1)[0] for position in range(1000)}) == 1000


def test_media_are_shown_by_placeholders_that_are_equal_for_all_items() -> None:
    plain = prompt_tokens((Segment(0, 8),))
    shown = prompt_tokens((Segment(0, 8),), (Media(1, 2, 3), Media(9, 7, 100)))
    expected = [PLACEHOLDER if p in (2, 3, 4, 7) else plain[p] for p in range(8)]
    assert shown.tolist() == expected
    assert PLACEHOLDER not in plain


def test_media_are_clipped_to_the_prompt() -> None:
    media = (Media(4, 9, 1), Media(2, 2, 9), Media(3, 3, 1), Media(1, 0, 2))
    # Number 3 begins within number 2, and number 4 beyond the prompt.
    assert clip_media(media, 4) == (Media(1, 0, 2), Media(2, 2, 2))
    assert clip_media(media, 5) == (Media(1, 0, 2), Media(2, 2, 3))
    assert clip_media(media, 12) == (Media(1, 0, 2), Media(2, 2, 9))
    assert clip_media((), 4) == ()


@given(PROMPTS, MEDIA)
def test_clipping_media_changes_neither_tokens_nor_tags(prompt: Prompt, media: Items) -> None:
    clipped = clip_media(media, prompt_length(prompt))
    assert prompt_tokens(prompt, clipped) == prompt_tokens(prompt, media)
    assert prompt_tags(prompt, 0, 0, clipped) == prompt_tags(prompt, 0, 0, media)


# -- tags ------------------------------------------------------------------------------------------


class Names:
    """The plain reference: one name for each history; grows as histories are asked for.

    A history is who may share it, and token by token with the media shown there.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[object, object], int] = {}

    def of_prompt(self, prompt: Prompt, salt: int, adapter: int, media: Items) -> list[int]:
        shown: dict[int, tuple[int, int]] = {}
        for item in sorted(media, key=lambda item: (item.start, item.item, item.length)):
            if item.start not in shown:  # else it begins within another, and is not shown
                places = range(item.start, item.start + item.length)
                shown |= {place: (item.item, place - item.start) for place in places}
        tokens = prompt_tokens(prompt, media)
        steps = [(token, shown.get(position)) for position, token in enumerate(tokens)]
        return self._chain(("root", salt, adapter), steps)

    def extended(self, last: object, tokens: Iterable[int]) -> list[int]:
        return self._chain(last, [(token, None) for token in tokens])

    def _chain(self, last: object, steps: Iterable[object]) -> list[int]:
        names = []
        for step in steps:
            last = self._children.setdefault((last, step), len(self._children))
            names.append(last)
        return names


def assert_one_to_one(names: Iterable[int], tags: Iterable[int]) -> None:
    """Equal histories have equal tags, different ones different tags."""
    pairs = set(zip(names, tags, strict=True))
    assert len(dict(pairs)) == len(pairs), "one history has two tags"
    assert len({tag for _, tag in pairs}) == len(pairs), "two histories share a tag"


BIT = st.integers(0, 1)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": BIT,
        "salt": DOMAINS,
        "adapter": DOMAINS,
        "media": st.permutations(range(3)),
        "items": st.integers(0, 3),
        "growth": st.lists(st.tuples(BIT, st.integers(1, 7)), max_size=3),
    }
)


@given(
    st.lists(PROMPTS, min_size=2, max_size=2),
    st.lists(MEDIA_ITEMS, min_size=3, max_size=3),
    st.lists(REQUESTS, min_size=2, max_size=5),
)
@settings(max_examples=80, deadline=None)
def test_tags_are_one_to_one_with_histories_on_every_path(
    prompts: list[Prompt], items: list[Media], requests: list[dict[str, Any]]
) -> None:
    """Remembered, bulk, with media and grown token by token: all mean the same.

    The requests have prompts and media items of few, so that they share and differ in little.
    """
    reference = Names()
    all_names: list[int] = []
    all_tags: list[int] = []
    for request in requests:
        media = tuple(items[i] for i in request["media"][: request["items"]])
        asked = (prompts[request["prompt"]], request["salt"], request["adapter"], media)
        names = reference.of_prompt(*asked)
        tags = prompt_tags(*asked)[:]
        for choice, count in request["growth"]:
            tokens = sampled_tokens(choice, len(tags), count)
            names += reference.extended(names[-1], tokens)
            extend_sampled(tags, choice, count)
        assert len(tags) == len(names)
        all_names += names
        all_tags += tags
    assert_one_to_one(all_names, all_tags)


@given(PROMPTS, DOMAINS, DOMAINS)
def test_a_prompt_has_the_tags_of_its_tokens_one_by_one(
    prompt: Prompt, salt: int, adapter: int
) -> None:
    tags: array[int] = array("Q")
    for token in prompt_tokens(prompt):
        extend_tags(tags, tags[-1] if tags else root_tag(salt, adapter), [token])
    assert prompt_tags(prompt, salt, adapter, ()) == tags


@given(PROMPTS, st.integers(0, 1 << 40), st.integers(1, 60))
def test_sampled_tokens_have_the_tags_of_those_tokens(
    prompt: Prompt, choice: int, count: int
) -> None:
    sampled = prompt_tags(prompt, 0, 0, ())[:]
    spelled = sampled[:]
    extend_sampled(sampled, choice, count)
    tokens = sampled_tokens(choice, len(spelled), count)
    extend_tags(spelled, spelled[-1], tokens)
    assert sampled == spelled


def test_remembered_tags_stay_as_they_were_when_a_copy_is_extended() -> None:
    for length in (4, 1500):
        prompt = (Segment(0, length),)
        before = prompt_tags(prompt, 0, 0, ())[:]
        copy = prompt_tags(prompt, 0, 0, ())[:]
        extend_sampled(copy, 0, 3)
        assert prompt_tags(prompt, 0, 0, ()) == before


@pytest.mark.parametrize("length", [8, 200, 1500])
def test_what_separates_requests_separates_every_position(length: int) -> None:
    base = (Segment(0, length),)
    domains: list[tuple[int, int, Items]] = [
        (0, 0, ()),
        (1, 0, ()),
        (0, 1, ()),
        (1, 1, ()),
        (0, 0, (Media(1, 0, 2),)),
        (0, 0, (Media(2, 0, 2),)),
        (0, 0, (Media(1 + (1 << 16), 0, 2),)),
        (1, 0, (Media(1, 0, 2),)),
    ]
    tags = [tag for domain in domains for tag in prompt_tags(base, *domain)]
    assert len(set(tags)) == len(domains) * length


@pytest.mark.parametrize("length", [8, 200, 1500])
def test_media_leave_the_tags_before_them_alone(length: int) -> None:
    base, first = (Segment(0, length),), Media(1, 0, 2)
    shown = [(), (Media(2, 5, 2),), (Media(3, 5, 2),), (Media(2, 6, 2),)]
    tags = [prompt_tags(base, 0, 0, (first, *more)) for more in shown]
    assert len({tuple(each[:5]) for each in tags}) == 1
    assert tags[0][5] == tags[3][5]
    rest = [tag for each in tags for tag in each[6:]]
    assert len(set(rest)) == len(rest)


def test_salt_and_adapter_are_told_apart() -> None:
    roots = {root_tag(salt, adapter) for salt, adapter in product(range(50), range(50))}
    assert len(roots) == 2500
    assert root_tag(1, 12) != root_tag(11, 2)


def test_an_item_shown_twice_at_one_place_is_not_another_item_shown_twice() -> None:
    prompt = (Segment(0, 4),)
    twice = [prompt_tags(prompt, 0, 0, (Media(item, 0, 4),) * 2) for item in (1, 2)]
    assert not set(twice[0]) & set(twice[1])


def _many_prefixes() -> list[int]:
    tags: list[int] = []
    for salt, adapter, source in product(range(4), range(4), range(4)):
        tags += prompt_tags((Segment(source, 1500),), salt, adapter, ())
    for item, start in product(range(1, 9), range(0, 40, 8)):
        tags += prompt_tags((Segment(9, 90),), 0, 0, (Media(item, start, 8),))[start:]
    for choice in range(20):
        grown = prompt_tags((Segment(8, 1),), 0, 0, ())[:]
        extend_sampled(grown, choice, 400)
        tags += grown[1:]
    return tags


def test_a_hundred_thousand_prefixes_have_as_many_tags() -> None:
    tags = _many_prefixes()
    assert len(tags) > 100_000
    assert len(set(tags)) == len(tags)
    assert not set(tags) & set(POISON_NAMES)
    # The same test of numbers of 28 bits finds collisions, from either end of the tag.
    assert len({tag & 0x0FFF_FFFF for tag in tags}) < len(tags)
    assert len({tag >> 36 for tag in tags}) < len(tags)
    # And not many more than chance has: n² / 2 / 2^28 of them, about 20.
    assert len(tags) - len({tag >> 36 for tag in tags}) < 50
    assert len(tags) - len({tag & 0x0FFF_FFFF for tag in tags}) < 50


def test_every_poison_has_a_name() -> None:
    assert set(POISON_NAMES) == {UNWRITTEN, FREED, EVICTED, IN_FLIGHT}
    assert len(set(POISON_NAMES.values())) == len(POISON_NAMES)
