"""A worker's side of a parameter server, against a server that replies when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto import codecs
from stretto.parameter_server.client_types import PushResult, Update
from stretto.recipe.parser import parse
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.traffic_counters import Tally


@dataclass
class Ticket:
    server: Server
    version: int | None = None

    def poll(self) -> bool:
        return self.version is not None

    def wait(self, take: Any) -> PushResult:
        assert self.version is not None, "the worker waits for what will not come"
        take(0, 0, torch.full((self.server.length,), float(self.version)))
        return PushResult([self.version], [], set(), 0.0)


@dataclass
class Server:
    """Replies with parameters that are the version's number everywhere."""

    length: int
    worker: int = 1
    workers: int = 2
    shards: int = 1
    expected: int = 2
    recovery_epoch: int = 0
    join_position: None = None
    pushed: list[Update] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return [b"open"] * self.workers

    def leave_barrier(self) -> None:
        pass

    def push(self, arena: int, update: Update, lengths: Sequence[int]) -> Ticket:
        messages: Sequence[Sequence[Tensor]] = [[one.clone() for one in each] for each in update.messages]
        self.pushed.append(Update(update.seq, list(update.versions), update.samples, update.lr, messages))
        self.tickets.append(Ticket(self))
        return self.tickets[-1]


class Scene:
    """One worker with one parameter of 16 numbers, all 0 at first."""

    def __init__(self, recipe: str) -> None:
        self.net = nn.Module()
        self.net.w = nn.Parameter(torch.zeros(16))
        self.arena = FlatParameters([("w", cast("nn.Parameter", self.net.w))])
        self.server = Server(16)
        optimizer = torch.optim.SGD([cast("nn.Parameter", self.net.w)], lr=1.0)
        self.exchange = AsyncServer(
            self.arena,
            1,
            parse(recipe),
            cast("Any", self.server),
            Stopwatch(lambda: 0.0),
            Tally(codecs.CodecContext(1, 2)),
            Optimizers([optimizer]),
            lambda leases: None,
            lambda blocked_s: None,
            False,
        )

    @property
    def w(self) -> float:
        return float(self.arena.parts[0].theta[0])

    def learn(self, change: float) -> None:
        with torch.no_grad():
            self.arena.parts[0].theta.add_(change)
        self.exchange.stepped()

    def sent(self) -> tuple[list[int], float]:
        """The version that the last update was computed on, and what it says."""
        return list(self.server.pushed[-1].versions), float(self.server.pushed[-1].messages[0][0][0])


def test_overlap_computes_on_and_says_on_what() -> None:
    scene = Scene("async_sgd(overlap=True)")
    scene.learn(0.25)
    scene.exchange.run(8, [])
    assert scene.sent() == ([0], 0.25)
    scene.learn(0.5)  # while the reply is on its way
    scene.server.tickets[0].version = 5
    scene.exchange.run(8, [])
    assert scene.sent() == ([0], 0.5), "computed before version 5 was heard of"
    assert scene.w == 5.5, "the news, and what was learned since the push"
    scene.learn(0.125)
    scene.server.tickets[1].version = 9
    scene.exchange.run(8, [])
    assert scene.sent() == ([5], 0.125)


def test_overlap_takes_up_news_between_batches_when_they_are_there() -> None:
    scene = Scene("async_sgd(overlap=True)")
    scene.learn(0.25)
    scene.exchange.run(8, [])
    scene.exchange.merge_if_arrived()
    assert scene.w == 0.25, "nothing has come yet"
    scene.server.tickets[0].version = 5
    scene.exchange.merge_if_arrived()
    assert scene.w == 5.0, "nothing was learned since: the version as it is"
    scene.learn(0.5)
    scene.exchange.run(8, [])
    assert scene.sent() == ([5], 0.5)


def test_without_overlap_the_next_round_is_computed_on_the_reply() -> None:
    scene = Scene("async_sgd")
    for version in (3, 4):
        scene.learn(0.25)
        push = scene.server.push

        def at_once(
            arena: int, update: Update, lengths: Sequence[int], version: int = version, push: Any = push
        ) -> Ticket:
            ticket: Ticket = push(arena, update, lengths)
            ticket.version = version
            return ticket

        scene.server.push = at_once  # type: ignore[method-assign]
        scene.exchange.run(8, [])
        assert scene.w == version
    assert [one.versions for one in scene.server.pushed] == [[0], [3]]


def test_a_worker_is_pulled_towards_the_servers_parameters() -> None:
    """`x -= alpha * (x_sent - c)`; what was learned meanwhile is kept."""
    scene = Scene("elastic_averaging(every=1, alpha=0.25, overlap=True)")
    scene.learn(4.0)
    scene.exchange.run(8, [])
    assert scene.sent() == ([0], 4.0)
    scene.learn(1.0)
    scene.server.tickets[0].version = 8
    scene.exchange.run(8, [])
    assert scene.sent() == ([0], 5.0 - 0.25 * (4.0 - 8.0))
