"""`stretto.weight`: a batch counts as a number that the script gives, in place of its samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from thread_workers import flat, regression, relative_distance, run_single_process, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.errors import ModelError

DOUBLE = torch.float64
SAMPLES = 44


def masked(samples: int = SAMPLES) -> TensorDataset:
    """Return a regression task in which about half of the samples count, as the labels of a text that are no prompt."""
    x, y = regression(samples, DOUBLE).tensors
    return TensorDataset(x, y, torch.rand(samples, 1, generator=torch.Generator().manual_seed(3)) < 0.5)


def loss_of(net: nn.Module, x: Tensor, y: Tensor, counts: Tensor, by: str = "mean") -> Tensor:
    """Return the mean or the sum of the losses of the samples that count; a mean of none is NaN."""
    total = ((net(x) - y).square() * counts).sum()
    return total if by == "sum" else total / counts.sum()


def train(by: str = "mean", accumulate: int = 1, batch: int = 4, dies_at: Any = None, epochs: int = 3) -> Any:
    """Return a training that weighs its batches by the samples that count."""

    def work(worker: int) -> Tensor:
        net, step = small_net(DOUBLE), 0
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(masked(), batch_size=batch))
        if by == "sum":
            stretto.weight(sum=True)
        for _ in range(epochs):
            window = []
            for one in loader:
                if (worker, step) == dies_at:
                    raise WorkerKilled
                window.append(one)
                if len(window) < accumulate and not stretto.is_last_batch():
                    continue
                number = sum(int(counts.sum()) for _, _, counts in window)
                if by == "mean":
                    stretto.weight(number)
                for place, (x, y, counts) in enumerate(window):
                    loss = loss_of(net, x, y, counts, "sum") / (1 if by == "sum" else max(number, 1))
                    with stretto.no_sync() if place < len(window) - 1 else torch.enable_grad():
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                window, step = [], step + 1
        return flat(net)

    return work


@pytest.mark.parametrize(
    "recipe", ["allreduce", "local_sgd(every=1)", "diloco(every=1, outer_lr=1, outer_momentum=0)", "power_sgd(rank=16)"]
)
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_mean_over_what_counts_equals_that_of_one_process(recipe: str, workers: int) -> None:
    whole = run_single_process(train(), join=workers)
    found = run_workers(workers, train(), recipe)
    limit = 1e-3 if "power" in recipe else 1e-12
    assert all(relative_distance(one, whole) <= limit for one in found)


@pytest.mark.parametrize("workers", [2, 3])
def test_accumulated_batches_count_as_the_sum_of_their_weights(workers: int) -> None:
    whole = run_single_process(train(accumulate=3), join=workers)
    assert all(relative_distance(one, whole) <= 1e-12 for one in run_workers(workers, train(accumulate=3), "allreduce"))


@pytest.mark.parametrize("workers", [2, 3])
def test_gradients_of_sums_are_added(workers: int) -> None:
    whole = run_single_process(train("sum"), join=workers)
    assert all(relative_distance(one, whole) <= 1e-12 for one in run_workers(workers, train("sum"), "allreduce"))
    with pytest.raises(ModelError, match=r"sum=True\) adds gradients"):
        run_workers(2, train("sum"), "local_sgd(every=4)")


def test_one_worker_computes_the_bits_of_the_plain_loop() -> None:
    assert torch.equal(run_workers(1, train(), "allreduce")[0], run_single_process(train()))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_after_a_failure_the_others_weigh_alike(recipe: str, tmp_path: Path) -> None:
    found, _ = run_elastic_workers(3, train(dies_at=(2, 4)), recipe, tmp_path)
    left = [one for one in found if one is not None]
    assert len(left) == 2
    assert torch.equal(*left)
    assert torch.isfinite(left[0]).all()


@pytest.mark.parametrize("how", ["", 'how=cast("bf16")', "how=error_feedback(top_k(0.5))"])
def test_a_batch_of_weight_0_contributes_nothing_to_gradients(how: str) -> None:
    """Nothing counts in the batches of worker 1: its losses are NaN, and the mean is that of worker 0."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        for x, y, counts in stretto.distribute(net, optimizer, DataLoader(masked(16), batch_size=4)):
            optimizer.zero_grad()
            loss = loss_of(net, x, y, torch.ones_like(counts) if worker == 0 else torch.zeros_like(counts))
            assert bool(loss.isnan()) == (worker == 1)
            stretto.weight(4 if worker == 0 else 0)
            loss.backward()
            optimizer.step()
        return flat(net)

    found = run_workers(2, work, f"allreduce({how})")
    assert torch.equal(*found)
    assert torch.isfinite(found[0]).all()


def test_a_call_that_is_left_out_is_named() -> None:
    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(masked(), batch_size=4))
        with pytest.raises(ModelError, match="outside a loop"):
            stretto.weight(3)
        for number, (x, y, counts) in enumerate(loader):
            if number != 2:
                stretto.weight(float(counts.sum()))
            loss_of(net, x, y, counts, "sum").backward()
            optimizer.step()

    with pytest.raises(ModelError, match=r"no batch of this exchange has a weight(?s:.*)stretto.weight\(n\) before"):
        run_workers(2, work, "allreduce")


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_numbers_that_are_no_weights_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite number that is not negative"):
        stretto.weight(number)
    with pytest.raises(TypeError, match="a number, or sum=True"):
        stretto.weight()
