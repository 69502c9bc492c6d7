"""Runs that measure the memory of each process in the training loop, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCRIPT = """
import json, sys, torch, stretto, stretto.training.trainer
import torch.distributed.fsdp
from staged_net import loss_of, make_net, words
from stretto.process_config import worker_config
from stretto.strategies.parameter_view import is_held

def megabytes(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

small = torch.nn.Linear(8, 8)
loaded = torch.optim.AdamW(small.parameters())
small(torch.ones(2, 8)).sum().backward()
torch.nn.utils.clip_grad_norm_(small.parameters(), 0.5)
loaded.step()
before = megabytes("VmRSS")
net = make_net(width=int(sys.argv[2]), blocks=10, length=32)
sizes = [sum(one.numel() for one in part.parameters()) / 2**18 for part in (net, net.blocks[0])]
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(*words(0, 24, 32))
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
for step, (x, y) in enumerate(loader):
    if step == int(sys.argv[1]):
        open("/proc/self/clear_refs", "w").write("5")
    optimizer.zero_grad()
    loss_of(net(x), y).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    peak = megabytes("VmHWM") - before  # within the loop: at its end rank 0 has the whole model in a file
held = sum(one.numel() for one in net.parameters() if is_held(one)) / 2**18
json.dump([peak, *sizes, held], open(f"memory-{worker_config().rank}.json", "w"))
"""
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Memory(NamedTuple):
    """Memory of a process in MB: the largest one in the loop, the model, one of its layers, its own parameters."""

    peak: float
    model: float
    layer: float
    held: float


def memory(folder: Path, *options: str, first_step: int = 0, width: int = 512) -> list[Memory]:
    """Return the memory of each process of a run, from this step of the loop on, with a model of this width."""
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **RETURNS_FREED, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out = f"run-{len([*folder.glob('run-*')])}"
    command = [
        sys.executable,
        "-m",
        "stretto.cli",
        "run",
        "--out",
        out,
        *options,
        "train.py",
        str(first_step),
        str(width),
    ]
    for one in folder.glob("memory-*.json"):
        one.unlink()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Memory(*json.loads(one.read_text())) for one in sorted(folder.glob("memory-*.json"))]
