"""Selection of numbers of a flat tensor by five rules, with the residual updated in the same pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def take_largest(x: Tensor, residual: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Take the `k` entries of `a = residual + x` of largest magnitude, of equal ones those with the lowest indices.

    Returns (indices (k,) int32 ascending, values (k,)). `residual` becomes a, with zeros where an entry was taken;
    without it a = x, which is not modified.
    """
    a = _with_residual(x, residual)
    return _taken(a, residual, _largest(a.abs()[None], k)[0])


def take_largest_per_chunk(x: Tensor, residual: Tensor | None, chunk: int, k: int) -> tuple[Tensor, Tensor]:
    """Take the largest entries of every chunk of `chunk` numbers, all of a last one shorter than `k`."""
    a = _with_residual(x, residual)
    full = a.numel() - a.numel() % chunk
    pieces = [a[:full].view(-1, chunk), a[full:].view(1, -1)]
    return _taken(a, residual, torch.cat([_largest(piece.abs(), k).view(-1) for piece in pieces]))


def take_above(x: Tensor, residual: Tensor | None, tau: float) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a| >= tau, tau rounded to the dtype of a."""
    a = _with_residual(x, residual)
    return _taken(a, residual, a.abs() >= a.new_tensor(tau))


def take_larger_than_change(x: Tensor, residual: Tensor | None, moved: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Take the entries of `a = residual + x` with |a_i| > scale |moved_i|, scale and product rounded to its dtype."""
    a = _with_residual(x, residual)
    return _taken(a, residual, a.abs() > moved.abs() * a.new_tensor(scale))


def take_threshold(x: Tensor, residual: Tensor | None, tau: float) -> tuple[Tensor, Tensor]:
    """Take +-tau from the entries of `a = residual + x` with |a| >= tau.

    Returns (indices int32 ascending, negative uint8: 1 where -tau was taken). `residual` becomes `a -+ tau` there.
    """
    a = _with_residual(x, residual)
    size = a.new_tensor(tau)
    indices = (a.abs() >= size).nonzero().view(-1)
    negative = a[indices] < 0
    if residual is not None:
        residual[indices] -= torch.where(negative, -size, size)
    return indices.int(), negative.to(torch.uint8)


def add_at(total: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add: `total[indices] += values`; no index may be there twice."""
    total.index_add_(0, indices, values.to(total.dtype))


def _with_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else residual.add_(x)


def _taken(a: Tensor, residual: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor]:
    indices = chosen.nonzero().view(-1)
    values = a[indices]
    if residual is not None:
        residual[indices] = 0
    return indices.int(), values


def _largest(size: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest of each row of `size: (rows, m)`, the first of equals."""
    k = min(k, size.shape[1])
    if k == 0 or size.numel() == 0:
        return torch.zeros_like(size, dtype=torch.bool)
    kth_largest = size.topk(k, dim=1).values[:, -1:]
    chosen, equal = size > kth_largest, size == kth_largest
    equal_taken = k - chosen.sum(1, keepdim=True)
    if bool((equal.sum(1, keepdim=True) > equal_taken).any()):
        equal &= equal.cumsum(1) <= equal_taken
    return chosen | equal
