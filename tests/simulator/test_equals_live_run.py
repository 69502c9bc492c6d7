"""Simulated and live runs of the same script and seed: equal parameters and byte counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from simulator.harness import simulated

from stretto.events import Event, read_events
from stretto.parameter_server import messages as m
from stretto.report.run_record import record
from stretto.simulator.cluster import rpc_server
from stretto.simulator.compute.cost_model import CostModel

SAMPLES = 100
SCRIPT = """
import torch, stretto
x = torch.randn(100, 8)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(
    torch.nn.Linear(8, 400), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(400, 90), torch.nn.Linear(90, 1)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)
data = torch.utils.data.TensorDataset(x, y, torch.arange(100.0))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": ((net(x) - y) ** 2).mean().item()})
for epoch in range(2):
    for a, b, number in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        stretto.log(first=number[0])
"""
"""A script without a seed of its own: its random numbers and dropout depend only on the run's seed."""

WORKERS = {"local_sgd(every=4)": 3, "power_sgd(rank=2)": 2, "staleness_aware": 3}
SEEDS = {"local_sgd(every=4)": 0, "power_sgd(rank=2)": 2, "staleness_aware": 0}
"""Workers under a seed other than 0 are not forked, since Python hashes by it."""
ON_ITS_WAY = 4096
"""Bytes that a live worker may still receive after its last reading of the counters."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of concurrent live runs, one per recipe."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "train.py").write_text(SCRIPT)
    started = {recipe: _start(folder, recipe, workers) for recipe, workers in WORKERS.items()}
    for process in started.values():
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
    return {recipe: folder / _folder(recipe) for recipe in started}


def _start(folder: Path, recipe: str, workers: int) -> subprocess.Popen[bytes]:
    options = ["-n", str(workers), "--recipe", recipe, "--seed", str(SEEDS[recipe]), "--out", _folder(recipe)]
    return subprocess.Popen(
        [sys.executable, "-m", "stretto.cli", "run", *options, "--threads", "1", "--no-recovery", "train.py"],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _folder(recipe: str) -> str:
    return recipe.partition("(")[0]


def simulated_run(folder: Path, recipe: str, **more: Any) -> dict[str, torch.Tensor]:
    """Simulate the same run, and return its parameters."""
    simulated(WORKERS[recipe], SCRIPT, recipe, seed=SEEDS[recipe], folder=folder, **more)
    return load_file(folder / "run/final.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor relative to its largest element."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one)


@pytest.mark.parametrize("recipe", list(WORKERS)[:2])
def test_the_same_parameters_and_bytes_as_a_real_run(recipe: str, live: dict[str, Path], tmp_path: Path) -> None:
    """Equal up to rounding, since gloo's ring adds in another order; dropout and shuffling draw the same numbers."""
    real = load_file(live[recipe] / "final.safetensors")
    assert furthest(simulated_run(tmp_path, recipe, net="100Mbit/s 1ms"), real) < 1e-5
    here, there = record(tmp_path / "run"), record(live[recipe])
    for name in ("samples", "steps", "rounds", "sample_counts", "samples_by_worker"):
        assert here[name] == there[name], name
    assert here["bytes_received"] == pytest.approx(there["bytes_received"], rel=0.01, abs=ON_ITS_WAY)
    for one, other in zip(here["bytes_sent"], there["bytes_sent"], strict=True):
        assert 0.8 * other < one < 1.01 * other + ON_ITS_WAY, "TCP sends again what a busy machine is slow to receive"
    assert here["metrics"].keys() == there["metrics"].keys()
    said = [{one["event"] for one in read_events(run / "events.jsonl")} for run in (tmp_path / "run", live[recipe])]
    assert said[0] ^ said[1] <= {"progress"}


# --- replay of a recorded order -----------------------------------------------------------------------------------


Kind = tuple[str, int]
"""Kind of message: an update, or a lease request of one epoch."""


def turns_of(log: list[Event]) -> dict[Kind, deque[int]]:
    """Return the order of workers in the updates applied, and in the leases of each epoch."""
    updates = [
        (update[1], one["worker"]) for one in log if one["event"] == "update_applied" for update in one["updates"]
    ]
    batches = [(one["samples"], one["worker"]) for one in log if one["event"] == "log"]
    turns: dict[Kind, deque[int]] = defaultdict(deque)
    for _, worker in sorted(updates):
        turns["update", 0].append(worker)
    for handed, worker in sorted(batches):
        turns["batch", -(-handed // SAMPLES)].append(worker)
    return turns


def in_turn(turns: dict[Kind, deque[int]]) -> type[rpc_server.SimServer]:
    """Return a server class that processes messages in a recorded order, and holds back a worker's early ones."""

    class InTurn(rpc_server.SimServer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._held: dict[int, deque[Any]] = defaultdict(deque)

        def _process(self, link: rpc_server.SimChannel, head: m.Header, tensors: Any) -> None:
            self._held[link.worker.number].append((link, head, tensors))
            while found := [worker for worker, held in self._held.items() if held and self._is_due(held[0])]:
                link, head, tensors = self._held[found[0]].popleft()
                if left := turns.get(self._kind(head.body)):
                    left.popleft()
                super()._process(link, head, tensors)

        def _kind(self, body: m.Body) -> Kind:
            if isinstance(body, m.Push):
                return "update", 0
            return ("batch", body.epoch_number) if isinstance(body, m.Lease) else ("", 0)

        def _is_due(self, held: Any) -> bool:
            left = turns.get(self._kind(held[1].body))
            return not left or held[0].worker.number == left[0]

    return InTurn


@pytest.mark.parametrize("speed", ["equal", "1,5,2"])
def test_a_real_order_of_arrivals_replayed_gives_the_same_parameters(
    speed: str, live: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates are weighted by their staleness, so the result depends on their order."""
    log = list(read_events(live["staleness_aware"] / "events.jsonl"))
    real = load_file(live["staleness_aware"] / "final.safetensors")
    turns = turns_of(log)
    monkeypatch.setattr(rpc_server, "SimServer", in_turn(turns))
    found = simulated_run(tmp_path, "staleness_aware", speed=speed, cost_model=CostModel(0.01, update_s=0.001))
    assert not any(turns.values())
    assert furthest(found, real) < 1e-5
    again = [one for one in read_events(tmp_path / "run/events.jsonl") if one["event"] == "update_applied"]
    assert sorted(update for one in again for update in one["updates"]) == sorted(
        update for one in log if one["event"] == "update_applied" for update in one["updates"]
    )
