"""A loop on MNIST that waits for FOLDER/go, whose processes write what they did to files of their own, HOST-PID.

Each line is a moment of the machine's clock, then `step`, or `accuracy` with its value and the seconds that it took.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import stretto
from benchmarks.learning_tasks import MNIST, accuracy
from benchmarks.race import BATCH, LR, MOMENTUM

LIMIT_S = 120.0
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--samples", type=int, default=60_000, help="samples of an epoch")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--evaluate-every", type=int, default=0)
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
train, test = MNIST.samples()
model = MNIST.network()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
lines = (arguments.folder / f"{os.environ['STRETTO_LAB_HOST']}-{os.getpid()}").open("w", buffering=1)


def evaluate(model: nn.Module) -> dict[str, float]:
    """Return the accuracy on the test images."""
    began = time.monotonic()
    value = accuracy(model, test)
    lines.write(f"{time.monotonic()} accuracy {value} {time.monotonic() - began}\n")
    return {"accuracy": value}


limit = time.monotonic() + LIMIT_S
while not (arguments.folder / "go").exists() and time.monotonic() < limit:
    time.sleep(0.01)
loader = DataLoader(Subset(train, range(arguments.samples)), batch_size=BATCH, shuffle=True)
every = arguments.evaluate_every
loader = stretto.distribute(
    model, optimizer, loader, evaluate=evaluate if every else None, evaluate_every=every or None
)
for _ in range(arguments.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        MNIST.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        lines.write(f"{time.monotonic()} step\n")
