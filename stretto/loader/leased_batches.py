"""The batches of workers that do not wait for each other: the coordinator leases each on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader

from stretto.data.assignment import BatchAssignment
from stretto.data.leases import Lease, PlanName
from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Batch
from stretto.loader.epoch_order import EpochOrder, pack, parted, unpack
from stretto.loader.global_step import GlobalStep, refuse_too_few
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.parameter_server.messages import Leased


class LeasedBatchSampler(BatchSampler):
    """Samples the batches that this worker leases, one after the other, until none are left.

    A loader that loads ahead leases ahead. All workers meet at a barrier after every `barrier_every` batches. By the
    `plan` "in-turn", for workers that wait for each other in every round, a round has the same batches as with any
    other barrier; by "one-each" all workers get a batch.
    """

    def __init__(
        self,
        draw: Callable[[], EpochOrder],
        transport: ParameterServerClient,
        barrier_every: int | None,
        plan: PlanName,
    ) -> None:
        self._draw, self.transport, self._barrier_every, self.plan = draw, transport, barrier_every, plan
        self._order: EpochOrder | None = None
        self._begun: tuple[EpochOrder, list[int]] | None = None
        """Order of an epoch that another run began, and the batches of it that were done there."""
        self._number = 0
        self._request: tuple[int, int] | None = None
        """Request for a lease that awaits its reply, and the recovery epoch in which it was sent."""
        self._bounds: Sequence[int] = ()
        self.leased: deque[tuple[Lease, int]] = deque()
        """Leased batches that the loader has not returned yet, with the samples leased to all workers by then."""
        self.is_looking_ahead = False
        """True while a step is under way, within which a worker cannot roll back."""
        self.barriers_due = 0
        self.snapshots_due = 0
        """Number of barriers that are due for a snapshot alone."""

    def begin(self, number: int, begun: tuple[EpochOrder, BatchAssignment] | None) -> None:
        """Begin an epoch. Its order is drawn on first use, unless `begun` holds it with the assignment so far."""
        self._number, self._order, self._request = number, None, None
        self._begun = parted(begun[0], begun[1].remaining()) if begun is not None else None
        self.leased.clear()

    def order(self) -> EpochOrder:
        """Return the order of this epoch, drawn with all workers on the first call; then batches can be leased."""
        if self._order is None:
            self._order, settled = self._begun or (self._draw_or_fetch(), [])
            self._bounds = self._order.bounds
            if self.transport.admits_workers and self.transport.order[0] != self._number:
                self.transport.store_order(self._number, pack(self._order))
            if self._begun is not None:
                self.transport.all_gather_bytes(b"begun")  # the snapshot that follows has a number of its own
            self.transport.begin_epoch(self._number, self._order.sizes, self._barrier_every, self.plan, settled)
        return self._order

    def _draw_or_fetch(self) -> EpochOrder:
        """Return the order: drawn with all workers, or stored by the coordinator for a worker that joined later."""
        transport, number = self.transport, self._number
        if transport.order[0] == number:
            return unpack(transport.order[1])
        with transport.storing_order(number if transport.admits_workers else None):
            return self._draw()

    def refuse_too_few(self) -> None:
        """Raise LoaderError unless the rest of the epoch has a batch for each worker, where the plan gives one."""
        workers, settled = self.transport.workers, self._begun[1] if self._begun is not None else []
        batches = len(self) - len(settled)
        if self.plan == "one-each" and batches < workers:
            raise LoaderError(
                explain(
                    f"each worker of several processes needs a batch in an epoch, and there are {workers} workers",
                    got=f"{batches} batch{'es' * (batches != 1)}",
                    expected=f"at least {workers}",
                    to_type="a smaller batch_size= of the DataLoader, or fewer processes (-n)",
                )
            )

    def at_rest(self) -> BatchAssignment:
        """Return the epoch's assignment with no update in flight: trained batches, and those to be assigned again.

        Raises RollbackRequiredError if a server failed.
        """
        bounds, counted = self.order().bounds, self.transport.sample_counts_once(self._number)[0]
        settled = (batch for batch, start in enumerate(bounds[:-1]) if start < len(counted) and counted[start])
        return BatchAssignment.from_settled(bounds, settled, self.transport.expected)

    def ask_ahead(self) -> None:
        """Request the next batch; `_lease` waits for the reply."""
        if self._request is None:
            self._request = self.transport.request_lease(self._number)

    @property
    def has_requested(self) -> bool:
        """True if a request for a batch awaits its reply."""
        return self._request is not None

    def settle(self, leases: Sequence[Lease]) -> None:
        """Settle leases whose work is in the server's parameters."""
        if batches := [lease.batch for lease in leases if lease.recovery_epoch == self.transport.recovery_epoch]:
            self.transport.settle(self._number, batches)

    def is_over(self, left: bool = False) -> bool:
        """Wait until no worker holds a batch of the epoch. Return False if batches became available again."""
        self._request = None
        try:
            return self.transport.wait_epoch_end(self._number, left)
        except RollbackRequiredError:
            self.transport.roll_back()
            return False

    def counted(self) -> tuple[NDArray[np.uint8], dict[int, int]]:
        """Return the counts of the coordinator: of each sample, and of the samples that each worker has trained."""
        counted, trained = self.transport.sample_counts(self._number)
        return counted.numpy(), trained

    def __iter__(self) -> Iterator[Batch]:
        order = self.order()
        while (lease := self._lease()) is not None:
            yield order.batch(lease.batch)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def receive_barriers(self) -> None:
        """Receive barriers that are due, when this worker needs no more batches."""
        self._lease()
        self.leased.clear()

    def _lease(self) -> Lease | None:
        while True:
            reply, recovery_epoch = self._reply()
            if reply.snapshot_only:
                self.snapshots_due += 1
            elif reply.barrier:
                self.barriers_due += 1
            elif reply.batch is None:
                return None
            else:
                start, stop = self._bounds[reply.batch : reply.batch + 2]
                self.leased.append(
                    (Lease(reply.batch, self.transport.number, start, stop, recovery_epoch), reply.samples_leased)
                )
                return self.leased[-1][0]

    def _reply(self) -> tuple[Leased, int]:
        """Return the reply to a request and the recovery epoch; roll back once if the request is from a past one."""
        while True:
            self.ask_ahead()
            assert self._request is not None
            request, self._request = self._request, None
            try:
                return self.transport.lease(request), self.transport.recovery_epoch
            except RollbackRequiredError:
                if self.is_looking_ahead:
                    raise
                if request[1] == self.transport.recovery_epoch:
                    self.transport.roll_back()


class LeasingLoop(Protocol):
    """The training loop, as an epoch of leased batches uses it."""

    def push_all(self) -> None:
        """Push this worker's remaining update to the server, and wait until it is applied."""
        ...

    def wait_at_barriers(self, times: int) -> None:
        """Meet the other workers this number of times."""
        ...

    def on_snapshot(self) -> None:
        """Note that all workers have met for a snapshot, with no update in flight."""
        ...


class LeasedEpoch:
    """One epoch of a worker that does not wait for others."""

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: LeasedBatchSampler,
        loop: LeasingLoop,
        number: int,
        begun: tuple[EpochOrder, BatchAssignment] | None = None,
    ) -> None:
        self._loader, self._sampler, self._loop = loader, sampler, loop
        self._loads_ahead = loader.num_workers > 0
        sampler.begin(number, begun)
        self._batches: Iterator[Any] = iter(loader)
        self._ahead: list[Any] = []
        """Batch that `is_last` has leased."""
        self.order = sampler.order()
        self.dropped = self.order.dropped
        self.samples = begun[1].samples if begun is not None else self.order.bounds[-1]
        sampler.refuse_too_few()
        if begun is None:
            refuse_too_few(self.samples, sampler.transport.workers)

    def at_rest(self) -> BatchAssignment:
        """Return the assignment so far, with no update in flight. Raises RollbackRequiredError if a server was lost."""
        return self._sampler.at_rest()

    def ask_ahead(self) -> None:
        """Request the next batch in advance, unless the loader does so."""
        if not self._loads_ahead:
            self._sampler.ask_ahead()

    def settle(self, leases: Sequence[Lease]) -> None:
        """Settle these leases at the coordinator."""
        self._sampler.settle(leases)

    def uncount(self) -> None:
        """Do nothing: the leases of this worker are not settled."""

    def audited(self) -> tuple[NDArray[np.uint8], dict[int, int]]:
        """Return the counts of each sample, and of the samples that each worker's incarnations have trained."""
        return self._sampler.counted()

    def next(self) -> GlobalStep | None:
        """Return this worker's next batch, or None when none are left and no worker holds one."""
        while True:
            batch = self._ahead.pop() if self._ahead else next(self._batches, None)
            if batch is None or self._sampler.transport.has_parameters:  # the model is divided when all first call it
                self._wait_at_due_barriers()
            if batch is None and self._is_over():
                return None
            if batch is None:
                self._batches = iter(self._loader)
                continue
            lease, assigned_samples = self._sampler.leased.popleft()
            if lease.recovery_epoch == self._sampler.transport.recovery_epoch:
                return GlobalStep(batch, lease, lease.samples, assigned_samples)

    def is_last(self) -> bool:
        """Return True if this worker gets no further batch; its next one is leased for it.

        A rollback, which all workers make together, waits until the step under way has ended.
        """
        if self._ahead:
            return self._ahead[0] is None
        self._sampler.is_looking_ahead = True
        try:
            self._ahead.append(next(self._batches, None))
        except RollbackRequiredError:
            self._sampler.leased.clear()
            self._batches = iter(self._loader)
            return False
        finally:
            self._sampler.is_looking_ahead = False
        return self._ahead[0] is None

    @property
    def is_in_turn(self) -> bool:
        """True if each worker gets one batch in each round."""
        return self._sampler.plan == "in-turn"

    def leave(self) -> None:
        """Wait for the other workers, which do the remaining batches, after the script has left the epoch.

        This worker's update has been pushed.
        """
        if self._sampler.has_requested:  # the reply may announce a barrier that the other workers wait at
            self._sampler.receive_barriers()
            self._wait_at_due_barriers()
        while not (self._sampler.is_over(left=True) and self._sampler.transport.snapshot_barrier(False)):
            self._sampler.receive_barriers()
            self._wait_at_due_barriers()

    def _wait_at_due_barriers(self) -> None:
        """Take part in the barriers that this worker was notified of."""
        while self._sampler.snapshots_due:
            self._sampler.snapshots_due -= 1
            self._sampler.transport.snapshot_barrier(True)
            self._loop.on_snapshot()
        due, self._sampler.barriers_due = self._sampler.barriers_due, 0
        self._loop.wait_at_barriers(due)

    def _is_over(self) -> bool:
        """Push this worker's update, and wait for the others, whose batches return if they fail."""
        self._loop.push_all()
        return self._sampler.is_over() and self._sampler.transport.snapshot_barrier(False)
