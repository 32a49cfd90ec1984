"""``kvproof faults``: the seeded faults, and how fast they are found."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvproof.fuzz.cli.output import (
    JsonOption,
    console,
    finish,
    print_json,
    progress_bar,
    show_verdict,
    table,
)
from kvproof.fuzz.detect import CleanRun, Detection, complaint, detect_fault, run_clean
from kvproof.fuzz.faults import Fault, all_faults, fault_by_id

app = typer.Typer(no_args_is_help=True, help="Seeded faults: list them, or measure detection.")


@app.command("list")
def list_faults(as_json: JsonOption = False) -> None:
    """List the seeded faults: what each breaks, and which public bug it is modelled on.

    Example: [bold]kvproof faults list[/]
    """
    if as_json:
        fields = ("id", "property", "source", "summary", "subject", "shortest", "also")
        print_json({"faults": [{f: getattr(fault, f) for f in fields} for fault in all_faults()]})
        return
    for f in all_faults():
        console.print(f"[bold]{f.id}[/]  {f.property}, {f.subject}, {f.shortest} operations")
        console.print(f"    {f.summary}  ({f.source})", markup=False)
    console.print("See one found: kvproof check --fault NAME")


@app.command("detect")
def detect(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FAULT]...", help="Only these faults.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches for each fault.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of a search.")] = 10.0,
    clean_ops: Annotated[
        int, typer.Option(min=1, help="Operations on the unmodified engine.")
    ] = 200_000,
    seed: Annotated[str, typer.Option(help="Where random choices start.")] = "detect",
    as_json: JsonOption = False,
) -> None:
    """Plant each fault, search until it is found, shrink; and show that clean code stays silent.

    Example: [bold]kvproof faults detect --seeds 20[/]
    """
    faults = [fault_by_id(name) for name in names] if names else list(all_faults())
    detections = []
    with progress_bar("faults", len(faults)) as bar:
        for index, fault in enumerate(faults):
            bar.update(index, fault.id)
            detections.append(detect_fault(fault, seed=seed, seeds=seeds, seconds=seconds))
        bar.update(len(faults), "unmodified engine")
        subjects = list(dict.fromkeys(fault.subject for fault in faults))
        clean = run_clean(f"{seed}/clean", clean_ops, subjects)
    good = clean.violations == 0 and not any(complaint(d) for d in detections)
    if as_json:
        print_json(
            {
                "verdict": "pass" if good else "fail",
                "seed": seed,
                "faults": [msgspec.to_builtins(d) for d in detections],
                "clean": msgspec.to_builtins(clean),
            }
        )
    else:
        _show(faults, detections, clean, good)
    finish("pass" if good else "fail")


def _show(faults: list[Fault], detections: list[Detection], clean: CleanRun, good: bool) -> None:
    rows = [
        (
            d.id,
            d.property,
            f"{d.detected}/{d.seeds}",
            d.median_ops,
            d.p90_ops,
            d.median_seconds,
            d.p90_seconds,
            f"{d.shrunk_ops} (≤ {d.shrunk_ops_max})",
            d.shortest_known_ops,
        )
        for d in detections
    ]
    table(
        "Detection of seeded faults",
        (
            "fault",
            "property",
            "found",
            "median ops",
            "p90 ops",
            "median s",
            "p90 s",
            "shrunk ops",
            "shortest",
        ),
        rows,
    )
    console.print(
        f"Unmodified engine and schedulers: {clean.ops:,} operations, {clean.violations} "
        "violations."
    )
    show_verdict(
        "pass" if good else "fail",
        "every fault was found in every search, and shrank to at most twice its shortest run"
        if good
        else "; ".join(complaint(d) for d in detections if complaint(d))
        or "an unmodified subject violates a property",
    )
