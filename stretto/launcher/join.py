"""Workers that join a running run, from this or another machine that sees the run directory.

`stretto run --host` writes the addresses of the services, the keys and the configuration to `join.json`; each joining
launcher reserves ranks by creating files in `joined/`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.endpoints import Keys, Pair, Servers
from stretto.launcher.entry import check
from stretto.launcher.process_specs import ProcessPlan
from stretto.process_config import KeyTexts
from stretto.run_config import Output, RunConfig, decode_path
from stretto.run_dir import cores

JOIN_INFO = "join.json"
JOINED = "joined"
"""Directory with one empty file for each rank that is taken."""
CONNECT_S = 5.0
"""Limit of the wait for a connection to the coordinator."""


class JoinInfo(msgspec.Struct, frozen=True):
    """Addresses, keys and configuration for launchers that join. `keys` are those of a worker."""

    services: tuple[str, ...]
    """Addresses of the coordinator and, in a run over a parameter server, of the batch dispatcher and the shards."""
    keys: KeyTexts | None
    config: RunConfig

    def servers(self) -> Servers:
        """Return the services of the run, as a joining launcher sees them."""
        keys = Keys(Pair(self.keys[0], ""), Pair(*self.keys[1:])) if self.keys is not None else None
        return Servers((), keys, elsewhere=self.services)


@dataclass(frozen=True)
class JoinRequest:
    """Options of `stretto join`."""

    run: Path
    workers: int = 1
    threads: int | None = None
    output: Output = "none"
    restarts: int = 3


def write_join_info(folder: Path, config: RunConfig, servers: Servers) -> None:
    """Write `join.json`, readable by its owner only. Raises LogError if the disk does not take it."""
    assert servers.coordinator_at is not None
    script = config.script if config.module else config.script.absolute()
    config = replace(config, script=script, out=None, resume=None, faults=None, min_workers=1)
    config = replace(config, scaled_workers=config.workers)
    text = msgspec.json.encode(
        JoinInfo((servers.coordinator_at, *servers.addresses), servers.worker_keys, config), enc_hook=str
    )
    path = folder / JOIN_INFO
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror}") from error


def plan_of_join(request: JoinRequest) -> ProcessPlan:
    """Return the plan of the joining workers. Raises LaunchError if they cannot join the run."""
    if request.workers < 1:
        problem, expected = f"{request.workers} workers cannot join", "at least 1"
        raise LaunchError(explain(problem, got=f"-n {request.workers}", expected=expected, to_type="-n 2"))
    info = _read(request.run)
    check(info.config.script, info.config.module)
    local_address = _connect(info.services[0])
    config = replace(
        info.config,
        host=local_address,
        threads=request.threads or max(1, cores() // request.workers),
        output=request.output,
        restarts=request.restarts,
    )
    ranks = _reserve_ranks(request.run / JOINED, config.workers, request.workers)
    return ProcessPlan(config, request.run, None, info.servers(), joining=ranks)


def _read(run: Path) -> JoinInfo:
    path = run / JOIN_INFO
    try:
        return msgspec.json.decode(path.read_bytes(), type=JoinInfo, dec_hook=decode_path)
    except FileNotFoundError:
        problem = f"{run} cannot be joined" if run.is_dir() else f"there is no run {run}"
        expected, to_type = "the folder of a run with --host, on a disk that both machines see", "stretto join runs/RUN"
        raise LaunchError(explain(problem, got=f"no {path}", expected=expected, to_type=to_type)) from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        problem, expected = (
            f"{path} does not describe a run to join: {error}",
            "the file that `stretto run --host` has written",
        )
        raise LaunchError(
            explain(problem, got="another file", expected=expected, to_type="stretto join RUN")
        ) from error


def _connect(coordinator: str) -> str:
    """Return the address of this machine on the way to the coordinator, which must accept a connection."""
    from stretto.security import address_toward  # imports zmq

    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
        return address_toward(host)
    except OSError as error:
        problem, expected = "the run has ended, or this machine cannot reach it", f"a coordinator at {coordinator}"
        to_type = "stretto run --host ADDRESS ..., with an address that both machines know"
        raise LaunchError(explain(problem, got=str(error), expected=expected, to_type=to_type)) from error


def _reserve_ranks(folder: Path, first: int, count: int) -> tuple[int, ...]:
    """Return the first free ranks, each reserved by a file of its name."""
    reserved: list[int] = []
    try:
        folder.mkdir(exist_ok=True)
        while len(reserved) < count:
            try:
                (folder / str(first)).touch(exist_ok=False)
                reserved.append(first)
            except FileExistsError:
                pass
            first += 1
    except OSError as error:
        raise LaunchError(f"{error.filename} cannot be written: {error.strerror}") from error
    return tuple(reserved)
