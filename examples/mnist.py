"""MNIST and a small convolutional network of 0.8 M parameters.

python examples/mnist.py
stretto run -n 2 --recipe "local_sgd(every=64)" examples/mnist.py
"""

import argparse

import datasets
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a convolutional network on MNIST.")
options.add_argument("--epochs", type=int, default=2)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=0.05)
options.add_argument("--samples", type=int, default=60000, help="train on the first so many images only")
asked = options.parse_args()

train_x, train_y, test_x, test_y = datasets.mnist()
train_x, train_y = train_x[: asked.samples], train_y[: asked.samples]


def score(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(x) for x in test_x.split(1000)])
    return {
        "test_accuracy": (answers.argmax(1) == test_y).float().mean().item(),
        "test_loss": cross_entropy(answers, test_y).item(),
    }


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, stride=2, padding=2),  # 14 x 14
    nn.ReLU(),
    nn.Conv2d(16, 32, 5, stride=2, padding=2),  # 7 x 7
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(7 * 7 * 32, 500),
    nn.ReLU(),
    nn.Linear(500, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
loader = DataLoader(TensorDataset(train_x, train_y), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)
