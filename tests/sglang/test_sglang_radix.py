"""The adapter of SGLang's trees: what it does, and what it tells.

Needs SGLang 0.5.23 in an environment of its own: `bash .ci/sglang-env FOLDER`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from foreign import moved_functions, needs

from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.events import (
    BlockMerged,
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
    RequestsDecoded,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
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
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.subject import Configuration, Subject
from kvproof.invariants.view import View
from kvproof.stateful_tests.subjects import is_kvproofs_own, sglang_package, subject_factory
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.sglang_radix import SglangRadixSubject
from kvproof.stateful_tests.subjects.sglang_told import SglangSubject
from kvproof.stateful_tests.subjects.sglang_unified import SglangUnifiedSubject
from kvproof.stateful_tests.subjects.sglang_view import SglangView

needs("sglang:radix")

pytestmark = pytest.mark.sglang

KINDS = [SglangRadixSubject, SglangUnifiedSubject]
kind: type[SglangSubject] = SglangRadixSubject
"""Which tree a test is about: each is about both."""


@pytest.fixture(autouse=True, params=KINDS, ids=["radix", "unified"])
def of_each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "kind", request.param)


def build(blocks: int = 8, block_size: int = 4, **limits: Any) -> SglangSubject:
    return kind(Configuration(blocks=blocks, block_size=block_size, **limits))


def admit(length: int, source: int = 1, **identity: Any) -> Admit:
    return Admit((Segment(source, length),), **identity)


def compute(subject: SglangSubject) -> None:
    """Run one step to its end."""
    assert subject.apply(Launch()).status == "done"
    assert subject.apply(Retire()).status == "done"


def run_and_finish(subject: SglangSubject, operation: Admit) -> None:
    """Let one request live its whole life."""
    assert subject.apply(operation).status == "done"
    compute(subject)
    assert subject.apply(Finish(len(subject.running) - 1)).status == "done"


def told(subject: SglangSubject, kind: type[Event]) -> list[Any]:
    return [event for event in subject.drain_events() if type(event) is kind]


def state(view: View) -> object:
    """All that a view shows."""
    return (
        view.free_count(0),
        sorted(view.free_blocks(0)),
        list(view.ref_counts(0)),
        {key: list(blocks) for key, blocks in view.index(0).items()},
        [(r, view.standing(r), list(view.table(r, 0))) for r in view.requests()],
        list(view.steps_in_flight()),
    )


# -- behaviour -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4])
def test_subject_and_view_fit_the_protocols(block_size: int) -> None:
    subject = build(block_size=block_size)
    assert isinstance(subject, Subject)
    assert isinstance(subject.view(), View)
    view = subject.view()
    assert view.free_count(0) == 8
    assert sorted(view.free_blocks(0)) == list(range(1, 9))
    assert list(view.ref_counts(0)) == [0] * 9
    assert (view.metrics(), dict(view.index(0))) == ({}, {})
    assert is_kvproofs_own(kind.name)
    assert subject_factory(kind.name, imports=False) is kind


def test_a_table_grows_with_its_tokens() -> None:
    subject = build()
    assert subject.apply(admit(5)).request == 0
    view = subject.view()
    assert len(view.table(0, 0)) == 2
    assert subject.apply(Grow(0, 3)) == Outcome("done", None, 0)
    assert (view.standing(0)[1], len(view.table(0, 0))) == (8, 2)
    assert subject.apply(Grow(0, 1)).status == "done"
    table = view.table(0, 0)
    assert (len(table), view.free_count(0)) == (3, 5)
    assert [view.ref_counts(0)[block] for block in table] == [1, 1, 1]
    assert 0 not in table
    assert view.request_metrics(0) == {}


def test_a_batch_decodes_as_a_whole_or_not_at_all() -> None:
    subject = build(blocks=3)
    subject.apply(admit(4, 1))
    subject.apply(admit(4, 2))
    assert subject.apply(Decode((0, 1))) == Outcome("refused", NO_FREE_BLOCKS)
    assert subject.apply(Decode((0, 2))) == Outcome("done", children=(0,))
    assert [subject.view().standing(number)[1] for number in (0, 1)] == [5, 4]
    assert build().apply(Decode((0,))) == SKIPPED


def test_what_finished_is_hit_but_for_the_last_token() -> None:
    subject = build()
    run_and_finish(subject, admit(8))
    assert subject.view().free_count(0) == 8
    # The same prompt computes its last page again; a longer one takes both.
    assert subject.apply(admit(8)).cached_tokens == 4
    assert subject.apply(admit(9)).cached_tokens == 8
    assert subject.apply(admit(9, source=2)).cached_tokens == 0


def test_without_prefix_caching_nothing_is_findable() -> None:
    subject = build(prefix_caching=False)
    run_and_finish(subject, admit(8))
    assert dict(subject.view().index(0)) == {}
    assert subject.apply(admit(9)).cached_tokens == 0
    assert not told(subject, BlocksPublished)


def test_a_prompt_is_findable_once_it_is_computed_and_the_rest_at_the_end() -> None:
    subject = build()
    subject.apply(admit(4))
    assert not subject.view().index(0)
    compute(subject)
    assert len(subject.view().index(0)) == 1
    subject.apply(Grow(0, 4))
    compute(subject)
    assert len(subject.view().index(0)) == 1
    subject.apply(Finish(0))
    assert len(subject.view().index(0)) == 2


def test_a_chunk_is_findable_before_its_prompt_is_computed() -> None:
    subject = build()
    subject.apply(admit(9))
    assert subject.apply(Launch(5)).count == 5
    subject.apply(Retire())
    assert subject.apply(admit(6)).cached_tokens == 4


def test_equal_pages_are_merged_and_the_table_names_the_tree_s() -> None:
    subject = build()
    subject.apply(admit(9))
    subject.apply(admit(10))
    view = subject.view()
    first, second = view.table(0, 0), view.table(1, 0)
    assert not set(first) & set(second)
    assert view.free_count(0) == 2
    subject.drain_events()
    compute(subject)
    merged = [(event.source, event.target) for event in told(subject, BlockMerged)]
    assert merged == list(zip(second[:2], first[:2], strict=True))
    assert view.table(1, 0) == [*first[:2], second[2]]
    assert view.free_count(0) == 4
    assert [view.ref_counts(0)[page] for page in first] == [2, 2, 1]


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
        (Resume(0), NO_FREE_BLOCKS),
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
def test_a_request_may_go_while_a_step_carries_it(operation: Operation) -> None:
    subject = build()
    subject.apply(admit(6))
    subject.apply(Launch())
    assert subject.apply(operation).status == "done"
    assert subject.view().free_count(0) == 8
    subject.drain_events()
    assert subject.apply(Retire()).count == 1
    assert [type(event) for event in subject.drain_events()] == [StepRetired]
    assert not subject.view().index(0)


def test_only_what_is_computed_is_findable_after_an_early_end() -> None:
    subject = build()
    subject.apply(admit(4))
    compute(subject)
    subject.apply(Grow(0, 8))
    subject.apply(Launch(4))
    subject.apply(Retire())
    assert subject.apply(Finish(0)).status == "done"
    assert (len(subject.view().index(0)), subject.view().free_count(0)) == (2, 8)


def test_a_preempted_request_comes_back_with_its_tokens_and_pages() -> None:
    subject = build()
    subject.apply(admit(6))
    subject.apply(Grow(0, 3))
    compute(subject)
    view = subject.view()
    table = view.table(0, 0)
    assert subject.apply(Preempt(0)).status == "done"
    assert view.standing(0) == ("preempted", 9, 0, (0,))
    assert list(view.table(0, 0)) == []
    assert subject.apply(Launch()).reason == NOTHING_TO_RUN
    assert subject.apply(Resume(5)) == Outcome("done", None, 0, 8)
    assert view.table(0, 0)[:2] == table[:2]
    assert view.standing(0)[:3] == ("running", 9, 8)
    subject.drain_events()
    subject.apply(Launch())
    (step,) = told(subject, StepLaunched)
    assert (step.items[0].epoch, step.items[0].start) == (1, 8)


def test_a_preempted_request_can_be_aborted() -> None:
    subject = build()
    subject.apply(admit(6))
    subject.apply(Preempt(0))
    assert subject.apply(Abort(0)) == Outcome("done", None, 0)
    assert subject.view().requests() == []


def test_targets_are_counted_in_the_order_of_first_admission() -> None:
    subject = build()
    for source in range(3):
        subject.apply(admit(1, source))
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


def test_evict_takes_whole_leaves_from_the_least_recently_used() -> None:
    subject = build()
    run_and_finish(subject, admit(8, source=1))
    run_and_finish(subject, admit(8, source=2))
    subject.apply(admit(9, source=1))
    subject.apply(Abort(0))
    subject.drain_events()
    assert subject.apply(Evict(1)).count == 2
    assert [event.cause for event in told(subject, BlocksEvicted)] == ["request"]
    assert subject.apply(admit(9, source=1)).cached_tokens == 8
    assert subject.view().free_count(0) == 5


def test_an_extension_is_evicted_before_its_head() -> None:
    subject = build()
    run_and_finish(subject, admit(4))
    run_and_finish(subject, admit(9))
    (head,) = [event for event in told(subject, BlocksPublished) if event.row == 0]
    assert subject.apply(Evict(9)).count == 2
    first, last = told(subject, BlocksEvicted)
    assert (len(first.blocks), list(last.blocks)) == (1, list(head.blocks))


def test_each_leaf_that_goes_is_an_event_of_its_own() -> None:
    subject = build()
    for source in (1, 2, 3):
        run_and_finish(subject, admit(5, source))
    uses = subject.view().last_uses(0)
    subject.drain_events()
    assert subject.apply(Evict(2)).count == 2
    events = told(subject, BlocksEvicted)
    assert [len(event.blocks) for event in events] == [1, 1]
    (left,) = subject.view().last_uses(0)
    assert uses[left] == max(uses.values())


def test_pages_are_taken_from_the_tree_only_when_none_is_free() -> None:
    subject = build(blocks=4, block_size=1)
    run_and_finish(subject, admit(2))
    subject.drain_events()
    assert subject.apply(admit(2, source=2)).status == "done"
    assert not told(subject, BlocksEvicted)
    assert subject.apply(Grow(0, 1)).status == "done"
    assert [event.cause for event in told(subject, BlocksEvicted)] == ["pressure"]


def test_reset_empties_the_tree_once_nothing_runs() -> None:
    subject = build()
    run_and_finish(subject, admit(8, source=1))
    subject.apply(admit(4, source=2))
    assert subject.apply(Reset()).reason == BLOCKS_IN_USE
    subject.apply(Preempt(0))
    subject.drain_events()
    assert subject.apply(Reset()) == Outcome("done", count=2)
    assert [event.cause for event in told(subject, BlocksEvicted)] == ["reset"]
    assert dict(subject.view().index(0)) == {}
    assert subject.apply(Resume(0)).status == "done"


@pytest.mark.parametrize(
    "identity",
    [
        {"salt": 1},
        {"adapter": 1},
        {"salt": 1, "adapter": 1},
        {"media": (Media(1, 2, 3),)},
        {"media": (Media(1, 2, 3), Media(1, 5, 1))},
        {"media": (Media(1, 5, 1), Media(1, 2, 3))},
    ],
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_salt_adapter_and_media_separate(block_size: int, identity: dict[str, Any]) -> None:
    subject = build(blocks=40, block_size=block_size)
    run_and_finish(subject, admit(9))
    run_and_finish(subject, admit(9, media=(Media(2, 2, 3),)))
    run_and_finish(subject, admit(9, salt=2))
    run_and_finish(subject, admit(9, **identity))
    assert subject.apply(admit(9, **identity)).cached_tokens == 8
    assert subject.apply(admit(9)).cached_tokens == 8


def test_a_row_that_is_not_of_whole_pages_is_an_error() -> None:
    subject = build()
    subject.apply(admit(5))
    subject.rows.req_to_token[subject.live[0].request.kv.req_pool_idx, 1] += 1
    with pytest.raises(ValueError, match="are not those of whole pages of 4"):
        subject.apply(Launch())


@pytest.mark.parametrize(("free", "wrong"), [([], [1]), ([1, 2], [2]), ([0], [0, 1])])
def test_a_row_that_is_not_one_request_s_alone_is_an_error(
    free: list[int], wrong: list[int]
) -> None:
    subject = build(requests=2)
    subject.apply(admit(5))
    assert (subject.live[0].request.kv.req_pool_idx, subject.rows.free_slots) == (2, [1])
    subject.rows.free_slots = free
    with pytest.raises(ValueError, match=re.escape(f"rows {wrong} are neither free nor")):
        subject.apply(Launch())


def test_a_node_that_has_not_a_slot_for_each_token_is_an_error() -> None:
    subject = build()
    subject.apply(admit(8))
    compute(subject)
    (node,) = [node for node, _ in subject.nodes(0)]
    part = subject.part(node, 0)
    part.value = part.value[:4]
    with pytest.raises(ValueError, match="a node has 4 slots for 8 tokens"):
        subject.apply(Launch())


def test_what_the_tree_counts_as_protected_is_compared_at_rest() -> None:
    subject = build()
    run_and_finish(subject, admit(4))
    tree = subject.tree
    if kind is SglangRadixSubject:
        tree.protected_size_ += 4
    else:
        tree.tree_core.component_protected_size_[0] += 4
    assert subject.apply(admit(8, 2)).status == "done"
    with pytest.raises((ValueError, AssertionError), match="protected"):
        subject.apply(Abort(0))


# -- where SGLang is not to be had ---------------------------------------------------------------


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def _broken() -> None:
    raise ImportError("No module named 'orjson'")


@pytest.mark.parametrize(
    ("replaced", "replacement", "message"),
    [
        ("version", _not_installed, "which is not installed"),
        ("version", lambda name: "0.5.24", "but 0.5.24 is installed"),
        ("Sglang", _broken, "cannot be imported (No module named 'orjson')"),
    ],
)
def test_a_missing_sglang_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
    replaced: str,
    replacement: Callable[..., object],
    message: str,
) -> None:
    sglang_package.load_sglang.cache_clear()
    monkeypatch.setattr(sglang_package, replaced, replacement)
    with pytest.raises(SubjectUnavailable) as caught:
        build()
    assert message in str(caught.value)
    assert "sglang:radix" in str(caught.value)
    assert "\n" not in str(caught.value)
    sglang_package.load_sglang.cache_clear()


# -- events tell the whole story -----------------------------------------------------------------


class Ledger:
    """The state that events alone leave behind, without looking at the subject."""

    def __init__(self, blocks: int) -> None:
        self.refs = [0] * (blocks + 1)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.preempted: set[int] = set()
        self.index: dict[bytes, list[int]] = {}
        self.keys: dict[int, bytes] = {}
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
            case BlockMerged(request=request, row=row, source=source, target=target):
                assert self.tables[request][row] == source
                assert target in self.keys
                assert self.refs[source] == 1
                self.tables[request][row] = target
                self.refs[source] = 0
                self.refs[target] += 1
            case BlocksReleased(request=request, blocks=blocks, step=None):
                assert list(blocks) == self._table(request)
                self._table(request).clear()
                for block in blocks:
                    self.refs[block] -= 1
            case BlocksPublished(request=request, row=row, blocks=blocks, keys=keys):
                assert list(blocks) == self._table(request)[row : row + len(keys)]
                for block, key in zip(blocks, keys, strict=True):
                    assert block not in self.keys
                    assert key not in self.index
                    self.keys[block] = key
                    self.index[key] = [block]
            case BlocksEvicted(blocks=blocks, keys=keys):
                for block, key in zip(blocks, keys, strict=True):
                    assert self.refs[block] == 0
                    assert self.keys.pop(block) == key
                    del self.index[key]
            case RequestAdmitted(request=request, input_tokens=length, cached_tokens=cached):
                assert request not in self.lengths
                self.tables[request] = self._new.pop(request)
                self.lengths[request], self.computed[request] = length, cached
                self.epochs[request] = 0
            case RequestGrown(request=request, tokens=tokens):
                self.lengths[request] += tokens
            case RequestsDecoded(requests=requests):
                for request in requests:
                    self.lengths[request] += 1
            case RequestPreempted(request=request):
                self.preempted.add(request)
                self.computed[request] = 0
                self.epochs[request] += 1
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
                    if item.request in self.lengths and item.epoch == self.epochs[item.request]:
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
        self._table(request).extend(blocks)

    def assert_equals(self, view: SglangView) -> None:
        free = [b for b in range(1, len(self.refs)) if self.refs[b] == 0]
        assert list(view.ref_counts(0)) == self.refs
        assert view.free_count(0) == len(free)
        assert sorted(view.free_blocks(0)) == free
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
    for seed in range(25):
        draw = draw_run(f"ledger-{seed}", abilities(kind))
        subject = kind(draw.configuration)
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
    assert performed > 2000
    assert len(kinds) == 15  # each kind that Ledger.take knows
    assert causes == {"pressure", "request", "reset"}


def test_a_run_repeats_exactly() -> None:
    """Also in a process in which SGLang's clock has gone on."""
    draw = draw_run("again-1", abilities(kind))
    runs = []
    for _ in "ab":
        subject = kind(draw.configuration)
        runs.append(
            [(subject.apply(operation), subject.drain_events()) for operation in draw.operations]
        )
    assert runs[0] == runs[1]


# -- what the adapter knows of SGLang ------------------------------------------------------------

TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
PAGES = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator"
SLOTS = "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator"
ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
COMMON = "sglang.srt.mem_cache.common"
ALLOCATION = "sglang.srt.mem_cache.allocation"

PARAMETERS: dict[str, Sequence[str]] = {
    f"{TREE}.lock": ("node",),
    f"{TREE}.unlock": ("lock",),
    f"{TREE}.evict": ("params",),
    f"{TREE}.evictable_size": (),
    f"{TREE}.reset": (),
    f"{PAGES}.__init__": ("size", "page_size", "dtype", "device", "kvcache", "need_sort"),
    f"{PAGES}.available_size": (),
    f"{PAGES}.get_all_free_pages": (),
    f"{PAGES}.clear": (),
    f"{SLOTS}.__init__": ("size", "dtype", "device", "kvcache", "need_sort"),
    f"{SLOTS}.get_all_free_pages": (),
    f"{ROWS}.__init__": ("size", "max_context_len", "device", "enable_memory_saver"),
    f"{ROWS}.clear": (),
    f"{REQUEST}.__init__": (
        "rid", "origin_input_text", "origin_input_ids", "sampling_params", "lora_id", "cache_salt",
    ),
    f"{REQUEST}.init_next_round_input": ("tree_cache",),
    f"{REQUEST}.refresh_fill_ids": (),
    f"{ALLOCATION}.alloc_for_extend": ("batch",),
    f"{ALLOCATION}.alloc_for_decode": ("batch", "token_per_req"),
    f"{COMMON}.checkpoint_kv_cache": ("req", "tree_cache"),
    f"{COMMON}.release_kv_cache": ("req", "tree_cache", "checkpoint"),
    "sglang.srt.managers.schedule_batch.release_req": (
        "req", "remaing_req_count", "req_to_token_pool", "token_to_kv_pool_allocator",
        "tree_cache", "hisparse_coordinator",
    ),
    "sglang.srt.mem_cache.base_prefix_cache.EvictParams": ("num_tokens",),
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams": (
        "disable", "req_to_token_pool", "token_to_kv_pool_allocator", "page_size",
        "eviction_policy",
    ),
}  # fmt: skip
"""Parameters that the adapter passes, by function."""
ATTRIBUTES: dict[str, Sequence[str]] = {
    "request": (
        "origin_input_ids", "output_ids", "kv", "lock", "last_node", "prefix_len", "extend_end",
        "finished_len", "finished_reason",
    ),
    "request.kv": ("req_pool_idx", "kv_allocated_len", "cache_protected_len", "holds_kv"),
    "tree": ("root_node", "token_to_kv_pool_allocator", "req_to_token_pool"),
    "tree.root_node": ("children", "parent", "key", "last_access_time"),
    "part": ("value", "lock_ref"),
    "tree.root_node.key": ("token_ids", "extra_key", "cache_salt"),
    "rows": ("req_to_token",),
}  # fmt: skip
"""What it reads or sets, by object."""


def moved() -> list[str]:
    """The names of SGLang that the adapter needs and that are not there."""
    missing = list(moved_functions(PARAMETERS))
    subject = build()
    subject.apply(admit(4))
    roots = {
        "request": subject.live[0].request,
        "tree": subject.tree,
        "part": subject.part(subject.tree.root_node, 0),
        "rows": subject.rows,
    }
    for path, names in ATTRIBUTES.items():
        root, *more = path.split(".")
        owner = roots[root]
        for name in more:
            owner = getattr(owner, name)
        missing += [f"{path}.{name}" for name in names if not hasattr(owner, name)]
    return missing


def test_every_name_of_sglang_is_where_the_adapter_looks_for_it() -> None:
    assert moved() == []


def test_the_name_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{TREE}.evict", lambda tree, tokens: None)
    monkeypatch.delattr(f"{ROWS}.clear")
    monkeypatch.setitem(ATTRIBUTES, "rows", ("req_to_token", "row_of"))
    named = {f"{TREE}.evict(params)", f"{ROWS}.clear", "rows.row_of"}
    assert set(moved()) == named
