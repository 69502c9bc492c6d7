"""Barriers that workers are called to: joining workers after failures of others, and all workers after a rollback."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from handlers import replies_to
from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.dispatcher_handler import SKIPPED, DispatcherHandler
from stretto.parameter_server.handler import SMALL_BYTES
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore

BATCHES = [torch.ones(6, dtype=torch.int64)]
ORDER = [torch.zeros(3, dtype=torch.uint8)]


class Run:
    """A run of two workers outside of barriers: `op` operations are done, and an epoch has begun."""

    def __init__(self, meet: int | None) -> None:
        self.handler, self.numbers = DispatcherHandler(2, lambda: 0.0), itertools.count(1)
        for worker in (0, 1):
            self.says(worker, m.BroadcastOrder(1, 0, 1), ORDER)
        for worker in (0, 1):
            self.says(worker, m.BeginEpoch(1, meet, False), BATCHES)
            self.says(worker, m.LeaveBarrier(1, 0))

    def says(self, worker: int, body: m.Request, tensors: Sequence[Tensor] = ()) -> list[m.Body]:
        """Return the replies to a worker."""
        replies = replies_to(self.handler, worker, next(self.numbers), body, tensors)
        return [reply.body for reply in replies if reply.worker == worker]

    def joins(self, worker: int) -> m.Joined:
        (joined,) = self.says(worker, m.Join())
        assert isinstance(joined, m.Joined)
        return joined

    def leases(self, worker: int) -> m.Leased:
        (leased,) = self.says(worker, m.Lease(1))
        assert isinstance(leased, m.Leased)
        return leased

    def meet(self, op: int, call: int) -> None:
        """Complete an operation with both workers."""
        assert self.says(0, m.Barrier(op, call)) == []
        replies = replies_to(self.handler, 1, next(self.numbers), m.Barrier(op, call))
        assert sorted(one.worker for one in replies) == [0, 1]


def test_a_joining_worker_enters_the_barrier_that_a_failed_one_had_entered() -> None:
    run = Run(meet=1)
    assert run.leases(0).batch == 0
    assert run.leases(0).barrier
    run.says(0, m.Barrier(2, 1))
    run.handler.remove(0)
    joined = run.joins(0)
    assert (joined.op, joined.barriers_passed, joined.barriers_announced) == (1, 0, [])
    assert run.leases(0).barrier and run.leases(1).barrier
    run.meet(2, 1)


def test_a_joining_worker_enters_the_end_of_the_epoch_that_a_failed_one_had_entered() -> None:
    run = Run(meet=None)
    run.says(0, m.Barrier(2, 0))
    run.handler.remove(0)
    assert run.joins(0).op == 1
    run.meet(2, 0)


def test_a_joining_worker_does_not_enter_a_barrier_that_the_members_have_passed() -> None:
    run = Run(meet=1)
    assert run.leases(0).batch == 0
    assert run.leases(0).barrier and run.leases(1).barrier
    run.meet(2, 1)
    run.handler.remove(0)
    assert run.says(0, m.Join()) == []  # worker 1 has not reported yet that it has passed
    (post,) = [one for one in replies_to(run.handler, 1, 1, m.LeaveBarrier(2, 1)) if one.worker == 0]
    assert isinstance(post.body, m.Joined)
    assert (post.body.op, post.body.barriers_passed, post.body.barriers_announced) == (2, 1, [False])
    assert run.leases(0).batch is not None
    run.meet(3, 0)


def test_a_worker_that_joins_after_all_failed_starts_far_past_their_barriers() -> None:
    run = Run(meet=1)
    run.leases(0)
    run.says(0, m.Barrier(2, 1))
    run.handler.remove(0)
    run.handler.remove(1)
    joined = run.joins(1)
    assert (joined.op, joined.barriers_passed, joined.barriers_announced) == (2 + SKIPPED, 1, [False])
    assert run.joins(0).op == joined.op


def test_a_restarted_dispatcher_learns_the_positions_of_the_workers() -> None:
    """A worker repeats its barrier and its position."""
    handler = DispatcherHandler(2, lambda: 0.0)
    for worker in (0, 1):
        replies_to(handler, worker, 0, m.ReplayOrder(1), ORDER)
        handler.dispatcher.set_announced(worker, [False, False])
    replies_to(handler, 0, 0, m.ReplayResult(3, [0, 1], 2))
    handler.remove(0)
    replies_to(handler, 1, 0, m.LeaveBarrier(2, 1))
    (post,) = replies_to(handler, 0, 1, m.Join())
    assert isinstance(post.body, m.Joined)
    assert (post.body.op, post.body.barriers_passed, post.body.barriers_announced) == (2, 1, [False])


def test_a_joining_worker_is_called_to_the_next_barrier_if_all_that_knew_the_last_one_failed() -> None:
    """A worker reports the number of barriers it has passed, and fails before it reports their kinds."""
    handler = DispatcherHandler(1, lambda: 0.0)
    replies_to(handler, 0, 0, m.ReplayOrder(1), ORDER)
    replies_to(handler, 0, 0, m.LeaveBarrier(9, 3))
    handler.remove(0)
    (post,) = replies_to(handler, 0, 1, m.Join())
    assert isinstance(post.body, m.Joined)
    assert (post.body.barriers_passed, len(post.body.barriers_announced)) == (3, 3)
    replies_to(handler, 0, 2, m.BeginEpoch(1, 1, False), BATCHES)
    leased = [replies_to(handler, 0, number, m.Lease(1))[0].body for number in (3, 4)]
    assert [isinstance(one, m.Leased) and one.barrier for one in leased] == [False, True]


def test_a_call_that_was_not_read_before_a_rollback_is_repeated() -> None:
    """At a snapshot the dispatcher learns the calls that each worker has read; a rollback voids later ones."""
    handler = DispatcherHandler(1, lambda: 0.0, InMemoryStore())
    replies_to(handler, 0, 1, m.BroadcastOrder(1, 0, 1), ORDER)
    replies_to(handler, 0, 2, m.BeginEpoch(1, 1, False), BATCHES)
    replies_to(handler, 0, 3, m.Snapshot(1, 0))
    _, call = [replies_to(handler, 0, number, m.Lease(1))[0].body for number in (4, 5)]
    assert isinstance(call, m.Leased) and call.barrier
    (begun,) = replies_to(handler, 0, 6, m.Rollback(0, 0, [1], [0], [], 0, 1))
    assert isinstance(begun.body, m.RolledBack)
    (again,) = replies_to(handler, 0, 7, m.Lease(1, begun.body.recovery_epoch))
    assert isinstance(again.body, m.Leased) and again.body.barrier


def test_a_worker_that_asked_the_shards_before_the_newest_snapshot_asks_again() -> None:
    """Otherwise all would roll back past a snapshot that a worker has continued from."""
    shelf = InMemoryStore()
    before = DispatcherHandler(2, lambda: 0.0, shelf)
    for cut in (1, 2):
        replies_to(before, 0, cut, m.Snapshot(cut, 0))
    for handler in (before, DispatcherHandler(2, lambda: 0.0, shelf)):
        late, now = (
            m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=1),
            m.Rollback(0, 0, [1, 2], [0], [], 0, newest_snapshot=2),
        )
        assert isinstance(replies_to(handler, 1, 3, late)[0].body, m.StaleRequest)
        assert shelf.snapshots() == [1, 2]
        (begun,) = replies_to(handler, 1, 4, now)
        assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 2


def test_all_roll_back_to_the_newest_snapshot_that_every_shard_has() -> None:
    handler = DispatcherHandler(2, lambda: 0.0, InMemoryStore())
    for cut in (1, 2):
        replies_to(handler, 0, cut, m.Snapshot(cut, 0))
    (begun,) = replies_to(handler, 1, 3, m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=2))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1


def test_there_is_no_rollback_before_all_shards_have_parameters() -> None:
    """The parameters are sent again to shards that have them, since a restarted process has lost them."""
    handler, shelf = DispatcherHandler(2, lambda: 0.0, InMemoryStore()), InMemoryStore()
    opening = m.Open(1, "async_sgd", 2, snapshot=2)
    replies_to(ShardHandler(2, lambda: 0.0, "stop", shelf), 0, 1, opening, [torch.zeros(4)])
    shard = ShardHandler(2, lambda: 0.0, "stop", shelf, boot_id=1)
    (begun,) = replies_to(handler, 1, 1, m.Rollback(0, -1, [2], [1], [], 0, newest_snapshot=-1))
    assert begun.body == m.RolledBack(0, -1, [1])
    assert replies_to(shard, 1, 2, m.RequestRollback(0, -1, 1))[0].body == m.Result()
    assert shelf.snapshots() == []
    assert replies_to(shard, 1, 3, opening, [torch.zeros(4)])[0].body == m.Result()
    assert replies_to(handler, 1, 4, m.Snapshot(2, 0))[0].body == m.EpochStatus(True)
    (begun,) = replies_to(handler, 1, 5, m.Rollback(0, 0, [2], [1], [], 0, newest_snapshot=2))
    assert begun.body == m.RolledBack(1, 2, [1])


@pytest.mark.parametrize("length", [3, SMALL_BYTES + 1])
def test_a_result_that_one_worker_received_reaches_the_others_after_it_failed(length: int) -> None:
    """One of three workers reports the result to a restarted dispatcher, and fails."""
    order = torch.arange(length).to(torch.uint8)
    handler = DispatcherHandler(4, lambda: 0.0)
    handler.remove(0)
    assert replies_to(handler, 1, 1, m.Gather(1, 0), [order[:0]]) == []
    (post,) = replies_to(handler, 2, 0, m.ReplayResult(1, [0, 1, 2, 3]), [order])
    assert (post.worker, post.request_id, post.body) == (1, 1, m.MembersResult([0, 1, 2, 3]))
    assert torch.equal(post.tensors[0], order)
    handler.remove(2)
    for worker in (3, 1):
        (post,) = replies_to(handler, worker, 2, m.Gather(1, 0), [order[:0]])
        assert (post.worker, post.body) == (worker, m.MembersResult([0, 1, 2, 3]))
        assert torch.equal(post.tensors[0], order)
    assert replies_to(handler, 3, 0, m.ReplayResult(1, [0, 1, 2, 3]), [order]) == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_epoch_order_in_use_is_that_of_all_workers_after_its_root_failed(is_cut: bool) -> None:
    """A worker reports it to a restarted dispatcher, or there is a snapshot of that epoch."""
    shelf = InMemoryStore()
    if is_cut:
        before = DispatcherHandler(3, lambda: 0.0, shelf)
        replies_to(before, 1, 1, m.ReplayOrder(1), ORDER)
        replies_to(before, 1, 1, m.Snapshot(1, 0))
    handler = DispatcherHandler(3, lambda: 0.0, shelf)
    if not is_cut:
        replies_to(handler, 1, 1, m.ReplayOrder(1), ORDER)
    for worker in (0, 1):
        handler.remove(worker)
    (post,) = replies_to(handler, 2, 2, m.BroadcastOrder(3, 2, 1), [ORDER[0] + 1])
    assert post.body == m.MembersResult([2])
    assert torch.equal(post.tensors[0], ORDER[0])


def test_the_last_received_result_is_stored_with_the_finished_workers() -> None:
    ends = InMemoryStore()
    handler = DispatcherHandler(2, lambda: 0.0, InMemoryStore(), finished_store=ends)
    replies_to(handler, 0, 0, m.ReplayResult(7, [0, 1]), ORDER)
    replies_to(handler, 0, 1, m.Finish())
    again = DispatcherHandler(2, lambda: 0.0, InMemoryStore(), finished_store=ends)
    (post,) = replies_to(again, 1, 1, m.Gather(7, None), [ORDER[0][:0]])
    assert post.body == m.MembersResult([0, 1])
    assert torch.equal(post.tensors[0], ORDER[0])


def test_a_worker_that_joins_after_all_and_the_dispatcher_failed_starts_past_the_restored_snapshot() -> None:
    shelf = InMemoryStore()
    replies_to(DispatcherHandler(1, lambda: 0.0, shelf), 0, 1, m.Snapshot(5000, 0))
    handler = DispatcherHandler(1, lambda: 0.0, shelf)
    handler.remove(0)
    assert isinstance(replies_to(handler, 0, 1, m.Join())[0].body, m.StaleRequest)
    replies_to(handler, 0, 2, m.Rollback(0, 0, [5000], [0], [], 0, 5000))
    (post,) = replies_to(handler, 0, 3, m.Join())
    assert isinstance(post.body, m.Joined)
    assert post.body.op > 5000


def test_a_barrier_that_one_worker_has_passed_was_called() -> None:
    handler = DispatcherHandler(2, lambda: 0.0)
    replies_to(handler, 0, 0, m.ReplayResult(3, [0, 1], index=2, snapshot_only=True))
    assert handler.dispatcher.barriers_announced == [True, True]
    assert replies_to(handler, 1, 1, m.Barrier(3, 2, True))[0].body == m.MembersResult([0, 1])


def test_a_snapshot_that_a_shard_cannot_store_does_not_count() -> None:
    """A rollback to every snapshot of the dispatcher is possible; the end of the epoch is reported regardless."""

    class Full(InMemoryStore):
        def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
            return cut < 2 and super().put(cut, facts, tensors)

    shelf, full = InMemoryStore(), Full()
    shard, handler = ShardHandler(1, lambda: 0.0, "stop", full), DispatcherHandler(1, lambda: 0.0, shelf)
    replies_to(shard, 0, 1, m.Open(1, "async_sgd", 1, snapshot=1), [torch.zeros(4)])
    replies_to(handler, 0, 1, m.Snapshot(1, 0))
    for number in (2, 3):  # sent twice, same reply
        (post,) = replies_to(shard, 0, number, m.Snapshot(2, 0))
        assert post.body == m.SnapshotList([], 0, 0)
        assert replies_to(handler, 0, number, m.Snapshot(2, 0, stored=False))[0].body == m.EpochStatus(True)
    assert full.snapshots() == shelf.snapshots() == [1]
    (begun,) = replies_to(handler, 0, 4, m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=1))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1
