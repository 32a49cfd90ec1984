"""Runs of the kernels: one of their own checks, on problems drawn from the run's seed.

Compiled where there is a GPU, interpreted otherwise.  Checks that draw nothing are left to
``kvproof kernels check``: once is enough for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from kvproof.fuzz.campaigns.lots import Lot, Site
from kvproof.fuzz.campaigns.records import KERNEL, FindingRecord, Progress, Target
from kvproof.fuzz.campaigns.store import digest
from kvproof.fuzz.campaigns.triage import write_finding

EXAMPLES = 40
"""Problems of a run; of a law, one."""
_DRAWING = ("reference", "law", "write", "copy")
"""What the names of checks begin with, or go on with after the kernel's, that draw problems."""

_TEST = '''\
"""{title}

{body}
"""

{prepare}from kvproof.kernels.checks import Plan, all_checks


def test_{id}() -> None:
    check = next(check for check in all_checks() if check.name == {check!r})
    check.run(Plan({device!r}, {examples}, {seed}))
'''
_INTERPRET = """\
from kvproof.kernels.interpreter import use_interpreter

use_interpreter()

"""


class KernelLot(Lot):
    """The lot of the kernels."""

    def __init__(self, site: Site, target: Target, lines: Sequence[Progress]) -> None:
        super().__init__(site, target, lines)
        self._device = ""
        self._checks: list[Any] = []
        self._failing: set[str] = set()
        """Names of checks that failed before."""

    def open(self) -> None:
        torch = import_module("torch")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu":
            import_module("kvproof.kernels.interpreter").use_interpreter()
        torch.set_num_threads(1)
        checks = import_module("kvproof.kernels.checks").all_checks()
        self._checks = [check for check in checks if _draws(check.name)]
        # Of those that are never run the journal says so.
        self.progress.totals.checked.update(dict.fromkeys([own.name for own in self._checks], 0))

    def make(self, seed: str) -> None:
        self.site.say(seed)
        lot = crc32(seed.encode())
        check = self._checks[lot % len(self._checks)]
        shrinks = check.name not in self._failing
        plan = import_module("kvproof.kernels.checks").Plan(self._device, EXAMPLES, lot, shrinks)
        totals = self.progress.totals
        try:
            check.run(plan)
        except AssertionError as error:
            self._failing.add(check.name)
            told = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self._report(check, lot, seed, told)
        except Exception as error:
            totals.problems.append(f"run {seed}: {check.name}: {type(error).__name__}: {error}")
        totals.runs += 1
        totals.ops += 1 if "-law-" in check.name else EXAMPLES
        totals.checked[check.name] = totals.checked.get(check.name, 0) + 1

    def _report(self, check: Any, lot: int, seed: str, told: str) -> None:
        finding = FindingRecord(
            id=f"kernel_{digest(check.name)[:8]}",
            target=self.target.name,
            subject=self.target.subject,
            property=KERNEL,
            kinds=(check.name,),
            features=(),
            message=f"{check.name}: {told.splitlines()[0] if told else 'it fails'}",
            explanation=f"{check.name}: {check.claim}\n{told}",
            operations=1,
            found_operations=1,
            seed=seed,
            shard=self.site.shard,
            at=round(self.site.clock(), 3),
        )
        finding = replace(finding, known=self.site.triage.ledger.issue_of(finding))
        source = _TEST.format(
            title=f"{check.name} fails.",
            body=finding.explanation.replace("\\", "\\\\").replace('"""', "'''"),
            prepare=_INTERPRET if self._device == "cpu" else "",
            id=finding.id,
            check=check.name,
            device=self._device,
            examples=EXAMPLES,
            seed=lot,
        )
        write_finding(self.site.store, finding, None, source=source)
        self.failed(finding.id)


def _draws(check: str) -> bool:
    return any(part in _DRAWING for part in check.split("-")[:2])
