"""Test parameters and cases of which `make test` runs some that cover the rest, and `make test-long` runs all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest
from example_counts import WRITTEN
from hypothesis import settings

T = TypeVar("T")
Numbers = tuple[int, ...]


def pairwise(*axes: Sequence[Any], exists: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Return all combinations of one value of each axis; those beyond a cover of all pairs of values are marked `long`.

    >>> [str(param.marks) for param in pairwise("ab", "cd", "ef")].count("()")
    4
    """
    return _cover(2, axes, exists)


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of one value of each axis; those beyond a cover of all values are marked `long`.

    >>> [str(param.marks) for param in each_value("abc", "de")].count("()")
    3
    """
    return _cover(1, axes, lambda *_: True)


def mostly_long(cases: Iterable[Any], short: Iterable[int]) -> list[Any]:
    """Return the cases as test parameters; those whose index is not in `short` are marked `long`."""
    kept = set(short)
    return [_param((case,), number in kept) for number, case in enumerate(cases)]


def thinned(values: Sequence[T], step: int, first: int) -> Sequence[T]:
    """Return every `step`-th value, from one of the first on, which `first` numbers; all under the profile `long`."""
    return values if settings.default.max_examples > WRITTEN else values[first % step :: step]


def _cover(size: int, axes: Sequence[Sequence[Any]], exists: Callable[..., bool]) -> list[Any]:
    """Return all combinations; those beyond a cover of all parts of this size are marked `long`.

    Among combinations that cover as many parts, the one whose values were chosen least is next.
    """
    numbers = [one for one in product(*map(range, map(len, axes))) if exists(*_values(axes, one))]
    parts = {one: set(combinations(enumerate(one), size)) for one in numbers}
    missing, chosen, uses = set().union(*parts.values()), set[Numbers](), Counter[tuple[int, int]]()
    while missing:
        best = max(numbers, key=lambda one: (len(parts[one] & missing), -sum(uses[value] for value in enumerate(one))))
        chosen.add(best)
        missing -= parts[best]
        uses.update(enumerate(best))
    return [_param(_values(axes, one), one in chosen) for one in numbers]


def _values(axes: Sequence[Sequence[Any]], numbers: Numbers) -> list[Any]:
    return [axis[number] for axis, number in zip(axes, numbers, strict=True)]


def _param(values: Iterable[Any], is_short: bool) -> Any:
    return pytest.param(*values, marks=() if is_short else pytest.mark.long)
