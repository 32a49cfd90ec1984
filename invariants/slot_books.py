"""The checkers' ledger of one lower tier's blocks, called slots, and of single transfers.

They are told by :mod:`kvproof.invariants.tier_books`, and nothing here judges.  Content is named by
its tag (see :mod:`kvproof.invariants.tags`), so that a prompt can be looked up without its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.events import TransferKind, TransferStarted
from kvproof.invariants.operations import Tier
from kvproof.invariants.orders import Order, order_of
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import EvictionOrder

if TYPE_CHECKING:
    from kvproof.invariants.request_books import RequestModel

ENDS: dict[TransferKind, tuple[Tier, Tier]] = {
    "store": ("device", "host"),
    "demote": ("host", "disk"),
    "fetch": ("disk", "host"),
    "promote": ("host", "device"),
    "swap_out": ("device", "host"),
    "swap_in": ("host", "device"),
}
"""Where each kind of transfer copies from, and to."""


class TransferModel:
    """A transfer in flight, as it was announced."""

    __slots__ = (
        "bytes",
        "cancelled",
        "copied",
        "epoch",
        "group",
        "keys",
        "kind",
        "landed",
        "number",
        "outdated",
        "request",
        "source",
        "sources",
        "tags",
        "target",
        "targets",
        "tokens",
    )

    def __init__(
        self, event: TransferStarted, tags: list[int], request: RequestModel | None
    ) -> None:
        self.number = event.transfer
        self.kind = event.kind
        self.source, self.target = ENDS[event.kind]
        self.group = event.group
        self.sources = list(event.sources)
        self.targets = list(event.targets)
        self.keys = list(event.keys)
        self.tags = tags
        """Of the blocks' last positions; none in swaps."""
        self.request = request
        self.tokens = 0 if request is None else request.suspended
        """Of the request, that are moved."""
        self.epoch = 0 if request is None else request.epoch
        self.landed = 0
        self.cancelled = False
        self.outdated = False
        """Whether what it moves was computed before the prefix cache was reset."""
        self.bytes = b""
        """What the sources held when it started …"""
        self.copied = 0
        """… and how many of them have been copied (XFER moves the bytes)."""

    @property
    def void(self) -> bool:
        """Whether its result means nothing any more: cancelled, or its request went on without, or
        has lost what it moves."""
        request = self.request
        return self.cancelled or (
            request is not None
            and not self.loads
            and (
                request.epoch != self.epoch
                or not request.suspended
                or (self.number not in request.departing and self.number not in request.loading)
            )
        )

    @property
    def loads(self) -> bool:
        """Whether it brings findable blocks into the table of a request that waits for them."""
        return self.kind == "promote" and self.request is not None

    @property
    def on_disk(self) -> bool:
        return self.kind in ("demote", "fetch")


class TierBooks:
    """Ledger of one tier's slots, of one KV cache group."""

    __slots__ = (
        "_shadow",
        "block_size",
        "busy",
        "capacity",
        "corrupt",
        "emptied",
        "evicting",
        "group",
        "key_of",
        "order",
        "owned",
        "owner",
        "pending",
        "pins",
        "queue",
        "slot_of",
        "slot_of_key",
        "tag_of",
        "tier",
        "touched",
        "touched_keys",
        "unlisted",
        "withheld",
    )

    def __init__(
        self, tier: Tier, group: int, capacity: int, eviction: EvictionOrder, block_size: int
    ) -> None:
        self.tier = tier
        self.group = group
        self.capacity = capacity
        self.block_size = block_size
        self.key_of: dict[int, bytes] = {}
        """Findable slots."""
        self.tag_of: dict[int, int] = {}
        self.slot_of_key: dict[bytes, int] = {}
        """The index: key to slot, in the order in which they became findable …"""
        self.slot_of: dict[int, int] = {}
        """… and by the tag of what is findable there."""
        self.pending: dict[int, int] = {}
        """Tags of what is on its way here, and the transfer that brings each."""
        self.owner: dict[int, int] = {}
        """Slots that hold a suspended request's blocks, which are not findable …"""
        self.owned: dict[int, list[int]] = {}
        """… and by request, row by row."""
        self.pins = [0] * capacity
        """By slot: ends of transfers in flight."""
        self.busy: set[int] = set()
        """Pinned or owned."""
        self.order: Order = order_of(eviction, capacity)
        """Findable and not busy, the next victim first."""
        self.withheld = 0
        self.corrupt: set[int] = set()
        """Findable slots whose bytes are damaged …"""
        self.unlisted: set[int] = set()
        """… and those whose entry in the index on disk is: a restart does not find them."""
        self.queue: dict[int, None] = {}
        """Findable slots that were not copied to the tier below since, in that order."""
        self.evicting: list[int] = []
        """Evicted under pressure, not yet handed out."""
        self.emptied: list[int] = []
        """Slots that the latest event left without a holder and with nothing findable."""
        self.touched: list[int] = []
        self.touched_keys: list[bytes] = []
        self._shadow: Shadow | None = None

    @property
    def shadow(self) -> Shadow:
        """What the slots hold; made when first used."""
        if self._shadow is None:
            self._shadow = Shadow(self.capacity, self.block_size)
        return self._shadow

    @property
    def free(self) -> int:
        """Slots that a transfer may take: empty ones and evictable ones, less the withheld."""
        return self.capacity - len(self.busy) - self.withheld

    @property
    def empty(self) -> int:
        """Slots with nothing in them."""
        return self.capacity - len(self.busy) - len(self.order)

    def room(self, protected: Iterable[int]) -> int:
        """Slots that can be taken without evicting one of these."""
        return self.free - len([slot for slot in protected if slot in self.order])

    def withhold(self, slots: int) -> None:
        """So many of the free slots, or all, are somebody else's from now on."""
        self.withheld = min(slots, self.capacity - len(self.busy))

    def awaits_or_has(self, tag: int) -> bool:
        return tag in self.slot_of or tag in self.pending

    def pin(self, slots: Sequence[int]) -> None:
        """One more transfer uses each."""
        for slot in slots:
            self.pins[slot] += 1
            self.order.remove(slot)
        self.busy.update(slots)
        self.touched += slots

    def unpin(self, slots: Sequence[int], used: bool) -> None:
        """One transfer less uses each; the last slot first, so that heads become most recent."""
        self.emptied = []
        for slot in reversed(slots):
            if self.pins[slot]:
                self.pins[slot] -= 1
                if not self.pins[slot] and slot not in self.owner:
                    self._vacate(slot, used)
        self.touched += slots

    def _vacate(self, slot: int, used: bool) -> None:
        """Nothing holds the slot any more."""
        self.busy.discard(slot)
        if slot in self.key_of:
            self.order.insert(slot, self.key_of[slot], used)
        else:
            self.emptied.append(slot)

    def own(self, slots: Sequence[int], request: int) -> None:
        self.owned[request] = list(slots)
        self.owner.update(dict.fromkeys(slots, request))
        self.busy.update(slots)

    def disown(self, request: int) -> None:
        """What it had is free, or will be when its transfer ends."""
        self.emptied = []
        slots = self.owned.pop(request, ())
        for slot in slots:
            del self.owner[slot]
            if not self.pins[slot]:
                self._vacate(slot, used=False)
        self.touched += slots

    def touch(self, tags: Iterable[int]) -> None:
        """These were asked for: the evictable ones are recent now, the first the most."""
        slot_of, order = self.slot_of, self.order
        for slot in reversed([slot_of[tag] for tag in tags if tag in slot_of]):
            if slot in order:
                order.remove(slot)
                order.insert(slot, self.key_of[slot])

    def publish(self, slots: Sequence[int], keys: Sequence[bytes], tags: Sequence[int]) -> None:
        """These are findable from now on."""
        for slot, key, tag in zip(slots, keys, tags, strict=True):
            self.key_of[slot] = key
            self.tag_of[slot] = tag
            self.slot_of_key[key] = slot
            self.slot_of[tag] = slot
            self.corrupt.discard(slot)
            self.unlisted.discard(slot)
        self.touched_keys += keys

    def unpublish(self, slots: Sequence[int]) -> None:
        """These are not findable any more."""
        self.emptied = []
        for slot in slots:
            key = self.key_of.pop(slot, None)
            if key is None:
                continue  # VALID
            self.slot_of_key.pop(key, None)
            self.slot_of.pop(self.tag_of.pop(slot), None)
            self.queue.pop(slot, None)
            self.corrupt.discard(slot)
            self.unlisted.discard(slot)
            if slot not in self.busy:
                self.emptied.append(slot)
        self.touched += slots

    def await_(self, tags: Iterable[int], transfer: int) -> None:
        self.pending.update(dict.fromkeys(tags, transfer))

    def await_no_more(self, transfer: TransferModel) -> None:
        for tag in transfer.tags:
            if self.pending.get(tag) == transfer.number:
                del self.pending[tag]
