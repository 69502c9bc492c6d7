"""A small network with batch normalisation, whose global steps are dealt in shares or in whole batches.

stretto compare -n 4 --seeds 3 --recipe allreduce --recipe "local_sgd(every=16)" benchmarks/scripts/batch_norm.py
"""

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import stretto

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import datasets


class Batches(BatchSampler):
    """Batches of torch's own sampler in a class of the script: workers are dealt whole ones."""


parser = argparse.ArgumentParser(description="Train a convolutional network with batch normalisation.")
parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
parser.add_argument("--samples", type=int, default=6010, help="train on the first so many images only")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--whole", action="store_true", help="deal whole batches")
asked = parser.parse_args()

if asked.data == "mnist":
    train_x, train_y, test_x, test_y = datasets.mnist()
else:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train_x, train_y, test_x, test_y = x[order[:1437]], y[order[:1437]], x[order[1437:]], y[order[1437:]]
data = TensorDataset(train_x[: asked.samples], train_y[: asked.samples])


def score(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(x) for x in test_x.split(1000)])
    return {"test_accuracy": (answers.argmax(1) == test_y).float().mean().item()}


model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.LazyLinear(10),
)
model(data[0][0][None])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = Batches(RandomSampler(data), asked.batch, drop_last=False)
loader = DataLoader(data, batch_sampler=sampler) if asked.whole else DataLoader(data, asked.batch, shuffle=True)
loader = stretto.distribute(model, optimizer, loader, evaluate=score)
for _ in range(asked.epochs):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
