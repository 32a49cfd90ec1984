"""Checking a policy of one's own: the mistake is found, told, shrunk, exported and replayed.

The examples in ``stateful_tests/examples/policies`` each make one mistake that one makes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import Struct

from kvproof.engine.eviction import LeastRecentlyUsed
from kvproof.engine.policies import POLICY_NAMES
from kvproof.engine.policies.fcfs import FirstComeFirstServed
from kvproof.engine.policy import Plan
from kvproof.fuzz import campaign as campaign_module
from kvproof.fuzz import shrink as shrink_module
from kvproof.fuzz.campaign import check_subject
from kvproof.fuzz.cli.check import _hint
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.replay import Replay, first_violation, replay
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.case import Case, load_case, save_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import Arrive, Run, Schedule, Segment
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.export import write_finding
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.subjects.policies import (
    eviction_factory,
    is_eviction_policy,
    policy_factory,
)
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject
from kvproof.stateful_tests.totals import Totals

EXAMPLES = Path(__file__).parent.parent / "stateful_tests" / "examples" / "policies"


class Found(Struct, frozen=True):
    """A finding of a check with fixed seeds."""

    case: Case
    violation: Violation
    replayed: Replay
    explanation: str


@cache
def checked(subject: str) -> Found:
    """Searched, shrunk, replayed and told, as ``kvproof check`` does it."""
    found = search(subject, "a", seconds=60, totals=Totals())
    assert found is not None
    shrunk = shrink(found.case)
    assert shrunk is not None
    replayed = replay(shrunk.case, record=True)
    size = shrunk.case.configuration.block_size
    return Found(
        shrunk.case,
        shrunk.violation,
        replayed,
        explain(shrunk.violation, replayed.moments, size),
    )


# -- the examples ----------------------------------------------------------------------------------

EDGE = "off_by_one_at_block_edge.py:OwnArithmetic"
STARVES = "starves_long_requests.py:ShortestAlwaysFirst"
WRONG = (
    (
        "counts_cached_blocks_twice.py:UsesTheWholePool",
        "PLAN",
        r"(blocks|watermark): the plan needs \d+ blocks \(.*\), but \d+ are free \(\d+ of them "
        r"cached-free, which free_blocks includes\)",
    ),
    (
        "deadlocks_half_loaded.py:NeverPreempts",
        "LIVE",
        r"request \d+ holds \d+ of the \d+ blocks that its \d+ tokens need, request \d+ holds .*; "
        r"none is free: each waits for the others, and nobody is preempted",
    ),
    (
        "forgets_token_budget.py:ChunksPrompts",
        "PLAN",
        r"budget: the plan computes \d+ tokens in one iteration, but the token budget is \d+",
    ),
    (EDGE, "PLAN", r"(blocks|watermark): the plan needs \d+ blocks \(1 for r0.*\), but \d+ are fr"),
    (
        "preempts_what_it_admitted.py:RoundRobin",
        "LIVE",
        r"request \d+ is preempted over and over, .* iteration \d+ preempts \d+ and runs \d+; ",
    ),
    (
        STARVES,
        "STARVE",
        r"request 0, waiting, was left out of 11 iterations .* ran requests which arrived later: "
        r"the policy promises at most 10",
    ),
)


@pytest.mark.parametrize(("name", "property", "sentence"), WRONG, ids=lambda value: value[:24])
def test_a_mistake_is_found_told_and_shrunk(name: str, property: str, sentence: str) -> None:
    found = checked(f"scheduler:{EXAMPLES / name}")
    assert found.violation.property == property
    assert re.search(sentence, found.violation.message)
    assert re.search(sentence, found.explanation.replace("\n", " "))
    assert f"{property} at operation" in found.explanation
    assert len(found.case.operations) <= 6
    assert found.replayed.verdict == "fail"
    assert found.violation in found.replayed.violations


def test_every_wrong_example_is_here() -> None:
    assert {name.partition(":")[0] for name, _, _ in WRONG} | {"shortest_first.py"} == {
        path.name for path in EXAMPLES.glob("*.py")
    }


def test_a_rejected_plan_is_told_with_the_state_that_provoked_it() -> None:
    explanation = checked(f"scheduler:{EXAMPLES / EDGE}").explanation
    assert re.search(
        r"iteration \d+: \d+ of \d+ blocks free \(block size \d+; \d+ of them", explanation
    )
    assert re.search(r"r0 \(running, \d+\+\d+ tokens, \d+ computed, \d+ blocks\)", explanation)


def test_the_story_tells_what_the_iterations_did() -> None:
    explanation = checked(f"scheduler:{EXAMPLES / STARVES}").explanation
    assert re.search(r"r0 arrives \(\d+ prompt tokens, at most \d+ output\)", explanation)
    assert re.search(r"iterations? \d+( to \d+)? runs? r1 for 1", explanation)


def test_the_correct_example_passes() -> None:
    totals = Totals()
    subject = f"scheduler:{EXAMPLES / 'shortest_first.py'}:ShortestFirst"
    assert search(subject, "right", seconds=600, totals=totals, runs_max=100) is None
    assert (totals.runs, totals.problems) == (100, [])


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_built_in_policy_passes(name: str) -> None:
    totals = Totals()
    assert search(f"scheduler:{name}", "built-in", seconds=600, totals=totals, runs_max=60) is None
    assert (totals.runs, totals.problems) == (60, [])


def test_a_check_of_a_wrong_policy_writes_its_finding(tmp_path: Path) -> None:
    subject = f"scheduler:{EXAMPLES / EDGE}"
    report = check_subject(subject, seconds=20, seed="a", out=tmp_path)
    assert report.verdict == "fail"
    assert report.finding is not None
    assert report.finding.violation.property == "PLAN"
    assert report.finding.case.subject == subject
    assert sorted(path.suffix for path in report.finding.files) == [".json", ".py", ".txt"]


# -- export and replay -----------------------------------------------------------------------------


def _exported(folder: Path) -> tuple[Found, Path, Path, Path]:
    found = checked(f"scheduler:{EXAMPLES / EDGE}")
    paths = write_finding(
        found.case, found.violation, found.explanation, folder, moments=found.replayed.moments
    )
    case, test, log = paths
    return found, case, test, log


def _python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=False,
    )


def test_an_exported_test_runs_and_fails(tmp_path: Path) -> None:
    found, _, test, _ = _exported(tmp_path)
    result = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed" in result.stdout
    assert found.violation.message[:40] in result.stdout


def test_a_log_tells_of_the_iterations(tmp_path: Path) -> None:
    *_, log = _exported(tmp_path)
    text = log.read_text()
    assert "Arrive(" in text or "arrive" in text
    assert "q0" in text, "requests by their names of arrival"


REPLAY = """
import sys
from pathlib import Path
from kvproof.fuzz.replay import replay
from kvproof.invariants.case import load_case
done = replay(load_case(Path(sys.argv[1])))
print(done.digest, done.verdict, done.ops)
"""


def test_a_case_replays_to_the_same_digest_in_a_fresh_process(tmp_path: Path) -> None:
    found, case, *_ = _exported(tmp_path)
    result = _python("-c", REPLAY, str(case), cwd=tmp_path)
    assert result.stdout.split() == [found.replayed.digest, "fail", str(found.replayed.ops)]


def test_a_case_whose_budget_holds_no_whole_prefill_is_bad_input(tmp_path: Path) -> None:
    limits = Limits(chunked_prefill=False, token_budget=8, max_model_tokens=9)
    path = tmp_path / "case.json"
    save_case(Case("scheduler:fcfs", Configuration(scheduling=limits), [Run(1)]), path)
    with pytest.raises(InputError, match=r"without chunked prefill the token budget \(8\) must"):
        replay(load_case(path))
    limits = Limits(chunked_prefill=False, token_budget=9, max_model_tokens=9)
    save_case(Case("scheduler:fcfs", Configuration(scheduling=limits), [Run(1)]), path)
    assert replay(load_case(path)).verdict == "pass"


def test_a_built_in_policys_case_replays_without_ado(tmp_path: Path) -> None:
    operations = checked(f"scheduler:{EXAMPLES / EDGE}").case.operations
    case = Case("scheduler:fcfs", Configuration(), operations)
    save_case(case, tmp_path / "case.json")
    replayed = replay(load_case(tmp_path / "case.json"), imports=False)
    assert replayed.verdict == "pass"


def test_a_case_may_not_import_the_policy_that_it_names(tmp_path: Path) -> None:
    """Somebody sends a case: it must not run code of its choice."""
    found, case, *_ = _exported(tmp_path)
    with pytest.raises(InputError, match=r"no part of kvproof: say --subject"):
        replay(found.case, imports=False)
    refused = _kvproof("replay", str(case), cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvproof: this case imports code of somebody's: if you trust it, add --subject "
        f"{found.case.subject}\n"
    )
    allowed = _kvproof("replay", str(case), "--subject", found.case.subject, cwd=tmp_path)
    assert allowed.returncode == 1
    assert found.replayed.digest[:16] in allowed.stdout.replace("\n", "")


def test_a_case_may_be_replayed_by_its_policy(tmp_path: Path) -> None:
    found, case, *_ = _exported(tmp_path)
    policy = found.case.subject.partition(":")[2]
    for command in ("replay", "shrink"):
        allowed = _kvproof(command, str(case), "--policy", policy, cwd=tmp_path)
        assert allowed.returncode == 1, allowed.stderr
        refused = _kvproof(command, str(case), "--policy", "fcfs", cwd=tmp_path)
        assert refused.returncode == 2
        assert refused.stderr == (
            f"kvproof: the case is of {found.case.subject}, but --subject says fcfs\n"
        )


@cache
def _unshrunk() -> Case:
    found = search(f"scheduler:{EXAMPLES / EDGE}", "a", seconds=60, totals=Totals())
    assert found is not None
    return found.case


def test_shrinking_has_a_time_limit() -> None:
    case = _unshrunk()
    shrunk = shrink(case, seconds_max=0)
    assert shrunk is not None
    assert (shrunk.replays, shrunk.violation.property) == (0, "PLAN")
    assert len(shrunk.case.operations) <= len(case.operations)


def test_shrinking_keeps_the_best_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    case, replays = _unshrunk(), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal replays
        replays += 1
        if replays > 30:
            raise KeyboardInterrupt
        return first_violation(*arguments)

    whole = shrink(case, seconds_max=0)
    monkeypatch.setattr(shrink_module, "first_violation", interrupted)
    shrunk = shrink(case)
    assert whole is not None
    assert shrunk is not None
    assert shrunk.violation.property == "PLAN"
    assert len(shrunk.case.operations) < len(whole.case.operations)
    monkeypatch.undo()
    assert replay(shrunk.case).verdict == "fail"


def test_shrinking_what_waits_is_limited_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return first_violation(*arguments)

    monkeypatch.setattr(shrink_module, "first_violation", slow)
    shrunk = shrink(_unshrunk(), seconds_max=1)
    assert shrunk is not None
    assert 0 < shrunk.replays <= 4


def test_what_is_interrupted_before_it_is_shrunk_is_told_as_it_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(case: Case) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign_module, "shrink", interrupted)
    report = check_subject(f"scheduler:{EXAMPLES / EDGE}", seconds=60, seed="a", out=None)
    assert report.finding is not None
    assert report.finding.violation.property == "PLAN"
    assert len(report.finding.case.operations) == report.finding.found_ops


def test_a_planted_fault_that_is_never_reached_tells_nothing(tmp_path: Path) -> None:
    fault = "urgent-request-waits"
    report = check_subject("scheduler:fcfs", seconds=2, seed="a", out=tmp_path, fault=fault)
    assert (report.verdict, report.finding) == ("unknown", None)
    assert (
        "the planted fault urgent-request-waits was never reached: scheduler:fcfs does not do what "
        "it breaks"
    ) in report.reasons


@pytest.mark.parametrize(
    ("subject", "hint"),
    [
        ("engine", "kvproof check --fault no-copy-on-write"),
        ("eviction:lru", "kvproof check --policy lru --fault no-copy-on-write"),
        (
            "scheduler:my file.py:Mine",
            "kvproof check --policy 'my file.py:Mine' --fault finished-request-keeps-its-blocks",
        ),
    ],
)
def test_the_hint_names_a_fault_of_what_was_checked(subject: str, hint: str) -> None:
    assert _hint(subject) == hint
    shown_in = fault_by_id(hint.rpartition(" ")[2]).subject
    assert shown_in.startswith("scheduler:") == subject.startswith("scheduler:")


def _kvproof(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
    return _python("-c", code, *arguments, cwd=cwd)


# -- what is no policy -----------------------------------------------------------------------------

USER_MODULE = '''"""Mostly wrong."""

from kvproof.engine.policy import Plan, Promises


class Good:
    def plan(self, state):
        return Plan()


class HasNoPlan:
    pass


class NeedsMore:
    def __init__(self, size):
        self.size = size

    def plan(self, state):
        return Plan()


class Leaves:
    def __init__(self):
        raise SystemExit(0)

    def plan(self, state):
        return Plan()


class PromisesAWord(Good):
    promises = "fcfs"


class PromisesLessThanNothing(Good):
    promises = Promises(starvation_bound=-1)


class PromisesOne(Good):
    promise = Promises(fcfs=True)


class PromisesMaybe(Good):
    promises = Promises(fcfs="maybe")


number = 7
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_MODULE)
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", r"unknown policy 'nope'; there are fcfs, .*, or MODULE:CLASS or FILE.py:CLASS"),
        ("{}:Nope", r"mine\.py has no class Nope$"),
        ("absent.py:Good", r"cannot be imported: FileNotFoundError: no file .*absent\.py"),
        ("no_such_module:Good", r"cannot be imported: ModuleNotFoundError: No module named 'no_s"),
        ("{}:HasNoPlan", r"has no method plan: see kvproof\.engine\.policy"),
        ("{}:number", r"has no method plan"),
        ("{}:NeedsMore", r"cannot be made: TypeError: .* missing 1 required positional argument"),
        ("{}:Leaves", r"cannot be made: SystemExit: 0"),
        ("{}:PromisesAWord", r"promises 'fcfs', which is no Promises"),
        ("{}:PromisesLessThanNothing", r"has wrong promises: Expected `int` >= 0 .*starvation_bo"),
        ("{}:PromisesOne", r"has Promises named 'promise': the attribute is called 'promises'$"),
        ("{}:PromisesMaybe", r"has wrong promises: Expected `bool`, got `str` .*fcfs"),
    ],
)
def test_what_is_no_policy_is_bad_input_in_one_line(name: str, said: str, module: Path) -> None:
    policy = name.format(module)
    with pytest.raises(InputError, match=said) as caught:
        subject_factory(f"scheduler:{policy}")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError):
        policy_factory(policy)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import kvproof_no_such", "ModuleNotFoundError: No module named 'kvproof_no_such'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def plan(:", "SyntaxError: "),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_module_that_cannot_be_imported_is_bad_input(
    source: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    for subject in (f"scheduler:{path}:Policy", f"eviction:{path}:Policy"):
        with pytest.raises(InputError, match="cannot be imported: ") as caught:
            subject_factory(subject)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_neither_plans_nor_evicts_is_told_both(module: Path) -> None:
    with pytest.raises(InputError, match=r"HasNoPlan' is no policy: it has neither plan \(of a sc"):
        is_eviction_policy(f"{module}:HasNoPlan")
    refused = _kvproof("check", "--policy", f"{module}:HasNoPlan", cwd=module.parent)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "is no policy: it has neither plan" in refused.stderr


def test_a_policy_may_have_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "kvproof_test_sibling.py").write_text("from kvproof.engine.policy import Plan\n")
    path = tmp_path / "has_a_sibling.py"
    path.write_text(
        "from kvproof_test_sibling import Plan\n\n\n"
        "class Empty:\n    def plan(self, state):\n        return Plan()\n"
    )
    assert policy_factory(f"{path}:Empty")().plan(cast(Any, None)) == Plan()


def test_a_policy_that_can_be_made_only_once_is_a_finding() -> None:
    made = []

    class Once(FirstComeFirstServed):
        def __init__(self) -> None:
            made.append(self)
            if len(made) > 1:
                raise ValueError("there is one already")

    operations = [Arrive((Segment(0, 4),)), Schedule()]
    for run in range(2):
        harness = SchedulingHarness(SchedulerSubject(Configuration(), policy=Once))
        violations = harness.run(operations)
        assert [violation.property for violation in violations] == ["PLAN"] * run
    (violation,) = violations
    assert "Once() failed, though an earlier call did not: " in violation.message
    assert "ValueError('there is one already')" in violation.message


def test_a_subject_without_a_policy_is_unknown() -> None:
    with pytest.raises(InputError, match="unknown subject 'scheduler:'"):
        subject_factory("scheduler:")


def test_policies_by_name_and_by_file(module: Path) -> None:
    assert policy_factory("fcfs") is FirstComeFirstServed
    assert is_kvproofs_own("scheduler:fcfs")
    assert not is_kvproofs_own(f"scheduler:{module}:Good")
    assert not is_eviction_policy("fcfs")
    assert not is_eviction_policy(f"{module}:Good")
    made = policy_factory(f"{module}:Good")
    assert policy_factory(f"{module}:Good") is made, "a file is imported once"
    subject = subject_factory(f"scheduler:{module}:Good")(Configuration())
    assert isinstance(subject, SchedulerSubject)
    assert subject.name == f"scheduler:{module}:Good"


def test_each_run_has_a_policy_of_its_own() -> None:
    made = []

    class Counts(FirstComeFirstServed):
        def __init__(self) -> None:
            made.append(self)

    for _ in range(2):
        SchedulerSubject(Configuration(), policy=Counts)
    assert len(made) == 2


# -- eviction policies -----------------------------------------------------------------------------

EVICTION_MODULE = '''"""First in, first out, as the engine does it by default; and worse."""

from collections import deque

from kvproof.engine.eviction import EvictionPolicy


class Fifo(EvictionPolicy):
    def __init__(self, capacity):
        self.blocks = deque()

    def insert(self, block, key):
        self.blocks.append(block)

    def remove(self, block):
        try:
            self.blocks.remove(block)
        except ValueError:
            raise KeyError(block) from None

    def victim(self):
        return self.blocks[0]

    def __len__(self):
        return len(self.blocks)

    def __iter__(self):
        return iter(self.blocks)


class ForgetsAVictim(Fifo):
    """Takes the victim out when it is asked for, not when it is removed."""

    def victim(self):
        return self.blocks.popleft()


class LastIn(Fifo):
    """Of two blocks of a prefix the first one goes first: legal, but poor."""

    def victim(self):
        return self.blocks[-1]

    def __iter__(self):
        return reversed(self.blocks)


class Loses(Fifo):
    """Forgets whom it has; those are free, but never handed out."""

    def insert(self, block, key):
        if len(self.blocks) < 2:
            self.blocks.append(block)


class Lacks:
    def insert(self, block, key):
        pass


class Leaves(EvictionPolicy):
    def __init__(self, capacity):
        pass

    def insert(self, block, key):
        pass

    def remove(self, block):
        pass
'''


@pytest.fixture(scope="module")
def evictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evictions") / "evictions.py"
    path.write_text(EVICTION_MODULE)
    return path


def test_an_eviction_policy_of_ones_own_passes(evictions: Path) -> None:
    name = f"{evictions}:Fifo"
    assert is_eviction_policy(name)
    assert isinstance(subject_factory(f"eviction:{name}")(Configuration()), EngineSubject)
    totals = Totals()
    assert search(f"eviction:{name}", "fifo", seconds=600, totals=totals, runs_max=100) is None
    assert (totals.runs, totals.problems) == (100, [])


@pytest.mark.parametrize("name", ["ForgetsAVictim", "Loses"])
def test_a_wrong_eviction_policy_is_found(name: str, evictions: Path) -> None:
    found = checked(f"eviction:{evictions}:{name}")
    assert found.replayed.verdict == "fail"
    assert found.violation.property in ("CRASH", "CONS", "ORDER")
    assert len(found.case.operations) <= 8


def test_an_eviction_policy_that_comes_with_kvproof_has_a_name(tmp_path: Path) -> None:
    assert eviction_factory("lru") is LeastRecentlyUsed
    assert is_eviction_policy("lru")
    subject = subject_factory("eviction:lru", imports=False)(Configuration())
    assert isinstance(subject, EngineSubject)
    checked = _kvproof("check", "--policy", "lru", "--seconds", "2", "--json", cwd=tmp_path)
    assert (checked.returncode in (0, 3), '"subject": "eviction:lru"' in checked.stdout) == (
        True,
        True,
    )
    unknown = _kvproof("check", "--policy", "mru", cwd=tmp_path)
    assert "unknown policy 'mru'; there are fcfs, " in unknown.stderr
    assert ", lru, arc, or MODULE:CLASS" in unknown.stderr


def test_what_lacks_a_method_is_no_eviction_policy(evictions: Path) -> None:
    lacking = r"lacks remove, victim, evicted, __iter__, __len__: see kvproof"
    with pytest.raises(InputError, match=lacking):
        eviction_factory(f"{evictions}:Lacks")
    with pytest.raises(InputError, match=r"lacks victim, __iter__, __len__: see kvproof"):
        eviction_factory(f"{evictions}:Leaves")
    with pytest.raises(InputError, match=r"evictions\.py has no class Nope$"):
        subject_factory(f"eviction:{evictions}:Nope")


def test_a_case_may_not_import_an_eviction_policy(evictions: Path) -> None:
    operations: list[Any] = [Arrive((), 1), Run(1)]
    case = Case(f"eviction:{evictions}:Fifo", Configuration(), operations)
    with pytest.raises(InputError, match="no part of kvproof"):
        replay(case, imports=False)
