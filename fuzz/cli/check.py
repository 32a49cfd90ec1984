"""``kvproof check``: drive a subject and check everything."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer
from rich.columns import Columns

from kvproof.engine.policies import POLICY_NAMES
from kvproof.fuzz.campaign import Finding, Report, check_subject
from kvproof.fuzz.cli.output import (
    JsonOption,
    SeedOption,
    console,
    finish,
    fresh_seed,
    print_json,
    progress_bar,
    show_files,
    show_verdict,
    table,
    violation_fields,
    writable_folder,
)
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.verdicts import reachable_goals
from kvproof.invariants.case import dump_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.goals import Goal
from kvproof.invariants.scheduling.vocabulary import Promises
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import counted, tallied
from kvproof.stateful_tests.subjects import (
    VLLM_ONE_GROUP,
    VLLM_SCHEDULERS,
    subject_factory,
    subject_families,
)
from kvproof.stateful_tests.subjects.policies import (
    EVICTION_POLICIES,
    is_eviction_policy,
    policy_factory,
)

_SHOWN_CASE_LINES = 40
_SHOWN_REASONS = 8

_VLLM = " or ".join(VLLM_ONE_GROUP)


def check(
    subject: Annotated[
        str,
        typer.Option(
            help=f"What to drive: {', '.join(subject_families())}, or MODULE:CLASS of your own."
        ),
    ] = "engine",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Check a scheduler or an eviction policy: a name that comes with kvproof "
            f"({', '.join((*POLICY_NAMES, *EVICTION_POLICIES))}), or MODULE:CLASS or FILE.py:CLASS "
            f"of your own.  With --subject {_VLLM}: vLLM's policy, fcfs or priority."
        ),
    ] = None,
    scheduler_class: Annotated[
        str | None,
        typer.Option(
            "--scheduler-cls",
            help=f"With --subject {_VLLM}: MODULE:CLASS of a scheduler of your own, as vLLM's "
            "option of that name.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=31_536_000, help="Time budget.")] = 30.0,
    seed: SeedOption = None,
    out: Annotated[
        Path, typer.Option(help="Folder for what is found: case, pytest file and log.")
    ] = Path("kvproof-findings"),
    fault: Annotated[
        str | None,
        typer.Option(help="Plant a seeded fault first, to see it found (see: faults list)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Drive a paged KV cache with generated operations, and check each one.

    Half of the time goes to a fast seeded loop, half to a Hypothesis state machine.  A failing
    run is shrunk, explained, and written as a case, a pytest file and a log.

    With [bold]--policy[/] a scheduler with that policy is driven instead: arrivals, iterations,
    aborts, and then to the end, so that whatever waits for ever is found.

    Examples: [bold]kvproof check[/]   [bold]kvproof check --policy sched.py:MyPolicy[/]
    [bold]kvproof check --fault no-copy-on-write[/]
    [bold]kvproof check --subject vllm:scheduler --policy priority[/]
    """
    subject = _driven(subject, policy, scheduler_class)
    if fault is not None:
        subject = _with_fault(subject, policy, fault)
    writable_folder(out)
    seed = fresh_seed(seed)
    with progress_bar(f"checking {subject}", seconds) as bar:
        report = check_subject(
            subject, seconds=seconds, seed=seed, out=out, fault=fault, progress=bar.update
        )
    goals = reachable_goals(subject_factory(subject)(Configuration()))
    if as_json:
        print_json(_fields(report, goals))
    else:
        _show(report, goals)
    finish(report.verdict)


def _driven(subject: str, policy: str | None, scheduler_class: str | None) -> str:
    """The name of the subject that the options describe."""
    if subject in VLLM_SCHEDULERS:
        chosen = (policy or ("fcfs" if scheduler_class else None), scheduler_class)
        return ":".join([subject, *filter(None, chosen)])
    if scheduler_class is not None:
        raise InputError(f"--scheduler-cls goes with --subject {_VLLM}")
    if policy is None:
        return subject
    if subject != "engine":
        raise InputError(
            "--policy is checked with kvproof's own engine, so leave out --subject, or with "
            f"--subject {_VLLM}"
        )
    family = "eviction" if is_eviction_policy(policy) else "scheduler"
    return f"{family}:{policy}"


def _with_fault(subject: str, policy: str | None, fault: str) -> str:
    """The subject to drive: a fault of the scheduler shows only where a scheduler runs."""
    if subject.startswith(VLLM_SCHEDULERS) or (subject != "engine" and policy is None):
        raise InputError("--fault plants its fault in the engine: it goes with --subject engine")
    return subject if policy is not None else fault_by_id(fault).subject


def _fields(report: Report, goals: tuple[Goal, ...]) -> dict[str, object]:
    total, finding = report.total, report.finding
    violations = []
    if finding is not None:
        case = str(finding.files[0]) if finding.files else None
        told = (finding.violation, finding.explanation, case, finding.unwritten)
        violations = [violation_fields(*told)]
    return {
        "verdict": report.verdict,
        "reasons": list(report.reasons),
        "subject": report.subject,
        "seed": report.seed,
        "ops": total.ops,
        "seconds": round(total.seconds, 3),
        "ops_per_second": round(total.ops / total.seconds) if total.seconds else 0,
        "drivers": {
            "loop": {"ops": report.loop.ops, "seconds": round(report.loop.seconds, 3)},
            "machine": {"ops": report.machine.ops, "seconds": round(report.machine.seconds, 3)},
        },
        "operations": total.operations,
        "meanings": total.meanings,
        "violations": violations,
        "goals": [{"id": g.id, "hits": total.goals.get(g.id, 0), "rare": g.rare} for g in goals],
        "invariants": [{"id": name, "checked": n} for name, n in total.checked.items()],
    }


def _show(report: Report, goals: tuple[Goal, ...]) -> None:
    total = report.total
    rows = [(kind, c["done"], c["refused"], c["skipped"]) for kind, c in total.operations.items()]
    table("Operations", ("kind", "done", "refused", "skipped"), rows)
    above = sum([sum(counts.values()) for counts in total.operations.values()])
    if above < total.ops:
        below = tallied(total.ops - above, "operation")
        console.print(f"  and {below} of the cache below the scheduler, which are counted as well")
    meanings = "  ".join([f"{name} {runs:,}" for name, runs in sorted(total.meanings.items())])
    console.print(f"[bold]Runs, by what becomes of KV without room[/]  {meanings}", markup=True)
    if report.finding is None:  # a run that ended early at a violation has missed a lot
        _show_goals(report, goals)
    missing = " (not promised)" if report.verdict == "pass" else ""
    counts = [
        f"{name} {count:,}{'' if count else missing}" for name, count in total.checked.items()
    ]
    checked = "  ".join(counts)
    console.print(f"[bold]Checks made[/]  {checked}", markup=True)
    if report.finding is not None:
        _show_finding(report.finding)
    _show_summary(report)


def _show_promises(subject: str) -> None:
    """What a scheduler policy promises was checked; what it does not, was not demanded."""
    family, _, policy = subject.partition(":")
    if family == "scheduler":
        promises = getattr(policy_factory(policy)(), "promises", Promises())
        made = ", ".join(msgspec.to_builtins(promises)) or "none"
        console.print(f"  Promises of the policy, which were checked: {made}.", markup=False)


def _hint(subject: str) -> str:
    """A fault that shows in what was checked; what is not kvproof's, one has to break oneself."""
    family, _, policy = subject.partition(":")
    if family == "eviction":
        return f"kvproof check --policy {quote(policy)} --fault no-copy-on-write"
    if family == "scheduler":
        fault = "finished-request-keeps-its-blocks"
        return f"kvproof check --policy {quote(policy)} --fault {fault}"
    if family == "engine":
        return "kvproof check --fault no-copy-on-write"
    truth = f"kvproof conformance --subject {quote(subject)}"
    return f"break it, as docs/pytest.md does.  That the adapter tells the truth: {truth}"


def _show_goals(report: Report, goals: tuple[Goal, ...]) -> None:
    reached = [goal for goal in goals if report.total.goals.get(goal.id)]
    missed = [goal for goal in goals if goal not in reached]
    console.print(f"[bold]Situations reached[/]  {len(reached)} of {len(goals)}", markup=True)
    hits = [f"{goal.id} {report.total.goals[goal.id]:,}" for goal in reached]
    console.print(Columns(hits, padding=(0, 3)))
    for goal in missed:
        rare = " (rare: may be missed)" if goal.rare else ""
        console.print(f"  not reached: {goal.id}, {goal.situation}{rare}", markup=False)


def _show_finding(finding: Finding) -> None:
    console.print(f"\n{finding.explanation}\n", markup=False)
    lines = dump_case(finding.case).splitlines()
    for line in lines[:_SHOWN_CASE_LINES]:
        console.print(line, markup=False)
    if len(lines) > _SHOWN_CASE_LINES:
        console.print(f"  … {len(lines) - _SHOWN_CASE_LINES} more lines")
    ops = len(finding.case.operations)
    shrunk = f", shrunk to {ops}" if ops < finding.found_ops else ""
    console.print(
        f"Found by the {finding.driver} in a run of {counted(finding.found_ops, 'operation')}"
        f"{shrunk}."
    )
    show_files(finding.files, finding.unwritten, finding.case.subject)


def _show_summary(report: Report) -> None:
    total = report.total
    speeds = [
        f"{name} {totals.ops / totals.seconds:,.0f}/s"
        for name, totals in (("seeded loop", report.loop), ("Hypothesis machine", report.machine))
        if totals.seconds
    ]
    show_verdict(
        report.verdict,
        f"{report.subject}: {tallied(total.ops, 'operation')} in {tallied(total.runs, 'run')}, "
        f"{total.seconds:.1f} s ({', '.join(speeds)}), seed {report.seed}",
    )
    if report.verdict == "unknown":
        for reason in report.reasons[:_SHOWN_REASONS]:
            console.print(f"  because {reason}", markup=False)
        if len(report.reasons) > _SHOWN_REASONS:
            console.print(f"  … and {len(report.reasons) - _SHOWN_REASONS} more, see --json")
    if report.verdict == "pass":
        _show_promises(report.subject)
        console.print(
            "  No property was violated, every operation kind that the subject offers succeeded, "
            "and each situation that is not rare was reached.\n"
            "  What the checks say: kvproof invariants.  That they can fail: "
            + _hint(report.subject),
            markup=False,
        )
