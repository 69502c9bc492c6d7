"""Means in shared memory: equal bits at all workers; nothing waits or stays after a worker was killed or stopped."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import shared_memory_workers
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from shared_memory_workers import PIECE, TIMEOUT_S, forked, killed, killed_at_random, stopped, traces
from torch import Tensor

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import BrokenTransportError, TransportError
from stretto.kernels import is_native
from stretto.transport import gloo_ring, shared_memory
from stretto.transport.conformance import check_transport
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import SharedMemoryTransport, over_shared_memory

pytestmark = pytest.mark.skipif(not is_native(), reason="means go through shared memory with the native kernels only")

OUT_S = 1.0
"""Maximum of seconds after which a worker leaves an exchange that another worker can't complete."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def connected(workers: int, timeout_s: float = TIMEOUT_S, elastic: bool = False) -> list[Any]:
    """Return the ends of one transport, in the threads of this process."""
    store = dist.HashStore()

    def connect(worker: int) -> Transport:
        return over_shared_memory(ProcessGroupTransport(store, worker, workers, timeout_s, elastic=elastic))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(connect, range(workers)))


def closed(ends: list[Any]) -> None:
    for end in ends:
        end.close()


# --- in threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [False, True])
def test_shared_memory_passes_the_conformance_test(elastic: bool) -> None:
    def make(workers: int) -> list[Any]:
        ends = connected(workers, elastic=elastic)
        assert all(isinstance(end, SharedMemoryTransport) for end in ends)
        return ends

    before = traces()
    check_transport(make, (2, 3, 4))
    assert traces() == before


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, list[Any]]]:
    """Yield transports of 2 to 4 workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        found = {workers: connected(workers) for workers in (2, 3, 4)}
    yield found
    for ends in found.values():
        closed(ends)


def contributions(case: random.Random, workers: int) -> list[list[Tensor]]:
    """Return the tensors of each worker: of random sizes and layouts, some of no number, some of several pieces."""
    kinds = []
    for _ in range(case.randint(1, 6)):
        size = case.choice([0, 1, 2, 63, 64, 65, 997, 4099, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 13])
        kinds.append((size, case.choice([torch.float32, torch.float64]), case.choice(["plain", "offset", "strided"])))
    source = torch.Generator().manual_seed(case.randrange(1 << 30))
    return [[_laid_out(torch.randn(size, dtype=dtype, generator=source), how) for size, dtype, how in kinds]
            for _ in range(workers)]  # fmt: skip


def _laid_out(values: Tensor, how: str) -> Tensor:
    """Return a tensor of these values that begins within its memory, or whose numbers are apart."""
    if how == "plain":
        return values
    room = values.new_zeros(3 * values.numel() + 1)
    into = room[1 : values.numel() + 1] if how == "offset" else room[1::3]
    return into.copy_(values)


def exchanged(end: Transport, tensors: list[Tensor], order: list[int]) -> list[Tensor]:
    """Return the means; the operations overlap, and are waited for in this order."""
    handles = [end.submit(AllReduceMean(one)) for one in tensors]
    for index in order:
        assert handles[index].wait() is tensors[index]
    return tensors


@given(seed=st.integers(0, 1 << 30), workers=st.sampled_from([2, 3, 4]))
def test_means_are_the_sums_in_the_order_of_ranks_to_the_bit(
    groups: dict[int, list[Any]], seed: int, workers: int
) -> None:
    case = random.Random(seed)
    given_tensors = contributions(case, workers)
    expected = [torch.stack(each).clone() for each in zip(*given_tensors, strict=True)]
    order = list(range(len(expected)))
    case.shuffle(order)
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda end, mine: exchanged(end, mine, order), groups[workers], given_tensors))
    for index, each in enumerate(expected):
        total = each[0].clone()
        for one in each[1:]:
            total += one
        assert all(torch.equal(mine[index], total) for mine in found)


def test_other_operations_between_means_keep_their_results(groups: dict[int, list[Any]]) -> None:
    def work(end: Transport) -> None:
        ops = [
            AllReduceMean(torch.ones(9)),
            AllGather(torch.full((3,), end.worker)),
            AllReduceMean(torch.ones(9).int()),
        ]
        first, gathered, second = [end.submit(op) for op in ops]
        assert [int(one[0]) for one in gathered.wait()] == list(range(end.workers))
        assert end.all_gather_bytes(b"between") == [b"between"] * end.workers
        assert torch.equal(second.wait(), torch.full((9,), end.workers).int())
        assert torch.equal(first.wait(), torch.full((9,), float(end.workers)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, groups[4]))


def test_bytes_of_means_are_those_of_gloo_and_are_not_counted(groups: dict[int, list[Any]]) -> None:
    before = [end.traffic() for end in groups[4]]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda end: end.submit(AllReduceMean(torch.ones(100_000))).wait(), groups[4]))
    for end, first in zip(groups[4], before, strict=True):
        expected = gloo_ring.all_reduce_bytes(end.worker, 4, 400_000)
        sent, received = (
            end.traffic().bytes_sent - first.bytes_sent,
            end.traffic().bytes_received - first.bytes_received,
        )
        assert (sent, received) == expected
        assert sum(expected) == pytest.approx(2 * 600_000, rel=0.01)
        assert not end.traffic().counted


def test_a_late_worker_is_named_after_the_timeout() -> None:
    ends = connected(3, 0.3)
    ends[1].submit(AllReduceMean(torch.ones(4)))
    with pytest.raises(
        TransportError, match=r"worker 0 waited 0\.\d s for the mean of 4 numbers; .*worker 2 has not co"
    ):
        ends[0].submit(AllReduceMean(torch.ones(4))).wait()
    with pytest.raises(TransportError, match="it was aborted"):
        ends[1].submit(AllReduceMean(torch.ones(4))).wait()
    closed(ends)


def test_a_worker_that_left_is_named_immediately() -> None:
    ends = connected(2)
    threading.Timer(0.1, ends[1].close).start()
    began = time.monotonic()
    with pytest.raises(TransportError, match="worker 1 has left"):
        ends[0].submit(AllReduceMean(torch.ones(4))).wait()
    assert time.monotonic() - began < OUT_S
    closed(ends)


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4).double(), torch.ones(PIECE + 4)])
def test_tensors_that_differ_are_an_error_and_not_a_wrong_mean(other: Tensor) -> None:
    ends = connected(2)
    ends[1].submit(AllReduceMean(other))
    handle = ends[0].submit(AllReduceMean(torch.ones(4)))
    with pytest.raises(TransportError, match="differ in shape or dtype"):
        handle.wait()
    closed(ends)


def test_an_abort_ends_the_waits_of_all_workers_now_and_later() -> None:
    before = traces()
    ends = connected(3, elastic=True)
    waiting = [end.submit(AllReduceMean(torch.ones(1000))) for end in ends[:2]]
    threading.Timer(0.1, ends[0].abort).start()
    for handle in waiting:
        with pytest.raises(BrokenTransportError, match="it was aborted"):
            handle.wait()
    late = ends[2].submit(AllReduceMean(torch.ones(1000)))
    with pytest.raises(BrokenTransportError, match="it was aborted"):
        late.wait()
    closed(ends)
    with pytest.raises(BrokenTransportError):
        ends[0].submit(AllReduceMean(torch.ones(2))).wait()
    with pytest.raises(BrokenTransportError):
        waiting[0].wait()
    gc.collect()
    assert traces() == before


def test_the_last_contribution_and_an_abort_wake_sleeping_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LOOK_S", TIMEOUT_S)
    monkeypatch.setattr(shared_memory, "SPIN_S", 0.0)
    ends, began = connected(3, elastic=True), time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        for size in (1, 1000, 300_001) * 10:
            list(pool.map(lambda end, size=size: end.submit(AllReduceMean(torch.ones(size))).wait(), ends))
    waiting = ends[0].submit(AllReduceMean(torch.ones(4)))
    threading.Timer(0.1, ends[1].abort).start()
    with pytest.raises(BrokenTransportError, match="it was aborted"):
        waiting.wait()
    assert time.monotonic() - began < TIMEOUT_S / 2
    closed(ends)


def _on_another_host(offer: shared_memory.Offer) -> shared_memory.Offer:
    return msgspec.structs.replace(offer, host="elsewhere")


def _of_another_process(offer: shared_memory.Offer) -> shared_memory.Offer:
    return msgspec.structs.replace(offer, name=bytes(16))


def _unreachable(offer: shared_memory.Offer) -> shared_memory.Offer:
    return msgspec.structs.replace(offer, pid=1 << 30)


@pytest.mark.parametrize(
    "other", [_on_another_host, _of_another_process, _unreachable, lambda _: shared_memory.Offer()]
)
def test_all_workers_use_gloo_if_one_cannot_share_memory(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, count = shared_memory._offer, iter(range(3))
    monkeypatch.setattr(
        shared_memory, "_offer", lambda *what: (other if next(count) == 1 else lambda one: one)(offer(*what))
    )
    before = traces()
    ends = connected(3)
    assert all(isinstance(end, ProcessGroupTransport) for end in ends)
    with ThreadPoolExecutor(3) as pool:
        means = list(pool.map(lambda end: end.submit(AllReduceMean(torch.ones(4))).wait(), ends))
    assert all(torch.equal(mean, torch.full((4,), 3.0)) for mean in means)
    closed(ends)
    assert traces() == before


def test_the_reference_kernels_are_used_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS", "reference")
    ends = connected(2)
    assert all(isinstance(end, ProcessGroupTransport) for end in ends)
    closed(ends)


# --- in processes ------------------------------------------------------------------------------------------------


def played(scenario: Callable[[str, Path], dict[str, Any]], how: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a process of its own, and check that it leaves no file."""
    before = set(os.listdir("/dev/shm"))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, shared_memory_workers.__file__, scenario.__name__, how, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "stretto" in name]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("stage", ["absent", "posted", "summed"])
def test_a_worker_killed_at_any_stage_ends_the_waits_of_the_others(stage: str, tmp_path: Path) -> None:
    found = played(killed, stage, tmp_path)
    assert all(out["seconds"] < OUT_S for out in found["outs"])
    assert any("worker 1 has exited" in out["why"] for out in found["outs"])
    assert found["ended"] == [{"ended": True}] * 2


def test_workers_killed_at_random_moments_leave_no_wait(tmp_path: Path) -> None:
    assert max(played(killed_at_random, "8", tmp_path)["outs"]) < OUT_S


def test_a_stopped_worker_that_continues_changes_no_result_of_the_others(tmp_path: Path) -> None:
    found = played(stopped, "", tmp_path)
    assert found["out"] < OUT_S
    assert all("worker" in why for why in found["whys"])
    assert found["ended"] == [{"ended": True}] * 2


def test_a_process_forked_from_a_worker_holds_no_memory_that_it_does_not_use(tmp_path: Path) -> None:
    assert played(forked, "", tmp_path)["found"] == [{"traces": []}] * 2
