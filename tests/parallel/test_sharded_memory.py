"""The memory of a sharded process is its part of the model's, the layers that it runs, and the activations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, torch, stretto, stretto.training.trainer
import torch.distributed.fsdp
from staged_net import loss_of, make_net, words

def megabytes(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

small = torch.nn.Linear(8, 8)
loaded = torch.optim.AdamW(small.parameters())
small(torch.ones(2, 8)).sum().backward()
torch.nn.utils.clip_grad_norm_(small.parameters(), 0.5)
loaded.step()
before = megabytes("VmRSS")
net = make_net(width=512, blocks=10, length=32)
sizes = [sum(one.numel() for one in part.parameters()) / 2**18 for part in (net, net.blocks[0])]
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(*words(0, 24, 32))
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
open("/proc/self/clear_refs", "w").write("5")
for x, y in loader:
    optimizer.zero_grad()
    loss_of(net(x), y).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
print(json.dumps([megabytes("VmHWM") - before, *sizes]), flush=True)
"""
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(folder: Path, *options: str) -> tuple[float, float, float]:
    """Return the largest memory of process 0 in the loop, and the sizes of the model and of a layer, in MB."""
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **RETURNS_FREED, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stretto.cli", "run", *options, "train.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found, model, layer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return found, model, layer


@pytest.mark.plain_processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a part of a run is read from /proc")
def test_a_process_has_its_part_of_the_memory(tmp_path: Path) -> None:
    alone, model, layer = peak(tmp_path, "--out", "alone", "-n", "1")
    found, _, _ = peak(tmp_path, "--out", "shared", "-n", "2", "--layout", "sharded(2)")
    activations = alone - 4 * model  # beside parameters, gradients, and two numbers of AdamW for each
    expected = (4 * model + activations) / 2 + 4 * layer  # two layers with their gradients are whole
    print(
        f"{alone:.0f} MB in one process, {found:.0f} in each of two; {expected:.0f} expected, of a {model:.0f} MB model"
    )
    assert found < 1.1 * expected
