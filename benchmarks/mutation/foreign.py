"""Mutation score of kvproof over vLLM: how many changes of vLLM's cache code does the kit notice?

    bash .ci/vllm-env FOLDER; FOLDER/bin/pip install . 'mutmut==3.8.1' coverage
    FOLDER/bin/python benchmarks/mutation/foreign.py --work /tmp/foreign --page PAGE.md

mutmut makes the mutants: each changes one expression of the installed release.  They are put into
the loaded module and never written: a forked process exchanges the code of one function, and
searches, with the subjects that reach the changed statement.  A mutant that none reaches is counted
apart: nothing can be said of code for models whose layouts are not driven.  A sample is drawn from
a fixed seed, so a larger one contains a smaller one; and it goes on where it was stopped.  What
survives is explained in ``foreign.toml``.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import coverage
import libcst
import msgspec
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.file_mutation import Mutation, create_mutations
from shares import wilson

from kvproof.fuzz.search import search
from kvproof.stateful_tests.subjects import SUBJECT_NAMES
from kvproof.stateful_tests.totals import Totals

MODULES = (
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.single_type_kv_cache_manager",
)
DRIVEN = ("vllm:manager", "vllm:scheduler")
"""Whose subjects search."""
FLAWED = ("priority", "tiering")
"""But not these: a known issue of theirs would be taken for the mutant's."""
SETTINGS = '[tool.mutmut]\nsource_paths = ["."]\n'
SECONDS = 60.0
GRACE = 10
"""A search that takes so many CPU seconds more hangs …"""
PATIENCE = 200.0
"""… as does one that takes so many times as long by the clock."""
ROUNDS = (0.1, 0.9)
"""Shares of the time in which each subject has a turn: many mutants are killed at once."""
REACHING_SECONDS = 40.0
"""Of each subject, of CPU time: what is not reached by then is not driven."""
PYTHON = platform.python_version()
EXPLAINED = Path(__file__).with_name("foreign.toml")
KINDS = ("equivalent", "not driven", "rare", "wish")
"""Why a mutant survives, at the head of each explanation."""

Reached = dict[str, dict[str, set[int]]]
"""By subject and module, the lines that it executed."""


class Result(msgspec.Struct, frozen=True):
    """What became of one mutant."""

    module: str
    number: int
    function: str
    line: int
    before: str
    after: str
    outcome: str
    """``killed``, ``hang``, ``survived``; or, without a search, ``not reached`` or ``wording``."""
    property: str = ""
    subject: str = ""
    operations: int = 0
    """Of the failing run, as it was found."""
    cpu_seconds: float = 0.0
    """Of the search, until it found something or was over."""


class Conditions(msgspec.Struct, frozen=True):
    """What the results of a folder come from."""

    commits: list[str]
    subjects: list[str]


def is_killed(result: Result) -> bool:
    return result.outcome in ("killed", "hang")


def is_wording(before: str) -> bool:
    """Of a message, as against a name or a key."""
    return before.lstrip("f")[:1] in ("'", '"') and " " in before


class Mutant(NamedTuple):
    """One change of one module."""

    module: str
    number: int
    owner: str
    """The class; empty for a function of the module."""
    function: str
    tree: libcst.Module
    change: Mutation
    first: int
    last: int
    """Lines of the statement that is changed; of one that holds others, of its head.  Where the
    head of a function is changed, of all of it."""

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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of CPU time, each")
    parser.add_argument("--only-page", action="store_true", help="write the page anew, no search")
    asked = parser.parse_args(arguments)
    work, page_file = asked.work.resolve(), asked.page.resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    os.chdir(work)  # where mutmut looks for its settings
    journal = work / "results.jsonl"
    subjects = [name for name in SUBJECT_NAMES if name.startswith(DRIVEN)]
    subjects = [name for name in subjects if not name.endswith(FLAWED)]
    mutants = [mutant for module in MODULES for mutant in mutants_of(module)]
    random.Random(0).shuffle(mutants)
    if not asked.only_page:
        forget_unreached(work, subjects)
    left = [
        mutant
        for mutant in mutants[: asked.sample]
        if not _settled(results(journal).get(mutant.key), asked.seconds)
    ]
    if left and not asked.only_page:
        reached = begin(work, subjects)
        for mutant in left:
            result = tried(mutant, reached, asked.seconds)
            with journal.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
    conditions = msgspec.json.decode((work / "conditions.json").read_bytes(), type=Conditions)
    told = page(list(results(journal).values()), conditions, len(mutants))
    page_file.write_text("\n".join(told) + "\n", encoding="utf-8")


def begin(work: Path, subjects: Sequence[str]) -> Reached:
    """What those subjects reach; and the folder knows that this version has searched."""
    file = work / "conditions.json"
    before = msgspec.json.decode(file.read_bytes(), type=Conditions) if file.exists() else None
    commits = dict.fromkeys([*(before.commits if before else ()), commit()])
    file.write_bytes(msgspec.json.encode(Conditions(list(commits), list(subjects))))
    journal = work / "reached.json"
    known = msgspec.json.decode(journal.read_bytes(), type=Reached) if journal.exists() else {}
    for subject in subjects:
        if subject not in known:
            known[subject] = reached_lines(subject)
            journal.write_bytes(msgspec.json.encode(known))
    return {subject: known[subject] for subject in subjects}


def commit() -> str:
    """Of what searches."""
    git = ("git", "-C", str(EXPLAINED.parent))
    head = subprocess.check_output((*git, "rev-parse", "--short", "HEAD"), text=True).strip()
    changed = subprocess.check_output((*git, "status", "--porcelain"), text=True).strip()
    return f"{head} with changes" if changed else head


def forget_unreached(work: Path, subjects: Sequence[str]) -> None:
    """Where other subjects were driven before: these may reach what those did not."""
    file, journal = work / "conditions.json", work / "results.jsonl"
    if not file.exists():
        return
    if msgspec.json.decode(file.read_bytes(), type=Conditions).subjects == list(subjects):
        return
    kept = [one for one in results(journal).values() if one.outcome != "not reached"]
    journal.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in kept))


def results(journal: Path) -> dict[tuple[str, int], Result]:
    """By mutant; of one that was tried again, the latest."""
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    told = (msgspec.json.decode(line, type=Result) for line in lines)
    return {(result.module, result.number): result for result in told}


def _settled(result: Result | None, seconds: float) -> bool:
    """Known, and not a survivor of a shorter search."""
    return result is not None and (result.outcome != "survived" or result.cpu_seconds >= seconds)


# -- mutants ---------------------------------------------------------------------------------------


def mutants_of(name: str) -> Iterator[Mutant]:
    """Each change that mutmut would make in a function of the module."""
    path = Path(str(import_module(name).__file__))
    module, mutations, _, _ = create_mutations(str(path), path.read_text(encoding="utf-8"))
    known = MetadataWrapper(module, unsafe_skip_copy=True)
    places, parents = known.resolve(PositionProvider), known.resolve(ParentNodeProvider)
    owners = dict(_owners(module))
    for number, mutation in enumerate(mutations):
        function = mutation.contained_by_top_level_function
        if isinstance(function, libcst.FunctionDef) and function in owners:
            first, last = _statement(mutation.original_node, places, parents)
            owner, its_name = owners[function], function.name.value
            yield Mutant(name, number, owner, its_name, module, mutation, first, last)


def _statement(
    node: libcst.CSTNode,
    places: Mapping[libcst.CSTNode, CodeRange],
    parents: Mapping[libcst.CSTNode, libcst.CSTNode],
) -> tuple[int, int]:
    """The lines of the statement that a node is part of."""
    statement = node
    while not isinstance(statement, libcst.SimpleStatementLine | libcst.BaseCompoundStatement):
        statement = parents[statement]
    first, whole = places[statement].start.line, places[statement].end.line
    if isinstance(statement, libcst.SimpleStatementLine | libcst.FunctionDef):
        return first, whole
    return first, places[node].end.line


def _owners(module: libcst.Module) -> Iterator[tuple[libcst.FunctionDef, str]]:
    for node in module.body:
        if isinstance(node, libcst.FunctionDef):
            yield node, ""
        elif isinstance(node, libcst.ClassDef):
            for part in node.body.body:
                if isinstance(part, libcst.FunctionDef):
                    yield part, node.name.value


# -- searching -------------------------------------------------------------------------------------


def reached_lines(subject: str) -> dict[str, set[int]]:
    """What the subject executes; raises RuntimeError if it finds fault with vLLM as it is."""
    files = {name: str(import_module(name).__file__) for name in MODULES}
    measured = coverage.Coverage(data_file=None, include=list(files.values()))
    with measured.collect():
        found = _found(subject, "reached", time.process_time() + REACHING_SECONDS)
    if found is not None:
        raise RuntimeError(f"{subject}, unchanged: {found[0]}")
    data = measured.get_data()
    return {name: set(data.lines(path) or ()) for name, path in files.items()}


def tried(mutant: Mutant, reached: Reached, seconds: float) -> Result:
    """Search in a process of its own."""
    name = f"{mutant.owner}.{mutant.function}".lstrip(".")
    said = (mutant.module, mutant.number, name, mutant.first, *mutant.shown())
    code = _code(mutant)
    # The first line of a function is reached whenever its module is imported.
    lines = {*range(mutant.first, mutant.last + 1)} & {*_lines(code)} if code else set()
    subjects = [subject for subject, of in reached.items() if of[mutant.module] & lines]
    if not subjects:
        return Result(*said, "not reached")
    if is_wording(mutant.shown()[0]):
        return Result(*said, "wording")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        limit = int(seconds) + GRACE
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        os.write(writing, msgspec.json.encode(_searched(said, mutant, subjects, seconds)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        status = _ended(child, seconds * PATIENCE)
        told = file.read()
    if told:
        return msgspec.json.decode(told, type=Result)
    late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return Result(*said, "hang") if late else Result(*said, "killed", "DIED")


class OutOfTimeError(Exception):
    """The search had its share."""


def _searched(
    said: tuple[str, int, str, int, str, str],
    mutant: Mutant,
    subjects: Sequence[str],
    seconds: float,
) -> Result:
    _exchange(mutant)
    for share in ROUNDS:
        started = time.process_time()
        for rank, subject in enumerate(subjects, 1):
            end = started + seconds * share * rank / len(subjects)
            told = _found(subject, f"mutant-{share}", end)
            if told is not None:
                return Result(*said, "killed", told[0], subject, told[1], time.process_time())
    return Result(*said, "survived", cpu_seconds=time.process_time())


def _found(subject: str, seed: str, end: float) -> tuple[str, int] | None:
    """The property and the length of a failing run, if one comes up before so much CPU time."""

    def on_run(totals: Totals) -> None:
        if time.process_time() > end:
            raise OutOfTimeError

    try:
        found = search(subject, seed, seconds=1e9, totals=Totals(), on_run=on_run)
    except OutOfTimeError:
        return None
    except Exception as error:  # a subject that cannot even be made
        return type(error).__name__, 0
    assert found is not None
    return found.violation.property, len(found.case.operations)


def _ended(child: int, seconds: float) -> int:
    """How the process ended: by force, if it takes longer by the clock."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.05)


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


def _exchange(mutant: Mutant) -> None:
    """The function is the changed one from now on, wherever it is known."""
    old, new = _function(import_module(mutant.module), mutant), _changed(mutant)
    assert new is not None
    old.__code__ = new.__code__
    if (new.__defaults__, new.__kwdefaults__) != (old.__defaults__, old.__kwdefaults__):
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__


def _code(mutant: Mutant) -> CodeType | None:
    """Of the changed function; None if it is none that is ever called in this place."""
    new = _changed(mutant)
    return None if new is None else new.__code__


def _changed(mutant: Mutant) -> FunctionType | None:
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
    return new if new.__code__.co_freevars == old.__code__.co_freevars else None


def _lines(code: CodeType) -> Iterator[int]:
    """Of the body, and of functions in it."""
    yield from (line for _, _, line in code.co_lines() if line and line > code.co_firstlineno)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant)


# -- the page --------------------------------------------------------------------------------------


def page(all_results: Sequence[Result], conditions: Conditions, mutants: int) -> Iterator[str]:
    """The results in Markdown."""
    version = import_module("vllm").__version__
    lengths = sorted({round(r.cpu_seconds) for r in all_results if r.outcome == "survived"})
    searched = " to ".join(map(str, dict.fromkeys([*lengths[:1], *lengths[-1:]]))) or "0"
    yield f"# Mutants of vLLM {version}"
    yield ""
    yield "Written by `python benchmarks/mutation/foreign.py --work FOLDER --page FILE.md"
    commits = ", ".join(conditions.commits)
    yield f"--sample {len(all_results)}`, at commit {commits}, on Python {PYTHON}."
    yield ""
    yield (
        f"mutmut makes {mutants:,} mutants of these modules, each by a change of one expression; "
        f"{len(all_results):,} of them, drawn at random from a fixed seed, were tried.  One is "
        f"killed if kvproof finds a violation; those that survive were searched for "
        f"{searched} CPU seconds, shared among those of {', '.join(conditions.subjects)} that "
        f"reach the changed statement; vLLM's own tests were not asked.  *Not reached*: in "
        f"{REACHING_SECONDS:.0f} CPU seconds without a change no subject executed that "
        "statement, such as code for encoders.  *Wording*: only what a message says is changed; "
        "not searched, and not counted among those reached.  The interval is Wilson's, of 95 %."
    )
    yield ""
    yield "| module | tried | not reached | wording | killed | survived | killed of those reached |"
    yield "|---|---|---|---|---|---|---|"
    for module in MODULES:
        yield _row(module, [result for result in all_results if result.module == module])
    yield _row("all", all_results)
    yield ""
    by = Counter(result.property or result.outcome for result in all_results if is_killed(result))
    yield "Seen first by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()) + "."
    costs = sorted(result.cpu_seconds for result in all_results if result.outcome == "killed")
    if costs:
        yield (
            f"Half of those killed cost up to {costs[len(costs) // 2]:.1f} CPU seconds, "
            f"all of them up to {costs[-1]:.0f}."
        )
    yield ""
    yield from _survivors([result for result in all_results if result.outcome == "survived"])


def _row(name: str, some: Sequence[Result]) -> str:
    outcomes = Counter(result.outcome for result in some)
    killed = sum(is_killed(result) for result in some)
    reached = killed + outcomes["survived"]
    share = "–"
    if reached:
        low, high = wilson(killed, reached)
        share = f"{100 * killed / reached:.0f} % ({100 * low:.0f} to {100 * high:.0f} %)"
    unsought = outcomes["not reached"], outcomes["wording"]
    cells = (len(some), *unsought, killed, outcomes["survived"], share)
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _survivors(some: Sequence[Result]) -> Iterator[str]:
    counts = Counter(_kind(why(result)) for result in some)
    yield "## Survivors"
    yield ""
    yield ", ".join(f"{kind} {counts[kind]}" for kind in (*KINDS, "") if counts[kind]) + "."
    yield ""
    for result in sorted(some, key=lambda result: (result.module, result.line, result.number)):
        where = f"{result.module.rpartition('.')[2]}: `{result.function}`, line {result.line}"
        yield f"- {where}: `{result.before}` → `{result.after}`: {why(result)}"


def why(result: Result) -> str:
    """What is said of a survivor: its kind, and a sentence."""
    for entry in tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get(result.module, ()):
        if entry["function"] == result.function and result.number in entry["numbers"]:
            return str(entry["why"])
    return "**not explained**"


def _kind(reason: str) -> str:
    return next((kind for kind in KINDS if reason.startswith(kind)), "")


if __name__ == "__main__":
    main()
