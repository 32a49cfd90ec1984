"""The summary as JUnit XML, for the test reports of CI.

A suite for each target, with a test for each property that was put to the test there: findings
are failures, known issues are skipped.  One more suite has a test for each subject, an error
where silence would prove nothing (verdict unknown); and what else keeps a campaign from passing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from junitparser.junitparser import FinalResult

from kvproof.fuzz.campaigns.records import KERNEL, FindingRecord
from kvproof.fuzz.report.summary import MergedFinding, Summary, TargetSummary
from kvproof.invariants.verdict import counted

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML may have; messages of other people's code may."""


def write_junit(summary: Summary, path: Path) -> None:
    """Write the XML."""
    xml = JUnitXml("kvproof")
    for target in summary.targets:
        xml.add_testsuite(_suite(target, summary.findings))
    xml.add_testsuite(_reached(summary))
    xml.write(str(path), pretty=True)


def _suite(target: TargetSummary, findings: Sequence[MergedFinding]) -> TestSuite:
    """One target's properties."""
    name = _clean(f"kvproof.{target.target.name}")
    own: dict[str, list[MergedFinding]] = {
        check: [] for check, count in target.totals.checked.items() if count
    }
    for finding in findings:
        if finding.record.target == target.target.name:
            own.setdefault(_tested(finding.record), []).append(finding)
    suite = TestSuite(name)
    for check, found in own.items():
        case = TestCase(_clean(check), classname=name)
        case.result = _results(found)
        suite.add_testcase(case)
    suite.time = round(target.cpu_seconds, 3)
    return suite


def _tested(record: FindingRecord) -> str:
    """The test that a finding fails: a kernel has many checks under one property."""
    return record.kinds[0] if record.property == KERNEL else record.property


def _results(findings: Sequence[MergedFinding]) -> list[FinalResult]:
    """What became of one property: nothing, a failure, or skipped as all of it is known."""
    new = [finding for finding in findings if finding.record.known is None]
    if new:
        failure = Failure(_clean(_messages(new)), new[0].record.property)
        failure.text = _clean("\n\n".join(map(_told, findings)))
        return [failure]
    if findings:
        issues = ", ".join(finding.record.known or "" for finding in findings)
        return [Skipped(_clean(f"known: {issues}"))]
    return []


def _messages(findings: Sequence[MergedFinding]) -> str:
    more = f" (and {counted(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
    return findings[0].record.message + more


def _told(finding: MergedFinding) -> str:
    record = finding.record
    known = f" (known: {record.known})" if record.known else ""
    return f"{record.id}{known}, see {finding.folder}\n{record.explanation}"


def _reached(summary: Summary) -> TestSuite:
    """Whether each subject was looked at closely enough."""
    suite = TestSuite("kvproof.reached")
    for subject in summary.subjects:
        case = TestCase(_clean(subject.subject), classname=suite.name)
        if subject.reasons:
            case.result = [_error("\n".join(subject.reasons))]
        suite.add_testcase(case)
    if summary.untriaged:
        case = TestCase("failing runs are looked into", classname=suite.name)
        case.result = [_error(f"{counted(summary.untriaged, 'failing run')} in raw/")]
        suite.add_testcase(case)
    if summary.lost:
        case = TestCase("findings are there", classname=suite.name)
        case.result = [_error(f"{counted(summary.lost, 'failing run')} of findings that are gone")]
        suite.add_testcase(case)
    if summary.stale:
        case = TestCase("known issues are not mended", classname=suite.name)
        case.result = [Failure(f"{counted(summary.stale, 'known issue')} mended", "known")]
        suite.add_testcase(case)
    return suite


def _error(text: str) -> Error:
    error = Error(_clean(text.partition("\n")[0]), "unknown")
    error.text = _clean(text)
    return error


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
