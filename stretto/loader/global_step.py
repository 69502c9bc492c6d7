"""What a worker gets to work on at a time."""

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
    """One batch a worker. `batch` is None where this worker has none.

    `own` are this worker's samples, `total` those of all workers in this hand (0 for a worker that does not wait), and
    `handed` those that all have got in the pass so far, this hand included.
    """

    batch: Any
    lease: Held | None
    own: int
    handed: int
    total: int = 0
    short: bool = False
    """Whether some workers have no batch."""
    root: int = 0
    """The first worker with a batch: it tells the idle ones what happens."""
    parts: Parts | None = None
    """Tells the samples of a worker by its number, where workers may go."""
    streamed: int = 0
    """Number of the stream's batches in this global step, of all workers; 0 where samples are leased."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing here for a worker: the script's loop does not see the hand."""
        return self.batch is None


def refuse_too_few(samples: int, workers: int) -> None:
    """A pass must have a sample for every worker."""
    if samples < workers:
        problem = f"a pass has {samples} samples for {workers} workers"
        raise LoaderError(
            explain(
                problem,
                got=f"{samples} samples",
                expected=f"at least one a worker, {workers}",
                to_type=f"-n {max(samples, 1)}",
            )
        )
