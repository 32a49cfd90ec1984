"""What a finding leaves behind: the case, a plain pytest file, and a log to read.

A case that names a seeded fault (see ``kvproof faults``) is exported with it, so that the file
shows how the fault is found; any other file fails until the defect is mended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import Any
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from kvproof.invariants.case import Case, dump_case, source_of
from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    KeyMoved,
    ReleaseFenced,
    SlotsEvicted,
    SlotsReleased,
    StepItem,
    StepLaunched,
    StepRetired,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferKind,
    TransferLanded,
    TransferStarted,
    why_evicted,
)
from kvproof.invariants.operations import Admit, Arrive, Promote, Tier
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Limits,
    PlanRejected,
    Scheduled,
    SchedulerEvent,
)
from kvproof.invariants.story import Moment
from kvproof.invariants.verdict import BEFORE_THE_FIRST, Violation
from kvproof.stateful_tests.subjects import is_kvproofs_own

# -- the pytest file -----------------------------------------------------------------------------

_TEST = '''\
"""{title}

{body}
"""

{imports}

CASE = Case(
    subject={subject!r},
    configuration={configuration},
    operations=[{operations}],
)


def test_{name}() -> None:
    harness = harness_for(subject_factory(CASE.subject)(CASE.configuration), audit_interval=1)
{run}
    assert not harness.violations, harness.violations[0].message
'''


_WHERE = (
    "It imports {}: run pytest in the folder where kvproof was run when this was found, or where "
    "that code is found as it was there."
)


def pytest_source(case: Case, explanation: str = "", *, name: str = "") -> str:
    """A test file that replays the case, and fails as long as it violates a property.

    It imports nothing but kvproof.  ``explanation`` becomes its docstring, ``name`` (that of the
    case if there is none) its function's.
    """
    told = explanation or "Replays a case of kvproof."
    if not is_kvproofs_own(case.subject):
        told += f"\n\n{_WHERE.format(case.subject)}"
    return _TEST.format(
        title=f"{case.violates or 'A property'} is violated by {case.subject}.",
        body=_docstring(_wrapped(told)),
        imports=_imports(case),
        subject=case.subject,
        configuration=_source(case.configuration),
        operations=_listed([source_of(operation) for operation in case.operations]),
        name=name or case_name(case),
        run=_run(case),
    )


def _listed(operations: Sequence[str]) -> str:
    lines = "".join(f"\n        {operation}," for operation in operations)
    return f"{lines}\n    " if lines else ""


def _wrapped(text: str) -> str:
    return "\n".join(
        fill(line, 98, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
    )


def _docstring(text: str) -> str:
    """Fit to stand in a docstring, on lines of its own."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _imports(case: Case) -> str:
    kinds = {type(operation).__name__ for operation in case.operations}
    prompted = [o for o in case.operations if isinstance(o, Admit | Arrive | Promote)]
    if prompted:
        kinds.add("Segment")
    if any(operation.media for operation in prompted):
        kinds.add("Media")
    lines = [
        "from kvproof.invariants.case import Case",
        *([f"from kvproof.invariants.operations import {', '.join(sorted(kinds))}"] * bool(kinds)),
        "from kvproof.invariants.subject import Configuration",
        "from kvproof.stateful_tests.harnesses import harness_for",
        "from kvproof.stateful_tests.subjects import subject_factory",
    ]
    if case.configuration.scheduling != Limits():
        lines.insert(-3, "from kvproof.invariants.scheduling.vocabulary import Limits")
    if case.fault is not None:
        lines.insert(0, "from kvproof.fuzz.faults import fault_by_id")
    return "\n".join(lines)


def _run(case: Case) -> str:
    if case.fault is None:
        return "    harness.run(CASE.operations)"
    return (
        f"    with fault_by_id({case.fault!r}).installed():\n        harness.run(CASE.operations)"
    )


def _source(value: Struct, shown: Sequence[str] = ()) -> str:
    """A struct as a Python expression, without what is as by default and not to be ``shown``."""
    default = type(value)()
    fields = [
        f"{name}={_source(own) if isinstance(own, Struct) else repr(own)}"
        for name in value.__struct_fields__
        if (own := getattr(value, name)) != getattr(default, name) or name in shown
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


# -- the log -------------------------------------------------------------------------------------

_LEGEND = """\
r3: request 3, b7: block 7, s2: step 2, [1]: row 1 of the request's block table
h5: slot 5 of host memory, d5: slot 5 of the disk, t4: transfer 4
+ given   = reused (prefix hit)   & shared with a fork   > copied (on write, or by a transfer)
- released   * made findable   x evicted   ~ left to the fence of a step in flight"""
_PROMPT_LEGEND = """
Segment(source=0, length=2), in the case [0, 2]: the first 2 tokens of stream 0; prompts of the same
streams begin alike"""
_TRANSFER_LEGEND = """
transfer=k in an operation is a place: the k-th of those it may be about, modulo their number; which
transfer that was, stands in the answer"""
_SCHEDULER_LEGEND = """
q3: request 3 of the scheduler, by arrival (in the cache it may be another r)
#4: iteration 4: what its plan ran, for how many tokens; ! preempted, !! swapped out"""


def log_text(
    case: Case, explanation: str, moments: Sequence[Moment] = (), *, violated: str = ""
) -> str:
    """The run, one line per operation: what was asked, what was answered, what changed.

    ``violated``: what the last operation of the recorded run violates; its line is marked.
    """
    lines = _lines(case, moments)
    if violated and (moments or not case.operations):
        lines[-1] += violation_mark(violated)
    world = f"{case.subject}, {_source(case.configuration, ('block_size',))}"
    features = f"features: {', '.join(case.features)}\n" if case.features else ""
    schedules = any(isinstance(e, SchedulerEvent) for moment in moments for e in moment.events)
    names = any(hasattr(operation, "transfer") for operation in case.operations)
    prompts = any(isinstance(operation, Admit | Arrive) for operation in case.operations)
    legend = (
        _LEGEND
        + _PROMPT_LEGEND * prompts
        + _TRANSFER_LEGEND * names
        + _SCHEDULER_LEGEND * schedules
    )
    return f"{_wrapped(explanation)}\n\n{world}\n{features}\n{legend}\n\n" + "\n".join(lines) + "\n"


def _lines(case: Case, moments: Sequence[Moment]) -> list[str]:
    """Those of the operations; of a fresh subject to which nothing was done, one."""
    rows = [
        (source_of(moment.operation), _answer(moment.outcome), _changes(moment.events))
        for moment in moments
    ] or [(source_of(operation), "", "") for operation in case.operations]
    if not rows:
        return [f"      {BEFORE_THE_FIRST}"]
    asked, answered = (min(60, max(len(row[i]) for row in rows)) for i in (0, 1))
    return [
        f"{op:>4}  {row[0]:<{asked}}  {row[1]:<{answered}}  {row[2]}".rstrip()
        for op, row in enumerate(rows)
    ]


def violation_mark(property: str) -> str:
    """What ends the line of the operation at which a violation was seen."""
    return f"   ✗ {property}"


def _answer(outcome: Outcome) -> str:
    words: list[object] = [outcome.reason or outcome.status]
    if outcome.request is not None:
        words.append(f"r{outcome.request}")
    words += [f"r{child}" for child in outcome.children]
    words += [f"t{transfer}" for transfer in outcome.transfers]
    if outcome.cached_tokens:
        words.append(f"{outcome.cached_tokens} cached")
    if outcome.count:
        words.append(outcome.count)
    if outcome.lookup:
        words.append(f"below: {outcome.lookup}")
    return " ".join(str(word) for word in words)


def _changes(events: Sequence[Event]) -> str:
    said = (_SAID[type(event)](event) for event in events if type(event) in _SAID)
    return "; ".join(filter(None, said))


def _numbered(letter: str, group: int, numbers: Sequence[int]) -> str:
    return (f"g{group}:" if group else "") + ",".join(f"{letter}{number}" for number in numbers)


def _blocks(event: Any) -> str:
    return _numbered("b", event.group, event.blocks)


def _placed(sign: str) -> Callable[[Any], str]:
    return lambda event: f"{sign}{_blocks(event)} r{event.request}[{event.row}]"


def _released(event: BlocksReleased) -> str:
    fence = "" if event.step is None else f" (fence of s{event.step})"
    return f"-{_blocks(event)} r{event.request}{fence}"


def _copied(event: BlockCopied) -> str:
    group = f"g{event.group}:" if event.group else ""
    return f"{group}b{event.source}>b{event.target} r{event.request}[{event.row}]"


def _merged(event: BlockMerged) -> str:
    group = f"g{event.group}:" if event.group else ""
    return f"{group}b{event.source}=b{event.target} r{event.request}[{event.row}]"


_ENDS: dict[TransferKind, tuple[str, str]] = {
    "store": ("b", "h"),
    "demote": ("h", "d"),
    "fetch": ("d", "h"),
    "promote": ("h", "b"),
    "swap_out": ("b", "h"),
    "swap_in": ("h", "b"),
}
"""How the blocks at the source and at the target of a transfer are written."""
_SLOT: dict[Tier, str] = {"device": "b", "host": "h", "disk": "d"}


def _transfer(event: TransferStarted) -> str:
    source, target = _ENDS[event.kind]
    request = "" if event.request is None else f" r{event.request}"
    sources = _numbered(source, event.group, event.sources)
    return f"t{event.transfer}: {sources}>{_numbered(target, 0, event.targets)}{request}"


def _transfer_ended(event: TransferEnded) -> str:
    return f"t{event.transfer} {event.result}" + (f" ({event.cause})" if event.cause else "")


def _slots_evicted(event: SlotsEvicted) -> str:
    return f"x{_numbered(_SLOT[event.tier], event.group, event.slots)} ({why_evicted(event.cause)})"


def _slots_released(event: SlotsReleased) -> str:
    return f"-{_numbered(_SLOT[event.tier], event.group, event.slots)} r{event.request}"


def _reopened(event: TierReopened) -> str:
    found = f"found {_numbered('d', event.group, event.slots) or 'nothing'}"
    damaged = _numbered("d", event.group, event.damaged)
    return f"{found}, lost {damaged} (damaged entries)" if damaged else found


def _evicted(event: BlocksEvicted) -> str:
    return f"x{_blocks(event)} ({why_evicted(event.cause)})"


def _item(item: StepItem) -> str:
    return f"r{item.request} {item.start}..{item.end - 1}"


def _iteration(event: Scheduled) -> str:
    parts = [f"q{part.request}={part.tokens}" for part in event.parts] or ["nothing"]
    parts += [f"!q{request}" for request in event.preempted]
    parts += [f"!!q{request}" for request in event.swapped]
    return f"#{event.iteration}: {' '.join(parts)}"


def _completed(event: Completed) -> str:
    return ", ".join(f"q{request} finished" for request in event.finished)


_SAID: dict[type[Event], Callable[[Any], str]] = {
    BlocksAllocated: _placed("+"),
    BlocksReused: _placed("="),
    BlocksShared: lambda event: f"&{_blocks(event)} r{event.parent} r{event.request}",
    BlocksPublished: _placed("*"),
    BlocksReleased: _released,
    BlocksOutlived: _released,
    BlockCopied: _copied,
    BlockMerged: _merged,
    KeyMoved: lambda event: f"b{event.source}*>b{event.target} (g{event.group})",
    BlocksEvicted: _evicted,
    TransferStarted: _transfer,
    TransferLanded: lambda event: f"t{event.transfer}: {event.parts} landed",
    TransferCancelled: lambda event: f"t{event.transfer} not wanted any more",
    TransferEnded: _transfer_ended,
    SlotsEvicted: _slots_evicted,
    SlotsReleased: _slots_released,
    TierReopened: _reopened,
    ReleaseFenced: lambda event: f"~r{event.request} s{event.step}",
    StepLaunched: lambda event: f"s{event.step}: " + ", ".join(map(_item, event.items)),
    StepRetired: lambda event: f"s{event.step} retired",
    Scheduled: _iteration,
    Completed: _completed,
    PlanRejected: lambda event: f"plan rejected: {event.kind}",
}
"""Events that say more than the operation and its outcome."""


# -- the files -----------------------------------------------------------------------------------


def case_name(case: Case, digits: int = 8) -> str:
    """A name that is the same for the same case: property and digest, fit for a module's name."""
    digest = sha256(dump_case(case).encode()).hexdigest()[:digits]
    return f"{(case.violates or 'case').lower()}_{digest}"


def write_finding(
    case: Case,
    violation: Violation,
    explanation: str,
    folder: Path,
    *,
    moments: Sequence[Moment] = (),
) -> list[Path]:
    """Write the case (``NAME.json``), ``test_NAME.py`` and the log ``NAME.txt``; their paths.

    The same finding is written under the same name, another never over it.  ``moments`` is the
    recorded run; without it, the log lists only the operations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    case = replace(case, violates=case.violates or violation.property)
    text = dump_case(case)
    name = _free_name(case, text, folder)
    last = moments[-1].op if moments else -1
    violated = violation.property if last == violation.op else ""
    files = {
        f"{name}.json": text,
        f"test_{name}.py": pytest_source(case, explanation, name=name),
        f"{name}.txt": log_text(case, explanation, moments, violated=violated),
    }
    for file, content in files.items():
        _write(folder / file, content)
    return [folder / file for file in files]


def try_to_write_finding(
    case: Case,
    violation: Violation,
    explanation: str,
    folder: Path,
    *,
    moments: Sequence[Moment] = (),
) -> tuple[list[Path], str]:
    """As ``write_finding``, or no paths and why: a full disk, say, must not cost the finding."""
    try:
        return write_finding(case, violation, explanation, folder, moments=moments), ""
    except OSError as error:
        return [], str(error)


def _free_name(case: Case, text: str, folder: Path) -> str:
    for digits in range(8, 65, 8):
        name = case_name(case, digits)
        path = folder / f"{name}.json"
        if not path.exists() or path.read_text(encoding="utf-8") == text:
            return name
    raise FileExistsError(f"{folder}: other content under the names of this case")


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also beside another process that writes the same finding."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
