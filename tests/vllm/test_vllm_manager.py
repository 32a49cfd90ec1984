"""The adapter of vLLM's KVCacheManager: what it does, what it tells, and what the checks see.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, needs

from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_LAUNCHED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.subject import Configuration, Subject
from kvproof.invariants.view import View
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import vllm_package
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.vllm_manager import VllmManagerSubject
from kvproof.stateful_tests.subjects.vllm_manager_view import VllmManagerView

needs("vllm:manager")

pytestmark = pytest.mark.vllm


def build(blocks: int = 8, block_size: int = 4, **limits: Any) -> VllmManagerSubject:
    return VllmManagerSubject(Configuration(blocks=blocks, block_size=block_size, **limits))


def admit(length: int, source: int = 1, **identity: Any) -> Admit:
    return Admit((Segment(source, length),), **identity)


def compute(subject: VllmManagerSubject) -> None:
    """Run one step to its end."""
    assert subject.apply(Launch()).status == "done"
    assert subject.apply(Retire()).status == "done"


def run_and_finish(subject: VllmManagerSubject, operation: Admit) -> int:
    """Let one request live its whole life; its number."""
    outcome = subject.apply(operation)
    assert outcome.request is not None
    compute(subject)
    assert subject.apply(Finish(len(subject.running) - 1)).request == outcome.request
    return outcome.request


def told(subject: VllmManagerSubject, kind: type[Event]) -> list[Any]:
    return [event for event in subject.drain_events() if type(event) is kind]


def state(view: View) -> object:
    """All that a view shows."""
    return (
        view.free_count(0),
        list(view.free_blocks(0)),
        list(view.ref_counts(0)),
        {key: list(blocks) for key, blocks in view.index(0).items()},
        [(r, view.standing(r), list(view.table(r, 0))) for r in view.requests()],
        list(view.steps_in_flight()),
    )


# -- behaviour -----------------------------------------------------------------------------------


def test_subject_and_view_fit_the_protocols() -> None:
    subject = build()
    assert isinstance(subject, Subject)
    assert isinstance(subject.view(), View)
    view = subject.view()
    assert view.free_count(0) == 8
    assert sorted(view.free_blocks(0)) == list(range(1, 9))
    counts = view.ref_counts(0)
    assert (len(counts), counts[0], list(counts[1:3])) == (9, 0, [0, 0])
    assert (view.metrics(), dict(view.index(0))) == ({"kv_bytes_used": 0}, {})


def test_a_table_grows_with_its_tokens() -> None:
    subject = build()
    number = subject.apply(admit(5)).request
    assert number == 0
    view = subject.view()
    assert len(view.table(0, 0)) == 2
    assert subject.apply(Grow(0, 3)) == Outcome("done", None, 0)
    assert (view.standing(0)[1], len(view.table(0, 0))) == (8, 2)
    assert subject.apply(Grow(0, 1)).status == "done"
    table = view.table(0, 0)
    assert (len(table), view.free_count(0)) == (3, 5)
    assert [view.ref_counts(0)[block] for block in table] == [1, 1, 1]
    assert 0 not in table
    assert view.request_metrics(0) == {"findable_tokens": 8}


def test_what_finished_is_hit_but_for_the_last_token() -> None:
    subject = build()
    run_and_finish(subject, admit(8))
    assert subject.view().free_count(0) == 8
    # The same prompt computes its last block again; a longer one takes both.
    assert subject.apply(admit(8)).cached_tokens == 4
    assert subject.apply(admit(9)).cached_tokens == 8
    assert subject.apply(admit(9, source=2)).cached_tokens == 0


def test_without_prefix_caching_nothing_is_findable() -> None:
    subject = build(prefix_caching=False)
    run_and_finish(subject, admit(8))
    assert dict(subject.view().index(0)) == {}
    assert subject.apply(admit(9)).cached_tokens == 0
    assert not told(subject, BlocksPublished)


def test_a_hit_before_the_content_is_computed() -> None:
    """vLLM publishes at allocation: two requests of one step may share what one of them writes."""
    subject = build()
    assert subject.apply(admit(9)).cached_tokens == 0
    assert subject.apply(admit(10)).cached_tokens == 8
    view = subject.view()
    assert (view.standing(0)[2], view.standing(1)[2]) == (0, 8)
    assert subject.apply(Launch()).count == 9 + 2
    (step,) = told(subject, StepLaunched)
    assert [(item.request, item.start, item.end) for item in step.items] == [(0, 0, 9), (1, 8, 10)]
    assert step.items[0].tables[0][:2] == step.items[1].tables[0][:2]
    assert subject.apply(Retire()).count == 2
    assert (view.standing(0)[2], view.standing(1)[2]) == (9, 10)


def test_a_step_keeps_the_tables_of_its_launch() -> None:
    subject = build()
    subject.apply(admit(4))
    subject.apply(Launch())
    (step,) = told(subject, StepLaunched)
    subject.apply(Grow(0, 4))
    assert len(step.items[0].tables[0]) == 1
    assert len(subject.view().table(0, 0)) == 2


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (admit(13, source=9), NO_FREE_BLOCKS),
        (admit(9), NO_FREE_BLOCKS),  # half of it would be a hit
        (admit(40), LARGER_THAN_POOL),
        (admit(1 << 40), LARGER_THAN_POOL),
        (Grow(0, 13), NO_FREE_BLOCKS),
        (Grow(0, 1 << 40), NO_FREE_BLOCKS),
        (Resume(0), NO_FREE_BLOCKS),
        (Finish(0), NOT_LAUNCHED),
        (Preempt(0), NOT_LAUNCHED),
        (Abort(0), NOT_LAUNCHED),
        (Reset(), BLOCKS_IN_USE),
        (Launch(), RUN_AHEAD_LIMIT),
    ],
)
def test_a_refusal_changes_nothing(operation: Operation, reason: str) -> None:
    subject = build(run_ahead=1)
    run_and_finish(subject, admit(8))
    subject.apply(admit(11, source=2))
    subject.apply(admit(17, source=3))
    compute(subject)
    subject.apply(Preempt(1))
    subject.apply(admit(7, source=4))
    subject.apply(Grow(0, 6))
    subject.apply(Launch())
    assert subject.view().free_count(0) == 1
    subject.drain_events()
    before = state(subject.view())
    outcome = subject.apply(operation)
    assert (outcome.status, outcome.reason) == ("refused", reason)
    assert state(subject.view()) == before
    assert not subject.drain_events()


def test_a_refused_growth_leaves_no_token_behind() -> None:
    subject = build(blocks=2)
    subject.apply(admit(7))
    assert subject.apply(Grow(0, 2, 1)).reason == NO_FREE_BLOCKS
    assert subject.apply(Grow(0, 1, 2)).status == "done"
    compute(subject)
    subject.apply(Finish(0))
    # Had the refused token stayed, the second block's key would be that of other tokens.
    other = build(blocks=2)
    other.apply(admit(7))
    other.apply(Grow(0, 1, 2))
    assert set(subject.view().index(0)) == set(other.view().index(0))


def test_refusals_are_checked_in_the_vocabulary_s_order() -> None:
    subject = build(requests=1)
    assert subject.apply(Launch()).reason == NOTHING_TO_RUN
    subject.apply(admit(4))
    assert subject.apply(admit(400)).reason == TOO_MANY_REQUESTS
    compute(subject)
    subject.apply(Preempt(0))
    assert subject.apply(admit(400)).reason == LARGER_THAN_POOL
    subject.apply(admit(4))
    assert subject.apply(Resume(0)) == Outcome("refused", TOO_MANY_REQUESTS, 0)


@pytest.mark.parametrize("operation", [Finish(0), Preempt(0), Abort(0)])
def test_a_request_is_given_back_only_when_all_of_it_is_computed(operation: Operation) -> None:
    subject = build()
    subject.apply(admit(6))
    for step in (Launch(), Retire()):
        assert subject.apply(operation) == Outcome("refused", NOT_LAUNCHED, 0)
        subject.apply(step)
    assert subject.apply(operation).status == "done"
    assert subject.view().free_count(0) == 8


def test_a_preempted_request_comes_back_with_its_tokens_and_blocks() -> None:
    subject = build()
    subject.apply(admit(6))
    subject.apply(Grow(0, 3))
    compute(subject)
    view = subject.view()
    table = list(view.table(0, 0))
    assert subject.apply(Preempt(0)).status == "done"
    assert view.standing(0) == ("preempted", 9, 0, (0,))
    assert list(view.table(0, 0)) == []
    assert subject.apply(Launch()).reason == NOTHING_TO_RUN
    assert subject.apply(Resume(5)) == Outcome("done", None, 0, 8)
    assert list(view.table(0, 0))[:2] == table[:2]
    assert (view.standing(0)[0], view.standing(0)[2], view.standing(0)[1]) == ("running", 8, 9)
    subject.drain_events()
    subject.apply(Launch())
    (step,) = told(subject, StepLaunched)
    assert (step.items[0].epoch, step.items[0].start) == (1, 8)


def test_a_preempted_request_can_be_aborted() -> None:
    subject = build()
    subject.apply(admit(6))
    compute(subject)
    subject.apply(Preempt(0))
    assert subject.apply(Abort(0)) == Outcome("done", None, 0)
    assert subject.view().requests() == []


def test_targets_are_counted_in_the_order_of_first_admission() -> None:
    subject = build()
    for source in range(3):
        subject.apply(admit(1, source))
    compute(subject)
    subject.apply(Preempt(0))
    assert subject.apply(Grow(2, 1)).request == 1  # of requests 1 and 2
    subject.apply(Resume(0))
    assert subject.apply(Grow(3, 1)).request == 0
    assert subject.apply(Abort(5)).request == 2


def test_operations_without_candidate_are_skipped() -> None:
    subject = build()
    for operation in (Grow(0), Finish(0), Abort(0), Preempt(0), Resume(0), Retire(), Fork(0)):
        assert subject.apply(operation) == SKIPPED
    assert "fork" not in subject.capabilities
    assert subject.apply(Evict(3)) == Outcome("done")
    assert subject.apply(Reset()) == Outcome("done")


@pytest.mark.parametrize(
    "operation", [Preempt(0, swap=True), Launch(items=((0, 1),)), Admit((Segment(2, 9),), slots=4)]
)
def test_what_it_does_not_offer_is_passed_over(operation: Operation) -> None:
    harness = Harness(build(), audit_interval=1)
    harness.run([admit(5), Launch(), Retire()])
    assert harness.perform(operation) == SKIPPED
    assert not harness.run([Preempt(0), Resume(0, slots=9), Resume(0)])
    assert harness.counts[Resume] == {"done": 1, "refused": 0, "skipped": 1}


def test_evict_takes_what_was_released_first() -> None:
    subject = build()
    run_and_finish(subject, admit(8, source=1))
    run_and_finish(subject, admit(8, source=2))
    order = [block for event in told(subject, BlocksReleased) for block in event.blocks]
    assert subject.apply(Evict(3)).count == 3
    evicted = told(subject, BlocksEvicted)
    assert [block for event in evicted for block in event.blocks] == order[:3]
    assert {event.cause for event in evicted} == {"request"}
    assert not {key for event in evicted for key in event.keys} & set(subject.view().index(0))
    assert subject.view().free_count(0) == 8
    assert subject.apply(Evict(9)).count == 1


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    subject = build(blocks=4)
    run_and_finish(subject, admit(8, source=1))
    subject.apply(Evict(1))
    subject.drain_events()
    assert subject.apply(admit(12, source=2)).status == "done"
    assert not told(subject, BlocksEvicted)
    assert subject.apply(Grow(0, 1)).status == "done"
    assert [event.cause for event in told(subject, BlocksEvicted)] == ["pressure"]


def test_reset_empties_the_cache_once_nothing_is_held() -> None:
    subject = build()
    run_and_finish(subject, admit(8, source=1))
    subject.apply(admit(4, source=2))
    assert subject.apply(Reset()).reason == BLOCKS_IN_USE
    compute(subject)
    subject.apply(Finish(0))
    subject.drain_events()
    assert subject.apply(Reset()) == Outcome("done", count=3)
    assert [event.cause for event in told(subject, BlocksEvicted)] == ["reset"] * 3
    assert dict(subject.view().index(0)) == {}


def test_an_evicted_block_may_be_published_again_under_its_old_key() -> None:
    """The last block of a prompt is never a hit, so its own content may be evicted for it."""
    subject = build(blocks=2)
    run_and_finish(subject, admit(8))
    subject.drain_events()
    assert subject.apply(admit(8)).cached_tokens == 4
    events = subject.drain_events()
    assert [type(event) for event in events] == [
        BlocksReused,
        BlocksEvicted,
        BlocksAllocated,
        BlocksPublished,
        RequestAdmitted,
    ]
    assert isinstance(events[1], BlocksEvicted)
    assert isinstance(events[3], BlocksPublished)
    assert list(events[1].keys) == list(events[3].keys)


@pytest.mark.parametrize(
    "identity",
    [
        {"salt": 1},
        {"adapter": 1},
        {"media": (Media(1, 2, 3),)},
        {"media": (Media(1, 2, 3), Media(1, 5, 1))},
        {"media": (Media(1, 5, 1), Media(1, 2, 3))},
    ],
)
def test_salt_adapter_and_media_separate(identity: dict[str, Any]) -> None:
    subject = build(blocks=20)
    run_and_finish(subject, admit(9))
    run_and_finish(subject, admit(9, media=(Media(2, 2, 3),)))
    run_and_finish(subject, admit(9, **identity))
    assert subject.apply(admit(9, **identity)).cached_tokens == 8
    assert subject.apply(admit(9)).cached_tokens == 8


def test_media_beyond_the_prompt_are_cut_off() -> None:
    subject = build(blocks=20)
    run_and_finish(subject, admit(9, media=(Media(1, 6, 9), Media(2, 9, 1))))
    assert subject.apply(admit(9, media=(Media(1, 6, 3),))).cached_tokens == 8


def test_media_that_begin_within_another_are_dropped() -> None:
    subject = build(blocks=20)
    run_and_finish(subject, admit(9, media=(Media(1, 2, 3), Media(2, 4, 1))))
    assert subject.apply(admit(9, media=(Media(1, 2, 3),))).cached_tokens == 8


def test_keys_do_not_depend_on_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(seed: str | None) -> set[bytes]:
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        vllm_package.load_vllm.cache_clear()
        subject = build()
        subject.apply(admit(8, salt=1))
        return set(subject.view().index(0))

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert keys(None) == keys("0") == keys("123")
    assert os.environ["PYTHONHASHSEED"] == "123"


# -- where vLLM is not to be had -----------------------------------------------------------------


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def _broken() -> None:
    raise ImportError("No module named 'zmq'")


@pytest.mark.parametrize(
    ("replaced", "replacement", "message"),
    [
        ("version", _not_installed, "which is not installed"),
        ("version", lambda name: "0.34.1", "but 0.34.1 is installed"),
        ("_Vllm", _broken, "cannot be imported (No module named 'zmq')"),
    ],
)
def test_a_missing_vllm_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
    replaced: str,
    replacement: Callable[..., object],
    message: str,
) -> None:
    vllm_package.load_vllm.cache_clear()
    monkeypatch.setattr(vllm_package, replaced, replacement)
    with pytest.raises(SubjectUnavailable) as caught:
        build()
    assert message in str(caught.value)
    assert "vllm:manager" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- events tell the whole story -----------------------------------------------------------------


class Ledger:
    """The state that events alone leave behind, without looking at the subject."""

    def __init__(self, blocks: int) -> None:
        self.refs = [0] * (blocks + 1)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.preempted: set[int] = set()
        self.index: dict[bytes, list[int]] = {}
        self.keys: dict[int, bytes] = {}
        self.cached_free: list[int] = []
        self.steps: list[StepLaunched] = []
        self._new: dict[int, list[int]] = {}

    def take(self, event: Event) -> None:
        match event:
            case BlocksReused(request=request, row=row, blocks=blocks):
                assert row == 0
                assert all(block in self.keys for block in blocks)
                self._hold(request, blocks)
            case BlocksAllocated(request=request, row=row, blocks=blocks):
                assert row == len(self._table(request))
                assert all(self.refs[b] == 0 and b not in self.keys for b in blocks)
                self._hold(request, blocks)
            case BlocksReleased(request=request, blocks=blocks, step=None):
                assert list(blocks) == self._table(request)[::-1]
                self._table(request).clear()
                self._drop(blocks)
            case BlocksPublished(request=request, row=row, blocks=blocks, keys=keys):
                assert list(blocks) == self._table(request)[row : row + len(keys)]
                for block, key in zip(blocks, keys, strict=True):
                    assert block not in self.keys
                    self.keys[block] = key
                    self.index.setdefault(key, []).append(block)
            case BlocksEvicted(blocks=[block], keys=[key]):
                assert self.cached_free.pop(0) == block  # the one that was released first
                assert self.keys.pop(block) == key
                self.index[key].remove(block)
                if not self.index[key]:
                    del self.index[key]
            case RequestAdmitted(request=request, input_tokens=length, cached_tokens=cached):
                assert request not in self.lengths
                self.tables[request] = self._new.pop(request)
                self.lengths[request], self.computed[request] = length, cached
            case RequestGrown(request=request, tokens=tokens):
                self.lengths[request] += tokens
            case RequestPreempted(request=request):
                self.preempted.add(request)
                self.computed[request] = 0
            case RequestResumed(request=request, cached_tokens=cached):
                self.preempted.remove(request)
                self.computed[request] = cached
            case RequestFinished(request=request) | RequestAborted(request=request):
                assert self.tables.pop(request) == []
                self.preempted.discard(request)
                del self.lengths[request], self.computed[request]
            case StepLaunched(items=items):
                for item in items:
                    assert list(item.tables[0]) == self.tables[item.request]
                self.steps.append(event)
            case StepRetired(step=step):
                retired = self.steps.pop(0)
                assert retired.step == step
                for item in retired.items:
                    self.computed[item.request] = item.end
            case _:
                raise AssertionError(event)

    def _table(self, request: int) -> list[int]:
        """Of a live request, or of one whose admission is being told."""
        if request in self.tables:
            return self.tables[request]
        return self._new.setdefault(request, [])

    def _hold(self, request: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.refs[block] += 1
            if block in self.cached_free:
                self.cached_free.remove(block)
        self._table(request).extend(blocks)

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.keys:
                self.cached_free.append(block)

    def assert_equals(self, view: VllmManagerView) -> None:
        free = [b for b in range(1, len(self.refs)) if self.refs[b] == 0]
        assert list(view.ref_counts(0)) == self.refs
        assert view.free_count(0) == len(free)
        listed = list(view.free_blocks(0))
        assert sorted(listed) == free
        assert listed[len(free) - len(self.cached_free) :] == self.cached_free
        assert {key: list(blocks) for key, blocks in view.index(0).items()} == self.index
        assert list(view.requests()) == list(self.tables)
        for request, table in self.tables.items():
            assert list(view.table(request, 0)) == table
            assert view.standing(request)[1] == self.lengths[request]
            assert view.standing(request)[2] == self.computed[request]
            assert (view.standing(request)[0] == "preempted") == (request in self.preempted)
        assert list(view.steps_in_flight()) == [step.step for step in self.steps]


def test_events_alone_rebuild_the_view() -> None:
    performed = 0
    kinds: set[type[Event]] = set()
    causes: set[str] = set()
    for seed in range(60):
        draw = draw_run(f"ledger-{seed}", VllmManagerSubject.capabilities)
        subject = VllmManagerSubject(draw.configuration)
        ledger = Ledger(draw.configuration.blocks)
        for operation in draw.operations:
            outcome = subject.apply(operation)
            events = subject.drain_events()
            assert bool(events) <= (outcome.status == "done")
            for event in events:
                ledger.take(event)
                kinds.add(type(event))
                if isinstance(event, BlocksEvicted):
                    causes.add(event.cause)
            ledger.assert_equals(subject.view())
            performed += 1
    assert performed > 3000
    assert len(kinds) == 13  # each kind that Ledger.take knows
    assert causes == {"pressure", "request", "reset"}


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


def first_finding(seeds: int, audit_interval: int | None = None) -> str | None:
    """The first property that drawn runs break, if any."""
    for seed in range(seeds):
        draw = draw_run(f"vllm-{seed}", VllmManagerSubject.capabilities)
        subject = VllmManagerSubject(draw.configuration)
        harness = Harness(subject, audit_interval=audit_interval)
        harness.run(draw.operations)
        harness.drain([])
        violations = harness.audit()
        if violations:
            return f"{violations[0].property}: {violations[0].message}"
    return None


def test_the_unmodified_release_has_no_findings() -> None:
    assert first_finding(150) is None


def frees_twice(original: Original) -> Original:
    def free_blocks(pool: Any, blocks: Any) -> None:
        blocks = list(blocks)
        original(pool, blocks)
        original(pool, [block for block in blocks if block.ref_cnt > 0])

    return free_blocks


def forgets_to_free_the_first_block(original: Original) -> Original:
    return lambda pool, blocks: original(pool, list(blocks)[:-1])


def frees_head_first(original: Original) -> Original:
    return lambda pool, blocks: original(pool, list(blocks)[::-1])


def counts_no_reference_for_a_hit(original: Original) -> Original:
    def touch(pool: Any, blocks: Any) -> None:
        original(pool, blocks)
        for block in blocks:
            if block.ref_cnt > 1:
                block.ref_cnt -= 1

    return touch


def leaves_hits_in_the_free_queue(original: Original) -> Original:
    def touch(pool: Any, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    return touch


def hits_the_whole_prompt(original: Original) -> Original:
    return lambda manager, request: original(manager, request, request.num_tokens)


def hits_one_block_less(original: Original) -> Original:
    return lambda manager, request: original(
        manager, request, max(0, request.num_tokens - 1 - manager.coordinator.block_size)
    )


def keeps_the_key_of_a_reused_block(original: Original) -> Original:
    return lambda pool, block: False


def drops_the_key_but_not_the_entry(original: Original) -> Original:
    def remove(pool: Any, block: Any) -> list[Any]:
        keys = [block.block_hash] if block.block_hash is not None else []
        block.reset_hash()
        return keys

    return remove


def publishes_one_block_less(original: Original) -> Original:
    def cache_full_blocks(pool: Any, **arguments: Any) -> None:
        arguments["num_full_blocks"] -= 1
        original(pool, **arguments)

    return cache_full_blocks


def keeps_the_hits_of_a_refused_admission(original: Original) -> Original:
    def allocate_slots(manager: Any, request: Any, tokens: int, **hit: Any) -> Any:
        new = original(manager, request, tokens, **hit)
        if new is None and hit:
            manager.block_pool.touch(hit["new_computed_blocks"].blocks[0])
        return new

    return allocate_slots


def takes_one_block_too_many(original: Original) -> Original:
    def allocate(manager: Any, request: str, tokens: int, main_tokens: int) -> Any:
        more = manager.block_size if manager.block_pool.get_num_free_blocks() > 8 else 0
        return original(manager, request, tokens + more, main_tokens)

    return allocate


def leaves_the_salt_out_of_the_key(original: Original) -> Original:
    def extra_keys(request: Any, *position: int) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return original(request, *position)
        finally:
            request.cache_salt = salt

    return extra_keys


def reports_twice_the_pool_as_used(original: Original) -> Original:
    return lambda pool: original(pool) + 1


def reports_all_tokens_as_findable(original: Original) -> Original:
    return lambda manager, request: request.num_tokens


POOL = "vllm.v1.core.block_pool.BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
GROUP = "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"
KEYS = "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys"

MUTANTS: tuple[tuple[Callable[[Original], Original], str, set[str]], ...] = (
    (frees_twice, f"{POOL}.free_blocks", {"CONS", "REF"}),
    (forgets_to_free_the_first_block, f"{POOL}.free_blocks", {"CONS", "REF", "QUIES"}),
    (frees_head_first, f"{POOL}.free_blocks", {"ORDER"}),
    (counts_no_reference_for_a_hit, f"{POOL}.touch", {"REF"}),
    # A hit that is handed out in the same operation, too, trips an assertion of vLLM's own.
    (leaves_hits_in_the_free_queue, f"{POOL}.touch", {"CONS", "REF", "CRASH"}),
    (hits_the_whole_prompt, f"{MANAGER}.get_computed_blocks", {"CAP"}),
    (hits_one_block_less, f"{MANAGER}.get_computed_blocks", {"CAP"}),
    # A block that keeps its key and becomes full again trips an assertion of vLLM's own; and what
    # is to be evicted on demand keeps its key, too.
    (
        keeps_the_key_of_a_reused_block,
        f"{POOL}._maybe_evict_cached_block",
        {"VALID", "CAP", "CRASH"},
    ),
    (drops_the_key_but_not_the_entry, f"{POOL}._remove_cached_block_hashes", {"VALID", "CAP"}),
    (publishes_one_block_less, f"{POOL}.cache_full_blocks", {"VALID"}),
    (keeps_the_hits_of_a_refused_admission, f"{MANAGER}.allocate_slots", {"ATOM", "CONS"}),
    (takes_one_block_too_many, f"{GROUP}.allocate_new_blocks", {"CAP", "CONS"}),
    (leaves_the_salt_out_of_the_key, KEYS, {"KEY", "CAP"}),
    (reports_twice_the_pool_as_used, f"{POOL}.get_usage", {"MET"}),
    (reports_all_tokens_as_findable, f"{MANAGER}.estimate_cached_tokens", {"MET"}),
)


@pytest.mark.parametrize(
    ("mutate", "target", "properties"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS]
)
def test_a_mutant_of_vllm_is_found(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    properties: set[str],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    finding = first_finding(100, audit_interval=1)
    assert finding is not None
    assert finding.partition(":")[0] in properties, finding
