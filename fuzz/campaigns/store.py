"""The folder of a campaign: what is written to it, and how it is read again.

Files are written under a temporary name, synced and renamed, so that a file is there as a whole
or not at all.  Journals are appended to, a line at a time: of a last line that is torn nothing is
read.  Anything else that cannot be read is an InputError with file and place.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    Stale,
)
from kvproof.invariants.case import Case, dump_case, load_case
from kvproof.invariants.errors import InputError

AnyRecord = TypeVar("AnyRecord", bound=Struct)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops.  Raises OSError with the file's name."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """All of the files or none; nothing if the folder is there, by whoever came first."""
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}")
    partial.mkdir()
    try:
        for name, text in files.items():
            write_whole(partial / name, text)
        try:
            os.rename(partial, folder)  # over an empty one
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def as_text(record: Struct) -> str:
    """The record as JSON for people to look into."""
    return json.dumps(msgspec.to_builtins(record), indent=1) + "\n"


class _Seeded(Struct, frozen=True):
    """What of a case tells whose it is."""

    seed: str = ""


class Store:
    """One campaign's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = folder / "shards"
        self.raw = folder / "raw"
        self.findings = folder / "findings"
        self.mended = folder / "mended"
        """Findings that did not fail any more when the campaign went on."""
        self.passed = folder / "passed"

    def make(self) -> None:
        """The folders that are not there yet."""
        for part in (self.shards, self.raw, self.findings, self.passed):
            part.mkdir(parents=True, exist_ok=True)

    def corpus(self, target: str) -> Path:
        return self.folder / "corpus" / folder_name(target)

    def journal(self, shard: int) -> Path:
        return self.shards / f"{shard:04}.jsonl"

    def present(self, shard: int) -> Path:
        """Holds the seed of the run that the shard is at."""
        return self.shards / f"{shard:04}.now"

    def seed_at(self, shard: int) -> str:
        """The seed of the run that the shard is at, or was; empty if it is at none."""
        path = self.present(shard)
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return text.partition("\n")[0].strip()

    def log(self, shard: int) -> Path:
        """What the shard's processes print."""
        return self.shards / f"{shard:04}.log"

    def passed_over(self, shard: int) -> Path:
        """Runs that the shard does not try again."""
        return self.passed / f"{shard:04}.jsonl"

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
                raise InputError(f"{self.folder}: is not empty, and is no campaign's")
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "campaign.json", as_text(campaign))
        elif there != campaign:
            raise InputError(f"{self.folder}: is another campaign: {_difference(there, campaign)}")
        self.make()

    @contextmanager
    def taken(self, campaign: Campaign, shard: int | None) -> Iterator[None]:
        """Begin; meanwhile no other call runs that shard here, or, for None, any of them.

        Nothing is left behind of a process that is killed.  Raises InputError as ``begin`` does,
        and if another call is at it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            try:
                how = fcntl.LOCK_EX if shard is None else fcntl.LOCK_SH
                locks.enter_context(_locked(self.folder, how | fcntl.LOCK_NB))
                self.begin(campaign)
                if shard is not None:
                    present = self.present(shard)
                    present.touch()
                    locks.enter_context(_locked(present, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                what = "" if shard is None else f"shard {shard} of "
                raise InputError(
                    f"{self.folder}: {what}this campaign is being run by another kvproof fuzz: "
                    "wait until that has ended, or choose another --out"
                ) from None
            yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Shards that are started together look after what was found before one by one."""
        with _locked(self.findings, fcntl.LOCK_EX):
            yield

    def stale(self) -> Stale:
        """What was wrong with what was known before, as the latest call saw it."""
        path = self.folder / "stale.json"
        return read_record(path, Stale) if path.exists() else Stale(())

    def tell_stale(self, entries: Sequence[str], unjudged: Sequence[str] = ()) -> None:
        """Have every report of this folder judge by that as well."""
        path = self.folder / "stale.json"
        if entries or unjudged:
            write_whole(path, as_text(Stale(tuple(entries), tuple(unjudged))))
        else:
            path.unlink(missing_ok=True)

    # -- findings and raw failures -----------------------------------------------------------------

    def found(self) -> list[FindingRecord]:
        """All findings, the earliest first.  Raises InputError with file and place."""
        records = []
        for path in sorted(self.findings.glob("[!.]*/finding.json")):
            record = read_record(path, FindingRecord)
            if record.id != path.parent.name:  # it would lead to another folder
                raise InputError(f"{path}: its id is {record.id!r}, unlike its folder's name")
            records.append(record)
        return sorted(records, key=lambda record: (record.at, record.id))

    def keep_raw(self, case: Case) -> Path:
        """Write a failing run as it was found; its file."""
        text = dump_case(case)
        path = self.raw / f"{digest(text)}.json"
        if not path.exists():
            write_whole(path, text)
        return path

    def raw_cases(self) -> Iterator[tuple[Path, Case]]:
        """Failing runs that are not triaged yet; other shards may be about to."""
        for path in sorted(self.raw.glob("[!.]*.json")):
            try:
                case = load_case(path)
            except InputError:
                if path.exists():
                    raise
            else:
                yield path, case

    # -- the corpus --------------------------------------------------------------------------------

    def keep(self, target: str, case: Case) -> Path:
        """Add a case to the corpus of a target; its file."""
        folder = self.corpus(target)
        folder.mkdir(parents=True, exist_ok=True)
        text = dump_case(case)
        path = folder / f"{digest(text)}.json"
        if not path.exists():
            write_whole(path, text)
        return path

    def kept(self, target: str) -> list[tuple[Path, Case]]:
        """The corpus of a target, short cases first."""
        cases = [(path, load_case(path)) for path, _ in self.kept_seeds(target)]
        return sorted(cases, key=lambda kept: len(kept[1].operations))

    def kept_seeds(self, target: str) -> list[tuple[Path, str]]:
        """The corpus of a target, small files first: each with the seed of its run.

        Raises InputError if one is not as it was written: its name is that of its text.
        """
        texts = [(p, p.read_bytes()) for p in sorted(self.corpus(target).glob("[!.]*.json"))]
        for path, text in texts:
            if digest(text) != path.stem:
                raise InputError(f"{path}: is not as it was written: its name is not its digest")
        ordered = sorted(texts, key=lambda kept: len(kept[1]))
        return [(path, decoded(path, text, _Seeded).seed) for path, text in ordered]


def require_subject(case: Case, path: Path, subject: str) -> None:
    """Raise InputError if the case is of another subject than the campaign says.

    A folder may come from somebody else: no file in it has code imported that nobody named.
    """
    if case.subject != subject:
        raise InputError(
            f"{path}: is of subject {case.subject!r}, and lies among those of {subject}"
        )


def folder_name(target: str) -> str:
    """The target's name as a folder: a policy may be ``my/sched.py:Mine``."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in target)


def digest(text: str | bytes) -> str:
    return sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """The record in a file.  Raises InputError in one line with file and place."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    return decoded(path, text, kind)


def decoded(path: Path, text: bytes, kind: type[AnyRecord]) -> AnyRecord:
    """The record that the text of a file is.  Raises InputError with file and place."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def read_lines(path: Path, kind: type[AnyRecord]) -> list[AnyRecord]:
    """The records in a journal; a last line without its end was torn, and is none."""
    records, _ = read_lines_from(path, kind, 0)
    return records


def read_lines_from(path: Path, kind: type[AnyRecord], start: int) -> tuple[list[AnyRecord], int]:
    """The records that stand there from byte ``start`` on, and where the next will begin."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    whole = text[: text.rfind(b"\n") + 1]
    decoder, records = msgspec.json.Decoder(kind), []
    for index, line in enumerate(whole.split(b"\n")[:-1]):
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            number = path.read_bytes()[:start].count(b"\n") + index + 1
            raise InputError(f"{path}:{number}: {error}") from None
    return records, start + len(whole)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """With LOCK_NB, raises BlockingIOError if another process has it."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


class Journal:
    """A journal that is appended to, by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError if another process has it open."""
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise
        self._end = path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, self._end)  # a torn last line

    def append(self, records: Sequence[Struct]) -> None:
        """Add lines.  Raises OSError if there is no room: then nothing was added."""
        text = b"".join([msgspec.json.encode(record) + b"\n" for record in records])
        try:
            if os.write(self._file, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._end += len(text)

    def close(self) -> None:
        os.close(self._file)


def _difference(there: Campaign, asked: Campaign) -> str:
    """The first thing in which they differ, as whoever typed the command knows it."""
    if there.seed != asked.seed:
        return f"its seed is {there.seed}, not {asked.seed}"
    if there.targets != asked.targets:
        old, new = (", ".join(t.name for t in c.targets) for c in (there, asked))
        return f"it drives {old}, not {new}"
    if there.shards != asked.shards:
        one = f"--workers {there.shards} (or --shard I/{there.shards})"
        return f"it was begun with {one}, not {asked.shards}"
    old, new = (f"with --fault {c.fault}" if c.fault else "without --fault" for c in (there, asked))
    return f"it was begun {old}, not {new}"
