"""Staleness section of the page of a run: a table row and a histogram for each worker, and curves over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from stretto.report import formatting, plot_style, plots, staleness, time_series
from stretto.report.aggregation import grouped
from stretto.report.histograms import Bins, Panel, bins, multiples
from stretto.report.plot_sections import Plot
from stretto.report.plots import SECONDS, Line, Row
from stretto.report.run_log import History
from stretto.report.run_record import Record
from stretto.report.staleness import StalenessCounts, merged
from stretto.report.tables import STALE, Cell, Sheet
from stretto.report.time_series import Curve

MOST_PANELS = 16
MOST_ROWS = 32
NOTE = "Staleness of an update: versions between the parameters that it was computed on and its own version."
BLOCKED = " Blocked by bound: time blocked by the staleness bound, waiting for slower workers."
MARKED = "Share of a worker's updates by staleness. Dashed: the mean."
GROWING = " Bins grow to the right; each starts at the value below its left edge."
SHARED = " Each bin starts at the value below its left edge."
OVER_TIME = (
    "Over all workers. Updates in one event are taken to be evenly spread over the time since the previous event."
)


def summary(record: Record) -> str:
    """Return staleness and the time blocked by the bound in one line; empty for a run without staleness."""
    if not record["staleness"]:
        return ""
    stale = f"staleness {formatting.figure(record['staleness']['mean'])} mean, {record['staleness']['max']} max"
    if record["blocked_seconds"] is None:
        return stale
    blocked = formatting.seconds(sum(record["blocked_seconds"]))
    share = formatting.percent(staleness.blocked_share(record))
    return f"{stale}, {blocked} blocked by the staleness bound ({share} of the time)"


def sheet(record: Record, history: History) -> list[Sheet]:
    """Return a table with a row for each worker and one for all, or nothing for a run without staleness."""
    if not record["staleness"]:
        return []
    counts, is_bounded = staleness.by_worker(history), record["blocked_seconds"] is not None
    rows = [_row(f"worker {worker}", record, counts[worker], worker, is_bounded) for worker in _shown(counts)]
    total = _all(record, merged(counts), is_bounded)
    columns = ("worker", "samples trained", "updates applied", "mean staleness", "largest staleness")
    blocked = ("blocked by bound", "share of its time") if is_bounded else ()
    return [Sheet(STALE, _note(counts, is_bounded), (*columns, *blocked), (*rows, total))]


def _note(counts: Sequence[StalenessCounts], is_bounded: bool) -> str:
    omitted = f" The {MOST_ROWS} of {len(counts)} workers with the largest mean." if len(counts) > MOST_ROWS else ""
    return NOTE + (BLOCKED if is_bounded else "") + omitted


def _shown(counts: Sequence[StalenessCounts]) -> list[int]:
    """Return all workers, or of many the MOST_ROWS with the largest means."""
    by_mean = sorted(range(len(counts)), key=lambda worker: -(counts[worker].mean or 0.0))
    return sorted(by_mean[:MOST_ROWS])


def _row(name: str, record: Record, of_worker: StalenessCounts, worker: int, is_bounded: bool) -> tuple[Cell, ...]:
    blocked = (record["blocked_seconds"][worker], staleness.blocked_shares(record)[worker]) if is_bounded else None
    return _cells(name, record["samples_by_worker"][worker], of_worker, blocked)


def _all(record: Record, of_worker: StalenessCounts, is_bounded: bool) -> tuple[Cell, ...]:
    blocked = (sum(record["blocked_seconds"]), staleness.blocked_share(record)) if is_bounded else None
    return _cells("all", sum(record["samples_by_worker"]), of_worker, blocked)


def _cells(
    name: str, samples: int, of_worker: StalenessCounts, blocked: tuple[float, float | None] | None
) -> tuple[Cell, ...]:
    counts = (name, formatting.count(samples), formatting.count(of_worker.updates))
    bounded = (formatting.seconds(blocked[0]), formatting.percent(blocked[1])) if blocked else ()
    return tuple(map(Cell, (*counts, formatting.figure(of_worker.mean), formatting.count(of_worker.max), *bounded)))


def pictures(record: Record, history: History) -> list[Plot]:
    """Return the histograms and the curves, or nothing for a run without staleness."""
    if not record["staleness"]:
        return []
    colour = plot_style.colours(grouped([record]))[record["recipe"]]
    return [_histograms(staleness.by_worker(history), colour), _over_time(history, colour)]


def _histograms(counts: Sequence[StalenessCounts], colour: str) -> Plot:
    total = merged(counts)
    shared = bins(total.counts)
    is_summed = len(counts) > MOST_PANELS
    of_workers = (
        [(f"all {len(counts)} workers", total)] if is_summed else [(f"worker {i}", t) for i, t in enumerate(counts)]
    )
    panels = [Panel(name, _mean_and_max(of_worker), of_worker.counts, of_worker.mean) for name, of_worker in of_workers]
    svg = Markup(multiples("staleness", panels, shared, colour, "staleness, in versions"))
    return Plot(STALE, svg, MARKED + _binned(shared))


def _mean_and_max(of_worker: StalenessCounts) -> str:
    if not of_worker.updates:
        return "no updates"
    return f"{formatting.figure(of_worker.mean)} mean, {formatting.count(of_worker.max)} max"


def _binned(shared: Bins) -> str:
    if shared.single:
        return ""
    return SHARED if shared.even else GROWING


def _over_time(history: History, colour: str) -> Plot:
    mean, largest = time_series.staleness(history)
    mean_row = _curve("Mean staleness", mean, colour, formatting.figure)
    rows = [mean_row, _curve("Largest staleness", largest, colour, formatting.count)]
    return Plot(STALE, Markup(plots.pair("stale", rows, SECONDS)), OVER_TIME)


def _curve(title: str, curve: Curve, colour: str, write: Callable[[float], str]) -> Row:
    return Row(title, (Line(f"{write(curve.samples[-1].value)} at the end", colour, (curve,)),))
