"""Stages without a trained parameter: their ranks take part in each exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import difference, run
from replica_threads import in_stages
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net, words
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

DATA = TensorDataset(*words(0, 20))
LAYOUT = 'pipeline(2, split="blocks.1")'
FIRST = ("embed", "place", "blocks.0")
"""Beginnings of the names of the first stage's parameters."""


def train(net: nn.Module) -> None:
    """Train with stages that are frozen: the first one, none, the first one within the epoch, the last one."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = words(9, 5)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(loss_of(model(x), y))}

    def freeze(first: bool, last: bool) -> None:
        for name, one in net.named_parameters():
            one.requires_grad = not (first if name.startswith(FIRST) else last)

    freeze(first=True, last=False)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=4), evaluate=evaluate)
    for epoch in range(4):
        freeze(first=epoch == 0, last=epoch == 3)
        for step, (x, y) in enumerate(loader):
            if epoch == 2 and step == 1:
                freeze(first=True, last=False)
            optimizer.zero_grad()
            with stretto.no_sync():
                (0.5 * loss_of(net(x[:2]), y[:2])).backward()
            loss_of(net(x[:3]), y[:3]).backward()
            loss_of(net(x), y).backward()
            nn.utils.clip_grad_norm_([one for one in net.parameters() if one.grad is not None], 0.5)
            optimizer.step()
    stretto.finish()


RECIPES = [
    "allreduce",
    'local_sgd(every=2, optimizer_state="average")',
    "gossip",
    "stale_synchronous(bound=0)",
]
FURTHER = [
    pytest.param(recipe, 2, marks=pytest.mark.long)
    for recipe in ("allreduce(how=error_feedback(sign()))", "local_sgd(every=2)", "diloco(every=2)")
]


@pytest.mark.parametrize(("recipe", "workers"), [("allreduce", 1), *((recipe, 2) for recipe in RECIPES), *FURTHER])
def test_stages_without_a_trained_parameter_take_part_in_each_exchange(recipe: str, workers: int) -> None:
    nets, _ = in_stages(workers, 2, recipe, LAYOUT, train)
    wholes = [make_net().double() for _ in range(workers)]
    run_workers(workers, lambda worker: train(wholes[worker]), recipe)
    assert "sign" in recipe or largest_difference(joined(nets), joined(wholes[:1])) < 1e-12


SCRIPT = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_frozen_stages import train
from staged_net import make_net
torch.manual_seed(0)
train(make_net())
"""
LAUNCHED = [
    ("2", "1", "allreduce"),
    pytest.param("4", "2", "allreduce", marks=pytest.mark.long),
    pytest.param("4", "2", "diloco(every=2)", marks=pytest.mark.long),
]
"""Number of processes, that of workers, and recipe."""


@pytest.mark.parametrize(("processes", "workers", "recipe"), LAUNCHED)
def test_a_run_of_stages_without_a_trained_parameter_equals_that_of_whole_workers(
    tmp_path: Path, processes: str, workers: str, recipe: str
) -> None:
    options = ("--recipe", recipe, "--timeout", "100")
    whole = run(tmp_path, "whole", "-n", workers, *options, text=SCRIPT)
    staged = run(tmp_path, "staged", "-n", processes, "--layout", LAYOUT, *options, text=SCRIPT)
    assert difference(staged, whole) < 1e-6
