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
from stretto.data.stream_order import merged


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


PlanName = Literal["first-come", "in-turn", "one-each", "stream"]
"""Plans of an epoch: batches go to the first worker that asks, or in turn, or each worker has one of them for sure; or
the workers deal a stream among themselves."""


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
    """Ledger of an epoch over a stream, which the workers deal among themselves: the numbers that count, by worker.

    Each worker numbers its own batches. Settling is idempotent.

    >>> ledger = StreamLedger()
    >>> ledger.settle(1, [0, 1, 3], [8, 8, 8])
    3
    >>> ledger.settle(1, [3, 4], [8, 5])
    1
    >>> ledger.numbers, ledger.samples_by_worker()
    ({1: [(0, 2), (3, 5)]}, {1: 29})
    """

    def __init__(self) -> None:
        self.numbers: dict[int, list[Range]] = {}
        """Sorted ranges of the settled numbers, by worker."""
        self._samples: dict[int, int] = {}

    def settle(self, worker: int, numbers: Sequence[int], samples: Sequence[int]) -> int:
        """Count these numbers; return how many were not counted before."""
        settled = self.numbers.setdefault(worker, [])
        new = 0
        for number, size in zip(numbers, samples, strict=True):
            if any(start <= number < stop for start, stop in reversed(settled)):
                continue
            self._samples[worker] = self._samples.get(worker, 0) + size
            settled[:] = merged([*settled, (number, number + 1)])
            new += 1
        return new

    def samples_by_worker(self) -> dict[int, int]:
        """Return each worker's number of samples that count, over all its incarnations."""
        return dict(sorted(self._samples.items()))

    def state(self) -> Any:
        """Return the state as plain values."""
        return self.numbers, self._samples

    @classmethod
    def restored(cls, state: Any) -> StreamLedger:
        """Return the ledger that had this state."""
        ledger = cls()
        numbers, samples = state
        ledger.numbers = {worker: [(start, stop) for start, stop in ranges] for worker, ranges in numbers.items()}
        ledger._samples = dict(samples)
        return ledger


def audit(counts: Iterable[NDArray[np.uint8]]) -> Audit:
    """Sum the counts of several ledgers of the same epoch."""
    total: NDArray[np.int64] = sum((counted.astype(np.int64) for counted in counts), np.zeros((), np.int64))
    return Audit(int((total == 1).sum()), int((total > 1).sum()), int((total == 0).sum()))
