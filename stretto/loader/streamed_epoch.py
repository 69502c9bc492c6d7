"""The global steps of an epoch over a stream, one batch of this worker at a time.

A stream has no known length, so the workers share in each global step how many samples each of them has got. If the
workers change, the rest of the stream is dealt again from the trained positions on.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from stretto.data.assignment import Range
from stretto.data.leases import RETURNED, SHARED, Lease, PlanName
from stretto.data.shares import SMALLEST_SHARE
from stretto.data.stream_order import StreamOrder, first_untrained, gaps, merged, without
from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Arrangement
from stretto.loader.epoch_order import has_rows, indices_of, part_of, samples_in, unpack, with_stream
from stretto.loader.global_step import GlobalStep
from stretto.loader.stream_reader import (
    KEPT_BYTES,
    STREAM_DEAL,
    STREAM_PLACE,
    Piece,
    StreamDeal,
    StreamPlace,
    StreamReader,
    Work,
    digest_of,
    excerpt,
)
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.transport import Transport
from stretto.transport.interface import Change

NONE = -1
"""Number that a worker without a further batch sends in place of its samples."""
END = object()
"""Sign that nothing follows."""


class StreamSource(Protocol):
    """The source of a stream, as a worker uses it that is given batches which it has passed."""

    def read_again(self, position: int) -> StreamReader | None:
        """Return a reader that has read the stream to a position; None of an iterator, which is read once."""
        ...

    def note_lost(self, batches: int) -> None:
        """Note a number of batches that an iterator does not give again."""
        ...


class StreamedEpoch:
    """The global steps of a stream of unknown length: in each the workers share how many samples they got.

    All workers read one `order`, and each gets every N-th batch; or by `split` its part of each batch; or `is_own` and
    each reads a shard. With `load` the stream is one of indices, and each worker loads the batches that it gets.
    All share the `parts` of earlier batches that were not trained before the rest of the stream. Workers that do not
    wait for each other (`asynchronous`) share nothing, and know only their own samples. The dispatcher leases them the
    pieces of the stream, a few at a time, and each reads the stream to its pieces:

        worker 0   0 2 3 5 ...
        worker 1   1 4 x           fails; 4 and 6 were leased to it, and the server has the work on 4
        worker 2     6 7 8 ...     has joined; 6 is the first piece that is leased then

    A piece is a batch, or by `split` a part of one. The pieces of a worker that fails or leaves, and pieces whose work
    a rollback of the server has undone, are leased again before new ones. Each worker keeps the batches that it reads
    from the first open piece on, as far as they have few bytes, and reads the stream again for others.

    If workers fail or leave, the others agree on the place: the trained positions, without the positions that a failed
    worker had since the last exchange. From the next global step on they deal all other positions among themselves:

        worker 0   0 2 | 4 6     7     each has trained two batches since the exchange |
        worker 1   1 3 | 5 x           and fails: 5 was lost with it
        dealt then           5 7 8 ...

    Where workers wait for each other, each reads the batches of all in a global step, so that all know when fewer are
    left than there are workers. These are divided into a share for each worker:

        worker 0   0 3 | first half of 6        batches 6 and 7 are the last ones
        worker 1   1 4 | second half of 6
        worker 2   2 5 | 7

    Batches that were read since that exchange are kept until the next one for this, also if that is in the next epoch:
    if a worker fails before it, the others train its batches there, at positions below 0. Workers that have joined and
    read the stream to this place take part in the same way (`deal_among_all`). One iterator for several epochs is one
    object of this class, which continues in each.
    """

    dropped = samples = 0

    def __init__(
        self,
        reader: StreamReader,
        order: StreamOrder,
        transport: Transport,
        asynchronous: bool,
        arrangement: Arrangement,
        source: StreamSource,
        split: Callable[[Any, int, int], Any] | None = None,
        is_own: bool = False,
        samples: int = 0,
        load: Callable[[Iterator[Any]], Iterator[Any]] | None = None,
        parts: Sequence[Piece] = (),
        joined: StreamPlace | None = None,
    ) -> None:
        self.reader, self._order, self._transport, self._asynchronous = reader, order, transport, asynchronous
        self._cut, self._split, self._is_own, self._load = arrangement.cut, split, is_own, load
        self._is_dealt = not is_own and split is None
        self._server = transport.server if asynchronous else None
        self._number, self._source = 0, source
        self.is_leased = self._server is not None and not is_own
        """True if workers that do not wait lease the pieces of the stream."""
        self._of = len(transport.members) if self.is_leased and split is not None else 1
        """Number of pieces of a batch that are leased."""
        self._leased = deque[tuple[int, int]]()
        """Numbers of leased pieces that this worker has not read yet, with the recovery epoch of each."""
        self._read_ahead = deque[tuple[int, int | None]]()
        """Numbers of batches that were read and not given to the script yet, with that of a leased one."""
        self._given_last: tuple[int, int | None] = 0, None
        self._held = set[Lease]()
        """Leases of batches that were given to the script and are not settled."""
        self._workers = len(transport.members)
        self._divide = indices_of if load is not None else part_of
        self._shares: tuple[int, list[Piece | None]] | None = None
        """The last global step, as its number since the stream was dealt and the shares of the dealers, once known."""
        self._dealers = self._members = transport.members
        """Workers among which the stream is dealt; and those of the last exchange of sample counts."""
        self._read = self._stepped = self._pieces_read = 0
        """Numbers of batches that were given to the script, that it has stepped with, and of leased pieces read."""
        self._given = dict.fromkeys(self._dealers, 0)
        """Number of batches by worker, as far as this worker knows it, since the stream was dealt among these."""
        self._carried = dict(self._given)
        """Number of them whose work is in the agreed state."""
        self._uncommitted: dict[int, list[tuple[Piece, int]]] = {}
        """Work by worker that no exchange has carried, with its samples."""
        self._returned = list(parts)
        """Parts of earlier batches, such as those of failed workers, which all share before the rest of the stream."""
        self._offered: tuple[Any, int] | None = None
        """This worker's batch of the next global step and its samples, until all workers have exchanged theirs."""
        self._last: Any = None
        """The last batch of this worker, over which it makes a pass of weight 0 in a step that has none for it."""
        self._late: list[tuple[Change, Sequence[Work]]] = []
        """Changes of members, with work of earlier epochs, after the global step whose samples are exchanged now."""
        self._lost_shards: dict[int, int] = {}
        self._shards_ended: set[int] = set()
        """Workers whose own shard has ended."""
        self._has_ended = self._is_unfinished = False
        """True if no worker has found a batch; and if a failed worker's were returned after that."""
        self._samples_so_far = self.samples_resumed = samples
        """Samples given so far, and those of before a resume."""
        self._samples = Counter(joined.samples if joined is not None else {})
        """Samples that each worker was given in this epoch, as far as this worker knows it."""
        self.departed = Counter(joined.departed if joined is not None else {})
        """Samples of this epoch that workers which have failed or left had trained, by worker."""
        self._keeps = transport.repeats_attempts and not is_own and not asynchronous
        self._told: StreamDeal | None = None
        """The numbering of the pieces, as the dispatcher keeps it for workers that join or return."""
        self._begin_reading()

    def begin_count(self, number: int, order: Callable[[], bytes]) -> None:
        """Let the dispatcher count the batches that are trained in the epoch of this number.

        With the `order` of the first worker it keeps how the pieces are numbered, for workers that join or return.
        """
        self._number, is_same = number, self._told is not None
        if self._server is None:
            return
        is_same = b"same" in self._transport.all_gather_bytes(b"same" if is_same else b"")
        place = StreamPlace(
            workers=self._of,
            is_own=self._is_own,
            trained=self._order.trained([0]),
            counts={},
            proofs=self._told.place.proofs if self._told is not None else [],
            start=self.reader.common_start,
            before_last=b"",
            state=None,
            splits=self._split is not None,
            parts=self._returned,
        )
        told = StreamDeal(place, self.samples_resumed)
        with self._server.storing_order(number if self._server.admits_workers else None):
            stored = self._transport.broadcast_bytes(lambda: with_stream(order(), msgspec.msgpack.encode(told)))
        self._told = STREAM_DEAL.decode(unpack(stored).stream)
        self._of = self._told.place.workers  # the first worker's: members may have changed
        plan: PlanName = "own stream" if self._is_own else "same stream" if is_same else "stream"
        self._server.begin_epoch(number, (), None, plan)
        self._recovery_epoch = self._server.recovery_epoch

    def _store_proof(self, number: int, position: int, batch: Any) -> None:
        """Store a digest of this worker's batch, if that doubles the number of its batches."""
        if self._server is None or self._told is None or self._is_own or number & (number - 1):
            return
        proofs = [*self._told.place.proofs, (position, digest_of(excerpt(batch)))]
        self._told = replace(self._told, place=replace(self._told.place, proofs=proofs))
        if self._server.admits_workers:
            order = with_stream(self._server.order[1], msgspec.msgpack.encode(self._told))
            self._server.store_order(self._number, order)

    def take_part(self, number: int, deal: StreamDeal) -> int:
        """Take part in the epoch; no worker waits for it. Return the position to which its stream is read first."""
        assert self._server is not None
        self._number, self._told, self._of = number, deal, deal.place.workers
        self._server.begin_epoch(number, (), None, "stream")
        leased = self._next_leased()
        self._recovery_epoch = self._server.recovery_epoch
        self._leased.extendleft([leased] if leased is not None else [])
        proved = max((position + 1 for position, _ in deal.place.proofs), default=0)
        return max(proved, self._piece(self._transport.number, leased[0])[0]) if leased is not None else proved

    def _begin_reading(self) -> None:
        """Read from this worker's next piece on."""
        self._indices = deque[tuple[bool, tuple[int, str] | None]]()
        """For indices that were read, and whose batch was not given to the script yet: if there are any, and proofs."""
        self._loaded: Any = END
        """Batch that was loaded, and before which this worker has parts without a sample."""
        self._read_ahead.clear()
        self._proof: tuple[int, str] | None = None
        """Proof of the batch that was given to the script last, if its indices were read ahead of it."""
        self._offered = None
        self._items: Iterator[Any] | None = None
        self._keep_needed()

    def _keep_needed(self) -> None:
        """Keep the batches that may be read again: neither in the agreed state nor given to any worker."""
        if not self.is_leased:
            self.reader.keep_from(self._needed() if self._keeps or self._next_piece < len(self._returned) else None)

    def _needed(self) -> int:
        """Return the first position that may be read again, or that is read next."""
        needed = [position for position, _ in self._returned[self._next_piece :]]
        needed.append(self._order.position(0, max(self._next_piece - len(self._returned), 0)))
        return min([*needed, *(position for work in self._uncommitted.values() for (position, _), _ in work)])

    @property
    def _next_piece(self) -> int:
        """Number of the next piece of this worker, or else of the first dealer, among all or among the dealer's."""
        return self._given[self._transport.number if self._asynchronous else self._dealers[0]]

    @property
    def assigned_samples(self) -> int:
        """Number of samples given to all workers so far, without returned samples."""
        return self._samples_so_far

    def is_last(self) -> bool:
        """Return True if the stream has ended, which is read to the first batch of the next global step for it.

        Workers that do not wait, or have a shard each, look for their own next batch. In others the first dealer has a
        piece of each step, this one perhaps none.
        """
        is_alone = not self._is_dealt or self._asynchronous
        if is_alone:
            self.reader.note_state()
        number = self._read if is_alone else self._given[self._dealers[0]]
        if self.is_leased:
            if self._read_ahead:
                return False
            try:
                leased = self._next_leased(is_within_step=True)
            except RollbackRequiredError:  # which all workers make together, after the step
                return False
            if leased is None:
                return True
            self._leased.appendleft(leased)
            number = leased[0]
        position, _ = self._piece(self._transport.number if self._asynchronous else self._dealers[0], number)
        count = position - self.reader.position + 1
        return count > 0 and len(self.reader.peek(count)) < count

    def ask_ahead(self) -> None:
        """Note a step: a stream is read sequentially, and nothing is requested."""
        self._stepped = self._read

    def settle(self, is_counted: Sequence[Any]) -> None:
        """Count the batches of the present workers: the agreed state includes all that was given to them so far."""
        if self._asynchronous:
            self._given[self._transport.number] = self._stepped
        if self._server is not None:
            valid = [one for one in is_counted if one.recovery_epoch == self._server.recovery_epoch]
            self._held.difference_update(is_counted)
            if valid:
                self._server.settle(self._number, [one.batch for one in valid], [one.samples for one in valid])
        for worker in self._transport.members:
            self._carried[worker] = self._given.get(worker, 0)
            self._uncommitted.pop(worker, None)
        self._keep_needed()

    def continue_in_next_epoch(self) -> bool:
        """Begin the next epoch over the same iterator, where this one has ended: batches may lie between its positions.

        Return False, at all workers alike, if workers have failed that the others neither wait for nor replace.
        """
        self._has_ended, self._samples_so_far, self.samples_resumed = False, 0, 0
        self._samples.clear()
        self.departed.clear()
        if self._server is not None:
            dropped = [one.batch for one in self._held if one.recovery_epoch == self._server.recovery_epoch]
            self._server.settle(self._number, dropped, [0] * len(dropped))  # no later step trains them
            self._held.clear()
        if self._asynchronous:
            self._transport.all_gather_bytes(b"")
        return not self._asynchronous or self.is_leased or self._transport.members == self._dealers

    def uncommitted_work(self) -> dict[int, list[Work]]:
        """Return the work of each other worker that no exchange has carried."""
        take, own = self.reader.take, self._transport.number
        return {
            worker: [(take(position) if self._keeps else None, parts, count) for (position, parts), count in given]
            for worker, given in self._uncommitted.items()
            if worker != own
        }

    def uncount(self) -> None:
        """Count no sample of this epoch, since no step was done with any."""
        self._samples.clear()
        self.departed.clear()

    def depart(self, gone: Sequence[int], lost: Mapping[int, int] = MappingProxyType({})) -> None:
        """Count what workers have trained that failed or left, without their `lost` samples."""
        for worker in gone:
            self.departed[worker] += self._samples.pop(worker, 0) - lost.get(worker, 0)

    def next(self) -> GlobalStep | None:
        """Read this worker's next batch and receive the other workers' sample counts."""
        if self._asynchronous:
            batch, own = self._next_batch()
            self._samples_so_far += own
            lease = None
            if self._server is not None and own:
                number, recovery_epoch = self._given_last
                recovery_epoch = self._server.recovery_epoch if recovery_epoch is None else recovery_epoch
                lease = Lease(number, self._transport.number, 0, own, recovery_epoch)
                self._held.add(lease)
            streamed = 1 if self._split is not None else self._workers
            return GlobalStep(batch, lease, own, self._samples_so_far, streamed=streamed) if own else None
        while True:
            replies = [struct.unpack("<q?", one) for one in self._transport.all_gather_bytes(self._offer)]
            assert self._offered is not None
            (batch, own), self._offered = self._offered, None
            found = self._global_step(batch, max(own, 0), [count for count, _ in replies])
            if found is not None and not all(has_batch for _, has_batch in replies):
                raise _without_batch(sum(has_batch for _, has_batch in replies), len(replies))
            if found is not None or self._has_ended:
                return found

    def _global_step(self, batch: Any, own: int, counts: list[int]) -> GlobalStep | None:
        """Return the global step of these counts; None if no worker has a sample in it, as in a batch without any.

        A worker without a sample passes over another batch, with weight 0.
        """
        if len(counts) != len(self._members):  # a server has removed workers during the exchange
            self._members = self._transport.members
        samples = dict(zip(self._members, counts, strict=True))
        self._note_given(samples)
        self._has_ended = all(count == NONE for count in counts)
        self._shards_ended |= {worker for worker, count in samples.items() if self._is_own and count == NONE}
        counts, samples = [max(one, 0) for one in counts], {worker: max(one, 0) for worker, one in samples.items()}
        self._samples.update(samples)
        self._samples_so_far += sum(counts)
        streamed = min(len(counts) - counts.count(0), 1 if self._split is not None else len(self._dealers))
        if self._shares is not None and self._is_last_step(self._given[self._dealers[0]] - 1):
            streamed = len({share[0] for share in self._shares[1] if share is not None})
        for change, earlier in self._late:
            self._deal_again(change.gone, change.members, False, earlier)
        self._late.clear()
        samples = {worker: count for worker, count in samples.items() if worker in self._transport.members}
        if not any(counts):
            return None
        return GlobalStep(
            batch,
            ((0, own),) if own else None,
            own,
            self._samples_so_far,
            sum(samples.values()),
            parts=(lambda worker: samples.get(worker, 0)) if self._transport.repeats_attempts else None,
            streamed=streamed,
        )

    def _offer(self) -> bytes:
        """Return the samples of this worker's next batch. Where the workers have changed since, it is another one."""
        self._members = self._transport.members
        if self._offered is None:
            self._offered = self._next_batch()
        batch, samples = self._offered
        return struct.pack("<q?", samples, samples > 0 or batch is not None)

    def _next_batch(self) -> tuple[Any, int]:
        """Return this worker's next batch, or part of one, and its samples.

        Where it has none in this step, the batch is its last one, or another that it has read; None if it has no such.
        The number of samples is `NONE` then if it has no batch in a later step either.
        """
        while (item := self._next_item()) is not END:
            self._read += 1
            if self._asynchronous:
                self._given_last = number, recovery_epoch = self._read_ahead.popleft()
                if self._server is not None and recovery_epoch not in (None, self._server.recovery_epoch):
                    continue  # a rollback has returned it
            if item is not None and (samples := samples_in(item)):
                batch = self._cut(item)
                self._last = batch if len(self._dealers) > 1 and not self._asynchronous else None
                return batch, samples
            if not self._asynchronous:
                ahead = self.reader.peek(len(self._dealers)) if self._last is None and self._load is None else []
                return next((self._cut(one) for one in ahead if samples_in(one)), self._last), 0
            if self._server is not None:  # a part without a sample
                self._server.settle(self._number, [number], [0])
        return self._last, 0 if self._asynchronous else NONE

    def _next_item(self) -> Any:
        """Return what this worker gets next: a batch, or None in place of a part without a sample; END after the last.

        Batches are loaded of indices that hold a sample only.
        """
        if self._items is None:
            self._items = self._load(self._parts()) if self._load is not None else self._parts()
        if self._load is None:
            return next(self._items, END)
        if self._loaded is END and (not self._indices or self._indices[0][0]):
            self._loaded = next(self._items, END)
        if not self._indices:
            return END
        has_samples, self._proof = self._indices.popleft()
        item, self._loaded = (self._loaded, END) if has_samples else (None, self._loaded)
        return item

    def _note_given(self, samples: Mapping[int, int]) -> None:
        furthest = max(samples.values())
        for worker in self._dealers:
            if (samples.get(worker, NONE) if self._split is None else furthest) == NONE:
                continue
            given = self._given[worker]
            position, parts = self._piece(worker, given)
            if self._split is None and worker == self._transport.number and not self._is_last_step(given):
                self.reader.release(position)
            if self._transport.repeats_attempts:
                self._uncommitted.setdefault(worker, []).append(((position, parts), max(samples.get(worker, 0), 0)))
            self._given[worker] = given + 1

    def _piece(self, worker: int, number: int) -> Piece:
        """Return the piece of a worker that has been given `number` pieces since the stream was dealt."""
        if self.is_leased:
            (number, index), of = divmod(number, self._of), self._of
        else:
            index, of = self._dealers.index(worker), len(self._dealers)
        if self._is_last_step(number) and self._shares is not None and (share := self._shares[1][index]) is not None:
            return share
        at = self._position(number, index if self._is_dealt and not self._asynchronous else 0)
        parts = self._returned[number][1] if number < len(self._returned) else ()
        return at, (*parts, (index, of)) if self._split is not None else parts

    def _position(self, number: int, index: int = 0) -> int:
        """Return the position of a piece by its number; of whole batches, by its number among those of a dealer."""
        returned = len(self._returned)
        return self._returned[number][0] if number < returned else self._order.position(index, number - returned)

    def _is_last_step(self, number: int) -> bool:
        return self._shares is not None and self._shares[0] == number

    def _note_last_step(self, number: int) -> bool:
        """Divide the batches of this global step if fewer are left than there are workers. Return False after it."""
        if self._shares is not None or not self._is_dealt or self._asynchronous:
            return self._shares is None or number <= self._shares[0]
        self.reader.note_state()
        workers = len(self._dealers)
        positions = [self._order.position(index, number) for index in range(workers)]
        batches = [batch for one in positions if (batch := self.reader.look(one)) is not None]
        if 0 < len(batches) < workers and self._last is None and self._load is None:
            self._last = self._cut(batches[0])
        if not positions[0]:
            return True  # the only batch of a stream may be all of the data, such as a graph
        if 0 < len(batches) < workers:
            owners = [worker * len(batches) // workers for worker in range(workers)]
            shares: list[Piece | None] = []
            for worker, batch in enumerate(owners):
                several, part = owners.count(batch), worker - owners.index(batch)
                samples = len(batches[batch]) if self._load is not None else samples_in(batches[batch])
                is_divisible = self._load is not None or has_rows(batches[batch], samples)
                parts = min(max(samples // SMALLEST_SHARE, 1), several) if is_divisible else 1
                piece = (positions[batch], ((part, parts),) if parts > 1 else ())
                shares.append(piece if part < parts else None)
            self._shares = number, shares
        return True

    def _parts(self) -> Iterator[Any]:
        """Yield this worker's batches of the stream, or its part of each; None in place of an empty part."""
        number, own = self._read, self._transport.number
        if self.is_leased:
            yield from self._leased_parts()
        while not self.is_leased and self._note_last_step(number):
            shares = self._shares[1] if self._shares is not None and self._is_last_step(number) else None
            if shares is not None and shares[self._dealers.index(own)] is None:
                return
            position, parts = self._piece(own, number)
            batch = self.reader.take(position)
            if batch is None:
                return
            self._read_ahead.append((number, None))
            number += 1
            yield from self._part(batch, parts)

    def _part(self, batch: Any, parts: Sequence[tuple[int, int]]) -> Iterator[Any]:
        """Yield this worker's part of a batch, or None if it is empty; no empty one of indices."""
        proof = self.reader.proof()
        if self._last is None and self._split is not None and self._load is None and samples_in(batch):
            self._last = self._cut(batch)  # a part of it may have no sample
        for part, of in parts:
            batch = self._divide(batch, part, of) if batch is not None else None
        if self._load is not None:
            self._indices.append((has_samples := batch is not None and len(batch) > 0, proof))
        if self._load is None or has_samples:
            yield batch

    def _leased_parts(self) -> Iterator[Any]:
        """Yield the same of the pieces that this worker leases, until the stream has ended and none is left."""
        assert self._server is not None
        end, lost = None, dict[int, int]()
        while (leased := self._next_leased(end)) is not None or lost:
            number, _ = leased or (0, 0)
            position, parts = self._piece(self._transport.number, number)
            reader = self.reader if leased is None or self.reader.has(position) else self._source.read_again(position)
            if reader is None:
                lost[number], end = position, None
                continue
            if lost:
                self._source.note_lost(len({*lost.values()}))
                self._server.settle(self._number, [*lost], [0] * len(lost))  # no worker can train them
                lost.clear()
            if leased is None:
                continue
            reader.note_state()  # a state of before a trained batch, which proves that it gives the same ones
            self.reader, batch = reader, reader.take(position)
            end = number - number % self._of if batch is None else None
            if batch is not None:
                if self._split is None:
                    reader.release(position)  # the script may change it
                self._read_ahead.append(leased)
                self._pieces_read += 1
                self._store_proof(self._pieces_read, position, batch)
                yield from self._part(batch, parts)

    def _next_leased(self, end: int | None = None, is_within_step: bool = False) -> tuple[int, int] | None:
        """Return the number of this worker's next piece, with its recovery epoch; None if there is none for it now.

        Raises RollbackRequiredError within a step, else all roll back.
        """
        assert self._server is not None
        while True:
            valid = [
                one for one in self._leased if one[1] == self._server.recovery_epoch and (end is None or one[0] < end)
            ]
            self._leased = deque(valid)
            if self._leased and end is None:
                return self._leased.popleft()
            try:
                found = self._server.lease_pieces(self._number, end)
            except RollbackRequiredError:
                if is_within_step:
                    raise
                self._server.roll_back()
                continue
            self._leased.extend((number, self._server.recovery_epoch) for number in found.pieces)
            self._workers, end = found.workers, None
            self.reader.keep_from(self._piece(self._transport.number, found.first_open)[0], KEPT_BYTES)
            if not self._leased:
                return None

    # --- changes of membership ----------------------------------------------------------------------------------

    def change_members(self, change: Change, is_committed: bool, earlier: Sequence[Work] = ()) -> dict[int, int]:
        """Deal the rest of the stream among the members. Return the number of returned samples by failed worker.

        `is_committed` if an exchange that this worker is in has carried all that was given to the failed workers. If
        other workers have begun the global step that this worker exchanges samples for, it has the former members.
        The `earlier` work, of epochs before this one, is dealt with the rest.
        """
        if change.behind and self._offered is not None:
            self._late.append((change, earlier))
            return {}
        return self._deal_again(change.gone, change.members, is_committed, earlier)

    def deal_earlier(self, earlier: Sequence[Work]) -> None:
        """Deal the work of epochs before this one, at its beginning, with the stream."""
        self._deal_again((), self._dealers, False, earlier)

    def _deal_again(
        self, gone: Sequence[int], members: Sequence[int], is_committed: bool, earlier: Sequence[Work]
    ) -> dict[int, int]:
        uncommitted = {worker: self._uncommitted.pop(worker, []) for worker in gone}
        lost = {} if is_committed or self._is_own else uncommitted
        if self._is_own:
            self._lost_shards |= {
                worker: 0 if is_committed else sum(samples for _, samples in of_worker)
                for worker, of_worker in uncommitted.items()
                if worker not in self._shards_ended or (of_worker and not is_committed)
            }
            self.depart(gone, self._lost_shards)
        pieces = [piece for of_worker in lost.values() for piece, _ in of_worker]
        parts = [piece for piece in pieces if self._split is not None or piece[1]]
        samples = {worker: sum(samples for _, samples in of_worker) for worker, of_worker in lost.items()}
        trained, self._returned = self._place(self._given)
        self._returned = sorted([*self._returned, *parts])
        if not self._is_own:
            trained = without(trained, {position for position, _ in pieces if (position, _) not in parts})
        if earlier:
            first = self.reader.put_before([batch for batch, *_ in earlier])
            partly = [(first + number, part) for number, (_, part, _) in enumerate(earlier) if part]
            self._returned = [*partly, *self._returned]
            trained = merged([*((position, position + 1) for position, _ in partly), *trained])
        if self._returned and self._is_dealt:
            self._split, self._is_dealt = self._divide, False  # a share of a batch is divided among all
        self._dealers = tuple(worker for worker in self._dealers if worker in members and worker not in gone)
        self._deal(trained)
        self._samples_so_far -= sum(samples.values())
        self.depart(gone, samples)
        self._is_unfinished |= self._has_ended and bool(pieces or earlier)
        return samples

    def _deal(self, trained: Sequence[Range]) -> None:
        """Deal all but these positions among the dealers."""
        if self._is_own:
            return
        dealers = len(self._dealers) if self._is_dealt and not self._asynchronous else 1
        self._order = StreamOrder(dealers, trained, -self.reader.earlier)
        self._shares = None
        self._given = dict.fromkeys(self._dealers, 0)
        self._carried = dict(self._given)
        self._read = 0
        self._begin_reading()

    def deal_among_all(self, split: Callable[[Any, int, int], Any] | None) -> None:
        """Deal the rest of the stream among all workers, also the joined ones, which have read it to its place.

        They `split` each batch from now on if they did before, or if there is a function for it.
        """
        trained, self._returned = self._place(self._given)
        self._split = self._split or split
        self._is_dealt = self._is_dealt and self._split is None
        self._dealers = self._transport.members
        self._deal(trained)

    # --- batches of a stream whose workers do not wait ------------------------------------------------------------

    @property
    def is_counted(self) -> bool:
        """True if the dispatcher counts the trained batches."""
        return self._server is not None

    def trained(self) -> dict[int, int]:
        """Return the samples of this epoch by worker, over all its incarnations, as the dispatcher counts them."""
        return self._after_rollbacks()[1]

    def _after_rollbacks(self) -> tuple[dict[int, list[Range]], dict[int, int]]:
        """Return the numbers that count and the samples by worker, after any rollback that is required."""
        assert self._server is not None
        while True:
            try:
                found: tuple[dict[int, list[Range]], dict[int, int]] = self._server.settled_of_stream(self._number)
                return found
            except RollbackRequiredError:
                self._server.roll_back()

    def proofs(self) -> list[tuple[int, str]]:
        """Return positions and digests of batches of the stream, which prove that another reader reads the same."""
        last = self.reader.proof()
        return [*(self._told.place.proofs if self._told is not None else ()), *([last] if last is not None else ())]

    def left(self, is_left: bool) -> tuple[int, bool, bool]:
        """Return with all workers how many pieces are left, which they lease then unless a script `is_left` early.

        Return also if one is, and if pieces may be left since the server was rolled back.
        """
        is_left = b"left" in self._transport.all_gather_bytes(b"left" if is_left else b"")
        packed = self._transport.broadcast_bytes(self._count_returned)  # others may lease pieces before this worker
        left = int(packed)
        if left and not is_left:
            self._begin_reading()
        return left, is_left, self._server is not None and self._server.recovery_epoch != self._recovery_epoch

    def _count_returned(self) -> bytes:
        return str(sum(stop - start for start, stop in self._after_rollbacks()[0].get(RETURNED, []))).encode()

    def take_lost_shards(self) -> dict[int, int]:
        """Return the workers whose shard was lost with them, since the last call, with their samples since an exchange.

        Of the rest of such a shard no worker knows the length.
        """
        lost, self._lost_shards = self._lost_shards, {}
        return lost

    def share_of_absent(self) -> dict[int, int]:
        """Return the number of batches that were dealt to each worker that is absent now, once the stream has ended."""
        absent = [worker for worker in self._dealers if worker not in self._transport.members]
        return dict.fromkeys(absent, self.reader.position)

    def untrained_batches(self) -> int:
        """Return the number of batches, or parts, that failed workers had and that no other worker was given."""
        trained, parts = ([], []) if self._asynchronous or self._is_own else self._place(self._given)
        return len(parts) + _count_gaps(trained, -self.reader.earlier)

    def is_unfinished(self) -> bool:
        """Return True if batches were returned after all had been given."""
        return self._is_unfinished

    def reopen(self) -> None:
        """Continue the epoch: batches were returned after all had been given."""
        self._has_ended = self._is_unfinished = False

    # --- the place ----------------------------------------------------------------------------------------------

    def earlier_batches(self) -> int:
        """Return the number of untrained batches of earlier epochs, or parts, which no reader of this stream gives."""
        trained, parts = self._place(self._carried) if self.reader.earlier else ([], [])
        before = [(start, min(stop, 0)) for start, stop in trained if start < 0]
        return _count_gaps([*before, (0, 0)], -self.reader.earlier) + sum(position < 0 for position, _ in parts)

    def _place(self, counts: Mapping[int, int]) -> tuple[list[Range], list[Piece]]:
        """Return the ranges of trained positions, and the parts of them that were not trained, by these counts."""
        if self._is_dealt:
            last, shares = self._shares or (max(counts.values(), default=0), [])
            trained = self._order.trained([min(counts[worker], last) for worker in self._dealers])
            if not any(counts[worker] > last for worker in self._dealers):
                return trained, []
            pairs = [(counts[one] > last, share) for one, share in zip(self._dealers, shares, strict=True) if share]
            late = sorted(share for is_given, share in pairs if not is_given)
            whole = {position for is_given, (position, parts) in pairs if is_given or parts}
            return merged([*trained, *((position, position + 1) for position in whole)]), [
                one for one in late if one[1]
            ]
        if self._is_own:
            return self._order.trained([counts[self._transport.number]]), []
        most = max(counts[worker] for worker in self._dealers)
        late = [self._piece(worker, count) for worker in self._dealers for count in range(counts[worker], most)]
        return self._order.trained([max(most - len(self._returned), 0)]), sorted([*late, *self._returned[most:]])

    def _place_of_server(self) -> tuple[list[Range], list[Piece]]:
        """Return the same of workers that do not wait, by what the server has."""
        assert self._server is not None
        settled = self._server.settled_of_stream(self._number)[0].get(SHARED, [])
        batches, own = -(-settled[-1][1] // self._of) if settled else 0, self._transport.number
        trained = self._order.trained([max(batches - len(self._returned), 0)])
        untrained = (number for each in gaps(settled, batches * self._of) for number in range(*each))
        left = [self._piece(own, number) for number in untrained]
        if self._split is None:
            return without(trained, {position for position, _ in left}), []
        return trained, sorted([*left, *self._returned[batches:]])

    def report(self) -> str:
        """Return what this worker knows of the place, at rest, as text."""
        self.settle(())
        known = {self._transport.number: self._carried[self._transport.number]} if self._asynchronous else self._carried
        place = StreamPlace(
            workers=len(self._dealers),
            is_own=self._is_own,
            trained=self._place(self._carried)[0] if self._is_own else [],
            counts=dict(known),
            proofs=[proof]
            if (proof := self._proof if self._load is not None else self.reader.proof()) is not None
            else [],
            start=self.reader.start if self._is_own else b"",
            before_last=self.reader.before_last() if self._is_own else b"",
            state=self.reader.state_before(first_untrained(self._place(self._carried)[0])) if self._is_own else None,
        )
        return msgspec.json.encode(place).decode()

    def place(self, reports: Sequence[str], is_over: bool) -> str:
        """Return the place of all workers, from the reports of the present ones, as text.

        Without reports it is for workers that join.
        """
        places = [STREAM_PLACE.decode(text) for text in (reports or [self.report()])]
        for one in places:
            self._carried |= {worker: max(count, self._carried.get(worker, 0)) for worker, count in one.counts.items()}
        trained, parts = self._place_of_server() if self.is_leased else self._place(self._carried)
        trained = merged([(max(start, 0), stop) for start, stop in trained if stop > 0])
        parts = [piece for piece in parts if piece[0] >= 0]
        goal = min([first_untrained(trained), *(position for position, _ in parts)])
        state = self.reader.state_before(goal) if not self._is_own else None
        start, read = self.reader.start if not self._is_own else b"", None
        if not reports and not self._is_own:
            start, read = self.reader.share() if not self.earlier_batches() else (b"", None)
        place = StreamPlace(
            workers=len(self._dealers),
            is_own=self._is_own,
            trained=trained,
            counts=dict(self._carried),
            proofs=sorted(proof for one in places for proof in one.proofs) if not self._is_own else [],
            start=start,
            before_last=self.reader.before_last() if not self._is_own else b"",
            state=state,
            is_over=is_over,
            splits=self._split is not None,
            parts=parts,
            read=read,
            samples=dict(self._samples),
            departed=dict(self.departed),
        )
        if state is not None and state.position > place.goal:
            place = replace(place, state=None)
        return msgspec.json.encode(place).decode()


def _count_gaps(ranges: Sequence[Range], first: int) -> int:
    """Return the number of positions from `first` to the end of these sorted ranges that are in none of them."""
    return max((stop for _, stop in ranges), default=first) - first - sum(stop - start for start, stop in ranges)


def _without_batch(found: int, workers: int) -> LoaderError:
    return LoaderError(
        explain(
            "a worker has no batch: its shard of the stream is empty",
            got=f"batches for {found} of {workers} workers",
            expected="a shard with a batch for each worker",
            to_type=f"-n {found}, or a data set of at least {workers} files or shards",
        )
    )
