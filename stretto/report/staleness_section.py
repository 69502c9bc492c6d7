"""What the page of a run shows of staleness: a row and a histogram for each worker, and how it went over time."""

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
from stretto.report.staleness import Tally, together
from stretto.report.tables import STALE, Cell, Sheet
from stretto.report.time_series import Curve

MOST_PANELS = 16
MOST_ROWS = 32
NOTE = "Staleness of an update: how many versions of the model came between the one it was computed on and its own."
LOST = " Lost to the bound: time in which a worker was made to wait for slower ones; its share of the worker's time."
MARKED = "Share of a worker's updates, by their staleness. Dashed: the mean."
GROWING = " Bins grow to the right; each begins at the value beneath its left edge."
SHARED = " Each bin begins at the value beneath its left edge."
OVER_TIME = "Over all workers. What a worker told of at once is taken to be evenly spread over the time since."


def in_words(one: Record) -> str:
    """Staleness and the time lost to the bound in one line, empty for a run without."""
    if not one["staleness"]:
        return ""
    stale = f"staleness {formatting.figure(one['staleness']['mean'])} mean, {one['staleness']['max']} max"
    if one["blocked_seconds"] is None:
        return stale
    lost, share = formatting.seconds(sum(one["blocked_seconds"])), formatting.percent(staleness.held_share(one))
    return f"{stale}, {lost} lost to the bound ({share} of the time)"


def sheet(one: Record, history: History) -> list[Sheet]:
    """A row for each worker and one for all, or nothing for a run without staleness."""
    if not one["staleness"]:
        return []
    tallies, is_held = staleness.by_worker(history), one["blocked_seconds"] is not None
    rows = [_row(f"worker {worker}", one, tallies[worker], worker, is_held) for worker in _shown(tallies)]
    whole = _all(one, together(tallies), is_held)
    columns = ("worker", "samples taken", "updates applied", "mean staleness", "largest staleness")
    lost = ("lost to the bound", "share of its time") if is_held else ()
    return [Sheet(STALE, _note(tallies, is_held), (*columns, *lost), (*rows, whole))]


def _note(tallies: Sequence[Tally], is_held: bool) -> str:
    cut = f" The {MOST_ROWS} of {len(tallies)} workers with the most." if len(tallies) > MOST_ROWS else ""
    return NOTE + (LOST if is_held else "") + cut


def _shown(tallies: Sequence[Tally]) -> list[int]:
    """All workers, or of very many those with the largest means."""
    by_mean = sorted(range(len(tallies)), key=lambda worker: -(tallies[worker].mean or 0.0))
    return sorted(by_mean[:MOST_ROWS])


def _row(name: str, one: Record, tally: Tally, worker: int, is_held: bool) -> tuple[Cell, ...]:
    lost = (one["blocked_seconds"][worker], staleness.held_shares(one)[worker]) if is_held else None
    return _cells(name, one["samples_by_worker"][worker], tally, lost)


def _all(one: Record, tally: Tally, is_held: bool) -> tuple[Cell, ...]:
    lost = (sum(one["blocked_seconds"]), staleness.held_share(one)) if is_held else None
    return _cells("all", sum(one["samples_by_worker"]), tally, lost)


def _cells(name: str, samples: int, tally: Tally, lost: tuple[float, float | None] | None) -> tuple[Cell, ...]:
    taken = (name, formatting.count(samples), formatting.count(tally.updates))
    held = (formatting.seconds(lost[0]), formatting.percent(lost[1])) if lost else ()
    return tuple(map(Cell, (*taken, formatting.figure(tally.mean), formatting.count(tally.max), *held)))


def pictures(one: Record, history: History) -> list[Plot]:
    """The histograms and the curves, or nothing for a run without staleness."""
    if not one["staleness"]:
        return []
    colour = plot_style.colours(grouped([one]))[one["recipe"]]
    return [_histograms(staleness.by_worker(history), colour), _over_time(history, colour)]


def _histograms(tallies: Sequence[Tally], colour: str) -> Plot:
    whole = together(tallies)
    shared = bins(whole.counts)
    many = len(tallies) > MOST_PANELS
    named = [(f"all {len(tallies)} workers", whole)] if many else [(f"worker {i}", t) for i, t in enumerate(tallies)]
    panels = [Panel(name, _says(tally), tally.counts, tally.mean) for name, tally in named]
    svg = Markup(multiples("staleness", panels, shared, colour, "staleness, in versions"))
    return Plot(STALE, svg, MARKED + _binned(shared))


def _says(tally: Tally) -> str:
    if not tally.updates:
        return "no updates"
    return f"{formatting.figure(tally.mean)} mean, {formatting.count(tally.max)} max"


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
