"""Mutation score of kvproof over vLLM: how many changes of vLLM's cache code does the kit notice?

    bash .ci/vllm-env FOLDER; FOLDER/bin/pip install . 'mutmut==3.8.1' coverage
    FOLDER/bin/python benchmarks/mutation/foreign.py --work /tmp/foreign --page PAGE.md

mutmut makes the mutants: each changes one expression of the installed release.  They are put into
the loaded module and never written: a forked process exchanges the code of one function, and
searches.  A mutant that no run reaches is counted apart: nothing can be said of code for models
whose layouts are not driven.  It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import coverage
import libcst
import msgspec
from mutmut.mutation.file_mutation import Mutation, create_mutations

from kvproof.fuzz.search import search
from kvproof.stateful_tests.subjects import SUBJECT_NAMES
from kvproof.stateful_tests.totals import Totals

MODULES = (
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.single_type_kv_cache_manager",
)
DRIVEN = ("vllm:manager", "vllm:scheduler")
"""Whose subjects search; not those of other policies, which have a known issue."""
SETTINGS = '[tool.mutmut]\nsource_paths = ["."]\n'
SECONDS = 60.0
GRACE = 60.0
"""A search that is this much late hangs."""
REACHING_SECONDS = 20.0
"""Of each subject: what is not reached by then is not driven."""


class Result(msgspec.Struct, frozen=True):
    """What became of one mutant."""

    module: str
    number: int
    function: str
    before: str
    after: str
    outcome: str
    """``killed``, ``hang``, ``survived`` or ``not reached``."""
    property: str = ""
    subject: str = ""
    operations: int = 0
    """Of the failing run, as it was found."""
    cpu_seconds: float = 0.0


class Mutant(NamedTuple):
    """One change of one module."""

    module: str
    number: int
    owner: str
    """The class; empty for a function of the module."""
    function: str
    tree: libcst.Module
    change: Mutation

    @property
    def key(self) -> tuple[str, int]:
        return self.module, self.number

    def source(self) -> str:
        """Of the whole module, with the change."""
        changed = self.tree.deep_replace(self.change.original_node, self.change.mutated_node)
        assert isinstance(changed, libcst.Module)
        return changed.code

    def shown(self) -> tuple[str, str]:
        """What was changed, before and after."""
        before, after = (
            " ".join(self.tree.code_for_node(node).split())
            for node in (self.change.original_node, self.change.mutated_node)
        )
        return before[:160], after[:160]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with results, kept")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--sample", type=int, help="so many mutants at random; all unless given")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of search, each")
    asked = parser.parse_args(arguments)
    work, page_file = asked.work.resolve(), asked.page.resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    os.chdir(work)  # where mutmut looks for its settings
    journal = work / "results.jsonl"
    subjects = [name for name in SUBJECT_NAMES if name.startswith(DRIVEN) and "prio" not in name]
    reached = reached_lines(subjects)
    mutants = [mutant for module in MODULES for mutant in mutants_of(module)]
    random.Random(0).shuffle(mutants)
    known = {(result.module, result.number) for result in results(journal)}
    for mutant in mutants[: asked.sample]:
        if mutant.key not in known:
            result = tried(mutant, reached[mutant.module], subjects, asked.seconds)
            with journal.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
    told = list(page(list(results(journal)), subjects, len(mutants), asked.seconds))
    page_file.write_text("\n".join(told) + "\n", encoding="utf-8")


def results(journal: Path) -> Iterator[Result]:
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    return (msgspec.json.decode(line, type=Result) for line in lines)


# -- mutants ---------------------------------------------------------------------------------------


def mutants_of(name: str) -> Iterator[Mutant]:
    """Each change that mutmut would make in a function of the module."""
    path = Path(str(import_module(name).__file__))
    module, mutations, _, _ = create_mutations(str(path), path.read_text(encoding="utf-8"))
    owners = dict(_owners(module))
    for number, mutation in enumerate(mutations):
        function = mutation.contained_by_top_level_function
        if isinstance(function, libcst.FunctionDef) and function in owners:
            yield Mutant(name, number, owners[function], function.name.value, module, mutation)


def _owners(module: libcst.Module) -> Iterator[tuple[libcst.FunctionDef, str]]:
    for node in module.body:
        if isinstance(node, libcst.FunctionDef):
            yield node, ""
        elif isinstance(node, libcst.ClassDef):
            for part in node.body.body:
                if isinstance(part, libcst.FunctionDef):
                    yield part, node.name.value


# -- searching -------------------------------------------------------------------------------------


def reached_lines(subjects: Sequence[str]) -> dict[str, set[int]]:
    """The lines of each module that the subjects reach."""
    files = {name: str(import_module(name).__file__) for name in MODULES}
    measured = coverage.Coverage(data_file=None, include=list(files.values()))
    with measured.collect():
        for subject in subjects:
            search(subject, "reached", seconds=REACHING_SECONDS, totals=Totals())
    data = measured.get_data()
    return {name: set(data.lines(path) or ()) for name, path in files.items()}


def tried(mutant: Mutant, reached: set[int], subjects: Sequence[str], seconds: float) -> Result:
    """Search in a process of its own."""
    name = f"{mutant.owner}.{mutant.function}".lstrip(".")
    said = (mutant.module, mutant.number, name, *mutant.shown())
    code = _code(mutant)
    if code is None or not set(_lines(code)) & reached:
        return Result(*said, "not reached")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, msgspec.json.encode(_searched(said, mutant, code, subjects, seconds)))
        os._exit(0)
    os.close(writing)
    if not _ended(child, seconds + GRACE):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        return Result(*said, "hang")
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    return msgspec.json.decode(told, type=Result) if told else Result(*said, "killed", "DIED")


def _searched(
    said: tuple[str, int, str, str, str],
    mutant: Mutant,
    code: CodeType,
    subjects: Sequence[str],
    seconds: float,
) -> Result:
    _function(import_module(mutant.module), mutant).__code__ = code
    for subject in subjects:
        share = seconds / len(subjects)
        try:
            found = search(subject, "mutant", seconds=share, totals=Totals())
        except Exception as error:  # a subject that cannot even be made
            return Result(*said, "killed", type(error).__name__, subject)
        if found is not None:
            property, length = found.violation.property, len(found.case.operations)
            return Result(*said, "killed", property, subject, length, time.process_time())
    return Result(*said, "survived")


def _ended(child: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    return False


def _function(module: ModuleType, mutant: Mutant) -> FunctionType:
    owner = module.__dict__[mutant.owner] if mutant.owner else module
    return _plain(vars(owner)[mutant.function])


def _plain(found: Any) -> FunctionType:
    """The function below ``staticmethod``, ``property`` and wrappers."""
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        found = (
            getattr(found, "__func__", None) or getattr(found, "fget", None) or found.__wrapped__
        )
    return found


def _code(mutant: Mutant) -> CodeType | None:
    """Of the changed function; None if it is none that is ever called in this place."""
    module = import_module(mutant.module)
    changed = ModuleType(module.__name__)
    changed.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
    # Annotated classes look themselves up there while they are made.
    sys.modules[module.__name__] = changed
    try:
        exec(compile(mutant.source(), str(module.__file__), "exec"), changed.__dict__)
        new, old = _function(changed, mutant), _function(module, mutant)
    except Exception:  # abstract, overloaded, or gone with the change
        return None
    finally:
        sys.modules[module.__name__] = module
    return new.__code__ if new.__code__.co_freevars == old.__code__.co_freevars else None


def _lines(code: CodeType) -> Iterator[int]:
    """Of the body: the first line is reached whenever the module is imported."""
    return (line for _, _, line in code.co_lines() if line and line > code.co_firstlineno)


# -- the page --------------------------------------------------------------------------------------


def page(
    all_results: Sequence[Result], subjects: Sequence[str], mutants: int, seconds: float
) -> Iterator[str]:
    """The results in Markdown."""
    version = import_module("vllm").__version__
    yield f"# Mutants of vLLM {version}"
    yield ""
    yield "Written by `python benchmarks/mutation/foreign.py --work FOLDER --page FILE.md`."
    yield ""
    yield (
        f"mutmut makes {mutants:,} mutants of these modules, each by a change of one expression; "
        f"{len(all_results):,} of them, drawn at random, were tried.  One is killed if kvproof "
        f"finds a violation within {seconds:.0f} s, shared among {', '.join(subjects)}; vLLM's own "
        "tests were not asked.  *Not reached*: in a function that these subjects never call, such "
        "as those for state-space models."
    )
    yield ""
    yield "| module | tried | not reached | killed | survived | killed of those reached |"
    yield "|---|---|---|---|---|---|"
    for module in MODULES:
        yield _row(module, [result for result in all_results if result.module == module])
    yield _row("all", all_results)
    yield ""
    by = Counter(r.property or r.outcome for r in all_results if r.outcome in ("killed", "hang"))
    yield "Seen first by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()) + "."
    yield ""
    yield "## Survivors"
    yield ""
    for result in all_results:
        if result.outcome == "survived":
            where = f"{result.module.rpartition('.')[2]}: {result.function}"
            yield f"- {where}: `{result.before}` → `{result.after}`"


def _row(name: str, some: Sequence[Result]) -> str:
    outcomes = Counter(result.outcome for result in some)
    killed = outcomes["killed"] + outcomes["hang"]
    reached = killed + outcomes["survived"]
    share = f"{100 * killed / reached:.0f} %" if reached else "–"
    cells = (len(some), outcomes["not reached"], killed, outcomes["survived"], share)
    return f"| {name} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
