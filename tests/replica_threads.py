"""Replicas of several ranks, all of them threads of this process, that train in the script's own loop."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from stage_threads import TIMEOUT_S
from staged_net import loss_of, make_net, words
from thread_pool import thread_pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import abandon, close
from stretto.parallel.server_ranks import RanksClient
from stretto.parameter_server.embedded import EmbeddedServer, start_server
from stretto.parameter_server.rpc_channel import connect_channels, new_context
from stretto.parameter_server.rpc_server import name_of
from stretto.recipe.parser import parse
from stretto.runtime.runtime import Runtime
from stretto.training.worker_context import WorkerContext, current_context
from stretto.transport import in_memory
from stretto.transport.in_memory import InMemoryTransport
from stretto.transport.interface import Collectives, Found, Transport

DATA = TensorDataset(*words(0, 46))


class RankTransport:
    """Makes the transports of ranks: rank i of each replica with rank i of the others, and each with its siblings.

    With a `server` a replica exchanges through it.
    """

    def __init__(self, replicas: int, ranks: int, server: EmbeddedServer | None = None) -> None:
        self._between = [in_memory.wires(replicas, TIMEOUT_S) for _ in range(ranks)]
        self._inside = [in_memory.wires(ranks, TIMEOUT_S) for _ in range(replicas)]
        self._server = server

    def of(self, replica: int, rank: int) -> Transport:
        """Return the transport of a rank."""
        table, inside = self._between[rank][replica].table, self._inside[replica][rank]
        if self._server is not None:
            return self._client(self._server, replica, inside)

        class WithSiblings(InMemoryTransport):
            siblings: Collectives | None = inside

            def attempt(
                self, act: Callable[[], Found], again: Callable[[], Found] | None = None, in_pairs: bool = False
            ) -> Found:
                """Run an attempt, which ends at all ranks of the replica or at none."""
                found = super().attempt(act, again, in_pairs)
                inside.all_gather_bytes(b"completed")
                return found

        return WithSiblings(replica, table)

    def _client(self, server: EmbeddedServer, replica: int, inside: Collectives) -> RanksClient:
        shards = len(server.addresses) - 1
        if inside.worker:
            return RanksClient(replica, len(self._inside), [], shards, inside, nullcontext, elastic=False)
        context, name = new_context(), name_of(replica, 0)
        channels = connect_channels(context, server.addresses, name, server.keys_of(name), TIMEOUT_S, None)
        client = RanksClient(replica, len(self._inside), channels, shards, inside, nullcontext, elastic=False)
        client.on_close(context.term)
        return client

    def close(self, replica: int, rank: int) -> None:
        """End a rank that has failed."""
        self._between[rank][replica].close()
        self._inside[replica][rank].close()


Make = Callable[[nn.Module], torch.optim.Optimizer]


def with_momentum(net: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train(net: nn.Module, make: Make = with_momentum) -> float:
    """Train in the script's own loop, with evaluations; return the last one's result."""
    optimizer = make(net)
    evaluations: list[float] = []

    def evaluate(model: Any) -> dict[str, float]:
        with torch.no_grad():
            evaluations.append(float(loss_of(model(words(9, 5)[0]), words(9, 5)[1])))
        return {"loss": evaluations[-1]}

    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6), evaluate=evaluate)
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            with stretto.no_sync():
                (0.5 * loss_of(net(x[:2]), y[:2])).backward()
            loss_of(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    stretto.finish()
    return evaluations[-1] if evaluations else 0.0


def in_stages(
    replicas: int,
    ranks: int,
    recipe: str,
    layout: str,
    work: Callable[[nn.Module], Any] = train,
    make: Callable[[], nn.Module] = lambda: make_net().double(),
    **options: Any,
) -> tuple[list[nn.Module], list[Any]]:
    """Return the models of the first replica's ranks after training, and the results of the `work` at them."""
    nets = {(replica, rank): make() for replica in range(replicas) for rank in range(ranks)}
    shards = parse(recipe).shards
    server = start_server(replicas, shards, on_nan=options.get("on_nan", "stop")) if shards else None
    transports = RankTransport(replicas, ranks, server)

    def run(replica: int, rank: int) -> Any:
        transport = transports.of(replica, rank)
        made = {"recipe": recipe, "layout": layout, "runtime": Runtime(rank=rank, ranks=ranks), **options}
        context = WorkerContext(
            replica, replicas, lambda _device: transport, timeout_s=TIMEOUT_S, server=lambda _: transport, **made
        )
        current_context.set(context)
        try:
            result = work(nets[replica, rank])
            close()
            return result
        except BaseException:
            transports.close(replica, rank)
            abandon()
            raise

    with thread_pool(replicas * ranks) as pool:
        futures = {place: pool.submit(contextvars.Context().run, run, *place) for place in nets}
        errors = [error for one in futures.values() if (error := one.exception(3 * TIMEOUT_S)) is not None]
    if server is not None:
        server.close()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, stretto.errors.TransportError))
    first = [(nets[0, rank], futures[0, rank].result()) for rank in range(ranks)]
    return [net for net, _ in first], [result for _, result in first]
