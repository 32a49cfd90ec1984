"""The scheduler policies that come with the engine, by name.  One policy per file."""

from __future__ import annotations

from kvproof.engine.policies.contiguous import ContiguousReservation
from kvproof.engine.policies.fcfs import FirstComeFirstServed
from kvproof.engine.policies.guaranteed_no_evict import GuaranteedNoEvict
from kvproof.engine.policies.max_utilization import MaxUtilization
from kvproof.engine.policies.orca import Orca
from kvproof.engine.policies.priority import StrictPriority
from kvproof.engine.policies.static_batch import StaticBatch
from kvproof.engine.policies.swapping import FirstComeFirstServedSwapping
from kvproof.engine.policy import SchedulerPolicy

POLICIES: dict[str, type[SchedulerPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": StrictPriority,
    "max_utilization": MaxUtilization,
    "guaranteed_no_evict": GuaranteedNoEvict,
    "static_batch": StaticBatch,
    "orca": Orca,
    "contiguous": ContiguousReservation,
    "fcfs_swap": FirstComeFirstServedSwapping,
}
"""Classes, each to be called without arguments once per run: some keep state."""

POLICY_NAMES = tuple(POLICIES)

__all__ = [
    "POLICIES",
    "POLICY_NAMES",
    "ContiguousReservation",
    "FirstComeFirstServed",
    "FirstComeFirstServedSwapping",
    "GuaranteedNoEvict",
    "MaxUtilization",
    "Orca",
    "StaticBatch",
    "StrictPriority",
]
