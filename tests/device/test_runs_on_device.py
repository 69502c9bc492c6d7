"""Runs of the launcher whose model is on the second device: processes, checkpoints, resumed runs and failed workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stretto.checkpoint.final_model import NAME
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = """
import os, signal, sys
import torch
device, epochs, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if device != "cpu":
    import second_device
import stretto
from device_uses import MSE, normalised
from stretto.process_config import worker_config
from thread_workers import regression
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(1)
net = nn.Sequential(*normalised(device), nn.Dropout(rate)).to(device)
fused = {"fused": True} if "fused" in sys.argv else {"foreach": True}
optimizer = torch.optim.AdamW(net.parameters(), 1e-2, **fused)
kind = device.partition(":")[0]
scaler = torch.amp.GradScaler(kind, init_scale=2.0**8, growth_interval=3)

def evaluate(model):
    model.eval()
    x, y = regression(16).tensors
    return {"loss": MSE(model(x.to(device)), y.to(device))}

loader = DataLoader(regression(48), batch_size=4, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=evaluate)
for epoch in range(epochs):
    for x, y in loader:
        if "killed" in sys.argv and stretto.rank() == 1 and worker_config().incarnation == 0 and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = MSE(net(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")


def trained(name: str, *arguments: str, **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Run the script, and return the run directory and the final model."""
    script = Path("train.py")
    script.write_text(SCRIPT)
    config = RunConfig(script, args=arguments, **{"workers": 2, "out": Path(name)} | options)
    folder = run(config, ProgressDisplay(quiet=True))
    return folder, load_file(folder / f"{NAME}.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return True if two models have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("local_sgd(every=2)", "power_sgd", "gossip")),
    ],
)
def test_a_run_has_the_bits_of_one_on_the_cpu(recipe: str) -> None:
    _, near = trained("near", "cpu", "2", "0.0", recipe=recipe)
    _, far = trained("far", "far:0", "2", "0.0", recipe=recipe)
    assert same(near, far)


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [("allreduce", "fused"), pytest.param("local_sgd(every=2)", "plain", marks=pytest.mark.long)],
)
def test_a_resumed_run_continues_with_the_random_numbers_of_the_device(recipe: str, optimizer: str) -> None:
    options = {"recipe": recipe, "checkpoint_every": "1 rounds"}
    _, whole = trained("whole", "far:0", "3", "0.3", optimizer, **options)
    first, _ = trained("first", "far:0", "1", "0.3", optimizer, **options)
    _, resumed = trained("resumed", "far:0", "3", "0.3", optimizer, resume=first, **options)
    assert same(whole, resumed)


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce",
        pytest.param("local_sgd(every=2)", marks=pytest.mark.long),
        pytest.param("async_sgd(shards=2)", marks=pytest.mark.long),
    ],
)
def test_a_run_survives_a_killed_worker(recipe: str) -> None:
    folder, model = trained("far", "far:0", "3", "0.0", "killed", recipe=recipe)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    counts = [one["sample_counts"] for one in events if one["event"] == "epoch"]
    assert [one["once"] for one in counts] == [48] * 3
    assert all(bool(torch.isfinite(one).all()) for one in model.values())
