"""Writes the tables of docs/figures.md from the stored results of the benchmarks.

python -m benchmarks figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from benchmarks.tables import TABLES
from benchmarks.tables_of_hosts import ratio

PAGE = Path(__file__).resolve().parents[1] / "docs" / "figures.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
CONTESTS = ("ddp", "line", "averaging")

Record = Mapping[str, Any]


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Replace the part of the page between the two marks by the current tables."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(_page(results))
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")
    print(f"written to {page}")


def _page(results: Path) -> Iterator[str]:
    yield "## Overhead: steps per second beside the same without Stretto"
    yield ""
    yield "| question | case | ratio | wanted | the two sides | command |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in CONTESTS:
        yield from _contest(name, _load(results, name))
    lab = _load(results, "lab")
    yield from _lab(lab) if lab else ["", "The laboratory: not taken yet. `python -m benchmarks lab`"]
    for name, table in TABLES.items():
        stored = _load(results, name)
        yield from table(stored) if stored else ["", f"{name}: not taken yet. `python -m benchmarks {name}`"]
    yield from _machines(results)


def _load(results: Path, name: str) -> Record | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _contest(name: str, record: Record | None) -> Iterator[str]:
    command = f"`python -m benchmarks {name}`"
    if record is None:
        yield f"| {name} | | not taken yet | | | {command} |"
        return
    for case, one in record["cases"].items():
        ours, theirs = list(one["sides"].items())[:2]
        sides = f"{ours[0]} {_speed(ours[1])}, {theirs[0]} {_speed(theirs[1])}"
        speed, wanted = ratio(one["ratio"]), f"at least {one.get('wanted', record['wanted']):g}"
        yield f"| {record['question']} | {case} parameters | {speed} | {wanted} | {sides} | {command} |"
    if "added_us_a_step" in record:
        added = f"{record['added_us_a_step']:.1f} µs added to a step"
        yield f"| the same | an empty loop | | | {added} | {command} |"


def _speed(side: Record) -> str:
    return f"{side['steps_a_second']:.3g} steps/s"


def _lab(record: Record) -> Iterator[str]:
    link = f"{record['hosts']} hosts at {record['link_mbit']:g} Mbit/s"
    yield ""
    yield f"## Seconds to {record['target']:.1%} of MNIST's test images, {link}"
    yield ""
    yield "`python -m benchmarks lab`"
    yield ""
    yield "| way | seconds | ms a step | MB sent a host | speed against | by the step | to the target |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for way, seconds in record["seconds_to_target"].items():
        runs = [run for run in record["runs"] if run["way"] == way]
        sent = sum(sum(run["sent_on_links"]) / len(run["sent_on_links"]) for run in runs) / len(runs) / 1e6
        speed = record["speed_ratios"].get(way)
        against = [speed["against"], _two(speed["a_step"]), _two(speed["to_target"])] if speed else ["", "", ""]
        shown = f"{seconds:.1f}" if seconds else f"not in {record['limit_s']:.0f}"
        yield f"| {way} | {shown} | {record['ms_a_step'][way]:.1f} | {sent:.0f} | {' | '.join(against)} |"
    counts = [run["count_ratio"] for run in record["runs"] if run["count_ratio"]]
    if counts:
        yield ""
        yield (
            f"The links carried {min(counts):.3f} to {max(counts):.3f} times the bytes that Stretto reports: "
            "headers of Ethernet, IP and TCP, and acknowledgements, are the rest."
        )


def _two(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _machines(results: Path) -> Iterator[str]:
    yield ""
    yield "## Machines"
    for name in (*CONTESTS, "lab", *TABLES):
        record = _load(results, name)
        if record is not None:
            one = record["machine"]
            software = f"Python {one['python']}, torch {one['torch']}"
            yield ""
            yield f"{name}: {record['taken'][:10]}, {one['processor']}, {one['cores']} cores, {software}."
