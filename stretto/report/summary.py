"""What a person is told when a run is over, and the record for a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stretto.report import page
from stretto.report.accounts import in_words as encoded
from stretto.report.asynchronous import in_words
from stretto.report.fates import in_lines
from stretto.report.figures import count, figure, percent, plural, seconds
from stretto.report.history import read
from stretto.report.record import STANDARD_OUTPUT, record, write_json
from stretto.report.table import megabytes, share


def conclude(folder: Path, json_to: Path | None, silent: bool) -> None:
    """The record as JSON, the page, and a summary of both."""
    found = record(folder)
    written = page.write(folder)
    here = str(json_to) == STANDARD_OUTPUT
    if not silent:
        print(
            "\n".join([*_summary(found), *in_lines(read(folder)), f"page: {written}"]),
            file=sys.stderr if here else sys.stdout,
        )
    if json_to is not None:
        write_json(json_to, found)


def _summary(found: dict[str, Any]) -> list[str]:
    """A run in three lines, and one more each where it encoded something or was asynchronous."""
    speed = f"{seconds(found['seconds'])} of {page.of_what(found)}, {count(found['samples_per_second'])} samples/s"
    metrics = ", ".join(f"{name} {figure(value)}" for name, value in found["metrics"].items())
    waiting, sent = percent(share(found, "waiting")), figure(megabytes(found["bytes_sent"]))
    cost = f"waiting {waiting} of the time, {sent} MB sent per worker in {plural(found['rounds'], 'round')}"
    name = f"{found['recipe']}, {plural(found['workers'], 'worker')}"
    lines = [f"{name}: {speed}", metrics, cost, encoded(found), in_words(found)]
    return [line for line in lines if line]
