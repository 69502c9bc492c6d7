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
    """Return a network of 0.8 M parameters for images of 28 x 28, that of examples/mnist.py."""
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
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Shapes: b batch, t time, c channels, h heads.
class Block(nn.Module):
    """Attention, then a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for each character (b, t, c)."""
        x = x + self.attend(self.norm(x))
        return x + self.feed_forward(x)

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention of each character to itself and the ones before it (b, t, c)."""
        b, t, c = x.shape
        query, key, value = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)  # (b, h, t, c / h)
        return self.projection(attended.transpose(1, 2).reshape(b, t, c))


class Writer(nn.Module):
    """A network of 0.6 M parameters, that of examples/shakespeare.py."""

    def __init__(self, characters: int = 65, layers: int = 3, width: int = 128) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(characters, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.token_embedding.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character at each place (b, t, characters)."""
        embedded = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


@dataclass(frozen=True)
class Task:
    """A model, the shape of its samples, and the number of steps that are timed.

    `segment` steps are timed together, `repetitions` times in the same processes, and these are started `starts` times,
    since the memory layout of a process changes its speed by some percent.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    segment: int
    repetitions: int
    starts: int


SMALL = Task(convolution, (1, 28, 28), 32, 8, 8)
MIDDLE = Task(lambda: perceptron(64, 2200, 2200, 10), (64,), 32, 6, 4)
LARGE = Task(lambda: perceptron(*[2048] * 7, 10), (2048,), 16, 5, 3)
FEW = Task(lambda: perceptron(64, 280, 280, 10), (64,), 200, 8, 6)
TINY = Task(lambda: perceptron(64, 128, 128, 10), (64,), 400, 8, 8)

TASKS: Mapping[str, Task] = {"0.8 M": SMALL, "5 M": MIDDLE, "25 M": LARGE, "0.1 M": FEW, "0.03 M": TINY}


class Samples(Dataset[tuple[Tensor, int]]):
    """`count` random samples of a shape, which repeat after the first DISTINCT ones."""

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


def build(case: str) -> tuple[nn.Module, torch.optim.Optimizer, Task]:
    """Return a case's model, the same in each process, and its optimizer and task."""
    torch.manual_seed(0)
    task = TASKS[case]
    model = task.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), task


def samples(task: Task, workers: int) -> Samples:
    """Return as many samples as the workers need in one epoch for all segments of a start and two more."""
    return Samples(task.shape, workers * (task.repetitions + 2) * task.segment * BATCH)
