"""Blocks of a matrix: which rows and columns belong together, and the order in which their samples are trained.

In sub-epoch s of p, rank r trains block (r, (r + s) mod p), so no two ranks train a row or a column at the same time.
A rank trains the columns of a block piece after piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stretto.data.balance import Numbers, balanced, in_ranges
from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Batch
from stretto.loader.epoch_batches import is_leasable


@dataclass(frozen=True)
class Blocks:
    """The block of each row and of each column, and those of each sample of the data."""

    parts: int
    pieces: int
    of_row: Numbers
    of_column: Numbers
    piece_of: Numbers
    """Piece of its column block that each column is in."""
    row_block: Numbers
    """Row block of each sample."""
    column_block: Numbers
    """Column block of each sample."""
    piece: Numbers
    """Piece of each sample."""

    def arranged(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches of the same samples: each has a part for each rank, all of one sub-epoch.

        The samples of a block keep the order in which they were drawn, piece after piece.
        """
        size = max(map(len, batches), default=1)
        flat = np.fromiter((one for batch in batches for one in batch), np.int64)
        flat = flat[np.lexsort((self.piece[flat], self.sub_epochs(flat), self.row_block[flat]))]
        ends = np.flatnonzero(np.diff(self._places(flat))) + 1
        found: list[list[list[Batch]]] = [[[] for _ in range(self.parts)] for _ in range(self.parts)]
        for block in np.split(flat, ends) if len(flat) else ():
            rank, sub_epoch = self.row_block[block[0]], self.sub_epochs(block[:1])[0]
            found[sub_epoch][rank] += [block[start : start + size].tolist() for start in range(0, len(block), size)]
        together = (zip_longest(*of_ranks, fillvalue=[]) for of_ranks in found)
        return [[*chain.from_iterable(each)] for steps in together for each in steps]

    def length(self, size: int) -> int:
        """Return the number of batches of an epoch of all samples, of `size` samples for each rank."""
        counts = np.bincount(self._places(slice(None)), minlength=self.parts * self.parts * self.pieces)
        batches = -(-counts // size)
        return int(batches.reshape(self.parts, self.parts, self.pieces).sum(axis=2).max(axis=0).sum())

    def sub_epochs(self, samples: Any) -> Numbers:
        """Return the sub-epoch of each of these samples."""
        found: Numbers = (self.column_block[samples] - self.row_block[samples]) % self.parts
        return found

    def _places(self, samples: Any) -> Numbers:
        """Return a number for each sample: of its row block, then of its sub-epoch, then of its piece."""
        blocks = self.row_block[samples] * self.parts + self.sub_epochs(samples)
        found: Numbers = blocks * self.pieces + self.piece[samples]
        return found


def blocks_of(loader: Any, rows: int, columns: int, parts: int, pieces: int = 1) -> Blocks:
    """Return the blocks of a loader's samples, about equally many in each block of rows and of columns.

    With several pieces the rows of a block, and the columns of a piece, follow each other in their tables.
    """
    row, column = (_checked(each, size) for each, size in zip(_numbers(loader), (rows, columns), strict=True))
    if pieces == 1:
        of_row, of_column = balanced(row, rows, parts), balanced(column, columns, parts)
        piece_of = np.zeros(columns, np.int64)
    else:
        of_row, (of_column, piece_of) = (
            in_ranges(row, rows, parts),
            divmod(in_ranges(column, columns, parts * pieces), pieces),
        )
    return Blocks(parts, pieces, of_row, of_column, piece_of, of_row[row], of_column[column], piece_of[column])


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
    found = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
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
