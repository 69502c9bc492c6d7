"""Page of a run or a comparison: one HTML file, built from the log only; the same log gives the same bytes."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from stretto.errors import LogError
from stretto.report import (
    formatting,
    incidents,
    interval_section,
    plot_style,
    run_log,
    shares_section,
    stages_section,
    staleness_section,
    time_series,
    traffic_section,
)
from stretto.report.aggregation import grouped
from stretto.report.incidents import Incident
from stretto.report.plot_sections import LEARN, Album, Plot, pictures
from stretto.report.run_log import History
from stretto.report.run_record import Record, record
from stretto.report.tables import Cell, Sheet, megabytes, sheets
from stretto.report.target import Target
from stretto.report.verdict import verdict

NAME = "report.html"
MOST_EPOCHS = 12


@dataclass(frozen=True)
class Section:
    """Heading with its tables and plots."""

    title: str
    sheets: tuple[Sheet, ...]
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Fact:
    """Line of the list at the end of the page: a name and its texts; `typed` is True for commands."""

    name: str
    texts: tuple[str, ...]
    typed: bool = False


def write(folder: Path) -> Path:
    """Write report.html of a run or a comparison into its folder, and return its path."""
    text = _comparison(folder) if (folder / "compare.json").exists() else _single(folder)
    return put(folder, text)


def put(folder: Path, text: str) -> Path:
    """Write a page into a folder, and return its path."""
    page = folder / NAME
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{page} cannot be written: {error.strerror}") from error
    return page


def render(**values: object) -> str:
    """Return the page, rendered from the template that all commands share."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = lambda text: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    return environment.get_template("template.html").render(**values)


def _sections(tables: Sequence[Sheet], plots: Sequence[Plot]) -> list[Section]:
    """Return the sections by title, loss and metrics first, with the plots below their tables."""
    titles = dict.fromkeys([LEARN, *(sheet.title for sheet in tables), *(plot.heading for plot in plots)])
    sections = (
        Section(
            title,
            tuple(sheet for sheet in tables if sheet.title == title),
            tuple(plot for plot in plots if plot.heading == title),
        )
        for title in titles
    )
    return [section for section in sections if section.sheets or section.plots]


def _colours(records: Sequence[Record]) -> dict[str, str]:
    """Return the colour of each row of a table, the same as in the plots."""
    groups = grouped(records)
    by_recipe = plot_style.colours(groups)
    return {group.label: by_recipe[group.recipe] for group in groups}


# A comparison


def _comparison(folder: Path) -> str:
    saved = run_log.read_json(folder / "compare.json")
    question, records = saved.get("question") or {}, list(saved.get("runs") or [])
    target = Target.parse(question["target"]) if question.get("target") else None
    judged = verdict(records, target)
    album = Album(records, _histories(folder, records), target)
    return render(
        kicker=_kicker(question),
        headline=judged.sentence,
        deck=(*judged.caveats, *_what_to_add(album.histories.values())),
        failures=_failures(records),
        sections=_sections(
            [*traffic_section.in_full(sheets(records, target), records), *stages_section.of_recipes(records)],
            [*pictures(album), *traffic_section.of_album(album)],
        )
        if records
        else [],
        colours=_colours(records),
        facts=[
            *_facts(list(album.histories.values()), question.get("command") or [], _seeds(records)),
            *([Fact("Compared by", (judged.by,))] if judged.by else []),
        ],
        warnings=_warnings(album.histories.values()),
    )


def _kicker(question: dict[str, Any]) -> str:
    options = ["-m"] * bool(question.get("module")) + [str(question.get("script"))]
    script = shlex.join([*options, *map(str, question.get("args") or [])])
    workers = " and ".join(map(str, question.get("workers") or []))
    seeds = formatting.plural(int(question.get("seeds") or 1), "seed")
    return f"{script} · {workers} workers · {seeds}"


def _failures(records: Iterable[Record]) -> list[str]:
    """Return the reason of every failed run: the first in full, of the others the first line."""
    first, *further = [_failure(record) for record in records if record["failed"]] or [""]
    return [text for text in (first, *(failure.partition("\n")[0] for failure in further)) if text]


def _failure(failed: Record) -> str:
    configuration = f"{failed['recipe']} on {formatting.plural(failed['workers'], 'worker')}, seed {failed['seed']}"
    return f"{configuration}: {failed['failed']}"


def _seeds(records: Iterable[Record]) -> list[int]:
    return sorted({int(record["seed"]) for record in records})


def _histories(folder: Path, records: Iterable[Record]) -> dict[str, History]:
    """Return the logs of the runs that have a readable one, by the name of their folder."""
    histories = {}
    for name in (Path(run_record["folder"]).name for run_record in records):
        with contextlib.suppress(LogError):
            histories[name] = run_log.read(folder / name)
    return histories


# One run


def _single(folder: Path) -> str:
    run_record, history = record(folder), run_log.read(folder)
    album = Album([run_record], {Path(run_record["folder"]).name: history}, moments=time_series.moments(history))
    return render(
        kicker=f"{shlex.join([str(run_record['script']), *map(str, run_record['args'])])} · seed {run_record['seed']}",
        headline=_summary(run_record),
        deck=(_figures(run_record), *_what_to_add([history])),
        failures=[run_record["failed"]] if run_record["failed"] else [],
        sections=_sections(
            _tables(run_record, history),
            [
                *traffic_section.pictures(run_record, history),
                *staleness_section.pictures(run_record, history),
                *pictures(album),
            ],
        ),
        colours={},
        facts=_facts([history], history.run.get("command") or [], [int(run_record["seed"] or 0)]),
        warnings=_warnings([history]),
    )


def _summary(record: Record) -> str:
    metrics = ", ".join(f"{name} {formatting.figure(value, 4)}" for name, value in record["metrics"].items())
    run = f"{record['recipe']} on {formatting.plural(record['workers'], 'worker')}"
    return f"{run}: {metrics or 'not evaluated'} after {trained(record)}"


def trained(record: Record) -> str:
    """Return the training time, or the virtual time, of a run, and its samples."""
    what = "virtual time, simulated," if record.get("simulated") else "training"
    return f"{formatting.seconds(record['seconds'])} of {what} on {formatting.count(record['samples'])} samples"


def _what_to_add(histories: Iterable[History]) -> list[str]:
    """Return sentences on the calls that a script lacks, without which the page has no metrics or no loss."""
    ended = [history for history in histories if history.ended]
    lacks_metrics, lacks_loss = (
        bool(ended) and not any(history.of(kind) for history in ended) for kind in ("evaluation", "log")
    )
    return [
        *([NO_METRICS] if lacks_metrics else []),
        *([NO_LOSS] if lacks_loss else []),
    ]


NO_METRICS = (
    "To see metrics here, give stretto.distribute a function of the model that returns numbers by name: "
    '`stretto.distribute(model, optimizer, loader, evaluate=lambda model: {"accuracy": accuracy(model)})`.'
)
NO_LOSS = "To see the loss here, call `stretto.log(loss=loss)` in the loop, after `loss` is computed."


def _figures(record: Record) -> str:
    pace = f"{formatting.count(record['samples_per_second'])} samples a second"
    sent = formatting.figure(megabytes(record, "sent"))
    rounds = formatting.plural(record["rounds"], "round")
    if record["staleness"]:
        return f"{pace}; up to {rounds} per worker, and {sent} MB sent per worker on average."
    return f"{pace}; {rounds} and {sent} MB sent per worker." if record["rounds"] else f"{pace}; nothing was sent."


def _tables(record: Record, history: History) -> list[Sheet]:
    coverage = [_coverage(history)] if history.epochs else []
    tables = [
        *shares_section.sheets(history),
        *interval_section.sheets(history),
        *stages_section.sheets(history),
        *traffic_section.sheet(record),
        *staleness_section.sheet(record, history),
    ]
    return [*_failures_and_recovery(history), *coverage, *tables]


COUNTS = ("once", "twice", "never", "dropped")


def _coverage(history: History) -> Sheet:
    epochs = history.epochs
    note = "Samples of all workers so far, and how often the samples of the epoch were trained on."
    if len(epochs) > MOST_EPOCHS:
        note += f" The last {MOST_EPOCHS} of {len(epochs)} epochs."
    columns = ("epoch", "samples", "training time", *COUNTS)
    return Sheet("Sample coverage", note, columns, tuple(map(_epoch, epochs[-MOST_EPOCHS:])))


def _epoch(event: dict[str, Any]) -> tuple[Cell, ...]:
    counts = event.get("sample_counts") or {}
    progress = (formatting.count(event.get("samples")), formatting.seconds(run_log.number(event.get("training_s"))))
    return tuple(
        map(Cell, (str(event.get("epoch")), *progress, *(formatting.count(counts.get(name)) for name in COUNTS)))
    )


FAILURES = "Failures and recovery"
MOST_INCIDENTS = 40


def _failures_and_recovery(history: History) -> list[Sheet]:
    """Return the table of incidents, or nothing for a run without any."""
    all_incidents = incidents.incidents(history)
    if not all_incidents:
        return []
    note = "Time since the start of training; negative before the first generation was formed."
    if len(all_incidents) > MOST_INCIDENTS:
        note += f" The last {MOST_INCIDENTS} of {len(all_incidents)}."
    counted = any(incident.samples_redone is not None for incident in all_incidents)
    columns = ("process", "time", "incident", "recovery", *(("samples redone",) * counted))
    return [Sheet(FAILURES, note, columns, tuple(_incident(row, counted) for row in all_incidents[-MOST_INCIDENTS:]))]


def _incident(incident: Incident, counted: bool) -> tuple[Cell, ...]:
    texts = (incident.process, formatting.seconds(incident.t), incident.description, incident.consequence)
    return tuple(map(Cell, (*texts, *((formatting.count(incident.samples_redone),) * counted))))


# Details at the end of the page


def _facts(histories: Sequence[History], command: Sequence[str], seeds: Sequence[int]) -> list[Fact]:
    run = histories[0].run if histories else {}
    machine, versions = (
        run.get("machine") or {},
        {"stretto": run.get("stretto"), **(run.get("versions") or {})},
    )
    threads = dict.fromkeys(f"{history.workers} × {history.run.get('threads')}" for history in histories)
    facts = [
        Fact("Reproduce", (shlex.join(map(str, command)),) if command else (), typed=True),
        Fact("Simulated", _simulated(run.get("simulated") or {})),
        Fact("Seeds", (", ".join(map(str, seeds)),)),
        Fact("Machine", _machine(machine)),
        Fact("Workers × threads", (", ".join(threads),) if threads else ()),
        Fact("Versions", (", ".join(f"{name} {text}" for name, text in versions.items() if text),)),
        Fact("Started", (str(run["started"]),) if run.get("started") else ()),
    ]
    return [fact for fact in facts if any(fact.texts)]


def _simulated(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the options of the simulated cluster, as on the command line."""
    return tuple(f"--{name.replace('_', '-')} {shlex.quote(str(text))}" for name, text in options.items() if text)


def _machine(machine: dict[str, Any]) -> tuple[str, ...]:
    cores = machine.get("cores")
    parts = [
        machine.get("processor"),
        formatting.plural(cores, "core") if cores else None,
        f"{machine['memory_gib']} GiB of memory" if machine.get("memory_gib") else None,
        machine.get("system"),
    ]
    return (", ".join(str(text) for text in parts if text),)


def _warnings(histories: Iterable[History]) -> list[str]:
    """Return the warnings of all runs, each once."""
    texts = (str(event.get("text")) for history in histories for event in history.of("warning"))
    return list(dict.fromkeys(texts))
