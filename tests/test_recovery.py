"""Real processes get signals, and the run survives: some of the cases of `python -m benchmarks survival`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from combinations import mostly_long
from safetensors.torch import load_file

from benchmarks.survival import SCRIPT, Case, run_case
from stretto.checkpoint.storage import Checkpoints
from stretto.events import read_events

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CASES = [
    Case("allreduce", "worker 0", "exchanging", "STOP"),
    Case("local_sgd(every=4)", "another worker", "epoch end", "TERM"),
    Case("async_sgd(shards=2)", "server", "computing", "KILL"),
]


@pytest.mark.parametrize("case", mostly_long(CASES, short=(0, 2)), ids=str)
def test_run_survives(case: Case, tmp_path: Path) -> None:
    outcome = run_case(case, case.recipe, tmp_path / "run", ENVIRONMENT)
    assert outcome.code == 0, outcome.log_end
    assert outcome.once
    assert outcome.equal
    assert outcome.accuracy > 0.6
    assert outcome.deaths or case.signal == "TERM" or case.who in ("server", "coordinator")


def test_run_killed_in_the_middle_of_an_epoch_is_resumed(tmp_path: Path) -> None:
    """Over a server: all processes are killed at the same time, and fewer workers finish the epoch."""
    command = [sys.executable, "-m", "stretto.cli", "run", "--recipe", "async_sgd(shards=2)"]
    slow = [str(SCRIPT), "--epochs", "3", "--pause", "0.06"]
    saves = ["-n", "3", "--checkpoint-every", "500ms", "--out", str(tmp_path / "one")]
    found = killed_within_an_epoch([*command, *saves, *slow], tmp_path / "one")
    again = [*command, "-n", "2", "--resume", str(tmp_path / "one"), "--out", str(tmp_path / "two"), *slow]
    subprocess.run(again, env=ENVIRONMENT, stdout=subprocess.DEVNULL, timeout=120, check=True)
    epochs = [event for event in read_events(tmp_path / "two" / "events.jsonl") if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == list(range(found, 4))
    for event in epochs:
        assert event["sample_counts"] == {"once": 1200, "twice": 0, "never": 0, "dropped": 0}


STREAM = """
import pathlib, sys, time, torch, stretto
from torch import nn
torch.manual_seed(1)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(60):
            while number == 40 and not pathlib.Path(sys.argv[1]).exists():
                time.sleep(0.02)
            yield torch.randn(8, 4)

net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
optimizer = torch.optim.Adam(net.parameters())
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(Stream(), batch_size=None))
for epoch in range(2):
    for x in loader:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
"""


def test_run_killed_within_an_epoch_over_a_stream_is_resumed_to_the_bits_of_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """The stream ends once there is a file."""
    (script := tmp_path / "stream.py").write_text(STREAM)
    training = [str(script), str(tmp_path / "goes")]
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--recipe", "local_sgd(every=4)"]
    saves = ["--checkpoint-every", "2 rounds", "--out", str(tmp_path / "one")]
    killed_within_an_epoch([*command, *saves, *training], tmp_path / "one")
    (tmp_path / "goes").touch()
    for more in (["--resume", str(tmp_path / "one"), "--out", str(tmp_path / "two")], ["--out", str(tmp_path / "all")]):
        subprocess.run(
            [*command, *more, *training], env=ENVIRONMENT, stdout=subprocess.DEVNULL, timeout=120, check=True
        )
    resumed, whole = (load_file(tmp_path / name / "final.safetensors") for name in ("two", "all"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    samples = [
        event["samples"] for event in read_events(tmp_path / "two" / "events.jsonl") if event["event"] == "epoch"
    ]
    assert samples[-1] == 2 * 60 * 8


def killed_within_an_epoch(command: list[str], folder: Path) -> int:
    """Run a command, kill all its processes when the newest checkpoint is in the middle of an epoch, and return that
    epoch.
    """
    run = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 120
        while not (found := stopped_within_an_epoch(folder / "checkpoints", psutil.Process(run.pid))):
            assert run.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        run.wait()
        psutil.wait_procs(processes, 60)
    return found


def stopped_within_an_epoch(folder: Path, launcher: psutil.Process) -> int:
    """Stop all processes of a run, and return the epoch in whose middle its newest checkpoint is; if it is in none,
    let them continue and return 0.
    """
    if not unfinished_epoch(folder):
        return 0
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        process.suspend()
    if not (found := unfinished_epoch(folder)):
        for process in processes:
            process.resume()
    return found


def unfinished_epoch(folder: Path) -> int:
    """Return the epoch in whose middle the newest checkpoint is; 0 if it is at the end of one."""
    newest = Checkpoints(folder).newest() if folder.is_dir() else None
    if newest is None or (newest[1].facts["assignment"] is None and newest[1].facts["stream"] is None):
        return 0
    return int(newest[1].facts["epochs"])
