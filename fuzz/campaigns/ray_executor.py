"""A campaign on a Ray cluster (``kvproof fuzz --ray``): its shards are processes of its nodes.

The nodes need not share a file system.  A shard works in a temporary folder of its node, which
begins as the campaign's folder is; an actor beside it tells every second what has changed there,
and that is written to the campaign's folder here.  Whatever happens to a node, no more is lost
than what it did in the last second or so.  Its shards are started again from the state that is
here: on other nodes, or, where none is free, as soon as one is.

Actors, and not tasks, since a shard is also told to stop.  Ray never restarts them.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
from msgspec import Struct
from msgspec.structs import replace
from ray.exceptions import RayError, RayTaskError

from kvproof.fuzz.campaigns.executors import BAD_INPUT, Ended, LocalExecutor
from kvproof.fuzz.campaigns.known import Ledger, read_ledger
from kvproof.fuzz.campaigns.mirror import Changes, Mirror, bring, note, state_of
from kvproof.fuzz.campaigns.shard import ShardJob
from kvproof.fuzz.campaigns.store import Journal, Store
from kvproof.invariants.errors import InputError

PERIOD_SECONDS = 1.0
"""How often a node tells what has changed."""
ANSWER_SECONDS = 3.0
"""An address that does not answer within these is nobody's."""
LATE_SECONDS = 10.0
"""A shard that was started late has so long beyond the time of the campaign."""
PARTS = ("invariants", "kernels", "engine", "stateful_tests", "fuzz")
"""The packages of kvproof."""


class Cluster(Struct, frozen=True):
    """What there is to work with."""

    unit: str
    """``num_gpus`` or ``num_cpus``: what a worker takes one of …"""
    workers: int
    """… and how many there are."""

    def executor(self, shards: int) -> RayExecutor:
        """Runs so many shards at once; if there are fewer units, several share one."""
        return RayExecutor({"num_cpus": 0.0, self.unit: part_of_a_unit(shards, self.workers)})

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Leave the cluster in the end.

        Ray tells of nodes that die on standard output, at great length, and would do so among
        what kvproof prints there.
        """
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            try:
                yield
            finally:
                ray.shutdown()


def part_of_a_unit(shards: int, workers: int) -> float:
    """What each shard takes, so that all find room; Ray counts in ten-thousandths."""
    sharing = -(-shards // workers)
    return 10_000 // sharing / 10_000


def connect(address: str, *, uses_gpus: bool) -> Cluster:
    """Join the cluster at ``HOST:PORT``, or, for ``auto``, the one of this machine.

    Raises InputError if there is none, or none that could be worked with.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address != "auto":
        _ask(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            error = ConnectionError("no cluster runs on this machine: `ray start` makes one")
        raise InputError(f"--ray {address}: {_first_line(error)}") from None
    cluster = what_there_is(uses_gpus)
    if not cluster.workers:
        raise InputError(f"--ray {address}: the cluster has no CPUs")
    return cluster


def what_there_is(uses_gpus: bool) -> Cluster:
    """GPUs, if they are of use and the cluster has any; else its CPUs."""
    units = ray.cluster_resources()
    gpus, cpus = (int(units.get(name, 0)) for name in ("GPU", "CPU"))
    return Cluster("num_gpus", gpus) if uses_gpus and gpus else Cluster("num_cpus", cpus)


def _ask(address: str) -> None:
    """Ray itself takes minutes to find that nobody is there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise InputError(
            f"--ray {address}: say auto, or HOST:PORT as `ray start --head` tells it, on a machine "
            "that has joined that cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray {address}: no answer: {_first_line(error)}") from None


class NodeShard:
    """Beside a shard, on its node: an actor."""

    def begin(self, sources: str, job: ShardJob, state: Mapping[str, bytes], beside: str) -> None:
        """Start it.  Raises InputError if what it would run is not what ``sources`` says."""
        self._node = platform.node()
        if sources != digest_of_sources():
            raise InputError(
                f"{self._node}: its kvproof is not the one that the campaign runs: install one on "
                "all nodes"
            )
        if Path(beside).is_dir():  # of policies that stand where the command was given
            os.chdir(beside)
        self._out = job.folder
        self._folder = mkdtemp(prefix="kvproof-shard-")
        self._mirror = Mirror(Store(Path(self._folder)), job.shard, state)
        self._executor = LocalExecutor()
        self._executor.start(replace(job, folder=self._folder))

    def changes(self) -> tuple[Changes, Ended | None]:
        """What it did in the next second; and that it has ended, if it has."""
        until = time.monotonic() + PERIOD_SECONDS
        while not (ended := self._executor.ended()) and time.monotonic() < until:
            time.sleep(PERIOD_SECONDS / 20)
        changes = self._mirror.changes()
        if not ended:
            return changes, None
        shutil.rmtree(self._folder, ignore_errors=True)
        message = ended[0].message.replace(self._folder, self._out)
        return changes, replace(ended[0], message=f"{self._node}: {message}")

    def stop(self) -> None:
        self._executor.stop()

    def kill(self, shard: int) -> None:
        self._executor.kill(shard)


class Going(Struct):
    """A shard that runs, or waits for a node that is free."""

    store: Store
    journal: Journal
    """Of the campaign's folder: nobody else may run the shard meanwhile."""
    ledger: Ledger
    actor: Any
    call: Any
    """Its answer is waited for: first ``begin``, then ``changes``, again and again."""
    deadline: float
    asked: float
    """When it was started here …"""
    begun: float | None = None
    """… and on its node."""
    has_told: bool = False
    """Its journal has grown there."""
    is_over: bool = False
    """It was told to stop."""

    def hangs(self) -> bool:
        """To whoever has waited long enough for its journal: if it was not for a node."""
        if self.begun is None:
            return False
        return self.has_told or time.monotonic() - self.begun > self.begun - self.asked


class RayExecutor:
    """Shards on the nodes of a cluster."""

    def __init__(self, needs: Mapping[str, float]) -> None:
        self._actors = ray.remote(NodeShard).options(
            **needs, max_restarts=0, max_concurrency=2, scheduling_strategy="SPREAD"
        )
        self._sources = digest_of_sources()
        self._going: dict[int, Going] = {}
        self._is_over = False

    def start(self, job: ShardJob) -> None:
        store = Store(Path(job.folder))
        ledger = read_ledger(Path(job.known) if job.known else None)
        try:
            journal = Journal(store.journal(job.shard))
        except BlockingIOError:
            message = f"{store.folder}: shard {job.shard} is run by another process"
            raise InputError(message) from None
        store.present(job.shard).write_text("")  # as long as it waits, it is at no run
        actor = self._actors.remote()
        state = state_of(store, job.shard)
        call = actor.begin.remote(self._sources, replace(job, known=None), state, os.getcwd())
        now = time.monotonic()
        deadline = now + job.seconds + LATE_SECONDS
        self._going[job.shard] = Going(store, journal, ledger, actor, call, deadline, now)

    def ended(self) -> list[Ended]:
        shards = {going.call: shard for shard, going in self._going.items()}
        if not shards:
            return []
        answered, _ = ray.wait(list(shards), num_returns=len(shards), timeout=0)
        ended = [end for call in answered if (end := self._heard(shards[call]))]
        for end in ended:
            going = self._going.pop(end.shard)
            ray.kill(going.actor)
            going.journal.close()
        for going in self._going.values():
            if not going.is_over and time.monotonic() > going.deadline:
                _end(going)
        return ended

    def stop(self) -> None:
        self._is_over = True
        for going in self._going.values():
            _end(going)

    def kill(self, shard: int) -> None:
        going = self._going.get(shard)
        if going is None:
            return
        if not going.hangs() and not self._is_over:
            going.store.present(shard).write_text("")  # no run is to blame
            return
        answered, _ = ray.wait([going.actor.kill.remote(shard)], timeout=ANSWER_SECONDS)
        if not answered:
            ray.kill(going.actor)

    def _heard(self, shard: int) -> Ended | None:
        """Take the answer to the last call, and call again; how it ended, if it did."""
        going, ended = self._going[shard], None
        try:
            answer = ray.get(going.call)
            if going.begun is not None:
                changes, ended = answer
                bring(changes, going.store, shard, going.journal, going.ledger)
                going.has_told = going.has_told or bool(changes.lines)
            else:
                going.begun = time.monotonic()
            going.call = going.actor.changes.remote()
        except RayTaskError as error:
            return Ended(shard, BAD_INPUT, _first_line(error.cause))
        except RayError as error:
            return _lost(shard, going, error)
        except OSError as error:
            return Ended(shard, BAD_INPUT, f"{going.store.folder}: {error}")
        return ended


def _end(going: Going) -> None:
    """In order, or at once if it was only waiting."""
    going.is_over = True
    if going.begun is not None:
        going.actor.stop.remote()
    else:
        ray.kill(going.actor)


def _lost(shard: int, going: Going, error: RayError) -> Ended:
    """Its node has gone, or the actor beside it."""
    if going.is_over and going.begun is None:
        return Ended(shard, 0)
    if "No module named 'kvproof" in str(error):
        return Ended(
            shard, BAD_INPUT, "a node has no kvproof, or another one: install one on all nodes"
        )
    message = f"{type(error).__name__}: {_first_line(error)}"
    note(going.store, shard, f"{message}\n")
    return Ended(shard, -signal.SIGKILL, message)


def digest_of_sources() -> str:
    """Of kvproof as it is installed here: runs are the same only where that is."""
    digest = sha256()
    for part in PARTS:
        spec = find_spec(f"kvproof.{part}")
        for folder in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                if (file.parent / "__init__.py").exists():
                    digest.update(f"{part}/{file.relative_to(folder)}\n".encode())
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
