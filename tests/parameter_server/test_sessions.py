"""Sessions: over connections that break at any moment every request is processed once, in order, and has its reply."""

from __future__ import annotations

import random

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.parameter_server import messages as m
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.sessions import ClientSession, WorkerSession


class Line:
    """A connection that loses messages in flight when it breaks; the service holds some replies back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.client: ClientSession[int] = ClientSession()
        self.session = WorkerSession()
        self.requests: list[tuple[int, int, int]] = []
        self.replies: list[OutgoingMessage] = []
        self.processed: list[int] = []
        self.held_back: list[int] = []
        self.received: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.most_stored = 0

    def send(self, value: int) -> None:
        number = self.client.number(value, has_reply=value % 3 > 0)
        self.numbers[value] = number
        self.requests.append((number, value, self.client.answered_below))

    def arrive(self) -> None:
        if not self.requests:
            return
        number, value, answered_below = self.requests.pop(0)
        if self.session.is_repeated(number, answered_below):
            self.replies += self.session.repeat(number)
            return
        self.processed.append(value)
        if value % 3:
            self.held_back.append(number)
        if self.random.random() < 0.7:
            self.release()

    def release(self) -> None:
        """Reply to a request that was held back."""
        if self.held_back:
            number = self.held_back.pop(self.random.randrange(len(self.held_back)))
            reply = OutgoingMessage(0, number, m.Result(number))
            self.session.store(reply)
            self.most_stored = max(self.most_stored, len(self.session.replies))
            self.replies.append(reply)

    def arrive_reply(self) -> None:
        if self.replies:
            reply = self.replies.pop(0)
            if self.client.answer(reply.request_id):
                assert reply.request_id not in self.received
                assert isinstance(reply.body, m.Result)
                self.received[reply.request_id] = reply.body.received_up_to

    def break_off(self) -> None:
        self.requests.clear()
        self.replies.clear()
        self.requests = [(number, value, self.client.answered_below) for number, value in self.client.unanswered()]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 40))
@settings(max_examples=examples(100))
def test_every_request_is_processed_once_in_order_and_has_its_reply(seed: int, count: int) -> None:
    line, values = Line(seed), list(range(1, count + 1))
    waiting = list(values)
    for _ in range(40 * count):
        acts = [line.arrive, line.arrive_reply, line.release, line.break_off]
        if waiting:
            acts.append(lambda: line.send(waiting.pop(0)))
        line.random.choices(acts, [4, 4, 2, 1, *([3] if len(acts) > 4 else [])])[0]()
    for value in waiting:
        line.send(value)
    line.break_off()
    while line.requests or line.replies or line.held_back:
        line.arrive()
        line.release()
        line.arrive_reply()
    assert line.processed == values
    with_reply = {line.numbers[value] for value in values if value % 3}
    assert line.received == {number: number for number in with_reply}
    line.session.is_repeated(0, line.client.answered_below)
    later_than_all = [value for value in values if value % 3 == 0 and line.numbers[value] > max(with_reply, default=0)]
    assert [value for _, value in line.client.unanswered()] == later_than_all, "only these are not confirmed"
    assert not line.session.replies


def test_a_reply_that_can_be_made_again_is_stored_without_its_tensors() -> None:
    session = WorkerSession()
    again = OutgoingMessage(0, 1, m.Result(7))
    session.store(OutgoingMessage(0, 1, m.Result(), again=lambda: again))
    assert session.repeat(1) == [again]


@pytest.mark.parametrize("number", [0, 5])
def test_messages_outside_of_the_session_are_processed_each_time(number: int) -> None:
    session = WorkerSession()
    assert not session.is_repeated(number, 0)
    assert session.is_repeated(number, 0) is (number > 0)
