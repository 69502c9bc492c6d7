"""Histograms side by side, with the same bins and the same scale so that they can be compared."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stretto.report import formatting, plot_style

MOST_BINS = 24
"""Largest number of bins; more values than this share bins."""

CROWDED = 0.5
"""Share of all values in one bin above which bins of growing width are used."""

MOST_LABELS = 6
COLUMNS = 4
LEFT, RIGHT, BETWEEN, TITLE, TALL, AXIS = 0.55, 0.1, 0.28, 0.34, 0.95, 0.42


@dataclass(frozen=True)
class Bins:
    """Bins of whole numbers: each holds the values from one edge to below the next."""

    edges: tuple[int, ...]

    @property
    def single(self) -> bool:
        """True if each bin holds one value."""
        return all(after - before == 1 for before, after in itertools.pairwise(self.edges))

    @property
    def even(self) -> bool:
        """True if all bins have the same width."""
        return len({after - before for before, after in itertools.pairwise(self.edges)}) == 1

    def fill(self, counts: Counter[int]) -> list[float]:
        """Return the share of the counts in each bin."""
        shares = [0.0] * (len(self.edges) - 1)
        for value, count in counts.items():
            shares[bisect_right(self.edges, value) - 1] += count
        total = counts.total() or 1
        return [share / total for share in shares]

    def place(self, value: float) -> float:
        """Return the horizontal position of a value when bin i is centred at i."""
        i = min(bisect_right(self.edges, value), len(self.edges) - 1) - 1
        return i - 0.5 + (value + 0.5 - self.edges[i]) / (self.edges[i + 1] - self.edges[i])


def bins(counts: Counter[int]) -> Bins:
    """Return one bin for each value from 0, or bins of equal width, or of growing width if one bin would be crowded."""
    low, high = min(counts, default=0), max(counts, default=0)
    low = 0 if high < MOST_BINS else low
    width = _width(high - low + 1)
    even = Bins(tuple(range(low // width * width, (high // width + 1) * width + 1, width)))
    crowded = width > 1 and max(even.fill(counts)) > CROWDED
    return Bins(tuple(_growing(high))) if crowded else even


def _width(values: int) -> int:
    """Return the smallest round width that needs at most MOST_BINS bins."""
    width, times = 1, itertools.cycle((2.0, 2.5, 2.0))
    while width * MOST_BINS < values:
        width = int(width * next(times))
    return width


def _growing(high: int) -> Iterator[int]:
    """Yield the edges 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to the first above `high`."""
    edge, step = 0, 1
    while edge <= high:
        yield edge
        edge += step
        step = max(1, (1 << (edge.bit_length() - 1)) // 2)
    yield edge


@dataclass(frozen=True)
class Panel:
    """One histogram: its title, a text beside the title, the counts, and a value to mark."""

    title: str
    text: str
    counts: Counter[int]
    mark: float | None = None


def multiples(name: str, panels: Sequence[Panel], shared: Bins, colour: str, label: str) -> str:
    """Return the SVG of all panels, in rows of up to four."""
    rows = -(-len(panels) // COLUMNS)
    height = rows * (TITLE + TALL) + AXIS
    paint = partial(_paint, panels=panels, shared=shared, colour=colour, label=label)
    return plot_style.draw(name, plot_style.WIDTH, height, paint)


def _paint(figure: Figure, panels: Sequence[Panel], shared: Bins, colour: str, label: str) -> None:
    columns = min(COLUMNS, max(2, len(panels)))
    wide = (plot_style.WIDTH - LEFT - RIGHT - BETWEEN * (columns - 1)) / columns
    shared_y: Axes | None = None
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        rectangle = (LEFT + column * (wide + BETWEEN), TITLE + row * (TITLE + TALL), wide, TALL)
        ax = plot_style.axes(figure, *rectangle, beside=shared_y)
        shared_y = shared_y or ax
        _panel(ax, panel, shared, colour)
        _across(ax, shared, label if i + columns >= len(panels) else "")
        ax.tick_params(labelleft=column == 0)
    _up(shared_y)


def _panel(ax: Axes, panel: Panel, shared: Bins, colour: str) -> None:
    shares = shared.fill(panel.counts)
    ax.bar(range(len(shares)), shares, width=0.86, color=colour, lw=0)
    if panel.mark is not None:
        ax.axvline(shared.place(panel.mark), color=plot_style.TEXT, lw=0.9, ls=(0, (4, 2)))
    ax.set_title(panel.title, loc="left", fontweight="bold", fontsize=9)
    ax.set_title(panel.text, loc="right", color=plot_style.QUIET, fontsize=8)


def _across(ax: Axes, shared: Bins, label: str) -> None:
    """Label single values below their bars, and wider bins at their left edges."""
    edges = shared.edges[:-1] if shared.single else shared.edges
    step = -(-len(edges) // MOST_LABELS)
    shift = 0.0 if shared.single else -0.5
    ax.set_xticks([i + shift for i in range(0, len(edges), step)], [formatting.count(edge) for edge in edges[::step]])
    ax.set_xlim(-0.7, len(shared.edges) - 1.3)
    ax.tick_params(labelbottom=bool(label))
    ax.set_xlabel(label)


def _up(ax: Axes | None) -> None:
    if ax is None:
        return
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:.0%}"))
