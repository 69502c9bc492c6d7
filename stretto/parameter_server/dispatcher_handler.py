"""Request handler of the batch dispatcher: leases, collective operations on bytes, and admission of joining workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import astuple
from torch import Tensor

from stretto.data.dispatcher import BatchDispatcher
from stretto.data.leases import RETURNED, FirstCome, Ledger
from stretto.errors import UnevenLoopsError
from stretto.membership.loop_positions import LoopPosition, are_apart, explained
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import DTYPES, Chunks, FramingError, concatenated
from stretto.parameter_server.handler import CollectiveHandler, OutgoingMessage, PendingRequests, listed
from stretto.parameter_server.snapshots import NEWEST_KEPT
from stretto.transport.interface import as_bytes

SKIPPED = 1000
"""Added to the operation number when workers join after all have failed: their last one at the shards is unknown."""
NO_RESULT: list[Tensor] = []
"""Result of a broadcast whose root was lost."""


STORED = (
    "_recovery_epoch",
    "_is_partial",
    "_last_snapshot",
    "_last_call",
    "_was_over",
    "_clock_zeros",
    "_facts",
    "_ending",
    "_outside_barrier",
    "_op",
    "_barriers_passed",
    "_joining",
    "_awaiting_end",
    "_finished",
)
"""Attributes of the handler whose values its stored state contains unchanged."""


class Snapshot(msgspec.Struct, frozen=True):
    """Batches that count at a snapshot, and the workers that have trained them."""

    is_over: bool
    """True if the epoch was over."""
    epoch_number: int
    settled: list[int]
    trained_by: list[int]
    stream: Any = None
    """State of the ledger of an epoch over a stream."""


class DispatcherHandler:
    """Dispatches batches, runs collective operations, and admits joining workers while no member is at a barrier.

    Lost shards are restarted from snapshots, at most `snapshot_interval_s` old; if it is None, they are not restarted.
    """

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float],
        snapshot_interval_s: float | None = None,
    ) -> None:
        self._clock, self._snapshot_interval_s = clock, snapshot_interval_s
        self._is_elastic = snapshot_interval_s is not None
        self._collectives = CollectiveHandler(range(workers), _combine, PendingRequests(clock))
        self.dispatcher = BatchDispatcher(workers)
        self._snapshots: dict[int, Snapshot] = {}
        """The newest snapshots, if lost shards are restarted."""
        self._recovery_epoch = 0
        self._rolled_back = m.RolledBack(0, -1, [])
        """Start of the current recovery epoch."""
        self._is_partial = False
        """True if all have to roll back because only some shards have an update."""
        self._last_snapshot, self._last_call = -1, clock()
        self._was_over = False
        """True if the epoch was over at the last snapshot."""
        self._clock_zeros: dict[bytes, float] = {}
        """Zero of the run's clock, by the id of the boot whose clock it is."""
        self._order: tuple[int, Tensor] = 0, torch.empty(0, dtype=torch.uint8, device="cpu")
        """Number of an epoch, and its order as it was broadcast."""
        self._facts = b""
        """Facts that workers need to join: names and tensors, or the division of the model among ranks."""
        self._ending: set[int] = set()
        """Members that are at the barrier at the end of the epoch, or on their way to it."""
        self._outside_barrier: dict[int, tuple[int, int]] = {}
        """By member that is at no barrier: its operation number, and the number of called barriers that it passed."""
        self._op = self._barriers_passed = 0
        self._joining: dict[int, int] = {}
        self._awaiting_end: dict[int, int] = {}
        self._finished: dict[int, bool] = {}
        """By finished worker: True if it quit, so that the others continue and further workers may join."""

    def expects(self, worker: int, header: m.Header) -> None:
        """Accept any message: it needs no memory beyond its own."""

    def streams(self, worker: int, header: m.Header) -> bool:
        """Return False: messages are processed when complete."""
        return False

    def write(self, worker: int, index: int, offset: int, chunk: Tensor) -> None:
        """Never called."""

    def take(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a complete message."""
        body, request_id = header.body, header.request_id
        if isinstance(body, m.Lease | m.LeasePieces | m.AwaitEpochEnd | m.Snapshot | m.CountSamples) and (
            self._is_partial or body.recovery_epoch != self._recovery_epoch
        ):
            return [OutgoingMessage(worker, request_id, m.StaleRequest(self._recovery_epoch))]
        if isinstance(body, m.Lease):
            return [OutgoingMessage(worker, request_id, self._lease(worker, body)), *self._release()]
        if isinstance(body, m.LeasePieces):
            pieces = self.dispatcher.lease_pieces(worker, body.epoch_number, body.end)
            first_open = self.dispatcher.stream.first_open if self.dispatcher.stream is not None else 0
            leased = m.LeasedPieces(pieces, first_open, len(self.dispatcher.members))
            return [OutgoingMessage(worker, request_id, leased)]
        if isinstance(body, m.Settle):
            if body.recovery_epoch == self._recovery_epoch:
                self.dispatcher.settle(worker, body.epoch_number, body.batches, body.samples)
            return self._release()
        if isinstance(body, m.Gather | m.BroadcastOrder | m.Barrier):
            return self._collective(worker, header, tensors)
        if isinstance(body, m.BeginEpoch):
            return self._begin(worker, header, body, tensors)
        if isinstance(body, m.AwaitEpochEnd) and body.epoch_number != self.dispatcher.epoch_number:
            return [OutgoingMessage(worker, request_id, m.EpochStatus(True))]
        if isinstance(body, m.AwaitEpochEnd):
            self._awaiting_end[worker] = request_id
            self.dispatcher.await_end(worker, body.epoch_number, body.left_early)
            return self._release()
        return [*self._of_members(worker, header, tensors), *self._admit()]

    def _of_members(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process messages about members and rollbacks."""
        body, request_id = header.body, header.request_id
        if isinstance(body, m.LeaveBarrier):
            self._outside_barrier[worker] = body.op, body.barriers_passed
            self._op, self._barriers_passed = max(self._op, body.op), max(self._barriers_passed, body.barriers_passed)
            return []
        if isinstance(body, m.StoreOrder):
            self._store_order(body.epoch_number, _flat(header, tensors, torch.uint8))
            self._clock_zeros[body.boot] = body.clock_zero
            return []
        if isinstance(body, m.StoreFacts):
            self._facts = bytes(_flat(header, tensors, torch.uint8).numpy())
            return [OutgoingMessage(worker, request_id, m.Result())]
        if isinstance(body, m.Group):
            self._collectives.group(body.generation, body.members)
            return []
        if isinstance(body, m.Join):
            messages = self.remove(worker) if worker in self._collectives.members else []
            self._joining[worker] = request_id
            return messages
        if isinstance(body, m.Finish | m.Quit):
            self._finished.setdefault(worker, isinstance(body, m.Quit))
            ended = self.remove if self._finished[worker] else self.leave
            return [OutgoingMessage(worker, request_id, m.Result()), *ended(worker)]
        if isinstance(body, m.CountSamples):
            ledger = (
                self.dispatcher.ledger if body.epoch_number == self.dispatcher.epoch_number else Ledger([], FirstCome())
            )
            counts = torch.tensor(ledger.counts(), dtype=torch.uint8, device="cpu")
            by_worker = ledger.samples_by_worker()
            if (stream := self.dispatcher.stream) is not None and body.epoch_number == self.dispatcher.epoch_number:
                numbers = stream.settled | {RETURNED: stream.returned}
                rows = [(one, *each) for one, ranges in sorted(numbers.items()) for each in ranges]
                counts = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1)
                by_worker = stream.samples_by_worker()
            trained = torch.tensor([*by_worker.items()], dtype=torch.int64, device="cpu").reshape(-1)
            return [OutgoingMessage(worker, request_id, m.Result(), [counts, trained])]
        if isinstance(body, m.Snapshot):
            self._take_snapshot(body.op, body.stored)
            return [OutgoingMessage(worker, request_id, m.EpochStatus(self._was_over))]
        if isinstance(body, m.ListSnapshots):
            return [OutgoingMessage(worker, request_id, m.SnapshotList([*self._snapshots], 0, self._recovery_epoch))]
        if isinstance(body, m.Rollback):
            return self._rollback(worker, request_id, body)
        raise FramingError(f"unexpected message {type(body).__name__} for the dispatcher")

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """Note that a worker has left: its batches are returned."""
        self.dispatcher.remove(worker)
        for stored in (self._awaiting_end, self._outside_barrier):
            stored.pop(worker, None)
        return [*self._collectives.leave(worker), *self._release(), *self._admit()]

    def remove(self, worker: int, ended: m.IncarnationEnded | None = None) -> list[OutgoingMessage]:
        """Remove a worker: settle the batches of an `ended` incarnation, return its other leases; the others continue.

        If only some shards have its last update, all roll back to the last snapshot, which is consistent.
        """
        if ended is not None:
            self._is_partial = self._is_partial or (ended.is_partial and self._is_elastic)
            self.dispatcher.settle(worker, ended.epoch_number, ended.batches, ended.samples)
        self.dispatcher.remove(worker)
        for stored in (self._awaiting_end, self._joining, self._outside_barrier):
            stored.pop(worker, None)
        self._ending.discard(worker)
        return [*self._collectives.remove(worker), *self._release(), *self._admit()]

    def work_of(self, worker: int) -> m.CountedWork:
        """Return no work: this service has no parameters."""
        return m.CountedWork(0, [])

    # --- batches ------------------------------------------------------------------------------------------------

    def _lease(self, worker: int, body: m.Lease) -> m.Leased:
        self._ending.discard(worker)
        self.dispatcher.may_announce_barrier = not self._ending
        self._announce_scheduled(worker)
        reply = self.dispatcher.lease(worker, body.epoch_number)
        return m.Leased(reply.lease.batch if reply.lease else None, reply.samples, reply.barrier, reply.snapshot_only)

    def _announce_scheduled(self, worker: int) -> None:
        """Call all to a snapshot barrier when it is due and no other barrier takes snapshots."""
        if self._snapshot_interval_s is None or self.dispatcher.barrier_every is not None:
            return
        if self._clock() - self._last_call >= self._snapshot_interval_s:
            self._last_call = self._clock()
            self.dispatcher.announce_snapshot_barrier(worker)

    def _release(self) -> list[OutgoingMessage]:
        """Reply to workers that wait for the end of the epoch, if it is over or there are batches again."""
        released = self.dispatcher.pop_released()
        self._ending |= {worker for worker, over in released.items() if over}
        return [
            OutgoingMessage(worker, self._awaiting_end.pop(worker), m.EpochStatus(over))
            for worker, over in released.items()
            if worker in self._awaiting_end
        ]

    def _begin(self, worker: int, header: m.Header, body: m.BeginEpoch, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if body.barrier_every is not None and body.barrier_every < 1:
            raise FramingError(f"a barrier after every {body.barrier_every} batches")
        sizes = _flat(header, tensors, torch.int64).tolist()
        if body.epoch_number > self.dispatcher.epoch_number:
            self.dispatcher.begin(body.epoch_number, sizes, body.barrier_every, body.plan, body.settled)
        return [OutgoingMessage(worker, header.request_id, m.Result())]

    # --- collective operations, and joining -----------------------------------------------------------------------

    def _collective(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a contribution to a collective operation: an all-gather, a broadcast or a barrier."""
        body = header.body
        assert isinstance(body, m.Gather | m.BroadcastOrder | m.Barrier)
        self._op = max(self._op, body.op)
        self._outside_barrier.pop(worker, None)
        self._ending.discard(worker)
        self._ending |= {worker} if isinstance(body, m.Barrier) and not body.index else set()
        if isinstance(body, m.Barrier):
            self._barriers_passed = max(self._barriers_passed, body.index)
            messages = self._collectives.contribute(
                worker, body.op, header.request_id, (None, torch.empty(0, dtype=torch.uint8, device="cpu"), None)
            )
            return [
                *[OutgoingMessage(message.worker, message.request_id, message.body) for message in messages],
                *self._release(),
            ]
        flat = _flat(header, tensors, torch.uint8)
        messages = self._collectives.contribute(worker, body.op, header.request_id, (body.root, flat, body.position))
        if isinstance(body, m.BroadcastOrder) and messages and messages[0].tensors:
            self._store_order(body.epoch_number, messages[0].tensors[0])
        return messages

    def _store_order(self, epoch_number: int, order: Tensor) -> None:
        if epoch_number >= self._order[0]:
            self._order = epoch_number, order.clone()

    def _admit(self) -> list[OutgoingMessage]:
        """Admit joining workers while no member is at a barrier, so that all are at the same operation.

        The members' position counts: a failed worker may have come to a barrier that the members have not reached yet.
        """
        members, left = self._collectives.members, self._collectives.left
        is_over = False in self._finished.values() or (bool(members) and members <= left)
        if not self._joining or (members and not is_over and members - left - self._outside_barrier.keys()):
            return []
        joining, self._joining = self._joining, {}
        if is_over:
            return [OutgoingMessage(worker, request_id, m.RunOver()) for worker, request_id in joining.items()]
        epoch_number, order = self._order
        if not members:
            self._op += SKIPPED
        op, barriers_passed = max(self._outside_barrier.values(), default=(self._op, self._barriers_passed))
        for worker in joining:
            self._collectives.join(worker)
            self.dispatcher.join(worker, barriers_passed)
            self._finished.pop(worker, None)
            if epoch_number:
                self._outside_barrier[worker] = op, barriers_passed
        present = sorted(self._collectives.members)
        self._collectives.name_contributors()
        joined = m.Joined(
            self._recovery_epoch,
            epoch_number,
            op,
            barriers_passed,
            present,
            self._clock_zeros,
        )
        tensors = [order, as_bytes(self._facts)]
        return [OutgoingMessage(worker, request_id, joined, tensors) for worker, request_id in joining.items()]

    # --- rollback -----------------------------------------------------------------------------------------------

    def _take_snapshot(self, number: int, is_stored: bool) -> None:
        """Take a snapshot, once, unless a shard had no space for its part: then no rollback can use it."""
        if not self._is_elastic or number <= self._last_snapshot:
            return
        self._last_snapshot, self._was_over = number, self.dispatcher.is_over
        if is_stored:
            self._snapshots[number] = Snapshot(self._was_over, *self.dispatcher.settled_batches())
            self._keep_snapshots(sorted(self._snapshots)[-NEWEST_KEPT:])

    def _keep_snapshots(self, numbers: Sequence[int]) -> None:
        self._snapshots = {number: self._snapshots[number] for number in numbers}

    def _rollback(self, worker: int, request_id: int, body: m.Rollback) -> list[OutgoingMessage]:
        """Reply to a worker that reports a lost service; one that asked before the newest snapshot has to ask again.

        All shards have the newest snapshot, and a worker may have continued from it.
        """
        if body.newest_snapshot < max(self._snapshots, default=-1):
            return [OutgoingMessage(worker, request_id, m.StaleRequest(self._recovery_epoch))]
        messages = self._choose_snapshot(worker, body)
        members = sorted(self._collectives.members)
        chosen = msgspec.structs.replace(self._rolled_back, members=members)
        return [*messages, OutgoingMessage(worker, request_id, chosen), *self._release()]

    def _choose_snapshot(self, worker: int, body: m.Rollback) -> list[OutgoingMessage]:
        """Choose the snapshot for a rollback at the first report; reply to all workers that wait for a batch."""
        self.dispatcher.set_announced(worker, body.barriers_announced)
        if not self._is_elastic or body.recovery_epoch < self._recovery_epoch:
            return []
        if body.highest_epoch <= 0 and self._last_snapshot < 0:  # not all shards have their parameters yet
            self._recovery_epoch, self._rolled_back, self._is_partial = 0, m.RolledBack(0, -1, body.boot_ids), False
            return []
        usable = [number for number in sorted(self._snapshots) if number in body.snapshots]
        if not usable:
            raise FramingError("a server was lost, and there is no snapshot that all servers have")
        chosen = self._snapshots[usable[-1]]
        self._keep_snapshots([number for number in self._snapshots if number <= usable[-1]])
        self.dispatcher.roll_back(chosen.epoch_number, chosen.settled, chosen.trained_by, chosen.stream)
        self._was_over, self._last_snapshot = chosen.is_over, usable[-1]
        self._recovery_epoch = max(body.recovery_epoch, body.highest_epoch) + 1
        self._rolled_back, self._is_partial = m.RolledBack(self._recovery_epoch, usable[-1], body.boot_ids), False
        waiting, self._awaiting_end = self._awaiting_end, {}
        stale = m.StaleRequest(self._recovery_epoch)
        return [OutgoingMessage(waiting_worker, number, stale) for waiting_worker, number in waiting.items()]

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> Any:
        """Return the state as plain values; None while a collective operation is in progress."""
        collectives = self._collectives.state()
        if collectives is None:
            return None
        values = {name: getattr(self, name) for name in STORED}
        rolled_back, snapshots = astuple(self._rolled_back), {n: astuple(one) for n, one in self._snapshots.items()}
        order = self._order[0], bytes(self._order[1].numpy())
        return values, rolled_back, snapshots, order, collectives, self.dispatcher.state()

    def load_state(self, state: Any) -> None:
        """Load a state."""
        values, rolled_back, snapshots, (number, order), collectives, dispatcher = state
        for name, value in values.items():
            setattr(self, name, value)
        self._ending = set(values["_ending"])
        self._outside_barrier = {worker: tuple(at) for worker, at in values["_outside_barrier"].items()}
        self._rolled_back = m.RolledBack(*rolled_back)
        self._snapshots = {snapshot: Snapshot(*facts) for snapshot, facts in snapshots.items()}
        self._order = number, as_bytes(order)
        self._collectives.load_state(collectives)
        self.dispatcher.load_state(dispatcher)


def _flat(header: m.Header, tensors: list[Chunks], dtype: torch.dtype) -> Tensor:
    """Return the only tensor of a message."""
    if len(tensors) != 1 or DTYPES[header.tensors[0][0]] is not dtype:
        raise FramingError(f"{listed(header.tensors)} where one tensor of {dtype} is expected")
    return concatenated(tensors[0], header.tensors[0][0])


def _combine(contributions: Mapping[int, tuple[int | None, Tensor, LoopPosition | None]]) -> list[Tensor]:
    """Return the bytes of all members or of the root; `NO_RESULT` if the root was lost."""
    positions = {worker: position for worker, (_, _, position) in contributions.items() if position is not None}
    if are_apart(positions.values()):
        raise UnevenLoopsError(explained(positions))
    roots = {root for root, _, _ in contributions.values()}
    if len(roots) > 1 and (None in roots or roots <= contributions.keys()):  # some may not know which worker failed
        raise ValueError("the workers do different things: some all-gather, some broadcast")
    root = roots.pop() if len(roots) == 1 else -1
    if root is None:
        return [flat for _, flat, _ in contributions.values()]
    if root in contributions:
        return [contributions[root][1]]
    return NO_RESULT
