"""Request handler of a shard: its parameters, and the collective operations of all workers that go through it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stretto.codecs import Codec, CodecContext
from stretto.collective_ops import AllGather, AllReduceMean, CollectiveOp, answer
from stretto.errors import RecipeError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import DTYPES, Chunks, FramingError, concatenated, dtype_name
from stretto.parameter_server.handler import (
    UPDATE_REPLY,
    OutgoingMessage,
    PendingRequests,
    ShardCollectives,
    listed,
)
from stretto.parameter_server.row_tables import ROW_NUMBERS, RowTable
from stretto.parameter_server.shard import Reply, Shard, Update, by_name
from stretto.parameter_server.snapshots import SnapshotStore
from stretto.parameter_server.versioned_buffers import Version
from stretto.recipe.parser import import_paths, parse
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import OnParameters
from stretto.recipe.when import on_arrival

UPDATES_KEPT = 64
"""Updates of a worker that it may not have reported to the dispatcher, whose replies it awaits between some of them."""


class WorkerCopy:
    """One worker's copy of a shard's parameters, as the encoded replies so far have reproduced it."""

    def __init__(self, codec: Codec, theta: Sequence[Tensor], context: CodecContext) -> None:
        self._codec = codec
        self._theta = [flat.clone() for flat in theta]
        self._states = [codec.init_state(flat, context) for flat in theta]

    def encode(self, newest: Sequence[Tensor]) -> list[Tensor]:
        """Return the messages that move the worker's copy towards the newest parameters; later ones carry what they
        omit."""
        return [
            self._encode(flat, newest_flat, state)
            for flat, newest_flat, state in zip(self._theta, newest, self._states, strict=True)
        ]

    def last(self, newest: Sequence[Tensor]) -> None:
        """Note that the worker received the parameters unencoded."""
        for flat, newest_flat in zip(self._theta, newest, strict=True):
            flat.copy_(newest_flat)

    def _encode(self, flat: Tensor, newest_flat: Tensor, state: Any) -> Tensor:
        message = self._codec.encode(newest_flat - flat, state)
        if message.numel():
            self._codec.add_to(flat, message)
        return message


class _UpdateBatches:
    """Batches in a worker's last updates of the current epoch, which it may not have reported to the dispatcher yet."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._epoch_number = 0
        self._updates: dict[int, m.Push] = {}
        self._counted: m.CountedWork | None = None

    def note(self, body: m.Push) -> None:
        """Note an update that has arrived, though it may not be applied yet."""
        if body.epoch_number != self._epoch_number:
            self._epoch_number, self._updates = body.epoch_number, {}
        if body.batches:
            self._updates[body.seq] = body
            self._updates.pop(body.seq - UPDATES_KEPT, None)

    def counted(self, shard: Shard | None) -> m.CountedWork:
        """Return the batches whose work is in the parameters, or will be even though the incarnation has ended."""
        if self._counted is not None:
            return self._counted
        member = shard.members.get(self._worker) if shard is not None else None
        received = [one for one in self._updates.values() if member and member.has_received(one.seq)]
        batches = [batch for one in received for batch in one.batches]
        samples = [size for one in received for size in (one.samples, *[0] * (len(one.batches) - 1))]
        return m.CountedWork(self._epoch_number, batches, samples)

    def end(self, shard: Shard | None) -> None:
        """Store the result of `counted` when the incarnation ends: the shard's record of the worker is removed then."""
        self._counted = self.counted(shard)


class ShardHandler:
    """A shard of the parameters, and the collective operations of all workers that go through it."""

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float],
        on_nan: str,
        store: SnapshotStore | None = None,
        boot_id: int = 0,
    ) -> None:
        self._workers, self._on_nan = workers, on_nan
        self._store, self._boot_id = store, boot_id
        newest = store.get(max(store.snapshots(), default=-1)) if store is not None else None
        self._recovery_epoch = 0 if newest is None else -1
        """Number of rollbacks so far; -1 for a restarted process that does not know it yet."""
        self._members = set(range(workers))
        self._batches_by_worker: dict[int, _UpdateBatches] = {}
        self._pending = PendingRequests(clock)
        self._collectives = ShardCollectives(range(workers), _combine, self._pending, clock)
        if newest is not None:
            self._collectives.name_contributors()
        self._shard: Shard | None = None
        self._recipe = Recipe()
        self._parameter_set = 0
        self._update_layout: list[tuple[str, int]] = []
        """Dtype and length of each tensor of an update; the greatest length if it varies."""
        self._last_snapshot = -1
        """Newest snapshot that this process has taken."""
        self._is_stored = True
        """True if there was space for it."""
        self._copies: dict[int, WorkerCopy] = {}
        """By worker: its copy of the parameters, if replies are encoded."""
        self._kept: dict[int, Version] = {}
        """By worker: the version in its last reply, if the worker and the shard move by the same difference."""
        self._joined: set[int] = set()
        """Workers that have joined since this process started."""
        if newest is not None:
            self._set_members(newest[0]["members"])

    def expects(self, worker: int, header: m.Header) -> None:
        """Check that an update has the lengths of this shard's ranges in the recipe's encoding."""
        body = header.body
        if not isinstance(body, m.Push | m.ReadRows) or body.recovery_epoch != self._recovery_epoch:
            return
        shard = self._opened_shard(body.parameter_set)
        if worker not in shard.members:
            raise FramingError(f"worker {worker} has left")
        if isinstance(body, m.ReadRows):
            tables = shard.tables[body.table : body.table + 1]
            if [dtype for dtype, _ in header.tensors] != [ROW_NUMBERS] or not _has_rows(tables, header.tensors):
                raise FramingError(f"a request for {listed(header.tensors)} of table {body.table}")
            return
        if not math.isfinite(body.lr):
            raise FramingError(f"an update with a learning rate of {body.lr}")
        ranges = len(self._update_layout)
        if not self._fits(header.tensors[:ranges]) or not _are_row_changes(shard.tables, header.tensors[ranges:]):
            raise FramingError(f"an update of {listed(header.tensors)} for a shard of {listed(self._update_layout)}")

    def _fits(self, tensors: Sequence[tuple[str, int]]) -> bool:
        if self._recipe.how.fixed_size:
            return list(tensors) == self._update_layout
        return len(tensors) == len(self._update_layout) and all(
            dtype_name == expected and length <= max_length
            for (dtype_name, length), (expected, max_length) in zip(tensors, self._update_layout, strict=True)
        )

    def streams(self, worker: int, header: m.Header) -> bool:
        """Return True for updates that are applied chunk by chunk as they arrive."""
        body = header.body
        if not isinstance(body, m.Push) or not self._recipe.how.elementwise or self._shard is None:
            return False
        if body.recovery_epoch != self._recovery_epoch:
            return False
        return self._shard.draft(worker, body.seq, body.version)

    def write(self, worker: int, index: int, offset: int, chunk: Tensor) -> None:
        """Apply a chunk of an update."""
        assert self._shard is not None
        self._shard.write(worker, index, offset, self._decoded_piece(chunk, self._shard.current.ranges[index]))

    def take(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a complete message."""
        body, request_id = header.body, header.request_id
        if self._is_stale(body):
            return [OutgoingMessage(worker, request_id, m.StaleRequest(self._recovery_epoch))]
        if isinstance(body, m.Push):
            return self._push(worker, request_id, body, tensors)
        if isinstance(body, m.Contribute | m.ExchangeTensors):
            return self._contribute(worker, header, body, tensors)
        if isinstance(body, m.Read):
            return self._read(worker, request_id, body.flush)
        if isinstance(body, m.ReadRows):
            return self._read_rows(worker, request_id, body, tensors)
        if isinstance(body, m.ReadRuleState):
            return self._read_rule_state(worker, request_id)
        if isinstance(body, m.Open):
            return self._open(worker, header, body, tensors)
        if isinstance(body, m.EnterBarrier):
            is_current = (
                self._shard is not None and body.recovery_epoch == self._recovery_epoch
            )  # else it holds no worker back
            replies = self._shard.enter_barrier(worker, body.seq, body.barrier) if self._shard and is_current else []
            return [OutgoingMessage(worker, request_id, m.Result()), *self._delayed_replies(replies)]
        if isinstance(body, m.Group):
            self._collectives.group(body.generation, body.members)
            return []
        return self._of_members(worker, request_id, body)

    def _is_stale(self, body: m.Body) -> bool:
        """Return True if a request is of another recovery epoch; a restarted process accepts parameters of any."""
        if isinstance(body, m.Open):
            return body.recovery_epoch < self._recovery_epoch
        return (
            isinstance(body, m.Push | m.Read | m.ReadRows | m.ReadRuleState | m.Snapshot)
            and body.recovery_epoch != self._recovery_epoch
        )

    def _of_members(self, worker: int, request_id: int, body: m.Body) -> list[OutgoingMessage]:
        """Process messages about members and rollbacks."""
        if isinstance(body, m.Finish | m.Quit):
            remove_worker = self.remove if isinstance(body, m.Quit) else self.leave
            return [OutgoingMessage(worker, request_id, m.Result()), *remove_worker(worker)]
        if isinstance(body, m.Join):
            return self._join(worker, request_id)
        if isinstance(body, m.ResumeClock):
            if self._shard is not None:
                self._shard.enter(worker, body.clock)
            return [OutgoingMessage(worker, request_id, m.Result())]
        if isinstance(body, m.Snapshot):
            self._take_snapshot(body.op)
            return [
                OutgoingMessage(
                    worker, request_id, m.SnapshotList([body.op] * self._is_stored, self._boot_id, self._recovery_epoch)
                )
            ]
        if isinstance(body, m.ListSnapshots):
            return [
                OutgoingMessage(
                    worker,
                    request_id,
                    m.SnapshotList(self._store.snapshots() if self._store else [], self._boot_id, self._recovery_epoch),
                )
            ]
        if isinstance(body, m.RequestRollback):
            recovery_epoch = self._recovery_epoch
            reply, messages = self._roll_back(body), []
            if recovery_epoch < 0 <= self._recovery_epoch:
                messages = self._set_members(body.members)
            if self._recovery_epoch != recovery_epoch:
                messages = [*self._reject_held_back(), *messages]
            return [OutgoingMessage(worker, request_id, reply), *messages]
        raise FramingError(f"unexpected message {type(body).__name__} for a shard")

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """Note that a worker has left: no worker waits for its updates any more."""
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._delayed_replies(replies), *self._collectives.leave(worker)]

    def remove(self, worker: int, ended: m.IncarnationEnded | None = None) -> list[OutgoingMessage]:
        """Remove a worker whose incarnation ended."""
        self._batches_of(worker).end(self._shard)
        self._drop_kept(worker)
        self._members.discard(worker)
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._collectives.remove(worker), *self._delayed_replies(replies)]

    def work_of(self, worker: int) -> m.CountedWork:
        """Return the batches of the worker's updates of this epoch that are in the parameters."""
        return self._batches_of(worker).counted(self._shard)

    def _batches_of(self, worker: int) -> _UpdateBatches:
        return self._batches_by_worker.setdefault(worker, _UpdateBatches(worker))

    # --- members ------------------------------------------------------------------------------------------------

    def _join(self, worker: int, request_id: int) -> list[OutgoingMessage]:
        """Add a joining worker; the records of its previous incarnation are dropped."""
        self._pending.forget(worker)
        self._members.add(worker)
        self._joined.add(worker)
        self._batches_by_worker[worker] = _UpdateBatches(worker)
        self._collectives.join(worker)
        if self._shard is None:
            return [OutgoingMessage(worker, request_id, m.Joined(self._recovery_epoch))]
        replies = self._shard.join(worker)
        self._reset_copy(worker, self._shard.current.ranges)
        body = m.Joined(self._recovery_epoch, parameter_set=self._parameter_set, clock=self._shard.slowest_rounds())
        return [OutgoingMessage(worker, request_id, body), *self._delayed_replies(replies)]

    def _set_members(self, members: Sequence[int]) -> list[OutgoingMessage]:
        """Take over the present members, of which a restarted process may not know all; return the messages due."""
        messages = []
        for worker in sorted(self._members - set(members) - self._joined):
            messages += self.remove(worker)
        for worker in sorted(set(members) - self._members):
            self._members.add(worker)
            self._collectives.join(worker)
            if self._shard is not None:
                messages += self._delayed_replies(self._shard.join(worker))
                self._reset_copy(worker, self._shard.current.ranges)
        return messages

    def _reset_copy(self, worker: int, theta: Sequence[Tensor]) -> None:
        reply = self._recipe.how.reply
        self._drop_kept(worker)
        if reply is not None:
            self._copies[worker] = WorkerCopy(reply, theta, CodecContext(worker, self._workers))

    # --- rollback -----------------------------------------------------------------------------------------------

    def _take_snapshot(self, number: int) -> None:
        """Take a snapshot, once."""
        if self._store is None or self._shard is None or number <= self._last_snapshot:
            return
        facts, tensors = self._shard.state()
        members = {"members": sorted(self._members)}
        summary = {"arena": self._parameter_set, "recipe": self._recipe.spelled(), **members, **facts}
        self._last_snapshot, self._is_stored = number, self._store.put(number, summary, tensors)

    def _roll_back(self, body: m.RequestRollback) -> m.Body:
        """Begin a new recovery epoch, once, unless the request names an earlier process of this shard."""
        if body.boot_id != self._boot_id or body.recovery_epoch < self._recovery_epoch:
            return m.StaleRequest(self._recovery_epoch)
        if body.recovery_epoch == self._recovery_epoch:
            return m.Result()
        if self._store is not None and body.snapshot < 0:  # no worker has continued from the initial parameters
            self._store.discard_after(body.snapshot)
            self._recovery_epoch = body.recovery_epoch
            return m.Result()
        stored = self._store.get(body.snapshot) if self._store is not None else None
        if self._store is None or stored is None:
            return m.StaleRequest(self._recovery_epoch)
        facts, tensors = stored
        self._store.discard_after(body.snapshot)
        self._recovery_epoch, self._last_snapshot = body.recovery_epoch, body.snapshot
        theta = [flat.clone() for flat in tensors[: facts["ranges"]]]
        self._restart(parse(facts["recipe"]), facts["arena"], theta, facts["widths"])
        assert self._shard is not None
        self._shard.restore(facts, tensors)
        self._shard.exempt_all()
        return m.Result()

    def _reject_held_back(self) -> list[OutgoingMessage]:
        """Reply to workers whose update was held back that their recovery epoch is over."""
        blocked = sorted(worker for worker in self._members if self._pending.is_pending(worker, UPDATE_REPLY))
        return [
            OutgoingMessage(worker, self._pending.pop(worker, UPDATE_REPLY)[0], m.StaleRequest(self._recovery_epoch))
            for worker in blocked
        ]

    def _restart(self, recipe: Recipe, parameter_set: int, theta: list[Tensor], widths: Sequence[int]) -> None:
        assert isinstance(recipe.when, on_arrival)
        assert isinstance(recipe.then, OnParameters)
        self._shard = Shard(theta, recipe.when, recipe.then, self._workers, widths)
        for worker in sorted(self._shard.members.keys() - self._members):
            self._shard.leave(worker)
        for worker in sorted(self._members - self._shard.members.keys()):
            self._shard.join(worker)
        self._recipe, self._parameter_set = recipe, parameter_set
        self._update_layout = [_update_layout(recipe.how, flat) for flat in self._shard.current.ranges]
        self._copies, self._batches_by_worker = {}, {}
        for worker in sorted(self._members):
            self._reset_copy(worker, theta)

    def _opened_shard(self, parameter_set: int) -> Shard:
        if self._shard is None or parameter_set != self._parameter_set:
            raise FramingError(f"no parameters {parameter_set} were given to this shard (it has {self._parameter_set})")
        return self._shard

    def _open(self, worker: int, header: m.Header, body: m.Open, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if self._shard is not None and (body.parameter_set, self._shard.is_untouched) < (self._parameter_set, True):
            current = self._parameter_set
            raise FramingError(f"outdated parameters {body.parameter_set}: this shard trains parameters {current}")
        unknown = [path for path in import_paths(body.recipe) if path.rpartition(".")[0] not in sys.modules]
        if unknown:
            raise FramingError(f"a message imports no module: start the run with --recipe to use {unknown[0]}")
        try:
            recipe = parse(body.recipe)
        except RecipeError as error:
            raise FramingError(str(error)) from None
        if not isinstance(recipe.when, on_arrival) or not isinstance(recipe.then, OnParameters):
            raise FramingError(f"{recipe} applies nothing on arrival")
        integers = [dtype for dtype, _ in header.tensors if not DTYPES[dtype].is_floating_point]
        if integers:
            raise FramingError(f"parameters of {', '.join(integers)}, which can't be added to")
        flat = [concatenated(chunks, dtype).clone() for chunks, (dtype, _) in zip(tensors, header.tensors, strict=True)]
        parts = len(flat) // (1 + len(body.names))
        _check_widths(recipe, body.widths, flat[:parts])
        self._restart(recipe, body.parameter_set, flat[:parts], body.widths)
        assert self._shard is not None
        self._shard.restore_rule(by_name(body.names, flat[parts:], parts), body.arrivals)
        self._recovery_epoch = body.recovery_epoch
        self._take_snapshot(body.snapshot)
        return [OutgoingMessage(worker, header.request_id, m.Result())]

    def _push(self, worker: int, request_id: int, body: m.Push, tensors: list[Chunks]) -> list[OutgoingMessage]:
        shard = self._opened_shard(body.parameter_set)
        ranges = shard.current.ranges
        numbers = [self._decoded(chunks, like) for chunks, like in zip(tensors[: len(ranges)], ranges, strict=True)]
        rows = [
            table.change_of(concatenated(of_rows, ROW_NUMBERS), concatenated(changes, dtype_name(table.flat)))
            for table, of_rows, changes in zip(
                shard.tables, tensors[len(ranges) :: 2], tensors[len(ranges) + 1 :: 2], strict=True
            )
        ]
        if self._pending.is_pending(worker, UPDATE_REPLY):
            raise FramingError(f"an update of worker {worker} while its last is held back")
        released = shard.push(Update(worker, body.seq, body.version, body.samples, numbers, body.lr, rows))
        self._batches_of(worker).note(body)
        replies = [*released, *shard.pull(worker)]
        immediate = next((reply for reply in replies if reply.worker == worker), None)
        if immediate is None:
            self._pending.note(worker, UPDATE_REPLY, request_id)
            return self._delayed_replies(replies)
        replies.remove(immediate)
        return [self._push_reply(immediate, request_id, 0.0), *self._delayed_replies(replies)]

    def _decoded(self, chunks: Chunks, like: Tensor) -> Chunks:
        """Decode an update's chunks; a codec may write into its second argument."""
        how = self._recipe.how
        if how.elementwise:
            return [self._decoded_piece(chunk, like) for chunk in chunks]
        if not chunks:
            return [torch.zeros_like(like)]
        try:
            return [how.decode(torch.cat(chunks), torch.empty_like(like))]
        except (TransportError, ValueError) as error:
            raise FramingError(f"an update that does not encode {like.numel()} numbers as {how}: {error}") from None

    def _decoded_piece(self, chunk: Tensor, like: Tensor) -> Tensor:
        return self._recipe.how.decode(chunk, chunk if chunk.dtype == like.dtype else like.new_empty(chunk.numel()))

    def _delayed_replies(self, replies: Sequence[Reply]) -> list[OutgoingMessage]:
        """Return the replies to the workers that had to wait."""
        return [self._push_reply(reply, *self._pending.pop(reply.worker, UPDATE_REPLY)) for reply in replies]

    def _push_reply(self, reply: Reply, request_id: int, blocked_s: float) -> OutgoingMessage:
        worker, version = reply.worker, reply.version
        self._drop_kept(worker)
        if reply.refused and self._on_nan == "stop":
            version.release()
            return OutgoingMessage(worker, request_id, m.Refused("the update holds NaN or infinity"))
        applied = [(update.seq, update.version, update.staleness, update.samples) for update in reply.applied]
        body = m.PushReply(version.number, applied, list(reply.refused), blocked_s)
        if worker in self._copies:
            messages = self._copies[worker].encode(version.ranges)
            version.release()
            return OutgoingMessage(worker, request_id, body, messages)
        assert self._shard is not None
        if self._shard.moves_both:
            self._kept[worker] = version.acquire()
        again = functools.partial(self._push_reply_again, worker, request_id, body)
        return OutgoingMessage(worker, request_id, body, version.ranges, version.release, again)

    def _push_reply_again(self, worker: int, request_id: int, body: m.PushReply) -> OutgoingMessage:
        """Return the same reply once more: with the newest version, unless exactly this one had to be kept."""
        assert self._shard is not None
        version = self._kept[worker].acquire() if worker in self._kept else self._shard.read(worker)
        body = msgspec.structs.replace(body, version=version.number)
        return OutgoingMessage(worker, request_id, body, version.ranges, version.release)

    def _drop_kept(self, worker: int) -> None:
        if (version := self._kept.pop(worker, None)) is not None:
            version.release()

    def _read(self, worker: int, request_id: int, flush: bool) -> list[OutgoingMessage]:
        if self._shard is None:
            raise FramingError("this shard has no parameters")
        if flush:
            self._shard.flush()
        version = self._shard.read(worker)
        if worker in self._copies:
            self._copies[worker].last(version.ranges)
        applied = self._shard.take_applied(worker)
        body = m.PushReply(
            version.number, [(update.seq, update.version, update.staleness, update.samples) for update in applied]
        )
        return [OutgoingMessage(worker, request_id, body, version.ranges, version.release)]

    def _read_rows(
        self, worker: int, request_id: int, body: m.ReadRows, tensors: list[Chunks]
    ) -> list[OutgoingMessage]:
        shard = self._opened_shard(body.parameter_set)
        numbers = shard.tables[body.table].checked(concatenated(tensors[0], ROW_NUMBERS))
        rows = shard.read_rows(worker, body.table, numbers)
        return [OutgoingMessage(worker, request_id, m.Rows(), [rows.flatten()])]

    def _read_rule_state(self, worker: int, request_id: int) -> list[OutgoingMessage]:
        if self._shard is None:
            raise FramingError("this shard has no parameters")
        self._shard.flush()
        stored = self._shard.rule_state()
        body = m.RuleStateReply(list(stored), self._shard.arrivals)
        return [
            OutgoingMessage(
                worker, request_id, body, [tensor.clone() for tensors in stored.values() for tensor in tensors]
            )
        ]

    def _contribute(
        self, worker: int, header: m.Header, body: m.Contribute | m.ExchangeTensors, tensors: list[Chunks]
    ) -> list[OutgoingMessage]:
        if len(tensors) != 1:
            raise FramingError(f"{len(tensors)} tensors in a contribution of one")
        flat, request_id = concatenated(tensors[0], header.tensors[0][0]), header.request_id
        if isinstance(body, m.ExchangeTensors):
            return self._collectives.exchange(worker, request_id, body, flat)
        op = AllReduceMean(flat) if body.kind == "mean" else AllGather(flat)
        return self._collectives.contribute(worker, body.op, request_id, op, body.received_up_to)


def _update_layout(how: Codec, theta: Tensor) -> tuple[str, int]:
    """Return the dtype and the greatest length of a range's message."""
    message = (
        how.encode(theta[:0].clone(), None) if how.linear and how.elementwise else theta.new_empty(0, dtype=torch.uint8)
    )
    return dtype_name(message), how.bytes_of(theta) // message.element_size()


def _has_rows(tables: Sequence[RowTable], tensors: Sequence[tuple[str, int]]) -> bool:
    """Return True if there is a table, with at least as many rows as the tensor has numbers."""
    return len(tables) == 1 and tensors[0][1] <= len(tables[0])


def _are_row_changes(tables: Sequence[RowTable], tensors: Sequence[tuple[str, int]]) -> bool:
    """Return True if the tensors are the numbers and the changes of rows of each table."""
    if len(tensors) != 2 * len(tables):
        return False
    return all(
        of_rows[0] == ROW_NUMBERS
        and of_rows[1] <= len(table)
        and changes == (dtype_name(table.flat), of_rows[1] * table.width)
        for table, of_rows, changes in zip(tables, tensors[::2], tensors[1::2], strict=True)
    )


def _check_widths(recipe: Recipe, widths: Sequence[int], theta: Sequence[Tensor]) -> None:
    """Raise FramingError for tables that do not fit the parameters, or that the recipe's server can't add rows to."""
    if not widths:
        return
    is_fitting = len(widths) == len(theta) and list(widths) == sorted(widths, key=bool) and min(widths) >= 0
    if not is_fitting or any(width and flat.numel() % width for flat, width in zip(theta, widths, strict=True)):
        raise FramingError(f"tables of widths {list(widths)} for parameters of {[flat.numel() for flat in theta]}")
    if not recipe.moves_rows:
        raise FramingError(f"tables of rows under {recipe}")


def _combine(operations: Mapping[int, CollectiveOp]) -> list[Tensor]:
    result = answer(list(operations.values()))
    return [result] if isinstance(result, Tensor) else list(result)
