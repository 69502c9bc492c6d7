"""Where a worker's time goes: every moment belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from stretto.events import PHASES


class Stopwatch:
    """Books the time since the last switch to the phase that was on. The phases therefore sum to the whole."""

    def __init__(self, clock: Callable[[], float], since: float | None = None) -> None:
        self._clock = clock
        self._since = clock() if since is None else since
        self.phase = "other"
        self.spent = dict.fromkeys(PHASES, 0.0)

    def switch(self, phase: str) -> str:
        """Go over to a phase; returns the one that was on."""
        now = self._clock()
        self.spent[self.phase] += now - self._since
        self._since = now
        before, self.phase = self.phase, phase
        return before

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Be in a phase for a while."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Book time that turned out to belong elsewhere."""
        seconds = min(max(seconds, 0.0), self.spent[source])
        self.spent[source] -= seconds
        self.spent[target] += seconds

    def split(self) -> dict[str, float]:
        """Seconds of each phase until now."""
        self.switch(self.phase)
        return {phase: round(seconds, 6) for phase, seconds in self.spent.items()}


class Pace(Protocol):
    """Makes the computing of a worker last as long as it should."""

    def begin_pass(self) -> None:
        """A pass over the loader begins."""
        ...

    def begin(self) -> None:
        """A hand begins that has a batch for this worker."""
        ...

    def go_on(self, progress: float = 1.0) -> None:
        """So much of the hand's computing is done."""
        ...


class Stretch:
    """Makes a worker slow on purpose: after some computing it sleeps, so that both together last `factor` as long."""

    def __init__(self, factor: float, watch: Stopwatch, sleep: Callable[[float], None]) -> None:
        self._factor, self._watch, self._sleep = factor, watch, sleep
        self._until = 0.0

    def begin_pass(self) -> None:
        """Time passes by itself."""

    def begin(self) -> None:
        """Time passes by itself."""

    def go_on(self, progress: float = 1.0) -> None:
        """Sleep for what was computed since the last time."""
        if self._factor == 1.0:
            return
        with self._watch.on("computing"):
            self._sleep((self._watch.spent["computing"] - self._until) * (self._factor - 1))
        self._until = self._watch.spent["computing"]
