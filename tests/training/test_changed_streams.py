"""Workers that fail or leave within an epoch over a stream: the others train their batches, by the model's own count.

The model is a table that counts: a step subtracts each batch's share of the mean from its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import KillInExchange, ThreadCoordinator, WorkerKilled, run_elastic_workers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

import stretto
from stretto.events import read_events
from stretto.loader.stream_reader import StreamReader

BATCHES = 41
RECIPES = ["allreduce", "local_sgd(every=4)", "diloco(every=4)", "gossip(every=2)"]


class Stream(IterableDataset[torch.Tensor]):
    """A stream of batches of two rows each, by their numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES):
            yield torch.tensor([2 * number, 2 * number + 1])


class Endless(Sampler[int]):
    """A sampler that says that it has no end, and has one."""

    def __len__(self) -> int:
        return 10**10

    def __iter__(self) -> Iterator[int]:
        return iter(range(2 * BATCHES))


KINDS: dict[str, Callable[[], Any]] = {
    "indices": lambda: DataLoader(torch.arange(2 * BATCHES), batch_size=2, sampler=Endless()),  # type: ignore[arg-type]
    "generator": lambda: iter(Stream()),
    "iterable": lambda: DataLoader(Stream(), batch_size=None),
    "list": lambda: list(Stream()),
}


Given = dict[int, list[int]]
"""Numbers of the batches that each worker was given."""


def counting(kind: str, at: Callable[[int, int], None], given: Given | None = None) -> Callable[[int], torch.Tensor]:
    """Return a script that trains the table, calls `at(worker, step)` with each batch, and returns the counts."""

    def work(worker: int) -> torch.Tensor:
        net = nn.Embedding(2 * BATCHES, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for step, x in enumerate(stretto.distribute(net, optimizer, KINDS[kind]())):
            if given is not None:
                given.setdefault(worker, []).append(int(x[0]) // 2)
            at(worker, step)
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            x.zero_()  # batches kept for other workers share no memory with the script's
        return -net.weight.detach().flatten()

    return work


def killed(*deaths: tuple[int, int]) -> Callable[[int, int], None]:
    def at(worker: int, step: int) -> None:
        if (worker, step) in deaths:
            raise WorkerKilled

    return at


def commits(given: Given, deaths: list[tuple[int, int]], every: int) -> list[int]:
    """Return the batches that were trained: all of a survivor, and those of a failed worker before its round."""
    kept = {worker: numbers[: dict(deaths).get(worker, BATCHES) // every * every] for worker, numbers in given.items()}
    survivors = {worker: numbers for worker, numbers in given.items() if worker not in dict(deaths)}
    return sorted(number for numbers in (kept | survivors).values() for number in numbers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("deaths", [[(0, 5), (2, 9)], [(1, 6), (2, 6)]])
def test_survivors_train_what_failed_workers_had_since_the_last_exchange_and_the_rest(
    recipe: str, deaths: list[tuple[int, int]]
) -> None:
    given: Given = {}
    found, _ = run_elastic_workers(4, counting("generator", killed(*deaths), given), recipe)
    counts = [one for one in found if one is not None]
    assert len(counts) == 4 - len(deaths)
    assert all(bool((one != 0).all()) for one in counts)
    every = {"allreduce": 1, "gossip(every=2)": 2}.get(recipe, 4)
    assert commits(given, deaths, every) == list(range(BATCHES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_batches_of_each_kind_of_stream_are_trained_by_survivors(kind: str, split: bool, recipe: str) -> None:
    found, _ = run_elastic_workers(2, counting(kind, killed((1, 6))), recipe, split=split)
    assert bool((found[0] != 0).all())
    assert found[0].max() <= 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_share_of_a_worker_that_leaves_is_trained_by_the_others(recipe: str) -> None:
    coordinator = ThreadCoordinator(3)

    def at(worker: int, step: int) -> None:
        if worker == 1 and step == 5:
            coordinator.quit(1)

    found, _ = run_elastic_workers(3, counting("generator", at), recipe, coordinator=coordinator)
    assert found[1] == "left"
    assert all(bool((found[worker] != 0).all()) for worker in (0, 2))


@pytest.mark.parametrize("op", range(1, 9))
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_survivors_deal_the_same_if_one_has_the_result_of_an_exchange_and_another_has_not(op: int, recipe: str) -> None:
    given: Given = {}
    coordinator = ThreadCoordinator(3, KillInExchange(op, 1, 0))
    found, _ = run_elastic_workers(3, counting("list", killed(), given), recipe, coordinator=coordinator)
    assert torch.equal(found[0], found[2])
    assert bool((found[0] != 0).all()) and found[0].max() <= 1
    assert not set(given[0]) & set(given[2])


def test_kept_batches_are_those_since_the_last_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    keep = StreamReader.keep_from

    def counted(self: StreamReader, position: int) -> None:
        nonlocal most
        most = max(most, len(self._kept))
        keep(self, position)

    monkeypatch.setattr(StreamReader, "keep_from", counted)
    run_elastic_workers(3, counting("generator", killed()), "local_sgd(every=4)")
    assert 0 < most <= 3 * 4


@pytest.mark.parametrize("deaths", [[(1, 6)], []])
def test_shard_that_is_lost_with_its_worker_is_named(deaths: list[tuple[int, int]], tmp_path: Path) -> None:
    def work(worker: int) -> int:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        shard = [torch.full((2, 1), float(worker))] * (12 + worker)
        for step, x in enumerate(stretto.distribute(net, optimizer, shard, deal="own")):
            killed(*deaths)(worker, step)
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
        return 0

    run_elastic_workers(3, work, "local_sgd(every=4)", tmp_path)
    lost = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "batches_lost"]
    assert len(lost) == len(deaths)
    assert all("the shard of worker 1 was lost with it: 6 samples" in event["text"] for event in lost)
