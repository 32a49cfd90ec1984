"""The names of transformers that its adapter uses, and how its engine is configured.

See :mod:`kvproof.stateful_tests.subjects.transformers_scheduler`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from kvproof.invariants.operations import Arrive
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.errors import unavailable
from kvproof.stateful_tests.subjects.overheard_scheduler import STOP
from kvproof.stateful_tests.subjects.transformers_model import SHAPE, WINDOW, TinyModel

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import RequestState

NAME = "transformers"
SUPPORTED = (5, 24)
"""The minor version whose internals this adapter knows."""
Kind = Literal["", "offload", "hybrid"]
"""Of a subject: with full attention, with a host beside it, or with a window beside it."""
POLICIES = ("fifo", "prefill_first")
"""The schedulers of transformers; the first one is its default."""

PREFIX = "request-"
"""The names of requests in transformers; their rank of arrival follows."""
CHILD = "__child#"
"""What transformers puts between the name of a request and the numbers of those forked from it."""

RESERVED_SECTORS = 2
"""Trash: padding reads the one and writes the other."""
LEAST_PAGE = 4
"""Tokens of a page, at least."""
UNBOUNDED = 1 << 20
HOST_BLOCKS = 8
"""Where a configuration has none, and there has to be a host."""
_TOKEN_BYTES = 64
"""Of the KV of a token."""
_GIB = 1 << 30


@lru_cache(maxsize=1)
def load_transformers() -> Transformers:
    """Import transformers, once per process; raises SubjectUnavailable where that cannot be."""
    supported = ".".join(map(str, SUPPORTED))
    needed = (NAME, "transformers", supported, "vllm-env")
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise unavailable(*needed, "which is not installed") from None
    if found.split(".")[:2] != supported.split("."):
        raise unavailable(*needed, f"but {found} is installed")
    try:
        return Transformers()
    except ImportError as error:
        raise unavailable(*needed, f"but {found} cannot be imported ({error})") from error


class Transformers:
    """The names of transformers that the adapter uses, and two tiny models for all subjects."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.getLogger("transformers").setLevel(logging.CRITICAL)

        import torch
        from transformers import (
            GenerationConfig,
            LlamaConfig,
            LlamaForCausalLM,
            Qwen2Config,
            Qwen2ForCausalLM,
        )
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import continuous_api, offloading_manager
        from transformers.generation.continuous_batching.requests import (
            RequestState,
            RequestStatus,
        )

        torch.set_num_threads(1)  # threads of so small a model only wait for each other
        self.manager = continuous_api.ContinuousBatchingManager
        self.config = ContinuousBatchingConfig
        self._offloading: Any = offloading_manager
        self.torch: Any = torch
        self.state = RequestState
        self.status = RequestStatus
        self.generation = GenerationConfig(
            max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            full = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, head_dim=4, **SHAPE))
            hybrid = Qwen2ForCausalLM(
                Qwen2Config(
                    num_hidden_layers=2,
                    hidden_size=4,
                    layer_types=["sliding_attention", "full_attention"],
                    use_sliding_window=True,
                    sliding_window=WINDOW,
                    **{name: size for name, size in SHAPE.items() if name != "hidden_size"},
                )
            )
        self.full = TinyModel(torch, full, (0,))
        self.hybrid = TinyModel(torch, hybrid, (WINDOW, 0))

        # The engine, but for its destructor, which collects all garbage of the process.
        engine: Any = continuous_api.ContinuousBatchProcessor
        self._processor = type("Processor", (engine,), {"__del__": lambda self: None})

    def new_processor(
        self, configuration: Configuration, policy: str, batch: int, model: TinyModel
    ) -> ContinuousBatchProcessor:
        """A whole engine over a pool of its own, as its manager's thread would make it.

        ``batch``: requests in a step, at most.
        """
        layers = len(model.windows)
        blocks, size = configuration.host_blocks, configuration.block_size
        manager = self.manager(
            model.model,
            self.generation,
            self.config(
                page_size=size,
                num_blocks=configuration.blocks // layers,
                max_batch_tokens=configuration.scheduling.token_budget,
                max_requests_per_batch=batch,
                allow_block_sharing=configuration.prefix_caching or layers > 1,
                scheduler_type=policy,
                cpu_offload_space=blocks * size * _TOKEN_BYTES / _GIB,
            ),
        )
        with own_memory(self._offloading):
            processor: Any = manager._create_batch_processor()
        processor.__class__ = self._processor
        return processor

    def new_request(self, number: int, operation: Arrive) -> RequestState:
        """A request as a client of the engine would send it."""
        return self.state(
            request_id=f"{PREFIX}{number}",
            initial_tokens=prompt_tokens(operation.prompt).tolist(),
            streaming=True,
            max_new_tokens=max(operation.output, operation.max_tokens),
            eos_token_id=STOP,
            num_children=operation.samples - 1,
        )


class _Memory:
    """torch, but for what it allocates: it is not pinned, and starts as bytes that are no number.

    Pinning only works beside an accelerator.  And what an allocator gives back may be the right
    bytes, from an earlier run of the same case, so that whoever forgets to write them is not seen.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *size: Any, pin_memory: bool = False, **named: Any) -> Any:
        allocated = self._torch.empty(*size, **named)
        allocated.view(self._torch.uint8).fill_(0xFF)
        return allocated


@contextmanager
def own_memory(module: Any) -> Iterator[None]:
    """Meanwhile a module of transformers allocates what is not pinned, and holds no number."""
    torch = module.torch
    module.torch = _Memory(torch)
    try:
        yield
    finally:
        module.torch = torch


def blocks_per_sector(size: int) -> int:
    """Sectors are multiples of 128 bytes."""
    return 1 + size * _TOKEN_BYTES // 64 % 2


def fitted(configuration: Configuration, kind: Kind = "") -> Configuration:
    """As transformers would accept it, and with a budget that matters.

    Offloading, it has a host; hybrid, blocks for two layers, and no prefix cache.
    """
    size, blocks = max(configuration.block_size, LEAST_PAGE), configuration.blocks
    layers = 2 if kind == "hybrid" else 1
    blocks += blocks % max(blocks_per_sector(size), layers)
    host = (configuration.host_blocks or HOST_BLOCKS) if kind == "offload" else 0
    pool, limits = blocks // layers * size, configuration.scheduling
    budget = limits.token_budget if limits.token_budget < pool else max(1, pool // 2)
    return Configuration(
        blocks=blocks,
        block_size=size,
        requests=UNBOUNDED,
        run_ahead=1,
        prefix_caching=configuration.prefix_caching and layers == 1,
        kv_bytes_per_token=configuration.kv_bytes_per_token,
        host_blocks=host + host % blocks_per_sector(size),
        scheduling=replace(
            Limits(),
            token_budget=budget,
            max_model_tokens=min(limits.max_model_tokens, pool),
        ),
    )
