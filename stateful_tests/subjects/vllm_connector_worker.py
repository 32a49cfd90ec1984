"""The names of vLLM's offloading connector that its adapter uses, and the hands of its worker.

See :mod:`kvproof.stateful_tests.subjects.vllm_connector`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.vllm_offload_host import load_offloading
from kvproof.stateful_tests.subjects.vllm_scheduling import load_scheduling

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_offload.base import TransferResult
    from vllm.v1.outputs import ModelRunnerOutput

NAME = "vllm:scheduler:offload"
ASYNC_NAME = "vllm:async_scheduler:offload"
TIERED_NAME = "vllm:scheduler:tiering"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    NAME: {},
    ASYNC_NAME: {},
    TIERED_NAME: {
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "example"}],
    },
}
"""Of the connector, beside the size of the host and its order of eviction."""
LATEST = 4
"""Iterations that a copy may take."""


@lru_cache(maxsize=1)
def load_connector() -> _Connector:
    """Import vLLM's connector, once per process; raises SubjectUnavailable."""
    load_offloading()
    try:
        return _Connector()
    except ImportError as error:
        raise SubjectUnavailable(
            f"the subject {NAME}: vLLM's offloading connector cannot be imported ({error}): "
            "in a checkout, bash .ci/vllm-env FOLDER makes an environment with it"
        ) from error


class _Connector:
    """The names of vLLM that the adapter uses beside those of the scheduler's."""

    def __init__(self) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
            build_offloading_config,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
            OffloadingConnectorWorker,
        )
        from vllm.v1.kv_offload.base import TransferResult
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.outputs import KVConnectorOutput

        self.output = KVConnectorOutput
        self.result = TransferResult
        self._worker = OffloadingConnectorWorker
        self._offloading_config = build_offloading_config
        self._new_spec = OffloadingSpecFactory.create_spec
        self._transfer = KVTransferConfig
        self._dtype = torch.float32

    def scheduler_class(self, configuration: Configuration, name: str) -> type[Scheduler]:
        """The scheduler of that subject, with its connector to a host of so many blocks."""
        transfer = self._transfer(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": configuration.host_blocks * PAGESIZE,
                "eviction_policy": configuration.host_eviction,
                "offload_prompt_only": False,
                **OPTIONS[name],
            },
        )
        dtype = self._dtype
        base: Any = load_scheduling().schedulers[family_of(name)]

        class Connected(base):  # type: ignore[misc]
            def __init__(self, config: Any, *more: Any, **named: Any) -> None:
                config.kv_transfer_config = transfer
                model = config.model_config
                model.use_mla, model.model, model.dtype = False, "model", dtype
                model.get_total_num_kv_heads = lambda: 1
                super().__init__(config, *more, **named)

        return Connected

    def new_worker(self, scheduler: Any, hands: Hands) -> Any:
        """The connector's other half, as it is in each of vLLM's workers, with these hands."""
        config = scheduler.vllm_config, scheduler.kv_cache_config
        worker = self._worker(self._new_spec(self._offloading_config(*config)), *config)
        worker.worker = hands
        return worker


class Hands:
    """What copies in a worker: here, nothing, and late.

    A copy ends up to ``LATEST`` iterations after it was begun, and others may overtake it; its
    bytes have moved then, or at once.  All this follows from its number, so that a case replays.
    """

    def __init__(self, landed: Callable[[int], None]) -> None:
        self._landed = landed
        """Told of each copy when its bytes have moved."""
        self._result = load_connector().result
        self._left: dict[int, int] = {}
        """Of copies under way: further iterations that each takes."""
        self._moved: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._begin(job_id)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._begin(job_id)

    def _begin(self, job: int) -> bool:
        number = drawn(job)
        self._left[job] = number % LATEST
        if number & 64:
            self._move(job)
        return True

    def _move(self, job: int) -> None:
        if job not in self._moved:
            self._moved.add(job)
            self._landed(job)

    def wait(self, job_ids: Collection[int]) -> None:
        for job in sorted(self._left.keys() & job_ids):
            self._move(job)
            self._left[job] = 0

    def get_finished(self) -> list[TransferResult]:
        ended = sorted([job for job, left in self._left.items() if not left], key=drawn)
        for job in ended:
            self._move(job)
            self._moved.discard(job)
        self._left = {job: left - 1 for job, left in self._left.items() if left}
        return [self._result(job, success=True) for job in ended]


def family_of(name: str) -> str:
    """That subject's name without what lies below its cache."""
    return name.rpartition(":")[0]


def drawn(job: int) -> int:
    """By a copy's name: a large number, as if by chance."""
    return crc32(b"copy %d" % job) >> 8


class Worker:
    """Carries out what the scheduler tells the connector's workers, and reports."""

    def __init__(self, scheduler: Any, landed: Callable[[int], None]) -> None:
        self._vllm = load_connector()
        self.worker = self._vllm.new_worker(scheduler, Hands(landed))
        self._metadata: Any = None
        """Of the step under way."""
        self.awaited: ModelRunnerOutput | None = None
        """Where its outcome belongs; None if no step is under way."""

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Before the model runs; one step ends before the next one begins."""
        self.finish()
        self._metadata = scheduled.kv_connector_metadata
        self.worker.handle_preemptions(self._metadata)
        self.worker.start_kv_transfers(self._metadata)

    def finish(self) -> None:
        """After it; what has ended."""
        if self.awaited is None:
            return
        self.worker.prepare_store_kv(self._metadata)
        sending, receiving = self.worker.get_finished(set())
        self.awaited.kv_connector_output = self._vllm.output(
            finished_sending=sending,
            finished_recving=receiving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.awaited = None
