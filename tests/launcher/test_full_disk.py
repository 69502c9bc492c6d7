"""Runs whose disk fills to its last block: they train on, and end with one error only if their members change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from combinations import mostly_long
from own_disk import own_disk

SCRIPT = """
import glob, os, signal, time, torch, stretto
torch.manual_seed(0)
x = torch.randn(160, 8)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
loader = stretto.distribute(net, optimizer, loader)

def fill():
    with open("fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

for epoch in range(EPOCHS):
    if stretto.rank() == 0 and epoch > 0:
        fill()
    for step, (a, b) in enumerate(loader):
        if KILL and epoch > 0 and stretto.rank() == 1 and step == 2:
            if not any(os.path.getsize(log) % 4096 for log in glob.glob("runs/*/coordinator.wal")):  # its block is full
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        time.sleep(0.01)  # the coordinator asks for a checkpoint every 0.2 s at most
print("trained", epoch + 1, "epochs", flush=True)
"""


def run_until_full(folder: Path, recipe: str, epochs: int, kill: bool) -> subprocess.CompletedProcess[str]:
    """Run two workers that save a checkpoint every few milliseconds, on a disk that the script fills."""
    (folder / "train.py").write_text(f"EPOCHS, KILL = {epochs}, {kill}\n{SCRIPT}")
    (disk := folder / "disk").mkdir()
    command = [*own_disk("2m", disk), sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--recipe", recipe]
    often = "300ms" if "async" in recipe else "10ms"
    options = ["--checkpoint-every", often, "--timeout", "5", "--output", "all", str(folder / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, text=True, capture_output=True, timeout=150, check=False
    )


@pytest.mark.parametrize("recipe", mostly_long(["allreduce", "local_sgd(every=4)", "async_sgd"], short=(0,)))
def test_training_continues_without_checkpoints_and_without_a_log(recipe: str, tmp_path: Path) -> None:
    done = run_until_full(tmp_path, recipe, 30 if recipe == "async_sgd" else 100, kill=False)
    assert done.returncode == 0, done.stderr
    log = "dispatcher.wal" if recipe == "async_sgd" else "coordinator.wal"
    assert f"{log} cannot be written: No space left" in done.stderr
    assert "Errno" not in done.stderr


def test_a_change_of_members_that_cannot_be_written_ends_the_run_with_one_error(tmp_path: Path) -> None:
    done = run_until_full(tmp_path, "allreduce", 600, kill=True)
    assert done.returncode == 1, done.stderr
    assert "coordinator.wal cannot be written: No space left on device, and its members have changed" in done.stderr
