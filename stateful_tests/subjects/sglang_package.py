"""What of SGLang 0.5.23 its adapter uses: the real package, unmodified, on CPU.

SGLang is imported when the first subject is built, not with this module.  Four things around it
are the adapter's:

* **A clock that counts.**  The radix tree ranks nodes by ``time.monotonic()``.  Here each look at
  the clock is one later than the one before, so that a case replays exactly.
* **A configuration without a model**, which SGLang's own functions ask for, with an attention
  backend that writes tables in plain torch.
* **Windows that slide at once.**  SGLang gives pages behind a window back when they have 128 tokens
  together, or what ``SGLANG_SWA_EVICTION_INTERVAL`` says: one token here, unless it is set.
* **Two operators of torchvision.**  SGLang takes names only from torchvision on this way, but a
  build for CUDA cannot be imported beside torch for the CPU: its library is not loaded, and then
  it describes two operators that there are not.  They are declared, without a kernel.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.errors import unavailable

SUPPORTED = "0.5.23"
"""The version whose internals the adapter knows."""

NAME = "sglang:radix"

_UNDECLARED = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@lru_cache(maxsize=1)
def load_sglang() -> Sglang:
    """Import SGLang, once per process; raises SubjectUnavailable where that cannot be."""
    needed = (NAME, "SGLang", SUPPORTED, "sglang-env")
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise unavailable(*needed, "which is not installed") from None
    if found != SUPPORTED:
        raise unavailable(*needed, f"but {found} is installed")
    try:
        return Sglang()
    except ImportError as error:
        raise unavailable(*needed, f"but {found} cannot be imported ({error})") from error


class Counter:
    """A clock for exact replays: later at each look, by one."""

    def __init__(self) -> None:
        self.monotonic: Callable[[], int] = count(1).__next__
        self.perf_counter: Callable[[], float] = lambda: 0.0


class Sglang:
    """The names of SGLang that the adapter uses."""

    def __init__(self) -> None:
        # Nobody asked for SGLang's log, or a look at a model hub.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # Few runs are as long as what it is by default.
        os.environ.setdefault("SGLANG_SWA_EVICTION_INTERVAL", "1")
        # As it is by default, and as is declared (``Semantics.preemption_room``).
        os.environ["SGLANG_RETRACT_DECODE_STEPS"] = "20"
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _import_torchvision()
            self._import()

    def _import(self) -> None:
        import torch
        from sglang.srt import runtime_context
        from sglang.srt.managers.schedule_batch import (
            FINISH_LENGTH,
            Req,
            ScheduleBatch,
            release_req,
        )
        from sglang.srt.mem_cache import allocation, common, radix_cache
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import ServerArgs

        radix_cache.time = Counter()
        arguments = ServerArgs(model_path="dummy", attention_backend="torch_native")
        runtime_context.publish(arguments, role="scheduler")
        self.tensor = torch.tensor
        self.dtype = torch.float32
        self.allocation = allocation
        self.common = common
        self.tree = radix_cache.RadixCache
        self.unified = UnifiedRadixCache
        self.full = ComponentType.FULL
        self.window = ComponentType.SWA
        self.window_pool = SWAKVPool
        self.window_allocator = SWATokenToKVPoolAllocator
        self.batch = ScheduleBatch
        self.decode = ForwardMode.DECODE
        self.token_allocator = TokenToKVPoolAllocator
        self.page_allocator = PagedTokenToKVPoolAllocator
        self.evict_params = EvictParams
        self.init_params = CacheInitParams
        self.rows = ReqToTokenPool
        self.request = Req
        self.release_req = release_req
        self.finished = FINISH_LENGTH
        self.sampling = SamplingParams(max_new_tokens=1)

    def new_tree(self, configuration: Configuration) -> Any:
        return self.tree(self._parameters(configuration))

    def new_unified(
        self, configuration: Configuration, window: int = 0, core: str = "python"
    ) -> Any:
        """With a core in which one can look; ``window``: of other layers beside."""
        parameters = self._parameters(configuration)
        parameters.tree_components = (self.full, self.window) if window else (self.full,)
        parameters.tree_core_backend = core
        if window:
            parameters.sliding_window_size = window
            parameters.token_to_kv_pool_allocator = self._allocator_of_both(configuration)
        return self.unified(parameters)

    def _parameters(self, configuration: Configuration) -> Any:
        """One page per block, and a row for each running request."""
        page, slots = configuration.block_size, configuration.blocks * configuration.block_size
        pool = (self.dtype, "cpu", None, False)
        return self.init_params(
            disable=not configuration.prefix_caching,
            req_to_token_pool=self.rows(configuration.requests, slots, "cpu", False),
            token_to_kv_pool_allocator=self.token_allocator(slots, *pool)
            if page == 1
            else self.page_allocator(slots, page, *pool),
            page_size=page,
            eviction_policy="lru",
        )

    def _allocator_of_both(self, configuration: Configuration) -> Any:
        """Over a pool of slots for a layer of each kind."""
        page, slots = configuration.block_size, configuration.blocks * configuration.block_size
        pool = self.window_pool(
            size=slots,
            size_swa=slots,
            page_size=page,
            dtype=self.dtype,
            head_num=1,
            head_dim=1,
            full_attention_layer_ids=[0],
            swa_attention_layer_ids=[1],
            device="cpu",
        )
        return self.window_allocator(slots, slots, page, self.dtype, "cpu", pool, False)


def _import_torchvision() -> None:
    """torchvision, whichever build it is."""
    try:
        import_module("torchvision")
    except RuntimeError:  # an operator that it describes does not exist
        import torch

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in _UNDECLARED:
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
        import_module("torchvision")
