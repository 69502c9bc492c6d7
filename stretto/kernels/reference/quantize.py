"""Quantisation: signs with two magnitudes a bucket, and levels of a bucket's norm.

A bucket is a run of `bucket` numbers; the last may be shorter. Whatever the dtype of the numbers, scales are float32
and at most the largest float32, and levels are found in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import pad

from stretto.kernels.reference.index_coding import pack_bits, unpack_bits

if TYPE_CHECKING:
    from torch import Tensor

MOST = torch.finfo(torch.float32).max
TRITS = (1, 3, 9, 27, 81)


def sign_pack(x: Tensor, residual: Tensor | None, bucket: int, two: bool) -> tuple[Tensor, Tensor]:
    """Return the signs of `a = residual + x`, one bit each (1: a_i >= 0), and their values in each bucket.

    Result: (packed (ceil(n / 8),) uint8, least significant bit first; scales (buckets, 2) float32: the values of bit 0
    and of bit 1). With `two` these are the mean of the negative entries and of the others, 0 where there are none;
    otherwise -m and m, m the mean of |a|. Means: sums in float64 in the order of indices, divided, rounded to float32.
    `residual` becomes a - decoded.
    """
    a = x if residual is None else residual.add_(x)
    bucket = _used(bucket, a)
    rows = _rows(a.double(), bucket)
    bits = a >= 0
    if two:
        sides = [(rows * _rows(side, bucket), _rows(side, bucket).sum(1)) for side in (~bits, bits)]
        means = torch.stack([_sums(side) / count.clamp(min=1) for side, count in sides], 1)
    else:
        mean = _sums(rows.abs()) / _rows(torch.ones_like(bits), bucket).sum(1)
        means = torch.stack([-mean, mean], 1)
    scales = means.clamp(-MOST, MOST).float()
    if residual is not None:
        residual.sub_(_signed(bits.to(torch.uint8), scales, bucket).to(residual.dtype))
    return pack_bits(bits.to(torch.uint8)), scales


def add_sign(total: Tensor, packed: Tensor, scales: Tensor, bucket: int) -> None:
    """Add decoded signs to `total: (n,)`."""
    bits = unpack_bits(packed)[: total.numel()]
    total.add_(_signed(bits, scales, bucket).to(total.dtype))


def quantise(
    x: Tensor, residual: Tensor | None, levels: int, bucket: int, norm: Literal["max", "l2"], seed: int | None
) -> tuple[Tensor, Tensor]:
    """Round `a = residual + x` to `sign(a) * level * (norm / s)` with each bucket's norm, s = `levels` (127, 7 or 1).

    y = |a| / norm * s; level = min(floor(y + u), s) with u = 0.5 without a seed, else u_i = `noise(seed)` in [0, 1),
    which is unbiased. Result: (packed uint8, norms (buckets,) float32). A code `sign * level + s` takes a byte
    with s = 127; half a byte with s = 7, the first in the low bits; with s = 1 five are digits to base 3, the first
    the lowest. `residual` becomes a - decoded.
    """
    a = x if residual is None else residual.add_(x)
    bucket = _used(bucket, a)
    scales = _norms(_rows(a, bucket).abs().double(), norm)
    wide = scales.repeat_interleave(bucket)[: a.numel()]
    y = torch.where(wide > 0, a.abs().float() / wide * levels, 0)
    u = 0.5 if seed is None else noise(seed, a.numel(), a.device)
    codes = ((y + u).floor().clamp(max=levels).copysign(a.float()) + levels).to(torch.uint8)
    if residual is not None:
        residual.sub_(_levelled(codes, scales, levels, bucket).to(residual.dtype))
    return _pack(codes, levels), scales


def add_quantised(total: Tensor, packed: Tensor, scales: Tensor, levels: int, bucket: int) -> None:
    """Add decoded levels to `total: (n,)`."""
    codes = _unpack(packed, levels)[: total.numel()]
    total.add_(_levelled(codes, scales, levels, _used(bucket, total)).to(total.dtype))


def noise(seed: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return n float32 numbers in [0, 1): the i-th is the upper 24 bits of a hash of `seed` and i.

    z = i + seed * 0x9E3779B9; z ^= z >> 16; z *= 0x7FEB352D; z ^= z >> 15; z *= 0x846CA68B; z ^= z >> 16, modulo 2^32.
    """
    word = 0xFFFFFFFF
    z = torch.arange(n, device=device) + (seed * 0x9E3779B9 & word) & word
    z ^= z >> 16
    z = z * 0x7FEB352D & word
    z ^= z >> 15
    z = z * 0x846CA68B & word
    z ^= z >> 16
    return (z >> 8).float() * 2.0**-24


def _used(bucket: int, a: Tensor) -> int:
    """Return the length of a bucket, no longer than there are numbers."""
    return min(bucket, max(a.numel(), 1))


def _rows(a: Tensor, bucket: int) -> Tensor:
    """Return the buckets as rows, the last one filled up with zeros."""
    return pad(a, (0, -a.numel() % bucket)).view(-1, bucket)


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each row in the order of indices, as a running sum is."""
    return rows.cumsum(1)[:, -1]


def _norms(sizes: Tensor, norm: str) -> Tensor:
    if sizes.numel() == 0:
        return sizes.new_empty(0, dtype=torch.float32)
    norms = sizes.amax(1) if norm == "max" else _sums(sizes * sizes).sqrt()
    return norms.clamp(max=MOST).float()


def _signed(bits: Tensor, scales: Tensor, bucket: int) -> Tensor:
    rows = torch.arange(bits.numel(), device=bits.device) // bucket
    return scales[rows, bits.long()]


def _levelled(codes: Tensor, scales: Tensor, levels: int, bucket: int) -> Tensor:
    steps = (scales / torch.full_like(scales, levels)).repeat_interleave(bucket)[: codes.numel()]
    return (codes.float() - levels) * steps


def _pack(codes: Tensor, levels: int) -> Tensor:
    if levels == 127:
        return codes
    if levels == 7:
        pairs = _rows(codes, 2)
        return pairs[:, 0] | pairs[:, 1] << 4
    return (_rows(codes, 5) * codes.new_tensor(TRITS)).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, levels: int) -> Tensor:
    """Return the codes in packed levels; of bytes that no packing gives, arbitrary ones."""
    if levels == 127:
        return packed
    if levels == 7:
        return torch.stack([packed & 15, packed >> 4], 1).view(-1)
    return (packed[:, None] // packed.new_tensor(TRITS) % 3).view(-1)
