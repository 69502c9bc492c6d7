"""Barriers that workers are called to: joining workers after failures of others, and all workers after a rollback."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from handlers import replies_to
from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.dispatcher_handler import SKIPPED, DispatcherHandler
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
            self.says(worker, m.BeginEpoch(1, meet, "first-come"), BATCHES)
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
    assert (joined.op, joined.barriers_passed) == (1, 0)
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
    assert (post.body.op, post.body.barriers_passed) == (2, 1)
    assert run.leases(0).batch is not None
    run.meet(3, 0)


def test_a_worker_that_joins_after_all_failed_starts_far_past_their_barriers() -> None:
    run = Run(meet=1)
    run.leases(0)
    run.says(0, m.Barrier(2, 1))
    run.handler.remove(0)
    run.handler.remove(1)
    joined = run.joins(1)
    assert (joined.op, joined.barriers_passed) == (2 + SKIPPED, 1)
    assert run.joins(0).op == joined.op


def test_a_call_that_was_not_read_before_a_rollback_is_repeated() -> None:
    """At a snapshot the dispatcher learns the calls that each worker has read; a rollback voids later ones."""
    handler = DispatcherHandler(1, lambda: 0.0, math.inf)
    replies_to(handler, 0, 1, m.BroadcastOrder(1, 0, 1), ORDER)
    replies_to(handler, 0, 2, m.BeginEpoch(1, 1, "first-come"), BATCHES)
    replies_to(handler, 0, 3, m.Snapshot(1, 0))
    _, call = [replies_to(handler, 0, number, m.Lease(1))[0].body for number in (4, 5)]
    assert isinstance(call, m.Leased) and call.barrier
    (begun,) = replies_to(handler, 0, 6, m.Rollback(0, 0, [1], [0], 0, 1))
    assert isinstance(begun.body, m.RolledBack)
    (again,) = replies_to(handler, 0, 7, m.Lease(1, begun.body.recovery_epoch))
    assert isinstance(again.body, m.Leased) and again.body.barrier


def test_a_worker_that_asked_the_shards_before_the_newest_snapshot_asks_again() -> None:
    """Otherwise all would roll back past a snapshot that a worker has continued from."""
    handler = DispatcherHandler(2, lambda: 0.0, math.inf)
    for cut in (1, 2):
        replies_to(handler, 0, cut, m.Snapshot(cut, 0))
    late, now = (m.Rollback(0, 0, have, [0], 0, newest_snapshot=have[-1]) for have in ([1], [1, 2]))
    assert isinstance(replies_to(handler, 1, 3, late)[0].body, m.StaleRequest)
    (begun,) = replies_to(handler, 1, 4, now)
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 2


def test_all_roll_back_to_the_newest_snapshot_that_every_shard_has() -> None:
    handler = DispatcherHandler(2, lambda: 0.0, math.inf)
    for cut in (1, 2):
        replies_to(handler, 0, cut, m.Snapshot(cut, 0))
    (begun,) = replies_to(handler, 1, 3, m.Rollback(0, 0, [1], [0], 0, newest_snapshot=2))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1


def test_there_is_no_rollback_before_all_shards_have_parameters() -> None:
    """The parameters are sent again to shards that have them, since a restarted process has lost them."""
    handler, shelf = DispatcherHandler(2, lambda: 0.0, math.inf), InMemoryStore()
    opening = m.Open(1, "async_sgd", 2, snapshot=2)
    replies_to(ShardHandler(2, lambda: 0.0, "stop", shelf), 0, 1, opening, [torch.zeros(4)])
    shard = ShardHandler(2, lambda: 0.0, "stop", shelf, boot_id=1)
    (begun,) = replies_to(handler, 1, 1, m.Rollback(0, -1, [2], [1], 0, newest_snapshot=-1))
    assert begun.body == m.RolledBack(0, -1, [1], [0, 1])
    assert replies_to(shard, 1, 2, m.RequestRollback(0, -1, 1))[0].body == m.Result()
    assert shelf.snapshots() == []
    assert replies_to(shard, 1, 3, opening, [torch.zeros(4)])[0].body == m.Result()
    assert replies_to(handler, 1, 4, m.Snapshot(2, 0))[0].body == m.EpochStatus(True)
    (begun,) = replies_to(handler, 1, 5, m.Rollback(0, 0, [2], [1], 0, newest_snapshot=2))
    assert begun.body == m.RolledBack(1, 2, [1], [0, 1])


def test_a_snapshot_that_a_shard_cannot_store_does_not_count() -> None:
    """A rollback to every snapshot of the dispatcher is possible; the end of the epoch is reported regardless."""

    class Full(InMemoryStore):
        def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
            return cut < 2 and super().put(cut, facts, tensors)

    full = Full()
    shard, handler = ShardHandler(1, lambda: 0.0, "stop", full), DispatcherHandler(1, lambda: 0.0, math.inf)
    replies_to(shard, 0, 1, m.Open(1, "async_sgd", 1, snapshot=1), [torch.zeros(4)])
    replies_to(handler, 0, 1, m.Snapshot(1, 0))
    for number in (2, 3):  # sent twice, same reply
        (post,) = replies_to(shard, 0, number, m.Snapshot(2, 0))
        assert post.body == m.SnapshotList([], 0, 0)
        assert replies_to(handler, 0, number, m.Snapshot(2, 0, stored=False))[0].body == m.EpochStatus(True)
    assert full.snapshots() == [1]
    (kept,) = replies_to(handler, 0, 9, m.ListSnapshots())
    assert kept.body == m.SnapshotList([1], 0, 0)
    (begun,) = replies_to(handler, 0, 4, m.Rollback(0, 0, [1], [0], 0, newest_snapshot=1))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1


def test_what_joining_workers_need_is_replied_to_so_that_it_is_sent_again() -> None:
    run = Run(meet=None)
    facts = torch.arange(5, dtype=torch.uint8)
    assert isinstance(run.says(0, m.StoreFacts(), [facts])[0], m.Result)
    run.handler.load_state(run.handler.state())
    run.handler.remove(1)
    (joined,) = replies_to(run.handler, 1, next(run.numbers), m.Join())
    assert torch.equal(joined.tensors[1], facts)


def test_batches_of_a_worker_that_leases_all_and_trains_none_return_when_it_is_declared_failed() -> None:
    run = Run(meet=None)
    hoarded = {run.leases(0).batch for _ in BATCHES[0]}
    assert hoarded == set(range(6))
    assert run.leases(1).batch is None
    run.handler.remove(0)
    assert {run.leases(1).batch for _ in BATCHES[0]} == hoarded
