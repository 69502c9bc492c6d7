"""Several training loops of one script in real processes: a worker is killed, a run is resumed, a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file
from traitlets.config import Config

from stretto.events import read_events

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 240
FOLDS = """
import os, pathlib, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split
import stretto

torch.manual_seed(1)
x = torch.randn(60, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
from stretto.process_config import WorkerConfig, worker_config

config = worker_config() or WorkerConfig()
rank, life, fails = config.worker, config.incarnation, "fails" in sys.argv

def wait(is_there):
    limit = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < limit
        time.sleep(0.01)

def is_a_worker_to_be_let_in():
    from stretto.api import _current
    return _current.get().transport.is_to_rest()

def is_a_checkpoint_written():
    return any(pathlib.Path(config.run).glob("section-2/checkpoints/round-*"))

for fold in range(3):
    part = random_split(data, [36, 24])[0]
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = stretto.distribute(net, optimizer, DataLoader(part, batch_size=3, shuffle=True))
    for epoch in range(2):
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            if (fold, epoch, step, rank) == (1, 0, 3, 1) and "dies" in sys.argv and not life:
                os.kill(os.getpid(), 9)
            if (fold, epoch, step, rank) == (1, 1, 0, 0) and "dies" in sys.argv:
                wait(is_a_worker_to_be_let_in)
            if (fold, epoch, step) == (1, 1, 4) and fails:
                wait(is_a_checkpoint_written)
                raise RuntimeError("this fold fails")
    stretto.finish()
    torch.save(net.state_dict(), f"{rank}-{fold}.pt")
    stretto.save(net.state_dict(), f"main-{fold}.pt")
    assert all(torch.equal(net.state_dict()[name], one) for name, one in torch.load(f"main-{fold}.pt").items())
"""


def stretto_run(place: Path, *options: str, argument: str = "none", code: int = 0) -> str:
    """Run the script on two workers and return its output."""
    (place / "folds.py").write_text(FOLDS)
    launch = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--failure-timeout", "60s"]
    command = [*launch, *options, "folds.py", argument]
    done = subprocess.run(command, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def counted_once(folder: Path) -> list[int]:
    """Return the number of samples that counted once in each epoch; check that no other samples counted."""
    found = {
        one["epoch"]: one["sample_counts"] for one in read_events(folder / "events.jsonl") if one["event"] == "epoch"
    }
    assert all(one["twice"] == one["never"] == 0 for one in found.values())
    return [found[epoch]["once"] for epoch in sorted(found)]


def test_worker_killed_in_the_second_section_rejoins_it(tmp_path: Path) -> None:
    shown = stretto_run(tmp_path, "--recipe", "local_sgd(every=2)", "--out", "run", argument="dies")
    for folder in (tmp_path / "run", tmp_path / "run/section-2", tmp_path / "run/section-3"):
        assert counted_once(folder) == [36, 36]
        assert (folder / "report.html").exists()
    assert "section 2 begins" in shown
    assert "section 3\n" in shown
    gone = [one for one in read_events(tmp_path / "run/events.jsonl") if one.get("what") == "failed"]
    assert [one["worker"] for one in gone] == [1]
    for fold in range(3):
        mine, other = (torch.load(tmp_path / f"{worker}-{fold}.pt") for worker in range(2))
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_run_that_failed_in_its_second_section_is_resumed_there(tmp_path: Path) -> None:
    checkpoints = ("--recipe", "local_sgd(every=2)", "--checkpoint-every", "2r")
    stretto_run(tmp_path, *checkpoints, "--out", "whole")
    whole = torch.load(tmp_path / "0-2.pt")
    shown = stretto_run(tmp_path, *checkpoints, "--out", "one", argument="fails", code=1)
    assert "this fold fails" in shown
    for name in ("0-0.pt", "1-0.pt", "0-2.pt", "1-2.pt"):
        (tmp_path / name).unlink(missing_ok=True)
    shown = stretto_run(tmp_path, *checkpoints, "--resume", "one", "--out", "two")
    assert "section-2/checkpoints" in shown
    assert counted_once(tmp_path / "two/section-2")[-1:] == [36]
    assert counted_once(tmp_path / "two/section-3") == [36, 36]
    first = load_file(tmp_path / "one/final.safetensors")
    assert all(torch.equal(first[name], one) for name, one in torch.load(tmp_path / "1-0.pt").items())
    assert all(torch.equal(whole[name], one) for name, one in torch.load(tmp_path / "0-2.pt").items())


def test_notebook_with_a_repeated_training_cell_computes_the_same_as_a_plain_one(tmp_path: Path) -> None:
    head = "import torch, stretto\nfrom torch.utils.data import DataLoader, TensorDataset\ntorch.manual_seed(0)\n"
    data = "data = TensorDataset(torch.randn(24, 2), torch.randn(24, 1))\nsums = []"
    cell = """
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
{line}
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
sums.append(net.weight.sum().item())
"""
    interrupted = "try:\n    for x, y in loader:\n        raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    pass"
    line = "loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {'one': 1.0})"
    training, plain = cell.format(line=line), cell.format(line="")
    sources = [head + data, training, training, interrupted, training, "stretto.finish()\nsums"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in sources])
    first = 20_000 + 5 * (os.getpid() % 2_000)  # below the ports that the system gives to others in between
    kinds = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")
    ports = Config(KernelManager={"cache_ports": False} | {kind: first + at for at, kind in enumerate(kinds)})
    NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": tmp_path}}, config=ports).execute()
    script = "\n".join([head + data, plain, plain, interrupted, plain, "print(sums)"])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert len(set(json.loads(done.stdout))) == 3
    assert book.cells[-1].outputs[0]["data"]["text/plain"] == done.stdout.strip()
