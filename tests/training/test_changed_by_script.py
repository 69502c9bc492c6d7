"""A script changes the parameters between `distribute` and the loop, or between two epochs: no update of a worker."""

from __future__ import annotations

import pytest
import torch
from thread_workers import flat, regression, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ReplicasDifferError

SYNCHRONOUS = ["allreduce", "local_sgd(every=3)", "diloco(every=3)", "diloco(every=5)", "gossip"]
"""An epoch has 5 steps, after which some of them have no round under way."""
OVER_A_SERVER = ["async_sgd", "stale_synchronous(bound=1)", "async_diloco(every=2)", "elastic_averaging(every=2)"]
EPOCHS = 3


def train_after_change(worker: int, before_epoch: int, everywhere: bool = True) -> Tensor:
    """Return the parameters after epochs with the rate 0, before one of which they were set to 1."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    loader = stretto.distribute(net, optimizer, DataLoader(regression(40), batch_size=4))
    for epoch in range(EPOCHS):
        if epoch == before_epoch and (everywhere or stretto.is_main()):
            net.load_state_dict({name: torch.ones_like(one) for name, one in net.state_dict().items()})
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize("before_epoch", [0, 1])
@pytest.mark.parametrize("recipe", SYNCHRONOUS + OVER_A_SERVER)
def test_training_continues_from_values_that_all_workers_load(recipe: str, before_epoch: int) -> None:
    for trained in run_workers(2, lambda worker: train_after_change(worker, before_epoch), recipe):
        assert trained.eq(1.0).all(), trained


@pytest.mark.parametrize("before_epoch", [0, 1])
@pytest.mark.parametrize("recipe", SYNCHRONOUS)
def test_values_that_one_worker_loads_are_refused(recipe: str, before_epoch: int) -> None:
    with pytest.raises(ReplicasDifferError, match="on every worker|the same bits everywhere"):
        run_workers(2, lambda worker: train_after_change(worker, before_epoch, everywhere=False), recipe)
