"""Writes docs/experiments.md and its plots from the saved results.

python -m experiments page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import RESULTS, Experiment
from experiments.runs import ROOT, Found

PAGE = ROOT / "docs" / "experiments.md"
PICTURES = "experiments"
BEGIN, END = "<!-- experiments: begin -->", "<!-- experiments: end -->"


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Replace the text between the marks, and write the plots beside the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    pictures = page.parent / PICTURES
    pictures.mkdir(exist_ok=True)
    lines: list[str] = []
    for experiment in EXPERIMENTS.values():
        found = experiment.kept(results)
        lines += _section(experiment, found)
        if found is not None:
            (pictures / f"{experiment.name}.svg").write_text(experiment.picture(found))
    text = "\n".join(lines)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _section(experiment: Experiment, found: Found | None) -> Iterator[str]:
    yield f"\n## {experiment.title}\n"
    yield f"Claim: {experiment.claim}\n"
    if found is None:
        yield f"No results yet. `python -m experiments {experiment.name}`\n"
        return
    yield f"**Here:** {experiment.verdict(found)}\n"
    yield f"{experiment.setting} `python -m experiments {experiment.name}`\n"
    yield from experiment.table(found)
    yield f"\n![{experiment.title}]({PICTURES}/{experiment.name}.svg)\n"
    yield from _commands(found)


def _commands(found: Found) -> Iterator[str]:
    """Yield the command lines of the lowest seed, and the list of seeds."""
    seeds = sorted({one["seed"] for one in found["points"]})
    first = [one["command"] for one in found["points"] if one["seed"] == seeds[0]]
    yield f'<details markdown="1"><summary>Command lines, with --seed {", ".join(map(str, seeds))}</summary>\n'
    yield "```sh"
    yield from first
    yield "```\n"
    yield "</details>\n"
