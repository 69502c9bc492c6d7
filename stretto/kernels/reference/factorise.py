"""Reference of the kernels that factorise a matrix: slow, one value after another."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Factors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Factors of the rows (rows, rank) and their biases (rows,), those of the columns and their biases."""
Known: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Numbers of rows and of columns (int32), and the values there."""
LANES = 8
"""Partial sums of a dot product; the rank is a multiple of it."""


def factor_steps(factors: Factors, known: Known, mean: float, lr: float, l2: float) -> None:
    """Step the factors of a matrix by stochastic gradient descent over its known values, one after another.

    A value's error is that of mean + bias of the row + bias of the column + dot product, clipped nowhere; `l2` is the
    weight of the squares.
    """
    rows, row_bias, columns, column_bias = factors
    mean_, lr_, l2_ = (torch.tensor(number, dtype=rows.dtype, device="cpu") for number in (mean, lr, l2))
    for row, column, value in zip(*(one.tolist() for one in known[:2]), known[2], strict=True):
        a, b = rows[row].clone(), columns[column].clone()
        error = value - (((mean_ + row_bias[row]) + column_bias[column]) + _dot(a, b))
        row_bias[row] += lr_ * (error - l2_ * row_bias[row])
        column_bias[column] += lr_ * (error - l2_ * column_bias[column])
        rows[row] = a + lr_ * (error * b - l2_ * a)
        columns[column] = b + lr_ * (error * a - l2_ * b)


def factor_errors(factors: Factors, known: Known, mean: float, least: float, most: float) -> float:
    """Return the sum of the squared errors of known values; predictions are clipped to `least` and `most`."""
    rows, row_bias, columns, column_bias = factors
    row, column, value = known[0].long(), known[1].long(), known[2]
    biases = (torch.tensor(mean, dtype=rows.dtype, device="cpu") + row_bias[row]) + column_bias[column]
    found = (biases + _dot(rows[row], columns[column])).clamp(least, most)
    return float((value.double() - found.double()).square().sum())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return dot products of the last dimension: eight sums of every eighth product, added in halves."""
    products = (a * b).view(*a.shape[:-1], a.shape[-1] // LANES, LANES)
    sums = products.select(-2, 0) + torch.zeros((), dtype=a.dtype, device="cpu")
    for at in range(1, products.shape[-2]):
        sums = sums + products.select(-2, at)
    for half in (4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    found: Tensor = sums.squeeze(-1)
    return found
