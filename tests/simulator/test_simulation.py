"""Simulated training: repeatable, equal to live results, with the modelled time and bytes."""

from __future__ import annotations

import ast
import heapq
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from itertools import accumulate, chain, pairwise
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from combinations import mostly_long
from safetensors.torch import load_file
from simulator import harness as ground
from simulator.harness import STEP_S, Ended, now, simulated
from thread_workers import flat, regression, run_workers, training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training.test_recipes import RECIPES, SYNCHRONOUS, TIMED, train

import stretto
from stretto.errors import LaunchError
from stretto.events import PHASES
from stretto.launcher.reexec import FIXED
from stretto.recipe.parser import parse
from stretto.report.run_record import record
from stretto.simulator.compute import speed as speeds
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.network import flows, topology
from stretto.simulator.network.links import Links
from stretto.simulator.network.wire_bytes import connect_bytes, handshake_bytes
from stretto.simulator.runner import simulate

FAMILIES = [
    "allreduce",
    "local_sgd(every=3)",
    "power_sgd(rank=1)",
    "allreduce(how=error_feedback(random_k(0.5)))",
    "Recipe(how=error_feedback(top_k(0.2)), whom=server(shards=2))",
    "async_sgd(shards=2, overlap=True)",
    "soft_sync(collect=3)",
    "stale_synchronous(bound=1)",
]
NET = "50Mbit/s 1ms, server 20Mbit/s 2ms"
SPEED = "lognormal(0.5, each=step)"
ALL_FIFTY = {"once": 50, "twice": 0, "never": 0, "dropped": 0}


# --- repeatability -----------------------------------------------------------------------------------------------


def shuffled(worker: int) -> torch.Tensor:
    """Train with random parameters, sample order, dropout and more."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    loader = stretto.distribute(net, optimizer, DataLoader(regression(50), batch_size=8, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            noise = random.random() + float(np.random.rand())
            nn.functional.mse_loss(net(x), y + 0.01 * noise).backward()
            optimizer.step()
    return flat(net)


def run(recipe: str, **more: Any) -> Ended:
    return simulated(3, shuffled, recipe, **{"net": NET, "speed": SPEED, "seed": 3} | more)


@pytest.mark.parametrize("recipe", FAMILIES)
def test_seed_determines_the_run_to_the_bit_for_any_order_of_creation(recipe: str) -> None:
    one, again, turned = run(recipe), run(recipe), run(recipe, order=[2, 0, 1])
    assert one.log == again.log
    assert one.final == again.final == turned.final
    assert sorted(one.log.splitlines()) == sorted(turned.log.splitlines())
    assert one.seconds == turned.seconds
    assert all(torch.equal(here, there) for here, there in zip(one.found, turned.found, strict=True))


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_another_seed_gives_another_run(recipe: str) -> None:
    one, other = run(recipe), run(recipe, seed=4)
    assert one.seconds != other.seconds, "the speeds are others"
    assert not torch.equal(one.found[0], other.found[0])
    assert one.final != other.final


SCRIPT = """
import random, sys
import numpy as np
import torch, stretto
x = torch.randn(60, 6)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": float((net(x) ** 2).mean())})
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        (((net(a) - b) ** 2).mean() + 0.1 * hash("a word") % 7 + random.random() * np.random.rand()).backward()
        optimizer.step()
        print(sys.argv[1:], __name__)
"""


def test_two_processes_give_the_same_run_to_the_bit(tmp_path: Path) -> None:
    """Independent of the environment: the command sets what must be set before Python starts."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", "4", "--recipe", "async_sgd(overlap=True)", "--seed", "5", "--speeds", SPEED, "--network", NET]
    outs = [tmp_path / name for name in ("one", "two")]
    started = [
        subprocess.Popen(
            [*COMMAND, *options, "--step-time", "5ms", "--out", out, "--quiet", "train.py", "an", "argument"],
            cwd=tmp_path,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for out, settings in zip(outs, ({"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}, FIXED), strict=True)
    ]
    said = [one.communicate(timeout=240)[0].decode() for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    for name in ("events.jsonl", "final.safetensors"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


COMMAND = (sys.executable, "-m", "stretto.cli", "simulate")


def test_record_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    records = []
    for name, order in (("one", [0, 1, 2]), ("two", [1, 2, 0])):
        (tmp_path / name).mkdir()
        simulated(3, shuffled, "soft_sync(collect=2)", net=NET, speed=SPEED, folder=tmp_path / name, order=order)
        found = record(tmp_path / name / "run")
        records.append({key: value for key, value in found.items() if key not in ("folder", "script", "wall_seconds")})
    assert records[0] == records[1]


# --- equality with live runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", mostly_long(sorted(set(SYNCHRONOUS) - set(TIMED)), short=range(0, 99, 3)))
def test_synchronous_workers_equal_threads_to_the_bit(recipe: str) -> None:
    """The in-memory transport adds in the same order; the last global step has a batch for one of three workers."""
    ended = simulated(3, train(recipe, 50, epochs=2), recipe, net=NET, speed=SPEED)
    lived = run_workers(3, train(recipe, 50, epochs=2), recipe)
    assert all(torch.equal(here, there) for here, there in zip(ended.found, lived, strict=True))
    assert [one["sample_counts"] for one in ended.of("epoch")] == [ALL_FIFTY] * 2


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - set(SYNCHRONOUS)))
def test_asynchronous_workers_count_each_sample_once_and_none_starves(recipe: str) -> None:
    ended = simulated(3, train(recipe, 50, epochs=2), recipe, net=NET, speed="1,1,100")
    assert [one["sample_counts"] for one in ended.of("epoch")] == [ALL_FIFTY] * 2
    assert all(one["samples"] >= 8 for one in ended.of("end"))
    assert all(torch.equal(one, ended.found[0]) for one in ended.found)
    for one in ended.of("end"):
        assert sum(one["time_breakdown"].values()) == pytest.approx(one["t"], abs=1e-5)
        assert one["time_breakdown"].keys() == set(PHASES)


def test_a_choice_that_depends_on_measured_times_depends_on_virtual_ones() -> None:
    recipe = TIMED[0]
    one, again = (simulated(3, train(recipe, 100), recipe, net=NET) for _ in range(2))
    assert one.log == again.log
    assert torch.equal(one.found[0], again.found[0])


def test_equally_fast_workers_get_equal_shares() -> None:
    ended = simulated(4, training(regression(160), 4), "async_sgd", net=NET)
    assert {one["samples"] for one in ended.of("end")} == {80}


def test_single_worker_equals_the_plain_loop_to_the_bit() -> None:
    """Also in a process that ran the plain loop before."""
    work = training(regression(50), 8, shuffle=True)

    def both(recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return work(0), simulated(1, work, recipe).found[0]

    for recipe in ("allreduce", "local_sgd(every=3)", "power_sgd"):
        assert torch.equal(*Context().run(both, recipe))


def test_gradients_submitted_within_the_backward_pass_are_reduced_in_order() -> None:
    """More than one bucket, and a worker without a batch, which learns of the collective within its pass."""

    def work(worker: int) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 1))
        for one in net.parameters():
            nn.init.constant_(one, 0.01)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(20), batch_size=8)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return flat(net)

    for recipe in ("allreduce", "Recipe(whom=server(shards=2))"):
        assert torch.equal(simulated(2, work, recipe, net=NET).found[1], run_workers(2, work, "allreduce")[1])


# --- time ---------------------------------------------------------------------------------------------------------


def stepping(samples: int, width: int = 1, outputs: int = 1, passes: int = 1) -> Callable[[int], list[float]]:
    """Train with batches of one sample, and return this worker's time after each step."""

    def work(worker: int) -> list[float]:
        net = nn.Linear(width, outputs, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
        data = TensorDataset(torch.ones(samples, width), torch.ones(samples, outputs))
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=1))
        times = []
        for _ in range(passes):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                times.append(now())
        return times

    return work


def drawn(speed: str, workers: int, steps: int, seed: int = 0) -> list[list[float]]:
    """Return the step times of each worker."""
    pace = speeds.Pace(speeds.parse(speed), workers, seed)
    return [[pace.step_s(worker, step, 0.0, STEP_S) for step in range(steps)] for worker in range(workers)]


@pytest.mark.parametrize("speed", ["equal", "1,2,5,1.5", "exponential", "lognormal(0.7)", "slow(0.25, 10)"])
@pytest.mark.parametrize("every", [1, 4])
def test_time_on_an_instant_network_is_that_of_the_slowest_worker(speed: str, every: int) -> None:
    """The time between two rounds is the largest sum of step times."""
    ended = simulated(4, stepping(48), f"local_sgd(every={every})", speed=speed)
    took = drawn(speed, 4, 12)
    rounds = [max(sum(each[at : at + every]) for each in took) for at in range(0, 12, every)]
    assert ended.found[0][every - 1 :: every] == pytest.approx(list(accumulate(rounds)))
    assert ended.seconds == pytest.approx(sum(rounds))
    shares = Counter({"computing": 0.0})
    for one in ended.of("end"):
        shares.update(one["time_breakdown"])
    assert shares["computing"] == pytest.approx(sum(map(sum, took)), abs=1e-4)
    assert shares["computing"] + shares["waiting"] == pytest.approx(4 * sum(rounds), abs=1e-4)


@pytest.mark.parametrize("recipe", ["async_sgd", "soft_sync(collect=4)", "stale_synchronous(bound=100)"])
def test_asynchronous_time_is_each_workers_own_computing(recipe: str) -> None:
    """The j-th update arrives when the j-th step of all ends; remaining batches go to the first free worker."""
    ended = simulated(8, stepping(400), recipe, speed="exponential")
    took = [iter(one) for one in drawn("exponential", 8, 200)]
    free = [(next(took[worker]), worker) for worker in range(8)]
    expected: list[list[float]] = [[] for _ in range(8)]
    heapq.heapify(free)
    for begun in range(8, 408):
        at, worker = heapq.heappop(free)
        expected[worker].append(at)
        if begun < 400:
            heapq.heappush(free, (at + next(took[worker]), worker))
    for times, wanted in zip(ended.found, expected, strict=True):
        assert times == pytest.approx(wanted)


def test_the_formulas_for_exponential_steps() -> None:
    """K-sync: (H_N - H_{N-K}) / mu, of which `together` waits for K = N. K-batch-async: K / (N mu).

    The two tests above show that simulated times are these draws' times. Source: Dutta et al. 2018.
    """
    workers, rounds = 8, 4000
    took = np.array(drawn("exponential", workers, rounds)) / STEP_S
    for collect in (1, 4, 8):
        expected = sum(1 / left for left in range(workers - collect + 1, workers + 1))
        assert np.sort(took, axis=0)[collect - 1].mean() == pytest.approx(expected, rel=0.03)
    arrivals = np.sort(np.cumsum(took, axis=1).ravel())[: workers * rounds // 2]
    for collect in (1, 4, 8):
        between = np.diff(arrivals[collect - 1 :: collect]).mean()
        assert between == pytest.approx(collect / workers, rel=0.03)


@pytest.mark.parametrize(("collect", "workers"), [(4, 8), (2, 5)])
def test_simulated_exponential_steps_match_the_formulas(collect: int, workers: int) -> None:
    """Both agree within 3%: the barrier per round, and K updates of asynchronous workers.

    Draws count by their own means, so the comparison is of the simulator, not of the sampling error.
    """
    steps = 100 * workers
    waiting = simulated(workers, stepping(steps), "local_sgd(every=1)", speed="exponential", seed=1)
    took = np.array(drawn("exponential", workers, 100, seed=1))
    harmonic = sum(1 / left for left in range(1, workers + 1)) * STEP_S
    luck = took.max(axis=0).mean() / harmonic
    assert waiting.seconds / 100 / luck == pytest.approx(harmonic, rel=0.03)
    free = simulated(workers, stepping(steps), f"soft_sync(collect={collect})", speed="exponential", seed=1)
    ends = sorted(chain.from_iterable(free.found))[: steps // 2]
    luck = np.sort(np.cumsum(took, axis=1).ravel())[steps // 2 - 1] / (steps // 2 * STEP_S / workers)
    versions = ends[collect - 1 :: collect]
    assert versions[-1] / len(versions) / luck == pytest.approx(collect / workers * STEP_S, rel=0.03)


WIDTH, OUTPUTS = 500, 100
NBYTES, RATE, LATENCY = 4 * WIDTH * OUTPUTS, 1e6, 0.01
"""Parameters of 200 kB, on links of 1 MB/s and 10 ms."""


def per_step(recipe: str, workers: int, net: str = "8Mbit/s 10ms", **more: Any) -> float:
    """Return the virtual seconds between the last two steps of worker 0."""
    times = simulated(workers, stepping(3 * workers, WIDTH, OUTPUTS), recipe, net=net, **more).found[0]
    return times[-1] - times[-2]


RING = "8Mbit/s 10ms"


@pytest.mark.parametrize(
    ("net", "seconds"),
    [
        (RING, lambda n: 2 * (n - 1) / n * NBYTES / RATE + 2 * (n - 1) * LATENCY),
        (f"{RING}, tree", lambda n: 2 * -(-log2(n) // 1) * (NBYTES / RATE + LATENCY)),
        ("8Mbit/s up 4Mbit/s down 10ms", lambda n: 2 * (n - 1) / n * NBYTES / RATE * 2 + 2 * (n - 1) * LATENCY),
        (f"{RING}, loss 20%", lambda n: 2 * (n - 1) / n * NBYTES / RATE / 0.8 + 2 * (n - 1) * LATENCY),
        (
            "hosts of 2 on 80Mbit/s 1ms, 8Mbit/s 10ms between",
            lambda n: 0.1 * NBYTES / RATE + 0.002 if n == 2 else 2 * (1 - 1 / -(-n // 2)) * NBYTES / RATE + 0.04,
        ),
    ],
)
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_an_all_reduce_takes_its_closed_form(net: str, seconds: Callable[[int], float], workers: int) -> None:
    assert per_step("local_sgd(every=1)", workers, net) - STEP_S == pytest.approx(seconds(workers), rel=1e-3)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", ["Recipe(whom=server({}))", "stale_synchronous(bound=0, {})", "async_sgd({})"])
def test_a_server_of_n_shards_takes_its_closed_form(recipe: str, shards: int) -> None:
    """N workers share each shard's link concurrently, which carries 1/n of the bytes in, and then out."""
    took = per_step(recipe.format(f"shards={shards}"), 4) - STEP_S
    assert took == pytest.approx(2 * max(1, 4 / shards) * NBYTES / RATE + 2 * LATENCY, rel=0.01)


@pytest.mark.parametrize("recipe", ["async_sgd", "local_sgd(every=1)"])
def test_encoding_applying_and_processors_cost_time(recipe: str) -> None:
    """Encoding and decoding; a server applies updates one after another; two workers share one processor."""
    plain = per_step(recipe, 1)
    assert plain == pytest.approx(STEP_S if "local" in recipe else plain)
    coded = per_step(recipe, 2, "instant", cost_model=CostModel(STEP_S, codec_s=0.002))
    assert coded - per_step(recipe, 2, "instant") == pytest.approx(0.004)
    applied = per_step(recipe, 2, "instant", cost_model=CostModel(STEP_S, update_s=0.004))
    server = recipe == "async_sgd"
    assert applied == pytest.approx(STEP_S + 2 * 0.004 if server else STEP_S, abs=0.0041 if server else 1e-9)
    assert per_step(recipe, 2, "instant", processors=1.0) == pytest.approx(2 * STEP_S)


def test_until_ends_a_run_after_samples_or_time() -> None:
    for recipe in ("allreduce", "async_sgd"):
        ended = simulated(2, stepping(80, passes=2), recipe, samples=60)
        assert 58 <= sum(one["samples"] for one in ended.of("end")) <= 62
        ended = simulated(2, stepping(80, passes=2), recipe, time_s=0.105)
        assert 0.105 <= ended.seconds <= 0.105 + 2 * STEP_S
    apart = simulated(3, stepping(90), "local_sgd(every=4)", speed="1,3,2", time_s=0.17)
    assert len({one["step"] for one in apart.of("end")}) == 1, "those that exchange together end after the same step"


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [one for one in FAMILIES if parse(one).shards])
def test_counted_bytes_equal_those_on_the_network(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals sent and received are equal, except for messages after the last reading."""
    left, came = Counter[int](), Counter[int]()
    send = flows.SimNetwork.send

    def counted(net: flows.SimNetwork, source: int, target: int, nbytes: float, then: Callable[[], None]) -> None:
        def arrive() -> None:
            came[source] += int(nbytes)
            came[target] -= int(nbytes)
            then()

        left[source] += int(nbytes)
        left[target] -= int(nbytes)
        send(net, source, target, nbytes, arrive)

    monkeypatch.setattr(flows.SimNetwork, "send", counted)
    ended = simulated(3, training(regression(50), 8), recipe, net=NET, speed=SPEED)
    assert sum(left.values()) == sum(came.values()) == 0
    links = parse(recipe).shards + 1
    for one in ended.of("end"):
        sent, received = handshake_bytes(one["worker"], True)
        net = one["bytes_sent"] - links * sent - (one["bytes_received"] - links * received)
        assert 0 <= left[one["worker"]] - net < 100 * links, "all but the good-bye"
    assert {worker: came[worker] for worker in range(3)} == {worker: left[worker] for worker in range(3)} or all(
        left[worker] - came[worker] < 100 * links for worker in range(3)
    )


@pytest.mark.parametrize("recipe", [one for one in FAMILIES if not parse(one).shards])
@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_received_equal_bytes_sent_without_a_server(recipe: str, workers: int) -> None:
    ends = simulated(workers, training(regression(50), 8), recipe, net=NET).of("end")
    assert sum(one["bytes_sent"] for one in ends) == sum(one["bytes_received"] for one in ends)
    assert min(one["bytes_sent"] for one in ends) > connect_bytes(workers)[0]


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "stale_synchronous(bound=0)"])
def test_pause_of_a_synchronous_worker_costs_exactly_the_pause(recipe: str) -> None:
    plain = simulated(3, train(recipe, 50), recipe, net=NET)
    paused = simulated(3, train(recipe, 50), recipe, net=NET, fault="pause worker 1 for 7s at 12ms")
    assert paused.seconds == pytest.approx(plain.seconds + 7, abs=0.02)
    assert all(torch.equal(here, there) for here, there in zip(plain.found, paused.found, strict=True))


def test_pause_does_not_delay_asynchronous_workers() -> None:
    ended = simulated(3, stepping(90), "async_sgd", fault="pause worker 1 for 7s at 15ms")
    assert len(ended.found[1]) == 2, "it comes back to what it had leased before"
    assert len(ended.found[0]) == len(ended.found[2]) == 44
    assert ended.found[1][0] == pytest.approx(STEP_S)
    assert ended.found[1][1] == pytest.approx(7 + 2 * STEP_S)


def test_collective_of_a_partitioned_worker_waits_until_it_heals() -> None:
    recipe = "local_sgd(every=1)"
    whole = simulated(2, stepping(6, WIDTH, OUTPUTS), recipe, net=RING)
    begun = whole.found[0][0] + STEP_S
    fault = f"cut workers 1 for 3s at {begun + 0.05:.6f}s"
    cut = simulated(2, stepping(6, WIDTH, OUTPUTS), recipe, net=RING, fault=fault)
    late = [here - there for here, there in zip(cut.found[0], whole.found[0], strict=True)]
    assert late == pytest.approx([0.0, 3.0, 3.0], abs=1e-5)


def test_slow_link_slows_the_collective() -> None:
    plain = per_step("local_sgd(every=1)", 2) - STEP_S - 2 * LATENCY
    slow = per_step("local_sgd(every=1)", 2, fault="slow link of worker 1 by 3 for 1h at 0s") - STEP_S - 2 * LATENCY
    assert slow == pytest.approx(3 * plain)


# --- absent resources -----------------------------------------------------------------------------------------------

SIMULATOR = Path(stretto.__file__).parent / "simulator"
MEASURING = {"contention", "transport_costs", "wall_clock", "virtual_time"}
CORE = [one for one in sorted(SIMULATOR.rglob("*.py")) if one.parent.name != "sweep" and one.stem not in MEASURING]
FORBIDDEN = ("socket", "zmq", "threading", "time", "multiprocessing", "asyncio", "select", "ssl")
LIVE = (
    "stretto.parameter_server.rpc_channel",
    "stretto.parameter_server.embedded",
    "stretto.transport.process_group",
    "stretto.transport.env_rendezvous",
    "stretto.transport.tcp_info",
)


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.stem)
def test_simulator_imports_no_sockets_threads_or_clocks(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            assert name.split(".")[0] not in FORBIDDEN
            assert not name.startswith((*LIVE, "torch.distributed", "stretto.parameter_server.rpc_server"))


CLOCKS = ("time", "perf_counter", "monotonic", "sleep", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


def test_simulation_reads_no_clock_and_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code that runs while workers run reads a clock: the script, torch, or this program."""

    here = threading.get_ident()
    real = {"socket": socket.socket, **{name: getattr(time, name) for name in CLOCKS}}

    def refuse(name: str) -> Callable[..., Any]:
        def ask(*given: Any, **named: Any) -> Any:
            assert threading.get_ident() != here, f"the world outside was looked at: {name}"
            return real[name](*given, **named)

        return ask

    def apart_from_it(*given: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "socket", refuse("socket"))
            for name in CLOCKS:
                patch.setattr(time, name, refuse(name))
            return simulate(*given, **named)

    monkeypatch.setattr(ground, "simulate", apart_from_it)
    for recipe in ("allreduce", "async_sgd(shards=2)"):
        simulated(2, train(recipe, 50, epochs=1), recipe, net=NET)
    with pytest.raises(LaunchError, match="the world outside was looked at: perf_counter"):
        simulated(2, lambda worker: time.perf_counter())


def test_times_in_the_log_never_decrease() -> None:
    ended = simulated(3, shuffled, "soft_sync(collect=2)", net=NET, speed=SPEED, fault="pause worker 2 for 1s at 20ms")
    for worker in range(3):
        mine = [
            one for one in ended.events if one["worker"] == worker and one["event"] not in ("warning", "fault_injected")
        ]
        times = [one["t"] for one in mine]
        assert all(one <= other for one, other in pairwise(times))
        assert times[0] >= 0


def test_absent_links_delay_no_worker() -> None:
    """An instant network has no resources, so it takes no time."""
    assert not any(Links(topology.parse("instant"), 3, 2).path(here, there)[0] for here in (0, 1) for there in (2, -1))


@pytest.mark.parametrize("recipe", ["allreduce", "allreduce(how=cast('fp16'))", "async_sgd"])
def test_timeout_counts_only_time_without_traffic(recipe: str) -> None:
    script = """
        import torch, stretto
        from torch.utils.data import DataLoader, TensorDataset
        net = torch.nn.Linear(300, 100)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.ones(24, 300)), batch_size=4)
        for (x,) in stretto.distribute(net, optimizer, data):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    """
    slow = simulated(2, script, recipe, net="1Mbit/s 1ms", asks={"timeout_s": 0.2})
    assert slow.seconds > 1.0
    with pytest.raises(LaunchError, match=r"longer than 0.2 s"):
        simulated(2, script, recipe, net="1Mbit/s 1ms", asks={"timeout_s": 0.2}, fault="pause worker 1 for 3s at 0.5s")


WEIGHED = """
import torch, stretto
torch.manual_seed(0)
x, tokens = torch.randn(48, 3), torch.randint(1, 9, (48, 1))
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, tokens), batch_size=8)
for rows, counts in stretto.distribute(net, optimizer, loader):
    stretto.weight(counts.sum())
    optimizer.zero_grad()
    ((net(rows) - rows.sum(1, keepdim=True)).square() * counts).sum().div(counts.sum()).backward()
    optimizer.step()
"""


def test_weights_of_a_script_give_the_gradient_of_one_process(tmp_path: Path) -> None:
    """The workers agree on their weights after a backward pass, in which a simulated worker cannot wait."""
    found = []
    for workers in (1, 3):
        simulated(workers, WEIGHED, "allreduce", folder=tmp_path, net="10Mbit/s", asks={"global_batch": "split"})
        found.append(load_file(tmp_path / "run/final.safetensors"))
        shutil.rmtree(tmp_path / "run")
    for name, one in found[0].items():
        assert torch.allclose(one, found[1][name], rtol=0, atol=1e-6), name
