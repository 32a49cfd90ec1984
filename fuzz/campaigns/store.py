"""The folder of a campaign: what is written to it, and how it is read again.

Files are written under a temporary name, synced and renamed, so that a file is there as a whole
or not at all.  Journals are appended to, a line at a time: of a last line that is torn nothing is
read.  Anything else that cannot be read is an InputError with file and place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
from msgspec import Struct

from kvproof.fuzz.campaigns.records import (
    FORMAT,
    VERSION,
    Campaign,
    FindingRecord,
    PassedOver,
    Progress,
)
from kvproof.invariants.case import Case, dump_case, load_case
from kvproof.invariants.errors import InputError

AnyRecord = TypeVar("AnyRecord", bound=Struct)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def as_text(record: Struct) -> str:
    """The record as JSON for people to look into."""
    return json.dumps(msgspec.to_builtins(record), indent=1) + "\n"


class Store:
    """One campaign's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = folder / "shards"
        self.raw = folder / "raw"
        self.findings = folder / "findings"

    def make(self) -> None:
        """The folders that are not there yet."""
        for part in (self.shards, self.raw, self.findings):
            part.mkdir(parents=True, exist_ok=True)

    def corpus(self, target: str) -> Path:
        return self.folder / "corpus" / folder_name(target)

    def journal(self, shard: int) -> Path:
        return self.shards / f"{shard:04}.jsonl"

    def passed_over(self, shard: int) -> Path:
        return self.shards / f"{shard:04}.passed.jsonl"

    # -- the campaign ----------------------------------------------------------------------------

    def campaign(self) -> Campaign | None:
        """The campaign that this folder is of; None if there is nothing yet."""
        path = self.folder / "campaign.json"
        if not path.exists():
            return None
        campaign = read_record(path, Campaign)
        if campaign.format != FORMAT or campaign.version != VERSION:
            raise InputError(
                f"{path}: {campaign.format!r} of version {campaign.version}; this kvproof reads "
                f"{FORMAT!r} of version {VERSION}"
            )
        return campaign

    def begin(self, campaign: Campaign) -> None:
        """Make the folder that of the campaign, or see that it already is.

        Raises InputError if it is of another campaign, or of something else.
        """
        there = self.campaign()
        if there is None:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise InputError(f"{self.folder}: is not empty, and no campaign; nothing is written")
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "campaign.json", as_text(campaign))
        elif there != campaign:
            raise InputError(f"{self.folder}: is another campaign: {_difference(there, campaign)}")
        self.make()

    # -- journals --------------------------------------------------------------------------------

    def journals(self) -> Iterator[tuple[int, list[Progress]]]:
        """Each shard that has run, and its lines."""
        for path in sorted(self.shards.glob("[0-9]*.jsonl")):
            number, _, rest = path.name.partition(".")
            if rest == "jsonl" and number.isdigit():
                yield int(number), read_lines(path, Progress)

    def runs_passed_over(self, shard: int) -> list[PassedOver]:
        path = self.passed_over(shard)
        return read_lines(path, PassedOver) if path.exists() else []

    # -- findings and raw failures -----------------------------------------------------------------

    def found(self) -> list[FindingRecord]:
        """All findings, the earliest first."""
        records = [
            read_record(path, FindingRecord)
            for path in sorted(self.findings.glob("[!.]*/finding.json"))
        ]
        return sorted(records, key=lambda record: (record.at, record.id))

    def keep_raw(self, case: Case) -> Path:
        """Write a failing run as it was found; its file."""
        text = dump_case(case)
        path = self.raw / f"{digest(text)}.json"
        if not path.exists():
            write_whole(path, text)
        return path

    def raw_cases(self) -> Iterator[tuple[Path, Case]]:
        """Failing runs that are not triaged yet."""
        for path in sorted(self.raw.glob("[!.]*.json")):
            yield path, load_case(path)

    # -- the corpus --------------------------------------------------------------------------------

    def keep(self, target: str, case: Case) -> None:
        """Add a case to the corpus of a target."""
        folder = self.corpus(target)
        folder.mkdir(parents=True, exist_ok=True)
        text = dump_case(case)
        path = folder / f"{digest(text)}.json"
        if not path.exists():
            write_whole(path, text)

    def kept(self, target: str) -> list[tuple[Path, Case]]:
        """The corpus of a target, short cases first."""
        paths = sorted(self.corpus(target).glob("[!.]*.json"))
        cases = [(path, load_case(path)) for path in paths]
        return sorted(cases, key=lambda kept: len(kept[1].operations))


def folder_name(target: str) -> str:
    """The target's name as a folder: a policy may be ``my/sched.py:Mine``."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in target)


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """The record in a file.  Raises InputError in one line with file and place."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def read_lines(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """The records in a journal; a last line without its end was torn, and is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    return _decoded(path, lines[:-1], kind, first=1)


def _decoded(
    path: Path, lines: Sequence[bytes], kind: type[AnyRecord], first: int
) -> list[AnyRecord]:
    decoder = msgspec.json.Decoder(kind)
    records = []
    for number, line in enumerate(lines, start=first):
        if line:
            try:
                records.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path}:{number}: {error}") from None
    return records


def append_lines(path: Path, records: Sequence[Struct]) -> None:
    """Add records to a journal; if its last line was torn, instead of that line."""
    text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        if end:
            _cut_torn_line(file.fileno(), end)
        os.write(file.fileno(), text)
