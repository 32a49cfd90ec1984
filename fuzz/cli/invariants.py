"""``kvproof invariants``: what is checked, and where each statement comes from."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvproof.fuzz.cli.output import WIDE, JsonOption, console, print_json, table
from kvproof.fuzz.report.unchecked import UNCHECKED
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.property import Property
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS


def invariants(
    property_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A property, such as CONS.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List all properties, or explain one.

    Example: [bold]kvproof invariants PROV[/]
    """
    checked = [check.describe() for check in (*CHECKS, *SCHEDULING_CHECKS)]
    properties = [*checked, *UNCHECKED]
    if property_id is not None:
        known = ", ".join(p.id for p in properties)
        properties = [p for p in properties if p.id == property_id.upper()]
        if not properties:
            raise InputError(f"unknown property {property_id!r}; there are {known}")
    if as_json:
        print_json({"invariants": msgspec.to_builtins(properties)})
    elif property_id is not None:
        _explain(properties[0])
    else:
        _list(checked)
        console.print("Seen without a check, in a run as such:")
        for p in UNCHECKED:
            console.print(f"  [bold]{p.id}[/]  {p.title}")
        console.print("Explain one: kvproof invariants ID")


def _list(properties: list[Property]) -> None:
    if console.width < WIDE:
        for p in properties:
            console.print(f"[bold]{p.id}[/]  {p.title}")
            for claim in p.claims:
                console.print(f"    • {claim.statement}  ({claim.source})", markup=False)
        return
    rows = [
        (p.id, p.title, claim.statement, claim.source) for p in properties for claim in p.claims
    ]
    shown = [
        ("" if index and rows[index - 1][0] == row[0] else row[0], row[1], *row[2:])
        for index, row in enumerate(rows)
    ]
    table(
        "Properties",
        ("id", "title", "statement", "source"),
        [(name, title if name else "", *rest) for name, title, *rest in shown],
    )


def _explain(p: Property) -> None:
    console.print(f"[bold]{p.id}[/]: {p.title}" + "\n" * bool(p.claims))
    for claim in p.claims:
        console.print(f"  • {claim.statement}\n    [dim]source: {claim.source}[/]")
    console.print(f"\n[bold]Verifies[/]: {p.verifies}")
    console.print(f"\n[bold]Does not verify[/]: {p.does_not_verify}")
    if p.positive_control:
        console.print(
            f"\n[bold]Positive control[/]: the seeded fault [bold]{p.positive_control}[/] "
            "(kvproof faults list)"
        )
