"""Models in stages of which a gradient scaler skips steps."""

from __future__ import annotations

import math
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


def scaled(net: nn.Module, infinite_at: int) -> float:
    """Train with a scaler; the loss of worker 0, or of all for -1, is infinite in the second step and the last one."""
    optimizer, scaler = with_momentum(net), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    for step, (x, y) in enumerate(loader):
        loss = loss_of(net(x), y)
        if step in (1, 3) and infinite_at in (-1, stretto.rank()):
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    stretto.finish()
    return scaler.get_scale()


@pytest.mark.parametrize("infinite_at", [-1, 0])
def test_skipped_steps_count_as_in_whole_workers(infinite_at: int) -> None:
    layout = 'pipeline(2, split="blocks.1")'
    nets, scales = in_stages(2, 2, "local_sgd(every=2)", layout, lambda net: scaled(net, infinite_at))
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: scaled(wholes[worker], infinite_at), "local_sgd(every=2)")
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
    assert scales[0] == expected[0] == 2.0**6
