"""Workers that run out of memory return with half their share, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.events import read_events
from stretto.launcher.oom_kills import oom_kills

SCRIPT = """
import os, pathlib, sys, time, torch, stretto
from torch import nn

room, folder, workers = int(sys.argv[1]), pathlib.Path(sys.argv[2]), stretto.world_size()
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(2000, 4), torch.randn(2000, 1))
loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
if stretto.rank() == 1:
    (folder / f"begun-{time.time_ns()}").touch()
loader, begun = stretto.distribute(net, optimizer, loader), 0
for epoch in range(2):
    for x, y in loader:
        if stretto.rank() == 1 and len(x) > room:
            raise MemoryError(f"no room for {len(x)} samples")
        if stretto.rank() == 2 and epoch == 1:
            os.kill(os.getpid(), 9)
        if stretto.rank() == 0 and len(x) >= 20 * workers - 2:  # alone: another worker returns
            while len(list(folder.glob("begun-*"))) == begun:
                time.sleep(0.02)
            time.sleep(0.3)
        else:
            begun = len(list(folder.glob("begun-*")))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
"""


def run(folder: Path, room: int, *options: str, workers: str = "2") -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", workers, "--out", str(folder / "run"), *options]
    command += [str(script), str(room), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("recipe", ["allreduce", pytest.param("local_sgd(every=2)", marks=pytest.mark.long)])
def test_a_worker_without_memory_for_its_share_has_a_smaller_one(recipe: str, tmp_path: Path) -> None:
    """Worker 1 has room for 7 of its 20 samples of a step, so it returns twice: with 10 and with 5."""
    ended = run(tmp_path, 7, "--recipe", recipe, "--restarts", "0")
    assert ended.returncode == 0, ended.stderr
    assert "returns with at most 10, and others have the rest" in ended.stderr
    assert "returns with at most 5, and others have the rest" in ended.stderr
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [one["sample_counts"] for one in events if one["event"] == "epoch"] == [
        {"once": 2000, "twice": 0, "never": 0, "dropped": 0}
    ] * 2


def test_a_worker_that_runs_out_of_memory_with_a_larger_share_keeps_its_share_of_before(tmp_path: Path) -> None:
    """Worker 1 has 29 samples of a step once worker 2 is lost, and room for 24: it has 20 again, worker 0 the rest."""
    ended = run(tmp_path, 24, "--restarts", "0", workers="3")
    assert ended.returncode == 0, ended.stderr
    assert "worker 1 has run out of memory with 29 samples of a global step: it returns with at most 20" in ended.stderr
    assert ended.stderr.count("has run out of memory with") == 1
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [one["sample_counts"]["once"] for one in events if one["event"] == "epoch"] == [2000] * 2


def test_a_worker_without_memory_for_the_smallest_share_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "--restarts", "0")
    assert ended.returncode == 1
    assert "MemoryError: no room for 5 samples" in ended.stderr


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/a/b\n", "a/b/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("3:cpu:/\n7:memory:/c\n", "memory/c/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
        ("0::/\n", "elsewhere", ""),
    ],
)
def test_kills_for_want_of_memory_are_those_of_the_own_control_group(
    own: str, file: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "own").write_text(own)
    assert oom_kills(tmp_path, tmp_path / "own") == (2 if text else 0)
