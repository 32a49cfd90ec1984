"""Cases: what replays to the same digest in another process, on another machine.

A case is a JSON file, one operation a line.  It is read strictly: a file that is truncated, of
another version, of a wrong type or with an unknown operation is refused in one line that names
the file and the place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import ALL_KINDS, AnyOperation, Operation
from kvproof.invariants.scheduling.vocabulary import Limits
from kvproof.invariants.subject import Configuration

FORMAT = "kvproof-case"
VERSION = 1
"""Raised whenever an old case would mean something else, or nothing."""


class Case(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A run: subject, configuration, operations; and what it is known to show."""

    subject: str
    configuration: Configuration
    operations: list[AnyOperation]
    features: tuple[str, ...] = ()
    """Swarm features that the run drew; shrinking turns them off."""
    seed: str = ""
    """Where the run came from, for the record: a replay does not use it."""
    fault: str | None = None
    """A seeded fault to be installed (``kvproof faults list``)."""
    violates: str | None = None
    """The property that this case violates, where it was written for a finding."""


def dump_case(case: Case) -> str:
    """The case as text; the same case always gives the same text."""
    fields: dict[str, Any] = msgspec.to_builtins(case)
    operations = fields.pop("operations")
    limits = _own(case.configuration.scheduling)
    fields["configuration"].pop("scheduling", None)
    if limits:
        fields["configuration"]["scheduling"] = limits
    head = {"format": FORMAT, "version": VERSION, **fields}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    listed = ",\n".join(f"    {json.dumps(operation)}" for operation in operations)
    body = f"[\n{listed}\n  ]" if operations else "[]"
    return "\n".join(["{", *lines, f'  "operations": {body}', "}", ""])


def _own(limits: Limits) -> dict[str, object]:
    """What is not as by default; msgspec leaves out only what is the very same object."""
    default = Limits()
    return {
        name: getattr(limits, name)
        for name in limits.__struct_fields__
        if getattr(limits, name) != getattr(default, name)
    }


def save_case(case: Case, path: Path) -> None:
    """Write the case; a crash leaves the old file or the new one, never half of one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(dump_case(case), encoding="utf-8")
    partial.replace(path)


def load_case(path: Path) -> Case:
    """Read a case.  Raises InputError in one line with file and place."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    return parse_case(text, str(path))


def parse_case(text: bytes | str, name: str = "<case>") -> Case:
    """The case in ``text``; ``name`` stands for the file in errors.  Raises InputError."""
    raw = _parse_json(text, name)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise InputError(f'{name}: not a kvproof case (no "format": "{FORMAT}" at the top)')
    version = raw.get("version")
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"{name}: case of version {version!r} at $.version; this kvproof reads version "
            f"{VERSION}"
        )
    fields = {key: value for key, value in raw.items() if key not in ("format", "version")}
    _refuse_unknown_operations(fields.get("operations"), name)
    try:
        return msgspec.convert(fields, Case)
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: {error}") from None


def _parse_json(text: bytes | str, name: str) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        end = len(error.doc.rstrip()) <= error.pos + 1
        what = "the file ends too early" if end else f"not JSON: {error.msg}"
        raise InputError(f"{place}: {what}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deep to be a case") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{name}: {error}") from None


def _refuse_unknown_operations(operations: object, name: str) -> None:
    """A message of our own, since it should name the operations there are."""
    if not isinstance(operations, list):
        return
    for index, operation in enumerate(operations):
        kind = operation.get("op") if isinstance(operation, dict) else None
        if kind is not None and kind not in ALL_KINDS:
            raise InputError(
                f"{name}: unknown operation {kind!r} at $.operations[{index}].op; known are "
                f"{', '.join(ALL_KINDS)}"
            )


def source_of(operation: Operation) -> str:
    """The operation as a Python expression, for exported tests: ``Grow(request=1)``."""
    values = [
        f"{name}={getattr(operation, name)!r}"
        for name, default in zip(
            operation.__struct_fields__, _defaults(type(operation)), strict=True
        )
        if getattr(operation, name) != default
    ]
    return f"{type(operation).__name__}({', '.join(values)})"


def _defaults(kind: type[Operation]) -> list[object]:
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    return [msgspec.UNSET] * required + list(kind.__struct_defaults__)
