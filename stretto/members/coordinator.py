"""Who gets which batch when nobody waits, and when all meet after all. A plain state machine.

A pass begins when a worker says so; whoever is free gets the next batch. All workers meet at the end of the pass, and
after every so many batches if they are to: each is told so once, before it gets a batch beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.members.ledger import Dealt, Lease, Ledger


@dataclass(frozen=True, slots=True)
class Free:
    """The plan of an asynchronous pass: every batch is for whoever asks first."""

    def kept(self, owner: int | None, batches: int) -> Sequence[int]:
        """All of them are anyone's."""
        return () if owner is not None else range(batches)


@dataclass(frozen=True, slots=True)
class Handed:
    """What a worker that asked is told: its lease, or to meet the others, or with neither that nothing is left.

    `samples` counts those handed out in the pass so far.
    """

    lease: Lease | None
    samples: int
    meet: bool = False


class Coordinator:
    """The batches of one pass after the other, handed to whoever is free."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._number = 0
        self._ledger = Ledger([], Free())
        self._leases: dict[int, Lease] = {}
        self._meet: int | None = None
        self._handed = self._samples = 0
        self._met: dict[int, int] = {}
        """How many meetings each worker has been told of, over all passes, as `_handed` counts batches of all."""

    @property
    def ledger(self) -> Ledger:
        """The books of the pass."""
        return self._ledger

    def begin(self, number: int, sizes: Sequence[int], meet: int | None = None, dealt: bool = False) -> None:
        """Pass `number` begins, with batches of these sizes; workers `meet` after so many. Said twice, done once.

        Batches that are `dealt` are not for whoever is free, but for the workers in turn.
        """
        if number <= self._number:
            return
        self._number, self._meet = number, meet
        self._ledger = Ledger(sizes, Dealt(self._workers) if dealt else Free())
        self._leases, self._samples = {}, 0

    def lease(self, worker: int, number: int) -> Handed:
        """A worker is free. What it asks of a pass that is over, it gets nothing for."""
        if number != self._number:
            return Handed(None, self._samples)
        if self._is_to_meet(worker):
            return Handed(None, self._samples, meet=True)
        lease = self._ledger.lease(worker)
        if lease is not None:
            self._leases[lease.batch] = lease
            self._handed += 1
            self._samples += lease.samples
        return Handed(lease, self._samples)

    def settle(self, worker: int, number: int, batches: Sequence[int]) -> int:
        """Work on these batches is in the agreed state; returns how many counted."""
        if number != self._number:
            return 0
        found = [lease for batch in batches if (lease := self._leases.get(batch)) and lease.worker == worker]
        return sum(self._ledger.settle(lease) for lease in found)

    def leave(self, worker: int) -> int:
        """A worker has left: its batches go back. Returns their samples."""
        back = self._ledger.give_back(worker)
        self._samples -= back
        return back

    def _is_to_meet(self, worker: int) -> bool:
        """Whether so many batches are out that a meeting is due which the worker has not been told of."""
        if self._meet is None:
            return False
        told = self._met.get(worker, 0)
        if told >= self._handed // self._meet:
            return False
        self._met[worker] = told + 1
        return True
