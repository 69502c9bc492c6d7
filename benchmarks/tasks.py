"""Models and data that the sides of a contest share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset

BATCH = 32
CONTEXT, HEADS = 64, 4
DISTINCT = 2048


def convolution() -> nn.Sequential:
    """0.8 M parameters for images of 28 x 28: the network of examples/mnist.py."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Shapes: b batch, t time, c channels, h heads.
class Block(nn.Module):
    """Attention, then thinking."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ask = nn.Linear(width, 3 * width, bias=False)
        self.answer = nn.Linear(width, width, bias=False)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of each character what those before it say about it (b, t, c)."""
        x = x + self.attend(self.norm(x))
        return x + self.think(x)

    def attend(self, x: Tensor) -> Tensor:
        """What each character asks of those before it (b, t, c)."""
        b, t, c = x.shape
        query, key, value = self.ask(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)  # (b, h, t, c / h)
        return self.answer(seen.transpose(1, 2).reshape(b, t, c))


class Writer(nn.Module):
    """0.6 M parameters: the network of examples/shakespeare.py."""

    def __init__(self, characters: int = 65, layers: int = 3, width: int = 128) -> None:
        super().__init__()
        self.letters = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.letters.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """How likely each character is to come next (b, t, characters)."""
        embedded = self.letters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


@dataclass(frozen=True)
class Task:
    """A model and the shape of its samples; how much of it is timed.

    `segment` steps are timed at once, `repetitions` times in the same processes; the processes are started anew
    `starts` times, since where a process happens to find its memory is worth some percent of speed.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    segment: int
    repetitions: int
    starts: int


SMALL = Task(convolution, (1, 28, 28), 32, 8, 8)
MIDDLE = Task(lambda: perceptron(64, 2200, 2200, 10), (64,), 32, 6, 4)
LARGE = Task(lambda: perceptron(*[2048] * 7, 10), (2048,), 16, 5, 3)
TINY = Task(lambda: perceptron(64, 128, 128, 10), (64,), 400, 8, 8)

TASKS: Mapping[str, Task] = {"0.8 M": SMALL, "5 M": MIDDLE, "25 M": LARGE, "0.03 M": TINY}


class Samples(Dataset[tuple[Tensor, int]]):
    """Random samples of a shape; `count` of them, which come back after the first DISTINCT ones."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        source = torch.Generator().manual_seed(1)
        self._x = torch.randn(DISTINCT, *shape, generator=source)
        self._y = torch.randint(10, (DISTINCT,), generator=source).tolist()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._x[index % DISTINCT], self._y[index % DISTINCT]


def made(case: str) -> tuple[nn.Module, torch.optim.Optimizer, Task]:
    """A case's model, the same in each process, and its optimizer."""
    torch.manual_seed(0)
    task = TASKS[case]
    model = task.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), task


def samples(task: Task, workers: int) -> Samples:
    """As many samples as the workers need for all segments of a start and two more, in one pass."""
    return Samples(task.shape, workers * (task.repetitions + 2) * task.segment * BATCH)
