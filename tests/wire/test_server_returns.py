"""A server's process is killed and started again at the same socket: the run goes on from the last cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served import ADDING, Processes, hear, push

from stretto.errors import WireError
from stretto.wire.link import dial
from stretto.wire.server import ServerWire
from stretto.wire.shards import AnewError

LIMIT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Processes]:
    server = Processes(tmp_path)
    server.start()
    yield server
    server.end()


def wire_to(server: Processes, patience_s: float | None) -> ServerWire:
    return dial(0, 1, server.addresses, None, LIMIT_S, patience_s=patience_s)


def test_what_came_after_the_cut_is_undone_and_the_rest_is_there(server: Processes) -> None:
    wire = wire_to(server, LIMIT_S)
    theta = [torch.zeros(70_000)]
    wire.open(1, ADDING, theta)
    wire.gather(b"open")
    wire.begin(1, [4, 4, 4], None, False)
    for batch in range(2):
        leased = wire.lease(wire.ask_lease(1))
        assert leased.batch == batch
        hear(push(wire, batch + 1, [torch.ones(70_000)]), theta)
        wire.settle(1, [batch])
        if batch == 0:
            assert not wire.meet(1), "there are batches left"
    server.kill()
    server.start()
    with pytest.raises(AnewError):
        hear(push(wire, 3, [torch.ones(70_000)]), theta)
    wire.recover()
    news, (found,) = hear(wire.read([70_000]), theta)
    assert (news.versions, float(found.mean())) == ([1], 1.0)
    assert [wire.lease(wire.ask_lease(1)).batch for _ in range(3)] == [1, 2, None]
    hear(push(wire, 1, [torch.ones(70_000)], 1), theta)
    wire.settle(1, [1, 2])
    assert wire.is_over(1)
    assert wire.counted(1).tolist() == [1] * 12
    wire.close()


def test_a_server_that_does_not_come_back_is_an_error_after_the_patience(server: Processes) -> None:
    wire = wire_to(server, 0.5)
    wire.open(1, ADDING, [torch.zeros(10)])
    server.kill()
    with pytest.raises(WireError, match=r"server 0 at .* went away, and did not come back within 0\.5 s"):
        hear(wire.read([10]), [torch.zeros(10)])
    wire.close()


def test_without_patience_a_server_that_is_gone_is_an_error_at_once(server: Processes) -> None:
    wire = wire_to(server, None)
    wire.open(1, ADDING, [torch.zeros(10)])
    server.kill()
    with pytest.raises(WireError, match="server 0 at .* went away"):
        hear(wire.read([10]), [torch.zeros(10)])
    wire.close()
