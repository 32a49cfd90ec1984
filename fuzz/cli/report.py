"""``kvproof report``: what campaigns came to, as a page to act on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.cli.output import (
    JsonOption,
    console,
    finish,
    print_json,
    show_verdict,
    writable_file,
)
from kvproof.fuzz.report.fields import fields
from kvproof.fuzz.report.summary import Summary, may_import, summarise
from kvproof.invariants.errors import InputError

_SHOWN_REASONS = 8


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of campaigns, as kvproof fuzz --out left them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page.", show_default="report.html in the folder, or of several: here"
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="A JUnit XML file as well, for the test reports of CI.")
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject",
            "--policy",
            help="Allow a campaign to import this subject or policy of yours: to replay its "
            "findings, and to know what it can do.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add up what campaigns did, and write one page that tells it.

    The page needs nothing but itself: send it, keep it, read it offline.
    For each finding it has the message, the life of the block or request, a
    picture of who held which block over time, the shrunk operations, and how to
    replay them; then what was reached and what was missed.

    Shards that ran on machines that cannot see each other are added up by
    naming all of their folders.  The exit code is that of the verdict: 0 pass,
    1 a finding that no issue is known for, 3 unknown, since something was never
    reached.

    Needs an extra: pip install 'kvproof\\[report]' (in a checkout: '.\\[report]').

    Examples: [bold]kvproof report campaign[/]
    [bold]kvproof report shard-0 shard-1 --out report.html --junit junit.xml[/]
    [bold]kvproof report campaign --policy sched.py:MyPolicy[/]
    """
    _require_extra()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such campaign's folder")
    out = out or _page_of(folders)
    for file in (out, junit):
        if file is not None:
            writable_file(file)
    trusted = _trusted(subject or [])
    summary = summarise(folders, trusted)
    _write(summary, out, junit, trusted)
    if as_json:
        written = {"page": str(out), "junit": None if junit is None else str(junit)}
        print_json({**fields(summary), **written})
    else:
        _show(summary, out, junit, trusted)
    finish(summary.verdict)


INSTALL_REPORT = "pip install 'kvproof[report]' (in a checkout: '.[report]')"


def missing_for_report() -> list[str]:
    """Packages of the extra that are not installed."""
    return [name for name in ("jinja2", "junitparser") if find_spec(name) is None]


def _require_extra() -> None:
    missing = missing_for_report()
    if missing:
        raise InputError(f"a report needs {' and '.join(missing)}: {INSTALL_REPORT}")


def _trusted(named: list[str]) -> frozenset[str]:
    """The subjects meant: a policy may be named as for check, without its family."""
    families = ("", "scheduler:", "eviction:")
    return frozenset(family + name for name in named for family in families)


def _page_of(folders: list[Path]) -> Path:
    """With its campaign, so that it writes over that of no other one."""
    return (folders[0] if len(folders) == 1 else Path()) / "report.html"


def _write(summary: Summary, out: Path, junit: Path | None, trusted: frozenset[str]) -> None:
    from kvproof.fuzz.report.junit import write_junit
    from kvproof.fuzz.report.page import write_page

    write_page(summary, out, trusted)
    if junit is not None:
        write_junit(summary, junit)


def _without_maps(summary: Summary, trusted: frozenset[str]) -> Iterator[str]:
    """Whose findings are not replayed."""
    subjects = [finding.record.subject for finding in summary.findings]
    for name in dict.fromkeys(subjects):
        if name != KERNELS and not may_import(name, trusted):
            yield (
                f"the block maps of {name} are left out: a replay imports code of yours, allow it "
                f"with --subject {quote(name)}"
            )


def _show(summary: Summary, out: Path, junit: Path | None, trusted: frozenset[str]) -> None:
    for finding in summary.findings:
        record = finding.record
        known = f" (known: {record.known})" if record.known else ""
        like = f" (looks like {finding.like})" if finding.like else ""
        console.print(f"{record.id}{known}{like}: {record.message}", markup=False)
    for note in [*summary.notes, *_without_maps(summary, trusted)]:
        console.print(f"  note: {note}", markup=False)
    show_verdict(summary.verdict, summary.sentence)
    if summary.verdict == "unknown":
        for reason in summary.reasons[:_SHOWN_REASONS]:
            console.print(f"  because {reason}", markup=False)
        if len(summary.reasons) > _SHOWN_REASONS:
            console.print(f"  … and {len(summary.reasons) - _SHOWN_REASONS} more, see the page")
    for path in (out, junit):
        if path is not None:
            console.print(f"  written: {path}", markup=False)
