"""Conformance test of transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from stretto.collective_ops import AllGather, AllReduceMean, Exchange
from stretto.errors import TransportError
from stretto.transport.interface import Collectives

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
LENGTHS = (0, 1, 7, 1000, 300_001)


def check_transport(
    make: Callable[[int], Sequence[Collectives]], workers: Sequence[int] = (1, 2, 3), workers_per_host: int = 1
) -> None:
    """Test all properties on transports made by `make(n)`, each end in its own thread. Raise AssertionError on failure.

    For a transport between processes, run `check_end` in each process instead. The first of each `workers_per_host`
    workers may send means for all of them.
    """
    for n in workers:
        ends = make(n)
        with ThreadPoolExecutor(n) as pool:
            for done in [pool.submit(check_end, end, workers_per_host) for end in ends]:
                done.result()


def check_end(transport: Collectives, workers_per_host: int = 1) -> None:
    """Test all properties at one worker, and close its end; all workers must run this at the same time."""
    check_operations(transport, workers_per_host)
    transport.all_gather_bytes(b"done")
    transport.close()
    transport.close()


def check_operations(transport: Collectives, workers_per_host: int = 1) -> None:
    """Test all properties at one worker except that its end can be closed."""
    check_collectives(transport, workers_per_host)
    for check in (_exchange, _exchanges_overlap, _exchange_without_peer_is_refused, _groups):
        check(transport)


def check_collectives(transport: Collectives, workers_per_host: int = 1) -> None:
    """Test the operations of all workers, also those of a group."""
    for check in (
        _mean_is_the_sum,
        _means_overlap,
        _gather_in_order,
        _empty_message_is_gathered,
        _gather_bytes,
        _broadcast_bytes,
    ):
        check(transport)
    _traffic_grows(transport, workers_per_host)


def _mean_is_the_sum(transport: Collectives) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            contribution = torch.full((length,), transport.worker + 1, device="cpu").to(dtype)
            mean: Any = transport.submit(AllReduceMean(contribution)).wait()
            expected = torch.full((length,), sum(range(1, transport.workers + 1)), device="cpu").to(dtype)
            assert mean.dtype == dtype, f"mean of {dtype} came back as {mean.dtype}"
            assert torch.equal(mean, expected), f"mean of {length} {dtype} is not the sum of the contributions"


def _means_overlap(transport: Collectives) -> None:
    handles = [transport.submit(AllReduceMean(torch.full((1000,), float(number), device="cpu"))) for number in range(8)]
    for number, handle in enumerate(handles):
        mean: Any = handle.wait()
        assert torch.equal(mean, torch.full((1000,), float(number * transport.workers), device="cpu")), (
            "operations were mixed up"
        )


def _gather_in_order(transport: Collectives) -> None:
    message = torch.arange(transport.worker * 3, device="cpu")
    messages = transport.submit(AllGather(message)).wait()
    assert len(messages) == transport.workers, "messages of some workers are missing"
    for worker, received in enumerate(messages):
        assert torch.equal(received, torch.arange(worker * 3, device="cpu")), (
            f"the message of worker {worker} is not what it sent"
        )


def _empty_message_is_gathered(transport: Collectives) -> None:
    length = 100_000 if transport.worker == 0 else 0
    lengths = [len(message) for message in transport.submit(AllGather(torch.ones(length, device="cpu"))).wait()]
    assert lengths == [100_000] + [0] * (transport.workers - 1), "an empty message is missing"


def _gather_bytes(transport: Collectives) -> None:
    for size in (0, 1, 100, 5000):
        messages = transport.all_gather_bytes(bytes([transport.worker]) * size * (transport.worker + 1))
        expected = [bytes([worker]) * size * (worker + 1) for worker in range(transport.workers)]
        assert messages == expected, f"all-gather of {size} bytes"


def _broadcast_bytes(transport: Collectives) -> None:
    for root in range(transport.workers):
        for size in (0, 3, 5000):
            mine = b"x" * size + bytes([root]) if transport.worker == root else b"ignored"
            assert transport.broadcast_bytes(mine, root) == b"x" * size + bytes([root]), f"root {root} differs"


def _traffic_grows(transport: Collectives, workers_per_host: int) -> None:
    hosts, sends = -(-transport.workers // workers_per_host), transport.worker % workers_per_host == 0
    before = transport.traffic()
    transport.submit(AllReduceMean(torch.ones(100_000, device="cpu"))).wait()
    transport.all_gather_bytes(b"sent")
    sent = transport.traffic().bytes_sent - before.bytes_sent
    least = 400_000 * 2 * (hosts - 1) / hosts if hosts < 3 else 400_000
    assert not sends or sent >= least, f"{sent} bytes were counted for a mean of 400,000"


# --- pairs and groups -----------------------------------------------------------------------------------------------


def _of_pair(worker: int, peer: int, number: int, length: int = 100, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor that a worker sends to a peer in its exchange of this number."""
    return torch.full((length * (worker + 1),), 20 * worker + 4 * peer + number, dtype=dtype, device="cpu")


def _exchange(transport: Collectives) -> None:
    """Workers 2i and 2i + 1 exchange; the last of an odd number of workers submits nothing."""
    worker, peer = transport.worker, transport.worker ^ 1
    if peer >= transport.workers:
        return
    before = transport.traffic()
    for dtype in DTYPES:
        for length in LENGTHS:
            mine = _of_pair(worker, peer, 1, length, dtype)
            received: Any = transport.submit(Exchange(peer, mine.clone())).wait()
            expected = _of_pair(peer, worker, 1, length, dtype)
            assert received.dtype == dtype, f"exchanged {dtype} came back as {received.dtype}"
            assert torch.equal(received, expected), f"{length} {dtype} of worker {peer} are not what it sent"
    transport.submit(Exchange(peer, torch.ones(1, device="cpu"))).wait()  # sent once the peer has received all before
    after, least = transport.traffic(), sum(LENGTHS) * sum(dtype.itemsize for dtype in DTYPES)
    sent, received_bytes = after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received
    assert sent >= least * (worker + 1), f"{sent} bytes were counted for exchanges of {least * (worker + 1)}"
    assert received_bytes >= least, f"{received_bytes} received bytes were counted for exchanges"


def _exchanges_overlap(transport: Collectives) -> None:
    """Each worker exchanges several times with every other worker, and waits in an order of its own."""
    worker = transport.worker
    others = [(worker + step) % transport.workers for step in range(1, transport.workers)]
    handles = {
        (peer, channel, number): transport.submit(
            Exchange(peer, _of_pair(worker, peer, number + 2 * channel, 50_000), channel)
        )
        for number in range(2)
        for peer in sorted(others, key=lambda peer: (peer * 7 + worker * 5) % 3)
        for channel in ((0, 1) if worker < peer else (1, 0))
    }
    for (peer, channel, number), handle in sorted(
        handles.items(), key=lambda item: (others.index(item[0][0]), item[0])
    ):
        received: Any = handle.wait()
        expected = _of_pair(peer, worker, number + 2 * channel, 50_000)
        assert torch.equal(received, expected), f"exchanges with worker {peer} were mixed up"


def _exchange_without_peer_is_refused(transport: Collectives) -> None:
    for peer in (transport.worker, transport.workers, -1):
        exchange = Exchange(peer, torch.ones(1, device="cpu"))
        assert _refuses(transport.submit, exchange), f"an exchange with rank {peer} was accepted"


def _groups(transport: Collectives) -> None:
    """Test groups of all workers in the reverse order, and of some."""
    everyone = range(transport.workers)
    for ranks in ([*reversed(everyone)], [*everyone][::2], [*everyone][1:]):
        if transport.worker not in ranks:
            continue
        group = transport.group(ranks)
        assert (group.worker, group.workers) == (ranks.index(transport.worker), len(ranks)), "ranks of a group"
        check_collectives(group)
        mean: Any = group.submit(AllReduceMean(torch.ones(3, 5, device="cpu"))).wait()
        assert mean.shape == (3, 5), f"mean of a tensor of 3 x 5 numbers came back as {tuple(mean.shape)}"
        _exchange(group)
        part = group.group([0]) if group.worker == 0 else None
        assert part is None or part.all_gather_bytes(b"alone") == [b"alone"], "a group of a group"
        group.close()
        group.close()
    for ranks in ([], [transport.worker] * 2, [transport.worker, transport.workers]):
        assert _refuses(transport.group, ranks), f"a group of {ranks} was made"


def _refuses(act: Callable[[Any], object], argument: object) -> bool:
    """Return True if the call raises a TransportError with an expected value."""
    try:
        act(argument)
    except TransportError as error:
        return "expected: " in str(error)
    return False
