"""The wire through a real parameter server keeps the laws of every wire, and a few of its own."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parameter_servers import ADDING_RECIPE, Servers, push, receive

from stretto.collective_ops import AllReduceMean
from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import message_memory
from stretto.parameter_server import messages as m
from stretto.parameter_server.client_types import RollbackRequiredError, ranges
from stretto.parameter_server.rpc_channel import DeathNotifier
from stretto.security import COORDINATOR
from stretto.transport.conformance import check_transport
from stretto.transport.elastic import ElasticTransport
from stretto.transport.rendezvous import ServerRendezvous
from tests.elastic_workers import ThreadConnection, ThreadCoordinator


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_it_passes_the_conformance_test_of_transports(servers: Servers, plain: bool, shards: int) -> None:
    check_transport(lambda workers: servers.clients(servers.start(workers, shards=shards, plain=plain)), (1, 3))


def test_an_elastic_transport_over_it_passes_the_conformance_test(servers: Servers) -> None:
    def make(workers: int) -> list[ElasticTransport]:
        clients, coordinator = servers.clients(servers.start(workers)), ThreadCoordinator(workers)
        with ThreadPoolExecutor(workers) as pool:
            return list(
                pool.map(
                    lambda client: ElasticTransport(
                        client.number, ThreadConnection(coordinator, client.number), ServerRendezvous(client)
                    ),
                    clients,
                )
            )

    check_transport(make, (3,))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000, 4097])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_ranges_cover_all_once(length: int, shards: int) -> None:
    found = ranges(length, shards)
    assert len(found) == shards
    assert [number for start, stop in found for number in range(start, stop)] == list(range(length))


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_traffic_counts_both_directions_encrypted_or_not(
    servers: Servers, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_memory, "SMALLEST_BYTES", sys.maxsize)
    (wire,) = servers.clients(servers.start(1, shards=2, plain=plain))
    numbers = torch.zeros(1_000_000)
    wire.open(1, ADDING_RECIPE, [numbers])
    before = wire.traffic()
    receive(push(wire, 1, [numbers]), [numbers])
    after = wire.traffic()
    assert after.counted
    assert 4_000_000 < after.bytes_sent - before.bytes_sent < 4_100_000
    assert 4_000_000 < after.bytes_received - before.bytes_received < 4_100_000
    wire.close()
    assert wire.traffic().bytes_sent >= after.bytes_sent


def test_two_updates_may_be_in_flight_and_awaited_in_any_order(servers: Servers) -> None:
    (wire,) = servers.clients(servers.start(1, shards=2))
    parts = [torch.zeros(600_000), torch.zeros(70, dtype=torch.float64)]
    wire.open(1, ADDING_RECIPE, parts)
    one, two = (push(wire, seq, [torch.full_like(part, float(seq)) for part in parts]) for seq in (1, 2))
    (later, after), (earlier, between) = receive(two, parts), receive(one, parts)
    assert (earlier.versions, later.versions) == ([1, 1], [2, 2])
    assert [(seq, version) for seq, version, *_ in earlier.applied + later.applied] == [(1, 1), (2, 2)]
    for part, first, second in zip(parts, between, after, strict=True):
        assert torch.equal(first, torch.full_like(part, 1.0))
        assert torch.equal(second, torch.full_like(part, 3.0))


def test_updates_and_means_do_not_disturb_each_other(servers: Servers) -> None:
    wires = servers.clients(servers.start(2, shards=2))
    theta = [torch.zeros(1000)]
    wires[0].open(1, ADDING_RECIPE, theta)
    asks = [wire.submit(AllReduceMean(torch.full((500,), 1.0))) for wire in wires]
    heard = [receive(push(wire, 1, [torch.ones(1000)]), theta) for wire in wires]
    assert [news.versions for news, _ in heard] == [[1, 1], [2, 2]]
    assert [float(parts[0].sum()) for _, parts in heard] == [1000.0, 2000.0]
    assert all(torch.equal(ask.wait(), torch.full((500,), 2.0)) for ask in asks)


def test_a_repeated_message_is_applied_once(servers: Servers) -> None:
    (wire,) = servers.clients(servers.start(1))
    theta = torch.zeros(300_000)
    wire.open(1, ADDING_RECIPE, [theta])
    for number in [wire.channels[0].send(m.Push(1, 1, 0, 8, 0.1), [torch.ones(300_000)]) for _ in range(2)]:
        body, (pieces,) = wire.channels[0].wait(number)
        assert isinstance(body, m.PushReply)
        assert body.version == 1
        assert torch.equal(torch.cat(pieces), torch.ones(300_000))
    news, (found,) = receive(wire.read([300_000]), [theta])
    assert news.versions == [1]
    assert float(found.sum()) == 300_000


def test_closing_twice_leaves_once_and_the_server_waits_for_all_to_leave(servers: Servers) -> None:
    hosted = servers.start(2)
    one, other = servers.clients(hosted)
    one.close()
    one.close()
    began = time.monotonic()
    hosted.server.await_leave(2, 0.3)
    assert time.monotonic() - began >= 0.3
    other.close()
    hosted.close_when_left(limit_s=15.0)
    assert time.monotonic() - began < 15.0  # the limit of a request is 20 s


def test_waits_for_a_worker_that_left_end_immediately(servers: Servers) -> None:
    one, other = servers.clients(servers.start(2, shards=2))
    ticket = one.submit(AllReduceMean(torch.ones(1000)))
    began = time.monotonic()
    other.close()
    with pytest.raises(TransportError, match=r"server 0 refused: worker 1 left"):
        ticket.wait()
    with pytest.raises(TransportError, match=r"the coordinator refused: worker 1 left"):
        one.all_gather_bytes(b"anyone?")
    assert time.monotonic() - began < 15.0  # the limit of a request is 20 s


def test_a_missing_worker_is_an_error_within_the_timeout(servers: Servers) -> None:
    one, _ = servers.clients(servers.start(2), timeout_s=2.0)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"server 0 at tcp://127\.0\.0\.1:\d+ did not answer within 2 s"):
        one.submit(AllReduceMean(torch.ones(4))).wait()
    assert 1.9 < time.monotonic() - began < 15.0


def test_different_operations_are_an_error_not_a_wrong_mean(servers: Servers) -> None:
    wires = servers.clients(servers.start(2))
    ticket = wires[0].submit(AllReduceMean(torch.ones(2)))
    wires[1].submit(AllReduceMean(torch.ones(3)))
    with pytest.raises(TransportError, match="differ in shape"):
        ticket.wait()


# Joining and leaving


def test_waits_end_without_the_contributions_of_failed_workers(servers: Servers) -> None:
    hosted = servers.start(3, shards=2)
    wires = servers.clients(hosted)
    notifier = DeathNotifier(hosted.addresses, hosted.keys_of(COORDINATOR))
    ask = wires[2].submit(AllReduceMean(torch.full((200,), 1 / 3)))
    other = wires[0].submit(AllReduceMean(torch.full((200,), 1 / 3)))
    with ThreadPoolExecutor(2) as crew:
        told = [crew.submit(wires[one].broadcast_bytes, lambda one=one: f"of {one}".encode(), 1) for one in (0, 2)]
        assert notifier.notify_ended(1, 0)
        assert [one.result(60.0) for one in told] == [b"of 0", b"of 0"], "the first of those who are left tells"
    for one in (ask, other):
        torch.testing.assert_close(one.wait(), torch.ones(200))
    assert [(wire.worker, wire.workers) for wire in (wires[0], wires[2])] == [(0, 2), (1, 2)]
    notifier.close()


def test_messages_of_a_former_incarnation_are_ignored(servers: Servers) -> None:
    hosted = servers.start(2)
    one, other = servers.clients(hosted, timeout_s=3.0)
    notifier = DeathNotifier(hosted.addresses, hosted.keys_of(COORDINATOR))
    assert notifier.notify_ended(1, 0)
    with pytest.raises(TransportError, match="did not answer"):
        other.submit(AllReduceMean(torch.ones(4))).wait()
    assert torch.equal(one.submit(AllReduceMean(torch.ones(4))).wait(), torch.ones(4) * 2), "scaled from two to one"
    notifier.close()


def test_abort_ends_waits_and_the_next_generation_continues(servers: Servers) -> None:
    wires = servers.clients(servers.start(3, shards=2))
    for wire in wires:
        wire.regroup(1, [0, 1, 2], wire.number)
    with ThreadPoolExecutor(2) as crew:
        waiting = [crew.submit(wires[one].submit(AllReduceMean(torch.ones(500))).wait) for one in (0, 1)]
        time.sleep(0.1)
        began = time.monotonic()
        for wire in wires[:2]:
            wire.abort()
        for one in waiting:
            with pytest.raises(BrokenTransportError):
                one.result(20.0)
        assert time.monotonic() - began < 15.0  # the limit of a request is 20 s
    with pytest.raises(BrokenTransportError):
        wires[0].submit(AllReduceMean(torch.ones(2))).wait()
    for wire in wires[:2]:
        wire.regroup(2, [0, 1], wire.number)
    asks = [wire.submit(AllReduceMean(torch.full((500,), 0.5))) for wire in wires[:2]]
    assert all(torch.equal(ask.wait(), torch.ones(500)) for ask in asks)


def test_requests_before_a_rollback_are_void(servers: Servers) -> None:
    """A batch without a lease, or a call to a barrier that the coordinator does not know to be received."""
    (wire,) = servers.clients(servers.start(1))
    wire.begin_epoch(1, [1, 1, 1], 1, "first-come")
    assert wire.lease(wire.request_lease(1)).batch == 0
    asked = wire.request_lease(1)
    wire.recovery_epoch += 1
    with pytest.raises(RollbackRequiredError):
        wire.lease(asked)
    assert wire.barriers_announced == 0
