"""``kvproof bench``: speed, as ratios within one run."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvproof.fuzz.bench.campaign import CampaignBench, bench_campaign
from kvproof.fuzz.bench.engine import EngineBench, bench_engine
from kvproof.fuzz.bench.machine import MachineBench, bench_machine
from kvproof.fuzz.bench.scheduler import SchedulerBench, bench_scheduler
from kvproof.fuzz.bench.subject import POOLS, SubjectBench, bench_subject
from kvproof.fuzz.cli.output import JsonOption, console, print_json, progress_bar, table

app = typer.Typer(no_args_is_help=True, help="Benchmarks; ratios are within one run.")

RoundsOption = Annotated[int, typer.Option(min=1, help="Interleaved rounds; the best counts.")]


@app.command("engine")
def engine(rounds: RoundsOption = 5, as_json: JsonOption = False) -> None:
    """What checking costs on the engine, and whether it grows with the pool.

    Example: [bold]kvproof bench engine --json[/]
    """
    with progress_bar("rounds", rounds) as bar:
        result = bench_engine(rounds, lambda done: bar.update(done, ""))
    if as_json:
        print_json(_fields(result))
        return
    _show(result)


@app.command("machine")
def machine(rounds: RoundsOption = 5, as_json: JsonOption = False) -> None:
    """The Hypothesis machine's steps a second, beside a machine whose rules do nothing.

    Example: [bold]kvproof bench machine[/]
    """
    with progress_bar("rounds", rounds) as bar:
        result = bench_machine(rounds, lambda done: bar.update(done, ""))
    if as_json:
        print_json(_fields(result))
        return
    _show(result)


@app.command("scheduler")
def scheduler(rounds: RoundsOption = 5, as_json: JsonOption = False) -> None:
    """What an iteration costs with 1,000 running and 10,000 waiting requests.

    With all checks on, and without; with fewer waiting; and with fewer running.

    Example: [bold]kvproof bench scheduler --json[/]
    """
    with progress_bar("rounds", rounds) as bar:
        result = bench_scheduler(rounds, lambda done: bar.update(done, ""))
    if as_json:
        print_json(_fields(result))
        return
    _show(result)


@app.command("campaign")
def campaign(rounds: RoundsOption = 5, as_json: JsonOption = False) -> None:
    """Operations a second of a campaign, beside the Hypothesis machine; of two workers beside one.

    Half a minute a round.  Two workers want two idle cores.

    Example: [bold]kvproof bench campaign --json[/]
    """
    with progress_bar("rounds", rounds) as bar:
        result = bench_campaign(rounds, lambda done: bar.update(done, ""))
    if as_json:
        print_json(_fields(result))
        return
    _show(result)


@app.command("subject")
def subject(
    name: Annotated[str, typer.Argument(help="As for kvproof check --subject.")],
    rounds: RoundsOption = 5,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks of a pool; may be repeated.", show_default="64, 16384"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What checking costs on any subject, yours too, in a small and in a large pool.

    Example: [bold]kvproof bench subject vllm:manager[/]
    """
    with progress_bar("rounds", rounds) as bar:
        result = bench_subject(
            name, rounds, lambda done: bar.update(done, ""), pools=blocks or POOLS
        )
    if as_json:
        print_json(_fields(result))
        return
    _show(result)


AnyBench = EngineBench | MachineBench | SchedulerBench | CampaignBench | SubjectBench


def _fields(result: AnyBench) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(result)
    fields["results"] = [
        {**msgspec.to_builtins(m), "ops_per_second": m.ops_per_second} for m in result.results
    ]
    return fields


def _show(result: AnyBench) -> None:
    rows = [(m.name, m.ops, m.ops_per_second, m.seconds / m.ops * 1e6) for m in result.results]
    table("Operations", ("variant", "operations", "per second", "µs each"), rows)
    for name, ratio in result.ratios.items():
        console.print(f"{name}: {ratio:.2f}")
    calls = result.calibration.empty_method_calls_per_second
    console.print(
        f"calibration: {calls / 1e6:.1f} million empty Python method calls a second; "
        f"{result.machine.python} on {result.machine.system} {result.machine.processor}"
    )
