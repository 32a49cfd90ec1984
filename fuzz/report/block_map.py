"""A picture of the block map over time: rows are physical blocks, columns operations.

Drawn from the recorded run.  Whoever holds a block is written on it, so that nothing is told by
colour alone; how to read it stands in the page, beside the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from kvproof.fuzz.report.ownership import EMPTY, Cell, Place, arrivals, ownership
from kvproof.fuzz.report.svg import as_text, box, group, line, picture, words
from kvproof.invariants.operations import kind_of
from kvproof.invariants.story import Moment
from kvproof.invariants.verdict import SCHEDULING_PROPERTIES, Violation

COLUMNS_MAX = 120
"""Operations that are drawn: the latest so many."""
ROWS_MAX = 60
"""Blocks that are drawn: of more, the violated one and those whose holders changed last."""
OWNER_COLOURS = 8
"""Requests have different ones up to this; then they come again, and the names tell."""

_ROW, _LABEL, _HEAD, _GAP, _FOOT = 22, 58, 96, 10, 4
_WIDTH_WANTED, _COLUMN_MIN, _COLUMN_MAX = 900, 20, 44
_LETTER = 6.6
"""Pixels of a letter."""
_SLOT = {"device": "b", "host": "h", "disk": "d"}
_TIERS = tuple(_SLOT)


class BlockMap(Struct, frozen=True):
    """The picture, and what it leaves out."""

    svg: str
    left_out: tuple[str, ...]
    signs: frozenset[str]
    """What a legend has to explain."""


def block_map(
    moments: Sequence[Moment], block_size: int, violation: Violation | None, log: Sequence[str]
) -> BlockMap | None:
    """Draw a run; None if no block was ever touched.  ``log`` has a line for each moment."""
    columns = ownership(moments, block_size)
    first = max(0, len(columns) - COLUMNS_MAX)
    violated = set() if violation is None else _violated(violation, columns, arrivals(moments))
    rows, rows_left_out = _rows(columns[first:], violated)
    if not rows or not columns:
        return None
    left_out = []
    if first:
        left_out.append(f"the first {first} operations")
    if rows_left_out:
        left_out.append(f"{rows_left_out} blocks that nothing happened to in the end")
    drawing = _Drawing(moments, columns, first, rows, log)
    if violation is None:
        drawing.draw({})
    else:
        column = min(max(violation.op - first, 0), len(columns) - first - 1)
        drawing.draw(dict.fromkeys(violated, column))
        drawing.mark(violation, column, violated)
    signs = {
        sign for column in columns[first:] for cell in column.values() for sign in _signs(cell)
    }
    return BlockMap(as_text(drawing.root), tuple(left_out), frozenset(signs))


def place_name(place: Place, groups: bool) -> str:
    """As the log names it: ``b7``, ``g1:h3``."""
    tier, group_number, block = place
    return (f"g{group_number}:" if groups else "") + f"{_SLOT[tier]}{block}"


def _violated(
    violation: Violation, columns: Sequence[dict[Place, Cell]], names: Mapping[str, str]
) -> set[Place]:
    """What a violation is about: the block it names, or those of the request or tier it names."""
    if violation.block is not None:
        return {(violation.tier, violation.group, violation.block)}
    if violation.tier != "device":
        every = {place for column in columns for place in column}
        return {place for place in every if place[:2] == (violation.tier, violation.group)}
    if violation.request is None or not columns:
        return set()
    holder = f"r{violation.request}"
    if violation.property in SCHEDULING_PROPERTIES:
        holder = f"q{violation.request}"
    at = min(max(violation.op, 0), len(columns) - 1)
    named = names.get(holder, holder)
    return {place for place, cell in columns[at].items() if named in cell.holders}


def _rows(columns: Sequence[dict[Place, Cell]], violated: set[Place]) -> tuple[list[Place], int]:
    """The blocks to draw, tier by tier, and how many there would be besides."""
    changed: dict[Place, int] = dict.fromkeys(violated, len(columns))
    before: dict[Place, Cell] = {}
    for index, column in enumerate(columns):
        for place in column.keys() | before.keys():
            if column.get(place) != before.get(place):
                changed[place] = max(index, changed.get(place, 0))
        before = column
    latest = sorted(changed, key=changed.__getitem__, reverse=True)[:ROWS_MAX]
    return sorted(latest, key=_by_tier), len(changed) - len(latest)


def _by_tier(place: Place) -> tuple[int, int, int]:
    return _TIERS.index(place[0]), place[1], place[2]


class _Drawing:
    def __init__(
        self,
        moments: Sequence[Moment],
        columns: Sequence[dict[Place, Cell]],
        first: int,
        rows: Sequence[Place],
        log: Sequence[str],
    ) -> None:
        self._moments = moments[first:]
        self._columns = columns[first:]
        self._first = first
        self._log = log
        self._groups = any(place[1] for place in rows)
        count = len(self._columns)
        self._step = min(max(_WIDTH_WANTED / count, _COLUMN_MIN), _COLUMN_MAX)
        self._y = dict(_positions(rows))
        self._end = max(self._y.values()) + _ROW
        width = 2 * _LABEL + count * self._step
        names = ", ".join(place_name(place, self._groups) for place in rows)
        label = f"Who holds which block: {names}, after each of {count} operations"
        self.root = picture(width, self._end + _FOOT, label, "blocks")

    def _x(self, column: int) -> float:
        return _LABEL + column * self._step

    def draw(self, marked: Mapping[Place, int]) -> None:
        """Everything but the violation; a ``marked`` cell stands apart from those before it."""
        for column, moment in enumerate(self._moments):
            self._operation(column, moment)
        right = self._x(len(self._columns))
        for place, y in self._y.items():
            name = place_name(place, self._groups)
            words(self.root, name, _LABEL - 8, y + 15, "row end")
            words(self.root, name, right + 8, y + 15, "row")
            box(self.root, _LABEL, y, right - _LABEL, _ROW - 2, "empty")
            cells = [column.get(place, EMPTY) for column in self._columns]
            for start, end, cell in _stretches(cells, marked.get(place)):
                if cell != EMPTY:
                    self._stretch(place, y, start, end, cell)

    def _operation(self, column: int, moment: Moment) -> None:
        said = " ".join(self._log[moment.op].split()) if moment.op < len(self._log) else ""
        head = group(self.root, said)
        x = self._x(column)
        box(head, x, 0, self._step, _HEAD, "head")
        label = f"{moment.op} {kind_of(moment.operation)}"
        words(head, label, x + self._step / 2 + 4, _HEAD - 6, "op", turned=True)
        line(self.root, x, _HEAD, x, self._end, "grid")

    def _stretch(self, place: Place, y: float, start: int, end: int, cell: Cell) -> None:
        ops = f"op {self._first + start}" + (f" to {self._first + end - 1}" * (end > start + 1))
        title = f"{place_name(place, self._groups)}, {ops}: {_told(cell)}"
        bar = group(self.root, title)
        x, width, height = self._x(start) + 1, (end - start) * self._step - 2, _ROW - 2
        styles = [_style(holder) for holder in cell.holders] or ["cached" if cell.findable else ""]
        part = height / len(styles)
        for index, style in enumerate(styles):
            box(bar, x, y + index * part, width, part, f"bar {style}")
        box(bar, x, y, width, height, "outline")
        if cell.findable and cell.holders:
            box(bar, x, y + height - 4.5, width, 2.5, "findable")
        if cell.written_by:
            box(bar, x, y + 1, width, 2.5, "written")
        label = _fitting(cell, width)
        if label:
            words(bar, label, x + 4, y + 14.5, "holder")

    def mark(self, violation: Violation, column: int, violated: set[Place]) -> None:
        """Where and when it was seen."""
        x = self._x(column)
        words(self.root, "✗", x + self._step / 2, 14, "cross")
        drawn = [self._y[place] for place in violated if place in self._y]
        if not drawn:
            box(self.root, x - 1, _HEAD - 2, self._step + 2, self._end - _HEAD + 2, "violation")
        for y in drawn:
            mark = group(self.root, f"{violation.property}: {violation.message}")
            box(mark, x - 1, y - 2, self._step + 2, _ROW + 2, "violation")


def _positions(rows: Sequence[Place]) -> Iterator[tuple[Place, float]]:
    """Where each row begins; a gap sets off tiers and groups."""
    y: float = _HEAD
    for index, place in enumerate(rows):
        if index and place[:2] != rows[index - 1][:2]:
            y += _GAP
        yield place, y
        y += _ROW


def _stretches(cells: Sequence[Cell], split: int | None) -> Iterator[tuple[int, int, Cell]]:
    """Operations during which a block stays as it is: from, to (exclusive), and how."""
    start = 0
    for index in range(1, len(cells) + 1):
        if index == len(cells) or index == split or cells[index] != cells[start]:
            yield start, index, cells[start]
            start = index


def _signs(cell: Cell) -> Iterator[str]:
    for holder in cell.holders:
        yield {"r": "request", "q": "arrival", "s": "fence", "t": "transfer"}[holder[0]]
    if len(cell.holders) > 1:
        yield "shared"
    if cell.findable:
        yield "findable" if cell.holders else "cached"
    if cell.written_by:
        yield "written"


def _style(holder: str) -> str:
    if holder[0] in "rq":
        return f"o{int(holder[1:]) % OWNER_COLOURS}"
    return "fence" if holder.startswith("s") else "transfer"


def _fitting(cell: Cell, width: float) -> str:
    """What is written on the block: all holders, or how many they are, or nothing."""
    if not cell.holders:
        return "cached" if cell.findable and width > 6 * _LETTER + 4 else "c" * cell.findable
    for label in (" ".join(cell.holders), f"{len(cell.holders)}×", ""):
        if len(label) * _LETTER + 4 <= width:
            return label
    return ""


def _told(cell: Cell) -> str:
    """The cell in words."""
    said = [_HOLDS[holder[0]].format(holder[1:]) for holder in cell.holders]
    said = [" and ".join(said)] if said else ["held by nobody"]
    if cell.findable:
        said.append("findable")
    said += [f"to be written by step {step}, in flight" for step in cell.written_by]
    return ", ".join(said)


_HOLDS = {
    "r": "held by request {}",
    "q": "held by request {}, by arrival",
    "s": "held by the fence of step {}, in flight",
    "t": "in use by transfer {}",
}
