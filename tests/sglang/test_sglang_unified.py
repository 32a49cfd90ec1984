"""What the checks say of SGLang's UnifiedRadixCache: nothing of the unmodified release, and of
mutants what is wrong with them, in a short case.

Needs SGLang 0.5.23 in an environment of its own: `bash .ci/sglang-env FOLDER`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, first_failure, needs

needs("sglang:unified")

pytestmark = pytest.mark.sglang

NAME = "sglang:unified"


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_failure(NAME, "unified", 60) is None


def locks_only_the_last_node(original: Original) -> Original:
    def acquire(part: Any, node: Any, result: Any, **how: Any) -> Any:
        kept, root = node.parent, part.tree_core.root_node
        if node is not root:
            node.parent = root
        try:
            return original(part, node, result, **how)
        finally:
            node.parent = kept

    return acquire


def unlocks_all_but_the_last_node(original: Original) -> Original:
    def release(part: Any, node: Any, params: Any, **how: Any) -> None:
        if node is not part.tree_core.root_node:
            original(part, node.parent, params, **how)

    return release


def splits_a_locked_node_into_an_unlocked_head(original: Original) -> Original:
    def redistribute(part: Any, new_parent: Any, child: Any) -> None:
        original(part, new_parent, child)
        new_parent.component(part.component_type).lock_ref = 0

    return redistribute


def evicts_what_is_locked(original: Original) -> Original:
    def is_device_leaf(core: Any, node: Any) -> bool:
        part = node.component(0)
        locks, part.lock_ref = part.lock_ref, 0
        try:
            return bool(original(core, node))
        finally:
            part.lock_ref = locks

    return is_device_leaf


def keeps_the_lock_of_the_last_checkpoint(original: Original) -> Original:
    def checkpoint(tree: Any, request: Any, **up_to: int) -> None:
        lock, request.lock = request.lock, None
        original(tree, request, **up_to)
        request.lock = request.lock or lock

    return checkpoint


def publishes_one_page_less(original: Original) -> Original:
    def checkpoint(tree: Any, request: Any, *, up_to: int) -> None:
        original(tree, request, up_to=max(up_to - tree.page_size, request.kv.cache_protected_len))

    return checkpoint


def frees_no_duplicates(original: Original) -> Original:
    return lambda core, params: original(core, replace(params, prev_prefix_len=len(params.key)))


def frees_what_the_tree_took_before(original: Original) -> Original:
    return lambda core, params: original(core, replace(params, prev_prefix_len=0))


def counts_nothing_evictable_less(original: Original) -> Original:
    def evict_component(part: Any, node: Any, *lists: Any, **how: Any) -> Any:
        freed = original(part, node, *lists, **how)
        part.tree_core.component_evictable_size_[part.component_type] += freed[0]
        return freed

    return evict_component


def evicts_by_age(original: Original) -> Original:
    return lambda strategy, node: node.creation_time


def forgets_that_a_hit_is_a_use(original: Original) -> Original:
    def match(core: Any, params: Any) -> Any:
        used = [(node, node.last_access_time) for node in core._collect_all_nodes()]
        found = original(core, params)
        for node, time in used:
            node.last_access_time = time
        return found

    return match


def evicts_twice_as_much(original: Original) -> Original:
    return lambda tree, params: original(tree, replace(params, num_tokens=2 * params.num_tokens))


def counts_nothing_as_protected(original: Original) -> Original:
    def acquire(part: Any, *arguments: Any, **how: Any) -> Any:
        counted = part.tree_core.component_protected_size_
        before = counted[part.component_type]
        done = original(part, *arguments, **how)
        counted[part.component_type] = before
        return done

    return acquire


TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
FULL = "sglang.srt.mem_cache.unified_cache.components.full.FullComponent"
LRU = "sglang.srt.mem_cache.evict_policy.LRUStrategy"

MUTANTS = (
    Mutant(locks_only_the_last_node, f"{FULL}.acquire_component_lock", {"REF", "CONS", "CRASH"}),
    Mutant(unlocks_all_but_the_last_node, f"{FULL}.release_component_lock", {"REF", "CONS"}),
    Mutant(
        splits_a_locked_node_into_an_unlocked_head,
        f"{FULL}.redistribute_on_node_split",
        {"REF", "CONS", "ATOM", "CRASH"},
    ),
    Mutant(evicts_what_is_locked, f"{CORE}._is_device_leaf", {"PIN", "EXCL"}),
    Mutant(keeps_the_lock_of_the_last_checkpoint, f"{TREE}.checkpoint", {"REF", "CONS"}),
    Mutant(publishes_one_page_less, f"{TREE}.checkpoint", {"VALID"}),
    Mutant(frees_no_duplicates, f"{CORE}.begin_insert", {"CONS"}),
    Mutant(frees_what_the_tree_took_before, f"{CORE}.begin_insert", {"CONS"}),
    Mutant(counts_nothing_evictable_less, f"{FULL}.evict_component", {"CONS"}),
    Mutant(evicts_by_age, f"{LRU}.get_priority", {"ORDER"}),
    Mutant(forgets_that_a_hit_is_a_use, f"{CORE}.match_prefix", {"ORDER"}),
    Mutant(evicts_twice_as_much, f"{TREE}.evict", {"ORDER"}),
    Mutant(counts_nothing_as_protected, f"{FULL}.acquire_component_lock", {"CRASH"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_sglang_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, "unified")
