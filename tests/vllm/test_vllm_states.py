"""vLLM's manager with a group of state-space layers beside full attention.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from typing import Any

import pytest
from foreign import (
    Mutant,
    Original,
    assert_found_and_shrunk,
    each_of,
    first_failure,
    moved_functions,
    needs,
)

from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksOutlived,
    BlocksPublished,
    BlocksReused,
    KeyMoved,
    StepLaunched,
)
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Finish,
    Grow,
    Launch,
    Preempt,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import HIT_PENDING, NO_FREE_BLOCKS, NOT_LAUNCHED
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import subject_factory

NAME = "vllm:manager:states"

needs(NAME)

pytestmark = pytest.mark.vllm

SEED = "vllm-states"
TWICE, ALIKE = 18, 19
"""Blocks of pools where a state's block has two of the configuration's, and one."""


def harness(blocks: int = TWICE, run_ahead: int = 4) -> Harness:
    configuration = Configuration(blocks=blocks, block_size=4, run_ahead=run_ahead)
    return Harness(subject_factory(NAME)(configuration), audit_interval=1)


def admit(length: int, source: int = 1) -> Admit:
    return Admit((Segment(source, length),))


def events_of(run: Harness, operation: AnyOperation, *kinds: type[Any]) -> list[Any]:
    run.perform(operation)
    assert not run.violations
    return [event for event in run.last_events if isinstance(event, kinds)]


def states_of(run: Harness, request: int = 0) -> list[bool]:
    """Which rows of its table have a state."""
    return [block > 0 for block in run.subject.view().table(request, 1)]


def drain(run: Harness) -> None:
    assert not run.run([Launch(), *[Retire()] * 4, Finish(0)])
    assert not run.audit()


def test_a_prompt_is_computed_up_to_each_place_where_a_state_is_kept() -> None:
    run = harness()
    steps = [event.items[0] for event in events_of(run, admit(31), StepLaunched)]
    # Two blocks at most, the last block's end, the last hash; and the last one, as it copies.
    assert [(item.start, item.end) for item in steps] == [(0, 16), (16, 24), (24, 28), (28, 31)]
    assert states_of(run) == [False, True, True, True]
    assert len(run.subject.view().table(0, 0)) == 8
    drain(run)


def test_with_states_as_large_as_blocks_nothing_is_cut_inside() -> None:
    run = harness(ALIKE)
    steps = [event.items[0] for event in events_of(run, admit(15), StepLaunched)]
    assert [(item.start, item.end) for item in steps] == [(0, 8), (8, 12)]
    assert states_of(run) == [False, True, True, True]
    drain(run)
    assert run.perform(admit(15)).cached_tokens == 12
    assert not [event for event in run.last_events if isinstance(event, BlockCopied)]


def test_only_the_state_that_the_next_step_reads_is_kept() -> None:
    run = harness()
    assert not run.run([admit(31), Launch(), *[Retire()] * 4])
    outlived = events_of(run, Grow(0, 1), BlocksOutlived)
    assert [(event.group, len(event.blocks)) for event in outlived] == [(1, 2)]
    assert states_of(run) == [False, False, False, True]
    assert not run.run([Launch(), Retire()])
    (allocated,) = [e for e in events_of(run, Grow(0, 1), BlocksAllocated) if e.group == 1]
    assert allocated.row == 4
    drain(run)


def test_who_computed_a_state_inside_a_block_leaves_a_copy_of_it() -> None:
    run = harness()
    told = events_of(run, admit(7), BlocksPublished, KeyMoved)
    assert [(type(event).__name__, event.group) for event in told] == [
        ("BlocksPublished", 0),
        ("BlocksPublished", 1),
        ("KeyMoved", 1),
    ]
    assert told[1].tokens == 4
    source, target = told[2].source, told[2].target
    assert list(run.subject.view().table(0, 1)) == [source]
    assert [target] in [list(blocks) for blocks in run.subject.view().index(1).values()]
    drain(run)


def test_who_hits_a_state_inside_a_block_goes_on_in_a_copy() -> None:
    run = harness()
    assert not run.run([admit(7)])
    drain(run)
    reused, copied = events_of(run, admit(8), BlocksReused, BlockCopied)[1:]
    assert (reused.group, reused.row) == (1, 0)
    assert copied.source == reused.blocks[0]
    assert list(run.subject.view().table(1, 1)) == [copied.target]
    assert run.subject.view().ref_counts(1)[copied.source] == 0
    drain(run)


def test_a_hit_needs_just_the_state_at_its_end() -> None:
    run = harness()
    assert not run.run([admit(31)])
    drain(run)
    assert run.perform(admit(31)).cached_tokens == 28
    drain(run)
    # Attention has more, but no step had ended after 20 tokens.
    prompt = Admit((Segment(1, 22), Segment(2, 4)))
    assert run.perform(prompt).cached_tokens == 16
    drain(run)


def test_where_a_hit_was_cut_short_a_state_is_kept_for_the_next_one() -> None:
    run = harness()
    assert not run.run([admit(40)])
    drain(run)
    forked = [Admit((Segment(1, 25), Segment(source, 12))) for source in (2, 3)]
    assert run.perform(forked[0]).cached_tokens == 16
    drain(run)
    assert run.perform(forked[1]).cached_tokens == 24
    drain(run)


@pytest.mark.parametrize(("blocks", "inside", "behind"), [(45, 16, 24), (48, 0, 16), (51, 16, 16)])
def test_all_states_are_kept_or_only_those_at_prompts_ends_or_one_in_four_blocks(
    blocks: int, inside: int, behind: int
) -> None:
    run = harness(blocks)
    assert not run.run([admit(39)])
    drain(run)
    assert run.perform(Admit((Segment(1, 31), Segment(2, 4)))).cached_tokens == inside
    drain(run)
    assert not run.run([admit(17, 3), Launch(), *[Retire()] * 4])
    assert not run.run([Grow(0, 9), Launch(), Retire(), Retire(), Preempt(0)])
    assert run.perform(Resume(0)).cached_tokens == behind
    drain(run)


def test_a_state_of_the_step_to_come_is_no_hit_yet() -> None:
    run = harness(ALIKE)
    assert not run.run([admit(8)])
    assert run.perform(admit(9)).reason == HIT_PENDING
    assert not run.run([Launch()])
    assert run.perform(admit(9)).cached_tokens == 8
    assert not run.run([Launch(), *[Retire()] * 4])


def test_what_waits_for_a_step_neither_grows_nor_leaves() -> None:
    run = harness()
    assert not run.run([admit(3)])
    for operation in (Grow(0, 1), Finish(0), Preempt(0)):
        assert run.perform(operation).reason == NOT_LAUNCHED
    assert not run.run([Launch(), Preempt(0), Retire(), Resume(0), Launch(), Finish(0), Retire()])
    assert run.subject.view().free_count(0) == TWICE
    assert not run.audit()


def test_room_for_later_steps_is_asked_for_at_the_first_one() -> None:
    run = harness(blocks=9)
    assert not run.run([admit(12, 2)])
    assert run.subject.view().free_count(0) == 4
    assert run.perform(admit(9)).reason == NO_FREE_BLOCKS
    assert run.perform(admit(4)).status == "done"
    assert not run.run([Launch(), *[Retire()] * 4])


# -- the unmodified release, and mutants of it ---------------------------------------------------


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_failure(NAME, SEED, 120) is None


def gives_back_the_state_that_is_read(original: Original) -> Original:
    return lambda manager, computed: original(manager, computed) + manager.block_size


def keeps_states_that_nobody_reads(original: Original) -> Original:
    return lambda manager, name, first, end: None


def forgets_states_without_giving_them_back(original: Original) -> Original:
    def remove(manager: Any, name: str, first: int, end: int) -> None:
        blocks = manager.req_to_blocks.get(name, [])
        for row in range(first, min(end, len(blocks))):
            blocks[row] = manager._null_block

    return remove


def hits_without_looking_for_a_state(original: Original) -> Any:
    def find(
        hashes: Any, longest: int, groups: list[int], pool: Any, spec: Any, **more: Any
    ) -> Any:
        rows = longest // spec.block_size
        return tuple([[pool.null_block] * rows for _ in groups]), rows * spec.block_size

    return classmethod(lambda manager, **more: find(*list(more.values())[:5]))


def hits_the_first_state(original: Any) -> Any:
    def find(manager: Any, max_length: int, alignment_tokens: int, **more: Any) -> Any:
        for length in range(alignment_tokens, max_length + 1, alignment_tokens):
            found = original(max_length=length, alignment_tokens=alignment_tokens, **more)
            if found[1]:
                return found
        return original(max_length=0, alignment_tokens=alignment_tokens, **more)

    return classmethod(find)


def writes_on_in_the_state_that_it_hit(original: Original) -> Original:
    def redirect(manager: Any, name: str, row: int, source: Any, copy: Any) -> None:
        manager.block_pool.free_blocks([copy])

    return redirect


def copies_nothing_for_who_hit_a_state(original: Original) -> Original:
    def redirect(manager: Any, name: str, row: int, source: Any, copy: Any) -> None:
        original(manager, name, row, source, copy)
        manager._pending_cow_copies.pop()
        manager.block_pool.free_blocks([source, copy])

    return redirect


def copies_another_state(original: Original) -> Original:
    def redirect(manager: Any, name: str, row: int, source: Any, copy: Any) -> None:
        original(manager, name, row, source, copy)
        other = manager.block_pool.blocks[source.block_id - 1 or source.block_id + 1]
        manager._pending_cow_copies[-1] = (other, copy)
        other.ref_cnt, source.ref_cnt = other.ref_cnt + 1, source.ref_cnt - 1

    return redirect


def leaves_the_key_where_its_request_writes_on(original: Original) -> Original:
    return lambda pool, source, target: None


def goes_on_in_a_state_that_it_made_findable(original: Original) -> Original:
    def cache(manager: Any, request: Any, *more: Any, **named: Any) -> Any:
        key = original(manager, request, *more, **named)
        manager._partial_hit_reqs.pop(request.request_id, None)
        return key

    return cache


def knows_a_state_by_the_part_before_it(original: Original) -> Original:
    def key(pool: Any, request: Any, tokens: int) -> Any:
        return original(pool, request, max(pool.hash_block_size, tokens - pool.hash_block_size))

    return key


def lets_a_state_be_hit_in_the_step_that_computes_it(original: Original) -> Original:
    def cache(manager: Any, *more: Any, **named: Any) -> None:
        original(manager, *more, **named)
        manager.cached_blocks_this_step.clear()

    return cache


def never_lets_a_state_be_hit(original: Original) -> Original:
    return lambda manager: None


def asks_for_one_block_less(original: Original) -> Original:
    def count(manager: Any, *more: Any, **named: Any) -> int:
        return max(0, original(manager, *more, **named) - 1)

    return count


def asks_for_the_blocks_of_all_rows(original: Original) -> Original:
    def count(manager: Any, name: str, tokens: int, *more: Any, **named: Any) -> int:
        rows: int = 3 + -(-tokens // manager.block_size)
        return rows + original(manager, name, tokens, *more, **named)

    return count


def lets_steps_end_anywhere(original: Original) -> Original:
    return lambda scheduler, request, tokens, *more: tokens


def reports_what_attention_alone_has_findable(original: Original) -> Original:
    def estimate(manager: Any, request: Any) -> int:
        attention = manager.get_blocks(request.request_id).blocks[0]
        return max([block.block_hash_num_tokens or 0 for block in attention], default=0)

    return estimate


POOL = "vllm.v1.core.block_pool.BlockPool"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"
STATES = "vllm.v1.core.single_type_kv_cache_manager.MambaManager"
ESTIMATE = "vllm.v1.core.kv_cache_manager.KVCacheManager.estimate_cached_tokens"
SPLIT = "vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split"
MUTANTS = (
    Mutant(gives_back_the_state_that_is_read, f"{STATES}.get_num_skipped_tokens", {"PROV"}),
    Mutant(keeps_states_that_nobody_reads, f"{STATES}._remove_blocks_in_range", {"CAP"}),
    Mutant(
        forgets_states_without_giving_them_back,
        f"{STATES}._remove_blocks_in_range",
        {"CONS", "REF"},
    ),
    Mutant(hits_without_looking_for_a_state, f"{STATES}.find_longest_cache_hit", {"CAP", "PROV"}),
    Mutant(hits_the_first_state, f"{STATES}.find_longest_cache_hit", {"CAP"}),
    Mutant(writes_on_in_the_state_that_it_hit, f"{MANAGERS}._apply_cow", {"EXCL"}),
    Mutant(copies_nothing_for_who_hit_a_state, f"{MANAGERS}._apply_cow", {"PROV"}),
    Mutant(copies_another_state, f"{MANAGERS}._apply_cow", {"PROV"}),
    Mutant(leaves_the_key_where_its_request_writes_on, f"{POOL}.move_block_hashes", {"EXCL"}),
    Mutant(
        goes_on_in_a_state_that_it_made_findable, f"{STATES}._cache_partial_tail_block", {"EXCL"}
    ),
    Mutant(knows_a_state_by_the_part_before_it, f"{POOL}._get_partial_block_hash", {"KEY"}),
    Mutant(lets_a_state_be_hit_in_the_step_that_computes_it, f"{STATES}.cache_blocks", {"PROV"}),
    Mutant(never_lets_a_state_be_hit, f"{STATES}.new_step_starts", {"CAP"}),
    Mutant(asks_for_one_block_less, f"{STATES}.get_num_blocks_to_allocate", {"CRASH", "CAP"}),
    Mutant(asks_for_the_blocks_of_all_rows, f"{STATES}.get_num_blocks_to_allocate", {"CAP"}),
    Mutant(lets_steps_end_anywhere, SPLIT, {"VALID"}),
    Mutant(reports_what_attention_alone_has_findable, ESTIMATE, {"MET"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, SEED)


def test_the_functions_that_the_adapter_calls_are_where_they_were() -> None:
    manager = "vllm.v1.core.kv_cache_manager.KVCacheManager"
    expected = {
        SPLIT: ("num_new_tokens", "num_new_local_computed_tokens"),
        f"{manager}.get_computed_blocks": ("request",),
        f"{manager}.allocate_slots": (
            "num_new_computed_tokens",
            "new_computed_blocks",
            "reserved_blocks",
            "full_sequence_must_fit",
        ),
        f"{manager}.take_kv_cache_block_copies": (),
        f"{manager}.new_step_starts": (),
        f"{POOL}.free_blocks": (),
    }
    assert not list(moved_functions(expected))
