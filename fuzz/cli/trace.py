"""``kvproof trace``: replay a real request trace, all checks on, under one or more policies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from kvproof.engine.policies import POLICY_NAMES
from kvproof.fuzz.cli.output import (
    Bar,
    JsonOption,
    console,
    finish,
    print_json,
    progress_bar,
    show_files,
    show_verdict,
    stderr,
    violation_fields,
    writable_file,
    writable_folder,
)
from kvproof.fuzz.replay import replay
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.traces.checked import CheckedTrace, Setting, TraceRun, arm_name
from kvproof.fuzz.traces.fewer import with_fewer_requests
from kvproof.fuzz.traces.figures import Slo, TraceResult
from kvproof.fuzz.traces.formats import TraceRequest, read_trace
from kvproof.fuzz.traces.plot import plot, require_plotting
from kvproof.fuzz.traces.pool import blocks_in, parse_bytes
from kvproof.fuzz.traces.record import (
    BenchmarkRecord,
    benchmark_record,
    trace_source,
    write_records,
)
from kvproof.fuzz.traces.replay import MAX_TOKENS
from kvproof.fuzz.traces.table import comparison_tables, result_tables
from kvproof.invariants.case import Case
from kvproof.invariants.errors import InputError
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Verdict, Violation, merge
from kvproof.stateful_tests.export import try_to_write_finding
from kvproof.stateful_tests.subjects.policies import policy_factory

_SECONDS_FOR_REQUESTS, _SECONDS_FOR_OPERATIONS = 10.0, 10.0
"""Time to make a finding shorter: first by leaving out requests, then single operations."""
_SEARCHES = 2
"""Of one shrinking: forwards and backwards."""
_BLOCKS_MAX = 1 << 24
_POOL, _LIMITS, _FIGURES, _FILES = "Pool", "Limits of an iteration", "Figures", "Files"


def trace(
    file: Annotated[
        Path, typer.Argument(help="Mooncake JSON lines, Azure CSV or BurstGPT CSV; .gz is fine.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheduler policy, once for each to compare: a name that comes with kvproof "
            f"({', '.join(POLICY_NAMES)}), or MODULE:CLASS or FILE.py:CLASS of your own.",
            show_default="fcfs",
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Usable blocks of the pool.", rich_help_panel=_POOL)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Or the pool's size in bytes, such as 16GiB.", rich_help_panel=_POOL),
    ] = None,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=1, help="K and V of one token, all layers.", rich_help_panel=_POOL)
    ] = 131_072,
    block_size: Annotated[
        int, typer.Option(min=1, max=4096, help="Tokens per block.", rich_help_panel=_POOL)
    ] = 16,
    host_blocks: Annotated[
        int,
        typer.Option(
            min=0,
            max=_BLOCKS_MAX,
            help="Swap space, for policies that swap.",
            rich_help_panel=_POOL,
        ),
    ] = 0,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Compare with host memory of that size, such as 128GiB, to which completed "
            "blocks are copied.",
            rich_help_panel=_POOL,
        ),
    ] = None,
    disk_memory: Annotated[
        str | None,
        typer.Option(
            help="… and with a disk of that size below it.",
            rich_help_panel=_POOL,
        ),
    ] = None,
    token_budget: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Tokens computed at most.", rich_help_panel=_LIMITS
        ),
    ] = 8192,
    max_sequences: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, help="Running requests at most.", rich_help_panel=_LIMITS),
    ] = 256,
    watermark: Annotated[
        int,
        typer.Option(
            min=0,
            max=_BLOCKS_MAX,
            help="Blocks that an admission must leave free.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0,
    no_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--no-chunked-prefill",
            help="Compute each prompt whole, in one iteration.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    run_ahead: Annotated[
        int, typer.Option(min=1, max=8, help="Steps in flight at most.", rich_help_panel=_LIMITS)
    ] = 1,
    max_model_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help="Prompt and declared output at most: what contiguous reserves.",
            show_default="the trace's longest",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help="Output that each request declares (or its real one, if longer).",
            show_default="the real one",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    slo_ttft: Annotated[
        float,
        typer.Option(min=0, help="Goodput: seconds to the first token.", rich_help_panel=_FIGURES),
    ] = 2.0,
    slo_tpot: Annotated[
        float,
        typer.Option(min=0, help="Goodput: seconds a further token.", rich_help_panel=_FIGURES),
    ] = 0.1,
    cache_dtype: Annotated[
        str, typer.Option(help="For the record.", rich_help_panel=_FIGURES)
    ] = "bfloat16",
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Draw KV use and batch size over time: .png, .svg or .html.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write the benchmark record, as JSON.", rich_help_panel=_FILES),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for what is found.", rich_help_panel=_FILES)
    ] = Path("kvproof-findings"),
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace through the scheduler, with all checks on, and compare policies.

    Times are virtual: they come from a cost model that is printed with them, an assumption and no
    measurement of any system.

    Example: [bold]kvproof trace example-mooncake.jsonl --blocks 512 --policy fcfs --policy orca[/]
    """
    usable = _blocks(blocks, kv_memory, kv_bytes_per_token, block_size)
    _check_places(out, plot_file, record)
    file = _example(file)
    requests = read_trace(file)
    configuration = Configuration(
        blocks=usable,
        block_size=block_size,
        requests=max_sequences,
        run_ahead=run_ahead,
        kv_bytes_per_token=kv_bytes_per_token,
        host_blocks=host_blocks,
        scheduling=Limits(
            token_budget=token_budget,
            watermark_blocks=watermark,
            max_model_tokens=max_model_tokens or _longest(requests, max_tokens or 0),
            chunked_prefill=not no_chunked_prefill,
        ),
    )
    _check_limits(configuration)
    setting = Setting(
        configuration, max_tokens or 0, Slo(slo_ttft, slo_tpot), cache_dtype=cache_dtype
    )
    arms = _arms(configuration, host_memory, disk_memory)
    runs = [
        TraceRun(requests, _over(setting, name, tiers), name, arm)
        for name in dict.fromkeys(policy or ["fcfs"])
        for arm, tiers in arms.items()
    ]
    reports = _run(runs, file, out)
    verdict = merge(*[report.verdict for report in reports])
    if plot_file is not None:
        series = {report.name: report.checked.series for report in reports}
        plot(series, f"{file.name}, {usable:,} blocks of {block_size} tokens", plot_file)
    if record is not None:
        write_records({report.name: report.record for report in reports}, record)
    if as_json:
        print_json(_fields(reports, verdict))
    else:
        _show(reports, verdict, [path for path in (plot_file, record) if path is not None])
    finish(verdict)


# -- what is asked for -----------------------------------------------------------------------


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
    if blocks > _BLOCKS_MAX:
        raise InputError(f"{blocks:,} blocks are more than the 16,777,216 that kvproof handles")
    return blocks


def _check_places(out: Path, plot_file: Path | None, record: Path | None) -> None:
    writable_folder(out)
    for path in (plot_file, record):
        if path is not None:
            writable_file(path)
    if plot_file is not None:
        require_plotting(plot_file)


def _longest(requests: Sequence[TraceRequest], max_tokens: int) -> int:
    """Prompt and declared output of the longest request."""
    longest = max([r.prompt_tokens + max(r.output_tokens, max_tokens) for r in requests])
    return min(longest, MAX_TOKENS)


def _check_limits(configuration: Configuration) -> None:
    limits = configuration.scheduling
    if not limits.chunked_prefill and limits.token_budget < limits.max_model_tokens:
        raise InputError(
            f"without chunked prefill an iteration must hold the longest request: --token-budget "
            f"{limits.token_budget} is less than {limits.max_model_tokens} (--max-model-tokens)"
        )


class _Tiers(msgspec.Struct, frozen=True):
    """Memory below the device."""

    host_blocks: int = 0
    disk_blocks: int = 0


def _arms(
    configuration: Configuration, host_memory: str | None, disk_memory: str | None
) -> dict[str, _Tiers | None]:
    """What is compared: memory below the device, by what it is called; or nothing of the kind."""
    if host_memory is None:
        if disk_memory is not None:
            raise InputError("--disk-memory needs --host-memory: blocks reach the disk from there")
        return {"": None}
    if configuration.host_blocks:
        raise InputError("give the host's memory either by --host-memory or by --host-blocks")
    host = _blocks_of(configuration, "--host-memory", host_memory)
    arms: dict[str, _Tiers | None] = {"": _Tiers(), "host": _Tiers(host)}
    if disk_memory is not None:
        arms["host + disk"] = _Tiers(host, _blocks_of(configuration, "--disk-memory", disk_memory))
    return arms


def _blocks_of(configuration: Configuration, option: str, memory: str) -> int:
    try:
        return _blocks(None, memory, configuration.kv_bytes_per_token, configuration.block_size)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _over(setting: Setting, policy: str, tiers: _Tiers | None) -> Setting:
    """The setting with these tiers.  What is no policy is said now, before anything is done."""
    swaps = getattr(policy_factory(policy), "swaps", False)
    if tiers is None or not tiers.host_blocks:
        return setting
    configuration = replace(
        setting.configuration,
        host_blocks=tiers.host_blocks,
        disk_blocks=tiers.disk_blocks,
        offload="both" if swaps else "prefix",
    )
    return replace(setting, configuration=configuration)


# -- what is done ----------------------------------------------------------------------------


class _Told(msgspec.Struct, frozen=True):
    """A violation, shrunk, explained and written."""

    violation: Violation
    explanation: str
    files: list[Path]
    unwritten: str
    """Why there are no files."""
    subject: str


class _Report(msgspec.Struct, frozen=True):
    """All there is to say about one replay."""

    checked: CheckedTrace
    configuration: Configuration
    record: BenchmarkRecord
    told: _Told | None

    @property
    def name(self) -> str:
        return self.checked.name

    @property
    def verdict(self) -> Verdict:
        failed: Verdict = "fail" if self.checked.violations else "pass"
        return merge(failed, "unknown" if self.reasons else "pass")

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is unknown."""
        result = self.checked.result
        reasons = [reason for reason in (self.checked.problem, result.stopped) if reason]
        if not result.finished:
            reasons.append(f"none of the {result.requests} requests finished: nothing was shown")
        return reasons


def _run(runs: list[TraceRun], file: Path, out: Path) -> list[_Report]:
    """One after the other, forgetting each: the books of one replay are large enough."""
    reports: list[_Report] = []
    requests = runs[0].trace
    source = trace_source(file, len(requests))
    with progress_bar(f"replaying {file.name}", len(requests) * len(runs)) as bar:
        while runs:
            run = runs.pop(0)
            with _watch(run, bar, len(requests) * len(reports)):
                checked = run.run()
            record = benchmark_record(requests, source, run.setting, checked)
            told = _tell(run, checked, out)
            reports.append(_Report(checked, run.setting.configuration, record, told))
    return reports


@contextmanager
def _watch(run: TraceRun, bar: Bar, before: int) -> Iterator[None]:
    """Keep the bar up to date from a second thread: the replay itself has no time for it."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            text = f"{arm_name(run.policy, run.arm)}: {run.finished:,} requests finished"
            bar.update(before + run.finished, text)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(run: TraceRun, checked: CheckedTrace, out: Path) -> _Told | None:
    if not checked.violations:
        return None
    fewer = with_fewer_requests(run, checked, _SECONDS_FOR_REQUESTS)
    assert fewer.case is not None, "a violation comes with a case"
    small = _shrunk(fewer.case)
    result = replay(small, record=True)
    violation = result.violations[0] if result.violations else fewer.violations[0]
    explanation = explain(violation, result.moments, small.configuration.block_size)
    told = (small, violation, explanation, out)
    files, why = try_to_write_finding(*told, moments=result.moments)
    return _Told(violation, explanation, files, why, small.subject)


def _shrunk(case: Case) -> Case:
    shrunk = shrink(case, seconds_max=_SECONDS_FOR_OPERATIONS)
    return shrunk.case if shrunk else case


# -- what is said ----------------------------------------------------------------------------


def _fields(reports: Sequence[_Report], verdict: Verdict) -> dict[str, object]:
    """The first policy's figures; verdict, reasons and violations are those of all."""
    reasons = [
        f"{report.name}: {reason}" if len(reports) > 1 else reason
        for report in reports
        for reason in report.reasons
    ]
    violations = [
        {**violation, "policy": report.name}
        for report in reports
        for violation in _violations(report)
    ]
    return {
        **_policy_fields(reports[0]),
        "verdict": verdict,
        "reasons": reasons,
        "violations": violations,
        "seed": None,
        "policies": {report.name: _policy_fields(report) for report in reports},
    }


def _policy_fields(report: _Report) -> dict[str, object]:
    checked = report.checked
    figures: dict[str, object] = msgspec.to_builtins(checked.result)
    return {
        "verdict": report.verdict,
        "reasons": report.reasons,
        "subject": f"scheduler:{report.checked.policy}",
        "ops": checked.ops,
        "seconds": round(checked.seconds, 3),
        "ops_per_second": round(checked.ops / checked.seconds) if checked.seconds else 0,
        "operations": checked.operations,
        "violations": _violations(report),
        "goals": [{"id": name, "hits": n, "rare": True} for name, n in checked.goals.items()],
        "invariants": [{"id": name, "checked": n} for name, n in checked.checked.items()],
        **figures,
        "offload": _offload(report.configuration),
        "record": msgspec.to_builtins(report.record),
    }


def _offload(configuration: Configuration) -> dict[str, object]:
    """What memory there is below the device, and what for."""
    block_bytes = configuration.block_size * configuration.kv_bytes_per_token
    return {
        "meanings": configuration.meanings,
        "host_bytes": configuration.host_blocks * block_bytes,
        "disk_bytes": configuration.disk_blocks * block_bytes,
        "evictions": {
            "device": configuration.device_eviction,
            "host": configuration.host_eviction,
            "disk": configuration.disk_eviction,
        },
    }


def _violations(report: _Report) -> list[dict[str, object]]:
    told = report.told
    if told is None:
        return []
    case = str(told.files[0]) if told.files else None
    return [violation_fields(told.violation, told.explanation, case, told.unwritten)]


def _show(reports: Sequence[_Report], verdict: Verdict, written: Sequence[Path]) -> None:
    results = {report.name: report.checked.result for report in reports}
    if len(reports) == 1:
        console.print(result_tables(*next(iter(results.items()))))
    else:
        console.print(comparison_tables(results, console.width))
    tiered = any(report.checked.result.tiers.tiered for report in reports)
    _show_cost(reports[0].checked.result, tiered=tiered)
    for report in reports:
        for reason, count in report.checked.result.rejections.items():
            console.print(f"{report.name}: {count} requests were refused: {reason}", markup=False)
        if report.told is not None:
            console.print(f"\n{report.name}: {report.told.explanation}\n", markup=False)
            show_files(report.told.files, report.told.unwritten, report.told.subject)
    for path in written:
        console.print(f"  written: {path}", markup=False)
    for report in reports:
        _show_report(report)
    if len(reports) > 1:
        arms = any(report.checked.arm for report in reports)
        what = "replays" if arms else "policies"
        show_verdict(verdict, f"{len(reports)} {what} over {reports[0].record.trace.file}")


def _show_cost(result: TraceResult, *, tiered: bool) -> None:
    cost = result.cost
    console.print(
        f"Times are virtual, by an assumed cost model: a step takes {cost.step_ns / 1e6:g} ms, and "
        f"{cost.prefill_token_ns / 1e3:g} µs per prompt token, {cost.decode_sequence_ns / 1e3:g} "
        f"µs per decoding sequence, {cost.kv_token_read_ns} ns per cached token read. Cached "
        "tokens count shared blocks once per request, slots in use once."
    )
    if tiered:
        console.print(
            f"A copy takes {cost.host_latency_ns / 1e3:g} µs and {cost.host_ps_per_byte} ps a byte "
            f"to or from the host, {cost.disk_latency_ns / 1e3:g} µs and {cost.disk_ps_per_byte} "
            "ps a byte to or from the disk, an assumption as well. Capacity gained: tokens "
            "findable below the device and not on it. A stall: a waiting request is held back in "
            "one iteration, for KV on its way. Hits at admission are of the prompts' blocks; what "
            "was promoted before is a hit of the device. Without a host, a policy that swaps "
            "recomputes."
        )


def _show_report(report: _Report) -> None:
    checked = report.checked
    checks = sum(checked.checked.values())
    show_verdict(
        report.verdict,
        f"{report.name}: {checked.result.finished} of {checked.result.requests} requests "
        f"finished; {checked.ops:,} operations checked ({checks:,} checks) in "
        f"{checked.seconds:.1f} s",
    )
    for why in report.reasons if report.verdict == "unknown" else ():
        console.print(f"  because {why}", markup=False)
