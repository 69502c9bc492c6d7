"""Replies are lost with a connection: the service receives the requests again, and sends the same replies."""

from __future__ import annotations

import pytest
import torch
from handlers import replies_to, service_replies_to

from stretto.parameter_server import messages as m
from stretto.parameter_server.service import Service
from stretto.parameter_server.shard_handler import UPDATES_KEPT, ShardHandler

NUMBERS = 40_000
ENCODED = "downpour(every=1, how=both_ways(exact(), top_k(0.5)))"


def test_a_repeated_request_gets_the_same_encoded_reply() -> None:
    """The next encoding would omit the values of this one."""
    service = Service(ShardHandler(1, lambda: 0.0, "stop"))
    service_replies_to(service, 0, 1, m.Open(1, ENCODED, 1), [torch.zeros(NUMBERS)])
    update = torch.arange(NUMBERS, dtype=torch.float32)
    push = m.Push(1, 1, 0, 8, 0.1)
    (first,) = service_replies_to(service, 0, 2, push, [update])
    (again,) = service_replies_to(service, 0, 2, push, [update])
    assert isinstance(first.body, m.PushReply) and again.body == first.body
    assert again.tensors[0].numel() and torch.equal(again.tensors[0], first.tensors[0])
    (news,) = service_replies_to(service, 0, 3, m.Push(1, 2, 1, 8, 0.1), [update])
    assert not torch.equal(news.tensors[0], first.tensors[0])


@pytest.mark.parametrize("recipe", ["downpour(every=1)", "elastic_averaging(every=1)"])
def test_a_repeated_push_gets_the_same_reply(recipe: str) -> None:
    """In elastic averaging worker and server move by the same difference, so the numbers are the same too."""
    service = Service(ShardHandler(1, lambda: 0.0, "stop"))
    service_replies_to(service, 0, 1, m.Open(1, recipe, 1), [torch.zeros(NUMBERS)])
    (first,) = service_replies_to(service, 0, 2, m.Push(1, 1, 0, 8, 0.1), [torch.ones(NUMBERS)])
    before = [one.clone() for one in first.tensors]
    (again,) = service_replies_to(service, 0, 2, m.Push(1, 1, 0, 8, 0.1), [torch.ones(NUMBERS)])
    assert isinstance(first.body, m.PushReply) and first.body.applied
    assert again.body == first.body
    assert all(torch.equal(one, other) for one, other in zip(again.tensors, before, strict=True))


def test_a_repeated_request_is_refused_again() -> None:
    service = Service(ShardHandler(1, lambda: 0.0, "stop"))
    service_replies_to(service, 0, 1, m.Open(1, "downpour(every=1)", 1), [torch.zeros(NUMBERS)])
    nan = torch.full((NUMBERS,), torch.nan)
    answers = [service_replies_to(service, 0, 2, m.Push(1, 1, 0, 8, 0.1), [nan])[0].body for _ in range(2)]
    assert isinstance(answers[0], m.Refused) and answers[1] == answers[0]


def test_a_repeated_collective_operation_is_refused_again() -> None:
    """Operations that differ, and operations without a worker that has left."""
    service = Service(ShardHandler(3, lambda: 0.0, "stop"))
    service_replies_to(service, 0, 1, m.Contribute(1, "mean"), [torch.zeros(3)])
    service_replies_to(service, 1, 1, m.Contribute(1, "mean"), [torch.zeros(3)])
    first = {
        one.worker: one.body for one in service_replies_to(service, 2, 1, m.Contribute(1, "mean"), [torch.zeros(4)])
    }
    service_replies_to(service, 0, 2, m.Contribute(2, "mean"), [torch.zeros(3)])
    (left,) = service_replies_to(service, 1, 0, m.Leave())
    for op, body in ((1, first[0]), (2, left.body)):
        (again,) = service_replies_to(service, 0, op, m.Contribute(op, "mean"), [torch.zeros(3)])
        assert isinstance(body, m.Refused) and (again.worker, again.request_id, again.body) == (0, op, body)


def test_a_finished_worker_blocks_no_other_if_its_last_message_was_lost() -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    replies_to(handler, 0, 1, m.Open(1, "stale_synchronous(bound=1)", 2), [torch.zeros(4)])
    for seq in (1, 2):
        posts = replies_to(handler, 0, seq + 1, m.Push(1, seq, seq - 1, 8, 0.1), [torch.ones(4)])
    assert posts == []
    ended, news = replies_to(handler, 1, 1, m.Finish())
    assert isinstance(ended.body, m.Result)
    assert (news.worker, news.request_id) == (0, 3) and isinstance(news.body, m.PushReply)
    assert handler.leave(1) == []


def test_replies_are_stored_until_the_worker_has_them() -> None:
    """Worker 1 has several operations pending; its connection breaks while their results are under way."""
    service = Service(ShardHandler(2, lambda: 0.0, "stop"))

    def ask(worker: int, op: int, answered_below: int) -> list[float]:
        body, tensors = m.Contribute(op, "mean"), [torch.full((NUMBERS,), float(op))]
        replies = service_replies_to(service, worker, op, body, tensors, answered_below)
        return [float(reply.tensors[0][0]) for reply in replies if reply.worker == worker]

    for op in range(1, 101):
        ask(0, op, op)
        assert ask(1, op, 1) == [2.0 * op]
    assert [ask(1, op, 1) for op in range(1, 101)] == [[2.0 * op] for op in range(1, 101)]
    assert ask(1, 101, 61) == []
    assert [len(ask(1, op, 61)) for op in range(1, 101)] == [0] * 60 + [1] * 40


@pytest.mark.parametrize("length", [10, NUMBERS])
def test_a_repeated_contribution_to_an_operation_that_is_over_is_ignored(length: int) -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    for worker in range(2):
        replies_to(handler, worker, 1, m.Contribute(1, "mean"), [torch.ones(length)])
    assert replies_to(handler, 0, 0, m.Contribute(1, "mean"), [torch.ones(length)]) == []


def test_results_are_not_stored_for_failed_workers() -> None:
    handler = ShardHandler(3, lambda: 0.0, "stop")
    for worker in range(3):
        posts = replies_to(handler, worker, 1, m.Contribute(1, "mean"), [torch.ones(NUMBERS)])
    handler.remove(2)
    replies_to(handler, 0, 2, m.Contribute(2, "mean", 1), [torch.ones(NUMBERS)])
    posts = replies_to(handler, 1, 2, m.Contribute(2, "mean", 1), [torch.ones(NUMBERS)])
    assert {one.worker: one.body for one in posts} == dict.fromkeys((0, 1), m.MembersResult([0, 1], 1))


def test_a_shard_keeps_the_last_updates_of_a_worker() -> None:
    """An epoch over a stream may have no end. After a rollback the numbers begin again."""
    handler = ShardHandler(1, lambda: 0.0, "stop")
    replies_to(handler, 0, 1, m.Open(1, "downpour(every=1)", 1), [torch.zeros(4)])
    for number, seq in enumerate((*range(1, 200), *range(1, 10))):
        push = m.Push(1, seq, seq - 1, 8, 0.1, 0, 1, [number])
        replies_to(handler, 0, number + 2, push, [torch.ones(4)])
    kept = handler._batches_by_worker[0]._updates
    assert len(kept) <= 2 * UPDATES_KEPT
    assert [kept[seq].batches for seq in range(1, 10)] == [[199 + before] for before in range(9)]
