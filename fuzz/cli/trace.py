"""``kvproof trace``: replay a real request trace with all checks on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvproof.fuzz.cli.output import (
    Bar,
    JsonOption,
    console,
    finish,
    print_json,
    progress_bar,
    show_verdict,
    stderr,
    violation_fields,
    writable_folder,
)
from kvproof.fuzz.replay import replay
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.traces.checked import CheckedTrace, TraceRun
from kvproof.fuzz.traces.formats import read_trace
from kvproof.fuzz.traces.pool import blocks_in, parse_bytes
from kvproof.fuzz.traces.replay import DEFAULT_BUDGET_TOKENS
from kvproof.fuzz.traces.table import result_tables
from kvproof.invariants.case import Case
from kvproof.invariants.errors import InputError
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Verdict, merge
from kvproof.stateful_tests.export import write_finding

_SHRUNK_UP_TO = 20_000
"""Longer cases are written as they are: each replay of them takes seconds."""
POLICY = "fcfs"
"""First come, first served, preemption by recompute: the one policy there is at this level."""


def trace(
    file: Annotated[
        Path, typer.Argument(help="Mooncake JSON lines, Azure CSV or BurstGPT CSV; .gz is fine.")
    ],
    blocks: Annotated[int | None, typer.Option(min=1, help="Usable blocks of the pool.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Or the pool's size in bytes, such as 16GiB.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=1, help="K and V of one token, all layers.")
    ] = 131_072,
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens per block.")] = 16,
    max_requests: Annotated[int, typer.Option(min=1, help="Running requests at most.")] = 256,
    budget: Annotated[
        int, typer.Option(min=1, help="Tokens per step at most; long prompts go in chunks.")
    ] = DEFAULT_BUDGET_TOKENS,
    cache_dtype: Annotated[str, typer.Option(help="For the record.")] = "bfloat16",
    out: Annotated[Path, typer.Option(help="Folder for what is found.")] = Path("kvproof-findings"),
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace through the engine, with all checks on, under a virtual clock.

    Requests are admitted first come, first served; when blocks run out, the latest is preempted
    and recomputed later.  Times come from a cost model and are no measurement of any system.

    Example: [bold]kvproof trace example-mooncake.jsonl --blocks 512[/]
    """
    configuration = Configuration(
        blocks=_blocks(blocks, kv_memory, kv_bytes_per_token, block_size),
        block_size=block_size,
        requests=max_requests,
        run_ahead=1,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    writable_folder(out)
    requests = read_trace(_example(file))
    run = TraceRun(requests, configuration, budget_tokens=budget, cache_dtype=cache_dtype)
    with progress_bar(f"replaying {file.name}", len(requests)) as bar, _watch(run, bar):
        checked = run.run()
    verdict = _verdict(checked)
    told = _tell(checked, out)
    if as_json:
        print_json(_fields(checked, verdict, told))
    else:
        _show(checked, verdict, told)
    finish(verdict)


def _example(file: Path) -> Path:
    """A file that is not there, but ships with kvproof under that name, is that one."""
    shipped = Path(__file__).parent.parent / "traces" / "data" / file.name
    if file.exists() or file != Path(file.name) or not shipped.exists():
        return file
    stderr.print(f"using the {file.name} that ships with kvproof", highlight=False)
    return shipped


def _blocks(
    blocks: int | None, kv_memory: str | None, kv_bytes_per_token: int, block_size: int
) -> int:
    if (blocks is None) == (kv_memory is None):
        raise InputError("give the pool's size either by --blocks or by --kv-memory")
    if blocks is None:
        assert kv_memory is not None
        blocks = blocks_in(parse_bytes(kv_memory), kv_bytes_per_token, block_size)
    if blocks > 1 << 24:
        raise InputError(f"{blocks:,} blocks are more than the 16,777,216 that kvproof handles")
    return blocks


@contextmanager
def _watch(run: TraceRun, bar: Bar) -> Iterator[None]:
    """Keep the bar up to date from a second thread: the replay itself has no time for it."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            finished = run.replay.finished
            bar.update(finished, f"{finished:,} requests finished")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _verdict(checked: CheckedTrace) -> Verdict:
    return merge(
        "fail" if checked.violations else "pass", "unknown" if _reasons(checked) else "pass"
    )


def _reasons(checked: CheckedTrace) -> list[str]:
    """Why the verdict is unknown."""
    result = checked.result
    reasons = [reason for reason in (checked.problem, result.stopped) if reason]
    if not result.finished:
        reasons.append(f"none of the {result.requests} requests finished: nothing was shown")
    return reasons


class _Told(msgspec.Struct, frozen=True):
    explanation: str
    files: list[Path]


def _tell(checked: CheckedTrace, out: Path) -> _Told | None:
    case = checked.case
    if case is None:
        return None
    small = _shrunk(case)
    result = replay(small, record=True)
    violation = result.violations[0] if result.violations else checked.violations[0]
    explanation = explain(violation, result.moments, small.configuration.block_size)
    return _Told(
        explanation, write_finding(small, violation, explanation, out, moments=result.moments)
    )


def _shrunk(case: Case) -> Case:
    if len(case.operations) > _SHRUNK_UP_TO:
        return case
    shrunk = shrink(case, replays_max=500)
    return shrunk.case if shrunk else case


def _fields(checked: CheckedTrace, verdict: Verdict, told: _Told | None) -> dict[str, object]:
    result: dict[str, object] = msgspec.to_builtins(checked.result)
    violations = [
        violation_fields(v, told.explanation if told else v.message, str(told.files[0]))
        for v in checked.violations[:1]
        if told
    ]
    return {
        "verdict": verdict,
        "reasons": _reasons(checked),
        "subject": "engine",
        "seed": None,
        "ops": checked.ops,
        "seconds": round(checked.seconds, 3),
        "ops_per_second": round(checked.ops / checked.seconds) if checked.seconds else 0,
        "operations": checked.operations,
        "violations": violations,
        "goals": [{"id": name, "hits": n, "rare": True} for name, n in checked.goals.items()],
        "invariants": [{"id": name, "checked": n} for name, n in checked.checked.items()],
        **result,
        "policies": {POLICY: result},
    }


def _show(checked: CheckedTrace, verdict: Verdict, told: _Told | None) -> None:
    console.print(result_tables(checked.result))
    cost = checked.result.cost
    console.print(
        f"Times are virtual, by an assumed cost model: a step takes {cost.step_ns / 1e6:g} ms, and "
        f"{cost.prefill_token_ns / 1e3:g} µs per prompt token, {cost.decode_sequence_ns / 1e3:g} "
        f"µs per decoding sequence, {cost.kv_token_read_ns} ns per cached token read. Cached "
        "tokens count shared blocks once per request."
    )
    for reason, count in checked.result.rejections.items():
        console.print(f"{count} requests were rejected: {reason}")
    checks = sum(checked.checked.values())
    if told is not None:
        console.print(f"\n{told.explanation}\n", markup=False)
        for path in told.files:
            console.print(f"  written: {path}", markup=False)
    show_verdict(
        verdict,
        f"{checked.result.finished} of {checked.result.requests} requests finished; "
        f"{checked.ops:,} operations checked ({checks:,} checks) in {checked.seconds:.1f} s; "
        f"policy {POLICY}",
    )
    for why in _reasons(checked) if verdict == "unknown" else ():
        console.print(f"  because {why}", markup=False)
