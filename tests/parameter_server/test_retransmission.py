"""What has left a server that died may have reached nobody: its replica is asked again, and says the same."""

from __future__ import annotations

import pytest
import torch
from handlers import replies_to

from stretto.parameter_server import messages as m
from stretto.parameter_server.handler import SMALL_BYTES, OutgoingMessage
from stretto.parameter_server.shard_handler import ShardHandler

NUMBERS = 40_000
ENCODED = "downpour(every=1, how=both_ways(exact(), top_k(0.5)))"


def test_an_encoded_reply_that_is_asked_for_again_is_the_same() -> None:
    """The next would leave out what this one said."""
    desk = ShardHandler(1, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Open(1, ENCODED, 1), [torch.zeros(NUMBERS)])
    update = torch.arange(NUMBERS, dtype=torch.float32)
    push = m.Push(1, 1, 0, 8, 0.1)
    (first,) = replies_to(desk, 0, 2, push, [update])
    (again,) = replies_to(desk, 0, 2, push, [update])
    assert isinstance(first.body, m.PushReply) and again.body == first.body
    assert again.tensors[0].numel() and torch.equal(again.tensors[0], first.tensors[0])
    (news,) = replies_to(desk, 0, 3, m.Push(1, 2, 1, 8, 0.1), [update])
    assert not torch.equal(news.tensors[0], first.tensors[0])


@pytest.mark.parametrize("recipe", ["downpour(every=1)", "elastic_averaging(every=1)"])
def test_what_became_of_an_update_is_told_again(recipe: str) -> None:
    """Worker and server of an elastic recipe move by the same difference, so it is told the same numbers, too."""
    desk = ShardHandler(1, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Open(1, recipe, 1), [torch.zeros(NUMBERS)])
    (first,) = replies_to(desk, 0, 2, m.Push(1, 1, 0, 8, 0.1), [torch.ones(NUMBERS)])
    before = [one.clone() for one in first.tensors]
    (again,) = replies_to(desk, 0, 2, m.Push(1, 1, 0, 8, 0.1), [torch.ones(NUMBERS)])
    assert isinstance(first.body, m.PushReply) and first.body.applied
    assert again.body == first.body
    assert all(torch.equal(one, other) for one, other in zip(again.tensors, before, strict=True))


def test_a_refusal_is_told_again() -> None:
    desk = ShardHandler(1, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Open(1, "downpour(every=1)", 1), [torch.zeros(NUMBERS)])
    nan = torch.full((NUMBERS,), torch.nan)
    answers = [replies_to(desk, 0, 2, m.Push(1, 1, 0, 8, 0.1), [nan])[0].body for _ in range(2)]
    assert isinstance(answers[0], m.Refused) and answers[1] == answers[0]


def test_a_refusal_of_an_exchange_of_all_is_told_again() -> None:
    """Of what does not fit together, and of what lacks a worker that has left."""
    desk = ShardHandler(3, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Contribute(1, "mean"), [torch.zeros(3)])
    replies_to(desk, 1, 1, m.Contribute(1, "mean"), [torch.zeros(3)])
    first = {one.worker: one.body for one in replies_to(desk, 2, 1, m.Contribute(1, "mean"), [torch.zeros(4)])}
    replies_to(desk, 0, 2, m.Contribute(2, "mean"), [torch.zeros(3)])
    (left,) = desk.leave(1)
    for op, body in ((1, first[0]), (2, left.body)):
        (again,) = replies_to(desk, 0, op, m.Contribute(op, "mean"), [torch.zeros(3)])
        assert isinstance(body, m.Refused) and (again.worker, again.request_id, again.body) == (0, op, body)


def test_who_has_come_to_an_end_holds_nobody_back_though_its_good_bye_was_lost() -> None:
    desk = ShardHandler(2, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Open(1, "stale_synchronous(bound=1)", 2), [torch.zeros(4)])
    for seq in (1, 2):
        posts = replies_to(desk, 0, seq + 1, m.Push(1, seq, seq - 1, 8, 0.1), [torch.ones(4)])
    assert posts == []
    ended, news = replies_to(desk, 1, 1, m.Finish())
    assert isinstance(ended.body, m.Result)
    assert (news.worker, news.request_id) == (0, 3) and isinstance(news.body, m.PushReply)
    assert desk.leave(1) == []


@pytest.mark.parametrize("length", [10, NUMBERS])
def test_answers_to_all_are_remembered_until_nobody_lacks_them(length: int) -> None:
    """Worker 1 has several asks under way; a connection breaks when the answers are on their way to it."""
    desk = ShardHandler(2, lambda: 0.0, "stop")

    def ask(worker: int, op: int, heard: int) -> list[OutgoingMessage]:
        return replies_to(desk, worker, op, m.Contribute(op, "mean", heard), [torch.full((length,), float(op))])

    for op in range(1, 101):
        ask(0, op, op - 1)
        posts = ask(1, op, 0)
        assert {one.worker: one.body for one in posts} == dict.fromkeys((0, 1), m.Result(0))
    again = [ask(1, op, 0) for op in range(1, 101)]
    assert [float(post.tensors[0][0]) for (post,) in again] == [2.0 * op for op in range(1, 101)]
    ask(0, 101, 100)
    assert ask(1, 101, 60)[0].body == m.Result(60)
    assert [len(ask(1, op, 60)) for op in range(1, 102)] == [0] * 60 + [1] * 41


def test_who_is_dead_lacks_nothing() -> None:
    desk = ShardHandler(3, lambda: 0.0, "stop")
    for worker in range(3):
        posts = replies_to(desk, worker, 1, m.Contribute(1, "mean"), [torch.ones(NUMBERS)])
    desk.remove(2)
    replies_to(desk, 0, 2, m.Contribute(2, "mean", 1), [torch.ones(NUMBERS)])
    posts = replies_to(desk, 1, 2, m.Contribute(2, "mean", 1), [torch.ones(NUMBERS)])
    assert {one.worker: one.body for one in posts} == dict.fromkeys((0, 1), m.MembersResult([0, 1], 1))


@pytest.mark.parametrize("length", [10, SMALL_BYTES])
def test_the_last_answer_to_all_is_told_again_however_large_it_is(length: int) -> None:
    """A connection broke when it was on its way to one of them."""
    desk = ShardHandler(2, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Contribute(1, "mean"), [torch.zeros(length)])
    first = {one.worker: one for one in replies_to(desk, 1, 1, m.Contribute(1, "mean"), [torch.ones(length)])}
    (again,) = replies_to(desk, 0, 1, m.Contribute(1, "mean"), [torch.zeros(length)])
    assert (again.worker, again.request_id, again.body) == (0, 1, first[0].body)
    assert torch.equal(again.tensors[0], first[0].tensors[0])


def test_of_updates_of_a_stream_nothing_is_noted() -> None:
    """They carry no batches, and there is no end to them."""
    desk = ShardHandler(1, lambda: 0.0, "stop")
    replies_to(desk, 0, 1, m.Open(1, "downpour(every=1)", 1), [torch.zeros(4)])
    for seq in range(1, 4):
        replies_to(desk, 0, seq + 1, m.Push(1, seq, seq - 1, 8, 0.1), [torch.ones(4)])
    assert desk._batches_by_worker[0]._batches == {}
    replies_to(desk, 0, 5, m.Push(1, 4, 3, 8, 0.1, 0, 1, [0]), [torch.ones(4)])
    assert desk._batches_by_worker[0]._batches == {4: [0]}
