"""The adapter of transformers' continuous batching: what it tells, and what the checks see.

Needs transformers 5.24 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import metadata
from itertools import pairwise
from os import environ
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import (
    Original,
    as_drawn,
    failures,
    first_failure,
    found_and_shrunk,
    is_known,
    moved_functions,
    needs,
    one_output_each,
)

from kvproof.fuzz.campaigns.known import read_ledger
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.verdicts import judge
from kvproof.invariants.case import Case, dump_case, load_case
from kvproof.invariants.events import BlockCopied, BlockMerged, Event, StepLaunched
from kvproof.invariants.operations import (
    Abort,
    AnyOperation,
    Arrive,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL
from kvproof.invariants.scheduling.vocabulary import (
    BlocksHeld,
    Completed,
    Limits,
    RequestArrived,
    RequestCancelled,
    Scheduled,
)
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.transformers_loading import fitted, load_transformers
from kvproof.stateful_tests.subjects.transformers_scheduler import TransformersSubject
from kvproof.stateful_tests.totals import Totals

needs("transformers")

pytestmark = pytest.mark.transformers

PREFILL_FIRST = "transformers:prefill_first"
NAME = SEED = "transformers"
T1 = "cannot reshape tensor of 0 elements"
"""How the known defect of forks shows …"""
T2 = "nothing was run in 8 iterations"
"""… and that of cancellations under pressure."""
KNOWN = Path(__file__).parent / "known" / "known.json"


def harness(*, budget: int = 16, policy: str = "fifo", **sizes: Any) -> SchedulingHarness:
    configuration = Configuration(
        **({"blocks": 10, "block_size": 4} | sizes), scheduling=Limits(token_budget=budget)
    )
    built = harness_for(TransformersSubject(configuration, policy=policy), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


def events_of(harness: SchedulingHarness, operation: AnyOperation, kind: type[Event]) -> list[Any]:
    harness.perform(operation)
    assert not harness.violations
    return [event for event in harness.last_events if isinstance(event, kind)]


def done(harness: SchedulingHarness, *operations: AnyOperation) -> None:
    assert not harness.run(operations)


# -- known answers -------------------------------------------------------------------------------


def test_a_fork_with_one_token_left_is_a_step_of_no_token() -> None:
    run = harness()
    run.perform(arrive(1, samples=2))
    run.perform(Schedule())
    (violation,) = run.violations
    assert (violation.property, violation.op) == ("CRASH", 1)
    assert T1 in violation.message


def test_so_is_one_whose_other_tokens_are_all_cached() -> None:
    run = harness()
    done(run, arrive(5, output=2), Run(2), arrive(5, samples=2))
    run.perform(Schedule())
    assert T1 in run.violations[0].message


def test_beside_another_request_it_is_forked_all_the_same() -> None:
    run = harness()
    done(run, arrive(5, 2, output=9), Run(2), arrive(1, samples=2), Run(9))
    assert run.subject.state_view.live() == []


T2_OPERATIONS = (
    arrive(8, 1, output=8),
    arrive(8, 2, output=8),
    Run(2),
    Abort(1),
    Run(9),
)


def test_after_a_cancellation_under_pressure_nothing_is_admitted_any_more() -> None:
    run, moments = harness(blocks=4, budget=15), []
    for index, operation in enumerate(T2_OPERATIONS):
        outcome = run.perform(operation)
        moments.append(Moment(index, operation, outcome, run.last_events))
    (violation,) = run.violations
    assert (violation.property, violation.op) == ("LIVE", 4)
    assert T2 in violation.message
    assert "request 0, preempted, needs 3 blocks" in violation.message
    assert "preempts r0" in explain(violation, moments, 4)


def test_without_the_cancellation_all_end() -> None:
    run = harness(blocks=4, budget=15)
    done(run, *T2_OPERATIONS[:3], Run(30))
    assert run.subject.state_view.live() == []
    assert run.goals["preempted-for-recompute"] == run.goals["resumed"] == 1


def test_a_search_finds_the_first_and_shrinks_it() -> None:
    caught = search("transformers", "t1", seconds=300, totals=Totals())
    assert caught is not None
    assert T1 in caught.violation.message
    shrunk = shrink(caught.case, replays_max=250, seconds_max=600)
    assert shrunk is not None
    assert len(shrunk.case.operations) <= 5
    assert shrunk.violation.property == "CRASH"


def test_the_ledger_of_known_issues_knows_them_and_none_is_mended() -> None:
    ledger = read_ledger(KNOWN)
    assert sorted(entry.property for entry in ledger.issues) == ["CRASH"] * 2 + ["LIVE"] * 2
    for entry in ledger.issues:
        (violation,) = replay(load_case(ledger.folder / entry.case)).violations
        assert violation.property == entry.property


# -- the adapter ---------------------------------------------------------------------------------


def test_a_request_lives_its_whole_life() -> None:
    run = harness()
    done(run, arrive(9, output=3))
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert scheduled.admitted == (0,)
    assert [part.tokens for part in scheduled.parts] == [9]
    (completed,) = events_of(run, Retire(), Completed)
    assert (completed.sampled, completed.finished) == ((0,), ())
    assert run.perform(Run(9)).count == 2
    assert run.subject.state_view.live() == []
    assert not run.audit()


def test_a_prompt_comes_in_chunks_of_the_budget() -> None:
    run = harness(budget=6)
    done(run, arrive(9, output=2))
    parts = [events_of(run, Run(1), Scheduled)[0].parts[0].tokens for _ in range(3)]
    assert parts == [6, 3, 1]


def test_a_step_reads_through_the_indices_that_the_model_is_given() -> None:
    run = harness()
    done(run, arrive(7, output=4))
    (first,) = events_of(run, Run(1), StepLaunched)
    done(run, Run(1))
    (third,) = events_of(run, Run(1), StepLaunched)
    (table,) = third.items[0].tables
    assert list(table[:2]) == list(first.items[0].tables[0])
    assert len(table) == 3
    assert (third.items[0].start, third.items[0].end) == (8, 9)


def test_a_second_request_hits_the_prefix_of_the_first() -> None:
    run = harness()
    done(run, arrive(9, output=2), Run(1), arrive(9, salt=3))
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert [part.tokens for part in scheduled.parts] == [1, 1]
    assert run.subject.state_view.metrics()["prefix_cache_hits"] == 8


def test_equal_blocks_are_merged_when_both_are_computed() -> None:
    run = harness()
    done(run, arrive(6, output=3), arrive(6, output=3))
    (merged,) = events_of(run, Run(1), BlockMerged)
    assert (merged.request, merged.row) == (1, 0)
    done(run, Run(9))


def test_outputs_are_merged_too_where_the_same_was_sampled() -> None:
    run = harness(blocks=12, budget=18)
    done(run, *[arrive(6, output=4)] * 3)
    merged = [(e.request, e.row) for e in events_of(run, Run(1), BlockMerged)]
    assert merged == [(1, 0), (2, 0)]
    done(run, Run(1))
    merged = [(e.request, e.row) for e in events_of(run, Run(1), BlockMerged)]
    assert merged == [(2, 1)]


def test_two_samples_of_one_request_are_not_the_same() -> None:
    run = harness()
    done(run, arrive(7, output=3, samples=2), Run(1))
    first, second = run.subject.jobs.values()
    assert first.prompt == second.prompt
    done(run, Run(2))
    assert len(first.sampled) == len(second.sampled) == 2
    assert first.sampled != second.sampled
    done(run, Run(9))


def test_samples_are_forked_when_all_but_a_token_is_computed() -> None:
    run = harness()
    done(run, arrive(7, output=3, samples=3), Schedule())
    children = events_of(run, Retire(), RequestArrived)
    copies = [event for event in run.last_events if isinstance(event, BlockCopied)]
    assert [child.request for child in children] == [1, 2]
    assert [(copy.request, copy.row, copy.tokens) for copy in copies] == [(1, 1, 2), (2, 1, 2)]
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert scheduled.admitted == (1, 2)
    done(run, Retire(), Run(9))
    assert run.subject.state_view.live() == []


def test_samples_without_room_are_computed_from_scratch() -> None:
    run = harness(blocks=3)
    done(run, arrive(8, output=2, samples=3))
    arrived = events_of(run, Run(2), RequestArrived)
    held = [event.request for event in run.last_events if isinstance(event, BlocksHeld)]
    assert [event.request for event in arrived] == [1, 2]
    assert held == [0, 1]
    done(run, Run(20))
    assert run.subject.state_view.live() == []


def test_a_request_stops_early_where_its_client_allows_more() -> None:
    run = harness()
    done(run, arrive(3, output=2, max_tokens=9))
    assert run.perform(Run(9)).count == 2
    assert not run.audit()


def test_a_cancellation_takes_effect_with_the_next_batch() -> None:
    run = harness()
    done(run, arrive(9, output=9), Schedule(), Abort(0))
    assert run.subject.state_view.live() == [0]
    done(run, Retire(), arrive(9, 2), Abort(1))
    cancelled = events_of(run, Schedule(), RequestCancelled)
    assert sorted(event.request for event in cancelled) == [0, 1]
    assert run.perform(Abort(0)).status == "skipped"
    assert run.goals["aborted-running"] == run.goals["aborted-waiting"] == 1


IN_ONE_BATCH = (
    arrive(9, 1, output=9),
    arrive(9, 2, output=9),
    Run(2),
    Abort(0),
    Abort(1),
    Run(1),
    arrive(12, 3, output=4),
    Run(2),
)


def test_two_cancellations_of_one_batch_are_the_same_in_every_process(tmp_path: Path) -> None:
    """The engine keeps them in a set of strings, whose order is another in each."""
    case = tmp_path / "case.json"
    case.write_text(dump_case(Case("transformers", Configuration(blocks=12), [*IN_ONE_BATCH])))
    program = (
        "import sys; from pathlib import Path; from kvproof.fuzz.replay import replay;"
        "from kvproof.invariants.case import load_case;"
        "names = iter({'request-0', 'request-1'});"
        "print(next(names), replay(load_case(Path(sys.argv[1]))).digest)"
    )
    said = {}
    for seed in range(6):
        done = subprocess.run(
            [sys.executable, "-c", program, str(case)],
            env=environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
            text=True,
        )
        first, digest = done.stdout.split()
        said.setdefault(first, digest)
        if len(said) == 2:
            break
    assert len(said) == 2
    assert len(set(said.values())) == 1


def test_what_never_fits_is_refused() -> None:
    run = harness()
    assert run.perform(arrive(41)).reason == LARGER_THAN_POOL
    assert run.perform(arrive(40)).reason == LARGER_THAN_MODEL
    assert run.perform(arrive(39)).status == "done"
    assert not run.violations


def test_pages_of_an_odd_number_of_tokens_come_in_sectors_of_two() -> None:
    assert fitted(Configuration(blocks=7, block_size=5)).blocks == 8
    run = harness(blocks=7, block_size=5)
    assert run.subject.semantics.reserved == (0, 1, 2, 3)
    done(run, arrive(16, output=6), Run(9))


def test_configurations_are_made_to_fit() -> None:
    found = fitted(Configuration(blocks=10, block_size=2, run_ahead=3, host_blocks=4))
    assert (found.block_size, found.run_ahead, found.host_blocks) == (4, 1, 0)
    assert found.scheduling == Limits(token_budget=20, max_model_tokens=40)


def test_subjects_are_known_by_the_names_that_they_give() -> None:
    for name in ("transformers", PREFILL_FIRST):
        assert subject_factory(name, imports=False)(Configuration()).name == name
        assert is_kvproofs_own(name)


def test_an_unknown_version_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    load_transformers.cache_clear()
    module = "kvproof.stateful_tests.subjects.transformers_loading.version"
    monkeypatch.setattr(module, lambda name: "4.57.1")
    with pytest.raises(SubjectUnavailable, match=r"needs transformers 5\.24, but 4\.57\.1"):
        load_transformers()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, missing)
    with pytest.raises(SubjectUnavailable, match="is not installed"):
        load_transformers()


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


@pytest.mark.parametrize("name", ["transformers", PREFILL_FIRST])
def test_without_samples_and_cancellations_the_release_has_no_findings(name: str) -> None:
    assert first_failure(name, SEED, 40, drawn=one_output_each) is None


@pytest.mark.parametrize("name", ["transformers", PREFILL_FIRST])
def test_with_them_it_has_only_the_known_ones(name: str) -> None:
    seen = [violation for _, violation in failures(name, SEED, 40)]
    assert seen
    assert all(is_known(violation, (T1, T2)) for violation in seen)


@pytest.mark.parametrize("kind", ["", ":prefill_first", ":offload", ":hybrid"])
def test_its_checks_have_something_to_judge_but_for_those_that_it_names(kind: str) -> None:
    subject, totals = subject_factory(NAME + kind)(Configuration()), Totals()
    list(failures(NAME + kind, SEED, 24, drawn=one_output_each, totals=totals))
    done = (subject, totals.operations, totals.goals)
    reasons = judge(*done, checked=totals.checked, failed=False).reasons
    assert not [reason for reason in reasons if reason.startswith("property")]
    assert not any(totals.checked[id] for id in subject.unjudged)
    forgotten = totals.checked | {"PLAN": 0}
    (reason,) = set(judge(*done, checked=forgotten, failed=False).reasons) - set(reasons)
    assert reason == "property PLAN was never put to the test"


def loses_the_last_block(original: Original) -> Original:
    def free_blocks(allocator: Any, name: str, *more: Any) -> None:
        allocator.block_table.get(name, [None]).pop()
        original(allocator, name, *more)

    return free_blocks


def takes_no_reference(original: Original) -> Original:
    return lambda ledger, block: ledger.cached_blocks.pop(block, None)


def frees_what_is_shared(original: Original) -> Original:
    return lambda ledger, block, *more: original(ledger, block, *more) or True


def hits_the_whole_prompt(original: Original) -> Original:
    return lambda allocator, tokens: original(allocator, [*tokens, 0])


def leaves_the_parent_out_of_the_key(original: Original) -> Original:
    return lambda parent, tokens: original(None, tokens)


def marks_a_block_too_many(original: Original) -> Original:
    return lambda cache, state, tokens: dict.fromkeys(cache.cache_allocators, 1 + tokens // 4)


def merges_what_differs(original: Original) -> Original:
    def register(ledger: Any, block: int, block_hash: int) -> int | None:
        others = [b for b in ledger.block_to_hash if b != block]
        found: int | None = original(ledger, block, block_hash)
        return found if found is not None or not others else others[0]

    return register


def keeps_the_key_of_the_evicted(original: Original) -> Original:
    def evict(ledger: Any) -> list[int]:
        evicted = list(ledger.cached_blocks)
        ledger.cached_blocks.clear()
        return evicted

    return evict


def reads_the_first_block_twice(original: Original) -> Original:
    def read(allocator: Any, name: str, past: int, tokens: int) -> list[int]:
        slots: list[int] = original(allocator, name, past, tokens)
        size = allocator.tokens_per_page
        return slots[:size] + slots[: max(0, min(size, len(slots) - size))] + slots[2 * size :]

    return read


def writes_one_slot_further(original: Original) -> Original:
    return lambda *arguments: [slot + 1 for slot in original(*arguments)]


def stops_one_token_early(original: Original) -> Original:
    def update(state: Any, *token: Any) -> bool:
        state._new_tokens_limit = max(1, state.max_new_tokens - 1)
        return bool(original(state, *token))

    return update


def forgets_what_was_generated(original: Original) -> Original:
    def reset(state: Any) -> Any:
        new = original(state)
        new.initial_tokens = state.initial_tokens[:]
        new.remaining_prefill_tokens = state.initial_tokens[:]
        return new

    return reset


def never_resets(original: Original) -> Original:
    return lambda manager: manager.cache.evict_cached_blocks()


def exceeds_its_budget(original: Original) -> Original:
    return lambda scheduler, tokens, cache: original(scheduler, tokens + 1, cache)


def hands_out_twice(original: Original) -> Original:
    def pop(trees: Any, count: int) -> list[int]:
        popped: list[int] = original(trees, count)
        if count > 1:
            trees.add_leaves(popped[:1])
        return popped

    return pop


def loses_the_place_of_the_reset(original: Original) -> Original:
    def add(scheduler: Any, state: Any) -> None:
        original(scheduler, state)
        if state._true_initial_tokens:
            scheduler.waiting_requests_order.pop()

    return add


def keeps_the_blocks_of_the_cancelled(original: Original) -> Original:
    def clear(scheduler: Any) -> Any:
        free, scheduler.cache.free_blocks = scheduler.cache.free_blocks, lambda name: None
        try:
            return original(scheduler)
        finally:
            scheduler.cache.free_blocks = free

    return clear


def shares_the_block_that_is_written(original: Original) -> Original:
    return lambda allocator, name, past: len(allocator.block_table[name])


def plans_no_copy(original: Original) -> Original:
    def fork(*arguments: Any) -> tuple[list[int], list[int]]:
        original(*arguments)
        return [], []

    return fork


def copies_nothing(original: Original) -> Original:
    return lambda allocator, sources, targets: None


def forks_one_too_few(original: Original) -> Original:
    return lambda cache, state, names, copies: original(cache, state, names[1:], copies)


def shows_everything_to_all(original: Original) -> Original:
    def build(attention_mask: Any, **lengths: Any) -> None:
        original(attention_mask=attention_mask, **lengths)
        attention_mask.zero_()

    return build


def hides_the_oldest_key(original: Original) -> Original:
    def build(attention_mask: Any, **lengths: Any) -> None:
        original(attention_mask=attention_mask, **lengths)
        start, end = lengths["cumulative_seqlens_q"][:2]
        if lengths["cumulative_seqlens_k"][1] > 1:
            attention_mask[..., start:end, 0] = -1e9

    return build


def exchanges_the_logits(original: Original) -> Original:
    def prepare(places: Any, *arguments: Any, **named: Any) -> None:
        original(places, *arguments, **named)
        count = sum(found.has_new_token for found in places.requests_in_batch)
        places.logits_indices[:count] = places.logits_indices[:count].flip(0)

    return prepare


def exchanges_the_outputs_of_equals(original: Original) -> Original:
    def update(processor: Any) -> None:
        original(processor)
        queue, outputs = processor.output_router.output_queue, []
        while not queue.empty():
            outputs.append(queue.get())
        for a, b in pairwise(outputs):
            if [*map(len, (a.prompt_ids, a.generated_tokens))] == [
                *map(len, (b.prompt_ids, b.generated_tokens))
            ]:
                a.generated_tokens, b.generated_tokens = b.generated_tokens, a.generated_tokens
        for output in outputs:
            queue.put(output)

    return update


BATCHING = "transformers.generation.continuous_batching"
PROCESSOR = f"{BATCHING}.continuous_api.ContinuousBatchProcessor"
IO = f"{BATCHING}.input_outputs"
ALLOCATOR = f"{BATCHING}.cache_allocators.cache_allocator"
FULL = f"{BATCHING}.cache_allocators.full_attention.FullAttentionCacheAllocator"
CACHE = f"{BATCHING}.cache.PagedAttentionCache"
TREES = f"{BATCHING}.cache_allocators.cache_pool.RegularTrees"
SCHEDULER = f"{BATCHING}.scheduler.Scheduler"
STATE = f"{BATCHING}.requests.RequestState"
OFFLOADING = f"{BATCHING}.offloading_manager.OffloadingManager"

Mutant = tuple[Callable[[Original], Original], str, set[str]]
MUTANTS: tuple[Mutant, ...] = (
    (loses_the_last_block, f"{ALLOCATOR}.CacheAllocator.free_blocks", {"CONS"}),
    (takes_no_reference, f"{ALLOCATOR}.BlockLedger.acquire", {"REF"}),
    (frees_what_is_shared, f"{ALLOCATOR}.BlockLedger.release", {"CONS"}),
    (
        hits_the_whole_prompt,
        f"{ALLOCATOR}.CacheAllocator.match_prefix_blocks",
        {"CAP", "CRASH", "PLAN"},
    ),
    (leaves_the_parent_out_of_the_key, f"{ALLOCATOR}.compute_block_hash", {"KEY"}),
    (marks_a_block_too_many, f"{CACHE}.count_new_complete_blocks", {"VALID"}),
    (merges_what_differs, f"{ALLOCATOR}.BlockLedger.register_new_hash", {"PROV"}),
    (keeps_the_key_of_the_evicted, f"{ALLOCATOR}.BlockLedger.evict_cached_blocks", {"VALID"}),
    (reads_the_first_block_twice, f"{FULL}.get_read_indices", {"CRASH", "EXCL", "PROV"}),
    (writes_one_slot_further, f"{FULL}.get_write_indices", {"CRASH", "EXCL", "PROV"}),
    (stops_one_token_early, f"{STATE}.update_and_check_completion", {"PROGRESS"}),
    (forgets_what_was_generated, f"{STATE}.create_equivalent_initial_request", {"PROGRESS"}),
    (never_resets, f"{OFFLOADING}.offload_requests", {"CRASH"}),
    (exceeds_its_budget, f"{BATCHING}.scheduler.FIFOScheduler.schedule_batch", {"BUDGET", "CRASH"}),
    (hands_out_twice, f"{TREES}.pop_leaves", {"CONS", "EXCL"}),
    (loses_the_place_of_the_reset, f"{SCHEDULER}.add_waiting_request", {"PROGRESS"}),
)
"""Found in runs without samples and cancellations."""
OF_CHANCES: tuple[Mutant, ...] = (
    (keeps_the_blocks_of_the_cancelled, f"{SCHEDULER}.clear_cancelled_requests", {"HOLD"}),
    (
        shares_the_block_that_is_written,
        f"{ALLOCATOR}.CacheAllocator.count_shareable_blocks",
        {"EXCL"},
    ),
    (plans_no_copy, f"{ALLOCATOR}.CacheAllocator.fork_blocks", {"PROV"}),
    (copies_nothing, f"{ALLOCATOR}.CacheAllocator.copy_blocks", {"CRASH"}),
)
"""In those with them."""


@pytest.mark.parametrize(
    ("mutate", "target", "properties"),
    [*MUTANTS, *OF_CHANCES],
    ids=[mutant[0].__name__ for mutant in (*MUTANTS, *OF_CHANCES)],
)
def test_a_mutant_of_transformers_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    plain = mutate in [mutant[0] for mutant in MUTANTS]
    drawn, known = (one_output_each, ()) if plain else (as_drawn, (T1,))
    found_and_shrunk(NAME, SEED, 200, properties, replays=250, drawn=drawn, known=known)


TOKENS, LOGITS = "was given other tokens", "from other logits than the model computes"


@pytest.mark.parametrize(
    ("mutate", "target", "name", "words"),
    [
        (exchanges_the_outputs_of_equals, f"{PROCESSOR}.update_batch", "PROGRESS", TOKENS),
        (shows_everything_to_all, f"{IO}.build_attention_mask", "CRASH", LOGITS),
        (hides_the_oldest_key, f"{IO}.build_attention_mask", "CRASH", LOGITS),
        (
            exchanges_the_logits,
            f"{IO}.ContinuousBatchingIOs.prepare_batch_tensors",
            "CRASH",
            LOGITS,
        ),
    ],
)
def test_what_is_exchanged_between_requests_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    bounds: Any = {"operations": 4, "replays": 250}
    _, violation = found_and_shrunk(NAME, SEED, 40, {name}, drawn=one_output_each, **bounds)
    assert words in violation.message


# -- what the adapter knows of transformers ------------------------------------------------------

PARAMETERS: dict[str, Sequence[str]] = {
    f"{BATCHING}.continuous_api.ContinuousBatchingManager.__init__": (
        "model", "generation_config", "continuous_batching_config",
    ),
    f"{BATCHING}.continuous_api.ContinuousBatchingManager._create_batch_processor": (),
    f"{PROCESSOR}.prepare_next_batch": (),
    f"{PROCESSOR}._generation_step": ("model",),
    f"{PROCESSOR}.update_batch": (),
    f"{CACHE}.search_prefix_match": ("request_id", "prompt_ids"),
    f"{CACHE}.can_store_request_tokens": ("state", "request_len", "dry_run"),
    f"{CACHE}.mark_complete_blocks": ("state", "complete_blocks"),
    f"{CACHE}.free_blocks": ("request_id", "no_cache"),
    f"{CACHE}.evict_cached_blocks": (),
    f"{CACHE}.prepare_fork_request": ("src_state", "dst_req_ids", "copy_src_and_dst"),
    f"{BATCHING}.model_runner.ModelRunner._sample": ("scores", "output_ids"),
    f"{SCHEDULER}.add_waiting_request": ("state",),
    f"{SCHEDULER}.set_request_cancellation": ("request_id",),
    f"{SCHEDULER}.clear_cancelled_requests": (),
    f"{BATCHING}.cache_allocators.cache_pool.CachePool.count_free_blocks": ("index",),
    f"{STATE}.current_len": (),
    f"{OFFLOADING}._offload_to_cpu": ("victims", "victim_block_tables"),
    f"{OFFLOADING}._reserve_cpu_blocks": ("block_counts",),
    f"{OFFLOADING}.restore_scheduled_requests": ("requests_in_batch",),
    f"{OFFLOADING}.free_request_cpu_cache": ("state",),
    f"{BATCHING}.cache_allocators.cache_pool.CachePool.free_blocks": ("index", "block_ids"),
}  # fmt: skip
"""Parameters that the adapter passes or listens to, by function."""
FIELDS: dict[str, Sequence[str]] = {
    STATE: (
        "request_id", "initial_tokens", "streaming", "max_new_tokens", "eos_token_id",
        "num_children", "generated_tokens", "position_offset", "is_cpu_offloaded",
    ),
    f"{BATCHING}.requests.GenerationOutput": ("request_id", "prompt_ids", "generated_tokens"),
    "transformers.generation.configuration_utils.ContinuousBatchingConfig": (
        "page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch",
        "allow_block_sharing", "scheduler_type", "cpu_offload_space",
    ),
}  # fmt: skip
"""Fields that it reads or sets, by class."""
ATTRIBUTES: dict[str, Sequence[str]] = {
    "scheduler": (
        "active_requests", "waiting_requests", "waiting_requests_order", "_requests_to_cancel",
    ),
    "cache.cache": ("cache_allocators", "num_blocks", "layer_to_allocator"),
    "cache.cache.pool": ("free_sectors", "num_free_sectors", "_free_blocks"),
    "cache.allocator": (
        "block_table", "blocks_per_sector", "block_physical_stride", "index", "_kv_token_views",
    ),
    "cache.allocator.ledger": (
        "shared_ref_counts", "hash_to_block", "block_to_hash", "cached_blocks",
    ),
    "processor.inputs_and_outputs": (
        "read_index_storage", "write_index_storage", "output_ids",
    ),
    "processor.model_runner": ("_sample",),
    "processor.output_router": ("output_queue",),
    "processor.offloading_manager": ("_cpu_pool", "_request_id_to_cpu_blocks"),
}  # fmt: skip
"""Of a subject's parts."""


def moved() -> list[str]:
    """The names of transformers that the adapter needs and that are not there."""
    missing = list(moved_functions(PARAMETERS))
    for owner, names in FIELDS.items():
        there = {field.name for field in fields(resolve_name(owner))}
        missing += [f"{owner}.{name}" for name in names if name not in there]
    subject = TransformersSubject(Configuration())
    for part, attributes in ATTRIBUTES.items():
        found: Any = subject
        for step in part.split("."):
            found = getattr(found, step)
        missing += [f"{part}.{name}" for name in attributes if not hasattr(found, name)]
    return missing


def test_every_name_of_transformers_is_where_the_adapter_looks_for_it() -> None:
    assert moved() == []


def test_the_name_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{STATE}.current_len")
    monkeypatch.setattr(f"{CACHE}.free_blocks", lambda request_id: None)
    assert f"{STATE}.current_len" in moved()
    assert f"{CACHE}.free_blocks(no_cache)" in moved()
