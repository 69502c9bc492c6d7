"""Plots of a page, with their headings and captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from stretto.report import formatting, plot_style, plots, time_series
from stretto.report.aggregation import Baselines, Group, at, grouped, worker_counts
from stretto.report.equal_samples import all_same
from stretto.report.plots import SAMPLES, Line, Row
from stretto.report.run_log import History
from stretto.report.run_record import Record
from stretto.report.tables import FAST, STATE, TIME, metric_names, speed_up
from stretto.report.target import Target
from stretto.report.time_series import Curve, Moment, Sample

LEARN = "Loss and metrics"
MOST_METRICS = 3
PER_SAMPLES = 1000
"""Number of samples whose time is shown for runs that trained on different numbers."""

Histories = Mapping[str, History]
"""Logs of the runs that have one, by the name of their folder."""


@dataclass(frozen=True)
class Plot:
    """Plot with its section heading and its caption."""

    heading: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Album:
    """Data of all plots of one page."""

    records: Sequence[Record]
    histories: Histories
    target: Target | None = None
    moments: tuple[Moment, ...] = ()
    """Failures, pauses and restarts of a single run."""

    def groups(self) -> list[Group]:
        """Return the groups of all records, failed runs included."""
        return grouped(self.records)

    def history(self, record: Record) -> History | None:
        """Return the log of a record's run, or None if it has none."""
        return self.histories.get(Path(record["folder"]).name)


def pictures(album: Album) -> list[Plot]:
    """Return all plots of a page; one set of curves for each number of workers."""
    groups = album.groups()
    counts = worker_counts(groups) or [1]
    colours = plot_style.colours(groups)
    several = len(counts) > 1
    plots = [_curves(album, at(groups, n), colours, n, several) for n in counts]
    plots += [_scaling(groups, colours, Baselines(album.records))] if several else []
    plots += [_split(album, groups, colours)]
    plots += [_distance(at(groups, n), colours, n, several) for n in counts]
    return [plot for plot in plots if plot]


def _with_workers(caption: str, workers: int, several: bool) -> str:
    return f"{formatting.plural(workers, 'worker')}. {caption}" if several else caption


def _lines(groups: Sequence[Group], colours: Mapping[str, str], curve: Callable[[Record], Curve]) -> tuple[Line, ...]:
    lines = (Line(g.label, colours[g.recipe], tuple(curve(record) for record in g.asked)) for g in groups)
    return tuple(line for line in lines if any(curve.samples for curve in line.curves))


# Loss and metrics


def _curves(
    album: Album, groups: Sequence[Group], colours: Mapping[str, str], workers: int, several: bool
) -> Plot | None:
    losses = Row("Training loss", _lines(groups, colours, lambda record: _loss(album, record)))
    names = metric_names([record for group in groups for record in group.asked])[:MOST_METRICS]
    metrics = [_metric_row(album, groups, colours, name) for name in names]
    rows = [row for row in (losses, *metrics) if row.lines]
    if not rows:
        return None
    svg = Markup(plots.curves(f"curves{workers}", rows, album.moments))
    return Plot(LEARN, svg, _with_workers(_curves_caption(album, groups, losses), workers, several))


def _loss(album: Album, record: Record) -> Curve:
    history = album.history(record)
    return time_series.loss(history) if history else Curve(())


def _metric_row(album: Album, groups: Sequence[Group], colours: Mapping[str, str], name: str) -> Row:
    def curve(record: Record) -> Curve:
        history = album.history(record)
        return time_series.metric(history, name) if history else Curve(())

    target = album.target
    if target is None or target.metric != name:
        return Row(name, _lines(groups, colours, curve))
    title = f"{name} (dashed: the target, {target.number:g})"
    return Row(title, _lines(groups, colours, curve), target.number)


def _curves_caption(album: Album, groups: Sequence[Group], losses: Row) -> str:
    texts = ["Training time excludes evaluations."]
    steps = max((curve.steps for line in losses.lines for curve in line.curves), default=0)
    if steps:
        smoothed = f", smoothed: each point is the mean of up to {steps} steps" if steps > 1 else ""
        texts.append(f"Loss: mean over workers{smoothed}.")
        if any(record.get("staleness") for record in _records(groups)):
            texts.append("Asynchronous workers: mean of values logged at about the same time.")
    if any(len(group.asked) > 1 for group in groups):
        texts.append("A line for each seed.")
    if any(group.single_process for group in groups) and not all(group.single_process for group in groups):
        equal = "" if all_same(_records(groups)) else ", if it trained on as many samples as the others"
        texts.append(f"Dotted: final value of a run without communication{equal}.")
    if album.moments:
        texts.append("Vertical lines: failures and pauses (red), restarted processes (grey).")
    omitted = sum(time_series.not_finite(history) for record in _records(groups) if (history := album.history(record)))
    if omitted:
        texts.append(f"{omitted} logged or evaluated values were not finite and are omitted.")
    return " ".join(texts)


def _records(groups: Sequence[Group]) -> list[Record]:
    return [record for group in groups for record in group.asked]


# Speed, time, distance


def _scaling(groups: Sequence[Group], colours: Mapping[str, str], baselines: Baselines) -> Plot:
    svg = plots.scaling("scaling", groups, colours, lambda record: speed_up(record, baselines))
    caption = "Samples per second over those of a single process, median over seeds. Dashed: linear speed-up."
    return Plot(FAST, Markup(svg), caption)


def _split(album: Album, groups: Sequence[Group], colours: Mapping[str, str]) -> Plot | None:
    several = len(worker_counts(groups)) > 1
    measured = [group for group in groups if group.asked[0]["time_breakdown"]]
    firsts = [group.asked[0] for group in measured]
    if not firsts:
        return None
    samples = None if all_same(firsts) else PER_SAMPLES
    runs = [
        plots.bars_of(group.asked[0], _bar_title(group, several), colours[group.recipe], samples) for group in measured
    ]
    seed = f" Seed {firsts[0]['seed']}." if len({record["seed"] for record in album.records}) > 1 else ""
    if samples is None:
        return Plot(TIME, Markup(plots.time_breakdown("split", runs)), f"Each bar is the total time of a worker.{seed}")
    label = f"seconds for {formatting.count(samples)} samples of all workers, evaluations included"
    caption = f"Each bar is the time of a worker; the runs trained on different numbers of samples.{seed}"
    return Plot(TIME, Markup(plots.time_breakdown("split", runs, label)), caption)


def _bar_title(group: Group, several: bool) -> str:
    return f"{group.label} ×{group.workers}" if several and not group.single_process else group.label


def _distance(groups: Sequence[Group], colours: Mapping[str, str], workers: int, several: bool) -> Plot | None:
    rows = [
        Row("Relative distance of the parameters", _lines(groups, colours, _apart("parameter_distance"))),
        Row("Share of predictions that differ", _lines(groups, colours, _apart("prediction_disagreement"))),
    ]
    rows = [row for row in rows if row.lines]
    if not rows:
        return None
    caption = "Against a single process with the global batch, after the same number of samples."
    svg = Markup(plots.pair(f"distance{workers}", rows, SAMPLES))
    return Plot(STATE, svg, _with_workers(caption, workers, several))


def _apart(field: str) -> Callable[[Record], Curve]:
    def curve(record: Record) -> Curve:
        distances = [distance for distance in record.get("distances") or [] if distance.get(field) is not None]
        return Curve(
            tuple(
                Sample(distance.get("seconds") or 0.0, distance["samples"], 0.0, distance[field])
                for distance in distances
            )
        )

    return curve
