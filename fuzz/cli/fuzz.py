"""``kvproof fuzz``: campaigns of minutes or days, on all cores."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from msgspec import Struct

from kvproof.fuzz.campaigns import regress
from kvproof.fuzz.campaigns.executors import LocalExecutor
from kvproof.fuzz.campaigns.known import entry_of, mark_known, mended, read_ledger
from kvproof.fuzz.campaigns.mended import put_mended_aside
from kvproof.fuzz.campaigns.records import Campaign, CodeCoverage, Progress
from kvproof.fuzz.campaigns.run import CampaignRun, Standing
from kvproof.fuzz.campaigns.store import Store, read_lines
from kvproof.fuzz.campaigns.targets import FAMILIES, KERNELS, chosen_targets, has_kernels
from kvproof.fuzz.cli.output import (
    JsonOption,
    SeedOption,
    console,
    finish,
    fresh_seed,
    print_json,
    progress_bar,
    replay_command,
    show_verdict,
    stderr,
    table,
    writable_folder,
)
from kvproof.fuzz.cli.report import INSTALL_REPORT, missing_for_report
from kvproof.fuzz.report.chart import duration
from kvproof.fuzz.report.fields import fields
from kvproof.fuzz.report.summary import MergedFinding, Summary, may_import, summarise
from kvproof.invariants.errors import InputError
from kvproof.invariants.verdict import counted

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SHARD = re.compile(r"(\d+)/(\d+)")
_SHOWN_LINES = 12


def fuzz(
    time: Annotated[
        str, typer.Option(help="How long this call runs: 30s, 5m, 8h, 2d.  Call again for more.")
    ] = "60s",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Processes, one a core.", show_default="all cores, or Ray's"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the campaign; one that is there goes on.")
    ] = Path("kvproof-campaign"),
    target: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only these of kvproof's own: {', '.join(FAMILIES)}.", show_default="all"
        ),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(help="Drive this: vllm:manager, or MODULE:CLASS of your own."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Drive this scheduler or eviction policy: a name, MODULE:CLASS or FILE.py:CLASS."
        ),
    ] = None,
    seed: SeedOption = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run only shard I of N, from 0: for machines that cannot see each other.  Give "
            "all of them the same --seed.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT",
            help="Spread the workers over a Ray cluster: one a GPU, or a CPU, of it.",
        ),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(help="Ledger of known issues: what it lists is told, and does not fail."),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(help="Plant a seeded fault first, to see it found (see: faults list)."),
    ] = None,
    replay_corpus: Annotated[
        bool,
        typer.Option("--replay-corpus", help="Only run the cases that the campaign has kept."),
    ] = False,
    coverage: Annotated[
        bool,
        typer.Option(
            "--coverage",
            help="With --replay-corpus: also measure branch coverage of the code under test.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fuzz for as long as you like, on all cores; leave findings, a corpus and a journal.

    What fails is shrunk, explained and written once, however often it fails, and the campaign
    goes on with the rest.  The same command goes on where the last one stopped, or was killed.
    Without --target, --subject or --policy all that is kvproof's own is driven: the cache without
    and with tiers, the scheduler and eviction policies, and the kernels if they are installed.

    Examples: [bold]kvproof fuzz --time 8h --workers 16 --out campaign[/]
    [bold]kvproof fuzz --policy sched.py:MyPolicy --time 10m[/]
    [bold]kvproof fuzz --shard 3/16 --seed nightly-17 --time 1h[/]   then, with all folders,
    [bold]kvproof report shard-*[/]
    [bold]kvproof fuzz --fault no-copy-on-write --time 20s --out canary[/]
    """
    seconds = seconds_of(time)
    if coverage and not replay_corpus:
        raise InputError("--coverage is taken with --replay-corpus")
    if replay_corpus:
        _regress(out, named_subjects(subject or (), policy or ()), coverage, as_json)
    writable_folder(out)
    there = Store(out).campaign()
    targets = chosen_targets(target or (), subject or (), policy or (), fault)
    if ray is not None and shard is not None:
        raise InputError("--shard is for machines that cannot see each other: leave out --ray")
    cluster = _cluster(ray, any(own.subject == KERNELS for own in targets)) if ray else None
    cores = cluster.workers if cluster else os.cpu_count() or 1
    shards, of = _shards(shard, workers, there, cores)
    if shard is not None and seed is None and there is None:
        raise InputError("--shard: say --seed as well, the same for all shards")
    campaign = Campaign(
        there.seed if there and seed is None else fresh_seed(seed), targets, of, fault
    )
    ledger = read_ledger(known)
    unjudged: list[str] = []
    stale = mended(ledger, [own.subject for own in campaign.targets], unjudged)
    store = Store(out)
    with store.taken(campaign, None if shard is None else shards[0]):
        with store.in_turn():
            store.tell_stale(stale, [*unjudged, *put_mended_aside(store, campaign.targets)])
            mark_known(store, ledger)
        executor = cluster.executor(of) if cluster else LocalExecutor()
        run = CampaignRun(out, campaign, executor, shards=shards, seconds=seconds, known=known)
        before = _Before.of(store, shards)
        if not as_json:
            is_all = not (target or subject or policy)
            _say_what(campaign, shards, out, lacks_kernels=is_all and not has_kernels())
            _say_where_it_goes_on(before, run.standing.to_replay)
        joined = cluster.joined() if cluster else nullcontext()
        interrupted = _run(run, joined)
        summary = summarise([out])
    if as_json:
        print_json(_fields(summary, interrupted))
    else:
        _show(summary, interrupted, out, before.findings)
    finish(summary.verdict)


def _run(run: CampaignRun, joined: AbstractContextManager[None]) -> list[str]:
    """Run it, tell how far it is, and say whether it was interrupted."""
    interrupted = list[str]()
    with progress_bar("fuzzing", run.seconds) as bar, joined, _interruptible(run, interrupted):
        run.run(lambda standing: bar.update(run.elapsed(), _words(standing)))
    return interrupted


def seconds_of(text: str) -> float:
    """``30s``, ``5m``, ``8h``, ``2d``, or seconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise InputError(f"--time {text}: say 30s, 5m, 8h or 2d")
    return float(match[1]) * _UNITS[match[2]]


def _cluster(address: str, uses_gpus: bool) -> Any:
    """The Ray cluster there; Ray itself is a large package that may not be installed."""
    if find_spec("ray") is None:
        raise InputError("--ray: Ray is not installed: pip install 'kvproof[ray]'")
    executor = import_module("kvproof.fuzz.campaigns.ray_executor")
    return executor.connect(address, uses_gpus=uses_gpus)


def _shards(
    shard: str | None, workers: int | None, there: Campaign | None, cores: int
) -> tuple[Sequence[int], int]:
    """The shards to run here, and how many there are."""
    if shard is None:
        count = workers or (there.shards if there else cores)
        return range(count), count
    match = _SHARD.fullmatch(shard)
    if match is None or not int(match[1]) < int(match[2]) <= 1 << 16:
        raise InputError(f"--shard {shard}: say 0/4, 1/4, 2/4 or 3/4 for the four parts of four")
    if workers is not None:
        raise InputError("--shard is one process of one machine: leave out --workers")
    return [int(match[1])], int(match[2])


class _Before(Struct, frozen=True):
    """How far a campaign was when this call began."""

    seconds: float
    ops: int
    findings: frozenset[str]

    @classmethod
    def of(cls, store: Store, shards: Sequence[int]) -> _Before:
        journals = [path for path in map(store.journal, shards) if path.exists()]
        lines = [line for path in journals for line in read_lines(path, Progress)]
        return cls(
            max([line.at for line in lines], default=0.0),
            sum([line.totals.ops for line in lines]),
            frozenset(finding.id for finding in store.found()),
        )


@contextmanager
def _interruptible(run: CampaignRun, interrupted: list[str]) -> Iterator[None]:
    """Ctrl-C, or a runner's SIGTERM, ends the campaign in order: what there is is told."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        interrupted.append(f"interrupted after {run.elapsed():.0f} of {run.seconds:g} s")
        stderr.print("stopped: the same command goes on")
    finally:
        signal.signal(signal.SIGTERM, before)


def _words(standing: Standing) -> str:
    words = f"{standing.ops:,} operations, {standing.novel:,} kept"
    if standing.failures:
        words += f", {standing.failures:,} failing"
    if standing.replayed < standing.to_replay:
        words += f", replaying {standing.replayed:,} of {standing.to_replay:,} kept runs"
    return words


def named_subjects(subjects: Sequence[str], policies: Sequence[str]) -> frozenset[str]:
    """The subjects that the user named, and whose code may be imported."""
    families = ("scheduler", "eviction")
    return frozenset([*subjects, *[f"{own}:{name}" for own in families for name in policies]])


def _regress(out: Path, named: frozenset[str], coverage: bool, as_json: bool) -> NoReturn:
    """Run the corpus again, and leave with the verdict."""
    store = Store(out)
    campaign = store.campaign()
    if campaign is None:
        raise InputError(f"{out}: is no campaign's folder: there is no campaign.json in it")
    for own in campaign.targets:
        if own.subject != KERNELS and not may_import(own.subject, named):
            raise InputError(f"{out}: {own.name} is code of somebody's: say --subject or --policy")
    covered = None
    if coverage:
        replayed, covered = regress.replay_covered(store, campaign)
    else:
        with progress_bar("replaying", 1) as bar:
            cases = count(1)
            replayed = regress.replay_corpus(
                store, campaign, lambda: bar.update(0, f"{next(cases)} cases")
            )
    if as_json:
        print_json(
            {
                "verdict": replayed.verdict,
                "reasons": list(replayed.problems),
                "seed": campaign.seed,
                "cases": replayed.cases,
                "violations": msgspec.to_builtins(replayed.failing),
                "coverage": msgspec.to_builtins(covered),
            }
        )
        finish(replayed.verdict)
    if covered is not None:
        _show_coverage(covered)
    for failing in replayed.failing:
        console.print(f"{failing.property}: {failing.message}", markup=False)
        console.print(f"  {failing.case}", markup=False)
    told = f"{len(replayed.failing)} of {counted(replayed.cases, 'case')} of the corpus fail"
    show_verdict(replayed.verdict, told if replayed.cases else "the corpus is empty")
    for problem in replayed.problems[:_SHOWN_LINES]:
        console.print(f"  because {problem}", markup=False)
    finish(replayed.verdict)


def _show_coverage(covered: CodeCoverage) -> None:
    shared = os.path.commonpath([os.path.dirname(file.file) for file in covered.files])
    rows = [
        (
            os.path.relpath(file.file, shared),
            f"{file.covered_statements} of {file.statements}",
            f"{file.covered_branches} of {file.branches}",
        )
        for file in covered.files
    ]
    table("Coverage of the code under test", ("file", "statements", "branches"), rows)


def _say_what(campaign: Campaign, shards: Sequence[int], out: Path, *, lacks_kernels: bool) -> None:
    names = ", ".join(target.name for target in campaign.targets)
    console.print(f"[bold]Campaign[/] {out}, seed {campaign.seed}: {names}", markup=True)
    if len(shards) < campaign.shards:
        console.print(f"  shard {shards[0]} of {campaign.shards}", markup=False)
    if lacks_kernels:
        console.print("  without the kernels: torch and triton are not installed")


def _say_where_it_goes_on(before: _Before, to_replay: int) -> None:
    if before.ops:
        told = f"going on after {duration(before.seconds)}, {before.ops:,} operations"
        kept = f"; {counted(to_replay, 'kept run')} of before to replay, beside new ones"
        console.print(f"  {told}{kept if to_replay else ''}", markup=False)


def _fields(summary: Summary, notes: Sequence[str]) -> dict[str, Any]:
    told, campaign, seconds = fields(summary), summary.campaigns[0], summary.seconds
    return {
        **told,
        "notes": [*told["notes"], *notes],
        "subject": ", ".join(subject.subject for subject in summary.subjects),
        "seed": campaign.seed,
        "seconds": round(seconds, 3),
        "ops_per_second": round(summary.total.ops / seconds) if seconds else 0,
    }


def _show(summary: Summary, notes: Sequence[str], out: Path, found_before: Collection[str]) -> None:
    situations = {
        own.subject: f"{len(own.goals) - len(own.missed)} of {len(own.goals)}"
        for own in summary.subjects
    }
    rows = [
        (
            own.target.name,
            own.totals.runs,
            own.totals.ops,
            round(own.totals.ops / own.cpu_seconds) if own.cpu_seconds else 0,
            situations[own.target.subject],
            len(own.transitions),
            own.kept,
        )
        for own in summary.targets
    ]
    columns = ("target", "runs", "operations", "a CPU second", "situations", "transitions", "kept")
    table("What was driven", columns, rows)
    for finding in summary.findings:
        _show_finding(finding, is_earlier=finding.record.id in found_before)
    for note in [*summary.notes, *notes]:
        console.print(f"  note: {note}", markup=False)
    show_verdict(summary.verdict, summary.sentence)
    if summary.verdict == "unknown":
        for reason in summary.reasons[:_SHOWN_LINES]:
            console.print(f"  because {reason}", markup=False)
        if len(summary.reasons) > _SHOWN_LINES:
            console.print(f"  … and {len(summary.reasons) - _SHOWN_LINES} more")
    console.print(f"  a page to read: {_report_command(summary, out)}", markup=False)


def _report_command(summary: Summary, out: Path) -> str:
    """What to type; it imports code of the user's only if it is named, and needs an extra."""
    subjects = [own.subject for own in summary.subjects]
    named = [f" --subject {quote(own)}" for own in subjects if not may_import(own, ())]
    needed = f"  (first: {INSTALL_REPORT})" if missing_for_report() else ""
    return f"kvproof report {quote(str(out))}{''.join(named)}{needed}"


def _show_finding(finding: MergedFinding, *, is_earlier: bool) -> None:
    record, case = finding.record, finding.folder / "case.json"
    known = f"[yellow]known, {record.known}[/]" if record.known else "[red]new[/]"
    console.print(f"\n[bold]{record.id}[/] {known}", markup=True)
    console.print(record.explanation, markup=False)
    if finding.like:
        console.print(f"  looks like {finding.like}, which needs less", markup=False)
    console.print(
        f"{record.target}: {record.found_operations} operations, shrunk to {record.operations}; "
        f"{counted(finding.failures, 'failing run')}; found after {duration(finding.first_seen)}"
        f"{', by an earlier call' if is_earlier else ''}",
        markup=False,
    )
    if case.is_file():
        console.print(f"  replay: {replay_command(case, record.subject)}", markup=False)
    if record.known is None:
        console.print(f"  ledger: {entry_of(record)}", markup=False)
