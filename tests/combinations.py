"""Combinations of test parameters: pairs of values in `make test`, all combinations in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any], exists: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Return all combinations of one value of each axis; those beyond a cover of all pairs of values are marked `long`.

    >>> [str(param.marks) for param in pairwise("ab", "cd", "ef")].count("()")
    4
    """
    missing: set[tuple[int, int, int, int]] = set()
    numbers = [one for one in product(*map(range, map(len, axes))) if exists(*_values(axes, one))]
    for one in numbers:
        missing |= _pairs(one)
    chosen = set()
    while missing:
        best = max(numbers, key=lambda one: len(_pairs(one) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return [_param(_values(axes, one), one in chosen) for one in numbers]


def mostly_long(cases: Iterable[Any], short: Iterable[int]) -> list[Any]:
    """Return the cases as test parameters; those whose index is not in `short` are marked `long`."""
    kept = set(short)
    return [_param((case,), number in kept) for number, case in enumerate(cases)]


def _pairs(numbers: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(*first, *second) for first, second in combinations(enumerate(numbers), 2)}


def _values(axes: Sequence[Sequence[Any]], numbers: Sequence[int]) -> list[Any]:
    return [axis[number] for axis, number in zip(axes, numbers, strict=True)]


def _param(values: Iterable[Any], is_short: bool) -> Any:
    return pytest.param(*values, marks=() if is_short else pytest.mark.long)
