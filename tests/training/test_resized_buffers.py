"""Buffers that the first forward pass resizes, as those of the observers of quantisation-aware training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import regression, run_workers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.interval import every

pytestmark = pytest.mark.usefixtures("every_checkpoint")


class Observer(nn.Module):
    """The largest value of each column so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x divided by the largest values."""
        with torch.no_grad():
            found = x.detach().abs().amax(0)
            if len(self.largest) != len(found):
                self.largest.resize_(len(found)).zero_()  # type: ignore[operator]
            self.largest.copy_(torch.maximum(self.largest, found))  # type: ignore[operator, arg-type]
        return x / self.largest  # type: ignore[operator]


def train(epochs: int, seen: list[Tensor]) -> Any:
    def work(worker: int) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(Observer(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(40), batch_size=4))
        seen.append(net[0].largest.clone())  # type: ignore[operator, union-attr]
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x.float()), y.float()).backward()
                optimizer.step()
        return net[0].largest.clone()  # type: ignore[operator, union-attr]

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_they_are_trained_with_and_resumed(recipe: str, tmp_path: Path) -> None:
    often: Any = {"checkpoint": every("2 rounds"), "keep": 9}
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    found = run_workers(2, train(2, []), recipe, run=tmp_path / "before", **often)
    assert torch.equal(found[0], found[1])
    assert len(found[0]) == 6
    resumed: list[Tensor] = []
    run_workers(2, train(3, resumed), recipe, run=tmp_path / "after", resume=tmp_path / "before", **often)
    assert [len(one) for one in resumed] == [6, 6]
