"""What is driven: the interface that an engine, or an adapter of one, offers to kvproof.

A subject declares its semantics, so that a checker demands what was promised and nothing else.
The defaults describe kvproof's own engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from msgspec import Meta, Struct

from kvproof.invariants.events import Event
from kvproof.invariants.operations import Operation, Tier
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.view import View

OffloadMeaning = Literal["none", "suspension", "prefix", "both"]
EvictionOrder = Literal["lru", "arc"]


class Configuration(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Size and limits of the cache under test; drawn by the drivers, part of each case."""

    blocks: Annotated[int, Meta(ge=1, le=1 << 24)] = 16
    """Usable blocks of the pool, in each group (or, see ``Semantics.shared_pool``, in all);
    reserved ones (a null block) come on top."""
    block_size: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Tokens per block."""
    requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    """Running requests at most."""
    run_ahead: Annotated[int, Meta(ge=1, le=8)] = 2
    """Steps in flight at most."""
    prefix_caching: bool = True
    kv_bytes_per_token: Annotated[int, Meta(ge=1)] = 131_072
    """Only scales the byte figures.  The default is the chapter's example: 32 layers, K and V,
    8 KV heads of 128, two bytes an element."""
    host_blocks: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Blocks of host memory, in each group."""
    scheduling: Limits = Limits()
    """What bounds a scheduler's iterations."""
    disk_blocks: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Blocks on disk, in each group."""
    offload: OffloadMeaning = "suspension"
    """What the tiers are for.  Suspension: preempted requests are swapped out and come back.
    Prefix: completed blocks are copied and promoted on a hit.  Recompute is always possible."""
    device_eviction: EvictionOrder = "lru"
    host_eviction: EvictionOrder = "lru"
    disk_eviction: EvictionOrder = "lru"
    host_unit_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of what moves to and from the host at once; 0: a block."""
    disk_unit_tokens: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a size below its least, and for tiers that do not fit together."""
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: at least {least} is needed")
        for name, tokens in (("host", self.host_unit_tokens), ("disk", self.disk_unit_tokens)):
            if tokens not in (0, self.block_size):
                raise ValueError(
                    f"chunk sizes must agree: {name} units of {tokens} tokens, "
                    f"device blocks of {self.block_size}"
                )
        if self.offload in ("prefix", "both") and not self.host_blocks:
            raise ValueError(f"offload {self.offload!r} needs host_blocks")
        if self.disk_blocks and self.offload not in ("prefix", "both"):
            raise ValueError(f"disk_blocks need prefix offload, not {self.offload!r}")

    @property
    def meanings(self) -> tuple[str, ...]:
        """What may become of KV that the device has no room for: for records."""
        on = {"none": (), "both": ("prefix", "suspension")}.get(self.offload, (self.offload,))
        return (*(on if self.host_blocks else ()), "recompute")

    @property
    def offloads_prefixes(self) -> bool:
        """Whether completed blocks are copied to lower tiers."""
        return self.offload in ("prefix", "both")

    @property
    def suspends(self) -> bool:
        """Whether preempted requests may be swapped out."""
        return self.offload in ("suspension", "both")


_LEAST = {
    "blocks": 1,
    "block_size": 1,
    "requests": 1,
    "run_ahead": 1,
    "kv_bytes_per_token": 1,
    "host_blocks": 0,
    "disk_blocks": 0,
    "host_unit_tokens": 0,
    "disk_unit_tokens": 0,
}


class Semantics(Struct, frozen=True):
    """What a subject promises (rows D01 to D35 of the systems survey)."""

    groups: int = 1
    """KV cache groups, each with tables and keys of its own."""
    shared_pool: bool = False
    """All groups take their blocks from one pool, which has one order of eviction: a block is in
    one group's table at most, and what one takes the others lack."""
    windows: tuple[int, ...] = ()
    """Tokens that attention looks back on, itself included, by group; 0 or nothing for all of them.
    Blocks behind the window are given back while the request goes on, at the latest when it grows,
    and even by an operation that is refused; its table then names the first reserved block in
    their rows."""
    windows_lag: bool = False
    """Blocks may stay for longer behind a window, at most until their request is given back."""
    block_sizes: tuple[int, ...] = ()
    """Tokens per block, by group; nothing: as the configuration says, in all.  Hits, and what
    becomes findable, end where a block ends in every group.  Multiples of the configuration's
    block size; not with tiers."""
    states: tuple[int, ...] = ()
    """Groups of state-space layers, each with a window of 2.  A block of theirs holds one state,
    that after the last position computed in its row.  A step reads the state before its first
    position, and writes one, after its last; rows without a state name the first reserved block.
    A state is findable where a block ends in the other groups, also inside its own; a hit needs
    just the one at its end.  Inside a block, whoever writes on in it has a copy, or leaves one
    (``KeyMoved``).  A request leaves when steps were launched for all its tokens.  With
    ``stream_order``, and not with ``exact_admission``."""
    reserved: tuple[int, ...] = (0,)
    """Block ids that no request may own: null, trash or padding blocks."""
    publishes: Literal["after_compute", "at_allocation", "at_release", "lazily"] = "after_compute"
    """When a full block becomes findable.  ``at_allocation`` is legal in an engine whose step
    writes before it reads; there content is checked once the step that owes it is retired.
    Where an output token is still being sampled, its block may wait until that step is retired.
    ``at_release``: of what a request was admitted or resumed
    with, once it is computed; of what it grew by, when it finishes.  ``lazily``: some time after it
    was computed, or never."""
    duplicates: Literal["private", "indexed", "merged"] = "private"
    """A block equal to a findable one: stays out of the index, or is indexed beside it, and a hit
    then reuses the one that was indexed first; or the findable one replaces it in the table."""
    forks_early: bool = False
    """A request is forked before its last token is computed, each child computing it anew."""
    samples: bool = False
    """An arrival may want several outputs of one prompt (``Arrive.samples``)."""
    fences_releases: bool = True
    """A request may end or be preempted while a step carries it; its blocks are not free before
    the step is retired.  Otherwise it may do so only when all its tokens are computed, or as
    ``stream_order`` says."""
    stream_order: bool = False
    """Steps run in the order of their launch, on one stream: what one writes is there for every
    step launched later.  So blocks may be given back, and handed out, while a launched step still
    uses them, and content may be hit before the step that writes it has ended.  Copies between
    tiers are in no such order, unless ``copies_after_steps`` says so: they must not touch what a
    step in flight uses.  With ``fences_releases`` blocks are kept for a step all the same, for the
    request's last one or for a later one."""
    release_order: Literal["tail_first", "any"] = "tail_first"
    """A request gives back its last block first, so that prefixes outlive their extensions."""
    eviction_order: Literal["lru", "configured", "any", "shown"] = "lru"
    """``lru``: empty blocks, in which nothing is findable, are taken first; then the cached ones
    that nobody holds, by the time of their release, oldest first.  So ``free_blocks`` lists all
    empty ones before the cached ones.  ``configured``: the cached ones in the order that the
    configuration names.  ``shown``: by their last use, longest ago first, which the view shows
    (``RecentView``): what counts as a use beside a hit and a publication is the subject's own."""
    exact_admission: bool = True
    """An operation is refused for want of blocks exactly when they are not there, and a prefix hit
    is the longest findable prefix of full blocks below the last token.  Otherwise a hit may be
    shorter, unless ``shorter_hits`` says no, and more be refused, unless ``keeps_room`` does."""
    shorter_hits: bool = True
    """Where admission is not exact: a prefix hit may be shorter than the longest one that is
    findable, in a group with a window as far back as the window goes."""
    keeps_room: bool = True
    """Where admission is not exact: an operation may be refused although its blocks are there, by
    a watermark, or for others.  Otherwise what is refused would take more than there are without a
    hit, and with all that is behind a window."""
    exact_eviction: bool = True
    """``Evict`` takes just as many blocks as it asks for, if there are so many.  Otherwise it may
    take more: what is cached goes in pieces of several blocks, each told by an event of its own,
    and no further piece goes when there is enough.  (Where a group has a window, pieces may take
    some of another group with them: only what is too much in all of them is too much.)"""
    eviction_margin: int = 0
    """Blocks that an eviction in pieces, made for room, may take beyond what is lacking, for each
    request that the operation serves."""
    preemption_room: int = 0
    """Tokens for which a preemption makes room, in pieces, for each request that still runs."""
    oldest_first: bool = True
    """A step serves requests by their first admission; only its last one may be cut short."""
    chunks: bool = True
    """A launch honours its budget, computing long prompts in chunks."""
    exports: tuple[str, ...] = ()
    """Names of the metrics that ``View.metrics`` exports and that the model recomputes."""
    exports_per_request: tuple[str, ...] = ()
    """The same for ``View.request_metrics``."""
    runs_ahead: bool = True
    """A step may be launched while another is in flight."""
    separates_media: bool = True
    """Media items are part of the keys, and of what an admission may carry."""
    arriving_media: bool = False
    """Of a scheduler: an arrival may carry media items."""
    adapters: int = 0
    """Of a scheduler: different adapters of the requests that run, at most; 0: any number.  One
    whose adapter is one too many is passed over, whatever its turn; who has none needs none."""
    slots: bool = True
    """Blocks may be given for part of a prompt or in advance (``slots``), and steps be told what
    to compute (``items``)."""
    swaps: bool = True
    """Preempted requests may be swapped out to host blocks."""
    tiers: bool = False
    """There is a memory hierarchy, as the configuration describes it; its view is a TieredView."""
    disk: bool = True
    """A hierarchy may have a disk below the host."""
    needs_host: bool = False
    """Without a host tier there is nothing to check: every run has one."""
    exact_tiers: bool = True
    """Copies between tiers are started, of just the blocks that are next, or refused exactly when
    they should be; look-ups answer what the tiers have.  Otherwise a subject chooses for itself
    what it copies, and when: what it does start must still be right."""
    disk_survives: bool = True
    """What was wholly written to the disk is found there after a restart."""
    copies_hold: bool = True
    """The device's end of a copy is held while it is in flight.  Otherwise it is not: a copy up is
    for a request whose table has its targets already, and which does not run before it has ended;
    what a copy down reads may be given back, and handed out, but not be written before it has been
    copied.  So each block is compared, when it is copied, with what its key stands for."""
    copies_after_steps: bool = False
    """A copy begins when the steps launched before it have run, as one does that waits for their
    stream.  Otherwise, in stream order, it must not touch what these use."""
    resets_tiers: bool = True
    """A reset empties all tiers, and is refused while a copy is in flight.  Otherwise it empties
    the device alone, and is refused while a block of that one is held: what lies below is found as
    before."""
    tier_bytes: bool = True
    """The view tells what is really in a block of any tier (``TieredView.tier_content``)."""
    host_order: Literal["configured", "any"] = "configured"
    """As ``eviction_order``, for the blocks of the host …"""
    disk_order: Literal["configured", "any"] = "configured"
    """… and of the disk."""

    def __post_init__(self) -> None:
        """Raises ValueError for a word that is not what its type says, or does not fit others."""
        for word, (kind, choices) in _WORDS.items():
            said = getattr(self, word)
            if not isinstance(said, kind) or (choices and said not in choices):
                needed = " or ".join(map(repr, choices)) or f"a value of type {kind.__name__}"
                raise ValueError(f"{word}={said!r}: {needed} is needed")
        if self.block_sizes and (len(self.block_sizes) != self.groups or self.tiers):
            raise ValueError(
                f"block_sizes={self.block_sizes!r}: one for each of {self.groups} groups is "
                "needed, and no tiers"
            )

        if self.states and (
            self.exact_admission
            or not self.stream_order
            or any(self.windows[group : group + 1] != (2,) for group in self.states)
        ):
            raise ValueError(
                f"states={self.states!r}: a window of 2 for each is needed, stream_order, and no "
                "exact_admission"
            )

    def promises_order(self, tier: Tier) -> bool:
        """Whether evictions on that tier follow an order that can be told from events."""
        orders: dict[Tier, str] = {
            "device": self.eviction_order,
            "host": self.host_order,
            "disk": self.disk_order,
        }
        return orders[tier] not in ("any", "shown")

    def features(self) -> frozenset[str]:
        """What situations may need beside operations, by name."""
        names = {
            "fences": self.fences_releases or self.stream_order,
            "chunks": self.chunks,
            "runs-ahead": self.runs_ahead,
            "media": self.separates_media,
            "arriving-media": self.arriving_media,
            "adapters": self.adapters > 0,
            "slots": self.slots,
            "swaps": self.swaps,
            "tiers": self.tiers,
            "disk": self.disk,
            "needs-host": self.needs_host,
            "samples": self.samples,
        }
        return frozenset(name for name, has in names.items() if has)


def _allowed(kind: Any) -> tuple[type, tuple[str, ...]]:
    """What a word's value must be; and the choices, if there are some."""
    if get_origin(kind) is Literal:
        return str, get_args(kind)
    return get_origin(kind) or kind, ()


_WORDS = {word: _allowed(kind) for word, kind in get_type_hints(Semantics).items()}


@runtime_checkable
class Subject(Protocol):
    """One fresh instance is built per case; it must be deterministic."""

    name: str
    """As on the command line: ``engine``, ``vllm:manager``."""
    semantics: Semantics
    configuration: Configuration
    capabilities: frozenset[str]
    """Operation kinds that the subject can do; others are answered with *skipped*."""

    def apply(self, operation: Operation) -> Outcome:
        """Do one operation, all of it or nothing.

        Raises only when the subject itself is broken: that is reported as a finding (CRASH).
        """
        ...

    def drain_events(self) -> Sequence[Event]:
        """The state changes since the last call, in order."""
        ...

    def view(self) -> View:
        """A live, read-only view; valid until the next ``apply``."""
        ...
