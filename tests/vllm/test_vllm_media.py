"""vLLM's scheduler with an encoder: what prompts show is part of the keys, and computed in time.

Needs vLLM 0.33 in an environment of its own: `bash .ci/vllm-env FOLDER`.
"""

from __future__ import annotations

from typing import Any

import pytest
from foreign import Mutant, Original, assert_found_and_shrunk, each_of, first_failure, needs

from kvproof.invariants.operations import Arrive, Media, Run, Schedule, Segment
from kvproof.invariants.scheduling.vocabulary import Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import is_kvproofs_own, subject_factory

NAME = "vllm:scheduler:media"
ASYNC = "vllm:async_scheduler:media"
SEED = "vllm-media"

needs(NAME)

pytestmark = pytest.mark.vllm


def harness(name: str = NAME) -> SchedulingHarness:
    run = harness_for(subject_factory(name)(Configuration(blocks=20)), audit_interval=1)
    assert isinstance(run, SchedulingHarness)
    return run


def showing(*items: int, length: int = 12, output: int = 1) -> Arrive:
    """Each item is three tokens long, with a token before it."""
    media = tuple([Media(item, 1 + 4 * place, 3) for place, item in enumerate(items)])
    return Arrive((Segment(1, length),), output=output, media=media)


def computed(run: SchedulingHarness) -> list[tuple[int, int]]:
    """Of the next iteration: tokens of each request."""
    assert not run.run([Schedule()])
    (scheduled,) = [event for event in run.last_events if isinstance(event, Scheduled)]
    return [(part.request, part.tokens) for part in scheduled.parts]


def test_prompts_with_other_items_share_what_lies_before_them() -> None:
    run = harness()
    for items, tokens in (((1,), 12), ((1,), 4), ((2,), 12), ((), 12), ((1, 2), 8)):
        run.perform(showing(*items))
        assert computed(run) == [(run.counts[Arrive]["done"] - 1, tokens)]
        assert not run.run([Run(1)])


def test_a_prompt_is_cut_before_the_item_for_which_the_encoder_has_no_room() -> None:
    run = harness()
    run.perform(showing(1, 2, 3, length=16))
    assert computed(run) == [(0, 9)]
    assert not run.run([Run(1)])
    run.drain([])
    assert not run.audit()


def test_media_are_skipped_where_arrivals_carry_none() -> None:
    run = harness("vllm:scheduler")
    assert run.perform(showing(1)).status == "skipped"
    assert not run.violations


def test_their_names_are_kvproofs_own() -> None:
    assert is_kvproofs_own(NAME)
    assert is_kvproofs_own(ASYNC)


@pytest.mark.parametrize("name", [NAME, ASYNC])
def test_the_unmodified_release_has_no_findings(name: str) -> None:
    assert first_failure(name, SEED, 60) is None


# -- mutants -------------------------------------------------------------------------------------


def leaves_the_item_out_of_the_key(original: Original) -> Original:
    return lambda request, start, end, first: ([], first)


def takes_every_item_for_computed(original: Original) -> Original:
    def look(manager: Any, request: Any, number: int) -> bool:
        return original(manager, request, number) or bool(manager.cached)

    return look


def lets_workers_drop_what_it_keeps(original: Original) -> Original:
    return lambda manager: [*original(manager), *manager.freeable]


def never_frees_for_who_has_ended(original: Original) -> Original:
    return lambda manager, request: None


ENCODER = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
KEYS = "vllm.v1.core.kv_cache_utils._gen_mm_extra_hash_keys"
MUTANTS = (
    Mutant(leaves_the_item_out_of_the_key, KEYS, {"KEY"}),
    Mutant(takes_every_item_for_computed, f"{ENCODER}.check_and_update_cache", {"CRASH"}),
    Mutant(lets_workers_drop_what_it_keeps, f"{ENCODER}.get_freed_mm_hashes", {"CRASH"}),
    Mutant(never_frees_for_who_has_ended, f"{ENCODER}.free", {"LIVE"}),
)


@each_of(MUTANTS)
def test_a_mutant_of_vllm_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert_found_and_shrunk(monkeypatch, mutant, NAME, SEED)
