"""From what a search did to a verdict: pass, fail, or unknown with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvproof.invariants.checks import CHECKS
from kvproof.invariants.goals import GOALS, Goal
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.scheduling.goals import SCHEDULING_GOALS
from kvproof.invariants.subject import Subject
from kvproof.invariants.verdict import Verdict, merge
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject


class Judgement(Struct, frozen=True):
    """A verdict and, where it is unknown, why."""

    verdict: Verdict
    reasons: tuple[str, ...]


def reachable_goals(subject: Subject) -> tuple[Goal, ...]:
    """The goals that a subject with these capabilities and semantics can meet."""
    able = subject.capabilities | subject.semantics.features()
    goals = SCHEDULING_GOALS if isinstance(subject, SchedulerSubject) else GOALS
    return tuple(goal for goal in goals if goal.needs <= able)


def _promised(subject: Subject) -> list[str]:
    """Ids of the checks of which the subject promises something that they can judge."""
    ids = [check.id() for check in CHECKS if check.promised(subject.semantics)]
    if not isinstance(subject, SchedulerSubject):
        return ids
    ids += [check.id() for check in SCHEDULING_CHECKS if check.promised(subject.promises)]
    return [id for id in ids if id not in subject.unjudged]


def judge(
    subject: Subject,
    operations: Mapping[str, Mapping[str, int]],
    goals: Mapping[str, int],
    *,
    checked: Mapping[str, int],
    failed: bool,
    problems: tuple[str, ...] = (),
) -> Judgement:
    """fail dominates unknown dominates pass.

    Unknown: a checker stumbled, an operation kind never succeeded, a promised property was never
    put to the test, or a situation that is not rare was never met.  Then silence proves nothing.
    """
    reasons = list(problems)
    for kind in sorted(subject.capabilities):
        if not operations.get(kind, {}).get("done"):
            reasons.append(f"operation {kind} never succeeded")
    for goal in reachable_goals(subject):
        if not goal.rare and not goals.get(goal.id):
            reasons.append(f"situation {goal.id} was never reached ({goal.situation})")
    for name in _promised(subject):
        if not checked.get(name):
            reasons.append(f"property {name} was never put to the test")
    verdict = merge("fail" if failed else "pass", "unknown" if reasons else "pass")
    return Judgement(verdict, tuple(reasons))
