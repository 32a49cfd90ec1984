"""A gate on CrossHair: what did it say about each contract, in words and not by exit code?

CrossHair exits with 0 also when it says "Not confirmed", "Unable to meet precondition" or
"Targets found, but contain no checkable functions" (a misspelt ``post:``), and with 1 for a
contract that it cannot evaluate.  So the conditions are read from the source here, and each
gets its own verdict from what CrossHair says about its line.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Verdict = Literal["confirmed", "refuted", "not confirmed", "not seen"]
"""*Not seen*: no input reached the condition, or it could not be evaluated."""

# Start-up costs as much as a few functions do, hence few processes for many targets.
PROCESSES = 2

POST = re.compile(r"\s*post:(?P<contract>.+)")
SAYING = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?:info|error): (?P<text>.*)")


@dataclass(frozen=True)
class Target:
    """A function with a contract."""

    module: str
    """As it is imported; a name without dots is found beside its file."""
    file: Path
    function: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}"


@dataclass(frozen=True)
class Finding:
    """What CrossHair said about one ``post:`` condition."""

    target: Target
    contract: str
    verdict: Verdict
    said: str

    def __str__(self) -> str:
        return f"{self.target}: {self.verdict}: {self.contract}: {self.said}"


class Saying(NamedTuple):
    """One line of CrossHair's output."""

    file: Path
    line: int
    text: str


def examine(
    targets: Sequence[Target],
    *,
    condition_seconds: float = 30.0,
    overall_seconds: float = 240.0,
) -> list[Finding]:
    """Run CrossHair over the targets and give a finding for each of their conditions.

    ``condition_seconds`` is CPU time, ``overall_seconds`` is time on the clock: what has not been
    said by then is *not seen*.
    """
    shares = [share for share in (targets[i::PROCESSES] for i in range(PROCESSES)) if share]
    with ThreadPoolExecutor(PROCESSES) as threads:
        jobs = [
            threads.submit(listen, share, condition_seconds, overall_seconds) for share in shares
        ]
        return [
            finding
            for share, job in zip(shares, jobs, strict=True)
            for target in share
            for finding in judge(target, job.result())
        ]


def unproved(findings: Sequence[Finding], listed: Mapping[Target, int]) -> list[str]:
    """Complaints, none if every listed target has its number of conditions, all confirmed.

    The number is what exposes a ``post:`` that a typo has taken out of sight.
    """
    counts = Counter(finding.target for finding in findings)
    return [str(finding) for finding in findings if finding.verdict != "confirmed"] + [
        f"{target}: {conditions} conditions listed, {counts[target]} found"
        for target, conditions in listed.items()
        if counts[target] != conditions
    ]


def listen(
    targets: Sequence[Target], condition_seconds: float, overall_seconds: float
) -> list[Saying]:
    """What one CrossHair process says about the targets; nothing if it runs out of time."""
    command = [sys.executable, "-P", "-m", "crosshair", "check", "--report_all"]
    command += ["--analysis_kind", "PEP316", "--per_condition_timeout", str(condition_seconds)]
    command += map(str, targets)
    try:
        ran = subprocess.run(
            command,
            env=environment(targets),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=overall_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    if ran.stderr:
        print(ran.stderr, file=sys.stderr)
    return list(parse(ran.stdout))


def environment(targets: Sequence[Target]) -> dict[str, str]:
    """Lets CrossHair import the targets, and keeps a coverage run of the caller out of it."""
    beside = dict.fromkeys(str(t.file.parent) for t in targets if "." not in t.module)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    path = [*beside, *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}


def parse(output: str) -> Iterator[Saying]:
    """The sayings in CrossHair's output."""
    for line in output.splitlines():
        if match := SAYING.fullmatch(line):
            yield Saying(Path(match["file"]).resolve(), int(match["line"]), match["text"])


def judge(target: Target, sayings: Iterable[Saying]) -> Iterator[Finding]:
    """A finding for each condition of the target.

    A condition is meant by what is said of its own line, or else of a line of the function that
    is no condition: one that raises, a precondition that nothing meets.
    """
    function = definition(target)
    posts = conditions(target)
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    here = [s for s in sayings if s.file == target.file.resolve() and s.line in lines]
    general = [s.text for s in here if s.line not in posts]
    for line, contract in posts.items():
        said = [s.text for s in here if s.line == line] or general or ["nothing"]
        yield Finding(target, contract, verdict(said[0]), said[0])


def verdict(said: str) -> Verdict:
    """The meaning of one message of CrossHair about a condition."""
    if said == "Confirmed over all paths.":
        return "confirmed"
    if said == "Not confirmed.":
        return "not confirmed"
    # A condition that raises is more often a broken contract than a broken function.
    if "when calling" in said and not said.startswith("Error while evaluating post condition"):
        return "refuted"
    return "not seen"


def conditions(target: Target) -> dict[int, str]:
    """The ``post:`` conditions of the target, by line; each on one line of the docstring."""
    docstring = definition(target).body[0]
    lines = target.file.read_text(encoding="utf-8").splitlines()
    span = range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    matches = {line: POST.fullmatch(lines[line - 1]) for line in span}
    return {line: match["contract"].strip() for line, match in matches.items() if match}


def definition(target: Target) -> ast.FunctionDef:
    """The target's function in its source."""
    tree = ast.parse(target.file.read_text(encoding="utf-8"))
    return next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == target.function
    )
