"""Low-rank approximation of gradient matrices (PowerSGD)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from stretto.codecs.base import SINGLE_WORKER, Block, Codec, CodecContext, refuse_not_finite
from stretto.codecs.by_size import Placed
from stretto.collective_ops import AllReduceMean, Answer, CollectiveCoroutine, CollectiveOp
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import Members, State

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 16
"""Numbers of a product computed at a time, so that they stay in the cache."""
NEGLIGIBLE = 1e-12
"""A column counts as spanned by the columns before it if a smaller share than this remains after subtracting them."""


@dataclass(frozen=True, repr=False)
class low_rank(Placed):
    """PowerSGD: one step of power iteration over the mean of all workers.

        M = x + e ;  P = orthonormal(mean(M Q)) ;  Q' = mean(M^T P) ;  result = P Q'^T ;  e = M - P (M^T P)^T

    M: (m, n) is a parameter of two or more dimensions as shape[0] x rest, e the residual, Q: (n, rank) the last
    round's factor. Other parameters, and matrices that would not become smaller, are sent exactly with the first one.
    If no parameters are known, the whole range is one nearly square matrix. Two all-reduces for all matrices together,
    of 4 * rank * (m + n) bytes a matrix (8 in float64), and two passes over the numbers. A matrix of at most that rank
    is exact up to rounding. All workers compute the same bits, whatever their processors and threads.
    """

    rank: Annotated[int, Range(least=1)] = 4

    papers = ("Vogels et al. 2019 (1905.13727)",)
    needs_matrices = True

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> LowRankState:
        return LowRankState(like, context, self.rank)

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        matrices, other_runs = _cut(x.numel(), context, self.rank)
        factors = sum(self.rank * (matrix.rows + matrix.columns) for matrix in matrices)
        return _working(x.dtype).itemsize * (factors + sum(len(run) for run in other_runs))

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        refuse_not_finite(x if residual is None else x.add_(residual), self)
        matrices, plain = state.views(x)
        bases = state.bases()
        agreed = yield from _mean([*((m @ q.T).T for m, q in zip(matrices, bases, strict=True)), *plain], self)
        p, plain = orthonormal(agreed[: len(matrices)]), agreed[len(matrices) :]
        turned = [basis @ m for m, basis in zip(matrices, p, strict=True)]
        q = (yield from _mean(turned, self)) if turned else []
        if residual is not None:
            state.owe(residual.copy_(x), p, turned)
        state.keep(q)
        return cast("LowRankState", state).write(x, p, q, plain)


def _mean(tensors: Sequence[Tensor], codec: Codec) -> Generator[CollectiveOp, Answer, list[Tensor]]:
    """Compute the means of tensors in one all-reduce, and check them before and after: a sum can overflow."""
    message = torch.cat([tensor.flatten() for tensor in tensors])
    refuse_not_finite(message, codec)
    agreed = cast("Tensor", (yield AllReduceMean(message)))
    refuse_not_finite(agreed, codec)
    means = torch.split(agreed, [tensor.numel() for tensor in tensors])
    return [mean.view(tensor.shape) for mean, tensor in zip(means, tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Matrix that begins at `start` of a flat range."""

    start: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """Return its numbers in a flat range, as a matrix."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class LowRankState(State):
    """State of `low_rank`: the last agreed Q of every matrix, and the places of the matrices.

    It must be equal at all workers. After a worker has joined without it, all workers start from zero bases.
    """

    transient = ("matrices", "rest")

    def __init__(self, like: Tensor, context: CodecContext, rank: int) -> None:
        self.matrices, self.rest = _cut(like.numel(), context, rank)
        self.q = [like.new_zeros((rank, matrix.columns), dtype=_working(like.dtype)) for matrix in self.matrices]
        self.seed, self.round = context.seed, 0

    def views(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the matrices of a flat range and the other numbers, in the dtype of the computation."""
        flat = flat.to(_working(flat.dtype))
        return [matrix.of(flat) for matrix in self.matrices], [flat[run.start : run.stop] for run in self.rest]

    def bases(self) -> list[Tensor]:
        """Return orthonormal Q of every matrix; zero rows, as all are at first, are replaced by random ones."""
        source = torch.Generator().manual_seed(((self.seed << 24) + self.round) % (1 << 63))
        return orthonormal([_filled(q, source) for q in self.q])

    def reset(self, members: Members) -> None:
        """Drop the bases if one of the members does not know them."""
        if members.joined:
            self.q, self.round = [torch.zeros_like(basis) for basis in self.q], 0

    def keep(self, q: list[Tensor]) -> None:
        """Keep the agreed Q for the next round."""
        self.q, self.round = [basis.clone() for basis in q], self.round + 1

    def owe(self, residual: Tensor, p: Sequence[Tensor], q: Sequence[Tensor]) -> None:
        """Subtract what this worker sent from `residual`, which holds its whole input."""
        for matrix, p_i, q_i in zip(self.matrices, p, q, strict=True):
            view = matrix.of(residual)
            view.addmm_(p_i.T, q_i, alpha=-1) if view.dtype == p_i.dtype else view.sub_(p_i.T @ q_i)
        for run in self.rest:
            residual[run.start : run.stop] = 0

    def write(self, x: Tensor, p: Sequence[Tensor], q: Sequence[Tensor], plain: Sequence[Tensor]) -> Tensor:
        """Write the agreed range over x; padding between the parameters becomes zero."""
        for matrix, p_i, q_i in zip(self.matrices, p, q, strict=True):
            _write_product(p_i, q_i, matrix.of(x))
        for run, numbers in zip(self.rest, plain, strict=True):
            x[run.start : run.stop] = numbers
        return x


def _cut(numbers: int, context: CodecContext, rank: int) -> tuple[list[Matrix], list[range]]:
    """Return the matrices of a range that become smaller, and the runs of all other numbers."""
    square = Block("", 0, numbers, _near_square(numbers))
    matrices, other_runs = [], []
    for block in context.blocks or [square]:
        shape = (block.shape[0], math.prod(block.shape[1:])) if len(block.shape) > 1 else (1, block.stop - block.start)
        end = block.start + math.prod(shape)
        if rank * sum(shape) < math.prod(shape) and end <= block.stop:
            matrices.append(Matrix(block.start, *shape))
            other_runs.append(range(end, block.stop))
        else:
            other_runs.append(range(block.start, block.stop))
    return matrices, other_runs


def _near_square(numbers: int) -> tuple[int, int]:
    """Return rows and columns of a nearly square matrix that holds nearly all numbers of a range."""
    side = math.isqrt(numbers)
    rows = min(range(side, max(side // 2, side - 64), -1), key=lambda rows: numbers % rows, default=0)
    return rows, numbers // max(rows, 1)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _filled(q: Tensor, source: torch.Generator) -> Tensor:
    """Return Q with random numbers in its zero rows: whole numbers, which are equal on every machine."""
    is_zero = (q == 0).all(dim=1, keepdim=True)
    if not is_zero.any():
        return q
    drawn = torch.randint(-(1 << 20), 1 << 20, q.shape, generator=source, device="cpu").to(q)
    return torch.where(is_zero, drawn, q)


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal rows that span the rows of each factor; a row that earlier ones span becomes zero.

    `factors`: (rank, m) with one rank. Gram-Schmidt in float64, twice, for all factors of similar size together. It
    uses only sums and products of two numbers, in an order that depends only on m and rank.
    """
    result = list(factors)
    sizes = [1 << (factor.shape[1] - 1).bit_length() for factor in factors]
    for size in sorted(set(sizes)):
        indices = [index for index, rounded in enumerate(sizes) if rounded == size]
        stack = factors[0].new_zeros((len(indices), len(factors[0]), size), dtype=torch.float64)
        for rows, index in zip(stack, indices, strict=True):
            rows[:, : factors[index].shape[1]] = factors[index]
        _gram_schmidt(stack)
        _gram_schmidt(stack)
        for rows, index in zip(stack, indices, strict=True):
            result[index] = rows[:, : factors[index].shape[1]].to(factors[index].dtype, copy=True)
    return result


def _gram_schmidt(stack: Tensor) -> None:
    """Make the rows of each of (factors, rank, 2^k) orthonormal, in place."""
    largest = stack.abs().amax(dim=2, keepdim=True)
    stack /= torch.where(largest > 0, largest, torch.ones_like(largest))
    negligible = NEGLIGIBLE**2 * _summed(stack * stack)
    for j in range(stack.shape[1]):
        row, later = stack[:, j : j + 1], stack[:, j + 1 :]
        square = _summed(row * row)
        row *= torch.where(square > negligible[:, j : j + 1], 1 / square.sqrt(), torch.zeros_like(square))
        later -= row * _summed(row * later)


def _summed(x: Tensor) -> Tensor:
    """Return the sum of each row of (..., n) as its last running sum, which fixes the order of additions."""
    return x.cumsum(dim=-1)[..., -1:]


def _write_product(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Write P^T Q to `out`, adding rows in order: a library's product may differ by processor and threads."""
    step = max(1, BLOCK // q.shape[1]) if out.device.type == "cpu" else len(out)
    for start in range(0, len(out), step):
        rows = p[:, start : start + step, None]
        block = rows[0] * q[0]
        for j in range(1, len(q)):
            block += rows[j] * q[j]
        out[start : start + step] = block
