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

    After each round all workers gather their seconds of a step since the last one, and of the round with the all-gather
    before it. The slowest step counts, and the shortest round, that of the worker for which the others have waited. So
    all compute the same number, whatever their clocks show; it begins at 1.

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
        self._before: tuple[float, int] | None = None
        """Seconds of steps until the last round, and its step; None before this worker's first."""
        self._exchange_s = 0.0
        """Seconds of the last all-gather, and of the round under way."""

    def is_due(self, step: int) -> bool:
        """Return True if a round follows this step."""
        return step >= self._due_at

    def round_begins(self) -> None:
        """Begin to measure a round."""
        self._exchange_s -= self._exchanging()

    def round_ended(self, step: int) -> None:
        """Agree on the step of the next round, after a round at this step."""
        self._exchange_s += self._exchanging()
        before, self._before = self._before, (self._timer.spent["computing"] + self._timer.spent["loading"], step)
        step_s = math.nan
        if before is not None and step > before[1]:
            step_s = (self._before[0] - before[0]) / (step - before[1])
        began = self._exchanging()
        with self._timer.on("exchanging"):
            replies = self._transport.all_gather_bytes(_MEASURED.pack(step_s, self._exchange_s))
        self._exchange_s = self._exchanging() - began
        found = [measured for one in replies if not math.isnan((measured := _MEASURED.unpack(one))[0])]
        if found:
            slowest, shortest = max(step for step, _ in found), min(exchange for _, exchange in found)
            self._steps = self._every.steps(slowest, shortest, self._steps)
        self.number += 1
        self._due_at = step + self._steps

    def _exchanging(self) -> float:
        return self._timer.spent["exchanging"] + self._timer.spent["encoding"]

    def state(self) -> list[int]:
        """Return the state, which is the same at all workers."""
        return [self._steps, self._due_at, self.number]

    def load(self, state: list[int]) -> None:
        """Continue from a state."""
        self._steps, self._due_at, self.number = state
