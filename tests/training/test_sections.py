"""A second `distribute` in one process ends the current run, and starts another run with its own records."""

from __future__ import annotations

import contextvars
import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from thread_workers import flat, regression, run_one_worker, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import stretto
from stretto import errors
from stretto.events import read_events
from stretto.interval import every

RECIPES = [
    "allreduce",
    "local_sgd(every=3)",
    "diloco(every=4)",
    "async_sgd",
    "stale_synchronous(bound=1)",
    "elastic_averaging",
]
"""One recipe of each kind for which a worker trains differently."""


def fold(index: int, data: Any = None, epochs: int = 2, **more: Any) -> nn.Module:
    """Train a small net on a part of the data, as one fold of a cross-validation does."""
    net, source = small_net(), torch.Generator().manual_seed(index)
    with torch.no_grad():
        for one in net.parameters():
            one.add_(0.1 * torch.randn(one.shape, generator=source))
    optimizer = sgd(net.parameters())
    data = data if data is not None else regression(36 + 4 * index)
    loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=4), **more)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return net


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def sample_counts(folder: Path) -> list[dict[str, int]]:
    """Return the sample counts of each epoch."""
    return [event["sample_counts"] for event in sorted(events(folder, "epoch"), key=lambda event: event["epoch"])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_section_has_its_own_records(recipe: str, tmp_path: Path) -> None:
    nets = run_workers(3, lambda worker: [fold(index) for index in range(3)], recipe, run=tmp_path)
    for index, folder in enumerate([tmp_path, tmp_path / "section-2", tmp_path / "section-3"]):
        assert [one["once"] for one in sample_counts(folder)] == [36 + 4 * index] * 2
        assert all(one["never"] == one["twice"] == 0 for one in sample_counts(folder))
        assert sorted(event["worker"] for event in events(folder, "end")) == [0, 1, 2]
        assert sum(event["samples"] for event in events(folder, "end")) == 2 * (36 + 4 * index)
        final = load_file(folder / "final.safetensors")
        for net in nets:
            assert all(torch.equal(final[name], one) for name, one in net[index].state_dict().items())
    named = [(event["section"], event["folder"]) for event in events(tmp_path, "section")]
    assert named == [(2, "section-2"), (3, "section-3")]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_a_section_computes_the_same_as_a_separate_run(recipe: str) -> None:
    both = run_workers(2, lambda worker: [flat(fold(index)) for index in range(2)], recipe)
    for index in range(2):
        single = run_workers(2, lambda worker, index=index: flat(fold(index)), recipe)
        assert all(torch.equal(one[index], other) for one, other in zip(both, single, strict=True))


def test_the_loader_that_an_earlier_call_returned_is_distributed_again() -> None:
    def two_sections(again: bool) -> tuple[Tensor, int]:
        net, evaluated, loader = small_net(), [], DataLoader(regression(40), batch_size=4)
        given, optimizer = loader, sgd(net.parameters())
        for _ in range(2):
            shared = stretto.distribute(
                net, optimizer, given, evaluate=lambda net: evaluated.append(net) or {"one": 1.0}
            )
            for x, y in shared:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            given = shared if again else loader
        return flat(net), len(evaluated)

    for run in (lambda work: [work(0)], lambda work: run_workers(2, work)):  # a single process, and two workers
        for (trained, count), (wanted, number) in zip(
            run(lambda _worker: two_sections(True)), run(lambda _worker: two_sections(False)), strict=True
        ):
            assert torch.equal(trained, wanted) and count == number


def test_several_sections_compute_what_the_plain_script_computes() -> None:
    def work(*_: Any) -> list[Tensor]:
        return [flat(fold(index)) for index in range(3)]

    plain = contextvars.Context().run(work)
    assert all(map(torch.equal, run_one_worker(lambda worker: work(), "allreduce"), plain))


def test_pretraining_and_fine_tuning_share_a_model(tmp_path: Path) -> None:
    def work(worker: int) -> Tensor:
        net, data = small_net(), regression(24)
        for count in (2, 3):
            optimizer = sgd(net[-1].parameters() if count == 3 else net.parameters())
            if count == 3:
                net[0].requires_grad_(False)
            loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=count))
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    found = run_workers(2, work, "local_sgd(every=5)", run=tmp_path)
    assert torch.equal(*found)
    before, after = (load_file(one / "final.safetensors") for one in (tmp_path, tmp_path / "section-2"))
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])


def test_evaluations_are_counted_from_the_beginning_of_each_section(tmp_path: Path) -> None:
    data = regression(40)

    def work(worker: int) -> None:
        for index in range(2):
            fold(index, data, epochs=1, evaluate=lambda net: {"norm": float(flat(net).norm())}, evaluate_every=2)

    for recipe in ("allreduce", "async_sgd"):
        run = tmp_path / recipe
        run.mkdir()
        run_workers(2, work, recipe, run=run)
        first, second = (
            [one["samples"] for one in events(folder, "evaluation")] for folder in (run, run / "section-2")
        )
        assert [one % 16 for one in first[:-1]] == [one % 16 for one in second[:-1]] == [0, 0]
        assert (first[-1], second[-1]) == (40, 40)


def train_twice(net: nn.Module, shuffle: bool = False) -> Tensor:
    """Train in two sections of an epoch."""
    for _section in range(2):
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4, shuffle=shuffle))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return flat(net)


def whole_and_resumed(work: Callable[[int], Tensor], recipe: str, kept: int, folder: Path) -> list[Tensor]:
    """Return the results of a run, and of one resumed when the second section had this number of checkpoints."""
    options: dict[str, Any] = {"checkpoint": every("2 rounds"), "keep": 99}
    for name in ("whole", "again"):
        (folder / name).mkdir()
    whole = run_one_worker(work, recipe, run=folder / "whole", **options)
    shutil.copytree(folder / "whole", folder / "part")
    for checkpoint in sorted((folder / "part/section-2/checkpoints").iterdir())[kept:]:
        shutil.rmtree(checkpoint)
    return [whole, run_one_worker(work, recipe, run=folder / "again", resume=folder / "part", **options)]


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "async_sgd"])
def test_a_model_of_the_meta_device_is_resumed_in_its_second_section(recipe: str, tmp_path: Path) -> None:
    def work(_: int) -> Tensor:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
        return train_twice(net)

    whole, again = whole_and_resumed(work, recipe, 1, tmp_path)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_a_run_resumed_at_the_end_of_a_section_draws_the_same_numbers_in_the_next(recipe: str, tmp_path: Path) -> None:
    def work(_: int) -> Tensor:
        torch.manual_seed(0)
        return train_twice(small_net(), shuffle=True)

    whole, again = whole_and_resumed(work, recipe, 0, tmp_path)
    assert torch.equal(again, whole)


def test_finish_ends_a_section_explicitly(tmp_path: Path) -> None:
    def work(worker: int) -> None:
        fold(0)
        stretto.finish()
        assert (tmp_path / "final.safetensors").exists()
        stretto.log(loss=1.0)  # no run records this
        fold(1)
        stretto.finish()
        stretto.finish()

    run_workers(2, work, "local_sgd(every=3)", run=tmp_path)
    assert len(sample_counts(tmp_path / "section-2")) == 2


def test_finish_without_a_run_does_nothing() -> None:
    contextvars.Context().run(stretto.finish)


def test_the_loader_of_a_section_that_has_ended_is_refused() -> None:
    def work(worker: int) -> str:
        data, net = regression(16), small_net()
        old = stretto.distribute(net, sgd(net.parameters()), DataLoader(data, batch_size=4))
        stretto.distribute(net, sgd(net.parameters()), DataLoader(data, batch_size=4))
        with pytest.raises(errors.ScriptError, match="has ended") as found:
            next(iter(old))
        return str(found.value)

    for text in run_workers(2, work, "allreduce"):
        assert all(word in text for word in ("got:", "expected:", "try:"))


def test_a_recipe_that_needs_another_connection_is_refused() -> None:
    def work(worker: int) -> None:
        fold(0, recipe="allreduce")
        with pytest.raises(errors.ScriptError, match="kind of connection"):
            fold(1, recipe="async_sgd")
        fold(2, recipe="local_sgd(every=2)")

    run_workers(2, work)


def test_an_exception_that_all_workers_catch_ends_the_section(tmp_path: Path) -> None:
    def broken(epochs: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4))
        for step, (x, y) in enumerate(loader):
            if step == 2:
                raise RuntimeError("a fold without any positives")
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    def work(worker: int) -> None:
        with pytest.raises(RuntimeError, match="positives"):
            broken(1)
        fold(1)

    run_workers(2, work, "allreduce", run=tmp_path)
    assert [one["once"] for one in sample_counts(tmp_path / "section-2")] == [40, 40]


def test_data_that_differ_among_workers_are_refused_in_later_sections() -> None:
    data = regression(40)

    def work(worker: int) -> None:
        fold(0)
        fold(1, Subset(data, list(range(worker, 20 + worker))))

    with pytest.raises(errors.LoaderError, match="data of worker 1 differ"):
        run_workers(2, work, "allreduce")


def _hooks(net: nn.Module, optimizer: Any) -> int:
    gradients = sum(len(one._post_accumulate_grad_hooks or {}) for one in net.parameters())
    return gradients + len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)


@pytest.mark.parametrize("recipe", ["allreduce", "one_bit(warm_up=2)", "local_sgd(every=2)", "async_sgd"])
def test_finish_removes_all_hooks(recipe: str) -> None:
    def work(worker: int) -> int:
        net = small_net()
        optimizer = torch.optim.Adam(net.parameters()) if "one_bit" in recipe else sgd(net.parameters())
        for _ in range(3):
            loader = stretto.distribute(net, optimizer, DataLoader(regression(16), batch_size=4))
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        stretto.finish()
        return _hooks(net, optimizer)

    assert run_workers(2, work, recipe) == [0, 0]


@pytest.mark.parametrize("recipe", ["allreduce", "diloco(every=2)", "async_sgd"])
def test_twenty_sections_leak_no_files_threads_or_trainers(recipe: str, tmp_path: Path) -> None:
    def count() -> tuple[int, int, int]:
        gc.collect()
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        trainers = sum(type(one).__name__ in ("Trainer", "FlatParameters") for one in gc.get_objects())
        return open_files, threading.active_count(), trainers

    def is_above(later: tuple[int, int, int], early: tuple[int, int, int]) -> bool:
        return any(one > other for one, other in zip(later, early, strict=True))

    def work(worker: int) -> list[tuple[int, int, int]]:
        counted = []
        for index in range(20):
            fold(0, epochs=1)
            if index in (1, 19):
                stretto.finish()
                counted.append(count())
        limit = time.monotonic() + 60
        while is_above(counted[1], counted[0]) and time.monotonic() < limit:  # threads that are about to end
            time.sleep(0.05)
            counted[1] = count()
        return counted

    early, late = run_one_worker(work, recipe, run=tmp_path)
    assert not is_above(late, early), (early, late)
