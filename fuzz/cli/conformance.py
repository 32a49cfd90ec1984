"""``kvproof conformance``: whether an adapter tells the truth about its engine."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from kvproof.fuzz.cli.output import (
    JsonOption,
    console,
    finish,
    print_json,
    replay_command,
    show_verdict,
    writable_file,
)
from kvproof.fuzz.conformance import RUNS, SEED, Examination, examine
from kvproof.invariants.case import dump_case, save_case
from kvproof.invariants.verdict import Verdict, tallied
from kvproof.stateful_tests.subjects import subject_factory


def conformance(
    subject: Annotated[
        str, typer.Option(help="A name, or MODULE:CLASS of your own; as for kvproof check.")
    ],
    runs: Annotated[int, typer.Option(min=1, help="Drawn runs; each is done twice.")] = RUNS,
    seed: Annotated[str, typer.Option(help="Where random choices start.")] = SEED,
    out: Annotated[
        Path | None, typer.Option(help="File for the run that shows the lie: a case.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out whether an adapter lies: about tables, events, answers, or what it declares.

    Whether the engine is right does not matter here; that is what kvproof check finds out.
    docs/adapters.md explains each kind of lie.

    Example: [bold]kvproof conformance --subject my_engine.kv:MyCache[/]
    """
    if out is not None:
        writable_file(out)
    result = examine(subject_factory(subject), runs=runs, seed=seed, subject=subject)
    if out is not None and result.told is not None and result.told.case is not None:
        save_case(result.told.case, out)
    if as_json:
        print_json(_fields(subject, result))
    else:
        _tell(subject, runs, seed, result, out)
    finish(_verdict(result))


def _verdict(result: Examination) -> Verdict:
    if result.told is not None:
        return "fail"
    return "unknown" if result.unsure else "pass"


def _fields(subject: str, result: Examination) -> dict[str, object]:
    told, found = result.told, result.violation
    return {
        "subject": subject,
        "verdict": _verdict(result),
        "reasons": [result.unsure] if result.unsure else [],
        "lie": told and {"kind": told.lie.kind, "message": told.lie.message},
        "case": told and told.case and msgspec.json.decode(dump_case(told.case)),
        "violation": found and {"property": found.property, "message": found.message},
        "operations": result.operations,
    }


def _tell(subject: str, runs: int, seed: str, result: Examination, out: Path | None) -> None:
    told, found = result.told, result.violation
    done = tallied(result.operations, "operation")
    if told is not None:
        show_verdict("fail", f"{escape(subject)} does not tell the truth about")
        console.print(str(told), markup=False)
        if told.case is not None:
            _tell_replay(subject, runs, seed, out)
    elif result.unsure:
        show_verdict("unknown", f"{escape(subject)} told no lie in {done}")
        console.print(f"  because this was {result.unsure}: give it more --runs", markup=False)
    else:
        show_verdict("pass", f"{escape(subject)} tells what is so, in {done}.")
    if found is not None:
        console.print(
            f"The engine itself is another matter: {found.property}, {found.message}.  See "
            f"kvproof check --subject {quote(subject)}",
            markup=False,
        )


def _tell_replay(subject: str, runs: int, seed: str, out: Path | None) -> None:
    """A replay shows what was done; whether that is told as it is, only this command judges."""
    if out is not None:
        command = replay_command(out, subject)
        console.print(f"  what was done, line by line:  {command}", markup=False)
        return
    command = f"kvproof conformance --subject {quote(subject)}"
    command += f" --runs {runs}" * (runs != RUNS) + f" --seed {quote(seed)}" * (seed != SEED)
    console.print(f"  keep the run:  {command} --out case.json", markup=False)
