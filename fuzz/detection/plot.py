"""Survival curves of each driver in one picture.

Drawn by matplotlib, which is an extra: ``pip install 'kvproof[plot]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from kvproof.fuzz.detection.drivers import NAMES
from kvproof.fuzz.detection.summary import Survival
from kvproof.invariants.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_LEAST_SECONDS = 1e-3


def require_plotting(path: Path) -> None:
    """Raise InputError now if the picture could not be drawn later."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a picture ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise InputError("drawing needs matplotlib: pip install 'kvproof[plot]'")


def plot(curves: Mapping[str, Survival], path: Path) -> None:
    """Draw a curve for each driver into ``path``; the same curves always give the same file."""
    figure = _figure(curves)
    if path.suffix.lower() == ".png":
        figure.savefig(path, dpi=150)
        return
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "kvproof"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _figure(curves: Mapping[str, Survival]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        last = max([curve.steps[-1][0], *curve.censored])
        times = [max(_LEAST_SECONDS, seconds) for seconds, _ in curve.steps]
        shares = [100 * share for _, share in curve.steps]
        end = curve.steps[-1][1]
        (line,) = axes.step(
            [*times, max(_LEAST_SECONDS, last)],
            [*shares, 100 * end],
            where="post",
            label=NAMES[name],
        )
        given_up = [(seconds, 100 * _share_at(curve, seconds)) for seconds in curve.censored]
        if given_up:
            axes.plot(*zip(*given_up, strict=True), "|", color=line.get_color(), markersize=10)
    axes.set_xscale("log")
    axes.set_xlim(left=_LEAST_SECONDS)
    axes.set_ylim(0, 102)
    axes.set_xlabel("CPU seconds (a bar: a search was given up)")
    axes.set_ylabel("searches that have not found their fault, %")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    return figure


def _share_at(curve: Survival, seconds: float) -> float:
    return [share for since, share in curve.steps if since <= seconds][-1]
