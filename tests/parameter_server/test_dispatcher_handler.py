"""Who is to come to which meeting: newcomers, where others have died, and all, when the servers went back."""

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
    """A run of two workers that are in no meeting: `op` exchanges were, and a pass has begun."""

    def __init__(self, meet: int | None) -> None:
        self.desk, self.numbers = DispatcherHandler(2, lambda: 0.0), itertools.count(1)
        for worker in (0, 1):
            self.says(worker, m.BroadcastOrder(1, 0, 1), ORDER)
        for worker in (0, 1):
            self.says(worker, m.BeginEpoch(1, meet, False), BATCHES)
            self.says(worker, m.LeaveBarrier(1, 0))

    def says(self, worker: int, body: m.Request, tensors: Sequence[Tensor] = ()) -> list[m.Body]:
        """What is replied to that worker."""
        return [
            one.body for one in replies_to(self.desk, worker, next(self.numbers), body, tensors) if one.worker == worker
        ]

    def joins(self, worker: int) -> m.Joined:
        (joined,) = self.says(worker, m.Join())
        assert isinstance(joined, m.Joined)
        return joined

    def leases(self, worker: int) -> m.Leased:
        (leased,) = self.says(worker, m.Lease(1))
        assert isinstance(leased, m.Leased)
        return leased

    def meet(self, op: int, call: int) -> None:
        """Both come to an exchange, and it is whole."""
        assert self.says(0, m.Barrier(op, call)) == []
        replies = replies_to(self.desk, 1, next(self.numbers), m.Barrier(op, call))
        assert sorted(one.worker for one in replies) == [0, 1]


def test_a_newcomer_comes_to_the_meeting_that_a_dead_one_had_come_to() -> None:
    run = Run(meet=1)
    assert run.leases(0).batch == 0
    assert run.leases(0).barrier
    run.says(0, m.Barrier(2, 1))
    run.desk.remove(0)
    joined = run.joins(0)
    assert (joined.op, joined.barriers_passed, joined.barriers_called) == (1, 0, [])
    assert run.leases(0).barrier and run.leases(1).barrier
    run.meet(2, 1)


def test_a_newcomer_comes_to_the_end_of_the_pass_that_a_dead_one_had_come_to() -> None:
    run = Run(meet=None)
    run.says(0, m.Barrier(2, 0))
    run.desk.remove(0)
    assert run.joins(0).op == 1
    run.meet(2, 0)


def test_a_newcomer_does_not_come_to_what_the_members_have_been_to() -> None:
    run = Run(meet=1)
    assert run.leases(0).batch == 0
    assert run.leases(0).barrier and run.leases(1).barrier
    run.meet(2, 1)
    run.desk.remove(0)
    assert run.says(0, m.Join()) == []  # worker 1 has not said yet that it is through
    (post,) = [one for one in replies_to(run.desk, 1, 1, m.LeaveBarrier(2, 1)) if one.worker == 0]
    assert isinstance(post.body, m.Joined)
    assert (post.body.op, post.body.barriers_passed, post.body.barriers_called) == (2, 1, [False])
    assert run.leases(0).batch is not None
    run.meet(3, 0)


def test_who_comes_when_all_are_dead_is_far_beyond_what_they_came_to() -> None:
    run = Run(meet=1)
    run.leases(0)
    run.says(0, m.Barrier(2, 1))
    run.desk.remove(0)
    run.desk.remove(1)
    joined = run.joins(1)
    assert (joined.op, joined.barriers_passed, joined.barriers_called) == (2 + SKIPPED, 1, [False])
    assert run.joins(0).op == joined.op


def test_a_coordinator_that_was_started_again_hears_where_they_stand() -> None:
    """One says again what it came to, and where it is."""
    desk = DispatcherHandler(2, lambda: 0.0)
    for worker in (0, 1):
        replies_to(desk, worker, 0, m.ReplayOrder(1), ORDER)
        desk.dispatcher.note_notified(worker, [False, False])
    replies_to(desk, 0, 0, m.ReplayResult(3, [0, 1], 2))
    desk.remove(0)
    replies_to(desk, 1, 0, m.LeaveBarrier(2, 1))
    (post,) = replies_to(desk, 0, 1, m.Join())
    assert isinstance(post.body, m.Joined)
    assert (post.body.op, post.body.barriers_passed, post.body.barriers_called) == (2, 1, [False])


def test_who_comes_when_all_who_knew_of_the_meetings_are_dead_is_told_of_the_next_one() -> None:
    """A worker says to how many it has been, and dies before it says what they were for."""
    desk = DispatcherHandler(1, lambda: 0.0)
    replies_to(desk, 0, 0, m.ReplayOrder(1), ORDER)
    replies_to(desk, 0, 0, m.LeaveBarrier(9, 3))
    desk.remove(0)
    (post,) = replies_to(desk, 0, 1, m.Join())
    assert isinstance(post.body, m.Joined)
    assert (post.body.barriers_passed, len(post.body.barriers_called)) == (3, 3)
    replies_to(desk, 0, 2, m.BeginEpoch(1, 1, False), BATCHES)
    leased = [replies_to(desk, 0, number, m.Lease(1))[0].body for number in (3, 4)]
    assert [isinstance(one, m.Leased) and one.barrier for one in leased] == [False, True]


def test_a_call_that_was_answered_but_not_read_before_all_went_back_is_made_again() -> None:
    """The coordinator hears at the cut of what calls each has read; what was answered to it besides is void."""
    desk = DispatcherHandler(1, lambda: 0.0, InMemoryStore())
    replies_to(desk, 0, 1, m.BroadcastOrder(1, 0, 1), ORDER)
    replies_to(desk, 0, 2, m.BeginEpoch(1, 1, False), BATCHES)
    replies_to(desk, 0, 3, m.Snapshot(1, 0))
    _, call = [replies_to(desk, 0, number, m.Lease(1))[0].body for number in (4, 5)]
    assert isinstance(call, m.Leased) and call.barrier
    (begun,) = replies_to(desk, 0, 6, m.Rollback(0, 0, [1], [0], [], 0, 1))
    assert isinstance(begun.body, m.RolledBack)
    (again,) = replies_to(desk, 0, 7, m.Lease(1, begun.body.recovery_epoch))
    assert isinstance(again.body, m.Leased) and again.body.barrier


def test_who_asked_the_shards_before_the_newest_cut_was_made_asks_them_again() -> None:
    """Otherwise all would go back beyond a cut that somebody has gone on from."""
    shelf = InMemoryStore()
    before = DispatcherHandler(2, lambda: 0.0, shelf)
    for cut in (1, 2):
        replies_to(before, 0, cut, m.Snapshot(cut, 0))
    for desk in (before, DispatcherHandler(2, lambda: 0.0, shelf)):
        late, now = (
            m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=1),
            m.Rollback(0, 0, [1, 2], [0], [], 0, newest_snapshot=2),
        )
        assert isinstance(replies_to(desk, 1, 3, late)[0].body, m.StaleRequest)
        assert shelf.snapshots() == [1, 2]
        (begun,) = replies_to(desk, 1, 4, now)
        assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 2


def test_where_a_shard_has_lost_the_newest_cut_all_go_back_to_an_earlier_one() -> None:
    desk = DispatcherHandler(2, lambda: 0.0, InMemoryStore())
    for cut in (1, 2):
        replies_to(desk, 0, cut, m.Snapshot(cut, 0))
    (begun,) = replies_to(desk, 1, 3, m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=2))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1


def test_before_all_shards_have_got_their_parameters_there_is_nothing_to_go_back_to() -> None:
    """Those that have got them are given them again; a process that was started since forgets them."""
    desk, shelf = DispatcherHandler(2, lambda: 0.0, InMemoryStore()), InMemoryStore()
    opening = m.Open(1, "async_sgd", 2, snapshot=2)
    replies_to(ShardHandler(2, lambda: 0.0, "stop", shelf), 0, 1, opening, [torch.zeros(4)])
    shard = ShardHandler(2, lambda: 0.0, "stop", shelf, boot_id=1)
    (begun,) = replies_to(desk, 1, 1, m.Rollback(0, -1, [2], [1], [], 0, newest_snapshot=-1))
    assert begun.body == m.RolledBack(0, -1, [1])
    assert replies_to(shard, 1, 2, m.RequestRollback(0, -1, 1))[0].body == m.Result()
    assert shelf.snapshots() == []
    assert replies_to(shard, 1, 3, opening, [torch.zeros(4)])[0].body == m.Result()
    assert replies_to(desk, 1, 4, m.Snapshot(2, 0))[0].body == m.EpochStatus(True)
    (begun,) = replies_to(desk, 1, 5, m.Rollback(0, 0, [2], [1], [], 0, newest_snapshot=2))
    assert begun.body == m.RolledBack(1, 2, [1])


@pytest.mark.parametrize("length", [3, SMALL_BYTES + 1])
def test_what_one_has_heard_is_told_to_the_others_though_all_who_knew_it_are_dead(length: int) -> None:
    """By a coordinator that was started again, to which one of three says what it has heard, and dies."""
    order = torch.arange(length).to(torch.uint8)
    desk = DispatcherHandler(4, lambda: 0.0)
    desk.remove(0)
    assert replies_to(desk, 1, 1, m.Gather(1, 0), [order[:0]]) == []
    (post,) = replies_to(desk, 2, 0, m.ReplayResult(1, [0, 1, 2, 3]), [order])
    assert (post.worker, post.request_id, post.body) == (1, 1, m.MembersResult([0, 1, 2, 3]))
    assert torch.equal(post.tensors[0], order)
    desk.remove(2)
    for worker in (3, 1):
        (post,) = replies_to(desk, worker, 2, m.Gather(1, 0), [order[:0]])
        assert (post.worker, post.body) == (worker, m.MembersResult([0, 1, 2, 3]))
        assert torch.equal(post.tensors[0], order)
    assert replies_to(desk, 3, 0, m.ReplayResult(1, [0, 1, 2, 3]), [order]) == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_order_that_somebody_has_begun_to_work_by_is_that_of_all_though_the_teller_is_dead(is_cut: bool) -> None:
    """It said so to a coordinator that was started again, or there is a cut of that pass."""
    shelf = InMemoryStore()
    if is_cut:
        before = DispatcherHandler(3, lambda: 0.0, shelf)
        replies_to(before, 1, 1, m.ReplayOrder(1), ORDER)
        replies_to(before, 1, 1, m.Snapshot(1, 0))
    desk = DispatcherHandler(3, lambda: 0.0, shelf)
    if not is_cut:
        replies_to(desk, 1, 1, m.ReplayOrder(1), ORDER)
    for worker in (0, 1):
        desk.remove(worker)
    (post,) = replies_to(desk, 2, 2, m.BroadcastOrder(3, 2, 1), [ORDER[0] + 1])
    assert post.body == m.MembersResult([2])
    assert torch.equal(post.tensors[0], ORDER[0])


def test_the_last_answer_that_was_heard_is_kept_with_those_who_have_come_to_an_end() -> None:
    ends = InMemoryStore()
    desk = DispatcherHandler(2, lambda: 0.0, InMemoryStore(), finished_store=ends)
    replies_to(desk, 0, 0, m.ReplayResult(7, [0, 1]), ORDER)
    replies_to(desk, 0, 1, m.Finish())
    again = DispatcherHandler(2, lambda: 0.0, InMemoryStore(), finished_store=ends)
    (post,) = replies_to(again, 1, 1, m.Gather(7, None), [ORDER[0][:0]])
    assert post.body == m.MembersResult([0, 1])
    assert torch.equal(post.tensors[0], ORDER[0])


def test_who_comes_when_all_and_the_coordinator_are_dead_is_beyond_the_cut_to_which_they_go_back() -> None:
    shelf = InMemoryStore()
    replies_to(DispatcherHandler(1, lambda: 0.0, shelf), 0, 1, m.Snapshot(5000, 0))
    desk = DispatcherHandler(1, lambda: 0.0, shelf)
    desk.remove(0)
    assert isinstance(replies_to(desk, 0, 1, m.Join())[0].body, m.StaleRequest)
    replies_to(desk, 0, 2, m.Rollback(0, 0, [5000], [0], [], 0, 5000))
    (post,) = replies_to(desk, 0, 3, m.Join())
    assert isinstance(post.body, m.Joined)
    assert post.body.op > 5000


def test_a_meeting_that_one_has_been_to_was_called() -> None:
    desk = DispatcherHandler(2, lambda: 0.0)
    replies_to(desk, 0, 0, m.ReplayResult(3, [0, 1], index=2, snapshot_only=True))
    assert desk.dispatcher.barriers_called == [True, True]
    assert replies_to(desk, 1, 1, m.Barrier(3, 2, True))[0].body == m.MembersResult([0, 1])


def test_a_cut_that_a_shard_has_no_room_for_is_none() -> None:
    """All that the coordinator has can be gone back to; that the pass is over it says all the same."""

    class Full(InMemoryStore):
        def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
            return cut < 2 and super().put(cut, facts, tensors)

    shelf, full = InMemoryStore(), Full()
    shard, desk = ShardHandler(1, lambda: 0.0, "stop", full), DispatcherHandler(1, lambda: 0.0, shelf)
    replies_to(shard, 0, 1, m.Open(1, "async_sgd", 1, snapshot=1), [torch.zeros(4)])
    replies_to(desk, 0, 1, m.Snapshot(1, 0))
    for number in (2, 3):  # said twice, answered alike
        (post,) = replies_to(shard, 0, number, m.Snapshot(2, 0))
        assert post.body == m.SnapshotList([], 0, 0)
        assert replies_to(desk, 0, number, m.Snapshot(2, 0, stored=False))[0].body == m.EpochStatus(True)
    assert full.snapshots() == shelf.snapshots() == [1]
    (begun,) = replies_to(desk, 0, 4, m.Rollback(0, 0, [1], [0], [], 0, newest_snapshot=1))
    assert isinstance(begun.body, m.RolledBack) and begun.body.snapshot == 1
