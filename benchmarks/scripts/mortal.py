"""A plain loop on the digits whose processes can be struck in any phase: for the laws and tables of what survives.

`--strike 1,2:KILL:exchanging` strikes workers 1 and 2. A worker that was started before is not struck again.
"""

import argparse
import hashlib
import os
import signal
import threading
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import stretto
from stretto.process_config import WorkerConfig, worker_config

parser = argparse.ArgumentParser()
parser.add_argument("--strike", default="")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.03, help="seconds that a step takes longer")
asked = parser.parse_args()

who, signal_name, phase = (asked.strike or "::").split(":")
config = worker_config() or WorkerConfig()
struck = str(config.rank) in who.split(",") and config.incarnation == 0


def strike(now: str) -> None:
    """Send the signal to this process if it is this phase's turn."""
    if struck and now == phase:
        os.kill(os.getpid(), getattr(signal, f"SIG{signal_name}"))


def strike_while_saving() -> None:
    """In a thread: as soon as a checkpoint is being written, or at the latest after some seconds."""
    folder = os.path.join(config.run or "", "checkpoints")
    limit = time.monotonic() + 3
    while time.monotonic() < limit and not (os.path.isdir(folder) and os.listdir(folder)):
        time.sleep(0.0005)
    strike("checkpointing")


strike("start")
torch.manual_seed(0)
digits = load_digits()
mixed = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))  # writers in both parts
images = torch.tensor(digits.data / 16, dtype=torch.float32)[mixed]
labels = torch.tensor(digits.target)[mixed]
model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
data = torch.utils.data.TensorDataset(images[:1200], labels[:1200])
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)


def accuracy(net: nn.Module) -> dict[str, float]:
    """Of the held-out images."""
    strike("evaluating")
    return {"test_accuracy": float((net(images[1200:]).argmax(1) == labels[1200:]).float().mean())}


loader = stretto.distribute(model, optimizer, loader, evaluate=accuracy)
steps = 0
for epoch in range(asked.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if steps == 11:
            strike("computing")
            if struck and phase == "checkpointing":
                threading.Thread(target=strike_while_saving, daemon=True).start()
            if phase == "exchanging":  # between two buckets: the first is on its way then
                first = next(iter(model.parameters()))
                first.register_hook(lambda _grad: strike("exchanging"))
        loss.backward()
        optimizer.step()
        time.sleep(asked.pause)
        steps += 1
    if epoch == 0:
        strike("epoch end")

state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print(f"steps {steps} state {hashlib.blake2b(state, digest_size=8).hexdigest()}")
