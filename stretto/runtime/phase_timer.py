"""Phase timer: every moment of a worker belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from stretto.events import PHASES


class Stopwatch:
    """Timer that adds the time since the last switch to the current phase, so that the phases sum to the total."""

    def __init__(self, clock: Callable[[], float], since: float | None = None) -> None:
        self._clock = clock
        self.read_at = clock() if since is None else since
        """Reading of the clock at the last switch: the phases sum to the time until then."""
        self.phase = "other"
        self.spent = dict.fromkeys(PHASES, 0.0)

    def switch(self, phase: str) -> str:
        """Switch to a phase and return the previous one."""
        now = self._clock()
        self.spent[self.phase] += now - self.read_at
        self.read_at = now
        previous_phase, self.phase = self.phase, phase
        return previous_phase

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Switch to a phase for the duration of the block."""
        previous_phase = self.switch(phase)
        try:
            yield
        finally:
            self.switch(previous_phase)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move time from one phase to another."""
        seconds = min(max(seconds, 0.0), self.spent[source])
        self.spent[source] -= seconds
        self.spent[target] += seconds

    def split(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        self.switch(self.phase)
        return {phase: round(seconds, 6) for phase, seconds in self.spent.items()}


class Pace(Protocol):
    """Controls how long the computation of a worker lasts."""

    def begin_epoch(self) -> None:
        """Note the start of an epoch."""
        ...

    def begin(self, samples: int) -> None:
        """Note the start of a global step in which this worker has a batch of this number of samples."""
        ...

    def go_on(self, progress: float = 1.0) -> None:
        """Note that this share of the computation of the step is done."""
        ...


class Stretch:
    """Slows a worker down: after some computation it sleeps, so that both together last `factor` times as long."""

    def __init__(self, factor: float, watch: Stopwatch, sleep: Callable[[float], None]) -> None:
        self._factor, self._watch, self._sleep = factor, watch, sleep
        self._until = 0.0

    def begin_epoch(self) -> None:
        """Do nothing: real time passes."""

    def begin(self, samples: int) -> None:
        """Do nothing: real time passes."""

    def go_on(self, progress: float = 1.0) -> None:
        """Sleep in proportion to the computation since the last call."""
        if self._factor == 1.0:
            return
        with self._watch.on("computing"):
            self._sleep((self._watch.spent["computing"] - self._until) * (self._factor - 1))
        self._until = self._watch.spent["computing"]
