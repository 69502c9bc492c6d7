"""Starts the simulations of a sweep as processes, so many at once, and ends all of them when it is told to stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stretto.errors import LaunchError
from stretto.launcher.signals import handled

COMMAND = (sys.executable, "-P", "-m", "stretto.cli", "simulate")
"""What starts a simulation: this program itself, with nothing of the folder it is started in."""

LOOK_S = 0.1
PATIENCE_S = 5.0
LAST_LINES = 20
OURS = "stretto: "


@dataclass(frozen=True)
class Task:
    """One process to run: what it is called, its command, the folder that it makes."""

    name: str
    command: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        """What the process says, beside the folder, which it wants to find empty."""
        return self.folder.with_name(f"{self.folder.name}.log")


class Teller(Protocol):
    """Who is told what begins, and how it ended: an error, or None."""

    def begin(self, task: Task) -> None: ...
    def end(self, task: Task, error: str | None) -> None: ...


@dataclass(frozen=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]


def carry_out(tasks: Sequence[Task], jobs: int, teller: Teller) -> None:
    """Run all tasks, at most so many at once, in their order. One that fails does not stop the others.

    Each process has one thread to compute with. After SIGINT, SIGTERM or SIGHUP all are ended, each by its id, and
    KeyboardInterrupt is raised; they are ended too when the teller raises.
    """
    waiting, running, told = deque(tasks), list[_Running](), list[int]()
    with handled(told.append):
        try:
            while (waiting or running) and not told:
                while waiting and len(running) < jobs:
                    teller.begin(waiting[0])
                    running.append(_begin(waiting.popleft()))
                _look(running)
                for one in [one for one in running if one.process.returncode is not None]:
                    running.remove(one)
                    teller.end(one.task, _error(one))
        finally:
            _end(running)
    if told:
        raise KeyboardInterrupt


def _begin(task: Task) -> _Running:
    """Start it in a process group of its own, so that Ctrl-C reaches it through us alone. What is half done goes."""
    shutil.rmtree(task.folder, ignore_errors=True)
    try:
        task.folder.parent.mkdir(exist_ok=True)
        with task.log.open("wb") as log:
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
    except OSError as error:
        raise LaunchError(f"{task.name} cannot be started: {error}") from error
    return _Running(task, process)


def _look(running: Sequence[_Running]) -> None:
    """Wait a moment for the one that began first, and see which have ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        running[0].process.wait(LOOK_S)
    for one in running:
        one.process.poll()


def _end(running: Sequence[_Running]) -> None:
    """End what still runs: ask all first, and kill those that have not gone after a while."""
    for one in running:
        one.process.terminate()
    try:
        for one in running:
            one.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        for one in running:
            one.process.kill()
            one.process.wait()


def _error(one: _Running) -> str | None:
    """Why a process failed, as it said itself: from its last error on, or its last lines."""
    code = one.process.returncode
    if code == 0:
        return None
    said = one.task.log.read_text(errors="replace").rstrip()
    found = said.rfind(f"\n{OURS}") + 1 if not said.startswith(OURS) else 0
    lines = said[found:].removeprefix(OURS).splitlines()
    last = lines[:LAST_LINES] if said[found:].startswith(OURS) else lines[-LAST_LINES:]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "\n".join(last) or f"it ended with {how} and said nothing"
