"""The learning tasks of the laboratory: samples, a network, its loss and its quality measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.tasks import CONTEXT, Writer, convolution
from examples import datasets

HOSTS_BATCH = 4 * 32
WRITING_STEPS = 120
"""Steps of 4 hosts in an epoch over 98% of the text: a multiple of 15, 30 and 60, so no round is incomplete."""
WARM_UP = 50


@dataclass(frozen=True)
class Course:
    """Training and test samples, a network, its loss and its quality measure. `pace` scales the learning rate."""

    samples: Callable[[], tuple[TensorDataset, TensorDataset]]
    network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[nn.Module, TensorDataset], float]
    rises: bool
    """True if a larger value of `judge` is better."""
    pace: Callable[[int, int], float] | None = None
    """Maps the step and the number of steps to a factor of the learning rate."""

    def is_reached(self, quality: float, target: float) -> bool:
        """Return True if the measured quality is at least as good as the target."""
        return quality >= target if self.rises else quality <= target

    @property
    def never(self) -> float:
        """Target that no quality reaches."""
        return math.inf if self.rises else -math.inf


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of correctly classified samples."""
    x, y = test.tensors
    model.eval()
    answers = [model(one).argmax(1) for one in x.split(1000)]
    model.train()
    return float((torch.cat(answers) == y).float().mean())


@torch.no_grad()
def mean_loss(model: nn.Module, test: TensorDataset) -> float:
    """Return the mean loss of a character."""
    x, y = test.tensors
    model.eval()
    losses = [
        float(of_characters(model(one), at)) * len(one) for one, at in zip(x.split(128), y.split(128), strict=True)
    ]
    model.train()
    return sum(losses) / len(x)


def of_characters(answers: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy over all characters of all windows."""
    return cross_entropy(answers.flatten(0, 1), y.flatten())


def half_cosine(step: int, steps: int) -> float:
    """Return the learning rate's factor: warm-up, then half a cosine down to a tenth, as in examples/shakespeare.py."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _mnist() -> tuple[TensorDataset, TensorDataset]:
    train_x, train_y, test_x, test_y = datasets.mnist()
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def _shakespeare() -> tuple[TensorDataset, TensorDataset]:
    text = datasets.shakespeare()
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[character] for character in text])
    train_size = len(tokens) * 9 // 10
    return windows(tokens[:train_size], WRITING_STEPS * HOSTS_BATCH), windows(tokens[train_size:])


def windows(tokens: Tensor, most: int | None = None) -> TensorDataset:
    """Return inputs and targets (n, CONTEXT): the text in windows, and the same windows one character later."""
    sections = tokens.unfold(0, CONTEXT + 1, CONTEXT)[:most]
    return TensorDataset(sections[:, :-1], sections[:, 1:])


MNIST = Course(_mnist, convolution, cross_entropy, accuracy, rises=True)
SHAKESPEARE = Course(_shakespeare, Writer, of_characters, mean_loss, rises=False, pace=half_cosine)
