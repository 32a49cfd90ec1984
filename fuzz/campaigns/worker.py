"""``python -m kvproof.fuzz.campaigns.worker JOB``: the process of one shard.

It ends in order at SIGTERM, and when the process that started it is gone.  Ctrl-C is not for it:
whoever started it hears that, and tells.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from threading import Thread

import msgspec

from kvproof.fuzz.campaigns.executors import BAD_INPUT
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.invariants.errors import InputError

GRACE_SECONDS = 2.0


def main() -> int:
    """The exit code: see ``Ended``."""
    told: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    parent = os.getppid()
    job = msgspec.json.decode(sys.argv[1], type=ShardJob)
    Thread(target=_end_without, args=(parent,), daemon=True).start()
    try:
        run_job(job, stop=lambda: bool(told) or os.getppid() != parent)
    except (InputError, OSError) as error:
        with suppress(OSError):  # where the disk is full, the log is
            os.write(sys.stderr.fileno(), f"{_words(error)}\n".encode())
        return BAD_INPUT
    return 0


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _end_without(parent: int) -> None:
    """A run that is long, or a search for a shorter one, is not worth an orphan."""
    while os.getppid() == parent:
        time.sleep(GRACE_SECONDS / 4)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
