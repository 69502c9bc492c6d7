"""Residuals of workers that leave gracefully: the first remaining worker adds them to its own."""

from __future__ import annotations

from collections.abc import Sequence

from safetensors import SafetensorError

from stretto.checkpoint.run_files import RunFiles
from stretto.checkpoint.storage import tensor_chunks
from stretto.training.trainer_view import TrainerView

LOOK_S = 0.5
"""Seconds between two looks for a residual that has not arrived."""
LIMIT_S = 600.0
"""Seconds after which a residual that has not arrived is lost."""


class ResidualHandover:
    """One worker's side: it sends its residual when it leaves, and takes those of others while it is the first.

    A residual may arrive after the others have continued without the worker: it is added between two global steps.
    """

    def __init__(self, trainer: TrainerView, files: RunFiles | None) -> None:
        self._trainer, self._files = trainer, files
        self._expected: dict[int, float] = {}
        """Workers whose residuals have not arrived, and until when they may."""
        self._next_look = 0.0

    def give(self, worker: int) -> None:
        """Send the residual of this worker, which leaves."""
        residuals = self._trainer.strategy.state.residuals()
        if not residuals or self._files is None:
            return
        try:
            self._files.write("residual", lambda: tensor_chunks(residuals), worker)
        except OSError as error:
            self._trainer.events.own_notice(f"the residual of this worker is lost: {error.strerror or error}")

    def expect(self, workers: Sequence[int]) -> None:
        """Take the residuals of these workers, which have left, now or later."""
        if workers and self._files is not None and self._trainer.strategy.state.residuals():
            now = self._trainer.events.t()
            self._expected |= dict.fromkeys(workers, now + LIMIT_S)
            self._next_look = now
            self.take()

    def take(self) -> None:
        """Add residuals that have arrived; called between two global steps."""
        if not self._expected or (now := self._trainer.events.t()) < self._next_look:
            return
        self._next_look = now + LOOK_S
        for worker, limit in list(self._expected.items()):
            if self._has_added(worker):
                del self._expected[worker]
            elif now > limit:
                del self._expected[worker]
                self._trainer.events.own_notice(f"the residual of worker {worker}, which left, has not arrived")

    def _has_added(self, worker: int) -> bool:
        """Add the residual of a worker, if it has arrived, and return True then."""
        assert self._files is not None
        try:
            residuals = self._files.take_residual(worker)
        except (OSError, SafetensorError) as error:
            self._trainer.events.own_notice(f"the residual of worker {worker}, which left, cannot be read: {error}")
            return True
        if residuals is not None:
            self._trainer.strategy.state.add_residuals(residuals)
        return residuals is not None
