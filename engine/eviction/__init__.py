"""Eviction policies: which evictable block loses its content first.  One policy per file."""

from __future__ import annotations

from kvproof.engine.eviction.arc import AdaptiveReplacement
from kvproof.engine.eviction.lru import LeastRecentlyUsed
from kvproof.engine.eviction.policy import EvictionPolicy, EvictionPolicyFactory

EVICTION_ORDERS: dict[str, EvictionPolicyFactory] = {
    "lru": LeastRecentlyUsed,
    "arc": AdaptiveReplacement,
}
"""By the names that a configuration gives them."""

__all__ = [
    "EVICTION_ORDERS",
    "AdaptiveReplacement",
    "EvictionPolicy",
    "EvictionPolicyFactory",
    "LeastRecentlyUsed",
]
