"""Requests of SGLang's, and batches of them, as its scheduler keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvproof.stateful_tests.subjects.told_cache import LiveRequest


class SglangLive(LiveRequest):
    """A live request of SGLang's."""

    __slots__ = ("asked", "scheduled")

    def __init__(self, number: int, request: Any) -> None:
        super().__init__(number, request)
        self.asked = 0
        """Tokens that it was admitted or resumed with."""
        self.scheduled = 0
        """Tokens that are computed, or that steps in flight compute."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.origin_input_ids)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.request.output_ids)


class Batch(SimpleNamespace):
    """What SGLang's allocation reads of a batch of requests."""

    device = "cpu"
    hisparse_coordinator = None
    model_config = SimpleNamespace(is_encoder_decoder=False)

    def maybe_evict_swa(self) -> None:
        """There are no windows, or they have slid already."""

    def is_dllm(self) -> bool:
        return False
