"""Real parameter servers in threads of this process or in processes of their own, and requests of tests to them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import PushHandle, PushResult, Update, split_among_shards
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.embedded import EmbeddedServer, start_server
from stretto.parameter_server.rpc_server import ServerThreads, listening
from stretto.parameter_server.service import Service
from stretto.process_config import ShardConfig

ADDING_RECIPE = "downpour(every=1)"
"""Recipe whose server adds each update without scaling it."""


class Servers:
    """Servers in threads, and the workers' clients of them; `close` closes all."""

    def __init__(self) -> None:
        self._servers: list[EmbeddedServer] = []
        self._clients: list[ParameterServerClient] = []

    def start(self, workers: int, **options: Any) -> EmbeddedServer:
        """Start a server and return it."""
        self._servers.append(start_server(workers, **options))
        return self._servers[-1]

    def client(self, server: EmbeddedServer, worker: int, timeout_s: float = 20.0) -> ParameterServerClient:
        """Return a new client of a worker."""
        self._clients.append(server.client(worker, timeout_s))
        return self._clients[-1]

    def clients(self, server: EmbeddedServer, timeout_s: float = 20.0) -> list[ParameterServerClient]:
        """Return a new client of each worker."""
        return [self.client(server, worker, timeout_s) for worker in range(server.workers)]

    def close(self) -> None:
        """Close all clients and servers; raise the first error of a service."""
        for client in self._clients:
            client.close()
        for server in self._servers:
            server.server._stop.set()
        for server in self._servers:
            server.close()
        failures = [
            service.failure for server in self._servers for service in server.server.services if service.failure
        ]
        if failures:
            raise failures[0]


class ServerProcesses:
    """Processes that serve shard 0, whose socket is kept open here between restarts, and a dispatcher in threads."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.snapshots = folder, folder / "snapshots"
        self._socket, dispatcher = listening(), listening()
        self.addresses = ["tcp://{}:{}".format(*each.getsockname()[:2]) for each in (dispatcher, self._socket)]
        self._dispatcher = ServerThreads(None, max_worker=0)
        self._dispatcher.open(dispatcher, Service(DispatcherHandler(1, time.monotonic, math.inf)))
        self._environment = environment
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int = 0) -> None:
        config = ShardConfig(
            run=str(self.folder),
            shard=0,
            shards=1,
            listen_fd=self._socket.fileno(),
            snapshots=str(self.snapshots),
        )
        command = [sys.executable, "-m", "stretto.launcher.shard_main"]
        environment = {**os.environ, **config.environment(), **self._environment}
        self.running[number] = subprocess.Popen(command, env=environment, pass_fds=[self._socket.fileno()])

    def kill(self, number: int = 0) -> None:
        process = self.running.pop(number)
        process.kill()
        process.wait(120)

    def end(self) -> None:
        for number in list(self.running):
            self.kill(number)
        self._dispatcher.close()
        self._socket.close()


def push(
    client: ParameterServerClient, seq: int, parts: Sequence[Tensor], version: int = 0, arena: int = 1
) -> PushHandle:
    """Send an update of 8 samples."""
    update = Update(seq, [version] * client.shards, 8, 0.1, split_among_shards(parts, client.shards))
    return client.push(arena, update, [part.numel() for part in parts])


def receive(handle: PushHandle, like: Sequence[Tensor]) -> tuple[PushResult, list[Tensor]]:
    """Return the result of a push or pull and its tensors; fail unless every number is received exactly once."""
    parts = [torch.full_like(tensor, torch.nan) for tensor in like]

    def take(part: int, at: int, piece: Tensor) -> None:
        target = parts[part][at : at + piece.numel()]
        assert bool(target.isnan().all())
        target.copy_(piece)

    result = handle.wait(take)
    assert not any(bool(part.isnan().any()) for part in parts)
    return result, parts
