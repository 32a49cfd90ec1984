"""The names of transformers that its adapter uses, and how its engine is configured.

See :mod:`kvproof.stateful_tests.subjects.transformers_scheduler`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvproof.invariants.operations import Arrive
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.errors import unavailable
from kvproof.stateful_tests.subjects.overheard_scheduler import STOP

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import RequestState

NAME = "transformers"
SUPPORTED = (5, 24)
"""The minor version whose internals this adapter knows."""
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
_VOCABULARY = 64
_TOLERANCE = 1e-9
_OF_LOGITS = 1e-6
"""Tolerance of logits, which the engine rounds to 32 bits."""


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
    """The names of transformers that the adapter uses, and one tiny model for all subjects."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.getLogger("transformers").setLevel(logging.CRITICAL)

        import torch
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import continuous_api
        from transformers.generation.continuous_batching.requests import (
            RequestState,
            RequestStatus,
        )
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        torch.set_num_threads(1)  # threads of so small a model only wait for each other
        self.manager = continuous_api.ContinuousBatchingManager
        self.config = ContinuousBatchingConfig
        self.torch: Any = torch
        self.rotate = apply_rotary_pos_emb
        self.state = RequestState
        self.status = RequestStatus
        self._kv: Any = torch.zeros(0)
        self.generation = GenerationConfig(
            max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shape = LlamaConfig(
                vocab_size=_VOCABULARY,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=4,
            )
            self.model = LlamaForCausalLM(shape).to(torch.float64).eval()
        # A model of 64 tokens for prompts of any: it sees them modulo 64.
        embeddings = self.model.get_input_embeddings()
        embeddings.register_forward_pre_hook(lambda module, inputs: (inputs[0] % _VOCABULARY,))

        # The engine, but for its destructor, which collects all garbage of the process.
        engine: Any = continuous_api.ContinuousBatchProcessor
        self._processor = type("Processor", (engine,), {"__del__": lambda self: None})

    def foreign(self, tokens: Sequence[int], kv: Any) -> int | None:
        """The first position whose KV is not that of its token.

        ``kv``: keys and values by position.  With one layer they depend on token and position only,
        so that what each should be is known.
        """
        if len(self._kv) < len(tokens):
            self._kv = self._kv_of_all(2 * len(tokens))
        rows = self.torch.arange(len(tokens))
        expected = self._kv[rows, self.torch.tensor(tokens) % _VOCABULARY]
        wrong = ((kv - expected).abs() > _TOLERANCE).flatten(1).any(1)
        return int(wrong.nonzero()[0]) if wrong.any() else None

    def misled(self, sequences: Sequence[Sequence[int]], logits: Any) -> int | None:
        """The first sequence after which the logits are not those that the model computes of it.

        ``logits``: one row for each.  The model computes here without cache and indices, over
        sequences padded at the end, which causal attention does not see.
        """
        torch, lengths = self.torch, list(map(len, sequences))
        tokens = torch.zeros((len(sequences), max(lengths)), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : lengths[row]] = torch.tensor(sequence)
        model, last = self.model.model, torch.tensor(lengths) - 1
        with torch.no_grad():
            hidden = model.embed_tokens(tokens)
            rotation = model.rotary_emb(hidden, position_ids=torch.arange(max(lengths))[None])
            hidden = model.layers[0](hidden, position_embeddings=rotation)
            expected = self.model.lm_head(model.norm(hidden[torch.arange(len(lengths)), last]))
        wrong = ((logits[: len(lengths)] - expected).abs() > _OF_LOGITS).any(1)
        return int(wrong.nonzero()[0]) if wrong.any() else None

    def _kv_of_all(self, positions: int) -> Any:
        """Keys and values of each token at each position, as the model computes them."""
        torch, model = self.torch, self.model.model
        layer = model.layers[0]
        with torch.no_grad():
            tokens = torch.arange(_VOCABULARY).repeat(positions)
            hidden = layer.input_layernorm(model.embed_tokens(tokens))
            keys, values = layer.self_attn.k_proj(hidden), layer.self_attn.v_proj(hidden)
            places = torch.arange(positions).repeat_interleave(_VOCABULARY)
            cosines, sines = model.rotary_emb(values, position_ids=places[None])
            _, keys = self.rotate(keys[None, None], keys[None, None], cosines, sines)
            kv = torch.stack((keys[0, 0], values), 1)
        return kv.view(positions, _VOCABULARY, 2, -1)

    def new_processor(
        self, configuration: Configuration, policy: str, batch: int
    ) -> ContinuousBatchProcessor:
        """A whole engine over a pool of its own, as its manager's thread would make it.

        ``batch``: requests in a step, at most.
        """
        manager = self.manager(
            self.model,
            self.generation,
            self.config(
                page_size=configuration.block_size,
                num_blocks=configuration.blocks,
                max_batch_tokens=configuration.scheduling.token_budget,
                max_requests_per_batch=batch,
                allow_block_sharing=configuration.prefix_caching,
                scheduler_type=policy,
            ),
        )
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


def blocks_per_sector(size: int) -> int:
    """Sectors are multiples of 128 bytes, of which a token takes 64 here."""
    return 1 + size % 2


def fitted(configuration: Configuration) -> Configuration:
    """As transformers would accept it, and with a budget that matters."""
    size, blocks = max(configuration.block_size, LEAST_PAGE), configuration.blocks
    blocks += blocks % blocks_per_sector(size)
    pool, limits = blocks * size, configuration.scheduling
    budget = limits.token_budget if limits.token_budget < pool else max(1, pool // 2)
    return Configuration(
        blocks=blocks,
        block_size=size,
        requests=UNBOUNDED,
        run_ahead=1,
        prefix_caching=configuration.prefix_caching,
        kv_bytes_per_token=configuration.kv_bytes_per_token,
        scheduling=replace(
            Limits(),
            token_budget=budget,
            max_model_tokens=min(limits.max_model_tokens, pool),
        ),
    )
