"""The adapter of vLLM's whole scheduler: what it tells, and what the checks see.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from foreign import Original, first_failure, found_and_shrunk, moved_functions, needs

from kvproof.fuzz.cli.check import _driven, _with_fault
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import abilities, run_once, search
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.case import load_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksEvicted,
    BlocksReleased,
    Event,
    RequestFinished,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    AnyOperation,
    Arrive,
    Reset,
    Retire,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL
from kvproof.invariants.scheduling.vocabulary import Completed, Limits, Scheduled
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.vllm_scheduler import VllmSchedulerSubject, fitted
from kvproof.stateful_tests.totals import Totals

needs("vllm:scheduler")

pytestmark = pytest.mark.vllm

SEED = "vllm-scheduler"

PRIORITY = "vllm:scheduler:priority"
V1 = "but no step has written it"
"""How the known defect of the priority policy shows."""


def harness(policy: str = "fcfs", *, budget: int = 16, **sizes: Any) -> SchedulingHarness:
    configuration = Configuration(
        **({"blocks": 10, "block_size": 4} | sizes), scheduling=Limits(token_budget=budget)
    )
    built = harness_for(VllmSchedulerSubject(configuration, policy=policy), audit_interval=1)
    assert isinstance(built, SchedulingHarness)
    return built


def arrive(length: int, source: int = 1, **more: Any) -> Arrive:
    return Arrive((Segment(source, length),), **more)


def events_of(harness: SchedulingHarness, operation: AnyOperation, kind: type[Event]) -> list[Any]:
    harness.perform(operation)
    assert not harness.violations
    return [event for event in harness.last_events if isinstance(event, kind)]


# -- the known answer: V1, the priority policy ---------------------------------------------------

V1_OPERATIONS = (
    arrive(36, 1, priority=5),
    Run(1),
    arrive(8, 2, output=4),
    Run(2),
)
"""From the project's notes on vLLM, not from a search."""


def test_keys_of_what_a_preempted_request_never_computed_stay_findable() -> None:
    run, moments = harness("priority"), []
    for index, operation in enumerate(V1_OPERATIONS):
        outcome = run.perform(operation)
        moments.append(Moment(index, operation, outcome, run.last_events))
    violation = run.violations[0]
    assert (violation.property, violation.op) == ("VALID", 3)
    assert V1 in violation.message
    story = explain(violation, moments, 4)
    assert "preempts r0 and runs r1" in story
    assert f"Block {violation.block}: given to r0 as row 6" in story
    assert "made findable by r0 as row 6" in story
    assert story.endswith("released by r0 at op 3 (run).")


def test_the_case_that_the_findings_name_shows_it() -> None:
    case = load_case(Path(__file__).parent / "known" / "published_and_preempted.json")
    (violation, *_) = replay(case).violations
    assert (violation.property, violation.op, violation.block) == ("VALID", 3, 9)


def test_the_same_with_the_policy_fcfs_is_right() -> None:
    run = harness("fcfs")
    assert not run.run(V1_OPERATIONS)
    run.drain([])
    assert not run.audit()


def test_a_search_finds_it_and_shrinks_it() -> None:
    caught = search(PRIORITY, "s5", seconds=300, totals=Totals())
    assert caught is not None
    assert V1 in caught.violation.message
    shrunk = shrink(caught.case)
    assert shrunk is not None
    assert len(shrunk.case.operations) <= 12
    assert shrunk.violation.property == "VALID"


# -- the adapter -----------------------------------------------------------------------------------


def test_a_request_lives_its_whole_life() -> None:
    run = harness()
    run.perform(arrive(9, output=3))
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert scheduled.admitted == (0,)
    assert [part.tokens for part in scheduled.parts] == [9]
    (completed,) = events_of(run, Retire(), Completed)
    assert (completed.sampled, completed.finished) == ((0,), ())
    assert run.perform(Run(9)).count == 2
    assert run.subject.state_view.live() == []
    assert not run.audit()


def test_prompts_come_in_chunks_of_two_blocks_beside_others() -> None:
    run = harness()
    run.perform(arrive(20, 1))
    run.perform(arrive(12, 2))
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert [part.tokens for part in scheduled.parts] == [8, 8]


def test_workers_read_through_the_tables_that_vllm_sends_them() -> None:
    run = harness()
    run.perform(arrive(7, output=4))
    (first,) = events_of(run, Schedule(), StepLaunched)
    run.perform(Retire())
    events_of(run, Run(1), StepLaunched)
    (third,) = events_of(run, Schedule(), StepLaunched)
    (table,) = third.items[0].tables
    assert list(table[:2]) == list(first.items[0].tables[0])
    assert len(table) == 3
    assert (third.items[0].start, third.items[0].end) == (8, 9)


def test_a_request_stops_early_where_its_client_allows_more() -> None:
    run = harness()
    run.perform(arrive(3, output=2, max_tokens=9))
    assert run.perform(Run(9)).count == 2
    assert run.counts[Run]["done"] == 1
    assert not run.audit()


def test_a_second_request_hits_the_prefix_of_the_first() -> None:
    run = harness()
    run.perform(arrive(9))
    run.perform(Run(1))
    run.perform(arrive(9))
    (scheduled,) = events_of(run, Schedule(), Scheduled)
    assert [part.tokens for part in scheduled.parts] == [1]
    assert run.subject.state_view.metrics()["prefix_cache_hits"] == 8


def test_requests_that_end_together_give_back_their_blocks_one_after_the_other() -> None:
    run = harness(block_size=2)
    for operation in (arrive(2, output=2), arrive(4, output=2), Run(1), Schedule()):
        run.perform(operation)
    retired, first, _, second, _, _ = events_of(run, Retire(), Event)
    assert isinstance(retired, StepRetired)
    assert (first.request, second.request) == (0, 1)
    assert first.blocks[-1] == second.blocks[-1]
    run.perform(Reset())
    assert not run.audit()


@pytest.mark.parametrize("identity", ["salt", "adapter"])
def test_salts_and_adapters_separate(identity: str) -> None:
    run = harness()
    for value, tokens in ((1, 9), (2, 9), (1, 1)):
        run.perform(arrive(9, **{identity: value}))
        (scheduled,) = events_of(run, Schedule(), Scheduled)
        assert [part.tokens for part in scheduled.parts] == [tokens]
        run.perform(Retire())


def test_aborts_wherever_a_request_stands() -> None:
    run = harness()
    for operation in (arrive(9, output=9), Schedule(), Abort(0), Retire(), arrive(9), Abort(0)):
        assert run.perform(operation).status == "done"
        assert not run.violations
    assert run.perform(Abort(0)).status == "skipped"
    assert run.goals["aborted-running"] == run.goals["aborted-waiting"] == 1


def test_the_front_end_refuses_what_never_fits() -> None:
    run = harness()
    assert run.perform(arrive(41)).reason == LARGER_THAN_POOL
    assert run.perform(arrive(40)).reason == LARGER_THAN_MODEL
    assert run.perform(arrive(39)).status == "done"
    assert not run.violations


def test_configurations_are_made_to_fit() -> None:
    whole = fitted(Configuration(blocks=10, block_size=4, run_ahead=3, host_blocks=4))
    assert (whole.run_ahead, whole.host_blocks, whole.requests) == (1, 0, 20)
    assert whole.scheduling == Limits(token_budget=20, max_model_tokens=40)
    limits = Limits(token_budget=3, chunked_prefill=False, watermark_blocks=2)
    unchunked = fitted(Configuration(blocks=10, block_size=4, scheduling=limits))
    assert unchunked.scheduling.token_budget == 40
    assert unchunked.scheduling.watermark_blocks == 0


# -- names, and classes of one's own -------------------------------------------------------------


def test_options_name_the_subject() -> None:
    assert _driven("vllm:scheduler", None, None) == "vllm:scheduler"
    assert _driven("vllm:scheduler", "priority", None) == PRIORITY
    assert _driven("vllm:scheduler", None, "m:C") == "vllm:scheduler:fcfs:m:C"
    assert _driven("vllm:scheduler", "priority", "m:C") == f"{PRIORITY}:m:C"
    assert _driven("engine", "fcfs", None) == "scheduler:fcfs"
    assert _driven("engine", None, None) == "engine"


@pytest.mark.parametrize(
    ("subject", "policy", "scheduler_class"),
    [("vllm:manager", "fcfs", None), ("engine", None, "m:C"), ("vllm:manager", None, "m:C")],
)
def test_options_that_do_not_go_together(
    subject: str, policy: str | None, scheduler_class: str | None
) -> None:
    with pytest.raises(InputError, match="vllm:scheduler"):
        _driven(subject, policy, scheduler_class)


def test_faults_are_not_planted_in_vllm() -> None:
    with pytest.raises(InputError, match="--subject engine"):
        _with_fault(PRIORITY, "priority", "no-copy-on-write")


def test_an_unknown_policy_is_bad_input() -> None:
    with pytest.raises(InputError, match="there are fcfs, priority"):
        subject_factory("vllm:scheduler:lifo")


def test_subjects_are_known_by_the_names_that_they_give() -> None:
    for name in ("vllm:scheduler", PRIORITY):
        assert subject_factory(name, imports=False)(Configuration()).name == name
        assert is_kvproofs_own(name)


OWN = """
from vllm.v1.core.sched.scheduler import Scheduler


class Same(Scheduler):
    pass


class Overtaking(Scheduler):
    def add_request(self, request):
        super().add_request(request)
        self.waiting.rotate(1)


class Looking(Scheduler):
    def update_from_output(self, *more):
        told = super().update_from_output(*more)
        for outputs in told.values():
            for output in outputs.outputs:
                blocks = self.kv_cache_manager.get_block_ids(output.request_id)[0]
                assert not (output.finish_reason is not None and blocks), "it still holds blocks"
        return told


class Resetting(Scheduler):
    def update_from_output(self, *more):
        told = super().update_from_output(*more)
        assert self.requests or self.reset_prefix_cache(), "blocks are in use"
        return told


class Other:
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_vllm_scheduler.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_scheduler_class_of_the_users_is_checked_in_the_same_way() -> None:
    name = "vllm:scheduler:fcfs:own_vllm_scheduler:"
    subject = subject_factory(f"{name}Same")(Configuration())
    assert subject.name == f"{name}Same"
    assert first_failure(f"{name}Same", SEED, 20) is None
    case, violation = found_and_shrunk(f"{name}Overtaking", SEED, 100, {"FCFS"})
    assert "first come, first served is promised" in violation.message
    assert len(case.operations) <= 5


@pytest.mark.usefixtures("own")
def test_it_finds_the_blocks_of_the_ended_free_as_in_plain_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vllm:scheduler:fcfs:own_vllm_scheduler:Looking"
    assert first_failure(name, SEED, 40) is None
    late = frees_the_finished_with_the_next_iteration(resolve_name(f"{SCHEDULER}._free_blocks"))
    monkeypatch.setattr(f"{SCHEDULER}._free_blocks", late)
    failure = first_failure(name, SEED, 40)
    assert failure is not None
    assert "it still holds blocks" in failure[1].message


@pytest.mark.usefixtures("own")
def test_what_it_does_with_them_at_once_is_told_after_they_are_free() -> None:
    name = "vllm:scheduler:fcfs:own_vllm_scheduler:Resetting"
    assert first_failure(name, SEED, 40) is None
    run = harness_for(subject_factory(name)(Configuration(blocks=10, block_size=4)))
    run.perform(arrive(9))
    told = events_of(run, Run(1), Event)
    kinds = [type(event) for event in told]
    ends = [StepRetired, BlocksReleased, RequestFinished, BlocksEvicted, BlocksEvicted, Completed]
    assert [kind for kind in kinds if kind in ends] == ends
    assert not run.audit()


def test_vllms_asynchronous_scheduler_is_such_a_class() -> None:
    name = "vllm:scheduler:fcfs:vllm.v1.core.sched.async_scheduler:AsyncScheduler"
    assert first_failure(name, SEED, 80) is None


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("attribute", "message"), [("Other", "no subclass"), ("Missing", "cannot be imported")]
)
def test_a_class_that_is_no_scheduler_is_bad_input(attribute: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        subject_factory(f"vllm:scheduler:fcfs:own_vllm_scheduler:{attribute}")


def test_a_case_does_not_import_a_class_unasked() -> None:
    with pytest.raises(InputError, match="to import it"):
        subject_factory("vllm:scheduler:fcfs:os:path", imports=False)


# -- the checks, on the unmodified release and on mutants of it ----------------------------------


def test_the_unmodified_release_with_fcfs_has_no_findings() -> None:
    assert first_failure("vllm:scheduler", SEED, 120) is None


def test_the_unmodified_release_with_priorities_has_only_the_known_one() -> None:
    factory = subject_factory(PRIORITY)
    able, messages = abilities(factory), []
    for number in range(120):
        failure = run_once(factory, draw_run(f"vllm-priority/{number}", able), Totals())
        messages += [failure[1].message] if failure else []
    assert all(V1 in message for message in messages)


def keeps_the_blocks_of_the_preempted(original: Original) -> Original:
    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> None:
        scheduler._free_request_blocks = lambda request: None
        try:
            original(scheduler, request, *more, **named)
        finally:
            del scheduler._free_request_blocks

    return preempt


def keeps_the_blocks_of_the_finished(original: Original) -> Original:
    def free(scheduler: Any, request: Any) -> None:
        del scheduler.requests[request.request_id]

    return free


def frees_the_finished_with_the_next_iteration(original: Original) -> Original:
    """vLLM does so only where a connector may still write to the blocks; there is none."""

    def free(scheduler: Any, request: Any) -> None:
        del scheduler.requests[request.request_id]
        schedule = scheduler.schedule

        def free_and_schedule(*more: Any) -> Any:
            scheduler._free_request_blocks(request)
            scheduler.schedule = schedule
            return schedule(*more)

        scheduler.schedule = free_and_schedule

    return free


def remembers_the_finished(original: Original) -> Original:
    return lambda scheduler, request: scheduler._free_request_blocks(request)


def goes_on_where_the_preempted_stood(original: Original) -> Original:
    def preempt(scheduler: Any, request: Any, *more: Any, **named: Any) -> None:
        computed = request.num_computed_tokens
        original(scheduler, request, *more, **named)
        request.num_computed_tokens = computed // scheduler.block_size * scheduler.block_size

    return preempt


def puts_the_preempted_at_the_end(original: Original) -> Original:
    return lambda queue, request: queue.append(request)


def serves_the_latest_first(original: Original) -> Original:
    return lambda queue: queue[-1]


def exceeds_its_budget(original: Original) -> Original:
    def schedule(scheduler: Any, *more: Any) -> Any:
        scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens + 1
        scheduler.scheduler_config.max_num_batched_tokens += 1
        try:
            return original(scheduler, *more)
        finally:
            scheduler.scheduler_config.max_num_batched_tokens -= 1

    return schedule


def runs_one_request_too_many(original: Original) -> Original:
    def schedule(scheduler: Any, *more: Any) -> Any:
        most = scheduler.scheduler_config.max_num_seqs + 1
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = most
        return original(scheduler, *more)

    return schedule


def counts_a_token_too_many(original: Original) -> Original:
    def update(scheduler: Any, output: Any) -> None:
        original(scheduler, output)
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            request.num_computed_tokens += request.num_computed_tokens < request.num_tokens - 1

    return update


def sends_no_new_blocks_to_workers(original: Original) -> Original:
    def make(scheduler: Any, *more: Any) -> Any:
        data = original(scheduler, *more)
        data.new_block_ids = [None] * len(data.new_block_ids)
        return data

    return make


def overlooks_the_stop_token(original: Original) -> Original:
    def check(request: Any, max_model_len: int) -> bool:
        tokens = request.sampling_params.stop_token_ids
        request.sampling_params.stop_token_ids = []
        try:
            return bool(original(request, max_model_len))
        finally:
            request.sampling_params.stop_token_ids = tokens

    return check


def stops_one_token_early(original: Original) -> Original:
    def check(request: Any, max_model_len: int) -> bool:
        request.max_tokens -= request.max_tokens > 1
        try:
            return bool(original(request, max_model_len))
        finally:
            request.max_tokens = request.sampling_params.max_tokens

    return check


def admits_only_into_an_empty_pool(original: Original) -> Original:
    def allocate(manager: Any, request: Any, *more: Any, **named: Any) -> Any:
        if named.get("has_scheduled_reqs") and request.num_computed_tokens == 0:
            return None
        return original(manager, request, *more, **named)

    return allocate


def counts_hits_twice(original: Original) -> Original:
    return lambda manager, request, hits: original(manager, request, 2 * hits)


def hits_one_block_less(original: Original) -> Original:
    def look_up(manager: Any, request: Any, longest: int | None = None) -> Any:
        less = request.num_tokens - 1 - manager.coordinator.block_size
        return original(manager, request, max(0, less))

    return look_up


def frees_twice(original: Original) -> Original:
    def free_blocks(pool: Any, blocks: Any) -> None:
        blocks = list(blocks)
        original(pool, blocks)
        original(pool, [block for block in blocks if block.ref_cnt > 0])

    return free_blocks


def leaves_the_salt_out_of_the_key(original: Original) -> Original:
    def extra_keys(request: Any, *position: int) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return original(request, *position)
        finally:
            request.cache_salt = salt

    return extra_keys


def leaves_the_adapter_out_of_the_key(original: Original) -> Original:
    return lambda request: []


def prefers_the_less_urgent(original: Original) -> Original:
    return lambda request, other: request.priority > other.priority


def delivered(spoil: Callable[[list[Any]], None]) -> Callable[[Original], Original]:
    """What clients are given is spoilt, where it is more than one request's."""

    def mutate(original: Original) -> Original:
        def update(scheduler: Any, *more: Any) -> Any:
            told = original(scheduler, *more)
            for outputs in told.values():
                given = [output for output in outputs.outputs if output.new_token_ids]
                if len(given) > 1:
                    spoil(given)
            return told

        return update

    mutate.__name__ = spoil.__name__
    return mutate


def exchanges_the_tokens_of_two_clients(given: list[Any]) -> None:
    first, second = given[:2]
    first.new_token_ids, second.new_token_ids = second.new_token_ids, first.new_token_ids


def exchanges_the_names_of_two_clients(given: list[Any]) -> None:
    first, second = given[:2]
    if first.finish_reason is second.finish_reason is None:
        first.request_id, second.request_id = second.request_id, first.request_id


def gives_clients_a_constant(given: list[Any]) -> None:
    for output in given:
        output.new_token_ids = [12345] * len(output.new_token_ids)


SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
QUEUE = "vllm.v1.core.sched.request_queue.FCFSRequestQueue"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
POOL = "vllm.v1.core.block_pool.BlockPool"
STOPS = "vllm.v1.core.sched.scheduler.check_stop"
KEYS = "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys"
ADAPTERS = "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys"
FCFS = "vllm:scheduler"

Mutant = tuple[Callable[[Original], Original], str, str, set[str]]
MUTANTS: tuple[Mutant, ...] = (
    (
        keeps_the_blocks_of_the_preempted,
        f"{SCHEDULER}._preempt_request",
        FCFS,
        {"BATCH", "METER", "CRASH"},
    ),
    (keeps_the_blocks_of_the_finished, f"{SCHEDULER}._free_blocks", FCFS, {"HOLD"}),
    (frees_the_finished_with_the_next_iteration, f"{SCHEDULER}._free_blocks", FCFS, {"HOLD"}),
    (remembers_the_finished, f"{SCHEDULER}._free_blocks", FCFS, {"PROGRESS"}),
    (goes_on_where_the_preempted_stood, f"{SCHEDULER}._preempt_request", FCFS, {"FIT", "CAP"}),
    (puts_the_preempted_at_the_end, f"{QUEUE}.prepend_request", FCFS, {"FCFS"}),
    (exceeds_its_budget, f"{SCHEDULER}.schedule", FCFS, {"BUDGET"}),
    (runs_one_request_too_many, f"{SCHEDULER}.schedule", FCFS, {"BUDGET"}),
    (counts_a_token_too_many, f"{SCHEDULER}._update_after_schedule", FCFS, {"RESUME", "METER"}),
    (sends_no_new_blocks_to_workers, f"{SCHEDULER}._make_cached_request_data", FCFS, {"PROV"}),
    (overlooks_the_stop_token, STOPS, FCFS, {"HOLD", "PROGRESS"}),
    (stops_one_token_early, STOPS, FCFS, {"PROGRESS"}),
    (admits_only_into_an_empty_pool, f"{MANAGER}.allocate_slots", FCFS, {"BATCH"}),
    (counts_hits_twice, f"{MANAGER}.record_prefix_cache_stats", FCFS, {"METER"}),
    (hits_one_block_less, f"{MANAGER}.get_computed_blocks", FCFS, {"FIT"}),
    (frees_twice, f"{POOL}.free_blocks", FCFS, {"CONS", "REF"}),
    (leaves_the_salt_out_of_the_key, KEYS, FCFS, {"KEY", "FIT"}),
    (leaves_the_adapter_out_of_the_key, ADAPTERS, FCFS, {"KEY", "FIT", "CAP"}),
    *(
        (delivered(spoil), f"{SCHEDULER}.update_from_output", FCFS, {"PROGRESS"})
        for spoil in (
            exchanges_the_tokens_of_two_clients,
            exchanges_the_names_of_two_clients,
            gives_clients_a_constant,
        )
    ),
    (prefers_the_less_urgent, "vllm.v1.request.Request.__lt__", PRIORITY, {"PRIORITY"}),
)


@pytest.mark.parametrize(
    ("mutate", "target", "name", "properties"),
    MUTANTS,
    ids=[mutant[0].__name__ for mutant in MUTANTS],
)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Original], Original],
    target: str,
    name: str,
    properties: set[str],
) -> None:
    monkeypatch.setattr(target, mutate(resolve_name(target)))
    found_and_shrunk(name, SEED, 200, properties)


# -- what the adapter knows of vLLM --------------------------------------------------------------

PARAMETERS: dict[str, Sequence[str]] = {
    f"{SCHEDULER}.__init__": (
        "vllm_config", "kv_cache_config", "structured_output_manager", "block_size",
        "hash_block_size", "log_stats",
    ),
    f"{SCHEDULER}.schedule": (),
    f"{SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
    f"{SCHEDULER}.add_request": ("request",),
    f"{SCHEDULER}.finish_requests": ("request_ids", "finished_status"),
    f"{SCHEDULER}.get_request_counts": (),
    f"{MANAGER}.allocate_slots": (
        "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks",
    ),
    f"{MANAGER}.free": ("request",),
    f"{MANAGER}.get_block_ids": ("request_id",),
    f"{POOL}.get_num_free_blocks": (),
    "vllm.v1.request.Request.__init__": (
        "request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time",
        "priority", "lora_request", "cache_salt", "block_hasher",
    ),
}  # fmt: skip
"""Parameters that the adapter passes or listens to, by function."""
FIELDS: dict[str, Sequence[str]] = {
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    ),
    "vllm.v1.core.sched.output.NewRequestData": (
        "req_id", "block_ids", "num_computed_tokens", "prompt_token_ids", "prefill_token_ids",
    ),
    "vllm.v1.core.sched.output.CachedRequestData": (
        "req_ids", "new_block_ids", "num_computed_tokens",
    ),
    "vllm.v1.outputs.ModelRunnerOutput": (
        "req_ids", "req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict",
        "pooler_output",
    ),
    "vllm.v1.metrics.stats.PrefixCacheStats": ("queries", "hits"),
    "vllm.config.SchedulerConfig": (
        "policy", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
        "long_prefill_token_threshold",
    ),
    "vllm.config.CacheConfig": ("block_size", "enable_prefix_caching", "num_gpu_blocks"),
}  # fmt: skip
"""Fields that it reads or sets, by class."""
ATTRIBUTES = ("running", "waiting", "requests", "num_executed_steps", "kv_cache_manager")
"""Of a scheduler."""


def moved() -> list[str]:
    """The names of vLLM that the adapter needs and that are not there."""
    missing = list(moved_functions(PARAMETERS))
    for owner, names in FIELDS.items():
        there = {field.name for field in fields(resolve_name(owner))}
        missing += [f"{owner}.{name}" for name in names if name not in there]
    scheduler = VllmSchedulerSubject(Configuration()).scheduler
    missing += [f"Scheduler.{name}" for name in ATTRIBUTES if not hasattr(scheduler, name)]
    return missing


def test_every_name_of_vllm_is_where_the_adapter_looks_for_it() -> None:
    assert moved() == []


def test_the_name_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate: Any = partial(lambda request, num_tokens, **more: None)
    monkeypatch.setattr(f"{MANAGER}.allocate_slots", allocate)
    monkeypatch.delattr(f"{MANAGER}.get_block_ids")
    assert f"{MANAGER}.get_block_ids" in moved()
    assert f"{MANAGER}.allocate_slots(num_new_tokens)" in moved()
