"""Straggler injection: factors by which workers compute slower, `1:2.0,3:5.0`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stretto.errors import LaunchError, explain

EXAMPLE = '--stragglers "1:2.0,3:5.0"'
ONE = re.compile(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,9}(?:\.[0-9]*)?)\s*", re.ASCII)
"""A worker and its factor, both plain numbers without exponent or sign."""


def factors(text: str | None, workers: int) -> dict[int, float]:
    """Return the factor by which each straggler's computing time is multiplied.

    >>> factors("1:2.0, 3:5", workers=4)
    {1: 2.0, 3: 5.0}

    Raise LaunchError for an unknown or repeated worker, and for a factor below 1.
    """
    found: dict[int, float] = {}
    for worker, factor in _pairs(text) if text is not None else ():
        _check(text, worker, factor, workers, worker in found)
        found[worker] = factor
    return found


def _pairs(text: str) -> Iterator[tuple[int, float]]:
    for word in text.split(","):
        match = ONE.fullmatch(word)
        if match is None:
            raise _refused(
                f"--stragglers cannot be {text!r}", word.strip() or "nothing", "WORKER:FACTOR, commas between"
            )
        yield int(match[1]), float(match[2])


def _check(text: object, worker: int, factor: float, workers: int, known: bool) -> None:
    if worker >= workers:
        last = f"a worker from 0 to {workers - 1}" if workers > 1 else "worker 0, the only one"
        raise _refused(f"there is no worker {worker} of {workers} to be slow", text, last)
    if known:
        raise _refused(f"worker {worker} is slow twice", text, "each worker once")
    if factor < 1:
        raise _refused(f"worker {worker} cannot be slowed by {factor}", text, "a factor of at least 1")


def _refused(problem: str, got: object, expected: str) -> LaunchError:
    return LaunchError(explain(problem, got=got, expected=expected, to_type=EXAMPLE))
