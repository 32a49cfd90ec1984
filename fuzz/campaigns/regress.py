"""Replay of a campaign's corpus: a regression suite, and what coverage of code is measured with.

Coverage is taken here, in seconds, and not while a campaign runs: it would make that two to three
times slower.  ``python -m kvproof.fuzz.campaigns.regress FOLDER`` is the process that coverage.py
runs: what is measured has to be imported under its eyes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from kvproof.fuzz.campaigns.guarded import Judged, Replayer, judge_here
from kvproof.fuzz.campaigns.records import Campaign, CodeCoverage, FileCoverage
from kvproof.fuzz.campaigns.store import Store, as_text, require_subject, write_whole
from kvproof.fuzz.campaigns.targets import KERNELS
from kvproof.invariants.errors import InputError
from kvproof.invariants.verdict import Verdict
from kvproof.stateful_tests.subjects import is_kvproofs_own
from kvproof.stateful_tests.subjects.policies import imported_class, user_module


class Regression(Struct, frozen=True):
    """A case of the corpus that fails now."""

    case: str
    property: str
    message: str


class Replayed(Struct, frozen=True):
    """What became of the corpus."""

    cases: int
    failing: tuple[Regression, ...]
    problems: tuple[str, ...] = ()
    """Where a checker stumbled: whether those cases fail is unknown."""
    lost: int = 0
    """Of these, replays that hung, or took their process along."""

    @property
    def verdict(self) -> Verdict:
        if self.failing:
            return "fail"
        return "pass" if self.cases and not self.problems else "unknown"


def replay_corpus(
    store: Store, campaign: Campaign, on_case: Callable[[], object] = lambda: None
) -> Replayed:
    """Replay all that was kept, audited at each operation, in a process that may hang or die.

    Raises InputError.
    """
    with Replayer() as replayer:
        return _replayed(store, campaign, replayer.judge, on_case)


def _replayed(
    store: Store,
    campaign: Campaign,
    judge: Callable[[Path], Judged],
    on_case: Callable[[], object] = lambda: None,
) -> Replayed:
    cases, lost, failing, problems = 0, 0, list[Regression](), list[str]()
    for target in campaign.targets:
        for path, case in store.kept(target.name):
            require_subject(case, path, target.subject)
            cases += 1
            on_case()
            judged = judge(path)
            failing += [
                Regression(str(path), violation.property, violation.message)
                for violation in judged.violations[:1]
            ]
            if judged.problem and not judged.violations:
                problems.append(f"{path}: {judged.problem}")
                lost += judged.is_lost
    return Replayed(cases, tuple(failing), tuple(problems), lost)


def replay_covered(store: Store, campaign: Campaign) -> tuple[Replayed, CodeCoverage | None]:
    """The same, and once more in a process under coverage.py; also written to ``coverage.json``.

    There is no coverage if a replay hangs or dies.  Branches are told by sys.monitoring where
    Python can (from 3.14 on), else by a tracer.  Raises InputError if coverage.py is not installed.
    """
    if importlib.util.find_spec("coverage") is None:
        raise InputError("--coverage needs coverage.py: pip install coverage")
    first = replay_corpus(store, campaign)
    if first.lost:
        return first, None
    code = ",".join(dict.fromkeys(code_under_test(campaign)))
    with TemporaryDirectory() as folder:
        data, told = Path(folder, "data"), Path(folder, "told.json")
        coverage = [sys.executable, "-m", "coverage"]
        _call(
            *(*coverage, "run", "--branch", f"--data-file={data}", f"--include={code}"),
            *("-m", "kvproof.fuzz.campaigns.regress", str(store.folder), str(told)),
        )
        replayed = msgspec.json.decode(told.read_bytes(), type=Replayed)
        report = Path(folder, "report.json")
        _call(*coverage, "json", f"--data-file={data}", "-o", str(report))
        files = json.loads(report.read_bytes())["files"]
    covered = CodeCoverage(
        replayed.cases,
        tuple(
            FileCoverage(
                name,
                figures["num_statements"],
                figures["covered_lines"],
                figures["num_branches"],
                figures["covered_branches"],
            )
            for name, figures in ((name, file["summary"]) for name, file in files.items())
        ),
    )
    write_whole(store.folder / "coverage.json", as_text(covered))
    return replayed, covered


def code_under_test(campaign: Campaign) -> Iterator[str]:
    """Patterns of the files that the targets are made of."""
    for target in campaign.targets:
        family, _, name = target.subject.partition(":")
        if target.subject == KERNELS:
            continue
        if target.subject == "vllm:manager":
            yield _folder_of("vllm.v1.core")
        elif not is_kvproofs_own(target.subject) and family in ("scheduler", "eviction"):
            yield str(sys.modules[imported_class(name).__module__].__file__)
        elif not is_kvproofs_own(target.subject):
            yield str(Path(str(user_module(family).__file__)).parent / "*")
        else:
            yield _folder_of("kvproof.engine")


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return str(Path(str(spec.origin)).parent / "*")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"coverage could not be taken: {done.stderr.strip().splitlines()[-1]}")


def main() -> None:
    """Replay, and write what came of it."""
    folder, told = map(Path, sys.argv[1:])
    store = Store(folder)
    campaign = store.campaign()
    assert campaign is not None
    write_whole(told, as_text(_replayed(store, campaign, judge_here)))


if __name__ == "__main__":
    main()
