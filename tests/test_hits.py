"""Remembered prefix hits are those that a fresh look-up finds, also for several groups."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.books import Books
from kvproof.invariants.scheduling.hits import Hit, Hits
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import Tags
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import subject_factory


@pytest.mark.parametrize("policy", ["fcfs", "max_utilization", "priority"])
def test_remembered_hits_are_fresh(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    original = Hits.of

    def compared(self: Hits, request: int, tags: Tags[int]) -> Hit:
        before = self._known.get(request)
        hit = original(self, request, tags)
        assert hit == self._look_up(tags)
        seen["remembered" if hit is before else "looked up"] += 1
        return hit

    monkeypatch.setattr(Hits, "of", compared)
    factory = subject_factory(f"scheduler:{policy}")
    able = factory(Configuration()).capabilities | {"tiers", "swaps"}
    for seed in range(60):
        draw = draw_run(f"hits/{seed}", able)
        harness = harness_for(factory(draw.configuration))
        assert harness.run(draw.operations) == ()
    assert seen["remembered"] > 100
    assert seen["looked up"] > 100


TAGS: Tags[int] = array("Q", [11, 12, 13, 14, 15])
"""Two rows of two, and a last token that is never hit."""


def _books() -> Books:
    books = Books(Configuration(blocks=4, block_size=2), Semantics(groups=2))
    for group in books.groups:
        group.publish([1, 2], [b"a", b"b"], [12, 14])
    return books


def test_groups_agree_on_the_shortest_hit() -> None:
    books = _books()
    hits = Hits(books)
    assert hits.of(0, TAGS)[:2] == (2, 2)
    books.groups[1].unpublish([2])
    assert hits.of(0, TAGS)[:2] == (1, 1)
    books.groups[1].publish([3], [b"b"], [14])
    assert hits.of(0, TAGS)[:2] == (2, 2)


def test_who_holds_a_block_of_the_hit_counts() -> None:
    books = _books()
    hits = Hits(books)
    remembered = hits.of(0, TAGS)
    books.groups[0].hold([3])
    assert hits.of(0, TAGS) is remembered
    books.groups[0].hold([1])
    assert hits.of(0, TAGS)[:2] == (2, 2), "of several groups, the most"
    books.groups[1].hold([1, 2])
    assert hits.of(0, TAGS)[:2] == (2, 1)
    books.groups[1].drop([1, 2])
    assert hits.of(0, TAGS)[:2] == (2, 2)


def test_another_prompt_is_looked_up() -> None:
    hits = Hits(_books())
    assert hits.of(0, TAGS).rows == 2
    assert hits.of(0, TAGS[:4]).rows == 1


def test_only_so_many_are_remembered() -> None:
    hits = Hits(_books())
    for request in range(1000):
        hits.of(request, TAGS)
    assert len(hits._known) == 64
