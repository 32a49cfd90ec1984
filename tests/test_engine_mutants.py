"""What mutants of requests, of what policies see, and of what they may do survived before: each
test here kills some (see docs/mutation.md).

Those of pools, tiers and eviction orders: ``test_mutants.py``; of the scheduler:
``test_scheduler_mutants.py``.
"""

from __future__ import annotations

from array import array
from inspect import currentframe
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine import isolation
from kvproof.engine.arithmetic import capacity_blocks
from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.engine import Engine
from kvproof.engine.isolation import TimeLimit
from kvproof.engine.job import Job, job_times
from kvproof.engine.keys import block_key
from kvproof.engine.policies.contiguous import ContiguousReservation
from kvproof.engine.policies.priority import StrictPriority
from kvproof.engine.policies.static_batch import StaticBatch
from kvproof.engine.policy import (
    Draft,
    Limits,
    Plan,
    RequestState,
    SchedulerPolicy,
    SchedulerState,
)
from kvproof.engine.request import Request
from kvproof.engine.scheduler_state import (
    _copied_blocks,
    _fenced_blocks,
    _running_state,
    suspended_state,
)
from kvproof.engine.tiers.disk import DiskFile
from kvproof.invariants.operations import (
    Arrive,
    Media,
    Operation,
    Promote,
    Retire,
    Schedule,
    Segment,
)
from kvproof.invariants.outcomes import HIT_PENDING, OFFLOAD_OFF, Outcome
from kvproof.invariants.scheduling.vocabulary import PlanRejected
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject


def a_request(tokens: int, block_size: int = 4) -> Request:
    numbers = array("I", range(tokens))
    return Request(7, numbers, groups=1, block_size=block_size, salt=0, adapter=0, media=())


@pytest.mark.parametrize("block_size", [1, 4])
def test_there_are_keys_of_as_many_blocks_as_are_asked_for(block_size: int) -> None:
    request = a_request(tokens=8, block_size=block_size)
    assert len(request.block_keys(0, 2)) == 1 + 2


def test_a_key_is_of_the_tokens_alone_where_no_media_are() -> None:
    request = a_request(tokens=4)
    root, key = request.block_keys(0, 1)
    assert key == block_key(root, request.tokens, b"")


def test_who_names_no_tenant_and_no_adapter_has_number_0() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4))
    engine.admit(array("I", range(8)))
    engine.launch(0)
    engine.retire()
    assert engine.admit(array("I", range(8)), salt=0, adapter=0).cached_tokens == 4
    prepared = engine.prepare(array("I", range(8)))
    assert (prepared.salt, prepared.adapter) == (0, 0)


def test_each_admission_that_is_to_wait_for_its_kv_is_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(Configuration(blocks=8, block_size=4, host_blocks=8, offload="prefix"))
    monkeypatch.setattr(engine, "_look_below", lambda request, row: HIT_PENDING)
    for stalls in (1, 2):
        assert engine.admit(array("I", range(8)), wait=True).reason == HIT_PENDING
        assert engine.counters.stalls == stalls
    assert engine.admit(array("I", range(8))).status == "done"
    assert engine.counters.stalls == 2


def test_a_fork_has_the_media_of_its_parent() -> None:
    """An image on the block that the child fills up."""
    media = (Media(5, start=4, length=2),)
    engine = Engine(Configuration(blocks=8, block_size=4, requests=2))
    engine.admit(array("I", range(6)), media=media)
    engine.launch(0)
    engine.retire()
    engine.fork(engine.running[0], 1)
    child = engine.running[1]
    engine.grow(child, [6, 7])
    assert child.block_keys(0, 2) == engine.prepare(child.tokens, media=media).block_keys(0, 2)


# -- what a policy sees ----------------------------------------------------------------------------


def a_job(state: Any, *, tokens: int, outputs: int, scheduled: int) -> Job:
    """The fourth to come, whose prompt has 6 tokens and which may have 5 of output."""
    job = Job(3, Arrive((Segment(0, 6),), output=2, max_tokens=5, priority=8), arrival_ns=70)
    job.state, job.outputs = state, outputs
    job.cache = request = a_request(tokens)
    request.epoch, request.scheduled, request.computed = 2, scheduled, 4
    request.tables = [[1, 2, 5]]
    return job


PENDING = [
    (6, 0, 4, 2),  # a chunk of the prompt is left
    (8, 2, 7, 1),
    (7, 2, 7, 1),  # the token that was sampled has no slot yet
    (9, 2, 7, 2),  # one has a slot before it is known
    (7, 1, 7, 1),  # its next token is being sampled
    (10, 4, 10, 0),  # … and is the last one
]
"""Tokens with slots, outputs delivered, tokens in steps, and what a step could compute."""


@pytest.mark.parametrize(("tokens", "outputs", "scheduled", "pending"), PENDING)
def test_a_running_request_is_shown_as_it_is(
    tokens: int, outputs: int, scheduled: int, pending: int
) -> None:
    job = a_job("running", tokens=tokens, outputs=outputs, scheduled=scheduled)
    shown = RequestState(3, "running", 70, 8, 6, 5, outputs, scheduled, pending, 3, 2, False)
    assert _running_state(job) == shown
    assert job.cache is not None
    job.cache.steps_in_flight = 1
    assert _running_state(job).in_flight


@pytest.mark.parametrize(("state", "computed"), [("swapped", 4), ("preempted", 0)])
def test_a_suspended_request_is_shown_as_it_is(state: Any, computed: int) -> None:
    job = a_job(state, tokens=8, outputs=2, scheduled=0)
    shown = RequestState(3, state, 70, 8, 6, 5, 2, computed, 8 - computed, 0, 2, False)
    assert suspended_state(job) == shown


def test_blocks_of_steps_in_flight_that_nobody_has_are_fenced() -> None:
    steps = [SimpleNamespace(fenced=[(0, [[1, 2]])]), SimpleNamespace(fenced=[(1, [[3, 4]])])]
    running = [SimpleNamespace(tables=[[2, 5]])]
    engine: Any = SimpleNamespace(steps=steps, running=running)
    assert _fenced_blocks(engine) == 3
    engine.steps = []
    assert _fenced_blocks(engine) == 0


def test_blocks_of_the_device_that_only_copies_have_are_fenced() -> None:
    """Blocks 1 to 4 are on one end of a copy; what is on the other is no device block."""
    transfers = {
        0: SimpleNamespace(kind="store", sources=[1, 2], targets=[11, 12]),
        1: SimpleNamespace(kind="promote", sources=[13, 14], targets=[3, 4]),
        2: SimpleNamespace(kind="fetch", sources=[15], targets=[16]),
    }
    ref_counts = [0, 1, 2, 1, 1, *[2] * 12]
    hierarchy = SimpleNamespace(transfers=transfers)
    engine: Any = SimpleNamespace(
        hierarchy=hierarchy, pools=[SimpleNamespace(ref_counts=ref_counts)]
    )
    assert _copied_blocks(engine) == 3
    engine.hierarchy = None
    assert _copied_blocks(engine) == 0


class Reader:
    """Reads out one plan after another, and keeps what it was shown and told."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)
        self.shown: list[dict[str, Any]] = []
        self.told: list[list[tuple[int, int, int]]] = []

    def plan(self, state: SchedulerState) -> Plan:
        self.shown.append({name: getattr(state, name) for name in FIELDS})
        requests = [*state.running, *state.preempted, *state.waiting]
        self.told.append(
            [
                (
                    state.blocks_for(request, request.prompt_tokens + 1),
                    state.cached_tokens(request),
                    state.blocks_freed(request),
                )
                for request in requests
            ]
        )
        return self.plans.pop(0)


FIELDS = (
    "iteration",
    "now_ns",
    "limits",
    "block_size",
    "total_blocks",
    "max_sequences",
    "free_blocks",
    "cached_free_blocks",
    "fenced_blocks",
    "free_host_blocks",
)
LIMITS = Limits(token_budget=32)


def subject_of(reader: Reader, **more: Any) -> SchedulerSubject:
    """Steps take 100 ns, and copies 10 ns and 1 ns a byte."""
    sizes = {"blocks": 12, "block_size": 4, "requests": 5, "run_ahead": 2}
    return SchedulerSubject(
        Configuration(**(sizes | more), scheduling=LIMITS),
        policy=lambda: reader,
        clock=VirtualClock(5),
        cost=CostModel(
            step_ns=100,
            prefill_token_ns=0,
            decode_sequence_ns=0,
            kv_token_read_ns=0,
            host_latency_ns=10,
            host_ps_per_byte=1000,
        ),
    )


class Keeper(Reader):
    """Keeps the state itself, and what it says in short."""

    def plan(self, state: SchedulerState) -> Plan:
        self.kept, self.summary = state, state.summary()  # type: ignore[attr-defined]
        return super().plan(state)


def test_a_state_is_told_in_short_and_is_of_no_use_later() -> None:
    keeper = Keeper(Plan())
    subject = subject_of(keeper)
    for source in range(6):
        subject.apply(Arrive((Segment(source, 8),), output=1))
    subject.apply(Schedule())
    assert "6 waiting; r0 (waiting, 8+0 tokens" in keeper.summary
    assert [f"r{number} (" in keeper.summary for number in (3, 4)] == [True, False]
    with pytest.raises(RuntimeError, match="valid during its own call of plan only"):
        keeper.kept.blocks_for(keeper.kept.waiting[0], 1)


def test_a_policy_is_shown_what_there_is() -> None:
    """When it is asked for the last time, two blocks belong to the step that carries the one that
    was preempted, and a copy has two of the one that has finished."""
    reader = Reader(Plan(((0, 8), (1, 5))), Plan(((1, 1), (2, 6))), Plan(preempt=(2,)), Plan())
    subject = subject_of(reader, host_blocks=9, offload="prefix", kv_bytes_per_token=100)
    subject.apply(Arrive((Segment(0, 8),), output=1))
    subject.apply(Arrive((Segment(1, 5),), output=9))
    subject.apply(Arrive((Segment(2, 6),), output=9))
    subject.apply(Schedule())
    subject.apply(Retire())
    for _ in range(3):
        subject.apply(Schedule())
    assert list(reader.shown[0].values()) == [0, 5, LIMITS, 4, 12, 5, 12, 0, 0, 0]
    assert list(reader.shown[3].values()) == [3, 105, LIMITS, 4, 12, 5, 6, 0, 4, 0]
    assert reader.told == [
        [(3, 0, 0), (2, 0, 0), (2, 0, 0)],
        [(0, 0, 1), (2, 0, 0)],
        [(0, 0, 0), (0, 0, 0)],
        [(0, 0, 0), (2, 0, 0)],
    ]


def test_a_policy_is_shown_what_is_cached_and_where_it_may_swap_to() -> None:
    """Of the blocks that the first has left, the third finds one; two are needed beside it."""
    reader = Reader(Plan(((0, 8), (1, 5))), Plan(swap=(1,)), Plan())
    subject = subject_of(reader, host_blocks=9)
    subject.apply(Arrive((Segment(0, 8),), output=1))
    subject.apply(Arrive((Segment(1, 5),), output=9))
    subject.apply(Schedule())
    subject.apply(Retire())
    subject.apply(Arrive((Segment(0, 4), Segment(2, 6)), output=9))
    subject.apply(Schedule())
    subject.apply(Schedule())
    assert list(reader.shown[1].values()) == [1, 105, LIMITS, 4, 12, 5, 10, 2, 0, 9]
    assert list(reader.shown[2].values())[6:] == [12, 3, 0, 7]
    assert reader.told == [
        [(3, 0, 0), (2, 0, 0)],
        [(0, 0, 2), (3, 4, 0)],
        [(2, 5, 0), (3, 4, 0)],
    ]


TIMES = [
    ((-1, -1, -1), (0, 0, 0)),
    ((30, -1, -1), (20, 0, 0)),
    ((30, 70, 70), (20, 40, 0)),
    ((30, 70, 150), (20, 40, 80)),
]
"""When a request that came at 10 was scheduled, had its first token, and its last."""


@pytest.mark.parametrize(("times", "told"), TIMES)
def test_times_of_a_request_are_told_as_far_as_they_have_passed(
    times: tuple[int, int, int], told: tuple[int, int, int]
) -> None:
    job = Job(0, Arrive((Segment(0, 6),), output=2), arrival_ns=10)
    job.scheduled_ns, job.first_token_ns, job.last_token_ns = times
    names = ("queue_time_ns", "prefill_time_ns", "decode_time_ns")
    assert job_times(job) == dict(zip(names, told, strict=True))


def test_a_first_token_at_time_0_is_one() -> None:
    job = Job(0, Arrive((Segment(0, 6),), output=2), arrival_ns=0)
    job.scheduled_ns, job.first_token_ns, job.last_token_ns = 0, 0, 50
    assert job_times(job)["decode_time_ns"] == 50


# -- what a policy may do --------------------------------------------------------------------------

ROOM = 12 * 4
ALLOWED = [(0, None), (ROOM, None), (-1, "reserve"), (ROOM + 1, "reserve")]


@pytest.mark.parametrize(("tokens", "kind"), ALLOWED)
def test_room_may_be_reserved_from_nothing_to_all_there_is(tokens: int, kind: str | None) -> None:
    subject = subject_of(Reader(Plan(((0, 4),), reserve=((0, tokens),))))
    subject.apply(Arrive((Segment(0, 4),), output=1))
    outcome = subject.apply(Schedule())
    assert outcome.status == ("done" if kind is None else "refused")
    rejected = [one.kind for one in subject.drain_events() if isinstance(one, PlanRejected)]
    assert rejected == ([] if kind is None else [kind])


def a_state(**more: Any) -> Any:
    """Four blocks are free, each request takes one to be admitted and gives two back."""
    fields = {
        "block_size": 4,
        "blocks_for": lambda request, tokens: 1,
        "blocks_freed": lambda request: 2,
        "cached_tokens": lambda request: 0,
        "fenced_blocks": 0,
        "free_blocks": 4,
        "free_host_blocks": 0,
        "limits": Limits(token_budget=99, watermark_blocks=2),
        "max_sequences": 9,
        "running": (),
    }
    return SimpleNamespace(**(fields | more))


PREFILLING = RequestState(
    0, "running", 0, 0, 16, 9, computed_tokens=4, pending_tokens=12, held_blocks=1
)


def test_what_is_kept_free_when_somebody_is_admitted_is_not_for_those_who_run() -> None:
    """Of four free blocks the newcomer takes one, and two are the watermark."""
    draft = Draft(a_state())
    assert draft.run(RequestState(1, "waiting", 0, 0, 4, 9, pending_tokens=4))
    assert draft.run(PREFILLING)
    assert draft.plan() == Plan(((1, 4), (0, 4)))
    assert draft.free_blocks == 2


def test_who_is_preempted_gives_back_what_it_was_to_take_and_what_it_had() -> None:
    draft = Draft(a_state())
    assert draft.run(PREFILLING)
    assert (draft.free_blocks, draft.tokens_left, draft.sequences_left) == (1, 87, 9)
    assert draft.preempt(PREFILLING)
    assert (draft.free_blocks, draft.tokens_left, draft.sequences_left) == (4 + 2, 99, 10)
    assert draft.plan() == Plan(preempt=(0,))


def test_who_has_to_give_up_its_own_blocks_is_not_run() -> None:
    alone = RequestState(
        0, "running", 0, 0, 4, 9, 1, computed_tokens=4, pending_tokens=1, held_blocks=1
    )
    draft = Draft(a_state(free_blocks=0, running=(alone,)))
    assert not draft.run_preempting(alone)
    assert draft.plan() == Plan(preempt=(0,))


def test_tokens_may_be_bounded_for_who_enters_and_for_who_runs_on() -> None:
    draft = Draft(a_state(free_blocks=9))
    assert draft.run(PREFILLING, tokens=3)
    assert draft.run(RequestState(1, "waiting", 0, 0, 4, 9, pending_tokens=4), tokens=2)
    assert draft.plan() == Plan(((0, 3), (1, 2)))


def test_the_last_token_of_the_budget_admits_somebody() -> None:
    draft = Draft(a_state(limits=Limits(token_budget=1)))
    assert draft.run(RequestState(1, "waiting", 0, 0, 1, 9, pending_tokens=1))
    assert draft.tokens_left == 0


HALF_FULL = RequestState(
    0, "running", 0, 0, 16, 9, computed_tokens=2, pending_tokens=14, held_blocks=1
)


def test_who_has_room_in_its_own_block_needs_none_that_is_free() -> None:
    draft = Draft(a_state(free_blocks=0))
    assert draft.run(HALF_FULL)
    assert draft.plan() == Plan(((0, 2),))


WANTING = [
    (PREFILLING, True, 0, True),
    (PREFILLING, True, 1, False),
    (PREFILLING, False, 2, True),
    (PREFILLING, False, 3, False),
    (HALF_FULL, True, 0, False),
    (HALF_FULL, False, 3, False),
]
"""Who, whether it may be chunked, the free blocks, and whether more are wanted."""


@pytest.mark.parametrize(("request_", "chunked", "free", "wants"), WANTING)
def test_blocks_are_wanted_if_not_even_the_least_that_may_be_run_has_them(
    request_: RequestState, chunked: bool, free: int, wants: bool
) -> None:
    limits = Limits(token_budget=99, chunked_prefill=chunked)
    draft = Draft(a_state(free_blocks=free, limits=limits))
    assert draft._wants_blocks(request_) is wants


def test_what_is_in_flight_when_it_is_preempted_gives_its_blocks_back_later() -> None:
    draft = Draft(a_state(fenced_blocks=1))
    assert draft.preempt(replace(PREFILLING, in_flight=True))
    assert draft._coming_blocks == 1 + 1


def test_who_sleeps_does_not_compute_and_is_waited_for() -> None:
    with TimeLimit(0.2):
        sleep(0.4)


def planned(policy: SchedulerPolicy, **more: Any) -> Plan:
    state = a_state(**{"limits": Limits(max_model_tokens=8), "waiting": (), "preempted": ()} | more)
    state.draft = lambda: Draft(state)
    return policy.plan(state)


def waits(number: int, **more: Any) -> RequestState:
    fields = {"state": "waiting", "priority": 0, "max_tokens": 9, "pending_tokens": 4} | more
    return RequestState(number, arrival_ns=number, prompt_tokens=4, **fields)


PLACES = [(8, 4, 0, 2), (8, 4, 1, 1), (8, 5, 0, 2), (6, 3, 0, 1), (1, 1, 0, 1)]
"""The longest context, blocks of the pool, who runs, and how many contexts there are places for."""


@pytest.mark.parametrize(("longest", "blocks", "running", "places"), PLACES)
def test_hits_make_no_places_for_longest_contexts(
    longest: int, blocks: int, running: int, places: int
) -> None:
    """Each newcomer needs but one block now."""
    plan = planned(
        ContiguousReservation(),
        limits=Limits(max_model_tokens=longest),
        running=[waits(9, state="running", pending_tokens=0)] * running,
        total_blocks=blocks,
        waiting=[waits(number, pending_tokens=1) for number in range(3)],
    )
    assert plan.run == tuple([(number, 1) for number in range(places)])


FULL = [(0, 2), (2, 3)]
"""The watermark, and how many of its tokens have a block: it has 12 in the end, and 4 are free."""


@pytest.mark.parametrize(("watermark", "size"), FULL)
def test_who_does_not_fit_to_its_end_is_in_no_batch(watermark: int, size: int) -> None:
    plan = planned(
        StaticBatch(),
        limits=Limits(watermark_blocks=watermark),
        waiting=[waits(0)],
        blocks_for=lambda request, tokens: tokens // size,
    )
    assert plan == Plan()


def test_a_batch_begins_when_nobody_runs() -> None:
    running = [waits(9, state="running", pending_tokens=0)]
    assert planned(StaticBatch(), running=running, waiting=[waits(0)]) == Plan()
    assert planned(StaticBatch(), waiting=[waits(0)]).run == ((0, 4),)


def test_a_batch_is_no_larger_than_may_run() -> None:
    """The third is not of it, so it does not take the place of the one that has ended."""
    policy, third = StaticBatch(), waits(2)
    first = planned(policy, max_sequences=2, waiting=[waits(0), waits(1), third])
    assert first.run == ((0, 4), (1, 4))
    running = [waits(0, state="running", pending_tokens=0)]
    assert planned(policy, max_sequences=2, running=running, waiting=[third]) == Plan()


def test_the_more_urgent_of_those_who_were_preempted_comes_back_first() -> None:
    preempted = [waits(number, state="preempted", priority=9 - number) for number in range(3)]
    assert planned(StrictPriority(), preempted=preempted).run == ((2, 4), (1, 4), (0, 4))


def test_blocks_are_whole() -> None:
    assert repr(capacity_blocks(kv_bytes=1000, bytes_per_token=3, block_size=16)) == "20"


def test_who_swallows_every_interrupt_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(isolation, "_computed_until", 0.0)
    monkeypatch.setattr(isolation, "_swallowed", isolation._INTERRUPTS_MAX)
    monkeypatch.setattr(isolation.os, "_exit", leave)
    with pytest.raises(SystemExit):
        isolation._interrupt(0, currentframe())
    assert f"hangs at {__file__}:" in capsys.readouterr().err


def test_caches_are_said_to_be_of_bfloat16_if_nothing_is_said() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from kvproof.engine.prometheus import export

    registry = prometheus_client.CollectorRegistry()
    export(subject_of(Reader()).scheduler, registry)
    labels = {"attention_mode": "full", "cache_dtype": "bfloat16"}
    assert registry.get_sample_value("kvproof_cache_info", labels) == 1


# -- copies ----------------------------------------------------------------------------------------


def test_each_copy_towards_the_device_counts_as_a_promotion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One from the host and one from the disk; what could not be begun does not count."""
    subject = subject_of(Reader(), host_blocks=9, disk_blocks=9, offload="prefix")
    subject.apply(Arrive((Segment(0, 8),), output=1))
    offloader, (job,) = subject.scheduler.offloader, subject.scheduler.jobs.values()
    assert offloader is not None
    monkeypatch.setattr(offloader, "_next_rows", lambda job: (True, True))
    begun: list[Operation] = []
    begins = [True, True, False, True]
    monkeypatch.setattr(
        offloader, "_start", lambda operation: begun.append(operation) or begins.pop(0)
    )
    offloader._promote(job)
    assert job.promotions == 2
    offloader._promote(job)
    assert job.promotions == 3
    assert begun == 2 * [Promote((Segment(0, 8),)), Promote((Segment(0, 8),), to="host")]


SIZES = {"slots": 1, "unit_tokens": 1, "payload_bytes": 1}


@pytest.mark.parametrize(("size", "name"), [*zip(SIZES, ("slots", "tokens", "bytes"), strict=True)])
def test_there_is_at_least_one_of_what_is_on_disk(tmp_path: Path, size: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^a disk tier with 0 {name}: at least one is needed$"):
        DiskFile(tmp_path, **(SIZES | {size: 0}))
    DiskFile(tmp_path, **SIZES).close()


def test_what_a_crash_has_left_beside_the_index_is_not_part_of_it(tmp_path: Path) -> None:
    DiskFile(tmp_path, **SIZES).close()
    index = tmp_path / "index"
    size = index.stat().st_size
    index.rename(tmp_path / "index.new")
    with (tmp_path / "index.new").open("ab") as file:
        file.write(bytes(1000))
    DiskFile(tmp_path, **SIZES).close()
    assert index.stat().st_size == size


def test_files_of_a_disk_tier_are_nobody_elses(tmp_path: Path) -> None:
    DiskFile(tmp_path, **SIZES).close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_all_that_no_note_was_taken_of_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    file = DiskFile(tmp_path, **(SIZES | {"slots": 2}))
    monkeypatch.setattr(file, "_note", full)
    for slot in (0, 1):
        with pytest.raises(OSError, match="no space"):
            file.put([slot], [bytes(32)], [bytes(file.payload_bytes)])
    assert {*file._owed} == {0, 1}
    file.close()


ROWS = [
    ("", "1234", "", "4", (True, False)),  # the disk has nothing that the host lacks
    ("", "1", "", "2", (True, True)),
    ("", "", "1", "2", (False, True)),
    ("2", "1", "", "3", (True, True)),
    ("", "", "", "1", (False, True)),
    ("", "1", "", "3", (True, False)),
    ("", "1", "23", "4", (True, True)),
]
"""Rows of a prompt of four full blocks that are on the device, on the host, on their way there, and
on disk; and whether the host has the first, and the disk the first that none of the others has."""


@pytest.mark.parametrize(("device", "host", "awaited", "disk", "expected"), ROWS)
def test_the_next_rows_are_those_that_no_faster_tier_has(
    device: str, host: str, awaited: str, disk: str, expected: tuple[bool, bool]
) -> None:
    subject = subject_of(Reader(), host_blocks=9, disk_blocks=9, offload="prefix")
    subject.apply(Arrive((Segment(0, 17),), output=1))
    offloader, (job,) = subject.scheduler.offloader, subject.scheduler.jobs.values()
    assert offloader is not None
    keys = subject.scheduler.cache.prepare(job.admit).block_keys(0, 4)
    indexes = [{keys[int(row)]: 0 for row in rows} for rows in (device, host, awaited, disk)]
    assert subject.scheduler.engine.hierarchy is not None
    pools = subject.scheduler.engine.pools[0], *subject.scheduler.engine.hierarchy.host
    pools[0].index.update(indexes[0])
    pools[1].index.update(indexes[1])
    pools[1].pending.update(indexes[2])
    subject.scheduler.engine.hierarchy.disk[0].index.update(indexes[3])
    assert offloader._next_rows(job) == expected


def test_what_a_policy_gave_is_quoted_in_80_characters() -> None:
    quoted = [isolation._short("x" * length) for length in (78, 79)]
    assert [len(text) for text in quoted] == [80, 78]
    assert quoted[1].endswith("…")


def test_nothing_is_promoted_where_nothing_is_below() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4))
    request = engine.prepare(array("I", range(9)))
    assert engine.promote(request, "device") == Outcome("refused", OFFLOAD_OFF)


def test_who_names_no_tier_means_the_device() -> None:
    assert Engine(Configuration(blocks=8)).evict(1) == Outcome("done", count=0)


def test_all_that_is_below_is_promoted_unless_fewer_are_wanted() -> None:
    engine = Engine(Configuration(blocks=8, block_size=4, host_blocks=4, offload="prefix"))
    engine.admit(array("I", range(9)))
    engine.launch(0)
    engine.retire()
    engine.finish(engine.requests[0])
    hierarchy = engine.hierarchy
    assert hierarchy is not None
    hierarchy.offload("host", 0, 0)
    for transfer in list(hierarchy.transfers.values()):
        hierarchy.complete(transfer)
    engine.evict(8)
    engine.promote(engine.prepare(array("I", range(9))), "device")
    (started,) = hierarchy.transfers.values()
    assert len(started.targets) == 2
