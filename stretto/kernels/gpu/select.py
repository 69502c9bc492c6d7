"""Which numbers are sent, in Triton: two passes over the numbers, the residual in the first.

The first pass adds the residual and counts what each program selects; a running sum of the counts says where each
writes; the second pass selects again and writes, in ascending order. What is selected equals the reference's to the
bit. Memory traffic for each number: 12 bytes and 4 with a residual, 4 and 4 without; 4 more a pass for `take_moved`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels import reference
from stretto.kernels.gpu.launch import NUMBERS, Pointer, Values, kernel, launch, plain, power_of_two, programs_for, tl

LONGEST_CHUNK = 1 << 13
"""The longest chunk that one program holds in its registers."""


def take_above(x: Tensor, owed: Tensor | None, tau: float) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = owed + x` with |a| >= tau, tau rounded to float32.

    Returns (indices (k,) int32 ascending, values (k,)). `owed` becomes a, with zeros where an entry was taken;
    without it a = x, which is left as it is. Waits for the device once, to know k.
    """
    return _take(x, owed, None, tau, signs=False)


def take_moved(x: Tensor, owed: Tensor | None, moved: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = owed + x` with |a_i| > scale |moved_i|, scale and product rounded to float32."""
    return _take(x, owed, moved, scale, signs=False)


def take_threshold(x: Tensor, owed: Tensor | None, tau: float) -> tuple[Tensor, Tensor]:
    """Take +-tau from the entries of `a = owed + x` with |a| >= tau.

    Returns (indices int32 ascending, negative uint8: 1 where -tau was taken). `owed` becomes `a -+ tau` there.
    """
    return _take(x, owed, None, tau, signs=True)


def take_largest(x: Tensor, owed: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Take the `k` entries of `a = owed + x` that are largest in magnitude; among equals those at the lowest indices.

    The k-th magnitude is torch's; what is above it, and of what equals it the first, is then written in two passes.
    The host does not wait for the device.
    """
    plain(x, owed)
    a, n = x if owed is None else owed.add_(x), x.numel()
    k = min(k, n)
    indices, values = x.new_zeros(k, dtype=torch.int32), x.new_zeros(k)
    if k == 0:
        return indices, values
    least = a.abs().topk(k, sorted=False).values.amin().view(1)
    programs = programs_for(n)
    above, equal = x.new_empty((2, programs), dtype=torch.int32)
    launch(_count_largest, programs, a, least, above, equal, n, NUMBERS=NUMBERS)
    still = k - above.sum(dtype=torch.int32).view(1)
    before = [_before(counts) for counts in (above, equal)]
    keeps = {"OWED": owed is not None, "NUMBERS": NUMBERS}
    launch(_write_largest, programs, a, least, *before, still, indices, values, n, k, **keeps)
    return indices, values


def take_largest_per_chunk(x: Tensor, owed: Tensor | None, chunk: int, k: int) -> tuple[Tensor, Tensor]:
    """`take_largest` in every chunk of `chunk` numbers; of a last chunk that is shorter than `k`, all.

    One pass: the k-th magnitude of a chunk is found bit by bit, from the highest, while the chunk is in registers.
    Chunks longer than 8192 go through the reference.
    """
    plain(x, owed)
    n = x.numel()
    chunk = min(chunk, max(n, 1))
    k = min(k, chunk)
    if chunk > LONGEST_CHUNK or n == 0:
        return reference.take_largest_per_chunk(x, owed, chunk, k)
    taken = n // chunk * k + min(k, n % chunk)
    indices, values = x.new_zeros(taken, dtype=torch.int32), x.new_zeros(taken)
    columns = power_of_two(chunk)
    rows = max(NUMBERS // columns, 1)
    tile = {"OWED": owed is not None, "ROWS": rows, "COLUMNS": columns}
    programs = programs_for(programs_for(n, chunk), rows)
    launch(_take_per_chunk, programs, x, x if owed is None else owed, indices, values, n, chunk, k, **tile)
    return indices, values


def _take(x: Tensor, owed: Tensor | None, moved: Tensor | None, size: float, signs: bool) -> tuple[Tensor, Tensor]:
    plain(x, owed, moved)
    a, n, programs = x if owed is None else owed, x.numel(), programs_for(x.numel())
    rule = {"OWED": owed is not None, "MOVED": moved is not None, "NUMBERS": NUMBERS}
    counts = x.new_zeros(programs, dtype=torch.int32)
    if programs:
        launch(_count, programs, x, a, a if moved is None else moved, counts, n, size, **rule)
    taken = int(counts.sum())
    indices = x.new_empty(taken, dtype=torch.int32)
    said = x.new_empty(taken, dtype=torch.uint8 if signs else x.dtype)
    if taken:
        places = (a, a if moved is None else moved, counts, _before(counts), indices, said)
        launch(_write, programs, *places, n, size, SIGNS=signs, **rule)
    return indices, said


def _before(counts: Tensor) -> Tensor:
    """For each program, how many the programs before it have selected."""
    return counts.cumsum(0, dtype=torch.int32) - counts


@kernel
def _at(NUMBERS: tl.constexpr) -> Values:
    return tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)


@kernel
def _with_owed(x: Pointer, owed: Pointer, at: Values, valid: Values, OWED: tl.constexpr) -> Values:
    """a = owed + x, written to `owed`; without it x."""
    a = tl.load(x + at, mask=valid, other=0.0)
    if OWED:
        a = tl.load(owed + at, mask=valid, other=0.0) + a
        tl.store(owed + at, a, mask=valid)
    return a


@kernel
def _chosen(a: Values, moved: Pointer, at: Values, valid: Values, size: float, MOVED: tl.constexpr) -> Values:
    size = tl.full([], size, tl.float32)
    if MOVED:
        least = tl.abs(tl.load(moved + at, mask=valid, other=0.0)) * size
        chosen = tl.abs(a) > least
    else:
        chosen = tl.abs(a) >= size
    return chosen & valid


@kernel
def _count(
    x: Pointer,
    owed: Pointer,
    moved: Pointer,
    counts: Pointer,
    n: int,
    size: float,
    OWED: tl.constexpr,
    MOVED: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> None:
    at = _at(NUMBERS)
    valid = at < n
    a = _with_owed(x, owed, at, valid, OWED)
    chosen = _chosen(a, moved, at, valid, size, MOVED)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int32), axis=0))


@kernel
def _write(
    a_first: Pointer,
    moved: Pointer,
    counts: Pointer,
    before: Pointer,
    indices: Pointer,
    said: Pointer,
    n: int,
    size: float,
    OWED: tl.constexpr,
    MOVED: tl.constexpr,
    NUMBERS: tl.constexpr,
    SIGNS: tl.constexpr,
) -> None:
    if tl.load(counts + tl.program_id(0)) > 0:
        at = _at(NUMBERS)
        valid = at < n
        a = tl.load(a_first + at, mask=valid, other=0.0)
        chosen = _chosen(a, moved, at, valid, size, MOVED)
        place = tl.load(before + tl.program_id(0)) + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(indices + place, at.to(tl.int32), mask=chosen)
        if SIGNS:
            tl.store(said + place, (a < 0).to(tl.uint8), mask=chosen)
            tau = tl.full([], size, tl.float32)
            left = a - tl.where(a < 0, -tau, tau)
        else:
            tl.store(said + place, a, mask=chosen)
            left = tl.zeros_like(a)
        if OWED:
            tl.store(a_first + at, left, mask=chosen)


@kernel
def _count_largest(
    a_first: Pointer, least: Pointer, above: Pointer, equal: Pointer, n: int, NUMBERS: tl.constexpr
) -> None:
    at = _at(NUMBERS)
    size = tl.abs(tl.load(a_first + at, mask=at < n, other=0.0))
    kth = tl.load(least)
    tl.store(above + tl.program_id(0), tl.sum(((size > kth) & (at < n)).to(tl.int32), axis=0))
    tl.store(equal + tl.program_id(0), tl.sum(((size == kth) & (at < n)).to(tl.int32), axis=0))


@kernel
def _write_largest(
    a_first: Pointer,
    least: Pointer,
    above_before: Pointer,
    equal_before: Pointer,
    still: Pointer,
    indices: Pointer,
    values: Pointer,
    n: int,
    k: int,
    OWED: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> None:
    at = _at(NUMBERS)
    valid = at < n
    a = tl.load(a_first + at, mask=valid, other=0.0)
    kth, wanted = tl.load(least), tl.load(still)
    first_above, first_equal = tl.load(above_before + tl.program_id(0)), tl.load(equal_before + tl.program_id(0))
    equal = (tl.abs(a) == kth) & valid
    among_equals = first_equal + tl.cumsum(equal.to(tl.int32), axis=0)
    chosen = ((tl.abs(a) > kth) & valid) | (equal & (among_equals <= wanted))
    place = first_above + tl.minimum(first_equal, wanted) + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    chosen = chosen & (place < k)
    tl.store(indices + place, at.to(tl.int32), mask=chosen)
    tl.store(values + place, a, mask=chosen)
    if OWED:
        tl.store(a_first + at, tl.zeros_like(a), mask=chosen)


@kernel
def _take_per_chunk(
    x: Pointer,
    owed: Pointer,
    indices: Pointer,
    values: Pointer,
    n: int,
    chunk: int,
    k: int,
    OWED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * ROWS * chunk
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = row * chunk + column
    valid = (column < chunk) & (at < n - first)
    a = _with_owed(x + first, owed + first, at, valid, OWED)
    bits = tl.where(valid, tl.abs(a).to(tl.int32, bitcast=True), -1)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32), axis=1), k)
    least = tl.zeros([ROWS], tl.int32)
    for turn in range(31):
        higher = least | (1 << (30 - turn))
        enough = tl.sum((bits >= higher[:, None]).to(tl.int32), axis=1) >= wanted
        least = tl.where(enough, higher, least)
    above, equal = bits > least[:, None], bits == least[:, None]
    still = wanted - tl.sum(above.to(tl.int32), axis=1)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= still[:, None]))
    place = (tl.program_id(0) * ROWS + row) * k + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(indices + place, first.to(tl.int32) + at, mask=chosen)
    tl.store(values + place, a, mask=chosen)
    if OWED:
        tl.store(owed + first + at, tl.zeros_like(a), mask=chosen)
