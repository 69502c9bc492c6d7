"""A worker that joins a run over a server late has what the others have, also what the server does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulator.harness import simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

FAULT = "kill worker 1 at 70ms, back after 20ms"
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def freeze(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(False)


def thaw(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[2].requires_grad_(True)


def replace_head(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[3] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"] = [*net.parameters()]


def training(change: Change | None) -> Callable[[int], dict[str, Tensor]]:
    """Return a training of a network that differs at each process, changed after the first epoch."""

    def work(worker: int) -> dict[str, Tensor]:
        torch.seed()
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
        net[2].requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        x = torch.linspace(-1, 1, 480).view(120, 4)
        loader = stretto.distribute(net, optimizer, DataLoader(TensorDataset(x, x[:, :2]), batch_size=5))
        for epoch in range(4):
            if epoch == 1 and change is not None:
                change(net, optimizer)
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(inputs), targets).backward()
                optimizer.step()
        return dict(net.named_parameters())

    return work


@pytest.mark.parametrize("recipe", ["async_sgd(shards=2)", "elastic_averaging(every=2)", "async_diloco(every=2)"])
@pytest.mark.parametrize("change", [None, freeze, thaw, replace_head])
def test_a_late_worker_has_the_parameters_of_the_others(change: Change | None, recipe: str) -> None:
    ended = simulated(3, training(change), recipe, net="100Mbit/s 1ms", fault=FAULT)
    one, late, other = ended.found
    assert late is not None
    assert all(torch.equal(one[name], late[name]) and torch.equal(one[name], other[name]) for name in one)
    assert {event["sample_counts"]["once"] for event in ended.of("epoch")} == {120}
    assert any(event["event"] == "membership" for event in ended.events)
