"""Tables of a comparison, built of plain cells for the terminal (here) and for the page."""

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
from stretto.report.aggregation import Baselines, Group, Measure, Spread, grouped
from stretto.report.equal_samples import all_same, value_at
from stretto.report.run_record import GLOBAL_BATCH, Record
from stretto.report.staleness import blocked_share
from stretto.report.target import Target

METRICS_A_SHEET = 2
MOST_METRICS = 6


@dataclass(frozen=True)
class Cell:
    """Median, with the range over seeds if there are several."""

    text: str
    range: str = ""


@dataclass(frozen=True)
class Sheet:
    """Table: a title, a note on its numbers, and a row for each group."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Column:
    """Heading of a column, and the function from a group to its cell."""

    heading: str
    cell: Callable[[Group], Cell]


def sheets(records: Sequence[Record], target: Target | None = None) -> list[Sheet]:
    """Return the tables of a comparison: model distance, metrics, speed, cost, traffic, staleness, time breakdown."""
    groups, baselines, names = grouped(records), Baselines(records), metric_names(records)
    is_same = all_same(records)
    samples = [] if is_same else [_measured("samples", lambda r: r["samples"], formatting.count)]
    compared_at = [] if is_same else [_measured("after samples", lambda r: r.get("compared_at"), formatting.count)]
    time = [_measured("training time", lambda r: r["seconds"], formatting.seconds)] if is_same else samples
    by_sheet = [names[i : i + METRICS_A_SHEET] for i in range(0, len(names), METRICS_A_SHEET)]
    beside = by_sheet.pop() if len(names) == 1 and is_same else []
    metrics_note, speed_note = (METRICS_NOTE, SPEED_NOTE) if is_same else (UNEQUAL_METRICS_NOTE, UNEQUAL_SPEED_NOTE)
    return [
        _sheet(STATE, STATE_NOTE, groups, [*_state(), *map(_referenced, compared_at), *_metrics(beside, baselines)]),
        *(_sheet("Final metrics", metrics_note, groups, [*samples, *_metrics(some, baselines)]) for some in by_sheet),
        _sheet(FAST, speed_note, groups, [*_speed(baselines), *time]),
        *([_sheet(f"Time to {target}", TARGET_NOTE, groups, _target(baselines))] if target else []),
        _sheet(COST, _cost_note(records), groups, _cost()),
        *_traffic(groups),
        *_staleness(groups),
        _sheet(TIME, TIME_NOTE, groups, _split()),
    ]


STATE, FAST, STALE, TIME = "Model distance", "Speed", "Staleness", "Time breakdown"
COST, TRAFFIC = "Bytes and rounds", "Traffic by purpose"
STATE_NOTE = "Against a single process with the global batch."
METRICS_NOTE = "At the end, and the difference from a single process with the global batch."
UNEQUAL_METRICS_NOTE = (
    "At the end, after different numbers of samples, and the difference from a single process with the global batch "
    "after as many."
)
SPEED_NOTE = (
    "Training time without evaluations. Speed-up: samples/s over those of a single process, whatever the quality. "
    "Efficiency: speed-up per process."
)
UNEQUAL_SPEED_NOTE = SPEED_NOTE.replace(
    "Training time without evaluations.", "The runs trained on different numbers of samples: no times are compared."
)
TARGET_NOTE = "Training time and samples of all workers until the first evaluation that satisfies the target."
COST_NOTE = "Bytes counted at the transport of a worker, mean over workers; 1 MB = 10⁶ bytes."
TRAFFIC_NOTE = (
    "MB per worker as unencoded values (raw) and as encoded, before the transport multiplies them or adds headers; "
    "without evaluation syncs."
)
RATIO_NOTE = " Ratio: raw over encoded bytes sent."
VALUES_NOTE = " Values sent: share of all values."
RESIDUAL_NOTE = " Residual: norm of what was not sent, over that of the input, at the last measurement."
STALE_NOTE = "Versions between the parameters that an update was computed on and its own version, over all updates."
BLOCKED_NOTE = " Blocked by bound: share of the time of all workers for which the staleness bound blocked them."
SAMPLES_NOTE = " Samples: of the workers that trained on the fewest and on the most."
ASYNCHRONOUS_NOTE = " Rounds and steps: the largest of any worker."
TIME_NOTE = "Share of the total time, mean over workers."


def _cost_note(records: Sequence[Record]) -> str:
    """Return the note on costs, which says if bytes were computed because the transport could not count them."""
    counted = all(record.get("bytes_counted", True) for record in records)
    note = (
        COST_NOTE
        if counted
        else COST_NOTE.replace(
            "counted at", "partly computed (tensors in shared memory, or without counters), not counted, at"
        )
    )
    return note + (ASYNCHRONOUS_NOTE if any(record.get("staleness") for record in records) else "")


def metric_names(records: Sequence[Record]) -> list[str]:
    """Return the metrics that any run has, in the order of their first appearance."""
    return list(dict.fromkeys(name for record in records for name in record["metrics"]))[:MOST_METRICS]


def _sheet(title: str, note: str, groups: Sequence[Group], columns: Sequence[Column]) -> Sheet:
    headings = ("run", "workers", *(column.heading for column in columns))
    return Sheet(title, note, headings, tuple(_row(group, columns) for group in groups))


def _row(group: Group, columns: Sequence[Column]) -> tuple[Cell, ...]:
    name = Cell(group.label, "" if group.complete else _failures(group))
    cells = [column.cell(group) if group.records else Cell("failed") for column in columns]
    return (name, Cell(str(group.workers)), *cells)


def _failures(group: Group) -> str:
    return f"{len(group.asked) - len(group.records)} of {formatting.plural(len(group.asked), 'run')} failed"


def _measured(heading: str, measure: Measure, write: Callable[[float | None], str]) -> Column:
    return Column(heading, lambda group: spread_cell(group.spread(measure), write))


def spread_cell(spread: Spread | None, write: Callable[[float | None], str]) -> Cell:
    """Return the cell of a median, with the range over several seeds."""
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


def _metrics(names: Sequence[str], baselines: Baselines) -> list[Column]:
    columns = []
    for name in names:
        columns.append(_measured(name, partial(_metric, name=name), partial(formatting.figure, digits=4)))
        difference = _measured("difference", partial(_difference, name=name, baselines=baselines), formatting.signed)
        columns.append(_referenced(difference))
    return columns


def _metric(record: Record, name: str) -> float | None:
    value: float | None = record["metrics"].get(name)
    return value


def _difference(record: Record, name: str, baselines: Baselines) -> float | None:
    reference = baselines.reference(record)
    if reference is None:
        return None
    samples = min(record["samples"], reference["samples"])
    value, baseline = value_at(record, name, samples), value_at(reference, name, samples)
    return None if value is None or baseline is None else value - baseline


def _speed(baselines: Baselines) -> list[Column]:
    return [
        _measured("samples/s", lambda r: r["samples_per_second"], formatting.count),
        _measured("speed-up", lambda r: speed_up(r, baselines), formatting.times),
        _measured("efficiency", lambda r: _efficiency(r, baselines), formatting.percent),
    ]


def speed_up(record: Record, baselines: Baselines) -> float | None:
    """Return samples per second over those of the single process with the same seed."""
    single = baselines.single_process(record)
    speed, baseline = record["samples_per_second"], single["samples_per_second"] if single else None
    return speed / baseline if speed is not None and baseline else None


def _efficiency(record: Record, baselines: Baselines) -> float | None:
    ratio = speed_up(record, baselines)
    return None if ratio is None else ratio / (len(record.get("processes") or ()) or record["workers"])


def _target(baselines: Baselines) -> list[Column]:
    return [
        _reached("time", "seconds", formatting.seconds, lambda _: "not reached"),
        _reached("samples", "samples", formatting.count, lambda group: f"not in {formatting.count(_samples(group))}"),
        _measured("speed-up", lambda r: _target_speed_up(r, baselines), formatting.times),
    ]


def reached(record: Record, what: str) -> float | None:
    """Return the seconds or samples until a run reached the target, or None."""
    value: float | None = (record["reached"] or {}).get(what)
    return value


def _target_speed_up(record: Record, baselines: Baselines) -> float | None:
    single = baselines.single_process(record)
    seconds, baseline = reached(record, "seconds"), reached(single, "seconds") if single else None
    return baseline / seconds if seconds and baseline else None


def _reached(heading: str, what: str, write: Callable[[float | None], str], missed: Callable[[Group], str]) -> Column:
    def cell(group: Group) -> Cell:
        spread = group.spread(partial(reached, what=what))
        if spread is None:
            return Cell(missed(group))
        if spread.count < len(group.records):
            return Cell(write(spread.median), f"{spread.count} of {len(group.records)} seeds")
        return spread_cell(spread, write)

    return Column(heading, cell)


def _samples(group: Group) -> float | None:
    return group.median(lambda record: record["samples"])


def _cost() -> list[Column]:
    return [
        _measured("MB sent per worker", lambda r: megabytes(r, "sent"), in_megabytes),
        _measured("MB received per worker", lambda r: megabytes(r, "received"), in_megabytes),
        _measured("rounds", lambda r: r["rounds"], formatting.count),
        _measured("steps per worker", lambda r: r["steps"], formatting.count),
    ]


def megabytes(record: Record, direction: str) -> float | None:
    """Return the mean over workers of their bytes `sent` or `received`, in units of 10^6 bytes."""
    total: list[float] = record[f"bytes_{direction}"]
    return sum(total) / record["workers"] / 1e6 if total else None


def in_megabytes(value: float | None) -> str:
    """Format megabytes with three significant digits, or as a whole number from 1000."""
    return formatting.figure(value) if value is None or value < 1000 else formatting.count(value)


def _traffic(groups: Sequence[Group]) -> list[Sheet]:
    """Return the table of raw and encoded bytes, or nothing if no run encoded anything."""
    if not any(traffic.is_encoded(record) for group in groups for record in group.records):
        return []
    with_traffic = [group for group in groups if any(record.get("traffic") for record in group.asked)]
    entries, owed = (
        any(record.get(name) is not None for group in with_traffic for record in group.records)
        for name in ("values_sent_share", "residual_share")
    )
    columns = [
        *(
            _measured(heading, partial(_megabytes_in, direction=direction), in_megabytes)
            for heading, direction in DIRECTION_HEADINGS.items()
        ),
        _measured("ratio", lambda r: (r.get("compression") or {}).get("sent"), formatting.times),
        *([_measured("values sent", lambda r: r.get("values_sent_share"), formatting.percent)] if entries else []),
        *(
            [_measured("residual", lambda r: r.get("residual_share"), partial(formatting.figure, digits=2))]
            if owed
            else []
        ),
    ]
    note = TRAFFIC_NOTE + RATIO_NOTE + (VALUES_NOTE if entries else "") + (RESIDUAL_NOTE if owed else "")
    return [_sheet(TRAFFIC, note, with_traffic, columns)]


DIRECTION_HEADINGS = {"raw": "raw_sent", "encoded, sent": "sent", "encoded, received": "received"}


def _megabytes_in(record: Record, direction: str) -> float | None:
    return traffic.megabytes(record.get("traffic") or [], direction, record["workers"])


def _staleness(groups: Sequence[Group]) -> list[Sheet]:
    """Return the table of the asynchronous recipes, or nothing if there are none."""
    stale = [group for group in groups if any(record.get("staleness") for record in group.asked)]
    is_bounded = any(record.get("blocked_seconds") is not None for group in stale for record in group.asked)
    columns = [
        _measured("mean staleness", lambda r: (r.get("staleness") or {}).get("mean"), formatting.figure),
        _measured("largest staleness", lambda r: (r.get("staleness") or {}).get("max"), formatting.count),
        *([_measured("blocked by bound", blocked_share, formatting.percent)] if is_bounded else []),
        _measured("fewest samples", lambda r: min(r.get("samples_by_worker") or [], default=None), formatting.count),
        _measured("most samples", lambda r: max(r.get("samples_by_worker") or [], default=None), formatting.count),
    ]
    note = STALE_NOTE + (BLOCKED_NOTE if is_bounded else "") + SAMPLES_NOTE
    return [_sheet(STALE, note, stale, columns)] if stale else []


def _split() -> list[Column]:
    return [_phase(phase) for phase in PHASES]


def _phase(phase: str) -> Column:
    measure = partial(share, phase=phase)
    return Column(phase, lambda group: Cell(formatting.percent(group.median(measure))))


def share(record: Record, phase: str) -> float | None:
    """Return the share of one phase in the total time of all workers."""
    total = sum(sum(phases.values()) for phases in record["time_breakdown"])
    return sum(phases.get(phase, 0.0) for phases in record["time_breakdown"]) / total if total else None


def show(console: Console, shown: Sequence[Sheet]) -> None:
    """Print tables on a terminal; they fit into 80 columns."""
    for sheet in shown:
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
    separator = "…\n" if ranges_on_two_lines else "…"
    for name, *cells in sheet.rows:
        table.add_row(_text(_broken(name.text), name.range), *(_text(c.text, c.range, separator) for c in cells))
    return table


def _heading(text: str) -> str:
    if text in NARROW:
        return NARROW[text]
    return text if len(text) <= 8 else text.replace(" ", "\n").replace("_", "_\n")


def _broken(name: str) -> str:
    """Return the name of a recipe, with one option per line if it is long."""
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
"""Line breaks of headings for narrow terminals."""


def _text(text: str, range_: str, separator: str = "…") -> Text:
    cell_text = Text(text)
    return cell_text.append(f"\n{range_.replace('…', separator)}", style="dim") if range_ else cell_text
