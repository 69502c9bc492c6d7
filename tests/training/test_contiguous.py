"""Properties of `deal="contiguous"`: each worker trains on one stretch of an epoch's batches, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulator.failures import NET
from simulator.harness import simulated
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.errors import LoaderError
from stretto.loader.epoch_order import interleaved

RECIPES = ["allreduce", "local_sgd(every=3)", "async_sgd", "stale_synchronous(bound=0)"]


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)).view(-1, 1))


def reading(n: int, **options: Any) -> Callable[[int], list[list[float]]]:
    """Return a script that trains on n batches of 4, and returns their first numbers by epoch."""

    def work(worker: int) -> list[list[float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        loader: Any = DataLoader(numbers(4 * n), batch_size=4)
        loader = stretto.distribute(net, optimizer, loader, **({"deal": "contiguous"} | options))
        found = []
        for _ in range(2):
            seen = []
            for (x,) in loader:
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
                seen.append(float(x[0]) / 4)
            found.append(seen)
        return found

    return work


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("batches", [6, 7, 8])
def test_each_worker_trains_on_one_stretch_in_order(recipe: str, batches: int) -> None:
    """In a last step that has no batch for a worker, it makes a pass over that of the first one."""
    found = run_workers(3, reading(batches), recipe)
    for epoch in range(2):
        own = [one[epoch][: len(range(worker, batches, 3))] for worker, one in enumerate(found)]
        assert [x for one in own for x in one] == list(range(batches))
        passes = [one[epoch][len(mine) :] for one, mine in zip(found, own, strict=True)]
        assert all(one in ([], own[0][-1:]) for one in passes)


def test_one_worker_trains_on_all_batches_in_order() -> None:
    assert run_workers(1, reading(7), "allreduce")[0] == [[*range(7)]] * 2


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_nth_batch_of_the_interleaved_order_is_of_one_stretch(batches: int, stretches: int) -> None:
    found = [one for (one,) in interleaved([[n] for n in range(batches)], stretches)]
    assert [x for worker in range(stretches) for x in found[worker::stretches]] == list(range(batches))


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_the_stretch_of_a_killed_worker_is_assigned_to_others(recipe: str) -> None:
    ended = simulated(3, reading(24), recipe, net=NET, fault="kill worker 1 at 40ms")
    assert [one["sample_counts"]["once"] for one in ended.of("epoch")] == [96, 96]
    warnings = [one["text"] for one in ended.of("warning") if "state carried from batch to batch" in one["text"]]
    assert len(warnings) == (recipe == "allreduce")


def test_stretches_of_a_stream_are_refused() -> None:
    def work(worker: int) -> None:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        stretto.distribute(net, optimizer, [torch.ones(4, 1)] * 8, deal="contiguous")

    with pytest.raises(LoaderError, match="deal= does not fit"):
        run_workers(2, work, "allreduce")
