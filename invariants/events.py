"""What a subject reports about its own state changes, one typed event each.

Block events carry several blocks at once where they move together, so that the cost of a long
prompt stays small.  ``group`` is the KV cache group (layers that share one block table), ``row``
the first logical block index in the request's table, ``blocks`` physical block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct


class Event(Struct, frozen=True, gc=False, tag_field="event", tag=True):
    """Base of all events."""


class BlocksAllocated(Event, frozen=True, gc=False):
    """Blocks left the free ones and were appended to a table; their bytes are not written yet."""

    group: int
    request: int
    row: int
    blocks: Sequence[int]


class BlocksReused(Event, frozen=True, gc=False):
    """A prefix hit: findable blocks were appended to the table, each with one more reference."""

    group: int
    request: int
    row: int
    blocks: Sequence[int]


class BlocksShared(Event, frozen=True, gc=False):
    """A fork: the child's table starts as these blocks, each with one more reference."""

    group: int
    request: int
    parent: int
    blocks: Sequence[int]


class BlockCopied(Event, frozen=True, gc=False):
    """Copy-on-write: ``target``, a free block until now, replaces ``source`` in the table.

    The first ``tokens`` slots were copied; ``source`` lost this request's reference.
    """

    group: int
    request: int
    row: int
    source: int
    target: int
    tokens: int


class BlockMerged(Event, frozen=True, gc=False):
    """De-duplication: ``target``, findable with the same content, replaces ``source`` in the table.

    ``target`` has one more reference; ``source`` lost this request's.
    """

    group: int
    request: int
    row: int
    source: int
    target: int


class KeyMoved(Event, frozen=True, gc=False):
    """Before its holder writes on in it, what is findable in ``source`` was copied to ``target``, a
    free block until now, and is findable there instead; nobody holds ``target``.
    """

    group: int
    request: int
    source: int
    target: int


class BlocksReleased(Event, frozen=True, gc=False):
    """A whole table was given back, in the order of ``blocks``; each lost one reference.

    ``step`` is None for the request's present table, else the step whose fence held it.
    """

    group: int
    request: int
    blocks: Sequence[int]
    step: int | None = None


class BlocksOutlived(BlocksReleased, frozen=True, gc=False):
    """Blocks behind the group's window were given back; the table names a reserved block there."""


class ReleaseFenced(Event, frozen=True, gc=False):
    """The request gave up its tables, but step ``step``, in flight, still uses their blocks.

    The step holds the references until it is retired.
    """

    request: int
    step: int


TransferKind = Literal["store", "demote", "fetch", "promote", "swap_out", "swap_in"]
"""store: device to host.  demote: host to disk.  fetch: disk to host.  promote: host to device.
These four move findable blocks (prefix offload).  swap_out and swap_in: device to host and back,
for a suspended request."""


class TransferStarted(Event, frozen=True, gc=False):
    """A copy of blocks (``sources``) to others (``targets``) is in flight; both ends are pinned.

    Device ends are block ids, with one more reference each; others are slots of their tier.
    """

    transfer: int
    """Never used again for another one."""
    kind: TransferKind
    group: int
    sources: Sequence[int]
    targets: Sequence[int]
    keys: Sequence[bytes] = ()
    """Of the blocks; none in swaps, which move what is not findable as well."""
    request: int | None = None
    """The suspended request; or the one whose table has the targets, and which waits for them (see
    ``Semantics.copies_hold``)."""


class TransferLanded(Event, frozen=True, gc=False):
    """The first ``parts`` blocks of a transfer have arrived, in all so far."""

    transfer: int
    parts: int


class TransferCancelled(Event, frozen=True, gc=False):
    """The result of a transfer is not wanted any more; it is still in flight."""

    transfer: int


class TransferEnded(Event, frozen=True, gc=False):
    """A transfer is over; both ends are unpinned.  Only what completed counts.

    Completed copies of findable blocks are findable at their target; a completed swap-out leaves
    its slots to the request, a completed swap-in the tokens to the request and the slots free.
    """

    transfer: int
    result: Literal["completed", "failed", "cancelled"]
    cause: str = ""
    """Of a failure: error, timeout, short_write, disk_full, corrupt or crash."""


class SlotsEvicted(Event, frozen=True, gc=False):
    """Blocks on host or disk are not findable any more, in this order, and their slots free.

    ``cause``: pressure (they are about to be reused), request (an evict operation), reset, or
    corrupt (a look at them showed damage).
    """

    tier: Literal["host", "disk"]
    group: int
    slots: Sequence[int]
    keys: Sequence[bytes]
    cause: Literal["pressure", "request", "reset", "corrupt"]


class SlotsReleased(Event, frozen=True, gc=False):
    """A suspended request that ended, or computes anew, gives up its host slots.

    They are free at once, or when the last transfer that uses them ends.
    """

    tier: Literal["host", "disk"]
    group: int
    request: int
    slots: Sequence[int]


class TierReopened(Event, frozen=True, gc=False):
    """The disk tier came back after a crash and finds exactly these blocks, in this order."""

    group: int
    slots: Sequence[int]
    keys: Sequence[bytes]
    damaged: Sequence[int] = ()
    """Slots whose entry in the index is damaged: what they held is lost."""


class BlocksPublished(Event, frozen=True, gc=False):
    """Blocks became findable, each under its key."""

    group: int
    request: int
    row: int
    blocks: Sequence[int]
    keys: Sequence[bytes]
    tokens: int = 0
    """Of a state inside its row: after how many of the request's tokens it is."""


class BlocksEvicted(Event, frozen=True, gc=False):
    """Cached content of blocks became unfindable, in this order.

    ``cause``: pressure (they are about to be reused), request (an evict operation) or reset.
    """

    group: int
    blocks: Sequence[int]
    keys: Sequence[bytes]
    cause: Literal["pressure", "request", "reset"]


class RequestAdmitted(Event, frozen=True, gc=False):
    """A request entered the running ones for the first time."""

    request: int
    input_tokens: int
    cached_tokens: int


class RequestResumed(Event, frozen=True, gc=False):
    """A preempted request entered the running ones again."""

    request: int
    cached_tokens: int


class RequestsDecoded(Event, frozen=True, gc=False):
    """Each of these requests has one more token, with a slot for it, not computed yet."""

    requests: Sequence[int]


class RequestGrown(Event, frozen=True, gc=False):
    """A request has ``tokens`` more tokens, with slots for them, not computed yet."""

    request: int
    tokens: int


class RequestForked(Event, frozen=True, gc=False):
    """``child`` started with the tokens and the computed state of ``parent``."""

    parent: int
    child: int


class RequestPreempted(Event, frozen=True, gc=False):
    """A running request lost its computed state."""

    request: int


class RequestFinished(Event, frozen=True, gc=False):
    """A running request ended as planned."""

    request: int


class RequestAborted(Event, frozen=True, gc=False):
    """A live request was cancelled."""

    request: int


class StepItem(Struct, frozen=True, gc=False):
    """One request's part of a step: compute tokens ``start`` to ``end``, attend to 0 to ``end``.

    ``tables`` holds one block table per group as it was when the step was launched.  They say
    which slots are written (positions ``start`` to ``end``) and read (0 to ``end``): position
    ``p`` lives in block ``tables[g][p // B]`` at offset ``p % B``.  A table is append-only (a
    copy-on-write starts a new list), so an item may refer to it without a copy.
    """

    request: int
    epoch: int
    """Times the request had been preempted at launch: results of an older epoch are void."""
    start: int
    end: int
    tables: tuple[Sequence[int], ...]


class StepLaunched(Event, frozen=True, gc=False):
    """A step is in flight."""

    step: int
    items: Sequence[StepItem]


class StepRetired(Event, frozen=True, gc=False):
    """A step finished."""

    step: int


AnyEvent = (
    BlocksAllocated
    | BlocksReused
    | BlocksShared
    | BlockCopied
    | BlockMerged
    | KeyMoved
    | BlocksReleased
    | BlocksOutlived
    | ReleaseFenced
    | TransferStarted
    | TransferLanded
    | TransferCancelled
    | TransferEnded
    | SlotsEvicted
    | SlotsReleased
    | TierReopened
    | BlocksPublished
    | BlocksEvicted
    | RequestAdmitted
    | RequestResumed
    | RequestGrown
    | RequestsDecoded
    | RequestForked
    | RequestPreempted
    | RequestFinished
    | RequestAborted
    | StepLaunched
    | StepRetired
)


_WHY = {
    "pressure": "under pressure",
    "request": "on request",
    "reset": "by a reset",
    "corrupt": "as it was damaged",
}


def why_evicted(cause: str) -> str:
    """A cause in words: in messages a request is one for tokens."""
    return _WHY.get(cause, cause)
