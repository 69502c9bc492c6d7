"""Two spirals of points in a plane, to be told apart."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def spirals(points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points (n, 2) and the spiral that each is of (n,)."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(points) % 2
    radius = torch.rand(points, generator=draw).sqrt()
    angle = 5 * radius + torch.pi * label
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return x + 0.02 * torch.randn(points, 2, generator=draw), label


def batches(points: int, batch: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a shuffled loader of such points."""
    return DataLoader(TensorDataset(*spirals(points, seed=0)), batch_size=batch, shuffle=True)
