"""A window beside full attention in transformers' continuous batching: told, checked, mutants.

Needs transformers 5.24 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, as_drawn, first_failure, found_and_shrunk, needs, one_output_each

from kvproof.fuzz.swarm import Draw
from kvproof.invariants.events import BlockCopied, Event
from kvproof.invariants.operations import AnyOperation, Arrive, Run, Schedule, Segment
from kvproof.invariants.scheduling.vocabulary import Limits, Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.transformers_loading import fitted
from kvproof.stateful_tests.subjects.transformers_model import WINDOW
from kvproof.stateful_tests.subjects.transformers_scheduler import TransformersSubject

needs("transformers")

pytestmark = pytest.mark.transformers

NAME = "transformers:hybrid"
SEED = "hybrid"
KNOWN = ("cannot reshape tensor of 0 elements", "nothing was run in 8 iterations")
"""How the known defects show that do not need a prefix cache."""
BATCHING = "transformers.generation.continuous_batching"
RING = f"{BATCHING}.cache_allocators.sliding_attention.SlidingAttentionCacheAllocator"
IO = f"{BATCHING}.input_outputs"


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


def harness(*, blocks: int = 20, size: int = 4, budget: int = 16) -> SchedulingHarness:
    limits = Limits(token_budget=budget)
    configuration = Configuration(blocks=blocks, block_size=size, scheduling=limits)
    built = harness_for(TransformersSubject(configuration, kind="hybrid"), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def events_of(run: SchedulingHarness, operation: AnyOperation, kind: type[Event]) -> list[Any]:
    run.perform(operation)
    assert not run.violations
    return [event for event in run.last_events if isinstance(event, kind)]


# -- the adapter ---------------------------------------------------------------------------------


def test_the_ring_of_a_request_is_withheld_until_it_ends() -> None:
    run = harness()
    assert not run.run([arrive(3, output=9), Run(1)])
    cache = run.subject.cache
    assert (cache.withheld, cache.view().free_count(0)) == (1, 18)
    assert not run.run([Run(7)])
    assert (cache.withheld, cache.view().free_count(0)) == (2, 20 - 2 - 3)
    assert not run.run([Run(9)])
    assert (cache.withheld, cache.view().free_count(0)) == (0, 20)


@pytest.mark.parametrize("budget", [1, 4, WINDOW - 1, WINDOW, WINDOW + 3, 16])
@pytest.mark.parametrize("size", [4, 5, 6, 8])
def test_prompts_longer_than_the_window_come_in_any_chunks(budget: int, size: int) -> None:
    run = harness(size=size, budget=budget)
    assert not run.run([arrive(17, output=9), arrive(5, 2, output=12), Run(64)])
    assert run.subject.state_view.live() == []


def test_no_prefix_is_shared_with_another_request() -> None:
    run = harness()
    assert not run.run([arrive(9, output=2), Run(9), arrive(9)])
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert [part.tokens for part in scheduled.parts] == [9]


def test_samples_share_what_is_full_and_get_rings_of_their_own() -> None:
    run = harness()
    assert not run.run([arrive(10, output=3, samples=2), Schedule()])
    (copied,) = events_of(run, Run(1), BlockCopied)
    assert (copied.row, copied.tokens) == (2, 1)
    assert run.subject.cache.withheld == 4
    assert not run.run([Run(9)])


def test_under_pressure_requests_are_reset_and_all_end() -> None:
    run = harness(blocks=10)
    assert not run.run([arrive(8, 1, output=9), arrive(8, 2, output=9), Run(64)])
    assert run.goals["preempted-for-recompute"]
    assert run.subject.state_view.live() == []


def test_its_pool_has_blocks_for_both_layers() -> None:
    assert fitted(Configuration(blocks=7, block_size=5), "hybrid").blocks == 8
    found = fitted(Configuration(blocks=8), "hybrid")
    assert (found.prefix_caching, found.scheduling.max_model_tokens) == (False, 16)


def test_the_subject_is_known_by_the_name_that_it_gives() -> None:
    assert subject_factory(NAME, imports=False)(Configuration()).name == NAME
    assert is_kvproofs_own(NAME)


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


def test_without_samples_and_cancellations_the_release_has_no_findings() -> None:
    assert first_failure(NAME, SEED, 24, drawn=one_output_each) is None


def test_with_them_it_has_only_the_known_ones() -> None:
    assert first_failure(NAME, SEED, 24, known=KNOWN) is None


def reads_what_has_left_the_window(original: Original) -> Original:
    """The oldest slot in place of the one after it."""

    def read(ring: Any, name: str, past: int, tokens: int) -> list[int]:
        slots: list[int] = original(ring, name, past, tokens)
        if past >= ring.sliding_window:
            slots[0] = ring._token_indices_to_physical_indices(name, past, 1)[0]
        return slots

    return read


def starts_long_chunks_where_short_ones_do(original: Original) -> Original:
    """Of a chunk longer than the window, the part that is kept is put where its start would be."""

    def write(ring: Any, name: str, past: int, tokens: int) -> list[int]:
        slots: list[int] = original(ring, name, past, tokens)
        kept = min(tokens, ring.sliding_window)
        own = ring._token_indices_to_physical_indices(name, past, kept)
        return slots[: tokens - kept] + own

    return write


def turns_one_token_early(original: Original) -> Original:
    def indices(ring: Any, name: str, start: int, tokens: int) -> list[int]:
        window, ring.sliding_window = ring.sliding_window, ring.sliding_window - 1
        try:
            return list(original(ring, name, start, tokens))
        finally:
            ring.sliding_window = window

    return indices


def gives_the_ring_too_few_blocks(original: Original) -> Original:
    return lambda ring, allocated, past, tokens: min(1 - allocated, original(ring, 0, past, tokens))


def looks_at_everything(original: Original) -> Original:
    def build(attention_mask: Any, **lengths: Any) -> None:
        original(attention_mask=attention_mask, **lengths | {"sliding_window": 1})

    return build


def loses_a_block_of_the_ring(original: Original) -> Original:
    def free_blocks(allocator: Any, name: str, *more: Any) -> None:
        if allocator.layer_type == "sliding_attention":
            allocator.block_table.get(name, [None]).pop()
        original(allocator, name, *more)

    return free_blocks


def hands_out_the_ring_to_others(original: Original) -> Original:
    def allocate(allocator: Any, name: str, past: int, tokens: int) -> None:
        original(allocator, name, past, tokens)
        if allocator.layer_type == "sliding_attention" and not past:
            allocator.pool.free_blocks(allocator.index, allocator.block_table[name][:1])

    return allocate


def forks_no_ring(original: Original) -> Original:
    def copy(allocator: Any, sources: list[int], targets: list[int]) -> None:
        if allocator.layer_type != "sliding_attention":
            original(allocator, sources, targets)

    return copy


ALLOCATOR = f"{BATCHING}.cache_allocators.cache_allocator.CacheAllocator"
FULL = f"{BATCHING}.cache_allocators.full_attention.FullAttentionCacheAllocator"
Mutant = tuple[Callable[[Original], Original], str, set[str], Callable[[Draw], Draw]]
MUTANTS: tuple[Mutant, ...] = (
    (reads_what_has_left_the_window, f"{RING}.get_read_indices", {"CRASH"}, one_output_each),
    (
        starts_long_chunks_where_short_ones_do,
        f"{RING}.get_write_indices",
        {"CRASH"},
        one_output_each,
    ),
    (
        turns_one_token_early,
        f"{RING}._token_indices_to_physical_indices",
        {"CRASH"},
        one_output_each,
    ),
    (gives_the_ring_too_few_blocks, f"{RING}._compute_blocks_needed", {"CRASH"}, one_output_each),
    (looks_at_everything, f"{IO}.build_attention_mask", {"CRASH"}, one_output_each),
    (loses_a_block_of_the_ring, f"{ALLOCATOR}.free_blocks", {"CONS"}, one_output_each),
    (hands_out_the_ring_to_others, f"{FULL}.allocate_cache_to_request", {"CONS"}, one_output_each),
    (forks_no_ring, f"{ALLOCATOR}.copy_blocks", {"CRASH"}, as_drawn),
)


@pytest.mark.parametrize(
    ("mutate", "target", "properties", "change"),
    MUTANTS,
    ids=[mutant[0].__name__ for mutant in MUTANTS],
)
def test_a_mutant_of_the_ring_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
    change: Callable[[Draw], Draw],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    bounds: Any = {"operations": 6, "replays": 250}
    found_and_shrunk(NAME, SEED, 200, properties, drawn=change, known=KNOWN, **bounds)
