"""Exchanges through the memory of a host: the tensors that were sent, in memory that is used again."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import shared_memory_workers
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_memory_ends import closed, connected, on_hosts
from shared_memory_workers import sent_before_exit
from torch import Tensor

from stretto.collective_ops import Exchange
from stretto.errors import TransportError
from stretto.kernels import is_native
from stretto.transport import host_exchanges
from stretto.transport.host_exchanges import HEAD_BYTES, SMALLEST_BYTES, Description
from stretto.transport.host_memory import ROOM_BYTES
from stretto.transport.interface import as_bytes
from stretto.transport.peer_stream import dtype_code

pytestmark = pytest.mark.skipif(not is_native(), reason="exchanges go through memory with the native kernels only")
LARGE = SMALLEST_BYTES // 4
"""Numbers of a tensor that goes through memory."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    """Yield both ends of a transport of two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        ends = connected(2)
    yield ends
    closed(ends)
    gc.collect()


def swapped(ends: list[Any], tensors: list[Tensor], **options: Any) -> list[Any]:
    """Return the results of an exchange at both ends."""
    handles = [end.submit(Exchange(1 - rank, tensors[rank], **options)) for rank, end in enumerate(ends)]
    return [handle.wait() for handle in handles]


def slots(end: Any) -> list[Any]:
    return list(end._exchanges._slots)


SIZES = st.sampled_from([LARGE, LARGE + 1, 3 * LARGE, 100, 1, 0])
STEPS = st.lists(st.tuples(SIZES, SIZES, st.integers(0, 1), st.randoms(use_true_random=False)), min_size=1, max_size=12)


@settings(max_examples=examples(50), deadline=None)
@given(STEPS, st.sampled_from([2 * SMALLEST_BYTES, 64 << 20]))
def test_tensors_arrive_in_any_order_of_waits_and_whatever_room_there_is(
    pair: list[Any], steps: list[Any], room: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_exchanges, "ROOM_BYTES", room)
        for end in pair:
            end._exchanges._slots.clear()
            end._exchanges._read.clear()
        begun = []
        for number, (here, there, channel, order) in enumerate(steps):
            tensors = [torch.arange(here) + number, -torch.arange(there) - number]
            begun += [
                (tensors[1 - rank].clone(), end.submit(Exchange(1 - rank, tensors[rank], channel)))
                for rank, end in enumerate(pair)
            ]
            for one in tensors:
                one.fill_(7)  # a tensor in memory, or of a host, was copied before
            order.shuffle(begun)
            while len(begun) > 6:
                expected, handle = begun.pop()
                assert torch.equal(handle.wait(), expected)
        for expected, handle in begun:
            assert torch.equal(handle.wait(), expected)
            assert handle.wait() is handle.wait()
        assert all(sum(one.nbytes for one in slots(end)) <= room for end in pair)


def test_a_slot_is_used_again_once_its_tensor_was_read(pair: list[Any]) -> None:
    before, counts = [end.traffic().bytes_sent for end in pair], []
    for number in range(20):
        tensors = [torch.full((4 * LARGE + rank,), float(number + rank)) for rank in range(2)]
        assert all(torch.equal(one, other) for one, other in zip(swapped(pair, tensors), tensors[::-1], strict=True))
        counts.append([len(slots(end)) for end in pair])
    assert counts[-1] == counts[2]
    least = 20 * 4 * SMALLEST_BYTES
    assert all(end.traffic().bytes_sent - sent >= least for end, sent in zip(pair, before, strict=True))


def test_a_tensor_is_received_in_the_memory_that_waits_for_it(pair: list[Any]) -> None:
    into = torch.zeros(2 * LARGE)
    found = swapped(pair, [torch.ones(2 * LARGE)] * 2, into=into)
    assert all(one is into for one in found)
    strided = torch.zeros(4 * LARGE)[::2]
    assert all(
        torch.equal(one, torch.ones(2 * LARGE)) for one in swapped(pair, [torch.ones(2 * LARGE)] * 2, into=strided)
    )


def test_workers_of_one_host_of_several_exchange_through_memory() -> None:
    ends = on_hosts([0, 0, 1])
    for one, other, is_near in ((0, 1, True), (1, 2, False)):
        before = ends[one]._exchanges.sent
        tensors = {one: torch.ones(LARGE), other: torch.zeros(LARGE)}
        handles = {rank: ends[rank].submit(Exchange(one + other - rank, tensors[rank])) for rank in tensors}
        assert all(torch.equal(handle.wait(), tensors[one + other - rank]) for rank, handle in handles.items())
        assert (ends[one]._exchanges.sent > before) == is_near
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda end: end.all_gather_bytes(b"done"), ends))
    closed(ends)


LIES = [
    Description(dtype_code(torch.float32), [], slot=0, start=1 << 40, numbers=LARGE),
    Description(dtype_code(torch.float32), [], slot=0, start=0, numbers=1 << 60),
    Description(dtype_code(torch.float32), [], slot=0, start=ROOM_BYTES - 8, numbers=LARGE),
    Description(dtype_code(torch.float32), [], slot=0, start=0, numbers=-5),
    Description(dtype_code(torch.float32), [], slot=0, start=-5, numbers=LARGE),
    Description(dtype_code(torch.float32), [10**6]),
    Description(200, []),
]


@pytest.mark.parametrize("lie", [*map(msgspec.msgpack.encode, LIES), b"\xc1", b""])
def test_a_description_of_no_tensor_ends_in_an_error(pair: list[Any], lie: bytes) -> None:
    handle = pair[0].submit(Exchange(1, torch.ones(LARGE)))
    message = as_bytes(len(lie).to_bytes(HEAD_BYTES, "little") + lie)
    pair[1]._inner.submit(Exchange(0, message)).wait()
    with pytest.raises(TransportError, match="worker 1"):
        handle.wait()


def test_tensors_of_different_dtypes_end_in_an_error_at_both_workers(pair: list[Any]) -> None:
    handles = [pair[0].submit(Exchange(1, torch.ones(LARGE))), pair[1].submit(Exchange(0, torch.ones(LARGE).double()))]
    for handle in handles:
        with pytest.raises(TransportError, match="differ in dtype"):
            handle.wait()


def test_a_tensor_arrives_although_its_worker_has_exited(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, shared_memory_workers.__file__, sent_before_exit.__name__, "", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"equal": True}
