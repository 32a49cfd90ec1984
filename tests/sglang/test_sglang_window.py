"""The adapter of SGLang's UnifiedRadixCache with a window: what it tells, and what the checks see.

Needs SGLang 0.5.23 in an environment of its own: `bash .ci/sglang-env FOLDER`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, first_failure, needs

from kvproof.invariants.events import BlocksEvicted, BlocksOutlived, BlocksReused, Event
from kvproof.invariants.operations import (
    Admit,
    Evict,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.sglang_window import SglangWindowSubject

needs("sglang:unified:window")

pytestmark = pytest.mark.sglang

NAME = "sglang:unified:window"


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_failure(NAME, "window", 40) is None


# -- behaviour, with pages of one token and a window of three ----------------------------------


def build(blocks: int = 12) -> SglangWindowSubject:
    return SglangWindowSubject(Configuration(blocks=blocks, block_size=1))


def do(subject: SglangWindowSubject, *operations: Operation) -> list[Event]:
    """Each must be done; all that was told."""
    for operation in operations:
        assert subject.apply(operation).status == "done"
    return list(subject.drain_events())


def admit(length: int) -> Admit:
    return Admit((Segment(1, length),))


STEP = (Launch(), Retire())


def test_it_has_a_table_for_each_kind_of_layer() -> None:
    subject = build()
    assert is_kvproofs_own(NAME)
    assert subject_factory(NAME, imports=False) is SglangWindowSubject
    assert subject.semantics.windows == (0, 3)
    do(subject, admit(5))
    view = subject.view()
    assert view.standing(0) == ("running", 5, 0, (5, 5))
    assert [len(view.table(0, group)) for group in (0, 1)] == [5, 5]
    assert [view.free_count(group) for group in (0, 1)] == [7, 7]


def test_the_tree_keeps_no_more_of_a_prompt_than_its_window() -> None:
    subject = build()
    (outlived,) = [
        event for event in do(subject, admit(6), *STEP) if isinstance(event, BlocksOutlived)
    ]
    assert (outlived.group, len(outlived.blocks)) == (1, 4)
    view = subject.view()
    assert [page > 0 for page in view.table(0, 1)] == [False] * 4 + [True] * 2
    assert 0 not in view.table(0, 0)
    assert [view.free_count(group) for group in (0, 1)] == [6, 10]


def test_a_window_slides_as_its_request_decodes() -> None:
    subject = build()
    do(subject, admit(2), *STEP)
    told = [do(subject, Grow(0, 1), *STEP) for _ in range(6)]
    outlived = [event for events in told for event in events if isinstance(event, BlocksOutlived)]
    assert [len(event.blocks) for event in outlived] == [1, 1, 1]
    # Its prompt is locked to the end; what it decoded is given back.
    has = [page > 0 for page in subject.view().table(0, 1)]
    assert has == [True] * 2 + [False] * 3 + [True] * 3


def test_a_window_does_not_slide_over_what_is_not_under_way() -> None:
    subject = build()
    do(subject, admit(2), *STEP)
    do(subject, *(Grow(0, 1) for _ in range(6)))
    assert 0 not in subject.view().table(0, 1)


def test_a_hit_needs_the_window_and_no_more_of_it() -> None:
    subject = build()
    do(subject, admit(6), *STEP, Finish(0))
    reused = [event for event in do(subject, admit(9)) if isinstance(event, BlocksReused)]
    assert [(event.group, event.row, len(event.blocks)) for event in reused] == [
        (0, 0, 6),
        (1, 4, 2),
    ]


def test_what_lost_its_window_is_computed_again_and_taken_anew() -> None:
    subject = build(blocks=20)
    do(subject, admit(8), *STEP, Finish(0), admit(10), *STEP, Preempt(0), Evict(1))
    held = subject.view().index(0)
    assert subject.apply(admit(8)).cached_tokens == 0
    assert len(held) > 1
    told = do(subject, *STEP)
    replaced = [event for event in told if isinstance(event, BlocksEvicted)]
    assert {(event.group, event.cause) for event in replaced} == {(0, "pressure")}
    assert all(key in subject.view().index(0) for event in replaced for key in event.keys)


# -- mutants ------------------------------------------------------------------------------------


def locks_a_window_that_is_too_short(original: Original) -> Original:
    def acquire(part: Any, *arguments: Any, **how: Any) -> Any:
        size, part.sliding_window_size = part.sliding_window_size, 1
        try:
            return original(part, *arguments, **how)
        finally:
            part.sliding_window_size = size

    return acquire


def splits_a_locked_node_into_an_unlocked_head(original: Original) -> Original:
    def redistribute(part: Any, new_parent: Any, child: Any) -> None:
        original(part, new_parent, child)
        new_parent.component(part.component_type).lock_ref = 0

    return redistribute


def hits_what_lost_its_window(original: Original) -> Original:
    return lambda part, match_device_only=False: lambda node: True


def hits_only_where_all_of_the_window_is_in_one_node(original: Original) -> Original:
    def create(part: Any, match_device_only: bool = False) -> Any:
        return lambda node: (
            node.component(part.component_type).value is not None
            and len(node.key) >= part.sliding_window_size
        )

    return create


def slides_a_page_too_far(original: Original) -> Original:
    def free(request: Any, pre_len: int, **how: Any) -> None:
        original(request, pre_len + how["page_size"], **how)

    return free


def slides_and_frees_nothing(original: Original) -> Original:
    return lambda allocator, slots, *, start_pos: None


def counts_nothing_evictable_less(original: Original) -> Original:
    def evict_component(part: Any, node: Any, *lists: Any, **how: Any) -> Any:
        freed = original(part, node, *lists, **how)
        part.tree_core.component_evictable_size_[part.component_type] += freed[0]
        return freed

    return evict_component


def forgets_what_stands_beside_what_it_takes(original: Original) -> Original:
    """The tree takes the slots of a request, and nothing of its window."""
    return lambda part, *, node, cache_actions: None


def frees_both_where_it_takes_the_window(original: Original) -> Original:
    def apply(part: Any, action: Any) -> None:
        if type(action).__name__ == "RecoverSWAWithLockedFull":
            allocator = part.cache.token_to_kv_pool_allocator
            allocator.free_swa_segment(action.incoming_full, start_pos=0)
            allocator.free_full_segment(action.incoming_full, start_pos=0)
        else:
            original(part, action)

    return apply


def counts_nothing_as_protected(original: Original) -> Original:
    def acquire(part: Any, *arguments: Any, **how: Any) -> Any:
        counted = part.tree_core.component_protected_size_
        before = counted[part.component_type]
        done = original(part, *arguments, **how)
        counted[part.component_type] = before
        return done

    return acquire


def takes_a_window_and_frees_no_duplicate(original: Original) -> Original:
    def recover(part: Any, *, cache_actions: Any, **how: Any) -> None:
        length = len(cache_actions)
        original(part, cache_actions=cache_actions, **how)
        cache_actions[length:] = [
            action
            for action in cache_actions[length:]
            if type(action).__name__ != "FreeDeviceKVFullOnly"
        ]

    return recover


def publishes_what_has_slid_away(original: Original) -> Original:
    return lambda part, **how: original(part, **{**how, "window_start": 0})


def evicts_everything_for_room(original: Original) -> Original:
    def evict_for_alloc(tree: Any, params: Any) -> Any:
        lacks = {"num_tokens": params.num_tokens, "swa_num_tokens": params.swa_num_tokens}
        return original(tree, replace(params, **{name: n and 1 << 40 for name, n in lacks.items()}))

    return evict_for_alloc


def evicts_a_locked_window(original: Original) -> Original:
    """As if a list of candidates held those that are locked, too."""

    def first(candidates: Any) -> Any:
        node = candidates.tail.lru_prev[candidates._pt]
        return None if node is candidates.head else node

    return first


TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
SWA = "sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent"
SLOTS = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
LIST = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedLRUList"
COMMON = "sglang.srt.mem_cache.common"

MUTANTS = (
    Mutant(locks_a_window_that_is_too_short, f"{SWA}.acquire_component_lock", {"PROV", "CAP"}),
    Mutant(
        splits_a_locked_node_into_an_unlocked_head,
        f"{SWA}.redistribute_on_node_split",
        {"REF", "CONS", "CRASH"},
    ),
    Mutant(hits_what_lost_its_window, f"{SWA}.create_match_validator", {"CAP", "PROV"}),
    Mutant(
        hits_only_where_all_of_the_window_is_in_one_node, f"{SWA}.create_match_validator", {"CAP"}
    ),
    Mutant(slides_a_page_too_far, f"{COMMON}.free_swa_out_of_window_slots", {"PROV"}),
    Mutant(slides_and_frees_nothing, f"{SLOTS}.free_swa_segment", {"CONS", "REF", "CRASH"}),
    Mutant(counts_nothing_evictable_less, f"{SWA}.evict_component", {"CONS"}),
    Mutant(forgets_what_stands_beside_what_it_takes, f"{SWA}._publish_window", {"CONS", "PROV"}),
    Mutant(frees_both_where_it_takes_the_window, f"{SWA}.apply_component_action", {"CONS", "PROV"}),
    Mutant(counts_nothing_as_protected, f"{SWA}.acquire_component_lock", {"CRASH"}),
    Mutant(
        takes_a_window_and_frees_no_duplicate, f"{SWA}._recover_from_incoming", {"CONS", "CRASH"}
    ),
    Mutant(publishes_what_has_slid_away, f"{SWA}._clip_to_window", {"CONS", "KEY"}),
    Mutant(evicts_everything_for_room, f"{TREE}.evict_for_alloc", {"ORDER"}),
    Mutant(evicts_a_locked_window, f"{LIST}.get_lru_no_lock", {"PIN", "CONS", "EXCL", "CRASH"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_sglang_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, "window")
