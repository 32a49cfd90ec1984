"""What a finding may be about that no check looks at: the run itself goes wrong.

They are told with the properties, by ``kvproof invariants`` and on the page of a campaign.
"""

from __future__ import annotations

from kvproof.fuzz.campaigns.records import DIED, HANG, KERNEL
from kvproof.fuzz.search import DETERMINISM, DONE_TWICE_EVERY
from kvproof.invariants.property import Property
from kvproof.stateful_tests.harness import CRASH

UNCHECKED = (
    Property(
        CRASH,
        "an operation answers, it does not raise",
        (),
        "No operation of the subject raises, nor does one of its policy, whatever is asked of it "
        "and in whatever state: what cannot be done is refused or skipped.",
        "That what it answers is right, which the properties above are about; and whatever the "
        "subject catches itself.",
        "admission-ignores-free-hits",
    ),
    Property(
        DETERMINISM,
        "the same operations have the same results",
        (),
        "The same operations, done in two fresh subjects of one process, get the same answers and "
        "report the same events.",
        f"Runs that are not done twice, and one in {DONE_TWICE_EVERY} is; what differs only from "
        "process to process, or between machines.",
        "",
    ),
    Property(
        HANG,
        "an operation ends",
        (),
        "In a campaign, each run comes to an end within ten minutes; one that does not is stopped "
        "and passed over.",
        "How long an operation takes below that; and kvproof check, which waits with the subject.",
        "",
    ),
    Property(
        DIED,
        "an operation leaves the process alive",
        (),
        "In a campaign, no run ends its process three times, by a signal or by an exit of its own.",
        "A process that dies once and not again, which is told among what a pass would still need; "
        "and whoever ends the process from outside, such as a system out of memory.",
        "",
    ),
    Property(
        KERNEL,
        "a kernel passes each of its checks",
        (),
        "Each check of kvproof kernels passes (kvproof kernels check); the finding names the check "
        "and tells its claim.",
        "What its checks do not claim.",
        "",
    ),
)
"""Without claims and sources: they are of a run, not of what a cache or a scheduler promises."""
