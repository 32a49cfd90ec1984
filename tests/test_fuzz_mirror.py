"""What a shard does elsewhere is brought home: all of it, and nothing that is only half there."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvproof.fuzz.campaigns import mirror
from kvproof.fuzz.campaigns import store as store_module
from kvproof.fuzz.campaigns.known import KnownIssue, Ledger
from kvproof.fuzz.campaigns.lots import Lot
from kvproof.fuzz.campaigns.mirror import Changes, Mirror, bring, state_of
from kvproof.fuzz.campaigns.records import Campaign, FindingRecord, Progress, Target
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Journal, Store, read_lines, write_whole
from kvproof.fuzz.campaigns.triage import write_finding
from kvproof.fuzz.cli import fuzz, main
from kvproof.invariants.case import load_case

CACHE = Target("cache", "engine", tiers_share=0.0)
FAULT = "no-copy-on-write"
"""Fails some runs; others are kept."""


def begun(folder: Path, fault: str | None = FAULT) -> Store:
    store = Store(folder)
    store.begin(Campaign("seed", (CACHE,), 1, fault))
    return store


@pytest.fixture
def home(tmp_path: Path) -> Store:
    return begun(tmp_path / "home")


def away(home: Store) -> tuple[Store, Mirror]:
    """Another machine to go on at."""
    store = Store(home.folder.with_name(f"away-{len(list(home.folder.parent.iterdir()))}"))
    return store, Mirror(store, 0, state_of(home, 0))


def work(store: Store, asked: int = 25) -> None:
    """Have the shard make runs until it has asked so often whether to stop."""
    asks = count(1)
    run_job(ShardJob(str(store.folder), 0, 60.0), lambda: next(asks) > asked)


def take(changes: Changes, home: Store, ledger: Ledger | None = None) -> None:
    journal = Journal(home.journal(0))
    try:
        bring(changes, home, 0, journal, ledger or Ledger())
    finally:
        journal.close()


def lines(store: Store) -> list[Progress]:
    return read_lines(store.journal(0), Progress) if store.journal(0).exists() else []


def drawn(store: Store) -> int:
    return sum(line.drawn for line in lines(store))


def excl_of(store: Store) -> FindingRecord:
    (finding,) = [found for found in store.found() if found.property == "EXCL"]
    return finding


def contents(store: Store) -> dict[str, bytes]:
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(store.folder)): path.read_bytes().strip() for path in files}


def unsupported(store: Store) -> list[str]:
    """What the journal counts and the folder does not have."""
    there = {finding.id for finding in store.found()}
    kept = [load_case(path) for path in store.corpus("cache").glob("[!.]*.json")]
    complaints = [id for line in lines(store) for id in line.failures if id not in there]
    if sum(line.novel for line in lines(store)) > len(kept):
        complaints.append("kept cases")
    return complaints


def test_all_is_brought_once(home: Store) -> None:
    store, there = away(home)
    work(store)
    store.log(0).write_text("a word\n")
    changes = there.changes()
    assert changes.findings
    assert any(name.startswith("corpus/") for name in changes.files)
    take(changes, home)
    assert contents(home) == contents(store)
    again = there.changes()
    assert again == Changes(present=changes.present)
    take(again, home)
    assert contents(home) == contents(store)


def test_a_shard_goes_on_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each machine it makes the runs that come after those that came home."""
    home, numbers, make_next = begun(tmp_path / "home", fault=None), [], Lot._make_next

    def noted(lot: Lot) -> None:
        numbers.append(lot._drawn)
        make_next(lot)

    monkeypatch.setattr(Lot, "_make_next", noted)
    for _ in range(3):
        store, there = away(home)
        work(store, asked=40)  # which it is before each kept run as well
        take(there.changes(), home)
    assert numbers == list(range(drawn(home)))
    assert len(numbers) > 60
    lost, _ = away(home)
    work(lost)  # does not come home: is done again
    store, _ = away(home)
    numbers.clear()
    work(store)
    assert numbers[0] == drawn(home)


def test_home_has_no_room(home: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever file it ends, the journal counts nothing that is not there."""
    store, there = away(home)
    work(store)
    changes = there.changes()
    for room in count():
        left = iter(range(room))

        def write(path: Path, text: str, left: Any = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            write_whole(path, text)

        for module in (mirror, store_module):
            monkeypatch.setattr(module, "write_whole", write)
        try:
            take(changes, home)
        except OSError:
            assert unsupported(home) == []
        else:
            break
    assert room > 5
    assert lines(home) == lines(store)
    assert unsupported(home) == []


def test_a_journal_that_came_first_is_seen(home: Store) -> None:
    """Positive control."""
    store, there = away(home)
    work(store)
    take(Changes(lines=there.changes().lines), home)
    assert "kept cases" in unsupported(home)
    assert len(set(unsupported(home))) > 1


def test_the_shard_works_on_while_it_is_read(home: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store, there = away(home)
    work(store)
    read = mirror.read_lines_from

    def slowly(*arguments: Any) -> Any:
        result = read(*arguments)
        work(store)
        return result

    monkeypatch.setattr(mirror, "read_lines_from", slowly)
    take(there.changes(), home)
    assert 0 < len(lines(home)) < len(lines(store))
    assert unsupported(home) == []


def test_a_failing_run_goes_when_its_finding_is_there(
    home: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = away(home)
    work(store)
    finding = excl_of(store)
    case = load_case(store.findings / finding.id / "case.json")
    first, second = away(home)
    raw = first.keep_raw(case)
    take(second.changes(), home)
    assert [path.name for path, _ in home.raw_cases()] == [raw.name]
    assert home.found() == []
    listed = mirror._json_files

    def triaged_meanwhile(folder: Path) -> Sequence[Path]:
        files = list(listed(folder))
        if folder == first.raw and raw.exists():
            (store.findings / finding.id).rename(first.findings / finding.id)
            raw.unlink()
        return files

    monkeypatch.setattr(mirror, "_json_files", triaged_meanwhile)
    take(second.changes(), home)
    assert [found.id for found in home.found()] == [finding.id]
    take(second.changes(), home)
    assert list(home.raw_cases()) == []


def test_a_shard_triages_what_was_left_at_home(home: Store) -> None:
    store, there = away(home)
    work(store)
    finding = excl_of(store)
    home.keep_raw(load_case(store.findings / finding.id / "case.json"))
    store, there = away(home)
    work(store, 1)
    take(there.changes(), home)
    assert list(home.raw_cases()) == []
    assert excl_of(home).id == finding.id


def test_a_finding_that_was_emptied_comes_again_and_one_that_is_there_stays(home: Store) -> None:
    """As where it was found; it is written as a whole or not at all."""
    store, there = away(home)
    work(store)
    changes = there.changes()
    id = excl_of(store).id
    for folder in (home.findings / id, store.findings / id):
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
    take(changes, home)
    (home.findings / id / "log.txt").write_text("mine")
    take(changes, home)
    assert (home.findings / id / "log.txt").read_text() == "mine"
    finding = excl_of(home)
    write_finding(store, finding, load_case(home.findings / id / "case.json"))
    names = [sorted(path.name for path in own.findings.iterdir()) for own in (home, store)]
    assert names[0] == names[1]  # nothing else is left
    assert excl_of(store) == finding


def test_the_ledger_stays_at_home(home: Store) -> None:
    store, there = away(home)
    work(store)
    finding = excl_of(store)
    entry = KnownIssue(
        "ISSUE-1", finding.subject, finding.property, finding.kinds, finding.features, ""
    )
    take(there.changes(), home, Ledger((entry,)))
    assert (finding.known, excl_of(home).known) == (None, "ISSUE-1")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ray", "auto"], "--ray: Ray is not installed: pip install 'kvproof[ray]'"),
        (["--ray", "auto", "--shard", "0/2"], "leave out --ray"),
    ],
)
def test_no_ray(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(fuzz, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["kvproof", "fuzz", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()
