"""Properties of streams among several workers: every sample counts once, or the run ends with an error."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from streams import has_weight
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

import stretto
from stretto.errors import LoaderError
from stretto.loader import epoch_order
from stretto.loader.epoch_order import part_of
from stretto.loader.stream_reader import CommonRandom, StreamReader
from stretto.loader.streams import digests, sharded_by

RECIPES = ["allreduce", "local_sgd(every=3)", "async_sgd"]


class Shard(IterableDataset):
    """A stream of the numbers `start`, `start + step`, ... below n."""

    def __init__(self, n: int, start: int = 0, step: int = 1) -> None:
        self.n, self.start, self.step = n, start, step

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(self.start), float(self.n), float(self.step)).view(-1, 1))


class Shuffled(Shard):
    """A stream of numbers in the order of its own random generator."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(n)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        found = list(super().__iter__())
        random.Random(self.seed).shuffle(found)
        return iter(found)


def reading(make: Callable[[int], Any], epochs: int = 2, **options: Any) -> Callable[[int], list[list[float]]]:
    """Return a script that trains on a stream, and returns the numbers in each epoch's batches."""

    def work(worker: int) -> list[list[float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        loader = stretto.distribute(net, optimizer, make(worker), **options)
        numbers_by_epoch = []
        for _ in range(epochs):
            numbers: list[float] = []
            for x in loader:
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
                if has_weight():
                    numbers += x.view(-1).tolist()
            numbers_by_epoch.append(numbers)
        return numbers_by_epoch

    return work


def each_once(found: list[list[list[float]]], samples: int) -> bool:
    """Return True if each epoch of all workers holds every number once."""
    return all(sorted(x for of_worker in found for x in of_worker[epoch]) == list(range(samples)) for epoch in range(2))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("samples", [7, 60, 61])
def test_a_stream_of_own_shards_is_assigned_once(recipe: str, samples: int) -> None:
    """The shards have unequal lengths, and one shard may have no whole batch when other shards have some."""
    work = reading(lambda worker: DataLoader(Shard(samples, worker, 3), batch_size=4), deal="own")
    assert each_once(run_workers(3, work, recipe), samples)


def test_a_shard_that_is_much_longer_than_others_is_read_to_its_end() -> None:
    work = reading(lambda worker: DataLoader(Shard(40 if worker else 4, 4 if worker else 0), batch_size=4), deal="own")
    assert each_once(run_workers(2, work, "allreduce"), 40)


@pytest.mark.parametrize("recipe", RECIPES)
def test_streams_that_differ_end_with_an_error_that_names_the_option(recipe: str) -> None:
    work = reading(lambda worker: DataLoader(Shard(60, worker, 2), batch_size=4))
    with pytest.raises(LoaderError, match='deal="own"'):
        run_workers(2, work, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_that_are_equal_at_all_workers_end_with_an_error(recipe: str) -> None:
    """A script that shards by RANK, which `stretto run` removes, has such shards: each sample would count N times."""
    work = reading(lambda worker: DataLoader(Shard(60), batch_size=4), deal="own")
    with pytest.raises(LoaderError, match="workers 0 and 1 begin with the same batch"):
        run_workers(3, work, recipe)


def test_shards_of_constant_samples_are_not_called_equal() -> None:
    class Constant(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.zeros(8, 1))

    work = reading(lambda worker: DataLoader(Constant(), batch_size=4), deal="own")
    assert run_workers(2, work, "allreduce") == [[[0.0] * 8] * 2] * 2


def test_streams_in_another_order_end_with_an_error() -> None:
    work = reading(lambda worker: DataLoader(Shuffled(12, worker), batch_size=4))
    with pytest.raises(LoaderError, match="the same samples in another order"):
        run_workers(2, work, "allreduce")


def test_streams_declared_equal_are_not_compared() -> None:
    work = reading(lambda worker: DataLoader(Shard(60), batch_size=4), deal="round-robin")
    assert each_once(run_workers(2, work, "allreduce"), 60)


def split_by_node(worker: int) -> Any:
    data: Any = Shard(61, worker, 2)
    data._distributed = SimpleNamespace(rank=worker, world_size=2)
    return DataLoader(data, batch_size=4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stream_split_by_node_is_assigned_once(recipe: str) -> None:
    assert each_once(run_workers(2, reading(split_by_node), recipe), 61)


def test_webdataset_splits_where_a_launcher_sets_the_world_size() -> None:
    kind = type("WebDataset", (), {"__module__": "webdataset.compat"})
    loader = SimpleNamespace(dataset=kind())
    assert sharded_by(loader, {"WORLD_SIZE": "4"}) == "webdataset"
    assert sharded_by(loader, {}) is None
    assert sharded_by(DataLoader(Shard(4)), {"WORLD_SIZE": "4"}) is None


def test_the_common_random_state_gives_one_order_and_restores_the_own_states() -> None:
    def shuffling() -> Iterator[Any]:
        for _ in range(4):
            yield random.random(), float(torch.rand(())), float(np.random.rand())

    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        reader = StreamReader(shuffling(), CommonRandom(b"epoch 1"))
        found.append([reader.take(position) for position in range(4)])
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_digests_of_samples_depend_on_all_their_contents() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 0, 1])
    assert len(set(digests((x, y)))) == 3
    assert digests({"x": x, "y": y}) == digests((x, y))
    assert digests((x, y))[1:] == digests([x[1:], y[1:]])
    assert len(set(digests((torch.zeros(3, 2), y)))) == 2
    assert len(set(digests((torch.zeros(2, 2), ["one", "other"])))) == 2


@pytest.mark.parametrize("deal", ["own", "sorted", 3])
def test_an_unknown_assignment_is_refused(deal: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    work = reading(lambda worker: DataLoader(data, batch_size=4), deal=deal)
    with pytest.raises(LoaderError if deal == "own" else stretto.errors.ScriptError, match="deal="):
        run_workers(2, work, "allreduce")


def test_a_part_of_a_batch_has_the_rows_of_its_samples_and_all_of_other_tensors() -> None:
    batch = {"x": torch.arange(4), "names": list("abcd"), "weights": torch.ones(3), "scale": torch.tensor(2.0)}
    parts = [part_of(batch, part, 2) for part in range(2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"]]
    assert all(len(part["weights"]) == 3 and part["scale"] == 2 for part in parts)
    assert [part_of(UserDict(batch), part, 2)["x"].tolist() for part in range(2)] == [[0, 1], [2, 3]]


def endless(num_samples: int) -> DataLoader[Any]:
    """Return a loader that draws this number of samples, from a generator of its own."""
    data, source = torch.arange(50.0).view(-1, 1), torch.Generator().manual_seed(3)
    sampler = RandomSampler(data, replacement=True, num_samples=num_samples, generator=source)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "recipe"), [(1, "allreduce"), *((3, recipe) for recipe in RECIPES)])
def test_loader_that_draws_samples_without_an_end_is_dealt_by_its_indices(workers: int, recipe: str) -> None:
    def work(worker: int) -> list[list[float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        found = []
        for x in stretto.distribute(net, optimizer, endless(10**10)):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            found.append(x.view(-1).tolist())
            if len(found) == 5:
                break
        return found

    drawn = [x.view(-1).tolist() for x in endless(4 * 8 * 5 * workers)]
    found = run_workers(workers, work, recipe)
    if recipe != "async_sgd":
        assert found == [drawn[worker : 5 * workers : workers] for worker in range(workers)]
    for batch in (batch for each in found for batch in each):  # workers that do not wait lease the next ones
        drawn.remove(batch)


@pytest.mark.parametrize("recipe", ["allreduce", "gossip(every=1)", "async_sgd"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("processes", [0, 1])
def test_of_a_sampler_without_an_end_each_worker_loads_its_own_samples_only(
    recipe: str, split: bool, processes: int, tmp_path: Path
) -> None:
    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self, worker: int) -> None:
            self.log = tmp_path / str(worker)

        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> torch.Tensor:
            with self.log.open("a") as file:  # in a loader process, too
                file.write(f"{index} ")
            return torch.tensor([float(index)])

    def work(worker: int) -> list[int]:
        data, net = Rows(worker), nn.Linear(1, 1)
        source = torch.Generator().manual_seed(3)  # the threads share the global one
        sampler = RandomSampler(data, replacement=True, num_samples=10**10, generator=source)
        ahead = {"prefetch_factor": 1} if processes else {}
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=processes, **ahead)  # type: ignore[arg-type]
        optimizer, found = torch.optim.SGD(net.parameters(), lr=1e-6), []
        for step, x in enumerate(stretto.distribute(net, optimizer, loader)):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            found += x.flatten().int().tolist()
            if step == 5:
                break
        return found

    trained = run_workers(2, work, recipe, split=split)
    for worker, found in enumerate(trained):
        loaded = [int(word) for word in (tmp_path / str(worker)).read_text().split()]
        assert len(found) == 6 * (2 if split else 4)
        assert loaded[: len(found)] == found
        assert len(loaded) <= len(found) + 3 * processes * 4
    assert trained[0] != trained[1]


def test_sampler_without_an_end_and_without_a_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    monkeypatch.setattr(epoch_order, "ENDLESS", 1000)
    work = reading(lambda worker: DataLoader(torch.ones(9, 1), sampler=Endless(), batch_size=4))  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="more than 1,000 samples, and no __len__"):
        run_workers(2, work, "allreduce")
