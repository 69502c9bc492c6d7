"""Bytes of collectives and messages, against the kernel's counters on real connections of this machine.

Processes make the groups; they all run this file. Repeats of TCP, which come by chance, are taken off.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parameter_servers import ADDING_RECIPE, Servers, push, receive
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from stretto.collective_ops import AllGather, AllReduceMean, Exchange
from stretto.parameter_server import message_memory
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.framing import layout_of
from stretto.parameter_server.messages import Gather, Result
from stretto.parameter_server.rpc_server import RpcServer
from stretto.simulator.network import wire_bytes
from stretto.transport import gloo_ring, shared_memory
from stretto.transport.process_group import ProcessGroupTransport, _sockets

LARGEST_CREW = 4
BYTES_RETRANSMITTED_AT = 208
"""Fields of Linux's struct tcp_info after the fields read by stretto.transport.tcp_info."""


def _counts(descriptors) -> tuple[int, int]:
    """Return the bytes sent (without retransmissions) and received on these sockets."""
    sent = received = 0
    for one in descriptors:
        with socket.socket(fileno=os.dup(one)) as here:
            if here.family not in (socket.AF_INET, socket.AF_INET6) or here.type != socket.SOCK_STREAM:
                continue
            info = here.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        came, went, again = struct.unpack_from("<Q64xQQ", info, 128)
        sent, received = sent + went - again, received + came
    return sent, received


# --- collectives --------------------------------------------------------------------------------------------------

Do = Callable[[ProcessGroupTransport], Any]
Cost = Callable[[int, int], tuple[int, int]]


def _mean(numbers: int, dtype: torch.dtype = torch.float32) -> tuple[Do, Cost]:
    nbytes, item = numbers * dtype.itemsize, dtype.itemsize
    return (
        lambda wire: wire.submit(AllReduceMean(torch.ones(numbers, dtype=dtype))).wait(),
        lambda worker, workers: gloo_ring.all_reduce_bytes(worker, workers, nbytes, item),
    )


def _every(size: Callable[[int], int], dtype: torch.dtype = torch.uint8) -> tuple[Do, Cost]:
    return (
        lambda wire: wire.submit(AllGather(torch.ones(size(wire.worker), dtype=dtype))).wait(),
        lambda worker, workers: wire_bytes.all_gather_bytes(
            worker, [size(one) * dtype.itemsize for one in range(workers)]
        ),
    )


def _gather(length: Callable[[int], int]) -> tuple[Do, Cost]:
    return (
        lambda wire: wire.all_gather_bytes(bytes(length(wire.worker))),
        lambda worker, workers: wire_bytes.all_gather_message_bytes(workers, max(map(length, range(workers)))),
    )


def _tell(length: int, root: int) -> tuple[Do, Cost]:
    return (
        lambda wire: wire.broadcast_bytes(bytes(length), root % wire.workers),
        lambda worker, workers: wire_bytes.broadcast_bytes(worker, workers, root % workers, length),
    )


def _pair(size: Callable[[int], int], dtype: torch.dtype = torch.uint8) -> tuple[Do, Cost]:
    """Workers 2i and 2i + 1 exchange tensors, and the last of an odd number nothing."""

    def do(wire: ProcessGroupTransport) -> None:
        if (peer := wire.worker ^ 1) < wire.workers:
            wire.submit(Exchange(peer, torch.ones(size(wire.worker), dtype=dtype))).wait()

    def cost(worker: int, workers: int) -> tuple[int, int]:
        sent, received = (size(one) * dtype.itemsize for one in (worker, worker ^ 1))
        return wire_bytes.exchange_bytes(sent, received) if worker ^ 1 < workers else (0, 0)

    return do, cost


def _sum_of_hosts(numbers: int) -> tuple[Do, Cost]:
    """All workers are the first of their hosts."""

    def do(wire: ProcessGroupTransport) -> None:
        handles = [wire.group(range(wire.workers)).submit(AllReduceMean(part)) for part in _segments(numbers)]
        for handle in handles:
            handle.wait()

    return do, lambda worker, workers: wire_bytes.sum_bytes(worker, workers, 4 * numbers, 4)


def _segments(numbers: int) -> Sequence[Tensor]:
    return torch.split(torch.ones(numbers), shared_memory.SEGMENT_BYTES // 4)


EXCHANGES: list[tuple[Do, Cost]] = [
    *(_mean(numbers) for numbers in (0, 1, 2, 3, 5, 8, 100, 1001, 65536, 100_001, 1 << 20, 3_000_001)),
    *(_mean(numbers, dtype) for numbers in (1, 7, 4999) for dtype in (torch.float64, torch.bfloat16)),
    *(_every(lambda worker, size=size: size) for size in (0, 1, 1000, 17_000_000)),
    *(_every(lambda worker, base=base: base * worker, torch.float32) for base in (1, 1000, 100_000)),
    *(_gather(lambda worker, length=length: length) for length in (0, 248, 249, 100_000, 17_000_000)),
    _gather(lambda worker: 1000 * worker),
    *(_tell(length, root) for length in (0, 248, 249, 4_000_000) for root in (0, 1, 3)),
    _tell(17_000_000, 1),
    *(_pair(lambda worker, size=size: size) for size in (0, 1, 100_000, 17_000_000)),
    _pair(lambda worker: 1000 * worker, torch.float64),
    *(_sum_of_hosts(numbers) for numbers in (1, 1001, 3_000_001)),
]


def _measure(worker: int, folder: str) -> list[dict[str, Any]]:
    """Return the bytes of this worker's sockets for connecting, each collective and the store, by group size."""
    found = []
    for workers in range(max(worker + 1, 2), LARGEST_CREW + 1):
        files = dist.FileStore(f"{folder}/{workers}", workers)
        store = _store(files, worker, workers)
        wire = ProcessGroupTransport(PrefixStore("stretto/0", store), worker, workers, 60.0)
        apart = ProcessGroupTransport(files, worker, workers, 60.0)
        apart.all_gather_bytes(b"all are here")
        of_the_store = [one for one in _sockets() if _port(one) == store.port]
        of_the_group = wire._opened.difference(of_the_store)
        limit = time.monotonic() + 60.0
        while sum(_counts(of_the_group)) < sum(wire_bytes.connect_bytes(workers)):
            assert time.monotonic() < limit, "a greeting never came"
            time.sleep(0.001)
        before, counts = wire.traffic(), [_counts(of_the_group)]
        for do, _ in EXCHANGES:
            do(wire)
            apart.all_gather_bytes(b"all are done")
            counts.append(_counts(of_the_group))
            apart.all_gather_bytes(b"all have looked")
        assert wire.traffic().bytes_received - before.bytes_received == counts[-1][1] - counts[0][1]
        exchanges = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]
        meeting = [_counts([one]) for one in of_the_store]
        apart.all_gather_bytes(b"all may go")
        found.append({"forming": counts[0], "exchanges": exchanges, "meeting": [one for one in meeting if any(one)]})
    return found


def _store(files: dist.Store, worker: int, workers: int) -> dist.TCPStore:
    """Return the rendezvous store of a live run, whose address is passed in a file."""
    if worker == 0:
        store = dist.TCPStore("127.0.0.1", 0, workers, True, wait_for_workers=False)
        files.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(files.get("port")), workers, False, wait_for_workers=False)


def _port(descriptor: int) -> int | None:
    """Return the local port."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        return one.getsockname()[1] if one.family in (socket.AF_INET, socket.AF_INET6) else None


def test_collective_exchanges_cost_what_the_kernel_counts(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    commands = [[sys.executable, __file__, str(worker), str(tmp_path)] for worker in range(LARGEST_CREW)]

    def run(command: list[str]) -> Any:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    with ThreadPoolExecutor(LARGEST_CREW) as pool:
        found = list(pool.map(run, commands))
    for workers in range(2, LARGEST_CREW + 1):
        crew = [found[worker][workers - max(worker + 1, 2)] for worker in range(workers)]
        forming = [one["forming"] for one in crew]
        assert [sum(pair) for pair in forming] == [sum(wire_bytes.connect_bytes(workers))] * workers
        assert sum(pair[0] for pair in forming) == workers * wire_bytes.connect_bytes(workers)[0]
        assert crew[0]["meeting"] == [list(wire_bytes.rendezvous_bytes(workers))] * workers
        for number, (_, cost) in enumerate(EXCHANGES):
            measured = [tuple(one["exchanges"][number]) for one in crew]
            assert measured == [cost(worker, workers) for worker in range(workers)], f"{workers}: exchange {number}"


# --- parameter server ---------------------------------------------------------------------------------------------


class Overheard:
    """Expected bytes of each worker's connections, from the messages that were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wires: list[ParameterServerClient], encrypted: bool) -> None:
        self._encrypted = encrypted
        self.sent: Counter[tuple[str, int]] = Counter()
        self.received: Counter[tuple[str, int]] = Counter()
        for worker, wire in enumerate(wires):
            for link in _links(wire):
                monkeypatch.setattr(link, "send", self._sending(link, (link.address, worker)))
        reply = RpcServer._send

        def replying(service: RpcServer, post: Any) -> None:
            self.received[service.address, post.worker] += self._cost(post.request_id, post.body, post.tensors)
            reply(service, post)

        monkeypatch.setattr(RpcServer, "_send", replying)

    def _sending(self, link: Any, whose: tuple[str, int]) -> Callable[..., int]:
        send = link.send

        def sending(body: Any, tensors: Any = ()) -> int:
            number: int = send(body, tensors)
            self.sent[whose] += self._cost(number, body, tensors, link._session.answered_below)
            return number

        return sending

    def _cost(self, number: int, body: Any, tensors: Any, answered_below: int = 0) -> int:
        return wire_bytes.message_bytes(m.Header(number, body, layout_of(tensors), answered_below), self._encrypted)


def _links(wire: ParameterServerClient) -> list[Any]:
    return [wire._dispatcher, *wire.channels]


@pytest.fixture
def ends() -> Iterator[Callable[..., list[ParameterServerClient]]]:
    """Return a server and its clients."""
    servers = Servers()
    yield lambda workers, **options: servers.clients(servers.start(workers, **options))
    servers.close()


def _converse(wire: ParameterServerClient) -> None:
    """Use every kind of message."""
    parts = [torch.ones(1_500_000), torch.ones(77)]
    for length in (0, 1, 222, 223, 255, 256, 1 << 20, (1 << 20) + 1, 4 << 20):
        wire.all_gather_bytes(bytes(length))
    wire.broadcast_bytes(bytes(300 * wire.worker), wire.workers - 1)
    for numbers in (0, 1, 63, 64, 65, 1000, 1_000_003):
        wire.submit(AllReduceMean(torch.ones(numbers))).wait()
        wire.submit(AllGather(torch.ones(numbers * wire.worker, dtype=torch.float64))).wait()
    if wire.worker == 0:
        wire.open(1, ADDING_RECIPE, parts)
    wire.all_gather_bytes(b"")
    lengths: list[int] = [one.numel() for one in parts]
    for seq in range(1, 4):
        receive(push(wire, seq, parts), parts)
    wire.read(lengths, flush=True).wait(_nowhere)
    wire.begin_epoch(1, [8] * 300, None, "in-turn")
    for _ in range(3):
        leased = wire.lease(wire.request_lease(1))
        assert leased.batch is not None
        wire.settle(1, [leased.batch])
    wire.all_gather_bytes(b"the last, so that all before has come")


def _nowhere(part: int, at: int, piece: Tensor) -> None:
    """Ignore the received data."""


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (3, 2)])
def test_server_exchanges_cost_what_the_kernel_counts(
    plain: bool, workers: int, shards: int, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_memory, "SMALLEST_BYTES", sys.maxsize)
    wires = ends(workers, shards=shards, plain=plain)
    overheard = Overheard(monkeypatch, wires, not plain)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(_converse, wires))
    for worker, wire in enumerate(wires):
        hello = wire_bytes.handshake_bytes(worker, not plain)
        for link in _links(wire):
            link.traffic()
            went, came = overheard.sent[link.address, worker], overheard.received[link.address, worker]
            assert went > 1000
            assert came > 1000
            assert _counts([link._descriptor]) == (hello[0] + went, hello[1] + came)


def test_worker_counts_all_but_its_leave_message(ends: Any) -> None:
    """The kernel's counters are read before the Leave message."""
    [wire] = ends(1, plain=True)
    wire.all_gather_bytes(b"")
    wire.close()
    gathered = wire_bytes.message_bytes(m.Header(1, Gather(1, None), [("uint8", 0)]), False)
    answered = wire_bytes.message_bytes(m.Header(1, Result(), [("uint8", 0)]), False)
    hello = wire_bytes.handshake_bytes(0, False)
    traffic = wire.traffic()
    assert (traffic.bytes_sent, traffic.bytes_received) == (2 * hello[0] + gathered, 2 * hello[1] + answered)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_measure(int(sys.argv[1]), sys.argv[2])))
