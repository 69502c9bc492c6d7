"""Blocks of a matrix: which rows and columns belong together, and the order in which their samples are trained.

In sub-epoch s of p, rank r trains block (r, (r + s) mod p), so no two ranks train a row or a column at the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Batch
from stretto.loader.epoch_batches import is_leasable

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """The block of each row and of each column, and those of each sample of the data."""

    parts: int
    of_row: Numbers
    of_column: Numbers
    row_block: Numbers
    """Row block of each sample."""
    column_block: Numbers
    """Column block of each sample."""

    def arranged(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches of the same samples: each has a part for each rank, all of one sub-epoch.

        The samples of a block keep the order in which they were drawn.
        """
        size = max(map(len, batches), default=1)
        flat = np.fromiter((one for batch in batches for one in batch), np.int64)
        found = []
        for sub_epoch in range(self.parts):
            blocks = [flat[self._is_in(flat, rank, sub_epoch)] for rank in range(self.parts)]
            for start in range(0, max(map(len, blocks)), size):
                found.append(np.concatenate([block[start : start + size] for block in blocks]).tolist())
        return found

    def length(self, size: int) -> int:
        """Return the number of batches of an epoch of all samples, of `size` samples for each rank."""
        counts = np.zeros((self.parts, self.parts), np.int64)
        np.add.at(counts, (self.row_block, (self.column_block - self.row_block) % self.parts), 1)
        return int((-(-counts // size)).max(axis=0).sum())

    def sub_epochs(self, samples: Sequence[int]) -> Numbers:
        """Return the sub-epoch of each of these samples."""
        found: Numbers = (self.column_block[samples] - self.row_block[samples]) % self.parts
        return found

    def _is_in(self, samples: Numbers, rank: int, sub_epoch: int) -> NDArray[np.bool_]:
        is_in: NDArray[np.bool_] = (self.row_block[samples] == rank) & (self.sub_epochs(samples) == sub_epoch)  # type: ignore[arg-type]
        return is_in


def blocks_of(loader: Any, rows: int, columns: int, parts: int) -> Blocks:
    """Return the blocks of a loader's samples, about equally many in each block of rows and of columns."""
    row, column = (_checked(each, size) for each, size in zip(_numbers(loader), (rows, columns), strict=True))
    of_row, of_column = _balanced(row, rows, parts), _balanced(column, columns, parts)
    return Blocks(parts, of_row, of_column, of_row[row], of_column[column])


def _balanced(numbers: Numbers, size: int, parts: int) -> Numbers:
    """Return a block for each row: the row with the most samples goes first, each to the block with the fewest."""
    counts = np.bincount(numbers, minlength=size)
    loads = [(0, 0, part) for part in range(parts)]
    found = np.zeros(size, np.int64)
    for row in np.argsort(-counts, kind="stable"):
        samples, rows, part = loads[0]
        found[row] = part
        heapq.heapreplace(loads, (samples + int(counts[row]), rows + 1, part))
    return found


def _numbers(loader: Any) -> tuple[Tensor, Tensor]:
    """Return the numbers of the row and of the column of each sample."""
    if not is_leasable(loader):
        raise _no_numbers(f"a {type(loader).__name__} of a stream")
    data: Any = loader.dataset
    if type(data) is TensorDataset and len(data.tensors) >= 2:
        return data.tensors[0], data.tensors[1]
    try:
        pairs = [(int(data[index][0]), int(data[index][1])) for index in range(len(data))]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _no_numbers(f"samples of a {type(data).__name__} ({type(error).__name__}: {error})") from None
    found = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _checked(numbers: Tensor, size: int) -> Numbers:
    """Return these numbers. Raise LoaderError unless they are of rows of a table of this size."""
    if numbers.dim() != 1 or numbers.is_floating_point():
        raise _no_numbers(f"a first or second item of shape {tuple(numbers.shape[1:])} and dtype {numbers.dtype}")
    if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < size):
        raise _no_numbers(f"numbers from {int(numbers.min())} to {int(numbers.max())} for a table of {size} entries")
    return numbers.cpu().numpy().astype(np.int64)


def _no_numbers(got: str) -> LoaderError:
    return LoaderError(
        explain(
            "a layout of blocks needs the row and the column of each sample",
            got=got,
            expected="samples that begin with the number of their row and that of their column",
            to_type="DataLoader(TensorDataset(rows, columns, values), batch_size=64, shuffle=True)",
        )
    )


def loader_length(blocks: Blocks, loader: DataLoader[Any]) -> int:
    """Return the number of batches of an epoch of a loader."""
    return blocks.length(loader.batch_size or -(-len(blocks.row_block) // max(len(loader), 1)))
