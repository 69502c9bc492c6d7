"""The hands of workers that do not wait: batches are leased one by one, to whoever is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader

from stretto.members.ledger import Lease
from stretto.train.batches import Batch, Order
from stretto.train.hand import Hand, refuse_too_few
from stretto.wire.server import ServerWire


class FreeShare(BatchSampler):
    """The batches that this worker gets, one after the other, as long as there are any.

    A loader that loads ahead leases ahead. `meet` is after how many batches all workers meet. Where they wait for each
    other in every round the batches are `dealt` in turn, so that a round is the same as behind any other barrier.
    """

    def __init__(self, draw: Callable[[], Order], wire: ServerWire, meet: int | None, dealt: bool) -> None:
        self._draw, self.wire, self._meet, self._dealt = draw, wire, meet, dealt
        self._order: Order | None = None
        self._number = 0
        self._asked: int | None = None
        self._bounds: list[int] = []
        self.leased: deque[tuple[Lease, int]] = deque()
        """Batches on their way through the loader, with the samples that all workers had got then."""
        self.meetings = 0

    def forget(self) -> None:
        """The pass is over: the next order is drawn anew."""
        self._order = self._asked = None
        self.leased.clear()

    def order(self) -> Order:
        """The order of this pass, drawn with all workers when it is first asked for; then batches can be leased."""
        if self._order is None:
            self._order = self._draw()
            self._number += 1
            self._bounds = [0, *accumulate(self._order.sizes)]
            self.wire.begin(self._number, self._order.sizes, self._meet, self._dealt)
        return self._order

    def ask_ahead(self) -> None:
        """Ask for the next batch; the answer is waited for when it is needed."""
        if self._asked is None:
            self._asked = self.wire.ask_lease(self._number)

    def settle(self, leases: Sequence[Lease]) -> None:
        """The work on these is in the server's parameters."""
        if leases:
            self.wire.settle(self._number, [lease.batch for lease in leases])

    def __iter__(self) -> Iterator[Batch]:
        order = self.order()
        while (lease := self._lease()) is not None:
            yield order.batches[lease.batch]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _lease(self) -> Lease | None:
        while True:
            self.ask_ahead()
            assert self._asked is not None
            told, self._asked = self.wire.lease(self._asked), None
            if told.meet:
                self.meetings += 1
            elif told.batch is None:
                return None
            else:
                bounds = self._bounds[told.batch : told.batch + 2]
                self.leased.append((Lease(told.batch, self.wire.worker, *bounds), told.handed))
                return self.leased[-1][0]


class FreeHands:
    """One pass of a worker that does not wait for others."""

    def __init__(self, loader: DataLoader[Any], share: FreeShare) -> None:
        self._share = share
        self._loads_ahead = loader.num_workers > 0
        share.forget()
        self._batches: Iterator[Any] = iter(loader)
        order = share.order()
        self.dropped = order.dropped
        self.samples = sum(order.sizes)
        self._counts = np.zeros(self.samples, dtype=np.uint8)
        refuse_too_few(self.samples, share.wire.workers)

    def meetings(self) -> int:
        """How often all workers are to meet before the hand that was got last; asked once."""
        due, self._share.meetings = self._share.meetings, 0
        return due

    def ask_ahead(self) -> None:
        """Ask for the next batch while there is something else to do."""
        if not self._loads_ahead:
            self._share.ask_ahead()

    def settle(self, leases: Sequence[Lease]) -> None:
        """Count them, here and at the coordinator."""
        for lease in leases:
            self._counts[lease.start : lease.stop] += 1
        self._share.settle(leases)

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample was settled here."""
        return self._counts

    def next(self) -> Hand | None:
        """The next batch of this worker, or None when there are none left for anybody."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        lease, handed = self._share.leased.popleft()
        return Hand(batch, lease, lease.samples, handed)
