"""A table of embeddings and a linear layer, trained with random numbers of rows: `--sparse` for sparse gradients."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train the rows of a table.")
options.add_argument("--rows", type=int, default=1_000_000)
options.add_argument("--width", type=int, default=32)
options.add_argument("--batch", type=int, default=256)
options.add_argument("--steps", type=int, default=100)
options.add_argument("--sparse", action="store_true")
arguments = options.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(arguments.rows, arguments.width, sparse=arguments.sparse), nn.Linear(arguments.width, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
numbers = torch.randint(0, arguments.rows, (arguments.batch * arguments.steps,))
loader = DataLoader(TensorDataset(numbers), batch_size=arguments.batch)

loader = stretto.distribute(model, optimizer, loader)

for (number,) in loader:
    loss = (model(number) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    stretto.log(loss=loss)
