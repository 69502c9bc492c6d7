"""A plain loop whose model counts: its embedding says how often each sample was trained, whatever the record says.

The gradient of `count` is exactly 1 for each sample, and its learning rate is 1. At the end of each epoch, FOLDER has
the counts so far, and the shares that this worker had in the means of its rounds. `--strike 1:KILL:stepped:3` sends
SIGKILL to worker 1 after its third step, and `--strike 1:KILL:stepped:3:shard` makes it send that to a shard.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.loader.sample_weights import Weights
from stretto.process_config import WorkerConfig, worker_config

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--samples", type=int, default=240)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
parser.add_argument("--tail", action="store_true", help="step with the last batches of an epoch, too")
parser.add_argument("--drop", action="store_true", help="drop gradients that an epoch leaves without a step")
parser.add_argument("--loaders", type=int, default=0, help="processes that load")
parser.add_argument("--strike", action="append", default=[], help="WORKER:SIGNAL:PHASE:AT[:shard|coordinator|launcher]")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a batch takes longer")
arguments = parser.parse_args()
config = worker_config() or WorkerConfig()
passed = dict.fromkeys(("begun", "computed", "stepped", "ended"), 0)


def pass_phase(phase: str) -> None:
    """Count a phase, and send the signals that are due at its number."""
    passed[phase] += 1
    for strike in arguments.strike:
        worker, name, at, number, *who = strike.split(":")
        done = arguments.folder / f"sent-{strike}"
        if (int(worker), at, int(number)) != (config.worker, phase, passed[phase]) or done.exists():
            continue
        done.touch()
        launcher = psutil.Process(os.getppid())
        pids = [launcher.pid] if who == ["launcher"] else [os.getpid()]
        if who in (["shard"], ["coordinator"]):
            module = f"stretto.launcher.{who[0]}_main"
            pids = [one.pid for one in launcher.children(recursive=True) if module in one.cmdline()]
        os.kill(pids[0], getattr(signal, f"SIG{name}"))


torch.manual_seed(1)
inputs, numbers = torch.randn(arguments.samples, 4), torch.arange(arguments.samples)
body, count = nn.Linear(4, 2), nn.Embedding(arguments.samples, 1)
nn.init.zeros_(count.weight)
model = nn.ModuleDict({"body": body, "count": count})
groups = [{"params": list(body.parameters()), "lr": 0.01}, {"params": list(count.parameters()), "lr": 1.0}]
optimizer = torch.optim.SGD(groups, lr=0.01)
since: list[tuple[int, int]] = []
"""Epoch and sample of this worker's work since its last exchange."""
is_carried = False
epoch = 0
shares = (arguments.folder / f"shares-{config.worker}-{os.getpid()}.jsonl").open("a")
own_share, carried = Weights.share, Weights.carried


def noted_share(weights: Weights) -> float:
    """Return this worker's share of a mean, and note it with the work that it is of."""
    shares.write(json.dumps([epoch, own_share(weights), since]) + "\n")
    shares.flush()
    return own_share(weights)


def noted_carried(weights: Weights) -> None:
    """Note that an exchange has ended: the next work has another share."""
    global is_carried
    is_carried = True
    carried(weights)


Weights.share, Weights.carried = noted_share, noted_carried  # type: ignore[method-assign]
data = TensorDataset(inputs, numbers)
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=arguments.loaders)
loader = stretto.distribute(model, optimizer, loader)
for epoch in range(arguments.epochs):
    for number, (x, indices) in enumerate(loader, 1):
        if is_carried:
            since, is_carried = [], False
        since += [(epoch, sample) for sample in indices.tolist()]
        pass_phase("begun")
        is_step = number % arguments.accumulate == 0 or (arguments.tail and stretto.is_last_batch())
        loss = body(x).square().mean() + count(indices).sum()
        if is_step:
            loss.backward()
        else:
            with stretto.no_sync():
                loss.backward()
        pass_phase("computed")
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
            pass_phase("stepped")
        time.sleep(arguments.pause)
    pass_phase("ended")
    if arguments.drop:
        optimizer.zero_grad()
    if not stretto.is_resuming():
        written = arguments.folder / f"epoch-{epoch + 1}-{config.worker}.json"
        counts = [round(-one, 6) for one in count.weight.detach().flatten().tolist()]
        written.with_suffix(".part").write_text(json.dumps(counts))
        written.with_suffix(".part").replace(written)
