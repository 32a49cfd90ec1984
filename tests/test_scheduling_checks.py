"""Each scheduling check fires on what is wrong, and is silent on what is right.

No scheduler and no engine is needed: a small hand-made world writes the cache's books as an engine
would have had them written, and tells the scheduler's events, which the tests then falsify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.checker import Checker, CheckerError
from kvproof.invariants.events import StepItem, TransferEnded, TransferKind, TransferStarted
from kvproof.invariants.operations import Abort, Arrive, Retire, Schedule, Segment
from kvproof.invariants.outcomes import (
    LARGER_THAN_MODEL,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.request_books import RequestModel, StepModel
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.checker import SCHEDULING_OPERATIONS, SchedulingChecker
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.scheduling.checks.live import GRACE
from kvproof.invariants.scheduling.checks.meter import REQUEST_FIGURES, SCHEDULER_FIGURES, Meter
from kvproof.invariants.scheduling.goals import SCHEDULING_GOALS
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Completed,
    Deferred,
    Limits,
    Part,
    PlanRejected,
    Promises,
    QueueState,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
    SchedulerEvent,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import prompt_tags
from kvproof.invariants.verdict import Violation

ALL = Promises(
    fcfs=True,
    strict_priority=True,
    no_eviction=True,
    no_barrier=True,
    work_conserving=True,
    starvation_bound=3,
)


class HonestView:
    """Shows what the books hold, but for what a test falsifies."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.falsified: dict[str, Any] = {}

    def live(self) -> Sequence[int]:
        live: Sequence[int] = self.falsified.get("live", list(self._world.books.live))
        return live

    def standing(self, request: int) -> tuple[QueueState, int, int]:
        found = self._world.books.live[request]
        state: QueueState = self.falsified.get("state", found.state)
        return state, found.sampled, found.preemptions

    def cache_request(self, request: int) -> int | None:
        name: int | None = self._world.books.live[request].cache_request
        return self.falsified.get("name", name)

    def metrics(self) -> Mapping[str, int]:
        figures = self._world.meter._figures() | self.falsified
        return {name: figure for name, figure in figures.items() if figure is not None}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        live = self._world.books.live[request]
        return self._world.meter._figures_of(live) | self.falsified


class World:
    """A scheduler's world by hand: what is planned happens, at once and as it should."""

    def __init__(
        self,
        *,
        blocks: int = 8,
        requests: int = 4,
        run_ahead: int = 1,
        promises: Promises = Promises(),  # noqa: B008
        tiers: Mapping[str, Any] = {},
        adapters: int = 0,
        **limits: Any,
    ) -> None:
        self.configuration = Configuration(
            blocks=blocks, block_size=4, requests=requests, run_ahead=run_ahead, **tiers
        )
        self.cache = Books(self.configuration, Semantics(tiers=bool(tiers), adapters=adapters))
        self.group = self.cache.groups[0]
        self.view = HonestView(self)
        self.checker = SchedulingChecker(
            limits=Limits(**limits),
            promises=promises,
            configuration=self.configuration,
            cache=cast(Checker, SimpleNamespace(books=self.cache)),
            view=cast(SchedulerView, self.view),
        )
        self.books = self.checker.books
        self.meter = next(check for check in self.checker.checks if isinstance(check, Meter))
        self.now_ns = 0
        self.names = 100
        self.steps = 0

    # -- telling ---------------------------------------------------------------------------------

    def tell(self, event: SchedulerEvent) -> None:
        self.checker.handle(event)

    def arrive(
        self,
        prompt: int,
        output: int = 1,
        longest: int = 0,
        priority: int = 0,
        adapter: int = 0,
    ) -> int:
        number = self.books.arrived
        prompted = (Segment(number, prompt),)
        operation = Arrive(prompted, output, longest, priority, adapter=adapter)
        self.checker.expect(operation)
        self.tell(RequestArrived(number, self.now_ns, prompt, longest or output, output, priority))
        self.checker.observe(operation, Outcome("done", request=number))
        return number

    def schedule(
        self,
        run: Mapping[int, int] | None = None,
        *,
        preempt: Sequence[int] = (),
        swap: Sequence[int] = (),
        **falsified: Any,
    ) -> None:
        """One iteration; ``falsified`` is what the event says otherwise than it was."""
        self.tell(replace(self.plan(run or {}, preempt, swap), **falsified))

    def plan(
        self, run: Mapping[int, int], preempt: Sequence[int] = (), swap: Sequence[int] = ()
    ) -> Scheduled:
        self.now_ns += 10
        for number in (*preempt, *swap):
            self._displace(number, number in swap)
        live = self.books.live
        states = {number: live[number].state for number in run}
        parts = tuple([self._part(number, tokens) for number, tokens in run.items()])
        step = self._launch(parts) if parts else None
        return Scheduled(
            self.books.iterations,
            self.now_ns,
            step,
            parts,
            tuple([number for number in run if states[number] == "waiting"]),
            tuple([number for number in run if states[number] in ("preempted", "swapped")]),
            tuple(preempt),
            tuple(swap),
        )

    def complete(self, **falsified: Any) -> None:
        """The oldest step is retired."""
        self.now_ns += 5
        sampled, finished = self._land()
        event = Completed(self.books.flights[0].number, self.now_ns, sampled, finished)
        for number in finished:
            self.release(number)
        self.tell(replace(event, **falsified))

    def step(self, run: Mapping[int, int], **arguments: Any) -> None:
        self.schedule(run, **arguments)
        self.complete()

    def cancel(self, number: int) -> None:
        self.release(number)
        self.tell(RequestCancelled(number))
        self.checker.observe(Abort(0), Outcome("done", request=number))

    def reset(self, numbers: Sequence[int]) -> None:
        """These were running; what is being sampled for them is dropped."""
        for number in numbers:
            self._displace(number, swap=False)
        self.tell(RunningReset(tuple(numbers)))

    # -- the cache's books -------------------------------------------------------------------------

    def model(self, number: int) -> RequestModel:
        name = self.books.live[number].cache_request
        assert name is not None
        return self.cache.requests[name]

    def _part(self, number: int, tokens: int) -> Part:
        live = self.books.live[number]
        if live.cache_request is None:
            self.names += 1
            prompt = live.prompt()
            assert prompt is not None
            self.cache.requests[self.names] = RequestModel(self.names, self.names, prompt[:], 1)
        model = self.cache.requests[live.cache_request or self.names]
        model.scheduled += tokens
        model.swapped = False
        table = model.tables[0]
        while len(table) * 4 < model.scheduled:
            block = next(b for b in range(1, len(self.group.refs)) if not self.group.refs[b])
            self.group.hold([block])
            table.append(block)
        return Part(number, tokens, model.id)

    def _launch(self, parts: Sequence[Part]) -> int:
        items = []
        for part in parts:
            model = self.cache.requests[part.cache_request]
            end = model.scheduled
            items.append((StepItem(model.id, model.epoch, end - part.tokens, end, ()), model))
        self.cache.steps.append(StepModel(self.steps, items, []))
        self.steps += 1
        return self.steps - 1

    def _land(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        step = self.cache.steps.popleft()
        for item, model in step.items:
            if model.epoch == item.epoch:
                model.computed = item.end
        for _, tables in step.fenced:
            self.group.drop(tables[0])
        due = [
            item.request
            for item in self.books.flights[0].items
            if item.samples and not item.request.ended
        ]
        finished = [r.id for r in due if r.sampled + 1 == r.output_tokens]
        return tuple([r.id for r in due]), tuple(finished)

    def _displace(self, number: int, swap: bool) -> None:
        model = self.model(number)
        carrying = [
            step for step in self.cache.steps if any(other is model for _, other in step.items)
        ]
        if carrying:
            carrying[-1].fenced.append((model.id, model.tables))
        else:
            self.group.drop(model.tables[0])
        model.tables = [[]]
        model.epoch += 1
        model.swapped = swap
        model.scheduled = model.computed = model.computed if swap else 0

    def release(self, number: int) -> None:
        name = self.books.live[number].cache_request
        if name is not None:
            model = self.cache.requests.pop(name)
            self.group.drop(model.tables[0])

    # -- verdicts ----------------------------------------------------------------------------------

    @property
    def seen(self) -> list[str]:
        return [violation.property for violation in self.checker.violations]

    def only(self) -> Violation:
        (violation,) = self.checker.violations
        return violation


class TieredWorld(World):
    """With host memory and a disk, where copies cost 7 ns and 3 ps a byte."""

    def __init__(self, **arguments: Any) -> None:
        tiers = {"host_blocks": 8, "disk_blocks": 8, "offload": "prefix", "kv_bytes_per_token": 500}
        super().__init__(tiers=tiers, **arguments)
        assert self.cache.tiers is not None
        self.tiers = self.cache.tiers
        self.copies: list[TransferQueued] = []
        self._free_ns = dict[str, int]()

    def promote(self, number: int, *, rows: int = 1, row: int = 0, **falsified: Any) -> int:
        """Blocks of a waiting request's prompt are on their way from the host."""
        prompt = self.books.live[number].prompt()
        assert prompt is not None
        tags = list(prompt[row * 4 + 3 : (row + rows) * 4 : 4])
        keys = [str(tag).encode() for tag in tags]
        host = self.tiers.host[0]
        slots = [slot for slot in range(8) if slot not in host.key_of][:rows]
        host.publish(slots, keys, tags)
        blocks = [b for b in range(1, len(self.group.refs)) if not self.group.refs[b]][:rows]
        return self.start("promote", slots, blocks, keys, **falsified)

    def store(self, number: int, **falsified: Any) -> int:
        """The first block of a running request is on its way to the host."""
        model = self.model(number)
        block, tag = model.tables[0][0], model.tags[3]
        if block not in self.group.key_of:
            self.group.publish([block], [b"%d" % tag], [tag])
        slot = next(s for s in range(8) if not self.tiers.host[0].pins[s])
        return self.start("store", [block], [slot], [b"%d" % tag], **falsified)

    def start(
        self,
        copied: TransferKind,
        sources: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[bytes],
        *,
        queued: bool = True,
        **falsified: Any,
    ) -> int:
        number, size = len(self.copies), len(sources) * 4 * 500
        event = TransferStarted(number, copied, 0, sources, targets, keys)
        self.cache.event_handlers[TransferStarted](event)
        due_ns = max(self.now_ns, self._free_ns.get(copied, 0)) + 7 + size * 3 // 1000
        copy = TransferQueued(number, copied, len(sources), size, self.now_ns, due_ns, 7, 3)
        self._free_ns[copied] = due_ns
        self.copies.append(copy)
        if queued:
            self.tell(replace(copy, **falsified))
        return number

    def deliver(self, number: int, *, ended: bool = True, **falsified: Any) -> None:
        """When it is due, or as late as it is now."""
        self.now_ns = max(self.now_ns, self.copies[number].due_ns)
        if ended:
            self.cache.event_handlers[TransferEnded](TransferEnded(number, "completed"))
        self.tell(replace(TransferDelivered(number, self.now_ns), **falsified))

    def defer(self, *requests: int) -> None:
        self.tell(Deferred(requests, self.now_ns))


def _first(world: World, id: str) -> Violation:
    """The first violation is of this property."""
    assert world.checker.violations
    violation = world.checker.violations[0]
    assert violation.property == id, world.checker.violations
    return violation


# -- descriptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", SCHEDULING_CHECKS, ids=lambda check: check.id())
def test_a_check_says_what_it_verifies_and_what_not(check: type[SchedulingCheck]) -> None:
    described = check.describe()
    assert described.id == check.id() == described.id.upper()
    assert 10 < len(described.title) < 100
    for part in (described.verifies, described.does_not_verify):
        assert 20 < len(part) < 1000
        assert part.endswith(".")
        assert "verify:" not in part
    assert described.claims
    for claim in described.claims:
        assert claim.statement.endswith(".")
        assert re.match(r"chapter, |bugs? B\d|B\d|survey ", claim.source), claim.source


def test_ids_goals_and_controls_are_distinct() -> None:
    for names in (
        [check.id() for check in SCHEDULING_CHECKS],
        [check.positive_control for check in SCHEDULING_CHECKS],
        [goal.id for goal in SCHEDULING_GOALS],
    ):
        assert len(set(names)) == len(names)


def test_checks_of_what_is_not_promised_are_not_there() -> None:
    promised = {"BATCH", "FCFS", "PRIORITY", "NOEVICT", "STARVE"}
    assert not promised & World().checker.checked().keys()
    assert promised < World(promises=ALL).checker.checked().keys()


# -- right sequences -------------------------------------------------------------------------------


def _met(world: World) -> dict[str, int]:
    """How often goals were met, by those that were."""
    return {goal: count for goal, count in world.checker.goals.hits.items() if count}


def test_a_whole_life_is_right() -> None:
    """Chunks, a batch of two, a slot that is used again, all promises kept."""
    world = World(token_budget=8, promises=ALL)
    long, short = world.arrive(10, 4), world.arrive(4)
    assert (long, short) == (0, 1)
    world.step({0: 8})
    world.schedule({0: 2, 1: 4})
    world.complete(sampled=(0, 1), finished=(1,))
    other = world.arrive(3, 2)
    world.schedule({0: 1, other: 3})
    world.complete(sampled=(0, 2), finished=())
    world.schedule({0: 1, 2: 1})
    world.complete(sampled=(0, 2), finished=(2,))
    world.schedule({0: 1})
    world.complete(sampled=(0,), finished=(0,))
    assert world.checker.audit() == ()
    assert not world.books.live
    once = ("prompt-in-chunks", "prefill-beside-decode", "budget-exhausted", "slot-reused")
    assert _met(world) == dict.fromkeys(once, 1) | {"admitted": 3, "finished": 3}
    assert min(world.checker.checked()[id] for id in ("PLAN", "BATCH", "FCFS", "STARVE")) > 0


def test_running_ahead_is_right_and_the_step_after_the_end_is_void() -> None:
    world = World(run_ahead=2, promises=ALL)
    world.arrive(4, 2, 9)
    world.schedule({0: 4})
    world.schedule({0: 1})
    world.complete(sampled=(0,), finished=())
    world.schedule({0: 1})
    world.complete(sampled=(0,), finished=(0,))
    world.complete(sampled=(), finished=())
    assert world.checker.audit() == ()
    once = ("admitted", "finished-while-next-step-in-flight", "finished")
    assert _met(world) == dict.fromkeys(once, 1) | {"ran-ahead": 2}


def test_a_request_is_not_ready_once_its_longest_output_is_being_sampled() -> None:
    world = World(run_ahead=2, promises=ALL)
    world.arrive(4, 2, 2)
    world.schedule({0: 4})
    world.schedule({0: 1})
    world.complete()
    world.schedule({})
    assert not world.seen
    world.schedule({0: 1})
    assert "not ready" in _first(world, "PLAN").message


def test_a_sample_from_before_a_preemption_is_delivered_once() -> None:
    world = World(run_ahead=2)
    world.arrive(4, 3)
    world.schedule({0: 4})
    world.schedule(preempt=[0])
    world.complete(sampled=(0,), finished=())
    world.schedule({0: 5})
    world.complete(sampled=(0,), finished=())
    world.schedule({0: 1})
    world.complete(sampled=(0,), finished=(0,))
    assert world.checker.audit() == ()
    assert _met(world) == dict.fromkeys(
        (
            "admitted",
            "preempted-for-recompute",
            "preempted-while-in-flight",
            "sampled-while-preempted",
            "resumed",
            "finished",
        ),
        1,
    )


def test_a_reset_of_what_runs_drops_what_is_being_sampled() -> None:
    world = World(run_ahead=2, promises=ALL)
    world.arrive(4, 2)
    world.arrive(4, 2)
    world.schedule({0: 4, 1: 4})
    world.reset([0, 1])
    world.complete(sampled=(), finished=())
    world.schedule({0: 4, 1: 4})
    world.complete(sampled=(0, 1), finished=())
    assert world.checker.audit() == ()
    once = ("admitted", "preempted-by-reset", "sample-dropped-by-reset")
    assert _met(world) == dict.fromkeys(once, 1) | {"resumed": 2}


def test_progress_a_sample_that_a_reset_dropped_is_not_delivered() -> None:
    world = World(run_ahead=2)
    world.arrive(4, 2)
    world.schedule({0: 4})
    world.reset([0])
    world.complete(sampled=(0,), finished=())
    assert "got an output token" in _first(world, "PROGRESS").message


def test_plan_a_reset_of_what_runs_preempts_all_of_it() -> None:
    world = World()
    world.arrive(4, 2)
    world.arrive(4, 2)
    world.step({0: 4, 1: 4})
    world.reset([0])
    assert "left request 1 running" in _first(world, "PLAN").message


def test_hold_a_reset_takes_all_blocks_back() -> None:
    world = World()
    world.arrive(4, 2)
    world.step({0: 4})
    world.tell(RunningReset((0,)))
    assert "still holds 1 blocks" in _first(world, "HOLD").message


def test_priority_what_a_reset_preempted_waits_like_others() -> None:
    world = World(promises=Promises(strict_priority=True))
    world.arrive(4, 2, priority=1)
    world.step({0: 4})
    world.reset([0])
    world.arrive(4, 2, priority=2)
    world.schedule({1: 4})
    assert "request 0 of priority 1 waits" in _first(world, "PRIORITY").message


def test_a_swapped_request_goes_on_where_it_was() -> None:
    world = World()
    world.arrive(6, 3)
    world.step({0: 6})
    world.schedule(swap=[0])
    world.schedule({0: 1})
    world.complete(sampled=(0,), finished=())
    assert world.checker.audit() == ()
    assert world.checker.goals.hits["swapped-out"] == world.checker.goals.hits["swapped-in"] == 1
    figures = world.meter._figures()
    assert figures["host_offload_bytes"] == 2 * 4 * 131_072
    assert figures["host_promotions"] == 2


# -- PLAN ------------------------------------------------------------------------------------------


def _admitted(**arguments: Any) -> World:
    """A world in which request 0 decodes, having sampled one of nine tokens."""
    world = World(**arguments)
    world.arrive(4, 9)
    world.step({0: 4})
    assert not world.seen
    return world


def test_plan_a_rejected_plan_is_a_finding() -> None:
    world = World()
    world.tell(PlanRejected("budget", "The plan computes 9 tokens of 8.", "…"))
    assert world.only().message == "budget: The plan computes 9 tokens of 8."


def test_plan_requests_are_run_once_and_not_while_preempted() -> None:
    world = _admitted()
    event = world.plan({0: 1})
    world.tell(replace(event, parts=event.parts * 2))
    assert "runs request 0 twice" in _first(world, "PLAN").message
    world = _admitted()
    world.schedule({0: 1}, preempted=(0,))
    assert "preempts request 0 and runs it" in _first(world, "PLAN").message


def test_plan_queues_are_those_of_the_requests() -> None:
    wrong: list[dict[str, Any]] = [{"admitted": (0,)}, {"resumed": (0,)}, {"preempted": (1,)}]
    for falsified in wrong:
        world = _admitted()
        world.arrive(4)
        world.schedule({0: 1}, **falsified)
        _first(world, "PLAN")
    world = World()
    world.arrive(4)
    world.schedule({0: 4}, admitted=())
    assert "run while waiting, but not admitted" in _first(world, "PLAN").message


def test_plan_only_live_requests() -> None:
    world = _admitted()
    event = world.plan({0: 1})
    world.tell(replace(event, parts=(*event.parts, Part(7, 1, 7))))
    assert "request 7, which is not live" in _first(world, "PLAN").message


def test_plan_no_more_tokens_than_are_pending() -> None:
    world = _admitted()
    world.schedule({0: 2})
    assert "computes 2 tokens of request 0, of which 1 are" in _first(world, "PLAN").message


def test_plan_nothing_is_swapped_out_in_flight() -> None:
    world = _admitted(run_ahead=2)
    world.schedule({0: 1})
    world.schedule(swap=[0])
    assert "its bytes are not final" in _first(world, "PLAN").message


def test_plan_whole_prompts_where_chunks_are_not_allowed() -> None:
    world = World(chunked_prefill=False)
    world.arrive(8)
    world.schedule({0: 5})
    assert "prefill may not be chunked" in _first(world, "PLAN").message
    world = World(chunked_prefill=False)
    world.arrive(8)
    world.tell(BlocksCounted(0, 8, 2, 0))
    world.step({0: 8})
    assert not world.seen


def test_plan_a_hit_that_was_evicted_since_excuses_a_chunk() -> None:
    world = World(chunked_prefill=False)
    world.arrive(8)
    (checked,) = [check for check in world.checker.checks if check.id() == "PLAN"]
    checked.after_event()[BlocksCounted](BlocksCounted(0, 8, 1, 4))
    world.step({0: 4})
    assert not world.seen


# -- BUDGET ----------------------------------------------------------------------------------------


def test_budget_of_tokens() -> None:
    world = World(token_budget=6)
    world.arrive(4)
    world.arrive(3)
    world.schedule({0: 4, 1: 3})
    assert "computes 7 tokens, but its budget is 6" in _first(world, "BUDGET").message


def test_budget_of_sequences() -> None:
    world = World(requests=1)
    world.arrive(4)
    world.arrive(4)
    world.schedule({0: 4, 1: 4})
    assert "2 requests run, but 1 may" in _first(world, "BUDGET").message


def test_budget_watermark_binds_admissions_only() -> None:
    world = World(blocks=3, watermark_blocks=1)
    for _ in range(3):
        world.arrive(4)
    world.schedule({0: 4, 1: 4, 2: 4})
    violation = _first(world, "BUDGET")
    assert "leaves 0 blocks free, below the watermark of 1" in violation.message
    assert violation.request == 2
    world = World(blocks=3, watermark_blocks=1)
    world.arrive(4, 5)
    world.arrive(4, 5)
    world.step({0: 4, 1: 4})
    world.step({0: 1})
    assert not world.seen  # growth may use the watermark


def test_budget_the_step_carries_the_parts() -> None:
    world = _admitted()
    event = world.plan({0: 1})
    part = event.parts[0]
    world.tell(replace(event, parts=(replace(part, cache_request=55),)))
    assert "says it computes 1 tokens of request 0" in _first(world, "BUDGET").message
    world = _admitted()
    world.schedule({0: 1}, step=None)
    assert "no step was launched" in _first(world, "BUDGET").message
    world = _admitted()
    world.schedule({0: 1}, step=9)
    assert "is said to have launched step 9" in _first(world, "BUDGET").message
    world = _admitted()
    world.arrive(4)
    event = world.plan({0: 1, 1: 4})
    world.tell(replace(event, parts=event.parts[:1], admitted=()))
    assert "carries requests that iteration 1 does not name" in _first(world, "BUDGET").message


def test_budget_a_step_starts_where_the_last_one_ended() -> None:
    world = _admitted()
    world.model(0).scheduled = 2
    world.schedule({0: 1})
    assert "from token 2 on, but it is due from 4 on" in _first(world, "BUDGET").message


# -- PROGRESS --------------------------------------------------------------------------------------


def test_progress_each_token_is_delivered_once() -> None:
    for sampled, words in {
        (): "delivered 0 times",
        (0, 0): "delivered 2 times",
        (0, 1): "computed 3 of 4 pending tokens of request 1",
        (0, 5): "did not carry request 5",
    }.items():
        world = _admitted()
        world.arrive(4)
        world.schedule({0: 1, 1: 3})
        world.complete(sampled=sampled)
        assert words in _first(world, "PROGRESS").message


def test_progress_a_request_stops_at_its_output() -> None:
    world = World()
    world.arrive(4, 2)
    world.schedule({0: 4})
    world.complete(finished=(0,))
    assert "finished with 1 output tokens" in _first(world, "PROGRESS").message
    world = World()
    world.arrive(4, 1)
    world.schedule({0: 4})
    world.complete(finished=())
    assert "goes on with 1 output tokens" in _first(world, "PROGRESS").message


def test_progress_nothing_happens_to_the_dead() -> None:
    world = _admitted()
    world.tell(RequestCancelled(3))
    assert "request 3, which is not live, was cancelled" in _first(world, "PROGRESS").message
    world = _admitted()
    world.schedule({0: 1})
    world.complete(step=9)
    assert "step 9 was completed, but the oldest" in _first(world, "PROGRESS").message


def test_progress_void_results_of_a_cancelled_request() -> None:
    world = _admitted(run_ahead=2)
    world.schedule({0: 1})
    world.cancel(0)
    world.complete(sampled=(0,))
    assert "had ended before step 1 was retired" in _first(world, "PROGRESS").message


def test_progress_the_cache_computed_as_much() -> None:
    world = _admitted()
    world.schedule({0: 1})
    world.model(0).epoch += 1
    world.complete()
    assert "5 tokens of request 0 are computed, but in the cache" in world.only().message


def test_progress_a_request_arrives_as_it_was_sent() -> None:
    world = World()
    operation = Arrive((Segment(0, 4),), 2, 5)
    for event, words in {
        RequestArrived(0, 0, 5, 5, 2, 0): "with 5 prompt tokens",
        RequestArrived(0, 0, 4, 6, 2, 0): "2 of at most 6 output tokens",
        RequestArrived(3, 0, 4, 5, 2, 0): "next rank of arrival is 0",
    }.items():
        world = World()
        world.checker.expect(operation)
        world.tell(event)
        assert words in _first(world, "PROGRESS").message


def test_progress_ends_are_told_once_each() -> None:
    for finished in ((0, 0), (0, 5)):
        world = World()
        world.arrive(4, 1)
        world.schedule({0: 4})
        world.complete(finished=finished)
        _first(world, "PROGRESS")


def test_progress_audits_queues() -> None:
    falsified: dict[str, Any]
    for falsified in ({"live": []}, {"live": [0, 5]}, {"state": "preempted"}, {"name": 3}):
        world = _admitted()
        world.view.falsified = falsified
        world.checker.audit()
        _first(world, "PROGRESS")


# -- HOLD ------------------------------------------------------------------------------------------


def test_hold_the_ended_hold_nothing() -> None:
    world = World()
    world.arrive(4)
    world.schedule({0: 4})
    model = world.model(0)
    event = Completed(0, 1, *world._land())
    world.tell(event)
    assert "has ended after 1 output tokens, but is still in the cache" in (
        _first(world, "HOLD").message
    )
    assert model.id in world.cache.requests
    world = _admitted()
    world.tell(RequestCancelled(0))
    assert world.seen == ["HOLD"]


def test_hold_the_preempted_hold_nothing() -> None:
    world = _admitted()
    table = world.model(0).tables[0]
    event = world.plan({}, preempt=[0])
    world.model(0).tables = [table]
    world.tell(event)
    assert "is preempted, but still holds 1 blocks" in world.only().message


def test_hold_audits_the_cache_for_requests_of_nobody() -> None:
    world = _admitted()
    world.cache.requests[7] = RequestModel(7, 7, prompt_tags((Segment(0, 4),), 0, 0, ()), 1)
    world.checker.audit()
    assert world.seen == ["HOLD"]


# -- BATCH -----------------------------------------------------------------------------------------


def test_batch_a_ready_request_waits_at_a_barrier() -> None:
    world = _admitted(promises=Promises(no_barrier=True))
    world.arrive(4, 3)
    world.schedule({1: 4})
    assert "request 0 waits at a barrier" in world.only().message


def test_batch_no_barrier_without_budget_or_block() -> None:
    world = _admitted(promises=Promises(no_barrier=True), token_budget=4)
    world.arrive(4, 3)
    world.step({1: 4})
    assert not world.seen
    world = World(promises=Promises(no_barrier=True), blocks=2)
    world.arrive(4, 3)
    world.arrive(4, 3)
    world.step({0: 4, 1: 4})
    world.schedule({})  # both need a block, and none is free
    assert not world.seen


def test_batch_the_watermark_is_nobodys_after_an_admission() -> None:
    world = World(promises=Promises(no_barrier=True), blocks=3, watermark_blocks=1)
    world.arrive(4, 3)
    world.step({0: 4})
    world.arrive(4, 3)
    world.step({1: 4})
    assert not world.seen, "request 0 needs a block, and one is left, which is the watermark's"
    world.schedule({1: 1})
    assert not world.seen, "now none is left"
    world = World(promises=Promises(no_barrier=True), blocks=3, watermark_blocks=1)
    world.arrive(4, 3)
    world.arrive(4, 3)
    world.step({0: 4, 1: 4})
    world.schedule({})
    assert "request 0 waits at a barrier" in world.only().message
    assert "it needs 1 of 1 free blocks" in world.only().message


def test_batch_a_request_that_fits_enters() -> None:
    promises = Promises(work_conserving=True)
    world = _admitted(promises=promises)
    world.arrive(4, 3)
    world.schedule({0: 1})
    assert "requests [1] wait, but iteration 1 admits none" in world.only().message
    for arguments in ({"blocks": 4}, {"requests": 1}, {"token_budget": 4}):
        world = World(promises=promises, **arguments)
        world.arrive(4, 9)
        world.step({0: 4})
        world.arrive(4, 3)
        if "token_budget" in arguments:
            world.arrive(4, 3)
            world.step({0: 1, 1: 3})
            continue
        world.step({0: 1})
        assert not world.seen


@pytest.mark.parametrize("limits", [{"token_budget": 2}, {"requests": 2}])
def test_batch_a_request_that_just_fits_enters(limits: dict[str, int]) -> None:
    """The budget has one token left, or the batch one place."""
    world = World(promises=Promises(work_conserving=True), **limits)
    world.arrive(2, 9)
    world.step({0: 2})
    world.arrive(2, 3)
    world.schedule({0: 1})
    assert "requests [1] wait, but iteration 1 admits none" in world.only().message
    assert world.only().request == 1


def test_batch_of_those_who_ran_instead_the_first_are_named() -> None:
    world = _admitted(promises=Promises(no_barrier=True), blocks=20, requests=12)
    others = [world.arrive(4, 3) for _ in range(9)]
    world.schedule(dict.fromkeys(others, 4))
    assert world.only().message.endswith(f"it was not run beside requests {others[:8]}")


# -- a limit of adapters ---------------------------------------------------------------------------


def with_adapters(*adapters: int, priorities: Sequence[int] = (), **more: Any) -> World:
    """Requests of these adapters wait; as many may run at once as ``adapters`` says."""
    world = World(**{"adapters": 1} | more)
    for number, adapter in enumerate(adapters):
        world.arrive(4, 2, priority=priorities[number] if priorities else 0, adapter=adapter)
    return world


def test_budget_of_adapters() -> None:
    for limit, run, seen in (
        (1, {0: 4, 1: 4, 2: 4}, []),
        (1, {0: 4, 3: 4}, ["BUDGET"]),
        (2, {0: 4, 3: 4}, []),
        (0, {0: 4, 3: 4, 4: 4}, []),
        (2, {0: 4, 3: 4, 4: 4}, ["BUDGET"]),
    ):
        world = with_adapters(1, 0, 1, 2, 3, adapters=limit, requests=5)
        world.schedule(run)
        assert world.seen == seen
    assert "requests of 3 adapters run, [1, 2, 3], but 2 may" in _first(world, "BUDGET").message


def test_budget_of_adapters_counts_all_that_run() -> None:
    world = with_adapters(1, 2)
    world.schedule({0: 4})
    world.complete(sampled=(0,), finished=())
    world.schedule({1: 4})
    assert world.seen == ["BUDGET"]


def test_fcfs_who_lacks_an_adapter_is_passed_over() -> None:
    for adapters, run, seen in (
        ((1, 2, 1), {0: 4, 2: 4}, []),
        ((1, 1, 2), {0: 4, 2: 4}, ["BUDGET", "FCFS"]),
        ((1, 0, 1), {0: 4, 2: 4}, ["FCFS"]),
        ((2, 1, 1), {1: 4}, ["FCFS"]),  # it was the first one's turn when nothing was loaded
        ((1, 2, 0), {0: 4, 2: 4}, []),
    ):
        world = with_adapters(*adapters, promises=Promises(fcfs=True))
        world.schedule(run)
        assert sorted(world.seen) == seen
    assert world.checker.goals.hits["waits-for-adapter"] == 1


def test_fcfs_a_preempted_request_may_lack_its_adapter() -> None:
    for limit, seen in ((1, []), (2, ["FCFS"])):
        world = with_adapters(
            1, 2, 2, adapters=limit, run_ahead=2, promises=Promises(fcfs=True), blocks=9
        )
        world.schedule({0: 4})
        world.schedule({1: 4}, preempt=(0,))  # while its sample is under way, others are admitted
        world.complete(sampled=(0,), finished=())
        world.schedule({2: 4})
        assert world.seen == seen


def test_priority_who_lacks_an_adapter_is_passed_over() -> None:
    for adapters, priorities, seen in (
        ((1, 2, 1), (0, 1, 2), []),
        ((1, 1, 1), (0, 1, 2), ["PRIORITY"]),
        ((1, 2, 1), (2, 0, 1), ["PRIORITY"]),
    ):
        world = with_adapters(
            *adapters, priorities=priorities, promises=Promises(strict_priority=True)
        )
        world.schedule({0: 4, 2: 4})
        assert world.seen == seen


def _whose_adapter_has_ended(*waiting: int, **promises: bool) -> World:
    """The one request that ran has ended; those that wait have other adapters."""
    world = with_adapters(1, *waiting, promises=Promises(**promises))
    world.step({0: 4})
    world.step({0: 1})
    assert world.seen == []
    assert 0 not in world.books.live
    return world


def test_who_has_ended_keeps_nobody_from_an_adapter() -> None:
    world = _whose_adapter_has_ended(2, 0, fcfs=True)
    world.schedule({2: 4})
    assert world.seen == ["FCFS"]
    world = _whose_adapter_has_ended(2, work_conserving=True)
    world.schedule({})
    assert world.seen == ["BATCH"]
    world = _whose_adapter_has_ended(2)
    for _ in range(GRACE):
        world.schedule({})
    assert world.seen == ["LIVE"]


def test_starve_a_bound_holds_for_who_lacks_an_adapter() -> None:
    world = World(adapters=1, promises=Promises(starvation_bound=1))
    for adapter, output in ((1, 9), (2, 1), (1, 9)):
        world.arrive(4, output, adapter=adapter)
    for tokens in (4, 1):
        world.step({0: tokens, 2: tokens})
    assert "request 1, waiting, was left out of 2 iterations" in world.only().message


def test_batch_nobody_is_admitted_whose_adapter_is_one_too_many() -> None:
    for adapter, seen in ((2, []), (1, ["BATCH"]), (0, ["BATCH"])):
        world = with_adapters(1, adapter, promises=Promises(work_conserving=True))
        world.schedule({0: 4})
        world.complete(sampled=(0,), finished=())
        world.checker.violations.clear()
        world.schedule({0: 1})
        assert world.seen == seen


# -- FCFS, PRIORITY, NOEVICT, STARVE ---------------------------------------------------------------


def test_fcfs() -> None:
    for run, seen in (({1: 4}, ["FCFS"]), ({0: 4, 2: 4}, ["FCFS"]), ({2: 4, 0: 4, 1: 4}, [])):
        world = World(promises=Promises(fcfs=True))
        for _ in range(3):
            world.arrive(4)
        world.schedule(run)
        assert world.seen == seen, "those of one iteration are admitted together"
    world = _admitted(promises=Promises(fcfs=True))
    world.arrive(4)
    world.schedule({1: 4}, preempt=[0])
    assert "request 0 is preempted, beside request 1" in world.only().message


@pytest.mark.parametrize(("retired", "seen"), [(False, []), (True, ["FCFS"])])
def test_fcfs_may_wait_for_what_was_launched_before_a_preemption(
    retired: bool, seen: list[str]
) -> None:
    world = World(promises=Promises(fcfs=True), run_ahead=2)
    world.arrive(8)
    world.arrive(4)
    world.schedule({0: 4})
    world.schedule(preempt=[0])
    if retired:
        world.complete()
    world.schedule({1: 4})
    assert world.seen == seen


def test_priority() -> None:
    world = World(promises=Promises(strict_priority=True))
    world.arrive(4, 9, priority=2)
    world.arrive(4, 9, priority=1)
    world.arrive(4, 9, priority=0)
    world.step({1: 4, 2: 4})
    world.step({0: 4, 1: 1, 2: 1})
    world.step({1: 1, 2: 1}, preempt=[0])
    world.step({0: 5, 1: 1, 2: 1})
    assert not world.seen
    world.schedule({0: 1, 2: 1}, preempt=[1])
    assert "preempts request 1 of priority 1, while request 0 of priority 2" in (
        world.only().message
    )
    world = World(promises=Promises(strict_priority=True))
    world.arrive(4, priority=2)
    world.arrive(4, priority=1)
    world.schedule({0: 4})
    assert "while request 1 of priority 1 waits" in world.only().message
    world = World(promises=Promises(strict_priority=True))
    world.arrive(4, priority=2)
    world.arrive(4, priority=1)
    world.cancel(1)
    world.schedule({0: 4})
    assert not world.seen


def test_noevict() -> None:
    for how in ("preempt", "swap"):
        world = _admitted(promises=Promises(no_eviction=True))
        world.schedule({}, **{how: [0]})
        assert world.seen == ["NOEVICT"]


def test_starve() -> None:
    world = World(promises=Promises(starvation_bound=2))
    world.arrive(4, 9)
    world.arrive(4, 9)
    world.step({0: 4})
    world.step({0: 1})
    world.step({1: 4})
    world.step({1: 1})
    assert not world.seen
    world.step({1: 1})
    assert "request 0, running, was left out of 3 iterations" in world.only().message


def test_starve_counts_iterations_in_a_row() -> None:
    world = World(promises=Promises(starvation_bound=2))
    world.arrive(4, 9)
    world.arrive(4, 20)
    world.step({0: 4})
    for between in ({}, {0: 1}, {}):
        world.step({1: 4 if world.books.live[1].state == "waiting" else 1})
        world.step({1: 1})
        world.schedule(between)
        if between:
            world.complete()
    assert not world.seen, "an iteration that overtakes nobody starts anew"
    for _ in range(3):
        world.step({1: 1})
    assert "request 0, running, was left out of 3 iterations" in world.only().message


def test_starve_waiting_for_a_step_in_flight_does_not_count() -> None:
    world = World(promises=Promises(starvation_bound=1), run_ahead=4)
    world.arrive(4, 1)
    world.arrive(4, 9)
    world.schedule({0: 4, 1: 4})
    world.schedule({1: 1})
    world.schedule({1: 1})
    world.schedule({1: 1})
    assert not world.seen


def test_priority_of_those_that_wait_for_a_sample_is_passed_over() -> None:
    world = World(promises=Promises(strict_priority=True), run_ahead=2)
    world.arrive(4, 9, priority=1)
    world.arrive(4, 9, priority=3)
    world.arrive(4, 9, priority=2)
    world.schedule({0: 4})
    world.schedule(preempt=[0])
    world.schedule({2: 4})  # while the first token of request 0 is being sampled
    assert not world.seen
    world.complete()
    world.schedule({1: 4})
    assert "while request 0 of priority 1 waits" in world.only().message


# -- LIVE ------------------------------------------------------------------------------------------


def test_live_a_stall_says_who_could_have_run() -> None:
    world = World()
    world.arrive(6)
    for _ in range(GRACE - 1):
        world.schedule({})
    assert not world.seen
    world.schedule({})
    assert "request 0, waiting, needs 2 blocks for its 6 tokens, of 8" in world.only().message
    world = _admitted()
    for _ in range(GRACE):
        world.schedule({})
    assert "request 0 runs, has 1 tokens pending and needs 1 of 7" in world.only().message


@pytest.mark.parametrize(
    ("chunked", "budget", "words"),
    [
        (True, 6, "it could have been run"),
        (True, 4, "it could have been run, in chunks of at most 4 (the token budget)"),
        (False, 6, "it could have been run"),
        (
            False,
            4,
            "none of them fits (1 wait, 0 are preempted), though nobody holds what they lack",
        ),
    ],
)
def test_live_a_stalled_prompt_fits_the_budget_whole_or_in_chunks(
    chunked: bool, budget: int, words: str
) -> None:
    world = World(chunked_prefill=chunked, token_budget=budget)
    world.arrive(6)
    for _ in range(GRACE):
        world.schedule({})
    assert world.only().message.endswith(words)


def test_live_hold_and_wait_is_explained() -> None:
    world = World(blocks=6, token_budget=24)
    world.arrive(20)
    world.arrive(20)
    world.step({0: 12, 1: 12})
    for _ in range(GRACE):
        world.schedule({})
    assert (
        "request 0 holds 3 of the 5 blocks that its 20 tokens need, request 1 holds 3 of the 5 "
        "blocks that its 20 tokens need; none is free: each waits for the others"
    ) in world.only().message


def test_live_a_stall_in_which_nobody_fits_is_still_a_stall() -> None:
    world = World(blocks=3, requests=1, watermark_blocks=1)
    world.arrive(4, 5)
    world.step({0: 4})
    world.group.hold([2, 3])  # by nobody
    world.arrive(4, 5)
    for _ in range(GRACE):
        world.schedule({})
    assert "it waits for itself" in world.only().message
    world = World(blocks=3, watermark_blocks=1)
    world.arrive(4, 5)
    world.group.hold([2, 3])
    for _ in range(GRACE):
        world.schedule({})
    assert "none of them fits (1 wait, 0 are preempted)" in world.only().message


def test_live_excuses_and_news_end_a_stall() -> None:
    world = _admitted(run_ahead=2)
    world.schedule({0: 1})
    for _ in range(2 * GRACE):
        world.schedule({})
    world.complete()
    for _ in range(GRACE - 1):
        world.schedule({})
    world.arrive(4)
    for _ in range(GRACE - 1):
        world.schedule({})
    world.cancel(1)
    for _ in range(GRACE - 1):
        world.schedule({})
    assert not world.seen
    world.schedule({})
    assert "though 1 request is live and no step is in flight" in world.only().message


def test_live_ping_pong_is_seen_and_told() -> None:
    world = World(blocks=3, token_budget=8)
    world.arrive(12, 1)
    world.arrive(12, 1)
    world.step({0: 8})
    for _ in range(2):
        world.step({1: 8}, preempt=[0])
        world.step({0: 8}, preempt=[1])
    assert not world.seen
    while not world.seen:
        world.step({1: 8}, preempt=[0])
        world.step({0: 8}, preempt=[1])
    message = _first(world, "LIVE").message
    assert "is preempted over and over" in message
    assert "preempts 1 and runs 0" in message
    assert world.books.iterations < 12


def test_live_preemptions_amid_progress_are_not_ping_pong() -> None:
    """The older request decodes; the latest is admitted in chunks and preempted, many times."""
    world = World(blocks=12, token_budget=4)
    world.arrive(4, 12)
    world.arrive(12, 1)
    world.step({0: 4})
    for _ in range(5):
        world.step({0: 1, 1: 3})
        world.step({0: 1}, preempt=[1])
    assert not world.seen
    assert world.books.live[1].preemptions == 5


def test_live_recomputation_is_not_ping_pong() -> None:
    """Both are below what they had computed, and neither returns to where it was."""
    world = World(blocks=12, token_budget=2)
    world.arrive(16, 1)
    world.arrive(16, 1)
    for _ in range(6):
        world.step({0: 1, 1: 1})
        world.step({0: 1}, preempt=[1])
    assert not world.seen


def test_live_all_must_finish_within_the_bound() -> None:
    world = World(blocks=12, token_budget=1)
    world.arrive(4, 2)
    world.arrive(40, 2)
    bound = 6 + 42 + (1 + 2) * 3 + GRACE
    turns = 0
    while not world.seen:  # request 1 is computed up to its last token, again and again
        if world.books.live[1].scheduled < 39:
            world.step({1: 1})
            turns += 1
        else:
            world.schedule(preempt=[1])
    assert turns == bound + 1, "iterations that run something"
    assert (
        f"{bound} iterations ran something since the last arrival, abort or output token, enough "
        "to serve all 2 live requests one by one, but nobody got another token: request 0, "
        "waiting, has 0 of 2 output tokens"
    ) in _first(world, "LIVE").message


def test_live_the_bound_starts_anew_with_each_output_token() -> None:
    """However slow: each token takes nearly as long as all of serial service."""
    world = World(blocks=16, token_budget=1)
    world.arrive(4, 9)
    world.arrive(40, 2)
    bound = 13 + 42 + (1 + 2) * 3 + GRACE
    for token in range(8):
        for _ in range(4 if token == 0 else 1):
            world.step({0: 1})
        while world.books.live[1].state == "waiting" or world.books.live[1].scheduled < 39:
            world.step({1: 1})
        world.schedule(preempt=[1])
    assert not world.seen
    assert world.books.iterations > 3 * bound


def test_live_refusals_are_exact() -> None:
    world = World(blocks=4, watermark_blocks=1, max_model_tokens=12)
    fits, longer = Arrive((Segment(0, 10),), 2), Arrive((Segment(0, 12),), 2)
    refused = Outcome("refused", LARGER_THAN_POOL)
    world.checker.observe(fits, Outcome("done", request=0))
    world.checker.observe(longer, refused)
    world.checker.observe(longer, Outcome("refused", LARGER_THAN_MODEL))  # both are true
    world.checker.observe(longer, SKIPPED)
    assert not world.seen
    assert world.checker.goals.hits["refused-for-ever"] == 1
    for operation, outcome in (
        (fits, refused),
        (longer, Outcome("done", request=0)),
        (longer, Outcome("refused", NO_FREE_BLOCKS)),
    ):
        world.checker.observe(operation, outcome)
        assert world.seen == ["LIVE"]
        world.checker.violations.clear()


# -- FIT -------------------------------------------------------------------------------------------


def _cached(world: World, number: int, rows: int) -> list[int]:
    """The first rows of a waiting request's prompt become findable, in blocks that nobody holds."""
    tags = world.books.live[number].prompt()
    assert tags is not None
    blocks = list(range(1, rows + 1))
    keys = [bytes([row]) for row in range(rows)]
    world.group.publish(blocks, keys, tags[3 : 4 * rows : 4])
    return blocks


def test_fit_new_blocks_and_revived_ones_are_counted() -> None:
    world = World()
    world.arrive(12)
    _cached(world, 0, 3)
    world.tell(BlocksCounted(0, 12, 3, 8))  # the last block must be computed
    assert not world.seen
    world.group.hold([1])
    world.tell(BlocksCounted(0, 12, 2, 8))
    world.tell(BlocksCounted(0, 2, 1, 8))  # the whole hit is taken, however few are asked for
    assert not world.seen
    world.tell(BlocksCounted(0, 12, 1, 8))
    assert "are said to take 1 free blocks, but they take 2" in world.only().message
    world.checker.violations.clear()
    world.tell(BlocksCounted(0, 12, 2, 12))
    assert "12 tokens of request 0, waiting, are said to be cached, but it is 8" in (
        world.only().message
    )


def test_fit_of_a_prompt_that_nobody_told_is_not_judged() -> None:
    world = World()
    world.tell(RequestArrived(0, 0, 4, 1, 1, 0))
    world.tell(BlocksCounted(0, 4, 7, 7))
    assert not world.seen
    assert not world.checker.checked()["FIT"]


def test_fit_of_preempted_swapped_and_running_requests() -> None:
    world = _admitted()
    world.tell(BlocksCounted(0, 9, 2, 0))
    world.schedule(preempt=[0])
    world.tell(BlocksCounted(0, 5, 2, 0))
    world.schedule({0: 5})
    world.complete()
    world.schedule(swap=[0])
    world.tell(BlocksCounted(0, 9, 3, 5))
    assert not world.seen
    world.tell(BlocksCounted(0, 9, 3, 0))
    assert world.seen == ["FIT"]
    world.tell(BlocksCounted(9, 9, 3, 0))
    assert "request 9, which is not live" in world.checker.violations[-1].message


# -- METER -----------------------------------------------------------------------------------------


def test_meter_all_figures_are_there() -> None:
    world = _admitted()
    assert set(world.meter._figures()) == set(SCHEDULER_FIGURES)
    assert set(world.meter._figures_of(world.books.live[0])) == set(REQUEST_FIGURES)


def test_meter_times_end_where_they_should() -> None:
    world = World()
    world.arrive(4, 9)
    expected = world.meter._figures_of(world.books.live[0])
    assert (expected["queue_time_ns"], expected["prefill_time_ns"]) == (0, 0)
    for tokens in (2, 2, 1):
        world.step({0: tokens})
    expected = world.meter._figures_of(world.books.live[0])
    times = [expected[f"{name}_time_ns"] for name in ("queue", "prefill", "decode")]
    assert times == [10, 20, 15]


def test_meter_each_wrong_figure_is_seen() -> None:
    for name in (*SCHEDULER_FIGURES, *REQUEST_FIGURES):
        world = _admitted()
        world.view.falsified = {name: 77_777}
        world.checker.audit()
        assert set(world.seen) == {"METER"}, name
        whose = "" if name in SCHEDULER_FIGURES else " of request 0"
        violation = world.checker.violations[0]
        assert violation.message.startswith(f"{name}{whose} is exported as 77777, but it is ")
        assert violation.request == (0 if whose else None)
    world = _admitted()
    world.view.falsified = {"admissions": None}
    world.checker.audit()
    assert "admissions is not exported" in world.only().message
    world.checker.violations.clear()
    world.view.falsified = {"waiting_sequences": 3}
    world.step({0: 1})
    assert "waiting_sequences is exported as 3, but it is 0" in world.only().message


# -- the checker -----------------------------------------------------------------------------------


def test_operations_are_counted_and_violations_stamped() -> None:
    world = _admitted()
    world.checker.observe(Schedule(), Outcome("done"))
    world.checker.observe(Retire(), SKIPPED)
    world.schedule({0: 2})
    (violation, *_) = world.checker.observe(Schedule(), Outcome("done"))
    assert (violation.property, violation.op) == ("PLAN", 3)
    assert world.checker.operations == 4
    assert set(world.checker.counts) == set(SCHEDULING_OPERATIONS)
    assert world.checker.counts[Schedule] == {"done": 2, "refused": 0, "skipped": 0}
    world.checker.pass_over(Retire)
    assert world.checker.counts[Retire]["skipped"] == 2


@pytest.mark.parametrize("hook", ["after_event", "conclude", "audit"])
def test_a_check_that_stumbles_makes_the_verdict_unknown(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*arguments: Any) -> None:
        raise ZeroDivisionError("a checker's own mistake")

    (live,) = [check for check in SCHEDULING_CHECKS if check.id() == "LIVE"]
    replacement: Callable[..., Any] = raises
    if hook == "after_event":
        replacement = lambda self: {RequestArrived: raises}  # noqa: E731
    monkeypatch.setattr(live, hook, replacement)
    world = World()

    def run() -> None:
        world.arrive(4)
        world.checker.audit()

    with pytest.raises(CheckerError, match=r"^at operation 0: .*a checker's own mistake"):
        run()
    world.checker.violations.append(Violation("CRASH", "seen before"))
    world.checker.audit()


def test_goals_of_refusals_and_aborts() -> None:
    world = World(blocks=2, requests=1, watermark_blocks=1)
    world.arrive(4, 5)
    world.arrive(4)
    world.arrive(8)
    world.step({0: 4})
    world.cancel(1)
    world.schedule({0: 1}, preempt=[])
    world.complete()
    world.schedule(preempt=[0])
    world.cancel(0)
    world.arrive(4)
    world.schedule({2: 4})
    world.cancel(2)
    once = (
        "aborted-waiting",
        "aborted-running",
        "aborted-preempted",
        "no-block-left",
        "waits-for-blocks",
        "prompt-in-chunks",
        "preempted-for-recompute",
    )
    oftener = {"admitted": 2, "sequences-exhausted": 3, "waits-for-watermark": 3}
    assert _met(world) == dict.fromkeys(once, 1) | oftener


# -- copies, and requests that wait for them -------------------------------------------------------


def test_waiting_for_kv_is_right() -> None:
    world = TieredWorld(promises=replace(ALL, strict_priority=False))
    world.arrive(9, 9)
    world.arrive(4, 2)
    copies = [world.promote(0), world.promote(0, row=1)]
    world.defer(0)
    world.schedule({})
    world.deliver(copies[0])
    world.defer(0)
    world.schedule({})
    world.deliver(copies[1])
    world.defer()
    assert world.books.figures.stalls == 2
    assert world.books.figures.stall_ns == 13 + 13
    assert world.books.figures.copies == {"promote": 2}
    assert world.books.figures.copy_busy_ns == {"promote": 26}
    assert world.checker.goals.hits["deferred-for-kv"] == 2
    assert not world.seen


def test_a_request_is_admitted_with_the_kv_that_it_waited_for() -> None:
    world = TieredWorld()
    world.arrive(9, 9)
    world.promote(0, rows=2)
    world.defer(0)
    world.deliver(0)
    world.defer()
    world.plan({0: 9})
    name = world.names
    world.cache.requests[name].computed = 8
    world.tell(
        Scheduled(0, world.now_ns, None, (Part(0, 1, name),), (0,), (), (), ()),
    )
    hits = world.checker.goals.hits
    assert hits["promoted-before-admission"] == hits["prefix-hit-at-admission"] == 1


def test_plan_nobody_is_admitted_while_kv_is_on_its_way() -> None:
    for admitted, words in (
        (0, "admits request 0, while KV is on its way to it"),
        (1, "admits request 1, while KV is on its way to request 0, which arrived before"),
    ):
        world = TieredWorld()
        world.arrive(9)
        world.arrive(9)
        world.promote(0)
        world.defer(0)
        world.schedule({admitted: 9})
        assert words in _first(world, "PLAN").message


def test_live_who_is_deferred_has_kv_on_its_way() -> None:
    words = "request 0 is deferred, but no copy in flight brings the first block"
    world = TieredWorld()
    world.arrive(9)
    world.defer(0)
    assert words in _first(world, "LIVE").message
    assert _first(world, "LIVE").request == 0

    world = TieredWorld()
    world.arrive(9)
    world.promote(0, row=1)  # not the first
    world.defer(0)
    assert words in _first(world, "LIVE").message

    world = TieredWorld()
    world.arrive(9)
    world.promote(0)
    world.defer(0)
    world.deliver(0)
    assert not world.seen
    world.defer(0)
    assert words in _first(world, "LIVE").message

    world = TieredWorld()
    world.arrive(9, 2)
    world.step({0: 9})
    world.defer(0)
    assert "request 0 is deferred, but does not wait" in _first(world, "LIVE").message


def test_live_a_block_of_its_last_token_alone_is_not_waited_for() -> None:
    """A hit ends below the last token: a prompt of 8 tokens needs its first block only."""
    world = TieredWorld()
    world.arrive(8)
    world.promote(0, rows=2)
    world.defer(0)
    world.deliver(0)
    world.promote(0, row=1)
    world.defer(0)
    assert "deferred, but no copy" in _first(world, "LIVE").message


def test_live_kv_on_its_way_excuses_a_stall_as_long_as_it_is() -> None:
    world = TieredWorld()
    world.arrive(9)
    world.promote(0, due_ns=1 << 40, latency_ns=(1 << 40) - 6)
    world.defer(0)
    for _ in range(2 * GRACE):
        world.schedule({})
    assert not world.seen
    world.books.deferred = ()
    world.deliver(0, now_ns=1 << 40)
    for _ in range(GRACE):
        world.schedule({})
    assert "nothing was run in" in world.only().message


def test_live_blocks_that_a_copy_alone_holds_excuse_a_stall() -> None:
    world = TieredWorld(blocks=2)
    world.arrive(4, 2)
    world.schedule({0: 4})
    copy = world.store(0)
    world.complete()
    world.cancel(0)
    world.arrive(8)
    for _ in range(2 * GRACE):
        world.schedule({})
    assert not world.seen
    world.deliver(copy)
    for _ in range(GRACE):
        world.schedule({})
    assert "nothing was run in" in world.only().message


def test_live_blocks_that_a_copy_to_the_device_holds_excuse_a_stall() -> None:
    world = TieredWorld(blocks=3)
    world.arrive(9)
    copy = world.promote(0)
    for _ in range(2 * GRACE):
        world.schedule({})
    assert not world.seen
    world.deliver(copy)
    for _ in range(GRACE):
        world.schedule({})
    assert "nothing was run in" in world.only().message


@pytest.mark.parametrize(
    ("semantics", "rows"),
    [
        (Semantics(), (1, 1, 2, 2, 3, 4)),
        (Semantics(groups=2), (1, 1, 2, 2, 3, 4)),
        (Semantics(groups=2, shared_pool=True), (2, 2, 4, 4, 6, 8)),
        (Semantics(groups=2, shared_pool=True, block_sizes=(2, 4)), (2, 2, 3, 3, 5, 6)),
    ],
)
def test_blocks_of_groups_that_share_a_pool_are_counted_together(
    semantics: Semantics, rows: Sequence[int]
) -> None:
    configuration = Configuration(blocks=8, block_size=2)
    cache = Books(configuration, semantics)
    books = SchedulingBooks(Limits(), Promises(), configuration, cache)
    assert tuple(books.rows(tokens) for tokens in (1, 2, 3, 4, 5, 8)) == tuple(rows)


def test_live_blocks_that_a_request_holds_too_excuse_nothing() -> None:
    world = TieredWorld(blocks=2)
    world.arrive(4, 2)
    world.schedule({0: 4})
    world.store(0)
    world.complete()
    for _ in range(GRACE):
        world.schedule({})
    assert "nothing was run in" in world.only().message


def test_promises_pass_over_those_that_wait_for_kv() -> None:
    for deferred in (True, False):
        world = TieredWorld(promises=Promises(work_conserving=True))
        world.arrive(9)
        if deferred:
            world.promote(0)
            world.defer(0)
        world.schedule({})
        assert world.seen == ([] if deferred else ["BATCH"])

        world = TieredWorld(promises=Promises(strict_priority=True))
        world.arrive(4, 9, priority=3)
        world.step({0: 4})
        world.schedule(preempt=[0])
        world.arrive(9, priority=2)
        world.arrive(9, priority=1)
        if deferred:
            world.promote(1)
            world.defer(1)
        world.schedule({0: 5})
        assert world.seen == ([] if deferred else ["PRIORITY"])

        world = TieredWorld(promises=Promises(starvation_bound=2))
        world.arrive(9)
        world.arrive(4, 9)
        world.step({1: 4})
        if deferred:
            world.promote(0, due_ns=10_006, latency_ns=10_000 - 15)
            world.defer(0)
        for _ in range(2):
            world.step({1: 1})
        assert world.seen == ([] if deferred else ["STARVE"])


def test_fcfs_deferral_is_no_excuse_to_overtake() -> None:
    world = TieredWorld(promises=Promises(fcfs=True))
    world.arrive(9)
    world.arrive(9)
    world.promote(0)
    world.defer(0)
    world.schedule({1: 9})
    assert {"FCFS", "PLAN"} == set(world.seen)


@pytest.mark.parametrize(
    ("falsified", "words"),
    [
        ({"due_ns": 24}, "is due at 24 ns, but its channel is free at 13 ns and it takes 13 ns"),
        ({"latency_ns": 8}, "it takes 14 ns: that is 27 ns"),
        ({"ps_per_byte": 2}, "it takes 11 ns: that is 24 ns"),
        ({"bytes": 1000}, "is queued as promote of 1 blocks, 1000 bytes"),
        ({"blocks": 2}, "is queued as promote of 2 blocks, 2000 bytes"),
        ({"kind": "fetch", "due_ns": 13}, "is queued as fetch of 1 blocks"),
        ({"transfer": 0}, "transfer 0 is queued, but it is queued already"),
        ({"transfer": 9}, "transfer 9 is queued, but it is not in flight"),
    ],
)
def test_meter_what_is_queued(falsified: dict[str, Any], words: str) -> None:
    world = TieredWorld()
    world.arrive(9)
    world.promote(0)
    world.promote(0, row=1)
    assert not world.seen
    world = TieredWorld()
    world.arrive(9)
    world.promote(0)
    world.promote(0, row=1, **falsified)
    assert words in _first(world, "METER").message


def test_meter_copies_are_delivered_once_in_order_and_in_time() -> None:
    def world_of_two() -> TieredWorld:
        world = TieredWorld()
        world.arrive(9, 2)
        world.promote(0)
        world.promote(0, row=1)
        return world

    world = world_of_two()
    world.deliver(0, now_ns=12)
    assert "transfer 0 (promote) is delivered at 12 ns, but is due at 13 ns" in (
        _first(world, "METER").message
    )
    world = world_of_two()
    world.deliver(1)
    assert "delivered before transfer 0, which its channel serves first" in (
        _first(world, "METER").message
    )
    world = world_of_two()
    world.deliver(0, ended=False)
    assert "transfer 0 is delivered, but is still in flight" in _first(world, "METER").message
    world = world_of_two()
    world.deliver(0)
    world.deliver(0)
    assert "transfer 0 is delivered, but was not queued" in _first(world, "METER").message
    world = world_of_two()
    world.now_ns = 20
    world.defer(0)
    assert "was due at 13 ns, and is not delivered at 20 ns" in _first(world, "METER").message
    world = world_of_two()
    world.step({0: 9})
    assert "was due at 13 ns, and is not delivered at 15 ns" in _first(world, "METER").message


def test_meter_no_copy_is_lost() -> None:
    world = TieredWorld()
    world.arrive(4, 2)
    world.schedule({0: 4})
    world.store(0, queued=False)
    world.complete()
    assert "transfer 0 is in flight, but not queued" in _first(world, "METER").message


def test_meter_an_aborted_request_waits_no_longer() -> None:
    world = TieredWorld()
    world.arrive(9)
    world.promote(0)
    world.defer(0)
    world.cancel(0)
    world.deliver(0)
    world.defer()
    assert (world.books.figures.stalls, world.books.figures.stall_ns) == (1, 0)
    assert not world.seen
