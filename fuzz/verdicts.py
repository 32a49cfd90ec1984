"""From what a search did to a verdict: pass, fail, or unknown with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvproof.invariants.checks import CHECKS
from kvproof.invariants.goals import GOALS, Goal
from kvproof.invariants.subject import Subject
from kvproof.invariants.verdict import Verdict, merge


class Judgement(Struct, frozen=True):
    """A verdict and, where it is unknown, why."""

    verdict: Verdict
    reasons: tuple[str, ...]


def reachable_goals(subject: Subject) -> tuple[Goal, ...]:
    """The goals that a subject with these capabilities and semantics can meet."""
    able = subject.capabilities | subject.semantics.features()
    return tuple(goal for goal in GOALS if goal.needs <= able)


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
    for check in CHECKS:
        if check.promised(subject.semantics) and not checked.get(check.id()):
            reasons.append(f"property {check.id()} was never put to the test")
    verdict = merge("fail" if failed else "pass", "unknown" if reasons else "pass")
    return Judgement(verdict, tuple(reasons))
