"""The parts of a run: for each process its number, its command, its environment and the sockets it inherits.

Workers are numbered from 0. Servers have numbers below 0, so that both fit into one crew: server 0 is -1, server 1
is -2. The coordinator is far below, for no run has so many servers. Started again a part keeps its number; its life is
one more.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from stretto.faults.stragglers import factors
from stretto.interval import every
from stretto.launcher.config import RunConfig, is_free
from stretto.launcher.endpoints import Servers, address
from stretto.launcher.listeners import OWN, interface_of
from stretto.launcher.worker_main import FILE, MODULE
from stretto.membership.coordinator import COORDINATOR
from stretto.membership.variables import OF_TORCHRUN, RANK, STORE, WORLD_SIZE

ROOT = Path(__file__).resolve().parents[2]
CUT_EVERY_S = 10.0
"""How often all shards keep what they hold, to come back to when one of them has died."""
KEPT = 3
"""So many checkpoints, unless the user says otherwise."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to be started. Its environment may hold keys, so it is never printed."""

    number: int
    of: int
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    fds: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return called(self.number) if self.number == COORDINATOR else f"{called(self.number)} of {self.of}"


def called(number: int) -> str:
    """What a process is called before a person.

    >>> called(3), called(-1), called(COORDINATOR)
    ('worker 3', 'server 0', 'the coordinator')
    """
    if number == COORDINATOR:
        return "the coordinator"
    return f"worker {number}" if number >= 0 else f"server {shard_of(number)}"


def shard_of(number: int) -> int:
    """Return the shard of the server with this number."""
    return -1 - number


def server_of(shard: int) -> int:
    """The number of a shard's server."""
    return -1 - shard


@dataclass(frozen=True)
class ProcessPlan:
    """What the processes of a run are made from; `zero` is when it began, by the machine's clock.

    Those of a run that another launcher has begun are `guests`, by their numbers, and nothing else.
    """

    order: RunConfig
    folder: Path
    listener: socket | None
    servers: Servers
    zero: float = 0.0
    guests: tuple[int, ...] = ()

    def all(self) -> Iterator[ProcessSpec]:
        """All processes. The coordinator is first, for all ask it first; workers are before servers, since they have
        more to do before they meet.
        """
        numbers = [*(self.guests or range(self.order.workers)), *map(server_of, range(self.servers.shards))]
        if self.servers.coordinator is not None:
            numbers.insert(0, COORDINATOR)
        return map(self.part, numbers)

    def part(self, number: int, life: int = 0) -> ProcessSpec:
        """One of them, for the first time or again."""
        if number == COORDINATOR:
            return self._coordinator()
        return self._worker(number, life) if number >= 0 else self._server(number, life)

    def _worker(self, number: int, life: int) -> ProcessSpec:
        """The lead inherits the listening socket at which all will meet, so no port can be lost to another."""
        order, listener = self.order, None if number else self.listener
        command = [sys.executable, "-P", "-m", "stretto.launcher.worker_main"]
        command += [MODULE if order.module else FILE, str(order.script), *order.args]
        environment = environment_of(number, order, self.folder, self.listener) | self.servers.for_worker()
        if order.endures:
            environment["STRETTO_LIFE"] = str(life)
        of = max(order.workers, *(one + 1 for one in self.guests or (0,)))
        return ProcessSpec(number, of, command, environment, [listener.fileno()] if listener is not None else [])

    def _server(self, number: int, life: int) -> ProcessSpec:
        """The launcher's environment and its place; no recipe, for that comes from the workers."""
        order, servers, shard = self.order, self.servers, shard_of(number)
        task = {
            "STRETTO_TIMEOUT": str(order.timeout_s),
            "STRETTO_ON_NAN": order.on_nan,
            WORLD_SIZE: str(max(order.workers, order.max_workers or 0)),
        }
        if order.endures:
            task |= {"STRETTO_CUTS": str(self.folder.resolve() / "cuts"), "STRETTO_CUT_EVERY": str(_cut_every_s(order))}
        task |= {"STRETTO_RESTORE": "1"} if life else {}
        command, environment = self._service("shard_main", task | servers.for_server(shard))
        return ProcessSpec(number, servers.shards, command, environment, servers.inherited(shard))

    def _coordinator(self) -> ProcessSpec:
        """Workers can't disagree on settings that it holds for them."""
        assert self.servers.coordinator is not None
        settings = {"STRETTO_SETTINGS": json.dumps(settings_of(self.order, self.zero))}
        command, environment = self._service("coordinator_main", settings | self.servers.for_coordinator())
        return ProcessSpec(COORDINATOR, 1, command, environment, [self.servers.coordinator.fileno()])

    def _service(self, module: str, task: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """How a process that serves the workers is started, and with what."""
        common = _common(self.order) | {"OMP_NUM_THREADS": "1", "STRETTO_RUN": str(self.folder.resolve())}
        return [sys.executable, "-P", "-m", f"stretto.launcher.{module}"], common | task | _path(common)


def _cut_every_s(order: RunConfig) -> float:
    """How often all come together over a server: so often, at least, that a checkpoint is written when it is due."""
    asked = every(order.checkpoint_every).seconds if order.checkpoint_every else None
    return min(CUT_EVERY_S, asked or CUT_EVERY_S)


def settings_of(order: RunConfig, zero: float) -> dict[str, object]:
    """What the coordinator is told of a run. `free`: nobody waits for a worker that has died."""
    return {
        "expected": order.workers,
        "min_workers": order.min_workers,
        "max_workers": order.max_workers,
        "free": is_free(order),
        "failure_timeout_s": order.failure_timeout_s,
        "zero": zero,
        "batch": order.batch,
        "checkpoint": str(every(order.checkpoint_every)) if order.checkpoint_every else None,
    }


def environment_of(number: int, order: RunConfig, folder: Path, listener: socket | None) -> dict[str, str]:
    """The environment of a worker: the launcher's without torchrun's names, ours, and threads that share the cores."""
    environment = _common(order)
    if order.host is not None:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface_of(order.host))
    if devices := gpus(environment):
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    if order.threads or "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(order.threads_each())
    return environment | _place(number, order, listener) | _task(number, order, folder) | _path(environment)


def _common(order: RunConfig) -> dict[str, str]:
    """The launcher's environment, less what is left of another run in it.

    The hash seed is fixed because workers that walk through a set of names must do it in one order.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*OURS, *OF_TORCHRUN)}
    return {**DEFAULTS, "PYTHONHASHSEED": str(order.seed), **environment}


DEFAULTS = {
    "GLOO_SOCKET_IFNAME": OWN,
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
    RANK,
    WORLD_SIZE,
    STORE,
    "STRETTO_RECIPE",
    "STRETTO_ALONE",
    "STRETTO_JOIN",
    "STRETTO_SPLIT",
    "STRETTO_LR_FACTOR",
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
    "STRETTO_COORDINATOR",
    "STRETTO_SETTINGS",
    "STRETTO_LIFE",
    "STRETTO_FAILURE_TIMEOUT",
    "STRETTO_BATCH",
    "STRETTO_CHECKPOINT",
    "STRETTO_KEEP",
    "STRETTO_RESUME",
    "STRETTO_RESTORE",
    "STRETTO_CUTS",
    "STRETTO_CUT_EVERY",
)


def _place(worker: int, order: RunConfig, listener: socket | None) -> dict[str, str]:
    place = {RANK: str(worker), WORLD_SIZE: str(order.workers)}
    if listener is None:
        return place
    return place | {STORE: address(listener)} | ({} if worker else {"STRETTO_LISTEN_FD": str(listener.fileno())})


def _task(worker: int, order: RunConfig, folder: Path) -> dict[str, str]:
    slow = factors(order.stragglers, order.workers)
    asked = {
        "STRETTO_RUN": str(folder.resolve()),
        "STRETTO_SEED": str(order.seed),
        "STRETTO_TIMEOUT": str(order.timeout_s),
        "STRETTO_RECIPE": order.recipe,
        "STRETTO_ALONE": "1" if order.alone else None,
        "STRETTO_JOIN": str(order.join) if order.join > 1 else None,
        "STRETTO_SPLIT": "1" if order.global_batch == "split" else None,
        "STRETTO_LR_FACTOR": repr(order.lr_factor) if order.lr_scale != "none" else None,
        "STRETTO_KEEP_STATES": "1" if order.keep_states else None,
        "STRETTO_SLOW": str(slow[worker]) if worker in slow else None,
        "STRETTO_ON_NAN": order.on_nan if order.on_nan != "stop" else None,
        "STRETTO_FAILURE_TIMEOUT": str(order.failure_timeout_s) if order.endures else None,
        "STRETTO_BATCH": order.batch if order.endures else None,
        "STRETTO_CHECKPOINT": str(every(order.checkpoint_every)) if order.checkpoint_every else None,
        "STRETTO_KEEP": str(order.keep or KEPT) if order.checkpoint_every else None,
        "STRETTO_RESUME": str(order.resume.resolve()) if order.resume else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _path(environment: dict[str, str]) -> dict[str, str]:
    """Where a process finds this package when the launcher runs from a checkout that is not installed."""
    known = {*site.getsitepackages(), site.getusersitepackages()}
    found = {str(Path(entry).resolve()) for entry in sys.path if entry not in known}
    if str(ROOT) in known or str(ROOT) not in found:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))}
