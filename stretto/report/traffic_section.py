"""Traffic section of a page: bytes by worker or recipe, purpose and direction, and curves over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from markupsafe import Markup

from stretto.report import formatting, plot_style, plots, time_series, traffic
from stretto.report.aggregation import Group, Measure, at, grouped, worker_counts
from stretto.report.plot_sections import Album, Plot
from stretto.report.plots import SECONDS, Line, Row
from stretto.report.run_log import History
from stretto.report.run_record import Record
from stretto.report.tables import COST, TRAFFIC, Cell, Sheet, in_megabytes, spread_cell
from stretto.report.time_series import Curve
from stretto.report.traffic import EVALUATION_SYNC

MOST_WORKERS = 8
ALL, ALL_BUT_EVALUATION, TRANSPORT = "all", "all but evaluation_sync", "transport"
COLUMNS = tuple(f"{what}, {way}" for way in ("sent", "received") for what in ("raw", "encoded", "ratio"))
NOTE = (
    "By purpose, in MB: as unencoded values (raw), as encoded, and their ratio. Transport: all bytes that left and "
    "entered a worker, with the copies of a ring or an all-gather, headers, and coordination messages."
)
EVALUATION = " Evaluation sync: the average that only evaluations need."
VALUES = " Values sent: share of all values."
RESIDUAL = " Residual: norm of what was not sent, over that of the input of the codec, at the last measurement."
OVER_TIME = "Mean over workers; only transport bytes include evaluation syncs."
RECIPES_OVER_TIME = "Mean over workers, without evaluation syncs."
RESIDUAL_OVER_TIME = " Residual: norm of what was not sent, over that of the input of the codec."


# The tables


def sheet(record: Record) -> list[Sheet]:
    """Return the table of a run: the mean over workers and each worker, by purpose; nothing without traffic."""
    if not record["traffic"]:
        return []
    shown, names = _shown(record), record["processes"]
    noun = "worker" if len(names) == record["workers"] else "rank"
    mean = Group(f"mean of {formatting.plural(len(names), noun)}", record["workers"], 1, (record,))
    by_process = [Group(names[index], 1, 1, (_of_process(record, index),)) for index in shown]
    omitted = f" The {len(shown)} of {len(names)} {noun}s that sent most." if len(shown) < len(names) else ""
    return [_sheet(noun, (), [mean, *by_process], omitted)]


def in_full(short: Sequence[Sheet], records: Sequence[Record]) -> list[Sheet]:
    """Return the tables of a comparison, with the table by purpose after that of costs instead of the short one."""
    other_sheets = [sheet for sheet in short if sheet.title != TRAFFIC]
    position = [sheet.title for sheet in other_sheets].index(COST) + 1
    return [*other_sheets[:position], *of_recipes(records), *other_sheets[position:]]


def of_recipes(records: Sequence[Record]) -> list[Sheet]:
    """Return the table of a comparison: the mean over workers for each recipe, by purpose."""
    with_traffic = [group for group in grouped(records) if any(record.get("traffic") for record in group.records)]
    return [_sheet("run", ("workers",), with_traffic, " Mean over workers.")] if with_traffic else []


def _shown(record: Record) -> list[int]:
    """Return the indices of all processes of workers, or of many the MOST_WORKERS that sent most."""
    sent = record["bytes_sent"]
    return sorted(sorted(range(len(sent)), key=lambda index: -sent[index])[:MOST_WORKERS])


def _of_process(record: Record, index: int) -> Record:
    """Return the record with the traffic of one process of a worker only."""
    lists = ("traffic", "values_sent", "residual_norms", "bytes_sent", "bytes_received")
    fields = {name: record[name][index : index + 1] for name in lists}
    return {**record, **fields, **traffic.shares(**fields)}


def _sheet(heading: str, beside: tuple[str, ...], groups: Sequence[Group], omitted: str) -> Sheet:
    records = [record for group in groups for record in group.records]
    values, residual = (
        any(r.get(name) is not None for r in records) for name in ("values_sent_share", "residual_share")
    )
    further = {"values_sent": formatting.percent} if values else {}
    further |= {"residual": partial(formatting.figure, digits=2)} if residual else {}
    evaluates = any(EVALUATION_SYNC in traffic.purposes(record.get("traffic") or []) for record in records)
    note = (
        NOTE + (EVALUATION if evaluates else "") + (VALUES if values else "") + (RESIDUAL if residual else "") + omitted
    )
    rows = [row for group in groups for row in _block(group, len(beside), further)]
    return Sheet(
        TRAFFIC,
        note,
        (heading, *beside, "purpose", *COLUMNS, *(name.replace("_", " ") for name in further)),
        tuple(rows),
    )


def _block(group: Group, beside: int, further: Mapping[str, Callable[[float | None], str]]) -> list[tuple[Cell, ...]]:
    """Return a row for each purpose, their sum and the transport; only the first row has the name of the group."""
    names = traffic.purposes([worker for record in group.records for worker in record.get("traffic") or []])
    trained = [purpose for purpose in names if purpose != EVALUATION_SYNC]
    total = [ALL_BUT_EVALUATION if EVALUATION_SYNC in names else ALL] if len(trained) > 1 else []
    purposes = [*trained, *total, *([EVALUATION_SYNC] if EVALUATION_SYNC in names else []), TRANSPORT]
    name = (Cell(group.label), Cell(str(group.workers)))[: 1 + beside]
    ratios = [spread_cell(group.spread(_share(f"{field}_share")), write) for field, write in further.items()]
    return [
        (
            *(name if is_first else [Cell("")] * len(name)),
            *_row(group, purpose),
            *(ratios if is_first else _blank(ratios)),
        )
        for is_first, purpose in ((purpose == purposes[0], purpose) for purpose in purposes)
    ]


def _blank(cells: Sequence[Cell]) -> list[Cell]:
    return [Cell("") for _ in cells]


def _share(name: str) -> Measure:
    return lambda record: record.get(name)


def _row(group: Group, purpose: str) -> tuple[Cell, ...]:
    cells = [Cell(purpose)]
    for direction in ("sent", "received"):
        raw, encoded = (
            partial(_megabytes, purpose=purpose, direction=name) for name in (f"raw_{direction}", direction)
        )
        cells += [spread_cell(group.spread(measure), in_megabytes) for measure in (raw, encoded)]
        cells.append(spread_cell(group.spread(partial(_ratio, purpose=purpose, direction=direction)), formatting.times))
    return tuple(cells)


def _megabytes(record: Record, purpose: str, direction: str) -> float | None:
    """Return the mean over workers in units of 10^6 bytes."""
    by_worker = record.get("traffic") or []
    return _bytes(record, purpose, direction) / len(by_worker) / 1e6 if by_worker else None


def _bytes(record: Record, purpose: str, direction: str) -> int:
    """Return the bytes of all workers for one purpose, for all but evaluation syncs, or at the transport."""
    by_worker = record["traffic"]
    if purpose in (ALL, ALL_BUT_EVALUATION):
        return traffic.total(by_worker, direction)
    if purpose == TRANSPORT:
        raw = direction.startswith("raw_")
        return traffic.total(by_worker, direction, evaluation=True) if raw else sum(record[f"bytes_{direction}"])
    return traffic.total(
        [{purpose: worker[purpose]} for worker in by_worker if purpose in worker], direction, evaluation=True
    )


def _ratio(record: Record, purpose: str, direction: str) -> float | None:
    if not record.get("traffic"):
        return None
    raw = _bytes(record, purpose, f"raw_{direction}")
    return traffic.ratio(raw, _bytes(record, purpose, direction)) if raw else None


# The plots


def pictures(record: Record, history: History) -> list[Plot]:
    """Return the curves of bytes and residuals of a run that encoded something."""
    if not traffic.is_encoded(record):
        return []
    colour = plot_style.colours(grouped([record]))[record["recipe"]]
    lines = (
        Line("raw", plot_style.QUIET, (time_series.traffic_curve(history, "raw_sent"),)),
        Line("encoded, sent", colour, (time_series.traffic_curve(history, "sent"),)),
        Line("encoded, received", plot_style.PHASES["exchanging"], (time_series.traffic_curve(history, "received"),)),
        Line("sent by the transport", plot_style.PHASES["waiting"], (time_series.on_wire(history),)),
    )
    residual = time_series.residual(history)
    return _plot("traffic", "MB of a worker", lines, _ended(residual, colour), OVER_TIME)


def _ended(curve: Curve, colour: str) -> tuple[Line, ...]:
    if not curve.samples:
        return ()
    return (Line(f"{formatting.figure(curve.samples[-1].value, 2)} at the end", colour, (curve,)),)


def of_album(album: Album) -> list[Plot]:
    """Return the curves of all recipes for each number of workers, if any run encoded something."""
    groups = album.groups()
    if not any(traffic.is_encoded(record) for record in album.records):
        return []
    colours, counts = plot_style.colours(groups), worker_counts(groups)
    return [
        plot
        for n in counts
        for plot in _of_recipes(
            album,
            [group for group in at(groups, n) if not group.single_process],
            colours,
            f"exchanged{n}",
            f"{n} workers. " if len(counts) > 1 else "",
        )
    ]


def _of_recipes(
    album: Album, groups: Sequence[Group], colours: Mapping[str, str], name: str, prefix: str
) -> list[Plot]:
    def lines(curve: Callable[[History], Curve]) -> tuple[Line, ...]:
        drawn = (
            Line(group.label, colours[group.recipe], tuple(map(curve, _histories(album, group)))) for group in groups
        )
        return tuple(drawn)

    sent = lines(lambda history: time_series.traffic_curve(history, "sent"))
    return _plot(name, "MB sent by a worker, encoded", sent, lines(time_series.residual), prefix + RECIPES_OVER_TIME)


def _histories(album: Album, group: Group) -> list[History]:
    return [history for record in group.asked if (history := album.history(record)) is not None]


def _plot(name: str, title: str, sent: Sequence[Line], residual: Sequence[Line], caption: str) -> list[Plot]:
    rows = [Row(title, _with_samples(sent)), Row("Residual, as a share of the input", _with_samples(residual))]
    caption += RESIDUAL_OVER_TIME if rows[1].lines else ""
    rows = [row for row in rows if row.lines]
    return [Plot(TRAFFIC, Markup(plots.pair(name, rows, SECONDS)), caption)] if rows else []


def _with_samples(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if any(curve.samples for curve in line.curves))
