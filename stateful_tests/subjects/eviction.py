"""kvproof's engine with a user's eviction policy, which is given a second for each operation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import EvictionPolicy, EvictionPolicyFactory
from kvproof.engine.isolation import SECONDS_PER_CALL, TimeLimit, TookTooLong
from kvproof.invariants.operations import Operation, kind_of
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

SECONDS_ONCE_HUNG = 0.1
"""Time for each operation once the policy has hung, in this process: to shrink that case it will
hang many times more."""
_hung: set[EvictionPolicyFactory] = set()


class EvictionPolicySubject(EngineSubject):
    """What raises or hangs in the policy makes an operation raise, which is a finding (CRASH)."""

    def __init__(self, configuration: Configuration, *, eviction: EvictionPolicyFactory) -> None:
        super().__init__(configuration, eviction=eviction, engine=_engine)
        self._eviction = eviction

    def apply(self, operation: Operation) -> Outcome:
        seconds = SECONDS_ONCE_HUNG if self._eviction in _hung else SECONDS_PER_CALL
        try:
            with TimeLimit(seconds):
                return super().apply(operation)
        except TookTooLong:
            _hung.add(self._eviction)
            raise TimeoutError(
                f"the eviction policy did not let {kind_of(operation)} end within {seconds:g} s"
            ) from None


def _engine(
    configuration: Configuration, *, eviction: EvictionPolicyFactory, **others: Any
) -> Engine:
    return Engine(configuration, eviction=partial(_Consistent, eviction), **others)


class _Consistent(EvictionPolicy):
    """A policy as it is, whose next victim must be the first of those that it iterates over.

    A promotion takes its victims from there, to pass over those that it must not evict.
    """

    __slots__ = ("_policy",)

    def __init__(self, policy: EvictionPolicyFactory, capacity: int) -> None:
        self._policy = policy(capacity)

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        self._policy.insert(entry, key)  # on the device all are used: nothing else is ever told

    def remove(self, entry: int) -> None:
        self._policy.remove(entry)

    def evicted(self, entry: int) -> None:
        self._policy.evicted(entry)

    def victim(self) -> int:
        victim, first = self._policy.victim(), next(iter(self._policy), None)
        if victim != first:
            raise ValueError(
                f"{type(self._policy).__name__}.victim() is block {victim}, but the first that it "
                f"iterates over is {'none' if first is None else f'block {first}'}"
            )
        return victim

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self._policy)
