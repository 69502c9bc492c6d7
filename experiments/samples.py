"""The data of `task.py`, read once for all workers of a process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

Split = tuple[Tensor, Tensor, Tensor, Tensor]
DIGITS = 1437
"""Number of training images of scikit-learn's digits."""


@cache
def digits() -> Split:
    """Return the digits of `examples/digits.py`: 1437 flat training images with labels, 360 test images with labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = mixed[:DIGITS], mixed[DIGITS:]
    return images[train], labels[train], images[test], labels[test]


@cache
def mnist() -> Split:
    """Return flat images of MNIST from `examples/datasets.py`: 10,000 for training, 10,000 for testing."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples import datasets

    train_x, train_y, test_x, test_y = datasets.mnist()
    return train_x[:10000].flatten(1).clone(), train_y[:10000].clone(), test_x.flatten(1), test_y


@cache
def shown(data: str, count: int) -> Split:
    """Return `count` training samples, repeated from the first if necessary, and all test samples."""
    x, y, test_x, test_y = {"digits": digits, "mnist": mnist}[data]()
    places = torch.arange(count) % len(x)
    return x[places], y[places], test_x, test_y
