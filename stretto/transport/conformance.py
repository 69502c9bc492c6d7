"""Conformance test of transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.transport.interface import Collectives

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
LENGTHS = (0, 1, 7, 1000, 300_001)


def check_transport(make: Callable[[int], Sequence[Collectives]], workers: Sequence[int] = (1, 2, 3)) -> None:
    """Test all properties on transports made by `make(n)`, each end in its own thread. Raise AssertionError on failure.

    For a transport between processes, run `check_end` in each process instead.
    """
    for n in workers:
        ends = make(n)
        with ThreadPoolExecutor(n) as pool:
            for done in [pool.submit(check_end, end) for end in ends]:
                done.result()


def check_end(transport: Collectives) -> None:
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
        law(transport)
    transport.all_gather_bytes(b"done")
    transport.close()
    transport.close()


def _mean_is_the_sum(transport: Collectives) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            given = torch.full((length,), transport.worker + 1).to(dtype)
            found: Any = transport.submit(AllReduceMean(given)).wait()
            wanted = torch.full((length,), sum(range(1, transport.workers + 1))).to(dtype)
            assert found.dtype == dtype, f"mean of {dtype} came back as {found.dtype}"
            assert torch.equal(found, wanted), f"mean of {length} {dtype} is not the sum of the contributions"


def _means_overlap(transport: Collectives) -> None:
    tickets = [transport.submit(AllReduceMean(torch.full((1000,), float(one)))) for one in range(8)]
    for one, ticket in enumerate(tickets):
        found: Any = ticket.wait()
        assert torch.equal(found, torch.full((1000,), float(one * transport.workers))), "operations were mixed up"


def _every_in_order(transport: Collectives) -> None:
    message = torch.arange(transport.worker * 3)
    found = transport.submit(AllGather(message)).wait()
    assert len(found) == transport.workers, "messages of some workers are missing"
    for worker, one in enumerate(found):
        assert torch.equal(one, torch.arange(worker * 3)), f"the message of worker {worker} is not what it sent"


def _silence_is_counted(transport: Collectives) -> None:
    speaks = transport.worker == 0
    found = transport.submit(AllGather(torch.ones(100_000 if speaks else 0))).wait()
    assert [len(one) for one in found] == [100_000] + [0] * (transport.workers - 1), "an empty message is missing"


def _gather(transport: Collectives) -> None:
    for size in (0, 1, 100, 5000):
        found = transport.all_gather_bytes(bytes([transport.worker]) * size * (transport.worker + 1))
        wanted = [bytes([worker]) * size * (worker + 1) for worker in range(transport.workers)]
        assert found == wanted, f"all-gather of {size} bytes"


def _tell(transport: Collectives) -> None:
    for root in range(transport.workers):
        for size in (0, 3, 5000):
            mine = b"x" * size + bytes([root]) if transport.worker == root else b"ignored"
            assert transport.broadcast_bytes(mine, root) == b"x" * size + bytes([root]), f"root {root} differs"


def _traffic_grows(transport: Collectives) -> None:
    before = transport.traffic()
    transport.submit(AllReduceMean(torch.ones(100_000))).wait()
    transport.all_gather_bytes(b"sent")
    sent = transport.traffic().bytes_sent - before.bytes_sent
    least = 400_000 * 2 * (transport.workers - 1) / transport.workers if transport.workers < 3 else 400_000
    assert sent >= least, f"{sent} bytes were counted for a mean of 400,000"
