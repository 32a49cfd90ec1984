"""Mutation score of ``engine/`` and ``invariants/``: one command, results on one page.

    pip install 'mutmut==3.8.1'
    python benchmarks/mutation/run.py --work /tmp/mutation --page docs/mutation.md

It goes on where it was stopped: what the work folder has is not run again, but for mutants of
functions that have changed, and if asked (``--again``: the tests have become better) for those that
survived and are not explained.  mutmut makes the mutants and ``forks.py`` runs them.  A mutant is
named by the path of its file, and the folders here are imported by another name than their paths
say: so it works in a folder of links with the real layout.  What is to kill are the tests of what
is mutated and those in ``kill/``.  A mutant is a change of one expression; one that survives is
explained in ``explained.toml``, or is a wish for a better check.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvproof.fuzz.faults import all_faults
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.case import save_case
from kvproof.stateful_tests.totals import Totals

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UNIT_TESTS = (
    "test_mutants.py",
    "test_check_mutants.py",
    "test_window_mutants.py",
    "test_plan_mutants.py",
    "test_steps.py",
    "test_eviction.py",
    "test_engine.py",
    "test_tiers.py",
    "test_checks.py",
    "test_tier_checks.py",
    "test_scheduling_checks.py",
    "test_scheduler.py",
    "test_scheduler_mutants.py",
    "test_offloading.py",
    "test_disk.py",
    "test_stream_order.py",
    "test_pool_groups.py",
    "test_merged_blocks.py",
    "test_order_pieces.py",
    "test_early_publication.py",
)
"""Of ``tests/``: those of what is mutated."""
LEFT_OUT = (
    "test_eviction.py::test_a_policy_that_has_hung_once_is_not_waited_for_as_long_again",
    "test_tiers.py::test_faults_of_the_index_and_of_unwanted_copies_are_drawn",
    "test_tiers.py::test_what_goes_wrong_between_groups_is_found",
    "test_tiers.py::test_two_groups_are_driven",
)
"""The first passes once in a process; the others are long searches, which the loop is as well."""
PACKAGES = ("engine", "invariants", "kernels", "stateful_tests", "fuzz")
PATHS = (
    "engine/pool.py",
    "engine/eviction/lru.py",
    "engine/eviction/arc.py",
    "engine/steps.py",
    "engine/keys.py",
    "engine/scheduler.py",
    "engine/tiers/pool.py",
    "engine/tiers/storage.py",
    "engine/tiers/hierarchy.py",
    "engine/tiers/transfers.py",
    "invariants/checks/cons.py",
    "invariants/checks/ref.py",
    "invariants/checks/pin.py",
    "invariants/checks/order.py",
    "invariants/checks/key.py",
    "invariants/checks/prov.py",
    "invariants/checks/quies.py",
    "invariants/scheduling/checks/plan.py",
    "invariants/scheduling/checks/fit.py",
)
"""What is mutated unless other files are named."""
STATUS = {0: "survived", 1: "killed", 3: "killed", 5: "no tests", 33: "no tests", None: "not run"}
"""By the exit code of a mutant's tests; any other was ended by force: a time limit, a crash."""
SETTINGS = """\
[tool.mutmut]
source_paths = ["kvproof/engine", "kvproof/invariants"]
also_copy = ["kvproof", "kill"]
only_mutate = {files}

[tool.pytest.ini_options]
addopts = {options}
pythonpath = ["."]
"""


_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


class Survivor(NamedTuple):
    """A mutant that nothing noticed."""

    name: str
    before: str
    after: str

    @property
    def function(self) -> str:
        return function_of(self.name)

    @property
    def is_wording(self) -> bool:
        """Only what a sentence says was changed."""
        said = zip(_TEXT.findall(self.before), _TEXT.findall(self.after), strict=False)
        changed = [before for before, after in said if before != after]
        same_code = _TEXT.sub('""', self.before) == _TEXT.sub('""', self.after)
        return same_code and bool(changed) and all(" " in text for text in changed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", default=PATHS, help="files, such as engine/pool.py")
    parser.add_argument("--work", type=Path, required=True, help="folder to work in, kept")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--seconds", type=float, help="stop then; the same command goes on")
    parser.add_argument("--again", action="store_true", help="run what survived before once more")
    asked = parser.parse_args(arguments)
    work = asked.work.resolve()
    build(work, asked.paths)
    if asked.again:
        forget_survivors(work, asked.paths)
    mutate(work, asked.paths, asked.seconds)
    asked.page.write_text("\n".join(page(work, asked.paths)) + "\n", encoding="utf-8")


def build(work: Path, paths: Sequence[str]) -> None:
    """The folder of links, what is to kill, and the settings of mutmut and pytest."""
    links = work / "kvproof"
    links.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not (links / name).is_symlink():
            (links / name).symlink_to(ROOT / name)
    shutil.copytree(HERE / "kill", work / "kill", dirs_exist_ok=True)
    for name in UNIT_TESTS:
        shutil.copy(ROOT / "tests" / name, work / "kill")
    if any(path.startswith("invariants/") for path in paths):
        find_controls(work / "kill" / "cases")
    options = ["--import-mode=importlib", *(f"--deselect=kill/{name}" for name in LEFT_OUT)]
    files = [f"kvproof/{path}" for path in paths]
    settings = SETTINGS.format(files=json.dumps(files), options=json.dumps(options))
    (work / "pyproject.toml").write_text(settings, encoding="utf-8")
    commits = work / "commits"
    known = commits.read_text().splitlines() if commits.exists() else []
    commits.write_text("\n".join(dict.fromkeys([*known, commit()])))


def commit() -> str:
    """Of what is mutated."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "engine", "invariants")
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return told.stdout.strip()


def find_controls(folder: Path) -> None:
    """A small case for each seeded fault."""
    folder.mkdir(exist_ok=True)
    for fault in all_faults():
        path = folder / f"{fault.id}.json"
        if not path.exists():
            seed = f"control/{fault.id}"
            found = search(fault.subject, seed, seconds=600, totals=Totals(), fault=fault.id)
            shrunk = shrink(found.case, replays_max=100) if found else None
            assert shrunk, fault.id
            save_case(shrunk.case, path)


def mutate(work: Path, paths: Sequence[str], seconds: float | None) -> None:
    """Run the mutants that have not been run, for so long at most."""
    tests = [f"kill/{name}" for name in (*UNIT_TESTS, "test_loop.py")]
    if any(path.startswith("invariants/") for path in paths):
        tests.append("kill/test_controls.py")
    limit = ["--seconds", str(seconds)] if seconds is not None else []
    command = [sys.executable, str(HERE / "forks.py"), *limit]
    command += ["--tests", *tests, "--paths", *paths]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (work / "forks.log").open("ab") as log:
        subprocess.run(command, cwd=work, env=environment, check=True, stdout=log, stderr=log)


def forget_survivors(work: Path, paths: Sequence[str]) -> None:
    """Those that are not explained are as if they had not been run."""
    explained = explanations()
    for path in paths:
        results = _results(work, path)
        for one in survivors(work, path):
            if not one.is_wording and _why(one, explained.get(path, [])) is None:
                results["exit_code_by_key"][one.name] = None
        if results:
            _meta(work, path).write_text(json.dumps(results))


def _meta(work: Path, path: str) -> Path:
    return work / "mutants" / "kvproof" / f"{path}.meta"


def _results(work: Path, path: str) -> dict[str, Any]:
    meta = _meta(work, path)
    return dict(json.loads(meta.read_text())) if meta.exists() else {}


def statuses(work: Path, path: str) -> dict[str, str]:
    """By mutant."""
    codes = _results(work, path).get("exit_code_by_key", {})
    return {name: STATUS.get(code, "ended by force") for name, code in codes.items()}


def survivor_names(work: Path, path: str) -> list[str]:
    of_all = statuses(work, path).items()
    return [name for name, status in of_all if status in ("survived", "no tests")]


def survivors(work: Path, path: str) -> Iterator[Survivor]:
    """Those of one file, as changes of lines."""
    kept = work / "survivors.json"
    shown = json.loads(kept.read_text()) if kept.exists() else {}
    for name in survivor_names(work, path):
        lines = [
            one for one in shown.get(name, "").splitlines() if not one.startswith(("---", "+++"))
        ]
        before, after = (
            " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
        )
        yield Survivor(name, before, after)


def function_of(mutant: str) -> str:
    """``BlockPool.take`` of ``kvproof.engine.pool.xǁBlockPoolǁtake__mutmut_1``."""
    name = mutant.rpartition(".")[2].rpartition("__mutmut_")[0]
    return name.removeprefix("xǁ").replace("ǁ", ".") if "ǁ" in name else name.removeprefix("x_")


def explanations() -> dict[str, list[dict[str, Any]]]:
    """By file."""
    return tomllib.loads((HERE / "explained.toml").read_text(encoding="utf-8"))


def page(work: Path, paths: Sequence[str]) -> Iterator[str]:
    """The results in Markdown."""
    explained = explanations()
    counts = {path: Counter(statuses(work, path).values()) for path in paths}
    yield "# Mutation score"
    yield ""
    named = "" if tuple(paths) == PATHS else f" {' '.join(paths)}"
    yield f"Written by `python benchmarks/mutation/run.py --work FOLDER --page FILE.md{named}`,"
    commits = (work / "commits").read_text().splitlines()
    yield f"at commit {', '.join(commits)}."
    yield ""
    yield (
        "A mutant is a copy of a file with one expression changed.  It is killed by the tests of "
        "what is mutated, among them those that earlier survivors led to "
        "(`tests/test_*mutants.py`), by the seeded loop from fixed seeds "
        "(`benchmarks/mutation/kill/`), which must stay silent on what is right, and, for the "
        "checks, by one small case for each seeded fault, which must still be seen at the same "
        "operation and as the same property.  *Ended by force* (a time limit: it ran for ever) "
        "counts as killed.  The score is of mutants that were run, without those that only change "
        "the words of a message.  Where several commits are named, mutants of functions that did "
        "not change were not run again at the later ones."
    )
    yield ""
    yield "| file | mutants | run | killed | ended by force | survived | of these wording | score |"
    yield "|---|---|---|---|---|---|---|---|"
    told = {path: list(survivors(work, path)) for path in paths}
    for path in paths:
        yield _row(path, counts[path], told[path])
    total = sum(counts.values(), Counter[str]())
    yield _row("all", total, [one for path in paths for one in told[path]])
    yield ""
    open_ones = sum(
        not one.is_wording and _why(one, explained.get(path, [])) is None
        for path in paths
        for one in told[path]
    )
    yield f"Open: {open_ones} that survive and are not explained, {total['not run']} not run."
    yield ""
    for path in paths:
        yield from _of_file(path, told[path], explained.get(path, []))


def _row(path: str, counts: Counter[str], survived: Sequence[Survivor]) -> str:
    run = counts.total() - counts["not run"]
    wording = sum(one.is_wording for one in survived)
    score = f"{100 * (run - len(survived)) / (run - wording):.0f} %" if run > wording else "–"
    cells = (counts.total(), run, counts["killed"], counts["ended by force"], len(survived))
    return f"| {path} | {' | '.join(map(str, cells))} | {wording} | {score} |"


def _of_file(
    path: str, survived: Sequence[Survivor], explained: Sequence[dict[str, Any]]
) -> Iterator[str]:
    telling = [one for one in survived if not one.is_wording]
    if not telling:
        return
    yield f"## {path}"
    yield ""
    for one in telling:
        why = _why(one, explained) or "**not explained**"
        yield f"- `{one.function}`: `{one.before}` → `{one.after}`: {why}"
    yield ""


def _why(survivor: Survivor, explained: Sequence[dict[str, Any]]) -> str | None:
    return next((str(entry["why"]) for entry in explained if _explains(entry, survivor)), None)


def _explains(entry: dict[str, Any], survivor: Survivor) -> bool:
    """An entry names a function, what the changed line has in it before, and what it may have in
    it after."""
    return (
        entry.get("function", survivor.function) == survivor.function
        and entry.get("before", "") in survivor.before
        and any(text in survivor.after for text in entry["after"])
    )


if __name__ == "__main__":
    main(sys.argv[1:])
