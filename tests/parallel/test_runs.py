"""Runs of real processes with a layout: equal to a single process, over kills, over checkpoints, over other layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stretto.events import read_events

SCRIPT = """
import os, sys, torch, stretto
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
TESTS = str(Path(__file__).resolve().parents[1])


def run(folder: Path, name: str, *options: str, script: tuple[str, ...] = ("2",), fails: bool = False) -> Any:
    """Run the script, and return the run folder; the standard error if it `fails`."""
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "stretto.cli", "run", "--out", name, *options, "train.py", *script]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else folder / name


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of a tensor of two trained models, which have the same names."""
    first, second = (load_file(folder / "final.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def counts(folder: Path) -> list[Any]:
    """Return how often the samples of each epoch counted."""
    events = read_events(folder / "events.jsonl")
    return [event["sample_counts"] for event in events if event["event"] == "epoch" and not event.get("rank")]


def test_a_run_in_stages_equals_a_single_process_and_is_resumed_under_other_layouts(tmp_path: Path) -> None:
    saves = ("--checkpoint-every", "5 rounds")
    whole = run(tmp_path, "whole", "-n", "1")
    staged = run(tmp_path, "staged", "-n", "2", "--layout", "pipeline(stages=2)", *saves)
    assert difference(staged, whole) < 1e-6
    assert not [event for event in read_events(staged / "events.jsonl") if event.get("what") == "failed"]
    longer = run(tmp_path, "longer", "-n", "1", script=("3",))
    for name, options in {"three": ("-n", "3", "--layout", "pipeline(3)"), "one": ("-n", "1")}.items():
        resumed = run(tmp_path, name, *options, "--resume", "staged", script=("3",))
        assert difference(resumed, longer) < 1e-6


@pytest.mark.parametrize(
    ("recipe", "victim"),
    [
        ("allreduce", ("1", "1", "7", "before")),
        ("allreduce", ("0", "0", "8", "after")),
        ("local_sgd(every=3)", ("0", "1", "7", "within")),
    ],
)
def test_a_killed_rank_costs_its_replica_only(tmp_path: Path, recipe: str, victim: tuple[str, ...]) -> None:
    layout = ("-n", "4", "--layout", "pipeline(stages=2)", "--recipe", recipe, "--failure-timeout", "60s")
    folder = run(tmp_path, "run", *layout, script=("6", *victim))
    events = read_events(folder / "events.jsonl")
    failed = [event for event in events if event.get("what") == "failed"]
    assert [(event["worker"], event.get("rank", 0), event["why"]) for event in failed] == [
        (int(victim[0]), int(victim[1]), "killed by SIGKILL")
    ]
    assert all(one == {"once": 60, "twice": 0, "never": 0, "dropped": 0} for one in counts(folder))
    assert len(counts(folder)) == 6
    assert not any(event["event"] == "error" for event in events)


def test_the_only_replica_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", "pipeline(stages=2)", "--checkpoint-every", "4 rounds")
    folder = run(tmp_path, "run", *layout, script=("2", "0", "1", "10", "within"))
    warnings = [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "warning"]
    assert any("continues from the checkpoint of round" in text for text in warnings), warnings
    assert difference(folder, run(tmp_path, "whole", "-n", "1")) < 1e-6


def test_a_script_that_calls_a_part_of_the_model_gets_one_error(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", 'pipeline(stages=2, split="blocks.9")')
    error = run(tmp_path, "run", *layout, fails=True)
    assert "no stage can begin with the module blocks.9" in error
    assert "expected: one of blocks.0, blocks.0.norm, blocks.0.mlp, blocks.1" in error
