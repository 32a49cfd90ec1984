"""The application: its commands, and what an error looks like."""

from __future__ import annotations

import os
import sys
import traceback
from inspect import cleandoc
from typing import Any, NoReturn

import typer

from kvproof.fuzz.cli import (
    bench,
    check,
    conformance,
    faults,
    fuzz,
    invariants,
    kernels,
    replay,
    report,
    trace,
)
from kvproof.fuzz.cli.output import EXIT_BAD_INPUT, EXIT_CLOSED_PIPE, EXIT_INTERRUPTED, EXIT_UNKNOWN
from kvproof.invariants.errors import InputError

app = typer.Typer(
    name="kvproof",
    help="""Verify a paged KV cache by driving it with operations and checking every step.

    Exit codes: 0 pass, 1 a property is violated, 2 bad usage or input, 3 unknown.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("check")(check.check)
app.command("conformance")(conformance.conformance)
app.command("fuzz")(fuzz.fuzz)
app.command("report")(report.report)
app.command("trace")(trace.trace)
app.command("replay")(replay.replay)
app.command("shrink")(replay.shrink)
app.command("invariants")(invariants.invariants)
app.add_typer(faults.app, name="faults")
app.add_typer(bench.app, name="bench")
app.add_typer(kernels.app, name="kernels")


def flowing(text: str) -> str:
    """A docstring as help: typer keeps the line breaks of all but its first paragraph.

    Examples keep theirs.
    """
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith("Example") else p.replace("\n", " ") for p in paragraphs)


for _app in (app, faults.app, bench.app, kernels.app):
    for _command in _app.registered_commands:
        assert _command.callback is not None
        _command.help = flowing(_command.callback.__doc__ or "")


def main() -> None:
    """Entry point: bad input is one clear line and exit code 2; a crash is never a verdict."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except typer.Abort:  # at Ctrl-C, of older versions of typer
        sys.exit(EXIT_INTERRUPTED)
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output went away, as `head` does: there is nobody to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_CLOSED_PIPE)
        told = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            told = f"{error.filename}: {error.strerror}"
        print(f"kvproof: {told}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except Exception as error:
        if hasattr(error, "format_message"):  # of typer's, whose errors have no public name
            _end_with_usage(error)
        # A mistake of kvproof's own must not look like a violation (1).
        traceback.print_exc()
        print(f"kvproof: internal error, please report it: {error!r}", file=sys.stderr)
        sys.exit(EXIT_UNKNOWN)


def _end_with_usage(error: Any) -> NoReturn:
    """Leave with what is wrong with the command; if nothing is, its help was shown instead."""
    told = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "kvproof"
    if told:
        print(f"kvproof: {told}; see {where} --help", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
