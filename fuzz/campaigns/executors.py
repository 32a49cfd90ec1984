"""Where the shards of a campaign run: an executor starts them, and tells when one has ended.

A shard needs nothing but its job and the campaign's folder.  Locally it is a process; whatever
else can run ``run_job`` somewhere may stand in for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from kvproof.fuzz.campaigns.shard import ShardJob
from kvproof.fuzz.campaigns.store import Store

WORKER = [sys.executable, "-P", "-m", "kvproof.fuzz.campaigns.worker"]
"""``-P``: the folder that the command is typed in is not searched for modules of kvproof's."""
BAD_INPUT = 2
"""Exit code of a worker that cannot go on: what is wrong is its last line."""
SPENT = 4
"""Exit code of a worker that has told all, and wants to go on in a fresh process."""


class Ended(Struct, frozen=True):
    """A shard that has ended."""

    shard: int
    code: int
    """0 if its time was up, BAD_INPUT if it cannot go on, SPENT if a fresh process has to; else it
    died: of a signal if negative."""
    message: str = ""
    """The last that it said."""


class Executor(Protocol):
    """Runs shards."""

    def start(self, job: ShardJob) -> None:
        """Start a shard that is not running."""

    def ended(self) -> list[Ended]:
        """Those that have ended since this was asked last."""

    def stop(self) -> None:
        """Ask all to end in order: after the run that they are at."""

    def kill(self, shard: int) -> None:
        """End a shard that does not answer."""


class LocalExecutor:
    """Processes of this machine.  They end by themselves when the one that started them does."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, tuple[Path, int]] = {}
        """With their lengths when the shard was started."""

    def start(self, job: ShardJob) -> None:
        log = Store(Path(job.folder)).log(job.shard)
        with log.open("ab") as output:
            self._logs[job.shard] = log, output.tell()
            self._processes[job.shard] = subprocess.Popen(
                [*WORKER, msgspec.json.encode(job).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> list[Ended]:
        codes = {shard: process.poll() for shard, process in self._processes.items()}
        ended = [
            Ended(shard, code, _last_line(*self._logs[shard]))
            for shard, code in codes.items()
            if code is not None
        ]
        for shard in ended:
            del self._processes[shard.shard]
        return ended

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()

    def kill(self, shard: int) -> None:
        if shard in self._processes:
            self._processes[shard].kill()


def _last_line(log: Path, start: int) -> str:
    """The last line from there on that is not empty."""
    lines = log.read_bytes()[start:].decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
