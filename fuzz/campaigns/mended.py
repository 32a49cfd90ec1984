"""Findings whose case does not fail any more: a campaign that goes on puts them aside.

Otherwise a campaign that is kept from night to night would fail for ever by what was mended long
ago, and pass over the runs that might show it again.  If one comes back, it is found anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from kvproof.fuzz.campaigns.records import UNREPLAYED, FindingRecord, Target
from kvproof.fuzz.campaigns.store import Store, require_subject
from kvproof.fuzz.replay import replay
from kvproof.invariants.case import load_case
from kvproof.invariants.errors import InputError


def put_mended_aside(store: Store, targets: Iterable[Target]) -> None:
    """Move findings that do not fail in a replay from ``findings/`` to ``mended/``.

    Those that one replay cannot judge (a hang, a kernel's check, chance) stay.  Raises InputError
    if a case cannot be read, or is of nothing that the campaign drives.
    """
    subjects = {target.subject for target in targets}
    for finding in store.found():
        folder = store.findings / finding.id
        if finding.subject not in subjects:
            raise InputError(f"{folder}: is of {finding.subject!r}, which is no target's subject")
        if is_mended(finding, folder / "case.json"):
            store.mended.mkdir(exist_ok=True)
            aside = store.mended / finding.id
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)


def is_mended(finding: FindingRecord, case: Path) -> bool:
    """Whether a replay shows that nothing fails; a checker that stumbles shows nothing.

    What has no kinds did not fail in a replay when it was found either.
    """
    if finding.property in UNREPLAYED or not finding.kinds or not case.is_file():
        return False
    failing = load_case(case)
    require_subject(failing, case, finding.subject)
    replayed = replay(failing)
    return not replayed.violations and replayed.problem is None
