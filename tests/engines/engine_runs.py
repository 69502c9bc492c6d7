"""Script and checks that tests of several engines share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import indent
from typing import Any

from stretto.events import read_events

SAMPLES, EPOCHS = 320, 3


def script(each_step: str = "", epochs: int = EPOCHS) -> str:
    """Return a plain loop over some epochs, in which these lines follow each step."""
    return f"""
import os, pathlib, sys, time, torch, stretto
torch.manual_seed(0)
x = torch.randn({SAMPLES}, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
loader = stretto.distribute(net, optimizer, loader)
for epoch in range({epochs}):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
{indent(each_step, " " * 8)}
"""


NOTEBOOK_PRINTS = "trained ['bias', 'weight'] True True"


def notebook(begin: str, on: str, cluster_is_there: str) -> str:
    """Return a program that runs a function of its own on a cluster, and prints NOTEBOOK_PRINTS at the end."""
    return f"""
import torch, stretto
{begin}
data = torch.randn({SAMPLES}, 8)

def train(rate):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    dataset = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    for a, b in stretto.distribute(net, optimizer, loader):
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()

result = stretto.run(train, 0.01, workers=2, on={on}, elastic=(1, 6), recipe="local_sgd(every=2)", out="run")
print("trained", sorted(result.state), result.report.exists(), {cluster_is_there})
"""


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the log of a run, as far as it is written."""
    log = run / "events.jsonl"
    return [event for event in read_events(log) if event["event"] == kind] if log.exists() else []


def assert_each_sample_counts_once(runs: Iterable[Path], epochs: int = EPOCHS, output: str = "") -> None:
    """Check all epochs of a run, or of a run and those that have continued it."""
    counts = {event["epoch"]: event["sample_counts"] for run in runs for event in events(run, "epoch")}
    assert sorted(counts) == list(range(1, epochs + 1)), output
    assert all((one["once"], one["twice"], one["never"]) == (SAMPLES, 0, 0) for one in counts.values())
