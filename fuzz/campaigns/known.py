"""The ledger of known issues: findings that have an issue, and do not fail a campaign.

A JSON file that stands beside the code, with a case per entry:

    {"format": "kvproof-known-issues", "version": 1, "issues": [
      {"issue": "https://github.com/…/issues/17", "subject": "my.engine:Subject",
       "property": "REF", "kinds": ["admit", "fork"], "features": [], "case": "ref_17.json"}]}

Each case is replayed when a campaign starts.  One that passes was mended: its entry has to go,
or it would hide the next mistake of that kind.  Entries of what cannot be replayed (a run that
hangs or kills the process, a kernel) need no case, and stay until somebody removes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.campaigns.guarded import Judged, Replayer
from kvproof.fuzz.campaigns.records import UNREPLAYED, FindingRecord
from kvproof.fuzz.campaigns.store import Store, as_text, read_record, write_whole
from kvproof.fuzz.search import DETERMINISM
from kvproof.invariants.case import Case, load_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import AnyOperation, kind_of
from kvproof.stateful_tests.harness import CRASH
from kvproof.stateful_tests.subjects import is_kvproofs_own

FORMAT = "kvproof-known-issues"
VERSION = 1
ISSUE = "ISSUE"
"""Stands in a printed entry where the issue is to be put."""
_NUMBER = re.compile(r"\d")
_ALIKE = {"run": "schedule"}
"""Many iterations with nothing between break what one does."""


def owner_of(subject: str) -> str:
    """Whose mistake it would be: what kvproof's own policies have in common is broken once."""
    if not is_kvproofs_own(subject):
        return subject
    family = subject.partition(":")[0]
    return "engine" if family == "eviction" else family


def kinds_of(operations: Iterable[AnyOperation]) -> frozenset[str]:
    """Their kinds, of kinds that do the same only one: a cause has one name."""
    kinds = map(kind_of, operations)
    return frozenset(_ALIKE.get(kind, kind) for kind in kinds)


def needs_of(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Operation kinds and features of a shrunk case."""
    return tuple(sorted(kinds_of(case.operations))), tuple(sorted(case.features))


def words_of(property: str, message: str) -> str:
    """What tells one crash from another at the same operations: the exception, and how it begins.

    Empty for properties, which say what is wrong themselves.
    """
    if property != CRASH:
        return ""
    return _NUMBER.split(message[message.find(" raised ") + 1 :])[0].rstrip()


class KnownIssue(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry."""

    issue: str
    """Where it is tracked: a URL, or an id."""
    subject: str
    property: str
    kinds: tuple[str, ...]
    features: tuple[str, ...]
    case: str = ""
    """Its file, as seen from the ledger."""
    id: str = ""
    """Of the finding, where nothing else tells it from others: see ``entry_of``."""
    says: str = ""
    """What the finding's message has in it, where kinds alone would hide other mistakes."""

    def matches(self, finding: FindingRecord) -> bool:
        if not finding.kinds and self.id != finding.id:  # it was not shrunk: any may look like it
            return False
        if self.says not in finding.message:
            return False
        own = (owner_of(self.subject), self.property, sorted(self.kinds), sorted(self.features))
        return own == (
            owner_of(finding.subject),
            finding.property,
            sorted(finding.kinds),
            sorted(finding.features),
        )


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    issues: tuple[KnownIssue, ...]
    format: str
    version: int


class Ledger(Struct, frozen=True):
    """All entries, and the folder that their cases stand in."""

    issues: tuple[KnownIssue, ...] = ()
    folder: Path = Path()

    def issue_of(self, finding: FindingRecord) -> str | None:
        """The issue of a finding, if it is known."""
        return next((known.issue for known in self.issues if known.matches(finding)), None)


def read_ledger(path: Path | None) -> Ledger:
    """Raises InputError in one line with file and place."""
    if path is None:
        return Ledger()
    file = read_record(path, _File)
    if file.format != FORMAT or file.version != VERSION:
        raise InputError(
            f"{path}: {file.format!r} of version {file.version}; this kvproof reads {FORMAT!r} of "
            f"version {VERSION}"
        )
    for index, entry in enumerate(file.issues):
        wrong = _wrong_with(entry, path.parent)
        if wrong:
            raise InputError(f"{path}: at $.issues[{index}]: {wrong}")
    return Ledger(file.issues, path.parent)


def _wrong_with(entry: KnownIssue, folder: Path) -> str:
    """Why it would stand for nothing, or for what nobody has looked into; empty if it is right."""
    if entry.issue.strip() in ("", ISSUE):
        return "no issue: where is it tracked?"
    if not entry.kinds and not entry.id:
        return "no kinds: of which finding is it?"
    if entry.property in UNREPLAYED:
        return ""
    if not (folder / entry.case).is_file():
        return f"no file {entry.case}"
    case = load_case(folder / entry.case)
    own = tuple(sorted(entry.kinds)), tuple(sorted(entry.features))
    if entry.kinds and own != needs_of(case):
        needed = ", ".join(sum(needs_of(case), ())) or "nothing"
        return f"its kinds and features are not those of {entry.case}: {needed}"
    return ""


def mended(ledger: Ledger, named: Sequence[str], unjudged: list[str] | None = None) -> list[str]:
    """Of each entry whose case does not fail any more, what is to be done about it.

    ``named``: subjects that the user named, and whose code may be imported; ``unjudged`` hears of
    entries of which a replay shows nothing, as it hangs, say.  Raises InputError if an entry is of
    another subject.
    """
    passing = []
    with Replayer() as replayer:
        for entry in ledger.issues:
            if entry.property in UNREPLAYED:
                continue
            judged = _judged(entry, ledger.folder / entry.case, named, replayer)
            if _has(judged, entry.property):
                continue
            if not judged.problem:
                passing.append(
                    f"{entry.issue} is mended: its case {entry.case} does not violate "
                    f"{entry.property} any more: remove the entry"
                )
            elif unjudged is not None:
                unjudged.append(f"{entry.issue}: {entry.case}: {judged.problem}")
    return passing


def _judged(entry: KnownIssue, path: Path, named: Sequence[str], replayer: Replayer) -> Judged:
    case = load_case(path)
    if not is_kvproofs_own(case.subject) and case.subject not in named:
        raise InputError(
            f"{path}: is of subject {case.subject}, which this campaign does not drive"
        )
    return replayer.judge(path, twice=entry.property == DETERMINISM)


def _has(judged: Judged, property: str) -> bool:
    return any(violation.property == property for violation in judged.violations)


def mark_known(store: Store, ledger: Ledger) -> None:
    """Have all findings say what the ledger says now: it may have changed since they were made."""
    for finding in store.found():
        issue = ledger.issue_of(finding)
        if issue != finding.known:
            path = store.findings / finding.id / "finding.json"
            write_whole(path, as_text(replace(finding, known=issue)))


def entry_of(finding: FindingRecord) -> str:
    """A line for the ledger, to be completed with the issue."""
    entry = KnownIssue(
        ISSUE,
        finding.subject,
        finding.property,
        finding.kinds,
        finding.features,
        "CASE",
        "" if finding.kinds else finding.id,
        words_of(finding.property, finding.message),
    )
    return msgspec.json.encode(entry).decode()
