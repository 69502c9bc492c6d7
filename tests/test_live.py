"""Laws that need real processes: the whole way from the command line to gloo and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.events import read_events

LIMIT_S = 120

PLAIN = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(90, 6)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
LINE
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = ((net(a) - b) ** 2).mean()
        loss.backward()
        optimizer.step()
torch.save(net.state_dict(), "net.pt")
"""
LINE = 'loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": ((net(x) - y) ** 2).mean()})'


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def call(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def stretto_run(folder: Path, path: Path, workers: int, recipe: str, out: str) -> dict[str, torch.Tensor]:
    command = ["-m", "stretto.cli", "run", str(path), "-n", str(workers), "--recipe", recipe, "--out", out]
    done = call(folder, sys.executable, *command)
    assert done.returncode == 0, done.stderr
    return load_file(folder / out / "final.safetensors")


def test_started_plainly_the_line_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for line in ("", LINE):
        done = call(tmp_path, sys.executable, str(script(tmp_path, PLAIN.replace("LINE", line))))
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / "net.pt"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    assert "stretto: epoch 2: loss" in done.stderr


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "diloco(every=4)"])
def test_the_same_run_twice_gives_the_same_bits(recipe: str, tmp_path: Path) -> None:
    path = script(tmp_path, PLAIN.replace("LINE", LINE))
    one, two = (stretto_run(tmp_path, path, 3, recipe, out) for out in ("one", "two"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_one_worker_of_stretto_run_computes_the_bits_of_the_plain_script(tmp_path: Path) -> None:
    assert call(tmp_path, sys.executable, str(script(tmp_path, PLAIN.replace("LINE", "")))).returncode == 0
    plain = torch.load(tmp_path / "net.pt")
    found = stretto_run(tmp_path, script(tmp_path, PLAIN.replace("LINE", LINE)), 1, "local_sgd(every=3)", "one")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())


AGAINST_DDP = """
import copy, os, sys, torch, torch.distributed as dist, stretto
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(200, 6, dtype=torch.float64)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
theirs = copy.deepcopy(net)
worker, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=worker, world_size=workers)


def train(net, loader):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if workers > 1 and net is not wrapped:
        loader = stretto.distribute(net, optimizer, loader, recipe="allreduce")
    steps = 0
    for epoch in range(10):
        for a, b in loader:
            optimizer.zero_grad()
            ((net(a) - b) ** 2).mean().backward()
            optimizer.step()
            steps += 1
    return steps


class Dealt(torch.utils.data.Sampler):  # the shards that stretto deals: batch b to worker b mod N
    def __iter__(self):
        return iter([list(range(b * 20, b * 20 + 20)) for b in range(worker, 10, workers)])


data = TensorDataset(x, y)
wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
assert train(wrapped, DataLoader(data, batch_sampler=Dealt())) == 50
assert train(net, DataLoader(data, batch_size=20)) == 50
apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(net.parameters(), theirs.parameters()))
dist.destroy_process_group()
print("apart", apart)
sys.exit(0 if apart < 1e-12 else 3)
"""


def test_allreduce_equals_distributed_data_parallel(tmp_path: Path) -> None:
    path = script(tmp_path, AGAINST_DDP)
    options = ["-n", "2", "--out", "run", "--", str(tmp_path / "store")]
    done = call(tmp_path, sys.executable, "-m", "stretto.cli", "run", str(path), *options)
    assert done.returncode == 0, done.stderr
    assert "apart" in done.stdout


def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    """The recipe comes from the environment; the run folder is made by worker 0."""
    path = script(tmp_path, PLAIN.replace("LINE", LINE))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = call(tmp_path, *torchrun, str(path), STRETTO_RECIPE="local_sgd(every=3)", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    events = list(read_events(run / "events.jsonl"))
    assert {one["worker"] for one in events if one["event"] == "start"} == {0, 1}
    assert {one["recipe"] for one in events if one["event"] == "start"} == {"local_sgd(every=3)"}
    assert [one["seen"]["once"] for one in events if one["event"] == "epoch"] == [90, 90]
    assert call(tmp_path, sys.executable, "-m", "stretto.cli", "report", str(run)).returncode == 0
    assert (run / "report.html").stat().st_size > 1000


def test_a_dataloader_with_processes_sees_every_sample_once_in_the_same_order(tmp_path: Path) -> None:
    """The order does not depend on the number of processes that load."""
    text = PLAIN.replace("LINE", LINE).replace("shuffle=True", "shuffle=True, num_workers=COUNT")
    text = text.replace("torch.save", "stretto.log(end=1.0); torch.save")
    states = []
    for count in ("0", "2"):
        path = script(tmp_path, text.replace("COUNT", count))
        states.append(stretto_run(tmp_path, path, 2, "allreduce", f"with{count}"))
        epochs = [one for one in read_events(tmp_path / f"with{count}" / "events.jsonl") if one["event"] == "epoch"]
        assert [one["seen"] for one in epochs] == [{"once": 90, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


SCALED = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(97, 6, dtype=torch.float64)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
loader = stretto.distribute(net, optimizer, loader, recipe="allreduce")
for epoch in range(5):
    for a, b in loader:
        optimizer.zero_grad()
        scaler.scale(((net(a) - b) ** 2).mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
assert scaler.get_scale() > 64
"""


def test_scalers_stay_in_step_on_idle_workers_too(tmp_path: Path) -> None:
    """A scale that grows at another step on one worker would make its gradient weigh another time as much."""
    path = script(tmp_path, SCALED)
    several = stretto_run(tmp_path, path, 4, "allreduce", "several")
    (tmp_path / "joined").mkdir()
    joined = {"STRETTO_RUN": "joined", "STRETTO_ALONE": "1", "STRETTO_JOIN": "4"}
    done = call(tmp_path, sys.executable, str(path), **joined)
    assert done.returncode == 0, done.stderr
    one = load_file(tmp_path / "joined" / "final.safetensors")
    assert all(torch.allclose(tensor, one[name], rtol=1e-9, atol=1e-12) for name, tensor in several.items())


FAILING = {
    "raises before": ("LINE", "if RANK == 1: raise RuntimeError('boom before')\nLINE", "RuntimeError: boom before"),
    "raises during": (
        "        optimizer.step()\n",
        "        optimizer.step()\n        if RANK == 1: 1 / 0\n",
        "ZeroDivision",
    ),
    "raises after": ("torch.save", "if RANK == 1: raise KeyError('boom after')\ntorch.save", "KeyError: 'boom after'"),
    "never calls": ("LINE", "", "without calling stretto.distribute"),
    "calls twice": ("LINE", "LINE\nLINE", "called twice"),
    "diverges": ("lr=0.01", "lr=1e30", "NaN or infinite"),
    "differs": ("Linear(6, 32)", "Linear(6, 32 + RANK)", "models differ"),
    "changes one": (
        "        optimizer.step()\n",
        "        optimizer.step()\n        if RANK == 1: net[0].bias.data += 1e-3\n",
        "0.bias of worker",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_script_that_fails_gives_one_error_with_its_worker(kind: str, tmp_path: Path) -> None:
    before, after, wanted = FAILING[kind]
    text = PLAIN.replace(before, after).replace("LINE", LINE)
    if "differs" in kind:
        text = text.replace("Linear(32, 1)", "Linear(32 + RANK, 1)")
    path = script(tmp_path, "import os\nRANK = int(os.environ['RANK'])\n" + text)
    done = call(tmp_path, sys.executable, "-m", "stretto.cli", "run", str(path), "-n", "2", "--out", "run")
    assert done.returncode == 1, done.stderr
    assert wanted in done.stderr
    assert done.stderr.count(wanted) <= 2
    assert "worker" in done.stderr
    marker = str(tmp_path)
    left = subprocess.run(["pgrep", "-f", marker], capture_output=True, text=True, check=False).stdout.split()
    assert not left


def test_a_log_that_cannot_grow_ends_the_run_and_says_so(tmp_path: Path) -> None:
    """As on a full disk: the process may write no file larger than 2 KB."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
    text = limit + PLAIN.replace("LINE", LINE).replace("range(2)", "range(50)")
    done = call(
        tmp_path, sys.executable, "-m", "stretto.cli", "run", str(script(tmp_path, text)), "-n", "2", "--out", "r"
    )
    assert done.returncode == 1
    assert "events.jsonl cannot be written" in done.stderr
