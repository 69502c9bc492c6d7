"""Accuracy of digits after equal epochs, over several seeds: recipes that send few bytes, and batch norm in shares.

The workers are simulated, which is faster than threads and does not affect the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from combinations import mostly_long
from simulator.harness import simulated
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stretto

SEEDS = (0, 1)
POINT = 0.01
NORM_SEEDS = (0, 1, 2)
LEARNING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """A recipe that sends few bytes, the optimizer that its paper uses, and the exact recipe to compare with."""

    recipe: str
    learning: str = "momentum"
    exact: str = "allreduce"
    exact_learning: str | None = None
    epochs: int = 6


CASES = [
    Case('allreduce(how=cast("bf16"))'),
    Case("allreduce(how=quantise(8))"),
    Case("allreduce(how=quantise(4, bucket=512))"),
    Case("allreduce(how=ternary())", "plain"),
    Case("allreduce(how=error_feedback(sign(bucket=512)))", "plain"),
    Case('allreduce(how=error_feedback(sign(means="one", bucket=512)))', "plain"),
    Case("allreduce(how=error_feedback(top_k(0.05)))", "plain"),
    Case("allreduce(how=error_feedback(random_k(0.1)))", "plain", epochs=12),
    Case("allreduce(how=error_feedback(chain(top_k(0.05), quantise(4))))", "plain"),
    Case("allreduce(how=by_size(error_feedback(top_k(0.05)), least=500))", "plain"),
    Case("power_sgd(rank=2)"),
    Case("gradient_sharing(tau=0.001)", "plain", epochs=12),
    Case("deep_gradient_compression(ratio=0.05, momentum=0.9)", "plain", "allreduce", "momentum"),
    Case("one_bit(warm_up=60)", "adam", epochs=10),
    Case("gd_sec(xi=2, beta=0.1)", "plain"),
    Case("quantised_gd_sec(xi=2, beta=0.1)", "plain"),
    Case("ef21(how=top_k(0.2))", "plain"),
    Case("sparse_loco(every=4, chunk=256, k=16)", "momentum", "diloco(every=4, outer_lr=1.0, outer_momentum=0.0)"),
    Case("local_sgd(every=4, how=quantise(4, bucket=512))", "momentum", "local_sgd(every=4)"),
]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    data_set: Any = load_digits()
    return torch.tensor(data_set.data / 16.0, dtype=torch.float32), torch.tensor(data_set.target)


Loading = Callable[[Dataset[Any], torch.Generator], "DataLoader[Any]"]


def shuffled(data: Dataset[Any], generator: torch.Generator) -> DataLoader[Any]:
    return DataLoader(data, batch_size=16, shuffle=True, generator=generator)


def in_whole_batches(data: Dataset[Any], generator: torch.Generator) -> DataLoader[Any]:
    """Return a loader with batches of its own, which are dealt whole."""

    class Batches:
        def __len__(self) -> int:
            return -(-len(data) // 16)  # type: ignore[arg-type]

        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(len(data), generator=generator)  # type: ignore[arg-type]
            return iter([part.tolist() for part in order.split(16)])

    return DataLoader(data, batch_sampler=Batches())


@functools.cache
def accuracy(
    recipe: str,
    learning: str,
    epochs: int,
    seed: int,
    workers: int = 4,
    norm: Callable[[], nn.Module] = nn.Identity,
    loading: Loading = shuffled,
) -> float:
    """Return the averaged model's accuracy on the last fifth of the digits, after the given number of epochs."""
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + seed))
    train, test = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]

    def work(worker: int) -> float:
        shuffle = torch.Generator().manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), norm(), nn.ReLU(), nn.Linear(32, 10))
        with torch.no_grad():
            for parameter in (*net[0].parameters(), *net[3].parameters()):
                parameter.uniform_(-0.15, 0.15, generator=shuffle)
        optimizer = LEARNING[learning](net.parameters())
        loader = stretto.distribute(net, optimizer, loading(TensorDataset(x[train], y[train]), shuffle))
        for _ in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
        net.eval()
        return float((net(x[test]).argmax(1) == y[test]).float().mean())

    return float(simulated(workers, work, recipe, seed=seed).found[0])


@pytest.mark.parametrize("case", mostly_long(CASES, short=(2, 6, 17)), ids=lambda case: case.recipe)
def test_recipes_of_few_bytes_reach_the_accuracy_of_the_exact_exchange(case: Case) -> None:
    exact = [accuracy(case.exact, case.exact_learning or case.learning, case.epochs, seed) for seed in SEEDS]
    accuracies = [accuracy(case.recipe, case.learning, case.epochs, seed) for seed in SEEDS]
    assert sum(exact) / len(SEEDS) > 0.9, f"the exact training must learn: {exact}"
    assert sum(accuracies) / len(SEEDS) >= sum(exact) / len(SEEDS) - POINT, f"{accuracies} against {exact}"


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_batch_norm_in_even_shares_reaches_the_accuracy_of_whole_batches(recipe: str) -> None:
    """1,437 samples in batches of 16: 30 steps of 48 or 47 samples for three workers, or 90 batches, the last of 13."""

    def mean(loading: Loading) -> float:
        norm = functools.partial(nn.BatchNorm1d, 32)
        found = [accuracy(recipe, "momentum", 6, seed, 3, norm, loading) for seed in NORM_SEEDS]
        return sum(found) / len(found)

    shares, whole = mean(shuffled), mean(in_whole_batches)
    assert whole > 0.9 and shares >= whole - POINT / 2, f"{shares} against {whole}"
