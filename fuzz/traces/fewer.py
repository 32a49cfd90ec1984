"""Of a trace that violates a property, as few requests as show it, in the time there is.

The first step of shrinking: dropping requests and replaying costs far less than dropping single
operations, each of which is audited, and leaves a case that those can be dropped from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvproof.fuzz.traces.checked import CheckedTrace, TraceRun
from kvproof.fuzz.traces.formats import TraceRequest


def with_fewer_requests(run: TraceRun, checked: CheckedTrace, seconds: float) -> CheckedTrace:
    """A replay of fewer requests that violates the same property; or ``checked``, that of ``run``.

    Delta debugging: ever smaller parts of the trace are left out, as long as there is time.
    """
    deadline = time.monotonic() + seconds
    best, trace = (
        checked,
        list(run.trace[: checked.operations["arrive"]["done"] + _refused(checked)]),
    )
    part = len(trace)
    while part and time.monotonic() < deadline:
        start = len(trace) - part
        while start >= 0 and time.monotonic() < deadline:
            fewer = trace[:start] + trace[start + part :]
            found = _violating(run, fewer, checked.violations[0].property)
            if found is not None:
                best, trace = found, fewer
            start = min(start, len(trace)) - part
        part //= 2
    return best


def _refused(checked: CheckedTrace) -> int:
    return checked.operations["arrive"]["refused"]


def _violating(run: TraceRun, trace: Sequence[TraceRequest], wanted: str) -> CheckedTrace | None:
    """The replay of ``trace`` instead, if it violates that property."""
    if not trace:
        return None
    checked = TraceRun(trace, run.setting, run.policy, run.arm).run()
    violated = checked.violations[0].property if checked.violations else None
    return checked if violated == wanted else None
