"""Conformance test of transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.transport.interface import Transport

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
LENGTHS = (0, 1, 7, 1000, 300_001)


def check_transport(make: Callable[[int], Sequence[Transport]], workers: Sequence[int] = (1, 2, 3)) -> None:
    """Test all properties on transports made by `make(n)`, each end in its own thread. Raise AssertionError on failure.

    For a transport between processes, run `check_end` in each process instead.
    """
    for n in workers:
        ends = make(n)
        with ThreadPoolExecutor(n) as pool:
            for done in [pool.submit(check_end, end) for end in ends]:
                done.result()


def check_end(wire: Transport) -> None:
    """Test all properties at one worker; all workers of the transport must run this at the same time."""
    for law in (
        _mean_is_the_sum,
        _means_overlap,
        _every_in_order,
        _silence_is_counted,
        _gather,
        _tell,
        _traffic_grows,
    ):
        law(wire)
    wire.all_gather_bytes(b"done")
    wire.close()
    wire.close()


def _mean_is_the_sum(wire: Transport) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            given = torch.full((length,), wire.worker + 1).to(dtype)
            found: Any = wire.submit(AllReduceMean(given)).wait()
            wanted = torch.full((length,), sum(range(1, wire.workers + 1))).to(dtype)
            assert found.dtype == dtype, f"mean of {dtype} came back as {found.dtype}"
            assert torch.equal(found, wanted), f"mean of {length} {dtype} is not the sum of the contributions"


def _means_overlap(wire: Transport) -> None:
    tickets = [wire.submit(AllReduceMean(torch.full((1000,), float(one)))) for one in range(8)]
    for one, ticket in enumerate(tickets):
        found: Any = ticket.wait()
        assert torch.equal(found, torch.full((1000,), float(one * wire.workers))), "operations were mixed up"


def _every_in_order(wire: Transport) -> None:
    message = torch.arange(wire.worker * 3)
    found = wire.submit(AllGather(message)).wait()
    assert len(found) == wire.workers, "messages of some workers are missing"
    for worker, one in enumerate(found):
        assert torch.equal(one, torch.arange(worker * 3)), f"the message of worker {worker} is not what it sent"


def _silence_is_counted(wire: Transport) -> None:
    speaks = wire.worker == 0
    found = wire.submit(AllGather(torch.ones(100_000 if speaks else 0))).wait()
    assert [len(one) for one in found] == [100_000] + [0] * (wire.workers - 1), "a worker's empty message is missing"


def _gather(wire: Transport) -> None:
    for size in (0, 1, 100, 5000):
        found = wire.all_gather_bytes(bytes([wire.worker]) * size * (wire.worker + 1))
        wanted = [bytes([worker]) * size * (worker + 1) for worker in range(wire.workers)]
        assert found == wanted, f"all-gather of {size} bytes"


def _tell(wire: Transport) -> None:
    for root in range(wire.workers):
        for size in (0, 3, 5000):
            mine = b"x" * size + bytes([root]) if wire.worker == root else b"ignored"
            assert wire.broadcast_bytes(mine, root) == b"x" * size + bytes([root]), f"root {root}'s message differs"


def _traffic_grows(wire: Transport) -> None:
    before = wire.traffic()
    wire.submit(AllReduceMean(torch.ones(100_000))).wait()
    wire.all_gather_bytes(b"sent")
    sent = wire.traffic().bytes_sent - before.bytes_sent
    least = 400_000 * 2 * (wire.workers - 1) / wire.workers if wire.workers < 3 else 400_000
    assert sent >= least, f"{sent} bytes were counted for a mean of 400,000"
