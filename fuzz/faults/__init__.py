"""Seeded faults: small replacements of one engine method each, modelled on public bugs.

They show that the checks find what they claim to find.  The engine carries none of them: a fault
replaces a method on its class while it is installed.  No check knows of any fault.
"""

from __future__ import annotations

from kvproof.fuzz.faults.fault import Fault
from kvproof.invariants.errors import InputError


def cache_faults() -> tuple[Fault, ...]:
    """Those of the paged cache and of what is below it, in their order."""
    from kvproof.fuzz.faults import catalogue, tiers

    return (*catalogue.FAULTS, *tiers.FAULTS)


def scheduler_faults() -> tuple[Fault, ...]:
    """Those of the scheduler and its policies, in their order."""
    from kvproof.fuzz.faults import scheduling

    return scheduling.FAULTS


def all_faults() -> tuple[Fault, ...]:
    """The catalogue, in its order."""
    return (*cache_faults(), *scheduler_faults())


def fault_by_id(name: str) -> Fault:
    """The fault of that name.  Raises InputError if there is none."""
    for fault in all_faults():
        if fault.id == name:
            return fault
    raise InputError(f"unknown fault {name!r}; see `kvproof faults list`")


__all__ = ["Fault", "all_faults", "cache_faults", "fault_by_id", "scheduler_faults"]
