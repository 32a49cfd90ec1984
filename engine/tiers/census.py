"""Which keys the lower tiers add to what the device has (survey row M06)."""

from __future__ import annotations

from kvproof.engine.tiers.pool import Watch
from kvproof.invariants.operations import Tier

_BITS: dict[Tier, int] = {"device": 1, "host": 2, "disk": 4}
_DEVICE = _BITS["device"]


class Census:
    """Counts keys that are findable on host or disk and not on the device, at each change."""

    __slots__ = ("_tiers", "gained")

    def __init__(self) -> None:
        self._tiers: dict[bytes, int] = {}
        """The tiers in which a key is findable, a bit each."""
        self.gained = 0

    def watcher(self, tier: Tier) -> Watch:
        """What a pool of this tier has to tell."""
        bit = _BITS[tier]

        def note(key: bytes, findable: bool) -> None:
            before = self._tiers.get(key, 0)
            after = before | bit if findable else before & ~bit
            if after:
                self._tiers[key] = after
            else:
                self._tiers.pop(key, None)
            self.gained += (after > _DEVICE and not after & _DEVICE) - (
                before > _DEVICE and not before & _DEVICE
            )

        return note
