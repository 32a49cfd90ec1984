"""The operations that drive a paged KV cache: one typed union, the centre of kvproof.

The same list of operations is log, corpus entry, shrink unit, reproducer and exported test.
Operations name their target relatively: ``request=k`` is the k-th candidate *modulo their
number*, where the candidates are the requests that the operation could apply to (running ones
for grow, decode, reserve, finish, fork and preempt; preempted and swapped ones for resume; all
live ones for abort), in the order of their first admission.  So deleting one operation leaves the
others meaningful, and an operation without a candidate is skipped and counted, never an error.

Prompts are spelled as segments, not as tokens: see :mod:`kvproof.invariants.prompts`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 22)]
"""Beyond any context of today, and still expanded in a moment."""
Index = Annotated[int, Meta(ge=0, le=1 << 40)]
Tier = Literal["device", "host", "disk"]
"""Where KV blocks live: accelerator memory, host memory, files."""
DiskFile = Literal["data", "index"]
"""The two files of a disk tier: the blocks, and which of them count."""


class Segment(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """``length`` tokens of the endless token stream number ``source``, from its start."""

    source: Index
    length: Tokens


class Media(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Media item number ``item`` (an image, say), shown at tokens ``start`` to ``start+length``.

    Its tokens are placeholders, the same for every item: only the item tells them apart.
    """

    item: Index
    start: Index
    length: Tokens


class Operation(
    Struct,
    frozen=True,
    gc=False,
    tag_field="op",
    tag=str.lower,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all operations."""


class Admit(Operation, frozen=True, gc=False):
    """A request arrives and asks to be admitted: prefix lookup, then blocks for its whole prompt.

    ``salt``, ``adapter`` and ``media`` separate what may share prefixes (0 and ``()``: none).
    """

    prompt: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    salt: Index = 0
    adapter: Index = 0
    media: tuple[Media, ...] = ()
    slots: Index = 0
    """Positions that get blocks, from the first on: fewer than the prompt has (its other blocks
    follow, see ``Reserve``), or more.  0: as many as the prompt has."""
    wait: bool = False
    """Refused while KV of the prompt is on its way to the device, or a tier has not answered."""


class Grow(Operation, frozen=True, gc=False):
    """A running request gets ``tokens`` more tokens, the ones that ``choice`` samples."""

    request: Index
    tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    choice: Index = 0


class Decode(Operation, frozen=True, gc=False):
    """Each of these running requests gets one more token, as by ``Grow``; all of them or none."""

    requests: Annotated[tuple[Index, ...], Meta(min_length=1)]
    choice: Index = 0


class Reserve(Operation, frozen=True, gc=False):
    """A running request gets blocks for its first ``slots`` positions, as far as it has none."""

    request: Index
    slots: Tokens


class Finish(Operation, frozen=True, gc=False):
    """A running request ends as planned; its full blocks stay findable."""

    request: Index


class Abort(Operation, frozen=True, gc=False):
    """A live request, running or preempted, is cancelled by its client."""

    request: Index


class Fork(Operation, frozen=True, gc=False):
    """A running request, all of it computed, splits off ``samples`` children (parallel sampling).

    Children share every block; the first to write into a shared block copies it.
    """

    request: Index
    samples: Annotated[int, Meta(ge=1, le=64)] = 1


class Evict(Operation, frozen=True, gc=False):
    """Make up to ``blocks`` cached-free blocks unfindable, in the order of the eviction policy.

    On host or disk: blocks that no transfer uses and no suspended request owns.
    """

    blocks: Count = 1
    tier: Tier = "device"


class Reset(Operation, frozen=True, gc=False):
    """Empty the prefix cache; refused while any block is referenced, or a request is suspended."""

    running: bool = False
    """Of a scheduler: its running requests are preempted first, and what steps in flight sample for
    them is dropped, to be sampled again."""


class Preempt(Operation, frozen=True, gc=False):
    """A running request loses its blocks: it keeps its tokens, to be recomputed.

    With ``swap``, its computed blocks are copied to the host first, and copied back when it is
    resumed; refused while a step in flight carries it.  With ``late`` as well, the copy stays in
    flight until completed, and keeps the device blocks until then.
    """

    request: Index
    swap: bool = False
    late: bool = False


class Resume(Operation, frozen=True, gc=False):
    """A preempted request asks to be admitted again, with all of its tokens as the prompt.

    ``slots``: as for ``Admit``, but never fewer than what was swapped out.  With ``late``, what was
    swapped out is copied back by a transfer that stays in flight until completed; the request is
    loading until then.
    """

    request: Index
    slots: Index = 0
    late: bool = False


class Launch(Operation, frozen=True, gc=False):
    """Start a step over the running requests with uncomputed tokens, oldest first.

    ``budget`` bounds the tokens of the step (0: no bound).  With ``items``, (request, tokens)
    each, the step computes so many tokens of just these running requests, or as many as are
    there and have slots.  The step is in flight until retired.
    """

    budget: Index = 0
    items: tuple[tuple[Index, Tokens], ...] = ()


class Retire(Operation, frozen=True, gc=False):
    """The oldest step in flight finishes: its writes have landed, its results are applied."""


# -- the memory hierarchy -----------------------------------------------------------------------
#
# Transfers are named by their start, those in flight only; ``transfer=k`` is the k-th of them,
# modulo their number.  None of these operations is ever an error: without a tier to work on, the
# ones that would need it are refused.


class Offload(Operation, frozen=True, gc=False):
    """Start a copy of findable blocks to the next lower tier (prefix offload).

    The blocks are those that became findable and were not copied since, in that order, from
    number ``first`` on (modulo their number); ``blocks`` of them (0: all).  To the host from the
    device, to the disk from the host.
    """

    to: Literal["host", "disk"] = "host"
    first: Index = 0
    blocks: Index = 0


class Promote(Operation, frozen=True, gc=False):
    """Start a copy of a prompt's blocks to the next higher tier.

    To the device from the host, to the host from the disk: the blocks of the prompt that follow
    those that are there or on their way there already; ``blocks`` of them at most (0: all).
    """

    prompt: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    salt: Index = 0
    adapter: Index = 0
    media: tuple[Media, ...] = ()
    to: Literal["device", "host"] = "device"
    blocks: Index = 0


class Land(Operation, frozen=True, gc=False):
    """``parts`` more blocks of a transfer have arrived; it goes on, and nothing counts yet."""

    transfer: Index = 0
    parts: Count = 1


class Complete(Operation, frozen=True, gc=False):
    """A transfer ends: all its bytes have arrived.  Results of what was cancelled are void."""

    transfer: Index = 0


class Fail(Operation, frozen=True, gc=False):
    """A transfer ends without all its bytes: none of them counts.

    ``short_write`` and ``disk_full`` happen in a file (``file``) of a transfer to disk; in others
    they are errors.  After a ``timeout`` a notice of completion may still come: see ``Notify``.
    """

    transfer: Index = 0
    cause: Literal["error", "timeout", "short_write", "disk_full"] = "error"
    file: DiskFile = "data"


class Cancel(Operation, frozen=True, gc=False):
    """Nobody wants the result of a transfer any more: both its ends stay pinned until it ends."""

    transfer: Index = 0


class Notify(Operation, frozen=True, gc=False):
    """A notice of completion for one of the latest eight transfers that have ended, newest first.

    A duplicate after ``Complete``, late after ``Fail`` or ``Cancel``: it changes nothing.
    """

    transfer: Index = 0


class Withhold(Operation, frozen=True, gc=False):
    """So many free blocks of a tier are somebody else's from now on (0: none): as much as is free.

    What makes allocations fail at will.
    """

    tier: Tier = "device"
    blocks: Index = 0


class Corrupt(Operation, frozen=True, gc=False):
    """One byte of a block on disk is damaged: of the ``block``-th, in the order of its index.

    ``file``: in its data, which is found out when it is read, or in its entry in the index, which
    is found out when the tier comes back.
    """

    block: Index = 0
    byte: Index = 0
    file: DiskFile = "data"


class Restart(Operation, frozen=True, gc=False):
    """The disk tier dies while it writes the ``transfer``-th copy to it, and comes back.

    ``stage``: 0 before the data, 1 in the middle of the data, 2 after the data, 3 in the middle
    of the index, 4 after all of it and before it says so.
    """

    transfer: Index = 0
    stage: Annotated[int, Meta(ge=0, le=4)] = 0


class Slow(Operation, frozen=True, gc=False):
    """The disk is so many times slower from now on; above 1, look-ups in it have no answer yet."""

    factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


# -- one floor above: what drives a scheduler -----------------------------------------------------


class Arrive(Operation, frozen=True, gc=False):
    """A client sends a request to the scheduler, which will admit it when its policy says so.

    It stops after ``output`` tokens, which the policy cannot know; ``max_tokens`` is what its
    client allows (0: just as many).  The smaller ``priority``, the more urgent.  ``salt``,
    ``adapter`` and ``media`` are as for ``Admit``.
    """

    prompt: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    output: Tokens = 1
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    priority: Index = 0
    salt: Index = 0
    at_ns: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    """Virtual time before which it does not arrive: the clock moves on to it."""
    samples: Annotated[int, Meta(ge=1, le=64)] = 1
    """Outputs that its client wants of the one prompt: a request each, split off by the scheduler
    once the prompt is computed."""
    adapter: Index = 0
    media: tuple[Media, ...] = ()
    """Skipped where arrivals carry none (``Semantics.arriving_media``)."""


class Schedule(Operation, frozen=True, gc=False):
    """The scheduler plans one iteration and launches its step."""


class Run(Operation, frozen=True, gc=False):
    """So many iterations, one after another: schedule, and retire the oldest step.

    Ends early when nothing is left to run.
    """

    iterations: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


class Wait(Operation, frozen=True, gc=False):
    """So much virtual time passes; transfers that have arrived by then are delivered."""

    ns: Annotated[int, Meta(ge=0, le=1 << 62)] = 0


AnyOperation = (
    Admit
    | Grow
    | Decode
    | Reserve
    | Finish
    | Abort
    | Fork
    | Evict
    | Reset
    | Preempt
    | Resume
    | Launch
    | Retire
    | Offload
    | Promote
    | Land
    | Complete
    | Fail
    | Cancel
    | Notify
    | Withhold
    | Corrupt
    | Restart
    | Slow
    | Arrive
    | Schedule
    | Run
    | Wait
)

OPERATION_TYPES: tuple[type[Operation], ...] = (
    Admit,
    Grow,
    Decode,
    Reserve,
    Finish,
    Abort,
    Fork,
    Evict,
    Reset,
    Preempt,
    Resume,
    Launch,
    Retire,
    Offload,
    Promote,
    Land,
    Complete,
    Fail,
    Cancel,
    Notify,
    Withhold,
    Corrupt,
    Restart,
    Slow,
    Arrive,
    Schedule,
    Run,
    Wait,
)

ALL_KINDS: tuple[str, ...] = tuple(cls.__name__.lower() for cls in OPERATION_TYPES)
"""The names of all operation kinds, as they stand in a case's ``"op"`` fields."""
TIER_KINDS = (
    "offload",
    "promote",
    "land",
    "complete",
    "fail",
    "cancel",
    "notify",
    "withhold",
    "corrupt",
    "restart",
    "slow",
)
"""Those of a memory hierarchy …"""
SCHEDULER_KINDS = ("arrive", "schedule", "run", "retire", "abort", "reset", "wait")
"""… those that drive a scheduler …"""
KINDS = tuple(
    kind for kind in ALL_KINDS if kind not in (*TIER_KINDS, "arrive", "schedule", "run", "wait")
)
"""… and those that drive a cache, with or without a hierarchy below it."""


def kind_of(operation: Operation) -> str:
    """The operation's kind, as it stands in a case: ``"admit"``, ``"grow"``, …"""
    return operation.__class__.__name__.lower()
