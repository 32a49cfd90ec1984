"""Campaigns on a Ray cluster of several nodes, some of which are killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from kvproof.fuzz.campaigns import ray_executor
from kvproof.fuzz.campaigns.executors import BAD_INPUT, Ended
from kvproof.fuzz.campaigns.ray_executor import Cluster as Workers
from kvproof.fuzz.campaigns.ray_executor import (
    RayExecutor,
    connect,
    part_of_a_unit,
    what_there_is,
)
from kvproof.fuzz.campaigns.records import Campaign, Progress, Target
from kvproof.fuzz.campaigns.shard import ShardJob
from kvproof.fuzz.campaigns.store import Store, read_lines
from kvproof.invariants.case import load_case
from kvproof.invariants.errors import InputError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CACHE = Target("cache", "engine", tiers_share=0.0)
FAULT = "finish-forgets-its-table"
PATIENCE = 120.0
"""Of a test on a machine that has other things to do."""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A node that does not even answer is given up then."""
HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""Where tests are run in the background, their children would ignore it."""
MAIN = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"


def until(there: Callable[[], object], what: str) -> None:
    patience = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < patience, what
        time.sleep(0.1)


# -- the cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node without CPUs, on which the campaign is run, and two of one CPU each."""
    mark = f"KVPROOF_TEST_{uuid4().hex}"
    folder = mkdtemp(prefix="kv")  # short: there are sockets in it
    with pytest.MonkeyPatch.context() as patch:
        for name in (mark, "RAY_TMPDIR", "TMPDIR"):
            patch.setenv(name, folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": SOON}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**NODE)
            cluster.add_node(**NODE, num_gpus=1)  # Ray takes our word for it
            yield cluster
        finally:
            ray_executor.ray.shutdown()
            cluster.shutdown()
            _end_all(mark)
            shutil.rmtree(folder, ignore_errors=True)


def _end_all(mark: str) -> None:
    """Whatever was started with the mark in its environment."""
    for process in _processes():
        try:
            if f"{mark}=".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it has just ended


def _processes() -> list[Path]:
    return [process for process in Path("/proc").iterdir() if process.name.isdecimal()]


def process_of(store: Store, shard: int) -> int | None:
    """The process that runs the shard, if any does."""
    for process in _processes():
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "kvproof.fuzz.campaigns.worker" in words:
            job = json.loads(words[words.index("kvproof.fuzz.campaigns.worker") + 1])
            campaign = json.loads((Path(job["folder"]) / "campaign.json").read_text())
            if job["shard"] == shard and campaign["seed"] == str(store.folder):
                return int(process.name)
    return None


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


# -- one shard after the other ---------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "campaign")
    store.begin(Campaign(str(store.folder), (CACHE,), 2, FAULT))
    return store


@pytest.fixture(scope="module")
def joined(cluster: Cluster) -> None:
    assert connect(cluster.address, uses_gpus=False) == Workers("num_cpus", 2)


@pytest.fixture
def executor(joined: None) -> Iterator[RayExecutor]:
    executor = RayExecutor({"num_cpus": 1})
    yield executor
    _leave_nothing(executor)


def _leave_nothing(executor: RayExecutor) -> None:
    for going in executor._going.values():
        ray_executor.ray.kill(going.actor)


def job_of(store: Store, shard: int = 0, seconds: float = 600.0) -> ShardJob:
    return ShardJob(str(store.folder), shard, seconds)


def lines(store: Store, shard: int = 0) -> list[Progress]:
    journal = store.journal(shard)
    return read_lines(journal, Progress) if journal.exists() else []


def end_of(executor: RayExecutor) -> Ended:
    found: list[Ended] = []
    until(lambda: found.extend(executor.ended()) or found, "it does not end")
    (ended,) = found
    return ended


def grows(executor: RayExecutor, store: Store, shard: int = 0) -> None:
    before = len(lines(store, shard))

    def has_grown() -> bool:
        assert executor.ended() == []
        return len(lines(store, shard)) > before

    until(has_grown, "the journal does not grow")


def test_a_shard_ends_in_order_and_goes_on(executor: RayExecutor, store: Store) -> None:
    executor.start(job_of(store))
    with pytest.raises(InputError, match="shard 0 is run by another process"):
        executor.start(job_of(store))
    grows(executor, store)
    executor.stop()
    ended = end_of(executor)
    assert (ended.shard, ended.code) == (0, 0)
    before = lines(store)
    assert list(store.raw.iterdir()) == []
    executor.start(job_of(store, seconds=0.5))
    assert end_of(executor).code == 0
    after = lines(store)
    assert after[: len(before)] == before
    assert after[-1].at > before[-1].at
    (finding,) = store.found()
    assert len(load_case(store.findings / finding.id / "case.json").operations) == 2
    assert (store.findings / finding.id / f"test_{finding.id}.py").is_file()


def test_a_shard_is_killed(executor: RayExecutor, store: Store) -> None:
    executor.start(job_of(store))
    grows(executor, store)
    going = executor._going[0]
    assert going.hangs()
    going.asked, going.has_told = 0.0, False  # as if it had waited for a node until now
    executor.kill(0)
    assert store.present(0).read_text() == ""
    grows(executor, store)
    assert process_of(store, 0)
    executor.kill(0)
    assert end_of(executor).code == -signal.SIGKILL
    assert process_of(store, 0) is None
    assert store.present(0).read_text().startswith(f"{store.folder}/cache/")


def test_a_shard_that_finds_no_free_node_waits(joined: None, store: Store) -> None:
    """It hangs at nothing, and its time ends."""
    executor = RayExecutor({"num_cpus": 2})
    store.present(0).write_text("a run of before")
    executor.start(job_of(store))
    time.sleep(1)
    executor.kill(0)
    assert executor.ended() == []
    assert store.present(0).read_text() == ""
    executor.stop()
    assert end_of(executor) == Ended(0, 0)
    executor = RayExecutor({"num_cpus": 2})
    executor.start(job_of(store, seconds=-ray_executor.LATE_SECONDS))
    assert end_of(executor) == Ended(0, 0)


def test_a_shard_has_a_gpu_of_its_own(joined: None, store: Store) -> None:
    assert what_there_is(uses_gpus=True) == Workers("num_gpus", 1)
    executor = Workers("num_gpus", 1).executor(1)
    executor.start(job_of(store))
    grows(executor, store)
    environment = Path(f"/proc/{process_of(store, 0)}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=0" in environment
    executor.stop()
    assert end_of(executor).code == 0


def test_a_node_has_another_kvproof(executor: RayExecutor, store: Store) -> None:
    executor._sources = "others"
    executor.start(job_of(store))
    ended = end_of(executor)
    assert ended.code == BAD_INPUT
    assert "its kvproof is not the one that the campaign runs" in ended.message
    assert "\n" not in ended.message


def test_what_is_wrong_on_a_node_is_told_as_of_here(executor: RayExecutor, store: Store) -> None:
    store.corpus("cache").mkdir(parents=True)
    (store.corpus("cache") / "torn.json").write_text("{")
    executor.start(job_of(store))
    ended = end_of(executor)
    assert ended.code == BAD_INPUT
    assert f"{store.folder}/corpus/cache/torn.json:" in ended.message


def test_no_room_at_home(
    executor: RayExecutor, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ray_executor, "bring", full)
    executor.start(job_of(store))
    assert end_of(executor) == Ended(
        0, BAD_INPUT, f"{store.folder}: [Errno 28] No space left on device"
    )


@pytest.mark.parametrize(
    ("shards", "workers", "part"), [(1, 4, 1.0), (4, 4, 1.0), (5, 4, 0.5), (7, 1, 0.1428)]
)
def test_all_shards_find_room(shards: int, workers: int, part: float) -> None:
    assert part_of_a_unit(shards, workers) == part
    assert int(1 / part) * workers >= shards


@pytest.mark.parametrize("address", ["127.0.0.1:1", "somewhere", "ray://127.0.0.1:10001", "::"])
def test_an_address_of_nobody(address: str) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match="^--ray " + address) as told:
        connect(address, uses_gpus=False)
    assert "\n" not in str(told.value)
    assert time.monotonic() - started < 10


def test_auto_finds_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str, **options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray_executor.ray, "init", init)
    with pytest.raises(InputError, match=r"^--ray auto: no cluster runs on this machine"):
        connect("auto", uses_gpus=False)


# -- a campaign whose workers are killed -----------------------------------------------------------


def test_a_campaign_outlives_its_nodes(cluster: Cluster, store: Store) -> None:
    """One worker is killed, then a node: both shards go on, and what they found is there."""
    command = ("--target", "cache", "--fault", FAULT, "--seed", str(store.folder), "--json")
    ray = ("--ray", "auto", "--time", "1h", "--out", str(store.folder))
    campaign = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C + MAIN, "fuzz", *command, *ray],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _kill_and_see_it_go_on(cluster, store, campaign)
        campaign.send_signal(signal.SIGINT)
        out, err = campaign.communicate(timeout=PATIENCE)
    finally:
        campaign.kill()
    assert campaign.returncode == 1, err
    *progress, last = err.splitlines()
    assert last == "stopped: the same command goes on"
    assert all(line.startswith("fuzzing, ") for line in progress)
    (violation,) = json.loads(out)["violations"]
    assert violation["property"] == "QUIES"
    journal = [*lines(store, 0), *lines(store, 1)]
    assert violation["failures"] == sum(
        line.failures[violation["id"]] for line in journal if line.failures
    )
    assert json.loads(out)["ops"] == sum(line.totals.ops for line in journal)
    assert [finding.id for finding in store.found()] == [violation["id"]]
    kept = [load_case(path) for path in store.corpus("cache").iterdir()]
    assert len(kept) >= sum(line.novel for line in journal)
    assert list(store.raw.iterdir()) == []
    assert [process_of(store, shard) for shard in (0, 1)] == [None, None]


def _kill_and_see_it_go_on(cluster: Cluster, store: Store, campaign: subprocess.Popen[str]) -> None:
    def has(lines_of_0: int, lines_of_1: int) -> bool:
        assert campaign.poll() is None, campaign.communicate()[1]
        return len(lines(store, 0)) >= lines_of_0 and len(lines(store, 1)) >= lines_of_1

    until(lambda: has(2, 2), "they do not start")
    before = len(lines(store, 0))
    os.kill(parent_of(process_of(store, 0) or 0), signal.SIGKILL)
    until(lambda: has(before + 1, 2), "the shard of a killed worker does not go on")
    assert "ActorDiedError" in store.log(0).read_text()
    raylet = parent_of(parent_of(process_of(store, 1) or 0))
    (node,) = [
        node
        for node in cluster.list_all_nodes()
        if raylet in [started.process.pid for started in node.all_processes["raylet"]]
    ]
    before = len(lines(store, 1))
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE)
    # Of the second that was on its way when the node died, a line may still come.
    until(lambda: has(2, before + 4), "the shard of a killed node does not go on")
    assert "Actor" in store.log(1).read_text()
