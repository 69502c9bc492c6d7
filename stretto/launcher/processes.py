"""The processes of one run: started each in a session of its own, ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec
import psutil

from stretto.errors import LaunchError
from stretto.launcher.process_specs import ProcessSpec
from stretto.membership.loop_positions import LoopPosition
from stretto.membership.worker_status import make_page, read_page

HERE = Path(__file__).resolve().parent
GRACE_S = 0.8
"""Between asking a process to end and killing it."""
LAST_S = 1.0
"""How long the kernel may take to end what was killed."""


@dataclass(frozen=True)
class Exited:
    """A worker has ended, or a server, which has a number below 0; `code` is negative for a signal.

    `struck` says that this launcher has sent it one on purpose. Of a worker that has not `finished` its training, as
    one that calls os._exit, `place` is where it was.
    """

    worker: int
    code: int
    struck: bool = False
    finished: bool = True
    place: LoopPosition = field(default_factory=LoopPosition)

    @property
    def failed(self) -> bool:
        """Whether this is no good end: a server has none while workers run."""
        return self.code != 0 or self.worker < 0 or not self.finished


@dataclass(frozen=True)
class Signalled:
    """The launcher was told to end."""

    number: int


Inbox = SimpleQueue[Exited | Signalled]


class ProcessTable:
    """The workers and servers of one run. Tells the inbox of each exit; `end` leaves no process behind."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._struck: set[subprocess.Popen[bytes]] = set()
        self._warden = _start_warden()

    def start(self, part: ProcessSpec) -> IO[bytes]:
        """Start a process; returns the reading end of its output. Raises LaunchError when the system refuses."""
        page = None
        try:
            page = make_page()
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=part.environment | msgspec.structs.replace(part.config, status_fd=page).environment(),
                pass_fds=[*part.fds, page],
                start_new_session=True,
            )
        except OSError as error:
            if page is not None:
                os.close(page)
            raise LaunchError(f"{part} cannot be started: {error.strerror}") from error
        self._tell_warden(f"+{process.pid}\n")
        self._alive[part.number] = process
        threading.Thread(target=self._await, args=(part.number, process, page), daemon=True).start()
        assert process.stdout is not None
        return process.stdout

    def _await(self, worker: int, process: subprocess.Popen[bytes], page: int) -> None:
        """Tell of the end of a process, but leave it unreaped: its number names its group until `bury`."""
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        finished, place = read_page(page)
        os.close(page)
        self._inbox.put(Exited(worker, code, process in self._struck, finished or worker < 0, place))

    def bury(self, worker: int) -> None:
        """Kill what an ended worker has left running, and reap it."""
        process = self._alive.pop(worker)
        _kill_group(process)
        process.wait()
        self._tell_warden(f"-{process.pid}\n")

    def strike(self, number: int, what: signal.Signals) -> None:
        """Send a signal to one process, not to what it has started."""
        process = self._alive[number]
        self._struck.add(process)
        os.kill(process.pid, what)

    def is_stopped(self, number: int) -> bool:
        """Whether a process stands still, as SIGSTOP has it."""
        try:
            return bool(psutil.Process(self._alive[number].pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def kill(self, number: int) -> None:
        """End one process at once; what becomes of it comes with its end."""
        os.kill(self._alive[number].pid, signal.SIGKILL)

    def end(self) -> None:
        """End all: ask, wait for `GRACE_S` or the next signal, kill."""
        for process in self._alive.values():
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)
        self._bury_until(time.monotonic() + GRACE_S)
        for process in self._alive.values():
            _kill_group(process)
        self._bury_until(time.monotonic() + LAST_S, heed_signals=False)
        self._dismiss_warden()

    def _bury_until(self, limit: float, heed_signals: bool = True) -> None:
        while self._alive:
            try:
                news = self._inbox.get(timeout=max(0.0, limit - time.monotonic()))
            except Empty:
                return
            if isinstance(news, Exited):
                self.bury(news.worker)
            elif heed_signals:
                return

    def _tell_warden(self, line: str) -> None:
        assert self._warden.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._warden.stdin.fileno(), line.encode())

    def _dismiss_warden(self) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._warden.wait(timeout=LAST_S)


def _start_warden() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(HERE / "orphan_reaper.py")]
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
