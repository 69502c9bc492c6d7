"""The data of `task.py`, read once for all workers of a process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

Split = tuple[Tensor, Tensor, Tensor, Tensor]
DIGITS = 1437
"""So many of scikit-learn's digits are trained on."""


@cache
def digits() -> Split:
    """The digits of `examples/digits.py`: 1437 flat images to train with and their labels, 360 to test with."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = mixed[:DIGITS], mixed[DIGITS:]
    return images[train], labels[train], images[test], labels[test]


@cache
def mnist() -> Split:
    """MNIST's images, flat, as `examples/datasets.py` finds them: 10,000 to train with, 10,000 to test with."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples import datasets

    train_x, train_y, test_x, test_y = datasets.mnist()
    return train_x[:10000].flatten(1).clone(), train_y[:10000].clone(), test_x.flatten(1), test_y


@cache
def shown(data: str, count: int) -> Split:
    """So many samples to train with, from the first on and again, and all to test with."""
    x, y, test_x, test_y = {"digits": digits, "mnist": mnist}[data]()
    places = torch.arange(count) % len(x)
    return x[places], y[places], test_x, test_y
