"""Our parameter server in separate processes, and worker processes that push as fast as they can.

    python -m benchmarks.push 100000 4 5          parameters, workers, seconds: as the peers are measured
    python -m benchmarks.push 100000 4 5 curve    the same with encrypted traffic

A push is a whole exchange of `async_sgd`: the update goes to the server, which applies it, and the newest parameters
come back and are copied over the worker's. The workers compute nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import WARM_UP_S, Outcome, Rate, show, total, update_of
from benchmarks.peers.processes import LIMIT_S, Child, send_result, wait_until_closed
from stretto.parameter_server.client_types import Update, split_among_shards
from stretto.parameter_server.rpc_channel import connect_client
from stretto.parameter_server.rpc_server import listening, serve
from stretto.process_config import ShardConfig
from stretto.run_config import RunConfig
from stretto.security import RunKeys

RECIPE = "async_sgd"
BUFFER_ID = 1


def measure(parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Rate:
    """Return the updates that our server applies per second, and their bytes."""
    return run(parameters, workers, seconds, curve, shards).rate()


def run(parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Outcome:
    """Measure, and return also the sums that show that each update was applied once."""
    with team(workers) as pushing:
        return pushing.run(parameters, workers, seconds, curve, shards)


# --- the measuring process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerAddresses:
    """Addresses of a server's coordinator and shards, number of its workers, and the secret of the run if encrypted."""

    workers: int
    addresses: Sequence[str]
    secret: str | None


@contextmanager
def servers(workers: int, shards: int = 1, curve: bool = False) -> Iterator[ServerAddresses]:
    """Start a parameter server, each shard in a process of its own; the processes end with the context."""
    keys = RunKeys.new()
    with ExitStack() as stack:
        addresses: list[str] = []
        for shard in range(shards):
            asked = {"PUSH_SHARD": f"{shard} {shards} {workers}", "PUSH_KEYS": keys.secret if curve else ""}
            child = stack.enter_context(closing(Child(__spec__.name, "shard", asked)))
            addresses += child.receive()["addresses"]
        yield ServerAddresses(workers, addresses, keys.secret if curve else None)


@contextmanager
def team(workers: int) -> Iterator[Team]:
    """Start worker processes, which end with the context."""
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(__spec__.name, "work", {}))) for _ in range(workers)]
        for one in children:
            one.receive()
        yield Team(children)


class Team:
    """Worker processes that push on request, and can connect to one server after another."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._workers = children
        self._connected: Sequence[Child] = ()
        self._parameters = 0

    @contextmanager
    def connected_to(self, server: ServerAddresses, parameters: int) -> Iterator[None]:
        """Connect as many of the workers as the server is for."""
        self._connected, self._parameters = self._workers[: server.workers], parameters
        for worker, one in enumerate(self._connected):
            one.send(do="join", worker=worker, parameters=parameters, **vars(server))
            one.receive()
        self._connected[0].send(do="open")
        self._connected[0].receive()
        yield
        self.request_all(do="leave")

    def request_all(self, limit_s: float = LIMIT_S, **request: Any) -> list[dict[str, Any]]:
        """Send the same request to all connected workers, and return the reply of each."""
        for worker in self._connected:
            worker.send(**request)
        return [
            worker.receive(limit_s, [other for other in self._connected if other is not worker])
            for worker in self._connected
        ]

    def exchanges(self, count: int) -> list[list[float]]:
        """Let all workers push `count` times; return the seconds of each exchange, for each worker."""
        return [reply["seconds"] for reply in self.request_all(do="exchanges", count=count)]

    def run(self, parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Outcome:
        """Push to a new server, first for WARM_UP_S and then for the measurement."""
        with servers(workers, shards, curve) as server, self.connected_to(server, parameters):
            self.request_all(do="push", seconds=WARM_UP_S)
            reply = self.request_all(LIMIT_S + seconds, do="push", seconds=seconds)
            return self.outcome(sum(one["count"] / one["seconds"] for one in reply))

    def outcome(self, updates_per_s: float) -> Outcome:
        """Return a rate together with the sum of all updates pushed to this server, and the sum of their effect."""
        pushed = [reply["pushed"] for reply in self.request_all(do="count")]
        self._connected[0].send(do="change")
        change = self._connected[0].receive()["change"]
        sums = [count * total(update_of(worker, self._parameters)) for worker, count in enumerate(pushed)]
        return Outcome(self._parameters, sum(pushed), updates_per_s, sum(sums), change)


# --- the processes ----------------------------------------------------------------------------------------------------


def shard() -> None:
    """Run a server process: one shard, and the coordinator in the process of the first shard."""
    number, shards, workers = (int(one) for one in os.environ["PUSH_SHARD"].split())
    coordinator = listening() if number == 0 else None
    shard_socket = listening()
    send_result(addresses=[f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (coordinator, shard_socket) if one])
    threading.Thread(target=_exit_when_closed, daemon=True).start()
    keys = tuple(os.environ["PUSH_KEYS"].split()) or None
    fd = coordinator.detach() if coordinator else None
    serve(
        ShardConfig(
            shard=number,
            shards=shards,
            options=RunConfig(Path(), workers=workers),
            listen_fd=shard_socket.detach(),
            dispatcher_fd=fd,
            keys=keys,
        )
    )


def _exit_when_closed() -> None:
    wait_until_closed()
    os._exit(0)


def work() -> None:
    """Run a worker process: carry out the request in each line."""
    torch.set_num_threads(1)
    pusher: Pusher | None = None
    send_result(ready=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        do = request.pop("do")
        if do == "join":
            pusher = Pusher(**request)
            send_result(joined=True)
        else:
            send_result(**getattr(pusher, do)(**request))


class Pusher:
    """One worker connected to a server."""

    def __init__(
        self, worker: int, workers: int, addresses: Sequence[str], secret: str | None, parameters: int
    ) -> None:
        keys = RunKeys(secret).client(b"worker %d" % worker) if secret else None
        self._client = connect_client(worker, workers, addresses, keys, LIMIT_S)
        self._update = torch.from_numpy(update_of(worker, parameters))
        self._parameters = torch.zeros(parameters)
        self._versions = [0] * self._client.shards
        self._pushed = 0

    def open(self) -> dict[str, Any]:
        """Send the initial parameters to the server: zeros."""
        self._client.open(BUFFER_ID, RECIPE, [self._parameters])
        return {}

    def exchanges(self, count: int) -> dict[str, Any]:
        """Return the seconds of each of `count` exchanges."""
        return {"seconds": [self._timed() for _ in range(count)]}

    def push(self, seconds: float) -> dict[str, Any]:
        """Push until `seconds` have passed."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            self._exchange()
            count += 1
        return {"count": count, "seconds": time.perf_counter() - began}

    def count(self) -> dict[str, Any]:
        """Return the number of this worker's pushes."""
        return {"pushed": self._pushed}

    def change(self) -> dict[str, Any]:
        """Return the sum of the server's parameters, which were initially zeros."""
        self._client.read([self._parameters.numel()]).wait(self._take)
        return {"change": total(self._parameters.numpy())}

    def leave(self) -> dict[str, Any]:
        """Disconnect from the server."""
        self._client.close()
        return {}

    def _timed(self) -> float:
        began = time.perf_counter()
        self._exchange()
        return time.perf_counter() - began

    def _exchange(self) -> None:
        self._pushed += 1
        messages = split_among_shards([self._update], self._client.shards)
        update = Update(self._pushed, self._versions, 1, 0.0, messages)
        self._versions = self._client.push(BUFFER_ID, update, [self._update.numel()]).wait(self._take).versions

    def _take(self, part: int, start: int, piece: Tensor) -> None:
        self._parameters[start : start + piece.numel()].copy_(piece)


def measure_with(curve: bool) -> Callable[[int, int, float], Rate]:
    """Return the measurement with or without encryption."""
    return partial(measure, curve=curve)


if __name__ == "__main__":
    encrypted = sys.argv[-1] == "curve"
    if encrypted:
        sys.argv.pop()
    show(measure_with(encrypted))
