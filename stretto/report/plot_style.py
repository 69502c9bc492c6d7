"""Style of the plots: colours, matplotlib settings, and SVG that can be embedded in a page."""

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
"""Colours after Okabe and Ito, distinguishable for colour-blind readers; the light ones are darkened for text."""

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
"""Colours of the phases: cold for phases of any training, warm for the overhead of distributed training."""

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
"""Width of a plot on a page, in inches."""

WEB_FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"
SMALLEST_GAP_INCH = 0.155


def colours(groups: Sequence[Group]) -> dict[str, str]:
    """Return the colour of each recipe, the same for every number of workers and in every plot."""
    recipes = dict.fromkeys(group.recipe for group in groups if not group.single_process)
    by_recipe = {recipe: RECIPES[index % len(RECIPES)] for index, recipe in enumerate(recipes)}
    return by_recipe | dict(zip((SINGLE_PROCESS, GLOBAL_BATCH), SINGLE_PROCESS_COLOURS, strict=True))


def draw(name: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """Draw a figure, with its size in inches, and return it as SVG whose ids start with `name`."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(width, height))
        paint(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return _embedded(file.getvalue(), name)


def _embedded(svg: str, name: str) -> str:
    """Return the svg element without prologue and namespaces, with ids that are unique in the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", WEB_FONT, svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    return svg.strip()


def axes(figure: Figure, left: float, top: float, width: float, height: float, beside: Axes | None = None) -> Axes:
    """Add axes at a place in inches from the upper left corner, so that the layout does not depend on texts."""
    whole_width, whole_height = figure.get_size_inches()
    rectangle = (
        left / whole_width,
        1 - (top + height) / whole_height,
        width / whole_width,
        height / whole_height,
    )
    return figure.add_axes(rectangle, sharey=beside)


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]], height_inch: float) -> None:
    """Label lines at the right edge in their colours; labels that would overlap are moved apart."""
    scale = ax.transData + ax.transAxes.inverted()
    sorted_ends = sorted((float(scale.transform((1, y))[1]), text, colour) for y, text, colour in ends)
    gaps = [SMALLEST_GAP_INCH / height_inch * (1 + text.count("\n")) for _, text, _ in sorted_ends]
    for (end, text, colour), label_y in zip(sorted_ends, _apart([y for y, _, _ in sorted_ends], gaps), strict=True):
        ax.plot((1.005, 1.03), (end, label_y), transform=ax.transAxes, color=colour, lw=0.6, clip_on=False)
        ax.text(1.04, label_y, text, transform=ax.transAxes, color=colour, va="center", linespacing=1.05)


def _apart(heights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return heights without overlaps: pushed upwards from the lowest, then down from the top where needed."""
    placed = [max(0.0, min(1.0, y)) for y in heights]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + (gaps[i] + gaps[i - 1]) / 2)
    over = max(placed[-1] - 1.0, 0.0) if placed else 0.0
    for i in range(len(placed) - 1, -1, -1):
        ceiling = placed[i] - over if i == len(placed) - 1 else placed[i + 1] - (gaps[i] + gaps[i + 1]) / 2
        placed[i] = min(placed[i], ceiling)
    return placed


def short(name: str, length: int = 22) -> str:
    """Return a recipe's name on one or two short lines."""
    if len(name) <= length:
        return name
    comma, bracket = name.rfind(", ", 0, length + 2) + 1, name.rfind("(", 0, length) + 1
    bracket -= name[:bracket].endswith(" (")  # an explanation begins with its bracket; that of a call ends its name
    cut = comma or bracket or length
    first, remainder = name[:cut].rstrip(), name[cut:].lstrip()
    return f"{first}\n{remainder if len(remainder) <= length else remainder[: length - 1] + '…'}"
