"""What a test of the pytest plugin does: check a subject, record it, and tell the outcome."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from kvproof.fuzz.campaign import Finding, Report, check_subject
from kvproof.fuzz.cli.output import fresh_seed, replay_command, writable_folder
from kvproof.fuzz.pytest_plugin import Options, SubjectItem, subject_of_options
from kvproof.fuzz.verdicts import reachable_goals
from kvproof.invariants.case import dump_case
from kvproof.invariants.errors import InputError
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import counted
from kvproof.stateful_tests.profiles import PROFILES
from kvproof.stateful_tests.subjects import subject_factory

_SHOWN_CASE_LINES = 40
_SHOWN_REASONS = 3
_MORE = (
    "More runs may reach it: --kvproof-profile, --kvproof-seconds.  What a subject cannot do does "
    "not belong in its capabilities."
)


def require(subjects: Sequence[str], out: Path) -> None:
    """Raise UsageError if one of them is no subject, or if nothing could be written there."""
    try:
        writable_folder(out)
        with _imports_as_before():
            for subject in subjects:
                subject_factory(subject)
    except InputError as error:
        raise pytest.UsageError(f"kvproof: {error}") from None


def check_in_test(
    item: pytest.Item,
    subject: object,
    options: Options,
    *,
    seconds: float | None = None,
    runs: int | None = None,
    seed: str | int | None = None,
    **unknown: object,
) -> Report:
    """Check, note it in the test's properties, and fail or skip the test if there is reason to.

    ``seconds``, ``runs`` and ``seed`` stand above the options, these above the profile.
    """
    __tracebackhide__ = True  # a skipped test is one of the user's, by file and line
    wrong = ", ".join(f"not {word}" for word in unknown) or _wrong_budget(seconds, runs)
    if wrong:
        told = f"kvproof: kvproof_check takes seconds=, or runs=, and seed=; {wrong}"
        raise pytest.fail.Exception(told, pytrace=False)
    profile = PROFILES[options.profile]
    if seconds is None and runs is None:
        seconds = options.seconds
    if seconds is None and runs is None:
        seconds, runs = profile.seconds, profile.runs
    seed = fresh_seed((options.seed or profile.seed) if seed is None else str(seed))
    try:
        with _imports_as_before():
            report = _checked(_name_of(subject), seconds, runs, seed, options.out)
            missed = _missed(report)
    except InputError as error:
        raise pytest.fail.Exception(f"kvproof: {error}", pytrace=False) from None
    here = item.config.invocation_params.dir
    item.user_properties += _properties(report, missed, options.profile, here)
    if report.finding is not None:
        pytest.fail(_told(report, report.finding, item, options), pytrace=False)
    if report.verdict == "unknown":
        text = f"the verdict is unknown: nothing was violated, but {_reasons(report)}"
        if (options.unknown or profile.unknown) == "skip":
            pytest.skip(text)
        pytest.fail(f"{text}\n{_MORE}", pytrace=False)
    return report


def _wrong_budget(seconds: float | None, runs: int | None) -> str:
    """Why there is no such budget; empty if there is."""
    if seconds is not None and runs is not None:
        return "not both of seconds= and runs="
    if seconds is not None and not 0 < seconds < math.inf:
        return f"seconds={seconds} is no number of seconds above 0"
    if runs is not None and runs < 1:
        return f"runs={runs} is none at all"
    return ""


def _checked(subject: str, seconds: float | None, runs: int | None, seed: str, out: Path) -> Report:
    writable_folder(out)
    if seconds is None:
        seconds = math.inf
    return check_subject(subject, seconds=seconds, runs=runs, seed=seed, out=out)


@contextmanager
def _imports_as_before() -> Iterator[None]:
    """What is imported from where pytest was started, as the command line does, is so here only."""
    as_before = "" in sys.path
    try:
        yield
    finally:
        if not as_before and "" in sys.path:
            sys.path.remove("")


def _name_of(subject: object) -> str:
    """The name by which a replay can find it."""
    if isinstance(subject, str):
        return subject
    module, name = (getattr(subject, field, "") for field in ("__module__", "__qualname__"))
    if not name or getattr(sys.modules.get(module), name, None) is not subject:
        raise InputError(
            f"{subject!r} has no name by which a replay could find it: let it be a class or a "
            "function of a module, or say 'MODULE:NAME'"
        )
    return f"{module}:{name}"


# -- what is recorded ------------------------------------------------------------------------------


def _missed(report: Report) -> list[str]:
    """Situations that were not reached by a check that went to its end."""
    if report.finding is not None:
        return []
    goals = reachable_goals(subject_factory(report.subject)(Configuration()))
    return [goal.id for goal in goals if not report.total.goals.get(goal.id)]


def _properties(
    report: Report, missed: Sequence[str], profile: str, here: Path
) -> Iterator[tuple[str, Any]]:
    total, finding = report.total, report.finding
    yield "kvproof.subject", report.subject
    yield "kvproof.verdict", report.verdict
    yield "kvproof.seed", report.seed
    yield "kvproof.profile", profile
    yield "kvproof.runs", total.runs
    yield "kvproof.operations", total.ops
    yield "kvproof.operations_per_second", round(total.ops / total.seconds) if total.seconds else 0
    if finding is None:  # one that ended early at a violation has missed a lot
        yield "kvproof.situations_missed", " ".join(missed)
    if report.reasons:
        yield "kvproof.reasons", _reasons(report)
    if finding is not None:
        yield "kvproof.property", finding.violation.property
    if finding is not None and finding.files:
        yield "kvproof.case", str(_seen_from(here, finding.files[0]))


# -- what is told ----------------------------------------------------------------------------------


def _told(report: Report, finding: Finding, item: pytest.Item, options: Options) -> str:
    lines = dump_case(finding.case).splitlines()
    if len(lines) > _SHOWN_CASE_LINES:
        lines[_SHOWN_CASE_LINES:] = [f"… {len(lines) - _SHOWN_CASE_LINES} more lines"]
    ops = len(finding.case.operations)
    return "\n".join(
        [
            finding.explanation,
            "",
            *lines,
            "",
            f"Found by the {finding.driver} in a run of {counted(finding.found_ops, 'operation')}"
            + (f", shrunk to {ops}." if ops < finding.found_ops else "."),
            *_written(finding, report.subject, item),
            f"  search again:  {_search(report, item, options)}",
        ]
    )


def _written(finding: Finding, subject: str, item: pytest.Item) -> list[str]:
    """What to do with the files, if there are any."""
    if not finding.files:
        return [f"  nothing was written: {finding.unwritten}"]
    here = item.config.invocation_params.dir
    case, test, log = (_seen_from(here, path) for path in finding.files)
    path = _path_of(subject, here)
    return [
        f"  what was done, line by line:  {log}",
        f"  replay:  {path}{replay_command(case, subject)}",
        f"  as a test:  {path}{_pytest(item.config)} {quote(str(test))}",
    ]


def _search(report: Report, item: pytest.Item, options: Options) -> str:
    """The command that does this check again: where pytest was started, and as it was."""
    config = item.config
    here = config.invocation_params.dir
    words = [_pytest(config), *_named(item, here), "--kvproof-profile", options.profile]
    if config.getoption("kvproof_seconds"):
        words += "--kvproof-seconds", f"{options.seconds:g}"
    words += "--kvproof-seed", quote(report.seed)
    return _environment_of(report.subject, here) + " ".join(words)


def _named(item: pytest.Item, here: Path) -> Iterator[str]:
    """What makes pytest do this one: not a whole file, or all that the options name."""
    if isinstance(item, SubjectItem):
        yield "--kvproof"
        subject: str | None = item.name
    else:
        _, *inside = item.nodeid.split("::", 1)
        yield quote("::".join([os.path.relpath(item.path, here), *inside]))
        subject = subject_of_options(item)
    if subject is not None:
        yield f"--kvproof-subject {quote(subject)}"


def _pytest(config: pytest.Config) -> str:
    """As it was started: ``python -m pytest`` finds modules where ``pytest`` does not."""
    started = getattr(config, "workerinput", {}).get("mainargv", sys.argv)[0]
    if Path(started).parts[-2:] == ("pytest", "__main__.py"):
        return f"{quote(sys.orig_argv[0])} -m pytest"
    return "pytest"


def _reasons(report: Report) -> str:
    """Why the verdict is unknown; empty if it is not."""
    shown = list(report.reasons[:_SHOWN_REASONS])
    if len(report.reasons) > len(shown):
        shown.append(f"{len(report.reasons) - len(shown)} more like that")
    return "; ".join(shown)


def _seen_from(here: Path, path: Path) -> Path:
    return path.relative_to(here) if path.is_relative_to(here) else path


def _path_of(subject: str, here: Path) -> str:
    """``PYTHONPATH=FOLDER `` if the user's module is found by pytest, but not from here."""
    folder = _folder_of(subject)
    if folder in (None, here):
        return ""
    return _environment_of(subject, here) or f"PYTHONPATH={quote(str(_seen_from(here, folder)))} "


def _environment_of(subject: str, here: Path) -> str:
    """``PYTHONPATH=… ``, as it is set, if the user's module is found by it."""
    path = os.environ.get("PYTHONPATH", "")
    folders = [Path(os.path.abspath(here / folder)) for folder in path.split(os.pathsep) if folder]
    return f"PYTHONPATH={quote(path)} " if _folder_of(subject) in folders else ""


def _folder_of(subject: str) -> Path | None:
    """From where the user's module is imported; None if it is installed, or kvproof's."""
    name = subject.rpartition(":")[0].rpartition(":")[2]
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    path = Path(file).parent if Path(file).name == "__init__.py" else Path(file)
    folder = path.parents[name.count(".")]
    return None if "site-packages" in folder.parts else folder
