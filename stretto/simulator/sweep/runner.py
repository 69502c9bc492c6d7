"""Runs the simulations of a sweep, each in its own process, and writes their records and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from stretto.errors import LaunchError, LogError, explain
from stretto.report import formatting
from stretto.report.run_record import Record, write_json
from stretto.run_dir import describe, make_folder
from stretto.simulator.sweep import results
from stretto.simulator.sweep.grid import Point, SweepConfig, points
from stretto.simulator.sweep.progress import Progress
from stretto.simulator.sweep.worker_pool import COMMAND, Task, run_tasks

__all__ = ["SweepConfig", "run"]


def run(config: SweepConfig, say: Callable[[str], None], command: Sequence[str] = COMMAND) -> Path:
    """Run the simulations of a grid, write sweep.json and report.html, and return their folder.

    A folder with the same unfinished sweep is continued: complete points are kept, the others run again. Raises
    LaunchError or RecipeError before any simulation starts, LaunchError at the end if points failed, and
    KeyboardInterrupt after SIGINT, SIGTERM or SIGHUP; complete points are kept.
    """
    grid, jobs, definition = points(config), config.concurrency(), config.asked()
    folder, head = _folder(config, definition)
    sweep = _Sweep(config, grid, folder, head)
    progress = Progress(Console(stderr=True), len(grid), jobs, say, config.quiet)
    try:
        sweep.run(jobs, command, progress)
    except KeyboardInterrupt:
        completed = f"{len(sweep.records)} of {formatting.plural(len(grid), 'point')} are done"
        say(f"{completed}; the same command with --out {folder} continues the sweep")
        raise
    finally:
        progress.close()
    _finish(config, folder, say)
    return folder


def _finish(config: SweepConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Write the report, show its sentences, write the JSON records; raise LaunchError if points failed."""
    from stretto.simulator.sweep import report

    sweep = results.read(folder)
    for text in (*report.sentences(sweep), f"page: {report.write(folder)}"):
        say(text)
    if config.json_to is not None:
        write_json(config.json_to, [{**record, "folder": str(folder / record["folder"])} for record in sweep["points"]])
    _check_failed(sweep["points"], folder)


def _folder(config: SweepConfig, definition: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder, new or to be continued, and the head of its sweep.json."""
    now = datetime.now()
    if config.out is not None and (config.out / results.NAME).exists():
        head = results.read(config.out)
        _check_same(head["asked"], definition, config.out)
        return config.out, {**head, "asked": definition}
    return make_folder(f"sweep-{config.config.name}", config.out, now), describe({"asked": definition}, now)


def _check_same(previous: Mapping[str, Any], definition: Mapping[str, Any], folder: Path) -> None:
    """Raise LaunchError unless a folder holds the points of this sweep; the target may differ."""
    for key, value in definition.items():
        if key != "target" and previous.get(key) != value:
            problem, got = f"{folder} holds another sweep: its {key} differs", f"{key} {value}"
            expected = f"{key} {previous.get(key)}, to continue that sweep, or a new or empty folder"
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"--out {folder}-2"))


def _check_failed(records: Sequence[Record], folder: Path) -> None:
    failed = [record for record in records if record["failed"]]
    if failed:
        count = f"{len(failed)} of {formatting.plural(len(records), 'point')} failed"
        raise LaunchError(f"{count}; the same command with --out {folder} runs them again")


class _Sweep:
    """The points of a grid in a folder; `records` holds those of the points that have ended, by name."""

    def __init__(self, config: SweepConfig, grid: Sequence[Point], folder: Path, head: dict[str, Any]) -> None:
        self._config, self._folder, self._head = config, folder, head
        self._points, self._target = {point.name: point for point in grid}, config.parsed_target()
        self.records: dict[str, Record] = {}

    def run(self, jobs: int, command: Sequence[str], progress: Progress) -> None:
        """Run the incomplete points. A target whose metric no evaluation has ends the sweep after the first point."""
        self._progress = progress
        for point in self._points.values():
            if (self._folder_of(point) / results.COMPLETE_MARK).exists() and not (record := self._record_of(point))[
                "failed"
            ]:
                self.records[point.name] = record
        self._save()
        self._check_target()
        progress.completed_before(len(self.records))
        pending = [point for point in self._points.values() if point.name not in self.records]
        tasks = [self._task(point, command) for point in pending]
        run_tasks(tasks, jobs, self)

    def begin(self, task: Task) -> None:
        """Report that a point has started."""
        self._progress.begin(task.name)

    def end(self, task: Task, error: str | None) -> None:
        """Record that a point has ended: it is complete, or failed with an error."""
        point = self._points[task.name]
        record = results.failed(point, error) if error else self._record_of(point)
        if not record["failed"]:
            (task.folder / results.COMPLETE_MARK).touch()
        self.records[point.name] = record
        self._save()
        self._progress.end(task.name, record)
        self._check_target()

    def _record_of(self, point: Point) -> Record:
        try:
            record = results.measured(point, self._folder_of(point), self._target)
        except LogError as error:
            return results.failed(point, str(error))
        return results.failed(point, record["failed"]) if record["failed"] else record

    def _task(self, point: Point, command: Sequence[str]) -> Task:
        folder = self._folder_of(point)
        return Task(point.name, (*command, *point.words(self._config, folder)), folder)

    def _folder_of(self, point: Point) -> Path:
        return self._folder / results.POINTS / point.name

    def _save(self) -> None:
        """Write the records so far, in the order of the grid."""
        results.save(self._folder, self._head, [self.records[name] for name in self._points if name in self.records])

    def _check_target(self) -> None:
        """Raise LaunchError if a complete point's evaluations do not have the metric of the target."""
        complete = [record for record in self.records.values() if not record["failed"]]
        if self._target and complete:
            self._target.check(complete[0]["metrics"])
