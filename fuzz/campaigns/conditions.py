"""Where a campaign was run, and which code, for its report."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from kvproof.fuzz.bench.machine_info import MachineInfo, machine_info
from kvproof.fuzz.campaigns.store import as_text, read_record, write_whole


class Conditions(Struct, frozen=True, forbid_unknown_fields=True):
    """``conditions/NNNN.json``: where shard NNNN was started last."""

    kvproof: str
    """Its version."""
    machine: MachineInfo
    versions: tuple[tuple[str, str], ...] = ()
    """Of the user's code: subjects, each with a digest of its source files."""


def write_conditions(folder: Path, shard: int, versions: Mapping[str, str]) -> None:
    """Leave word of this code and this machine in a campaign's folder."""
    conditions = Conditions(_version(), machine_info(), tuple(versions.items()))
    (folder / "conditions").mkdir(exist_ok=True)
    write_whole(_file(folder, shard), as_text(conditions))


def version_at(folder: Path, shard: int, subject: str) -> str:
    """Of the user's code, with which the shard was started last."""
    file = _file(folder, shard)
    versions = read_record(file, Conditions).versions if file.exists() else ()
    return dict(versions).get(subject, "")


def read_conditions(folder: Path) -> list[Conditions]:
    """Of all shards that left word.  Raises InputError with file and place."""
    files = sorted((folder / "conditions").glob("[!.]*.json"))
    return [read_record(file, Conditions) for file in files]


def _file(folder: Path, shard: int) -> Path:
    return folder / "conditions" / f"{shard:04}.json"


def _version() -> str:
    try:
        return version("kvproof")
    except PackageNotFoundError:
        return "not installed, run from a checkout"
