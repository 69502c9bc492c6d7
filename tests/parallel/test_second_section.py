"""A model in stages that is trained again, by a second `distribute`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replica_threads import DATA, in_stages, with_momentum
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader

import stretto


def trained_twice(net: nn.Module, keeps_optimizer: bool) -> list[str]:
    """Train in two sections, the second with a frozen table; return the names in the states of model and optimizer."""
    optimizer = with_momentum(net)
    for section in range(2):
        if section and not keeps_optimizer:
            optimizer = with_momentum(net)
        net.place.requires_grad_(not section)  # type: ignore[operator, union-attr]
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    found = [*net.state_dict(), *map(str, optimizer.state_dict()["state"])]
    stretto.finish()
    return found


@pytest.mark.parametrize("keeps_optimizer", [True, False])
@pytest.mark.parametrize("recipe", ["allreduce", "diloco(every=2)", "stale_synchronous(bound=0)"])
def test_a_model_in_stages_is_trained_again_as_a_whole_one(recipe: str, keeps_optimizer: bool) -> None:
    layout = 'pipeline(2, split="blocks.1")'
    nets, states = in_stages(2, 2, recipe, layout, lambda net: trained_twice(net, keeps_optimizer))
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: trained_twice(wholes[worker], keeps_optimizer), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
    assert states == [expected[0]] * 2
    assert not any(torch.isnan(one).any() for one in joined(nets).values())
