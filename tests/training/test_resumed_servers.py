"""Servers that fail while a run resumes: the run continues from the checkpoint, and trains each batch once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from async_exchange import open_exchange
from faulty_servers import FaultyCluster, Worker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto import codecs
from stretto.checkpoint.storage import State
from stretto.data.assignment import BatchAssignment, bounds_of
from stretto.interval import every
from stretto.loader.epoch_order import EpochOrder, draw
from stretto.loader.leased_batches import LeasedBatchSampler, LeasedEpoch
from stretto.parallel.rank_parts import RankParts
from stretto.recipe.parser import parse
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.optimizers import Optimizers
from stretto.training.checkpoint_manager import CheckpointManager
from stretto.training.worker_context import WorkerContext

BATCHES, DONE, APART = 12, 6, 16
"""A batch changes an element of its own; the elements are so far apart that both servers hold some of them."""
STEPS = 6000
OnSettled = Callable[[list[Any]], None]


class WorkerSide:
    """A worker's parameters, and its exchange with the servers."""

    def __init__(self, worker: Worker, settled: OnSettled = lambda _found: None) -> None:
        self.worker, self.settled = worker, settled
        self.net = nn.Module()
        self.net.w = nn.Parameter(torch.zeros(BATCHES * APART))
        self.arena = FlatParameters([("w", cast("nn.Parameter", self.net.w))])
        self.theta = self.arena.parts[0].theta

    def exchange(self, number: int) -> AsyncServer:
        context = codecs.CodecContext(self.worker.number, self.worker.cluster.workers)
        optimizer = torch.optim.SGD([cast("nn.Parameter", self.net.w)], lr=1.0)
        recipe, client = parse("async_sgd(shards=2)"), self.worker.client
        return open_exchange(client, self.arena, recipe, optimizer, context, self.settled, number)


def run_with_plan(cluster: FaultyCluster, planned: Mapping[int, Callable[[], object]]) -> None:
    """Run the cluster to its end, and call each planned function at its step."""
    grads = torch.is_grad_enabled()
    try:
        cluster.start()
        for at in range(STEPS):
            planned.get(at, lambda: None)()
            if not cluster.step():
                cluster.report_and_restart_all()
                if not cluster.step() and cluster.is_done:
                    return
        raise AssertionError(f"no end: {cluster.history}")
    finally:
        cluster.close()
        torch.set_grad_enabled(grads)


@pytest.mark.parametrize("failed", [-1, 0, 1])
def test_workers_receive_the_checkpoint_though_a_server_fails_during_the_resume(failed: int) -> None:
    found: dict[int, float] = {}

    def run(worker: Worker) -> None:
        side = WorkerSide(worker)
        side.exchange(1)  # the script's own parameters
        worker.client.broadcast_bytes(lambda: b"the checkpoint")
        with torch.no_grad():
            side.theta.fill_(5.0)
        again = side.exchange(2)
        again.read()
        worker.client.all_gather_bytes(b"read")
        found[worker.number] = float(side.theta[0])
        worker.client.close()

    for seed in range(3):
        for at in range(0, 120, 5):
            found.clear()
            cluster = FaultyCluster(2, 2, seed, run, snapshot_interval_s=10**9)
            kill = cluster.kill_coordinator if failed < 0 else functools.partial(cluster.kill_server, failed)
            run_with_plan(cluster, {at: kill})
            assert set(found.values()) == {5.0}, (seed, at)


@pytest.mark.parametrize("at", [(30, 60), (40, 90), (60, 100)])
def test_finished_batches_are_not_repeated_when_a_worker_and_then_the_coordinator_fail(at: tuple[int, int]) -> None:
    """The failures precede the first snapshot.

    A restarted worker may be the first to request one, and does not know which batches are done.
    """
    found: dict[int, list[float]] = {}

    def run(worker: Worker) -> None:
        leases: list[Any] = []
        epochs: list[LeasedEpoch] = []
        side = WorkerSide(worker, lambda done: epochs[0].settle(done))
        client, exchange = worker.client, side.exchange(1)

        def unsent() -> tuple[int, list[Any]]:
            pushed, leases[:] = list(leases), []
            return len(pushed), pushed

        data = TensorDataset(torch.arange(BATCHES))
        loader = DataLoader(data, batch_size=1, shuffle=False)
        sampler = LeasedBatchSampler(lambda: draw(loader, client, 1), client, None, "first-come")
        order = EpochOrder.of([[one] for one in range(BATCHES)])
        start = order, BatchAssignment.from_settled(bounds_of(order.sizes), range(DONE), 2)
        batches = DataLoader(data, batch_sampler=sampler)
        loop: Any = SimpleNamespace(push_all=lambda: exchange.finish(*unsent()), wait_at_barriers=lambda _times: None)
        epochs.append(LeasedEpoch(batches, sampler, loop, 1, start if client.join_position is None else None))
        while (assigned := epochs[0].next()) is not None:
            with torch.no_grad():
                for one in assigned.batch[0]:
                    side.theta[APART * int(one)] += 1.0
            leases.append(assigned.lease)
            exchange.stepped()
            exchange.run(*unsent())
            epochs[0].ask_ahead()
        exchange.finish(*unsent())
        exchange.wait_at_barrier()
        exchange.read()
        client.all_gather_bytes(b"end")
        found[worker.number] = side.theta[: BATCHES * APART : APART].tolist()
        client.broadcast_bytes(lambda: b"done")
        client.close()

    for seed in range(8):
        found.clear()
        cluster = FaultyCluster(2, 2, seed, run, snapshot_interval_s=10**9)
        run_with_plan(
            cluster,
            {
                at[0]: lambda cluster=cluster: cluster.kill_worker(1),  # type: ignore[misc]
                at[0] + 2: cluster.report_failure,
                at[0] + 4: cluster.restart_worker,
                at[1]: cluster.kill_coordinator,
            },
        )
        assert all(one == [0.0] * DONE + [1.0] * (BATCHES - DONE) for one in found.values()), seed


def test_the_next_worker_writes_the_checkpoint_if_the_first_fails_while_writing(tmp_path: Path) -> None:
    """The next worker knows to which worker each gathered state belongs, though one of these workers has failed."""
    written: list[list[int]] = []

    def run(worker: Worker) -> None:
        events = SimpleNamespace(t=lambda: 0.0, write=lambda *_, **__: None, notice=lambda _text: None)
        progress = SimpleNamespace(rounds=5, steps=5, samples=1)
        optimizers = Optimizers([torch.optim.SGD([torch.zeros(1, requires_grad=True)])])
        strategy = SimpleNamespace(asynchronous=True)
        trainer: Any = SimpleNamespace(
            transport=worker.client,
            strategy=strategy,
            events=events,
            optimizers=optimizers,
            progress=progress,
            global_steps=SimpleNamespace(refuse_not_finite=lambda: None),
            rank_parts=RankParts(),
            epochs=SimpleNamespace(current=None),
            batch_source=SimpleNamespace(stream_of=lambda _current: None),
            section=SimpleNamespace(checkpoints=None, seconds=0.0, rounds=0),
        )
        context = WorkerContext(run=tmp_path, keep=3, checkpoint=every("1 rounds"))
        manager: Any = CheckpointManager(trainer, context)

        def state(own: dict[int, Any]) -> State:
            written.append(sorted(own))
            return State({}, {}, own)

        manager._own, manager.state = lambda: ({}, {}), state
        if not worker.incarnation:
            for _ in range(3):
                manager.save()
        worker.client.close()

    for seed in range(3):
        for at in range(2, 80, 6):
            cluster = FaultyCluster(3, 1, seed, run, snapshot_interval_s=10**9)
            run_with_plan(cluster, {at: lambda cluster=cluster: cluster.kill_worker(0), at + 6: cluster.report_failure})  # type: ignore[misc]
            assert all(one.is_done for one in cluster.workers_now[1:])
    assert [0, 1, 2] in written
    assert [1, 2] in written
