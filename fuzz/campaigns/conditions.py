"""Where a campaign was run, for its report."""

from __future__ import annotations

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


def write_conditions(folder: Path, shard: int) -> None:
    """Leave word of this version and this machine in a campaign's folder."""
    conditions = Conditions(_version(), machine_info())
    (folder / "conditions").mkdir(exist_ok=True)
    write_whole(folder / "conditions" / f"{shard:04}.json", as_text(conditions))


def read_conditions(folder: Path) -> list[Conditions]:
    """Of all shards that left word.  Raises InputError with file and place."""
    files = sorted((folder / "conditions").glob("[!.]*.json"))
    return [read_record(file, Conditions) for file in files]


def _version() -> str:
    try:
        return version("kvproof")
    except PackageNotFoundError:
        return "not installed, run from a checkout"
