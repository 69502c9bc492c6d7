"""Deterministic dealing of a stream's batches, whose number is unknown, to workers; a plain state machine.

All workers read one stream in one order. A batch is known by its position in it. A run may stop when some workers are
ahead of others, and continue with another number of workers: the trained positions are then no prefix of the order, and
those that were not trained are dealt among the workers that continue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise

from stretto.data.assignment import Range

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


def gaps(ranges: Sequence[Range], stop: int) -> list[Range]:
    """Return the ranges from 0 to `stop` that are in none of these sorted ranges.

    >>> gaps([(1, 2), (4, 6)], 5), gaps([(0, 3)], 3)
    ([(0, 1), (2, 4)], [])
    """
    starts, stops = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), stop]
    return [(start, min(end, stop)) for start, end in zip(starts, stops, strict=True) if start < min(end, stop)]


def first_untrained(trained: Sequence[Range]) -> int:
    """Return the first position that is not in these sorted ranges."""
    return trained[0][1] if trained and trained[0][0] == 0 else 0
