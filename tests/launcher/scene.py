"""A place where scripts are run for real: every wait has a limit, every process is ended by its number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psutil

from stretto.launcher.local import RunConfig, run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.process_config import VARIABLE

MARK = "STRETTO_TEST_MARK"
ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "light")])

STUB = """
import sys, types
from stretto.process_config import worker_config
config = worker_config()
api = types.ModuleType("stretto.api")
api.close = lambda: None
sys.modules["stretto.api"] = api
"""
"""Stands in for the training, so that a script can end well without importing torch."""


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
"""Stands in for the service of a server; written as a `sitecustomize`, so that no process needs to be told of it."""

COORDINATOR = """
import os
if '"type":"coordinator"' in os.environ.get("STRETTO_CONFIG", ""):
    import json, socket, sys, time, msgspec, zmq
    config = json.loads(os.environ["STRETTO_CONFIG"])
    listener = socket.socket(fileno=config["listen_fd"])
    router = zmq.Context().socket(zmq.ROUTER)
    if config["keys"]:
        secret, public, _ = config["keys"]
        router.curve_server, router.curve_secretkey, router.curve_publickey = True, secret.encode(), public.encode()
    address = "tcp://%s:%d" % listener.getsockname()
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(address)
    with open("coordinators", "a") as file:
        file.write(f"{os.getpid()} {json.dumps(config['settings'])}\\n")
    while True:
        name, said = router.recv_multipart()
        with open("heard", "a") as file:
            file.write(json.dumps([os.getpid(), name.decode(), msgspec.msgpack.decode(said)]) + "\\n")
        print("stretto: heard it", flush=True)
        print("and more", flush=True)
"""
"""Stands in for the coordinator: writes down its process and its settings, and what it is told."""


class Place:
    """A folder with scripts, and all processes that were started from it."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self.mark = mark
        self.recovers = True
        """True if runs of this place have a coordinator."""
        self._started: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script. It begins with the stub of the training."""
        (self.folder / "stub.py").write_text(STUB)
        path = self.folder / name
        path.write_text("import stub; from stub import config\n" + dedent(text))
        return path

    def service(self, body: str = "time.sleep(60)") -> None:
        """What the servers that are started from here do, given a `place`; at first each writes its number down."""
        (self.folder / "service").mkdir()
        indented = indent(dedent(body).strip(), " " * 8)
        (self.folder / "service/sitecustomize.py").write_text(SERVICE.replace("{body}", indented))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder / "service"), str(ROOT)])

    def coordinator(self) -> None:
        """Runs of two and more that are started from here have a coordinator that writes down what it hears."""
        (self.folder / "service").mkdir(exist_ok=True)
        with (self.folder / "service/sitecustomize.py").open("a") as file:
            file.write(COORDINATOR)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder / "service"), str(ROOT)])
        self.recovers = True

    def coordinators(self) -> list[int]:
        """The processes of coordinators, in the order of their lives."""
        told = self.folder / "coordinators"
        return [int(line.split()[0]) for line in told.read_text().splitlines()] if told.exists() else []

    def heard(self) -> list[list[Any]]:
        """What coordinators were told: by which process, from whom, and what."""
        told = self.folder / "heard"
        return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []

    def server(self, shard: int = 0) -> int:
        """The process of a server, once it serves."""
        told = self.folder / f"server-{shard}.pid"
        until(lambda: told.exists() and told.read_text())
        return int(told.read_text())

    def run(self, text: str, *args: str, **order: Any) -> Path:
        """Run a script in this process's hands and return the run folder."""
        order = {"recovery": self.recovers} | order
        return run(RunConfig(self.script(text), args=args, **order), ProgressDisplay(quiet=True))

    def stretto(self, *arguments: str | Path, before: str = "", **popen: Any) -> subprocess.Popen[bytes]:
        """Start the command, as a shell would; something may be done before."""
        command = [
            sys.executable,
            "-P",
            "-c",
            f"{before}import stretto.cli.main as cli; cli.main()",
            *map(str, arguments),
        ]
        if arguments[:1] == ("run",) and not self.recovers:
            command.insert(command.index("run") + 1, "--no-recovery")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True} | popen
        heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        process = subprocess.Popen(command, preexec_fn=heed, **pipes)
        self._started.append(process)
        return process

    def left(self) -> list[psutil.Process]:
        """Living processes that have their environment from this place.

        A program that has only just been started in a process shows no environment for a moment, even to
        who started it, and is not among them yet: wait until they are as many as are expected.
        """
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._ours(process)]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return environment(process).get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def end(self) -> None:
        """End what a failed test has left."""
        for process in self.left():
            process.kill()
        for started in self._started:
            started.wait(timeout=5)
            for pipe in (started.stdout, started.stderr):
                if pipe is not None:
                    pipe.close()


def environment(process: psutil.Process) -> dict[str, str]:
    """With what it was started; nothing if it has just ended."""
    try:
        found: dict[str, str] = process.environ()
    except psutil.Error:
        return {}
    return found


def config_of(process: psutil.Process) -> dict[str, Any]:
    """Return the configuration that a process was started with, or an empty one."""
    return json.loads(environment(process).get(VARIABLE, "{}"))


def staff(place: Place) -> int:
    """Return the number of processes of a run that are neither workers nor servers: launcher, reaper, coordinator."""
    return 2 + place.recovers


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for a condition, and fail when it does not come true in time."""
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.01)
