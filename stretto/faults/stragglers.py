"""Straggler injection: factors by which workers compute slower, `1:2.0,3:5.0`."""

from __future__ import annotations

from stretto.call_syntax import Words


def factors(text: str | None, workers: int) -> dict[int, float]:
    """Return the factor by which each straggler's computing time is multiplied.

    >>> factors("1:2.0, 3:5", workers=4)
    {1: 2.0, 3: 5.0}

    Raise LaunchError for an unknown or repeated worker, and for a factor below 1.
    """
    factor_by_worker: dict[int, float] = {}
    if text is None:
        return factor_by_worker
    words = Words(text, "--stragglers", "1:2.0,3:5.0", "WORKER:FACTOR, commas between")
    for start in words.listed(","):
        worker = words.whole(0, 10**9 - 1, words.expected)
        if worker >= workers:
            problem = f"there is no worker {worker} of {workers} to be slow"
            raise words.refused(f"a worker from 0 to {workers - 1}", start, problem)
        if worker in factor_by_worker:
            raise words.refused("each worker once", start, f"worker {worker} is slow twice")
        words.take(":")
        factor_by_worker[worker] = words.quantity(least=1, expected="a factor of at least 1")
    return factor_by_worker
