"""A request: its tokens, its block tables, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from kvproof.engine.keys import block_key, media_part, root_key
from kvproof.invariants.operations import Media
from kvproof.invariants.outcomes import Answer


class Request:
    """One generation job.

    Positions ``0..computed`` have their KV in the blocks of ``tables``; ``computed..scheduled``
    are being computed by steps in flight; the rest of ``tokens`` has slots, but no step yet.
    """

    __slots__ = (
        "adapter",
        "block_size",
        "cached_tokens",
        "computed",
        "epoch",
        "host_tables",
        "id",
        "input_tokens",
        "keys",
        "last_step",
        "lookup",
        "media",
        "published",
        "running",
        "salt",
        "scheduled",
        "steps_in_flight",
        "suspended",
        "swapped",
        "tables",
        "tokens",
        "transfers",
    )

    def __init__(
        self,
        number: int,
        tokens: array[int],
        *,
        groups: int,
        block_size: int,
        salt: int,
        adapter: int,
        media: tuple[Media, ...],
    ) -> None:
        self.id = number
        self.tokens = tokens
        self.input_tokens = len(tokens)
        self.block_size = block_size
        self.salt = salt
        self.adapter = adapter
        self.media = media
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        # The root first, then the key of every full block; filled as far as somebody asked.
        self.keys = [[root_key(group, salt, adapter)] for group in range(groups)]
        self.published = 0
        """Full blocks that were offered to the prefix cache (or came from it)."""
        self.computed = 0
        self.scheduled = 0
        self.epoch = 0
        """Times it was preempted; results of steps of an older epoch are void."""
        self.running = False
        self.swapped = False
        self.host_tables: list[list[int]] = []
        """From its suspension until it is back: per group, the host slots with its tokens."""
        self.suspended = 0
        """How many computed tokens these hold."""
        self.transfers: tuple[int, ...] = ()
        """Copies of its blocks in flight: to the host while it is swapped, else back from there."""
        self.lookup: Answer | Literal[""] = ""
        """What the tiers below the device said at its latest admission."""
        self.steps_in_flight = 0
        self.last_step = -1
        self.cached_tokens = 0

    @property
    def loading(self) -> bool:
        """Whether it runs already, but its KV is on its way back: nothing of it is computed."""
        return self.running and bool(self.transfers)

    def block_keys(self, group: int, count: int) -> Sequence[bytes]:
        """Keys of the first ``count`` full blocks, after the root at index 0."""
        keys = self.keys[group]
        size, tokens, media = self.block_size, self.tokens, self.media
        key = keys[-1]
        for end in range(len(keys) * size, count * size + 1, size):
            extra = media_part(media, end - size, end) if media else b""
            key = block_key(key, tokens[end - size : end], extra)
            keys.append(key)
        return keys
