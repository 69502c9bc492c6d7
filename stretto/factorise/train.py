"""One process of a factorisation: a plain loop over tiles, in a layout of blocks if there are several processes.

A sample of the loader is a tile: the number of its row block, and that of its column block.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stretto import api, identity, kernels
from stretto.errors import NotFiniteError
from stretto.factorise.tiles import HELD_OUT, START, TASK, Task, tiles_of
from stretto.runtime.runtime import Runtime


class Factors(nn.Module):
    """The tables of all blocks."""

    def __init__(self, tables: dict[str, Tensor]) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_parameter(name, nn.Parameter(table))

    def of_tile(self, row_block: int, column_block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the factors and biases of a tile's rows and columns, whose memory is that of the tables."""
        rows, columns = (getattr(self, name).detach() for name in ("rows", "columns"))
        row_bias, column_bias = (getattr(self, name).detach() for name in ("rows_bias", "columns_bias"))
        return rows[row_block], row_bias[row_block], columns[column_block], column_bias[column_block]

    def of_all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all factors and biases."""
        rows, columns = (getattr(self, name).detach().flatten(0, 1) for name in ("rows", "columns"))
        return rows, self.rows_bias.detach().flatten(), columns, self.columns_bias.detach().flatten()  # type: ignore[operator]


class OwnTiles:
    """Ratings of the tiles that this process trains, read when a tile is first trained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __getitem__(self, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        if tile not in self._read:
            row_block, column_block = tile
            with safe_open(self._folder / tiles_of(row_block), framework="pt") as file:
                row, column, value = (file.get_tensor(f"{name}.{column_block}") for name in ("row", "column", "value"))
            self._read[tile] = row, column, value
        return self._read[tile]


class Errors:
    """The error of the ratings that are held out."""

    def __init__(self, folder: Path, task: Task) -> None:
        held_out, self._task = load_file(folder / HELD_OUT), task
        self._known = held_out["row"], held_out["column"], held_out["value"]

    def text(self, model: Factors) -> str:
        """Return the error of a whole model, in words."""
        task, known = self._task, self._known
        if not task.held_out:
            return ""
        total = kernels.on(known[2]).factor_errors(model.of_all(), known, task.mean, task.least, task.most)
        return f"rmse {math.sqrt(total / task.held_out):.4f}, "


def train(folder: Path) -> None:
    """Train the factors that a folder describes."""
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=Task)
    model, tiles, errors = Factors(load_file(folder / START)), OwnTiles(folder), Errors(folder, task)
    optimizer = torch.optim.SGD(model.parameters(), task.lr)
    blocks = torch.cartesian_prod(
        torch.arange(task.parts, device="cpu"), torch.arange(task.parts, device="cpu")
    ).reshape(-1, 2)
    loader = api.distribute(model, optimizer, DataLoader(TensorDataset(blocks[:, 0], blocks[:, 1]), batch_size=1))
    clock = Runtime().clock
    for epoch in range(1, task.epochs + 1):
        began = clock()
        for row_block, column_block in loader:
            tile = int(row_block), int(column_block)
            _train_tile(model.of_tile(*tile), tiles[tile], task, epoch)
            optimizer.step()  # counts the step: the kernel has done it
        rate = task.training / (clock() - began) / 1e6
        if epoch == task.epochs:
            api.finish()
        is_whole = epoch % task.evaluate_every == 0 or epoch == task.epochs
        error = errors.text(model) if is_whole else ""
        identity.print(f"epoch {epoch} of {task.epochs}: {error}{rate:.1f} M ratings/s", flush=True)


def _train_tile(
    factors: tuple[Tensor, Tensor, Tensor, Tensor], known: tuple[Tensor, Tensor, Tensor], task: Task, epoch: int
) -> None:
    """Train the ratings of a tile. Raise NotFiniteError if its factors diverge; their biases do so with them."""
    kernels.on(known[2]).factor_steps(factors, known, task.mean, task.lr, task.l2)
    if not (factors[1].isfinite().all() and factors[3].isfinite().all()):
        raise NotFiniteError(f"the factors became NaN or infinite in epoch {epoch}; a smaller --lr may help")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
