"""A perceptron."""

from torch import nn


def perceptron(width: int) -> nn.Sequential:
    """Return a network of two hidden layers, from points to scores of two classes."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
