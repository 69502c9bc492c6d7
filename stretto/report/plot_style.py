"""The look of the plots: colours, a quiet style, and SVG that can stand inside a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.report.aggregation import Group
from stretto.report.run_record import GLOBAL_BATCH, SINGLE_PROCESS

TEXT, QUIET, FAINT = "#222222", "#666666", "#dddddd"
RECIPES = ("#0072b2", "#d55e00", "#009e73", "#b8568f", "#2f8fc4", "#b57d00")
"""After Okabe and Ito, told apart by the colour-blind too; the light ones darkened, for text in them."""

LOST = "#b23a1e"
SINGLE_PROCESS_COLOURS = ("#222222", "#8a8a8a")
PHASES = {
    "computing": "#3c5a76",
    "loading": "#8fa7bb",
    "evaluating": "#c6d0d8",
    "other": "#e4e4e0",
    "encoding": "#f3c56b",
    "exchanging": "#e0812b",
    "waiting": "#b23a1e",
}
"""Cold: what one machine spends too. Warm: the price of being several."""

STYLE: Any = {
    "svg.hashsalt": "stretto",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.6,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
}
WIDTH = 11.0
"""Inches that a drawing takes on a page."""

WEB_FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"
SMALLEST_GAP_INCH = 0.155


def colours(groups: Sequence[Group]) -> dict[str, str]:
    """One colour a recipe, the same for every number of workers and in every plot."""
    recipes = dict.fromkeys(group.recipe for group in groups if not group.single_process)
    found = {recipe: RECIPES[index % len(RECIPES)] for index, recipe in enumerate(recipes)}
    return found | dict(zip((SINGLE_PROCESS, GLOBAL_BATCH), SINGLE_PROCESS_COLOURS, strict=True))


def draw(name: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """Paint a figure of so many inches and return it as SVG whose ids begin with `name`."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(width, height))
        paint(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return _embedded(file.getvalue(), name)


def _embedded(svg: str, name: str) -> str:
    """Only the drawing: no prologue, no addresses, ids that no other figure of the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", WEB_FONT, svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    return svg.strip()


def axes(figure: Figure, left: float, top: float, width: float, height: float, beside: Axes | None = None) -> Axes:
    """Axes placed in inches from the upper left corner, so that no layout depends on the texts."""
    whole_width, whole_height = figure.get_size_inches()
    place = (
        left / whole_width,
        1 - (top + height) / whole_height,
        width / whole_width,
        height / whole_height,
    )
    return figure.add_axes(place, sharey=beside)


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]], height_inch: float) -> None:
    """Name lines at the right edge in their colours, moved apart where they would cover each other."""
    scale = ax.transData + ax.transAxes.inverted()
    wanted = sorted((float(scale.transform((1, y))[1]), text, colour) for y, text, colour in ends)
    gaps = [SMALLEST_GAP_INCH / height_inch * (1 + text.count("\n")) for _, text, _ in wanted]
    for (end, text, colour), place in zip(wanted, _apart([y for y, _, _ in wanted], gaps), strict=True):
        ax.plot((1.005, 1.03), (end, place), transform=ax.transAxes, color=colour, lw=0.6, clip_on=False)
        ax.text(1.04, place, text, transform=ax.transAxes, color=colour, va="center", linespacing=1.05)


def _apart(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Heights as near to the wanted ones as a simple push upwards, then back below the top, leaves them."""
    placed = [max(0.0, min(1.0, y)) for y in wanted]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + (gaps[i] + gaps[i - 1]) / 2)
    over = max(placed[-1] - 1.0, 0.0) if placed else 0.0
    for i in range(len(placed) - 1, -1, -1):
        ceiling = placed[i] - over if i == len(placed) - 1 else placed[i + 1] - (gaps[i] + gaps[i + 1]) / 2
        placed[i] = min(placed[i], ceiling)
    return placed


def short(name: str, length: int = 22) -> str:
    """A recipe's name on one or two short lines."""
    if len(name) <= length:
        return name
    comma, bracket = name.rfind(", ", 0, length + 2) + 1, name.rfind("(", 0, length) + 1
    cut = comma or bracket or length
    first, rest = name[:cut], name[cut:].lstrip()
    return f"{first}\n{rest if len(rest) <= length else rest[: length - 1] + '…'}"
