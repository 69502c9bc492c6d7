"""Exchanges of tensors between two workers through a shard, whose process and connections may fail."""

from __future__ import annotations

import random

import pytest
import torch
from example_counts import examples
from faulty_servers import FaultyCluster, Worker
from handlers import replies_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.collective_ops import Exchange
from stretto.parameter_server import messages as m
from stretto.parameter_server.barrier import GENERATION
from stretto.parameter_server.framing import FramingError
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.transport.interface import CHANNELS

WORKERS, EXCHANGES = 4, 24


def shard(workers: int = 3) -> ShardHandler:
    return ShardHandler(workers, lambda: 0.0, "stop")


def ask(handler: ShardHandler, worker: int, op: int, peer: int, value: float = 0.0, channel: int = 0) -> dict:
    """Send a worker's tensor; return the replies by worker: the number received, or the refusal."""
    body = m.ExchangeTensors(op, peer, channel)
    replies = replies_to(handler, worker, op, body, [torch.full((worker + 1,), value)])
    return {
        one.worker: one.body.text if isinstance(one.body, m.Refused) else one.tensors[0].tolist() for one in replies
    }


def test_each_worker_gets_the_tensor_of_the_other() -> None:
    handler = shard()
    assert ask(handler, 2, 1, 0, 5.0) == {}
    assert ask(handler, 0, 1, 2, 7.0) == {0: [5.0] * 3, 2: [7.0]}


def test_pairs_and_channels_do_not_mix() -> None:
    handler = shard()
    assert ask(handler, 0, 1, 1) == ask(handler, 0, 1, 2) == ask(handler, 1, 1, 0, channel=1) == {}
    assert set(ask(handler, 1, 1, 0)) == set(ask(handler, 0, 1, 1, channel=1)) == {0, 1}
    assert set(ask(handler, 2, 1, 0)) == {0, 2}


def test_dtypes_that_differ_are_refused_at_both() -> None:
    handler = shard()
    replies_to(handler, 0, 1, m.ExchangeTensors(1, 1), [torch.ones(2)])
    replies = replies_to(handler, 1, 1, m.ExchangeTensors(1, 0), [torch.ones(2, dtype=torch.int64)])
    assert [type(one.body) for one in replies] == [m.Refused, m.Refused]


@pytest.mark.parametrize("ends", ["leave", "remove"])
def test_exchanges_with_a_worker_that_ended_are_refused(ends: str) -> None:
    handler = shard()
    assert ask(handler, 0, 1, 1) == {}
    assert [(one.worker, type(one.body)) for one in getattr(handler, ends)(1)] == [(0, m.Refused)]
    if ends == "leave":
        assert set(ask(handler, 2, 1, 1)) == {2}
    else:
        with pytest.raises(FramingError, match="an exchange with worker 1"):
            ask(handler, 2, 1, 1)


def test_a_generation_ends_the_exchanges_of_the_one_before() -> None:
    handler = shard()
    assert ask(handler, 0, 1, 1) == {}
    handler.take(0, m.Header(0, m.Group(1, [0, 1])), [])
    assert ask(handler, 1, 1, 0) == {}
    assert ask(handler, 0, GENERATION + 1, 1, 3.0) == {}
    assert ask(handler, 1, GENERATION + 1, 0, 4.0) == {0: [4.0] * 2, 1: [3.0]}


def test_a_failure_in_a_generation_is_left_to_the_coordinator() -> None:
    handler = shard()
    handler.take(0, m.Header(0, m.Group(1, [0, 1])), [])
    assert ask(handler, 0, GENERATION + 1, 1) == {}
    assert handler.remove(1) == []


@pytest.mark.parametrize(("peer", "channel"), [(0, 0), (7, 0), (-1, 0), (1, CHANNELS), (1, -1)])
def test_exchanges_that_cannot_be_are_refused(peer: int, channel: int) -> None:
    with pytest.raises(FramingError, match="an exchange with worker"):
        ask(shard(), 0, 1, peer, channel=channel)


def tensor_of(worker: int, place: int) -> Tensor:
    return torch.full((3 * worker + place % 2,), float(100 * worker + place))


@given(st.integers(0, 10_000), st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=examples(60), deadline=None)
def test_exchanges_survive_lost_shards_and_connections(seed: int, faults: list[int]) -> None:
    """Each fault is the number of messages delivered before it. Up to three exchanges of a worker are under way."""
    draw = random.Random(seed)
    plan = [(*sorted(draw.sample(range(WORKERS), 2)), draw.randrange(2)) for _ in range(EXCHANGES)]
    done = []

    def run(worker: Worker) -> None:
        pending = []
        for place, (first, second, channel) in enumerate(plan):
            if worker.number in (first, second):
                peer = first + second - worker.number
                op = Exchange(peer, tensor_of(worker.number, place), channel)
                pending.append((worker.client.submit(op), tensor_of(peer, place)))
            while pending and (len(pending) > 2 or place == EXCHANGES - 1):
                handle, expected = pending.pop(0)
                assert torch.equal(handle.wait(), expected)
                done.append(expected)
        worker.client.all_gather_bytes(b"all have their tensors")

    cluster = FaultyCluster(WORKERS, 2, seed, run, snapshot_interval_s=1000)
    try:
        cluster.start()
        for fault in faults:
            for _ in range(fault):
                cluster.step()
            cluster.kill_server(draw.randrange(2)) if draw.random() < 0.5 else cluster.break_connection()
        while not cluster.is_done:
            assert cluster.step(), f"all wait: {cluster.history}"
    finally:
        cluster.close()
    assert len(done) == 2 * EXCHANGES
