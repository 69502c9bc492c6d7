"""The hands of a pass: what a worker gets to work on at a time.

When all exchange together every worker gets one batch in each hand, or none, and all know how many samples each got.
When nobody waits a worker's hand is its own: it gets the next batch as soon as it is free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stretto.errors import LoaderError, explain
from stretto.members.ledger import Dealt, Lease, Ledger
from stretto.train.batches import Order, Share, draw, rebuilt, samples_in, sharded_stream
from stretto.train.free import FreeHands, FreeShare
from stretto.train.hand import Hand, refuse_too_few
from stretto.train.surroundings import Surroundings
from stretto.when import When, on_arrival
from stretto.wire import Wire
from stretto.wire.server import ServerWire


class Hands(Protocol):
    """One pass, hand by hand."""

    dropped: int
    samples: int
    """Those of the whole pass; 0 for streams."""

    def meetings(self) -> int:
        """How often all workers are to meet before the hand that was got last; asked once."""
        ...

    def ask_ahead(self) -> None:
        """The next hand is wanted soon."""
        ...

    def settle(self, leases: Sequence[Lease]) -> None:
        """The work on these is in the agreed state."""
        ...

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample of the pass was settled at this worker; None for streams."""
        ...

    def next(self) -> Hand | None:
        """The next hand; None when no worker has anything left."""
        ...


class LeasedHands:
    """The hands of a map-style loader: all is known beforehand."""

    def __init__(self, loader: DataLoader[Any], share: Share, wire: Wire) -> None:
        share.forget()
        self._batches: Iterator[Any] = iter(loader)
        order = share.order()
        self._sizes = order.sizes
        self._wire = wire
        self._at = self._handed = 0
        self.dropped = order.dropped
        self._ledger = Ledger(self._sizes, Dealt(wire.workers))
        self.samples = self._ledger.samples
        refuse_too_few(self.samples, wire.workers)

    def meetings(self) -> int:
        """All meet at every exchange."""
        return 0

    def ask_ahead(self) -> None:
        """All is known."""

    def settle(self, leases: Sequence[Lease]) -> None:
        """Count them."""
        for lease in leases:
            self._ledger.settle(lease)

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample was settled here."""
        return self._ledger.counted()

    def next(self) -> Hand | None:
        """Lease this worker's batch of the next hand, and load it."""
        sizes = self._sizes[self._at : self._at + self._wire.workers]
        if not sizes:
            next(self._batches, None)
            return None
        self._at += self._wire.workers
        total, short = sum(sizes), len(sizes) < self._wire.workers
        self._handed += total
        if self._wire.worker >= len(sizes):
            return Hand(None, None, 0, self._handed, total, short)
        own, lease = sizes[self._wire.worker], self._ledger.lease(self._wire.worker)
        return Hand(next(self._batches), lease, own, self._handed, total, short)


class StreamedHands:
    """The hands of a stream, of unknown length: the workers tell each other in each hand what they got.

    Workers that do not wait for each other (`free`) tell nothing, and know of nobody's samples but their own.
    """

    dropped = samples = 0

    def __init__(self, stream: Iterator[Any], wire: Wire, free: bool) -> None:
        self._stream, self._wire, self._free = stream, wire, free
        self._handed = 0

    def meetings(self) -> int:
        """Nobody knows when that would be."""
        return 0

    def ask_ahead(self) -> None:
        """A stream is read as it comes."""

    def settle(self, leases: Sequence[Lease]) -> None:
        """Nothing is leased."""

    def counted(self) -> NDArray[np.uint8] | None:
        """Nobody knows."""
        return None

    def next(self) -> Hand | None:
        """Read this worker's next batch and hear what the others have."""
        batch = next(self._stream, None)
        own = samples_in(batch) if batch is not None else 0
        if self._free:
            self._handed += own
            return Hand(batch, None, own, self._handed) if own else None
        told = [struct.unpack("<q", one)[0] for one in self._wire.gather(struct.pack("<q", own))]
        total, teller = sum(told), next((worker for worker, samples in enumerate(told) if samples), 0)
        self._handed += total
        return Hand(batch, None, own, self._handed, total, 0 in told, teller) if total else None


class Dealer:
    """Begins passes over a script's loader."""

    def __init__(
        self,
        loader: Any,
        wire: Wire,
        join: int,
        when: When | None = None,
        meet: int | None = None,
        around: Surroundings | None = None,
    ) -> None:
        self._loader, self._wire, self._join = loader, wire, join
        self._free = isinstance(when, on_arrival)
        self._share: Share | FreeShare | None = None
        if is_leasable(loader):
            _refuse_sharded(loader)
            self._share = self._make_share(when, meet)
            self._rebuilt = rebuilt(loader, self._share, (around or Surroundings()).loads(loader))

    def _make_share(self, when: When | None, meet: int | None) -> Share | FreeShare:
        def order() -> Order:
            return draw(self._loader, self._wire, self._join)

        if not isinstance(when, on_arrival):
            return Share(order, self._wire.worker, self._wire.workers)
        if not isinstance(self._wire, ServerWire):
            raise TypeError("batches are handed to whoever is free by a server")
        return FreeShare(order, self._wire, meet, dealt=when.bound == 0)

    @property
    def leases(self) -> bool:
        """Whether samples are leased and audited, or come from a stream."""
        return self._share is not None

    def deal(self) -> Hands:
        """Begin a pass."""
        if isinstance(self._share, FreeShare):
            return FreeHands(self._rebuilt, self._share)
        if self._share is not None:
            return LeasedHands(self._rebuilt, self._share, self._wire)
        stream = sharded_stream(self._loader, self._wire.worker, self._wire.workers, self._join)
        return StreamedHands(stream, self._wire, self._free)

    def length(self) -> int:
        """The hands of a pass."""
        return -(-len(self._loader) // (self._wire.workers * self._join))


def is_leasable(loader: Any) -> bool:
    """Whether the loader picks samples of a data set by index, so that ranges of them can be leased."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and not isinstance(loader.dataset, IterableDataset)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(one, DistributedSampler) for one in samplers):
        problem = "the loader's sampler already shares the samples out among workers, as stretto does"
        raise LoaderError(
            explain(
                problem,
                got="a DistributedSampler",
                expected="a sampler over all samples",
                to_type="DataLoader(..., shuffle=True)",
            )
        )
