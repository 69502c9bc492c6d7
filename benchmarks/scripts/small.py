"""A perceptron of 5 K parameters (64, 64, 10) on scikit-learn's digits, each image repeated `--times` times."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a small perceptron on scikit-learn's digits.")
options.add_argument("--epochs", type=int, default=1)
options.add_argument("--times", type=int, default=1, help="copies of each image in the data")
arguments = options.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32).div(16).repeat(arguments.times, 1)
labels = torch.tensor(digits.target).repeat(arguments.times)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

loader = stretto.distribute(model, optimizer, loader)

for _ in range(arguments.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
