"""The hands of workers that do not wait: batches are leased one by one, to whoever is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader

from stretto.data.assignment import BatchAssignment
from stretto.data.leases import Lease
from stretto.loader.epoch_order import Batch, EpochOrder, pack, parted, unpack
from stretto.loader.global_step import GlobalStep, refuse_too_few
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.parameter_server.messages import Leased


class LeasedBatchSampler(BatchSampler):
    """The batches that this worker gets, one after the other, as long as there are any.

    A loader that loads ahead leases ahead. `meet` is after how many batches all workers meet. Where they wait for each
    other in every round the batches are `dealt` in turn, so that a round is the same as behind any other barrier.
    """

    def __init__(
        self, draw: Callable[[], EpochOrder], wire: ParameterServerClient, meet: int | None, dealt: bool
    ) -> None:
        self._draw, self.wire, self._meet, self._dealt = draw, wire, meet, dealt
        self._order: EpochOrder | None = None
        self._begun: tuple[EpochOrder, list[int]] | None = None
        """The order of a pass that was begun in another run, and its batches that were done there."""
        self._number = 0
        self._asked: tuple[int, int] | None = None
        """What was asked ahead, and at which age of the servers."""
        self._bounds: Sequence[int] = ()
        self.leased: deque[tuple[Lease, int]] = deque()
        """Batches on their way through the loader, with the samples that all workers had got then."""
        self.meetings = 0
        self.cuts = 0
        """How many meetings for a cut alone are due."""

    def begin(self, number: int, found: tuple[EpochOrder, BatchAssignment] | None) -> None:
        """A pass begins. Its order is drawn anew when it is asked for, unless it was `found` with the deal so far."""
        self._number, self._order, self._asked = number, None, None
        self._begun = parted(found[0], found[1].remaining()) if found is not None else None
        self.leased.clear()

    def order(self) -> EpochOrder:
        """The order of this pass, drawn with all workers when it is first asked for; then batches can be leased."""
        if self._order is None:
            self._order, settled = self._begun or (self._found(), [])
            self._bounds = self._order.bounds
            if self._keeps and self.wire.order[0] != self._number:
                self.wire.store_order(self._number, pack(self._order))
            if self._begun is not None:
                self.wire.all_gather_bytes(b"begun")  # the cut that comes of it has a number of its own
            self.wire.begin_epoch(self._number, self._order.sizes, self._meet, self._dealt, settled)
        return self._order

    @property
    def _keeps(self) -> bool:
        """Whether the coordinator keeps the order, for a worker that comes later."""
        return self.wire.elastic or self.wire.expected > 1

    def _found(self) -> EpochOrder:
        """The order of this pass: drawn with all, or kept by the coordinator for a worker that comes later."""
        wire, number = self.wire, self._number
        if wire.order[0] == number:
            return unpack(wire.order[1])
        wire.order_epoch = number if self._keeps else None
        order = self._draw()
        wire.order_epoch = None
        return order

    def at_rest(self) -> BatchAssignment:
        """What of this pass is settled, and what is to be dealt again, when nothing of any worker is under way.

        Raises RollbackRequiredError when a server was lost.
        """
        bounds, counted = self.order().bounds, self.wire.sample_counts_once(self._number)[0]
        settled = (batch for batch, start in enumerate(bounds[:-1]) if start < len(counted) and counted[start])
        return BatchAssignment.from_settled(bounds, settled, self.wire.expected)

    def ask_ahead(self) -> None:
        """Ask for the next batch; the answer is waited for when it is needed."""
        if self._asked is None:
            self._asked = self.wire.request_lease(self._number)

    @property
    def has_asked(self) -> bool:
        """Whether a batch was asked for whose answer nobody has waited for."""
        return self._asked is not None

    def settle(self, leases: Sequence[Lease]) -> None:
        """The work on these is in the server's parameters."""
        if batches := [lease.batch for lease in leases if lease.recovery_epoch == self.wire.recovery_epoch]:
            self.wire.settle(self._number, batches)

    def is_over(self, left: bool = False) -> bool:
        """Wait until nobody holds a batch of the pass any more; False when there are batches again."""
        self._asked = None
        try:
            return self.wire.wait_epoch_end(self._number, left)
        except RollbackRequiredError:
            self.wire.roll_back()
            return False

    def counted(self) -> tuple[NDArray[np.uint8], dict[int, int]]:
        """Return the counts of the coordinator: of each sample, and of the samples that each worker has trained."""
        counted, trained = self.wire.sample_counts(self._number)
        return counted.numpy(), trained

    def __iter__(self) -> Iterator[Batch]:
        order = self.order()
        while (lease := self._lease()) is not None:
            yield order.batches[lease.batch]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def hear_calls(self) -> None:
        """Learn of meetings, where no batches are wanted any more."""
        self._lease()
        self.leased.clear()

    def _lease(self) -> Lease | None:
        while True:
            told, age = self._told()
            if told.snapshot_only:
                self.cuts += 1
            elif told.barrier:
                self.meetings += 1
            elif told.batch is None:
                return None
            else:
                start, stop = self._bounds[told.batch : told.batch + 2]
                self.leased.append((Lease(told.batch, self.wire.number, start, stop, age), told.samples_leased))
                return self.leased[-1][0]

    def _told(self) -> tuple[Leased, int]:
        """What was answered, and at which age it was asked; one that is over is gone back from once."""
        while True:
            self.ask_ahead()
            assert self._asked is not None
            asked, self._asked = self._asked, None
            try:
                return self.wire.lease(asked), self.wire.recovery_epoch
            except RollbackRequiredError:
                if asked[1] == self.wire.recovery_epoch:
                    self.wire.roll_back()


class LeasedEpoch:
    """One pass of a worker that does not wait for others."""

    def __init__(
        self,
        loader: DataLoader[Any],
        share: LeasedBatchSampler,
        number: int,
        found: tuple[EpochOrder, BatchAssignment] | None = None,
    ) -> None:
        self._loader, self._share = loader, share
        self._loads_ahead = loader.num_workers > 0
        self.finish: Callable[[], None] | None = None
        """Brings what this worker has computed to the server, and waits until it is there."""
        self.meet: Callable[[int], None] | None = None
        """Meets the others so many times; whoever gives none has to ask for `meetings` after each hand."""
        self.cut_made: Callable[[], None] = lambda: None
        """All have met for a cut, and nothing is under way."""
        share.begin(number, found)
        self._batches: Iterator[Any] = iter(loader)
        self.order = share.order()
        self.dropped = self.order.dropped
        self.samples = found[1].samples if found is not None else self.order.bounds[-1]
        if found is None:
            refuse_too_few(self.samples, share.wire.workers)

    def at_rest(self) -> BatchAssignment:
        """Return the assignment so far, with no update in flight. Raises RollbackRequiredError if a server was lost."""
        return self._share.at_rest()

    def meetings(self) -> int:
        """How often all workers are to meet before the hand that was got last; asked once."""
        due, self._share.meetings = self._share.meetings, 0
        return due

    def ask_ahead(self) -> None:
        """Ask for the next batch while there is something else to do."""
        if not self._loads_ahead:
            self._share.ask_ahead()

    def settle(self, leases: Sequence[Lease]) -> None:
        """Count them at the coordinator."""
        self._share.settle(leases)

    def uncount(self) -> None:
        """Count nothing: the leases of this worker are not settled."""

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample was settled: the coordinator knows of all."""
        return self.audited()[0]

    def audited(self) -> tuple[NDArray[np.uint8], dict[int, int]]:
        """Return the counts of each sample, and of the samples that each worker's incarnations have trained."""
        return self._share.counted()

    def next(self) -> GlobalStep | None:
        """The next batch of this worker, or None when there are none left for anybody, and nobody has one."""
        while True:
            batch = next(self._batches, None)
            self._come_to_meetings()
            if batch is None and self._is_over():
                return None
            if batch is None:
                self._batches = iter(self._loader)
                continue
            lease, handed = self._share.leased.popleft()
            if lease.recovery_epoch == self._share.wire.recovery_epoch:
                return GlobalStep(batch, lease, lease.samples, handed)

    def leave(self) -> None:
        """The script has left the pass, and this worker's work is brought: wait for the others, who do the rest."""
        if self._share.has_asked:  # the answer may be a call, which the others come to
            self._share.hear_calls()
            self._come_to_meetings()
        while not (self._share.is_over(left=True) and self._share.wire.on_snapshot_barrier(False)):
            self._share.hear_calls()
            self._come_to_meetings()

    def _come_to_meetings(self) -> None:
        """Come to those that this worker was told of."""
        while self._share.cuts:
            self._share.cuts -= 1
            self._share.wire.on_snapshot_barrier(True)
            self.cut_made()
        if self.meet is not None:
            self.meet(self.meetings())

    def _is_over(self) -> bool:
        """Bring what this worker has, and wait for the others, who may die and leave theirs to be done again."""
        if self.finish is None:
            return True
        self.finish()
        return self._share.is_over() and self._share.wire.on_snapshot_barrier(False)
