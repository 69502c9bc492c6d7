"""A factorisation of a small matrix in a plain loop, for tests and the scripts that they run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = Sequence[Tensor]


class Factors(nn.Module):
    """Factors and biases of 23 users and 17 items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(23, 4, sparse=True), nn.Embedding(17, 4, sparse=True)
        self.user_bias, self.item_bias = nn.Embedding(23, 1, sparse=True), nn.Embedding(17, 1, sparse=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        bias: Tensor = (self.user_bias(user) + self.item_bias(item)).squeeze(1)
        product: Tensor = (self.users(user) * self.items(item)).sum(1)
        return bias + product


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a batch."""
    user, item, rating, _ = batch
    loss: Tensor = (model(user, item) - rating).pow(2).sum() / 2
    return loss


def made(name: str) -> tuple[Factors, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """Return a model, its optimizer and 300 ratings in random order; the fourth item of a sample is its number."""
    torch.manual_seed(0)
    user, item = torch.randint(23, (300,)), torch.randint(17, (300,)) ** 2 // 17
    data = TensorDataset(user, item, torch.rand(300) * 5, torch.arange(300))
    model = Factors()
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    return model, kind(model.parameters(), lr=0.05), DataLoader(data, batch_size=8, shuffle=True)
