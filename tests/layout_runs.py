"""Runs of a script with a layout in processes, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from stretto.cli.export import export
from stretto.events import read_events

RECIPES = (
    "allreduce",
    "allreduce(how=cast('bf16'))",
    "local_sgd(every=2)",
    'local_sgd(every=2, optimizer_state="average")',
    "diloco(every=2)",
    "gossip",
    "allreduce(how=error_feedback(threshold(0.005)))",
    "gd_sec",
    "allreduce(how=cast('fp16'))",
    "ef21(cast('bf16'))",
)
"""Recipes under which replicas of several ranks train as whole workers do."""


def tolerance(recipe: str) -> float:
    """Return how far a parameter in float64 may be from that of whole workers: casts may round a last bit otherwise."""
    return 1e-3 if "cast" in recipe else 1e-12


SCRIPT = """
import os, pathlib, sys, time, torch, stretto
from staged_net import loss_of, make_net, words
from stretto.process_config import worker_config
config = worker_config()
torch.manual_seed(0)
net = make_net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(*words(0, 60))
x, y = words(1, 20)
def evaluate(model):
    with torch.no_grad():
        return {"loss": float(loss_of(model(x), y))}
loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=evaluate)
step = 0
for epoch in range(int(sys.argv[1])):
    for x, y in loader:
        step += 1
        dies = sys.argv[2:] and sys.argv[2:4] == [str(config.worker), str(config.rank)]
        dies = dies and config.incarnation == 0 and step == int(sys.argv[4])
        while dies and "saved" in sys.argv and not [*pathlib.Path(config.run).glob("checkpoints/round-*/manifest*")]:
            time.sleep(0.02)  # a checkpoint is written in the background
        if dies and sys.argv[5] == "before":
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        if dies and sys.argv[5] == "within":
            os.kill(os.getpid(), 9)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if dies and sys.argv[5] == "after":
            os.kill(os.getpid(), 9)
        optimizer.step()
"""
TESTS = str(Path(__file__).resolve().parent)


def run(
    folder: Path, name: str, *options: str, script: tuple[str, ...] = ("2",), fails: bool = False, text: str = SCRIPT
) -> Any:
    """Run the script, and return the run folder; the standard error if it `fails`."""
    (folder / "train.py").write_text(text)
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "stretto.cli", "run", "--out", name, *options, "train.py", *script]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else folder / name


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of a tensor of two trained models, which have the same names."""
    first, second = (load_file(folder / "final.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def exported(run: Path) -> dict[str, Tensor]:
    """Return the model that `stretto export` writes of a run."""
    return load_file(export(run, run / "exported.safetensors", force=True, notice=print).file)


def checkpointed(run: Path) -> dict[str, Tensor]:
    """Return the model that `stretto export` writes of the newest checkpoint of a run, whose final state is removed."""
    (run / "final.safetensors").unlink()
    return exported(run)


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, which must be finite."""
    assert all(one.isfinite().all() for one in tensors.values())
    return {name: tuple(one.shape) for name, one in tensors.items()}


def counts(folder: Path) -> list[Any]:
    """Return how often the samples of each epoch counted."""
    events = read_events(folder / "events.jsonl")
    return [event["sample_counts"] for event in events if event["event"] == "epoch" and not event.get("rank")]
