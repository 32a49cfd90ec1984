"""vLLM's manager with several groups of layers over one pool: alike, or with a window, or with
blocks of unequal size.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, first_failure, found_and_shrunk, needs

from kvproof.invariants.events import BlocksAllocated, BlocksOutlived, BlocksPublished, BlocksReused
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Evict,
    Finish,
    Grow,
    Launch,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import LARGER_THAN_POOL, NO_FREE_BLOCKS
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import subject_factory

NAME = "vllm:manager:groups"
HYBRID = "vllm:manager:hybrid"
UNEQUAL = "vllm:manager:unequal"

needs(NAME)

pytestmark = pytest.mark.vllm

SEED = "vllm-groups"


def harness(blocks: int = 12, name: str = NAME) -> Harness:
    configuration = Configuration(blocks=blocks, block_size=4)
    return Harness(subject_factory(name)(configuration), audit_interval=1)


def admit(length: int, source: int = 1) -> Admit:
    return Admit((Segment(source, length),))


def events_of(harness: Harness, operation: AnyOperation, kind: type[Any]) -> list[Any]:
    harness.perform(operation)
    assert not harness.violations
    return [event for event in harness.last_events if isinstance(event, kind)]


def test_a_request_has_a_table_and_keys_in_each_group() -> None:
    run = harness()
    first, second = events_of(run, admit(9), BlocksAllocated)
    assert (first.group, second.group) == (0, 1)
    assert set(first.blocks).isdisjoint(second.blocks)
    view = run.subject.view()
    assert list(view.table(0, 1)) == list(second.blocks)
    assert view.standing(0)[3] == (3, 3)
    assert len(view.index(0)) == 4


def test_a_hit_is_what_all_groups_have() -> None:
    run = harness()
    assert not run.run([admit(9), Launch(), Retire(), Finish(0)])
    assert [event.group for event in events_of(run, admit(9), BlocksReused)] == [0, 1]
    assert not run.run([Launch(), Retire(), Finish(0), Evict(1)])
    # The last block of group 0 was evicted: what group 1 has alone is no hit.
    assert run.perform(admit(9)).cached_tokens == 4
    assert not run.audit()


def test_all_groups_take_from_one_pool() -> None:
    run = harness(blocks=7)
    assert run.perform(admit(16)).reason == LARGER_THAN_POOL
    assert run.perform(admit(8)).status == "done"
    assert run.subject.view().free_count(0) == run.subject.view().free_count(1) == 3
    assert run.perform(admit(8, 2)).reason == NO_FREE_BLOCKS
    assert len(events_of(run, admit(4, 3), BlocksPublished)) == 2


def test_behind_the_window_blocks_are_given_back_even_by_a_refused_growth() -> None:
    run = harness(blocks=12, name=HYBRID)
    assert not run.run([admit(15), admit(5, 2), Launch(), Retire()])
    (outlived,) = events_of(run, Grow(0, 9), BlocksOutlived)
    assert (outlived.group, len(outlived.blocks)) == (1, 2)
    view = run.subject.view()
    assert run.counts[Grow]["refused"] == 1
    assert list(view.table(0, 1))[:2] == [0, 0]
    assert view.free_count(0) == 2
    assert not run.run([Grow(0, 2), Launch(), Retire(), Finish(0)])


def test_a_hit_needs_only_the_windows_blocks() -> None:
    run = harness(blocks=16, name=HYBRID)
    assert not run.run([admit(17), Launch(), Retire(), Finish(0)])
    run.perform(admit(17))
    reused = [event for event in run.last_events if isinstance(event, BlocksReused)]
    assert [(event.group, event.row, len(event.blocks)) for event in reused] == [
        (0, 0, 4),
        (1, 2, 2),
    ]
    assert not run.run([Launch(), Retire()])


def test_groups_of_unequal_size_have_rows_of_their_own() -> None:
    run = harness(blocks=16, name=UNEQUAL)
    tables = [len(event.blocks) for event in events_of(run, admit(25), BlocksAllocated)]
    assert tables == [7, 4, 3]
    assert run.subject.view().standing(0)[3] == (7, 4, 3)
    assert run.subject.view().free_count(0) == 2
    assert run.perform(admit(33)).reason == LARGER_THAN_POOL
    assert run.perform(admit(9, 2)).reason == NO_FREE_BLOCKS


def test_what_is_findable_ends_where_all_groups_have_a_blocks_end() -> None:
    run = harness(blocks=30, name=UNEQUAL)
    published = events_of(run, admit(40), BlocksPublished)
    assert [(event.group, len(event.blocks)) for event in published] == [(0, 6), (1, 3), (2, 2)]
    assert not run.run([Launch(), Retire(), Finish(0)])
    for length, cached in ((40, 24), (25, 24), (24, 0)):
        assert run.perform(admit(length)).cached_tokens == cached
        assert not run.run([Launch(), Retire(), Finish(0)])
    assert run.perform(admit(40)).cached_tokens == 24
    assert not run.audit()


def test_two_groups_are_enough_for_a_small_pool() -> None:
    run = harness(blocks=9, name=UNEQUAL)
    assert [len(event.blocks) for event in events_of(run, admit(17), BlocksAllocated)] == [5, 3]
    assert not run.run([Launch(), Retire(), Finish(0), Evict(1)])
    # One of the two blocks of the larger size is gone: half of what the smaller ones have is hit.
    assert run.perform(admit(17)).cached_tokens == 8
    assert not run.audit()


def test_the_key_of_a_prompts_end_inside_a_block_is_left_out_of_the_view() -> None:
    run = harness(blocks=9, name=UNEQUAL)
    assert not run.run([admit(8)])
    pool = run.subject.manager.block_pool
    assert len(pool.cached_block_hashes_by_block) == 1
    assert (len(pool.cached_block_hash_to_block), len(run.subject.view().index(0))) == (4, 3)


# -- the unmodified release, and mutants of it ---------------------------------------------------


@pytest.mark.parametrize("name", [NAME, HYBRID, UNEQUAL])
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    assert first_failure(name, SEED, 120) is None


def of_the_first_group_only(original: Original) -> Original:
    """What a coordinator does for all of its groups is done for one."""

    def call(coordinator: Any, *more: Any, **named: Any) -> Any:
        managers = coordinator.single_type_managers
        coordinator.single_type_managers = managers[:1]
        try:
            return original(coordinator, *more, **named)
        finally:
            coordinator.single_type_managers = managers

    return call


def frees_one_group(original: Original) -> Original:
    return of_the_first_group_only(original)


def publishes_one_group(original: Original) -> Original:
    return of_the_first_group_only(original)


def leaves_the_group_out_of_the_key(original: Original) -> Original:
    return lambda block_hash, group: original(block_hash, 0)


def swaps_the_hits_of_two_groups(original: Original) -> Original:
    def find(coordinator: Any, *more: Any) -> Any:
        blocks, *rest = original(coordinator, *more)
        return (tuple(reversed(blocks)), *rest)

    return find


def gives_back_a_block_too_early(original: Original) -> Original:
    def skipped(manager: Any, computed: int) -> int:
        return min(computed, original(manager, computed) + manager.block_size)

    return skipped


def keeps_references_behind_the_window(original: Original) -> Original:
    def remove(manager: Any, name: str, first: int, end: int) -> None:
        blocks = manager.req_to_blocks[name]
        for row in range(first, end):
            blocks[row] = manager._null_block

    return remove


def hits_without_looking_in_the_window(original: Original) -> Original:
    def find(
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        **more: Any,
    ) -> Any:
        rows = max_length // kv_cache_spec.block_size
        hits = tuple([[block_pool.null_block] * rows for _ in kv_cache_group_ids])
        return hits, rows * kv_cache_spec.block_size

    return find


def finds_nothing_where_there_is_a_window(original: Original) -> Original:
    def find(block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], **more: Any) -> Any:
        return tuple([[] for _ in kv_cache_group_ids]), 0

    return find


def keeps_what_is_behind_the_window(original: Original) -> Original:
    return lambda manager, name, first, end: None


def lets_hits_end_where_the_smallest_block_does(original: Original) -> Any:
    return property(lambda coordinator: min(coordinator.group_block_sizes))


def replaces_the_key_of_a_block_by_that_of_its_part(original: Original) -> Original:
    return lambda pool, **more: original(pool, **more, replace_existing_hashes=True)


def knows_a_block_by_its_first_part(original: Original) -> Original:
    return lambda hashes, row: hashes.block_hashes[row * hashes.scale_factor]


def knows_a_block_by_the_part_after_it(original: Original) -> Original:
    def key(hashes: Any, row: int) -> Any:
        last = len(hashes.block_hashes) - 1
        return hashes.block_hashes[min(last, (row + 1) * hashes.scale_factor)]

    return key


def counts_blocks_of_the_common_multiple(original: Original) -> Original:
    def count(manager: Any, *more: Any, **named: Any) -> Any:
        size, manager.block_size = manager.block_size, manager.scheduler_block_size
        try:
            return original(manager, *more, **named)
        finally:
            manager.block_size = size

    return count


def keeps_what_one_group_alone_can_hit(original: Original) -> Original:
    def find(coordinator: Any, hashes: Any, longest: int) -> Any:
        blocks, *rest = original(coordinator, hashes, longest)
        table = list(blocks[0])
        for key in hashes[len(table) : longest // coordinator.group_block_sizes[0]]:
            found = coordinator.block_pool.get_cached_block(key, [0])
            if not found:
                break
            table += found
        return ((table, *blocks[1:]), *rest)

    return find


def drops_further_keys_but_not_their_entries(original: Original) -> Original:
    def remove(pool: Any, block: Any) -> Any:
        pool.cached_block_hashes_by_block.pop(block.block_id, None)
        return original(pool, block)

    return remove


def leaves_the_adapter_out_of_the_key(original: Original) -> Original:
    return lambda request: []


COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
POOL = "vllm.v1.core.block_pool.BlockPool"
ALIGNED = f"{COORDINATOR}.HybridKVCacheCoordinator._cache_hit_alignment_tokens"
HASHES = "vllm.v1.core.kv_cache_utils.BlockHashListWithBlockSize._get_value_at"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"
WINDOWS = "vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager"
MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (frees_one_group, f"{COORDINATOR}.KVCacheCoordinator.free", {"CONS", "REF", "LIFE"}),
    (publishes_one_group, f"{COORDINATOR}.KVCacheCoordinator.cache_blocks", {"VALID"}),
    (
        leaves_the_group_out_of_the_key,
        "vllm.v1.core.block_pool.make_block_hash_with_group_id",
        {"KEY", "VALID", "CAP"},
    ),
    (
        swaps_the_hits_of_two_groups,
        f"{COORDINATOR}.HybridKVCacheCoordinator.find_longest_cache_hit",
        {"KEY"},
    ),
)


HYBRID_MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (gives_back_a_block_too_early, f"{WINDOWS}.get_num_skipped_tokens", {"PROV"}),
    (keeps_references_behind_the_window, f"{WINDOWS}._remove_blocks_in_range", {"CONS", "REF"}),
    (hits_without_looking_in_the_window, f"{WINDOWS}.find_longest_cache_hit", {"PROV"}),
    (finds_nothing_where_there_is_a_window, f"{WINDOWS}.find_longest_cache_hit", {"CAP"}),
    (keeps_what_is_behind_the_window, f"{WINDOWS}._remove_blocks_in_range", {"CAP"}),
)


UNEQUAL_MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (lets_hits_end_where_the_smallest_block_does, ALIGNED, {"CAP"}),
    (
        replaces_the_key_of_a_block_by_that_of_its_part,
        f"{POOL}.cache_partial_block",
        {"KEY", "CAP"},
    ),
    (knows_a_block_by_its_first_part, HASHES, {"KEY"}),
    (knows_a_block_by_the_part_after_it, HASHES, {"KEY", "CAP"}),
    (
        counts_blocks_of_the_common_multiple,
        f"{MANAGERS}.get_num_blocks_to_allocate",
        {"CRASH", "CAP"},
    ),
    (
        keeps_what_one_group_alone_can_hit,
        f"{COORDINATOR}.HybridKVCacheCoordinator.find_longest_cache_hit",
        {"EXCL", "CAP"},
    ),
    (
        drops_further_keys_but_not_their_entries,
        f"{POOL}._remove_cached_block_hashes",
        {"VALID"},
    ),
    (
        leaves_the_adapter_out_of_the_key,
        "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys",
        {"KEY", "CAP"},
    ),
)
ALL_MUTANTS = [
    *((NAME, *mutant) for mutant in MUTANTS),
    *((HYBRID, *mutant) for mutant in HYBRID_MUTANTS),
    *((UNEQUAL, *mutant) for mutant in UNEQUAL_MUTANTS),
]


@pytest.mark.parametrize(
    ("name", "mutate", "target", "properties"),
    ALL_MUTANTS,
    ids=[mutate.__name__ for _, mutate, _, _ in ALL_MUTANTS],
)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    found_and_shrunk(name, SEED, 200, properties)
