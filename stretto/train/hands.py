"""The hands of a pass: in each hand every worker gets one batch, or none, and all know how many samples each got."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stretto.errors import LoaderError, explain
from stretto.members.ledger import Dealt, Lease, Ledger
from stretto.train.batches import Share, draw, rebuilt, samples_in, sharded_stream
from stretto.wire import Wire


@dataclass(frozen=True, slots=True)
class Hand:
    """One batch a worker. `batch` is None where this worker has none; `weights` are the samples of every worker."""

    batch: Any
    weights: tuple[int, ...]
    lease: Lease | None

    @property
    def idle(self) -> bool:
        """Whether there is nothing here for a worker: the script's loop does not see the hand."""
        return self.batch is None

    @property
    def short(self) -> bool:
        """Whether some workers have no batch."""
        return 0 in self.weights

    @property
    def teller(self) -> int:
        """The first worker with a batch: it tells the idle ones what happens."""
        return next(worker for worker, weight in enumerate(self.weights) if weight)


class Hands(Protocol):
    """One pass, hand by hand."""

    ledger: Ledger | None
    dropped: int

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
        self._at = 0
        self.dropped = order.dropped
        self.ledger: Ledger | None = Ledger(self._sizes, Dealt(wire.workers))
        _refuse_too_few(sum(self._sizes), wire.workers)

    def next(self) -> Hand | None:
        """Lease this worker's batch of the next hand, and load it."""
        sizes = self._sizes[self._at : self._at + self._wire.workers]
        if not sizes:
            next(self._batches, None)
            return None
        self._at += self._wire.workers
        weights = tuple(sizes) + (0,) * (self._wire.workers - len(sizes))
        if not weights[self._wire.worker]:
            return Hand(None, weights, None)
        assert self.ledger is not None
        return Hand(next(self._batches), weights, self.ledger.lease(self._wire.worker))


class StreamedHands:
    """The hands of a stream, of unknown length: the workers tell each other in each hand what they got."""

    def __init__(self, stream: Iterator[Any], wire: Wire) -> None:
        self._stream, self._wire = stream, wire
        self.ledger: Ledger | None = None
        self.dropped = 0

    def next(self) -> Hand | None:
        """Read this worker's next batch and hear what the others have."""
        batch = next(self._stream, None)
        mine = struct.pack("<q", samples_in(batch) if batch is not None else 0)
        weights = tuple(struct.unpack("<q", one)[0] for one in self._wire.gather(mine))
        return Hand(batch, weights, None) if any(weights) else None


class Dealer:
    """Begins passes over a script's loader."""

    def __init__(self, loader: Any, wire: Wire, join: int) -> None:
        self._loader, self._wire, self._join = loader, wire, join
        self._share: Share | None = None
        if is_leasable(loader):
            _refuse_sharded(loader)
            self._share = Share(lambda: draw(loader, wire, join), wire.worker, wire.workers)
            self._rebuilt = rebuilt(loader, self._share)

    @property
    def leases(self) -> bool:
        """Whether samples are leased and audited, or come from a stream."""
        return self._share is not None

    def deal(self) -> Hands:
        """Begin a pass."""
        if self._share is not None:
            return LeasedHands(self._rebuilt, self._share, self._wire)
        stream = sharded_stream(self._loader, self._wire.worker, self._wire.workers, self._join)
        return StreamedHands(stream, self._wire)

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


def _refuse_too_few(samples: int, workers: int) -> None:
    if samples < workers:
        problem = f"a pass has {samples} samples for {workers} workers"
        raise LoaderError(
            explain(
                problem,
                got=f"{samples} samples",
                expected=f"at least one a worker, {workers}",
                to_type=f"-n {max(samples, 1)}",
            )
        )


def counted(hands: Hands) -> NDArray[np.uint8] | None:
    """How often each sample of the pass was settled at this worker; None for streams."""
    return hands.ledger.counted() if hands.ledger is not None else None
