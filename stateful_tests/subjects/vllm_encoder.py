"""What vLLM's scheduler says of encoder outputs, carried out as a worker does it.

``vllm:scheduler:media`` (and ``vllm:async_scheduler:media``): prompts show media items, whose
embeddings an encoder computes before the step that reads them.  The scheduler decides when, within
a budget and in a cache of a few of them (``EncoderCacheManager``), and tells the worker.

A prompt is cut, and a request passed over, where the encoder's cache or budget is used up: so
neither an order of admissions nor that anybody is run whenever there is room is promised.  All that
is asked is what a worker asks: that what it is to read was computed, that it was not told to drop
it, and that it has room for it (CRASH); that who asks for it is served at all (LIVE); and that
prompts with other items have other keys (KEY).

Each item has one embedding, at its first token: the same item may be shown at any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvproof.invariants.operations import Arrive, Media
from kvproof.invariants.prompts import clip_media, prompt_length

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

OUTPUTS = 2
"""Embeddings that the encoder's cache holds …"""
BUDGET = 2
"""… and that it computes in a step, at most."""


def with_encoder(scheduler: Scheduler) -> None:
    """As ``MultiModalBudget`` would have it of a model that has an encoder."""
    scheduler.max_num_encoder_input_tokens = BUDGET
    manager = type(scheduler.encoder_cache_manager)
    scheduler.encoder_cache_manager = manager(cache_size=OUTPUTS)


def features_of(vllm: Any, operation: Arrive) -> list[Any]:
    """What vLLM calls the items of a prompt."""
    shown = clip_media(operation.media, prompt_length(operation.prompt))
    return [_feature(vllm, item) for item in shown]


def _feature(vllm: Any, item: Media) -> Any:
    return vllm.feature(
        data=None,
        modality="image",
        identifier=f"item-{item.item}",
        mm_position=vllm.placeholder(
            offset=item.start,
            length=item.length,
            is_embed=vllm.mask([True, *[False] * (item.length - 1)]),
        ),
    )


class EncoderWorker:
    """A worker's cache of encoder outputs; raises RuntimeError where a worker would fail."""

    def __init__(self) -> None:
        self._outputs: set[str] = set()

    def follow(
        self,
        scheduled: SchedulerOutput,
        requests: Mapping[str, Request],
        starts: Mapping[str, int],
    ) -> None:
        """One step: outputs are dropped, then computed, then read."""
        self._outputs.difference_update(scheduled.free_encoder_mm_hashes)
        computed = 0
        for name, inputs in scheduled.scheduled_encoder_inputs.items():
            self._outputs.update([requests[name].mm_features[i].identifier for i in inputs])
            computed += len(inputs)
        if computed > BUDGET:
            raise RuntimeError(f"a step computes {computed} embeddings, but may {BUDGET}")
        held = len(self._outputs)
        if held > OUTPUTS:
            raise RuntimeError(f"the worker holds {held} embeddings, and has room for {OUTPUTS}")
        for name, tokens in scheduled.num_scheduled_tokens.items():
            start = starts[name]
            for feature in requests[name].mm_features:
                read = start <= feature.mm_position.offset < start + tokens
                if read and feature.identifier not in self._outputs:
                    raise RuntimeError(
                        f"{name} reads {feature.identifier}, which was not computed, or was dropped"
                    )
