"""The scheduling checks, one property a file, in the order in which they look."""

from __future__ import annotations

from kvproof.invariants.scheduling.checks.batch import Batch
from kvproof.invariants.scheduling.checks.budget import Budget
from kvproof.invariants.scheduling.checks.fcfs import Fcfs
from kvproof.invariants.scheduling.checks.fit import Fit
from kvproof.invariants.scheduling.checks.hold import Hold
from kvproof.invariants.scheduling.checks.live import Live
from kvproof.invariants.scheduling.checks.meter import Meter
from kvproof.invariants.scheduling.checks.noevict import Noevict
from kvproof.invariants.scheduling.checks.plan import Plan
from kvproof.invariants.scheduling.checks.priority import Priority
from kvproof.invariants.scheduling.checks.progress import Progress
from kvproof.invariants.scheduling.checks.starve import Starve
from kvproof.invariants.scheduling.property import SchedulingCheck

SCHEDULING_CHECKS: tuple[type[SchedulingCheck], ...] = (
    Plan,
    Fit,
    Budget,
    Progress,
    Hold,
    Batch,
    Fcfs,
    Priority,
    Noevict,
    Starve,
    Live,
    Meter,
)
"""The contract of each iteration first, then what a policy promises, then the long run."""
