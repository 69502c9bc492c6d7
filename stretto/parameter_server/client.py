"""A worker's client of a parameter server: collective operations through it, and a worker's own requests to it.

Requests go over channels, which may be sockets or a simulated network. `parameter_server.messages` has the protocol.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp
from stretto.collective_ops import Exchange as ExchangeOp
from stretto.data.assignment import Range
from stretto.data.leases import PlanName
from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.barrier import GENERATION
from stretto.parameter_server.client_types import (
    AllGatherHandle,
    AllReduceHandle,
    BrokenHandle,
    Channel,
    Contributions,
    Exchange,
    ExchangeHandle,
    PushHandle,
    RollbackRequiredError,
    RuleState,
    Update,
    ranges,
    split_among_shards,
)
from stretto.parameter_server.framing import Chunks, concatenated
from stretto.parameter_server.shard import by_name
from stretto.transport.device_memory import host_copy
from stretto.transport.elastic import GenerationSource
from stretto.transport.interface import (
    Handle,
    JoinPosition,
    Message,
    PairNumbers,
    Traffic,
    Transport,
    as_bytes,
    check_peer,
    made,
)


class ParameterServerClient(Transport):
    """One worker's client of a parameter server, with channels to the dispatcher and to every shard.

    `worker` and `workers` are this worker's rank among the current members and their number. They change with the
    result of a collective operation, equally at all workers. `number` is this worker's permanent number.
    """

    def __init__(
        self, worker: int, workers: int, dispatcher: Channel, shards: Sequence[Channel], elastic: bool = False
    ) -> None:
        self._number, self._members, self.expected = worker, list(range(workers)), workers
        self._dispatcher, self.channels = dispatcher, shards
        self.elastic = elastic
        """True if lost services are restarted, so that snapshots have to be taken."""
        self.recovery_epoch = 0
        """Number of rollbacks so far."""
        self.rolled_back_to = -1
        """Snapshot of the last rollback; -1 before the first."""
        self.order: tuple[int, bytes] = 0, b""
        """Number of an epoch, and its order as it was broadcast."""
        self._order_epoch: int | None = None
        """Number of the epoch whose order the next broadcast carries, for the dispatcher to store; None for other
        broadcasts."""
        self.barriers_announced = 0
        """Number of barriers that this worker was called to."""
        self.barriers_passed = 0
        """Number of these barriers that the worker has passed."""
        self._exchange: Exchange | None = None
        self._membership: GenerationSource | None = None
        self._op = self._pushed = 0
        self._has_left_barrier = False
        self._epoch: tuple[m.BeginEpoch, Tensor] | None = None
        self._group: m.Group | None = None
        """Message that begins the current generation."""
        self._contributions = Contributions(elastic)
        self._pair_numbers = PairNumbers()
        self._aborted = False
        self._on_close: list[Callable[[], None]] = []
        for channel in (dispatcher, *shards):
            channel.attach(self)

    @property
    def worker(self) -> int:
        """Rank of this worker among the current members."""
        return bisect.bisect_left(self._members, self._number)

    @property
    def workers(self) -> int:
        """Number of current members."""
        return len(self._members)

    @property
    def number(self) -> int:
        """Permanent number of this worker."""
        return self._number

    @property
    def members(self) -> tuple[int, ...]:
        """Permanent numbers of the current members."""
        return tuple(self._members)

    @property
    def can_leave(self) -> bool:
        """True if lost workers are replaced."""
        return self.elastic

    @property
    def server(self) -> ParameterServerClient:
        """This client."""
        return self

    def on_close(self, then: Callable[[], None]) -> None:
        """Call `then` once this client is closed."""
        self._on_close.append(then)

    @property
    def begun(self) -> int:
        """Number of collective operations that this worker has begun; equal at all workers between two of them."""
        return self._op

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.channels)

    # --- collective operations ---------------------------------------------------------------------------------

    def submit(self, op: CollectiveOp) -> Handle:
        """Start a collective operation: each shard sums its range for a mean; one shard distributes all messages."""
        if isinstance(op, ExchangeOp):
            check_peer(op, self.worker, self.workers)
        if self._aborted:
            return BrokenHandle()
        if isinstance(op, ExchangeOp):
            return self._exchange_with(ExchangeOp(self._members[op.peer], op.tensor.detach(), op.channel))
        self._op += 1
        self._has_left_barrier = False
        flat = op.tensor.detach()
        contiguous = host_copy(flat).contiguous()
        if isinstance(op, AllReduceMean):
            request_ids = [
                self._contributions.send(channel, m.Contribute(self._op, "mean"), contiguous[start:stop])
                for channel, (start, stop) in zip(self.channels, ranges(contiguous.numel(), self.shards), strict=True)
            ]
            return AllReduceHandle(self._contributions, self.channels, flat, request_ids, self.workers)
        channel = self.channels[self._op % self.shards]
        return AllGatherHandle(
            self._contributions,
            channel,
            flat,
            self._contributions.send(channel, m.Contribute(self._op, "every"), contiguous),
        )

    def _exchange_with(self, op: ExchangeOp) -> ExchangeHandle:
        """Start an exchange with the worker of this number, through a shard that follows from the pair."""
        generation = self._group.generation if self._group is not None else 0
        body = m.ExchangeTensors(generation * GENERATION + self._pair_numbers.next(op), op.peer, op.channel)
        channel = self.channels[(self._number + op.peer + op.channel) % self.shards]
        request_id = self._contributions.send(channel, body, op.tensor.cpu().contiguous())
        return ExchangeHandle(self._contributions, channel, op.tensor, body.series, request_id)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers, in the order of their ranks."""
        return self._collect(m.Gather(self._op + 1, None, self._loop.place()), made(message))

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message at every worker; if the root failed, that of the first remaining worker."""
        while True:
            if self._order_epoch is not None and self.order[0] == self._order_epoch:
                return self.order[1]  # it was broadcast before this worker joined
            root_number = self._members[root]
            op, order_epoch = self._op + 1, self._order_epoch
            position = self._loop.place()
            body = (
                m.Gather(op, root_number, position)
                if order_epoch is None
                else m.BroadcastOrder(op, root_number, order_epoch, position)
            )
            results = self._collect(body, made(message) if root_number == self._number else b"")
            if results:
                self.order = (order_epoch, results[0]) if order_epoch is not None else self.order
                return results[0]
            root = 0

    def _collect(self, body: m.Gather | m.BroadcastOrder, message: bytes) -> list[bytes]:
        if self._aborted:
            raise BrokenTransportError("the collective operation was aborted")
        self._op += 1
        self._has_left_barrier = False
        return self._bytes_of(self._collective(body, [as_bytes(message)]))

    def _collective(self, body: m.Gather | m.BroadcastOrder | m.Barrier, tensors: list[Tensor]) -> list[Chunks]:
        """Send a request for a collective operation to the dispatcher; return the result."""
        return self._await_result(body, self._dispatcher.send(body, tensors))

    def _await_result(self, body: m.Gather | m.BroadcastOrder | m.Barrier, number: int) -> list[Chunks]:
        """Return the result of a collective operation once it has arrived."""
        reply, results = self._dispatcher.wait(number)
        if isinstance(reply, m.MembersResult):
            self._members = reply.members
        return results

    # --- membership --------------------------------------------------------------------------------------------

    def join_coordinator(self, membership: GenerationSource) -> None:
        """Follow the generations of a coordinator, and leave it once this client is closed."""
        self._membership = membership
        membership.attach(self)
        self._on_close += [membership.leave, membership.close]

    def generation_aborted(self, generation: int, why: str) -> None:
        """Abort pending operations, called from the membership client's thread."""
        self.abort()

    def doing(self, text: str, global_step: int) -> None:
        """Set this worker's status for heartbeats."""
        if self._membership is not None:
            self._membership.doing(text, global_step)

    def abandon(self, stays_out: bool = False) -> None:
        """Close the channels; leave gracefully first if this worker `stays_out`."""
        self.leave() if stays_out else self.close()

    def follow(self, exchange: Exchange | None) -> None:
        """Let this exchange come to barriers for snapshots, and take over the parameters after a rollback."""
        self._exchange = exchange

    @property
    def has_parameters(self) -> bool:
        """True once this worker has an exchange: that of several ranks begins when the script first calls the model."""
        return self._exchange is not None

    def snapshot_barrier(self, called: bool) -> bool:
        """Come to a barrier for a snapshot, with no request pending; return True if the epoch was over then."""
        return self._exchange.wait_at_barrier(called) if self._exchange is not None else self.wait_at_barrier(0, called)

    # --- generations -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort pending operations, from any thread at any time; waiting calls raise BrokenTransportError."""
        self._aborted = True
        for channel in (self._dispatcher, *self.channels):
            channel.abort()

    def regroup(self, generation: int, members: Sequence[int], me: int) -> None:
        """Begin a generation of these members; pending operations of earlier generations are dropped."""
        self._members, self._number = sorted(members), me
        self._op = generation * GENERATION
        self._contributions.clear()
        self._pair_numbers = PairNumbers()
        self._group = m.Group(generation, self._members)
        for channel in (self._dispatcher, *self.channels):
            channel.reset()
            channel.send(self._group)
        self._aborted = False

    def traffic(self) -> Traffic:
        """Return the bytes of this worker's connections, as the channels count them."""
        return sum((channel.traffic() for channel in self.channels), self._dispatcher.traffic())

    def leave(self, is_asked: bool = False) -> None:
        """Leave gracefully: the others continue without this worker, which has not finished if it was asked to."""
        if is_asked and self._membership is not None:
            self._on_close.insert(0, self._membership.quit)
        channels = (*self.channels, self._dispatcher)
        for channel, request_id in [(channel, channel.send(m.Quit())) for channel in channels]:
            with contextlib.suppress(TransportError):
                channel.wait(request_id)
        self.close()

    def close(self) -> None:
        """Close the channels: no worker waits for this one any more."""
        for channel in (self._dispatcher, *self.channels):
            channel.close()
        while self._on_close:
            self._on_close.pop(0)()

    # --- requests of one worker --------------------------------------------------------------------------------

    def open(
        self,
        parameter_set: int,
        recipe: str,
        parts: Sequence[Tensor],
        stored: RuleState | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        """Send the shards their ranges of the parameters and the update rule, with the rule's earlier state if there is
        one. `widths` are those of the rows of each part, 0 for a part without."""
        stored = stored or RuleState()
        tensors = [*parts, *itertools.chain.from_iterable(stored.tensors.values())]
        split = split_among_shards(tensors, self.shards, [*widths] * (1 + len(stored.tensors)))
        shares = [[host_copy(tensor) for tensor in share] for share in split]
        snapshot, is_open = self._op + 1, False
        while not is_open:
            body = m.Open(
                parameter_set,
                recipe,
                self.expected,
                snapshot,
                self.recovery_epoch,
                list(stored.tensors),
                stored.arrivals,
                list(widths),
            )
            try:
                for channel, share in zip(self.channels, shares, strict=True):
                    channel.wait(channel.send(body, share))
                is_open = not self.elastic or bool(self._snapshot_dispatcher(snapshot))
            except RollbackRequiredError:
                self.roll_back()

    def push(self, parameter_set: int, update: Update, lengths: Sequence[int]) -> PushHandle:
        """Send an update to all shards; the handle returns the newest version once this worker may continue.

        `lengths` are the lengths of the parts of the parameters.
        """
        request_ids = []
        self._pushed = update.seq
        for shard, channel in enumerate(self.channels):
            extra = self._epoch[0].epoch_number if self._epoch else 0, list(update.batches)
            body = m.Push(
                parameter_set,
                update.seq,
                update.versions[shard],
                update.samples,
                update.lr,
                self.recovery_epoch,
                *extra,
            )
            request_ids.append(channel.send(body, [host_copy(tensor) for tensor in update.messages[shard]]))
        return PushHandle(self.channels, request_ids, lengths, update.messages)

    def wait_at_barrier(self, seq: int, called: bool = False) -> bool:
        """Wait at a barrier for all workers after update `seq`, without holding others back at any shard; take a
        snapshot.

        Return True if the epoch was over then; after a rollback there may be batches again. If `called`, it is the
        first of the barriers that this worker was called to and has not passed.
        """
        self._enter_barrier(seq, self._op + 1)
        self._op, self._has_left_barrier = self._op + 1, False  # until here the worker's position is before the barrier
        self._collective(m.Barrier(self._op, self.barriers_passed + 1 if called else 0), [])
        self.barriers_passed += called
        return self.take_snapshot()

    def hold_none_back(self) -> None:
        """Hold no other worker back until the next push, since this one waits for them."""
        self._enter_barrier(self._pushed, None)

    def take_snapshot(self) -> bool:
        """Take a snapshot after a collective operation at every service; return True if the epoch was over then.

        The dispatcher stores its part last: so all have a snapshot that the dispatcher has, and workers that received
        its reply never roll back beyond it.
        """
        while self.elastic:
            try:
                replies = self._request_all([m.Snapshot(self._op, self.recovery_epoch)] * self.shards)
                is_stored = all(isinstance(reply, m.SnapshotList) and reply.snapshots for reply, _ in replies)
                status = self._snapshot_dispatcher(self._op, is_stored)
                return isinstance(status, m.EpochStatus) and status.is_over
            except RollbackRequiredError:
                self.roll_back()
                self._enter_barrier(self._pushed, self._op)
        return True

    def _snapshot_dispatcher(self, op: int, is_stored: bool = True) -> m.Body:
        return self._dispatcher.wait(self._dispatcher.send(m.Snapshot(op, self.recovery_epoch, is_stored)))[0]

    def _enter_barrier(self, seq: int, barrier: int | None) -> None:
        """Ask all shards not to hold others back for this worker."""
        self._request_all([m.EnterBarrier(seq, barrier, self.recovery_epoch)] * self.shards)

    def leave_barrier(self) -> None:
        """Leave the barrier of all, once the servers have parameters for joining workers, and continue."""
        if not self._has_left_barrier and self.has_parameters:
            self._has_left_barrier = True
            self._dispatcher.send(m.LeaveBarrier(self._op, self.barriers_passed))

    def read(self, lengths: Sequence[int], flush: bool = False) -> PushHandle:
        """Request the newest version; `flush` applies the updates that are being collected."""
        body = m.Read(flush, self.recovery_epoch, len(lengths))
        return PushHandle(self.channels, [channel.send(body) for channel in self.channels], lengths)

    def read_rows(self, parameter_set: int, table: int, numbers: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return rows of a table, flat and of the dtype of `like`, by their numbers at each shard, in their order.

        Raises RollbackRequiredError if a service was lost.
        """
        body = m.ReadRows(parameter_set, table, self.recovery_epoch)
        pairs = zip(self.channels, numbers, strict=True)
        pending = [(channel, channel.send(body, [rows])) for channel, rows in pairs if rows.numel()]
        try:
            replies = [channel.wait(request_id)[1] for channel, request_id in pending]
        except RollbackRequiredError:
            for channel, request_id in pending:
                channel.discard(request_id)
            raise
        return torch.cat([like.new_empty(0, device="cpu"), *(chunk for (chunks,) in replies for chunk in chunks)])

    def read_rule_state(self, parts: int) -> RuleState:
        """Return the update rule's state for `parts` parts of the parameters, at a barrier with no request pending.

        Raises RollbackRequiredError if a service was lost.
        """
        results = self._request_all([m.ReadRuleState(self.recovery_epoch, parts)] * self.shards)
        body = results[0][0]
        assert isinstance(body, m.RuleStateReply)
        by_part = zip(*(chunks for _, chunks in results), strict=True)
        flat = [torch.cat(list(itertools.chain.from_iterable(shares))) for shares in by_part]
        return RuleState(by_name(body.names, flat, parts), body.arrivals)

    def begin_epoch(
        self, number: int, sizes: Sequence[int], barrier_every: int | None, plan: PlanName, settled: Sequence[int] = ()
    ) -> None:
        """Start epoch `number` with batches of these sizes, with a barrier after every `barrier_every` of them.

        The `plan` reserves batches for workers, but none of the `settled` ones.
        """
        body = m.BeginEpoch(number, barrier_every, plan, list(settled))
        self._epoch = body, torch.tensor(sizes, dtype=torch.int64, device="cpu")
        self._send_epoch()
        if self.has_parameters and (self.join_position is None or self.join_position.epoch_number != number):
            self.take_snapshot()
        self.leave_barrier()

    @contextlib.contextmanager
    def storing_order(self, number: int | None) -> Iterator[None]:
        """Let the dispatcher store the broadcast of a `with` block as the order of this epoch."""
        self._order_epoch = number
        yield
        self._order_epoch = None

    def store_order(self, number: int, order: bytes) -> None:
        """Send an order that was not broadcast to the dispatcher, for joining workers."""
        self.order = number, order
        self._dispatcher.send(*self._order_to_store())

    @property
    def admits_workers(self) -> bool:
        """True if workers may join later, for whom the dispatcher stores what they need."""
        return self.elastic or self.expected > 1

    def store_facts(self, facts: bytes) -> None:
        """Send the dispatcher what joining workers need besides the parameters; wait until it is stored."""
        self._dispatcher.wait(self._dispatcher.send(m.StoreFacts(), [as_bytes(facts)]))

    def agreed(self, is_so: bool) -> bool:
        """Return True if all ranks of this worker pass True; they call this together."""
        return is_so

    def _order_to_store(self) -> tuple[m.StoreOrder, list[Tensor]]:
        return m.StoreOrder(self.order[0], *self._loop.clock_zero()), [as_bytes(self.order[1])]

    def _send_epoch(self) -> None:
        assert self._epoch is not None
        body, sizes = self._epoch
        if self.elastic:
            self._dispatcher.send(*self._order_to_store())
        self._dispatcher.wait(self._dispatcher.send(body, [sizes]))

    def request_lease(self, number: int) -> tuple[int, int]:
        """Ask for a batch, which `lease` waits for; return the request id and the recovery epoch."""
        return self._dispatcher.send(m.Lease(number, self.recovery_epoch)), self.recovery_epoch

    def lease(self, requested: tuple[int, int]) -> m.Leased:
        """Return the requested batch. Raises RollbackRequiredError if the reply is of an older recovery epoch.

        Such a reply is void, be it a batch or a call to a barrier: the other workers do not know that it has arrived.
        """
        request_id, recovery_epoch = requested
        body, _ = self._dispatcher.wait(request_id)
        if recovery_epoch != self.recovery_epoch:
            raise RollbackRequiredError("the servers were rolled back after this request")
        if not isinstance(body, m.Leased):
            raise TransportError(f"the dispatcher answered {type(body).__name__} to a request for a batch")
        if body.barrier:
            self.barriers_announced += 1
        return body

    def settle(self, number: int, batches: Sequence[int], samples: Sequence[int] = ()) -> None:
        """Report that the work on these batches is in the server's parameters; of a stream, with their `samples`."""
        self._dispatcher.send(m.Settle(number, list(batches), self.recovery_epoch, list(samples)))

    def lease_pieces(self, number: int, end: int | None = None) -> m.LeasedPieces:
        """Return pieces of the stream of an epoch, which this worker has read to its `end` if that has a number.

        Raises RollbackRequiredError if a service was lost.
        """
        body, _ = self._dispatcher.wait(self._dispatcher.send(m.LeasePieces(number, self.recovery_epoch, end)))
        if not isinstance(body, m.LeasedPieces):
            raise TransportError(f"the dispatcher answered {type(body).__name__} to a worker that reads a stream")
        return body

    def wait_epoch_end(self, number: int, left_early: bool = False) -> bool:
        """Wait, without holding others back, until no worker holds a batch of the epoch; return True then.

        Return False if there are batches again or a barrier is called. A worker that has `left_early` gets no further
        batch.
        """
        self.leave_barrier()
        self._enter_barrier(self._pushed, None)
        body, _ = self._dispatcher.wait(self._dispatcher.send(m.AwaitEpochEnd(number, self.recovery_epoch, left_early)))
        return not isinstance(body, m.EpochStatus) or body.is_over

    def sample_counts(self, number: int) -> tuple[Tensor, dict[int, int]]:
        """Return the counts of each sample of an epoch, and the number of samples that each worker has trained.

        Both are empty for an epoch that is over.
        """
        while True:
            try:
                return self.sample_counts_once(number)
            except RollbackRequiredError:
                self.roll_back()

    def sample_counts_once(self, number: int) -> tuple[Tensor, dict[int, int]]:
        """Return the same counts. Raises RollbackRequiredError if a service was lost."""
        _, (chunks, pairs) = self._dispatcher.wait(self._dispatcher.send(m.CountSamples(number, self.recovery_epoch)))
        workers, samples = concatenated(pairs, "int64").reshape(-1, 2).T.tolist()
        return concatenated(chunks, "uint8"), dict(zip(workers, samples, strict=True))

    def settled_of_stream(self, number: int) -> tuple[dict[int, list[Range]], dict[int, int]]:
        """Return the numbers of an epoch over a stream that count, as ranges by worker, and the samples by worker.

        Raises RollbackRequiredError if a service was lost.
        """
        _, results = self._dispatcher.wait(self._dispatcher.send(m.CountSamples(number, self.recovery_epoch)))
        rows, pairs = (concatenated(one, "int64") for one in results)
        numbers: dict[int, list[Range]] = {}
        for worker, start, stop in rows.reshape(-1, 3).tolist():
            numbers.setdefault(worker, []).append((start, stop))
        return numbers, dict(pairs.reshape(-1, 2).tolist())

    # --- joining, and rollback ---------------------------------------------------------------------------------

    def join(self) -> None:
        """Join a running training: wait until no member is at a barrier, and take over the run's position."""
        try:
            body, tensors = self._dispatcher.wait(self._dispatcher.send(m.Join()))
        except RollbackRequiredError:
            self.roll_back()
            self.join()
            return
        if not isinstance(body, m.Joined):
            raise TransportError(f"the dispatcher answered {type(body).__name__} to a joining worker")
        self._members, self.recovery_epoch, self._op = list(body.members), body.recovery_epoch, body.op
        self.barriers_passed = self.barriers_announced = body.barriers_passed
        positions = self._join_shards()
        while any(reply.recovery_epoch < 0 for reply in positions):  # a shard was restarted and has no parameters yet
            self.roll_back()
            positions = self._join_shards()
        if not body.epoch_number:
            return
        order, facts = self._bytes_of(tensors)
        self.order = body.epoch_number, order
        self._has_left_barrier = True
        clock = min(reply.clock for reply in positions)
        self._request_all([m.ResumeClock(clock)] * self.shards)
        parameter_set = positions[0].parameter_set
        self.join_position = JoinPosition(body.epoch_number, order, body.clock_zeros, parameter_set, facts)
        self.arrives = parameter_set > 0

    def _join_shards(self) -> list[m.Joined]:
        return [self._checked_joined(reply) for reply, _ in self._request_all([m.Join()] * self.shards)]

    @staticmethod
    def _checked_joined(body: m.Body) -> m.Joined:
        if not isinstance(body, m.Joined):
            raise TransportError(f"a server answered {type(body).__name__} to a joining worker")
        return body

    def roll_back(self) -> None:
        """Roll back to the snapshot at which the servers restart, together with all workers; later settlements are
        void.

        Repeat if further services are lost during the rollback.
        """
        while not self._try_roll_back():
            pass

    def _try_roll_back(self) -> bool:
        if not self._agree_on_snapshot():
            return False
        self._pushed = 0
        try:
            if self.rolled_back_to >= 0 and self._exchange is not None:
                self._exchange.rolled_back()
        except RollbackRequiredError:
            return False
        return True

    def _agree_on_snapshot(self) -> bool:
        """Agree with the others, through the dispatcher, on a snapshot that all shards have; return False to retry."""
        stored, _ = self._dispatcher.wait(self._dispatcher.send(m.ListSnapshots()))
        assert isinstance(stored, m.SnapshotList)
        shards = [
            body for body, _ in self._request_all([m.ListSnapshots()] * self.shards) if isinstance(body, m.SnapshotList)
        ]
        highest_epoch = max(reply.recovery_epoch for reply in shards)
        snapshots = sorted(set.intersection(*(set(reply.snapshots) for reply in shards)))
        newest = max(stored.snapshots, default=-1)
        request = m.Rollback(
            self.recovery_epoch,
            highest_epoch,
            snapshots,
            [reply.boot_id for reply in shards],
            self.barriers_announced,
            newest,
        )
        try:
            reply, _ = self._dispatcher.wait(self._dispatcher.send(request))
            assert isinstance(reply, m.RolledBack)
            self.recovery_epoch, self.rolled_back_to = reply.recovery_epoch, reply.snapshot
            self._request_all(
                [
                    m.RequestRollback(reply.recovery_epoch, reply.snapshot, boot_id, reply.members)
                    for boot_id in reply.boot_ids
                ]
            )
        except RollbackRequiredError:
            return False
        return True

    def _request_all(self, bodies: Sequence[m.Request]) -> list[tuple[m.Body, list[Chunks]]]:
        """Send each shard its request; return the replies."""
        request_ids = [channel.send(body) for channel, body in zip(self.channels, bodies, strict=True)]
        return [channel.wait(request_id) for channel, request_id in zip(self.channels, request_ids, strict=True)]

    def replay(self, channel: Channel) -> None:
        """Send a restarted shard the state that it may have lost: the members, and contributions."""
        if channel is not self._dispatcher:
            if self._group is not None:
                channel.send_oneway(self._group)
            self._contributions.replay(channel)

    def tend(self, waiting: Channel) -> None:
        """Let the other channels connect again while one waits."""
        for channel in (self._dispatcher, *self.channels):
            if channel is not waiting:
                channel.tend()

    def _bytes_of(self, tensors: Sequence[Chunks]) -> list[bytes]:
        """Return the bytes in the tensors of a reply."""
        return [bytes(concatenated(chunks, "uint8").numpy()) for chunks in tensors]
