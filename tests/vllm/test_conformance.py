"""The adapters of vLLM tell the truth, and would be caught at a lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from foreign import needs

from kvproof.fuzz.conformance import assert_conforms, examine
from kvproof.invariants.events import BlocksEvicted, Event
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.vllm_manager import VllmManagerSubject

needs("vllm:manager")

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "name",
    [
        "vllm:manager",
        "vllm:manager:groups",
        "vllm:manager:unequal",
        "vllm:manager:states",
        "vllm:scheduler",
        "vllm:scheduler:groups",
        "vllm:async_scheduler:groups",
        "vllm:scheduler:hybrid",
        "vllm:async_scheduler:hybrid",
        "vllm:scheduler:offload",
        "vllm:scheduler:tiering",
    ],
)
def test_an_adapter_of_vllm_tells_the_truth(name: str) -> None:
    examination = examine(subject_factory(name))
    assert examination.told is None, examination.told
    assert examination.violation is None
    assert not examination.unsure
    assert examination.operations > 1000


def test_a_defect_of_vllm_is_not_taken_for_a_lie() -> None:
    """The priority policy serves what was never computed: told truly by the adapter."""
    examination = examine(subject_factory("vllm:scheduler:priority"))
    assert examination.told is None, examination.told
    assert examination.violation is not None
    assert examination.violation.property == "VALID"


class ForgetsEvictions(VllmManagerSubject):
    def drain_events(self) -> Sequence[Event]:
        return [e for e in super().drain_events() if not isinstance(e, BlocksEvicted)]


def test_a_forgotten_event_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"does not tell the truth about (answer|index|event)"):
        assert_conforms(ForgetsEvictions)
