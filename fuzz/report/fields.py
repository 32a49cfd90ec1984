"""The summary as ``--json`` prints it."""

from __future__ import annotations

from typing import Any

from kvproof.fuzz.report.summary import MergedFinding, Summary, TargetSummary


def fields(summary: Summary) -> dict[str, Any]:
    """What is told of campaigns, for machines."""
    total = summary.total
    goals = {goal.id: goal for subject in summary.subjects for goal in subject.goals}
    return {
        "verdict": summary.verdict,
        "reasons": list(summary.reasons),
        "notes": list(summary.notes),
        "campaigns": [
            {"folder": str(folder), "seed": own.seed, "shards": own.shards, "fault": own.fault}
            for folder, own in zip(summary.folders, summary.campaigns, strict=True)
        ],
        "runs": total.runs,
        "ops": total.ops,
        "outdated_ops": summary.outdated,
        "cpu_seconds": round(summary.cpu_seconds, 3),
        "operations": total.operations,
        "meanings": total.meanings,
        "violations": [_finding(finding) for finding in summary.findings],
        "untriaged": summary.untriaged,
        "goals": [
            {"id": goal.id, "hits": total.goals.get(goal.id, 0), "rare": goal.rare}
            for goal in goals.values()
        ],
        "invariants": [{"id": name, "checked": n} for name, n in total.checked.items()],
        "targets": [_target(target) for target in summary.targets],
    }


def _finding(finding: MergedFinding) -> dict[str, Any]:
    record, case = finding.record, finding.folder / "case.json"
    return {
        "id": record.id,
        "property": record.property,
        "op": record.operations - 1,
        "message": record.message,
        "explanation": record.explanation,
        "case": str(case) if case.is_file() else None,
        "target": record.target,
        "kinds": list(record.kinds),
        "features": list(record.features),
        "failures": finding.failures,
        "first_seen": finding.first_seen,
        "known": record.known,
    }


def _target(done: TargetSummary) -> dict[str, Any]:
    return {
        "name": done.target.name,
        "subject": done.target.subject,
        "runs": done.totals.runs,
        "ops": done.totals.ops,
        "outdated_ops": done.outdated,
        "cpu_seconds": round(done.cpu_seconds, 3),
        "done_twice": done.done_twice,
        "transitions": len(done.transitions),
        "kept": done.kept,
    }
