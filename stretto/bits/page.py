"""The table and the page of what was found: made from bits.json alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.bits import results
from stretto.bits.outcome import GD
from stretto.report import formatting, plot_style
from stretto.report.html_report import Fact, Section, put, render
from stretto.report.plot_sections import Plot
from stretto.report.tables import Cell, Sheet

Found = Mapping[str, Any]
TITLE = "How many rounds, how many bits?"
CAPTION = (
    "F - F* after each round, against the rounds and against what all workers have sent until then. Dashed: the target."
)


def note(asked: Found) -> str:
    """What the figures mean, in a sentence or two."""
    size = f"{asked['rows']:,} rows of {asked['features']:,} features, {asked['workers']} workers"
    terms = f"l2 {asked['l2']:g}" + (f", l1 {asked['l1']:g}" if asked["l1"] else "")
    counted = f"Uplink bits are those of the encoded messages of all workers; {GD} sends 32 bits a number."
    return f"{asked['problem']} on {asked['data']}: {size}, {terms}, until F - F* <= {asked['target']:g}. {counted}"


def sheet(found: Found) -> Sheet:
    """The table."""
    headings = ("method", "rounds", "uplink bits", f"saved against {GD}", "objective error")
    return Sheet(TITLE, note(found), headings, tuple(_row(one) for one in found["methods"]))


def _row(one: Found) -> tuple[Cell, ...]:
    saved = formatting.NOTHING if one["saved"] is None else f"{one['saved']:.2%}"
    short = "" if one["reached"] else "not reached"
    error = one["objective_error"]
    written = "infinite" if error is None else f"{error:.2e}"
    return (
        Cell(one["method"]),
        Cell(formatting.count(one["rounds"]), short),
        Cell(formatting.count(one["uplink_bits"])),
        Cell(saved),
        Cell(written),
    )


def show(console: Console, found: Found) -> None:
    """Print the table and the verdict."""
    made = sheet(found)
    console.print(Text(made.title, style="bold"))
    console.print(Text(made.note, style="dim"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    names = [_broken(row[0].text) for row in made.rows]
    table.add_column(made.columns[0], min_width=max(map(_longest, names), default=0), overflow="fold")
    for heading in made.columns[1:]:
        table.add_column(NARROW.get(heading, heading), justify="right", overflow="fold")
    for name, row in zip(names, made.rows, strict=True):
        table.add_row(name, *(_text(cell) for cell in row[1:]))
    console.print(table)
    console.print()
    console.print(Text(results.verdict(found["methods"], found["target"]), style="bold"))


LONG_NAME = 30
NARROW = {f"saved against {GD}": f"saved\nagainst {GD}", "objective error": "objective\nerror"}


def _broken(name: str) -> str:
    """A long name on several lines: an option a line, or cut after its first bracket."""
    if len(name) <= LONG_NAME:
        return name
    return name.replace(", ", ",\n  ") if ", " in name else name.replace("(", "(\n  ", 1)


def _longest(name: str) -> int:
    return min(LONG_NAME, max(map(len, name.splitlines())))


def _text(cell: Cell) -> Text:
    shown = Text(cell.text)
    return shown.append(f"\n{cell.range}", style="dim") if cell.range else shown


# The page


def write(folder: Path) -> Path:
    """Make report.html in a folder from its bits.json, and return where it is."""
    found = results.read(folder)
    text = render(
        kicker=f"{found['problem']} · {found['data']} · {formatting.plural(found['workers'], 'worker')}",
        headline=results.verdict(found["methods"], found["target"]),
        deck=tuple(found["warnings"]),
        failures=(),
        sections=[Section(TITLE, (sheet(found),), _plots(found))],
        colours=_colours(found["methods"]),
        facts=_facts(found),
        notices=(),
    )
    return put(folder, text)


def _facts(found: Found) -> list[Fact]:
    machine, versions = found["machine"], found["versions"]
    slack = found["optimum_slack"]
    known = "its gradient was checked" if slack is None else f"at most {slack:.1e} above the least"
    return [
        Fact("Ask again", (shlex.join(found["command"]),), typed=True),
        Fact("Smoothness L", (f"{found['smoothness']:.6g}; steps of 1/L, xi in units of L",)),
        Fact("Optimum F*", (f"{found['optimum']:.12g}, {known}",)),
        Fact("Precision", ("float64, messages float32" if found["float64"] else "float32",)),
        Fact("Workers", ("processes" if found["live"] else "in memory",)),
        Fact("Machine", (f"{machine['processor']}, {formatting.plural(machine['cores'], 'core')}",)),
        Fact("Versions", (", ".join(f"{name} {text}" for name, text in versions.items()),)),
        Fact("Started", (found["started"],)),
    ]


# The plot

LEFT, RIGHT, BETWEEN, TOP, TALL, BOTTOM = 0.65, 2.1, 0.3, 0.3, 2.6, 0.42


def _colours(methods: Sequence[Found]) -> dict[str, str]:
    names = dict.fromkeys(str(one["method"]) for one in methods if one["method"] != GD)
    return {GD: plot_style.TEXT} | {
        name: plot_style.RECIPES[place % len(plot_style.RECIPES)] for place, name in enumerate(names)
    }


def _plots(found: Found) -> tuple[Plot, ...]:
    drawn = [one for one in found["methods"] if _points(one, "rounds")]
    if not drawn:
        return ()
    paint = partial(_paint, drawn=drawn, target=found["target"])
    return (Plot(TITLE, Markup(plot_style.draw("bits", plot_style.WIDTH, TOP + TALL + BOTTOM, paint)), CAPTION),)


def _points(one: Found, across: str) -> list[tuple[float, float]]:
    curve = one["curve"]
    log = across == "bits"
    return [(x, y) for x, y in zip(curve[across], curve["errors"], strict=True) if y > 0 and (x > 0 or not log)]


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(value: float, _place: object = None) -> str:
    """A power of ten as it is written."""
    return f"10{str(round(math.log10(value))).translate(RAISED)}" if value > 0 else ""


def _paint(figure: Figure, drawn: Sequence[Found], target: float) -> None:
    wide = (plot_style.WIDTH - LEFT - RIGHT - BETWEEN) / 2
    colours = _colours(drawn)
    first: Axes | None = None
    for place, (across, label) in enumerate((("rounds", "rounds"), ("bits", "bits sent by all workers, log scale"))):
        ax = plot_style.axes(figure, LEFT + place * (wide + BETWEEN), TOP, wide, TALL, beside=first)
        first = first or ax
        for one in drawn:
            points = _points(one, across)
            if points:
                ax.plot(*zip(*points, strict=True), color=colours[one["method"]], marker="o", markevery=[-1], ms=3)
        ax.axhline(target, color=plot_style.QUIET, lw=0.8, ls=(0, (4, 3)), zorder=1)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(numticks=8))
        ax.yaxis.set_major_formatter(FuncFormatter(_power))
        ax.yaxis.set_minor_formatter(NullFormatter())
        if across == "bits":
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(_power))
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.tick_params(labelleft=place == 0)
        ax.set_xlabel(label)
    assert first is not None
    first.set_title("Objective error", loc="left", fontweight="bold", fontsize=9)
    ends = [(_points(one, "rounds")[-1][1], plot_style.short(one["method"]), colours[one["method"]]) for one in drawn]
    plot_style.label_ends(ax, ends, TALL)
