"""The pytest plugin: ``kvproof_check`` in a test of one's own, or ``pytest --kvproof`` without one.

pytest loads this in every run where kvproof is installed: nothing of kvproof is imported before a
test needs it.  What it offers is told in docs/pytest.md.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import pytest

if TYPE_CHECKING:
    from kvproof.fuzz.campaign import Report

_PROFILES = ("dev", "ci", "thorough")
"""Those of ``kvproof.stateful_tests.profiles``, which imports Hypothesis."""
_UNKNOWN = ("skip", "fail")
_FINDINGS = "kvproof-findings"
_MARK = "kvproof"
_NAMED = "_kvproof_named"
"""The fixture that is each subject of the options by turns."""


class Options(NamedTuple):
    """What the command line says, or else the ini file."""

    subjects: tuple[str, ...]
    profile: str
    seconds: float | None
    seed: str | None
    outs: tuple[Path, ...]
    """Where what is found is kept, and where it was kept but for the command line."""
    unknown: str | None

    @property
    def out(self) -> Path:
        return self.outs[0]


OPTIONS = pytest.StashKey[Options]()


class Check(Protocol):
    """Drives a subject; the test fails where a property does not hold."""

    def __call__(
        self,
        subject: object,
        *,
        seconds: float | None = None,
        runs: int | None = None,
        seed: str | int | None = None,
    ) -> Report: ...


# -- fixtures --------------------------------------------------------------------------------------


@pytest.fixture
def kvproof_check(request: pytest.FixtureRequest) -> Check:
    """Checks a subject: `kvproof_check("my_engine.cache:MyCache")`, or the class itself.

    `seconds=`, or `runs=` of the seeded loop, and `seed=` stand above options and profile.
    Returns the report; the test fails if a property is violated.
    """

    def check(subject: object, **budget: Any) -> Report:
        from kvproof.fuzz.pytest_check import check_in_test

        __tracebackhide__ = True
        return check_in_test(request.node, subject, request.config.stash[OPTIONS], **budget)

    return check


@pytest.fixture
def kvproof_subject(request: pytest.FixtureRequest, _kvproof_named: str | None) -> object:
    """What is checked: each --kvproof-subject by turns.

    Override it in a conftest.py to return a class, or "MODULE:CLASS".
    """
    if _kvproof_named is None:
        pytest.fail(
            "there is no subject: give --kvproof-subject or the ini option kvproof_subject, or "
            "override the fixture kvproof_subject",
            pytrace=False,
        )
    return _kvproof_named


@pytest.fixture
def _kvproof_named(request: pytest.FixtureRequest) -> str | None:
    return getattr(request, "param", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An override of ``kvproof_subject`` does not ask for the subjects of the options."""
    subjects = metafunc.config.stash[OPTIONS].subjects
    if _NAMED in metafunc.fixturenames and subjects:
        metafunc.parametrize(_NAMED, subjects, indirect=True)


def subject_of_options(item: pytest.Item) -> str | None:
    """The --kvproof-subject that the test is given by turns, if it is."""
    turns = getattr(item, "callspec", None)
    return turns.params.get(_NAMED) if turns and item.config.getoption("kvproof_subject") else None


# -- tests without a line of the user's ------------------------------------------------------------


class SubjectItem(pytest.Item):
    """The test of a subject of the options that ``--kvproof`` adds."""

    def runtest(self) -> None:
        from kvproof.fuzz.pytest_check import check_in_test

        check_in_test(self, self.name, self.config.stash[OPTIONS])

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.config.rootpath, None, f"kvproof: {self.name}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("kvproof"):
        for name in config.stash[OPTIONS].subjects:
            nodeid = f"kvproof::{name}"
            items.append(SubjectItem.from_parent(session, name=name, nodeid=nodeid))
    for item in items:
        if _checks(item):
            item.add_marker(_MARK)


def _checks(item: pytest.Item) -> bool:
    return isinstance(item, SubjectItem) or "kvproof_check" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Bad input ends the run before its first test; a worker of xdist cannot end it."""
    config = session.config
    if config.option.collectonly or hasattr(config, "workerinput"):
        return
    checking = [item for item in session.items if _checks(item)]
    if checking:
        from kvproof.fuzz.pytest_check import require

        named = any(
            isinstance(item, SubjectItem) or _NAMED in getattr(item, "fixturenames", ())
            for item in checking
        )
        options = config.stash[OPTIONS]
        require(options.subjects if named else (), options.out)


# -- options ---------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvproof", "kvproof, for paged KV caches and schedulers")
    group.addoption(
        "--kvproof", action="store_true", help="Add a test of each subject that the options name."
    )
    group.addoption(
        "--kvproof-subject",
        action="append",
        metavar="NAME",
        help="What to check: MODULE:CLASS of yours, or a name that `kvproof check --subject` "
        "knows; may be given several times.",
    )
    group.addoption(
        "--kvproof-profile",
        choices=_PROFILES,
        help="How much is tried (default: ci where the variable CI is set, else dev).",
    )
    group.addoption("--kvproof-seconds", type=_seconds, metavar="S", help="Time of each check.")
    group.addoption("--kvproof-seed", metavar="SEED", help="Where random choices start.")
    group.addoption(
        "--kvproof-out",
        metavar="DIR",
        help=f"Where what is found is kept: case, pytest file and log (default: {_FINDINGS}).",
    )
    group.addoption(
        "--kvproof-unknown",
        choices=_UNKNOWN,
        help="What becomes of a test whose verdict is unknown (default: as the profile says).",
    )
    parser.addini("kvproof_subject", "What to check, a line each.", type="linelist", default=[])
    for name in ("profile", "seconds", "seed", "out", "unknown"):
        parser.addini(f"kvproof_{name}", f"As --kvproof-{name}.")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis' own plugin loads the profile that its option names."""
    config.addinivalue_line("markers", f"{_MARK}: drives a cache or a scheduler with kvproof.")
    asked = str(config.getoption("--hypothesis-profile", None) or "")
    profile = asked.removeprefix("kvproof-") if asked.startswith("kvproof-") else None
    if profile in _PROFILES:
        import kvproof.stateful_tests.profiles  # noqa: F401
    elif profile is not None:
        _refuse(f"--hypothesis-profile: there is no {asked!r}; there are {_listed('kvproof-')}")
    config.stash[OPTIONS] = _options(config, profile)


def _options(config: pytest.Config, profile: str | None) -> Options:
    options = Options(
        subjects=tuple(config.getoption("kvproof_subject") or config.getini("kvproof_subject")),
        profile=config.getoption("kvproof_profile")
        or profile
        or _of_ini(config, "profile", _PROFILES)
        or ("ci" if os.environ.get("CI", "").lower() not in ("", "0", "false") else "dev"),
        seconds=config.getoption("kvproof_seconds") or _seconds_of_ini(config),
        seed=config.getoption("kvproof_seed") or config.getini("kvproof_seed") or None,
        outs=_outs(config),
        unknown=config.getoption("kvproof_unknown") or _of_ini(config, "unknown", _UNKNOWN),
    )
    if config.getoption("kvproof") and not options.subjects:
        _refuse("--kvproof: what to check? --kvproof-subject or the ini option kvproof_subject")
    return options


def _of_ini(config: pytest.Config, name: str, choices: Iterable[str]) -> str | None:
    value: str = config.getini(f"kvproof_{name}")
    if value and value not in choices:
        _refuse(f"kvproof_{name} of the ini file is {value!r}, not {' or '.join(choices)}")
    return value or None


def _seconds_of_ini(config: pytest.Config) -> float | None:
    text: str = config.getini("kvproof_seconds")
    try:
        return _seconds(text) if text else None
    except ArgumentTypeError as error:
        _refuse(f"kvproof_seconds of the ini file: {error}")


def _outs(config: pytest.Config) -> tuple[Path, ...]:
    """As usual: an option is relative to where pytest was started, the ini file to its folder."""
    option: str | None = config.getoption("kvproof_out")
    ini: str = config.getini("kvproof_out")
    standing = config.rootpath / (ini or _FINDINGS)
    return (config.invocation_params.dir / option, standing) if option else (standing,)


def _listed(prefix: str) -> str:
    return ", ".join(prefix + name for name in _PROFILES)


def _refuse(text: str) -> NoReturn:
    raise pytest.UsageError(text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The pytest files of findings run when they are named, not because they lie there."""
    return True if collection_path in config.stash[OPTIONS].outs else None


# -- what is told ----------------------------------------------------------------------------------


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A machine's message tells all; how Hypothesis and kvproof came to raise it says nothing."""
    machine = sys.modules.get("kvproof.stateful_tests.machine")
    error = call.excinfo.value if call.excinfo is not None else None
    if machine is not None and isinstance(error, machine.PropertyViolated):
        told = pytest.fail.Exception(str(error), pytrace=False).with_traceback(error.__traceback__)
        call.excinfo = pytest.ExceptionInfo.from_exception(told)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each check: what a passing test has done is worth a look."""
    lines = [
        line
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for line in _lines(report.nodeid, report.user_properties)
    ]
    if lines and terminalreporter.verbosity >= 0:
        terminalreporter.section("kvproof")
        for line in lines:
            terminalreporter.write_line(line)


def _lines(nodeid: str, properties: Iterable[tuple[str, object]]) -> Iterable[str]:
    checks: list[dict[str, Any]] = []
    for name, value in properties:
        if name == "kvproof.subject":
            checks.append({})
        if checks:
            checks[-1][name.removeprefix("kvproof.")] = value
    for check in checks:
        yield (
            f"{nodeid}: {check['verdict'].upper()}, {check['operations']:,} operations of "
            f"{check['subject']}, {check['operations_per_second']:,}/s, seed {check['seed']}"
        )
        if "reasons" in check:
            yield f"  because {check['reasons']}"
