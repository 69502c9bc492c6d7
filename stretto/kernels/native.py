"""Native kernels in C++ for contiguous float32 tensors on the CPU, at memory speed.

They agree with the reference to the bit, but that means and l2 norms are sums in another order (16 running sums), which
may differ from the reference's by one rounding to float32; what follows from them follows to the bit.

Each takes the number of threads it may use; without it torch's. More than one are used from 2^18 numbers on, and make
no difference to what comes out. Tensors that do not fit (dtype, device, layout) raise TypeError, lengths that do not
fit each other ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from stretto.kernels import _native

if TYPE_CHECKING:
    from torch import Tensor


def take_largest(x: Tensor, residual: Tensor | None, k: int, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take the `k` entries of `a = residual + x` of largest magnitude, of equal ones those with the lowest indices.

    The cut is guessed a little too low from a sample, numbers above it are collected in the pass that adds the
    residual, and the exact cut is found among these; where the guess was bad, by counting magnitudes.
    """
    return _native.take_largest(x, residual, k, _threads(threads))


def take_largest_per_chunk(
    x: Tensor, residual: Tensor | None, chunk: int, k: int, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Apply `take_largest` to every chunk of `chunk` numbers; of a last chunk shorter than `k`, take all."""
    return _native.take_largest_per_chunk(x, residual, chunk, k, _threads(threads))


def take_above(x: Tensor, residual: Tensor | None, tau: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a| >= tau, tau rounded to float32."""
    return _native.take_above(x, residual, tau, _threads(threads))


def take_moved(
    x: Tensor, residual: Tensor | None, moved: Tensor, scale: float, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a_i| > scale |moved_i|, scale and product rounded to float32."""
    return _native.take_moved(x, residual, moved, scale, _threads(threads))


def take_threshold(x: Tensor, residual: Tensor | None, tau: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Take +-tau from the entries of `a = residual + x` with |a| >= tau: (indices, negative)."""
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
    x: Tensor, residual: Tensor | None, bucket: int, two: bool, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the signs of `a = residual + x`, one bit each, and (buckets, 2) values; `residual` becomes a - decoded."""
    packed, scales = _native.sign_pack(x, residual, bucket, two, _threads(threads))
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
    """Round `a = residual + x` to levels of each bucket's norm: (packed, norms); `residual` becomes a - decoded."""
    word = 0 if seed is None else seed & 0xFFFFFFFF
    return _native.quantise(x, residual, levels, bucket, norm == "l2", seed is not None, word, _threads(threads))


def add_quantised(
    total: Tensor, packed: Tensor, scales: Tensor, levels: int, bucket: int, threads: int | None = None
) -> None:
    """Add decoded levels to `total: (n,)`."""
    _native.add_quantised(total, packed, scales, levels, bucket, _threads(threads))


def _threads(asked: int | None) -> int:
    return torch.get_num_threads() if asked is None else asked
