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

mutmut makes the mutants and ``forks.py`` runs them.  A mutant is named by the path of its file, and
the folders here are imported by another name than their paths say: so it works in a folder of links
with the real layout.  What is to kill are the tests of what is mutated and those in ``kill/``.  A
mutant is a change of one expression; one that survives is explained in ``explained.toml``, or is a
wish for a better check.
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

from shares import wilson

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
PATHS = (
    "engine/pool.py",
    "engine/eviction/lru.py",
    "engine/eviction/arc.py",
    "engine/steps.py",
    "engine/keys.py",
    "engine/scheduler.py",
    "engine/policies/contiguous.py",
    "engine/policies/fcfs.py",
    "engine/policies/guaranteed_no_evict.py",
    "engine/policies/max_utilization.py",
    "engine/policies/orca.py",
    "engine/policies/priority.py",
    "engine/policies/static_batch.py",
    "engine/policies/swapping.py",
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
"""What is run whole unless other files are named."""
MUTATED = ("engine", "invariants")
AGAIN = 76
"""Code of one that survived and is to be run again."""
STATUS = {
    None: "not run",
    0: "survived",
    AGAIN: "survived",
    1: "killed",
    3: "killed",
    5: "no tests",
    33: "no tests",
}
"""By the exit code of a mutant's tests; any other was ended by force: a time limit, a crash."""
ALIVE = ("survived", "no tests")
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


def others() -> list[str]:
    """All files but those that are run whole."""
    files = [str(path.relative_to(ROOT)) for top in MUTATED for path in (ROOT / top).rglob("*.py")]
    return sorted({*files} - {*PATHS})


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
    before = {path for path in (*PATHS, *others()) if _meta(work, path).exists()}
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
        results = _results(work, path)
        for one in survivors(work, path):
            if not one.is_wording and _why(one, explained.get(path, [])) is None:
                results["exit_code_by_key"][one.name] = AGAIN
        if results:
            _meta(work, path).write_text(json.dumps(results))


def _meta(work: Path, path: str) -> Path:
    return work / "mutants" / "kvproof" / f"{path}.meta"


def _results(work: Path, path: str) -> dict[str, Any]:
    meta = _meta(work, path)
    return dict(json.loads(meta.read_text())) if meta.exists() else {}


def drawn(work: Path, path: str) -> frozenset[str] | None:
    """The mutants of a file that are in the sample; None if it is run whole."""
    kept = work / "sample.json"
    of_file = json.loads(kept.read_text()).get(path) if kept.exists() else None
    codes = _results(work, path).get("exit_code_by_key", {}).values()
    return None if of_file is None or None not in codes else frozenset(of_file)


def statuses(work: Path, path: str) -> dict[str, str]:
    """By mutant, of those that are to be run."""
    codes = _results(work, path).get("exit_code_by_key", {})
    sample = drawn(work, path)
    if sample is not None:
        codes = {name: code for name, code in codes.items() if name in sample}
    return {name: STATUS.get(code, "ended by force") for name, code in codes.items()}


def first_statuses(work: Path, path: str) -> dict[str, str]:
    """By mutant, of those in the sample: of the first run of each, where that was kept."""
    kept = work / "first.json"
    codes = json.loads(kept.read_text()) if kept.exists() else {}
    names = (drawn(work, path) or frozenset()) & {*codes}
    return {name: STATUS.get(codes[name], "ended by force") for name in names}


def survivor_names(work: Path, path: str) -> list[str]:
    return [name for name, status in statuses(work, path).items() if status in ALIVE]


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


class OfFile(NamedTuple):
    """The results of a file."""

    path: str
    mutants: int
    sampled: bool
    counts: Counter[str]
    """By status, of what is run."""
    survivors: Sequence[Survivor]
    first: dict[str, str]
    """By mutant of the sample, its status when it was run first, where that was kept."""

    @property
    def run(self) -> int:
        return self.counts.total() - self.counts["not run"]

    @property
    def telling(self) -> list[Survivor]:
        """Survivors that change more than words."""
        return [one for one in self.survivors if not one.is_wording]

    @property
    def trials(self) -> int:
        """What the score is of."""
        return self.run - len(self.survivors) + len(self.telling)

    @property
    def first_trials(self) -> int:
        """What the score at the first run is of."""
        wording = {one.name for one in self.survivors if one.is_wording}
        return len({*self.first} - wording)

    @property
    def first_killed(self) -> int:
        return sum(status not in ALIVE for status in self.first.values())


class Score(NamedTuple):
    """Of the mutants of some files: how many matter and how many are killed, with the least and
    the most that may be if that is an estimate."""

    trials: float
    killed: float
    least: float
    most: float

    def __add__(self, other: tuple[float, ...]) -> Score:  # type: ignore[override]
        return Score(*map(sum, zip(self, other, strict=True)))

    def __str__(self) -> str:
        if not self.trials:
            return "–"
        share, low, high = (round(100 * one / self.trials) for one in self[1:])
        return f"{share} %" if self.least == self.most else f"{share} % ({low} to {high} %)"


def of_files(works: Sequence[Path]) -> Iterator[OfFile]:
    """From the first folder that has a file."""
    for path in (*PATHS, *others()):
        work = next((work for work in works if _meta(work, path).exists()), None)
        if work is not None:
            mutants = len(_results(work, path)["exit_code_by_key"])
            counts = Counter(statuses(work, path).values())
            sampled = drawn(work, path) is not None
            first = first_statuses(work, path)
            yield OfFile(path, mutants, sampled, counts, list(survivors(work, path)), first)


def score(files: Sequence[OfFile]) -> Score:
    """Of those that were run, as it is now."""
    trials = sum(one.trials for one in files)
    killed = trials - sum(len(one.telling) for one in files)
    return Score(trials, killed, killed, killed)


def estimate(files: Sequence[OfFile]) -> Score:
    """Of those that were not run, by the first runs of those that were drawn from the same."""
    total = Score(0, 0, 0, 0)
    for top in MUTATED:
        total += _estimate([one for one in files if one.sampled and one.path.startswith(top)])
    return total


def _estimate(files: Sequence[OfFile]) -> Score:
    trials, killed = sum(one.first_trials for one in files), sum(one.first_killed for one in files)
    if not trials:
        return Score(0, 0, 0, 0)
    others = sum(one.mutants - one.run for one in files)
    others_that_matter = others * trials / sum(len(one.first) for one in files)
    # Of those drawn and not run it is open whether they survive: they live long.
    open_ones = sum(one.counts["not run"] for one in files)
    drawn_in_all = trials + open_ones
    least, _ = wilson(killed, drawn_in_all)
    _, most = wilson(killed + open_ones, drawn_in_all)
    shares = (1, (killed + open_ones / 2) / drawn_in_all, least, most)
    return Score(*(others_that_matter * share for share in shares))


def page(works: Sequence[Path]) -> Iterator[str]:
    """The results in Markdown."""
    explained = explanations()
    files = [one for one in of_files(works) if one.mutants]
    whole, sampled = ([one for one in files if one.sampled == asked] for asked in (False, True))
    yield "# Mutation score"
    yield ""
    more = ", and with `--sample N` what is sampled" if sampled else ""
    yield f"Written by `python benchmarks/mutation/run.py --work FOLDER --page FILE.md`{more},"
    commits = [line for work in works for line in (work / "commits").read_text().splitlines()]
    yield f"at commit {', '.join(dict.fromkeys(commits))}."
    yield ""
    yield (
        "A mutant is a copy of a file with one expression changed.  It is killed by the tests of "
        "what is mutated, among them those that earlier survivors led to "
        "(`tests/test_*mutants.py`), by the seeded loop from fixed seeds "
        "(`benchmarks/mutation/kill/`), which must stay silent on what is right, and, for the "
        "checks, by one small case for each seeded fault, which must still be seen at the same "
        "operation and as the same property.  *Ended by force* (a time limit: it ran for ever) "
        "counts as killed.  A score leaves out survivors that only change the words of a "
        "message.  Where several commits are named, mutants of functions that did "
        "not change were not run again at the later ones."
    )
    yield ""
    yield from _totals(files)
    yield from _table("Run whole", whole)
    yield from _table("Sampled", sampled)
    open_ones = sum(
        _why(survivor, explained.get(one.path, [])) is None
        for one in files
        for survivor in one.telling
    )
    not_run = sum(one.counts["not run"] for one in files)
    yield f"Open: {open_ones} that survive and are not explained, {not_run} not run."
    yield ""
    for one in files:
        yield from _of_file(one.path, one.telling, explained.get(one.path, []))


def _totals(files: Sequence[OfFile]) -> Iterator[str]:
    yield (
        "| | files | mutants | run | survived | of these wording | score of what was run "
        "| of others | of all |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for tops in (*([top] for top in MUTATED), MUTATED):
        some = [one for one in files if one.path.startswith(tuple(tops))]
        survived = sum(len(one.survivors) for one in some)
        wording = survived - sum(len(one.telling) for one in some)
        cells = (
            " and ".join(f"{top}/" for top in tops),
            f"{len(some)}",
            f"{sum(one.mutants for one in some):,}",
            f"{sum(one.run for one in some):,}",
            f"{survived}",
            f"{wording}",
            f"{score(some)}",
            f"{estimate(some)}",
            f"{score(some) + estimate(some)}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    sampled = [one for one in files if one.sampled]
    if sampled:
        unknown = sum(one.run - len(one.first) for one in sampled)
        yield (
            "Some files are run whole; of the others a sample was drawn: those whose names have "
            "the least digests, so that no one chooses them and a larger sample contains a smaller "
            "one.  Survivors lead to tests that kill them, after which the score of those that "
            "were run says nothing of others.  So others are estimated by what the mutants of the "
            "sample did when they were run *first*, before any test was written for them; there "
            "are more tests now, so that it is rather too low.  In brackets: Wilson's interval, of "
            "95 %, wherever those that were drawn and not run would lie; before them, half of "
            "these count as killed.  *Of all* is the sum: what was run, as it is now, and the "
            "others as estimated."
        )
        yield ""
        if unknown:
            yield (
                f"Of {unknown} of the sample the first result was not kept: they are no part of "
                "the estimate."
            )
            yield ""


def _table(title: str, files: Sequence[OfFile]) -> Iterator[str]:
    if not files:
        return
    first = " at the first run |" if files[0].sampled else ""
    yield f"## {title}"
    yield ""
    yield (
        "| file | mutants | run | killed | ended by force | survived | of these wording | score |"
        f"{first}"
    )
    yield f"|---|---|---|---|---|---|---|---|{'---|' if first else ''}"
    for one in files:
        yield _row(one.path, [one])
    yield _row("all", files)
    yield ""


def _row(name: str, files: Sequence[OfFile]) -> str:
    counts = sum((one.counts for one in files), Counter[str]())
    mutants, run = sum(one.mutants for one in files), sum(one.run for one in files)
    taken = f"{counts.total()} of {mutants}" if files[0].sampled else f"{mutants}"
    survived = sum(len(one.survivors) for one in files)
    wording = survived - sum(len(one.telling) for one in files)
    cells = [taken, run, counts["killed"], counts["ended by force"], survived, wording]
    cells += [score(files), *([_at_first(files)] if files[0].sampled else [])]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _at_first(files: Sequence[OfFile]) -> str:
    trials, killed = sum(one.first_trials for one in files), sum(one.first_killed for one in files)
    return f"{killed} of {trials}, {round(100 * killed / trials)} %" if trials else "–"


def _of_file(
    path: str, survived: Sequence[Survivor], explained: Sequence[dict[str, Any]]
) -> Iterator[str]:
    if not survived:
        return
    yield f"## {path}"
    yield ""
    for one in survived:
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
