"""What a newcomer is told: a missing package, a page to read, a pass of his own."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvproof.fuzz.campaign import check_subject
from kvproof.fuzz.campaigns.records import Campaign, Progress, Target
from kvproof.fuzz.campaigns.store import Journal, Store
from kvproof.fuzz.cli import fuzz as fuzz_command
from kvproof.fuzz.cli import report as report_command
from kvproof.fuzz.cli.check import _hint
from kvproof.fuzz.report.summary import summarise
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import Admit, Arrive, Schedule, Segment
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import subject_factory
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.subjects.errors import SubjectUnavailable
from kvproof.stateful_tests.totals import Totals

ROOT = Path(__file__).parent.parent
SUBJECTS = "kvproof.stateful_tests.subjects."


@pytest.mark.parametrize(
    ("module", "load", "told"),
    [
        ("vllm_package", "load_vllm", "vllm:manager needs vLLM 0.33.x"),
        ("transformers_loading", "load_transformers", "transformers needs transformers 5.24"),
        ("sglang_package", "load_sglang", "sglang:radix needs SGLang 0.5.23"),
    ],
)
def test_a_missing_package_is_told_with_what_installs_it(
    module: str, load: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    loading = import_module(SUBJECTS + module)
    monkeypatch.setattr(loading, "version", version)
    getattr(loading, load).cache_clear()
    with pytest.raises(SubjectUnavailable) as caught:
        getattr(loading, load)()
    text = str(caught.value)
    assert text.startswith(f"the subject {told}, which is not installed: in a checkout, bash ")
    (script,) = re.findall(r"bash (\S+) FOLDER makes an environment with it$", text)
    assert (ROOT / script).is_file()


def _campaign(folder: Path, *targets: Target) -> Path:
    store = Store(folder)
    store.begin(Campaign("s", targets, 1))
    journal = Journal(store.journal(0))
    journal.append([Progress(own.name, 1.0, 1.0, Totals(runs=1, ops=1)) for own in targets])
    journal.close()
    return folder


@pytest.mark.parametrize("missing", [[], ["jinja2"]])
def test_the_command_for_a_page_names_what_it_may_import_and_needs(
    missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nano = "kvproof.stateful_tests.examples.nano_subject:NanoSubject"
    folder = _campaign(tmp_path / "c", Target("mine", nano), Target("cache", "engine"))
    monkeypatch.setattr(fuzz_command, "missing_for_report", lambda: missing)
    command = fuzz_command._report_command(summarise([folder]), folder)
    assert f"kvproof report {folder} --subject {nano}" in command
    assert "engine" not in command.replace(nano, "")
    assert ("pip install 'kvproof[report]'" in command) == bool(missing)


def test_the_page_of_one_campaign_lies_with_it(tmp_path: Path) -> None:
    """So that it writes over that of no other one."""
    assert report_command._page_of([tmp_path]) == tmp_path / "report.html"
    assert report_command._page_of([tmp_path, tmp_path / "other"]) == Path("report.html")


def test_one_run_is_one(tmp_path: Path) -> None:
    summary = summarise([_campaign(tmp_path / "c", Target("cache", "engine"))])
    assert "in 1 operation in 1 run," in summary.sentence


def test_an_operation_that_crashes_counts() -> None:
    class Raises(EngineSubject):
        def apply(self, operation: object) -> object:  # type: ignore[override]
            raise OSError

    harness = Harness(Raises(Configuration()))
    harness.run([Admit((Segment(0, 2),))])
    assert [violation.op for violation in harness.violations] == [0]
    counts = harness.operation_counts()
    assert harness.operations == sum(sum(own.values()) for own in counts.values()) == 1


def test_so_does_an_iteration_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_factory("scheduler:fcfs")(Configuration())
    harness = harness_for(subject)
    harness.perform(Arrive((Segment(0, 2),), output=1))

    def apply(operation: object) -> object:
        raise OSError

    monkeypatch.setattr(subject, "apply", apply)
    before = harness.operations
    harness.perform(Schedule())
    assert [violation.op for violation in harness.violations] == [1]
    assert harness.operations == before + 1
    assert harness.operation_counts()["schedule"]["skipped"] == 1


def test_the_total_of_a_check_is_that_of_the_failing_run() -> None:
    report = check_subject(
        "scheduler:fcfs",
        seconds=20,
        seed="7",
        out=None,
        fault="finished-request-keeps-its-blocks",
    )
    assert report.finding is not None
    assert report.total.ops >= report.finding.found_ops


@pytest.mark.parametrize(
    ("subject", "hint"),
    [
        ("engine", "kvproof check --fault no-copy-on-write"),
        ("engine:groups", "kvproof check --fault no-copy-on-write"),
        (
            "mine:Mine",
            "docs/pytest.md does.  That the adapter tells the truth: kvproof conformance",
        ),
    ],
)
def test_a_pass_says_how_the_checks_of_this_subject_can_fail(subject: str, hint: str) -> None:
    assert hint in _hint(subject)
    assert ("--fault" in _hint(subject)) == subject.startswith("engine")


def test_what_an_adapter_lacks_is_named_before_anything_is_driven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lacks.py").write_text(
        "from kvproof.stateful_tests.examples.template import Template\n"
        "from kvproof.stateful_tests.adapter import Adapter\n\n\n"
        "class Lacks(Adapter):\n    admit = Template.admit\n"
    )
    with pytest.raises(InputError, match="abstract methods free_blocks, grow, index, ref_counts"):
        subject_factory("lacks:Lacks")
