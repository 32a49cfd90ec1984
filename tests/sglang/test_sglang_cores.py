"""SGLang's tree is written twice, in Python and in Rust: both do the same.

The subjects drive the core in Python, since the other one, which is SGLang's default, does not show
its locks.  What it does show, and all that it leads to, is compared here.
"""

from __future__ import annotations

from typing import Any

import pytest
from foreign import needs

from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.operations import Operation
from kvproof.stateful_tests.subjects.sglang_unified import SglangUnifiedSubject

needs("sglang:unified")

pytestmark = pytest.mark.sglang


class Rust(SglangUnifiedSubject):
    """Driven without a look into the tree: what it tells of the tree is nothing."""

    def _new_tree(self) -> Any:
        return self._sglang.new_unified(self.configuration, core="rust")

    def nodes(self, group: int) -> list[tuple[Any, list[int]]]:
        return []

    def keys_in_tree(self, group: int) -> dict[int, bytes]:
        return {}


def after(subject: SglangUnifiedSubject, operation: Operation) -> tuple[object, ...]:
    """What an operation led to."""
    outcome = subject.apply(operation)
    tree = subject.tree
    return (
        outcome.status,
        outcome.reason,
        outcome.request,
        outcome.cached_tokens,
        {live.number: subject.table(live) for live in subject.running},
        subject.unused_pages(0),
        tree.evictable_size(),
        tree.protected_size(),
        sorted(tree.all_values_flatten().tolist()),
    )


def first_difference(draw: Draw) -> int | None:
    """The first operation that leads to something else."""
    subjects = SglangUnifiedSubject(draw.configuration), Rust(draw.configuration)
    for number, operation in enumerate(draw.operations):
        python, rust = (after(subject, operation) for subject in subjects)
        if python != rust:
            return number
    return None


def draws(count: int) -> list[Draw]:
    able = abilities(SglangUnifiedSubject)
    return [draw_run(f"cores/{number}", able) for number in range(count)]


def test_both_cores_do_the_same() -> None:
    assert [draw.seed for draw in draws(40) if first_difference(draw) is not None] == []


def test_a_core_that_evicts_by_age_is_seen_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    by_age = "sglang.srt.mem_cache.evict_policy.LRUStrategy.get_priority"
    monkeypatch.setattr(by_age, lambda strategy, node: node.creation_time)
    assert any(first_difference(draw) is not None for draw in draws(40))
