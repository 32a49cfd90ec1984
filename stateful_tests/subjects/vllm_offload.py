"""vLLM's offloading manager as a subject: the real one, unmodified, below kvproof's own device.

What is under test is ``CPUOffloadingManager`` of ``vllm.v1.kv_offload``, with its eviction policies
LRU and ARC (the configuration's ``host_eviction``): which chunk a block is copied to, what is
evicted for it, what may be loaded and what may not yet, what a failed store leaves behind.  Device
blocks, requests, steps and the copies themselves are those of kvproof's engine, whose host pool the
manager replaces (:mod:`kvproof.stateful_tests.subjects.vllm_offload_host`).  So the bytes are real:
each copy moves the labels of its blocks from and to the chunks that the manager named.

How it maps:

* An offload is ``prepare_store`` of the blocks that are next; refused where it answers None.
* A promotion is ``prepare_load`` of what ``lookup`` says is ready, into free device blocks.
* The end of a copy is ``complete_store`` or ``complete_load``.  A failed store is completed with
  ``success=False``; a failed load is completed as any other, as vLLM does, and brings nothing.
* A prefix hit on the device is a ``touch``; a reset is ``reset_cache``.
* A disk is not there, nor is swapping.  Nobody cancels a copy: vLLM lets it run to its end.
  Notices that come late are dropped by vLLM's connector, and would say nothing about its manager.

What a store reads is held by the engine until its copy ends, where vLLM's connector would wait for
the copy before the block is written again; so an admission never meets a block that is still on its
way to the host, and no chunk is read by two copies at once.

With ``threshold`` above 1 the manager takes a key only when it was offered so often; which blocks
are copied is then its own choice, and not predicted.  The order of ARC is not judged: vLLM's is not
the published one.  (Whatever comes back is inserted as used once, and lists count pinned chunks.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.engine.tiers.pool import TierPool
from kvproof.engine.tiers.transfer import Transfer
from kvproof.invariants.operations import KINDS, Tier
from kvproof.invariants.outcomes import (
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
    Answer,
    Outcome,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.engine import EngineSubject, EngineView
from kvproof.stateful_tests.subjects.vllm_offload_host import NAME, Job, VllmHost, load_offloading

_COPIES = {"offload", "promote", "land", "complete", "fail", "withhold"}
HOST_BLOCKS = 8
"""Where a configuration has none: without a host there is nothing to check."""


def vllm_offload_factory(threshold: int = 1) -> Callable[[Configuration], VllmOffloadSubject]:
    """A subject whose manager takes a key when it is offered for the ``threshold``-th time."""
    load_offloading()  # now, so that a missing package is bad input and not a crash of the subject
    return partial(VllmOffloadSubject, threshold=threshold)


def fitted(configuration: Configuration) -> Configuration:
    """As vLLM has it: a host, for prefixes alone, and no disk."""
    return replace(
        configuration,
        host_blocks=configuration.host_blocks or HOST_BLOCKS,
        disk_blocks=0,
        offload="prefix",
    )


class VllmHierarchy(Hierarchy):
    """The engine's hierarchy, whose host is vLLM's manager: it asks it, and never decides."""

    def __init__(self, threshold: int, engine: Engine) -> None:
        self._threshold = threshold
        self._jobs: dict[int, Job] = {}
        """What the manager has prepared for transfers in flight."""
        super().__init__(
            engine.configuration,
            engine.pools,
            engine.events,
            engine.counters,
            folder=None,
            files=None,
        )

    def _make_tiers(self) -> None:
        configuration = self.configuration
        self.vllm_host = VllmHost(
            configuration.host_blocks, configuration.host_eviction, self._threshold, self._events
        )
        self.host = [cast(TierPool, self.vllm_host)]
        self.device[0].watch = self._watch_device(0)

    def answer(self, group: int, key: bytes) -> Answer:
        return "hit_pending" if key in self.promoting[group] else self.vllm_host.answer(key)

    # -- copies begin ------------------------------------------------------------------------------

    def offload(self, to: Tier, first: int, blocks: int) -> Outcome:
        """Start to copy what the manager takes of the blocks whose turn it is."""
        if to != "host":
            return Outcome("refused", OFFLOAD_OFF)
        host, device = self.vllm_host, self.device[0]
        entries = self._storable(0, first, blocks)
        if not entries:
            return Outcome("refused", NOTHING_TO_MOVE)
        lacking = device.count_unreferenced([block for block, _ in entries]) > device.free_count
        if lacking and len(entries) <= host.room():
            return Outcome("refused", NO_FREE_BLOCKS)
        block_of = {key: block for block, key in entries}
        job = host.prepare_store(list(block_of))
        if job is None:
            return Outcome("refused", NO_HOST_BLOCKS)
        if not job.keys:
            return Outcome("refused", NOTHING_TO_MOVE)
        keys = [host.key_of(name) for name in job.keys]
        transfer = self._start("store", 0, [block_of[key] for key in keys], job.slots, keys)
        self._jobs[transfer.id] = job
        return Outcome("done", count=len(keys), transfers=(transfer.id,))

    def _promote(
        self, to: Tier, group: int, entries: Sequence[tuple[int, bytes]], protected: Any
    ) -> Transfer | None:
        if not entries:
            return None
        keys = [key for _, key in entries]
        job = self.vllm_host.prepare_load(keys)
        targets = self.device[group].take(len(keys), protected)
        transfer = self._start("promote", group, job.slots, targets, keys)
        self._jobs[transfer.id] = job
        return transfer

    # -- and end -----------------------------------------------------------------------------------

    def _arrived(self, transfer: Transfer) -> None:
        if transfer.kind == "store":
            self.counters.blocks_moved["store"] += len(transfer.targets)
            self.vllm_host.end_store(self._jobs.pop(transfer.id), completed=True)
        else:
            super()._arrived(transfer)

    def _came_to_nothing(self, transfer: Transfer) -> None:
        if transfer.kind == "store":
            self.vllm_host.end_store(self._jobs.pop(transfer.id), completed=False)
        super()._came_to_nothing(transfer)

    def _unpin(self, transfer: Transfer) -> None:
        blocks = transfer.sources if transfer.kind == "store" else transfer.targets
        self.device[transfer.group].release(blocks[::-1])
        if transfer.kind == "promote":
            self.vllm_host.end_load(self._jobs.pop(transfer.id))

    def _remember(self, transfer: Transfer) -> None:
        """Nobody sends notices."""


class OffloadingEngine(Engine):
    """kvproof's engine with such a hierarchy."""

    def __init__(self, configuration: Configuration, *, threshold: int, **others: Any) -> None:
        super().__init__(configuration, **others)
        self.hierarchy = VllmHierarchy(threshold, self)


class VllmOffloadView(EngineView):
    """The state of the engine and of vLLM's manager, as it is."""

    def metrics(self) -> Mapping[str, int]:
        return {}

    def request_metrics(self, request: int) -> Mapping[str, int]:
        return {}


class VllmOffloadSubject(EngineSubject):
    """Drives one CPUOffloadingManager; raises SubjectUnavailable where vLLM 0.33 is not there."""

    name = NAME
    capabilities = (frozenset(KINDS) - {"decode", "fork", "reserve"}) | _COPIES
    """Of the engine's only what has blocks stored, lost and asked for again."""

    def __init__(self, configuration: Configuration, *, threshold: int = 1) -> None:
        super().__init__(
            fitted(configuration), engine=partial(OffloadingEngine, threshold=threshold)
        )
        exact = threshold <= 1
        self.semantics = Semantics(
            # What the engine spares for a copy upwards can be told only of exact tiers.
            eviction_order="configured" if exact else "any",
            tiers=True,
            slots=False,
            swaps=False,
            disk=False,
            needs_host=True,
            exact_tiers=exact,
            host_order="configured" if configuration.host_eviction == "lru" else "any",
        )
        self.name = NAME if exact else f"{NAME}:twice"
        self._view = VllmOffloadView(self.engine)

    @property
    def host(self) -> VllmHost:
        """The host pool, whose ``manager`` is vLLM's."""
        hierarchy = self.engine.hierarchy
        assert isinstance(hierarchy, VllmHierarchy)
        return hierarchy.vllm_host
