"""Layers that are frozen and thawed while they are trained in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replica_threads import DATA, in_stages
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.parameter_view import hold_elsewhere
from stretto.transport.single_worker import SingleWorkerTransport


def of_rank(rank: int) -> tuple[nn.Module, ParameterSet]:
    """Return a model whose rank 0 holds the embedding and rank 1 all else, and its parameters."""
    net = make_net()
    for name, one in net.named_parameters():
        if name.startswith("embed") != (rank == 0):
            hold_elsewhere(one)
    parameters = ParameterSet(net, [torch.optim.SGD(net.parameters(), lr=0.1)], SingleWorkerTransport())
    parameters.flatten(parameters.trainable(), spare=False)
    return net, parameters


def test_ranks_tell_the_same_changes_though_each_holds_other_parameters() -> None:
    for rank, (net, parameters) in enumerate(map(of_rank, range(2))):
        assert not parameters.has_changed()
        assert not parameters.agree(at_start=False).has_changed
        net.get_parameter("place").requires_grad = net.get_parameter("embed.weight").requires_grad = False
        assert parameters.has_changed()
        agreed = parameters.agree(at_start=False)
        assert (agreed.has_changed, agreed.has_new) == (True, False)
        parameters.flatten(agreed.by_name, spare=False)
        assert parameters.is_trained_elsewhere() == (rank == 0)
        net.get_parameter("embed.weight").requires_grad = True
        agreed = parameters.agree(at_start=False)
        assert (agreed.has_changed, agreed.has_new) == (True, True)


def freeze_and_thaw(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    for epoch in range(3):
        for name, one in net.named_parameters():
            one.requires_grad = epoch != 1 or not name.startswith(("embed", "blocks.3"))
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
    stretto.finish()


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_layers_are_frozen_and_thawed_between_epochs(recipe: str) -> None:
    nets, _ = in_stages(2, 2, recipe, 'pipeline(2, split="blocks.1")', freeze_and_thaw)
    wholes = [make_net().double() for _ in range(2)]
    run_workers(2, lambda worker: freeze_and_thaw(wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12


def thaw_within_an_epoch(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    first, last = net.get_parameter("place"), net.get_parameter("blocks.3.mix.weight")
    first.requires_grad = last.requires_grad = False
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=3))
    for step, (x, y) in enumerate(loader):
        first.requires_grad = step > 1
        last.requires_grad = step > 4
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
    stretto.finish()


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "local_sgd(every=2, how=low_rank(2))"])
def test_layers_of_one_stage_are_thawed_within_an_epoch(recipe: str) -> None:
    nets, _ = in_stages(2, 2, recipe, 'pipeline(2, split="blocks.1")', thaw_within_an_epoch)
    wholes = [make_net().double() for _ in range(2)]
    run_workers(2, lambda worker: thaw_within_an_epoch(wholes[worker]), recipe)
    assert "low_rank" in recipe or largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
