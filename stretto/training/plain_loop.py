"""The loop over the loader of a script that runs alone: where it is, in the terms of a run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

NOTHING = object()
"""Mark of a batch that was not read ahead."""


class PlainLoop:
    """The position of a script that runs alone: its batches are the global batches."""

    def __init__(self, loader: Any, parameters: Sequence[Tensor]) -> None:
        sized = isinstance(loader, list | tuple) or (
            isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        )
        self._loader, self._is_sized, self._parameters = loader, sized, parameters
        self._before = self._taken = 0
        self._versions: list[int] = []
        self._holder: weakref.ref[PlainBatches] | None = None
        """The iteration that has a batch; a loop that the script has left holds none."""

    def begin(self) -> None:
        """Begin an epoch. One batch of an iteration without a step was a peek, and does not count, as in a run."""
        versions = [parameter._version for parameter in self._parameters]
        is_peek = self._taken == 1 and versions == self._versions
        self._before += 0 if is_peek else self._taken
        self._taken, self._versions, self._holder = 0, versions, None

    def take(self, batches: PlainBatches) -> None:
        """Count a batch, which the script's loop has now."""
        self._taken, self._holder = self._taken + 1, weakref.ref(batches)

    def end(self) -> None:
        """Note that the script's loop has ended."""
        self._holder = None

    def _holding(self) -> PlainBatches | None:
        return self._holder() if self._holder is not None else None

    def global_batches(self, of_epoch: bool) -> int:
        """Return the number of batches of this epoch, or of all, before the one that the script's loop has."""
        return (0 if of_epoch else self._before) + self._taken - (self._holding() is not None)

    def is_last_batch(self) -> bool:
        """Return True if the script's loop has the last batch of its epoch."""
        batches = self._holding()
        if batches is None:
            return False
        return self._taken == len(self._loader) if self._is_sized else batches.is_last()


class PlainBatches(Iterator[Any]):
    """One iteration over the loader of a script that runs alone."""

    def __init__(self, loop: PlainLoop, batches: Iterator[Any]) -> None:
        self._loop, self._batches = loop, batches
        self._ahead: Any = NOTHING
        loop.begin()

    def __next__(self) -> Any:
        batch, self._ahead = self._ahead, NOTHING
        if batch is NOTHING:
            batch = next(self._batches, NOTHING)
        if batch is NOTHING:
            self._loop.end()
            raise StopIteration
        self._loop.take(self)
        return batch

    def is_last(self) -> bool:
        """Return True if no batch follows; the next one is read for it."""
        if self._ahead is NOTHING:
            self._ahead = next(self._batches, NOTHING)
        return self._ahead is NOTHING
