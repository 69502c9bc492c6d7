"""The simulation engine without training: time, switching, per-worker state, and the end of a run."""

from __future__ import annotations

import functools
import io
import random
import sys
from collections.abc import Callable
from itertools import pairwise, permutations
from math import inf
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.collective_ops import AllGather, AllReduceMean, Exchange
from stretto.errors import LaunchError, TransportError
from stretto.faults import plan as faults
from stretto.simulator.cluster.collective import SimGroup, SimTransport
from stretto.simulator.engine import CostModel, Engine, Worker
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.network import topology
from stretto.simulator.network.links import Links

Live = Callable[[Worker, SimTransport], None]


class Scene:
    """An engine with one group of all workers and optional faults; `lived` runs its workers."""

    def __init__(self, workers: int, net: str = "instant", fault: str = "", limit_s: float = inf, **more: Any) -> None:
        links = Links(topology.parse(net), workers)
        plan = faults.schedule(faults.parse(fault) if fault else (), workers, 0, 0)
        self.engine = Engine(workers, links, CostModel(0.0), plan, **more)
        table = SimGroup(self.engine, links)
        self._wires = [table.transport(one, limit_s) for one in self.engine.workers]

    def lived(self, live: Live, order: Any = None) -> Engine:
        """Run all workers, and return the engine."""
        self.engine.run(lambda one: live(one, self._wires[one.number]), self._own, order)
        return self.engine

    def _own(self, worker: Worker) -> ProcessState:
        torch.manual_seed(worker.number)
        np.random.seed(worker.number)
        random.seed(worker.number)
        return ProcessState(ModuleType("__main__"), [str(worker.number)], io.StringIO(), io.StringIO())


def doing_nothing(worker: Worker, wire: SimTransport) -> None:
    """Do nothing."""


# --- time ---------------------------------------------------------------------------------------------------------

TENTHS = st.integers(0, 50).map(lambda tenths: tenths / 10)


@given(st.lists(st.lists(TENTHS, min_size=3, max_size=3), min_size=1, max_size=8))
def test_with_a_barrier_after_each_round_time_is_the_sum_of_the_slowest(rounds: list[list[float]]) -> None:
    def live(worker: Worker, wire: SimTransport) -> None:
        for each in rounds:
            worker.compute(each[worker.number])
            wire.all_gather_bytes(b"")

    assert Scene(3).lived(live).queue.now == pytest.approx(sum(map(max, rounds)), abs=1e-9)


@given(st.lists(st.lists(TENTHS, max_size=6), min_size=1, max_size=4))
def test_time_without_barriers_is_the_slowest_sum(works: list[list[float]]) -> None:
    ends = {}

    def live(worker: Worker, wire: SimTransport) -> None:
        for seconds in works[worker.number]:
            worker.compute(seconds)
        worker.catch_up()
        ends[worker.number] = worker.now()

    engine = Scene(len(works)).lived(live)
    assert ends == pytest.approx(dict(enumerate(map(sum, works))), abs=1e-9)
    assert engine.queue.now == max(ends.values())


def test_workers_share_processors_equally() -> None:
    """Four workers compute 5 s each on two processors; each uses at most one."""
    assert Scene(4, processors=2.0).lived(lambda one, _: one.compute(5.0)).queue.now == pytest.approx(10.0)
    assert Scene(4, processors=9.0).lived(lambda one, _: one.compute(5.0)).queue.now == pytest.approx(5.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(("compute", "sleep", "say", "hear", "catch up")), st.integers(0, 3), TENTHS), max_size=8
)


@settings(max_examples=examples(60))
@given(st.lists(STEPS, min_size=2, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_time_is_monotonic_and_messages_arrive_once_in_order_and_not_early(
    lives: list[list[tuple[str, int, float]]], chance: random.Random, is_paused: bool
) -> None:
    """Workers send and receive messages, in any order of creation."""
    net = "8kbit/s 100ms"
    said: dict[tuple[int, int], list[float]] = {}
    come: dict[tuple[int, int], list[tuple[int, float]]] = {}
    times: list[float] = []
    scene = Scene(len(lives), net, "pause worker 1 for 3s at 1s" if is_paused else "")
    engine = scene.engine
    own_times: list[list[float]] = [[] for _ in lives]

    def say(worker: Worker, target: int) -> None:
        pair = worker.number, target

        def leave() -> None:
            left = said.setdefault(pair, [])
            left.append(engine.queue.now)
            number = len(left)
            engine.network.send(*pair, 1000.0, lambda: come.setdefault(pair, []).append((number, engine.queue.now)))

        worker.schedule(leave)

    def live(worker: Worker, wire: SimTransport) -> None:
        for verb, target, seconds in lives[worker.number]:
            if verb == "say" and target < len(lives) and target != worker.number:
                say(worker, target)
            elif verb in ("compute", "sleep"):
                getattr(worker, verb)(seconds)
            elif verb == "catch up":
                worker.catch_up()
            times.append(engine.queue.now)
            own_times[worker.number].append(worker.now())
        worker.sleep(1000.0)
        worker.catch_up()

    scene.lived(live, order=chance.sample(range(len(lives)), len(lives)))
    assert all(one <= other for seen in (times, *own_times) for one, other in pairwise(seen))
    assert said.keys() == come.keys()
    for pair, left in said.items():
        assert [number for number, _ in come[pair]] == list(range(1, len(left) + 1))
        assert all(there - here >= 1.1 - 1e-9 for here, (_, there) in zip(left, come[pair], strict=True))
        assert come[pair] == sorted(come[pair])


def test_messages_of_one_pair_are_sent_in_order() -> None:
    scene = Scene(2, "8kbit/s 100ms")
    engine, come = scene.engine, []

    def live(worker: Worker, wire: SimTransport) -> None:
        for number in range(3 if worker.number == 0 else 0):
            send = functools.partial(come.append, number)
            worker.schedule(
                lambda send=send: engine.network.send(0, 1, 1000.0, lambda: (send(), come.append(engine.queue.now)))
            )
        worker.sleep(10.0)
        worker.catch_up()

    scene.lived(live)
    assert come == pytest.approx([0, 1.1, 1, 2.1, 2, 3.1])


def test_order_of_creation_has_no_effect() -> None:
    def told(order: Any) -> tuple[list[tuple[float, int]], float]:
        met = []

        def live(worker: Worker, wire: SimTransport) -> None:
            for _ in range(3):
                worker.compute(worker.number % 2 + 1)
                wire.all_gather_bytes(bytes(worker.number))
                met.append((worker.now(), worker.number))

        return met, Scene(3, "1Mbit/s 5ms").lived(live, order).queue.now

    assert len({repr(told(order)) for order in permutations(range(3))}) == 1


# --- faults -------------------------------------------------------------------------------------------------------


@given(
    TENTHS.map(lambda start: start + 0.05),
    st.lists(st.tuples(TENTHS, TENTHS.map(lambda long: long + 0.1)), max_size=4),
    st.lists(TENTHS, min_size=1, max_size=4),
)
def test_pause_extends_computing_by_their_overlap(
    start: float, pauses: list[tuple[float, float]], works: list[float]
) -> None:
    """Return a strategy of consecutive pauses, none of which starts exactly when some computing ends."""
    spans, at = [], start
    for gap, long in pauses:
        spans.append((at, at + long))
        at += long + gap + 0.1
    text = "; ".join(f"pause worker 0 for {b - a:.6f}s at {a:.6f}s" for a, b in spans)
    end = 0.0
    for left in works:
        for a, b in spans:
            if a <= end < b:
                end = b
            if end < a < end + left:
                left, end = left - (a - end), b
        end += left

    def live(worker: Worker, wire: SimTransport) -> None:
        for seconds in works:
            worker.compute(seconds)

    scene = Scene(1, fault=text)
    lone = scene.engine.workers[0]
    scene.lived(live)
    assert lone.now() == pytest.approx(end, abs=1e-4)


def meeting(worker: Worker, wire: SimTransport) -> None:
    """Compute for 1 s, then all-reduce 4,000 bytes over links of 4,000 bytes/s."""
    worker.compute(1.0)
    wire.submit(AllReduceMean(torch.ones(1000))).wait()


NET = "32kbit/s"
WHOLE = 2.0
"""Two workers all-reduce 4,000 bytes at 4,000 bytes/s: 2 (N-1)/N = 1 s, after 1 s of computing."""


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("", WHOLE),
        ("pause worker 0 for 3s at 0.5s", WHOLE + 3),
        ("pause worker 1 for 3s at 0.5s; pause worker 0 for 3s at 0.5s", WHOLE + 3),
        ("pause worker 1 for 3s at 0.5s; pause worker 0 for 1s at 0.5s", WHOLE + 3),
        ("cut workers 0 for 5s at 1.5s", WHOLE + 5),
        ("cut workers 0 for 0.25s at 0.5s", WHOLE),
        ("cut workers 0 for 1.25s at 0.5s", WHOLE + 0.75),
        ("cut workers 0 for 5s at 1.5s; cut workers 1 for 1s at 6s", WHOLE + 5.5),
        ("slow link of worker 1 by 4 for 60s at 0s", 1 + 4),
        ("slow link of worker 1 by 4 for 2s at 0.5s", 2.5 + 0.625),
        ("slow link of worker 1 by 2 for 60s at 0s; slow link of worker 1 by 5 for 60s at 0s", 1 + 10),
    ],
)
def test_fault_costs_exactly_its_time(fault: str, seconds: float) -> None:
    assert Scene(2, NET, fault).lived(meeting).queue.now == pytest.approx(seconds, abs=1e-6)


def test_paused_worker_stops_a_collective() -> None:
    heard = {}

    def live(worker: Worker, wire: SimTransport) -> None:
        worker.compute(1.0 + worker.number)
        wire.all_gather_bytes(b"")
        heard[worker.number] = worker.now()

    Scene(2, fault="pause worker 0 for 5s at 1.5s").lived(live)
    assert heard == {0: 6.5, 1: 6.5}


@pytest.mark.parametrize("left", [100, 20_000])
def test_transfer_resumes_with_the_remaining_bytes_after_a_partition(left: int) -> None:
    """The remaining bytes fit into a packet or do not."""
    moment = 1.0 - left / 1e6
    fault = f"cut worker 0 for 2s at {moment:.6f}s; slow link of worker 1 by 2 for 1s at 10s"
    scene = Scene(2, "8Mbit/s", fault)
    told: list[float] = []
    scene.engine.network.send(0, 1, 1_000_000, lambda: told.append(scene.engine.queue.now))
    scene.lived(lambda worker, wire: worker.sleep(5.0) or worker.catch_up())  # type: ignore[func-returns-value]
    assert told == pytest.approx([3.0])


def test_packet_started_on_a_slow_link_speeds_up_when_it_is_restored() -> None:
    scene = Scene(2, "8Mbit/s", "slow link of worker 0 by 100000 for 10ms at 0s")
    told: list[float] = []

    def live(worker: Worker, wire: SimTransport) -> None:
        if worker.number == 0:
            worker.sleep(0.001)
            worker.schedule(lambda: scene.engine.network.send(0, 1, 1000, lambda: told.append(scene.engine.queue.now)))
        worker.sleep(1.0)
        worker.catch_up()

    scene.lived(live)
    assert told == pytest.approx([0.011], abs=1e-4)


def test_a_backward_pass_within_another_is_a_part_of_it() -> None:
    done: list[str] = []

    def live(worker: Worker, wire: SimTransport) -> None:
        def inner() -> None:
            worker.backward(lambda: worker.after_backward(lambda: done.append("behind")))
            done.append("outer")

        worker.backward(inner)

    Scene(1).lived(live)
    assert done == ["outer", "behind"]


# --- exchanges of pairs -------------------------------------------------------------------------------------------


def exchange_ends(net: str, pairs: dict[int, list[int]], late: int | None = None) -> list[float]:
    """Return the times at which workers have exchanged tensors of this size with their peers."""
    ends = {}

    def live(worker: Worker, transport: SimTransport) -> None:
        worker.compute(100.0 if worker.number == late else 0.0)
        tensor = torch.full((250_000,), float(worker.number))
        handles = {peer: transport.submit(Exchange(peer, tensor)) for peer in pairs.get(worker.number, [])}
        for peer, handle in handles.items():
            assert bool((handle.wait() == peer).all())
        ends[worker.number] = worker.now()

    Scene(4, net).lived(live)
    return [ends[number] for number in range(4)]


FRAME_S = 32 / 1e6
"""Seconds of a frame over 8 Mbit/s."""


def test_an_exchange_takes_the_time_of_its_links_and_two_latencies() -> None:
    pair = {0: [1], 1: [0]}
    assert exchange_ends("8Mbit/s 50ms", pair) == pytest.approx([1.1 + FRAME_S] * 2 + [0.0] * 2)
    slow_up = exchange_ends("4Mbit/s up 8Mbit/s down", pair)
    assert slow_up == pytest.approx([2.0 + 2 * FRAME_S] * 2 + [0.0] * 2)


def test_exchanges_of_one_worker_share_its_link_and_others_do_not_wait() -> None:
    both = {0: [1, 2], 1: [0], 2: [0]}
    assert exchange_ends("8Mbit/s", both) == pytest.approx([2.0 + 2 * FRAME_S] * 3 + [0.0])
    apart = {0: [1], 1: [0], 2: [3], 3: [2]}
    assert exchange_ends("8Mbit/s", apart) == pytest.approx([1.0 + FRAME_S] * 4)
    assert exchange_ends("8Mbit/s", apart, late=3) == pytest.approx([1.0 + FRAME_S] * 2 + [101.0 + FRAME_S] * 2)


def test_exchanges_within_a_host_leave_the_link_between_hosts_free() -> None:
    net = "hosts of 2 on 80Mbit/s, 8Mbit/s between"
    assert exchange_ends(net, {0: [1], 1: [0], 2: [3], 3: [2]}) == pytest.approx([0.1 + FRAME_S / 10] * 4)
    assert exchange_ends(net, {0: [2], 1: [3], 2: [0], 3: [1]}) == pytest.approx([2.0 + 2 * FRAME_S] * 4)


@pytest.mark.parametrize(
    ("net", "share"),
    [
        ("8Mbit/s", [1.5] * 4),
        ("hosts of 4 on 80Mbit/s, 8Mbit/s between", [1.5] * 4),
        ("hosts of 2 on 80Mbit/s, 8Mbit/s between", [1.0, 0.0] * 2),
    ],
)
def test_bytes_of_a_mean_are_those_of_live_workers(net: str, share: list[float]) -> None:
    """Workers alone on their hosts, and those of one host, count a ring; of several hosts their first workers count.

    Each sends 2(N-1)/N of the tensor: N is the number of workers, or of hosts.
    """
    sent = {}

    def live(worker: Worker, transport: SimTransport) -> None:
        before = transport.traffic().bytes_sent
        transport.submit(AllReduceMean(torch.ones(1_000_000))).wait()
        sent[worker.number] = transport.traffic().bytes_sent - before

    Scene(4, net).lived(live)
    assert [sent[number] / 4_000_000 for number in range(4)] == pytest.approx(share, rel=0.02)


def test_a_worker_without_its_peer_is_named() -> None:
    def live(worker: Worker, transport: SimTransport) -> None:
        if worker.number == 0:
            transport.submit(Exchange(1, torch.ones(3))).wait()

    with pytest.raises(LaunchError, match=r"worker 0 waits for worker 1 in exchange 1 of ranks 0 and 1"):
        Scene(3).lived(live)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_deadlock_error_lists_what_workers_wait_for() -> None:
    def live(worker: Worker, wire: SimTransport) -> None:
        worker.compute(0.25)
        if worker.number != 1:
            wire.all_gather_bytes(b"")

    with pytest.raises(LaunchError) as caught:
        Scene(3).lived(live)
    assert str(caught.value).splitlines() == [
        "deadlock at 0.25 s of virtual time: every worker waits, and no event will wake one",
        "  worker 0 waits for worker 1 in collective 1",
        "  worker 2 waits for worker 1 in collective 1",
        "  worker 1 has ended",
    ]


def test_faults_without_end_do_not_hide_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.simulator.engine.IDLE_EVENTS", 1000)

    def live(worker: Worker, wire: SimTransport) -> None:
        if worker.number:
            wire.all_gather_bytes(b"")

    with pytest.raises(LaunchError, match="worker 1 waits for worker 0"):
        Scene(2, "1Mbit/s", "slow link of worker 0 by 2 for 1s every 2s").lived(live)


def test_mismatched_collectives_are_an_error() -> None:
    def live(worker: Worker, wire: SimTransport) -> None:
        wire.submit((AllReduceMean, AllGather)[worker.number](torch.ones(3))).wait()

    with pytest.raises(TransportError, match="different operations"):
        Scene(2).lived(live)


def test_a_wait_has_a_limit() -> None:
    def live(worker: Worker, wire: SimTransport) -> None:
        worker.compute(10.0 * worker.number)
        wire.all_gather_bytes(b"")

    with pytest.raises(TransportError, match="worker 0 waited 10 s for .* longer than 5 s"):
        Scene(2, limit_s=5.0).lived(live)


def test_wait_within_a_backward_pass_is_an_error() -> None:
    """torch's autograd engine cannot interleave backward passes of one thread."""

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            scene.engine.workers[0].wait_until(lambda: False, lambda: "a wonder")
            return grad

    scene = Scene(1)
    with pytest.raises(RuntimeError, match="worker 0 cannot wait for a wonder within a backward pass"):
        scene.lived(lambda worker, wire: Waiting.apply(torch.ones(1, requires_grad=True)).sum().backward())


WHY = {"with an error": "of worker 1", "in a deadlock": "every worker waits", "killed": "worker 2 was killed at 0.5 s"}


@pytest.mark.parametrize("ended", ["well", *WHY])
def test_process_state_is_restored_after_a_simulation(ended: str) -> None:
    def live(worker: Worker, wire: SimTransport) -> None:
        torch.rand(3), np.random.rand(3), random.random()
        torch.set_grad_enabled(False)
        sys.path.insert(0, "nowhere")
        sys.argv = ["somewhere"]
        try:
            if worker.number == 1 and ended != "well":
                worker.compute(1.0)
                worker.catch_up()
                if ended == "with an error":
                    raise KeyError("of worker 1")
                return
            wire.all_gather_bytes(b"")
        finally:
            ends.append(worker.number)

    def here() -> list[Any]:
        states = [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]
        names = [sys.modules["__main__"], sys.argv, sys.stdout, list(sys.path)]
        return [*states, *names, torch.autograd.backward, torch.is_grad_enabled(), torch.get_num_threads()]

    ends: list[int] = []
    np.random.randn()  # stores the second draw of a pair
    before = here()
    scene = Scene(3, fault="kill worker 2 at 0.5s" if ended == "killed" else "")
    if ended == "well":
        scene.lived(live)
    else:
        with pytest.raises((KeyError, LaunchError), match=WHY[ended]):
            scene.lived(live)
    assert here() == before
    assert sorted(ends) == [0, 1, 2]
    assert all(one.greenlet is not None and one.greenlet.dead for one in scene.engine.workers)


# --- state per worker ---------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(2).tolist(),
    "torch's normal": lambda: torch.randn(3).tolist(),
    "numpy": lambda: np.random.rand(2).tolist(),
    "numpy's normal": lambda: np.random.randn(),
    "random": random.random,
    "random's normal": lambda: random.gauss(0, 1),
    "many of numpy": lambda: np.random.rand(700).sum(),
}


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), min_size=2, max_size=4))
def test_random_numbers_of_a_worker_do_not_depend_on_others(draws: list[list[str]]) -> None:
    """Each worker draws the same numbers as alone, with a switch of workers after every draw."""
    drawn: dict[int, list[object]] = {}

    def live(worker: Worker, wire: SimTransport) -> None:
        mine = drawn.setdefault(worker.number, [])
        for name in draws[worker.number]:
            mine.append(DRAWS[name]())
            worker.sleep(1.0)
            worker.catch_up()

    Scene(len(draws)).lived(live)
    for worker, names in enumerate(draws):
        torch.manual_seed(worker)
        np.random.seed(worker)
        random.seed(worker)
        assert drawn[worker] == [DRAWS[name]() for name in names]


def test_modes_names_and_output_are_per_worker() -> None:
    seen: dict[int, list[object]] = {}

    def modes() -> list[object]:
        enabled = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return [*enabled, sys.argv[0], vars(sys.modules["__main__"])["mine"], type(sys.stdout).__name__]

    def live(worker: Worker, wire: SimTransport) -> None:
        vars(sys.modules["__main__"])["mine"] = worker.number
        with torch.set_grad_enabled(worker.number != 0), torch.autocast("cpu", enabled=worker.number == 1):
            wire.all_gather_bytes(b"")
            seen[worker.number] = modes()
        print(f"worker {worker.number}")
        wire.all_gather_bytes(b"")
        print("again")
        seen[worker.number].append(sys.stdout.getvalue())

    Scene(3).lived(live)
    for one in range(3):
        assert seen[one] == [one != 0, one == 1, str(one), one, "StringIO", f"worker {one}\nagain\n"]


def test_other_workers_run_while_one_waits_after_its_backward_pass() -> None:
    """Collectives submitted within a backward pass start after it, in the same order."""
    order: list[tuple[int, str]] = []

    def live(worker: Worker, wire: SimTransport) -> None:
        x = torch.ones(2, requires_grad=True)
        tickets: list[Any] = []

        def hook(grad: torch.Tensor) -> None:
            worker.after_backward(lambda: order.append((worker.number, "first")))
            tickets.append(wire.submit(AllReduceMean(torch.full((2,), 1.0 + worker.number))))
            worker.after_backward(lambda: order.append((worker.number, f"then {tickets[0].wait().tolist()}")))

        x.register_hook(hook)
        (2 * x).sum().backward()
        order.append((worker.number, "last"))
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]

    Scene(2).lived(live)
    for one in range(2):
        assert [word for worker, word in order if worker == one] == ["first", "then [3.0, 3.0]", "last"]
