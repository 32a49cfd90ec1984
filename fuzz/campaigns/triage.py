"""From failing runs to findings: each cause is shrunk, told and written once.

A failing run is written as it was found before anything else is done about it, so that it is not
lost when the process is.  Shrinking takes a second, and a mistake may fail a hundred runs a
second: failing runs that look alike (the same property, at the same kind of operation, in nearly
the same words) are shrunk at their 1st, 2nd, 4th, 8th, … time, since two causes may look alike,
and only counted otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.campaigns.known import Ledger, needs_of, owner_of, words_of
from kvproof.fuzz.campaigns.records import UNREPLAYED, FindingRecord
from kvproof.fuzz.campaigns.store import Store, as_text, digest, write_folder
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import DETERMINISM, Found
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.case import Case, dump_case
from kvproof.invariants.operations import kind_of
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.export import log_text, pytest_source

Look = tuple[str, str, str, str]
"""What failing runs have in common that look alike: owner, property, last operation, words."""
_NUMBERS = re.compile(r"\d+")


def look_of(found: Found) -> Look:
    """Cheap, and the same for most failing runs with one cause."""
    operations = found.case.operations
    last = kind_of(operations[-1]) if operations else ""
    words = _NUMBERS.sub("#", found.violation.message)[:120]
    return owner_of(found.case.subject), found.violation.property, last, words


def finding_id(
    case: Case, violation: Violation, kinds: Iterable[str], features: Iterable[str]
) -> str:
    """The same for failing runs of one cause: property, operation kinds and features needed; and
    for a crash, what was raised."""
    property, words = violation.property, words_of(violation.property, violation.message)
    told = (owner_of(case.subject), property, sorted(kinds), sorted(features))
    key = repr((*told, words) if words else told)
    return f"{property.lower()}_{digest(key)[:8]}"


class Triage:
    """Makes findings of the failing runs of one shard."""

    def __init__(self, store: Store, ledger: Ledger, shard: int) -> None:
        self._store = store
        self.ledger = ledger
        self._shard = shard
        self._times: Counter[Look] = Counter()
        self._ids: dict[Look, FindingRecord] = {}
        """What the failing runs of this look showed last."""

    def report(self, target: str, found: Found, at: float) -> FindingRecord:
        """The finding that the failing run shows, as far as one can tell; written if it is new."""
        look = look_of(found)
        self._times[look] += 1
        times = self._times[look]
        if times & (times - 1):
            return self._ids[look]
        raw = self._store.keep_raw(found.case)
        finding = self._ids[look] = self.settle(target, found, at)
        raw.unlink(missing_ok=True)
        return finding

    def settle(self, target: str, found: Found, at: float, replays: bool = True) -> FindingRecord:
        """Shrink, tell and write one failing run; without ``replays`` as it was found."""
        told = _small(found) if replays else _as_found(found)
        case, violation = told.case, told.violation
        kinds, features = needs_of(case) if told.is_shrunk else ((), ())
        finding = FindingRecord(
            finding_id(case, violation, kinds or _place_of(case, violation), features),
            target,
            case.subject,
            violation.property,
            kinds,
            features,
            violation.message,
            told.explanation,
            len(case.operations),
            len(found.case.operations),
            found.case.seed,
            self._shard,
            round(at, 3),
        )
        finding = replace(finding, known=self.ledger.issue_of(finding))
        replayable = case if case.subject != KERNELS else None
        write_finding(self._store, finding, replayable, told.moments)
        return finding


def _place_of(case: Case, violation: Violation) -> tuple[str, ...]:
    """What tells apart runs that never came to an end, of which nobody knows what they need.

    A subject that is not deterministic shows it anywhere: that is one finding.
    """
    return (case.seed,) if violation.property in UNREPLAYED else ()


class Told(Struct, frozen=True):
    """A case, what it violates, and how that came about."""

    case: Case
    violation: Violation
    explanation: str
    moments: Sequence[Moment] = ()
    is_shrunk: bool = False


def _as_found(found: Found, moments: Sequence[Moment] = ()) -> Told:
    violation = found.violation
    return Told(found.case, violation, f"{violation.property}: {violation.message}", moments)


def _small(found: Found) -> Told:
    """Shrunk; what does not fail again is told as it was found."""
    if found.violation.property == DETERMINISM:
        return _as_found(found, replay(found.case, record=True).moments)
    shrunk = shrink(found.case)
    case = shrunk.case if shrunk else found.case
    result = replay(case, record=True)
    if not result.violations:
        again = "in a replay it does not happen again: the subject is not deterministic"
        message = f"{found.violation.message}; {again}"
        return _as_found(Found(found.case, replace(found.violation, message=message)))
    violation = shrunk.violation if shrunk else primary(result.violations)
    explanation = explain(violation, result.moments, case.configuration.block_size)
    return Told(case, violation, explanation, result.moments, is_shrunk=True)


def write_finding(
    store: Store,
    finding: FindingRecord,
    case: Case | None,
    moments: Sequence[Moment] = (),
    source: str = "",
) -> None:
    """Write its folder, as a whole; nothing if it is there already, by whichever shard.

    Without a ``case``, ``source`` is the pytest file.
    """
    folder = store.findings / finding.id
    if (folder / "finding.json").exists():
        return
    files = {"finding.json": as_text(finding)}
    if case is not None:
        case = replace(case, violates=finding.property)
        files["case.json"] = dump_case(case)
        files[f"test_{finding.id}.py"] = pytest_source(case, finding.explanation, name=finding.id)
        files["log.txt"] = log_text(case, finding.explanation, moments, violated=finding.property)
    else:
        files["log.txt"] = finding.explanation + "\n"
        if source:
            files[f"test_{finding.id}.py"] = source
    write_folder(folder, files)
