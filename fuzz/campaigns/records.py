"""What a campaign writes to its folder; the layout is in docs/campaigns.md.

Everything is JSON that is appended to or written once: a process that is killed loses the line
that it was writing, and no more.  Campaigns of machines that cannot see each other are merged by
reading several folders (``kvproof report DIR DIR``).
"""

from __future__ import annotations

from msgspec import Struct, field

from kvproof.stateful_tests.totals import Totals

FORMAT = "kvproof-campaign"
VERSION = 1
"""Raised whenever an old folder would mean something else, or nothing."""


HANG = "HANG"
"""The property that a run breaks by never ending …"""
DIED = "DIED"
"""… by taking the whole process with it …"""
KERNEL = "KERNEL"
"""… and a kernel by not passing one of its checks."""
UNREPLAYED = frozenset((HANG, DIED, KERNEL))
"""Findings of these have no case that could be replayed here."""


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing among which a campaign shares its time."""

    name: str
    """``cache``, ``tiers``, ``policy:NAME``, ``eviction:NAME``, ``kernels``, ``subject:NAME``."""
    subject: str
    """As ``--subject`` takes it; ``kernels`` for the kernels, which are no subject."""
    share: float = 1.0
    """Part of the time, in proportion to those of the others."""
    tiers_share: float | None = None
    """Part of the runs that have tiers below the device; None as it usually is."""


class Campaign(Struct, frozen=True, forbid_unknown_fields=True):
    """``campaign.json``: what is run.  The same campaign again goes on where it stopped."""

    seed: str
    targets: tuple[Target, ...]
    shards: int
    """Run number ``i`` of a target belongs to shard ``i`` modulo this."""
    fault: str | None = None
    """A seeded fault to be planted: to see a campaign find something."""
    format: str = FORMAT
    version: int = VERSION


class Progress(Struct, forbid_unknown_fields=True):
    """A line of a shard's journal: what was done on one target since the line before.

    Sums over lines, shards and folders are the totals of a campaign.
    """

    target: str
    at: float
    """Seconds that the shard has been running, over all its processes, at the end of this."""
    cpu_seconds: float
    totals: Totals
    drawn: int = 0
    """Run numbers that were used up, those that were passed over included."""
    transitions: dict[str, int] = field(default_factory=dict)
    """How often each (operation, abstract state before, state after, outcome) came about."""
    novel: int = 0
    """Runs that showed something new to their shard, and were kept in the corpus."""
    done_twice: int = 0
    replayed: int = 0
    """Kept runs that were run again, beside those that the totals count."""
    failures: dict[str, int] = field(default_factory=dict)
    """Failing runs by the id of the finding that they show, as far as one can tell."""
    version: str = ""
    """Digest of the user's code with which all that was done; empty for kvproof's own."""


class FindingRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """``findings/ID/finding.json``, beside ``case.json``, ``test_ID.py`` and ``log.txt``.

    The kernels, and runs that never ended, leave no case that could be replayed: only
    ``finding.json`` and ``log.txt``.
    """

    id: str
    """Of its key: failing runs with one key are one finding."""
    target: str
    subject: str
    property: str
    kinds: tuple[str, ...]
    """Operation kinds of the shrunk case, sorted, each once."""
    features: tuple[str, ...]
    """Swarm features that the shrunk case still needs."""
    message: str
    explanation: str
    operations: int
    """Length of the shrunk case."""
    found_operations: int
    seed: str
    """Of the run."""
    shard: int
    at: float
    """Seconds that the shard had been running."""
    known: str | None = None
    """The issue, where the ledger of known issues has one."""


class Stale(Struct, frozen=True, forbid_unknown_fields=True):
    """``stale.json``: what the latest call found wrong with what was known before."""

    entries: tuple[str, ...]
    """Of each entry whose case does not fail any more, what is to be done about it."""
    unjudged: tuple[str, ...] = ()
    """Entries and findings of which a replay shows nothing now: it hangs, say."""


class PassedOver(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of ``passed/NNNN.jsonl``: a run that its shard does not try again."""

    seed: str
    why: str


class FileCoverage(Struct, frozen=True, forbid_unknown_fields=True):
    """A source file, by what of it was run."""

    file: str
    statements: int
    covered_statements: int
    branches: int
    covered_branches: int


class CodeCoverage(Struct, frozen=True, forbid_unknown_fields=True):
    """``coverage.json``: the code under test, as far as it was imported."""

    cases: int
    """Of the corpus, which was replayed."""
    files: tuple[FileCoverage, ...]
