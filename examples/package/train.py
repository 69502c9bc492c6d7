"""A package that is started by its name, as `python -m` does: two spirals, told apart by a perceptron.

python -m examples.package.train
stretto run -n 3 --recipe "local_sgd(every=4)" -m examples.package.train
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto

from .data import batches, spirals
from .network import perceptron

options = argparse.ArgumentParser(description="Train a perceptron to tell two spirals apart.")
options.add_argument("--epochs", type=int, default=8)
options.add_argument("--batch", type=int, default=20)
options.add_argument("--lr", type=float, default=1e-2)
options.add_argument("--points", type=int, default=1500)
options.add_argument("--width", type=int, default=64)
asked = options.parse_args()

test_x, test_y = spirals(500, seed=1)


def score(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"test_accuracy": (model(test_x).argmax(1) == test_y).float().mean().item()}


torch.manual_seed(0)
model = perceptron(asked.width)
optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr)
loader = batches(asked.points, asked.batch)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)

print(f"accuracy {score(model)['test_accuracy']:.4f}")
