"""kvproof's engine with a user's eviction policy, which is given a second for each operation."""

from __future__ import annotations

from kvproof.engine.isolation import SECONDS_PER_CALL, TimeLimit, TookTooLong
from kvproof.invariants.operations import Operation, kind_of
from kvproof.invariants.outcomes import Outcome
from kvproof.stateful_tests.subjects.engine import EngineSubject


class EvictionPolicySubject(EngineSubject):
    """What raises or hangs in the policy makes an operation raise, which is a finding (CRASH)."""

    def apply(self, operation: Operation) -> Outcome:
        try:
            with TimeLimit(SECONDS_PER_CALL):
                return super().apply(operation)
        except TookTooLong:
            raise TimeoutError(
                f"the eviction policy did not let {kind_of(operation)} end within "
                f"{SECONDS_PER_CALL:g} s"
            ) from None
