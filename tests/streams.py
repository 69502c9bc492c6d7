"""Streams of numbered batches, of each kind that a loop may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from stretto import api
from stretto.training.trainer import Trainer


def has_weight() -> bool:
    """Return True if samples of the batch that the script has are trained: its pass has not weight 0."""
    trainer = api._current.get()
    return not isinstance(trainer, Trainer) or not trainer.global_steps.is_weightless


def batch_of(number: int) -> torch.Tensor:
    """Return the numbers of the two rows of a batch."""
    return torch.tensor([2 * number, 2 * number + 1])


class Stream(IterableDataset[torch.Tensor]):
    """A stream of this number of batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(batch_of, range(self._batches))


class Endless(Sampler[int]):
    """A sampler of this number of samples that says that it has no end."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return 10**10

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._samples))


def kinds(batches: int) -> dict[str, Callable[[], Any]]:
    """Return functions that make a stream of this number of batches, by its kind."""
    rows = 2 * batches
    return {
        "indices": lambda: DataLoader(torch.arange(rows), batch_size=2, sampler=Endless(rows)),  # type: ignore[arg-type]
        "generator": lambda: iter(Stream(batches)),
        "iterable": lambda: DataLoader(Stream(batches), batch_size=None),
        "list": lambda: list(Stream(batches)),
    }
