"""A folder from which tests start real runs: every wait has a limit, every process is ended by its pid."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psutil
from fork_server import environment_of

from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.process_config import VARIABLE
from stretto.run_config import RunConfig

MARK = "STRETTO_TEST_MARK"
ROOT = Path(__file__).resolve().parents[2]
PATH = str(ROOT)
ENDS_WITHIN_S = 30.0
"""Seconds within which processes end, of which none would end alone."""

STUB = """
import sys, types
from stretto.process_config import worker_config
config = worker_config()
api = types.ModuleType("stretto.api")
api.close = lambda: None
sys.modules["stretto.api"] = api
"""
"""Replaces the training API, so that a script can end successfully without importing torch."""


SERVICE = """
import os, sys
if '"type":"shard"' in os.environ.get("STRETTO_CONFIG", ""):
    import pathlib, socket, time, types
    def serve(place):
        pathlib.Path(f"server-{place.shard}.pid").write_text(str(os.getpid()))
        run(place)
    def run(place):
{body}
    name = "stretto.parameter_server.rpc_server"
    sys.modules[name] = service = types.ModuleType(name)
    service.serve = serve
"""
"""Replaces the service of a server; a `sitecustomize`, so that processes load it without being changed."""

COORDINATOR = """
import os
import pty
if '"type":"coordinator"' in os.environ.get("STRETTO_CONFIG", ""):
    import json, socket, sys, time, msgspec, zmq
    config = json.loads(os.environ["STRETTO_CONFIG"])
    listener = socket.socket(fileno=config["listen_fd"])
    router = zmq.Context().socket(zmq.ROUTER)
    from stretto.membership.worker_status import status
    from stretto.security import HEAD, RunKeys, identity_of, name_in
    keys = None
    if secret := status.open(config["status_fd"]):
        keys = RunKeys(*secret)
        router.curve_server, router.curve_secretkey, router.curve_publickey = True, keys.private, keys.public
    address = "tcp://%s:%d" % listener.getsockname()
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(address)
    with open("coordinators", "a") as file:
        file.write(f"{os.getpid()} {json.dumps(config['options'])}\\n")
    while True:
        identity, data = router.recv_multipart()
        name = name_in(identity, keys)
        message = msgspec.msgpack.decode(data)
        if message[0] == "WatchFailures":
            continue
        if message[0] == "Failures":
            router.send_multipart([identity_of(HEAD, keys), data])
            router.send_multipart([identity, b"sent"])
            continue
        with open("heard", "a") as file:
            file.write(json.dumps([os.getpid(), name.decode(), message]) + "\\n")
        print("stretto: heard it", flush=True)
        print("and more", flush=True)
"""
"""Replaces the coordinator: writes its pid and the options of the run to a file, and received messages to another.

A Failures message that a script sends is forwarded to the launcher.
"""


class Place:
    """A folder with scripts, and all processes that were started from it."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self.mark = mark
        self.recovers = True
        """True if runs of this place have a coordinator."""
        self._started: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script. It begins by importing the stub of the training API."""
        (self.folder / "stub.py").write_text(STUB)
        path = self.folder / name
        path.write_text("import stub; from stub import config\n" + dedent(text))
        return path

    def service(self, body: str = "time.sleep(600)") -> None:
        """Let servers started from here run `body`, which has a `place`; each first writes its pid to a file."""
        (self.folder / "service").mkdir()
        indented = indent(dedent(body).strip(), " " * 8)
        (self.folder / "service/sitecustomize.py").write_text(SERVICE.replace("{body}", indented))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder / "service"), str(ROOT)])

    def coordinator(self) -> None:
        """Give runs of two or more workers started from here a coordinator that records the messages it receives."""
        (self.folder / "service").mkdir(exist_ok=True)
        with (self.folder / "service/sitecustomize.py").open("a") as file:
            file.write(COORDINATOR)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder / "service"), str(ROOT)])
        self.recovers = True

    def coordinators(self) -> list[int]:
        """Return the pids of the coordinators, in the order of their starts."""
        file = self.folder / "coordinators"
        return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []

    def messages_received(self) -> list[list[Any]]:
        """Return the messages that coordinators received: pid of the coordinator, sender, message."""
        file = self.folder / "heard"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def server(self, shard: int = 0) -> int:
        """Return the pid of a server, once it serves."""
        file = self.folder / f"server-{shard}.pid"
        until(lambda: file.exists() and file.read_text())
        return int(file.read_text())

    def run(self, text: str, *args: str, **config: Any) -> Path:
        """Run a script with a launcher in this process, and return the run folder."""
        config = {"recovery": self.recovers} | config
        return run(RunConfig(self.script(text), args=args, **config), ProgressDisplay(quiet=True))

    def stretto(
        self, *arguments: str | Path, before: str = "", network: str = "", **popen: Any
    ) -> subprocess.Popen[bytes]:
        """Start the command as a shell would, after the statements in `before`, in a network namespace."""
        command = [
            *(["ip", "netns", "exec", network] if network else []),
            sys.executable,
            "-P",
            "-c",
            f"{before}import stretto.cli.main as cli; cli.main()",
            *map(str, arguments),
        ]
        if arguments[:1] == ("run",) and not self.recovers:
            command.insert(command.index("run") + 1, "--no-recovery")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True} | popen
        process = subprocess.Popen(command, **pipes)
        self._started.append(process)
        return process

    def left(self) -> list[psutil.Process]:
        """Return the running processes whose environment comes from this place.

        A process that is just replacing its program has no visible environment for a moment, and is missing from the
        list: wait until the expected number is there.
        """
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._ours(process)]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return environment_of(process).get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def await_ends(self) -> None:
        """Wait until no process that was started from here is left: a killed process may need a moment to end."""
        until(lambda: not self.left(), ENDS_WITHIN_S)

    def end(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in self.left():
            process.kill()
        for started in self._started:
            started.wait(timeout=60)
            for pipe in (started.stdout, started.stderr):
                if pipe is not None:
                    pipe.close()


class Terminal:
    """A terminal that shows what a command prints."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        self._shown = b""

    def start(self, place: Place, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start the command in the terminal."""
        environment = os.environ | {"TERM": "xterm"}
        process = place.stretto(*arguments, stdout=self._theirs, stderr=self._theirs, env=environment)
        os.close(self._theirs)
        return process

    def until(self, text: str) -> None:
        """Read until this was shown."""
        while text not in self.shown:
            assert self._read(), self.shown

    def read(self) -> str:
        """Read to the end; return all that was shown."""
        while self._read():
            pass
        os.close(self._ours)
        return self.shown

    @property
    def shown(self) -> str:
        return self._shown.decode(errors="replace")

    def _read(self) -> bool:
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux reports a closed other end in this way
            return False
        self._shown += data
        return bool(data)


def config_of(process: psutil.Process) -> dict[str, Any]:
    """Return the configuration that a process was started with, or an empty one."""
    return json.loads(environment_of(process).get(VARIABLE, "{}"))


def coordinators(place: Place) -> list[int]:
    """Return the processes of the coordinator, which are several while one is being replaced."""
    return [one.pid for one in place.left() if config_of(one).get("type") == "coordinator"]


def staff(place: Place) -> int:
    """Return the number of processes of a run that are neither workers nor servers: launcher, reaper, coordinator."""
    return 2 + place.recovers


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for a condition; raise TimeoutError if it is not true in time."""
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.01)
