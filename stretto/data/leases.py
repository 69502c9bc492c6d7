"""The ledger of one pass: which samples were handed out, to whom, and which count.

A pass is an order of samples, cut into batches. Workers lease batches, a lease is settled when the work on it is in
the agreed state, and leases of a worker that leaves go back. So each sample counts exactly once, whatever happens.
The ledger is a plain state machine: it knows positions in the order, not the samples that stand there.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Lease:
    """One batch in the hands of one worker: positions `start` to `stop` of the pass's order."""

    batch: int
    worker: int
    start: int
    stop: int
    age: int = 0
    """How often the servers had gone back to a cut when it was got; what is of an older age is void."""

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Audit:
    """How often the samples of a pass were counted; honest bookkeeping has twice = never = 0."""

    once: int
    twice: int
    never: int


class Plan(Protocol):
    """Says whose a batch is before anyone has asked for it."""

    def kept(self, owner: int | None, batches: int) -> Sequence[int]:
        """Those of so many batches that are kept for a worker; for None those that are whoever's asks first."""
        ...


@dataclass(frozen=True, slots=True)
class Free:
    """The plan of those who do not wait: every batch is for whoever asks first."""

    def kept(self, owner: int | None, batches: int) -> Sequence[int]:
        """All of them are anyone's."""
        return () if owner is not None else range(batches)


@dataclass(frozen=True, slots=True)
class Dealt:
    """The fixed plan: batches are dealt in turn, batch b to worker b mod N."""

    workers: int

    def kept(self, owner: int | None, batches: int) -> Sequence[int]:
        """Batch b is kept for worker b mod N."""
        return range(owner, batches, self.workers) if owner is not None else ()


@dataclass(frozen=True, slots=True)
class DealtAmong:
    """The fixed plan where some workers may be gone: batches are dealt in turn to those who are there."""

    members: Sequence[int]

    def kept(self, owner: int | None, batches: int) -> Sequence[int]:
        """Batch b is kept for member b mod N; who came later has nothing kept for it."""
        if owner not in self.members:
            return ()
        return range(self.members.index(owner), batches, len(self.members))


class Ledger:
    """Leases the batches of one pass. `sizes` are their samples, in order.

    A worker gets the first batch that is kept for it or for nobody. What a leaver gives back is anyone's, and so is
    what was kept for it. Settling is idempotent: a lease that was settled or given back before is not counted again.
    """

    def __init__(self, sizes: Sequence[int], plan: Plan) -> None:
        self._bounds = array("q", [0, *accumulate(sizes)])
        self._plan, self._batches = plan, len(sizes)
        self._kept: dict[int | None, list[int]] = {}
        self._leased: dict[int, Lease] = {}
        self._settled: dict[int, int] = {}
        """By batch: the worker that has trained it; -1 for one of another run."""

    def lease(self, worker: int) -> Lease | None:
        """Hand the worker its next batch, or None when there is none for it."""
        heaps = [heap for owner in (worker, None) if (heap := self._heap(owner))]
        if not heaps:
            return None
        batch = heapq.heappop(min(heaps))
        self._leased[batch] = Lease(batch, worker, self._bounds[batch], self._bounds[batch + 1])
        return self._leased[batch]

    def settle(self, lease: Lease) -> bool:
        """Count the lease: its work is in the agreed state. False when it no longer is the worker's to settle."""
        if self._leased.get(lease.batch) != lease:
            return False
        del self._leased[lease.batch]
        self._settled[lease.batch] = lease.worker
        return True

    def give_back(self, worker: int) -> int:
        """Take back all leases of a worker that leaves, for anyone to lease again. Returns their samples."""
        back = [lease for lease in self._leased.values() if lease.worker == worker]
        for lease in back:
            del self._leased[lease.batch]
        kept, self._kept[worker] = self._heap(worker), []
        self._free([*kept, *(lease.batch for lease in back)])
        return sum(lease.samples for lease in back)

    def drop(self, worker: int) -> None:
        """The worker's leases will not be settled, and are nobody's: their samples never count."""
        self._leased = {batch: lease for batch, lease in self._leased.items() if lease.worker != worker}

    def has(self, worker: int) -> bool:
        """Whether there is a batch for the worker."""
        return bool(self._heap(worker) or self._heap(None))

    @property
    def outstanding(self) -> bool:
        """Whether anybody holds a batch that is not settled."""
        return bool(self._leased)

    @property
    def settled(self) -> list[int]:
        """The batches that count."""
        return sorted(self._settled)

    @property
    def settled_samples(self) -> int:
        """The samples that count."""
        return sum(self._bounds[batch + 1] - self._bounds[batch] for batch in self._settled)

    @property
    def trained_by(self) -> list[int]:
        """The workers that have trained the batches that count, in the order of these."""
        return [self._settled[batch] for batch in self.settled]

    def samples_by_worker(self) -> dict[int, int]:
        """Return for each worker how many samples that count it has trained, in all its incarnations."""
        found: dict[int, int] = {}
        for batch, worker in self._settled.items():
            if worker >= 0:
                found[worker] = found.get(worker, 0) + self._bounds[batch + 1] - self._bounds[batch]
        return dict(sorted(found.items()))

    def go_back(self, settled: Sequence[int], trained_by: Sequence[int] = ()) -> None:
        """Only these count; all others are anyone's, whoever had them."""
        self._settled, self._leased = dict(zip(settled, trained_by or [-1] * len(settled), strict=True)), {}
        self._plan = Free()
        self._kept = {None: [batch for batch in range(self._batches) if batch not in self._settled]}

    def _free(self, batches: Iterable[int]) -> None:
        for batch in batches:
            heapq.heappush(self._heap(None), batch)

    def _heap(self, owner: int | None) -> list[int]:
        """What is still kept for a worker, or for anyone."""
        if owner not in self._kept:
            self._kept[owner] = list(self._plan.kept(owner, self._batches))
        return self._kept[owner]

    @property
    def samples(self) -> int:
        """The samples of the whole pass."""
        return self._bounds[-1]

    def counted(self) -> NDArray[np.uint8]:
        """How often each position was settled here: 0 or 1, in the order of the pass."""
        counts = np.zeros(self.samples, dtype=np.uint8)
        for batch in self._settled:
            counts[self._bounds[batch] : self._bounds[batch + 1]] = 1
        return counts


def audit(counts: Iterable[NDArray[np.uint8]]) -> Audit:
    """Add up what several ledgers of the same pass have counted."""
    total: NDArray[np.int64] = sum((one.astype(np.int64) for one in counts), np.zeros((), np.int64))
    return Audit(int((total == 1).sum()), int((total > 1).sum()), int((total == 0).sum()))
