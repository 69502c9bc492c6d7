"""Messages between workers and the services of a parameter server: small structs in front of raw tensors.

Only these structs are decoded. A message is a header and tensors: the header is one of these structs in MessagePack
with the dtypes and lengths of the tensors, so that a receiver knows the size of a message before its tensors arrive.

Services: the dispatcher, in the coordinator's process (the "coordinator" in error texts), and the shards. A worker
sends requests; each has a number that its reply carries (see `sessions`).

    worker                            shard                  dispatcher
      | -- Push(seq, version) -------> |                         |   an update
      | <- PushReply(version) -------- |                         |   the newest parameters, once the staleness bound
      |                                |                         |   permits the worker to continue
      | -- Lease(epoch_number) --------------------------------> |
      | <- Leased(batch) --------------------------------------- |   a batch, or `barrier`: come to the next barrier
      | -- EnterBarrier(barrier) ----> |                         |   no worker is held back for this one from now on
      | -- Barrier(op) ----------------------------------------> |   replied to when all members have come
      | -- Snapshot(op) -------------> |                         |   all have come, so the state is consistent
      | -- Snapshot(op, stored) -------------------------------> |   last: a snapshot of the dispatcher is complete
      | -- LeaveBarrier(op) -----------------------------------> |   joining workers are admitted between barriers

Rollback: a shard that lost its state replies `StaleRequest`. A worker that receives it asks all services for their
snapshots (`ListSnapshots`), sends `Rollback` with the snapshots that all shards have to the dispatcher, and
`RequestRollback` with the dispatcher's choice to the shards. Each rollback begins a new *recovery epoch*; requests of
an older one are stale.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import msgspec

from stretto.data.leases import PlanName
from stretto.membership.loop_positions import LoopPosition
from stretto.transport.host_memory import Offer


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Open(_Message):
    """The first worker's ranges of the parameters for a shard, with the update rule; they replace all earlier state.

    They are the first snapshot, with this number. After the parameters come the tensors of the rule's state, as
    `RuleStateReply` has them, if the run resumes from a checkpoint.
    """

    parameter_set: int
    recipe: str
    workers: int
    snapshot: int = 0
    recovery_epoch: int = 0
    names: list[str] = []
    arrivals: list[int] = []
    widths: list[int] = []
    """Width of the rows of each range, 0 for a range without; empty if none has rows. Ranges with rows come last."""


class Push(_Message):
    """A worker's update, encoded by the recipe's codec; the reply brings the newest version.

    `batches` of epoch `epoch_number` are the work in the update. `recovery_epoch` is the number of rollbacks so far.
    After the tensors of the ranges come two for each table of rows: the numbers of the rows that changed, in ascending
    order from the shard's first row on, and their changes. The reply has no rows (see `ReadRows`).
    """

    parameter_set: int
    seq: int
    version: int
    samples: int
    lr: float
    recovery_epoch: int = 0
    epoch_number: int = 0
    batches: list[int] = []


class Snapshot(_Message):
    """Request to store the state: all workers have met in collective operation `op`, and no request is pending.

    A shard replies with the snapshot's number in `SnapshotList` if it stored it. The dispatcher stores its part if all
    shards have `stored` theirs.
    """

    op: int
    recovery_epoch: int
    stored: bool = True


class ListSnapshots(_Message):
    """Request for the numbers of the stored snapshots."""


class Rollback(_Message):
    """Report that a service was lost in this recovery epoch, with the snapshots that all shards have.

    `boot_ids` are the shards' processes that this worker found, `highest_epoch` the highest recovery epoch of a shard.
    """

    recovery_epoch: int
    highest_epoch: int
    snapshots: list[int]
    boot_ids: list[int]
    barriers_announced: int
    """Number of barriers that this worker was called to so far."""
    newest_snapshot: int
    """Newest snapshot of the dispatcher, read before the shards were asked for theirs."""


class RequestRollback(_Message):
    """Order to begin a new recovery epoch at this snapshot, if the shard's process still has this `boot_id`.

    `members` are the present workers: a restarted shard does not know who has joined or left since.
    """

    recovery_epoch: int
    snapshot: int
    boot_id: int
    members: list[int] = []


class Join(_Message):
    """Request of a process that was started during the run: admit it, and reply where the run is."""


class ResumeClock(_Message):
    """Position of a joining worker: it counts its rounds from `clock`."""

    clock: int


class EnterBarrier(_Message):
    """Notice that a worker comes to the `barrier` of all after its update `seq`: it holds no worker back until the end.

    Without a barrier the worker has no batch, and holds no worker back until its next update.
    """

    seq: int
    barrier: int | None = None
    recovery_epoch: int = 0


class Read(_Message):
    """Request for the newest version, after applying the updates that are being collected if `flush`.

    The worker has this number of `parts`. Tables of rows are not in the reply (see `ReadRows`).
    """

    flush: bool
    recovery_epoch: int = 0
    parts: int = 0


class ReadRows(_Message):
    """Request for rows of a table. Its tensor holds their numbers as in `Push`.

    The rows are those of the newest version, or of the version in the worker's last reply if the recipe has a bound.
    """

    parameter_set: int
    table: int
    recovery_epoch: int = 0


class ReadRuleState(_Message):
    """Request for the update rule's state of this number of `parts`, at a barrier with no request pending."""

    recovery_epoch: int
    parts: int = 0


class Contribute(_Message):
    """A worker's tensor for the all-reduce ("mean") or all-gather ("every") with number `op`."""

    op: int
    kind: Literal["mean", "every"]
    received_up_to: int = 0
    """All results of operations up to this one have arrived at the worker."""

    @property
    def series(self) -> Hashable:
        """Key of the operations that are numbered together."""
        return None


class ExchangeTensors(_Message):
    """A worker's tensor for exchange `op` with worker `peer` in this channel. The reply carries the peer's tensor."""

    op: int
    peer: int
    channel: int = 0
    received_up_to: int = 0
    """All results of exchanges with this peer in this channel up to this one have arrived at the worker."""

    @property
    def series(self) -> Hashable:
        """Key of the exchanges that are numbered together."""
        return self.peer, self.channel


class Gather(_Message):
    """A worker's bytes in collective operation `op`: an all-gather, or a broadcast from `root`.

    `position` is the worker's position in its training loop.
    """

    op: int
    root: int | None
    position: LoopPosition | None = None


class BroadcastOrder(_Message):
    """Broadcast of an epoch's order from `root` in operation `op`; the dispatcher stores it for joining workers."""

    op: int
    root: int
    epoch_number: int
    position: LoopPosition | None = None


class Barrier(_Message):
    """Arrival at the barrier with operation number `op`, with no request pending.

    `index` counts the called barriers from 1 and is 0 for the barrier at the end of an epoch.
    """

    op: int
    index: int


class LeaveBarrier(_Message):
    """Notice that a worker has left the barrier after operation `op` and continues asynchronously."""

    op: int
    barriers_passed: int = 0


class StoreOrder(_Message):
    """Order of an epoch, for joining workers, and the zero of the run's clock on this boot."""

    epoch_number: int
    boot: bytes = b""
    clock_zero: float = 0.0


class Group(_Message):
    """Members of a new generation; pending operations of older generations are dropped."""

    generation: int
    members: list[int]


class BeginEpoch(_Message):
    """Start of an epoch, with a barrier after every `barrier_every` batches. Its tensor holds the samples of each
    batch.

    `plan` says for whom batches are reserved. `settled` batches were trained before.
    """

    epoch_number: int
    barrier_every: int | None
    plan: PlanName
    settled: list[int] = []


class StoreFacts(_Message):
    """Bytes that joining workers need besides the parameters at the server, as one tensor."""


class Lease(_Message):
    """Request of a free worker for a batch of the epoch."""

    epoch_number: int
    recovery_epoch: int = 0


class AwaitEpochEnd(_Message):
    """Notice that a worker has no batch and has settled all; replied to when no worker holds a batch any more.

    A worker whose script has `left_early` gets no batch even if one is returned.
    """

    epoch_number: int
    recovery_epoch: int
    left_early: bool = False


class CountSamples(_Message):
    """Request for how often each sample of the epoch was counted; of a stream, for the numbers that count.

    These are rows of a worker, or one of two marks in its place, and a range of numbers (see `StreamLedger`).
    """

    epoch_number: int
    recovery_epoch: int


class LeasePieces(_Message):
    """Request for pieces of a stream, which the worker has read to its `end` if that has a number."""

    epoch_number: int
    recovery_epoch: int
    end: int | None = None


class Settle(_Message):
    """Notice that the work on these batches is in the server's parameters; of a stream, with the samples of each."""

    epoch_number: int
    batches: list[int]
    recovery_epoch: int = 0
    samples: list[int] = []


class Leave(_Message):
    """Notice that a worker has finished."""


class Finish(_Message):
    """Notice that a worker is about to finish."""


class Quit(_Message):
    """Notice that a worker leaves gracefully: the others continue without it."""


class IncarnationEnded(_Message):
    """Notice that an incarnation of a worker has ended. `batches` are its work of the epoch that is in the parameters.

    `samples` are those of each. `is_partial`: only some shards have its last update, or this is unknown.
    """

    worker: int
    incarnation: int
    epoch_number: int = 0
    batches: list[int] = []
    samples: list[int] = []
    is_partial: bool = False


class PushReply(_Message):
    """A version of a shard, and the worker's applied updates as (seq, version, staleness, samples).

    `blocked_s` is the time in seconds for which the staleness bound delayed the reply.
    """

    version: int
    applied: list[tuple[int, int, int, int]] = []
    refused: list[int] = []
    blocked_s: float = 0.0


class Rows(_Message):
    """The requested rows of a table, one after another."""


class Result(_Message):
    """The requested tensors."""

    received_up_to: int = 0
    """Every worker has the results of operations up to this one."""


class MembersResult(_Message):
    """A result that names the contributing members, sent once members were lost. Without tensors the root was lost."""

    members: list[int]
    received_up_to: int = 0


class LeasedPieces(_Message):
    """Pieces of a stream, the first one of all that may be leased again, and the number of workers."""

    pieces: list[int]
    first_open: int
    workers: int


class Leased(_Message):
    """A batch of the epoch, or None: none is left, or all are called to a `barrier`, perhaps for a snapshot only.

    `samples_leased` is the number of samples leased in the epoch so far.
    """

    batch: int | None
    samples_leased: int
    barrier: bool = False
    snapshot_only: bool = False


class EpochStatus(_Message):
    """True if the epoch is over; False if there are batches again."""

    is_over: bool


class Joined(_Message):
    """The run's position for a joining worker. From the dispatcher: the epoch, the next operation, the barriers passed,
    the zeros of the run's clock; its tensors are the epoch's order, and the facts that were stored.

    From a shard: the parameter set, and the rounds of the slowest worker.
    """

    recovery_epoch: int
    epoch_number: int = 0
    op: int = 0
    barriers_passed: int = 0
    members: list[int] = []
    clock_zeros: dict[bytes, float] = {}
    parameter_set: int = 0
    clock: int = 0


class SnapshotList(_Message):
    """Snapshots that a service has, with the id of its process and its recovery epoch."""

    snapshots: list[int]
    boot_id: int
    recovery_epoch: int


class RuleStateReply(_Message):
    """State of the update rule: by name a tensor for each range, and the amount of momentum that has arrived."""

    names: list[str]
    arrivals: list[int]


class StaleRequest(_Message):
    """Refusal of a request from another recovery epoch, or by a restarted process that knows of no epoch yet."""

    recovery_epoch: int


class RolledBack(_Message):
    """Snapshot at which the current recovery epoch began, with the shards' processes then, and the present members."""

    recovery_epoch: int
    snapshot: int
    boot_ids: list[int]
    members: list[int] = []


class CountedWork(_Message):
    """Batches of an ended incarnation's updates at this service. The first one of an update has all its `samples`."""

    epoch_number: int
    batches: list[int]
    samples: list[int] = []


def incarnation_ended(worker: int, incarnation: int, work: Sequence[CountedWork], shards: int) -> IncarnationEnded:
    """Return the notice for the dispatcher, from the shards' replies about the incarnation's work."""
    epoch_number = max((counted.epoch_number for counted in work), default=0)
    sets = {frozenset(counted.batches) if counted.epoch_number == epoch_number else frozenset() for counted in work}
    common = sorted(frozenset.intersection(*sets)) if len(work) == shards and sets else []
    sizes = {batch: size for counted in work for batch, size in zip(counted.batches, counted.samples, strict=False)}
    samples = [sizes.get(batch, 0) for batch in common]
    is_partial = len(work) < shards or len(sets) > 1
    return IncarnationEnded(worker, incarnation, epoch_number, common, samples, is_partial)


class Refused(_Message):
    """Refusal of a malformed or unexpected request. `uneven`: the workers' loops are of unequal length."""

    text: str
    uneven: bool = False


class RunOver(_Message):
    """Refusal of a worker that joins after the others have finished."""


Request: TypeAlias = (
    Open
    | Push
    | EnterBarrier
    | Read
    | ReadRows
    | ReadRuleState
    | Contribute
    | ExchangeTensors
    | Gather
    | BroadcastOrder
    | StoreOrder
    | StoreFacts
    | Barrier
    | LeaveBarrier
    | Group
    | BeginEpoch
    | Lease
    | LeasePieces
    | Settle
    | AwaitEpochEnd
    | CountSamples
    | Leave
    | Finish
    | Quit
    | IncarnationEnded
    | Join
    | ResumeClock
    | Snapshot
    | ListSnapshots
    | Rollback
    | RequestRollback
)
Reply: TypeAlias = (
    PushReply
    | Rows
    | Result
    | MembersResult
    | Leased
    | LeasedPieces
    | EpochStatus
    | Joined
    | SnapshotList
    | RuleStateReply
    | StaleRequest
    | RolledBack
    | CountedWork
    | Refused
    | RunOver
)
WITHOUT_REPLY = (Settle, Leave, LeaveBarrier, StoreOrder, Group)
"""Messages without a reply."""
Body: TypeAlias = Request | Reply


class Header(msgspec.Struct, array_like=True):
    """First frame of a message. `request_id` is chosen by the sender of the request; the reply carries the same."""

    request_id: int
    body: Body
    tensors: list[tuple[str, int]] = []
    """Dtype and number of elements of each tensor that follows."""
    answered_below: int = 0
    """Number below which the sender of a request has the replies to all of its requests; 0 in a reply."""


class MemoryHeader(Header, array_like=True):
    """Header of a message whose tensors are in memory (see `message_memory`), or that offers a memory file.

    The reply may be in memory, too. Other messages are encoded as a `Header`, and decoded as this class.
    """

    memory: bool | Offer = False
