"""Processes on this machine: each is started in a session of its own and ended with its whole process group."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import IO

import msgspec
import psutil

from stretto.errors import LaunchError
from stretto.launcher.engines.interface import Exited, Inbox, Signalled
from stretto.launcher.process_specs import ProcessSpec
from stretto.membership.worker_status import KeptModel, ProcessRecord, ask_for_model, make_record, read_record

ORPHAN_REAPER = Path(__file__).resolve().parents[1] / "orphan_reaper.py"
GRACE_S = 0.8
"""Time between SIGTERM and SIGKILL."""
LAST_S = 1.0
"""Limit of the wait for killed processes."""
ASKED_S, WRITING_S = 5.0, 60.0
"""Time in which a process begins to write the model that it keeps, and in which it writes the model."""
LOOK_S = 0.02


class LocalProcess:
    """A process of this machine. Its record is in memory that it shares with the launcher."""

    def __init__(self, process: subprocess.Popen[bytes], record: int, on_release: Callable[[], None]) -> None:
        self.pid = process.pid
        self.is_injected = self.is_released = False
        self._process, self._record, self._on_release = process, record, on_release
        self._last = ProcessRecord()
        self._lock = threading.Lock()

    @property
    def output(self) -> IO[bytes]:
        """Reading end of the output."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self) -> int:
        """Wait for the exit and return its code, but do not reap: the id names the process group until `release`."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def record(self) -> ProcessRecord:
        """Return the newest record of the process."""
        with self._lock:
            if not self.is_released:
                self._last = read_record(self._record)
        return self._last

    def ask_for_model(self) -> KeptModel:
        """Ask the process to write the model that it keeps, and return the state of the model."""
        state = self.record().model
        with self._lock:
            if self.is_released:
                return KeptModel.WRITTEN
            if state == KeptModel.UNWRITTEN:
                ask_for_model(self._record)
        return state

    def is_stopped(self) -> bool:
        """Return True if the process is stopped, as by SIGSTOP."""
        try:
            return not self.is_released and bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def inject(self, number: signal.Signals) -> None:
        """Send a signal to this process, to inject a fault."""
        self.is_injected = True
        self.send(number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process was reaped and its number may be another process's."""
        if not self.is_released:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and all of its group. Only before `release`, or within."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Kill the remaining processes of the group, and reap the process."""
        self.record()
        with self._lock:
            if self.is_released:
                return
            self.is_released = True
            os.close(self._record)
        self.kill_group()
        self._process.wait()
        self._on_release()


class LocalEngine:
    """Engine of processes on this machine."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._running: list[LocalProcess] = []
        self._reaper = _start_reaper()

    def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start a process. Raises LaunchError if the system refuses."""
        try:
            record = make_record(spec.config.keys)
        except OSError as error:
            raise LaunchError(_refused(spec, error)) from error
        config = msgspec.structs.replace(spec.config, status_fd=record, keys=None)
        try:
            opened = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=spec.environment | config.environment(),
                pass_fds=[*spec.fds, record],
                cwd=spec.workdir,
                start_new_session=True,
            )
        except OSError as error:
            os.close(record)
            raise LaunchError(_refused(spec, error)) from error
        self._notify_reaper(f"+{opened.pid}\n")
        process = LocalProcess(opened, record, lambda: self._notify_reaper(f"-{opened.pid}\n"))
        self._running = [*self._unreleased(), process]
        threading.Thread(target=self._await, args=(spec.number, process), daemon=True).start()
        return process

    def capacity(self) -> int | None:
        """Return None: the system starts as many processes as it has memory for."""
        return None

    def close(self) -> None:
        """End all processes: SIGTERM, a wait of GRACE_S or until the next signal, SIGKILL.

        Before that, a process that keeps a model in memory alone writes it, unless it is stopped.
        """
        began = time.monotonic()
        while states := {one.ask_for_model() for one in self._running if not one.is_stopped()} - {KeptModel.WRITTEN}:
            limit_s = WRITING_S if KeptModel.WRITING in states else ASKED_S
            now = time.monotonic()
            if now - began > limit_s or self._release_next(now + LOOK_S):
                break
        for process in self._unreleased():
            process.send(signal.SIGTERM)
            process.send(signal.SIGCONT)
        self._release_until(time.monotonic() + GRACE_S)
        for process in self._unreleased():
            process.kill_group()
        self._release_until(time.monotonic() + LAST_S, heed_signals=False)
        self._end_reaper()

    def _await(self, number: int, process: LocalProcess) -> None:
        code = process.wait()
        self._inbox.put(Exited(number, code, process.is_injected, process.record(), process))

    def _unreleased(self) -> list[LocalProcess]:
        return [process for process in self._running if not process.is_released]

    def _release_until(self, limit: float, heed_signals: bool = True) -> None:
        """Release processes as they exit."""
        while self._unreleased() and time.monotonic() < limit:
            if self._release_next(limit) and heed_signals:
                return

    def _release_next(self, limit: float) -> bool:
        """Release the next process that exits, if one does in time. Return True for a signal to the launcher."""
        try:
            news = self._inbox.get(timeout=max(0.0, limit - time.monotonic()))
        except Empty:
            return False
        if isinstance(news, Exited) and news.process is not None:
            news.process.release()
        return isinstance(news, Signalled)

    def _notify_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            os.write(self._reaper.stdin.fileno(), line.encode())

    def _end_reaper(self) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(timeout=LAST_S)


def _start_reaper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(ORPHAN_REAPER)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"no process can be started: {error.strerror}") from error


def _refused(spec: ProcessSpec, error: OSError) -> str:
    advice = "; type `ulimit -n 65536` before stretto run" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{spec} cannot be started: {error.strerror}{advice}"
