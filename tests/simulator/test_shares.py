"""Time of steps with shares: a worker takes a fixed time a step and a time a sample; the slowest is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulator.harness import now, simulated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.simulator.compute.cost_model import CostModel

SLOW = "1,1,1,5"
"""Four workers, the last of which is five times slower."""


def counting(samples: int, batch: int, epochs: int = 1) -> Any:
    """Return a worker's function that returns the sizes of its batches, and the virtual time after each."""

    def work(worker: int) -> list[tuple[int, float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        data = TensorDataset(torch.ones(samples, 1), torch.ones(samples, 1))
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=batch, shuffle=True))
        steps = []
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                steps.append((len(x), now()))
        return steps

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=1)"])
@pytest.mark.parametrize(("shares", "sizes"), [("even", (16, 16, 16, 16)), ("1:1:1:0.2", (20, 20, 20, 4))])
def test_a_step_takes_its_fixed_time_and_that_of_its_samples(recipe: str, shares: str, sizes: tuple[int, ...]) -> None:
    cost = CostModel(0.01, sample_s=0.001)
    ended = simulated(4, counting(640, 16), recipe, speed=SLOW, cost_model=cost, asks={"shares": shares})
    slowest = max((0.01 + 0.001 * size) * factor for size, factor in zip(sizes, (1, 1, 1, 5), strict=True))
    assert [tuple(size for size, _ in step) for step in zip(*ended.found, strict=True)] == [sizes] * 10
    assert ended.seconds == pytest.approx(10 * slowest)
