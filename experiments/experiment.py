"""Experiments: their parts, and the folder of their results."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.picture import first_picture
from experiments.runs import ROOT, Found, Point, mean, spread
from stretto.report import plot_style

RESULTS = ROOT / "experiments" / "results"
SEEDS = (0, 1, 2)
SHORT = "--epochs 1 --samples 240"
"""Arguments that shorten a quick trial; of repeated options the last counts."""


def nothing(_quick: bool) -> Found:
    """Return no results besides the simulations."""
    return {}


@dataclass(frozen=True)
class Experiment:
    """Claim, the simulations that test it, and the presentation of their results.

    `grid` returns the simulations, or a few of them for a quick trial, which also shortens them. `beside` returns
    further results that are not simulated. `table`, `paint` and `verdict` read only the results.
    """

    name: str
    title: str
    claim: str
    setting: str
    grid: Callable[[bool], list[Point]]
    table: Callable[[Found], Iterator[str]]
    paint: Callable[[Figure, Found], None]
    verdict: Callable[[Found], str]
    beside: Callable[[bool], Found] = nothing

    def run(self, quick: bool = False, folder: Path = RESULTS, say: Callable[[str], None] = print) -> Path:
        """Simulate the grid and write the results to a JSON file."""
        points = [replace(one, args=f"{one.args} {SHORT}") for one in self.grid(True)] if quick else self.grid(False)
        found = []
        for number, point in enumerate(points, 1):
            say(f"[{number} of {len(points)}] {point.command()}")
            found.append(point.run())
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        software = {"python": platform.python_version(), "torch": torch.__version__}
        head = {"experiment": self.name, "software": software, "beside": self.beside(quick)}
        path.write_text(as_text(head, found))
        return path

    def kept(self, folder: Path = RESULTS) -> Found | None:
        """Return the saved results, or None."""
        path = folder / f"{self.name}.json"
        if not path.exists():
            return None
        found: Found = json.loads(path.read_text())
        return found

    def picture(self, found: Found) -> str:
        """Return the plot of the results as SVG."""
        return first_picture(plot_style.draw(self.name, 6.6, 2.5, lambda figure: self.paint(figure, found)))


def as_text(head: Found, points: Sequence[Found]) -> str:
    """Return JSON with a line for each simulation."""
    lines = ",\n".join(map(json.dumps, points))
    return f'{json.dumps(head)[:-1]}, "points": [\n{lines}\n]}}\n'


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"


def percent(points: Sequence[Found]) -> str:
    """Return the mean accuracy of points and its standard deviation over seeds."""
    middle = mean(points, "accuracy")
    return "-" if middle is None else f"{middle:.1%} ± {100 * spread(points, 'accuracy'):.1f}"


def number(value: float | None, digits: int) -> str:
    """Format a number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def panel(figure: Figure, place: int, of: int, title: str, across: str) -> Axes:
    """Add the axes of one of `of` plots side by side."""
    wide = (6.6 - 0.55 * of - 0.1) / of
    ax = plot_style.axes(figure, 0.5 + place * (wide + 0.55), 0.32, wide, 1.65)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=9)
    ax.set_xlabel(across)
    return ax


def line(ax: Axes, xs: Sequence[float], ys: Sequence[float | None], label: str, place: int, marker: str = "o") -> None:
    """Plot a line in one of the colours, interrupted where a value is missing."""
    colour = plot_style.RECIPES[place % len(plot_style.RECIPES)]
    heights = [float("nan") if y is None else y for y in ys]
    ax.plot(xs, heights, color=colour, marker=marker, ms=3, label=label)


def ticks(ax: Axes, values: Sequence[float], texts: Sequence[str] | None = None) -> None:
    """Make the x axis logarithmic, with a tick at each value."""
    ax.set_xscale("log")
    ax.set_xticks(list(values), list(texts or map(str, values)))
    ax.minorticks_off()


def logarithmic(ax: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def legend(ax: Axes) -> None:
    """Add a legend."""
    ax.legend(frameon=False, fontsize=7, handlelength=1.4, labelspacing=0.25)
