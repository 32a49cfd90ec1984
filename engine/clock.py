"""Virtual time, and what steps and copies are assumed to cost.

Time is counted in whole nanoseconds, so that sums do not depend on the order of additions and
the same trace gives the same figures on every machine.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvproof.invariants.events import TransferKind

NS_PER_S = 1_000_000_000
"""Nanoseconds in a second."""
PS_PER_NS = 1000

Nanoseconds = Annotated[int, Meta(ge=0)]


class VirtualClock:
    """A clock that moves only when it is told to, and never back."""

    __slots__ = ("now_ns",)

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    @property
    def now_s(self) -> float:
        """The time in seconds."""
        return self.now_ns / NS_PER_S

    def advance(self, duration_ns: int) -> None:
        """Let ``duration_ns`` pass.

        Raises ``ValueError`` if it is negative.
        """
        if duration_ns < 0:
            raise ValueError(f"time cannot go back by {-duration_ns} ns")
        self.now_ns += duration_ns

    def advance_to(self, time_ns: int) -> None:
        """Move to ``time_ns``; a time that has passed already changes nothing."""
        self.now_ns = max(self.now_ns, time_ns)


class CostModel(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a step takes, linear in what it computes and reads; and a copy, in its bytes.

    The defaults are an **assumption, not a measurement**: the order of magnitude of a dense model
    of 8 billion parameters in 16 bits on one H100 (3.35 TB/s, about 400 of 989 TFLOP/s reached),
    with 128 KiB of KV per token, beside host memory over PCIe 5 and a fast local disk.  They make
    queues, preemptions and promotions plausible; they say nothing about any system's speed.
    """

    step_ns: Nanoseconds = 5_000_000
    """Each step: 16 GB of weights are read once, 4.8 ms at full bandwidth."""
    prefill_token_ns: Nanoseconds = 40_000
    """Each prompt token: 16 GFLOP at 400 TFLOP/s."""
    decode_sequence_ns: Nanoseconds = 20_000
    """Each decoding sequence: its row of the matrix products, sampling, book-keeping."""
    kv_token_read_ns: Nanoseconds = 40
    """Each cached token that a sequence of the step attends to: 128 KiB at full bandwidth."""
    host_latency_ns: Nanoseconds = 10_000
    """Each copy between device and host, and picoseconds for each of its bytes: 50 GB/s."""
    host_ps_per_byte: Nanoseconds = 20
    disk_latency_ns: Nanoseconds = 100_000
    """Each copy between host and disk, and picoseconds for each of its bytes: 5 GB/s."""
    disk_ps_per_byte: Nanoseconds = 200

    def duration_ns(self, prefill_tokens: int, decode_sequences: int, kv_tokens_read: int) -> int:
        """Duration of one step."""
        return (
            self.step_ns
            + self.prefill_token_ns * prefill_tokens
            + self.decode_sequence_ns * decode_sequences
            + self.kv_token_read_ns * kv_tokens_read
        )

    def copy_rate(self, kind: TransferKind) -> tuple[int, int]:
        """What a copy of this kind takes: nanoseconds, and picoseconds a byte."""
        if kind in ("demote", "fetch"):
            return self.disk_latency_ns, self.disk_ps_per_byte
        return self.host_latency_ns, self.host_ps_per_byte

    def copy_ns(self, kind: TransferKind, count_bytes: int) -> int:
        """Duration of one copy that has its channel to itself."""
        latency_ns, ps_per_byte = self.copy_rate(kind)
        return latency_ns + count_bytes * ps_per_byte // PS_PER_NS
