"""Rows divided into blocks with about equally many samples."""

from __future__ import annotations

import heapq
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]


def balanced(numbers: NDArray[Any], size: int, parts: int) -> Numbers:
    """Return a block for each row: the row with the most samples goes first, each to the block with the fewest.

    `numbers` are the rows of the samples, `size` is the number of rows.
    """
    counts = np.bincount(numbers, minlength=size)
    loads = [(0, 0, part) for part in range(parts)]
    found = np.zeros(size, np.int64)
    for row in np.argsort(-counts, kind="stable"):
        samples, rows, part = loads[0]
        found[row] = part
        heapq.heapreplace(loads, (samples + int(counts[row]), rows + 1, part))
    return found


def in_ranges(numbers: NDArray[Any], size: int, parts: int) -> Numbers:
    """Return a block for each row: each block is a range of rows."""
    before = np.cumsum(np.bincount(numbers, minlength=size)) - 1
    found: Numbers = np.maximum(before, 0) * parts // max(len(numbers), 1)
    return found
