"""The data of all workers are compared at the start: a data set that the script has split by worker is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_workers import regression, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, SubsetRandomSampler, TensorDataset

import stretto
from stretto.errors import LoaderError

SAMPLES = 24


class Rows(Dataset[Any]):
    """Rows in memory, to each of which random noise is added when it is read."""

    def __init__(self, data: TensorDataset, folder: str = "") -> None:
        self.x, self.y = data.tensors
        self.paths = [f"{folder}/{row}.png" for row in range(len(self.x))]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + 0.1 * torch.randn_like(self.x[row]), self.y[row]


class Table:
    """A table with the interface of those of pyarrow."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.num_rows = rows, len(rows)

    def slice(self, offset: int, length: int) -> Table:
        return Table(self.rows[offset : offset + length])

    def to_pydict(self) -> dict[str, list[Any]]:
        return {"x": self.rows}


class ArrowDataset:
    """A data set as `datasets` has: rows of a table, or the rows that a selection names. It is no torch Dataset."""

    def __init__(self, rows: list[Any], indices: list[int] | None = None) -> None:
        self._data, self._indices = Table(rows), None if indices is None else Table(indices)
        self._order = range(len(rows)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, row: int) -> Any:
        return tuple(torch.tensor(column) for column in self._data.rows[self._order[row]])


class Columns(Dataset[Any]):
    """Columns in a dictionary, as tokenizers make them."""

    def __init__(self, data: TensorDataset) -> None:
        self.columns = dict(zip("xy", data.tensors, strict=True))

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.columns["x"][row], self.columns["y"][row]


class Records(Dataset[Any]):
    """Rows of a JSON file."""

    def __init__(self, data: TensorDataset) -> None:
        self.rows = [{"x": x.tolist(), "y": y.tolist()} for x, y in data]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.rows[row]["x"]), torch.tensor(self.rows[row]["y"])


class Shards(Sampler[int]):
    """A sampler of another library that gives each worker a part of the indices."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas

    def __len__(self) -> int:
        return SAMPLES // self.num_replicas

    def __iter__(self) -> Any:
        return iter(range(self.rank, SAMPLES, self.num_replicas))


def half(worker: int) -> TensorDataset:
    return TensorDataset(*(one[worker::2] for one in regression(SAMPLES).tensors))


def plain(data: TensorDataset) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in data]


SPLIT: dict[str, Callable[[int], Any]] = {
    "subset": lambda worker: Subset(regression(SAMPLES), range(worker, SAMPLES, 2)),
    "tensors": half,
    "own class": lambda worker: Rows(half(worker)),
    "nested": lambda worker: Subset(Rows(half(worker)), range(8)),
    "list": lambda worker: list(regression(SAMPLES))[worker::2],
    "table": lambda worker: ArrowDataset(plain(half(worker))),
    "indices of a table": lambda worker: ArrowDataset(plain(regression(SAMPLES)), list(range(worker, SAMPLES, 2))),
    "columns": lambda worker: Columns(half(worker)),
    "records": lambda worker: Records(half(worker)),
}
WHOLE: dict[str, Callable[[int], Any]] = {
    "random rows": lambda worker: Rows(regression(SAMPLES)),
    "folders of their own": lambda worker: Rows(regression(SAMPLES), f"/tmp/worker{worker}"),
    "list": lambda worker: list(regression(SAMPLES)),
    "table": lambda worker: ArrowDataset(plain(regression(SAMPLES))),
    "records": lambda worker: Records(regression(SAMPLES)),
}


def training(make: Callable[[int], Any], **options: Any) -> Callable[[int], int]:
    """Return a script that trains one epoch, and returns the number of samples in its batches."""

    def work(worker: int) -> int:
        net, seen = small_net(), 0
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        given = {name: value(worker) for name, value in options.items()}
        for x, y in stretto.distribute(net, optimizer, DataLoader(make(worker), batch_size=2, **given)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            seen += len(x)
        return seen

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd"])
@pytest.mark.parametrize("kind", SPLIT)
def test_data_that_the_script_split_by_worker_are_refused(kind: str, recipe: str) -> None:
    with pytest.raises(LoaderError, match="the data of worker 1 differ from those of worker 0"):
        run_workers(2, training(SPLIT[kind]), recipe)


def test_a_sampler_over_a_part_of_the_indices_is_refused() -> None:
    work = training(
        lambda worker: regression(SAMPLES), sampler=lambda worker: SubsetRandomSampler(range(worker, SAMPLES, 2))
    )
    with pytest.raises(LoaderError, match="the data of worker 1 differ"):
        run_workers(2, work, "allreduce")


def test_a_sampler_of_another_library_that_shards_the_data_is_refused() -> None:
    work = training(lambda worker: regression(SAMPLES), sampler=lambda worker: Shards(worker, 2))
    with pytest.raises(LoaderError, match="already shares the samples out"):
        run_workers(2, work, "allreduce")


@pytest.mark.parametrize("kind", WHOLE)
def test_random_rows_and_folders_per_worker_are_accepted(kind: str) -> None:
    assert sum(run_workers(2, training(WHOLE[kind]), "allreduce")) == SAMPLES


def test_files_in_another_order_are_told_to_sort_the_list() -> None:
    def work(worker: int) -> None:
        net = small_net()
        data = Rows(regression(SAMPLES))
        data.paths = data.paths[::-1] if worker else data.paths
        stretto.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=4))

    with pytest.raises(LoaderError, match=r"the data of worker 1 differ(.*\n)*.*sort the list of files"):
        run_workers(2, work, "allreduce")
