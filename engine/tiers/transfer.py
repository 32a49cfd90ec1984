"""A copy of blocks between two tiers, while it is in flight, and the notice of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvproof.engine.request import Request
from kvproof.invariants.events import TransferKind
from kvproof.invariants.operations import Tier

ENDS: dict[TransferKind, tuple[Tier, Tier]] = {
    "store": ("device", "host"),
    "demote": ("host", "disk"),
    "fetch": ("disk", "host"),
    "promote": ("host", "device"),
    "swap_out": ("device", "host"),
    "swap_in": ("host", "device"),
}
"""From where to where."""


class Transfer:
    """Blocks of one group on their way; the n-th source is copied to the n-th target."""

    __slots__ = (
        "cancelled",
        "generations",
        "group",
        "id",
        "keys",
        "kind",
        "landed",
        "request",
        "sources",
        "targets",
    )

    def __init__(
        self,
        number: int,
        kind: TransferKind,
        group: int,
        sources: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[bytes] = (),
        request: Request | None = None,
    ) -> None:
        self.id = number
        self.kind = kind
        self.group = group
        self.sources = list(sources)
        self.targets = list(targets)
        self.keys = list(keys)
        self.request = request
        """The suspended one; its ``transfers`` name this one as long as the result is wanted."""
        self.generations: list[list[int]] = []
        """Of the slots at the two ends, at the start: they must not have changed at a landing."""
        self.landed = 0
        """Blocks that have arrived."""
        self.cancelled = False

    @property
    def on_disk(self) -> bool:
        """Whether one of its ends is a file."""
        return "disk" in ENDS[self.kind]


class Notice(NamedTuple):
    """What a transfer that has ended may still send: that it is complete."""

    transfer: int
    kind: TransferKind
    group: int
    target: int
    """The first slot that it wrote, which may be in another use by now."""
