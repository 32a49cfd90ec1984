"""KV use and batch size over virtual time, one line per policy, in one picture.

Where there are tiers below the device, also the capacity gained by them.

Drawn by matplotlib, which is an extra: ``pip install 'kvproof[plot]'``.  A page (``.html``) has the
picture in it as SVG, and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from kvproof.fuzz.traces.observer import Series
from kvproof.invariants.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family: sans-serif; margin: 2em">
<h1 style="font-size: 1.2em">{title}</h1>
<p>Times are virtual, by an assumed cost model; they are no measurement of any system.</p>
{picture}
</body>
</html>
"""


def require_plotting(path: Path) -> None:
    """Raise InputError now if the picture could not be drawn later."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a picture ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if find_spec("matplotlib") is None:
        raise InputError("drawing needs matplotlib: pip install 'kvproof[plot]'")


def plot(policies: Mapping[str, Series], title: str, path: Path) -> None:
    """Draw the series of each policy into ``path``; its ending says in which format."""
    figure = _figure(policies, title)
    if path.suffix.lower() == ".png":
        figure.savefig(path, dpi=150)
        return
    picture = _svg(figure)
    if path.suffix.lower() == ".html":
        inline = picture[picture.index("<svg") :]  # without the XML prologue
        picture = _PAGE.format(title=escape(title), picture=inline)
    path.write_text(picture, encoding="utf-8")


def _figure(policies: Mapping[str, Series], title: str) -> Figure:
    from matplotlib.figure import Figure

    tiered = any(series.gained_tokens for series in policies.values())
    figure = Figure(figsize=(10, 8 if tiered else 6), layout="constrained")
    use, batch, *gained = figure.subplots(3 if tiered else 2, 1, sharex=True)
    for name, series in policies.items():
        percent = [100 * share for share in series.kv_use]
        use.step(series.seconds, percent, where="post", label=name, linewidth=1)
        batch.step(series.seconds, series.sequences, where="post", label=name, linewidth=1)
        for axes in gained:
            tokens = series.gained_tokens or [0.0] * len(series.seconds)
            axes.step(series.seconds, tokens, where="post", label=name, linewidth=1)
    figure.suptitle(title)
    use.set_ylabel("KV blocks in use, %")
    use.set_ylim(0, 105)
    batch.set_ylabel("batch size, requests")
    use.legend(loc="lower right")
    for axes in gained:
        axes.set_ylabel("capacity gained, tokens")
    for axes in (batch, *gained):
        axes.set_ylim(bottom=0)
    (batch, *gained)[-1].set_xlabel("virtual time, s")
    for axes in (use, batch, *gained):
        axes.grid(alpha=0.3)
    return figure


def _svg(figure: Figure) -> str:
    """The same figure always gives the same text."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "kvproof"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
