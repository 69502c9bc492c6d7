"""The hands of a pass: what a worker gets to work on at a time.

When all exchange together every worker gets one batch in each hand, or none, and all know how many samples each got.
When nobody waits a worker's hand is its own: it gets the next batch as soon as it is free.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stretto.data.assignment import BatchAssignment, Range
from stretto.errors import LoaderError, explain
from stretto.loader.epoch_order import (
    Batch,
    EpochOrder,
    ShardedBatchSampler,
    cut_stream,
    draw,
    in_parts,
    interleaved,
    joined,
    rebuilt,
    samples_in,
)
from stretto.loader.global_step import GlobalStep, refuse_too_few
from stretto.loader.leased_batches import LeasedBatchSampler, LeasedEpoch
from stretto.loader.streams import common_stream, own_stream, sharded_by
from stretto.membership.epoch_numbers import epoch_of
from stretto.parameter_server.client import ParameterServerClient
from stretto.recipe.when import When, on_arrival
from stretto.runtime.runtime import Runtime
from stretto.transport import Transport
from stretto.transport.elastic import Change, ElasticTransport

Rule = Literal["per-worker-batch", "global-batch"]
"""What stays under a changed membership: each worker's batch, or the joined one."""


Assignment = Literal["round-robin", "contiguous", "own"]
"""Which batches of an epoch are a worker's: one in N, one stretch of them, or all of a shard of its own."""


class EpochBatches(Protocol):
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

    def settle(self, leases: Sequence[Any]) -> None:
        """The work on these is in the agreed state."""
        ...

    def uncount(self) -> None:
        """No step was made with any sample of this pass: none of them counts."""
        ...

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample of the pass was settled at this worker; None for streams."""
        ...

    def next(self) -> GlobalStep | None:
        """The next hand; None when no worker has anything left."""
        ...


class UncommittedWork:
    """What of a pass no exchange has carried. Nothing is listed before somebody is gone: there may be many workers."""

    def __init__(self, order: EpochOrder, deal: BatchAssignment) -> None:
        self._order, self._deal = order, deal
        self._taken: set[int] = set()

    def take(self, worker: int) -> list[list[Any]]:
        """A worker's batches, once."""
        if worker in self._taken or worker not in self._deal.members:
            return []
        self._taken.add(worker)
        return self._order.among(self._deal.uncommitted_ranges(worker))


class AssignedEpoch:
    """The hands of a map-style loader: all is known beforehand, but for who will be there.

    `found` is the order of a pass that others have begun, and the deal so far.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        share: ShardedBatchSampler,
        wire: Transport,
        found: tuple[EpochOrder, BatchAssignment] | None = None,
    ) -> None:
        share.begin(*found or ())
        self._loader, self._share, self._me = loader, share, number_of(wire)
        self._batches: Iterator[Any] = iter(loader)
        self.order, self.deal = share.order, share.deal
        self.dropped, self.samples = self.order.dropped, self.deal.samples
        self._settled: list[Range] = []
        self._parts = isinstance(wire, ElasticTransport)
        self._since, self._changed = self.deal.global_step, found is not None
        self.is_over = False
        """Whether all hands are dealt."""
        if found is None:
            refuse_too_few(self.samples, wire.workers)

    @property
    def handed(self) -> int:
        """The samples that all have got in this pass, less what was given back."""
        return self.deal.assigned_samples

    @property
    def has_more(self) -> bool:
        """Whether there are samples that no worker has got yet."""
        return self.deal.assigned_samples < self.deal.samples

    def at_rest(self) -> BatchAssignment:
        """The deal so far, at a rest: those who are there have nothing left, though the last hand's may be gone."""
        self.deal.commit()
        return self.deal

    def meetings(self) -> int:
        """All meet at every exchange."""
        return 0

    def ask_ahead(self) -> None:
        """All is known."""

    def settle(self, leases: Sequence[Any]) -> None:
        """Count them. All that was dealt so far is in the agreed state now, the work of the others too."""
        for lease in leases:
            self._settled += lease
        self.deal.commit()

    def uncount(self) -> None:
        """Count none of them here. The pass is over for all."""
        self._settled.clear()

    def counted(self) -> NDArray[np.uint8] | None:
        """How often each sample was settled here."""
        counts = np.zeros(len(self.order.flat), np.uint8)
        for start, stop in self._settled:
            counts[start:stop] += 1
        return counts

    def books(self) -> bytes:
        """What was settled by workers that are not there any more, behind the hand from which on this one knows.

        Nothing when nobody has gone or come in this pass. The smallest is that of the worker that was there longest.
        """
        if not self._changed:
            return b""
        return struct.pack(">q", self._since) + np.packbits(self.deal.counts_of_departed()).tobytes()

    def change(self, change: Change, after: int, committed: int) -> dict[int, int]:
        """Deal to other members behind hand `after`; returns how many samples of whom go back."""
        back = self._regroup(change, after, committed)
        self._load_anew()
        return back

    def uncommitted(self) -> UncommittedWork:
        """What of this pass no exchange has carried."""
        return UncommittedWork(self.order, self.deal.copied())

    def reopen(self) -> None:
        """Something was given back when all seemed to be dealt: the pass goes on."""
        self.is_over = False
        self._load_anew()

    def undealt(self) -> list[list[Any]]:
        """What was given back so late that it was not dealt again in this pass."""
        return self.order.among(self.deal.returned_ranges())

    def extend(self, batches: list[list[Any]]) -> None:
        """Deal these too, behind all others."""
        for one in batches:
            self.order = self._share.extend(one)
            self.deal.append_samples(len(one))
        self._load_anew()

    def _load_anew(self) -> None:
        """Load what is this worker's from here on."""
        self._share.look_ahead()
        self._batches = iter(self._loader)

    def close_with(self, change: Change) -> dict[int, int]:
        """The same when all is dealt: what those who are gone have not brought is left over."""
        return self._regroup(change, self.deal.global_step, self.deal.committed)

    def _regroup(self, change: Change, after: int, committed: int) -> dict[int, int]:
        back = (
            {one: self.deal.uncommitted_samples(one) for one in change.gone}
            if committed < self.deal.global_step
            else {}
        )
        self.deal.change([one for one in change.members if one not in change.came], after, committed)
        if change.came:
            self.deal.change(change.members, after, committed)
        self._changed = True
        return back

    def next(self) -> GlobalStep | None:
        """Deal the next hand, and load this worker's batch of it."""
        portion = self.deal.next(self._me)
        if portion is None:
            self.is_over = True
            self.deal.apply_pending()
            next(self._batches, None)
            return None
        parts = self.deal.last_step_samples() if self._parts else None
        if not portion.ranges:
            return GlobalStep(None, None, 0, self.handed, portion.total, portion.incomplete, parts=parts)
        batch = next(self._batches)
        return GlobalStep(
            batch, portion.ranges, portion.samples, self.handed, portion.total, portion.incomplete, parts=parts
        )


def number_of(wire: Transport) -> int:
    """A worker's number for good; its rank where nobody can go."""
    return wire.number if isinstance(wire, ElasticTransport | ParameterServerClient) else wire.worker


def members_of(wire: Transport) -> tuple[int, ...]:
    """The numbers of all workers that are there."""
    return (
        tuple(wire.members)
        if isinstance(wire, ElasticTransport | ParameterServerClient)
        else tuple(range(wire.workers))
    )


class StreamedHands:
    """The hands of a stream, of unknown length: the workers tell each other in each hand what they got.

    Workers that do not wait for each other (`free`) tell nothing, and know of nobody's samples but their own.
    """

    dropped = samples = 0

    def __init__(self, stream: Iterator[Any], wire: Transport, free: bool, splits: bool = False) -> None:
        self._stream, self._wire, self._free = stream, wire, free
        self._batches = 1 if splits else wire.workers
        """Number of the stream's batches in a global step, at most."""
        self._handed = 0

    def meetings(self) -> int:
        """Nobody knows when that would be."""
        return 0

    def ask_ahead(self) -> None:
        """A stream is read as it comes."""

    def settle(self, leases: Sequence[Any]) -> None:
        """Nothing is leased."""

    def uncount(self) -> None:
        """Do nothing: samples of a stream are not counted."""

    def counted(self) -> NDArray[np.uint8] | None:
        """Nobody knows."""
        return None

    def next(self) -> GlobalStep | None:
        """Read this worker's next batch and hear what the others have."""
        batch = next(self._stream, None)
        own = samples_in(batch) if batch is not None else 0
        if self._free:
            self._handed += own
            return GlobalStep(batch, None, own, self._handed, streamed=self._batches) if own else None
        told = [struct.unpack("<q", one)[0] for one in self._wire.all_gather_bytes(struct.pack("<q", own))]
        total, root = sum(told), next((worker for worker, samples in enumerate(told) if samples), 0)
        self._handed += total
        streamed = min(len(told) - told.count(0), self._batches)
        return GlobalStep(batch, None, own, self._handed, total, 0 in told, root, streamed=streamed) if total else None


class BatchSource:
    """Begins passes over a script's loader."""

    def __init__(
        self,
        loader: Any,
        wire: Transport,
        join: int,
        when: When | None = None,
        meet: int | None = None,
        around: Runtime | None = None,
        rule: Rule = "per-worker-batch",
        base: int | None = None,
        assignment: Assignment | None = None,
        split: bool = False,
    ) -> None:
        self._loader, self._wire, self._join, self._rule = loader, wire, join, rule
        self.splits = split
        """True if all workers share each batch of the script: each has an even part of it."""
        self.assignment, self._is_checked = assignment, assignment is None
        """The script's; a stream that it says nothing of is compared among the workers."""
        self._base = base or wire.workers
        self.members: Callable[[], Sequence[int]] = lambda: members_of(wire)
        """Whom a pass that begins is dealt to."""
        self.peeks: Callable[[], Sequence[int]] = lambda: ()
        """The iterations of the script that were no pass."""
        self._free = isinstance(when, on_arrival)
        if split and assignment in ("contiguous", "own"):
            _refuse_assignment(f'deal="{assignment}" with --batch split', "one of the two")
        if split:
            self._rule, self._base = "global-batch", 1
        self.library: str | None = None
        """The library that gives each worker a shard of a stream, where one is known to."""
        self._share: ShardedBatchSampler | LeasedBatchSampler | None = None
        if is_leasable(loader):
            _refuse_sharded(loader)
            self._share = self._make_share(when, meet)
            if assignment == "own":
                _refuse_assignment("an index-based loader", 'an iterable dataset, or deal="round-robin"')
            self._rebuilt = rebuilt(loader, self._share, (around or Runtime()).loads(loader))

        elif assignment == "contiguous":
            _refuse_assignment("a stream, whose length is unknown", "a loader of a data set with a length")
        elif assignment is None and wire.workers > 1:
            self.library = sharded_by(loader)
            self.assignment = "own" if self.library is not None else None

    def _make_share(self, when: When | None, meet: int | None) -> ShardedBatchSampler | LeasedBatchSampler:
        def order() -> EpochOrder:
            return draw(self._loader, self._wire, self._join, self.peeks(), self._arranged)

        def deals(drawn: EpochOrder) -> BatchAssignment:
            return BatchAssignment((), self.members(), self._rule, self._base, drawn.bounds)

        if not isinstance(when, on_arrival):
            return ShardedBatchSampler(order, deals, number_of(self._wire))
        if not isinstance(self._wire, ParameterServerClient):
            raise TypeError("batches are handed to whoever is free by a server")
        return LeasedBatchSampler(order, self._wire, meet, when.bound == 0 or self.assignment == "contiguous")

    def _arranged(self, batches: list[Batch]) -> list[Batch]:
        """Return the order in which the script's batches are assigned: stretches interleaved, or parts for leases."""
        workers = len(self.members())
        if self.assignment == "contiguous":
            return interleaved(batches, workers * self._join)
        return in_parts(batches, workers) if self.splits and self._free else batches

    @property
    def leases(self) -> bool:
        """Whether samples are leased and audited, or come from a stream."""
        return self._share is not None

    def deal(self, number: int, found: tuple[EpochOrder, BatchAssignment] | None = None) -> EpochBatches:
        """Begin pass `number`, or take part in one that others have begun."""
        if isinstance(self._share, LeasedBatchSampler):
            return LeasedEpoch(self._rebuilt, self._share, number, found)
        if self._share is not None:
            return AssignedEpoch(self._rebuilt, self._share, self._wire, found)
        whole = joined(iter(self._loader), self._join) if self._join > 1 else self._loader
        if self.assignment == "own":
            return StreamedHands(own_stream(whole, self._wire, epoch_of(number) == 1), self._wire, self._free)
        stream = common_stream(whole, self._wire, number, self._is_checked)
        part, parts = self._wire.worker, self._wire.workers
        if parts == 1:
            return StreamedHands(stream, self._wire, self._free)
        if self.splits:
            cut = cut_stream(stream, part, parts)
            own = (one for one in cut if one is not None) if self._free else cut
        else:
            own = islice(stream, part, None, parts)
        return StreamedHands(own, self._wire, self._free, self.splits)

    @property
    def batches_a_step(self) -> int:
        """The number of the script's batches in a global step of all workers."""
        return self._join * (1 if self.splits else self._wire.workers)

    def length(self) -> int:
        """The hands of a pass."""
        if self.assignment == "own" or self.splits:
            return len(self._loader)
        return -(-len(self._loader) // (self._wire.workers * self._join))


def _refuse_assignment(got: str, expected: str) -> None:
    problem = "deal= does not fit"
    raise LoaderError(explain(problem, got=got, expected=expected, to_type="stretto.distribute(...) without deal="))


def is_leasable(loader: Any) -> bool:
    """Whether the loader picks samples of a data set by index, so that ranges of them can be leased."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and not isinstance(loader.dataset, IterableDataset)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(one, DistributedSampler) or getattr(one, "num_replicas", 1) > 1 for one in samplers):
        problem = "the loader's sampler already shares the samples out among workers, as stretto does"
        raise LoaderError(
            explain(
                problem,
                got="a DistributedSampler, or one like it",
                expected="a sampler over all samples",
                to_type="DataLoader(..., shuffle=True)",
            )
        )
