"""Process pool of a sweep: runs a limited number of simulations concurrently, and ends all of them on a signal."""

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
"""Command that starts a simulation: this program, without the working directory in sys.path."""

POLL_S = 0.1
EXIT_TIMEOUT_S = 5.0
LAST_LINES = 20
ERROR_PREFIX = "stretto: "


@dataclass(frozen=True)
class Task:
    """One process to run: its name, its command, and the folder that it creates."""

    name: str
    command: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        """File of the process's output, beside the folder, which must be empty at the start."""
        return self.folder.with_name(f"{self.folder.name}.log")


class Observer(Protocol):
    """Observer of the starts and ends of tasks; `error` is None for success."""

    def begin(self, task: Task) -> None: ...
    def end(self, task: Task, error: str | None) -> None: ...


@dataclass(frozen=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]


def run_tasks(tasks: Sequence[Task], jobs: int, observer: Observer) -> None:
    """Run all tasks in their order, at most `jobs` concurrently. A failed task does not stop the others.

    Each process computes with one thread. After SIGINT, SIGTERM or SIGHUP all processes are ended, each by its id, and
    KeyboardInterrupt is raised; they are also ended if the observer raises.
    """
    waiting, running, signals = deque(tasks), list[_Running](), list[int]()
    with handled(signals.append):
        try:
            while (waiting or running) and not signals:
                while waiting and len(running) < jobs:
                    observer.begin(waiting[0])
                    running.append(_start(waiting.popleft()))
                _poll(running)
                for entry in [entry for entry in running if entry.process.returncode is not None]:
                    running.remove(entry)
                    observer.end(entry.task, _error(entry))
        finally:
            _terminate(running)
    if signals:
        raise KeyboardInterrupt


def _start(task: Task) -> _Running:
    """Start a task in its own process group, which Ctrl-C does not reach directly, after deleting its old folder."""
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


def _poll(running: Sequence[_Running]) -> None:
    """Wait up to POLL_S for the first process, and update the exit codes of all."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        running[0].process.wait(POLL_S)
    for entry in running:
        entry.process.poll()


def _terminate(running: Sequence[_Running]) -> None:
    """Terminate all running processes, and kill them if they have not exited after EXIT_TIMEOUT_S."""
    for entry in running:
        entry.process.terminate()
    try:
        for entry in running:
            entry.process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for entry in running:
            entry.process.kill()
            entry.process.wait()


def _error(entry: _Running) -> str | None:
    """Return the error of a failed process: its output from its last error on, or its last lines; None for success."""
    code = entry.process.returncode
    if code == 0:
        return None
    output = entry.task.log.read_text(errors="replace").rstrip()
    error_start = output.rfind(f"\n{ERROR_PREFIX}") + 1 if not output.startswith(ERROR_PREFIX) else 0
    lines = output[error_start:].removeprefix(ERROR_PREFIX).splitlines()
    last = lines[:LAST_LINES] if output[error_start:].startswith(ERROR_PREFIX) else lines[-LAST_LINES:]
    status = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "\n".join(last) or f"the process ended with {status} without output"
