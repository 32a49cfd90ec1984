"""What of vLLM 0.33 its adapters use: the real package, unmodified, on CPU.

vLLM is imported when the first subject is built, not with this module.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import lcm
from typing import TYPE_CHECKING, Any

from kvproof.invariants.operations import Admit, Media
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.errors import unavailable

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

SUPPORTED = "0.33."
"""Versions whose internals the adapters know start so."""

NAME = "vllm:manager"


@lru_cache(maxsize=1)
def load_vllm() -> _Vllm:
    """Import vLLM, once per process; raises SubjectUnavailable where that cannot be."""
    needed = (NAME, "vLLM", f"{SUPPORTED}x", "vllm-env")
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise unavailable(*needed, "which is not installed") from None
    if not found.startswith(SUPPORTED):
        raise unavailable(*needed, f"but {found} is installed")
    try:
        return _Vllm()
    except ImportError as error:
        raise unavailable(*needed, f"but {found} cannot be imported ({error})") from error


class _Vllm:
    """The names of vLLM that the adapter uses."""

    def __init__(self) -> None:
        # Nobody asked for vLLM's log, its usage statistics or a look at a model hub.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.getLogger("vllm").setLevel(logging.CRITICAL)

        import torch
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request, RequestStatus

        self.dtype = torch.float32
        self.mask = torch.tensor
        self.lora_request = LoRARequest
        self.feature = MultiModalFeatureSpec
        self.placeholder = PlaceholderRange
        self.manager = KVCacheManager
        self.block_hasher = get_request_block_hasher
        self.attention = FullAttentionSpec
        self.window = SlidingWindowSpec
        self.states = MambaSpec
        self.cache_config = KVCacheConfig
        self.group = KVCacheGroupSpec
        self.request = Request
        self.status = RequestStatus
        self.sampling = SamplingParams(max_tokens=1)
        self.hash = sha256
        _without_hash_seed(init_none_hash, sha256)

    def new_manager(
        self, configuration: Configuration, semantics: Semantics, retention: int | None
    ) -> KVCacheManager:
        """A manager whose groups have these windows and block sizes, one pool, and a null block on
        top; ``retention``: see the subject."""
        blocks, hashed = configuration.blocks, configuration.block_size
        sizes = semantics.block_sizes or (hashed,) * semantics.groups
        return self.manager(
            self.new_cache_config(configuration, semantics, retention),
            max_model_len=blocks * max(sizes),
            scheduler_block_size=lcm(*sizes),
            hash_block_size=hashed,
            enable_caching=configuration.prefix_caching,
        )

    def new_cache_config(
        self, configuration: Configuration, semantics: Semantics, retention: int | None = None
    ) -> Any:
        """What vLLM calls a configuration of its cache, with a group for each of the semantics'."""
        groups = range(semantics.groups)
        sizes = semantics.block_sizes or (configuration.block_size,) * len(groups)
        windows = semantics.windows or (0,) * len(groups)
        specs = [
            self._state_spec(size) if group in semantics.states else self._spec(size, window)
            for group, size, window in zip(groups, sizes, windows, strict=True)
        ]
        return self.cache_config(
            num_blocks=configuration.blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[self.group([f"layer-{group}"], specs[group]) for group in groups],
            prefix_cache_retention_interval=retention,
        )

    def _spec(self, block_size: int, window: int) -> Any:
        """A group's layers; ``window``: 0 for full attention."""
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": self.dtype}
        return self.window(**shape, sliding_window=window) if window else self.attention(**shape)

    def _state_spec(self, block_size: int) -> Any:
        """A group of state-space layers, with the one mode in which their states are cached."""
        return self.states(
            block_size=block_size,
            shapes=((1,),),
            dtypes=(self.dtype,),
            mamba_cache_mode="align",
        )

    def new_request(
        self,
        number: int,
        operation: Admit,
        media: Sequence[Media],
        block_hasher: Callable[[Request], list[Any]] | None,
    ) -> Request:
        """A waiting request, with the keys of its prompt's full blocks.

        ``media`` are those of the operation, clipped to the prompt and in order.
        """
        tokens = prompt_tokens(operation.prompt, operation.media).tolist()
        return self.request(
            request_id=f"request-{number}",
            prompt_token_ids=tokens,
            sampling_params=self.sampling,
            pooling_params=None,
            arrival_time=0.0,
            mm_features=[self._feature(item) for item in media],
            lora_request=self.new_adapter(operation.adapter),
            cache_salt=f"salt-{operation.salt}" if operation.salt else None,
            block_hasher=block_hasher,
        )

    def new_adapter(self, number: int) -> Any:
        """What vLLM calls a LoRA request; none for 0.

        The two strings must be different objects, here and always: keys are digests of pickles,
        and a pickle tells a repeated object from an equal one.
        """
        if not number:
            return None
        return self.lora_request(f"adapter-{number}", number, f"/adapters/{number}")

    def _feature(self, item: Media) -> Any:
        return self.feature(
            data=None,
            modality="image",
            identifier=f"item-{item.item}",
            mm_position=self.placeholder(offset=item.start, length=item.length),
        )


def _without_hash_seed(initialize: Callable[[Any], None], hash_function: Any) -> None:
    """Derive the root of all keys from vLLM's constant, not from PYTHONHASHSEED.

    vLLM reads that variable, but a case must replay alike under any value of it.
    """
    seed = os.environ.pop("PYTHONHASHSEED", None)
    try:
        initialize(hash_function)
    finally:
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
