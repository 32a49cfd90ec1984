"""Campaigns over the kernels: what a run is, and what a failing one leaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from hypothesis.errors import FlakyFailure, Unsatisfiable

from kvproof.fuzz.campaigns import kernel_lot, targets
from kvproof.fuzz.campaigns.executors import SPENT, Ended, LocalExecutor
from kvproof.fuzz.campaigns.kernel_lot import KernelLot
from kvproof.fuzz.campaigns.known import Ledger
from kvproof.fuzz.campaigns.lots import Site
from kvproof.fuzz.campaigns.records import DIED, KERNEL, Campaign, PassedOver, Target
from kvproof.fuzz.campaigns.run import CampaignRun
from kvproof.fuzz.campaigns.shard import ShardJob
from kvproof.fuzz.campaigns.store import Store, read_lines
from kvproof.fuzz.campaigns.targets import chosen_targets
from kvproof.fuzz.campaigns.triage import Triage
from kvproof.fuzz.report.summary import summarise
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
    assert [plan.shrink for plan in plans] == [False, True, False, False]
    assert len({plan.seed for plan in plans}) == 3
    folder = Store(tmp_path).findings / finding.id
    assert {path.name for path in folder.iterdir()} == {
        *("finding.json", "log.txt", f"test_{finding.id}.py")
    }
    source = (folder / f"test_{finding.id}.py").read_text()
    assert f"check.run(Plan({plans[0].device!r}, {plans[0].examples}, {plans[0].seed}))" in source
    compile(source, "test", "exec")


class Plan(NamedTuple):
    """As the checks of the kernels have it."""

    device: str
    examples: int
    seed: int
    shrink: bool = True


Fails = Callable[[Plan], str]


def lot_that(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails) -> KernelLot:
    """A lot of one check, without PyTorch."""
    check = SimpleNamespace(name="copy-pages", claim="Blocks are copied.", run=fails)
    modules = {
        "torch": SimpleNamespace(
            cuda=SimpleNamespace(is_available=lambda: True),
            set_num_threads=lambda threads: None,
            zeros=lambda size, device: None,
        ),
        "kvproof.kernels.checks": SimpleNamespace(all_checks=lambda: [check], Plan=Plan),
    }
    monkeypatch.setattr(kernel_lot, "import_module", modules.__getitem__)
    return lot_in(folder)


def raising(*errors: Exception | None) -> tuple[Fails, list[Plan]]:
    """A check that raises these in turn, the last for ever, and what it was asked."""
    plans: list[Plan] = []

    def fails(plan: Plan) -> str:
        error = errors[min(len(plans), len(errors) - 1)]
        plans.append(plan)
        if error is not None:
            raise error
        return "fine"

    return fails, plans


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DEVICE = RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")
FLAKY = FlakyFailure("unreliable", [AssertionError("row 3 is wrong")])


@pytest.mark.parametrize(
    ("error", "kinds", "words"),
    [
        (IndexError("7 of 4"), ("raises IndexError",), "copy-pages: it raises IndexError: 7 of 4"),
        (
            FLAKY,
            ("by chance",),
            "copy-pages: it fails by chance, and not again on",
        ),
        (DEVICE, ("raises RuntimeError",), "copy-pages: it raises RuntimeError: CUDA error: an il"),
        (AssertionError("row 3 is wrong"), (), "copy-pages: row 3 is wrong"),
    ],
)
def test_a_check_that_raises_is_a_finding_that_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kinds: tuple[str, ...],
    words: str,
) -> None:
    fails, _ = raising(error)
    lot = lot_that(tmp_path, monkeypatch, fails)
    progress = lot.work(end=0.0, stop=lambda: True)
    (finding,) = Store(tmp_path).found()
    assert (finding.property, finding.kinds) == (KERNEL, ("copy-pages", *kinds))
    assert finding.message.startswith(words)
    assert (progress.failures, progress.totals.problems) == ({finding.id: 1}, [])
    source = Store(tmp_path).findings / finding.id / f"test_{finding.id}.py"
    compile(source.read_text(), "test", "exec")
    assert ("shrink=False" in source.read_text()) is (error is DEVICE)
    assert lot.is_spent is (error is DEVICE)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        RuntimeError("Cannot find ptxas"),
        FileNotFoundError("gcc"),
        subprocess.CalledProcessError(1, ["gcc"]),
        caused(RuntimeError("MemoryError()"), MemoryError()),
        Unsatisfiable("nothing to draw"),
    ],
)
def test_what_the_machine_lacks_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fails, plans = raising(error)
    lot = lot_that(tmp_path, monkeypatch, fails)
    progress = lot.work(end=0.0, stop=lambda: True)
    assert not Store(tmp_path).found()
    (problem,) = progress.totals.problems
    assert problem.startswith(f"run seed/kernels/0: copy-pages: {type(error).__name__}: ")
    assert not lot.is_spent
    assert len(plans) == 1


def test_what_shrinking_runs_into_does_not_hide_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out on the way, another error, or nothing any more."""
    for number, (other, told) in enumerate(
        ((MemoryError(), 1), (None, 1), (ValueError("odd"), 2), (DEVICE, 2))
    ):
        fails, plans = raising(IndexError("7 of 4"), other)
        folder = tmp_path / str(number)
        lot = lot_that(folder, monkeypatch, fails)
        lot.work(end=0.0, stop=lambda: True)
        assert [plan.shrink for plan in plans] == [False, True]
        messages = [finding.message for finding in Store(folder).found()]
        assert len(messages) == told
        assert any("it raises IndexError: 7 of 4" in message for message in messages)


def test_after_an_error_of_the_device_a_fresh_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is counted, and done once: nobody calls it a death."""
    fails, plans = raising(DEVICE, None)
    lot = lot_that(tmp_path, monkeypatch, fails)
    progress = lot.work(end=float("inf"), stop=lambda: False)
    assert [plan.shrink for plan in plans] == [False]  # all problems would seem to fail
    assert (progress.drawn, progress.totals.runs) == (1, 1)

    class Spent:
        started, codes = 0, [SPENT, SPENT, 0]

        def start(self, job: ShardJob) -> None:
            self.started += 1

        def ended(self) -> list[Ended]:
            return [Ended(0, self.codes[self.started - 1])]

        def stop(self) -> None: ...

        def kill(self, shard: int) -> None: ...

    executor = Spent()
    CampaignRun(tmp_path, CAMPAIGN, executor, shards=[0], seconds=9.0).run()
    assert executor.started == 3
    assert not any("died" in reason for reason in summarise([tmp_path]).reasons)


_SPENT = """
import sys
from kvproof.fuzz.campaigns import worker
worker.run_job = lambda job, stop: True
sys.exit(worker.main())
"""


def test_a_worker_that_is_spent_says_so_by_its_exit_code() -> None:
    job = msgspec.json.encode(ShardJob("nowhere", 0, 1.0)).decode()
    command = [sys.executable, "-c", _SPENT, job]
    assert subprocess.run(command, check=False, timeout=60).returncode == SPENT


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
