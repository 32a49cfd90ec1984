"""Replays in a process of their own: what failed once may hang now, or take its process along.

``python -m kvproof.fuzz.campaigns.guarded`` reads what to replay, a line each, and answers by a
line.  It ends when nobody asks any more.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec
from msgspec import Struct

from kvproof.fuzz.replay import installed, replay
from kvproof.fuzz.search import run_twice
from kvproof.fuzz.swarm import Draw
from kvproof.invariants.case import Case, load_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.totals import Totals

REPLAY_SECONDS = 120.0
"""A replay takes some seconds at most: whatever has not ended by then hangs."""
LOST_MAX = 3
"""Where so many replays hung or died, no more are tried: it may be all of them."""
GRACE_SECONDS = 2.0
_PROCESS = [sys.executable, "-P", "-m", "kvproof.fuzz.campaigns.guarded"]


class _Asked(Struct, frozen=True):
    case: str
    twice: bool


class Judged(Struct, frozen=True):
    """What the replay of a case came to."""

    violations: tuple[Violation, ...] = ()
    problem: str = ""
    """Why the verdict is unknown."""
    is_lost: bool = False
    """It hangs, or its process died."""
    wrong: str = ""
    """What is wrong with the input."""


class Replayer:
    """Replays one case after the other; the process is begun when there is one."""

    def __init__(self, seconds: float = REPLAY_SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = 0

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def judge(self, case: Path, *, twice: bool = False) -> Judged:
        """Replay the case in that file; ``twice``: compare two, as DETERMINISM asks.

        Raises InputError if it names a subject or a fault that there is not.
        """
        if self._lost >= LOST_MAX:
            why = f"not replayed: {self._lost} before it hung, or took their process along"
            return Judged(problem=why, is_lost=True)
        judged = self._answer(_Asked(str(case.absolute()), twice))
        if judged.wrong:
            raise InputError(judged.wrong)
        self._lost += judged.is_lost
        return judged

    def _answer(self, asked: _Asked) -> Judged:
        process = self._process = self._process or subprocess.Popen(
            _PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has died: there will be no answer
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self._seconds)[0]:
            self._end()
            return Judged(problem=f"its replay hangs: no end in {self._seconds:g} s", is_lost=True)
        answer = process.stdout.readline()
        if answer:
            return msgspec.json.decode(answer, type=Judged)
        code, self._process = process.wait(), None
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Judged(problem=f"its replay took the process along: {how}", is_lost=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def judge_here(path: Path, *, twice: bool = False) -> Judged:
    """The same in this process."""
    try:
        case = load_case(path)
        return _differs(case) if twice else _replayed(case)
    except InputError as error:
        return Judged(wrong=str(error))
    except (Exception, SystemExit) as error:  # a subject that cannot even be made
        return Judged(problem=f"{type(error).__name__}: {error}")


def _replayed(case: Case) -> Judged:
    result = replay(case)
    return Judged(tuple(result.violations), result.problem or "")


def _differs(case: Case) -> Judged:
    draw, totals = Draw(case.seed, case.configuration, case.features, case.operations), Totals()
    with installed(case.fault):
        failure = run_twice(subject_factory(case.subject), draw, totals)
    if failure is not None:
        return Judged((failure[1],))
    return Judged(problem="; ".join(totals.problems))


def end_without(parent: int) -> None:
    """End this process soon after its parent: an orphan is of use to nobody."""
    while os.getppid() == parent:
        time.sleep(GRACE_SECONDS / 4)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer until nobody asks any more.  What a subject prints is no answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=end_without, args=(os.getppid(),), daemon=True).start()
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in questions:
        asked = msgspec.json.decode(line, type=_Asked)
        judged = judge_here(Path(asked.case), twice=asked.twice)
        answers.write(msgspec.json.encode(judged) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
