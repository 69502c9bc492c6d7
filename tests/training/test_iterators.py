"""Iterators over the distributed loader: one at a time, a peek is no epoch, epochs need optimizer steps."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_one_worker, run_single_process, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import finish
from stretto.errors import ScriptError
from stretto.events import read_events

RECIPES = ["allreduce", "local_sgd(every=3)", "async_sgd", "downpour(every=2)"]
DOUBLE = torch.float64
Step = Callable[[Any], None]


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)).view(-1, 1))


def prepared(data: Any, **options: Any) -> tuple[Any, Step]:
    """Return a distributed loader of single numbers, and a training step on one of its batches."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    loader = stretto.distribute(net, optimizer, data, **options)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        net(batch[0]).mean().backward()
        optimizer.step()

    return loader, step


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return [one for one in read_events(run / "events.jsonl") if one["event"] == "epoch"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("workers", [1, 2])
def test_nested_loops_end_with_an_error_at_the_outer_iterator(workers: int, recipe: str) -> None:
    def work(worker: int) -> None:
        loader, step = prepared(DataLoader(numbers(40), batch_size=4))
        for _ in loader:
            for batch in loader:
                step(batch)

    with pytest.raises(ScriptError, match="a later iterator of the loader has replaced this one"):
        run_workers(workers, work, recipe)


@pytest.mark.parametrize("workers", [1, 2])
def test_zipping_the_loader_with_itself_ends_with_an_error(workers: int) -> None:
    def work(worker: int) -> None:
        loader, step = prepared(DataLoader(numbers(40), batch_size=4))
        for one, _ in zip(loader, loader, strict=True):
            step(one)

    with pytest.raises(ScriptError, match="a later iterator of the loader has replaced this one"):
        run_workers(workers, work, "allreduce")


def test_an_exhausted_iterator_stays_exhausted() -> None:
    def work(worker: int) -> list[Any]:
        loader, step = prepared(DataLoader(numbers(8), batch_size=4))
        first = iter(loader)
        for batch in first:
            step(batch)
        for batch in loader:
            step(batch)
        return list(first)

    assert run_workers(2, work, "allreduce") == [[], []]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_peeked_batch_is_no_epoch(recipe: str, when: str, tmp_path: Path) -> None:
    def work(worker: int) -> list[list[float]]:
        loader, step = prepared(DataLoader(numbers(48), batch_size=4, shuffle=True))
        epochs = []
        if when == "before":
            next(iter(loader))
        for _ in range(2):
            seen: list[float] = []
            for batch in loader:
                step(batch)
                seen += batch[0].view(-1).tolist()
            epochs.append(seen)
        if when == "after":
            next(iter(loader))
        return epochs

    found = run_workers(2, work, recipe, run=tmp_path)
    for epoch in range(2):
        assert sorted(x for epochs in found for x in epochs[epoch]) == list(range(48))
    written = epochs_of(tmp_path)
    assert [one["samples"] for one in written] == [48, 96]
    assert all(one["sample_counts"]["once"] == 48 and not one["sample_counts"]["never"] for one in written)
    assert sum(one["samples"] for one in written[-1]["workers"]) == 96


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "diloco(every=4)"])
def test_a_peek_changes_neither_weights_nor_parameters(recipe: str) -> None:
    """The batches are uneven: a peeked batch with weight in the next exchange would change the result."""
    data = regression(44, DOUBLE)

    def work(peeks: bool) -> Callable[[int], Tensor]:
        def run(worker: int) -> Tensor:
            net = small_net(DOUBLE)
            optimizer = sgd(net.parameters())
            loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
            for _ in range(3):
                if peeks:
                    next(iter(loader))
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
            return flat(net)

        return run

    assert torch.equal(run_workers(2, work(True), recipe)[0], run_workers(2, work(False), recipe)[0])


def test_one_worker_that_peeks_draws_what_the_plain_script_draws() -> None:
    data = regression(40)

    def work(worker: int) -> Tensor:
        torch.manual_seed(3)
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8, shuffle=True))
        pending = iter(loader)
        torch.randn(3)
        next(pending)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x + 0.01 * torch.randn(x.shape)), y).backward()
                optimizer.step()
        return flat(net)

    plain = work(0)
    finish()
    assert torch.equal(plain, run_single_process(work))
    assert torch.equal(plain, run_one_worker(work, "allreduce"))


def test_a_peek_into_a_stream_restarts_the_stream() -> None:
    batches = [[torch.full((4, 1), float(n))] for n in range(6)]

    def work(worker: int) -> list[float]:
        loader, step = prepared(batches)
        next(iter(loader))
        seen = []
        for batch in loader:
            step(batch)
            seen.append(float(batch[0][0]))
        return seen

    assert sorted(x for seen in run_workers(2, work, "allreduce") for x in seen) == list(range(6))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_epoch_without_an_optimizer_step_counts_no_samples(recipe: str, tmp_path: Path) -> None:
    def work(worker: int) -> None:
        loader, step = prepared(DataLoader(numbers(48), batch_size=4))
        for epoch in range(3):
            for batch in loader:
                if epoch != 1:
                    step(batch)

    run_workers(2, work, recipe, run=tmp_path)
    written = epochs_of(tmp_path)
    assert [one["samples"] for one in written] == [48, 48, 96]
    assert [one["sample_counts"]["once"] for one in written] == [48, 0, 48]
    assert [sum(one["samples"] for one in line["workers"]) for line in written] == [48, 48, 96]
    notices = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    matching = [one for one in notices if "epoch 2 made no optimizer step" in one]
    assert all("not counted as trained" in one for one in matching)
    own = [int(re.search(r"its (\d+) samples", one)[1]) for one in matching]  # type: ignore[index]
    assert sum(own) == 48  # of workers that do not wait for each other, each says its own; some got no batch
    assert len(own) == 1 or recipe in ("async_sgd", "downpour(every=2)")


def test_a_worker_says_its_own_epoch_without_a_step_though_the_first_worker_stepped(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def work(worker: int) -> None:
        loader, step = prepared(DataLoader(numbers(48), batch_size=4))
        for epoch in range(2):
            for number, batch in enumerate(loader):
                if epoch == 1 and number == 0:
                    both.wait(60)
                if worker == 0 or epoch == 0:
                    step(batch)

    run_workers(2, work, "async_sgd", run=tmp_path)
    notices = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    matching = [one for one in notices if "made no optimizer step" in one]
    assert len(matching) == 1
    assert matching[0].startswith("worker 1 in epoch 2")


@pytest.mark.parametrize("how", ["no_grad around", "eval mode"])
def test_an_epoch_of_evaluation_makes_no_rounds_and_no_steps(how: str, tmp_path: Path) -> None:
    """A step that a worker leaves out for gradients that are not finite counts; a loop without gradients has none."""

    def work(worker: int) -> None:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        loader = stretto.distribute(net, optimizer, DataLoader(numbers(48), batch_size=4))
        for epoch in range(4):
            evaluates = epoch % 2 == 1
            net.train(not (evaluates and how == "eval mode"))
            with torch.set_grad_enabled(not (evaluates and how == "no_grad around")):
                for batch in loader:
                    if not evaluates:
                        optimizer.zero_grad()
                        is_finite = not (worker == 1 and epoch == 2 and batch[0][0] < 20)
                        (net(batch[0]).mean() * (1.0 if is_finite else math.nan)).backward()
                        if is_finite:
                            optimizer.step()
                        optimizer.zero_grad()

    run_workers(2, work, "local_sgd(every=3)", run=tmp_path)
    assert [one["step"] for one in epochs_of(tmp_path)] == [6, 6, 12, 12]
    ends = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "end"]
    assert [(one["step"], one["rounds"]) for one in ends] == [(12, 4)] * 2


def test_an_epoch_of_evaluation_has_no_weight_in_the_next_exchange() -> None:
    data = regression(44, DOUBLE)

    def work(evaluates: bool) -> Callable[[int], Tensor]:
        def run(worker: int) -> Tensor:
            net = small_net(DOUBLE)
            optimizer = sgd(net.parameters())
            loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
            for epoch in range(3):
                for x, y in loader:
                    if epoch == 1:
                        if evaluates:
                            net(x)
                        continue
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
                if epoch == 0 and not evaluates:
                    break
            if not evaluates:
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
            return flat(net)

        return run

    assert torch.equal(run_workers(3, work(True), "allreduce")[0], run_workers(3, work(False), "allreduce")[0])


@pytest.mark.parametrize(
    ("recipe", "samples"),
    [("allreduce", 48), ("allreduce", 56), ("local_sgd(every=1)", 48), ("local_sgd(every=5)", 48)],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_update_bn_takes_the_statistics_of_all_samples_at_every_worker(recipe: str, samples: int, workers: int) -> None:
    """All batches have one size: the mean of the batches' means does not depend on the batch assignment."""
    data = regression(samples, DOUBLE)

    def work(worker: int) -> Tensor:
        norm = nn.BatchNorm1d(6, dtype=DOUBLE)
        net = nn.Sequential(norm, nn.Linear(6, 1, dtype=DOUBLE))
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8, drop_last=True))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        torch.optim.swa_utils.update_bn(loader, net)
        return torch.cat([norm.running_mean, norm.running_var])

    found = run_workers(workers, work, recipe)
    wanted = torch.stack([torch.cat([x.mean(0), x.var(0)]) for x in data.tensors[0].split(8)]).mean(0)
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.allclose(found[0], wanted, atol=1e-12)


LEFT = "the last loop was left before its end"


@pytest.mark.parametrize(
    ("recipe", "is_reported"),
    [("async_sgd", True), ("local_sgd(every=4)", True), ("local_sgd(every=3)", False), ("allreduce", False)],
)
@pytest.mark.parametrize("finishes", [False, True])
def test_models_that_differ_after_a_loop_was_left_early_are_reported(
    finishes: bool, recipe: str, is_reported: bool, tmp_path: Path
) -> None:
    def work(worker: int) -> None:
        loader, step = prepared(DataLoader(numbers(48), batch_size=4))
        for _ in range(2):
            for number, batch in enumerate(loader):
                step(batch)
                if number == 2:
                    break
        if finishes:
            finish()

    run_workers(2, work, recipe, run=tmp_path)
    texts = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    assert any(LEFT in one for one in texts) == (is_reported and not finishes)
