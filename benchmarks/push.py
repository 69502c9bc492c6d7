"""Our parameter server in processes of its own, and workers in theirs that push as fast as they can.

    python -m benchmarks.push 100000 4 5          parameters, workers, seconds: as the peers are measured
    python -m benchmarks.push 100000 4 5 curve    the same with encrypted traffic

A push is a whole exchange of `async_sgd`: the update goes to the server, which applies it, and the newest parameters
come back and are written in place of the worker's. The workers compute nothing.
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
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import WARM_UP_S, Outcome, Rate, show, total, update_of
from benchmarks.peers.processes import LIMIT_S, Child, say, told_to_end
from stretto.parameter_server.client_types import Update, split_among_shards
from stretto.parameter_server.rpc_channel import connect_client
from stretto.parameter_server.rpc_server import listening, serve
from stretto.process_config import ShardConfig
from stretto.security import WorkerKeys, new_keys

RECIPE = "async_sgd"
ARENA = 1


def measure(parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Rate:
    """Updates that our server applies per second, and their bytes."""
    return run(parameters, workers, seconds, curve, shards).rate()


def run(parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Outcome:
    """The same with the sums that show that each update was applied once."""
    with team(workers) as pushing:
        return pushing.run(parameters, workers, seconds, curve, shards)


# --- what the measurement holds in its hands --------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the servers are: the coordinator's address and the shards', and the keys of the workers, if any."""

    workers: int
    addresses: Sequence[str]
    keys: Sequence[str] | None


@contextmanager
def servers(workers: int, shards: int = 1, curve: bool = False) -> Iterator[Place]:
    """A parameter server for so many workers, each shard in a process of its own, which all end with the context."""
    ours, theirs = new_keys()
    secrets = _text(ours.secret, ours.public, ours.workers) if curve else ""
    with ExitStack() as stack:
        addresses: list[str] = []
        for shard in range(shards):
            asked = {"PUSH_SHARD": f"{shard} {shards} {workers}", "PUSH_KEYS": secrets}
            child = stack.enter_context(closing(Child(__spec__.name, "shard", asked)))
            addresses += child.hear()["addresses"]
        keys = _text(theirs.servers, theirs.public, theirs.secret).split() if curve else None
        yield Place(workers, addresses, keys)


def _text(*keys: bytes) -> str:
    return " ".join(one.decode() for one in keys)


@contextmanager
def team(workers: int) -> Iterator[Team]:
    """So many worker processes, which all end with the context."""
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(__spec__.name, "work", {}))) for _ in range(workers)]
        for one in children:
            one.hear()
        yield Team(children)


class Team:
    """Worker processes that push when they are told to. They can be sent from one server to another."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._all = children
        self._busy: Sequence[Child] = ()
        self._parameters = 0

    @contextmanager
    def at(self, place: Place, parameters: int) -> Iterator[None]:
        """The first of them, as many as the place is for, work there."""
        self._busy, self._parameters = self._all[: place.workers], parameters
        for worker, one in enumerate(self._busy):
            one.tell(do="join", worker=worker, parameters=parameters, **vars(place))
            one.hear()
        self._busy[0].tell(do="open")
        self._busy[0].hear()
        yield
        self.together(do="leave")

    def together(self, limit_s: float = LIMIT_S, **order: Any) -> list[dict[str, Any]]:
        """All do the same at once; what each says when it has done it."""
        for one in self._busy:
            one.tell(**order)
        return [one.hear(limit_s, [other for other in self._busy if other is not one]) for one in self._busy]

    def exchanges(self, count: int) -> list[list[float]]:
        """All push so often; the seconds of each exchange, for each worker."""
        return [said["seconds"] for said in self.together(do="exchanges", count=count)]

    def run(self, parameters: int, workers: int, seconds: float, curve: bool = False, shards: int = 1) -> Outcome:
        """Push for a while at a new server, once to get warm and once to be measured."""
        with servers(workers, shards, curve) as place, self.at(place, parameters):
            self.together(do="push", seconds=WARM_UP_S)
            said = self.together(LIMIT_S + seconds, do="push", seconds=seconds)
            return self.outcome(sum(one["count"] / one["seconds"] for one in said))

    def outcome(self, updates_per_s: float) -> Outcome:
        """A rate beside all that was pushed at this server, and what the server made of it."""
        pushed = [said["pushed"] for said in self.together(do="count")]
        self._busy[0].tell(do="change")
        change = self._busy[0].hear()["change"]
        sums = [count * total(update_of(worker, self._parameters)) for worker, count in enumerate(pushed)]
        return Outcome(self._parameters, sum(pushed), updates_per_s, sum(sums), change)


# --- the processes ----------------------------------------------------------------------------------------------------


def shard() -> None:
    """A server process: one shard, and the coordinator beside the first one."""
    number, shards, workers = (int(one) for one in os.environ["PUSH_SHARD"].split())
    coordinator = listening() if number == 0 else None
    own = listening()
    say(addresses=[f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (coordinator, own) if one])
    threading.Thread(target=_end_when_told, daemon=True).start()
    keys = tuple(os.environ["PUSH_KEYS"].split()) or None
    fd = coordinator.detach() if coordinator else None
    serve(
        ShardConfig(
            shard=number,
            shards=shards,
            workers=workers,
            listen_fd=own.detach(),
            dispatcher_fd=fd,
            keys=keys,  # type: ignore[arg-type]
            timeout_s=LIMIT_S,
        )
    )


def _end_when_told() -> None:
    told_to_end()
    os._exit(0)


def work() -> None:
    """A worker process: does what each line says."""
    torch.set_num_threads(1)
    pusher: Pusher | None = None
    say(ready=True)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        do = order.pop("do")
        if do == "join":
            pusher = Pusher(**order)
            say(joined=True)
        else:
            say(**getattr(pusher, do)(**order))


class Pusher:
    """One worker at a server."""

    def __init__(
        self, worker: int, workers: int, addresses: Sequence[str], keys: Sequence[str] | None, parameters: int
    ) -> None:
        known = WorkerKeys(*(one.encode() for one in keys)) if keys else None
        self._wire = connect_client(worker, workers, addresses, known, LIMIT_S)
        self._update = torch.from_numpy(update_of(worker, parameters))
        self._parameters = torch.zeros(parameters)
        self._versions = [0] * self._wire.shards
        self._pushed = 0

    def open(self) -> dict[str, Any]:
        """Give the server its parameters: zeros."""
        self._wire.open(ARENA, RECIPE, [self._parameters])
        return {}

    def exchanges(self, count: int) -> dict[str, Any]:
        """The seconds of each of so many exchanges."""
        return {"seconds": [self._timed() for _ in range(count)]}

    def push(self, seconds: float) -> dict[str, Any]:
        """Push again and again."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            self._exchange()
            count += 1
        return {"count": count, "seconds": time.perf_counter() - began}

    def count(self) -> dict[str, Any]:
        """How often this worker has pushed."""
        return {"pushed": self._pushed}

    def change(self) -> dict[str, Any]:
        """The sum of the server's parameters, which began as zeros."""
        self._wire.read([self._parameters.numel()]).wait(self._take)
        return {"change": total(self._parameters.numpy())}

    def leave(self) -> dict[str, Any]:
        """Leave the server."""
        self._wire.close()
        return {}

    def _timed(self) -> float:
        began = time.perf_counter()
        self._exchange()
        return time.perf_counter() - began

    def _exchange(self) -> None:
        self._pushed += 1
        messages = split_among_shards([self._update], self._wire.shards)
        update = Update(self._pushed, self._versions, 1, 0.0, messages)
        self._versions = self._wire.push(ARENA, update, [self._update.numel()]).wait(self._take).versions

    def _take(self, part: int, at: int, piece: Tensor) -> None:
        self._parameters[at : at + piece.numel()].copy_(piece)


def measure_with(curve: bool) -> Callable[[int, int, float], Rate]:
    """The measurement with encrypted traffic, or without."""
    return partial(measure, curve=curve)


if __name__ == "__main__":
    encrypted = sys.argv[-1] == "curve"
    if encrypted:
        sys.argv.pop()
    show(measure_with(encrypted))
