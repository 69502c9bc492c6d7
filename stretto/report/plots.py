"""Plots of a page: learning curves, time breakdown, model distance, scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from stretto.events import process_name
from stretto.report import formatting, plot_style
from stretto.report.aggregation import Group, Measure
from stretto.report.run_record import Record
from stretto.report.time_series import Curve, Moment, Sample

WIDTH = plot_style.WIDTH
LEFT, RIGHT = 0.55, 1.75
BETWEEN = 0.28
TITLE, AXIS = 0.3, 0.42
MOST_BARS = 8
LOG_FROM = 20.0
FINAL = 0.95
"""Share of the samples of the longest run from which on the final value of another run is drawn beside it."""

MOST_NAMED = 12


@dataclass(frozen=True)
class Line:
    """Curves of one group in a panel, one for each seed."""

    label: str
    colour: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Row:
    """One quantity, plotted against each axis; `goal` is a level to mark."""

    title: str
    lines: tuple[Line, ...]
    goal: float | None = None

    def samples(self) -> list[Sample]:
        """Return all points of all lines."""
        return [sample for line in self.lines for curve in line.curves for sample in curve.samples]


@dataclass(frozen=True)
class Across:
    """Horizontal axis: a field of Sample and the label of the axis."""

    field: str
    label: str
    log: bool = False


SECONDS = Across("seconds", "training time, seconds")
MEGABYTES = Across("megabytes", "MB sent by each worker, log scale", log=True)
SAMPLES = Across("samples", "samples, all workers")


def curves(name: str, rows: Sequence[Row], moments: Sequence[Moment] = ()) -> str:
    """Return the SVG of each quantity against time, bytes and samples; lines are labelled at the right of each row.

    `moments` are marked on the time axis.
    """
    sent = any(sample.megabytes > 0 for row in rows for sample in row.samples())
    columns = [SECONDS, MEGABYTES, SAMPLES] if sent else [SECONDS, SAMPLES]
    tall = 1.75
    height = len(rows) * (TITLE + tall) + AXIS
    return plot_style.draw(
        name, WIDTH, height, partial(_paint_curves, rows=rows, columns=columns, tall=tall, moments=moments)
    )


def _paint_curves(
    figure: Figure, rows: Sequence[Row], columns: Sequence[Across], tall: float, moments: Sequence[Moment]
) -> None:
    wide = (WIDTH - LEFT - RIGHT - BETWEEN * (len(columns) - 1)) / len(columns)
    limits = [_limits(rows, across) for across in columns]
    for i, row in enumerate(rows):
        first: Axes | None = None
        for j, across in enumerate(columns):
            rectangle = (LEFT + j * (wide + BETWEEN), TITLE + i * (TITLE + tall), wide, tall)
            ax = plot_style.axes(figure, *rectangle, beside=first)
            first = first or ax
            _panel(ax, row, across)
            _across(ax, across, limits[j], is_last=i == len(rows) - 1)
            ax.tick_params(labelleft=j == 0)
        assert first is not None
        first.set_title(row.title, loc="left", fontweight="bold", fontsize=9)
        _up(first, row)
        _goal(first, row)
        _mark(first, moments, has_labels=i == 0 and len(moments) <= MOST_NAMED)
        plot_style.label_ends(ax, _ends(row), tall)


def _mark(ax: Axes, moments: Sequence[Moment], has_labels: bool) -> None:
    """Draw vertical lines at failures, pauses and restarts, with their texts if `has_labels`."""
    for moment in moments:
        colour = plot_style.LOST if moment.lost else plot_style.QUIET
        ax.axvline(moment.seconds, color=colour, lw=0.8, alpha=0.7, ls="-" if moment.lost else (0, (1, 2)))
        if has_labels:
            style: dict[str, Any] = {"color": colour, "fontsize": 6, "rotation": 90, "va": "top", "ha": "right"}
            ax.text(moment.seconds, 0.98, moment.text, transform=ax.get_xaxis_transform(), **style)


def _panel(ax: Axes, row: Row, across: Across) -> None:
    """Draw the curves of a row, and the final value of those that have no place on the axis.

    No final value of fewer samples than those of the others is drawn.
    """
    most = max((curve.samples[-1].samples for line in row.lines for curve in line.curves if curve.samples), default=0.0)
    for line in row.lines:
        alpha = 1.0 if len(line.curves) == 1 else 0.65
        for curve in line.curves:
            points = [(getattr(s, across.field), s.value) for s in curve.samples]
            points = [point for point in points if not across.log or point[0] > 0]
            if points:
                xs, ys = zip(*points, strict=True)
                ax.plot(xs, ys, color=line.colour, alpha=alpha, marker="o", markevery=[-1], ms=3)
            elif curve.samples and curve.samples[-1].samples >= FINAL * most:
                ax.axhline(curve.samples[-1].value, color=line.colour, lw=0.8, ls=(0, (1, 2)), alpha=alpha)


def _limits(rows: Sequence[Row], across: Across) -> tuple[float, float]:
    """Return the range of an axis, the same for all rows."""
    values = [getattr(s, across.field) for row in rows for line in row.lines for c in line.curves for s in c.samples]
    if across.log:
        values = [value for value in values if value > 0]
        return min(values) / 1.3, max(values) * 1.3
    return 0.0, max(values, default=1.0) * 1.02 or 1.0


def _across(ax: Axes, across: Across, limits: tuple[float, float], is_last: bool) -> None:
    if across.log:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=5))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(_tick))
    ax.set_xlim(*limits)
    ax.tick_params(labelbottom=is_last)
    if is_last:
        ax.set_xlabel(across.label)


def _tick(value: float, _place: object = None) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _up(ax: Axes, row: Row) -> None:
    """Set a log scale where the values span more than LOG_FROM, and ticks with plain numbers."""
    values = [sample.value for sample in row.samples()]
    if min(values) > 0 and max(values) / min(values) > LOG_FROM:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(numticks=5))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(_tick))


def _goal(ax: Axes, row: Row) -> None:
    if row.goal is None:
        return
    for panel in ax.get_shared_y_axes().get_siblings(ax):
        panel.axhline(row.goal, color=plot_style.QUIET, lw=0.8, ls=(0, (4, 3)), zorder=1)


def _ends(row: Row) -> list[tuple[float, str, str]]:
    ends = []
    for line in row.lines:
        final_values = [curve.samples[-1].value for curve in line.curves if curve.samples]
        if final_values:
            ends.append((sorted(final_values)[len(final_values) // 2], plot_style.short(line.label), line.colour))
    return ends


@dataclass(frozen=True)
class Bar:
    """Time breakdown of one worker, or the mean of many."""

    label: str
    split: dict[str, float]


@dataclass(frozen=True)
class Bars:
    """Bars of one run, under its title."""

    title: str
    colour: str
    bars: tuple[Bar, ...]


def bars_of(record: Record, title: str, colour: str, samples: int | None = None) -> Bars:
    """Return a bar for each worker or rank, or one with the mean of more than MOST_BARS.

    With a number of `samples`, bars are the mean time for that many of all workers, in place of the total time.
    """
    scale = samples / max(1, record["samples"]) if samples else 1.0
    splits = [{phase: scale * seconds for phase, seconds in split.items()} for split in record["time_breakdown"]]
    if len(splits) > MOST_BARS:
        mean = {phase: sum(split[phase] for split in splits) / len(splits) for phase in plot_style.PHASES}
        return Bars(title, colour, (Bar(f"mean of {len(splits)}", mean),))
    names = record.get("processes") or [process_name(worker) for worker in range(len(splits))]  # none in old records
    return Bars(title, colour, tuple(map(Bar, names, splits)))


BAR, GAP, KEY = 0.19, 0.12, 0.42
BESIDE = 2.6
NAMES = -BESIDE / (WIDTH - BESIDE - 0.2)
DARK = ("computing", "exchanging", "waiting")


TOTAL = "seconds since the start, evaluations included"


def time_breakdown(name: str, runs: Sequence[Bars], label: str = TOTAL) -> str:
    """Return the SVG of stacked bars in seconds: the phases sum to the total time."""
    height = KEY + sum(len(run.bars) * BAR + GAP for run in runs) + AXIS
    return plot_style.draw(name, WIDTH, height, partial(_paint_split, runs=runs, height=height, label=label))


def _paint_split(figure: Figure, runs: Sequence[Bars], height: float, label: str) -> None:
    ax = plot_style.axes(figure, BESIDE, KEY, WIDTH - BESIDE - 0.2, height - KEY - AXIS)
    longest_s = max((sum(bar.split.values()) for run in runs for bar in run.bars), default=0.0) or 1.0
    ax.set_xlim(0, longest_s)
    ax.set_ylim(height - KEY - AXIS, 0)
    top = 0.0
    for run in runs:
        ax.text(NAMES, top + BAR / 2, plot_style.short(run.title, 26), color=run.colour, **_left_of(ax))
        for bar in run.bars:
            _bar(ax, top, bar, longest_s)
            top += BAR
        top += GAP
    _key(ax, height)
    ax.set_yticks([])
    ax.grid(True, axis="x")
    ax.xaxis.set_major_formatter(FuncFormatter(_tick))
    ax.set_xlabel(label)


def _left_of(ax: Axes) -> dict[str, Any]:
    return {"transform": ax.get_yaxis_transform(), "va": "center", "linespacing": 1.05}


def _bar(ax: Axes, top: float, bar: Bar, longest_s: float) -> None:
    total, start_s, middle = sum(bar.split.values()), 0.0, top + BAR / 2
    ax.text(-0.008, middle, bar.label, color=plot_style.QUIET, fontsize=7, ha="right", **_left_of(ax))
    for phase, colour in plot_style.PHASES.items():
        length = bar.split[phase]
        ax.barh(middle, length, BAR * 0.86, start_s, color=colour, linewidth=0)
        if total and length > 0.045 * longest_s:
            percentage, text_colour = formatting.percent(length / total), "white" if phase in DARK else plot_style.TEXT
            ax.text(start_s + length / 2, middle, percentage, ha="center", va="center", fontsize=6.5, color=text_colour)
        start_s += length


def _key(ax: Axes, height: float) -> None:
    """Draw the legend: the phases in the order of the bars."""
    x, y = 0.0, 1 + 0.2 / (height - KEY - AXIS)
    size = (0.013, 0.11 / (height - KEY - AXIS))
    for phase, colour in plot_style.PHASES.items():
        ax.add_patch(Rectangle((x, y), *size, transform=ax.transAxes, color=colour, clip_on=False, lw=0))
        ax.text(x + 0.018, y + size[1] / 2, phase, transform=ax.transAxes, va="center")
        x += 0.04 + 0.0105 * len(phase)


def pair(name: str, rows: Sequence[Row], across: Across) -> str:
    """Return the SVG of two quantities side by side, each on its own scale, against the same axis."""
    tall = 1.9
    paint = partial(_paint_pair, rows=rows, across=across, tall=tall)
    return plot_style.draw(name, WIDTH, TITLE + tall + AXIS, paint)


def _paint_pair(figure: Figure, rows: Sequence[Row], across: Across, tall: float) -> None:
    wide = (WIDTH - LEFT - 2 * RIGHT - BETWEEN) / 2
    limits = _limits(rows, across)
    for j, row in enumerate(rows):
        ax = plot_style.axes(figure, LEFT + j * (wide + RIGHT + BETWEEN), TITLE, wide, tall)
        _panel(ax, row, across)
        _across(ax, across, limits, is_last=True)
        _up(ax, row)
        if ax.get_yscale() == "linear":
            ax.set_ylim(bottom=-0.02 * ax.get_ylim()[1])
        ax.set_title(row.title, loc="left", fontweight="bold", fontsize=9)
        plot_style.label_ends(ax, _ends(row), tall)


def scaling(name: str, groups: Sequence[Group], colours: Mapping[str, str], measure: Measure) -> str:
    """Return the SVG of the speed-up over a single process by the number of workers, with the linear speed-up."""
    tall = 2.2
    paint = partial(_paint_scaling, groups=groups, colours=colours, measure=measure, tall=tall)
    return plot_style.draw(name, WIDTH, TITLE + tall + AXIS, paint)


def _paint_scaling(
    figure: Figure, groups: Sequence[Group], colours: Mapping[str, str], measure: Measure, tall: float
) -> None:
    ax = plot_style.axes(figure, LEFT, TITLE, WIDTH * 0.45, tall)
    ends = []
    max_workers = max(group.workers for group in groups)
    for recipe in dict.fromkeys(group.recipe for group in groups if not group.single_process):
        points = [(g.workers, value) for g in groups if g.recipe == recipe and (value := g.median(measure)) is not None]
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            ax.plot(xs, ys, color=colours[recipe], marker="o", ms=3)
            ends.append((ys[-1], plot_style.short(recipe), colours[recipe]))
    ax.plot((1, max_workers), (1, max_workers), color=plot_style.QUIET, lw=0.8, ls=(0, (4, 3)))
    ends.append((float(max_workers), "linear", plot_style.QUIET))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(_tick))
    ax.set_xticks(sorted({1, *(group.workers for group in groups)}))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("workers")
    ax.set_title("Speed-up over a single process", loc="left", fontweight="bold", fontsize=9)
    plot_style.label_ends(ax, ends, tall)
