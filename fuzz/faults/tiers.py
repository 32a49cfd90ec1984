"""The seeded faults of the memory hierarchy: what transfers hold and how they end, aborts while
something is on its way, eviction in the tiers, the disk's files (classes 8 and 9 of the catalogue,
and what of the others has to do with tiers).

As in :mod:`kvproof.fuzz.faults.catalogue`, each function is the faulty method.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvproof.engine.engine import Engine
from kvproof.engine.eviction.arc import AdaptiveReplacement
from kvproof.engine.request import Request
from kvproof.engine.tiers import disk as disk_module
from kvproof.engine.tiers.disk import DiskFile, ShortWriteError
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.engine.tiers.pool import TierPool
from kvproof.engine.tiers.storage import Storage
from kvproof.engine.tiers.transfer import Notice, Transfer
from kvproof.engine.tiers.transfers import Transfers
from kvproof.fuzz.faults.fault import Fault, Replacement, enter
from kvproof.invariants.events import TransferCancelled
from kvproof.invariants.operations import Tier
from kvproof.invariants.outcomes import NO_FREE_BLOCKS, Outcome

_FAULTS: list[Fault] = []


_fault = partial(enter, _FAULTS)


# -- what a transfer holds while it is in flight ---------------------------------------------------


@_fault(
    Transfers,
    "_announce",
    property="VALID",
    source="B75, vllm-project/vllm#46278",
    shortest=4,
    also=("XFER", "CRASH"),
)
def stores_are_found_at_once(original: Replacement, self: Transfers, transfer: Transfer) -> None:
    """A copy to the host is findable as soon as it starts: its bytes are not there yet."""
    original(self, transfer)
    if transfer.kind == "store":
        pool = self.host[transfer.group]
        for slot, key in zip(transfer.targets, transfer.keys, strict=True):
            pool.index[key] = slot
            pool.keys[slot] = key


@_fault(
    Engine,
    "promote",
    property="PIN",
    source="B76, vllm-project/vllm#47282",
    shortest=10,
    also=("CAP", "EXCL"),
)
def promotes_into_a_fenced_block(
    original: Replacement, self: Engine, request: Request, to: Tier, blocks: int = 0
) -> Outcome:
    """A promotion that finds no free block takes those that a step in flight still uses."""
    outcome: Outcome = original(self, request, to, blocks)
    if outcome.reason == NO_FREE_BLOCKS and any(step.fenced for step in self.steps):
        for step in self.steps:
            for number, tables in step.fenced:
                self._release_tables(number, tables, step.number)
            step.fenced.clear()
        outcome = original(self, request, to, blocks)
    return outcome


@_fault(
    Hierarchy,
    "departing",
    property="CAP",
    source="B77, vllm-project/vllm#46014",
    shortest=5,
    also=("XFER",),
)
def resumes_before_the_copy_left(original: Replacement, self: Hierarchy, request: Request) -> bool:
    """A request is resumed although the copy of its blocks to the host is still in flight."""
    return False


@_fault(
    Transfers,
    "_pin",
    property="REF",
    source="B78, vllm-project/vllm#29870",
    shortest=4,
)
def store_takes_no_reference(original: Replacement, self: Transfers, transfer: Transfer) -> None:
    """A copy to the host does not hold the blocks that it reads."""
    if transfer.kind != "store":
        original(self, transfer)


@_fault(
    Transfers,
    "_pin",
    property="REF",
    source="B78, ROCm/ATOM#2146",
    shortest=4,
    also=("CONS",),
)
def swap_out_frees_at_once(original: Replacement, self: Transfers, transfer: Transfer) -> None:
    """A suspended request's blocks are free while they are still being copied to the host."""
    if transfer.kind != "swap_out":
        original(self, transfer)


@_fault(
    Transfers,
    "_pin",
    property="PIN",
    source="B79, bytedance-iaas/sglang#638",
    shortest=8,
    also=("CONS",),
)
def promotion_source_unpinned(original: Replacement, self: Transfers, transfer: Transfer) -> None:
    """A copy back to the device pins its blocks there, and not the host slots that it reads."""
    if transfer.kind != "promote":
        original(self, transfer)


@_fault(
    TierPool,
    "pin",
    property="CONS",
    source="B81, NVIDIA/TensorRT-LLM#9056",
    shortest=6,
    also=("PIN", "ORDER"),
)
def pinned_slot_stays_evictable(
    original: Replacement, self: TierPool, slots: Sequence[int]
) -> None:
    """A slot that a transfer reads may be evicted and written by another one."""
    for slot in slots:
        self.pins[slot] += 1


@_fault(
    Hierarchy,
    "promote",
    property="ATOM",
    source="B100, sgl-project/sglang#12693",
    shortest=8,
    also=("PIN", "CONS"),
)
def refused_promotion_keeps_its_pins(
    original: Replacement, self: Hierarchy, to: Tier, request: Request, **arguments: Any
) -> Outcome:
    """A promotion that finds no free block has pinned what it would read, and does not undo it."""
    outcome: Outcome = original(self, to, request, **arguments)
    if to == "device" and outcome.reason == NO_FREE_BLOCKS:
        for group, pool in enumerate(self.host):
            wanted = self._missing(to, group, request, arguments["rows"])
            found = self._at_hand("host", group, wanted, arguments["blocks"])
            pool.pin([slot for slot, _ in found])
    return outcome


# -- how a transfer ends ---------------------------------------------------------------------------


@_fault(Transfers, "complete", property="XFER", source="B83, sgl-project/sglang#32267", shortest=6)
def arrived_counts_as_timed_out(
    original: Replacement, self: Transfers, transfer: Transfer
) -> Outcome:
    """A copy that has arrived counts as timed out if another one was started after it."""
    if any(other > transfer.id for other in self.transfers):
        return self.fail(transfer, "timeout")
    outcome: Outcome = original(self, transfer)
    return outcome


@_fault(Transfers, "fail", property="XFER", source="B84, vllm-project/vllm#50754", shortest=6)
def partly_landed_counts_as_whole(
    original: Replacement, self: Transfers, transfer: Transfer, cause: str
) -> Outcome:
    """A copy that fails when some of its blocks have arrived counts as complete."""
    outcome: Outcome = (
        self.complete(transfer) if transfer.landed else original(self, transfer, cause)
    )
    return outcome


@_fault(
    Transfers,
    "_came_to_nothing",
    property="VALID",
    source="B60, sgl-project/sglang#27108",
    shortest=5,
    also=("XFER",),
)
def failed_store_counts_as_done(original: Replacement, self: Transfers, transfer: Transfer) -> None:
    """A copy to the host that failed is findable there."""
    if transfer.kind == "store":
        self._arrived(transfer)
    else:
        original(self, transfer)


@_fault(
    Transfers,
    "_finish",
    property="ORDER",
    source="B60, sgl-project/sglang#27108, one tier below",
    shortest=7,
    also=("VALID", "XFER", "PIN"),
)
def failed_demotion_drops_the_host_copy(
    original: Replacement, self: Transfers, transfer: Transfer, result: Any, cause: str = ""
) -> None:
    """A copy to the disk that failed counts as a move: the host gives its blocks up."""
    original(self, transfer, result, cause)
    if transfer.kind == "demote" and result == "failed":
        pool = self.host[transfer.group]
        pool.drop([slot for slot in transfer.sources if not pool.pins[slot]], "pressure")


@_fault(Transfers, "find", property="XFER", source="B87, kvcache-ai/Mooncake#3030", shortest=7)
def old_notice_completes_the_new(
    original: Replacement, self: Transfers, notice: Notice
) -> Transfer | None:
    """A late notice completes the copy that is filling the same slot now."""
    return next(
        (
            transfer
            for transfer in self.transfers.values()
            if (transfer.kind, transfer.group) == (notice.kind, notice.group)
            and notice.target in transfer.targets
        ),
        None,
    )


@_fault(
    Transfers,
    "cancel",
    property="XFER",
    source="B104, ai-dynamo/dynamo#7489",
    shortest=5,
    also=("QUIES",),
)
def cancel_forgets_the_transfer(
    original: Replacement, self: Transfers, transfer: Transfer
) -> Outcome:
    """A cancelled copy is forgotten: its end never comes, and what it pinned stays pinned."""
    outcome: Outcome = original(self, transfer)
    del self.transfers[transfer.id]
    return outcome


@_fault(
    Transfers,
    "cancel",
    property="XFER",
    source="B99, sgl-project/sglang#32564",
    shortest=6,
    also=("CAP", "VALID"),
)
def cancelled_copy_is_found(original: Replacement, self: Transfers, transfer: Transfer) -> Outcome:
    """A copy that is cancelled goes on as if it were not, and its result counts."""
    self._events.append(TransferCancelled(transfer.id))
    return Outcome("done", transfers=(transfer.id,))


@_fault(
    Transfers,
    "_finish",
    property="CONS",
    source="B08, sgl-project/sglang#9927",
    shortest=12,
    also=("PIN", "QUIES"),
)
def failed_fetch_leaks_its_slot(
    original: Replacement, self: Transfers, transfer: Transfer, result: Any, cause: str = ""
) -> None:
    """A copy from the disk that failed returns early: the host slots it was to fill stay pinned."""
    if transfer.kind == "fetch" and result == "failed":
        self.host[transfer.group].pin(transfer.targets)
    original(self, transfer, result, cause)


@_fault(
    Transfers,
    "_came_to_nothing",
    property="CONS",
    source="B06, NVIDIA/TensorRT-LLM#12834",
    shortest=5,
)
def host_count_drifts_on_failure(
    original: Replacement, self: Transfers, transfer: Transfer
) -> None:
    """The host slots of a copy that failed are counted as free once more."""
    original(self, transfer)
    if transfer.kind == "store":
        self.host[transfer.group]._free += transfer.targets


@_fault(
    TierPool,
    "unpin",
    property="CONS",
    source="B17, LMCache/LMCache#1130",
    shortest=5,
    also=("PIN", "QUIES"),
)
def last_pin_frees_nothing(
    original: Replacement, self: TierPool, slots: Sequence[int], used: bool
) -> None:
    """A slot that nobody wants any more when its last transfer ends is never free again."""
    wanted = [slot for slot in slots if self.keys[slot] is not None or slot in self.owners]
    for slot in slots:
        if slot not in wanted:
            self.pins[slot] -= 1
    original(self, wanted, used)


# -- what is really copied ------------------------------------------------------------------------


@_fault(Transfers, "_copy", property="XFER", source="B190, vllm-project/vllm#17362", shortest=4)
def swap_out_copies_nothing(
    original: Replacement, self: Transfers, transfer: Transfer, first: int, end: int
) -> None:
    """The copy of a suspended request's blocks to the host moves no byte, and all else is right."""
    if transfer.kind != "swap_out":
        original(self, transfer, first, end)


@_fault(
    Transfers,
    "_copy",
    property="XFER",
    source="B190, vllm-project/vllm#17362, in the order of blocks",
    shortest=5,
)
def swap_in_reverses_the_blocks(
    original: Replacement, self: Transfers, transfer: Transfer, first: int, end: int
) -> None:
    """A suspended request's blocks come back to its table from its last to its first."""
    if transfer.kind == "swap_in":
        labels = self.memory.read("host", transfer.group, transfer.sources[::-1][first:end])
        self.memory.write("device", transfer.group, transfer.targets[first:end], labels)
    else:
        original(self, transfer, first, end)


# -- suspended requests, and aborts while something is on its way ----------------------------------


@_fault(
    Hierarchy,
    "swap_in",
    property="RESUME",
    source="B73, vllm-project/vllm-omni#6053",
    shortest=5,
    also=("CAP", "LIFE"),
)
def loaded_before_the_copy(
    original: Replacement, self: Hierarchy, request: Request
) -> list[Transfer]:
    """A resumed request counts its tokens as computed when the copy back is only started."""
    transfers: list[Transfer] = original(self, request)
    request.computed = request.scheduled = request.suspended
    return transfers


@_fault(
    Engine,
    "_end",
    property="REF",
    source="B99, sgl-project/sglang#35049",
    shortest=6,
    also=("CONS",),
)
def aborted_load_frees_its_target(original: Replacement, self: Engine, request: Request) -> None:
    """A request that ends while it is loading frees its blocks, and the copy goes on into them."""
    loading = request.transfers if request.running else ()
    original(self, request)
    if self.hierarchy is not None:
        for number in loading:
            transfer = self.hierarchy.transfers[number]
            self.pools[transfer.group].release(transfer.targets[::-1])


@_fault(
    Engine,
    "_end",
    property="QUIES",
    source="B95, vllm-project/vllm#32255",
    shortest=6,
    also=("CONS", "LIFE", "REF"),
)
def abort_waits_for_a_load_that_came(original: Replacement, self: Engine, request: Request) -> None:
    """A loaded request that ends before its next step waits for a copy that has long arrived."""
    loaded = request.running and request.epoch and request.computed and not request.published
    if loaded and not request.transfers and not request.steps_in_flight:
        self.running.remove(request)
        del self.requests[request.id]
    else:
        original(self, request)


@_fault(Transfers, "_finish", property="REF", source="B96, vllm-project/vllm#33377", shortest=7)
def void_load_frees_twice(
    original: Replacement, self: Transfers, transfer: Transfer, result: Any, cause: str = ""
) -> None:
    """The end of a copy back to a request that is gone frees that request's blocks once more."""
    original(self, transfer, result, cause)
    if transfer.kind == "swap_in" and result == "cancelled":
        self.device[transfer.group].release(transfer.targets[::-1])


@_fault(Transfers, "void", property="CRASH", source="B97, vllm-project/vllm#25067", shortest=6)
def notice_of_an_ended_request_raises(
    original: Replacement, self: Transfers, transfer: Transfer
) -> bool:
    """The end of a copy looks its request up, which is not there any more."""
    request = transfer.request
    if request is not None and transfer.id not in request.transfers:
        raise KeyError(request.id)
    return bool(original(self, transfer))


@_fault(
    Transfers,
    "complete",
    property="XFER",
    source="B98, vllm-project/vllm-ascend#16662",
    shortest=6,
    also=("QUIES",),
)
def completions_of_the_aborted_filtered(
    original: Replacement, self: Transfers, transfer: Transfer
) -> Outcome:
    """The end of a copy is passed over if its request is gone: what it pinned stays pinned."""
    if transfer.request is not None and self.void(transfer):
        return Outcome("done", transfers=(transfer.id,))
    outcome: Outcome = original(self, transfer)
    return outcome


# -- what is findable, and what is evicted first ---------------------------------------------------


@_fault(
    Storage,
    "reset",
    property="VALID",
    source="B43, vllm-project/vllm#57727",
    shortest=7,
    also=("CAP",),
)
def reset_stops_at_the_device(original: Replacement, self: Storage) -> int:
    """A reset of the prefix cache leaves the lower tiers as they are."""
    return 0


@_fault(
    Engine,
    "reset",
    property="CAP",
    source="B42, NVIDIA-NeMo/RL#112",
    shortest=5,
)
def reset_ignores_the_suspended(original: Replacement, self: Engine) -> Outcome:
    """The prefix cache is reset while a request is suspended: what it has computed before is
    findable again when it comes back."""
    pools = self.hierarchy.host if self.hierarchy is not None else []
    owners = [pool.owners for pool in pools]
    for pool in pools:
        pool.owners = {}
    outcome: Outcome = original(self)
    for pool, before in zip(pools, owners, strict=True):
        pool.owners = before
    return outcome


@_fault(
    Hierarchy,
    "_prefix_on_device",
    property="ORDER",
    source="B57, LMCache/LMCache#4867",
    shortest=8,
    also=("CAP",),
)
def promotion_evicts_its_own_prefix(
    original: Replacement, self: Hierarchy, group: int, request: Request, rows: int
) -> list[int]:
    """A copy back to the device evicts the cached blocks that it is to be found behind."""
    return []


@_fault(Hierarchy, "touch", property="ORDER", source="B56, LMCache/LMCache#1116", shortest=7)
def device_hits_let_the_host_age(
    original: Replacement, self: Hierarchy, request: Request, rows: int
) -> None:
    """A prefix that is always hit on the device becomes the host's oldest."""


@_fault(
    AdaptiveReplacement, "insert", property="ORDER", source="B59, antonellof/ferrox#14", shortest=11
)
def arc_forgets_its_ghosts(
    original: Replacement, self: AdaptiveReplacement, entry: int, key: bytes, used: bool = True
) -> None:
    """A block that was evicted too early and comes back is taken for a new one."""
    self._once_ghosts.clear()
    self._again_ghosts.clear()
    original(self, entry, key, used)


# -- the disk's files ------------------------------------------------------------------------------


@_fault(
    DiskFile,
    "_write",
    property="XFER",
    source="B84, vllm-project/vllm#50754, to a file",
    shortest=7,
    also=("VALID",),
)
def short_write_is_taken_for_whole(
    original: Replacement, self: DiskFile, file: int, offset: int, data: bytes
) -> None:
    """Nobody looks how many bytes were written."""
    with suppress(ShortWriteError):
        original(self, file, offset, data)


@_fault(
    DiskFile,
    "put",
    property="VALID",
    source="B75, vllm-project/vllm#46278, in a file",
    shortest=7,
)
def index_before_data(
    original: Replacement,
    self: DiskFile,
    slots: Sequence[int],
    keys: Sequence[bytes],
    payloads: Sequence[bytes],
) -> None:
    """A block is in the index before its bytes are in the file."""
    generations = range(self._generation + 1, self._generation + 1 + len(slots))
    entries = dict(zip(slots, zip(generations, keys, strict=True), strict=True))
    self._note(disk_module._PUT, entries)
    original(self, slots, keys, payloads)


@_fault(
    DiskFile,
    "drop",
    property="VALID",
    source="B33, vllm-project/vllm#4761",
    shortest=9,
)
def evicted_block_survives_restart(
    original: Replacement, self: DiskFile, slots: Sequence[int]
) -> dict[int, disk_module.Entry]:
    """An evicted block goes from memory, and not from the index."""
    return {slot: self.entries.pop(slot) for slot in slots}


@_fault(DiskFile, "read", property="VALID", source="B86, kvcache-ai/Mooncake#4239", shortest=8)
def damaged_block_is_served(
    original: Replacement, self: DiskFile, slot: int
) -> tuple[int, bytes, bytes] | None:
    """One way of reading a block does not look at its checksum."""
    record = self._files.read_at(self._data, slot * self.record_bytes, self.record_bytes)
    if len(record) < self.record_bytes:
        return None
    body = record[disk_module._CRC.size :]
    generation, key, _ = disk_module._RECORD.unpack_from(body)
    return generation, key, body[disk_module._RECORD.size :]


# -- figures ---------------------------------------------------------------------------------------


@_fault(Transfers, "_start", property="MET", source="B158, vllm-project/vllm#43736", shortest=4)
def stores_counted_when_started(
    original: Replacement, self: Transfers, kind: Any, *arguments: Any
) -> Transfer:
    """A copy is counted when it starts, and again when it ends."""
    transfer: Transfer = original(self, kind, *arguments)
    self.counters.blocks_moved[transfer.kind] += len(transfer.sources)
    return transfer


@_fault(
    Hierarchy,
    "count_lookup",
    property="MET",
    source="B161, NVIDIA/TensorRT-LLM#15075",
    shortest=1,
)
def tiers_share_a_miss_counter(
    original: Replacement, self: Hierarchy, request: Request, rows: int
) -> None:
    """What is asked of the host counts as asked of the device as well."""
    queries = self.counters.tier_queries
    before = queries["host"]
    original(self, request, rows)
    queries["device"] += queries["host"] - before


FAULTS: tuple[Fault, ...] = tuple(_FAULTS)
