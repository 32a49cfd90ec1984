"""What the checks say of SGLang's RadixCache: nothing of the unmodified release, and of mutants
what is wrong with them, in a short case.

Needs SGLang 0.5.23 in an environment of its own: `bash .ci/sglang-env FOLDER`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, first_failure, needs

needs("sglang:radix")

pytestmark = pytest.mark.sglang

NAME = "sglang:radix"


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_failure(NAME, "sglang", 60) is None


def locks_only_the_last_node(original: Original) -> Original:
    def inc_lock_ref(tree: Any, node: Any) -> Any:
        kept = node.parent
        node.parent = tree.root_node
        try:
            return original(tree, node)
        finally:
            node.parent = kept

    return inc_lock_ref


def splits_a_locked_node_into_an_unlocked_head(original: Original) -> Original:
    def split_node(tree: Any, key: Any, child: Any, length: int) -> Any:
        head = original(tree, key, child, length)
        head.lock_ref = 0
        return head

    return split_node


def evicts_what_is_locked(original: Original) -> Original:
    def update_leaf_status(tree: Any, node: Any) -> None:
        locks, node.lock_ref = node.lock_ref, 0
        try:
            original(tree, node)
        finally:
            node.lock_ref = locks

    return update_leaf_status


def keeps_the_lock_of_the_last_checkpoint(original: Original) -> Original:
    def checkpoint(tree: Any, request: Any, **up_to: int) -> None:
        lock, request.lock = request.lock, None
        original(tree, request, **up_to)
        request.lock = request.lock or lock

    return checkpoint


def publishes_one_page_less(original: Original) -> Original:
    def checkpoint(tree: Any, request: Any, up_to: int) -> None:
        original(tree, request, up_to=max(up_to - tree.page_size, request.kv.cache_protected_len))

    return checkpoint


def frees_no_duplicates(original: Original) -> Original:
    def insert_cache(tree: Any, request: Any, tokens: Any, **how: Any) -> Any:
        protected = request.kv.cache_protected_len
        request.kv.cache_protected_len = len(tokens) // tree.page_size * tree.page_size
        try:
            return original(tree, request, tokens, **how)
        finally:
            request.kv.cache_protected_len = protected

    return insert_cache


def frees_what_the_tree_took_before(original: Original) -> Original:
    def insert_cache(tree: Any, request: Any, tokens: Any, **how: Any) -> Any:
        protected, request.kv.cache_protected_len = request.kv.cache_protected_len, 0
        try:
            return original(tree, request, tokens, **how)
        finally:
            request.kv.cache_protected_len = protected

    return insert_cache


def leaves_the_row_as_it_was(original: Original) -> Original:
    def write(rows: Any, indices: Any, values: Any) -> None:
        if not (isinstance(indices[0], int) and indices[1].start):
            original(rows, indices, values)

    return write


def counts_nothing_evictable_less(original: Original) -> Original:
    def delete_leaf(tree: Any, node: Any) -> None:
        original(tree, node)
        tree.evictable_size_ += len(node.key)

    return delete_leaf


def hits_the_whole_prompt(original: Original) -> Original:
    return lambda request, length: length


def hits_less_than_there_is(original: Original) -> Original:
    return lambda request, length: max(0, length - 1 - 4)


def leaves_the_salt_out_of_the_tree(original: Original) -> Original:
    def init(key: Any, token_ids: Any, extra_key: Any = None, *more: Any, **salt: Any) -> None:
        original(key, token_ids, extra_key, *more, **{**salt, "cache_salt": None})

    return init


def shares_between_adapters(original: Original) -> Original:
    def init(key: Any, token_ids: Any, extra_key: Any = None, *more: Any, **salt: Any) -> None:
        original(key, token_ids, None, *more, **salt)

    return init


def frees_the_last_page_only_when_it_is_full(original: Original) -> Original:
    def free_segment(allocator: Any, slots: Any, *, start_pos: int) -> None:
        whole = len(slots) // allocator.page_size * allocator.page_size
        original(allocator, slots[:whole], start_pos=start_pos)

    return free_segment


def hands_out_a_page_twice(original: Original) -> Original:
    def alloc_extend(allocator: Any, *arguments: Any) -> Any:
        before = allocator.free_pages
        slots = original(allocator, *arguments)
        if len(before) - len(allocator.free_pages) > 1:
            allocator.free_pages = before[len(before) - len(allocator.free_pages) - 1 :]
        return slots

    return alloc_extend


def forgets_what_a_stop_left_over(original: Original) -> Original:
    return lambda request, start, end, tree: None


def keeps_the_row_of_a_retracted_request(original: Original) -> Original:
    def release_kv_cache(request: Any, tree: Any, *, checkpoint: bool) -> None:
        original(request, tree, checkpoint=checkpoint)
        if not checkpoint:
            tree.req_to_token_pool.free_slots.pop()

    return release_kv_cache


def evicts_twice_as_much(original: Original) -> Original:
    return lambda tree, params: original(tree, replace(params, num_tokens=2 * params.num_tokens))


def evicts_everything(original: Original) -> Original:
    return lambda tree, params: original(tree, replace(params, num_tokens=1 << 40))


def evicts_one_leaf_more(original: Original) -> Original:
    def evict(tree: Any, params: Any) -> Any:
        done = original(tree, params)
        original(tree, replace(params, num_tokens=1))
        return done

    return evict


def evicts_what_was_used_last(original: Original) -> Original:
    return lambda strategy, node: -original(strategy, node)


def evicts_by_age(original: Original) -> Original:
    return lambda strategy, node: node.creation_time


def forgets_that_a_hit_is_a_use(original: Original) -> Original:
    def match(tree: Any, node: Any, key: Any) -> Any:
        clock = import_module("sglang.srt.mem_cache.radix_cache").time
        monotonic, clock.monotonic = clock.monotonic, lambda: node.last_access_time
        try:
            return original(tree, node, key)
        finally:
            clock.monotonic = monotonic

    return match


def evicts_a_locked_leaf(original: Original) -> Original:
    """One that the first request in the tree still uses."""

    def evict(tree: Any, params: Any) -> Any:
        locked = [child for child in tree.root_node.children.values() if child.lock_ref]
        tree.evictable_leaves.update(child for child in locked if not child.children)
        return original(tree, params)

    return evict


def evicts_a_leaf_though_there_is_room(original: Original) -> Original:
    def evict_to_free_tokens(allocator: Any, tree: Any, tokens: int) -> None:
        original(allocator, tree, max(tokens, allocator.available_size() + 1))

    return evict_to_free_tokens


def makes_room_for_nobody_when_it_retracts(original: Original) -> Original:
    return lambda tree, tokens: original(tree, tokens + 20)


def retracts_with_a_checkpoint(original: Original) -> Original:
    """So the tree takes what is not computed."""
    return lambda request, tree, *, checkpoint: original(request, tree, checkpoint=True)


def keeps_what_is_behind_a_stop(original: Original) -> Original:
    return lambda request: request.kv.kv_committed_len


def counts_nothing_as_protected(original: Original) -> Original:
    def inc_lock_ref(tree: Any, node: Any) -> Any:
        counted = tree.protected_size_
        done = original(tree, node)
        tree.protected_size_ = counted
        return done

    return inc_lock_ref


def matches_parts_of_pages(original: Original) -> Original:
    return lambda key, other, offset, page_size=1: original(key, other, offset)


def compares_no_tokens(original: Original) -> Original:
    """Beyond the page by which a child is found."""

    def match_at(key: Any, other: Any, offset: int, page_size: int = 1) -> int:
        return min(len(key), len(other) - offset) // page_size * page_size

    return match_at


def leaves_all_slots_to_the_tail_it_splits_off(original: Original) -> Original:
    def split_node(tree: Any, key: Any, child: Any, length: int) -> Any:
        slots = child.value
        head = original(tree, key, child, length)
        child.value = slots
        return head

    return split_node


def gives_back_another_row(original: Original) -> Original:
    return lambda rows, indices: original(rows, [1] * len(indices))


TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
KEY = "sglang.srt.mem_cache.radix_cache.RadixKey"
PAGES = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator"
ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
BATCH = "sglang.srt.managers.schedule_batch"
REQUEST = f"{BATCH}.Req"
COMMON = "sglang.srt.mem_cache.common"
LRU = "sglang.srt.mem_cache.evict_policy.LRUStrategy"

MUTANTS = (
    Mutant(locks_only_the_last_node, f"{TREE}.inc_lock_ref", {"REF", "CONS"}),
    Mutant(splits_a_locked_node_into_an_unlocked_head, f"{TREE}._split_node", {"REF", "CONS"}),
    Mutant(evicts_what_is_locked, f"{TREE}._update_leaf_status", {"PIN", "EXCL"}),
    Mutant(keeps_the_lock_of_the_last_checkpoint, f"{TREE}.checkpoint", {"REF", "CONS"}),
    Mutant(publishes_one_page_less, f"{TREE}.checkpoint", {"VALID"}),
    Mutant(frees_no_duplicates, f"{TREE}._insert_cache", {"CONS"}),
    Mutant(frees_what_the_tree_took_before, f"{TREE}._insert_cache", {"CONS"}),
    Mutant(leaves_the_row_as_it_was, f"{ROWS}.write", {"EXCL"}),
    Mutant(counts_nothing_evictable_less, f"{TREE}._delete_leaf", {"CONS"}),
    # SGLang cannot extend a request by nothing.
    Mutant(hits_the_whole_prompt, f"{REQUEST}._compute_max_prefix_len", {"CAP", "CRASH"}),
    Mutant(hits_less_than_there_is, f"{REQUEST}._compute_max_prefix_len", {"CAP"}),
    Mutant(leaves_the_salt_out_of_the_tree, f"{KEY}.__init__", {"KEY", "CAP", "PROV"}),
    Mutant(shares_between_adapters, f"{KEY}.__init__", {"KEY", "CAP", "PROV"}),
    Mutant(frees_the_last_page_only_when_it_is_full, f"{PAGES}.free_segment", {"CONS"}),
    Mutant(hands_out_a_page_twice, f"{PAGES}.alloc_extend", {"CONS", "EXCL"}),
    Mutant(forgets_what_a_stop_left_over, f"{COMMON}._release_overallocated_kv_indices", {"CONS"}),
    Mutant(keeps_the_row_of_a_retracted_request, f"{COMMON}.release_kv_cache", {"CRASH"}),
    Mutant(evicts_twice_as_much, f"{TREE}.evict", {"ORDER"}),
    Mutant(evicts_everything, f"{TREE}.evict", {"ORDER"}),
    Mutant(evicts_one_leaf_more, f"{TREE}.evict", {"ORDER"}),
    Mutant(evicts_what_was_used_last, f"{LRU}.get_priority", {"ORDER"}),
    Mutant(evicts_by_age, f"{LRU}.get_priority", {"ORDER"}),
    Mutant(forgets_that_a_hit_is_a_use, f"{TREE}._match_prefix_helper", {"ORDER"}),
    Mutant(evicts_a_locked_leaf, f"{TREE}.evict", {"PIN", "EXCL", "CONS"}),
    Mutant(evicts_a_leaf_though_there_is_room, f"{ALLOCATOR}.evict_to_free_tokens", {"ORDER"}),
    Mutant(makes_room_for_nobody_when_it_retracts, f"{BATCH}.evict_from_tree_cache", {"ORDER"}),
    Mutant(retracts_with_a_checkpoint, f"{BATCH}.release_kv_cache", {"VALID"}),
    Mutant(keeps_what_is_behind_a_stop, f"{REQUEST}.owned_kv_len", {"VALID"}),
    Mutant(counts_nothing_as_protected, f"{TREE}.inc_lock_ref", {"CRASH"}),
    Mutant(matches_parts_of_pages, f"{KEY}.match_at", {"CRASH"}),
    Mutant(compares_no_tokens, f"{KEY}.match_at", {"PROV", "KEY", "CAP"}),
    Mutant(leaves_all_slots_to_the_tail_it_splits_off, f"{TREE}._split_node", {"CRASH"}),
    Mutant(gives_back_another_row, f"{ROWS}.free_rows", {"CRASH"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_sglang_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, "sglang")
