"""Subjects: what is driven.  Each is found by its name on the command line."""

from __future__ import annotations

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
    """The subject of that name.  Raises InputError if there is none, or if it is not installed."""
    if name not in _SUBJECTS:
        raise InputError(f"unknown subject {name!r}; there are {', '.join(_SUBJECTS)}")
    return _SUBJECTS[name]()
