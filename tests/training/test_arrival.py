"""The worker side of a parameter server, tested against a server that replies when the test decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from async_exchange import open_exchange
from torch import Tensor, nn

from stretto import codecs
from stretto.parameter_server.client_types import PushResult, Update
from stretto.recipe.parser import parse
from stretto.strategies.flat_buffers import FlatParameters


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
    """A server whose replies hold its version number in every element."""

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

    def follow(self, exchange: Any) -> None:
        pass

    def leave_barrier(self) -> None:
        pass

    def push(self, arena: int, update: Update, lengths: Sequence[int]) -> Ticket:
        messages: Sequence[Sequence[Tensor]] = [[message.clone() for message in part] for part in update.messages]
        self.pushed.append(Update(update.seq, list(update.versions), update.samples, update.lr, messages))
        self.tickets.append(Ticket(self))
        return self.tickets[-1]


class WorkerHarness:
    """One worker with one parameter of 16 elements, all 0 at first."""

    def __init__(self, recipe: str) -> None:
        self.net = nn.Module()
        self.net.w = nn.Parameter(torch.zeros(16))
        self.arena = FlatParameters([("w", cast("nn.Parameter", self.net.w))])
        self.server = Server(16)
        optimizer = torch.optim.SGD([cast("nn.Parameter", self.net.w)], lr=1.0)
        context = codecs.CodecContext(1, 2)
        self.exchange = open_exchange(self.server, self.arena, parse(recipe), optimizer, context)

    @property
    def w(self) -> float:
        return float(self.arena.parts[0].theta[0])

    def step(self, change: float) -> None:
        with torch.no_grad():
            self.arena.parts[0].theta.add_(change)
        self.exchange.stepped()

    def sent(self) -> tuple[list[int], float]:
        """Return the version that the last update was computed on, and the first number of the update."""
        return list(self.server.pushed[-1].versions), float(self.server.pushed[-1].messages[0][0][0])


def test_an_overlapped_update_names_the_version_that_it_was_computed_on() -> None:
    worker = WorkerHarness("async_sgd(overlap=True)")
    worker.step(0.25)
    worker.exchange.run(8, [])
    assert worker.sent() == ([0], 0.25)
    worker.step(0.5)  # the reply has not arrived yet
    worker.server.tickets[0].version = 5
    worker.exchange.run(8, [])
    assert worker.sent() == ([0], 0.5), "computed before version 5 was heard of"
    assert worker.w == 5.5, "the news, and what was learned since the push"
    worker.step(0.125)
    worker.server.tickets[1].version = 9
    worker.exchange.run(8, [])
    assert worker.sent() == ([5], 0.125)


def test_overlap_applies_an_arrived_reply_between_batches() -> None:
    worker = WorkerHarness("async_sgd(overlap=True)")
    worker.step(0.25)
    worker.exchange.run(8, [])
    worker.exchange.merge_if_arrived()
    assert worker.w == 0.25, "nothing has come yet"
    worker.server.tickets[0].version = 5
    worker.exchange.merge_if_arrived()
    assert worker.w == 5.0, "nothing was learned since: the version as it is"
    worker.step(0.5)
    worker.exchange.run(8, [])
    assert worker.sent() == ([5], 0.5)


def test_without_overlap_the_next_round_is_computed_on_the_reply() -> None:
    worker = WorkerHarness("async_sgd")
    for version in (3, 4):
        worker.step(0.25)
        push = worker.server.push

        def reply_immediately(
            arena: int, update: Update, lengths: Sequence[int], version: int = version, push: Any = push
        ) -> Ticket:
            ticket: Ticket = push(arena, update, lengths)
            ticket.version = version
            return ticket

        worker.server.push = reply_immediately  # type: ignore[method-assign]
        worker.exchange.run(8, [])
        assert worker.w == version
    assert [one.versions for one in worker.server.pushed] == [[0], [3]]


def test_a_worker_is_pulled_towards_the_servers_parameters() -> None:
    """`x -= alpha * (x_sent - c)`; steps made after the push are kept."""
    worker = WorkerHarness("elastic_averaging(every=1, alpha=0.25, overlap=True)")
    worker.step(4.0)
    worker.exchange.run(8, [])
    assert worker.sent() == ([0], 4.0)
    worker.step(1.0)
    worker.server.tickets[0].version = 8
    worker.exchange.run(8, [])
    assert worker.sent() == ([0], 5.0 - 0.25 * (4.0 - 8.0))
