"""The processes of one run: started each in a session of its own, ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from socket import socket
from typing import IO

from stretto.errors import LaunchError
from stretto.launch.order import Order

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE_S = 0.8
"""Between asking a worker to end and killing it."""
LAST_S = 1.0
"""How long the kernel may take to end what was killed."""


@dataclass(frozen=True)
class Exited:
    """A worker has ended; `code` is negative for a signal."""

    worker: int
    code: int


@dataclass(frozen=True)
class Signalled:
    """The launcher was told to end."""

    number: int


Inbox = SimpleQueue[Exited | Signalled]


class Crew:
    """The workers of one run. Tells the inbox of each exit; `end` leaves no process behind."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._warden = _start_warden()

    def start(self, worker: int, order: Order, folder: Path, listener: socket) -> IO[bytes]:
        """Start a worker; returns the reading end of its output. Raises LaunchError when the system refuses.

        The lead inherits the listening socket at which the workers will meet, so no port can be lost to
        another.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stretto.launch.worker", str(order.script), *order.args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment_of(worker, order, folder, listener),
                pass_fds=[] if worker else [listener.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"worker {worker} of {order.workers} cannot be started: {error.strerror}") from error
        self._tell_warden(f"+{process.pid}\n")
        self._alive[worker] = process
        threading.Thread(target=self._await, args=(worker, process), daemon=True).start()
        assert process.stdout is not None
        return process.stdout

    def _await(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        """Tell of the end of a process, but leave it unreaped: its number names its group until `bury`."""
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._inbox.put(Exited(worker, code))

    def bury(self, worker: int) -> None:
        """Kill what an ended worker has left running, and reap it."""
        process = self._alive.pop(worker)
        _kill_group(process)
        process.wait()
        self._tell_warden(f"-{process.pid}\n")

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
    command = [sys.executable, "-I", "-S", str(HERE / "warden.py")]
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


def environment_of(worker: int, order: Order, folder: Path, listener: socket) -> dict[str, str]:
    """The environment of a worker: the launcher's, torchrun's names, ours, and threads that share the cores.

    What is left of another run in the launcher's environment is taken out. The hash seed is fixed because
    workers that walk through a set of names must do it in one order.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    for name, value in {**DEFAULTS, "PYTHONHASHSEED": str(order.seed)}.items():
        environment.setdefault(name, value)
    if devices := gpus(environment):
        environment["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
    if order.threads or "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(order.threads_each())
    return environment | _place(worker, order, listener) | _task(order, folder) | _path(environment)


DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What the user may set otherwise. Threads that wait by spinning slow down whatever else runs on the machine, and a run
alone most of all, which would make every recipe look fast beside it."""


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that the workers share out among them, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [one for one in environment["CUDA_VISIBLE_DEVICES"].split(",") if one]
    found = (one.name.removeprefix("nvidia") for one in devices.glob("nvidia[0-9]*"))
    return sorted((one for one in found if one.isdigit()), key=int)


OURS = ("STRETTO_RECIPE", "STRETTO_ALONE", "STRETTO_JOIN", "STRETTO_KEEP_STATES", "STRETTO_LISTEN_FD")


def _place(worker: int, order: Order, listener: socket) -> dict[str, str]:
    number, of = str(worker), str(order.workers)
    address, port = listener.getsockname()[:2]
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return place | meeting | ({} if worker else {"STRETTO_LISTEN_FD": str(listener.fileno())})


def _task(order: Order, folder: Path) -> dict[str, str]:
    asked = {
        "STRETTO_RUN": str(folder.resolve()),
        "STRETTO_SEED": str(order.seed),
        "STRETTO_TIMEOUT": str(order.timeout_s),
        "STRETTO_RECIPE": order.recipe,
        "STRETTO_ALONE": "1" if order.alone else None,
        "STRETTO_JOIN": str(order.join) if order.join > 1 else None,
        "STRETTO_KEEP_STATES": "1" if order.keep_states else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _path(environment: dict[str, str]) -> dict[str, str]:
    """Where a worker finds this package when the launcher runs from a checkout that is not installed."""
    known = {*site.getsitepackages(), site.getusersitepackages()}
    found = {str(Path(entry).resolve()) for entry in sys.path if entry not in known}
    if str(ROOT) in known or str(ROOT) not in found:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))}
