"""The pytest plugin as its users meet it: in a suite of theirs, with a cache of theirs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.fuzz.campaign import RUNS_PER_EXAMPLE, check_subject
from kvproof.fuzz.pytest_plugin import _PROFILES, _UNKNOWN
from kvproof.fuzz.search import DETERMINISM
from kvproof.invariants.case import load_case
from kvproof.invariants.events import Event
from kvproof.invariants.outcomes import Outcome
from kvproof.stateful_tests.profiles import PREFIX, PROFILES, at_scale
from kvproof.stateful_tests.subjects.engine import EngineSubject

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parent.parent / "docs" / "pytest.md"

MY_ENGINE = '''\
"""An engine of the user's: here, kvproof's own, with and without a mistake."""

from kvproof.engine.engine import Engine
from kvproof.stateful_tests.subjects.engine import EngineSubject


class KeepsLastBlock(Engine):
    def finish(self, request):
        request.tables = [table[:-1] for table in request.tables]
        return super().finish(request)


class MyCache(EngineSubject):
    pass


class MySmallCache(EngineSubject):
    pass


class LeakyCache(EngineSubject):
    def __init__(self, configuration):
        super().__init__(configuration, engine=KeepsLastBlock)
'''
LEAKY, MINE = "my_engine.kv:LeakyCache", "my_engine.kv:MyCache"
TWO_LINES = "def test_cache(kvproof_check):\n    kvproof_check({subject!r})\n"
OF_FIXTURE = "def test_it(kvproof_check, kvproof_subject):\n    kvproof_check(kvproof_subject)\n"
IMPORTS_IT = (
    "from my_engine.kv import LeakyCache\n"
    "def test_it(kvproof_check):\n    kvproof_check(LeakyCache)\n"
)
QUICK = "def test_cache(kvproof_check):\n    kvproof_check({subject!r}, runs=1)\n"
"""So little that the verdict is unknown."""


@pytest.fixture(autouse=True)
def _user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder in which kvproof is installed with its entry point, and no profile is loaded."""
    installed = pytester.path / "installed" / "kvproof_here-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproof-here\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[pytest11]\nkvproof = kvproof.fuzz.pytest_plugin\n"
    )
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), *sys.path]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    write(pytester, "my_engine/kv.py", MY_ENGINE)
    loaded = settings.get_current_profile_name()
    yield
    settings.load_profile(loaded)


def write(pytester: pytest.Pytester, path: str, text: str) -> None:
    (pytester.path / path).parent.mkdir(parents=True, exist_ok=True)
    (pytester.path / path).write_text(text)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def run_apart(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """In a process of its own, with nothing imported."""
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)


def properties_of(file: Path) -> dict[str, dict[str, str]]:
    """Of each test: its JUnit properties."""
    return {
        f"{case.get('classname')}.{case.get('name')}": {
            property.get("name", ""): property.get("value", "")
            for property in case.iter("property")
        }
        for case in ElementTree.parse(file).iter("testcase")
    }


# -- verdicts --------------------------------------------------------------------------------------


def test_a_correct_cache_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "ci", replace(PROFILES["ci"], runs=80))
    write(pytester, "test_it.py", TWO_LINES.format(subject=MINE))
    options = ("--kvproof-profile", "ci", "--kvproof-seed", "7")
    result = run(pytester, *options, "--junitxml", "junit.xml")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines([rf"test_it.py::test_cache: PASS, [\d,]+ operations of {MINE}, "])
    assert not (pytester.path / "kvproof-findings").exists()
    told = properties_of(pytester.path / "junit.xml")["test_it.test_cache"]
    assert told["kvproof.runs"] == str(80 + 80 // RUNS_PER_EXAMPLE)
    assert (told["kvproof.verdict"], told["kvproof.seed"]) == ("pass", "7")
    assert told["kvproof.profile"] == "ci"
    assert int(told["kvproof.operations"]) > 10_000
    assert int(told["kvproof.operations_per_second"]) > 0
    assert "kvproof.case" not in told


def test_a_faulty_cache_fails_and_is_told(pytester: pytest.Pytester) -> None:
    write(pytester, "test_it.py", TWO_LINES.format(subject=LEAKY))
    result = run(pytester, "--kvproof-seed", "7", "--junitxml", "junit.xml")
    result.assert_outcomes(failed=1)
    out = result.stdout.str()
    assert re.search(r"^REF at operation 1: request 0 gave back blocks \[\]", out, re.MULTILINE)
    assert "Block 1: given to r0 as row 0 at op 0 (admit)." in out
    assert ", shrunk to 2." in out
    for frame in ("pytest_check.py", "pytest_plugin.py", "campaign.py", "Traceback", "def check"):
        assert frame not in out
    assert len(out.splitlines()) < 50
    told = properties_of(pytester.path / "junit.xml")["test_it.test_cache"]
    assert (told["kvproof.verdict"], told["kvproof.property"]) == ("fail", "REF")
    assert "kvproof.situations_missed" not in told
    assert told["kvproof.subject"] == LEAKY
    assert told["kvproof.seed"] == "7"
    case = load_case(pytester.path / told["kvproof.case"])
    assert (case.subject, case.violates, len(case.operations)) == (LEAKY, "REF", 2)
    files = sorted(path.suffix for path in (pytester.path / "kvproof-findings").iterdir())
    assert files == [".json", ".py", ".txt"]


def commands(out: str) -> dict[str, str]:
    return dict(re.findall(r"^  ([a-z ]+):  (.+)$", out, re.MULTILINE))


def arguments_of(command: str) -> list[str]:
    """Those that it gives to pytest."""
    return shlex.split(command.partition("pytest ")[2])


KVPROOF = "import sys; sys.argv[0] = 'kvproof'; from kvproof.fuzz.cli import main; main()"
PYTEST = "import pytest; raise SystemExit(pytest.console_main())"


@pytest.mark.parametrize(
    ("folder", "names"), [("", ["replay"]), ("tests", ["replay", "as a test"])]
)
def test_what_is_told_to_do_shows_the_failure_again(
    folder: str, names: list[str], pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """Also if only pytest finds the module, since it puts the folder of a test into sys.path."""
    test = MY_ENGINE + TWO_LINES.format(subject="test_it:LeakyCache")
    write(pytester, str(Path(folder, "test_it.py")), test)
    told = commands(run(pytester).stdout.str())
    for program, code in (("kvproof", KVPROOF), ("pytest", PYTEST)):
        (tmp_path / program).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        (tmp_path / program).chmod(0o755)
    # What PYTHONPATH has for kvproof's sake would be installed at a user's.
    installed = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join(installed)
    for name in names:
        command = told[name].replace("PYTHONPATH=", f"PYTHONPATH={environment['PYTHONPATH']}:")
        assert command.startswith("PYTHONPATH=") == bool(folder)
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=pytester.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1, (command, done.stdout, done.stderr)
        assert "gave back blocks []" in done.stdout
    again = run(pytester, *arguments_of(told["search again"]))
    assert commands(again.stdout.str()) == told


def found_again(pytester: pytest.Pytester, *command: str, cwd: str = ".", path: str = "") -> str:
    """Runs pytest as a user types it, and what it says to type for more; that is the answer.

    Nothing of the user's is on the path but ``path``.
    """
    installed = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    folder = pytester.path / cwd
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, [path]), *installed])}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    told = commands(done.stdout)["search again"]
    environment["PYTHONPATH"] = os.pathsep.join(installed)  # as in a new terminal
    again = subprocess.run(
        ["sh", "-c", told.replace("pytest ", "pytest -p no:cacheprovider ", 1)],
        cwd=folder,
        env={**environment, "PATH": f"{pytester.path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 1, (told, again.stdout, again.stderr)
    assert commands(again.stdout)["search again"] == told
    return told


@pytest.fixture
def typed(pytester: pytest.Pytester) -> list[str]:
    """The command pytest, by which the folder where it is started is not on the path."""
    (pytester.path / "pytest").write_text(f'#!/bin/sh\nexec {sys.executable} -Pc "{PYTEST}" "$@"\n')
    (pytester.path / "pytest").chmod(0o755)
    return [str(pytester.path / "pytest")]


def test_a_search_of_a_subject_of_the_options_names_it(
    pytester: pytest.Pytester, typed: list[str]
) -> None:
    pytester.makepyfile(test_it=OF_FIXTURE)
    told = found_again(
        pytester, *typed, "--kvproof-subject", MINE, "--kvproof-subject", LEAKY, "-k", "Leaky"
    )
    assert told.startswith(f"pytest 'test_it.py::test_it[{LEAKY}]' --kvproof-subject {LEAKY} ")


def test_a_search_goes_on_as_long_as_it_did(pytester: pytest.Pytester, typed: list[str]) -> None:
    pytester.makepyfile(test_it=TWO_LINES.format(subject=LEAKY))
    told = found_again(pytester, *typed, "--kvproof-profile", "ci")
    assert told == "pytest test_it.py::test_cache --kvproof-profile ci --kvproof-seed 0"
    told = found_again(pytester, *typed, "--kvproof-seconds", "30")
    assert "::test_cache --kvproof-profile dev --kvproof-seconds 30 --kvproof-seed " in told


def test_a_search_is_of_the_place_where_it_was_started(
    pytester: pytest.Pytester, typed: list[str]
) -> None:
    write(pytester, "tests/test_it.py", TWO_LINES.format(subject=LEAKY))
    pytester.makeini("[pytest]\npythonpath = .\n")
    told = found_again(pytester, *typed, "test_it.py", cwd="tests")
    assert told.startswith("pytest test_it.py::test_cache ")


def test_a_search_has_the_path_that_it_had(pytester: pytest.Pytester, typed: list[str]) -> None:
    write(pytester, "tests/test_it.py", IMPORTS_IT)
    told = found_again(pytester, *typed, "tests", path=str(pytester.path))
    assert told.startswith(f"PYTHONPATH={pytester.path}")
    assert " pytest tests/test_it.py::test_it " in told


def test_a_search_is_started_as_it_was(pytester: pytest.Pytester) -> None:
    write(pytester, "tests/test_it.py", IMPORTS_IT)
    told = found_again(pytester, sys.executable, "-m", "pytest", "tests")
    assert told.startswith(f"{sys.executable} -m pytest tests/test_it.py::test_it ")


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        (("--kvproof-profile", "dev"), "skipped"),
        (("--kvproof-profile", "ci"), "failed"),
        (("--kvproof-profile", "thorough"), "failed"),
        (("--kvproof-profile", "ci", "--kvproof-unknown", "skip"), "skipped"),
        (("--kvproof-profile", "dev", "--kvproof-unknown", "fail"), "failed"),
    ],
)
def test_an_unknown_verdict(
    arguments: tuple[str, ...], outcome: str, pytester: pytest.Pytester
) -> None:
    write(pytester, "test_it.py", QUICK.format(subject=MINE))
    result = run(pytester, *arguments, "-rs", "--junitxml", "junit.xml")
    result.assert_outcomes(**{outcome: 1})
    assert "the verdict is unknown: nothing was violated, but operation " in result.stdout.str()
    if outcome == "skipped":
        result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_it.py:2: the verdict is unknown: *"])
    assert result.stdout.str().count("never succeeded") + 1 < 10, "some reasons, not dozens"
    told = properties_of(pytester.path / "junit.xml")["test_it.test_cache"]
    assert told["kvproof.verdict"] == "unknown"
    assert "corrupt-block-met" in told["kvproof.situations_missed"].split()
    assert "like that" in told["kvproof.reasons"]


# -- subjects --------------------------------------------------------------------------------------


def test_a_fixture_names_the_subjects(pytester: pytest.Pytester) -> None:
    """In a conftest.py, which stands above the options."""
    pytester.makeconftest(
        "import pytest\nfrom my_engine.kv import LeakyCache\n"
        f"@pytest.fixture(params=[LeakyCache, {LEAKY!r}])\n"
        "def kvproof_subject(request):\n    return request.param\n"
    )
    pytester.makepyfile(OF_FIXTURE)
    result = run(pytester, "--kvproof-subject", MINE)
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("FAIL, ") == 2
    assert f"operations of {MINE}" not in result.stdout.str()


def test_options_name_the_subjects(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OF_FIXTURE)
    pytester.makeini(f"[pytest]\nkvproof_subject =\n    {LEAKY}\n    scheduler:fcfs\n")
    result = run(pytester, "--collect-only", "-q")
    result.stdout.fnmatch_lines([f"*::test_it[[]{LEAKY}]", "*::test_it[[]scheduler:fcfs]"])
    result = run(pytester, "--collect-only", "-q", "--kvproof-subject", MINE)
    assert "1 test collected" in result.stdout.str(), "the command line stands above the ini file"


def test_a_test_without_a_subject_does_not_pass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OF_FIXTURE)
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["there is no subject: give --kvproof-subject or *"])


def test_a_test_of_each_subject_is_added(pytester: pytest.Pytester) -> None:
    """As many as there are, though the folder has no test; and one can be chosen."""
    options = ("--kvproof", "--kvproof-subject", LEAKY, "--kvproof-subject", MINE)
    result = run(pytester, *options, "-k", "Leaky", "--junitxml", "junit.xml")
    result.assert_outcomes(failed=1, deselected=1)
    told = properties_of(pytester.path / "junit.xml")
    assert told[f"kvproof.{LEAKY}"]["kvproof.property"] == "REF"
    again = arguments_of(commands(result.stdout.str())["search again"])
    assert again[:4] == ["--kvproof", "--kvproof-subject", LEAKY, "--kvproof-profile"]
    assert run(pytester, *again).ret == 1


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        ("'my_engine'", "unknown subject 'my_engine'; there are engine, "),
        ("'my_engine.kv:Nothing'", "cannot be imported: AttributeError: "),
        ("lambda configuration: None", "has no name by which a replay could find it"),
        ("MyCache(Configuration())", "has no name by which a replay could find it"),
    ],
)
def test_a_wrong_subject_of_a_test_is_one_line(
    subject: str, complaint: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        "from my_engine.kv import MyCache\n"
        "from kvproof.invariants.subject import Configuration\n"
        f"def test_it(kvproof_check):\n    kvproof_check({subject})\n"
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    lines = result.stdout.lines
    start = next(i for i, line in enumerate(lines) if re.match("_+ test_it _+", line))
    assert lines[start + 1].startswith("kvproof: ")
    assert complaint in lines[start + 1]
    assert re.search("short test summary|warnings summary", lines[start + 2])


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("seconds=1, runs=5", "not both of seconds= and runs="),
        ("second=1", "not second"),
        ("seconds=-1", "seconds=-1 is no number of seconds above 0"),
        ("seconds=float('nan')", "seconds=nan is no number of seconds above 0"),
        ("runs=0", "runs=0 is none at all"),
    ],
)
def test_a_wrong_budget_of_a_test_is_one_line(
    pytester: pytest.Pytester, budget: str, told: str
) -> None:
    pytester.makepyfile(f"def test_it(kvproof_check):\n    kvproof_check({MINE!r}, {budget})\n")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    takes = "kvproof: kvproof_check takes seconds=, or runs=, and seed=; "
    result.stdout.fnmatch_lines(takes + told)
    assert "Error" not in result.stdout.str()


def test_what_a_check_imports_is_no_longer_imported_from_here_after_it(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_it(kvproof_check):\n"
        "    before = [*sys.path]\n"
        f"    kvproof_check({LEAKY!r})\n"
        "def test_after():\n    assert '' not in sys.path\n"
    )
    result = run_apart(pytester)
    result.assert_outcomes(failed=1, passed=1)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ini", "complaint"),
    [
        (("--kvproof-seconds", "0"), "", "'0' is no number of seconds above 0"),
        (("--kvproof-seconds", "inf"), "", "'inf' is no number of seconds above 0"),
        (("--kvproof-profile", "default"), "", "invalid choice: 'default'"),
        (("--kvproof",), "", "--kvproof: what to check?"),
        (("--kvproof", "--kvproof-subject", "engin"), "", "kvproof: unknown subject 'engin'"),
        (("--kvproof-subject", "no_module:A"), "", "'no_module:A' cannot be imported"),
        (("--kvproof-out", "my_engine/kv.py"), "", "kv.py: is not a folder"),
        (("--hypothesis-profile", "kvproof-fast"), "", "there are kvproof-dev, kvproof-ci, kv"),
        ((), "kvproof_seconds = soon", "kvproof_seconds of the ini file: 'soon' is no number"),
        ((), "kvproof_profile = fast", "kvproof_profile of the ini file is 'fast', not dev or"),
        ((), "kvproof_unknown = pass", "kvproof_unknown of the ini file is 'pass', not skip or"),
        ((), "kvproof_subject = engin", "kvproof: unknown subject 'engin'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], ini: str, complaint: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(OF_FIXTURE)
    pytester.makeini(f"[pytest]\n{ini}\n")
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (told,) = [line for line in result.errlines if complaint in line]
    assert told.startswith("ERROR: ") or "error: argument --kvproof" in told
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_options_stand_above_the_ini_file_and_below_the_test(pytester: pytest.Pytester) -> None:
    pytester.makeini(
        "[pytest]\nkvproof_seed = 3\nkvproof_seconds = 0.2\nkvproof_profile = thorough\n"
        "kvproof_unknown = skip\nkvproof_out = kept\n"
    )
    pytester.makepyfile(
        f"def test_ini(kvproof_check):\n    kvproof_check({MINE!r})\n"
        f"def test_own(kvproof_check):\n    kvproof_check({LEAKY!r}, seed=0, runs=50)\n"
    )
    result = run(pytester)
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*::test_ini: UNKNOWN*, seed 3", "*::test_own: FAIL*, seed 0"])
    assert len(list((pytester.path / "kept").iterdir())) == 3
    result = run(pytester, "--kvproof-seed", "5", "--kvproof-out", "elsewhere")
    result.stdout.fnmatch_lines(["*::test_ini: UNKNOWN*, seed 5", "*::test_own: FAIL*, seed 0"])
    assert len(list((pytester.path / "elsewhere").iterdir())) == 3


def test_what_lies_among_the_findings_runs_only_when_it_is_named(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_mine="def test_mine(): pass")
    write(pytester, "kvproof-findings/test_ref_1.py", "def test_ref_1(): pass\n")
    run(pytester).assert_outcomes(passed=1)
    run(pytester, "kvproof-findings/test_ref_1.py").assert_outcomes(passed=1)
    write(pytester, "elsewhere/test_ref_1.py", "def test_ref_2(): pass\n")
    run(pytester).assert_outcomes(passed=2)
    run(pytester, "--kvproof-out", "elsewhere").assert_outcomes(passed=1)
    pytester.makeini("[pytest]\nkvproof_out = elsewhere\n")
    run(pytester).assert_outcomes(passed=2)


def test_these_tests_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TWO_LINES.format(subject=LEAKY) + "def test_other(): pass\n")
    options = ("--strict-markers", "-m", "not kvproof", "--kvproof", "--kvproof-subject", LEAKY)
    run(pytester, *options).assert_outcomes(passed=1, deselected=2)


# -- profiles --------------------------------------------------------------------------------------


def test_the_profiles_are_those_that_the_options_offer() -> None:
    assert tuple(PROFILES) == _PROFILES
    assert {profile.unknown for profile in PROFILES.values()} == {*_UNKNOWN}


SAYS_SETTINGS = (
    "from hypothesis import settings\n"
    "def test_it():\n"
    "    print('loaded', settings.get_current_profile_name(), settings().max_examples,\n"
    "          settings().derandomize)\n"
)


@pytest.mark.parametrize("profile", PROFILES)
def test_hypothesis_loads_a_profile_when_it_is_asked_to(
    profile: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(SAYS_SETTINGS)
    name, numbers = PREFIX + profile, PROFILES[profile]
    result = run(pytester, "-s", "--hypothesis-profile", name)
    result.stdout.fnmatch_lines([f"*loaded {name} {numbers.examples} {profile == 'ci'}"])


def test_no_profile_of_the_users_is_touched(pytester: pytest.Pytester) -> None:
    """Neither is one loaded by kvproof's own option, nor is one of that name replaced."""
    pytester.makeconftest(
        "from hypothesis import settings\n"
        "settings.register_profile('dev', max_examples=11, derandomize=False)\n"
        "settings.load_profile('dev')\n"
    )
    pytester.makepyfile(SAYS_SETTINGS + QUICK.format(subject=MINE))
    for options in (("--kvproof-profile", "dev"), ("--kvproof-profile", "ci"), ()):
        result = run(pytester, "-s", "--kvproof-unknown", "skip", *options)
        result.assert_outcomes(passed=1, skipped=1)
        result.stdout.fnmatch_lines(["*loaded dev 11 False"])


@pytest.mark.parametrize(
    ("ci", "arguments", "ini", "profile"),
    [
        ("", (), "", "dev"),
        ("false", (), "", "dev"),
        ("true", (), "", "ci"),
        ("true", (), "kvproof_profile = thorough", "thorough"),
        ("", ("--hypothesis-profile", "kvproof-ci"), "kvproof_profile = thorough", "ci"),
        ("", ("--hypothesis-profile", "kvproof-ci", "--kvproof-profile", "dev"), "", "dev"),
    ],
)
def test_which_profile(
    ci: str,
    arguments: tuple[str, ...],
    ini: str,
    profile: str,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeini(f"[pytest]\n{ini}\n")
    pytester.makepyfile(QUICK.format(subject=MINE))
    run(pytester, *arguments, "--junitxml", "junit.xml")
    (told,) = properties_of(pytester.path / "junit.xml").values()
    assert told["kvproof.profile"] == profile
    assert (told["kvproof.seed"] == "0") == (profile == "ci"), "a new one, but in CI"


def test_a_machine_is_scaled_by_the_profile_that_is_loaded() -> None:
    for profile, (examples, steps) in {
        "default": (30, 20),
        "kvproof-dev": (15, 20),
        "kvproof-thorough": (1500, 40),
    }.items():
        settings.load_profile(profile)
        scaled = at_scale(settings(print_blob=False), examples=30, steps=20)
        assert (scaled.max_examples, scaled.stateful_step_count) == (examples, steps)
    settings.load_profile("kvproof-dev")
    assert at_scale(settings(), examples=1, steps=1).max_examples == 1, "never none at all"


# -- checks of so many runs ------------------------------------------------------------------------


def test_so_many_runs_do_the_same_each_time() -> None:
    first, again, other = (
        check_subject("engine", runs=20, seed=seed, out=None) for seed in ("0", "0", "1")
    )
    assert (first.loop.runs, first.machine.runs) == (20, 2)
    assert first.total.operations == again.total.operations
    assert first.total.goals == again.total.goals
    assert first.total.operations != other.total.operations


def planted(monkeypatch: pytest.MonkeyPatch, engine: type[Engine]) -> None:
    def factory(name: str, **_: object) -> partial[EngineSubject]:
        return partial(EngineSubject, engine=engine)

    for module in ("campaign", "search", "shrink", "replay"):
        monkeypatch.setattr(f"kvproof.fuzz.{module}.subject_factory", factory)


class RaisesOnReset(Engine):
    """A mistake that either driver finds."""

    def reset(self) -> Outcome:
        raise ZeroDivisionError("nothing to reset")


def test_the_machine_finds_what_the_loop_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted(monkeypatch, RaisesOnReset)
    monkeypatch.setattr("kvproof.fuzz.campaign.search", lambda *_, **__: None)
    report = check_subject("engine", runs=500, seed="0", out=tmp_path)
    assert report.verdict == "fail"
    assert report.finding is not None
    assert report.finding.driver == "Hypothesis machine"
    assert report.finding.violation.property == "CRASH"
    assert len(report.finding.case.operations) == 1
    assert len(list(tmp_path.iterdir())) == 3
    assert 0 < report.machine.runs <= 50


class Moody(Engine):
    """Each one raises on the second reset of the process, and of no other."""

    resets = 0

    def reset(self) -> Outcome:
        Moody.resets += 1
        if Moody.resets == 2:
            raise ZeroDivisionError("in a mood")
        return super().reset()


def test_what_does_not_happen_again_is_told_as_it_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, Moody)
    report = check_subject("engine", runs=500, seed="0", out=None)
    assert report.finding is not None
    told = report.finding.explanation
    assert DETERMINISM in told or "in a replay it does not happen again" in told
    assert len(report.finding.case.operations) == report.finding.found_ops


class ReportsNonsense(EngineSubject):
    """Reports an event that no checker has heard of, once in a while."""

    def drain_events(self) -> list[Event]:
        return [*super().drain_events(), Event()]


def test_a_checker_that_stumbles_makes_the_verdict_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, Engine)
    for module in ("campaign", "search"):
        monkeypatch.setattr(
            f"kvproof.fuzz.{module}.subject_factory", lambda name, **_: ReportsNonsense
        )
    report = check_subject("engine", runs=2, seed="0", out=None)
    assert report.verdict == "unknown"
    assert len(report.total.problems) == 3, "of both runs, and of the machine"


# -- beside other plugins --------------------------------------------------------------------------


def test_it_is_light_where_it_is_not_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_it():\n"
        "    ours = {name for name in sys.modules if name.startswith('kvproof')}\n"
        "    assert ours == {'kvproof', 'kvproof.fuzz', 'kvproof.fuzz.pytest_plugin'}\n"
        "    assert not {'hypothesis', 'msgspec', 'numpy', 'rich', 'typer'} & {*sys.modules}\n"
    )
    run_apart(pytester).assert_outcomes(passed=1)


def test_it_can_be_turned_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass\n")
    result = run_apart(pytester, "-p", "no:kvproof", "-v")
    result.assert_outcomes(passed=1)
    result = run_apart(pytester, "-p", "no:kvproof", "--kvproof-seconds", "3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --kvproof-seconds" in result.stderr.str()


def test_it_works_without_the_plugin_of_hypothesis(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TWO_LINES.format(subject=LEAKY))
    result = run_apart(pytester, "-p", "no:hypothesispytest")
    result.assert_outcomes(failed=1)
    assert "gave back blocks" in result.stdout.str()


def test_workers_of_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(OF_FIXTURE)
    options = ("--kvproof-subject", LEAKY, "--kvproof-subject", "no_module:A", "-n", "2")
    result = run_apart(pytester, *options, "--junitxml", "junit.xml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "REF at operation 1: *",
            "kvproof: subject 'no_module:A' cannot be imported: *",
            f"*: FAIL, * operations of {LEAKY}, *",
        ]
    )
    told = properties_of(pytester.path / "junit.xml").values()
    assert [one["kvproof.property"] for one in told if one] == ["REF"]


def test_nothing_is_imported_to_collect(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OF_FIXTURE)
    options = ("--kvproof", "--kvproof-subject", "no_module:A", "--collect-only", "-q")
    result = run(pytester, *options)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*::test_it[[]no_module:A]", "kvproof::no_module:A"])


# -- documentation ---------------------------------------------------------------------------------


def examples() -> dict[str, str]:
    """The files that the documentation shows."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    return dict(blocks)


def test_the_documented_examples_do_what_they_say(pytester: pytest.Pytester) -> None:
    for path, text in examples().items():
        write(pytester, path, text)
    options = ("--kvproof-seconds", "0.5", "--hypothesis-profile", "kvproof-dev", "-v")
    result = run(pytester, *options)
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines_random(
        [
            "tests/test_cache.py::test_cache SKIPPED*",
            "tests/test_caches.py::test_caches[[]MySmallCache] SKIPPED*",
            "tests/test_control.py::test_a_leak_is_found PASSED*",
            "tests/test_machine.py::TestMyCache::runTest PASSED*",
        ]
    )


def test_a_machine_that_fails_tells_no_traceback(pytester: pytest.Pytester) -> None:
    machine = examples()["tests/test_machine.py"].replace("MyCache", "LeakyCache")
    pytester.makeconftest("")
    write(pytester, "tests/test_machine.py", machine)
    result = run(pytester, "--hypothesis-profile", "kvproof-ci")
    result.assert_outcomes(failed=1)
    out = result.stdout.str()
    assert re.search(r"^REF at operation 1: request 0 gave back blocks \[", out, re.MULTILINE)
    assert "def test_ref_" in out
    assert "run_state_machine" not in out
    assert "stateful_tests/machine.py" not in out


def test_the_numbers_of_the_documentation_are_those_of_the_profiles() -> None:
    rows = {
        cells[1]: cells[2:5]
        for line in DOCS.read_text("utf-8").splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) == 6
    }
    assert rows[""] == [f"`{name}`" for name in PROFILES]
    dev, ci, thorough = PROFILES.values()
    runs = ci.runs or 0
    assert rows["each check takes"] == [
        f"{dev.seconds:g} s",
        f"{runs} runs of the loop, {runs // RUNS_PER_EXAMPLE} of the machine",
        f"{thorough.seconds:g} s",
    ]
    assert rows["its seed"] == ["a new one", ci.seed, "a new one"]
    assert rows["an unknown verdict"] == [f"{one.unknown}s" for one in PROFILES.values()]
    examples_of = [cell.split(",")[0] for cell in rows["examples of a Hypothesis machine of yours"]]
    assert examples_of == [str(one.examples) for one in PROFILES.values()]
    assert rows["steps of an example"] == [str(one.steps) for one in PROFILES.values()]


def test_every_option_is_documented(pytester: pytest.Pytester) -> None:
    offered = {*re.findall(r"--kvproof[a-z-]*", run(pytester, "--help").stdout.str())}
    told = {*re.findall(r"^\| `(--kvproof[a-z-]*)", DOCS.read_text("utf-8"), re.MULTILINE)}
    assert told == offered


def test_an_installed_kvproof_is_a_plugin() -> None:
    project = tomllib.loads((DOCS.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["pytest11"]
    assert points == {"kvproof": "kvproof.fuzz.pytest_plugin"}
