"""Several hosts in one machine: network namespaces on a bridge, each behind a link of a known rate.

Each host's link is shaped in both directions by a token bucket (tc tbf): at the host for outgoing traffic, at the
bridge for incoming traffic. Needs root and iproute2. The namespaces of a killed laboratory are removed by the next one.

    with Laboratory(hosts=4, mbit=100) as lab:
        lab.start(0, ["hostname", "-I"], {}, log)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, Self

from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig

PREFIX = "stretto-lab-"
LINK = "uplink"
PORT = 29500
"""Rendezvous port, in the namespace of host 0."""
NETWORK = "10.77.0"
BURST_BYTES = 32 << 10
QUEUE_MS = 50
END_S = 5.0
"""Seconds within which a killed process must have ended."""


class LabError(SystemExit):
    """Error for the user: the laboratory cannot be built."""


@dataclass(frozen=True)
class Traffic:
    """Bytes on a host's link as the kernel counts them: whole frames, with the headers of Ethernet, IP and TCP."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        """Return the traffic since an earlier reading."""
        return Traffic(self.sent - before.sent, self.received - before.received)


class Laboratory:
    """Hosts 0 to N-1, connected by links of `mbit` Mbit/s. A context manager that removes all that it created."""

    def __init__(self, hosts: int = 4, mbit: float = 100.0) -> None:
        if not 1 <= hosts <= 250 or mbit <= 0:
            raise LabError(f"a laboratory has 1 to 250 hosts and a rate above 0, got {hosts} hosts at {mbit} Mbit/s")
        self.hosts = hosts
        self.mbit = mbit

    def __enter__(self) -> Self:
        _refuse_unless_able()
        with ExitStack() as stack:
            stack.enter_context(_only_one())
            stack.enter_context(_exiting_on_sigterm())
            stack.callback(remove_all)
            remove_all()
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *what: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        hub = f"{PREFIX}hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            self._connect(host, hub)

    def _connect(self, host: int, hub: str) -> None:
        here, port = name(host), f"port{host}"
        _ip("netns", "add", here)
        _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", here)
        _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", here, "addr", "add", f"{address(host)}/24", "dev", LINK)
        for device in ("lo", LINK):
            _ip("-n", here, "link", "set", "dev", device, "up")
        for place, device in ((here, LINK), (hub, port)):
            _shape(place, device, self.mbit)

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output is written to the log. It ends with the laboratory."""
        inside = ["ip", "netns", "exec", name(host), *command]
        process = subprocess.Popen(
            inside, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
        )
        # The namespace does not list a process that has not entered it yet.
        self._stack.callback(process.kill)
        return process

    def place(self, host: int, hosts: int, run: Path | None = None, recipe: str | None = None) -> dict[str, str]:
        """Return the environment of a worker on a host, as torchrun sets it with one worker on each machine.

        With `run` it also contains a configuration of Stretto: this run directory, and a recipe.
        """
        options = RunConfig(Path(), workers=hosts, recipe=recipe)
        store = f"{address(0)}:{PORT}"
        config = WorkerConfig(worker=host, options=options, store=store, run=str(run)).environment()
        return {
            **(config if run is not None else {}),
            "RANK": str(host),
            "WORLD_SIZE": str(hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": LINK,
        }

    def traffic(self, host: int) -> Traffic:
        """Return the bytes on the host's link so far."""
        counters = [f"/sys/class/net/{LINK}/statistics/{way}_bytes" for way in ("tx", "rx")]
        sent, received = _ip("netns", "exec", name(host), "cat", *counters).split()
        return Traffic(int(sent), int(received))

    def measure_mbit(self, sender: int = 0, receiver: int = 1, seconds: float = 1.0) -> float:
        """Return the measured rate of one TCP connection between two hosts, in Mbit/s."""
        size = str(int(self.mbit * 1e6 / 8 * seconds))
        return self._run_pair(sender, receiver, _SENDER, [size], _RECEIVER, 30 + 10 * seconds)

    def measure_round_trip_s(self, sender: int = 0, receiver: int = 1) -> float:
        """Return the median round-trip time of one byte between programs on two hosts, in seconds."""
        return self._run_pair(sender, receiver, _CALLER, [], _ECHO, 30)

    def _run_pair(
        self, sender: int, receiver: int, sender_code: str, arguments: Sequence[str], receiver_code: str, limit_s: float
    ) -> float:
        """Run a listening and a connecting program on two hosts, and return the number that one of them prints."""
        with tempfile.TemporaryFile() as log:
            there = self.start(receiver, [sys.executable, "-c", receiver_code], {}, log)
            here = self.start(
                sender, [sys.executable, "-c", _CONNECT + sender_code, address(receiver), *arguments], {}, log
            )
            codes = [one.wait(limit_s) for one in (here, there)]
            log.seek(0)
            output = log.read().decode()
        if any(codes):
            raise LabError(f"hosts {sender} and {receiver} of the laboratory can't reach each other:\n{output}")
        return float(output)


_RECEIVER = """
import socket, time
with socket.create_server(("", 7)) as server:
    server.settimeout(20)
    one, _ = server.accept()
    one.settimeout(20)
    first = one.recv(1 << 20)
    began, size = time.perf_counter(), 0
    while piece := one.recv(1 << 20):
        size += len(piece)
    print(size * 8 / 1e6 / (time.perf_counter() - began))
"""
_CONNECT = """
import socket, sys, time
until = time.monotonic() + 20
while True:
    try:
        one = socket.create_connection((sys.argv[1], 7), 20)
        break
    except ConnectionRefusedError:
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
"""
_SENDER = """
with one:
    one.sendall(bytes(int(sys.argv[2])))
"""
_CALLER = """
one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(500):
    began = time.perf_counter()
    one.sendall(b"?")
    one.recv(1)
    times.append(time.perf_counter() - began)
one.close()
print(sorted(times)[250])
"""
_ECHO = """
import socket
with socket.create_server(("", 7)) as server:
    server.settimeout(20)
    one, _ = server.accept()
    one.settimeout(20)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while said := one.recv(1):
        one.sendall(said)
"""


def name(host: int) -> str:
    """Return the namespace of a host."""
    return f"{PREFIX}{host}"


def address(host: int) -> str:
    """Return the address of a host."""
    return f"{NETWORK}.{host + 1}"


def set_link(host: int, state: str) -> None:
    """Set the link of a host "up" or "down", at the bridge: the host does not learn of it."""
    _ip("-n", f"{PREFIX}hub", "link", "set", f"port{host}", state)


def remove_all() -> None:
    """Remove all namespaces of laboratories and kill the processes in them, with SIGINT and SIGTERM blocked."""
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        for one in namespaces():
            _end_processes(one)
            _ip("netns", "del", one)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def namespaces() -> list[str]:
    """Return the namespaces of laboratories on this machine."""
    listed = (line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip())
    return [one for one in listed if one.startswith(PREFIX)]


def _end_processes(namespace: str) -> None:
    limit = time.monotonic() + END_S
    while (inside := _ip("netns", "pids", namespace).split()) and time.monotonic() < limit:
        for one in inside:
            with suppress(ProcessLookupError):
                os.kill(int(one), signal.SIGKILL)
        time.sleep(0.01)


def _shape(namespace: str, device: str, mbit: float) -> None:
    rate = f"{round(mbit * 1000)}kbit"
    limits = ("burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *limits)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if completed.returncode:
        raise LabError(f"the laboratory could not be built: {' '.join(command)}: {completed.stderr.strip()}")
    return completed.stdout


def _refuse_unless_able() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        _refuse("it needs root to make network namespaces", "a user other than root", "sudo")
    if missing:
        _refuse("it needs iproute2", f"no {' and no '.join(missing)}", "apt-get install iproute2, then")


def _refuse(problem: str, got: str, before: str) -> NoReturn:
    command = f"{before} {sys.executable} -m benchmarks lab"
    raise LabError(
        f"the laboratory can't be built: {problem}\n  got: {got}\n  expected: Linux, root, iproute2\n  try: {command}"
    )


@contextmanager
def _only_one() -> Iterator[None]:
    """Hold a lock: two laboratories would remove each other's namespaces."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError("another laboratory is open on this machine; wait until it has ended") from None
        yield


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in this process, so that context managers are left."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise SystemExit(128 + number)
