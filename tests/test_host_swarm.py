"""Draws for subjects that are nothing without a host, and what they need not meet."""

from __future__ import annotations

from kvproof.fuzz.host_swarm import HOST_SHARE
from kvproof.fuzz.search import run_once
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.fuzz.verdicts import reachable_goals
from kvproof.invariants.operations import KINDS
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.strategies import world
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

SEMANTICS = Semantics(tiers=True, swaps=False, disk=False, needs_host=True)
CAPABILITIES = frozenset(KINDS) | {"offload", "promote", "land", "complete", "fail", "withhold"}
ABLE = CAPABILITIES | SEMANTICS.features()


def draws(count: int) -> list[Draw]:
    return [draw_run(f"host/{number}", ABLE) for number in range(count)]


def test_every_run_has_a_host_and_about_half_are_narrow() -> None:
    drawn = draws(200)
    assert drawn == draws(200)
    assert all(draw.configuration.host_blocks for draw in drawn)
    assert all("tiers" in draw.features and "disk" not in draw.features for draw in drawn)
    narrow = [draw for draw in drawn if "pressure" in draw.features]
    assert abs(len(narrow) / len(drawn) - HOST_SHARE) < 0.15
    assert {draw.configuration.host_eviction for draw in narrow} == {"lru", "arc"}


def test_a_machines_world_has_a_host_as_well() -> None:
    numbers = {"blocks": 8, "block_size": 2, "run_ahead": 1, "requests": 0, "features": 0}
    assert world(**numbers, able=SEMANTICS.features()).configuration.host_blocks
    assert not world(**numbers, able=Semantics(tiers=True).features()).configuration.host_blocks


def test_narrow_runs_evict_while_a_copy_upwards_reads() -> None:
    totals = Totals()
    for draw in draws(60):
        if "pressure" in draw.features:
            assert run_once(EngineSubject, draw, totals) is None
    assert not totals.problems
    goals = ("promoted", "store-refused", "evicts-past-pinned-slot", "completed-out-of-order")
    assert all(totals.goals[goal] >= 3 for goal in goals), totals.goals


class Diskless(EngineSubject):
    """kvproof's engine, of which less is promised."""

    capabilities = CAPABILITIES

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.semantics = SEMANTICS


def test_what_is_not_promised_need_not_be_reached() -> None:
    def reachable(subject: EngineSubject) -> set[str]:
        return {goal.id for goal in reachable_goals(subject)}

    lacking = reachable(EngineSubject(Configuration())) - reachable(Diskless(Configuration()))
    assert {"demoted", "fetched", "short-write", "disk-full"} <= lacking
    assert {"loading", "swap-out-in-flight", "swap-in-refused"} <= lacking
    assert {"store-completed", "promoted", "preempted-while-stored"}.isdisjoint(lacking)
