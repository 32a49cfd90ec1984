"""Campaigns over code that changes: what another version did is no part of the verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproof.fuzz.campaigns.conditions import read_conditions, version_at, write_conditions
from kvproof.fuzz.campaigns.executors import Ended
from kvproof.fuzz.campaigns.records import Campaign, Progress, Target
from kvproof.fuzz.campaigns.run import CampaignRun
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.fuzz.campaigns.store import Journal, Store, read_lines
from kvproof.fuzz.campaigns.versions import _place_of, code_versions, source_files
from kvproof.fuzz.report.fields import fields
from kvproof.fuzz.report.summary import summarise
from kvproof.stateful_tests.totals import Totals

_POLICY = """
from kvproof.engine.policies import POLICIES
from order_of_mine import PLAIN

class Mine(POLICIES[PLAIN]):
    pass
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A scheduler policy in a file, which imports another one beside it."""
    monkeypatch.chdir(tmp_path)
    Path("mine_sched.py").write_text(_POLICY)
    Path("order_of_mine.py").write_text("PLAIN = 'fcfs'\n")
    Path("of_others.py").write_text("raise SystemExit\n")
    yield Target("policy:mine", "scheduler:mine_sched.py:Mine")
    for name in ("kvproof_policy_mine_sched", "order_of_mine"):
        sys.modules.pop(name, None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def ran(store: Store, shard: int = 0) -> list[Progress]:
    run_job(ShardJob(str(store.folder), shard, 0.5))
    return read_lines(store.journal(shard), Progress)


def test_what_another_version_did_is_no_part_of_the_verdict(policy: Target) -> None:
    store = Store(Path("c"))
    store.begin(Campaign("s", (policy,), 1))
    first = ran(store)
    summary = summarise([store.folder])
    (before,) = summary.subjects
    assert before.runs > 0
    assert "another version" not in summary.sentence + str(summary.notes)

    Path("order_of_mine.py").write_text("PLAIN = 'fcfs'  # mended\n")
    write_conditions(store.folder, 0, code_versions([policy]))  # as a shard does at first
    summary = summarise([store.folder])
    assert summary.verdict == "unknown"
    assert "scheduler:mine_sched.py:Mine: nothing was run" in summary.reasons
    assert (summary.subjects[0].runs, summary.subjects[0].hits) == (0, {})

    lines = ran(store)
    versions = list(dict.fromkeys(line.version for line in lines))
    assert len(versions) == 2
    assert all(versions)
    done = {version: Totals() for version in versions}
    for line in lines:
        done[line.version] = done[line.version].merged(line.totals)
    summary = summarise([store.folder])
    (after,) = summary.subjects
    assert (after.runs, after.hits) == (done[versions[1]].runs, done[versions[1]].goals)
    told = f"{done[versions[0]].ops:,}"
    present = done[versions[1]]
    (target,) = summary.targets
    assert (summary.total.ops, summary.total.runs) == (present.ops, present.runs)
    assert (target.totals.ops, target.outdated) == (present.ops, done[versions[0]].ops)
    assert target.done_twice == sum(
        line.done_twice for line in lines if line.version == versions[1]
    )
    in_series = sum(point.ops_per_second for point in summary.series) * summary.series[0].at
    assert in_series == pytest.approx(present.ops)
    assert 0 < summary.seconds < lines[-1].at
    assert f"in {present.ops:,} operations" in summary.sentence
    assert f"(another {told} with another version of the code are left out)" in summary.sentence
    assert (fields(summary)["ops"], fields(summary)["outdated_ops"]) == (
        present.ops,
        done[versions[0]].ops,
    )
    assert [note for note in summary.notes if note.startswith("policy:mine: ")] == [
        f"policy:mine: {done[versions[0]].ops} operations of before, with another version of its "
        "code, are no part of the verdict"
    ]
    assert len(summary.conditions) == 1
    assert {line.version for line in first} == {versions[0]}


def test_shards_with_different_versions_leave_it_unknown(policy: Target) -> None:
    store = Store(Path("c"))
    store.begin(Campaign("s", (policy,), 2))
    ran(store, 0)
    Path("mine_sched.py").write_text(_POLICY + "# mended\n")
    ran(store, 1)
    reason = f"{policy.subject}: its code is not the same on all shards that were run"
    assert reason in summarise([store.folder]).reasons
    ran(store, 0)
    assert reason not in summarise([store.folder]).reasons


def test_a_death_is_told_of_the_version_that_died(policy: Target) -> None:
    """Or it would be no part of the verdict."""
    store, campaign = Store(Path("c")), Campaign("s", (policy,), 1)
    store.begin(campaign)
    ran(store)

    class Mortal:
        codes = iter((7, 0))

        def start(self, job: ShardJob) -> None:
            store.present(0).write_text("s/policy:mine/0")

        def ended(self) -> list[Ended]:
            return [Ended(0, next(self.codes))]

        def stop(self) -> None: ...

        def kill(self, shard: int) -> None: ...

    CampaignRun(store.folder, campaign, Mortal(), shards=[0], seconds=1.0).run()
    last = read_lines(store.journal(0), Progress)[-1]
    assert last.totals.problems
    assert last.version == version_at(store.folder, 0, policy.subject) != ""


def test_a_journal_without_versions_counts_as_before(tmp_path: Path) -> None:
    """As of kvproof's own code, and of folders that an older kvproof has made."""
    target = Target("cache", "engine", tiers_share=0.0)
    store = Store(tmp_path)
    store.begin(Campaign("s", (target,), 1))
    (line, *_) = ran(store)
    assert line.version == ""
    assert [conditions.versions for conditions in read_conditions(tmp_path)] == [()]
    journal = Journal(store.journal(0))
    journal.append([Progress("cache", 9.0, 1.0, Totals(runs=1))])
    journal.close()
    runs = [line.totals.runs for line in read_lines(store.journal(0), Progress)]
    assert summarise([tmp_path]).subjects[0].runs == sum(runs)


@pytest.mark.parametrize(
    ("subject", "place"),
    [
        ("engine", ""),
        ("kernels", ""),
        ("scheduler:fcfs", ""),
        ("vllm:scheduler:priority", ""),
        ("my.engine:Subject", "my.engine"),
        ("scheduler:a/sched.py:Mine", "a/sched.py"),
        ("eviction:my.eviction:Mine", "my.eviction"),
        ("vllm:scheduler:fcfs:my.sched:Mine", "my.sched"),
    ],
)
def test_where_the_users_code_stands(subject: str, place: str) -> None:
    assert _place_of(subject) == place


def test_a_package_counts_as_a_whole_and_a_file_with_what_it_imports(
    policy: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_versions([policy])  # imports it
    names = [file.name for file in source_files("mine_sched.py")]
    assert names == ["mine_sched.py", "order_of_mine.py"]
    package = tmp_path / "parts_of_mine" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "unseen.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in source_files("parts_of_mine.inner")] == [
        "parts_of_mine/__init__.py",
        "parts_of_mine/inner/__init__.py",
        "parts_of_mine/inner/unseen.py",
    ]


def test_what_is_installed_counts_without_what_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = tmp_path / "site-packages"
    place.mkdir()
    (place / "installed_of_mine.py").write_text("import other_of_mine\n")
    (place / "other_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(place)
    assert [file.name for file in source_files("installed_of_mine")] == ["installed_of_mine.py"]
