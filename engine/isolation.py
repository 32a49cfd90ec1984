"""Calls a policy so that whatever it does is an answer: a plan, or what is wrong with it.

A policy is a user's code.  It may raise, hang, change what it was given, or return garbage; none
of that may take the scheduler down, nor pass unnoticed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import NoReturn

from kvproof.engine.policy import Plan, SchedulerPolicy, SchedulerState

SECONDS_PER_CALL = 1.0
"""Time that a policy has for one plan."""


class PolicyError(Exception):
    """A policy failed; ``kind`` is one of those of ``PlanRejected``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class _TookTooLong(BaseException):
    """Raised inside a policy that hangs; not an Exception, so that few catch it."""


def call_policy(
    policy: SchedulerPolicy, state: SchedulerState, seconds: float = SECONDS_PER_CALL
) -> Plan:
    """The policy's plan.  Raises PolicyError if it has none."""
    name = type(policy).__name__
    try:
        with _time_limit(seconds):
            plan = policy.plan(state)
    except _TookTooLong:
        raise PolicyError("hang", f"{name}.plan did not return within {seconds:g} s") from None
    except Exception as error:
        raise PolicyError(*_diagnosis(name, error)) from error
    complaint = _wrong_type(plan)
    if complaint:
        raise PolicyError("wrong_type", f"{name}.plan returned {complaint}")
    return plan


def _diagnosis(name: str, error: Exception) -> tuple[str, str]:
    frames = extract_tb(error.__traceback__)
    # The last frame of the policy's own: below it are kvproof's, which only say no.
    own = [frame for frame in frames[1:] if "kvproof" not in Path(frame.filename).parts[-3:-1]]
    frame = (own or frames)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if _is_mutation(error):
        return "mutation", f"{name}.plan tried to change what it was given: {text} ({place})"
    return "exception", f"{name}.plan raised {text} ({place})"


def _is_mutation(error: Exception) -> bool:
    """What frozen structs, tuples and read-only sequences say to those who assign to them."""
    text = str(error)
    return isinstance(error, AttributeError | TypeError) and (
        "immutable type" in text
        or "read-only" in text
        or "does not support item" in text
        or any(f"no attribute {name!r}" in text for name in _MUTATORS)
    )


_MUTATORS = ("append", "clear", "extend", "insert", "pop", "popleft", "remove", "reverse", "sort")


def _wrong_type(plan: object) -> str | None:
    """What is wrong with the shape of a plan; msgspec does not look when a struct is made."""
    if type(plan) is not Plan:
        return f"{_short(plan)} instead of a Plan"
    for field in ("preempt", "swap"):
        if not _is_sequence(getattr(plan, field), _is_id):
            return f"a Plan whose {field} is no tuple of requests: {_short(getattr(plan, field))}"
    for field in ("run", "reserve"):
        if not _is_sequence(getattr(plan, field), _is_pair):
            value = _short(getattr(plan, field))
            return f"a Plan whose {field} is no tuple of (request, tokens): {value}"
    return None


def _is_sequence(value: object, is_member: object) -> bool:
    assert callable(is_member)
    return isinstance(value, tuple | list) and all(map(is_member, value))


def _is_id(value: object) -> bool:
    return type(value) is int


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_id, value))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # even that is the user's code
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the main thread, again and again; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise _TookTooLong
