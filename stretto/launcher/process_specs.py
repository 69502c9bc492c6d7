"""Specifications of the processes of a run: number, command, environment, configuration, inherited sockets.

Workers are numbered by rank from 0. Servers have numbers below 0, so that one table holds both: server 0 is -1, server
1 is -2; the coordinator and the relay have numbers below those of all servers. A restarted process keeps its number;
its incarnation is one higher.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from msgspec.structs import replace

from stretto.events import COORDINATOR, RELAY, process_name
from stretto.launcher.config import codec_folder, is_asynchronous
from stretto.launcher.endpoints import Servers, address
from stretto.launcher.listeners import LOOPBACK, interface_of
from stretto.launcher.worker_main import FILE, MODULE
from stretto.process_config import (
    OF_TORCHRUN,
    RECIPE,
    VARIABLE,
    Config,
    CoordinatorConfig,
    RelayConfig,
    ShardConfig,
    WorkerConfig,
)
from stretto.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT_INTERVAL_S = 10.0
"""Interval of the snapshots of all shards, to roll back to when a shard fails."""


@dataclass(frozen=True)
class ProcessSpec:
    """Number, command, environment and configuration of a process to start. The configuration holds keys."""

    number: int
    of: int
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    config: Config = field(repr=False)
    fds: list[int] = field(default_factory=list)
    rank: int = 0
    """Rank of the process within its worker."""
    workdir: Path | None = None
    """Working folder of the process; None for that of this launcher."""

    def __str__(self) -> str:
        return process_name(self.number, self.rank) + (f" of {self.of}" if self.number > COORDINATOR else "")


def shard_of(number: int) -> int:
    """Return the shard of the server with this number."""
    return -1 - number


def server_of(shard: int) -> int:
    """Return the number of the server of a shard."""
    return -1 - shard


@dataclass(frozen=True)
class ProcessPlan:
    """Plan of the processes of a run; `zero` is the reading of `time.perf_counter` at its start.

    `joining` are the numbers of workers that join the run of another launcher; there are no other processes then, and
    `incarnation` is that with which they begin.
    """

    config: RunConfig
    folder: Path
    listener: socket | None
    servers: Servers
    zero: float = 0.0
    joining: tuple[int, ...] = ()
    incarnation: int = 0
    sees_run: bool = True
    """False for workers of another machine, which do not see the directory of the run; `folder` is their own then."""
    workdir: Path | None = None
    """Working folder of the script; None for that of this launcher."""
    servers_by_relay: bool = False
    """True if this machine does not reach the ports of the parameter server."""

    @property
    def numbers_shown(self) -> range:
        """Workers whose output reaches this launcher by another way than their log files: a pipe, or ssh."""
        return range(self.config.awaited if self.config.on is None else 0)

    def all(self) -> Iterator[ProcessSpec]:
        """Yield all processes: the coordinator first, to which all connect; workers before servers, since they take
        longer to start.
        """
        numbers = [*(self.joining or range(self.config.workers)), *map(server_of, range(self.servers.shards))]
        if self.servers.coordinator is not None:
            numbers.insert(0, COORDINATOR)
        if self.servers.relay is not None:
            numbers.insert(1, RELAY)
        return (part for number in numbers for part in self.parts(number, self.incarnation))

    def parts(self, number: int, incarnation: int = 0, share_limit: int = 0) -> list[ProcessSpec]:
        """Return the specifications of the ranks of a worker, or of a service, for its first start or a restart."""
        ranks = range(self.config.ranks if number >= 0 else 1)
        return [self.part(number, incarnation, rank, share_limit) for rank in ranks]

    def part(self, number: int, incarnation: int = 0, rank: int = 0, share_limit: int = 0) -> ProcessSpec:
        """Return the specification of one process."""
        if number == COORDINATOR:
            return self._coordinator()
        if number == RELAY:
            return self._relay()
        return (
            self._worker(number, incarnation, rank, share_limit) if number >= 0 else self._server(number, incarnation)
        )

    def _worker(self, number: int, incarnation: int, rank: int, share_limit: int) -> ProcessSpec:
        """Return a rank of a worker. Worker 0 inherits the listening socket of the rendezvous: its port stays free."""
        config, listener = self.config, None if number or rank else self.listener
        command = [sys.executable, "-P", "-m", "stretto.launcher.worker_main"]
        command += [MODULE if config.module else FILE, str(config.script), *config.args]
        workers = max(config.initial_workers, *(joined + 1 for joined in self.joining or (0,)))
        fds = [listener.fileno()] if listener is not None else []
        environment = environment_of(number * config.ranks + rank, config)
        process = replace(self._worker_config(number, incarnation, rank, listener), share_limit=share_limit)
        return ProcessSpec(number, workers, command, environment, process, fds, rank, self.workdir)

    def _worker_config(self, number: int, incarnation: int, rank: int, listener: socket | None) -> WorkerConfig:
        config, servers = self.config, self.servers
        return WorkerConfig(
            options=config,
            run=self._run if self.sees_run else None,
            listen_fd=listener.fileno() if listener is not None else None,
            worker=number,
            rank=rank,
            ranks=self.config.ranks,
            incarnation=incarnation if config.elastic else 0,
            store=address(self.listener) if self.listener is not None else None,
            coordinator=servers.coordinator_at,
            servers=servers.addresses,
            relay=servers.relay_at if servers.relay_secret else None,
            servers_by_relay=self.servers_by_relay,
            keys=servers.keys_of_worker(number),
        )

    def _server(self, number: int, incarnation: int) -> ProcessSpec:
        """Return the server of a shard. It has no recipe: the workers bring it."""
        config, servers, shard = self.config, self.servers, shard_of(number)
        serves_dispatcher = not shard and servers.coordinator is None
        fds = servers.inherited(shard, serves_dispatcher) if not servers.hosted else []
        process = ShardConfig(
            options=config,
            run=self._run,
            shard=shard,
            shards=servers.shards,
            listen_fd=fds[0] if fds else None,
            dispatcher_fd=fds[1] if serves_dispatcher else None,
            keys=(servers.secret,) if servers.secret else None,
            snapshots=str(self.folder.resolve() / "snapshots") if config.elastic else None,
            restarted=incarnation > 0,
        )
        return service_spec(number, servers.shards, "shard_main", process, fds)

    def _coordinator(self) -> ProcessSpec:
        """Return the coordinator. It holds the settings of the run, so workers cannot disagree on them."""
        servers = self.servers
        assert servers.coordinator is not None
        fds = [one.fileno() for one in (servers.coordinator, *servers.sockets[:1])]
        process = CoordinatorConfig(
            run=self._run,
            listen_fd=fds[0],
            dispatcher_fd=fds[1] if servers.sockets else None,
            options=self.config,
            asynchronous=is_asynchronous(self.config),
            zero=self.zero,
            keys=(servers.secret,) if servers.secret else None,
            servers=servers.addresses if is_asynchronous(self.config) else (),
            services=(servers.joined_at or "", *servers.addresses),
            snapshot_interval_s=_snapshot_interval_s(self.config),
        )
        return service_spec(COORDINATOR, 1, "coordinator_main", process, fds)

    def _relay(self) -> ProcessSpec:
        servers, relay = self.servers, self.servers.relay
        assert relay is not None
        assert servers.coordinator is not None
        fd = relay.fileno()
        process = RelayConfig(
            options=self.config,
            run=self._run,
            listen_fd=fd,
            keys=servers.relay_secret,
            coordinator=address(servers.coordinator),
            services=servers.addresses,
        )
        return service_spec(RELAY, 1, "relay_main", process, [fd])

    @property
    def _run(self) -> str:
        return str(self.folder.resolve())


def service_spec(number: int, of: int, module: str, process: Config, fds: list[int]) -> ProcessSpec:
    """Return the specification of a service, whose entry point is a module of this package."""
    environment = _common(process.options) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", f"stretto.launcher.{module}"]
    environment |= _path(environment)
    if (folder := codec_folder(process.options)) is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), folder]))
    return ProcessSpec(number, of, command, environment, process, fds)


def _snapshot_interval_s(config: RunConfig) -> float:
    """Return the interval of snapshots: short enough for a checkpoint to be written when it is due."""
    shortest_s = due.shortest_s if (due := config.checkpoints) is not None else None
    return min(SNAPSHOT_INTERVAL_S, shortest_s or SNAPSHOT_INTERVAL_S)


def environment_of(place: int, config: RunConfig) -> dict[str, str]:
    """Return the environment of a process of a worker, the `place`-th of all workers' processes.

    It is the launcher's without torchrun's variables, with one of the GPUs and the process's share of the cores.
    """
    environment = _common(config)
    if config.host is not None:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface_of(config.host))
    if devices := gpus(environment):
        environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    if config.threads or "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(config.threads_each())
    return environment | _path(environment)


def _common(config: RunConfig) -> dict[str, str]:
    """Return the launcher's environment without the configuration of another run.

    The hash seed is fixed because workers that iterate over a set of names must do so in the same order.
    """
    removed = (VARIABLE, RECIPE, *OF_TORCHRUN)
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    return {**DEFAULTS, "PYTHONHASHSEED": str(config.seed), **environment}


DEFAULTS = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Defaults that the user may override. Threads that wait by spinning would slow down a single process most, which would
make every recipe look fast in comparison."""


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that the workers share, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [device for device in environment["CUDA_VISIBLE_DEVICES"].split(",") if device]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)


def _path(environment: dict[str, str]) -> dict[str, str]:
    """Return PYTHONPATH for child processes of a launcher that runs from a checkout that is not installed."""
    site_folders = {*site.getsitepackages(), site.getusersitepackages()}
    folders = {str(Path(entry).resolve()) for entry in sys.path if entry not in site_folders}
    if str(ROOT) in site_folders or str(ROOT) not in folders:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))}
