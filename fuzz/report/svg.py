"""The little SVG that the page needs: escaped by ElementTree, coloured by the page's CSS."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement


def picture(width: float, height: float, label: str, css: str) -> Element:
    """An empty picture of so many pixels; ``label`` is what is read out in its place."""
    return Element(
        "svg",
        {
            "class": css,
            "width": _number(width),
            "height": _number(height),
            "viewBox": f"0 0 {_number(width)} {_number(height)}",
            "role": "img",
            "aria-label": label,
        },
    )


def box(parent: Element, x: float, y: float, width: float, height: float, css: str) -> Element:
    """A rectangle."""
    sides = {"x": x, "y": y, "width": width, "height": height}
    return SubElement(parent, "rect", {"class": css, **_numbers(sides)})


def line(parent: Element, x1: float, y1: float, x2: float, y2: float, css: str) -> Element:
    """A straight line."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return SubElement(parent, "line", {"class": css, **_numbers(ends)})


def words(
    parent: Element, text: str, x: float, y: float, css: str, *, turned: bool = False
) -> Element:
    """A line of text; ``turned``: from below upwards."""
    element = SubElement(parent, "text", {"class": css, **_numbers({"x": x, "y": y})})
    if turned:
        element.set("transform", f"rotate(-90 {_number(x)} {_number(y)})")
    element.text = text
    return element


def group(parent: Element, title: str) -> Element:
    """What is drawn into it shows the title when pointed at."""
    element = SubElement(parent, "g")
    SubElement(element, "title").text = title
    return element


def as_text(root: Element) -> str:
    """The picture, to be put into a page."""
    return ElementTree.tostring(root, encoding="unicode")


def _numbers(values: dict[str, float]) -> dict[str, str]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
