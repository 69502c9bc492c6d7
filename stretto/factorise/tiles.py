"""The work of each process: factors in blocks of rows and columns, and the ratings of each pair of blocks, a tile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from stretto.data.balance import balanced
from stretto.factorise.ratings import Ratings

LANES = 8
"""The width of the tables is a multiple of it; columns above the rank stay 0."""
NEAR_ROWS = 2048
"""Rows whose ratings are trained one after another, so that their factors stay in the processor's cache."""
START_STD = 0.1
CHUNK = 1 << 16
"""Ratings whose errors are computed together."""
TASK, HELD_OUT, START = "task.json", "held_out.safetensors", "start.safetensors"

Arrays = dict[str, NDArray[Any]]


class Task(msgspec.Struct, frozen=True):
    """Numbers that all processes need."""

    parts: int
    epochs: int
    evaluate_every: int
    lr: float
    l2: float
    mean: float
    least: float
    most: float
    training: int
    """Number of ratings to train."""
    held_out: int


@dataclass(frozen=True)
class Side:
    """The blocks of the rows of a matrix, or of its columns: the block of each, and its place in the block."""

    block: NDArray[np.int64]
    place: NDArray[np.int64]
    size: int
    """Number of places in each block."""

    @property
    def flat(self) -> NDArray[np.int64]:
        """Places in a table of all blocks, one after another."""
        return self.block * self.size + self.place


def side(numbers: NDArray[np.int32], size: int, parts: int) -> Side:
    """Return blocks with about equally many of the ratings that have these row numbers."""
    block = balanced(numbers, size, parts)
    counts = np.bincount(block, minlength=parts)
    order = np.argsort(block, kind="stable")
    place = np.empty(size, np.int64)
    place[order] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return Side(block, place, int(counts.max()))


class Tiles:
    """Ratings divided for a number of processes. The ratings that are held out, and all orders, follow from a seed."""

    def __init__(self, ratings: Ratings, parts: int, held_out: float, seed: int) -> None:
        self._ratings, self._parts, self._random = ratings, parts, np.random.default_rng(seed)
        order = self._random.permutation(len(ratings))
        count = min(round(len(ratings) * held_out), len(ratings) - 1)
        self.held_out, self.training = order[:count], order[count:]
        self.mean = float(ratings.values[self.training].mean(dtype=np.float64))
        self.rows = side(ratings.rows[self.training], len(ratings.row_names), parts)
        self.columns = side(ratings.columns[self.training], len(ratings.column_names), parts)

    def write(self, folder: Path, rank: int, epochs: int, evaluate_every: int, lr: float, l2: float) -> None:
        """Write the files of all processes: each reads its own tiles only."""
        values = self._ratings.values
        least, most = float(values.min()), float(values.max())
        counts = len(self.training), len(self.held_out)
        task = Task(self._parts, epochs, evaluate_every, lr, l2, self.mean, least, most, *counts)
        (folder / TASK).write_bytes(msgspec.json.encode(task))
        save_file(self._start(rank), folder / START)
        rows, columns = self.rows.flat, self.columns.flat
        save_file(self._known(self.held_out, rows, columns), folder / HELD_OUT)
        for part in range(self._parts):
            save_file(self._of_rows(part), folder / tiles_of(part))

    def _known(self, which: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Arrays:
        ratings = self._ratings
        places = rows[ratings.rows[which]].astype(np.int32), columns[ratings.columns[which]].astype(np.int32)
        return {"row": places[0], "column": places[1], "value": ratings.values[which]}

    def _of_rows(self, part: int) -> Arrays:
        """Return the tiles of a block of rows, each with the ratings of near rows together."""
        ratings, training = self._ratings, self.training
        own = training[self.rows.block[ratings.rows[training]] == part]
        column_block = self.columns.block[ratings.columns[own]]
        own = own[np.lexsort((self.rows.place[ratings.rows[own]] // NEAR_ROWS, column_block))]
        ends = np.cumsum(np.bincount(column_block, minlength=self._parts))[:-1]
        return {
            f"{name}.{column}": np.ascontiguousarray(one)
            for column, which in enumerate(np.split(own, ends))
            for name, one in self._known(which, self.rows.place, self.columns.place).items()
        }

    def _start(self, rank: int) -> Arrays:
        """Return the first factors, which are the same for each row whatever the number of processes."""
        width = -(-rank // LANES) * LANES
        found: Arrays = {}
        for name, one in (("rows", self.rows), ("columns", self.columns)):
            table = np.zeros((self._parts * one.size, width), np.float32)
            table[one.flat, :rank] = self._random.normal(0, START_STD, (len(one.flat), rank))
            found[name] = table.reshape(self._parts, one.size, width)
            found[f"{name}_bias"] = np.zeros((self._parts, one.size), np.float32)
        return found


def tiles_of(part: int) -> str:
    """Return the name of the file with the tiles of a block of rows."""
    return f"tiles-{part}.safetensors"


def factors_of(model: Path, tiles: Tiles, ratings: Ratings, rank: int) -> Arrays:
    """Return the factors of a trained model in the order of the names of rows and columns, and these names."""
    trained = load_file(model)
    arrays: Arrays = {"mean": np.array(tiles.mean, np.float32)}
    for name, one, names in (
        ("rows", tiles.rows, ratings.row_names),
        ("columns", tiles.columns, ratings.column_names),
    ):
        arrays[name] = trained[name].reshape(-1, trained[name].shape[-1])[one.flat, :rank]
        arrays[f"{name}_bias"] = trained[f"{name}_bias"].reshape(-1)[one.flat]
        arrays[f"{name}_names"] = np.array(names)
    return arrays


def write_factors(path: Path, factors: Arrays) -> None:
    """Write factors to a file for `numpy.load`."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **factors)


def layout(evaluate_every: int) -> str:
    """Return the layout of the processes, which hold all factors after this number of epochs."""
    return f'blocks("rows, rows_bias", "columns, columns_bias", whole_every={evaluate_every})'


def rmse(factors: Arrays, ratings: Ratings, which: NDArray[np.int64]) -> float:
    """Return the root of the mean squared error of some ratings; predictions are clipped to the ratings' range."""
    total = 0.0
    for part in np.array_split(which, len(which) // CHUNK + 1):
        rows, columns = ratings.rows[part], ratings.columns[part]
        found = factors["mean"] + factors["rows_bias"][rows] + factors["columns_bias"][columns]
        found += np.einsum("ij,ij->i", factors["rows"][rows], factors["columns"][columns])
        found = np.clip(found, ratings.values.min(), ratings.values.max())
        total += float(np.square(ratings.values[part] - found, dtype=np.float64).sum())
    return float(np.sqrt(total / len(which)))
