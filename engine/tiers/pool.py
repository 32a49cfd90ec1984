"""The blocks of one lower tier and one KV cache group, called slots: accounting only.

A slot is in exactly one of these classes:

* free: nothing in it;
* pending: a transfer is about to fill it, and has reserved its key, so that no other does;
* ready: findable under its key.  Evictable as long as no transfer pins it;
* owned: it holds a suspended request's KV, findable by nobody.

Whatever its class, a slot that a transfer reads or writes is pinned until that transfer ends, and
is not handed out: it is free at the later of the two, when nobody has it and nobody uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Literal

from kvproof.engine.eviction import EvictionPolicy
from kvproof.engine.pool import PoolExhaustedError
from kvproof.invariants.events import Event, SlotsEvicted

Watch = Callable[[bytes, bool], None]
"""Is told each key that becomes findable (true) or unfindable."""
Cause = Literal["pressure", "request", "reset", "corrupt"]


class TierPool:
    """``blocks`` slots, ids 0 to ``blocks - 1``.  Raises ValueError if there is none."""

    __slots__ = (
        "_events",
        "_free",
        "_policy",
        "evictions",
        "generations",
        "group",
        "index",
        "keys",
        "owners",
        "pending",
        "pins",
        "tier",
        "unsaved",
        "watch",
        "withheld",
    )

    def __init__(
        self,
        tier: Literal["host", "disk"],
        blocks: int,
        group: int,
        policy: EvictionPolicy,
        events: list[Event],
    ) -> None:
        if blocks < 1:
            raise ValueError(f"a {tier} tier has at least one block, not {blocks}")
        self.tier = tier
        self.group = group
        self.keys: list[bytes | None] = [None] * blocks
        self.index: dict[bytes, int] = {}
        self.pending: dict[bytes, int] = {}
        self.unsaved: dict[bytes, None] = {}
        """What became findable here and was not offered to the tier below since."""
        self.owners: dict[int, int] = {}
        """The request that a slot belongs to."""
        self.pins = [0] * blocks
        self.generations = [0] * blocks
        """Times that a slot was handed out: tells a slot from itself in another use."""
        self.withheld = 0
        self.evictions = 0
        """By pressure or on request."""
        self.watch: Watch | None = None
        self._free = list(range(blocks - 1, -1, -1))
        self._policy = policy
        self._events = events

    # -- room --------------------------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Slots that may be taken: free ones and evictable ones, but for what is withheld."""
        return len(self._free) + len(self._policy) - self.withheld

    def room(self, protect: Collection[int] = ()) -> int:
        """Slots that may be taken without evicting a protected one."""
        protected = len([slot for slot in protect if self._evictable(slot)])
        return self.free_count - protected

    def count_evictable(self, slots: Iterable[int]) -> int:
        """How many of ``slots`` would leave the free ones when pinned."""
        return len([slot for slot in slots if self._evictable(slot)])

    def _evictable(self, slot: int) -> bool:
        return self.keys[slot] is not None and not self.pins[slot]

    def withhold(self, count: int) -> int:
        """So many free slots are somebody else's from now on, or as many as are free."""
        self.withheld = 0
        self.withheld = min(count, self.free_count)
        return self.withheld

    def victims(self) -> Iterable[int]:
        """Evictable slots, the next victim first."""
        return iter(self._policy)

    def lacking(self, count: int, protect: Collection[int] = ()) -> list[int]:
        """The slots that have to be evicted before so many can be taken."""
        candidates = (slot for slot in self._policy if slot not in protect)
        return list(islice(candidates, max(0, count - len(self._free))))

    def take(self, count: int, protect: Collection[int] = ()) -> list[int]:
        """Hand out slots, pinned: free ones first, then the next victims."""
        room = self.room(protect)
        if count > room:
            raise PoolExhaustedError(f"{count} {self.tier} blocks wanted, {room} free")
        victims = self.lacking(count, protect)
        slots = [self._free.pop() for _ in range(count - len(victims))]
        self._drop(victims, "pressure")
        slots += victims
        for slot in slots:
            self.pins[slot] = 1
            self.generations[slot] += 1
        return slots

    # -- what is findable --------------------------------------------------------------------------

    def awaits_or_has(self, key: bytes) -> bool:
        """Whether this key is findable here, or about to be."""
        return key in self.index or key in self.pending

    def reserve(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """These keys are on their way into these slots."""
        self.pending.update(zip(keys, slots, strict=True))

    def unreserve(self, keys: Sequence[bytes]) -> None:
        """They are not, or not any more."""
        for key in keys:
            del self.pending[key]

    def publish(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Reserved keys have arrived: findable from now on."""
        self.unreserve(keys)
        for slot, key in zip(slots, keys, strict=True):
            self._appear(slot, key)

    def _appear(self, slot: int, key: bytes) -> None:
        self.index[key] = slot
        self.keys[slot] = key
        if self.watch is not None:
            self.watch(key, True)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These keys were asked for: of those that are evictable, the first is evicted last."""
        for key in reversed(keys):
            slot = self.index.get(key)
            if slot is not None and not self.pins[slot]:
                self._policy.remove(slot)
                self._policy.insert(slot, key)

    def evict(self, count: int, cause: Literal["request", "reset"]) -> int:
        """Free up to ``count`` evictable slots; says how many."""
        slots = list(islice(self._policy, count))
        self.drop(slots, cause)
        return len(slots)

    def drop(self, slots: Sequence[int], cause: Cause) -> None:
        """What is in these evictable slots is not findable any more, and they are free."""
        self._drop(slots, cause)
        self._free += reversed(slots)

    def _drop(self, slots: Sequence[int], cause: Cause) -> None:
        if not slots:
            return
        leave = self._policy.forget if cause == "corrupt" else self._policy.evicted
        keys = []
        for slot in slots:
            leave(slot)
            keys.append(self._disappear(slot))
        if cause in ("pressure", "request"):
            self.evictions += len(slots)
        self._events.append(SlotsEvicted(self.tier, self.group, list(slots), keys, cause))

    def _disappear(self, slot: int) -> bytes:
        key = self.keys[slot]
        assert key is not None, "what is evicted has a key"
        del self.index[key]
        self.keys[slot] = None
        if self.watch is not None:
            self.watch(key, False)
        return key

    def rebuild(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Exactly these slots are ready, in this order; none is pinned."""
        for slot in list(self.index.values()):
            self._policy.forget(slot)
            self._disappear(slot)
        self._free = list(range(len(self.keys) - 1, -1, -1))
        for slot, key in entries:
            self._appear(slot, key)
            self._policy.insert(slot, key)
        self._free = [slot for slot in self._free if self.keys[slot] is None]

    # -- who uses a slot ---------------------------------------------------------------------------

    def pin(self, slots: Sequence[int]) -> None:
        """A transfer uses these slots: they cannot be evicted."""
        for slot in slots:
            if self._evictable(slot):
                self._policy.remove(slot)
            self.pins[slot] += 1

    def unpin(self, slots: Sequence[int], used: bool) -> None:
        """A transfer that used them has ended; tail first, so that a prefix is evicted last."""
        for slot in reversed(slots):
            self.pins[slot] -= 1
            self._settle(slot, used)

    def own(self, slots: Sequence[int], request: int) -> None:
        """These slots belong to a suspended request."""
        self.owners.update(dict.fromkeys(slots, request))

    def disown(self, slots: Sequence[int]) -> None:
        """They do not any more."""
        for slot in reversed(slots):
            del self.owners[slot]
            self._settle(slot, used=True)

    def _settle(self, slot: int, used: bool) -> None:
        """A slot that nobody uses and nobody has is free; one that is findable is evictable."""
        if self.pins[slot] or slot in self.owners:
            return
        key = self.keys[slot]
        if key is None:
            self._free.append(slot)
        else:
            self._policy.insert(slot, key, used)
