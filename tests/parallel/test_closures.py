"""Models in stages whose first call is in the closure of an optimizer's step."""

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


def in_closures(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    stretto.finish()


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "stale_synchronous(bound=0)"])
def test_model_is_split_within_the_first_step(recipe: str) -> None:
    nets, _ = in_stages(2, 2, recipe, 'pipeline(2, split="blocks.1")', in_closures)
    wholes = [make_net().double() for _ in range(2)]
    run_workers(2, lambda worker: in_closures(wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
