"""What is mutated, and what became of the mutants of each file, as a work folder has it.

``forks.py`` writes there what is read here; why mutants survive is told in ``explained.toml``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPLAINED = HERE / "explained.toml"
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


def others() -> list[str]:
    """All files but those that are run whole."""
    files = [str(path.relative_to(ROOT)) for top in MUTATED for path in (ROOT / top).rglob("*.py")]
    return sorted({*files} - {*PATHS})


def meta_of(work: Path, path: str) -> Path:
    return work / "mutants" / "kvproof" / f"{path}.meta"


def results_of(work: Path, path: str) -> dict[str, Any]:
    meta = meta_of(work, path)
    return dict(json.loads(meta.read_text())) if meta.exists() else {}


def drawn(work: Path, path: str) -> frozenset[str] | None:
    """The mutants of a file that are in the sample; None if it is run whole."""
    kept = work / "sample.json"
    of_file = json.loads(kept.read_text()).get(path) if kept.exists() else None
    codes = results_of(work, path).get("exit_code_by_key", {}).values()
    return None if of_file is None or None not in codes else frozenset(of_file)


def statuses(work: Path, path: str) -> dict[str, str]:
    """By mutant, of those that are to be run."""
    codes = results_of(work, path).get("exit_code_by_key", {})
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
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))


def reason(survivor: Survivor, explained: Sequence[dict[str, Any]]) -> str | None:
    """Why it survives; None if that is not explained."""
    return next((str(entry["why"]) for entry in explained if _explains(entry, survivor)), None)


def _explains(entry: dict[str, Any], survivor: Survivor) -> bool:
    """An entry names a function, what the changed line has in it before, and what it may have in
    it after."""
    return (
        entry.get("function", survivor.function) == survivor.function
        and entry.get("before", "") in survivor.before
        and any(text in survivor.after for text in entry["after"])
    )


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


def of_files(works: Sequence[Path]) -> Iterator[OfFile]:
    """From the first folder that has a file."""
    for path in (*PATHS, *others()):
        work = next((work for work in works if meta_of(work, path).exists()), None)
        if work is not None:
            mutants = len(results_of(work, path)["exit_code_by_key"])
            counts = Counter(statuses(work, path).values())
            sampled = drawn(work, path) is not None
            first = first_statuses(work, path)
            yield OfFile(path, mutants, sampled, counts, list(survivors(work, path)), first)
