"""Policies by name: built-in ones, and a user's own from a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from kvproof.engine.eviction import EVICTION_ORDERS, EvictionPolicy, EvictionPolicyFactory
from kvproof.engine.policies import POLICIES, POLICY_NAMES
from kvproof.engine.policy import Promises, SchedulerPolicy
from kvproof.invariants.errors import InputError

EVICTION_POLICIES = EVICTION_ORDERS
_EVICTION_METHODS = ("insert", "remove", "victim", "evicted", "__iter__", "__len__")


def policy_factory(name: str, *, imports: bool = True) -> Callable[[], SchedulerPolicy]:
    """The scheduler policy of that name, or of ``MODULE:CLASS`` or ``FILE.py:CLASS``.

    Raises InputError if there is none, or if it cannot be imported or made.
    """
    if name in POLICIES:
        return POLICIES[name]
    if name in EVICTION_POLICIES:
        raise InputError(
            f"{name!r} is an eviction policy; here a scheduler policy is asked for: "
            f"{', '.join(POLICY_NAMES)}, or MODULE:CLASS or FILE.py:CLASS of yours"
        )
    policy = imported_class(name, imports=imports)
    if not callable(getattr(policy, "plan", None)):
        raise InputError(f"policy {name!r} has no method plan: see kvproof.engine.policy")
    misspelt = [one for one in dir(policy) if isinstance(getattr(policy, one, None), Promises)]
    if misspelt and "promises" not in misspelt:
        raise InputError(
            f"policy {name!r} has Promises named {misspelt[0]!r}: the attribute is called "
            "'promises'"
        )
    promises = _made(name, lambda: getattr(policy(), "promises", Promises()))
    if not isinstance(promises, Promises):
        raise InputError(
            f"policy {name!r} promises {promises!r}, which is no Promises: see "
            "kvproof.engine.policy"
        )
    try:
        msgspec.convert(msgspec.structs.asdict(promises), Promises)
    except msgspec.ValidationError as error:
        raise InputError(f"policy {name!r} has wrong promises: {error}") from None
    factory: Callable[[], SchedulerPolicy] = policy
    return factory


def eviction_factory(name: str, *, imports: bool = True) -> EvictionPolicyFactory:
    """The eviction policy of that name, or ``MODULE:CLASS`` or ``FILE.py:CLASS``.

    Raises InputError.
    """
    if name in EVICTION_POLICIES:
        return EVICTION_POLICIES[name]
    policy = imported_class(name, imports=imports)
    lacking = [method for method in _EVICTION_METHODS if not _has(policy, method)]
    if lacking:
        raise InputError(
            f"eviction policy {name!r} lacks {', '.join(lacking)}: see kvproof.engine.eviction"
        )
    _made(name, lambda: policy(1))
    factory: EvictionPolicyFactory = policy
    return factory


def _has(policy: Any, method: str) -> bool:
    """What a subclass leaves to the interface, which has no body for it, it has not."""
    found = getattr(policy, method, None)
    has_body = method == "evicted"
    return found is not None and (has_body or found is not getattr(EvictionPolicy, method))


def is_eviction_policy(name: str) -> bool:
    """Whether ``name`` is a class that evicts rather than schedules.  Raises InputError."""
    if name in POLICIES or name in EVICTION_POLICIES:
        return name in EVICTION_POLICIES
    policy = imported_class(name)
    if not hasattr(policy, "plan") and not hasattr(policy, "victim"):
        raise InputError(
            f"{name!r} is no policy: it has neither plan (of a scheduler policy) nor victim (of an "
            "eviction policy)"
        )
    return not hasattr(policy, "plan")


def imported_class(name: str, *, imports: bool = True) -> Any:
    """The class that ``MODULE:CLASS`` or ``FILE.py:CLASS`` names.  Raises InputError."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise InputError(
            f"unknown policy {name!r}; there are {', '.join((*POLICY_NAMES, *EVICTION_POLICIES))}, "
            "or MODULE:CLASS or FILE.py:CLASS of yours"
        )
    if not imports:
        raise InputError(
            f"the case is of policy {name!r}, which is no part of kvproof: say --subject, with the "
            "subject that the case names, to import it"
        )
    try:
        module = _file(Path(place)) if place.endswith(".py") else user_module(place)
        if not hasattr(module, attribute):
            raise InputError(f"{place} has no class {attribute}")
        return getattr(module, attribute)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module does when imported
        raise InputError(
            f"policy {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from None


def _made(name: str, policy: Callable[[], object]) -> object:
    """A class that cannot be called as it will be is bad input, not a finding."""
    try:
        return policy()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"policy {name!r} cannot be made: {type(error).__name__}: {error}"
        ) from None


def user_module(name: str) -> ModuleType:
    """A module of the user's, imported; raises whatever it raises."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a user's module beside where he stands
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"kvproof_policy_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as Python does for a script: it may have siblings
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
