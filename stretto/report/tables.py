"""The tables of a comparison: built once as plain cells, for the terminal (here) and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.events import PHASES
from stretto.report import formatting, traffic
from stretto.report.aggregation import Group, Measure, Peers, Spread, grouped
from stretto.report.run_record import GLOBAL_BATCH, Record
from stretto.report.staleness import held_share
from stretto.report.target import Target

METRICS_A_SHEET = 2
MOST_METRICS = 6


@dataclass(frozen=True)
class Cell:
    """A median, and beneath it the range over seeds if there are several."""

    text: str
    range: str = ""


@dataclass(frozen=True)
class Sheet:
    """One small table: a question, what its figures mean, and a row for each group."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Column:
    """A heading and what stands under it for a group."""

    heading: str
    cell: Callable[[Group], Cell]


def sheets(records: Sequence[Record], target: Target | None = None) -> list[Sheet]:
    """The tables that answer: same state? how fast? at what cost? fewer bytes? how stale? where did the time go?"""
    groups, peers = grouped(records), Peers(records)
    names = metric_names(records)
    by_sheet = [names[i : i + METRICS_A_SHEET] for i in range(0, len(names), METRICS_A_SHEET)]
    beside = by_sheet.pop() if len(names) == 1 else []
    return [
        _sheet(STATE, STATE_NOTE, groups, [*_state(), *_metrics(beside, peers)]),
        *(_sheet("Same quality?", METRICS_NOTE, groups, _metrics(some, peers)) for some in by_sheet),
        _sheet(FAST, SPEED_NOTE, groups, _speed(peers)),
        *([_sheet(f"When was {target} reached?", TARGET_NOTE, groups, _target(peers))] if target else []),
        _sheet(COST, _cost_note(records), groups, _cost()),
        *_exchanged(groups),
        *_staleness(groups),
        _sheet(WHERE, SPLIT_NOTE, groups, _split()),
    ]


STATE, FAST, STALE, WHERE = "Same state?", "How fast?", "How stale?", "Where did the time go?"
COST, EXCHANGED = "At what cost?", "What was exchanged?"
STATE_NOTE = "Against one machine with the batches of all workers joined."
METRICS_NOTE = "At the end, and the difference from one machine with the batches of all workers joined."
SPEED_NOTE = "Training time, evaluations not counted. Speed-up: samples/s over alone. Efficiency: speed-up per worker."
TARGET_NOTE = "The first evaluation that satisfied it: training time and samples of all workers until then."
COST_NOTE = "Bytes as counted where they leave and enter a worker, mean over workers; 1 MB = 10⁶ bytes."
EXCHANGED_NOTE = (
    "MB per worker, raw (exact numbers) and encoded, before the wire multiplies them or adds its own; "
    "what only evaluations need (looks) is left out."
)
FEWER_NOTE = " Fewer: raw over encoded bytes sent."
ENTRIES_NOTE = " Values sent: share of all values."
OWED_NOTE = " Residual: norm of what was not sent, over that of the input, at the last measurement."
STALE_NOTE = "Versions of the model between the one that an update was computed on and its own, over all updates."
HELD_NOTE = " Lost to the bound: share of the time of all workers."
SAMPLES_NOTE = " Samples: of the worker that took fewest, and most."
UNEVEN_NOTE = " Rounds and steps: of the worker that made most."
SPLIT_NOTE = "Share of the whole time, mean over workers."


def _cost_note(records: Sequence[Record]) -> str:
    """Bytes that a wire could not count are said to be worked out."""
    counted = all(record.get("bytes_counted", True) for record in records)
    note = COST_NOTE if counted else COST_NOTE.replace("as counted where", "partly worked out, not counted, where")
    return note + (UNEVEN_NOTE if any(record.get("staleness") for record in records) else "")


def metric_names(records: Sequence[Record]) -> list[str]:
    """The metrics that any run has, in the order of their first appearance."""
    return list(dict.fromkeys(name for record in records for name in record["metrics"]))[:MOST_METRICS]


def _sheet(title: str, note: str, groups: Sequence[Group], columns: Sequence[Column]) -> Sheet:
    headings = ("run", "workers", *(column.heading for column in columns))
    return Sheet(title, note, headings, tuple(_row(group, columns) for group in groups))


def _row(group: Group, columns: Sequence[Column]) -> tuple[Cell, ...]:
    name = Cell(group.label, "" if group.whole else _failures(group))
    cells = [column.cell(group) if group.records else Cell("failed") for column in columns]
    return (name, Cell(str(group.workers)), *cells)


def _failures(group: Group) -> str:
    return f"{len(group.asked) - len(group.records)} of {formatting.plural(len(group.asked), 'run')} failed"


def _measured(heading: str, measure: Measure, write: Callable[[float | None], str]) -> Column:
    return Column(heading, lambda group: spread_cell(group.spread(measure), write))


def spread_cell(spread: Spread | None, write: Callable[[float | None], str]) -> Cell:
    """A median, with the range when more than one seed was run."""
    if spread is None:
        return Cell(formatting.NOTHING)
    low, high = write(spread.low), write(spread.high)
    return Cell(write(spread.median), f"{low}…{high}" if low != high else "")


def _state() -> list[Column]:
    return [
        _referenced(_measured("parameter distance", lambda r: r["parameter_distance"], formatting.figure)),
        _referenced(_measured("predictions that differ", lambda r: r["prediction_disagreement"], formatting.percent)),
    ]


def _referenced(column: Column) -> Column:
    reference = Cell("reference")
    return replace(column, cell=lambda group: reference if group.recipe == GLOBAL_BATCH else column.cell(group))


def _metrics(names: Sequence[str], peers: Peers) -> list[Column]:
    columns = []
    for name in names:
        columns.append(_measured(name, partial(_metric, name=name), partial(formatting.figure, digits=4)))
        difference = _measured("difference", partial(_difference, name=name, peers=peers), formatting.signed)
        columns.append(_referenced(difference))
    return columns


def _metric(record: Record, name: str) -> float | None:
    value: float | None = record["metrics"].get(name)
    return value


def _difference(record: Record, name: str, peers: Peers) -> float | None:
    reference = peers.reference(record)
    here, there = _metric(record, name), _metric(reference, name) if reference else None
    return None if here is None or there is None else here - there


def _speed(peers: Peers) -> list[Column]:
    return [
        _measured("samples/s", lambda r: r["samples_per_second"], formatting.count),
        _measured("speed-up", lambda r: speed_up(r, peers), formatting.times),
        _measured("efficiency", lambda r: _efficiency(r, peers), formatting.percent),
        _measured("training time", lambda r: r["seconds"], formatting.seconds),
    ]


def speed_up(record: Record, peers: Peers) -> float | None:
    """Samples per second over those of the run alone with the same seed."""
    alone = peers.alone(record)
    mine, its = record["samples_per_second"], alone["samples_per_second"] if alone else None
    return mine / its if mine is not None and its else None


def _efficiency(record: Record, peers: Peers) -> float | None:
    ratio = speed_up(record, peers)
    return None if ratio is None else ratio / record["workers"]


def _target(peers: Peers) -> list[Column]:
    return [
        _reached("time", lambda r: reached(r, "seconds"), formatting.seconds),
        _reached("samples", lambda r: reached(r, "samples"), formatting.count),
        _measured("speed-up", lambda r: _target_speed_up(r, peers), formatting.times),
    ]


def reached(record: Record, what: str) -> float | None:
    """The seconds or samples that a run needed to the target."""
    value: float | None = (record["reached"] or {}).get(what)
    return value


def _target_speed_up(record: Record, peers: Peers) -> float | None:
    alone = peers.alone(record)
    mine, its = reached(record, "seconds"), reached(alone, "seconds") if alone else None
    return its / mine if mine and its else None


def _reached(heading: str, measure: Measure, write: Callable[[float | None], str]) -> Column:
    def cell(group: Group) -> Cell:
        spread = group.spread(measure)
        if spread is None:
            return Cell("not reached")
        if spread.count < len(group.records):
            return Cell(write(spread.median), f"{spread.count} of {len(group.records)} seeds")
        return spread_cell(spread, write)

    return Column(heading, cell)


def _cost() -> list[Column]:
    return [
        _measured("MB sent per worker", lambda r: megabytes(r["bytes_sent"]), in_megabytes),
        _measured("MB received per worker", lambda r: megabytes(r["bytes_received"]), in_megabytes),
        _measured("rounds", lambda r: r["rounds"], formatting.count),
        _measured("steps per worker", lambda r: r["steps"], formatting.count),
    ]


def megabytes(per_worker: Sequence[float]) -> float | None:
    """The mean over workers in units of 10^6 bytes."""
    return sum(per_worker) / len(per_worker) / 1e6 if per_worker else None


def in_megabytes(value: float | None) -> str:
    """Megabytes, with no more digits than a person reads."""
    return formatting.figure(value) if value is None or value < 1000 else formatting.count(value)


def _exchanged(groups: Sequence[Group]) -> list[Sheet]:
    """A table of what was raw and what encoded, where any run encoded something."""
    if not any(traffic.is_encoded(record) for group in groups for record in group.records):
        return []
    told = [group for group in groups if any(record.get("traffic") for record in group.asked)]
    entries, owed = (
        any(record.get(name) is not None for group in told for record in group.records)
        for name in ("values_sent_share", "residual_share")
    )
    columns = [
        *(_measured(heading, partial(_accounted, way=way), in_megabytes) for heading, way in IN_WAYS.items()),
        _measured("fewer", lambda r: (r.get("compression") or {}).get("sent"), formatting.times),
        *([_measured("values sent", lambda r: r.get("values_sent_share"), formatting.percent)] if entries else []),
        *(
            [_measured("residual", lambda r: r.get("residual_share"), partial(formatting.figure, digits=2))]
            if owed
            else []
        ),
    ]
    note = EXCHANGED_NOTE + FEWER_NOTE + (ENTRIES_NOTE if entries else "") + (OWED_NOTE if owed else "")
    return [_sheet(EXCHANGED, note, told, columns)]


IN_WAYS = {"raw": "raw_sent", "encoded, sent": "sent", "encoded, received": "received"}


def _accounted(record: Record, way: str) -> float | None:
    return traffic.megabytes(record.get("traffic") or [], way)


def _staleness(groups: Sequence[Group]) -> list[Sheet]:
    """A table of the asynchronous recipes, where there are any."""
    stale = [group for group in groups if any(record.get("staleness") for record in group.asked)]
    held = any(record.get("blocked_seconds") is not None for group in stale for record in group.asked)
    columns = [
        _measured("mean staleness", lambda r: (r.get("staleness") or {}).get("mean"), formatting.figure),
        _measured("largest staleness", lambda r: (r.get("staleness") or {}).get("max"), formatting.count),
        *([_measured("lost to the bound", held_share, formatting.percent)] if held else []),
        _measured("fewest samples", lambda r: min(r.get("samples_by_worker") or [], default=None), formatting.count),
        _measured("most samples", lambda r: max(r.get("samples_by_worker") or [], default=None), formatting.count),
    ]
    note = STALE_NOTE + (HELD_NOTE if held else "") + SAMPLES_NOTE
    return [_sheet(STALE, note, stale, columns)] if stale else []


def _split() -> list[Column]:
    return [_phase(phase) for phase in PHASES]


def _phase(phase: str) -> Column:
    measure = partial(share, phase=phase)
    return Column(phase, lambda group: Cell(formatting.percent(group.median(measure))))


def share(record: Record, phase: str) -> float | None:
    """The share of one phase in the time of all workers together."""
    whole = sum(sum(split.values()) for split in record["time_breakdown"])
    return sum(split.get(phase, 0.0) for split in record["time_breakdown"]) / whole if whole else None


def show(console: Console, records: Sequence[Record], target: Target | None = None) -> None:
    """Print the tables on a terminal; made to stay readable at 80 columns."""
    for sheet in sheets(records, target):
        console.print(Text(sheet.title, style="bold"))
        console.print(Text(sheet.note, style="dim"))
        table = _rich(sheet)
        fits = console.measure(table, options=console.options.update(width=WIDEST)).maximum <= console.width
        console.print(table if fits else _rich(sheet, ranges_on_two_lines=True))
        console.print()


def _rich(sheet: Sheet, ranges_on_two_lines: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(sheet.columns[0], min_width=LONG_NAME, overflow="fold")
    for heading in sheet.columns[1:]:
        table.add_column(_heading(heading), justify="right", overflow="fold")
    cut = "…\n" if ranges_on_two_lines else "…"
    for name, *cells in sheet.rows:
        table.add_row(_text(_broken(name.text), name.range), *(_text(c.text, c.range, cut) for c in cells))
    return table


def _heading(text: str) -> str:
    if text in NARROW:
        return NARROW[text]
    return text if len(text) <= 8 else text.replace(" ", "\n").replace("_", "_\n")


def _broken(name: str) -> str:
    """A long recipe, an option a line."""
    return name if len(name) <= LONG_NAME else name.replace(", ", ",\n  ")


LONG_NAME = 24
WIDEST = 1000
NARROW = {
    "workers": "n",
    "MB sent per worker": "MB sent\nper worker",
    "MB received per worker": "MB received\nper worker",
    "encoded, sent": "encoded,\nsent",
    "encoded, received": "encoded,\nreceived",
    "computing": "com-\npute",
    "encoding": "en-\ncode",
    "exchanging": "ex-\nchange",
    "waiting": "wait",
    "loading": "load",
    "evaluating": "eval-\nuate",
    "residual": "resi-\ndual",
    "efficiency": "effi-\nciency",
    "predictions that differ": "predictions\nthat differ",
}
"""Headings cut by hand where a terminal has little room."""


def _text(text: str, range_: str, cut: str = "…") -> Text:
    shown = Text(text)
    return shown.append(f"\n{range_.replace('…', cut)}", style="dim") if range_ else shown
