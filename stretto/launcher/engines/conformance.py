"""Conformance test of an engine: `check_engine(make)` starts, stops and kills processes, and raises AssertionError."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

from stretto.launcher.engines.interface import Engine, Exited, Inbox, Process
from stretto.launcher.process_specs import ProcessSpec
from stretto.process_config import WorkerConfig

LIMIT_S = 30.0
"""Limit of each wait; an engine that needs longer fails the test."""
CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True)\n"


def check_engine(make: Callable[[Inbox], Engine]) -> None:
    """Raise AssertionError unless the engine that `make` returns for an inbox behaves as the interface says.

    Exits with code 0, with another code and by a signal are reported with the process that exited, the last record and
    the output; a process is stopped, continued and killed; calls after an exit do nothing; `release` and `close` are
    idempotent and leave no process of a group running.
    """
    for check in (_check_exits, _check_stopped, _check_children, _check_close):
        trial = _Trial(make)
        try:
            check(trial)
        finally:
            trial.close()


class _Trial:
    """An engine, its inbox, and the processes that it has started."""

    def __init__(self, make: Callable[[Inbox], Engine]) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.engine = make(self.inbox)
        self._started: list[Process] = []

    def start(self, number: int, code: str) -> Process:
        """Start a process that runs a Python program."""
        command = [sys.executable, "-I", "-S", "-c", code]
        spec = ProcessSpec(number, 1, command, dict(os.environ), WorkerConfig(worker=number))
        self._started.append(self.engine.start(spec))
        return self._started[-1]

    def exit(self, process: Process) -> Exited:
        """Return the exit of a process, the first of its reports."""
        try:
            news = self.inbox.get(timeout=LIMIT_S)
        except Empty:
            raise AssertionError(f"an exit was not reported within {LIMIT_S:g} s") from None
        assert isinstance(news, Exited), news
        assert news.process is process, "the report names another process"
        return news

    def close(self) -> None:
        """Close the engine twice, and the outputs."""
        self.engine.close()
        self.engine.close()
        for process in self._started:
            process.output.close()


def _check_exits(trial: _Trial) -> None:
    limit = trial.engine.capacity()
    assert limit is None or limit >= 0, f"the capacity is {limit}"
    for number, (code, exit_code) in enumerate({"print('x')": 0, "raise SystemExit(3)": 3}.items()):
        process = trial.start(number, code)
        end = trial.exit(process)
        assert (end.worker, end.code, end.injected) == (number, exit_code, False), f"{code}: {end}"
        assert not end.record.finished, "a process that noted nothing has not finished"
        assert process.output.read() == (b"x\n" if number == 0 else b"")
        for _ in range(2):
            process.release()
        process.kill()
        assert not process.is_stopped()
        process.record()


def _check_stopped(trial: _Trial) -> None:
    process = trial.start(2, "import time; time.sleep(600)")
    process.inject(signal.SIGSTOP)
    _until(process.is_stopped, "SIGSTOP stops a process")
    process.inject(signal.SIGCONT)
    _until(lambda: not process.is_stopped(), "SIGCONT continues it")
    process.inject(signal.SIGKILL)
    end = trial.exit(process)
    assert (end.code, end.injected) == (-signal.SIGKILL, True), end
    process.release()


def _check_children(trial: _Trial) -> None:
    process = trial.start(0, CHILD)
    child = int(process.output.readline())
    trial.exit(process)
    process.release()
    _until(lambda: not _runs(child), "children of an exited process are killed by release")


def _check_close(trial: _Trial) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + CHILD + "time.sleep(600)"
    process = trial.start(0, stubborn)
    child = int(process.output.readline())
    trial.engine.close()
    _until(lambda: not _runs(child), "close ends the processes that ignore SIGTERM, with their children")


def _until(condition: Callable[[], bool], description: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, f"{description}: not within {LIMIT_S:g} s"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return True while a process of this machine runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
