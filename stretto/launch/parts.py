"""The parts of a run: for each process its number, its command, its environment and the sockets it inherits.

Workers are numbered from 0. Servers have numbers below 0, so that both fit into one crew: server 0 is -1, server 1
is -2.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from stretto.launch.order import Order
from stretto.launch.servers import Servers
from stretto.launch.slow import factors

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """One process to be started. Its environment may hold keys, so it is never printed."""

    number: int
    of: int
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    fds: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{called(self.number)} of {self.of}"


def called(number: int) -> str:
    """What a process is called before a person.

    >>> called(3), called(-1)
    ('worker 3', 'server 0')
    """
    return f"worker {number}" if number >= 0 else f"server {shard_of(number)}"


def shard_of(number: int) -> int:
    """The shard of the server with this number; the other way round it is the same."""
    return -1 - number


def parts(order: Order, folder: Path, listener: socket, servers: Servers) -> Iterator[Part]:
    """All processes of a run. Workers come first: they have more to do before they meet than servers have."""
    for number in range(order.workers):
        yield worker(number, order, folder, listener, servers)
    for shard in range(servers.shards):
        yield server(shard, order, folder, servers)


def worker(number: int, order: Order, folder: Path, listener: socket, servers: Servers) -> Part:
    """A worker. The lead inherits the listening socket at which all will meet, so no port can be lost to another."""
    command = [sys.executable, "-P", "-m", "stretto.launch.worker", str(order.script), *order.args]
    environment = environment_of(number, order, folder, listener) | servers.for_worker()
    return Part(number, order.workers, command, environment, [] if number else [listener.fileno()])


def server(shard: int, order: Order, folder: Path, servers: Servers) -> Part:
    """A server: the launcher's environment and its place; no recipe, for that comes from the workers."""
    command = [sys.executable, "-P", "-m", "stretto.launch.serve"]
    common = _common(order) | {"OMP_NUM_THREADS": "1"}
    task = {
        "STRETTO_RUN": str(folder.resolve()),
        "STRETTO_TIMEOUT": str(order.timeout_s),
        "STRETTO_ON_NAN": order.on_nan,
        "WORLD_SIZE": str(order.workers),
    }
    environment = common | task | servers.for_server(shard) | _path(common)
    return Part(shard_of(shard), servers.shards, command, environment, servers.inherited(shard))


def environment_of(number: int, order: Order, folder: Path, listener: socket) -> dict[str, str]:
    """The environment of a worker: the launcher's, torchrun's names, ours, and threads that share the cores."""
    environment = _common(order)
    if devices := gpus(environment):
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    if order.threads or "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(order.threads_each())
    return environment | _place(number, order, listener) | _task(number, order, folder) | _path(environment)


def _common(order: Order) -> dict[str, str]:
    """The launcher's environment, less what is left of another run in it.

    The hash seed is fixed because workers that walk through a set of names must do it in one order.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**DEFAULTS, "PYTHONHASHSEED": str(order.seed), **environment}


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


OURS = (
    "STRETTO_RECIPE",
    "STRETTO_ALONE",
    "STRETTO_JOIN",
    "STRETTO_KEEP_STATES",
    "STRETTO_LISTEN_FD",
    "STRETTO_SLOW",
    "STRETTO_SERVERS",
    "STRETTO_KEYS",
    "STRETTO_SHARD",
    "STRETTO_SHARDS",
    "STRETTO_COORDINATOR_FD",
    "STRETTO_SERVER_KEYS",
    "STRETTO_ON_NAN",
)


def _place(worker: int, order: Order, listener: socket) -> dict[str, str]:
    number, of = str(worker), str(order.workers)
    address, port = listener.getsockname()[:2]
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return place | meeting | ({} if worker else {"STRETTO_LISTEN_FD": str(listener.fileno())})


def _task(worker: int, order: Order, folder: Path) -> dict[str, str]:
    slow = factors(order.slow, order.workers)
    asked = {
        "STRETTO_RUN": str(folder.resolve()),
        "STRETTO_SEED": str(order.seed),
        "STRETTO_TIMEOUT": str(order.timeout_s),
        "STRETTO_RECIPE": order.recipe,
        "STRETTO_ALONE": "1" if order.alone else None,
        "STRETTO_JOIN": str(order.join) if order.join > 1 else None,
        "STRETTO_KEEP_STATES": "1" if order.keep_states else None,
        "STRETTO_SLOW": str(slow[worker]) if worker in slow else None,
        "STRETTO_ON_NAN": order.on_nan if order.on_nan != "stop" else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _path(environment: dict[str, str]) -> dict[str, str]:
    """Where a process finds this package when the launcher runs from a checkout that is not installed."""
    known = {*site.getsitepackages(), site.getusersitepackages()}
    found = {str(Path(entry).resolve()) for entry in sys.path if entry not in known}
    if str(ROOT) in known or str(ROOT) not in found:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))}
