"""The Hypothesis machine over kvproof's own engine, in which it must find nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import settings
from msgspec.structs import replace

from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.export import write_finding
from kvproof.stateful_tests.machine import machine_for
from kvproof.stateful_tests.profiles import at_scale
from kvproof.stateful_tests.subjects.engine import EngineSubject

FINDINGS = Path("kvproof-findings")


def _engine_test(examples: int, **fixed: Any) -> type:
    """The test of an engine whose configuration has these values, whatever is drawn."""

    def build(configuration: Configuration) -> EngineSubject:
        return EngineSubject(replace(configuration, **fixed))

    machine = machine_for(build, "engine", on_failure=partial(write_finding, folder=FINDINGS))
    own = settings(machine.TestCase.settings, print_blob=False)
    machine.TestCase.settings = at_scale(own, examples=examples, steps=50)
    return machine.TestCase


TestEngine = _engine_test(100)
TestEngineWithoutCaching = _engine_test(30, prefix_caching=False)
TestEngineOfTwoRequests = _engine_test(30, blocks=6, requests=2, run_ahead=1)
