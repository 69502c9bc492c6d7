"""The last batches of a stream, fewer than there are workers: each worker has a share, and all loops are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from streams import has_weight
from thread_workers import flat, regression, relative_distance, run_single_process, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import stretto

WAITING = ["allreduce", "local_sgd(every=4)", "diloco(every=2)", "gossip"]
BATCH = 8


class Rows(IterableDataset[Tensor]):
    """The numbers of this many rows."""

    def __init__(self, rows: int, first: int = 0, every: int = 1) -> None:
        self._rows = range(first, rows, every)

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, self._rows)


Given = dict[int, list[list[int]]]
"""Rows of each batch that a worker was given, without those of passes of weight 0."""


def counting(
    make: Callable[[int], Any], rows: int, given: Given, dies_at: Any = None, **options: Any
) -> Callable[[int], tuple[int, Tensor]]:
    """Return a script that counts its steps and the rows in a table, and dies in its step (worker, number)."""

    def work(worker: int) -> tuple[int, Tensor]:
        net = nn.Embedding(rows, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        steps, given[worker] = 0, []
        for x in stretto.distribute(net, optimizer, make(worker), **options):
            if (worker, steps) == dies_at:
                raise WorkerKilled
            given[worker].append(x.tolist() if has_weight() else [])
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            steps += 1
        stretto.finish()
        return steps, net.weight.detach().flatten()

    return work


def rows_of(given: Given) -> list[int]:
    return sorted(row for batches in given.values() for batch in batches for row in batch)


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize(("workers", "rows"), [(3, 32), (3, 68), (2, 24), (5, 13 * BATCH), (4, 5 * BATCH + 2), (3, 8)])
def test_all_loops_are_equal_and_each_row_is_trained_once(recipe: str, workers: int, rows: int) -> None:
    given: Given = {}
    work = counting(lambda _: DataLoader(Rows(rows), batch_size=BATCH), rows, given)
    found = run_workers(workers, work, recipe)
    batches = -(-rows // BATCH)
    assert [steps for steps, _ in found] == [-(-batches // workers)] * workers
    assert rows_of(given) == list(range(rows))
    assert bool((found[0][1] != 0).all())
    assert recipe == "gossip" or all(torch.equal(weight, found[0][1]) for _, weight in found)
    last = [len(of_worker[-1]) for of_worker in given.values()]
    assert batches <= workers or batches % workers == 0 or all(size >= 2 or rows % BATCH for size in last)
    assert 1 not in last


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize(("workers", "batches"), [(4, 3), (4, 9), (3, 5), (2, 7), (3, 6)])
def test_all_workers_know_the_last_batch_where_some_have_no_part_of_it(recipe: str, workers: int, batches: int) -> None:
    """A batch is a number, which can't be divided."""

    def work(worker: int) -> list[bool]:
        net, marks = nn.Embedding(batches, 1), list[bool]()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for number in stretto.distribute(net, optimizer, range(batches)):
            marks.append(stretto.is_last_batch())
            optimizer.zero_grad()
            net(torch.tensor([number])).sum().backward()
            optimizer.step()
        return marks

    steps = -(-batches // workers)
    assert run_workers(workers, work, recipe) == [[False] * (steps - 1) + [True]] * workers


def test_a_stream_in_shares_equals_one_process() -> None:
    rows, data = 13 * BATCH, regression(13 * BATCH, torch.float64)

    def work(worker: int) -> Tensor:
        net = small_net(dtype=torch.float64)
        optimizer = sgd(net.parameters())
        for number in stretto.distribute(net, optimizer, DataLoader(Rows(rows), batch_size=BATCH)):
            x, y = data[number]
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return flat(net)

    whole = run_single_process(work, join=5)
    assert all(relative_distance(one, whole) <= 1e-12 for one in run_workers(5, work, "allreduce"))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
@pytest.mark.parametrize("killed", [0, 1, 3])
def test_shares_of_a_worker_that_fails_in_the_last_step_are_trained_by_the_others(recipe: str, killed: int) -> None:
    """Four workers have two whole steps of 11 batches; of the last three batches workers 0 and 1 share one."""
    given: Given = {}
    rows = 11 * BATCH
    work = counting(lambda _: DataLoader(Rows(rows), batch_size=BATCH), rows, given, dies_at=(killed, 2))
    found, _ = run_elastic_workers(4, work, recipe)
    left = [one for one in found if one is not None]
    assert all(torch.equal(weight, left[0][1]) for _, weight in left)
    assert len({steps for steps, _ in left}) == 1
    committed = given if recipe == "allreduce" else {one: rows for one, rows in given.items() if one != killed}
    assert rows_of(committed) == list(range(rows))
    assert bool((left[0][1] != 0).all())


@pytest.mark.parametrize("recipe", WAITING)
def test_workers_whose_shard_has_ended_make_the_steps_of_the_longest(recipe: str) -> None:
    given: Given = {}
    makes = [Rows(40, 0, 2), Rows(16, 1, 2)]
    work = counting(lambda worker: DataLoader(makes[worker], batch_size=4), 40, given, deal="own")
    found = run_workers(2, work, recipe)
    assert [steps for steps, _ in found] == [5, 5]
    assert rows_of(given) == sorted([*range(0, 40, 2), *range(1, 16, 2)])
    assert bool((found[0][1][1:16] != 0).all())


def test_data_that_have_no_row_for_each_sample_are_not_divided() -> None:
    """An edge list is no list of samples: the worker has the whole batch, and others pass over it with weight 0."""
    sizes = dict[int, list[int]]()

    def work(worker: int) -> None:
        net = small_net(features=1)
        optimizer = sgd(net.parameters())
        graphs = [(torch.ones(8, 1), torch.zeros(2, 5, dtype=torch.long)) for _ in range(5)]
        for x, edges in stretto.distribute(net, optimizer, graphs):
            assert edges.shape == (2, 5)
            sizes.setdefault(worker, []).append(len(x) if has_weight() else 0)
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()

    run_workers(3, work, "allreduce")
    assert sizes == {0: [8, 8], 1: [8, 0], 2: [8, 8]}
