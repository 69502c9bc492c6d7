"""Every number in few bits, in Triton: two passes over the numbers, the residual in the first.

The first pass adds the residual and sums each bucket, up to 2048 numbers of it in a program; the second packs and takes
what was packed from the residual. Memory traffic for each number: 12 bytes and 8 with a residual, 4 and 4 without.

Sums are float64, within a program by a tree and then over the programs of a bucket. The reference sums in the order of
indices, so means and l2 norms may differ from its by one rounding to float32; and where the sums are exact, as always
for the largest magnitude, all equals the reference's to the bit.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stretto.kernels import reference
from stretto.kernels.gpu.launch import NUMBERS, Pointer, Values, kernel, launch, plain, power_of_two, programs_for, tl

MOST = torch.finfo(torch.float32).max
IN_A_BYTE = {127: 1, 7: 2, 1: 5}
"""How many codes share a byte, by the number of levels."""
SIGNS = 8


def sign_pack(x: Tensor, owed: Tensor | None, bucket: int, two: bool) -> tuple[Tensor, Tensor]:
    """The signs of `a = owed + x`, one bit each (1: a_i >= 0), and what they stand for in each bucket.

    Returns (packed (ceil(n / 8),) uint8, least significant bit first; scales (buckets, 2) float32: the values of bit 0
    and of bit 1). With `two` these are the mean of the negative entries and of the others, 0 where there are none;
    otherwise -m and m, m the mean of |a|. `owed` becomes a - decoded.
    """
    plain(x, owed)
    n, a = x.numel(), x if owed is None else owed
    bucket = min(bucket, n)
    if n == 0:
        return reference.sign_pack(x, owed, 1, two)
    buckets, pieces, programs, tile = _tiles(n, bucket)
    sums = x.new_empty((buckets, pieces, 2), dtype=torch.float64)
    negatives = x.new_empty((buckets, pieces), dtype=torch.int32)
    launch(_sum_signs, programs, x, a, sums, negatives, n, bucket, buckets, pieces, OWED=owed is not None, **tile)
    scales = _means(sums.sum(1), negatives.sum(1), n, bucket, two)
    packed = x.new_empty(-(-n // SIGNS), dtype=torch.uint8)
    shape, programs = _bytes(n, bucket, SIGNS)
    launch(_pack_signs, programs, a, packed, scales, n, bucket, OWED=owed is not None, **shape)
    return packed, scales


def add_sign(total: Tensor, packed: Tensor, scales: Tensor, bucket: int) -> None:
    """Add what packed signs stand for to `total: (n,)`."""
    plain(total)
    if n := total.numel():
        shape, programs = _bytes(n, min(bucket, n), SIGNS)
        launch(_add_signs, programs, total, packed.contiguous(), scales.contiguous(), n, min(bucket, n), **shape)


def quantise(
    x: Tensor, owed: Tensor | None, levels: int, bucket: int, norm: Literal["max", "l2"], seed: int | None
) -> tuple[Tensor, Tensor]:
    """`a = owed + x` in whole levels of each bucket's norm: `sign(a) * level * (norm / s)`, s = `levels` (127, 7 or 1).

    y = |a| / norm * s; level = min(floor(y + u), s) with u = 0.5 without a seed, else u_i in [0, 1) from a hash of
    seed and i, which makes the mean right. Returns (packed uint8, norms (buckets,) float32). A code `sign * level + s`
    takes a byte with s = 127; half a byte with s = 7, the first in the low bits; with s = 1 five are digits to base 3,
    the first the lowest. `owed` becomes a - decoded.
    """
    plain(x, owed)
    n, a = x.numel(), x if owed is None else owed
    bucket = min(bucket, n)
    if n == 0:
        return reference.quantise(x, owed, levels, 1, norm, seed)
    buckets, pieces, programs, tile = _tiles(n, bucket)
    sizes = x.new_empty((buckets, pieces), dtype=torch.float64)
    rule = {"OWED": owed is not None, "LARGEST": norm == "max", **tile}
    launch(_sizes, programs, x, a, sizes, n, bucket, buckets, pieces, **rule)
    found = sizes.amax(1) if norm == "max" else sizes.sum(1).sqrt()
    scales = found.clamp(max=MOST).float()
    packed = x.new_empty(-(-n // IN_A_BYTE[levels]), dtype=torch.uint8)
    shape, programs = _bytes(n, bucket, IN_A_BYTE[levels])
    start = 0 if seed is None else seed * 0x9E3779B9 & 0xFFFFFFFF
    rounding = {"OWED": owed is not None, "DRAWN": seed is not None, "LEVELS": levels}
    launch(_pack_levels, programs, a, packed, scales, _steps(scales, levels), n, bucket, start, **rounding, **shape)
    return packed, scales


def add_quantised(total: Tensor, packed: Tensor, scales: Tensor, levels: int, bucket: int) -> None:
    """Add what packed levels stand for to `total: (n,)`."""
    plain(total)
    if n := total.numel():
        shape, programs = _bytes(n, min(bucket, n), IN_A_BYTE[levels])
        steps = _steps(scales.contiguous(), levels)
        launch(_add_levels, programs, total, packed.contiguous(), steps, n, min(bucket, n), LEVELS=levels, **shape)


def _steps(scales: Tensor, levels: int) -> Tensor:
    """What a level is worth. By a tensor: on a GPU torch multiplies by the reciprocal of a number, rounded twice."""
    return scales / torch.full_like(scales, levels)


def _tiles(n: int, bucket: int) -> tuple[int, int, int, dict[str, int]]:
    """(buckets, pieces of each, programs, tile): a program works on several short buckets, or a piece of a long one."""
    buckets, pieces = programs_for(n, bucket), programs_for(bucket)
    columns = min(power_of_two(bucket), NUMBERS)
    rows = NUMBERS // columns
    return buckets, pieces, programs_for(buckets, rows) * pieces, {"ROWS": rows, "COLUMNS": columns}


def _bytes(n: int, bucket: int, each: int) -> tuple[dict[str, int], int]:
    """How many bytes a program packs, `each` numbers in each; whether these are in one bucket; and how many programs.

    Then the program divides once and reads one scale, so shorter programs are worth it, down to 256 numbers.
    """
    lanes = power_of_two(each)
    most = NUMBERS // lanes
    whole = most if bucket == n else math.gcd(bucket // each, most) if bucket % each == 0 else 0
    inside = whole * lanes >= 256
    packs = whole if inside else most
    shape = {"EACH": each, "LANES": lanes, "BYTES": packs, "INSIDE": inside, "numbers": packs * lanes}
    return shape, programs_for(n, packs * each)


def _means(sums: Tensor, negatives: Tensor, n: int, bucket: int, two: bool) -> Tensor:
    """From the sums (buckets, 2) of the negative entries and of the others to what their signs stand for."""
    length = torch.full_like(negatives, bucket)
    length[-1] = n - bucket * (negatives.numel() - 1)
    if two:
        means = sums / torch.stack([negatives, length - negatives], 1).clamp(min=1)
    else:
        mean = (sums[:, 1] - sums[:, 0]) / length
        means = torch.stack([-mean, mean], 1)
    return means.clamp(-MOST, MOST).float()


# --- the first pass: a = owed + x, and what is needed of each bucket --------------------------------------------------


@kernel
def _rows(pieces: int, ROWS: tl.constexpr) -> Values:
    """The buckets (as int64) that a program works on, and which piece of each."""
    row = (tl.program_id(0) // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(0) % pieces


@kernel
def _tile(
    x: Pointer,
    owed: Pointer,
    n: int,
    bucket: int,
    row: Values,
    piece: Values,
    OWED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Values:
    """a = owed + x, zeros where there is nothing; `owed` becomes a."""
    column = piece.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * bucket + column[None, :]
    valid = (column[None, :] < bucket) & (at < n)
    a = tl.load(x + at, mask=valid, other=0.0)
    if OWED:
        a = tl.load(owed + at, mask=valid, other=0.0) + a
        tl.store(owed + at, a, mask=valid)
    return a


@kernel
def _sum_signs(
    x: Pointer,
    owed: Pointer,
    sums: Pointer,
    negatives: Pointer,
    n: int,
    bucket: int,
    buckets: int,
    pieces: int,
    OWED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, piece = _rows(pieces, ROWS)
    a = _tile(x, owed, n, bucket, row, piece, OWED, COLUMNS)
    wide = a.to(tl.float64)
    others = a >= 0
    place, there = row * pieces + piece, row < buckets
    tl.store(sums + 2 * place, tl.sum(tl.where(others, 0.0, wide), axis=1), mask=there)
    tl.store(sums + 2 * place + 1, tl.sum(tl.where(others, wide, 0.0), axis=1), mask=there)
    count = tl.sum(tl.where(others, 0, 1), axis=1)
    tl.store(negatives + place, count, mask=there)


@kernel
def _sizes(
    x: Pointer,
    owed: Pointer,
    sizes: Pointer,
    n: int,
    bucket: int,
    buckets: int,
    pieces: int,
    OWED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, piece = _rows(pieces, ROWS)
    a = _tile(x, owed, n, bucket, row, piece, OWED, COLUMNS)
    if LARGEST:
        size = tl.max(tl.abs(a), axis=1).to(tl.float64)
    else:
        wide = a.to(tl.float64)
        size = tl.sum(wide * wide, axis=1)
    tl.store(sizes + row * pieces + piece, size, mask=row < buckets)


# --- the second pass: codes into bytes, and back ----------------------------------------------------------------------


@kernel
def _places(n: int, BYTES: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr) -> Values:
    """(the bytes of a program, the number in each lane of each byte, which of these there are)."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    lane = tl.arange(0, LANES)[None, :]
    at = byte[:, None] * EACH + lane
    return byte, at, (lane < EACH) & (at < n)


@kernel
def _bucket_of(at: Values, valid: Values, bucket: int, INSIDE: tl.constexpr, SPAN: tl.constexpr) -> Values:
    """In which bucket each number is: one for all of a program where they are INSIDE one."""
    first = tl.program_id(0).to(tl.int64) * SPAN
    return first // bucket if INSIDE else tl.where(valid, at, 0).to(tl.int32) // bucket


@kernel
def _weights(LANES: tl.constexpr, EACH: tl.constexpr) -> Values:
    """What a code in each lane of a byte counts: powers of 3 for five in a byte, otherwise of 2^(8 / EACH)."""
    lane = tl.arange(0, LANES)
    if EACH == 5:
        low = tl.where(lane == 0, 1, tl.where(lane == 1, 3, 9))
        weights = tl.where(lane < 3, low, tl.where(lane == 3, 27, 81))
    else:
        weights = 1 << (lane * (8 // EACH))
    return weights[None, :]


@kernel
def _packed(codes: Values, valid: Values, LANES: tl.constexpr, EACH: tl.constexpr) -> Values:
    return tl.sum(tl.where(valid, codes, 0) * _weights(LANES, EACH), axis=1).to(tl.uint8)


@kernel
def _unpacked(packed: Pointer, byte: Values, n: int, LANES: tl.constexpr, EACH: tl.constexpr) -> Values:
    """The codes in a program's bytes, (bytes, lanes) int32."""
    whole = tl.load(packed + byte, mask=byte * EACH < n, other=0).to(tl.int32)[:, None]
    if EACH == 5:
        codes = whole // _weights(LANES, EACH) % 3
    else:
        lane = tl.arange(0, LANES)[None, :]
        codes = (whole >> (lane * (8 // EACH))) & ((1 << (8 // EACH)) - 1)
    return codes


@kernel
def _means_of(scales: Pointer, bucket: Values, others: Values) -> Values:
    """What each sign stands for."""
    return tl.where(others, tl.load(scales + 2 * bucket + 1), tl.load(scales + 2 * bucket))


@kernel
def _noise(at: Values, start: int) -> Values:
    """The reference's `noise`."""
    z = (at + start).to(tl.uint32)
    z = z ^ (z >> 16)
    z = z * 0x7FEB352D
    z = z ^ (z >> 15)
    z = z * 0x846CA68B
    z = z ^ (z >> 16)
    return (z >> 8).to(tl.float32) * 5.9604644775390625e-08


@kernel
def _pack_signs(
    a_first: Pointer,
    packed: Pointer,
    scales: Pointer,
    n: int,
    bucket: int,
    OWED: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
    INSIDE: tl.constexpr,
) -> None:
    byte, at, valid = _places(n, BYTES, LANES, EACH)
    a = tl.load(a_first + at, mask=valid, other=0.0)
    others = a >= 0
    tl.store(packed + byte, _packed(others.to(tl.int32), valid, LANES, EACH), mask=byte * EACH < n)
    if OWED:
        means = _means_of(scales, _bucket_of(at, valid, bucket, INSIDE, BYTES * EACH), others)
        tl.store(a_first + at, a - means, mask=valid)


@kernel
def _add_signs(
    total: Pointer,
    packed: Pointer,
    scales: Pointer,
    n: int,
    bucket: int,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
    INSIDE: tl.constexpr,
) -> None:
    byte, at, valid = _places(n, BYTES, LANES, EACH)
    others = _unpacked(packed, byte, n, LANES, EACH) == 1
    means = _means_of(scales, _bucket_of(at, valid, bucket, INSIDE, BYTES * EACH), others)
    tl.store(total + at, tl.load(total + at, mask=valid, other=0.0) + means, mask=valid)


@kernel
def _pack_levels(
    a_first: Pointer,
    packed: Pointer,
    scales: Pointer,
    steps: Pointer,
    n: int,
    bucket: int,
    start: int,
    OWED: tl.constexpr,
    DRAWN: tl.constexpr,
    LEVELS: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
    INSIDE: tl.constexpr,
) -> None:
    byte, at, valid = _places(n, BYTES, LANES, EACH)
    a = tl.load(a_first + at, mask=valid, other=0.0)
    inside = _bucket_of(at, valid, bucket, INSIDE, BYTES * EACH)
    scale = tl.load(scales + inside)
    size = tl.abs(a)
    scale = tl.where(scale > 0, scale, 1.0) + tl.zeros_like(size)
    y = tl.div_rn(size, scale) * LEVELS
    y = y + _noise(at, start) if DRAWN else y + 0.5
    level = tl.minimum(tl.floor(y), LEVELS)
    signed = tl.where(a < 0, -level, level)
    tl.store(packed + byte, _packed(signed.to(tl.int32) + LEVELS, valid, LANES, EACH), mask=byte * EACH < n)
    if OWED:
        tl.store(a_first + at, a - signed * tl.load(steps + inside), mask=valid)


@kernel
def _add_levels(
    total: Pointer,
    packed: Pointer,
    steps: Pointer,
    n: int,
    bucket: int,
    LEVELS: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
    INSIDE: tl.constexpr,
) -> None:
    byte, at, valid = _places(n, BYTES, LANES, EACH)
    levels = (_unpacked(packed, byte, n, LANES, EACH) - LEVELS).to(tl.float32)
    step = tl.load(steps + _bucket_of(at, valid, bucket, INSIDE, BYTES * EACH))
    tl.store(total + at, tl.load(total + at, mask=valid, other=0.0) + levels * step, mask=valid)
