"""``kvproof replay`` and ``kvproof shrink``: what one does with a case file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from msgspec.structs import replace

from kvproof.fuzz.cli.output import (
    JsonOption,
    console,
    finish,
    print_json,
    show_verdict,
    violation_fields,
    writable_file,
)
from kvproof.fuzz.replay import Replay
from kvproof.fuzz.replay import replay as replay_case
from kvproof.fuzz.search import DETERMINISM
from kvproof.fuzz.shrink import shrink as shrink_case
from kvproof.invariants.case import Case, dump_case, load_case, save_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import kind_of
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.verdict import Violation, counted
from kvproof.stateful_tests.subjects import is_kvproofs_own

SubjectOption = Annotated[
    str | None,
    typer.Option(
        "--subject",
        "--policy",
        help="Allow the case to import this subject or policy of yours, as check was given it.",
    ),
]
CaseArgument = Annotated[Path, typer.Argument(help="A case file, as kvproof writes it.")]


def replay(
    case_file: CaseArgument,
    log: Annotated[
        bool, typer.Option("--log", help="Print what each operation did, one line each.")
    ] = False,
    subject: SubjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a case again: same digest, same verdict, on any machine.

    Example: [bold]kvproof replay kvproof-findings/cons_1a2b3c4d.json --log[/]
    """
    case = load_case(case_file)
    result = _performed(case, _allows(case, subject))
    if as_json:
        print_json(
            {
                "digest": result.digest,
                "verdict": result.verdict,
                "subject": case.subject,
                "ops": result.ops,
                "violations": [
                    violation_fields(v, _explain(case, result, i), str(case_file))
                    for i, v in enumerate(result.violations)
                ],
                "violates": case.violates,
                "problem": result.problem,
            }
        )
        finish(result.verdict)
    if log:
        _print_log(result.moments)
    for index in range(len(result.violations)):
        console.print(_explain(case, result, index), markup=False)
    done = counted(result.ops, "operation")
    show_verdict(result.verdict, f"{done}, digest {result.digest}")
    if result.problem:
        console.print(f"  because {result.problem}", markup=False)
    if case.violates and case.violates not in [v.property for v in result.violations]:
        console.print(f"  The case was written for a violation of {case.violates}: not seen here.")
    finish(result.verdict)


def _performed(case: Case, imports: bool) -> Replay:
    """The case done again; twice, and compared, if that is how it failed."""
    first = replay_case(case, record=True, imports=imports)
    if case.violates != DETERMINISM or first.verdict == "fail":
        return first
    second = replay_case(case, record=True, imports=imports)
    if first.digest == second.digest:
        return first
    pairs = enumerate(zip(first.moments, second.moments, strict=False))
    op = next((op for op, (one, other) in pairs if one != other), len(second.moments) - 1)
    message = (
        f"the case, done in two fresh subjects, gave different results at operation {op}, "
        f"{kind_of(case.operations[op])}: the subject, or its policy, is not deterministic"
    )
    return replace(second, verdict="fail", violations=[Violation(DETERMINISM, message, op=op)])


def _print_log(moments: Sequence[Moment]) -> None:
    """What was asked, what was answered, and each event.

    ``request=k`` and ``transfer=k`` are places among those that the operation may be about: whom it
    was about, the answer says.
    """
    for moment in moments:
        outcome = moment.outcome
        about = [] if outcome.request is None else [f"request {outcome.request}"]
        about += [f"transfer {number}" for number in outcome.transfers]
        words = " ".join(filter(None, [outcome.status, outcome.reason, ", ".join(about)]))
        console.print(f"{moment.op:5} {moment.operation} → {words}", markup=False)
        for event in moment.events:
            console.print(f"          {_shown(event)}", markup=False)


def _shown(event: Event) -> str:
    """An event, with keys by their first digits."""
    fields = [f"{name}={_short(getattr(event, name))}" for name in event.__struct_fields__]
    return f"{type(event).__name__}({', '.join(fields)})"


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{value.hex()[:12]}…"
    if isinstance(value, list | tuple) and any(isinstance(part, bytes) for part in value):
        return f"[{', '.join(map(_short, value))}]"
    return repr(value)


def _allows(case: Case, subject: str | None) -> bool:
    """Whether the user has said that the case may import what it names.

    Raises InputError if he named something else, or has to name it.
    """
    own = is_kvproofs_own(case.subject) or ":" not in case.subject
    if subject is None or own:
        if not own:
            raise InputError(
                f"this case imports code of somebody's: if you trust it, add --subject "
                f"{quote(case.subject)}"
            )
        return False
    if subject not in (case.subject, case.subject.partition(":")[2]):
        raise InputError(f"the case is of {case.subject}, but --subject says {subject}")
    return True


def _explain(case: Case, result: Replay, index: int) -> str:
    return explain(result.violations[index], result.moments, case.configuration.block_size)


def shrink(
    case_file: CaseArgument,
    out: Annotated[
        Path | None, typer.Option(help="Where the shrunk case goes.", show_default="stdout")
    ] = None,
    subject: SubjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a failing case as short as it gets.

    Example: [bold]kvproof shrink found.json --out small.json[/]
    """
    if out is not None:
        writable_file(out)
    case = load_case(case_file)
    imports = _allows(case, subject)
    shrunk = shrink_case(case, imports=imports)
    if shrunk is None:
        verdict = replay_case(case, imports=imports).verdict
        if as_json:
            print_json({"verdict": verdict, "subject": case.subject, "ops": len(case.operations)})
        else:
            show_verdict(verdict, "no violation was seen: there is nothing to shrink")
        finish(verdict)
    if out is not None:
        save_case(shrunk.case, out)
    if as_json:
        print_json(
            {
                "verdict": "fail",
                "subject": case.subject,
                "ops": len(shrunk.case.operations),
                "replays": shrunk.replays,
                "property": shrunk.violation.property,
                "case": None if out is None else str(out),
            }
        )
    elif out is None:
        print(dump_case(shrunk.case), end="")
    else:
        show_verdict(
            "fail",
            f"{shrunk.violation.property}: {len(case.operations)} operations became "
            f"{len(shrunk.case.operations)} in {shrunk.replays} replays; see {out}",
        )
    finish("fail")
