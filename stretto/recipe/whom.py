"""Answers to *whom*: with which processes does a worker exchange?

A topology gives the mixing matrix W of each round: entry W_ij is the weight that worker i gives to the parameters of
worker j. It is doubly stochastic, so that the mean over all workers does not change when each worker mixes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from stretto.errors import RecipeError, explain
from stretto.spec import Answer, Range

TOLERANCE = 1e-9
"""Largest difference of the sum of a row or a column of a mixing matrix from 1."""


class Whom(Answer):
    """Base of the answers to *whom*."""

    axis = "whom"
    example: ClassVar[str] = "everyone()"
    shards: int = 0
    """Number of shards of a parameter server; 0 without one."""

    def weights(self, number: int, rank: int, workers: int) -> Mapping[int, float]:
        """Return a worker's row of the mixing matrix of a round: its peers' weights and its own, by rank.

        `number` is that of the round, counted from 1. All workers compute the same matrix.
        """
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class everyone(Whom):
    """All workers, without a server: an all-reduce.

    Cost: 2(N-1)/N times the bytes exchanged, per worker, on a ring; with `mix()`, N-1 times.
    """

    def weights(self, number: int, rank: int, workers: int) -> Mapping[int, float]:
        return dict.fromkeys(range(workers), 1 / workers)


@dataclass(frozen=True, repr=False)
class server(Whom):
    """A parameter server of `shards` processes, each of which holds a range of the parameters.

    Cost: twice the bytes exchanged per worker, and N times them, divided by the shards, per shard.
    """

    shards: Annotated[int, Range(least=1, most=256)] = 1

    papers = ("Li et al. 2014 (parameter server)",)


@dataclass(frozen=True, repr=False)
class neighbours(Whom):
    """The neighbours in a graph of all workers, each with the same weight as the worker itself.

    graph: "ring", "torus" of two dimensions (a ring for a prime number of workers), or "exponential", in whose round k
    worker i receives from worker i + 2^(k mod log2 N): after log2 N rounds all of N = 2^n workers have the mean. A
    round brings the workers closer to their mean by the second largest absolute eigenvalue of W: 1 minus about 1/N^2
    for the ring, 1/N for the torus. Cost: the bytes exchanged times 2, 4 and 1 neighbours.
    """

    graph: Literal["ring", "torus", "exponential"] = "ring"

    def sources(self) -> tuple[str, ...]:
        """Return the paper of the exponential graph if it is used."""
        return ("Ying et al. 2021 (2110.13363)",) if self.graph == "exponential" else ()

    def weights(self, number: int, rank: int, workers: int) -> Mapping[int, float]:
        ranks = {neighbour % workers for neighbour in self._neighbours(number, rank, workers)} | {rank}
        return dict.fromkeys(sorted(ranks), 1 / len(ranks))

    def _neighbours(self, number: int, rank: int, workers: int) -> Sequence[int]:
        """Return the neighbours, modulo the number of workers."""
        if self.graph == "exponential":
            return (rank + 2 ** ((number - 1) % max((workers - 1).bit_length(), 1)),)
        if self.graph == "ring":
            return rank - 1, rank + 1
        width = next(width for width in range(math.isqrt(workers), 0, -1) if workers % width == 0)
        row, column = divmod(rank, width)
        return rank - width, rank + width, *(row * width + (column + step) % width for step in (-1, 1))


@functools.lru_cache(maxsize=64)
def mixing_matrix(whom: Whom, number: int, workers: int) -> list[Mapping[int, float]]:
    """Return the rows of the mixing matrix of a round. Raise RecipeError if it is not doubly stochastic."""
    rows = [whom.weights(number, rank, workers) for rank in range(workers)]
    columns = [0.0] * workers
    for rank, row in enumerate(rows):
        strangers = [peer for peer in row if not 0 <= peer < workers]
        if strangers or min(row.values(), default=0.0) < 0 or abs(sum(row.values()) - 1) > TOLERANCE:
            raise RecipeError(_no_mixing(whom, f"worker {rank} of {workers} gives in round {number}", row))
        for peer, weight in row.items():
            columns[peer] += weight
    for peer, received in enumerate(columns):
        if abs(received - 1) > TOLERANCE:
            weights = {rank: row[peer] for rank, row in enumerate(rows) if peer in row}
            raise RecipeError(_no_mixing(whom, f"worker {peer} of {workers} is given in round {number}", weights))
    return rows


def _no_mixing(whom: Whom, what: str, weights: Mapping[int, float]) -> str:
    return explain(
        f"the weights of {whom} would change the mean of all workers' parameters",
        got=f"{what} the weights {dict(weights)}, of sum {sum(weights.values()):g}",
        expected="weights of at least 0 for existing ranks, which sum to 1 in each row and in each column",
        to_type="dict.fromkeys(ranks, 1 / len(ranks)) in a graph in which all have equally many neighbours",
    )


def check_topology(whom: Whom, most: int = 12) -> None:
    """Test a topology for 1 to `most` workers, in 2 `most` rounds: raise RecipeError if the mean would change.

    >>> check_topology(neighbours("torus"))
    """
    for workers in range(1, most + 1):
        for number in range(1, 2 * most + 1):
            mixing_matrix(whom, number, workers)
