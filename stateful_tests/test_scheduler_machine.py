"""The Hypothesis machine over kvproof's own scheduler, in which it must find nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hypothesis import settings

from kvproof.engine.policies import POLICIES
from kvproof.stateful_tests.export import write_finding
from kvproof.stateful_tests.machine import machine_for
from kvproof.stateful_tests.profiles import at_scale
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

FINDINGS = Path("kvproof-findings")


def _scheduler_test(policy: str, examples: int = 20) -> type:
    """The test of a scheduler with this policy, in whatever world is drawn."""
    name = f"scheduler:{policy}"
    machine = machine_for(
        partial(SchedulerSubject, policy=POLICIES[policy], name=name),
        name,
        on_failure=partial(write_finding, folder=FINDINGS),
    )
    own = settings(machine.TestCase.settings, print_blob=False)
    machine.TestCase.settings = at_scale(own, examples=examples, steps=30)
    return machine.TestCase


TestFirstComeFirstServed = _scheduler_test("fcfs")
TestStrictPriority = _scheduler_test("priority")
TestSwapping = _scheduler_test("fcfs_swap")
TestGuaranteedNoEvict = _scheduler_test("guaranteed_no_evict")
