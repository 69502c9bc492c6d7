"""More workers for a run that goes on: those of another machine, or of this one.

The run's folder is the meeting place: both machines see it, and an invitation lies in it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.config import Output, RunConfig
from stretto.launcher.endpoints import Keys, Pair, Servers
from stretto.launcher.entry import check
from stretto.launcher.process_specs import ProcessPlan
from stretto.run_dir import cores

INVITATION = "invitation.json"
GUESTS = "guests"
"""The folder of the numbers that are taken."""
CALL_S = 5.0
"""How long the coordinator may take to answer a call."""


class JoinInfo(msgspec.Struct, frozen=True):
    """What those who join have to know. `keys` are the server's public one and the workers' pair."""

    coordinator: str
    keys: tuple[str, str, str] | None
    order: RunConfig

    def servers(self) -> Servers:
        """The services that the run has, as its guests see them."""
        keys = Keys(Pair(self.keys[0], ""), Pair(*self.keys[1:])) if self.keys is not None else None
        return Servers((), keys, elsewhere=self.coordinator)


@dataclass(frozen=True)
class JoinRequest:
    """What a person asks for who joins a run."""

    run: Path
    workers: int = 1
    threads: int | None = None
    output: Output = "none"
    restarts: int = 3


def invite(folder: Path, order: RunConfig, servers: Servers) -> None:
    """Lay down an invitation, which only the owner can read. Raises LogError when the disk does not take it."""
    own = servers.keys
    keys = (own.server.public, own.worker.public, own.worker.secret) if own is not None else None
    assert servers.coordinator_at is not None
    script = order.script if order.module else order.script.absolute()
    order = replace(order, script=script, out=None, resume=None, faults=None, min_workers=1)
    order = replace(order, scaled_workers=order.workers)
    text = msgspec.json.encode(JoinInfo(servers.coordinator_at, keys, order), enc_hook=str)
    path = folder / INVITATION
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror}") from error


def cast_of(guests: JoinRequest) -> ProcessPlan:
    """The workers that join. Raises LaunchError when there is no run that they can join."""
    if guests.workers < 1:
        problem, expected = f"{guests.workers} workers cannot join", "at least 1"
        raise LaunchError(explain(problem, got=f"-n {guests.workers}", expected=expected, to_type="-n 2"))
    invitation = _read(guests.run)
    check(invitation.order.script, invitation.order.module)
    here = _call(invitation.coordinator)
    order = replace(
        invitation.order,
        host=here,
        threads=guests.threads or max(1, cores() // guests.workers),
        output=guests.output,
        restarts=guests.restarts,
    )
    numbers = _take_numbers(guests.run / GUESTS, order.workers, guests.workers)
    return ProcessPlan(order, guests.run, None, invitation.servers(), guests=numbers)


def _read(run: Path) -> JoinInfo:
    path = run / INVITATION
    try:
        return msgspec.json.decode(path.read_bytes(), type=JoinInfo, dec_hook=_path)
    except FileNotFoundError:
        problem = f"nobody can join {run}" if run.is_dir() else f"there is no run {run}"
        expected, to_type = "the folder of a run with --host, on a disk that both machines see", "stretto join runs/RUN"
        raise LaunchError(explain(problem, got=f"no {path}", expected=expected, to_type=to_type)) from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        problem, expected = f"{path} is no invitation: {error}", "the file that `stretto run --host` has written"
        raise LaunchError(
            explain(problem, got="another file", expected=expected, to_type="stretto join RUN")
        ) from error


def _path(wanted: type, value: Any) -> Any:
    return wanted(value)


def _call(coordinator: str) -> str:
    """This machine's address toward a coordinator that answers."""
    from stretto.security import address_toward  # and with it zmq

    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CALL_S).close()
        return address_toward(host)
    except OSError as error:
        problem, expected = "the run has ended, or this machine cannot reach it", f"a coordinator at {coordinator}"
        to_type = "stretto run --host ADDRESS ..., with an address that both machines know"
        raise LaunchError(explain(problem, got=str(error), expected=expected, to_type=to_type)) from error


def _take_numbers(folder: Path, first: int, wanted: int) -> tuple[int, ...]:
    """The first numbers that nobody has taken, each taken by a file of its name."""
    taken: list[int] = []
    try:
        folder.mkdir(exist_ok=True)
        while len(taken) < wanted:
            try:
                (folder / str(first)).touch(exist_ok=False)
                taken.append(first)
            except FileExistsError:
                pass
            first += 1
    except OSError as error:
        raise LaunchError(f"{error.filename} cannot be written: {error.strerror}") from error
    return tuple(taken)
