"""Subjects: what is driven.  Each is found by its name on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from typing import Literal

from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import ALL_KINDS
from kvproof.invariants.subject import Configuration, Subject

SubjectFactory = Callable[[Configuration], Subject]
"""Builds a fresh subject; called once per run."""


def _engine() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.engine import EngineSubject

    return EngineSubject


def _engine_groups() -> SubjectFactory:
    from kvproof.engine.engine import Engine
    from kvproof.stateful_tests.subjects.engine import EngineSubject

    return partial(EngineSubject, engine=partial(Engine, groups=2))


def _vllm_manager() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_manager import VllmManagerSubject
    from kvproof.stateful_tests.subjects.vllm_package import load_vllm

    load_vllm()  # now, so that a missing package is bad input and not a crash of the subject
    return VllmManagerSubject


def _vllm_groups(name: str) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_groups import GROUPED
    from kvproof.stateful_tests.subjects.vllm_package import load_vllm

    load_vllm()
    return GROUPED[name]


def _vllm_states() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_package import load_vllm
    from kvproof.stateful_tests.subjects.vllm_states import VllmStatesSubject

    load_vllm()
    return VllmStatesSubject


def _vllm_scheduler(family: str, options: str = "fcfs", imports: bool = True) -> SubjectFactory:
    """``options``: POLICY or POLICY:MODULE:CLASS, a scheduler class of the user's."""
    from kvproof.stateful_tests.subjects.vllm_scheduler import vllm_scheduler_factory

    return vllm_scheduler_factory(*options.split(":", 1), family=family, imports=imports)


def _vllm_offload(threshold: int = 1) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_offload import vllm_offload_factory

    return vllm_offload_factory(threshold)


def _vllm_connector(name: str) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_connector import vllm_connector_factory

    return vllm_connector_factory(name)


def _transformers(
    policy: str = "fifo", kind: Literal["", "offload", "hybrid"] = ""
) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.transformers_scheduler import transformers_factory

    return transformers_factory(policy, kind)


def _sglang_radix() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.sglang_package import load_sglang
    from kvproof.stateful_tests.subjects.sglang_radix import SglangRadixSubject

    load_sglang()  # now, as for vLLM
    return SglangRadixSubject


def _sglang_unified() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.sglang_package import load_sglang
    from kvproof.stateful_tests.subjects.sglang_unified import SglangUnifiedSubject

    load_sglang()
    return SglangUnifiedSubject


def _sglang_window() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.sglang_package import load_sglang
    from kvproof.stateful_tests.subjects.sglang_window import SglangWindowSubject

    load_sglang()
    return SglangWindowSubject


VLLM_ONE_GROUP = ("vllm:scheduler", "vllm:async_scheduler")
VLLM_SCHEDULERS = (
    *[f"{name}{groups}" for groups in (":groups", ":hybrid") for name in VLLM_ONE_GROUP],
    *VLLM_ONE_GROUP,
)
"""Their names take options: vLLM's policy, and perhaps a scheduler class of the user's.  What
begins with another one comes before it."""
VLLM_CONNECTED = (
    *[f"{name}:offload" for name in VLLM_ONE_GROUP],
    "vllm:scheduler:tiering",
)
_SUBJECTS: dict[str, Callable[[], SubjectFactory]] = {
    "engine": _engine,
    "engine:groups": _engine_groups,
    "vllm:manager": _vllm_manager,
    "vllm:manager:groups": partial(_vllm_groups, "groups"),
    "vllm:manager:hybrid": partial(_vllm_groups, "hybrid"),
    "vllm:manager:unequal": partial(_vllm_groups, "unequal"),
    "vllm:manager:states": _vllm_states,
    **{name: partial(_vllm_scheduler, name) for name in sorted(VLLM_SCHEDULERS, key=len)},
    **{f"{name}:priority": partial(_vllm_scheduler, name, "priority") for name in VLLM_SCHEDULERS},
    **{f"{name}:media": partial(_vllm_scheduler, f"{name}:media") for name in VLLM_ONE_GROUP},
    **{name: partial(_vllm_connector, name) for name in VLLM_CONNECTED},
    "vllm:offload": _vllm_offload,
    "vllm:offload:twice": lambda: _vllm_offload(threshold=2),
    "transformers": _transformers,
    "transformers:prefill_first": lambda: _transformers("prefill_first"),
    "transformers:offload": lambda: _transformers(kind="offload"),
    "transformers:hybrid": lambda: _transformers(kind="hybrid"),
    "sglang:radix": _sglang_radix,
    "sglang:unified": _sglang_unified,
    "sglang:unified:window": _sglang_window,
}
SUBJECT_NAMES = (*_SUBJECTS, "scheduler:POLICY", "eviction:POLICY")


def subject_families() -> list[str]:
    """The names in short, each with what may stand behind it; no word of it is long."""
    more: dict[str, list[str]] = {}
    for name in SUBJECT_NAMES:
        family = next((known for known in more if name.startswith(f"{known}:")), None)
        if family is None:
            more[name] = []
        else:
            more[family].append(name.removeprefix(family))
    return [f"{name} (also {', '.join(ends)})" if ends else name for name, ends in more.items()]


def _scheduler(policy: str, imports: bool) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.policies import policy_factory
    from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

    factory = policy_factory(policy, imports=imports)
    return partial(SchedulerSubject, policy=factory, name=f"scheduler:{policy}")


def _eviction(policy: str, imports: bool) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.eviction import EvictionPolicySubject
    from kvproof.stateful_tests.subjects.policies import eviction_factory

    return partial(EvictionPolicySubject, eviction=eviction_factory(policy, imports=imports))


_FAMILIES: dict[str, Callable[[str, bool], SubjectFactory]] = {
    "scheduler": _scheduler,
    "eviction": _eviction,
}


def subject_factory(name: str, *, imports: bool = True) -> SubjectFactory:
    """The subject of that name, or the class that ``MODULE:CLASS`` names.

    With ``imports=False`` only names of kvproof's own are known: a case file that somebody sends
    must not run code of its choice.  Raises InputError if there is no such subject, or if it is
    not installed.
    """
    if name in _SUBJECTS:
        return _SUBJECTS[name]()
    for family in VLLM_SCHEDULERS:
        if name.startswith(f"{family}:"):
            return _vllm_scheduler(family, name.removeprefix(f"{family}:"), imports)
    module, _, attribute = name.partition(":")
    if module in _FAMILIES and attribute:
        return _FAMILIES[module](attribute, imports)
    if not module or not attribute:
        known = ", ".join(SUBJECT_NAMES)
        raise InputError(f"unknown subject {name!r}; there are {known}, or MODULE:CLASS of yours")
    if not imports:
        raise InputError(
            f"the case is of subject {name!r}, which is no part of kvproof: say --subject {name} "
            "to import it"
        )
    return _imported(module, attribute, name)


def is_kvproofs_own(name: str) -> bool:
    """Whether that subject is part of kvproof, so that a case may name it without ado."""
    from kvproof.engine.policies import POLICIES
    from kvproof.stateful_tests.subjects.policies import EVICTION_POLICIES

    family, _, policy = name.partition(":")
    own = {"scheduler": set(POLICIES), "eviction": set(EVICTION_POLICIES)}
    return name in _SUBJECTS or policy in own.get(family, ())


def _imported(module: str, attribute: str, name: str) -> SubjectFactory:
    from kvproof.stateful_tests.subjects.policies import user_module

    if module.endswith(".py") or "/" in module:
        path = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise InputError(
            f"subject {name!r} is a file: MODULE:CLASS is wanted, as Python imports it from here, "
            f"perhaps {path}:{attribute}"
        )
    try:
        factory: SubjectFactory = getattr(user_module(module), attribute)
    except Exception as error:  # whatever the user's module does when imported
        raise InputError(
            f"subject {name!r} cannot be imported: {type(error).__name__}: {error}{_place(error)}"
        ) from None
    try:
        subject = factory(Configuration())
    except Exception as error:  # whatever the user's class does when called
        raise InputError(
            f"subject {name!r} cannot be made of a Configuration: {type(error).__name__}: {error}"
            f"{_place(error)} (is it a subject? {_SEE})"
        ) from None
    lacking = [member for member in _MEMBERS if not hasattr(subject, member)]
    if lacking:
        raise InputError(f"subject {name!r} lacks {', '.join(lacking)}: {_SEE}")
    unknown = set(subject.capabilities) - set(ALL_KINDS)
    if unknown:
        raise InputError(f"subject {name!r} has unknown capabilities: {', '.join(unknown)}")
    return factory


def _place(error: Exception) -> str:
    """`` (FILE:LINE)``, the last of the user's code that it went through; empty if it was none."""
    others = (Path(__file__).parents[2], Path(get_path("stdlib")))
    places = [
        f" ({frame.filename}:{frame.lineno})"
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(map(Path(frame.filename).is_relative_to, others))
    ]
    return places[-1] if places else ""


_SEE = "see docs/adapters.md"
_MEMBERS = (
    "name",
    "semantics",
    "configuration",
    "capabilities",
    "apply",
    "drain_events",
    "view",
)
