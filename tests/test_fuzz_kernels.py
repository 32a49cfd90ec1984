"""Campaigns over the kernels: what a run is, and what a failing one leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvproof.fuzz.campaigns import kernel_lot, targets
from kvproof.fuzz.campaigns.executors import LocalExecutor
from kvproof.fuzz.campaigns.kernel_lot import KernelLot
from kvproof.fuzz.campaigns.known import Ledger
from kvproof.fuzz.campaigns.lots import Site
from kvproof.fuzz.campaigns.records import DIED, KERNEL, Campaign, PassedOver, Target
from kvproof.fuzz.campaigns.run import CampaignRun
from kvproof.fuzz.campaigns.store import Store, read_lines
from kvproof.fuzz.campaigns.targets import chosen_targets
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.invariants.errors import InputError

KERNELS = Target("kernels", "kernels")
CAMPAIGN = Campaign("seed", (KERNELS,), 1)


def lot_in(folder: Path) -> KernelLot:
    store = Store(folder)
    store.begin(CAMPAIGN)
    triage = Triage(store, Ledger(), 0)
    site = Site(store, CAMPAIGN, 0, triage, frozenset(), lambda: 1.0, lambda seed: None)
    return KernelLot(site, KERNELS, ())


@pytest.mark.kernels
@pytest.mark.skipif(not targets.has_kernels(), reason="torch or triton is not installed")
def test_runs_are_checks_on_problems_drawn_from_their_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_lot, "EXAMPLES", 1)
    done = []
    for folder in ("a", "b"):
        lot = lot_in(tmp_path / folder)
        progress = lot.work(end=0.0, stop=lambda: True)
        for number in (1, 2):
            lot.make(f"seed/kernels/{number}")
        assert not progress.totals.problems
        done.append(progress.totals.checked)
    assert done[0] == done[1]
    assert sum(done[0].values()) == progress.totals.runs == 3
    assert not Store(tmp_path / "a").found()


@pytest.mark.kernels
@pytest.mark.skipif(not targets.has_kernels(), reason="torch or triton is not installed")
def test_a_kernel_that_fails_is_told_once_with_a_test_that_draws_it_again(tmp_path: Path) -> None:
    lot = lot_in(tmp_path)
    lot.work(end=0.0, stop=lambda: True)
    plans = []

    def fails(plan: object) -> str:
        plans.append(plan)
        raise AssertionError("row 3 is wrong\nby a lot")

    lot._checks = [SimpleNamespace(name="copy", claim="Blocks are copied.", run=fails)]
    lot.progress.failures.clear()
    for number in range(3):
        lot.make(f"seed/kernels/{number}")
    (finding,) = Store(tmp_path).found()
    assert (finding.property, finding.kinds) == (KERNEL, ("copy",))
    assert finding.message == "copy: row 3 is wrong"
    assert lot.progress.failures == {finding.id: 3}
    assert [plan.shrink for plan in plans] == [True, False, False]
    assert len({plan.seed for plan in plans}) == 3
    folder = Store(tmp_path).findings / finding.id
    assert {path.name for path in folder.iterdir()} == {
        *("finding.json", "log.txt", f"test_{finding.id}.py")
    }
    source = (folder / f"test_{finding.id}.py").read_text()
    assert f"check.run(Plan({plans[0].device!r}, {plans[0].examples}, {plans[0].seed}))" in source
    compile(source, "test", "exec")


def test_where_they_cannot_run_they_are_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for installed in (True, False):
        monkeypatch.setattr(targets, "has_kernels", lambda installed=installed: installed)
        assert (KERNELS in chosen_targets()) is installed
    with pytest.raises(InputError, match="torch and triton are not installed"):
        chosen_targets(["kernels"])


def test_a_run_of_theirs_that_kills_its_process_is_a_finding_without_a_case(
    tmp_path: Path,
) -> None:
    """A device that faults takes the process along."""
    store = Store(tmp_path)
    store.begin(CAMPAIGN)
    run = CampaignRun(tmp_path, CAMPAIGN, LocalExecutor(), shards=[0], seconds=1.0)
    run._pass_over(0, "seed/kernels/7", DIED, "the process died in this run, 3 times: signal 6")
    (finding,) = store.found()
    assert (finding.property, finding.seed) == (DIED, "seed/kernels/7")
    assert sorted(path.name for path in (store.findings / finding.id).iterdir()) == [
        *("finding.json", "log.txt")
    ]
    assert [line.seed for line in read_lines(store.passed_over(0), PassedOver)] == [finding.seed]
