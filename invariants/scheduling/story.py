"""What iterations did, in prose: how a scheduler came to what it is blamed for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvproof.invariants.events import Event
from kvproof.invariants.operations import Arrive
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Deferred,
    PlanRejected,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.verdict import counted

_TOLD = 14
"""The latest so many sentences; what came before is only counted."""


def iterations_story(events: Iterable[Event], arrivals: Mapping[int, Arrive]) -> str:
    """Arrivals, plans and results, a clause each; equal iterations in a row are told once.

    ``arrivals``: what brought each request, by its rank.
    """
    clauses = list(_merged(_clauses(events, arrivals)))
    left_out = len(clauses) - _TOLD
    if left_out > 0:
        clauses = [f"({left_out} earlier ones left out)", *clauses[left_out:]]
    return "; ".join(clauses)


def rejected_state(events: Sequence[Event]) -> str | None:
    """What the policy was given, when its plan was rejected."""
    rejected = next((e for e in reversed(events) if isinstance(e, PlanRejected)), None)
    return rejected.state if rejected is not None else None


def _clauses(events: Iterable[Event], arrivals: Mapping[int, Arrive]) -> Iterator[tuple[str, str]]:
    """What to say, and what it is about: (subject, predicate)."""
    for event in events:
        match event:
            case RequestArrived():
                yield f"r{event.request} arrives", _wants(event, arrivals.get(event.request))
            case Scheduled():
                yield f"iteration {event.iteration}", said_of(event)
            case Completed() if event.finished:
                yield f"step {event.step} ends", f"and with it {_names(event.finished)}"
            case RequestCancelled():
                yield f"r{event.request}", "is aborted"
            case RunningReset() if event.preempted:
                yield "a reset", f"preempts {_names(event.preempted)}"
            case Deferred() if event.requests:
                yield _names(event.requests), "is deferred: KV is on its way"
            case TransferQueued():
                blocks = counted(event.blocks, "block")
                yield f"transfer {event.transfer}", f"({event.kind} of {blocks}) is queued"
            case TransferDelivered():
                yield f"transfer {event.transfer}", "arrives"


def _wants(event: RequestArrived, arrival: Arrive | None) -> str:
    said = [f"{event.prompt_tokens} prompt tokens", f"at most {event.max_tokens} output"]
    if arrival is not None and arrival.samples > 1:
        said.append(f"{arrival.samples} samples")
    if arrival is not None and arrival.adapter:
        said.append(f"adapter {arrival.adapter}")
    if event.priority:
        said.append(f"priority {event.priority}")
    return f"({', '.join(said)})"


def said_of(event: Scheduled) -> str:
    """An iteration's plan: preempts r2; runs r0 for 1, r3 for 4 (admitted)."""
    said = []
    if event.preempted:
        said.append(f"preempts {_names(event.preempted)}")
    if event.swapped:
        said.append(f"swaps out {_names(event.swapped)}")
    runs = []
    for part in event.parts:
        how = ""
        if part.request in event.admitted:
            how = " (admitted)"
        elif part.request in event.resumed:
            how = " (resumed)"
        runs.append(f"r{part.request} for {part.tokens}{how}")
    said.append(f"runs {', '.join(runs)}" if runs else "runs nothing")
    return " and ".join(said)


def _names(requests: Sequence[int]) -> str:
    return ", ".join(f"r{request}" for request in requests)


def _merged(clauses: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Iterations that did the same, one after another, in one clause."""
    pending: list[tuple[str, str]] = []
    for subject, predicate in clauses:
        if pending and (pending[-1][1] != predicate or not subject.startswith("iteration")):
            yield _joined(pending)
            pending = []
        pending.append((subject, predicate))
    if pending:
        yield _joined(pending)


def _joined(clauses: list[tuple[str, str]]) -> str:
    (first, predicate), last = clauses[0], clauses[-1][0]
    if len(clauses) == 1:
        return f"{first} {predicate}"
    verb, _, rest = predicate.partition(" ")
    plural = verb.removesuffix("s") if verb in ("runs", "preempts", "swaps") else verb
    return f"iterations {first.split()[1]} to {last.split()[1]} {plural} {rest}"
