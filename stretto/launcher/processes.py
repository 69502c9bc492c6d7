"""Processes of a run: each is started in a session of its own and ended with its whole process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec
import psutil

from stretto.errors import LaunchError
from stretto.launcher.process_specs import ProcessSpec
from stretto.membership.worker_status import ProcessRecord, ReportedError, make_record, read_record

FOLDER = Path(__file__).resolve().parent
GRACE_S = 0.8
"""Time between SIGTERM and SIGKILL."""
LAST_S = 1.0
"""Limit of the wait for killed processes."""
FINISHED = ProcessRecord(finished=True)


@dataclass(frozen=True)
class Exited:
    """Exit of a process. Servers and the coordinator have numbers below 0; `code` is negative for a signal.

    `injected` is True if this launcher sent a signal to inject a fault. `record` is the last record of the process;
    `record.finished` is False for a worker that called os._exit in the middle of its training.
    """

    worker: int
    code: int
    injected: bool = False
    record: ProcessRecord = FINISHED

    @property
    def failed(self) -> bool:
        """True unless a worker finished: a server must not exit while workers run."""
        return self.code != 0 or self.worker < 0 or not self.record.finished


@dataclass(frozen=True)
class Signalled:
    """Signal that asks the launcher to end."""

    number: int


Inbox = SimpleQueue[Exited | Signalled]


class ProcessTable:
    """Processes of a run. Each exit is put into the inbox; `end` leaves no process running."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._records: dict[int, int] = {}
        """Descriptors of the records of these processes."""
        self._injected: set[subprocess.Popen[bytes]] = set()
        self._reaper = _start_reaper()

    def start(self, part: ProcessSpec) -> IO[bytes]:
        """Start a process and return the reading end of its output. Raises LaunchError if the system refuses."""
        try:
            record = make_record()
        except OSError as error:
            raise LaunchError(f"{part} cannot be started: {error.strerror}") from error
        try:
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=part.environment | msgspec.structs.replace(part.config, status_fd=record).environment(),
                pass_fds=[*part.fds, record],
                start_new_session=True,
            )
        except OSError as error:
            os.close(record)
            raise LaunchError(f"{part} cannot be started: {error.strerror}") from error
        self._notify_reaper(f"+{process.pid}\n")
        self._alive[part.number], self._records[part.number] = process, record
        threading.Thread(target=self._await, args=(part.number, process, record), daemon=True).start()
        assert process.stdout is not None
        return process.stdout

    def _await(self, worker: int, process: subprocess.Popen[bytes], record: int) -> None:
        """Report the exit of a process, but do not reap it: its id identifies its process group until `reap`."""
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._inbox.put(Exited(worker, code, process in self._injected, read_record(record)))

    def reap(self, worker: int) -> None:
        """Kill what an exited process has left running in its group, and reap it."""
        process = self._alive.pop(worker)
        os.close(self._records.pop(worker))
        _kill_group(process)
        process.wait()
        self._notify_reaper(f"-{process.pid}\n")

    def send(self, number: int, signum: signal.Signals) -> None:
        """Send a signal to one process, not to its group, to inject a fault."""
        process = self._alive[number]
        self._injected.add(process)
        os.kill(process.pid, signum)

    def record(self, number: int) -> ProcessRecord:
        """Return the record of a process that was not reaped."""
        return read_record(self._records[number])

    def errors(self) -> dict[int, ReportedError]:
        """Return the errors that processes have recorded before their exits."""
        records = ((number, self.record(number)) for number in self._records)
        return {number: record.error for number, record in records if record.error is not None}

    def is_stopped(self, number: int) -> bool:
        """Return True if a process is stopped, as by SIGSTOP."""
        try:
            return bool(psutil.Process(self._alive[number].pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def kill(self, number: int) -> None:
        """Kill one process; its exit is reported like any other."""
        os.kill(self._alive[number].pid, signal.SIGKILL)

    def end(self) -> None:
        """End all processes: SIGTERM, a wait of GRACE_S or until the next signal, SIGKILL."""
        for process in self._alive.values():
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)
        self._reap_until(time.monotonic() + GRACE_S)
        for process in self._alive.values():
            _kill_group(process)
        self._reap_until(time.monotonic() + LAST_S, heed_signals=False)
        self._end_reaper()

    def _reap_until(self, limit: float, heed_signals: bool = True) -> None:
        while self._alive:
            try:
                news = self._inbox.get(timeout=max(0.0, limit - time.monotonic()))
            except Empty:
                return
            if isinstance(news, Exited):
                self.reap(news.worker)
            elif heed_signals:
                return

    def _notify_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._reaper.stdin.fileno(), line.encode())

    def _end_reaper(self) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(timeout=LAST_S)


def _start_reaper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(FOLDER / "orphan_reaper.py")]
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


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
