"""Native kernels in C++ for contiguous float32 tensors on the CPU, at memory speed.

Results equal those of `stretto.kernels.reference` bit for bit, except means and l2 norms: they are summed in another
order (16 partial sums) and may differ by one rounding to float32. Values computed from equal means and norms are equal.

Functions with `threads` use at most that many (default: torch's), and more than one only from 2^18 numbers on; results
do not depend on it. Functions with a `residual` write the part that is not sent into it. Tensors of another dtype,
device or layout raise TypeError, lengths that do not match raise ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from stretto.kernels import _native

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.kernels.reference.factorise import Factors, Known


def take_largest(x: Tensor, residual: Tensor | None, k: int, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take the `k` entries of `a = residual + x` of largest magnitude, of equal ones those with the lowest indices.

    Return (indices int32 ascending, values); `residual` becomes a, with 0 where an entry was taken. The cut is guessed
    a little too low from a sample, numbers above it are collected in the pass that adds the residual, and the exact cut
    is found among these; where the guess was bad, by counting magnitudes.
    """
    return _native.take_largest(x, residual, k, _threads(threads))


def take_largest_per_chunk(
    x: Tensor, residual: Tensor | None, chunk: int, k: int, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Apply `take_largest` to every chunk of `chunk` numbers; of a last chunk shorter than `k`, take all."""
    return _native.take_largest_per_chunk(x, residual, chunk, k, _threads(threads))


def take_above(x: Tensor, residual: Tensor | None, tau: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a| >= tau, tau rounded to float32; return as `take_largest` does."""
    return _native.take_above(x, residual, tau, _threads(threads))


def take_larger_than_change(
    x: Tensor, residual: Tensor | None, change: Tensor, scale: float, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a_i| > scale |change_i|, scale and product rounded to float32.

    Return as `take_largest` does.
    """
    return _native.take_moved(x, residual, change, scale, _threads(threads))


def take_threshold(x: Tensor, residual: Tensor | None, tau: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take +-tau from the entries of `a = residual + x` with |a| >= tau.

    Return (indices int32 ascending, negative uint8: 1 for -tau); `residual` becomes a -+ tau at these.
    """
    return _native.take_threshold(x, residual, tau, _threads(threads))


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Return the message (uint8) for `indices`: int32, ascending, distinct, all below `n`."""
    return _native.pack_indices(indices, n)


def unpack_indices(message: Tensor, n: int) -> tuple[Tensor, int]:
    """Return (indices (count,) int32 ascending, bytes used of `message`). Raise ValueError for an invalid message."""
    return _native.unpack_indices(message, n)


def add_at(total: Tensor, indices: Tensor, values: Tensor) -> None:
    """Compute `total[indices] += values`; indices must be distinct."""
    _native.add_at(total, indices, values)


def sign_pack(
    x: Tensor, residual: Tensor | None, bucket: int, two_means: bool, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the signs of `a = residual + x`, one bit each, and (buckets, 2) values; `residual` becomes a - decoded."""
    packed, scales = _native.sign_pack(x, residual, bucket, two_means, _threads(threads))
    return packed, scales.view(-1, 2)


def add_sign(total: Tensor, packed: Tensor, scales: Tensor, bucket: int, threads: int | None = None) -> None:
    """Add decoded signs to `total: (n,)`."""
    _native.add_sign(total, packed, scales.reshape(-1), bucket, _threads(threads))


def quantise(
    x: Tensor,
    residual: Tensor | None,
    levels: int,
    bucket: int,
    norm: Literal["max", "l2"],
    seed: int | None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Round `a = residual + x` to levels of each bucket's norm: (packed, scales); `residual` becomes a - decoded."""
    seed_32 = 0 if seed is None else seed & 0xFFFFFFFF
    return _native.quantise(x, residual, levels, bucket, norm == "l2", seed is not None, seed_32, _threads(threads))


def add_quantised(
    total: Tensor, packed: Tensor, scales: Tensor, levels: int, bucket: int, threads: int | None = None
) -> None:
    """Add decoded levels to `total: (n,)`."""
    _native.add_quantised(total, packed, scales, levels, bucket, _threads(threads))


def factor_steps(factors: Factors, known: Known, mean: float, lr: float, l2: float) -> None:
    """Step the factors of a matrix by stochastic gradient descent over its known values, one after another.

    A value's error is that of mean + bias of the row + bias of the column + dot product, clipped nowhere; `l2` is the
    weight of the squares.
    """
    _native.factor_steps(*_flat(factors), *known, mean, lr, l2)


def factor_errors(factors: Factors, known: Known, mean: float, least: float, most: float) -> float:
    """Return the sum of the squared errors of known values; predictions are clipped to `least` and `most`."""
    return _native.factor_errors(*_flat(factors), *known, mean, least, most)


def _flat(factors: Factors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, row_bias, columns, column_bias = factors
    return rows.view(-1), row_bias, columns.view(-1), column_bias


def _threads(limit: int | None) -> int:
    """Return the number of threads to use: as given, else torch's."""
    return torch.get_num_threads() if limit is None else limit
