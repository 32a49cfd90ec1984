"""The names of vLLM's scheduler that its adapter uses, and how it is configured.

See :mod:`kvproof.stateful_tests.subjects.vllm_scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache
from math import lcm
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import Arrive
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.subjects.overheard_scheduler import STOP
from kvproof.stateful_tests.subjects.policies import user_module
from kvproof.stateful_tests.subjects.vllm_encoder import features_of, with_encoder
from kvproof.stateful_tests.subjects.vllm_groups import FACTORS, windows_of
from kvproof.stateful_tests.subjects.vllm_package import NAME as MANAGER
from kvproof.stateful_tests.subjects.vllm_package import load_vllm

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

NAME = "vllm:scheduler"
ASYNC_NAME = "vllm:async_scheduler"
"""With steps in flight while the next one is scheduled."""
_GROUPS = ":groups"
"""Ends the name of a subject with two groups of unequal block size …"""
_HYBRID = ":hybrid"
"""… of one with a group that has a window …"""
MEDIA = ":media"
"""… and of one whose requests show media items."""
FAMILIES = {
    name + end: (name, steps)
    for name, steps in ((NAME, 1), (ASYNC_NAME, 2))
    for end in ("", _GROUPS, _HYBRID, MEDIA)
}
"""Subjects, but for options: which scheduler, and steps in flight at most, as vLLM's engine core
keeps them."""

_ONE_GROUP = Semantics()

ADAPTERS = 1
"""``max_loras``: LoRA adapters of the requests that run, at most; as by default."""

PREFIX = "request-"
"""vLLM's names of requests; their rank of arrival follows."""


@lru_cache(maxsize=1)
def load_scheduling() -> _Scheduling:
    """Import vLLM's scheduler, once per process; raises SubjectUnavailable."""
    try:
        return _Scheduling()
    except SubjectUnavailable as error:
        raise SubjectUnavailable(str(error).replace(MANAGER, NAME)) from None
    except ImportError as error:
        raise SubjectUnavailable(
            f"the subject {NAME}: vLLM's scheduler cannot be imported ({error}): "
            "in a checkout, bash .ci/vllm-env FOLDER makes an environment with it"
        ) from error


class _Model(SimpleNamespace):
    """All that the scheduler asks of a model's configuration."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(
            max_model_len=max_model_len,
            runner_type="generate",
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            supports_multimodal_inputs=False,
            multimodal_config=None,
            return_sampling_mask=False,
            skip_tokenizer_init=True,
        )


class _Scheduling:
    """The names of vLLM that this adapter uses beside those of the manager's."""

    def __init__(self) -> None:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            LoRAConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.structured_output import StructuredOutputManager

        self.manager = load_vllm()
        self.schedulers: dict[str, type[Scheduler]] = {NAME: Scheduler, ASYNC_NAME: AsyncScheduler}
        self.output = ModelRunnerOutput
        self.sampling = SamplingParams
        self._config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_model_len=8192, is_encoder_decoder=False, async_scheduling=False
            ),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig(device="cpu"),
        )
        self._config.model_config = _Model(8192)
        self._config.lora_config = LoRAConfig(max_loras=ADAPTERS)
        self._structured = StructuredOutputManager(self._config)

    def new_scheduler(
        self,
        configuration: Configuration,
        groups: Semantics,
        policy: str,
        scheduler_class: type[Scheduler],
    ) -> Scheduler:
        """A scheduler over a pool of its own; vLLM's configuration is made once, and copied."""
        vllm, limits, size = self.manager, configuration.scheduling, configuration.block_size
        config: Any = copy(self._config)
        config.model_config = _Model(limits.max_model_tokens)
        config.scheduler_config = scheduling = copy(config.scheduler_config)
        scheduling.policy = policy
        scheduling.async_scheduling = issubclass(scheduler_class, self.schedulers[ASYNC_NAME])
        scheduling.max_num_seqs = configuration.requests
        scheduling.max_num_batched_tokens = limits.token_budget
        scheduling.enable_chunked_prefill = limits.chunked_prefill
        scheduling.long_prefill_token_threshold = prefill_threshold(configuration)
        config.cache_config = caching = copy(config.cache_config)
        caching.block_size = size
        caching.enable_prefix_caching = configuration.prefix_caching
        caching.num_gpu_blocks = configuration.blocks + 1
        scheduler = scheduler_class(
            config,
            vllm.new_cache_config(configuration, groups),
            structured_output_manager=self._structured,
            block_size=lcm(size, *groups.block_sizes),
            hash_block_size=size,
            log_stats=True,
        )
        if groups.arriving_media:
            with_encoder(scheduler)
        return scheduler

    def new_request(
        self, number: int, operation: Arrive, block_hasher: Callable[[Request], list[Any]] | None
    ) -> Request:
        """A request as the front end would hand it over."""
        vllm = self.manager
        return vllm.request(
            request_id=f"{PREFIX}{number}",
            prompt_token_ids=prompt_tokens(operation.prompt, operation.media).tolist(),
            sampling_params=self.sampling(
                max_tokens=max(operation.output, operation.max_tokens), stop_token_ids=[STOP]
            ),
            pooling_params=None,
            arrival_time=float(number),
            mm_features=features_of(vllm, operation),
            priority=operation.priority,
            lora_request=vllm.new_adapter(operation.adapter),
            cache_salt=f"salt-{operation.salt}" if operation.salt else None,
            block_hasher=block_hasher,
        )


def prefill_threshold(configuration: Configuration) -> int:
    """``long_prefill_token_threshold``: tokens of one prompt in a step, if several run."""
    return 2 * configuration.block_size if configuration.scheduling.chunked_prefill else 0


def groups_of(family: str, configuration: Configuration) -> Semantics:
    """What a subject's semantics say of its groups, and whether of media."""
    if family.endswith(_HYBRID):
        windows = windows_of(configuration)
        return Semantics(groups=len(windows), shared_pool=True, windows=windows)
    if family.endswith(MEDIA):
        return Semantics(arriving_media=True)
    if not family.endswith(_GROUPS):
        return _ONE_GROUP
    sizes = tuple([factor * configuration.block_size for factor in FACTORS[:2]])
    return Semantics(groups=len(sizes), shared_pool=True, block_sizes=sizes)


def fitted(
    configuration: Configuration, steps_in_flight: int = 1, groups: Semantics = _ONE_GROUP
) -> Configuration:
    """As vLLM would accept it, and with a budget that matters."""
    limits = configuration.scheduling
    sizes = groups.block_sizes or (configuration.block_size,) * groups.groups
    pool = configuration.blocks * configuration.block_size
    while sum([-(-pool // size) for size in sizes]) > configuration.blocks:
        pool -= 1
    longest = min(limits.max_model_tokens, pool)
    budget = limits.token_budget
    # In front of an item that cannot be encoded yet a prompt is cut anyway.
    chunked = limits.chunked_prefill or groups.arriving_media
    if not chunked:
        budget = max(budget, longest)
    elif budget >= pool:
        budget = max(1, pool // 2)
    return Configuration(
        blocks=configuration.blocks,
        block_size=configuration.block_size,
        requests=min(configuration.requests, budget),
        run_ahead=min(configuration.run_ahead, steps_in_flight),
        prefix_caching=configuration.prefix_caching,
        kv_bytes_per_token=configuration.kv_bytes_per_token,
        scheduling=Limits(
            token_budget=budget,
            max_model_tokens=longest,
            chunked_prefill=chunked,
        ),
    )


def user_scheduler(family: str, name: str) -> type[Scheduler]:
    """The class that MODULE:CLASS names, to stand in for the scheduler of that subject."""
    module, _, attribute = name.partition(":")
    try:
        chosen = getattr(user_module(module), attribute)
    except Exception as error:  # whatever the user's module does when imported
        raise InputError(
            f"scheduler class {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    base = load_scheduling().schedulers[FAMILIES[family][0]]
    if not (isinstance(chosen, type) and issubclass(chosen, base)):
        raise InputError(f"scheduler class {name!r} is no subclass of vLLM's {base.__name__}")
    return chosen
