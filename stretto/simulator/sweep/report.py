"""The page of a sweep, made from sweep.json alone: where more workers stop to pay, what it cost, and every point."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stretto.report import formatting, plot_style
from stretto.report.html_report import Fact, Section, put, render
from stretto.report.metrics import main_metric
from stretto.report.plot_sections import Plot
from stretto.report.tables import Cell, Sheet, in_megabytes
from stretto.simulator.sweep import results
from stretto.simulator.sweep.grid import NUMBER, WORKERS
from stretto.simulator.sweep.results import Found

PAYS, FAST, COST, ALL = "Where do more workers stop paying?", "How long?", "At what cost?", "All points"
MOST_LINES, MOST_METRICS, MOST_SENTENCES, MOST_TICKS = 8, 2, 4, 12
LOG_FROM, WIDE = 20.0, 200.0
MEASURED = "Each point measured the time of a step for itself, beside others; --step-time makes them alike."


def write(folder: Path) -> Path:
    """Make report.html in a folder from its sweep.json, and return where it is."""
    found = results.read(folder)
    headline, *deck = sentences(found)
    text = render(
        kicker=_kicker(found),
        headline=headline,
        deck=deck,
        failures=[f"{one['folder']}: {one['failed']}" for one in found["points"] if one["failed"]],
        sections=_sections(found),
        colours=_colours(found, _across(found)),
        facts=_facts(found),
        notices=(),
    )
    return put(folder, text)


def _kicker(found: Found) -> str:
    asked = found["asked"]
    return f"{' '.join([asked['script'], *map(shlex.quote, asked['args'])])} · simulated · {_counted(found)}"


def _counted(found: Found) -> str:
    return formatting.plural(len(found["points"]), "point")


# In words


def sentences(found: Found) -> list[str]:
    """What was found: the fastest point, where more workers stop to pay, and what makes points hard to compare."""
    stops = [_stop_sentence(one, found) for one in found["stops_paying"]]
    asked = found["asked"]
    typed = asked["sweep"].get("step_time") or asked.get("step_times") or asked["options"].get("step_time", "auto")
    measured = typed == "auto"
    return [_fastest(found), *(stops if len(stops) <= MOST_SENTENCES else ()), *([MEASURED] if measured else [])]


def _fastest(found: Found) -> str:
    target, points = found["asked"]["target"], [one for one in found["points"] if not one["failed"]]
    by = results.TARGET if target else results.PACE
    best = min(points, key=lambda one: results.time(one, by) or float("inf"), default=None)
    if best is None or results.time(best, by) is None:
        return f"No point reached {target}." if target and points else "No point has been measured."
    where = f"{results.label(best)} on {formatting.plural(best['workers'], 'worker')}"
    gain = f", {formatting.times(best['speed_up'])} as fast as one" if best["speed_up_by"] == by else ""
    if target:
        return f"Fastest to {target}: {where}, {formatting.seconds(best['seconds_to_target'])}{gain}."
    return f"Most samples/s: {where}, {formatting.count(best[results.PACE])}{gain}."


def _stop_sentence(stop: Found, found: Found) -> str:
    at, name = _at(stop, found), stop["line"]
    several = at["speed_up"] and at["workers"] > 1
    gain = f"; there they are {formatting.times(at['speed_up'])} as fast as one" if several else ""
    workers = formatting.plural(at["workers"], "worker")
    pays = f"beyond {workers} more of them do not pay" if stop["workers"] else f"{workers} still pay"
    return f"{name}: {pays}{gain}."


def _at(stop: Found, found: Found) -> Found:
    """The point where more workers stop to pay, or the one with most of them."""
    line = results.lines(found["points"])[stop["line"]]
    return next(one for one in line if one["workers"] == (stop["workers"] or stop["most"]))


# In tables


@dataclass(frozen=True)
class _Column:
    """A heading and what stands under it for a point."""

    heading: str
    cell: Callable[[Found], str]


def _field(heading: str, field: str, write: Callable[[Any], str]) -> _Column:
    return _Column(heading, lambda one: write(one[field]))


def _megabytes(one: Found) -> float | None:
    sent = one["bytes_sent_per_worker"]
    return None if sent is None else sent / 1e6


def _stops_sheet(found: Found) -> tuple[Sheet, ...]:
    stops = found["stops_paying"]
    if not stops:
        return ()
    columns = ("run", "pays up to", "time there", "speed-up", "efficiency", "measured by")
    share = f"{results.PAYS:.0%}"
    note = f"Beyond so many workers no larger number is at least {share} faster than the best of those and fewer."
    return (Sheet(PAYS, note, columns, tuple(_stop_row(one, found) for one in stops)),)


def _stop_row(stop: Found, found: Found) -> tuple[Cell, ...]:
    by = "time to the target" if stop["by"] == results.TARGET else "samples/s"
    at = _at(stop, found)
    seconds = at["seconds_to_target"] if stop["by"] == results.TARGET else at["seconds"]
    texts = (formatting.seconds(seconds), formatting.times(at["speed_up"]), formatting.percent(at["efficiency"]))
    workers = formatting.plural(at["workers"], "worker") + ("" if stop["workers"] else ", still paying")
    return tuple(map(Cell, (stop["line"], workers, *texts, by)))


def _points_sheet(found: Found) -> Sheet:
    columns, points = _columns(found), found["points"]
    rows = [_row(one, columns) for line in results.lines(points).values() for one in line]
    note = "Seconds are virtual. Speed-up: over one worker, all else equal; efficiency: speed-up per worker. "
    mixed = " Where one worker never reached the target, speed-up is that of samples/s." if _target(found) else ""
    staleness = any(one["mean_staleness"] is not None for one in points)
    note += "MB: sent by each worker, mean; 10⁶ bytes. Waiting: share of the time of all workers." + mixed
    note += " Staleness: mean over updates." if staleness else ""
    return Sheet(ALL, note, ("run", "workers", *(column.heading for column in columns)), tuple(rows))


def _row(one: Found, columns: Sequence[_Column]) -> tuple[Cell, ...]:
    cells = [Cell("failed") if one["failed"] else Cell(column.cell(one)) for column in columns]
    return (Cell(results.label(one)), Cell(formatting.count(one["workers"])), *cells)


def _columns(found: Found) -> list[_Column]:
    points = found["points"]
    metrics = _metric_names(points)[:MOST_METRICS]
    stale = any(one["mean_staleness"] is not None for one in points)
    return [
        *([_Column("to the target", _to_target)] if _target(found) else []),
        _field("time", "seconds", formatting.seconds),
        _field("samples/s", results.PACE, formatting.count),
        _field("speed-up", "speed_up", formatting.times),
        _field("efficiency", "efficiency", formatting.percent),
        *(_Column(name, partial(_metric, name=name)) for name in metrics),
        _Column("MB sent", lambda one: in_megabytes(_megabytes(one))),
        _field("waiting", "waiting_share", formatting.percent),
        *([_field("staleness", "mean_staleness", formatting.figure)] if stale else []),
    ]


def _target(found: Found) -> str | None:
    target: str | None = found["asked"]["target"]
    return target


def _to_target(one: Found) -> str:
    seconds = one["seconds_to_target"]
    return "not reached" if seconds is None else formatting.seconds(seconds)


def _metric(one: Found, name: str) -> str:
    return formatting.figure(one["metrics"].get(name), 4)


def _metric_names(points: Sequence[Found]) -> list[str]:
    return list(dict.fromkeys(name for one in points for name in one["metrics"]))


# The small print


def _facts(found: Found) -> list[Fact]:
    asked, machine = found["asked"], found["machine"]
    options = {name: value for name, value in asked["options"].items() if name not in asked["sweep"]}
    swept = [f"{name}: {', '.join(values)}" for name, values in asked["sweep"].items()]
    return [
        Fact("Ask again", (shlex.join(found["command"]),), typed=True),
        Fact("Swept", tuple(swept)),
        *(Fact(name.replace("_", " ").capitalize(), (value,)) for name, value in options.items()),
        *(Fact(f"Step time, {of}", (text,)) for of, text in asked.get("step_times", {}).items()),
        Fact("Points", (f"{len(found['points'])}, each a process with one thread",)),
        Fact("Machine", (f"{machine['processor']}, {formatting.plural(machine['cores'], 'core')}",)),
        Fact("Versions", (", ".join(f"{name} {text}" for name, text in found["versions"].items()),)),
        Fact("Started", (found["started"],)),
    ]


# In plots

LEFT, RIGHT, TOP, TALL, BOTTOM = 0.62, 1.75, 0.32, 2.5, 0.45
Points = list[tuple[float, float]]
COLOURS = (*plot_style.RECIPES, "#7a5bb0", "#5f6b2d")
IDEAL = "as many times as workers"


@dataclass(frozen=True)
class _Panel:
    """One quantity against what varies: the points of each line, and those to mark."""

    title: str
    lines: Mapping[str, Points]
    log: bool
    marks: Mapping[str, float] = field(default_factory=dict)
    ideal: bool = False


def _sections(found: Found) -> list[Section]:
    across, sheet = _across(found), _stops_sheet(found)
    fast, cost = (_fast(found, across), _cost(found, across)) if across else ([], [])
    ring = " Ring: beyond it more workers do not pay." if any(panel.marks for panel in fast) else ""
    short = " A line has no point where the target was not reached." if _known(found) else ""
    sections = [
        Section(PAYS if sheet else FAST, sheet, _plot("fast", fast, found, across, f"Virtual time.{ring}{short}")),
        Section(COST, (), _plot("cost", cost, found, across, "At the end of each simulation.")),
        Section(ALL, (_points_sheet(found),), ()),
    ]
    return [one for one in sections if one.sheets or one.plots]


def _across(found: Found) -> str:
    """The axis to draw against: workers if they are swept, else the first of numbers; empty if there is none."""
    sweep = {name: values for name, values in found["asked"]["sweep"].items() if len(values) > 1 and name != "seed"}
    names = sorted(sweep, key=lambda name: name != WORKERS)
    return next((name for name in names if all(map(NUMBER.fullmatch, sweep[name]))), "")


def _drawn(found: Found, across: str) -> dict[str, list[Found]]:
    """The lines that are drawn: not more than can be told apart, evenly from all."""
    lines = results.lines(found["points"], across)
    names = list(lines)
    if len(names) > MOST_LINES:
        names = [names[place * (len(names) - 1) // (MOST_LINES - 1)] for place in range(MOST_LINES)]
    return {name: lines[name] for name in names}


def _colours(found: Found, across: str) -> dict[str, str]:
    """A colour for each line that is drawn."""
    return dict(zip(_drawn(found, across), COLOURS, strict=False))


def _fast(found: Found, across: str) -> list[_Panel]:
    """The time, and the speed-up where there is one."""
    known = _known(found)
    seconds = "seconds_to_target" if known else "seconds"
    title = f"Seconds to {_target(found)}" if known else "Seconds"
    marks = {one["line"]: one["workers"] for one in found["stops_paying"] if one["workers"]}
    panels = [(title, seconds, False), *([("Speed-up over one worker", "speed_up", True)] if across == WORKERS else [])]
    drawn = [
        _Panel(title, _values(found, across, _read(name)), True, marks if across == WORKERS else {}, ideal)
        for title, name, ideal in panels
    ]
    return [panel for panel in drawn if panel.lines]


def _known(found: Found) -> bool:
    """Whether there is a target that any point reached."""
    return any(one["seconds_to_target"] is not None for one in found["points"])


def _cost(found: Found, across: str) -> list[_Panel]:
    """Bytes, the metric that says most, and staleness where there is any."""
    metric = main_metric(_metric_names(found["points"]))
    wanted: list[tuple[str, Callable[[Found], Any]]] = [
        ("MB sent by each worker", _megabytes),
        ("Mean staleness", _read("mean_staleness")),
        *([(metric, lambda one: one["metrics"].get(metric))] if metric else []),
    ]
    drawn = [(title, _values(found, across, value)) for title, value in wanted]
    return [_Panel(title, lines, _spans(lines)) for title, lines in drawn if lines]


def _read(name: str) -> Callable[[Found], Any]:
    return lambda one: one[name]


def _values(found: Found, across: str, value: Callable[[Found], Any]) -> dict[str, Points]:
    """The points of each line that has any."""
    lines = {
        name: [(results.place(one, across), float(y)) for one in line if (y := value(one)) is not None]
        for name, line in _drawn(found, across).items()
    }
    return {name: points for name, points in lines.items() if points}


def _spans(lines: Mapping[str, Points]) -> bool:
    """Whether the values need a log scale; what is 0 is left out of one."""
    values = [y for points in lines.values() for _, y in points if y]
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)


def _plot(name: str, panels: Sequence[_Panel], found: Found, across: str, caption: str) -> tuple[Plot, ...]:
    if not panels:
        return ()
    drawn, whole = len(_drawn(found, across)), len(results.lines(found["points"], across))
    rest = f" {drawn} of {whole} lines are drawn; the table has all." if drawn < whole else ""
    paint = partial(_paint, panels=panels, across=across, colours=_colours(found, across))
    return (Plot(name, Markup(plot_style.draw(name, plot_style.WIDTH, TOP + TALL + BOTTOM, paint)), caption + rest),)


def _paint(figure: Figure, panels: Sequence[_Panel], across: str, colours: Mapping[str, str]) -> None:
    wide = (plot_style.WIDTH - RIGHT) / max(2, len(panels)) - LEFT
    xs = sorted({x for panel in panels for points in panel.lines.values() for x, _ in points})
    for at, panel in enumerate(panels):
        ax = plot_style.axes(figure, LEFT + at * (wide + LEFT), TOP, wide, TALL)
        ends = _lines(ax, panel, colours)
        _scale_x(ax, xs, across, MOST_TICKS // max(1, len(panels) - 1))
        _scale_y(ax, panel.log)
        ax.set_title(panel.title, loc="left", fontweight="bold", fontsize=9)
        if at == len(panels) - 1:
            ax.autoscale_view()
            plot_style.label_ends(ax, [*ends, *_unended(ax, ends, colours)], TALL)


def _lines(ax: Axes, panel: _Panel, colours: Mapping[str, str]) -> list[tuple[float, str, str]]:
    """Draw a panel's lines; where each ends, what it is called, and its colour."""
    ends = []
    for name, colour in colours.items():
        points = [(x, y) for x, y in panel.lines.get(name, ()) if y > 0 or not panel.log]
        if points:
            ax.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3)
            ends.append((points[-1][1], plot_style.short(name), colour))
        ring = [(x, y) for x, y in points if x == panel.marks.get(name)]
        if ring:
            ax.plot(*ring[0], color=colour, marker="o", ms=9, mfc="none", mew=1.2)
    counts = [x for points in panel.lines.values() for x, _ in points]
    if panel.ideal:
        ax.plot(*[(min(counts), max(counts))] * 2, color=plot_style.QUIET, lw=0.8, ls=(0, (4, 3)), zorder=1)
        ends.append((max(counts), IDEAL, plot_style.QUIET))
    return ends


def _unended(
    ax: Axes, ends: Sequence[tuple[float, str, str]], colours: Mapping[str, str]
) -> list[tuple[float, str, str]]:
    """The names of the lines that only other panels have: at the bottom."""
    named = {text for _, text, _ in ends}
    bottom = ax.get_ylim()[0]
    return [
        (bottom, plot_style.short(name), colour)
        for name, colour in colours.items()
        if plot_style.short(name) not in named
    ]


def _scale_x(ax: Axes, xs: Sequence[float], across: str, most: int) -> None:
    if across == WORKERS or (xs[0] > 0 and xs[-1] > LOG_FROM * xs[0]):
        ax.set_xscale("log")
    every = -(-len(xs) // most)
    ax.xaxis.set_major_locator(FixedLocator(list(xs[::every])))
    ax.xaxis.set_major_formatter(FuncFormatter(_tick))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(across)


def _scale_y(ax: Axes, log: bool) -> None:
    if not log:
        ax.yaxis.set_major_locator(MaxNLocator(5))
    else:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > WIDE * low else (1.0, 2.0, 5.0), numticks=12))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _place: object = None) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:g}"
