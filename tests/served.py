"""A real parameter server in the threads of this process, and what tests say to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import PushHandle, PushResult, Update, split_among_shards
from stretto.parameter_server.embedded import EmbeddedServer, start_server
from stretto.parameter_server.rpc_server import listening
from stretto.process_config import ShardConfig

ADDING = "downpour(every=1)"
"""What comes is added as it is."""


class Serving:
    """Servers and the workers' ends; `end` closes them all."""

    def __init__(self) -> None:
        self._hosted: list[EmbeddedServer] = []
        self._ends: list[ParameterServerClient] = []

    def host(self, workers: int, **options: Any) -> EmbeddedServer:
        """A new server."""
        self._hosted.append(start_server(workers, **options))
        return self._hosted[-1]

    def end_of(self, hosted: EmbeddedServer, worker: int, timeout_s: float = 20.0) -> ParameterServerClient:
        """One worker's end of it."""
        self._ends.append(hosted.client(worker, timeout_s))
        return self._ends[-1]

    def ends(self, hosted: EmbeddedServer, timeout_s: float = 20.0) -> list[ParameterServerClient]:
        """All workers' ends of it."""
        return [self.end_of(hosted, worker, timeout_s) for worker in range(hosted.workers)]

    def end(self) -> None:
        """Leave none of them, and none of a service's errors unseen."""
        for one in self._ends:
            one.close()
        for hosted in self._hosted:
            hosted.server._stop.set()
        for hosted in self._hosted:
            hosted.close()
        failures = [one.failure for hosted in self._hosted for one in hosted.server.services if one.failure]
        if failures:
            raise failures[0]


class Processes:
    """Shard 0 and the coordinator in a process of their own, or in two; the sockets are kept here."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.cuts = folder, folder / "cuts"
        self._sockets = [listening(), listening()]
        self.addresses = ["tcp://{}:{}".format(*one.getsockname()[:2]) for one in self._sockets]
        self._environment = environment
        self.alive: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int = 0) -> None:
        descriptors = [one.fileno() for one in self._sockets]
        config = ShardConfig(
            run=str(self.folder),
            shard=0,
            shards=1,
            workers=1,
            dispatcher_fd=descriptors[0],
            listen_fd=descriptors[1],
            timeout_s=30.0,
            snapshots=str(self.cuts),
        )
        command = [sys.executable, "-m", "stretto.launcher.shard_main"]
        environment = {**os.environ, **config.environment(), **self._environment}
        self.alive[number] = subprocess.Popen(command, env=environment, pass_fds=descriptors)

    def kill(self, number: int = 0) -> None:
        one = self.alive.pop(number)
        one.kill()
        one.wait(30)

    def end(self) -> None:
        for number in list(self.alive):
            self.kill(number)
        for one in self._sockets:
            one.close()


def push(
    wire: ParameterServerClient, seq: int, parts: Sequence[Tensor], version: int = 0, arena: int = 1
) -> PushHandle:
    """Send an update of 8 samples."""
    update = Update(seq, [version] * wire.shards, 8, 0.1, split_among_shards(parts, wire.shards))
    return wire.push(arena, update, [one.numel() for one in parts])


def hear(ticket: PushHandle, like: Sequence[Tensor]) -> tuple[PushResult, list[Tensor]]:
    """What a ticket brings, each part whole; every number must come, and once."""
    parts = [torch.full_like(one, torch.nan) for one in like]

    def take(part: int, at: int, piece: Tensor) -> None:
        there = parts[part][at : at + piece.numel()]
        assert bool(there.isnan().all())
        there.copy_(piece)

    news = ticket.wait(take)
    assert not any(bool(one.isnan().any()) for one in parts)
    return news, parts
