"""The global steps of an epoch, one batch of this worker at a time.

If all workers exchange together, each gets one batch or none in a global step, and knows how many samples every worker
got. If workers do not wait for each other, each gets its next batch as soon as it asks, and steps are its own.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stretto.data.assignment import BatchAssignment, Range
from stretto.data.leases import PlanName
from stretto.data.stream_order import StreamOrder, first_untrained, without
from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Arrangement, Batch
from stretto.loader.epoch_order import (
    EpochOrder,
    IndexBatches,
    ShardedBatchSampler,
    draw,
    in_parts,
    indices_of,
    interleaved,
    is_endless,
    joined,
    loaded,
    part_of,
    rebuilt,
    samples_in,
)
from stretto.loader.global_step import GlobalStep, refuse_too_few
from stretto.loader.leased_batches import LeasedBatchSampler, LeasedEpoch, LeasingLoop
from stretto.loader.stream_reader import CommonRandom, StreamPlace, StreamReader, read_to_place, stateful
from stretto.loader.streams import compare_first, sharded_by
from stretto.membership.epoch_numbers import epoch_of
from stretto.recipe.when import When, on_arrival
from stretto.run_config import ResumeStream
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.runtime import Runtime
from stretto.transport import Transport
from stretto.transport.interface import Change

Rule = Literal["per-worker-batch", "global-batch"]
"""Which batch size stays constant under a changed membership: each worker's, or the global one."""


Assignment = Literal["round-robin", "contiguous", "own"]
"""Which batches a worker gets: one in N, one contiguous stretch, or all of its own shard."""


class EpochBatches(Protocol):
    """One epoch, as a sequence of global steps."""

    dropped: int
    samples: int
    """Number of samples in the epoch; 0 for streams."""

    def ask_ahead(self) -> None:
        """Request the next batch in advance."""
        ...

    def settle(self, is_counted: Sequence[Any]) -> None:
        """Count these leases as trained: the averaged state includes their work."""
        ...

    def uncount(self) -> None:
        """Count no sample of this epoch, since no step was done with any."""
        ...

    def counted(self) -> NDArray[np.uint8] | None:
        """Return how often this worker trained each sample; None for streams."""
        ...

    def next(self) -> GlobalStep | None:
        """Return the next global step; None when no worker has a batch left."""
        ...

    def is_last(self) -> bool:
        """Return True if no batch follows the global step that `next` has returned, unless a worker fails in it."""
        ...


class UncommittedWork:
    """Work of an epoch that no exchange has carried. Batches are listed only for workers that failed."""

    def __init__(self, order: EpochOrder, batch_assignment: BatchAssignment) -> None:
        self._order, self._batch_assignment = order, batch_assignment
        self._taken: set[int] = set()

    def take(self, worker: int) -> list[list[Any]]:
        """Return a worker's uncommitted batches; an empty list when called again."""
        if worker in self._taken or worker not in self._batch_assignment.members:
            return []
        self._taken.add(worker)
        return self._order.among(self._batch_assignment.uncommitted_ranges(worker))


class AssignedEpoch:
    """The global steps of a map-style loader: all assignments are known in advance, except for membership changes.

    `begun` is the order and the assignment so far of an epoch that other workers have begun.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: ShardedBatchSampler,
        transport: Transport,
        begun: tuple[EpochOrder, BatchAssignment] | None = None,
    ) -> None:
        sampler.begin(*begun or ())
        self._loader, self._sampler, self._worker = loader, sampler, transport.number
        self._batches: Iterator[Any] = iter(loader)
        self.order, self.batch_assignment = sampler.order, sampler.batch_assignment
        self.dropped, self.samples = self.order.dropped, self.batch_assignment.samples
        self._trained: list[Range] = []
        self._parts = transport.repeats_attempts
        self._since, self._changed = self.batch_assignment.global_step, begun is not None
        self.is_over = False
        """True if all global steps are assigned."""
        if begun is None:
            refuse_too_few(self.samples, transport.workers)

    @property
    def assigned_samples(self) -> int:
        """Samples assigned to all workers in this epoch, without those that were returned."""
        return self.batch_assignment.assigned_samples

    @property
    def has_more(self) -> bool:
        """True if some samples are not assigned yet."""
        return self.batch_assignment.assigned_samples < self.batch_assignment.samples

    def is_last(self) -> bool:
        """Return True if all samples are assigned."""
        return not self.has_more

    def at_rest(self) -> BatchAssignment:
        """Return the assignment at a rest point, with all of it committed; workers of the last step may have left."""
        self.batch_assignment.commit()
        return self.batch_assignment

    def ask_ahead(self) -> None:
        """Do nothing: the assignment is known in advance."""

    def settle(self, is_counted: Sequence[Any]) -> None:
        """Count these ranges. The averaged state also includes all that was assigned to the other workers so far."""
        for lease in is_counted:
            self._trained += lease
        self.batch_assignment.commit()

    def uncount(self) -> None:
        """Count no sample at this worker. The epoch has ended for all."""
        self._trained.clear()

    def counted(self) -> NDArray[np.uint8] | None:
        """Return how often this worker trained each sample."""
        counts = np.zeros(len(self.order.flat), np.uint8)
        for start, stop in self._trained:
            counts[start:stop] += 1
        return counts

    def departed_counts(self) -> tuple[int, NDArray[np.uint8], dict[int, int]] | None:
        """Return the global step from which on this worker knows the counts of departed workers, and these counts.

        They are those of each sample, and of the samples of each worker. None if the membership did not change in this
        epoch. The least step is that of the worker that has been a member for the longest time.
        """
        if not self._changed:
            return None
        return self._since, self.batch_assignment.counts_of_departed(), self.batch_assignment.samples_of_departed()

    def change_members(self, change: Change, after: int, committed: int) -> dict[int, int]:
        """Assign to other members after global step `after`. Return the number of returned samples by failed worker."""
        returned = self._regroup(change, after, committed)
        self._restart_loader()
        return returned

    def uncommitted(self) -> UncommittedWork:
        """Return the work of this epoch that no exchange has carried."""
        return UncommittedWork(self.order, self.batch_assignment.copied())

    def is_unfinished(self) -> bool:
        """Return True if batches were returned too late to be assigned again in this epoch."""
        return bool(self.unassigned())

    def reopen(self) -> None:
        """Continue the epoch: samples were returned after all had been assigned."""
        self.is_over = False
        self._restart_loader()

    def unassigned(self) -> list[list[Any]]:
        """Return the batches that were returned too late to be assigned again in this epoch."""
        return self.order.among(self.batch_assignment.returned_ranges())

    def append(self, batches: list[list[Any]]) -> None:
        """Append these batches to the epoch."""
        for batch in batches:
            self.order = self._sampler.append(batch)
            self.batch_assignment.append_samples(len(batch))
        self._restart_loader()

    def _restart_loader(self) -> None:
        """Restart the loader from this worker's next batch."""
        self._sampler.look_ahead()
        self._batches = iter(self._loader)

    def change_members_at_end(self, change: Change) -> dict[int, int]:
        """Apply a membership change after all is assigned. Return the uncommitted samples by failed worker."""
        return self._regroup(change, self.batch_assignment.global_step, self.batch_assignment.committed)

    def _regroup(self, change: Change, after: int, committed: int) -> dict[int, int]:
        returned = (
            {worker: self.batch_assignment.uncommitted_samples(worker) for worker in change.gone}
            if committed < self.batch_assignment.global_step
            else {}
        )
        self.batch_assignment.change(
            [worker for worker in change.members if worker not in change.came], after, committed
        )
        if change.came:
            self.batch_assignment.change(change.members, after, committed)
        self._changed = True
        return returned

    def next(self) -> GlobalStep | None:
        """Assign the next global step, and load this worker's batch of it."""
        rank_batch = self.batch_assignment.next(self._worker)
        if rank_batch is None:
            self.is_over = True
            self.batch_assignment.apply_pending()
            next(self._batches, None)
            return None
        parts = self.batch_assignment.last_step_samples() if self._parts else None
        if not rank_batch.ranges:
            return GlobalStep(
                None, None, 0, self.assigned_samples, rank_batch.total, rank_batch.incomplete, parts=parts
            )
        batch = next(self._batches) if self._sampler.enter(rank_batch.ranges) else None
        return GlobalStep(
            batch,
            rank_batch.ranges,
            rank_batch.samples,
            self.assigned_samples,
            rank_batch.total,
            rank_batch.incomplete,
            parts=parts,
        )


Piece = tuple[int, tuple[tuple[int, int], ...]]
"""Work of a global step: the position of a batch, and the part of it, as the numbers of a part and of all parts."""


class StreamedEpoch:
    """The global steps of a stream of unknown length: in each the workers share how many samples they got.

    All workers read one `order`, and each gets every N-th batch; or by `split` its part of each batch; or `is_own` and
    each reads a shard. With `load` the stream is one of indices, and each worker loads the batches that it gets.
    Workers that do not wait for each other (`asynchronous`) share nothing, and know only their own samples; by `ahead`
    each has trained its parts of the first batches already, when the run stopped.

    If workers fail or leave, the others agree on the place: the trained positions, without the positions that a failed
    worker had since the last exchange. From the next global step on they deal all other positions among themselves:

        worker 0   0 2 | 4 6     7     each has trained two batches since the exchange |
        worker 1   1 3 | 5 x           and fails: 5 was lost with it
        dealt then           5 7 8 ...

    Batches that were read since that exchange are kept until the next one for this.
    """

    dropped = samples = 0

    def __init__(
        self,
        reader: StreamReader,
        order: StreamOrder,
        transport: Transport,
        asynchronous: bool,
        arrangement: Arrangement,
        split: Callable[[Any, int, int], Any] | None = None,
        is_own: bool = False,
        samples: int = 0,
        load: Callable[[Iterator[Any]], Iterator[Any]] | None = None,
        ahead: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.reader, self._order, self._transport, self._asynchronous = reader, order, transport, asynchronous
        self._cut, self._split, self._is_own, self._load = arrangement.cut, split, is_own, load
        self._is_dealt = not is_own and split is None
        self._dealers = self._members = transport.members
        """Workers among which the stream is dealt; and those of the last exchange of sample counts."""
        self._read = self._stepped = ahead.get(transport.number, 0)
        """Number of batches that this worker has read, and of those that were followed by a step."""
        self._given = dict.fromkeys(self._dealers, 0) | dict(ahead)
        """Number of batches by worker, as far as this worker knows it, since the stream was dealt among these."""
        self._carried = dict(self._given)
        """Number of them whose work is in the agreed state."""
        self._uncommitted: dict[int, list[tuple[Piece, int]]] = {}
        """Work by worker that no exchange has carried, with its samples."""
        self._returned: list[Piece] = []
        """Parts of failed workers, which all others share before the rest of the stream."""
        self._offered: tuple[Any, int] | None = None
        """This worker's batch of the next global step and its samples, until all workers have exchanged theirs."""
        self._late: list[Change] = []
        """Changes of membership that follow the global step whose samples are exchanged now."""
        self._lost_shards: dict[int, int] = {}
        self._shards_ended: set[int] = set()
        """Workers whose own shard has ended."""
        self._has_ended = self._is_unfinished = False
        """True if no worker has found a batch; and if a failed worker's were returned after that."""
        self._samples_so_far = samples
        self._keeps = transport.repeats_attempts and not is_own and not asynchronous
        self._begin_reading()

    def _begin_reading(self) -> None:
        """Read from this worker's next piece on."""
        self._proofs = deque[tuple[int, str] | None]()
        """Proofs of the batches whose indices were read, and that were not given to the script yet."""
        self._proof: tuple[int, str] | None = None
        """Proof of the batch that was given to the script last, if its indices were read ahead of it."""
        self._offered = None
        self._items = self._load(self._parts()) if self._load is not None else self._parts()
        self._keep_needed()

    def _keep_needed(self) -> None:
        """Keep the batches that may be dealt again: neither in the agreed state nor given to any worker."""
        if self._keeps:
            pieces = [piece for of_worker in self._uncommitted.values() for piece, _ in of_worker]
            pieces += [*self._returned, self._piece(0, self._given[self._dealers[0]])]
            self.reader.keep_from(min(position for position, _ in pieces))

    @property
    def _index(self) -> int:
        return self._dealers.index(self._transport.number) if self._is_dealt else 0

    @property
    def assigned_samples(self) -> int:
        """Number of samples given to all workers so far, without returned samples."""
        return self._samples_so_far

    def is_last(self) -> bool:
        """Return True if the stream has ended, which is read to the first batch of the next global step for it.

        Workers that do not wait, or have a shard each, look for their own next batch.
        """
        position, _ = self._piece(self._index if self._asynchronous else 0, self._read)
        count = position - self.reader.position + 1
        return count > 0 and len(self.reader.peek(count)) < count

    def ask_ahead(self) -> None:
        """Note a step: a stream is read sequentially, and nothing is requested."""
        self._stepped = self._read

    def settle(self, is_counted: Sequence[Any]) -> None:
        """Count the batches of the present workers: the agreed state includes all that was given to them so far."""
        if self._asynchronous:
            self._given[self._transport.number] = self._stepped
        for worker in self._transport.members:
            self._carried[worker] = self._given.get(worker, 0)
            self._uncommitted.pop(worker, None)
        self._keep_needed()

    def uncount(self) -> None:
        """Do nothing: samples of a stream are not counted."""

    def counted(self) -> NDArray[np.uint8] | None:
        """Return None: samples of a stream are not counted."""
        return None

    def next(self) -> GlobalStep | None:
        """Read this worker's next batch and receive the other workers' sample counts."""
        if self._asynchronous:
            batch, own = self._next_batch()
            self._samples_so_far += own
            streamed = 1 if self._split is not None else len(self._dealers)
            return GlobalStep(batch, None, own, self._samples_so_far, streamed=streamed) if own else None
        counts = [struct.unpack("<q", one)[0] for one in self._transport.all_gather_bytes(self._offer)]
        assert self._offered is not None
        (batch, own), self._offered = self._offered, None
        if len(counts) != len(self._members):  # a server has removed workers during the exchange
            self._members = self._transport.members
        samples = dict(zip(self._members, counts, strict=True))
        total, root = sum(counts), next((worker for worker in self._members if samples[worker]), self._members[0])
        self._note_given(samples)
        self._shards_ended |= {worker for worker, count in samples.items() if self._is_own and not count}
        self._samples_so_far += total
        for change in self._late:
            self._deal_again(change.gone, change.members, is_committed=False)
        self._late.clear()
        samples = {worker: count for worker, count in samples.items() if worker in self._transport.members}
        self._has_ended = not total
        if not total:
            return None
        return GlobalStep(
            batch,
            None,
            own,
            self._samples_so_far,
            sum(samples.values()),
            0 in counts,
            root=root,
            parts=(lambda worker: samples.get(worker, 0)) if self._transport.repeats_attempts else None,
            streamed=min(len(counts) - counts.count(0), 1 if self._split is not None else len(self._dealers)),
        )

    def _offer(self) -> bytes:
        """Return the samples of this worker's next batch. Where the workers have changed since, it is another one."""
        self._members = self._transport.members
        if self._offered is None:
            self._offered = self._next_batch()
        return struct.pack("<q", self._offered[1])

    def _next_batch(self) -> tuple[Any, int]:
        """Return this worker's next batch, or part of one, and its samples; None and 0 where there is none."""
        for item in self._items:
            self._read += 1
            self._proof = self._proofs.popleft() if self._load is not None else None
            if item is not None:
                return self._cut(item), samples_in(item)
            if not self._asynchronous:
                break
        return None, 0

    def _note_given(self, samples: Mapping[int, int]) -> None:
        total = sum(samples.values())
        for number, worker in enumerate(self._dealers):
            if not (samples.get(worker) if self._split is None else total):
                continue
            given = self._given[worker]
            position, parts = self._piece(number if self._is_dealt else 0, given)
            if self._split is not None:
                parts = *parts, (number, len(self._dealers))
            elif worker == self._transport.number:
                self.reader.release(position)
            if self._transport.repeats_attempts:
                self._uncommitted.setdefault(worker, []).append(((position, parts), samples.get(worker, 0)))
            self._given[worker] = given + 1

    def _piece(self, index: int, number: int) -> Piece:
        """Return the piece of a dealer that has been given `number` pieces since the stream was dealt."""
        returned = len(self._returned)
        return self._returned[number] if number < returned else (self._order.position(index, number - returned), ())

    def _parts(self) -> Iterator[Any]:
        """Yield this worker's batches of the stream, or its part of each; None in place of an empty part."""
        number, own = self._read, self._dealers.index(self._transport.number)
        while True:
            position, parts = self._piece(self._index, number)
            batch = self.reader.take(position)
            if batch is None:
                return
            number += 1
            if self._load is not None:
                self._proofs.append(self.reader.proof())
            if self._split is not None:
                for part, of in (*parts, (own, len(self._dealers))):
                    batch = self._split(batch, part, of) if batch is not None else None
            yield batch

    # --- changes of membership ----------------------------------------------------------------------------------

    def change_members(self, change: Change, is_committed: bool) -> dict[int, int]:
        """Deal the rest of the stream among the members. Return the number of returned samples by failed worker.

        `is_committed` if an exchange that this worker is in has carried all that was given to the failed workers. If
        other workers have begun the global step that this worker exchanges samples for, it has the former members.
        """
        if change.behind and self._offered is not None:
            self._late.append(change)
            return {}
        return self._deal_again(change.gone, change.members, is_committed)

    def _deal_again(self, gone: Sequence[int], members: Sequence[int], is_committed: bool) -> dict[int, int]:
        uncommitted = {worker: self._uncommitted.pop(worker, []) for worker in gone}
        lost = {} if is_committed or self._is_own else uncommitted
        if self._is_own:
            self._lost_shards |= {
                worker: 0 if is_committed else sum(samples for _, samples in of_worker)
                for worker, of_worker in uncommitted.items()
                if worker not in self._shards_ended or (of_worker and not is_committed)
            }
        pieces = [piece for of_worker in lost.values() for piece, _ in of_worker]
        samples = {worker: sum(samples for _, samples in of_worker) for worker, of_worker in lost.items()}
        trained = self._ranges(self._given)
        if self._split is not None:
            self._returned = self._returned[self._given[self._dealers[0]] :] + sorted(pieces)
        elif not self._is_own:
            trained = without(trained, {position for position, _ in pieces})
        self._dealers = tuple(worker for worker in self._dealers if worker in members)
        if not self._is_own:
            self._order = StreamOrder(len(self._dealers) if self._is_dealt else 1, trained)
            self._given = dict.fromkeys(self._dealers, 0)
            self._carried = dict(self._given)
            self._read = 0
            self._begin_reading()
        self._samples_so_far -= sum(samples.values())
        self._is_unfinished |= self._has_ended and bool(pieces)
        return samples

    def take_lost_shards(self) -> dict[int, int]:
        """Return the workers whose shard was lost with them, since the last call, with their samples since an exchange.

        Of the rest of such a shard no worker knows the length.
        """
        lost, self._lost_shards = self._lost_shards, {}
        return lost

    def share_of_absent(self) -> dict[int, int]:
        """Return the number of batches that were dealt to each worker that is absent now, once the stream has ended."""
        absent = [worker for worker in self._dealers if worker not in self._transport.members]
        read = self.reader.position
        if self._is_dealt:
            return {one: len(range(self._dealers.index(one), read, len(self._dealers))) for one in absent}
        return dict.fromkeys(absent, read)

    def is_unfinished(self) -> bool:
        """Return True if batches were returned after all had been given."""
        return self._is_unfinished

    def reopen(self) -> None:
        """Continue the epoch: batches were returned after all had been given."""
        self._has_ended = self._is_unfinished = False

    # --- the place ----------------------------------------------------------------------------------------------

    def _ranges(self, counts: Mapping[int, int]) -> list[Range]:
        if self._is_dealt:
            return self._order.trained([counts[worker] for worker in self._dealers])
        if self._is_own:
            return self._order.trained([counts[self._transport.number]])
        count, returned = min(counts[worker] for worker in self._dealers), len(self._returned)
        trained = self._order.trained([max(count - returned, 0)])  # a batch counts when all parts of it do
        return without(trained, {position for position, _ in self._returned[count:]})

    def report(self) -> str:
        """Return what this worker knows of the place, at rest, as text."""
        self.settle(())
        known = {self._transport.number: self._carried[self._transport.number]} if self._asynchronous else self._carried
        place = StreamPlace(
            workers=len(self._dealers),
            is_own=self._is_own,
            trained=self._ranges(self._carried) if not self._is_dealt else [],
            counts=dict(known),
            proofs=[proof]
            if (proof := self._proof if self._load is not None else self.reader.proof()) is not None
            else [],
            start=self.reader.start if self._is_own else b"",
            before_last=self.reader.before_last() if self._is_own else b"",
            state=self.reader.state() if self._is_own else None,
        )
        return msgspec.json.encode(place).decode()

    def place(self, reports: Sequence[str], is_over: bool) -> str:
        """Return the place of all workers, from the reports of those that are present, as text."""
        places = [msgspec.json.decode(text, type=StreamPlace) for text in (reports or [self.report()])]
        for one in places:
            self._carried |= {worker: max(count, self._carried.get(worker, 0)) for worker, count in one.counts.items()}
        trained = self._ranges(self._carried)
        goal = first_untrained(trained)
        state = self.reader.state() if not self._is_own else None
        place = StreamPlace(
            workers=len(self._dealers),
            is_own=self._is_own,
            trained=trained,
            counts=dict(self._carried),
            proofs=sorted(proof for one in places for proof in one.proofs) if not self._is_own else [],
            start=self.reader.start if not self._is_own else b"",
            before_last=self.reader.before_last() if not self._is_own else b"",
            state=state if state is not None and state.position <= goal else None,
            is_over=is_over,
        )
        return msgspec.json.encode(place).decode()


class EpochLoop(LeasingLoop, Protocol):
    """The training loop, as the source of its batches uses it."""

    @property
    def peeks(self) -> Sequence[int]:
        """Numbers of the iterations over the loader that were peeks."""
        ...

    @property
    def events(self) -> EventWriter:
        """The events of this worker."""
        ...

    def members(self) -> Sequence[int]:
        """Return the members that an epoch which begins is assigned to."""
        ...

    def kept(self) -> bytes:
        """Return the script's own values, where a worker that joins receives them with the order of the epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Division:
    """Division of the script's batches among the workers."""

    when: When | None
    global_batch_of: int
    """Number of the script's batches that make one batch of a worker."""
    barrier_every: int | None
    """Number of leased batches between two barriers of all workers."""
    rule: Rule
    initial_workers: int
    assignment: Assignment | None
    split: bool
    """True if all workers share each batch of the script: each has an even part of it."""
    resume_stream: ResumeStream | None = None
    """Way to continue a stream of a resumed run; None to bring it to its place."""
    has_checkpoints: bool = True
    """True if the run writes checkpoints, which need what proves a place in a stream."""


class BatchSource:
    """Begins epochs over a script's loader."""

    def __init__(
        self,
        loader: Any,
        transport: Transport,
        loop: EpochLoop,
        division: Division,
        runtime: Runtime,
        arrangement: Arrangement,
    ) -> None:
        assignment, self.splits = division.assignment, division.split
        self._loader, self._transport, self._loop, self._arrangement = loader, transport, loop, arrangement
        self._clock = runtime.clock
        self.streamed: StreamedEpoch | None = None
        """The last epoch over a stream that has begun."""
        self._division, self._global_batch_of = division, division.global_batch_of
        self.assignment, self._is_checked = assignment, assignment is None
        """The script's choice; if it has none, the workers compare the first batches of a stream."""
        self._asynchronous = isinstance(division.when, on_arrival)
        if self.splits and assignment in ("contiguous", "own"):
            _refuse_assignment(f'deal="{assignment}" with --batch split', "one of the two")
        self.library: str | None = None
        """The library that gives each worker a shard of a stream, where one is known to."""
        self._sampler: ShardedBatchSampler | LeasedBatchSampler | None = None
        has_parts = (
            not self.splits
            or (getattr(loader, "batch_size", None) or 0) * division.global_batch_of >= transport.workers
        )
        self.is_indexed = has_index(loader) and is_endless(loader) and assignment != "own" and has_parts
        """True if the workers read the indices of a sampler that does not end, and each loads its own batches."""
        self._processes = runtime.loader_processes(loader) if has_index(loader) else 0
        if is_leasable(loader):
            _refuse_sharded(loader)
            self._sampler = self._create_sampler(division.when)
            if assignment == "own":
                _refuse_assignment("an index-based loader", 'an iterable dataset, or deal="round-robin"')
            self._rebuilt = rebuilt(loader, self._sampler, self._processes)
        elif assignment == "contiguous":
            _refuse_assignment("a stream, whose length is unknown", "a loader of a data set with a length")
        elif assignment is None and transport.workers > 1:
            self.library = sharded_by(loader)
            self.assignment = "own" if self.library is not None else None

    def _create_sampler(self, when: When | None) -> ShardedBatchSampler | LeasedBatchSampler:
        rule, initial_workers = self._division.rule, self._division.initial_workers
        if self.splits:
            rule, initial_workers = "global-batch", 1

        def order() -> EpochOrder:
            loop, arranged = self._loop, self._arranged if self._rearranges() else None
            return draw(self._loader, self._transport, self._global_batch_of, loop.peeks, arranged, loop.kept)

        def assign(drawn: EpochOrder) -> BatchAssignment:
            return BatchAssignment((), self._loop.members(), rule, initial_workers, drawn.bounds)

        if not isinstance(when, on_arrival):
            return ShardedBatchSampler(order, assign, self._transport.number, self._arrangement)
        if self._transport.server is None:
            raise TypeError("a recipe without barriers leases batches through a server")
        several = self._transport.siblings is not None  # their model is split when all of them first call it
        plan: PlanName = "one-each" if several else "first-come"
        plan = "in-turn" if when.bound == 0 or self.assignment == "contiguous" else plan
        return LeasedBatchSampler(order, self._transport.server, self._division.barrier_every, plan)

    def _rearranges(self) -> bool:
        is_cut = self.splits and self._asynchronous
        return self.assignment == "contiguous" or is_cut or self._arrangement.divides_batches

    def _arranged(self, batches: list[Batch]) -> list[Batch]:
        """Return the order in which the script's batches are assigned: stretches interleaved, or parts for leases."""
        workers = len(self._loop.members())
        if self.assignment == "contiguous":
            batches = interleaved(batches, workers * self._global_batch_of)
        elif self.splits and self._asynchronous:
            batches = in_parts(batches, workers)
        return self._arrangement.arranged(batches)

    @property
    def is_counted(self) -> bool:
        """True if samples are counted by index, False for a stream."""
        return self._sampler is not None

    def resume_notice(self) -> str:
        """Return how a resumed run continues this stream, at its first checkpoint; empty if that needs no word."""
        if isinstance(self._loader, list | tuple | range) or self.is_indexed or stateful(self._loader) is not None:
            return ""
        shards = "; each shard continues with the same number of workers only" if self.assignment == "own" else ""
        return (
            "the stream has no state_dict: --resume reads it again to its place, and a digest of the last batch proves "
            f"that it is the same{shards}; a stream that gives other batches at each start, such as a socket, is "
            "resumed with --resume-stream skip or restart"
        )

    @property
    def is_iterator(self) -> bool:
        """True if an epoch continues where the last one has stopped, as a generator does."""
        return not self.is_counted and isinstance(self._loader, Iterator)

    def begin_epoch(
        self,
        number: int,
        begun: tuple[EpochOrder, BatchAssignment] | None = None,
        place: StreamPlace | None = None,
        samples: int = 0,
    ) -> EpochBatches:
        """Begin epoch `number`, or take part in one that other workers have begun, or that stopped at a place.

        `samples` is the number of samples that were trained of one over a stream.
        """
        if self._sampler is not None:
            if isinstance(self._sampler, LeasedBatchSampler):
                return LeasedEpoch(self._rebuilt, self._sampler, self._loop, number, begun)
            return AssignedEpoch(self._rebuilt, self._sampler, self._transport, begun)
        is_own = self.assignment == "own"
        if place is not None and (way := self._division.resume_stream) is not None:
            begins_as_before = way == "restart" and (not is_own or place.workers == self._transport.workers)
            place = replace(place, trained=[], proofs=[], state=None) if begins_as_before else None
        if self.is_iterator and self.streamed is not None:
            reader = self.streamed.reader
            trained = [(0, reader.pass_read_ones(self._transport))]
        else:
            reader, trained = self._reader(number, is_own, place), place.trained if place is not None else []
        if place is not None:
            events = self._loop.events
            try:
                read_to_place(reader, place, self._transport, self._clock, events)
            except LoaderError:
                if place.state is None:
                    raise
                events.notice("the state of the stream gives other batches than were trained: it is read again")
                reader = self._reader(number, is_own, place := replace(place, state=None))
                read_to_place(reader, place, self._transport, self._clock, events)
        workers = self._transport.workers
        if workers > 1 and (epoch_of(number) == 1 and place is None if is_own else self._is_checked):
            compare_first(reader, self._transport, is_own)
            workers = self._transport.workers  # some may have failed
        split: Callable[[Any, int, int], Any] | None = None
        if self.splits and workers > 1 and not is_own:
            split = indices_of if self.is_indexed else part_of
        order = StreamOrder(1 if is_own or split is not None else workers, trained)
        load = functools.partial(loaded, self._loader, self._processes) if self.is_indexed else None
        ahead = dict[int, int]()
        if (
            place is not None
            and split is not None
            and self._asynchronous
            and {*place.counts} == {*self._transport.members}
        ):
            ahead = {worker: count - min(place.counts.values()) for worker, count in place.counts.items()}
        self.streamed = StreamedEpoch(
            reader, order, self._transport, self._asynchronous, self._arrangement, split, is_own, samples, load, ahead
        )
        return self.streamed

    def _reader(self, number: int, is_own: bool, place: StreamPlace | None) -> StreamReader:
        """Return a reader of the stream from its beginning, with all workers."""
        loader = joined(self._loader, self._global_batch_of) if self._global_batch_of > 1 else self._loader
        if self.is_indexed:
            loader = IndexBatches(self._loader, self._global_batch_of)
        keeps_last = self._division.has_checkpoints or self._transport.repeats_attempts
        is_alone = self._transport.workers == 1 and (place is None or place.workers == 1)
        if is_own or is_alone:
            return StreamReader(loader, None, place, keeps_last)
        told = self._transport.broadcast_bytes(lambda: str(torch.initial_seed()).encode())
        return StreamReader(loader, CommonRandom(told + f":{number}".encode()), place, keeps_last)

    @property
    def batches_per_step(self) -> int:
        """The number of the script's batches in a global step of all workers."""
        return self._global_batch_of * (1 if self.splits else self._transport.workers)

    def length(self) -> int:
        """Return the number of global steps of an epoch."""
        if self.assignment == "own" or self.splits:
            return len(self._loader)
        return -(-self._arrangement.length(self._loader) // (self._transport.workers * self._global_batch_of))


def _refuse_assignment(got: str, expected: str) -> None:
    problem = "deal= does not fit"
    raise LoaderError(explain(problem, got=got, expected=expected, to_type="stretto.distribute(...) without deal="))


def has_index(loader: Any) -> bool:
    """Return True if the loader picks samples by index."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and not isinstance(loader.dataset, IterableDataset)


def is_leasable(loader: Any) -> bool:
    """Return True if the loader picks samples by index in epochs that end, so that ranges of them can be assigned."""
    return has_index(loader) and not is_endless(loader)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) or getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers):
        problem = "the loader's sampler already shares the samples out among workers, as stretto does"
        raise LoaderError(
            explain(
                problem,
                got="a DistributedSampler, or one like it",
                expected="a sampler over all samples",
                to_type="DataLoader(..., shuffle=True)",
            )
        )
