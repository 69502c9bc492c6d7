"""Ledger of one epoch: which samples are leased, to which worker, and which count as trained.

An epoch is an order of samples, divided into batches. Workers lease batches; a lease is settled when the work on its
batch is in the agreed state; the leases of a worker that leaves are returned. So each sample counts exactly once in
every case. The ledger is a plain state machine: it knows positions in the order, not the samples at these positions.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.data.assignment import Range
from stretto.data.stream_order import ENDLESS, gaps, merged

SHARED, RETURNED = -1, -2
"""In place of a worker: all that share a stream; and the pieces of it that have to be leased again."""
LEASED = 8
"""Most pieces of a stream that a worker leases at a time."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One batch that one worker works on: positions `start` to `stop` of the epoch's order."""

    batch: int
    worker: int
    start: int
    stop: int
    recovery_epoch: int = 0
    """Number of rollbacks before the lease was granted; a lease of an older recovery epoch is void."""

    @property
    def samples(self) -> int:
        """Number of samples in the batch."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Audit:
    """Numbers of samples of an epoch that were counted once, twice and never; correct bookkeeping has twice = never =
    0."""

    once: int
    twice: int
    never: int


class Plan(Protocol):
    """Reserves batches for workers before any worker has asked for one."""

    @property
    def members(self) -> Sequence[int] | None:
        """Workers that batches are reserved for; None where they are for all."""
        ...

    def reserved(self, owner: int | None, batches: int) -> Sequence[int]:
        """Return the batches, of `batches` in all, that are reserved for a worker; for None those reserved for no
        worker."""
        ...


@dataclass(frozen=True, slots=True)
class FirstCome:
    """Plan of asynchronous training: every batch goes to the first worker that asks."""

    members: None = None

    def reserved(self, owner: int | None, batches: int) -> Sequence[int]:
        """Reserve no batch."""
        return () if owner is not None else range(batches)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Fixed plan: batch b is reserved for member b mod N."""

    members: Sequence[int]

    def reserved(self, owner: int | None, batches: int) -> Sequence[int]:
        """Return every N-th batch; none for a worker that joined later."""
        if owner not in self.members:
            return ()
        return range(self.members.index(owner), batches, len(self.members))


PlanName = Literal["first-come", "in-turn", "one-each", "stream", "own stream", "same stream"]
"""Plans of an epoch: batches go to the first worker that asks, or in turn, or each worker has one of them for sure; or
they are those of a stream, of each worker's own shard of it, or of the rest of an iterator."""


class Ledger:
    """Leases the batches of one epoch. `sizes` are their numbers of samples, in order.

    A worker gets the first batch that is reserved for it or for no worker. The leases and reserved batches of a worker
    that leaves become available to all. Settling is idempotent: a lease that was settled or returned before is not
    counted again.
    """

    def __init__(self, sizes: Sequence[int], plan: Plan) -> None:
        self._bounds = array("q", [0, *accumulate(sizes)])
        self._plan, self._batches = plan, len(sizes)
        self._reserved = {owner: list(plan.reserved(owner, len(sizes))) for owner in (None, *(plan.members or ()))}
        self._leased: dict[int, Lease] = {}
        self._settled: dict[int, int] = {}
        """By batch: the worker that has trained it; -1 for a worker of another run."""

    def lease(self, worker: int) -> Lease | None:
        """Lease the worker its next batch, or return None if there is none for it."""
        heaps = [heap for owner in (worker, None) if (heap := self._reserved.get(owner))]
        if not heaps:
            return None
        batch = heapq.heappop(min(heaps))
        self._leased[batch] = Lease(batch, worker, self._bounds[batch], self._bounds[batch + 1])
        return self._leased[batch]

    def reserve_one_each(self, workers: Sequence[int]) -> None:
        """Reserve one of the batches for each of these workers, as far as there are any."""
        free = self._reserved[None]
        for worker in workers[: len(free)]:
            self._reserved[worker] = [heapq.heappop(free)]

    def leased(self, batch: int) -> Lease | None:
        """Return the lease of a batch that a worker holds."""
        return self._leased.get(batch)

    def settle(self, lease: Lease) -> bool:
        """Count the lease, whose work is in the agreed state. Return False if the worker does not hold it any more."""
        if self._leased.get(lease.batch) != lease:
            return False
        del self._leased[lease.batch]
        self._settled[lease.batch] = lease.worker
        return True

    def give_back(self, worker: int) -> int:
        """Return all leases of a worker that leaves, for any worker to lease again; return their number of samples."""
        returned = [lease for lease in self._leased.values() if lease.worker == worker]
        for lease in returned:
            del self._leased[lease.batch]
        for batch in [*self._reserved.pop(worker, []), *(lease.batch for lease in returned)]:
            heapq.heappush(self._reserved[None], batch)
        return sum(lease.samples for lease in returned)

    def drop(self, worker: int) -> None:
        """Void the worker's leases without returning them: their samples never count."""
        self._leased = {batch: lease for batch, lease in self._leased.items() if lease.worker != worker}

    def with_batch(self, workers: Set[int]) -> Set[int]:
        """Return the workers for which there is a batch."""
        return workers if self._reserved[None] else {worker for worker in workers if self._reserved.get(worker)}

    @property
    def holders(self) -> set[int]:
        """Workers that hold a batch that is not settled."""
        return {lease.worker for lease in self._leased.values()}

    @property
    def settled(self) -> list[int]:
        """Batches that count."""
        return sorted(self._settled)

    @property
    def settled_samples(self) -> int:
        """Number of samples that count."""
        return sum(self._bounds[batch + 1] - self._bounds[batch] for batch in self._settled)

    @property
    def trained_by(self) -> list[int]:
        """Workers that have trained the batches that count, in the order of `settled`."""
        return [self._settled[batch] for batch in self.settled]

    def samples_by_worker(self) -> dict[int, int]:
        """Return each worker's number of samples that count, over all its incarnations."""
        samples: dict[int, int] = {}
        for batch, worker in self._settled.items():
            if worker >= 0:
                samples[worker] = samples.get(worker, 0) + self._bounds[batch + 1] - self._bounds[batch]
        return dict(sorted(samples.items()))

    def roll_back(self, settled: Sequence[int], trained_by: Sequence[int] = ()) -> None:
        """Replace the settled batches by these; all others become available to any worker."""
        self._settled, self._leased = dict(zip(settled, trained_by or [-1] * len(settled), strict=True)), {}
        self._plan = FirstCome()
        self._reserved = {None: [batch for batch in range(self._batches) if batch not in self._settled]}

    def state(self) -> Any:
        """Return the state as plain values."""
        sizes = [stop - start for start, stop in itertools.pairwise(self._bounds)]
        leased, reserved = [astuple(lease) for lease in self._leased.values()], [*self._reserved.items()]
        return sizes, self._plan.members, reserved, leased, self._settled

    @classmethod
    def restored(cls, state: Any) -> Ledger:
        """Return the ledger that had this state."""
        sizes, members, reserved, leased, settled = state
        ledger = cls(sizes, FirstCome() if members is None else RoundRobin(members))
        ledger._reserved = {owner: list(heap) for owner, heap in reserved}
        ledger._leased = {lease[0]: Lease(*lease) for lease in leased}
        ledger._settled = settled
        return ledger

    @property
    def samples(self) -> int:
        """Number of samples of the whole epoch."""
        return self._bounds[-1]

    def counts(self) -> NDArray[np.uint8]:
        """Return how often each position was settled here, 0 or 1, in the order of the epoch."""
        counts = np.zeros(self.samples, dtype=np.uint8)
        for batch in self._settled:
            counts[self._bounds[batch] : self._bounds[batch + 1]] = 1
        return counts


class StreamLedger:
    """Ledger of a stream, whose pieces are numbered and whose end is not known until a worker has read to it.

    A worker leases some pieces at a time: returned ones first, then the next ones. If each worker has a
    shard of its own it numbers its own batches, and leases none. Settling is idempotent. One iterator for several
    epochs has one ledger, of which each epoch counts its own samples.

    >>> ledger = StreamLedger()
    >>> [ledger.lease(worker, workers=2) for worker in (0, 1, 0)]
    [[0], [1], [2]]
    >>> ledger.settle(0, [2], [8]), ledger.give_back(0), ledger.lease(1, workers=1)
    (1, None, [0])
    >>> ledger.settled, ledger.samples_by_worker(), ledger.first_open
    ({-1: [(2, 3)]}, {0: 8}, 0)
    """

    def __init__(self, epoch: int = 0, is_own: bool = False) -> None:
        self.epoch, self._is_own = epoch, is_own
        """Number of the first epoch over the stream; and True if each worker has a shard of its own."""
        self.settled: dict[int, list[Range]] = {}
        """Sorted ranges of the settled numbers: by worker of their own shards, else all of `SHARED`."""
        self.returned: list[Range] = []
        """Sorted ranges of the numbers that were leased and have to be leased again."""
        self._leased: dict[int, list[int]] = {}
        self._next, self._stop = 0, ENDLESS
        """The first number that was never leased, and that of the end."""
        self._samples: dict[int, int] = {}

    def lease(self, worker: int, workers: int) -> list[int]:
        """Lease the worker its next pieces, fewer of them at the beginning; none if there are none for it.

        So no worker of the `workers` holds a large part of the stream when it ends.
        """
        count = min(max(self._next // (LEASED * workers), 1), LEASED)
        found = [number for _ in range(count) if (number := self._first()) is not None]
        self._leased.setdefault(worker, []).extend(found)
        return found

    def _first(self) -> int | None:
        if self.returned:
            (start, stop), *rest = self.returned
            self.returned = [(start + 1, stop), *rest] if start + 1 < stop else rest
            return start
        if self._next >= self._stop:
            return None
        self._next += 1
        return self._next - 1

    def end(self, worker: int, number: int) -> None:
        """Note that the stream has ended before the piece of this number: this piece and later ones do not exist."""
        self._stop = min(self._stop, number)
        self._leased[worker] = [one for one in self._leased.get(worker, []) if one < self._stop]
        self.returned = [(start, min(stop, self._stop)) for start, stop in self.returned if start < self._stop]

    @property
    def first_open(self) -> int:
        """The first number that is not settled and may be leased again."""
        leased = [number for numbers in self._leased.values() for number in numbers]
        return min([self._next, *leased, *(start for start, _ in self.returned)])

    def settle(self, worker: int, numbers: Sequence[int], samples: Sequence[int]) -> int:
        """Count these numbers of the worker; return how many were not counted before."""
        leased, new = self._leased.get(worker, []), 0
        settled = self.settled.setdefault(worker if self._is_own else SHARED, [])
        for number, size in zip(numbers, samples, strict=True):
            if self._is_own:
                if any(start <= number < stop for start, stop in reversed(settled)):
                    continue
            elif number in leased:
                leased.remove(number)
            else:
                continue
            self._samples[worker] = self._samples.get(worker, 0) + size
            settled[:] = merged([*settled, (number, number + 1)])
            new += 1
        return new

    def give_back(self, worker: int) -> None:
        """Return the pieces of a worker that leaves, for any worker to lease again."""
        numbers = [number for number in self._leased.pop(worker, []) if number < self._stop]
        self.returned = merged([*self.returned, *((number, number + 1) for number in numbers)])

    def samples_by_worker(self) -> dict[int, int]:
        """Return each worker's number of samples that count in this epoch, over all its incarnations."""
        return dict(sorted(self._samples.items()))

    def begin_again(self) -> None:
        """Begin a further epoch over the same iterator."""
        self._samples = {}

    def roll_back(self, to: StreamLedger, is_of_epoch: bool) -> None:
        """Return all pieces except the pieces that count in a former state, perhaps of an epoch before."""
        self.settled, self._samples = to.settled, to._samples if is_of_epoch else {}
        self._leased = {}
        self.returned = gaps(self.settled.get(SHARED, []), min(self._next, self._stop))

    def state(self) -> Any:
        """Return the state as plain values."""
        return (
            self.epoch,
            self._is_own,
            self.settled,
            self.returned,
            self._leased,
            self._next,
            self._stop,
            self._samples,
        )

    @classmethod
    def restored(cls, state: Any) -> StreamLedger:
        """Return the ledger that had this state."""
        epoch, is_own, settled, returned, leased, following, stop, samples = state
        ledger = cls(epoch, is_own)
        ledger.settled = {worker: [(start, end) for start, end in ranges] for worker, ranges in settled.items()}
        ledger.returned = [(start, end) for start, end in returned]
        ledger._leased = {worker: list(numbers) for worker, numbers in leased.items()}
        ledger._next, ledger._stop, ledger._samples = following, stop, dict(samples)
        return ledger


def audit(counts: Iterable[NDArray[np.uint8]]) -> Audit:
    """Sum the counts of several ledgers of the same epoch."""
    total: NDArray[np.int64] = sum((counted.astype(np.int64) for counted in counts), np.zeros((), np.int64))
    return Audit(int((total == 1).sum()), int((total > 1).sum()), int((total == 0).sum()))
