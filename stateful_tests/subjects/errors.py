"""Errors of subjects that a user sees as one clear line."""

from __future__ import annotations

from kvproof.invariants.errors import InputError


class SubjectUnavailable(InputError):
    """The subject's system is not installed here, or not in a version that its adapter knows."""
