"""What one shard changes in its folder, brought to the campaign's folder on another machine.

The order matters, as either side may be gone in the middle.  What is read first is the journal:
whatever it counts has been written by then, and is brought with it.  The failing runs that are not
triaged yet are read before the findings: one that is gone has become a finding that is there.
Where they are brought, all that is written in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kvproof.fuzz.campaigns.known import Ledger
from kvproof.fuzz.campaigns.records import FindingRecord, Progress
from kvproof.fuzz.campaigns.store import (
    Journal,
    Store,
    as_text,
    read_lines_from,
    write_folder,
    write_whole,
)

RECORD = "finding.json"


class Changes(Struct):
    """Of a shard's folder, since they were asked for last."""

    lines: list[Progress] = field(default_factory=list)
    """Of the journal."""
    log: str = ""
    """What was appended to it."""
    present: str = ""
    """The run that the shard is at."""
    files: dict[str, str] = field(default_factory=dict)
    """New ones of the corpus, of failing runs and of conditions, by their place in the folder."""
    findings: dict[str, dict[str, str]] = field(default_factory=dict)
    """The files of new findings, by id."""
    settled: list[str] = field(default_factory=list)
    """Failing runs that are triaged now."""


def state_of(store: Store, shard: int) -> dict[str, bytes]:
    """What a shard needs to go on elsewhere: files by their place in the folder."""
    files = [
        store.folder / "campaign.json",
        store.journal(shard),
        store.passed_over(shard),
        *_json_files(store.raw),
        *store.folder.glob("corpus/*/[!.]*.json"),
        *store.findings.glob(f"[!.]*/{RECORD}"),
    ]
    return {
        str(file.relative_to(store.folder)): file.read_bytes() for file in files if file.exists()
    }


class Mirror:
    """Sees what one shard changes in a folder that is only its own."""

    def __init__(self, store: Store, shard: int, state: Mapping[str, bytes]) -> None:
        """Writes the state that the shard is to begin with."""
        self._store = store
        self._shard = shard
        for name, text in state.items():
            file = store.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        store.make()
        journal = store.journal(shard)
        self._journal_end = journal.stat().st_size if journal.exists() else 0
        self._log_end = 0
        self._raw = set(_json_files(store.raw))
        self._brought = set(self._files())
        self._findings = {file.parent.name for file in store.findings.glob(f"[!.]*/{RECORD}")}

    def changes(self) -> Changes:
        """Since this was asked last.  Raises InputError if the journal cannot be read."""
        changes, store = Changes(), self._store
        journal, log = store.journal(self._shard), store.log(self._shard)
        changes.present = store.seed_at(self._shard)
        if journal.exists():
            changes.lines, self._journal_end = read_lines_from(journal, Progress, self._journal_end)
        raw = set(_json_files(store.raw))
        changes.settled = sorted(file.name for file in self._raw - raw)
        changes.files = _texts(store.folder, raw - self._raw)
        self._raw = raw
        new = set(self._files()) - self._brought
        changes.files |= _texts(store.folder, new)
        self._brought |= new
        for folder in store.findings.glob("[!.]*"):
            if folder.name not in self._findings:
                changes.findings[folder.name] = _texts(folder, folder.iterdir())
                self._findings.add(folder.name)
        if log.exists():
            text = log.read_bytes()[self._log_end :]
            self._log_end += len(text)
            changes.log = text.decode("utf-8", errors="replace")
        return changes

    def _files(self) -> Iterable[Path]:
        """What is written once."""
        folder = self._store.folder
        return [*folder.glob("corpus/*/[!.]*.json"), *_json_files(folder / "conditions")]


def bring(changes: Changes, store: Store, shard: int, journal: Journal, ledger: Ledger) -> None:
    """Write the changes to the campaign's folder; ``journal`` is the shard's there.

    What is there already, as some other shard came first, is left as it is.  Raises OSError.
    """
    for id, files in changes.findings.items():
        _place(store.findings / id, files, ledger)
    for name, text in changes.files.items():
        file = store.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    if changes.lines:
        journal.append(changes.lines)
    for name in changes.settled:
        (store.raw / name).unlink(missing_ok=True)
    store.present(shard).write_text(changes.present, encoding="utf-8")
    note(store, shard, changes.log)


def note(store: Store, shard: int, text: str) -> None:
    """Append to the shard's log."""
    with store.log(shard).open("a", encoding="utf-8") as log:
        log.write(text)


def _place(folder: Path, files: Mapping[str, str], ledger: Ledger) -> None:
    """Write a finding as a whole; the ledger is here, and not where it was found."""
    record = msgspec.json.decode(files[RECORD], type=FindingRecord)
    record = replace(record, known=ledger.issue_of(record))
    write_folder(folder, {**files, RECORD: as_text(record)})


def _json_files(folder: Path) -> Iterable[Path]:
    return folder.glob("[!.]*.json")


def _texts(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """By their place in the folder; without those that are gone."""
    texts = {}
    for file in files:
        try:
            texts[str(file.relative_to(folder))] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
    return texts
