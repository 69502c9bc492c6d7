"""What is learned in the laboratory: samples, a network, its loss, and how good it is."""

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
"""Steps of 4 hosts in one pass over the text: 98% of it, so that what is exchanged every 15, 30 or 60 steps ends."""
WARM_UP = 50


@dataclass(frozen=True)
class Course:
    """Samples to learn from and to be judged by, a network and its loss. `pace` scales the learning rate."""

    samples: Callable[[], tuple[TensorDataset, TensorDataset]]
    network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[nn.Module, TensorDataset], float]
    rises: bool
    """Whether more is better."""
    pace: Callable[[int, int], float] | None = None
    """From the step and the number of steps to a factor."""

    def is_reached(self, found: float, target: float) -> bool:
        """Whether what was found is as good as the target."""
        return found >= target if self.rises else found <= target

    @property
    def never(self) -> float:
        """A target that nothing reaches."""
        return math.inf if self.rises else -math.inf


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of the samples that are named rightly."""
    x, y = test.tensors
    model.eval()
    answers = [model(one).argmax(1) for one in x.split(1000)]
    model.train()
    return float((torch.cat(answers) == y).float().mean())


@torch.no_grad()
def mean_loss(model: nn.Module, test: TensorDataset) -> float:
    """The loss of a character, the mean over all."""
    x, y = test.tensors
    model.eval()
    losses = [
        float(of_characters(model(one), at)) * len(one) for one, at in zip(x.split(128), y.split(128), strict=True)
    ]
    model.train()
    return sum(losses) / len(x)


def of_characters(answers: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over all characters of all windows."""
    return cross_entropy(answers.flatten(0, 1), y.flatten())


def half_cosine(step: int, steps: int) -> float:
    """Warm up, then follow half a cosine down to a tenth: the schedule of examples/shakespeare.py."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _mnist() -> tuple[TensorDataset, TensorDataset]:
    train_x, train_y, test_x, test_y = datasets.mnist()
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def _shakespeare() -> tuple[TensorDataset, TensorDataset]:
    text = datasets.shakespeare()
    place = {character: at for at, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([place[character] for character in text])
    learnt = len(tokens) * 9 // 10
    return windows(tokens[:learnt], WRITING_STEPS * HOSTS_BATCH), windows(tokens[learnt:])


def windows(tokens: Tensor, most: int | None = None) -> TensorDataset:
    """Inputs and targets (n, CONTEXT): the text in pieces, and the same one character later."""
    pieces = tokens.unfold(0, CONTEXT + 1, CONTEXT)[:most]
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


MNIST = Course(_mnist, convolution, cross_entropy, accuracy, rises=True)
SHAKESPEARE = Course(_shakespeare, Writer, of_characters, mean_loss, rises=False, pace=half_cosine)
