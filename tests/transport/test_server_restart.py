"""A server's process is killed and restarted at the same socket: the run continues from the last snapshot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from parameter_servers import ADDING_RECIPE, ServerProcesses, Servers, push, receive

from stretto.collective_ops import AllReduceMean
from stretto.errors import TransportError
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.parameter_server.rpc_channel import DISCONNECTED, connect_client

LIMIT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcesses]:
    server = ServerProcesses(tmp_path)
    server.start()
    yield server
    server.end()


def wire_to(server: ServerProcesses, failure_timeout_s: float | None) -> ParameterServerClient:
    return connect_client(0, 1, server.addresses, None, LIMIT_S, failure_timeout_s=failure_timeout_s)


def test_updates_after_the_snapshot_are_undone_and_earlier_ones_kept(server: ServerProcesses) -> None:
    wire = wire_to(server, LIMIT_S)
    theta = [torch.zeros(70_000)]
    wire.open(1, ADDING_RECIPE, theta)
    wire.all_gather_bytes(b"open")
    wire.begin_epoch(1, [4, 4, 4], None, "first-come")
    for batch in range(2):
        leased = wire.lease(wire.request_lease(1))
        assert leased.batch == batch
        receive(push(wire, batch + 1, [torch.ones(70_000)]), theta)
        wire.settle(1, [batch])
        if batch == 0:
            assert not wire.wait_at_barrier(1), "there are batches left"
    server.kill()
    server.start()
    with pytest.raises(RollbackRequiredError):
        receive(push(wire, 3, [torch.ones(70_000)]), theta)
    wire.roll_back()
    news, (found,) = receive(wire.read([70_000]), theta)
    assert (news.versions, float(found.mean())) == ([1], 1.0)
    assert [wire.lease(wire.request_lease(1)).batch for _ in range(3)] == [1, 2, None]
    receive(push(wire, 1, [torch.ones(70_000)], 1), theta)
    wire.settle(1, [1, 2])
    assert wire.wait_epoch_end(1)
    assert wire.sample_counts(1)[0].tolist() == [1] * 12
    wire.close()


LARGE = 100_000


def break_connection(wire: ParameterServerClient) -> None:
    """Bytes that the shard has received and not read are lost with its connection."""
    link: Any = wire.channels[0]
    link._problem = DISCONNECTED
    link._reconnect()


def test_replies_lost_with_a_connection_are_sent_again(servers: Servers) -> None:
    """Several large ones were under way, and the other worker has them already."""
    hosted = servers.start(2)
    wires = [
        connect_client(
            worker, 2, hosted.addresses, hosted.keys_of(b"worker %d" % worker), LIMIT_S, failure_timeout_s=LIMIT_S
        )
        for worker in range(2)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.all_gather_bytes(b"here"), wires))
    given = [torch.full((LARGE,), number / 2) for number in range(1, 6)]
    tickets = [[wire.submit(AllReduceMean(one.clone())) for one in given] for wire in wires]
    assert [float(ticket.wait().mean()) for ticket in tickets[0]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    break_connection(wires[1])
    assert [float(ticket.wait().mean()) for ticket in tickets[1]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.close(), wires))


def test_a_worker_keeps_only_contributions_that_another_may_lack(servers: Servers) -> None:
    hosted = servers.start(2, shards=2)
    wires = [
        connect_client(
            worker, 2, hosted.addresses, hosted.keys_of(b"worker %d" % worker), LIMIT_S, failure_timeout_s=LIMIT_S
        )
        for worker in range(2)
    ]
    for _ in range(20):
        tickets = [[wire.submit(AllReduceMean(torch.full((LARGE,), 0.5))) for _ in range(3)] for wire in wires]
        assert all(float(one.wait().mean()) == 1.0 for one in itertools.chain.from_iterable(tickets))
        assert all(len(wire._contributions._sent) <= 2 * 6 for wire in wires), "of this step and the last"
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.close(), wires))


def test_a_server_that_does_not_return_is_an_error_after_the_failure_timeout(server: ServerProcesses) -> None:
    wire = wire_to(server, 0.5)
    wire.open(1, ADDING_RECIPE, [torch.zeros(10)])
    server.kill()
    with pytest.raises(TransportError, match=r"server 0 at .* went away, and did not come back within 0\.5 s"):
        receive(wire.read([10]), [torch.zeros(10)])
    wire.close()


def test_without_a_failure_timeout_a_failed_server_is_an_error_immediately(server: ServerProcesses) -> None:
    wire = wire_to(server, None)
    wire.open(1, ADDING_RECIPE, [torch.zeros(10)])
    server.kill()
    with pytest.raises(TransportError, match="server 0 at .* went away"):
        receive(wire.read([10]), [torch.zeros(10)])
    wire.close()
