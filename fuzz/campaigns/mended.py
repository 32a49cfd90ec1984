"""Findings whose case does not fail any more: a campaign that goes on puts them aside.

Otherwise a campaign that is kept from night to night would fail for ever by what was mended long
ago, and pass over the runs that might show it again.  If one comes back, it is found anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from kvproof.fuzz.campaigns.guarded import Judged, Replayer
from kvproof.fuzz.campaigns.records import UNREPLAYED, FindingRecord, Target
from kvproof.fuzz.campaigns.store import Store, require_subject
from kvproof.invariants.case import load_case
from kvproof.invariants.errors import InputError


def put_mended_aside(store: Store, targets: Iterable[Target]) -> list[str]:
    """Move findings that do not fail in a replay from ``findings/`` to ``mended/``.

    Those that one replay cannot judge (a hang, a kernel's check, chance) stay; so do those whose
    replay hangs now, or takes its process along: that is told.  Raises InputError if a case cannot
    be read, or is of nothing that the campaign drives.
    """
    subjects, unjudged = {target.subject for target in targets}, []
    with Replayer() as replayer:
        for finding in store.found():
            folder = store.findings / finding.id
            if finding.subject not in subjects:
                raise InputError(
                    f"{folder}: is of {finding.subject!r}, which is no target's subject"
                )
            judged = _judged(finding, folder / "case.json", replayer)
            if judged is not None and judged.is_lost:
                unjudged.append(f"{folder / 'case.json'}: {judged.problem}")
            elif judged is not None and not judged.violations and not judged.problem:
                store.mended.mkdir(exist_ok=True)
                aside = store.mended / finding.id
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(folder, aside)
    return unjudged


def _judged(finding: FindingRecord, case: Path, replayer: Replayer) -> Judged | None:
    """What a replay shows, if it can show anything; a checker that stumbles shows nothing."""
    if finding.property in UNREPLAYED or not _is_replayed(finding) or not case.is_file():
        return None
    require_subject(load_case(case), case, finding.subject)
    return replayer.judge(case)


def _is_replayed(finding: FindingRecord) -> bool:
    """Operations without kinds did not fail in a replay when they were found either."""
    return bool(finding.kinds) or not finding.operations
