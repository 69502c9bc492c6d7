"""What a page shows of exchanges: bytes by worker or recipe, purpose and direction, and how they grew."""

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
from stretto.report.tables import COST, EXCHANGED, Cell, Sheet, in_megabytes, spread_cell
from stretto.report.time_series import Curve
from stretto.report.traffic import LOOKS

MOST_WORKERS = 8
ALL, ALL_BUT_LOOKS, WIRE = "all", "all but looks", "on the wire"
COLUMNS = tuple(f"{what}, {way}" for way in ("sent", "received") for what in ("raw", "encoded", "fewer"))
NOTE = (
    "By purpose, in MB: raw (as exact numbers), encoded, and how many times fewer. On the wire: all that left and "
    "entered a worker, with what a ring or a gathering multiplies, heads, and what workers say to keep in step."
)
LOOKED = " Looks: what only evaluations need."
ENTRIES = " Values sent: share of all values."
OWED = " Residual: norm of what was not sent, over that of the input of the codec, at the last measurement."
OVER_TIME = "Mean over workers; looks are left out, but for the wire."
RECIPES_OVER_TIME = "Mean over workers, looks left out."
OWED_OVER_TIME = " Residual: norm of what was not sent, over that of the input of the codec."


# The tables


def sheet(one: Record) -> list[Sheet]:
    """For a run: the mean over workers and each worker, by purpose; nothing where nothing was exchanged."""
    if not one["traffic"]:
        return []
    shown = _shown(one)
    mean = Group(f"mean of {formatting.plural(one['workers'], 'worker')}", one["workers"], 1, (one,))
    by_worker = [Group(f"worker {worker}", 1, 1, (_of_worker(one, worker),)) for worker in shown]
    cut = f" The {len(shown)} of {one['workers']} workers that sent most." if len(shown) < one["workers"] else ""
    return [_sheet("worker", (), [mean, *by_worker], cut)]


def in_full(short: Sequence[Sheet], records: Sequence[Record]) -> list[Sheet]:
    """The tables of a comparison with the one by purpose after that of costs, in place of the short one."""
    others = [one for one in short if one.title != EXCHANGED]
    after = [one.title for one in others].index(COST) + 1
    return [*others[:after], *of_recipes(records), *others[after:]]


def of_recipes(records: Sequence[Record]) -> list[Sheet]:
    """For a comparison: the mean over workers for each recipe, by purpose."""
    told = [group for group in grouped(records) if any(record.get("traffic") for record in group.records)]
    return [_sheet("run", ("workers",), told, " Mean over workers.")] if told else []


def _shown(one: Record) -> list[int]:
    """All workers, or of very many those that sent most."""
    sent = one["bytes_sent"]
    return sorted(sorted(range(len(sent)), key=lambda worker: -sent[worker])[:MOST_WORKERS])


def _of_worker(one: Record, worker: int) -> Record:
    """The record as if the worker had been the only one to count."""
    lists = ("traffic", "values_sent", "residual_norms", "bytes_sent", "bytes_received")
    kept = {name: one[name][worker : worker + 1] for name in lists}
    return {**one, **kept, **traffic.shares(**kept)}


def _sheet(heading: str, beside: tuple[str, ...], groups: Sequence[Group], more: str) -> Sheet:
    records = [record for group in groups for record in group.records]
    entries, owed = (any(r.get(name) is not None for r in records) for name in ("values_sent_share", "residual_share"))
    further = {"values_sent": formatting.percent} if entries else {}
    further |= {"residual": partial(formatting.figure, digits=2)} if owed else {}
    looked = any(LOOKS in traffic.purposes(record.get("traffic") or []) for record in records)
    note = NOTE + (LOOKED if looked else "") + (ENTRIES if entries else "") + (OWED if owed else "") + more
    rows = [row for group in groups for row in _block(group, len(beside), further)]
    return Sheet(
        EXCHANGED,
        note,
        (heading, *beside, "purpose", *COLUMNS, *(name.replace("_", " ") for name in further)),
        tuple(rows),
    )


def _block(group: Group, beside: int, further: Mapping[str, Callable[[float | None], str]]) -> list[tuple[Cell, ...]]:
    """A row for each purpose, the sum of several, and what the wire made of it; the name in the first row alone."""
    found = traffic.purposes([worker for record in group.records for worker in record.get("traffic") or []])
    trained = [purpose for purpose in found if purpose != LOOKS]
    whole = [ALL_BUT_LOOKS if LOOKS in found else ALL] if len(trained) > 1 else []
    purposes = [*trained, *whole, *([LOOKS] if LOOKS in found else []), WIRE]
    name = (Cell(group.label), Cell(str(group.workers)))[: 1 + beside]
    last = [spread_cell(group.spread(_share(f"{what}_share")), write) for what, write in further.items()]
    return [
        (*(name if first else [Cell("")] * len(name)), *_row(group, purpose), *(last if first else _blank(last)))
        for first, purpose in ((purpose == purposes[0], purpose) for purpose in purposes)
    ]


def _blank(cells: Sequence[Cell]) -> list[Cell]:
    return [Cell("") for _ in cells]


def _share(name: str) -> Measure:
    return lambda record: record.get(name)


def _row(group: Group, purpose: str) -> tuple[Cell, ...]:
    cells = [Cell(purpose)]
    for way in ("sent", "received"):
        raw, said = (partial(_megabytes, purpose=purpose, way=one) for one in (f"raw_{way}", way))
        cells += [spread_cell(group.spread(measure), in_megabytes) for measure in (raw, said)]
        cells.append(spread_cell(group.spread(partial(_fewer, purpose=purpose, way=way)), formatting.times))
    return tuple(cells)


def _megabytes(record: Record, purpose: str, way: str) -> float | None:
    """The mean over workers."""
    exchanged = record.get("traffic") or []
    return _bytes(record, purpose, way) / len(exchanged) / 1e6 if exchanged else None


def _bytes(record: Record, purpose: str, way: str) -> int:
    """Bytes of all workers for one purpose, for all but looks, or on the wire."""
    exchanged = record["traffic"]
    if purpose in (ALL, ALL_BUT_LOOKS):
        return traffic.total(exchanged, way)
    if purpose == WIRE:
        raw = way.startswith("raw_")
        return traffic.total(exchanged, way, looks=True) if raw else sum(record[f"bytes_{way}"])
    return traffic.total([{purpose: worker[purpose]} for worker in exchanged if purpose in worker], way, looks=True)


def _fewer(record: Record, purpose: str, way: str) -> float | None:
    if not record.get("traffic"):
        return None
    raw = _bytes(record, purpose, f"raw_{way}")
    return traffic.fewer(raw, _bytes(record, purpose, way)) if raw else None


# The plots


def pictures(one: Record, history: History) -> list[Plot]:
    """For a run that encoded something: bytes and what was owed, over time."""
    if not traffic.is_encoded(one):
        return []
    colour = plot_style.colours(grouped([one]))[one["recipe"]]
    lines = (
        Line("raw", plot_style.QUIET, (time_series.exchanged(history, "raw_sent"),)),
        Line("encoded, sent", colour, (time_series.exchanged(history, "sent"),)),
        Line("encoded, received", plot_style.PHASES["exchanging"], (time_series.exchanged(history, "received"),)),
        Line("sent on the wire", plot_style.PHASES["waiting"], (time_series.on_wire(history),)),
    )
    owed = time_series.owed(history)
    return _plot("traffic", "MB of a worker", lines, _ended(owed, colour), OVER_TIME)


def _ended(curve: Curve, colour: str) -> tuple[Line, ...]:
    if not curve.samples:
        return ()
    return (Line(f"{formatting.figure(curve.samples[-1].value, 2)} at the end", colour, (curve,)),)


def of_album(album: Album) -> list[Plot]:
    """For a comparison in which something was encoded: the same of all recipes, for each number of workers."""
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


def _of_recipes(album: Album, groups: Sequence[Group], colours: Mapping[str, str], name: str, who: str) -> list[Plot]:
    def lines(curve: Callable[[History], Curve]) -> tuple[Line, ...]:
        found = (
            Line(group.label, colours[group.recipe], tuple(map(curve, _histories(album, group)))) for group in groups
        )
        return tuple(found)

    sent = lines(lambda history: time_series.exchanged(history, "sent"))
    return _plot(name, "MB sent by a worker, encoded", sent, lines(time_series.owed), who + RECIPES_OVER_TIME)


def _histories(album: Album, group: Group) -> list[History]:
    return [history for record in group.asked if (history := album.history(record)) is not None]


def _plot(name: str, title: str, exchanged: Sequence[Line], owed: Sequence[Line], caption: str) -> list[Plot]:
    rows = [Row(title, _told(exchanged)), Row("Residual, as a share of the input", _told(owed))]
    caption += OWED_OVER_TIME if rows[1].lines else ""
    rows = [row for row in rows if row.lines]
    return [Plot(EXCHANGED, Markup(plots.pair(name, rows, SECONDS)), caption)] if rows else []


def _told(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if any(curve.samples for curve in line.curves))
