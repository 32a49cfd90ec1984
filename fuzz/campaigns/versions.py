"""Which version of the user's code a run is made with.

What was done with another version of a policy or an engine says little about this one: journals
tell them apart by a digest of the source files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from kvproof.fuzz.campaigns.records import Target
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.stateful_tests.subjects import VLLM_SCHEDULERS, is_kvproofs_own, subject_factory
from kvproof.stateful_tests.subjects.policies import user_module

_INSTALLED = ("site-packages", "dist-packages")


def code_versions(targets: Iterable[Target]) -> dict[str, str]:
    """By subject, a digest of the user's source files; of what is kvproof's own there is none."""
    versions = {}
    for target in targets:
        place = _place_of(target.subject)
        if place:
            subject_factory(target.subject)  # what it imports is known then
            versions[target.subject] = _digest(source_files(place))
    return versions


def _place_of(subject: str) -> str:
    """The MODULE or FILE.py of the user's class; empty if there is none."""
    if subject == KERNELS or is_kvproofs_own(subject):
        return ""
    for family in VLLM_SCHEDULERS:
        if subject.startswith(f"{family}:"):  # …:POLICY:MODULE:CLASS
            return subject.removeprefix(f"{family}:").partition(":")[2].rpartition(":")[0]
    family, _, policy = subject.partition(":")
    name = policy if family in ("scheduler", "eviction") else subject
    return name.rpartition(":")[0]


def source_files(place: str) -> list[Path]:
    """All of the package, or, of a file by itself, that and what it imports from beside it."""
    if place.endswith(".py"):
        return _with_those_beside(Path(place).resolve())
    module, package = user_module(place), user_module(place.partition(".")[0])
    folders = getattr(package, "__path__", None)
    if folders is not None:
        return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    return _with_those_beside(Path(module.__file__).resolve()) if module.__file__ else []


def _with_those_beside(file: Path) -> list[Path]:
    folder = file.parent
    if any(part in _INSTALLED for part in folder.parts):
        return [file]
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    # Some modules name a file that is none, as torch._classes does.
    loaded = {Path(name).resolve() for name in names if name and Path(name).is_absolute()}
    beside = [
        own
        for own in loaded
        if own.suffix == ".py"
        and own.is_file()
        and own.is_relative_to(folder)
        and not any(part in _INSTALLED for part in own.parts)
    ]
    return sorted({file, *beside})


def _digest(files: Iterable[Path]) -> str:
    digest = sha256()
    for file in files:
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
