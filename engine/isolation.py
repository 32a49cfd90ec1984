"""Calls a policy so that whatever it does is an answer: a plan, or what is wrong with it.

A policy is a user's code.  It may raise, hang, change what it was given, or return garbage; none
of that may take the scheduler down, nor pass unnoticed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path
from time import monotonic, process_time
from traceback import extract_tb
from types import FrameType
from typing import Any

from kvproof.engine.policy import Plan, SchedulerPolicy, SchedulerState

SECONDS_PER_CALL = 1.0
"""Time that a policy has for one plan."""


class PolicyError(Exception):
    """A policy failed; ``kind`` is one of those of ``PlanRejected``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class TookTooLong(BaseException):
    """Raised inside a policy that hangs; not an Exception, so that few catch it."""


def call_policy(
    policy: SchedulerPolicy, state: SchedulerState, seconds: float = SECONDS_PER_CALL
) -> Plan:
    """The policy's plan.  Raises PolicyError if it has none."""
    name = type(policy).__name__
    try:
        # What it prints must not get into what kvproof prints.
        with redirect_stdout(sys.stderr), TimeLimit(seconds):
            plan = policy.plan(state)
    except TookTooLong:
        raise PolicyError("hang", f"{name}.plan did not return within {seconds:g} s") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # even one that would end the process is only wrong
        raise PolicyError(*_diagnosis(name, error)) from error
    complaint = _wrong_type(plan)
    if complaint:
        raise PolicyError("wrong_type", f"{name}.plan returned {complaint}")
    return plan


def _diagnosis(name: str, error: BaseException) -> tuple[str, str]:
    frames = extract_tb(error.__traceback__)
    # The last frame of the policy's own: below it are the engine's, which only say no.
    own = list(takewhile(lambda frame: Path(frame.filename).parent != _ENGINE, frames[1:]))
    frame = (own or frames)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = _without_addresses(text)
    if _is_mutation(error):
        return "mutation", f"{name}.plan tried to change what it must not: {text} ({place})"
    return "exception", f"{name}.plan raised {text} ({place})"


_ENGINE = Path(__file__).parent


def _is_mutation(error: BaseException) -> bool:
    """What frozen structs, tuples and read-only sequences say to those who assign to them."""
    text = str(error)
    if isinstance(error, AttributeError) and error.name in _MUTATORS:
        return isinstance(error.obj, Sequence)  # not of something that the policy has not got
    return isinstance(error, AttributeError | TypeError) and (
        "immutable type" in text or "read-only" in text or "support item" in text
    )


_MUTATORS = ("append", "clear", "extend", "insert", "pop", "popleft", "remove", "reverse", "sort")


def _wrong_type(plan: object) -> str | None:
    """What is wrong with the shape of a plan; msgspec does not look when a struct is made."""
    if inspect.iscoroutine(plan):
        plan.close()
        return "a coroutine instead of a Plan: plan must not be async"
    if not isinstance(plan, Plan):
        return f"{_short(plan)} instead of a Plan"
    for field in ("preempt", "swap"):
        value = getattr(plan, field)
        if type(value) not in _SEQUENCES or not all(type(number) is int for number in value):
            return f"a Plan whose {field} is no tuple of requests: {_short(value)}"
    for field in ("run", "reserve"):
        value = getattr(plan, field)
        if type(value) not in _SEQUENCES or not all(_is_pair(pair) for pair in value):
            return f"a Plan whose {field} is no tuple of (request, tokens): {_short(value)}"
    return None


_SEQUENCES = (tuple, list)


def _is_pair(value: object) -> bool:
    if type(value) is not tuple and type(value) is not list:
        return False
    return len(value) == 2 and type(value[0]) is int and type(value[1]) is int


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # even that is the user's code
        text = f"a {type(value).__name__}"
    text = _without_addresses(text)
    return text if len(text) <= 80 else text[:77] + "…"


def _without_addresses(text: str) -> str:
    """Addresses of objects differ from run to run, and would make digests differ."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


class TimeLimit:
    """Interrupts the main thread, again and again; elsewhere there is no limit.

    The limit is one of computing.  A busy machine may keep a process waiting, which is not the
    policy's fault: who does not compute is interrupted only after ``WAITING`` times as long.
    """

    __slots__ = ("_before", "_seconds", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before: Any = None
        self._timer = (0.0, 0.0)

    def __enter__(self) -> None:
        global _swallowed, _computed_until, _waits_until
        _swallowed = 0
        if threading.current_thread() is threading.main_thread() and _HAS_TIMER:
            _computed_until = process_time() + self._seconds
            _waits_until = monotonic() + WAITING * self._seconds
            # None if the handler was not set from Python: then it cannot be put back.
            self._before = _set_handler(signal.SIGALRM, _interrupt) or int(signal.SIG_DFL)
            try:
                self._timer = signal.setitimer(signal.ITIMER_REAL, self._seconds, 0.05)
            except TookTooLong:  # before anything began: nobody will call __exit__
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        while self._before is not None:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                _set_handler(signal.SIGALRM, self._before)
                self._before = None
                if self._timer[0]:  # somebody else's: it goes on with what it had left
                    signal.setitimer(signal.ITIMER_REAL, *self._timer)
            except TookTooLong:
                continue  # the time was up just now: the policy has answered, and that counts


WAITING = 10
_computed_until = _waits_until = 0.0

_HAS_TIMER = hasattr(signal, "setitimer")
_set_handler: Callable[..., Any] = getattr(
    importlib.import_module("_signal"), "signal", signal.signal
)
"""Without the conversions to enum members, which cost more than all the rest of a call."""


_INTERRUPTS_MAX = 40
"""Interrupts, 50 ms apart, that a policy may swallow before kvproof gives up on it."""
EXIT_HANG = 1
_swallowed = 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _swallowed
    if process_time() < _computed_until and monotonic() < _waits_until:
        return
    _swallowed += 1
    if _swallowed > _INTERRUPTS_MAX:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "somewhere"
        print(
            f"kvproof: the policy hangs at {place} and swallows every interrupt: it cannot be "
            "stopped, so the check ends here",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_HANG)
    raise TookTooLong
