"""Replicas in pipeline stages train under a recipe as whole workers do: rank i of each exchanges with rank i."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from layout_runs import RECIPES
from stage_threads import TIMEOUT_S, joined, largest_difference
from staged_net import loss_of, make_net, words
from thread_pool import thread_pool
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import abandon, close
from stretto.runtime.runtime import Runtime
from stretto.training.worker_context import WorkerContext, current_context
from stretto.transport import in_memory
from stretto.transport.in_memory import InMemoryTransport
from stretto.transport.interface import Collectives

DATA = TensorDataset(*words(0, 46))


class RankTransport:
    """Makes the transports of ranks: rank i of each replica with rank i of the others, and each with its siblings."""

    def __init__(self, replicas: int, ranks: int) -> None:
        self._between = [in_memory.wires(replicas, TIMEOUT_S) for _ in range(ranks)]
        self._inside = [in_memory.wires(ranks, TIMEOUT_S) for _ in range(replicas)]

    def of(self, replica: int, rank: int) -> InMemoryTransport:
        """Return the transport of a rank."""
        table, inside = self._between[rank][replica].table, self._inside[replica][rank]

        class WithSiblings(InMemoryTransport):
            siblings: Collectives | None = inside

        return WithSiblings(replica, table)

    def close(self, replica: int, rank: int) -> None:
        """End a rank that has failed."""
        self._between[rank][replica].close()
        self._inside[replica][rank].close()


def train(net: nn.Module) -> float:
    """Train in the script's own loop, with evaluations; return the last one's result."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
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


def in_stages(replicas: int, ranks: int, recipe: str, layout: str) -> tuple[list[nn.Module], list[float]]:
    """Return the models of the first replica's ranks after training, and the results of their evaluations."""
    nets = {(replica, rank): make_net().double() for replica in range(replicas) for rank in range(ranks)}
    transports = RankTransport(replicas, ranks)

    def work(replica: int, rank: int) -> float:
        transport = transports.of(replica, rank)
        runtime = Runtime(rank=rank, ranks=ranks)
        made = {"recipe": recipe, "layout": layout, "runtime": runtime, "timeout_s": TIMEOUT_S}
        current_context.set(WorkerContext(replica, replicas, lambda _device: transport, **made))
        try:
            result = train(nets[replica, rank])
            close()
            return result
        except BaseException:
            transports.close(replica, rank)
            abandon()
            raise

    with thread_pool(replicas * ranks) as pool:
        futures = {place: pool.submit(contextvars.Context().run, work, *place) for place in nets}
        errors = [error for one in futures.values() if (error := one.exception(3 * TIMEOUT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, stretto.errors.TransportError))
    first = [(nets[0, rank], futures[0, rank].result()) for rank in range(ranks)]
    return [net for net, _ in first], [result for _, result in first]


@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_in_stages_equal_whole_workers(recipe: str) -> None:
    nets, evaluations = in_stages(2, 2, recipe, 'pipeline(2, split="blocks.1")')
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: train(wholes[worker]), recipe)
    tolerance = 1e-3 if "bf16" in recipe else 1e-12  # a last bit may be rounded the other way
    assert largest_difference(joined(nets), joined(wholes[:1])) < tolerance
    assert max(abs(one - expected[0]) for one in evaluations) < tolerance


def test_one_replica_in_measured_stages_equals_a_single_process() -> None:
    nets, _ = in_stages(1, 3, "allreduce", "pipeline(3, micro_batches=2)")
    whole = make_net().double()
    run_workers(1, lambda _: train(whole), "allreduce")
    assert largest_difference(joined(nets), joined([whole])) < 1e-12


def test_a_layout_of_the_script_runs_whole_in_a_single_process() -> None:
    nets = [make_net() for _ in range(2)]
    for net, layout in zip(nets, (None, "pipeline(stages=4)"), strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6), layout=layout)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
        stretto.finish()
    assert largest_difference(joined(nets[:1]), joined(nets[1:])) == 0.0


def test_a_layout_of_the_script_that_the_workers_do_not_have_is_refused() -> None:
    def work(_worker: int) -> None:
        net = make_net()
        stretto.distribute(net, torch.optim.SGD(net.parameters()), [], layout="pipeline(stages=2)")

    with pytest.raises(stretto.errors.RecipeError, match=r'try: stretto run -n 4 --layout "pipeline\(2\)"'):
        run_workers(2, work)
