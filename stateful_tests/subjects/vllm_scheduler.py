"""vLLM's whole scheduler as a subject: the real one, unmodified, over its own cache manager.

The scheduler decides by itself; the adapter only plays what is around it, the clients and the
model.  What it does to its cache is overheard at ``allocate_slots`` and ``free`` of its manager,
and told as operations of a cache, each at the moment when it happens; iterations, samples and
ends are told as a scheduler's events.  So both floors are checked, as those of kvproof's own.

How vLLM maps:

* **Memory is seen in the order of the stream.**  vLLM frees the blocks of a request that ends
  while a step carries it at once, and relies on the GPU's stream: whatever is launched later runs
  later.  So for the cache a step is retired when it is launched; its samples come when they come.
* **Keys are published when slots are allocated**, and owed until the next step is launched: what
  is findable then must have been written.
* A token is told to the cache when vLLM gives it a slot; vLLM has known it a little longer.
  Therefore an admission again may hit one block more than the tokens told allow, which is why
  ``exact_admission`` is not promised.  Instead each admission is counted (FIT).
* **run_ahead** 1 drives ``Scheduler``, 2 and more ``AsyncScheduler`` with two outputs in flight.
  That publishes a block of sampled tokens only when its own sample is known; without a word for
  it in :class:`Semantics`, asynchronous scheduling is driven without the prefix cache.
* ``long_prefill_token_threshold`` is half of the token budget.  A budget that no batch could use
  up is lowered to half of the pool, so that prompts come in chunks.
* The front end's part, to refuse what can never fit, is the adapter's: ``max_model_len`` is the
  pool at most, as vLLM demands when it starts.

Not driven: tiers, watermarks, resets (vLLM drops samples in flight then), speculative tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksEvicted,
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Arrive,
    Decode,
    Finish,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Resume,
    Retire,
    Run,
    Schedule,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_MODEL,
    LARGER_THAN_POOL,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import prompt_length, prompt_tokens, sampled_token
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Completed,
    Part,
    Promises,
    QueueState,
    RequestArrived,
    RequestCancelled,
    Scheduled,
    SchedulerEvent,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject
from kvproof.stateful_tests.subjects.vllm_manager import (
    VllmManagerSubject,
    VllmManagerView,
    _Live,
    load_vllm,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

NAME = "vllm:scheduler"
POLICIES = ("fcfs", "priority")
"""Those of vLLM's own; the first one is its default."""

CHOICE = 0
"""Which tokens are sampled, see ``sampled_token``: what a request samples follows its place."""
STOP = 1 << 33
"""The token at which requests stop early: no prompt has it, and no sample else."""
_PROMISES = {
    "fcfs": Promises(fcfs=True, no_barrier=True, work_conserving=True),
    "priority": Promises(strict_priority=True, no_barrier=True, work_conserving=True),
}
_RETIRE = Retire()
_number = attrgetter("number")


# -- vLLM itself -------------------------------------------------------------------------------


class _Model(SimpleNamespace):
    """All that the scheduler asks of a model's configuration."""

    uses_mrope = is_encoder_decoder = is_diffusion = False
    supports_multimodal_inputs = return_sampling_mask = False
    runner_type = "generate"
    multimodal_config = None
    skip_tokenizer_init = True


class _Scheduling:
    """The names of vLLM that this adapter uses, beside those of the manager's."""

    def __init__(self) -> None:
        self.manager = load_vllm()
        from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.structured_output import StructuredOutputManager

        self.synchronous = Scheduler
        self.asynchronous = AsyncScheduler
        self.output = ModelRunnerOutput
        self.sampling = SamplingParams
        self._config = VllmConfig(
            scheduler_config=SchedulerConfig(max_model_len=8192, is_encoder_decoder=False),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig(device="cpu"),
        )
        self._structured = StructuredOutputManager(self._config_of(_Model(max_model_len=8192)))

    def _config_of(self, model: _Model) -> Any:
        config = copy(self._config)
        config.model_config = model
        return config

    def new_scheduler(
        self, configuration: Configuration, policy: str, scheduler_class: type[Scheduler]
    ) -> Scheduler:
        """A scheduler over a pool of its own; vLLM's configuration is made once and copied."""
        vllm, limits = self.manager, configuration.scheduling
        config = self._config_of(_Model(max_model_len=limits.max_model_tokens))
        config.scheduler_config = scheduling = copy(config.scheduler_config)
        scheduling.policy = policy
        scheduling.async_scheduling = configuration.run_ahead > 1
        scheduling.max_num_seqs = configuration.requests
        scheduling.max_num_batched_tokens = limits.token_budget
        scheduling.enable_chunked_prefill = limits.chunked_prefill
        scheduling.long_prefill_token_threshold = prefill_threshold(configuration)
        config.cache_config = caching = copy(config.cache_config)
        caching.block_size = configuration.block_size
        caching.enable_prefix_caching = configuration.prefix_caching
        caching.num_gpu_blocks = configuration.blocks + 1
        return scheduler_class(
            config,
            vllm.cache_of(configuration),
            structured_output_manager=self._structured,
            block_size=configuration.block_size,
            hash_block_size=configuration.block_size,
            log_stats=True,
        )
