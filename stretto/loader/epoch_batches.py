"""The global steps of an epoch, one batch of this worker at a time.

If all workers exchange together, each gets one batch or none in a global step, and knows how many samples every worker
got. If workers do not wait for each other, each gets its next batch as soon as it asks, and steps are its own.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stretto.data.assignment import BatchAssignment, Range, step_bounds
from stretto.data.leases import PlanName
from stretto.data.shares import EVEN, SMALLEST_SHARE, Limits, Paces, parse, stricter
from stretto.data.stream_order import StreamOrder
from stretto.errors import LoaderError, StaysOutError, explain
from stretto.loader.arrangement import Arrangement, Batch
from stretto.loader.epoch_order import (
    Earlier,
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
    pack,
    part_of,
    rebuilt,
    unpack,
)
from stretto.loader.global_step import GlobalStep, refuse_too_few
from stretto.loader.leased_batches import LeasedBatchSampler, LeasedEpoch, LeasingLoop
from stretto.loader.stream_reader import (
    STREAM_DEAL,
    CommonRandom,
    StreamDeal,
    StreamPlace,
    StreamReader,
    read_to_place,
    stateful,
)
from stretto.loader.streamed_epoch import StreamedEpoch
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
        self.departed = Counter[int]()
        """Samples of workers that have failed, other than those of `batch_assignment`: less than 0 if lost later."""
        if begun is None:
            refuse_too_few(self.samples, 1)

    @property
    def assigned_samples(self) -> int:
        """Samples assigned to all workers in this epoch, without those that were returned."""
        return self.batch_assignment.assigned_samples

    @property
    def has_shares(self) -> bool:
        """True if a global step has the same samples with any number of workers."""
        return self.batch_assignment.rule == "shares"

    @property
    def step_samples(self) -> int:
        """Number of samples of the largest global step."""
        return self.batch_assignment.largest_step()

    @property
    def has_room(self) -> bool:
        """True if the workers' limits leave room for the largest step."""
        return self.batch_assignment.has_room

    @property
    def has_moves(self) -> bool:
        """True if the shares change in a coming global step."""
        return self.batch_assignment.has_moves

    def loaded_ahead(self) -> int:
        """Return the global step up to which the loader has requested this worker's batches."""
        return max(self.batch_assignment.global_step, self._sampler.ahead.global_step if self._sampler.ahead else 0)

    def move(self, paces: Paces, after: int) -> None:
        """Divide the global steps that follow step `after` by these paces; no loader has loaded a batch of them."""
        self.batch_assignment.move(paces, after)
        if self._sampler.ahead is not None:
            self._sampler.ahead.move(paces, after)

    def is_last(self) -> bool:
        """Return True if no global step follows, unless one is added for samples that were returned."""
        return self.batch_assignment.is_at_end

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

    def counted(self) -> NDArray[np.uint8]:
        """Return how often this worker trained each sample."""
        counts = np.zeros(len(self.order.flat), np.uint8)
        for start, stop in self._trained:
            counts[start:stop] += 1
        return counts

    def departed_counts(self) -> tuple[int, NDArray[np.uint8], dict[int, int]] | None:
        """Return the global step from which on this worker knows the counts of departed workers, and these counts.

        They are those of each sample, and of the samples of each worker. None if the membership did not change in this
        epoch, which trains nothing that was lost before it. The least step is that of the worker that has been a member
        for the longest time.
        """
        if not self._changed and not self.departed:
            return None
        samples = Counter(self.batch_assignment.samples_of_departed())
        samples.update(self.departed)
        return self._since, self.batch_assignment.counts_of_departed(), dict(samples)

    def change_members(self, change: Change, after: int, committed: int) -> dict[int, int]:
        """Assign to other members after global step `after`. Return the number of returned samples by failed worker."""
        returned = self._regroup(change, after, committed)
        self._restart_loader()
        return returned

    def uncommitted(self) -> UncommittedWork:
        """Return the work of this epoch that no exchange has carried."""
        return UncommittedWork(self.order, self.batch_assignment.copied())

    def is_unfinished(self) -> bool:
        """Return True if samples are left that need steps which `len(loader)` does not count."""
        return (self.is_over or self.batch_assignment.is_at_end) and self.batch_assignment.has_more

    def reopen(self) -> None:
        """Continue the epoch: all loops ask for the samples that are left."""
        self.is_over, self.batch_assignment.is_extended = False, True
        self._restart_loader()

    def leave(self) -> list[list[Any]]:
        """End the epoch, which loops that count leave before it is over; return failed workers' batches."""
        assignment, self.is_over = self.batch_assignment, True
        return self.order.among(assignment.remaining() if assignment.is_at_end else assignment.returned_ranges())

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
            [worker for worker in change.members if worker not in change.came], after, committed, change.share_limits
        )
        if change.came:
            self.batch_assignment.change(change.members, after, committed)
        self._changed = True
        return returned

    def next(self) -> GlobalStep | None:
        """Assign the next global step, and load this worker's batch of it."""
        rank_batch = self.batch_assignment.next(self._worker) if not self.batch_assignment.is_at_end else None
        if rank_batch is None:
            self.is_over = True
            self.batch_assignment.apply_pending()
            next(self._batches, None)
            return None
        parts = self.batch_assignment.last_step_samples() if self._parts else None
        batch = next(self._batches) if rank_batch.loaded and self._sampler.enter(rank_batch.loaded) else None
        return GlobalStep(
            batch, rank_batch.ranges or None, rank_batch.samples, self.assigned_samples, rank_batch.total, parts=parts
        )


class EpochLoop(LeasingLoop, Protocol):
    """The training loop, as the source of its batches uses it."""

    @property
    def events(self) -> EventWriter:
        """The events of this worker."""
        ...

    def members(self) -> Sequence[int]:
        """Return the members that an epoch which begins is assigned to."""
        ...

    def share_limits(self) -> Limits:
        """Return the largest share of each of these members that has run out of memory."""
        ...

    def earlier(self) -> Earlier:
        """Return what a worker that joins within the epoch under way receives with its order."""
        ...

    def note_lost(self, text: str, writes: bool) -> None:
        """Note that batches of a stream were lost; one worker `writes`."""
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
    """True if all workers share each batch of the script: each has a part of it."""
    shares: str = EVEN
    """Division of each global step among the workers, as typed."""
    resume_stream: ResumeStream | None = None
    """Way to continue a stream of a resumed run; None to bring it to its place."""
    drops_uneven: bool = False
    """True if a last step that has fewer whole batches than workers is dropped."""
    limits: Limits = field(default_factory=dict)
    """Largest share of some workers."""
    has_checkpoints: bool = True
    """True if checkpoints are written from the start, which need what proves a place in a stream."""


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
        self.first_workers = division.initial_workers
        """Number of workers that the run first began with, by which an epoch is divided into global steps."""
        has_several = division.initial_workers > 1  # also if others have failed, who return
        self.shares = parse(division.shares if has_several else EVEN)
        self._typed_limits: Limits = division.limits if has_several else {}
        self.earlier_limits: Limits = {}
        """Largest share of workers that had run out of memory in the run that is resumed, unless some are typed."""
        self.paces, self._epoch = self.shares.paces, 1
        """Paces on which the workers have agreed last; none for even shares."""
        self._clock = runtime.clock
        self.streamed: StreamedEpoch | None = None
        """The last epoch over a stream that has begun."""
        self._division, self._global_batch_of = division, division.global_batch_of
        self._keeps_proofs = division.has_checkpoints or transport.repeats_attempts
        self._has_named_dropped = False
        """True once a line has named the samples that `--uneven drop` leaves out."""
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
        asked = f"--shares {division.shares}" if division.shares != EVEN else "--max-batch" if division.limits else ""
        if asked and has_several:
            if not (self._sampler is not None and (self.splits or self._is_divisible())):
                raise _whole_batches(asked, loader, self._sampler is not None)
            _refuse_small_limits(division, loader.batch_sampler.batch_size)

    def _create_sampler(self, when: When | None) -> ShardedBatchSampler | LeasedBatchSampler:
        def order() -> EpochOrder:
            loop, arranged = self._loop, self._arranged if self._rearranges() else None
            drawn = draw(self._loader, self._transport, self._global_batch_of, arranged, loop.earlier)
            steps = len(self._loader) // self.batches_per_step if self._drops_uneven else 0
            if not steps:
                return drawn
            kept = drawn.without_last(steps * self._divided_among())
            if (samples := kept.dropped - drawn.dropped) and not self._has_named_dropped:
                self._has_named_dropped = True
                loop.events.notice(
                    f"--uneven drop: the last step of an epoch has fewer batches than workers, and its {samples:,} "
                    "samples are not trained"
                )
            return kept

        def assign(drawn: EpochOrder) -> BatchAssignment:
            members, base = self._loop.members(), self._divided_among()
            steps = drawn.bounds if self.splits else self._equal_steps(drawn.bounds[-1])
            if steps is None:
                return BatchAssignment((), members, "whole", base, drawn.bounds)
            paces, moves = self.shares.of_epoch(self._epoch) if self.shares.moves else (self.paces, [])
            assignment = BatchAssignment((), members, "shares", base, steps, paces, self.largest_share, self.limits)
            for move in moves:
                assignment.move(move.paces, move.after)
            return assignment

        if not isinstance(when, on_arrival):
            return ShardedBatchSampler(order, assign, self._transport.number, self._arrangement)
        if self._transport.server is None:
            raise TypeError("a recipe without barriers leases batches through a server")
        several = self._transport.siblings is not None  # their model is split when all of them first call it
        plan: PlanName = "one-each" if several else "first-come"
        plan = "in-turn" if when.bound == 0 or self.assignment == "contiguous" else plan
        return LeasedBatchSampler(order, self._transport.server, self._division.barrier_every, plan)

    def _equal_steps(self, samples: int) -> array[int] | None:
        """Return the bounds of the global steps of an epoch, of about one size, in which each worker has a share.

        None where whole batches are assigned: those of one process, of samplers of batches, of `drop_last`, of one
        sample, in stretches or for processes that divide them; and where a share would have less than two samples.
        """
        workers = self._divided_among()
        batches = workers * self._global_batch_of
        if batches == 1 or not self._is_divisible():
            return None
        steps = step_bounds(samples, batches * self._loader.batch_sampler.batch_size)
        return steps if len(steps) > 1 and steps[-1] - steps[-2] >= SMALLEST_SHARE * workers else None

    @property
    def has_shares(self) -> bool:
        """True if the workers share global steps, into which they divide the samples of an epoch."""
        return isinstance(self._sampler, ShardedBatchSampler) and not self.splits and self._is_divisible()

    @property
    def limits(self) -> Limits:
        """Largest share of some workers: as typed, and of workers that have run out of memory."""
        return stricter(self._typed_limits, stricter(self.earlier_limits, self._loop.share_limits()))

    @property
    def keeps_global_batch(self) -> bool:
        """True if global steps are those of the number of workers that the run began with."""
        if not self.has_shares or self._division.rule != "global-batch":
            return False
        return not hasattr(self._loader.sampler, "__len__") or self.has_share_for_each

    @property
    def largest_share(self) -> int | None:
        """Number of samples that a share may have, where a change of the workers changes the global step; else None."""
        keeps_share = self.has_shares and self._division.rule == "per-worker-batch"
        return self._loader.batch_sampler.batch_size * self._global_batch_of if keeps_share else None

    def _divided_among(self) -> int:
        """Return the number of workers by which an epoch that begins is divided into global steps."""
        is_of_now = self._division.rule == "per-worker-batch" and not self._asynchronous
        return len(self._loop.members()) if is_of_now else self.first_workers

    @property
    def _drops_uneven(self) -> bool:
        """True if whole batches are assigned in lockstep, and a last step without a batch for each worker is dropped.

        One process with the global batch drops the same.
        """
        is_whole = isinstance(self._sampler, ShardedBatchSampler) and not self.splits and not self._rearranges()
        return self._division.drops_uneven and is_whole and not self._is_divisible()

    def _is_divisible(self) -> bool:
        """Return True if the samples of an epoch may be divided into other batches than those of the script."""
        sampler = self._loader.batch_sampler
        is_plain = type(sampler) is BatchSampler and not sampler.drop_last and sampler.batch_size >= SMALLEST_SHARE
        return is_plain and not self._rearranges()

    @property
    def has_share_for_each(self) -> bool:
        """True if there are shares, and as many samples that each worker has one of two samples or more."""
        return self.has_shares and self._equal_steps(len(self._loader.sampler)) is not None

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

    def stream_of(self, current: EpochBatches | None) -> StreamedEpoch | None:
        """Return the `current` epoch if it is over a stream, or, between two, that which an iterator will continue."""
        if isinstance(current, StreamedEpoch):
            return current
        return self.streamed if self.is_iterator and current is None else None

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
        self._epoch = epoch_of(number)
        if self._sampler is not None:
            if isinstance(self._sampler, LeasedBatchSampler):
                return LeasedEpoch(self._rebuilt, self._sampler, self._loop, number, begun)
            return AssignedEpoch(self._rebuilt, self._sampler, self._transport, begun)
        if (position := self._transport.join_position) is not None and position.epoch_number == number:
            try:
                return self._take_part(number, STREAM_DEAL.decode(unpack(position.order).stream))
            except StaysOutError:
                self._transport.abandon(stays_out=True)
                raise
        is_own, joins = self.assignment == "own", self._transport.arrives and place is not None
        if joins and place is not None and not place.start:
            why = (
                "each worker has a shard"
                if is_own
                else "it can't read the same batches: the only worker has drawn random numbers in turn with it, or the "
                "others train batches of the epoch before"
            )
            raise StaysOutError(f"a worker cannot join in the middle of a stream of which {why}", returns=not is_own)
        if place is not None and (way := self._division.resume_stream) is not None and not joins:
            begins_as_before = way == "restart" and (not is_own or place.workers == self._transport.workers)
            place = replace(place, trained=[], proofs=[], state=None, parts=[]) if begins_as_before else None
        if self.is_iterator and self.streamed is not None:
            if self.streamed.continue_in_next_epoch():
                return self._begin_count(number, self.streamed)
            reader = self.streamed.reader
            trained = [(0, reader.pass_read_ones(self._transport))]
        else:
            reader, trained = self._reader(number, is_own, place, joins), place.trained if place is not None else []
        if place is not None:
            events = self._loop.events
            reader.keep_from(place.goal if joins else None)
            try:
                read_to_place(reader, place, self._transport, self._clock, events, joins)
            except LoaderError:
                if place.state is None:
                    raise
                events.notice("the state of the stream gives other batches than were trained: it is read again")
                reader = self._reader(number, is_own, place := replace(place, state=None))
                read_to_place(reader, place, self._transport, self._clock, events)
        workers = self._transport.workers
        if joins and place is not None:
            compare_first(reader, self._transport, is_own, place.counts)
        elif workers > 1 and (epoch_of(number) == 1 and place is None if is_own else self._is_checked):
            compare_first(reader, self._transport, is_own)
        workers = self._transport.workers  # some may have failed
        parts = place.parts if place is not None else []
        split = self._split(is_split=bool(parts) or (joins and place is not None and place.splits))
        order = StreamOrder(1 if is_own or split is not None or self._asynchronous else workers, trained)
        load = functools.partial(loaded, self._loader, self._processes) if self.is_indexed else None
        self.streamed = StreamedEpoch(
            reader,
            order,
            self._transport,
            self._asynchronous,
            self._arrangement,
            self,
            split,
            is_own,
            samples,
            load,
            parts,
            place if joins else None,
        )
        return self._begin_count(number, self.streamed)

    def _begin_count(self, number: int, streamed: StreamedEpoch) -> StreamedEpoch:
        """Begin to count the trained batches of a stream, and keep its dealing for workers that return."""
        loop = self._loop
        streamed.begin_count(
            number,
            lambda: pack(dataclasses.replace(EpochOrder.of([]), earlier=loop.earlier())),
        )
        return streamed

    def _take_part(self, number: int, deal: StreamDeal) -> EpochBatches:
        """Take part in an epoch over a stream that workers at a server train already."""
        place = deal.place
        if place.is_own:
            raise StaysOutError("a worker cannot join in the middle of a stream of which each worker has a shard")
        reader = self._reader(number, False, place, joins=True)
        split = self._split(is_split=True) if place.splits else None
        order = StreamOrder(1, place.trained)
        load = functools.partial(loaded, self._loader, self._processes) if self.is_indexed else None
        self.streamed = StreamedEpoch(
            reader,
            order,
            self._transport,
            True,
            self._arrangement,
            self,
            split,
            False,
            deal.samples,
            load,
            place.parts,
        )
        goal = self.streamed.take_part(number, deal)
        read_to_place(reader, place, self._transport, self._clock, self._loop.events, joins=True, alone_to=goal)
        return self.streamed

    def admit(self, current: EpochBatches | None) -> None:
        """Wait until workers that join have read the stream of this epoch to its place, and deal its rest among all."""
        if isinstance(current, StreamedEpoch) and self.assignment != "own":
            read_to_place(current.reader, None, self._transport, self._clock, self._loop.events, joins=True)
            compare_first(current.reader, self._transport, False, ())
            current.deal_among_all(self._split())

    def _split(self, is_split: bool = False) -> Callable[[Any, int, int], Any] | None:
        """Return the function that divides each batch among the workers; None where each has whole ones."""
        if not is_split and (not self.splits or self._is_alone or self.assignment == "own"):
            return None
        return indices_of if self.is_indexed else part_of

    @property
    def _is_alone(self) -> bool:
        """True if there is no other worker: one to which others at a server may return reads and divides as all do."""
        server = self._transport.server
        return self._transport.workers == 1 and (server is None or server.expected == 1)

    def _reader(self, number: int, is_own: bool, place: StreamPlace | None, joins: bool = False) -> StreamReader:
        """Return a reader of the stream from its beginning, with all workers, or at a worker that joins."""
        loader = joined(self._loader, self._global_batch_of) if self._global_batch_of > 1 else self._loader
        if self.is_indexed:
            loader = IndexBatches(self._loader, self._global_batch_of)
        is_alone = self._is_alone and (place is None or place.workers == 1)
        if joins:  # its random states are those of the place
            return StreamReader(loader, CommonRandom(None), place, self._keeps_proofs)
        if is_own or is_alone:
            return StreamReader(loader, None, place, self._keeps_proofs)
        told = self._transport.broadcast_bytes(lambda: str(torch.initial_seed()).encode())
        return StreamReader(loader, CommonRandom(told + f":{number}".encode()), place, self._keeps_proofs)

    def note_lost(self, batches: int) -> None:
        """Note a number of batches that an iterator does not give again."""
        self._loop.note_lost(
            f"{batches:,} batches, which a failed worker has not trained or a killed shard of the server has undone, "
            "and which an iterator does not give again",
            writes=True,
        )

    def read_again(self, position: int) -> StreamReader | None:
        """Return a reader that has read the stream of this epoch to a position; None of an iterator."""
        epoch = self.streamed
        if self.is_iterator or epoch is None:
            return None
        place = StreamPlace(0, False, [], {}, epoch.proofs(), epoch.reader.start, b"", None)
        loader = joined(self._loader, self._global_batch_of) if self._global_batch_of > 1 else self._loader
        if self.is_indexed:
            loader = IndexBatches(self._loader, self._global_batch_of)
        reader = StreamReader(loader, CommonRandom(None), place, self._keeps_proofs)
        read_to_place(reader, None, self._transport, self._clock, self._loop.events, alone_to=position)
        return reader

    def keep_proofs(self) -> bool:
        """Keep from now on what proves a place in a stream; return True if it was not kept before, of the one read."""
        had, self._keeps_proofs = self._keeps_proofs, True
        if had or self.streamed is None:
            return False
        self.streamed.reader.keep_last()
        return True

    @property
    def batches_per_step(self) -> int:
        """The number of the script's batches in a global step of all workers."""
        return self._global_batch_of * (1 if self.splits else self._divided_among())

    def resume(self, first_workers: int, earlier_limits: Limits) -> None:
        """Divide epochs as the run did that is resumed, or joined; typed limits replace earlier ones."""
        self.first_workers = first_workers
        self.earlier_limits = {} if self._division.limits else earlier_limits

    def length(self) -> int:
        """Return the number of global steps of an epoch in which no worker fails.

        It is the same with any number of workers now, unless `--on-resize per-worker-batch` goes by these.
        """
        if self.assignment == "own" or self.splits:
            return len(self._loader)
        batches = self._arrangement.length(self._loader)
        if self._drops_uneven and batches >= self.batches_per_step:
            return batches // self.batches_per_step
        return -(-batches // self.batches_per_step)


def _refuse_assignment(got: str, expected: str) -> None:
    problem = "deal= does not fit"
    raise LoaderError(explain(problem, got=got, expected=expected, to_type="stretto.distribute(...) without deal="))


def _refuse_small_limits(division: Division, batch: int) -> None:
    """Raise LoaderError if the workers that the run begins with have no room for the samples of a global step."""
    workers = range(division.initial_workers)
    samples = batch * division.global_batch_of * (1 if division.split else len(workers))
    room = sum(division.limits.get(worker, samples) for worker in workers)
    if room < samples:
        typed = ",".join(f"{worker}:{limit}" for worker, limit in division.limits.items())
        smaller = room // (samples // batch)
        raise LoaderError(
            explain(
                "--max-batch leaves no room for the samples of a global step",
                got=f"--max-batch {typed}, {room} samples in all, for steps of {samples}",
                expected=f"at least {samples} in all, or a worker without a limit",
                to_type=f"DataLoader(..., batch_size={smaller})"
                if smaller >= SMALLEST_SHARE
                else "a larger --max-batch",
            )
        )


def _whole_batches(asked: str, loader: Any, has_index: bool) -> LoaderError:
    """Return the error for shares of batches that are not divided."""
    got = "a stream, whose samples have no index"
    if has_index:
        is_dropped = getattr(loader.batch_sampler, "drop_last", False)
        got = "drop_last=True" if is_dropped else "whole batches: of one sample, of a batch sampler, in stretches"
    return LoaderError(
        explain(
            f"{asked} divides the samples of each global step, and this loader's batches stay whole",
            got=got,
            expected="a DataLoader over a map-style data set, with batch_size=2 or more, without drop_last",
            to_type=f"no {asked.split()[0]}; or --batch split" if has_index else f"no {asked.split()[0]}",
        )
    )


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
