"""A grid of simulations, each a process, as many at once as there are cores, and one report of all of them."""

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
from stretto.simulator.sweep.grid import Point, SweepOrder, points
from stretto.simulator.sweep.progress import Progress
from stretto.simulator.sweep.worker_pool import COMMAND, Task, carry_out

__all__ = ["SweepOrder", "run"]


def run(order: SweepOrder, say: Callable[[str], None], command: Sequence[str] = COMMAND) -> Path:
    """Run the simulations of a grid, write sweep.json and report.html, and return the folder of both.

    A folder that holds the same sweep unfinished is gone on with: points that are whole are kept, the others run anew.
    Raises LaunchError or RecipeError before anything is started, LaunchError after all is written when points failed,
    and KeyboardInterrupt after SIGINT, SIGTERM or SIGHUP; what is whole by then stays.
    """
    grid, jobs, asked = points(order), order.at_once(), order.asked()
    folder, head = _folder(order, asked)
    sweep = _Sweep(order, grid, folder, head)
    progress = Progress(Console(stderr=True), len(grid), jobs, say, order.quiet)
    try:
        sweep.make(jobs, command, progress)
    except KeyboardInterrupt:
        done = f"{len(sweep.found)} of {formatting.plural(len(grid), 'point')} are done"
        say(f"{done}; the same command with --out {folder} goes on")
        raise
    finally:
        progress.close()
    _conclude(order, folder, say)
    return folder


def _conclude(order: SweepOrder, folder: Path, say: Callable[[str], None]) -> None:
    """The page, the sentences and the JSON; an error last when points failed."""
    from stretto.simulator.sweep import report

    found = results.read(folder)
    for text in (*report.sentences(found), f"page: {report.write(folder)}"):
        say(text)
    if order.json_to is not None:
        write_json(order.json_to, [{**one, "folder": str(folder / one["folder"])} for one in found["points"]])
    _check_failed(found["points"], folder)


def _folder(order: SweepOrder, asked: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder, new or to go on in, and what its sweep.json begins with."""
    now = datetime.now()
    if order.out is not None and (order.out / results.NAME).exists():
        head = results.read(order.out)
        _check_same(head["asked"], asked, order.out)
        return order.out, {**head, "asked": asked}
    return make_folder(f"sweep-{order.order.name}", order.out, now), describe({"asked": asked}, now)


def _check_same(before: Mapping[str, Any], asked: Mapping[str, Any], folder: Path) -> None:
    """Whether the points in a folder are those that are asked for. The target may differ: it changes no point."""
    for key, value in asked.items():
        if key != "target" and before.get(key) != value:
            problem, got = f"{folder} holds another sweep: its {key} is not the same", f"{key} {value}"
            expected = f"{key} {before.get(key)}, to go on with that sweep, or a folder that is new or empty"
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"--out {folder}-2"))


def _check_failed(found: Sequence[Record], folder: Path) -> None:
    bad = [one for one in found if one["failed"]]
    if bad:
        count = f"{len(bad)} of {formatting.plural(len(found), 'point')} failed"
        raise LaunchError(f"{count}; the same command with --out {folder} tries them again")


class _Sweep:
    """The points of a grid in a folder; `found` has the records of those that have ended, by name."""

    def __init__(self, order: SweepOrder, grid: Sequence[Point], folder: Path, head: dict[str, Any]) -> None:
        self._order, self._folder, self._head = order, folder, head
        self._points, self._target = {point.name: point for point in grid}, order.goal()
        self.found: dict[str, Record] = {}

    def make(self, jobs: int, command: Sequence[str], progress: Progress) -> None:
        """Run what is not whole yet. A target that no evaluation knows of ends it after the first point."""
        self._progress = progress
        for point in self._points.values():
            if (self._at(point) / results.WHOLE).exists() and not (found := self._measured(point))["failed"]:
                self.found[point.name] = found
        self._save()
        self._check_target()
        progress.kept(len(self.found))
        left = [point for point in self._points.values() if point.name not in self.found]
        tasks = [self._task(point, command) for point in left]
        carry_out(tasks, jobs, self)

    def begin(self, task: Task) -> None:
        """A point begins."""
        self._progress.begin(task.name)

    def end(self, task: Task, error: str | None) -> None:
        """A point has ended: it is whole, or marked failed with its error."""
        point = self._points[task.name]
        found = results.failed(point, error) if error else self._measured(point)
        if not found["failed"]:
            (task.folder / results.WHOLE).touch()
        self.found[point.name] = found
        self._save()
        self._progress.end(task.name, found)
        self._check_target()

    def _measured(self, point: Point) -> Record:
        try:
            found = results.measured(point, self._at(point), self._target)
        except LogError as error:
            return results.failed(point, str(error))
        return results.failed(point, found["failed"]) if found["failed"] else found

    def _task(self, point: Point, command: Sequence[str]) -> Task:
        folder = self._at(point)
        return Task(point.name, (*command, *point.words(self._order, folder)), folder)

    def _at(self, point: Point) -> Path:
        return self._folder / results.POINTS / point.name

    def _save(self) -> None:
        """Write what is known, in the order of the grid."""
        results.save(self._folder, self._head, [self.found[name] for name in self._points if name in self.found])

    def _check_target(self) -> None:
        """Once a point is whole: does its script know the metric of the target?"""
        whole = [one for one in self.found.values() if not one["failed"]]
        if self._target and whole:
            self._target.check(whole[0]["metrics"])
