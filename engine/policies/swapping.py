"""First come, first served, with swapping: victims keep what they computed, in host memory.

As ``fcfs`` in all else.  A victim is swapped out if it is in no step in flight and the swap space
has room for all of its blocks, and preempted by recomputation if not: where vLLM's first scheduler
would have failed for want of swap space, this one goes on.  Nobody comes back in an iteration that
swapped out, so copies go one way at a time.

Sources: Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention*, SOSP 2023, section 4.5 (survey K09, K13, 2.4).
"""

from __future__ import annotations

from kvproof.engine.policies.fcfs import FirstComeFirstServed


class FirstComeFirstServedSwapping(FirstComeFirstServed):
    """Arrival order; the latest admitted is swapped out, or else recomputed."""

    swaps = True
