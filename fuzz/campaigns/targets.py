"""What a campaign drives, and how its time is shared among it.

By default everything of kvproof's own: the cache without and with tiers, every scheduler policy,
every eviction policy, and the kernels where torch and triton are installed.  Whoever names a
subject or a policy of theirs has the campaign spend its time on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from kvproof.engine.policies import POLICY_NAMES
from kvproof.fuzz.campaigns.records import Campaign, Target
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.fuzz.tier_swarm import TIERS_SHARE
from kvproof.invariants.errors import InputError
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.policies import EVICTION_POLICIES, is_eviction_policy

KERNELS = "kernels"


def _sharing(family: str, policies: Sequence[str], share: float) -> tuple[Target, ...]:
    """Policies that have one share among them."""
    name = "policy" if family == "scheduler" else family
    return tuple(
        Target(f"{name}:{policy}", f"{family}:{policy}", share / len(policies))
        for policy in policies
    )


FAMILIES: dict[str, Callable[[], tuple[Target, ...]]] = {
    "cache": lambda: (Target("cache", "engine", tiers_share=0.0),),
    "tiers": lambda: (Target("tiers", "engine", tiers_share=1.0),),
    "scheduler": lambda: _sharing("scheduler", POLICY_NAMES, 2.0),
    "eviction": lambda: _sharing("eviction", tuple(EVICTION_POLICIES), 0.5),
    KERNELS: lambda: (Target(KERNELS, KERNELS),),
}
"""By the names that ``--target`` takes; each family has a share of 1, the schedulers of 2, since
there are eight, and the eviction policies of a half, since they are small."""


def has_kernels() -> bool:
    """Whether what the kernels need is installed."""
    return find_spec("torch") is not None and find_spec("triton") is not None


def chosen_targets(
    families: Sequence[str] = (),
    subjects: Sequence[str] = (),
    policies: Sequence[str] = (),
    fault: str | None = None,
) -> tuple[Target, ...]:
    """The targets of a campaign; all there are if none is named.

    Raises InputError if there is no such thing, or if it is not installed.
    """
    for family in families:
        if family not in FAMILIES:
            raise InputError(f"unknown target {family!r}; there are {', '.join(FAMILIES)}")
    if KERNELS in families and not has_kernels():
        raise InputError("target kernels: torch and triton are not installed: 'kvproof[kernels]'")
    if not families and not subjects and not policies:
        families = [name for name in FAMILIES if name != KERNELS or has_kernels()]
    targets = [target for family in families for target in FAMILIES[family]()]
    targets += [Target(f"subject:{subject}", subject) for subject in subjects]
    for policy in policies:
        family = "eviction" if is_eviction_policy(policy) else "scheduler"
        targets += _sharing(family, [policy], 1.0)
    for target in targets:
        if target.subject != KERNELS:
            subject_factory(target.subject)
    if fault is not None:
        fault_by_id(fault)
    return tuple({target.name: target for target in targets}.values())


def draw_for(target: Target, seed: str, able: frozenset[str]) -> Draw:
    """The run of that seed; ``able`` as ``abilities`` says of the subject."""
    tiers_share = TIERS_SHARE if target.tiers_share is None else target.tiers_share
    return draw_run(seed, able, tiers_share=tiers_share)


def seeds_of(campaign: Campaign, target: Target) -> str:
    """What the seeds of a target's runs begin with; a slash and the run's number follow."""
    return f"{campaign.seed}/{target.name}"


def shard_of(campaign: Campaign, target: Target, seed: str) -> int:
    """The shard that makes the run of that seed; the first, if it is no run of the target's."""
    seeds, _, number = seed.rpartition("/")
    is_of_target = seeds == seeds_of(campaign, target) and number.isdecimal()
    return int(number) % campaign.shards if is_of_target else 0
