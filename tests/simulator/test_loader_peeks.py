"""Workers that peek at a batch before each epoch, with failures: every sample counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulator.failures import FREE, NET, SAMPLES, is_whole
from simulator.harness import simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto


def peeking(worker: int) -> Any:
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader: Any = DataLoader(regression(SAMPLES), batch_size=4, shuffle=True)
    loader = stretto.distribute(net, optimizer, loader)
    for _ in range(3):
        assert len(next(iter(loader))) == 2
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", *FREE[:1]])
def test_restarted_worker_repeats_its_peeks(recipe: str) -> None:
    length = simulated(3, peeking, recipe, net=NET).seconds
    for part in (1, 5, 8, 12):
        who = part % 2
        at = 1000 * length * part / 16
        ended = simulated(3, peeking, recipe, net=NET, fault=f"kill worker {who} at {at:.3f}ms, back after 9ms")
        is_whole(ended, recipe, 3)
        assert len(ended.of("epoch")) == 3
