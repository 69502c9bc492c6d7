"""Training in few bytes reaches what training exactly does: the digits, four workers, the same epochs, two seeds.

They are simulated, which is quicker than threads and decides nothing by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from simulator.harness import simulated
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

SEEDS = (0, 1)
POINT = 0.01
LEARNING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Way:
    """A recipe of few bytes, the optimizer that its paper uses with it, and what is exact beside it."""

    recipe: str
    learning: str = "momentum"
    exact: str = "allreduce"
    exact_learning: str | None = None
    epochs: int = 6


WAYS = [
    Way('allreduce(how=cast("bf16"))'),
    Way("allreduce(how=quantise(8))"),
    Way("allreduce(how=quantise(4, bucket=512))"),
    Way("allreduce(how=ternary())", "plain"),
    Way("allreduce(how=error_feedback(sign(bucket=512)))", "plain"),
    Way('allreduce(how=error_feedback(sign(means="one", bucket=512)))', "plain"),
    Way("allreduce(how=error_feedback(top_k(0.05)))", "plain"),
    Way("allreduce(how=error_feedback(random_k(0.1)))", "plain"),
    Way("allreduce(how=error_feedback(chain(top_k(0.05), quantise(4))))", "plain"),
    Way("allreduce(how=by_size(error_feedback(top_k(0.05)), least=500))", "plain"),
    Way("power_sgd(rank=2)"),
    Way("gradient_sharing(tau=0.001)", "plain"),
    Way("deep_gradient_compression(ratio=0.05, momentum=0.9)", "plain", "allreduce", "momentum"),
    Way("one_bit(warm_up=60)", "adam", epochs=10),
    Way("gd_sec(xi=2, beta=0.1)", "plain"),
    Way("quantised_gd_sec(xi=2, beta=0.1)", "plain"),
    Way("ef21(how=top_k(0.2))", "plain"),
    Way("sparse_loco(every=4, chunk=256, k=16)", "momentum", "diloco(every=4, outer_lr=1.0, outer_momentum=0.0)"),
    Way("local_sgd(every=4, how=quantise(4, bucket=512))", "momentum", "local_sgd(every=4)"),
]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    found: Any = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


@functools.cache
def accuracy(recipe: str, learning: str, epochs: int, seed: int) -> float:
    """Of the agreed model on the last fifth of the digits, after the same epochs for all."""
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + seed))
    train, test = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]

    def work(worker: int) -> float:
        shuffle = torch.Generator().manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        with torch.no_grad():
            for one in net.parameters():
                one.uniform_(-0.15, 0.15, generator=shuffle)
        optimizer = LEARNING[learning](net.parameters())
        data = DataLoader(TensorDataset(x[train], y[train]), batch_size=16, shuffle=True, generator=shuffle)
        loader = stretto.distribute(net, optimizer, data)
        for _ in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
        return float((net(x[test]).argmax(1) == y[test]).float().mean())

    return float(simulated(4, work, recipe, seed=seed).found[0])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.recipe)
def test_it_reaches_the_accuracy_of_exact_exchange(way: Way) -> None:
    wanted = [accuracy(way.exact, way.exact_learning or way.learning, way.epochs, seed) for seed in SEEDS]
    found = [accuracy(way.recipe, way.learning, way.epochs, seed) for seed in SEEDS]
    assert sum(wanted) / len(SEEDS) > 0.9, f"the exact training must learn: {wanted}"
    assert sum(found) / len(SEEDS) >= sum(wanted) / len(SEEDS) - POINT, f"{found} against {wanted}"
