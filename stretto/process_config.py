"""Configuration of one process of a run, which its launcher passes in the environment variable STRETTO_CONFIG.

`stretto run` does not set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: other libraries (Accelerate, transformers,
Lightning) would open a process group at MASTER_PORT. Those variables belong to torchrun, and are read only where
torchrun has set them.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.errors import LaunchError, explain
from stretto.faults.stragglers import factors
from stretto.interval import NEVER
from stretto.run_config import RunConfig, decode_path

VARIABLE = "STRETTO_CONFIG"
FIRST_PORT, PORTS = 20_000, 10_000
"""First of the ports for the rendezvous of srun's tasks, and their number; which one depends on job and step."""
MAX_RANK = 10**6 - 1
"""Largest number of a worker."""
RECIPE = "STRETTO_RECIPE"
"""Recipe of a script that torchrun has started."""
OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables that `stretto run` removes from the environment of its workers."""

KeyTexts = tuple[str, str, str]
"""Three CURVE keys of a client: the public key of the services, its own public key, and its own secret key."""


class Config(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Configuration of a process; `environment` is the part of its environment that carries it."""

    options: RunConfig = RunConfig(Path(sys.argv[0]))
    """Options of the run; the defaults where no launcher of Stretto's has started it."""
    run: str | None = None
    """Run directory, absolute; None where the process has to make one, or does not see it (`sends_events`)."""
    listen_fd: int | None = None
    """Descriptor of a listening socket that the process inherits."""
    status_fd: int | None = None
    """Descriptor of the page in which the process notes its position, for the launcher, and receives its keys."""
    keys: tuple[str, ...] | None = None
    """Keys of a worker (`KeyTexts`, then that for the relay), the secret of the run for a service, or the relay's key;
    None where traffic is not encrypted. A launcher passes them in the page of `status_fd`, not in the environment."""

    def environment(self) -> dict[str, str]:
        """Return the environment variable that carries this configuration."""
        return {VARIABLE: msgspec.json.encode(self, enc_hook=str).decode()}


ConfigT = TypeVar("ConfigT", bound=Config)


class WorkerConfig(Config, frozen=True, kw_only=True, tag="worker"):
    """Configuration of a worker process."""

    worker: int = 0
    """Number of the worker, from 0."""
    rank: int = 0
    """Number of this process within its worker."""
    ranks: int = 1
    """Number of processes of each worker."""
    incarnation: int = 0
    """Number of earlier starts of this worker."""
    store: str | None = None
    """Address of the rendezvous store, host:port."""
    store_prefix: str = "stretto"
    agent_store: bool = False
    """True if torchrun's agent keeps the store, and not worker 0."""
    coordinator: str | None = None
    """Address of the coordinator, host:port; None where the run has none."""
    servers: tuple[str, ...] = ()
    """Addresses of the parameter server: of the batch dispatcher, then of each shard."""
    relay: str | None = None
    """Address of the relay, host:port; None where the run has none, or is not encrypted."""
    share_limit: int = 0
    """Largest share of a global step that this worker has memory for, after it has run out of it; 0 if it has not."""
    servers_by_relay: bool = False
    """True if the relay passes the traffic with the parameter server on, whose ports this machine does not reach."""

    @property
    def world_size(self) -> int:
        """Number of workers that were started."""
        return self.options.initial_workers

    @property
    def coordinator_host(self) -> str:
        """Address of this machine toward others of the run, or else of the coordinator; loopback without one."""
        return self.options.host or (self.coordinator or "127.0.0.1:0").rpartition(":")[0]

    @property
    def joins(self) -> bool:
        """True if this process joins a run that has begun."""
        return self.incarnation > 0 or self.worker >= self.world_size

    @property
    def sends_events(self) -> bool:
        """True if this worker does not see the run directory: it sends its events to the coordinator."""
        return self.run is None and self.coordinator is not None

    @property
    def slowdown(self) -> float:
        """Factor by which the compute time is prolonged (`--stragglers`)."""
        return factors(self.options.stragglers, self.options.initial_workers).get(self.worker, 1.0)

    @property
    def store_address(self) -> tuple[str, int] | None:
        """Host and port of the rendezvous store."""
        host, _, port = (self.store or "").rpartition(":")
        return (host, int(port)) if host else None


class ServiceConfig(Config, frozen=True, kw_only=True):
    """Configuration of a process that serves workers."""

    dispatcher_fd: int | None = None
    """Descriptor of the listening socket of the batch dispatcher, if this process serves it."""

    @property
    def max_worker(self) -> int:
        """Largest number of a worker: those of workers that join are above those of the first."""
        return MAX_RANK if self.options.host is not None else self.options.initial_workers - 1


class ShardConfig(ServiceConfig, frozen=True, kw_only=True, tag="shard"):
    """Configuration of the process that holds one shard of the parameters."""

    shard: int
    shards: int
    snapshots: str | None = None
    """Directory of snapshots; None where a failed server is not restarted."""
    restarted: bool = False


class CoordinatorConfig(ServiceConfig, frozen=True, kw_only=True, tag="coordinator"):
    """Configuration of the coordinator process."""

    asynchronous: bool = False
    """True if the recipe is asynchronous, as far as the launcher knows it."""
    zero: float = 0.0
    """Reading of `time.perf_counter` at the start of the run."""
    servers: tuple[str, ...] = ()
    """Addresses of the parameter server, which is notified of failed workers."""
    snapshot_interval_s: float | None = None
    """Seconds between two snapshots of a parameter server."""
    services: tuple[str, ...] = ()
    """Addresses of the relay and of the parameter server, for workers that join."""


class RelayConfig(Config, frozen=True, kw_only=True, tag="relay"):
    """Configuration of the relay."""

    coordinator: str
    """Address of the coordinator."""
    services: tuple[str, ...] = ()
    """Addresses of the batch dispatcher and of the shards."""


_RECEIVED: list[tuple[str, ...]] = []
"""Keys that this process has received from its launcher; empty without."""


def with_keys(config: ConfigT, keys: tuple[str, ...]) -> ConfigT:
    """Return the configuration with the keys that its launcher has passed; `worker_config` returns them from now on."""
    _RECEIVED[:] = [keys]
    return msgspec.structs.replace(config, keys=keys)


def worker_config(environment: Mapping[str, str] = os.environ) -> WorkerConfig | None:
    """Return the configuration of this worker, from `stretto run`, torchrun or srun; None for `python train.py`."""
    text = environment.get(VARIABLE)
    if text is not None:
        config = _decoded(text)
        return msgspec.structs.replace(config, keys=_RECEIVED[0]) if config is not None and _RECEIVED else config
    if "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    return _of_srun(environment) if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1 else None


@functools.lru_cache(maxsize=4)
def _decoded(text: str) -> WorkerConfig | None:
    config = msgspec.json.decode(
        text, type=WorkerConfig | ShardConfig | CoordinatorConfig | RelayConfig, dec_hook=decode_path
    )
    return config if isinstance(config, WorkerConfig) else None


def _of_torchrun(environment: Mapping[str, str]) -> WorkerConfig:
    store = None
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        store = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return WorkerConfig(
        worker=_number(environment, "RANK", 0),
        store=store,
        store_prefix=f"stretto/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        options=_options(environment, "WORLD_SIZE"),
    )


def _of_srun(environment: Mapping[str, str]) -> WorkerConfig:
    """Return the configuration of a task of `srun python train.py`: MASTER_ADDR and MASTER_PORT may be set, too."""
    host = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
    port = _number(environment, "MASTER_PORT", FIRST_PORT + (job * 16 + step) % PORTS)
    return WorkerConfig(
        worker=_number(environment, "SLURM_PROCID", 0),
        store=f"{host}:{port}",
        store_prefix=f"stretto/{job}.{step}/{environment.get('SLURM_RESTART_COUNT', '0')}",
        options=_options(environment, "SLURM_STEP_NUM_TASKS"),
    )


def _options(environment: Mapping[str, str], workers: str) -> RunConfig:
    """Return the options of a script that no launcher of Stretto's has started; `workers` names their number."""
    recipe = environment.get(RECIPE) or None
    count = _number(environment, workers, 1)
    return RunConfig(Path(sys.argv[0]), workers=count, recipe=recipe, checkpoint_every=NEVER)


def first_host(nodes: str) -> str:
    """Return the first host of a list of nodes as Slurm writes it.

    >>> first_host("n1"), first_host("gpu[007-9,12],cpu3"), first_host("a,b[1-2]")
    ('n1', 'gpu007', 'a')
    """
    name, bracket, numbers = nodes.partition("[")
    if "," in name or not bracket:
        return name.partition(",")[0]
    return name + re.split(r"[-,\]]", numbers, maxsplit=1)[0]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        problem = f"the environment variable {name} is not a number"
        raise LaunchError(
            explain(problem, got=text, expected="a whole number", to_type="stretto run, or torchrun")
        ) from None
