"""HTML report of a sweep, from sweep.json only: where more workers stop paying, costs, and all points."""

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
from stretto.report.equal_samples import value_at
from stretto.report.html_report import Fact, Section, put, render
from stretto.report.metrics import main_metric
from stretto.report.plot_sections import Plot
from stretto.report.tables import Cell, Sheet, in_megabytes
from stretto.simulator.sweep import results
from stretto.simulator.sweep.grid import NUMBER, WORKERS
from stretto.simulator.sweep.results import Result

PAYS, FAST, COST, ALL = "Where do more workers stop paying?", "How long?", "At what cost?", "All points"
MOST_LINES, MOST_METRICS, MOST_SENTENCES, MOST_TICKS = 8, 2, 4, 12
LOG_FROM, WIDE = 20.0, 200.0
MOST_SAMPLES = "Most samples/s"
UNMEASURED = (
    "Quality was not compared: there are no evaluations near equal samples. "
    "Give stretto.distribute `evaluate=` and `evaluate_every=`, or the sweep a --target."
)
MEASURED = "Each point measured its own step time while others ran; --step-time makes points comparable."


def write(folder: Path) -> Path:
    """Write report.html into a folder from its sweep.json, and return its path."""
    sweep = results.read(folder)
    headline, *deck = sentences(sweep)
    text = render(
        kicker=_kicker(sweep),
        headline=headline,
        deck=deck,
        failures=[f"{point['folder']}: {point['failed']}" for point in sweep["points"] if point["failed"]],
        sections=_sections(sweep),
        colours=_colours(sweep, _across(sweep)),
        facts=_facts(sweep),
        warnings=(),
    )
    return put(folder, text)


def _kicker(sweep: Result) -> str:
    definition = sweep["asked"]
    return f"{' '.join([definition['script'], *map(shlex.quote, definition['args'])])} · simulated · {_counted(sweep)}"


def _counted(sweep: Result) -> str:
    return formatting.plural(len(sweep["points"]), "point")


# Sentences


def sentences(sweep: Result) -> list[str]:
    """Return sentences: the fastest point, where more workers stop paying, and limits of comparability."""
    stops = [_stop_sentence(limit, sweep) for limit in sweep["stops_paying"]]
    definition = sweep["asked"]
    typed = (
        definition["sweep"].get("step_time")
        or definition.get("step_times")
        or definition["options"].get("step_time", "auto")
    )
    fastest, stop_sentences = _fastest(sweep), stops if len(stops) <= MOST_SENTENCES else ()
    unmeasured = [UNMEASURED] if fastest.startswith(f"{MOST_SAMPLES}:") else []
    return [fastest, *unmeasured, *stop_sentences, *([MEASURED] if typed == "auto" else [])]


def _fastest(sweep: Result) -> str:
    """Return the sentence on the point with the shortest time to the target, or the most samples/s at equal quality."""
    target, points = sweep["asked"]["target"], [point for point in sweep["points"] if not point["failed"]]
    measure = results.TARGET if target else results.PACE
    is_good = results.as_good(points) if not target else []
    candidates = [point for point, good in zip(points, is_good, strict=True) if good] if any(is_good) else points
    best = min(candidates, key=lambda point: results.time(point, measure) or float("inf"), default=None)
    if best is None or results.time(best, measure) is None:
        return f"No point reached {target}." if target and points else "No point has been measured."
    configuration = f"{results.label(best)} on {formatting.plural(best['workers'], 'worker')}"
    several = best["speed_up_by"] == measure and best["workers"] > 1
    gain = f", {formatting.times(best['speed_up'])} as fast as one" if several else ""
    if target:
        return f"Fastest to {target}: {configuration}, {formatting.seconds(best['seconds_to_target'])}{gain}."
    what = f"{MOST_SAMPLES} at equal quality{_quality(sweep)}:" if any(is_good) else f"{MOST_SAMPLES}:"
    return f"{what} {configuration}, {formatting.count(best[results.PACE])}{gain}."


def _quality(sweep: Result) -> str:
    """Return the metric and the number of samples by which points are as good, in brackets."""
    return f" ({main_metric(results.metric_names(sweep['points']))} after {_least(sweep)} samples)"


def _least(sweep: Result) -> str:
    return formatting.count(results.least_samples(sweep["points"]))


def _stop_sentence(limit: Result, sweep: Result) -> str:
    point, name = _limit_point(limit, sweep), limit["line"]
    several = point["speed_up"] and point["workers"] > 1
    by = "to the target" if point["speed_up_by"] == results.TARGET else "by samples/s"
    gain = f"; there they are {formatting.times(point['speed_up'])} as fast as one {by}" if several else ""
    workers = formatting.plural(point["workers"], "worker")
    pays = f"beyond {workers} more of them do not pay" if limit["workers"] else f"{workers} still pay"
    return f"{name}: {pays}{gain}."


def _limit_point(limit: Result, sweep: Result) -> Result:
    """Return the point at which more workers stop paying, or the one with the most workers."""
    line = results.lines(sweep["points"])[limit["line"]]
    return next(point for point in line if point["workers"] == (limit["workers"] or limit["most"]))


# Tables


@dataclass(frozen=True)
class _Column:
    """A column: its heading, and the function from a point to its cell."""

    heading: str
    cell: Callable[[Result], str]


def _field(heading: str, field: str, write: Callable[[Any], str]) -> _Column:
    return _Column(heading, lambda point: write(point[field]))


def _megabytes(point: Result) -> float | None:
    sent = point["bytes_sent_per_worker"]
    return None if sent is None else sent / 1e6


def _stops_sheet(sweep: Result) -> tuple[Sheet, ...]:
    stops = sweep["stops_paying"]
    if not stops:
        return ()
    columns = ("run", "pays up to", "there", "speed-up", "efficiency", "measured by")
    share = f"{results.PAYS:.0%}"
    note = f"Beyond this number of workers, no larger number is at least {share} faster than the best up to it"
    note += ", among those of equal quality where it is known."
    return (Sheet(PAYS, note, columns, tuple(_stop_row(limit, sweep) for limit in stops)),)


def _stop_row(limit: Result, sweep: Result) -> tuple[Cell, ...]:
    point, is_by_target = _limit_point(limit, sweep), limit["by"] == results.TARGET
    measured = any(other.get("as_good") is not None for other in results.lines(sweep["points"])[limit["line"]])
    measure = "time to the target" if is_by_target else f"samples/s{' at equal quality' if measured else ''}"
    seconds, pace = formatting.seconds(point["seconds_to_target"]), f"{formatting.count(point[results.PACE])} samples/s"
    texts = (
        seconds if is_by_target else pace,
        formatting.times(point["speed_up"]),
        formatting.percent(point["efficiency"]),
    )
    workers = formatting.plural(point["workers"], "worker") + ("" if limit["workers"] else ", still paying")
    return tuple(map(Cell, (limit["line"], workers, *texts, measure)))


def _points_sheet(sweep: Result) -> Sheet:
    columns, points = _columns(sweep), sweep["points"]
    rows = [_row(point, columns) for line in results.lines(points).values() for point in line]
    note = "Seconds are virtual. Speed-up: over one worker, all else equal; efficiency: speed-up per worker. "
    mixed = " Where one worker never reached the target, speed-up is that of samples/s." if _target(sweep) else ""
    staleness = any(point["mean_staleness"] is not None for point in points)
    note += "MB: sent by each worker, mean; 10⁶ bytes. Waiting: share of the time of all workers." + mixed
    note += " Staleness: mean over updates." if staleness else ""
    return Sheet(ALL, note, ("run", "workers", *(column.heading for column in columns)), tuple(rows))


def _row(point: Result, columns: Sequence[_Column]) -> tuple[Cell, ...]:
    cells = [Cell("failed") if point["failed"] else Cell(column.cell(point)) for column in columns]
    return (Cell(results.label(point)), Cell(formatting.count(point["workers"])), *cells)


def _columns(sweep: Result) -> list[_Column]:
    points = sweep["points"]
    metrics = results.metric_names(points)[:MOST_METRICS]
    stale = any(point["mean_staleness"] is not None for point in points)
    return [
        *([_Column("to the target", _to_target)] if _target(sweep) else []),
        _field("time", "seconds", formatting.seconds)
        if results.all_same(points)
        else _field("samples", "samples", formatting.count),
        _field("samples/s", results.PACE, formatting.count),
        _field("speed-up", "speed_up", formatting.times),
        _field("efficiency", "efficiency", formatting.percent),
        *(_metric(name, points) for name in metrics),
        _Column("MB sent", lambda point: in_megabytes(_megabytes(point))),
        _field("waiting", "waiting_share", formatting.percent),
        *([_field("staleness", "mean_staleness", formatting.figure)] if stale else []),
    ]


def _target(sweep: Result) -> str | None:
    target: str | None = sweep["asked"]["target"]
    return target


def _to_target(point: Result) -> str:
    seconds = point["seconds_to_target"]
    return "not reached" if seconds is None else formatting.seconds(seconds)


def _metric(name: str, points: Sequence[Result]) -> _Column:
    """Return the column of a metric after equal numbers of samples: at the end, if all points trained on as many."""
    if results.all_same(points):
        return _Column(name, lambda point: formatting.figure(point["metrics"].get(name), 4))
    samples = results.least_samples(points) or 0
    heading = f"{name} after {formatting.count(samples)} samples"
    return _Column(heading, lambda point: formatting.figure(value_at(dict(point), name, samples), 4))


# Facts


def _facts(sweep: Result) -> list[Fact]:
    definition, machine = sweep["asked"], sweep["machine"]
    options = {name: value for name, value in definition["options"].items() if name not in definition["sweep"]}
    swept = [f"{name}: {', '.join(values)}" for name, values in definition["sweep"].items()]
    return [
        Fact("Reproduce", (shlex.join(sweep["command"]),), typed=True),
        Fact("Swept", tuple(swept)),
        *(Fact(name.replace("_", " ").capitalize(), (value,)) for name, value in options.items()),
        *(Fact(f"Step time, {name}", (text,)) for name, text in definition.get("step_times", {}).items()),
        Fact("Points", (f"{len(sweep['points'])}, each a process with one thread",)),
        Fact("Machine", (f"{machine['processor']}, {formatting.plural(machine['cores'], 'core')}",)),
        Fact("Versions", (", ".join(f"{name} {text}" for name, text in sweep["versions"].items()),)),
        Fact("Started", (sweep["started"],)),
    ]


# Plots

LEFT, RIGHT, TOP, TALL, BOTTOM = 0.62, 1.75, 0.32, 2.5, 0.45
Points = list[tuple[float, float]]
COLOURS = (*plot_style.RECIPES, "#7a5bb0", "#5f6b2d")
IDEAL = "as many times as workers"


@dataclass(frozen=True)
class _Panel:
    """A plot of one quantity: the points of each line, and the points to mark."""

    title: str
    lines: Mapping[str, Points]
    log: bool
    marks: Mapping[str, float] = field(default_factory=dict)
    ideal: bool = False


def _sections(sweep: Result) -> list[Section]:
    across, sheet = _across(sweep), _stops_sheet(sweep)
    fast, cost = (_fast(sweep, across), _cost(sweep, across)) if across else ([], [])
    ring = " Ring: beyond it more workers do not pay." if any(panel.marks for panel in fast) else ""
    short = " A line has no point where the target was not reached." if _known(sweep) else ""
    sections = [
        Section(PAYS if sheet else FAST, sheet, _plot("fast", fast, sweep, across, f"Virtual time.{ring}{short}")),
        Section(
            COST, (), _plot("cost", cost, sweep, across, "At the end of each simulation, unless samples are named.")
        ),
        Section(ALL, (_points_sheet(sweep),), ()),
    ]
    return [section for section in sections if section.sheets or section.plots]


def _across(sweep: Result) -> str:
    """Return the axis of the x values: workers if swept, else the first numeric axis, else an empty string."""
    sweep = {name: values for name, values in sweep["asked"]["sweep"].items() if len(values) > 1 and name != "seed"}
    names = sorted(sweep, key=lambda name: name != WORKERS)
    return next((name for name in names if all(map(NUMBER.fullmatch, sweep[name]))), "")


def _drawn(sweep: Result, across: str) -> dict[str, list[Result]]:
    """Return the lines to draw: at most MOST_LINES, evenly spaced among all."""
    lines = results.lines(sweep["points"], across)
    names = list(lines)
    if len(names) > MOST_LINES:
        names = [names[index * (len(names) - 1) // (MOST_LINES - 1)] for index in range(MOST_LINES)]
    return {name: lines[name] for name in names}


def _colours(sweep: Result, across: str) -> dict[str, str]:
    """Return the colour of each drawn line."""
    return dict(zip(_drawn(sweep, across), COLOURS, strict=False))


def _fast(sweep: Result, across: str) -> list[_Panel]:
    """Return the panels of time, and of speed-up if workers are swept."""
    has_times = _known(sweep)
    marks = {limit["line"]: limit["workers"] for limit in sweep["stops_paying"] if limit["workers"]}
    times: tuple[str, Callable[[Result], Any]] = ("Seconds", _read("seconds"))
    if has_times:
        times = (f"Seconds to {_target(sweep)}", _read("seconds_to_target"))
    elif not results.all_same(sweep["points"]):
        times = ("Seconds for 1,000 samples", lambda p: 1000 / p[results.PACE] if p[results.PACE] else None)
    speed_up = ("Speed-up over one worker", _read("speed_up"), True)
    drawn = [
        _Panel(title, _values(sweep, across, value), True, marks if across == WORKERS else {}, is_ideal)
        for title, value, is_ideal in ((*times, False), *((speed_up,) if across == WORKERS else ()))
    ]
    return [panel for panel in drawn if panel.lines]


def _known(sweep: Result) -> bool:
    """True if any point reached the target."""
    return any(point["seconds_to_target"] is not None for point in sweep["points"])


def _cost(sweep: Result, across: str) -> list[_Panel]:
    """Return the panels of bytes, staleness and the main metric, as far as there are values."""
    metric, samples = main_metric(results.metric_names(sweep["points"])), results.least_samples(sweep["points"]) or 0
    title = metric or ""
    if not results.all_same(sweep["points"]):
        title += f" after {formatting.count(samples)} samples"
    measures: list[tuple[str, Callable[[Result], Any]]] = [
        ("MB sent by each worker", _megabytes),
        ("Mean staleness", _read("mean_staleness")),
        *([(title, lambda point: value_at(dict(point), metric or "", samples))] if metric else []),
    ]
    drawn = [(title, _values(sweep, across, value)) for title, value in measures]
    return [_Panel(title, lines, _spans(lines)) for title, lines in drawn if lines]


def _read(name: str) -> Callable[[Result], Any]:
    return lambda point: point[name]


def _values(sweep: Result, across: str, value: Callable[[Result], Any]) -> dict[str, Points]:
    """Return the points of each line that has values."""
    lines = {
        name: [(results.place(point, across), float(y)) for point in line if (y := value(point)) is not None]
        for name, line in _drawn(sweep, across).items()
    }
    return {name: points for name, points in lines.items() if points}


def _spans(lines: Mapping[str, Points]) -> bool:
    """True if the values need a log scale, which leaves out zeros."""
    values = [y for points in lines.values() for _, y in points if y]
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)


def _plot(name: str, panels: Sequence[_Panel], sweep: Result, across: str, caption: str) -> tuple[Plot, ...]:
    if not panels:
        return ()
    drawn, line_count = len(_drawn(sweep, across)), len(results.lines(sweep["points"], across))
    note = f" {drawn} of {line_count} lines are drawn; the table lists all." if drawn < line_count else ""
    paint = partial(_paint, panels=panels, across=across, colours=_colours(sweep, across))
    return (Plot(name, Markup(plot_style.draw(name, plot_style.WIDTH, TOP + TALL + BOTTOM, paint)), caption + note),)


def _paint(figure: Figure, panels: Sequence[_Panel], across: str, colours: Mapping[str, str]) -> None:
    wide = (plot_style.WIDTH - RIGHT) / max(2, len(panels)) - LEFT
    xs = sorted({x for panel in panels for points in panel.lines.values() for x, _ in points})
    for index, panel in enumerate(panels):
        ax = plot_style.axes(figure, LEFT + index * (wide + LEFT), TOP, wide, TALL)
        ends = _lines(ax, panel, colours)
        _scale_x(ax, xs, across, MOST_TICKS // max(1, len(panels) - 1))
        _scale_y(ax, panel.log)
        ax.set_title(panel.title, loc="left", fontweight="bold", fontsize=9)
        if index == len(panels) - 1:
            ax.autoscale_view()
            plot_style.label_ends(ax, [*ends, *_unended(ax, ends, colours)], TALL)


def _lines(ax: Axes, panel: _Panel, colours: Mapping[str, str]) -> list[tuple[float, str, str]]:
    """Draw a panel's lines; return the last value, name and colour of each."""
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
    """Return labels, at the bottom, of the lines that only other panels have."""
    labelled = {text for _, text, _ in ends}
    bottom = ax.get_ylim()[0]
    return [
        (bottom, plot_style.short(name), colour)
        for name, colour in colours.items()
        if plot_style.short(name) not in labelled
    ]


def _scale_x(ax: Axes, xs: Sequence[float], across: str, max_ticks: int) -> None:
    if across == WORKERS or (xs[0] > 0 and xs[-1] > LOG_FROM * xs[0]):
        ax.set_xscale("log")
    tick_step = -(-len(xs) // max_ticks)
    ax.xaxis.set_major_locator(FixedLocator(list(xs[::tick_step])))
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
