"""Dispatch of batches to asynchronous workers, and the barriers between them. A plain state machine.

The first worker that begins an epoch starts it; each free worker leases the next batch. All workers meet at a barrier
at the end of the epoch and, if asked for, after a fixed number of batches: each worker gets one reply per barrier that
says so, before it gets a later batch. An epoch is over when all batches are settled or void and none is left to lease:
a worker without a batch waits until then, or until a batch is returned.

To settle a batch is to count it: its update is in the parameters. A section is what one call of `distribute` trains.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from stretto.data.leases import FirstCome, Lease, Ledger, PlanName, RoundRobin, StreamLedger
from stretto.membership.epoch_numbers import section_of


@dataclass(frozen=True, slots=True)
class DispatchReply:
    """Reply to a worker that asks for a batch: a lease, a call to a barrier, or neither if no batch is left.

    `samples` is the number of samples leased so far in the current epoch, whichever epoch was asked for.
    `snapshot_only` is True if the barrier is only for a snapshot.
    """

    lease: Lease | None
    samples: int
    barrier: bool = False
    snapshot_only: bool = False


STORED = (
    "epoch_number",
    "barrier_every",
    "barriers_announced",
    "may_announce_barrier",
    "_settled_before",
    "_batches_leased",
    "_samples",
    "_announced_to",
    "_scheduled_barriers",
)
"""Attributes of the dispatcher whose values its stored state contains unchanged."""


class BatchDispatcher:
    """Leases the batches of one epoch after another to free workers."""

    def __init__(self, workers: int) -> None:
        self.members = set(range(workers))
        self.epoch_number = 0
        self._ledger = Ledger([], FirstCome())
        self.stream: StreamLedger | None = None
        """Ledger of the current epoch, if it is over a stream."""
        self._settled_before: Sequence[int] = ()
        """Batches of the epoch that were settled before it began in this process."""
        self.barrier_every: int | None = None
        """Batches between barriers; None for no barriers within the epoch."""
        self._batches_leased = 0
        """Batches leased so far in this section."""
        self._samples = 0
        self.barriers_announced: list[bool] = []
        """Barriers announced so far, over all epochs: True where only for a snapshot."""
        self.may_announce_barrier = True
        """False while a worker waits at the end of the epoch."""
        self._announced_to: dict[int, int] = {}
        """By worker: number of barriers that were announced to it."""
        self._scheduled_barriers = 0
        """Number of barriers that follow from the number of leased batches."""
        self._waiting: set[int] = set()
        """Workers that have no batch left and wait for the end of the epoch."""
        self._left_early: set[int] = set()
        """Workers whose script has left the epoch early: the others do the remaining batches."""

    @property
    def ledger(self) -> Ledger:
        """Leases of the current epoch."""
        return self._ledger

    def begin(
        self,
        epoch_number: int,
        sizes: Sequence[int],
        barrier_every: int | None = None,
        plan: PlanName = "first-come",
        settled: Sequence[int] = (),
    ) -> None:
        """Start epoch `epoch_number` with batches of these sizes, with a barrier after every `barrier_every` of them.
        Idempotent.

        If some are `settled`, they were trained before, and the others go to the first worker that asks even if the
        plan is in turn. The count of batches between barriers restarts with each section.
        """
        if epoch_number <= self.epoch_number:
            return
        if section_of(epoch_number) != section_of(self.epoch_number):  # the next barrier is a full interval away
            self._batches_leased = self._scheduled_barriers * (barrier_every or 0)
        self.epoch_number, self.barrier_every = epoch_number, barrier_every
        members = sorted(self.members)
        self._ledger = Ledger(sizes, RoundRobin(members) if plan == "in-turn" else FirstCome())
        if plan == "same stream" and self.stream is not None:
            self.stream.begin_again()
        else:
            self.stream = StreamLedger(epoch_number, plan == "own stream") if plan.endswith("stream") else None
        self._settled_before = list(settled)
        if settled:
            self._ledger.roll_back(settled)
        if plan == "one-each":
            self._ledger.reserve_one_each(members)
        self._reset_leases()
        self._left_early.clear()

    def lease(self, worker: int, epoch_number: int) -> DispatchReply:
        """Reply to a free worker; one that asks for a batch of an epoch that is over gets none."""
        if epoch_number != self.epoch_number or worker not in self.members:
            return DispatchReply(None, self._samples)
        announced = self._announced_to.get(worker, 0)
        if announced < len(self.barriers_announced):
            self._announced_to[worker] = announced + 1
            return DispatchReply(None, self._samples, barrier=True, snapshot_only=self.barriers_announced[announced])
        lease = self._ledger.lease(worker) if worker not in self._left_early else None
        if lease is not None:
            self._batches_leased += 1
            self._samples += lease.samples
            self._announce_scheduled()
        return DispatchReply(lease, self._samples)

    def announce_snapshot_barrier(self, worker: int) -> None:
        """Call a barrier for a snapshot, if there is still a batch for the worker that asks."""
        if self.may_announce_barrier and self._with_batch({worker}):
            self.barriers_announced.append(True)

    def settle(self, worker: int, epoch_number: int, batches: Sequence[int], samples: Sequence[int] = ()) -> int:
        """Count these batches, whose updates are in the parameters; return how many were counted.

        Of a stream only the workers know the `samples` of each.
        """
        if epoch_number != self.epoch_number:
            return 0
        if self.stream is not None:
            return self.stream.settle(worker, batches, samples)
        leases = [lease for batch in batches if (lease := self._ledger.leased(batch)) and lease.worker == worker]
        return sum(self._ledger.settle(lease) for lease in leases)

    def lease_pieces(self, worker: int, epoch_number: int, end: int | None = None) -> list[int]:
        """Lease the worker pieces of a stream, which it has read to its `end` if that has a number."""
        if self.stream is None or epoch_number != self.epoch_number or worker not in self.members:
            return []
        if end is not None:
            self.stream.end(worker, end)
        return self.stream.lease(worker, len(self.members))

    def await_end(self, worker: int, epoch_number: int, left_early: bool = False) -> None:
        """Register a worker that waits for the end of the epoch, where its unsettled leases are void: they never count.

        If it gets a further batch before, its next step may train them. The leases of a worker that has `left_early`
        are returned for the others, and it gets no further batch.
        """
        if worker not in self.members or epoch_number != self.epoch_number:
            return
        self._waiting.add(worker)
        if left_early:
            self._left_early.add(worker)
            self._samples -= self._ledger.give_back(worker)

    def pop_released(self) -> dict[int, bool]:
        """Remove and return the workers that stop waiting: True if the epoch is over, False if there are batches."""
        continuing = self._with_batch(self._waiting) | set(filter(self._has_announcement, self._waiting))
        released = dict.fromkeys(continuing, False) or (dict.fromkeys(self._waiting, True) if self.is_over else {})
        self._waiting -= released.keys()
        for worker, is_over in released.items():
            if is_over:
                self._ledger.drop(worker)
        return released

    @property
    def is_over(self) -> bool:
        """True if no worker that does not wait for the end of the epoch holds a batch of it, and none is left."""
        return self._ledger.holders <= self._waiting and not self._with_batch(self.members)

    def _with_batch(self, workers: set[int]) -> Set[int]:
        """Return the workers for which there is a batch."""
        return self._ledger.with_batch(workers - self._left_early)

    def remove(self, worker: int) -> int:
        """Remove a worker that left or failed; return the number of samples whose leases were returned."""
        self.members.discard(worker)
        self._waiting.discard(worker)
        self._left_early.discard(worker)
        self._announced_to.pop(worker, None)
        returned = self._ledger.give_back(worker)
        if self.stream is not None:
            self.stream.give_back(worker)
        self._samples -= returned
        return returned

    def join(self, worker: int, barriers_passed: int) -> None:
        """Add a worker that need not come to the first `barriers_passed` barriers.

        It gets no batch of an epoch that all other workers have left.
        """
        if self.members and self.is_over and self._ledger.with_batch({worker}):
            self._left_early.add(worker)
        self.members.add(worker)
        self._announced_to[worker] = barriers_passed

    def set_announced(self, worker: int, count: int) -> None:
        """Record that a worker has received this number of announcements."""
        self._announced_to[worker] = count

    # --- rollback -----------------------------------------------------------------------------------------------

    def settled_batches(self) -> tuple[int, list[int], list[int], Any]:
        """Return the epoch number, its settled batches, the workers that trained them, and what counts of a stream."""
        stream = self.stream.state() if self.stream is not None else None
        return self.epoch_number, self._ledger.settled, self._ledger.trained_by, copy.deepcopy(stream)

    def roll_back(
        self, epoch_number: int, settled: Sequence[int], trained_by: Sequence[int], stream: Any = None
    ) -> None:
        """Roll back to these settled batches: later settlements and all leases are void.

        Those of an earlier epoch stand for the end of that epoch, before the first batch of this one.
        """
        if epoch_number == self.epoch_number:
            self._ledger.roll_back(settled, trained_by)
        else:
            self._ledger.roll_back(self._settled_before)
        if self.stream is not None:
            former = StreamLedger.restored(stream) if stream is not None else StreamLedger()
            is_same = former.epoch == self.stream.epoch
            self.stream.roll_back(former if is_same else StreamLedger(), epoch_number == self.epoch_number)
        self._reset_leases()

    def _reset_leases(self) -> None:
        self._samples = self._ledger.settled_samples
        self._waiting.clear()

    def _has_announcement(self, worker: int) -> bool:
        return self._announced_to.get(worker, 0) < len(self.barriers_announced)

    def _announce_scheduled(self) -> None:
        """Announce the barriers that follow from the number of batches leased so far."""
        while self.barrier_every is not None and self._scheduled_barriers < self._batches_leased // self.barrier_every:
            self._scheduled_barriers += 1
            if self.may_announce_barrier:
                self.barriers_announced.append(False)

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> Any:
        """Return the state as plain values."""
        values = {name: getattr(self, name) for name in STORED}
        sets = [sorted(each) for each in (self.members, self._waiting, self._left_early)]
        return values, sets, self._ledger.state(), self.stream.state() if self.stream is not None else None

    def load_state(self, state: Any) -> None:
        """Load a state."""
        values, sets, ledger, stream = state
        for name, value in values.items():
            setattr(self, name, value)
        self.members, self._waiting, self._left_early = map(set, sets)
        self._ledger = Ledger.restored(ledger)
        self.stream = StreamLedger.restored(stream) if stream is not None else None
