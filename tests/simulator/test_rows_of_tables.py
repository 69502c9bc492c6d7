"""Simulated workers exchange rows of tables alone, also when workers and servers fail."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from simulator.harness import simulated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

EPOCHS, ROWS = 3, 31
NUMBERS = torch.arange(120) ** 2 % ROWS


def count_rows(worker: int) -> None:
    """Train with a loss that is a sum: each number adds 1 to its row, in whatever order updates are applied."""
    net = nn.Sequential(nn.Embedding(ROWS, 4, sparse=True))
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(NUMBERS), batch_size=5, shuffle=True)
    loader = stretto.distribute(net, optimizer, loader)
    for _ in range(EPOCHS):
        for (number,) in loader:
            optimizer.zero_grad()
            (-net(number).sum()).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "fault",
    [
        "",
        "kill worker 1 at 70ms, back after 20ms",
        "kill server at 57ms",
        "kill server at 90ms",
        "kill worker 2 at 30ms; kill server at 60ms",
    ],
)
@pytest.mark.parametrize("recipe", ["async_sgd(shards=2)", "downpour(every=2, overlap=True)"])
def test_each_number_counts_once_in_its_row(recipe: str, fault: str) -> None:
    ended = simulated(3, count_rows, recipe, net="100Mbit/s 1ms", fault=fault)
    expected = EPOCHS * torch.bincount(NUMBERS, minlength=ROWS).float()
    final = safetensors.torch.load(ended.final)
    torch.testing.assert_close(final["0.weight"], expected[:, None].expand(-1, 4), rtol=0, atol=0)
    assert [event["sample_counts"]["once"] for event in ended.of("epoch")] == [len(NUMBERS)] * EPOCHS
