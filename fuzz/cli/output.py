"""What all commands share: exit codes, JSON with a schema version, tables, progress."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NoReturn, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvproof.fuzz.report.chart import duration
from kvproof.invariants.errors import InputError
from kvproof.invariants.verdict import Verdict, Violation
from kvproof.stateful_tests.subjects import is_kvproofs_own

SCHEMA = 1
"""Version of what ``--json`` prints; raised whenever a key changes its meaning or goes away."""

EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "unknown": 3}
EXIT_BAD_INPUT = 2
EXIT_UNKNOWN = EXIT_CODES["unknown"]
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
SeedOption = Annotated[
    str | None,
    typer.Option(
        help="Where random choices start; printed with each result.", show_default="random"
    ),
]

# A pipe or a log has no width of its own: wide enough for the tables, COLUMNS overrides it.
_WIDTH = shutil.get_terminal_size(fallback=(130, 24)).columns

console = Console(highlight=False, soft_wrap=True, emoji=False, width=_WIDTH)
stderr = Console(stderr=True, highlight=False)


LINE_SECONDS = (10.0, 60.0)
"""Where there is no terminal for a bar, a line of progress comes so often: at first, and later."""
WIDE = 120
"""Columns from which on a table of long texts can be read; below, they are listed."""


def fresh_seed(seed: str | None) -> str:
    """The seed asked for, or a new one.  Raises InputError if it is not one line."""
    if seed is not None and len(f"{seed}.".splitlines()) > 1:
        raise InputError("--seed: say it in one line")
    return seed if seed is not None else str(secrets.randbelow(10**9))


def print_json(fields: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    json.dump({"schema": SCHEMA, **fields}, sys.stdout, indent=1)
    print()


def writable_folder(folder: Path) -> None:
    """Raise InputError now if findings could not be written there later.

    That is tried, beside where the folder would be made: rights alone say too little.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a folder")
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    try:
        with TemporaryDirectory(prefix=".kvproof-", dir=nearest):
            pass
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to: {error.strerror}") from None


def writable_file(file: Path) -> None:
    """Raise InputError now if the file could not be written later."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{file}: its folder does not exist")
    if not os.access(folder, os.X_OK):
        raise InputError(f"{file}: its folder may not be entered")
    if file.exists() and not file.is_file():
        raise InputError(f"{file}: is there and is no regular file")
    if not file.exists() and not os.access(folder, os.W_OK):
        raise InputError(f"{file}: its folder cannot be written to")
    if file.exists() and not os.access(file, os.W_OK):
        raise InputError(f"{file}: cannot be written to")


def finish(verdict: Verdict) -> NoReturn:
    """Leave with the verdict's exit code."""
    raise typer.Exit(EXIT_CODES[verdict])


def show_verdict(verdict: Verdict, text: str) -> None:
    """The line that counts."""
    colour = {"pass": "green", "fail": "red", "unknown": "yellow"}[verdict]
    console.print(f"[bold {colour}]{verdict.upper()}[/] {text}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; numbers stand right."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][index], int | float)
        side: Literal["left", "right"] = "right" if numeric else "left"
        drawn.add_column(column, justify=side, overflow="fold", no_wrap=index == 0)
    for row in rows:
        drawn.add_row(*[_cell(value) for value in row])
    console.print(drawn)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def violation_fields(
    violation: Violation, explanation: str, case: str | None, unwritten: str = ""
) -> dict[str, object]:
    """A violation as ``--json`` prints it; ``unwritten``: why there is no case."""
    return {
        "property": violation.property,
        "op": violation.op,
        "message": violation.message,
        "explanation": explanation,
        "case": case,
        **({"unwritten": unwritten} if unwritten else {}),
    }


def show_files(files: Sequence[Path], unwritten: str, subject: str) -> None:
    """What a finding left behind, and how to run its case again; or why it left nothing."""
    for path in files:
        console.print(f"  written: {path}", markup=False)
    if files:
        console.print(f"  replay:  {replay_command(files[0], subject)}", markup=False)
    else:
        console.print(f"  nothing was written: {unwritten}", markup=False)


def replay_command(case: Path, subject: str) -> str:
    """What to type to run a case again; one of the user's own code has to be allowed to."""
    own = "" if is_kvproofs_own(subject) else f" --subject {quote(subject)}"
    return f"kvproof replay {quote(str(case))} --log{own}"


class Bar(Protocol):
    """Progress of something that takes a known time or number of steps."""

    def update(self, completed: float, text: str) -> None:
        """Where it stands, of the total, and a few words."""


class _Drawn:
    """A bar of a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, completed: float, text: str) -> None:
        self._progress.update(self._task, completed=completed, text=text)


class _Lines:
    """What a log has instead, since rich draws nothing there: a line now and then."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self._next = self._started + LINE_SECONDS[0]

    def update(self, completed: float, text: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        elapsed, (shortest, longest) = now - self._started, LINE_SECONDS
        self._next = now + min(longest, max(shortest, elapsed / 20))
        words = f"{self._label}, {duration(round(elapsed))}: {text}"
        stderr.print(words, soft_wrap=True, markup=False)


@contextmanager
def progress_bar(label: str, total: float) -> Iterator[Bar]:
    """On standard error: a bar, or where there is no terminal, lines."""
    if not stderr.is_terminal:
        yield _Lines(label)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        yield _Drawn(progress, progress.add_task(label, total=total, text=""))
