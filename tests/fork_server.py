"""Fork server: starts Python processes of tests from a process that has imported torch already.

A plain start imports torch for more than a second of CPU time; a fork takes some milliseconds. `ForkingPopen` takes the
place of `subprocess.Popen` in the tests, and in the commands that they start, for `python -m NAME`, `python -c CODE`
and `python FILE`, also in a network namespace (`ip netns exec`) and in a folder that is a disk of its own (`OWN_DISK`).
A forked process is a child of the process that asked for it, so signals, waits and exit codes are those of a plain
start; only /proc shows the environment and the command of the server, so `environment_of` reads the environment from a
file. A forked process ends without destroying the modules that the server had imported, and what libraries hold.

    test or launcher         fork server            go-between        process
          | -- request, fds --> |                       |                |
          |                     | -- fork ------------> |                |
          |                     |                       | -- fork -----> |
          |                     | <-- exits ------------|                |
          | <---- pid --------- |        the process is adopted by the nearest ancestor that adopts orphans: the asker
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import psutil

PRELOADED = (
    "torch._dynamo",
    "torch.distributed",
    "sklearn.datasets",
    "sklearn.model_selection",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "typer._adapters",
    "zmq",
    "stretto.api",
    "stretto.cli.main",
    "stretto.launcher.local",
    "stretto.membership.server",
    "stretto.parameter_server.rpc_server",
    "stretto.report.html_report",
    "stretto.strategies.async_strategy",
    "stretto.strategies.gradient_strategy",
    "stretto.strategies.local_strategy",
    "stretto.parallel.pipeline",
    "stretto.parallel.sharded",
    "stretto.transport.encrypted_rendezvous",
    "stretto.transport.rendezvous",
)
"""Modules that most test processes import, where the installed versions of other libraries have them."""
WORKERS = (
    "stretto.launcher.worker_main",
    "stretto.launcher.shard_main",
    "stretto.launcher.coordinator_main",
    "stretto.launcher.relay_main",
)
"""Modules whose processes start no others."""
READ_AT_START = {"PYTHONHASHSEED": "0", "PYTHONHOME": None, "PYTHONWARNINGS": None}
"""Environment variables that Python reads at its start, as the server has them: with other values, a plain start."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2) and unshare(2)."""
NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS of unshare(2)."""
PRIVATE = 0x4000 | 0x40000
"""MS_REC and MS_PRIVATE of mount(2)."""
OWN_DISK = ["unshare", "-m", "sh", "-ec", 'mount -t tmpfs -o "size=$1" none "$2"; cd "$2"; shift 2; exec "$@"', "sh"]
"""Runs a command, which follows a size and a folder, in the folder, which is an empty disk for the command."""
COLLAPSE, HUGE = 25, 1 << 21
"""MADV_COLLAPSE of madvise(2), and the bytes of a huge page."""
FLAGS = {"-P": "safe", "-u": "unbuffered"}
"""Options of Python that a request may have, and the names of their fields in it."""
HIGH_FD = 800
"""Descriptors from here on are those of connections to servers, which do not collide with those of a test."""
LONGEST = 1 << 20
CLOCK_S = 0.05
"""Largest difference between the clocks of processes and files."""
PlainPopen = subprocess.Popen
PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
BASE_PATH = [path for path in sys.path if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


class ForkServer:
    """Connection to a fork server. Each forked process writes its environment to a file of its pid in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours, self.theirs = _high(ours), _high(theirs)
        self._lock = threading.Lock()
        self._is_ready = True

    def spawn(self) -> ForkServer:
        """Start the server as a program of its own."""
        command = [sys.executable, "-P", __file__, str(self.theirs.fileno())]
        environment = {**os.environ, **{name: value for name, value in READ_AT_START.items() if value is not None}}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with self.theirs:
            server = PlainPopen(
                command, pass_fds=[self.theirs.fileno()], env=environment, start_new_session=True, **quiet
            )
        server.returncode = 0  # ends with the connection, without a wait for it
        self._is_ready = False
        return self

    def await_ready(self) -> None:
        """Wait until the server has imported what it forks, which takes a busy machine many seconds."""
        with self._lock:
            if not self._is_ready:
                self.ours.recv(100)
                self._is_ready = True

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the pid of a new child of this process."""
        self.await_ready()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with self._lock, _adopting_orphans():
            self.ours.sendmsg([json.dumps(request).encode()], rights)
            pid = int(self.ours.recv(100))
            self.ours.send(b"known")
            return pid


def _high(end: socket.socket) -> socket.socket:
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, HIGH_FD))


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)


class ForkingPopen(PlainPopen):  # type: ignore[type-arg]
    """A Popen that forks Python processes from the fork server, and starts other commands plainly."""

    server: ForkServer | None = None
    started: ClassVar[weakref.WeakSet[ForkingPopen]] = weakref.WeakSet()

    def _execute_child(self, *given: Any) -> None:
        self.started.add(self)
        values = dict(zip(PARAMETERS, given, strict=True))
        request = _request(values)
        if self.server is None or request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = [values["p2cread"], values["c2pwrite"], values["errwrite"]]
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        passed = sorted(values["pass_fds"])
        request |= {"targets": [0, 1, 2, *passed], "folder": self.server.folder}
        try:
            self.pid = self.server.start(request, [*standard, *passed])
            self._child_created = True
        finally:
            self._close_pipe_fds(*[values[name] for name in PARAMETERS if name.startswith(("p2c", "c2p", "err"))])


def _request(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the server must run; None for a command that must start plainly."""
    if isinstance(values["args"], str | bytes) or any(values[name] for name in ("preexec_fn", "shell", "executable")):
        return None
    words = [os.fspath(word) for word in values["args"]]
    network, words = (words[3], words[4:]) if words[:3] == ["ip", "netns", "exec"] else ("", words)
    end = len(OWN_DISK)
    disk, words = (words[end : end + 2], words[end + 2 :]) if words[:end] == OWN_DISK else ([], words)
    environment = dict(os.environ if values["env"] is None else values["env"])
    cwd = disk[1] if disk else os.fspath(values["cwd"] or os.getcwd())
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    flags = list(takewhile(FLAGS.__contains__, words[1:]))
    rest = words[1 + len(flags) :]
    if (
        words[0] != sys.executable
        or not rest
        or (rest[0].startswith("-") and rest[0] not in ("-m", "-c"))
        or any(environment.get(name, value) != value for name, value in READ_AT_START.items())
        or any(Path(path, "sitecustomize.py").exists() for path in paths)
        or not Path(cwd).is_dir()
    ):
        return None
    return {
        "words": rest,
        "network": network,
        "disk": disk,
        **{name: flag in flags for flag, name in FLAGS.items()},
        "paths": paths,
        "environment": environment,
        "cwd": cwd,
        "session": values["start_new_session"],
        "group": values["process_group"],
    }


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that a process was started with; an empty one if it has just ended."""
    file = Path(ForkingPopen.server.folder, str(process.pid)) if ForkingPopen.server is not None else None
    try:
        if file is not None and file.exists() and file.stat().st_mtime >= process.create_time() - CLOCK_S:
            return dict(json.loads(file.read_text() or "{}"))
        return dict(process.environ())
    except psutil.Error:
        return {}


def main() -> None:
    """Import what test processes use and serve; in each forked process, run its request."""
    for name in filter(importlib.util.find_spec, PRELOADED):
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # the collections of forked processes leave these objects, and their pages, alone
    _use_huge_pages()
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        connection.send(b"ready")
    except BrokenPipeError:  # the tests have ended already
        return
    request, descriptors = _serve(connection)
    _enter_namespaces(request["network"], request["disk"])
    if request["words"][:1] != ["-m"] or request["words"][1] not in WORKERS:
        server = ForkServer(request["folder"])
        if os.fork():
            server.theirs.close()
            ForkingPopen.server = server
            subprocess.Popen = ForkingPopen  # type: ignore[misc]
        else:
            server.ours.close()
            for descriptor in descriptors:
                os.close(descriptor)
            request, descriptors = _serve(server.theirs)
    _take_place(request, descriptors)
    error: BaseException | None = None
    try:
        _run(request["words"], request)
    except BaseException as raised:
        error = raised
    _end(error)


def _use_huge_pages() -> None:
    """Move the memory of this process to huge pages, where the system can: a fork copies the table of its pages."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = f"{line} anonymous".split()[:6]
        if rights.startswith("rw") and name in ("[heap]", "anonymous"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // HUGE) * HUGE
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(max(0, end - begin) // HUGE * HUGE), COLLAPSE)


def _enter_namespaces(network: str, disk: list[str]) -> None:
    """Use a network namespace, and a disk of a size at a folder, if they are given."""
    libc = ctypes.CDLL(None)
    if network:
        with Path("/run/netns", network).open() as file:
            assert libc.setns(file.fileno(), NEW_NETWORK) == 0
    if disk:
        size, folder = map(str.encode, disk)
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0
        assert libc.mount(b"none", folder, b"tmpfs", 0, b"size=" + size) == 0


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request until the connection ends; return its request in the forked process.

    A forked process begins once its pid is known at the other end, as after a plain start, and ends if it never is.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, ancillary = b"", list[Any]()
        with contextlib.suppress(ConnectionError):
            message, ancillary, _, _ = connection.recvmsg(LONGEST, socket.CMSG_SPACE(64 * 4))
        if not message:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        (reading, writing), (held, release) = os.pipe(), os.pipe()
        if go_between := os.fork():
            os.waitpid(go_between, 0)
            with contextlib.suppress(ConnectionError):
                connection.send(os.read(reading, 100))
                os.write(release, connection.recv(100))
            for descriptor in (*descriptors, reading, writing, held, release):
                os.close(descriptor)
        elif pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        else:
            for descriptor in (reading, writing, release):
                os.close(descriptor)
            connection.close()
            if not os.read(held, 100):
                os._exit(0)
            os.close(held)
            return json.loads(message), list(descriptors)


def _take_place(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the descriptors, environment, folder, session and signal handlers of a plain start."""
    import numpy as np
    import torch

    above = max(HIGH_FD, *request["targets"]) + 1
    raised = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(raised, request["targets"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(request["folder"], str(os.getpid())).write_text(json.dumps(request["environment"]))
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _run(words: list[str], request: dict[str, Any]) -> None:
    """Run a module, a text or a file as Python does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("file", words)
    first = {"-m": request["cwd"], "-c": "", "file": str(Path(rest[0]).resolve().parent)}[kind]
    sys.path[:] = [*([] if request["safe"] else [first]), *request["paths"], *BASE_PATH]
    sys.argv = [kind, *rest[1:]] if kind != "file" else rest
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if kind == "-m":
        sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    else:
        text = rest[0] if kind == "-c" else Path(rest[0]).read_text()
        if kind == "file":
            main.__file__ = rest[0]
        exec(compile(text, "<string>" if kind == "-c" else rest[0], "exec"), vars(main))  # noqa: S102


def _end(error: BaseException | None) -> None:
    """End this process as Python does, except that what the server has imported stays: its pages would be copied."""
    code = 0
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
    elif isinstance(error, SystemExit):
        code = 1
        print(error.code, file=sys.stderr)
    elif error is not None:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    interrupted = isinstance(error, KeyboardInterrupt)
    del error
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        code = code or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
