"""The application: its commands, and what an error looks like."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from kvproof.fuzz.cli import bench, check, faults, fuzz, invariants, kernels, replay, report, trace
from kvproof.fuzz.cli.output import EXIT_BAD_INPUT, EXIT_CLOSED_PIPE, EXIT_UNKNOWN
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
app.command("fuzz")(fuzz.fuzz)
app.command("report")(report.report)
app.command("trace")(trace.trace)
app.command("replay")(replay.replay)
app.command("shrink")(replay.shrink)
app.command("invariants")(invariants.invariants)
app.add_typer(faults.app, name="faults")
app.add_typer(bench.app, name="bench")
app.add_typer(kernels.app, name="kernels")


def main() -> None:
    """Entry point: bad input is one clear line and exit code 2; a crash is never a verdict."""
    try:
        app()
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
        # A mistake of kvproof's own must not look like a violation (1).
        traceback.print_exc()
        print(f"kvproof: internal error, please report it: {error!r}", file=sys.stderr)
        sys.exit(EXIT_UNKNOWN)
