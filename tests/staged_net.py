"""A small language model whose forward pass has code between its modules, its data and its loss."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1) / x.shape[1]
        return x + self.mlp(x)


class Net(nn.Module):
    """Small language model with code between its modules: a position table, a list of blocks, a transposed middle."""

    def __init__(self, words: int = 11, width: int = 8, blocks: int = 4, length: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place[: x.shape[1]]
        for number, block in enumerate(self.blocks):
            h = block(h if number % 2 else h * 1.5)
        return self.head(self.norm(h))


def make_net(**sizes: int) -> Net:
    """Return the same network at each call; in several threads at a time only that of the usual sizes."""
    return _drawn(**sizes) if sizes else copy.deepcopy(_USUAL)


def _drawn(**sizes: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(**sizes)


_USUAL = _drawn()
"""Network whose values were drawn before there are threads, which share torch's generator."""


def words(step: int, samples: int, length: int = 6) -> tuple[Tensor, Tensor]:
    """Return the batch of a step: sequences of words, and the words that follow."""
    source = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, 11, (samples, length + 1), generator=source)
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def replace_forward(module: nn.Module) -> None:
    """Set a `forward` in the object, as patches of models do, which doubles what the module returns."""
    plain = module.forward
    module.forward = lambda x: 2 * plain(x)
