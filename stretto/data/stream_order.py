"""Deterministic dealing of a stream's batches, whose number is unknown, to workers; a plain state machine.

All workers read one stream in one order. A batch is known by its position in it. A run may stop when some workers are
ahead of others, and continue with another number of workers: the trained positions are then no prefix of the order, and
those that were not trained are dealt among the workers that continue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stretto.data.assignment import Range

STRETCH = 8
"""Pieces of a stretch for each worker."""
ENDLESS = 1 << 62


class StreamOrder:
    """Deals the positions of a stream that are not in the sorted ranges `trained`: every N-th of them to a worker.

    Batches of an earlier epoch that are dealt before the stream have the positions from `first` to -1.

    >>> order = StreamOrder(2, [(0, 3), (4, 5)])
    >>> [order.position(0, number) for number in range(3)], order.position(1, 0)
    ([3, 6, 8], 5)
    >>> order.trained([2, 0])
    [(0, 5), (6, 7)]
    """

    def __init__(self, workers: int, trained: Sequence[Range] = (), first: int = 0) -> None:
        trained = merged(trained)
        self.workers, self._before = workers, trained
        stops = [first, *(stop for _, stop in trained)]
        self._starts = stops
        """First positions of the ranges that are not trained, the last of which has no end."""
        lengths = [start - stop for stop, (start, _) in zip(stops[:-1], trained, strict=True)]
        self._dealt = [0, *accumulate(lengths)]
        """Number of positions that are not trained before each of these ranges."""

    def position(self, worker: int, number: int) -> int:
        """Return the position of a worker's batch by its number among the batches of this worker, from 0."""
        return self._position(number * self.workers + worker)

    def trained(self, counts: Sequence[int]) -> list[Range]:
        """Return the sorted ranges of trained positions, once each worker has trained this number of its batches.

        Cost: the batches by which workers are ahead of the last one.
        """
        least = min(counts)
        ahead = [self.position(worker, number) for worker, count in enumerate(counts) for number in range(least, count)]
        by_all = self._ranges(least * self.workers)
        return merged([*self._before, *by_all, *((position, position + 1) for position in ahead)])

    def _position(self, dealt: int) -> int:
        """Return the position of a dealt batch by its number among all that were not trained."""
        at = bisect_right(self._dealt, dealt) - 1
        return self._starts[at] + dealt - self._dealt[at]

    def _ranges(self, dealt: int) -> Iterator[Range]:
        """Yield the ranges of the first positions that were not trained, `dealt` in all."""
        for start, (first, stop) in zip(self._starts, pairwise([*self._dealt, dealt]), strict=True):
            if first < min(stop, dealt):
                yield start, start + min(stop, dealt) - first


@dataclass(frozen=True)
class Stretches:
    """Pieces of a stream, which workers that do not wait for each other are dealt: a stretch of them at a time.

    The first worker that needs more pieces than are dealt has the next stretch dealt, among the present workers.
    Workers get whole pieces in turn, or have a share of each if these are `divided`, in turn the first, so that none
    has an empty share of each. Each numbers its own from 0.

    >>> dealt = Stretches.among([0, 1])
    >>> dealt.piece(1, 3, divided=False), dealt.piece(1, 3, divided=True)
    ((7, 1, 2), (3, 0, 2))
    >>> joined = dealt.extended([0, 1, 2])
    >>> dealt.piece(0, 8, divided=False), joined.piece(0, 8, divided=False), joined.piece(2, 0, divided=False)
    (None, (16, 0, 3), (18, 2, 3))
    """

    dealt: tuple[tuple[int, tuple[int, ...]], ...]
    """Workers among which the pieces from a number on are dealt, up to that of the next entry."""
    stop: int
    """Number of pieces that are dealt."""

    @staticmethod
    def among(workers: Sequence[int], stop: int | None = None) -> Stretches:
        """Return the first stretch, which may end at another piece."""
        return Stretches(((0, tuple(workers)),), STRETCH * len(workers) if stop is None else stop)

    def extended(self, workers: Sequence[int]) -> Stretches:
        """Return these with a further stretch, among these workers."""
        more = () if tuple(workers) == self.last else ((self.stop, tuple(workers)),)
        return Stretches((*self.dealt, *more), self.stop + STRETCH * len(workers))

    @property
    def last(self) -> tuple[int, ...]:
        """Workers of the last stretch."""
        return self.dealt[-1][1]

    @property
    def workers(self) -> list[int]:
        """All workers that have had a piece."""
        return sorted({worker for _, workers in self.dealt for worker in workers})

    def piece(self, worker: int, number: int, divided: bool) -> tuple[int, int, int] | None:
        """Return a worker's piece of this number, with the number of its share and of all; None if it is not dealt."""
        for pieces, place, of in self._pieces(worker, self.stop, divided):
            if number < len(pieces):
                piece = pieces[number]
                return piece, (place + piece) % of if divided else place, of
            number -= len(pieces)
        return None

    def count(self, worker: int, stop: int, divided: bool) -> int:
        """Return how many of the pieces before `stop` a worker has."""
        return sum(len(pieces) for pieces, *_ in self._pieces(worker, min(stop, self.stop), divided))

    def _pieces(self, worker: int, stop: int, divided: bool) -> Iterator[tuple[range, int, int]]:
        ends = [*(first for first, _ in self.dealt[1:]), self.stop]
        for (first, workers), end in zip(self.dealt, ends, strict=True):
            if worker in workers:
                place, of = workers.index(worker), len(workers)
                pieces = range(first, min(end, stop)) if divided else range(first + place, min(end, stop), of)
                yield pieces, place, of


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges in order, with those that touch as one.

    >>> merged([(4, 5), (0, 2), (2, 3)])
    [(0, 3), (4, 5)]
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def without(ranges: Sequence[Range], positions: Collection[int]) -> list[Range]:
    """Return sorted ranges without these positions.

    >>> without([(0, 3), (4, 5)], {1, 4})
    [(0, 1), (2, 3)]
    """
    found = list[Range]()
    rest = sorted(positions)
    for start, stop in ranges:
        for position in rest[bisect_left(rest, start) : bisect_left(rest, stop)]:
            found.append((start, position))
            start = position + 1
        found.append((start, stop))
    return merged(found)


def first_untrained(trained: Sequence[Range]) -> int:
    """Return the first position that is not in these sorted ranges."""
    return trained[0][1] if trained and trained[0][0] == 0 else 0
