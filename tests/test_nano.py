"""A small engine in the manner of nano-vllm: right as it is, and wrong in publicly known ways.

The faults are those that issues and pull requests of nano-vllm describe (some are disputed there),
each a few lines over the example.  The checks know nothing of them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import Found, search
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.operations import kind_of
from kvproof.invariants.subject import Configuration, Subject
from kvproof.stateful_tests.examples.nano import BlockManager, Scheduler, Sequence
from kvproof.stateful_tests.examples.nano_subject import NanoSubject
from kvproof.stateful_tests.totals import Totals

NAME = "kvproof.stateful_tests.examples.nano_subject:NanoSubject"


def find(runs: int) -> tuple[Found | None, Totals]:
    totals = Totals()
    return search(NAME, "nano", seconds=60, totals=totals, runs_max=runs), totals


def test_subject_fits_the_protocol() -> None:
    assert isinstance(NanoSubject(Configuration()), Subject)


def test_the_engine_as_it_is_has_no_findings() -> None:
    found, totals = find(120)
    assert found is None
    assert totals.problems == []
    assert totals.ops > 10_000
    for kind in NanoSubject(Configuration()).capabilities:
        assert totals.operations[kind]["done"], kind


# -- the bugs ------------------------------------------------------------------------------------


class LeavesOldHash(BlockManager):
    """Issue 163: a block is reset, but the map still leads to it."""

    def forget(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.hash, block.token_ids = -1, ()


class LeavesOldHashAndTokens(LeavesOldHash):
    """The same, where the tokens that a hit is compared with are left as well."""

    def forget(self, block_id: int) -> None:
        self.blocks[block_id].hash = -1


class CachesWholePrompt(BlockManager):
    """Issue 144: a prompt of just full blocks that are all cached leaves nothing to compute."""

    def num_matchable(self, seq: Sequence) -> int:
        return len(seq) // self.block_size


class AppendsTooLate(BlockManager):
    """Pull request 66: the new token is not counted when a block is added for it …"""

    def may_append(self, seq: Sequence) -> None:
        uncounted, seq.token_ids = seq.token_ids, seq.token_ids[:-1] or seq.token_ids
        super().may_append(seq)
        seq.token_ids = uncounted


class AppendsTooEarly(BlockManager):
    """… or one is counted that is not there yet."""

    def num_blocks(self, seq: Sequence) -> int:
        return len(seq) // self.block_size + 1


class AsksAtTheWrongToken(BlockManager):
    """MinivLLM, a relative, pull request 85: room is asked for when a block has become full, and
    taken a token later."""

    def can_append(self, seq: Sequence) -> bool:
        return len(seq) % self.block_size != 0 or bool(self.free_block_ids)


class FindsWhatIsNotComputed(BlockManager):
    """Issue 208: blocks are in the map from their allocation on, before any step computes them."""

    def allocate(self, seq: Sequence) -> None:
        super().allocate(seq)
        cached, seq.num_cached_tokens = seq.num_cached_tokens, len(seq)
        self.hash_blocks(seq)
        seq.num_cached_tokens = cached


class CountsBeforeAllocation(Scheduler):
    """Pull requests 211 and 233: what is to compute is counted before a hit makes it less."""

    def start(self, seq: Sequence) -> bool:
        num_tokens = len(seq) - seq.num_cached_tokens
        started = super().start(seq)
        if started:
            seq.num_pending_tokens = num_tokens
        return started


class TakesResumedForDecoding(Scheduler):
    """Issue 144: whoever has an output is taken to have its prompt computed."""

    def first_token(self, seq: Sequence) -> int:
        return len(seq) - 1 if len(seq) > seq.num_prompt_tokens else seq.num_cached_tokens


class Known(NamedTuple):
    part: str
    fault: type
    properties: set[str]
    """Those that are told of it: as the catalogue of bugs has it."""
    operations: int
    """At most, when shrunk."""


KNOWN = [
    Known("manager_class", LeavesOldHash, {"VALID"}, 6),
    Known("manager_class", LeavesOldHashAndTokens, {"VALID"}, 6),
    Known("manager_class", CachesWholePrompt, {"CAP"}, 5),
    Known("manager_class", AppendsTooLate, {"CAP"}, 3),
    Known("manager_class", AppendsTooEarly, {"CAP"}, 2),
    Known("manager_class", AsksAtTheWrongToken, {"CAP", "CRASH"}, 4),
    Known("manager_class", FindsWhatIsNotComputed, {"VALID"}, 2),
    Known("scheduler_class", CountsBeforeAllocation, {"RESUME"}, 6),
    Known("scheduler_class", TakesResumedForDecoding, {"RESUME"}, 6),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.fault.__name__)
def test_a_known_bug_is_caught_and_shrunk(monkeypatch: pytest.MonkeyPatch, known: Known) -> None:
    monkeypatch.setattr(NanoSubject, known.part, known.fault)
    found, _ = find(200)
    assert found is not None
    shrunk = shrink(found.case)
    assert shrunk is not None
    seen = {violation.property for violation in replay(shrunk.case).violations}
    assert known.properties & seen, shrunk.violation
    kinds = [kind_of(operation) for operation in shrunk.case.operations]
    assert len(kinds) <= known.operations, kinds
