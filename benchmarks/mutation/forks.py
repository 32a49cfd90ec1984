"""Makes mutants and runs them in forks of one pytest process; started by ``run.py``.

    cd WORK; python forks.py [--seconds N] [--sample N] --tests FILE... --paths MUTATED_FILE...

mutmut starts pytest anew for each mutant, which takes longer than most mutants live.  Here the
tests are collected once; each is run once on what is not mutated, to learn which functions it
meets and how long it takes.  A mutant then costs a fork and those tests that meet its function:
first those that have killed others near it, then those that survivors led to, then the quickest.
Mutants that live long are put off until all others have been run.  Results are kept where mutmut
keeps its own, and in ``first.json`` the first of each: the only ones that better tests, written
for mutants that survived, have not made better.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol
from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

KILLED, SURVIVED, NO_TESTS, AGAIN, PUT_OFF = 1, 0, 33, 76, 77
"""Exit codes, as mutmut has them but for the last two: one that survived and is to be run again,
and one that lives long.  Below zero: the signal that ended it."""
SOON = 1.0
"""So many CPU seconds each mutant gets at first."""
PATIENCE = 20.0
"""So many times its CPU seconds a mutant may take by the clock: the machine may be busy."""
KEEP_EVERY = 20
ASKED_FIRST = 6
"""So many tests that killed the latest mutants of the function, and twice as many of those that
killed most of the file, come before the quickest."""


class Meeting(NamedTuple):
    """What a test meets."""

    seconds: float
    fails: bool
    functions: list[str]
    sources: str
    """Digest of the tests and the code that this was found with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--sample", type=int)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--paths", nargs="+", required=True)
    asked = parser.parse_args()
    work = Path.cwd()
    set_mutant_under_test("mutant_generation")
    (work / "mutants").mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
    config()  # is read from where we are
    only = None
    if asked.sample is not None:
        sample = draw(work, asked.paths, asked.sample)
        keep_also(work / "sample.json", sample)
        only = {name for names in sample.values() for name in names}
    os.chdir(work / "mutants")
    sys.path.insert(0, str(work / "mutants"))
    forks = Forks(work, asked.paths, time.monotonic() + asked.seconds, only)
    options = ["--rootdir=.", "-q", "-p", "no:cacheprovider", "-p", "no:kvproof"]
    # A folder that no other pytest tidies up while this one runs.
    options += [f"--basetemp={work / 'tmp'}", "-o", "tmp_path_retention_policy=none"]
    code = pytest.main([*options, *asked.tests], [forks])
    os.chdir(work)
    keep_also(work / "survivors.json", dict(survivors(work, asked.paths)))
    return int(code)


def keep_also(file: Path, new: dict[str, Any]) -> None:
    """In a file that may have others already."""
    before = json.loads(file.read_text()) if file.exists() else {}
    kept = file.with_suffix(".new")
    kept.write_text(json.dumps(before | new, indent=1))
    kept.replace(file)


def meta_of(work: Path, path: str) -> Path:
    return work / "mutants" / "kvproof" / f"{path}.meta"


def draw(work: Path, paths: Sequence[str], count: int) -> dict[str, list[str]]:
    """So many mutants of all files, by file: those whose names have the least digests."""
    files = {path: json.loads(meta_of(work, path).read_text()) for path in paths}
    names = [(name, path) for path in paths for name in files[path]["exit_code_by_key"]]
    names.sort(key=lambda one: sha256(one[0].encode()).digest())
    sample: dict[str, list[str]] = {path: [] for path in paths}
    for name, path in names[:count]:
        sample[path].append(name)
    return sample


def survivors(work: Path, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What each mutant changed that nothing noticed."""
    for path in paths:
        for name, code in json.loads(meta_of(work, path).read_text())["exit_code_by_key"].items():
            if code in (SURVIVED, NO_TESTS):
                yield name, get_diff_for_mutant(name, path=f"kvproof/{path}")


class Forks:
    """In place of pytest's loop over tests."""

    def __init__(
        self, work: Path, paths: Sequence[str], deadline: float, only: set[str] | None
    ) -> None:
        self.work = work
        self.paths = paths
        self.deadline = deadline
        self.only = only
        """Those to run, if not all."""
        self.items: dict[str, pytest.Item] = {}
        self.seconds: dict[str, float] = {}
        self.tests_of: dict[str, list[str]] = {}
        self.killers: dict[str, list[str]] = {}
        """By function, the latest first."""
        self.kills: dict[str, Counter[str]] = {}
        """By module."""
        self.wrong: list[str] = []
        self.first: dict[str, int] = {}
        """The code of each mutant when it was run first."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.meet()
        self.must_survive()
        for limit in (SOON, None):
            for path in self.paths:
                self.run_all_of(path, limit)
        self.must_survive()  # or something else than mutants has killed
        return True

    # -- which tests meet what ---------------------------------------------------------------------

    def meet(self) -> None:
        """Run each test on what is not mutated, unless that is known."""
        kept = self.work / "tests.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        code = self._digest_of_code()
        set_mutant_under_test("stats")
        for nodeid, item in self.items.items():
            sources = f"{code} {_digest(item.path)}"
            if nodeid not in known or known[nodeid][-1] != sources:
                known[nodeid] = _meet(item, sources)
        set_mutant_under_test("")
        _empty_caches()
        kept.write_text(json.dumps(known))
        met = {nodeid: Meeting(*known[nodeid]) for nodeid in self.items}
        self.wrong = [nodeid for nodeid, meeting in met.items() if meeting.fails]
        for nodeid, meeting in sorted(met.items(), key=_when):
            self.seconds[nodeid] = meeting.seconds
            for function in meeting.functions:
                self.tests_of.setdefault(function, []).append(nodeid)

    def must_survive(self) -> None:
        """What is not mutated passes all tests, in a fork as well."""
        wrong = self.wrong or [*filter(None, [self.fork("", list(self.items), None)[1]])]
        if wrong:
            pytest.exit(f"fails on what is not mutated: {', '.join(wrong)}", returncode=2)

    def _digest_of_code(self) -> str:
        return " ".join(_digest(self.work / "kvproof" / path) for path in self.paths)

    # -- mutants -----------------------------------------------------------------------------------

    def run_all_of(self, path: str, limit: float | None) -> None:
        """Those of a file that have not been run: for so long at first, then to the end."""
        meta = meta_of(self.work, path)
        results = json.loads(meta.read_text())
        codes: dict[str, int | None] = results["exit_code_by_key"]
        todo = [name for name, code in codes.items() if code in (None, AGAIN)]
        if self.only is not None:
            todo = [name for name in todo if name in self.only]
        for number, name in enumerate(todo):
            if time.monotonic() > self.deadline:
                break
            code = self.run(name, limit)
            if code != PUT_OFF:
                if codes[name] is None:
                    self.first[name] = code
                codes[name] = code
            if number % KEEP_EVERY == 0:
                self._keep(meta, results)
        self._keep(meta, results)

    def _keep(self, meta: Path, results: dict[str, Any]) -> None:
        keep_also(self.work / "first.json", self.first)
        new = meta.with_suffix(".new")
        new.write_text(json.dumps(results, indent=4))
        new.replace(meta)

    def run(self, name: str, limit: float | None) -> int:
        """The exit code of one mutant."""
        function, module = name.rpartition("__mutmut_")[0], name.rpartition(".")[0]
        killers = self.killers.setdefault(function, [])
        kills = self.kills.setdefault(module, Counter())
        quickest = self.tests_of.get(function, [])
        often = [test for test, _ in kills.most_common(2 * ASKED_FIRST) if test in {*quickest}]
        tests = list(dict.fromkeys([*killers[:ASKED_FIRST], *often, *quickest]))
        if not tests:
            return NO_TESTS
        code, killer = self.fork(name, tests, limit)
        if killer:
            kills[killer] += 1
            killers[:] = [killer, *(one for one in killers if one != killer)]
        return code

    def fork(self, name: str, tests: Sequence[str], limit: float | None) -> tuple[int, str]:
        """How the tests end for a mutant, and which of them killed it."""
        cpu = 10 + sum(self.seconds[test] for test in tests)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
            set_mutant_under_test(name)
            code, killer = self._first_that_fails(tests, limit)
            os.write(writing, killer.encode())
            os._exit(code)
        os.close(writing)
        code = _exit_code(pid, PATIENCE * cpu)
        killer = os.read(reading, 10_000).decode()
        os.close(reading)
        print(f"{time.strftime('%X')} {code} {name} {killer}", flush=True)
        return code, killer

    def _first_that_fails(self, tests: Sequence[str], limit: float | None) -> tuple[int, str]:
        for test in tests:
            if limit is not None and time.process_time() > limit:
                return PUT_OFF, ""
            if _fails(self.items[test]):
                return KILLED, test
        return SURVIVED, ""


def _when(one: tuple[str, Meeting]) -> tuple[bool, float]:
    """Tests that survivors led to come first, then the quickest."""
    nodeid, meeting = one
    return "mutants.py::" not in nodeid, meeting.seconds


def _fails(item: pytest.Item) -> bool:
    try:
        return any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))
    except BaseException:  # a mutant may end pytest itself
        return True


def _meet(item: pytest.Item, sources: str) -> Meeting:
    _empty_caches()
    state()._stats.clear()
    began = time.process_time()
    fails = _fails(item)
    return Meeting(time.process_time() - began, fails, sorted(state()._stats), sources)


def _empty_caches() -> None:
    """What one test left in them would keep another, or a fork, from meeting what it meets."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvproof."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _exit_code(pid: int, seconds: float) -> int:
    """Of a child that is ended by force after so long, if it sleeps."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
