"""The local steps between two rounds of one optimizer: as typed, or as the workers agree on them by measured times."""

from __future__ import annotations

import math
import struct
from typing import Protocol

from stretto.recipe.when import overhead, together
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.transport.interface import Transport

_MEASURED = struct.Struct("<dd")


class RoundInterval(Protocol):
    """Decides after which steps of an optimizer a round follows, alike at all workers."""

    def is_due(self, step: int) -> bool:
        """Return True if a round follows this step, counted from 1."""
        ...

    def round_begins(self, step: int) -> int:
        """Return the number of the round that follows this step, counted from 1; the round begins."""
        ...

    def round_ended(self, step: int) -> None:
        """Note the end of the round after this step."""
        ...

    def state(self) -> list[int]:
        """Return the state, which is the same at all workers."""
        ...

    def load(self, state: list[int]) -> None:
        """Continue from a state of the same kind of interval; another one is left out."""
        ...


def interval_of(when: together, transport: Transport, timer: Stopwatch, events: EventWriter) -> RoundInterval:
    """Return the interval between rounds that a recipe asks for."""
    if isinstance(when.every, overhead):
        return AgreedInterval(when.every, when.after, transport, timer, events)
    return TypedInterval(when.every, when.after)


class TypedInterval:
    """Rounds after each step until step `after`, and then after every k-th."""

    def __init__(self, every: int, after: int = 0) -> None:
        self._every, self._after = every, after

    def is_due(self, step: int) -> bool:
        """Return True if a round follows this step.

        >>> [step for step in range(1, 11) if TypedInterval(3, after=2).is_due(step)]
        [1, 2, 5, 8]
        """
        return step <= self._after or (step - self._after) % self._every == 0

    def round_begins(self, step: int) -> int:
        """Return the number of the round.

        >>> [TypedInterval(3, after=2).round_begins(step) for step in (1, 2, 5, 8)]
        [1, 2, 3, 4]
        """
        return min(step, self._after) + max(step - self._after, 0) // self._every

    def round_ended(self, step: int) -> None:
        """Do nothing: the next round follows from the step."""

    def state(self) -> list[int]:
        """Return nothing."""
        return []

    def load(self, state: list[int]) -> None:
        """Do nothing."""


class AgreedInterval:
    """Rounds after each step until step `after`, and then after a number of steps on which the workers agree.

    After each round all workers gather their seconds of a step since the last one, and of the round with the all-gather
    before it. The slowest step counts, and the shortest round, that of the worker for which the others have waited. So
    all compute the same number, whatever their clocks show; it begins at 1.

        worker 0   | step, step, round | all-gather: times | step, step, step, round | ...
        worker 1   | step, step, round | all-gather: times | step, step, step, round | ...

    The first worker writes an event when the number changes.
    """

    def __init__(
        self, every: overhead, after: int, transport: Transport, timer: Stopwatch, events: EventWriter
    ) -> None:
        self._every, self._after, self._transport = every, after, transport
        self._timer, self._events = timer, events
        self._steps = 1
        self._due_at = 1
        """Step after which the next round follows."""
        self._number = 1
        """Number of the next round."""
        self._before: tuple[float, int] | None = None
        """Seconds of steps until the last round, and its step; None before this worker's first."""
        self._exchange_s = 0.0
        """Seconds of the last all-gather, and of the round under way."""

    def is_due(self, step: int) -> bool:
        """Return True if a round follows this step."""
        return step <= self._after or step >= self._due_at

    def round_begins(self, step: int) -> int:
        """Return the number of the round, and begin to measure it."""
        self._exchange_s -= self._exchanging()
        return self._number

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
            self._agree(step, max(seconds for seconds, _ in found), min(exchange for _, exchange in found))
        self._number += 1
        self._due_at = step + self._steps

    def _agree(self, step: int, step_s: float, exchange_s: float) -> None:
        before, self._steps = self._steps, self._every.steps(step_s, exchange_s, self._steps)
        if self._steps != before and self._transport.number == min(self._transport.members):
            self._events.write("interval", step=step, local_steps=self._steps, step_s=step_s, exchange_s=exchange_s)

    def _exchanging(self) -> float:
        return self._timer.spent["exchanging"] + self._timer.spent["encoding"]

    def state(self) -> list[int]:
        """Return the state, which is the same at all workers."""
        return [self._steps, self._due_at, self._number]

    def load(self, state: list[int]) -> None:
        """Continue from a state; begin at 1 after a recipe with a typed number of steps."""
        if state:
            self._steps, self._due_at, self._number = state
