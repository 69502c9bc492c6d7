"""The page of a run or a comparison: one file, made from the log alone, the same bytes for the same log."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from stretto.errors import LogError
from stretto.report import formatting, incidents, plot_style, run_log, staleness_section, time_series, traffic_section
from stretto.report.aggregation import grouped
from stretto.report.incidents import Fate
from stretto.report.plot_sections import LEARN, Album, Plot, pictures
from stretto.report.run_log import History, called
from stretto.report.run_record import Record, record
from stretto.report.tables import Cell, Sheet, megabytes, sheets
from stretto.report.target import Target
from stretto.report.verdict import Verdict, verdict

NAME = "report.html"
MOST_PASSES = 12


@dataclass(frozen=True)
class Section:
    """A heading with the tables and the plots that belong under it."""

    title: str
    sheets: tuple[Sheet, ...]
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Fact:
    """A line of the small print: a name and its texts; `typed` is what can be typed again."""

    name: str
    texts: tuple[str, ...]
    typed: bool = False


def write(folder: Path) -> Path:
    """Make report.html in a run folder or a comparison folder, and return where it is."""
    text = _comparison(folder) if (folder / "compare.json").exists() else _single(folder)
    return put(folder, text)


def put(folder: Path, text: str) -> Path:
    """Write a page into a folder, and return where it is."""
    page = folder / NAME
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{page} cannot be written: {error.strerror}") from error
    return page


def render(**fills: object) -> str:
    """The page that every command writes, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(**fills)


def _sections(found: Sequence[Sheet], plots: Sequence[Plot]) -> list[Section]:
    """Loss and metrics first, then question after question, the plot under its table."""
    titles = dict.fromkeys([LEARN, *(sheet.title for sheet in found), *(plot.heading for plot in plots)])
    sections = (
        Section(
            title,
            tuple(sheet for sheet in found if sheet.title == title),
            tuple(plot for plot in plots if plot.heading == title),
        )
        for title in titles
    )
    return [section for section in sections if section.sheets or section.plots]


def _colours(records: Sequence[Record]) -> dict[str, str]:
    """The colour of each row of a table, the same as in the plots."""
    groups = grouped(records)
    by_recipe = plot_style.colours(groups)
    return {group.label: by_recipe[group.recipe] for group in groups}


# A comparison


def _comparison(folder: Path) -> str:
    kept = run_log.read_json(folder / "compare.json")
    question, records = kept.get("question") or {}, list(kept.get("runs") or [])
    target = Target.parse(question["target"]) if question.get("target") else None
    judged = verdict(records, target) if records else Verdict(None, "No run has been made yet.")
    album = Album(records, _histories(folder, records), target)
    return render(
        kicker=_kicker(question),
        headline=judged.sentence,
        deck=judged.caveats,
        failures=_failures(records),
        sections=_sections(
            traffic_section.in_full(sheets(records, target), records),
            [*pictures(album), *traffic_section.of_album(album)],
        )
        if records
        else [],
        colours=_colours(records),
        facts=_facts(list(album.histories.values()), question.get("command") or [], _seeds(records)),
        notices=_notices(album.histories.values()),
    )


def _kicker(question: dict[str, Any]) -> str:
    started = ["-m"] * bool(question.get("module")) + [str(question.get("script"))]
    script = shlex.join([*started, *map(str, question.get("args") or [])])
    workers = " and ".join(map(str, question.get("workers") or []))
    seeds = formatting.plural(int(question.get("seeds") or 1), "seed")
    return f"{script} · {workers} workers · {seeds}"


def _failures(records: Iterable[Record]) -> list[str]:
    """Every run that failed and why; the first with all that is known."""
    whole, *others = [_failure(one) for one in records if one["failed"]] or [""]
    return [text for text in (whole, *(other.partition("\n")[0] for other in others)) if text]


def _failure(failed: Record) -> str:
    where = f"{failed['recipe']} on {formatting.plural(failed['workers'], 'worker')}, seed {failed['seed']}"
    return f"{where}: {failed['failed']}"


def _seeds(records: Iterable[Record]) -> list[int]:
    return sorted({int(one["seed"]) for one in records})


def _histories(folder: Path, records: Iterable[Record]) -> dict[str, History]:
    """The logs of those runs that left one that can be read."""
    found = {}
    for name in (Path(one["folder"]).name for one in records):
        with contextlib.suppress(LogError):
            found[name] = run_log.read(folder / name)
    return found


# One run


def _single(folder: Path) -> str:
    one, read = record(folder), run_log.read(folder)
    album = Album([one], {Path(one["folder"]).name: read}, moments=time_series.moments(read))
    return render(
        kicker=f"{shlex.join([str(one['script']), *map(str, one['args'])])} · seed {one['seed']}",
        headline=_summary(one),
        deck=(_figures(one),),
        failures=[one["failed"]] if one["failed"] else [],
        sections=_sections(
            _tables(one, read),
            [*traffic_section.pictures(one, read), *staleness_section.pictures(one, read), *pictures(album)],
        ),
        colours={},
        facts=_facts([read], read.run.get("command") or [], [int(one["seed"] or 0)]),
        notices=_notices([read]),
    )


def _summary(one: Record) -> str:
    metrics = ", ".join(f"{name} {formatting.figure(value, 4)}" for name, value in one["metrics"].items())
    who = f"{one['recipe']} on {formatting.plural(one['workers'], 'worker')}"
    return f"{who}: {metrics or 'not evaluated'} after {formatting.seconds(one['seconds'])} of {of_what(one)}"


def of_what(one: Record) -> str:
    """What the seconds of a record are seconds of."""
    return "virtual time, simulated" if one.get("simulated") else "training"


def _figures(one: Record) -> str:
    pace = f"{formatting.count(one['samples'])} samples at {formatting.count(one['samples_per_second'])} a second"
    sent = formatting.figure(megabytes(one["bytes_sent"]))
    rounds = formatting.plural(one["rounds"], "exchange")
    if one["staleness"]:
        return f"{pace}; up to {rounds} of a worker, and {sent} MB sent by each on average."
    return f"{pace}; {rounds} and {sent} MB sent by each worker." if one["rounds"] else f"{pace}; nothing was sent."


def _tables(one: Record, read: History) -> list[Sheet]:
    passes = [_passes(read)] if read.passes else []
    return [*_fates(read), *passes, *traffic_section.sheet(one), *staleness_section.sheet(one, read)]


SEEN = ("once", "twice", "never", "dropped")


def _passes(read: History) -> Sheet:
    passes = read.passes
    note = "Samples of all workers so far, and how often those of the pass were seen."
    if len(passes) > MOST_PASSES:
        note += f" The last {MOST_PASSES} of {len(passes)} passes."
    columns = ("pass", "samples", "training time", *(f"seen {word}" for word in SEEN[:3]), "dropped")
    return Sheet("What was seen?", note, columns, tuple(map(_pass, passes[-MOST_PASSES:])))


def _pass(event: dict[str, Any]) -> tuple[Cell, ...]:
    seen = event.get("sample_counts") or {}
    times = (formatting.count(event.get("samples")), formatting.seconds(run_log.number(event.get("training_s"))))
    return tuple(map(Cell, (str(event.get("epoch")), *times, *(formatting.count(seen.get(word)) for word in SEEN))))


DIED = "What died, and what happened?"
MOST_FATES = 40


def _fates(read: History) -> list[Sheet]:
    """A row for each thing that happened to a process; nothing where nothing did."""
    found = incidents.fates(read)
    if not found:
        return []
    note = "Time since the start of training; below 0 the workers had not met yet."
    if len(found) > MOST_FATES:
        note += f" The last {MOST_FATES} of {len(found)}."
    counted = any(one.again is not None for one in found)
    columns = ("who", "when", "what", "what next", *(("samples done again",) * counted))
    return [Sheet(DIED, note, columns, tuple(_fate(one, counted) for one in found[-MOST_FATES:]))]


def _fate(one: Fate, counted: bool) -> tuple[Cell, ...]:
    texts = (called(one.worker), formatting.seconds(one.t), one.what, one.next)
    return tuple(map(Cell, (*texts, *((formatting.count(one.again),) * counted))))


# The small print


def _facts(histories: Sequence[History], command: Sequence[str], seeds: Sequence[int]) -> list[Fact]:
    run = histories[0].run if histories else {}
    machine, versions = (
        run.get("machine") or {},
        {"stretto": run.get("stretto"), **(run.get("versions") or {})},
    )
    threads = dict.fromkeys(f"{read.workers} × {read.run.get('threads')}" for read in histories)
    facts = [
        Fact("Ask again", (shlex.join(map(str, command)),) if command else (), typed=True),
        Fact("Simulated", _simulated(run.get("simulated") or {})),
        Fact("Seeds", (", ".join(map(str, seeds)),)),
        Fact("Machine", _machine(machine)),
        Fact("Workers × threads", (", ".join(threads),) if threads else ()),
        Fact("Versions", (", ".join(f"{name} {text}" for name, text in versions.items() if text),)),
        Fact("Started", (str(run["started"]),) if run.get("started") else ()),
    ]
    return [fact for fact in facts if any(fact.texts)]


def _simulated(asked: dict[str, Any]) -> tuple[str, ...]:
    """The world in which it was simulated, option by option as it is typed."""
    return tuple(f"--{name.replace('_', '-')} {shlex.quote(str(text))}" for name, text in asked.items() if text)


def _machine(machine: dict[str, Any]) -> tuple[str, ...]:
    cores = machine.get("cores")
    shown = [
        machine.get("processor"),
        formatting.plural(cores, "core") if cores else None,
        f"{machine['memory_gib']} GiB of memory" if machine.get("memory_gib") else None,
        machine.get("system"),
    ]
    return (", ".join(str(text) for text in shown if text),)


def _notices(histories: Iterable[History]) -> list[str]:
    """What the program told the user, each once."""
    texts = (str(event.get("text")) for read in histories for event in read.of("warning"))
    return list(dict.fromkeys(texts))
