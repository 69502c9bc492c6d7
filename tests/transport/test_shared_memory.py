"""Means in shared memory: equal bits at all workers; nothing waits or stays after a worker was killed or stopped."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import shared_memory_workers
import torch
from combinations import each_value
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_memory_ends import closed, connected, on_hosts
from shared_memory_workers import (
    PIECE,
    STAGES,
    TIMEOUT_S,
    forked,
    killed,
    killed_at_random,
    killed_at_random_on_two_hosts,
    killed_on_two_hosts,
    stopped,
    stopped_on_two_hosts,
    traces,
)
from torch import Tensor

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import BrokenTransportError, TransportError
from stretto.kernels import is_native
from stretto.notices import say_once
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig
from stretto.transport import env_rendezvous, gloo_ring, host_memory, shared_memory
from stretto.transport.conformance import check_transport
from stretto.transport.host_memory import KINDS, Offer
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import HostsTransport, SharedMemoryTransport

pytestmark = pytest.mark.skipif(not is_native(), reason="means go through shared memory with the native kernels only")

SHORT_S = 1.5
"""Limit of waits that end at it: a busy machine connects all other workers within it."""
OUT_S = TIMEOUT_S / 2
"""Maximum of seconds after which a worker leaves an exchange that another worker can't complete."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


# --- in threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.long), True])
def test_shared_memory_passes_the_conformance_test(elastic: bool) -> None:
    def make(workers: int) -> list[Any]:
        ends = connected(workers, elastic=elastic)
        assert all(isinstance(end, SharedMemoryTransport) for end in ends)
        return ends

    before = traces()
    check_transport(make, (2, 3, 4))
    assert traces() == before


@pytest.mark.parametrize(
    ("hosts", "elastic"),
    [
        *each_value([[0, 0, 1], [0, 0, 1, 1]], [False, True]),
        *(pytest.param([0, 0, 0, 1, 1, 1], elastic, marks=pytest.mark.long) for elastic in (False, True)),
    ],
)
def test_several_hosts_pass_the_conformance_test(
    hosts: list[int], elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(workers: int) -> list[Any]:
        ends = on_hosts(hosts, elastic=elastic)
        assert all(isinstance(end, HostsTransport) for end in ends)
        return ends

    monkeypatch.setattr(shared_memory, "SEGMENT_BYTES", 1 << 19)
    before = traces()
    check_transport(make, (len(hosts),), hosts.count(0))
    assert traces() == before


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1], [0, 0, 1]])
def test_workers_of_several_hosts_without_a_launcher_are_told_that_nothing_is_encrypted(
    hosts: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env_rendezvous, "open_store", lambda config, timeout_s: config.store)
    say_once.cache_clear()

    def connect(store: Any, worker: int) -> Transport:
        config = WorkerConfig(options=RunConfig(Path("train.py"), workers=len(hosts)), worker=worker, store=store)
        return env_rendezvous.connect(config, TIMEOUT_S, torch.device("cpu"))

    closed(on_hosts(hosts, made=connect))
    assert capsys.readouterr().err.count("is not encrypted") == (len(set(hosts)) > 1)


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
        kinds.append((size, case.choice(list(KINDS)), case.choice(["plain", "offset", "strided"])))
    source = torch.Generator().manual_seed(case.randrange(1 << 30))
    return [[_laid_out(torch.randn(size, generator=source).to(dtype), how) for size, dtype, how in kinds]
            for _ in range(workers)]  # fmt: skip


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum; half precision is added in float32, and rounded once."""
    dtype = tensors[0].dtype
    total = tensors[0].to(torch.float32 if dtype.itemsize == 2 else dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(dtype)


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
        assert all(torch.equal(mine[index], sum_in_order(list(each))) for mine in found)


@pytest.fixture(scope="module")
def hosts_in_turns() -> Iterator[list[Any]]:
    """Yield a transport of 5 workers on 3 hosts, with small segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(shared_memory, "SEGMENT_BYTES", 3 * PIECE)
        ends = on_hosts([0, 1, 2, 1, 0])
        yield ends
        closed(ends)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=examples(10))
def test_means_of_hosts_are_the_sums_of_their_sums_to_the_bit(hosts_in_turns: list[Any], seed: int) -> None:
    case = random.Random(seed)
    tensors = contributions(case, 5)
    each_mean = [[tensor.clone() for tensor in of_one] for of_one in zip(*tensors, strict=True)]
    order = list(range(len(each_mean)))
    case.shuffle(order)
    with ThreadPoolExecutor(5) as pool:
        means = list(pool.map(lambda end, mine: exchanged(end, mine, order), hosts_in_turns, tensors))
    for index, (first, second, third, fourth, fifth) in enumerate(each_mean):
        sums = [sum_in_order([first, fifth]), sum_in_order([second, fourth]), third]
        assert all(torch.equal(mine[index], sum_in_order(sums)) for mine in means)


def test_half_precision_is_rounded_as_by_torch(groups: dict[int, list[Any]]) -> None:
    """Every bit pattern is added to zeros, and to others so that the sum is rounded, overflows or cancels."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        for others in (torch.zeros_like(values), values.roll(7777), values.flip(0)):
            tensors = [values.clone(), others.clone()]
            with ThreadPoolExecutor(2) as pool:
                means = list(pool.map(lambda end, mine: end.submit(AllReduceMean(mine)).wait(), groups[2], tensors))
            expected = (values.float() + others.float()).to(dtype)
            for mean in means:
                assert torch.equal(mean.isnan(), expected.isnan())
                assert torch.equal(mean.nan_to_num(1.0).view(torch.int16), expected.nan_to_num(1.0).view(torch.int16))


def test_a_late_host_ends_the_waits_of_all_workers_after_the_timeout() -> None:
    ends = on_hosts([0, 0, 1, 1], SHORT_S)
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        futures = [pool.submit(lambda end=end: end.submit(AllReduceMean(torch.ones(4))).wait()) for end in ends[:2]]
        errors = [future.exception() for future in futures]
    assert all(isinstance(error, TransportError) for error in errors)
    assert "an exchange with worker 2" in str(errors[0])
    assert time.monotonic() - began < SHORT_S + OUT_S
    closed(ends)


def test_an_aborted_mean_of_hosts_is_not_written_later() -> None:
    ends = on_hosts([0, 0, 1, 1], timeout_s=5.0, elastic=True)
    tensors = [torch.ones(300_000) for _ in ends]

    def wait(end: Transport, tensor: Tensor) -> None:
        handle = end.submit(AllReduceMean(tensor))
        with pytest.raises(BrokenTransportError):
            handle.wait()
        tensor.fill_(-7.0)

    threading.Timer(0.1, ends[0].abort).start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(wait, ends[:3], tensors[:3]))  # host 1 waits for its worker 3, host 0 for host 1
    with pytest.raises(BrokenTransportError):
        ends[3].submit(AllReduceMean(tensors[3])).wait()
    time.sleep(0.1)
    assert all(bool((tensor == -7.0).all()) for tensor in tensors[:3])
    closed(ends)


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
    ends = connected(3, SHORT_S)
    ends[1].submit(AllReduceMean(torch.ones(4)))
    with pytest.raises(
        TransportError, match=r"worker 0 waited \d\.\d s for the mean of 4 numbers; .*worker 2 has not co"
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
    assert traces() == before


def test_the_last_contribution_and_an_abort_wake_sleeping_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LOOK_S", TIMEOUT_S)
    monkeypatch.setattr(host_memory, "SPIN_S", 0.0)
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


def _of_another_process(offer: Offer) -> Offer:
    return msgspec.structs.replace(offer, name=bytes(16))


def _unreachable(offer: Offer) -> Offer:
    return msgspec.structs.replace(offer, pid=1 << 30)


@pytest.mark.parametrize("other", [_of_another_process, _unreachable, lambda _: Offer()])
def test_all_workers_use_gloo_if_one_cannot_share_memory(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, count = shared_memory.offer_memory, iter(range(3))
    monkeypatch.setattr(
        shared_memory, "offer_memory", lambda *what: (other if next(count) == 1 else lambda one: one)(offer(*what))
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


Scenario = Callable[[str, Path], dict[str, Any]]


def played(scenario: Scenario, how: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a process of its own, and check that it leaves no file."""
    before = set(os.listdir("/dev/shm"))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, shared_memory_workers.__file__, scenario.__name__, how, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
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


LEADERS_ONLY = ("before the exchange", "within the exchange")
VICTIMS = [(stage, victim) for stage in STAGES for victim in (1, 2) if victim == 2 or stage not in LEADERS_ONLY]
"""Stages, and the worker that is killed: 2 leads its host, 1 does not."""


@pytest.mark.parametrize(("stage", "victim"), VICTIMS)
def test_a_worker_killed_at_any_stage_of_two_hosts_ends_the_waits_of_the_others(
    stage: str, victim: int, tmp_path: Path
) -> None:
    found = played(killed_on_two_hosts, f"{victim} {stage}", tmp_path)
    assert all(out["seconds"] < OUT_S for out in found["outs"])
    assert any(f"worker {victim} has exited" in out["why"] for out in found["outs"])
    assert found["ended"] == [{"ended": True}] * 3


@pytest.mark.parametrize("scenario", [killed_at_random, killed_at_random_on_two_hosts])
def test_workers_killed_at_random_moments_leave_no_wait(scenario: Scenario, tmp_path: Path) -> None:
    assert max(played(scenario, "8", tmp_path)["outs"]) < OUT_S


@pytest.mark.parametrize("scenario", [stopped, stopped_on_two_hosts])
def test_a_stopped_worker_that_continues_changes_no_result_of_the_others(scenario: Scenario, tmp_path: Path) -> None:
    found = played(scenario, "", tmp_path)
    assert found["out"] < OUT_S
    assert all("worker" in why for why in found["whys"])
    assert found["ended"] == [{"ended": True}] * 2


def test_a_process_forked_from_a_worker_holds_no_memory_that_it_does_not_use(tmp_path: Path) -> None:
    assert played(forked, "", tmp_path)["found"] == [{"traces": []}] * 2
