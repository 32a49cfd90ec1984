"""Errors of subjects that a user sees as one clear line."""

from __future__ import annotations

from kvproof.invariants.errors import InputError


class SubjectUnavailable(InputError):
    """The subject's system is not installed here, or not in a version that its adapter knows."""


def unavailable(
    subject: str, system: str, supported: str, environment: str, why: str
) -> SubjectUnavailable:
    """``why``: what is there instead of the ``supported`` version; ``environment``: what has it."""
    return SubjectUnavailable(
        f"the subject {subject} needs {system} {supported}, {why}: in a checkout, "
        f"bash .ci/{environment} FOLDER makes an environment with it"
    )
