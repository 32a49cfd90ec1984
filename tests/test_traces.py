"""Request traces: formats, the generated examples, the replay and its figures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from random import Random
from typing import cast

import msgspec
import pytest
from rich.console import Console

from kvproof.fuzz.traces import generate
from kvproof.engine.clock import NS_PER_S, CostModel, VirtualClock
from kvproof.fuzz.traces.figures import (
    NO_HOST_TIER,
    NOT_EXPORTED,
    Gauge,
    Level,
    TraceResult,
    batch_sizes,
)
from kvproof.fuzz.traces.formats import (
    UNSHARED_SOURCE,
    TraceError,
    TraceRequest,
    read_trace,
)
from kvproof.fuzz.traces.pool import blocks_in, parse_bytes
from kvproof.fuzz.traces.replay import FINAL_LENGTH_EXCEEDS_POOL, Replay, replay
from kvproof.fuzz.traces.table import result_tables
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    KINDS,
    Admit,
    Finish,
    Grow,
    Launch,
    Operation,
    Preempt,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOTHING_TO_RUN,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.subject import Configuration, Semantics, Subject
from kvproof.stateful_tests.subjects.engine import EngineSubject

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
    assert Level(3).gauge(0) == Gauge(3.0, 3, 3)


def test_batch_series_is_compact() -> None:
    sizes = batch_sizes(range(101), [4] * 101)
    assert sizes.iterations_per_point == 3
    assert sizes.sequences_series[:2] == [1.0, 4.0]
    assert sizes.sequences_series[-1] == 99.5
    assert (sizes.sequences_maximum, sizes.tokens_mean) == (100, 4.0)


# -- a subject that only counts blocks -------------------------------------------------------


class CountingRequest:
    def __init__(self, length: int) -> None:
        self.length = length
        self.computed = 0
        self.blocks = 0


class CountingSubject:
    """The least that can be replayed over: blocks are counted, nothing is cached.

    It insists on what the driver promises: only requests without uncomputed tokens grow, and an
    admission asks for blocks that may be there.
    """

    name = "counting"
    semantics = Semantics()
    capabilities = frozenset(KINDS)

    def __init__(self, blocks: int, block_size: int = 4, requests: int = 64) -> None:
        self.configuration = Configuration(blocks=blocks, block_size=block_size, requests=requests)
        self.free = blocks
        self.running: dict[int, CountingRequest] = {}
        self.preempted: dict[int, CountingRequest] = {}
        self.admitted = 0
        self.in_flight: list[tuple[CountingRequest, int]] | None = None
        self.final_lengths: dict[int, int] = {}
        self.done: list[Operation] = []
        self.refused: list[Operation] = []

    def apply(self, operation: Operation) -> Outcome:
        handler: Callable[..., Outcome] = getattr(self, "_" + type(operation).__name__.lower())
        outcome = handler(operation)
        (self.done if outcome.status == "done" else self.refused).append(operation)
        return outcome

    def _pick(self, pool: Mapping[int, CountingRequest], index: int) -> int:
        return sorted(pool)[index % len(pool)]

    def _take(self, request: CountingRequest) -> bool:
        needed = -(-request.length // self.configuration.block_size) - request.blocks
        if needed > self.free:
            return False
        self.free -= needed
        request.blocks += needed
        return True

    def _give_back(self, request: CountingRequest) -> None:
        self.free += request.blocks
        request.blocks = request.computed = 0

    def _admit(self, operation: Admit) -> Outcome:
        request = CountingRequest(prompt_length(operation.prompt))
        if not self._take(request):
            return Outcome("refused", NO_FREE_BLOCKS)
        self.running[self.admitted] = request
        self.admitted += 1
        return Outcome("done", request=self.admitted - 1)

    def _resume(self, operation: Resume) -> Outcome:
        identity = self._pick(self.preempted, operation.request)
        if not self._take(self.preempted[identity]):
            return Outcome("refused", NO_FREE_BLOCKS)
        self.running[identity] = self.preempted.pop(identity)
        return Outcome("done", request=identity)

    def _grow(self, operation: Grow) -> Outcome:
        request = self.running[self._pick(self.running, operation.request)]
        assert request.computed == request.length
        request.length += 1
        if self._take(request):
            return Outcome("done")
        request.length -= 1
        return Outcome("refused", NO_FREE_BLOCKS)

    def _finish(self, operation: Finish) -> Outcome:
        identity = self._pick(self.running, operation.request)
        request = self.running.pop(identity)
        assert request.computed == request.length
        self.final_lengths[identity] = request.length
        self._give_back(request)
        return Outcome("done", request=identity)

    def _preempt(self, operation: Preempt) -> Outcome:
        identity = self._pick(self.running, operation.request)
        self.preempted[identity] = self.running.pop(identity)
        self._give_back(self.preempted[identity])
        return Outcome("done", request=identity)

    def _launch(self, operation: Launch) -> Outcome:
        left, items = operation.budget, []
        for identity in sorted(self.running):
            request = self.running[identity]
            tokens = min(left, request.length - request.computed)
            left -= tokens
            items.append((request, tokens))
        if left == operation.budget:
            return Outcome("refused", NOTHING_TO_RUN)
        self.in_flight = items
        return Outcome("done", count=operation.budget - left)

    def _retire(self, operation: Retire) -> Outcome:
        assert self.in_flight is not None
        for request, tokens in self.in_flight:
            request.computed += tokens
        self.in_flight = None
        return Outcome("done")

    def drain_events(self) -> Sequence[Event]:
        return ()

    def view(self) -> CountingView:
        return CountingView(self)


class CountingView:
    """The part of the view that a replay reads."""

    def __init__(self, subject: CountingSubject) -> None:
        self._subject = subject

    def free_count(self, group: int) -> int:
        return self._subject.free

    def table(self, request: int, group: int) -> Sequence[int]:
        return range(self._subject.running[request].blocks)

    def metrics(self) -> Mapping[str, int]:
        return {}


def unshared(*requests: tuple[int, int, int]) -> list[TraceRequest]:
    """A trace of (arrival in ns, prompt tokens, output tokens)."""
    return [
        TraceRequest(arrival_ns / NS_PER_S, (Segment(number, prompt),), prompt, output)
        for number, (arrival_ns, prompt, output) in enumerate(requests)
    ]


TINY_COST = CostModel(step_ns=100, prefill_token_ns=10, decode_sequence_ns=5, kv_token_read_ns=1)


def run(
    trace: list[TraceRequest],
    subject: CountingSubject,
    *,
    budget_tokens: int = 8192,
    sample_steps: int = 16,
) -> TraceResult:
    return Replay(
        trace,
        cast(Subject, subject),  # its view has only what a replay reads
        subject.apply,
        cost=TINY_COST,
        budget_tokens=budget_tokens,
        sample_steps=sample_steps,
    ).run()


# -- replay ----------------------------------------------------------------------------------


def test_times_of_a_tiny_trace() -> None:
    """Two requests, worked out by hand.

    step 1, from 0 ns: A computes 4 prompt tokens: 100 + 4·10 + 4·1 = 144;
    step 2, from 144: A decodes at length 5, B (arrived at 100) computes 2 prompt tokens:
    100 + 2·10 + 1·5 + (5 + 2)·1 = 132; B has its only token;
    step 3, from 276: A decodes at length 6: 100 + 1·5 + 6·1 = 111; it ends at 387.
    """
    subject = CountingSubject(blocks=8)
    trace = unshared((0, 4, 3), (100, 2, 1))
    result = run(trace, subject, sample_steps=1)

    assert (result.finished, result.steps, result.stopped) == (2, 3, None)
    assert result.virtual_seconds == 387e-9
    ns = {name: p.p50 * NS_PER_S for name, p in result.percentiles.items()}
    assert ns["queue_time"] == pytest.approx((0 + 44) / 2)
    assert ns["prefill_time"] == pytest.approx((144 + 132) / 2)
    assert ns["ttft"] == pytest.approx((144 + 176) / 2)
    assert ns["decode_time"] == pytest.approx((243 + 0) / 2)
    assert ns["tpot"] == pytest.approx(243 / 2)  # of A alone
    assert result.percentiles["allocated_blocks"].p50 == (2 + 1) / 2
    assert result.percentiles["input_tokens"].p99 == pytest.approx(2 + 0.99 * 2)

    metrics = result.metrics
    assert metrics.active_sequences.mean == pytest.approx((144 + 2 * 132 + 111) / 387)
    assert metrics.live_cached_tokens.mean == pytest.approx((0 + 4 * 132 + 5 * 111) / 387)
    assert metrics.kv_blocks_free.mean == pytest.approx((7 * 144 + 5 * 132 + 6 * 111) / 387)
    assert (metrics.kv_blocks_free.minimum, metrics.kv_blocks_free.maximum) == (5, 8)
    block_bytes = 4 * subject.configuration.kv_bytes_per_token
    assert metrics.kv_capacity_bytes == 8 * block_bytes
    assert (metrics.kv_bytes_used.minimum, metrics.kv_bytes_used.maximum) == (0, 3 * block_bytes)
    assert metrics.batch_size_by_iteration.sequences_series == [1.0, 2.0, 1.0]
    assert metrics.batch_size_by_iteration.tokens_series == [4.0, 3.0, 1.0]
    assert (metrics.evictions, metrics.host_promotions) == (NOT_EXPORTED, NO_HOST_TIER)


def test_latest_admitted_is_preempted_and_comes_back_first() -> None:
    """Four requests of one block each fill the pool; each needs a second one to grow."""
    subject = CountingSubject(blocks=4)
    trace = unshared((0, 4, 3), (0, 4, 3), (0, 4, 3), (0, 4, 3))
    result = run(trace, subject)
    assert result.finished == 4
    preempts = [op.request for op in subject.done if isinstance(op, Preempt)]
    # Requests 3 and 2 make room for 0 and 1, and find the pool empty when these have ended.
    assert preempts == [3, 2]
    kinds = [type(op).__name__ for op in subject.done]
    assert kinds.index("Resume") > kinds.index("Finish")
    assert [type(op) for op in subject.refused] == [Grow, Grow, Resume]
    assert list(subject.final_lengths) == [0, 1, 2, 3]
    assert result.metrics.resumptions == 2


def test_nobody_enters_in_an_iteration_that_preempted() -> None:
    subject = CountingSubject(blocks=40, block_size=1)
    trace = unshared(*((17 * n, 3 + n % 7, 9) for n in range(60)))
    run(trace, subject)
    blocked = preempted = False
    for operation in subject.done:
        if isinstance(operation, Preempt):
            blocked = preempted = True
        elif isinstance(operation, Launch):
            blocked = False
        elif isinstance(operation, Admit | Resume):
            assert not blocked
    assert preempted


def test_chunked_prefill_stays_within_the_budget() -> None:
    subject = CountingSubject(blocks=30)
    trace = unshared((0, 20, 2), (0, 20, 2), (0, 1, 2))
    result = run(trace, subject, budget_tokens=16)
    # 16 | 4 of the first and 12 | 1 decoding, 8 and 1 | 2 decoding
    assert result.metrics.batch_size_by_iteration.tokens_series == [16.0, 16.0, 10.0, 2.0]
    assert result.finished == 3


def test_running_requests_are_bounded_by_the_token_budget() -> None:
    subject = CountingSubject(blocks=100)
    trace = unshared(*((0, 2, 5) for _ in range(9)))
    result = run(trace, subject, budget_tokens=3)
    assert result.finished == 9
    assert result.metrics.active_sequences.maximum == 3
    with pytest.raises(ValueError, match="must be positive"):
        run(trace, subject, budget_tokens=0)


def test_requests_that_can_never_fit_are_rejected() -> None:
    subject = CountingSubject(blocks=4, block_size=4)
    trace = unshared((0, 17, 1), (0, 16, 2), (0, 16, 1), (0, 3, 3))
    result = run(trace, subject)
    assert result.rejections == {FINAL_LENGTH_EXCEEDS_POOL: 2}
    assert (result.requests, result.finished, result.rejected) == (4, 2, 2)


def test_a_subject_may_reject_for_ever() -> None:
    class Smaller(CountingSubject):
        def _admit(self, operation: Admit) -> Outcome:
            if prompt_length(operation.prompt) > 8:
                return Outcome("refused", LARGER_THAN_POOL)
            return super()._admit(operation)

    subject = Smaller(blocks=4)
    trace = unshared((0, 9, 1), (0, 8, 1))
    result = run(trace, subject)
    assert (result.finished, result.rejections) == (1, {LARGER_THAN_POOL: 1})


def test_the_clock_jumps_over_idle_time() -> None:
    subject = CountingSubject(blocks=4)
    result = run(unshared((0, 4, 1), (10_000, 4, 1)), subject)
    assert result.virtual_seconds == 10_144e-9
    assert result.metrics.active_sequences.mean == pytest.approx(2 * 144 / 10_144)


def random_trace(random: Random) -> list[TraceRequest]:
    arrival_ns, requests = 0, []
    for _ in range(random.randint(1, 25)):
        arrival_ns += random.choice((0, 0, 50, 900))
        requests.append((arrival_ns, random.randint(1, 30), random.randint(1, 20)))
    return unshared(*requests)


@pytest.mark.parametrize("seed", range(60))
def test_random_traces_end_first_come_first_served(seed: int) -> None:
    random = Random(seed)
    trace = random_trace(random)
    subject = CountingSubject(
        random.randint(8, 30), random.choice((1, 4, 5)), random.choice((2, 64))
    )
    budget_tokens = random.choice((3, 8, 500))
    result = run(trace, subject, budget_tokens=budget_tokens)
    assert result.stopped is None
    assert result.finished + result.rejected == result.requests
    # Identities count admissions: the n-th admitted is the n-th that was not rejected.
    capacity = subject.configuration.blocks * subject.configuration.block_size
    accepted = [request for request in trace if request.final_tokens <= capacity]
    assert result.finished == len(accepted)
    assert subject.final_lengths == {n: r.final_tokens for n, r in enumerate(accepted)}
    assert subject.free == subject.configuration.blocks
    assert result.metrics.admissions == result.finished
    assert result.metrics.resumptions == result.metrics.preemptions


BROKEN: dict[str, tuple[str, Callable[..., Outcome], str]] = {
    "never admits": (
        "_admit",
        lambda *_: Outcome("refused", NO_FREE_BLOCKS),
        "the first in line is refused although nothing runs",
    ),
    "cannot admit": ("_admit", lambda *_: SKIPPED, "admit is skipped"),
    "admits nameless": ("_admit", lambda *_: Outcome("done"), "does not name the request"),
    "never grows": (
        "_grow",
        lambda *_: Outcome("refused", NO_FREE_BLOCKS),
        "to a request that runs alone",
    ),
    "cannot grow": ("_grow", lambda *_: SKIPPED, "grow is skipped"),
    "schedules too little": (
        "_launch",
        lambda *_: Outcome("done", count=1),
        "launch schedules 1 tokens, oldest first would be 8",
    ),
    "cannot finish": ("_finish", lambda *_: SKIPPED, "finish is skipped"),
}


@pytest.mark.parametrize(("method", "replacement", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_subject_stops_the_replay(
    method: str, replacement: Callable[..., Outcome], reason: str
) -> None:
    subject = CountingSubject(blocks=4)
    setattr(subject, method, replacement)
    result = run(unshared((0, 4, 2), (0, 4, 2)), subject)
    assert result.stopped is not None
    assert reason in result.stopped
    assert result.finished == 0


def test_a_subject_that_loses_blocks_stops_the_replay() -> None:
    class Leaking(CountingSubject):
        def _give_back(self, request: CountingRequest) -> None:
            request.blocks = request.computed = 0

    subject = Leaking(blocks=4)
    result = run(unshared((0, 8, 1), (0, 12, 1)), subject)
    assert result.finished == 1
    assert result.stopped == "the first in line is refused although nothing runs"
    assert [type(op) for op in subject.refused] == [Admit, Admit]


def test_result_after_an_error_of_the_caller() -> None:
    subject = CountingSubject(blocks=4)

    def perform(operation: Operation) -> Outcome:
        if isinstance(operation, Finish) and subject.final_lengths:
            raise KeyboardInterrupt
        return subject.apply(operation)

    driver = Replay(unshared((0, 4, 2), (0, 4, 3)), cast(Subject, subject), perform)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert driver.result().finished == 1
    assert driver.result().percentiles["input_tokens"].p50 == 4


def test_an_empty_trace_has_no_figures() -> None:
    subject = CountingSubject(blocks=4)
    result = run([], subject)
    assert (result.requests, result.steps, result.percentiles) == (0, 0, {})


# -- replay over the engine ------------------------------------------------------------------


def example_subject(blocks: int = generate.EXAMPLE_BLOCKS) -> EngineSubject:
    return EngineSubject(
        Configuration(blocks=blocks, block_size=generate.EXAMPLE_BLOCK_SIZE, requests=256)
    )


def performing(subject: Subject, log: list[Operation] | None = None) -> Callable[..., Outcome]:
    def perform(operation: Operation) -> Outcome:
        if log is not None:
            log.append(operation)
        outcome = subject.apply(operation)
        subject.drain_events()
        return outcome

    return perform


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_put_the_engine_under_pressure(example: Path) -> None:
    subject, trace = example_subject(), read_trace(example)
    result = replay(trace, subject, performing(subject))
    assert result.stopped is None
    assert result.finished == result.requests == 120

    metrics, exported = result.metrics, subject.view().metrics()
    assert metrics.preemptions > 5
    assert metrics.evictions == exported["evictions"] > 1000
    hits = metrics.prefix_cache_hits
    assert hits.tokens + hits.resumed_tokens > 1000
    assert metrics.waiting_sequences.maximum > 5
    # The driver's books agree with the engine's.
    assert metrics.admissions == exported["admissions"] == result.finished
    assert metrics.preemptions == exported["preemptions"] == metrics.resumptions
    assert hits.tokens == exported["prefix_cache_hits"]
    assert hits.queries_tokens == exported["prefix_cache_queries"]
    assert hits.queries_tokens == sum(request.prompt_tokens for request in trace)
    assert result.steps == exported["iterations"]
    assert metrics.kv_capacity_bytes == exported["kv_capacity_bytes"]
    assert metrics.kv_bytes_used.maximum == metrics.kv_capacity_bytes
    assert metrics.kv_blocks_free.minimum == 0
    assert (
        metrics.kv_blocks_free.maximum == exported["kv_blocks_free"] == exported["kv_blocks_total"]
    )


def test_turns_of_a_chat_hit_their_prefixes() -> None:
    """In a pool without pressure every full block of an earlier turn is found again."""
    trace = read_trace(DATA / generate.MOONCAKE_NAME)
    subject = example_subject(blocks=20_000)
    result = replay(trace, subject, performing(subject))
    assert (result.metrics.preemptions, result.metrics.evictions) == (0, 0)
    seen: set[int] = set()
    known_tokens = 0
    for request in trace:
        sources = [segment.source for segment in request.prompt]
        known_tokens += sum(s.length for s in request.prompt if s.source in seen)
        seen.update(sources)
    # Less than what was asked for before: requests that overlap in time compute twice.
    assert 0.9 * known_tokens < result.metrics.prefix_cache_hits.tokens <= known_tokens


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_skipping_vain_attempts_delays_nobody(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = read_trace(example)
    subject = example_subject()
    log: list[Operation] = []
    result = replay(trace, subject, performing(subject, log))

    monkeypatch.setattr(Replay, "_is_hopeless", lambda *_: False)
    subject = example_subject()
    eager_log: list[Operation] = []
    eager = replay(trace, subject, performing(subject, eager_log))
    assert eager == result

    def attempts(operations: list[Operation]) -> int:
        return sum(isinstance(operation, Admit | Resume) for operation in operations)

    # Some refusals are left, so that they are checked.
    granted = result.metrics.admissions + result.metrics.resumptions
    assert granted < attempts(log) < granted + 10
    assert attempts(eager_log) > granted + 50


def test_result_is_json_and_a_table() -> None:
    subject = example_subject()
    result = replay(read_trace(EXAMPLES[0]), subject, performing(subject), cache_dtype="fp8")
    decoded = json.loads(msgspec.json.encode(result))
    assert decoded["cache_dtype"] == "fp8"
    assert decoded["metrics"]["host_offload_bytes"] == NO_HOST_TIER
    assert set(decoded["percentiles"]["ttft"]) == {"p50", "p90", "p99"}

    console = Console(width=120, record=True, file=StringIO())
    console.print(result_tables(result))
    text = console.export_text()
    for name in (*decoded["metrics"], *decoded["percentiles"], "attention_mode", "fp8"):
        assert name in text
