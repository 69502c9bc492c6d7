"""Every transport passes the conformance test; properties of single transports."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulator import harness
from simulator.test_engine import Scene
from simulator.test_worker_failures import training
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from stretto.collective_ops import AllGather, AllReduceMean, Exchange
from stretto.errors import BrokenTransportError, NothingCameError, TransportError
from stretto.membership.messages import GenerationView
from stretto.simulator.runner import Simulator
from stretto.transport import encrypted_sockets, in_memory
from stretto.transport import process_group as collective_wire
from stretto.transport.conformance import check_end, check_operations, check_transport
from stretto.transport.elastic import AbortableTransport, ElasticTransport
from stretto.transport.encrypted_rendezvous import EncryptedRendezvous
from stretto.transport.interface import Collectives, Transport
from stretto.transport.peer_group import PeerGroup
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import over_shared_memory
from stretto.transport.single_worker import SingleWorkerTransport
from tests.elastic_workers import InMemoryRendezvous, ThreadConnection, ThreadCoordinator
from tests.encrypted_ends import encrypted, relayed
from tests.relays import shared_relay

SHORT_S = 1.5
"""Limit of waits that end at it: a busy machine connects all other workers within it."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(autouse=True)
def _machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers count as being on several machines, so that those with a relay use it."""
    monkeypatch.setattr(encrypted_sockets, "machine_name", lambda: "")


def collective(workers: int, timeout_s: float = 20.0) -> list[ProcessGroupTransport]:
    """Gloo groups in the threads of one process, which meet in a store in memory."""
    store = dist.HashStore()
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda worker: ProcessGroupTransport(store, worker, workers, timeout_s), range(workers)))


class GroupsInThreads:
    """Connects the process groups of generations in the threads of one process."""

    address = ""

    def __init__(self, store: Any, in_memory: bool) -> None:
        self._store, self._in_memory = store, in_memory

    def form(self, form: GenerationView, rank: int) -> AbortableTransport:
        store = PrefixStore(str(form.generation), self._store)
        group = ProcessGroupTransport(store, rank, len(form.members), 20.0, elastic=True)
        return over_shared_memory(group) if self._in_memory else group

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def elastic(workers: int, rendezvous: Callable[[ThreadCoordinator], Any]) -> list[ElasticTransport]:
    """Return elastic transports of one coordinator in memory."""
    coordinator = ThreadCoordinator(workers)
    sources = [rendezvous(coordinator) for _ in range(workers)]

    def end(worker: int) -> ElasticTransport:
        return ElasticTransport(worker, ThreadConnection(coordinator, worker), sources[worker])

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(end, range(workers)))


def elastic_groups(workers: int, in_memory: bool) -> list[ElasticTransport]:
    """Return elastic transports over gloo, which meet in one store."""
    source = GroupsInThreads(dist.HashStore(), in_memory)
    return elastic(workers, lambda _: source)


def elastic_encrypted(workers: int) -> list[ElasticTransport]:
    """Return elastic transports that are encrypted, each with a rendezvous of its own."""
    return elastic(workers, lambda _: EncryptedRendezvous("127.0.0.1", 20.0, 20.0))


def elastic_relayed(workers: int) -> list[ElasticTransport]:
    """Return elastic transports through a relay."""
    access = shared_relay().access
    return elastic(workers, lambda _: EncryptedRendezvous("127.0.0.1", 20.0, 20.0, relay=access))


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (in_memory.wires, (1, 2, 3, 5)),
        (collective, (2, 3, 4)),
        (lambda n: [SingleWorkerTransport()], (1,)),
        (lambda n: elastic(n, InMemoryRendezvous), (2, 3)),
        (lambda n: elastic_groups(n, in_memory=False), (3,)),
        (lambda n: elastic_groups(n, in_memory=True), (3,)),
        (lambda n: [PeerGroup(end, range(n)) for end in in_memory.wires(n)], (1, 2, 3, 5)),
        (encrypted, (1, 2, 3)),
        pytest.param(encrypted, (5,), marks=pytest.mark.long),
        (elastic_encrypted, (2, 3)),
        (relayed, (1, 2, 3)),
        pytest.param(relayed, (5,), marks=pytest.mark.long),
        (elastic_relayed, (2, 3)),
    ],
    ids=[
        "memory",
        "collective",
        "solo",
        "elastic memory",
        "elastic groups",
        "elastic shared memory",
        "group",
        "encrypted",
        "five encrypted",
        "elastic encrypted",
        "relayed",
        "five relayed",
        "elastic relayed",
    ],
)
def test_every_transport_passes_the_conformance_test(make, workers) -> None:
    check_transport(make, workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_simulated_transport_passes_the_conformance_test(workers: int) -> None:
    Scene(workers, "100Mbit/s 1ms").lived(lambda _, transport: check_end(transport))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_simulated_elastic_transport_passes_the_conformance_test(workers: int, monkeypatch) -> None:
    connect, passed = Simulator.transport, []

    def checked(*arguments: Any) -> Transport:
        transport = connect(*arguments)
        assert transport.repeats_attempts
        check_operations(transport)
        passed.append(transport.worker)
        return transport

    monkeypatch.setattr(Simulator, "transport", checked)
    harness.simulated(workers, training(1), "allreduce", fault="kill worker 0 at 1000s")
    assert sorted(passed) == [*range(workers)]


# --- exchanges of pairs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [in_memory.wires, collective, encrypted, relayed], ids=["memory", "collective", "encrypted", "relayed"]
)
def test_an_exchange_without_its_peer_is_an_error_within_the_timeout(make) -> None:
    ends = make(3, SHORT_S)
    alone, others = ends[0].submit(Exchange(1, torch.ones(4))), [ends[1], ends[2]]
    with ThreadPoolExecutor(2) as pool:
        pair = list(pool.map(lambda end: end.submit(Exchange(3 - end.worker, torch.ones(4))).wait(), others))
    assert all(torch.equal(received, torch.ones(4)) for received in pair)
    with pytest.raises(TransportError, match="worker 0 waited|worker 1 did not contribute") as raised:
        alone.wait()
    assert isinstance(raised.value, NothingCameError) == (make in (encrypted, relayed))


@pytest.mark.parametrize(
    "make", [in_memory.wires, collective, encrypted, relayed], ids=["memory", "collective", "encrypted", "relayed"]
)
def test_an_exchange_of_two_dtypes_is_an_error_at_both_workers(make) -> None:
    ends = make(2, 20.0)
    handles = [end.submit(Exchange(1 - end.worker, torch.ones(4).to(dtype)))
               for end, dtype in zip(ends, (torch.float32, torch.float64), strict=True)]  # fmt: skip
    with pytest.raises(TransportError, match="differ in dtype"):
        handles[0].wait()
    with pytest.raises(TransportError):
        handles[1].wait()


def abortable(workers: int) -> list[ProcessGroupTransport]:
    """Return ends of a gloo group that can be aborted."""
    store = dist.HashStore()
    with ThreadPoolExecutor(workers) as pool:
        return list(
            pool.map(lambda rank: ProcessGroupTransport(store, rank, workers, 20.0, elastic=True), range(workers))
        )


@pytest.mark.parametrize("make", [abortable, encrypted, relayed], ids=["collective", "encrypted", "relayed"])
def test_an_abort_ends_an_exchange_and_a_group(make) -> None:
    ends = make(2)
    group, began = ends[0].group([1, 0]), time.monotonic()
    waiting = [ends[0].submit(Exchange(1, torch.ones(9_000_000))), group.submit(AllReduceMean(torch.ones(2)))]
    threading.Timer(0.1, ends[0].abort).start()
    for handle in waiting:
        with pytest.raises(BrokenTransportError):
            handle.wait()
    with pytest.raises(BrokenTransportError):
        group.all_gather_bytes(b"late")
    with pytest.raises(BrokenTransportError):
        ends[1].submit(Exchange(0, torch.ones(1))).wait()
    assert time.monotonic() - began < 15.0  # the time limit is 20 s
    for end in ends:
        end.close()


def test_a_closed_group_is_refused_and_leaves_its_transport_open() -> None:
    ends = in_memory.wires(1)
    group = ends[0].group([0])
    group.close()
    assert ends[0].all_gather_bytes(b"open") == [b"open"]
    with pytest.raises(TransportError, match="different ranks below 1"):
        ends[0].group([0, 1])


def group_mean(end: Collectives, contribution: Tensor) -> Any:
    return end.group(range(end.workers)).submit(AllReduceMean(contribution)).wait()


@pytest.mark.parametrize("make", [collective, encrypted, relayed], ids=["collective", "encrypted", "relayed"])
@pytest.mark.parametrize("numbers", [10_007, 9_000_001], ids=["one piece", "many pieces"])
def test_means_of_a_group_have_the_same_bits_at_all_workers(make, numbers: int) -> None:
    ends, contributions = make(3), drawn(3, numbers)
    with ThreadPoolExecutor(3) as pool:
        means = list(
            pool.map(lambda end, mine: end.group(range(3)).submit(AllReduceMean(mine)).wait(), ends, contributions)
        )
    expected = contributions[0] + contributions[1] + contributions[2]
    assert all(torch.equal(mean, expected) for mean in means)
    for end in ends:
        end.close()


@pytest.mark.parametrize("make", [encrypted, relayed], ids=["encrypted", "relayed"])
@pytest.mark.parametrize("numbers", [10_007, 50_000, 9_000_001], ids=["pairs", "ring", "ring of many pieces"])
def test_encrypted_means_have_the_same_bits_at_all_workers(make, numbers: int) -> None:
    """Around a ring, a part of the numbers is added from its own worker on."""
    ends, contributions = make(3), drawn(3, numbers)
    order = [(0, 1, 2)] * 3 if numbers == 10_007 else [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    parts = [torch.tensor_split(one.clone(), 3) for one in contributions]
    expected = torch.cat([parts[i][part] + parts[j][part] + parts[k][part] for part, (i, j, k) in enumerate(order)])
    with ThreadPoolExecutor(3) as pool:
        means = list(pool.map(lambda end, mine: end.submit(AllReduceMean(mine)).wait(), ends, contributions))
    assert all(torch.equal(mean, expected) for mean in means)
    for end in ends:
        end.close()


def drawn(workers: int, numbers: int) -> list[Tensor]:
    """Return a contribution of each worker."""
    return [torch.randn(numbers, generator=torch.Generator().manual_seed(worker)) for worker in range(workers)]


@pytest.mark.parametrize("make", [in_memory.wires, encrypted, relayed], ids=["memory", "encrypted", "relayed"])
def test_means_of_a_group_can_be_waited_for_in_any_order_and_between_other_operations(make) -> None:
    """Workers wait at other times than each other: some before they submit the next operation, some after all."""
    ends, waits = make(3), [(0, 2, 1), (0, 1, 2), (2, 0, 1)]

    def exchange(end: Collectives) -> list[Any]:
        group = end.group(range(3))
        ops = [AllReduceMean(torch.full((700_000,), 1.0)), AllGather(torch.ones(9)), AllReduceMean(torch.ones(1000))]
        if end.worker == 1:
            return [group.submit(op).wait() for op in ops]
        handles = [group.submit(op) for op in ops]
        return [handles[number].wait() for number in waits[end.worker]]

    with ThreadPoolExecutor(3) as pool:
        for order, found in zip(waits, pool.map(exchange, ends), strict=True):
            first, gathered, last = (found[order.index(number)] for number in range(3))
            assert torch.equal(first, torch.full((700_000,), 3.0))
            assert torch.equal(last, torch.full((1000,), 3.0))
            assert len(gathered) == 3
    for end in ends:
        end.close()


def test_half_precision_in_a_group_is_rounded_once() -> None:
    ends = in_memory.wires(3)
    values = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    with ThreadPoolExecutor(3) as pool:
        means = list(pool.map(group_mean, ends, values))
    assert all(torch.equal(mean, torch.full((3,), 258.0, dtype=torch.bfloat16)) for mean in means)


# --- single transports ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "make", [in_memory.wires, collective, encrypted, relayed], ids=["memory", "collective", "encrypted", "relayed"]
)
def test_a_missing_worker_is_an_error_within_the_timeout(make) -> None:
    ends = make(2, SHORT_S)
    with pytest.raises(TransportError, match=r"worker"):
        ends[0].submit(AllReduceMean(torch.ones(4))).wait()


def test_a_worker_that_left_is_named_immediately() -> None:
    ends = in_memory.wires(3, 20.0)
    ends[2].close()
    ends[1].submit(AllReduceMean(torch.ones(2)))
    with pytest.raises(TransportError, match="worker 2 left"):
        ends[0].submit(AllReduceMean(torch.ones(2))).wait()


def test_different_operations_are_an_error_not_a_wrong_mean() -> None:
    ends = in_memory.wires(2, 20.0)
    for ask in (AllGather(torch.ones(2)), AllReduceMean(torch.ones(3)), AllReduceMean(torch.ones(2).double())):
        ticket = ends[0].submit(AllReduceMean(torch.ones(2)))
        ends[1].submit(ask)
        with pytest.raises(TransportError, match="different operations|differ in shape"):
            ticket.wait()


@pytest.mark.parametrize("sizes", [(700_000, 700_000, 10), (700_000, 700_001, 700_000), (300_000, 300_000, 60_000)])
def test_long_tensors_that_differ_in_shape_are_an_error_at_a_worker(sizes: tuple[int, ...]) -> None:
    """Also between a ring and pairs. That worker leaves then, which ends the waits of the others."""
    ends = encrypted(3)

    def failure(worker: int) -> str:
        with pytest.raises(TransportError) as raised:
            ends[worker].submit(AllReduceMean(torch.ones(sizes[worker]))).wait()
        ends[worker].abort()
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        assert any("differ in shape" in said for said in pool.map(failure, range(3)))
    for end in ends:
        end.close()


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
