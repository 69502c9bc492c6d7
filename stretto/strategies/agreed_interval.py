"""The number of local steps between two rounds, where the workers agree on it by measured times."""

from __future__ import annotations

import math
import struct

from stretto.recipe.when import overhead
from stretto.runtime.phase_timer import Stopwatch
from stretto.transport.interface import Transport

_MEASURED = struct.Struct("<dd")


class AgreedInterval:
    """Number of local steps to the next round of one optimizer, from times that all workers have measured.

    After each round all workers gather their seconds of a step, and of the exchanges since the last round. The slowest
    step counts, and the shortest exchange, that of the worker for which the others have waited. So all compute the same
    number, whatever their clocks show; it begins at 1.

        worker 0   | step, step, round | all-gather: times | step, step, step, round | ...
        worker 1   | step, step, round | all-gather: times | step, step, step, round | ...
    """

    def __init__(self, every: overhead, transport: Transport, timer: Stopwatch) -> None:
        self._every, self._transport, self._timer = every, transport, timer
        self._steps = 1
        self._due_at = 1
        """Step after which the next round follows."""
        self.number = 1
        """Number of the next round."""
        self._before: tuple[float, float, int] | None = None
        """Seconds of steps and of exchanges until the last round, and its step; None before this worker's first."""

    def is_due(self, step: int) -> bool:
        """Return True if a round follows this step."""
        return step >= self._due_at

    def round_ended(self, step: int) -> None:
        """Agree on the next round after one that followed this step."""
        spent, before = self._timer.spent, self._before
        self._before = spent["computing"] + spent["loading"], spent["exchanging"] + spent["encoding"], step
        step_s = exchange_s = math.nan
        if before is not None and step > before[2]:
            step_s, exchange_s = (self._before[0] - before[0]) / (step - before[2]), self._before[1] - before[1]
        with self._timer.on("exchanging"):
            replies = self._transport.all_gather_bytes(_MEASURED.pack(step_s, exchange_s))
        found = [measured for one in replies if not math.isnan((measured := _MEASURED.unpack(one))[0])]
        if found:
            slowest, shortest = max(step for step, _ in found), min(exchange for _, exchange in found)
            self._steps = self._every.steps(slowest, shortest, self._steps)
        self.number += 1
        self._due_at = step + self._steps

    def state(self) -> list[int]:
        """Return the state, which is the same at all workers."""
        return [self._steps, self._due_at, self.number]

    def load(self, state: list[int]) -> None:
        """Continue from a state."""
        self._steps, self._due_at, self.number = state
