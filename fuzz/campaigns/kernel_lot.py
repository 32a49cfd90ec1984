"""Runs of the kernels: one of their own checks, on problems drawn from the run's seed.

Compiled where there is a GPU, interpreted otherwise.  Checks that draw nothing are left to
``kvproof kernels check``: once is enough for them.

A check that raises anything has found something, unless the machine is to blame: memory that ran
out, a compiler that is not there.  After an error of the device nothing works any more in this
process: it ends, and the campaign goes on in a fresh one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from subprocess import CalledProcessError
from typing import Any
from zlib import crc32

from hypothesis.errors import Flaky, HypothesisException
from msgspec.structs import replace

from kvproof.fuzz.campaigns.lots import Lot, Site
from kvproof.fuzz.campaigns.records import KERNEL, FindingRecord, Progress, Target
from kvproof.fuzz.campaigns.store import digest
from kvproof.fuzz.campaigns.triage import write_finding

EXAMPLES = 40
"""Problems of a run; of a law, one."""
_DRAWING = ("reference", "law", "write", "copy")
"""What the names of checks begin with, or go on with after the kernel's, that draw problems."""
_MACHINES = (MemoryError, OSError, ImportError, CalledProcessError)
"""Of these, and what says the following, the machine is to blame, or what is installed there."""
_LACKS = re.compile(
    "out of memory|[Uu]nable to allocate|can't allocate memory|C compiler"
    "|Cannot find (ptxas|cuobjdump|nvdisasm)"
)
_DEVICE = re.compile(r"(CUDA|HIP) error|Triton Error \[")
"""An error of the device, as PyTorch and Triton tell of it."""

_TEST = '''\
"""{title}

{body}
"""

{prepare}from kvproof.kernels.checks import Plan, all_checks


def test_{id}() -> None:
    check = next(check for check in all_checks() if check.name == {check!r})
    check.run(Plan({device!r}, {examples}, {seed}{shrinks}))
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
        torch.zeros(1, device=self._device)  # a device that does not work is no kernel's fault
        checks = import_module("kvproof.kernels.checks").all_checks()
        self._checks = [check for check in checks if _draws(check.name)]
        # Of those that are never run the journal says so.
        self.progress.totals.checked.update(dict.fromkeys([own.name for own in self._checks], 0))

    def make(self, seed: str) -> None:
        self.site.say(seed)
        lot = crc32(seed.encode())
        check = self._checks[lot % len(self._checks)]
        totals = self.progress.totals
        for error in self._errors(check, lot):
            if _is_told(error):
                self._failing.add(check.name)
                self._report(check, lot, seed, error)
            else:
                totals.problems.append(f"run {seed}: {check.name}: {type(error).__name__}: {error}")
        totals.runs += 1
        totals.ops += 1 if "-law-" in check.name else EXAMPLES
        totals.checked[check.name] = totals.checked.get(check.name, 0) + 1

    def _errors(self, check: Any, lot: int) -> list[Exception]:
        """What the check raises; for the first time, on a smaller problem if that does the same.

        Once the device has failed, every problem seems to: that one is not made smaller.
        """
        error = self._error(check, lot, shrinks=False)
        if error is None:
            return []
        if check.name in self._failing or not _is_told(error) or _is_devices(error):
            return [error]
        smaller = self._error(check, lot, shrinks=True)
        if smaller is None or not _is_told(smaller):
            return [error]
        return [smaller] if type(smaller) is type(error) else [error, smaller]

    def _error(self, check: Any, lot: int, *, shrinks: bool) -> Exception | None:
        plan = import_module("kvproof.kernels.checks").Plan(self._device, EXAMPLES, lot, shrinks)
        try:
            check.run(plan)
        except Exception as error:
            self.is_spent = self.is_spent or _is_devices(error)
            return error
        return None

    def _report(self, check: Any, lot: int, seed: str, error: Exception) -> None:
        how, told = _told(error)
        kinds = (check.name, *([how] if how else []))
        finding = FindingRecord(
            id=f"kernel_{digest(' '.join(kinds))[:8]}",
            target=self.target.name,
            subject=self.target.subject,
            property=KERNEL,
            kinds=kinds,
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
            shrinks=", shrink=False" if _is_devices(error) else "",
        )
        write_finding(self.site.store, finding, None, source=source)
        self.failed(finding.id)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those it consists of, and those it was raised from."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__cause__):
        if inner is not None:
            yield from _causes(inner)


def _is_told(error: Exception) -> bool:
    """Whether it is a finding; it is none if the machine is to blame, or how problems are drawn."""
    if isinstance(error, HypothesisException) and not isinstance(error, Flaky):
        return False
    return not any(
        isinstance(cause, _MACHINES) or _LACKS.search(str(cause)) for cause in _causes(error)
    )


def _is_devices(error: Exception) -> bool:
    """Whether the device has failed, for good as far as this process goes."""
    return _is_told(error) and any(_DEVICE.search(str(cause)) for cause in _causes(error))


def _told(error: Exception) -> tuple[str, str]:
    """How a check fails, if not by saying that something is wrong; and all that it says."""
    words = [str(error), *getattr(error, "__notes__", ())]
    if isinstance(error, AssertionError):
        return "", "\n".join(words)
    if isinstance(error, Flaky):
        first = next((cause for cause in _causes(error) if cause is not error), error)
        words[0] = f"it fails by chance, and not again on the same problem: {first}"
        return "by chance", "\n".join(words)
    words[0] = f"it raises {type(error).__name__}: {error}"
    if _is_devices(error):
        words.append("The process was ended: the device does nothing more for it.")
    return f"raises {type(error).__name__}", "\n".join(words)


def _draws(check: str) -> bool:
    return any(part in _DRAWING for part in check.split("-")[:2])
