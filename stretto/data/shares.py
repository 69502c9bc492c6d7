"""Division of a global step's samples among its members, by the time that each takes for a step and for a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TypeAlias

from stretto.errors import LaunchError, explain

EVEN = "even"

Pace: TypeAlias = tuple[float, float]
"""Seconds of a worker for a step, whatever its size, and for each sample of it."""

Paces: TypeAlias = Mapping[int, Pace]
"""Pace of each worker, by its number."""


def parse(text: str) -> Paces:
    """Return the paces that give each worker its share of a global step; none for even shares. Raises LaunchError.

    >>> parse("1:1:0.5"), parse("even")
    ({0: (0.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 2.0)}, {})
    """
    if text == EVEN:
        return {}
    try:
        ratios = [float(word) for word in text.split(":")]
    except ValueError:
        ratios = []
    if len(ratios) < 2 or not all(1e-6 <= ratio <= 1e6 for ratio in ratios):
        expected = "even, or a number above 0 for each worker"
        raise LaunchError(
            explain(f"--shares cannot be {text}", got=text, expected=expected, to_type="--shares 1:1:0.2")
        )
    return {worker: (0.0, 1 / ratio) for worker, ratio in enumerate(ratios)}


def of_members(paces: Paces, members: Sequence[int]) -> tuple[Pace, ...]:
    """Return the paces of these workers, in order; a worker without one has the mean of those that have one."""
    known = [paces[worker] for worker in members if worker in paces]
    if not known:
        return ()
    mean = sum(one[0] for one in known) / len(known), sum(one[1] for one in known) / len(known)
    return tuple(paces.get(worker, mean) for worker in members)


def step_s(sizes: Sequence[int], paces: Sequence[Pace]) -> float:
    """Return the seconds of a global step with these shares: those of its slowest worker."""
    return max(fixed + each * size for size, (fixed, each) in zip(sizes, paces, strict=True))


@lru_cache(maxsize=64)
def cuts(samples: int, paces: tuple[Pace, ...], least: int) -> tuple[int, ...]:
    """Return where each share begins, and the end: of all divisions one with the least time of a step.

    With seconds a_i a step and b_i a sample, the shares s_i minimise `max_i (a_i + b_i s_i)`, where `sum_i s_i` is the
    number of samples and no share is below `least`. Shares in proportion to speeds would run away where a_i matters:
    a smaller share makes a worker look slower. Among equals the first have the larger shares. `samples` is at least
    `least` for each worker.

    >>> cuts(16, ((0.0, 1.0), (0.0, 1.0), (0.0, 5.0)), 2), cuts(16, ((1.0, 1.0), (5.0, 1.0)), 2)
    ((0, 7, 14, 16), (0, 10, 16))
    """

    def within(seconds: float) -> list[int]:
        """Return the largest shares with which each worker has done its step within this time."""
        return [max(least, int((seconds - fixed) / each)) for fixed, each in paces]

    low, high = 0.0, max(fixed + each * (samples + 1) for fixed, each in paces)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= samples else (low, middle)
    shares = within(low)
    ends = [(fixed + each * (shares[rank] + 1), rank) for rank, (fixed, each) in enumerate(paces)]
    heapify(ends)
    for _ in range(samples - sum(shares)):
        end, rank = ends[0]
        shares[rank] += 1
        heapreplace(ends, (end + paces[rank][1], rank))
    return tuple(accumulate(shares, initial=0))
