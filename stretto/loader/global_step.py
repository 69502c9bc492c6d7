"""One global step of an epoch, as one worker sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stretto.data.assignment import Ranges
from stretto.data.leases import Lease
from stretto.errors import LoaderError, explain

Held = Lease | Ranges
"""A worker's work: a batch that it leased, or its positions in a global step of an epoch assigned to all."""

Parts = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """A global step: one batch for each worker. `batch` is None where other ranks of this worker have its samples.

    A batch of which no sample is this worker's own is another one's: the pass over it has weight 0.

    `own` is the number of this worker's samples, `total` that of all workers in this step (0 for a worker that does not
    wait), and `assigned_samples` the number assigned to all workers in the epoch so far, this step included.
    """

    batch: Any
    lease: Held | None
    own: int
    assigned_samples: int
    total: int = 0
    parts: Parts | None = None
    """Returns the samples of a worker by its number; None where workers can't fail."""
    streamed: int = 0
    """Number of the stream's batches in this global step, over all workers; 0 where samples are leased."""

    @property
    def is_at_other_ranks(self) -> bool:
        """True if other ranks of this worker have the samples of its batch: the script's loop does not see the step."""
        return self.batch is None

    @property
    def is_weightless(self) -> bool:
        """True if this worker makes a pass of weight 0: nothing of it counts."""
        return self.batch is not None and not self.own


def refuse_too_few(samples: int, workers: int) -> None:
    """Raise LoaderError unless an epoch has a sample for every worker."""
    if samples < workers:
        problem = f"an epoch has {samples} samples for {workers} workers"
        raise LoaderError(
            explain(
                problem,
                got=f"{samples} samples",
                expected=f"at least one a worker, {workers}",
                to_type=f"-n {max(samples, 1)}",
            )
        )
