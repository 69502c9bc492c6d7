"""A run whose event log cannot be written behaves like any other: nothing reads the log to decide what happens next."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from run_place import Place, until

from stretto.checkpoint.final_model import NAME

BEFORE = """
import stretto.launcher.local as local
make = local.make_folder
def make_without_log(*given):
    folder = make(*given)
    (folder / "events.jsonl").symlink_to(folder / "missing" / "events.jsonl")
    return folder
local.make_folder = make_without_log
"""
"""Lets every process fail to open the event log."""
SCRIPT = """
import os, pathlib, time, torch, stretto
torch.manual_seed(0)
x = torch.randn(64, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
loader = stretto.distribute(net, optimizer, loader)
for epoch in range(60):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        pathlib.Path(f"training-{stretto.rank()}").write_text(str(os.getpid()))
        if pathlib.Path("fail").exists() and stretto.rank() == 1:
            raise ValueError("boom")
        for _ in range(1 if epoch < 59 else 100):  # a busy machine needs longer than all epochs take
            if not pathlib.Path("enough").exists():
                time.sleep(0.075)
"""


@pytest.fixture
def place_without_log(place: Place) -> Place:
    """Return a place with a script, whose runs have a coordinator."""
    place.recovers = True
    (place.folder / "train.py").write_text(SCRIPT)
    return place


def pid_in_training(rank: int, other_than: int = 0) -> int:
    """Return the pid of a worker once it trains."""
    path = Path(f"training-{rank}")
    until(lambda: path.exists() and path.read_text() not in ("", str(other_than)), limit_s=60)
    return int(path.read_text())


def kill_and_await_return(worker: int) -> None:
    """Kill a worker that trains, and wait until it trains again."""
    killed = pid_in_training(worker)
    os.kill(killed, signal.SIGKILL)
    pid_in_training(worker, other_than=killed)


def check_ends_well(*processes: subprocess.Popen[bytes]) -> None:
    """Let the run end, and check that it has a model and no log."""
    Path("enough").touch()
    for process in processes:
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err.decode()
    assert Path(f"here/{NAME}.safetensors").exists()
    assert not Path("here/events.jsonl").exists()


def test_worker_is_replaced_and_another_joins(place_without_log: Place) -> None:
    options = ("-n", "2", "--listen", "127.0.0.1", "--out", "here")
    run = place_without_log.stretto("run", *options, "train.py", before=BEFORE)
    kill_and_await_return(1)
    join = place_without_log.stretto("join", "here", "-n", "1")
    pid_in_training(2)
    check_ends_well(run, join)


def test_asynchronous_worker_is_replaced(place_without_log: Place) -> None:
    options = ("-n", "2", "--recipe", "async_sgd", "--out", "here")
    run = place_without_log.stretto("run", *options, "train.py", before=BEFORE)
    kill_and_await_return(1)
    check_ends_well(run)


def test_error_of_the_script_ends_the_run_with_its_cause(place_without_log: Place) -> None:
    run = place_without_log.stretto("run", "-n", "2", "--out", "here", "train.py", before=BEFORE)
    pid_in_training(1)
    Path("fail").touch()
    _, err = run.communicate(timeout=90)
    assert run.returncode == 1
    assert b"worker 1 failed: ValueError: boom" in err, err.decode()
