"""Reads public request traces: Mooncake JSON lines, Azure CSV, BurstGPT CSV.

A file is read and validated to its end before anything is returned, so that a replay never
starts on a trace that breaks off half-way.  What is wrong is said with file and line; nothing is
skipped, sorted or filled in.  The format is found by content, not by the file's name; a file
compressed with gzip is read as it is.

Mooncake
    One object a line: ``timestamp`` (ms), ``input_length``, ``output_length``, and ``hash_ids``,
    one per 512 prompt tokens.  An id stands for a block *and all before it*: equal ids, equal
    prefixes.
Azure
    Columns ``TIMESTAMP`` (date and time, UTC unless it says otherwise), ``ContextTokens``,
    ``GeneratedTokens``.
BurstGPT
    Columns ``Timestamp`` (s), ``Request tokens``, ``Response tokens``.

Other fields and columns are ignored.  The CSV formats say nothing about content: their prompts
share no prefix.  A request without an output token is malformed, since it records a failure
(BurstGPT is published without those, too).
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import Segment

MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens that one hash id stands for."""

MAX_VALUE = 1 << 40
"""Largest hash id and largest number of tokens that an operation can carry."""

UNSHARED_SOURCE = 1 << 39
"""Prompts of traces without content draw on sources from here on, far from any real hash id."""

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
_US_PER_MS = 1_000
_US_PER_S = 1_000_000

Tokens = Annotated[int, Meta(ge=1, le=MAX_VALUE)]
HashId = Annotated[int, Meta(ge=0, le=MAX_VALUE)]
Time = Annotated[float, Meta(ge=0, le=float(1 << 53))]


class TraceError(InputError):
    """A trace cannot be used; the message is ``file:line: reason``."""


class TraceRequest(Struct, frozen=True):
    """One request of a trace."""

    arrival_s: float
    """Seconds after the first request of the trace."""
    prompt: tuple[Segment, ...]
    prompt_tokens: int
    output_tokens: int
    """At least 1: the prefill samples the first of them."""

    @property
    def final_tokens(self) -> int:
        """KV tokens when the request ends: the last sampled token is never fed back (row G32)."""
        return self.prompt_tokens + self.output_tokens - 1


class _Arrival(NamedTuple):
    """A parsed line.  ``time_us`` counts from wherever the format does."""

    time_us: int
    prompt: tuple[Segment, ...]
    prompt_tokens: int
    output_tokens: int


class _MalformedError(Exception):
    """Why the present line cannot be used."""


Parser = Callable[[str], _Arrival]


def read_trace(path: str | Path) -> list[TraceRequest]:
    """All requests of a trace file, in the order of their arrival.

    Raises :class:`TraceError` for a file that is missing, empty, of an unknown format, or
    malformed anywhere.
    """
    lines = _read_lines(path)
    number = 1
    arrivals: list[_Arrival] = []
    try:
        parse, header_lines = _detect(_decode(lines[0]))
        if len(lines) == header_lines:
            raise _MalformedError("no request follows the header")
        for line in lines[header_lines:]:
            number = header_lines + len(arrivals) + 1
            arrivals.append(_parse(parse, line))
            if len(arrivals) > 1:
                _check_order(arrivals[-2].time_us, arrivals[-1].time_us)
    except _MalformedError as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    start_us = arrivals[0].time_us
    return [
        TraceRequest((time_us - start_us) / _US_PER_S, prompt, prompt_tokens, output_tokens)
        for time_us, prompt, prompt_tokens, output_tokens in arrivals
    ]


def _read_lines(path: str | Path) -> list[bytes]:
    """The file's lines without their ends; at least one."""
    try:
        data = Path(path).read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    lines = data.removeprefix(_BOM).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise TraceError(f"{path}:1: the file is empty")
    return [line.removesuffix(b"\r") for line in lines]


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _MalformedError(f"not UTF-8 text, at byte {error.start + 1}") from None


def _detect(first_line: str) -> tuple[Parser, int]:
    """The parser for a file that starts like this, and how many header lines it has."""
    if first_line.lstrip().startswith("{"):
        return _mooncake_parser(), 0
    header = next(csv.reader([first_line]), [])
    for row_type in _CSV_FORMATS:
        missing = _columns(row_type) - set(header)
        if not missing:
            return _csv_parser(header, row_type), 1
        if len(missing) < len(_columns(row_type)):
            raise _MalformedError("missing column: " + ", ".join(sorted(missing)))
    raise _MalformedError(
        "neither a JSON object (Mooncake) nor a known CSV header (Azure, BurstGPT)"
    )


def _parse(parse: Parser, line: bytes) -> _Arrival:
    """Parse one line; whatever is wrong with it becomes a reason."""
    text = _decode(line)
    if not text.strip():
        raise _MalformedError("the line is empty")
    try:
        return parse(text)
    except msgspec.ValidationError as error:
        # "Expected `int` >= 1 - at `$.input_length`": the place first reads better after a line.
        reason, _, place = str(error).partition(" - at `$")
        name = place.removesuffix("`").lstrip(".")
        raise _MalformedError(f"{name}: {reason}" if name else reason) from None
    except msgspec.DecodeError as error:
        raise _MalformedError(f"not a complete JSON object: {error}") from None


def _check_order(before_us: int, now_us: int) -> None:
    if now_us < before_us:
        late_s = (before_us - now_us) / _US_PER_S
        raise _MalformedError(f"not in order of arrival: {late_s:g} s before the line above")


# -- Mooncake --------------------------------------------------------------------------------


class _MooncakeLine(Struct):
    timestamp: Time
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[HashId]


def _mooncake_parser() -> Parser:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    # The same prefix blocks come up again and again: one object each saves most of the memory.
    whole_blocks: dict[int, Segment] = {}

    def parse(text: str) -> _Arrival:
        line = decode(text)
        blocks = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(line.hash_ids) != blocks:
            raise _MalformedError(
                f"hash_ids: {len(line.hash_ids)} of them, but {line.input_length} input tokens "
                f"are {blocks} blocks of {MOONCAKE_BLOCK_TOKENS}"
            )
        prompt = [
            whole_blocks.get(source)
            or whole_blocks.setdefault(source, Segment(source, MOONCAKE_BLOCK_TOKENS))
            for source in line.hash_ids
        ]
        remainder = line.input_length % MOONCAKE_BLOCK_TOKENS
        if remainder:
            prompt[-1] = Segment(line.hash_ids[-1], remainder)
        time_us = round(line.timestamp * _US_PER_MS)
        return _Arrival(time_us, tuple(prompt), line.input_length, line.output_length)

    return parse


# -- CSV formats -----------------------------------------------------------------------------


class _AzureRow(Struct):
    timestamp: str = field(name="TIMESTAMP")
    prompt_tokens: Tokens = field(name="ContextTokens")
    output_tokens: Tokens = field(name="GeneratedTokens")

    def time_us(self) -> int:
        try:
            time = datetime.fromisoformat(self.timestamp)
        except ValueError:
            raise _MalformedError("TIMESTAMP: not a date and time") from None
        return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _US


class _BurstRow(Struct):
    timestamp: Time = field(name="Timestamp")
    prompt_tokens: Tokens = field(name="Request tokens")
    output_tokens: Tokens = field(name="Response tokens")

    def time_us(self) -> int:
        return round(self.timestamp * _US_PER_S)


_CSV_FORMATS: tuple[type[_AzureRow] | type[_BurstRow], ...] = (_AzureRow, _BurstRow)


def _columns(row_type: type[Struct]) -> set[str]:
    return {column.encode_name for column in msgspec.structs.fields(row_type)}


def _csv_parser(header: list[str], row_type: type[_AzureRow] | type[_BurstRow]) -> Parser:
    sources = iter(range(UNSHARED_SOURCE, MAX_VALUE))

    def parse(text: str) -> _Arrival:
        try:
            values = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise _MalformedError(f"not a CSV row: {error}") from None
        if len(values) != len(header):
            raise _MalformedError(f"{len(values)} columns, but the header names {len(header)}")
        named: dict[str, Any] = dict(zip(header, values, strict=True))
        row = msgspec.convert(named, row_type, strict=False)
        prompt = (Segment(next(sources), row.prompt_tokens),)
        return _Arrival(row.time_us(), prompt, row.prompt_tokens, row.output_tokens)

    return parse
