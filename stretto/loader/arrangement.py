"""The order in which an epoch's batches are trained, and the part of each that one process loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from stretto.data.assignment import Ranges

Batch = list[Any]
"""The indices of one batch, as a batch sampler gives them."""


class Arrangement:
    """The order of a worker whose processes load the same batches, as they were drawn."""

    divides_batches = False
    """True if the processes of a worker load different samples of a batch, and step apart."""

    def arranged(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an epoch, in the order in which they are trained."""
        return batches

    def loaded(self, batch: Batch) -> Batch:
        """Return the samples of a batch that this process loads."""
        return batch

    def cut(self, batch: Any) -> Any:
        """Return the part of a stream's batch that this process trains."""
        return batch

    def enter(self, flat: Sequence[Any], ranges: Ranges) -> bool:
        """Prepare for the batch of these ranges of all samples. Return False if this process loads none of them."""
        return True

    def length(self, loader: DataLoader[Any]) -> int:
        """Return the number of batches of an epoch."""
        return len(loader)
