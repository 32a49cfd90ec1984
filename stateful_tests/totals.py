"""What many runs did, added up."""

from __future__ import annotations

from msgspec import Struct, field

from kvproof.stateful_tests.harnesses import AnyHarness


class Totals(Struct):
    """Runs, operations, situations and checks, by whichever driver."""

    runs: int = 0
    ops: int = 0
    seconds: float = 0.0
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    goals: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    meanings: dict[str, int] = field(default_factory=dict)
    """Runs by what might become of KV that the device had no room for."""
    problems: list[str] = field(default_factory=list)
    """Why the verdict is unknown: a checker stumbled."""

    def add(self, harness: AnyHarness) -> None:
        """Add a finished run."""
        self.runs += 1
        self.ops += harness.operations
        for kind, counts in harness.operation_counts().items():
            total = self.operations.setdefault(kind, dict.fromkeys(counts, 0))
            for status, count in counts.items():
                total[status] += count
        _add(self.meanings, {" or ".join(harness.subject.configuration.meanings): 1})
        _add(self.goals, harness.goals)
        _add(self.checked, harness.checks())

    def merged(self, other: Totals) -> Totals:
        """Both together."""
        total = Totals(
            self.runs + other.runs,
            self.ops + other.ops,
            self.seconds + other.seconds,
            problems=[*self.problems, *other.problems],
        )
        for part in (self, other):
            for kind, counts in part.operations.items():
                _add(total.operations.setdefault(kind, {}), counts)
            _add(total.meanings, part.meanings)
            _add(total.goals, part.goals)
            _add(total.checked, part.checked)
        return total


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
