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


class BlocksReleased(Event, frozen=True, gc=False):
    """A whole table was given back, in the order of ``blocks``; each lost one reference.

    ``step`` is None for the request's present table, else the step whose fence held it.
    """

    group: int
    request: int
    blocks: Sequence[int]
    step: int | None = None


class ReleaseFenced(Event, frozen=True, gc=False):
    """The request gave up its tables, but step ``step``, in flight, still uses their blocks.

    The step holds the references until it is retired.
    """

    request: int
    step: int


class BlocksSwappedOut(Event, frozen=True, gc=False):
    """A request's blocks were copied to host blocks, before it gives them back."""

    group: int
    request: int
    blocks: Sequence[int]
    host_blocks: Sequence[int]


class BlocksSwappedIn(Event, frozen=True, gc=False):
    """Host blocks were copied into the first blocks of a request's table, and are free again."""

    group: int
    request: int
    host_blocks: Sequence[int]
    blocks: Sequence[int]


class HostBlocksReleased(Event, frozen=True, gc=False):
    """A swapped request ended: its host blocks are free."""

    group: int
    request: int
    host_blocks: Sequence[int]


class BlocksPublished(Event, frozen=True, gc=False):
    """Blocks became findable, each under its key."""

    group: int
    request: int
    row: int
    blocks: Sequence[int]
    keys: Sequence[bytes]


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
    | BlocksReleased
    | ReleaseFenced
    | BlocksSwappedOut
    | BlocksSwappedIn
    | HostBlocksReleased
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
