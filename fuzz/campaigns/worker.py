"""``python -m kvproof.fuzz.campaigns.worker JOB``: the process of one shard.

It ends in order at SIGTERM, and when the process that started it is gone.  Ctrl-C is not for it:
whoever started it hears that, and tells.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from threading import Thread

import msgspec

from kvproof.fuzz.campaigns.executors import BAD_INPUT, SPENT
from kvproof.fuzz.campaigns.guarded import end_without
from kvproof.fuzz.campaigns.shard import ShardJob, run_job
from kvproof.invariants.errors import InputError


def main() -> int:
    """The exit code: see ``Ended``."""
    told: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    parent = os.getppid()
    job = msgspec.json.decode(sys.argv[1], type=ShardJob)
    Thread(target=end_without, args=(parent,), daemon=True).start()
    try:
        is_spent = run_job(job, stop=lambda: bool(told) or os.getppid() != parent)
    except (InputError, OSError) as error:
        with suppress(OSError):  # where the disk is full, the log is
            os.write(sys.stderr.fileno(), f"{_words(error)}\n".encode())
        return BAD_INPUT
    if is_spent:
        os._exit(SPENT)  # at once: libraries that tidy up behind a dead device may die of it
    return 0


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
