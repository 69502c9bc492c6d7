"""Training script of the experiments: a perceptron with one hidden layer, plain SGD, digits or MNIST.

python experiments/task.py
stretto simulate -n 30 --recipe async_sgd --step-time 5ms experiments/task.py --batch 4
"""

import argparse

import samples
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a perceptron with one hidden layer.")
options.add_argument("--data", choices=("digits", "mnist"), default="digits")
options.add_argument(
    "--samples", type=int, default=samples.DIGITS, help="samples of an epoch; repeated if the data set has fewer"
)
options.add_argument("--epochs", type=int, default=10)
options.add_argument("--batch", type=int, default=8)
options.add_argument("--lr", type=float, default=0.05)
options.add_argument("--momentum", type=float, default=0.0)
options.add_argument("--hidden", type=int, default=128)
asked = options.parse_args()

train_x, train_y, test_x, test_y = samples.shown(asked.data, asked.samples)


def score(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        answers = model(test_x)
    return {
        "test_accuracy": (answers.argmax(1) == test_y).float().mean().item(),
        "test_loss": cross_entropy(answers, test_y).item(),
    }


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(train_x.shape[1], asked.hidden), nn.ReLU(), nn.Linear(asked.hidden, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=asked.momentum)
loader = DataLoader(TensorDataset(train_x, train_y), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
