"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn, and a small multi-layer perceptron.

python examples/digits.py
stretto run -n 4 --recipe "local_sgd(every=16)" examples/digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a perceptron on scikit-learn's digits.")
options.add_argument("--epochs", type=int, default=40)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=0.05)
asked = options.parse_args()

# 1437 images to train on and 360 to test with, the same in every run.
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = mixed[:1437], mixed[1437:]


def score(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        answers = model(images[test])
    return {
        "test_accuracy": (answers.argmax(1) == labels[test]).float().mean().item(),
        "test_loss": cross_entropy(answers, labels[test]).item(),
    }


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)
