"""Runs whose disk fills to its last block: they train on, and end with one error only if their members change.

At the end such a run lacks its page: exit code, summary and a record on another disk are what they are elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from combinations import mostly_long
from own_disk import own_disk

HEAD = """
import glob, os, signal, time, torch, stretto
torch.manual_seed(0)
x = torch.randn(160, 8)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
"""
SCRIPT = """
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
    (folder / "train.py").write_text(f"EPOCHS, KILL = {epochs}, {kill}\n{HEAD}{SCRIPT}")
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


ENDING = """
loader = stretto.distribute(net, optimizer, loader, evaluate=lambda model: {"norm": model.weight.norm().item()})
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
    if epoch == FULL_AFTER:
        with open("fill", "wb", buffering=0) as file:
            for size in (4096, 1):  # the rest of the log's last block is taken as well
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass
"""


@pytest.mark.parametrize("full_after", [0, 39], ids=["log is cut off", "page only"])
def test_a_full_disk_at_the_end_costs_the_page_and_not_the_summary_or_a_record_elsewhere(
    full_after: int, tmp_path: Path
) -> None:
    (disk := tmp_path / "disk").mkdir()
    (tmp_path / "train.py").write_text(f"EPOCHS, FULL_AFTER = 40, {full_after}\n{HEAD}{ENDING}")
    run = f"run-{tmp_path.parent.name}"
    words = ["run", "--out", run, "--json", str(tmp_path / "record.json"), str(tmp_path / "train.py")]
    command = [*own_disk("1m", disk), sys.executable, "-m", "stretto.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"no page: {run}/report.html cannot be written: No space left on device" in done.stdout
    (model,) = re.findall(r"^model: (/.*-final.*safetensors)$", done.stdout, re.MULTILINE)
    assert f"the trained model is in {model}" in done.stdout
    Path(model).unlink()
    record = json.loads((tmp_path / "record.json").read_text())
    is_cut = "the end of the log could not be written: these numbers are those up to step" in done.stdout
    assert record["failed"] is None and is_cut == (not record["is_complete"])
    assert is_cut or full_after  # the end of the log fits into its last block, or does not
    assert f"{record['samples']:,} samples" in done.stdout
    assert 160 <= record["samples"] < 6400 + full_after if is_cut else record["samples"] == 6400


SAVING = """
import errno, stretto, torch
stretto.save({"before": 1}, "model.pt")
with open("fill", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
try:
    stretto.save({"weights": torch.zeros(SIZE)}, "model.pt")
except OSError as error:
    assert (error.errno, error.filename) == (errno.ENOSPC, "model.pt"), repr(error)
    print(error)
assert torch.load("model.pt") == {"before": 1}
"""


@pytest.mark.parametrize("size", [10, 100_000])
def test_saving_on_a_full_disk_says_so_in_one_error(size: int, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    command = [*own_disk("1m", disk), sys.executable, "-c", SAVING.replace("SIZE", str(size))]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[Errno 28] No space left on device: 'model.pt'\n"
