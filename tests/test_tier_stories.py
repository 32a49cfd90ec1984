"""How a finding about tiers is told: the life of a transfer, the log, and what a replay prints."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace

from kvproof.engine.pool import BlockPool
from kvproof.fuzz.cli.replay import replay as replay_command
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import DETERMINISM
from kvproof.invariants.case import Case, save_case
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Cancel,
    Complete,
    Corrupt,
    Fail,
    Land,
    Launch,
    Notify,
    Offload,
    Preempt,
    Restart,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.export import log_text
from kvproof.stateful_tests.subjects.engine import EngineSubject

WORLD = Configuration(blocks=8, host_blocks=3, disk_blocks=3, offload="both")
READY: list[AnyOperation] = [Admit((Segment(0, 6),)), Launch(), Retire()]
STORING = [*READY, Offload()]
LOADING = [*READY, Preempt(0, swap=True), Resume(0, late=True)]
SAVED = [*STORING, Complete(), Offload("disk"), Complete()]


def life(run: list[AnyOperation], transfer: int, fault: str | None = None) -> str:
    """What is told of a transfer."""
    moments = replay(Case("engine", WORLD, run, fault=fault), record=True).moments
    return explain(Violation("XFER", "…", transfer=transfer), moments, 4).partition("\n")[2]


def test_the_story_of_a_transfer_is_its_life() -> None:
    assert life([*STORING, Land(), Fail(0, "timeout")], 0) == (
        "Transfer 0: started, store of device blocks [1] to host blocks [0] at op 3 (offload); "
        "1 block had arrived at op 4 (land); "
        "ended, failed (timeout) at op 5 (fail)."
    )
    assert life([*STORING, Cancel(), Complete()], 0).endswith(
        "cancelled at op 4 (cancel); ended, cancelled at op 5 (complete)."
    )
    assert life([*STORING, Complete()], 7) == ""


def test_the_story_of_a_transfer_says_whose_blocks_it_moves_and_what_became_of_them() -> None:
    assert life([*LOADING, Abort(0), Complete()], 1) == (
        "Transfer 1: started, swap_in of host blocks [0, 1] of r0 to device blocks [2, 3] at op 4 "
        "(resume); "
        "r0 gave up host blocks [0, 1] at op 5 (abort); "
        "r0, whose blocks it moves, was aborted at op 5 (abort); "
        "ended, cancelled at op 6 (complete)."
    )


def told(run: list[AnyOperation], fault: str) -> str:
    """The stories of all that the fault is seen to violate."""
    done = replay(Case("engine", WORLD, run, fault=fault), record=True)
    return "\n".join(explain(violation, done.moments, 4) for violation in done.violations)


@pytest.mark.parametrize(
    ("fault", "run", "words"),
    [
        ("partly-landed-counts-as-whole", [*STORING, Land(), Fail()], ["Transfer 0: started, sto"]),
        ("cancelled-copy-is-found", [*STORING, Cancel(), Complete()], ["XFER", "Transfer 0: sta"]),
        ("host-count-drifts-on-failure", [*STORING, Fail()], ["CONS", "Transfer 0: started, stor"]),
        ("last-pin-frees-nothing", [*STORING, Fail()], ["CONS", "Transfer 0: started, stor"]),
        (
            "swap-in-reverses-the-blocks",
            [*LOADING, Complete()],
            ["XFER", "Block 2: ", "Transfer 1: started, swap_in of host blocks [0, 1] of r0"],
        ),
    ],
)
def test_a_finding_about_transfers_has_a_story(
    fault: str, run: list[AnyOperation], words: list[str]
) -> None:
    story = told(run, fault)
    for word in words:
        assert word in story


# -- the log ---------------------------------------------------------------------------------------


def log(run: list[AnyOperation]) -> list[str]:
    case = Case("engine", WORLD, run)
    return log_text(case, "", replay(case, record=True).moments).splitlines()


def test_the_log_names_the_transfers_that_an_operation_was_about() -> None:
    lines = log([*STORING, Complete(), Notify()])
    assert lines[-1].split() == ["5", "Notify()", "done", "t0"]
    assert "transfer=k in an operation is a place: the k-th of those it may be about" in str(lines)
    assert "transfer=k" not in str(log(READY))


def test_the_log_names_what_a_restart_has_lost() -> None:
    lines = log([*SAVED, Corrupt(file="index"), Restart()])
    assert lines[-1].endswith("found nothing, lost d0 (damaged entries)")


# -- the command -----------------------------------------------------------------------------------


def printed(case: Case, folder: Path, capsys: Any, **options: Any) -> tuple[int, str]:
    """Exit code and output of ``kvproof replay``."""
    file = folder / "case.json"
    save_case(case, file)
    with pytest.raises(typer.Exit) as left:
        replay_command(file, **options)
    return left.value.exit_code, capsys.readouterr().out


def test_a_replay_shows_keys_by_their_first_digits(tmp_path: Path, capsys: Any) -> None:
    case = Case("engine", WORLD, SAVED)
    code, text = printed(case, tmp_path, capsys, log=True)
    subject = EngineSubject(WORLD)
    for operation in SAVED:
        subject.apply(operation)
    (key,) = subject.view().tier_index("disk", 0)
    assert code == 0
    assert f"{key.hex()[:12]}…" in text.replace("\n", "")
    assert "b'" not in text
    assert "→ done transfer 1" in text


def test_a_replay_says_what_was_violated_once(tmp_path: Path, capsys: Any) -> None:
    case = Case("engine", WORLD, [*STORING, Fail()], fault="host-count-drifts-on-failure")
    code, text = printed(case, tmp_path, capsys)
    assert code == 1
    assert text.count("CONS at operation 4") == 1


def test_a_case_that_was_not_deterministic_is_done_twice(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("engine", WORLD, READY, violates=DETERMINISM)
    assert printed(case, tmp_path, capsys)[0] == 0
    make, turned = BlockPool.__init__, cycle((False, True))

    def make_now_and_then(self: BlockPool, *arguments: Any) -> None:
        make(self, *arguments)
        if next(turned):
            self._empty.reverse()

    monkeypatch.setattr(BlockPool, "__init__", make_now_and_then)
    assert printed(replace(case, violates=None), tmp_path, capsys)[0] == 0
    code, text = printed(case, tmp_path, capsys)
    assert code == 1
    assert "DETERMINISM at operation 0: the case, done in two fresh subjects, gave" in text
