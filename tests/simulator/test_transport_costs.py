"""Processor costs of transports and bursts of links: closed forms, order, and measurements."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from types import ModuleType
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import LaunchError
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.framing import CHUNK_BYTES
from stretto.parameter_server.messages import Contribute
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.cluster.rpc_server import SimServers
from stretto.simulator.compute import cost_model, transport_costs
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.event_queue import EventQueue
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.network import topology
from stretto.simulator.network.flows import SimNetwork
from stretto.simulator.network.links import Links
from stretto.transport import gloo_ring

NUMBERS = 100_000
BYTES = 4 * NUMBERS
RATE = 1e6
"""8 Mbit/s in bytes per second."""


class Scene:
    """An engine whose workers have one transport each."""

    def __init__(self, workers: int, net: str, cost: CostModel, processors: float | None, shards: int = 0) -> None:
        links = Links(topology.parse(net), workers, shards)
        self.engine = Engine(workers, links, cost, (), processors, shards)
        table, offices = SimGroup(self.engine, links), None
        if shards:
            offices = SimServers(self.engine, shards, "stop", True, inf)
        self._wires = [offices.client(one) if offices else table.transport(one, inf) for one in self.engine.workers]

    def seconds(self, live: Callable[[Any], None]) -> float:
        """Return the virtual seconds until all workers have run a function."""
        ends = []

        def course(worker: Worker) -> None:
            live(self._wires[worker.number])
            ends.append(worker.now())

        self.engine.run(course, lambda one: ProcessState(ModuleType("__main__"), [], io.StringIO(), io.StringIO()))
        return max(ends)


def mean_s(workers: int, net: str = "instant", processors: float | None = None, **cost: float) -> float:
    """Return the virtual seconds of one all-reduce."""
    return Scene(workers, net, CostModel(0.0, **cost), processors).seconds(
        lambda wire: wire.submit(AllReduceMean(torch.ones(NUMBERS))).wait()
    )


times = st.floats(0, 1, allow_subnormal=False)


@given(st.builds(CostModel, *[times] * 11, sample_s=times))
def test_text_can_be_parsed_back(one: CostModel) -> None:
    again = cost_model.parse(str(one))
    for field, value in vars(one).items():
        assert getattr(again, field) == pytest.approx(value, abs=1e-7)


def test_values_after_auto_override_measured_ones() -> None:
    measured = CostModel(0.005, codec_s=0.001, message_s=0.002)
    assert cost_model.parse("auto", lambda: measured) == measured
    found = cost_model.parse("auto, 3ms per message, 4ms per MB", lambda: measured)
    assert found == CostModel(0.005, codec_s=0.001, message_s=0.003, megabyte_s=0.004)


@pytest.mark.parametrize(
    "text", ["auto", "3ms per MB", "5ms, auto", "5ms, 1ms per mile", "5ms, 1ms per MB, 2ms per MB"]
)
def test_invalid_cost_model_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--step-time"):
        cost_model.parse(text)


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_costs_use_the_counted_messages_and_bytes(workers: int) -> None:
    """Every message has three headers, which both ends count; the remaining bytes are the payload."""
    payload = pytest.approx(4 * BYTES * (workers - 1) / workers, rel=0.01)
    for worker in range(workers):
        sent, received = gloo_ring.all_reduce_bytes(worker, workers, BYTES)
        messages = gloo_ring.all_reduce_messages(worker, workers, BYTES)
        assert messages == 8 * (workers - 1)
        assert sent + received - 3 * gloo_ring.HEADER_BYTES * messages == payload


@pytest.mark.parametrize("workers", [2, 4])
def test_collective_takes_its_messages_and_the_maximum_of_links_and_processors(workers: int) -> None:
    moved = 4 * BYTES * (workers - 1) / workers
    messages = 8 * (workers - 1)
    on_links = moved / 2 / 1e6
    assert mean_s(workers) == pytest.approx(0)
    assert mean_s(workers, exchange_s=0.5, message_s=0.01) == pytest.approx(0.5 + 0.01 * messages)
    assert mean_s(workers, "8Mbit/s", message_s=0.01) == pytest.approx(on_links + 0.01 * messages)
    assert mean_s(workers, "8Mbit/s", megabyte_s=0.1) == pytest.approx(on_links)
    assert mean_s(workers, "8Mbit/s", megabyte_s=2.0) == pytest.approx(2.0 * moved / 1e6)


@pytest.mark.parametrize("net", ["instant", "8Mbit/s 10ms"])
def test_latency_is_added_to_work_and_transfer(net: str) -> None:
    late = 2 * 3 * topology.parse(net).link.latency
    moved = 3 * BYTES
    assert mean_s(4, net, megabyte_s=1.0) == pytest.approx(late + moved / 1e6)
    assert mean_s(4, net, megabyte_s=1.0, processors=2.0) == pytest.approx(late + 2 * moved / 1e6)


def test_byte_messages_cost_one_conversion_per_round() -> None:
    def told_s(act: Callable[[Any], object], **cost: float) -> float:
        return Scene(4, "instant", CostModel(0.0, **cost), None).seconds(act)

    short, long = b"x", bytes(1000)
    assert told_s(lambda wire: wire.all_gather_bytes(short), conversion_s=0.1) == pytest.approx(0.1)
    assert told_s(lambda wire: wire.all_gather_bytes(long), conversion_s=0.1) == pytest.approx(0.2)
    assert told_s(lambda wire: wire.broadcast_bytes(short), conversion_s=0.1) == pytest.approx(0.1)
    assert told_s(lambda wire: wire.broadcast_bytes(long), conversion_s=0.1) == pytest.approx(0.2)
    assert told_s(lambda wire: wire.submit(AllGather(torch.ones(9))).wait(), conversion_s=0.1) == pytest.approx(0.1)
    assert mean_s(4, conversion_s=0.1) == 0


@pytest.mark.parametrize("processors", [0.5, 1.0, 2.0, 8.0])
def test_collective_work_shares_the_processors(processors: float) -> None:
    took = mean_s(4, megabyte_s=1.0, processors=processors)
    assert took == pytest.approx(max(4 / processors, 1.0) * 3 * BYTES / 1e6)


def gather_s(processors: float | None = None, **cost: float) -> float:
    """Return the virtual seconds of an all-gather of bytes of two workers over a server."""
    return Scene(2, "instant", CostModel(0.0, **cost), processors, 1).seconds(lambda wire: wire.all_gather_bytes(b"x"))


def test_rpc_message_is_processed_at_both_ends_and_serially_at_the_server() -> None:
    """Workers send concurrently; the server receives two messages, then sends two; each worker receives one."""
    assert gather_s() == pytest.approx(0)
    assert gather_s(rpc_message_s=0.1) == pytest.approx(0.1 + 2 * 0.1 + 2 * 0.1 + 0.1)
    assert gather_s(rpc_message_s=0.1, processors=1.0) == pytest.approx(0.8)


def test_server_in_worker_0_shares_its_processor() -> None:
    """The server receives two messages and sends two, while the worker computes for the same time."""

    def seconds(net: str) -> float:
        def live(wire: ParameterServerClient) -> None:
            wire.all_gather_bytes(b"x")
            if wire.worker == 0:
                scene.engine.use_processor(scene.engine.resource_of_service(0), 1.0, lambda: None)
                scene.engine.workers[0].compute(1.0)

        scene = Scene(2, net, CostModel(0.0), 8.0, 1)
        return scene.seconds(live)

    assert seconds("instant, servers with workers") == pytest.approx(1.0)
    assert seconds("instant, servers in worker 0") == pytest.approx(2.0, rel=0.01)


def push_s(nbytes: int, net: str, **cost: float) -> float:
    """Return the virtual seconds of a request of `nbytes` bytes to a server and its reply."""

    def live(wire: ParameterServerClient) -> None:
        wire.channels[0].wait(wire.channels[0].send(Contribute(1, "mean"), [torch.ones(nbytes // 4)]))

    return Scene(1, net, CostModel(0.0, **cost), None, 1).seconds(live)


def test_chunks_of_a_large_message_are_pipelined() -> None:
    """Two chunks each way: the second is produced while the first is sent, then the last is received."""
    megabytes = 2 * CHUNK_BYTES / 1e6
    close = {"rel": 1e-3}
    assert push_s(2 * CHUNK_BYTES, "instant", rpc_megabyte_s=1.0) == pytest.approx(2 * 1.5 * megabytes, **close)
    assert push_s(2 * CHUNK_BYTES, "8Mbit/s", rpc_megabyte_s=0.1) == pytest.approx(2 * 1.1 * megabytes, **close)
    assert push_s(CHUNK_BYTES // 2, "8Mbit/s", rpc_megabyte_s=1.0) == pytest.approx(2 * 3 * megabytes / 4, **close)


@pytest.mark.parametrize(
    ("net", "processors", "way_s"),
    [("8Gbit/s, servers with workers", None, 2.0), ("8Gbit/s", None, 3.0), ("8Gbit/s", 0.5, 6.0)],
)
def test_messages_over_links_cost_link_time(net: str, processors: float | None, way_s: float) -> None:
    """Sender, links and receiver work one after another; half a processor takes twice as long."""
    nbytes = CHUNK_BYTES // 2

    def live(wire: ParameterServerClient) -> None:
        wire.channels[0].wait(wire.channels[0].send(Contribute(1, "mean"), [torch.ones(nbytes // 4)]))

    cost = CostModel(0.0, rpc_megabyte_s=1.0, link_megabyte_s=0.5)
    took = Scene(1, net, cost, processors, 1).seconds(live)
    assert took == pytest.approx(2 * way_s * nbytes / 1e6, rel=5e-3)


def test_message_processing_precedes_computing() -> None:
    engine = Engine(2, Links(topology.Network(), 2), CostModel(0.0), (), 1.0)
    ends = {}

    def course(worker: Worker) -> None:
        if worker.number:
            engine.use_processor(1 + worker.number, 1.0, lambda: ends.update(message=engine.queue.now))
        worker.compute(3.0)
        ends[worker.number] = worker.now()

    engine.run(course, lambda one: ProcessState(ModuleType("__main__"), [], io.StringIO(), io.StringIO()))
    assert ends["message"] == pytest.approx(1.0, rel=0.01)
    assert max(ends.values()) == pytest.approx(7.0)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 3_000_000), min_size=2, max_size=12))
def test_messages_of_all_lengths_arrive_in_order(lengths: list[int]) -> None:
    came = []

    def live(wire: ParameterServerClient) -> None:
        (link,) = wire.channels
        asks = [link.send(Contribute(op, "mean"), [torch.ones(length // 4)]) for op, length in enumerate(lengths, 1)]
        for place, number in enumerate(asks):
            link.wait(number)
            came.append(number)
            assert not any(link.poll(one) for one in asks[place + 1 :])

    cost = CostModel(0.0, rpc_message_s=0.001, rpc_megabyte_s=1.0)
    Scene(1, "8Mbit/s 1ms", cost, None, 1).seconds(live)
    assert came == sorted(came)


# --- bursts -------------------------------------------------------------------------------------------------------


def arrivals(net: str, sends: list[tuple[float, int, int, float]]) -> list[float]:
    """Return the arrival times of messages (time, source, target, bytes)."""
    queue = EventQueue()
    links = SimNetwork(queue, Links(topology.parse(net), 3))
    came = [0.0] * len(sends)
    for number, (at, source, target, nbytes) in enumerate(sends):

        def arrived(number: int = number) -> None:
            came[number] = queue.now

        def go(source: int = source, target: int = target, nbytes: float = nbytes, then: object = arrived) -> None:
            links.send(source, target, nbytes, then)

        queue.schedule(at, go)
    while queue.step():
        pass
    return came


@pytest.mark.parametrize("nbytes", [1000, 100_000])
def test_slowest_link_of_a_path_sets_the_time_of_a_packet_and_of_a_long_message(nbytes: float) -> None:
    assert arrivals("8Mbit/s up 80Mbit/s down", [(0.0, 0, 1, nbytes)]) == pytest.approx([nbytes / 1e6])


@pytest.mark.parametrize(("nbytes", "seconds"), [(1_000_000, 0.9), (100_000, 0.0), (100_500, 0.0005), (50_000, 0.0)])
def test_idle_link_carries_a_burst_immediately(nbytes: float, seconds: float) -> None:
    assert arrivals("8Mbit/s, burst 100kB", [(0.0, 0, 1, nbytes)]) == pytest.approx([seconds])


def test_burst_refills_only_while_the_link_is_idle() -> None:
    """A burst and 0.1 s of sending; 0.02 s of rest gain 20 kB; then a long rest."""
    sends = [(0.0, 0, 1, 200_000), (0.12, 0, 1, 100_000), (5.0, 0, 1, 200_000)]
    assert arrivals("8Mbit/s, burst 100kB", sends) == pytest.approx([0.1, 0.2, 5.1])


def test_emptiest_link_of_a_path_limits_the_burst() -> None:
    """Traffic from 0 to 1 empties the uplink of 0 and the downlink of 1, but not the uplink of 2."""
    sends = [(0.0, 0, 1, 100_000), (0.0, 2, 1, 100_000), (0.0, 0, 2, 100_000)]
    assert arrivals("8Mbit/s, burst 100kB", sends) == pytest.approx([0.0, 0.1, 0.1])


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400_000)), min_size=1, max_size=8), st.integers(0, 200))
def test_no_link_exceeds_its_rate_and_one_burst(sends: list[tuple[float, int]], kilobytes: int) -> None:
    came = arrivals(f"8Mbit/s, burst {kilobytes}kB", [(at, 0, 1, nbytes) for at, nbytes in sorted(sends)])
    first = min(at for at, _ in sends)
    carried = RATE * (max(came) - first) + 1e3 * kilobytes
    assert carried >= sum(nbytes for _, nbytes in sends) * (1 - 1e-9) - 1


# --- measuring ----------------------------------------------------------------------------------------------------


def test_transports_of_this_machine_are_measured() -> None:
    found = vars(transport_costs.measure_transports(plain=True))
    assert all(0 <= value < 1 for value in found.values())
    assert found["message_s"] > 0
    assert found["rpc_message_s"] > 0


@pytest.mark.parametrize("truth", [(3e-4, 5e-5, 2e-3, 4e-4), (1e-4, 0.0, 0.0, 0.0)])
def test_costs_are_recovered_from_few_collectives(truth: tuple[float, float, float, float]) -> None:
    """The costs of a fake transport are recovered."""

    class Wire:
        workers, spent = 4, 0.0

        def submit(self, op: AllReduceMean) -> Wire:
            moved = [gloo_ring.all_reduce_bytes(one, 4, op.tensor.nbytes) for one in range(4)]
            messages = sum(gloo_ring.all_reduce_messages(one, 4, op.tensor.nbytes) for one in range(4)) / 4
            payload = sum(map(sum, moved)) / 4 - 3 * gloo_ring.HEADER_BYTES * messages
            self.spent += truth[0] + truth[1] * messages + truth[2] * payload / 1e6
            return self

        def wait(self) -> None:
            """Return None."""

        def all_gather_bytes(self, message: bytes) -> None:
            self.spent += truth[0] + truth[1] * 12 + truth[3]

        def broadcast_bytes(self, message: bytes) -> None:
            self.spent += truth[0] + truth[1] * 1.5 + truth[3]

    wire = Wire()
    found = transport_costs.of_collective(wire, lambda: wire.spent)
    assert found == pytest.approx(truth, rel=0.03, abs=1e-8)


def test_costs_of_crossing_messages_are_those_of_usual_collectives() -> None:
    """Messages of a single number do not cross and are cheaper; a line through both sizes would start below 0."""

    class Wire:
        workers, spent = 4, 0.0

        def submit(self, op: AllReduceMean) -> Wire:
            self.spent += 4e-4 if op.tensor.numel() == 1 else 3.6e-3
            return self

        def wait(self) -> None:
            """Return None."""

        def all_gather_bytes(self, message: bytes) -> None:
            """Do nothing."""

        broadcast_bytes = all_gather_bytes

    wire = Wire()
    exchange_s, message_s, *_ = transport_costs.of_collective(wire, lambda: wire.spent)  # type: ignore[arg-type]
    assert exchange_s >= 0
    assert exchange_s + message_s * gloo_ring.all_reduce_messages(0, 4, 4000) == pytest.approx(3.6e-3)


@pytest.mark.parametrize("workers", [1, 4])
def test_link_costs_of_a_server_are_recovered(workers: int) -> None:
    """Worker 0 runs beside the server; reads of the other workers take longer."""
    truth = rpc_message_s, near_s, link_s = 1e-4, 2e-3, 5e-3
    all_here, spent = threading.Barrier(workers), [0.0]

    class Wire:
        def __init__(self, worker: int) -> None:
            self.worker, self.workers = worker, workers

        def open(self, *_: object) -> None:
            """Return None."""

        def all_gather_bytes(self, message: bytes) -> None:
            all_here.wait(60)
            if self.worker == 0:
                spent[0] += 4 * workers * rpc_message_s
            all_here.wait(60)

        def read(self, lengths: list[int]) -> Wire:
            megabytes = 4 * sum(lengths) / 1e6
            with lock:
                spent[0] += 4 * rpc_message_s + 2 * megabytes * (near_s + link_s * (self.worker > 0))
            return self

        def wait(self, take: object) -> None:
            time.sleep(0.002 * self.worker)

    def clock() -> float:
        return spent[0]

    lock = threading.Lock()
    with ThreadPoolExecutor(workers) as crew:
        found = list(crew.map(lambda one: transport_costs.of_server(Wire(one), clock, clock), range(workers)))  # type: ignore
    expected = truth if workers > 1 else (rpc_message_s, near_s, 0.0)
    for one in found:
        assert one == pytest.approx(expected, rel=0.05)
