"""Runs of real processes that exchange rows of tables alone: failures, and tables larger than memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from stretto.events import read_events

EPOCHS = 3
SCRIPT = """
import os, pathlib, signal, time
import torch, stretto
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def wait_for_the_failure_of_a_shard():
    limit = time.monotonic() + 60
    while "fault_injected" not in pathlib.Path("run/events.jsonl").read_text():
        assert time.monotonic() < limit
        time.sleep(0.01)

numbers = torch.arange(600) ** 2 % 97
model = nn.ModuleDict({"rows": nn.Embedding(97, 5, sparse=True), "dense": nn.Linear(1, 1)}).double()
with torch.no_grad():
    for one in model.parameters():
        one.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(numbers), batch_size=5, shuffle=True)
loader = stretto.distribute(model, optimizer, loader)
steps = 0
for epoch in range(3):
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = -model["rows"](batch).sum() - model["dense"](torch.ones(len(batch), 1).double()).sum()
        loss.backward()
        steps += 1
        if epoch == 1 and steps > 10 and stretto.rank() == 1 and once("worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 2 and stretto.rank() == 0 and once("shard"):
            wait_for_the_failure_of_a_shard()
        optimizer.step()
        time.sleep(0.005)
"""


def test_a_killed_worker_and_a_killed_shard_cost_no_row_and_repeat_none(tmp_path: Path) -> None:
    """The loss is a sum, and each number adds 1 to its row: the order and the staleness of updates do not matter."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["-n", "3", "--recipe", "async_sgd(shards=2)", "--checkpoint-every", "300ms", "--restarts", "3"]
    options += ["--faults", "kill server at 4s"]
    command = [sys.executable, "-m", "stretto.cli", "run", *options, "--out", "run", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "worker").exists()
    assert (tmp_path / "shard").exists()
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    counts = [event["sample_counts"] for event in events if event["event"] == "epoch"]
    assert counts == [{"once": 600, "twice": 0, "never": 0, "dropped": 0}] * EPOCHS
    final = load_file(tmp_path / "run" / "final.safetensors")
    expected = EPOCHS * torch.bincount(torch.arange(600) ** 2 % 97, minlength=97).double()
    torch.testing.assert_close(final["rows.weight"], expected[:, None].expand(-1, 5), rtol=0, atol=0)
    assert float(final["dense.bias"]) == EPOCHS * 600
    assert any("only the rows of a batch" in event["text"] for event in events if event["event"] == "warning")


LARGE = """
import torch, stretto
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def own_memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(ROWS, 64, sparse=True), nn.Linear(64, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
before = own_memory()
loader = DataLoader(TensorDataset(torch.arange(640) * 7919 % ROWS), batch_size=16)
loader = stretto.distribute(model, optimizer, loader, evaluate=lambda model: {"weight": model[0].weight[0, 0].item()})
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
stretto.finish()
print("memory", own_memory() - before)
"""


def test_a_worker_has_memory_for_neither_a_table_nor_its_state(tmp_path: Path) -> None:
    """A table of 102 MB, and sums of Adagrad of the same size, are in memory-mapped files without a name."""
    rows = 400_000
    script = tmp_path / "train.py"
    script.write_text(f"ROWS = {rows}\n{LARGE}")
    options = ["-n", "2", "--recipe", "async_sgd(shards=2)", "--output", "all", "--out", "run"]
    command = [sys.executable, "-m", "stretto.cli", "run", *options, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [int(number) for number in re.findall(r"memory (\d+)", done.stdout)]
    assert len(found) == 2
    assert max(found) < rows * 64 * 4 / 2
    weight = load_file(tmp_path / "run" / "final.safetensors")["0.weight"]
    assert weight.shape == (rows, 64)
    assert abs(float(weight.std()) - 1) < 0.01, "torch's first values, of a few of whose rows steps have changed"
