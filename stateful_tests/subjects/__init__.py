"""Subjects: what is driven.  Each is found by its name on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from kvproof.invariants.errors import InputError
from kvproof.invariants.subject import Configuration, Subject

SubjectFactory = Callable[[Configuration], Subject]
"""Builds a fresh subject; called once per run."""


def _engine() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.engine import EngineSubject

    return EngineSubject


def _vllm_manager() -> SubjectFactory:
    from kvproof.stateful_tests.subjects.vllm_manager import VllmManagerSubject, load_vllm

    load_vllm()  # now, so that a missing package is bad input and not a crash of the subject
    return VllmManagerSubject


_SUBJECTS: dict[str, Callable[[], SubjectFactory]] = {
    "engine": _engine,
    "vllm:manager": _vllm_manager,
}
SUBJECT_NAMES = tuple(_SUBJECTS)


def subject_factory(name: str) -> SubjectFactory:
    """The subject of that name, or the class that ``MODULE:CLASS`` names.

    Raises InputError if there is none, or if it is not installed.
    """
    if name in _SUBJECTS:
        return _SUBJECTS[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(_SUBJECTS)
        raise InputError(f"unknown subject {name!r}; there are {known}, or MODULE:CLASS of yours")
    return _imported(module, attribute, name)


def _imported(module: str, attribute: str, name: str) -> SubjectFactory:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a user's module beside where he stands
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"subject {name!r} cannot be imported: {error}") from None
    if not callable(factory):
        raise InputError(f"subject {name!r} is not a class or a function that builds a subject")
    made: SubjectFactory = factory
    return made
