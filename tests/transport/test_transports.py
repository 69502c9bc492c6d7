"""Every wire passes the one table of laws."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import TransportError
from stretto.transport import in_memory
from stretto.transport import process_group as collective_wire
from stretto.transport.conformance import check_transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.single_worker import SingleWorkerTransport


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def collective(workers: int, timeout_s: float = 20.0) -> list[ProcessGroupTransport]:
    """Gloo groups in the threads of one process, which meet in a store in memory."""
    store = dist.HashStore()
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda worker: ProcessGroupTransport(store, worker, workers, timeout_s), range(workers)))


@pytest.mark.parametrize(
    ("make", "workers"),
    [(in_memory.wires, (1, 2, 3, 5)), (collective, (2, 3, 4)), (lambda n: [SingleWorkerTransport()], (1,))],
    ids=["memory", "collective", "solo"],
)
def test_every_transport_passes_the_conformance_test(make, workers) -> None:
    check_transport(make, workers)


def test_a_connection_with_a_reused_descriptor_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a group connects, the sockets of the former one are closed, and their descriptors reused."""
    with socket.socket() as before, socket.socket() as new:
        real = collective_wire._form

        def forming(*what: object) -> object:
            os.dup2(new.fileno(), before.fileno())
            return real(*what)

        monkeypatch.setattr(collective_wire, "_form", forming)
        wire = ProcessGroupTransport(dist.HashStore(), 0, 1, 20.0)
        assert before.fileno() in wire._opened
        assert new.fileno() not in wire._opened


@pytest.mark.parametrize("make", [in_memory.wires, collective], ids=["memory", "collective"])
def test_a_missing_worker_is_an_error_within_the_timeout(make) -> None:
    ends = make(2, 0.3)
    with pytest.raises(TransportError, match=r"worker"):
        ends[0].submit(AllReduceMean(torch.ones(4))).wait()


def test_a_worker_that_left_is_named_immediately() -> None:
    ends = in_memory.wires(3, 20.0)
    ends[2].close()
    ends[1].submit(AllReduceMean(torch.ones(2)))
    with pytest.raises(TransportError, match="worker 2 left"):
        ends[0].submit(AllReduceMean(torch.ones(2))).wait()


def test_different_operations_are_an_error_not_a_wrong_mean() -> None:
    ends = in_memory.wires(2, 5.0)
    for ask in (AllGather(torch.ones(2)), AllReduceMean(torch.ones(3)), AllReduceMean(torch.ones(2).double())):
        ticket = ends[0].submit(AllReduceMean(torch.ones(2)))
        ends[1].submit(ask)
        with pytest.raises(TransportError, match="different operations|differ in shape"):
            ticket.wait()


def test_traffic_of_a_ring_is_counted_on_its_sockets() -> None:
    """Ends in one process share their list of sockets, so the whole is looked at."""
    workers, numbers = 3, 1_000_000
    ends = collective(workers)
    before = ends[0].traffic().bytes_sent
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda end: end.submit(AllReduceMean(torch.ones(numbers))).wait(), ends))
    sent = ends[0].traffic().bytes_sent - before
    ring = workers * 2 * (workers - 1) / workers * 4 * numbers
    seen_by_one_end = sent / ring
    assert ends[0].traffic().counted
    assert 1 / workers <= seen_by_one_end * 1.001
    assert sent % 1 == 0
    for end in ends:
        end.close()
