"""Mutation score of ``engine/`` and ``invariants/``: one command, results on one page.

    pip install 'mutmut==3.8.1'
    python benchmarks/mutation/run.py --work /tmp/mutation --page docs/mutation.md
    python benchmarks/mutation/run.py --work /tmp/sample --sample 1000 --also /tmp/mutation ...

Files are run whole; or a sample of the mutants of some is drawn, of all others unless some are
named.  It goes on where it was stopped: what the work folder has is not run again, but for mutants
of functions that have changed, and if asked (``--again``: the tests have become better) for those
that survived and are not explained.  What was not drawn is estimated by what mutants of the sample
did when they were run first: tests that their survivors led to say nothing of others.  The page
tells what this folder and others (``--also``) have.

mutmut makes the mutants and ``forks.py`` runs them; ``results.py`` reads what became of them, and
``page.py`` counts and tells it.  A mutant is named by the path of its file, and the folders here
are imported by another name than their paths say: so it works in a folder of links with the real
layout.  What is to kill are the tests of what is mutated and those in ``kill/``.  A mutant is a
change of one expression; one that survives is explained in ``explained.toml``, or is a wish for a
better check.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from page import page
from results import (
    AGAIN,
    HERE,
    PATHS,
    ROOT,
    explanations,
    meta_of,
    others,
    reason,
    results_of,
    survivors,
)

from kvproof.fuzz.faults import all_faults
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.invariants.case import save_case
from kvproof.stateful_tests.totals import Totals

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
    "test_isolation.py",
    "test_prometheus.py",
    "test_policies.py",
    "test_prefix_cache.py",
    "test_hits.py",
    "test_tier_stories.py",
    "test_engine_mutants.py",
    "test_cap_bounds.py",
    "test_tags.py",
    "test_goals.py",
    "test_vocabulary.py",
    "test_books_mutants.py",
    "test_checker_mutants.py",
    "test_case_mutants.py",
    "test_shadow_mutants.py",
)
"""Of ``tests/``: those of what is mutated."""
LEFT_OUT = (
    "test_isolation.py::test_a_policy_that_swallows_every_interrupt_ends_the_process_and_is_named",
    "test_isolation.py::test_a_machine_that_is_busy_with_others_is_no_hang",
    "test_isolation.py::test_a_policy_that_recurses_for_ever_is_an_exception",
    "test_isolation.py::test_a_policy_that_raises_is_told_with_its_name_and_place[policy3",
    "test_isolation.py::test_a_policy_that_changes_its_state_is_a_mutation[deletes_an_attribute]",
    "test_isolation.py::test_a_state_that_was_kept_cannot_be_asked",
    "test_eviction.py::test_a_policy_that_has_hung_once_is_not_waited_for_as_long_again",
    "test_tiers.py::test_faults_of_the_index_and_of_unwanted_copies_are_drawn",
    "test_tiers.py::test_what_goes_wrong_between_groups_is_found",
    "test_tiers.py::test_two_groups_are_driven",
    "test_prefix_cache.py::test_another_policy_passes_all_checks_but_not_as_lru",
    "test_prefix_cache.py::test_two_groups_pass_all_checks_and_a_fault_in_them_does_not",
    "test_hits.py::test_remembered_hits_are_fresh",
    "test_goals.py::test_a_search_of_seconds_meets_every_goal",
)
"""The first end processes, go by the time that others take, need all of the stack or ask who is on
it, or pass once in a process; the last are long searches, which the loop is as well."""
PACKAGES = ("engine", "invariants", "kernels", "stateful_tests", "fuzz")
SETTINGS = """\
[tool.mutmut]
source_paths = ["kvproof/engine", "kvproof/invariants"]
also_copy = ["kvproof", "kill"]
only_mutate = {files}

[tool.pytest.ini_options]
addopts = {options}
pythonpath = ["."]
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files, such as engine/pool.py")
    parser.add_argument("--work", type=Path, required=True, help="folder to work in, kept")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--sample", type=int, help="run only so many mutants, drawn at random")
    parser.add_argument("--also", type=Path, action="append", default=[], help="told as well")
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--seconds", type=float, help="stop then; the same command goes on")
    parser.add_argument("--again", action="store_true", help="run what survived before once more")
    asked = parser.parse_args(arguments)
    work = asked.work.resolve()
    paths = asked.paths or (PATHS if asked.sample is None else others())
    if not asked.only_page:
        build(work, paths)
        if asked.again:
            mark_survivors(work, paths)
        mutate(work, paths, asked.seconds, asked.sample)
    told = page([work, *asked.also])
    asked.page.write_text("\n".join(told) + "\n", encoding="utf-8")


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
    before = {path for path in (*PATHS, *others()) if meta_of(work, path).exists()}
    for path in {*paths} - before:
        # A copy that is not mutated is younger than its source, as those are that are up to date.
        (work / "mutants" / "kvproof" / path).unlink(missing_ok=True)
    files = [f"kvproof/{path}" for path in sorted({*paths} | before)]
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


def mutate(work: Path, paths: Sequence[str], seconds: float | None, sample: int | None) -> None:
    """Run the mutants that have not been run, for so long at most."""
    tests = [f"kill/{name}" for name in (*UNIT_TESTS, "test_loop.py")]
    if any(path.startswith("invariants/") for path in paths):
        tests.append("kill/test_controls.py")
    command = [sys.executable, str(HERE / "forks.py")]
    command += ["--seconds", str(seconds)] if seconds is not None else []
    command += ["--sample", str(sample)] if sample is not None else []
    command += ["--tests", *tests, "--paths", *paths]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (work / "forks.log").open("ab") as log:
        subprocess.run(command, cwd=work, env=environment, check=True, stdout=log, stderr=log)


def mark_survivors(work: Path, paths: Sequence[str]) -> None:
    """Those that are not explained are to be run again; what they did at first is kept."""
    explained = explanations()
    for path in paths:
        results = results_of(work, path)
        for one in survivors(work, path):
            if not one.is_wording and reason(one, explained.get(path, [])) is None:
                results["exit_code_by_key"][one.name] = AGAIN
        if results:
            meta_of(work, path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
