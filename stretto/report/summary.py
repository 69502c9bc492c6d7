"""What a person is told when a run is over, and the record for a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stretto.errors import LogError
from stretto.report import html_report
from stretto.report.formatting import count, figure, percent, plural, seconds
from stretto.report.incidents import in_lines
from stretto.report.run_log import read
from stretto.report.run_record import STANDARD_OUTPUT, record, write_json
from stretto.report.staleness_section import in_words
from stretto.report.tables import megabytes, share
from stretto.report.traffic import in_words as encoded
from stretto.run_dir import section_folders


def conclude(folder: Path, json_to: Path | None, silent: bool) -> None:
    """Write the page of each section and the records as JSON, and print a summary of both.

    The record of a run of several sections is that of the first, with those of the others in order as `sections`. A run
    whose folder was removed, or is on a full disk, has come to its end all the same: that is said, and no more, unless
    the record was asked for.
    """
    try:
        _conclude(folder, json_to, silent)
    except LogError as error:
        if json_to is not None:
            raise
        print(f"stretto: the run has come to its end, but has no page: {error}", file=sys.stderr)


def _conclude(folder: Path, json_to: Path | None, silent: bool) -> None:
    found, *others = records = [record(one) for one in (folder, *section_folders(folder))]
    here = str(json_to) == STANDARD_OUTPUT
    lines = [line for number, one in enumerate(records, 1) for line in _section(one, number if others else 0)]
    if not silent:
        print("\n".join(lines), file=sys.stderr if here else sys.stdout)
    if json_to is not None:
        write_json(json_to, found | {"sections": others} if others else found)


def _section(found: dict[str, Any], number: int) -> list[str]:
    """Write the page of a section, and return its lines. The only one of its run has the `number` 0."""
    folder = Path(found["folder"])
    written = html_report.write(folder)
    title = [f"section {number}"] if number else []
    return [*title, *_summary(found), *in_lines(read(folder)), f"page: {written}"]


def _summary(found: dict[str, Any]) -> list[str]:
    """A run in three lines, and one more each where it encoded something or was asynchronous."""
    speed = (
        f"{seconds(found['seconds'])} of {html_report.of_what(found)}, {count(found['samples_per_second'])} samples/s"
    )
    metrics = ", ".join(f"{name} {figure(value)}" for name, value in found["metrics"].items())
    waiting, sent = percent(share(found, "waiting")), figure(megabytes(found["bytes_sent"]))
    cost = f"waiting {waiting} of the time, {sent} MB sent per worker in {plural(found['rounds'], 'round')}"
    name = f"{found['recipe']}, {plural(found['workers'], 'worker')}"
    lines = [f"{name}: {speed}", metrics, cost, encoded(found), in_words(found)]
    return [line for line in lines if line]
