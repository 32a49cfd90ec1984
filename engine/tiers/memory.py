"""What is really in the blocks of device and host: a label for the bytes of each.

A full block's label is the key under which its content was computed, an unfinished one's says how
far which key's block has come.  Steps write labels, copies move them, and a label stays until it is
overwritten, as bytes do.  It is the smallest storage in which a copy from or to the wrong place
leaves the wrong thing behind, whatever the engine says about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.operations import Tier

LABEL_BYTES = 32
PAYLOAD_BYTES = 64
"""A block's bytes on disk: its label, repeated."""
_UNWRITTEN = bytes(LABEL_BYTES)
NOBODYS = b"\xff" * LABEL_BYTES
"""What a step leaves behind whose request has gone on without it."""


class Memory:
    """Labels by tier, group and block."""

    __slots__ = ("cells",)

    def __init__(self, groups: int, device_blocks: int, host_blocks: int) -> None:
        self.cells: dict[Tier, list[list[bytes]]] = {
            "device": [[_UNWRITTEN] * (device_blocks + 1) for _ in range(groups)],
            "host": [[_UNWRITTEN] * host_blocks for _ in range(groups)],
        }

    def write(self, tier: Tier, group: int, blocks: Sequence[int], labels: Sequence[bytes]) -> None:
        """The content of these blocks is computed, or has arrived."""
        cells = self.cells[tier][group]
        for block, label in zip(blocks, labels, strict=True):
            cells[block] = label

    def read(self, tier: Tier, group: int, blocks: Sequence[int]) -> list[bytes]:
        """The labels that are there now."""
        cells = self.cells[tier][group]
        return [cells[block] for block in blocks]


def unfinished(parent: bytes, tokens: int) -> bytes:
    """The label of a block with its first ``tokens`` tokens, behind the one of key ``parent``."""
    return parent[4:] + tokens.to_bytes(4, "little")


def payload(label: bytes) -> bytes:
    """A block's bytes, as they are written to disk."""
    return label * (PAYLOAD_BYTES // LABEL_BYTES)


def label(payload: bytes) -> bytes:
    """What such bytes are the content of."""
    return payload[:LABEL_BYTES]
