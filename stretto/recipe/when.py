"""Answers to *when*: when do workers exchange, and which of them wait?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from stretto.spec import Answer, Range


@dataclass(frozen=True, repr=False)
class overhead(Answer):
    """Number of local steps, equal for all workers, that keeps exchanges at a fraction of the measured time."""

    fraction: Annotated[float, Range(above=0, below=1)]

    example: ClassVar[str] = "overhead(0.1)"

    def steps(self, step_s: float, exchange_s: float, before: int) -> int:
        """Return the local steps of the next round, by the seconds of a step and an exchange, at most twice those
        `before` and at least half of them.

        >>> overhead(0.1).steps(step_s=0.01, exchange_s=0.02, before=16)
        18
        >>> overhead(0.1).steps(step_s=0.01, exchange_s=0.02, before=4)
        8
        """
        wanted = exchange_s * (1 - self.fraction) / (self.fraction * step_s) if step_s > 0 else before
        return max(min(math.ceil(wanted - 1e-9), 2 * before), -(-before // 2))


Every: TypeAlias = Annotated[int, Range(least=1)] | overhead
"""Number of local steps between two exchanges: as typed, or as measured."""


class When(Answer):
    """Base of the answers to *when*."""

    axis = "when"
    example: ClassVar[str] = "together()"


@dataclass(frozen=True, repr=False)
class together(When):
    """All workers exchange after every k local steps, and wait for each other.

    Until step `after` they exchange at every step; from there on at every k-th. `every=overhead(0.1)` measures k.
    """

    every: Every = 1
    after: Annotated[int, Range(least=0)] = 0

    papers = ("Lin et al. 2018 (1808.07217)",)

    def sources(self) -> tuple[str, ...]:
        """Return the paper of `after` if it is used."""
        return self.papers if self.after else ()


@dataclass(frozen=True, repr=False)
class on_arrival(When):
    """Asynchronous exchange: each worker exchanges after every k local steps, and a server applies updates on arrival.

    The server applies updates once `collect` have arrived, from any workers (1: each on arrival; more: soft
    synchronisation). A worker that would be more than `bound` rounds ahead of the slowest waits (stale synchronous
    parallel; 0 is a barrier, None is unbounded); rounds count from the last barrier, which is an evaluation or the end
    of an epoch. With `overlap` a worker computes its next round while it sends and receives, so it never waits on a
    slow network, and updates are about twice as stale. It uses one round of the bound; with a bound of 0 it has no
    effect.
    """

    every: Annotated[int, Range(least=1)] = 1
    collect: Annotated[int, Range(least=1)] = 1
    bound: Annotated[int, Range(least=0)] | None = None
    overlap: bool = False

    strategy = "stretto.strategies.async_strategy.AsyncStrategy"

    def sources(self) -> tuple[str, ...]:
        """Return the papers of `every`, `collect` and `bound` if they are used."""
        used = {
            "Dean et al. 2012 (DistBelief)": True,
            "Zhang, Gupta, Lian, Liu 2015 (1511.05950)": self.collect > 1,
            "Ho et al. 2013 (stale synchronous parallel)": self.bound is not None,
        }
        return tuple(paper for paper, is_used in used.items() if is_used)

    def due(self, step: int) -> bool:
        """Return True if an exchange follows local step `step`, counted from 1."""
        return step % self.every == 0

    @property
    def ahead(self) -> int:
        """Rounds that a worker begins before it receives the reply to its last exchange: 1 with overlap, 0 without."""
        return int(self.overlap and self.bound != 0)
