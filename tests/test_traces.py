"""Request traces: formats, the generated examples, the replay and its figures."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvproof.engine.clock import NS_PER_S, CostModel, VirtualClock
from kvproof.engine.policies import POLICY_NAMES, FirstComeFirstServed
from kvproof.fuzz.cli.app import app
from kvproof.fuzz.replay import replay as replay_case
from kvproof.fuzz.traces import generate
from kvproof.fuzz.traces.checked import CheckedTrace, Setting, TraceRun
from kvproof.fuzz.traces.fewer import with_fewer_requests
from kvproof.fuzz.traces.figures import NO_HOST_TIER, RequestRecords, Slo, batch_sizes
from kvproof.fuzz.traces.formats import (
    UNSHARED_SOURCE,
    TraceError,
    TraceRequest,
    read_trace,
)
from kvproof.fuzz.traces.gauges import Gauge, Level, Percentiles
from kvproof.fuzz.traces.observer import SERIES_POINTS, Observer
from kvproof.fuzz.traces.plot import plot, require_plotting
from kvproof.fuzz.traces.pool import blocks_in, parse_bytes
from kvproof.fuzz.traces.record import (
    NO_MODEL,
    BenchmarkRecord,
    benchmark_record,
    trace_source,
    write_records,
)
from kvproof.fuzz.traces.replay import IDLE_ITERATIONS, ObservedSubject, Replay
from kvproof.fuzz.traces.table import comparison_tables, result_tables
from kvproof.invariants.case import load_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksEvicted,
    BlocksPublished,
    Event,
    SlotsEvicted,
    TransferEnded,
    TransferStarted,
)
from kvproof.invariants.operations import Arrive, Operation, Retire, Schedule, Segment, Wait
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, LARGER_THAN_POOL, Outcome
from kvproof.invariants.scheduling.vocabulary import (
    Deferred,
    Limits,
    Promises,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness

DATA = Path(generate.__file__).parent / "data"
EXAMPLES = (DATA / generate.MOONCAKE_NAME, DATA / generate.AZURE_NAME)

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_HEADER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def mooncake(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
    return json.dumps(fields | changes) + "\n"


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -- formats ---------------------------------------------------------------------------------


def test_mooncake_hash_ids_become_segments(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mooncake(timestamp=1_000)
        + mooncake(timestamp=1_027.5, input_length=1024, hash_ids=[7, 9], conversation=3),
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, (Segment(7, 512), Segment(8, 188)), 700, 5)
    assert second == TraceRequest(0.0275, (Segment(7, 512), Segment(9, 512)), 1024, 5)
    assert first.final_tokens == 704


def test_azure_requests_share_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE_HEADER
        + "2023-11-16 23:59:59.9000000,40,2\n"
        + "2023-11-17 00:00:00.1500000,40,3\n"
        + "2023-11-17 00:00:00.25+00:00,1,1",
    )
    requests = read_trace(path)
    assert [r.arrival_s for r in requests] == [0.0, 0.25, 0.35]
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(40, 2), (40, 3), (1, 1)]
    sources = [segment.source for r in requests for segment in r.prompt]
    assert len(set(sources)) == 3
    assert min(sources) >= UNSHARED_SOURCE


def test_burst_gpt(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        BURST_HEADER
        + "5,1,2.5,ChatGPT,472,18,490,Conversation log\n"
        + '45.5,2,3,"GPT-4, new",1087,230,1317,API log\n',
    )
    requests = read_trace(path)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, 472, 18),
        (40.5, 1087, 230),
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_file_encodings_give_the_same_requests(tmp_path: Path, example: Path) -> None:
    content = example.read_bytes()
    expected = read_trace(example)
    assert read_trace(write(tmp_path, gzip.compress(content))) == expected
    assert read_trace(write(tmp_path, b"\xef\xbb\xbf" + content)) == expected
    assert read_trace(write(tmp_path, content.replace(b"\n", b"\r\n"))) == expected
    assert read_trace(write(tmp_path, content.removesuffix(b"\n"))) == expected


GOOD = mooncake()
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44\n"

MALFORMED: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 1, "empty"),
    "truncated JSON": (GOOD + GOOD[:-20], 2, "truncated"),
    "no JSON": (GOOD + "oops\n", 2, "not a complete JSON object"),
    "blank line": (GOOD + "\n" + GOOD, 2, "empty"),
    "JSON array": (GOOD + "[1, 2]\n", 2, "got `array`"),
    "missing field": ('{"timestamp": 0}\n', 1, "missing required field `input_length`"),
    "string for a number": (GOOD + mooncake(input_length="700"), 2, "input_length: Expected `int`"),
    "number for a list": (GOOD + mooncake(hash_ids=7), 2, "hash_ids: Expected `array`"),
    "fraction of a token": (mooncake(output_length=1.5), 1, "output_length: Expected `int`"),
    "negative time": (mooncake(timestamp=-1), 1, "timestamp: Expected"),
    "negative length": (mooncake(input_length=-1), 1, "input_length: Expected `int` >= 1"),
    "empty prompt": (mooncake(input_length=0, hash_ids=[]), 1, "input_length: Expected `int` >= 1"),
    "no output": (mooncake(output_length=0), 1, "output_length: Expected `int` >= 1"),
    "huge length": (mooncake(input_length=1 << 41), 1, "input_length: Expected `int` <="),
    "negative hash id": (mooncake(hash_ids=[7, -8]), 1, "hash_ids[1]: Expected `int` >= 0"),
    "too few hash ids": (GOOD + mooncake(hash_ids=[7]), 2, "hash_ids: 1 of them, but 700 input"),
    "too many hash ids": (mooncake(hash_ids=[7, 8, 9]), 1, "are 2 blocks of 512"),
    "unsorted": (mooncake(timestamp=250) + GOOD, 2, "not in order of arrival: 0.25 s"),
    "not UTF-8": (GOOD.encode() + b'{"timestamp": "\xff"}\n', 2, "not UTF-8 text, at byte 16"),
    "UTF-16": (GOOD.encode("utf-16"), 1, "not UTF-8 text, at byte 1"),
    "unknown header": ("time,tokens\n1,2\n", 1, "neither a JSON object"),
    "Azure: missing column": (
        "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n",
        1,
        "missing column: GeneratedTokens",
    ),
    "Azure: header only": (AZURE_HEADER, 1, "no request follows the header"),
    "Azure: truncated row": (AZURE_HEADER + AZURE_ROW + "2023-11-16 18:16", 3, "1 columns, but"),
    "Azure: extra value": (AZURE_HEADER + AZURE_ROW[:-1] + ",9\n", 2, "4 columns, but"),
    "Azure: no number": (AZURE_HEADER + AZURE_ROW.replace("374", "x"), 2, "ContextTokens: "),
    "Azure: no value": (AZURE_HEADER + AZURE_ROW.replace("374", ""), 2, "ContextTokens: "),
    "Azure: negative": (AZURE_HEADER + AZURE_ROW.replace("44", "-44"), 2, "GeneratedTokens: "),
    "Azure: zero": (AZURE_HEADER + AZURE_ROW.replace("374", "0"), 2, "ContextTokens: "),
    "Azure: no date": (AZURE_HEADER + "17,374,44\n", 2, "TIMESTAMP: not a date and time"),
    "Azure: quote": (AZURE_HEADER + '"2023-11-16,374,44\n', 2, "not a CSV row"),
    "Azure: blank line": (AZURE_HEADER + "\n" + AZURE_ROW, 2, "the line is empty"),
    "Azure: unsorted": (
        AZURE_HEADER + AZURE_ROW + "2023-11-16 18:15:45.6805900,1,1\n",
        3,
        "not in order of arrival: 1 s",
    ),
    "BurstGPT: failed request": (
        BURST_HEADER + "5,1,2.5,ChatGPT,472,0,472,API log\n",
        2,
        "Response tokens: Expected `int` >= 1",
    ),
    "BurstGPT: no time": (BURST_HEADER + "nan,1,2,ChatGPT,4,2,6,API log\n", 2, "Timestamp: "),
}


@pytest.mark.parametrize(("content", "line", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_line_is_named(
    tmp_path: Path, content: str | bytes, line: int, reason: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: ")
    assert reason in message
    assert "\n" not in message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing: cannot be read: No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="damaged gzip file"):
        read_trace(write(tmp_path, gzip.compress(GOOD.encode())[:-9]))


# -- generated examples ----------------------------------------------------------------------


def test_examples_are_what_the_generator_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main([str(tmp_path / "new")])
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == [path.name for path in EXAMPLES]
    for path, example in zip(written, EXAMPLES, strict=True):
        assert path.read_bytes() == example.read_bytes()


# -- a pool given in bytes -------------------------------------------------------------------


def test_sizes() -> None:
    assert parse_bytes("16GiB") == 16 << 30
    assert parse_bytes("1.5 kb") == 1500
    assert parse_bytes("4096") == 4096
    assert blocks_in(parse_bytes("16GiB"), 131_072, 16) == 8192
    for text in ("", "GiB", "-1GiB", "16 GX", "0", "1e9", "٣GB"):
        with pytest.raises(InputError, match="size"):
            parse_bytes(text)
    with pytest.raises(InputError, match="hold no block"):
        blocks_in(1 << 20, 131_072, 16)


# -- clock and figures -----------------------------------------------------------------------


def test_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance(1_500_000_000)
    clock.advance_to(7)
    assert (clock.now_ns, clock.now_s) == (1_500_000_000, 1.5)
    with pytest.raises(ValueError, match="go back by 1 ns"):
        clock.advance(-1)


def test_level_is_weighted_by_time() -> None:
    level = Level(2)
    level.set(10, 4)
    level.set(0, 5)
    assert level.gauge(10) == Gauge((2 * 4 + 10 * 1 + 0 * 5) / 10, 0, 10)
    assert level.area_until(10) == 18
    assert Level(3).gauge(0) == Gauge(3.0, 3, 3)
    assert Gauge(3.0, 1, 4).below(10) == Gauge(7.0, 6, 9)


def test_batch_series_is_compact() -> None:
    sizes = batch_sizes(range(101), [4] * 101)
    assert sizes.iterations_per_point == 3
    assert sizes.sequences_series[:2] == [1.0, 4.0]
    assert sizes.sequences_series[-1] == 99.5
    assert (sizes.sequences_maximum, sizes.tokens_mean) == (100, 4.0)


def test_a_request_is_good_if_it_meets_both_objectives() -> None:
    records = RequestRecords(5)
    #         ttft, decode time, output tokens
    columns = [(2, 0, 1), (2, 3, 4), (3, 0, 1), (2, 4, 4), None]
    for number, column in enumerate(columns):
        records.arrival_ns[number] = 7 * NS_PER_S
        if column:
            ttft, decode, output = column
            records.scheduled_ns[number] = 8 * NS_PER_S
            records.first_token_ns[number] = (7 + ttft) * NS_PER_S
            records.finished_ns[number] = (7 + ttft + decode) * NS_PER_S
            records.output_tokens[number] = output
    goodput = records.goodput(Slo(ttft=2, tpot=1), 4.0)
    assert (goodput.met, goodput.requests_per_second, goodput.fraction) == (2, 0.5, 0.4)
    throughput = records.throughput(4.0)
    assert (throughput.requests_per_second, throughput.output_tokens_per_second) == (1.0, 2.5)


# -- replay ----------------------------------------------------------------------------------


def unshared(*requests: tuple[int, int, int]) -> list[TraceRequest]:
    """A trace of (arrival in ns, prompt tokens, output tokens)."""
    return [
        TraceRequest(arrival_ns / NS_PER_S, (Segment(number, prompt),), prompt, output)
        for number, (arrival_ns, prompt, output) in enumerate(requests)
    ]


TINY_COST = CostModel(step_ns=100, prefill_token_ns=10, decode_sequence_ns=5, kv_token_read_ns=1)


def run(
    trace: Sequence[TraceRequest],
    policy: str = "fcfs",
    *,
    max_tokens: int = 0,
    limits: Limits | None = None,
    **configuration: int,
) -> CheckedTrace:
    world = {"blocks": 8, "block_size": 4, "run_ahead": 1} | configuration
    setting = Setting(
        Configuration(**world, scheduling=limits or Limits()),  # type: ignore[arg-type]
        max_tokens,
        cost=TINY_COST,
    )
    checked = TraceRun(trace, setting, policy).run()
    assert (checked.violations, checked.problem, checked.case) == ((), None, None)
    return checked


def test_times_of_a_tiny_trace() -> None:
    """Two requests, worked out by hand.

    step 1, from 0 ns: A computes 4 prompt tokens: 100 + 4·10 + 4·1 = 144;
    step 2, from 144: A decodes at length 5, B (arrived at 100) computes 2 prompt tokens:
    100 + 2·10 + 1·5 + (5 + 2)·1 = 132; B has its only token;
    step 3, from 276: A decodes at length 6: 100 + 1·5 + 6·1 = 111; it ends at 387.
    """
    result = run(unshared((0, 4, 3), (100, 2, 1))).result

    assert (result.finished, result.steps, result.stopped) == (2, 3, None)
    assert result.virtual_seconds == 387e-9
    ns = {name: p.p50 * NS_PER_S for name, p in result.percentiles.items()}
    assert ns["queue_time"] == pytest.approx((0 + 44) / 2)
    assert ns["prefill_time"] == pytest.approx((144 + 132) / 2)
    assert ns["ttft"] == pytest.approx((144 + 176) / 2)
    assert ns["decode_time"] == pytest.approx((243 + 0) / 2)
    assert ns["e2e"] == pytest.approx((387 + 176) / 2)
    assert ns["tpot"] == pytest.approx(243 / 2)  # of A alone
    assert result.percentiles["allocated_blocks"].p50 == (2 + 1) / 2
    assert result.percentiles["input_tokens"].p99 == pytest.approx(2 + 0.99 * 2)

    metrics = result.metrics
    assert metrics.active_sequences.mean == pytest.approx((144 + 2 * 132 + 111) / 387)
    assert metrics.waiting_sequences.mean == pytest.approx(44 / 387)
    assert metrics.live_cached_tokens.mean == pytest.approx((0 + 4 * 132 + 5 * 111) / 387)
    assert metrics.kv_blocks_free.mean == pytest.approx((7 * 144 + 5 * 132 + 6 * 111) / 387)
    assert (metrics.kv_blocks_free.minimum, metrics.kv_blocks_free.maximum) == (5, 8)
    block_bytes = 4 * 131_072
    assert metrics.kv_capacity_bytes == 8 * block_bytes
    assert (metrics.kv_bytes_used.minimum, metrics.kv_bytes_used.maximum) == (0, 3 * block_bytes)
    assert metrics.batch_size_by_iteration.sequences_series == [1.0, 2.0, 1.0]
    assert metrics.batch_size_by_iteration.tokens_series == [4.0, 3.0, 1.0]
    assert (metrics.evictions, metrics.host_promotions) == (0, NO_HOST_TIER)


def test_use_and_waste_of_slots_in_a_tiny_trace() -> None:
    """The same trace; A ends with 6 tokens in 8 slots, B with 2 in 4.

    step 1: A has 4 of 4 slots; step 2: A 5 of 8, one for later, two for nothing, and B 2 of 4, two
    for nothing; step 3: A 6 of 8, two for nothing.
    """
    use = run(unshared((0, 4, 3), (100, 2, 1))).result.kv_use
    assert use.total_slots == 32
    used = 4 * 144 + 7 * 132 + 6 * 111
    assert use.effective_fraction.mean == pytest.approx(used / 387 / 32)
    assert use.reserved_slots.mean == pytest.approx(1 * 132 / 387)
    assert use.fragmentation_slots.mean == pytest.approx((4 * 132 + 2 * 111) / 387)
    assert use.used_of_held == pytest.approx(used / (4 * 144 + 12 * 132 + 8 * 111))
    assert use.referenced_fraction.maximum == 3 / 8


def test_what_is_reserved_is_seen_as_waste() -> None:
    """One request of 4 + 3 tokens (6 in the cache); with at most 9, or 20 tokens in the model."""
    trace = unshared((0, 4, 3))
    orca = run(trace, "orca", max_tokens=9).result.kv_use
    assert orca.reserved_slots.maximum == 2
    assert orca.fragmentation_slots.maximum == 12 - 6
    contiguous = run(trace, "contiguous", limits=Limits(max_model_tokens=20)).result.kv_use
    assert contiguous.fragmentation_slots.maximum == 20 - 6
    assert run(trace, "fcfs", max_tokens=9).result.kv_use.fragmentation_slots.maximum == 2


def test_requests_that_can_never_fit_are_refused_at_once() -> None:
    trace = unshared((0, 17, 1), (0, 16, 2), (0, 16, 1), (0, 3, 3), (5, 15, 6))
    result = run(trace, blocks=4, limits=Limits(max_model_tokens=20)).result
    assert result.rejections == {LARGER_THAN_POOL: 2, LARGER_THAN_MODEL: 1}
    assert (result.requests, result.finished, result.rejected) == (5, 2, 3)
    assert result.percentiles["input_tokens"] == Percentiles(9.5, 14.7, 15.87)


def test_the_clock_jumps_over_idle_time() -> None:
    result = run(unshared((0, 4, 1), (10_000, 4, 1)), blocks=4).result
    assert result.virtual_seconds == 10_144e-9
    assert result.metrics.active_sequences.mean == pytest.approx(2 * 144 / 10_144)


def test_an_arrival_in_the_middle_of_a_step_may_start_the_next_one_in_flight() -> None:
    """With run-ahead the step of the second request starts when the first one ends, no later."""
    trace = unshared((0, 4, 1), (100, 4, 1))
    apart = run(trace, run_ahead=1).result
    ahead = run(trace, run_ahead=2).result
    assert apart.virtual_seconds == ahead.virtual_seconds == 288e-9
    assert apart.percentiles["queue_time"].p99 > ahead.percentiles["queue_time"].p99 == 0.0


def test_an_empty_trace_has_no_figures() -> None:
    result = run([]).result
    assert (result.requests, result.steps, result.percentiles) == (0, 0, {})
    assert (result.goodput.met, result.throughput.requests_per_second) == (0, 0.0)


def random_trace(random: Random) -> list[TraceRequest]:
    arrival_ns, requests = 0, []
    for _ in range(random.randint(1, 25)):
        arrival_ns += random.choice((0, 0, 50, 900))
        requests.append((arrival_ns, random.randint(1, 30), random.randint(1, 20)))
    return unshared(*requests)


@pytest.mark.parametrize("seed", range(40))
def test_random_traces_end(seed: int) -> None:
    random = Random(seed)
    trace = random_trace(random)
    blocks, block_size = random.randint(8, 30), random.choice((1, 4, 5))
    policy, run_ahead = random.choice(POLICY_NAMES), random.choice((1, 1, 2))
    result = run(
        trace,
        policy,
        blocks=blocks,
        block_size=block_size,
        run_ahead=run_ahead,
        requests=random.choice((2, 64)),
        host_blocks=random.choice((0, 9)),
        limits=Limits(token_budget=random.choice((3, 8, 500))),
        max_tokens=random.choice((0, 0, 12)),
    ).result
    assert result.stopped is None
    assert result.finished + result.rejected == result.requests
    metrics = result.metrics
    assert metrics.admissions == result.finished
    # Whose last token was on its way when it was preempted ends without coming back.
    assert metrics.resumptions <= metrics.preemptions
    assert run_ahead > 1 or metrics.resumptions == metrics.preemptions
    use = result.kv_use
    assert use.effective_fraction.minimum >= 0 <= use.reserved_slots.minimum
    assert use.effective_fraction.mean <= use.referenced_fraction.mean + 1e-9
    assert use.fragmentation_slots.minimum >= 0


def test_many_running_requests_are_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And figures hardly change for it."""
    trace = unshared(*((0, 5 + n % 4, 40 + n % 9) for n in range(100)))
    seldom = run(trace, blocks=2000, requests=100).result.kv_use
    monkeypatch.setattr("kvproof.fuzz.traces.observer.FEW_REQUESTS", 1000)
    always = run(trace, blocks=2000, requests=100).result.kv_use
    assert seldom != always
    assert seldom.used_of_held == pytest.approx(always.used_of_held, rel=0.01)
    assert seldom.effective_fraction.mean == pytest.approx(always.effective_fraction.mean, rel=0.1)


# -- what may go wrong -----------------------------------------------------------------------


class Idle(FirstComeFirstServed):
    """Runs nothing once two requests have come; but what it says is a plan."""

    promises = Promises()

    def plan(self, state):  # type: ignore[no-untyped-def]
        done = len(state.running) + len(state.waiting) > 1
        return state.draft().plan() if done else super().plan(state)


class Faulty(FirstComeFirstServed):
    """Raises when the third request arrives."""

    def plan(self, state):  # type: ignore[no-untyped-def]
        if any(request.id == 2 for request in state.waiting):
            raise RuntimeError("three are a crowd")
        return super().plan(state)


def own(policy: type, monkeypatch: pytest.MonkeyPatch, trace: Sequence[TraceRequest]) -> TraceRun:
    monkeypatch.setattr("kvproof.engine.policies.POLICIES", {"mine": policy})
    monkeypatch.setattr("kvproof.stateful_tests.subjects.policies.POLICIES", {"mine": policy})
    setting = Setting(Configuration(blocks=8, block_size=4, run_ahead=1), cost=TINY_COST)
    return TraceRun(trace, setting, "mine")


TRACE = unshared(*((150 * number, 3, 4) for number in range(6)))


@pytest.mark.parametrize(("policy", "violated"), [(Idle, "LIVE"), (Faulty, "PLAN")])
def test_a_bad_policy_ends_the_replay_with_a_case(
    policy: type, violated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = own(policy, monkeypatch, TRACE)
    checked = traced.run()
    assert [violation.property for violation in checked.violations] == [violated]
    assert checked.result.finished < len(TRACE)
    assert checked.case is not None
    assert (checked.case.subject, checked.case.violates) == ("scheduler:mine", violated)
    assert len(checked.case.operations) == checked.violations[0].op + 1
    again = replay_case(checked.case)
    assert again.violations[0] == checked.violations[0]

    fewer = with_fewer_requests(traced, checked, 5.0)
    assert fewer.case is not None
    arrivals = [o for o in fewer.case.operations if isinstance(o, Arrive)]
    assert len(arrivals) == {Idle: 2, Faulty: 3}[policy]
    assert replay_case(fewer.case).violations[0].property == violated


def test_shrinking_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = own(Faulty, monkeypatch, TRACE)
    checked = traced.run()
    assert with_fewer_requests(traced, checked, 0.0) is checked


def unchecked(policy: type, trace: Sequence[TraceRequest], log: list[Operation]) -> Replay:
    """A replay without checks: it has to notice by itself that nothing goes on."""
    subject = ObservedSubject(
        Configuration(blocks=8, block_size=4, run_ahead=1),
        policy=policy,
        observer=Observer(trace),
        cost=TINY_COST,
    )
    harness = SchedulingHarness(subject, checked=False)

    def perform(operation: Operation) -> Outcome:
        log.append(operation)
        return harness.perform(operation)

    return Replay(trace, subject, perform)


def test_a_replay_without_checks_stops_by_itself() -> None:
    log: list[Operation] = []
    idle = unchecked(Idle, TRACE, log)
    idle.run()
    assert idle.stopped == f"2 requests are live, but {IDLE_ITERATIONS} iterations ran nothing"
    faulty = unchecked(Faulty, TRACE, log)
    faulty.run()
    assert faulty.stopped == "schedule is refused: policy_failed"


def test_arrivals_stand_between_launch_and_end_of_the_step_they_fall_into() -> None:
    log: list[Operation] = []
    replay = unchecked(FirstComeFirstServed, unshared((0, 4, 2), (100, 2, 1)), log)
    replay.run()
    kinds = [type(operation) for operation in log]
    assert kinds == [Arrive, Schedule, Arrive, Retire, Schedule, Retire]


# -- the examples ----------------------------------------------------------------------------


def example(name: str, policy: str = "fcfs", **changes: Any) -> CheckedTrace:
    world = {"blocks": generate.EXAMPLE_BLOCKS, "requests": 256, "run_ahead": 1} | changes
    setting = Setting(
        Configuration(**world, block_size=generate.EXAMPLE_BLOCK_SIZE), cache_dtype="fp8"
    )
    checked = TraceRun(read_trace(DATA / name), setting, policy).run()
    assert (checked.violations, checked.problem) == ((), None)
    return checked


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES])
def test_examples_put_the_scheduler_under_pressure(name: str) -> None:
    checked = example(name)
    result, metrics = checked.result, checked.result.metrics
    assert result.stopped is None
    assert result.finished == result.requests == metrics.admissions == 120
    assert metrics.preemptions == metrics.resumptions > 5
    assert metrics.evictions > 1000
    hits = metrics.prefix_cache_hits
    assert hits.tokens + hits.resumed_tokens > 1000
    assert hits.queries_tokens == sum(r.prompt_tokens for r in read_trace(DATA / name))
    assert hits.resumed_queries_tokens > 0
    assert metrics.waiting_sequences.maximum > 5
    assert metrics.kv_bytes_used.maximum == metrics.kv_capacity_bytes
    assert (metrics.kv_blocks_free.minimum, metrics.kv_blocks_free.maximum) == (
        0,
        metrics.kv_blocks_total,
    )
    assert checked.checked["PROV"] > 1000
    assert checked.checked["FCFS"] > 50


def test_swapped_requests_are_told_from_recomputed_ones() -> None:
    metrics = example(generate.MOONCAKE_NAME, "fcfs_swap", host_blocks=512).result.metrics
    assert metrics.preemptions == metrics.resumptions > 5
    assert metrics.prefix_cache_hits.resumed_queries_tokens == 0
    assert isinstance(metrics.host_promotions, int)
    assert metrics.host_promotions > 100
    assert isinstance(metrics.host_offload_bytes, int)
    assert metrics.host_offload_bytes == metrics.host_promotions * 16 * 131_072


def test_turns_of_a_chat_hit_their_prefixes() -> None:
    """In a pool without pressure every full block of an earlier turn is found again."""
    metrics = example(generate.MOONCAKE_NAME, blocks=20_000).result.metrics
    assert (metrics.preemptions, metrics.evictions) == (0, 0)
    seen: set[int] = set()
    known_tokens = 0
    for request in read_trace(DATA / generate.MOONCAKE_NAME):
        sources = [segment.source for segment in request.prompt]
        known_tokens += sum(s.length for s in request.prompt if s.source in seen)
        seen.update(sources)
    # Less than what was asked for before: requests that overlap in time compute twice.
    assert 0.9 * known_tokens < metrics.prefix_cache_hits.tokens <= known_tokens


# -- a memory hierarchy ----------------------------------------------------------------------

TIERED = {"host_blocks": 512, "disk_blocks": 4096, "offload": "prefix"}


class Recount:
    """The figures of the tiers, from what happened alone: sets of keys, and when they changed."""

    def __init__(self) -> None:
        self.findable: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}
        self.started: dict[int, TransferStarted] = {}
        self.queued: dict[int, TransferQueued] = {}
        self.now_ns = self.area = self.most = self.stalls = self.stall_ns = 0
        self.deferred = Deferred((), 0)
        self.moved = dict.fromkeys(("store", "promote", "demote", "fetch"), 0)
        self.took_ns: dict[str, list[int]] = {"promote": [], "fetch": []}
        self.evicted = {"device": 0, "host": 0, "disk": 0}

    @property
    def gained(self) -> int:
        return len((self.findable["host"] | self.findable["disk"]) - self.findable["device"])

    def pass_until(self, now_ns: int) -> None:
        self.area += self.gained * (now_ns - self.now_ns)
        self.most = max(self.most, self.gained if now_ns > self.now_ns else 0)
        self.now_ns = now_ns

    def follow(self, operation: Operation, events: Sequence[Event], now_ns: int) -> None:
        """What a retirement does, it does at the end of its step; a plan, before time passes."""
        if isinstance(operation, Retire):
            self.pass_until(now_ns)
        pending: list[Event] = []
        for event in events:
            pending.append(event)
            if isinstance(event, TransferDelivered) and isinstance(operation, Wait):
                self.pass_until(event.now_ns)
                self._apply(pending)
                pending = []
        self._apply(pending)
        self.pass_until(now_ns)

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlocksPublished():
                    self.findable["device"].update(event.keys)
                case BlocksEvicted():
                    self.findable["device"].difference_update(event.keys)
                    self.evicted["device"] += len(event.keys)
                case SlotsEvicted():
                    self.findable[event.tier].difference_update(event.keys)
                    self.evicted[event.tier] += len(event.keys)
                case TransferStarted():
                    self.started[event.transfer] = event
                case TransferEnded():
                    self._end(self.started[event.transfer])
                case TransferQueued():
                    self.queued[event.transfer] = event
                case TransferDelivered():
                    copy = self.queued[event.transfer]
                    self.took_ns.get(copy.kind, []).append(event.now_ns - copy.now_ns)
                case Deferred():
                    self.stall_ns += len(self.deferred.requests) * (
                        event.now_ns - self.deferred.now_ns
                    )
                    self.stalls += len(event.requests)
                    self.deferred = event

    def _end(self, transfer: TransferStarted) -> None:
        tier = {"store": "host", "fetch": "host", "demote": "disk", "promote": "device"}
        self.findable[tier[transfer.kind]].update(transfer.keys)
        self.moved[transfer.kind] += len(transfer.keys)


def test_figures_of_tiers_are_those_of_a_naive_recount() -> None:
    configuration = Configuration(
        blocks=generate.EXAMPLE_BLOCKS,
        block_size=generate.EXAMPLE_BLOCK_SIZE,
        run_ahead=1,
        **TIERED,  # type: ignore[arg-type]
    )
    trace = read_trace(DATA / generate.MOONCAKE_NAME)[:60]
    run = TraceRun(trace, Setting(configuration))
    harness, recount = run._harness, Recount()
    perform = run.replay._perform

    def performed(operation: Operation) -> Outcome:
        outcome = perform(operation)
        recount.follow(operation, harness.last_events, run._subject.scheduler.clock.now_ns)
        return outcome

    run.replay._perform = performed
    checked = run.run()
    assert (checked.violations, checked.problem, checked.result.finished) == ((), None, 60)
    tiers = checked.result.tiers
    gained = tiers.effective_capacity_gained_tokens
    size = configuration.block_size
    assert gained.mean == pytest.approx(recount.area / recount.now_ns * size)
    assert (gained.minimum, gained.maximum) == (0, recount.most * size)
    assert tiers.effective_capacity_gained_bytes.mean == pytest.approx(gained.mean * 131_072)
    assert (tiers.stalls, tiers.stall_seconds) == (recount.stalls, recount.stall_ns / NS_PER_S)
    for kind, blocks in recount.moved.items():
        moved = tiers.moved[kind]
        assert moved.bytes == blocks * size * 131_072 > 0, kind
        assert moved.bytes_per_second == moved.bytes / (recount.now_ns / NS_PER_S)
        assert moved.bytes_per_busy_second is not None
        rate = 1e12 / (20 if kind in ("store", "promote") else 200)
        assert 0.9 * rate < moved.bytes_per_busy_second < rate
    for took, times in (
        (tiers.promotion_time, recount.took_ns["promote"]),
        (tiers.fetch_time, recount.took_ns["fetch"]),
    ):
        assert took.copies == len(times) > 0
        assert took.percentiles is not None
        assert took.percentiles.p50 == pytest.approx(sorted(times)[len(times) // 2] / 1e9, rel=0.5)
        assert took.mean == pytest.approx(sum(times) / len(times) / 1e9)
    assert tiers.evictions == recount.evicted
    queries = [tiers.hits[tier].queries for tier in ("device", "host", "disk")]
    hits = [tiers.hits[tier].hits for tier in ("device", "host", "disk")]
    assert queries[0] == sum((r.prompt_tokens - 1) // size for r in trace)
    assert queries[1:] == [queries[0] - hits[0], queries[1] - hits[1]]
    assert hits[0] * size == checked.result.metrics.prefix_cache_hits.tokens


def test_suspended_sequences_are_those_that_are_swapped_out() -> None:
    tiers = example(
        generate.MOONCAKE_NAME, "fcfs_swap", host_blocks=4096, offload="both"
    ).result.tiers
    assert tiers.suspended_sequences.maximum >= 1
    assert tiers.moved["swap_out"].bytes == tiers.moved["swap_in"].bytes > 0
    assert tiers.moved["swap_out"].bytes_per_busy_second is None


def test_without_tiers_all_of_their_figures_are_0(told: CheckedTrace) -> None:
    tiers = told.result.tiers
    assert not tiers.tiered
    assert tiers.effective_capacity_gained_tokens == Gauge(0, 0, 0)
    assert (tiers.stalls, tiers.stall_seconds, tiers.transfers_failed) == (0, 0, 0)
    assert {moved.bytes for moved in tiers.moved.values()} == {0}
    assert {found.queries for found in tiers.hits.values()} == {0}
    assert tiers.promotion_time.percentiles is None
    assert tiers.admissions == 120


# -- what is said ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> CheckedTrace:
    return example(generate.MOONCAKE_NAME)


def test_result_is_json_and_a_table(told: CheckedTrace) -> None:
    decoded = json.loads(msgspec.json.encode(told.result))
    assert decoded["cache_dtype"] == "fp8"
    assert decoded["metrics"]["host_offload_bytes"] == NO_HOST_TIER
    assert set(decoded["percentiles"]["ttft"]) == {"p50", "p90", "p99"}

    console = Console(width=120, record=True, file=StringIO())
    console.print(result_tables("one", told.result))
    console.print(comparison_tables({"one": told.result, "another": told.result}, 120))
    text = console.export_text()
    for name in (*decoded["metrics"], *decoded["percentiles"], "attention_mode", "fp8", "another"):
        assert name in text


def test_columns_that_do_not_fit_are_in_another_table(told: CheckedTrace) -> None:
    results = {f"policy{number} + host + disk": told.result for number in range(5)}
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_tables(results, 80))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80 + len("there is more than one output token")
    rows = [line for line in lines if "ttft p50, s" in line]
    assert len(rows) > 1
    cells = [cell.strip() for row in rows for cell in row.split("│")[2:-1]]
    assert len(cells) == 5
    assert len(set(cells)) == 1


def test_a_record_leaves_nothing_out(told: CheckedTrace, tmp_path: Path) -> None:
    path = DATA / generate.MOONCAKE_NAME
    trace = read_trace(path)
    setting = Setting(
        Configuration(blocks=512, block_size=16, requests=256, host_blocks=7, prefix_caching=False),
        max_tokens=300,
    )
    record = benchmark_record(trace, trace_source(path, len(trace)), setting, told)
    write_records({"fcfs": record}, tmp_path / "record.json")
    fields = json.loads((tmp_path / "record.json").read_text())["fcfs"]
    assert tuple(fields) == BenchmarkRecord.__struct_fields__
    assert fields["model_and_revision"] == fields["weight_precision"] == NO_MODEL
    assert fields["usable_kv_bytes"] == 1 << 30
    assert fields["context"]["declared_output_tokens"] == "at least 300"
    assert fields["context"]["output_tokens"]["maximum"] == 290
    assert fields["load"]["max_sequences"] == 256
    assert fields["load"]["requests_per_second"] == pytest.approx(119 / trace[-1].arrival_s)
    assert "all by recomputation" in fields["preemption_policy"]
    assert fields["prefix_caching"] == "off"
    assert "swap space of 7 blocks" in fields["offloading"]
    assert fields["batching_policy"]["promises"]["fcfs"] is True
    assert fields["latency"]["ttft"]["p50"] == told.result.percentiles["ttft"].p50
    assert all(value for value in fields.values())


def test_a_series_is_short_and_keeps_its_mean(told: CheckedTrace) -> None:
    series = told.series
    assert SERIES_POINTS / 2 < len(series.seconds) <= SERIES_POINTS
    assert series.seconds[0] == read_trace(DATA / generate.MOONCAKE_NAME)[0].arrival_s
    assert list(series.seconds) == sorted(series.seconds)
    assert max(series.kv_use) <= 1.0
    mean = sum(series.sequences) / len(series.sequences)
    sizes = told.result.metrics.batch_size_by_iteration
    assert mean == pytest.approx(sizes.sequences_mean, rel=0.01)


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!DOCTYPE html>")]
)
def test_pictures(name: str, start: bytes, told: CheckedTrace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / name, tmp_path / f"again-{name}"
    for path in (first, second):
        require_plotting(path)
        plot({"fcfs": told.series, "<b>": told.series}, "a < b", path)
    content = first.read_bytes()
    assert content.startswith(start)
    assert content == second.read_bytes()
    if name == "a.html":
        assert b"<title>a &lt; b</title>" in content
        assert content.count(b"<svg") == 1
        assert b"<b>" not in content


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"a\.pdf: a picture ends in \.png, \.svg or \.html"):
        require_plotting(Path("a.pdf"))
    monkeypatch.setattr("kvproof.fuzz.traces.plot.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"drawing needs matplotlib: pip install 'kvproof\[plot\]'"
    ):
        require_plotting(Path("a.png"))


# -- the command -----------------------------------------------------------------------------

MOONCAKE = str(DATA / generate.MOONCAKE_NAME)
HOST = ("--host-memory", "1GiB")
POLICY_OF_MINE = """
from kvproof.engine.policies import FirstComeFirstServed


class Mine(FirstComeFirstServed):
    '''As fcfs.'''


class Greedy(FirstComeFirstServed):
    def plan(self, state):
        plan = super().plan(state)
        return type(plan)(run=plan.run + plan.run) if state.iteration == 9 else plan
"""


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, ["trace", MOONCAKE, *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_policies_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(POLICY_OF_MINE)
    names = ("orca", "fcfs", "mine.py:Mine")
    policies = [part for name in names for part in ("--policy", name)]
    code, text, _ = command("--blocks", "512", *policies, "--record", "record.json")
    assert code == 0
    assert "PASS 3 policies over example-mooncake.jsonl" in text
    for word in (*names, "goodput, requests/s", "slots held and never used", "record.json"):
        assert word in text
    assert list(json.loads(Path("record.json").read_text())) == list(names)

    code, text, _ = command("--blocks", "512", *policies, "--json")
    fields = json.loads(text)
    assert (code, fields["verdict"], list(fields["policies"])) == (0, "pass", list(names))
    orca, fcfs, mine = fields["policies"].values()
    assert fields["subject"] == "scheduler:orca"
    for key in ("finished", "metrics", "percentiles", "goodput", "ops", "operations", "record"):
        assert fields[key] == orca[key]
    assert mine["metrics"] == fcfs["metrics"] != orca["metrics"]
    assert mine["record"]["batching_policy"]["about"] == "As fcfs."
    assert orca["metrics"]["preemptions"] == 0 < fcfs["metrics"]["preemptions"]
    assert orca["kv_use"]["used_of_held"] < fcfs["kv_use"]["used_of_held"]


def test_one_policy_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure stands in two tables, and nothing is compared with itself."""
    monkeypatch.chdir(tmp_path)
    code, text, _ = command("--blocks", "512", "--policy", "orca")
    assert code == 0
    assert text.count("Times are virtual") == 1
    assert "compared" not in text
    rows = rows_of(text)
    for once in ("ttft", "evictions", "goodput, requests/s", "output tokens/s"):
        assert rows.count(once) == 1
    assert rows.count("preemptions") == 2  # of the scheduler, and of a request
    _, both, _ = command("--blocks", "512", "--policy", "orca", "--policy", "fcfs")
    assert both.count("Times are virtual") == 1
    told_above = {row for row in rows_of(both) if row not in rows}
    assert {"finished", "ttft p50, s", "evictions, blocks"} <= told_above
    assert not [row for row in told_above if row.startswith(("good", "KV", "slots"))]


def rows_of(text: str) -> list[str]:
    """What the rows of its tables are called."""
    return [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]


def test_memory_hierarchies_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("--blocks", "512", *HOST, "--disk-memory", "8GiB")
    code, text, _ = command(*arguments, "--record", "record.json", "--json")
    names = ["fcfs", "fcfs + host", "fcfs + host + disk"]
    records = json.loads(Path("record.json").read_text())
    assert list(records) == names
    assert records["fcfs"]["offloading"].startswith("off")
    for word in ("prefix, recompute", "512 blocks", "4096 blocks", "16 tokens", "lru on disk"):
        assert word in records["fcfs + host + disk"]["offloading"]

    fields = json.loads(text)
    assert (code, fields["verdict"], list(fields["policies"])) == (0, "pass", names)
    none, host, disk = fields["policies"].values()
    assert fields["metrics"] == none["metrics"]
    assert {arm["subject"] for arm in (none, host, disk)} == {"scheduler:fcfs"}
    gained = [arm["tiers"]["effective_capacity_gained_tokens"] for arm in (none, host, disk)]
    assert gained[0] == {"mean": 0, "minimum": 0, "maximum": 0}
    assert 0 < gained[1]["mean"] < gained[2]["mean"]
    assert gained[1]["maximum"] <= 512 * 16
    assert [arm["offload"]["meanings"] for arm in (none, host, disk)] == [
        ["recompute"],
        ["prefix", "recompute"],
        ["prefix", "recompute"],
    ]
    assert disk["offload"] == {
        "meanings": ["prefix", "recompute"],
        "host_bytes": 1 << 30,
        "disk_bytes": 8 << 30,
        "evictions": {"device": "lru", "host": "lru", "disk": "lru"},
    }
    hits = [arm["metrics"]["prefix_cache_hits"]["tokens"] for arm in (none, host, disk)]
    assert hits[0] < hits[1] < hits[2]


def test_a_table_has_rows_for_tiers_where_they_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text("".join(Path(MOONCAKE).read_text().splitlines(True)[:30]))
    with_tiers = CliRunner().invoke(
        app, ["trace", "few.jsonl", "--blocks", "512", *HOST, "--disk-memory", "8GiB"]
    )
    assert with_tiers.exit_code == 0
    assert "PASS 3 replays over few.jsonl" in with_tiers.stdout
    rows = ("capacity gained", "stalls, request-iterations", "promotion p50", "ps a byte")
    for words in rows:
        assert words in with_tiers.stdout
    without = CliRunner().invoke(app, ["trace", "few.jsonl", "--blocks", "512"])
    assert without.exit_code == 0
    for words in rows:
        assert words not in without.stdout


def test_a_policy_that_swaps_shares_the_host(tmp_path: Path) -> None:
    code, text, _ = command("--blocks", "512", "--policy", "fcfs_swap", *HOST, "--json")
    fields = json.loads(text)
    none, host = fields["policies"].values()
    assert (code, list(fields["policies"])) == (0, ["fcfs_swap", "fcfs_swap + host"])
    assert host["offload"]["meanings"] == ["prefix", "suspension", "recompute"]
    assert host["tiers"]["moved"]["swap_out"]["bytes"] > 0
    assert none["tiers"]["moved"]["swap_out"]["bytes"] == 0 < none["metrics"]["preemptions"]


def test_a_violation_of_one_policy_fails_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(POLICY_OF_MINE)
    arguments = ("--blocks", "512", "--policy", "fcfs", "--policy", "mine.py:Greedy")
    code, text, _ = command(*arguments, "--json")
    fields = json.loads(text)
    assert (code, fields["verdict"]) == (1, "fail")
    verdicts = {name: entry["verdict"] for name, entry in fields["policies"].items()}
    assert verdicts == {"fcfs": "pass", "mine.py:Greedy": "fail"}
    (violation,) = fields["violations"]
    assert (violation["policy"], violation["property"]) == ("mine.py:Greedy", "PLAN")
    assert "twice" in violation["explanation"]
    case = Path(violation["case"])
    assert replay_case(load_case(case)).violations[0].property == "PLAN"
    found = sorted(path.name for path in case.parent.iterdir())
    assert found == sorted([case.name, f"{case.stem}.txt", f"test_{case.stem}.py"])


def test_limits_come_from_options() -> None:
    code, text, _ = command(
        *("--blocks", "600", "--watermark", "9", "--token-budget", "5000", "--max-sequences", "5"),
        *("--no-chunked-prefill", "--run-ahead", "2", "--host-blocks", "70"),
        *("--max-model-tokens", "4500", "--max-tokens", "400", "--slo-ttft", "5", "--json"),
    )
    fields = json.loads(text)
    assert code == 0
    record = fields["record"]
    assert record["batching_policy"]["run_ahead"] == 2
    assert record["batching_policy"]["limits"] == {
        "token_budget": 5000,
        "watermark_blocks": 9,
        "max_model_tokens": 4500,
        "chunked_prefill": False,
    }
    assert record["load"]["max_sequences"] == fields["metrics"]["active_sequences"]["maximum"] == 5
    assert record["context"]["declared_output_tokens"] == "at least 400"
    assert record["chunked_prefill"].startswith("off")
    assert "swap space of 70 blocks" in record["offloading"]
    assert fields["goodput"]["slo"] == {"ttft": 5.0, "tpot": 0.1}
    assert fields["finished"] == 120


def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, text, _ = command("--blocks", "512", "--plot", "use.html")
    assert (code, "written: use.html" in text) == (0, True)
    assert b"example-mooncake.jsonl, 512 blocks" in Path("use.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; there are fcfs,"),
        (("--policy", "absent.py:Mine"), "policy 'absent.py:Mine' cannot be imported"),
        (("--plot", "use.pdf"), "use.pdf: a picture ends in"),
        (("--plot", "absent/use.png"), "its folder does not exist"),
        (("--record", "absent/record.json"), "its folder does not exist"),
        (("--no-chunked-prefill", "--token-budget", "99"), "without chunked prefill an iteration"),
        (("--disk-memory", "1GiB"), "--disk-memory needs --host-memory"),
        ((*HOST, "--host-blocks", "9"), "either by --host-memory or by --host-blocks"),
        (("--host-memory", "0"), "a size must be positive"),
        (("--host-memory", "1MiB"), "hold no block"),
        ((*HOST, "--disk-memory", "some"), "not a size: 'some'"),
        (("--host-memory", "1000TiB"), "are more than the 16,777,216 that kvproof handles"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """In a process of its own, as users meet it."""
    code = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "trace", MOONCAKE, "--blocks", "8", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvproof: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
