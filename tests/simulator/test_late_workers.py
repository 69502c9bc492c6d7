"""A worker that joins a run over a server late has what the others have, also what the server does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from simulator.harness import simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.checkpoint.state_transfer import unpack_own
from stretto.errors import LaunchError
from stretto.parameter_server.client import ParameterServerClient

FAULT = "kill worker 1 at 70ms, back after 20ms"
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def freeze(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(False)


def thaw(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[2].requires_grad_(True)


def replace_head(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[3] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"] = [*net.parameters()]


def training(change: Change | None, seeds: Callable[[], object] = torch.seed) -> Callable[[int], dict[str, Tensor]]:
    """Return a training of a network that `seeds` makes differ at each process, changed after the first epoch."""

    def work(worker: int) -> dict[str, Tensor]:
        seeds()
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


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the names of the tensors that the dispatcher stores for workers that join, each time."""
    names: list[set[str]] = []
    store = ParameterServerClient.store_facts

    def noted(client: ParameterServerClient, facts: bytes) -> None:
        names.append(set(unpack_own(facts)[1]))
        store(client, facts)

    monkeypatch.setattr(ParameterServerClient, "store_facts", noted)
    return names


@pytest.mark.parametrize("change", [None, freeze, thaw])
def test_frozen_parameters_that_the_script_makes_alike_are_not_stored(
    change: Change | None, stored: list[set[str]]
) -> None:
    work = training(change, lambda: torch.manual_seed(5))
    one, late, other = simulated(3, work, "async_sgd", net="100Mbit/s 1ms", fault=FAULT).found
    assert all(torch.equal(one[name], late[name]) and torch.equal(one[name], other[name]) for name in one)
    assert stored[0] == set()
    frozen = {"0.weight", "0.bias"} if change is freeze else set()
    assert all(
        {name for name in names if "running" not in name and "num" not in name} == frozen for names in stored[1:]
    )


def test_late_worker_whose_script_makes_other_frozen_parameters_ends_with_an_error() -> None:
    seeds = itertools.chain([5, 5, 5], itertools.count(6))
    work = training(None, lambda: torch.manual_seed(next(seeds)))
    with pytest.raises(LaunchError, match=r"2\.weight(.|\n)*manual_seed"):
        simulated(3, work, "async_sgd", net="100Mbit/s 1ms", fault=FAULT)
