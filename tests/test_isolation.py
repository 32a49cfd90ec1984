"""Whatever a policy does is an answer: a plan, or what is wrong with it, and where, and when.

Here policies do what the code of others does at its worst; that of plans which break the contract
is in ``test_scheduler.py``.
"""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from kvproof.engine.isolation import EXIT_HANG, PolicyError, TookTooLong, call_policy
from kvproof.engine.policies import POLICIES
from kvproof.engine.policy import Draft, Plan, SchedulerPolicy, SchedulerState
from kvproof.invariants.operations import Arrive, Run, Schedule, Segment
from kvproof.invariants.outcomes import POLICY_FAILED, Outcome
from kvproof.invariants.scheduling.vocabulary import PlanRejected
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

HERE = Path(__file__).name
STATE = (
    "iteration 1: 14 of 16 blocks free (block size 4; 0 of them cached), token budget 8192, "
    "at most 64 running, watermark 0, chunked prefill on; 1 waiting; "
    "r0 (running, 6+1 tokens, 6 computed, 2 blocks), "
    "r1 (waiting, 9+0 tokens, 0 computed, 0 blocks)"
)


def _subject() -> SchedulerSubject:
    """One request runs, one waits."""
    subject = SchedulerSubject(Configuration(run_ahead=1), policy=POLICIES["fcfs"])
    subject.apply(Arrive((Segment(0, 6),), 3))
    subject.apply(Run(1))
    subject.apply(Arrive((Segment(1, 9),), 2))
    subject.drain_events()
    return subject


def rejected(policy: object, *, seconds: float = 5.0) -> PlanRejected:
    """What is said of the policy's plan; nothing of it must have been applied."""
    subject = _subject()
    scheduler = subject.scheduler
    scheduler.policy = cast(SchedulerPolicy, policy)
    scheduler._seconds_per_call = seconds
    figures = scheduler.metrics()
    assert subject.apply(Schedule()) == Outcome("refused", POLICY_FAILED)
    event = subject.drain_events()[-1]
    assert isinstance(event, PlanRejected)
    assert scheduler.metrics() == figures
    assert [r.id for r in scheduler.waiting] == [1]
    scheduler.policy = POLICIES["fcfs"]()
    assert subject.apply(Run(9)).status == "done", "the scheduler goes on"
    assert not scheduler.jobs
    return event


def place(policy: object) -> str:
    """Where the policy does what is wrong: the line with the mark."""
    lines, first = inspect.getsourcelines(type(policy))
    (offset,) = [offset for offset, line in enumerate(lines) if line.rstrip().endswith("# !")]
    return f"{HERE}:{first + offset}"


# -- policies that raise ---------------------------------------------------------------------------


class Raises:
    def plan(self, state: SchedulerState) -> Plan:
        raise KeyError("no such request")  # !


class RaisesNothingToSay:
    def plan(self, state: SchedulerState) -> Plan:
        raise NotImplementedError  # !


class RaisesBelow:
    def plan(self, state: SchedulerState) -> Plan:
        return self._chosen(state)

    def _chosen(self, state: SchedulerState) -> Plan:
        return Plan(((state.running[7].id, 1),))  # !


class AsksForStrangers:
    """What it asks makes the engine raise; the place is still the policy's."""

    def plan(self, state: SchedulerState) -> Plan:
        request = state.running[0]
        stranger = type(request)(99, "waiting", 0, 0, 4, 1)
        state.blocks_for(stranger, 4)  # !
        return Plan()


class Recurses:
    def plan(self, state: SchedulerState) -> Plan:
        return self.plan(state)


class EndsTheProcess:
    def plan(self, state: SchedulerState) -> Plan:
        sys.exit(0)  # !


class Closes:
    def plan(self, state: SchedulerState) -> Plan:
        raise GeneratorExit  # !


class Beyond(BaseException):
    """No Exception."""


class RaisesItsOwn:
    def plan(self, state: SchedulerState) -> Plan:
        raise Beyond("exceptions")  # !


class NamesAnObject:
    """Its address differs from run to run, and must not make digests differ."""

    def plan(self, state: SchedulerState) -> Plan:
        raise ValueError(f"what is {object()}?")  # !


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Raises(), "KeyError: 'no such request'"),
        (RaisesNothingToSay(), "NotImplementedError"),
        (RaisesBelow(), "IndexError: tuple index out of range"),
        (AsksForStrangers(), "KeyError: 99"),
        (EndsTheProcess(), "SystemExit: 0"),
        (Closes(), "GeneratorExit"),
        (RaisesItsOwn(), "Beyond: exceptions"),
        (NamesAnObject(), "ValueError: what is <object object>?"),
    ],
)
def test_a_policy_that_raises_is_told_with_its_name_and_place(policy: object, said: str) -> None:
    event = rejected(policy)
    assert event.kind == "exception"
    assert event.message == f"{type(policy).__name__}.plan raised {said} ({place(policy)})"
    assert event.state == STATE


def test_ctrl_c_is_no_mistake_of_the_policy() -> None:
    class Interrupted:
        def plan(self, state: SchedulerState) -> Plan:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_policy(Interrupted(), NO_STATE, 5.0)


def test_what_a_policy_prints_is_no_output_of_kvproof(capsys: pytest.CaptureFixture[str]) -> None:
    class Talks:
        def plan(self, state: SchedulerState) -> Plan:
            print("thinking")
            return Plan()

    assert call_policy(Talks(), NO_STATE, 5.0) == Plan()
    assert capsys.readouterr() == ("", "thinking\n")
    print("kvproof again")
    assert capsys.readouterr() == ("kvproof again\n", "")


def test_a_policy_that_recurses_for_ever_is_an_exception() -> None:
    event = rejected(Recurses())
    assert event.kind == "exception"
    assert event.message.startswith("Recurses.plan raised RecursionError: maximum recursion")
    assert f"({HERE}:" in event.message


# -- policies that take too long -------------------------------------------------------------------


class Hangs:
    def plan(self, state: SchedulerState) -> Plan:
        while True:
            pass


class Sleeps:
    def plan(self, state: SchedulerState) -> Plan:
        time.sleep(60)
        return Plan()


class SwallowsExceptions:
    """Tries again and again, whatever happens."""

    def plan(self, state: SchedulerState) -> Plan:
        while True:
            try:
                state.running[7]
            except Exception:
                continue


class SwallowsAllOnce:
    """Even what ends it; but it is interrupted again."""

    def plan(self, state: SchedulerState) -> Plan:
        for _ in range(2):
            try:
                time.sleep(60)
            except BaseException:
                continue
        while True:
            pass


@pytest.mark.parametrize("policy", [Hangs(), Sleeps(), SwallowsExceptions(), SwallowsAllOnce()])
def test_a_policy_that_does_not_return_is_interrupted(policy: object) -> None:
    started = time.monotonic()
    event = rejected(policy, seconds=0.1)
    assert time.monotonic() - started < 5
    assert event.kind == "hang"
    assert event.message == f"{type(policy).__name__}.plan did not return within 0.1 s"
    assert event.state == STATE


def test_a_machine_that_is_busy_with_others_is_no_hang() -> None:
    """A process that waits does not compute: it has ten times as long."""

    class Waits:
        def plan(self, state: SchedulerState) -> Plan:
            time.sleep(0.3)
            return Plan()

    assert call_policy(Waits(), NO_STATE, 0.1) == Plan()


def test_time_that_is_up_before_the_policy_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes while the limit is set up: it must not be left behind."""
    arm = signal.setitimer

    def late(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        before = arm(which, seconds, interval)
        if seconds:
            raise TookTooLong
        return before

    monkeypatch.setattr(signal, "setitimer", late)
    with pytest.raises(PolicyError, match="did not return"):
        call_policy(Idles(), NO_STATE, 0.05)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


SWALLOWS_ALL = """
from kvproof.engine.isolation import call_policy

class SwallowsAll:
    def plan(self, state):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass

call_policy(SwallowsAll(), None, 0.01)
print("returned")
"""


def test_a_policy_that_swallows_every_interrupt_ends_the_process_and_is_named() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SWALLOWS_ALL], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (EXIT_HANG, "")
    assert re.fullmatch(
        r"kvproof: the policy hangs at <string>:\d+ and swallows every interrupt: it cannot be "
        r"stopped, so the check ends here\n",
        result.stderr,
    )


@pytest.fixture
def _alarms_undone() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)


class Idles:
    def plan(self, state: SchedulerState) -> Plan:
        return Plan()


NO_STATE = cast(SchedulerState, None)


@pytest.mark.usefixtures("_alarms_undone")
@pytest.mark.parametrize("policy", [Idles(), Raises(), Hangs()])
def test_somebody_elses_alarm_is_put_back(policy: SchedulerPolicy) -> None:
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 60, 7)
    with suppress(PolicyError):
        call_policy(policy, NO_STATE, 0.05)
    assert signal.getsignal(signal.SIGALRM) is handler
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert 50 < left <= 60
    assert interval == 7
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.raise_signal(signal.SIGALRM)
    assert heard == [signal.SIGALRM]


@pytest.mark.parametrize("policy", [Idles(), Raises(), Hangs()])
def test_no_alarm_is_left_behind(policy: SchedulerPolicy) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with suppress(PolicyError):
        call_policy(policy, NO_STATE, 0.05)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
    time.sleep(0.06)


def test_other_threads_have_no_time_limit_but_work() -> None:
    answers: list[Any] = []

    class Slow:
        def plan(self, state: SchedulerState) -> Plan:
            time.sleep(0.05)
            return Plan()

    def in_thread() -> None:
        answers.append(call_policy(Slow(), NO_STATE, 0.001))
        try:
            call_policy(cast(SchedulerPolicy, Raises()), NO_STATE, 0.001)
        except PolicyError as error:
            answers.append(error.kind)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(10)
    assert answers == [Plan(), "exception"]


# -- policies that change what they were given -----------------------------------------------------


def _sets_an_attribute(state: Any) -> None:
    state.free_blocks = 99


def _deletes_an_attribute(state: Any) -> None:
    del state.free_blocks


def _adds_an_attribute(state: Any) -> None:
    state.mine = 1


def _assigns_into_running(state: Any) -> None:
    state.running[0] = None


def _deletes_from_running(state: Any) -> None:
    del state.running[0]


def _assigns_into_waiting(state: Any) -> None:
    state.waiting[0] = None


def _deletes_from_waiting(state: Any) -> None:
    del state.waiting[0]


def _appends_to_waiting(state: Any) -> None:
    state.waiting.append(state.running[0])


def _pops_from_waiting(state: Any) -> None:
    state.waiting.pop()


def _sorts_waiting(state: Any) -> None:
    state.waiting.sort()


def _removes_from_running(state: Any) -> None:
    state.running.remove(state.running[0])


def _changes_a_request(state: Any) -> None:
    state.running[0].priority = 9


def _changes_the_limits(state: Any) -> None:
    state.limits.token_budget = 9


CHANGES = (
    _sets_an_attribute,
    _deletes_an_attribute,
    _adds_an_attribute,
    _assigns_into_running,
    _deletes_from_running,
    _assigns_into_waiting,
    _deletes_from_waiting,
    _appends_to_waiting,
    _pops_from_waiting,
    _sorts_waiting,
    _removes_from_running,
    _changes_a_request,
    _changes_the_limits,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_policy_that_changes_its_state_is_a_mutation(change: Callable[[Any], None]) -> None:
    class Changes:
        def plan(self, state: SchedulerState) -> Plan:
            change(state)
            return Plan()

    event = rejected(Changes())
    assert event.kind == "mutation"
    line = change.__code__.co_firstlineno + 1
    assert event.message.startswith("Changes.plan tried to change what it must not: ")
    assert event.message.endswith(f" ({HERE}:{line})")
    assert event.state == STATE


class LosesItsOwnQueue:
    """That is a mistake, but none that has to do with what it was given."""

    queue: Any = None

    def plan(self, state: SchedulerState) -> Plan:
        self.queue.append(state.running[0])  # !
        return Plan()


class MisspellsItsOwn(LosesItsOwnQueue):
    def plan(self, state: SchedulerState) -> Plan:
        self.que.append(1)  # type: ignore[attr-defined]  # !
        return Plan()


@pytest.mark.parametrize("policy", [LosesItsOwnQueue(), MisspellsItsOwn()])
def test_a_mistake_with_its_own_things_is_no_mutation(policy: object) -> None:
    event = rejected(policy)
    assert event.kind == "exception"
    assert event.message.startswith(f"{type(policy).__name__}.plan raised AttributeError: ")
    assert event.message.endswith(f"({place(policy)})")


class KeepsItsState:
    """Uses the state of the first call in the second."""

    def __init__(self, use: Callable[[SchedulerState], object]) -> None:
        self.use = use
        self.kept: SchedulerState | None = None

    def plan(self, state: SchedulerState) -> Plan:
        if self.kept is None:
            self.kept = state
        else:
            self.use(self.kept)  # !
        return Plan()


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state.blocks_for(state.waiting[0], 1),
        lambda state: state.cached_tokens(state.waiting[0]),
        lambda state: state.blocks_freed(state.running[0]),
        lambda state: state.draft().run(state.waiting[0]),
        lambda state: state.draft().preempt(state.running[0]),
    ],
    ids=["blocks_for", "cached_tokens", "blocks_freed", "run", "preempt"],
)
def test_a_state_that_was_kept_cannot_be_asked(use: Callable[[SchedulerState], object]) -> None:
    subject = _subject()
    subject.scheduler.policy = KeepsItsState(use)
    assert subject.apply(Schedule()).status == "done"
    subject.drain_events()
    assert subject.apply(Schedule()).reason == POLICY_FAILED
    (event,) = subject.drain_events()
    assert isinstance(event, PlanRejected)
    assert event.kind == "exception"
    assert "RuntimeError: a SchedulerState is valid during its own call of plan only" in (
        event.message
    )
    assert f"({HERE}:" in event.message


def test_what_was_read_from_a_state_stays_as_it_was() -> None:
    kept: list[Any] = []

    class Reads:
        def plan(self, state: SchedulerState) -> Plan:
            kept.extend((state.running, state.running[0].output_tokens, state.free_blocks))
            return Plan(((0, 1),))

    subject = _subject()
    subject.scheduler.policy = Reads()
    subject.apply(Run(2))
    running, _, free, later, _, later_free = kept
    assert (running[0].output_tokens, later[0].output_tokens) == (1, 2)
    assert (free, later_free) == (14, 14)


def test_a_policy_cannot_get_at_the_waiting_list() -> None:
    class Slices:
        def plan(self, state: SchedulerState) -> Plan:
            first = cast(Any, state.waiting[:1])
            assert type(first) is tuple
            assert [*state.waiting] == [*reversed(state.waiting)] == [*first]
            assert len(state.waiting) == 1
            assert state.waiting[-1] in state.waiting
            return Plan()

    subject = _subject()
    subject.scheduler.policy = Slices()
    assert subject.apply(Schedule()).status == "done"


# -- what is no plan -------------------------------------------------------------------------------


class Returns:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def plan(self, state: SchedulerState) -> Any:
        return self.answer


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError


class MyPlan(Plan, frozen=True):
    """Its own kind of plan, which is one all the same."""

    why: str = ""


def plan(**fields: Any) -> Plan:
    """A plan with fields of any type: nobody looks when it is made."""
    return Plan(**fields)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "None instead of a Plan"),
        ([], "[] instead of a Plan"),
        ([(0, 1)], "[(0, 1)] instead of a Plan"),
        ({"run": ()}, "{'run': ()} instead of a Plan"),
        ("x" * 200, f"'{'x' * 76}… instead of a Plan"),
        (Plan, "<class 'kvproof.invariants.scheduling.vocabulary.Plan'> instead of a Plan"),
        (Unspeakable(), "a Unspeakable instead of a Plan"),
        (object(), "<object object> instead of a Plan"),
        (plan(run=None), "a Plan whose run is no tuple of (request, tokens): None"),
        (plan(run={0: 1}), "a Plan whose run is no tuple of (request, tokens): {0: 1}"),
        (plan(run=(0, 1)), "a Plan whose run is no tuple of (request, tokens): (0, 1)"),
        (plan(run=((0,),)), "a Plan whose run is no tuple of (request, tokens): ((0,),)"),
        (plan(run=((0, 1.0),)), "a Plan whose run is no tuple of (request, tokens): ((0, 1.0),)"),
        (plan(run=(("0", 1),)), "a Plan whose run is no tuple of (request, tokens): (('0', 1),)"),
        (plan(run=((0, True),)), "a Plan whose run is no tuple of (request, tokens): ((0, True),)"),
        (plan(preempt=0), "a Plan whose preempt is no tuple of requests: 0"),
        (plan(preempt=(0.0,)), "a Plan whose preempt is no tuple of requests: (0.0,)"),
        (plan(preempt=deque([0])), "a Plan whose preempt is no tuple of requests: deque([0])"),
        (plan(swap=(None,)), "a Plan whose swap is no tuple of requests: (None,)"),
        (plan(reserve=(1,)), "a Plan whose reserve is no tuple of (request, tokens): (1,)"),
    ],
)
def test_what_is_no_plan_is_told_as_what_it_is(answer: object, said: str) -> None:
    event = rejected(Returns(answer))
    assert event.kind == "wrong_type"
    assert event.message == f"Returns.plan returned {said}"
    assert event.state == STATE


def test_a_draft_is_no_plan() -> None:
    class Forgets:
        def plan(self, state: SchedulerState) -> Any:
            return state.draft()

    event = rejected(Forgets())
    assert event.kind == "wrong_type"
    assert Draft.__name__ in event.message


def test_a_subclass_of_plan_is_a_plan() -> None:
    subject = _subject()
    subject.scheduler.policy = Returns(MyPlan(((0, 1),), why="it is first"))
    assert subject.apply(Schedule()).count == 1
    event = rejected(Returns(MyPlan(cast(Any, 7))))
    assert (event.kind, event.message[:42]) == (
        "wrong_type",
        "Returns.plan returned a Plan whose run is ",
    )


@pytest.mark.filterwarnings("error")  # as "coroutine was never awaited" would be
def test_a_plan_that_must_be_awaited_is_no_plan() -> None:
    class Awaits:
        async def plan(self, state: SchedulerState) -> Plan:
            return Plan()

    event = rejected(Awaits())
    assert (event.kind, event.message) == (
        "wrong_type",
        "Awaits.plan returned a coroutine instead of a Plan: plan must not be async",
    )


def test_lists_will_do_for_tuples() -> None:
    subject = _subject()
    subject.scheduler.policy = Returns(plan(run=[[0, 1]], preempt=[], reserve=[]))
    assert subject.apply(Schedule()).count == 1


@pytest.mark.parametrize("number", [-1, 2, 10**30])
def test_requests_that_there_are_not(number: int) -> None:
    for bad in (plan(run=((number, 1),)), plan(preempt=(number,)), plan(swap=(number,))):
        event = rejected(Returns(bad))
        assert event.kind == "unknown_request"
        assert event.message.endswith(f"request {number}: there is none")


# -- as a finding ----------------------------------------------------------------------------------

MODULE = '''"""Somebody's policy."""


class Theirs:
    plans: int = 0

    def plan(self, state):
        self.plans += 1
        if self.plans > 1:
            return 1 / 0
        return state.draft().plan()
'''


def test_a_failure_is_a_finding_that_names_the_file_of_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(MODULE)
    subject = subject_factory(f"scheduler:{path}:Theirs")(Configuration())
    harness = SchedulingHarness(cast(SchedulerSubject, subject))
    harness.perform(Arrive((Segment(0, 4),)))
    harness.perform(Schedule())
    assert not harness.violations
    harness.perform(Schedule())
    (violation,) = harness.violations
    assert (violation.property, violation.op) == ("PLAN", 2)
    assert violation.message == (
        "exception: Theirs.plan raised ZeroDivisionError: division by zero (theirs.py:10)"
    )
    rejected = harness.last_events[-1]
    assert isinstance(rejected, PlanRejected)
    assert rejected.state.startswith("iteration 1: 16 of 16 blocks free (block size 4; 0 of")
