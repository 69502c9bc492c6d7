"""Summary of a finished run on the terminal, its page, and its record as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stretto.checkpoint.model_file import newest, saved_elsewhere
from stretto.errors import LogError, RunFailedError
from stretto.notices import printable
from stretto.report import html_report, staleness_section, traffic
from stretto.report.formatting import count, figure, percent, plural
from stretto.report.incidents import in_lines
from stretto.report.run_log import History, read
from stretto.report.run_record import STANDARD_OUTPUT, record, write_json
from stretto.report.tables import megabytes, share
from stretto.run_dir import section_folders


def conclude(folder: Path, json_to: Path | None, silent: bool) -> None:
    """Write the page of each section and the records as JSON, and print a summary.

    The record of a run of several sections is that of the first, with those of the others in order as `sections`. The
    run has finished: if its page, or the end of its log, could not be written (the folder was removed, or the disk is
    full), a line says so. Raises LogError if the record was requested and cannot be written, and RunFailedError if a
    part of a stream was not trained.
    """
    if json_to is None and not (folder / "run.json").exists():
        print(f"stretto: {_removed(folder)}", file=sys.stderr)
        return
    try:
        _conclude(folder, json_to, silent)
    except LogError as error:
        if json_to is not None:
            raise
        print(f"stretto: the run has finished, but its page cannot be written: {error}", file=sys.stderr)


def _removed(folder: Path) -> str:
    """Return one sentence on a finished run whose folder was removed before its end."""
    model = newest(folder)
    kept_in = f"; the trained model is in {model.path}" if model is not None else ""
    return (
        f"the run has finished{kept_in}. Its folder was removed during the run: there is no log, no summary and no page"
    )


def _conclude(folder: Path, json_to: Path | None, silent: bool) -> None:
    folders = [folder, *section_folders(folder)]
    histories = [read(section) for section in folders]
    records = [record(section) for section in folders]
    for one, history in zip(records, histories, strict=True):
        if not history.ended and not history.of("error"):
            one["failed"] = None
    first, *further = records
    to_standard_output = str(json_to) == STANDARD_OUTPUT
    lines = [
        line
        for number, of_one in enumerate(zip(records, histories, strict=True), 1)
        for line in _section(*of_one, number if further else 0)
    ]
    model = newest(folder)
    if (model is None or not model.is_complete) and (elsewhere := saved_elsewhere(folder)) is not None:
        lines.append(f"model: {elsewhere}")
    elif model is not None:
        lines.append(f"model: {model.path}" if model.is_complete else str(model))
    if not silent:
        print(printable("\n".join(lines)), file=sys.stderr if to_standard_output else sys.stdout)
    if json_to is not None:
        write_json(json_to, first | {"sections": further} if further else first)
    if lost := [f"epoch {event['epoch']}: {event['text']}" for one in histories for event in one.of("batches_lost")]:
        raise RunFailedError("\n  ".join(["the run has ended, and a part of a stream was not trained", *lost]), folder)


def _section(record: dict[str, Any], history: History, number: int) -> list[str]:
    """Write the page of a section and return its summary; `number` is 0 for the only section of a run."""
    try:
        page = f"page: {html_report.write(Path(record['folder']))}"
    except LogError as error:
        page = f"no page: {error}"
    title = [f"section {number}"] if number else []
    if not history.ended:
        step = max([record["steps"], *(int(event.get("step") or 0) for event in history.counted)])
        title.append(f"the end of the log could not be written: these numbers are those up to step {step}")
    return [*title, *_summary(record), *in_lines(history), page]


def _summary(record: dict[str, Any]) -> list[str]:
    """Return a run in three lines, and one more each for an encoding and for staleness."""
    speed = f"{html_report.trained(record)}, {count(record['samples_per_second'])} samples/s"
    metrics = ", ".join(f"{name} {figure(value)}" for name, value in record["metrics"].items())
    waiting, sent = percent(share(record, "waiting")), figure(megabytes(record, "sent"))
    cost = f"waiting {waiting} of the time, {sent} MB sent per worker in {plural(record['rounds'], 'round')}"
    name = f"{record['recipe']}, {plural(record['workers'], 'worker')}"
    lines = [f"{name}: {speed}", metrics]
    if record["is_complete"]:
        lines += [cost, traffic.summary(record), staleness_section.summary(record)]
    return [line for line in lines if line]
